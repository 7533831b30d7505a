"""What the verbs say: results on stdout, notes and progress on stderr."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budgetformer.data import BadRow, Rows


def echo_unless(quiet: bool) -> Callable[[str], None]:
    """A function for notes: to stderr, or nowhere."""

    def echo(message: str) -> None:
        if not quiet:
            print(message, file=sys.stderr, flush=True)

    return echo


def say_columns(rows: "Rows", echo: Callable[[str], None]) -> None:
    """Which columns were picked."""
    if rows.columns:
        echo(f"{rows.source}: columns " + ", ".join(f"{role}={name}" for role, name in rows.columns.items()))


def say_bad(bad: "Sequence[BadRow]", total: int, echo: Callable[[str], None]) -> None:
    """How many rows are left out, and why the first one is."""
    if bad:
        first = bad[0]
        echo(f"{len(bad):,} of {total:,} rows left out; the first: {first.source}, line {first.line}: {first.reason}")


@contextlib.contextmanager
def progress_bar(off: bool) -> "Iterator[Callable[[int], object]]":
    """A bar on stderr where a person looks at it; the number of rows is not known, so it counts."""
    if off or not sys.stderr.isatty():
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(unit=" rows", file=sys.stderr) as bar:
        yield bar.update


def quieten_libraries() -> None:
    """What transformers says on loading is for developers: no bars, and no notes unless asked by its own variable."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()


def show(result: Any) -> None:
    """A result on stdout: JSON, or something for people to look at."""
    if isinstance(result, dict):
        print(json.dumps(result, ensure_ascii=False))
        return
    from rich.console import Console

    Console(file=sys.stdout, highlight=False).print(result)
