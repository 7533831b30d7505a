"""The tokenizer of a model folder on the `tokenizers` library alone: the same ids as transformers gives, without it.

transformers (5.24 was read and is compared with in the tests) does more than load `tokenizer.json`: classes of the
BERT family build their parts anew from the vocabulary and from options in `tokenizer_config.json`, and special tokens
that are named there are added. What of that changes an id is done here too.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, models, normalizers, pre_tokenizers, processors

from budgetformer.errors import ModelFolderError
from budgetformer.folder import MAX_TOKENIZER_BYTES, read_json_object

NO_LIMIT = int(1e30)  # transformers' word for a tokenizer that was made for no length in particular
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
WITH_TYPES = ("input_ids", "token_type_ids", "attention_mask")
WITHOUT_TYPES = ("input_ids", "attention_mask")
PROBE = "A plain text, and a sign 𒀀 that no vocabulary has."

Table = Mapping[str, Any]


@dataclass(frozen=True)
class Encoded:
    """What a call gives: one encoding (ids, type_ids, sequence_ids) for each text."""

    encodings: list[Encoding]


@dataclass(frozen=True, eq=False)
class FolderTokenizer:
    """What `budgetformer.tokens` needs of a transformers tokenizer: it gives the same tokens with either.

    core: cuts and pads nothing. model_max_length: the longest input it was made for, in tokens. pad_token_id: None
    where the folder names no padding.
    """

    core: Tokenizer
    model_input_names: list[str]
    truncation_side: str
    model_max_length: int
    pad_token_id: int | None

    @classmethod
    def load(cls, folder: str | Path) -> "FolderTokenizer":
        """The tokenizer of a folder, from `tokenizer.json` and `tokenizer_config.json`.

        Raises:
            ModelFolderError: a file is missing, too large, damaged or at odds with the other.
        """
        folder = Path(folder)
        path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
        for needed in (path, config_path):
            if not needed.is_file():
                raise ModelFolderError(f"{folder}: {needed.name} missing; copy the whole folder, or make it again")
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ModelFolderError(f"{path}: larger than {MAX_TOKENIZER_BYTES:,} bytes; not a tokenizer of ours")
        config = _whole(folder, read_json_object(config_path))
        try:
            core = Tokenizer.from_file(str(path))
        except Exception as error:
            # The library has no class of its own for this, and its message may be as long as the file.
            raise ModelFolderError(f"{path}: not a tokenizer ({_first(error)}); copy the file again") from None
        direction = (core.truncation or {}).get("direction", "right")
        core.no_padding()
        core.no_truncation()
        family = FAMILIES.get(str(config.get("tokenizer_class")).removesuffix("Fast"), OTHER)
        try:
            core.encode_special_tokens = config.get("split_special_tokens", False)
            family.rebuild(core, config)
            specials = family.specials | {name: config[name] for name in NAMED if name in config}
            core.add_tokens(_missing(core, specials, config))
            family.frame(core, {name: str(_token(value)) for name, value in specials.items() if value}, config)
            pad = specials.get("pad_token")
            made = cls(
                core,
                list(config.get("model_input_names", family.names)),
                config.get("truncation_side", direction),
                int(_or(config.get("model_max_length"), _or(config.get("max_len"), NO_LIMIT))),
                None if not pad else core.token_to_id(str(_token(pad))),
            )
            if made.truncation_side not in ("left", "right"):
                raise ValueError(f"truncation_side is {str(made.truncation_side)[:40]!r}")
            made([PROBE], [PROBE])
        except Exception as error:
            raise ModelFolderError(
                f"{folder}: {path.name} and {config_path.name} make no tokenizer ({_first(error)}); copy both again"
            ) from None
        return made

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """How many tokens frame a text, or a pair of texts."""
        return self.core.num_special_tokens_to_add(pair)

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, verbose: bool = False) -> Encoded:
        """The tokens of each text, or of each pair, framed and not cut. `verbose` is there for the common call.

        Raises:
            TypeError: a text is no string, or no valid Unicode.
            ValueError: not as many pairs as texts.
        """
        inputs: Any = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        return Encoded(self.core.encode_batch_fast(inputs))


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a class of transformers does to a loaded file.

    rebuild: sets what the class builds from options. frame: sets the special tokens around a text. specials: those it
    has where the configuration names none. names: `model_input_names`.
    """

    rebuild: Callable[[Tokenizer, Table], None]
    frame: Callable[[Tokenizer, dict[str, str], Table], None]
    specials: dict[str, Any]
    names: tuple[str, ...]


def _as_it_is(core: Tokenizer, config: Table) -> None:
    del core, config


def _frame_of_file(core: Tokenizer, names: dict[str, str], config: Table) -> None:
    del names, config
    if core.post_processor is None:
        core.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def _bert(core: Tokenizer, config: Table) -> None:
    model = core.model
    if not isinstance(model, models.WordPiece):
        raise ValueError(f"a {type(model).__name__} model in a BERT tokenizer")
    model.unk_token = str(_token(config.get("unk_token", "[UNK]")))
    model.continuing_subword_prefix = "##"
    model.max_input_chars_per_word = 100
    core.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def _bert_frame(core: Tokenizer, names: dict[str, str], config: Table) -> None:
    del config
    first, last = names["cls_token"], names["sep_token"]
    core.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, core.token_to_id(first)), (last, core.token_to_id(last))],
    )


def _roberta(core: Tokenizer, config: Table) -> None:
    model = core.model
    if not isinstance(model, models.BPE):
        raise ValueError(f"a {type(model).__name__} model in a RoBERTa tokenizer")
    model.unk_token, model.dropout, model.fuse_unk = None, None, False
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space", False))


def _roberta_frame(core: Tokenizer, names: dict[str, str], config: Table) -> None:
    first, last = ((word, core.token_to_id(word) or 0) for word in (names["cls_token"], names["sep_token"]))
    prefix = config.get("add_prefix_space", False)
    core.post_processor = processors.RobertaProcessing(last, first, config.get("trim_offsets", True), prefix)


def _xlm_roberta(core: Tokenizer, config: Table) -> None:
    if not isinstance(core.model, models.Unigram):
        raise ValueError(f"a {type(core.model).__name__} model in an XLM-RoBERTa tokenizer")
    # Of the file's normalisers only the precompiled table of characters is kept.
    kept = [part for part in _parts(core.normalizer) if isinstance(part, normalizers.Precompiled)]
    core.normalizer = kept[0] if kept else None
    scheme = "always" if config.get("add_prefix_space", True) else "never"
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    )


def _parts(normalizer: Any) -> list[Any]:
    if not isinstance(normalizer, normalizers.Sequence):
        return [] if normalizer is None else [normalizer]
    count = len(json.loads(normalizer.__getstate__())["normalizers"])
    return [normalizer[i] for i in range(count)]


def _xlm_roberta_frame(core: Tokenizer, names: dict[str, str], config: Table) -> None:
    del config
    first, last = names["bos_token"], names["eos_token"]
    core.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, last, "$B", last],
        special_tokens=[(first, core.token_to_id(first)), (last, core.token_to_id(last))],
    )


_BERT_WORDS = dict(unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]", cls_token="[CLS]", mask_token="[MASK]")
_ROBERTA_WORDS = dict(
    bos_token="<s>",
    eos_token="</s>",
    sep_token="</s>",
    cls_token="<s>",
    unk_token="<unk>",
    pad_token="<pad>",
    mask_token="<mask>",
)
OTHER = Family(rebuild=_as_it_is, frame=_frame_of_file, specials={}, names=WITHOUT_TYPES)
FAMILIES: dict[str, Family] = {
    "BertTokenizer": Family(rebuild=_bert, frame=_bert_frame, specials=_BERT_WORDS, names=WITH_TYPES),
    "DistilBertTokenizer": Family(rebuild=_bert, frame=_bert_frame, specials=_BERT_WORDS, names=WITHOUT_TYPES),
    "RobertaTokenizer": Family(rebuild=_roberta, frame=_roberta_frame, specials=_ROBERTA_WORDS, names=WITHOUT_TYPES),
    "XLMRobertaTokenizer": Family(
        rebuild=_xlm_roberta, frame=_xlm_roberta_frame, specials=_ROBERTA_WORDS, names=WITHOUT_TYPES
    ),
}
FAMILIES["ElectraTokenizer"] = FAMILIES["BertTokenizer"]


def _missing(core: Tokenizer, specials: Table, config: Table) -> list[AddedToken]:
    """What the configuration names and the file does not have as a token of its own, in transformers' order."""
    there = {token.content: token for token in core.get_added_tokens_decoder().values()}
    table = {int(i): _token(value) for i, value in (config.get("added_tokens_decoder") or {}).items()}
    known = set(map(repr, there.values()))
    added = [token for _, token in sorted(table.items()) if repr(token) not in known]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    own = [value for name, value in config.items() if name.endswith("_token") and name not in NAMED]
    named = [specials[name] for name in NAMED if specials.get(name)]
    if isinstance(extra, dict):
        own, extra = [*own, *extra.values()], []
    for value in [*named, *(value for value in own if isinstance(value, (str, dict))), *extra]:
        token = _token(value)
        if token.content not in there and token not in added:
            added.append(token)
    return added


def _token(value: Any) -> AddedToken:
    """A special token as a word, or as the table of properties that transformers writes."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{name: inner for name, inner in value.items() if name not in ("__type", "id")})


def _whole(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what transformers before 5 kept in files beside it."""
    if "added_tokens_decoder" in config:
        return config
    beside, more = folder / "special_tokens_map.json", folder / "added_tokens.json"
    if beside.is_file():
        table = read_json_object(beside)
        config = config | {k: {**v, "special": True} if isinstance(v, dict) else v for k, v in table.items()}
    if more.is_file():
        words = {str(number): {"content": word, "special": False} for word, number in read_json_object(more).items()}
        config = config | {"added_tokens_decoder": words}
    return config


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
