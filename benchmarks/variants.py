"""Everything that can be measured for a model, by name: the peers, our engine and an earlier prototype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from inputs import Inputs
from models import BenchModel
from ours import Ours
from peers import COMPILED, PEERS
from prototype import Prototype, build_engine
from selections import DENSE, SELECTIONS, Selection

PRECISIONS = ("fp32", "bf16", "int8")
BASELINE = "torch SDPA fp32"
PROTOTYPE_SELECTIONS = (DENSE, Selection(heads=0.25), Selection(heads=0.25, blocks=0.25))


class Runner(Protocol):
    """What a variant is once it is loaded."""

    def settle(self, inputs: Inputs) -> None: ...

    def prepare(self, inputs: Inputs) -> Callable[[], np.ndarray]: ...

    def prepare_texts(self, texts: Sequence[str]) -> Callable[[], list[str]]: ...


@dataclass(frozen=True)
class Variant:
    """family: "peer", "ours" or "prototype". selection: what runs; None where the model's routers choose."""

    name: str
    family: str
    precision: str
    selection: Selection | None
    build: Callable[[], Runner]


@dataclass(frozen=True)
class Options:
    """What to include. path: the engine's path. prototype: its folder."""

    cache: Path
    peers: bool = True
    compiled: bool = False
    path: str = "auto"
    prototype: Path | None = None


def variants(model: BenchModel, threads: int, options: Options) -> list[Variant]:
    """In the order of the table. Nothing is loaded yet; an engine is loaded once for all its selections."""
    made = []
    rows = PEERS if options.peers else [row for row in PEERS if row[0] == "torch SDPA" and row[1] == "fp32"]
    for name, precision, kind in [*rows, *([COMPILED] if options.compiled else [])]:
        build = lambda kind=kind: kind(model, threads)  # noqa: E731
        made.append(Variant(f"{name} {precision}", "peer", precision, DENSE, build))

    @cache
    def engine(precision: str) -> Any:
        from budgetformer.engine import Engine

        made = Engine.load(model.folder, dtype=precision, path=options.path, threads=threads)
        if made.path.dtype != precision:  # it fell back, and is measured under another name already
            raise RuntimeError(made.note)
        return made

    for precision in PRECISIONS:
        chosen: list[Selection | None] = [*SELECTIONS, *([None] if model.trained else [])]
        for selection in chosen:
            title = "as trained" if selection is None else selection.name
            build = lambda precision=precision, selection=selection: Ours(engine(precision), model, selection)  # noqa: E731
            made.append(Variant(f"ours {precision} {title}", "ours", precision, selection, build))

    if options.prototype is not None:
        folder, build_in = options.prototype, options.cache / "prototype"

        @cache
        def earlier(precision: str) -> Any:
            return build_engine(folder, build_in, model, precision, threads)

        for precision in ("fp32", "bf16"):
            for selection in PROTOTYPE_SELECTIONS:
                build = lambda p=precision, s=selection: Prototype(earlier(p), model, s)  # noqa: E731
                made.append(
                    Variant(f"prototype {precision} {selection.name}", "prototype", precision, selection, build)
                )
    return made


def kept(all_of_them: Sequence[Variant], only: str | None) -> list[Variant]:
    """Those whose name holds one of the words of `only` (separated by commas), and always the baseline."""
    words = [word.strip().lower() for word in (only or "").split(",") if word.strip()]
    return [
        one
        for one in all_of_them
        if one.name == BASELINE or not words or any(word in one.name.lower() for word in words)
    ]
