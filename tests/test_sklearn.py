"""The scikit-learn estimator: its contract, its data, its weights, its files, and what other tools do with it."""

import copy
import gc
import json
import random
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

import budgetformer
from budgetformer import losses
from budgetformer.engine import Engine
from budgetformer.errors import BudgetFormerError, DataError, ModelFolderError, UsageError
from budgetformer.ports.sklearn import BudgetFormerClassifier, read_labels, read_texts
from budgetformer.predict import load_model
from budgetformer.tokens import tokenise
from engine_helpers import in_python
from tiny import make_folder

TOPICS = {"bird": ("crow", "swan", "robin"), "fruit": ("apple", "pear", "plum"), "tool": ("hammer", "saw", "drill")}
FILLER = ("the", "a", "some", "this", "was", "near", "with", "and")
SMALL = dict(model="scratch:tiny", max_length=17, batch_size=16, threads=1, bf16="off")
FAST = dict(learning_rate=3e-3, router_learning_rate=3e-3)
SECRET = "my private words"


def tiny(**changes):
    """An estimator that is fitted in a moment; enough for all that does not ask how well it learns."""
    return BudgetFormerClassifier(**{**SMALL, **FAST, "epochs": 1, **changes})


def rows(count, seed=0, topics=("bird", "fruit", "tool")):
    dice = random.Random(seed)
    labels = [dice.choice(topics) for _ in range(count)]
    texts = []
    for label in labels:
        words = [*dice.choices(FILLER, k=dice.randint(1, 6)), dice.choice(TOPICS[label])]
        dice.shuffle(words)
        texts.append(" ".join(words))
    return texts, labels


TEXTS, LABELS = rows(240)
FEW, FEW_LABELS = TEXTS[:48], LABELS[:48]


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """A fit measures memory, and so collects garbage a dozen times; what was imported is not looked through again."""
    tiny().fit(FEW, FEW_LABELS)  # imports what training needs
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def fitted():
    return tiny(epochs=6, target_budget=0.5).fit(TEXTS, LABELS)


@pytest.fixture(scope="module")
def folder(fitted, tmp_path_factory):
    home = tmp_path_factory.mktemp("saved") / "model"
    fitted.save(home)
    return home


@pytest.fixture(scope="module")
def of_pairs():
    """The label is in the second text."""
    return tiny(epochs=6).fit([("with the same", text) for text in TEXTS], LABELS)


# ---------------------------------------------------------------- scikit-learn's own checks


@pytest.mark.parametrize(
    "check",
    [
        estimator_checks.check_estimator_cloneable,
        estimator_checks.check_estimator_repr,
        estimator_checks.check_no_attributes_set_in_init,
        estimator_checks.check_parameters_default_constructible,
        estimator_checks.check_get_params_invariance,
        estimator_checks.check_set_params,
        estimator_checks.check_estimator_tags_renamed,
        estimator_checks.check_valid_tag_types,
        estimator_checks.check_mixin_order,
        estimator_checks.check_do_not_raise_errors_in_init_or_set_params,
        estimator_checks.check_estimators_unfitted,
        estimator_checks.check_fit_score_takes_y,
        estimator_checks.check_requires_y_none,
        estimator_checks.check_positive_only_tag_during_fit,
    ],
    ids=lambda check: check.__name__,
)
def test_a_check_of_scikit_learn_passes(check, monkeypatch):
    # The checks that fit do so on an array of numbers; here every row of it is a text.
    monkeypatch.setattr("budgetformer.ports.sklearn.read_texts", lambda X: ([str(row) for row in X], None))
    check("BudgetFormerClassifier", tiny())


def test_check_estimator_knows_that_it_takes_texts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", estimator_checks.SkipTestWarning)
        found = estimator_checks.check_estimator(tiny(), on_skip=None)
    assert [(one["check_name"], one["status"]) for one in found] == [("check_estimator_cloneable", "passed")]
    tags = tiny().__sklearn_tags__()
    assert (tags.input_tags.string, tags.input_tags.two_d_array, tags.target_tags.required) == (True, False, True)
    assert tags.estimator_type == "classifier"


# ---------------------------------------------------------------- fit and use


def test_it_learns_within_its_budget(fitted, folder):
    texts, labels = rows(83, seed=1)
    assert fitted.score(texts, labels) > 0.9
    assert fitted.classes_.tolist() == ["bird", "fruit", "tool"]
    assert 0.25 < fitted.head_share_ < 0.7
    assert fitted.head_share_ == pytest.approx(Engine.load(folder).predict(TEXTS).head_share.mean())
    assert fitted.units_share_ == pytest.approx(0.5, abs=0.1)
    assert fitted.pairs_ is False


def test_the_answers_are_the_models(fitted, folder):
    texts = TEXTS[:31]
    model, tokenizer = load_model(folder)
    with torch.inference_mode():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    np.testing.assert_allclose(fitted.decision_function(texts), logits, atol=1e-4)
    chances = fitted.predict_proba(texts)
    np.testing.assert_allclose(chances, logits.softmax(-1), atol=1e-5)
    np.testing.assert_allclose(chances.sum(1), 1.0, atol=1e-12)
    assert fitted.predict(texts).tolist() == [["bird", "fruit", "tool"][i] for i in logits.argmax(-1)]


def test_of_two_classes_the_decision_is_the_log_odds_of_the_second():
    texts, labels = rows(48, topics=("fruit", "tool"))
    made = tiny(epochs=2).fit(texts, [label == "tool" for label in labels])
    assert made.classes_.dtype == bool
    chances, decision = made.predict_proba(texts), made.decision_function(texts)
    assert decision.shape == (48,)
    np.testing.assert_allclose(decision, np.log(chances[:, 1] / chances[:, 0]), atol=1e-6)
    np.testing.assert_array_equal(made.predict(texts), decision > 0)


def test_a_named_budget_and_a_type_may_change_after_fit(fitted):
    used = copy.deepcopy(fitted)
    as_learned = used.predict_proba(FEW)
    used.set_params(budget=1.0)
    assert used._answer(FEW).head_share.min() == 1.0
    used.set_params(budget=0.25)
    assert used._answer(FEW).head_share.max() == 0.25
    used.set_params(budget=None, margin=1.0)
    assert used._answer(FEW).output.gates.min() == 1, "every text is answered again, with every head"
    used.set_params(margin=None, dtype="bf16")
    assert not np.array_equal(used.predict_proba(FEW), as_learned)
    used.set_params(dtype="auto")
    np.testing.assert_array_equal(used.predict_proba(FEW), as_learned)


def test_blocks_have_their_share_too(tmp_path):
    made = tiny(scope="heads+blocks", ffn_blocks=2, epochs=5).fit(TEXTS, LABELS)
    made.save(tmp_path / "model")
    engine = Engine.load(tmp_path / "model")
    output = engine.predict(TEXTS).output
    tokens = np.array([len(one) for one in tokenise(engine.tokenizer, TEXTS, max_length=17)])
    head = 8 * tokens * 32 * 8 + 4 * tokens**2 * 8  # 2 layers of 4 heads of width 8, and of 2 blocks of 32 neurons
    block = 4 * tokens * 32 * 32
    ran = (output.gates.sum((1, 2)) * head + output.blocks.sum((1, 2)) * block).sum()
    assert made.units_share_ == pytest.approx(ran / (8 * head + 4 * block).sum())
    assert made.units_share_ == pytest.approx(0.4, abs=0.15)


def test_second_answers_have_a_margin_that_was_fitted_on_texts_held_out():
    made = tiny(target_budget=0.8, scope="heads+blocks", ffn_blocks=2, first_share=0.6, epochs=6).fit(TEXTS, LABELS)
    budget = json.loads(made.files_["config.json"])["budget"]
    assert (budget["first"], budget["whole"]) == (0.6, 0.13)
    gates = made._answer(TEXTS).output.gates
    again = gates.max((1, 2)) == 2
    chances = np.sort(copy.deepcopy(made).set_params(margin=0.0).predict_proba(TEXTS))
    assert budget["cascade"] > 0.0
    np.testing.assert_array_equal(again, chances[:, -1] - chances[:, -2] < budget["cascade"])


def test_not_fitted_is_said_in_their_words():
    for name in ("predict", "predict_proba", "decision_function"):
        with pytest.raises(NotFittedError):
            getattr(tiny(), name)(FEW)
    with pytest.raises(NotFittedError):
        tiny().save("nowhere")


def test_the_process_finds_its_generators_as_they_were():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = random.random(), np.random.random(), torch.rand(()).item()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    threads = torch.get_num_threads()
    tiny(threads=threads + 1).fit(FEW, FEW_LABELS)
    assert (random.random(), np.random.random(), torch.rand(()).item()) == expected
    assert torch.get_num_threads() == threads


def test_the_random_state_decides():
    weights = [
        tiny(random_state=state).fit(FEW, FEW_LABELS).files_["model.safetensors"]
        for state in (3, np.int64(3), 4, np.random.RandomState(3))
    ]
    assert weights[0] == weights[1]
    assert len(set(weights)) == 3


# ---------------------------------------------------------------- what X and y may be


@pytest.mark.parametrize(
    "X",
    [
        tuple(FEW),
        np.array(FEW),
        np.array(FEW, dtype=object)[:, None],
        pd.Series(FEW, index=range(7, 55)),
        pd.Series(FEW, dtype="string"),
        pd.DataFrame({"text": FEW}),
        pa.array(FEW),
        pa.chunked_array([FEW[:7], FEW[7:]]),
    ],
    ids=["tuple", "array", "column", "Series", "StringDtype", "DataFrame", "arrow", "chunked"],
)
def test_any_column_of_texts_gives_the_same(X, fitted):
    np.testing.assert_array_equal(fitted.predict_proba(X), fitted.predict_proba(FEW))


def test_any_two_columns_are_pairs(of_pairs, fitted):
    first = ["with the same"] * 48
    pairs = list(zip(first, FEW, strict=True))
    assert of_pairs.pairs_ is True
    assert of_pairs.score(pairs, FEW_LABELS) > 0.9
    expected = of_pairs.predict_proba(pairs)
    for X in (np.array(pairs), pd.DataFrame({"one": first, "two": FEW}), pa.table({"one": first, "two": FEW})):
        np.testing.assert_array_equal(of_pairs.predict_proba(X), expected)
    with pytest.raises(DataError, match="holds single texts, and the model was fitted on pairs"):
        of_pairs.predict(FEW)
    with pytest.raises(DataError, match="holds pairs of texts, and the model was fitted on single"):
        fitted.predict([("a", "b")])


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([10, 9, -1], [-1, 9, 10]),
        (np.array([2, 7, 2], np.uint8), [2, 7]),
        ([True, False, True], [False, True]),
        ([1.0, 2.0, 1.0], [1.0, 2.0]),
        (np.array(["b", "a", "b"], dtype=object), ["a", "b"]),
        (pd.Series(["b", "a", "b"], dtype="category"), ["a", "b"]),
        (pa.array(["b", "a", "b"]), ["a", "b"]),
        (np.array([["b"], ["a"], ["b"]]), ["a", "b"]),
    ],
    ids=str,
)
def test_labels_of_any_kind(y, classes):
    found, numbers = read_labels(y, 3)
    assert found.tolist() == classes
    assert [type(label) for label in found.tolist()] == [type(label) for label in classes]
    assert [found[number] for number in numbers] == np.asarray(y).ravel().tolist()


def test_numbers_come_back_as_numbers_in_their_own_order():
    numbers = {"bird": 10, "fruit": 9, "tool": -1}
    made = tiny(epochs=6).fit(TEXTS, [numbers[label] for label in LABELS])
    assert made.classes_.tolist() == [-1, 9, 10]
    assert made.predict(TEXTS).dtype == made.classes_.dtype
    assert made.score(TEXTS, [numbers[label] for label in LABELS]) > 0.9


@pytest.mark.parametrize(
    ("X", "y", "error", "words"),
    [
        (["a", None, "c"], [0, 1, 0], DataError, "X: row 1 (from 0) is None"),
        (["a", "b", float("nan")], [0, 1, 0], DataError, "X: row 2 (from 0) is NaN"),
        (pd.Series(["a", None, "b"], dtype="string"), [0, 1, 0], DataError, "X: row 1 (from 0) is NAType"),
        ([("a", "b"), ("c", None)], [0, 1], DataError, "X: row 1 (from 0) is None"),
        ([1, 2], [0, 1], DataError, "X: row 0 (from 0) is int"),
        (SECRET, [0], DataError, "give a list of texts"),
        ([], [], DataError, "X is empty"),
        ([["a", "b", SECRET]], [0], DataError, "shape (1, 3)"),
        ([("a", SECRET), "c"], [0, 1], DataError, "X: row 0 (from 0) is tuple"),
        (["a", SECRET], [0, 1, 1], DataError, "y has 3 labels and X has 2 texts"),
        (["a", SECRET], None, DataError, "y is None"),
        (["a", SECRET], ["x", "x"], DataError, "needs two classes"),
        (["a", SECRET], ["x", None], DataError, "y: row 1 (from 0) has no label"),
        (["a", SECRET], [float("nan"), 1.0], DataError, "y: row 0 (from 0) has no label"),
        (["a", SECRET], ["x", 3], DataError, "words and numbers"),
        (["a", SECRET], [0.5, 0.25], DataError, "real number"),
        (["a", SECRET], [[0, 1], [1, 0]], DataError, "y has the shape (2, 2)"),
        (["a", SECRET], np.array([1, 1.0, "1"], dtype=object)[:2], DataError, "needs two classes"),
    ],
)
def test_what_cannot_be_learned_from_is_one_line(X, y, error, words):
    with pytest.raises(error) as caught:
        tiny().fit(X, y)
    assert isinstance(caught.value, ValueError), "scikit-learn expects one"
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_row_without_a_text_is_named_in_use_too(fitted):
    with pytest.raises(DataError, match=r"row 1 \(from 0\) is None"):
        fitted.predict([SECRET, None])
    assert read_texts(np.array(["a", "b"])) == (["a", "b"], None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_budget": 1.5}, "target_budget is 1.5"),
        ({"scope": "head"}, "did you mean 'heads'?"),
        ({"epochs": 0}, "epochs is 0"),
        ({"learning_rate": "fast"}, "learning_rate is fast"),
        ({"random_state": -1}, "random_state"),
        ({"random_state": "seven"}, "random_state"),
        ({"budget": 0.0}, "budget is 0.0"),
        ({"budget": "calibrated"}, "name a share"),
        ({"margin": 2.0}, "margin is 2.0"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"class_weight": "balnced"}, "class_weight"),
        ({"class_weight": {"bird": -1.0, "fruit": 1.0, "tool": 1.0}}, "class_weight"),
        ({"class_weight": {"brid": 1.0}}, "class_weight"),
        ({"scope": "heads+blocks", "ffn_blocks": 5}, "ffn_blocks=5"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_refused_by_fit_in_one_line(changes, words):
    made = tiny(**changes)
    with pytest.raises(BudgetFormerError) as caught:
        made.fit(FEW, FEW_LABELS)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_of_training_have_the_commands_defaults():
    from dataclasses import fields

    from budgetformer.settings import PredictSettings, TrainSettings

    defaults = {field.name: field.default for cls in (PredictSettings, TrainSettings) for field in fields(cls)}
    renamed = {"random_state": defaults["seed"], "class_weight": defaults["class_weights"], "verbose": False}
    parameters = BudgetFormerClassifier().get_params()
    assert parameters == {name: renamed.get(name, defaults.get(name)) for name in parameters}


# ---------------------------------------------------------------- weights


def test_a_weight_is_a_number_of_copies():
    logits, labels = torch.randn(3, 5, dtype=torch.float64), torch.tensor([4, 0, 2])
    teacher, classes = torch.randn(3, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    several = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    copies = torch.tensor([0, 0, 0, 2])  # the first three times, the second never
    weights = torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64) * 3 / 4
    for problem, truth in (("single_label_classification", labels), ("multi_label_classification", several)):
        for smoothing in (0.0, 0.3):
            found = losses.task(logits, truth, problem, label_smoothing=smoothing, sample_weight=weights)
            expected = losses.task(logits[copies], truth[copies], problem, label_smoothing=smoothing)
            torch.testing.assert_close(found, expected)
        found = losses.distillation(logits, teacher, problem, 3.0, sample_weight=weights)
        torch.testing.assert_close(found, losses.distillation(logits[copies], teacher[copies], problem, 3.0))
        ones = torch.ones(3, dtype=torch.float64)
        found = losses.task(logits, truth, problem, class_weights=classes, sample_weight=ones)
        torch.testing.assert_close(found, losses.task(logits, truth, problem, class_weights=classes))


def test_a_text_of_weight_0_is_not_there():
    wrong = [*["tool"] * 5, *FEW_LABELS]
    weights = [*[0.0] * 5, *[2.0] * 24, *[1.0] * 24]
    with_wrong = tiny().fit([*FEW[:5], *FEW], wrong, sample_weight=weights)
    without = tiny().fit(FEW, FEW_LABELS, sample_weight=weights[5:])
    assert with_wrong.files_ == without.files_
    assert without.files_ != tiny().fit(FEW, FEW_LABELS).files_, "the other weights count"


def test_the_heavier_of_two_labels_wins():
    texts = [text for text in FEW for _ in range(2)]
    labels = ["no", "yes"] * 48
    for heavy in (0, 1):
        weights = [9.0 if i % 2 == heavy else 1.0 for i in range(96)]
        made = tiny(epochs=3).fit(texts, labels, sample_weight=weights)
        assert set(made.predict(FEW)) == {("no", "yes")[heavy]}


def test_class_weights_reach_the_loss():
    def kept(class_weight):
        made = tiny(class_weight=class_weight).fit(FEW, FEW_LABELS)
        return json.loads(made.files_["config.json"])["class_weights"]

    assert kept({"bird": 1.0, "fruit": 2.0, "tool": 3.5}) == [1.0, 2.0, 3.5]
    assert kept("balanced") == pytest.approx([48 / 3 / FEW_LABELS.count(name) for name in TOPICS])
    assert kept(None) is None


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0] * 47, "shape (47,)"),
        ([1.0] * 47 + [-1.0], "below 0"),
        ([1.0] * 47 + [float("nan")], "not finite"),
        ([0.0] * 48, "every weight is 0"),
        (["heavy"] * 48, "no number"),
        ([float(label == "tool") for label in FEW_LABELS], "needs two classes"),
    ],
    ids=["short", "negative", "nan", "zeros", "words", "one class"],
)
def test_wrong_weights_are_refused(weights, words):
    with pytest.raises((UsageError, DataError)) as caught:
        tiny().fit(FEW, FEW_LABELS, sample_weight=weights)
    assert words in str(caught.value)


# ---------------------------------------------------------------- among scikit-learn's tools


def test_a_clone_is_unfitted_and_a_copy_answers_alike(fitted):
    again = clone(fitted)
    assert again.get_params() == fitted.get_params()
    assert not hasattr(again, "classes_")
    fitted.predict(FEW)
    assert "_engine" in vars(fitted)
    assert "_engine" not in fitted.__getstate__()
    np.testing.assert_array_equal(copy.deepcopy(fitted).predict_proba(FEW), fitted.predict_proba(FEW))


def test_a_second_fit_forgets_the_first():
    made = tiny().fit(FEW, FEW_LABELS)
    made.predict(FEW)
    made.fit(FEW, [label == "tool" for label in FEW_LABELS])
    assert made.predict_proba(FEW).shape == (48, 2)


def test_in_a_pipeline_with_weights():
    lower = FunctionTransformer(lambda texts: [text.lower() for text in texts])
    made = make_pipeline(lower, tiny())
    weights = [2.0, 1.0] * 24
    made.fit([text.upper() for text in FEW], FEW_LABELS, budgetformerclassifier__sample_weight=weights)
    alone = tiny().fit(FEW, FEW_LABELS, sample_weight=weights)
    np.testing.assert_array_equal(made.predict_proba([t.upper() for t in FEW]), alone.predict_proba(FEW))


def test_a_grid_of_budgets():
    search = GridSearchCV(tiny(), {"target_budget": np.array([0.3, 1.0])}, cv=2, error_score="raise")
    search.fit(np.array(FEW), FEW_LABELS)
    assert search.best_params_["target_budget"] in (0.3, 1.0)
    assert search.cv_results_["mean_test_score"].shape == (2,)
    assert search.best_estimator_.classes_.tolist() == list(TOPICS)


def test_every_row_is_predicted_by_a_model_that_has_not_seen_it():
    found = cross_val_predict(tiny(epochs=4), TEXTS[:120], LABELS[:120], cv=2, method="predict_proba")
    assert found.shape == (120, 3)
    assert (np.array(list(TOPICS))[found.argmax(1)] == LABELS[:120]).mean() > 0.6


def test_calibrated_on_a_fit_and_by_folds(fitted):
    from sklearn.frozen import FrozenEstimator

    made = CalibratedClassifierCV(FrozenEstimator(fitted)).fit(np.array(TEXTS), LABELS)
    assert made.score(np.array(TEXTS), LABELS) > 0.9
    texts, labels = rows(48, topics=("fruit", "tool"))
    folds = CalibratedClassifierCV(tiny(), cv=2, method="sigmoid").fit(np.array(texts), labels)
    np.testing.assert_allclose(folds.predict_proba(texts).sum(1), 1.0)


# ---------------------------------------------------------------- files


def test_saved_and_loaded_is_the_same(fitted, folder):
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "sklearn.json"} <= names
    assert not {path.suffix for path in folder.iterdir()} - {".json", ".safetensors"}, "no pickle"
    again = BudgetFormerClassifier.load(folder)
    assert again.get_params() == fitted.get_params()
    assert again.classes_.dtype == fitted.classes_.dtype
    assert (again.head_share_, again.units_share_, again.pairs_) == (fitted.head_share_, fitted.units_share_, False)
    np.testing.assert_array_equal(again.predict_proba(FEW), fitted.predict_proba(FEW))
    assert again.files_ == fitted.files_
    assert SECRET not in (folder / "sklearn.json").read_text()


def test_an_output_is_replaced_when_asked_and_only_if_ours(fitted, folder, tmp_path):
    with pytest.raises(UsageError, match="exists"):
        fitted.save(folder)
    fitted.save(folder, overwrite=True)
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(UsageError, match="no run of ours"):
        fitted.save(tmp_path, overwrite=True)
    assert (tmp_path / "diary.txt").read_text() == "mine"


def test_a_folder_of_the_command_line_loads_with_its_names(tmp_path):
    home = make_folder(tmp_path / "model", routed=True)
    texts = ["where is my card", "pay the money back"]
    made, answers = BudgetFormerClassifier.load(home), Engine.load(home).predict(texts)
    assert made.classes_.tolist() == ["cash", "lost card", "transfer"]
    assert made.predict(texts).tolist() == answers.labels
    np.testing.assert_allclose(made.predict_proba(texts), answers.probabilities, atol=1e-6)
    assert made.predict([("where", "is")]).shape == (1,), "the folder does not say what it was trained on"
    with pytest.raises(ModelFolderError, match="several labels"):
        BudgetFormerClassifier.load(make_folder(tmp_path / "several", multi_label=True))


@pytest.mark.parametrize(
    "change",
    [
        {"classes": ["bird", "tool", "fruit"]},
        {"classes": [1, 2]},
        {"classes_dtype": "M8[s]"},
        {"classes_dtype": "no such type"},
        {"parameters": {"no_such": 1}},
        {"parameters": [1]},
        {"pairs": "perhaps"},
        {"head_share_": "half"},
    ],
    ids=str,
)
def test_a_damaged_or_hostile_file_is_refused(change, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    about = json.loads((folder / "sklearn.json").read_text())
    (tmp_path / "sklearn.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(ModelFolderError, match=r"sklearn\.json") as caught:
        BudgetFormerClassifier.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_labels_keep_their_type_in_files(tmp_path):
    made = tiny().fit(FEW, np.array([["bird", "fruit", "tool"].index(label) + 9 for label in FEW_LABELS], np.int16))
    made.save(tmp_path / "model")
    again = BudgetFormerClassifier.load(tmp_path / "model")
    assert (again.classes_.dtype, again.classes_.tolist()) == (np.int16, [9, 10, 11])
    assert Engine.load(tmp_path / "model").labels == ["9", "10", "11"]


def test_the_name_is_lazy():
    assert budgetformer.BudgetFormerClassifier is BudgetFormerClassifier
    done = in_python(
        "import sys, budgetformer; print('sklearn' in sys.modules);"
        "budgetformer.BudgetFormerClassifier; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert done.stdout.split() == ["False", "False", "False"], done.stderr
