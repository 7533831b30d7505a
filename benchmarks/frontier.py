"""Accuracy against time, text to label: budgets beside the dense model, smaller ones, static pruning and other engines.

    python experiments/compare.py --data trec6.parquet --keep /tmp/trec6 ... --output ...
    python benchmarks/frontier.py --data trec6.parquet --models /tmp/trec6 --output frontier-trec6.json

Every model that was kept runs in our engine in every number type, the dense control in the other engines too. Each
variant answers the same texts in every round, the rounds are interleaved, the clock is CPU time of one thread.
Accuracy is that of the variant itself, type and all, on the whole test split.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OPENVINO_TELEMETRY", "0")

import numpy as np
import pyarrow.parquet as pq

from budgetformer.engine import Engine
from budgetformer.engine.packed import Packed
from budgetformer.environment import environment
from budgetformer.outputs import write_aside
from budgetformer.tokens import tokenise
from models import load
from peers import PEERS, export_all
from timing import CPU, Spread, interleave, ratio, repeats

DTYPES = ("fp32", "bf16", "int8")
DENSE = "control"

Call = Callable[[Sequence[str]], list[str]]


def ours(folder: Path, dtype: str) -> Call:
    """Texts to labels in our engine; a statically pruned model runs its fixed units, and no router is asked."""
    engine = Engine.load(folder, dtype=dtype, threads=1)
    fixed = folder / "fixed.json"
    if not fixed.is_file():
        return lambda texts: engine.predict(texts).labels
    units = {kind: np.array(table, np.uint8) for kind, table in json.loads(fixed.read_text()).items()}

    def call(texts: Sequence[str]) -> list[str]:
        tokens = tokenise(engine.tokenizer, texts, None, max_length=engine.max_length)
        labels: list[str] = []
        for first, last in engine.batches(tokens):
            chosen = {k: np.ascontiguousarray(np.broadcast_to(v, (last - first, *v.shape))) for k, v in units.items()}
            logits = engine.run(Packed.of(tokens[first:last]), **chosen).logits
            labels += [engine.labels[i] for i in logits.argmax(1)]
        return labels

    return call


def variants(models: Path, cache: Path, *, peers: bool) -> dict[str, Call]:
    """Everything that is compared, by name: "ours MODEL DTYPE" or "PEER DTYPE"."""
    found: dict[str, Call] = {}
    for folder in sorted(path for path in models.iterdir() if (path / "config.json").is_file()):
        for dtype in DTYPES:
            found[f"ours {folder.name} {dtype}"] = ours(folder, dtype)
    if peers:
        dense = load(str(models / DENSE), cache)
        export_all(dense)
        for name, dtype, kind in PEERS:
            peer = kind(dense, 1)
            found[f"{name} {dtype}"] = lambda texts, peer=peer: peer.prepare_texts(texts)()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="parquet: split, text, label")
    parser.add_argument("--models", type=Path, required=True, help="folder that compare.py --keep filled")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path(".bench"))
    parser.add_argument("--texts", type=int, default=500, help="texts that are timed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    table = pq.read_table(args.data)
    if "text_pair" in table.column_names:
        parser.error("pairs are not timed here")
    rows = [row for row in table.to_pylist() if row["split"] == "test"]
    texts, truth = [row["text"] for row in rows], [row["label"] for row in rows]
    found = variants(args.models, args.cache, peers=args.peers)
    accuracy = {}
    for name, call in found.items():
        answers = [label for start in range(0, len(texts), 2000) for label in call(texts[start : start + 2000])]
        accuracy[name] = float(np.mean([a == b for a, b in zip(answers, truth, strict=True)]))
    timed = texts[: args.texts]
    calls = {name: (lambda call=call: call(timed)) for name, call in found.items()}
    times = {name: repeats(call, CPU, shortest=0.05) for name, call in calls.items()}
    seconds = interleave(calls, times, clock=CPU, rounds=args.rounds, until=float("inf"), pause=0.005)
    result: dict[str, Any] = {
        "data": args.data.stem,
        "texts": len(timed),
        "test_rows": len(texts),
        "rounds": args.rounds,
        "environment": {key: value for key, value in environment().items() if key != "engine_library"},  # a path
        "variants": {
            name: {
                "accuracy": round(accuracy[name], 4),
                **{f"ms_per_text{key}": round(1000 * value / len(timed), 5) for key, value in _spread(seconds[name])},
            }
            for name in found
        },
    }
    result["gains"] = gains(seconds)
    with write_aside(args.output) as aside:
        Path(aside).write_text(json.dumps(result, indent=1) + "\n")
    picture(result, args.output.with_suffix(".png"))
    for name, row in sorted(result["variants"].items(), key=lambda item: item[1]["ms_per_text"]):
        print(f"{name:<34} {100 * row['accuracy']:5.1f} %  {row['ms_per_text']:.4f} ms a text")
    print(json.dumps(result["gains"], indent=1))
    return 0


def picture(result: dict[str, Any], path: Path) -> None:
    """The frontier: accuracy over time per text, a logarithmic scale; one colour for each kind of variant."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    kinds = {"budgeted": "#2a7a73", "static": "#c0792a", "student": "#8a5aa8", DENSE: "#555555", "": "#b9b4aa"}
    marks = {"fp32": "o", "bf16": "s", "int8": "^"}
    for kind, colour in kinds.items():
        own = {n: row for n, row in result["variants"].items() if kind == next(k for k in kinds if k in n)}
        for name, row in own.items():
            *words, dtype = name.removeprefix("ours ").split()
            axes.plot(row["ms_per_text"], 100 * row["accuracy"], marks[dtype], color=colour, ms=8 if kind else 5)
            if dtype == "int8":
                label, place = " ".join(words), (row["ms_per_text"], 100 * row["accuracy"])
                axes.annotate(label, place, xytext=(5, 6), textcoords="offset points", fontsize=8, color=colour)
    axes.set(xscale="log", xlabel="ms a text, text to label, one thread", ylabel="accuracy, %", title=result["data"])
    handles = [axes.plot([], [], mark, color="#555555", label=dtype)[0] for dtype, mark in marks.items()]
    axes.legend(handles=handles, loc="lower right", frameon=False, title="labels name int8")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _spread(values: Sequence[float]) -> list[tuple[str, float]]:
    spread = Spread.of(values)
    return [("", spread.median), ("_low", spread.low), ("_high", spread.high)]


def gains(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """How many times faster each budget is than the fastest other engine on the dense model, whatever its type."""
    peers = {name: values for name, values in seconds.items() if not name.startswith("ours ")}
    if not peers:
        return {}
    best = min(peers, key=lambda name: float(np.median(peers[name])))
    budgeted = {name: values for name, values in seconds.items() if "budgeted" in name}
    return {
        "best_peer": best,
        **{name: round(ratio(peers[best], values).median, 3) for name, values in budgeted.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
