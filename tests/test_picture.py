"""The picture shows exactly the heads that ran, at any width, without colour and in plain ASCII."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from budgetformer.report import picture
from budgetformer.report.figures import house_style
from budgetformer.report.picture import Inspection

GATES = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
EXAMPLE = Inspection(
    text="Where is my card?",
    tokens=7,
    labels=["arrival", "lost", "pin", "refund", "top_up", "fee", "limit"],
    probabilities=[0.02, 0.9, 0.03, 0.02, 0.02, 0.006, 0.004],
    wanted=[0.4, 0.0, 1.0],
    gates=GATES,
    head_share=7 / 15,
    flops_share=0.61,
)


BLOCKS = [[0, 1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1]]
BOTH = replace(EXAMPLE, blocks=BLOCKS, blocks_wanted=[0.4, 0.14, 1.0], units_share=0.5)
AGAIN = replace(
    BOTH,
    gates=[[count + 1 for count in row] for row in GATES],
    blocks=[[count + 1 for count in row] for row in BLOCKS],
    head_share=22 / 15,
    units_share=1.5,
    flops_share=1.61,
)


def drawn(inspection: Inspection, width: int = 80, encoding: str = "utf-8", colour: bool = False) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(file=stream, width=width, color_system="standard" if colour else None, force_terminal=colour)
    console.print(picture.terminal(inspection))
    stream.seek(0)
    return stream.read()


def test_squares_are_the_gates():
    lines = [line for line in drawn(EXAMPLE).splitlines() if "■" in line or "□" in line]
    assert [[int(sign == "■") for sign in line if sign in "■□"] for line in lines] == GATES
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert ["2/5" in lines[0], "0/5" in lines[1], "5/5" in lines[2]] == [True] * 3


def test_both_kinds_stand_below_each_other():
    lines = [line for line in drawn(BOTH).splitlines() if "■" in line or "□" in line]
    found = [[int(sign == "■") for sign in line if sign in "■□"] for line in lines]
    assert found == [row for pair in zip(GATES, BLOCKS, strict=True) for row in pair]
    assert [line.split()[:2] for line in lines[::2]] == [["1", "heads"], ["2", "heads"], ["3", "heads"]]
    assert [line.split()[0] for line in lines[1::2]] == ["blocks"] * 3
    assert [word for line in lines for word in line.split() if "/" in word] == [
        "2/5",
        "3/7",
        "0/5",
        "1/7",
        "5/5",
        "7/7",
    ]
    assert [line.split()[-2] for line in lines] == ["40", "40", "0", "14", "100", "100"]
    text = " ".join(drawn(BOTH).split())
    assert "7 of 15 heads (46.7 %), 11 of 21 blocks (52.4 %), 50.0 % of the units' FLOPs, 61.0 % of the dense" in text


def test_a_text_that_was_answered_twice():
    text = drawn(AGAIN)
    lines = [line for line in text.splitlines() if "/5" in line or "/7" in line]
    first = [["□▣■".index(sign) for sign in line if sign in "□▣■"] for line in lines]
    assert first == [[1 + count for count in row] for pair in zip(GATES, BLOCKS, strict=True) for row in pair]
    assert "2/5" in lines[0], "the first answer, as the budget beside it"
    assert "7 + 15 of 15 heads (146.7 %), 11 + 21 of 21 blocks (152.4 %)" in " ".join(text.split())
    assert "answered twice" in text
    assert "answered twice" not in drawn(BOTH)
    plain_text = drawn(AGAIN, encoding="ascii")
    assert plain_text.isascii()
    assert "# + + # +" in plain_text


def test_budget_bars_by_hand():
    bars = ["".join(sign for sign in line if sign in "━╸─") for line in drawn(EXAMPLE).splitlines() if "/5" in line]
    assert bars == ["━" * 8 + "─" * 12, "─" * 20, "━" * 20]


def test_classes_are_ranked_and_the_rest_is_counted():
    text = drawn(EXAMPLE)
    order = [text.index(name) for name in ("lost", "pin", "arrival", "refund", "top_up")]
    assert order == sorted(order)
    assert "90.0 %" in text
    assert "2 more classes, none above 0.6 %" in text
    assert "7 of 15 heads (46.7 %), 61.0 % of the dense model's FLOPs, 7 tokens" in text


def test_without_colour_there_is_no_escape_and_with_colour_the_same_signs():
    bare = drawn(EXAMPLE)
    assert "\x1b" not in bare
    coloured = drawn(EXAMPLE, colour=True)
    assert "\x1b[" in coloured
    assert [coloured.count(sign) for sign in "■□"] == [bare.count(sign) for sign in "■□"] == [7, 8]


@pytest.mark.parametrize("width", [30, 47, 80, 200])
def test_no_line_is_wider_than_the_console(width):
    labels = ["a_rather_long_label_name_that_goes_on_" + "数" * index for index in range(7)]
    wide = replace(EXAMPLE, labels=labels, text="字" * 500, gates=[[1, 0] * 41] * 3)
    text = drawn(wide, width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert text.count("■") == 3 * 41, "squares fold, they are not cut"


def test_plain_ascii():
    text = drawn(replace(EXAMPLE, text="Où est 卡?", labels=["é", *EXAMPLE.labels[1:]]), encoding="ascii")
    assert text.isascii()
    assert "# . . # ." in text
    assert r"O\xf9 est" in text


def test_hostile_text_cannot_write_to_the_terminal():
    nasty = "\x1b]0;title\x07\x1b[2J[bold]x[/bold]\u202e\r\n" + "a\u0301" * 1_000_000
    text = drawn(replace(EXAMPLE, text=nasty, labels=[nasty, *EXAMPLE.labels[1:]]))
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
    assert "[bold]x[/bold]" in text, "markup of rich is only text"
    assert len(text) < 5000


def test_png_holds_the_gates_and_any_text(tmp_path):
    path = tmp_path / "seen.img"
    picture.png(replace(EXAMPLE, text=r"$\frac{$" + "\x1b 数 " * 99, labels=[r"$\frac{$", *EXAMPLE.labels[1:]]), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with house_style():
        sheet = picture.figure(EXAMPLE)
    (squares,) = sheet.axes[0].collections
    filled = [tuple(colour[:3]) != (1.0, 1.0, 1.0) for colour in np.asarray(squares.get_facecolor())]
    assert filled == [bool(gate) for row in GATES for gate in row]
    words = [text.get_text() for text in sheet.axes[0].texts]
    assert {"“Where is my card?”", "2 of 5", "40 %", "90.0 %", "lost"} <= set(words)


def test_png_of_both_kinds_and_two_answers(tmp_path):
    with house_style():
        once, twice = picture.figure(BOTH), picture.figure(AGAIN)
    rows = [row for pair in zip(GATES, BLOCKS, strict=True) for row in pair]
    for sheet, dots in ((once, 0), (twice, sum(row.count(0) for row in rows))):
        squares, *others = sheet.axes[0].collections
        filled = [tuple(colour[:3]) != (1.0, 1.0, 1.0) for colour in np.asarray(squares.get_facecolor())]
        assert filled == [bool(count) for row in rows for count in row]
        assert sum(len(one.get_paths()) for one in others) == dots
        words = [text.get_text() for text in sheet.axes[0].texts]
        assert words.count("heads") == words.count("blocks") == 3
        assert {"2 of 5", "3 of 7", "14 %"} <= set(words)
    assert any("answered twice" in text.get_text() for text in twice.axes[0].texts)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (29, 3), (2, 97)])
@pytest.mark.parametrize("blocks", [0, 24])
def test_png_keeps_everything_on_the_sheet(layers, heads, blocks):
    odd = replace(EXAMPLE, wanted=[0.5] * layers, gates=[[2] * heads] * layers, labels=["w" * 99] * 7, text="m " * 999)
    if blocks:
        odd = replace(odd, blocks=[[1] * blocks] * layers, blocks_wanted=[1.0] * layers, units_share=1.5)
    with house_style():
        sheet = picture.figure(odd)
        sheet.set_dpi(50)
        sheet.draw_without_rendering()
        page = sheet.bbox
        for text in sheet.axes[0].texts:
            box = text.get_window_extent()
            assert box.x0 >= page.x0, text.get_text()
            assert box.x1 <= page.x1, text.get_text()
            assert box.y0 >= page.y0, text.get_text()
            assert box.y1 <= page.y1, text.get_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": ["one"]}, "1 labels for 7 probabilities"),
        ({"labels": [], "probabilities": []}, "0 labels"),
        ({"wanted": [0.5]}, "3 layers for 1 budgets"),
        ({"gates": [], "wanted": []}, "gates of 0 layers"),
        ({"gates": [[1], [1, 0], [1]]}, r"gates have \[1, 2, 1\] heads"),
        ({"blocks": BLOCKS}, "blocks of 3 layers for 0 budgets"),
        ({"blocks": BLOCKS[:2], "blocks_wanted": [0.5, 0.5]}, "blocks of 2 layers, gates of 3"),
    ],
)
def test_lists_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(EXAMPLE, **change)
