"""Means over seeds and data sets of what `compare.py` wrote, as a Markdown table, as JSON, and as a picture.

python experiments/summarise.py experiments/results
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path


def _means(models, keys):
    """Of what all of them have."""
    return {k: round(statistics.mean(m[k] for m in models), 3) for k in keys if all(k in m for m in models)}


def draw(runs, path, name="budgeted@0.25"):
    """What inputs spend, by how hard the dense twin finds them: tenths of the test texts by its loss."""
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    for data, group in runs.items():
        models = [run["models"][name] for run in group if "share_by_tenth_of_loss" in run["models"].get(name, {})]
        if models:
            tenths = [
                statistics.mean(tenth) for tenth in zip(*(m["share_by_tenth_of_loss"] for m in models), strict=True)
            ]
            rank = statistics.mean(m["loss_rank_correlation"] for m in models)
            ax.plot(range(1, 11), tenths, marker="o", markersize=3, label=f"{data} (rank correlation {rank:.2f})")
    if ax.lines:
        ax.set_xticks(range(1, 11))
        ax.set_xlabel("tenth of the test texts, by the dense twin's loss on them (10: hardest)")
        ax.set_ylabel("share of the units' FLOPs, both answers")
        ax.set_ylim(0)
        ax.legend(fontsize=8)
        plt.savefig(path, dpi=120)
    plt.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    runs = defaultdict(list)
    for path in sorted(folder.glob("*-[0-9].json")):
        run = json.loads(path.read_text())
        runs[run["data"]].append(run)
    names = list(dict.fromkeys(name for group in runs.values() for run in group for name in run["models"]))
    # What the budget is of: with blocks of the feed-forward layers the units' FLOPs, with heads alone attention's.
    blocks = any("block_share" in model for group in runs.values() for run in group for model in run["models"].values())
    cost = "units_flops_share" if blocks else "attention_flops_share"
    order = ["dense", "control", "student3", "student2"]
    order += [f"{kind}@{t}" for t in (0.5, 0.25, 0.1) for kind in ("budgeted", "static", "random")]
    names = [name for name in order if name in names]
    table, differences, misses = {}, defaultdict(list), []
    for data, group in runs.items():
        row = {"seeds": len(group), "train_rows": group[0]["rows"][0], "test_rows": group[0]["rows"][1]}
        for name in names:
            found = [run["models"][name] for run in group if name in run["models"]]
            if not found:
                continue
            accuracies = [100 * model["accuracy"] for model in found]
            row[name] = {
                "accuracy": round(statistics.mean(accuracies), 2),
                "deviation": round(statistics.stdev(accuracies), 2) if len(found) > 1 else None,
                "loss": round(statistics.mean(model["loss"] for model in found), 4),
                "head_share": round(statistics.mean(model["head_share"] for model in found), 3),
                cost: round(statistics.mean(m[cost] for m in found), 3),
                "head_share_std": round(statistics.mean(model["head_share_std"] for model in found), 3),
                **_means(found, ("units_flops_share_std", "loss_rank_correlation", "cascade", "fit_seconds")),
                "seeds": len(found),
            }
            kind, _, target = name.partition("@")
            if kind == "budgeted":
                misses += [(m[cost] - float(target), data, target) for m in found]
            # Paired: only runs that have both models, so every difference shares its data, seed and teacher.
            rivals = ("control", f"static@{target}", f"random@{target}", "student3", "student2")
            for rival in rivals if kind == "budgeted" else ():
                pairs = [(r["models"][name], r["models"][rival]) for r in group if {name, rival} <= set(r["models"])]
                if pairs:
                    differences[f"{name} - {rival.partition('@')[0]}"].append(
                        statistics.mean(100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs)
                    )
        table[data] = row
    mean = {key: {"points": round(statistics.mean(v), 2), "sets": len(v)} for key, v in differences.items()}
    worst = max(misses, key=lambda miss: abs(miss[0]))
    summary = {
        "by_data": table,
        "mean_difference_over_sets": mean,
        "largest_miss_of_the_target": {"share": round(worst[0], 4), "data": worst[1], "target": worst[2]},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(runs, folder / "shares-by-loss.png")
    print("| data (train / test rows, seeds) | " + " | ".join(names) + " |")
    print("| --- |" + " --- |" * len(names))
    for data, row in table.items():
        cells = []
        for name in names:
            model = row.get(name)
            if model is None:
                cells.append("")
                continue
            spread = f" ± {model['deviation']:.1f}" if model["deviation"] is not None else ""
            share = f" (.{round(1000 * model[cost]):03d})" if "@" in name else ""
            cells.append(f"{model['accuracy']:.1f}{spread}{share}")
        print(f"| {data} ({row['train_rows']:,} / {row['test_rows']:,}, {row['seeds']}) | " + " | ".join(cells) + " |")
    print()
    for key, found in mean.items():
        print(f"{key}: {found['points']:+.2f} points, mean over {found['sets']} sets")
    print(f"largest miss of a target: {worst[0]:+.3f} ({worst[1]} at {worst[2]})")


if __name__ == "__main__":
    main()
