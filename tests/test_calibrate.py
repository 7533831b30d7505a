"""The promise of `calibrate`: exact bounds, thousands of samples of what is known, the record, and its use."""

import json
import math
import random
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import tiny
from budgetformer.cli import verbs
from budgetformer.engine.calibrating import First, accepted, answered, calibrate, fewest, largest_risk, most
from budgetformer.engine.counting import counted
from budgetformer.engine.engine import Engine
from budgetformer.engine.saved import Calibrated, Saved, Way, read_saved, write_saved
from budgetformer.errors import ModelFolderError, UsageError
from budgetformer.ports.server import worker
from budgetformer.predict import Predictor
from budgetformer.tokens import tokenise
from engine_helpers import in_python

SAMPLES = 500


def words(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(tiny.WORDS, k=1 + seed % 15))


TEXTS = [words(i) for i in range(400)]


@pytest.fixture(scope="module", params=[1, 3], ids=["heads", "heads and blocks"])
def folder(tmp_path_factory, request) -> Path:
    return tiny.make_folder(tmp_path_factory.mktemp("model") / "tiny", routed=True, blocks=request.param)


@pytest.fixture
def engine(folder, tmp_path) -> Engine:
    return Engine.load(shutil.copytree(folder, tmp_path / "copy"), threads=1)


# ---------------------------------------------------------------------------------------------------- the exact numbers


def test_how_many_texts_prove_what():
    """The rule of three, exactly: 299 texts without a failure prove 99 % with 95 % confidence, 298 do not."""
    assert fewest(1, agree=0.99, confidence=0.95) == 299
    assert 0.99**299 <= 0.05 < 0.99**298
    assert fewest(5, agree=0.99, confidence=0.95) == 459
    assert fewest(1, agree=0.5, confidence=0.96) == 5  # 1/32 <= .04 < 1/16
    for agree, error in ((0.99, 0.05), (0.9, 0.01), (0.5, 0.3)):
        needed = fewest(1, agree=agree, confidence=1 - error)
        assert most(needed, agree=agree, error=error) >= 0
        assert most(needed - 1, agree=agree, error=error) == -1


@pytest.mark.parametrize("texts", [1, 7, 299, 1000, 30_011])
@pytest.mark.parametrize("agree", [0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("error", [0.05, 0.01, 0.3])
def test_the_number_allowed_is_the_last_that_the_binomial_test_accepts(texts, agree, error):
    allowed = most(texts, agree=agree, error=error)
    risk = 1 - agree
    assert -1 <= allowed < texts
    assert allowed == -1 or stats.binomtest(allowed, texts, risk, alternative="less").pvalue <= error
    assert stats.binomtest(allowed + 1, texts, risk, alternative="less").pvalue > error


@pytest.mark.parametrize("texts", [1, 7, 299, 30_011])
@pytest.mark.parametrize("error", [0.05, 0.01])
def test_the_bound_is_that_of_clopper_and_pearson(texts, error):
    for seen in {0, 1, texts // 100, texts // 2, texts - 1, texts}:
        test = stats.binomtest(seen, texts, alternative="less")
        expected = test.proportion_ci(1 - error, method="exact").high
        assert largest_risk(seen, texts, error=error) == pytest.approx(expected, rel=1e-9)
    assert largest_risk(0, texts, error=error) == pytest.approx(1 - error ** (1 / texts), rel=1e-9)  # by hand


# ---------------------------------------------------------------------------------------------- one sample, hand-worked


def first(budget, sure, agrees, cost=0.4) -> First:
    return First(budget, np.array(agrees, bool), np.array(sure, float), np.full(len(sure), 100 * cost))


def test_the_margin_is_just_above_the_surest_disagreement_that_is_too_many():
    """Ten texts, agreement of 1/2: one disagreement may stay (11 / 1024 <= .02 < 56 / 1024)."""
    assert most(10, agree=0.5, error=0.02) == 1
    sure = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    agrees = [1, 0, 1, 0, 1, 0, 1, 1, 1, 1]
    (way,) = accepted([first(0.25, sure, agrees)], np.full(10, 100.0), agree=0.5, confidence=0.98)
    assert 0.3 < way.margin < 0.3 + 1e-12
    assert (way.budget, way.again, way.disagreements) == (0.25, 0.4, 1)
    assert way.flops_share == 0.4 + 0.4
    assert way.bound == pytest.approx(1 - stats.beta.ppf(0.98, 2, 9))
    # One more that may stay, and one fewer.
    (more,) = accepted([first(0.25, sure, agrees)], np.full(10, 100.0), agree=0.5, confidence=0.9)
    assert (more.disagreements, more.again) == (2, 0.2)
    (fewer,) = accepted([first(0.25, sure, agrees)], np.full(10, 100.0), agree=0.5, confidence=0.995)
    assert (fewer.disagreements, fewer.again) == (0, 0.6)
    assert accepted([first(0.25, sure, agrees)], np.full(10, 100.0), agree=0.5, confidence=0.9999) == []


def test_nobody_is_answered_again_who_need_not_be_and_a_hopeless_first_answer_is_left_out():
    dense = np.full(10, 100.0)
    sure = np.linspace(0, 0.9, 10)
    (way,) = accepted([first(None, sure, [0] + 9 * [1])], dense, agree=0.5, confidence=0.98)
    assert (way.margin, way.again, way.disagreements, way.flops_share) == (0.0, 0.0, 1, 0.4)
    certain = first(0.1, np.ones(10), [0, 0, 0] + 7 * [1])
    assert accepted([certain], dense, agree=0.5, confidence=0.98) == []
    # Equally sure ones are answered again together.
    tied = first(0.1, [0.5] * 5 + [0.7] * 5, [0] * 5 + [1] * 5)
    (way,) = accepted([tied], dense, agree=0.5, confidence=0.98)
    assert (way.disagreements, way.again) == (0, 0.5)


def test_the_cost_is_weighed_by_length():
    """A long text that is answered again costs what it costs."""
    sure, agrees = [0.1, *np.linspace(0.2, 1, 9)], [0, *[1] * 9]
    dense = np.array([1000.0, *[100.0] * 9])
    one = First(0.5, np.array(agrees, bool), np.array(sure), dense / 2)
    (way,) = accepted([one], dense, agree=0.5, confidence=0.999)
    assert way.again == 0.1
    assert way.flops_share == round(0.5 + 1000 / 1900, 4)


# ------------------------------------------------------------------------------------------- samples of what is known


def population(risks, size=100_000, seed=0) -> list[First]:
    """First answers to all texts there are: the surer, the likelier they agree, and one learns more than another."""
    rng = np.random.default_rng(seed)
    firsts = []
    for place, risk in enumerate(risks):
        sure = rng.uniform(size=size)
        wrong = rng.uniform(size=size) < 2 * risk * (1 - sure)
        firsts.append(First(0.1 * (place + 1), ~wrong, sure, np.full(size, 0.2 + 0.1 * place)))
    return firsts


def sampled(firsts, texts, rng) -> list[First]:
    rows = rng.integers(len(firsts[0].sure), size=texts)  # with replacement: draws from all there are
    return [
        replace(one, agrees=one.agrees[rows], sure=one.sure[rows], operations=one.operations[rows]) for one in firsts
    ]


def true_risk(way: Way, firsts) -> float:
    one = next(one for one in firsts if one.budget == way.budget)
    return float((~one.agrees & (one.sure >= way.margin)).mean())


def kept(firsts, dense, texts, agree, confidence=0.95):
    """Of many samples: how many broke the promise, and how many chose something cheaper than the full model."""
    rng, broken, cheaper = np.random.default_rng(1), 0, 0
    for _ in range(SAMPLES):
        sample = sampled(firsts, texts, rng)
        ways = accepted(sample, np.full(texts, dense), agree=agree, confidence=confidence)
        ways = [way for way in ways if way.flops_share < 1]
        if ways:
            cheaper += 1
            broken += true_risk(min(ways, key=lambda way: way.flops_share), firsts) > 1 - agree
    return broken, cheaper


def most_often(rate) -> int:
    """So often happens in `SAMPLES` samples what has this rate, once in a thousand times more often."""
    return int(stats.binom.ppf(0.999, SAMPLES, rate))


@pytest.mark.parametrize(("texts", "agree"), [(299, 0.99), (598, 0.98), (1000, 0.97)])
def test_one_first_answer_breaks_the_promise_as_seldom_as_it_must_and_hardly_more_seldom(texts, agree):
    """The test is exact: the rate of failures is the binomial's own, just below 1 - confidence."""
    broken, cheaper = kept(population([0.06]), 1.0, texts, agree)
    exact = stats.binom.cdf(most(texts, agree=agree, error=0.05), texts, 1 - agree)
    assert 0.02 < exact <= 0.05
    assert broken <= most_often(exact)
    assert broken >= stats.binom.ppf(0.001, SAMPLES, exact)
    assert cheaper > SAMPLES / 4


def test_the_luckiest_of_many_keeps_the_promise_too():
    """Twelve first answers, each a little worse than promised, and sure of all: whichever is accepted, luck it was."""
    size, rng = 100_000, np.random.default_rng(5)
    wrong = np.arange(size) < 0.02001 * size
    firsts = [First(i / 20, ~rng.permutation(wrong), np.ones(size), np.full(size, 0.5)) for i in range(1, 13)]
    broken, cheaper = kept(firsts, 1.0, 1000, 0.98)
    assert 0 < broken == cheaper <= most_often(0.05)


@pytest.mark.parametrize("agree", [0.9, 0.97, 0.99])
def test_several_first_answers_with_different_risks(agree):
    firsts = population([0.2, 0.08, 0.03, 0.004])
    broken, cheaper = kept(firsts, 1.0, 1500, agree)
    assert broken <= most_often(0.05)
    assert cheaper == SAMPLES


def test_what_is_asked_for_costs():
    """More agreement or more confidence: larger margins and more work; more texts: less of both."""
    firsts = population([0.2, 0.08])

    def at(texts=4000, agree=0.95, confidence=0.95):
        return accepted(
            sampled(firsts, texts, np.random.default_rng(2)), np.ones(texts), agree=agree, confidence=confidence
        )

    for strict, loose in (
        (at(agree=0.97), at()),
        (at(confidence=0.999), at()),
        (at(), at(agree=0.9)),
        (at(texts=400), at(texts=40_000)),
    ):
        for one, other in zip(strict, loose, strict=True):
            assert one.budget == other.budget
            assert one.margin > other.margin
            assert one.flops_share > other.flops_share


def test_the_recorded_answers_of_a_model_keep_the_promise(tmp_path):
    """The same with a real model's answers to all the texts there are, of which each sample is a few."""
    engine = Engine.load(tiny.make_folder(tmp_path / "tiny", routed=True), threads=1)
    texts = [words(i) for i in range(1500)]
    tokens = tokenise(engine.tokenizer, texts, max_length=engine.max_length)
    (full, *firsts), dense = answered(engine, tokens, [None, 0.25, 0.5, 0.75])
    assert full.agrees.all()
    assert all(0.001 < (~one.agrees).mean() < 0.9 for one in firsts)
    for agree in (0.8, 0.9):
        broken, cheaper = kept(firsts, dense.mean(), 700, agree)
        assert broken <= most_often(0.05)
        assert cheaper > SAMPLES / 2


# --------------------------------------------------------------------------------------------------------- an engine


def test_the_choice_is_kept_and_is_what_the_engine_then_does(engine):
    found = calibrate(engine, TEXTS, agree=0.8)
    assert engine.saved.calibrated == found == read_saved(engine.folder).calibrated
    assert (found.texts, found.agree, found.confidence) == (400, 0.8, 0.95)
    assert (found.dtype, found.path, found.max_length) == ("fp32", engine.path.name, engine.max_length)
    assert found.when.endswith("+00:00")
    assert found.way in found.ways
    assert found.way.flops_share == min(way.flops_share for way in found.ways) < 1
    assert [way.budget for way in found.ways][:2] == [1.0, None]
    assert (engine.budget, engine.margin) == (found.way.budget, found.way.margin)
    full = engine.predict(TEXTS, budget=1.0).labels
    tokens = np.array([len(one) for one in tokenise(engine.tokenizer, TEXTS, max_length=engine.max_length)])
    for way in found.ways:
        answers = engine.predict(TEXTS, budget=way.budget, margin=way.margin)
        if way.budget is None:
            engine.budget, engine.margin = None, way.margin
            answers = engine.predict(TEXTS)
        different = sum(a != b for a, b in zip(answers.labels, full, strict=True))
        assert different == way.disagreements <= most(400, agree=0.8, error=0.05 / 5)
        again = (answers.output.gates > 1).any((1, 2))
        assert again.mean() == pytest.approx(way.again, abs=1e-4)
        done = counted(engine, tokens, answers.output.gates, answers.output.blocks)
        assert way.flops_share == pytest.approx(done.total.sum() / done.total_dense.sum(), abs=1e-4)


def test_an_engines_own_settings_are_not_in_the_way_and_save_is_asked(engine):
    expected = calibrate(replace(engine), TEXTS, agree=0.8, save=False)
    assert read_saved(engine.folder) == Saved()
    other = replace(engine, budget=0.2, margin=0.7)
    assert replace(calibrate(other, TEXTS, agree=0.8, save=False), when=expected.when) == expected


def test_where_nothing_cheaper_passes_the_full_model_is_the_choice(engine):
    """A first answer for which everything is answered again costs more than the full model."""
    found = calibrate(engine, TEXTS, agree=0.98, confidence=0.9, budgets=(0.1,))
    assert found.way == found.ways[0]
    assert (found.way.budget, found.way.margin, found.way.disagreements, found.way.bound) == (1.0, 0.0, 0, 1.0)
    assert all(way.flops_share > found.way.flops_share for way in found.ways[1:])
    assert engine.predict(TEXTS).output.gates.all()


def test_sets_of_labels_must_be_the_same(tmp_path):
    engine = Engine.load(tiny.make_folder(tmp_path / "many", multi_label=True, routed=True), threads=1)
    tokens = tokenise(engine.tokenizer, TEXTS, max_length=engine.max_length)
    (_, one), _ = answered(engine, tokens, [0.25])
    few, full = (engine.answer(tokens, budget=budget).probabilities for budget in (0.25, 1.0))
    sets = [[frozenset(np.flatnonzero(row >= 0.5)) for row in chances] for chances in (few, full)]
    assert one.agrees.tolist() == [a == b for a, b in zip(*sets, strict=True)]
    best = few.argmax(1) == full.argmax(1)
    assert (best & ~one.agrees).any(), "the best class tells it all, so sets are not seen"
    assert np.allclose(one.sure, [min(abs(2 * p - 1) for p in row) for row in few])


def test_a_dense_model_has_named_budgets_alone(tmp_path):
    engine = Engine.load(tiny.make_folder(tmp_path / "dense"), threads=1)
    assert None not in [way.budget for way in calibrate(engine, TEXTS, agree=0.5).ways]
    with pytest.raises(UsageError, match="at least one share below 1"):
        calibrate(engine, TEXTS, budgets=(1.0,))


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (TEXTS, {}, "400 texts cannot prove an agreement of 0.99 with confidence 0.95.* give at least 459"),
        ([], {}, "0 texts cannot prove"),
        (TEXTS, {"agree": 1.0}, r"agree is 1\.0"),
        (TEXTS, {"agree": math.nan}, "agree is nan"),
        (TEXTS, {"confidence": 0.0}, r"confidence is 0\.0"),
        (TEXTS, {"agree": 0.9, "budgets": (0.5, 1.5)}, "budget"),
    ],
)
def test_what_cannot_be_promised_is_refused_and_nothing_is_written(engine, texts, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        calibrate(engine, texts, **options)
    assert "\n" not in str(caught.value)
    assert not (engine.folder / "engine.json").exists()
    assert (engine.budget, engine.margin) == (None, None)


# -------------------------------------------------------------------------------------------------------- engine.json

WAY = Way(budget=None, margin=0.1 + 0.2, again=0.25, disagreements=3, bound=0.99, flops_share=0.6)
MADE = Calibrated(
    way=WAY,
    agree=0.99,
    confidence=0.95,
    texts=900,
    dtype="bf16",
    path="avx2",
    max_length=128,
    when="2026-01-31T12:00:00+00:00",
    ways=(replace(WAY, budget=1.0, margin=0.0), WAY),
)


def test_the_record_comes_back_to_the_last_bit(tmp_path):
    saved = Saved(dtype="bf16", calibrated=MADE)
    write_saved(tmp_path, saved)
    assert read_saved(tmp_path) == saved


@pytest.mark.parametrize(
    "damage",
    [
        {"way": None},
        {"ways": [{}]},
        {"dtype": "fp64"},
        {"agree": "most"},
        {"speed": 3},
        {"way": {**asdict(WAY), "budget": 1.5}},
        {"way": {**asdict(WAY), "budget": 0}},
        {"way": {**asdict(WAY), "margin": -0.1}},
        {"way": {**asdict(WAY), "margin": None}},
        {"way": {**asdict(WAY), "margin": math.inf}},
        {"way": {**asdict(WAY), "margin": 1.1}},
    ],
)
def test_a_damaged_record_is_refused(tmp_path, damage):
    (tmp_path / "engine.json").write_text(json.dumps({"calibrated": {**asdict(MADE), **damage}}))
    with pytest.raises(ModelFolderError, match=r"engine\.json: not as we write it"):
        read_saved(tmp_path)


# --------------------------------------------------------------------------------------------------- the command line


def errors(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("budgetformer: ")]


@pytest.fixture
def source(tmp_path) -> Path:
    """Labelled texts, as `evaluate` wants them; `calibrate` does not look at the labels."""
    path = tmp_path / "in.csv"
    path.write_text("\n".join(["text,label", *(f"{text},cash" for text in TEXTS)]) + "\n")
    return path


def test_calibrated_is_a_budget_from_then_on(run, engine, source, tmp_path):
    model = engine.folder
    code, out, _ = run("calibrate", "--model", model, "--data", source, "--agree", "0.8", "--threads", 1, "--json")
    assert code == 0
    found = json.loads(out)
    assert found == json.loads((model / "engine.json").read_text())["calibrated"]
    way = found["way"]
    arguments = ("evaluate", "--model", model, "--data", source, "--threads", 1, "--budget", "calibrated", "--json")
    code, out, err = run(*arguments)
    assert code == 0
    assert "calibrated for" not in err
    assert json.loads(out)["flops_share"] == pytest.approx(way["flops_share"], abs=1e-4)
    calibrate(engine, TEXTS, agree=0.8, save=False)
    expected = engine.predict(TEXTS)
    for name, value in (("calibrated", []), (way["budget"], ["--margin", way["margin"]])):
        options = [] if name is None else ["--budget", name]
        code, out, _ = run("predict", "--model", model, "--input", source, "--threads", 1, *options, *value)
        assert [json.loads(line)["label"] for line in out.splitlines()] == expected.labels
    code, out, _ = run("inspect", "my card", "--model", model, "--budget", "calibrated", "--json")
    assert code == 0
    # The curve of `tune` is kept beside it.
    assert run("tune", "--model", model, "--data", source, "--limit", 9, "--max-accuracy-loss", 1, "--quiet")[0] == 0
    assert read_saved(model).calibrated is not None
    assert read_saved(model).curve


def test_for_people(run, engine, source):
    arguments = ("calibrate", "--model", engine.folder, "--data", source, "--threads", 1)
    code, out, _ = run(*arguments, "--agree", "0.8")
    assert code == 0
    assert "learned" in out
    assert out.count("→") == 1
    last = out.splitlines()[-1]
    assert last.startswith("use --budget calibrated: at least 80 % agreement with 95 % confidence")
    code, out, _ = run(*arguments, "--agree", "0.985")
    assert code == 0
    assert out.splitlines()[-1].startswith("nothing cheaper than the full model can be promised")
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "give at least 459" in errors(err)[0]


@pytest.mark.parametrize("verb", ["predict", "evaluate", "inspect"])
def test_a_folder_that_was_not_calibrated(run, engine, source, verb):
    words = {"predict": ["my card"], "evaluate": ["--data", source], "inspect": ["my card"]}[verb]
    code, out, err = run(verb, *words, "--model", engine.folder, "--budget", "calibrated")
    assert (code, out) == (2, "")
    (line,) = errors(err)
    assert "has not been calibrated yet; run: budgetformer calibrate --model" in line


def test_another_length_or_type_is_told(run, engine):
    write_saved(engine.folder, Saved(calibrated=replace(MADE, dtype="fp32", max_length=engine.max_length)))
    arguments = ("predict", "my card", "--model", engine.folder, "--budget", "calibrated")
    assert "calibrate again" not in run(*arguments)[2]
    code, _, err = run(*arguments, "--max-length", 5)
    assert code == 0
    assert f"calibrated for fp32 and at most {engine.max_length} tokens, used for fp32 and at most 5 tokens" in err
    write_saved(engine.folder, Saved(calibrated=replace(MADE, max_length=engine.max_length)))
    assert "calibrated for bf16" in run(*arguments, "--dtype", "fp32")[2]


def test_the_server_answers_as_calibrated_and_says_where_nothing_is_promised(engine):
    options = {"model": str(engine.folder), "calibrated": True, "threads": 1}
    with pytest.raises(UsageError, match="not been calibrated yet; run: budgetformer calibrate --model"):
        worker.load(**options)
    write_saved(engine.folder, Saved(calibrated=replace(MADE, dtype="fp32", max_length=engine.max_length)))
    found = worker.load(**options)
    assert (found.budget, found.margin) == (MADE.way.budget, MADE.way.margin)
    assert "promised" not in found.note
    found = worker.load(**options, max_length=5)
    assert f"fp32 and at most {engine.max_length} tokens, used for fp32 and at most 5 tokens" in found.note
    assert "\n" not in found.note
    assert worker.load(str(engine.folder), calibrated=False).margin is None


def test_what_was_calibrated_anew_is_no_run_to_go_on_with(run, engine, source, tmp_path, monkeypatch):
    """A run that was stopped with one choice does not end with another."""
    write_saved(engine.folder, Saved(calibrated=MADE))
    output = tmp_path / "out.jsonl"
    arguments = ("predict", "--model", engine.folder, "--input", source, "--output", output, "--budget", "calibrated")
    calls = []

    def stop(self, rows, **options):
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answer(self, rows, **options)

    answer = Predictor.predict
    monkeypatch.setattr(verbs, "WINDOW", 100)
    monkeypatch.setattr(Predictor, "predict", stop)
    assert run(*arguments)[0] == 130
    monkeypatch.setattr(Predictor, "predict", answer)
    write_saved(engine.folder, Saved(calibrated=replace(MADE, way=replace(WAY, margin=0.5))))
    code, _, err = run(*arguments, "--resume")
    assert code == 2
    assert "another margin" in errors(err)[0]
    write_saved(engine.folder, Saved(calibrated=MADE))
    assert run(*arguments, "--resume")[0] == 0
    assert len(output.read_text().splitlines()) == len(TEXTS)


def test_answering_does_not_load_what_judges_a_sample(engine):
    write_saved(engine.folder, Saved(calibrated=MADE))
    code = (
        "import sys\nfrom budgetformer.cli import main\n"
        "assert main(['predict', '--model', sys.argv[1], '--budget', 'calibrated', 'my card']) == 0\n"
        "assert 'scipy' not in sys.modules\nassert 'budgetformer.engine.calibrating' not in sys.modules\n"
    )
    done = in_python(code, engine.folder)
    assert done.returncode == 0, done.stderr
