"""Every engine path gives the training path's and the reference's answers, and each input's bits on its own."""

from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgetformer.config import ACTIVATIONS, ESTIMATORS, NORMS, POOLINGS, ROUTER_VIEWS
from budgetformer.engine.budgets import allocate
from budgetformer.engine.engine import Engine
from budgetformer.engine.packed import Output, Packed
from budgetformer.engine.weights import Weights
from budgetformer.tokens import Tokens
from engine_helpers import COMPUTED, NATIVE, loaded, part, part_of, random_batch, random_weights

FP32 = 1e-5  # of a logit, to the same model elsewhere
LENGTHS = [7, 1, 31, 2, 12, 20, 1, 5]


def fp32_paths(weights: Weights) -> dict[str, Any]:
    """Every path in fp32, torch's included."""
    from budgetformer.engine.torch_path import TorchPath

    return {"torch": TorchPath(weights), **{name: loaded(weights, "fp32", name) for name in NATIVE}}


def test_the_kernels_are_there_to_be_tested():
    """Where they could be compiled and are not, most of this file would be skipped without a word."""
    from budgetformer.engine.kernels import build

    try:
        wish = build.asked()
        build._compiler(None)
    except build.NoCompilerError as error:
        pytest.skip(str(error))
    if wish == "skip":
        pytest.skip(f"{build.VARIABLE}=0")
    assert NATIVE, "the kernels are not compiled, or do not load: make native"
    assert {path for path, dtype in COMPUTED if dtype == "fp32"} == set(NATIVE)


# ---------------------------------------------------------------------------------------- the two other computations


def training_path(weights: Weights, batch: Packed, *, learning: bool = False, **options: Any) -> Output:
    """The Hugging Face model with the same weights, on a padded batch. learning: every head, as in training."""
    import torch

    model = hf_model(weights)
    longest = int(batch.lengths.max())
    ids, types = np.zeros((2, len(batch), longest), np.int64)
    mask = np.zeros((len(batch), longest), np.int64)
    for i, (first, last) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
        ids[i, : last - first] = batch.ids[first:last]
        mask[i, : last - first] = 1
        if batch.types is not None:
            types[i, : last - first] = batch.types[first:last]
    words = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    if learning and "gates" in words:  # whoever wants the gradient of gates has every head run
        words["gates"] = words["gates"].requires_grad_()
    with torch.set_grad_enabled(learning):
        out = model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            token_type_ids=torch.from_numpy(types) if weights.encoder.token_types else None,
            **words,
        )
    arrays = (tensor.detach().float().numpy() for tensor in (out.logits, out.gates, out.wanted))
    logits, gates, wanted = arrays
    return Output(logits, gates.astype(np.uint8), wanted)


@lru_cache(maxsize=4)
def hf_model(weights: Weights) -> Any:
    import torch

    from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification

    config = BudgetFormerConfig(
        **asdict(weights.encoder),
        budget=asdict(weights.budget),
        pooling=weights.pooling,
        head_hidden=weights.head_hidden,
        num_labels=len(weights.labels),
    )
    model = BudgetFormerForSequenceClassification(config).eval()
    state = {
        name if name.startswith("classifier") else f"budgetformer.encoder.{name}": torch.from_numpy(tensor.copy())
        for name, tensor in weights.tensors.items()
    }
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= {"multiplier", "overspent"}
    return model


def reference(weights: Weights, batch: Packed, place: int, gates: np.ndarray, blocks: np.ndarray | None) -> np.ndarray:
    """The logits of one input in double precision, by the loops of reference.py. gates: (layer, head)."""
    import torch
    import torch.nn.functional as F

    from budgetformer import reference
    from budgetformer.encoder import ACTIVATIONS as FUNCTIONS

    e = weights.encoder
    w = {name: torch.from_numpy(tensor).double() for name, tensor in weights.tensors.items()}
    rows = slice(batch.offsets[place], batch.offsets[place + 1])
    ids = torch.from_numpy(batch.ids[rows].astype(np.int64))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], e.norm_eps)

    x = w["embeddings.word.weight"][ids]
    x = x + w["embeddings.position.weight"][e.position_offset : e.position_offset + len(ids)]
    if e.token_types:
        kinds = np.zeros(len(ids)) if batch.types is None else batch.types[rows]
        x = x + w["embeddings.token_type.weight"][torch.from_numpy(kinds.astype(np.int64))]
    x = norm(x, "embeddings.norm")
    if "embeddings.projection.weight" in w:
        x = F.linear(x, w["embeddings.projection.weight"], w["embeddings.projection.bias"])
    for i in range(e.num_layers):
        at = f"layers.{i}."
        inner = norm(x, f"{at}attention_norm") if e.norm == "pre" else x
        q, k, v = w[f"{at}attention.in_proj_weight"].chunk(3)
        bq, bk, bv = w[f"{at}attention.in_proj_bias"].chunk(3)
        on = torch.from_numpy(gates[i].astype(np.float64))[None]
        out, bias = w[f"{at}attention.out_proj.weight"], w[f"{at}attention.out_proj.bias"]
        one = inner[None]
        done = reference.attention(
            *(one, one, one),
            gates=on,
            **dict(weight_q=q, weight_k=k, weight_v=v, weight_o=out, bias_q=bq, bias_k=bk, bias_v=bv, bias_o=bias),
        )
        x = x + done[0]
        x = x if e.norm == "pre" else norm(x, f"{at}attention_norm")
        inner = norm(x, f"{at}feed_forward_norm") if e.norm == "pre" else x
        on = torch.ones(1, 1) if blocks is None else torch.from_numpy(blocks[i].astype(np.float64))[None]
        x = (
            x
            + reference.feed_forward(
                inner[None],
                gates=on,
                weight_in=w[f"{at}feed_forward.up.weight"],
                bias_in=w[f"{at}feed_forward.up.bias"],
                weight_out=w[f"{at}feed_forward.down.weight"],
                bias_out=w[f"{at}feed_forward.down.bias"],
                activation=FUNCTIONS[e.activation],
            )[0]
        )
        x = x if e.norm == "pre" else norm(x, f"{at}feed_forward_norm")
    x = norm(x, "norm") if e.norm == "pre" else x
    pooled = x.mean(0) if weights.pooling == "mean" else x[0]
    if weights.head_hidden is not None:
        dense = F.linear(pooled, w["classifier.dense.weight"], w["classifier.dense.bias"])
        pooled = FUNCTIONS[weights.head_hidden](dense)
    return F.linear(pooled, w["classifier.out.weight"], w["classifier.out.bias"]).numpy()


# ------------------------------------------------------------------------------------------------------- random models

CASES = 40
SHAPES = [
    dict(hidden_size=36, num_heads=3, intermediate_size=50),
    dict(hidden_size=40, num_heads=5, intermediate_size=50),
    dict(hidden_size=35, num_heads=7, intermediate_size=53),
    dict(hidden_size=66, num_heads=2, intermediate_size=32),
    dict(hidden_size=96, num_heads=8, intermediate_size=129),
]
OPTIONS: dict[str, tuple[Any, ...]] = {
    "shape": tuple(SHAPES),
    "norm": NORMS,
    "activation": ACTIVATIONS,
    "pooling": POOLINGS,
    "head_hidden": (None, *ACTIVATIONS),
    "view": ROUTER_VIEWS,
    "estimator": ESTIMATORS,
    "min_units": (0, 1, 2),
    "token_types": (0, 1, 2),
    "position_offset": (0, 2),
    "embedding_size": (None, 19, 64),
    "labels": (1, 2, 5, 40),
}


def random_case(number: int) -> Weights:
    """Model `number` of a series in which every option takes all its values, in an order of its own."""
    chosen = {}
    for place, (option, values) in enumerate(OPTIONS.items()):
        order = np.concatenate([np.random.default_rng([place, i]).permutation(len(values)) for i in range(CASES)])
        chosen[option] = values[order[number]]
    budget = {name: chosen.pop(name) for name in ("view", "estimator", "min_units")}
    return random_weights(number, budget=budget, **chosen.pop("shape"), **chosen)


def test_the_models_differ_in_every_option():
    """Each value occurs in the series, and inputs choose other heads: else the comparison below would show little."""
    from budgetformer.engine.torch_path import TorchPath

    models = [random_case(number) for number in range(CASES)]
    for option in ("norm", "activation", "token_types", "position_offset", "embedding_size"):
        assert {getattr(model.encoder, option) for model in models} == set(OPTIONS[option])
    for option in ("view", "estimator", "min_units"):
        assert {getattr(model.budget, option) for model in models} == set(OPTIONS[option])
    assert {model.head_hidden for model in models} == set(OPTIONS["head_hidden"])
    gates = [TorchPath(model).run(random_batch(model, LENGTHS, number)).gates for number, model in enumerate(models)]
    assert sum(len(np.unique(one, axis=0)) > 1 for one in gates) > 0.75 * CASES
    assert 0.3 < np.mean([one.mean() for one in gates]) < 0.8


@pytest.mark.parametrize("number", range(CASES))
def test_every_path_equals_the_training_path(number):
    """Learned budget, named budgets, named heads: the same heads, the same wishes, logits to 1e-5."""
    weights = random_case(number)
    batch = random_batch(weights, LENGTHS, number)
    e = weights.encoder
    rng = np.random.default_rng(number)
    gates = (rng.random((len(batch), e.num_layers, e.num_heads)) < 0.5).astype(np.uint8)
    gates[:2, 1] = 0
    shares = rng.uniform(0.05, 1.0, len(batch))
    counts = allocate(shares, weights.tensors["profile"], e.num_heads, weights.budget.min_units)
    learned = training_path(weights, batch)
    expected = {
        "learned": (learned, {}),
        "named": (training_path(weights, batch, budget=shares), {"counts": counts}),
        "heads": (training_path(weights, batch, gates=gates.astype(np.float32)), {"gates": gates}),
    }
    for name, path in fp32_paths(weights).items():
        for what, (theirs, options) in expected.items():
            ours = path.run(batch, **options)
            np.testing.assert_array_equal(ours.gates, theirs.gates, f"{name}, {what}")
            np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=FP32, err_msg=f"{name}, {what}")
            if what != "heads":
                np.testing.assert_allclose(ours.wanted, theirs.wanted, rtol=0, atol=1e-5, err_msg=f"{name}, {what}")


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5])
def test_every_path_equals_the_loops_of_the_reference(number):
    """Heads that routers choose, and any blocks of neurons, none among them: logits to 1e-5 of double precision."""
    shape = [dict(hidden_size=36, num_heads=3), dict(hidden_size=40, num_heads=5)][number // 2 % 2]
    inner, cut = [(96, 3), (128, 2), (50, 1)][number % 3]
    norm, activation = NORMS[number % 2], ACTIVATIONS[number % 5]
    weights = random_weights(number, norm=norm, activation=activation, intermediate_size=inner, **shape)
    batch = random_batch(weights, LENGTHS, number)
    blocks = (np.random.default_rng(number).random((len(batch), 3, cut)) < 0.6).astype(np.uint8)
    blocks[0] = 0
    for name, path in fp32_paths(weights).items():
        for cuts in (None, blocks):
            ours = path.run(batch, blocks=cuts)
            for i in range(len(batch)):
                theirs = reference(weights, batch, i, ours.gates[i], None if cuts is None else cuts[i])
                np.testing.assert_allclose(ours.logits[i], theirs, rtol=0, atol=FP32, err_msg=f"{name}, input {i}")


def test_a_dense_model_runs_every_head():
    """A target of 1 leaves nothing to decide: no router runs, whatever its weights want."""
    weights = random_weights(3, budget={"target": 1.0})
    batch = random_batch(weights, LENGTHS)
    theirs = training_path(weights, batch, gates=np.ones((len(batch), 3, 3), np.float32))
    for name, path in fp32_paths(weights).items():
        ours = path.run(batch)
        assert ours.gates.all(), name
        assert (ours.wanted == 1).all(), name
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=FP32, err_msg=name)


def test_ties_go_to_the_first_head():
    """Equal scores: every path takes the heads in their order, as the training path does."""
    plain = random_weights(4, hidden_size=40, num_heads=5)
    routers = [name for name in plain.tensors if "scorer" in name]
    weights = replace(plain, tensors={**plain.tensors, **{n: np.zeros_like(plain.tensors[n]) for n in routers}})
    batch = random_batch(weights, LENGTHS)
    counts = np.tile(np.array([0, 2, 4], np.int32), (len(batch), 1))
    for name, path in fp32_paths(weights).items():
        gates = path.run(batch, counts=counts).gates
        assert gates[0].tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], name
        np.testing.assert_array_equal(path.run(batch).gates, training_path(weights, batch).gates, name)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("least", [0, 1, 2])
@pytest.mark.parametrize("wish", [-40.0, 40.0], ids=["none", "all"])
def test_as_few_heads_as_there_may_be_and_all(estimator, least, wish):
    """Controllers that want nothing, or everything; scores that are all alike, and scores with one winner."""
    budget = dict(estimator=estimator, min_units=least)
    plain = random_weights(7, budget=budget, hidden_size=40, num_heads=5)
    for scale in (0.01, 3.0):
        tensors = dict(plain.tensors)
        for i in range(3):
            router = f"layers.{i}.attention.router."
            tensors[f"{router}controller.2.bias"] = np.array([wish], np.float32)
            tensors[f"{router}scorer.weight"] = np.float32(scale) * tensors[f"{router}scorer.weight"]
            tensors[f"{router}scorer.bias"] = np.float32(scale) * tensors[f"{router}scorer.bias"]
        weights = replace(plain, tensors=tensors)
        batch = random_batch(weights, LENGTHS)
        theirs = training_path(weights, batch)
        assert int(theirs.gates.sum(2).min()) >= least
        for name, path in fp32_paths(weights).items():
            np.testing.assert_array_equal(path.run(batch).gates, theirs.gates, name)


@pytest.mark.parametrize("width", [33, 36, 64])
def test_a_norm_of_numbers_far_from_zero(width):
    """Embeddings with a common offset: what a norm takes away must not take the digits along, whatever the width."""
    plain = random_weights(5, hidden_size=width, num_heads=1)
    names = [f"embeddings.{kind}.weight" for kind in ("word", "position", "token_type")]
    small = {name: (0.03 * plain.tensors[name]).astype(np.float32) for name in names}
    small[names[0]] = (small[names[0]] + 10).astype(np.float32)
    weights = replace(plain, tensors={**plain.tensors, **small})
    batch = random_batch(weights, LENGTHS)
    gates = np.ones((len(batch), 3, 1), np.uint8)
    exact = np.stack([reference(weights, batch, i, gates[i], None) for i in range(len(batch))])
    paths = fp32_paths(weights)
    least = np.abs(paths.pop("torch").run(batch, gates=gates).logits - exact).max()
    for name, path in paths.items():
        assert np.abs(path.run(batch, gates=gates).logits - exact).max() <= 4 * least, name


def test_scores_of_attention_far_apart():
    """Queries a thousand times as large: the softmax must neither overflow nor lose the highest key."""
    plain = random_weights(6)
    name = "layers.1.attention.in_proj_weight"
    large = plain.tensors[name].copy()
    large[:36] *= 1000
    weights = replace(plain, tensors={**plain.tensors, name: large})
    batch = random_batch(weights, LENGTHS)
    for path_name, path in fp32_paths(weights).items():
        ours = path.run(batch)
        for i in range(len(batch)):
            theirs = reference(weights, batch, i, ours.gates[i], None)
            np.testing.assert_allclose(ours.logits[i], theirs, rtol=0, atol=FP32, err_msg=f"{path_name}, input {i}")


# ---------------------------------------------------------------------------- one input's bits, whatever is beside it

CUTS = {96: 3, 50: 1, 256: 4, 128: 4}  # feed-forward neurons, and into how many blocks they are cut
LONG = [
    dict(hidden_size=40, num_heads=5, intermediate_size=96, norm="post"),
    dict(hidden_size=36, num_heads=3, intermediate_size=50, norm="pre"),
    dict(hidden_size=128, num_heads=2, intermediate_size=256, norm="post"),
    dict(
        hidden_size=64,
        num_heads=4,
        intermediate_size=128,
        norm="pre",
        budget={"scope": "heads+blocks", "ffn_blocks": 4},
    ),
]


@lru_cache
def long_model(number: int) -> Weights:
    """A head narrower than a panel; no multiple of anything; a head of two panels; routers for blocks, too."""
    return random_weights(number, max_positions=512, num_layers=2, **LONG[number])


@st.composite
def calls(draw) -> tuple[Weights, Packed, dict[str, np.ndarray]]:
    """A batch of any lengths, and who decides about heads and blocks."""
    weights = long_model(draw(st.integers(0, len(LONG) - 1)))
    lengths = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 512)), min_size=1, max_size=7))
    batch = random_batch(weights, lengths, draw(st.integers(0, 1000)))
    e = weights.encoder
    shape = (len(lengths), e.num_layers, e.num_heads)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    options: dict[str, np.ndarray] = {}
    who = draw(st.sampled_from(["learned", "named", "heads"]))
    if who == "named":
        named = draw(st.lists(st.floats(0.01, 1.0), min_size=len(lengths), max_size=len(lengths)))
        options["counts"] = allocate(np.array(named), weights.tensors["profile"], e.num_heads, weights.budget.min_units)
    if who == "heads":
        options["gates"] = (rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))).astype(np.uint8)
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.0, 0.5, 1.0]))
        options["blocks"] = (rng.random((*shape[:2], CUTS[e.intermediate_size])) < share).astype(np.uint8)
    return weights, batch, options


def of(options: dict[str, np.ndarray], places: list[int]) -> dict[str, np.ndarray]:
    return {name: array[places] for name, array in options.items()}


def assert_same_bits(found: list[np.ndarray], expected: list[np.ndarray], where: str) -> None:
    for name, one, other in zip(("logits", "gates", "wanted", "hidden", "blocks"), found, expected, strict=True):
        assert one.tobytes() == other.tobytes(), f"{name} differ {where}"


@pytest.mark.parametrize(("path", "dtype"), COMPUTED)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(call=calls(), order=st.randoms(use_true_random=False))
def test_an_input_has_the_same_bits_alone_and_in_any_batch(path, dtype, call, order):
    """Alone; together in another order, on 1, 2 and 3 threads; in two halves: not one bit differs."""
    weights, batch, options = call
    places = list(range(len(batch)))
    order.shuffle(places)
    half = order.randint(0, len(places))
    single = loaded(weights, dtype, path)
    alone = []
    for i in range(len(batch)):
        one = part(batch, [i])
        alone.append(part_of(single.run(one, **of(options, [i]), need_hidden=True), one, 0))
    assert all(np.isfinite(array).all() for answer in alone for array in answer)
    for threads in (1, 2, 3):
        many = loaded(weights, dtype, path, threads)
        for group in filter(None, (places, places[:half], places[half:], [places[0]] * 3)):
            several = part(batch, group)
            output = many.run(several, **of(options, group), need_hidden=True)
            for at, place in enumerate(group):
                where = f"for input {place} in {group} on {threads} threads"
                assert_same_bits(part_of(output, several, at), alone[place], where)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(call=calls())
def test_on_torch_an_input_has_the_same_heads_and_nearly_the_same_numbers(call):
    """Torch's products are not the same bits for other numbers of rows: the same heads, logits to 1e-5."""
    from budgetformer.engine.torch_path import TorchPath

    weights, batch, options = call
    path = TorchPath(weights)
    together = path.run(batch, **options)
    for i in range(len(batch)):
        alone = path.run(part(batch, [i]), **of(options, [i]))
        np.testing.assert_array_equal(alone.gates[0], together.gates[i])
        np.testing.assert_allclose(alone.logits[0], together.logits[i], rtol=0, atol=FP32)


@pytest.mark.parametrize(("path", "dtype"), COMPUTED)
def test_the_token_budget_of_a_batch_changes_no_bit(path, dtype):
    """`Engine.batch_tokens`, from one token to all at once."""
    weights = long_model(0)
    rng = np.random.default_rng(1)
    lengths = [1, 512, 3, 40, 41, 7, 300, 2, 1, 1, 90]
    tokens = [Tokens(ids=rng.integers(0, 97, n).tolist(), types=None, truncated=False) for n in lengths]
    computed = loaded(weights, dtype, path, 2)
    answers = []
    for size in (1, 5, 64, 333, 100_000):
        engine = Engine(weights, computed, None, 512, "", batch_tokens=size)  # pyright: ignore[reportArgumentType]
        for budget in (None, 0.3, np.linspace(0.1, 1.0, len(lengths))):
            output = engine.forward(tokens, budget=budget)
            answers.append((output.logits.tobytes(), output.gates.tobytes(), output.wanted.tobytes()))
    assert len(set(answers)) == 3
    assert answers[:3] * 5 == answers


# -------------------------------------------------------------------------------------- what was not chosen is not read


def poisoned(weights: Weights, head: int, block: int, cut: int, *, within_range: bool) -> Weights:
    """One head's and one block's weights of every layer made NaN, or with `within_range` wild.

    int8 has one scale for each output channel, from the largest weight in it. Columns of the output projection and of
    the second feed-forward matrix share their channels with all other heads and blocks, so there the poison keeps to
    plus and minus that largest weight; beyond it, or below, the scale that all others are rounded with would change.
    Rows of the first matrices are channels of their own.
    """
    e, rng = weights.encoder, np.random.default_rng(9)
    size, neurons = e.head_size, e.intermediate_size // cut
    tensors = dict(weights.tensors)

    def fill(name: str, rows: slice, columns: slice | None = None) -> None:
        tensor = tensors[name] = tensors[name].copy()
        if columns is None:
            tensor[rows] = 1e4 if within_range else np.nan
        elif within_range:
            most = np.abs(tensor).max(axis=1, keepdims=True)
            tensor[:, columns] = most * rng.choice([-1.0, 1.0], tensor[:, columns].shape)
        else:
            tensor[:, columns] = np.nan

    for i in range(e.num_layers):
        at = f"layers.{i}."
        own = slice(head * size, (head + 1) * size)
        for matrix in range(3):
            rows = slice(matrix * e.hidden_size + own.start, matrix * e.hidden_size + own.stop)
            fill(f"{at}attention.in_proj_weight", rows)
            fill(f"{at}attention.in_proj_bias", rows)
        fill(f"{at}attention.out_proj.weight", slice(None), own)
        if cut > 1:
            own = slice(block * neurons, (block + 1) * neurons)
            fill(f"{at}feed_forward.up.weight", own)
            fill(f"{at}feed_forward.up.bias", own)
            fill(f"{at}feed_forward.down.weight", slice(None), own)
    return replace(weights, tensors=tensors)


@pytest.mark.parametrize(("path", "dtype"), [*COMPUTED, ("torch", "fp32"), ("torch", "bf16")])
@pytest.mark.parametrize("head", [0, 2, 4])
def test_what_was_not_chosen_changes_nothing(path, dtype, head):
    """NaN in a head and in a block that no input chose: not one bit of an answer differs. (int8: see `poisoned`.)"""
    from budgetformer.engine.torch_path import TorchPath

    clean, block = long_model(0), head // 2
    wild = poisoned(clean, head, block, 3, within_range=dtype == "int8")
    batch = random_batch(clean, [12, 1, 70, 33])
    rng = np.random.default_rng(2)
    gates = (rng.random((4, 2, 5)) < 0.6).astype(np.uint8)
    blocks = (rng.random((4, 2, 3)) < 0.6).astype(np.uint8)
    gates[:, :, head], blocks[:, :, block] = 0, 0
    if path == "torch":
        before, after = (TorchPath(weights, dtype) for weights in (clean, wild))
    else:
        before, after = (loaded(weights, dtype, path, 2) for weights in (clean, wild))
    options: dict[str, Any] = dict(gates=gates, blocks=blocks, need_hidden=True)
    expected, found = (each.run(batch, **options) for each in (before, after))
    for i in range(4):
        assert_same_bits(part_of(found, batch, i), part_of(expected, batch, i), f"for input {i}")
    # The poison works: chosen by one input, it spoils that one's answer and no other.
    gates[1, 1, head] = 1
    expected, found = (each.run(batch, **options) for each in (before, after))
    assert not np.allclose(found.logits[1], expected.logits[1], atol=0.1)
    for i in (0, 2, 3):
        assert_same_bits(part_of(found, batch, i), part_of(expected, batch, i), f"for input {i}")


# ------------------------------------------------------------------------------ numbers of fewer bits, and a real model


@pytest.mark.parametrize("norm", NORMS)
def test_int8_gives_the_same_whole_numbers_on_every_path(norm):
    """Products of int8 are whole numbers, so paths differ by fp32's rounding alone: logits to 1e-5 of each other.

    Not all of them: a number between two steps may be rounded up by one path and down by the next, and is then a step
    apart, as int8 is from fp32. Attention itself runs in bf16 where the processor has it, and gives other numbers.
    """
    weights = random_weights(11, norm=norm, hidden_size=40, num_heads=5, intermediate_size=96)
    batch = random_batch(weights, list(range(1, 32)) * 2)
    gates = (np.random.default_rng(0).random((len(batch), 3, 5)) < 0.6).astype(np.uint8)
    alike = [path for path in NATIVE if path != "avx512_bf16"]
    if len(alike) < 2:
        pytest.skip("needs two compiled paths")
    first, *others = (loaded(weights, "int8", path).run(batch, gates=gates).logits for path in alike)
    step = np.abs(first - loaded(weights, "fp32", alike[0]).run(batch, gates=gates).logits).max()
    assert step > 1e-3
    for path, other in zip(alike[1:], others, strict=True):
        apart = np.abs(other - first).max(1)
        assert np.quantile(apart, 0.8) <= FP32, path
        assert apart.max() <= step, path


TEXTS = 40  # of the demo's questions


@pytest.fixture(scope="module")
def real(minilm, tmp_path_factory):
    """The folder of MiniLM with a random classifier and routers that choose by input."""
    import torch
    from transformers import AutoTokenizer

    import budgetformer
    from budgetformer.config import BudgetConfig
    from core_helpers import stir

    folder = tmp_path_factory.mktemp("real")
    torch.manual_seed(0)
    model: Any = budgetformer.from_pretrained_encoder(minilm, labels=7, budget=BudgetConfig(target=0.5))
    stir(model)
    torch.nn.init.normal_(model.classifier.out.weight, std=0.05)
    model.budgetformer.encoder.profile.uniform_(0.3, 0.8)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(real) -> Packed:
    """Sentences of bank customers; the test is skipped where the demo's data is not installed."""
    from budgetformer.data import load_split
    from budgetformer.errors import UsageError
    from budgetformer.tokens import tokenise

    try:
        texts = load_split("demo", "test").texts[::75][:TEXTS]
    except UsageError as error:
        pytest.skip(str(error))
    tokens = tokenise(Engine.load(real).tokenizer, [text or "" for text in texts], max_length=128)
    return Packed.of(tokens)


@pytest.fixture(scope="module")
def real_weights(real) -> Weights:
    from budgetformer.engine.weights import read_weights

    return read_weights(real)


def equal_on_the_real_model(weights: Weights, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    batch = random_batch(weights, lengths, types=False)
    shares = rng.uniform(0.05, 1.0, len(batch))
    counts = allocate(shares, weights.tensors["profile"], 12, 1)
    wholes = [i for i, length in enumerate(lengths) if length > 1]
    learned, named = [], []
    for i in range(len(batch)):  # alone: padded to 512, the short ones would cost as much as the long one
        one = part(batch, [i])
        learned.append(training_path(weights, one))
        named.append(training_path(weights, one, budget=shares[i : i + 1]))
    for name, path in fp32_paths(weights).items():
        for theirs, options in ((learned, {}), (named, {"counts": counts})):
            ours = path.run(batch, **options)
            np.testing.assert_array_equal(ours.gates, np.concatenate([one.gates for one in theirs]), name)
            expected = np.concatenate([one.logits for one in theirs])
            np.testing.assert_allclose(ours.logits, expected, rtol=0, atol=FP32, err_msg=name)
    assert len(np.unique(np.concatenate([learned[i].gates for i in wholes]), axis=0)) > 1


def test_the_real_model_equals_the_training_path(real_weights):
    """MiniLM, inputs of 1 to 300 tokens, among them those around a panel: same heads, logits to 1e-5."""
    equal_on_the_real_model(real_weights, [1, 2, 3, 13, 31, 32, 33, 64, 300])


@pytest.mark.slow
def test_the_real_model_equals_the_training_path_at_every_length(real_weights):
    """MiniLM, 1 to 512 tokens."""
    equal_on_the_real_model(real_weights, [*range(1, 512, 12), 510, 511, 512])


def errors(logits: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """The largest error, and the root of the mean square."""
    return float(np.abs(logits - exact).max()), float(np.sqrt(((logits - exact) ** 2).mean()))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_bf16_is_as_near_as_torch_is(real_weights, questions, share):
    """Our error to fp32 is at most twice that of torch's own mixed precision, with the heads that fp32 chooses."""
    import torch

    ours = [path for path in NATIVE if (path, "bf16") in COMPUTED]
    if not ours:
        pytest.skip("no path here computes in bf16")
    gates, exact = fixed_heads(real_weights, questions, share)
    with torch.autocast("cpu", torch.bfloat16):
        largest, typical = errors(training_path(real_weights, questions, gates=gates).logits, exact)
    assert largest > 100 * FP32
    for path in ours:
        found = errors(loaded(real_weights, "bf16", path).run(questions, gates=gates.astype(np.uint8)).logits, exact)
        assert found[0] <= 2 * largest, path
        assert found[1] <= 1.25 * typical, path


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_int8_is_as_near_as_torch_is(real_weights, questions, share, monkeypatch):
    """Our error to fp32 is at most twice that of torch's dynamic quantisation, with the heads that fp32 chooses.

    Computed by hand, as torch.ao.quantization is on its way out: weights by output channel, activations by batch, with
    all 256 steps. (torch's own kernels use 128 of them, to be safe from overflow: twice the error of this.)
    """
    import torch

    if not NATIVE:
        pytest.skip("needs the compiled library: make native")
    gates, exact = fixed_heads(real_weights, questions, share)
    model = hf_model(real_weights)
    large = ("in_proj_weight", "out_proj.weight", "up.weight", "down.weight")
    quantised = {id(tensor) for name, tensor in model.named_parameters() if name.endswith(large)}
    plain = torch.nn.functional.linear
    calls = 0

    def linear(x, weight, bias=None):
        nonlocal calls
        if id(weight) not in quantised:
            return plain(x, weight, bias)
        calls += 1
        low, high = min(float(x.detach().min()), 0.0), max(float(x.detach().max()), 0.0)
        step = (high - low) / 255
        zero = round(-low / step)
        x = (((x / step).round() + zero).clamp(0, 255) - zero) * step
        scale = weight.abs().amax(1, keepdim=True) / 127
        return plain(x, (weight / scale).round() * scale, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    largest, typical = errors(training_path(real_weights, questions, gates=gates, learning=True).logits, exact)
    assert calls == 4 * real_weights.encoder.num_layers
    monkeypatch.undo()
    for path in NATIVE:
        found = errors(loaded(real_weights, "int8", path).run(questions, gates=gates.astype(np.uint8)).logits, exact)
        assert found[0] <= 2 * largest, path
        assert found[1] <= 1.25 * typical, path


def fixed_heads(weights: Weights, batch: Packed, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The heads that fp32 chooses at a budget, float32 (batch, layer, head), and its logits with them."""
    theirs = training_path(weights, batch, budget=share)
    return theirs.gates.astype(np.float32), theirs.logits
