"""`budgetformer predict` of one text, from an empty process to the answer: how long, and where the time goes.

    python benchmarks/cold_start.py --model runs/demo

Three looks: the command itself, several times; its imports, by package (python -X importtime); and its steps one by
one in a process of their own. The files are in the page cache after the first run, which is not counted.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TEXT = "I lost my card, what now?"
BOUND = 2.0  # seconds, for the whole command
LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|\s*(\S+)")


def command_of(model: Path, *python: str) -> list[str]:
    """The command, under an interpreter with these options."""
    return [sys.executable, *python, "-m", "budgetformer", "predict", "--model", str(model), TEXT]


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command. CalledProcessError when it fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports(report: str) -> dict[str, float]:
    """Seconds by top-level package, the most first, from what -X importtime prints; each module's own time."""
    seconds: dict[str, float] = {}
    for match in LINE.finditer(report):
        package = match[3].partition(".")[0]
        seconds[package] = seconds.get(package, 0.0) + int(match[1]) / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def steps(model: Path) -> dict[str, dict[str, float]]:
    """Wall and CPU seconds of each step of an answer. Run in a process that has imported nothing yet."""
    made: dict[str, dict[str, float]] = {}

    def step(name: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        made[name] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        return result

    def command_line() -> None:
        import budgetformer.cli  # noqa: F401

    def engine() -> Any:
        from budgetformer import tokens
        from budgetformer.engine import engine, packed, tokenizer, weights

        return engine, packed, tokenizer, weights, tokens

    step("import the command line", command_line)
    engine_of, packed, tokenizer_of, weights_of, tokens_of = step("import the engine", engine)
    weights = step("read the model", lambda: weights_of.read_weights(model))
    tokenizer = step("read the tokenizer", lambda: tokenizer_of.FolderTokenizer.load(model))
    path, note = step("pack the weights", lambda: engine_of.choose(weights, "fp32"))
    longest = tokens_of.longest_input(weights.encoder, tokenizer)
    tokens = step("text to tokens", lambda: tokens_of.tokenise(tokenizer, [TEXT], max_length=longest))
    batch = packed.Packed.of(tokens)
    step("first run", lambda: path.run(batch))
    step("second run", lambda: path.run(batch))
    print(note, file=sys.stderr)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/demo"), help="a model folder")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="results as JSON")
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.steps:
        print(json.dumps(steps(args.model)))
        return 0
    if not args.model.is_dir():
        parser.error(f"{args.model}: no such folder; make one with: make demo")

    from rich.console import Console

    console = Console(width=100, highlight=False)
    timed(command_of(args.model))
    runs = [timed(command_of(args.model)) for _ in range(args.runs)]
    python = statistics.median(timed([sys.executable, "-c", "pass"])[0] for _ in range(args.runs))
    wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
    report = subprocess.run(command_of(args.model, "-X", "importtime"), check=True, capture_output=True, text=True)
    by_package = imports(report.stderr)
    one_by_one = subprocess.run(
        [sys.executable, __file__, "--model", str(args.model), "--steps"], check=True, capture_output=True, text=True
    )
    found = json.loads(one_by_one.stdout.splitlines()[-1])
    results = {
        "model": str(args.model),
        "wall": wall,
        "cpu": cpu,
        "load": os.getloadavg()[0],
        "runs": runs,
        "python": python,
        "imports": by_package,
        "transformers": "transformers" in by_package,
        "torch": "torch" in by_package,
        "steps": found,
        "note": one_by_one.stderr.strip(),
    }
    show(results, console)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def show(results: dict[str, Any], console: Any) -> None:
    """For people."""
    from rich.table import Table

    lowest, highest = (pick(wall for wall, _ in results["runs"]) for pick in (min, max))
    verdict = "met" if results["wall"] <= BOUND else "not met"
    console.print(
        f"[bold]budgetformer predict[/bold] of one text: {results['wall']:.2f} s "
        f"({lowest:.2f} to {highest:.2f}), CPU {results['cpu']:.2f} s; at most {BOUND} s: {verdict} "
        f"(load {results['load']:.1f})"
    )
    loaded = [name for name in ("transformers", "torch") if results[name]]
    console.print(
        f"  of which an empty python {results['python']:.2f} s; imports {', '.join(loaded) or 'neither'} "
        "of transformers and torch"
    )
    console.print(f"  {results['note']}")
    for title, rows in (
        ("step", [(name, one["wall"], one["cpu"]) for name, one in results["steps"].items()]),
        ("imports by package", [(name, seconds, None) for name, seconds in list(results["imports"].items())[:12]]),
    ):
        table = Table(box=None, padding=(0, 1))
        table.add_column(title, no_wrap=True, min_width=26)
        table.add_column("s", justify="right")
        table.add_column("CPU s", justify="right")
        for name, wall, cpu in rows:
            table.add_row(name, f"{wall:.3f}", "" if cpu is None else f"{cpu:.3f}")
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
