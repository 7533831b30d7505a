"""A model and its dense twin as one path: whoever is to have every unit is answered by the twin.

Both are packed once and read the same embedding tables. The engine above names budgets as before, and neither path
below knows of the other.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

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
        if whole.all():
            return self._every_unit(batch, need_hidden)
        if not whole.any():
            return self.own.run(batch, need_hidden=need_hidden, **given)
        rest, named = batch.of_inputs(~whole), {"counts": call.counts, "block_counts": call.block_counts}
        some = self.own.run(rest, need_hidden=need_hidden, **{name: counts[~whole] for name, counts in named.items()})
        return joined(some, self._every_unit(batch.of_inputs(whole), need_hidden), whole, batch.lengths)

    def _every_unit(self, batch: Packed, need_hidden: bool) -> Output:
        out = self.twin.run(batch, need_hidden=need_hidden)
        shape = (len(batch), self.weights.encoder.num_layers, self.weights.budget.blocks)
        return replace(out, blocks=np.ones(shape, np.uint8))


def joined(rest: Output, others: Output, which: np.ndarray, lengths: np.ndarray) -> Output:
    """Two outputs in the order of one batch. which: bool (batch,), the inputs of `others`; lengths: tokens of each."""

    def both(name: str, second: np.ndarray) -> Any:
        first, later = getattr(rest, name), getattr(others, name)
        if first is None:
            return None
        made = np.empty((len(second), *first.shape[1:]), first.dtype)
        made[~second], made[second] = first, later
        return made

    places = {"hidden": np.repeat(which, lengths)}
    return Output(**{field.name: both(field.name, places.get(field.name, which)) for field in fields(Output)})
