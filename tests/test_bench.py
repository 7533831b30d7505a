"""The benchmark's arithmetic on numbers worked by hand, and a whole small run on torch alone."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import clean  # noqa: E402
import cold_start  # noqa: E402
import engine as bench  # noqa: E402
import goals  # noqa: E402
import inputs  # noqa: E402
import models  # noqa: E402
import ours  # noqa: E402
import peers  # noqa: E402
import roofline  # noqa: E402
import timing  # noqa: E402
import variants  # noqa: E402
from budgetformer.config import EncoderConfig  # noqa: E402
from rows import Facts, cell_rows, shares  # noqa: E402
from selections import DENSE, Selection, some, work  # noqa: E402

SMALL = EncoderConfig(hidden_size=10, num_layers=3, num_heads=5, intermediate_size=20, vocab_size=97)


class FakeTime:
    """A clock that the calls themselves move."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def call(self, name, *seconds):
        """A call that takes `seconds`, the last of them for ever after."""
        left = list(seconds)

        def run():
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run

    def __call__(self):
        return self.now


# ---------------------------------------------------------------------- time


def test_quartiles_by_hand():
    assert timing.Spread.of([4.0, 1.0, 3.0, 2.0]) == timing.Spread(2.5, 1.75, 3.25)
    assert timing.Spread.of([7.0]) == timing.Spread(7.0, 7.0, 7.0)


def test_one_thread_is_timed_by_cpu_and_several_by_the_wall():
    assert timing.clock_for(1) is timing.CPU
    assert timing.clock_for(2) is timing.WALL


def test_rounds_are_interleaved_and_turn_around():
    clock = FakeTime()
    calls = {"a": clock.call("a", 1.0), "b": clock.call("b", 2.0)}
    measured = timing.interleave(calls, {"a": 2, "b": 1}, clock=clock, rounds=3, until=99, now=clock)
    assert clock.log == ["a", "a", "b", "b", "a", "a", "a", "a", "b"]
    assert measured == {"a": [1.0] * 3, "b": [2.0] * 3}


@pytest.mark.parametrize(("until", "rounds"), [(0.0, 1), (5.0, 1), (5.2, 2), (8.4, 2), (8.6, 3), (99.0, 3)])
def test_no_round_begins_that_would_end_long_after_the_time(until, rounds):
    # A round takes 3.4 s; the next one begins when at least half of it still fits.
    clock = FakeTime()
    call = clock.call("a", 3.4)
    measured = timing.interleave({"a": call}, {"a": 1}, clock=clock, rounds=3, until=until, now=clock)
    assert len(measured["a"]) == rounds


def test_quick_calls_are_repeated_and_slow_first_calls_looked_at_again():
    clock = FakeTime()
    assert timing.repeats(clock.call("a", 0.05, 0.004), clock, shortest=0.02) == 5
    assert clock.log == ["a", "a"]
    assert timing.repeats(clock.call("b", 3.0), clock, shortest=0.02) == 1
    assert clock.log == ["a", "a", "b"]


def test_ratios_are_taken_within_a_round():
    # Everything is twice as slow in the second round, and 9 times in the third; the ratio does not move.
    assert timing.ratio([2.0, 4.0, 18.0], [1.0, 2.0, 9.0]) == timing.Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="shorter"):
        timing.ratio([1.0, 2.0], [1.0])


def test_the_fastest_of_those_that_were_measured():
    measured = {"a": [3.0, 1.0, 3.0], "b": [2.0, 2.0, 2.0]}
    assert timing.fastest(measured, ["a", "b", "missing"]) == "b"
    assert timing.fastest(measured, ["missing"]) is None


# ---------------------------------------------------------------------- rows


def rows():
    measured = {
        "torch": [8.0, 8.0, 8.0],
        "peer": [4.0, 5.0, 4.0],
        "other": [1.0, 1.0, 1.0],
        "dense": [4.0, 4.0, 4.0],
        "half": [2.5, 2.5, 2.5],
        "proto": [5.0, 5.0, 5.0],
    }
    facts = {
        "torch": Facts("peer", "fp32", "dense", 100.0),
        "peer": Facts("peer", "fp32", "dense", 100.0),
        "other": Facts("peer", "int8", "dense", 100.0),
        "dense": Facts("ours", "fp32", "dense", 100.0, least=2.0, peak=50.0),
        "half": Facts("ours", "fp32", "heads 0.5", 50.0, least=1.0, peak=50.0),
        "proto": Facts("prototype", "fp32", "heads 0.5", 50.0),
    }
    made = cell_rows(measured, facts, tokens=20, baseline="torch")
    return {row["name"]: row for row in made}


def test_rates_and_ratios_by_hand():
    half = rows()["half"]
    assert half["tokens_per_second"] == 8.0
    assert half["ratio"]["median"] == pytest.approx(3.2)
    assert (half["best_peer"], half["ratio_best_peer"]) == ("peer", pytest.approx(1.6))  # not the int8 one
    assert half["ratio_any_peer"] == pytest.approx(0.4)  # the int8 one
    assert half["ratio_prototype"] == pytest.approx(2.0)
    assert half["of_peak"] == pytest.approx(50 / 2.5 / 50)
    assert half["ceiling_tokens_per_second"] == 20.0


def test_efficiency_is_gain_over_what_the_flops_promise():
    made = rows()
    assert made["half"]["gain"] == pytest.approx(1.6)
    assert made["half"]["flops_gain"] == pytest.approx(2.0)
    assert made["half"]["efficiency"] == pytest.approx(0.8)
    assert made["dense"]["efficiency"] == pytest.approx(1.0)


def test_what_is_not_known_is_none():
    made = rows()
    assert made["proto"]["gain"] is None  # no dense prototype was measured
    assert made["peer"]["efficiency"] is None
    assert made["dense"]["ratio_prototype"] is None
    assert made["torch"]["of_peak"] is None


def test_a_run_without_the_baseline_has_no_ratio_to_it():
    (row,) = cell_rows({"dense": [1.0]}, {"dense": Facts("ours", "fp32", "dense")}, tokens=1, baseline="torch")
    assert row["ratio"] is None
    assert row["ratio_best_peer"] is None


def test_time_is_shared_by_cost_with_a_least_share():
    assert shares([3.0, 1.0]) == [0.75, 0.25]
    small, large = shares([1.0, 999.0], least=0.1)
    assert small == pytest.approx(0.1 / 1.099)
    assert small + large == pytest.approx(1.0)


# ---------------------------------------------------------------------- selections and work


def test_drawn_sets_hold_their_share_in_the_mean_and_differ():
    drawn = some(0.25, (400, 3, 12), np.random.default_rng(1))
    counts = drawn.sum(-1)
    assert drawn.dtype == np.uint8
    assert counts.mean() == pytest.approx(3.0, abs=0.15)
    assert (counts.min(), counts.max()) == (1, 5)
    assert len(np.unique(drawn.reshape(-1, 12), axis=0)) > 200


def test_a_tenth_of_twelve_heads_leaves_one_in_every_layer():
    drawn = some(0.1, (400, 3, 12), np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(0.1, abs=0.005)
    assert drawn.sum(-1).min() == 1


def test_a_lone_input_gets_the_mean():
    assert (some(0.5, (1, 7, 12), np.random.default_rng(1)).sum(-1) == 6).all()


def test_the_same_selection_is_drawn_again():
    first, again = (Selection(heads=0.5, blocks=0.5).draw(9, SMALL, 5) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert DENSE.draw(9, SMALL, 5) == (None, None)


def test_names_of_selections():
    named = [DENSE, Selection(heads=0.5), Selection(heads=0.25, blocks=0.25)]
    assert [one.name for one in named] == ["dense", "heads 0.5", "heads+blocks 0.25"]


def test_counted_work_by_hand():
    # An input of 7 tokens, width 10, heads of 2, inner 20. A head: 8*7*10*2 + 4*7*7*2 = 1512. A feed-forward layer:
    # 4*7*10*20 = 5600. Two labels: 2*10*2 = 40.
    assert work(np.array([7]), None, None, SMALL, 2) == 3 * (5 * 1512 + 5600) + 40
    gates = np.zeros((1, 3, 5), np.uint8)
    gates[0, 0, :2] = gates[0, 2, 4] = 1
    blocks = np.zeros((1, 3, 4), np.uint8)
    blocks[0, 1, :3] = 1
    assert work(np.array([7]), gates, blocks, SMALL, 2) == 3 * 1512 + 0.75 * 5600 + 40


def test_work_is_counted_at_each_inputs_own_length():
    both = work(np.array([7, 3]), None, None, SMALL, 2)
    assert both == sum(work(np.array([n]), None, None, SMALL, 2) for n in (7, 3))


# ---------------------------------------------------------------------- theory


def test_bytes_by_hand():
    given = inputs.Inputs("x", [np.arange(7)], ["x"], 1)
    stream = 7 * 7 * 10 * 4  # in and out of each of 3 layers, and once from the tables; 7 tokens, width 10
    assert roofline.least_bytes(given, None, None, SMALL, "fp32") == 3 * (400 + 400) * 4 + stream
    gates = np.zeros((1, 3, 5), np.uint8)
    gates[0, 0, 0] = 1
    blocks = np.zeros((1, 3, 5), np.uint8)
    assert roofline.least_bytes(given, gates, blocks, SMALL, "int8") == 400 / 5 + stream


def test_the_ceiling_is_the_slower_of_operations_and_bytes():
    machine = roofline.Machine({"fp32": roofline.Peak(100.0, None, "")}, bandwidth=10.0)
    assert roofline.least_seconds(1000.0, 10.0, "fp32", machine, 1) == 10.0
    assert roofline.least_seconds(1000.0, 500.0, "fp32", machine, 1) == 50.0
    assert roofline.least_seconds(1000.0, 500.0, "fp32", machine, 2) == 25.0


# ---------------------------------------------------------------------- inputs


def test_padding_sorts_by_length_and_remembers_the_places():
    ids = [np.full(n, n) for n in (2, 5, 3)]
    first, second = inputs.pad_sorted(ids, 2)
    assert first.rows.tolist() == [1, 2]
    assert first.ids.tolist() == [[5] * 5, [3, 3, 3, 0, 0]]
    assert first.mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert (first.full, second.full) == (False, True)


def test_a_window_is_sorted_by_itself(monkeypatch):
    monkeypatch.setattr(inputs, "WINDOW", 2)
    assert [batch.rows.tolist() for batch in inputs.pad_sorted([[1], [1, 2], [1, 2, 3]], 1)] == [[1], [0], [2]]


def test_inputs_have_the_lengths_that_are_asked_for(tokenizer):
    made = inputs.make_inputs("3x11", tokenizer, ["where is my card", "pay money back please"])
    assert made.lengths.tolist() == [11, 11, 11]
    assert made.batch_size == 3
    assert all(len(tokenizer.encode(text).ids) >= 11 for text in made.texts)
    assert {(one[0], one[-1]) for one in made.ids} == {(2, 3)}  # [CLS], [SEP]


def test_the_kept_batches_of_a_stream_are_like_all():
    whole, some_of_it = inputs.stream_lengths(1024), inputs.stream_lengths(256)
    assert (len(whole), len(some_of_it)) == (1024, 256)
    assert whole.mean() == pytest.approx(60, rel=0.05)
    assert some_of_it.mean() == pytest.approx(whole.mean(), rel=0.02)
    assert whole.max() <= 512
    assert np.sort(some_of_it).tolist() != some_of_it.tolist()
    assert inputs.overhead(np.array([[2, 4], [1, 1]])) == pytest.approx(10 / 8)


def test_packs_keep_the_order_and_the_limit(monkeypatch):
    monkeypatch.setattr(ours, "BATCH_TOKENS", 7)
    given = inputs.Inputs("x", [np.arange(n) for n in (3, 4, 1, 9, 2)], [""] * 5, 2)
    gates = np.arange(5, dtype=np.uint8).reshape(5, 1, 1)
    made = ours.parts(given, gates, None)
    assert [one.packed.lengths.tolist() for one in made] == [[3, 4], [1], [9], [2]]
    assert np.concatenate([one.gates.reshape(-1) for one in made]).tolist() == [0, 1, 2, 3, 4]
    assert made[0].packed.ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert made[0].blocks is None


# ---------------------------------------------------------------------- peers and models


class Echo(peers.Peer):
    """Says the first id of each input, and the number of batches it got."""

    name, precision = "echo", "fp32"

    def __init__(self, model=None):
        self.model, self.batches = model, []

    def feed(self, batch):
        return batch

    def logits(self, fed):
        self.batches.append(fed.ids.shape)
        return np.eye(100, dtype=np.float32)[fed.ids[:, 0]]


def test_a_peers_answers_come_in_the_order_of_the_inputs():
    peer = Echo()
    ids = [np.array([first] + [0] * n) for first, n in ((11, 2), (7, 9), (5, 0), (3, 4))]
    answers = peer.prepare(inputs.Inputs("x", ids, [""] * 4, 2))()
    assert answers.argmax(1).tolist() == [11, 7, 5, 3]
    assert peer.batches == [(2, 10), (2, 3)]


def test_long_texts_are_cut_and_keep_their_end():
    assert peers._cut([2, 5, 6, 7, 3], 4) == [2, 5, 6, 3]
    assert peers._cut([2, 5, 3], 4) == [2, 5, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder of ours: 2 layers of 5 heads, width 35, inner 60, with routers that have something to choose."""
    import torch

    import tiny
    from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification

    path = tmp_path_factory.mktemp("bench") / "model"
    words = tiny.tokenizer()
    torch.manual_seed(3)
    config = BudgetFormerConfig(
        vocab_size=len(words),
        hidden_size=35,
        num_layers=2,
        num_heads=5,
        intermediate_size=60,
        max_positions=23,
        initializer_range=0.5,
        budget={"target": 0.5},
        id2label=dict(enumerate(tiny.LABELS)),
        label2id={name: i for i, name in enumerate(tiny.LABELS)},
    )
    BudgetFormerForSequenceClassification(config).save_pretrained(path)
    words.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):
    """The folder as the benchmark reads it."""
    return models.load(str(folder), tmp_path_factory.mktemp("cache"))


@pytest.fixture
def tokenizer(model):
    """Its tokenizer."""
    return model.tokenizer


def test_the_reference_is_our_model_with_the_same_heads(folder, model):
    import torch

    from budgetformer.predict import load_model

    own, _ = load_model(folder)
    given = inputs.make_inputs("3x11", model.tokenizer, ["where is my card", "pay money back please"])
    gates, _ = Selection(heads=0.4).draw(3, model.config, 5)
    with torch.no_grad():
        right = own(torch.as_tensor(np.stack(given.ids)), gates=torch.as_tensor(gates).float()).logits.numpy()
    made = clean.reference(model.clean(), given, gates)
    assert made == pytest.approx(right, abs=1e-5)
    assert np.abs(made - clean.reference(model.clean(), given)).max() > 1e-3  # the heads that are off are missed


def test_padding_does_not_change_the_reference(model):
    ids = [np.array([2, *range(5, 5 + n), 3]) for n in (1, 6, 3)]
    together = clean.reference(model.clean(), inputs.Inputs("x", ids, [""] * 3, 3))
    alone = clean.reference(model.clean(), inputs.Inputs("x", ids, [""] * 3, 1))
    assert together == pytest.approx(alone, abs=1e-5)


def test_the_engine_computes_what_the_reference_says_of_heads_and_blocks(model):
    given = inputs.make_inputs("3x11", model.tokenizer, ["where is my card", "pay money back please"])
    options = variants.Options(cache=model.home, peers=False, path="torch")
    one = next(v for v in variants.variants(model, 1, options) if v.name == "ours fp32 heads+blocks 0.5")
    gates, blocks = ours.draw(one.selection, model, 3)
    right = clean.reference(model.clean(), given, gates, blocks)
    assert one.build().prepare(given)() == pytest.approx(right, abs=1e-5)


def test_another_classifier_than_the_peers_have_is_refused(folder, tmp_path):
    import shutil

    from budgetformer.errors import UsageError

    other = shutil.copytree(folder, tmp_path / "first")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "pooling": "first"}))
    with pytest.raises(UsageError, match="one linear layer over the mean"):
        models.load(str(other), tmp_path)


def test_a_cached_folder_is_whole_or_not_there(tmp_path):
    def fails(folder):
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models.cached(tmp_path / "made", fails)
    assert list(tmp_path.iterdir()) == []
    models.cached(tmp_path / "made", lambda folder: (folder / "whole").touch())
    models.cached(tmp_path / "made", fails)  # is there, and not made again
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["whole"]


def test_only_some_variants_are_kept_and_always_the_baseline(model):
    every = variants.variants(model, 1, variants.Options(cache=Path(), path="torch"))
    kept = [one.name for one in variants.kept(every, "openvino, int8 dense")]
    assert kept == ["torch SDPA fp32", "OpenVINO fp32", "OpenVINO bf16", "ours int8 dense"]
    assert "ours bf16 as trained" in [one.name for one in every]


# ---------------------------------------------------------------------- goals, table, command


def found(**changes):
    row = {"family": "ours", "selection": "dense", "precision": "fp32", "ratio": {"median": 1.3}, "of_peak": None}
    cell = {"part": "ids", "threads": 1, "model": "minilm", "shape": "8x128"}
    keys = ("ratio_best_peer", "ratio_any_peer", "ratio_prototype", "efficiency")
    return {"cells": [{**cell, "rows": [{**dict.fromkeys(keys), **row, **changes}]}]}


def test_a_goal_is_judged_by_its_worst_cell():
    results = found()
    results["cells"].append(
        {**results["cells"][0], "shape": "1x32", "rows": found(ratio={"median": 1.2})["cells"][0]["rows"]}
    )
    results["cells"].append(
        {**results["cells"][0], "shape": "stream", "rows": found(ratio={"median": 0.1})["cells"][0]["rows"]}
    )
    (one,) = goals.judge(results)
    assert (one["goal"], one["worst"], one["where"]) == ("fp32 dense / torch SDPA, minilm", 1.2, "minilm 1x32")
    assert one["middle"] == pytest.approx(1.25)
    assert (one["met"], one["met_by_middle"]) == (False, True)


def test_a_goal_for_the_best_of_two_precisions():
    results = found(selection="heads+blocks 0.25", precision="bf16", ratio_any_peer=2.0)
    results["cells"][0]["rows"] += found(selection="heads+blocks 0.25", precision="int8", ratio_any_peer=3.0)["cells"][
        0
    ]["rows"]
    (one,) = [one for one in goals.judge(results) if "best peer of all" in one["goal"]]
    assert (one["worst"], one["met"]) == (3.0, True)


def test_memory_and_routers_are_upper_bounds():
    rows = [{"name": "torch SDPA fp32", "family": "peer", "mib": 200.0}]
    rows += [{"name": f"ours {mib}", "family": "ours", "mib": mib} for mib in (10.0, 30.0, None)]
    results = {"cells": [], "memory": [{"model": "minilm", "shape": "8x512", "rows": rows}]}
    results["routers"] = [{"model": "minilm", "shape": "1x32", "precision": "bf16", "share": {"median": 0.004}}]
    memory, routers = goals.judge(results)
    assert (memory["worst"], memory["met"], memory["cells"]) == (0.15, False, 2)
    assert (routers["worst"], routers["met"]) == (0.004, True)


def test_imports_are_summed_by_package():
    report = (
        "import time: self [us] | cumulative | imported package\n"
        "import time:      1000 |       1000 |   numpy.core\n"
        "import time:      2000 |       3000 | numpy\n"
        "import time:      5000 |       5000 | json\n"
        "something else\n"
    )
    assert cold_start.imports(report) == {"json": pytest.approx(0.005), "numpy": pytest.approx(0.003)}


def test_without_flags_both_models_run_and_with_them_what_they_say():
    def cells(*flags):
        return bench.cells_of(bench.parse(flags), 2)

    default = cells()
    assert {(c.model, c.shape) for c in default if c.threads == 1 and c.part == "ids"} == {
        (m, s) for m in models.NAMES for s in inputs.SHAPES
    }
    assert {c.threads for c in default} == {1, 2}
    assert cells("--model", "base", "--shapes", "8x128", "--threads", "all") == [bench.Cell("base", "8x128", 2)]
    assert {c.shape for c in cells("--quick")} == {"1x32", "1x128", "8x128"}
    assert bench.parse([]).memory == ["minilm"]
    assert bench.parse(["--quick"]).memory == bench.parse(["--memory", "none"]).memory == []


def test_a_whole_run(folder, tmp_path, monkeypatch, capsys):
    """On torch alone: real peers and the real engine, one precision that it lacks and one peer that breaks."""
    machine = roofline.Machine({p: roofline.Peak(1e11, None, "fake") for p in variants.PRECISIONS}, bandwidth=1e10)
    texts = ["where is my card", "pay money back please", "top up my cash"]

    class Broken(Echo):
        def __init__(self, model, threads):
            raise ImportError("no module named broken")

    monkeypatch.setattr(roofline, "measure", lambda seconds: machine)
    monkeypatch.setattr(bench, "demo_texts", lambda split: (texts, texts))
    monkeypatch.setattr(variants, "PEERS", (*peers.PEERS[:1], ("Broken", "int8", Broken)))
    monkeypatch.setattr(bench, "export_all", lambda model: None)
    output = tmp_path / "made" / "bench.json"
    flags = ["--model", str(folder), "--path", "torch", "--cache", str(tmp_path), "--output", str(output)]
    only = ["--only", "broken,fp32,int8 dense"]
    assert bench.main([*flags, *only, "--shapes", "5x11", "--part", "both", "--rounds", "2", "--seconds", "60"]) == 0
    results = json.loads(output.read_text())
    assert output.with_suffix(".png").stat().st_size > 10_000
    ids, from_text = results["cells"]
    assert (ids["model"], ids["shape"], ids["part"], ids["tokens"]) == ("model", "5x11", "ids", 55)
    made = {row["name"]: row for row in ids["rows"]}
    assert made["torch SDPA fp32"]["ratio"]["median"] == 1.0
    assert made["ours fp32 heads 0.25"]["agreement"] == 1.0
    assert made["ours fp32 heads 0.25"]["flops"] < made["ours fp32 dense"]["flops"]
    assert made["ours fp32 as trained"]["flops"] is None
    assert all(row["seconds"]["median"] > 0 and len(row["rounds"]) == 2 for row in ids["rows"])
    reasons = {one["name"]: one["reason"] for one in ids["missing"]}
    assert "no module named broken" in reasons["Broken int8"]
    assert "int8 needs the compiled kernels" in reasons["ours int8 dense"]
    assert {row["name"] for row in from_text["rows"]} == {
        "torch SDPA fp32",
        "ours fp32 dense",
        "ours fp32 heads 0.25",
        "ours fp32 as trained",
    }
    printed = capsys.readouterr().out
    assert "ours fp32 heads+blocks 0.25" in printed
    assert "not measured: Broken int8: ImportError: no module named broken" in printed
    # Without time the first cell is measured all the same, and the others are named.
    assert bench.main([*flags, "--only", "torch", "--shapes", "5x11,2x7", "--seconds", "0"]) == 0
    results = json.loads(output.read_text())
    assert ([one["shape"] for one in results["cells"]], [one["shape"] for one in results["left_out"]]) == (
        ["5x11"],
        ["2x7"],
    )
    assert "left out for time: model 2x7" in capsys.readouterr().out
