"""What the verbs that make and change model folders do with their settings; every function returns the exit code."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.cli.reading import reading
from budgetformer.cli.speaking import echo_unless, quieten_libraries, say_bad, say_columns, show
from budgetformer.errors import BudgetFormerError, DataError, UsageError
from budgetformer.outputs import MODEL_TYPE, check_output_folder, clear_output_folder
from budgetformer.settings import (
    CalibrateSettings,
    ConvertSettings,
    ExportSettings,
    ReportSettings,
    TuneSettings,
    locate_model,
)

if TYPE_CHECKING:
    from budgetformer.data import Rows
    from budgetformer.engine import Engine

Sources = Mapping[str, str]


def convert(settings: ConvertSettings, sources: Sources) -> int:
    """Convert a dense checkpoint, or a trained model to another type of number, and show what was checked."""
    check_output_folder(settings.output_dir, overwrite=settings.overwrite)
    source = locate_model(settings.source)
    if settings.dtype is not None:
        report = _with_dtype(settings, Path(source), settings.dtype)
    else:
        quieten_libraries()
        from budgetformer.convert import convert_checkpoint

        with made_aside(settings) as folder:
            report = convert_checkpoint(source, folder)
    report["output"] = settings.output_dir
    if settings.json:
        show(report)
    else:
        for name, value in report.items():
            print(f"{name:>18}  {value}")
    return 0


def _with_dtype(settings: ConvertSettings, source: Path, dtype: str) -> dict[str, Any]:
    """Copy a model of ours that answers in `dtype` from now on, once its labels were compared with those of fp32."""
    from budgetformer.engine.engine import Engine
    from budgetformer.engine.saved import Saved, write_saved
    from budgetformer.engine.tuning import check_dtype
    from budgetformer.tokens import tokenise

    _refuse_dense(source, dtype)
    if source.resolve().is_relative_to(Path(settings.output_dir).resolve()):
        raise UsageError(f"output folder {settings.output_dir}: holds the model to convert; give another --output-dir")
    engine = Engine.load(source, dtype="fp32")
    rows = usable(settings, settings.check or "", require_labels=False)
    texts, pairs = texts_of(rows)
    found = check_dtype(engine, tokenise(engine.tokenizer, texts, pairs, max_length=engine.max_length), dtype)
    agreement, asked = found["agreement"], settings.min_agreement
    if agreement < asked:
        raise BudgetFormerError(
            f"{dtype}: {100 * agreement:.2f} % of {len(texts):,} texts keep their label, {100 * asked:g} % must, and "
            f"nothing was written; use {'bf16' if dtype == 'int8' else 'fp32'}, or lower --min-agreement"
        )
    with made_aside(settings) as folder:
        folder.mkdir()
        # The model and the papers of its training; the dense twin and the checkpoints beside it stay where they are.
        for path in source.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        write_saved(folder, Saved(dtype=dtype, agreement=round(agreement, 6)))
    return {"source": str(source), "output": "", "dtype": dtype, **found}


def _refuse_dense(source: Path, dtype: str) -> None:
    from budgetformer.folder import read_json_object

    config = source / "config.json"
    if not source.is_dir():
        raise UsageError(f"dtype is {dtype!r}, and {source} is no folder; give the folder of a trained model")
    if config.is_file() and read_json_object(config).get("model_type") != MODEL_TYPE:
        raise UsageError(
            f"dtype is {dtype!r}, and {source} is a dense checkpoint: it has no classifier of ours whose labels "
            "could be compared; train one first, and give the folder of the run"
        )


@contextmanager
def made_aside(settings: ConvertSettings | ExportSettings) -> Iterator[Path]:
    """Give the name of a folder to make; it becomes the output when it is done, and a failure costs nothing."""
    output = Path(settings.output_dir)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as aside:
        yield Path(aside) / "model"
        clear_output_folder(output, overwrite=settings.overwrite).rmdir()
        (Path(aside) / "model").rename(output)


def tune(settings: TuneSettings, sources: Sources) -> int:
    """Find the budget for a time or an accuracy, and keep the curve in the model folder."""
    from budgetformer import report
    from budgetformer.engine.tuning import tune as pick

    if settings.data == "-":
        raise UsageError("data is '-', which cannot be read twice; give --data FILE")
    engine = _loaded(settings)
    rows = usable(settings, settings.data, require_labels=settings.labels and _labelled(settings))
    if len(rows) > settings.limit:
        rows = rows.at([i * len(rows) // settings.limit for i in range(settings.limit)])
    texts, pairs = texts_of(rows)
    chosen = pick(
        engine,
        texts,
        _names(engine, rows, settings.label_separator),
        pairs,
        max_ms_per_text=settings.max_ms_per_text,
        max_accuracy_loss=settings.max_accuracy_loss,
    )
    saved = engine.saved
    if settings.json:
        way = {"budget": chosen.budget, "margin": chosen.margin}
        show({**way, "tuned_on": saved.tuned_on, "curve": [asdict(point) for point in saved.curve]})
        return 0
    show(report.curve(saved.curve, chosen))
    use = "no --budget: what the model learned" if chosen.budget is None else f"--budget {chosen.budget:g}"
    if chosen.margin is not None:
        use = f"--margin {chosen.margin:g}"
    print(f"\nuse {use}; the curve is kept in {settings.model}")
    return 0


def calibrate(settings: CalibrateSettings, sources: Sources) -> int:
    """Choose the cheapest way of answering that keeps the promise, and keep it in the model folder."""
    from budgetformer import report
    from budgetformer.engine.calibrating import calibrate as choose

    engine = _loaded(settings)
    texts, pairs = texts_of(usable(settings, settings.data, require_labels=False))
    found = choose(engine, texts, pairs, agree=settings.agree, confidence=settings.confidence)
    if settings.json:
        show(asdict(found))
        return 0
    show(report.ways(found))
    promise = f"at least {100 * found.agree:g} % agreement with {100 * found.confidence:g} % confidence"
    use = f"use --budget calibrated: {promise}, on texts like these"
    if found.way.budget == 1.0:
        use = f"nothing cheaper than the full model can be promised {promise}, so it is the choice"
    print(f"\n{use}; kept in {settings.model}")
    return 0


def _loaded(settings: CalibrateSettings | TuneSettings) -> "Engine":
    """The engine that the settings name; a note says what computes."""
    from budgetformer.engine.engine import Engine

    engine = Engine.load(
        settings.model,
        dtype=settings.dtype,
        path=settings.path,
        threads=settings.threads,
        max_length=settings.max_length,
        batch_tokens=settings.batch_tokens,
    )
    echo_unless(settings.quiet)(engine.note)
    return engine


def _labelled(settings: TuneSettings) -> bool:
    from budgetformer.data import has_labels

    if settings.label_column is not None:
        return True
    options = reading(settings, settings.data)
    return has_labels(settings.data, **{name: options[name] for name in ("encoding", "delimiter", "split")})


def usable(
    settings: CalibrateSettings | ConvertSettings | ExportSettings | ReportSettings | TuneSettings,
    source: str,
    *,
    require_labels: bool,
) -> "Rows":
    """The rows of a source that can be used, and a note on the others."""
    from budgetformer.data import read_rows

    options, echo = reading(settings, source), echo_unless(settings.quiet)
    if isinstance(settings, ReportSettings | TuneSettings) and require_labels:
        options["label_column"] = settings.label_column
    rows = read_rows(source, require_labels=require_labels, **options)
    say_columns(rows, echo)
    say_bad(rows.bad, len(rows), echo)
    good = rows.good()
    if not len(good):
        raise DataError(f"{source}: none of its {len(rows)} rows is usable; the first: {rows.bad[0].reason}")
    return good


def texts_of(rows: "Rows") -> tuple[list[str], list[str] | None]:
    """The texts of usable rows, and their pairs where there are any."""
    return [text or "" for text in rows.texts], None if rows.pairs is None else [pair or "" for pair in rows.pairs]


def _names(engine: "Engine", rows: "Rows", separator: str) -> Sequence[str] | Sequence[Sequence[str]] | None:
    """The class of each row, or its classes, by name; a label that the model does not know is told with its line."""
    from budgetformer.data import match_labels

    if rows.labels is None:
        return None
    known, where = engine.labels, {"lines": rows.lines, "source": rows.source}
    if not engine.multi_label:
        return [known[place] for place in match_labels(rows.labels, known, **where)]
    every = match_labels(rows.labels, known, label_separator=separator, **where)
    return [[name for name, on in zip(known, row, strict=True) if on] for row in every]
