"""From a dense checkpoint of the BERT family to our encoder and back: reversible key tables, one per family.

A row of a table names our tensor and theirs; a tuple on their side is stacked along the first axis (our packed
projection of query, key and value). The converted model starts with all heads on and equals its source.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.errors import ModelFolderError, UsageError
from budgetformer.folder import check_dense_folder
from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification, BudgetFormerModel

Keys = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where a family of checkpoints keeps its tensors and its sizes.

    base: prefix of the encoder inside a classifier. embeddings, layer: rows (ours, theirs), `{i}` is the layer.
    sizes: our config's fields by their names there. head: rows of the fine-tuned classifier; head_hidden: the
    activation of its dense layer.
    """

    base: str
    embeddings: Mapping[str, Keys]
    layer: Mapping[str, Keys]
    sizes: Mapping[str, str]
    head: Mapping[str, Keys]
    head_hidden: str
    position_offset: bool = False  # positions start after the padding index
    token_types: bool = True
    fixed: Mapping[str, Any] | None = None

    def rows(self, layers: int, *, projection: bool) -> Iterator[tuple[str, Keys]]:
        """All rows of an encoder with `layers` layers; `projection`: the embeddings are projected."""
        for ours, theirs in self.embeddings.items():
            if projection or not ours.startswith("embeddings.projection"):
                yield ours, theirs
        for i in range(layers):
            for ours, theirs in self.layer.items():
                named = tuple(t.format(i=i) for t in ([theirs] if isinstance(theirs, str) else theirs))
                yield f"layers.{i}.{ours}", named[0] if isinstance(theirs, str) else named


def _both(rows: dict[str, str | tuple[str, ...]]) -> dict[str, Keys]:
    """Each row once for the weight, once for the bias."""
    made: dict[str, Keys] = {}
    for ours, theirs in rows.items():
        for kind in ("weight", "bias"):
            name = f"{ours}_{kind}" if ours.endswith("in_proj") else f"{ours}.{kind}"
            made[name] = f"{theirs}.{kind}" if isinstance(theirs, str) else tuple(f"{t}.{kind}" for t in theirs)
    return made


_TABLES: dict[str, Keys] = {
    "embeddings.word.weight": "embeddings.word_embeddings.weight",
    "embeddings.position.weight": "embeddings.position_embeddings.weight",
}
_TYPES: dict[str, Keys] = {"embeddings.token_type.weight": "embeddings.token_type_embeddings.weight"}
_NORM = _both({"embeddings.norm": "embeddings.LayerNorm"})
_SELF = "encoder.layer.{i}.attention.self"
_BERT_LAYER = _both(
    {
        "attention.in_proj": (f"{_SELF}.query", f"{_SELF}.key", f"{_SELF}.value"),
        "attention.out_proj": "encoder.layer.{i}.attention.output.dense",
        "attention_norm": "encoder.layer.{i}.attention.output.LayerNorm",
        "feed_forward.up": "encoder.layer.{i}.intermediate.dense",
        "feed_forward.down": "encoder.layer.{i}.output.dense",
        "feed_forward_norm": "encoder.layer.{i}.output.LayerNorm",
    }
)
_BERT_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "pad_token_id": "pad_token_id",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
_DENSE_HEAD = _both({"classifier.dense": "classifier.dense", "classifier.out": "classifier.out_proj"})

_ROBERTA = Family(
    base="roberta",
    embeddings={**_TABLES, **_TYPES, **_NORM},
    layer=_BERT_LAYER,
    sizes=_BERT_SIZES,
    head=_DENSE_HEAD,
    head_hidden="tanh",
    position_offset=True,
)
FAMILIES: dict[str, Family] = {
    "bert": Family(
        base="bert",
        embeddings={**_TABLES, **_TYPES, **_NORM},
        layer=_BERT_LAYER,
        sizes=_BERT_SIZES,
        head=_both({"classifier.dense": "bert.pooler.dense", "classifier.out": "classifier"}),
        head_hidden="tanh",
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "electra": Family(
        base="electra",
        embeddings={**_TABLES, **_TYPES, **_NORM, **_both({"embeddings.projection": "embeddings_project"})},
        layer=_BERT_LAYER,
        sizes={**_BERT_SIZES, "embedding_size": "embedding_size"},
        head=_DENSE_HEAD,
        head_hidden="gelu",
    ),
    "distilbert": Family(
        base="distilbert",
        embeddings={**_TABLES, **_NORM},
        layer=_both(
            {
                "attention.in_proj": tuple(f"transformer.layer.{{i}}.attention.{n}_lin" for n in "qkv"),
                "attention.out_proj": "transformer.layer.{i}.attention.out_lin",
                "attention_norm": "transformer.layer.{i}.sa_layer_norm",
                "feed_forward.up": "transformer.layer.{i}.ffn.lin1",
                "feed_forward.down": "transformer.layer.{i}.ffn.lin2",
                "feed_forward_norm": "transformer.layer.{i}.output_layer_norm",
            }
        ),
        sizes={
            "vocab_size": "vocab_size",
            "hidden_size": "dim",
            "num_layers": "n_layers",
            "num_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "max_positions": "max_position_embeddings",
            "pad_token_id": "pad_token_id",
            "activation": "activation",
            "dropout": "dropout",
            "attention_dropout": "attention_dropout",
        },
        head=_both({"classifier.dense": "pre_classifier", "classifier.out": "classifier"}),
        head_hidden="relu",
        token_types=False,
        fixed={"norm_eps": 1e-12, "token_types": 0},
    ),
}


def family_of(config: Any) -> Family:
    """The key table for a transformers configuration."""
    if config.model_type not in FAMILIES:
        raise UsageError(
            f"model_type={config.model_type!r}: no key table for it; the families are {', '.join(FAMILIES)} "
            "(MiniLM checkpoints are bert)"
        )
    if getattr(config, "position_embedding_type", "absolute") not in ("absolute", None):
        raise UsageError(f"position_embedding_type={config.position_embedding_type!r}: only absolute can be converted")
    return FAMILIES[config.model_type]


def encoder_config(config: Any) -> EncoderConfig:
    """Our sizes from a transformers configuration."""
    family = family_of(config)
    sizes = {ours: getattr(config, theirs) for ours, theirs in family.sizes.items()} | dict(family.fixed or {})
    sizes["activation"] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}.get(
        sizes["activation"], sizes["activation"]
    )
    if family.position_offset:
        sizes["position_offset"] = sizes["pad_token_id"] + 1
        sizes["max_positions"] -= sizes["position_offset"]
    return EncoderConfig(**sizes)


def to_ours(state: Mapping[str, Tensor], family: Family, config: EncoderConfig) -> dict[str, Tensor]:
    """Their encoder tensors (without the classifier's prefix) under our names. ModelFolderError when one is missing."""
    return _gather(family.rows(config.num_layers, projection=_projected(config)), state)


def to_theirs(state: Mapping[str, Tensor], family: Family, config: EncoderConfig) -> dict[str, Tensor]:
    """The inverse of `to_ours`: our encoder tensors under their names; routers have no place there and are left out."""
    theirs: dict[str, Tensor] = {}
    for ours, names in family.rows(config.num_layers, projection=_projected(config)):
        if isinstance(names, str):
            theirs[names] = state[ours]
        else:
            theirs.update(zip(names, state[ours].chunk(len(names)), strict=True))
    return theirs


def _projected(config: EncoderConfig) -> bool:
    return config.embedding_size not in (None, config.hidden_size)


def _gather(rows: Iterator[tuple[str, Keys]], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = {}
    for ours, names in rows:
        parts = (names,) if isinstance(names, str) else names
        missing = [name for name in parts if name not in state]
        if missing:
            raise ModelFolderError(f"the checkpoint has no tensor {missing[0]!r}, which this family always has")
        made[ours] = state[names] if isinstance(names, str) else torch.cat([state[name] for name in names])
    return made


def from_pretrained_encoder(
    name_or_path: str | Path,
    *,
    labels: list[str] | int | None = None,
    budget: BudgetConfig | None = None,
    pooling: str = "mean",
    revision: str | None = None,
    **config_changes: Any,
) -> BudgetFormerModel | BudgetFormerForSequenceClassification:
    """A dense checkpoint of the BERT family as a BudgetFormer with all heads on, equal to its source.

    labels: names (or a number) of classes for a new classifier. None: the checkpoint's own classifier when it was
    fine-tuned with one, else the bare encoder. Only safetensors are read; no code of a checkpoint is ever run.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
    from transformers.utils import logging

    if Path(name_or_path).exists():
        check_dense_folder(name_or_path)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    source_config = AutoConfig.from_pretrained(name_or_path, **options)
    if isinstance(source_config, BudgetFormerConfig):
        return _from_ours(name_or_path, source_config, labels, budget, pooling, config_changes)
    family, sizes = family_of(source_config), encoder_config(source_config)
    fine_tuned = any(name.endswith("ForSequenceClassification") for name in source_config.architectures or [])
    keep_head = labels is None and fine_tuned
    loader = AutoModelForSequenceClassification if keep_head else AutoModel
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # an unused pooler or a missing one is no news to the user
    try:
        source = loader.from_pretrained(
            name_or_path, use_safetensors=True, attn_implementation="eager", dtype=torch.float32, **options
        )
    finally:
        logging.set_verbosity(level)
    state = source.state_dict()
    inner = {k.removeprefix(f"{family.base}."): v for k, v in state.items()} if keep_head else state
    settings: dict[str, Any] = {**asdict(sizes), "budget": asdict(budget or BudgetConfig()), "pooling": pooling}
    settings["initializer_range"] = getattr(source_config, "initializer_range", 0.02)
    if keep_head:
        settings |= {
            "pooling": "first",
            "head_hidden": family.head_hidden,
            "id2label": dict(source_config.id2label or {}),
            "label2id": dict(source_config.label2id or {}),
            "problem_type": source_config.problem_type,
        }
    elif labels is not None:
        settings |= _named(labels)
    config = BudgetFormerConfig(**{**settings, **config_changes})
    if labels is None and not keep_head:
        model = BudgetFormerModel(config)
        model.encoder.load_state_dict(to_ours(inner, family, sizes), strict=False)
        return model.eval()
    classifier = BudgetFormerForSequenceClassification(config)
    classifier.budgetformer.encoder.load_state_dict(to_ours(inner, family, sizes), strict=False)
    if keep_head:
        classifier.load_state_dict(_gather(iter(family.head.items()), state), strict=False)
    classifier.keep_twin(classifier)
    return classifier.eval()


def _named(labels: list[str] | int) -> dict[str, Any]:
    names = [f"LABEL_{i}" for i in range(labels)] if isinstance(labels, int) else list(labels)
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def _from_ours(
    folder: str | Path,
    config: BudgetFormerConfig,
    labels: list[str] | int | None,
    budget: BudgetConfig | None,
    pooling: str,
    config_changes: dict[str, Any],
) -> BudgetFormerModel | BudgetFormerForSequenceClassification:
    """The encoder of a folder of ours, converted or trained: a new classifier, and routers with all heads on again."""
    settings = {**asdict(config.encoder_config), "budget": asdict(budget or BudgetConfig()), "pooling": pooling}
    made = BudgetFormerConfig(**{**settings, **({} if labels is None else _named(labels)), **config_changes})
    encoder = BudgetFormerModel.from_pretrained(folder, use_safetensors=True).state_dict()
    kept = {name: tensor for name, tensor in encoder.items() if ".router." not in name and not name.endswith("profile")}
    if labels is None:
        model = BudgetFormerModel(made)
        model.load_state_dict(kept, strict=False)
        return model.eval()
    classifier = BudgetFormerForSequenceClassification(made)
    classifier.budgetformer.load_state_dict(kept, strict=False)
    classifier.keep_twin(classifier)
    return classifier.eval()


PROBES = (
    "How do I reset my passcode?",
    "Ünïcode, emoji 🙂 and a long-ish-hyphenated word; 12,345.67 €.",
    "a",
    "THE SAME IN CAPITALS, twice. the same in capitals, twice.",
    "混ぜた text with 漢字 and עברית",
)


@torch.no_grad()
def convert_checkpoint(
    source: str | Path, output_dir: str | Path, *, budget: BudgetConfig | None = None, revision: str | None = None
) -> dict[str, Any]:
    """Convert a dense checkpoint into a model folder of ours and say what was checked.

    The report holds: token ids equal to the source tokenizer's (after saving and loading again, and against the raw
    tokenizer.json where there is one), the largest difference of hidden states or logits, all heads on, label names.
    ModelFolderError when token ids differ: the model would read other words than it was trained on.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    model = from_pretrained_encoder(source, budget=budget, revision=revision)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    same_ids = compare_token_ids(source, tokenizer)
    classifies = isinstance(model, BudgetFormerForSequenceClassification)
    loader = AutoModelForSequenceClassification if classifies else AutoModel
    dense = loader.from_pretrained(
        source, revision=revision, use_safetensors=True, dtype=torch.float32, trust_remote_code=False
    ).eval()
    batch = tokenizer(list(PROBES), padding=True, truncation=True, max_length=64, return_tensors="pt")
    ours = model(**{k: v for k, v in batch.items() if k in ("input_ids", "attention_mask", "token_type_ids")})
    theirs = dense(**batch)
    if classifies:
        difference = (ours.logits - theirs.logits).abs().max()
    else:
        real = batch["attention_mask"].bool()
        difference = (ours.last_hidden_state - theirs.last_hidden_state)[real].abs().max()
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    again = AutoTokenizer.from_pretrained(output_dir)
    if [again(text)["input_ids"] for text in PROBES] != [tokenizer(text)["input_ids"] for text in PROBES]:
        raise ModelFolderError(f"{output_dir}: the saved tokenizer gives other token ids than {source}'s")
    return {
        "source": str(source),
        "output": str(output_dir),
        "family": dense.config.model_type,
        "token_ids_equal": same_ids,
        "heads_on": float(ours.head_share.mean()),
        "max_difference": float(difference),
        "classifier": classifies,
        "labels": list((model.config.id2label or {}).values()) if classifies else [],
    }


def compare_token_ids(source: str | Path, tokenizer: Any) -> bool:
    """True when `tokenizer` gives the ids of the source's own tokenizer.json; True when there is none to compare with.

    Major releases of transformers have changed ids for some checkpoints without a word (transformers#48967).
    """
    file = Path(source) / "tokenizer.json"
    if not file.is_file():
        return True
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(file))
    raw.no_padding()
    raw.no_truncation()
    for text in PROBES:
        if raw.encode(text).ids != tokenizer(text)["input_ids"]:
            raise ModelFolderError(
                f"{source}: transformers reads other token ids from this tokenizer than its tokenizer.json says, "
                "so the model would see other words than it was trained on; use the transformers release that made it"
            )
    return True
