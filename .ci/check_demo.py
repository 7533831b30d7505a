"""The numbers of a quick demo run are there and sane; a run that learned nothing or spent everything fails here."""

import json
import math
import sys
from pathlib import Path

folder = Path(sys.argv[1])
found = json.loads((folder / "metrics.json").read_text())
dense, budgeted = found["dense"], found["budgeted"]
problems = []
for name, model in (("dense", dense), ("budgeted", budgeted)):
    for key in ("accuracy", "macro_f1", "head_share", "head_share_std", "flops_share", "attention_flops_share",
                "seconds_per_1000", "soft_hard_gap"):  # fmt: skip
        if not isinstance(model.get(key), int | float) or not math.isfinite(model[key]):
            problems.append(f"{name}.{key} is {model.get(key)!r}")
if not problems:
    labels = len(found["data"]["labels"])
    checks = {
        f"dense learned something (accuracy {dense['accuracy']:.3f}, chance {1 / labels:.3f})": dense["accuracy"] > 0.5,
        f"budgeted keeps most of it ({budgeted['accuracy']:.3f})": budgeted["accuracy"] > 0.8 * dense["accuracy"],
        f"dense runs every head ({dense['head_share']:.3f})": dense["head_share"] == 1.0,
        f"the budget is near its target ({budgeted['attention_flops_share']:.3f})": (
            abs(budgeted["attention_flops_share"] - found["settings"]["target_budget"]) < 0.08
        ),
        f"fewer FLOPs than dense ({budgeted['flops_share']:.3f})": budgeted["flops_share"] < 0.9,
        f"training and use are one function (gap {budgeted['soft_hard_gap']:.4f})": (
            abs(budgeted["soft_hard_gap"]) < 0.005
        ),
        "the dial has ten budgets": len(budgeted["dial"]) == 10,
        "the model, the report and its figures are there": all(
            (folder / name).exists() for name in ("model.safetensors", "config.json", "report.md", "settings.yaml")
        ),
    }
    problems = [what for what, holds in checks.items() if not holds]
    print("\n".join(("ok   " if holds else "FAIL ") + what for what, holds in checks.items()))
if problems:
    sys.exit("quick demo: " + "; ".join(problems))
