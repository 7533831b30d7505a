"""The engine in a process of its own: token ids come in on stdin, logits go out on stdout, until stdin ends.

Nothing here is pickled and no text is seen. A frame is a head, a JSON object where something is to be said in words,
and arrays, each behind its name, type and shape in 16 bytes: both processes read frames with caches that the engine has
just emptied, and the less code that takes, the better.
"""

import json
import math
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from budgetformer.engine.counting import counted
from budgetformer.engine.engine import Engine
from budgetformer.engine.packed import Output
from budgetformer.errors import BudgetFormerError
from budgetformer.tokens import Tokens

HEAD = struct.Struct("<IIId")  # bytes that follow, those of the JSON object, arrays, the frame's number
ARRAY = struct.Struct("<BBH3I")  # name, type, axes, shape
NAMES = ("ids", "lengths", "types", "budget", "logits", "share", "gates", "wanted", "blocks", "flops")
TYPES = tuple(map(np.dtype, ("<i4", "<f4", "<f8", "|u1")))
_NAME = {name: place for place, name in enumerate(NAMES)}
_TYPE = {kind.str: place for place, kind in enumerate(TYPES)}

Arrays = dict[str, np.ndarray]


class Frame(NamedTuple):
    """What is said at once. number: of a batch, whether details are asked for (0 or 1); of an answer, the engine's
    seconds. arrays: of the names and types above, with up to three axes. table: facts, or what went wrong.
    """

    number: float = 0.0
    arrays: Arrays = {}  # noqa: RUF012  # nobody writes to it
    table: dict[str, Any] | None = None


def pack(frame: Frame) -> bytes:
    """A frame as bytes."""
    said = b"" if frame.table is None else json.dumps(frame.table).encode()
    parts = [said]
    for name, array in frame.arrays.items():
        shape = (*array.shape, 0, 0)[:3]
        parts += ARRAY.pack(_NAME[name], _TYPE[array.dtype.str], array.ndim, *shape), array.tobytes()
    body = b"".join(parts)
    return HEAD.pack(len(body), len(said), len(frame.arrays), frame.number) + body


def size_of(head: bytes) -> int:
    """How many bytes follow a head."""
    return HEAD.unpack(head)[0]


def unpack(head: bytes, body: bytes) -> Frame:
    """What was packed. The arrays are read-only views of `body`."""
    _, at, count, number = HEAD.unpack(head)
    table, arrays = json.loads(body[:at]) if at else None, {}
    for _ in range(count):
        name, kind, axes, *shape = ARRAY.unpack_from(body, at)
        at += ARRAY.size
        array = np.frombuffer(body, TYPES[kind], math.prod(shape[:axes]), at).reshape(shape[:axes])
        arrays[NAMES[name]] = array
        at += array.nbytes
    return Frame(number, arrays, table)


def load(model: str, *, calibrated: bool, **options: Any) -> Engine:
    """The engine of a folder, answering in the calibrated way if so wished. Raises as `Engine.load`."""
    engine = Engine.load(model, **options)
    if calibrated:
        found = engine.saved.promised()
        engine.budget, engine.margin = found.way.budget, found.way.margin
        beyond = found.beyond(engine.path.dtype, engine.max_length)
        engine.note += "" if beyond is None else f"; {beyond}"
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


def answer(engine: Engine, batch: Frame) -> Frame:
    """Compute one batch.

    Its arrays: ids (tokens,), lengths (batch,), types (tokens,) where the tokenizer has them, budget (batch,) where it
    is named. Gives logits (batch, class) and share (batch,), that of what has a budget; with details also gates,
    wanted, blocks and flops (batch, 2), those that ran and those of the dense model. The number is the engine's time
    in seconds, with details the median of three runs.
    """
    arrays, detail = batch.arrays, bool(batch.number)
    ids, types = arrays["ids"].tolist(), arrays["types"].tolist() if "types" in arrays else None
    tokens, at = [], 0
    for length in arrays["lengths"].tolist():
        its = slice(at, at := at + length)
        tokens.append(Tokens(ids=ids[its], types=None if types is None else types[its], truncated=False))
    runs = [_timed(engine, tokens, arrays.get("budget")) for _ in range(3 if detail else 1)]
    output, seconds = runs[0][0], sorted(seconds for _, seconds in runs)[len(runs) // 2]
    if not detail and engine.weights.budget.blocks == 1:
        # The heads of an input cost the same, so counting them is enough.
        return Frame(seconds, {"logits": output.logits, "share": output.gates.mean((1, 2))})
    work = counted(engine, arrays["lengths"], output.gates, output.blocks)
    ran, every = work.units(engine.weights.budget)
    found = {"logits": output.logits, "share": ran / every}
    if detail:
        found |= {"gates": output.gates, "wanted": output.wanted, "flops": np.stack([work.total, work.total_dense], 1)}
        found |= {} if output.blocks is None else {"blocks": output.blocks}
    return Frame(seconds, found)


def _timed(engine: Engine, tokens: list[Tokens], budget: np.ndarray | None) -> tuple[Output, float]:
    began = time.perf_counter()
    output = engine.forward(tokens, budget=budget)
    return output, time.perf_counter() - began


def batch_of(tokens: Sequence[Tokens], budgets: Sequence[float] | None) -> Arrays:
    """A batch as `answer` takes it: texts with token types, or without, and their budgets where they are named."""
    arrays: Arrays = {
        "ids": np.array([i for one in tokens for i in one.ids], np.int32),
        "lengths": np.array([len(one) for one in tokens], np.int32),
    }
    if any(one.types is not None for one in tokens):
        arrays["types"] = np.array([i for one in tokens for i in one.types or [0] * len(one)], np.int32)
    if budgets is not None:
        arrays["budget"] = np.array(budgets, np.float64)
    return arrays


def main(options: dict[str, Any]) -> None:
    """Load, say so, and answer until there is nothing more to read."""
    # The parent decides when this ends: signals meant for it reach the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the frames

    def say(frame: Frame) -> None:
        target.write(pack(frame))
        target.flush()

    try:
        engine = load(**options)
    except (BudgetFormerError, OSError) as error:
        say(Frame(table={"error": str(error), "exit_code": getattr(error, "exit_code", 1)}))
        return
    # The first pass finds caches and pages cold: that is not for a client to wait for.
    engine.forward([Tokens(ids=[0] * engine.max_length, types=None, truncated=False)], budget=1.0)
    say(Frame(table=facts(engine)))
    while (batch := _read(source)) is not None:
        try:
            say(answer(engine, batch))
        except Exception as error:
            say(Frame(table={"error": type(error).__name__}))


def _read(source: BinaryIO) -> Frame | None:
    head = source.read(HEAD.size)
    return unpack(head, source.read(size_of(head))) if len(head) == HEAD.size else None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
