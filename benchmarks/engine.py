"""Our engine beside every peer, in one interleaved run: `make bench`.

    python benchmarks/engine.py                          # minilm and base, all shapes; a quarter of an hour
    python benchmarks/engine.py --quick                  # minilm, three shapes, two minutes
    python benchmarks/engine.py --model runs/demo --shapes 8x128,stream --threads 1 --only fp32

Writes the table to the terminal, everything to --output (JSON), and a picture beside it. Exports of the models for the
peers are made once and kept in --cache (3 GB for both models); making them is not part of the quarter of an hour.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Before torch and the peers come: no spinning threads, nothing from the network.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OPENVINO_TELEMETRY", "0")

import numpy as np
import torch
from rich.console import Console

import memory
import roofline
from budgetformer.environment import environment
from budgetformer.outputs import write_aside
from clean import reference
from goals import judge
from inputs import BATCH, SHAPES, Inputs, make_inputs
from models import NAMES, BenchModel, demo_texts, describe, load
from ours import draw, router_share
from peers import export_all
from rows import Facts, cell_rows, shares
from selections import DENSE, work
from table import closing, header, picture, print_cell
from timing import clock_for, interleave, repeats
from variants import BASELINE, Options, Runner, Variant, kept, variants

STREAM_TEXTS = {"minilm": 256, "base": 64}  # of a stream; base takes eight times as long for each
ROUTER_SHAPES = ("1x32", "8x128")  # where the routers' share of the time is looked for
PROBES = 128  # real texts on which labels are compared
PAUSE = 0.005  # between measurements of several threads, so that no pool of the variant before still spins
MEMORY_SECONDS = 7  # what one variant's process takes, for the plan
NOTES = (
    "ours: heads and blocks are drawn at random for each input and layer, mixed budgets around the stated share, 12",
    "  blocks; 'as trained' asks the model's routers. Peers pad; streams are sorted by length, in batches of 32.",
    "x peer: to the fastest peer of the same precision. eff.: gain over our own dense, over what the FLOPs promise.",
    "ceiling: tokens/s that peak and bytes allow. =: share of labels equal to torch fp32 with the same selection.",
)


@dataclass(frozen=True)
class Cell:
    """One table: a model, a shape, a number of threads; part "ids" or "text"."""

    model: str
    shape: str
    threads: int
    part: str = "ids"


def default_cells(cores: int) -> list[Cell]:
    """The whole comparison on one thread; on all cores the shapes that tell most."""
    cells = [Cell(model, shape, 1) for model in NAMES for shape in SHAPES]
    cells += [Cell("minilm", shape, 1, "text") for shape in ("1x32", "stream")]
    if cores > 1:
        cells += [Cell("minilm", shape, cores) for shape in ("1x128", "8x128", "stream")]
        cells += [Cell("minilm", "stream", cores, "text"), Cell("base", "8x128", cores)]
    return cells


def cells_of(args: argparse.Namespace, cores: int) -> list[Cell]:
    """What the flags ask for; without any, the default."""
    if args.quick:
        return [Cell("minilm", shape, 1) for shape in ("1x32", "1x128", "8x128")]
    if not (args.model or args.shapes or args.threads or args.part):
        return default_cells(cores)
    chosen = args.model or list(NAMES)
    threads = {"1": [1], "all": [cores], None: [1]}[args.threads]
    shapes = args.shapes.split(",") if args.shapes else list(SHAPES)
    parts = ("ids", "text") if args.part == "both" else (args.part or "ids",)
    return [Cell(m, s, t, part) for m in chosen for t in threads for part in parts for s in shapes]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(width=max(150, Console().width))
    known = environment()
    cores = known["physical_cores"]
    cells = cells_of(args, cores)
    console.print("measuring the machine", style="dim")
    machine = roofline.measure(seconds=0.3 if args.quick else 1.0)
    results: dict[str, Any] = {
        "environment": known,
        "machine": roofline.describe(machine),
        "load": list(os.getloadavg()),
        "notes": list(NOTES),
        "options": {
            key: value if isinstance(value, int | float | list) else str(value) for key, value in vars(args).items()
        },
        "models": [],
        "cells": [],
        "left_out": [],
        "routers": [],
        "memory": [],
    }
    options = Options(
        cache=args.cache, peers=not args.skip_peers, compiled=args.compile, path=args.path, prototype=args.prototype
    )
    models = {}
    for name in dict.fromkeys(cell.model for cell in cells):
        console.print(f"preparing {name}", style="dim")
        models[name] = load(name, args.cache)
        if not args.skip_peers:
            export_all(models[name])
    results["models"] = [describe(model) for model in models.values()]
    header(results, console)
    bench = Bench(args, options, machine, models, results, console)
    bench.run(cells)
    if args.memory:
        bench.memory()
    results["goals"] = judge(results)
    bench.save()
    closing(results, console)
    picture(results, args.output.with_suffix(".png"))
    console.print(f"{args.output}, {args.output.with_suffix('.png')}", style="dim")
    return 0


class Bench:
    """One run: loads what a group of cells needs, measures, writes down."""

    def __init__(
        self,
        args: argparse.Namespace,
        options: Options,
        machine: roofline.Machine,
        models: dict[str, BenchModel],
        results: dict[str, Any],
        console: Console,
    ):
        self.args, self.options, self.machine = args, options, machine
        self.models, self.results, self.console = models, results, console
        self.texts, _ = demo_texts("test")
        self.equal: dict[tuple[str, str], float] = {}

    def run(self, cells: Sequence[Cell]) -> None:
        """All cells, those of a model and a number of threads together; the time left is shared by what they cost."""
        groups: dict[tuple[str, int], list[Cell]] = {}
        for cell in cells:
            groups.setdefault((cell.model, cell.threads), []).append(cell)
        loaded: dict[Variant, Runner | str] = {}
        pending = [cell for group in groups.values() for cell in group]
        end = time.perf_counter() + self.args.seconds - self._memory_seconds()
        for (name, threads), group in groups.items():
            loaded = {}  # the last group's models go before this one's come
            gc.collect()
            os.environ["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"
            torch.set_num_threads(threads)
            model = self.models[name]
            loaded = {variant: self._build(variant) for variant in self.variants(model, threads)}
            if not any(key[0] == name for key in self.equal):
                self._compare_labels(model, loaded)
            for cell in group:
                left = end - time.perf_counter()
                share = shares([self._cost(one) for one in pending], least=0.02)[0]
                pending.pop(0)
                if left <= 0 and self.results["cells"]:
                    self.results["left_out"].append({**asdict(cell), "model": model.name})
                    continue
                self.cell(cell, model, loaded, until=time.perf_counter() + max(1.0, left * share))
            if threads == 1 and not self.args.only:
                there = {cell.shape for cell in group if cell.part == "ids"}
                self._router_share(model, loaded, [shape for shape in ROUTER_SHAPES if shape in there])

    def variants(self, model: BenchModel, threads: int) -> list[Variant]:
        """What the flags leave of all variants."""
        return kept(variants(model, threads, self.options), self.args.only)

    def cell(self, cell: Cell, model: BenchModel, loaded: dict[Variant, Runner | str], *, until: float) -> None:
        """Measure one cell, show it and write it down."""
        inputs = make_inputs(cell.shape, model.tokenizer, self.texts, stream=self._stream(model.name))
        clock = clock_for(cell.threads)
        calls, times, facts, missing = {}, {}, {}, []
        for variant, runner in loaded.items():
            if cell.part == "text" and not _takes_texts(variant):
                continue
            try:
                if isinstance(runner, str):
                    raise RuntimeError(runner)
                runner.settle(inputs)
                call = runner.prepare(inputs) if cell.part == "ids" else runner.prepare_texts(inputs.texts)
                times[variant.name] = repeats(call, clock)
            except Exception as error:  # a peer that fails must not end the comparison
                missing.append({"name": variant.name, "reason": _reason(error)})
                continue
            calls[variant.name], facts[variant.name] = call, self._facts(variant, model, inputs, cell)
        pause = 0.0 if cell.threads == 1 else PAUSE
        measured = interleave(calls, times, clock=clock, rounds=self.args.rounds, until=until, pause=pause)
        rows = cell_rows(measured, facts, tokens=inputs.tokens, baseline=BASELINE)
        for row in rows:
            # In text cells it is the routers that choose, and not the sets that the comparison was made with.
            known = cell.part == "ids" or row["selection"] == "dense"
            row["agreement"] = self.equal.get((model.name, row["name"])) if known else None
        padding = sum(batch.ids.size for batch in inputs.padded()) / inputs.tokens
        made = {
            **asdict(cell),
            "model": model.name,
            "inputs": len(inputs),
            "tokens": inputs.tokens,
            "padding": padding,
            "rows": rows,
            "missing": missing,
        }
        self.results["cells"].append(made)
        print_cell(made, self.console)
        self.save()

    def memory(self) -> None:
        """Peak extra memory of the variants, each in a process of its own."""
        for name in self.args.memory:
            model = self.models.get(name) or load(name, self.options.cache)
            chosen = [one for one in self.variants(model, 1) if _for_memory(one)]
            arguments = ["--cache", str(self.options.cache), "--path", self.options.path]
            if self.options.prototype is not None:
                arguments += ["--prototype", str(self.options.prototype)]
            found = memory.measure([one.name for one in chosen], name, memory.SHAPE, arguments)
            rows = [{"name": one.name, "family": one.family, "mib": found[one.name]} for one in chosen]
            self.results["memory"].append({"model": model.name, "shape": memory.SHAPE, "rows": rows})
            for cell in self.results["cells"]:
                for row in cell["rows"]:
                    if cell["model"] == model.name:
                        row["memory_mib"] = found.get(row["name"])

    def save(self) -> None:
        """The results so far."""
        with write_aside(self.args.output) as path:
            path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")

    def _build(self, variant: Variant) -> Runner | str:
        """The loaded variant, or why there is none."""
        try:
            return variant.build()
        except Exception as error:
            return _reason(error)

    def _facts(self, variant: Variant, model: BenchModel, inputs: Inputs, cell: Cell) -> Facts:
        title = "as trained" if variant.selection is None else variant.selection.name
        fact = Facts(variant.family, variant.precision, title)
        if variant.selection is None or (cell.part == "text" and not variant.selection.dense):
            return fact  # the model chooses, so what runs is not known here
        gates, blocks = draw(variant.selection, model, len(inputs))
        flops = work(inputs.lengths, gates, blocks, model.config, len(model.labels))
        moved = roofline.least_bytes(inputs, gates, blocks, model.config, variant.precision)
        least = roofline.least_seconds(flops, moved, variant.precision, self.machine, cell.threads)
        peak = self.machine.peaks[variant.precision].gemm * cell.threads
        return replace(fact, flops=flops, least=least, peak=peak)

    def _compare_labels(self, model: BenchModel, loaded: dict[Variant, Runner | str]) -> None:
        """On real texts: the share of inputs that get the label that torch fp32 gives with the same selection."""
        some = self.texts[:: max(1, len(self.texts) // PROBES)][:PROBES]
        ids = [np.array(one.ids) for one in model.tokenizer.encode_batch(some)]
        inputs = Inputs("probe", ids, list(some), BATCH)
        clean, right = model.clean(), {}
        for variant, runner in loaded.items():
            selection = variant.selection
            if isinstance(runner, str) or selection is None:
                continue
            if selection not in right:
                chosen = (None, None) if selection.dense else draw(selection, model, len(inputs))
                right[selection] = reference(clean, inputs, *chosen).argmax(1)
            try:
                got = runner.prepare(inputs)().argmax(1)
            except Exception:
                continue
            self.equal[model.name, variant.name] = float((got == right[selection]).mean())

    def _router_share(self, model: BenchModel, loaded: dict[Variant, Runner | str], shapes: list[str]) -> None:
        """What the routers take of our engine's time, in the lowest precision that runs."""
        runners = {one.precision: runner for one, runner in loaded.items() if one.family == "ours"}
        precision = next((p for p in ("bf16", "fp32") if not isinstance(runners.get(p, ""), str)), None)
        if precision is None:
            return
        engine: Any = runners[precision]
        for shape in shapes:
            inputs = make_inputs(shape, model.tokenizer, self.texts)
            share = router_share(engine.engine, inputs, until=time.perf_counter() + 5)
            found = {"model": model.name, "shape": shape, "precision": precision, "share": asdict(share)}
            self.results["routers"].append(found)

    def _cost(self, cell: Cell) -> float:
        """How long a cell takes, in a unit of its own."""
        config = self.models[cell.model].config
        tokens = 60 * self._stream(cell.model) if cell.shape == "stream" else int(np.prod(_numbers(cell.shape)))
        weights = config.num_layers * config.hidden_size * (4 * config.hidden_size + 2 * config.intermediate_size)
        return tokens * weights / cell.threads * (0.5 if cell.part == "text" else 1.0)

    def _stream(self, model: str) -> int:
        return self.args.stream or STREAM_TEXTS.get(model, 256)

    def _memory_seconds(self) -> float:
        chosen = [
            one for name in self.args.memory if name in self.models for one in self.variants(self.models[name], 1)
        ]
        return MEMORY_SECONDS * sum(_for_memory(one) for one in chosen)


def _numbers(shape: str) -> list[int]:
    return [int(word) for word in shape.split("x")]


def _for_memory(variant: Variant) -> bool:
    if variant.selection is None or variant.selection.name not in memory.SELECTIONS:
        return False
    return variant.family != "prototype" or variant.selection.dense


def _takes_texts(variant: Variant) -> bool:
    """Text to label: dense, and heads alone, which a budget can name."""
    if variant.family == "prototype":
        return False
    return variant.selection is None or variant.selection is DENSE or variant.selection.name == "heads 0.25"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}" if not isinstance(error, RuntimeError) else lines[0][:160]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    add("--model", action="append", help=f"{', '.join(NAMES)} or a model folder; may be given several times")
    add("--shapes", help=f"of {','.join(SHAPES)}, or any BATCHxTOKENS")
    add("--threads", choices=("1", "all"), help="1 (CPU time) or all physical cores (wall time)")
    add("--part", choices=("ids", "text", "both"), help="ids -> logits, text -> label")
    add("--only", help="variants whose name holds one of these words, separated by commas")
    add("--rounds", type=int, default=15, help="at most")
    add("--seconds", type=float, default=780, help="for the whole run, once exports are made")
    add("--stream", type=int, help="texts of the stream, a multiple of 32")
    add("--memory", action="append", help="models to measure peak memory of; none: no model")
    add("--quick", action="store_true", help="minilm, three shapes, one thread, two minutes")
    add("--skip-peers", action="store_true", help="torch SDPA and ours alone")
    add("--compile", action="store_true", help="torch.compile as a peer; it compiles for a minute")
    add("--path", default="auto", help="the engine's path")
    add("--prototype", type=Path, help="a folder with bf_cpu.cpp and eng.py to compare with")
    add("--cache", type=Path, default=home / "budgetformer-bench", help="where exports are kept")
    add("--output", type=Path, default=Path("runs/bench.json"), help="results; the picture lies beside it")
    args = parser.parse_args(arguments)
    if args.quick:
        args.seconds = min(args.seconds, 75)
        args.rounds = min(args.rounds, 5)
    narrowed = args.quick or args.model or args.shapes or args.threads or args.part
    args.memory = [name for name in args.memory or ([] if narrowed else ["minilm"]) if name != "none"]
    return args


if __name__ == "__main__":
    sys.exit(main())
