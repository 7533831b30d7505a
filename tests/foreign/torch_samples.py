"""PyTorch's own samples for multi-head attention, through the drop-in with every head on: all must be equal.

They come with the wheel, in torch.testing._internal (which needs expecttest): 64 + 64 inputs of `MultiheadAttention` in
training and in use, and 192 of `F.multi_head_attention_forward`. `make test-foreign` runs this file; by hand:
`pytest -m slow tests/foreign/torch_samples.py`. It is no part of the ordinary suite.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

from budgetformer.attention import BudgetedMultiheadAttention

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
MODULE = next(info for info in module_db if info.module_cls is nn.MultiheadAttention)
FUNCTION = next(info for info in op_db if info.name == "nn.functional.multi_head_attention_forward")


def same(found, expected, dtype):
    """Equal up to the tolerance, as a share of the largest number; None where None is expected."""
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found.shape == expected.shape
        error = (found - expected).abs().max() / expected.abs().max().clamp_min(1.0)
        assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("budget", [None, 1.0], ids=["as learned", "named"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "use"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_samples_of_the_module(dtype, training, budget):
    samples = MODULE.module_inputs_func(MODULE, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for sample in samples:
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        source = nn.MultiheadAttention(*args, **kwargs, dtype=dtype).train(training)
        ours = BudgetedMultiheadAttention(*args, **kwargs, dtype=dtype).train(training)
        ours.load_state_dict(source.state_dict())
        inputs, words = sample.forward_input.args, sample.forward_input.kwargs
        expected, expected_weights = source(*inputs, **words)
        found, weights = ours(*inputs, **words, budget=budget)
        same(found, expected, dtype)
        same(weights, expected_weights, dtype)
        if budget is None:  # then the router learns too, and the inputs have its gradient besides
            continue
        wanted = torch.autograd.grad(expected.sum() + expected.square().sum(), [*inputs, source.out_proj.weight])
        given = torch.autograd.grad(found.sum() + found.square().sum(), [*inputs, ours.out_proj.weight])
        for one, other in zip(given, wanted, strict=True):
            same(one, other, dtype)
    assert len(samples) == 64


def module_of(query, args, kwargs):
    """The drop-in that holds the weights of one functional sample."""
    _, _, width, heads, in_proj_weight, in_proj_bias, bias_k, bias_v, zero_attn, dropout, out_weight, out_bias = args
    separate = kwargs["use_separate_proj_weight"]
    other = {"kdim": width + 1, "vdim": width + 1} if separate else {}  # else the constructor packs the three matrices
    made = BudgetedMultiheadAttention(
        width, heads, dropout, add_bias_kv=True, add_zero_attn=zero_attn, dtype=query.dtype, **other
    )
    made.in_proj_bias, made.out_proj.weight, made.out_proj.bias = map(
        nn.Parameter, (in_proj_bias, out_weight, out_bias)
    )
    made.bias_k, made.bias_v = (nn.Parameter(bias.view(1, 1, -1)) for bias in (bias_k, bias_v))
    if separate:
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            setattr(made, name, nn.Parameter(kwargs[name]))
    else:
        made.in_proj_weight = nn.Parameter(in_proj_weight)
    return made.train(kwargs["training"])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_samples_of_the_function(dtype):
    samples = list(FUNCTION.sample_inputs("cpu", dtype, requires_grad=False))
    for sample in samples:
        query, (key, value, *_) = sample.input, sample.args
        torch.manual_seed(1)  # half of the samples have dropout: both draw the same
        expected, expected_weights = F.multi_head_attention_forward(query, *sample.args, **sample.kwargs)
        made = module_of(query, sample.args, sample.kwargs)
        torch.manual_seed(1)
        found, weights = made(query, key, value, attn_mask=sample.kwargs["attn_mask"])
        # Scores are in the hundreds here, and their rounding in fp32 moves what the softmax says by 1e-5, torch's too
        # (its answers in fp32 are up to 7.6e-6 from those in fp64). So this holds only while we round as torch does.
        same(found, expected, dtype)
        same(weights, expected_weights, dtype)
    assert len(samples) == 192
