"""From relevance scores and a wanted number of units to gates: hard 0/1 forward, with a gradient for both questions.

Every estimator has one signature: `(scores, wanted, *, explore, training, min_units) -> Gates`, with `scores`
(batch, units) and `wanted` (batch,), the real number of units asked for, in [min_units, units].

Legend: z scores, k wanted, p probabilities or soft gates, t threshold, u uniform noise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from budgetformer.schedule import Exploration


@dataclass(frozen=True)
class Gates:
    """What an estimator decided.

    value: what multiplies each unit's output (0 or 1 forward, soft backward; the paper's is soft in training).
    chosen: the units that run in use. cost: the share of units, the hard one forward, differentiable backward.
    """

    value: Float[Tensor, "batch units"]
    chosen: Bool[Tensor, "batch units"]
    cost: Float[Tensor, " batch"]


Estimator = Callable[..., Gates]


def top_units(scores: Float[Tensor, "batch units"], count: Int[Tensor, " batch"]) -> Bool[Tensor, "batch units"]:
    """The `count[i]` highest-scoring units of each row; ties go to the lowest index, so every path agrees."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1) < count[:, None]


def whole(wanted: Float[Tensor, " batch"], explore: Exploration, training: bool, lowest: int, units: int):
    """`wanted` as a whole number: to the nearest (halves up), or at random with the right mean while exploring."""
    offset = torch.rand_like(wanted) if training and explore.sample else 0.5
    return (wanted.detach() + offset).floor().clamp(lowest, units).long()


def straight_through(chosen: Bool[Tensor, "batch units"], soft: Float[Tensor, "batch units"]) -> Gates:
    """Hard gates forward, the gradient of the soft ones backward, for the gates and for their cost."""
    hard = chosen.to(soft.dtype)
    value = hard + (soft - soft.detach())  # the bracket is exactly 0, so the gates are exactly 0 or 1
    return Gates(value, chosen, value.mean(-1))


def _noisy(scores: Tensor, explore: Exploration, training: bool) -> Tensor:
    if not training or explore.noise == 0.0:
        return scores
    gumbel = -torch.log(-torch.log(torch.rand_like(scores).clamp(1e-9, 1 - 1e-7)))
    return scores + explore.noise * gumbel


class _SoftTopK(torch.autograd.Function):
    """Find t with sum_i sigmoid((z_i + t) / tau) = k by bisection; gradients by the implicit function theorem.

    With w_i = p_i (1 - p_i) / tau and W = sum w: dp_i/dz_j = w_i (delta_ij - w_j / W), dp_i/dk = w_i / W.
    """

    @staticmethod
    def forward(ctx, z: Tensor, k: Tensor, tau: float) -> Tensor:
        reach = 30.0 * tau  # sigmoid(30) is 1 to float precision, so the root lies inside
        low = -z.amax(-1, keepdim=True) - reach
        high = -z.amin(-1, keepdim=True) + reach
        for _ in range(60 if z.dtype == torch.float64 else 34):
            middle = (low + high) / 2
            few = torch.sigmoid((z + middle) / tau).sum(-1, keepdim=True) < k[:, None]
            low, high = torch.where(few, middle, low), torch.where(few, high, middle)
        p = torch.sigmoid((z + (low + high) / 2) / tau)
        ctx.save_for_backward(p)
        ctx.tau = tau
        return p

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (p,) = ctx.saved_tensors
        w = p * (1 - p) / ctx.tau
        # Near k = 0 or k = units every w vanishes; the floor turns 0/0 into "no gradient" there.
        mean = (grads[0] * w).sum(-1, keepdim=True) / w.sum(-1, keepdim=True).clamp_min(1e-12)
        return w * (grads[0] - mean), mean[:, 0], None


def soft_top_k(z: Float[Tensor, "batch units"], k: Float[Tensor, " batch"], tau: float) -> Float[Tensor, "batch units"]:
    """Gates in (0, 1) that add up to the real number `k`, differentiable in `z` and in `k`."""
    return _SoftTopK.apply(z, k, tau)  # pyright: ignore[reportReturnType]


def soft_topk(scores, wanted, *, explore: Exploration, training: bool, min_units: int) -> Gates:
    """Default: hard top-k forward, the soft top-k of real k backward, so the task teaches how many and which."""
    z = _noisy(scores, explore, training)
    chosen = top_units(z, whole(wanted, explore, training, min_units, scores.shape[-1]))
    learning = torch.is_grad_enabled() and (z.requires_grad or wanted.requires_grad)
    if not learning:  # the soft gates are there for their gradient alone
        return straight_through(chosen, chosen.to(scores.dtype))
    return straight_through(chosen, soft_top_k(z, wanted, explore.tau))


def paper(scores, wanted, *, explore: Exploration, training: bool, min_units: int) -> Gates:
    """As reported of arXiv 2604.22583: softmax weights over all heads in training, hard top-k in use.

    The two are different functions (the weights add up to 1, the hard gates to k): kept to be compared with.
    """
    z = _noisy(scores, explore, training)
    chosen = top_units(z, whole(wanted, explore, training, min_units, scores.shape[-1]))
    hard = chosen.to(scores.dtype)
    share = wanted / scores.shape[-1]
    value = torch.softmax(z / explore.tau, dim=-1) if training else hard
    return Gates(value, chosen, hard.mean(-1) + (share - share.detach()))


def gumbel(scores, wanted, *, explore: Exploration, training: bool, min_units: int) -> Gates:
    """Differentiable subset pruning (TACL 2021): k soft draws without replacement, the last one fractional."""
    z = _noisy(scores, explore, training)
    units = scores.shape[-1]
    chosen = top_units(z, whole(wanted, explore, training, min_units, units))
    left, soft = z / explore.tau, torch.zeros_like(z)
    for draw in range(units):
        p = torch.softmax(left, dim=-1)
        soft = soft + (wanted[:, None] - draw).clamp(0.0, 1.0) * p
        left = left + torch.log1p(-p.clamp(max=1 - 1e-6))
    return straight_through(chosen, soft)


HC_BETA, HC_LOW, HC_HIGH = 0.33, -0.1, 1.1  # Louizos et al. 2018; Voita et al. 2019 use the same


def hard_concrete(scores, wanted, *, explore: Exploration, training: bool, min_units: int) -> Gates:
    """L0 gates per input (after Louizos 2018, Voita 2019): each unit opens by itself; the budget shifts them all."""
    share = (wanted / scores.shape[-1]).clamp(1e-4, 1 - 1e-4)
    log_alpha = scores + torch.logit(share)[:, None]
    logits = log_alpha
    if training and explore.sample:
        u = torch.rand_like(scores).clamp(1e-6, 1 - 1e-6)
        logits = (log_alpha + torch.log(u) - torch.log1p(-u)) / HC_BETA
    gate = (torch.sigmoid(logits) * (HC_HIGH - HC_LOW) + HC_LOW).clamp(0.0, 1.0)
    lowest = torch.full_like(wanted, min_units).long()
    full = (wanted >= scores.shape[-1])[:, None]  # no score, however low, closes a unit at share 1
    chosen = (gate > 0.5) | top_units(log_alpha, lowest) | full
    opening = torch.sigmoid(log_alpha - HC_BETA * math.log(-HC_LOW / HC_HIGH)).mean(-1)
    gates = straight_through(chosen, torch.sigmoid(logits))
    hard = chosen.to(scores.dtype).mean(-1)
    return Gates(gates.value, chosen, hard + (opening - opening.detach()))


def top_p(scores, wanted, *, explore: Exploration, training: bool, min_units: int) -> Gates:
    """The fewest units whose relevance adds up to the wanted share (after arXiv 2403.07652)."""
    z = _noisy(scores, explore, training)
    share = wanted / scores.shape[-1]
    p = torch.softmax(z, dim=-1)
    order = z.argsort(dim=-1, descending=True, stable=True)
    ranked = p.gather(-1, order)
    before = (ranked.cumsum(-1) - ranked).gather(-1, order.argsort(dim=-1))  # relevance of all better units
    lowest = torch.full_like(wanted, min_units).long()
    full = (share >= 1.0)[:, None]  # rounding of the running sum must not close a unit at share 1
    chosen = (before < share[:, None]) | top_units(z, lowest) | full
    return straight_through(chosen, torch.sigmoid((share[:, None] - before) / explore.tau))


BY_NAME: dict[str, Estimator] = {
    "soft_topk": soft_topk,
    "paper": paper,
    "gumbel": gumbel,
    "hard_concrete": hard_concrete,
    "top_p": top_p,
}
