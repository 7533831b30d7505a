"""Where a router starts from: how much the dense twin's loss leans on each head (Michel et al. 2019)."""

from typing import Any

import torch
from torch import Tensor

from budgetformer.text import Encoded, collator


def head_importance(model: Any, encoded: Encoded, *, batch_size: int = 32, batches: int = 40, seed: int = 0) -> Tensor:
    """Mean |d loss / d gate| of each head over a sample of labelled inputs, normed per layer: (layer, head)."""
    model.eval()
    device = next(model.parameters()).device
    collate = collator(model.config.pad_token_id or 0)
    found = torch.zeros(model.config.num_layers, model.config.num_heads, device=device)
    order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(seed)).tolist()
    names = ("input_ids", "token_type_ids", "labels")
    for start in range(0, min(len(order), batches * batch_size), batch_size):
        items = [{k: v for k, v in encoded[i].items() if k in names} for i in order[start : start + batch_size]]
        batch = {k: v.to(device) for k, v in collate(items).items()}
        gates = torch.ones(len(items), *found.shape, device=device, requires_grad=True)
        (grad,) = torch.autograd.grad(model(**batch, gates=gates).loss, gates)
        found += grad.abs().sum(0)
    return found / found.norm(dim=-1, keepdim=True).clamp_min(1e-12)


@torch.no_grad()
def start_from(model: Any, importance: Tensor, scale: float) -> None:
    """Give every router the twin's importance as its first opinion: scores with mean 0 and standard deviation `scale`.

    All heads stay on at first; the prior only says which go first when the budget comes down.
    """
    for layer, found in zip(model.budgetformer.encoder.layers, importance, strict=True):
        logs = found.clamp_min(1e-6).log()
        layer.attention.router.scorer.bias.copy_(scale * (logs - logs.mean()) / logs.std().clamp_min(1e-6))
