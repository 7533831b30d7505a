import csv
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

import tiny
from budgetformer.cli import verbs
from budgetformer.config import DTYPES
from budgetformer.engine import native

PYTHON = sys.executable
HEAVY = ("torch", "transformers", "pyarrow", "sklearn", "matplotlib", "datasets", "yaml")
VERBS = ("train", "evaluate", "predict", "inspect", "tune", "calibrate", "report", "convert", "export", "serve", "env")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.make_folder(tmp_path_factory.mktemp("model")))


def process(*arguments, **options):
    """Run the command line in a process of its own."""
    command = [PYTHON, "-m", "budgetformer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def one_line(err):
    """The error, alone but for the note on what computes."""
    lines = [line for line in err.splitlines() if not line.startswith("engine: ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("budgetformer: ")
    return lines[0]


# What is loaded


@pytest.mark.parametrize(
    "statement",
    [
        "import budgetformer",
        "import budgetformer.settings",
        *(f"from budgetformer.cli import main; main({words!r})" for words in (["--help"], ["train", "--help"])),
        "from budgetformer.cli import main; main(['train', '--data', 'demo', '--metric', 'x', '--output-dir', 'y'])",
        "from budgetformer.cli import main; main(['predict', '--model', '/none', 'x'])",
    ],
)
def test_what_needs_no_model_loads_nothing_heavy(statement):
    code = f"{statement}\nimport sys\nfound = [m for m in {HEAVY} if m in sys.modules]\nassert not found, found"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_load_on_first_use():
    code = (
        "import budgetformer, sys\n"
        "assert 'BudgetFormerConfig' in dir(budgetformer)\n"
        "assert budgetformer.__version__.count('.') == 2\n"
        "assert 'torch' not in sys.modules\n"
        "assert all(hasattr(budgetformer, name) for name in budgetformer.__all__)\n"
        "assert 'torch' in sys.modules\n"
        "assert not hasattr(budgetformer, 'nothing')\n"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# Help and wrong usage


def test_help_names_verbs_and_exit_codes(run):
    code, out, _ = run("--help")
    assert code == 0
    text = " ".join(out.split())
    assert all(f" {verb} " in text for verb in VERBS)
    assert all(word in text for word in ("0 done", "1 failed", "2 wrong", "3 data", "4 a model", "130", "143"))


@pytest.mark.parametrize("verb", VERBS)
def test_each_help_ends_with_an_example(run, verb):
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert f"Example: budgetformer {verb}" in " ".join(out.split())


def test_help_shows_defaults_and_brackets_as_they_are(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = " ".join(run("train", "--help")[1].split())
    assert "mean share of the units' FLOPs to end with [default: 0.4]" in text
    assert "hf:NAME[:CONFIG]" in text


def test_version(run):
    code, out, _ = run("--version")
    assert (code, out.split()[0]) == (0, "budgetformer")


def test_without_arguments_the_help_is_shown(run):
    code, out, err = run()
    assert code == 2
    assert "Usage" in out + err


TRAIN = ("train", "--data", "demo", "--output-dir", "none")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "'train'"),
        (["train", "--epoch", "3"], "--epochs"),
        (["train", "--epochs"], "--epochs"),
        ([*TRAIN, "--epochs", "four"], "--epochs is four"),
        ([*TRAIN, "--metric", "acuracy"], "did you mean 'accuracy'"),
        ([*TRAIN, "--target-budget", "1.5"], "(0, 1]"),
        ([*TRAIN, "--target-budget", "0"], "(0, 1]"),
        (["train", "--output-dir", "none"], "--train-file"),
        (["train", "--data", "demo"], "--output-dir"),
        ([*TRAIN, "--config", "none.yaml"], "none.yaml"),
        (["predict", "--model", "m"], "neither is given"),
        (["predict", "--model", "m", "--input", "a.csv", "text"], "both are given"),
        (["predict", "--model", "m", "--format", "parquet", "text"], "--output FILE"),
        (["predict", "--model", "m", "--budget", "2", "text"], "--budget is 2"),
        (["predict", "text"], "--model"),
        (["inspect", "--model", "m"], "text is missing"),
        (["convert", "--from", "a/b/c", "--output-dir", "none"], "no such folder"),
        (["convert", "--output-dir", "none"], "--from"),
        (["convert", "--from", "a", "--output-dir", "none", "--dtype", "int8"], "give --check FILE"),
        (["convert", "--from", "a", "--output-dir", "none", "--check", "b.csv"], "give --dtype"),
        (["tune", "--model", "m", "--data", "a.csv"], "neither is given"),
        (["tune", "--model", "m", "--data", "a.csv", "--max-ms-per-text", "1", "--max-accuracy-loss", "0"], "both are"),
        (["calibrate", "--model", "m", "--data", "a.csv", "--agree", "1"], "--agree is 1; it must be a number"),
        (["predict", "--model", "m", "--budget", "calibratd", "text"], "did you mean 'calibrated'"),
        (["predict", "--model", "m", "--budget", "calibrated", "--margin", "0.2", "text"], "leave --margin out"),
        (["predict", "--model", "m", "--dtype", "int4", "text"], "--dtype is 'int4'"),
        (["predict", "--model", "m", "--path", "avx", "text"], "did you mean 'avx2'"),
        (["predict", "--model", "m", "--resume", "text"], "give --output FILE"),
        (["predict", "--model", "m", "--resume", "--input", "-", "--output", "o.csv"], "stdin cannot be read again"),
        (["predict", "--model", "m", "--resume", "--output", "o.parquet", "text"], "give --format jsonl or csv"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(run, arguments, says):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert says in one_line(err)


def test_debug_shows_the_traceback():
    done = process("predict", "--model", "/none", "--debug", "x")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    # After "--" it is a text.
    assert "Traceback" not in process("predict", "--model", "/none", "--", "--debug").stderr


def test_environment_and_config_reach_a_command(run, monkeypatch, tmp_path):
    monkeypatch.setenv("BUDGETFORMER_MODEL", "/from/environment")
    assert "/from/environment: no such folder" in one_line(run("predict", "x")[2])
    config = tmp_path / "run.toml"
    config.write_text('model = "/from/config"\n')
    monkeypatch.delenv("BUDGETFORMER_MODEL")
    assert "/from/config: no such folder" in one_line(run("predict", "x", "--config", config)[2])
    assert "/from/flag: no such folder" in one_line(run("predict", "x", "--config", config, "--model", "/from/flag")[2])


def test_env(run):
    code, out, _ = run("env", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["torch"][0].isdigit()
    assert found["threads"] >= 1
    assert found["cores"] >= found["physical_cores"] >= 1
    assert found["engine_paths"] == {
        **{path: [dtype for dtype in DTYPES if native.has(path, dtype)] for path in native.paths()},
        "torch": ["fp32", "bf16"],
    }
    assert found["engine_library"].startswith("none: ") != bool(native.paths())
    text = run("env")[1]
    assert "threads" in text
    assert "torch (fp32 bf16)" in text


def test_env_says_why_there_is_no_library(tmp_path):
    done = process("env", "--json", env={**os.environ, "BUDGETFORMER_LIBRARY": str(tmp_path / "none.so")})
    found = json.loads(done.stdout)
    assert list(found["engine_paths"]) == ["torch"]
    assert "none.so is not installed" in found["engine_library"]


# Model folders


def test_a_model_folder_that_cannot_be_used_is_exit_4(run, tmp_path, folder):
    for verb in (["predict", "x"], ["inspect", "x"], ["evaluate", "--data", "demo"]):
        code, out, err = run(*verb, "--model", tmp_path / "none")
        assert (code, out) == (4, "")
        one_line(err)
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (hostile / name).symlink_to(os.path.join(folder, name))
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    (hostile / "config.json").write_text(json.dumps({**config, "attn_implementation": "someone/flash"}))
    code, _, err = run("predict", "x", "--model", hostile)
    assert code == 4
    assert "only eager and sdpa" in one_line(err)


# predict


TABLE = (
    'id,text\n007,where is my card\nb," "\n,"pay, please"\nd,\n"e\n",top up my cash card please ' + "card " * 30 + "\n"
)


def test_predict_keeps_rows_order_ids_and_errors(run, tmp_path, folder):
    (tmp_path / "in.csv").write_text(TABLE)
    code, out, err = run("predict", "--model", folder, "--input", tmp_path / "in.csv")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["id"] for row in rows] == ["007", "b", None, "d", "e\n"]
    assert [row["error"] is None for row in rows] == [True, False, True, False, True]
    for row in rows:
        assert list(row) == ["id", "label", "score", "scores", "heads_used", "budget", "error"]
        if row["error"] is None:
            assert row["label"] == max(row["scores"], key=row["scores"].get)
            assert list(row["scores"]) == tiny.LABELS
            assert sum(row["scores"].values()) == pytest.approx(1, abs=1e-5)
            assert row["heads_used"] == round(15 * row["budget"])
    assert err.startswith("engine: ")
    assert "columns text=text, id=id" in err
    assert "1 of 5 texts were longer than 23 tokens" in err
    assert "2 of 5 rows have an error" in err
    assert "card" not in err


def test_quiet_says_nothing_and_still_answers(run, tmp_path, folder):
    (tmp_path / "in.csv").write_text(TABLE)
    code, out, err = run("predict", "--model", folder, "--input", tmp_path / "in.csv", "--quiet")
    assert (code, err, len(out.splitlines())) == (0, "", 5)


def test_formats_hold_the_same_answers(run, tmp_path, folder):
    (tmp_path / "in.csv").write_text(TABLE)
    found = {}
    for name in ("out.jsonl", "out.csv", "out.parquet", "other.txt"):
        code, out, _ = run("predict", "--model", folder, "--input", tmp_path / "in.csv", "--output", tmp_path / name)
        assert (code, out) == (0, "")
    assert (tmp_path / "other.txt").read_text() == (tmp_path / "out.jsonl").read_text()
    found["jsonl"] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as file:
        found["csv"] = list(csv.DictReader(file))
    found["parquet"] = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for row, cells, record in zip(found["jsonl"], found["csv"], found["parquet"], strict=True):
        assert cells["id"] == (row["id"] or "")
        assert cells["label"] == (row["label"] or "")
        assert cells["score"] == ("" if row["score"] is None else str(row["score"]))
        assert (json.loads(cells["scores"]) if cells["scores"] else None) == row["scores"]
        assert {**record, "scores": json.loads(record["scores"] or "null")} == row
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.csv",
        "other.txt",
        "out.csv",
        "out.jsonl",
        "out.parquet",
    ]


def test_csv_cells_are_no_formulas(run, tmp_path, folder):
    (tmp_path / "in.csv").write_text("id,text\n=cmd|' /C calc'!A0,card\n-5,card\n@x,card\n")
    run("predict", "--model", folder, "--input", tmp_path / "in.csv", "--output", tmp_path / "out.csv")
    with open(tmp_path / "out.csv", newline="") as file:
        assert [row[0] for row in csv.reader(file)][1:] == ["'=cmd|' /C calc'!A0", "-5", "'@x"]


def test_texts_from_the_command_line(run, folder):
    code, out, _ = run("predict", "--model", folder, "--budget", "0.2", "where is my card", "", "cash")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["id"] for row in rows] == ["1", "2", "3"]
    assert [row["heads_used"] for row in rows] == [3, None, 3]


def test_json_lines_from_stdin(folder):
    lines = '{"id": 5, "text": "card"}\n{"id": 6, "text": null}\n'
    done = process("predict", "--model", folder, "--input", "-", "--threads", "1", input=lines)
    assert done.returncode == 0, done.stderr
    assert [(row["id"], row["error"] is None) for row in map(json.loads, done.stdout.splitlines())] == [
        ("5", True),
        ("6", False),
    ]


def test_windows_join_to_one_numbered_answer(run, tmp_path, folder, monkeypatch):
    (tmp_path / "in.csv").write_text("text\n" + "card\n" * 11)
    whole = run("predict", "--model", folder, "--input", tmp_path / "in.csv")
    monkeypatch.setattr(verbs, "WINDOW", 2)
    parts = run("predict", "--model", folder, "--input", tmp_path / "in.csv", "--batch-tokens", "7")
    assert [json.loads(line)["id"] for line in parts[1].splitlines()] == [str(n) for n in range(1, 12)]
    assert parts == whole


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"txet,id\ncard,1\n", "'txet'"),
        ("a.csv", b"", "a.csv"),
        ("a.csv", b"text\n", "no rows"),
        ("a.csv", b"text\ncaf\xe9\n", "--encoding"),
        ("a.csv", b"text;id\ncard;1\n", "--delimiter"),
        ("a.csv", b'text\n" "\n""\n', "none of the 2 rows"),
    ],
)
def test_data_that_cannot_be_used_is_exit_3(run, tmp_path, folder, name, content, says):
    (tmp_path / name).write_bytes(content)
    code, out, err = run("predict", "--model", folder, "--input", tmp_path / name, "--quiet")
    assert code == 3
    assert says in one_line(err)
    assert all(json.loads(line)["error"] for line in out.splitlines())


def test_an_input_that_is_not_there_is_exit_2(run, folder):
    code, _, err = run("predict", "--model", folder, "--input", "/none.csv")
    assert code == 2
    assert "/none.csv" in one_line(err)


def test_max_length(run, folder):
    assert run("predict", "--model", folder, "--max-length", "24", "x")[0] == 2
    assert "1 of 1 texts were longer than 5" in run("predict", "--model", folder, "--max-length", "5", "card " * 9)[2]


def test_output_that_exists_is_kept(run, tmp_path, folder):
    (tmp_path / "in.csv").write_text("text\ncard\n")
    (tmp_path / "out.jsonl").write_text("mine")
    arguments = ["predict", "--model", folder, "--input", tmp_path / "in.csv", "--output"]
    code, _, err = run(*arguments, tmp_path / "out.jsonl")
    assert (code, (tmp_path / "out.jsonl").read_text()) == (2, "mine")
    assert "--overwrite" in one_line(err)
    code, _, err = run(*arguments, tmp_path / "in.csv", "--overwrite")
    assert (code, (tmp_path / "in.csv").read_text()) == (2, "text\ncard\n")
    assert "the input itself" in one_line(err)
    assert run(*arguments, tmp_path / "out.jsonl", "--overwrite")[0] == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["id"] == "1"


def test_a_failed_run_leaves_the_old_output_alone(run, tmp_path, folder):
    (tmp_path / "in.jsonl").write_text('{"text": "card"}\n' * 1100 + "x" * 40 + "\n")
    (tmp_path / "in.csv").write_bytes(b"text\n" + b"card\n" * 3000 + b"caf\xe9\n")
    (tmp_path / "out.jsonl").write_text("old")
    out = tmp_path / "out.jsonl"
    code, _, _ = run("predict", "--model", folder, "--input", tmp_path / "in.csv", "--output", out, "--overwrite")
    assert (code, out.read_text()) == (3, "old")
    assert not list(tmp_path.glob(".*"))


# Disks, pipes and signals


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_exit_1(folder):
    to_file = process("predict", "--model", folder, "--output", "/dev/full", "card")
    with open("/dev/full", "w") as full:
        command = [PYTHON, "-m", "budgetformer", "predict", "--model", folder, "card"]
        to_stdout = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    for done in (to_file, to_stdout):
        assert done.returncode == 1
        assert "No space left on device" in one_line(done.stderr)


def test_a_disk_that_cannot_be_written_is_one_line_and_exit_1(run, tmp_path, folder, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied", str(tmp_path / "out.jsonl"))

    monkeypatch.setattr("budgetformer.cli.partial.Path.open", refuse)
    code, _, err = run("predict", "--model", folder, "--output", tmp_path / "out.jsonl", "card")
    assert code == 1
    assert "out.jsonl: Permission denied" in one_line(err)


def test_a_reader_that_goes_away_is_no_noise(tmp_path, folder):
    (tmp_path / "in.csv").write_text("text\n" + "card\n" * 5000)
    command = [PYTHON, "-m", "budgetformer", "predict", "--model", folder, "--input", str(tmp_path / "in.csv")]
    with subprocess.Popen([*command, "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_have_their_exit_codes_and_keep_what_was_answered(tmp_path, folder, number, code):
    source, output, partial = (tmp_path / name for name in ("in.csv", "out.jsonl", ".out.jsonl.partial"))
    source.write_text("text\n" + "card\n" * 200_000)
    command = [PYTHON, "-m", "budgetformer", "predict", "--model", folder, "--input", source, "--output", output]
    with subprocess.Popen([*command, "--path", "plain"], stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        while not (partial.exists() and partial.stat().st_size):
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(number)
        rest = running.stderr.read().splitlines()[2:]
    assert running.returncode == code
    assert not output.exists()
    kept = [json.loads(line)["id"] for line in partial.read_text().splitlines()]
    assert kept == [str(i + 1) for i in range(len(kept))]
    assert len(rest) == 1
    assert f"stopped by {number.name}; {len(kept):,} answers are kept in {partial}; the same command with" in rest[0]


def test_a_signal_before_the_first_answer_leaves_nothing_behind(run, tmp_path, folder, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("budgetformer.predict.Predictor.predict", stop)
    code, _, err = run("predict", "--model", folder, "--output", tmp_path / "out.csv", "--quiet", "card")
    assert (code, one_line(err)) == (130, "budgetformer: stopped by SIGINT")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_one_of_several_processes_speaks(run, monkeypatch, tmp_path, rank, speaks):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("budgetformer.training.job.train", lambda settings, echo: {"budgeted": {"accuracy": 0.5}})
    code, out, err = run("train", "--data", "demo", "--output-dir", tmp_path / "run")
    assert (code, bool(out), bool(err)) == (0, speaks, speaks)


@pytest.mark.parametrize(("said", "code"), [("SIGTERM", 143), ("SIGINT", 130), (None, 130)])
def test_training_that_was_stopped(run, monkeypatch, tmp_path, said, code):
    def stop(settings, echo):
        raise KeyboardInterrupt(*([said] if said else []))

    monkeypatch.setattr("budgetformer.training.job.train", stop)
    found, _, err = run("train", "--data", "demo", "--output-dir", tmp_path / "run", "--quiet")
    assert found == code
    assert "stopped" in one_line(err)


# train, evaluate, inspect, convert


def test_train_refuses_a_folder_in_use_before_it_works(run, tmp_path):
    (tmp_path / "settings.yaml").write_text("")
    code, _, err = run("train", "--data", "demo", "--output-dir", tmp_path)
    assert code == 2
    assert "--overwrite" in one_line(err)


def test_inspect_draws_and_prints(run, tmp_path, folder):
    code, out, _ = run("inspect", "where is my card", "--model", folder, "--png", tmp_path / "heads.png")
    assert code == 0
    assert "where is my card" in out
    assert any(label in out for label in tiny.LABELS)
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert run("inspect", "x", "--model", folder, "--png", tmp_path / "heads.png")[0] == 2
    code, out, _ = run("inspect", "x", "--pair", "y", "--model", folder, "--budget", "0.2", "--json")
    seen = json.loads(out)
    assert (code, seen["head_share"], len(seen["gates"])) == (0, pytest.approx(0.2), 3)


LABELLED = "text,label\nwhere is my card,lost card\npay my money,transfer\n,cash\ncash please,cash\ntop up,cash\n"


def test_evaluate(run, tmp_path, folder):
    (tmp_path / "in.csv").write_text(LABELLED)
    arguments = ["evaluate", "--model", folder, "--data", tmp_path / "in.csv", "--budget", "0.6"]
    code, out, err = run(*arguments, "--json", "--bad-rows", tmp_path / "bad.jsonl")
    assert code == 0
    metrics = json.loads(out)
    assert (metrics["rows"], metrics["left_out"]) == (4, 1)
    assert metrics["head_share"] == pytest.approx(0.6)
    assert 0 <= metrics["accuracy"] <= 1
    assert "text=text, label=label" in err
    assert "1 of 5 rows left out" in err
    assert json.loads((tmp_path / "bad.jsonl").read_text())["line"] == 4
    code, out, _ = run(*arguments)
    assert code == 0
    assert "accuracy" in out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("text,label\ncard,lost crad\ncard,cash\n", "'lost crad'"),
        ("text,lable\ncard,cash\n", "'lable'"),
        ("text,label\n,cash\n", "none of its 1 rows"),
    ],
)
def test_evaluate_on_data_that_does_not_fit_is_exit_3(run, tmp_path, folder, content, says):
    (tmp_path / "in.csv").write_text(content)
    code, _, err = run("evaluate", "--model", folder, "--data", tmp_path / "in.csv", "--quiet")
    assert code == 3
    assert says in one_line(err)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    path, words = tmp_path_factory.mktemp("dense"), tiny.tokenizer()
    sizes = {"hidden_size": 35, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 53}
    torch.manual_seed(11)
    config = BertConfig(vocab_size=len(words), max_position_embeddings=64, num_labels=3, **sizes)
    BertForSequenceClassification(config).save_pretrained(path)
    words.save_pretrained(path)
    return path


def training_file(path, labels="ab"):
    words = {"a": "card lost", "b": "cash top"}
    rows = [f"{words[label]} {tiny.WORDS[i % 13]},{label}" for i in range(17) for label in labels]
    path.write_text("\n".join(["text,label", *rows, ",a"]) + "\n")
    return path


def test_train_predict_evaluate_inspect(run, tmp_path, dense):
    source, out = training_file(tmp_path / "in.csv"), tmp_path / "run"
    arguments = ["train", "--train-file", source, "--test-file", source, "--model", dense, "--output-dir", out]
    code, text, err = run(*arguments, "--epochs", "1", "--max-length", "16", "--threads", "1", "--bf16", "off")
    assert code == 0, err
    assert "accuracy" in text
    assert "1 of 35 training rows are left out" in err
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics) >= {"dense", "budgeted", "settings", "data", "environment"}
    assert "max_length: 16" in (out / "settings.yaml").read_text()
    for verb in (["predict", "card"], ["evaluate", "--data", source], ["inspect", "card"]):
        assert run(*verb, "--model", out)[0] == 0
        assert run(*verb, "--model", out / "dense")[0] == 0
    # A mistake does not cost the run that is there.
    training_file(source, labels="a")
    code, _, err = run(*arguments, "--overwrite", "--quiet")
    assert code == 3
    assert "two classes" in one_line(err)
    assert run("predict", "card", "--model", out)[0] == 0


def test_convert_makes_a_folder_that_predict_takes(run, tmp_path, dense):
    code, out, _ = run("convert", "--from", dense, "--output-dir", tmp_path / "ours", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["output"] == str(tmp_path / "ours")
    assert report["max_difference"] < 1e-5
    code, out, _ = run("predict", "--model", tmp_path / "ours", "my card")
    assert (code, json.loads(out)["heads_used"]) == (0, 10)
    assert run("convert", "--from", dense, "--output-dir", tmp_path / "ours")[0] == 2
    assert run("convert", "--from", dense, "--output-dir", tmp_path / "ours", "--overwrite")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_failed_convert_costs_nothing(run, tmp_path, dense, folder):
    run("convert", "--from", dense, "--output-dir", tmp_path / "ours")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "bert", "auto_map": {}}')
    code, _, err = run("convert", "--from", broken, "--output-dir", tmp_path / "ours", "--overwrite")
    assert code == 4
    one_line(err)
    assert run("predict", "--model", tmp_path / "ours", "my card")[0] == 0


def test_writers_take_no_rows(tmp_path):
    from budgetformer.cli import partial, writers

    for name in ("jsonl", "csv"):
        output = str(tmp_path / f"a.{name}")
        with partial.open_partial(output, name, None, window=2, resume=False, echo=print) as (write, rows):
            write([])
        assert rows == 0
    with writers.open_parquet(str(tmp_path / "a.parquet")) as write:
        write([])
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 0
    assert list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text()))) == []
    assert (tmp_path / "a.jsonl").read_bytes() == b""


def test_the_script_and_the_module_are_installed():
    assert importlib.util.find_spec("budgetformer.__main__") is not None
    script = os.path.join(os.path.dirname(PYTHON), "budgetformer")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.startswith("budgetformer ")) == (0, True)
