"""A folder becomes arrays that equal the model's own, or is refused with the name of what is wrong."""

import json
import mmap
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from budgetformer.config import BudgetConfig
from budgetformer.engine import weights as engine
from budgetformer.engine.weights import ALIASES, PREFIX, Weights, read_weights, shapes
from budgetformer.errors import ModelFolderError
from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification, BudgetFormerModel
from core_helpers import hf_config, save_tokenizer, shake
from tiny import LABELS, make_folder

CONFIGS = {
    "post": {},
    "pre": {"norm": "pre", "activation": "silu", "norm_eps": 1e-3},
    "narrow embeddings": {"embedding_size": 17, "token_types": 0},
    "embeddings as wide": {"embedding_size": 35},
    "dense head": {"head_hidden": "tanh", "pooling": "first"},
    "roberta": {"position_offset": 2, "pad_token_id": 1, "token_types": 1, "activation": "gelu_tanh"},
    "two views": {"budget": BudgetConfig(view="mean+max", router_hidden=11, min_units=2, target=0.4)},
    "several labels": {"problem_type": "multi_label_classification", "num_labels": 13},
}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "model")


def made(path, **changes):
    model = shake(BudgetFormerForSequenceClassification(hf_config(**changes)))
    model.save_pretrained(path)
    save_tokenizer(path)
    return model


def expected(model) -> dict[str, np.ndarray]:
    """The model's own tensors under the engine's names."""
    state = model.state_dict().items()
    return {k.removeprefix(PREFIX): v.numpy() for k, v in state if k not in ("multiplier", "overspent")}


def edit(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "remove"}))


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
    tensors = change(tensors) or tensors
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)


def write_raw(path, entries):
    """A file with tensors in this very order: (name, dtype, shape, bytes)."""
    header, data = {}, b""
    for name, dtype, shape, content in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_model(name, tmp_path):
    model = made(tmp_path, **CONFIGS[name])
    read, wanted = read_weights(tmp_path), expected(model)
    config = model.config
    assert read.encoder == config.encoder_config
    assert read.budget == config.budget_config
    assert (read.pooling, read.head_hidden, read.problem_type) == (
        config.pooling,
        config.head_hidden,
        config.problem_type,
    )
    assert read.labels == [f"LABEL_{i}" for i in range(config.num_labels)]
    assert set(read.tensors) == set(wanted)
    for key, tensor in read.tensors.items():
        assert tensor.dtype == np.float32
        assert tensor.flags.c_contiguous
        assert type(tensor) is np.ndarray
        np.testing.assert_array_equal(tensor, wanted[key], err_msg=key)


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_the_models(name):
    model = BudgetFormerForSequenceClassification(hf_config(**CONFIGS[name]))
    config = model.config
    found = shapes(config.encoder_config, config.budget_config, config.num_labels, config.head_hidden)
    assert found == {key: tensor.shape for key, tensor in expected(model).items()}


def test_aliases_are_those_of_the_configuration(folder):
    assert {alias: ours for ours, alias in ALIASES.items()} == BudgetFormerConfig.attribute_map
    edit(folder, activation="relu", norm_eps=0.25)
    wanted = read_weights(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({ALIASES.get(k, k): v for k, v in json.loads(path.read_text()).items()}))
    assert "hidden_act" in json.loads(path.read_text())
    found = read_weights(folder)
    assert (found.encoder, found.budget) == (wanted.encoder, wanted.budget)
    assert (found.encoder.activation, found.encoder.norm_eps) == ("relu", 0.25)
    edit(folder, activation="gelu")
    with pytest.raises(ModelFolderError, match="activation and hidden_act differ"):
        read_weights(folder)


def test_defaults_are_those_of_the_configuration(folder):
    edit(folder, activation="remove", norm="remove", budget="remove", pooling="remove", pad_token_id=None)
    read, config = read_weights(folder), BudgetFormerConfig.from_pretrained(folder)
    assert read.encoder == config.encoder_config
    assert read.budget == config.budget_config
    assert read.pooling == config.pooling


def test_labels_come_in_the_order_of_their_numbers(tmp_path):
    names = [f"class {i}" for i in range(12)]
    made(tmp_path, num_labels=12, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    edit(tmp_path, id2label={str(i): names[i] for i in sorted(range(12), key=str)})
    assert read_weights(tmp_path).labels == names


def test_a_config_without_labels_means_what_transformers_says(tmp_path):
    made(tmp_path / "two", num_labels=2)
    edit(tmp_path / "two", id2label="remove", label2id="remove")
    assert read_weights(tmp_path / "two").labels == ["LABEL_0", "LABEL_1"]
    made(tmp_path / "three", num_labels=3)
    edit(tmp_path / "three", id2label="remove", label2id="remove", num_labels=3)
    assert read_weights(tmp_path / "three").labels == ["LABEL_0", "LABEL_1", "LABEL_2"]


@pytest.mark.parametrize(("dtype", "kind"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_half_precision_is_widened(dtype, kind, tmp_path):
    model = made(tmp_path)
    wanted = expected(model.to(kind).float())
    model.to(kind).save_pretrained(tmp_path)
    assert f'"{dtype}"' in (tmp_path / "model.safetensors").read_bytes()[:20_000].decode("latin-1")
    for key, tensor in read_weights(tmp_path).tensors.items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, wanted[key], err_msg=key)


def test_the_file_is_mapped_and_never_written(folder):
    before = (folder / "model.safetensors").read_bytes()
    tensor = read_weights(folder).tensors["embeddings.word.weight"]
    root = tensor
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    assert isinstance(root, mmap.mmap)
    tensor[:] = 5.0
    assert (folder / "model.safetensors").read_bytes() == before


def test_tensors_at_odd_places_are_read(folder):
    wanted = {key: tensor.copy() for key, tensor in read_weights(folder).tensors.items()}
    state = load_file(folder / "model.safetensors")
    entries = [("multiplier", "U8", [1], b"\0")]
    entries += [(name, "F32", list(t.shape), t.tobytes()) for name, t in state.items() if name != "multiplier"]
    write_raw(folder / "model.safetensors", entries)
    for key, tensor in read_weights(folder).tensors.items():
        assert tensor.flags.aligned
        np.testing.assert_array_equal(tensor, wanted[key])


def test_what_training_needs_is_not_asked_for(folder):
    wanted = read_weights(folder)
    rewrite(folder, lambda t: t["multiplier"].fill(np.nan))
    assert set(read_weights(folder).tensors) == set(wanted.tensors)
    rewrite(folder, lambda t: {k: v for k, v in t.items() if k not in ("multiplier", "overspent")})
    assert set(read_weights(folder).tensors) == set(wanted.tensors)


def test_it_is_read_without_torch_and_transformers(folder):
    code = (
        f"import sys\nfrom budgetformer.engine import read_weights\nw = read_weights({str(folder)!r})\n"
        "print(w.labels)\nprint(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(LABELS), "[]"]


# ---------------------------------------------------------------- what is refused

WORD = f"{PREFIX}layers.1.feed_forward.up.weight"


def with_value(value):
    def change(tensors):
        tensors[WORD][3, 2] = value

    return change


def renamed(tensors):
    return {k.replace("layers.2.", "layers.3."): v for k, v in tensors.items()}


def transposed(tensors):
    tensors[WORD] = tensors[WORD].T


def in_integers(tensors):
    tensors[WORD] = tensors[WORD].astype(np.int32)


def with_more(tensors):
    tensors[f"{PREFIX}norm.weight"] = np.ones(35, np.float32)


def without_classifier(tensors):
    return {k: v for k, v in tensors.items() if not k.startswith("classifier")}


def without_bias(tensors):
    del tensors["classifier.out.bias"]


TENSORS = {
    "not a number": (with_value(np.nan), r"layers\.1\.feed_forward\.up\.weight holds a value that is no finite number"),
    "infinite": (with_value(-np.inf), r"layers\.1\.feed_forward\.up\.weight holds"),
    "missing": (renamed, r"lacks layers\.2\.attention\.router\.controller\.0\.weight \(18 in all\)"),
    "transposed": (transposed, r"up\.weight has the shape \(35, 53\), config.json describes \(53, 35\)"),
    "integers": (in_integers, r"up\.weight is I32; weights must be F32, F16 or BF16"),
    "of a pre-norm model": (with_more, "config.json has no place for 'norm.weight'"),
    "no classifier": (without_classifier, "has no classifier; train one with: budgetformer train"),
    "one of the classifier": (without_bias, r"lacks classifier\.out\.bias \(1 in all\)"),
}


def refused(folder, message):
    with pytest.raises(ModelFolderError, match=message) as caught:
        read_weights(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(name, folder):
    change, message = TENSORS[name]
    rewrite(folder, change)
    refused(folder, message)


def test_a_bare_encoder_has_no_classifier(tmp_path):
    BudgetFormerModel(hf_config()).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    refused(tmp_path, "has no classifier")


def test_a_damaged_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    refused(folder, "copy the file again")


CHANGES = {
    "newer": ({"format": 2}, "format 2 was made by a newer version; upgrade budgetformer"),
    "format a word": ({"format": "2"}, "format is '2', not a whole number"),
    "format 0": ({"format": 0}, "format is '0', not a whole number"),
    "format true": ({"format": True}, "format is 'True', not a whole number"),
    "another model": ({"model_type": "bert"}, "model_type is 'bert'"),
    "code": ({"auto_map": {}}, "asks for code"),
    "heads": ({"num_heads": 6}, "6 heads do not divide"),
    "activation": ({"activation": "swish"}, "activation='swish'"),
    "activation a number": ({"activation": 3}, "activation is '3'"),
    "norm": ({"norm": "rms"}, "norm='rms'"),
    "eps not a number": ({"norm_eps": float("nan")}, "norm_eps is 'nan'"),
    "eps a word": ({"norm_eps": "1e-12"}, "norm_eps is '1e-12'"),
    "eps negative": ({"norm_eps": -1e-5}, "norm_eps is '-1e-05'"),
    "pooling": ({"pooling": "last"}, "pooling is 'last', not one of mean, first"),
    "head": ({"head_hidden": "swish"}, "head_hidden is 'swish'"),
    "problem": ({"problem_type": "guessing"}, "problem_type is 'guessing'"),
    "budget unknown": ({"budget": {"goal": 1}}, "unexpected keyword argument 'goal'"),
    "budget": ({"budget": {"target": 2.0}}, r"budget: target=2\.0"),
    "budget a word": ({"budget": {"target": "much"}}, "budget: target is 'much'"),
    "half a unit": ({"budget": {"min_units": 1.5}}, "budget: min_units is '1.5'"),
    "no types": ({"token_types": None}, "token_types is 'None'"),
    "labels by name": ({"id2label": {"cash": "cash"}}, "id2label has a key that is no number"),
    "a label twice": ({"id2label": {"0": "a", "00": "b"}}, "does not give every class one name"),
    "a label of numbers": ({"id2label": {"0": 1}}, "does not give every class one name"),
    "no labels": ({"id2label": {}}, "name no class"),
    "other labels": ({"num_labels": 4}, "num_labels and id2label differ"),
    "fewer labels": ({"id2label": {"0": "a", "1": "b"}}, r"classifier\.out\.weight has the shape \(3, 35\)"),
    "more neurons": ({"intermediate_size": 59}, "describes|has the shape"),
    "two views": ({"budget": {"view": "mean+max"}}, r"controller\.0\.weight has the shape \(64, 35\)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_configurations_that_do_not_fit_are_refused(name, folder):
    change, message = CHANGES[name]
    edit(folder, **change)
    refused(folder, message)


def test_this_format_has_a_number(folder):
    edit(folder, format=engine.FORMAT)
    assert isinstance(read_weights(folder), Weights)
