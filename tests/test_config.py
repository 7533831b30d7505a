"""A configuration is valid or not constructed; the schedule is a pure function of progress."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetformer.config import PRESETS, BudgetConfig, EncoderConfig
from budgetformer.errors import UsageError
from budgetformer.schedule import Schedule

BAD_BUDGETS = [
    {"target": 0.0},
    {"target": 1.01},
    {"target": float("nan")},
    {"estimator": "softtopk"},
    {"view": "max"},
    {"loss": "hinge"},
    {"min_units": -1},
    {"router_hidden": 0},
    {"tau_end": 0.0},
    {"tau_end": 2.0},
    {"anneal_until": 1.5},
    {"explore_until": -0.1},
    {"noise": -1.0},
    {"multiplier_rate": float("nan")},
    {"share_min": 0.95},
]
BAD_ENCODERS = [
    {"num_heads": 7},
    {"num_layers": 0},
    {"activation": "swish"},
    {"norm": "rms"},
    {"embedding_size": 0},
    {"token_types": -1},
    {"dropout": 1.0},
]


@pytest.mark.parametrize("change", BAD_BUDGETS, ids=str)
def test_a_budget_that_makes_no_sense_is_not_constructed(change):
    with pytest.raises(UsageError, match=f"budget: {next(iter(change))}="):
        BudgetConfig(**change)


@pytest.mark.parametrize("change", BAD_ENCODERS, ids=str)
def test_an_encoder_that_makes_no_sense_is_not_constructed(change):
    with pytest.raises(UsageError, match=f"encoder: {next(iter(change))}="):
        EncoderConfig(**change)


def test_half_a_word_is_not_a_vocabulary():
    """UsageError; a TypeError where a run-time checker of annotations is quicker."""
    with pytest.raises((UsageError, TypeError), match="vocab_size"):
        EncoderConfig(vocab_size=1.5)  # pyright: ignore[reportArgumentType]


def test_the_papers_encoder_is_a_preset():
    paper = EncoderConfig.preset("paper", vocab_size=97)
    assert (paper.num_layers, paper.hidden_size, paper.num_heads, paper.head_size) == (4, 768, 8, 96)
    assert paper.vocab_size == 97
    with pytest.raises(UsageError, match="choose one of paper"):
        EncoderConfig.preset("huge")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name):
    assert EncoderConfig.preset(name).num_layers >= 1


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BudgetConfig().target = 0.5  # pyright: ignore[reportAttributeAccessIssue]


def test_training_starts_with_every_head_and_ends_settled_at_the_target():
    schedule = Schedule(
        budget=BudgetConfig(target=0.4, anneal_until=0.5, explore_until=0.6, tau_start=1.0, tau_end=0.1)
    )
    start, end = schedule.at(0.0), schedule.at(1.0)
    assert (start.target, start.noise, start.tau, start.sample) == (1.0, 1.0, 1.0, True)
    assert end == schedule.settled
    assert (end.target, end.noise, end.tau, end.sample) == (0.4, 0.0, 0.1, False)
    # Half way down the slope, by hand: 0.4 + 0.6 * (1 - 0.25 / 0.5).
    assert schedule.at(0.25).target == pytest.approx(0.7)
    assert schedule.at(0.5).target == 0.4
    assert schedule.at(0.59).sample
    assert not schedule.at(0.6).sample


@given(a=st.floats(0, 1), b=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_exploration_never_comes_back(a, b):
    schedule = Schedule(budget=BudgetConfig(target=0.3))
    early, late = schedule.at(min(a, b)), schedule.at(max(a, b))
    assert early.target >= late.target >= 0.3
    assert early.noise >= late.noise
    assert early.tau >= late.tau >= 0.1


def test_no_annealing_means_the_target_from_the_first_step():
    first = Schedule(budget=BudgetConfig(target=0.3, anneal_until=0.0, explore_until=0.0)).at(0.0)
    assert (first.target, first.noise, first.sample) == (0.3, 0.0, False)
