"""An engine on labelled rows: the numbers of `metrics.py`, measured on the path and in the type that will be used."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from budgetformer import metrics
from budgetformer.data import match_labels
from budgetformer.engine.counting import counted
from budgetformer.engine.engine import Engine
from budgetformer.engine.packed import Output
from budgetformer.predict import Predictor, load_model
from budgetformer.text import Encoded
from budgetformer.tokens import Tokens, tokenise

if TYPE_CHECKING:
    from budgetformer.data import Rows

GAP_ROWS = 2000  # the gap asks the model in training's shape, which is slow, and a sample knows it well enough


def evaluate(predictor: Predictor, rows: "Rows", *, progress: Any = None) -> dict[str, Any]:
    """Score the answers to rows that all have a text and a label; the keys are those of `metrics.evaluate`.

    Beside them: engine, what was measured; soft_hard_rows, how many rows the gap was taken on, from the first on. There
    is no gap where no router decides, in a dense model or with a named budget. Time is from token ids to answers.
    progress: called with the number of texts done, after each batch.

    Raises:
        DataError: a label that the model does not know.
        UsageError: a text without a token.
    """
    engine = predictor.engine
    labels = _labels(predictor, rows)
    texts = [text or "" for text in rows.texts]
    pairs = None if rows.pairs is None else [pair or "" for pair in rows.pairs]
    tokens = tokenise(engine.tokenizer, texts, pairs, max_length=engine.max_length)
    answers = _measured(predictor, tokens, progress)
    blocks = None if answers.blocks is None else answers.blocks.numpy()
    done = counted(engine, answers.tokens.numpy(), answers.gates.numpy(), blocks)
    path = engine.path
    return {
        "rows": len(tokens),
        "truncated": sum(one.truncated for one in tokens),
        **metrics.scores(answers.logits, labels),
        **metrics.costs_of(answers, done, engine.weights.budget),
        "seconds_per_1000": 1000 * answers.seconds / len(tokens),
        "peak_memory_mb": answers.peak_memory_mb,
        "engine": {
            "path": path.name,
            "dtype": path.dtype,
            "threads": path.threads,
            "batch_tokens": engine.batch_tokens,
        },
        **metrics.distributions(answers, labels, engine.labels, metrics.spent(done, engine.weights.budget)),
        **(_gap(engine, tokens, labels, answers) if _routed(predictor) else {}),
    }


def _labels(predictor: Predictor, rows: "Rows") -> list[Any]:
    """Each row's place among the model's labels, or its multi-hot row over them."""
    engine, given, lines = predictor.engine, rows.labels or [], rows.lines
    if engine.multi_label:
        separator = predictor.label_separator
        return match_labels(given, engine.labels, label_separator=separator, lines=lines, source=rows.source)
    return match_labels(given, engine.labels, lines=lines, source=rows.source)


def _measured(predictor: Predictor, tokens: list[Tokens], progress: Any) -> metrics.Predictions:
    engine, policy = predictor.engine, {"budget": predictor.budget, "margin": predictor.margin}
    # Threads are started and weights touched by the shortest text: what the others need on top is what they need.
    engine.forward([min(tokens, key=len)], **policy)
    with metrics.peak_memory(torch.device("cpu")) as peak:
        start = time.perf_counter()
        output = engine.forward(tokens, **policy, progress=progress)
        seconds = time.perf_counter() - start
    return _predictions(output, tokens, seconds, peak.megabytes)


def _predictions(output: Output, tokens: list[Tokens], seconds: float, megabytes: float | None) -> metrics.Predictions:
    lengths = np.array([len(one) for one in tokens])
    logits, gates, wanted, lengths = map(torch.from_numpy, (output.logits, output.gates, output.wanted, lengths))
    blocks = None if output.blocks is None else torch.from_numpy(output.blocks).float()
    return metrics.Predictions(logits, gates.float(), wanted, lengths, seconds, megabytes, blocks)


def _routed(predictor: Predictor) -> bool:
    return predictor.budget is None and predictor.engine.budget is None and predictor.engine.weights.budget.routes


def _gap(
    engine: Engine, tokens: list[Tokens], labels: list[Any], answers: metrics.Predictions
) -> dict[str, float | int]:
    if engine.folder is None:
        return {}
    model, _ = load_model(engine.folder)
    some = Encoded([one.item() for one in tokens[:GAP_ROWS]])
    found = metrics.soft_hard_gap(model, some, answers.logits[:GAP_ROWS], labels[:GAP_ROWS], batch_size=64)
    return {**found, "soft_hard_rows": len(some)}
