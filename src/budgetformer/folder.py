"""Model folders, looked at with suspicion before anything is built.

A model folder may come from anywhere. `check_model_folder` reads `config.json` and the header of `model.safetensors`
as plain data and refuses what would make a loader fetch code, allocate absurd sizes or stumble later. Pickles are never
read.
"""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from budgetformer.config import BudgetConfig, EncoderConfig, names_units
from budgetformer.errors import ModelFolderError
from budgetformer.outputs import MODEL_TYPE, write_aside

__all__ = ["check_model_folder", "check_safetensors", "read_json_object", "write_aside"]

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MAX_JSON_BYTES = 1_000_000
MAX_TOKENIZER_BYTES = 200_000_000
MAX_HEADER_BYTES = 100_000_000
MAX_LABELS = 100_000
SAFE_ATTENTION = (None, "eager", "sdpa")
FORBIDDEN_KEYS = frozenset({"auto_map", "trust_remote_code", "custom_pipelines"})
# Our sizes, the name that transformers knows each by as well, and the range that is not absurd.
SIZES = {
    "num_layers": ("num_hidden_layers", 1, 128),
    "hidden_size": (None, 1, 16_384),
    "num_heads": ("num_attention_heads", 1, 256),
    "vocab_size": (None, 1, 2_000_000),
    "intermediate_size": (None, 1, 131_072),
    "max_positions": ("max_position_embeddings", 1, 1_000_000),
    "position_offset": (None, 0, 1_000_000),
    "token_types": ("type_vocab_size", 0, 1_000),
    "embedding_size": (None, 1, 16_384),
    "num_labels": (None, 1, MAX_LABELS),
}
# The one family with names of its own.
DISTILBERT_SIZES = {
    "num_layers": ("n_layers",),
    "num_heads": ("n_heads",),
    "hidden_size": ("dim",),
    "intermediate_size": ("hidden_dim",),
}
MAX_ROUTER = 65_536
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


def check_model_folder(path: str | Path) -> dict[str, Any]:
    """Refuse a folder that is not a complete, sane and harmless model of ours; nothing is built or fetched.

    Returns:
        The content of `config.json`.

    Raises:
        ModelFolderError: what is wrong, where, and what to do.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder; give the path of a trained model")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ModelFolderError(f"{folder}: {', '.join(missing)} missing; copy the whole folder, or make it again")
    if (folder / "adapter_config.json").exists():
        raise ModelFolderError(f"{folder}: adapter_config.json makes loaders fetch another model; remove it")
    config_path = folder / "config.json"
    config = read_json_object(config_path)
    _refuse_code(config, config_path)
    if config.get("model_type") != MODEL_TYPE:
        remedy = "make one with: budgetformer convert --from FOLDER --output-dir NEW"
        raise ModelFolderError(
            f"{config_path}: model_type is {config.get('model_type')!r}, not {MODEL_TYPE!r}; {remedy}"
        )
    sizes = _check_sizes(config, config_path)
    tokenizer_config = folder / "tokenizer_config.json"
    _refuse_code(read_json_object(tokenizer_config), tokenizer_config)
    if (folder / "tokenizer.json").stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelFolderError(
            f"{folder / 'tokenizer.json'}: larger than {MAX_TOKENIZER_BYTES:,} bytes; not a tokenizer of ours"
        )
    weights = folder / "model.safetensors"
    held = check_safetensors(weights)
    described = _weights_at_least(sizes)
    if described > held:
        raise ModelFolderError(
            f"{config_path}: describes {described:,} weights or more, {weights.name} holds {held:,}; restore the file"
        )
    return config


def check_dense_folder(path: str | Path) -> dict[str, Any]:
    """Refuse a local dense checkpoint that holds no safetensors, or whose config asks for code or absurd sizes.

    Returns:
        The content of `config.json`.

    Raises:
        ModelFolderError: what is wrong, where, and what to do.
    """
    folder = Path(path)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ModelFolderError(f"{folder}: config.json missing; give the folder of a checkpoint")
    if not any(folder.glob("*.safetensors")):
        raise ModelFolderError(f"{folder}: no *.safetensors in it; other formats can run code and are not read")
    config = read_json_object(config_path)
    _refuse_code(config, config_path)
    for ours, (alias, _, high) in SIZES.items():
        for name in {ours, alias, *DISTILBERT_SIZES.get(ours, ())} - {None}:
            if config.get(name) is not None:
                _size(config[name], str(name), 0, high, config_path)
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a small JSON file.

    Raises:
        ModelFolderError: too large, not UTF-8, not JSON, a key twice, or not an object.
    """
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelFolderError(f"{path}: larger than {MAX_JSON_BYTES:,} bytes; not a file of ours")
    return _parse_object(path.read_bytes(), path)


def check_safetensors(path: Path) -> int:
    """Check the header of a safetensors file against the file; no weight is read.

    Returns:
        How many numbers the tensors hold in all.

    Raises:
        ModelFolderError: header too large, cut short, a tensor twice, an unknown type, or offsets that overlap, leave
            holes, disagree with the shapes or lie outside the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ModelFolderError(f"{path}: its header is cut short or too large; copy the file again")
        header = _parse_object(file.read(length), path)
    header.pop("__metadata__", None)
    data_size, numbers, spans = size - 8 - length, 0, []
    for name, entry in header.items():
        try:
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole_numbers = all(type(value) is int and value >= 0 for value in (*shape, start, end))
            bits = DTYPE_BITS[dtype]
        except (KeyError, TypeError, ValueError):
            raise ModelFolderError(f"{path}: tensor {name[:80]!r} is not well described; copy the file again") from None
        if not whole_numbers or not start <= end <= data_size or (end - start) * 8 != math.prod(shape) * bits:
            raise ModelFolderError(f"{path}: tensor {name[:80]!r} does not fit its place; copy the file again")
        numbers += math.prod(shape)
        spans.append((start, end))
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise ModelFolderError(f"{path}: tensors overlap or leave a hole at byte {position}; copy the file again")
        position = end
    if position != data_size:
        raise ModelFolderError(f"{path}: {data_size - position} bytes belong to no tensor; copy the file again")
    return numbers


def _refuse_code(config: dict[str, Any], path: Path) -> None:
    """Refuse keys that loaders take as a request for code, at any depth."""
    pending: list[Any] = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(value)
        if not isinstance(value, dict):
            continue
        for key, inner in value.items():
            # Label names are the user's own; they are keys of label2id, and no loader acts on them.
            if key == "label2id":
                continue
            if key in FORBIDDEN_KEYS or "kernel" in key.lower():
                raise ModelFolderError(f"{path}: key {key[:80]!r} asks for code from elsewhere; remove it")
            if "implementation" in key.lower():
                named = list(inner.values()) if isinstance(inner, dict) else [inner]
                if not all(name in SAFE_ATTENTION for name in named):
                    raise ModelFolderError(f"{path}: {key[:80]!r} is {str(inner)[:60]!r}; only eager and sdpa may run")
            pending.append(inner)


def _check_sizes(config: dict[str, Any], path: Path) -> dict[str, int]:
    """The sizes in the config, those left out at their defaults. ModelFolderError for what is absurd or contradicts."""
    sizes: dict[str, int] = {}
    for ours, (alias, low, high) in SIZES.items():
        for name in (ours, alias):
            if name is not None and config.get(name) is not None:
                sizes[ours] = _size(config[name], name, low, high, path)
        if alias is not None and config.get(ours) is not None and config.get(alias) not in (None, config[ours]):
            raise ModelFolderError(f"{path}: {ours} and {alias} differ; restore the file")
    router = config.get("budget")
    if router is not None and not isinstance(router, dict):
        raise ModelFolderError(f"{path}: budget is not a table; restore the file")
    if router is not None and router.get("router_hidden") is not None:
        _size(router["router_hidden"], "router_hidden", 1, MAX_ROUTER, path)
    defaults = {field.name: field.default for field in fields(EncoderConfig) if isinstance(field.default, int)}
    sizes = defaults | sizes
    if sizes["hidden_size"] % sizes["num_heads"]:
        heads, width = sizes["num_heads"], sizes["hidden_size"]
        raise ModelFolderError(f"{path}: {heads} heads do not divide the width {width}; restore the file")
    blocks = _size((router or {}).get("ffn_blocks", BudgetConfig().ffn_blocks), "ffn_blocks", 1, MAX_ROUTER, path)
    for name, units in (("kept_heads", sizes["num_heads"]), ("kept_blocks", blocks)):
        kept, layers = config.get(name), sizes["num_layers"]
        if not names_units(kept, layers, units):
            raise ModelFolderError(f"{path}: {name} does not name units of {layers} layers; restore the file")
        sizes[name] = layers * units if kept is None else sum(map(len, kept))
    sizes["ffn_blocks"] = blocks
    labels = config.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise ModelFolderError(f"{path}: id2label is not a table of names; restore the file")
    if labels is not None and len(labels) > MAX_LABELS:
        raise ModelFolderError(f"{path}: {len(labels):,} labels; at most {MAX_LABELS:,} are allowed")
    return sizes


def _size(value: object, name: str, low: int, high: int, path: Path) -> int:
    if type(value) is not int or not low <= value <= high:
        rule = f"it must be a whole number from {low} to {high:,}"
        raise ModelFolderError(f"{path}: {name} is {str(value)[:40]}; {rule}; restore the file")
    return value


def _weights_at_least(sizes: dict[str, int]) -> int:
    """A lower bound of the numbers that the model needs: what is built before a weight is read must not be more."""
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    tables = (sizes["vocab_size"] + sizes["max_positions"]) * sizes.get("embedding_size", width)
    heads = sizes["kept_heads"] * 4 * width * (width // sizes["num_heads"])
    neurons = sizes["kept_blocks"] * 2 * width * (inner // sizes["ffn_blocks"])
    return tables + heads + neurons + sizes.get("num_labels", 0) * width


def _parse_object(content: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ModelFolderError(f"{path}: a name is there twice; copy the file again")
        return table

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelFolderError):
            raise
        raise ModelFolderError(f"{path}: not valid JSON; copy the file again") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: holds a {type(value).__name__}, not an object; copy the file again")
    return value
