"""The function for Spark: the answers of the command line, frame by frame, an error for a bad row."""

import json
import random
import shutil
import sys

import pandas as pd
import pytest

import tiny
from budgetformer.errors import DataError, ModelFolderError, UsageError
from budgetformer.ports import spark
from budgetformer.predict import Predictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.make_folder(tmp_path_factory.mktemp("model"), routed=True))


def texts(count, seed=3):
    rng = random.Random(seed)
    return [" ".join(rng.choices(tiny.WORDS, k=rng.randint(1, 19))) for _ in range(count)]


def frames(sizes):
    """Frames as Spark gives them: with columns that nobody asked for, too."""
    rows = texts(sum(sizes))
    first = 0
    for size in sizes:
        part = rows[first : first + size]
        yield pd.DataFrame({"id": [f"row-{first + i}" for i in range(size)], "text": part, "other": 1.5})
        first += size


def columns_of(schema):
    return [part.split()[0] for part in schema.split(", ")]


def test_frames_are_answered_as_the_predictor_does(folder):
    answer, schema = spark.predictor(folder, budget=0.5, top=2)
    found = [*answer(frames([7, 0, 31]))]
    assert [len(frame) for frame in found] == [7, 0, 31]
    assert all(list(frame.columns) == columns_of(schema) for frame in found)
    engine = Predictor.load(folder, threads=1).engine
    wanted = engine.predict(texts(38), budget=0.5)
    table = pd.concat(found)
    assert table["id"].tolist() == [f"row-{i}" for i in range(38)]
    assert table["label"].tolist() == wanted.labels
    assert table["score"].tolist() == pytest.approx(wanted.probabilities.max(1).tolist(), abs=1e-6)
    assert table["heads_used"].tolist() == wanted.output.gates.sum((1, 2)).tolist()
    assert table["budget"].tolist() == pytest.approx(wanted.head_share.tolist(), abs=1e-4)
    assert table["error"].isna().all()
    for scores, label in zip(table["scores"], table["label"], strict=True):
        assert next(iter(json.loads(scores))) == label
        assert len(json.loads(scores)) == 2


def test_a_bad_row_has_an_error_in_its_place(folder):
    answer, _ = spark.predictor(folder, id_column=None)
    (found,) = answer(iter([pd.DataFrame({"text": ["my card", None, " ", "the cash", float("nan"), 7]})]))
    assert found["label"].notna().tolist() == [True, False, False, True, False, False]
    errors = ["the 'text' is empty", "the 'text' is only white space", "the 'text' is empty", "the 'text' is an object"]
    assert found["error"].dropna().tolist() == errors
    assert found["id"].isna().all()
    assert str(found["heads_used"].dtype) == "Int64"


def test_pairs(folder):
    frame = pd.DataFrame({"one": ["my card", "is lost", "not"], "two": ["the cash", None, "back"], "key": [5, 6, 7]})
    answer, _ = spark.predictor(folder, text_column="one", text_pair_column="two", id_column="key")
    (found,) = answer(iter([frame]))
    assert found["error"].tolist()[1] == "the 'two' is empty"
    wanted = Predictor.load(folder, threads=1).engine.predict(["my card", "not"], ["the cash", "back"])
    assert found["label"].dropna().tolist() == wanted.labels
    assert found["id"].tolist() == ["5", "6", "7"]


def test_the_engine_is_loaded_once_in_a_process(folder, monkeypatch):
    answer, _ = spark.predictor(folder)
    spark._loaded.cache_clear()
    loads = []
    monkeypatch.setattr(spark.Predictor, "load", lambda *a, load=Predictor.load, **k: loads.append(a) or load(*a, **k))
    for _ in range(3):
        assert len([*answer(frames([2, 2]))]) == 2
    assert len(loads) == 1


def test_what_is_wrong_is_said_before_spark_begins(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").unlink()
    with pytest.raises(ModelFolderError):
        spark.predictor(str(tmp_path / "broken"))
    with pytest.raises(UsageError, match="budget"):
        spark.predictor(folder, budget=1.5)
    answer, _ = spark.predictor(folder, text_column="txet")
    with pytest.raises(DataError, match="no column 'txet' among 'id', 'text', 'other'"):
        next(answer(frames([3])))


@pytest.mark.slow
def test_in_spark(folder, tmp_path):
    """Two Python workers of a local Spark, started apart: it brings threads and warnings of its own."""
    from engine_helpers import in_python

    pytest.importorskip("pyspark", reason="pyspark is 400 MB and needs Java, so no extra brings it")
    code = """
import sys
from pyspark.sql import SparkSession
from budgetformer.ports.spark import predictor
folder, source, output = sys.argv[1:]
spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
         .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate())
answer, schema = predictor(folder, budget=0.5)
frame = spark.read.parquet(source).repartition(4)
frame.mapInPandas(answer, schema).toPandas().to_parquet(output)
spark.stop()
"""
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    rows = pd.DataFrame({"id": [str(i) for i in range(200)], "text": [None, *texts(199)]})
    rows.to_parquet(source)
    done = in_python(code, folder, source, output, timeout=500, PYSPARK_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr[-3000:]
    found = pd.read_parquet(output)
    (wanted,) = spark.predictor(folder, budget=0.5)[0](iter([rows]))
    found = found.sort_values("id", key=lambda ids: ids.astype(int)).reset_index(drop=True)
    assert found["error"].tolist()[0] == "the 'text' is empty"
    for column in ("id", "label", "scores", "heads_used", "budget", "score"):
        assert found[column].isna().tolist() == wanted[column].isna().tolist(), column
        assert found[column].dropna().tolist() == wanted[column].dropna().tolist(), column
