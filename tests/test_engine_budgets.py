"""A named budget is spread over the layers as `router.allocate` spreads it, without torch."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from budgetformer.attention import check_budget
from budgetformer.engine import budgets
from budgetformer.errors import UsageError
from budgetformer.router import allocate

SHARES = st.floats(0.0, 1.0, exclude_min=True, allow_subnormal=False)
PROFILES = st.lists(st.floats(0.0, 1.0, width=32, allow_subnormal=False), min_size=1, max_size=24)


def close_call(shares, profile, units, min_units) -> bool:
    """Whether two layers' remainders are so near to each other that rounding decides who gets the last unit."""
    lowest = min(min_units, units)
    free = units - lowest
    total = np.clip(shares * len(profile) * units, len(profile) * lowest, len(profile) * units)
    open_share = np.clip((profile * units - lowest) / max(free, 1), 1e-3, 1 - 1e-3)
    wanted = (total - len(profile) * lowest) / max(free, 1)
    exact = lowest + budgets._soft_top_k(np.log(open_share / (1 - open_share)), wanted) * free
    remainder = np.sort((exact + 1e-7) % 1.0, axis=1)
    return bool((np.diff(remainder, axis=1) < 1e-6).any())


@settings(max_examples=120, deadline=None)
@given(st.lists(SHARES, min_size=1, max_size=7), PROFILES, st.integers(1, 20), st.integers(0, 5))
def test_equals_the_routers_own(shares, profile, units, min_units):
    shares, profile = np.array(shares), np.array(profile, np.float32)
    found = budgets.allocate(shares, profile, units, min_units)
    assert found.dtype == np.int32
    wanted = allocate(torch.from_numpy(shares), torch.from_numpy(profile), units, min_units).numpy()
    np.testing.assert_array_equal(found.sum(1), wanted.sum(1))
    assume(not close_call(shares, profile.astype(np.float64), units, min_units))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("layers", [1, 6, 12])
@pytest.mark.parametrize("units", [1, 5, 12])
def test_equals_the_routers_own_for_profiles_as_training_leaves_them(layers, units):
    dice = np.random.default_rng(3)
    for _ in range(20):
        shares = np.append(dice.random(5), 1.0)
        profile = dice.uniform(1 / units, 1.0, layers).astype(np.float32)
        wanted = allocate(torch.from_numpy(shares), torch.from_numpy(profile), units, 1).numpy()
        np.testing.assert_array_equal(budgets.allocate(shares, profile, units, 1), wanted)


def test_a_hand_worked_number():
    """0.5 of 2 * 4 units is 4; the layers asked for a quarter and three quarters, so 1 and 3."""
    assert budgets.allocate(np.array([0.5]), np.array([0.25, 0.75]), 4, 0).tolist() == [[1, 3]]
    assert budgets.allocate(np.array([0.01]), np.array([0.25, 0.75]), 4, 1).tolist() == [[1, 1]]


@pytest.mark.parametrize("layers", [2, 3, 7, 9, 17])
def test_among_equal_layers_the_first_gets_the_unit(layers):
    """However many there are: the ends of long vectors are computed apart, and differ in the last bit."""
    profile = np.full(layers, 0.3, np.float32)
    for extra in range(layers):
        share = np.array([(2 * layers + extra) / (5 * layers)])
        wanted = [3] * extra + [2] * (layers - extra)
        assert budgets.allocate(share, profile, 5, 0).tolist() == [wanted]


@pytest.mark.parametrize("share", [0.125, 0.375])
def test_of_two_halves_the_first_layer_gets_the_unit(share):
    """1.5 and 10.5, or 4.5 and 7.5 of 12 units: equal but for the last bits of a sigmoid."""
    found = [
        budgets.allocate(np.array([0.5]), np.array(p), 12, 0)[0, 0] for p in ([share, 1 - share], [1 - share, share])
    ]
    assert found == [np.ceil(12 * share), np.ceil(12 * (1 - share))]


def test_an_input_gets_the_same_beside_any_other():
    dice = np.random.default_rng(0)
    profile, shares = dice.random(6).astype(np.float32), np.array([0.3, 0.7, 0.3, 1.0, 0.123])
    together = budgets.allocate(shares, profile, 12, 1)
    for i, share in enumerate(shares):
        np.testing.assert_array_equal(together[i : i + 1], budgets.allocate(np.array([share]), profile, 12, 1))


def test_one_number_is_spread_once(monkeypatch):
    calls = []
    spread = budgets._spread
    monkeypatch.setattr(budgets, "_spread", lambda *args: calls.append(1) or spread(*args))
    budgets._one.cache_clear()
    profile = np.array([0.2, 0.9], np.float32)
    first = budgets.allocate(np.full(3, 0.4), profile, 5, 1)
    first[0, 0] = 99  # the caller's own
    second = budgets.allocate(np.full(7, 0.4), profile, 5, 1)
    assert second.shape == (7, 2)
    assert second.max() <= 5
    assert len(calls) == 1
    budgets.allocate(np.full(3, 0.4), profile[::-1], 5, 1)
    budgets.allocate(np.full(3, 0.4), profile, 5, 2)
    assert len(calls) == 3


def test_no_input_at_all():
    assert budgets.allocate(np.zeros(0), np.ones(3, np.float32), 5, 1).shape == (0, 3)


@pytest.mark.parametrize("budget", [0.0, -0.1, 1.01, float("nan"), [0.5, 0.0, 0.5], [0.5, 0.5], [[0.5, 0.5, 0.5]]])
def test_shares_are_refused_as_the_model_refuses_them(budget):
    with pytest.raises(UsageError) as ours:
        budgets.shares(budget, 3)
    with pytest.raises(UsageError) as theirs:
        check_budget(budget, 3, torch.device("cpu"))
    assert str(ours.value) == str(theirs.value)


def test_shares_for_each_input():
    assert budgets.shares(0.25, 3).tolist() == [0.25, 0.25, 0.25]
    assert budgets.shares(np.array([0.5, 1.0, 0.1]), 3).tolist() == [0.5, 1.0, 0.1]


def test_it_needs_no_torch():
    code = "import sys, budgetformer.engine.budgets, budgetformer.engine.packed\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
