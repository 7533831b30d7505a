"""Budgets over blocks of feed-forward neurons: the same router, estimators, losses and costs as for heads."""

import numpy as np
import pytest
import torch

from budgetformer import flops, reference
from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.encoder import Encoder, FeedForward
from budgetformer.errors import UsageError
from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.router import shares_of
from budgetformer.schedule import Schedule
from budgetformer.training.grouping import balanced_clusters, group_neurons
from budgetformer.training.importance import start_from, unit_importance

SIZES = dict(vocab_size=97, hidden_size=35, num_layers=3, num_heads=7, intermediate_size=160, max_positions=31)
BLOCKS = 5
BOTH = BudgetConfig(target=0.4, scope="heads+blocks", ffn_blocks=BLOCKS)


def encoder(budget=BOTH, **changes):
    torch.manual_seed(1)
    return Encoder(EncoderConfig(**{**SIZES, **changes}), budget).double().eval()


def unsettle(model, spread=1.0):
    """Routers that want something else for every input."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".router." in name:
            with torch.no_grad():
                parameter.normal_(0, spread)


def batch(rows=4, tokens=9):
    ids = torch.randint(1, 97, (rows, tokens), generator=torch.Generator().manual_seed(3))
    keep = torch.arange(tokens)[None] < torch.tensor([tokens, 3, 1, 6])[:rows, None]
    return ids, keep


def test_equals_the_loops_of_the_reference():
    layer = encoder().layers[0].feed_forward
    x = torch.randn(4, 9, 35, dtype=torch.float64)
    gates = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.float64)
    wanted = reference.feed_forward(
        x,
        gates=gates,
        weight_in=layer.up.weight,
        bias_in=layer.up.bias,
        weight_out=layer.down.weight,
        bias_out=layer.down.bias,
        activation=layer.activation,
    )
    torch.testing.assert_close(layer(x, gates=gates)[0], wanted, rtol=0, atol=1e-12)
    with torch.no_grad():  # the path of use, block by block
        torch.testing.assert_close(layer(x, gates=gates)[0], wanted, rtol=0, atol=1e-12)


def test_a_block_that_is_off_is_not_computed():
    layer = encoder().layers[0].feed_forward
    x, gates = torch.randn(2, 4, 35, dtype=torch.float64), torch.tensor([[1.0, 0, 1, 0, 1], [0, 0, 1, 0, 0]]).double()
    with torch.no_grad():
        before, _ = layer(x, gates=gates)
        layer.up.weight[32:64] = torch.nan
        layer.down.weight[:, 96:128] = torch.nan
        after, _ = layer(x, gates=gates)
    assert torch.equal(before, after)


def test_all_on_at_first_and_equal_to_the_dense_encoder():
    both, heads = encoder(), encoder(BudgetConfig(target=0.4))
    heads.load_state_dict({k: v for k, v in both.state_dict().items() if k in heads.state_dict()}, strict=False)
    ids, keep = batch()
    with torch.no_grad():
        one, other = both(ids, keep), heads(ids, keep)
    assert len(one.block_routings) == 3
    assert all(bool(routing.chosen.all()) for routing in one.block_routings)
    torch.testing.assert_close(one.hidden[keep], other.hidden[keep], rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_use_equals_training_and_does_not_depend_on_neighbours(norm):
    model = encoder(norm=norm)
    unsettle(model)
    ids, keep = batch()
    learning = model(ids, keep)
    with torch.no_grad():
        used = model(ids, keep)
        alone = model(ids[1:2, :3], keep[1:2, :3])
    torch.testing.assert_close(used.hidden[keep], learning.hidden.detach()[keep], rtol=0, atol=1e-10)
    torch.testing.assert_close(alone.hidden[0], used.hidden[1, :3], rtol=0, atol=1e-10)
    chosen = torch.stack([routing.chosen for routing in used.block_routings])
    assert 0.1 < chosen.double().mean() < 0.9
    for one, other in zip(alone.block_routings, used.block_routings, strict=True):
        assert torch.equal(one.chosen[0], other.chosen[1])


def test_a_sublayer_may_be_skipped_whole():
    model = encoder(BudgetConfig(target=0.4, scope="heads+blocks", ffn_blocks=BLOCKS, min_units=0))
    ids, keep = batch()
    nothing = torch.zeros(4, 3, BLOCKS)
    with torch.no_grad():
        out = model(ids, keep, blocks=nothing)
        for layer in model.layers:
            layer.feed_forward.up.weight.fill_(torch.nan)
        assert torch.equal(model(ids, keep, blocks=nothing).hidden, out.hidden)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.75, 1.0])
def test_a_named_budget_is_spent_over_both_kinds(share):
    model = encoder()
    unsettle(model)
    model.profile.copy_(torch.tensor([0.8, 0.5, 0.4]))
    model.block_profile.copy_(torch.tensor([0.5, 0.3, 0.1]))
    ids, keep = batch()
    with torch.no_grad():
        out = model(ids, keep, budget=share)
    heads = torch.stack([routing.chosen for routing in out.routings], 1).sum(2)
    blocks = torch.stack([routing.chosen for routing in out.block_routings], 1).double().mean(2)
    done = flops.work(keep.sum(1), heads, model.config, model.budget, labels=2, blocks=blocks)
    ran, every = done.units(model.budget)
    one_unit = 1 / (3 * BLOCKS)  # of the dearer kind; each kind is rounded by itself
    assert ((ran / every - share).abs() <= one_unit).all()
    if share == 1.0:
        assert (ran == every).all()
    if share == 0.4:
        assert heads.double().mean() / 7 > blocks.mean(), "as training had it"


def test_shares_of_solves_its_equation():
    costs = torch.tensor([[10.0, 30.0], [40.0, 5.0]], dtype=torch.float64)
    budget = torch.tensor([0.3, 0.9], dtype=torch.float64)
    share = shares_of(budget, torch.tensor([0.6, 0.2]), costs)
    torch.testing.assert_close((share * costs).sum(1) / costs.sum(1), budget, rtol=0, atol=1e-9)
    odds = torch.logit(share[:, 0]) - torch.logit(share[:, 1])
    learned = torch.logit(torch.tensor([0.6, 0.2], dtype=torch.float64))
    torch.testing.assert_close(odds, (learned[0] - learned[1]).expand(2), rtol=0, atol=1e-6)


def model_of(**budget):
    torch.manual_seed(5)
    config = BudgetFormerConfig(
        **SIZES, dropout=0.0, num_labels=3, budget={"target": 0.4, "ffn_blocks": BLOCKS, **budget}
    )
    return BudgetFormerForSequenceClassification(config)


def test_the_loss_teaches_both_routers():
    model = model_of(scope="heads+blocks").train()
    model.progress = 0.7
    ids, keep = batch()
    out = model(ids, keep.long(), labels=torch.tensor([0, 1, 2, 0]))
    out.loss.backward()
    for layer in model.budgetformer.encoder.layers:
        for router in (layer.attention.router, layer.feed_forward.router):
            assert router.scorer.weight.grad.abs().sum() > 0
            assert router.controller[2].bias.grad.abs().sum() > 0
    assert out.blocks.shape == (4, 3, BLOCKS)


def test_round_trip_of_a_folder(tmp_path):
    model = model_of(scope="heads+blocks").eval()
    unsettle(model)
    model.save_pretrained(tmp_path)
    again = BudgetFormerForSequenceClassification.from_pretrained(tmp_path).eval()
    ids, keep = batch()
    with torch.no_grad():
        one, other = model(ids, keep.long()), again(ids, keep.long())
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.blocks, other.blocks)


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="ffn_blocks=7: 160 neurons cannot be cut"):
        model_of(scope="heads+blocks", ffn_blocks=7)
    with pytest.raises(UsageError, match="scope='blocks'"):
        BudgetConfig(scope="blocks")
    assert FeedForward(EncoderConfig(**SIZES)).router is None


def test_importance_of_blocks_starts_their_routers():
    model = model_of(scope="heads+blocks")
    from budgetformer.text import Encoded

    dice = np.random.default_rng(0)
    encoded = Encoded([{"input_ids": dice.integers(1, 97, 6).tolist(), "labels": int(i % 3)} for i in range(12)])
    heads, blocks = unit_importance(model, encoded, blocks=BLOCKS)
    assert heads.shape == (3, 7)
    assert blocks.shape == (3, BLOCKS)
    start_from(model, heads, 2.0, blocks)
    bias = model.budgetformer.encoder.layers[1].feed_forward.router.scorer.bias.detach()
    assert float(bias.std()) == pytest.approx(2.0, rel=1e-4)
    assert bias.argsort().tolist() == blocks[1].argsort().tolist()


@pytest.mark.parametrize("way", ["contiguous", "weights", "coactivation"])
def test_grouping_changes_no_answer(way):
    from budgetformer.text import Encoded

    model = model_of(scope="heads+blocks").double().eval()
    dice = np.random.default_rng(0)
    encoded = Encoded([{"input_ids": dice.integers(1, 97, n).tolist()} for n in (6, 3, 9, 4, 8)])
    ids, keep = batch()
    with torch.no_grad():
        before = model(ids, keep.long()).logits
        orders = group_neurons(model, BLOCKS, way, encoded)
        after = model(ids, keep.long()).logits
    torch.testing.assert_close(before, after, rtol=0, atol=1e-10)
    assert all(sorted(order.tolist()) == list(range(160)) for order in orders)
    if way != "contiguous":
        assert orders[0].tolist() != list(range(160))


def test_clusters_are_equal_and_found():
    dice = np.random.default_rng(1)
    centres = np.linalg.qr(dice.normal(size=(8, 8)))[0][:4]
    owner = dice.permutation(np.repeat(np.arange(4), 16))
    features = centres[owner] + 0.05 * dice.normal(size=(64, 8))
    order = balanced_clusters(features, 4, seed=3)
    found = owner[order].reshape(4, 16)
    assert (found == found[:, :1]).all(), "each run is one true cluster"


def test_flops_count_the_blocks_that_ran():
    config = EncoderConfig(**SIZES)
    explore = Schedule(budget=BOTH).settled
    assert explore.target == 0.4
    tokens, heads = torch.tensor([9]), torch.tensor([[7, 7, 7]])
    all_on = flops.work(tokens, heads, config, BOTH, labels=2)
    half = flops.work(tokens, heads, config, BOTH, labels=2, blocks=torch.tensor([[0.4, 0.4, 0.4]]))
    assert float(half.feed_forward) == pytest.approx(0.4 * float(all_on.feed_forward))
    assert float(all_on.total) == float(all_on.total_dense) + float(all_on.router)
