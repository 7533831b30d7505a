"""An output file that a killed run leaves unfinished beside its place, and that the same run goes on with.

Rows are written to `.NAME.partial`, a window at a time, and `.NAME.partial.json` says which run they are of. At the end
the file is renamed, so NAME is there whole or not at all. What a run goes on with is cut to whole windows of whole
rows: the batches after them are then those of a run that was never stopped, and so is every byte.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from budgetformer.cli import writers
from budgetformer.cli.writers import Row, Write
from budgetformer.errors import DataError, UsageError
from budgetformer.folder import FILES
from budgetformer.outputs import write_aside
from budgetformer.settings import PredictSettings

if TYPE_CHECKING:
    from budgetformer.engine import Engine

# Settings that change no answer, and those that are told in another way.
FREE = (
    *("model", "input", "output", "format", "overwrite", "resume", "quiet", "threads", "dtype", "path", "max_length"),
    *("engine", "workers"),
)


def identity(settings: PredictSettings, engine: "Engine", texts: Sequence[str] | None, format: str) -> dict[str, Any]:
    """What decides the answers of a run: as long as it is the same, the run can go on."""
    from budgetformer import __version__

    chosen = {name: value for name, value in dataclasses.asdict(settings).items() if name not in FREE}
    found: dict[str, Any] = {
        "version": __version__,
        "format": format,
        "path": engine.path.name,
        "dtype": engine.path.dtype,
        "max_length": engine.max_length,
        **chosen,
        "input": settings.input if settings.input is None else _file(Path(settings.input)),
        "texts": None if texts is None else hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest(),
        "model": [_file(Path(settings.model) / name) for name in FILES],
    }
    return json.loads(json.dumps(found))  # as it is when it has been written and read


def _file(path: Path) -> list[Any]:
    """Where a file is, and what changes when it does; the name alone of what is no file."""
    if not path.is_file():
        return [str(path)]
    state = path.stat()
    return [str(path.resolve()), state.st_size, state.st_mtime_ns]


@contextlib.contextmanager
def open_partial(
    output: str, format: str, run: dict[str, Any] | None, *, window: int, resume: bool, echo: Callable[[str], None]
) -> Iterator[tuple[Write, int]]:
    """Give a function that writes rows, and how many rows of the input are answered already, whole windows of them.

    run: from `identity`; None for a run that cannot go on, as its input cannot be read again. A device or a pipe is
    written at once.

    Raises:
        UsageError: another run is at work on the file, or `resume` finds what another run left, or no regular file.
        OSError: the disk is full or the folder cannot be written.
    """
    path = Path(output)
    if path.exists() and not path.is_file():
        if resume:
            raise UsageError(f"resume: {output} is no regular file; give --output FILE, or leave --resume out")
        with path.open("wb") as file:
            yield _writer(file, format, 0)[0], 0
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, about = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.partial.json")
    with partial.open("ab") as file:
        lock(file, partial)
        rows = end = 0
        if resume and file.tell():
            compare(about, run)
            rows, end = _whole(partial, format, window)
            echo(f"{path.name}: going on after {rows:,} rows")
        elif resume:
            echo(f"{path.name}: there is nothing to go on with, so it begins anew")
        elif file.tell():
            echo(f"{path.name}: what an earlier run left unfinished is replaced")
        file.truncate(end)
        if not rows:
            with write_aside(about) as aside:
                aside.write_text(json.dumps(run, indent=1), encoding="utf-8")
        write, count = _writer(file, format, rows, header=not end)
        try:
            yield write, rows
            file.flush()
            os.fsync(file.fileno())
        except BaseException as error:
            if count() == 0 or isinstance(error, UsageError | DataError):
                partial.unlink(missing_ok=True)
                about.unlink(missing_ok=True)
            else:
                how = "" if run is None else "; the same command with --resume goes on"
                error.add_note(f"{count():,} answers are kept in {partial}{how}")
            raise
        partial.replace(path)
    about.unlink(missing_ok=True)


def _writer(file: BinaryIO, format: str, rows: int, *, header: bool = True) -> tuple[Write, Callable[[], int]]:
    """A function that writes rows, and one that says how many there are."""
    written = rows
    if header:
        file.write(writers.header(format).encode())

    def write(more: Sequence[Row]) -> None:
        nonlocal written
        file.write(writers.text(more, format).encode())
        file.flush()
        written += len(more)

    return write, lambda: written


def lock(file: BinaryIO, partial: Path) -> None:
    """Keep other runs away for as long as the file is open; where there are no such locks, nothing is kept away."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other run may have ended, and renamed the file, between our opening and our lock.
        if os.path.samestat(os.fstat(file.fileno()), partial.stat()):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    except (ImportError, OSError):
        return
    raise UsageError(f"{partial}: another run is writing it; wait for its end, or give another --output")


def compare(about: Path, run: dict[str, Any] | None) -> None:
    """Refuse to go on with what another run left; `about` is where it was written down."""
    remedy = "give what it was given, or leave --resume out to begin anew"
    try:
        before = json.loads(about.read_bytes())
        if not isinstance(before, dict):
            raise ValueError("no object")
    except (OSError, ValueError):
        raise UsageError(f"resume: {about} is missing or damaged; leave --resume out to begin anew") from None
    now = run or {}
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            shown = "" if name in ("model", "input", "texts") else f" ({str(before.get(name))[:60]} then)"
            raise UsageError(f"resume: the unfinished run had another {name}{shown}; {remedy}")


def _whole(partial: Path, format: str, window: int) -> tuple[int, int]:
    """How many rows of whole windows a file holds, and where in bytes they end; a row cut short does not count."""
    rows, kept, at, quoted = (-1 if format == "csv" else 0), (0, 0), 0, False
    with partial.open("rb") as file:
        for line in file:
            at += len(line)
            # A cell of CSV may hold line ends; quotes inside it are doubled, so that their number tells.
            quoted ^= format == "csv" and line.count(b'"') % 2 == 1
            if line.endswith(b"\n") and not quoted:
                rows += 1
                if rows % window == 0:
                    kept = (rows, at)
    return kept
