"""Counted work: the floating-point operations of an input, at its own length, for the heads that ran.

A multiply-add counts as two. Norms, softmax, activations and biases are left out, as torch's `FlopCounterMode` does,
which the tests check these formulas against.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from budgetformer.config import BudgetConfig, EncoderConfig


@dataclass(frozen=True)
class Work:
    """Operations of each input of a batch, (batch,), float64. `*_dense` is the same input with every head on."""

    attention: Tensor
    attention_dense: Tensor
    router: Tensor
    rest: Tensor

    @property
    def total(self) -> Tensor:
        """All that ran, router included."""
        return self.attention + self.router + self.rest

    @property
    def total_dense(self) -> Tensor:
        """The dense twin, which has no router."""
        return self.attention_dense + self.rest


def head(tokens: Tensor, config: EncoderConfig) -> Tensor:
    """One head over `tokens` tokens: its rows of W_Q, W_K, W_V, its scores and average, its columns of W_O."""
    n, d, size = tokens.double(), config.hidden_size, config.head_size
    return 8 * n * d * size + 4 * n * n * size


def feed_forward(tokens: Tensor, config: EncoderConfig) -> Tensor:
    """One feed-forward sublayer."""
    return 4 * tokens.double() * config.hidden_size * config.intermediate_size


def router(config: EncoderConfig, budget: BudgetConfig) -> int:
    """One router, whatever the length: controller and scorer read one pooled vector."""
    seen = config.hidden_size if budget.view == "mean" else 2 * config.hidden_size
    return 2 * (seen * budget.router_hidden + budget.router_hidden + seen * config.num_heads)


def work(
    tokens: Tensor,
    heads: Tensor,
    config: EncoderConfig,
    budget: BudgetConfig,
    *,
    labels: int,
    dense_head: bool = False,
    routed: bool = True,
) -> Work:
    """tokens (batch,): real tokens of each input. heads (batch, layer): heads that ran. routed: routers ran too."""
    per_head = head(tokens, config)
    width = config.hidden_size
    rest = config.num_layers * feed_forward(tokens, config) + 2 * width * labels
    if dense_head:
        rest = rest + 2 * width * width
    if config.embedding_size not in (None, width):
        rest = rest + 2 * tokens.double() * config.embedding_size * width
    return Work(
        attention=per_head * heads.double().sum(1),
        attention_dense=per_head * float(config.num_heads * config.num_layers),
        router=torch.full_like(per_head, float(config.num_layers * router(config, budget)) if routed else 0.0),
        rest=rest,
    )
