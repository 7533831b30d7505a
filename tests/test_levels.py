"""Training at named budgets beside the learned one, and one order of units for all inputs."""

import numpy as np
import pytest
import torch
from transformers import TrainerState

from budgetformer import estimators, flops, metrics
from budgetformer.config import BudgetConfig
from budgetformer.engine import Engine
from budgetformer.errors import UsageError
from budgetformer.hf import BudgetFormerForSequenceClassification, BudgetSchedule
from budgetformer.router import Router, margins
from budgetformer.schedule import Schedule
from budgetformer.settings import TrainSettings
from budgetformer.text import Encoded
from budgetformer.tokens import Tokens
from budgetformer.training import job
from budgetformer.training.fit import _leaves_unused
from budgetformer.training.importance import block_cost, fix_order, most_important
from budgetformer.training.settling import _calibrated_loss, settle_cascade
from core_helpers import VOCABULARY, flop_counter, hf_config, ids_and_keep, save_tokenizer, stir

BLOCKS = 5
SIZES = {"intermediate_size": 32 * BLOCKS, "num_labels": 3, "dropout": 0.0, "classifier_dropout": 0.0}
FIXED = {"scope": "heads+blocks", "ffn_blocks": BLOCKS, "relevance": "fixed", "target": 0.6, "first": 0.5}
LEVELS = {"whole": 0.2, "levels": (0.3, 0.6)}
LENGTHS = [7, 3, 9, 1, 7, 4, 9, 2, 6, 8, 3, 5]


def model_of(seed=3, **budget):
    torch.manual_seed(seed)
    return BudgetFormerForSequenceClassification(hf_config(BudgetConfig(**budget), initializer_range=0.5, **SIZES))


def texts_of(lengths=LENGTHS):
    dice = np.random.default_rng(0)
    return Encoded([{"input_ids": dice.integers(1, VOCABULARY, n).tolist(), "labels": n % 3} for n in lengths])


def fixed_model(seed=3, **changes):
    """A model with one order of units for all inputs, and the importance it was told."""
    model = model_of(seed, **{**FIXED, **changes})
    dice = torch.Generator().manual_seed(seed)
    heads, blocks = torch.rand(3, 7, generator=dice), torch.rand(3, BLOCKS, generator=dice)
    fix_order(model, heads, blocks, block_cost(model, texts_of()))
    return model, heads, blocks


# ---------------------------------------------------------------- which step trains at which budget


def turns(model, steps):
    return [model._next_level() for _ in range(steps)]


@pytest.mark.parametrize(("whole", "levels"), [(0.2, ()), (0.2, (0.3, 0.6)), (0.3, (0.3, 0.6)), (0.05, (0.5,))])
def test_every_budget_has_its_share_of_the_steps_at_all_times(whole, levels):
    model = model_of(target=0.4, whole=whole, levels=levels)
    named = turns(model, 400)
    for start in range(0, 400, 100):
        for budget in (1.0, *levels):
            assert named[start : start + 100].count(budget) == pytest.approx(100 * whole, abs=2)
    assert named.count(None) == pytest.approx(400 * (1 - whole * (1 + len(levels))), abs=4)
    assert named[0] is not None or whole < 0.1, "the first steps are no exception"
    assert turns(model_of(target=0.4), 5) == [None] * 5


def test_the_turn_is_the_steps_so_that_a_resumed_run_goes_on_with_it():
    model = model_of(target=0.4, **LEVELS)
    named = turns(model, 50)
    state, again = TrainerState(global_step=20, max_steps=50), model_of(target=0.4, **LEVELS)
    BudgetSchedule().on_step_begin(None, state, None, model=again)
    assert turns(again, 30) == named[20:]
    assert again.progress == 0.4


def test_a_step_runs_at_the_budget_whose_turn_it_is():
    model = stir(model_of(target=0.4, scope="heads+blocks", ffn_blocks=BLOCKS, **LEVELS))
    ids, keep = ids_and_keep(LENGTHS, 9)
    labels = torch.arange(len(ids)) % 3
    named, seen = turns(model, 12), set()
    for turn, budget in enumerate(named):
        with torch.no_grad():
            alone = model.eval()(ids, keep, budget=budget)
        model.train()
        model.turn = turn
        held = [b.clone() for b in (model.multiplier, model.overspent, *model.budgetformer.encoder.buffers())]
        out = model(ids, keep, labels=labels)
        torch.testing.assert_close(out.logits, alone.logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(out.gates, alone.gates)
        assert ("budget" in out.loss_parts) == (budget is None), "a named budget has no price"
        now = (model.multiplier, model.overspent, *model.budgetformer.encoder.buffers())
        assert all(map(torch.equal, held, now)) == (budget is not None), "and teaches the controllers nothing"
        model.budgetformer.encoder.profile.fill_(1.0)
        model.budgetformer.encoder.block_profile.fill_(1.0)
        seen.add(budget)
    assert seen == {None, 1.0, 0.3, 0.6}


def test_processes_wait_for_no_gradient_of_a_router_that_has_none():
    assert _leaves_unused(model_of(target=0.4, whole=0.2))
    assert not _leaves_unused(model_of(target=0.4))
    fixed, *_ = fixed_model(**LEVELS)
    assert not _leaves_unused(fixed)


def test_levels_that_leave_nobody_to_be_routed_are_refused():
    for wrong in ({"levels": (0.3,)}, {"whole": 0.4, "levels": (0.3, 0.6)}):
        with pytest.raises(UsageError, match="some must be left"):
            BudgetConfig(target=0.5, **wrong)
    for level in (0.0, 1.0, "0.5", float("nan")):
        with pytest.raises(UsageError, match="every level is a share"):
            BudgetConfig(target=0.5, whole=0.2, levels=(level,))
    with pytest.raises(UsageError, match="relevance='fix'"):
        BudgetConfig(relevance="fix")


# ---------------------------------------------------------------- one order for all inputs


def test_every_input_runs_the_most_important_units():
    model, heads, blocks = fixed_model()
    ids, keep = ids_and_keep(LENGTHS, 9)
    with torch.no_grad():
        out = model.eval()(ids, keep)
    first = model.config.budget_config.first_target
    on, blocks_on = most_important(heads, blocks, first, block_cost(model, texts_of()))
    assert torch.equal(out.gates, on.expand(len(ids), -1, -1))
    assert torch.equal(out.blocks, blocks_on.expand(len(ids), -1, -1))
    share = metrics.costs(metrics.predict(model, texts_of()), model.config)["units_flops_share"]
    assert share == pytest.approx(first, abs=0.03), "one head is .02 of the units"


def test_the_most_important_units_by_hand():
    heads = torch.tensor([[4.0, 3.0, 0.1], [2.0, 0.5, 0.2]])
    blocks = torch.tensor([[6.0, 1.0], [0.3, 0.2]])  # per operation .5 times that
    on, blocks_on = most_important(heads, blocks, 8 / 14, 2.0)
    # The best of each layer and kind cost 1 + 1 + 2 + 2; the next by importance per operation are a head (3.0) and,
    # since nothing more fits after it, a head of .5 in the other layer.
    assert on.tolist() == [[1, 1, 0], [1, 1, 0]]
    assert blocks_on.tolist() == [[1, 0], [1, 0]]
    assert most_important(heads, None, 0.5, 1.0)[0].tolist() == [[1, 1, 0], [1, 0, 0]]


def test_more_budget_adds_units_and_takes_none_away():
    model, *_ = fixed_model()
    ids, keep = ids_and_keep(LENGTHS, 9)
    before = None
    for budget in (0.2, 0.3, 0.45, 0.6, 0.8, 1.0):
        with torch.no_grad():
            out = model.eval()(ids, keep, budget=budget)
        units = torch.cat([out.gates, out.blocks], dim=2)
        assert before is None or bool((units >= before).all())
        before = units
    assert before is not None
    assert bool((before == 1).all())


def test_training_leaves_the_order_alone_and_computes_no_more_than_it_asks_for():
    model, *_ = fixed_model(**LEVELS)
    routers = {name: p.clone() for name, p in model.named_parameters() if ".router." in name}
    shares = model.budgetformer.encoder.profile.clone(), model.budgetformer.encoder.block_profile.clone()
    ids, keep = ids_and_keep([9] * 30, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    model.progress = 0.0  # nothing is explored, from the first step on

    def step(turn, **named):
        model.turn = turn
        optimizer.zero_grad()
        with flop_counter() as counter:
            model(ids, keep, labels=torch.arange(30) % 3, **named).loss.backward()
        optimizer.step()
        return counter.get_total_flops()

    named = turns(model, 12)
    dense = step(0, budget=1.0)
    for turn, budget in enumerate(named):
        share = model.config.budget_config.first_target if budget is None else budget
        # Routers, classifier and what every input pays for come on top.
        assert step(turn) / dense == pytest.approx(share, abs=0.08), budget
    assert len(set(named)) == 4
    for name, parameter in model.named_parameters():
        assert name not in routers or torch.equal(parameter, routers[name]), name
        assert ".router." not in name or parameter.grad is None, name
    torch.testing.assert_close(model.budgetformer.encoder.profile, shares[0])
    torch.testing.assert_close(model.budgetformer.encoder.block_profile, shares[1])
    assert sum(isinstance(module, Router) for module in model.modules()) == 6


def test_gates_of_a_fixed_order_have_no_soft_twin(monkeypatch):
    fixed, *_ = fixed_model()
    learned = stir(model_of(**{**FIXED, "relevance": "learned"}))
    ids, keep = ids_and_keep(LENGTHS, 9)
    asked = []
    soft = estimators.soft_top_k
    monkeypatch.setattr(estimators, "soft_top_k", lambda *given: asked.append(given) or soft(*given))
    for model, times in ((fixed, 0), (learned, 6)):
        asked.clear()
        model.train()(ids, keep, labels=torch.arange(len(ids)) % 3).loss.backward()
        assert len(asked) == times
    assert any(p.grad is not None and bool(p.grad.any()) for p in fixed.parameters())


def test_nothing_is_explored_where_the_order_is_fixed():
    fixed, learned = (BudgetConfig(target=0.5, relevance=which) for which in ("fixed", "learned"))
    for progress in (0.0, 0.3, 1.0):
        assert Schedule(budget=fixed).at(progress) == Schedule(budget=fixed).settled
    assert Schedule(budget=learned).at(0.0).sample


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_a_folder_keeps_order_and_levels_and_the_engine_answers_alike(path, tmp_path):
    model, *_ = fixed_model(**LEVELS)
    model.config.budget = {**model.config.budget, "cascade": 0.1}
    save_tokenizer(tmp_path)
    model.save_pretrained(tmp_path)
    again = BudgetFormerForSequenceClassification.from_pretrained(tmp_path).eval()
    assert again.config.budget_config == model.config.budget_config
    assert again.config.budget_config.levels == (0.3, 0.6)
    texts = texts_of()
    wanted = metrics.predict(again, texts)
    tokens = [Tokens(ids=item["input_ids"], types=None, truncated=False) for item in texts.items]
    found = Engine.load(tmp_path, path=path).answer(tokens).output
    assert np.allclose(found.logits, wanted.logits.numpy(), atol=1e-4)
    assert np.array_equal(found.gates, wanted.gates.numpy())
    assert 0 < (found.gates > 1).any((1, 2)).sum() < len(tokens), "some are answered twice"


# ---------------------------------------------------------------- what first answers spend, when training is over


def held_with(model, labels):
    """The texts with what `labels` makes of the answers at the learned budget, at the target and of the whole."""
    texts = texts_of(LENGTHS * 4)
    first, level, whole = (metrics.predict(model.eval(), texts, budget=b) for b in (None, 0.6, 1.0))
    ran, every = metrics.work(first, model.config).units(model.config.budget_config)
    sure = margins(first.logits, multi_label=False)
    affordable = int((0.6 * every.sum() - ran.sum()) / every.mean())
    again = sure.argsort().argsort() < affordable
    twice = torch.where(again[:, None], whole.logits, first.logits)
    wanted = {"level": level.logits, "twice": twice}[labels].argmax(-1).tolist()
    return Encoded([{**item, "labels": label} for item, label in zip(texts.items, wanted, strict=True)])


def without_labels(texts):
    return Encoded([{"input_ids": item["input_ids"]} for item in texts.items])


@pytest.mark.parametrize("better", ["level", "twice"])
def test_what_answers_better_on_held_out_texts_is_kept(better):
    model, *_ = fixed_model(**LEVELS)
    held = held_with(model, better)
    margin = settle_cascade(model, held)
    budget, answers = model.config.budget_config, metrics.predict(model, held)
    share = metrics.costs(answers, model.config)["units_flops_share"]
    assert share == pytest.approx(0.6, abs=0.05)
    assert budget.cascade == margin
    again = flops.again(answers.gates)
    if better == "level":
        assert budget.first == 1.0
        named = metrics.predict(model, held, budget=0.6)
        assert torch.equal(answers.gates[again == 0], named.gates[again == 0])
        assert again.float().mean() < 0.05
    else:
        assert budget.first == 0.5
        assert 0.1 < again.float().mean() < 0.5


@pytest.mark.parametrize("better", ["level", "twice"])
def test_a_model_trained_at_its_target_may_get_cheaper_first_answers(better):
    model, *_ = fixed_model(first=1.0, **LEVELS)
    texts = texts_of(LENGTHS * 4)
    cheap, level, whole = (metrics.predict(model.eval(), texts, budget=b) for b in (0.3, None, 1.0))
    ran, every = metrics.work(cheap, model.config).units(model.config.budget_config)
    rank = margins(cheap.logits, multi_label=False).argsort().argsort()
    again = rank < int((0.6 * every.sum() - ran.sum()) / every.mean())
    twice = torch.where(again[:, None], whole.logits, cheap.logits)
    wanted = {"level": level.logits, "twice": twice}[better].argmax(-1).tolist()
    held = Encoded([{**item, "labels": label} for item, label in zip(texts.items, wanted, strict=True)])
    settle_cascade(model, held)
    assert model.config.budget_config.first == pytest.approx(1.0 if better == "level" else 0.5)
    answers = metrics.predict(model, held)
    assert metrics.costs(answers, model.config)["units_flops_share"] == pytest.approx(0.6, abs=0.05)
    answered_once = flops.again(answers.gates) == 0
    assert torch.equal(answers.gates[answered_once], (level if better == "level" else cheap).gates[answered_once])


def test_how_sure_answers_are_does_not_decide_between_ways():
    """The cheaper way is right more often and far too sure; a temperature for each shows that it is the better one."""
    torch.manual_seed(0)
    truth = torch.randint(0, 3, (500,))
    right = torch.nn.functional.one_hot(truth, 3).float()
    wrong = right.roll(1, 1)
    better = torch.where(torch.rand(500, 1) < 0.9, right, wrong) * 30
    worse = torch.where(torch.rand(500, 1) < 0.7, right, wrong) * 2
    assert metrics.task_loss(better, truth) > metrics.task_loss(worse, truth)
    assert _calibrated_loss(better, truth) < _calibrated_loss(worse, truth)
    assert _calibrated_loss(better * 0.01, truth) == pytest.approx(_calibrated_loss(better, truth), abs=0.02)
    several = torch.stack([truth > 0, truth > 1], 1).float()
    assert _calibrated_loss((2 * several - 1) * 5, several) < 0.01


def test_without_labels_first_answers_spend_what_they_were_told():
    model, *_ = fixed_model(**LEVELS)
    held = held_with(model, "level")
    settle_cascade(model, without_labels(held))
    assert model.config.budget_config.first == 0.5


# ---------------------------------------------------------------- what `train` takes where nothing is said


def settings_of(**named):
    return TrainSettings(data="unused", output_dir="unused", **named)


def test_blocks_are_trained_in_a_fixed_order_with_second_answers_unless_told_otherwise():
    both = job.budget_of(settings_of(scope="heads+blocks", target_budget=0.25))
    assert (both.relevance, both.second, both.first) == ("fixed", "twin", 0.6)
    assert (both.whole, both.levels) == (0.3, (0.2, 0.3))
    assert both.may_answer_twice
    own = {"scope": "heads+blocks", "second_answers": "self"}
    itself = job.budget_of(settings_of(**own, target_budget=0.25))
    assert (itself.relevance, itself.first, itself.whole, itself.levels) == ("fixed", 1.0, 0.13, (0.15, 0.5))
    assert itself.may_answer_twice
    assert job.budget_of(settings_of(**own, target_budget=0.6)).levels == (0.36,)
    heads = job.budget_of(settings_of(target_budget=0.25))
    assert (heads.relevance, heads.first, heads.whole, heads.levels) == ("learned", 1.0, 0.0, ())
    assert not heads.may_answer_twice
    told = {"scope": "heads+blocks", "relevance": "learned", "target_budget": 0.25}
    twice = job.budget_of(settings_of(**told))
    alone = job.budget_of(settings_of(**told, second_answers="self"))
    assert (alone.first, alone.whole) == (0.6, 0.2), "only what answers by itself is trained for it"
    assert (twice.relevance, twice.first, twice.whole, twice.levels) == ("learned", 0.6, 0.0, ())
    assert twice.may_answer_twice
    told["first_share"] = 1.0
    alone = job.budget_of(settings_of(**told))
    assert (alone.relevance, alone.first, alone.whole, alone.levels) == ("learned", 1.0, 0.0, ())
    assert not alone.may_answer_twice
    named = job.budget_of(settings_of(**told, levels="0.1,0.7", whole_share=0.3))
    assert (named.whole, named.levels) == (0.3, (0.1, 0.7))
    dense = job.budget_of(settings_of(scope="heads+blocks", target_budget=1.0))
    assert not dense.routes
    assert dense.first == 1.0
    assert not dense.may_answer_twice


@pytest.mark.parametrize("wrong", ["0.5;0.2", "1", "0,0.5", "half", ""])
def test_levels_that_are_no_shares_are_refused(wrong):
    with pytest.raises(UsageError, match="shares in \\(0, 1\\), separated by commas"):
        settings_of(levels=wrong)


@pytest.mark.parametrize(
    ("named", "epochs", "rate"),
    [
        ({"scope": "heads+blocks"}, 9, 2e-3),
        ({"scope": "heads+blocks", "second_answers": "self"}, 6, 2e-3),
        ({"scope": "heads+blocks", "recovery_epochs": 5, "recovery_rate": 4e-3}, 5, 4e-3),
        ({"scope": "heads+blocks", "relevance": "learned"}, 3, 1e-3),
        ({}, 3, 1e-3),
    ],
)
def test_a_fixed_order_and_its_twin_train_for_longer(monkeypatch, tmp_path, named, epochs, rate):
    seen = []

    def listen(model, train, validation, options, **rest):
        seen.append((model.config.budget_config.relevance, options.epochs, options.learning_rate))

    monkeypatch.setattr(job, "fit", listen)
    asked = settings_of(target_budget=0.5, ffn_blocks=BLOCKS, epochs=3, learning_rate=1e-3, distillation=0.0, **named)
    job.fit_budgeted(model_of(), job.budget_of(asked), texts_of(), None, asked, tmp_path, print)
    relevance = "fixed" if named and named.get("relevance") is None else "learned"
    assert seen == [(relevance, epochs, pytest.approx(rate))]
    seen.clear()
    job.fit_dense(model_of(), texts_of(), None, asked, tmp_path, print)
    assert [told[1:] for told in seen] == [(6 if relevance == "fixed" else 3, pytest.approx(1e-3))]


@pytest.mark.parametrize("bf16", ["on", "off"])
def test_the_twin_is_asked_in_the_numbers_of_the_training(monkeypatch, tmp_path, bf16):
    seen = {}

    def listen(name, call):
        def heard(*args, **named):
            seen[name] = torch.is_autocast_enabled("cpu")
            return call(*args, **named)

        return heard

    for name in ("group_neurons", "unit_importance", "fit"):
        monkeypatch.setattr(job, name, listen(name, getattr(job, name) if name != "fit" else lambda *a, **k: None))
    asked = settings_of(scope="heads+blocks", target_budget=0.6, ffn_blocks=BLOCKS, bf16=bf16, quiet=True)
    job.fit_budgeted(model_of(), job.budget_of(asked), texts_of(), None, asked, tmp_path, print)
    assert seen == {"group_neurons": bf16 == "on", "unit_importance": bf16 == "on", "fit": False}


@pytest.mark.parametrize("first_share", [0.6, None])
def test_a_fixed_order_is_trained_settled_and_kept(tmp_path, first_share):
    options = {"epochs": 1, "bf16": "off", "quiet": True, "first_share": first_share, "second_answers": "self"}
    asked = settings_of(scope="heads+blocks", target_budget=0.6, ffn_blocks=BLOCKS, **options)
    budget = job.budget_of(asked)
    dense = model_of()
    torch.manual_seed(0)
    texts = texts_of(LENGTHS * 4)
    made, _ = job.fit_budgeted(
        dense, budget, texts, None, asked, tmp_path, print, keep_checkpoints=False, held=without_labels(texts)
    )
    answers = metrics.predict(made.eval(), texts)
    once = answers.gates[flops.again(answers.gates) == 0]
    # Without labels to say what pays, first answers spend what they were told: all of it, where nothing was said.
    assert 0 < len(once) <= len(texts)
    assert (len(once) < len(texts)) == (first_share is not None)
    assert torch.equal(once, once[:1].expand_as(once))
    first = made.config.budget_config.first_target
    made.config.budget = {**made.config.budget, "cascade": 0.0}
    alone = metrics.costs(metrics.predict(made, texts), made.config)["units_flops_share"]
    assert alone == pytest.approx(first, abs=0.03)
