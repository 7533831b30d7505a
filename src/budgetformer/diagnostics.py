"""What the answers say beside the labels: confusion, calibration, scores by class, what moved the budget.

Arrays in, numbers for metrics.json out; nothing here knows a model.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from budgetformer.engine.engine import probabilities

BINS = 10  # of the probability, for calibration


def diagnose(
    logits: np.ndarray, labels: Sequence[Any], names: Sequence[str], spent: np.ndarray, tokens: np.ndarray
) -> dict[str, Any]:
    """All of this module, as metrics.json holds it.

    logits (text, class). labels: a class number for each text, or rows of 0 and 1 over the classes. names: of the
    classes. spent (text,): the share of the units' FLOPs. tokens (text,): lengths.
    """
    if not np.isfinite(logits).all():  # of a training that came apart: its table is still to be written
        return {}
    truth = np.asarray(labels)
    several = truth.ndim == 2
    chances = probabilities(np.asarray(logits, np.float64), several)
    guess = (chances > 0.5).astype(int) if several else chances.argmax(1)
    sure, right = _answers(chances, truth)
    return {
        "classes": classes(truth, guess, names, spent),
        **({} if several else {"confusion": confusion(truth, guess, names)}),
        "calibration": calibration(sure, right),
        "moved": moved(spent, tokens, losses(chances, truth), None if several else truth),
    }


def _answers(chances: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The probability of each answer and whether it is right: of a text's class, or of each of its yes and no."""
    if truth.ndim == 2:
        yes = chances > 0.5
        return np.where(yes, chances, 1 - chances).ravel(), (yes == (truth > 0)).ravel()
    return chances.max(1), chances.argmax(1) == truth


def losses(chances: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The cross-entropy of each text, (text,); of several labels the mean over the classes."""
    chances = chances.clip(1e-12, 1 - 1e-12)
    if truth.ndim == 2:
        return -np.where(truth > 0, np.log(chances), np.log1p(-chances)).mean(1)
    return -np.log(chances[np.arange(len(truth)), truth])


def classes(
    truth: np.ndarray, guess: np.ndarray, names: Sequence[str], spent: np.ndarray
) -> dict[str, dict[str, float]]:
    """Texts, precision, recall, F1 and mean share of the units' FLOPs of each class that has texts."""
    from sklearn.metrics import precision_recall_fscore_support

    every = np.arange(len(names))
    scored = precision_recall_fscore_support(truth, guess, labels=every, zero_division=0)  # pyright: ignore[reportArgumentType]
    columns = dict(zip(("precision", "recall", "f1", "texts"), map(np.asarray, scored), strict=True))
    found = {}
    for place, name in enumerate(names):
        rows = truth[:, place] > 0 if truth.ndim == 2 else truth == place
        if rows.any():
            numbers = {key: round(float(column[place]), 4) for key, column in columns.items()}
            found[name] = {**numbers, "texts": int(rows.sum()), "units_share": round(float(spent[rows].mean()), 4)}
    return found


def confusion(truth: np.ndarray, guess: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """labels: the classes. cells: [true class, answer, texts] where there are any, so that many classes cost little."""
    pairs, counts = np.unique(np.stack([truth, guess], 1), axis=0, return_counts=True)
    return {"labels": list(names), "cells": np.column_stack([pairs, counts]).tolist()}


def calibration(sure: np.ndarray, right: np.ndarray, bins: int = BINS) -> dict[str, Any]:
    """Whether answers are as often right as they are sure, in bins of equal width over [0, 1].

    bins: answers, their mean confidence and the share that is right, of each bin that has any. ece: the expected
    calibration error, the mean distance of the two over answers (Naeini et al. 2015).
    """
    place = np.minimum((sure * bins).astype(int), bins - 1)
    answers = np.bincount(place, minlength=bins)
    some = answers.nonzero()[0]
    confidence, accuracy = (np.bincount(place, weights, bins)[some] / answers[some] for weights in (sure, right))
    gaps = np.abs(confidence - accuracy)
    return {
        "bins": [
            {"answers": int(n), "confidence": round(float(c), 4), "accuracy": round(float(a), 4)}
            for n, c, a in zip(answers[some], confidence, accuracy, strict=True)
        ],
        "ece": float((gaps * answers[some]).sum() / answers.sum()),
    }


def moved(spent: np.ndarray, tokens: np.ndarray, loss: np.ndarray, truth: np.ndarray | None = None) -> dict[str, float]:
    """What goes with a text's share of the units' FLOPs; empty where all spend alike.

    length, loss: Spearman's rank correlation with it, in [-1, 1]. class: the share of the ranks' variance between the
    classes, corrected for their number (epsilon squared, Kelley 1935), as its root, in [0, 1].
    """
    from scipy.stats import rankdata, spearmanr

    if np.ptp(spent) < 1e-9:  # by rounding alone
        return {}
    spent = spent.round(9)  # texts of different lengths that spend alike are ties
    found = {
        name: float(spearmanr(spent, other).statistic)  # pyright: ignore[reportAttributeAccessIssue]
        for name, other in (("length", tokens), ("loss", loss.round(6)))
        if np.ptp(other) > 0
    }
    if truth is not None:
        ranks = rankdata(spent)
        groups = np.bincount(truth)
        sums = np.bincount(truth, ranks)
        known = groups > 0
        free = len(truth) - known.sum()
        if free > 0 and known.sum() > 1:
            within = (ranks**2).sum() - (sums[known] ** 2 / groups[known]).sum()
            left = within / free / ranks.var(ddof=1)
            found["class"] = float(np.sqrt(max(0.0, 1 - left)))
    return found
