"""An earlier prototype of the kernels as a variant, from a folder that holds bf_cpu.cpp and eng.py.

Figures are compared with it in the same run, since machines differ. It is built into the cache; the folder is only
read.
"""

import os
import sys
import types
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inputs import Inputs
from models import BenchModel
from ours import draw, parts
from selections import Selection

FLAGS = ["-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-std=c++20"]


@cache
def load_prototype(folder: Path, build: Path) -> Any:
    """Its Python half, with the compiled one inside. Raises whatever is wrong with the folder or the compiler."""
    from torch.utils.cpp_extension import load

    build.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    compiled = load(
        "bf_cpu",
        [str(folder / "bf_cpu.cpp")],
        build_directory=str(build),
        extra_cflags=FLAGS,
        extra_ldflags=["-fopenmp"],
    )
    # Its eng.py asks its ext.py for the compiled half, which would be built elsewhere.
    shim: Any = types.ModuleType("ext")
    shim.get = lambda: compiled
    sys.modules["ext"] = shim
    sys.path.append(str(folder))
    try:
        import eng
    finally:
        sys.path.remove(str(folder))
    return eng


class Prototype:
    """The prototype with a selection; embeddings, mean and classifier are torch's, and counted."""

    def __init__(self, engine: Any, model: BenchModel, selection: Selection):
        self.engine, self.model, self.selection = engine, model, selection
        self.classifier = model.classifier()

    def settle(self, inputs: Inputs) -> None:
        """There is nothing to choose."""

    def prepare(self, inputs: Inputs) -> Callable[[], np.ndarray]:
        """Inputs as a call that gives logits (inputs, labels) in their order. Its lists are built before."""
        config = self.model.config
        gates, blocks = draw(self.selection, self.model, len(inputs))
        assert gates is not None
        all_blocks = np.ones((len(inputs), config.num_layers, config.num_heads), np.uint8)
        packs = []
        for one in parts(inputs, gates, all_blocks if blocks is None else blocks):
            by_layer = [torch.as_tensor(part).bool().transpose(0, 1) for part in (one.gates, one.blocks)]
            lengths = torch.as_tensor(one.packed.lengths.astype(np.int64))
            ids, offsets = torch.as_tensor(one.packed.ids).long(), torch.as_tensor(one.packed.offsets)
            packs.append((ids, offsets, lengths, self.engine.plan(*by_layer)))

        @torch.inference_mode()
        def call() -> np.ndarray:
            made = []
            for ids, offsets, lengths, plan in packs:
                hidden = self.engine.layers(self.engine.embed_packed(ids, offsets), offsets, plan)
                pooled = torch.segment_reduce(hidden, "mean", lengths=lengths)
                made.append(self.classifier(pooled).numpy())
            return np.concatenate(made)

        return call

    def prepare_texts(self, texts: Sequence[str]) -> Callable[[], list[str]]:
        """It takes ids only."""
        raise NotImplementedError("takes no texts")


def build_engine(folder: Path, build: Path, model: BenchModel, precision: str, threads: int) -> Any:
    """The prototype's engine for a model."""
    eng = load_prototype(folder, build)
    return eng.Engine(eng.Clean(model.hugging_face()), bf16=precision == "bf16", nt=threads)
