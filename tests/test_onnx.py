"""The ONNX graph chooses what the engine chooses, answers what it answers, and stands by itself."""

import json
import re
import shutil

import numpy as np
import onnx
import pytest
import torch

import tiny
from budgetformer import cli, router
from budgetformer.engine.engine import Engine
from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.ports import onnx as port
from budgetformer.tokens import Tokens
from engine_helpers import in_python

TEXTS = ["where is my card", "lost", "please top up the cash", "pay money back not", "is the card lost", "up"]
MODELS = {
    "blocks": {
        "intermediate_size": 160,
        "head_hidden": "tanh",
        "budget": {"scope": "heads+blocks", "ffn_blocks": 5, "view": "mean+first"},
    },
    "compact": {
        "norm": "pre",
        "pooling": "first",
        "token_types": 0,
        "position_offset": 2,
        "embedding_size": 20,
        "problem_type": "multi_label_classification",
        "kept_heads": [[0, 2, 5], [1, 3], [0, 1, 2, 3, 4, 5]],
        "budget": {"estimator": "top_p", "view": "mean+max", "min_units": 0},
    },
}


def make(folder, budget, **changes):
    """A model whose routers differ from input to input, with layers that spend unlike each other."""
    torch.manual_seed(4)
    words = tiny.tokenizer()
    sizes = dict(hidden_size=36, num_layers=3, num_heads=6, intermediate_size=50, max_positions=31)
    labels = {"id2label": dict(enumerate(tiny.LABELS)), "label2id": {name: i for i, name in enumerate(tiny.LABELS)}}
    settings = {**sizes, **labels, **changes, "vocab_size": len(words), "budget": {"target": 0.4, **budget}}
    config = BudgetFormerConfig(**settings)
    model = BudgetFormerForSequenceClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 1.0 if ".router." in name else 0.15)
        model.budgetformer.encoder.profile.copy_(torch.tensor([0.7, 0.4, 0.3]))
        if "ffn_blocks" in budget:
            model.budgetformer.encoder.block_profile.copy_(torch.tensor([0.5, 0.3, 0.2]))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    """A model folder, and the folder of its graph."""
    home = tmp_path_factory.mktemp(request.param)
    make(home / "model", **MODELS[request.param])
    port.export(home / "model", home / "graph", TEXTS)
    return home / "model", home / "graph"


def test_thirty_shapes_are_answered_as_by_the_engine(exported):
    model, graph = Engine.load(exported[0], dtype="fp32"), port.session(exported[1] / port.GRAPH)
    dice, e = np.random.default_rng(3), model.weights.encoder
    for batch in (1, 2, 3, 7, 13):
        for length in (1, 2, 3, 8, 17, 31):
            lengths = [length, *dice.integers(1, length + 1, batch - 1)]
            tokens = [
                Tokens(
                    ids=dice.integers(1, e.vocab_size, n).tolist(),
                    types=dice.integers(0, 2, n).tolist() if e.token_types else None,
                    truncated=False,
                )
                for n in lengths
            ]
            each = dice.uniform(0.02, 1, batch)
            for given, named in ((None, None), (np.array([0.37]), 0.37), (np.ones(1), 1.0), (each, each)):
                expected = model.forward(tokens, budget=named, margin=0.0)
                logits, gates, *blocks = port.run(graph, tokens, **({} if given is None else {"budget": given}))
                np.testing.assert_array_equal(gates, expected.gates)
                if expected.blocks is not None:
                    np.testing.assert_array_equal(blocks[0], expected.blocks)
                np.testing.assert_allclose(logits, expected.logits, atol=1e-5, rtol=0)


def test_a_budget_for_some_inputs_and_none_for_others(exported):
    model, graph = Engine.load(exported[0], dtype="fp32"), port.session(exported[1] / port.GRAPH)
    tokens = [Tokens(ids=ids, types=None, truncated=False) for ids in ([5, 6, 7], [5, 6, 7], [9, 8, 7, 6])]
    learned, named = model.forward(tokens, margin=0.0).gates, model.forward(tokens, budget=0.3).gates
    gates = port.run(graph, tokens, budget=np.array([0.0, 0.3, 0.0]))[1]
    np.testing.assert_array_equal(gates, [learned[0], named[1], learned[2]])
    assert not np.array_equal(learned[0], named[0])


def test_the_file_is_valid_whole_and_names_no_machine(exported):
    model, folder = exported
    path = folder / port.GRAPH
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(path, load_external_data=False)
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", port.OPSET)]
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.graph.input, *graph.graph.output)
    }
    assert axes["input_ids"] == axes["attention_mask"] == ["batch", "length"]
    assert axes["budget"] == ["budgets"]
    assert axes["logits"] == ["batch", 3]
    assert axes["gates"] == ["batch", 3, 6]
    assert ("token_type_ids" in axes) == ("blocks" in axes) == ("blocks" in str(model))
    assert b"/home/" not in path.read_bytes()
    assert b"site-packages" not in path.read_bytes()
    # Large tensors lie beside the file, in one other.
    outside = [tensor for tensor in graph.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    places = {entry.value for tensor in outside for entry in tensor.external_data if entry.key == "location"}
    assert places == {f"{port.GRAPH}.data"}
    inside = [tensor for tensor in graph.graph.initializer if tensor not in outside]
    assert max(np.prod(tensor.dims) for tensor in inside) < 1000
    files = {"config.json", "export.json", "tokenizer.json", "tokenizer_config.json", "model.onnx", "model.onnx.data"}
    assert {path.name for path in folder.iterdir()} == files


ALONE = """
import json, sys
import numpy as np, onnxruntime
from tokenizers import Tokenizer
folder, text = sys.argv[1:]
tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
names = json.load(open(f"{folder}/config.json"))["id2label"]
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options)
encoded = tokenizer.encode(text)
inputs = {"input_ids": encoded.ids, "attention_mask": encoded.attention_mask, "token_type_ids": encoded.type_ids}
asked = {value.name for value in session.get_inputs()}
logits, gates, *_ = session.run(None, {name: np.array([ids]) for name, ids in inputs.items() if name in asked})
assert not {"torch", "transformers", "budgetformer"} & set(sys.modules)
print(json.dumps([names[str(logits[0].argmax())], gates[0].tolist()]))
"""


def test_a_fresh_process_needs_nothing_of_ours(exported):
    engine = Engine.load(exported[0])
    for text in TEXTS[:2]:
        done = in_python(ALONE, exported[1], text)
        assert done.returncode == 0, done.stderr
        found, answers = json.loads(done.stdout), engine.predict([text], margin=0.0)
        assert found == [answers.labels[0], answers.output.gates[0].tolist()]


def test_the_report_says_how_it_was_checked(exported):
    report = json.loads((exported[1] / "export.json").read_text())
    assert report["agreement"] == report["same_units"] == 1.0
    assert report["largest_difference"] < 1e-5
    assert (report["texts"], report["dtype"], report["opset"]) == (len(TEXTS), "fp32", 20)


def test_int8_rounds_the_encoder_and_not_the_routers(tmp_path):
    make(tmp_path / "model", **MODELS["blocks"])
    report = port.export(tmp_path / "model", tmp_path / "graph", TEXTS, dtype="int8", min_agreement=0.0)
    nodes = onnx.load(tmp_path / "graph" / port.GRAPH, load_external_data=False).graph.node
    # A layer has 4 products with weights; its 2 routers have 3 each; the classifier has 2.
    assert sum(node.op_type == "MatMulInteger" for node in nodes) == 3 * 4
    floats = [node for node in nodes if node.op_type == "MatMul" and re.search(r"router|classifier", node.input[1])]
    assert len(floats) == 3 * 2 * 3 + 2
    assert 0 < report["largest_difference"] < 1


def test_a_gate_that_fails_writes_nothing(tmp_path, capsys):
    make(tmp_path / "model", **MODELS["blocks"])
    texts = [f"{a} {b} {c}" for a in tiny.WORDS for b in tiny.WORDS for c in "abc"]
    model = BudgetFormerForSequenceClassification.from_pretrained(tmp_path / "model")
    logits = torch.from_numpy(Engine.load(tmp_path / "model").predict(texts).output.logits)
    with torch.no_grad():  # half of the texts on each side of one border: some lie so near that rounding moves them
        model.classifier.out.bias[1] += (logits[:, 0] - logits[:, 1]).median()
        model.classifier.out.bias[2] -= 100
    model.save_pretrained(tmp_path / "model")
    check = tmp_path / "check.csv"
    check.write_text("text\n" + "\n".join(texts))
    command = ["export", "--model", tmp_path / "model", "--format", "onnx", "--output-dir", tmp_path / "out"]
    command += ["--dtype", "int8", "--check", check, "--min-agreement", "1", "--quiet"]
    assert cli.main([str(word) for word in command]) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.csv", "model"]


@pytest.mark.parametrize(
    ("units", "profile", "lowest"),
    [(12, [0.9, 0.5, 0.3, 0.3, 0.1, 0.6], 1), (7, [1.0, 1.0, 1.0], 0), (2, [0.2], 1), (5, [0.05, 0.99, 0.4], 5)],
)
def test_the_table_of_budgets_is_the_allocation(units, profile, lowest):
    shares = torch.tensor(profile)
    stairs = port.staircase(shares, units, lowest)
    halves = torch.arange(1, 2 * units * len(profile) + 1, dtype=torch.float64) / (2 * units * len(profile))
    budgets = torch.cat([torch.rand(20_000, dtype=torch.float64).clamp_min(1e-4), halves])
    expected = router.allocate(budgets, shares, units, lowest)
    assert torch.equal(port.look_up(budgets, *stairs), expected)
    assert lowest == units or len(stairs[0]) >= (units - lowest) * len(profile)


def test_the_split_of_a_budget_in_closed_form():
    budget = torch.cat([torch.rand(500, dtype=torch.float64), torch.tensor([1e-6, 0.5, 1.0])]).double()
    costs = torch.rand(len(budget), 2, dtype=torch.float64) + 0.01
    for learned in ([0.4, 0.7], [1.0, 0.01], [0.5, 0.5]):
        found = port.shares_of(budget, torch.tensor(learned), costs)
        torch.testing.assert_close(found, router.shares_of(budget, torch.tensor(learned), costs), atol=1e-9, rtol=0)


def test_without_the_extra_there_is_one_line():
    code = (
        "import sys; sys.modules['onnxruntime'] = None\nfrom budgetformer import cli\nsys.exit(cli.main(sys.argv[1:]))"
    )
    done = in_python(code, "export", "--model", "none", "--format", "onnx", "--output-dir", "out")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("pip install 'budgetformer[onnx]'")
    assert "Traceback" not in done.stderr


def test_a_graph_that_answers_otherwise_is_not_written(exported, tmp_path):
    """The gate is there for fp32 too: here for a graph of another model."""
    other = tmp_path / "other"
    shutil.copytree(exported[0], other)
    model = BudgetFormerForSequenceClassification.from_pretrained(other)
    with torch.no_grad():
        model.classifier.out.weight.neg_()
        model.classifier.out.bias.neg_()
    model.save_pretrained(other)
    engine, graph = Engine.load(other), port.session(exported[1] / port.GRAPH)
    tokens = [Tokens(ids=[5, 6, 7 + i], types=None, truncated=False) for i in range(9)]
    found = port.compare(engine, graph, tokens)
    assert found["agreement"] < 0.5
    assert found["largest_difference"] == pytest.approx(2 * np.abs(engine.forward(tokens).logits).max(), abs=1e-4)


@pytest.mark.slow
def test_a_thousand_real_texts_keep_their_labels(minilm, tmp_path):
    from budgetformer.config import BudgetConfig
    from budgetformer.convert import from_pretrained_encoder
    from budgetformer.data import read_rows
    from core_helpers import stir

    torch.manual_seed(1)
    labels = [f"intent {i}" for i in range(77)]
    model = stir(from_pretrained_encoder(minilm, labels=labels, budget=BudgetConfig(target=0.4)))
    with torch.no_grad():
        model.classifier.out.weight.normal_()
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, tmp_path / "model")
    texts = [text or "" for text in read_rows("demo", split="test", require_labels=False).texts[:1000]]
    report = port.export(tmp_path / "model", tmp_path / "graph", texts)
    assert report["agreement"] == 1.0
    assert report["same_units"] >= 0.999
    assert report["largest_difference"] < 1e-3
    quick = port.export(tmp_path / "model", tmp_path / "int8", texts, dtype="int8", min_agreement=0.0)
    assert quick["agreement"] > 0.5  # random routers stand on the edge; a trained model is for the gate to judge
    assert quick["bytes"] < report["bytes"]
