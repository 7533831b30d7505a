"""The paper's way: its encoder from scratch, estimator and losses as reported, against `soft_topk` held to a target.

    python experiments/from_scratch.py --data subj.parquet --output experiments/results/scratch-subj.json

For each estimator: accuracy as trained, the share it learned, accuracy with every head on (budget 1: the paper reports
this falls below chance), at half the heads, and how far the function trained is from the function used.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pyarrow.parquet as pq
import torch

from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.metrics import evaluate
from budgetformer.text import encode
from budgetformer.training.fit import FitOptions, fit
from budgetformer.training.sources import train_tokenizer

BUDGETS = {
    "dense": BudgetConfig(),
    "soft_topk": BudgetConfig(target=0.4),
    # As reported of arXiv 2604.22583: softmax weights in training, hinge on [0.1, 0.9], entropy, no target.
    "paper": BudgetConfig(target=0.4, estimator="paper", loss="paper", tau_start=1.0, tau_end=0.1),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--estimators", default="dense,soft_topk,paper")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = pq.read_table(args.data).to_pylist()
    names = sorted({row["label"] for row in table})
    number = {name: i for i, name in enumerate(names)}
    rows = {which: [row for row in table if row["split"] == which] for which in ("train", "test")}
    if args.limit:
        order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(0))[: args.limit]
        rows["train"] = [rows["train"][i] for i in order]
    tokenizer = train_tokenizer([row["text"] for row in rows["train"]])
    train, test = (
        encode(tokenizer, [r["text"] for r in rows[s]], None, [number[r["label"]] for r in rows[s]], max_length=64)
        for s in ("train", "test")
    )
    result = {
        "data": Path(args.data).stem,
        "settings": {k: v for k, v in vars(args).items() if k not in ("data", "output")},
        "rows": [len(train), len(test)],
        "models": {},
    }
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    for name in args.estimators.split(","):
        torch.manual_seed(args.seed)
        config = BudgetFormerConfig(
            **vars(EncoderConfig.preset(args.preset, vocab_size=len(tokenizer), max_positions=64)),
            budget=asdict(BUDGETS[name]),
            id2label=dict(enumerate(names)),
            label2id=number,
        )
        model = BudgetFormerForSequenceClassification(config)
        if name == "dense":
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(".router." not in key)
        start = time.time()
        options = FitOptions(
            output_dir=tempfile.mkdtemp(),
            epochs=args.epochs,
            learning_rate=args.learning_rate,
            seed=args.seed,
            bf16=args.bf16,
            keep_checkpoints=False,
            quiet=True,
        )
        fit(model, train, None, options)
        keys = ("accuracy", "macro_f1", "head_share", "head_share_std", "flops_share")
        scored = evaluate(model, test)
        found = {key: scored[key] for key in (*keys, "shares_by_layer", "soft_hard_gap", "soft_hard_disagreement")}
        for budget in (0.25, 0.5, 1.0):
            at = evaluate(model, test, budget=budget, details=False)
            found[f"at_{budget}"] = {key: at[key] for key in ("accuracy", "head_share")}
        found["fit_seconds"] = round(time.time() - start, 1)
        result["models"][name] = found
        output.write_text(json.dumps(result, indent=1))
        print(
            f"{result['data']} {name}: accuracy {found['accuracy']:.4f} at {found['head_share']:.3f} of the heads, "
            f"{found['at_1.0']['accuracy']:.4f} with all on, trained function {found['soft_hard_gap']:+.4f}, "
            f"{found['fit_seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
