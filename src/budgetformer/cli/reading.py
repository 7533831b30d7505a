"""How the verbs read a source of rows."""

from typing import Any

from budgetformer.settings import ConvertSettings, EvaluateSettings, PredictSettings, TuneSettings


def reading(
    settings: ConvertSettings | EvaluateSettings | PredictSettings | TuneSettings, source: str
) -> dict[str, Any]:
    """The options of `data.iter_rows` for a source; of one that comes in splits, `test` is the one to look at."""
    in_splits = source == "demo" or source.startswith("hf:")
    return {
        "split": settings.split or ("test" if in_splits else None),
        "text_column": settings.text_column,
        "text_pair_column": settings.text_pair_column,
        "encoding": settings.encoding,
        "delimiter": settings.delimiter,
        **({} if isinstance(settings, ConvertSettings) else {"label_separator": settings.label_separator}),
    }
