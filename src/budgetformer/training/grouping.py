"""Which neurons share a block: those that an input needs together, so that a block can be left out as a whole.

Three ways (after MoEfication, Zhang et al. 2022): neurons as they lie, clustered by their input weights, or clustered
by what fires together on real texts. The neurons are then sorted once, W1, b1 and W2 alike: a sum has no order.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from budgetformer.text import Encoded, collator


@torch.no_grad()
def group_neurons(model: Any, blocks: int, way: str, encoded: Encoded | None = None, *, seed: int = 0) -> list[Tensor]:
    """Sort each layer's feed-forward neurons so that every run of `inner / blocks` is a group; returns the orders.

    The function stays the same up to rounding: with every block on, each output is the same sum in another order.
    encoded: texts to look at, for "coactivation".
    """
    layers = model.budgetformer.encoder.layers
    seen = _activations(model, encoded, seed) if way == "coactivation" and encoded is not None else None
    orders = []
    for i, layer in enumerate(layers):
        up, down = layer.feed_forward.up, layer.feed_forward.down
        if way == "contiguous":
            order = torch.arange(up.out_features)
        else:
            features = up.weight.float() if seen is None else seen[i]
            order = torch.from_numpy(balanced_clusters(_unit(features).cpu().numpy(), blocks, seed))
            order = order.to(up.weight.device)
        up.weight.copy_(up.weight[order])
        up.bias.copy_(up.bias[order])
        down.weight.copy_(down.weight[:, order])
        orders.append(order)
    return orders


def _unit(features: Tensor) -> Tensor:
    """Rows centred over neurons and normed: neurons that fire together look alike, however strongly they fire."""
    centred = features - features.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True).clamp_min(1e-12)


def _activations(model: Any, encoded: Encoded, seed: int, texts: int = 1000, batch_size: int = 32) -> list[Tensor]:
    """Mean activation of every neuron on every text, (neuron, text), layer by layer: a router too decides by text."""
    found: list[list[Tensor]] = [[] for _ in model.budgetformer.encoder.layers]
    keep: list[Tensor] = []

    def listen(i: int):
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            fired = module.activation_of(output) * keep[0][..., None]
            found[i].append(fired.sum(1) / keep[0].sum(1, keepdim=True))

        return hook

    hooks = []
    for i, layer in enumerate(model.budgetformer.encoder.layers):
        layer.feed_forward.up.activation_of = layer.feed_forward.activation
        hooks.append(layer.feed_forward.up.register_forward_hook(listen(i)))
    model.eval()
    collate = collator(model.config.pad_token_id or 0)
    device = next(model.parameters()).device
    picked = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(seed))[:texts].tolist()
    try:
        for start in range(0, len(picked), batch_size):
            items = [
                {k: v for k, v in encoded[i].items() if k in ("input_ids", "token_type_ids")}
                for i in picked[start : start + batch_size]
            ]
            batch = {k: v.to(device) for k, v in collate(items).items()}
            keep[:] = [batch["attention_mask"].float()]
            gates = torch.ones(len(items), model.config.num_layers, model.config.num_heads, device=device)
            model(**batch, gates=gates)
    finally:
        for hook, layer in zip(hooks, model.budgetformer.encoder.layers, strict=True):
            hook.remove()
            del layer.feed_forward.up.activation_of
    return [torch.cat(parts).T for parts in found]


def balanced_clusters(features: np.ndarray, clusters: int, seed: int = 0, rounds: int = 15) -> np.ndarray:
    """An order of the rows in which every run of `len / clusters` is a cluster: k-means with equal sizes.

    Each round, rows choose centres by how much they would lose by their second choice, as long as there is room.
    """
    size, rest = divmod(len(features), clusters)
    if rest:
        raise ValueError(f"{len(features)} rows cannot be cut into {clusters} equal clusters")
    dice = np.random.default_rng(seed)
    centres = features[dice.choice(len(features), clusters, replace=False)]
    owner = np.zeros(len(features), int)
    for _ in range(rounds):
        owner = _assign(features @ centres.T, size)
        made = np.stack([features[owner == c].mean(0) for c in range(clusters)])
        made /= np.linalg.norm(made, axis=1, keepdims=True).clip(1e-12)
        if np.allclose(made, centres):
            break
        centres = made
    return np.argsort(owner, kind="stable")


def _assign(likeness: np.ndarray, size: int) -> np.ndarray:
    """Each row to a column of at most `size` rows; who has most to lose chooses first."""
    rows, columns = likeness.shape
    owner, room = np.full(rows, -1), np.full(columns, size)
    open_likeness = likeness.copy()
    waiting = np.arange(rows)
    while len(waiting):
        scores = open_likeness[waiting]
        best = scores.argmax(1)
        top = scores[np.arange(len(waiting)), best]
        second = np.partition(scores, -2, axis=1)[:, -2] if (room > 0).sum() > 1 else np.full(len(waiting), -np.inf)
        order = np.argsort(-(top - second), kind="stable")
        for place in order:
            if room[best[place]] > 0:
                owner[waiting[place]] = best[place]
                room[best[place]] -= 1
        open_likeness[:, room == 0] = -np.inf
        waiting = np.flatnonzero(owner < 0)
    return owner
