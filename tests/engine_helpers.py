"""What the engine's tests share: small models as plain arrays, no torch, and every path that this machine can run."""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.engine import native
from budgetformer.engine.native import NativePath
from budgetformer.engine.packed import Output, Packed
from budgetformer.engine.weights import Weights, shapes

NATIVE = native.paths()  # the best first; empty where the library was not compiled
COMPUTED = [(path, dtype) for path in NATIVE for dtype in native.DTYPES if native.has(path, dtype)]


def random_weights(
    seed: int = 0,
    *,
    budget: dict[str, Any] | None = None,
    labels: int = 5,
    pooling: str = "mean",
    head_hidden: str | None = None,
    problem_type: str | None = None,
    **sizes: Any,
) -> Weights:
    """A model that looks trained: no bias is 0, no norm is 1, no two heads are alike, routers that differ by input.

    Sizes are no multiples of a vector's: width 36 of 3 heads, 50 neurons.
    """
    small = dict(vocab_size=97, hidden_size=36, num_layers=3, num_heads=3, intermediate_size=50, max_positions=31)
    encoder = EncoderConfig(**{**small, **sizes})
    routing = BudgetConfig(**{"target": 0.5, "router_hidden": 11, **(budget or {})})
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(encoder, routing, labels, head_hidden).items():
        drawn = rng.standard_normal(shape)
        if name == "profile":
            drawn = rng.uniform(0.2, 0.9, shape)
        elif "norm.weight" in name:
            drawn = 1 + 0.2 * drawn
        elif name.startswith("embeddings.") and len(shape) == 2:
            pass
        elif "controller.2" in name or "scorer" in name:
            drawn = drawn * (1.5 if "controller" in name else 1.0)
        elif len(shape) == 2:
            drawn = drawn / np.sqrt(shape[1])
        else:
            drawn = 0.3 * drawn
        tensors[name] = np.ascontiguousarray(drawn, np.float32)
    names = [f"label {i}" for i in range(labels)]
    return Weights(encoder, routing, names, problem_type, pooling, head_hidden, tensors)


def random_batch(weights: Weights, lengths: list[int], seed: int = 0, *, types: bool = True) -> Packed:
    """Random ids, and random types where the model has several."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = int(offsets[-1])
    ids = rng.integers(0, weights.encoder.vocab_size, tokens).astype(np.int32)
    several = types and weights.encoder.token_types > 1
    kinds = rng.integers(0, weights.encoder.token_types, tokens).astype(np.int32) if several else None
    return Packed(ids, offsets, kinds)


def part(batch: Packed, places: list[int]) -> Packed:
    """Some inputs of a batch, in the order named."""
    rows = [np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in places]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    tokens = np.concatenate(rows)
    return Packed(batch.ids[tokens], offsets, None if batch.types is None else batch.types[tokens])


def part_of(output: Output, batch: Packed, place: int) -> list[np.ndarray]:
    """All that is answered for one input."""
    rows = slice(batch.offsets[place], batch.offsets[place + 1])
    assert output.hidden is not None
    blocks = np.zeros(0, np.uint8) if output.blocks is None else output.blocks[place]
    return [output.logits[place], output.gates[place], output.wanted[place], output.hidden[rows], blocks]


@lru_cache(maxsize=256)
def loaded(weights: Weights, dtype: str, name: str, threads: int = 1) -> NativePath:
    """A model in the kernels, packed once for all tests that ask again."""
    return NativePath(weights, dtype, name, threads=threads)


def in_python(code: str, *arguments: Any, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own: what it does to itself, or dies of, stays there."""
    places = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
