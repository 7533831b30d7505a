"""What a model is worth and what it costs on labelled texts: scores, heads that ran, counted FLOPs, time, memory.

Of a model in torch, as training has it; `evaluate.py` asks the engine and takes the numbers from here.
"""

import ctypes
import gc
import math
import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from budgetformer import flops
from budgetformer.config import BudgetConfig
from budgetformer.diagnostics import diagnose
from budgetformer.router import Router
from budgetformer.text import Encoded, collator, length_batches


@dataclass(frozen=True)
class Predictions:
    """Answers in the order of the inputs. logits (rows, labels), gates (rows, layer, head), tokens (rows,).

    blocks (rows, layer, block) where feed-forward blocks have a budget. peak_memory_mb: None where it was not measured.
    """

    logits: Tensor
    gates: Tensor
    wanted: Tensor
    tokens: Tensor
    seconds: float
    peak_memory_mb: float | None
    blocks: Tensor | None = None


@torch.inference_mode()
def predict(
    model: Any,
    encoded: Encoded,
    *,
    batch_size: int = 64,
    budget: float | None = None,
    progress: Any = None,
    memory: bool = False,
) -> Predictions:
    """Run a model, in the mode it is in, over batches of similar length, and put the answers back in order.

    memory: measure the peak too, for which the process first gives back what it can, and that takes time.
    """
    device = next(model.parameters()).device
    collate = collator(model.config.pad_token_id or 0)
    batches = length_batches(encoded.lengths, batch_size)
    logits, gates, blocks, wanted = [], [], [], []
    with peak_memory(device) if memory else nullcontext(_Peak()) as peak:
        start = time.perf_counter()
        for rows in batches:
            items = [{k: v for k, v in encoded[i].items() if k in ("input_ids", "token_type_ids")} for i in rows]
            batch = {k: v.to(device) for k, v in collate(items).items()}
            out = model(**batch, budget=budget)
            logits.append(out.logits.float().cpu())
            gates.append(out.gates.cpu())
            if out.blocks is not None:
                blocks.append(out.blocks.cpu())
            wanted.append(out.wanted.float().cpu())
            if progress is not None:
                progress(len(rows))
        seconds = time.perf_counter() - start
    back = torch.tensor([i for rows in batches for i in rows]).argsort()
    return Predictions(
        torch.cat(logits)[back],
        torch.cat(gates)[back],
        torch.cat(wanted)[back],
        torch.tensor(encoded.lengths),
        seconds,
        peak.megabytes,
        torch.cat(blocks)[back] if blocks else None,
    )


def evaluate(
    model: Any,
    encoded: Encoded,
    *,
    batch_size: int = 64,
    budget: float | None = None,
    details: bool = True,
    progress: Any = None,
) -> dict[str, Any]:
    """Score a model on inputs with labels. Keys are those of metrics.json; `details` adds distributions and the gap."""
    model.eval()
    answers = predict(model, encoded, batch_size=batch_size, budget=budget, progress=progress, memory=True)
    labels = [item["labels"] for item in encoded.items]
    config = model.config
    result: dict[str, Any] = {"rows": len(encoded), "truncated": encoded.truncated}
    result |= scores(answers.logits, labels)
    done = work(answers, config)
    result |= costs_of(answers, done, config.budget_config)
    result["seconds_per_1000"] = 1000 * answers.seconds / len(encoded)
    result["peak_memory_mb"] = answers.peak_memory_mb
    if details:
        names = [config.id2label[i] for i in range(config.num_labels)]
        result |= distributions(answers, labels, names, spent(done, config.budget_config))
        result |= soft_hard_gap(model, encoded, answers.logits, labels, batch_size=batch_size)
    return result


def scores(logits: Tensor, labels: Sequence[Any]) -> dict[str, float]:
    """accuracy (all labels right, when there are several), macro_f1 and the mean loss."""
    from sklearn.metrics import accuracy_score, f1_score

    truth = torch.tensor(np.asarray(labels))
    guess = (logits > 0).long() if truth.dim() > 1 else logits.argmax(-1)
    return {
        "accuracy": float(accuracy_score(truth, guess)),
        "macro_f1": float(f1_score(truth, guess, average="macro", zero_division=0)),  # pyright: ignore[reportArgumentType]
        "loss": task_loss(logits, truth),
    }


def task_loss(logits: Tensor, truth: Tensor) -> float:
    """The mean loss. truth: numbers of labels (batch,), or 0 and 1 (batch, label) where there may be several."""
    if truth.dim() > 1:
        return float(F.binary_cross_entropy_with_logits(logits, truth.float()))
    return float(F.cross_entropy(logits, truth))


def work(answers: Predictions, config: Any) -> flops.Work:
    """Operations of each input, at its own length, by a model's config."""
    return flops.of_answers(
        answers.tokens,
        answers.gates,
        answers.blocks,
        config.encoder_config,
        config.budget_config,
        labels=config.num_labels,
        dense_head=config.head_hidden is not None,
    )


def costs(answers: Predictions, config: Any) -> dict[str, float]:
    """Units that ran, and counted FLOPs at each input's own length against the same input with every unit on."""
    return costs_of(answers, work(answers, config), config.budget_config)


def costs_of(answers: Predictions, done: flops.Work, budget: BudgetConfig) -> dict[str, float]:
    """The same, once the work is counted."""
    share = answers.gates.mean((1, 2))
    ran, every = done.units(budget)
    blocks = {} if answers.blocks is None else {"block_share": float(answers.blocks.mean())}
    again = flops.again(answers.gates, answers.blocks).float().mean()
    return {
        "units_flops_share": float(ran.sum() / every.sum()),
        "units_flops_share_std": float(spent(done, budget).std()),
        **blocks,
        **({"answered_again": float(again)} if again > 0 else {}),
        "head_share": float(share.mean()),
        "head_share_std": float(share.std(correction=0)),
        "attention_flops_share": float(done.attention.sum() / done.attention_dense.sum()),
        "flops_share": float(done.total.sum() / done.total_dense.sum()),
        "router_flops_share": float(done.router.sum() / done.total_dense.sum()),
        "flops_per_text": float(done.total.mean()),
    }


def spent(done: flops.Work, budget: BudgetConfig) -> np.ndarray:
    """The share of the units' FLOPs that each input ran, (rows,); above 1 where it was answered twice."""
    ran, every = done.units(budget)
    return np.asarray(ran / every)


def distributions(answers: Predictions, labels: Sequence[Any], names: list[str], share: np.ndarray) -> dict[str, Any]:
    """Where the units went: by layer, by class, and the histogram over inputs of `share` (rows,), what each has spent
    of the units' FLOPs; and what `diagnostics` finds in the answers.

    heads_by_layer and heads_by_class, blocks_by_layer and blocks_by_class: how often a unit ran, per input.
    """
    truth = np.asarray(labels)
    rows = {}
    for i, name in enumerate(names):
        own = torch.as_tensor(truth[:, i] > 0 if truth.ndim == 2 else truth == i)
        if own.any():
            rows[name] = own
    kinds = {"heads": answers.gates, **({} if answers.blocks is None else {"blocks": answers.blocks})}
    found: dict[str, Any] = {}
    for kind, ran in kinds.items():
        found["shares_by_layer" if kind == "heads" else "block_shares_by_layer"] = _rounded(ran.mean((0, 2)))
        found[f"{kind}_by_layer"] = _rounded(ran.mean(0))
        found[f"{kind}_by_class"] = {name: _rounded(ran[own].mean(0)) for name, own in rows.items()}
    bins = max(20, math.ceil(round(20 * float(share.max()), 6)))  # of 5 points each
    counts, edges = np.histogram(share, bins=bins, range=(0.0, bins / 20))
    found["share_histogram"] = {"edges": [round(float(e), 4) for e in edges], "counts": counts.tolist()}
    return found | diagnose(answers.logits.numpy(), labels, names, share, answers.tokens.numpy())


def _rounded(values: Tensor) -> list:
    return [_rounded(row) if row.dim() else round(float(row), 4) for row in values]


def soft_hard_gap(
    model: Any, encoded: Encoded, used: Tensor, labels: Sequence[Any], *, batch_size: int
) -> dict[str, float]:
    """How far the function training ends with is from the one used, whose logits are `used` (rows, labels).

    The routers alone are put in training mode, at the end of the schedule: the same gates as in the last training
    steps, without dropout. soft_hard_gap: accuracy with those gates minus accuracy in use. soft_hard_disagreement:
    share of inputs that get another label.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    model.eval()
    try:
        for router in routers:
            router.train()
        soft = predict(model, encoded, batch_size=batch_size).logits
    finally:
        model.eval()
    before, after = scores(soft, labels)["accuracy"], scores(used, labels)["accuracy"]
    several = isinstance(labels[0], list | np.ndarray)
    changed = ((soft > 0) != (used > 0)).any(-1) if several else soft.argmax(-1) != used.argmax(-1)
    return {"soft_hard_gap": before - after, "soft_hard_disagreement": float(changed.float().mean())}


class _Peak:
    megabytes: float | None = None


@contextmanager
def peak_memory(device: torch.device):
    """Memory above what was held at the start, in MB: on a GPU from its allocator, on Linux from the kernel's peak."""
    peak = _Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        yield peak
        peak.megabytes = (torch.cuda.max_memory_allocated(device) - held) / 2**20
        return
    _give_back()
    held = _status("VmRSS")
    reset = held is not None and _reset_peak()
    yield peak
    highest = _status("VmHWM")
    if reset and held is not None and highest is not None:
        peak.megabytes = max(0.0, (highest - held) / 1024)


def _status(name: str) -> int | None:
    """A line of /proc/self/status in KiB; None where there is no such file."""
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(f"{name}:")), None)
    except OSError:
        return None


def _give_back() -> None:
    """Return what the allocator keeps of earlier work: reused, it would hide how much the work to come needs."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True
