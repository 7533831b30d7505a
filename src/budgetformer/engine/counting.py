"""What an engine's answers cost: the counted work of `flops`, for a model as the engine holds it."""

import numpy as np

from budgetformer import flops
from budgetformer.engine.engine import Engine


def counted(engine: Engine, tokens: np.ndarray, gates: np.ndarray, blocks: np.ndarray | None = None) -> flops.Work:
    """Operations of inputs of `tokens` (batch,) tokens when the heads in `gates` (batch, layer, head) ran, and of the
    feed-forward layers those `blocks` (batch, layer, block), or all; what ran twice counts twice.
    """
    weights = engine.weights
    return flops.of_answers(
        tokens,
        gates,
        blocks,
        weights.encoder,
        weights.budget,
        labels=len(weights.labels),
        dense_head=weights.head_hidden is not None,
    )
