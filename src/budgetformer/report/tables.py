"""The honest table (dense against budgeted) and the report of a run, written from the numbers in metrics.json alone.

A number that was not measured is shown as a dash. Nothing here loads torch; matplotlib is loaded for figures only.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.report.wording import markdown, percent, plain

if TYPE_CHECKING:
    from rich.table import Table

    from budgetformer.engine.saved import Calibrated, Point

Metrics = Mapping[str, Any]

DASH = "—"
MODELS = {"dense": "dense twin", "dense_longer": "dense, trained as long", "budgeted": "budgeted"}
CAPTIONS = {
    "share_histogram": "What the texts spend: how many test texts use which share of what has a budget.",
    "heads_by_layer": "Which heads run: the share of test texts that use each head.",
    "blocks_by_layer": "Which feed-forward blocks run: the share of test texts that use each block.",
    "heads_by_class": "Which class uses which heads; of many classes, those that spend most and least.",
    "blocks_by_class": "Which class uses which feed-forward blocks.",
    "accuracy_by_budget": "Accuracy when the model is told its budget, against the dense models.",
    "reliability": "Calibration: how often answers are right against how sure they are.",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: how a model's metrics become its cell, and how the budgeted model's differ from dense."""

    name: str
    key: str
    show: Callable[[float], str]
    differ: Callable[[float, float], str] | None
    spread: str | None = None  # the key of a standard deviation shown after the value
    needs: str | None = None  # no line at all when no model has this key
    otherwise: float | None = None  # the value of a model that lacks the key where another has it


def _points(value: float, dense: float) -> str:
    return f"{100 * (value - dense):+.1f} points"


def _times(value: float, dense: float) -> str:
    return f"{value / dense:.2f}x" if dense > 0 else DASH


def _grams(value: float) -> str:
    return f"{value:.3g} g"


LINES = (
    Line(name="accuracy", key="accuracy", show=percent, differ=_points),
    Line(name="macro-F1", key="macro_f1", show=percent, differ=_points),
    Line(name="heads used ± std", key="head_share", show=percent, differ=None, spread="head_share_std"),
    Line(name="FFN blocks used", key="block_share", show=percent, differ=None, needs="block_share", otherwise=1.0),
    Line(
        name="units' FLOPs ± std",
        key="units_flops_share",
        show=percent,
        differ=None,
        spread="units_flops_share_std",
        needs="block_share",
    ),
    Line(name="answered twice", key="answered_again", show=percent, differ=None, needs="answered_again", otherwise=0.0),
    Line(name="attention FLOPs / dense", key="attention_flops_share", show=percent, differ=None),
    Line(name="model FLOPs / dense", key="flops_share", show=percent, differ=None),
    Line(name="peak memory", key="peak_memory_mb", show="{:,.0f} MB".format, differ=_times),
    Line(name="seconds per 1,000 texts", key="seconds_per_1000", show="{:.2f} s".format, differ=_times),
    Line(name="CO2, estimated", key="co2_grams", show=_grams, differ=_times, needs="co2_grams"),
)


def cells(metrics: Metrics) -> tuple[list[str], list[list[str]]]:
    """The table as strings: the header, and per line its name and a cell for each model that `metrics` has.

    Where both a dense twin and a budgeted model are there, a last column says how the second differs from the first.
    """
    models = [key for key in MODELS if isinstance(metrics.get(key), Mapping)]
    against = "dense" in models and "budgeted" in models
    header = ["", *(MODELS[key] for key in models), *(["budgeted vs twin"] if against else [])]
    body = []
    for line in LINES:
        if line.needs is not None and all(_number(metrics[key], line.needs) is None for key in models):
            continue
        values = {key: _number(metrics[key], line.key) for key in models}
        row = [line.name, *(_cell(metrics[key], line) for key in models)]
        if against:
            new, old = values["budgeted"], values["dense"]
            row.append("" if line.differ is None else DASH if new is None or old is None else line.differ(new, old))
        body.append(row)
    return header, body


def _number(metrics: Metrics, key: str) -> float | None:
    """The value if it was measured: there, a number, and finite."""
    value = metrics.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _cell(metrics: Metrics, line: Line) -> str:
    value = _number(metrics, line.key)
    if value is None:
        value = line.otherwise
    if value is None:
        return DASH
    spread = None if line.spread is None else _number(metrics, line.spread)
    return line.show(value) if spread is None else f"{100 * value:.1f} ± {100 * spread:.1f} %"


def notes(metrics: Metrics) -> list[str]:
    """What a reader has to know before believing the table: how many texts, what was left out, how sure it is."""
    data, models = metrics.get("data") or {}, [metrics[key] for key in MODELS if isinstance(metrics.get(key), Mapping)]
    model = models[-1] if models else {}
    said = []
    rows, half = _rows(model, data), _half_interval(model, data)
    if rows and half is not None:
        said.append(f"Measured on {rows:,} texts: the accuracy is known to ± {100 * half:.1f} points (95 % interval).")
    if cut := _number(model, "truncated"):
        said.append(f"{int(cut):,} {'text was' if cut == 1 else 'texts were'} longer than the model reads, and cut.")
    left_out = _number(data, "left_out")
    if left_out:
        said.append(f"{int(left_out):,} unusable {'row was' if left_out == 1 else 'rows were'} left out.")
    gap, some = _number(model, "soft_hard_gap"), _number(model, "soft_hard_rows")
    if gap is not None:
        on = f" (the first {int(some):,} texts)" if some is not None and some < rows else ""
        said.append(
            f"With the gates of training in place of those of use, accuracy changes by {100 * gap:+.1f} points{on}."
        )
    if engine := model.get("engine"):
        said.append(f"Computed by the engine: {engine['path']}, {engine['dtype']}, threads: {engine['threads']}.")
    if len(models) > 1:
        said.append("± is the standard deviation over texts. FLOPs are counted at each text's own length.")
    return said


def _rows(model: Metrics, data: Metrics) -> int:
    return int(_number(model, "rows") or _number(data, "test_rows") or 0)


def _half_interval(model: Metrics, data: Metrics) -> float | None:
    """Half the 95 % Wilson interval of a model's accuracy, when it and the number of test texts are known."""
    accuracy, rows, z = _number(model, "accuracy"), _rows(model, data), 1.96
    if accuracy is None or not rows:
        return None
    return z * math.sqrt(accuracy * (1 - accuracy) / rows + z**2 / (4 * rows**2)) / (1 + z**2 / rows)


def table(metrics: Metrics) -> "Table":
    """The table for a terminal; `metrics` is the content of metrics.json, or `{"budgeted": evaluate(...)}` alone."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    header, body = cells(metrics)
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, caption_justify="left")
    for index, name in enumerate(header):
        # Numbers stay whole in 80 columns because the longer headings are broken by hand.
        short = name.replace(", ", ",\n").replace(" as ", "\nas ").replace(" vs", "\nvs")
        side, style = "left" if index == 0 else "right", "bold" if name == MODELS["budgeted"] else ""
        drawn.add_column(short, justify=side, style=style, header_style="bold", vertical="bottom", no_wrap=True)
    for row in body:
        drawn.add_row(*row)
    drawn.caption = Text("\n" + "\n".join(notes(metrics)))
    return drawn


def curve(points: "Sequence[Point]", chosen: "Point") -> "Table":
    """The budgets of `engine.tuning.tune` for a terminal, the one to use in bold and with an arrow."""
    drawn = _choices("budget", "margin", "heads used", "units' FLOPs", "ms per text", "agreement", "accuracy")
    for point in points:
        drawn.add_row(
            "→" if point == chosen else "",
            "learned" if point.budget is None else f"{point.budget:g}",
            "" if point.margin is None else f"{point.margin:g}",
            percent(point.head_share),
            percent(point.units_share),
            f"{point.ms_per_text:.3f}",
            percent(point.agreement),
            DASH if point.accuracy is None else percent(point.accuracy),
            style="bold" if point == chosen else "",
        )
    return drawn


def ways(found: "Calibrated") -> "Table":
    """What `engine.calibrating.calibrate` compared, for a terminal; the choice in bold and with an arrow."""
    drawn = _choices("first answer", "margin", "again", "other labels", "agreement, at least", "FLOPs")
    for way in found.ways:
        drawn.add_row(
            "→" if way == found.way else "",
            "learned" if way.budget is None else f"{way.budget:g}",
            f"{way.margin:.4f}",
            percent(way.again),
            f"{way.disagreements:,}",
            percent(way.bound),
            percent(way.flops_share),
            style="bold" if way == found.way else "",
        )
    return drawn


def _choices(*names: str) -> "Table":
    """A table of which one row is to be pointed at."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for name in ("", *names):
        drawn.add_column(name, justify="right", header_style="bold", no_wrap=True)
    return drawn


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Cells that are already safe as a Markdown table, numbers to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *body])


def write_report(metrics: Metrics, folder: Path) -> Path:
    """Write figures/*.png, figures/*.svg and then report.md under `folder`, and return the path of report.md.

    A figure whose numbers are missing is left out. Raises OSError when the folder cannot be written.
    """
    drawn = draw_figures(metrics, folder / "figures")
    path = folder / "report.md"
    path.write_text(_text(metrics, drawn), encoding="utf-8")
    return path


def draw_figures(metrics: Metrics, folder: Path) -> list[str]:
    """Draw every figure that `metrics` has the numbers for, as PNG and SVG; return their names in order."""
    from budgetformer.report import figures

    budgeted = metrics.get("budgeted") or {}
    measured = [key for key in ("dense", "dense_longer") if _number(metrics.get(key) or {}, "accuracy") is not None]
    twins = {MODELS[key]: metrics[key] for key in measured}
    target = _number(metrics.get("settings") or {}, "target_budget")
    half = _half_interval(metrics.get("dense") or {}, metrics.get("data") or {})
    makers: dict[str, tuple[str, Callable[[], Any]]] = {
        "share_histogram": ("share_histogram", lambda: figures.share_histogram(budgeted, target)),
        **{
            f"{kind}_by_{what}": (f"{kind}_by_{what}", functools.partial(make, budgeted, kind))
            for what, make in (("layer", figures.units_by_layer), ("class", figures.units_by_class))
            for kind in ("heads", "blocks")
        },
        "accuracy_by_budget": ("dial", lambda: figures.accuracy_by_budget(budgeted, twins, half)),
        "reliability": ("calibration", lambda: figures.reliability(calibrations(metrics))),
    }
    drawn = [name for name, (needs, _) in makers.items() if budgeted.get(needs)]
    folder.mkdir(parents=True, exist_ok=True)
    with figures.house_style():
        for name in drawn:
            figure = makers[name][1]()
            for suffix in (".png", ".svg"):
                figures.save(figure, folder / f"{name}{suffix}")
    return drawn


def calibrations(metrics: Metrics) -> dict[str, Metrics]:
    """The calibration of each model that has one, by the name it has in the table."""
    models = {name: metrics.get(key) or {} for key, name in MODELS.items()}
    return {name: model["calibration"] for name, model in models.items() if model.get("calibration")}


def _text(metrics: Metrics, drawn: Sequence[str]) -> str:
    """The whole of report.md."""
    data, budgeted = metrics.get("data") or {}, metrics.get("budgeted") or {}
    parts = ["# Dense against budgeted", data_line(data), markdown_table(*cells(metrics))]
    parts.append("\n".join(f"- {note}" for note in notes(metrics)))
    for name in drawn:
        parts.append(f"![{CAPTIONS[name]}](figures/{name}.png)\n\n*{CAPTIONS[name]}* ([SVG](figures/{name}.svg))")
        if name.endswith("_by_class"):
            kind = name.removesuffix("_by_class")
            parts.append(folded(f"Share of {kind} by class", _class_table(budgeted[name])))
        if name == "accuracy_by_budget":
            parts.append(folded("The figures behind it", dial_table(budgeted["dial"])))
    for title, key in (("Settings", "settings"), ("Environment", "environment")):
        if metrics.get(key):
            parts.append(folded(title, listing(metrics[key])))
    return "\n\n".join(part for part in parts if part) + "\n"


def data_line(data: Metrics) -> str:
    """How many texts and classes there were."""
    labels = data.get("labels")
    counts = {
        "training texts": data.get("train_rows"),
        "test texts": data.get("test_rows"),
        "classes": len(labels) if isinstance(labels, list | tuple | dict) else labels,
    }
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if isinstance(count, int))


def dial_table(dial: Sequence[Metrics]) -> str:
    """The points of the run-time dial as a Markdown table."""
    names = {
        "budget": "budget",
        "head_share": "heads used",
        "block_share": "FFN blocks used",
        "units_flops_share": "units' FLOPs",
        "flops_share": "model FLOPs / dense",
        "accuracy": "accuracy",
    }
    if dial[0].get("block_share") is None:
        del names["block_share"], names["units_flops_share"]
    shares = [[_number(point, key) for key in names] for point in dial]
    body = [[DASH if share is None else percent(share) for share in row] for row in shares]
    return markdown_table(list(names.values()), body)


def _class_table(by_class: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Every class with its mean share and its share in each layer, the most spending first."""
    layers = {name: [sum(heads) / len(heads) for heads in gates] for name, gates in by_class.items()}
    order = sorted(layers, key=lambda name: (-sum(layers[name]), name))
    depth = len(layers[order[0]])
    header = ["class", "all", *(f"layer {layer + 1}" for layer in range(depth))]
    body = [[markdown(name), *map(percent, [sum(layers[name]) / depth, *layers[name]])] for name in order]
    return markdown_table(header, body)


def listing(values: Metrics) -> str:
    """Names and values as an indented code block, which no value can break out of: JSON escapes line ends."""
    shown = {plain(key): json.dumps(value, ensure_ascii=False, default=str) for key, value in values.items()}
    return "\n".join(f"    {key}: {value}" for key, value in shown.items())


def folded(title: str, content: str) -> str:
    """Content of Markdown that opens on a click."""
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"
