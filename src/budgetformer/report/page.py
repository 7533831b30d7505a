"""One HTML page of one run or several: tables, curves and maps, with nothing to fetch and no scripts.

Curves are matplotlib's, as SVG whose colours are variables of the page, so that they follow light and dark. Maps are
tables. The template escapes every string; what strangers wrote goes through `plain` too.
"""

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree  # reads matplotlib's drawings alone # nosec B405

from budgetformer.errors import ModelFolderError
from budgetformer.outputs import write_aside
from budgetformer.report import tables
from budgetformer.report.tables import CAPTIONS, DASH, Metrics
from budgetformer.report.wording import percent, plain, without_folders

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BYTES = 200_000_000  # of a metrics.json
MANY_CLASSES = 200  # a larger matrix of confusions is not drawn
NAMED_CLASSES = 40  # a larger one has no room for numbers
CONFUSED = 15  # pairs of classes that are listed
TEXT = 300  # columns that are shown of a text
SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
EXAMPLES = {
    "hardest": "Hardest: the label was the least expected",
    "dearest": "Dearest: most was spent on them",
    "cheapest": "Cheapest: least was spent on them",
}

Examples = Mapping[str, Sequence[Mapping[str, Any]]]


def read_run(folder: str | Path) -> dict[str, Any]:
    """What `train` measured of a run, and under `curve` what `tune` did where it was used.

    Raises:
        ModelFolderError: the folder holds no metrics of a budgeted model, or a damaged file.
    """
    metrics = _read(Path(folder) / "metrics.json")
    if not isinstance(metrics.get("budgeted"), dict):
        raise ModelFolderError(f"{folder}: metrics.json holds no budgeted model; give the folder of a run of train")
    tuned = Path(folder) / "engine.json"
    metrics["curve"] = _read(tuned).get("curve") or [] if tuned.is_file() else []
    return metrics


def _read(path: Path) -> dict[str, Any]:
    remedy = "give the folder of a run of train"
    if not path.is_file():
        raise ModelFolderError(f"{path}: no such file; {remedy}")
    if path.stat().st_size > MAX_BYTES:
        raise ModelFolderError(f"{path}: larger than {MAX_BYTES:,} bytes; not a file of ours")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ModelFolderError(f"{path}: not valid JSON; {remedy}") from None
    if not isinstance(found, dict):
        raise ModelFolderError(f"{path}: holds a {type(found).__name__}, not an object; {remedy}")
    return found


def write_page(runs: Mapping[str, Metrics], path: str | Path, examples: Mapping[str, Examples] | None = None) -> Path:
    """Write the page to `path`, and the numbers behind it as JSON beside it; return where they are.

    runs: what `read_run` gives, by name. examples: `hardest`, `dearest` and `cheapest` texts of some of the runs; they
    are shown in both files.

    Raises:
        ModelFolderError: numbers of a run that cannot be drawn.
        OSError: a file cannot be written.
    """
    numbers = Path(path).with_suffix(".json")
    text = page(runs, examples, numbers=numbers.name)
    behind = {name: _shared(metrics) | {"examples": (examples or {}).get(name)} for name, metrics in runs.items()}
    with write_aside(numbers) as aside:
        found = json.dumps(_finite({"runs": behind}), ensure_ascii=False, indent=1)
        aside.write_text(found, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair, as JSON has it
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="replace")
    return numbers


def page(
    runs: Mapping[str, Metrics], examples: Mapping[str, Examples] | None = None, *, numbers: str = "report.json"
) -> str:
    """The page as a string; `numbers` is what the file of the numbers is called. Errors as `write_page`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from budgetformer import __version__
    from budgetformer.report.figures import house_style

    environment = Environment(
        loader=PackageLoader("budgetformer.report", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["percent"] = percent
    seen = []
    with house_style():
        for place, (name, metrics) in enumerate(runs.items(), start=1):
            with _as_train_writes(name):
                seen.append(_run(name, metrics, (examples or {}).get(name), f"run-{place}-"))
        with _as_train_writes(", ".join(runs)):
            curves, compared = _curves(runs), _compared(runs)
    template = environment.get_template("page.html")
    return template.render(runs=seen, curves=curves, compared=compared, version=__version__, numbers=numbers)


@contextmanager
def _as_train_writes(name: str) -> Iterator[None]:
    """One line for numbers that are missing, or of another shape than train and tune give them."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelFolderError(
            f"{name}: its metrics.json is not as train writes it ({type(error).__name__}); measure it again"
        ) from error


def svg(figure: "Figure", label: str, prefix: str) -> Any:
    """A figure as SVG for the page: text is text, colours are the page's variables, ids begin with `prefix`.

    label: what a screen reader says of it.
    """
    from markupsafe import Markup
    from matplotlib import rc_context

    from budgetformer.report import figures

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    colours = {
        **{"#ffffff": "paper", "#000000": "ink", figures.INK: "ink", figures.QUIET: "quiet", figures.EMPTY: "empty"},
        **{"#9aa5af": "edge", "#e3e8ec": "grid", figures.BLUE: "blue", figures.ORANGE: "orange"},
        **{figures.GREEN: "green", figures.RED: "red", figures.PINK: "pink", figures.SKY: "sky"},
    }
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(file.getvalue())  # what was drawn above # nosec B314
    for parent in list(root.iter()):
        for child in list(parent):  # the style is one of the whole page
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for node in root.iter():
        if LINK in node.attrib:  # HTML does not read other names of this namespace than xlink
            node.set("href", f"#{prefix}{node.attrib.pop(LINK)[1:]}")
        for key, value in node.attrib.items():
            if key == "id":
                node.set(key, prefix + value)
            elif key == "href":
                continue
            elif key == "style":
                node.set(key, re.sub(r"#[0-9a-f]{6}", lambda hit: _variable(hit[0], colours), value))
            else:
                node.set(key, value.replace("url(#", f"url(#{prefix}"))
    width = float(root.attrib.pop("width").removesuffix("pt"))
    del root.attrib["height"]
    root.set("style", f"max-width: {width / 72:.2f}in")
    root.set("role", "img")
    root.set("aria-label", label)
    drawn = ElementTree.tostring(root, encoding="unicode")
    return Markup(drawn)  # of a tree, so that no text in it can be a tag # nosec B704


def _variable(colour: str, names: Mapping[str, str]) -> str:
    return f"var(--{names[colour]})" if colour in names else colour


def _curves(runs: Mapping[str, Metrics]) -> list[dict[str, Any]]:
    """All runs in one picture: accuracy against FLOPs, and against time where `tune` has measured it."""
    from budgetformer.report import figures

    drawn = []
    if any(metrics["budgeted"].get("dial") for metrics in runs.values()):
        caption = (
            "Accuracy when the model is told its budget, against the FLOPs of the whole model. The star is the budget "
            "it learned, the empty mark its dense twin."
        )
        drawn.append(_drawn(figures.accuracy_by_cost(runs), caption, "cost-"))
    timed = {name: [p for p in metrics["curve"] if p.get("accuracy") is not None] for name, metrics in runs.items()}
    if any(timed.values()):
        caption = "Accuracy against time, as tune measured it on its machine. The star is the budget it learned."
        drawn.append(_drawn(figures.accuracy_by_time(timed), caption, "time-"))
    return drawn


def _drawn(figure: "Figure", caption: str, prefix: str) -> dict[str, Any]:
    return {"svg": svg(figure, caption, prefix), "caption": caption}


def _run(name: str, metrics: Metrics, examples: Examples | None, prefix: str) -> dict[str, Any]:
    """What the template shows of one run; `prefix` makes its ids its own."""
    from budgetformer.report import figures

    budgeted = metrics["budgeted"]
    header, body = tables.cells(metrics)
    drawn = []
    if budgeted.get("share_histogram"):
        histogram = figures.share_histogram(budgeted, (metrics.get("settings") or {}).get("target_budget"))
        drawn.append(_drawn(histogram, CAPTIONS["share_histogram"], f"{prefix}histogram-"))
    if calibrations := tables.calibrations(metrics):
        drawn.append(_drawn(figures.reliability(calibrations), CAPTIONS["reliability"], f"{prefix}calibration-"))
    shared = _shared(metrics)
    folded = [(title, shared.get(key)) for title, key in (("Settings", "settings"), ("Environment", "environment"))]
    return {
        "name": plain(name),
        "data": tables.data_line(metrics.get("data") or {}),
        "header": header,
        "body": body,
        "notes": tables.notes(metrics),
        "figures": drawn,
        "moved": _moved(budgeted.get("moved") or {}),
        "maps": _maps(budgeted),
        "confused": _confused(budgeted.get("confusion")),
        "confusion": _confusion(budgeted.get("confusion")),
        "classes": _classes(budgeted.get("classes") or {}),
        "examples": _examples(examples or {}),
        "folded": [(title, tables.listing(values)) for title, values in folded if values],
    }


def _compared(runs: Mapping[str, Metrics]) -> dict[str, Any]:
    """A line for each run, and whether their accuracies can be compared at all."""
    columns = ("accuracy", "heads used ± std", "FFN blocks used", "model FLOPs / dense", "seconds per 1,000 texts")
    names = {"heads used ± std": "heads used", "seconds per 1,000 texts": "s per 1,000"}
    body, tests = [], set()
    for name, metrics in runs.items():
        header, rows = tables.cells(metrics)
        lines = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
        own = [lines.get(column, {}).get("budgeted", DASH) for column in columns]
        dense = lines["accuracy"].get("dense twin", DASH)
        rows_measured = metrics["budgeted"].get("rows")
        body.append([plain(name), dense, own[0], lines["accuracy"].get("budgeted vs twin", DASH), *own[1:]])
        tests.add(json.dumps([rows_measured, (metrics.get("data") or {}).get("labels")]))
    header = ["", "dense twin", "budgeted", "difference", *(names.get(column, column) for column in columns[1:])]
    notes = ["Accuracy, and what the budgeted model needs for it. FLOPs are shares of the run's own dense twin."]
    if len(tests) > 1:
        notes.append("These runs were measured on different texts: compare their costs, not their accuracies.")
    return {"header": header, "body": body, "notes": notes}


def _moved(found: Mapping[str, float]) -> list[dict[str, Any]]:
    more = {"length": "longer texts", "loss": "texts that the model finds harder", "class": "the classes"}
    shown = []
    for name, value in found.items():
        size = abs(round(value, 2))
        strength = next(word for word, least in STRENGTHS if size >= least)
        if name == "class":
            words = f"{more[name]} differ in what they spend: {strength}"
        else:
            words = f"{more[name]} spend {'more' if value >= 0 else 'less'}: {strength}"
        low = 0.0 if name == "class" else -1.0
        shown.append(
            {
                "name": name,
                "value": value,
                "shown": f"{value:+.2f}" if low else f"{value:.2f}",
                "low": low,
                "words": words,
            }
        )
    return shown


STRENGTHS = (("strongly", 0.5), ("clearly", 0.3), ("weakly", 0.1), ("hardly", 0.0))


def _cell(value: float, text: str = "", hint: str = "", mark: str = "") -> dict[str, Any]:
    return {"value": min(1.0, value), "text": text, "hint": hint, "mark": mark}


def _maps(budgeted: Metrics) -> list[dict[str, Any]]:
    """Layers x units and classes x units, for each kind of unit."""
    from budgetformer.report.figures import MANY_COLUMNS, class_rows, used

    maps = []
    for kind in ("heads", "blocks"):
        if by_layer := budgeted.get(f"{kind}_by_layer"):
            rows = []
            for layer, shares in enumerate(by_layer):
                cells = [_cell(s, f"{100 * s:.0f}", mark="h" if s > 0.55 else "") for s in shares]
                mean = sum(shares) / len(shares)
                rows.append({"name": f"layer {layer + 1}", "cells": [_mean(mean), *cells], "quiet": False})
            columns = [("mean", 1), *((unit + 1, 1) for unit in range(len(by_layer[0])))]
            title = f"{kind.capitalize()} by layer: {used(budgeted, kind)}"
            note = f"A column for each of the {len(by_layer[0])} {kind} of a layer; a stronger colour is more often."
            maps.append({"title": title, "columns": columns, "rows": rows, "fine": False, "note": note})
        if by_class := budgeted.get(f"{kind}_by_class"):
            some = class_rows(by_class)
            layers, units = some[0][1].shape
            averaged = layers * units > MANY_COLUMNS
            rows = []
            for name, gates, count in some:
                shares = gates.mean(axis=1, keepdims=True) if averaged else gates
                cells = [
                    _cell(float(s), mark="g" if unit == 0 else "") for layer in shares for unit, s in enumerate(layer)
                ]
                label = f"mean of the {count} between" if name is None else plain(name, 36, middle=True)
                rows.append({"name": label, "cells": [_mean(float(gates.mean())), *cells], "quiet": name is None})
            columns = [("mean", 1), *((layer + 1, 1 if averaged else units) for layer in range(layers))]
            title = f"{kind.capitalize()} by class"
            what = "the mean of its units" if averaged else f"its {units} {kind} side by side"
            note = f"Columns are layers, each with {what}; the classes that spend most stand on top."
            maps.append({"title": title, "columns": columns, "rows": rows, "fine": True, "note": note})
    return maps


def _mean(share: float) -> dict[str, Any]:
    return {"value": None, "text": percent(share), "hint": "", "mark": "m"}


def _confusion(found: Metrics | None) -> dict[str, Any] | None:
    """True classes x answers, each row in shares of its class."""
    if found is None or not 1 < len(found["labels"]) <= MANY_CLASSES:
        return None
    names = [plain(name, 36, middle=True) for name in found["labels"]]
    counts = {(truth, guess): count for truth, guess, count in found["cells"]}
    totals = _totals(found)
    fine = len(names) > NAMED_CLASSES
    rows = []
    for truth, name in enumerate(names):
        cells = []
        for guess in range(len(names)):
            count = counts.get((truth, guess), 0)
            share = count / totals[truth] if count else 0.0
            hint = f"{name} → {names[guess]}: {count:,}" if count else ""
            mark = "h" if share > 0.55 and not fine else ""
            cells.append(_cell(share, "" if fine or not count else f"{count:,}", hint, mark))
        rows.append({"name": name, "cells": cells, "quiet": False})
    note = "Rows are the true classes, columns the answers in the same order; the colour is the part of the class."
    columns = [("answer", len(names))]
    return {"title": "Confusion matrix", "columns": columns, "rows": rows, "fine": fine, "note": note}


def _totals(found: Metrics) -> dict[int, int]:
    totals: dict[int, int] = {}
    for truth, _, count in found["cells"]:
        totals[truth] = totals.get(truth, 0) + count
    return totals


def _confused(found: Metrics | None) -> list[list[str]]:
    """The pairs of classes that are confused most, with the texts and their part of the true class."""
    if found is None:
        return []
    names, totals = found["labels"], _totals(found)
    wrong = sorted((cell for cell in found["cells"] if cell[0] != cell[1]), key=lambda cell: -cell[2])[:CONFUSED]
    return [[plain(names[a]), plain(names[b]), f"{count:,}", percent(count / totals[a])] for a, b, count in wrong]


def _classes(found: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    keys = ("precision", "recall", "f1", "units_share")
    rows = sorted(found.items(), key=lambda item: (item[1]["f1"], item[0]))
    return [[plain(name), f"{one['texts']:,}", *(percent(one[key]) for key in keys)] for name, one in rows]


def _examples(found: Examples) -> list[tuple[str, list[dict[str, Any]]]]:
    return [
        (title, [{**row, **{key: plain(row[key], TEXT) for key in ("text", "label", "answer")}} for row in found[kind]])
        for kind, title in EXAMPLES.items()
        if found.get(kind)
    ]


def _shared(metrics: Metrics) -> dict[str, Any]:
    """The numbers of a run as they may leave this machine: files by their names alone."""
    settings, place = metrics.get("settings") or {}, metrics.get("environment") or {}
    return {
        **metrics,
        "settings": without_folders(settings),
        "environment": {key: value for key, value in place.items() if key != "engine_library"},
    }


def _finite(value: Any) -> Any:
    """Numbers that JSON has; what is none becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
