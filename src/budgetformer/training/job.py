"""The main job: data, dense twin, budgeted model, and an honest table of the two."""

import contextlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from budgetformer import metrics
from budgetformer.config import MULTI_LABEL, BudgetConfig
from budgetformer.data import write_ledger
from budgetformer.environment import environment
from budgetformer.errors import BudgetFormerError, UsageError
from budgetformer.folder import check_model_folder
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.outputs import clear_output_folder, write_aside
from budgetformer.settings import TrainSettings, save
from budgetformer.settings.rules import listed
from budgetformer.text import Encoded
from budgetformer.training import sources
from budgetformer.training.fit import FitOptions, FitResult, fit, silent
from budgetformer.training.grouping import group_neurons
from budgetformer.training.importance import start_routers, unit_importance
from budgetformer.training.settling import hold_out, settle, settle_cascade
from budgetformer.training.trainer import without_bar

DIAL = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
QUICK_EPOCHS = 3
TIMED_TEXTS, TIMED_ROUNDS = 1000, 5
INPUTS = ("data", "train_file", "validation_file", "test_file", "unlabelled_file", "model", "dense", "class_weights")


@dataclass(frozen=True)
class Recipe:
    """What training does where nothing is told. first: share of the target that first answers spend. levels: budgets
    trained besides, in targets. whole: share of the steps at each. dense, budgeted: epochs of the two models, in
    `epochs`. rate: the budgeted one's learning rate, in that of the other.
    """

    first: float
    whole: float
    levels: tuple[float, ...] = ()
    dense: int = 1
    budgeted: int = 1
    rate: float = 1.0


# By whose order the units have and who gives second answers; the log has the figures behind them. A fixed order
# recovers slowly, and computes only what is on from its first step; its twin must be as good as it gets, since what it
# does not know it cannot teach.
RECIPES = {
    ("fixed", "twin"): Recipe(first=0.6, whole=0.3, levels=(0.8, 1.2), dense=2, budgeted=3, rate=2.0),
    # Settling may find cheaper first answers.
    ("fixed", "self"): Recipe(first=1.0, whole=0.13, levels=(0.6, 2.0), dense=2, budgeted=2, rate=2.0),
    ("learned", "twin"): Recipe(first=0.6, whole=0.3),
    ("learned", "self"): Recipe(first=0.6, whole=0.2),
}


def train(settings: TrainSettings, echo: Callable[[str], None]) -> dict[str, Any]:
    """Train and compare; returns what metrics.json holds. The output folder is a model folder when it is done.

    Errors in settings and data are raised before any work; KeyboardInterrupt after a checkpoint was kept.
    """
    from accelerate import PartialState

    PartialState(cpu=not torch.cuda.is_available())  # joins the other processes, when there are any
    if not is_main():
        echo = silent
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    _keep_inputs(settings)
    splits = sources.load_splits(settings, echo)
    Carbon(settings.carbon, settings.country)  # refused now, not after training, when its package is missing
    budget = budget_of(settings)
    model, tokenizer = sources.load_encoder(settings, splits, budget=BudgetConfig())
    budget.check_blocks(model.config.intermediate_size)
    tokenizer.model_max_length = settings.max_length  # use cuts texts where training did
    train_rows, test_rows = (
        sources.encode_rows(r, tokenizer, splits.labels, settings) for r in (splits.train, splits.test)
    )
    validation = None
    if splits.validation is not None:
        validation = sources.encode_rows(splits.validation, tokenizer, splits.labels, settings)
    for encoded, name in ((train_rows, "training"), (test_rows, "test")):
        if encoded.truncated:
            echo(
                f"{encoded.truncated} of {len(encoded)} {name} texts are longer than {settings.max_length} tokens "
                "and are cut"
            )
    held = validation
    if budget.may_answer_twice and validation is None:
        train_rows, held = hold_out(train_rows, settings.seed)
        echo(f"{len(held)} training texts are kept for the margin of second answers; no model is trained on them")
    unlabelled = None
    if splits.unlabelled is not None:
        unlabelled = sources.encode_rows(splits.unlabelled, tokenizer, None, settings)
        echo(f"{len(unlabelled):,} texts without labels, for the dense twin to answer")
    model.config.class_weights = sources.class_weights(settings, train_rows, splits.labels)
    model.config.label_smoothing = settings.label_smoothing

    folder = Path(settings.output_dir)
    if is_main():
        clear_output_folder(folder, overwrite=settings.overwrite, resume=settings.resume is not None)
        if settings.resume is None:
            save(
                settings, folder / "settings.yaml"
            )  # a resumed run may yet be refused: its settings are saved at its end
        write_ledger(splits.bad, folder / "bad_rows.jsonl")
        with writing(folder):
            tokenizer.save_pretrained(folder)  # before any training: a resumed run must read the same token ids
    wait_for_all()
    echo(f"{len(train_rows):,} training and {len(test_rows):,} test texts, {len(splits.labels)} labels")

    dense = _dense_twin(settings, model, tokenizer, train_rows, validation, folder, echo)
    budgeted, fitted = fit_budgeted(
        dense, budget, train_rows, validation, settings, folder, echo, held=held, unlabelled=unlabelled
    )
    if is_main():
        save_model(budgeted, tokenizer, folder)
    wait_for_all()

    result: dict[str, Any] = {}
    if is_main():  # alone: processes that measure at once would slow each other
        echo("measuring both on the test texts")
        result = measure({"dense": dense, "budgeted": budgeted}, test_rows, Carbon(settings.carbon, settings.country))
        result["budgeted"] |= {
            "fit_seconds": fitted.seconds,
            "fit_steps": fitted.steps,
            "best_epoch": fitted.best_epoch,
        }
        result["settings"] = asdict(settings)
        result["data"] = {
            "train_rows": len(train_rows),
            "unlabelled_rows": 0 if unlabelled is None else len(unlabelled),
            "validation_rows": 0 if validation is None else len(validation),
            "test_rows": len(test_rows),
            "left_out": len(splits.bad),
            "truncated": train_rows.truncated,
            "labels": splits.labels,
        }
        result["environment"] = {**environment(), "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        missed = result["budgeted"]["units_flops_share"] - settings.target_budget
        if abs(missed) > 0.02:
            echo(
                f"warning: the budget ended {missed:+.3f} off its target of {settings.target_budget}; train for longer"
            )
        _write(result, folder, echo)
        save(settings, folder / "settings.yaml")
    wait_for_all()
    return result


def budget_of(settings: TrainSettings) -> BudgetConfig:
    """The budget that the settings ask for.

    Where blocks have a budget too the defaults are those that kept most of the accuracy: one order of units for all
    texts, trained most at the target and a little above and below it, and second answers where they pay.
    """
    blocks, target = settings.scope == "heads+blocks", settings.target_budget
    relevance = settings.relevance or ("fixed" if blocks else "learned")
    twice = target < 1 and (relevance == "fixed" or settings.first_share != 1.0)
    second = settings.second_answers or ("twin" if blocks and twice and _frozen(settings) else "self")
    if second == "twin" and not _frozen(settings):
        raise UsageError(
            "second_answers=twin: the twin reads the model's embeddings, and these would be trained away from it; "
            "freeze them (a pretrained model, without --no-freeze-embeddings) or choose self"
        )
    usual = RECIPES[relevance, second]
    first = settings.first_share or (usual.first if blocks and target < 1 else 1.0)
    levels = listed(settings.levels) if settings.levels else None
    if levels is None:
        levels = tuple(level for level in (round(share * target, 4) for share in usual.levels) if level < 1)
    whole = usual.whole if settings.whole_share is None else settings.whole_share
    return BudgetConfig(
        target=target,
        estimator=settings.estimator,
        scope=settings.scope,
        ffn_blocks=settings.ffn_blocks,
        relevance=relevance,
        second=second,
        first=first,
        whole=whole if levels or (first < 1 and second == "self") else 0.0,
        levels=levels,
    )


def measure(models: dict[str, Any], test: Encoded, carbon: "Carbon") -> dict[str, Any]:
    """What metrics.json holds of each model, the dial of the budgeted one, and both timed in turn."""
    result = {name: carbon.measure(lambda m=model: metrics.evaluate(m, test)) for name, model in models.items()}
    result["budgeted"]["dial"] = [
        {"budget": b, **_brief(metrics.evaluate(models["budgeted"], test, budget=b, details=False))} for b in DIAL
    ]
    for name, seconds in timed(models, test).items():
        result[name] |= seconds
    return result


def _keep_inputs(settings: TrainSettings) -> None:
    """Refuse --overwrite of a folder that holds what the run reads."""
    folder = Path(settings.output_dir).resolve()
    for name in INPUTS if settings.overwrite else ():
        given = getattr(settings, name)
        if given is not None and Path(given).exists() and Path(given).resolve().is_relative_to(folder):
            raise UsageError(f"{name}={given}: lies in {settings.output_dir}, which --overwrite would remove; move it")


def budgeted_from(
    dense: BudgetFormerForSequenceClassification, budget: BudgetConfig, settings: TrainSettings
) -> BudgetFormerForSequenceClassification:
    """The budgeted model before its training: the twin's weights, routers with all heads on."""
    config = type(dense.config).from_dict(dense.config.to_dict())
    config.budget = asdict(budget)
    config.distillation = settings.distillation
    config.distillation_temperature = settings.distillation_temperature
    torch.manual_seed(settings.seed)
    model = BudgetFormerForSequenceClassification(config)
    # The blocks' routers have nothing in a dense twin; they keep their start, all blocks on.
    strange = model.load_state_dict(dense.state_dict(), strict=False)
    assert not strange.unexpected_keys
    model.keep_twin(dense)
    _freeze(model, settings, routers=False)
    return model


def fit_dense(
    model: BudgetFormerForSequenceClassification,
    train_rows: Encoded,
    validation: Encoded | None,
    settings: TrainSettings,
    folder: Path,
    echo: Callable[[str], None],
    *,
    keep_checkpoints: bool = True,
) -> None:
    """The twin's training, in place: every head on, routers asleep. folder: of the run, for its checkpoints."""
    _freeze(model, settings, routers=True)
    epochs = settings.dense_epochs or _recipe(budget_of(settings)).dense * settings.epochs
    options = _options(settings, folder / "checkpoints" / "dense", epochs, keep_checkpoints, settings.learning_rate)
    fit(model, train_rows, validation, options, label="dense twin", echo=echo)


def fit_budgeted(
    dense: BudgetFormerForSequenceClassification,
    budget: BudgetConfig,
    train_rows: Encoded,
    validation: Encoded | None,
    settings: TrainSettings,
    folder: Path,
    echo: Callable[[str], None],
    *,
    keep_checkpoints: bool = True,
    held: Encoded | None = None,
    unlabelled: Encoded | None = None,
) -> tuple[BudgetFormerForSequenceClassification, FitResult]:
    """The budgeted model, from its trained twin to the budget met in use. The twin's neurons are sorted in place.

    held: texts that nobody trained on, for the margin of second answers. unlabelled: texts that take the twin's answers
    for labels, and are learned from like the others.
    """
    told, device = train_rows, next(dense.parameters()).device.type
    # The twin is asked in the numbers that the training is in: in full precision it would take as long as an epoch.
    with torch.autocast(device, torch.bfloat16, enabled=uses_bf16(settings, device)):
        if budget.blocks > 1:  # the twin's function stays: a sum has no order
            group_neurons(dense, budget.blocks, settings.grouping, train_rows, seed=settings.seed)
        if settings.distillation > 0 or unlabelled is not None:  # a batch may hold rows of both
            with torch.no_grad():
                told = train_rows.with_column("teacher_logits", metrics.predict(dense.eval(), train_rows).logits)
        if unlabelled is not None:
            told = Encoded([*told.items, *answered_by(dense, unlabelled).items])
        budgeted = budgeted_from(dense, budget, settings)
        if budget.prior > 0:
            heads, blocks = unit_importance(dense, train_rows, blocks=budget.blocks, seed=settings.seed)
            start_routers(budgeted, heads, blocks, train_rows)
    usual = _recipe(budget)
    options = _options(
        settings,
        folder / "checkpoints" / "budgeted",
        settings.recovery_epochs or usual.budgeted * settings.epochs,
        keep_checkpoints,
        settings.recovery_rate or usual.rate * settings.learning_rate,
    )
    fitted = fit(budgeted, told, validation, options, label="budgeted", echo=echo)
    if budget.loss == "lagrange":
        settle(budgeted, train_rows)
    if held is not None and budget.may_answer_twice:
        settle_cascade(budgeted, held)
    return budgeted, fitted


def _recipe(budget: BudgetConfig) -> Recipe:
    return RECIPES[budget.relevance, budget.second]


@torch.no_grad()
def answered_by(dense: Any, encoded: Encoded) -> Encoded:
    """The texts with the dense model's answers as their labels, and as what it teaches."""
    logits = metrics.predict(dense.eval(), encoded).logits
    several = dense.config.problem_type == MULTI_LABEL
    labels = (logits > 0).int().tolist() if several else logits.argmax(-1).tolist()
    return encoded.with_column("labels", labels).with_column("teacher_logits", logits)


def _dense_twin(settings, model, tokenizer, train_rows: Encoded, validation, folder: Path, echo) -> Any:
    """Given, kept from the run that is resumed, or trained now."""
    done = folder / "dense"
    given = settings.dense or (done if settings.resume and (done / "config.json").is_file() else None)
    if given is not None:
        check_model_folder(given)
        twin: Any = BudgetFormerForSequenceClassification.from_pretrained(given)
        if twin.config.budget_config.routes:
            raise UsageError(f"dense={given}: has a budget itself; give a dense model, as {given}/dense may be")
        names = list(twin.config.id2label.values())
        if names != list(model.config.id2label.values()):
            raise UsageError(f"dense={given}: its {len(names)} labels are not those of the data; train it on this data")
        if twin.config.pooling != settings.pooling:
            raise UsageError(
                f"dense={given}: pools by {twin.config.pooling}, not {settings.pooling}; give its --pooling"
            )
        if twin.config.encoder_config != model.config.encoder_config:
            raise UsageError(f"dense={given}: its encoder has other sizes than model={settings.model}; name its own")
        if (twin.config.problem_type == MULTI_LABEL) != settings.multi_label:
            kind = "one label" if settings.multi_label else "several labels"
            raise UsageError(f"dense={given}: was trained for {kind} a text; check --multi-label")
        # The budgeted model takes its losses from here: those of this run, not those the twin was trained with.
        twin.config.class_weights = model.config.class_weights
        twin.config.label_smoothing = model.config.label_smoothing
        echo(f"dense twin: {given}")
        if settings.dense is None:
            return twin
    else:
        fit_dense(model, train_rows, validation, settings, folder, echo)
        twin = model
    if is_main():
        save_model(twin, tokenizer, done)
    wait_for_all()
    return twin


def _freeze(model: torch.nn.Module, settings: TrainSettings, *, routers: bool) -> None:
    """What does not learn: the routers of a dense model; pretrained embeddings, of which few texts touch few rows."""
    for name, parameter in model.named_parameters():
        frozen = (routers and ".router." in name) or (_frozen(settings) and ".embeddings." in name)
        frozen |= name.startswith("twin.")
        parameter.requires_grad_(not frozen)


def _frozen(settings: TrainSettings) -> bool:
    """Whether the embeddings stay as they are: those of a pretrained encoder, unless told otherwise."""
    return settings.freeze_embeddings and not settings.model.startswith("scratch:")


def _options(
    settings: TrainSettings, folder: Path, epochs: int, keep_checkpoints: bool, learning_rate: float
) -> FitOptions:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resume = settings.resume
    if resume not in (None, "auto") and Path(resume).parent.name != folder.name:
        resume = "auto"  # a checkpoint named by hand belongs to one of the two models only
    return FitOptions(
        output_dir=str(folder),
        epochs=min(epochs, QUICK_EPOCHS) if settings.quick else epochs,
        batch_size=settings.batch_size,
        learning_rate=learning_rate,
        router_learning_rate=settings.router_learning_rate,
        weight_decay=settings.weight_decay,
        warmup_ratio=settings.warmup_ratio,
        metric=settings.metric,
        patience=settings.patience,
        seed=settings.seed,
        bf16=uses_bf16(settings, device),
        num_workers=settings.num_workers,
        resume=resume,
        keep_checkpoints=keep_checkpoints,
        quiet=settings.quiet,
        device=device,
    )


def uses_bf16(settings: TrainSettings, device: str) -> bool:
    """Whether training runs under autocast: as told, or where it pays."""
    return bf16_pays(device) if settings.bf16 == "auto" else settings.bf16 == "on"


def bf16_pays(device: str) -> bool:
    """True where bfloat16 matrix products run natively: there a training step takes less than half the time."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    from torch import cpu

    checks = [getattr(cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(check() for check in checks if check is not None)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model folder aside and move it in file by file, config.json last: there is never a half model."""
    import shutil
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        with without_bar(), writing(folder):
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            for file in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
                os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """One clear line when a model cannot be written: the libraries raise anything then, a bare Exception too."""
    try:
        yield
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise BudgetFormerError(f"{folder}: the model cannot be written ({reason}); free some space") from error


def timed(models: dict[str, Any], encoded: Encoded) -> dict[str, dict[str, float]]:
    """Seconds per 1,000 texts of each model, in turn, on the same texts: median, lowest and highest of the rounds."""
    sample = Encoded(encoded.items[:TIMED_TEXTS])
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(TIMED_ROUNDS):
        for name, model in models.items():
            seconds[name].append(1000 * metrics.predict(model.eval(), sample).seconds / len(sample))
    return {
        name: {
            "seconds_per_1000": statistics.median(found),
            "seconds_per_1000_low": min(found),
            "seconds_per_1000_high": max(found),
        }
        for name, found in seconds.items()
    }


def _brief(found: dict[str, Any]) -> dict[str, Any]:
    shares = ("head_share", "block_share", "units_flops_share", "attention_flops_share", "flops_share")
    return {key: found[key] for key in ("accuracy", "macro_f1", *shares, "seconds_per_1000") if key in found}


def _write(result: dict[str, Any], folder: Path, echo: Callable[[str], None]) -> None:
    from budgetformer.report import write_report
    from budgetformer.report.card import card

    try:
        with write_aside(folder / "metrics.json") as aside:
            Path(aside).write_text(json.dumps(result, indent=1, ensure_ascii=False), "utf-8")
        write_report(result, folder)
        with write_aside(folder / "README.md") as aside:
            aside.write_text(card(result), "utf-8")
    except OSError as error:
        raise BudgetFormerError(f"{folder}: results cannot be written ({error.strerror}); free some space") from error
    echo(f"everything is in {folder}: the model and its card, metrics.json, report.md, and the dense twin in dense/")


class Carbon:
    """Grams of CO2 of a piece of work, by codecarbon's offline tracker; nothing when it was not asked for."""

    def __init__(self, wanted: bool, country: str):
        self.wanted = wanted
        self.country = country
        if wanted:
            try:
                import codecarbon  # noqa: F401
            except ImportError:
                raise UsageError("carbon: codecarbon is not installed; pip install 'budgetformer[carbon]'") from None
            logging.getLogger("codecarbon").setLevel(logging.ERROR)  # it speaks before it looks at its own log_level

    def measure(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `work` returns, with co2_grams and the country whose power mix was assumed."""
        if not self.wanted:
            return work()
        from codecarbon import OfflineEmissionsTracker

        tracker = OfflineEmissionsTracker(
            country_iso_code=self.country, save_to_file=False, log_level="error", allow_multiple_runs=True
        )
        tracker.start()
        try:
            found = work()
        finally:
            kilograms = tracker.stop()
        return {**found, "co2_grams": None if kilograms is None else 1000 * kilograms, "co2_country": self.country}


def is_main() -> bool:
    """True in the one process that writes."""
    return int(os.environ.get("RANK", "0")) == 0


def wait_for_all() -> None:
    """Processes of one run meet here."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
