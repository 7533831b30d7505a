"""The fair comparison: everybody gets the same teacher, the same number of further epochs and the same data.

For one data set and one seed: the dense model; the dense model trained for as long again (the fair control); the
budgeted model at several targets; static pruning by importance (Michel et al. 2019, one shot) with recovery, at the
mean cost the budgeted model reached; the same number of heads per input and layer, chosen at random throughout.

    python experiments/compare.py --data trec6.parquet --seed 0 --output experiments/results/trec6-0.json

The file has the columns split, text, (text_pair), label. Results are written after every model.
"""

import argparse
import copy
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import pyarrow.parquet as pq
import torch
from scipy.stats import spearmanr

from budgetformer.config import BudgetConfig
from budgetformer.convert import from_pretrained_encoder
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.metrics import evaluate, predict, work
from budgetformer.router import allocate, margins
from budgetformer.settings import locate_model
from budgetformer.text import Encoded, encode
from budgetformer.training.fit import FitOptions, fit
from budgetformer.training.grouping import group_neurons
from budgetformer.training.importance import block_cost, most_important, start_routers, unit_importance
from budgetformer.training.job import answered_by
from budgetformer.training.settling import settle, settle_cascade

# Of a model's scores: tables of every class, and what depends on the machine.
LEFT_OUT = ("heads_by_class", "blocks_by_class", "classes", "confusion", "seconds_per_1000", "peak_memory_mb")


class FixedUnits(BudgetFormerForSequenceClassification):
    """The same heads, and the same blocks, for every input: static pruning. With second answers, where asked for."""

    def forward(self, input_ids, budget=None, **kwargs):
        config = self.config.budget_config
        kinds = {"gates": self.fixed, "blocks": self.fixed_blocks}
        fixed = {k: v.repeat(len(input_ids), 1, 1) for k, v in kinds.items() if v is not None}
        if budget == 1.0 or (self.training and self._next_level() == 1.0):
            fixed = {kind: torch.ones_like(gates) for kind, gates in fixed.items()}
        out = super().forward(input_ids, **fixed, **kwargs)
        if self.training or config.cascade == 0 or budget is not None:
            return out
        again = (margins(out.logits, multi_label=False) < config.cascade).nonzero()[:, 0]
        if len(again):
            part = {k: v[again] for k, v in kwargs.items() if isinstance(v, torch.Tensor)}
            every = {kind: torch.ones_like(gates[again]) for kind, gates in fixed.items()}
            out.logits[again] = super().forward(input_ids[again], **every, **part).logits
            for kind in fixed:
                out[kind][again] += 1
        return out


class RandomHeads(BudgetFormerForSequenceClassification):
    """As many heads per layer as the budgeted model spends, drawn anew for every input."""

    def forward(self, input_ids, **kwargs):
        batch, (layers, heads) = len(input_ids), (self.config.num_layers, self.config.num_heads)
        count = allocate(torch.full((batch,), self.share), self.spent, heads, 1)
        rank = torch.rand(batch, layers, heads).argsort(-1).argsort(-1)
        kwargs["gates"] = (rank < count[..., None]).float()
        return super().forward(input_ids, **{k: v for k, v in kwargs.items() if k != "budget"})


def variant(model, cls, budget=None, **config):
    """A copy of `model`'s weights in a new class or with a new budget."""
    settings = copy.deepcopy(model.config)
    if budget is not None:
        settings.budget = vars(budget).copy()
    for key, value in config.items():
        setattr(settings, key, value)
    made = cls(settings)
    # Routers start anew: a dense model's never learned, has none for blocks, and may see fewer numbers.
    weights = {k: v for k, v in model.state_dict().items() if ".router." not in k and not k.endswith("profile")}
    made.load_state_dict(weights, strict=False)
    made.budgetformer.encoder.embeddings.requires_grad_(False)
    made.keep_twin(model)
    return made


def student(model, layers, **config):
    """The first `layers` layers of `model`: what a user who wants a smaller dense model would train."""
    made = variant(model, BudgetFormerForSequenceClassification, num_layers=layers, **config)
    freeze_routers(made)
    return made


def brief(scored):
    return {key: scored[key] for key in ("accuracy", "units_flops_share", "units_flops_share_std", "head_share")}


def difficulty(model, test, hard):
    """Do inputs that the dense twin finds hard, by its loss, get more? Rank correlation, and shares by tenths of it.

    Shares are rounded for it: below a hundredth they differ by length alone, and would rank inputs that got the same.
    """
    ran, every = work(predict(model.eval(), test), model.config).units(model.config.budget_config)
    share = (ran / every).numpy()
    ranked = share.round(2)
    tenths = np.array_split(share[np.argsort(hard.numpy(), kind="stable")], 10)
    return {
        "loss_rank_correlation": float(spearmanr(ranked, hard.numpy()).statistic) if np.ptp(ranked) > 0 else 0.0,
        "share_by_tenth_of_loss": [round(float(part.mean()), 4) for part in tenths],
    }


def freeze_routers(model):
    for name, parameter in model.named_parameters():
        if ".router." in name:
            parameter.requires_grad_(False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3, help="of the dense model, and again of everybody after it")
    parser.add_argument("--recovery-epochs", type=int, help="of everybody after the dense model, in place of --epochs")
    parser.add_argument("--recovery-batch", type=int, default=32, help="their texts per step")
    parser.add_argument("--recovery-rate", type=float, help="their learning rate, in place of --learning-rate")
    parser.add_argument("--targets", default="0.5,0.25,0.1")
    parser.add_argument("--also", default="", help="budgets that second answers of the same model are settled for too")
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--unlabelled", type=int, help="texts beyond them that the dense model answers for everybody")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--distillation", type=float, default=0.5)
    parser.add_argument("--control", type=int, default=1, help="0: leave out the fair control")
    parser.add_argument("--static", default="0.5,0.25,0.1", help="targets at which static pruning is compared")
    parser.add_argument("--students", default="", help="layers of the smaller dense models to compare with: 3,2")
    parser.add_argument("--static-twice", default="", help="targets of static pruning with second answers")
    parser.add_argument("--first", type=float, default=0.6, help="share of the target its first answers spend")
    parser.add_argument("--whole", type=float, default=0.2, help="share of the steps it trains whole")
    parser.add_argument("--random", default="0.5,0.25,0.1", help="targets at which random heads are compared")
    parser.add_argument("--dense", help="folder to keep or take the dense model")
    parser.add_argument("--keep", help="folder to keep every model in, to be timed (benchmarks/frontier.py)")
    parser.add_argument("--grouping", default="coactivation", help="of neurons into blocks, where blocks have a budget")
    parser.add_argument("--budget", default="{}", help="JSON: fields of BudgetConfig; levels in targets")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    table = pq.read_table(args.data).to_pylist()
    names = sorted({row["label"] for row in table})
    number = {name: i for i, name in enumerate(names)}
    encoder = locate_model("demo")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder)
    tokenizer.model_max_length = args.max_length

    def split(which, *, part=0, count=args.limit):
        """At most `--limit` rows of a split (part 0), as many of those that are then left (part 1), and so on."""
        rows = [row for row in table if row["split"] == which]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        if args.limit and len(rows) > args.limit:
            rows = [rows[i] for i in order[part * args.limit :][:count]]
        elif part:
            return None
        pairs = [row["text_pair"] for row in rows] if "text_pair" in rows[0] else None
        labels = [number[row["label"]] for row in rows]
        return encode(tokenizer, [row["text"] for row in rows], pairs, labels, max_length=args.max_length)

    train, test = split("train"), split("test")
    # Texts that nobody trains on, to settle second answers by.
    validated = any(row["split"] == "validation" for row in table)
    held = split("validation") if validated else split("train", part=1)
    result = {
        "data": Path(args.data).stem,
        "settings": {k: v for k, v in vars(args).items() if k not in ("data", "output", "dense", "keep")},
        "rows": [len(train), len(test)],
        "models": {},
    }
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_file():  # go on where an earlier run stopped
        result["models"] = json.loads(output.read_text())["models"]

    def options(name):
        first = name == "dense"
        return FitOptions(
            output_dir=tempfile.mkdtemp(),
            epochs=args.epochs if first else args.recovery_epochs or args.epochs,
            batch_size=32 if first else args.recovery_batch,
            learning_rate=args.learning_rate if first else args.recovery_rate or args.learning_rate,
            seed=args.seed,
            bf16=args.bf16,
            keep_checkpoints=False,
            quiet=True,
        )

    def keep(name, model):
        if args.keep:
            folder = Path(args.keep) / name
            units = {"gates": getattr(model, "fixed", None), "blocks": getattr(model, "fixed_blocks", None)}
            fixed = {kind: table.int().tolist() for kind, table in units.items() if table is not None}
            if fixed:  # static pruning: what always runs; its budget was there to count costs, and has no routers
                model.config.budget = vars(BudgetConfig())
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            if fixed:
                (folder / "fixed.json").write_text(json.dumps(fixed))

    def run(name, model, data):
        if name in result["models"]:
            return model
        torch.manual_seed(args.seed)
        start = time.time()
        fit(model, data, None, options(name))
        seconds = time.time() - start
        if name.startswith("budgeted"):
            settle(model, data)
        for target in map(float, filter(None, args.also.split(",") if name.startswith("budgeted") else ())):
            other, spent = copy.deepcopy(model), model.config.budget_config.first_target
            other.config.budget = {**other.config.budget, "target": target, "first": spent / target}
            settle_cascade(other, held)
            measure(f"budgeted@{target}", other, seconds)
        if model.config.budget_config.may_answer_twice:
            for budget in (None, 1.0, *model.config.budget_config.levels):
                label = {None: "routed", 1.0: "whole"}.get(budget, budget)
                result["models"][f"{name}:{label}"] = brief(evaluate(model, test, budget=budget, details=False))
            settle_cascade(model, held)
        measure(name, model, seconds)
        return model

    def measure(name, model, seconds):
        scored = evaluate(model, test, details=name.startswith("budgeted"))
        scored = {k: v for k, v in scored.items() if k not in LEFT_OUT}
        if name.startswith("budgeted"):
            scored |= difficulty(model, test, hard)
        scored["cascade"] = model.config.budget_config.cascade
        scored["fit_seconds"] = round(seconds, 1)
        result["models"][name] = scored
        output.write_text(json.dumps(result, indent=1))
        keep(name, model)
        print(
            f"{result['data']} seed {args.seed} {name}: accuracy {scored['accuracy']:.4f} head share "
            f"{scored['head_share']:.3f} ± {scored['head_share_std']:.3f} units "
            f"{scored['units_flops_share']:.3f} ± {scored['units_flops_share_std']:.3f} "
            f"in {scored['fit_seconds']:.0f} s "
            f"{scored.get('shares_by_layer', '')}",
            flush=True,
        )

    if args.dense and Path(args.dense).is_dir():
        dense = BudgetFormerForSequenceClassification.from_pretrained(args.dense)
    else:
        dense = from_pretrained_encoder(encoder, labels=names)
        dense.budgetformer.encoder.embeddings.requires_grad_(False)
        freeze_routers(dense)
        run("dense", dense, train)
        if args.dense:
            dense.save_pretrained(args.dense)
    taught, answered = predict(dense.eval(), train), predict(dense, test)
    hard = torch.nn.functional.cross_entropy(
        answered.logits, torch.tensor([item["labels"] for item in test.items]), reduction="none"
    )
    told = train.with_column("teacher_logits", taught.logits)
    if args.unlabelled:
        pool = split("train", part=1 if validated else 2, count=args.unlabelled)
        told = Encoded([*told.items, *answered_by(dense, pool).items])
        result["rows"].append(len(pool))
    distil = {"distillation": args.distillation}
    rivals = (args.static, args.random, args.static_twice)
    static_at, random_at, twice_at = ([float(t) for t in given.split(",") if t] for given in rivals)
    if args.control:
        control = variant(dense, BudgetFormerForSequenceClassification, **distil)
        freeze_routers(control)
        run("control", control, told)
    for layers in (int(n) for n in args.students.split(",") if n):
        run(f"student{layers}", student(dense, layers, **distil), told)
    changes = json.loads(args.budget)
    shares = changes.pop("levels", ())
    blocks = BudgetConfig(**changes).blocks
    if blocks > 1:
        group_neurons(dense, blocks, args.grouping, train, seed=args.seed)
    ranked, ranked_blocks = unit_importance(dense, train, blocks=blocks, seed=args.seed)
    ranked_blocks = ranked_blocks if blocks > 1 else None
    for target in map(float, filter(None, args.targets.split(","))):
        levels = [level for level in (round(share * target, 4) for share in shares) if level < 1]
        asked = BudgetConfig(target=target, levels=levels, **changes)
        budgeted = variant(dense, BudgetFormerForSequenceClassification, asked, **distil)
        cost = block_cost(budgeted, train)
        start_routers(budgeted, ranked, ranked_blocks, train)
        run(f"budgeted@{target}", budgeted, told)
        reached = result["models"][f"budgeted@{target}"]
        if target in static_at:
            static = variant(dense, FixedUnits, **distil)
            freeze_routers(static)
            spent = reached.get("units_flops_share", reached["head_share"])
            static.fixed, static.fixed_blocks = most_important(ranked, ranked_blocks, spent, cost)
            if blocks > 1:
                static.config.budget = vars(BudgetConfig(scope="heads+blocks", ffn_blocks=blocks))  # for its costs
            run(f"static@{target}", static, told)
        if target in twice_at:
            fixed = variant(dense, FixedUnits, **distil)
            freeze_routers(fixed)
            fixed.fixed, fixed.fixed_blocks = most_important(ranked, ranked_blocks, target * args.first, cost)
            asked_again = {"target": target, "first": args.first, "whole": args.whole}
            fixed.config.budget = vars(BudgetConfig(scope="heads+blocks", ffn_blocks=blocks, **asked_again))
            run(f"static-twice@{target}", fixed, told)
        if target in random_at:
            drawn = variant(dense, RandomHeads, **distil)
            freeze_routers(drawn)
            drawn.share, drawn.spent = reached["head_share"], torch.tensor(reached["shares_by_layer"])
            run(f"random@{target}", drawn, told)


if __name__ == "__main__":
    main()
