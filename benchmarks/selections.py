"""Which heads and feed-forward blocks run, drawn at random, and the work that is left.

Until models are trained for a budget, random sets stand in for chosen ones: other heads for every input and layer and
other numbers of them, which is the hardest case for an engine. What is computed is the same; what it is worth is not
asked here.
"""

from dataclasses import dataclass

import numpy as np

from budgetformer import flops
from budgetformer.config import BudgetConfig, EncoderConfig

JITTER = 2.0  # an input gets up to so many units more or fewer than the mean, as far as there is room


@dataclass(frozen=True)
class Selection:
    """Mean shares of heads and of feed-forward blocks, in (0, 1]; 1 runs all."""

    heads: float = 1.0
    blocks: float = 1.0

    @property
    def name(self) -> str:
        """As the table says it."""
        if self.dense:
            return "dense"
        return f"heads {self.heads:g}" if self.blocks == 1.0 else f"heads+blocks {self.heads:g}"

    @property
    def dense(self) -> bool:
        """Everything runs."""
        return self.heads == 1.0 and self.blocks == 1.0

    def draw(
        self, batch: int, config: EncoderConfig, blocks: int, *, seed: int = 0
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Gates (batch, layer, head) and blocks (batch, layer, block), uint8; None where all run."""
        random = np.random.default_rng([seed, batch, round(1000 * self.heads), round(1000 * self.blocks)])
        shape = (batch, config.num_layers)
        gates = None if self.heads == 1.0 else some(self.heads, (*shape, config.num_heads), random)
        chosen = None if self.blocks == 1.0 else some(self.blocks, (*shape, blocks), random)
        return gates, chosen


# fmt: off
DENSE = Selection()
SELECTIONS = (
    DENSE,
    Selection(heads=0.5), Selection(heads=0.25), Selection(heads=0.1),
    Selection(heads=0.5, blocks=0.5), Selection(heads=0.25, blocks=0.25),
)
# fmt: on


def some(share: float, shape: tuple[int, int, int], random: np.random.Generator) -> np.ndarray:
    """Gates (batch, layer, unit), uint8, of which `share` are 1 in the mean and at least one in every layer.

    Each input has a budget of its own around the mean, except a lone one, whose budget is the mean; a budget between
    two whole numbers is rounded at random, layer by layer.
    """
    batch, layers, units = shape
    mean = max(share * units, 1.0)
    room = min(JITTER, mean - 1.0, units - mean) if batch > 1 else 0.0
    wanted = mean + random.uniform(-room, room, (batch, 1)) - 1e-9
    count = np.clip(np.floor(wanted + random.random((batch, layers))), 1, units)
    rank = random.random(shape).argsort(-1).argsort(-1)
    return (rank < count[..., None]).astype(np.uint8)


def work(
    lengths: np.ndarray, gates: np.ndarray | None, blocks: np.ndarray | None, config: EncoderConfig, labels: int
) -> float:
    """Counted FLOPs of a batch at its own lengths (`budgetformer.flops`), for the heads and blocks that run."""
    tokens, layers = np.asarray(lengths), config.num_layers
    heads = np.full((len(tokens), layers), config.num_heads) if gates is None else gates.sum(-1, dtype=np.int64)
    done = flops.work(tokens, heads, config, BudgetConfig(), labels=labels, routed=False).total
    if blocks is not None:
        left_out = layers - blocks.mean(-1).sum(-1)
        done = done - left_out * flops.feed_forward(tokens, config)
    return float(done.sum())
