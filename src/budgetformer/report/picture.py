"""A picture of what one text spent: layers x heads as filled and empty squares, budgets, and class probabilities.

`terminal` draws it for a console, `png` for a file. Filled and empty differ in shape, not in colour alone.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.report.wording import percent, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

SHOWN_CLASSES = 5


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a model did with one text.

    `wanted` holds each layer's budget as a share, `gates` 0 or 1 per layer and head; `head_share` and `flops_share` are
    shares of the dense model. Raises ValueError when the lists do not fit together.
    """

    text: str
    tokens: int
    labels: list[str]
    probabilities: list[float]
    wanted: list[float]
    gates: list[list[int]]
    head_share: float
    flops_share: float

    def __post_init__(self) -> None:
        """Hold the lists to each other, so that no picture pairs a name with another's number."""
        if not self.labels or len(self.labels) != len(self.probabilities):
            raise ValueError(f"{len(self.labels)} labels for {len(self.probabilities)} probabilities: one for each")
        if not self.gates or len(self.gates) != len(self.wanted):
            raise ValueError(f"gates of {len(self.gates)} layers for {len(self.wanted)} budgets: one row for each")
        if not self.gates[0] or len({len(row) for row in self.gates}) != 1:
            raise ValueError(f"gates have {[len(row) for row in self.gates]} heads: every layer has the same number")

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """(label, probability), most probable first; ties keep the order of the labels."""
        return sorted(zip(self.labels, self.probabilities, strict=True), key=lambda pair: -pair[1])

    @property
    def summary(self) -> str:
        """The cost of the text in one line."""
        on, of = sum(map(sum, self.gates)), len(self.gates) * len(self.gates[0])
        heads = f"{on} of {of} head{'s' * (of != 1)} ({percent(self.head_share)})"
        read = f"{self.tokens:,} token{'s' * (self.tokens != 1)}"
        return f"{heads}, {percent(self.flops_share)} of the dense model's FLOPs, {read}"

    @property
    def remainder(self) -> str:
        """What the classes not shown hold at most; empty when all are shown. True of multi-label models, too."""
        rest = self.ranked[SHOWN_CLASSES:]
        if not rest:
            return ""
        return f"{len(rest)} more class{'es' * (len(rest) > 1)}, none above {percent(rest[0][1])}"


@dataclass(frozen=True)
class _Terminal:
    """Draws itself when the console is known: its width decides the spacing, its encoding the signs."""

    inspection: Inspection

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType]":
        from rich.table import Table
        from rich.text import Text

        shown, ascii_only = self.inspection, options.ascii_only
        quote = plain(shown.text, 2 * max(20, options.max_width - 4))
        yield Text(f'"{_ascii(quote)}"' if ascii_only else f"“{quote}”", style="italic")
        yield Text(shown.summary, style="bold")
        yield Text()

        heads = len(shown.gates[0])
        spaced = 2 * heads + 34 <= options.max_width
        bar = max(6, min(20, options.max_width - 16 - len(f"{heads}/{heads}") - (2 * heads if spaced else heads)))
        grid = Table.grid(padding=(0, 2))
        for justify in ("right", "left", "right", "left"):
            grid.add_column(justify=justify, overflow="fold")
        grid.add_row(*(Text(word, style="dim") for word in ("layer", "heads", "on", "budget")))
        for index, (row, wanted) in enumerate(zip(shown.gates, shown.wanted, strict=True), start=1):
            budget = _bar(wanted, bar, ascii_only).append(f" {100 * wanted:3.0f} %")
            grid.add_row(str(index), _squares(row, spaced, ascii_only), f"{sum(row)}/{heads}", budget)
        yield grid
        yield Text()

        ranked = shown.ranked[:SHOWN_CLASSES]
        bar = max(6, min(20, options.max_width // 4))
        room = max(8, options.max_width - bar - 12)
        names = [plain(label, min(room, 48), middle=True) for label, _ in ranked]
        names = [_ascii(name) for name in names] if ascii_only else names
        chances = Table.grid(padding=(0, 2))
        for justify in ("left", "left", "right"):
            chances.add_column(justify=justify, no_wrap=True)
        for place, (name, (_, chance)) in enumerate(zip(names, ranked, strict=True)):
            style = "bold" if place == 0 else ""
            chances.add_row(Text(name, style=style), _bar(chance, bar, ascii_only), Text(percent(chance), style=style))
        yield chances
        if shown.remainder:
            yield Text(shown.remainder, style="dim")


def terminal(inspection: Inspection) -> "RenderableType":
    """The picture for `rich.console.Console.print`, at any width, without colour and in ASCII where need be."""
    return _Terminal(inspection)


def _ascii(text: str) -> str:
    """What a terminal without Unicode can show: other letters as their numbers, rather than a crash."""
    return text.replace("…", "...").encode("ascii", "backslashreplace").decode("ascii")


def _squares(row: list[int], spaced: bool, ascii_only: bool) -> "Text":
    """One layer's heads; styles only underline what the two signs already say."""
    from rich.text import Text

    on, off = ("#", ".") if ascii_only else ("■", "□")
    signs = [Text(on, style="bold blue") if gate else Text(off, style="dim") for gate in row]
    return Text(" " if spaced else "").join(signs)


def _bar(share: float, width: int, ascii_only: bool) -> "Text":
    """A heavy line on a light one; a share above 0 shows at least half a sign."""
    from rich.text import Text

    halves = round(2 * width * min(1.0, max(0.0, share)))
    halves = max(halves, int(share > 0))
    if ascii_only:
        full = (halves + 1) // 2
        return Text("#" * full).append("-" * (width - full), style="dim")
    full, half = divmod(halves, 2)
    return Text("━" * full + "╸" * half, style="blue").append("─" * (width - full - half), style="dim")


def png(inspection: Inspection, path: str | Path) -> None:
    """Write the picture to `path` as a PNG, whatever its suffix. Raises OSError when it cannot be written."""
    from budgetformer.report.figures import house_style

    with house_style():
        figure(inspection).savefig(path, format="png")


def figure(inspection: Inspection) -> "Figure":
    """The picture as a matplotlib figure; call it, and save it, inside `figures.house_style()`.

    One sheet measured in inches from its upper left corner, so that squares are square at any number of heads.
    """
    from matplotlib.figure import Figure

    from budgetformer.report.figures import QUIET

    layers, heads = len(inspection.gates), len(inspection.gates[0])
    lines = _wrapped(inspection.text, 8.6)
    square = min(0.3, 5.4 / heads, 9.0 / layers)
    ranked = inspection.ranked[:SHOWN_CLASSES]
    top = 0.62 + 0.25 * len(lines) + 0.5
    chances_top = top + square * layers + 0.62
    width, height = 9.4, chances_top + 0.32 * len(ranked) + (0.42 if inspection.remainder else 0.18)

    sheet = Figure(figsize=(width, height))
    ax = sheet.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.set_axis_off()
    for index, line in enumerate(lines):
        ax.text(0.35, 0.42 + 0.25 * index, line, fontsize=12.5, fontweight="bold")
    ax.text(0.35, 0.45 + 0.25 * len(lines), inspection.summary, color=QUIET)

    grid_left, bar_left = 0.85, 0.85 + square * heads + 0.35
    right = width - 0.35
    bar_width = right - 1.0 - 0.75 - bar_left
    share_right = right - 1.0
    _draw_squares(ax, inspection.gates, grid_left, top, square)
    headings = [(grid_left - 0.12, "layer", "right"), (grid_left + 0.02, "heads", "left")]
    headings += [(bar_left, "budget of the layer", "left"), (right, "heads on", "right")]
    for x, word, side in headings:
        ax.text(x, top - 0.1, word, fontsize=9, color=QUIET, ha=side)
    step = 1 + int(0.16 / square)  # skip lines that would touch
    for layer in range(0, layers, step):
        middle = top + square * (layer + 0.5)
        row = inspection.gates[layer]
        ax.text(grid_left - 0.12, middle, str(layer + 1), ha="right", va="center")
        ax.text(share_right, middle, f"{100 * inspection.wanted[layer]:.0f} %", ha="right", va="center")
        ax.text(right, middle, f"{sum(row)} of {heads}", ha="right", va="center")
    for layer, share in enumerate(inspection.wanted):
        _draw_bar(ax, bar_left, top + square * (layer + 0.5), bar_width, 0.5 * square, share)

    names = [plain(label, 40, middle=True) for label, _ in ranked]
    chance_left = 0.35 + 0.2 + max(_inches(name, 10) for name in names)
    for place, (name, (_, chance)) in enumerate(zip(names, ranked, strict=True)):
        middle, weight = chances_top + 0.32 * place, "bold" if place == 0 else "normal"
        ax.text(0.35, middle, name, va="center", fontweight=weight)
        _draw_bar(ax, chance_left, middle, bar_left + bar_width - chance_left, 0.15, chance)
        ax.text(share_right, middle, percent(chance), ha="right", va="center", fontweight=weight)
    if inspection.remainder:
        ax.text(0.35, chances_top + 0.32 * len(ranked), inspection.remainder, fontsize=9, color=QUIET, va="center")
    return sheet


def _inches(text: str, size: float) -> float:
    """How wide matplotlib will set `text` in bold letters of `size` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size, weight="bold"), False)
    return width / 72


def _wrapped(text: str, inches: float) -> list[str]:
    """At most three quoted lines of `text`, broken at spaces where there are any."""
    rest, lines = f"“{plain(text, 300)}”", []
    while rest and len(lines) < 3:
        fits = bisect_right(range(len(rest) + 1), inches, key=lambda length: _inches(rest[:length], 12.5)) - 1
        space = rest.rfind(" ", 1, fits + 1)
        cut = fits if fits == len(rest) or space < 0 else space
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    if rest:
        lines[-1] = f"{lines[-1][:-3].rstrip()}…”"
    return lines


def _draw_squares(ax: Any, gates: list[list[int]], left: float, top: float, square: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import FancyBboxPatch

    from budgetformer.report.figures import BLUE

    side, patches, faces = 0.74 * square, [], []
    for layer, row in enumerate(gates):
        for head, gate in enumerate(row):
            corner = (left + square * head + 0.13 * square, top + square * layer + 0.13 * square)
            patches.append(FancyBboxPatch(corner, side, side, boxstyle=f"round,pad=0,rounding_size={0.16 * square}"))
            faces.append(BLUE if gate else "white")
    edges = [face if face == BLUE else "#b3bdc6" for face in faces]
    ax.add_collection(PatchCollection(patches, facecolors=faces, edgecolors=edges, linewidths=0.9))


def _draw_bar(ax: Any, left: float, middle: float, width: float, height: float, share: float) -> None:
    from matplotlib.patches import Rectangle

    from budgetformer.report.figures import BLUE, EMPTY

    ax.add_patch(Rectangle((left, middle - height / 2), width, height, color=EMPTY, linewidth=0))
    filled = width * min(1.0, max(0.0, share))
    ax.add_patch(Rectangle((left, middle - height / 2), filled, height, color=BLUE, linewidth=0))
