"""A run for people: tables in the terminal and a picture, both from the JSON that the run wrote.

python benchmarks/table.py runs/bench.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Results = dict[str, Any]
COLORS = {"fp32": "#4c72b0", "bf16": "#dd8452", "int8": "#55a868"}
MARKERS = {"peer": "o", "ours": "D", "prototype": "x"}


def header(results: Results, console: Console) -> None:
    """What was measured where, and the theory."""
    environment, machine = results["environment"], results["machine"]
    console.print(
        f"[bold]{environment['cpu']}[/bold], {environment['physical_cores']} cores, {environment['cpu_capability']}, "
        f"torch {environment['torch']}; load at the start {results['load'][0]:.1f}"
    )
    for precision, peak in machine["peaks"].items():
        registers = "" if peak["registers"] is None else f" ({peak['registers'] / 1e9:.0f} from registers alone)"
        console.print(
            f"  peak {precision}: {peak['gemm'] / 1e9:.0f} G operations/s a core{registers}, {peak['source']}",
            highlight=False,
        )
    console.print(f"  copying: {machine['bandwidth'] / 1e9:.1f} GB/s a core", highlight=False)
    for note in results["notes"]:
        console.print(f"  {note}", highlight=False)


def print_cell(cell: dict[str, Any], console: Console) -> None:
    """One cell: a model, a shape, a number of threads; and what could not be measured, a line for each reason."""
    clock = "CPU time" if cell["threads"] == 1 else "wall time"
    kind = {"ids": "ids -> logits", "text": "text -> label"}[cell["part"]]
    rounds = max((len(row["rounds"]) for row in cell["rows"]), default=0)
    padding = f", padding {cell['padding']:.2f}" if cell["padding"] > 1.005 else ""
    title = (
        f"{cell['model']} {cell['shape']}, {kind}, {cell['threads']} thread{'s' * (cell['threads'] > 1)} "
        f"({clock}, {rounds} rounds, {cell['inputs']} inputs, {cell['tokens']:,} tokens{padding})"
    )
    table = _table()
    table.add_column("variant", no_wrap=True)
    for name in ("tok/s", "x torch", "p25-p75", "x peer", "x proto", "GFLOP", "of peak", "ceiling", "eff.", "MiB", "="):
        table.add_column(name, justify="right", no_wrap=True)
    for row in cell["rows"]:
        ratio = row["ratio"]
        style = "bold" if row["family"] == "ours" else None
        table.add_row(
            row["name"],
            f"{row['tokens_per_second']:,.0f}",
            "" if ratio is None else f"{ratio['median']:.2f}",
            "" if ratio is None else f"{ratio['low']:.2f}-{ratio['high']:.2f}",
            _number(row["ratio_best_peer"], "{:.2f}"),
            _number(row["ratio_prototype"], "{:.2f}"),
            _number(row["flops"], "{:.2f}", 1e9),
            _number(row["of_peak"], "{:.2f}"),
            _number(row["ceiling_tokens_per_second"], "{:,.0f}"),
            _number(row["efficiency"], "{:.2f}"),
            _number(row.get("memory_mib"), "{:.0f}"),
            _number(row.get("agreement"), "{:.3f}"),
            style=style,
        )
    _print(title, table, console)
    names: dict[str, list[str]] = {}
    for one in cell["missing"]:
        names.setdefault(one["reason"], []).append(one["name"])
    for reason, missing in names.items():
        console.print(f" not measured: {', '.join(missing)}: {reason}", style="dim", highlight=False)


def _print_memory(one: dict[str, Any], console: Console) -> None:
    """Peak extra memory of each variant."""
    table = _table()
    table.add_column("variant", no_wrap=True)
    table.add_column("MiB", justify="right")
    table.add_column("/ torch", justify="right")
    base = next((row["mib"] for row in one["rows"] if row["name"] == "torch SDPA fp32"), None)
    for row in one["rows"]:
        share = None if not base or row["mib"] is None else row["mib"] / base
        table.add_row(row["name"], _number(row["mib"], "{:.1f}") or "failed", _number(share, "{:.3f}"))
    _print(f"{one['model']} {one['shape']}: peak memory above the loaded model, 1 thread", table, console)


def _print_goals(goals: list[dict[str, Any]], console: Console) -> None:
    """Each figure to reach against the worst and the middle cell."""
    table = _table()
    for name in ("goal", "bound", "worst", "in", "middle", "cells", ""):
        table.add_column(name, justify="left" if name in ("goal", "in", "") else "right", no_wrap=name != "in")
    for one in goals:
        verdict = "met" if one["met"] else "met by the middle" if one["met_by_middle"] else "not met"
        bound = f"{'<=' if one['most'] else '>='} {one['bound']:g}"
        worst, mid = f"{one['worst']:.3g}", f"{one['middle']:.3g}"
        table.add_row(one["goal"], bound, worst, one["where"], mid, str(one["cells"]), verdict)
    _print("Figures to reach", table, console)


def closing(results: Results, console: Console) -> None:
    """What is known at the end alone: memory, the routers' share, the figures to reach."""
    for one in results.get("memory", []):
        _print_memory(one, console)
    for one in results.get("routers", []):
        share = one["share"]
        text = f"{100 * share['median']:.2f} % ({100 * share['low']:.2f} to {100 * share['high']:.2f})"
        console.print(f"routers, {one['model']} {one['shape']} {one['precision']}: {text} of the time", highlight=False)
    for one in results.get("left_out", []):
        name = f"{one['model']} {one['shape']}, {one['part']}, {one['threads']} threads"
        console.print(f"left out for time: {name}; give more --seconds", highlight=False)
    if results.get("goals"):
        _print_goals(results["goals"], console)


def picture(results: Results, path: Path) -> None:
    """How many times faster than torch SDPA each variant is, one panel a cell."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = [cell for cell in results["cells"] if any(row["ratio"] for row in cell["rows"])]
    if not cells:
        return
    names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["rows"]))
    columns = min(6, len(cells))
    lines = -(-len(cells) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(2.2 * columns + 2.6, lines * (0.19 * len(names) + 0.9)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, cell in zip(axes.flat, cells, strict=False):
        for row in (one for one in cell["rows"] if one["ratio"]):
            ratio, place = row["ratio"], names.index(row["name"])
            color, marker = COLORS[row["precision"]], MARKERS[row["family"]]
            axis.plot([ratio["low"], ratio["high"]], [place, place], color=color, linewidth=1)
            axis.plot(ratio["median"], place, marker, color=color, markersize=4)
        axis.axvline(1.0, color="grey", linewidth=0.6)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.grid(axis="both", linewidth=0.3)
        part = "" if cell["part"] == "ids" else ", text"
        axis.set_title(f"{cell['model']} {cell['shape']}{part}, {cell['threads']} thr.", fontsize=8)
        axis.tick_params(labelsize=7)
    for axis in axes.flat[len(cells) :]:
        axis.set_visible(False)
    axes[0][0].set_yticks(range(len(names)), names, fontsize=7)
    axes[0][0].invert_yaxis()
    figure.suptitle(f"times faster than torch SDPA fp32 ({results['environment']['cpu']})", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _table() -> Table:
    return Table(box=None, padding=(0, 1))


def _print(title: str, table: Table, console: Console) -> None:
    """A title of the table's own would be wrapped to the table's width."""
    console.print()
    console.print(title, style="bold", highlight=False)
    console.print(table)


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None else form.format(value / unit)


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a run again, and draw it.")
    parser.add_argument("results", type=Path)
    args = parser.parse_args()
    results = json.loads(args.results.read_text(encoding="utf-8"))
    console = Console(width=150)
    header(results, console)
    for cell in results["cells"]:
        print_cell(cell, console)
    closing(results, console)
    picture(results, args.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
