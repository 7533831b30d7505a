"""Two processes on CPU share each batch and end as one process does: equal weights on both, one multiplier."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from budgetformer.metrics import evaluate
from fitting import BATCH, EPOCHS, STEPS, end_of, make_data, make_model, run, same

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).with_name("fitting.py"))
LAUNCHERS = {
    # On CPU, too: with --cpu accelerate starts one process only, unless there is an mpirun.
    "accelerate": ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
                   "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    "torchrun": ("torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d",
                 "--rdzv-endpoint", "localhost:0"),
}  # fmt: skip
ROWS = 64  # no last batch that processes have to fill up


def start(output, launcher="torchrun", **options):
    output.mkdir(exist_ok=True)
    arguments = json.dumps({"rows": ROWS, **options})
    command = [sys.executable, "-m", *LAUNCHERS[launcher], SCRIPT, str(output), arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def two(output, launcher="torchrun", **options):
    """What the two processes left, and what they said on stderr."""
    child = start(output, launcher, **options)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err.decode()[-3000:]
    assert out == b""
    return [torch.load(output / f"rank-{rank}.pt") for rank in (0, 1)], err.decode()


def one(folder, **options):
    """The same in this process."""
    data = make_data(options.pop("rows", ROWS))
    model, result = run(folder, data=data, model=make_model(**options.pop("model", {})), **options)
    return model, result, data.seen


def batches(seen, size, epochs=EPOCHS):
    """The inputs of each batch of the training, in order; those that were read to measure lengths left out."""
    seen = seen[-epochs * STEPS * size :]
    return [seen[i : i + size] for i in range(0, len(seen), size)]


def test_budgeted_equals_one_process_within_noise(tmp_path):
    """The noise is what one process shows from seed to seed: dropout and exploration. Means of both are compared."""
    options = {"epochs": 9, "learning_rate": 2e-2, "validation": False}
    ranks, said = two(tmp_path / "two", "accelerate", **options)
    others = [two(tmp_path / f"two-{seed}", "accelerate", seed=seed, **options)[0] for seed in (1, 2)]
    alone = [one(tmp_path / f"one-{seed}", seed=seed, **options) for seed in range(5)]
    # Both processes hold the same model, multiplier and profile.
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    assert ranks[0]["steps"] == alone[0][1].steps == 9 * STEPS
    assert "unused" not in said
    # Each gets its own part of each global batch, and the global batches are those of one process with this seed.
    shared = zip(*(batches(rank["seen"], BATCH // 2, 9) for rank in ranks), strict=True)
    for whole, (left, right) in zip(batches(alone[0][2], BATCH, 9), shared, strict=True):
        assert whole == left + right
    # What was learned is the same within noise.
    held_out = make_data(401, seed=11)

    def outcome(model) -> list[float]:
        scored = evaluate(model, held_out, details=False)
        return [scored["accuracy"], scored["head_share"], float(model.multiplier)]

    both = []
    for run_of_two in (ranks, *others):
        model = make_model()
        model.load_state_dict(run_of_two[0]["weights"])
        both.append(outcome(model))
    here, there = torch.tensor(both), torch.tensor([outcome(model) for model, _, _ in alone])
    assert there[:, 0].min() > 0.6
    for i, name in enumerate(("accuracy", "head share", "multiplier")):
        error = there[:, i].std() * (1 / len(here) + 1 / len(there)) ** 0.5
        assert abs(here[:, i].mean() - there[:, i].mean()) < 3 * error + 0.02, (name, here[:, i], there[:, i])


STILL = {"dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.0}


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen routers", "routers that wait for no gradient"])
def test_dense_equals_one_process(tmp_path, freeze):
    """Without dropout there is no noise, and the two differ by rounding only."""
    options = {"model": {"target": 1.0, "freeze": freeze, **STILL}}
    ranks, said = two(tmp_path / "two", **options)
    model, _, _ = one(tmp_path / "one", **options)
    assert "unused" not in said
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    for name, tensor in model.state_dict().items():
        other = ranks[0]["weights"][name]
        if name.endswith("in_proj_bias"):  # that of the keys has no gradient but rounding, which Adam blows up
            tensor, other = (torch.cat([t.chunk(3)[0], t.chunk(3)[2]]) for t in (tensor, other))
        torch.testing.assert_close(other, tensor, rtol=0, atol=5e-5, msg=name)


def test_processes_draw_different_noise(tmp_path):
    two(tmp_path)
    random = [end_of(tmp_path / "run", f"rng_state_{rank}.pth")[2] for rank in (0, 1)]
    assert random[0] != random[1]


def test_a_last_batch_that_is_not_full(tmp_path):
    """61 inputs: 3 of the first batch are used again, and no input is left out."""
    ranks, _ = two(tmp_path, rows=61)
    shared = [batches(rank["seen"], BATCH // 2) for rank in ranks]
    for epoch in range(EPOCHS):
        part = slice(epoch * STEPS, (epoch + 1) * STEPS)
        assert {i for rank in shared for batch in rank[part] for i in batch} == set(range(61))


def test_stopped_by_a_signal_and_resumed(tmp_path):
    """Both processes stop after the same step, and the resumed two end with the bits of two that never stopped."""
    whole, _ = two(tmp_path / "whole")
    child = start(tmp_path / "cut", pause=0.1)
    steps = tmp_path / "cut" / "steps"
    while not (steps.exists() and f"{STEPS + 3}\n" in steps.read_text()):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=120)
    assert child.returncode != 0
    (found,) = [p.name for p in (tmp_path / "cut" / "run").iterdir() if p.name not in ("checkpoint-8", "checkpoint-16")]
    assert STEPS + 3 <= int(found.removeprefix("checkpoint-")) < 2 * STEPS
    resumed, _ = two(tmp_path / "cut", resume="auto")
    assert same(resumed[0]["weights"], whole[0]["weights"])
    ends = [end_of(tmp_path / name / "run", "rng_state_1.pth") for name in ("whole", "cut")]
    assert ends[0] == ends[1]


def test_a_batch_must_be_shared_evenly(tmp_path):
    child = start(tmp_path, batch_size=7)
    _, err = child.communicate(timeout=120)
    assert child.returncode != 0
    assert b"batch_size=7: must be a multiple of the 2 processes that share each batch" in err
