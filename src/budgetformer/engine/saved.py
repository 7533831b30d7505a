"""`engine.json`: what an engine has found out about a model folder, kept beside the weights.

The number type that passed its accuracy gate, and the curve of accuracy and time over budgets.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from budgetformer.config import DTYPES
from budgetformer.errors import ModelFolderError
from budgetformer.folder import read_json_object
from budgetformer.outputs import write_aside

FILE = "engine.json"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One budget, measured. budget None is the learned one.

    head_share: mean share of heads that ran. ms_per_text: median over rounds. agreement: share of texts with the same
    label as with every head on. accuracy: against labels, None where there were none.
    """

    budget: float | None
    head_share: float
    ms_per_text: float
    agreement: float
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Saved:
    """dtype: what `auto` means for this folder. agreement: of its labels with those of fp32, when it was checked.

    curve: points of `Engine.tune`, and tuned_on: the texts, path, type and threads that they were measured with.
    """

    dtype: str | None = None
    agreement: float | None = None
    curve: tuple[Point, ...] = ()
    tuned_on: dict[str, Any] | None = None


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
        points = tuple(Point(**point) for point in table.pop("curve", ()))
        saved = Saved(curve=points, **table)
        if saved.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype is {str(saved.dtype)[:40]!r}")
        numbers = [value for point in points for value in asdict(point).values() if value is not None]
        numbers += [] if saved.agreement is None else [saved.agreement]
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
            raise ValueError("a value is no number")
    except (TypeError, ValueError) as error:
        raise ModelFolderError(f"{path}: not as we write it ({str(error)[:100]}); remove it") from None
    return saved


def write_saved(folder: str | Path, saved: Saved) -> None:
    """Replace what was kept: aside first, then by a rename."""
    with write_aside(Path(folder) / FILE) as aside:
        aside.write_text(json.dumps(asdict(saved), indent=1) + "\n", encoding="utf-8")
