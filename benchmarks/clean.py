"""The plain torch encoder that everything is compared with: packed projections, SDPA, nothing else.

It is also the reference for what a selection must answer: it computes every head and block and multiplies those that
do not run by zero.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CleanLayer(nn.Module):
    """One BERT layer."""

    def __init__(self, layer: Any, heads: int):
        super().__init__()
        own = layer.attention.self
        width = own.query.in_features
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        with torch.no_grad():
            for name in ("weight", "bias"):
                parts = [getattr(part, name) for part in (own.query, own.key, own.value)]
                getattr(self.qkv, name).copy_(torch.cat(parts))
        self.out, self.out_norm = layer.attention.output.dense, layer.attention.output.LayerNorm
        self.up, self.down, self.down_norm = layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm

    def forward(
        self, x: Tensor, mask: Tensor | None = None, gates: Tensor | None = None, blocks: Tensor | None = None
    ) -> Tensor:
        """gates (batch, head), blocks (batch, block): 0 where a head or block does not count."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if gates is not None:
            attended = attended * gates[:, :, None, None]
        x = self.out_norm(x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width)))
        inner = F.gelu(self.up(x))
        if blocks is not None:
            inner = (inner.unflatten(-1, (blocks.shape[1], -1)) * blocks[:, None, :, None]).flatten(-2)
        return self.down_norm(x + self.down(inner))


class CleanClassifier(nn.Module):
    """Ids to logits."""

    def __init__(self, bert: Any, classifier: nn.Linear):
        super().__init__()
        tables = bert.embeddings
        self.word, self.position = tables.word_embeddings, tables.position_embeddings
        self.token_type, self.norm = tables.token_type_embeddings, tables.LayerNorm
        self.layers = nn.ModuleList(CleanLayer(layer, bert.config.num_attention_heads) for layer in bert.encoder.layer)
        self.classifier = classifier
        self.requires_grad_(False).eval()

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, gates: Tensor | None = None, blocks: Tensor | None = None
    ) -> Tensor:
        """ids (batch, token). mask (batch, token) bool, True for a token; None when no input is padded.

        gates (batch, layer, head), blocks (batch, layer, block). Returns logits (batch, labels).
        """
        x = self.norm(self.word(ids) + self.position.weight[: ids.shape[1]] + self.token_type.weight[0])
        keep = None if mask is None else mask[:, None, None, :]
        for i, layer in enumerate(self.layers):
            chosen = (None if gates is None else gates[:, i], None if blocks is None else blocks[:, i])
            x = layer(x, keep, *chosen)
        if mask is None:
            pooled = x.mean(1)
        else:
            weight = mask.to(x.dtype)
            pooled = torch.einsum("btd,bt->bd", x, weight) / weight.sum(1, keepdim=True)
        return self.classifier(pooled)


@torch.inference_mode()
def reference(
    model: CleanClassifier, inputs: Any, gates: np.ndarray | None = None, blocks: np.ndarray | None = None
) -> np.ndarray:
    """Logits (inputs, labels) in the order of the inputs, for a selection."""
    made = np.zeros((len(inputs), model.classifier.out_features), np.float32)
    for batch in inputs.padded():
        parts = [None if part is None else torch.as_tensor(part[batch.rows]).float() for part in (gates, blocks)]
        mask = None if batch.full else torch.as_tensor(batch.mask).bool()
        made[batch.rows] = model(torch.as_tensor(batch.ids), mask, *parts).numpy()
    return made
