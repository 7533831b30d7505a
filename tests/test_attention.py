"""A drop-in for nn.MultiheadAttention whose two paths both equal the reference, head by head."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from budgetformer import flops, reference
from budgetformer.attention import BudgetedMultiheadAttention
from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.errors import UsageError
from core_helpers import counted, poison, stir

N, L, S, H, D = 3, 11, 13, 7, 5
E = H * D
EXACT = dict(rtol=0.0, atol=1e-11)  # float64: only the order of additions differs

WORDS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    {"kdim": 17, "vdim": 19},
    {"kdim": 17, "add_bias_kv": True},
    {"vdim": 19, "bias": False, "add_zero_attn": True},
]


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def twins(**words):
    """nn.MultiheadAttention and ours with its weights; biases are not left at 0."""
    theirs = nn.MultiheadAttention(E, H, dtype=torch.float64, **words).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.4)
    ours = BudgetedMultiheadAttention(E, H, dtype=torch.float64, **words).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def budgeted(**words):
    """Ours, with routers that differ from input to input."""
    made = stir(twins(batch_first=True, **words)[1])
    assert isinstance(made, BudgetedMultiheadAttention)
    return made


def mixed_gates():
    """Every kind of row: some heads, one head, all heads."""
    return torch.tensor([[1, 0, 0, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.float64)


def padding(length=S):
    """True = padding, as nn.MultiheadAttention says it."""
    drop = torch.zeros(N, length, dtype=torch.bool)
    drop[0, 9:] = True
    drop[2, 4:] = True
    return drop


def seen(length=L, keys=S, kind="bool", per_head=False):
    """A random mask over (query, key), or one for each input and head; each query sees the first key."""
    hide = torch.rand(*((N * H,) if per_head else ()), length, keys) < 0.3
    hide[..., 0] = False
    return hide if kind == "bool" else random(*hide.shape).masked_fill(hide, -torch.inf)


def inputs(words, *, itself=False):
    """query, key, value in the layout that the words ask for."""
    shape_k, shape_v = words.get("kdim", E), words.get("vdim", E)
    query = random(N, L, E)
    made = (query, query, query) if itself else (query, random(N, S, shape_k), random(N, S, shape_v))
    if words.get("batch_first"):
        return made
    query = query.transpose(0, 1)
    return (query, query, query) if itself else (query, made[1].transpose(0, 1), made[2].transpose(0, 1))


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], **EXACT)
    assert (found[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        torch.testing.assert_close(found[1], expected[1], **EXACT)


# ---------------------------------------------------------------- all heads on == nn.MultiheadAttention


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("learning", [True, False], ids=["grad", "no_grad"])
def test_drop_in_for_cross_attention(words, batch_first, learning):
    theirs, ours = twins(batch_first=batch_first, **words)
    given = inputs({**words, "batch_first": batch_first})
    masks = [
        {},
        {"key_padding_mask": padding(), "attn_mask": seen()},
        {"key_padding_mask": torch.zeros(N, S).double().masked_fill(padding(), -torch.inf)},
        {"attn_mask": seen(kind="float", per_head=True)},
        {"attn_mask": seen(kind="bool", per_head=True), "average_attn_weights": False},
        {"attn_mask": seen(kind="float"), "need_weights": False},
    ]
    with torch.set_grad_enabled(learning):
        for options in masks:
            assert_same(ours(*given, **options), theirs(*given, **options))


@pytest.mark.parametrize("words", [w for w in WORDS if "kdim" not in w and "vdim" not in w], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_drop_in_for_self_attention(words, batch_first):
    theirs, ours = twins(batch_first=batch_first, **words)
    given = inputs({"batch_first": batch_first}, itself=True)
    for options in ({}, {"key_padding_mask": padding(L)}, {"attn_mask": seen(L, L), "average_attn_weights": False}):
        assert_same(ours(*given, **options), theirs(*given, **options))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("itself", [True, False])
def test_drop_in_without_a_batch(batch_first, itself):
    theirs, ours = twins(batch_first=batch_first)
    query = random(L, E)
    key = query if itself else random(S, E)
    drop = padding(len(key))[0]
    for options in ({}, {"key_padding_mask": drop}, {"attn_mask": seen(L, len(key)), "need_weights": False}):
        assert_same(ours(query, key, key, **options), theirs(query, key, key, **options))


def test_drop_in_with_a_causal_mask():
    theirs, ours = twins(batch_first=True)
    x = random(N, L, E)
    mask = torch.ones(L, L).triu(1).bool()
    options = {"attn_mask": mask, "is_causal": True, "need_weights": False}
    assert_same(ours(x, x, x, **options), theirs(x, x, x, **options))


def test_a_state_dict_of_nn_multiheadattention_loads_and_routers_keep_their_start():
    theirs, ours = twins()
    before = {k: v.clone() for k, v in ours.router.state_dict().items()}
    assert not ours.load_state_dict(theirs.state_dict()).missing_keys
    assert all(torch.equal(v, before[k]) for k, v in ours.router.state_dict().items())
    assert set(theirs.state_dict()) < set(ours.state_dict())
    stir(ours)
    again = BudgetedMultiheadAttention(E, H, dtype=torch.float64)
    again.load_state_dict(ours.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), ours.state_dict().values(), strict=True))


def test_a_router_that_is_partly_missing_is_an_error():
    _, ours = twins()
    state = ours.state_dict()
    del state["router.scorer.weight"]
    with pytest.raises(RuntimeError, match=r"router\.scorer\.weight"):
        ours.load_state_dict(state)


# ---------------------------------------------------------------- both paths == reference


def reference_of(ours, query, key, value, gates, **masks):
    if ours.packed:
        weights = ours.in_proj_weight.chunk(3)
    else:
        weights = (ours.q_proj_weight, ours.k_proj_weight, ours.v_proj_weight)
    biases = (None, None, None) if ours.in_proj_bias is None else ours.in_proj_bias.chunk(3)
    names = [f"weight_{n}" for n in "qkv"] + [f"bias_{n}" for n in "qkv"]
    return reference.attention(
        query,
        key,
        value,
        gates=gates,
        weight_o=ours.out_proj.weight,
        bias_o=ours.out_proj.bias,
        **dict(zip(names, (*weights, *biases), strict=True)),
        **masks,
    )


@pytest.mark.parametrize("path", ["masked", "dispatch"])
@pytest.mark.parametrize("words", [{}, {"bias": False}, {"kdim": 17, "vdim": 19}], ids=str)
@pytest.mark.parametrize("masked_by", ["nothing", "keep", "keep and bias"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_both_paths_equal_the_reference(path, words, masked_by, need_weights, monkeypatch):
    monkeypatch.setattr("budgetformer.attention.may_skip", lambda gates, explore: path == "dispatch")
    ours = budgeted(**words)
    query, key, value = inputs({**words, "batch_first": True})
    masks = {}
    if masked_by != "nothing":
        masks["keep"] = ~padding()
    if masked_by == "keep and bias":
        masks["bias"] = seen(kind="float", per_head=True).view(N, H, L, S)
    gates = mixed_gates()
    gates[0, 3] = 0.5  # a caller may scale a head, too
    expected = reference_of(ours, query, key, value, gates, **masks)
    options = {"gates": gates, "need_weights": need_weights, "query_keep": torch.ones(N, L, dtype=torch.bool)}
    if masks:
        drop = None if "keep" not in masks else ~masks["keep"]
        bias = None if "bias" not in masks else masks["bias"].reshape(N * H, L, S)
        options["mask"] = ours._door(query, key, drop, bias)
    with torch.set_grad_enabled(path == "masked"):
        done = ours.attend(query, key, value, **options)
    torch.testing.assert_close(done.output, expected, **EXACT)
    if need_weights:
        rows = done.weights.sum(-1)
        torch.testing.assert_close(rows, (gates != 0).double()[..., None].expand_as(rows), **EXACT)


@pytest.mark.parametrize("words", [w for w in WORDS if "kdim" not in w and "vdim" not in w], ids=str)
def test_both_paths_choose_and_compute_the_same(words, monkeypatch):
    """What the reference has no words for (extra keys), and the routing itself: mixed budgets in one batch."""
    ours = budgeted(**words)
    x = random(N, L, E)
    budget = torch.tensor([1 / H, 3 / H, 1.0])
    for options in ({"budget": budget}, {"budget": 2 / H}, {}):
        with monkeypatch.context() as patch:
            patch.setattr("budgetformer.attention.may_skip", lambda gates, explore: False)
            masked = ours.attend(x, keep=~padding(L), need_weights=True, **options)
        with torch.no_grad():
            dispatched = ours.attend(x, keep=~padding(L), need_weights=True, **options)
        assert torch.equal(masked.routing.chosen, dispatched.routing.chosen)
        torch.testing.assert_close(masked.output, dispatched.output, **EXACT)
        torch.testing.assert_close(masked.weights, dispatched.weights, **EXACT)
        if "budget" in options and options["budget"] is budget:
            assert masked.routing.chosen.sum(-1).tolist() == [1, 3, 7]
        expected_rows = masked.routing.chosen.double()[..., None].expand(N, H, L)
        torch.testing.assert_close(masked.weights.sum(-1), expected_rows, **EXACT)


def test_a_cross_attention_with_budgets_equals_the_reference():
    ours = budgeted()
    query, key, value = inputs({"batch_first": True})
    budget = torch.tensor([1 / H, 3 / H, 5 / H])
    with torch.no_grad():
        done = ours.attend(query, key, value, budget=budget)
        output, weights = ours(query, key, value, budget=budget)
    expected = reference_of(ours, query, key, value, done.routing.chosen.double())
    torch.testing.assert_close(output, expected, **EXACT)
    assert done.routing.chosen.sum(-1).tolist() == [1, 3, 5]
    # Averaged weights are the mean over the heads that ran, so every row still adds up to 1.
    torch.testing.assert_close(weights.sum(-1), torch.ones(N, L).double(), **EXACT)


def test_attention_by_hand():
    """One head of width 1, W_Q = W_K = W_V = 1 and W_O = 2, over the tokens 0 and sqrt(3): softmax(q * k)."""
    ours = BudgetedMultiheadAttention(1, 1, bias=False, batch_first=True, dtype=torch.float64).eval()
    with torch.no_grad():
        ours.in_proj_weight.fill_(1.0)
        ours.out_proj.weight.fill_(2.0)
    a = 3.0**0.5
    x = torch.tensor([[[0.0], [a]]], dtype=torch.float64)
    output, weights = ours(x, x, x)
    share = torch.e**3 / (1 + torch.e**3)  # scores of the second token: a * 0 and a * a = 3
    torch.testing.assert_close(output[0, :, 0], torch.tensor([a, 2 * a * share], dtype=torch.float64), **EXACT)
    expected = torch.tensor([[0.5, 0.5], [1 - share, share]], dtype=torch.float64)
    torch.testing.assert_close(weights[0], expected, **EXACT)


def test_no_head_at_all_leaves_the_output_bias():
    _, ours = twins(batch_first=True, add_zero_attn=True)
    x = random(N, L, E)
    none = torch.zeros(N, H, dtype=torch.float64)
    with torch.no_grad():
        dispatched = ours.attend(x, gates=none, need_weights=True)
    masked = ours.attend(x, gates=none, need_weights=True)
    torch.testing.assert_close(dispatched.output, ours.out_proj.bias.expand(N, L, E), **EXACT)
    torch.testing.assert_close(masked.output, dispatched.output, **EXACT)
    assert dispatched.weights.shape == masked.weights.shape == (N, H, L, L + 1)
    assert not dispatched.weights.any()


def test_an_input_of_padding_alone_answers_without_nan():
    ours = budgeted()
    x = random(N, L, E)
    drop = padding(L)
    drop[1] = True
    for need_weights in (False, True):
        for learning in (False, True):
            with torch.set_grad_enabled(learning):
                output, _ = ours(x, x, x, key_padding_mask=drop, need_weights=need_weights, budget=3 / H)
            assert output.isfinite().all()


# ---------------------------------------------------------------- skipped is not computed


@pytest.mark.parametrize("head", range(H))
def test_nan_in_an_unselected_head_does_no_harm(head):
    ours = budgeted()
    x = random(N, L, E)
    gates = mixed_gates()
    gates[:, head] = 0
    with torch.no_grad():
        before = ours.attend(x, gates=gates, keep=~padding(L)).output
        poison(ours, head)
        after = ours.attend(x, gates=gates, keep=~padding(L)).output
        assert torch.equal(before, after)
        gates[1, head] = 1  # the poison is real: who chooses the head has it, the others still do not
        chosen = ours.attend(x, gates=gates, keep=~padding(L)).output
    assert chosen[1].isnan().all()
    torch.testing.assert_close(chosen[[0, 2]], before[[0, 2]], **EXACT)


@pytest.mark.parametrize("tokens", [1, 11, 29])
@pytest.mark.parametrize("need_weights", [False, True])
def test_counted_flops_fall_with_the_budget_and_equal_the_formula(tokens, need_weights):
    ours = budgeted().float()
    sizes = EncoderConfig(hidden_size=E, num_heads=H, num_layers=1)
    x = torch.randn(1, tokens, E)
    totals = []
    for heads in range(1, H + 1):
        total = counted(lambda heads=heads: ours(x, x, x, need_weights=need_weights, budget=heads / H))
        expected = flops.head(torch.tensor([tokens]), sizes) * heads + flops.router(sizes, ours.budget_config)
        assert total == int(expected)
        totals.append(total)
    assert totals == sorted(set(totals))


def test_counted_flops_of_a_batch_are_the_sum_of_its_inputs():
    ours = budgeted().float()
    x = torch.randn(N, L, E)
    sizes = EncoderConfig(hidden_size=E, num_heads=H, num_layers=1)
    total = counted(lambda: ours.attend(x, gates=mixed_gates()))
    assert total == int(flops.head(torch.tensor([L]), sizes) * mixed_gates().sum())


# ---------------------------------------------------------------- routers and masks


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_does_not_reach_the_router(batch_first, kind):
    ours = stir(twins(batch_first=batch_first)[1])
    x = random(N, L, E)
    other = torch.where(padding(L)[..., None], 100 * random(N, L, E), x)
    mask = padding(L) if kind == "bool" else torch.zeros(N, L).double().masked_fill(padding(L), -torch.inf)
    outputs = []
    for tokens in (x, other):
        tokens = tokens if batch_first else tokens.transpose(0, 1)
        output, weights = ours(tokens, tokens, tokens, key_padding_mask=mask, average_attn_weights=False)
        outputs.append((output if batch_first else output.transpose(0, 1), weights.any(-1).any(-1)))
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert 0 < int(outputs[0][1].sum()) < N * H
    torch.testing.assert_close(outputs[0][0][~padding(L)], outputs[1][0][~padding(L)], **EXACT)


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_does_not_reach_the_router_without_a_batch(batch_first):
    ours = stir(twins(batch_first=batch_first)[1])
    x, drop = random(L, E), padding(L)[2]
    other = torch.where(drop[:, None], 100 * random(L, E), x)
    heads = [ours(t, t, t, key_padding_mask=drop, average_attn_weights=False)[1].any(-1).any(-1) for t in (x, other)]
    assert torch.equal(heads[0], heads[1])
    assert 0 < int(heads[0].sum()) < H


def test_inputs_of_a_batch_do_not_touch_each_other():
    ours = budgeted()
    x = random(N, L, E)
    budget = torch.tensor([1 / H, 4 / H, 6 / H])
    with torch.no_grad():
        together, _ = ours(x, x, x, key_padding_mask=padding(L), budget=budget)
        for i in range(N):
            one, drop = x[i : i + 1], padding(L)[i : i + 1]
            alone, _ = ours(one, one, one, key_padding_mask=drop, budget=budget[i : i + 1])
            torch.testing.assert_close(together[i : i + 1], alone, **EXACT)


def test_gradients_of_the_masked_path_numerically():
    ours = BudgetedMultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    x = random(2, 3, 6).requires_grad_()
    gates = torch.tensor([[1.0, 0.0, 1.0], [0.3, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    run = lambda x, gates: ours.attend(x, gates=gates).output  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, gates))


def test_dropout_is_for_training_only():
    words = dict(embed_dim=E, num_heads=H, dropout=0.5, batch_first=True)
    ours = BudgetedMultiheadAttention(**words)  # pyright: ignore[reportArgumentType]
    x = torch.randn(N, L, E)
    for need_weights in (False, True):
        run = lambda need_weights=need_weights: ours(x, x, x, need_weights=need_weights, budget=1.0)[0]  # noqa: E731
        ours.train()
        assert not torch.equal(run(), run())
        ours.eval()
        assert torch.equal(run(), run())


# ---------------------------------------------------------------- inside torch's own layers


def encoder_layer(norm_first=False):
    """A layer of torch's with our attention in it. Six heads: torch's fused layer does not take an odd number."""
    options = dict(dim_feedforward=17, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    layer = nn.TransformerEncoderLayer(30, 6, **options).eval()  # pyright: ignore[reportArgumentType]
    layer.self_attn = stir(BudgetedMultiheadAttention(30, 6, batch_first=True, dtype=torch.float64).eval())  # pyright: ignore
    return layer


def watched(layer):
    """What the router of a layer chooses from now on. Not by a hook: with hooks about, torch does not fuse."""
    calls, route = [], layer.self_attn.router.forward

    def watch(*args, **options):
        calls.append(route(*args, **options).chosen)
        return route(*args, **options)

    layer.self_attn.router.forward = watch
    return calls


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_fused_layer_does_not_bypass_the_router(norm_first):
    layer = encoder_layer(norm_first)
    calls, x = watched(layer), random(N, L, 30)
    learning = layer(x, src_key_padding_mask=padding(L))
    with torch.no_grad():
        fast = layer(x, src_key_padding_mask=padding(L))
        assert len(calls) == 2
        layer.self_attn._qkv_same_embed_dim = True
        bypassed = layer(x, src_key_padding_mask=padding(L))
    assert len(calls) == 2, "torch fuses this layer as soon as it is let"
    assert not calls[1].all()
    assert torch.equal(calls[0], calls[1])
    torch.testing.assert_close(fast[~padding(L)], learning[~padding(L)], **EXACT)
    assert not torch.allclose(fast[~padding(L)], bypassed[~padding(L)])


def test_inside_torchs_encoder():
    """It copies its layers deeply; the copies must route as well."""
    encoder = nn.TransformerEncoder(encoder_layer(), num_layers=2, enable_nested_tensor=False).eval()
    calls = [watched(layer) for layer in encoder.layers]
    x = random(N, L, 30)
    with torch.no_grad():
        output = encoder(x, src_key_padding_mask=padding(L))
        assert [len(seen) for seen in calls] == [1, 1]
        for i, length in enumerate([9, L, 4]):
            alone = encoder(x[i : i + 1, :length])
            torch.testing.assert_close(output[i : i + 1, :length], alone, **EXACT)


# ---------------------------------------------------------------- clear errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_causal": True}, "pass attn_mask"),
        ({"attn_mask": torch.zeros(L, S + 1)}, r"it must be \(11, 13\) or \(21, 11, 13\)"),
        ({"attn_mask": torch.zeros(N, L, S)}, r"it must be \(11, 13\) or \(21, 11, 13\)"),
        ({"key_padding_mask": torch.zeros(N, L, dtype=torch.bool)}, r"it must be \(3, 13\)"),
        ({"budget": 0.0}, r"must lie in \(0, 1\]"),
        ({"budget": 1.5}, r"must lie in \(0, 1\]"),
        ({"budget": float("nan")}, r"must lie in \(0, 1\]"),
        ({"budget": torch.tensor([0.5, 0.5])}, "one for each of 3"),
        ({"budget": torch.full((N, 2), 0.5)}, "one for each of 3"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(options, words):
    ours = budgeted()
    with pytest.raises(UsageError, match=words):
        ours(random(N, L, E), *[random(N, S, E)] * 2, **options)


def test_wrong_shapes_say_what_is_wrong():
    ours = budgeted()
    with pytest.raises(AssertionError, match="embedding dimension of 35, but got 34"):
        ours(*[random(N, L, E - 1)] * 3)
    with pytest.raises(AssertionError, match="2-D"):
        ours(random(N, L, E), random(L, E), random(L, E))
    with pytest.raises(AssertionError, match="4-D"):
        ours(*[random(1, N, L, E)] * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nested tensors are a prototype
        nested = torch.nested.nested_tensor([random(3, E), random(5, E)])
    with pytest.raises(UsageError, match="nested tensors"):
        ours(nested, nested, nested)


@pytest.mark.parametrize(("width", "heads"), [(35, 6), (0, 1), (35, 0), (-7, 7)])
def test_heads_must_divide_the_width(width, heads):
    with pytest.raises(UsageError, match="must divide the width"):
        BudgetedMultiheadAttention(width, heads)


@pytest.mark.parametrize(("min_units", "budget"), list(itertools.product([0, 1, 2], [0.01, 0.2, 1.0])))
def test_a_named_budget_keeps_min_units(min_units, budget):
    ours = BudgetedMultiheadAttention(E, H, batch_first=True, budget_config=BudgetConfig(min_units=min_units)).eval()
    x = torch.randn(N, L, E)
    with torch.no_grad():
        chosen = ours.attend(x, budget=budget).routing.chosen
    assert chosen.sum(-1).tolist() == [max(min_units, int(budget * H + 0.5))] * N
