"""Which checkpoint may be resumed from: only one that was written to its end and not harmed since.

Trainer takes the newest folder as it is; a half-written one stops the run, or worse, goes on with a fresh optimizer.
Here a manifest with the size and checksum of every file is written last; a folder that does not match it is skipped.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from budgetformer.errors import UsageError
from budgetformer.outputs import write_aside

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
NEEDED = (WEIGHTS, "optimizer.pt", "scheduler.pt", "trainer_state.json")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: str | Path, course: dict[str, Any]) -> None:
    """Write the manifest of a finished checkpoint; `course` holds the settings that a resumed run must share."""
    folder = Path(folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    held = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}
    with write_aside(folder / MANIFEST) as aside:
        Path(aside).write_text(json.dumps({"course": course, "files": held}, indent=1))


def _manifest(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
    """Course and files. Raises OSError or ValueError when there is no manifest, or a damaged one."""
    held = json.loads((folder / MANIFEST).read_text())
    try:
        return dict(held["course"]), {name: (e["bytes"], e["sha256"]) for name, e in held["files"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} has another form") from error


def trouble(folder: str | Path, needed: tuple[str, ...] = NEEDED) -> str | None:
    """Why a checkpoint cannot be used; None when it is whole. With fewer `needed` files only those are looked at."""
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    if not any(folder.iterdir()):
        return "the folder is empty"
    try:
        _, files = _manifest(folder)
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so it was not written to its end"
    except (OSError, ValueError):
        return f"{MANIFEST} is damaged"
    for name in needed:
        if name not in files:
            return f"{name} is missing from {MANIFEST}"
    for name in files if needed == NEEDED else needed:
        path, (size, digest) = folder / name, files[name]
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} is damaged: {path.stat().st_size} bytes instead of {size}"
        if _digest(path) != digest:
            return f"{name} is damaged: its checksum is another"
    return None


def in_order(folder: str | Path) -> list[Path]:
    """Checkpoints of a run, newest first."""
    folder = Path(folder)
    found = folder.glob("checkpoint-*") if folder.is_dir() else []
    numbered = [(int(m[1]), p) for p in found if (m := re.fullmatch(r"checkpoint-(\d+)", p.name)) and p.is_dir()]
    return [path for _, path in sorted(numbered, reverse=True)]


def newest_whole(folder: str | Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole, or None, with a warning for each newer one that is skipped."""
    for path in in_order(folder):
        reason = trouble(path)
        if reason is None:
            return path
        warn(f"checkpoint {path} is skipped: {reason}")
    return None


def resolve(
    resume: str | None, folder: str | Path, warn: Callable[[str], None], course: dict[str, Any] | None = None
) -> Path | None:
    """What `--resume` names: None, "auto" (the newest whole one of `folder`, if any), or a checkpoint's folder.

    Raises:
        UsageError: the named checkpoint is not whole, or it was made with another `course` than the one given.
    """
    if resume is None:
        return None
    if resume == "auto":
        found = newest_whole(folder, warn)
    else:
        found, reason = Path(resume), trouble(resume)
        if reason is not None:
            raise UsageError(f"resume={resume}: {reason}; use --resume auto for the newest whole checkpoint")
    if found is not None and course is not None:
        made, _ = _manifest(found)
        other = [f"{name}={made[name]!r}, now {now!r}" for name, now in course.items() if made.get(name, now) != now]
        if other:
            raise UsageError(f"{found}: was made with {'; '.join(other)}: resume with the same settings, or start anew")
    return found


def prune(newest: str | Path, best_step: int | None) -> None:
    """Remove a run's checkpoints but the newest and the best; where these are one, the one before stays as well.

    Called when `newest` is sealed, never before: at every moment one whole checkpoint is there.
    """
    newest = Path(newest)
    others = [path for path in in_order(newest.parent) if path.name != newest.name]
    kept = [path for path in others if path.name == f"checkpoint-{best_step}"]
    if not kept:
        kept = [path for path in others if _step(path) < _step(newest) and trouble(path) is None][:1]
    for path in others:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)  # one that cannot be removed is no reason to end a training


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


class FindBest(TrainerCallback):
    """Looks, when training begins, whether the best checkpoint a resumed run remembers is there and its weights whole.

    Trainer remembers a path, which is another one when the run's folder was moved.
    """

    def __init__(self, warn: Callable[[str], None]):
        self.warn = warn

    def on_train_begin(self, args, state, control, **kwargs):
        """Called by Trainer when the state of the checkpoint is loaded."""
        if not state.best_global_step:
            return
        best = Path(str(args.output_dir)) / f"checkpoint-{state.best_global_step}"
        reason = trouble(best, (WEIGHTS,)) if best.is_dir() else "there is no such folder"
        state.best_model_checkpoint = None if reason else str(best)
        if reason and best.is_dir():
            self.warn(f"the best checkpoint so far, {best}, is lost: {reason}")
            if state.is_world_process_zero:
                shutil.rmtree(best)  # else Trainer would load it at the end


def discard(folder: str | Path) -> None:
    """Remove a run's checkpoints, so that a new run does not resume another's. Other files of the folder stay."""
    for path in in_order(folder):
        shutil.rmtree(path)
    if os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)
