"""The engine behind the command line: what is loaded, what is measured, what is written, and what a kill leaves."""

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tiny
from budgetformer import evaluate, metrics
from budgetformer.cli import verbs
from budgetformer.data import read_rows
from budgetformer.engine import Engine, native
from budgetformer.engine.saved import read_saved
from budgetformer.predict import Predictor, load_model
from budgetformer.text import encode

PYTHON = sys.executable
HEAVY = ("torch", "transformers", "accelerate", "sklearn", "pyarrow", "matplotlib", "datasets", "safetensors", "yaml")
compiled = pytest.mark.skipif(not native.paths(), reason="the kernels are not compiled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.make_folder(tmp_path_factory.mktemp("model"), routed=True))


def texts(count, seed=3, longest=25):
    rng = random.Random(seed)
    return [" ".join(rng.choices(tiny.WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def labelled(path, count=211, seed=3):
    """Rows with labels that the model does not give by itself."""
    rng = random.Random(seed)
    rows = [f"{text},{rng.choice(tiny.LABELS)}" for text in texts(count, seed)]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    return path


def one_line(err):
    lines = [line for line in err.splitlines() if line.startswith("budgetformer: ")]
    assert len(lines) == 1, err
    return lines[0]


# What is loaded


@compiled
@pytest.mark.parametrize("verb", ["predict", "inspect", "input"])
def test_a_compiled_path_loads_neither_torch_nor_transformers(verb, folder, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "my card"}\n')
    arguments = [verb, "--model", folder, "my card"]
    if verb == "input":
        source, output = str(tmp_path / "in.jsonl"), str(tmp_path / "o")
        arguments = ["predict", "--model", folder, "--input", source, "--output", output]
    code = (
        f"import sys\nfrom budgetformer.cli import main\nassert main({arguments!r}) == 0\n"
        f"found = [m for m in {HEAVY} if m in sys.modules]\nassert not found, found"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_library_torch_answers_and_a_line_says_why(folder, tmp_path):
    arguments = ["predict", "--model", folder, "--dtype", "int8", "my card"]
    code = (
        f"import sys\nfrom budgetformer.cli import main\nassert main({arguments!r}) == 0\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "BUDGETFORMER_LIBRARY": str(tmp_path / "none.so")}
    command = [PYTHON, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["error"] is None
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("engine: torch, fp32, ")
    assert "none.so is not installed" in done.stderr
    assert "int8 needs the compiled kernels" in done.stderr


def test_the_path_and_the_type_that_were_named_run(run, folder):
    for path in ("torch", *native.paths()):
        code, _, err = run("predict", "--model", folder, "--path", path, "--threads", 1, "my card")
        assert (code, err) == (0, f"engine: {path}, fp32, 1 thread\n")
        assert run("predict", "--model", folder, "--path", path, "--quiet", "my card")[2] == ""
    if "plain" in native.paths():
        err = run("predict", "--model", folder, "--path", "plain", "--dtype", "bf16", "my card")[2]
        assert err.startswith("engine: plain, fp32, ")
        assert "bf16 needs instructions that plain does not have" in err


# evaluate


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_evaluation_agrees_with_the_training_path(run, tmp_path, folder, path):
    source = labelled(tmp_path / "in.csv")
    code, out, _ = run("evaluate", "--model", folder, "--data", source, "--path", path, "--threads", 1, "--json")
    assert code == 0
    found = json.loads(out)
    model, tokenizer = load_model(folder)
    rows = read_rows(str(source), require_labels=True)
    labels = [tiny.LABELS.index(label) for label in rows.labels]
    wanted = metrics.evaluate(model, encode(tokenizer, rows.texts, None, labels, max_length=23))
    measured = ("seconds_per_1000", "peak_memory_mb")
    assert set(found) == set(wanted) | {"engine", "soft_hard_rows", "left_out"}
    nested = ("heads_by_class", "heads_by_layer", "share_histogram", "shares_by_layer", "classes", "confusion")
    for key in set(wanted) - {*measured, *nested, "calibration", "moved"}:
        assert found[key] == pytest.approx(wanted[key], abs=1e-5), key
    assert found["moved"] == pytest.approx(wanted["moved"], abs=1e-3)
    assert found["calibration"]["ece"] == pytest.approx(wanted["calibration"]["ece"], abs=1e-3)
    for key in ("heads_by_class", "classes", "confusion"):
        assert found[key] == wanted[key], key
    assert found["share_histogram"] == wanted["share_histogram"]
    assert 0.2 < found["head_share"] < 0.9
    assert found["engine"] == {
        "path": "torch" if path == "torch" or not native.paths() else native.paths()[0],
        "dtype": "fp32",
        "threads": 1,
        "batch_tokens": 4096,
    }
    assert found["soft_hard_rows"] == found["rows"] == 211


def test_the_gap_is_taken_on_the_first_rows_and_where_a_router_decides(run, tmp_path, folder, monkeypatch):
    source = labelled(tmp_path / "in.csv")
    monkeypatch.setattr(evaluate, "GAP_ROWS", 50)
    arguments = ("evaluate", "--model", folder, "--data", source)
    found = json.loads(run(*arguments, "--json")[1])
    assert (found["soft_hard_rows"], found["rows"]) == (50, 211)
    table = " ".join(run(*arguments)[1].split())
    assert "(the first 50 texts)" in table
    assert f"Computed by the engine: {found['engine']['path']}, fp32, threads: " in table
    assert "soft_hard_gap" not in json.loads(run(*arguments, "--budget", "0.4", "--json")[1])
    dense = tiny.make_folder(tmp_path / "dense")
    assert "soft_hard_gap" not in json.loads(run("evaluate", "--model", dense, "--data", source, "--json")[1])


@compiled
def test_peak_memory_is_that_of_a_batch_not_of_the_data(tmp_path, folder):
    """Weights that are first touched are no peak, nor is what the answers need; a batch of more tokens is."""
    source, peaks = labelled(tmp_path / "in.csv", 4001), {}
    for tokens in (1000, 60_000):
        predictor = Predictor.load(folder, batch_tokens=tokens, threads=1)
        found = evaluate.evaluate(predictor, read_rows(str(source), require_labels=True))
        peaks[tokens] = found["peak_memory_mb"]
    if None in peaks.values():
        pytest.skip("the kernel's peak is read on Linux")
    # What one row of a batch needs: the residual, the heads' own, the chosen heads' outputs, at least.
    workspace = 60_000 * 4 * 2 * 35 / 2**20
    assert peaks[1000] < 8
    assert peaks[60_000] > workspace


def test_evaluation_of_several_labels(run, tmp_path):
    folder = tiny.make_folder(tmp_path / "model", multi_label=True)
    (tmp_path / "in.csv").write_text('text,label\nmy card,"cash|transfer"\nlost,transfer\ncash,cash\n')
    found = json.loads(run("evaluate", "--model", folder, "--data", tmp_path / "in.csv", "--json")[1])
    answers = Engine.load(folder).predict(["my card", "lost", "cash"]).probabilities >= 0.5
    truth = [[True, False, True], [False, False, True], [True, False, False]]
    assert found["accuracy"] == pytest.approx(sum(row.tolist() == t for row, t in zip(answers, truth, strict=True)) / 3)


# convert --dtype


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "check.csv"
    path.write_text("\n".join(["text", *texts(300)]) + "\n")
    return path


@compiled
def test_a_type_that_passed_is_what_auto_means(run, tmp_path, folder, sample):
    """Random weights are hard on int8: about nine labels of ten stay."""
    source, output = tmp_path / "run", tmp_path / "int8"
    shutil.copytree(folder, source)
    (source / "checkpoints").mkdir()
    (source / "engine.json").write_text('{"curve": [{"budget": 1, "head_share": 1, "ms_per_text": 1, "agreement": 1}]}')
    arguments = ("convert", "--from", source, "--dtype", "int8", "--check", sample, "--output-dir", output)
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    share = float(one_line(err).partition("int8: ")[2].partition(" %")[0])
    assert 80 < share < 99
    assert f"{share:.2f} % of 300 texts keep their label, 99 % must, and nothing was written" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert run(*arguments, "--min-agreement", share / 100 + 0.001)[0] == 1
    code, out, _ = run(*arguments, "--min-agreement", share / 100 - 0.001, "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["output"], report["texts"]) == (str(output), 300)
    assert 100 * report["agreement"] == pytest.approx(share, abs=0.01)
    names = {path.name for path in output.iterdir()}
    assert names == {path.name for path in Path(folder).iterdir()} | {"engine.json"}
    saved = read_saved(output)
    assert (saved.dtype, saved.curve) == ("int8", ())
    assert saved.agreement == pytest.approx(report["agreement"], abs=1e-6)
    assert run("predict", "--model", output, "my card")[2].split(", ")[1] == "int8"
    assert run("predict", "--model", output, "--dtype", "fp32", "my card")[2].split(", ")[1] == "fp32"
    # The figure is that of the answers: the labels of both, text by text.
    labels = [Engine.load(name).predict(texts(300)).labels for name in (folder, output)]
    same = sum(one == other for one, other in zip(*labels, strict=True))
    assert same / 300 == pytest.approx(report["agreement"], abs=1e-6)


@compiled
def test_what_cannot_be_converted_is_refused(run, tmp_path, folder, sample):
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text('{"model_type": "bert"}')
    asked = ("--dtype", "int8", "--check", sample)
    code, _, err = run("convert", "--from", dense, *asked, "--output-dir", tmp_path / "new")
    assert code == 2
    assert "a dense checkpoint: it has no classifier" in one_line(err)
    run_folder = tmp_path / "run"
    shutil.copytree(folder, run_folder / "dense")
    shutil.copy(run_folder / "dense" / "config.json", run_folder)
    code, _, err = run("convert", "--from", run_folder / "dense", *asked, "--output-dir", run_folder, "--overwrite")
    assert code == 2
    assert "holds the model to convert" in one_line(err)
    (tmp_path / "empty.csv").write_text("text\n \n")
    arguments = ("convert", "--from", folder, "--dtype", "int8", "--output-dir", tmp_path / "new", "--check")
    code, _, err = run(*arguments, tmp_path / "empty.csv")
    assert code == 3
    assert "none of its 1 rows is usable" in one_line(err)
    assert not (tmp_path / "new").exists()


# tune


def test_tune_prints_the_curve_and_keeps_it(run, tmp_path, folder):
    model, source = tmp_path / "model", labelled(tmp_path / "in.csv", 67)
    shutil.copytree(folder, model)
    arguments = ("tune", "--model", model, "--data", source, "--threads", 1)
    code, out, err = run(*arguments, "--max-accuracy-loss", "0.02", "--json")
    assert code == 0
    assert "text=text, label=label" in err
    found = json.loads(out)
    curve = {point["budget"]: point for point in found["curve"]}
    assert list(curve) == [None, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0]
    good = [point for point in found["curve"] if curve[1.0]["accuracy"] - point["accuracy"] <= 0.02]
    assert curve[found["budget"]]["head_share"] == min(point["head_share"] for point in good)
    assert found["tuned_on"]["texts"] == 67
    assert found["tuned_on"]["labelled"] is True
    saved = read_saved(model)
    assert [point.accuracy for point in saved.curve] == [point["accuracy"] for point in found["curve"]]
    # A point is what `evaluate` says.
    some = json.loads(run("evaluate", "--model", model, "--data", source, "--budget", "0.4", "--json")[1])
    assert curve[0.4]["accuracy"] == pytest.approx(some["accuracy"], abs=1e-4)
    assert curve[0.4]["head_share"] == pytest.approx(some["head_share"], abs=1e-4)
    code, out, _ = run(*arguments, "--max-ms-per-text", "1e6")
    assert code == 0
    assert "learned" in out
    assert "→" in out
    assert out.splitlines()[-1].startswith("use ")


def test_tune_does_without_labels(run, tmp_path, folder):
    model, source = tmp_path / "model", labelled(tmp_path / "in.csv", 41)
    shutil.copytree(folder, model)
    (tmp_path / "plain.csv").write_text("\n".join(["text", *texts(41)]) + "\n")
    limit = ("--max-accuracy-loss", "0.3", "--json", "--limit", "20", "--threads", 1)
    curves = []
    for data in (("--data", tmp_path / "plain.csv"), ("--data", source, "--no-labels")):
        code, out, _ = run("tune", "--model", model, *data, *limit)
        assert code == 0
        found = json.loads(out)
        assert found["tuned_on"]["texts"] == 20
        assert [point["accuracy"] for point in found["curve"]] == [None] * 11
        curves.append([(point["budget"], point["agreement"]) for point in found["curve"]])
    assert curves[0] == curves[1]
    assert curves[0][-1] == (1.0, 1.0)


def test_tune_of_several_labels(run, tmp_path):
    model = tiny.make_folder(tmp_path / "model", multi_label=True)
    (tmp_path / "in.csv").write_text('text,label\nmy card,"cash|transfer"\nlost,transfer\ncash,cash\n')
    arguments = ("tune", "--model", model, "--data", tmp_path / "in.csv", "--max-accuracy-loss", "0", "--json")
    point = json.loads(run(*arguments)[1])["curve"][-1]
    found = json.loads(run("evaluate", "--model", model, "--data", tmp_path / "in.csv", "--json")[1])
    assert point["accuracy"] == pytest.approx(found["accuracy"], abs=1e-4)


def test_a_target_that_is_not_met_is_one_line_and_keeps_nothing(run, tmp_path, folder):
    model, source = tmp_path / "model", labelled(tmp_path / "in.csv", 11)
    shutil.copytree(folder, model)
    code, out, err = run("tune", "--model", model, "--data", source, "--max-ms-per-text", "1e-9")
    assert (code, out) == (1, "")
    assert "no budget answers within 1e-09 ms a text; the fastest, " in one_line(err)
    assert not (model / "engine.json").exists()
    source.write_text("text,label\nmy card,lost crad\n")
    code, _, err = run("tune", "--model", model, "--data", source, "--max-ms-per-text", "1")
    assert code == 3
    assert "did you mean 'lost card'" in one_line(err)


# An output that was not finished


def rows_file(path, count=61, seed=5):
    """Ids with all that a line or a cell can trip over."""
    strange = ['say "card"', "two\nlines", "a,b", "'", '"', "\r\n", "=1+1", "ä🙂"]
    rng = random.Random(seed)
    rows = [{"id": rng.choice([f"{i}", f"{strange[i % 8]} {i}"]), "text": t} for i, t in enumerate(texts(count, seed))]
    rows[count // 2]["text"] = ""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stop_after(monkeypatch, windows, error=KeyboardInterrupt):
    """Make the engine stop at some point of the work, as a signal would."""
    whole = Predictor.predict
    left = iter(range(windows))

    def answer(self, rows, **options):
        if next(left, None) is None:
            raise error
        return whole(self, rows, **options)

    monkeypatch.setattr(Predictor, "predict", answer)


@pytest.fixture
def stopped(run, tmp_path, folder, monkeypatch):
    """A run over 61 rows in windows of 3, stopped after 7 windows: its arguments, and what a whole run writes."""

    def make(form, *options):
        monkeypatch.setattr(verbs, "WINDOW", 3)
        arguments = ["predict", "--model", folder, "--input", rows_file(tmp_path / "in.jsonl"), *options, "--output"]
        assert run(*arguments, tmp_path / f"whole.{form}")[0] == 0
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, 7)
            code, _, err = run(*arguments, tmp_path / f"out.{form}")
        assert code == 130
        assert f"21 answers are kept in {tmp_path / f'.out.{form}.partial'}; the same command" in one_line(err)
        return [*arguments, tmp_path / f"out.{form}"], (tmp_path / f"whole.{form}").read_bytes()

    return make


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_run_goes_on_from_whatever_was_left(run, tmp_path, stopped, form):
    """The unfinished file cut at every byte: what is torn is done again, and no byte is another."""
    arguments, whole = stopped(form)
    partial, about = tmp_path / f".out.{form}.partial", tmp_path / f".out.{form}.partial.json"
    left, described = partial.read_bytes(), about.read_bytes()
    assert whole.startswith(left)
    cuts = random.Random(2).sample(range(len(left)), 23)
    for cut in [0, 1, *cuts, len(left) - 1, len(left)]:
        (tmp_path / f"out.{form}").unlink(missing_ok=True)
        partial.write_bytes(left[:cut])
        about.write_bytes(described)
        code, _, err = run(*arguments, "--resume")
        assert code == 0
        assert (tmp_path / f"out.{form}").read_bytes() == whole
        assert not partial.exists()
        assert not about.exists()
        if form == "jsonl":
            rows = left[:cut].count(b"\n") // 3 * 3
            assert f"going on after {rows} rows" in err if cut else "nothing to go on with" in err


def test_what_was_answered_is_not_answered_again(run, stopped, monkeypatch):
    arguments, _ = stopped("csv")
    asked = []
    whole = Predictor.predict
    monkeypatch.setattr(
        Predictor, "predict", lambda self, rows, **more: (asked.append(len(rows)), whole(self, rows, **more))[1]
    )
    assert run(*arguments, "--resume")[0] == 0
    assert sum(asked) == 61 - 21


def test_a_run_may_be_stopped_more_than_once(run, tmp_path, stopped):
    arguments, whole = stopped("jsonl")
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4)
        code, _, err = run(*arguments, "--resume")
    assert code == 130
    assert "33 answers are kept" in one_line(err)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 0, OSError(28, "No space left on device"))
        code, _, err = run(*arguments, "--resume")
    assert code == 1
    assert "No space left on device" in one_line(err)
    assert "33 answers are kept" in err
    assert run(*arguments, "--resume")[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_another_run_does_not_go_on(run, tmp_path, folder, stopped):
    arguments, _ = stopped("jsonl", "--budget", "0.4")
    partial = tmp_path / ".out.jsonl.partial"
    left = partial.read_bytes()
    other = [0.6 if word == "0.4" else word for word in arguments]
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    for changed, says in [
        (other, "another budget (0.4 then)"),
        ([*arguments, "--top", "2"], "another top (None then)"),
        ([*arguments, "--max-length", "9"], "another max_length (23 then)"),
        ([moved if word == folder else word for word in arguments], "another model;"),
    ]:
        code, _, err = run(*changed, "--resume")
        assert code == 2
        assert says in one_line(err)
        assert partial.read_bytes() == left
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    code, _, err = run(*arguments, "--resume", "--threads", "1")
    assert code == 2
    assert "another input;" in one_line(err)
    for damaged in ("{", "[1]"):
        (tmp_path / ".out.jsonl.partial.json").write_text(damaged)
        assert "missing or damaged" in one_line(run(*arguments, "--resume")[2])
    code, _, err = run(*arguments)
    assert code == 0
    assert "out.jsonl: what an earlier run left unfinished is replaced" in err
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 62
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "moved", "out.jsonl", "whole.jsonl"}


def test_stdin_is_kept_too_but_cannot_go_on(run, tmp_path, folder, monkeypatch):
    rows_file(tmp_path / "in.jsonl")
    monkeypatch.setattr(verbs, "WINDOW", 3)
    stop_after(monkeypatch, 2)
    with (tmp_path / "in.jsonl").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        code, _, err = run("predict", "--model", folder, "--input", "-", "--output", tmp_path / "out.csv")
    assert code == 130
    assert one_line(err).endswith(f"6 answers are kept in {tmp_path / '.out.csv.partial'}")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
def test_two_runs_do_not_write_one_file(run, tmp_path, folder):
    import fcntl

    with (tmp_path / ".out.jsonl.partial").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, err = run("predict", "--model", folder, "--output", tmp_path / "out.jsonl", "my card")
    assert code == 2
    assert "another run is writing it" in one_line(err)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="nothing kills like it elsewhere")
@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(run, tmp_path, folder, form):
    """A process killed three times, each time after some more; then the file is that of a run that was not killed."""
    source, rng = rows_file(tmp_path / "in.jsonl", 12_000), random.Random(form)
    assert run("predict", "--model", folder, "--input", source, "--output", tmp_path / f"whole.{form}")[0] == 0
    whole = (tmp_path / f"whole.{form}").read_bytes()
    output, partial = tmp_path / f"out.{form}", tmp_path / f".out.{form}.partial"
    command = [PYTHON, "-m", "budgetformer", "predict", "--model", folder, "--input", source, "--output", output]
    command += ["--quiet", "--resume"]
    killed = 0
    for _ in range(3):
        size = partial.stat().st_size if partial.exists() else 0
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
            # Not before it has begun to write, and then at any moment.
            while running.poll() is None and not (partial.exists() and partial.stat().st_size > size):
                time.sleep(0.002)
            time.sleep(rng.random() * 0.1)
            running.kill()
            assert running.stderr is not None
            said = running.stderr.read()
        if running.returncode == 0:
            break
        assert running.returncode == -signal.SIGKILL, said
        assert not output.exists()
        killed += 1
        assert whole.startswith(partial.read_bytes())
    assert killed
    if not output.exists():
        assert subprocess.run(command, timeout=120, check=False).returncode == 0
    assert output.read_bytes() == whole
    if form == "csv":
        with output.open(newline="") as file:
            assert len(list(csv.DictReader(file))) == 12_000


# Input without an end


@compiled
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read on Linux")
def test_memory_does_not_grow_with_the_input(folder):
    """60,000 rows through a pipe: what a process holds after the first tenth is what it holds at the end."""
    rows = [json.dumps({"text": text}) + "\n" for text in texts(500)]
    command = [PYTHON, "-m", "budgetformer", "predict", "--model", folder, "--input", "-", "--quiet"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None

        def feed(to):
            for i in range(60_000):
                to.write(rows[i % len(rows)])
            to.close()

        feeder = threading.Thread(target=feed, args=(running.stdin,))
        feeder.start()
        held = []
        for number, _ in enumerate(running.stdout, start=1):
            if number in (6_000, 59_000):
                status = Path(f"/proc/{running.pid}/status").read_text()
                held.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
        feeder.join()
    assert running.returncode == 0
    assert number == 60_000
    assert held[1] - held[0] < 6, held
