"""The model card: README.md of a model folder, with the metadata that the Hugging Face hub reads.

Made of metrics.json alone. It names no folder of the machine that trained, and shows no text.
"""

from collections.abc import Mapping
from typing import Any

from budgetformer.report.tables import Metrics, cells, data_line, dial_table, folded, markdown_table, notes
from budgetformer.report.wording import last_name, markdown, percent, plain, without_folders

DEMO = {"model": "sentence-transformers/all-MiniLM-L6-v2", "data": "Banking77"}
NAMED_LABELS = 100  # more are counted, not named
TRAINING = (
    *("target_budget", "scope", "ffn_blocks", "grouping", "relevance"),
    *("second_answers", "first_share", "whole_share", "levels"),
    *("estimator", "distillation", "distillation_temperature", "epochs", "dense_epochs", "recovery_epochs"),
    *("batch_size", "learning_rate", "recovery_rate", "router_learning_rate", "weight_decay", "warmup_ratio"),
    *("label_smoothing", "class_weights", "max_length", "pooling", "freeze_embeddings", "seed", "quick"),
)


def card(metrics: Metrics) -> str:
    """The card of the model that `metrics`, the content of metrics.json, were measured of."""
    import yaml

    settings, data = metrics.get("settings") or {}, metrics.get("data") or {}
    head = yaml.safe_dump(metadata(metrics), sort_keys=False, allow_unicode=True, width=1000)
    parts = [
        f"---\n{head}---",
        f"# {_title(settings)}",
        _what(settings),
        "## How it compares",
        f"Beside its dense twin, which was trained on the same texts with every unit on ({data_line(data)}):",
        markdown_table(*cells(metrics)),
        "\n".join(f"- {note}" for note in notes(metrics)),
    ]
    if dial := (metrics.get("budgeted") or {}).get("dial"):
        parts += ["When the budget is named at run time:", dial_table(dial)]
    parts += ["## How to use it", _use(), "## What it does not do", _limits(metrics)]
    labels = data.get("labels") or []
    if labels:
        listed = ", ".join(markdown(name) for name in labels[:NAMED_LABELS])
        more = f", and {len(labels) - NAMED_LABELS:,} more" if len(labels) > NAMED_LABELS else ""
        parts.append(folded(f"Its {len(labels):,} classes", listed + more))
    known = without_folders(settings)
    rows = [[name, markdown(str(known[name]))] for name in TRAINING if known.get(name) is not None]
    if rows:
        parts.append(folded("How it was trained", markdown_table(["setting", "value"], rows)))
    return "\n\n".join(parts) + "\n"


def metadata(metrics: Metrics) -> dict[str, Any]:
    """The front matter: what the hub shows, searches and compares."""
    settings, budgeted = metrics.get("settings") or {}, metrics.get("budgeted") or {}
    name, kind = _dataset(settings)
    values = [
        *(("accuracy", "accuracy", "accuracy"), ("f1", "macro-F1", "macro_f1")),
        ("flops_share", "FLOPs of the whole model, share of the dense twin's", "flops_share"),
        ("units_flops_share", "FLOPs of the units with a budget, share of all of them", "units_flops_share"),
        ("head_share", "share of the attention heads that ran", "head_share"),
    ]
    measured = [
        {"type": metric, "name": words, "value": round(float(budgeted[key]), 6)}
        for metric, words, key in values
        if isinstance(budgeted.get(key), int | float)
    ]
    result = {
        "task": {"type": "text-classification", "name": "Text Classification"},
        "dataset": {"type": kind, "name": name, "split": "test"},
        "metrics": measured,
    }
    base = _base(settings)
    return {
        "library_name": "budgetformer",
        "pipeline_tag": "text-classification",
        "tags": ["text-classification", "budgetformer", "conditional-computation", "efficient-inference"],
        **({} if base is None else {"base_model": base}),
        **({"datasets": [kind]} if str(settings.get("data")).startswith("hf:") else {}),
        "metrics": ["accuracy", "f1"],
        "model-index": [{"name": _title(settings), "results": [result]}],
    }


def _title(settings: Mapping[str, Any]) -> str:
    return f"BudgetFormer on {markdown(_dataset(settings)[0])}"


def _dataset(settings: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the data, and the type that the hub knows it by: of a file its name."""
    given = settings.get("data") or settings.get("train_file") or "unnamed data"
    if given == "demo":
        return DEMO["data"], "banking77"
    if given.startswith("hf:"):
        name = given.removeprefix("hf:").partition(":")[0]
        return name, name
    return plain(last_name(given)), "file"


def _base(settings: Mapping[str, Any]) -> str | None:
    """The encoder's name on the hub, if it has one."""
    model = settings.get("model")
    if model == "demo":
        return DEMO["model"]
    if not isinstance(model, str) or model.startswith("scratch:") or last_name(model) != model:
        return None
    return model if model.count("/") == 1 else None


def _what(settings: Mapping[str, Any]) -> str:
    units = "attention heads"
    if settings.get("scope") == "heads+blocks":
        units = "attention heads and blocks of feed-forward neurons"
    target = settings.get("target_budget")
    aimed = "" if target is None else f" It was trained to spend {percent(target)} of their FLOPs in the mean."
    base = _base(settings)
    source = "" if base is None else f" Its encoder comes from `{base}`."
    return (
        f"A text classifier in which every text runs only the {units} that it needs: a small router in each layer "
        f"reads the text and decides how many and which, and what is not chosen is not computed.{aimed}{source}"
    )


def _use() -> str:
    return (
        "In the folder of this file:\n"
        "```\n"
        "pip install budgetformer\n"
        'budgetformer predict --model . "a text"\n'
        'budgetformer predict --model . --budget 0.25 "what does it cost with a quarter of the units?"\n'
        'budgetformer inspect --model . "show me what ran for this one"\n'
        "```\n"
        "```python\n"
        "from budgetformer.engine import Engine\n"
        "\n"
        'engine = Engine.load(".")\n'
        'answers = engine.predict(["a text", "another"])  # budget=0.25: a share you name\n'
        "print(answers.labels, answers.probabilities.max(1), answers.head_share)\n"
        "```\n"
        "`import budgetformer.hf` makes it known to the Auto classes and the pipelines of transformers."
    )


def _limits(metrics: Metrics) -> str:
    settings, data = metrics.get("settings") or {}, metrics.get("data") or {}
    labels = data.get("labels") or []
    several = bool(settings.get("multi_label"))
    kinds = "any number of them" if several else "exactly one of them, also where none fits"
    said = [f"It knows {len(labels):,} classes and gives a text {kinds}." if labels else ""]
    if length := settings.get("max_length"):
        said.append(f"It reads the first {length:,} tokens of a text.")
    said.append(
        "It was measured on texts from one source. On texts of another kind it may be less accurate, and spend more."
    )
    said.append("Counted FLOPs are not time: what a machine gains depends on its processor, batch and thread numbers.")
    if settings.get("quick"):
        said.append(
            "It comes from a quick run on few texts, made to see that all works: train for longer before any use."
        )
    return "\n".join(f"- {line}" for line in said if line)
