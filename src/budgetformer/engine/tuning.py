"""Finding out what a model can do without: a budget for a given time or accuracy, and whether int8 may be used."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from budgetformer.engine.budgets import margins
from budgetformer.engine.counting import counted
from budgetformer.engine.engine import Engine, choose
from budgetformer.engine.packed import Output
from budgetformer.engine.saved import Point, write_saved
from budgetformer.errors import BudgetFormerError, UsageError
from budgetformer.tokens import Tokens, tokenise

BUDGETS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
AGAIN = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)  # shares of the sample that second answers are tried for
ROUNDS = 5

Way = tuple[float | None, float | None]  # a budget and a margin, as `Point` has them


class TargetNotMet(BudgetFormerError):
    """No budget is fast enough, or accurate enough. Exit code 1."""


def tune(
    engine: Engine,
    texts: Sequence[str],
    labels: Sequence[str] | Sequence[Sequence[str]] | None = None,
    pairs: Sequence[str] | None = None,
    *,
    max_ms_per_text: float | None = None,
    max_accuracy_loss: float | None = None,
    budgets: Sequence[float] = BUDGETS,
    save: bool = True,
) -> Point:
    """Pick a budget on a sample, make it the engine's own, and keep the curve in the model folder.

    max_ms_per_text: the most accurate budget that takes no longer; of equally accurate ones the fastest.
    max_accuracy_loss: the budget that runs the smallest share of the units' FLOPs (heads, and feed-forward blocks where
    they have a budget) and loses no more accuracy (a share, 0.01 is a point) than this against every unit on; without
    labels, agreement with every unit on takes the place of accuracy. One of the two is given.
    The learned budget is measured beside the named ones, and so are, of a model that answers twice, its first answers
    with other margins; they may be the answer, and their points have the budget None. labels: the name of each text's
    class, of a multi-label model the names of its classes.

    Raises:
        UsageError: neither or both limits, no texts, labels the model does not know, or as many as there are not texts.
        TargetNotMet: no budget keeps to the limit; the message names the nearest.
    """
    if (max_ms_per_text is None) == (max_accuracy_loss is None):
        raise UsageError("max_ms_per_text and max_accuracy_loss: give one of the two")
    limit = max_accuracy_loss if max_ms_per_text is None else max_ms_per_text
    if limit is None or not limit >= 0:
        raise UsageError(f"the limit is {limit}: it must be 0 or more")
    if not len(texts) or (labels is not None and len(labels) != len(texts)):
        held = f"{len(texts)} texts and {0 if labels is None else len(labels)} labels"
        raise UsageError(f"{held}: give at least one text, and a label for each or for none")
    truth = None if labels is None else _truth(engine, labels)
    tokens = tokenise(engine.tokenizer, texts, pairs, max_length=engine.max_length)
    points = measure(engine, tokens, truth, budgets)
    chosen = pick(points, max_ms_per_text, max_accuracy_loss)
    engine.budget, engine.margin = chosen.budget, chosen.margin
    if save and engine.folder is not None:
        where = {
            "texts": len(texts),
            "path": engine.path.name,
            "dtype": engine.path.dtype,
            "threads": engine.path.threads,
            "labelled": labels is not None,
        }
        engine.saved = replace(engine.saved, curve=tuple(points), tuned_on=where)
        write_saved(engine.folder, engine.saved)
    return chosen


def _truth(engine: Engine, labels: Sequence[str] | Sequence[Sequence[str]]) -> np.ndarray:
    """What each text should be answered with, as `decided` gives it."""
    names = [[label] if isinstance(label, str) else label for label in labels]
    unknown = sorted({name for some in names for name in some} - set(engine.labels))
    if unknown:
        raise UsageError(f"label {unknown[0][:80]!r} is none of the model's {len(engine.labels)} classes")
    if engine.multi_label:
        return np.array([[label in some for label in engine.labels] for some in names])
    if any(len(some) != 1 for some in names):
        raise UsageError("a text has several labels or none; this model gives every text one")
    return np.array([engine.labels.index(label) for (label,) in names])


def measure(
    engine: Engine, tokens: Sequence[Tokens], truth: np.ndarray | None, budgets: Sequence[float]
) -> list[Point]:
    """Accuracy, agreement and time at the learned budget (where there is one), at its first answers with other margins
    (where it has second ones), and at each named budget.

    truth: the right answers, as `decided` gives them. Rounds are interleaved, so that what else the machine does falls
    on all alike; times are medians.
    """
    plain = replace(engine, budget=None, margin=None)
    ways: list[Way] = [(budget, None) for budget in sorted(set(budgets) | {1.0})]
    if engine.weights.budget.routes:
        ways = [(None, None), *_margins(plain, tokens), *ways]
    outputs = {way: plain.forward(tokens, budget=way[0], margin=way[1]) for way in ways}
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for budget, margin in ways:
            start = time.perf_counter()
            plain.forward(tokens, budget=budget, margin=margin)
            seconds[budget, margin].append(time.perf_counter() - start)
    answers = {way: decided(output.logits, engine.multi_label) for way, output in outputs.items()}
    return [
        Point(
            budget=way[0],
            margin=way[1],
            head_share=round(float(outputs[way].gates.mean()), 4),
            units_share=round(units_share(engine, tokens, outputs[way]), 4),
            ms_per_text=round(1000 * statistics.median(seconds[way]) / len(tokens), 5),
            agreement=round(agreement(answers[way], answers[1.0, None]), 4),
            accuracy=None if truth is None else round(agreement(answers[way], truth), 4),
        )
        for way in ways
    ]


def _margins(engine: Engine, tokens: Sequence[Tokens]) -> list[Way]:
    """Margins that let the shares `AGAIN` of the texts be answered again, where the model was trained for it."""
    if engine.weights.budget.cascade == 0 and engine.weights.budget.second == "self":
        return []
    sure = margins(engine.answer(tokens, margin=0.0).probabilities, engine.multi_label)
    # Rounded first: of a model that is far too sure, many shares have the same margin.
    tried = {0.0, *(round(float(margin), 6) for margin in np.quantile(sure, AGAIN[1:]))}
    return [(None, margin) for margin in sorted(tried)]


def pick(points: Sequence[Point], max_ms_per_text: float | None, max_accuracy_loss: float | None) -> Point:
    """The point to use under one of the two limits. Raises `TargetNotMet`."""

    def quality(point: Point) -> float:
        return point.agreement if point.accuracy is None else point.accuracy

    if max_ms_per_text is not None:
        fast = [point for point in points if point.ms_per_text <= max_ms_per_text]
        if not fast:
            nearest = min(points, key=lambda point: point.ms_per_text)
            raise TargetNotMet(
                f"no budget answers within {max_ms_per_text:g} ms a text; the fastest, {_named(nearest)}, takes "
                f"{nearest.ms_per_text:g}: allow more time, or use another dtype"
            )
        return max(fast, key=lambda point: (quality(point), -point.ms_per_text))
    assert max_accuracy_loss is not None
    full = next(point for point in points if point.budget == 1.0)
    good = [point for point in points if quality(full) - quality(point) <= max_accuracy_loss + 1e-9]
    return min(good, key=lambda point: (point.units_share, -quality(point)))  # `full` itself is good


def _named(point: Point) -> str:
    budget = "the learned one" if point.budget is None else f"{point.budget:g}"
    return budget if point.margin is None else f"{budget} with the margin {point.margin:g}"


def units_share(engine: Engine, tokens: Sequence[Tokens], output: Output) -> float:
    """Counted FLOPs of the units that ran for all texts together, over those of all units that have a budget."""
    done = counted(engine, np.array([len(one) for one in tokens]), output.gates, output.blocks)
    ran, every = done.units(engine.weights.budget)
    return float(ran.sum() / every.sum())


def decided(logits: np.ndarray, multi_label: bool) -> np.ndarray:
    """What a text is answered with: its class, (text,), or the set of its classes, (text, class)."""
    return logits > 0 if multi_label else logits.argmax(1)


def agreement(one: np.ndarray, other: np.ndarray) -> float:
    """Share of texts that are answered alike."""
    same = one == other
    return float((same if same.ndim == 1 else same.all(1)).mean())


def check_dtype(engine: Engine, tokens: Sequence[Tokens], dtype: str) -> dict[str, Any]:
    """How far answers in `dtype` are from those in fp32, on the same texts at the learned budget.

    agreement: share of texts with the same label. largest_difference: of a logit. head_share: of both, as a rounded
    state may choose other heads.
    """
    path, note = choose(engine.weights, dtype)
    if path.dtype != dtype:
        raise UsageError(f"dtype is {dtype!r}, which cannot be checked here: {note}")
    exact = replace(engine, path=choose(engine.weights, "fp32")[0]).forward(tokens)
    quick = replace(engine, path=path).forward(tokens)
    answers = [decided(output.logits, engine.multi_label) for output in (exact, quick)]
    return {
        "texts": len(tokens),
        "agreement": agreement(*answers),
        "largest_difference": float(np.abs(exact.logits - quick.logits).max()),
        "head_share": [float(exact.gates.mean()), float(quick.gates.mean())],
    }
