"""`predict --engine ray`: a folder of parquet files, answered by many engines at once.

A file is what a worker does at a time. Its answers are the file of the same name that `predict` alone would write, byte
for byte, written aside and renamed. In the output folder `_run.json` says what decides the answers and `_ledger.jsonl`
what became of each file, so a run that was killed goes on with the files that are missing there: nothing is left out,
and nothing is there twice. Readers of parquet folders skip both, as their names begin with `_`.
"""

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from budgetformer.cli import partial, verbs, writers
from budgetformer.cli.speaking import echo_unless, progress_bar
from budgetformer.errors import BudgetFormerError, DataError, UsageError
from budgetformer.outputs import write_aside
from budgetformer.settings import PredictSettings

RUN, LEDGER = "_run.json", "_ledger.jsonl"
TRIES = 3  # a file whose worker dies so often is left out: it may be what kills them


@dataclass(frozen=True)
class Shard:
    """An input file. name: its place below the input folder, and so its answers' place below the output folder."""

    name: str
    source: Path
    target: Path

    @property
    def state(self) -> list[int]:
        """Size and time of change: what differs when the file does."""
        found = self.source.stat()
        return [found.st_size, found.st_mtime_ns]


def predict(settings: PredictSettings, texts: Sequence[str] | None) -> int:
    """Answer every file of `settings.input` into the folder `settings.output`; returns the exit code."""
    _check(settings, texts)
    assert settings.input is not None
    output = Path(settings.output)
    shards = find_shards(settings.input, output)
    from budgetformer.ports.ray import map_files

    echo = echo_unless(settings.quiet)
    threads = settings.threads or 1
    settings, run = resolved(dataclasses.replace(settings, threads=threads))
    with open_ledger(output, run, resume=settings.resume, overwrite=settings.overwrite, echo=echo) as ledger:
        left = [shard for shard in shards if not ledger.holds(shard)]
        echo(f"{settings.input}: {len(left):,} of {len(shards):,} files to answer")
        if left:
            states = {shard.name: shard.state for shard in left}
            # The largest first, so that no worker is alone with a long one at the end.
            left.sort(key=lambda shard: states[shard.name][0], reverse=True)
            # Whole paths: a worker on another machine has a folder of its own to start from.
            files = [
                {"name": shard.name, "source": str(shard.source.absolute()), "target": str(shard.target.absolute())}
                for shard in left
            ]
            model = str(Path(settings.model).absolute())
            worker = {"settings": dataclasses.replace(settings, model=model, quiet=True)}
            with progress_bar(settings.quiet) as step:
                for result in map_files(FileWorker, worker, files, workers=settings.workers, threads=threads):
                    ledger.add({**result, "input": states[result["name"]]})
                    step(result["rows"])
        return _tell(shards, ledger, echo)


def resolved(settings: PredictSettings) -> tuple[PredictSettings, dict[str, Any]]:
    """The settings for all workers, and what decides the answers: what `auto` stands for here holds everywhere."""
    predictor = verbs.predictor_for(settings)
    path, ways = predictor.engine.path, {"budget": predictor.budget, "margin": predictor.margin}
    settings = dataclasses.replace(settings, path=path.name, dtype=path.dtype, **ways)
    run = partial.identity(settings, predictor.engine, None, "parquet")
    del run["input"], run["texts"]  # each file stands in the ledger
    return settings, run


class FileWorker:
    """An engine in a worker, for one file after the other. What goes wrong with a file is said in its result."""

    def __init__(self, settings: PredictSettings):
        os.environ["RAYON_NUM_THREADS"] = str(settings.threads)  # those of the tokenizer
        self.settings = settings
        self.predictor = verbs.predictor_for(settings)
        path = self.predictor.engine.path
        if (path.name, path.dtype) != (settings.path, settings.dtype):
            raise UsageError(f"{socket.gethostname()}: {self.predictor.engine.note}; all machines must do the same")

    def __call__(self, name: str, source: str, target: str) -> dict[str, Any]:
        """Answer a file. Returns its name, its rows, how many of them have an error or were cut, and the seconds."""
        begun = time.perf_counter()
        result: dict[str, Any] = {"name": name, "rows": 0, "errors": 0, "cut": 0, "error": None}
        tries = _tries(Path(target))
        try:
            tries.parent.mkdir(parents=True, exist_ok=True)
            with tries.open("ab") as file:
                file.write(b".")
                number = file.tell()
            if number > TRIES:
                raise BudgetFormerError(f"{source}: its worker died {TRIES} times; is there memory enough?")
            result |= self._answer(source, target)
        except Exception as error:
            result["error"] = _reason(error, source)
        with contextlib.suppress(OSError):
            tries.unlink()
        return {**result, "seconds": round(time.perf_counter() - begun, 3), "worker": socket.gethostname()}

    def _answer(self, source: str, target: str) -> dict[str, int]:
        rows = errors = cut = 0
        with writers.open_parquet(target) as write:
            if _has_rows(source):
                for window in verbs.windows(dataclasses.replace(self.settings, input=source), None):
                    answers = self.predictor.predict(window, first_number=rows + 1)
                    write([answer.row() for answer in answers])
                    rows += len(answers)
                    errors += sum(answer.error is not None for answer in answers)
                    cut += sum(answer.truncated for answer in answers)
        return {"rows": rows, "errors": errors, "cut": cut}


class Ledger:
    """What became of each file, a line of JSON each, on the disk before the next one is looked at."""

    def __init__(self, file: BinaryIO, path: Path, entries: dict[str, dict[str, Any]]):
        self._file, self.path, self.entries = file, path, entries

    def add(self, entry: dict[str, Any]) -> None:
        """Write down what became of a file."""
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries[entry["name"]] = entry

    def holds(self, shard: Shard) -> bool:
        """Whether a file has been answered.

        Raises:
            UsageError: it has, and is another file now.
        """
        entry = self.entries.get(shard.name)
        if entry is None or entry["error"] is not None or not shard.target.is_file():
            return False
        if entry["input"] != shard.state:
            raise UsageError(f"resume: {shard.source} has changed since it was answered; remove {shard.target}")
        return True


@contextlib.contextmanager
def open_ledger(
    output: Path, run: dict[str, Any], *, resume: bool, overwrite: bool, echo: Callable[[str], None]
) -> Iterator[Ledger]:
    """The ledger of an output folder, with what an earlier run of the same kind left in it when `resume` is set.

    Raises:
        UsageError: the folder holds something else, or another run is at work in it, or was another run's.
    """
    path, about = output / LEDGER, output / RUN
    if output.exists() and not output.is_dir():
        raise UsageError(f"output {output}: is a file; --engine ray writes a folder")
    ours = about.is_file()
    if output.is_dir() and any(output.iterdir()):
        if not ours:
            raise UsageError(f"output folder {output}: holds no run of ours; give another --output")
        if not resume and not overwrite:
            raise UsageError(f"output folder {output}: exists; --resume goes on, --overwrite begins anew")
    output.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        partial.lock(file, path)
        entries, end = _entries(path)
        if resume and ours:
            partial.compare(about, run)
        elif resume:
            echo(f"{output}: there is nothing to go on with, so it begins anew")
        if not (resume and ours):
            for name in entries:
                (output / name).unlink(missing_ok=True)
            entries, end = {}, 0
        file.truncate(end)
        # What workers that were killed left.
        for left in (*output.rglob(".*.part"), *output.rglob(".*.tries")):
            left.unlink(missing_ok=True)
        with write_aside(about) as aside:
            aside.write_text(json.dumps(run, indent=1), encoding="utf-8")
        try:
            yield Ledger(file, path, entries)
        except (KeyboardInterrupt, OSError) as error:
            error.add_note("the files that are answered stay; the same command with --resume goes on")
            raise


def find_shards(source: str, output: Path) -> list[Shard]:
    """The parquet files of a folder (all below it), of a pattern, or the one named; none that lies in `output`.

    Raises:
        UsageError: there is none.
    """
    base = Path(source)
    if base.is_dir():
        found = [path for path in base.rglob("*.parquet") if not path.name.startswith((".", "_"))]
    elif base.is_file():
        base, found = base.parent, [base]
    else:
        base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), base.parts))
        found = [Path(name) for name in glob.glob(source, recursive=True)]
    inside = output.resolve()
    files = sorted(path for path in found if path.is_file() and not path.resolve().is_relative_to(inside))
    if not files:
        raise UsageError(f"input {source}: no parquet file is there (files in the output folder do not count)")
    other = next((path for path in files if path.suffix != ".parquet"), None)
    if other is not None:
        raise UsageError(f"{other}: --engine ray reads parquet; give a folder or a pattern of .parquet files")
    names = [path.relative_to(base).as_posix() for path in files]
    return [Shard(name, path, output / name) for name, path in zip(names, files, strict=True)]


def _check(settings: PredictSettings, texts: Sequence[str] | None) -> None:
    if texts or settings.input in (None, "-"):
        raise UsageError("engine is 'ray', which reads files; give --input a folder or a pattern of parquet files")
    if settings.output == "-":
        raise UsageError("engine is 'ray', and output is stdout; give --output a folder")
    if settings.format not in (None, "parquet"):
        raise UsageError(f"engine is 'ray', which writes parquet; format is {settings.format!r}, leave --format out")
    if settings.resume and settings.overwrite:
        raise UsageError("resume and overwrite: both are given, and one needs what the other removes; give one")


def _tell(shards: Sequence[Shard], ledger: Ledger, echo: Callable[[str], None]) -> int:
    entries = [ledger.entries[shard.name] for shard in shards if shard.name in ledger.entries]
    rows, errors, cut = (sum(entry[name] for entry in entries) for name in ("rows", "errors", "cut"))
    failed = [entry for entry in entries if entry["error"] is not None]
    echo(f"{len(entries) - len(failed):,} files, {rows:,} rows; {ledger.path} says what became of each")
    if cut:
        echo(f"{cut:,} texts were longer than the model reads, and cut")
    if errors:
        echo(f"{errors:,} rows have an error instead of an answer")
    if failed:
        first = failed[0]
        raise DataError(
            f"{len(failed):,} of {len(shards):,} files have no answers; the first: {first['error']}; --resume tries "
            "them again"
        )
    if errors == rows > 0:
        raise DataError(f"none of the {rows:,} rows could be classified; each row of the output says why")
    return 0


def _entries(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The ledger's last line for each file, and where its whole lines end: a kill may have cut the last one short."""
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    entries = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # a damaged line is a file to answer again
            entry = json.loads(line)
            entries[entry["name"]] = entry
    return entries, sum(map(len, lines))


def _tries(target: Path) -> Path:
    return target.with_name(f".{target.name}.tries")


def _has_rows(source: str) -> bool:
    """False for a parquet file without rows, as jobs that write many files leave some; damage is told by its reader."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(source).num_rows > 0
    except (pa.ArrowException, OSError):
        return True


def _reason(error: Exception, source: str) -> str:
    """What went wrong, without a text: what other libraries say may quote one."""
    if isinstance(error, BudgetFormerError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or source}: {error.strerror or type(error).__name__}"
    return f"{source}: {type(error).__name__}"
