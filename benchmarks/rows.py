"""From seconds to the rows of the table: rates, ratios within rounds, efficiency. Arithmetic alone."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from timing import Spread, fastest, ratio


@dataclass(frozen=True)
class Facts:
    """What is known of a variant besides its time.

    flops: counted operations of one pass over the cell's inputs; None where they are not known. least: seconds that
    the pass takes at least on this machine. peak: operations per second of all threads at this precision.
    """

    family: str
    precision: str
    selection: str
    flops: float | None = None
    least: float | None = None
    peak: float | None = None


def cell_rows(
    measured: Mapping[str, Sequence[float]], facts: Mapping[str, Facts], *, tokens: int, baseline: str
) -> list[dict[str, Any]]:
    """One row for each measured variant, in their order.

    ratio: to the baseline. best_peer: the fastest peer of the same precision, and ratio_best_peer to it.
    ratio_any_peer: to the fastest peer of all. ratio_prototype: to the prototype with the same precision and
    selection. gain: to the family's own dense variant of the same precision; flops_gain: what the counted operations
    promise; efficiency: gain over promise. of_peak: counted operations per second over the peak. Ratios are medians of
    the rounds' ratios.
    """
    peers = [name for name in measured if facts[name].family == "peer"]
    best_any = fastest(measured, peers)
    made = []
    for name, seconds in measured.items():
        fact = facts[name]
        best = fastest(measured, [peer for peer in peers if facts[peer].precision == fact.precision])
        dense = _same(measured, facts, fact, family=fact.family, selection="dense") if fact.family != "peer" else None
        twin = _same(measured, facts, fact, family="prototype", selection=fact.selection)
        spread = Spread.of(seconds)
        row: dict[str, Any] = {
            "name": name,
            "family": fact.family,
            "precision": fact.precision,
            "selection": fact.selection,
            "seconds": asdict(spread),
            "rounds": list(seconds),
            "tokens_per_second": tokens / spread.median,
            "ratio": asdict(ratio(measured[baseline], seconds)) if baseline in measured else None,
            "best_peer": best,
            "ratio_best_peer": _median_ratio(measured, best, name),
            "ratio_any_peer": _median_ratio(measured, best_any, name),
            "ratio_prototype": _median_ratio(measured, twin, name) if fact.family == "ours" else None,
            "flops": fact.flops,
            "of_peak": fact.flops / spread.median / fact.peak if fact.flops and fact.peak else None,
            "ceiling_tokens_per_second": tokens / fact.least if fact.least else None,
            "gain": _median_ratio(measured, dense, name),
            "flops_gain": None,
            "efficiency": None,
        }
        if dense is not None and fact.flops and facts[dense].flops:
            row["flops_gain"] = facts[dense].flops / fact.flops
            row["efficiency"] = row["gain"] / row["flops_gain"]
        made.append(row)
    return made


def _same(
    measured: Mapping[str, Any], facts: Mapping[str, Facts], fact: Facts, *, family: str, selection: str
) -> str | None:
    """The measured variant of a family with this precision and selection."""
    wanted = (family, fact.precision, selection)
    return next(
        (name for name in measured if (facts[name].family, facts[name].precision, facts[name].selection) == wanted),
        None,
    )


def _median_ratio(measured: Mapping[str, Sequence[float]], base: str | None, name: str) -> float | None:
    return None if base is None else ratio(measured[base], measured[name]).median


def shares(costs: Sequence[float], *, least: float = 0.0) -> list[float]:
    """How a budget of time is shared: in proportion to the costs, but none under `least` of the whole."""
    whole = sum(costs)
    raised = [max(cost / whole, least) for cost in costs]
    return [share / sum(raised) for share in raised]


def middle(values: Sequence[float]) -> float:
    """The median."""
    return float(median(values))
