"""Second answers: what is unsure is answered again with every unit on, in torch and in the engine."""

from functools import partial

import numpy as np
import pytest
import torch

from budgetformer import flops, metrics
from budgetformer.config import BudgetConfig
from budgetformer.engine import Engine
from budgetformer.engine.budgets import margins as numpy_margins
from budgetformer.engine.engine import probabilities
from budgetformer.errors import UsageError
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.router import margins
from budgetformer.text import Encoded
from budgetformer.training.settling import hold_out, settle_cascade
from core_helpers import VOCABULARY, hf_config, ids_and_keep, save_tokenizer, stir
from engine_helpers import NATIVE

BLOCKS = {"scope": "heads+blocks", "ffn_blocks": 4}
TWIN = {**BLOCKS, "second": "twin"}
LENGTHS = [5, 3, 9, 1, 7, 4, 9, 2, 6, 8, 3, 5]
TEXTS = [
    "lost my card",
    "where is the money",
    "blue",
    "never came why",
    "transfer transfer money",
    "the the card is lost",
]


def model_with(budget: BudgetConfig, seed: int = 3, **changes):
    torch.manual_seed(seed)
    sizes = {"intermediate_size": 128, "num_labels": 4, "initializer_range": 0.5}
    return stir(BudgetFormerForSequenceClassification(hf_config(budget, **sizes, **changes))).eval()


def set_margin(model, margin: float) -> None:
    model.config.budget = {**model.config.budget, "cascade": margin}


@torch.no_grad()
def answers(model, ids, keep, **named):
    return model(ids, keep, **named)


def middle_margin(model, ids, keep) -> float:
    """A margin that half of the inputs lie under."""
    return float(margins(answers(model, ids, keep).logits, multi_label=False).median())


def test_margins_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
    assert torch.allclose(margins(logits, multi_label=False), torch.tensor([0.2, 0.7]), atol=1e-6)
    each = torch.logit(torch.tensor([[0.9, 0.4], [0.2, 0.99]]))
    assert torch.allclose(margins(each, multi_label=True), torch.tensor([0.2, 0.6]), atol=1e-6)
    assert margins(torch.tensor([[0.3], [-2.0]]), multi_label=False).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("labels", [1, 2, 7])
def test_numpy_and_torch_agree_on_margins(labels, multi_label):
    logits = 3 * np.random.default_rng(labels).standard_normal((50, labels)).astype(np.float32)
    ours = numpy_margins(probabilities(logits, multi_label), multi_label)
    assert np.allclose(ours, margins(torch.from_numpy(logits), multi_label=multi_label).numpy(), atol=1e-6)


@pytest.mark.parametrize("scope", [{}, BLOCKS, TWIN])
def test_unsure_inputs_get_the_answer_of_every_unit_and_the_others_keep_theirs(scope):
    model = model_with(BudgetConfig(target=0.4, **scope))
    ids, keep = ids_and_keep(LENGTHS, 9)
    first, whole = answers(model, ids, keep), answers(model, ids, keep, budget=1.0)
    margin = middle_margin(model, ids, keep)
    again = margins(first.logits, multi_label=False) < margin
    assert 0 < int(again.sum()) < len(ids)
    set_margin(model, margin)
    both = answers(model, ids, keep)
    assert torch.allclose(both.logits, torch.where(again[:, None], whole.logits, first.logits), atol=1e-6)
    assert torch.equal(both.gates, first.gates + again[:, None, None])
    if scope:
        assert torch.equal(both.blocks, first.blocks + again[:, None, None])
    assert torch.allclose(both.head_share, first.head_share + again)
    # A budget, or the units, named by the caller have no second answer.
    assert torch.equal(
        answers(model, ids, keep, budget=0.5).gates, answers(model, ids, keep, budget=0.5).gates.clamp(max=1)
    )
    assert torch.equal(answers(model, ids, keep, gates=first.gates).gates, first.gates)


def test_an_input_is_answered_the_same_alone_and_in_a_batch():
    model = model_with(BudgetConfig(target=0.4, **BLOCKS))
    ids, keep = ids_and_keep(LENGTHS, 9)
    set_margin(model, middle_margin(model, ids, keep) + 1e-4)
    together = answers(model, ids, keep, output_hidden_states=True)
    for row, length in enumerate(LENGTHS):
        alone = answers(model, ids[row : row + 1, :length], keep[row : row + 1, :length], output_hidden_states=True)
        assert torch.allclose(alone.logits[0], together.logits[row], atol=1e-5)
        assert torch.equal(alone.gates[0], together.gates[row])
        assert torch.allclose(alone.hidden_states[-1][0], together.hidden_states[-1][row, :length], atol=1e-4)


@pytest.mark.parametrize("scope", [{}, BLOCKS, TWIN])
def test_the_cost_is_that_of_both_answers(scope):
    model = model_with(BudgetConfig(target=0.4, **scope))
    texts = Encoded([{"input_ids": torch.randint(1, VOCABULARY, (n,)).tolist()} for n in LENGTHS])
    first = metrics.predict(model, texts)
    margin = float(margins(first.logits, multi_label=False).median()) + 1e-4
    again = (margins(first.logits, multi_label=False) < margin).double()
    before = metrics.work(first, model.config)
    set_margin(model, margin)
    both = metrics.predict(model, texts)
    after = metrics.work(both, model.config)
    assert torch.equal(flops.again(both.gates).double(), again)
    assert torch.allclose(after.total, before.total + again * before.total_dense, rtol=1e-9)
    assert torch.allclose(after.attention, before.attention + again * before.attention_dense, rtol=1e-9)
    assert torch.equal(after.total_dense, before.total_dense)


def test_a_first_answer_without_heads_is_an_answer():
    gates, blocks = torch.zeros(3, 2, 4), torch.zeros(3, 2, 5)
    blocks[:, 0, 1] = 1  # the first answers ran one block and no head
    gates[1:] += 1
    blocks[1:] += 1
    gates[2], blocks[2, 0, 1] = 1, 1  # answered once, with every unit
    assert flops.again(gates, blocks).tolist() == [0, 1, 0]
    assert flops.again(gates).tolist() == [0, 0, 0]
    assert flops.again(gates.numpy(), blocks.numpy()).tolist() == [0, 1, 0]


@pytest.mark.parametrize("path", [*NATIVE, "torch"])
@pytest.mark.parametrize("scope", [{}, BLOCKS, TWIN])
def test_the_engine_answers_as_the_model_does(path, scope, tmp_path):
    model = model_with(BudgetConfig(target=0.4, **scope), vocab_size=17)
    save_tokenizer(tmp_path)
    model.save_pretrained(tmp_path)
    engine = Engine.load(tmp_path, path=path)
    same = np.array_equal if path in NATIVE else partial(np.allclose, atol=1e-4)
    sure = numpy_margins(engine.predict(TEXTS).probabilities, False)
    margin = float(np.median(sure))
    set_margin(model, margin)
    model.save_pretrained(tmp_path)
    learned = Engine.load(tmp_path, path=path)
    found = learned.predict(TEXTS)
    again = sure < margin
    assert 0 < again.sum() < len(TEXTS)
    first, whole = engine.predict(TEXTS), engine.predict(TEXTS, budget=1.0)
    assert same(found.output.logits, np.where(again[:, None], whole.output.logits, first.output.logits))
    assert np.array_equal(found.output.gates, first.output.gates + again[:, None, None])
    if scope:
        assert np.array_equal(found.output.blocks, first.output.blocks + again[:, None, None])
    # The same, named: by the call, and by the engine; and neither beside a named budget.
    for answers in (
        engine.predict(TEXTS, margin=margin),
        Engine.load(tmp_path, path=path, margin=margin).predict(TEXTS),
    ):
        assert same(answers.output.logits, found.output.logits)
    assert learned.predict(TEXTS, budget=0.5).output.gates.max() == 1
    assert learned.predict(TEXTS, budget=0.5, margin=1.0).output.gates.min() >= 1
    assert learned.predict(TEXTS, budget=1.0, margin=1.0).output.gates.max() == 1, "all units ran already"
    # In small batches as in one: bit for bit, where kernels compute.
    small = Engine.load(tmp_path, path=path, batch_tokens=4).predict(TEXTS)
    assert same(small.output.logits, found.output.logits)
    with pytest.raises(UsageError, match=r"margin=1\.5"):
        engine.predict(TEXTS, margin=1.5)


def test_settling_finds_the_margin_that_spends_the_target():
    torch.manual_seed(1)
    model = model_with(BudgetConfig(target=0.8, first=0.5, **BLOCKS))
    texts = Encoded([{"input_ids": torch.randint(1, VOCABULARY, (3 + i % 17,)).tolist()} for i in range(400)])
    before = metrics.costs(metrics.predict(model, texts), model.config)["units_flops_share"]
    margin = settle_cascade(model, texts)
    assert margin == model.config.budget_config.cascade
    after = metrics.costs(metrics.predict(model, texts), model.config)["units_flops_share"]
    assert before < 0.8, "the test wants a first answer under the target"
    assert after == pytest.approx(0.8, abs=0.004)


def test_texts_set_aside_are_a_tenth_and_none_is_lost():
    texts = Encoded([{"input_ids": [i]} for i in range(95)], truncated=3)
    train, held = hold_out(texts, seed=4)
    assert (len(train), len(held), train.truncated) == (86, 9, 3)
    assert sorted(item["input_ids"][0] for item in [*train.items, *held.items]) == list(range(95))
    assert hold_out(texts, seed=4)[1].items == held.items
    assert hold_out(texts, seed=5)[1].items != held.items


def test_no_second_answer_where_the_first_spends_all():
    model = model_with(BudgetConfig(target=0.05, first=0.5, **BLOCKS))
    texts = Encoded([{"input_ids": [5, 6, 7, 8]}] * 4)
    assert settle_cascade(model, texts) == 0.0


@pytest.mark.parametrize(
    ("field", "value"), [("first", 0.0), ("first", 1.2), ("first", 0.5), ("cascade", 1.5), ("whole", 1.0)]
)
def test_values_outside_their_range_are_refused(field, value):
    with pytest.raises(UsageError, match=f"{field}={value}"):
        BudgetConfig(target=0.5, **{field: value})
