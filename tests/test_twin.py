"""A model that keeps its dense twin: whoever is to have every unit gets the twin's answer, wherever it is computed."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from budgetformer import flops, metrics
from budgetformer.cli.app import main
from budgetformer.config import BudgetConfig
from budgetformer.convert import from_pretrained_encoder
from budgetformer.engine import Engine
from budgetformer.engine.packed import Packed
from budgetformer.engine.saved import read_saved
from budgetformer.engine.tuning import measure, pick, tune
from budgetformer.engine.twin_path import TwinPath
from budgetformer.errors import ModelFolderError, UsageError
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.ports import compact
from budgetformer.router import margins
from budgetformer.settings import TrainSettings
from budgetformer.text import Encoded
from budgetformer.tokens import Tokens, tokenise
from budgetformer.training import job
from budgetformer.training.importance import block_cost, fix_order
from budgetformer.training.settling import settle_cascade
from core_helpers import VOCABULARY, hf_config, ids_and_keep, save_tokenizer, stir
from engine_helpers import NATIVE

KEPT = {"target": 0.4, "scope": "heads+blocks", "ffn_blocks": 4, "second": "twin", "relevance": "fixed"}
SIZES = {"intermediate_size": 128, "num_labels": 4, "initializer_range": 0.5, "dropout": 0.0}
WORDS = [
    "lost my card",
    "where is the money",
    "blue",
    "never came why",
    "the the card is lost",
    "my card",
    "why why",
    "money never came",
    "transfer money",
    "the card",
]
LENGTHS = [5, 3, 9, 1, 7, 4, 9, 2, 6, 8, 3, 5]


def pair_of(seed=3, cut=None, **budget):
    """A dense model, and one that keeps it and has other weights, but for the embeddings, itself."""
    torch.manual_seed(seed)
    dense = stir(BudgetFormerForSequenceClassification(hf_config(BudgetConfig(), **SIZES))).eval()
    model = BudgetFormerForSequenceClassification(hf_config(BudgetConfig(**{**KEPT, **budget}), **SIZES, **(cut or {})))
    model = stir(model).eval()
    model.budgetformer.encoder.embeddings.load_state_dict(dense.budgetformer.encoder.embeddings.state_dict())
    model.keep_twin(dense)
    return dense, model


@torch.no_grad()
def logits_of(model, *inputs, **named):
    return model(*inputs, **named).logits


def texts_of(lengths=LENGTHS):
    dice = np.random.default_rng(0)
    return Encoded([{"input_ids": dice.integers(1, VOCABULARY, n).tolist(), "labels": n % 4} for n in lengths])


def tokens_of(texts):
    return [Tokens(ids=item["input_ids"], types=None, truncated=False) for item in texts.items]


def margin_of_half(model, *inputs):
    return float(margins(logits_of(model, *inputs), multi_label=False).median()) + 1e-4


def with_margin(model, margin):
    model.config.budget = {**model.config.budget, "cascade": margin}
    return model


# ---------------------------------------------------------------- the model


def test_a_budget_of_one_is_the_dense_model_and_smaller_ones_are_the_models_own():
    dense, model = pair_of()
    inputs = ids_and_keep(LENGTHS, 9)
    own = BudgetFormerForSequenceClassification(hf_config(BudgetConfig(**{**KEPT, "second": "self"}), **SIZES)).eval()
    own.load_state_dict(model.state_dict(), strict=False)
    wanted = logits_of(dense, *inputs)
    assert torch.equal(logits_of(model, *inputs, budget=1.0), wanted)
    assert not torch.allclose(logits_of(own, *inputs, budget=1.0), wanted, atol=0.1)
    for named in ({}, {"budget": 0.5}, {"gates": torch.ones(12, 3, 7)}):
        assert torch.equal(logits_of(model, *inputs, **named), logits_of(own, *inputs, **named))
    mixed = torch.tensor([1.0, 0.4, 0.7] * 4)
    found = logits_of(model, *inputs, budget=mixed)
    assert torch.allclose(found[::3], wanted[::3], atol=1e-5)
    expected = logits_of(own, *inputs, budget=mixed)
    assert torch.equal(found[1::3], expected[1::3])
    assert torch.equal(found[2::3], expected[2::3])


def test_what_ran_for_a_budget_of_one_is_told_alike_whatever_is_beside_it():
    """Of a model that lost units too: the twin has them all."""
    for cut in (None, {"kept_heads": [[0], [1, 2], [3]], "kept_blocks": [[0, 1], [2], [3]]}):
        _, model = pair_of(cut=cut)
        inputs = ids_and_keep(LENGTHS, 9)
        with torch.no_grad():
            whole = model(*inputs, budget=1.0)
            mixed = model(*inputs, budget=torch.tensor([1.0, 0.4, 0.7] * 4))
        for name in ("gates", "blocks", "wanted", "head_share"):
            assert torch.equal(getattr(mixed, name)[::3], getattr(whole, name)[::3]), name


def test_units_named_one_by_one_beside_a_budget_of_one_are_the_models_own():
    _, model = pair_of()
    inputs = ids_and_keep(LENGTHS, 9)
    units = {"gates": torch.eye(7)[:3].expand(12, 3, 7), "blocks": torch.eye(4)[:3].expand(12, 3, 4)}
    assert torch.equal(logits_of(model, *inputs, budget=1.0, **units), logits_of(model, *inputs, **units))


def test_second_answers_are_the_dense_models():
    dense, model = pair_of()
    inputs = ids_and_keep(LENGTHS, 9)
    first, whole = logits_of(model, *inputs), logits_of(dense, *inputs)
    margin = margin_of_half(model, *inputs)
    again = margins(first, multi_label=False) < margin
    assert 0 < int(again.sum()) < len(again)
    both = logits_of(with_margin(model, margin), *inputs)
    assert torch.allclose(both, torch.where(again[:, None], whole, first), atol=1e-5)


def test_what_the_twin_ran_is_counted():
    _, model = pair_of(cut={"kept_heads": [[0], [1, 2], [3]], "kept_blocks": [[0, 1], [2], [3]]})
    texts = texts_of()
    answers = metrics.predict(model, texts, budget=1.0)
    assert bool((answers.gates == 1).all())
    assert bool((answers.blocks == 1).all()), "what the model lost, the twin has"
    work = metrics.work(answers, model.config)
    assert torch.equal(sum(work.units(model.config.budget_config)[:1]), work.attention_dense + work.feed_forward_dense)
    first = metrics.predict(model, texts)
    margin = float(margins(first.logits, multi_label=False).median()) + 1e-4
    twice = metrics.predict(with_margin(model, margin), texts)
    again = (margins(first.logits, multi_label=False) < margin).double()
    before, after = (metrics.work(found, model.config) for found in (first, twice))
    assert torch.equal(flops.again(twice.gates, twice.blocks).double(), again)
    assert torch.allclose(after.total, before.total + again * before.total_dense, rtol=1e-9)


def test_a_saved_model_comes_back_with_its_twin(tmp_path):
    dense, model = pair_of()
    inputs = ids_and_keep(LENGTHS, 9)
    model.save_pretrained(tmp_path)
    again = BudgetFormerForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(logits_of(again, *inputs, budget=1.0), logits_of(dense, *inputs))
    assert torch.equal(logits_of(again, *inputs), logits_of(model, *inputs))


def test_training_leaves_the_twin_and_what_it_reads_as_they_are(tmp_path):
    dense, model = pair_of(whole=0.3, levels=(0.2, 0.6))
    ids, keep = ids_and_keep(LENGTHS, 9)
    model.save_pretrained(tmp_path)
    model = BudgetFormerForSequenceClassification.from_pretrained(tmp_path)  # a loader may thaw everything
    wanted = logits_of(dense, ids, keep)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(4):
        model(ids, keep, labels=torch.arange(len(ids)) % 4).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert any("layers.0.attention.in_proj" in name for name in moved)
    assert "classifier.out.weight" in moved
    assert not any(name.startswith("twin.") or ".embeddings." in name for name in moved)
    assert torch.equal(logits_of(model.eval(), ids, keep, budget=1.0), wanted)


def test_no_step_trains_every_unit_where_the_twin_has_them():
    _, model = pair_of(whole=0.3, levels=(0.2, 0.6))
    named = [model._next_level() for _ in range(200)]
    assert {budget: named.count(budget) for budget in set(named)} == {
        0.2: pytest.approx(60, abs=2),
        0.6: pytest.approx(60, abs=2),
        None: pytest.approx(80, abs=2),
    }


def test_settling_asks_the_twin():
    """Labels are the twin's own answers for the unsure: what is answered twice is then right, and is chosen."""
    dense, model = pair_of(target=0.6, whole=0.2, levels=(0.3,))
    texts = texts_of(LENGTHS * 4)
    fix_order(model, torch.rand(3, 7), torch.rand(3, 4), block_cost(model, texts))
    cheap, whole = metrics.predict(model, texts, budget=0.3), metrics.predict(dense, texts)
    ran, every = metrics.work(cheap, model.config).units(model.config.budget_config)
    rank = margins(cheap.logits, multi_label=False).argsort().argsort()
    again = rank < int((0.6 * every.sum() - ran.sum()) / every.mean())
    labels = torch.where(again[:, None], whole.logits, cheap.logits).argmax(-1).tolist()
    held = Encoded([{**item, "labels": label} for item, label in zip(texts.items, labels, strict=True)])
    assert settle_cascade(model, held) > 0
    answers = metrics.predict(model, held)
    assert model.config.budget_config.first == pytest.approx(0.5)
    twice = flops.again(answers.gates, answers.blocks) == 1
    assert 0 < int(twice.sum()) < len(twice)
    assert torch.allclose(answers.logits[twice], whole.logits[twice], atol=1e-5)


def test_what_is_made_from_an_encoder_keeps_that_encoder_as_its_twin(folders):
    _, dense_folder, _ = folders
    made = from_pretrained_encoder(dense_folder, labels=4, budget=BudgetConfig(**KEPT))
    itself = BudgetFormerForSequenceClassification(hf_config(BudgetConfig(), **SIZES)).eval()
    itself.load_state_dict({k: v for k, v in made.state_dict().items() if k in itself.state_dict()})
    inputs = ids_and_keep(LENGTHS, 9)
    assert torch.equal(logits_of(made, *inputs, budget=1.0), logits_of(itself, *inputs))


# ---------------------------------------------------------------- the engine


@pytest.fixture
def folders(tmp_path):
    """Two folders, of a model and of the dense model that it keeps."""
    dense, model = pair_of()
    texts = texts_of()
    ids, keep = ids_and_keep(LENGTHS, 9)
    for name, made in (("dense", dense), ("model", with_margin(model, margin_of_half(model, ids, keep)))):
        made.save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    return tmp_path / "model", tmp_path / "dense", texts


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("path", [*NATIVE, "torch"])
def test_every_path_gives_the_bits_of_the_dense_folder(path, dtype, folders):
    folder, dense_folder, texts = folders
    engine, dense = (Engine.load(place, path=path, dtype=dtype) for place in (folder, dense_folder))
    if engine.path.dtype != dtype:
        pytest.skip(f"{path} has no {dtype}")
    tokens = tokens_of(texts)
    wanted = dense.forward(tokens)
    assert isinstance(engine.path, TwinPath)
    whole = engine.forward(tokens, budget=1.0)
    assert np.array_equal(whole.logits, wanted.logits)
    assert whole.gates.min() == whole.blocks.min() == whole.gates.max() == whole.blocks.max() == 1
    first, both = engine.forward(tokens, margin=0.0), engine.forward(tokens)
    again = flops.again(both.gates, both.blocks).astype(bool)
    assert 0 < again.sum() < len(tokens)
    same = np.array_equal if path in NATIVE else lambda a, b: np.allclose(a, b, atol=0.05 if dtype == "bf16" else 1e-4)
    assert same(both.logits, np.where(again[:, None], wanted.logits, first.logits))


@pytest.mark.parametrize("path", [*NATIVE, "torch"])
def test_the_engine_answers_as_the_model_does(path, folders):
    folder, _, texts = folders
    model = BudgetFormerForSequenceClassification.from_pretrained(folder).eval()
    wanted = metrics.predict(model, texts)
    found = Engine.load(folder, path=path).forward(tokens_of(texts))
    assert np.allclose(found.logits, wanted.logits.numpy(), atol=1e-4)
    assert np.array_equal(found.gates, wanted.gates.numpy())
    assert np.array_equal(found.blocks, wanted.blocks.numpy())


def test_budgets_of_one_beside_others_are_put_back_in_their_places(folders):
    folder, _, texts = folders
    engine, tokens = Engine.load(folder), tokens_of(texts)
    budgets = np.array([1.0, 0.3, 1.0, 0.6] * 3)
    mixed = engine.run(Packed.of(tokens), budget=budgets, need_hidden=True)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    for place, (one, budget) in enumerate(zip(tokens, budgets, strict=True)):
        alone = engine.run(Packed.of([one]), budget=[budget], need_hidden=True)
        for name in ("logits", "gates", "blocks", "wanted"):
            assert np.allclose(getattr(mixed, name)[place], getattr(alone, name)[0], atol=1e-5), name
        assert np.allclose(mixed.hidden[starts[place] : starts[place + 1]], alone.hidden, atol=1e-4)
    assert len(engine.run(Packed.of([]), budget=1.0).logits) == 0
    with pytest.raises(UsageError, match="counts has the shape"):
        engine.run(Packed.of(tokens), counts=np.ones((3, 3), int), block_counts=np.ones((12, 3), int))


def test_tuning_tries_other_margins_and_uses_the_one_it_picks(folders, capsys):
    folder, *_ = folders
    engine = Engine.load(folder, threads=1)
    tokens = tokenise(engine.tokenizer, WORDS, max_length=engine.max_length)
    points = [point for point in measure(engine, tokens, None, [0.5]) if point.margin is not None]
    assert [point.budget for point in points] == [None] * len(points)
    assert [point.margin for point in points] == sorted({point.margin for point in points})
    for lower, higher in pairwise(points):
        assert lower.units_share <= higher.units_share
        assert lower.agreement <= higher.agreement, "who is asked again agrees with the full model"
    assert points[0].margin == 0.0
    assert points[-1].units_share - points[0].units_share == pytest.approx(0.7, abs=0.1)
    chosen = tune(engine, WORDS, max_accuracy_loss=0.1, budgets=[0.5])
    assert (engine.budget, engine.margin) == (chosen.budget, chosen.margin)
    assert chosen in read_saved(folder).curve
    full = engine.predict(WORDS, budget=1.0).labels
    assert np.mean([a == b for a, b in zip(engine.predict(WORDS).labels, full, strict=True)]) >= 0.9
    (folder / "words.csv").write_text("text\n" + "\n".join(WORDS) + "\n", encoding="utf-8")
    asked = ["tune", "--model", str(folder), "--data", str(folder / "words.csv"), "--max-accuracy-loss", "0.2"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    point = pick(read_saved(folder).curve, None, 0.2)
    if point.margin is not None:
        assert f"use --margin {point.margin:g};" in said
    else:
        assert "use --budget" in said


def test_a_model_that_is_far_too_sure_has_no_margin_twice(folders):
    folder, *_ = folders
    model = BudgetFormerForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.classifier.out.weight.mul_(30)
    model.save_pretrained(folder)
    engine = Engine.load(folder)
    points = measure(engine, tokenise(engine.tokenizer, WORDS, max_length=engine.max_length), None, [0.5])
    ways = [(point.budget, point.margin) for point in points]
    assert (None, 1.0) in ways
    assert len(ways) == len(set(ways))


def test_a_folder_that_lost_a_tensor_of_the_twin_is_refused_by_name(folders):
    folder, *_ = folders
    tensors = load_file(folder / "model.safetensors")
    lost = "twin.encoder.layers.1.feed_forward.up.weight"
    save_file({k: v for k, v in tensors.items() if k != lost}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFolderError, match=f"lacks {lost}"):
        Engine.load(folder)


@pytest.mark.skipif(not NATIVE, reason="memory is counted where kernels compute")
def test_a_compact_folder_keeps_the_whole_twin(folders, tmp_path):
    folder, dense_folder, _ = folders
    report = compact.export(folder, tmp_path / "small", WORDS, min_agreement=0.0)
    small, dense = Engine.load(tmp_path / "small"), Engine.load(dense_folder)
    assert np.array_equal(small.predict(WORDS, budget=1.0).output.logits, dense.predict(WORDS).output.logits)
    assert report["largest_difference"] == 0.0, "first answers chose nothing that was cut, second ones lost nothing"
    assert report["memory_bytes"][1] < report["memory_bytes"][0]
    shutil.rmtree(tmp_path / "small")


# ---------------------------------------------------------------- training


def settings(**changes):
    return TrainSettings(
        data="x.csv", output_dir="x", model="demo", scope="heads+blocks", target_budget=0.25, **changes
    )


def test_the_twin_answers_by_default_where_the_embeddings_stay_its_own():
    assert job.budget_of(settings()).second == "twin"
    assert job.budget_of(settings(second_answers="self")).second == "self"
    assert job.budget_of(settings(freeze_embeddings=False)).second == "self"
    assert job.budget_of(TrainSettings(data="x.csv", output_dir="x", model="demo", target_budget=0.25)).second == "self"
    with pytest.raises(UsageError, match="second_answers=twin: the twin reads the model's embeddings"):
        job.budget_of(settings(second_answers="twin", freeze_embeddings=False))
    with pytest.raises(UsageError, match="second='twin'"):
        BudgetConfig(target=0.5, second="twin")


def test_who_answers_again_is_taken_as_told_or_refused():
    heads = TrainSettings(data="x.csv", output_dir="x", model="demo", target_budget=0.25, second_answers="twin")
    with pytest.raises(UsageError, match="second='twin': the twin runs whole layers"):
        job.budget_of(heads)
    assert job.budget_of(settings(relevance="learned", first_share=1.0, second_answers="twin")).second == "twin"
    assert job.budget_of(settings(relevance="learned", first_share=1.0)).second == "self"
    learned = job.budget_of(settings(relevance="learned", levels="0.15"))
    assert (learned.second, learned.whole, learned.levels) == ("twin", 0.3, (0.15,))


def test_a_model_with_a_budget_is_no_dense_one_to_start_from(folders):
    folder, *_ = folders
    asked = settings(dense=str(folder))
    with pytest.raises(UsageError, match="has a budget itself; give a dense model"):
        job._dense_twin(asked, None, None, None, None, folder, print)


def test_the_budgeted_model_begins_with_its_twin_beside_it():
    torch.manual_seed(0)
    dense = BudgetFormerForSequenceClassification(hf_config(BudgetConfig(), **SIZES)).eval()
    chosen = settings()
    made = job.budgeted_from(dense, BudgetConfig(**KEPT), chosen).eval()
    inputs = ids_and_keep(LENGTHS, 9)
    assert torch.equal(logits_of(made, *inputs, budget=1.0), logits_of(dense, *inputs))
    assert not any(p.requires_grad for p in made.twin.parameters())
