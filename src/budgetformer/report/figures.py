"""The figures of a report, each a function from the budgeted model's metrics to a matplotlib figure.

Colours are the Okabe-Ito set and one light-to-dark ramp, so they survive colour blindness and grey printing. No pyplot:
figures are plain objects, nothing global is left behind and no window system is needed.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import font_manager, style
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, ScalarFormatter

from budgetformer.report.wording import percent, plain

INK, QUIET, EMPTY, OFF = "#22303c", "#6b7884", "#e9edf1", "#b3bdc6"
BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
LINES = (BLUE, RED, GREEN, ORANGE, PINK, SKY)  # one a run, each with a marker of its own
MARKERS = "osD^vP"
RAMP = LinearSegmentedColormap.from_list("spend", ["#f1f4f7", "#a9cbe3", "#4a97c9", "#0b67a5", "#06304f"])
MANY_CLASSES = 30  # more rows than this are not readable on a page
SHOWN_EACH_END = 12
MANY_COLUMNS = 200  # more units than this are averaged by layer

# DejaVu has no East Asian letters; these are used for them where the machine has one.
_FALLBACK_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei")
_STYLE = {
    "text.parse_math": False,  # a label may hold dollar signs
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa5af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": "#e3e8ec",
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "savefig.dpi": 160,
    "svg.hashsalt": "budgetformer",  # the same metrics give the same file, byte for byte
}


@contextmanager
def house_style() -> Iterator[None]:
    """Our look, whatever the user's matplotlibrc says. Artists read it when made and when drawn: keep both inside."""
    installed = set(font_manager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in _FALLBACK_FONTS if name in installed)]
    with style.context(["default", _STYLE | {"font.family": fonts}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        yield


def save(figure: Figure, path: Path) -> None:
    """Write `figure` to `path` in the format of its suffix (.png or .svg), without a date in it."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def spending(budgeted: Mapping[str, Any]) -> tuple[str, str]:
    """The key of what a text spends and its words: of heads alone, or of the FLOPs of heads and blocks together."""
    if budgeted.get("block_share") is None:
        return "head_share", "share of all heads"
    return "units_flops_share", "share of the units' FLOPs"


def share_histogram(budgeted: Mapping[str, Any], target: float | None = None) -> Figure:
    """How many texts spend which share, with the mean and the target."""
    edges, counts = np.asarray(budgeted["share_histogram"]["edges"]), np.asarray(budgeted["share_histogram"]["counts"])
    key, words = spending(budgeted)
    figure, ax = _canvas(6.0, 3.9)
    ax.bar(edges[:-1], counts, np.diff(edges), align="edge", color=BLUE, edgecolor="white", linewidth=0.6)
    if target is not None:
        ax.axvline(target, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), label=f"target {percent(target)}")
    mean, spread = budgeted.get(key), budgeted.get(f"{key}_std")
    if mean is not None:
        text = f"mean {percent(mean)}" + ("" if spread is None else f", standard deviation {100 * spread:.1f} points")
        ax.axvline(mean, color=RED, linewidth=1.8, label=text)
    ax.set(xlim=(0, max(1.0, edges[-1])), xlabel=f"{words} that a text uses (%)", ylabel="texts")
    ax.set_ylim(0, max(1, counts.max()) * 1.06)
    ax.set_title("What the texts spend")
    ax.xaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    ax.grid(axis="y")
    _legend_below(figure, ax)
    return figure


def used(budgeted: Mapping[str, Any], kind: str) -> str:
    """What a map's numbers are: a text that is answered twice runs a unit up to twice."""
    unit = kind.removesuffix("s")
    return f"runs of the {unit} per text (%)" if budgeted.get("answered_again") else f"texts that use the {unit} (%)"


def units_by_layer(budgeted: Mapping[str, Any], kind: str = "heads") -> Figure:
    """Layers x heads, or blocks: in which share of the texts a unit runs; beside it the mean of each layer."""
    gates = np.asarray(budgeted[f"{kind}_by_layer"], dtype=float)
    layers, units = gates.shape
    size = (min(12.0, 5.2 + 0.34 * units), min(14.0, 1.9 + 0.36 * layers))
    figure = Figure(figsize=size, layout="constrained")
    tiles, bars = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    image = _tiles(tiles, gates, np.arange(units + 1.0), np.arange(layers + 1.0))
    if units <= 16 and layers <= 32:
        for (layer, unit), share in np.ndenumerate(gates):
            ink = "white" if share > 0.55 else "#101c26"
            tiles.text(unit + 0.5, layer + 0.5, f"{100 * share:.0f}", ha="center", va="center", color=ink, fontsize=8)
    step = 1 + (units - 1) // 16
    tiles.set_xticks(np.arange(0, units, step) + 0.5, [str(unit + 1) for unit in range(0, units, step)])
    step = 1 + (layers - 1) // 32
    tiles.set_yticks(np.arange(0, layers, step) + 0.5, [str(layer + 1) for layer in range(0, layers, step)])
    tiles.set(xlabel=kind.removesuffix("s"), ylabel="layer")
    _share_bars(bars, np.arange(layers) + 0.5, gates.mean(axis=1), "mean of the layer (%)")
    _title_and_key(figure, image, [tiles, bars], f"Which {kind} run", used(budgeted, kind))
    return figure


def units_by_class(budgeted: Mapping[str, Any], kind: str = "heads") -> Figure:
    """Classes x units, the classes that spend most on top; with many classes only both ends and the mean between."""
    rows = class_rows(budgeted[f"{kind}_by_class"])
    table = np.stack([gates for _, gates, _ in rows])
    layers, units = table.shape[1:]
    if layers * units > MANY_COLUMNS:
        table = table.mean(axis=2, keepdims=True)
    columns = table.shape[2]
    cut = [row for row, (name, _, _) in enumerate(rows) if name is None]
    x, is_column = _spaced([columns] * layers if columns > 1 else [layers])
    y, is_row = _spaced([cut[0], 1, len(rows) - cut[0] - 1] if cut else [len(rows)])
    values = np.full((len(is_row), len(is_column)), np.nan)
    values[np.ix_(is_row, is_column)] = table.reshape(len(rows), -1)

    figure = Figure(figsize=(10.5, 2.0 + 0.235 * y[-1]), layout="constrained")
    tiles, bars = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    image = _tiles(tiles, values, x, y)
    middle = ((y[:-1] + y[1:]) / 2)[is_row]
    tiles.set_yticks(middle, [_class_name(name, count) for name, _, count in rows])
    for row in cut:
        tiles.get_yticklabels()[row].set(color=QUIET, style="italic")
    step = 1 + (layers - 1) // 24
    centres = ((x[:-1] + x[1:]) / 2)[is_column].reshape(layers, columns).mean(axis=1)
    tiles.set_xticks(centres[::step], [str(layer + 1) for layer in range(0, layers, step)])
    tiles.tick_params(axis="x", length=0)
    tiles.set_xlabel("layer" if columns == 1 else f"layer, each with its {units} {kind}")
    _share_bars(bars, middle, table.mean(axis=(1, 2)), f"share of all {kind} (%)", quiet=cut)
    key = used(budgeted, kind) if columns == units else f"{kind} in use, mean over its texts (%)"
    _title_and_key(figure, image, [tiles, bars], f"Which class uses which {kind}", key)
    return figure


def class_rows(by_class: Mapping[str, Sequence[Sequence[float]]]) -> list[tuple[str | None, np.ndarray, int]]:
    """Classes as (name, layers x heads, 1), highest mean share first; the middle of many as one (None, mean, count)."""
    named = [(name, np.asarray(gates, dtype=float), 1) for name, gates in by_class.items()]
    named.sort(key=lambda row: (-row[1].mean(), row[0]))
    if len(named) <= MANY_CLASSES:
        return list(named)
    between = named[SHOWN_EACH_END:-SHOWN_EACH_END]
    mean = np.mean([gates for _, gates, _ in between], axis=0)
    return [*named[:SHOWN_EACH_END], (None, mean, len(between)), *named[-SHOWN_EACH_END:]]


def accuracy_by_budget(
    budgeted: Mapping[str, Any], twins: Mapping[str, Mapping[str, Any]], half_interval: float | None = None
) -> Figure:
    """Accuracy against what texts spend when told to (the run-time dial), with the dense models as lines.

    `twins` maps a legend name ("dense twin") to its metrics; `half_interval` is drawn as a band around the first.
    """
    figure, ax = _canvas(7.2, 4.2)
    key, words = spending(budgeted)
    dial = sorted(budgeted["dial"], key=lambda point: point[key])
    for index, (name, twin) in enumerate(twins.items()):
        accuracy, dashes = twin["accuracy"], ["-", (0, (4, 3))][index % 2]
        ax.axhline(accuracy, color=INK, linewidth=1.4, linestyle=dashes, label=_named(name, twin))
        if index == 0 and half_interval is not None:
            band = (max(0.0, accuracy - half_interval), min(1.0, accuracy + half_interval))
            ax.axhspan(*band, color=EMPTY, label="its 95 % interval on these test texts")
    shares, accuracies = [p[key] for p in dial], [p["accuracy"] for p in dial]
    ax.plot(shares, accuracies, color=BLUE, linewidth=2, marker="o", markersize=5, label="budgeted, told its budget")
    if budgeted.get("accuracy") is not None and budgeted.get(key) is not None:
        point = {"marker": "D", "s": 64, "color": ORANGE, "edgecolor": INK, "zorder": 5}
        name = _named("budgeted, at the budget it learned", budgeted)
        ax.scatter([budgeted[key]], [budgeted["accuracy"]], label=name, **point)
    _accuracy_axes(ax, f"{words} in use, mean over texts (%)")
    ax.set_title("Accuracy against budget")
    _legend_below(figure, ax)
    return figure


def accuracy_by_cost(runs: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Several runs in one picture: accuracy against the FLOPs of the whole model, by the name of the run.

    A line is the budgeted model told its budget, a star the budget it learned, an empty mark at the right the dense
    twin.
    """
    figure, ax = _canvas(6.0, 4.3)
    for index, (name, metrics) in enumerate(runs.items()):
        colour, marker = LINES[index % len(LINES)], MARKERS[index % len(MARKERS)]
        budgeted, dense = metrics["budgeted"], metrics.get("dense") or {}
        dial = sorted(budgeted.get("dial") or [], key=lambda point: point["flops_share"])
        if not dial:  # its colour is kept for other pictures
            continue
        line = {"color": colour, "linewidth": 1.8, "marker": marker, "markersize": 5}
        ax.plot(
            [p["flops_share"] for p in dial], [p["accuracy"] for p in dial], label=plain(name, 40, middle=True), **line
        )
        ax.scatter([budgeted["flops_share"]], [budgeted["accuracy"]], **_star(colour))
        if dense.get("accuracy") is not None:
            ax.scatter([1], [dense["accuracy"]], marker=marker, s=44, facecolor="white", edgecolor=colour, zorder=4)
    _accuracy_axes(ax, "FLOPs of the whole model, share of its dense twin's (%)")
    ax.set_title("Accuracy against cost")
    _legend_below(figure, ax)
    return figure


def accuracy_by_time(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Several runs in one picture: accuracy against milliseconds per text, points of `tune` by the name of the run.

    A line is the named budgets, a dotted one first answers with other margins, a star the learned budget.
    """
    figure, ax = _canvas(6.0, 4.3)
    for index, (name, points) in enumerate(curves.items()):
        colour, marker = LINES[index % len(LINES)], MARKERS[index % len(MARKERS)]
        if not points:  # as above
            continue
        named = sorted((p for p in points if p["budget"] is not None), key=lambda point: point["ms_per_text"])
        learned = [p for p in points if p["budget"] is None and p.get("margin") is None]
        twice = sorted((p for p in points if p.get("margin") is not None), key=lambda point: point["ms_per_text"])
        line = {"color": colour, "linewidth": 1.8, "marker": marker, "markersize": 5}
        label = plain(name, 40, middle=True)
        ax.plot([p["ms_per_text"] for p in named], [p["accuracy"] for p in named], label=label, **line)
        times, accuracies = [p["ms_per_text"] for p in twice], [p["accuracy"] for p in twice]
        ax.plot(times, accuracies, **{**line, "linestyle": ":"})
        ax.scatter([p["ms_per_text"] for p in learned], [p["accuracy"] for p in learned], **_star(colour))
    _accuracy_axes(ax, "milliseconds per text")
    ax.set_xlim(0, 1.05 * max(point["ms_per_text"] for points in curves.values() for point in points))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.set_title("Accuracy against time")
    _legend_below(figure, ax)
    return figure


def _star(colour: str) -> dict[str, Any]:
    return {"marker": "*", "s": 150, "color": colour, "edgecolor": INK, "linewidth": 0.8, "zorder": 5}


def reliability(models: Mapping[str, Mapping[str, Any]]) -> Figure:
    """How often answers are right against how sure they are, by the name of the model; larger marks, more answers."""
    figure, ax = _canvas(6.0, 4.6)
    ax.plot([0, 1], [0, 1], color=QUIET, linewidth=1, linestyle=(0, (4, 3)), label="as sure as right")
    for index, (name, calibration) in enumerate(models.items()):
        bins, colour, marker = calibration["bins"], LINES[index % len(LINES)], MARKERS[index % len(MARKERS)]
        x, y = [one["confidence"] for one in bins], [one["accuracy"] for one in bins]
        size = np.sqrt([one["answers"] for one in bins])
        ax.plot(x, y, color=colour, linewidth=1.2)
        label = f"{name}: off by {percent(calibration['ece'])} in the mean"
        ax.scatter(x, y, s=20 + 120 * size / size.max(), color=colour, marker=marker, alpha=0.85, label=label)
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="how sure the answer is (%)", ylabel="how often it is right (%)")
    ax.set_title("Calibration")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1, symbol=""))
    ax.grid()
    _legend_below(figure, ax, columns=1)
    return figure


def _accuracy_axes(ax: Axes, words: str) -> None:
    """Cost from 0 to all of it against accuracy, with no less than two points of accuracy between top and bottom."""
    ax.set(xlim=(0, 1.02), xlabel=words, ylabel="accuracy (%)")
    low, high = ax.get_ylim()
    if high - low < 0.02:  # otherwise noise fills the picture
        ax.set_ylim((low + high) / 2 - 0.01, (low + high) / 2 + 0.01)
    ax.xaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    ax.grid()


def _class_name(name: str | None, count: int) -> str:
    return f"mean of the {count} classes between" if name is None else plain(name, 36, middle=True)


def _named(name: str, metrics: Mapping[str, Any]) -> str:
    return f"{name}: {percent(metrics['accuracy'])}"


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _legend_below(figure: Figure, ax: Axes, columns: int = 2) -> None:
    if ax.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=columns, handlelength=2.4, columnspacing=2.4)


def _spaced(sizes: Sequence[int], gap: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Edges of unit cells in groups of `sizes` with a gap between groups, and which of the cells is not a gap."""
    widths: list[float] = []
    for size in sizes:
        widths += [gap] * bool(widths) + [1.0] * size
    return np.concatenate([[0.0], np.cumsum(widths)]), np.asarray(widths) == 1.0


def _tiles(ax: Axes, values: np.ndarray, x: np.ndarray, y: np.ndarray) -> Any:
    """A heat map of shares from 0 to 1, first row on top; NaN is left white."""
    line = 1.2 if len(x) < 30 else 0.35
    image = ax.pcolormesh(x, y, values, cmap=RAMP, vmin=0, vmax=1, edgecolors="white", linewidth=line)
    ax.set_ylim(y[-1], y[0])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return image


def _share_bars(ax: Axes, y: np.ndarray, shares: np.ndarray, label: str, quiet: Sequence[int] = ()) -> None:
    """Bars on a track from 0 to 100 % beside the rows of a heat map, with their value; rows in `quiet` are grey."""
    colours = ["#9aa5af" if row in quiet else BLUE for row in range(len(shares))]
    ax.barh(y, np.ones(len(shares)), height=0.56, color=EMPTY)
    ax.barh(y, shares, height=0.56, color=colours)
    for row, share in zip(y, shares, strict=True):
        ax.text(1.04, row, f"{100 * share:.0f}", va="center", color=INK, fontsize=8)
    ax.set(xlim=(0, 1.2), xticks=[0, 0.5, 1], xlabel=label)
    ax.xaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    ax.tick_params(axis="both", length=0, labelleft=False)
    ax.spines[:].set_visible(False)


def _title_and_key(figure: Figure, image: Any, axes: list[Axes], title: str, label: str) -> None:
    """The title on the left and the key to the colours on the right, both in the strip above `axes`."""
    key = figure.colorbar(image, ax=axes, location="top", shrink=0.36, aspect=26, anchor=(1.0, 0.0), pad=0.02)
    key.set_label(label, fontsize=9)
    key.ax.xaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    key.ax.tick_params(labelsize=8, length=2)
    key.ax.spines[:].set_visible(False)
    place = {"xycoords": "axes fraction", "xytext": (0, 16), "textcoords": "offset points"}
    drawn = axes[0].annotate(title, (0, 1), fontsize=12, fontweight="bold", **place)
    drawn.set_in_layout(False)  # the key has made the room
