"""Swap `nn.MultiheadAttention` for one that runs only a share of its heads, chosen anew for every input.

Run: python examples/dropin_attention.py
"""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from budgetformer.attention import BudgetedMultiheadAttention

torch.manual_seed(0)
words = {"embed_dim": 384, "num_heads": 12, "batch_first": True}
dense = nn.MultiheadAttention(**words).eval()
budgeted = BudgetedMultiheadAttention(**words).eval()
budgeted.load_state_dict(dense.state_dict())  # the same weights; the router starts with all heads on

texts = torch.randn(8, 64, 384)
padding = torch.zeros(8, 64, dtype=torch.bool)
padding[:4, 40:] = True  # the first four texts are shorter: True = padding, as in nn.MultiheadAttention


def count_flops(module: nn.Module, **options) -> tuple[torch.Tensor, int]:
    """The module's output and the FLOPs that PyTorch saw on the way."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output, _ = module(texts, texts, texts, key_padding_mask=padding, need_weights=False, **options)
    return output, counter.get_total_flops()


with torch.no_grad():
    expected, _ = dense(texts, texts, texts, key_padding_mask=padding)
    same, _ = budgeted(texts, texts, texts, key_padding_mask=padding)
real = ~padding
print(f"all heads on, largest difference to nn.MultiheadAttention: {(same - expected)[real].abs().max():.1e}")

_, whole = count_flops(budgeted, budget=1.0)
for budget in (1.0, 0.5, 0.25):
    _, flops = count_flops(budgeted, budget=budget)
    print(f"budget={budget:<4}  {flops / 1e6:6.1f} MFLOP, {flops / whole:.0%} of all heads")

# Every input of a batch can have its own budget; `attend` also tells which heads ran.
each = torch.tensor([0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1.0, 1.0])
with torch.no_grad():
    done = budgeted.attend(texts, keep=real, budget=each)
print("heads per input:", done.routing.chosen.sum(1).int().tolist())
