"""A model without the units that texts like yours never choose: an ordinary folder, smaller on disk and in memory.

What is cut is gone: its weights are in neither the file nor the packed weights, whatever the path. Routers still say
how many units a text wants, as before; which ones, they choose among those left. So a text that never chose a unit that
was cut gets the answer it got before, at any budget.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from budgetformer.engine.engine import Engine
from budgetformer.engine.packed import left
from budgetformer.engine.saved import Saved, write_saved
from budgetformer.engine.tuning import agreement, decided
from budgetformer.errors import BudgetFormerError, UsageError
from budgetformer.tokens import tokenise

if TYPE_CHECKING:
    from budgetformer.encoder import EncoderLayer

COPIED = ("tokenizer.json", "tokenizer_config.json")


def export(
    folder: str | Path,
    into: str | Path,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    min_use: float = 0.0,
    min_agreement: float = 0.99,
) -> dict[str, Any]:
    """Write the model in `folder` without the units that a share of at most `min_use` of the texts chooses.

    Use is that of first answers with the learned budget. A second answer, where the model gives one, runs all that is
    left; the twin's stays as it was, since nothing of a kept twin is cut. Every layer keeps its most used head and
    block at least.

    into: a new folder. Returns the report that is kept there as export.json: what was cut, labels and logits of the
    texts before and after, sizes before and after (of packed weights where compiled kernels compute).

    Raises:
        ModelFolderError: `folder` is no model of ours.
        UsageError: nothing was ever left out, as in a dense model, or the model is compact already.
        BudgetFormerError: nothing would be cut, or fewer than `min_agreement` of the texts keep their label.
    """
    into = Path(into)
    engine = Engine.load(folder)
    encoder, budget = engine.weights.encoder, engine.weights.budget
    if not budget.routes:
        raise UsageError(f"{folder}: every text runs every unit of a dense model, so there is none to cut")
    if encoder.kept_heads is not None:
        raise UsageError(f"{folder}: is compact already; give the folder it was made from")
    tokens = tokenise(engine.tokenizer, texts, pairs, max_length=engine.max_length)
    chosen = engine.forward(tokens, margin=0.0)
    heads, blocks = used(chosen.gates, min_use), None if chosen.blocks is None else used(chosen.blocks, min_use)
    if _all(heads, encoder.num_heads) and (blocks is None or _all(blocks, budget.blocks)):
        raise BudgetFormerError(
            f"each head and block is chosen by more than {100 * min_use:g} % of {len(tokens):,} texts, so there is "
            "nothing to cut; raise --min-use"
        )
    write_without(folder, into, heads, blocks)
    for name in COPIED:
        shutil.copy(Path(folder) / name, into)
    if engine.saved.dtype is not None:  # what else was measured, was measured on the whole model
        write_saved(into, Saved(dtype=engine.saved.dtype, agreement=engine.saved.agreement))
    made = replace(Engine.load(into, path=engine.path.name), batch_tokens=engine.batch_tokens)
    before, after = engine.forward(tokens), made.forward(tokens)
    answers = [decided(output.logits, engine.multi_label) for output in (before, after)]
    kept = agreement(*answers)
    if kept < min_agreement:
        raise BudgetFormerError(
            f"min_use {min_use:g}: {100 * kept:.2f} % of {len(texts):,} texts keep their label, "
            f"{100 * min_agreement:g} % must, and nothing was written; lower --min-use, or --min-agreement"
        )
    missed = chosen.gates > left(heads, encoder.num_layers, encoder.num_heads)
    touched = missed.any((1, 2))
    if chosen.blocks is not None:
        touched |= (chosen.blocks > left(blocks, encoder.num_layers, budget.blocks)).any((1, 2))
    report = {
        "format": "compact",
        "texts": len(tokens),
        "min_use": min_use,
        "heads": _counts(heads, encoder.num_heads),
        **({} if blocks is None else {"blocks": _counts(blocks, budget.blocks)}),
        "texts_that_chose_a_cut_unit": int(touched.sum()),
        "labels_changed": round((1 - kept) * len(tokens)),
        "agreement": kept,
        "largest_difference": float(np.abs(before.logits - after.logits).max()),
        "largest_difference_untouched": float(np.abs(before.logits - after.logits)[~touched].max(initial=0.0)),
        "file_bytes": [(Path(place) / "model.safetensors").stat().st_size for place in (folder, into)],
        **_memory(engine, made),
        "cut_heads": _cut(heads, encoder.num_heads),
        **({} if blocks is None else {"cut_blocks": _cut(blocks, budget.blocks)}),
    }
    (into / "export.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def used(gates: np.ndarray, min_use: float) -> list[list[int]]:
    """Of each layer the units that more than `min_use` of the texts ran, at least the most used. gates: (text, layer,
    unit).
    """
    use = gates.mean(0)
    return [[int(u) for u in np.flatnonzero((row > min_use) | (row == row.max()))] for row in use]


def write_without(folder: str | Path, into: Path, heads: list[list[int]], blocks: list[list[int]] | None) -> None:
    """Write the model in `folder` with `heads` and `blocks` of each layer alone."""
    from budgetformer.hf import BudgetFormerForSequenceClassification

    model = BudgetFormerForSequenceClassification.from_pretrained(folder, use_safetensors=True)
    for i, layer in enumerate(cast("list[EncoderLayer]", list(model.budgetformer.encoder.layers))):
        layer.attention.cut(heads[i])
        if blocks is not None:
            layer.feed_forward.cut(blocks[i])
    model.config.kept_heads, model.config.kept_blocks = heads, blocks
    model.save_pretrained(into)


def _all(kept: list[list[int]], units: int) -> bool:
    return all(len(names) == units for names in kept)


def _counts(kept: list[list[int]], units: int) -> list[int]:
    """Units before and after."""
    return [len(kept) * units, sum(map(len, kept))]


def _cut(kept: list[list[int]], units: int) -> list[list[int]]:
    return [sorted(set(range(units)) - set(names)) for names in kept]


def _memory(*engines: Engine) -> dict[str, list[int]]:
    """Bytes of the packed weights, where kernels compute."""
    sizes = [getattr(engine.path, "resident_bytes", None) for engine in engines]
    return {} if None in sizes else {"memory_bytes": cast("list[int]", sizes)}
