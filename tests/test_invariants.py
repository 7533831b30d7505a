"""The seven promises of the design, one test each. The details are in the tests of each module."""

import time

import pytest
import torch
from torch import nn

from budgetformer import reference
from budgetformer.attention import BudgetedMultiheadAttention
from budgetformer.config import ESTIMATORS, ROUTER_VIEWS, BudgetConfig
from budgetformer.encoder import Classifier, Encoder
from budgetformer.schedule import Schedule
from core_helpers import HEADS, LAYERS, counted, encoder_config, ids_and_keep, move_padding, poison, shake, stir

LENGTHS = [11, 5, 1, 8, 23]
TRAINED_HARD = tuple(name for name in ESTIMATORS if name != "paper")


class Model(nn.Module):
    """Encoder and classifier; routers that differ from input to input."""

    def __init__(self, budget=None, **changes):
        super().__init__()
        self.encoder = Encoder(encoder_config(**changes), budget)
        self.classifier = Classifier(35, 5, dropout=0.0)
        stir(shake(self.encoder))
        self.eval()

    def forward(self, ids, keep, **options):
        out = self.encoder(ids, keep, **options)
        return self.classifier(out.hidden, keep), torch.stack([r.chosen for r in out.routings], 1)


def test_1_all_heads_on_equals_plain_attention(minilm):
    """nn.MultiheadAttention with the same weights, and the real MiniLM in transformers: a new router or budget 1."""
    from transformers import AutoModel

    import budgetformer

    theirs = nn.MultiheadAttention(35, 7, batch_first=True, dtype=torch.float64).eval()
    ours = BudgetedMultiheadAttention(35, 7, batch_first=True, dtype=torch.float64).eval()
    ours.load_state_dict(theirs.state_dict())
    x, drop = torch.randn(3, 11, 35, dtype=torch.float64), torch.arange(11)[None] >= torch.tensor([[11], [4], [1]])
    for options in ({}, {"budget": 1.0}):
        found, expected = ours(x, x, x, drop, **options), theirs(x, x, x, drop)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    stir(ours, bias=-30.0)
    torch.testing.assert_close(ours(x, x, x, drop, budget=1.0), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(ours(x, x, x, drop)[0], expected[0])

    source = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    converted = budgetformer.from_pretrained_encoder(minilm)
    ids, keep = ids_and_keep([23, 7], 23)
    ids = ids + 1000 * keep
    with torch.no_grad():
        expected = source(ids, attention_mask=keep.long()).last_hidden_state[keep]
        for budget in (None, 1.0):
            found = converted(ids, keep, budget=budget).last_hidden_state[keep]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("estimator", TRAINED_HARD)
def test_2_no_gap_between_training_and_use(estimator):
    """Gates of training are exactly 0 or 1 all along, and at the end of training they are those of use."""
    model = Model(BudgetConfig(estimator=estimator, target=0.4))
    schedule = Schedule(budget=model.encoder.budget)
    ids, keep = ids_and_keep(LENGTHS, 23)
    use, heads = model(ids, keep)
    model.train()
    for progress in (0.0, 0.3, 1.0):
        out = model.encoder(ids, keep, explore=schedule.at(progress))
        for routing in out.routings:
            assert bool(((routing.gates == 0) | (routing.gates == 1)).all())
            assert torch.equal(routing.gates != 0, routing.chosen)
            assert routing.gates.requires_grad
    logits, trained_heads = model(ids, keep, explore=schedule.at(1.0))
    assert torch.equal(trained_heads, heads)
    assert torch.equal(logits, use)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("training", [False, True], ids=["use", "training"])
def test_3_at_least_one_head(estimator, training):
    """However little the router wants or the caller names; none only where min_units is 0 on purpose."""
    ids, keep = ids_and_keep(LENGTHS, 23)
    for least in (1, 2, 0):
        model = Model(BudgetConfig(estimator=estimator, min_units=least, target=0.1))
        stir(model, bias=-40.0).train(training)
        explore = Schedule(budget=model.encoder.budget).at(0.0 if training else 1.0)
        for options in ({"explore": explore}, {"budget": 0.001}):
            _, heads = model(ids, keep, **options)
            assert int(heads.sum(-1).min()) >= least
            if estimator == "soft_topk" and least == 0:
                assert not heads.any()


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_4_neighbours_change_nothing(norm):
    """Batch size, order and padding on either side: the same heads, logits to 1e-6 in float32."""
    model = Model(norm=norm)
    ids, keep = ids_and_keep(LENGTHS, 23)
    with torch.no_grad():
        logits, heads = model(ids, keep)
        assert len(heads.flatten(1).unique(dim=0)) > 1
        order = torch.randperm(len(LENGTHS))
        left_ids, left_keep = move_padding(ids, keep)
        wide = nn.functional.pad(ids, (3, 5)), nn.functional.pad(keep, (3, 5))
        for other_logits, other_heads, rows in (
            (*model(ids[order], keep[order]), order),
            (*model(left_ids, left_keep), slice(None)),
            (*model(*wide), slice(None)),
            *((*model(ids[i : i + 1, :n], keep[i : i + 1, :n]), slice(i, i + 1)) for i, n in enumerate(LENGTHS)),
            (*model(ids[[1, 1, 3]], keep[[1, 1, 3]]), torch.tensor([1, 1, 3])),
        ):
            assert torch.equal(other_heads, heads[rows])
            torch.testing.assert_close(other_logits, logits[rows], rtol=0, atol=1e-6)


def test_5_skipped_is_not_computed():
    """Counted FLOPs fall with every head, unselected heads may be NaN, and less time is spent."""
    model = Model()
    ids, keep = ids_and_keep([23], 23)
    counts = [counted(lambda b=b: model(ids, keep, budget=b)) for b in torch.arange(3, 22, dtype=torch.float64) / 21]
    assert counts == sorted(set(counts))
    assert len(set(torch.tensor(counts).diff().tolist())) == 1, "every head costs the same"

    ids, keep = ids_and_keep(LENGTHS, 23)
    gates = (torch.rand(len(LENGTHS), LAYERS, HEADS) < 0.5).float()
    gates[:, :, 3] = 0
    gates[:, :, 4] = 1
    with torch.no_grad():
        before, _ = model(ids, keep, gates=gates)
        for layer in model.encoder.layers:
            poison(layer.attention, 3)
        after, _ = model(ids, keep, gates=gates)
        assert torch.equal(before, after)
        gates[0, 1, 3] = 1
        assert model(ids, keep, gates=gates)[0][0].isnan().all()

    big = BudgetedMultiheadAttention(384, 12, batch_first=True).eval()
    x = torch.randn(8, 128, 384)

    def seconds(budget):
        start = time.process_time()
        with torch.no_grad():
            big(x, x, x, need_weights=False, budget=budget)
        return time.process_time() - start

    # Processor time, the best of interleaved runs: what others do on the machine hardly shows. A quarter of the heads
    # takes about a third of the time; less than three quarters is asked for.
    times = [(seconds(0.25), seconds(1.0)) for _ in range(7)]
    assert min(few for few, _ in times) < 0.75 * min(whole for _, whole in times)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_6_reference_equals_training_path_equals_dispatch(norm):
    """Layer by layer through loops over inputs and heads, at mixed budgets in one batch, in float64."""
    model = Model(norm=norm).double()
    ids, keep = ids_and_keep(LENGTHS, 23)
    budget = torch.tensor([0.15, 0.3, 0.5, 0.8, 1.0])
    for options in ({}, {"budget": budget}):
        masked, heads = model(ids, keep, **options)
        with torch.no_grad():
            dispatched, same_heads = model(ids, keep, **options)
        assert torch.equal(heads, same_heads)
        torch.testing.assert_close(masked, dispatched, rtol=0, atol=1e-11)

        x = model.encoder.embeddings(ids, keep)
        for i, layer in enumerate(model.encoder.layers):
            attention, inner = layer.attention, layer.attention_norm(x) if layer.pre else x
            parts = zip("qkv", attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
            projections = {f"{kind}_{n}": t for n, w, b in parts for kind, t in (("weight", w), ("bias", b))}
            x = x + reference.attention(
                inner,
                inner,
                inner,
                gates=heads[:, i].double(),
                keep=keep,
                weight_o=attention.out_proj.weight,
                bias_o=attention.out_proj.bias,
                **projections,
            )
            x = x if layer.pre else layer.attention_norm(x)
            inner = layer.feed_forward_norm(x) if layer.pre else x
            ff = layer.feed_forward
            x = x + reference.feed_forward(
                inner,
                gates=torch.ones(len(LENGTHS), 1),  # 53 neurons are prime: one block
                weight_in=ff.up.weight,
                bias_in=ff.up.bias,
                weight_out=ff.down.weight,
                bias_out=ff.down.bias,
                activation=nn.functional.gelu,
            )
            x = x if layer.pre else layer.feed_forward_norm(x)
        x = x if model.encoder.norm is None else model.encoder.norm(x)
        torch.testing.assert_close(model.classifier(x, keep), masked, rtol=0, atol=1e-11)


@pytest.mark.parametrize("view", ROUTER_VIEWS)
def test_7_the_router_ignores_padding(view):
    """What stands in the padding changes no share, no score, no head and no logit, in any view."""
    model = Model(BudgetConfig(view=view))
    ids, keep = ids_and_keep(LENGTHS, 23)
    rubbish = torch.where(keep, ids, torch.randint(1, 97, ids.shape))
    assert not torch.equal(ids, rubbish)
    plain, other = model.encoder(ids, keep), model.encoder(rubbish, keep)
    for a, b in zip(plain.routings, other.routings, strict=True):
        torch.testing.assert_close(a.share, b.share, rtol=0, atol=1e-6)
        torch.testing.assert_close(a.scores, b.scores, rtol=0, atol=1e-5)
        assert torch.equal(a.chosen, b.chosen)
    torch.testing.assert_close(
        model.classifier(plain.hidden, keep), model.classifier(other.hidden, keep), rtol=0, atol=1e-6
    )
