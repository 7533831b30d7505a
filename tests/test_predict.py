import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from budgetformer.data import BadRow, Rows
from budgetformer.engine import Engine, native
from budgetformer.errors import ModelFolderError, UsageError
from budgetformer.predict import Predictor, load_model
from budgetformer.tokens import longest_input, tokenise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp("model"), routed=True)


@pytest.fixture(scope="module", params=["compiled", "torch"])
def predictor(request, folder):
    if request.param == "compiled" and not native.paths():
        pytest.skip("the kernels are not compiled")
    return Predictor.load(folder, batch_tokens=50, path="auto" if request.param == "compiled" else "torch")


def rows(texts, pairs=None, ids=None, bad=()):
    lines = list(range(1, len(texts) + 1))
    return Rows(source="test", texts=texts, pairs=pairs, labels=None, ids=ids, lines=lines, bad=list(bad), columns={})


def some_texts(count, seed=5):
    rng = random.Random(seed)
    return [" ".join(rng.choices(tiny.WORDS, k=rng.randint(1, 31))) for _ in range(count)]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [4, 5, 9, 17, 64])
def test_our_cut_is_the_tokenizers_own(length, side):
    words = tiny.tokenizer()
    words.truncation_side = side
    one, other = some_texts(40), some_texts(40, seed=7)
    for pairs in (None, other):
        ours = tokenise(words, one, pairs, max_length=length)
        theirs = words(one, pairs, truncation="longest_first", max_length=length)
        whole = words(one, pairs)
        assert [tokens.ids for tokens in ours] == theirs["input_ids"]
        assert [tokens.types for tokens in ours] == theirs["token_type_ids"]
        assert [tokens.truncated for tokens in ours] == [len(ids) > length for ids in whole["input_ids"]]


def test_a_pair_of_long_texts_costs_no_more_than_its_length():
    # The tokenizer's own truncation takes 10 GB and half a minute for this one.
    (tokens,) = tokenise(tiny.tokenizer(), ["card " * 20_000], ["cash " * 20_000], max_length=11)
    assert len(tokens) == 11
    assert tokens.truncated


def test_no_room_beside_the_special_tokens():
    with pytest.raises(UsageError, match="give at least 3"):
        tokenise(tiny.tokenizer(), ["card"], max_length=2)
    assert tokenise(tiny.tokenizer(), [], max_length=3) == []


def test_the_longest_input(predictor):
    config, words = predictor.engine.weights.encoder, predictor.engine.tokenizer
    assert longest_input(config, words) == 23
    assert longest_input(config, words, 7) == 7
    with pytest.raises(UsageError, match="max_length is 24; the model has 23 positions"):
        longest_input(config, words, 24)


def test_answers_keep_order_and_do_not_depend_on_neighbours(predictor):
    texts = some_texts(17)
    together = predictor.predict(rows(texts))
    alone = [predictor.predict(rows([text]))[0] for text in texts]
    assert [answer.id for answer in together] == [str(number) for number in range(1, 18)]
    for one, other in zip(together, alone, strict=True):
        assert (one.label, one.heads_used, one.truncated) == (other.label, other.heads_used, other.truncated)
        # In the kernels a text's answer is the same in any company, to the last bit.
        close = pytest.approx(other.scores, abs=1e-5) if predictor.engine.path.name == "torch" else other.scores
        assert one.scores == close
    assert len({answer.heads_used for answer in together}) > 1
    assert len({answer.score for answer in together}) > 10
    assert {answer.truncated for answer in together} == {True, False}


def test_an_answer_is_what_the_model_says(predictor, folder):
    (answer,) = predictor.predict(rows(["where is my card"]))
    model, tokenizer = load_model(folder)
    with torch.inference_mode():
        output = model(**tokenizer(["where is my card"], return_tensors="pt"))
    chances = output.logits.softmax(-1)[0].tolist()
    assert list(answer.scores) == tiny.LABELS
    assert list(answer.scores.values()) == pytest.approx(chances, abs=1e-5)
    assert answer.label == tiny.LABELS[chances.index(max(chances))]
    assert answer.score == max(answer.scores.values())
    assert answer.heads_used == int(output.gates.sum())
    assert answer.budget == round(answer.heads_used / 15, 4)
    assert list(answer.row()) == ["id", "label", "score", "scores", "heads_used", "budget", "error"]


def test_a_budget_turns_heads_off(predictor):
    few, many = (replace(predictor, budget=budget).predict(rows(["my card"]))[0] for budget in (0.2, 1.0))
    assert (few.heads_used, few.budget) == (3, 0.2)
    assert (many.heads_used, many.budget) == (15, 1.0)


def test_bad_rows_keep_their_place_and_say_why(predictor):
    texts = [None, "my card", "lost \ud800 money", None, "cash"]
    bad = [BadRow(source="test", line=line, reason=f"reason {line}") for line in (1, 4)]
    answers = predictor.predict(rows(texts, ids=["a", None, "c", "d", "e"], bad=bad))
    assert [answer.id for answer in answers] == ["a", None, "c", "d", "e"]
    assert [answer.error is None for answer in answers] == [False, True, False, False, True]
    assert [answers[0].error, answers[3].error] == ["reason 1", "reason 4"]
    assert "Unicode" in str(answers[2].error)
    assert "money" not in str(answers[2].error)
    assert answers[0].row() == dict.fromkeys(answers[0].row()) | {"id": "a", "error": "reason 1"}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("the text was: secret"), "the model failed (RuntimeError)"),
        (MemoryError(), "the model failed (MemoryError)"),
        (UsageError("engine: input 0 has 99 tokens"), "the model failed (engine: input 0 has 99 tokens)"),
    ],
)
def test_a_row_the_model_fails_on_does_not_cost_its_batch(predictor, monkeypatch, error, says):
    run = Engine.run

    def fail_on_long(self, batch, **options):
        if (batch.lengths > 20).any():
            raise error
        return run(self, batch, **options)

    monkeypatch.setattr(Engine, "run", fail_on_long)
    answers = predictor.predict(rows(["card", "card " * 30, "cash"]))
    assert [answer.error for answer in answers] == [None, says, None]
    assert [answer.truncated for answer in answers] == [False, True, False]


def test_a_vocabulary_of_another_model_is_an_error_of_the_row(tmp_path):
    """The tokenizer gives ids that the tables do not have: the kernels must not look there."""
    folder = tiny.make_folder(tmp_path)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"]["cash"] = 4096
    (folder / "tokenizer.json").write_text(json.dumps(words))
    for path in ("torch", *native.paths()):
        good, bad = Predictor.load(folder, path=path).predict(rows(["card", "my cash"]))
        assert good.error is None
        assert str(bad.error).startswith("the model failed (")


def test_a_budget_outside_its_range_is_refused_once(predictor):
    for budget in (0, 1.5, float("nan")):
        with pytest.raises(UsageError, match="must lie in"):
            replace(predictor, budget=budget)


def test_a_number_that_is_none_is_an_error(tmp_path):
    """Weights so large that sums overflow: finite in the folder, not on the way."""
    from safetensors.torch import load_file, save_file

    folder = tiny.make_folder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    table = next(name for name in weights if name.endswith("embeddings.word.weight"))
    weights[table][tiny.tokenizer().vocab["cash"]] = 3e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    predictor = Predictor.load(folder)
    good, bad = predictor.predict(rows(["card", "cash"]))
    assert good.error is None
    assert bad.error == "the model's answer is not a finite number"
    json.dumps(bad.row(), allow_nan=False)


def test_the_label_is_chosen_before_scores_are_rounded(predictor):
    made = replace(predictor, top=1)._say(np.array([0.3333331, 0.3333332, 0.3333337], np.float32))
    assert made == {"label": tiny.LABELS[2], "score": 0.333334, "scores": {tiny.LABELS[2]: 0.333334}}
    made = predictor._say(np.array([0.49999995, 0.50000005, 0.0], np.float32))
    assert (made["label"], made["score"]) == (tiny.LABELS[1], 0.5)


def test_pairs(predictor):
    swapped = [
        predictor.predict(rows([a], pairs=[b]))[0].scores for a, b in (("card", "cash not"), ("cash not", "card"))
    ]
    assert swapped[0] != swapped[1]


def test_several_labels(tmp_path):
    predictor = Predictor.load(tiny.make_folder(tmp_path, multi_label=True), label_separator="; ")
    answers = predictor.predict(rows(some_texts(29)))
    for answer in answers:
        over = [name for name, score in answer.scores.items() if score >= 0.5]
        assert answer.label == "; ".join(over)
        assert answer.score == max(answer.scores.values())
    assert any("; " in answer.label for answer in answers)


STRANGE = {
    "one word of 1 MB": "x" * 1_000_000,
    "one combining mark, 1 MB": "e" + "\u0301" * 500_000,
    "1 MB of words": "card " * 200_000,
    "NUL": "\0",
    "emoji": "🙂",
    "right to left": "\u05d0 \u202e \u05d1",
}


@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE.keys())
def test_strange_texts_get_an_answer(predictor, text):
    (answer,) = predictor.predict(rows([text]))
    assert answer.error is None
    assert answer.truncated == (text.count("card") > 1)


def test_inspect(predictor):
    seen = predictor.inspect("where is my card", "cash")
    assert seen.text == "where is my card | cash"
    assert (seen.tokens, seen.labels, len(seen.wanted)) == (8, tiny.LABELS, 3)
    assert [len(row) for row in seen.gates] == [5, 5, 5]
    assert seen.head_share == pytest.approx(sum(map(sum, seen.gates)) / 15)
    assert sum(seen.probabilities) == pytest.approx(1)
    dear, cheap = (replace(predictor, budget=budget).inspect("my card") for budget in (1.0, 0.2))
    assert cheap.flops_share < dear.flops_share
    # All heads and the routers on top.
    assert 1 <= dear.flops_share < 1.7
    # What a named budget gave each layer, not what its controller would have liked.
    assert cheap.wanted == pytest.approx([sum(row) / 5 for row in cheap.gates])
    with pytest.raises(UsageError, match="Unicode"):
        predictor.inspect("\ud800")


def damage(folder, how):
    from safetensors.torch import load_file, save_file

    if how == "tokenizer":
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
        return
    weights = load_file(folder / "model.safetensors")
    if how == "no classifier":
        weights = {name: value for name, value in weights.items() if not name.startswith("classifier")}
    if how == "a weight is missing":
        weights.pop(next(name for name in weights if "in_proj_weight" in name))
        weights["filler"] = torch.zeros(100_000)
    if how == "wrong shape":
        name = next(name for name in weights if "in_proj_weight" in name)
        weights[name] = torch.zeros(105, 70)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("how", ["tokenizer", "no classifier", "a weight is missing", "wrong shape"])
def test_folders_that_cannot_be_loaded(tmp_path, how):
    folder = tiny.make_folder(tmp_path)
    damage(folder, how)
    with pytest.raises(ModelFolderError) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_top_gives_the_most_probable_classes_first(predictor):
    whole = predictor.predict(rows(["where is my lost card"]))[0]
    short = replace(predictor, top=2).predict(rows(["where is my lost card"]))[0]
    best = sorted(whole.scores.items(), key=lambda item: -item[1])[:2]
    assert list(short.scores.items()) == best
    assert (short.label, short.score) == (whole.label, whole.score)
