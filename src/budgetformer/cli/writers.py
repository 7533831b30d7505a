"""Answers to rows of a file: JSON lines, CSV or parquet, one row for each input row and in its order."""

import contextlib
import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from budgetformer.errors import UsageError
from budgetformer.outputs import write_aside

COLUMNS = ("id", "label", "score", "scores", "heads_used", "budget", "error")
Row = dict[str, Any]
Write = Callable[[Sequence[Row]], None]


def format_of(output: str, asked: str | None) -> str:
    """The format asked for, else the one of the suffix, else JSON lines.

    Raises:
        UsageError: parquet on stdout.
    """
    known = {".csv": "csv", ".parquet": "parquet"}
    name = asked or known.get(Path(output).suffix.lower(), "jsonl")
    if name == "parquet" and output == "-":
        raise UsageError("format is 'parquet', which is no text; give --output FILE")
    return name


def header(format: str) -> str:
    """What stands above the rows of a text format."""
    return ",".join(COLUMNS) + "\n" if format == "csv" else ""


def text(rows: Sequence[Row], format: str) -> str:
    """Rows in a text format, "jsonl" or "csv"; each ends with a line end."""
    if format == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    held = io.StringIO(newline="")
    csv.writer(held, lineterminator="\n").writerows([_safe(value) for value in _flat(row)] for row in rows)
    return held.getvalue()


@contextlib.contextmanager
def open_stdout(format: str) -> Iterator[Write]:
    """Give a function that writes rows to stdout at once."""

    def write(rows: Sequence[Row]) -> None:
        sys.stdout.write(text(rows, format))
        sys.stdout.flush()

    sys.stdout.write(header(format))
    yield write


@contextlib.contextmanager
def open_parquet(output: str) -> Iterator[Write]:
    """Give a function that writes rows; the file appears under its name when all is written.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    string = pa.string()
    types = (string, string, pa.float64(), string, pa.int64(), pa.float64(), string)
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)))
    with write_aside(output) as path, pq.ParquetWriter(path, schema) as file:

        def write(rows: Sequence[Row]) -> None:
            columns = zip(*map(_flat, rows), strict=True) if rows else [[]] * len(COLUMNS)
            arrays = [pa.array(list(column), type=type) for column, type in zip(columns, types, strict=True)]
            file.write_table(pa.Table.from_arrays(arrays, schema=schema))

        yield write


def _flat(row: Row) -> list[Any]:
    """The cells of a table; the scores of all classes are one JSON text."""
    cells = {**row, "scores": None if row["scores"] is None else json.dumps(row["scores"], ensure_ascii=False)}
    return [cells[name] for name in COLUMNS]


def _safe(value: Any) -> Any:
    """A cell that a spreadsheet does not run: an apostrophe before what would begin a formula. Numbers stay."""
    if isinstance(value, str) and value[:1] in set("=+-@\t\r") and not re.fullmatch(r"[+-]?[\d.]+", value):
        return "'" + value
    return value
