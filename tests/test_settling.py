"""Settling: one shift of all budget controllers puts the share in use on the target."""

import pytest
import torch

from budgetformer import metrics
from budgetformer.config import BudgetConfig
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.text import Encoded
from budgetformer.training.settling import CLOSE, settle
from core_helpers import VOCABULARY, hf_config, stir


@pytest.mark.parametrize("start", [-0.6, 0.0, 0.7])
def test_the_share_in_use_is_the_target(start):
    torch.manual_seed(0)
    model = BudgetFormerForSequenceClassification(
        hf_config(BudgetConfig(target=0.5), num_labels=3, initializer_range=0.3)
    )
    stir(model, bias=start)
    texts = Encoded([{"input_ids": torch.randint(1, VOCABULARY, (3 + i % 17,)).tolist()} for i in range(301)])

    def share() -> float:
        return metrics.costs(metrics.predict(model.eval(), texts), model.config)["attention_flops_share"]

    before = share()
    controllers = [layer.attention.router.controller[2] for layer in model.budgetformer.encoder.layers]
    learned = [float(controller.bias.detach()) for controller in controllers]
    shift = settle(model, texts)
    # Few, small layers round coarsely: half the way is what a shift can promise here.
    assert abs(share() - 0.5) <= max(CLOSE, abs(before - 0.5) / 2)
    for controller, bias in zip(controllers, learned, strict=True):
        assert float(controller.bias.detach()) == pytest.approx(bias + shift, abs=1e-6), "all are shifted alike"


def test_a_share_on_target_is_left_alone():
    model = BudgetFormerForSequenceClassification(hf_config(BudgetConfig(target=0.999), num_labels=3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    texts = Encoded([{"input_ids": [1, 2, 3]} for _ in range(7)])
    assert settle(model, texts) == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
