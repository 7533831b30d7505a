"""From settings to what training needs: rows of every split, label names, an encoder and its tokenizer."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.data import BadRow, Rows, load_split, read_rows, split_names
from budgetformer.data.labels import check_labels, label_names, match_labels
from budgetformer.errors import DataError, UsageError
from budgetformer.settings import TrainSettings, locate_model
from budgetformer.text import Encoded, encode

HELD_OUT = 0.2  # of the training rows, when there is nothing to test on
QUICK_ROWS = (1540, 770)  # training and test rows of a quick run


@dataclass(frozen=True)
class Splits:
    """Usable rows of each split, the names of the labels, what had to be left out, and texts without labels."""

    train: Rows
    validation: Rows | None
    test: Rows
    labels: list[str]
    bad: list[BadRow]
    unlabelled: Rows | None = None


def load_splits(settings: TrainSettings, echo: Callable[[str], None]) -> Splits:
    """Read and check everything before any work is done. DataError and UsageError as the readers raise them."""
    options: dict[str, Any] = {
        "text_column": settings.text_column,
        "text_pair_column": settings.text_pair_column,
        "label_column": settings.label_column,
        "encoding": settings.encoding,
        "delimiter": settings.delimiter,
        "label_separator": settings.label_separator,
    }
    validation = test = None
    if settings.data is not None:
        names = split_names(settings.data, encoding=settings.encoding, delimiter=settings.delimiter)
        if names and "train" not in names:
            raise DataError(f"{settings.data}: no split is called train, it has {', '.join(names)}; rename one")
        train = load_split(settings.data, "train", **options) if names else _read(settings.data, options)
        found = {name: load_split(settings.data, name, **options) for name in ("validation", "test") if name in names}
        validation, test = found.get("validation"), found.get("test")
    else:
        assert settings.train_file is not None  # the settings hold one of the two
        train = _read(settings.train_file, options)
    if settings.validation_file is not None:
        validation = _read(settings.validation_file, options)
    if settings.test_file is not None:
        test = _read(settings.test_file, options)
    unlabelled = _read_unlabelled(settings, options, train)
    echo("columns: " + ", ".join(f"{role}={name}" for role, name in train.columns.items()))
    every = ((train, "training"), (validation, "validation"), (test, "test"), (unlabelled, "unlabelled"))
    bad = [row for rows, _ in every if rows is not None for row in rows.bad]
    for rows, name in every:
        if rows is not None and rows.bad:
            first = rows.bad[0]
            echo(
                f"{len(rows.bad)} of {len(rows)} {name} rows are left out (first: line {first.line}, {first.reason}); "
                "the whole list is bad_rows.jsonl"
            )
    train = train.good()
    validation = None if validation is None else validation.good()
    test = None if test is None else test.good()
    rng = random.Random(settings.seed)
    separator = settings.label_separator if settings.multi_label else None
    if test is None:
        train, test = _hold_out(train, HELD_OUT, rng, separator)
        echo(f"no test rows given: {len(test)} training rows are held out for the table at the end")
    if validation is None and settings.patience is not None:
        train, validation = _hold_out(train, 0.1, rng, separator)
        echo(f"no validation rows given: {len(validation)} training rows are held out to stop early by")
    labels = label_names(train.labels or [], label_separator=separator)
    check_labels(labels, multi_label=settings.multi_label)
    if settings.quick:
        train, test = _sample(train, QUICK_ROWS[0], rng), _sample(test, QUICK_ROWS[1], rng)
    if settings.limit is not None:
        train = _sample(train, settings.limit, rng)
    for rows in (validation, test):
        if rows is not None:  # an unknown label is found now, not after training
            _numbers(rows, labels, separator)
    return Splits(train, validation, test, labels, bad, None if unlabelled is None else unlabelled.good())


def encode_rows(rows: Rows, tokenizer: Any, labels: list[str] | None, settings: TrainSettings) -> Encoded:
    """Rows as token ids with label numbers; labels None: without them."""
    separator = settings.label_separator if settings.multi_label else None
    numbers = None if labels is None else _numbers(rows, labels, separator)
    texts = [text for text in rows.texts if text is not None]
    pairs = None if rows.pairs is None else [pair or "" for pair in rows.pairs]
    return encode(tokenizer, texts, pairs, numbers, max_length=settings.max_length)


def load_encoder(settings: TrainSettings, splits: Splits, *, budget: BudgetConfig) -> tuple[Any, Any]:
    """The model before training, all heads on, and its tokenizer."""
    from transformers import AutoTokenizer

    source = locate_model(settings.model)
    problem = "multi_label_classification" if settings.multi_label else "single_label_classification"
    if source.startswith("scratch:"):
        return _from_scratch(source.removeprefix("scratch:"), settings, splits, budget, problem)
    from budgetformer.convert import compare_token_ids, from_pretrained_encoder

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        compare_token_ids(source, tokenizer)
        model = from_pretrained_encoder(
            source, labels=splits.labels, budget=budget, pooling=settings.pooling, problem_type=problem
        )
    except OSError as error:  # what transformers raises for a name it cannot find is long, and speaks of tokens
        raise UsageError(
            f"model={settings.model}: cannot be loaded as a folder or from the hub ({type(error).__name__}); check the "
            "name, or give the folder of a checkpoint with its tokenizer"
        ) from error
    return model, tokenizer


def _from_scratch(preset: str, settings: TrainSettings, splits: Splits, budget: BudgetConfig, problem: Any):
    import torch

    from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification

    tokenizer = _kept_tokenizer(settings)
    if tokenizer is None:
        tokenizer = train_tokenizer([text for text in splits.train.texts if text], splits.train.pairs)
    sizes = EncoderConfig.preset(preset, vocab_size=len(tokenizer), max_positions=settings.max_length)
    torch.manual_seed(settings.seed)
    config = BudgetFormerConfig(
        **vars(sizes),
        budget=vars(budget).copy(),
        pooling=settings.pooling,
        problem_type=problem,
        id2label=dict(enumerate(splits.labels)),
        label2id={name: i for i, name in enumerate(splits.labels)},
    )
    return BudgetFormerForSequenceClassification(config), tokenizer


def _kept_tokenizer(settings: TrainSettings) -> Any:
    """The tokenizer of the given twin, or of the run that is resumed: learned anew, it could number words otherwise."""
    home = settings.dense or (settings.output_dir if settings.resume is not None else None)
    if home is None or not (Path(home) / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(home, local_files_only=True, trust_remote_code=False)


def train_tokenizer(texts: list[str], pairs: list[str | None] | None = None, *, vocab_size: int = 30522) -> Any:
    """A byte-level BPE tokenizer learned from the training texts: lower case, [CLS] a [SEP] b [SEP], no unknown words.

    Not WordPiece: its trainer numbers the letters within words in the order of a hash table, so two runs on the same
    texts would disagree.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = texts if pairs is None else [*texts, *[pair for pair in pairs if pair]]
    backend.train_from_iterator(corpus, trainer=trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", special.index("[CLS]")), ("[SEP]", special.index("[SEP]"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _read(source: str, options: dict[str, Any]) -> Rows:
    return read_rows(source, require_labels=True, **options)


def _read_unlabelled(settings: TrainSettings, options: dict[str, Any], train: Rows) -> Rows | None:
    """Texts for the twin to answer; labels that they may have are not looked at."""
    source = settings.unlabelled_file
    if source is None:
        return None
    unnamed: dict[str, Any] = options | {"label_column": None}
    rows = read_rows(source, require_labels=False, **unnamed)
    if not len(rows.good()):
        raise DataError(f"{source}: no row has a text; leave out --unlabelled-file, or name the --text-column")
    if (rows.pairs is None) != (train.pairs is None):
        kinds = ("single texts", "pairs") if rows.pairs is None else ("pairs", "single texts")
        raise DataError(f"{source}: holds {kinds[0]}, and the training rows are {kinds[1]}; give the same kind")
    return rows


def _numbers(rows: Rows, labels: list[str], separator: str | None) -> list[Any]:
    where = {"lines": rows.lines, "source": rows.source}
    if separator is None:
        return match_labels(rows.labels or [], labels, **where)
    return match_labels(rows.labels or [], labels, label_separator=separator, **where)


def _take(rows: Rows, kept: list[int]) -> Rows:
    def pick(values: list | None) -> list | None:
        return None if values is None else [values[i] for i in kept]

    return replace(
        rows,
        texts=pick(rows.texts),
        pairs=pick(rows.pairs),
        labels=pick(rows.labels),
        ids=pick(rows.ids),
        lines=pick(rows.lines),
    )


def _sample(rows: Rows, count: int, rng: random.Random) -> Rows:
    return rows if len(rows) <= count else _take(rows, sorted(rng.sample(range(len(rows)), count)))


def _hold_out(rows: Rows, share: float, rng: random.Random, separator: str | None) -> tuple[Rows, Rows]:
    """What is left, and a random share; every label keeps a row on the left side, where it is learned."""
    order = range(len(rows))
    held = set(rng.sample(order, max(1, round(share * len(rows)))))
    names = [set(label_names([label], label_separator=separator)) for label in rows.labels or []]
    learned = set[str]().union(*(names[i] for i in order if i not in held))
    for i in sorted(held):
        if not names[i] <= learned:
            held.remove(i)
            learned |= names[i]
    if not held or len(held) == len(rows):
        raise DataError(f"{rows.source}: {len(rows)} usable rows are too few to hold some out; give --test-file")
    return _take(rows, [i for i in order if i not in held]), _take(rows, [i for i in order if i in held])


def class_weights(settings: TrainSettings, train: Encoded, labels: list[str]) -> list[float] | None:
    """A weight per label: none, balanced (rare classes weigh more, the mean row weighs 1), or from a JSON file."""
    import json

    import numpy as np

    if settings.class_weights is None:
        return None
    if settings.class_weights == "balanced":
        truth = np.asarray([item["labels"] for item in train.items])
        if truth.ndim == 2:  # several labels: how many texts lack it for each that has it
            having = truth.sum(0)
            return [float(w) for w in (len(truth) - having) / np.maximum(having, 1)]
        counts = np.bincount(truth, minlength=len(labels))
        return [float(w) for w in len(truth) / (len(labels) * np.maximum(counts, 1))]
    file = Path(settings.class_weights)
    try:
        given = json.loads(file.read_text("utf-8"))
        weights = {str(name): float(weight) for name, weight in given.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"class_weights={file}: is not a JSON object {{label: weight}}") from error
    unknown, missing = set(weights) - set(labels), set(labels) - set(weights)
    if unknown or missing:
        wrong = f"{sorted(unknown)[0]!r} is no label" if unknown else f"{sorted(missing)[0]!r} has no weight"
        raise UsageError(f"class_weights={file}: {wrong}; name each of {', '.join(labels[:10])} once")
    if min(weights.values()) < 0:
        raise UsageError(f"class_weights={file}: a weight is below 0; weights are 0 or more")
    return [weights[name] for name in labels]
