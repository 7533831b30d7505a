"""Where routers start from: how much the dense twin's loss leans on each head and block (Michel et al. 2019)."""

from typing import Any

import torch
from torch import Tensor

from budgetformer.text import Encoded, collator


def unit_importance(
    model: Any, encoded: Encoded, *, blocks: int = 1, batch_size: int = 32, batches: int = 40, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Mean |d loss / d gate| of each head and of each of `blocks` equal blocks of neurons: (layer, unit) of both kinds.

    Over a sample of labelled inputs, each layer normed. For other blocks than contiguous ones the neurons are to be
    sorted first.
    """
    model.eval()
    device = next(model.parameters()).device
    collate = collator(model.config.pad_token_id or 0)
    layers, heads = model.config.num_layers, model.config.num_heads
    found = [torch.zeros(layers, units, device=device) for units in (heads, blocks)]
    order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(seed)).tolist()
    names = ("input_ids", "token_type_ids", "labels")
    for start in range(0, min(len(order), batches * batch_size), batch_size):
        items = [{k: v for k, v in encoded[i].items() if k in names} for i in order[start : start + batch_size]]
        batch = {k: v.to(device) for k, v in collate(items).items()}
        gates = [torch.ones(len(items), *sums.shape, device=device, requires_grad=True) for sums in found]
        loss = model(**batch, gates=gates[0], blocks=gates[1] if blocks > 1 else None).loss
        asked = gates if blocks > 1 else gates[:1]
        for sums, grad in zip(found, torch.autograd.grad(loss, asked), strict=False):
            sums += grad.abs().sum(0)
    heads_found, blocks_found = (sums / sums.norm(dim=-1, keepdim=True).clamp_min(1e-12) for sums in found)
    return heads_found, blocks_found


def head_importance(model: Any, encoded: Encoded, **options: Any) -> Tensor:
    """Of the heads alone: (layer, head)."""
    return unit_importance(model, encoded, **options)[0]


@torch.no_grad()
def start_from(model: Any, importance: Tensor, scale: float, blocks: Tensor | None = None) -> None:
    """Give every router the twin's importance as its first opinion: scores with mean 0 and standard deviation `scale`.

    All units stay on at first; the prior only says which go first when the budget comes down.
    """
    layers = model.budgetformer.encoder.layers
    for layer, found in zip(layers, importance, strict=True):
        layer.attention.router.scorer.bias.copy_(scale * _scores(found))
    if blocks is not None:
        for layer, found in zip(layers, blocks, strict=True):
            layer.feed_forward.router.scorer.bias.copy_(scale * _scores(found))


def _scores(found: Tensor) -> Tensor:
    logs = found.clamp_min(1e-6).log()
    return (logs - logs.mean()) / logs.std().clamp_min(1e-6)
