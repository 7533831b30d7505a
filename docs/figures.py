"""The arithmetic behind `scale.md`: what many texts cost, from what one core was measured to do.

Every input is named: the results of `make bench`, and the assumptions below, which are nobody's measurement.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "zen5-2cores.json"
TEXTS = 10**9
MACHINE_CORES = 64
MACHINES = 10
FILE_ROWS = 100_000  # rows of an input file
DOLLARS_PER_CORE_HOUR = 0.04  # assumed; put your own here
EFFICIENCY = 0.9  # assumed: what each of many workers does of what one alone does
LEDGER_BYTES = 250  # of a file's line in the ledger, generously
MODELS = {"minilm": "MiniLM", "base": "BERT base"}
TYPES = ("fp32", "bf16", "int8")
BUDGETS = {
    "dense": "every unit",
    "heads 0.5": "half the heads",
    "heads 0.25": "a quarter of the heads",
    "heads 0.1": "a tenth of the heads",
    "heads+blocks 0.5": "half of heads and blocks",
    "heads+blocks 0.25": "a quarter of heads and blocks",
}


def read() -> dict[str, Any]:
    """The results that the figures are worked out from."""
    return json.loads(RESULTS.read_bytes())


def cell(results: dict[str, Any], model: str, part: str, shape: str = "stream") -> dict[str, Any]:
    """A measurement on one thread, of a stream of texts of unequal length; part: from "ids" or from "text" on."""
    wanted = {"model": model, "shape": shape, "threads": 1, "part": part}
    (found,) = (one for one in results["cells"] if wanted.items() <= one.items())
    return found


def seconds(results: dict[str, Any], model: str, part: str, row: str, shape: str = "stream") -> float:
    """Median seconds of our engine for all texts of a cell; row: "int8 heads 0.25"."""
    (found,) = (one for one in cell(results, model, part, shape)["rows"] if one["name"] == f"ours {row}")
    return found["seconds"]["median"]


def tokenising(results: dict[str, Any]) -> float:
    """Seconds a token takes to be made: int8 from text on less int8 from ids on, mean of the two budgets with both."""
    rows = ("int8 dense", "int8 heads 0.25")
    spent = [seconds(results, "minilm", "text", row) - seconds(results, "minilm", "ids", row) for row in rows]
    return sum(spent) / len(spent) / cell(results, "minilm", "ids")["tokens"]


def texts_per_second(results: dict[str, Any], model: str, row: str) -> float:
    """Texts that one core answers in a second, from text to label."""
    measured = cell(results, model, "ids")
    spent = seconds(results, model, "ids", row) + tokenising(results) * measured["tokens"]
    return measured["inputs"] / spent


def core_hours(rate: float, texts: int = TEXTS) -> float:
    """Hours of one core among many for so many texts."""
    return texts / (rate * EFFICIENCY) / 3600


def weights_mib(results: dict[str, Any], model: str) -> float:
    """MiB of a model's weights in fp32, counted from its sizes: embeddings, layers, classifier; routers are small."""
    (m,) = (one for one in results["models"] if one["name"] == model)
    width, inner = m["hidden_size"], m["intermediate_size"]
    embeddings = (m["vocab_size"] + m["max_positions"] + m["token_types"] + 2) * width
    layer = 4 * width * (width + 1) + 2 * width * inner + inner + width + 4 * width
    return 4 * (embeddings + m["num_layers"] * layer + (width + 1) * m["labels"]) / 2**20


def inputs_table(results: dict[str, Any]) -> str:
    """What goes in, and where it comes from."""
    rows = []
    for model, name in MODELS.items():
        c = cell(results, model, "ids")
        rows.append((f"tokens of a text, {name}", f"{c['tokens'] / c['inputs']:.1f}", "mean of the benchmark's stream"))
    rows += [
        ("tokenising", f"{1e6 * tokenising(results):.2f} µs a token", "int8 with it less int8 without it"),
        ("processor", f"{results['environment']['cpu']}, one core", "`environment` of the results"),
        ("price", f"{DOLLARS_PER_CORE_HOUR} $ a core-hour", "assumed"),
        ("efficiency of many workers", f"{EFFICIENCY}", "assumed; `benchmarks/ray_predict.py` measures two"),
        ("rows of a file", f"{FILE_ROWS:,}", "assumed"),
    ]
    return table(("input", "value", "from"), rows)


def cost_table(results: dict[str, Any], model: str) -> str:
    """Budgets by types: texts a second on a core, dollars for a million texts, core-hours for all of them."""
    rows = []
    for budget, words in BUDGETS.items():
        rates = [texts_per_second(results, model, f"{dtype} {budget}") for dtype in TYPES]
        hours = [core_hours(rate) for rate in rates]
        dollars = [DOLLARS_PER_CORE_HOUR * hour * 10**6 / TEXTS for hour in hours]
        rows.append(
            (
                words,
                " / ".join(f"{rate:,.0f}" for rate in rates),
                " / ".join(f"{one:.3f}" for one in dollars),
                " / ".join(f"{hour:,.0f}" for hour in hours),
            )
        )
    head = ("units that run", "texts a second on a core", "$ for 10^6 texts", f"core-hours for {TEXTS:,} texts")
    return table(head, rows)


def run_table(results: dict[str, Any], row: str = "int8 heads 0.25") -> str:
    """The whole run on many machines."""
    rows = []
    cores = MACHINES * MACHINE_CORES
    for model, name in MODELS.items():
        rate = texts_per_second(results, model, row)
        rows.append(
            (
                name,
                f"{TEXTS // FILE_ROWS:,}",
                f"{FILE_ROWS / rate / 60:.1f} min",
                f"{core_hours(rate) / cores:.1f} h",
                f"{weights_mib(results, model):.0f} MiB",
            )
        )
    head = ("model", "files", "a file takes a worker", f"{cores:,} cores take", "weights in fp32, each worker")
    return table(head, rows)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures() -> dict[str, str]:
    """Everything that a page may name, by its name."""
    results = read()
    return {
        "inputs": inputs_table(results),
        "cost-minilm": cost_table(results, "minilm"),
        "cost-base": cost_table(results, "base"),
        "run": run_table(results),
        "ledger": f"{LEDGER_BYTES * (TEXTS // FILE_ROWS) / 2**20:.1f} MiB",
        "peak": f"{peak_mib(results):.1f} MiB",
        "gain-heads": spread([gain(results, dtype, "heads 0.25") for dtype in TYPES]),
        "gain-blocks": spread([gain(results, dtype, "heads+blocks 0.25") for dtype in TYPES]),
        "latency-dense": latency(results, "dense"),
        "latency-heads": latency(results, "heads 0.25"),
    }


def gain(results: dict[str, Any], dtype: str, budget: str) -> float:
    """How many times faster than with every unit on, MiniLM, the stream of texts."""
    return seconds(results, "minilm", "ids", f"{dtype} dense") / seconds(results, "minilm", "ids", f"{dtype} {budget}")


def spread(values: list[float]) -> str:
    """The lowest and the highest of a few."""
    return f"{min(values):.1f} to {max(values):.1f}"


def latency(results: dict[str, Any], budget: str) -> str:
    """Milliseconds for one text of 32 tokens, MiniLM, by type."""
    each = [1000 * seconds(results, "minilm", "ids", f"{dtype} {budget}", shape="1x32") for dtype in TYPES]
    return " / ".join(f"{one:.1f}" for one in each)


def peak_mib(results: dict[str, Any]) -> float:
    """The most memory that our engine took beyond the loaded MiniLM, of all types, every unit on."""
    (cell,) = (one for one in results["memory"] if one["model"] == "minilm")
    return max(row["mib"] for row in cell["rows"] if row["family"] == "ours")
