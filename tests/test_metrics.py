"""Scores, heads and counted FLOPs of labelled texts, in the order of the texts."""

import math
from pathlib import Path

import pytest
import torch

from budgetformer import flops, metrics
from budgetformer.config import BudgetConfig
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.text import Encoded, collator, length_batches
from core_helpers import HEADS, LAYERS, hf_config, shake, stir

LENGTHS = [11, 5, 1, 23, 8, 5, 17]


def model(**changes):
    made = stir(shake(BudgetFormerForSequenceClassification(hf_config(BudgetConfig(target=0.4), **changes)), 0.2))
    assert isinstance(made, BudgetFormerForSequenceClassification)
    return made.eval()


def texts(several=False):
    items = []
    for i, length in enumerate(LENGTHS):
        label = [int(i % 5 == k) for k in range(5)] if several else i % 5
        items.append({"input_ids": torch.randint(1, 97, (length,)).tolist(), "labels": label})
    return Encoded(items)


def test_batches_hold_inputs_of_similar_length():
    assert length_batches(LENGTHS, 3) == [[3, 6, 0], [4, 1, 5], [2]]


def test_the_collator_pads_on_the_right():
    items = [
        {"input_ids": [7, 8, 9], "token_type_ids": [0, 1, 1], "labels": 2},
        {"input_ids": [6], "token_type_ids": [1], "labels": 0},
    ]
    batch = collator(5)(items)
    assert batch["input_ids"].tolist() == [[7, 8, 9], [6, 5, 5]]
    assert batch["token_type_ids"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [2, 0]
    assert collator(0)([{"input_ids": [1], "labels": [0, 1]}])["labels"].dtype == torch.float32


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_answers_come_in_the_order_of_the_inputs(batch_size):
    made, data = model(), texts()
    found = metrics.predict(made, data, batch_size=batch_size)
    assert found.tokens.tolist() == LENGTHS
    for i, item in enumerate(data.items):
        with torch.no_grad():
            alone = made(torch.tensor([item["input_ids"]]))
        torch.testing.assert_close(found.logits[i], alone.logits[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(found.gates[i], alone.gates[0])
        torch.testing.assert_close(found.wanted[i], alone.wanted[0], rtol=1e-5, atol=1e-5)


def test_scores_by_hand():
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, math.log(3.0)], [math.log(3.0), 0.0], [math.log(3.0), 0.0]])
    found = metrics.scores(logits, [0, 1, 1, 0])
    assert found["accuracy"] == 0.75
    # Class 0: precision 2/3, recall 1, F1 4/5; class 1: precision 1, recall 1/2, F1 2/3.
    assert found["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert found["loss"] == pytest.approx((3 * math.log(4 / 3) + math.log(4)) / 4)


def test_scores_of_several_labels_need_all_of_them_right():
    found = metrics.scores(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), [[1, 0], [1, 0]])
    assert found["accuracy"] == 0.5
    assert found["macro_f1"] == pytest.approx(0.5)


@pytest.mark.parametrize("several", [False, True])
def test_evaluation_reports_what_ran(several):
    made, data = model(), texts(several)
    answers = metrics.predict(made, data)
    found = metrics.evaluate(made, data, batch_size=3)
    share = answers.gates.mean((1, 2))
    assert found["rows"] == len(LENGTHS)
    assert found["head_share"] == pytest.approx(float(share.mean()))
    assert found["head_share_std"] == pytest.approx(float(share.std(correction=0)))
    config = made.config
    work = flops.work(
        answers.tokens, answers.gates.sum(-1), config.encoder_config, config.budget_config, labels=config.num_labels
    )
    assert found["attention_flops_share"] == pytest.approx(float(work.attention.sum() / work.attention_dense.sum()))
    assert found["flops_share"] == pytest.approx(float(work.total.sum() / work.total_dense.sum()))
    assert found["flops_per_text"] == pytest.approx(float(work.total.mean()))
    assert 0 < found["router_flops_share"] < 0.2
    assert sum(found["share_histogram"]["counts"]) == len(LENGTHS)
    assert len(found["shares_by_layer"]) == LAYERS
    assert [len(row) for row in found["heads_by_layer"]] == [HEADS] * LAYERS
    rows = [0, 5]  # the inputs of the first class
    by_class = torch.tensor(found["heads_by_class"]["LABEL_0"])
    torch.testing.assert_close(by_class, answers.gates[rows].mean(0), rtol=0, atol=1e-4)


def test_a_named_budget_is_spent():
    found = metrics.evaluate(model(), texts(), budget=0.5, details=False)
    assert found["head_share"] == pytest.approx(11 / 21)  # half of 21 heads, halves up
    assert found["head_share_std"] == pytest.approx(0.0, abs=1e-6)
    assert "heads_by_class" not in found


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's peak is read on Linux")
def test_memory_that_earlier_work_left_behind_hides_nothing():
    def work():
        with metrics.peak_memory(torch.device("cpu")) as peak:
            held = [torch.ones(2**18) for _ in range(64)]  # 64 MB; the allocator keeps freed pieces of 1 MB
            held.clear()
        return peak.megabytes

    found = [work() for _ in range(4)]
    assert min(found[1:]) > 32, found
