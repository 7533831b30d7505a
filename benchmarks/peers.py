"""The engines that ours is compared with, one class each behind one small interface.

A peer turns a padded batch into what it reads (`feed`, not timed) and that into logits (`logits`, timed). Everything a
peer needs is made once from the same weights and kept in the model's home. A peer that is not installed, or that does
not run here, is a line that says so and nothing more.
"""

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from inputs import BATCH, Inputs, Padded, pad_sorted
from models import BenchModel, cached

Call = Callable[[], np.ndarray]


class Peer(ABC):
    """name and precision: as the table says them. threads: how many it may use."""

    name: str
    precision: str

    def __init__(self, model: BenchModel, threads: int):
        self.model = model
        self.threads = threads

    @abstractmethod
    def feed(self, batch: Padded) -> Any:
        """A batch as this peer reads it."""

    @abstractmethod
    def logits(self, fed: Any) -> np.ndarray:
        """Logits (batch, labels)."""

    def settle(self, inputs: Inputs) -> None:
        """Choose among several forms of the same model the one that is fastest on these inputs; most have one."""
        return None

    def prepare(self, inputs: Inputs) -> Call:
        """Inputs, in batches of their own, as a call that gives logits (inputs, labels) in their order."""
        batches = inputs.padded()
        fed = [self.feed(batch) for batch in batches]
        order = np.argsort(np.concatenate([batch.rows for batch in batches]))

        def call() -> np.ndarray:
            return np.concatenate([self.logits(one) for one in fed])[order]

        return call

    def prepare_texts(self, texts: Sequence[str]) -> Callable[[], list[str]]:
        """Texts as a call that gives labels: tokenised together, sorted by length, padded in batches."""
        tokenizer, names, longest = self.model.tokenizer, self.model.labels, self.model.config.max_positions

        def call() -> list[str]:
            ids = [_cut(one.ids, longest) for one in tokenizer.encode_batch(list(texts))]
            answers = np.zeros(len(ids), np.int64)
            for batch in pad_sorted(ids, BATCH):
                answers[batch.rows] = self.logits(self.feed(batch)).argmax(1)
            return [names[answer] for answer in answers]

        return call


def _cut(ids: list[int], longest: int) -> list[int]:
    return ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]]


class TorchSdpa(Peer):
    """Plain torch with scaled_dot_product_attention: the measure of all ratios."""

    name = "torch SDPA"

    def __init__(self, model: BenchModel, threads: int, dtype: torch.dtype = torch.float32, compiled: bool = False):
        super().__init__(model, threads)
        self.precision = "fp32" if dtype == torch.float32 else "bf16"
        self.name = "torch compile" if compiled else "torch SDPA"
        self.module: Any = model.clean().to(dtype)
        if compiled:
            self.module = torch.compile(self.module, dynamic=True, options={"freezing": True})

    def feed(self, batch: Padded) -> Any:
        """Ids, and a mask where something is padded."""
        return torch.as_tensor(batch.ids), None if batch.full else torch.as_tensor(batch.mask).bool()

    @torch.inference_mode()
    def logits(self, fed: Any) -> np.ndarray:
        """Logits (batch, labels)."""
        torch.set_num_threads(self.threads)
        return self.module(*fed).float().numpy()


class HuggingFace(Peer):
    """transformers' BertModel with SDPA attention."""

    name, precision = "transformers", "fp32"

    def __init__(self, model: BenchModel, threads: int):
        super().__init__(model, threads)
        self.module = WithClassifier(model.hugging_face("sdpa"), model.classifier())

    def feed(self, batch: Padded) -> Any:
        """What its tokenizer would give."""
        ids = torch.as_tensor(batch.ids)
        return ids, torch.as_tensor(batch.mask), torch.zeros_like(ids)

    @torch.inference_mode()
    def logits(self, fed: Any) -> np.ndarray:
        """Logits (batch, labels)."""
        torch.set_num_threads(self.threads)
        return self.module(*fed).numpy()


class WithClassifier(nn.Module):
    """transformers' encoder, the mean over real tokens, the classifier: also what is exported."""

    def __init__(self, bert: Any, classifier: nn.Linear):
        super().__init__()
        self.bert, self.classifier = bert, classifier
        self.requires_grad_(False).eval()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        """Logits (batch, labels)."""
        hidden = self.bert(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.classifier((hidden * weight).sum(1) / weight.sum(1))


NAMES = ("input_ids", "attention_mask", "token_type_ids")


def export_onnx(model: BenchModel) -> Path:
    """The classifier as ONNX, as torch writes it: the path of the file."""

    def make(folder: Path) -> None:
        import onnx  # noqa: F401  an export that cannot be looked at ends here

        module = WithClassifier(model.hugging_face("eager"), model.classifier())
        ids = torch.randint(1000, 20000, (2, 16))
        axes = {name: {0: "batch", 1: "token"} for name in NAMES} | {"logits": {0: "batch"}}
        torch.onnx.export(
            module,
            (ids, torch.ones_like(ids), torch.zeros_like(ids)),
            str(folder / "model.onnx"),
            input_names=list(NAMES),
            output_names=["logits"],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )

    return cached(model.home / f"onnx-{version('torch')}", make) / "model.onnx"


class OnnxRuntime(Peer):
    """ONNX Runtime, fp32 or dynamic int8: the better of the raw export and of its optimizer for transformers."""

    name = "ONNX Runtime"

    def __init__(self, model: BenchModel, threads: int, precision: str = "fp32"):
        super().__init__(model, threads)
        import onnxruntime

        self.precision = precision
        raw, home = export_onnx(model), model.home / f"onnxruntime-{onnxruntime.__version__}"
        optimised = cached(home / "optimised", lambda folder: _optimise(raw, folder, model)) / "model.onnx"
        files = [raw, optimised]
        if precision == "int8":
            makes = [
                (home / f"int8-{name}", lambda folder, file=file: _quantise(file, folder))
                for name, file in (("raw", raw), ("optimised", optimised))
            ]
            files = [cached(folder, make) / "model.onnx" for folder, make in makes]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.sessions = [
            onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"]) for file in files
        ]
        self.session = self.sessions[0]

    def feed(self, batch: Padded) -> Any:
        """By name, in the integers that each form asks for."""
        arrays = (batch.ids, batch.mask, np.zeros_like(batch.ids))
        values = dict(zip(NAMES, arrays, strict=True))
        kinds = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}
        return {
            id(session): {one.name: values[one.name].astype(kinds[one.type]) for one in session.get_inputs()}
            for session in self.sessions
        }

    def settle(self, inputs: Inputs) -> None:
        """Each form runs a batch of middle length, once to warm up and then for the better of two times."""
        batches = inputs.padded()
        seconds, middle = {}, self.feed(batches[len(batches) // 2])
        for session in self.sessions:
            self.session = session
            times = []
            for _ in range(3):
                start = time.process_time()
                self.logits(middle)
                times.append(time.process_time() - start)
            seconds[session] = min(times[1:])
        self.session = min(seconds, key=lambda session: seconds[session])

    def logits(self, fed: Any) -> np.ndarray:
        """Logits (batch, labels)."""
        return self.session.run(None, fed[id(self.session)])[0]


def _optimise(raw: Path, folder: Path, model: BenchModel) -> None:
    from onnxruntime.transformers import optimizer

    heads, width = model.config.num_heads, model.config.hidden_size
    made = optimizer.optimize_model(str(raw), model_type="bert", num_heads=heads, hidden_size=width, opt_level=1)
    made.save_model_to_file(str(folder / "model.onnx"))


def _quantise(file: Path, folder: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # The optimizer's own operators have no shapes that onnx could infer: the type is then float (1).
    options = {"DefaultTensorType": 1}
    quantize_dynamic(str(file), str(folder / "model.onnx"), weight_type=QuantType.QInt8, extra_options=options)


class OpenVino(Peer):
    """OpenVINO from the same ONNX file, f32 or bf16."""

    name = "OpenVINO"

    def __init__(self, model: BenchModel, threads: int, precision: str = "fp32"):
        super().__init__(model, threads)
        import openvino

        self.precision = precision
        raw = export_onnx(model)

        def make(folder: Path) -> None:
            openvino.save_model(openvino.convert_model(str(raw)), folder / "model.xml", compress_to_fp16=False)

        file = cached(model.home / f"openvino-{version('openvino')}", make) / "model.xml"
        hints = {
            "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[precision],
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }
        self.request = openvino.Core().compile_model(str(file), "CPU", hints).create_infer_request()

    def feed(self, batch: Padded) -> Any:
        """By name."""
        return dict(zip(NAMES, (batch.ids, batch.mask, np.zeros_like(batch.ids)), strict=True))

    def logits(self, fed: Any) -> np.ndarray:
        """Logits (batch, labels), copied: the request's own memory is used again."""
        return np.array(self.request.infer(fed)["logits"])


class CTranslate2(Peer):
    """CTranslate2's encoder, f32 or int8; the mean and the classifier on top are numpy's."""

    name = "CTranslate2"

    def __init__(self, model: BenchModel, threads: int, precision: str = "fp32"):
        super().__init__(model, threads)
        import ctranslate2

        self.precision = precision
        folder = cached(
            model.home / f"ctranslate2-{ctranslate2.__version__}", lambda made: _to_ctranslate2(model, made)
        )
        kind = {"fp32": "float32", "int8": "int8"}[precision]
        self.view = ctranslate2.StorageView.from_array
        self.encoder = ctranslate2.Encoder(str(folder), device="cpu", compute_type=kind, intra_threads=threads)

    def feed(self, batch: Padded) -> Any:
        """Dense int32 ids and lengths in its own arrays, and each token's share in the mean."""
        ids, lengths = batch.ids.astype(np.int32), batch.lengths.astype(np.int32)
        share = (batch.mask / batch.lengths[:, None]).astype(np.float32)
        # The views do not own the arrays they look at.
        return self.view(ids), self.view(lengths), share[:, None], (ids, lengths)

    def logits(self, fed: Any) -> np.ndarray:
        """Logits (batch, labels)."""
        ids, lengths, share, _ = fed
        hidden = np.array(self.encoder.forward_batch(ids, lengths).last_hidden_state, copy=False)
        return np.matmul(share, hidden)[:, 0] @ self.model.weight.T + self.model.bias


def _to_ctranslate2(model: BenchModel, folder: Path) -> None:
    import json

    from ctranslate2.converters import TransformersConverter

    source = folder / "source"
    shutil.copytree(model.dense, source)
    # transformers 5 no longer writes what the converter asserts.
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["position_embedding_type"] = "absolute"
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    TransformersConverter(str(source)).convert(str(folder / "made"))
    for file in (folder / "made").iterdir():
        file.rename(folder / file.name)
    shutil.rmtree(source)
    (folder / "made").rmdir()


# fmt: off
PEERS: tuple[tuple[str, str, Callable[[BenchModel, int], Peer]], ...] = (
    ("torch SDPA",    "fp32", TorchSdpa),
    ("transformers",  "fp32", HuggingFace),
    ("ONNX Runtime",  "fp32", OnnxRuntime),
    ("OpenVINO",      "fp32", OpenVino),
    ("CTranslate2",   "fp32", CTranslate2),
    ("torch SDPA",    "bf16", lambda model, threads: TorchSdpa(model, threads, torch.bfloat16)),
    ("OpenVINO",      "bf16", lambda model, threads: OpenVino(model, threads, "bf16")),
    ("ONNX Runtime",  "int8", lambda model, threads: OnnxRuntime(model, threads, "int8")),
    ("CTranslate2",   "int8", lambda model, threads: CTranslate2(model, threads, "int8")),
)
COMPILED = ("torch compile", "fp32", lambda model, threads: TorchSdpa(model, threads, compiled=True))
# fmt: on


def export_all(model: BenchModel) -> None:
    """Make what the peers need, once for the versions that are installed; a peer that fails says why when it runs."""
    names = ("torch", "transformers", "onnxruntime", "openvino", "ctranslate2")
    versions = "-".join(_version(name) for name in names)

    def make(folder: Path) -> None:
        for _, _, kind in PEERS:
            with suppress(Exception):
                kind(model, 1)

    cached(model.home / f"exported-{versions}", make)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
