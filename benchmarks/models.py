"""The models that are measured, each as a Hugging Face model for the peers and as a folder of ours.

minilm: the real all-MiniLM-L6-v2 (6 layers, width 384). base: BERT-base's shape (12 layers, width 768) with random
weights. Any other name is a model folder of ours, trained or converted; the peers then run its dense weights.

On top of minilm and base sits a linear classifier into the demo's intents whose classes are means of the encoder's
own vectors, so that labels mean something and a loss of precision can be seen in them.
"""

import hashlib
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.data import load_split
from budgetformer.errors import UsageError
from budgetformer.settings import demo_encoder
from clean import CleanClassifier
from inputs import pad_sorted

NAMES = ("minilm", "base")
TEXTS_PER_CLASS = 8
BASE_SEED = 0


@dataclass(frozen=True)
class BenchModel:
    """name: as asked for. home: the folder of all that is made of it. dense: the encoder as transformers saves it.

    folder: the model folder of ours. weight (labels, width) and bias (labels,): the classifier over the mean.
    trained: its routers have learned to choose.
    """

    name: str
    home: Path
    dense: Path
    folder: Path
    labels: list[str]
    weight: np.ndarray
    bias: np.ndarray
    config: EncoderConfig
    trained: bool

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer alone, without transformers; it neither pads nor cuts."""
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def hugging_face(self, attention: str = "sdpa") -> Any:
        """The encoder as transformers' BertModel, fp32."""
        from transformers import BertModel

        # The pooler is loaded, since one converter asks for it; nothing here reads what it gives.
        return BertModel.from_pretrained(self.dense, attn_implementation=attention, dtype=torch.float32).eval()

    def classifier(self) -> nn.Linear:
        """The linear layer over the mean of the hidden states."""
        return linear(self.weight, self.bias)

    def clean(self) -> CleanClassifier:
        """Encoder and classifier in plain torch."""
        return CleanClassifier(self.hugging_face(), self.classifier())

    @property
    def layer_weights(self) -> int:
        """How many numbers the layers' matrices hold: what a dense pass over a batch reads at least once."""
        width, inner = self.config.hidden_size, self.config.intermediate_size
        return self.config.num_layers * (4 * width * width + 2 * width * inner)


def linear(weight: np.ndarray, bias: np.ndarray) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight))
        layer.bias.copy_(torch.as_tensor(bias))
    return layer.requires_grad_(False).eval()


def cached(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by `make` in another place first, so that one that is there is whole."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            with _quiet():
                make(aside)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn of much; whether an export is right shows in the column of equal labels."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def load(name: str, cache: Path) -> BenchModel:
    """The model of that name, made in `cache` if it is not there yet.

    Raises:
        UsageError: neither a name nor a folder of ours, or one that the peers cannot run.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if name in NAMES:
        return _named(name, cache)
    if not Path(name).is_dir():
        raise UsageError(f"model is {name!r}; give {', '.join(NAMES)}, or a model folder")
    return _from_folder(Path(name), cache)


def demo_texts(split: str) -> tuple[list[str], list[str]]:
    """Texts and labels of a split of the demo's data."""
    rows = load_split("demo", split)
    return list(rows.texts), [str(label) for label in rows.labels or ()]


def _named(name: str, cache: Path) -> BenchModel:
    home = cache / f"{name}-1"  # the number goes up when what is made here changes
    dense = cached(home / "dense", _save_minilm if name == "minilm" else _save_base)
    folder = cached(home / "ours", lambda folder: _save_ours(dense, folder))
    return _described(name, home, dense, folder, trained=False)


def _from_folder(source: Path, cache: Path) -> BenchModel:
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()[:12]
    home = cache / f"{source.resolve().name}-{digest}"
    dense = cached(home / "dense", lambda folder: _save_dense_of(source, folder))
    return _described(source.name, home, dense, source, trained=True)


def _described(name: str, home: Path, dense: Path, folder: Path, *, trained: bool) -> BenchModel:
    from safetensors.numpy import load_file

    from budgetformer.hf import BudgetFormerConfig

    config = BudgetFormerConfig.from_pretrained(folder)
    if config.pooling != "mean" or config.head_hidden is not None:
        raise UsageError(f"{folder}: the peers put one linear layer over the mean; this model's classifier is another")
    tensors = load_file(folder / "model.safetensors")
    names: Any = config.id2label
    return BenchModel(
        name=name,
        home=home,
        dense=dense,
        folder=folder,
        labels=[names[number] for number in sorted(names)],
        weight=tensors["classifier.out.weight"],
        bias=tensors["classifier.out.bias"],
        config=config.encoder_config,
        trained=trained and config.budget_config.routes,
    )


def _save_minilm(folder: Path) -> None:
    from transformers import BertModel

    source = demo_encoder()
    BertModel.from_pretrained(source, dtype=torch.float32).save_pretrained(folder)
    _copy_tokenizer(source, folder)


def _save_base(folder: Path) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(BASE_SEED)
    BertModel(BertConfig()).save_pretrained(folder)
    _copy_tokenizer(demo_encoder(), folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.model_max_length = 512  # all-MiniLM's own limit is 256; its positions and BERT's go to 512
    tokenizer.save_pretrained(folder)


def _save_ours(dense: Path, folder: Path) -> None:
    """The dense checkpoint as a folder of ours with a classifier into the demo's intents."""
    from transformers import AutoTokenizer, BertModel

    from budgetformer.convert import from_pretrained_encoder

    texts, labels = demo_texts("train")
    kept = _some_of_each(labels, TEXTS_PER_CLASS)
    classes = sorted({labels[row] for row in kept})
    tokenizer = AutoTokenizer.from_pretrained(dense)
    bert = BertModel.from_pretrained(dense, attn_implementation="sdpa", dtype=torch.float32).eval()
    weight, bias = _fit_means(bert, tokenizer, [texts[row] for row in kept], [labels[row] for row in kept], classes)
    # A target below 1 gives the folder routers, which start with all heads on.
    model = from_pretrained_encoder(dense, labels=classes, budget=BudgetConfig(target=0.25))
    with torch.no_grad():
        model.classifier.out.weight.copy_(torch.as_tensor(weight))
        model.classifier.out.bias.copy_(torch.as_tensor(bias))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _save_dense_of(source: Path, folder: Path) -> None:
    """The encoder of a folder of ours as transformers' BertModel, with all its heads."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    from budgetformer.convert import FAMILIES, to_theirs
    from budgetformer.predict import load_model

    model, _ = load_model(source)
    sizes = model.config.encoder_config
    family = FAMILIES["bert"]
    if sizes.norm != "post" or sizes.position_offset or not sizes.token_types or sizes.embedding_size:
        raise UsageError(f"{source}: not of BERT's layout, so the peers cannot run it")
    values = asdict(sizes)
    config = BertConfig(**{theirs: values[ours] for ours, theirs in family.sizes.items()})
    bert = BertModel(config)
    bert.load_state_dict(to_theirs(model.budgetformer.encoder.state_dict(), family, sizes), strict=False)
    bert.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _some_of_each(labels: Sequence[str], count: int) -> list[int]:
    seen: dict[str, int] = {}
    kept = []
    for row, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= count:
            kept.append(row)
    return kept


@torch.inference_mode()
def _fit_means(
    bert: Any, tokenizer: Any, texts: list[str], labels: list[str], classes: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest class mean, written as a linear layer: weight (classes, width), bias (classes,)."""
    rows = [tokenizer(text)["input_ids"] for text in texts]
    vectors = torch.zeros(len(texts), bert.config.hidden_size)
    for batch in pad_sorted(rows, 64):
        mask = torch.as_tensor(batch.mask)
        hidden = bert(input_ids=torch.as_tensor(batch.ids), attention_mask=mask).last_hidden_state
        vectors[torch.as_tensor(batch.rows)] = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    places = torch.tensor([classes.index(label) for label in labels])
    means = torch.stack([vectors[places == i].mean(0) for i in range(len(classes))])
    # |x - m|^2 without |x|^2; a shift by the mean of all leaves the distances alone and the numbers small.
    centre = vectors.mean(0)
    weight = means - centre
    return weight.numpy(), (-(weight @ centre) - weight.square().sum(1) / 2).numpy()


def describe(model: BenchModel) -> dict[str, Any]:
    """For the file: sizes, and where the weights came from."""
    weights = {"minilm": "all-MiniLM-L6-v2", "base": f"random, seed {BASE_SEED}"}.get(model.name, str(model.folder))
    return {"name": model.name, "weights": weights, "labels": len(model.labels), **asdict(model.config)}
