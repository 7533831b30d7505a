"""A model and its dense twin as one path: whoever is to have every unit is answered by the twin.

Both are packed once and read the same embedding tables. The engine above names budgets as before, and neither path
below knows of the other.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from budgetformer.engine.packed import Output, Packed, Path, checked
from budgetformer.engine.weights import Weights


@dataclass(frozen=True, eq=False)
class TwinPath:
    """See `budgetformer.engine.packed.Path`. Units that a caller names one by one are the model's own, all of them
    too; what counts name is the twin's to answer where they name every unit.
    """

    own: Path
    twin: Path
    weights: Weights

    @property
    def name(self) -> str:
        """Of both paths."""
        return self.own.name

    @property
    def dtype(self) -> str:
        """Of both paths."""
        return self.own.dtype

    @property
    def threads(self) -> int | None:
        """Of both paths, which never run at once."""
        return self.own.threads

    @property
    def resident_bytes(self) -> int:
        """Memory of the packed weights of both; only compiled paths know it."""
        return sum(path.resident_bytes for path in (self.own, self.twin))  # pyright: ignore[reportAttributeAccessIssue]

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
        """As `Path.run`."""
        given = {"counts": counts, "gates": gates, "block_counts": block_counts, "blocks": blocks}
        call = checked(batch, self.weights.encoder, units=self.weights.budget.blocks, **given)
        if call.counts is None or call.block_counts is None or len(batch) == 0:  # no budget was named for whole layers
            return self.own.run(batch, need_hidden=need_hidden, **given)
        full = (call.counts == self.weights.encoder.num_heads) & (call.block_counts == self.weights.budget.blocks)
        whole = full.all(1)
        parts = []
        if not whole.all():
            rest, counts, block_counts = (batch.of_inputs(~whole), call.counts[~whole], call.block_counts[~whole])
            parts.append(self.own.run(rest, counts=counts, block_counts=block_counts, need_hidden=need_hidden))
        if whole.any():
            out = self.twin.run(batch.of_inputs(whole), need_hidden=need_hidden)
            every = np.ones((len(out.logits), self.weights.encoder.num_layers, self.weights.budget.blocks), np.uint8)
            parts.append(replace(out, blocks=every))
        return parts[0] if len(parts) == 1 else _joined(*parts, whole, np.diff(call.offsets))


def _joined(rest: Output, answered: Output, whole: np.ndarray, lengths: np.ndarray) -> Output:
    """The outputs of both in the order of the batch. whole: bool (batch,), whom the second one answers."""

    def joined(name: str, second: np.ndarray) -> np.ndarray | None:
        parts = getattr(rest, name), getattr(answered, name)
        if parts[0] is None:
            return None
        both = np.empty((len(second), *parts[0].shape[1:]), parts[0].dtype)
        both[~second], both[second] = parts
        return both

    of_tokens = np.repeat(whole, lengths)
    return Output(  # pyright: ignore[reportArgumentType]
        **{field.name: joined(field.name, of_tokens if field.name == "hidden" else whole) for field in fields(Output)}
    )
