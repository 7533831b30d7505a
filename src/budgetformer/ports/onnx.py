"""A trained model as an ONNX graph that chooses its units by itself: token ids in, logits and gates out.

The graph computes every unit and multiplies it by its gate, 0 or 1: the answers are the engine's, the time is that of a
dense model. Nothing here reads an ONNX file but the one that was just written, in a folder of our own.
"""

import contextlib
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from budgetformer import flops
from budgetformer.config import BudgetConfig
from budgetformer.encoder import EncoderLayer
from budgetformer.engine.engine import Engine, physical_cores
from budgetformer.engine.tuning import agreement, decided
from budgetformer.errors import BudgetFormerError, UsageError
from budgetformer.hf import BudgetFormerForSequenceClassification
from budgetformer.router import Router, allocate
from budgetformer.schedule import Schedule
from budgetformer.tokens import Tokens, tokenise

try:
    import onnx
    import onnxruntime
    import onnxscript
    from onnxruntime.quantization import QuantType, quantize_dynamic
except ImportError as error:
    raise UsageError(f"format onnx: {error.name} is not installed; pip install 'budgetformer[onnx]'") from None

OPSET = 20
GRAPH = "model.onnx"  # its weights lie beside it, in model.onnx.data
COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json")
BATCH = 32
NOTE = (
    "budget: a share of the units for each input, or one for all; 0, or left out, is what the model learned. "
    "Every row of attention_mask needs a 1."
)
FIRST_ONLY = " A second answer for unsure inputs is not in the graph."
OWN_ONLY = " The dense twin that answers at a budget of 1 is not in the graph: there, its own units do."


def export(
    folder: str | Path,
    into: str | Path,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    dtype: str = "fp32",
    min_agreement: float = 0.99,
) -> dict[str, Any]:
    """Write the model in `folder` as a folder that needs nothing of ours, and say how it was checked.

    into: a new folder. texts: what the graph is compared on with the engine in fp32, both with the learned budget and
    one answer a text. dtype: fp32, or int8 by onnxruntime's dynamic quantization of the encoder's large products.

    Raises:
        ModelFolderError: `folder` is no model of ours.
        BudgetFormerError: fewer than `min_agreement` of the texts get the engine's label.
    """
    into = Path(into)
    into.mkdir()
    engine = Engine.load(folder, dtype="fp32")
    graph = into / GRAPH
    model = BudgetFormerForSequenceClassification.from_pretrained(folder, use_safetensors=True)
    if dtype == "int8":
        _write_quantised(model, graph)
    else:
        write_graph(model, graph)
    onnx.checker.check_model(str(graph), full_check=True)
    found = compare(engine, session(graph), tokenise(engine.tokenizer, texts, pairs, max_length=engine.max_length))
    if found["agreement"] < min_agreement:
        raise BudgetFormerError(
            f"{dtype}: {100 * found['agreement']:.2f} % of {len(texts):,} texts keep their label, "
            f"{100 * min_agreement:g} % must, and nothing was written; "
            + ("use fp32, or lower --min-agreement" if dtype == "int8" else "lower --min-agreement, or report a bug")
        )
    for name in COPIED:
        shutil.copy(Path(folder) / name, into)
    report = {
        "format": "onnx",
        "dtype": dtype,
        "opset": OPSET,
        **found,
        "bytes": sum(path.stat().st_size for path in into.glob(f"{GRAPH}*")),
        "max_length": engine.max_length,
        "note": note_of(engine.weights.budget),
    }
    (into / "export.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def note_of(budget: BudgetConfig) -> str:
    """What a graph of a model with this budget does, and what of the model it leaves out."""
    return NOTE + FIRST_ONLY * (budget.cascade > 0) + OWN_ONLY * (budget.second == "twin")


def write_graph(model: BudgetFormerForSequenceClassification, path: Path) -> None:
    """Write a model as an ONNX graph, its weights in a second file beside it, whatever their size.

    Inputs: input_ids, attention_mask and, where the model has several types, token_type_ids, int64 (batch, length);
    budget, float64 (1,) or (batch,), which may be left out. Outputs: logits, float32 (batch, labels); gates, uint8
    (batch, layer, head); blocks, uint8 (batch, layer, block), where they have a budget.
    """
    graph = Graph(model).eval()
    batch, length = Dim("batch", min=1), Dim("length", min=1, max=model.config.max_positions)
    names = ("input_ids", "attention_mask", *(["token_type_ids"] if graph.several_types else []))
    inputs = {name: torch.ones(2, 3, dtype=torch.long) for name in names}  # not one tensor: it would be one input
    shapes: dict[str, Any] = {name: {0: batch, 1: length} for name in inputs}
    inputs["budget"], shapes["budget"] = torch.zeros(1, dtype=torch.float64), {0: Dim("budgets", min=1)}
    outputs = ["logits", "gates", *(["blocks"] if graph.encoder.budget.blocks > 1 else [])]
    with _quietly():
        program = torch.onnx.export(
            graph,
            kwargs=inputs,
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=shapes,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
            custom_translation_table={torch.ops.aten.sort.stable: _sort},
        )
    assert program is not None
    # An input that is an initializer too has a default.
    budget = next(value for value in program.model.graph.inputs if value.name == "budget")
    budget.const_value = onnxscript.ir.tensor(np.zeros(1), name="budget")
    program.model.graph.register_initializer(budget)
    for node in program.model.graph:
        node.metadata_props.clear()  # traces of the exporting program, with this machine's paths
    program.model.metadata_props["budgetformer"] = note_of(model.config.budget_config)
    program.save(path, external_data=True)


class Graph(nn.Module):
    """The model as one computation without a branch: every unit runs, gates decide. It can be exported, not called."""

    heads_steps: Tensor
    heads_counts: Tensor
    blocks_steps: Tensor
    blocks_counts: Tensor

    def __init__(self, model: BudgetFormerForSequenceClassification):
        super().__init__()
        self.encoder = model.budgetformer.encoder
        self.classifier = model.classifier
        self.layers = cast("list[EncoderLayer]", list(self.encoder.layers))
        self.several_types = model.config.token_types > 1
        config, budget = self.encoder.config, self.encoder.budget
        self.explore = Schedule(budget=budget).settled
        self._keep("heads", staircase(self.encoder.profile, config.num_heads, budget.min_units))
        if budget.blocks > 1:
            self._keep("blocks", staircase(self.encoder.block_profile, budget.blocks, budget.min_units))

    def _keep(self, kind: str, stairs: tuple[Tensor, Tensor]) -> None:
        self.register_buffer(f"{kind}_steps", stairs[0])
        self.register_buffer(f"{kind}_counts", stairs[1])

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, budget: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """As `write_graph` describes."""
        keep = attention_mask.bool()
        # One budget for all or one for each: torch's exporter wants to know which, ONNX's own operator does not.
        size = torch.onnx.ops.symbolic("Shape", [input_ids], {"end": 1}, dtype=torch.int64, shape=(1,))
        budget = torch.onnx.ops.symbolic("Expand", [budget, size], dtype=torch.float64, shape=(input_ids.shape[0],))
        named = (budget > 0)[:, None]
        heads, blocks = self._counts(budget.clamp(1e-6, 1.0), keep.sum(1))
        x = self.encoder.embeddings(input_ids, keep, token_type_ids)
        gates, block_gates = [], []
        for i, layer in enumerate(self.layers):
            inner = layer.attention_norm(x) if layer.pre else x
            gates.append(self._choose(layer.attention.router, inner, keep, heads[:, i], named))
            x = x + layer.attention.attend(inner, keep=keep, gates=gates[-1]).output
            x = x if layer.pre else layer.attention_norm(x)
            inner = layer.feed_forward_norm(x) if layer.pre else x
            if blocks is not None and layer.feed_forward.router is not None:
                block_gates.append(self._choose(layer.feed_forward.router, inner, keep, blocks[:, i], named))
            x = x + layer.feed_forward(inner, gates=block_gates[-1] if block_gates else None)[0]
            x = x if layer.pre else layer.feed_forward_norm(x)
        x = x if self.encoder.norm is None else self.encoder.norm(x)
        chosen = [torch.stack(kind, dim=1).to(torch.uint8) for kind in (gates, block_gates) if kind]
        return self.classifier(x, keep), *chosen

    def _counts(self, budget: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """`Encoder.counts` by look-up."""
        if self.encoder.budget.blocks == 1:
            return look_up(budget, self.heads_steps, self.heads_counts), None
        learned = torch.stack([self.encoder.profile.mean(), self.encoder.block_profile.mean()])
        share = shares_of(budget, learned, torch.stack(flops.layer(tokens, self.encoder.config), dim=1))
        return (
            look_up(share[:, 0], self.heads_steps, self.heads_counts),
            look_up(share[:, 1], self.blocks_steps, self.blocks_counts),
        )

    def _choose(self, router: Router, x: Tensor, keep: Tensor, count: Tensor, named: Tensor) -> Tensor:
        """Gates (batch, unit): by the named budget where there is one, else as learned."""
        with torch.no_grad():  # routers then leave out what they compute for gradients alone; attention keeps to masks
            chosen = router(x, keep, explore=self.explore, count=count).chosen
            learned = router(x, keep, explore=self.explore).chosen | (not self.encoder.budget.routes)
        return (named & chosen) | (~named & learned)


def staircase(profile: Tensor, units: int, min_units: int) -> tuple[Tensor, Tensor]:
    """`router.allocate` as a table: it is constant in the budget between steps, and a graph can look it up.

    Returns:
        The budgets at which it changes, float64 (step,), and its rows before the first and from each on (1 + step,
        layer).
    """

    def rows(budget: Tensor) -> Tensor:
        return allocate(budget, profile, units, min_units)

    grid = torch.linspace(1e-9, 1.0, 4097, dtype=torch.float64)
    tiny = 1e-12  # on a step itself the last bits of a sum decide, and they depend on its neighbours in the batch
    found: list[Tensor] = []
    low, high = grid[:-1], grid[1:]
    while True:
        differ = (rows(low) != rows(high)).any(1)
        low, high = low[differ], high[differ]
        if not len(low):
            break
        before, after, first = low, high, rows(low)
        for _ in range(64):  # down to two neighbouring numbers
            middle = (before + after) / 2
            same = (rows(middle) == first).all(1)
            before, after = torch.where(same, middle, before), torch.where(same, after, middle)
        found.append(after)
        low = after + tiny  # there may be more than one step between two points of the grid
    steps = torch.cat(found).sort().values if found else grid[:0]
    return steps, rows(torch.cat([grid[:1], steps + tiny]))


def look_up(budget: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
    """Units per layer (batch, layer) of each budget (batch,)."""
    return counts[(budget[:, None] >= steps).sum(1)]


def shares_of(budget: Tensor, learned: Tensor, costs: Tensor) -> Tensor:
    """`router.shares_of` in closed form: of two kinds, the shift is the root of a quadratic equation.

    With odds a, b of the learned shares, costs p + q = 1 and v = exp(-shift): p a / (a + v) + q b / (b + v) = budget.
    """
    learned = learned.double().clamp(1e-3, 1 - 1e-3)
    odds, costs, budget = learned / (1 - learned), costs / costs.sum(1, keepdim=True), budget[:, None]
    product = odds.prod()
    half = (budget * odds.sum() - (costs * odds).sum(1, keepdim=True)) / 2
    v = ((half * half + budget * (1 - budget) * product).sqrt() - half) / budget
    return odds / (odds + v)


def session(path: Path) -> onnxruntime.InferenceSession:
    """A graph ready to run on the CPU, one thread for each physical core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = physical_cores()
    options.log_severity_level = 3  # that an input has a default is no news
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(graph: onnxruntime.InferenceSession, tokens: Sequence[Tokens], **inputs: np.ndarray) -> list[np.ndarray]:
    """The outputs for tokenised texts, padded to the longest of them."""
    longest = max(map(len, tokens))
    fed = {name: np.zeros((len(tokens), longest), np.int64) for name in ("input_ids", "attention_mask")}
    types = np.zeros_like(fed["input_ids"])
    for row, one in enumerate(tokens):
        fed["input_ids"][row, : len(one)] = one.ids
        fed["attention_mask"][row, : len(one)] = 1
        types[row, : len(one)] = 0 if one.types is None else one.types
    if any(asked.name == "token_type_ids" for asked in graph.get_inputs()):
        fed["token_type_ids"] = types
    return [np.asarray(output) for output in graph.run(None, {**fed, **inputs})]


def compare(engine: Engine, graph: onnxruntime.InferenceSession, tokens: Sequence[Tokens]) -> dict[str, Any]:
    """How far a graph's answers are from the engine's: share of equal labels, largest difference of a logit, share of
    texts whose units are the same.
    """
    exact = engine.forward(tokens, margin=0.0)
    parts = [run(graph, tokens[first : first + BATCH]) for first in range(0, len(tokens), BATCH)]
    logits, *units = (np.concatenate(outputs) for outputs in zip(*parts, strict=True))
    known = [exact.gates] if exact.blocks is None else [exact.gates, exact.blocks]
    same = np.all([(a == b).all((1, 2)) for a, b in zip(units, known, strict=True)], axis=0)
    return {
        "texts": len(tokens),
        "agreement": agreement(decided(logits, engine.multi_label), decided(exact.logits, engine.multi_label)),
        "same_units": float(same.mean()),
        "largest_difference": float(np.abs(logits - exact.logits).max()),
    }


def _write_quantised(model: BudgetFormerForSequenceClassification, path: Path) -> None:
    """The encoder's products in int8, their inputs too.

    Routers and classifier stay in full precision: a rounded score would choose other heads. They alone read one vector
    an input, which makes them Gemm; the quantiser turns Gemm into MatMul before it looks at names.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as aside:
        whole = Path(aside) / path.name
        write_graph(model, whole)
        nodes = onnx.load(whole, load_external_data=False).graph.node
        with _quietly():
            quantize_dynamic(
                whole,
                path,
                op_types_to_quantize=["MatMul"],
                nodes_to_exclude=[f"{node.name}_MatMul" for node in nodes if node.op_type == "Gemm"],
                per_channel=True,
                weight_type=QuantType.QInt8,
                use_external_data_format=True,
            )


def _sort(self, stable: bool = True, dim: int = -1, descending: bool = False):
    """torch's stable sort in ONNX, whose TopK too puts the lower index first where values are equal."""
    op: Any = onnxscript.opset20
    return op.TopK(self, op.Gather(op.Shape(self), op.Constant(value_ints=[dim])), axis=dim, largest=int(descending))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What exporter and quantiser say of axes, modes and libraries that are not there is for their developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
