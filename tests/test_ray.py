"""Many files, many workers: the bits of one process, and nothing lost or twice, whoever is killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from budgetformer import cli
from budgetformer.cli import many
from budgetformer.errors import UsageError
from budgetformer.ports import ray as port
from budgetformer.settings import PredictSettings

SIZES = (103, 211, 1031, 59, 307, 401)  # one of more than a window
FILES = len(SIZES) + 1
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp("model"), routed=True)


def write(path, count, seed, **columns):
    """A file of texts, the fourth missing; ids are the row's numbers unless there are some."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(tiny.WORDS, k=rng.randint(1, 25))) for _ in range(count)]
    texts[3:4] = [None] * len(texts[3:4])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts, **columns}), path)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Files of different sizes, some in a folder of their own, one without rows."""
    base = tmp_path_factory.mktemp("texts") / "in"
    for number in range(len(SIZES)):
        write(base / ("more" if number % 2 else ".") / f"part-{number}.parquet", SIZES[number], seed=number)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), base / "part-empty.parquet")
    (base / "_SUCCESS").touch()
    return base


@pytest.fixture(scope="module")
def alone(folder, source, tmp_path_factory):
    """What one process writes for each file: {name: bytes}."""
    output = tmp_path_factory.mktemp("alone")
    for path in source.rglob("*.parquet"):
        if path.stem != "part-empty":
            place = output / path.relative_to(source)
            arguments = ["--model", folder, "--input", path, "--output", place, "--threads", "1", "--quiet"]
            assert cli.main(["predict", *map(str, arguments)]) == 0
    return answers(output)


def answers(output) -> dict[str, bytes]:
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in sorted(output.rglob("*.parquet"))}


def ledger(output) -> list[dict]:
    """The entries of the ledger, without a line that is cut short."""
    lines = (output / many.LEDGER).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def in_one_process(start, arguments, files, *, workers, threads):
    """What `map_files` does, without Ray."""
    work = start(**arguments)
    for file in files:
        yield work(**file)


@pytest.fixture
def run(folder, source, capsys, monkeypatch):
    """Run `predict --engine ray` here, without Ray: (exit code, stderr)."""
    monkeypatch.setattr(port, "map_files", in_one_process)

    def call(output, *more, texts=source, model=folder):
        arguments = ["--model", model, "--engine", "ray", "--input", texts, "--output", output, *more]
        code = cli.main(["predict", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert out == ""
        return code, err

    return call


def the_same(output, alone):
    found = answers(output)
    empty = found.pop("part-empty.parquet")
    assert pq.read_table(pa.BufferReader(empty)).num_rows == 0
    assert found == alone
    names = [entry["name"] for entry in ledger(output)]
    assert sorted(names) == sorted([*alone, "part-empty.parquet"])
    return True


# What is written, file by file


def test_every_file_is_answered_as_alone(run, tmp_path, alone):
    code, err = run(tmp_path / "out")
    assert code == 0
    assert the_same(tmp_path / "out", alone)
    assert f"{FILES} files, 2,112 rows" in err
    assert "6 rows have an error instead of an answer" in err
    for entry in ledger(tmp_path / "out"):
        table = pq.read_table(tmp_path / "out" / entry["name"])
        assert (entry["rows"], entry["errors"]) == (len(table), len(table) - table["error"].null_count)


def test_a_pattern_names_files_by_what_follows_its_fixed_part(run, tmp_path, source, alone):
    assert run(tmp_path / "out", texts=source / "*" / "part-[13].parquet")[0] == 0
    assert answers(tmp_path / "out") == {name: alone[name] for name in ("more/part-1.parquet", "more/part-3.parquet")}
    assert run(tmp_path / "one", texts=source / "more" / "part-3.parquet")[0] == 0
    assert answers(tmp_path / "one") == {"part-3.parquet": alone["more/part-3.parquet"]}


def test_answers_below_the_texts_are_no_texts(run, tmp_path, alone, source):
    shutil.copytree(source, tmp_path / "in")
    for more in ([], ["--resume"], ["--overwrite"]):
        assert run(tmp_path / "in" / "answers", *more, texts=tmp_path / "in")[0] == 0
        assert the_same(tmp_path / "in" / "answers", alone)


def test_the_largest_files_come_first(run, tmp_path):
    assert run(tmp_path / "out")[0] == 0
    rows = [entry["rows"] for entry in ledger(tmp_path / "out")]
    assert rows == sorted(rows, reverse=True)


# Going on


class Stopped:
    """Answers so many files, and is interrupted."""

    def __init__(self, files):
        self.left = files
        self.answered = []

    def __call__(self, start, arguments, files, **options):
        for result in in_one_process(start, arguments, files, **options):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            self.answered.append(result["name"])
            yield result


def test_a_stopped_run_goes_on_with_what_is_not_in_the_ledger(run, tmp_path, alone, monkeypatch):
    output = tmp_path / "out"
    monkeypatch.setattr(port, "map_files", Stopped(3))
    code, err = run(output)
    assert code == 130
    assert "--resume goes on" in err
    assert len(ledger(output)) == 3
    # A kill leaves more: half a line, a file that is whole and not in the ledger, another that is not.
    with (output / many.LEDGER).open("a") as file:
        file.write('{"name": "part-0.parq')
    (output / "part-0.parquet").write_bytes(b"not yet in the ledger, so written again")
    for name in (".part-2.parquet.0123abcd.part", ".part-2.parquet.tries"):
        (output / name).write_bytes(b"....")
    before = {entry["name"]: (output / entry["name"]).stat().st_mtime_ns for entry in ledger(output)}
    code, err = run(output)
    assert code == 2
    assert "--resume goes on" in err
    rest = Stopped(FILES)
    monkeypatch.setattr(port, "map_files", rest)
    code, err = run(output, "--resume")
    assert code == 0
    assert f"{FILES - 3} of {FILES} files to answer" in err
    assert the_same(output, alone)
    assert {name: (output / name).stat().st_mtime_ns for name in before} == before
    assert not set(rest.answered) & set(before)
    assert not [*output.rglob(".*")]
    # And once all is done there is nothing to do.
    rest.answered.clear()
    assert run(output, "--resume")[0] == 0
    assert rest.answered == []


def test_answers_that_are_gone_are_made_again(run, tmp_path, alone):
    assert run(tmp_path / "out")[0] == 0
    (tmp_path / "out" / "part-2.parquet").unlink()
    assert "1 of 7 files to answer" in run(tmp_path / "out", "--resume")[1]
    assert answers(tmp_path / "out").items() >= alone.items()


@pytest.mark.parametrize(
    ("more", "name"), [(["--budget", "0.25"], "budget"), (["--top", "2"], "top"), (["--dtype", "int8"], "dtype")]
)
def test_another_setting_is_refused(run, tmp_path, more, name):
    assert run(tmp_path / "out")[0] == 0
    code, err = run(tmp_path / "out", "--resume", *more)
    assert code == 2
    assert f"had another {name}" in err


def test_another_model_and_another_text_are_refused(run, tmp_path, folder, source, alone):
    model, texts = tmp_path / "model", tmp_path / "in"
    shutil.copytree(folder, model)
    shutil.copytree(source, texts)
    assert run(tmp_path / "out", model=model, texts=texts)[0] == 0
    os.utime(texts / "part-2.parquet", ns=(1, 1))
    code, err = run(tmp_path / "out", "--resume", model=model, texts=texts)
    assert code == 2
    assert "part-2.parquet has changed since it was answered" in err
    os.utime(model / "model.safetensors", ns=(1, 1))
    code, err = run(tmp_path / "out", "--resume", model=model, texts=texts)
    assert code == 2
    assert "had another model" in err


def test_overwriting_begins_anew_and_removes_what_was_answered(run, tmp_path, source, alone):
    assert run(tmp_path / "out", "--budget", "0.25")[0] == 0
    assert run(tmp_path / "out", "--overwrite", texts=tmp_path)[0] == 2, "no texts: nothing is removed"
    assert len(answers(tmp_path / "out")) == FILES
    assert run(tmp_path / "out", "--overwrite")[0] == 0
    assert the_same(tmp_path / "out", alone)
    assert run(tmp_path / "out", "--overwrite", texts=source / "part-0.parquet")[0] == 0
    assert answers(tmp_path / "out").keys() == {"part-0.parquet"}


def test_two_runs_do_not_write_one_folder(run, tmp_path):
    def while_another_runs(start, arguments, files, **options):
        yield from in_one_process(start, arguments, files[:1], **options)
        code, err = call(tmp_path / "out", "--resume")
        assert code == 2
        assert "another run is writing it" in err
        yield from in_one_process(start, arguments, files[1:], **options)

    call = run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(port, "map_files", while_another_runs)
        assert run(tmp_path / "out")[0] == 0
    assert len(ledger(tmp_path / "out")) == FILES


# What goes wrong


def test_a_damaged_file_is_told_and_the_others_are_answered(run, tmp_path, source, alone):
    texts, output = tmp_path / "in", tmp_path / "out"
    shutil.copytree(source, texts)
    (texts / "part-2.parquet").write_bytes((source / "part-2.parquet").read_bytes()[:5000])
    code, err = run(output, texts=texts)
    assert code == 3
    assert "1 of 7 files have no answers; the first: " in err
    assert "cannot be read as parquet" in err
    assert "--resume tries them again" in err
    assert answers(output).keys() == alone.keys() - {"part-2.parquet"} | {"part-empty.parquet"}
    (failed,) = [entry for entry in ledger(output) if entry["error"]]
    assert failed["name"] == "part-2.parquet"
    shutil.copy(source / "part-2.parquet", texts)
    (output / "part-2.parquet").write_bytes(b"of a worker that was slow to die")
    assert run(output, "--resume", texts=texts)[0] == 0
    assert answers(output).items() >= alone.items()


def test_a_file_that_kills_its_worker_is_given_up(folder, source, tmp_path):
    settings = PredictSettings(model=str(folder), path="plain", dtype="fp32", threads=1, quiet=True)
    settings = PredictSettings(**vars(settings) | {"path": many.verbs.predictor_for(settings).engine.path.name})
    worker = many.FileWorker(settings)
    file = {"name": "a", "source": str(source / "part-0.parquet"), "target": str(tmp_path / "a.parquet")}
    tries = tmp_path / ".a.parquet.tries"
    tries.write_bytes(b"." * (many.TRIES - 1))
    assert worker(**file)["rows"] == SIZES[0]
    assert not tries.exists()
    tries.write_bytes(b"." * many.TRIES)
    assert f"its worker died {many.TRIES} times" in worker(**file)["error"]
    assert not tries.exists()


def test_what_other_libraries_say_is_not_passed_on(folder, source, tmp_path, monkeypatch):
    def quote(*_):
        raise RuntimeError("my private text")

    settings = PredictSettings(model=str(folder), quiet=True, threads=1)
    path = many.verbs.predictor_for(settings).engine.path
    worker = many.FileWorker(PredictSettings(**vars(settings) | {"path": path.name, "dtype": path.dtype}))
    monkeypatch.setattr(many.verbs, "windows", quote)
    told = worker(name="a", source=str(source / "part-0.parquet"), target=str(tmp_path / "a.parquet"))
    assert told["error"] == f"{source / 'part-0.parquet'}: RuntimeError"
    assert not [*tmp_path.iterdir()]


def test_a_machine_that_would_compute_other_bits_is_refused(folder):
    with pytest.raises(UsageError, match="all machines must do the same"):
        many.FileWorker(PredictSettings(model=str(folder), path="torch", dtype="int8", quiet=True, threads=1))


def test_no_row_at_all_is_an_error(run, tmp_path):
    pq.write_table(pa.table({"text": ["", " "]}), tmp_path / "in.parquet")
    code, err = run(tmp_path / "out", texts=tmp_path / "in.parquet")
    assert code == 3
    assert "none of the 2 rows could be classified" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "-", "--output", "out"], "a folder or a pattern"),
        (["a text"], "a folder or a pattern"),
        (["--input", "in"], "output is stdout"),
        (["--input", "in", "--output", "out", "--format", "csv"], "leave --format out"),
        (["--input", "in", "--output", "out", "--resume", "--overwrite"], "both are given"),
        (["--input", "none/*.parquet", "--output", "out"], "no parquet file is there"),
        (["--input", "in", "--output", "in"], "no parquet file is there"),
        (["--input", "text.csv", "--output", "out"], "reads parquet"),
        (["--input", "in", "--output", "text.csv"], "is a file"),
        (["--input", "in", "--output", "full"], "holds no run of ours"),
        (["--input", "in", "--output", "full", "--overwrite"], "holds no run of ours"),
        (["--input", "in", "--output", "out", "--workers", "0"], "at least 1"),
    ],
)
def test_what_cannot_work_is_refused(arguments, words, folder, source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in").symlink_to(source)
    Path("text.csv").write_text("text\nmy card\n")
    Path("full").mkdir()
    Path("full", "theirs.txt").touch()
    assert cli.main(["predict", "--model", str(folder), "--engine", "ray", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not Path("out").exists()
    assert [*Path("full").iterdir()] == [Path("full", "theirs.txt")]


def test_workers_are_those_of_ray(folder, capsys):
    assert cli.main(["predict", "--model", str(folder), "--workers", "2", "my card"]) == 2
    assert "--engine ray" in capsys.readouterr().err


def test_without_ray_a_line_names_the_extra(folder, source, tmp_path):
    given = ["--model", folder, "--engine", "ray", "--input", source, "--output", tmp_path]
    arguments = ["predict", *map(str, given)]
    code = f"import sys; sys.modules['ray'] = None; from budgetformer.cli import main; sys.exit(main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'budgetformer[ray]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# With Ray: two workers on this machine


def start(folder, source, output, *more, worker="FileWorker"):
    """The command in a process of its own, with a class of `ray_helpers` as the worker."""
    arguments = ["--model", folder, "--engine", "ray", "--workers", 2, "--input", source, "--output", output, *more]
    code = (
        f"import sys, ray_helpers; from budgetformer.cli import main, many; many.FileWorker = ray_helpers.{worker}; "
        f"sys.exit(main({['predict', *map(str, arguments)]!r}))"
    )
    places = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": places, "STARTED": str(output) + ".started"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def begun(output) -> list[tuple[int, str]]:
    """Which worker began which file, in order."""
    path = Path(f"{output}.started")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), name) for pid, name in (line.split(maxsplit=1) for line in lines)]


def wait_for(condition, child):
    deadline = time.monotonic() + 300
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_ray_writes_the_bits_of_one_process(folder, source, tmp_path, alone):
    child = start(folder, source, tmp_path / "out")
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    assert the_same(tmp_path / "out", alone)
    assert out == ""
    # Of Ray itself nothing is heard.
    assert len(err.splitlines()) == 5, err


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_twice(folder, source, tmp_path, alone):
    output = tmp_path / "out"
    child = start(folder, source, output, worker="Slow")
    wait_for(lambda: len(begun(output)) >= 3, child)
    victim, during = begun(output)[-1]
    os.kill(victim, signal.SIGKILL)
    # Meanwhile: whoever listens does so for this machine alone.
    family = [child.pid, *(process.pid for process in psutil.Process(child.pid).children(recursive=True))]
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in family]
    assert len(listening) > 3
    assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    _, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    assert the_same(output, alone)
    assert [name for _, name in begun(output)].count(during) == 2, "it was in the middle of this file"
    assert len({pid for pid, _ in begun(output)}) == 3


@pytest.mark.slow
def test_a_killed_driver_goes_on_where_it_stopped(folder, source, tmp_path, alone):
    output = tmp_path / "out"
    child = start(folder, source, output, worker="Slow")
    wait_for(lambda: (output / many.LEDGER).exists() and len(ledger(output)) >= 2, child)
    workers = [psutil.Process(pid) for pid in {pid for pid, _ in begun(output)}]
    child.kill()
    child.communicate()
    done = {entry["name"]: (output / entry["name"]).stat().st_mtime_ns for entry in ledger(output)}
    assert 2 <= len(done) < FILES
    psutil.wait_procs(workers, timeout=60)
    again = start(folder, source, output, "--resume")
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert the_same(output, alone)
    assert {name: (output / name).stat().st_mtime_ns for name in done} == done


@pytest.mark.slow
def test_a_file_that_kills_every_worker_does_not_keep_the_others_from_their_answers(folder, source, tmp_path, alone):
    texts, output = tmp_path / "in", tmp_path / "out"
    shutil.copytree(source, texts)
    write(texts / "deadly.parquet", 50, seed=9)
    child = start(folder, texts, output, worker="Deadly")
    _, err = child.communicate(timeout=400)
    assert child.returncode == 3, err
    assert f"its worker died {many.TRIES} times" in err
    assert answers(output).items() >= alone.items()
    assert not (output / "deadly.parquet").exists()


@pytest.mark.slow
def test_sigterm_stops_the_workers_too(folder, source, tmp_path):
    output = tmp_path / "out"
    child = start(folder, source, output, worker="Slow")
    wait_for(lambda: begun(output), child)
    workers = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 143, err
    assert "--resume goes on" in err
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


@pytest.mark.slow
def test_workers_that_cannot_start_are_one_line(folder, source, tmp_path):
    child = start(folder, source, tmp_path / "out", worker="Unable")
    _, err = child.communicate(timeout=300)
    assert child.returncode == 1, err
    (line,) = [line for line in err.splitlines() if line.startswith("budgetformer: ")]
    assert "all machines must do the same" in line
