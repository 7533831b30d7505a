"""The verb `report`: one page of one run or several."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.cli.folders import usable
from budgetformer.cli.speaking import echo_unless
from budgetformer.errors import UsageError
from budgetformer.outputs import check_output_file
from budgetformer.settings import ReportSettings

if TYPE_CHECKING:
    from budgetformer.data import Rows
    from budgetformer.predict import Answer

Sources = Mapping[str, str]


def report(settings: ReportSettings, sources: Sources, runs: Sequence[str] | None = None) -> int:
    """Write the page and the numbers behind it, and say where they are."""
    if not runs:
        raise UsageError("no run is given; name the folders of one or more runs, for example runs/demo")
    output = Path(settings.output)
    for path in (output, output.with_suffix(".json")):
        check_output_file(path, overwrite=settings.overwrite)
    from budgetformer.report.page import read_run, write_page

    names = _names(runs)
    found = {name: read_run(folder) for name, folder in zip(names, runs, strict=True)}
    examples = {}
    if settings.texts is not None:
        rows = usable(settings, settings.texts, require_labels=True)
        examples = {name: _examples(folder, rows, settings) for name, folder in zip(names, runs, strict=True)}
    numbers = write_page(found, output, examples)
    print(f"{output}\n{numbers}")
    return 0


def _names(folders: Sequence[str]) -> list[str]:
    """What runs are called: the last names of their folders, as many as tell them apart; no more leaves the machine."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UsageError("a run is given twice; name each folder once")
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return ["/".join(path.parts[-length:]) for path in paths]


def _examples(folder: str, rows: "Rows", settings: ReportSettings) -> dict[str, list[dict[str, Any]]]:
    """The texts that a run's model finds hardest, and those that it spends most and least on.

    Raises:
        DataError: a label that the model does not know.
    """
    from budgetformer.data import match_labels
    from budgetformer.predict import Predictor

    predictor = Predictor.load(folder, label_separator=settings.label_separator)
    echo_unless(settings.quiet)(predictor.engine.note)
    names, several = predictor.engine.labels, predictor.engine.multi_label
    where = {"lines": rows.lines, "source": rows.source}
    if several:
        truth = match_labels(rows.labels or [], names, label_separator=settings.label_separator, **where)
    else:
        places = match_labels(rows.labels or [], names, **where)
        truth = [[int(i == place) for i in range(len(names))] for place in places]
    answered = [
        {
            "text": text if pair is None else f"{text} | {pair}",
            "label": label,
            "answer": answer.label,
            "score": answer.score,
            "budget": answer.budget,
            "loss": round(_loss(answer, wanted, several), 4),
        }
        for text, pair, label, answer, wanted in zip(
            rows.texts,
            rows.pairs or [None] * len(rows),
            rows.labels or [],
            predictor.predict(rows),
            truth,
            strict=True,
        )
        if answer.error is None
    ]
    by_loss = sorted(answered, key=lambda one: -one["loss"])
    by_cost = sorted(answered, key=lambda one: (one["budget"], one["loss"]))
    some = settings.examples
    return {"hardest": by_loss[:some], "dearest": by_cost[::-1][:some], "cheapest": by_cost[:some]}


def _loss(answer: "Answer", wanted: Sequence[int], several: bool) -> float:
    """The cross-entropy of an answer, of several labels the mean over the classes; scores have six digits."""
    chances = [min(max(score, 1e-6), 1 - 1e-6) for score in (answer.scores or {}).values()]
    pairs = zip(chances, wanted, strict=True)
    each = [math.log(chance if yes else 1 - chance) for chance, yes in pairs if yes or several]
    return -sum(each) / len(each)
