"""Files of texts and labels as rows: what is read, what is refused, and what is written down about bad rows.

Every cell is read as the string it is. One input row gives one entry in `Rows`, in order, bad or not; a bad row has no
text, stands in `Rows.bad` with its line and reason, and never stops the others. What each case does:

====================================  ==================================================================================
input                                 behaviour
====================================  ==================================================================================
cell `NA`, `null`, `None`, `nan`      kept, they are words
empty cell, `""`, JSON null           missing: a bad row if it is the text (or second text), or a label that is needed
label `007`, `010`                    kept as written
label `True`, `False`                 kept as written; booleans of JSON and parquet are "true" and "false"
text `123`, `4.5`, `1.10`             kept as written (JSON too); a parquet float 1.0 is "1", NaN is missing
bytes that are not UTF-8              the file is refused with offset and line, and `--encoding` named
row too long, row too short           a bad row
quote that never closes               the file is refused with the line where it opens (any reader else swallows rows)
two columns of one name               the file is refused (columns without a name may repeat)
header only                           the file is refused, like an empty one
`;` (or tab, `|`) in the only column  the file is refused and `--delimiter` named
byte order mark                       taken off
NUL byte                              kept; refused in CSV files over 32 MiB, where pyarrow trips over them
line end inside quotes                kept; the lines after it are still numbered right
empty line                            a row whose text is empty
text of white space only              a bad row
text of 1 MB                          kept; a row over 32 MiB may be refused
====================================  ==================================================================================
"""

import json
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

from budgetformer.data.readers import Record
from budgetformer.data.readers.cells import as_label, as_text
from budgetformer.data.readers.columns import DEFAULT_COLUMNS, pick_columns
from budgetformer.data.readers.sources import fixed_splits, has_fixed_splits, open_readers
from budgetformer.errors import BudgetFormerError, DataError
from budgetformer.outputs import write_aside


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that cannot be used: where it stands and why. Never its text, which may be private."""

    source: str
    line: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One entry for each input row, in input order.

    `texts[i]` is None where row i is bad. `pairs` is None when the data has no second texts, `labels` when no labels
    were asked for, `ids` when there is no such column. `lines` are physical lines of text files (where a row begins)
    and row numbers of tables, from 1. `columns` says what was picked: {"text": "sentence", "label": "target"}.
    """

    source: str
    texts: list[str | None]
    pairs: list[str | None] | None
    labels: list[str | None] | None
    ids: list[str | None] | None
    lines: list[int]
    bad: list[BadRow]
    columns: dict[str, str]

    def __len__(self) -> int:
        return len(self.texts)

    def good(self) -> "Rows":
        """Only the rows that have a text and, where there are labels, a label."""
        labels = self.labels
        return self.at(
            [i for i, text in enumerate(self.texts) if text is not None and (labels is None or labels[i] is not None)]
        )

    def at(self, places: Sequence[int]) -> "Rows":
        """The rows at some places; none of them may be a bad one."""

        def take(values: list[str | None] | None) -> list[str | None] | None:
            return None if values is None else [values[i] for i in places]

        return replace(
            self,
            texts=[self.texts[i] for i in places],
            pairs=take(self.pairs),
            labels=take(self.labels),
            ids=take(self.ids),
            lines=[self.lines[i] for i in places],
            bad=[],
        )


class Options(TypedDict, total=False):
    """What `read_rows` and `load_split` hand on to `iter_rows`, which has the defaults."""

    text_column: str | None
    text_pair_column: str | None
    label_column: str | None
    id_column: str | None
    encoding: str
    delimiter: str | None
    label_separator: str


def read_rows(source: str, *, require_labels: bool, split: str | None = None, **options: Unpack[Options]) -> Rows:
    """Read a whole source; arguments and errors as `iter_rows`.

    Raises:
        DataError: also when labels are required and no row at all is usable.
    """
    first, *others = iter_rows(source, split=split, require_labels=require_labels, **options)
    for more in others:
        for name in ("texts", "pairs", "labels", "ids", "lines", "bad"):
            values = getattr(first, name)
            if values is not None:
                values.extend(getattr(more, name))
    if require_labels and len(first.bad) == len(first):
        row = first.bad[0]
        raise DataError(f"{source}: none of its {len(first)} rows is usable; the first, line {row.line}: {row.reason}")
    return first


def load_split(source: str, split: str, *, require_labels: bool = True, **options: Unpack[Options]) -> Rows:
    """One split of `demo`, of `hf:NAME[:CONFIG]`, or of a file with a `split` column; otherwise as `read_rows`."""
    return read_rows(source, require_labels=require_labels, split=split, **options)


def split_names(source: str, *, encoding: str = "utf-8", delimiter: str | None = None) -> list[str]:
    """The splits a source has, in the order they turn up; empty for a file without a `split` column.

    Raises: as `iter_rows`.
    """
    splits = fixed_splits(source)
    if splits is not None:
        return splits
    with ExitStack() as stack:
        (reader,) = open_readers(source, stack, encoding=encoding, delimiter=delimiter, split=None)
        if "split" not in reader.columns:
            return []
        values = (record.values[0] for record in reader.records(["split"]) if record.values)
        return [value for value in dict.fromkeys(map(str, filter(None, values)))]


def has_labels(source: str, *, encoding: str = "utf-8", delimiter: str | None = None, split: str | None = None) -> bool:
    """Whether a source has a column of labels under one of the usual names. Standard input cannot be read twice.

    Raises: as `iter_rows`.
    """
    with ExitStack() as stack:
        readers = open_readers(source, stack, encoding=encoding, delimiter=delimiter, split=split)
        return any(name in readers[0].columns for name in DEFAULT_COLUMNS["label"])


def iter_rows(
    source: str,
    *,
    require_labels: bool,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    encoding: str = "utf-8",
    delimiter: str | None = None,
    split: str | None = None,
    label_separator: str = "|",
    batch_rows: int = 1024,
) -> Generator[Rows, None, None]:
    """Stream a source of any size, `batch_rows` rows at a time and never none.

    Args:
        source: a `.csv`, `.tsv`, `.jsonl`, `.json` (lines) or `.parquet` file, text files also with `.gz`; "-" for JSON
            lines on standard input; "demo"; or "hf:NAME[:CONFIG]".
        require_labels: a row without a label is bad. If False, labels are only read when `label_column` is given.
        text_column: and the other columns: None looks for the names in `readers/columns.py`.
        encoding: of text files.
        delimiter: of `.csv` and `.tsv` files; None is "," and a tab.
        split: only these rows. Rows that cannot be read belong to every split.
        label_separator: joins the labels where a row has a list of them.

    Raises:
        UsageError: no such source, split, encoding or delimiter; one column for two things.
        DataError: a column is missing, or the file is empty, damaged, or not what its name says.
    """
    given = {"text": text_column, "text_pair": text_pair_column, "label": label_column, "id": id_column}
    with ExitStack() as stack:
        filtered = split is not None and not has_fixed_splits(source)
        readers = open_readers(source, stack, encoding=encoding, delimiter=delimiter, split=split)
        columns = pick_columns(readers[0], given, labels=require_labels or label_column is not None, split=filtered)
        batch = _empty(source, columns)
        any_row = False
        for reader in readers:
            for record in reader.records(list(columns.values())):
                values = dict(zip(columns, record.values or (), strict=False))
                if filtered and record.values is not None and values["split"] != split:
                    continue
                any_row = True
                _append(batch, reader.name, record, values, require_labels, label_separator)
                if len(batch) == batch_rows:
                    yield batch
                    batch = _empty(source, columns)
        if len(batch):
            yield batch
        if not any_row:
            what = (
                f"has no row with split {split!r}"
                if filtered
                else "has columns but no rows; it needs a row for each text"
            )
            raise DataError(f"{source}: {what}")


def write_ledger(bad: Sequence[BadRow], path: str | Path) -> None:
    """Write bad rows as JSON lines, whole or not at all.

    Raises:
        BudgetFormerError: the disk is full or read-only.
    """
    try:
        with write_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
            for row in bad:
                entry = {"source": row.source, "line": row.line, "reason": row.reason}
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    except OSError as error:
        raise BudgetFormerError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error


def _empty(source: str, columns: dict[str, str]) -> Rows:
    def column(role: str) -> list[str | None] | None:
        return [] if role in columns else None

    return Rows(
        source=source,
        texts=[],
        pairs=column("text_pair"),
        labels=column("label"),
        ids=column("id"),
        lines=[],
        bad=[],
        columns=dict(columns),
    )


def _append(
    rows: Rows, name: str, record: Record, values: dict[str, object], require_labels: bool, separator: str
) -> None:
    reason = record.reason
    cells: dict[str, str | None] = {}
    for role, value in values.items():
        cells[role], problem = as_label(value, separator) if role == "label" else as_text(value)
        needed = role in ("text", "text_pair") or (role == "label" and require_labels)
        if problem and needed and reason is None:
            reason = f"the {rows.columns[role]!r} {problem}"
    if reason is not None:
        cells["text"] = cells["text_pair"] = None
        rows.bad.append(BadRow(source=name, line=record.line, reason=reason))
    rows.lines.append(record.line)
    rows.texts.append(cells["text"])
    for role, target in (("text_pair", rows.pairs), ("label", rows.labels), ("id", rows.ids)):
        if target is not None:
            target.append(cells.get(role))
