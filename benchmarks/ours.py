"""Our engine as a variant: packed tokens, a precision, and what of the model runs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from budgetformer.engine.engine import BATCH_TOKENS
from budgetformer.engine.packed import Packed
from inputs import Inputs
from models import BenchModel
from selections import Selection
from timing import CPU, Spread, interleave, ratio, repeats


@dataclass(frozen=True)
class Part:
    """A pack and the selection of its inputs; gates and blocks are None where all run."""

    packed: Packed
    gates: np.ndarray | None
    blocks: np.ndarray | None
    rows: slice


def parts(inputs: Inputs, gates: np.ndarray | None, blocks: np.ndarray | None) -> list[Part]:
    """The inputs in packs as the engine makes them: in their order, until a pack is full."""
    bounds, held = [0], 0
    for row, length in enumerate(inputs.lengths):
        if held and held + length > BATCH_TOKENS:
            bounds.append(row)
            held = 0
        held += length
    bounds.append(len(inputs))
    made = []
    for first, last in itertools.pairwise(bounds):
        rows = slice(first, last)
        offsets = np.concatenate([[0], inputs.lengths[rows].cumsum()]).astype(np.int32)
        packed = Packed(np.concatenate(inputs.ids[rows]).astype(np.int32), offsets)
        chosen = [None if part is None else np.ascontiguousarray(part[rows]) for part in (gates, blocks)]
        made.append(Part(packed, *chosen, rows))
    return made


@dataclass(frozen=True)
class Ours:
    """An engine with a selection. None: the model's routers choose."""

    engine: Any
    model: BenchModel
    selection: Selection | None

    def settle(self, inputs: Inputs) -> None:
        """There is nothing to choose."""

    def prepare(self, inputs: Inputs) -> Callable[[], np.ndarray]:
        """Inputs as a call that gives logits (inputs, labels) in their order."""
        gates = blocks = None
        if self.selection is not None:
            gates, blocks = draw(self.selection, self.model, len(inputs))
        packs = parts(inputs, gates, blocks)

        def call() -> np.ndarray:
            done = [self.engine.run(one.packed, gates=one.gates, blocks=one.blocks).logits for one in packs]
            return done[0] if len(done) == 1 else np.concatenate(done)

        return call

    def prepare_texts(self, texts: Sequence[str]) -> Callable[[], list[str]]:
        """Texts as a call that gives labels. Heads alone can be named there, as a budget that the routers spend."""
        budget = None if self.selection is None else self.selection.heads

        def call() -> list[str]:
            return self.engine.predict(texts, budget=budget).labels

        return call


def draw(selection: Selection, model: BenchModel, batch: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The gates and blocks of a selection for a batch, as many blocks as heads. All heads are named as well."""
    gates, blocks = selection.draw(batch, model.config, model.config.num_heads)
    if gates is None:  # else the routers of the folder would be asked
        gates = np.ones((batch, model.config.num_layers, model.config.num_heads), np.uint8)
    return gates, blocks


def router_share(engine: Any, inputs: Inputs, *, until: float, rounds: int = 40) -> Spread:
    """The share of the time that goes to the routers: the same heads, once chosen by them and once given."""
    packs = parts(inputs, None, None)
    chosen = [engine.run(one.packed).gates for one in packs]
    calls = {
        "asked": lambda: [engine.run(one.packed) for one in packs],
        "given": lambda: [engine.run(one.packed, gates=gates) for one, gates in zip(packs, chosen, strict=True)],
    }
    times = {name: repeats(call, CPU, shortest=0.05) for name, call in calls.items()}
    measured = interleave(calls, times, clock=CPU, rounds=rounds, until=until)
    gain = ratio(measured["asked"], measured["given"])
    return Spread(*(1 - 1 / value for value in (gain.median, gain.low, gain.high)))
