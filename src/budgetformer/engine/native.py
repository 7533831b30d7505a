"""The compiled kernels, through their C interface: numpy arrays in, numpy arrays out, neither torch nor a binding.

The library is found beside the package; where it is missing or does not load, `library()` says why and the engine runs
on torch.
"""

import ctypes
import functools
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from budgetformer.config import ACTIVATIONS, DTYPES
from budgetformer.engine.packed import Output, Packed, checked, left
from budgetformer.engine.weights import Weights
from budgetformer.errors import BudgetFormerError, UsageError

ESTIMATORS = {"soft_topk": 0, "paper": 0, "gumbel": 0, "hard_concrete": 1, "top_p": 2}
VIEWS = {"mean": 0, "mean+first": 1, "mean+max": 2}
KERNEL_ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3, "tanh": 4}
assert set(KERNEL_ACTIVATIONS) == set(ACTIVATIONS)

INTERFACE = 3  # of kernels/api.cpp
_POINTER = ctypes.c_void_p


class _Batch(ctypes.Structure):
    """`struct Batch` of kernels/model.hpp."""

    _fields_ = [
        ("tokens", ctypes.c_int64),
        ("inputs", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        *[(name, _POINTER) for name in ("ids", "types", "offsets", "counts", "block_counts", "gates", "ffn")],
        *[(name, _POINTER) for name in ("chosen", "block_chosen", "wanted", "logits", "hidden")],
    ]


class NoLibrary(BudgetFormerError):
    """The compiled library is not there, or does not load here; the message says why."""


def library_path() -> Path:
    """Where the compiled library lies when the package was installed where there is a compiler.

    The environment variable BUDGETFORMER_LIBRARY names another one.
    """
    named = os.environ.get("BUDGETFORMER_LIBRARY")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(named) if named else Path(__file__).parent / "_lib" / f"libbudgetformer.{suffix}"


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded once.

    Raises:
        NoLibrary: why there is none.
    """
    path = library_path()
    if not path.is_file():
        raise NoLibrary(f"{path.name} is not installed; build it with: python -m budgetformer.engine.kernels.build")
    try:
        lib = ctypes.CDLL(str(path))
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "bf_interface": (ctypes.c_int, []),
            "bf_error": (ctypes.c_char_p, []),
            "bf_paths": (ctypes.c_char_p, []),
            "bf_has": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int]),
            "bf_new": (_POINTER, [ctypes.c_char_p, _POINTER, ctypes.c_int, ctypes.c_float, ctypes.c_int]),
            "bf_set": (ctypes.c_int, [_POINTER, ctypes.c_char_p, _POINTER, ctypes.c_int64]),
            "bf_build": (ctypes.c_int, [_POINTER]),
            "bf_bytes": (ctypes.c_int64, [_POINTER]),
            "bf_run": (ctypes.c_int, [_POINTER, ctypes.POINTER(_Batch)]),
            "bf_free": (None, [_POINTER]),
            "bf_gemm_rate": (ctypes.c_double, [ctypes.c_char_p, *[ctypes.c_int] * 4, ctypes.c_double]),
            "bf_peak_rate": (ctypes.c_double, [ctypes.c_char_p, ctypes.c_int, ctypes.c_double]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NoLibrary(f"{path}: does not load here ({str(error)[:120]}); build it again") from error
    if lib.bf_interface() != INTERFACE:
        raise NoLibrary(f"{path}: was built from another version of the package; build it again")
    return lib


def paths() -> list[str]:
    """The compiled paths that this processor can run, the best first; empty without the library."""
    try:
        return library().bf_paths().decode().split()[::-1]
    except NoLibrary:
        return []


def has(path: str, dtype: str) -> bool:
    """Whether `path` computes in `dtype` on this processor."""
    return path in paths() and bool(library().bf_has(path.encode(), DTYPES.index(dtype)))


def gemm_rate(path: str, dtype: str, rows: int, columns: int, depth: int, seconds: float = 0.2) -> float:
    """Operations per second of one thread in the kernels' own product (rows x depth) (depth x columns), weights hot."""
    return library().bf_gemm_rate(path.encode(), DTYPES.index(dtype), rows, columns, depth, seconds)


def peak_rate(path: str, dtype: str, seconds: float = 0.2) -> float:
    """Operations per second of one thread from registers alone: this core's limit for the path's instructions."""
    return library().bf_peak_rate(path.encode(), DTYPES.index(dtype), seconds)


class NativePath:
    """A model in the compiled kernels, its weights packed once. Not copied by a fork's child beyond what it reads."""

    def __init__(self, weights: Weights, dtype: str, name: str | None = None, threads: int = 1):
        """Pack `weights`.

        Raises:
            NoLibrary: there is no compiled library.
            UsageError: the processor lacks the path, or the path the type.
        """
        lib = library()
        if threads < 1:
            raise UsageError(f"threads={threads}: must be 1 or more")
        name = name or next((path for path in paths() if has(path, dtype)), "plain")
        if name not in paths():
            raise UsageError(f"path is {name!r}; this processor has {', '.join(paths())}, torch")
        if not has(name, dtype):
            raise UsageError(f"dtype is {dtype!r}; the path {name} has no such instructions, use fp32 or int8")
        self.name, self.dtype, self.threads = name, dtype, threads
        self._lib = lib
        self._encoder, self._budget, self._labels = weights.encoder, weights.budget, len(weights.labels)
        e, budget = weights.encoder, weights.budget
        spec = np.array(
            [
                *(e.vocab_size, e.hidden_size, e.num_layers, e.num_heads, e.intermediate_size, e.max_positions),
                *(e.position_offset, e.token_types, e.embedding_size or e.hidden_size, self._labels),
                KERNEL_ACTIVATIONS[e.activation],
                e.norm == "pre",
                weights.pooling == "first",
                -1 if weights.head_hidden is None else KERNEL_ACTIVATIONS[weights.head_hidden],
                *(budget.routes, ESTIMATORS[budget.estimator], VIEWS[budget.view]),
                *(budget.min_units, budget.router_hidden, budget.blocks),
                DTYPES.index(dtype),
            ],
            np.int32,
        )
        self._handle = lib.bf_new(name.encode(), spec.ctypes.data, len(spec), e.norm_eps, threads)
        if not self._handle:
            raise BudgetFormerError(f"engine: {lib.bf_error().decode()}")
        self._free = weakref.finalize(self, lib.bf_free, self._handle)
        # Not at the interpreter's end: a daemon thread may still be at work then, and the system frees all anyway.
        self._free.atexit = False
        tensors = {key: np.ascontiguousarray(tensor, np.float32) for key, tensor in weights.tensors.items()}
        for name, kept, units in (("heads", e.kept_heads, e.num_heads), ("blocks", e.kept_blocks, budget.blocks)):
            if kept is not None:
                rows = left(kept, e.num_layers, units).astype(np.float32)
                tensors |= {f"layers.{i}.kept_{name}": row for i, row in enumerate(rows)}
        for key, tensor in tensors.items():
            self._checked(lib.bf_set(self._handle, key.encode(), tensor.ctypes.data, tensor.size))
        self._checked(lib.bf_build(self._handle))
        # The kernels read the embedding tables where they are, mapped from the file: most rows are never touched.
        self._kept = [tensor for key, tensor in tensors.items() if key.startswith("embeddings.")]

    @property
    def resident_bytes(self) -> int:
        """Memory of the packed weights; the embedding tables stay in the file's pages."""
        return self._lib.bf_bytes(self._handle)

    def run(
        self,
        batch: Packed,
        *,
        counts: np.ndarray | None = None,
        gates: np.ndarray | None = None,
        block_counts: np.ndarray | None = None,
        blocks: np.ndarray | None = None,
        need_hidden: bool = False,
    ) -> Output:
        """As `Path.run`.

        Raises:
            UsageError: what `checked` refuses; blocks of no multiple of 32 neurons.
            MemoryError: the batch does not fit; nothing is lost, a smaller one can be run.
        """
        given = {"counts": counts, "gates": gates, "block_counts": block_counts, "blocks": blocks}
        call = checked(batch, self._encoder, units=self._budget.blocks, **given)
        size, layers, heads = len(call.offsets) - 1, self._encoder.num_layers, self._encoder.num_heads
        tokens = len(call.ids)
        cut = self._budget.blocks if call.blocks is None else call.blocks.shape[-1]
        ran = call.blocks
        if ran is None and cut > 1:  # written by the routers, or, where none decides, all of them
            ran = np.tile(left(self._encoder.kept_blocks, layers, cut).astype(np.uint8), (size, 1, 1))
        chosen = np.empty((size, layers, heads), np.uint8)
        wanted = np.empty((size, layers), np.float32)
        logits = np.empty((size, self._labels), np.float32)
        hidden = np.empty((tokens, self._encoder.hidden_size), np.float32) if need_hidden else None
        if size == 0:
            return Output(logits, chosen, wanted, hidden, ran)
        into = (call.ids, call.types, call.offsets, call.counts, call.block_counts, call.gates, call.blocks)
        arrays = (*into, chosen, ran, wanted, logits, hidden)
        pointers = [None if array is None else array.ctypes.data for array in arrays]
        self._checked(self._lib.bf_run(self._handle, ctypes.byref(_Batch(tokens, size, cut, *pointers))))
        return Output(logits, chosen, wanted, hidden, ran)

    def _checked(self, code: int) -> None:
        if code == 0:
            return
        message = self._lib.bf_error().decode()
        if code == 1:
            raise UsageError(f"engine: {message}")
        if code == 2:
            raise MemoryError(f"engine: {message}")
        raise BudgetFormerError(f"engine: {message}")
