"""Counted work: the floating-point operations of an input, at its own length, for the heads that ran.

A multiply-add counts as two. Norms, softmax, activations and biases are left out, as torch's `FlopCounterMode` does,
which the tests check these formulas against. Numbers of tokens and heads are torch tensors (the count then has a
gradient) or numpy arrays, and so is what comes of them; torch itself is not loaded here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from budgetformer.config import BudgetConfig, EncoderConfig


@dataclass(frozen=True)
class Work:
    """Operations of each input of a batch, (batch,), float64. `*_dense` is the same input with every unit on."""

    attention: Any
    attention_dense: Any
    feed_forward: Any
    feed_forward_dense: Any
    router: Any
    rest: Any
    rest_dense: Any

    @property
    def total(self) -> Any:
        """All that ran, router included."""
        return self.attention + self.feed_forward + self.router + self.rest

    @property
    def total_dense(self) -> Any:
        """The dense twin, which has no router."""
        return self.attention_dense + self.feed_forward_dense + self.rest_dense

    def units(self, budget: BudgetConfig) -> tuple[Any, Any]:
        """What has a budget: operations of the units that ran, and of all of them."""
        if budget.blocks == 1:
            return self.attention, self.attention_dense
        return self.attention + self.feed_forward, self.attention_dense + self.feed_forward_dense


def _exact(numbers: Any) -> Any:
    return numbers.astype(np.float64) if isinstance(numbers, np.ndarray) else numbers.double()


def head(tokens: Any, config: EncoderConfig) -> Any:
    """One head over `tokens` tokens: its rows of W_Q, W_K, W_V, its scores and average, its columns of W_O."""
    n, d, size = _exact(tokens), config.hidden_size, config.head_size
    return 8 * n * d * size + 4 * n * n * size


def feed_forward(tokens: Any, config: EncoderConfig) -> Any:
    """One feed-forward sublayer."""
    return 4 * _exact(tokens) * config.hidden_size * config.intermediate_size


def layer(tokens: Any, config: EncoderConfig) -> tuple[Any, Any]:
    """Both kinds of unit in one layer, all of them: its heads, its feed-forward neurons."""
    return config.num_heads * head(tokens, config), feed_forward(tokens, config)


def router(config: EncoderConfig, budget: BudgetConfig) -> int:
    """The routers of one layer, whatever the length: controller and scorer read one pooled vector."""
    seen = config.hidden_size if budget.view == "mean" else 2 * config.hidden_size
    units = (config.num_heads,) if budget.blocks == 1 else (config.num_heads, budget.blocks)
    return sum(2 * (seen * budget.router_hidden + budget.router_hidden + seen * n) for n in units)


def again(gates: Any, blocks: Any = None) -> Any:
    """Second answers, 0 or 1 for each input: some unit ran twice. gates (batch, layer, head), blocks (batch, layer,
    block): how often each ran. A first answer that ran nothing at all leaves no trace, and is not counted.
    """
    twice = (gates > 1).any(-1).any(-1)
    return 1 * (twice if blocks is None else twice | (blocks > 1).any(-1).any(-1))


def work(
    tokens: Any,
    heads: Any,
    config: EncoderConfig,
    budget: BudgetConfig,
    *,
    labels: int,
    blocks: Any = None,
    again: Any = 0,
    dense_head: bool = False,
    routed: bool = True,
) -> Work:
    """tokens (batch,): real tokens of each input. heads (batch, layer): heads that ran. blocks (batch, layer): the
    share of each feed-forward layer that ran; None is all. again (batch,): second answers, 0 or 1, of which heads and
    blocks hold their part already. routed: routers ran too.
    """
    per_head = head(tokens, config)
    width = config.hidden_size
    one = feed_forward(tokens, config)
    rest = 0 * per_head + 2 * width * labels
    if dense_head:
        rest = rest + 2 * width * width
    if config.embedding_size not in (None, width):
        rest = rest + 2 * _exact(tokens) * config.embedding_size * width
    passes = 1 + again
    return Work(
        attention=per_head * _exact(heads).sum(1),
        attention_dense=per_head * float(config.num_heads * config.num_layers),
        feed_forward=one * (float(config.num_layers) * passes if blocks is None else _exact(blocks).sum(1)),
        feed_forward_dense=one * float(config.num_layers),
        router=0 * per_head + (config.num_layers * router(config, budget) if routed else 0),
        rest=rest * passes,
        rest_dense=rest,
    )


def of_answers(
    tokens: Any,
    gates: Any,
    blocks: Any,
    config: EncoderConfig,
    budget: BudgetConfig,
    *,
    labels: int,
    dense_head: bool,
) -> Work:
    """The work of answers. tokens (batch,); gates (batch, layer, head), blocks (batch, layer, block): how often each
    unit ran, so that what ran twice counts twice; blocks None is all, as often as the input was answered.
    """
    return work(
        tokens,
        gates.sum(-1),
        config,
        budget,
        labels=labels,
        blocks=None if blocks is None else blocks.mean(-1),
        again=again(gates, blocks),
        dense_head=dense_head,
        routed=budget.routes,
    )
