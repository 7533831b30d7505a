"""What budgeted training costs beside the dense fine-tune: both on the same texts, step by step in turn, in CPU time.

    python experiments/training_time.py --data trec6.parquet --bf16 --output training-time.json

The encoder is the demo's MiniLM; the file has the columns split, text, label. Every variant runs its whole schedule:
exploration first, where all units run, then exploitation, where skipped units are not computed. A step is one batch
forward and backward, clipping and the optimizer. What comes before a fit (the teacher's logits, importance, grouping)
and after it (settling) is measured too, once. The last line printed is JSON.
"""

import argparse
import copy
import json
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pyarrow.parquet as pq
import torch

from budgetformer.config import BudgetConfig
from budgetformer.convert import from_pretrained_encoder
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.metrics import predict
from budgetformer.settings import TrainSettings, locate_model
from budgetformer.text import collator, encode
from budgetformer.training.fit import FitOptions, optimizer
from budgetformer.training.grouping import group_neurons
from budgetformer.training.importance import start_routers, unit_importance
from budgetformer.training.job import budget_of
from budgetformer.training.settling import settle
from budgetformer.training.trainer import LengthGrouped


class Run:
    """One model on its way through training, and the CPU seconds of its steps before and after exploration ends."""

    def __init__(self, model, steps, bf16, budget):
        self.model, self.steps, self.bf16 = model.train(), steps, bf16
        explores = budget.routes and budget.relevance == "learned"
        self.until = budget.explore_until if explores else 0.0
        for name, parameter in model.named_parameters():
            if "embeddings" in name or (".router." in name and not budget.routes):
                parameter.requires_grad_(False)
        self.optimizer = optimizer(model, FitOptions(output_dir=""))
        self.exploring, self.exploiting = [], []

    def step(self, number, batch):
        start = time.process_time()
        self.model.progress = number / self.steps
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        (self.exploring if self.model.progress < self.until else self.exploiting).append(time.process_time() - start)

    @property
    def seconds(self):
        return sum(self.exploring) + sum(self.exploiting)


def timed(call, *args, **kw):
    start = time.process_time()
    return call(*args, **kw), time.process_time() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--output")
    parser.add_argument("--steps", type=int, default=200, help="of each variant")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--join", type=int, default=1, help="texts that make one input: longer inputs from short ones")
    parser.add_argument("--target", type=float, default=0.25)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    from transformers import AutoTokenizer

    encoder = locate_model("demo")
    rows = [row for row in pq.read_table(args.data).to_pylist() if row["split"] == "train"]
    names = sorted({row["label"] for row in rows})
    texts = [" ".join(row["text"] for row in rows[i : i + args.join]) for i in range(len(rows) - args.join + 1)]
    labels = [names.index(row["label"]) for row in rows[: len(texts)]]
    train = encode(AutoTokenizer.from_pretrained(encoder), texts, None, labels, max_length=args.max_length)

    dense = from_pretrained_encoder(encoder, labels=names)
    low = torch.autocast("cpu", torch.bfloat16, enabled=args.bf16)  # as `job.fit_budgeted` asks the twin
    told, teacher = timed(torch.no_grad()(low(predict)), dense, train)
    train = train.with_column("teacher_logits", told.logits)
    both = {"scope": "heads+blocks", "ffn_blocks": args.blocks}
    default = TrainSettings(data=args.data, output_dir="nothing is written", target_budget=args.target, **both)
    budgets = {
        "dense": BudgetConfig(),
        "heads": BudgetConfig(target=args.target),
        "heads+blocks, learned": BudgetConfig(target=args.target, **both),
        "heads+blocks": budget_of(default),
    }
    runs, beside = {}, {}
    for name, budget in budgets.items():
        source = copy.deepcopy(dense)
        before = 0.0
        if budget.blocks > 1:
            before += timed(low(group_neurons), source, budget.blocks, "coactivation", train)[1]
        settings = copy.deepcopy(source.config)
        settings.budget, settings.distillation = vars(budget).copy(), 0.0 if name == "dense" else 0.5
        model = BudgetFormerForSequenceClassification(settings)
        model.load_state_dict({k: v for k, v in source.state_dict().items() if ".router." not in k}, strict=False)
        if budget.routes:
            (heads, blocks), seconds = timed(low(unit_importance), source, train, blocks=budget.blocks)
            start_routers(model, heads, blocks, train)
            before += teacher + seconds
        runs[name], beside[name] = Run(model, args.steps, args.bf16, budget), {"before": before}

    collate, per_epoch = collator(0), len(train) // args.batch_size
    for number in range(args.steps):
        epoch, place = divmod(number, per_epoch)
        if place == 0:
            order = list(LengthGrouped(train.lengths, args.batch_size, args.seed, lambda epoch=epoch: epoch))
        batch = collate([train[i] for i in order[place * args.batch_size : (place + 1) * args.batch_size]])
        for run in runs.values():
            run.step(number, batch)

    result = {"settings": {k: v for k, v in vars(args).items() if k not in ("data", "output")}, "models": {}}
    result["tokens"] = sum(train.lengths) / len(train)
    for name, run in runs.items():
        found = {"step_exploring": sum(run.exploring) / max(1, len(run.exploring)), "steps": args.steps}
        found["step_exploiting"] = sum(run.exploiting) / max(1, len(run.exploiting))
        if name != "dense":
            beside[name]["settling"] = timed(settle, run.model, train)[1]
        found |= {"fit": run.seconds, "ratio": run.seconds / runs["dense"].seconds, **beside[name]}
        result["models"][name] = {key: round(value, 4) for key, value in found.items()}
        print(name, result["models"][name], flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
