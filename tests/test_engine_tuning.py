"""A budget from a sample: what is measured, which point is picked, what is kept in the folder, what cannot be had."""

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny
from budgetformer.engine import tuning
from budgetformer.engine.engine import Engine, choose
from budgetformer.engine.native import has
from budgetformer.engine.saved import Point, Saved, read_saved
from budgetformer.engine.tuning import BUDGETS, TargetNotMet, agreement, check_dtype, decided, measure, pick, tune
from budgetformer.errors import UsageError
from budgetformer.tokens import tokenise
from engine_helpers import NATIVE

TEXTS = [" ".join(random.Random(i).choices(tiny.WORDS, k=1 + i % 15)) for i in range(40)]
FEW = (0.2, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.make_folder(tmp_path_factory.mktemp("model") / "tiny", routed=True)


@pytest.fixture
def engine(folder, tmp_path) -> Engine:
    return Engine.load(shutil.copytree(folder, tmp_path / "copy"), threads=1)


def tokens_of(engine: Engine):
    return tokenise(engine.tokenizer, TEXTS, max_length=engine.max_length)


def with_every_head(engine: Engine) -> list[str]:
    return engine.predict(TEXTS, budget=1.0).labels


# ---------------------------------------------------------------------------------------------------------- the choice


def point(budget, share, ms, agreed, accuracy=None) -> Point:
    # What is picked by is the share of all units; that of the heads is the other way round, and must not count.
    return Point(
        budget=budget, head_share=1 - share, units_share=share, ms_per_text=ms, agreement=agreed, accuracy=accuracy
    )


CURVE = [
    point(None, 0.3, 0.4, 0.97, 0.91),
    point(0.1, 0.1, 0.2, 0.60, 0.70),
    point(0.25, 0.25, 0.3, 0.90, 0.89),
    point(0.5, 0.5, 0.5, 0.98, 0.92),
    point(0.8, 0.8, 0.8, 1.00, 0.905),
    point(1.0, 1.0, 1.0, 1.00, 0.90),
]
# The same curve without labels: agreement stands for accuracy.
UNLABELLED = [replace(one, accuracy=None) for one in CURVE]


@pytest.mark.parametrize(
    ("points", "limit", "budget"),
    [
        (CURVE, 0.2, 0.1),  # exactly as fast is fast enough
        (CURVE, 0.25, 0.1),
        (CURVE, 0.35, 0.25),
        (CURVE, 0.45, None),  # the learned budget is one of them
        (CURVE, 0.6, 0.5),
        (CURVE, 9.0, 0.5),  # more heads may answer worse: the best is not the largest
        (UNLABELLED, 0.6, 0.5),
        (UNLABELLED, 9.0, 0.8),  # as good as every head, and faster
    ],
)
def test_for_a_time_the_best_that_is_fast_enough(points, limit, budget):
    assert pick(points, limit, None).budget == budget


@pytest.mark.parametrize(
    ("points", "limit", "budget"),
    [
        (CURVE, 0.0, None),  # better than every unit on, and of such the fewest
        (CURVE, 0.01, 0.25),  # 0.90 - 0.89 is not 0.01 in binary; it is in the limit all the same
        (CURVE, 0.009, None),
        (CURVE, 0.2, 0.1),
        (CURVE, 1.0, 0.1),
        (UNLABELLED, 0.0, 0.8),
        (UNLABELLED, 0.02, 0.5),
        (UNLABELLED, 0.03, None),
        (UNLABELLED, 0.1, 0.25),
        ([CURVE[1], CURVE[5]], 0.1, 1.0),
    ],
)
def test_for_an_accuracy_the_fewest_units_that_keep_it(points, limit, budget):
    assert pick(points, None, limit).budget == budget


def test_what_cannot_be_had_is_said_with_the_nearest():
    with pytest.raises(TargetNotMet, match=r"no budget answers within 0\.1 ms a text; the fastest, 0\.1, takes 0\.2"):
        pick(CURVE, 0.1, None)
    learned = [point(None, 0.1, 0.15, 1.0), CURVE[5]]
    with pytest.raises(TargetNotMet, match=r"the fastest, the learned one, takes 0\.15") as caught:
        pick(learned, 0.1, None)
    assert caught.value.exit_code == 1


def test_an_answer_is_a_class_or_a_set_of_them():
    logits = np.array([[1.0, 3.0, -1.0], [0.5, -2.0, -3.0]])
    assert decided(logits, False).tolist() == [1, 0]
    assert decided(logits, True).tolist() == [[True, True, False], [True, False, False]]
    assert agreement(np.array([1, 0, 2, 2]), np.array([1, 0, 1, 2])) == 0.75
    # A set counts as one answer: one class of three wrong is a text answered otherwise.
    assert agreement(decided(logits, True), decided(np.array([[1.0, 3.0, 1.0], [0.5, -2.0, -3.0]]), True)) == 0.5


# ------------------------------------------------------------------------------------------------------- the measuring


def test_the_curve_has_a_point_for_each_budget_and_the_learned_one(engine):
    truth = np.array([engine.labels.index(label) for label in with_every_head(engine)])
    wrong = (truth + 1) % 3
    half = np.where(np.arange(len(truth)) < 10, truth, wrong)  # a quarter is right
    points = measure(engine, tokens_of(engine), half, [0.5, 0.2, 0.2])
    assert [one.budget for one in points] == [None, 0.2, 0.5, 1.0]
    learned, few, some, full = points
    assert (full.head_share, full.agreement, full.accuracy) == (1.0, 1.0, 0.25)
    # 3 layers of 5 heads: a fifth is 3 of 15, a half 8 (rounded up).
    assert (few.head_share, some.head_share) == (0.2, round(8 / 15, 4))
    own = engine.predict(TEXTS)
    assert learned.head_share == round(float(own.output.gates.mean()), 4)
    assert learned.agreement == np.mean([a == b for a, b in zip(own.labels, with_every_head(engine), strict=True)])
    for one in points:
        named = engine.predict(TEXTS, budget=one.budget) if one.budget else own
        right = named.output.logits.argmax(1) == half
        assert one.accuracy == right.mean()
        assert 0 < one.ms_per_text < 1000
    assert few.agreement < 1, "the model answers alike at any budget, so the test shows little"


def test_heads_and_blocks_are_counted_together(tmp_path):
    """Weighed by FLOPs, of each text at its length: heads of width 7 and blocks of 32 neurons, in a width of 35."""
    engine = Engine.load(tiny.make_folder(tmp_path / "both", routed=True, blocks=7), threads=1)
    tokens = tokens_of(engine)
    points = {one.budget: one for one in measure(engine, tokens, None, FEW)}
    n = np.array([len(one) for one in tokens])
    head, block = 8 * n * 35 * 7 + 4 * n * n * 7, 4 * n * 35 * 32
    for budget, point in points.items():
        output = engine.forward(tokens, budget=budget)
        assert output.blocks is not None
        ran = output.gates.sum((1, 2)) @ head + output.blocks.sum((1, 2)) @ block
        every = (3 * 5 * head + 3 * 7 * block).sum()
        assert point.units_share == pytest.approx(ran / every, abs=1e-4)
        assert point.head_share == pytest.approx(output.gates.mean(), abs=1e-4)
    assert points[1.0].units_share == 1.0
    assert points[0.2].units_share == pytest.approx(0.2, abs=0.05)  # units are whole
    assert abs(points[None].units_share - points[None].head_share) > 0.01


def test_the_engines_own_budget_is_not_in_the_way(engine):
    """Measured beside it, and still there afterwards, also when the measuring fails."""
    expected = measure(engine, tokens_of(engine), None, FEW)
    engine.budget, engine.margin = 0.2, 0.5
    found = measure(engine, tokens_of(engine), None, FEW)
    assert (engine.budget, engine.margin) == (0.2, 0.5)
    for one, other in zip(found, expected, strict=True):
        assert replace(one, ms_per_text=0.0) == replace(other, ms_per_text=0.0)
    with pytest.raises(UsageError, match="budget"):
        measure(engine, tokens_of(engine), None, [1.5])
    assert engine.budget == 0.2


def test_times_are_medians_of_interleaved_rounds(engine, monkeypatch):
    """On a clock of our own: what one round loses to a neighbour does not count, and each budget has a turn in each."""
    order, now = [], 0.0
    forward = Engine.forward
    costs = {None: 1.0, 0.2: 0.5, 0.5: 2.0, 1.0: 4.0}

    def slow(self, tokens, *, budget=None, margin=None, progress=None):
        nonlocal now
        order.append(budget)
        # The first round after the answers is disturbed.
        now += costs[budget] + (100.0 if 4 <= len(order) - 1 < 8 else 0.0)
        return forward(self, tokens, budget=budget, margin=margin)

    monkeypatch.setattr(Engine, "forward", slow)
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now)
    points = measure(engine, tokens_of(engine), None, FEW)
    assert [one.ms_per_text for one in points] == [1000 * cost / len(TEXTS) for cost in costs.values()]
    rounds = [order[i : i + 4] for i in range(0, len(order), 4)]
    assert rounds == [[None, 0.2, 0.5, 1.0]] * (1 + tuning.ROUNDS)


def test_a_dense_model_has_no_learned_point(tmp_path):
    engine = Engine.load(tiny.make_folder(tmp_path / "dense"), threads=1)
    assert not engine.weights.budget.routes
    assert [one.budget for one in measure(engine, tokens_of(engine), None, FEW)] == [*FEW, 1.0]


# ----------------------------------------------------------------------------------------------------------- the tuning


def test_with_labels_the_budget_keeps_their_accuracy(engine):
    """The curve, the budget and what they were measured with are in the folder, and come back."""
    truth = with_every_head(engine)
    engine.margin = 0.9  # what is picked was measured without second answers, and is used so
    chosen = tune(engine, TEXTS, truth, max_accuracy_loss=0.3, budgets=FEW)
    saved = read_saved(engine.folder)
    assert saved == engine.saved
    assert chosen == pick(saved.curve, None, 0.3)
    assert (engine.budget, engine.margin) == (chosen.budget, None)
    assert [one.budget for one in saved.curve] == [None, *FEW, 1.0]
    full = saved.curve[-1]
    assert full.accuracy == 1.0
    picked = next(one for one in saved.curve if one == chosen)
    assert picked.accuracy is not None
    assert picked.accuracy >= 0.7
    assert saved.tuned_on == {
        "texts": len(TEXTS),
        "path": engine.path.name,
        "dtype": "fp32",
        "threads": 1,
        "labelled": True,
    }
    assert engine.predict(TEXTS).output.gates.mean() == pytest.approx(picked.head_share, abs=1e-4)
    # The curve is for people and other programs as well.
    table = json.loads((engine.folder / "engine.json").read_text())
    assert len(table["curve"]) == 4
    # A folder tuned before still loads, and what it was converted to stays.
    assert Engine.load(engine.folder).saved == saved


def test_without_labels_agreement_takes_their_place(engine):
    assert tune(engine, TEXTS, max_accuracy_loss=0.0, budgets=FEW).budget == engine.budget
    saved = read_saved(engine.folder)
    assert all(one.accuracy is None for one in saved.curve)
    assert saved.tuned_on is not None
    assert saved.tuned_on["labelled"] is False
    picked = next(one for one in saved.curve if one.budget == engine.budget)
    assert picked.agreement == 1.0
    fewer = [one for one in saved.curve if one.units_share < picked.units_share]
    assert all(one.agreement < 1.0 for one in fewer)


def test_for_a_time(engine):
    agreed = {one.budget: one.agreement for one in measure(engine, tokens_of(engine), None, FEW)}
    assert min(agreed.values()) < 1.0
    assert agreed[tune(engine, TEXTS, max_ms_per_text=1e6, budgets=FEW, save=False).budget] == 1.0
    assert read_saved(engine.folder) == Saved(), "save=False"
    engine.budget = 0.5
    with pytest.raises(TargetNotMet, match="no budget answers within 0 ms a text"):
        tune(engine, TEXTS, max_ms_per_text=0, budgets=FEW)
    assert engine.budget == 0.5, "a target that is not met changes nothing"
    assert read_saved(engine.folder) == Saved()


def test_pairs_are_tuned_as_pairs(engine, monkeypatch):
    seen = []
    forward = Engine.forward

    def keep(self, tokens, **options):
        seen.extend(tokens)
        return forward(self, tokens, **options)

    monkeypatch.setattr(Engine, "forward", keep)
    tune(engine, TEXTS[:3], pairs=TEXTS[3:6], max_accuracy_loss=1.0, budgets=FEW, save=False)
    expected = tokenise(engine.tokenizer, TEXTS[:3], TEXTS[3:6], max_length=engine.max_length)
    assert seen[:3] == expected
    assert 1 in seen[0].types


def test_a_multi_label_model_is_tuned_on_sets(tmp_path):
    engine = Engine.load(tiny.make_folder(tmp_path / "many", multi_label=True, routed=True), threads=1)
    sets = decided(engine.predict(TEXTS, budget=1.0).output.logits, True)
    truth = [[name for name, on in zip(engine.labels, row, strict=True) if on] for row in sets]
    assert {len(names) for names in truth} > {1}, "every text has one class, so sets are not seen"
    tune(engine, TEXTS, truth, max_accuracy_loss=0.0, budgets=FEW)
    full = read_saved(engine.folder).curve[-1]
    assert (full.budget, full.accuracy) == (1.0, 1.0)
    truth[0] = [] if truth[0] else [engine.labels[0]]
    tune(engine, TEXTS, truth, max_accuracy_loss=0.0, budgets=FEW)
    assert read_saved(engine.folder).curve[-1].accuracy == 1 - 1 / len(TEXTS)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((TEXTS,), {}, "give one of the two"),
        ((TEXTS,), {"max_ms_per_text": 1, "max_accuracy_loss": 0.1}, "give one of the two"),
        ((TEXTS,), {"max_ms_per_text": -1}, "limit is -1"),
        ((TEXTS,), {"max_accuracy_loss": -0.01}, r"limit is -0\.01"),
        ((TEXTS,), {"max_accuracy_loss": math.nan}, "limit is nan"),
        (([],), {"max_accuracy_loss": 0.1}, "0 texts"),
        ((TEXTS, ["cash"]), {"max_accuracy_loss": 0.1}, "40 texts and 1 labels"),
        ((["card"], ["gold"]), {"max_accuracy_loss": 0.1}, "label 'gold' is none of the model's 3 classes"),
        ((["card"], [["cash", "transfer"]]), {"max_accuracy_loss": 0.1}, "several labels"),
        ((["card"],), {"max_accuracy_loss": 0.1, "budgets": (0.5, 0.0)}, "budget"),
    ],
)
def test_what_cannot_be_tuned_is_refused_and_nothing_is_written(engine, arguments, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        tune(engine, *arguments, **options)
    assert "\n" not in str(caught.value)
    assert not (engine.folder / "engine.json").exists()
    assert engine.budget is None


def test_the_budgets_of_a_curve_are_shares_in_order():
    assert list(BUDGETS) == sorted(set(BUDGETS))
    assert BUDGETS[0] > 0
    assert BUDGETS[-1] == 1.0


def test_a_curve_from_before_blocks_had_a_budget_still_reads(tmp_path):
    """Heads alone were counted then, and alone had a budget."""
    old = {"budget": 0.5, "head_share": 0.53, "ms_per_text": 1.0, "agreement": 0.9, "accuracy": None}
    (tmp_path / "engine.json").write_text(json.dumps({"dtype": None, "agreement": None, "curve": [old]}))
    assert read_saved(tmp_path).curve == (Point(**old, units_share=0.53),)


# -------------------------------------------------------------------------------------------------------- another type


def test_a_type_is_compared_with_fp32_on_the_same_texts(engine):
    if not NATIVE:
        pytest.skip("needs the compiled library: make native")
    tokens = tokens_of(engine)
    same = check_dtype(engine, tokens, "fp32")
    assert (same["texts"], same["agreement"], same["largest_difference"]) == (40, 1.0, 0.0)
    found = check_dtype(engine, tokens, "int8")
    exact = engine.forward(tokens)
    quick = replace(engine, path=choose(engine.weights, "int8")[0]).forward(tokens)
    assert found["largest_difference"] == float(np.abs(exact.logits - quick.logits).max()) > 1e-3
    assert found["agreement"] == float((exact.logits.argmax(1) == quick.logits.argmax(1)).mean())
    assert found["head_share"] == [float(exact.gates.mean()), float(quick.gates.mean())]


def test_a_type_that_is_not_to_be_had_cannot_be_compared(engine, monkeypatch):
    monkeypatch.setattr("budgetformer.engine.native.paths", lambda: ["plain"])
    if NATIVE and not has("plain", "bf16"):
        with pytest.raises(UsageError, match=r"bf16.* cannot be checked here.*instructions that plain does not have"):
            check_dtype(engine, tokens_of(engine), "bf16")
