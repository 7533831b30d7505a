"""Units cut for good: what is left answers as before, on every path, and takes less room."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from budgetformer import cli
from budgetformer.config import ESTIMATORS, EncoderConfig
from budgetformer.engine.engine import Engine, choose
from budgetformer.engine.native import NativePath
from budgetformer.engine.packed import left
from budgetformer.engine.weights import Weights, read_weights, shapes
from budgetformer.errors import BudgetFormerError, ModelFolderError, UsageError
from budgetformer.folder import check_model_folder
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.ports import compact
from engine_helpers import NATIVE, random_batch, random_weights

HEADS, BLOCKS = [[0, 2, 3], [1], [0, 1, 2, 4]], [[1, 2], [0, 3], [2]]
LENGTHS = [1, 9, 4, 31, 2, 17, 5, 3, 22, 8, 11, 6]
PATHS = [*NATIVE, "torch"]
TEXTS = ("where is my card", "lost", "please top up the cash", "pay money back not", "is the card lost", "up")


def whole(seed=0, **budget):
    routing = {"scope": "heads+blocks", "ffn_blocks": 4, **budget}
    return random_weights(seed, budget=routing, hidden_size=40, num_heads=5, intermediate_size=128)


def without(weights: Weights, heads, blocks) -> Weights:
    """The rows and columns of the named units alone, taken one by one."""
    encoder = replace(weights.encoder, kept_heads=heads, kept_blocks=blocks)
    size, width, neurons = encoder.head_size, encoder.hidden_size, encoder.intermediate_size // weights.budget.blocks
    tensors = dict(weights.tensors)
    for i in range(encoder.num_layers):
        rows = [h * size + k for h in heads[i] for k in range(size)]
        three = [part * width + row for part in range(3) for row in rows]
        inner = [b * neurons + k for b in blocks[i] for k in range(neurons)]
        at = f"layers.{i}."
        for name, places in (("attention.in_proj_weight", three), ("attention.in_proj_bias", three)):
            tensors[at + name] = np.ascontiguousarray(tensors[at + name][places])
        for name in ("feed_forward.up.weight", "feed_forward.up.bias"):
            tensors[at + name] = np.ascontiguousarray(tensors[at + name][inner])
        for name, places in (("attention.out_proj.weight", rows), ("feed_forward.down.weight", inner)):
            tensors[at + name] = np.ascontiguousarray(tensors[at + name][:, places])
    return replace(weights, encoder=encoder, tensors=tensors)


def untouched(output, heads=HEADS, blocks=BLOCKS):
    """Inputs that chose none of the units that were cut."""
    missed = (output.gates > left(heads, 3, 5)).any((1, 2)) | (output.blocks > left(blocks, 3, 4)).any((1, 2))
    return ~missed


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_inputs_that_never_chose_a_cut_unit_are_answered_as_before(path, estimator):
    full = whole(estimator=estimator)
    batch = random_batch(full, LENGTHS * 3)
    before = choose(full, "fp32", path)[0].run(batch)
    some = int(np.flatnonzero(before.gates.sum((1, 2)) < 15)[0])  # the units of one input, and no others
    heads = [[int(h) for h in np.flatnonzero(row)] or [0] for row in before.gates[some]]
    blocks = [[int(b) for b in np.flatnonzero(row)] or [0] for row in before.blocks[some]]
    after = choose(without(full, heads, blocks), "fp32", path)[0].run(batch)
    same = untouched(before, heads, blocks)
    assert same[some]
    assert not same.all()
    np.testing.assert_array_equal(after.gates[same], before.gates[same])
    np.testing.assert_array_equal(after.blocks[same], before.blocks[same])
    np.testing.assert_allclose(after.logits[same], before.logits[same], atol=1e-5, rtol=0)
    assert (after.gates <= left(heads, 3, 5)).all()
    assert (after.blocks <= left(blocks, 3, 4)).all()


@pytest.mark.parametrize("path", PATHS)
def test_the_others_take_the_next_best_that_is_left(path):
    full, counts, block_counts = whole(), np.array([[3, 1, 2]] * len(LENGTHS)), np.array([[2, 1, 1]] * len(LENGTHS))
    batch = random_batch(full, LENGTHS)
    scorers = dict(full.tensors)
    for i in range(3):  # the whole model, where no input ever likes a unit that is to be cut
        for place, kept in (("attention", HEADS[i]), ("feed_forward", BLOCKS[i])):
            bias = scorers[f"layers.{i}.{place}.router.scorer.bias"].copy()
            bias[[u for u in range(len(bias)) if u not in kept]] -= 1000
            scorers[f"layers.{i}.{place}.router.scorer.bias"] = bias
    asked = {"counts": counts, "block_counts": block_counts}
    expected = choose(replace(full, tensors=scorers), "fp32", path)[0].run(batch, **asked)
    found = choose(without(full, HEADS, BLOCKS), "fp32", path)[0].run(batch, **asked)
    np.testing.assert_array_equal(found.gates, expected.gates)
    np.testing.assert_array_equal(found.blocks, expected.blocks)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("routed", [True, False])
def test_what_is_gone_cannot_be_asked_for(path, routed):
    full = whole(target=0.5 if routed else 1.0)
    batch = random_batch(full, LENGTHS)
    cut = choose(without(full, HEADS, BLOCKS), "fp32", path)[0]
    every = np.ones((len(batch), 3, 5), np.uint8), np.ones((len(batch), 3, 4), np.uint8)
    heads, blocks = (np.tile(left(kept, 3, n), (len(batch), 1, 1)) for kept, n in ((HEADS, 5), (BLOCKS, 4)))
    expected = choose(full, "fp32", path)[0].run(batch, gates=heads, blocks=blocks)
    named = cut.run(batch, counts=every[0].sum(2, dtype=np.int32), block_counts=every[1].sum(2, dtype=np.int32))
    for found in (cut.run(batch, gates=every[0], blocks=every[1]), named, *([] if routed else [cut.run(batch)])):
        np.testing.assert_array_equal(found.gates, heads)
        np.testing.assert_array_equal(found.blocks, blocks)
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5, rtol=0)


@pytest.mark.skipif(not NATIVE, reason="needs the compiled kernels")
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_packed_weights_shrink_with_what_is_cut(dtype):
    full = whole()
    cut = without(full, HEADS, BLOCKS)
    before, after = (NativePath(weights, dtype).resident_bytes for weights in (full, cut))
    panels = 32 * 64 * {"fp32": 4, "int8": 1}[dtype]  # a head of 8 is a panel of 32 outputs and 64 inputs
    heads, neurons = 15 - 8, (12 - 5) * 32
    assert before - after >= heads * 4 * panels + neurons // 32 * 2 * panels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp("model"), routed=True, blocks=3)


@pytest.fixture(scope="module")
def sample(folder):
    """The text that leaves most heads unused, twice."""
    heads = Engine.load(folder).predict(TEXTS).output.gates.sum((1, 2))
    return [TEXTS[int(heads.argmin())]] * 2


@pytest.fixture(scope="module")
def made(folder, sample, tmp_path_factory):
    """A compact folder and its report."""
    into = tmp_path_factory.mktemp("compact") / "made"
    return into, compact.export(folder, into, sample)


def test_the_sample_is_answered_as_before(folder, made, sample):
    into, report = made
    full, cut = Engine.load(folder), Engine.load(into)
    for budget in (None, 0.3):
        before, after = full.predict(sample, budget=budget), cut.predict(sample, budget=budget)
        if budget is None:
            assert after.labels == before.labels
            np.testing.assert_array_equal(after.output.gates, before.output.gates)
            np.testing.assert_allclose(after.output.logits, before.output.logits, atol=1e-5, rtol=0)
        assert after.output.gates.shape == before.output.gates.shape
    assert report["labels_changed"] == report["texts_that_chose_a_cut_unit"] == 0
    assert report["largest_difference"] <= 1e-5


def test_the_report_says_what_was_cut(folder, made, sample):
    into, report = made
    assert json.loads((into / "export.json").read_text()) == report
    gates = Engine.load(folder).predict(sample).output.gates
    unused = [[int(u) for u in np.flatnonzero(row == 0)] for row in gates.sum(0)]
    assert report["cut_heads"] == unused
    assert any(unused)
    assert report["heads"] == [15, 15 - sum(map(len, unused))]
    assert report["file_bytes"] == [(place / "model.safetensors").stat().st_size for place in (folder, into)]
    assert report["file_bytes"][1] < report["file_bytes"][0]
    # 8 rows or columns of 35 numbers, 7 of a head, and the biases of queries, keys and values
    heads = sum(map(len, unused)) * (4 * 7 * 35 + 3 * 7)
    blocks = sum(map(len, report["cut_blocks"])) * (2 * 32 * 35 + 32)
    numbers = [sum(tensor.size for tensor in read_weights(place).tensors.values()) for place in (folder, into)]
    assert numbers[0] - numbers[1] == heads + blocks


def test_torch_reads_the_folder_and_chooses_the_same(made):
    into, _ = made
    engine = Engine.load(into)
    model = BudgetFormerForSequenceClassification.from_pretrained(into).eval()
    for text in (*TEXTS, "card card card", "where cash 1 2 3"):
        found = engine.predict([text])
        encoded = engine.tokenizer([text])
        ids = torch.tensor([encoded.encodings[0].ids])
        for grad in (False, True):  # dispatch, and the masked path
            with torch.set_grad_enabled(grad):
                out = model(ids)
            np.testing.assert_array_equal(out.gates.detach().numpy(), found.output.gates)
            np.testing.assert_array_equal(out.blocks.detach().numpy(), found.output.blocks)
            np.testing.assert_allclose(out.logits.detach().numpy(), found.output.logits, atol=1e-5, rtol=0)
        weights = model(ids, output_attentions=True).attentions
        ran = torch.stack([w.abs().sum((2, 3)) > 0 for w in weights], dim=1)
        np.testing.assert_array_equal(ran.numpy(), found.output.gates.astype(bool))


def test_a_layer_keeps_the_unit_that_is_used_most():
    gates = np.zeros((4, 2, 3), np.uint8)
    gates[:3, 0, 1] = gates[0, 0, 2] = 1
    assert compact.used(gates, 0.0) == [[1, 2], [0, 1, 2]]
    assert compact.used(gates, 0.25)[0] == [1]
    assert compact.used(gates, 0.9)[0] == [1]


def test_too_many_changed_labels_write_nothing(folder, tmp_path, capsys):
    check = tmp_path / "check.csv"
    check.write_text("text\n" + "\n".join(TEXTS) + "\n")
    command = ["export", "--model", folder, "--format", "compact", "--check", check, "--output-dir", tmp_path / "out"]
    changing = [*command, "--min-use", "0.9", "--min-agreement", "1"]
    assert cli.main([str(word) for word in changing]) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.main([str(word) for word in (*command, "--json", "--quiet")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["labels_changed"] == 0
    assert Engine.load(tmp_path / "out").predict(["lost card"]).labels[0] in tiny.LABELS


def test_there_must_be_something_to_cut(folder, made, tmp_path):
    dense = tiny.make_folder(tmp_path / "dense")
    with pytest.raises(UsageError, match="dense model"):
        compact.export(dense, tmp_path / "out", TEXTS)
    with pytest.raises(UsageError, match="compact already"):
        compact.export(made[0], tmp_path / "out", TEXTS)
    with pytest.raises(BudgetFormerError, match="nothing to cut"):
        compact.export(
            folder, tmp_path / "out", [*TEXTS, *tiny.WORDS, *(f"{a} {b}" for a in tiny.WORDS for b in TEXTS)]
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kept_heads", [[0], [1]]),
        ("kept_heads", [[0], [1], []]),
        ("kept_heads", [[0], [1], [5]]),
        ("kept_heads", [[0], [1], [-1]]),
        ("kept_heads", [[0], [1], [1, 1]]),
        ("kept_heads", [[0], [1], [True]]),
        ("kept_heads", [[0], [1], ["0"]]),
        ("kept_heads", "012"),
        ("kept_heads", [0, 1, 2]),
        ("kept_heads", 3),
        ("kept_blocks", [[0], [1], [3]]),
        ("kept_blocks", [[1, 0], [1], [2]]),
    ],
)
def test_a_damaged_list_is_refused(made, tmp_path, name, value):
    copy = tmp_path / "copy"
    shutil.copytree(made[0], copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ModelFolderError, match=name):
        check_model_folder(copy)


def test_lists_must_fit_the_tensors(made, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(made[0], copy)
    config = json.loads((copy / "config.json").read_text())
    del config["kept_heads"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=r"shape|weights"):
        read_weights(copy)


@pytest.mark.parametrize("kept", [[[1, 0]], [[0], [1]], [[]], [[7]], [["0"]], 3])
def test_a_config_with_such_a_list_is_not_made(kept):
    with pytest.raises(UsageError, match="kept_heads"):
        EncoderConfig(hidden_size=35, num_heads=7, num_layers=1, kept_heads=kept)


def test_blocks_that_have_no_budget_cannot_be_cut():
    budget = whole(scope="heads").budget
    with pytest.raises(UsageError, match="kept_blocks"):
        budget.check_kept(EncoderConfig(num_layers=1, kept_blocks=[[0]]))
    assert shapes(EncoderConfig(), budget, 2, None)["layers.0.attention.out_proj.weight"] == (768, 768)
