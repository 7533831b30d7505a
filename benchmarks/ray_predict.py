"""`predict --engine ray`: what two workers of one thread do of what one does.

    python benchmarks/ray_predict.py --model runs/demo

Every file holds the same texts, a stream of log-normal lengths. Workers are counted when each of them has answered a
file: starting Ray and loading engines is told apart, as a long run pays for it once. Rounds turn the order around.
The last line is the results as JSON.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from budgetformer.cli.many import FileWorker, resolved
from budgetformer.data import read_rows
from budgetformer.engine.tokenizer import FolderTokenizer
from budgetformer.ports.ray import map_files
from budgetformer.settings import PredictSettings
from inputs import make_inputs

BOUND = 1.8  # times one worker, at least


def write_files(folder: Path, model: Path, files: int, rows: int) -> list[dict[str, str]]:
    """Files of `rows` texts each, as tasks for the workers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    known = [text for text in read_rows("demo", require_labels=False, split="train").texts if text]
    stream = make_inputs("stream", FolderTokenizer.load(model).core, known, stream=1024).texts
    table = pa.table({"text": [stream[i % len(stream)] for i in range(rows)]})
    tasks = []
    for number in range(files):
        source, target = folder / "in" / f"{number}.parquet", folder / "out" / f"{number}.parquet"
        source.parent.mkdir(exist_ok=True)
        pq.write_table(table, source)
        tasks.append({"name": source.name, "source": str(source), "target": str(target)})
    return tasks


def measure(settings: PredictSettings, tasks: list[dict[str, str]], workers: int) -> dict[str, float]:
    """Rows a second once all workers are at work, and the seconds until they were."""
    begun = time.perf_counter()
    ends, rows = [], []
    for result in map_files(FileWorker, {"settings": settings}, tasks, workers=workers, threads=settings.threads or 1):
        if result["error"] is not None:
            raise SystemExit(result["error"])
        ends.append(time.perf_counter())
        rows.append(result["rows"])
    first = workers - 1  # the file whose end says that the last worker has begun
    return {"rate": sum(rows[first + 1 :]) / (ends[-1] - ends[first]), "start": ends[first] - begun}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/demo"), help="a model folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--workers", type=int, default=2, help="beside one alone")
    parser.add_argument("--files", type=int, default=26, help="a multiple of the workers, so that none is idle")
    parser.add_argument("--rows", type=int, default=2000, help="of a file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="results as JSON")
    args = parser.parse_args(arguments)
    if not args.model.is_dir():
        parser.error(f"{args.model}: no such folder; make one with: make demo")
    given = PredictSettings(model=str(args.model), dtype=args.dtype, budget=args.budget, threads=1, quiet=True)
    settings, _ = resolved(given)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tasks = write_files(Path(folder), args.model, args.files, args.rows)
        for number in range(args.rounds):
            counts = [1, args.workers] if number % 2 == 0 else [args.workers, 1]
            found = {workers: measure(settings, tasks, workers) for workers in counts}
            rounds.append({"workers": found, "ratio": found[args.workers]["rate"] / found[1]["rate"]})
    ratio = statistics.median(one["ratio"] for one in rounds)
    results = {
        "settings": {**dataclasses.asdict(settings), "model": args.model.name},
        "files": args.files,
        "rows": args.rows,
        "load": os.getloadavg(),
        "rounds": rounds,
        "ratio": ratio,
    }
    show(results, args.workers)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))
    return 0


def show(results: dict[str, Any], workers: int) -> None:
    """For people."""
    for count in (1, workers):
        measured = [one["workers"][count] for one in results["rounds"]]
        rate, start = (statistics.median(one[name] for one in measured) for name in ("rate", "start"))
        print(f"{count} worker{'s' * (count > 1)}: {rate:,.0f} texts a second; at work after {start:.1f} s")
    verdict = "met" if results["ratio"] >= BOUND else "not met"
    print(f"{results['ratio']:.2f} times one worker; at least {BOUND}: {verdict} (load {results['load'][0]:.1f})")


if __name__ == "__main__":
    sys.exit(main())
