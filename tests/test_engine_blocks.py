"""Feed-forward blocks with a budget, in the engine: the same blocks and answers as in training, everywhere."""

import numpy as np
import pytest
import torch

from budgetformer import flops
from budgetformer.engine import budgets, native
from budgetformer.engine.engine import Engine, choose
from budgetformer.engine.packed import Packed
from budgetformer.engine.weights import read_weights
from budgetformer.errors import UsageError
from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.router import shares_of
from tiny import tokenizer

BLOCKS, LAYERS = 5, 3
PATHS = [*native.paths(), "torch"]


def make(folder, **changes):
    torch.manual_seed(4)
    sizes = dict(vocab_size=97, hidden_size=36, num_layers=LAYERS, num_heads=6, intermediate_size=160, max_positions=31)
    budget = {"target": 0.4, "scope": "heads+blocks", "ffn_blocks": BLOCKS, **changes.pop("budget", {})}
    model = BudgetFormerForSequenceClassification(BudgetFormerConfig(**sizes, num_labels=3, budget=budget, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 1.0 if ".router." in name else 0.15)
        model.budgetformer.encoder.profile.copy_(torch.tensor([0.7, 0.4, 0.3]))
        model.budgetformer.encoder.block_profile.copy_(torch.tensor([0.5, 0.3, 0.2]))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model.eval()


def batch():
    dice = np.random.default_rng(7)
    lengths = [1, 9, 4, 31, 2, 17, 5]
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    packed = Packed(dice.integers(1, 97, offsets[-1]).astype(np.int32), offsets)
    ids, keep = torch.zeros(len(lengths), 31, dtype=torch.long), torch.zeros(len(lengths), 31, dtype=torch.long)
    for i, n in enumerate(lengths):
        ids[i, :n] = torch.from_numpy(packed.ids[offsets[i] : offsets[i + 1]])
        keep[i, :n] = 1
    return packed, ids, keep


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("view", ["mean", "mean+max"])
def test_equals_the_training_path(tmp_path, path, norm, view):
    model = make(tmp_path, norm=norm, budget={"view": view})
    packed, ids, keep = batch()
    for budget in (None, 0.3, np.linspace(0.2, 1.0, len(packed))):
        named = budget if budget is None else torch.as_tensor(budget)
        with torch.no_grad():
            wanted = model(ids, keep, budget=named)
        for threads in (1, 2):
            engine = Engine.load(tmp_path, path=path, threads=threads)
            found = engine.run(packed, budget=budget)
            np.testing.assert_array_equal(found.gates, wanted.gates.numpy())
            np.testing.assert_array_equal(found.blocks, wanted.blocks.numpy())
            np.testing.assert_allclose(found.logits, wanted.logits.numpy(), rtol=0, atol=1e-5)
    assert 0.1 < found.blocks.mean() < 0.95


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_an_inputs_answer_is_its_own(tmp_path, path, dtype):
    if path == "torch":
        pytest.skip("torch's products depend on the number of rows in their last bits")
    if not native.has(path, dtype):
        pytest.skip(f"{path} has no {dtype}")
    make(tmp_path)
    packed, _, _ = batch()
    engine = Engine.load(tmp_path, path=path, dtype=dtype, threads=2)
    together = engine.run(packed)
    for i in range(len(packed)):
        span = slice(packed.offsets[i], packed.offsets[i + 1])
        alone = engine.run(Packed(packed.ids[span], np.array([0, span.stop - span.start], np.int32)))
        np.testing.assert_array_equal(alone.logits[0], together.logits[i])
        np.testing.assert_array_equal(alone.blocks[0], together.blocks[i])


@pytest.mark.parametrize("path", PATHS)
def test_blocks_named_by_the_caller(tmp_path, path):
    model = make(tmp_path)
    packed, ids, keep = batch()
    chosen = (np.random.default_rng(1).random((len(packed), LAYERS, BLOCKS)) < 0.4).astype(np.uint8)
    gates = np.ones((len(packed), LAYERS, 6), np.uint8)
    with torch.no_grad():
        wanted = model(ids, keep, gates=torch.from_numpy(gates), blocks=torch.from_numpy(chosen))
    found = Engine.load(tmp_path, path=path).run(packed, gates=gates, blocks=chosen)
    np.testing.assert_array_equal(found.blocks, chosen)
    np.testing.assert_allclose(found.logits, wanted.logits.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_a_dense_model_of_both_scopes_runs_all(tmp_path, path):
    model = make(tmp_path, budget={"target": 1.0})
    packed, ids, keep = batch()
    with torch.no_grad():
        wanted = model(ids, keep)
    found = Engine.load(tmp_path, path=path).run(packed)
    assert (found.blocks == 1).all()
    np.testing.assert_allclose(found.logits, wanted.logits.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_what_does_not_fit_is_refused(tmp_path, path):
    make(tmp_path)
    packed, _, _ = batch()
    weights = read_weights(tmp_path)
    made, _ = choose(weights, "fp32", path, 1)
    counts = np.ones((len(packed), LAYERS), np.int32)
    with pytest.raises(UsageError, match="blocks has 4 blocks a layer, the model has 5"):
        made.run(packed, blocks=np.ones((len(packed), LAYERS, 4), np.uint8))
    with pytest.raises(UsageError, match="block_counts and blocks were both given"):
        made.run(packed, block_counts=counts, blocks=np.ones((len(packed), LAYERS, BLOCKS), np.uint8))
    with pytest.raises(UsageError, match="block_counts has the shape"):
        made.run(packed, block_counts=counts[:2])


def test_split_is_the_routers_own():
    dice = np.random.default_rng(2)
    for _ in range(20):
        costs, learned = dice.uniform(1, 9, (6, 2)), dice.uniform(0.05, 0.95, 2)
        budget = dice.uniform(0.05, 1.0, 6)
        wanted = shares_of(*(torch.from_numpy(array) for array in (budget, learned, costs)))
        np.testing.assert_allclose(budgets.split(budget, learned, costs), wanted.numpy(), rtol=0, atol=1e-9)


def test_counted_work_falls_with_the_blocks(tmp_path):
    make(tmp_path)
    packed, _, _ = batch()
    engine = Engine.load(tmp_path)
    shares = []
    for budget in (0.25, 0.5, 1.0):
        output = engine.run(packed, budget=budget)
        done = flops.work(
            packed.lengths,
            output.gates.sum(2),
            engine.weights.encoder,
            engine.weights.budget,
            labels=3,
            blocks=output.blocks.mean(2),
        )
        ran, every = done.units(engine.weights.budget)
        shares.append(float(ran.sum() / every.sum()))
    np.testing.assert_allclose(shares, [0.25, 0.5, 1.0], atol=0.04)
