"""A picture of what one text spent: layers x units as filled and empty squares, budgets, and class probabilities.

`terminal` draws it for a console, `png` for a file. Heads stand alone, or with the blocks of the feed-forward layer
below them where these have a budget too. Signs differ in shape, not in colour alone.
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


@dataclass(frozen=True)
class Row:
    """One kind of unit in one layer, with its budget as a share.

    ran: 2 where a unit ran in the first answer, 1 where in a second one alone, else 0.
    """

    layer: int
    kind: str
    wanted: float
    ran: list[int]

    @property
    def on(self) -> int:
        """Units of the first answer."""
        return self.ran.count(2)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a model did with one text.

    `wanted` holds each layer's budget of heads as a share. `gates` says how often each head ran, per layer and head: 0
    or 1, and once more for a text that was answered again with every unit on. `blocks` says the same of the blocks of
    feed-forward neurons and `blocks_wanted` holds their budgets; None where they have none. `head_share` and
    `flops_share` are shares of the dense model, `units_share` that of the FLOPs of all units with a budget. Raises
    ValueError when the lists do not fit together.
    """

    text: str
    tokens: int
    labels: list[str]
    probabilities: list[float]
    wanted: list[float]
    gates: list[list[int]]
    head_share: float
    flops_share: float
    units_share: float | None = None
    blocks: list[list[int]] | None = None
    blocks_wanted: list[float] | None = None

    def __post_init__(self) -> None:
        """Hold the lists to each other, so that no picture pairs a name with another's number."""
        if not self.labels or len(self.labels) != len(self.probabilities):
            raise ValueError(f"{len(self.labels)} labels for {len(self.probabilities)} probabilities: one for each")
        self._check("gates", self.gates, self.wanted, "heads")
        if self.blocks is not None:
            self._check("blocks", self.blocks, self.blocks_wanted or [], "blocks")
            if len(self.blocks) != len(self.gates):
                raise ValueError(f"blocks of {len(self.blocks)} layers, gates of {len(self.gates)}: as many of each")

    @staticmethod
    def _check(name: str, rows: list[list[int]], wanted: list[float], units: str) -> None:
        if not rows or len(rows) != len(wanted):
            raise ValueError(f"{name} of {len(rows)} layers for {len(wanted)} budgets: one row for each")
        if not rows[0] or len({len(row) for row in rows}) != 1:
            raise ValueError(f"{name} have {[len(row) for row in rows]} {units}: every layer has the same number")

    @property
    def rows(self) -> list[Row]:
        """Layer by layer, heads before blocks."""
        kinds = [("heads", self.wanted, self.gates)]
        if self.blocks is not None:
            kinds.append(("blocks", self.blocks_wanted or [], self.blocks))
        again = int(self.again)
        return [
            Row(layer + 1, kind, wanted[layer], [2 if count > again else min(count, 1) for count in rows[layer]])
            for layer in range(len(self.gates))
            for kind, wanted, rows in kinds
        ]

    @property
    def again(self) -> bool:
        """Whether the text was answered twice."""
        return any(count > 1 for rows in (self.gates, self.blocks or []) for row in rows for count in row)

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """(label, probability), most probable first; ties keep the order of the labels."""
        return sorted(zip(self.labels, self.probabilities, strict=True), key=lambda pair: -pair[1])

    @property
    def summary(self) -> str:
        """The cost of the text in one line."""
        heads = f"{_ran(self.gates, 'head')} ({percent(self.head_share)})"
        blocks = "" if self.blocks is None else f"{_ran(self.blocks, 'block')} ({percent(_mean(self.blocks))}), "
        units = "" if self.units_share is None else f"{percent(self.units_share)} of the units' FLOPs, "
        read = f"{self.tokens:,} token{'s' * (self.tokens != 1)}"
        return f"{heads}, {blocks}{units}{percent(self.flops_share)} of the dense model's FLOPs, {read}"

    @property
    def note(self) -> str:
        """What is special about this answer; empty when nothing is."""
        return "answered twice: the first answer was unsure, so every unit ran once more" if self.again else ""

    @property
    def remainder(self) -> str:
        """What the classes not shown hold at most; empty when all are shown. True of multi-label models, too."""
        rest = self.ranked[SHOWN_CLASSES:]
        if not rest:
            return ""
        return f"{len(rest)} more class{'es' * (len(rest) > 1)}, none above {percent(rest[0][1])}"


def _mean(rows: list[list[int]]) -> float:
    return sum(map(sum, rows)) / (len(rows) * len(rows[0]))


def _ran(rows: list[list[int]], unit: str) -> str:
    """`31 of 72 heads`; of two answers each with its own number, `31 + 72 of 72 heads`."""
    on, of = sum(map(sum, rows)), len(rows) * len(rows[0])
    ran = f"{on - of} + {of}" if any(count > 1 for row in rows for count in row) else str(on)
    return f"{ran} of {of} {unit}{'s' * (of != 1)}"


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
        if shown.note:
            later, first = _SIGNS[ascii_only][1:]
            yield Text(f"{shown.note} ({first} in the first, {later} in the second alone)", style="dim")
        yield Text()

        rows, both = shown.rows, shown.blocks is not None
        units = max(len(row.ran) for row in rows)
        names = 8 if both else 0  # the column that says which kind a row is
        spaced = 2 * units + 34 + names <= options.max_width
        taken = 16 + names + len(f"{units}/{units}") + (2 * units if spaced else units)
        bar = max(6, min(20, options.max_width - taken))
        grid = Table.grid(padding=(0, 2))
        if both:
            grid.add_column(justify="right", overflow="fold")
        for justify in ("left" if both else "right", "left", "right", "left"):
            grid.add_column(justify=justify, overflow="fold")
        headings = ("layer", "", "units") if both else ("layer", "heads")
        grid.add_row(*(Text(word, style="dim") for word in (*headings, "on", "budget")))
        for row in rows:
            budget = _bar(row.wanted, bar, ascii_only, row.kind).append(f" {100 * row.wanted:3.0f} %")
            first = [str(row.layer) if row.kind == "heads" else "", *([row.kind] if both else [])]
            grid.add_row(*first, _squares(row, spaced, ascii_only), f"{row.on}/{len(row.ran)}", budget)
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


_SIGNS = {False: "□▣■", True: ".+#"}  # of 0, 1 and 2 in Row.ran; in ASCII
_STYLES = {"heads": "blue", "blocks": "green"}


def _squares(row: Row, spaced: bool, ascii_only: bool) -> "Text":
    """The units of one kind in one layer; styles only underline what the signs already say."""
    from rich.text import Text

    styles = ("dim", "dim", f"bold {_STYLES[row.kind]}")
    signs = [Text(_SIGNS[ascii_only][ran], style=styles[ran]) for ran in row.ran]
    return Text(" " if spaced else "").join(signs)


def _bar(share: float, width: int, ascii_only: bool, kind: str = "heads") -> "Text":
    """A heavy line on a light one; a share above 0 shows at least half a sign."""
    from rich.text import Text

    halves = round(2 * width * min(1.0, max(0.0, share)))
    halves = max(halves, int(share > 0))
    if ascii_only:
        full = (halves + 1) // 2
        return Text("#" * full).append("-" * (width - full), style="dim")
    full, half = divmod(halves, 2)
    return Text("━" * full + "╸" * half, style=_STYLES[kind]).append("─" * (width - full - half), style="dim")


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

    rows, both = inspection.rows, inspection.blocks is not None
    units, layers = max(len(row.ran) for row in rows), len(inspection.gates)
    lines = _wrapped(f"“{plain(inspection.text, 300)}”", 8.6, 12.5, last="…”")
    words = _wrapped(inspection.summary, 9.0, 10)
    words += [f"{inspection.note} (dots: in the second alone)"] * inspection.again
    gap = 0.35 if both else 0.0  # between layers, in squares
    square = min(0.3, 5.4 / units, 9.0 / (len(rows) + gap * layers))
    ranked = inspection.ranked[:SHOWN_CLASSES]
    top = 0.62 + 0.25 * len(lines) + 0.23 * (len(words) - 1) + 0.5
    chances_top = top + square * (len(rows) + gap * (layers - 1)) + 0.62
    names_width = 0.62 if both else 0.0
    width = 9.4 + names_width
    height = chances_top + 0.32 * len(ranked) + (0.42 if inspection.remainder else 0.18)

    sheet = Figure(figsize=(width, height))
    ax = sheet.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.set_axis_off()
    for index, line in enumerate(lines):
        ax.text(0.35, 0.42 + 0.25 * index, line, fontsize=12.5, fontweight="bold")
    for index, line in enumerate(words):
        ax.text(0.35, 0.45 + 0.25 * len(lines) + 0.23 * index, line, color=QUIET)

    names_left, grid_left = 0.85, 0.85 + names_width
    bar_left = grid_left + square * units + 0.35
    right = width - 0.35
    bar_width = right - 1.0 - 0.75 - bar_left
    share_right = right - 1.0
    places = [top + square * (index + gap * (row.layer - 1)) for index, row in enumerate(rows)]
    _draw_squares(ax, rows, places, grid_left, square)
    headings = [(names_left - 0.12, "layer", "right"), (grid_left + 0.02, "units" if both else "heads", "left")]
    headings += [(bar_left, "budget" if both else "budget of the layer", "left")]
    headings += [(right, "on" if both else "heads on", "right")]
    for x, word, side in headings:
        ax.text(x, top - 0.1, word, fontsize=9, color=QUIET, ha=side)
    step = 1 + int(0.16 / square)  # skip lines that would touch
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        middle, colour = place + square / 2, _colour(row.kind)
        _draw_bar(ax, bar_left, middle, bar_width, 0.5 * square, row.wanted, colour)
        if index % step:
            continue
        if row.kind == "heads":
            ax.text(names_left - 0.12, middle, str(row.layer), ha="right", va="center")
        if both:
            ax.text(names_left + 0.02, middle, row.kind, va="center", fontsize=9, color=QUIET)
        ax.text(share_right, middle, f"{100 * row.wanted:.0f} %", ha="right", va="center")
        ax.text(right, middle, f"{row.on} of {len(row.ran)}", ha="right", va="center")

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


def _wrapped(text: str, inches: float, size: float, last: str = "…") -> list[str]:
    """At most three lines of `text` in bold letters of `size` points, broken at spaces where there are any."""
    rest, lines = text, []
    while rest and len(lines) < 3:
        fits = bisect_right(range(len(rest) + 1), inches, key=lambda length: _inches(rest[:length], size)) - 1
        space = rest.rfind(" ", 1, fits + 1)
        cut = fits if fits == len(rest) or space < 0 else space
        lines.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    if rest:
        lines[-1] = lines[-1][:-3].rstrip() + last
    return lines


def _colour(kind: str) -> str:
    from budgetformer.report.figures import BLUE, GREEN

    return {"heads": BLUE, "blocks": GREEN}[kind]


def _draw_squares(ax: Any, rows: list[Row], places: list[float], left: float, square: float) -> None:
    """Filled where a unit ran in the first answer, a dot where in the second alone."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Circle, FancyBboxPatch, Patch

    from budgetformer.report.figures import OFF

    side = 0.74 * square
    shape = f"round,pad=0,rounding_size={0.16 * square}"
    squares: list[Patch] = []
    dots: list[Patch] = []
    faces, edges, inks = [], [], []
    for row, top in zip(rows, places, strict=True):
        colour = _colour(row.kind)
        for unit, ran in enumerate(row.ran):
            x, y = left + square * (unit + 0.5), top + square / 2
            squares.append(FancyBboxPatch((x - side / 2, y - side / 2), side, side, boxstyle=shape))
            faces.append(colour if ran == 2 else "white")
            edges.append(colour if ran == 2 else OFF)
            if ran == 1:
                dots.append(Circle((x, y), 0.13 * square))
                inks.append(colour)
    ax.add_collection(PatchCollection(squares, facecolors=faces, edgecolors=edges, linewidths=0.9))
    if dots:
        ax.add_collection(PatchCollection(dots, facecolors=inks, linewidths=0))


def _draw_bar(
    ax: Any, left: float, middle: float, width: float, height: float, share: float, colour: str | None = None
) -> None:
    from matplotlib.patches import Rectangle

    from budgetformer.report.figures import BLUE, EMPTY

    ax.add_patch(Rectangle((left, middle - height / 2), width, height, color=EMPTY, linewidth=0))
    filled = width * min(1.0, max(0.0, share))
    ax.add_patch(Rectangle((left, middle - height / 2), filled, height, color=colour or BLUE, linewidth=0))
