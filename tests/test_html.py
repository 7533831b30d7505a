"""The page shows every number of its runs, fetches nothing, runs nothing, and no name breaks out of its place."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import tiny
from budgetformer import cli
from budgetformer.errors import ModelFolderError
from budgetformer.report import page
from budgetformer.report.page import read_run, write_page

HOSTILE = (
    *("<script>alert(1)</script>", "=cmd|' /C calc'!A0", "שלום\u202eabc", "</style><img src=http://x.invalid>"),
    "{{ 7*777 }}",
)
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Seen(HTMLParser):
    """Tags, attributes and text of a page; every tag that is opened must be closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self.open, self.ids = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def run(names=("no", "yes", "perhaps"), layers=2, heads=3, blocks=5, seed=0, **changes):
    dice = np.random.default_rng(seed)
    both = {"heads": heads, "blocks": blocks} if blocks else {"heads": heads}
    budgeted = {"accuracy": 0.9, "macro_f1": 0.89, "rows": 30, "head_share": 0.405, "head_share_std": 0.04}
    budgeted |= {"units_flops_share": 0.41, "units_flops_share_std": 0.05, "flops_share": 0.7, "seconds_per_1000": 6.0}
    for kind, units in both.items():
        budgeted[f"{kind}_by_layer"] = dice.random((layers, units)).round(4).tolist()
        budgeted[f"{kind}_by_class"] = {name: dice.random((layers, units)).round(4).tolist() for name in names}
    if blocks:
        budgeted["block_share"] = 0.39
    budgeted |= {"share_histogram": {"edges": [0.0, 0.5, 1.0], "counts": [20, 10]}}
    budgeted |= {"confusion": {"labels": list(names), "cells": [[0, 0, 9], [0, 1, 1], [1, 1, 17], [2, 1, 3]]}}
    bins = [{"answers": 20, "confidence": 0.6, "accuracy": 0.5}, {"answers": 10, "confidence": 0.9, "accuracy": 0.95}]
    budgeted |= {"calibration": {"bins": bins, "ece": 0.0833}, "moved": {"length": 0.62, "loss": -0.04, "class": 0.31}}
    score = {"texts": 10, "precision": 0.9, "recall": 0.8, "f1": 0.85, "units_share": 0.4}
    budgeted["classes"] = dict.fromkeys(names, score)
    shares = [{"budget": b, "head_share": b, "block_share": b, "units_flops_share": b} for b in (0.25, 1.0)]
    budgeted["dial"] = [{**s, "accuracy": 0.8 + s["budget"] / 10, "flops_share": s["budget"]} for s in shares]
    dense = {"accuracy": 0.92, "macro_f1": 0.9, "rows": 30, "head_share": 1.0, "flops_share": 1.0}
    made = {"dense": dense, "budgeted": budgeted, "data": {"test_rows": 30, "labels": list(names)}, "curve": []}
    made |= {"settings": {"target_budget": 0.4, "train_file": "/home/me/secret/train.csv", "model": "demo"}}
    return made | {"environment": {"cpu": "some", "engine_library": "/home/me/lib.so"}} | changes


def save(folder, metrics):
    folder.mkdir()
    (folder / "metrics.json").write_text(json.dumps(metrics, ensure_ascii=False), encoding="utf-8")
    return folder


def test_nothing_is_fetched_and_nothing_runs():
    text = page.page({"one": run(), "two": run(seed=1)})
    seen = Seen(text)
    assert not {"script", "link", "iframe", "object", "embed", "img", "form", "base"} & set(seen.tags)
    assert not [name for _, name, _ in seen.attributes if name.startswith("on")]
    for _, name, value in seen.attributes:
        if name in ("href", "src", "action", "ns1:href", "xlink:href"):
            assert value.startswith("#"), value
            assert value[1:] in seen.ids, value
        assert "http:" not in value or name.startswith("xmlns"), (name, value)
    for place in re.findall(r"url\(#([^)]+)\)", text):
        assert place in seen.ids
    assert "url(http" not in text
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in seen.attributes
    assert len(seen.ids) == len(set(seen.ids)), "two figures, or two runs, share an id"


@pytest.mark.parametrize("blocks", [0, 5])
def test_every_number_of_a_run_is_there(blocks):
    text = Seen(page.page({"mine": run(blocks=blocks)})).text
    for words in ("90.0 % 89.0 %", "92.0 %", "40.5 ± 4.0 %", "-2.0 points", "off by 8.3 %", "target 40.0 %"):
        assert words.split()[0] in text, words
    assert "longer texts spend more: strongly" in text
    assert "texts that the model finds harder spend less: hardly" in text
    assert "the classes differ in what they spend: clearly" in text
    assert "perhaps yes 3 100.0 %" in text, "the most confused pair first"
    assert text.index("perhaps yes 3") < text.index("no yes 1 10.0 %")
    assert ("Blocks by layer" in text) == ("FFN blocks used" in text) == bool(blocks)


def test_the_maps_are_the_numbers():
    metrics = run()
    found = page._maps(metrics["budgeted"])
    assert [one["title"].partition(":")[0] for one in found] == [
        "Heads by layer", "Heads by class", "Blocks by layer", "Blocks by class",
    ]  # fmt: skip
    layers = found[2]["rows"]
    for row, shares in zip(layers, metrics["budgeted"]["blocks_by_layer"], strict=True):
        mean, *cells = row["cells"]
        assert [cell["value"] for cell in cells] == shares
        assert [cell["text"] for cell in cells] == [f"{100 * share:.0f}" for share in shares]
        assert mean["text"] == f"{100 * sum(shares) / len(shares):.1f} %"
    for row in found[1]["rows"]:
        cells = [cell["value"] for cell in row["cells"][1:]]
        assert cells == [share for layer in metrics["budgeted"]["heads_by_class"][row["name"]] for share in layer]


def test_the_confusion_matrix_is_the_counts():
    drawn = page._confusion(run()["budgeted"]["confusion"])
    assert [[cell["text"] for cell in row["cells"]] for row in drawn["rows"]] == [
        ["9", "1", ""], ["", "17", ""], ["", "3", ""],
    ]  # fmt: skip
    assert [cell["value"] for cell in drawn["rows"][0]["cells"]] == [0.9, 0.1, 0.0]
    assert drawn["rows"][2]["cells"][1]["hint"] == "perhaps → yes: 3"
    assert page._confusion({"labels": ["x"] * 201, "cells": []}) is None


def test_hostile_names_stay_names(tmp_path):
    name = HOSTILE[0] + "run"
    example = {"text": HOSTILE[0], "label": HOSTILE[1], "answer": HOSTILE[2], "score": 0.5, "budget": 0.2}
    examples = {kind: [example] for kind in page.EXAMPLES}
    numbers = write_page({name: run(names=HOSTILE)}, tmp_path / "page.html", {name: examples})
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    seen = Seen(text)
    assert not {"script", "img"} & set(seen.tags)
    assert text.count("</style>") == 1
    for one in HOSTILE:
        assert page.plain(one) in seen.text, one
    assert "\u202e" not in text
    assert "5439" not in text, "a template in a name is a name"
    assert json.loads(numbers.read_text(encoding="utf-8"))["runs"][name]["data"]["labels"] == list(HOSTILE)


def test_colours_follow_the_page():
    text = page.page({"one": run()})
    assert "var(--ink)" in text
    drawn = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(drawn) == 3
    for one in drawn:
        assert not re.findall(r"style=\"[^\"]*#[0-9a-f]{6}", one), "a colour that does not follow light and dark"
    assert "prefers-color-scheme: dark" in text


def test_the_numbers_behind_it_name_no_folder(tmp_path):
    broken = run()
    broken["budgeted"]["loss"] = float("nan")
    numbers = write_page({"one": broken}, tmp_path / "report.html")
    assert numbers == tmp_path / "report.json"
    found = json.loads(numbers.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found["runs"]["one"]["budgeted"]["loss"] is None
    assert found["runs"]["one"]["budgeted"]["heads_by_layer"] == broken["budgeted"]["heads_by_layer"]
    assert found["runs"]["one"]["settings"]["train_file"] == "train.csv"
    for text in (numbers.read_text(), (tmp_path / "report.html").read_text()):
        assert "/home/me" not in text


def test_several_runs_stand_beside_each_other():
    one, two = run(), run(seed=1)
    two["budgeted"]["accuracy"] = 0.87
    text = Seen(page.page({"one": one, "two": two})).text
    assert "one 92.0 % 90.0 % -2.0 points 40.5 ± 4.0 % 39.0 % 70.0 % 6.00 s" in text
    assert "two 92.0 % 87.0 % -5.0 points" in text
    assert "different texts" not in text
    two["data"] = {"labels": ["other"]}
    assert "different texts" in Seen(page.page({"one": one, "two": two})).text
    assert "beside each other" not in Seen(page.page({"one": one})).text


def test_time_is_drawn_where_it_was_measured():
    point = {"budget": 0.5, "ms_per_text": 2.5, "accuracy": 0.9}
    unlabelled = {**point, "accuracy": None}
    assert "milliseconds per text" not in page.page({"one": run(), "two": run(curve=[unlabelled])})
    assert "milliseconds per text" in page.page({"one": run(curve=[point]), "two": run(curve=[unlabelled])})


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFolderError, match=r"metrics.json: no such file; give the folder of a run of train"):
        read_run(tmp_path / "empty")
    for content, words in (("[]", "not an object"), ("{", "not valid JSON"), ("{}", "no budgeted model")):
        (tmp_path / "empty" / "metrics.json").write_text(content)
        with pytest.raises(ModelFolderError, match=words):
            read_run(tmp_path / "empty")
    ragged = run()
    ragged["budgeted"]["confusion"]["cells"] = [[0, 99, 1]]
    folder = save(tmp_path / "ragged", ragged)
    output = tmp_path / "r.html"
    assert cli.main(["report", str(folder), "--output", str(output)]) == 4
    assert "is not as train writes it (IndexError)" in capsys.readouterr().err
    assert not output.exists()


def test_the_verb(tmp_path, capsys):
    for place in ("a/run", "b/run"):
        (tmp_path / place).parent.mkdir()
        save(tmp_path / place, run())
    output = tmp_path / "r.html"
    arguments = ["report", str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run"), "--output", str(output)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.split() == [str(output), str(output.with_suffix(".json"))]
    text = output.read_text()
    assert "a/run" in text
    assert "b/run" in text
    assert str(tmp_path) not in text
    assert cli.main(arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main([*arguments, "--overwrite"]) == 0
    for wrong in (["report"], ["report", *[str(tmp_path / "a" / "run")] * 2], ["report", "x", "--output", "x.json"]):
        capsys.readouterr()
        assert cli.main(wrong) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_texts_are_shown_on_request_only(tmp_path, capsys):
    folder = tiny.make_folder(tmp_path / "run", routed=True)
    (folder / "metrics.json").write_text(json.dumps(run(names=tiny.LABELS)))
    words = ["card lost please", "where is my cash", "pay the money back", "top up", "my card", "not the card"]
    lines = [f"{text},{tiny.LABELS[i % 3]}" for i, text in enumerate(words)]
    data = tmp_path / "data.csv"
    data.write_text("\n".join(["text,label", *lines]) + "\n")
    output = tmp_path / "r.html"
    assert cli.main(["report", str(folder), "--output", str(output)]) == 0
    assert not any(text in output.read_text() for text in words)
    more = ["--texts", str(data), "--examples", "2", "--overwrite"]
    assert cli.main(["report", str(folder), "--output", str(output), *more]) == 0
    found = json.loads(output.with_suffix(".json").read_text())["runs"]["run"]["examples"]
    assert {kind: len(rows) for kind, rows in found.items()} == {"hardest": 2, "dearest": 2, "cheapest": 2}
    text = Seen(output.read_text()).text
    assert "Whoever gets this page can read them" in text
    assert all(row["text"] in text for rows in found.values() for row in rows)

    from budgetformer.predict import Predictor

    predictor = Predictor.load(folder)
    answers = [predictor.engine.predict([one]) for one in words]
    losses = [-np.log(answer.probabilities[0, i % 3]) for i, answer in enumerate(answers)]
    assert [row["text"] for row in found["hardest"]] == [words[i] for i in np.argsort(losses)[::-1][:2]]
    spent = [float(answer.head_share[0]) for answer in answers]
    assert found["cheapest"][0]["budget"] == pytest.approx(min(spent), abs=1e-4)
    assert found["dearest"][0]["budget"] == pytest.approx(max(spent), abs=1e-4)
    capsys.readouterr()
    data.write_text("text,label\ncard,unknown\n")
    assert cli.main(["report", str(folder), "--output", str(output), *more]) == 3
    assert "'unknown'" in capsys.readouterr().err


def test_labels_in_a_column_of_another_name_and_rows_that_are_left_out(tmp_path, capsys):
    folder = tiny.make_folder(tmp_path / "run", routed=True)
    (folder / "metrics.json").write_text(json.dumps(run(names=tiny.LABELS)))
    data, output = tmp_path / "data.csv", tmp_path / "r.html"
    data.write_text(f"text,label,wanted\nmy card,no label,{tiny.LABELS[1]}\n ,no label,{tiny.LABELS[0]}\n")
    arguments = ["report", str(folder), "--output", str(output), "--texts", str(data), "--overwrite"]
    assert cli.main([*arguments, "--label-column", "wanted"]) == 0
    (hardest,) = json.loads(output.with_suffix(".json").read_text())["runs"]["run"]["examples"]["hardest"]
    assert hardest["label"] == tiny.LABELS[1]
    assert "1 of 2 rows" in capsys.readouterr().err
    data.write_text("text,label\n ,cash\n")
    assert cli.main(arguments) == 3
    assert "none of its 1 rows is usable" in capsys.readouterr().err
