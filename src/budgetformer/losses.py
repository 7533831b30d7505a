"""What training minimises, in named parts."""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from budgetformer.config import BudgetConfig
from budgetformer.errors import UsageError
from budgetformer.router import Routing


@dataclass(frozen=True)
class LossParts:
    """Scalars; a part that was not asked for is None. Their sum is what training minimises."""

    task: Tensor | None = None
    distillation: Tensor | None = None
    budget: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """The sum of the parts."""
        parts = [part for field in fields(self) if (part := getattr(self, field.name)) is not None]
        return torch.stack(parts).sum()

    def detached(self) -> dict[str, Tensor]:
        """The parts by name, without gradients."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.detach() for name, value in values.items() if value is not None}


def task(
    logits: Tensor,
    labels: Tensor,
    problem: str,
    *,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """Cross-entropy for one label per input, binary cross-entropy for several. logits (batch, labels).

    sample_weight (batch,): factors of the inputs' losses, with a mean of 1 over the training data. The mean over the
    batch is not divided by its own weights: a batch of light inputs is to count for little.
    """
    reduction = "mean" if sample_weight is None else "none"
    if problem == "single_label_classification":
        labels = labels.view(-1)
        loss = F.cross_entropy(
            logits, labels, weight=class_weights, label_smoothing=label_smoothing, reduction=reduction
        )
        if sample_weight is not None and class_weights is not None:
            loss = loss / class_weights[labels].mean()  # as "mean" does
        return loss if sample_weight is None else (loss * sample_weight).mean()
    if problem == "multi_label_classification":
        wanted = labels.to(logits.dtype)
        wanted = wanted * (1 - label_smoothing) + 0.5 * label_smoothing
        loss = F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=class_weights, reduction=reduction)
        return loss if sample_weight is None else (loss.mean(-1) * sample_weight).mean()
    raise UsageError(f"problem_type={problem!r}: choose single_label_classification or multi_label_classification")


def distillation(
    logits: Tensor, teacher: Tensor, problem: str, temperature: float, *, sample_weight: Tensor | None = None
) -> Tensor:
    """Divergence from the teacher's softened answer, scaled by the squared temperature (Hinton et al. 2015)."""
    if problem == "multi_label_classification":
        soft = torch.sigmoid(teacher / temperature)
        each = F.binary_cross_entropy_with_logits(logits / temperature, soft, reduction="none").mean(-1)
    else:
        student = F.log_softmax(logits / temperature, dim=-1)
        each = F.kl_div(student, F.softmax(teacher / temperature, dim=-1), reduction="none").sum(-1)
    return (each if sample_weight is None else each * sample_weight).mean() * temperature**2


def difficulty(teacher: Tensor, labels: Tensor, problem: str) -> Tensor:
    """The teacher's loss on each input, standardised over the batch: (batch,)."""
    if problem == "multi_label_classification":
        loss = F.binary_cross_entropy_with_logits(teacher, labels.to(teacher.dtype), reduction="none").mean(-1)
    else:
        loss = F.cross_entropy(teacher, labels.view(-1), reduction="none")
    return (loss - loss.mean()) / loss.std(correction=0).clamp_min(1e-6)


def mean_cost(*kinds: tuple[tuple[Routing, ...], Tensor]) -> tuple[Tensor, Tensor]:
    """The share of units' FLOPs that each input spends, (batch,), and that the batch spends.

    Each kind is its routings, one per layer, and what all of its units in one layer cost an input at its own length,
    (batch,): longer inputs weigh more, and a block of neurons as much as it costs beside a head.
    """
    spent, whole = 0.0, 0.0
    for routings, cost in kinds:
        share = torch.stack([routing.cost for routing in routings], dim=1)
        cost = cost.to(share.dtype)
        spent = spent + share.sum(1) * cost
        whole = whole + len(routings) * cost
    each = torch.as_tensor(spent / whole)
    return each, torch.as_tensor(spent).sum() / torch.as_tensor(whole).sum()


def lagrange(cost: Tensor, target: float, price: Tensor) -> Tensor:
    """The Lagrangian term of `cost = target`. `price`, of a share of heads, is moved outside the gradient.

    No squared term of the batch's own cost: its expectation holds the variance over inputs, so it would teach the
    router to give every input the same.
    """
    return price.detach() * (cost - target)


def paper_hinge(routings: tuple[Routing, ...], budget: BudgetConfig) -> Tensor:
    """Hinge on the interval [share_min, share_max], as reported of arXiv 2604.22583."""
    share = torch.stack([routing.share for routing in routings], dim=1)
    return (F.relu(budget.share_min - share) + F.relu(share - budget.share_max)).mean()


def entropy(routings: tuple[Routing, ...], tau: float) -> Tensor:
    """Mean entropy of the relevance distributions, in nats."""
    scores = torch.stack([routing.scores for routing in routings], dim=1)
    log_p = F.log_softmax(scores / tau, dim=-1)
    return -(log_p.exp() * log_p).sum(-1).mean()
