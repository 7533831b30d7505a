"""The router sees real tokens only, starts with everything on, and spends a named budget to the unit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetformer import reference
from budgetformer.config import ESTIMATORS, ROUTER_VIEWS, BudgetConfig
from budgetformer.router import Router, allocate, forced, pool
from core_helpers import stir

BATCH, TOKENS, WIDTH, UNITS = 3, 11, 13, 7


def hidden(batch=BATCH, tokens=TOKENS):
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("view", ROUTER_VIEWS)
@pytest.mark.parametrize("rubbish", [1e6, -1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_ignored_in_every_view(view, rubbish, side):
    x, lengths = hidden(), (11, 5, 1)
    keep = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    for row, length in enumerate(lengths):
        keep[row, slice(0, length) if side == "right" else slice(TOKENS - length, None)] = True
    padded = x.masked_fill(~keep[..., None], rubbish)
    alone = [pool(x[i : i + 1, keep[i]], torch.ones(1, n, dtype=torch.bool), view) for i, n in enumerate(lengths)]
    torch.testing.assert_close(pool(padded, keep, view), torch.cat(alone), rtol=0, atol=1e-12)


def test_pool_by_hand():
    x = torch.tensor([[[1.0, 5.0], [3.0, -1.0], [100.0, 100.0]]])
    keep = torch.tensor([[True, True, False]])
    assert pool(x, keep).tolist() == [[2.0, 2.0]]
    assert pool(x, keep, "mean+first").tolist() == [[2.0, 2.0, 1.0, 5.0]]
    assert pool(x, keep, "mean+max").tolist() == [[2.0, 2.0, 3.0, 5.0]]
    assert pool(x, keep.flip(1), "mean+first").tolist() == [[51.5, 49.5, 3.0, -1.0]]


@pytest.mark.parametrize("view", ROUTER_VIEWS)
def test_an_input_without_tokens_gives_no_nan(view):
    assert pool(hidden(), torch.zeros(BATCH, TOKENS, dtype=torch.bool), view).isfinite().all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("units", [2, 7, 12, 24])
@pytest.mark.parametrize("view", ROUTER_VIEWS)
def test_a_new_router_runs_every_unit(estimator, units, view, settled):
    router = Router(WIDTH, units, BudgetConfig(estimator=estimator, view=view)).double().eval()
    routing = router(hidden(17), torch.ones(17, TOKENS, dtype=torch.bool), explore=settled)
    assert routing.chosen.all()
    assert torch.equal(routing.gates, torch.ones_like(routing.gates))
    assert bool((routing.share < 1).all()), "a share of exactly 1 would have no gradient to leave it"


def test_a_layer_at_its_floor_can_come_back(settled):
    """The wanted number has a gradient even where only min_units run."""
    router = Router(WIDTH, UNITS, BudgetConfig()).double().train()
    torch.nn.init.constant_(router.controller[2].bias, -5.0)  # pyright: ignore[reportArgumentType]
    routing = router(hidden(), torch.ones(BATCH, TOKENS, dtype=torch.bool), explore=settled)
    assert (routing.chosen.sum(-1) == 1).all()
    routing.share.sum().backward()
    gradient = router.controller[2].bias.grad
    assert isinstance(gradient, torch.Tensor)
    assert float(gradient) > 1e-3


def test_every_parameter_learns_from_the_gates(curious):
    router = stir(Router(WIDTH, UNITS, BudgetConfig()).double()).train()
    routing = router(hidden(), torch.ones(BATCH, TOKENS, dtype=torch.bool), explore=curious)
    (routing.gates * torch.randn(BATCH, UNITS, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in router.parameters())


def test_a_named_count_runs_the_highest_scores(settled):
    router = stir(Router(WIDTH, UNITS, BudgetConfig(min_units=2)).double()).eval()
    keep = torch.ones(4, TOKENS, dtype=torch.bool)
    routing = router(hidden(4), keep, explore=settled, count=torch.tensor([0, 3, 7, 9]))
    assert routing.chosen.sum(-1).tolist() == [2, 3, 7, 7]
    worst_chosen = routing.scores.masked_fill(~routing.chosen, 1e9).amin(-1)
    best_left = routing.scores.masked_fill(routing.chosen, -1e9).amax(-1)
    assert (worst_chosen > best_left).all()
    torch.testing.assert_close(routing.cost, torch.tensor([2, 3, 7, 7]).double() / UNITS)


def test_more_wanted_units_than_there_are(settled):
    router = Router(WIDTH, 2, BudgetConfig(min_units=5)).double().eval()
    assert router(hidden(), torch.ones(BATCH, TOKENS, dtype=torch.bool), explore=settled).chosen.all()


def test_low_precision_around_the_router_changes_no_choice(settled):
    router = stir(Router(WIDTH, UNITS, BudgetConfig())).eval()
    x, keep = hidden().float(), torch.ones(BATCH, TOKENS, dtype=torch.bool)
    plain = router(x, keep, explore=settled)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = router(x, keep, explore=settled)
    assert low.scores.dtype == torch.float32
    assert torch.equal(plain.scores, low.scores)
    assert torch.equal(plain.chosen, low.chosen)


def test_forced_gates_are_taken_as_they_are():
    gates = torch.tensor([[0.0, 1.0, 0.5], [0.0, 0.0, 0.0]])
    routing = forced(gates)
    assert torch.equal(routing.gates, gates)
    assert routing.chosen.tolist() == [[False, True, True], [False, False, False]]
    assert routing.share.tolist() == pytest.approx([2 / 3, 0.0])


def test_blocks_of_neurons_are_units_too(settled):
    """The same router over a feed-forward layer of 7 blocks: what it leaves out is out of the sum."""
    inner = 7 * 5
    x = hidden()
    first, second = torch.nn.Linear(WIDTH, inner).double(), torch.nn.Linear(inner, WIDTH).double()
    router = stir(Router(WIDTH, 7, BudgetConfig()).double()).eval()
    gates = router(x, torch.ones(BATCH, TOKENS, dtype=torch.bool), explore=settled).gates
    assert 0 < gates.sum() < gates.numel()
    weights = dict(weight_in=first.weight, bias_in=first.bias, weight_out=second.weight, bias_out=second.bias)
    found = reference.feed_forward(x, gates=gates, activation=torch.relu, **weights)
    masked = second(torch.relu(first(x)) * gates.repeat_interleave(5, dim=1)[:, None])
    torch.testing.assert_close(found, masked, rtol=0, atol=1e-12)
    dense = reference.feed_forward(x, gates=torch.ones_like(gates), activation=torch.relu, **weights)
    torch.testing.assert_close(dense, second(torch.relu(first(x))), rtol=0, atol=1e-12)


@given(
    profile=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7),
    units=st.sampled_from([1, 5, 7, 12]),
    min_units=st.sampled_from([0, 1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_allocate_spends_exactly_and_monotonically(profile, units, min_units):
    budgets = torch.linspace(0.01, 1.0, 67)
    counts = allocate(budgets, torch.tensor(profile), units, min_units)
    lowest = min(min_units, units)
    exact = (budgets.double() * len(profile) * units + 0.5).floor().clamp(min=lowest * len(profile))
    assert counts.sum(-1).tolist() == exact.tolist()
    assert bool((counts.sum(-1).diff() >= 0).all())
    assert int(counts.min()) >= lowest
    assert int(counts.max()) <= units
    assert bool((counts[-1] == units).all())


def test_allocate_gives_back_what_training_spent():
    """At the budget that training ended with, every layer gets its own mean share."""
    profile = torch.tensor([6, 4, 2, 1], dtype=torch.float64) / 7
    assert allocate(profile.mean()[None], profile, 7, 1).tolist() == [[6, 4, 2, 1]]


def test_allocate_follows_the_profile():
    counts = allocate(torch.linspace(0.1, 1.0, 19), torch.tensor([0.9, 0.5, 0.2]), 12, 1)
    assert bool((counts[:, 0] >= counts[:, 1]).all())
    assert bool((counts[:, 1] >= counts[:, 2]).all())
    flat = allocate(torch.tensor([0.5]), torch.full((3,), 0.3), 12, 1)
    assert flat.tolist() == [[6, 6, 6]]
