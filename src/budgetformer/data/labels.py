"""Labels by name: the names a training set has, and the place of each row's label among a model's names.

Data sets and models number their classes differently; a number read as a class would be silently wrong. So a label is
a string from the file to the model, and becomes a number only here, by looking its name up.
"""

import difflib
from collections.abc import Sequence
from typing import overload

from budgetformer.errors import DataError


def label_names(labels: Sequence[str | None], *, label_separator: str | None = None) -> list[str]:
    """The different labels, sorted. With a separator a row may hold several. Rows without one do not count."""
    return sorted({name for label in labels if label for name in _parts(label, label_separator)})


def check_labels(names: Sequence[str], *, multi_label: bool = False) -> None:
    """Refuse labels that leave nothing to learn.

    Raises:
        DataError: no label at all, or a single class for a model that must choose one of them.
    """
    if not names:
        raise DataError("no row has a label; check --label-column")
    if len(names) == 1 and not multi_label:
        raise DataError(f"all rows have the label {names[0]!r}; a classifier needs two classes: check --label-column")


@overload
def match_labels(
    labels: Sequence[str | None],
    names: Sequence[str],
    *,
    label_separator: None = None,
    lines: Sequence[int] | None = None,
    source: str = "data",
) -> list[int]: ...
@overload
def match_labels(
    labels: Sequence[str | None],
    names: Sequence[str],
    *,
    label_separator: str,
    lines: Sequence[int] | None = None,
    source: str = "data",
) -> list[list[int]]: ...
def match_labels(
    labels: Sequence[str | None],
    names: Sequence[str],
    *,
    label_separator: str | None = None,
    lines: Sequence[int] | None = None,
    source: str = "data",
) -> list[int] | list[list[int]]:
    """Each row's place in `names`, or with a separator its multi-hot row over `names` (all 0 for an empty label).

    Args:
        labels: one a row, as read.
        names: the model's labels in the model's order.
        label_separator: stands between the labels of a row; None when a row has one label.
        lines: the line of each row, for the message; counted from 1 when not given.
        source: what the message calls the data.

    Raises:
        DataError: a row has no label, or one that the model does not know: which, where first and how often.
    """
    place = {name: i for i, name in enumerate(names)}
    numbers = range(1, len(labels) + 1) if lines is None else lines
    found: list[list[int]] = []
    unknown: dict[str, list[int]] = {}
    for label, line in zip(labels, numbers, strict=True):
        if label is None:
            raise DataError(f"{source}: line {line}: the row has no label; leave such rows out first")
        parts = _parts(label, label_separator)
        for part in parts:
            if part not in place:
                unknown.setdefault(part, []).append(line)
        found.append([place[part] for part in parts if part in place])
    if unknown:
        raise DataError(_unknown(unknown, names, source))
    if label_separator is None:
        return [places[0] for places in found]
    return [[int(i in places) for i in range(len(names))] for places in map(frozenset, found)]


def _parts(label: str, separator: str | None) -> list[str]:
    if separator is None:
        return [label]
    return [part for piece in label.split(separator) if (part := piece.strip())]


def _unknown(unknown: dict[str, list[int]], names: Sequence[str], source: str) -> str:
    label, lines = next(iter(unknown.items()))
    rows = "1 row" if len(lines) == 1 else f"{len(lines)} rows"
    near = difflib.get_close_matches(label, names, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    others = f" ({len(unknown) - 1} more such labels)" if len(unknown) > 1 else ""
    return (
        f"{source}: line {lines[0]}: label {label!r} is none of the {len(names)} the model was trained with{hint} "
        f"It is on {rows}{others}: correct them or take them out"
    )
