"""The encoder against torch's own layers; padding and neighbours change nothing; a budget is spent as it was named."""

import pytest
import torch
from torch import nn

from budgetformer.config import BudgetConfig
from budgetformer.encoder import Classifier, Encoder
from budgetformer.errors import UsageError
from core_helpers import HEADS, LAYERS, POSITIONS, encoder_config, ids_and_keep, move_padding, shake, stir

LENGTHS = [11, 5, 1, 8]


def encoder(budget=None, *, double=True, bias=0.0, **changes):
    made = stir(shake(Encoder(encoder_config(**changes), budget)), bias).eval()
    assert isinstance(made, Encoder)
    return made.double() if double else made


def torch_layer(layer, config):
    """torch's encoder layer with the weights of ours."""
    theirs = nn.TransformerEncoderLayer(
        config.hidden_size,
        config.num_heads,
        config.intermediate_size,
        dropout=0.0,
        activation=config.activation,
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=config.norm == "pre",
        dtype=torch.float64,
    )
    attention = {k: v for k, v in layer.attention.state_dict().items() if not k.startswith("router.")}
    theirs.self_attn.load_state_dict(attention)
    theirs.linear1.load_state_dict(layer.feed_forward.up.state_dict())
    theirs.linear2.load_state_dict(layer.feed_forward.down.state_dict())
    theirs.norm1.load_state_dict(layer.attention_norm.state_dict())
    theirs.norm2.load_state_dict(layer.feed_forward_norm.state_dict())
    return theirs.eval()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_all_heads_on_equals_torchs_encoder(norm, activation):
    made = encoder(norm=norm, activation=activation)
    ids, keep = ids_and_keep(LENGTHS, 11)
    x = made.embeddings(ids, keep)
    for layer in made.layers:
        x = torch_layer(layer, made.config)(x, src_key_padding_mask=~keep)
    x = x if made.norm is None else made.norm(x)
    assert (made.norm is None) == (norm == "post")
    torch.testing.assert_close(made(ids, keep, budget=1.0).hidden[keep], x[keep], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "function"), [("silu", nn.functional.silu), ("tanh", torch.tanh)])
def test_other_activations(name, function):
    made = encoder(activation=name).layers[0].feed_forward
    x = torch.randn(2, 3, 35, dtype=torch.float64)
    torch.testing.assert_close(made(x)[0], made.down(function(made.up(x))), rtol=0, atol=0)


def test_token_types_are_added():
    made = encoder()
    ids, keep = ids_and_keep([7], 7)
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    words = made.embeddings.word(ids) + made.embeddings.position(torch.arange(7)[None])
    expected = made.embeddings.norm(words + made.embeddings.token_type(types))
    torch.testing.assert_close(made.embeddings(ids, keep, types), expected)
    assert torch.equal(made.embeddings(ids, keep), made.embeddings(ids, keep, torch.zeros_like(types)))
    assert not torch.equal(made.embeddings(ids, keep), made.embeddings(ids, keep, types))


def test_an_encoder_without_token_types_takes_none():
    made = encoder(token_types=0)
    ids, keep = ids_and_keep(LENGTHS, 11)
    assert made.embeddings.token_type is None
    assert torch.equal(made(ids, keep).hidden, made(ids, keep, torch.ones_like(ids)).hidden)


def test_narrow_embeddings_are_projected():
    made = encoder(embedding_size=17)
    ids, keep = ids_and_keep(LENGTHS, 11)
    assert made.embeddings.word.weight.shape[1] == 17
    assert made(ids, keep).hidden.shape == (4, 11, 35)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("learning", [True, False], ids=["masked", "dispatch"])
def test_padding_on_either_side_or_none_is_the_same(norm, offset, learning):
    made = encoder(norm=norm, position_offset=offset, double=False)
    ids, keep = ids_and_keep(LENGTHS, 13)
    left_ids, left_keep = move_padding(ids, keep)
    assert not torch.equal(keep, left_keep)
    with torch.set_grad_enabled(learning):
        right, left = made(ids, keep), made(left_ids, left_keep)
        torch.testing.assert_close(left.hidden[left_keep], right.hidden[keep], rtol=0, atol=1e-5)
        for a, b in zip(right.routings, left.routings, strict=True):
            assert torch.equal(a.chosen, b.chosen)
        for i, length in enumerate(LENGTHS):
            alone = made(ids[i : i + 1, :length])
            torch.testing.assert_close(right.hidden[i, :length], alone.hidden[0], rtol=0, atol=1e-5)
            for a, b in zip(right.routings, alone.routings, strict=True):
                assert torch.equal(a.chosen[i], b.chosen[0])
    chosen = torch.stack([r.chosen for r in right.routings])
    assert 0 < chosen.float().mean() < 1, "with all heads on, or one, this would show little"


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_batch_order_and_mates_change_neither_heads_nor_logits(pooling):
    made, classifier = encoder(double=False), Classifier(35, 5, pooling=pooling).eval()
    ids, keep = ids_and_keep(LENGTHS, 11)
    order = torch.tensor([2, 0, 3, 1])
    mates, mates_keep = ids_and_keep([23, 2, 17], 23)
    wide = torch.cat([torch.nn.functional.pad(ids, (0, 12)), mates])
    wide_keep = torch.cat([torch.nn.functional.pad(keep, (0, 12)), mates_keep])

    def answer(ids, keep):
        out = made(ids, keep)
        return classifier(out.hidden, keep), torch.stack([r.chosen for r in out.routings], 1)

    with torch.no_grad():
        logits, heads = answer(ids, keep)
        turned_logits, turned_heads = answer(ids[order], keep[order])
        wide_logits, wide_heads = answer(wide, wide_keep)
    assert torch.equal(turned_heads, heads[order])
    torch.testing.assert_close(turned_logits, logits[order], rtol=0, atol=1e-5)
    assert torch.equal(wide_heads[:4], heads)
    torch.testing.assert_close(wide_logits[:4], logits, rtol=0, atol=1e-5)


def test_an_input_longer_than_the_positions_is_refused():
    made = encoder()
    ids, keep = ids_and_keep([POSITIONS, 3], POSITIONS)
    assert made(ids, keep).hidden.isfinite().all()
    wide = torch.nn.functional.pad(ids, (0, 4))
    wide_keep = torch.nn.functional.pad(keep, (0, 4))
    torch.testing.assert_close(made(wide, wide_keep).hidden[wide_keep], made(ids, keep).hidden[keep])
    with pytest.raises(UsageError, match="has 35 tokens, the model has 31 positions: truncate to 31"):
        made(wide)


def test_budget_none_spends_what_was_learned():
    made = encoder()
    ids, keep = ids_and_keep(LENGTHS, 11)
    first, again = made(ids, keep), made(ids, keep, budget=None)
    assert torch.equal(first.hidden, again.hidden)
    counts = torch.stack([r.chosen.sum(-1) for r in first.routings], 1)
    wanted = torch.stack([r.share for r in first.routings], 1) * HEADS
    assert torch.equal(counts, (wanted + 0.5).floor().long())
    assert len(counts.unique()) > 2


@pytest.mark.parametrize("budget", [0.2, 0.5, 1.0, torch.tensor([0.15, 0.5, 0.75, 1.0])], ids=str)
def test_a_named_budget_is_spent_exactly_over_the_layers(budget):
    made = encoder()
    made.profile.copy_(torch.tensor([0.2, 0.5, 0.9]))  # rising: ties alone would favour the first
    ids, keep = ids_and_keep(LENGTHS, 11)
    counts = torch.stack([r.chosen.sum(-1) for r in made(ids, keep, budget=budget).routings], 1)
    shares = torch.as_tensor(budget, dtype=torch.float64).expand(4)
    assert counts.sum(1).tolist() == (shares * LAYERS * HEADS + 0.5).floor().tolist()
    between = (counts.sum(1) > LAYERS) & (counts.sum(1) < LAYERS * HEADS)
    assert torch.equal(counts[:, 0] < counts[:, 2], between), "more heads where training spent more"
    if not isinstance(budget, float):
        for i in range(4):
            alone = made(ids[i : i + 1], keep[i : i + 1], budget=float(budget[i]))
            assert [int(r.chosen.sum()) for r in alone.routings] == counts[i].tolist()


@pytest.mark.parametrize("budget", [0.0, 1.01, torch.tensor([0.5, 0.5])])
def test_a_budget_that_makes_no_sense_is_refused(budget):
    ids, keep = ids_and_keep(LENGTHS, 11)
    with pytest.raises(UsageError, match="budget"):
        encoder()(ids, keep, budget=budget)


@pytest.mark.parametrize("min_units", [0, 1, 2])
def test_at_least_one_head_per_layer(min_units):
    """A router that wants nothing at all gets one head, or none where that is allowed on purpose."""
    made = encoder(BudgetConfig(min_units=min_units), bias=-30.0)
    ids, keep = ids_and_keep(LENGTHS, 11)
    for out in (made(ids, keep), made(ids, keep, budget=0.001)):
        counts = torch.stack([r.chosen.sum(-1) for r in out.routings])
        assert (counts == min_units).all()
        assert out.hidden.isfinite().all()


def test_a_caller_may_name_the_heads():
    made = encoder()
    ids, keep = ids_and_keep(LENGTHS, 11)
    learned = made(ids, keep)
    gates = torch.stack([r.chosen for r in learned.routings], 1).double()
    named = made(ids, keep, gates=gates)
    torch.testing.assert_close(named.hidden, learned.hidden, rtol=0, atol=1e-12)
    gates[0, 1] = 1 - gates[0, 1]
    other = made(ids, keep, gates=gates).hidden
    assert not torch.allclose(other[0, :11], learned.hidden[0, :11])
    torch.testing.assert_close(other[1:], learned.hidden[1:], rtol=0, atol=1e-12)


def test_hidden_states_and_weights_on_request():
    made = encoder(norm="pre")
    ids, keep = ids_and_keep(LENGTHS, 11)
    out = made(ids, keep, need_hidden=True, need_weights=True)
    assert made(ids, keep).all_hidden is None
    assert made(ids, keep).all_weights is None
    assert len(out.all_hidden) == LAYERS + 1
    torch.testing.assert_close(made.norm(out.all_hidden[-1]), out.hidden)
    assert [w.shape for w in out.all_weights] == [(4, HEADS, 11, 11)] * LAYERS
    for weights, routing in zip(out.all_weights, out.routings, strict=True):
        assert torch.equal(weights[:, :, 0].sum(-1) > 0, routing.chosen)
        assert not weights.masked_select(~keep[:, None, None].expand_as(weights)).any()


def test_the_classifier_by_hand():
    classifier = Classifier(2, 1, pooling="mean", hidden="tanh").eval()
    with torch.no_grad():
        for linear, weight in ((classifier.dense, [[1.0, 0.0], [0.0, 1.0]]), (classifier.out, [[1.0, 10.0]])):
            linear.weight.copy_(torch.tensor(weight))
            linear.bias.zero_()
    x = torch.tensor([[[1.0, 0.0], [3.0, 1.0], [50.0, 50.0]]])
    keep = torch.tensor([[True, True, False]])
    expected = torch.tanh(torch.tensor(2.0)) + 10 * torch.tanh(torch.tensor(0.5))
    torch.testing.assert_close(classifier(x, keep), expected.view(1, 1))


def test_pooling_the_first_token_finds_it_behind_padding():
    classifier = Classifier(35, 5, pooling="first")
    x, keep = torch.randn(2, 4, 35), torch.tensor([[False, False, True, True], [True, True, True, False]])
    assert torch.equal(classifier.pool(x, keep), torch.stack([x[0, 2], x[1, 0]]))
