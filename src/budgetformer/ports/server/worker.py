"""The engine in a process of its own: token ids come in on stdin, logits go out on stdout, until stdin ends.

Nothing here is pickled and no text is seen. A frame is two lengths, a JSON object and the bytes of arrays; the object
says their types and shapes.
"""

import json
import os
import signal
import statistics
import struct
import sys
import time
from typing import Any, BinaryIO

import numpy as np

from budgetformer.engine.counting import counted
from budgetformer.engine.engine import Engine
from budgetformer.engine.packed import Output, Packed
from budgetformer.errors import BudgetFormerError, UsageError
from budgetformer.tokens import Tokens

LENGTHS = struct.Struct("<II")
Arrays = dict[str, np.ndarray]


def pack(table: dict[str, Any], arrays: Arrays) -> bytes:
    """A frame of a table and arrays."""
    about = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    head = json.dumps({**table, "arrays": about}).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    return LENGTHS.pack(len(head), len(body)) + head + body


def unpack(head: bytes, body: bytes) -> tuple[dict[str, Any], Arrays]:
    """What was packed."""
    table, arrays, at = json.loads(head), {}, 0
    for name, (kind, shape) in table.pop("arrays").items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(body, kind, count, at).reshape(shape)
        at += arrays[name].nbytes
    return table, arrays


def load(model: str, *, calibrated: bool, **options: Any) -> Engine:
    """The engine of a folder, answering in the calibrated way if so wished. Raises as `Engine.load`."""
    engine = Engine.load(model, **options)
    if calibrated:
        found = engine.saved.calibrated
        if found is None:
            raise UsageError(
                f"budget is 'calibrated', and {model} has not been calibrated; run: budgetformer calibrate"
            )
        engine.budget, engine.margin = found.way.budget, found.way.margin
        if (found.dtype, found.max_length) != (engine.path.dtype, engine.max_length):
            engine.note += f"; calibrated for {found.dtype} and {found.max_length} tokens, so the promise does not hold"
    return engine


def facts(engine: Engine) -> dict[str, Any]:
    """What the other process has to know of the model."""
    encoder, budget = engine.weights.encoder, engine.weights.budget
    return {
        "labels": engine.labels,
        "multi_label": engine.multi_label,
        "layers": encoder.num_layers,
        "heads": encoder.num_heads,
        "blocks": budget.blocks,
        "routed": budget.routes,
        "target": budget.target,
        "max_length": engine.max_length,
        "path": engine.path.name,
        "dtype": engine.path.dtype,
        "note": engine.note,
    }


def answer(engine: Engine, arrays: Arrays, *, detail: bool) -> tuple[dict[str, Any], Arrays]:
    """Compute one batch.

    arrays: ids (tokens,), offsets (batch + 1,), types (tokens,) where the tokenizer has them, budget (batch,) where it
    is named. Gives logits (batch, class) and share (batch,), that of what has a budget; with `detail` also gates,
    wanted, blocks and flops (batch, 2), those that ran and those of the dense model. `seconds` is the engine's time,
    with `detail` the median of three runs.
    """
    ids, offsets, types = arrays["ids"], arrays["offsets"], arrays.get("types")
    places = [slice(*pair) for pair in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    tokens = [
        Tokens(ids=ids[at].tolist(), types=None if types is None else types[at].tolist(), truncated=False)
        for at in places
    ]
    runs = [_timed(engine, tokens, arrays.get("budget")) for _ in range(3 if detail else 1)]
    output = runs[0][0]
    work = counted(engine, np.diff(offsets), output.gates, output.blocks)
    ran, every = work.units(engine.weights.budget)
    found = {"logits": output.logits, "share": ran / every}
    if detail:
        found |= {"gates": output.gates, "wanted": output.wanted, "flops": np.stack([work.total, work.total_dense], 1)}
        found |= {} if output.blocks is None else {"blocks": output.blocks}
    return {"seconds": statistics.median(seconds for _, seconds in runs)}, found


def _timed(engine: Engine, tokens: list[Tokens], budget: np.ndarray | None) -> tuple[Output, float]:
    began = time.perf_counter()
    output = engine.forward(tokens, budget=budget)
    return output, time.perf_counter() - began


def tokens_of(packed: Packed, budget: list[float] | None) -> Arrays:
    """A batch as `answer` takes it."""
    arrays = {"ids": packed.ids, "offsets": packed.offsets}
    arrays |= {} if packed.types is None else {"types": packed.types}
    return arrays | ({} if budget is None else {"budget": np.array(budget, np.float64)})


def main(options: dict[str, Any]) -> None:
    """Load, say so, and answer until there is nothing more to read."""
    # The parent decides when this ends: signals meant for it reach the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the frames

    def say(table: dict[str, Any], arrays: Arrays | None = None) -> None:
        target.write(pack(table, arrays or {}))
        target.flush()

    try:
        engine = load(**options)
    except (BudgetFormerError, OSError) as error:
        say({"error": str(error), "exit_code": getattr(error, "exit_code", 1)})
        return
    # The first pass finds caches and pages cold: that is not for a client to wait for.
    engine.forward([Tokens(ids=[0] * engine.max_length, types=None, truncated=False)], budget=1.0)
    say(facts(engine))
    while (frame := _read(source)) is not None:
        table, arrays = frame
        try:
            say(*answer(engine, arrays, detail=table["detail"]))
        except Exception as error:
            say({"error": type(error).__name__})


def _read(source: BinaryIO) -> tuple[dict[str, Any], Arrays] | None:
    lengths = source.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head, body = LENGTHS.unpack(lengths)
    return unpack(source.read(head), source.read(body))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
