"""The engine's torch path equals the model that was trained, input by input, and reads only what was chosen."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch

from budgetformer import flops
from budgetformer.attention import check_budget
from budgetformer.config import ACTIVATIONS, ESTIMATORS, ROUTER_VIEWS, BudgetConfig
from budgetformer.engine import torch_path
from budgetformer.engine.budgets import allocate, shares
from budgetformer.engine.packed import Packed
from budgetformer.engine.torch_path import TorchPath
from budgetformer.engine.weights import NOT_USED, PREFIX, Weights, read_weights
from budgetformer.errors import UsageError
from budgetformer.hf import BudgetFormerForSequenceClassification
from core_helpers import HEAD_SIZE, HEADS, LAYERS, counted, hf_config, ids_and_keep, poison, save_tokenizer, shake, stir

LENGTHS = [11, 5, 1, 8, 5, 5, 2, 11]
BATCH = len(LENGTHS)

# One row for each choice that a model can be made of, and what could hide behind another in combinations.
# fmt: off
MODELS = {
    "post-norm": {},
    "pre-norm": {"norm": "pre", "norm_eps": 1e-3},
    "pre-norm, narrow": {"norm": "pre", "embedding_size": 17, "pooling": "first", "head_hidden": "gelu", "view": "mean+max"},  # noqa: E501
    "no types, positions from 3": {"token_types": 0, "position_offset": 3},
    "first token, dense head": {"pooling": "first", "head_hidden": "tanh"},
    "mean, dense head": {"head_hidden": "relu", "embedding_size": 35},
    "no least unit": {"min_units": 0, "norm": "pre"},
    "three units at least": {"min_units": 3, "router_hidden": 11},
    "no router": {"target": 1.0},
    "a router at target 1": {"target": 1.0, "loss": "paper"},
    **{f"activation {name}": {"activation": name} for name in ACTIVATIONS},
    **{f"view {name}": {"view": name, "norm": norm} for name, norm in zip(ROUTER_VIEWS, ("post", "pre", "post"), strict=True)},  # noqa: E501
    **{f"estimator {name}": {"estimator": name} for name in ESTIMATORS},
    **{f"estimator {name}, no least unit": {"estimator": name, "min_units": 0, "view": "mean+first"} for name in ESTIMATORS},  # noqa: E501
}
# fmt: on
OF_BUDGET = ("estimator", "view", "min_units", "router_hidden", "target", "loss")


def model_of(name="post-norm", **changes):
    """A random model; its routers differ from input to input."""
    settings = {"target": 0.4, **MODELS[name], **changes}
    budget = BudgetConfig(**{k: v for k, v in settings.items() if k in OF_BUDGET})
    rest = {k: v for k, v in settings.items() if k not in OF_BUDGET}
    model = stir(shake(BudgetFormerForSequenceClassification(hf_config(budget, **rest)), 0.2), bias=-0.5).eval()
    for layer in model.budgetformer.encoder.layers:
        # Shares near 0 and 1 for all would hide most of what a router can do wrong.
        layer.attention.router.controller[2].weight.data *= 0.2
    model.budgetformer.encoder.profile.copy_(torch.tensor([0.3, 0.9, 0.55]))
    return model


def weights_of(model) -> Weights:
    config = model.config
    state = {k.removeprefix(PREFIX): v.detach().numpy() for k, v in model.state_dict().items() if k not in NOT_USED}
    return Weights(
        encoder=config.encoder_config,
        budget=config.budget_config,
        labels=[config.id2label[i] for i in range(config.num_labels)],
        problem_type=config.problem_type,
        pooling=config.pooling,
        head_hidden=config.head_hidden,
        tensors=state,
    )


def inputs(lengths=LENGTHS, types=True):
    """The same inputs padded, for the model, and packed, for the path."""
    ids, keep = ids_and_keep(lengths, max(lengths))
    kinds = torch.randint(0, 2, ids.shape) * keep if types else None
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    packed = Packed(
        ids[keep].numpy().astype(np.int32), offsets, None if kinds is None else kinds[keep].numpy().astype(np.int32)
    )
    return ids, keep, kinds, packed


def alone(packed: Packed, i: int) -> Packed:
    span = slice(packed.offsets[i], packed.offsets[i + 1])
    types = None if packed.types is None else packed.types[span]
    return Packed(packed.ids[span], np.array([0, packed.lengths[i]], np.int32), types)


@torch.inference_mode()
def answer(model, ids, keep, kinds, **options):
    out = model(ids, keep, kinds, **options)
    return out.logits.numpy(), out.gates.numpy(), out.wanted.numpy()


@torch.inference_mode()
def hidden_of(model, ids, keep, kinds, **options):
    return model.budgetformer(ids, keep, kinds, **options).last_hidden_state[keep].numpy()


def some_gates(share, seed=0):
    return (np.random.default_rng(seed).random((BATCH, LAYERS, HEADS)) < share).astype(np.uint8)


# ---------------------------------------------------------------- equal to the model


@pytest.mark.parametrize("budget", [None, 0.25, "each", "gates", "most gates"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_model(name, budget):
    model = model_of(name)
    weights = weights_of(model)
    has_types = weights.encoder.token_types > 0
    ids, keep, kinds, packed = inputs(types=has_types)
    path = TorchPath(weights)
    options, given = {}, {}
    if budget in ("gates", "most gates"):
        given["gates"] = some_gates(0.5 if budget == "gates" else 0.93)
        options["gates"] = torch.from_numpy(given["gates"]).float()
    elif budget is not None:
        options["budget"] = 0.25 if budget == 0.25 else torch.linspace(0.1, 1.0, BATCH, dtype=torch.float64)
        named = shares(np.asarray(options["budget"]), BATCH)
        assert named.tolist() == check_budget(options["budget"], BATCH, torch.device("cpu")).tolist()
        profile = weights.tensors["profile"]
        given["counts"] = allocate(named, profile, HEADS, weights.budget.min_units)
    logits, gates, wanted = answer(model, ids, keep, kinds, **options)
    found = path.run(packed, need_hidden=True, **given)
    np.testing.assert_array_equal(found.gates, gates)
    np.testing.assert_allclose(found.logits, logits, rtol=0, atol=1e-5)
    assert found.hidden is not None
    np.testing.assert_allclose(found.wanted, wanted, rtol=0, atol=1e-5)
    if weights.budget.routes or budget is not None:  # the encoder by itself always asks its routers
        assert 0.05 < found.gates.mean() < 0.95
        np.testing.assert_allclose(found.hidden, hidden_of(model, ids, keep, kinds, **options), rtol=0, atol=2e-5)
    else:
        assert found.gates.all()
    for array, kind in ((found.logits, np.float32), (found.gates, np.uint8), (found.wanted, np.float32)):
        assert array.dtype == kind


def test_without_types_every_token_is_of_type_0():
    model = model_of()
    ids, keep, _, packed = inputs(types=False)
    found = TorchPath(weights_of(model)).run(packed)
    np.testing.assert_allclose(found.logits, answer(model, ids, keep, None)[0], rtol=0, atol=1e-5)


def test_a_folder_runs_as_the_model_in_it(tmp_path):
    model = model_of("pre-norm, narrow")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    ids, keep, kinds, packed = inputs()
    found = TorchPath(read_weights(tmp_path)).run(packed)
    np.testing.assert_allclose(found.logits, answer(model, ids, keep, kinds)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "activation gelu_tanh"])
def test_bf16_errs_at_most_twice_as_much_as_the_model_in_bf16(name):
    model = model_of(name)
    ids, keep, kinds, packed = inputs()
    gates = some_gates(0.6)
    exact = answer(model, ids, keep, kinds, gates=torch.from_numpy(gates).float())[0]
    path = TorchPath(weights_of(model), "bf16")
    found = path.run(packed, gates=gates).logits
    with torch.inference_mode():
        rough = copy.deepcopy(model).bfloat16()(ids, keep, kinds, gates=torch.from_numpy(gates)).logits.float().numpy()
    assert found.dtype == np.float32
    assert 1e-4 < np.abs(found - exact).max() <= 2 * np.abs(rough - exact).max()
    # Routers see single precision: almost all of their choices are the same.
    routed = answer(model, ids, keep, kinds)[1]
    assert (path.run(packed).gates == routed).mean() > 0.97


# ---------------------------------------------------------------- an input by itself


@pytest.mark.parametrize("how", ["routers", "gates", "most gates"])
def test_an_answer_does_not_depend_on_the_batch(how):
    weights = weights_of(model_of("view mean+max"))
    path = TorchPath(weights)
    *_, packed = inputs()
    gates = {"routers": None, "gates": some_gates(0.4), "most gates": some_gates(0.93)}[how]
    together = path.run(packed, gates=gates, need_hidden=True)
    assert together.hidden is not None
    for i in range(BATCH):
        single = path.run(alone(packed, i), gates=None if gates is None else gates[i : i + 1], need_hidden=True)
        np.testing.assert_array_equal(single.gates[0], together.gates[i])
        # 1e-6 of a logit of 1, and of larger ones in proportion: a product is rounded as its size makes the kernel do.
        np.testing.assert_allclose(single.logits[0], together.logits[i], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(single.wanted[0], together.wanted[i], rtol=0, atol=1e-6)
        span = slice(packed.offsets[i], packed.offsets[i + 1])
        assert single.hidden is not None
        np.testing.assert_allclose(single.hidden, together.hidden[span], rtol=0, atol=5e-6)


def test_a_batch_of_nothing():
    weights = weights_of(model_of())
    nothing = Packed(np.zeros(0, np.int32), np.zeros(1, np.int32))
    found = TorchPath(weights).run(nothing, need_hidden=True)
    assert found.hidden is not None
    assert found.logits.shape == (0, 5)
    assert found.gates.shape == (0, LAYERS, HEADS)
    assert found.wanted.shape == (0, LAYERS)
    assert found.hidden.shape == (0, HEADS * HEAD_SIZE)


# ---------------------------------------------------------------- what was not chosen


@pytest.mark.parametrize("share", [0.4, 0.95])
def test_weights_of_an_unselected_head_are_not_read(share):
    """Off for some inputs or for all: what the head holds changes nothing for an input that does not run it."""
    model = model_of()
    *_, packed = inputs()
    gates = some_gates(share)
    gates[:, 1, 4] = 0
    gates[0, 0, 2], gates[1, 0, 2] = 0, 1
    clean = TorchPath(weights_of(model)).run(packed, gates=gates)
    poison(model.budgetformer.encoder.layers[1].attention, 4)  # chosen by nobody
    found = TorchPath(weights_of(model)).run(packed, gates=gates)
    np.testing.assert_allclose(found.logits, clean.logits, rtol=0, atol=1e-6)
    poison(model.budgetformer.encoder.layers[0].attention, 2)  # chosen by some
    found = TorchPath(weights_of(model)).run(packed, gates=gates)
    with_it = gates[:, 0, 2] != 0
    assert np.isnan(found.logits[with_it]).all()
    np.testing.assert_allclose(found.logits[~with_it], clean.logits[~with_it], rtol=0, atol=1e-6)
    assert 0 < with_it.sum() < BATCH


def work_of(weights, lengths, gates, routed):
    """Counted work by the project's own formulas."""
    heads = torch.from_numpy(gates.sum(2, dtype=np.int64))
    done = flops.work(
        torch.tensor(lengths), heads, weights.encoder, weights.budget, labels=len(weights.labels), routed=routed
    )
    return int(done.total.sum())


def test_only_chosen_heads_are_computed():
    weights = weights_of(model_of())
    path = TorchPath(weights)
    *_, packed = inputs()
    few, many = some_gates(0.3), np.ones((BATCH, LAYERS, HEADS), np.uint8)
    one_set = np.zeros_like(many)
    one_set[:, :, [1, 6]] = 1
    for gates in (few, many, one_set):
        assert counted(lambda gates=gates: path.run(packed, gates=gates)) == work_of(weights, LENGTHS, gates, False)
    routed = path.run(packed)
    assert (routed.gates.mean((0, 2)) < torch_path.DENSE).all()
    assert counted(lambda: path.run(packed)) == work_of(weights, LENGTHS, routed.gates, True)


def test_where_nearly_all_run_all_are_computed_at_once():
    """Faster there than set by set: many small products against one large one."""
    weights = weights_of(model_of())
    path = TorchPath(weights)
    *_, packed = inputs()
    gates = np.ones((BATCH, LAYERS, HEADS), np.uint8)
    gates[2, :, 3] = 0
    dense = work_of(weights, LENGTHS, np.ones_like(gates), False)
    assert counted(lambda: path.run(packed, gates=gates)) == dense
    gates[[0, 7], :, :5] = 0  # tokens count, not inputs: the two longest
    assert gates.mean() > torch_path.DENSE
    assert counted(lambda: path.run(packed, gates=gates)) < dense


# ---------------------------------------------------------------- blocks of feed-forward neurons


def without_blocks(model, on):
    """A copy of the model with the neurons of blocks that are off cut off. on (layer, block)."""
    made = copy.deepcopy(model)
    for layer, row in zip(made.budgetformer.encoder.layers, on, strict=True):
        size = layer.feed_forward.down.weight.shape[1] // len(row)
        for block in (row == 0).nonzero()[0]:
            layer.feed_forward.down.weight.data[:, block * size : (block + 1) * size] = 0.0
    return made


@pytest.mark.parametrize("share", [0.3, 0.95])  # set by set, and all at once
@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "activation relu"])
def test_blocks_are_left_out_input_by_input(name, share):
    model = model_of(name, intermediate_size=54)
    *_, packed = inputs()
    blocks = (np.random.default_rng(2).random((BATCH, LAYERS, 6)) < share).astype(np.uint8)
    blocks[2], blocks[3, 0] = 1, 0
    gates = some_gates(0.5)
    found = TorchPath(weights_of(model)).run(packed, gates=gates, blocks=blocks)
    for i in range(BATCH):
        one = alone(packed, i)
        assert one.types is not None
        ids, kinds = torch.from_numpy(one.ids[None]).long(), torch.from_numpy(one.types[None]).long()
        cut = without_blocks(model, blocks[i])
        keep = torch.ones_like(ids, dtype=torch.bool)
        logits, *_ = answer(cut, ids, keep, kinds, gates=torch.from_numpy(gates[i : i + 1]).float())
        np.testing.assert_allclose(found.logits[i], logits[0], rtol=0, atol=1e-5)


def test_all_blocks_on_is_as_if_none_was_named():
    weights = weights_of(model_of())
    *_, packed = inputs()
    path = TorchPath(weights)
    found = path.run(packed, blocks=np.ones((BATCH, LAYERS, 1), np.uint8))
    np.testing.assert_array_equal(found.logits, path.run(packed).logits)


@pytest.mark.parametrize("share", [0.4, 0.95])
def test_a_block_that_is_off_is_not_read(share):
    model = model_of(intermediate_size=54)
    *_, packed = inputs()
    path = TorchPath(weights_of(model))
    blocks = (np.random.default_rng(4).random((BATCH, LAYERS, 6)) < share).astype(np.uint8)
    blocks[:, 1, 5] = 0
    clean = path.run(packed, blocks=blocks, gates=some_gates(0.5))
    few = counted(lambda: path.run(packed, blocks=blocks, gates=some_gates(0.5)))
    assert few < counted(lambda: path.run(packed, gates=some_gates(0.5))) or share > torch_path.DENSE
    layer = model.budgetformer.encoder.layers[1].feed_forward
    with torch.no_grad():
        layer.up.weight[45:], layer.up.bias[45:], layer.down.weight[:, 45:] = np.nan, np.nan, np.nan
    found = TorchPath(weights_of(model)).run(packed, blocks=blocks, gates=some_gates(0.5))
    np.testing.assert_allclose(found.logits, clean.logits, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- how it is made


def test_what_it_does_not_compute_in_is_refused():
    weights = weights_of(model_of())
    for dtype in ("int8", "fp16"):
        with pytest.raises(UsageError, match=f"dtype='{dtype}': the torch path computes in fp32 or bf16"):
            TorchPath(weights, dtype)
    with pytest.raises(UsageError, match="threads=0: must be 1 or more"):
        TorchPath(weights, threads=0)
    path = TorchPath(weights)
    assert (path.name, path.dtype) == ("torch", "fp32")
    with pytest.raises(UsageError, match="gates has the shape"):
        path.run(inputs()[-1], gates=np.ones((1, LAYERS, HEADS), np.uint8))


def test_threads_are_those_asked_for_and_given_back(monkeypatch):
    before, seen = torch.get_num_threads(), []
    path = TorchPath(weights_of(model_of()), threads=before + 1)
    pool = torch_path._pool
    monkeypatch.setattr(torch_path, "_pool", lambda *args: seen.append(torch.get_num_threads()) or pool(*args))
    *_, packed = inputs()
    path.run(packed)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before
    monkeypatch.setattr(torch_path, "_pool", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        path.run(packed)
    assert torch.get_num_threads() == before


def test_weights_are_shared_and_left_alone():
    weights = weights_of(model_of())
    before = {name: tensor.copy() for name, tensor in weights.tensors.items()}
    path = TorchPath(weights)
    *_, packed = inputs()
    first = path.run(packed)
    for name, tensor in weights.tensors.items():
        np.testing.assert_array_equal(tensor, before[name])
        assert path._tensors[name].data_ptr() == tensor.ctypes.data
        tensor.flags.writeable = False
    np.testing.assert_array_equal(TorchPath(weights).run(packed).logits, first.logits)


def test_it_needs_no_transformers():
    code = "import sys, budgetformer.engine.torch_path\nprint('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
