"""The formulas against torch's own count of a whole model: attention, router, rest."""

import numpy as np
import pytest
import torch
from torch import nn

from budgetformer import flops
from budgetformer.config import BudgetConfig
from budgetformer.encoder import Classifier, Encoder
from core_helpers import HEADS, LAYERS, counted, encoder_config, flop_counter, stir

LABELS = 5


class Whole(nn.Module):
    """Encoder and classifier, to be counted by name."""

    def __init__(self, config, budget, hidden):
        super().__init__()
        self.encoder = Encoder(config, budget)
        self.classifier = Classifier(config.hidden_size, LABELS, hidden=hidden)

    def forward(self, ids, **options):
        out = self.encoder(ids, **options)
        return self.classifier(out.hidden, torch.ones_like(ids, dtype=torch.bool)), out.routings


def parts(model, *args, **options):
    """Counted operations of a call: of attention without its routers, of the routers, and of the rest."""
    spent = {"attention": 0, "router": 0}
    with torch.no_grad(), flop_counter() as counter:

        def watched(name, call):
            def run(*args, **kwargs):
                before = counter.get_total_flops()
                out = call(*args, **kwargs)
                spent[name] += counter.get_total_flops() - before
                return out

            return run

        with pytest.MonkeyPatch.context() as patch:
            for layer in model.encoder.layers:
                patch.setattr(layer.attention, "attend", watched("attention", layer.attention.attend))
                patch.setattr(layer.attention.router, "forward", watched("router", layer.attention.router.forward))
            model(*args, **options)
    return spent["attention"] - spent["router"], spent["router"], counter.get_total_flops() - spent["attention"]


@pytest.mark.parametrize("tokens", [1, 11, 31])
@pytest.mark.parametrize("budget", [0.2, 0.5, 1.0, None])
@pytest.mark.parametrize(
    ("view", "hidden", "embedding_size"), [("mean", None, None), ("mean+first", "tanh", None), ("mean+max", "gelu", 17)]
)
def test_work_equals_what_torch_counts(tokens, budget, view, hidden, embedding_size):
    config, budgets = encoder_config(embedding_size=embedding_size), BudgetConfig(view=view, router_hidden=13)
    model = stir(Whole(config, budgets, hidden)).eval()
    ids = torch.randint(1, 97, (1, tokens))
    with torch.no_grad():
        heads = torch.stack([r.chosen.sum(-1) for r in model(ids, budget=budget)[1]], 1)
    work = flops.work(torch.tensor([tokens]), heads, config, budgets, labels=LABELS, dense_head=hidden is not None)
    rest = int(work.rest + work.feed_forward)
    assert parts(model, ids, budget=budget) == (int(work.attention), int(work.router), rest)
    assert counted(lambda: model(ids, budget=budget)) == int(work.total)
    if budget == 1.0:
        assert int(work.attention) == int(work.attention_dense)


def test_named_heads_cost_what_they_are():
    config, budgets = encoder_config(), BudgetConfig()
    model = Whole(config, budgets, None).eval()
    ids = torch.randint(1, 97, (1, 11))
    dense = torch.ones(1, LAYERS, HEADS)
    for gates in (dense, (torch.rand(1, LAYERS, HEADS) < 0.4).float(), torch.zeros(1, LAYERS, HEADS)):
        work = flops.work(torch.tensor([11]), gates.sum(-1), config, budgets, labels=LABELS)
        assert parts(model, ids, gates=gates) == (int(work.attention), 0, int(work.rest + work.feed_forward))
    assert int(work.total_dense) == counted(lambda: model(ids, gates=dense))


def test_work_of_a_batch_is_per_input():
    config, budgets = encoder_config(), BudgetConfig()
    tokens, heads = torch.tensor([11, 5]), torch.tensor([[7, 3, 1], [2, 2, 2]])
    both = flops.work(tokens, heads, config, budgets, labels=LABELS)
    for i in range(2):
        one = flops.work(tokens[i : i + 1], heads[i : i + 1], config, budgets, labels=LABELS)
        assert torch.equal(both.total[i : i + 1], one.total)
        assert torch.equal(both.total_dense[i : i + 1], one.total_dense)


def test_work_by_hand():
    """One token, width 2, two heads of width 1: 8 * 1 * 2 * 1 for the projections, 4 for scores and average."""
    config = encoder_config(hidden_size=2, num_heads=2, num_layers=1, intermediate_size=3)
    work = flops.work(torch.tensor([1]), torch.tensor([[1]]), config, BudgetConfig(router_hidden=5), labels=7)
    assert work.attention.tolist() == [20.0]
    assert work.attention_dense.tolist() == [40.0]
    assert work.router.tolist() == [2 * (2 * 5 + 5 + 2 * 2)]
    assert work.feed_forward.tolist() == [4 * 2 * 3]
    assert work.rest.tolist() == [2 * 2 * 7]


def test_numpy_counts_what_torch_counts():
    config, budgets = encoder_config(embedding_size=17), BudgetConfig(router_hidden=13)
    tokens, heads = torch.tensor([1, 11, 31]), torch.tensor([[1, 2, 3], [7, 7, 7], [0, 5, 1]])
    options = {"labels": LABELS, "dense_head": True}
    one = flops.work(tokens, heads, config, budgets, **options)
    other = flops.work(tokens.numpy(), heads.numpy().astype(np.uint8), config, budgets, **options)
    for name in ("attention", "attention_dense", "router", "rest", "total", "total_dense"):
        assert getattr(other, name).dtype == np.float64
        assert getattr(other, name).tolist() == getattr(one, name).tolist(), name


def test_answers_are_counted_by_how_often_each_unit_ran():
    """Two heads and two of four blocks for the first input; for the second those, and then all of them."""
    config = encoder_config(intermediate_size=128)
    gates = torch.zeros(2, LAYERS, HEADS)
    gates[:, :, :2] = 1
    blocks = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(2, LAYERS, 4).clone()
    gates[1] += 1
    blocks[1] += 1
    budgets = BudgetConfig(target=0.5, scope="heads+blocks", ffn_blocks=4)
    tokens, options = torch.tensor([5, 11]), {"labels": LABELS, "dense_head": True}
    found = flops.of_answers(tokens, gates, blocks, config, budgets, **options)
    heads, share = torch.tensor([[2] * LAYERS, [HEADS + 2] * LAYERS]), torch.tensor([[0.5] * LAYERS, [1.5] * LAYERS])
    again = torch.tensor([0, 1])
    expected = flops.work(tokens, heads, config, budgets, blocks=share, again=again, **options)
    plain = BudgetConfig(target=1.0)
    no_router = flops.of_answers(tokens, gates, None, config, plain, **options)
    arrays = (tokens.numpy(), gates.numpy().astype(np.uint8))
    numpy = flops.of_answers(*arrays, blocks.numpy().astype(np.uint8), config, budgets, **options)
    for name in ("attention", "feed_forward", "router", "rest", "total", "total_dense"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
        assert getattr(numpy, name).tolist() == getattr(expected, name).tolist(), name
    assert no_router.router.tolist() == [0, 0]
    # All blocks of a second answer too: twice the dense layer.
    assert no_router.feed_forward.tolist() == (no_router.feed_forward_dense * torch.tensor([1, 2])).tolist()
