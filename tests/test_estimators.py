"""Every estimator decides hard, and its gradient says both how many units and which."""

import dataclasses
import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetformer.config import ESTIMATORS
from budgetformer.estimators import BY_NAME, soft_top_k, top_units, whole

NAMES = tuple(BY_NAME)
STRAIGHT = tuple(name for name in NAMES if name != "paper")  # the paper's is soft in training, on purpose
BATCH, UNITS = 11, 7


def decide(name, scores, wanted, explore, *, training, min_units=1):
    return BY_NAME[name](scores, wanted, explore=explore, training=training, min_units=min_units)


def random_case():
    scores = torch.randn(BATCH, UNITS, dtype=torch.float64)
    return scores, 1 + (UNITS - 1) * torch.rand(BATCH, dtype=torch.float64)


def test_the_configuration_knows_every_estimator():
    assert ESTIMATORS == NAMES


@pytest.mark.parametrize("name", STRAIGHT)
@pytest.mark.parametrize("explores", [False, True], ids=["settled", "curious"])
def test_training_gates_are_exactly_zero_or_one(name, explores, settled, curious):
    scores, wanted = random_case()
    gates = decide(name, scores.float(), wanted.float(), curious if explores else settled, training=True)
    assert set(gates.value.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(gates.value != 0, gates.chosen)
    assert torch.equal(gates.cost, gates.chosen.float().mean(-1))


@pytest.mark.parametrize("name", NAMES)
def test_use_is_hard_and_deterministic(name, curious):
    scores, wanted = random_case()
    first = decide(name, scores, wanted, curious, training=False)
    second = decide(name, scores, wanted, curious, training=False)
    assert torch.equal(first.value, first.chosen.double())
    assert torch.equal(first.value, second.value)


def test_the_papers_estimator_is_another_function_in_training(settled):
    scores, wanted = random_case()
    gates = decide("paper", scores, wanted, settled, training=True)
    torch.testing.assert_close(gates.value.sum(-1), torch.ones(BATCH, dtype=torch.float64))
    assert torch.equal(gates.cost, gates.chosen.double().mean(-1))


@pytest.mark.parametrize("name", ["soft_topk", "paper", "gumbel", "top_p"])
def test_ties_go_to_the_lowest_index(name, settled):
    scores = torch.zeros(1, 5)
    chosen = decide(name, scores, torch.tensor([1.9]), settled, training=False).chosen
    assert chosen.tolist() == [[True, True, False, False, False]]


def test_top_units_by_hand():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]] * 4)
    chosen = top_units(scores, torch.tensor([0, 2, 4, 5]))
    assert chosen.int().tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [False, True], ids=["use", "training"])
def test_at_least_min_units(name, training, settled):
    scores = torch.tensor([[5.0, -5.0, 0.0, 40.0, -40.0]])
    chosen = decide(name, scores, torch.tensor([2.0]), settled, training=training, min_units=2).chosen
    assert int(chosen.sum()) >= 2
    nothing = decide(name, -scores.abs(), torch.tensor([0.0]), settled, training=training, min_units=0).chosen
    assert int(nothing.sum()) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [False, True], ids=["use", "training"])
def test_share_one_gives_all_ones(name, training, settled, curious):
    scores = torch.cat([torch.randn(3, UNITS), 40 * torch.randn(3, UNITS)])
    wanted = torch.full((6,), float(UNITS))
    for explore in (settled, curious):
        gates = decide(name, scores, wanted, explore, training=training)
        assert gates.chosen.all()
        if name != "paper" or not training:
            assert torch.equal(gates.value, torch.ones(6, UNITS))


@pytest.mark.parametrize("name", STRAIGHT)
def test_the_task_teaches_how_many_and_which(name, curious):
    """A loss on the gates alone reaches the scores and the wanted number."""
    explore = dataclasses.replace(curious, noise=0.0)
    scores, wanted = random_case()
    scores.requires_grad_()
    wanted.requires_grad_()
    gates = decide(name, scores, wanted, explore, training=True)
    (gates.value * torch.randn(BATCH, UNITS, dtype=torch.float64)).sum().backward()
    assert scores.grad is not None
    assert wanted.grad is not None
    assert (scores.grad.abs().amax(-1) > 1e-6).all()
    assert (wanted.grad.abs() > 1e-6).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_budget_pulls_the_wanted_number_down(name, curious):
    scores, wanted = random_case()
    wanted.requires_grad_()
    decide(name, scores, wanted, curious, training=True).cost.sum().backward()
    assert wanted.grad is not None
    assert (wanted.grad > 0).all()


def test_the_papers_scores_learn_through_the_softmax(settled):
    scores, wanted = random_case()
    scores.requires_grad_()
    gates = decide("paper", scores, wanted, settled, training=True)
    (gates.value * torch.randn(BATCH, UNITS, dtype=torch.float64)).sum().backward()
    assert scores.grad is not None
    assert scores.grad.abs().sum() > 0


def test_soft_top_k_gradient_numerically():
    z = torch.randn(3, UNITS, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([1.3, 3.5, 5.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z, k: soft_top_k(z, k, 0.7), (z, k), eps=1e-5, atol=1e-7)


def test_soft_top_k_gradient_is_the_implicit_formula():
    z, tau = torch.randn(UNITS, dtype=torch.float64), 0.4
    k = torch.tensor(2.6, dtype=torch.float64)
    p = soft_top_k(z[None], k[None], tau)[0]
    w = p * (1 - p) / tau
    by_z = w[:, None] * (torch.eye(UNITS, dtype=torch.float64) - w / w.sum())
    found_z, found_k = torch.autograd.functional.jacobian(lambda z, k: soft_top_k(z[None], k[None], tau)[0], (z, k))
    torch.testing.assert_close(found_z, by_z, rtol=0, atol=1e-12)
    torch.testing.assert_close(found_k, w / w.sum(), rtol=0, atol=1e-12)


def test_soft_top_k_by_hand():
    """Two units, z = (ln 3, -ln 3), k = 1, tau = 1: t = 0, so p = (3/4, 1/4); w = 3/16 each, W = 3/8."""
    z = torch.tensor([[math.log(3.0), -math.log(3.0)]], dtype=torch.float64, requires_grad=True)
    k = torch.ones(1, dtype=torch.float64, requires_grad=True)
    p = soft_top_k(z, k, 1.0)
    torch.testing.assert_close(p, torch.tensor([[0.75, 0.25]], dtype=torch.float64))
    p[0, 0].backward()
    torch.testing.assert_close(z.grad, torch.tensor([[3 / 32, -3 / 32]], dtype=torch.float64))
    torch.testing.assert_close(k.grad, torch.tensor([0.5], dtype=torch.float64))


@given(
    z=st.lists(st.floats(-20, 20), min_size=UNITS, max_size=UNITS),
    share=st.floats(0.02, 0.98),
    tau=st.sampled_from([0.1, 1.0, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_soft_top_k_adds_up_and_keeps_the_order(z, share, tau):
    scores = torch.tensor([z], dtype=torch.float64)
    k = torch.tensor([share * UNITS], dtype=torch.float64)
    p = soft_top_k(scores, k, tau)
    torch.testing.assert_close(p.sum(-1), k, rtol=0, atol=1e-6)
    assert bool(((p >= 0) & (p <= 1)).all())
    assert bool((p[0, scores[0].argsort(stable=True)].diff() >= 0).all())


def test_soft_top_k_at_its_ends_has_no_nan():
    z = torch.randn(2, UNITS, requires_grad=True)
    k = torch.tensor([0.0, float(UNITS)], requires_grad=True)
    p = soft_top_k(z, k, 0.1)
    p.sum().backward()
    torch.testing.assert_close(p, torch.tensor([[0.0], [1.0]]).expand(2, UNITS))
    assert z.grad is not None
    assert k.grad is not None
    assert z.grad.isfinite().all()
    assert k.grad.isfinite().all()


def test_random_rounding_has_the_right_mean(curious):
    wanted = torch.tensor([1.0, 2.3, 4.75]).repeat_interleave(20_000)
    drawn = whole(wanted, curious, True, 1, UNITS).view(3, -1).double()
    # The mean of 20,000 draws strays by 0.0035 at most; four times that is allowed.
    torch.testing.assert_close(drawn.mean(1), torch.tensor([1.0, 2.3, 4.75]).double(), rtol=0, atol=0.014)
    assert set(drawn[1].tolist()) == {2.0, 3.0}


def test_rounding_in_use_is_to_the_nearest_and_halves_go_up(settled, curious):
    wanted = torch.tensor([0.2, 1.49, 2.5, 6.6, 9.0])
    assert whole(wanted, settled, True, 1, UNITS).tolist() == [1, 1, 3, 7, 7]
    assert whole(wanted, curious, False, 1, UNITS).tolist() == [1, 1, 3, 7, 7]


def test_gumbel_by_hand(settled):
    """One draw from softmax(ln 3, 0) = (3/4, 1/4); a second, without what was drawn, fills up to (1, 1)."""
    scores = torch.tensor([[math.log(3.0), 0.0]] * 2, dtype=torch.float64, requires_grad=True)
    explore = dataclasses.replace(settled, tau=1.0)
    wanted = torch.tensor([1.0, 1.5], dtype=torch.float64, requires_grad=True)
    gates = decide("gumbel", scores, wanted, explore, training=True)
    assert gates.chosen.tolist() == [[True, False], [True, True]]
    # The first unit's soft gate grows by its probability in the second draw: 3 * 1/4 of (3 * 1/4 + 1 * 3/4) = 1/2.
    gates.value[1, 0].backward()
    assert wanted.grad is not None
    torch.testing.assert_close(wanted.grad[1], torch.tensor(0.5, dtype=torch.float64))


def test_top_p_by_hand(settled):
    """Relevance 0.1, 0.6, 0.3: a share of 0.7 takes the second and the third, 0.5 the second alone."""
    scores = torch.log(torch.tensor([[0.1, 0.6, 0.3]] * 3))
    chosen = decide("top_p", scores, 3 * torch.tensor([0.7, 0.5, 0.95]), settled, training=False).chosen
    assert chosen.int().tolist() == [[0, 1, 1], [0, 1, 0], [1, 1, 1]]


def test_hard_concrete_opens_as_often_as_the_budget_says(curious):
    shares = torch.tensor([0.2, 0.5, 0.9]).repeat_interleave(3000)
    gates = decide("hard_concrete", torch.zeros(9000, UNITS), shares * UNITS, curious, training=True, min_units=0)
    opened = gates.chosen.float().view(3, -1).mean(1)
    # 21,000 draws each stray by 0.0035.
    torch.testing.assert_close(opened, torch.tensor([0.2, 0.5, 0.9]), rtol=0, atol=0.014)


@pytest.mark.parametrize("name", NAMES)
def test_noise_explores_in_training_only(name, curious):
    scores, wanted = torch.zeros(200, UNITS), torch.full((200,), 3.0)
    explore = dataclasses.replace(curious, sample=name == "hard_concrete")
    training = decide(name, scores, wanted, explore, training=True).chosen
    use = decide(name, scores, wanted, explore, training=False).chosen
    assert len(training.unique(dim=0)) > 10
    assert len(use.unique(dim=0)) == 1


def test_estimators_have_one_signature():
    assert len({str(inspect.signature(BY_NAME[name])) for name in NAMES}) == 1
