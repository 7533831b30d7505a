"""Time several variants in one run: interleaved rounds, medians, spreads, ratios within a round.

Other work on the machine slows whatever runs at that moment. So every variant runs once in every round, the order turns
around from round to round, and two variants are compared round by round: what disturbs a round disturbs both. On one
thread the clock is the process's CPU time, which does not count waiting for a core; on several it is the wall's.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Call = Callable[[], object]
Clock = Callable[[], float]

CPU: Clock = time.process_time
WALL: Clock = time.perf_counter


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The quartiles by linear interpolation; one value is all three."""
        ordered = sorted(values)

        def at(share: float) -> float:
            place = share * (len(ordered) - 1)
            below = int(place)
            above = min(below + 1, len(ordered) - 1)
            return ordered[below] + (place - below) * (ordered[above] - ordered[below])

        return cls(statistics.median(ordered), at(0.25), at(0.75))


def clock_for(threads: int) -> Clock:
    """CPU time for one thread, wall time for several."""
    return CPU if threads == 1 else WALL


def repeats(call: Call, clock: Clock, *, shortest: float = 0.02) -> int:
    """How often to repeat a call so that a measurement lasts `shortest` seconds; this also warms the call up."""
    took = _took(call, clock)
    if took < 5 * shortest:  # a first call may be slow for reasons of its own; where that counts, look again
        took = _took(call, clock)
    return max(1, round(shortest / max(took, 1e-7)))


def interleave(
    calls: Mapping[str, Call],
    times: Mapping[str, int],
    *,
    clock: Clock,
    rounds: int,
    until: float,
    pause: float = 0.0,
    now: Clock = WALL,
) -> dict[str, list[float]]:
    """Seconds per call of each variant, one number a round.

    times: how often each call is repeated within a measurement. rounds: at most so many, and at least one. until: the
    time on `now` at which no further round begins; nor does one that, going by the last, would end long after it.
    pause: seconds of sleep before each measurement, in which thread pools of the variant before go to sleep.
    """
    measured: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for turn in range(rounds):
        began = now()
        for name in order:
            if pause:
                time.sleep(pause)
            call = calls[name]
            start = clock()
            for _ in range(times[name]):
                call()
            measured[name].append((clock() - start) / times[name])
        order.reverse()
        ended = now()
        if turn + 1 < rounds and ended + (ended - began) / 2 > until:
            break
    return measured


def _took(call: Call, clock: Clock) -> float:
    start = clock()
    call()
    return clock() - start


def ratio(base: Sequence[float], other: Sequence[float]) -> Spread:
    """How many times faster `other` is than `base`: the spread of the ratios within each round."""
    return Spread.of([b / o for b, o in zip(base, other, strict=True)])


def fastest(measured: Mapping[str, Sequence[float]], names: Sequence[str]) -> str | None:
    """The name with the smallest median; None when none of the names was measured."""
    there = [name for name in names if measured.get(name)]
    return min(there, key=lambda name: statistics.median(measured[name]), default=None)
