"""A run ends with the same bits whether it was stopped or not, keeps its best epoch, and says nothing on stdout."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalPrediction

from budgetformer.errors import BudgetFormerError, UsageError
from budgetformer.metrics import evaluate
from budgetformer.schedule import Schedule
from budgetformer.text import collator
from budgetformer.training import checkpoints
from budgetformer.training.fit import _metrics
from budgetformer.training.stopping import Progress
from fitting import QUICKLY, STEPS, Call, Signal, end_of, make_data, make_model, run, same


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that never stopped: folder, model, result."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run(folder)


def log(folder):
    """Evaluations of a run, one an epoch."""
    state = json.loads((checkpoints.in_order(folder)[0] / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "eval_score" in entry]


# ---------------------------------------------------------------------- stop and resume


@pytest.mark.parametrize("cut", [1, STEPS, STEPS + 1, STEPS + 5, 2 * STEPS, 3 * STEPS - 1])
def test_stopped_and_resumed_equals_never_stopped(whole, tmp_path, cut):
    number = (signal.SIGINT, signal.SIGTERM)[cut % 2]
    with pytest.raises(KeyboardInterrupt, match=number.name):
        run(tmp_path, callbacks=(Signal(cut, number),))
    assert checkpoints.in_order(tmp_path)[0].name == f"checkpoint-{cut}"
    evaluated = cut // STEPS  # whole epochs only: no extra evaluation at the cut
    assert len(log(tmp_path)) == evaluated
    model, result = run(tmp_path, resume="auto")
    assert same(model, whole[1])
    assert end_of(tmp_path) == end_of(whole[0])
    assert (result.steps, result.best_epoch) == (whole[2].steps, whole[2].best_epoch)


def test_stopped_again_and_again(whole, tmp_path):
    for cut in (3, 4, STEPS + 2, 2 * STEPS):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, resume="auto", callbacks=(Signal(cut),))
    run(tmp_path, resume="auto")
    assert end_of(tmp_path) == end_of(whole[0])


def test_noise_was_on(whole, tmp_path):
    """Else the tests above would show little: dropout and exploration must draw numbers that change the weights."""
    model = make_model()
    assert model.config.dropout > 0
    assert model.config.budget_config.noise > 0
    quiet, _ = run(tmp_path, model=make_model(dropout=0.0, attention_dropout=0.0, classifier_dropout=0.0))
    assert not same(quiet, whole[1])
    assert float(whole[1].multiplier) != 0.0
    assert bool((whole[1].budgetformer.encoder.profile < 1).all())


def test_resuming_a_finished_run_takes_no_step(whole, tmp_path):
    run(tmp_path)
    steps = []
    again, result = run(tmp_path, resume="auto", callbacks=(Call(1, lambda: steps.append(1)),))
    assert not steps
    assert same(again, whole[1])
    assert result.best_epoch == whole[2].best_epoch


def test_a_second_signal_ends_at_once(tmp_path):
    begun = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=(Signal(3), Signal(3), Call(3, lambda: begun.append(3))))
    assert not begun
    assert checkpoints.in_order(tmp_path) == []


def test_handlers_of_signals_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=(Signal(2),))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_without_resume_checkpoints_of_another_run_are_removed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=(Signal(3 * STEPS - 1),))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=(Signal(2),))
    assert [path.name for path in checkpoints.in_order(tmp_path)] == ["checkpoint-2"]


def test_resuming_with_another_setting_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=(Signal(2),))
    with pytest.raises(UsageError, match=r"was made with learning_rate=0\.003, now 0\.5; seed=0, now 1: resume with"):
        run(tmp_path, resume="auto", learning_rate=0.5, seed=1)
    with pytest.raises(UsageError, match="rows=61, now 41"):
        run(tmp_path, resume="auto", data=make_data(41))
    with pytest.raises(UsageError, match=r"whole=0\.0, now 0\.3; levels=\[\], now \[0\.4\]"):
        run(tmp_path, resume="auto", model=make_model(budget={"levels": (0.4,), "whole": 0.3}))


def in_process(output: Path, **options):
    arguments = json.dumps({"threads": torch.get_num_threads(), **options})
    script = Path(__file__).with_name("fitting.py")
    return subprocess.Popen([sys.executable, script, output, arguments], stderr=subprocess.PIPE)


def wait_for_step(output: Path, step: int, seconds: float = 120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (output / "steps").exists() and f"{step}\n" in (output / "steps").read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} never began")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
    ids=lambda number: number.name,
)
def test_a_signal_to_another_process(whole, tmp_path, number):
    cut, folder = 2 * STEPS + 2, tmp_path / "run"
    child = in_process(tmp_path, pause=0.1)
    wait_for_step(tmp_path, cut)
    child.send_signal(number)
    said = child.communicate(timeout=60)[1].decode()
    newest = int(checkpoints.in_order(folder)[0].name.removeprefix("checkpoint-"))
    if number == signal.SIGKILL:
        assert newest == 2 * STEPS
    else:
        assert f"KeyboardInterrupt: {number.name}" in said
        assert cut <= newest < 3 * STEPS
    model, _ = run(folder, resume="auto")
    assert same(model, whole[1])
    assert end_of(folder) == end_of(whole[0])


def unsealed(folder: Path):
    """The newest checkpoint when it is being written, or was left so."""
    newest = checkpoints.in_order(folder)[:1]
    return bool(newest) and not (newest[0] / checkpoints.MANIFEST).exists()


@pytest.mark.slow
def test_killed_at_any_time(whole, tmp_path):
    """kill -9 twenty times, in turn at any time and while a checkpoint is written; each goes on from what is left."""
    generator, folder, torn = np.random.default_rng(7), tmp_path / "run", 0
    for kill in range(20):
        (tmp_path / "steps").unlink(missing_ok=True)
        child = in_process(tmp_path, pause=0.02, resume="auto")
        while child.poll() is None and not (tmp_path / "steps").exists():
            time.sleep(0.005)
        end = time.monotonic() + float(generator.uniform(0.0, 0.5))
        while child.poll() is None and (not unsealed(folder) if kill % 2 else time.monotonic() < end):
            time.sleep(0.0005)
        child.kill()
        child.communicate()
        torn += unsealed(folder)
    assert torn > 0
    run(folder, resume="auto")
    assert end_of(folder) == end_of(whole[0])


# ---------------------------------------------------------------------- the best epoch


def test_best_and_last_are_kept_and_nothing_else(tmp_path):
    model, result = run(tmp_path, model=make_model(target=1.0), **QUICKLY)
    found = [entry["eval_score"] for entry in log(tmp_path)]
    best = found.index(max(found)) + 1
    assert best < 9  # a later epoch must be better, not as good
    assert result.best_epoch == best
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"checkpoint-{best * STEPS}", f"checkpoint-{9 * STEPS}"]
    )
    assert same(load_file(tmp_path / f"checkpoint-{best * STEPS}" / "model.safetensors"), model)


def test_metric_picks_the_epoch(tmp_path):
    picked = {}
    for metric in ("accuracy", "macro_f1", "loss"):
        folder = tmp_path / metric
        _, result = run(folder, model=make_model(target=1.0), metric=metric, **QUICKLY)
        found = [entry[f"eval_{metric}"] * (-1 if metric == "loss" else 1) for entry in log(folder)]
        assert result.best_epoch == found.index(max(found)) + 1
        picked[metric] = result.best_epoch
    assert picked["loss"] != picked["accuracy"]


def test_a_misspelt_metric_is_refused():
    with pytest.raises(UsageError, match="metric='acuracy': choose one of accuracy, macro_f1, loss"):
        run("nowhere", metric="acuracy")


def test_the_best_epoch_is_one_within_the_budget(tmp_path):
    model, result = run(tmp_path, model=make_model(target=0.5), epochs=9, learning_rate=1e-2)
    found = log(tmp_path)
    within = [entry for entry in found if entry["eval_units_share"] <= 0.52]
    best = found[int(result.best_epoch) - 1]
    assert 0 < len(within) < 9  # heads come down while it learns
    assert best in within
    assert best["eval_accuracy"] == max(entry["eval_accuracy"] for entry in within)
    assert evaluate(model, make_data(23, seed=4), details=False)["head_share"] <= 0.52


def test_an_epoch_is_judged_by_the_flops_of_both_kinds(tmp_path):
    """Shares of heads alone would say something else, and so would a mean that forgets how long the inputs are."""
    budget = {"scope": "heads+blocks", "ffn_blocks": 4}
    model, _ = run(tmp_path, model=make_model(target=0.5, budget=budget, intermediate_size=128), epochs=2)
    last, counted = log(tmp_path)[-1], evaluate(model, make_data(23, seed=4), details=False)
    assert last["eval_head_share"] == pytest.approx(counted["head_share"], abs=1e-6)
    assert last["eval_units_share"] == pytest.approx(counted["units_flops_share"], abs=1e-6)
    assert abs(last["eval_units_share"] - last["eval_head_share"]) > 0.01


def test_the_share_of_an_epoch_by_hand():
    budget = {"scope": "heads+blocks", "ffn_blocks": 4}
    config = make_model(target=0.5, budget=budget, intermediate_size=128).config
    labels, tokens = np.array([0, 1]), [3, 16]
    prediction = (np.eye(2)[labels], np.array([1.0, 0.2]), np.array([0.25, 0.75]))
    # Width 15, 128 neurons; all heads of one layer: 8 n 15^2 + 4 n^2 15; all neurons: 4 n 15 128.
    heads, neurons = [8 * n * 225 + 60 * n * n for n in tokens], [7680 * n for n in tokens]
    spent = heads[0] + 0.2 * heads[1] + 0.25 * neurons[0] + 0.75 * neurons[1]
    found = _metrics("accuracy", config, tokens)(EvalPrediction(prediction, labels))
    assert found["units_share"] == pytest.approx(spent / (sum(heads) + sum(neurons)))
    assert found["head_share"] == pytest.approx(0.6)
    assert found["score"] == pytest.approx(1 - 10 * (found["units_share"] - 0.52) - 1000), "above 0.52: no candidate"


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1", "loss"])
def test_any_epoch_within_the_budget_beats_any_above_it(metric):
    labels = np.array([0, 1, 0, 1, 1])
    right = 5.0 * np.eye(2)[labels]
    score = _metrics(metric, make_model(target=0.3).config, [3, 5, 8, 5, 3])

    def of(logits, share):
        return score(EvalPrediction((logits, np.full(5, share)), labels))["score"]

    assert of(-right, 0.3199) > of(right, 0.3201)
    assert of(right, 0.33) > of(right, 0.34)
    assert of(right, 0.1) == of(right, 0.3)


def test_early_stopping_and_its_resumption(tmp_path):
    options = {**QUICKLY, "patience": 2}
    model, result = run(tmp_path, model=make_model(target=1.0), **options)
    found = [entry["eval_score"] for entry in log(tmp_path)]
    assert result.steps == STEPS * len(found) < STEPS * 9
    assert len(found) == found.index(max(found)) + 1 + 2
    again, resumed = run(tmp_path, model=make_model(target=1.0), resume="auto", **options)
    assert same(again, model)
    assert (resumed.steps, resumed.best_epoch) == (result.steps, result.best_epoch)
    assert checkpoints.in_order(tmp_path)[0].name == f"checkpoint-{result.steps}"


def test_patience_goes_on_counting_after_a_stop(tmp_path):
    options = {**QUICKLY, "patience": 2}
    _, result = run(tmp_path / "whole", model=make_model(target=1.0), **options)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", model=make_model(target=1.0), callbacks=(Signal(result.steps - 3),), **options)
    _, resumed = run(tmp_path / "cut", model=make_model(target=1.0), resume="auto", **options)
    assert resumed.steps == result.steps
    assert end_of(tmp_path / "cut") == end_of(tmp_path / "whole")


def test_without_checkpoints_nothing_is_written(tmp_path):
    _, result = run(tmp_path / "run", keep_checkpoints=False)
    assert result.best_epoch is None
    assert not any(tmp_path.rglob("*.*"))


# ---------------------------------------------------------------------- a disk that does not take it


def test_a_full_disk_leaves_the_older_checkpoint(whole, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))

    try:
        with pytest.raises(BudgetFormerError) as caught:
            run(tmp_path, callbacks=(Call(STEPS + 2, fill),))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"{tmp_path}/checkpoint-{2 * STEPS}: the checkpoint cannot be written (")
    assert "--resume auto" in said
    assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{STEPS}"]
    run(tmp_path, resume="auto")
    assert end_of(tmp_path) == end_of(whole[0])


def test_a_folder_that_may_not_be_written_leaves_the_older_checkpoint(tmp_path):
    def protect():
        tmp_path.chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)

    try:
        with pytest.raises(BudgetFormerError, match=r"checkpoint-16: the checkpoint .* \(Permission denied\)"):
            run(tmp_path, callbacks=(Call(STEPS + 2, protect),))
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        tmp_path.chmod(0o755)
    assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{STEPS}"]
    assert checkpoints.trouble(tmp_path / f"checkpoint-{STEPS}") is None


def test_no_pickle_of_settings_stays(whole):
    left = {path.name for path in whole[0].rglob("*") if path.is_file()}
    expected = {"config.json", "manifest.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt"}
    assert left == expected | {"trainer_state.json"}


# ---------------------------------------------------------------------- what is said


def test_nothing_on_stdout(tmp_path, capfd):
    run(tmp_path, quiet=False)
    said = capfd.readouterr()
    assert said.out == ""
    assert "training" in said.err
    assert "Writing" not in said.err  # transformers' own bar for each saved file


def test_quiet_says_nothing(tmp_path, capfd):
    run(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_the_bar_shows_the_chosen_metric():
    bar = Progress("training", "macro_f1")
    bar.on_log(None, None, None, {"loss": 0.7, "grad_norm": 2.0})
    bar.on_log(None, None, None, {"eval_macro_f1": 0.5, "eval_accuracy": 0.6, "eval_head_share": 0.25})
    assert bar.last == {"loss": 0.7, "macro_f1": 0.5, "heads": 0.25}


# ---------------------------------------------------------------------- options of the loss, and low precision


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"class_weights": [0.5, 1.0, 3.0]}, {}),
        ({"label_smoothing": 0.2}, {}),
        ({"class_weights": [0.5, 1.0, 3.0], "label_smoothing": 0.1}, {"bf16": True}),
        ({}, {"bf16": True}),
    ],
    ids=["class weights", "label smoothing", "all", "bf16"],
)
def test_the_loss_falls(tmp_path, config, options):
    before = evaluate(make_model(**config), make_data(), details=False)
    model, result = run(tmp_path, model=make_model(**config), validation=False, **{**QUICKLY, **options})
    after = evaluate(model, make_data(), details=False)
    assert after["loss"] < 0.7 * before["loss"]
    assert after["accuracy"] > before["accuracy"] + 0.2
    assert math.isfinite(result.loss)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


class Logged(TrainerCallback):
    """Each logged loss."""

    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def test_options_of_the_loss_change_it(tmp_path):
    first = {}
    configs = {"plain": {}, "weights": {"class_weights": [0.1, 1.0, 9.0]}, "smoothing": {"label_smoothing": 0.5}}
    for name, config in configs.items():
        seen = Logged()
        run(tmp_path, model=make_model(**config), epochs=2, callbacks=(seen,), keep_checkpoints=False)
        first[name] = seen.losses[0]
    assert len(set(first.values())) == 3


def test_bf16_does_not_choose_other_heads(tmp_path):
    """The router works in full precision: equal inputs, equal heads, bit for bit, whatever autocast does around it."""
    model, _ = run(tmp_path, validation=False)
    batch = collator(0)(make_data().items)
    batch.pop("labels")
    router = model.budgetformer.encoder.layers[1].attention.router
    x, keep = torch.randn(61, 16, 15), batch["attention_mask"].bool()
    explore = Schedule(budget=model.config.budget_config).settled
    with torch.no_grad():
        full, plain = model(**batch), router(x, keep, explore=explore)
        with torch.autocast("cpu", torch.bfloat16):
            low, cast = model(**batch), router(x, keep, explore=explore)
    assert torch.equal(plain.scores, cast.scores)
    assert torch.equal(plain.gates, cast.gates)
    assert not torch.equal(full.logits, low.logits.float())  # the rest did run in bf16
    assert torch.equal(full.gates[:, 0], low.gates[:, 0])
