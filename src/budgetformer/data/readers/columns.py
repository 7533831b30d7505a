"""Which column of a source is the text, the label and so on: as named, or one of a few usual names, never a guess."""

import difflib
from collections.abc import Sequence

from budgetformer.data.readers import Reader
from budgetformer.errors import DataError, UsageError

DEFAULT_COLUMNS = {
    "text": ("text", "sentence", "content"),
    "label": ("label", "labels", "target", "class"),
    "text_pair": ("text_pair",),
    "id": ("id",),
    "split": ("split",),
}
"""The names each column is looked for under, the first that is there wins; `sentence1` and `sentence2` are a pair."""


def pick_columns(reader: Reader, given: dict[str, str | None], *, labels: bool, split: bool) -> dict[str, str]:
    """The column for each role: "text", "text_pair", "label", "id" and "split", the last three only where there is one.

    Args:
        reader: the opened source.
        given: the columns the caller named, by role; None where the usual names are to be tried.
        labels: a label is wanted.
        split: a split is wanted.

    Raises:
        DataError: a column that was named or is needed is not there; the message lists the columns and the nearest.
        UsageError: one column is to be two things.
    """
    found: dict[str, str] = {}
    wanted = ["text", "text_pair", *(["label"] if labels else []), "id", *(["split"] if split else [])]
    for role in wanted:
        name = given.get(role)
        if name is not None and name not in reader.columns:
            raise DataError(_missing(reader, role, (name,)))
        column = name or next((c for c in DEFAULT_COLUMNS[role] if c in reader.columns), None)
        if column is not None:
            found[role] = column
    if "text" not in found and {"sentence1", "sentence2"} <= set(reader.columns):
        found = {"text": "sentence1", "text_pair": "sentence2"} | found
    for role in wanted:
        if role in ("text", "label", "split") and role not in found:
            raise DataError(_missing(reader, role, DEFAULT_COLUMNS[role]))
    twice = next((r for r in ("text_pair", "label") if r in found and found[r] == found["text"]), None)
    if twice is not None:
        raise UsageError(f"column {found[twice]!r} cannot be both the text and the {twice}; name another one")
    return {role: found[role] for role in wanted if role in found}


def _missing(reader: Reader, role: str, names: Sequence[str]) -> str:
    columns = [column[:40] for column in reader.columns]
    near = max(columns, key=lambda column: _likeness(column, names), default="")
    hint = f" (did you mean {near!r}?)" if _likeness(near, names) >= 0.6 else ""
    listed = ", ".join(map(repr, columns[:12])) + (", ..." if len(columns) > 12 else "")
    flag = "; add it" if role == "split" else f"; name it with --{role.replace('_', '-')}-column"
    return f"{reader.name}: no column {' or '.join(map(repr, names))} among {listed}{hint}{flag}"


def _likeness(column: str, names: Sequence[str]) -> float:
    return max(difflib.SequenceMatcher(None, column.strip().lower(), name.lower()).ratio() for name in names)
