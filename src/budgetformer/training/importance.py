"""Where routers start from: how much the dense twin's loss leans on each head and block (Michel et al. 2019)."""

from typing import Any, cast

import torch
from torch import Tensor

from budgetformer import flops
from budgetformer.router import Router
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


def start_routers(model: Any, heads: Tensor, blocks: Tensor | None, encoded: Encoded) -> None:
    """Give routers the start that the model's budget names: a fixed order, the twin's importance as a prior, or none.

    heads, blocks: as `unit_importance` found them. encoded: the texts to train on, for their length.
    """
    budget = model.config.budget_config
    blocks = blocks if budget.blocks > 1 else None
    if budget.relevance == "fixed":
        fix_order(model, heads, blocks, block_cost(model, encoded))
    elif budget.prior > 0:
        start_from(model, heads, budget.prior, blocks)


def most_important(
    heads: Tensor, blocks: Tensor | None, share: float, block_cost: float
) -> tuple[Tensor, Tensor | None]:
    """The most important units per operation that cost `share` of all, at least one a layer and kind: 0/1 tables.

    heads, blocks (layer, unit): importance; blocks None: of the heads alone. block_cost: what a block costs, in heads.
    """
    tables = [heads] if blocks is None else [heads, blocks / block_cost]
    costs = [torch.ones_like(heads)]
    if blocks is not None:
        costs.append(torch.full_like(blocks, block_cost))
    on = [torch.zeros_like(table).scatter_(1, table.argmax(1, keepdim=True), 1.0) for table in tables]
    flat, cost, chosen = (torch.cat([table.flatten() for table in part]) for part in (tables, costs, on))
    for place in flat.argsort(descending=True).tolist():
        fits = float(chosen @ cost + 0.5 * cost[place]) <= share * float(cost.sum())
        if chosen[place] == 0 and fits:
            chosen[place] = 1.0
    heads_on = chosen[: heads.numel()].view_as(heads)
    return heads_on, None if blocks is None else chosen[heads.numel() :].view_as(blocks)


def block_cost(model: Any, encoded: Encoded) -> float:
    """What a block of feed-forward neurons costs, in heads, at the texts' mean length."""
    sizes, length = model.config.encoder_config, torch.tensor([sum(encoded.lengths) / len(encoded)])
    blocks = model.config.budget_config.blocks
    return float(flops.feed_forward(length, sizes) / blocks / flops.head(length, sizes))


@torch.no_grad()
def fix_order(model: Any, heads: Tensor, blocks: Tensor | None, cost: float) -> None:
    """Let every input have its units in the twin's order of importance, as many as the first answers' target buys.

    The routers learn nothing then (`BudgetConfig.relevance`): they are the most important units per operation, and a
    budget named by the caller adds to them or takes from them in that order. cost: of a block, in heads.
    """
    encoder, budget = model.budgetformer.encoder, model.config.budget_config
    first = most_important(heads, blocks, budget.first_target, cost)
    kinds = [(heads, first[0], encoder.profile, [layer.attention.router for layer in encoder.layers])]
    if blocks is not None and first[1] is not None:
        routers = [layer.feed_forward.router for layer in encoder.layers]
        kinds.append((blocks, first[1], encoder.block_profile, routers))
    for found, on, profile, routers in kinds:
        for router, row, share in zip(routers, _scores(found), on.mean(1), strict=True):
            router.scorer.weight.zero_()
            router.scorer.bias.copy_(row)
            _want(router, share)
            router.requires_grad_(False)
        profile.copy_(on.mean(1))


@torch.no_grad()
def set_first(model: Any, budget: float, tokens: float) -> None:
    """Let first answers, in a fixed order, spend what the named `budget` buys an input of `tokens` tokens."""
    encoder = model.budgetformer.encoder
    device = encoder.profile.device
    heads, blocks = encoder.counts(torch.tensor([budget], device=device), torch.tensor([tokens], device=device))
    for i, layer in enumerate(encoder.layers):
        _want(layer.attention.router, heads[0, i] / layer.attention.router.units)
        if blocks is not None:
            _want(layer.feed_forward.router, blocks[0, i] / layer.feed_forward.router.units)


def _want(router: Router, share: Tensor) -> None:
    """The same share of the units for every input: the controller's last weights are zero, its bias says how many."""
    lowest = min(router.budget.min_units, router.units) / router.units
    last = cast(torch.nn.Linear, router.controller[2])
    last.bias.copy_(torch.logit((share - lowest) / (1 - lowest), eps=1e-4))


def _scores(found: Tensor) -> Tensor:
    logs = found.clamp_min(1e-6).log()
    return (logs - logs.mean()) / logs.std().clamp_min(1e-6)
