"""A model folder as plain arrays, checked before anything is computed with them. Neither torch nor transformers.

`config.json` is read as `budgetformer.hf.BudgetFormerConfig` reads it, and `model.safetensors` is mapped into memory:
single-precision tensors are not copied, and processes that run the same folder share them. So a model in use is
replaced by renaming, as `save_pretrained` does, and never written over in place.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from budgetformer.config import ACTIVATIONS, POOLINGS, BudgetConfig, EncoderConfig, known_fields
from budgetformer.errors import ModelFolderError, UsageError
from budgetformer.folder import SIZES, check_model_folder

FORMAT = 1  # the newest format of a model folder that is read here; a folder without a number is of the first
PREFIX = "budgetformer.encoder."
NOT_USED = frozenset({"multiplier", "overspent"})  # what training needs to go on
PROBLEMS = (None, "single_label_classification", "multi_label_classification", "regression")
# Other names of ours in transformers: those of sizes, and those of the rest.
ALIASES = {
    **{ours: alias for ours, (alias, _, _) in SIZES.items() if alias is not None},
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "norm_eps": "layer_norm_eps",
}


@dataclass(frozen=True, eq=False)
class Weights:
    """A model, checked: every tensor that its configuration needs is there, has its shape, and is finite.

    labels: names of the classes in the model's order. head_hidden: activation of the classifier's dense layer, None
    without one. tensors: float32, C-contiguous, one for each name of `shapes`; not to be written to. twin: the dense
    twin on the same embeddings, where the model keeps one for second answers.
    """

    encoder: EncoderConfig
    budget: BudgetConfig
    labels: list[str]
    problem_type: str | None
    pooling: str
    head_hidden: str | None
    tensors: dict[str, np.ndarray]
    twin: "Weights | None" = None


def shapes(
    encoder: EncoderConfig, budget: BudgetConfig, labels: int, head_hidden: str | None
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model needs, in the order of the computation.

    Names are those of `model.safetensors`; the encoder's are without their prefix "budgetformer.encoder.". Matrices
    are (out, in). labels: how many classes.
    """
    width, heads, inner = encoder.hidden_size, encoder.num_heads, encoder.intermediate_size
    narrow = encoder.embedding_size or width
    seen = width if budget.view == "mean" else 2 * width

    def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}

    def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (size,), f"{name}.bias": (size,)}

    needed: dict[str, tuple[int, ...]] = {
        "embeddings.word.weight": (encoder.vocab_size, narrow),
        "embeddings.position.weight": (encoder.max_positions + encoder.position_offset, narrow),
    }
    if encoder.token_types:
        needed["embeddings.token_type.weight"] = (encoder.token_types, narrow)
    needed |= norm("embeddings.norm", narrow)
    if narrow != width:
        needed |= linear("embeddings.projection", width, narrow)
    for i in range(encoder.num_layers):
        layer = f"layers.{i}"
        left = width if encoder.kept_heads is None else len(encoder.kept_heads[i]) * encoder.head_size
        neurons = inner if encoder.kept_blocks is None else len(encoder.kept_blocks[i]) * (inner // budget.blocks)
        needed |= linear(f"{layer}.attention.router.controller.0", budget.router_hidden, seen)
        needed |= linear(f"{layer}.attention.router.controller.2", 1, budget.router_hidden)
        needed |= linear(f"{layer}.attention.router.scorer", heads, seen)
        needed |= {
            f"{layer}.attention.in_proj_weight": (3 * left, width),
            f"{layer}.attention.in_proj_bias": (3 * left,),
        }
        needed |= linear(f"{layer}.attention.out_proj", width, left)
        needed |= norm(f"{layer}.attention_norm", width)
        if budget.blocks > 1:
            needed |= linear(f"{layer}.feed_forward.router.controller.0", budget.router_hidden, seen)
            needed |= linear(f"{layer}.feed_forward.router.controller.2", 1, budget.router_hidden)
            needed |= linear(f"{layer}.feed_forward.router.scorer", budget.blocks, seen)
        needed |= linear(f"{layer}.feed_forward.up", neurons, width)
        needed |= linear(f"{layer}.feed_forward.down", width, neurons)
        needed |= norm(f"{layer}.feed_forward_norm", width)
    if encoder.norm == "pre":
        needed |= norm("norm", width)
    needed["profile"] = (encoder.num_layers,)
    if budget.blocks > 1:
        needed["block_profile"] = (encoder.num_layers,)
    if head_hidden is not None:
        needed |= linear("classifier.dense", width, width)
    return needed | linear("classifier.out", labels, width)


def read_weights(folder: str | Path) -> Weights:
    """The model in a folder.

    Raises:
        ModelFolderError: what `check_model_folder` refuses; a folder of a newer format; a configuration that is not
            valid; no classifier; a tensor that is missing, is not asked for, has another shape or another type than
            F32, F16 or BF16, or holds a value that is no finite number.
    """
    folder = Path(folder)
    config = check_model_folder(folder)
    path = folder / "config.json"
    _check_format(config.get("format", FORMAT), path)
    config = _ours(config, path)
    encoder, budget = _configs(config, path)
    labels, pooling, head_hidden = _labels(config, path), config.get("pooling", "mean"), config.get("head_hidden")
    problem_type = config.get("problem_type")
    for name, value, allowed in (
        ("pooling", pooling, POOLINGS),
        ("head_hidden", head_hidden, (None, *ACTIVATIONS)),
        ("problem_type", problem_type, PROBLEMS),
    ):
        if value not in allowed:
            named = ", ".join(map(str, allowed))
            raise ModelFolderError(f"{path}: {name} is {str(value)[:40]!r}, not one of {named}; restore the file")
    rest = (labels, problem_type, pooling, head_hidden)
    needed = shapes(encoder, budget, len(labels), head_hidden)
    if budget.second == "self":
        return Weights(encoder, budget, *rest, _read_tensors(folder / "model.safetensors", needed))
    dense = replace(encoder, kept_heads=None, kept_blocks=None), BudgetConfig()
    of_twin = shapes(*dense, len(labels), head_hidden)
    held = needed | {_of_twin(name): shape for name, shape in of_twin.items()}
    tensors = _read_tensors(folder / "model.safetensors", held)
    twin = Weights(*dense, *rest, {name: tensors[_of_twin(name)] for name in of_twin})
    return Weights(encoder, budget, *rest, {name: tensors[name] for name in needed}, twin)


def _of_twin(name: str) -> str:
    """Under which name the file holds a tensor of the twin; the embeddings are the model's own."""
    if name.startswith("embeddings."):
        return name
    return f"twin.{name}" if name.startswith("classifier.") else f"twin.encoder.{name}"


def _check_format(value: Any, path: Path) -> None:
    if type(value) is int and value > FORMAT:
        raise ModelFolderError(f"{path}: format {value} was made by a newer version; upgrade budgetformer")
    if type(value) is not int or value < 1:
        raise ModelFolderError(f"{path}: format is {str(value)[:40]!r}, not a whole number from 1; restore the file")


def _ours(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The configuration under our names alone."""
    renamed = dict(config)
    for ours, alias in ALIASES.items():
        if alias in renamed:
            value = renamed.pop(alias)
            if renamed.setdefault(ours, value) != value:
                raise ModelFolderError(f"{path}: {ours} and {alias} differ; restore the file")
    return renamed


def _configs(config: dict[str, Any], path: Path) -> tuple[EncoderConfig, BudgetConfig]:
    settings = known_fields(EncoderConfig, config)
    settings["pad_token_id"] = settings.get("pad_token_id") or 0
    routing = config.get("budget") or {}
    for owner, given, cls in (("", settings, EncoderConfig), ("budget: ", routing, BudgetConfig)):
        # Both classes compare and do not ask for types: 1.5 heads or an epsilon of NaN would pass.
        for field in fields(cls):
            value = given.get(field.name, field.default)
            if field.name in ("kept_heads", "kept_blocks", "levels"):  # lists, which the class looks at itself
                continue
            if not (value is None and field.default is None) and not _like(value, field.default):
                raise ModelFolderError(f"{path}: {owner}{field.name} is {str(value)[:40]!r}; restore the file")
    try:
        encoder, budget = EncoderConfig(**settings), BudgetConfig(**routing)
        budget.check_kept(encoder)
        return encoder, budget
    except (UsageError, TypeError) as error:
        raise ModelFolderError(f"{path}: {error}; restore the file") from None


def _like(value: Any, default: Any) -> bool:
    """Whether a value can stand where `default` stands: a word, a whole number (as for None), a finite number >= 0."""
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, float):
        return type(value) in (int, float) and math.isfinite(value) and value >= 0
    return type(value) is int and value >= 0


def _labels(config: Mapping[str, Any], path: Path) -> list[str]:
    """The names of the classes by number; as transformers has it, two of them where a config names none."""
    names, number = config.get("id2label"), config.get("num_labels")
    if names is None:
        return [f"LABEL_{i}" for i in range(2 if number is None else number)]
    try:
        by_number = {int(key): name for key, name in names.items()}
    except ValueError:
        raise ModelFolderError(f"{path}: id2label has a key that is no number; restore the file") from None
    if len(by_number) != len(names) or not all(isinstance(name, str) for name in by_number.values()):
        raise ModelFolderError(f"{path}: id2label does not give every class one name; restore the file")
    if not by_number or number not in (None, len(by_number)):
        raise ModelFolderError(f"{path}: num_labels and id2label differ, or name no class; restore the file")
    return [by_number[key] for key in sorted(by_number)]


def _read_tensors(path: Path, needed: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The tensors named in `needed`; the header was checked against the file before."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    held = {name.removeprefix(PREFIX): entry for name, entry in header.items() if name not in NOT_USED}
    if "classifier.out.weight" not in held:
        raise ModelFolderError(
            f"{path.parent}: has no classifier; train one with: budgetformer train --model {path.parent}"
        )
    missing = [name for name in needed if name not in held]
    if missing:
        raise ModelFolderError(f"{path}: lacks {missing[0]} ({len(missing)} in all); copy it again")
    unknown = [name for name in held if name not in needed]
    if unknown:
        raise ModelFolderError(f"{path}: config.json has no place for {unknown[0][:80]!r}; copy the whole folder again")
    # Copy-on-write: torch takes only arrays that could be written to, and the file stays as it is whatever happens.
    data = np.memmap(path, np.uint8, mode="c", offset=8 + length)
    return {name: _tensor(data, held[name], name, shape, path) for name, shape in needed.items()}


def _tensor(data: np.ndarray, entry: dict[str, Any], name: str, shape: tuple[int, ...], path: Path) -> np.ndarray:
    if tuple(entry["shape"]) != shape:
        raise ModelFolderError(
            f"{path}: {name} has the shape {tuple(entry['shape'])}, config.json describes {shape}; restore the folder"
        )
    start, end = entry["data_offsets"]
    raw = data[start:end]
    if entry["dtype"] == "F32":
        # Views of the mapping; a tensor that starts between two floats is moved, kernels read whole ones.
        values = (raw if raw.ctypes.data % 4 == 0 else raw.copy()).view("<f4")
    elif entry["dtype"] == "F16":
        values = raw.copy().view("<f2").astype(np.float32)
    elif entry["dtype"] == "BF16":
        values = (raw.copy().view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        raise ModelFolderError(f"{path}: {name} is {entry['dtype']}; weights must be F32, F16 or BF16, save them again")
    if not np.isfinite(values).all():
        raise ModelFolderError(f"{path}: {name} holds a value that is no finite number; train or copy the model again")
    return np.asarray(values).reshape(shape)
