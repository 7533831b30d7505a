"""The last step of training: meet the budget in use, where no dropout disturbs what the routers see."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from budgetformer.config import MULTI_LABEL
from budgetformer.metrics import costs, predict, task_loss, work
from budgetformer.router import Router, margins
from budgetformer.text import Encoded
from budgetformer.training.importance import set_first

CLOSE = 0.002  # share of the units' FLOPs
HELD = 1000  # texts set aside at most


@torch.no_grad()
def settle(model: Any, encoded: Encoded, *, sample: int = 1000, rounds: int = 8) -> float:
    """Shift all budget controllers together until the share of units' FLOPs in use is the target; returns the shift.

    Training holds the share under dropout; without it the routers see other states and spend a little less or more.
    One number is fitted, on training texts, without labels: which inputs and layers get more than others stays as
    learned. A target that no shift within (-1, 1) in logits reaches is approached from the better side. In a fixed
    order nothing was learned that could have drifted, and the budget is met as it is.
    """
    if model.config.budget_config.relevance == "fixed":
        return 0.0
    target = model.config.budget_config.first_target
    texts = Encoded(encoded.items[:: max(1, len(encoded) // sample)][:sample])
    routers = [module for module in model.modules() if isinstance(module, Router)]
    biases = [cast(Tensor, router.controller[2].bias) for router in routers]
    learned = [bias.clone() for bias in biases]
    model.eval()

    def missed(shift: float) -> float:
        for bias, start in zip(biases, learned, strict=True):
            bias.copy_(start + shift)
        return costs(predict(model, texts), model.config)["units_flops_share"] - target

    found = {0.0: missed(0.0)}
    low, high = (-1.0, 0.0) if found[0.0] > 0 else (0.0, 1.0)
    while min(abs(miss) for miss in found.values()) > CLOSE and len(found) < rounds:
        middle = (low + high) / 2
        found[middle] = missed(middle)
        low, high = (low, middle) if found[middle] > 0 else (middle, high)
    best = min(found, key=lambda shift: (abs(found[shift]), abs(shift)))
    missed(best)
    return best


@dataclass(frozen=True)
class _Way:
    """A first answer, the margin under which a second one follows, and the loss of what is answered then."""

    first: float | None
    margin: float
    loss: float


@torch.no_grad()
def settle_cascade(model: Any, encoded: Encoded) -> float:
    """Find the margin below which an input is answered again, so that both answers together meet the target.

    encoded: texts that training has not seen, since on those it has seen a model is too sure. Where they have labels
    and the order of units is fixed, the levels up to the target and the target itself are tried as first answers too
    (there nothing is left for second ones), and what has the least loss is taken, after a temperature each. Sets
    `BudgetConfig.cascade` and `first` in the model's config, the routers to the first answer, and returns the margin.
    """
    config = model.config
    budget = config.budget_config
    config.budget = {**config.budget, "cascade": 0.0}
    labels = [item["labels"] for item in encoded.items if "labels" in item]
    firsts: list[float | None] = [None]
    if budget.relevance == "fixed" and len(labels) == len(encoded):
        others = {*budget.levels, budget.target} - {budget.first_target}
        firsts += sorted(level for level in others if level <= budget.target)
    whole = predict(model.eval(), encoded, budget=1.0).logits if len(firsts) > 1 else None
    ways = []
    for first in firsts:
        answers = predict(model.eval(), encoded, budget=first)
        sure = margins(answers.logits, multi_label=config.problem_type == MULTI_LABEL)
        margin, loss = _affordable(sure, *work(answers, config).units(budget), budget.target), 0.0
        if whole is not None:
            loss = _calibrated_loss(torch.where((sure < margin)[:, None], whole, answers.logits), torch.tensor(labels))
        ways.append(_Way(first, margin, loss))
    best = min(ways, key=lambda way: way.loss)
    if best.first is not None:
        set_first(model, best.first, sum(encoded.lengths) / len(encoded))
        config.budget = {**config.budget, "first": min(1.0, best.first / budget.target)}
    config.budget = {**config.budget, "cascade": best.margin}
    return best.margin


def _calibrated_loss(logits: Tensor, truth: Tensor) -> float:
    """The loss at the temperature that suits these answers best (Guo et al. 2017).

    Trained models are far too sure, first answers and second ones not alike, and the plain loss would tell more of
    that than of who is right.
    """

    def loss(log_temperature: float) -> float:
        return task_loss(logits / math.exp(log_temperature), truth)

    best: Any = minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded")
    return float(best.fun)


def _affordable(sure: Tensor, ran: Tensor, every: Tensor, target: float) -> float:
    """The margin up to which the least sure inputs can all be answered again. sure, ran, every (inputs,): how sure the
    first answers are, what they cost, and what every unit costs.
    """
    left = float(target * every.sum() - ran.sum())
    order = sure.argsort()
    affordable = int((every[order].cumsum(0) <= left).sum())
    # Half way between the last input that can be paid for and the first that cannot.
    bounds = torch.cat([sure.new_zeros(1), sure[order], sure.new_ones(1)])
    return float(bounds[affordable : affordable + 2].mean()) if affordable else 0.0


def hold_out(encoded: Encoded, seed: int) -> tuple[Encoded, Encoded]:
    """The texts to train on, and a tenth of them, at most a thousand, that are set aside for `settle_cascade`."""
    order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(seed)).tolist()
    aside = set(order[: min(HELD, max(1, len(order) // 10))])
    parts = ([item for i, item in enumerate(encoded.items) if (i in aside) == held] for held in (False, True))
    train, held = (Encoded(items) for items in parts)
    train.truncated = encoded.truncated
    return train, held
