"""What each verb of the command line does with its settings; every function returns the exit code."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.errors import DataError, UsageError
from budgetformer.outputs import check_output_file, check_output_folder, clear_output_folder, write_aside
from budgetformer.settings import (
    ConvertSettings,
    EvaluateSettings,
    InspectSettings,
    PredictSettings,
    TrainSettings,
    locate_model,
)

if TYPE_CHECKING:
    from budgetformer.data import BadRow, Rows
    from budgetformer.predict import Predictor

Sources = Mapping[str, str]
# Rows read before texts of like length are put together: enough for full batches, little memory.
WINDOW = 32


def train(settings: TrainSettings, sources: Sources) -> int:
    """Train, and end with the table."""
    check_output_folder(settings.output_dir, overwrite=settings.overwrite, resume=settings.resume is not None)
    first = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    echo = _echo(settings.quiet or not first)
    chosen = [f"{name}={getattr(settings, name)} ({source})" for name, source in sources.items() if source != "default"]
    echo("settings: " + ", ".join(chosen))
    _quieten_libraries()
    from budgetformer import report
    from budgetformer.training.job import train as run

    metrics = run(settings, echo)
    if first:
        _show(metrics if settings.json else report.table(metrics))
    return 0


def evaluate(settings: EvaluateSettings, sources: Sources) -> int:
    """Measure a model on labelled rows."""
    from budgetformer.data import read_rows, write_ledger

    if settings.bad_rows is not None:
        check_output_file(settings.bad_rows, overwrite=settings.overwrite)
    predictor = _predictor(settings)
    echo = _echo(settings.quiet)
    rows = read_rows(settings.data, require_labels=True, label_column=settings.label_column, **_reading(settings))
    _say_columns(rows, echo)
    if rows.bad:
        _say_bad(rows.bad, len(rows), echo)
    if settings.bad_rows is not None:
        write_ledger(rows.bad, settings.bad_rows)
    from budgetformer import report
    from budgetformer.metrics import evaluate as measure

    encoded = _encode(rows.good(), predictor, settings.label_separator)
    with _progress(settings.quiet) as step:
        metrics = measure(
            predictor.model, encoded, batch_size=settings.batch_size, budget=settings.budget, progress=step
        )
    metrics["left_out"] = len(rows.bad)
    data = {"test_rows": len(rows) - len(rows.bad), "left_out": len(rows.bad)}
    _show(metrics if settings.json else report.table({"budgeted": metrics, "data": data}))
    return 0


def predict(settings: PredictSettings, sources: Sources, texts: Sequence[str] | None = None) -> int:
    """Classify the rows of a source, or texts from the command line."""
    from budgetformer.cli.writers import format_of, open_writer

    if bool(texts) == (settings.input is not None):
        state = "both are given" if texts else "neither is given"
        raise UsageError(
            f"texts and input: {state}; give texts as arguments, or --input FILE (- for JSON lines on stdin)"
        )
    form = format_of(settings.output, settings.format)
    if settings.output != "-":
        check_output_file(settings.output, overwrite=settings.overwrite)
        if settings.input is not None and _same_file(settings.input, settings.output):
            raise UsageError(f"output is {settings.output!r}, the input itself; give another --output")
    predictor = _predictor(settings)
    echo = _echo(settings.quiet)
    rows_seen = failed = cut = 0
    with open_writer(settings.output, form) as write, _progress(settings.quiet or settings.output == "-") as step:
        for rows in _windows(settings, texts):
            if rows_seen == 0 and not texts:
                _say_columns(rows, echo)
            answers = predictor.predict(rows, first_number=rows_seen + 1)
            write([answer.row() for answer in answers])
            rows_seen += len(answers)
            failed += sum(answer.error is not None for answer in answers)
            cut += sum(answer.truncated for answer in answers)
            step(len(answers))
    if cut:
        echo(f"{cut:,} of {rows_seen:,} texts were longer than {predictor.max_length} tokens, and cut")
    if failed:
        echo(f"{failed:,} of {rows_seen:,} rows have an error instead of an answer")
    if failed == rows_seen:
        raise DataError(f"none of the {rows_seen:,} rows could be classified; each row of the output says why")
    return 0


def inspect(settings: InspectSettings, sources: Sources) -> int:
    """Show what one text activates."""
    from budgetformer.report import picture

    if settings.png is not None:
        check_output_file(settings.png, overwrite=settings.overwrite)
    predictor = _predictor(settings)
    inspection = predictor.inspect(settings.text, settings.pair)
    if settings.png is not None:
        with write_aside(settings.png) as path:
            picture.png(inspection, path)
    if settings.json:
        from dataclasses import asdict

        _show({**asdict(inspection), "png": settings.png})
    else:
        _show(picture.terminal(inspection))
    return 0


def convert(settings: ConvertSettings, sources: Sources) -> int:
    """Convert a dense checkpoint and show what was checked."""
    check_output_folder(settings.output_dir, overwrite=settings.overwrite)
    source = locate_model(settings.source)
    _quieten_libraries()
    from budgetformer.convert import convert_checkpoint

    output = Path(settings.output_dir)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Made aside, so that a checkpoint that cannot be converted costs nothing.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as aside:
        report = convert_checkpoint(source, Path(aside) / "model")
        clear_output_folder(output, overwrite=settings.overwrite).rmdir()
        (Path(aside) / "model").rename(output)
    report["output"] = settings.output_dir
    if settings.json:
        _show(report)
    else:
        for name, value in report.items():
            print(f"{name:>16}  {value}")
    return 0


def _predictor(settings: EvaluateSettings | PredictSettings | InspectSettings) -> "Predictor":
    """The model that the settings name, ready for use."""
    from budgetformer.folder import check_model_folder

    check_model_folder(settings.model)  # before torch is loaded: a wrong path is answered at once
    _quieten_libraries()
    import torch

    from budgetformer.predict import Predictor

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    options: dict[str, Any] = {}
    if not isinstance(settings, InspectSettings):
        options["batch_size"] = settings.batch_size
    if isinstance(settings, PredictSettings):
        options |= {"label_separator": settings.label_separator, "top": settings.top}
    return Predictor.load(settings.model, max_length=settings.max_length, budget=settings.budget, **options)


def _encode(rows: "Rows", predictor: "Predictor", label_separator: str) -> Any:
    """The tokens of rows beside their labels' places among the model's."""
    from budgetformer.data import match_labels
    from budgetformer.predict import MULTI_LABEL
    from budgetformer.text import encode

    several = predictor.model.config.problem_type == MULTI_LABEL
    where: dict[str, Any] = {"lines": rows.lines, "source": rows.source}
    if several:
        where["label_separator"] = label_separator
    labels = match_labels(rows.labels or [], predictor.labels, **where)
    texts = [text or "" for text in rows.texts]
    pairs = None if rows.pairs is None else [pair or "" for pair in rows.pairs]
    return encode(predictor.tokenizer, texts, pairs, labels, max_length=predictor.max_length)


def _windows(settings: PredictSettings, texts: Sequence[str] | None) -> "Iterator[Rows]":
    from budgetformer.data import BadRow, Rows, iter_rows

    if not texts:
        assert settings.input is not None
        rows_at_once = WINDOW * settings.batch_size
        yield from iter_rows(
            settings.input,
            require_labels=False,
            id_column=settings.id_column,
            batch_rows=rows_at_once,
            **_reading(settings),
        )
        return
    numbers = list(range(1, len(texts) + 1))
    bad = [
        BadRow(source="arguments", line=number, reason="the text is empty or white space only")
        for number, text in zip(numbers, texts, strict=True)
        if not text.strip()
    ]
    usable = [text if text.strip() else None for text in texts]
    yield Rows(source="arguments", texts=usable, pairs=None, labels=None, ids=None, lines=numbers, bad=bad, columns={})


def _reading(settings: EvaluateSettings | PredictSettings) -> dict[str, Any]:
    """How to read the source; `demo` and hub data are made of splits, of which `test` is the one to look at."""
    source = settings.data if isinstance(settings, EvaluateSettings) else settings.input or ""
    in_splits = source == "demo" or source.startswith("hf:")
    return {
        "split": settings.split or ("test" if in_splits else None),
        "text_column": settings.text_column,
        "text_pair_column": settings.text_pair_column,
        "encoding": settings.encoding,
        "delimiter": settings.delimiter,
        "label_separator": settings.label_separator,
    }


def _same_file(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and os.path.samefile(one, other)


def _echo(quiet: bool) -> Callable[[str], None]:
    """Notes go to stderr, or nowhere."""

    def echo(message: str) -> None:
        if not quiet:
            print(message, file=sys.stderr, flush=True)

    return echo


def _say_columns(rows: "Rows", echo: Callable[[str], None]) -> None:
    if rows.columns:
        echo(f"{rows.source}: columns " + ", ".join(f"{role}={name}" for role, name in rows.columns.items()))


def _say_bad(bad: "Sequence[BadRow]", total: int, echo: Callable[[str], None]) -> None:
    first = bad[0]
    echo(f"{len(bad):,} of {total:,} rows left out; the first: {first.source}, line {first.line}: {first.reason}")


@contextlib.contextmanager
def _progress(off: bool) -> "Iterator[Callable[[int], object]]":
    """A bar on stderr where a person looks at it; the number of rows is not known, so it counts."""
    from tqdm import tqdm

    with tqdm(unit=" rows", disable=off or not sys.stderr.isatty(), file=sys.stderr) as bar:
        yield bar.update


def _quieten_libraries() -> None:
    """What transformers says on loading is for developers: no bars, and no notes unless asked by its own variable."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()


def _show(result: Any) -> None:
    """A result on stdout: JSON, or something for people to look at."""
    if isinstance(result, dict):
        print(json.dumps(result, ensure_ascii=False))
        return
    from rich.console import Console

    Console(file=sys.stdout, highlight=False).print(result)
