"""A function for Spark's `mapInPandas`: frames of texts in, frames of answers out, an engine in every worker.

    answer, schema = predictor("/models/mine", budget=0.25)
    frame.select("id", "text").mapInPandas(answer, schema).write.parquet("answers")

Spark itself is not imported here: it calls the function with an iterator of pandas frames, and takes an iterator back.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from budgetformer.data import BadRow, Rows
from budgetformer.data.readers.cells import as_text
from budgetformer.errors import DataError
from budgetformer.predict import Answer, Predictor

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "id string, label string, score double, scores string, heads_used long, budget double, error string"
Frames = Iterator["pd.DataFrame"]


def predictor(
    model: str,
    *,
    text_column: str = "text",
    text_pair_column: str | None = None,
    id_column: str | None = "id",
    threads: int = 1,
    **options: Any,
) -> tuple[Callable[[Frames], Frames], str]:
    """The function for `mapInPandas`, and the schema of what it gives: the columns of `budgetformer predict`.

    A row that cannot be answered has an error in its place, so that there are as many rows as came in, in their order.
    `scores` is a JSON object. The engine is loaded in the worker, once in each of Spark's Python processes.

    Args:
        model: the model folder, at a place that all workers see.
        text_column: the column of the texts.
        text_pair_column: the column of the second texts of pairs.
        id_column: the column of what names the rows in the answers; None leaves their ids empty. Spark's partitions
            know no row numbers.
        threads: of each engine; Spark starts a worker for each core.
        options: of `Predictor.load` (budget, margin, top, label_separator) and `Engine.load` (dtype, path, max_length,
            batch_tokens).

    Raises:
        UsageError, ModelFolderError: as `Predictor.load`, here and now.
    """
    Predictor.load(model, threads=threads, **options)
    settings = tuple(sorted({"threads": threads, **options}.items()))
    columns = (text_column, text_pair_column, id_column)

    def answer(frames: Frames) -> Frames:
        loaded = _loaded(model, settings)
        for frame in frames:
            yield _frame(loaded.predict(_rows(frame, *columns)))

    return answer, SCHEMA


@lru_cache(maxsize=1)
def _loaded(model: str, settings: tuple[tuple[str, Any], ...]) -> Predictor:
    """Spark calls the function once for each partition, many times in one process."""
    options = dict(settings)
    os.environ["RAYON_NUM_THREADS"] = str(options["threads"])  # those of the tokenizer
    return Predictor.load(model, **options)


def _rows(frame: "pd.DataFrame", text: str, pair: str | None, name: str | None) -> Rows:
    missing = next((column for column in (text, pair, name) if column not in (None, *frame.columns)), None)
    if missing is not None:
        columns = ", ".join(map(repr, frame.columns))
        raise DataError(f"no column {missing!r} among {columns}; select it, or name another one")
    cells: dict[str, list[str | None]] = {}
    reasons: list[str | None] = [None] * len(frame)
    for column in filter(None, (text, pair)):
        read = [as_text(value) for value in _values(frame[column])]
        cells[column] = [value for value, _ in read]
        reasons = [
            first or (problem and f"the {column!r} {problem}")
            for first, (_, problem) in zip(reasons, read, strict=True)
        ]
    names = [None] * len(frame) if name is None else _values(frame[name])
    return Rows(
        source="frame",
        texts=[None if reason else value for value, reason in zip(cells[text], reasons, strict=True)],
        pairs=None if pair is None else cells[pair],
        labels=None,
        ids=[None if value is None else str(value) for value in names],
        lines=[*range(1, len(frame) + 1)],
        bad=[BadRow(source="frame", line=line, reason=reason) for line, reason in enumerate(reasons, 1) if reason],
        columns={},
    )


def _values(column: Any) -> list[Any]:
    """A column's cells, None where pandas has NaN or another word for nothing."""
    return column.astype(object).where(column.notna(), None).tolist()


def _frame(answers: Sequence[Answer]) -> "pd.DataFrame":
    import pandas as pd

    rows = [
        {**answer.row(), "scores": None if answer.scores is None else json.dumps(answer.scores, ensure_ascii=False)}
        for answer in answers
    ]
    # Whole numbers stay what they are where some are missing.
    return pd.DataFrame(rows, columns=[part.split()[0] for part in SCHEMA.split(", ")]).astype({"heads_used": "Int64"})
