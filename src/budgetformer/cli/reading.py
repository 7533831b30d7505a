"""How the verbs read a source of rows."""

from typing import Any

from budgetformer.settings import (
    CalibrateSettings,
    ConvertSettings,
    EvaluateSettings,
    ExportSettings,
    PredictSettings,
    ReportSettings,
    TuneSettings,
)

Reading = (
    CalibrateSettings
    | ConvertSettings
    | EvaluateSettings
    | ExportSettings
    | PredictSettings
    | ReportSettings
    | TuneSettings
)


def reading(settings: Reading, source: str) -> dict[str, Any]:
    """The options of `data.iter_rows` for a source; of one that comes in splits, `test` is the one to look at."""
    unlabelled = isinstance(settings, CalibrateSettings | ConvertSettings | ExportSettings)
    in_splits = source == "demo" or source.startswith("hf:")
    return {
        "split": settings.split or ("test" if in_splits else None),
        "text_column": settings.text_column,
        "text_pair_column": settings.text_pair_column,
        "encoding": settings.encoding,
        "delimiter": settings.delimiter,
        **({} if unlabelled else {"label_separator": settings.label_separator}),
    }
