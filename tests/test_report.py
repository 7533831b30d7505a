"""The table shows what was measured and nothing else; report and figures survive strange names and sizes."""

import copy
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from budgetformer import report
from budgetformer.report import figures
from budgetformer.report.wording import cells as columns
from budgetformer.report.wording import markdown, percent, plain, without_folders

HOSTILE = "a|b $x$ <script>\x1b[31m\u202e`_*[z](u)\n# end"


def metrics(layers: int = 2, heads: int = 3, names: tuple[str, ...] = ("no", "yes")) -> dict:
    random = np.random.default_rng(0)
    by_class = {name: random.random((layers, heads)).tolist() for name in names}
    dense = {"accuracy": 0.925, "macro_f1": 0.9, "head_share": 1.0, "head_share_std": 0.0, "flops_share": 1.0}
    dense |= {"attention_flops_share": 1.0, "peak_memory_mb": 1200.0, "seconds_per_1000": 8.0, "rows": 400}
    budgeted = {"accuracy": 0.931, "macro_f1": 0.89, "head_share": 0.405, "head_share_std": 0.041, "flops_share": 0.7}
    budgeted |= {"attention_flops_share": 0.42, "peak_memory_mb": 900.0, "seconds_per_1000": 6.0, "rows": 400}
    budgeted |= {"heads_by_layer": random.random((layers, heads)).tolist(), "heads_by_class": by_class}
    budgeted |= {"share_histogram": {"edges": [0.0, 0.25, 0.5, 0.75, 1.0], "counts": [3, 390, 7, 0]}}
    dial = [{"budget": b, "accuracy": 0.8 + b / 8, "head_share": b, "flops_share": b} for b in (0.1, 0.5, 1)]
    budgeted["dial"] = dial
    return {"dense": dense, "budgeted": budgeted, "settings": {"target_budget": 0.4}, "data": {"left_out": 2}}


def line(given: dict, name: str) -> list[str]:
    return next(row for row in report.cells(given)[1] if row[0] == name)[1:]


def shown(given: dict, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(report.table(given))
    return capture.get()


def test_numbers_by_hand():
    given = metrics()
    assert line(given, "accuracy") == ["92.5 %", "93.1 %", "+0.6 points"]
    assert line(given, "macro-F1") == ["90.0 %", "89.0 %", "-1.0 points"]
    assert line(given, "heads used ± std") == ["100.0 ± 0.0 %", "40.5 ± 4.1 %", ""]
    assert line(given, "model FLOPs / dense") == ["100.0 %", "70.0 %", ""]
    assert line(given, "peak memory") == ["1,200 MB", "900 MB", "0.75x"]
    assert line(given, "seconds per 1,000 texts") == ["8.00 s", "6.00 s", "0.75x"]


@pytest.mark.parametrize("missing", ["absent", None, float("nan"), float("inf"), "fast", True])
def test_what_was_not_measured_is_a_dash(missing):
    given = metrics()
    if missing == "absent":
        del given["dense"]["seconds_per_1000"]
    else:
        given["dense"]["seconds_per_1000"] = missing
    assert line(given, "seconds per 1,000 texts") == ["—", "6.00 s", "—"]


def test_spread_is_left_out_when_unknown():
    given = metrics()
    del given["budgeted"]["head_share_std"]
    assert line(given, "heads used ± std")[1] == "40.5 %"


def test_carbon_has_a_line_only_when_measured():
    given = metrics()
    assert all("CO2" not in row[0] for row in report.cells(given)[1])
    given["budgeted"]["co2_grams"] = 12.34
    assert line(given, "CO2, estimated") == ["—", "12.3 g", "—"]


def test_both_kinds_have_lines_of_their_own():
    given = metrics()
    names = [row[0] for row in report.cells(given)[1]]
    assert not {"FFN blocks used", "units' FLOPs ± std", "answered twice"} & set(names), "heads alone need none"
    given["budgeted"] |= {"block_share": 0.385, "units_flops_share": 0.4, "units_flops_share_std": 0.05}
    given["dense"]["units_flops_share"] = 1.0
    assert line(given, "FFN blocks used") == ["100.0 %", "38.5 %", ""], "the twin runs them all"
    assert line(given, "units' FLOPs ± std") == ["100.0 %", "40.0 ± 5.0 %", ""]
    given["budgeted"]["answered_again"] = 0.125
    assert line(given, "answered twice") == ["0.0 %", "12.5 %", ""]


def with_blocks(layers: int = 2, blocks: int = 7) -> dict:
    given = metrics(layers)
    random = np.random.default_rng(1)
    budgeted = given["budgeted"]
    budgeted |= {"block_share": 0.385, "units_flops_share": 0.4, "units_flops_share_std": 0.05}
    budgeted["blocks_by_layer"] = random.random((layers, blocks)).tolist()
    budgeted["blocks_by_class"] = {name: random.random((layers, blocks)).tolist() for name in ("no", "yes")}
    for point in budgeted["dial"]:
        point |= {"block_share": 0.3, "units_flops_share": point["budget"] / 2}
    bins = [{"answers": 400, "confidence": 0.9, "accuracy": 0.93}]
    for model in (given["dense"], budgeted):
        model["calibration"] = {"bins": bins, "ece": 0.03}
    return given


def test_the_report_shows_both_kinds(tmp_path):
    given = with_blocks()
    text = report.write_report(given, tmp_path).read_text(encoding="utf-8")
    for name in ("blocks_by_layer", "blocks_by_class", "reliability"):
        assert f"](figures/{name}.png)" in text
        assert (tmp_path / "figures" / f"{name}.svg").exists()
    assert "| budget | heads used | FFN blocks used | units' FLOPs | model FLOPs / dense | accuracy |" in text
    assert "| 50.0 % | 50.0 % | 30.0 % | 25.0 % | 50.0 % | 86.2 % |" in text
    with figures.house_style():
        dial = figures.accuracy_by_budget(given["budgeted"], {})
        histogram = figures.share_histogram(given["budgeted"], 0.4)
    assert list(dial.axes[0].lines[0].get_xdata()) == [0.05, 0.25, 0.5], "what is spent, not the share of heads"
    assert "units' FLOPs" in histogram.axes[0].get_xlabel()
    assert "mean 40.0 %, standard deviation 5.0 points" in [line.get_label() for line in histogram.axes[0].lines]


def test_the_histogram_shows_texts_that_were_answered_twice():
    budgeted = {"share_histogram": {"edges": [0.0, 0.5, 1.0, 1.5], "counts": [5, 3, 2]}, "head_share": 0.6}
    with figures.house_style():
        drawn = figures.share_histogram(budgeted)
    assert drawn.axes[0].get_xlim()[1] == 1.5
    assert figures.used({"answered_again": 0.1}, "blocks") == "runs of the block per text (%)"


def test_several_runs_in_one_picture():
    runs = {"one": with_blocks(), "two": with_blocks()}
    runs["two"]["budgeted"]["accuracy"] = 0.5
    with figures.house_style():
        drawn = figures.accuracy_by_cost(runs).axes[0]
        points = [{"budget": b, "ms_per_text": t, "accuracy": 0.9} for b, t in ((1.0, 3.0), (None, 2.0), (0.2, 1.0))]
        timed = figures.accuracy_by_time({"none": [], "one": points}).axes[0]
    assert [line.get_label() for line in drawn.lines] == ["one", "two"]
    assert list(drawn.lines[0].get_xdata()) == [0.1, 0.5, 1]
    stars = [marks.get_offsets().tolist()[0] for marks in drawn.collections[::2]]
    assert stars == [[0.7, 0.931], [0.7, 0.5]]
    assert list(timed.lines[0].get_xdata()) == [1.0, 3.0]
    assert timed.lines[0].get_color() == drawn.lines[1].get_color(), "the second run has its colour in every picture"
    assert timed.collections[0].get_offsets().tolist() == [[2.0, 0.9]]
    assert timed.get_xlim()[1] > 3.0


def test_settings_are_passed_on_without_folders():
    given = {"data": "demo", "train_file": "/a/b/c.csv", "model": "owner/name", "dense": "C:\\x\\y", "seed": 3}
    found = without_folders(
        {**given, "test_file": "../x/t.csv", "output_dir": "~/runs/mine/", "validation_file": None, "resume": "./here"}
    )
    names = {"train_file": "c.csv", "dense": "y", "test_file": "t.csv", "output_dir": "mine", "resume": "here"}
    assert found == {**given, **names, "validation_file": None}


def test_one_model_alone_is_not_compared():
    header, body = report.cells({"budgeted": metrics()["budgeted"]})
    assert header == ["", "budgeted"]
    assert all(len(row) == 2 for row in body)


def test_terminal_and_markdown_show_the_same_cells():
    given = metrics() | {"dense_longer": metrics()["dense"]}
    terminal, text = shown(given), report.markdown_table(*report.cells(given))
    for row in report.cells(given)[1]:
        for cell in row:
            assert cell in terminal
            assert cell in text
    assert "dense, trained as long" in text
    assert "…" not in terminal, "three models fit into 80 columns"


def test_notes_say_how_sure_and_what_is_left_out():
    given = metrics()
    given["budgeted"] |= {"truncated": 1, "soft_hard_gap": -0.004}
    notes = " ".join(report.notes(given))
    # Wilson at 0.931 of 400: 1.96 * sqrt(.931*.069/400 + 3.8416/640000) / (1 + 3.8416/400) = 0.0251
    assert "400 texts" in notes
    assert "± 2.5 points" in notes
    assert "1 text was longer" in notes
    assert "-0.4 points" in notes
    assert "2 unusable rows" in notes
    assert "longer" not in " ".join(report.notes(metrics()))


def test_report_names_every_figure_and_figures_are_sound(tmp_path):
    path = report.write_report(metrics(), tmp_path)
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "report.md"
    for name in ("share_histogram", "heads_by_layer", "heads_by_class", "accuracy_by_budget"):
        assert f"](figures/{name}.png)" in text
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ElementTree.parse(tmp_path / "figures" / f"{name}.svg").getroot().tag.endswith("svg")
    assert "    target_budget: 0.4" in text


def test_figures_without_numbers_are_left_out(tmp_path):
    given = metrics()
    del given["budgeted"]["dial"]
    given["budgeted"]["heads_by_class"] = {}
    text = report.write_report(given, tmp_path).read_text(encoding="utf-8")
    assert sorted(p.name for p in (tmp_path / "figures").glob("*.png")) == ["heads_by_layer.png", "share_histogram.png"]
    assert "accuracy_by_budget" not in text
    assert report.write_report({}, tmp_path / "figures").exists(), "nothing measured is still a report"


def test_no_accuracy_above_all_is_drawn():
    dial = [{"head_share": share, "accuracy": 0.97} for share in (0.25, 1.0)]
    drawn = figures.accuracy_by_budget({"dial": dial}, {"dense twin": {"accuracy": 1.0}}, 0.03)
    (band,) = [patch for patch in drawn.axes[0].patches if patch.get_label().startswith("its 95 %")]
    assert band.get_extents().transformed(drawn.axes[0].transData.inverted()).y1 == pytest.approx(1.0)


def test_same_metrics_same_bytes(tmp_path):
    given = metrics()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        report.write_report(copy.deepcopy(given), tmp_path / folder)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 9
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_hostile_label_stays_a_label(tmp_path):
    given = metrics(names=(HOSTILE, "数字 " * 40, r"$\frac{$"))
    given["settings"]["note"] = "a\n\n<script>`"
    text = report.write_report(given, tmp_path).read_text(encoding="utf-8")
    row = next(row for row in text.splitlines() if "script" in row and row.startswith("|"))
    assert row.startswith(r"| a\|b \$x\$ &lt;script&gt;\[31m\`\_\*\[z\](u) \# end |")
    assert "\x1b" not in text
    assert '    note: "a\\n\\n<script>`"' in text, "settings stay inside the code block"
    svg = (tmp_path / "figures" / "heads_by_class.svg").read_text(encoding="utf-8")
    assert "<script>" not in svg
    ElementTree.fromstring(svg)


@pytest.mark.parametrize(("layers", "heads", "classes"), [(1, 1, 1), (5, 7, 2), (13, 17, 31)])
def test_figures_of_any_size(layers, heads, classes, tmp_path):
    names = tuple(f"class_{i:02}" for i in range(classes))
    given = metrics(layers, heads, names)
    with figures.house_style():
        figure = figures.units_by_class(given["budgeted"])
        figure.savefig(tmp_path / "x.png", dpi=40)
        labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        figures.units_by_layer(given["budgeted"]).savefig(tmp_path / "y.png", dpi=40)
    assert len(labels) == (25 if classes == 31 else classes)
    assert ("mean of the 7 classes between" in labels) == (classes == 31)
    assert len(set(labels)) == len(labels)


def test_many_classes_become_both_ends_and_a_mean():
    by_class = {f"c{i:02}": [[i / 100, i / 50]] for i in range(41)}
    rows = figures.class_rows(by_class)
    assert [name for name, _, _ in rows[:2]] == ["c40", "c39"]
    assert [name for name, _, _ in rows[-2:]] == ["c01", "c00"]
    name, mean, count = rows[12]
    assert (name, count, len(rows)) == (None, 17, 25)
    np.testing.assert_allclose(mean, [[0.2, 0.4]])  # classes 12 to 28, whose middle is 20


def test_wording():
    assert plain("a\x1b[2J\u202eb\n\tc\x00") == "a[2Jb c"
    assert plain("é" * 9, 5) == "éééé…"
    assert plain("card_payment_declined_7", 12, middle=True) == "card_pay…d_7"
    assert columns(plain("数字" * 10, 8)) <= 8
    assert len(plain("a" + "\u0301" * 1_000_000, 10)) <= 41, "marks without width do not get past the cut"
    assert markdown("card_arrival") == "card_arrival"
    assert markdown("_x_ ~a~ !b") == r"\_x\_ \~a\~ \!b"
    assert [percent(p) for p in (0, 0.0001, 0.1234, 0.9999, 1)] == ["0.0 %", "<0.1 %", "12.3 %", ">99.9 %", "100.0 %"]


def test_the_table_loads_neither_torch_nor_matplotlib():
    code = (
        "import sys; from budgetformer import report; from budgetformer.report import picture;"
        "report.table({'dense': {'accuracy': 0.5}});"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
