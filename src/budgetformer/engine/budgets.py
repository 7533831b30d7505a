"""A named budget as heads per layer, without torch: the twin of `budgetformer.router.allocate`."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from budgetformer.errors import UsageError


def shares(budget: float | Sequence[float] | np.ndarray, batch: int) -> np.ndarray:
    """A named budget as float64 (batch,): one share for all inputs, or one for each.

    Raises:
        UsageError: a share outside (0, 1], or not as many as inputs.
    """
    given = np.asarray(budget, np.float64)
    if given.ndim > 1 or (given.ndim == 1 and len(given) != batch):
        raise UsageError(f"budget has the shape {given.shape}: name one share, or one for each of {batch}")
    if not ((given > 0) & (given <= 1)).all():
        raise UsageError(f"budget={budget}: every share of heads must lie in (0, 1]; 1 runs every head")
    return np.broadcast_to(given, (batch,))


def check_margin(margin: float) -> float:
    """The margin. Raises UsageError outside [0, 1]."""
    if not 0 <= margin <= 1:
        raise UsageError(f"margin={margin}: is a difference of two probabilities, so it must lie in [0, 1]")
    return margin


def margins(probabilities: np.ndarray, multi_label: bool) -> np.ndarray:
    """How sure each answer is, in [0, 1]: float64 (text,), the twin of `router.margins`."""
    probabilities = np.asarray(probabilities, np.float64)
    if multi_label:
        return np.abs(2 * probabilities - 1).min(1)
    if probabilities.shape[1] < 2:
        return np.ones(len(probabilities))
    best = np.partition(probabilities, -2, axis=1)[:, -2:]
    return best[:, 1] - best[:, 0]


def split(budget: np.ndarray, learned: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Each kind's share of a named budget, float64 (batch, kind): the twin of `router.shares_of`.

    budget: (batch,). learned: (kind,), mean shares in training. costs: (batch, kind), what all units of a kind cost.
    """
    learned = np.clip(np.asarray(learned, np.float64), 1e-3, 1 - 1e-3)
    z, costs = np.log(learned / (1 - learned)), costs / costs.sum(1, keepdims=True)
    low, high = np.full((len(budget), 1), -40.0), np.full((len(budget), 1), 40.0)
    for _ in range(60):
        middle = (low + high) / 2
        few = (costs / (1 + np.exp(-(z + middle)))).sum(1, keepdims=True) < budget[:, None]
        low, high = np.where(few, middle, low), np.where(few, high, middle)
    return 1 / (1 + np.exp(-(z + (low + high) / 2)))


def allocate(budget: np.ndarray, profile: np.ndarray, units: int, min_units: int) -> np.ndarray:
    """Whole numbers of units per layer that spend each input's share as training spent its own: int32 (batch, layer).

    budget: (batch,) shares in (0, 1]. profile: (layer,), each layer's mean share in training. As in
    `router.allocate`, and with the same result.
    """
    budget = np.asarray(budget, np.float64)
    named, places = np.unique(budget, return_inverse=True)
    if len(named) == 1:
        # Most callers name one number, batch after batch.
        row = _one(float(named[0]), np.asarray(profile, np.float64).tobytes(), units, min_units)
        return np.tile(row, (len(budget), 1))
    return _spread(named, np.asarray(profile, np.float64), units, min_units)[places]


@lru_cache(maxsize=1024)
def _one(budget: float, profile: bytes, units: int, min_units: int) -> np.ndarray:
    return _spread(np.array([budget]), np.frombuffer(profile), units, min_units)


def _spread(budget: np.ndarray, profile: np.ndarray, units: int, min_units: int) -> np.ndarray:
    layers, lowest = len(profile), min(min_units, units)
    free = units - lowest
    total = np.clip(budget * layers * units, layers * lowest, layers * units)
    open_share = np.clip((profile * units - lowest) / max(free, 1), 1e-3, 1 - 1e-3)
    z = np.log(open_share / (1 - open_share))
    exact = lowest + _soft_top_k(z, (total - layers * lowest) / max(free, 1)) * free
    low = np.floor(exact)
    spare = np.clip(np.floor(total + 0.5) - low.sum(1), 0, layers)
    # Ties go to the first layer; the last bits of equal layers may differ, as a vector and its tail are rounded apart.
    order = np.argsort(-np.round(exact - low, 9), axis=1, kind="stable")
    extra = np.argsort(order, axis=1, kind="stable") < spare[:, None]
    return np.clip(low + extra, lowest, units).astype(np.int32)


def _soft_top_k(z: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Shares (batch, layer) in (0, 1) that add up to `k` (batch,): `estimators.soft_top_k` at temperature 1."""

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    low, high = np.full((len(k), 1), -z.max() - 30.0), np.full((len(k), 1), -z.min() + 30.0)
    for _ in range(60):
        middle = (low + high) / 2
        few = sigmoid(z + middle).sum(1, keepdims=True) < k[:, None]
        low, high = np.where(few, middle, low), np.where(few, high, middle)
    return sigmoid(z + (low + high) / 2)
