"""Output files and folders: refused before the work when they are in the way, written whole or not at all."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from budgetformer.errors import UsageError

MODEL_TYPE = "budgetformer"


def check_output_folder(path: str | Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Refuse, before any work, an output folder that holds something. Nothing is changed.

    Raises:
        UsageError: it is a file, or not empty without `overwrite` or `resume`, or `overwrite` would remove what no run
            of ours wrote.
    """
    folder = Path(path)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"output folder {folder}: is a file; give another --output-dir")
    if resume or not any(folder.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"output folder {folder}: exists; give another --output-dir, or --overwrite to replace it")
    if not _is_ours(folder):
        raise UsageError(
            f"output folder {folder}: holds no run of ours; --overwrite leaves it alone, remove it yourself"
        )


def clear_output_folder(path: str | Path, *, overwrite: bool = False, resume: bool = False) -> Path:
    """`check_output_folder`, then remove what an earlier run left when `overwrite` is set, and make the folder.

    To be called when the data was read and the work begins, so that a mistake does not cost the earlier run.

    Raises:
        UsageError: as `check_output_folder`.
        OSError: the folder cannot be made or cleared.
    """
    check_output_folder(path, overwrite=overwrite, resume=resume)
    folder = Path(path)
    if overwrite and not resume and folder.is_dir():
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_output_file(path: str | Path, *, overwrite: bool = False) -> None:
    """Refuse, before any work, an output file that exists.

    Raises:
        UsageError: it is a folder, or exists without `overwrite`.
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"output {path}: is a folder; give the name of a file")
    if path.is_file() and not overwrite:
        raise UsageError(f"output {path}: exists; give another name, or --overwrite to replace it")


@contextlib.contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """Give a temporary name beside `path` to write to; rename it to `path` at the end, or remove it after a failure.

    A reader sees the old file or the whole new one, even after a crash. Missing folders are made. A device or a pipe
    (`/dev/stdout`) is written directly: renaming would replace it.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    """A run or a converted model of ours, finished or not, judged by what only we write into files."""
    try:
        # The first file of a run. Its name alone is no proof: other projects have a settings.yaml too.
        if "\ntarget_budget: " in (folder / "settings.yaml").read_text("utf-8"):
            return True
    except (OSError, ValueError):
        pass
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE
