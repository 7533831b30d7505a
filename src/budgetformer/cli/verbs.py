"""What the verbs that train and use a model do with their settings; every function returns the exit code."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.cli.reading import reading
from budgetformer.cli.speaking import echo_unless, progress_bar, quieten_libraries, say_bad, say_columns, show
from budgetformer.errors import DataError, UsageError
from budgetformer.outputs import check_output_file, check_output_folder, write_aside
from budgetformer.settings import EvaluateSettings, InspectSettings, PredictSettings, TrainSettings

if TYPE_CHECKING:
    from budgetformer.cli.writers import Write
    from budgetformer.data import Rows
    from budgetformer.predict import Predictor

Sources = Mapping[str, str]
WINDOW = 1024  # rows that are read, answered and written together: many batches, little memory


def train(settings: TrainSettings, sources: Sources) -> int:
    """Train, and end with the table."""
    check_output_folder(settings.output_dir, overwrite=settings.overwrite, resume=settings.resume is not None)
    first = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    echo = echo_unless(settings.quiet or not first)
    chosen = [f"{name}={getattr(settings, name)} ({source})" for name, source in sources.items() if source != "default"]
    echo("settings: " + ", ".join(chosen))
    quieten_libraries()
    from budgetformer import report
    from budgetformer.training.job import train as run

    metrics = run(settings, echo)
    if first:
        show(metrics if settings.json else report.table(metrics))
    return 0


def evaluate(settings: EvaluateSettings, sources: Sources) -> int:
    """Measure a model on labelled rows."""
    from budgetformer.data import read_rows, write_ledger

    if settings.bad_rows is not None:
        check_output_file(settings.bad_rows, overwrite=settings.overwrite)
    predictor = predictor_for(settings)
    echo = echo_unless(settings.quiet)
    options = reading(settings, settings.data)
    rows = read_rows(settings.data, require_labels=True, label_column=settings.label_column, **options)
    say_columns(rows, echo)
    say_bad(rows.bad, len(rows), echo)
    if settings.bad_rows is not None:
        write_ledger(rows.bad, settings.bad_rows)
    quieten_libraries()
    from budgetformer import report
    from budgetformer.evaluate import evaluate as measure

    with progress_bar(settings.quiet) as step:
        metrics = measure(predictor, rows.good(), progress=step)
    metrics["left_out"] = len(rows.bad)
    data = {"test_rows": len(rows) - len(rows.bad), "left_out": len(rows.bad)}
    show(metrics if settings.json else report.table({"budgeted": metrics, "data": data}))
    return 0


def predict(settings: PredictSettings, sources: Sources, texts: Sequence[str] | None = None) -> int:
    """Classify the rows of a source, or texts from the command line."""
    if settings.engine == "ray":
        from budgetformer.cli import many

        return many.predict(settings, texts)
    from budgetformer.cli.writers import format_of

    if bool(texts) == (settings.input is not None):
        state = "both are given" if texts else "neither is given"
        raise UsageError(
            f"texts and input: {state}; give texts as arguments, or --input FILE (- for JSON lines on stdin)"
        )
    form = format_of(settings.output, settings.format)
    if settings.resume:
        _check_resume(settings, form)
    if settings.output != "-":
        check_output_file(settings.output, overwrite=settings.overwrite)
        if settings.input is not None and _same_file(settings.input, settings.output):
            raise UsageError(f"output is {settings.output!r}, the input itself; give another --output")
    predictor = predictor_for(settings)
    echo = echo_unless(settings.quiet)
    rows_seen = failed = cut = 0
    with (
        _open(settings, predictor, texts, form) as (write, answered),
        progress_bar(settings.quiet or settings.output == "-") as step,
    ):
        for rows in windows(settings, texts):
            if rows_seen == 0 and not texts:
                say_columns(rows, echo)
            if rows_seen < answered:
                rows_seen += len(rows)
                continue
            answers = predictor.predict(rows, first_number=rows_seen + 1)
            write([answer.row() for answer in answers])
            rows_seen += len(answers)
            failed += sum(answer.error is not None for answer in answers)
            cut += sum(answer.truncated for answer in answers)
            step(len(answers))
    new = rows_seen - answered
    if cut:
        echo(f"{cut:,} of {new:,} texts were longer than {predictor.engine.max_length} tokens, and cut")
    if failed:
        echo(f"{failed:,} of {new:,} rows have an error instead of an answer")
    if failed == rows_seen:
        raise DataError(f"none of the {rows_seen:,} rows could be classified; each row of the output says why")
    return 0


def inspect(settings: InspectSettings, sources: Sources) -> int:
    """Show what one text activates."""
    from budgetformer.report import picture

    if settings.png is not None:
        check_output_file(settings.png, overwrite=settings.overwrite)
    predictor = predictor_for(settings)
    inspection = predictor.inspect(settings.text, settings.pair)
    if settings.png is not None:
        with write_aside(settings.png) as path:
            picture.png(inspection, path)
    if settings.json:
        from dataclasses import asdict

        show({**asdict(inspection), "png": settings.png})
    else:
        show(picture.terminal(inspection))
    return 0


def predictor_for(settings: EvaluateSettings | PredictSettings | InspectSettings) -> "Predictor":
    """The model that the settings name, ready for use; a note says what computes it."""
    from budgetformer.predict import Predictor

    options: dict[str, Any] = {}
    if not isinstance(settings, InspectSettings):
        options |= {"batch_tokens": settings.batch_tokens, "label_separator": settings.label_separator}
    if isinstance(settings, PredictSettings):
        options["top"] = settings.top
    calibrated = isinstance(settings.budget, str)
    if calibrated and settings.margin is not None:
        raise UsageError("budget is 'calibrated', which has a margin of its own; leave --margin out")
    predictor = Predictor.load(
        settings.model,
        budget=None if isinstance(settings.budget, str) else settings.budget,
        margin=settings.margin,
        max_length=settings.max_length,
        dtype=settings.dtype,
        path=settings.path,
        threads=settings.threads,
        **options,
    )
    echo = echo_unless(settings.quiet)
    echo(predictor.engine.note)
    return _calibrated(predictor, echo) if calibrated else predictor


def _calibrated(predictor: "Predictor", echo: Callable[[str], None]) -> "Predictor":
    """The same model, answering in the way that was calibrated; a note where the promise does not reach."""
    engine = predictor.engine
    found = engine.saved.promised()
    note = found.beyond(engine.path.dtype, engine.max_length)
    if note is not None:
        echo(note)
    return dataclasses.replace(predictor, budget=found.way.budget, margin=found.way.margin)


def _check_resume(settings: PredictSettings, form: str) -> None:
    if settings.output == "-":
        raise UsageError("resume: what was written to stdout is not known; give --output FILE")
    if settings.input == "-":
        raise UsageError("resume: stdin cannot be read again from its first row; give --input FILE")
    if form == "parquet":
        raise UsageError("resume: a parquet file is unreadable until it is whole; give --format jsonl or csv")


def _open(
    settings: PredictSettings, predictor: "Predictor", texts: Sequence[str] | None, form: str
) -> "contextlib.AbstractContextManager[tuple[Write, int]]":
    """What the answers are written to: a function for rows, and how many of the input's rows are there already."""
    from budgetformer.cli import partial, writers

    if settings.output == "-" or form == "parquet":
        opened = writers.open_stdout(form) if settings.output == "-" else writers.open_parquet(settings.output)
        return _from_the_start(opened)
    settings = dataclasses.replace(settings, budget=predictor.budget, margin=predictor.margin)  # what they stand for
    run = None if settings.input == "-" else partial.identity(settings, predictor.engine, texts, form)
    echo = echo_unless(settings.quiet)
    return partial.open_partial(settings.output, form, run, window=WINDOW, resume=settings.resume, echo=echo)


@contextlib.contextmanager
def _from_the_start(opened: "contextlib.AbstractContextManager[Write]") -> "Iterator[tuple[Write, int]]":
    with opened as write:
        yield write, 0


def windows(settings: PredictSettings, texts: Sequence[str] | None) -> "Iterator[Rows]":
    """The rows of `settings.input`, or the texts, so many at a time."""
    from budgetformer.data import BadRow, Rows, iter_rows

    if not texts:
        assert settings.input is not None
        options = {"id_column": settings.id_column, "batch_rows": WINDOW, **reading(settings, settings.input)}
        yield from iter_rows(settings.input, require_labels=False, **options)
        return
    numbers = list(range(1, len(texts) + 1))
    bad = [
        BadRow(source="arguments", line=number, reason="the text is empty or white space only")
        for number, text in zip(numbers, texts, strict=True)
        if not text.strip()
    ]
    usable = [text if text.strip() else None for text in texts]
    yield Rows(source="arguments", texts=usable, pairs=None, labels=None, ids=None, lines=numbers, bad=bad, columns={})


def _same_file(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and os.path.samefile(one, other)
