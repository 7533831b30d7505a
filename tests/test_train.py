"""The whole job on a small data set, through the command line: twin, budgeted model, table, use, what goes wrong."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from budgetformer.cli import main
from budgetformer.errors import BudgetFormerError
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.settings import TrainSettings
from budgetformer.training import job
from budgetformer.training.job import save_model
from budgetformer.training.sources import load_splits

TOPICS = {
    "fruit": ["apple", "pear", "plum", "cherry", "melon"],
    "tool": ["hammer", "saw", "drill", "wrench", "pliers"],
    "bird": ["crow", "swan", "robin", "heron", "finch"],
}
FILLER = ["the", "a", "some", "this", "was", "near", "with", "and", "then", "of"]
SMALL = ["--model", "scratch:tiny", "--max-length", "17", "--epochs", "3", "--batch-size", "16", "--threads", "1"]
FAST = ["--learning-rate", "3e-3", "--router-learning-rate", "3e-3"]


def write_csv(path: Path, rows: int, seed: int, *, labels: str = "one") -> Path:
    rng = random.Random(seed)
    lines = ["text,label"]
    for _ in range(rows):
        topics = rng.sample(sorted(TOPICS), 2 if labels == "several" and rng.random() < 0.4 else 1)
        words = [rng.choice(FILLER) for _ in range(rng.randint(2, 9))] + [rng.choice(TOPICS[t]) for t in topics]
        rng.shuffle(words)
        lines.append(f"{' '.join(words)},{'|'.join(topics)}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {
        "train": str(write_csv(folder / "train.csv", 240, 0)),
        "test": str(write_csv(folder / "test.csv", 83, 1)),
        "several": str(write_csv(folder / "several.csv", 240, 2, labels="several")),
        "folder": folder,
    }


def train(files, output: Path, *more: str, data: str = "train") -> int:
    given = ["--train-file", files[data], "--test-file", files["test"], "--output-dir", str(output)]
    return main(["train", *given, *SMALL, *FAST, "--quiet", *more])


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """One finished run, shared."""
    output = tmp_path_factory.mktemp("runs") / "first"
    assert train(files, output, "--target-budget", "0.5", "--epochs", "6") == 0
    return output


def test_a_run_leaves_a_model_its_twin_and_every_number(run):
    found = json.loads((run / "metrics.json").read_text())
    for name in ("dense", "budgeted"):
        for key in (
            "accuracy", "macro_f1", "head_share", "head_share_std", "flops_share", "attention_flops_share",
            "seconds_per_1000", "soft_hard_gap", "peak_memory_mb",
        ):  # fmt: skip
            assert key in found[name], (name, key)
    assert found["dense"]["head_share"] == 1.0
    assert found["dense"]["accuracy"] > 0.9
    assert found["budgeted"]["head_share"] < 0.8
    assert found["budgeted"]["flops_share"] < 1.0
    assert [row["budget"] for row in found["budgeted"]["dial"]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert found["data"] | {"labels": None} == {
        "train_rows": 240, "unlabelled_rows": 0, "validation_rows": 0, "test_rows": 83, "left_out": 0, "truncated": 0,
        "labels": None,
    }  # fmt: skip
    papers = ("settings.yaml", "report.md", "README.md", "bad_rows.jsonl")
    for name in ("config.json", "model.safetensors", "tokenizer.json", *papers):
        assert (run / name).is_file(), name
    assert (run / "dense" / "model.safetensors").is_file()
    assert not list(run.rglob("*.bin")), "no pickle of ours"


def test_what_was_saved_is_what_was_measured(run, files, capsys):
    capsys.readouterr()
    assert main(["evaluate", "--model", str(run), "--data", files["test"], "--json", "--quiet"]) == 0
    again = json.loads(capsys.readouterr().out)
    found = json.loads((run / "metrics.json").read_text())["budgeted"]
    for key in ("accuracy", "macro_f1", "head_share", "flops_share"):
        assert again[key] == pytest.approx(found[key], abs=1e-9), key
    assert again["loss"] == pytest.approx(found["loss"], abs=1e-5)


def test_use_cuts_texts_where_training_did(run):
    assert json.loads((run / "tokenizer_config.json").read_text())["model_max_length"] == 17


def test_a_given_twin_is_taken_and_a_wrong_one_refused(run, files, tmp_path, capsys):
    assert train(files, tmp_path / "second", "--dense", str(run / "dense"), "--epochs", "1") == 0
    mine, given = (json.loads((p / "metrics.json").read_text())["dense"] for p in (tmp_path / "second", run))
    assert mine["accuracy"] == given["accuracy"]
    capsys.readouterr()
    assert train(files, tmp_path / "third", "--dense", str(run / "dense"), data="several") == 2
    assert "labels" in capsys.readouterr().err


def test_a_given_twin_brings_no_losses_of_its_own(run, files, tmp_path, capsys):
    more = ["--dense", str(run / "dense"), "--epochs", "1"]
    assert train(files, tmp_path / "run", *more, "--class-weights", "balanced", "--label-smoothing", "0.2") == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (len(config["class_weights"]), config["label_smoothing"]) == (3, 0.2)
    capsys.readouterr()
    assert train(files, tmp_path / "other", *more, "--multi-label") == 2
    assert "one label a text" in capsys.readouterr().err


def test_overwrite_does_not_remove_what_the_run_reads(run, files, capsys):
    assert train(files, run, "--dense", str(run / "dense"), "--overwrite") == 2
    assert "move it" in capsys.readouterr().err
    assert (run / "dense" / "model.safetensors").is_file()


def test_rows_held_out_leave_every_label_one_to_learn(files, tmp_path):
    path = tmp_path / "rare.csv"
    path.write_text(Path(files["train"]).read_text() + "".join(f"a thing,rare{i}\n" for i in range(20)))
    for seed in range(3):
        settings = TrainSettings(train_file=str(path), output_dir=str(tmp_path / "run"), seed=seed, patience=1)
        splits = load_splits(settings, lambda line: None)
        assert len(splits.labels) == 23
        assert set(splits.train.labels or []) == set(splits.labels)
        assert splits.validation is not None
        assert 255 < len(splits.train) + len(splits.test) + len(splits.validation) <= 260


def test_a_full_disk_is_told_in_one_line_and_leaves_nothing_half_written(run, tmp_path):
    class Full:
        def save_pretrained(self, folder):
            raise Exception("No space left on device (os error 28)")  # what tokenizers raises

    model = BudgetFormerForSequenceClassification.from_pretrained(run)
    with pytest.raises(BudgetFormerError, match=r"cannot be written \(No space left"):
        save_model(model, Full(), tmp_path / "model")
    assert not any((tmp_path / "model").iterdir())


def test_several_labels_and_balanced_weights(files, tmp_path):
    test = write_csv(files["folder"] / "several-test.csv", 71, 5, labels="several")
    code = train(
        {**files, "test": str(test)}, tmp_path / "run", "--multi-label", "--class-weights", "balanced", data="several"
    )
    assert code == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert len(config["class_weights"]) == 3
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["budgeted"]["macro_f1"] > 0.5


def test_bad_rows_are_left_out_counted_and_listed(files, tmp_path):
    path = tmp_path / "dirty.csv"
    clean = Path(files["train"]).read_text().splitlines()
    path.write_text("\n".join([*clean[:50], "   ,fruit", "no label here,", *clean[50:]]) + "\n")
    assert train({**files, "dirty": str(path)}, tmp_path / "run", "--epochs", "1", data="dirty") == 0
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert found["data"]["left_out"] == 2
    assert found["data"]["train_rows"] == 240
    ledger = [json.loads(line) for line in (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert [row["line"] for row in ledger] == [51, 52]
    assert "no label here" not in json.dumps(ledger), "texts are private"


@pytest.mark.parametrize("several", [False, True])
def test_texts_without_labels_teach_what_the_twin_says_of_them(run, files, tmp_path, monkeypatch, several):
    seen = {}

    def listen(model, rows, *rest, label, **named):
        seen[label] = rows
        return fit(model, rows, *rest, label=label, **named)

    fit = job.fit
    monkeypatch.setattr(job, "fit", listen)
    pool = write_csv(files["folder"] / "pool.csv", 61, 7)
    lines = [line.split(",")[0] for line in pool.read_text().splitlines()]
    pool.write_text("\n".join([lines[0], *lines[1:], '""']) + "\n")  # no labels; the last row has no text
    more = ["--multi-label"] if several else ["--dense", str(run / "dense")]
    more += ["--unlabelled-file", str(pool), "--target-budget", "0.5", "--epochs", "1"]
    output = tmp_path / "out"
    assert train(files, output, *more, data="several" if several else "train") == 0
    dense = BudgetFormerForSequenceClassification.from_pretrained(output / "dense").eval()
    rows = seen["budgeted"]
    assert len(rows) == 240 + 61
    for item in rows.items[240:]:
        with torch.no_grad():
            logits = dense(torch.tensor([item["input_ids"]])).logits[0]
        assert item["labels"] == ((logits > 0).int().tolist() if several else int(logits.argmax()))
        torch.testing.assert_close(torch.as_tensor(item["teacher_logits"]), logits, rtol=0.05, atol=0.05)
    assert "dense twin" not in seen or len(seen["dense twin"]) == 240
    assert json.loads((output / "metrics.json").read_text())["data"]["unlabelled_rows"] == 61
    (left_out,) = (output / "bad_rows.jsonl").read_text().splitlines()
    assert json.loads(left_out)["source"].endswith("pool.csv")


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [("text", '""', "no row has a text"), ("text,text_pair", "a crow,a swan", "holds pairs, and the training rows")],
)
def test_texts_without_labels_must_be_of_use(files, tmp_path, capsys, header, row, words):
    pool = tmp_path / "pool.csv"
    pool.write_text(f"{header}\n{row}\n{row}\n")
    assert train(files, tmp_path / "out", "--unlabelled-file", str(pool)) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "pool.csv" in line
    assert words in line


@pytest.mark.parametrize(
    ("rows", "more", "code", "words"),
    [
        ("text,label\na,x\nb,x\n", [], 3, "two classes"),
        ("text,label\n", [], 3, "no rows"),
        ("", [], 3, "empty"),
        ("text,lable\na,x\nb,y\n", [], 3, "lable"),
        ("text,label\na,x\nb,y\n", ["--target-budget", "1.5"], 2, "(0, 1]"),
        ("text,label\na,x\nb,y\n", ["--metric", "acuracy"], 2, "accuracy"),
        ("text,label\na,x\nb,y\n", ["--class-weights", "balnced"], 2, "balanced"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(rows, more, code, words, files, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    path.write_text(rows)
    assert train({**files, "bad": str(path)}, tmp_path / "run", *more, data="bad") == code
    complaint = capsys.readouterr().err
    assert words in complaint
    assert len(complaint.strip().splitlines()) == 1, complaint
    assert not (tmp_path / "run").exists()


def test_a_label_unseen_in_training_is_named(files, tmp_path, capsys):
    path = tmp_path / "test.csv"
    path.write_text("text,label\nan apple,fruit\na trout,fish\n")
    assert train({**files, "test": str(path)}, tmp_path / "run") == 3
    assert "'fish'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_output_that_exists_is_kept(run, files, capsys):
    before = (run / "metrics.json").read_text()
    assert train(files, run) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (run / "metrics.json").read_text() == before


def test_ctrl_c_keeps_a_checkpoint_and_resuming_ends_where_the_whole_run_does(files, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def command(output: Path, *more: str) -> list[str]:
        given = ["--train-file", files["train"], "--test-file", files["test"], "--output-dir", str(output)]
        return [sys.executable, "-m", "budgetformer", "train", *given, *SMALL, *FAST, *more]

    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def finish(*arguments: str) -> None:
        done = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr

    finish(whole)
    stopped = subprocess.Popen(command(broken), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    deadline = time.time() + 120
    while not (broken / "checkpoints" / "budgeted").exists() and time.time() < deadline:
        time.sleep(0.02)
    stopped.send_signal(signal.SIGINT)
    out, err = stopped.communicate(timeout=120)
    assert stopped.returncode == 130, err.decode()
    assert out == b""
    assert list((broken / "checkpoints").rglob("manifest.json")), "a checkpoint is kept"
    finish(broken, "--resume", "auto")
    assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_tokenizer_learned_twice_is_the_same():
    code = (
        "from budgetformer.training.sources import train_tokenizer;"
        "made = train_tokenizer(['the swan and the crow', 'a hammer', 'swans and hammers near the crow'] * 3);"
        "print(sorted(made.get_vocab().items()))"
    )
    runs = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(runs) == 1


def test_the_readme_speaks_the_truth(run, monkeypatch, capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    capsys.readouterr()
    for block in readme.split("```python\n")[1:]:
        exec(compile(block.partition("```")[0].replace("runs/mine", str(run)), "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "'label'" in shown
    assert "torch.Size([2, 2, 4])" in shown


def test_a_folder_of_ours_is_an_encoder_too(run, files, tmp_path):
    assert train(files, tmp_path / "next", "--model", str(run), "--epochs", "1", "--no-freeze-embeddings") == 0
    found = json.loads((tmp_path / "next" / "metrics.json").read_text())
    assert found["dense"]["head_share"] == 1.0
    assert found["dense"]["accuracy"] > 0.9, "it starts from what the encoder knew"


def test_a_model_that_is_nowhere_is_one_line(files, tmp_path, capsys):
    assert train(files, tmp_path / "run", "--model", "no-such-owner/no-such-model") == 2
    complaint = capsys.readouterr().err
    assert "no-such-model" in complaint
    assert len(complaint.strip().splitlines()) == 1
