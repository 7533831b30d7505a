"""What a gate closes is not computed in training either, and no other gradient changes."""

import pytest
import torch

from budgetformer import attention, flops
from budgetformer.attention import BudgetedMultiheadAttention
from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.encoder import FeedForward
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.router import Router
from budgetformer.skipping import may_skip, plan
from core_helpers import flop_counter, hf_config, ids_and_keep, move_padding, poison, shake, stir

N, L, S, H, D = 5, 11, 13, 7, 3
E = H * D
BLOCKS, INNER = 5, 160
BOTH = BudgetConfig(target=0.4, scope="heads+blocks", ffn_blocks=BLOCKS)
LENGTHS = [11, 5, 1, 8, 7]


def mixed(units):
    """A unit that all inputs chose, one that nobody did, one that most did; an input that chose the rest."""
    gates = (torch.rand(N, units) < 0.4).float()
    gates[3] = 1
    gates[:, 0], gates[:, 1], gates[:, 2] = 1, 0, torch.tensor([1, 1, 0, 1, 1])
    return gates


def detached(gates):
    """The same gates; the closed ones get no gradient."""
    return torch.where(gates != 0, gates, gates.detach())


def feed_forward(**changes):
    sizes = {"hidden_size": E, "num_heads": H, "intermediate_size": INNER, **changes}
    return shake(FeedForward(EncoderConfig(**sizes), BOTH))


def masked_blocks(layer, x, gates):
    return layer.down(layer._gated(layer.up(x), detached(gates)))


def heads(**words):
    return shake(BudgetedMultiheadAttention(E, H, batch_first=True, **words))


def masked_heads(ours, products, mask, gates, need_weights=False):
    return ours._masked(products, mask, detached(gates), need_weights)


def gradients(run, module, gates, *inputs):
    """By name: what comes out, and the gradients of gates, inputs and weights along one direction of the output."""
    gates, inputs = gates.clone().requires_grad_(), [x.clone().requires_grad_() for x in inputs]
    output = run(gates, *inputs).float()
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    weights = {name: p for name, p in module.named_parameters() if "router" not in name}
    asked = {"gates": gates, **{f"input {i}": x for i, x in enumerate(inputs)}, **weights}
    found = torch.autograd.grad((output * direction).sum(), list(asked.values()))
    return {"output": output.detach(), **dict(zip(asked, found, strict=True))}


def assert_same(found, expected, close=1e-5):
    """Equal up to `close` of the largest entry: in fp32 only the order of additions differs."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= close * value.abs().max().clamp_min(1.0), name


# ---------------------------------------------------------------- the rule, and the plan


def test_what_most_inputs_chose_runs_over_all_and_the_rest_in_pairs():
    todo = plan(torch.tensor([[1, 0, 0, 1], [1, 0, 1, 1], [1, 0, 0, 1], [0, 0, 1, 1.0]]))
    assert todo.common == [0, 3]  # three of four, four of four
    assert todo.unit.tolist() == [2, 2]
    assert todo.row.tolist() == [1, 3]
    assert todo.counts == [0, 0, 2, 0]
    assert todo.in_pairs
    assert not plan(torch.ones(2, 3)).in_pairs
    assert plan(torch.zeros(2, 3)).in_pairs, "so that weights have a gradient, of 0"


def test_units_run_while_somebody_learns_from_what_they_would_say(curious, settled):
    learned, fixed = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
    assert not may_skip(learned, curious)
    assert may_skip(learned, settled)
    assert not may_skip(learned, None), "a caller may want the gradient of gates of its own"
    for explore in (curious, settled, None):
        assert may_skip(fixed, explore)
        with torch.no_grad():
            assert may_skip(learned, explore)


# ---------------------------------------------------------------- gradients == the masked path's


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_gradients_of_blocks_equal_the_masked_paths(activation):
    layer, gates, x = feed_forward(activation=activation), mixed(BLOCKS), torch.randn(N, L, E)
    found = gradients(lambda gates, x: layer._skipping(x, gates), layer, gates, x)
    assert_same(found, gradients(lambda gates, x: masked_blocks(layer, x, gates), layer, gates, x))
    assert not found["gates"][gates == 0].any()
    assert found["gates"][gates != 0].all()


@pytest.mark.parametrize(
    "words", [{}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 17, "vdim": 19}], ids=str
)
@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_gradients_of_heads_equal_the_masked_paths(words, itself, need_weights, per_head):
    if itself and "kdim" in words:
        pytest.skip("one input is not of three widths")
    ours, gates = heads(**words), mixed(H)
    inputs = [torch.randn(N, L, E)]
    if not itself:
        inputs += [torch.randn(N, S, words.get("kdim", E)), torch.randn(N, S, words.get("vdim", E))]
    keep = torch.arange(L if itself else S)[None] < torch.tensor([11, 5, 1, 8, 7])[:, None]
    bias = torch.randn(N, H, L, keep.shape[1]) if per_head else torch.randn(1, 1, L, keep.shape[1])
    mask = attention._Mask(keep, bias)
    seen = []

    def run(path):
        def call(gates, *inputs):
            output, weights = path(ours._products(*(inputs * 3)[:3]), mask, gates, need_weights)
            seen.append(weights)
            return output if weights is None else torch.cat([output.flatten(), weights.flatten()])

        return call

    found = gradients(run(ours._skipping), ours, gates, *inputs)
    assert_same(found, gradients(run(lambda *args: masked_heads(ours, *args)), ours, gates, *inputs))
    assert not found["gates"][gates == 0].any()
    assert found["gates"][gates != 0].all()
    assert need_weights == (seen[0] is not None)


@pytest.mark.parametrize("kind", ["heads", "blocks"])
def test_under_autocast_the_error_is_at_most_twice_the_masked_paths(kind):
    """The error of each is taken against the masked path in full precision."""
    x, gates = torch.randn(N, L, E), mixed(H if kind == "heads" else BLOCKS)
    if kind == "heads":
        module = heads()
        mask = attention._Mask(torch.arange(L)[None] < torch.tensor(LENGTHS)[:, None], None)
        paths = [
            lambda gates, x: module._skipping(module._products(x, x, x), mask, gates, False)[0],
            lambda gates, x: masked_heads(module, module._products(x, x, x), mask, gates)[0],
        ]
    else:
        module = feed_forward()
        paths = [lambda gates, x: module._skipping(x, gates), lambda gates, x: masked_blocks(module, x, gates)]
    exact = gradients(paths[1], module, gates, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert paths[0](gates, x).dtype == torch.bfloat16
        ours, theirs = (gradients(path, module, gates, x) for path in paths)
    for name, value in exact.items():
        error, theirs_error = ((found[name] - value).norm() for found in (ours, theirs))
        assert 0 < error <= 2 * theirs_error, name


@pytest.mark.parametrize("kind", ["heads", "blocks"])
def test_weights_that_nobody_chose_have_a_gradient_of_zero(kind):
    """Not none: processes that average their gradients would wait for it."""
    module, units = (heads(), H) if kind == "heads" else (feed_forward(), BLOCKS)
    x, nothing = torch.randn(N, L, E), torch.zeros(N, units)
    if kind == "heads":
        output, bias = module.attend(x, gates=nothing).output, module.out_proj.bias
    else:
        output, bias = module(x, gates=nothing)[0], module.down.bias
    assert torch.equal(output, bias.expand_as(output))
    output.sum().backward()
    for name, parameter in module.named_parameters():
        if "router" not in name:
            assert bool(parameter.grad.any()) == (parameter is bias), name


@torch.no_grad()
def test_attention_dropout_has_the_same_distribution():
    """Each weight is dropped by itself with the same probability, and what stays is scaled up, on both paths."""
    ours = heads(dropout=0.25).train()
    x, gates, mask = torch.randn(N, 40, E), mixed(H), attention._Mask(None, None)
    products = ours._products(x, x, x)
    ran = (gates != 0)[:, :, None, None].expand(N, H, 40, 40)
    whole = ours.eval()._masked(products, mask, gates, True)[1][ran]
    for path in (ours._skipping, ours._masked):
        ours.train()
        weights = path(products, mask, gates, True)[1]
        assert not weights[~ran].any()
        kept = weights[ran] != 0
        assert abs(float(kept.float().mean()) - 0.75) < 0.01
        torch.testing.assert_close(weights[ran][kept], whole[kept] / 0.75)
    mean = torch.stack([ours._skipping(products, mask, gates, False)[0] for _ in range(300)]).mean(0)
    expected = ours.eval()._masked(products, mask, gates, False)[0]
    assert float((mean - expected).norm() / expected.norm()) < 0.05


# ---------------------------------------------------------------- whole models, in training


def model_of(**changes):
    torch.manual_seed(3)
    made = BudgetFormerForSequenceClassification(hf_config(BOTH, intermediate_size=INNER, **changes))
    stir(shake(made, 0.1), bias=-0.5)
    with torch.no_grad():
        for router in [module for module in made.modules() if isinstance(module, Router)]:
            router.controller[2].weight *= 0.2  # no input gets all units, none too few
    return made.train()


def step(model, ids, keep):
    """Loss, routings and gradients of one training step, at one price of the budget: each step moves it."""
    model.zero_grad()
    model.multiplier.fill_(2.0)
    model.overspent.zero_()
    out = model(ids, keep.long(), labels=torch.arange(len(ids)) % 5)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_training_step_equals_that_of_the_masked_path(norm, again, side, monkeypatch):
    model = model_of(norm=norm)
    model.progress = 0.8
    ids, keep = ids_and_keep(LENGTHS, 11)
    with monkeypatch.context() as patch:
        patch.setattr(BudgetedMultiheadAttention, "_skipping", masked_heads)
        patch.setattr(FeedForward, "_skipping", masked_blocks)
        expected, wanted = step(model, ids, keep)
    if again:
        model.activation_checkpointing_enable()
    found, got = step(model, *(move_padding(ids, keep) if side == "left" else (ids, keep)))
    assert 0.1 < float(found.gates.mean()) < 0.9
    assert torch.equal(found.gates, expected.gates)
    assert torch.equal(found.blocks, expected.blocks)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert_same(got, wanted, 2e-5)
    assert any("router" in name and gradient.any() for name, gradient in got.items())


def test_skipped_units_are_not_computed_once_exploration_is_over():
    """NaN in every weight of a head and a block that no router chooses: training neither reads nor changes them."""
    model = model_of()
    ids, keep = ids_and_keep(LENGTHS, 11)
    layers = model.budgetformer.encoder.layers
    with torch.no_grad():
        for layer in layers:
            for router, unit in ((layer.attention.router, 4), (layer.feed_forward.router, 2)):
                router.scorer.bias[unit] = -1e4
                router.controller[2].weight.zero_()
                router.controller[2].bias.zero_()  # about half of the units
    model.progress = 0.8
    clean, expected = step(model, ids, keep)
    assert not clean.gates[:, :, 4].any()
    assert not clean.blocks[:, :, 2].any()
    with torch.no_grad():
        for layer in layers:
            poison(layer.attention, 4)
            rows = slice(2 * INNER // BLOCKS, 3 * INNER // BLOCKS)
            layer.feed_forward.up.weight[rows] = torch.nan
            layer.feed_forward.up.bias[rows] = torch.nan
            layer.feed_forward.down.weight[:, rows] = torch.nan
    out, found = step(model, ids, keep)
    assert out.loss.isfinite()
    assert_same(found, expected, 1e-6)
    model.progress = 0.1
    assert step(model, ids, keep)[0].loss.isnan(), "while routers explore, every unit runs"


def test_a_training_step_costs_what_its_units_cost():
    """Forward and backward, counted by torch: three times the forward pass of the units that ran."""
    model = model_of()
    ids, keep = ids_and_keep([11] * 4, 11)
    sizes, total = model.config.encoder_config, {}
    for progress in (0.1, 0.8):
        model.progress = progress
        with flop_counter() as counter:
            out, _ = step(model, ids, keep)
        total[progress] = counter.get_total_flops()
    per_head, per_layer = flops.head(torch.tensor(11), sizes), flops.feed_forward(torch.tensor(11), sizes)
    every = 4 * 3 * (H * per_head + per_layer)
    # What at least this share of the batch chose runs over all of it.
    ran = lambda on: torch.where(on.mean(0) >= 0.7, 4.0, on.sum(0)).sum()  # noqa: E731
    some = ran(out.gates) * per_head + ran(out.blocks) * per_layer / BLOCKS
    assert some < 0.8 * every
    # torch does not count the backward pass of the attention kernel on a CPU; all the rest is in both totals.
    assert total[0.1] - total[0.8] == pytest.approx(float(3 * (every - some)), rel=0.02)
