"""One model, fitted with `transformers.Trainer`: groups of parameters, schedule of the budget, the best epoch kept."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import set_seed

from budgetformer import flops
from budgetformer.errors import UsageError
from budgetformer.hf import BudgetFormerForSequenceClassification, BudgetSchedule
from budgetformer.metrics import scores
from budgetformer.settings.commands import METRICS
from budgetformer.text import Encoded, collator
from budgetformer.training import checkpoints
from budgetformer.training.stopping import Progress, StopCleanly
from budgetformer.training.trainer import BudgetTrainer

TOLERANCE = 0.02  # how far an epoch's share of the units' FLOPs may lie above the target, and be within the budget
OVER_BUDGET = 1e3  # above any difference of scores
# What may differ between a run and its resumption without changing where it ends.
FREE = ("output_dir", "resume", "keep_checkpoints", "quiet", "num_workers", "device")
# What of the budget may not, beside its target: it says at which cost a step runs.
TAUGHT = ("scope", "ffn_blocks", "relevance", "second", "first", "whole", "levels")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How one model is fitted. batch_size counts over all processes; metric picks the best of the epochs.

    Without keep_checkpoints nothing is written, so the last epoch is kept whatever the metric says.
    """

    output_dir: str
    epochs: int = 4
    batch_size: int = 32
    learning_rate: float = 1e-4
    router_learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_ratio: float = 0.06
    metric: str = "accuracy"
    patience: int | None = None
    seed: int = 0
    bf16: bool = False
    num_workers: int = 0
    resume: str | None = None
    keep_checkpoints: bool = True
    quiet: bool = False
    device: str = "cpu"

    def __post_init__(self):
        if self.metric not in METRICS:
            raise UsageError(f"metric={self.metric!r}: choose one of {', '.join(METRICS)}")


@dataclass(frozen=True)
class FitResult:
    """steps: optimizer steps done. seconds: wall time. best_epoch: the epoch kept; None when it is the last."""

    steps: int
    seconds: float
    loss: float
    best_epoch: float | None


def fit(
    model: BudgetFormerForSequenceClassification,
    train: Encoded,
    validation: Encoded | None,
    options: FitOptions,
    *,
    label: str = "training",
    echo: Callable[[str], None] = lambda line: None,
    callbacks: tuple[TrainerCallback, ...] = (),
) -> FitResult:
    """Fit `model` in place. With validation data the best epoch is kept (among those within the budget), else the last.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once a checkpoint is kept.
        UsageError: a setting is wrong, or the checkpoint to go on from is.
        BudgetFormerError: a checkpoint cannot be written.
    """
    from accelerate import PartialState

    processes = PartialState(cpu=options.device == "cpu")
    if not processes.is_main_process:
        echo = silent

    def warn(line: str) -> None:
        echo(f"warning: {line}")

    budget = model.config.budget_config
    course = {key: value for key, value in asdict(options).items() if key not in FREE}
    course |= {"rows": len(train), "target_budget": budget.target, "processes": processes.num_processes}
    taught = {name: value for name, value in vars(budget).items() if name in TAUGHT}
    course |= taught | {"levels": list(budget.levels)}  # as JSON has it
    resume = checkpoints.resolve(options.resume, options.output_dir, warn, course)
    processes.wait_for_everyone()
    if resume is not None:
        echo(f"{label}: going on from {resume}")
    elif processes.is_main_process:
        checkpoints.discard(options.output_dir)  # whatever is left there belongs to another run
    processes.wait_for_everyone()
    arguments = _arguments(model, options, validation is not None, processes.num_processes)
    if resume is not None and options.patience is not None:
        arguments.num_train_epochs = _epochs(resume, options.epochs, options.patience)
    stop = StopCleanly()
    trainer = BudgetTrainer(
        model=model,
        args=arguments,
        course=course,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=collator(model.config.pad_token_id or 0),
        compute_metrics=None if validation is None else _metrics(options.metric, model.config, validation.lengths),
        preprocess_logits_for_metrics=_shares,
        optimizers=(optimizer(model, options), None),  # pyright: ignore[reportArgumentType]
        callbacks=[BudgetSchedule(), checkpoints.FindBest(warn), stop, *callbacks],
    )
    # Trainer gave every process the same seed: as it is, all would drop and explore alike.
    set_seed(options.seed + processes.process_index)
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if not options.quiet and trainer.is_world_process_zero():
        trainer.add_callback(Progress(label, options.metric))
    if options.patience is not None and validation is not None:
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=options.patience))
    # What ran is let through to the metrics: an epoch that spends more than the budget is no candidate.
    ignored = [key for key in model.config.keys_to_ignore_at_inference if key not in ("gates", "blocks")]
    with stop:
        done = trainer.train(
            resume_from_checkpoint=str(resume) if resume is not None else None, ignore_keys_for_eval=ignored
        )
    # Without this the model would go on under autocast, and be measured and used at another precision than it is saved.
    trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    if stop.asked is not None:
        raise KeyboardInterrupt(stop.asked)
    model.eval()
    best = trainer.state.best_global_step
    if best and trainer.state.best_model_checkpoint is None:
        warn("the checkpoint of the best epoch is gone: the weights are those of the last epoch")
        best = None
    return FitResult(
        steps=trainer.state.global_step,
        seconds=done.metrics["train_runtime"],
        loss=done.training_loss,
        best_epoch=best * arguments.num_train_epochs / trainer.state.max_steps if best else None,
    )


def silent(line: str) -> None:
    """Only the main process speaks."""


def _arguments(model: torch.nn.Module, options: FitOptions, validates: bool, processes: int) -> TrainingArguments:
    if options.batch_size % processes:
        raise UsageError(
            f"batch_size={options.batch_size}: must be a multiple of the {processes} processes that share each batch"
        )
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size // processes,
        per_device_eval_batch_size=128,
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=options.warmup_ratio,  # below 1 it is a share of all steps
        weight_decay=options.weight_decay,
        max_grad_norm=1.0,
        remove_unused_columns=False,
        label_names=["labels"],
        seed=options.seed,
        bf16=options.bf16,
        use_cpu=options.device == "cpu",
        eval_strategy="epoch" if validates else "no",
        save_strategy="epoch" if options.keep_checkpoints else "no",
        save_total_limit=None,  # Trainer would remove the older checkpoint before the new one is sealed
        load_best_model_at_end=validates and options.keep_checkpoints,
        metric_for_best_model="score" if validates else None,
        greater_is_better=True if validates else None,
        dataloader_num_workers=options.num_workers,
        dataloader_pin_memory=options.device != "cpu",
        logging_strategy="steps",
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=_leaves_unused(model),
        restore_callback_states_from_checkpoint=True,
    )
    # Several GPUs without a launcher: Trainer would copy the model to each, and the copies' multipliers would be lost.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def _leaves_unused(model: Any) -> bool:
    """True when routers wait for a gradient that never comes, or not in every step: those of a dense model that were
    not frozen, or of one that also trains at named budgets.
    """
    budget = model.config.budget_config
    routers = any(p.requires_grad for name, p in model.named_parameters() if ".router." in name)
    return routers and (budget.whole > 0 or (budget.target == 1.0 and budget.loss == "lagrange"))


def _epochs(checkpoint: Path, epochs: int, patience: int) -> int:
    """How many epochs there are: those done when early stopping had ended the run, where Trainer would go on a step."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    stopping = state["stateful_callbacks"].get("EarlyStoppingCallback", {}).get("attributes", {})
    ended = stopping.get("early_stopping_patience_counter", 0) >= patience
    return round(state["epoch"]) if ended else epochs


def optimizer(model: torch.nn.Module, options: FitOptions) -> torch.optim.Optimizer:
    """AdamW in three groups: routers at their own rate, biases and norms without decay, the rest."""
    routers, plain, decayed = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if ".router." in name:
            routers.append(parameter)
        elif parameter.dim() < 2:
            plain.append(parameter)
        else:
            decayed.append(parameter)
    groups = [
        {"params": decayed, "lr": options.learning_rate, "weight_decay": options.weight_decay},
        {"params": plain, "lr": options.learning_rate, "weight_decay": 0.0},
        {"params": routers, "lr": options.router_learning_rate, "weight_decay": options.weight_decay},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=True)


def _shares(outputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logits, and for each input the share of each kind of unit that ran: all that is kept of an evaluation."""
    logits, *kinds = outputs
    return logits, *(ran.mean((1, 2)) for ran in kinds)


def _metrics(metric: str, config: Any, tokens: list[int]) -> Callable[[Any], dict[str, float]]:
    """Scores of an evaluation of inputs of `tokens`. `score` picks the best epoch: any within the budget before any
    that is not. units_share is the share of the units' FLOPs, as `metrics.costs` counts it.
    """
    whole = flops.layer(np.asarray(tokens), config.encoder_config)
    target = config.budget_config.first_target

    def compute(prediction: Any) -> dict[str, float]:
        logits, *shares = prediction.predictions
        labels = prediction.label_ids
        truth = labels.astype(int).tolist()
        found = scores(torch.from_numpy(np.asarray(logits)).float(), truth)
        kinds = list(zip(shares, whole, strict=False))  # blocks may have no budget
        share = float(sum((part * cost).sum() for part, cost in kinds) / sum(cost.sum() for _, cost in kinds))
        score = -found["loss"] if metric == "loss" else found[metric]
        excess = share - target - TOLERANCE
        return {
            **found,
            "head_share": float(np.mean(shares[0])),
            "units_share": share,
            "score": score if excess <= 0 else score - 10 * excess - OVER_BUDGET,
        }

    return compute
