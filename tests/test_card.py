"""A model card that the hub can read, with the measured numbers, and with nothing of the machine in it."""

import re

import pytest
import yaml

from budgetformer.report.card import card, metadata
from test_report import HOSTILE
from test_report import metrics as measured

SETTINGS = {
    "data": None,
    "train_file": "/home/me/private/mails.csv",
    "test_file": "C:\\users\\me\\test.csv",
    "model": "/srv/models/encoder",
    "dense": "runs/other/dense",
    "class_weights": "/home/me/weights.json",
    "output_dir": "/home/me/runs/mine",
    "target_budget": 0.4,
    "scope": "heads",
    "max_length": 128,
    "epochs": 4,
}


def made(**settings):
    given = measured()
    given["settings"] = {**SETTINGS, **settings}
    given["data"] = {"train_rows": 1000, "test_rows": 400, "left_out": 0, "labels": ["no", "yes"]}
    return given


def front(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_the_hub_reads_the_metadata():
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard_data import model_index_to_eval_results

    data = ModelCard(card(made()), ignore_metadata_errors=False).data
    assert data.library_name == "budgetformer"
    assert data.pipeline_tag == "text-classification"
    assert data.metrics == ["accuracy", "f1"]
    _, results = model_index_to_eval_results(front(card(made()))["model-index"])
    values = {result.metric_type: result.metric_value for result in results}
    assert values == {"accuracy": 0.931, "f1": 0.89, "flops_share": 0.7, "head_share": 0.405}, "what was measured"
    assert {result.dataset_name for result in results} == {"mails.csv"}


def test_the_table_and_the_dial_are_in_it():
    text = card(made())
    assert "| accuracy | 92.5 % | 93.1 % | +0.6 points |" in text
    assert "| 50.0 % | 50.0 % | 50.0 % | 86.2 % |" in text
    assert "known to ± 2.5 points" in text
    assert "1,000 training texts, 400 test texts, 2 classes" in text
    assert "It reads the first 128 tokens" in text
    assert "quick run" not in text
    assert "quick run" in card(made(quick=True))


def test_the_commands_in_it_are_commands(capsys):
    from budgetformer import cli

    lines = re.findall(r"^budgetformer (\w+)", card(made()), re.M)
    assert lines == ["predict", "predict", "inspect"]
    for verb in lines:
        assert cli.main([verb, "--help"]) == 0
    capsys.readouterr()


def test_nothing_of_the_machine_is_in_it():
    text = card(made())
    for words in ("/home", "private", "/srv", "encoder", "users", "\\", "runs/"):
        assert words not in text, words
    assert "weights.json" in text


@pytest.mark.parametrize(
    ("settings", "base", "dataset", "datasets"),
    [
        ({"data": "demo", "model": "demo"}, "sentence-transformers/all-MiniLM-L6-v2", "banking77", None),
        ({"data": "hf:owner/name:config", "model": "google/bert"}, "google/bert", "owner/name", ["owner/name"]),
        ({"model": "scratch:paper"}, None, "file", None),
        ({"model": "./here"}, None, "file", None),
    ],
)
def test_what_the_hub_knows_is_named(settings, base, dataset, datasets):
    found = metadata(made(**settings))
    assert found.get("base_model") == base
    assert found["model-index"][0]["results"][0]["dataset"]["type"] == dataset
    assert found.get("datasets") == datasets


def test_an_encoder_in_a_folder_here_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert "base_model" not in metadata(made(model="runs/mine"))


def test_hostile_names_stay_names():
    given = made(train_file=f"/x/{HOSTILE.replace('/', '')}\n---\n")
    given["data"]["labels"] = [HOSTILE, "- a: b", "![x](http://y)"]
    text = card(given)
    assert front(text)["pipeline_tag"] == "text-classification"
    body = text.partition("\n---\n")[2]
    assert "<script>" not in body
    assert "\x1b" not in body
    assert r"\!\[x\](http://y)" in body


def test_both_kinds_and_no_numbers_at_all():
    given = made(scope="heads+blocks")
    given["budgeted"] |= {"block_share": 0.39, "units_flops_share": 0.41}
    text = card(given)
    assert "blocks of feed-forward neurons" in text
    assert "| FFN blocks used | 100.0 % | 39.0 % |  |" in text
    assert {one["type"] for one in front(text)["model-index"][0]["results"][0]["metrics"]} >= {"units_flops_share"}
    assert front(card({}))["model-index"][0]["results"][0]["metrics"] == []
