"""The figures that the engine is to reach, each against what a run measured: worst and middle over its cells."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rows import middle

Results = dict[str, Any]
Found = tuple[str, float]  # where, value


@dataclass(frozen=True)
class Goal:
    """`bound` is a lower bound, or an upper one where `most` is True."""

    text: str
    bound: float
    find: Callable[[Results], Iterator[Found]]
    most: bool = False


def judge(results: Results) -> list[dict[str, Any]]:
    """Each goal that the run says something about. met: the worst cell meets it; met_by_middle: the median does."""
    made = []
    for goal in GOALS:
        found = list(goal.find(results))
        if not found:
            continue
        sign = -1 if goal.most else 1
        where, worst = min(found, key=lambda one: sign * one[1])
        mid = middle([value for _, value in found])
        made.append(
            {
                "goal": goal.text,
                "bound": goal.bound,
                "most": goal.most,
                "worst": worst,
                "where": where,
                "middle": mid,
                "cells": len(found),
                "met": sign * worst >= sign * goal.bound,
                "met_by_middle": sign * mid >= sign * goal.bound,
            }
        )
    return made


def _rows(
    results: Results,
    *,
    precision: str | tuple[str, ...],
    selection: str,
    model: str | None = None,
    shapes: Callable[[str], bool] = lambda shape: shape != "stream",
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Our rows of the ids -> logits cells on one thread, with the name of the cell."""
    precisions = (precision,) if isinstance(precision, str) else precision
    for cell in results["cells"]:
        if cell["part"] != "ids" or cell["threads"] != 1 or not shapes(cell["shape"]):
            continue
        if model is not None and cell["model"] != model:
            continue
        for row in cell["rows"]:
            if (row["family"], row["selection"]) == ("ours", selection) and row["precision"] in precisions:
                yield f"{cell['model']} {cell['shape']}", row


def _values(key: str, **which: Any) -> Callable[[Results], Iterator[Found]]:
    def find(results: Results) -> Iterator[Found]:
        for where, row in _rows(results, **which):
            value = row[key]["median"] if isinstance(row[key], dict) else row[key]
            if value is not None:
                yield where, value

    return find


def _best_of(key: str, **which: Any) -> Callable[[Results], Iterator[Found]]:
    """In each cell the best of several rows."""

    def find(results: Results) -> Iterator[Found]:
        best: dict[str, float] = {}
        for where, row in _rows(results, **which):
            if row[key] is not None:
                best[where] = max(best.get(where, 0.0), row[key])
        yield from best.items()

    return find


def _long(shape: str) -> bool:
    """Every input has 128 tokens or more."""
    return shape != "stream" and int(shape.split("x")[1]) >= 128


def _many(shape: str) -> bool:
    """Enough tokens for the products to be what takes the time."""
    return shape in ("8x128", "32x32")


def _memory(results: Results) -> Iterator[Found]:
    for one in results.get("memory", []):
        base = next((row["mib"] for row in one["rows"] if row["name"] == "torch SDPA fp32"), None)
        for row in one["rows"]:
            if row["family"] == "ours" and base and row["mib"] is not None:
                yield f"{one['model']} {one['shape']} {row['name']}", row["mib"] / base


def _routers(results: Results) -> Iterator[Found]:
    for one in results.get("routers", []):
        yield f"{one['model']} {one['shape']} {one['precision']}", one["share"]["median"]


def _prototype(selection: str) -> Callable[[Results], Iterator[Found]]:
    return _values("ratio_prototype", precision=("fp32", "bf16"), selection=selection)


# fmt: off
GOALS = (
    Goal("fp32 dense / torch SDPA, minilm", 1.25,
         _values("ratio", precision="fp32", selection="dense", model="minilm")),
    Goal("fp32 dense / torch SDPA, base", 1.15,
         _values("ratio", precision="fp32", selection="dense", model="base")),
    Goal("fp32 heads 0.25 / best fp32 peer", 1.4, _values("ratio_best_peer", precision="fp32", selection="heads 0.25")),
    Goal("bf16 heads 0.25 / best bf16 peer", 1.3, _values("ratio_best_peer", precision="bf16", selection="heads 0.25")),
    Goal("int8 heads 0.25 / best int8 peer", 1.2, _values("ratio_best_peer", precision="int8", selection="heads 0.25")),
    Goal("bf16 or int8 heads+blocks 0.25 / best peer of all", 2.5,
         _best_of("ratio_any_peer", precision=("bf16", "int8"), selection="heads+blocks 0.25")),
    Goal("efficiency, heads 0.25, S >= 128", 0.95,
         _values("efficiency", precision=("fp32", "bf16", "int8"), selection="heads 0.25", shapes=_long)),
    Goal("efficiency, heads+blocks 0.25, S >= 128", 0.90,
         _values("efficiency", precision=("fp32", "bf16", "int8"), selection="heads+blocks 0.25", shapes=_long)),
    Goal("dense fp32, share of peak", 0.85, _values("of_peak", precision="fp32", selection="dense", shapes=_many)),
    Goal("dense bf16, share of peak", 0.80, _values("of_peak", precision="bf16", selection="dense", shapes=_many)),
    Goal("dense int8, share of peak", 0.75, _values("of_peak", precision="int8", selection="dense", shapes=_many)),
    Goal("stream, bf16 heads 0.25 / torch SDPA sorted", 4.0,
         _values("ratio", precision="bf16", selection="heads 0.25", shapes=lambda shape: shape == "stream")),
    Goal("extra memory / torch SDPA", 0.10, _memory, most=True),
    Goal("routers, share of the time", 0.01, _routers, most=True),
    Goal("dense / prototype", 1.0, _prototype("dense")),
    Goal("heads 0.25 / prototype", 1.0, _prototype("heads 0.25")),
    Goal("heads+blocks 0.25 / prototype", 1.0, _prototype("heads+blocks 0.25")),
)
# fmt: on
