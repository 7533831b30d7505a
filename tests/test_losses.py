"""The parts of the loss, by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from budgetformer import losses
from budgetformer.config import BudgetConfig
from budgetformer.errors import UsageError
from budgetformer.router import Routing

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def routing(share, scores, cost):
    gates = torch.ones_like(scores)
    return Routing(torch.tensor(share), scores, gates, gates.bool(), torch.tensor(cost))


def test_task_by_hand():
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    found = losses.task(logits, torch.tensor([0, 1]), SINGLE)
    torch.testing.assert_close(found, torch.tensor((math.log(4 / 3) + math.log(2)) / 2))
    several = losses.task(torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([[1, 0]]), MULTI)
    torch.testing.assert_close(several, torch.tensor((math.log(4 / 3) + math.log(2)) / 2))


def test_class_weights_and_smoothing():
    logits, labels = torch.randn(11, 5), torch.randint(0, 5, (11,))
    weights = torch.rand(5)
    found = losses.task(logits, labels, SINGLE, class_weights=weights, label_smoothing=0.1)
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, weight=weights, label_smoothing=0.1))
    several = torch.randint(0, 2, (11, 5))
    found = losses.task(logits, several, MULTI, class_weights=weights, label_smoothing=0.2)
    smooth = several * 0.8 + 0.1
    torch.testing.assert_close(found, F.binary_cross_entropy_with_logits(logits, smooth, pos_weight=weights))
    # Labels as a column are taken as well.
    torch.testing.assert_close(losses.task(logits, labels[:, None], SINGLE), F.cross_entropy(logits, labels))


def test_an_unknown_problem_is_refused():
    with pytest.raises(UsageError, match="problem_type='regression'"):
        losses.task(torch.zeros(1, 2), torch.zeros(1), "regression")


@pytest.mark.parametrize("problem", [SINGLE, MULTI])
def test_distillation_is_least_at_the_teachers_answer(problem):
    teacher = torch.randn(11, 5, dtype=torch.float64)
    logits = teacher.clone().requires_grad_()
    loss = losses.distillation(logits, teacher, problem, 2.0)
    loss.backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros_like(teacher))
    assert losses.distillation(teacher + torch.randn(11, 5), teacher, problem, 2.0) > loss
    if problem == SINGLE:
        torch.testing.assert_close(loss.detach(), torch.tensor(0.0, dtype=torch.float64), rtol=0, atol=1e-12)


def test_distillation_by_hand():
    """Teacher (3/4, 1/4), student (1/2, 1/2); at temperature 2 twice the logits say the same, and the loss is * 4."""
    teacher, student = torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    torch.testing.assert_close(losses.distillation(student, teacher, SINGLE, 1.0), torch.tensor(expected))
    torch.testing.assert_close(losses.distillation(student, 2 * teacher, SINGLE, 2.0), torch.tensor(4 * expected))


@pytest.mark.parametrize("problem", [SINGLE, MULTI])
def test_difficulty_is_standardised_and_high_where_the_teacher_errs(problem):
    teacher = torch.tensor([[9.0, -9.0], [0.0, 0.0], [-9.0, 9.0]])
    labels = torch.tensor([0, 0, 0]) if problem == SINGLE else torch.tensor([[1, 0]] * 3)
    found = losses.difficulty(teacher, labels, problem)
    torch.testing.assert_close(found.mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.std(correction=0), torch.tensor(1.0))
    assert bool((found.diff() > 0).all())


def test_mean_cost_weighs_inputs_by_their_flops():
    """Costs (1, 0) and (0, 0.5) of two layers: per input 0.5 and 0.25; the second input is three times as dear."""
    scores = torch.zeros(2, 7)
    routings = (routing([1.0, 1.0], scores, [1.0, 0.0]), routing([1.0, 1.0], scores, [0.0, 0.5]))
    weights = torch.tensor([10.0, 30.0], dtype=torch.float64)
    each, cost = losses.mean_cost((routings, weights))
    assert each.tolist() == [0.5, 0.25]
    assert float(cost) == pytest.approx((0.5 * 10 + 0.25 * 30) / 40)


def test_mean_cost_over_two_kinds_of_units():
    """Heads of one layer cost 10, its blocks 30: an input with all heads and half its blocks spends 25 of 40."""
    heads, blocks = routing([1.0], torch.zeros(1, 7), [1.0]), routing([1.0], torch.zeros(1, 5), [0.5])
    each, cost = losses.mean_cost(((heads,), torch.tensor([10.0])), ((blocks,), torch.tensor([30.0])))
    assert each.tolist() == [0.625]
    assert float(cost) == pytest.approx(0.625)


def test_lagrange_by_hand():
    cost = torch.tensor(0.7, requires_grad=True)
    price = torch.tensor(2.0, requires_grad=True)
    loss = losses.lagrange(cost, 0.4, price)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2 * 0.3)
    assert cost.grad is not None
    assert float(cost.grad) == pytest.approx(2)
    assert price.grad is None, "the price is the controller's, not the optimizer's"


def test_the_papers_hinge_by_hand():
    budget = BudgetConfig(loss="paper", share_min=0.2, share_max=0.8)
    scores = torch.zeros(2, 7)
    routings = (routing([0.1, 0.5], scores, [0.0, 0.0]), routing([0.9, 1.0], scores, [0.0, 0.0]))
    assert float(losses.paper_hinge(routings, budget)) == pytest.approx((0.1 + 0.0 + 0.1 + 0.2) / 4)


def test_entropy_by_hand():
    flat = routing([1.0], torch.zeros(1, 7), [1.0])
    sure = routing([1.0], torch.tensor([[100.0, 0, 0, 0, 0, 0, 0]]), [1.0])
    assert float(losses.entropy((flat,), 0.5)) == pytest.approx(math.log(7))
    assert float(losses.entropy((flat, sure), 1.0)) == pytest.approx(math.log(7) / 2)
    # The temperature flattens: scores 2 ln 3 at tau 2 are (3/4, 1/4).
    tilted = routing([1.0], torch.tensor([[2 * math.log(3.0), 0.0]]), [1.0])
    assert float(losses.entropy((tilted,), 2.0)) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_the_total_is_the_sum_of_the_named_parts():
    parts = losses.LossParts(task=torch.tensor(1.0, requires_grad=True), budget=torch.tensor(-0.25))
    assert float(parts.total.detach()) == 0.75
    assert parts.total.requires_grad
    assert {k: float(v) for k, v in parts.detached().items()} == {"task": 1.0, "budget": -0.25}
    assert not any(v.requires_grad for v in parts.detached().values())
