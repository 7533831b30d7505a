import json
import os
import struct

import pytest

from budgetformer.errors import ModelFolderError, UsageError
from budgetformer.folder import check_dense_folder, check_model_folder, check_safetensors
from budgetformer.outputs import check_output_file, check_output_folder, clear_output_folder, write_aside

CONFIG = {
    "model_type": "budgetformer",
    "vocab_size": 11,
    "hidden_size": 6,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 7,
    "max_positions": 5,
    "id2label": {"0": "a", "1": "b"},
    "label2id": {"kernel": 0, "auto_map": 1},  # names of labels, whatever they are
    "attn_implementation": "sdpa",
    "budget": {"router_hidden": 4},
}


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(*shape, start=0, dtype="F32", size=4):
    count = size
    for length in shape:
        count *= length
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + count]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(safetensors({"w": tensor(30, 20)}, bytes(2400)))
    return tmp_path


def change(folder, name="config.json", **entries):
    config = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**config, **entries}))


def test_a_sane_folder_passes(folder):
    assert check_model_folder(folder)["num_heads"] == 3


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelFolderError, match=f"{name} missing"):
        check_model_folder(folder)


def test_no_folder_at_all(tmp_path):
    with pytest.raises(ModelFolderError, match="no such folder"):
        check_model_folder(tmp_path / "owner" / "name")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ("\xff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"model_type": "bert", "model_type": "budgetformer"}', "there twice"),
        ('{"model_type": "bert"}', "convert"),
        ("{}" + " " * 1_000_000, "larger"),
    ],
)
def test_a_config_that_is_none(folder, text, says):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFolderError, match=says):
        check_model_folder(folder)


HOSTILE = {
    "attn_implementation": "someone/flash",
    "_attn_implementation": "someone/flash@main:call",
    "_attn_implementation_internal": "kernels-community/flash-attn",
    "experts_implementation": {"": "someone/kernel"},
    "some_implementation": ["eager"],
    "auto_map": {"AutoModel": "someone/code--modeling.Model"},
    "trust_remote_code": True,
    "custom_pipelines": {"x": {"impl": "x.py"}},
    "use_kernels": True,
    "kernel_config": {"a": "b"},
    "text_config": {"deeper": [{"attn_implementation": "someone/flash"}]},
}


@pytest.mark.parametrize("key", HOSTILE)
def test_hostile_configs_are_refused(folder, key):
    change(folder, **{key: HOSTILE[key]})
    with pytest.raises(ModelFolderError, match=r"asks for code|only eager and sdpa"):
        check_model_folder(folder)


def test_a_hostile_tokenizer_config_is_refused(folder):
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["someone/code--t.T", None]})
    with pytest.raises(ModelFolderError, match=r"tokenizer_config.json.*auto_map"):
        check_model_folder(folder)


def test_an_adapter_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="another model"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", 129),
        ("num_layers", 0),
        ("num_hidden_layers", 300),
        ("hidden_size", 16_386),
        ("hidden_size", -6),
        ("num_heads", 257),
        ("num_heads", 0),
        ("num_heads", 2.0),
        ("num_heads", True),
        ("num_heads", "3"),
        ("vocab_size", 2_000_001),
        ("intermediate_size", 10**9),
        ("max_positions", 10**9),
        ("num_labels", 100_001),
        ("budget", {"router_hidden": 10**9}),
        ("budget", "none"),
        ("id2label", ["a", "b"]),
    ],
)
def test_absurd_sizes_are_refused(folder, key, value):
    change(folder, **{key: value})
    with pytest.raises(ModelFolderError, match=r"config\.json: "):
        check_model_folder(folder)


def test_heads_must_divide_the_width(folder):
    change(folder, num_heads=4)
    with pytest.raises(ModelFolderError, match="4 heads do not divide the width 6"):
        check_model_folder(folder)


def test_two_names_of_one_size_must_agree(folder):
    change(folder, num_attention_heads=2)
    with pytest.raises(ModelFolderError, match="num_heads and num_attention_heads differ"):
        check_model_folder(folder)


def test_a_config_may_not_describe_more_than_the_weights_hold(folder):
    change(folder, vocab_size=2_000_000)
    with pytest.raises(ModelFolderError, match=r"describes 12,0.* holds 600"):
        check_model_folder(folder)


def test_too_many_labels(folder, monkeypatch):
    monkeypatch.setattr("budgetformer.folder.MAX_LABELS", 1)
    with pytest.raises(ModelFolderError, match="2 labels"):
        check_model_folder(folder)


SOUND = {"a": tensor(3), "b": tensor(2, start=12)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05\x00",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 200_000_000) + b"{}",
        safetensors(SOUND, bytes(19)),  # cut short
        safetensors(SOUND, bytes(21)),  # bytes of nobody
        safetensors({"a": tensor(3), "b": tensor(2, start=8)}, bytes(16)),  # overlap
        safetensors({"a": tensor(3), "b": tensor(2, start=16)}, bytes(24)),  # hole
        safetensors({"a": {**tensor(3), "shape": [4]}}, bytes(12)),
        safetensors({"a": {**tensor(3), "shape": [-3]}}, bytes(12)),
        safetensors({"a": {**tensor(3), "dtype": "PICKLE"}}, bytes(12)),
        safetensors({"a": {**tensor(3), "data_offsets": [12, 0]}}, bytes(12)),
        safetensors({"a": {**tensor(3), "data_offsets": [0.0, 12.0]}}, bytes(12)),
        safetensors({"a": "F32"}, b""),
        safetensors(
            b'{"a": %b, "a": %b}' % (json.dumps(tensor(3)).encode(), json.dumps(tensor(3)).encode()), bytes(12)
        ),
        safetensors(b"[]"),
        safetensors(b"{" * 50_000),
    ],
)
def test_malformed_weights_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"model\.safetensors"):
        check_safetensors(tmp_path / "model.safetensors")


def test_sound_weights_are_counted(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"__metadata__": {"format": "pt"}, **SOUND, "empty": tensor(0, 5)}, bytes(20)))
    assert check_safetensors(path) == 5


def test_a_dense_checkpoint_is_looked_at_too(folder):
    config = {"model_type": "bert", "hidden_size": 6, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    assert check_dense_folder(folder)["model_type"] == "bert"
    for hostile in ({"auto_map": {}}, {"n_layers": 10**6}, {"num_hidden_layers": 10**6}):
        (folder / "config.json").write_text(json.dumps({**config, **hostile}))
        with pytest.raises(ModelFolderError):
            check_dense_folder(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match="safetensors"):
        check_dense_folder(folder)


def test_write_aside_shows_the_whole_file_or_the_old_one(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    with write_aside(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
        assert temporary.parent == path.parent
    assert path.read_text() == "one"

    def fail():
        with write_aside(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "one"
    assert os.listdir(path.parent) == ["file.txt"]


def test_write_aside_follows_a_link_and_leaves_devices_alone(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with write_aside(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    with write_aside("/dev/null") as path:
        path.write_text("gone")
    assert not os.path.isfile("/dev/null")


OF_A_RUN = "data: demo\ntarget_budget: 0.4\n"


def test_output_folders(tmp_path):
    folder = tmp_path / "run"
    check_output_folder(folder)
    folder.mkdir()
    check_output_folder(folder)
    (folder / "settings.yaml").write_text(OF_A_RUN)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "x").write_text("")
    with pytest.raises(UsageError, match="--overwrite"):
        check_output_folder(folder)
    check_output_folder(folder, resume=True)
    clear_output_folder(folder, resume=True)
    assert (folder / "checkpoints" / "x").exists()
    check_output_folder(folder, overwrite=True)
    assert (folder / "settings.yaml").exists()
    clear_output_folder(folder, overwrite=True)
    assert folder.is_dir()
    assert not any(folder.iterdir())


def test_overwrite_spares_what_no_run_wrote(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="leaves it alone"):
        clear_output_folder(tmp_path, overwrite=True)
    # Names that other projects use as well.
    (tmp_path / "settings.yaml").write_text("debug: true\n")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="leaves it alone"):
        clear_output_folder(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").exists()
    with pytest.raises(UsageError, match="is a file"):
        check_output_folder(tmp_path / "thesis.txt", overwrite=True)


def test_overwrite_removes_a_link_and_not_what_it_points_at(tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    other.mkdir()
    (other / "kept").write_text("")
    run.mkdir()
    (run / "settings.yaml").write_text(OF_A_RUN)
    (run / "link").symlink_to(other)
    clear_output_folder(run, overwrite=True)
    assert (other / "kept").exists()
    assert not (run / "link").exists()


def test_output_files(tmp_path):
    check_output_file(tmp_path / "new.csv")
    (tmp_path / "old.csv").write_text("")
    with pytest.raises(UsageError, match="--overwrite"):
        check_output_file(tmp_path / "old.csv")
    check_output_file(tmp_path / "old.csv", overwrite=True)
    with pytest.raises(UsageError, match="is a folder"):
        check_output_file(tmp_path, overwrite=True)
    check_output_file("/dev/null")
