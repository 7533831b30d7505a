"""`engine.json`: what an engine has found out about a model folder, kept beside the weights.

The number type that passed its accuracy gate, the curve of accuracy and time over budgets, and the calibrated way of
answering.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from budgetformer.config import DTYPES
from budgetformer.errors import ModelFolderError, UsageError
from budgetformer.folder import read_json_object
from budgetformer.outputs import write_aside

FILE = "engine.json"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One budget, measured. budget None is the learned one. margin: under which texts were answered again; None: as
    learned, and no text beside a named budget.

    head_share: mean share of heads that ran. units_share: counted FLOPs of the units that ran, heads and feed-forward
    blocks, over those of all that have a budget. ms_per_text: median over rounds. agreement: share of texts with the
    same label as with every unit on. accuracy: against labels, None where there were none.
    """

    budget: float | None
    head_share: float
    units_share: float
    ms_per_text: float
    agreement: float
    accuracy: float | None = None
    margin: float | None = None


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of answering: first with `budget` (None is the learned one), and again with every unit on where the first
    answer is unsure, its two best probabilities closer than `margin`.

    What a sample said of it: again, share of the texts answered twice; disagreements, texts that do not get the full
    model's label; bound, the agreement that is not refuted by so many (Clopper-Pearson); flops_share, counted FLOPs of
    the whole model, second answers included, over those of the dense model.
    """

    budget: float | None
    margin: float
    again: float
    disagreements: int
    bound: float
    flops_share: float


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The way of answering that `calibrating.calibrate` chose, and the evidence.

    Promised: of texts like those it was chosen on, a share of at least `agree` gets the full model's label. The promise
    holds with `confidence`, and for this type of numbers and longest text. texts: how many were in the sample. when:
    UTC. ways: the cheapest of each first answer, and the full model: one of them is `way`.
    """

    way: Way
    agree: float
    confidence: float
    texts: int
    dtype: str
    path: str
    max_length: int
    when: str
    ways: tuple[Way, ...]

    def beyond(self, dtype: str, max_length: int) -> str | None:
        """One line where the promise does not reach what is used, else None."""
        if (dtype, max_length) == (self.dtype, self.max_length):
            return None
        then = f"calibrated for {self.dtype} and at most {self.max_length} tokens"
        return f"{then}, used for {dtype} and at most {max_length} tokens: nothing is promised; calibrate again"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """dtype: what `auto` means for this folder. agreement: of its labels with those of fp32, when it was checked.

    curve: points of `tuning.tune`, and tuned_on: the texts, path, type and threads that they were measured with.
    """

    dtype: str | None = None
    agreement: float | None = None
    curve: tuple[Point, ...] = ()
    tuned_on: dict[str, Any] | None = None
    calibrated: Calibrated | None = None

    def promised(self) -> Calibrated:
        """What was calibrated. Raises `UsageError` where nothing was."""
        if self.calibrated is None:
            raise UsageError(
                "budget is 'calibrated', and this model has not been calibrated yet; run: "
                "budgetformer calibrate --model FOLDER --data FILE"
            )
        return self.calibrated


def read_saved(folder: str | Path) -> Saved:
    """What was kept; nothing where there is no file.

    Raises:
        ModelFolderError: the file is damaged.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return Saved()
    table = read_json_object(path)
    try:
        # Before blocks had a budget, a point told of heads alone.
        points = tuple(Point(**{"units_share": point["head_share"], **point}) for point in table.pop("curve", ()))
        found = table.pop("calibrated", None)
        saved = Saved(curve=points, calibrated=None if found is None else _calibrated(found), **table)
        if saved.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype is {str(saved.dtype)[:40]!r}")
        _check_numbers([saved.agreement], *(asdict(point).values() for point in points))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(f"{path}: not as we write it ({str(error)[:100]}); remove it") from None
    return saved


def _calibrated(table: dict[str, Any]) -> Calibrated:
    ways = tuple(Way(**way) for way in table["ways"])
    found = Calibrated(**{**table, "way": Way(**table["way"]), "ways": ways})
    for way in (found.way, *ways):
        _check_numbers(asdict(way).values())
        if not (0 <= way.margin <= 1 and (way.budget is None or 0 < way.budget <= 1)):
            raise ValueError(f"budget is {way.budget}, margin {way.margin}")
    if found.dtype not in DTYPES:
        raise ValueError(f"dtype is {str(found.dtype)[:40]!r}")
    _check_numbers([found.agree, found.confidence, found.texts, found.max_length])
    return found


def _check_numbers(*groups: Iterable[Any]) -> None:
    values = [value for group in groups for value in group if value is not None]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError("a value is no number")


def write_saved(folder: str | Path, saved: Saved) -> None:
    """Replace what was kept: aside first, then by a rename."""
    with write_aside(Path(folder) / FILE) as aside:
        aside.write_text(json.dumps(asdict(saved), indent=1) + "\n", encoding="utf-8")
