"""Readers: every kind of source becomes the same thing, a list of column names and a stream of records of strings.

`sources.py` picks the reader, `utf8.py` checks and converts bytes, `delimited.py` reads CSV and TSV, `jsonlines.py`
reads JSON lines, `tables.py` reads parquet and Hugging Face data sets. `budgetformer.data` turns records into rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_ROW_BYTES = 32 << 20
"""Longer rows may be refused: a quote or brace that never closes must not pull a whole file into memory."""


class Record(NamedTuple):
    """One row of a source.

    `line` counts from 1: the physical line a row begins on in a text file, the row's number in a table.
    `values` are in the order in which the columns were asked for: a string, None for a missing cell, or a list of
    those where the source has lists; None in place of them all when the row could not be read, and then `reason`
    says why, without quoting the row.
    """

    line: int
    values: tuple[object, ...] | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Reader:
    """An opened source: its `columns`, and `records(wanted)`, which reads those columns once, from the first row on."""

    name: str
    columns: list[str]
    records: Callable[[Sequence[str]], Iterator[Record]]
