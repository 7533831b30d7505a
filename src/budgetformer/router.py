"""The router of one sublayer: from what enters it to which of its units run. A head is one kind of unit."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from budgetformer import estimators
from budgetformer.config import BudgetConfig
from budgetformer.schedule import Exploration


@dataclass(frozen=True)
class Routing:
    """What was decided for each input of a batch in one sublayer.

    share: the share the budget controller wants, k / units. scores: relevance, higher runs first. gates: multiplies
    each unit's output. chosen: the units that run in use. cost: share of units that run, differentiable.
    """

    share: Float[Tensor, " batch"]
    scores: Float[Tensor, "batch units"]
    gates: Float[Tensor, "batch units"]
    chosen: Bool[Tensor, "batch units"]
    cost: Float[Tensor, " batch"]


def pool(x: Float[Tensor, "batch token width"], keep: Bool[Tensor, "batch token"], view: str = "mean") -> Tensor:
    """One vector per input, over its real tokens only. `view`: "mean", "mean+first" or "mean+max"."""
    real = keep[..., None]
    mean = x.masked_fill(~real, 0.0).sum(1) / real.sum(1).clamp_min(1)
    if view == "mean":
        return mean
    if view == "mean+first":
        first = keep.int().argmax(1)  # with padding on the left the first real token is not at 0
        return torch.cat([mean, x[torch.arange(x.shape[0], device=x.device), first]], dim=-1)
    highest = x.masked_fill(~real, -math.inf).amax(1)
    return torch.cat([mean, highest.masked_fill(~keep.any(1, keepdim=True), 0.0)], dim=-1)


class Router(nn.Module):
    """Budget controller (how many units) and scorer (which), as in DESIGN of arXiv 2604.22583, per sublayer.

    Starts with every unit on: the controller's last layer is zero and its bias wants all but a quarter of a unit.
    """

    def __init__(self, width: int, units: int, budget: BudgetConfig):
        super().__init__()
        self.units = units
        self.budget = budget
        self.kept: list[int] | None = None  # the units that are left, where others were cut for good
        seen = width if budget.view == "mean" else 2 * width
        self.controller = nn.Sequential(
            nn.Linear(seen, budget.router_hidden), nn.GELU(), nn.Linear(budget.router_hidden, 1)
        )
        self.scorer = nn.Linear(seen, units)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All units on, relevance nearly flat."""
        first, last = self.controller[0], self.controller[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        nn.init.normal_(first.weight, std=first.in_features**-0.5)
        nn.init.zeros_(first.bias)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, math.log(4 * self.units - 1))  # k is about a quarter of a unit below all
        nn.init.normal_(self.scorer.weight, std=0.02)
        nn.init.zeros_(self.scorer.bias)

    def forward(
        self,
        x: Float[Tensor, "batch token width"],
        keep: Bool[Tensor, "batch token"],
        *,
        explore: Exploration,
        count: Int[Tensor, " batch"] | None = None,
    ) -> Routing:
        """Route a batch. `count` names the number of units per input; None lets the budget controller decide."""
        # In full precision even under autocast: a rounded score would choose other heads in training than in use.
        with torch.autocast(x.device.type, enabled=False):
            pooled = pool(x.to(self.scorer.weight.dtype), keep, self.budget.view)
            if self.budget.relevance == "fixed":  # nothing is learned of an order that stays
                pooled = pooled.detach()
            return self._route(pooled, explore, count)

    def _route(self, pooled: Tensor, explore: Exploration, count: Tensor | None) -> Routing:
        # k = m + s (H - m), not clamp(s H, m, H): a clamp has no gradient below m, so a layer there could never return.
        lowest = min(self.budget.min_units, self.units)
        wanted = lowest + torch.sigmoid(self.controller(pooled)[:, 0]) * (self.units - lowest)
        share = wanted / self.units
        scores = self.scorer(pooled)
        scores = scores - scores.mean(-1, keepdim=True)
        if count is not None:
            decided = _hard(estimators.top_units(scores, count.clamp(lowest, self.units)), scores)
        else:
            decide = estimators.BY_NAME[self.budget.estimator]
            decided = decide(scores, wanted, explore=explore, training=self.training, min_units=lowest)
        if self.kept is not None:  # how many is as before; which, is among those left
            left = self.left(torch.ones_like(decided.chosen))
            count = decided.chosen.sum(-1)
            decided = _hard(estimators.top_units(scores.masked_fill(~left, -math.inf), count) & left, scores)
        return Routing(share, scores, decided.value, decided.chosen, decided.cost)

    def left(self, gates: Tensor) -> Tensor:
        """Gates (batch, units) without those of units that were cut."""
        if self.kept is None:
            return gates
        only = torch.zeros_like(gates)
        only[:, self.kept] = gates[:, self.kept]
        return only


def _hard(chosen: Tensor, scores: Tensor) -> estimators.Gates:
    gates = chosen.to(scores.dtype)
    return estimators.Gates(gates, chosen, gates.mean(-1))


def shares_of(
    budget: Float[Tensor, " batch"], learned: Float[Tensor, " kind"], costs: Float[Tensor, "batch kind"]
) -> Float[Tensor, "batch kind"]:
    """A named budget, split over the kinds of units (heads, blocks) as training split its own: each kind's share.

    `learned` is each kind's mean share in training, `costs` what all units of a kind cost an input. One shift in logit
    space is found for all kinds, so that together they cost `budget` of everything.
    """
    z = torch.logit(learned.double().clamp(1e-3, 1 - 1e-3)).expand(len(budget), -1)
    costs = costs.double() / costs.sum(1, keepdim=True)
    low, high = z.new_full((len(budget), 1), -40.0), z.new_full((len(budget), 1), 40.0)
    for _ in range(60):
        middle = (low + high) / 2
        few = (costs * torch.sigmoid(z + middle)).sum(1, keepdim=True) < budget.double()[:, None]
        low, high = torch.where(few, middle, low), torch.where(few, high, middle)
    return torch.sigmoid(z + (low + high) / 2)


def margins(logits: Float[Tensor, "batch labels"], *, multi_label: bool) -> Float[Tensor, " batch"]:
    """How sure an answer is, in [0, 1]: the difference of the two best probabilities.

    Where every label is decided by itself, it is that of the least sure label. A single class is always sure.
    """
    if multi_label:
        return (2 * torch.sigmoid(logits.float()) - 1).abs().amin(-1)
    if logits.shape[-1] < 2:
        return torch.ones(len(logits), device=logits.device)
    best = torch.softmax(logits.float(), dim=-1).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def forced(gates: Float[Tensor, "batch units"]) -> Routing:
    """The routing a caller names unit by unit, instead of a router's: 0 is off, anything else multiplies the unit."""
    zeros = torch.zeros_like(gates)
    share = (gates != 0).to(gates.dtype).mean(-1)
    return Routing(share, zeros, gates, gates != 0, share)


def allocate(
    budget: Float[Tensor, " batch"], profile: Float[Tensor, " layer"], units: int, min_units: int
) -> Int[Tensor, "batch layer"]:
    """Whole numbers of units per layer that spend `budget` (a share of all units) as training spent its own.

    `profile` is each layer's mean share in training. Every layer gets its `min_units`; the shares of what is left are
    shifted together in logit space until the budget is spent, then rounded by largest remainder. So an input gets
    round(budget * layers * units) units in all, or `min_units` in every layer where that is more.
    """
    layers, lowest = len(profile), min(min_units, units)
    free = units - lowest
    total = (budget.double() * layers * units).clamp(layers * lowest, layers * units)
    open_share = (profile.double() * units - lowest) / max(free, 1)
    z = torch.logit(open_share.clamp(1e-3, 1 - 1e-3)).expand(len(budget), layers)
    exact = lowest + estimators.soft_top_k(z, (total - layers * lowest) / max(free, 1), 1.0) * free
    low = exact.floor()
    spare = ((total + 0.5).floor() - low.sum(-1)).long().clamp(0, layers)
    # Rounded: layers that differ in their last bits alone count as equal, and the first of them gets the unit.
    extra = estimators.top_units((exact - low).round(decimals=9), spare)
    return (low.long() + extra.long()).clamp(lowest, units)
