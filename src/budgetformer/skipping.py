"""Which units of a sublayer run over which inputs, so that what was not chosen is not computed: in use and in training.

A unit that most inputs of a batch chose runs over all of them, side by side with the others of its kind: to gather its
inputs would cost more than it saves. Any other unit runs over the inputs that chose it and no more; they are gathered
once for all units. Both parts are plain differentiable torch. A unit that does not run for an input gives its gate
there no gradient from the task; the price of the budget still reaches that gate, through `Routing.cost`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from budgetformer.schedule import Exploration

# A unit that at least this share of the batch chose runs over the whole batch.
OFTEN = 0.7


@dataclass(frozen=True)
class Plan:
    """common: the units that run over every input. unit, row (pair,): what else runs, unit `unit[p]` over input
    `row[p]`, sorted by unit. counts: how many pairs each of all units has.
    """

    common: list[int]
    unit: Tensor
    row: Tensor
    counts: list[int]

    @property
    def in_pairs(self) -> bool:
        """Whether there are pairs. True too when nothing runs at all: the empty products give the weights a gradient
        of 0, which processes that average their gradients wait for.
        """
        return len(self.row) > 0 or len(self.common) == 0


def may_skip(gates: Tensor, explore: Exploration | None) -> bool:
    """Whether nobody learns from what the units that are off would have said, so that they need not run.

    They run while routers explore: the task then tells a gate what its unit would be worth. They run when a caller
    wants the gradient of gates of its own (explore None), and in an exported graph, which cannot branch on its data.
    """
    learning = torch.is_grad_enabled() and gates.requires_grad
    exploring = learning and (explore is None or explore.sample)
    return not exploring and not torch.compiler.is_exporting()


def plan(gates: Float[Tensor, "batch units"]) -> Plan:
    """What runs for these gates, of which 0 is off."""
    on = gates != 0
    often = on.float().mean(0) >= OFTEN
    unit, row = (on & ~often).T.nonzero(as_tuple=True)
    return Plan(often.nonzero()[:, 0].tolist(), unit, row, torch.bincount(unit, minlength=on.shape[1]).tolist())


def of_units(weight: Tensor, units: list[int], of: int, dim: int = 0, *, parts: int = 1) -> Tensor:
    """The part of a weight that belongs to some of `of` units, side by side along `dim`.

    parts: equal pieces that the dimension is made of, each with its own rows of every unit (queries, keys, values).
    """
    places = torch.tensor(units, device=weight.device)
    own = weight.unflatten(dim, (parts, of, -1)).index_select(dim + 1, places)
    return own.flatten(dim, dim + 2)


def by_unit(
    x: Float[Tensor, "pair token into"],
    counts: list[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
) -> Float[Tensor, "pair token out"]:
    """Each pair's tokens through the weights (out, into) of its own unit."""
    own = zip(x.split(counts), weights, biases or [None] * len(weights), strict=True)
    done = [F.linear(rows, weight, bias) for rows, weight, bias in own if len(rows)]
    return torch.cat(done) if done else F.linear(x, weights[0], biases[0] if biases else None)


def lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, in its type: once and whole, where torch would cast slice by slice."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)
