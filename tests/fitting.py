"""A task that a tiny model learns in seconds, with dropout and router noise on, for the tests of fit.

As a script, `python fitting.py OUTPUT JSON`, it fits in a process of its own and leaves in OUTPUT the steps as they are
begun (`steps`), and for each rank the weights it ended with and the inputs it was given (`rank-N.pt`). The JSON holds
arguments of `run`, and `pause`: seconds before each step.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers.trainer_callback import TrainerCallback

from budgetformer.config import BudgetConfig
from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.text import Encoded
from budgetformer.training import checkpoints
from budgetformer.training.fit import FitOptions, fit

ROWS, BATCH, EPOCHS = 61, 8, 3
STEPS = 8  # of one epoch, the last one with 5 inputs
QUICKLY = {"epochs": 9, "learning_rate": 2e-2}  # the task is learned before the end


def make_model(target=0.5, freeze=True, budget=None, **config):
    """2 layers of 3 heads, width 15, 3 labels; the routers of a dense one (target 1) are frozen."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 31, "hidden_size": 15, "num_layers": 2, "num_heads": 3, "intermediate_size": 29} | config
    budget = vars(BudgetConfig(target=target, router_hidden=7, **budget or {})).copy()
    made = BudgetFormerForSequenceClassification(
        BudgetFormerConfig(**sizes, max_positions=17, budget=budget, num_labels=3, initializer_range=0.2)
    )
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not (freeze and target == 1.0 and ".router." in name))
    return made


class Watched(Encoded):
    """Remembers in which order its inputs were asked for."""

    def __getitem__(self, index):
        self.__dict__.setdefault("seen", []).append(index)
        return super().__getitem__(index)


def make_data(rows=ROWS, seed=3):
    """Inputs of 3 to 16 tokens; the label says which of the tokens 4, 5 and 6 stands in the input."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(rows):
        length, label = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((3, 17), (0, 3)))
        tokens = torch.randint(7, 31, (length,), generator=generator)
        tokens[int(torch.randint(0, length, (), generator=generator))] = 4 + label
        items.append({"input_ids": tokens.tolist(), "labels": label})
    return Watched(items)


def run(folder, *, model=None, data=None, callbacks=(), echo=lambda line: None, validation=True, **options):
    """Fit for three epochs; the model and what fit returned."""
    model = model or make_model()
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "learning_rate": 3e-3, "router_learning_rate": 3e-2}
    held_out = make_data(23, seed=4) if validation else None
    made = FitOptions(output_dir=str(folder), **{**settings, "quiet": True, **options})
    return model, fit(model, data or make_data(), held_out, made, echo=echo, callbacks=callbacks)


def same(one, other):
    """True when all parameters and buffers (multiplier, profile) are equal, bit for bit."""
    one, other = (m if isinstance(m, dict) else m.state_dict() for m in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def end_of(folder, random="rng_state.pth"):
    """What the newest checkpoint holds: weights, optimizer, schedule and random state, whichever epoch was best."""
    newest = checkpoints.in_order(folder)[0]
    held = json.loads((newest / checkpoints.MANIFEST).read_text())["files"]
    sums = {name: held[name]["sha256"] for name in ("model.safetensors", "optimizer.pt", "scheduler.pt")}
    return newest.name, sums, torch.load(newest / random, weights_only=False)["cpu"].tolist()


class Signal(TrainerCallback):
    """Sends this process a signal while step `step` is under way."""

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)


class Call(TrainerCallback):
    """Calls `what` when step `step` begins."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.what()


class Slowly(TrainerCallback):
    """Writes down each step that begins, and pauses, so that another process can meet it there."""

    def __init__(self, file, pause):
        self.file, self.pause = file, pause

    def on_step_begin(self, args, state, control, **kwargs):
        with open(self.file, "a") as file:
            file.write(f"{state.global_step + 1}\n")
        time.sleep(self.pause)


def main(output, options):
    rank = os.environ.get("RANK", "0")
    output, options = Path(output), json.loads(options)
    torch.set_num_threads(options.pop("threads", 1))
    slowly = Slowly(output / "steps", options.pop("pause", 0.0))
    data, model = make_data(options.pop("rows", ROWS)), make_model(**options.pop("model", {}))
    model, done = run(output / "run", model=model, data=data, callbacks=(slowly,) if rank == "0" else (), **options)
    torch.save({"weights": model.state_dict(), "seen": data.seen, "steps": done.steps}, output / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
