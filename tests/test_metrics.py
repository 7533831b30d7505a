"""Scores, heads and counted FLOPs of labelled texts, in the order of the texts."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from budgetformer import flops, metrics
from budgetformer.config import BudgetConfig
from budgetformer.diagnostics import calibration, classes, confusion, diagnose, moved
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
    assert "blocks_by_class" not in found
    assert found["classes"]["LABEL_0"]["texts"] == 2
    assert found["classes"]["LABEL_0"]["units_share"] == pytest.approx(float(share[rows].mean()), abs=1e-4)
    assert ("confusion" in found) == (not several)


def test_blocks_are_reported_as_heads_are():
    budget = BudgetConfig(target=0.4, scope="heads+blocks", ffn_blocks=4)
    made = stir(shake(BudgetFormerForSequenceClassification(hf_config(budget, intermediate_size=128)), 0.2)).eval()
    data = texts()
    answers, found = metrics.predict(made, data), metrics.evaluate(made, data)
    assert answers.blocks is not None
    assert found["block_share"] == pytest.approx(float(answers.blocks.mean()))
    assert 0.1 < found["block_share"] < 1
    torch.testing.assert_close(torch.tensor(found["blocks_by_layer"]), answers.blocks.mean(0), rtol=0, atol=1e-4)
    by_class = torch.tensor(found["blocks_by_class"]["LABEL_0"])
    torch.testing.assert_close(by_class, answers.blocks[[0, 5]].mean(0), rtol=0, atol=1e-4)
    ran, every = metrics.work(answers, made.config).units(budget)
    counts, _ = np.histogram((ran / every).numpy(), bins=20, range=(0, 1))
    assert found["share_histogram"]["counts"] == counts.tolist()


def test_texts_that_were_answered_twice_are_counted():
    made = model()
    made.config.budget = {**made.config.budget, "cascade": 1.0}
    found = metrics.evaluate(made, texts())
    assert found["answered_again"] == 1.0
    assert found["head_share"] > 1
    assert sum(found["share_histogram"]["counts"]) == len(LENGTHS), "nobody falls out at the right"
    assert "answered_again" not in metrics.evaluate(model(), texts(), details=False)


def test_a_named_budget_is_spent():
    found = metrics.evaluate(model(), texts(), budget=0.5, details=False)
    assert found["head_share"] == pytest.approx(11 / 21)  # half of 21 heads, halves up
    assert found["head_share_std"] == pytest.approx(0.0, abs=1e-6)
    assert "heads_by_class" not in found


def test_confusion_by_hand():
    found = confusion(np.array([0, 0, 2, 1, 0]), np.array([0, 1, 2, 1, 0]), ["a", "b", "c"])
    assert found == {"labels": ["a", "b", "c"], "cells": [[0, 0, 2], [0, 1, 1], [1, 1, 1], [2, 2, 1]]}


def test_calibration_equals_that_of_sklearn():
    from sklearn.calibration import calibration_curve

    dice = np.random.default_rng(0)
    sure = dice.random(500)
    right = dice.random(500) < sure**2
    found = calibration(sure, right)
    accuracy, confidence = calibration_curve(right, sure, n_bins=10)
    np.testing.assert_allclose([one["accuracy"] for one in found["bins"]], accuracy, atol=1e-4)
    np.testing.assert_allclose([one["confidence"] for one in found["bins"]], confidence, atol=1e-4)
    assert sum(one["answers"] for one in found["bins"]) == 500
    # Three answers of 0.9 of which two are right, one of 0.6 that is: (3 |2/3 - 0.9| + |1 - 0.6|) / 4
    by_hand = calibration(np.array([0.9, 0.9, 0.9, 0.6]), np.array([1, 1, 0, 1]))
    assert by_hand["ece"] == pytest.approx((3 * (0.9 - 2 / 3) + 0.4) / 4)
    assert calibration(np.ones(3), np.ones(3))["bins"] == [{"answers": 3, "confidence": 1.0, "accuracy": 1.0}]


def test_what_moved_the_budget():
    length = np.array([3, 5, 9, 17, 30, 41])
    spent = length**2 / 2000
    found = moved(spent, length, -np.log(length), np.array([0, 0, 1, 1, 2, 2]))
    assert found["length"] == pytest.approx(1.0), "of ranks, so the square does not matter"
    assert found["loss"] == pytest.approx(-1.0)
    # Ranks 1 to 6 in pairs: 3 * 0.5 within on 3 degrees of freedom, 17.5 in all on 5.
    assert found["class"] == pytest.approx(math.sqrt(1 - (1.5 / 3) / (17.5 / 5)))
    assert moved(np.full(6, 0.4) + 1e-12 * length, length, length.astype(float)) == {}
    dice = np.random.default_rng(0)
    chance = moved(dice.random(2000), dice.random(2000), dice.random(2000), dice.integers(0, 500, 2000))
    assert all(abs(value) < 0.15 for value in chance.values()), "many classes explain nothing by being many"


def test_scores_of_each_class_by_hand():
    found = classes(np.array([0, 0, 1]), np.array([0, 1, 1]), ["a", "b", "c"], np.array([0.2, 0.4, 0.9]))
    assert found == {
        "a": {"texts": 2, "precision": 1.0, "recall": 0.5, "f1": 0.6667, "units_share": 0.3},
        "b": {"texts": 1, "precision": 0.5, "recall": 1.0, "f1": 0.6667, "units_share": 0.9},
    }


def test_answers_of_several_labels_are_diagnosed_one_by_one():
    logits, labels = np.array([[2.0, -1.0], [0.5, 3.0]]), [[1, 0], [0, 1]]
    found = diagnose(logits, labels, ["a", "b"], np.array([0.2, 0.4]), np.array([3, 5]))
    assert sum(one["answers"] for one in found["calibration"]["bins"]) == 4
    assert found["classes"]["a"]["precision"] == 0.5
    assert "confusion" not in found
    assert "class" not in found["moved"]


def test_answers_that_are_no_numbers_are_not_diagnosed():
    assert diagnose(np.array([[np.nan, 1.0]]), [0], ["a", "b"], np.array([0.5]), np.array([3])) == {}


def test_only_an_evaluation_gives_memory_back_to_measure_what_it_needs(monkeypatch):
    calls = []
    monkeypatch.setattr(metrics, "_give_back", lambda: calls.append(1))
    assert metrics.predict(model(), texts()).peak_memory_mb is None
    assert calls == []
    found = metrics.evaluate(model(), texts())
    assert len(calls) == 1, "the gap's own answers are not measured"
    if Path("/proc/self/clear_refs").exists():
        assert found["peak_memory_mb"] >= 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's peak is read on Linux")
def test_memory_that_earlier_work_left_behind_hides_nothing():
    def work():
        with metrics.peak_memory(torch.device("cpu")) as peak:
            held = [torch.ones(2**18) for _ in range(64)]  # 64 MB; the allocator keeps freed pieces of 1 MB
            held.clear()
        return peak.megabytes

    found = [work() for _ in range(4)]
    assert min(found[1:]) > 32, found
