"""Only a whole checkpoint is resumed from; harmed ones are skipped, and the run still ends where it would have."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from budgetformer.errors import UsageError
from budgetformer.training import checkpoints
from fitting import QUICKLY, STEPS, Signal, end_of, make_model, run, same

COURSE = {"seed": 3, "epochs": 5}


def fake(folder, step, course=COURSE):
    """A sealed checkpoint of a few bytes."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    for name in (*checkpoints.NEEDED, "rng_state.pth"):
        (path / name).write_text(f"{name} of {step}")
    checkpoints.seal(path, course)
    return path


def test_a_sealed_checkpoint_is_whole(tmp_path):
    assert checkpoints.trouble(fake(tmp_path, 7)) is None


def test_order_is_by_number_and_other_folders_are_no_checkpoints(tmp_path):
    for step in (9, 100, 23):
        fake(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert [path.name for path in checkpoints.in_order(tmp_path)] == ["checkpoint-100", "checkpoint-23", "checkpoint-9"]
    assert checkpoints.in_order(tmp_path / "nowhere") == []


def test_a_changed_byte_of_any_file_is_seen(tmp_path):
    path = fake(tmp_path, 7)
    file = path / "rng_state.pth"
    file.write_text(file.read_text().replace("7", "8"))
    assert checkpoints.trouble(path) == "rng_state.pth is damaged: its checksum is another"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"course": {}, "files": {"a": 3}}', '{"files": {}}'])
def test_a_manifest_that_is_no_manifest(tmp_path, text):
    path = fake(tmp_path, 7)
    (path / "manifest.json").write_text(text)
    assert checkpoints.trouble(path) == "manifest.json is damaged"


def test_a_manifest_must_name_the_optimizer(tmp_path):
    path = fake(tmp_path, 7)
    (path / "optimizer.pt").unlink()
    checkpoints.seal(path, COURSE)  # Trainer goes on silently with a fresh optimizer
    assert checkpoints.trouble(path) == "optimizer.pt is missing from manifest.json"


def test_a_named_checkpoint_must_be_whole(tmp_path):
    path = fake(tmp_path, 7)
    (path / "scheduler.pt").unlink()
    with pytest.raises(UsageError, match=r"checkpoint-7: scheduler\.pt is missing; use --resume auto"):
        checkpoints.resolve(str(path), tmp_path, print)
    with pytest.raises(UsageError, match="checkpoint-8: there is no such folder"):
        checkpoints.resolve(str(tmp_path / "checkpoint-8"), tmp_path, print)


def test_another_course_is_refused_with_both_values(tmp_path):
    path = fake(tmp_path, 7)
    assert checkpoints.resolve("auto", tmp_path, print, COURSE) == path
    with pytest.raises(UsageError, match="checkpoint-7: was made with seed=3, now 4: resume with the same settings"):
        checkpoints.resolve("auto", tmp_path, print, {**COURSE, "seed": 4})


def test_nothing_to_resume_from(tmp_path):
    assert checkpoints.resolve(None, tmp_path, print) is None
    assert checkpoints.resolve("auto", tmp_path, print) is None


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_prune_keeps_newest_and_best(tmp_path):
    made = {step: fake(tmp_path, step) for step in (3, 7, 11, 23)}
    checkpoints.prune(made[23], 7)
    assert names(tmp_path) == ["checkpoint-23", "checkpoint-7"]


def test_prune_keeps_a_whole_one_to_fall_back_on_where_newest_is_best(tmp_path):
    made = {step: fake(tmp_path, step) for step in (3, 7, 11, 23)}
    (made[11] / "optimizer.pt").unlink()
    checkpoints.prune(made[23], 23)
    assert names(tmp_path) == ["checkpoint-23", "checkpoint-7"]


def test_discard_leaves_other_files(tmp_path):
    fake(tmp_path / "run", 7)
    checkpoints.discard(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fake(tmp_path, 7)
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints.discard(tmp_path)
    assert names(tmp_path) == ["notes.txt"]


# ---------------------------------------------------------------------- with real runs


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run stopped in its last epoch, with two whole checkpoints; model and end of one that never stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    whole = tmp_path_factory.mktemp("whole")
    model, _ = run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(folder, callbacks=(Signal(2 * STEPS + 5),))
    newest, best = checkpoints.in_order(folder)
    assert newest.name == f"checkpoint-{2 * STEPS + 5}"
    assert best.name in (f"checkpoint-{STEPS}", f"checkpoint-{2 * STEPS}")
    return folder, model, end_of(whole)


def halve(file: Path):
    os.truncate(file, file.stat().st_size // 2)


def empty(folder: Path):
    shutil.rmtree(folder)
    folder.mkdir()


def half_write(folder: Path):
    """As a process leaves it that is killed while it writes, with the marker of transformers' SIGTERM checkpoint."""
    for name in ("manifest.json", "scheduler.pt", "trainer_state.json", "rng_state.pth"):
        (folder / name).unlink()
    (folder / "checkpoint-is-incomplete.txt").touch()


DAMAGES = {
    "truncated weights": (lambda p: halve(p / "model.safetensors"), "model.safetensors is damaged"),
    "no trainer_state": (lambda p: (p / "trainer_state.json").unlink(), "trainer_state.json is missing"),
    "empty folder": (empty, "the folder is empty"),
    "truncated optimizer": (lambda p: halve(p / "optimizer.pt"), "optimizer.pt is damaged"),
    "no optimizer": (lambda p: (p / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "half-written": (half_write, "manifest.json is missing, so it was not written to its end"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_with_one_line(stopped, tmp_path, damage):
    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    newest, older = checkpoints.in_order(folder)
    harm, reason = DAMAGES[damage]
    harm(newest)
    lines = []
    model, _ = run(folder, resume="auto", echo=lines.append)
    assert len(lines) == 2
    assert lines[0].startswith(f"warning: checkpoint {newest} is skipped: {reason}")
    assert lines[1] == f"training: going on from {older}"
    assert same(model, stopped[1])
    assert end_of(folder) == stopped[2]
    assert all(checkpoints.trouble(path) is None for path in checkpoints.in_order(folder))


def test_all_damaged_begins_anew(stopped, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    for path in checkpoints.in_order(folder):
        halve(path / "optimizer.pt")
    lines = []
    model, _ = run(folder, resume="auto", echo=lines.append)
    assert [line.startswith("warning: checkpoint") for line in lines] == [True, True]
    assert same(model, stopped[1])
    assert end_of(folder) == stopped[2]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A finished run whose best epoch is not its last; its model."""
    folder = tmp_path_factory.mktemp("learned")
    model, result = run(folder, model=make_model(target=1.0), **QUICKLY)
    assert result.best_epoch is not None
    assert result.best_epoch < QUICKLY["epochs"]
    return folder, model


def test_a_run_folder_may_be_moved(learned, tmp_path):
    """Trainer remembers where the best checkpoint was, not where it is."""
    folder = tmp_path / "elsewhere"
    shutil.copytree(learned[0], folder)
    newest = checkpoints.in_order(folder)[0]
    state = (newest / "trainer_state.json").read_text()
    assert str(learned[0]) in state
    (newest / "trainer_state.json").write_text(state.replace(str(learned[0]), "/nowhere/any/more"))
    checkpoints.seal(newest, json.loads((newest / checkpoints.MANIFEST).read_text())["course"])
    lines = []
    model, _ = run(folder, model=make_model(target=1.0), resume="auto", echo=lines.append, **QUICKLY)
    assert same(model, learned[1])
    assert len(lines) == 1


def test_a_damaged_best_checkpoint_is_lost_with_a_warning(learned, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(learned[0], folder)
    newest, best = checkpoints.in_order(folder)
    halve(best / "model.safetensors")
    lines = []
    model, result = run(folder, model=make_model(target=1.0), resume="auto", echo=lines.append, **QUICKLY)
    assert lines[1].startswith(f"warning: the best checkpoint so far, {best}, is lost: model.safetensors is damaged")
    assert lines[2:] == ["warning: the checkpoint of the best epoch is gone: the weights are those of the last epoch"]
    assert same(model, load_file(newest / "model.safetensors"))
    assert result.best_epoch is None
