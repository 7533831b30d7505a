"""How strings that strangers wrote (texts, label names), our shares and settings are worded: in a terminal, a figure,
Markdown.

A label can hold an escape sequence that repaints a terminal, a `$` that matplotlib reads as mathematics, a pipe that
splits a table, or a mark that turns the reading direction of everything after it.
"""

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Everything that is not itself a mark on the page: controls (ESC among them), format characters (reading direction),
# lone surrogates, unassigned code points, line and paragraph separators.
_INVISIBLE = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}
# Zero-width joiners hold Persian words and family emoji together, and cannot move or hide anything else.
_JOINERS = {"\u200c", "\u200d"}
_MARKDOWN = re.compile(r"[\\`*\[\]|~$#!]|(?<![^\W_])_|_(?![^\W_])")


def cells(text: str) -> int:
    """Columns that `text` takes in a terminal: wide East Asian characters count two, combining marks none."""
    from rich.cells import cell_len

    return cell_len(text)


def plain(text: str, width: int | None = None, *, middle: bool = False) -> str:
    """`text` on one line with nothing invisible in it, cut to `width` columns with an ellipsis at its end.

    With `middle` the ellipsis stands after two thirds and the end is kept: long labels often differ only there. White
    space of any kind becomes one space. Cutting also bounds the number of characters, since a million combining marks
    take no column at all.
    """
    if width is not None and len(text) > 128 * width:  # a megabyte need not be read to show a line of it
        text = text[: 64 * width] + text[-64 * width :]
    joined = " ".join(text.split())
    shown = "".join(c for c in joined if c in _JOINERS or unicodedata.category(c) not in _INVISIBLE)
    if width is None or (cells(shown) <= width and len(shown) <= 4 * width):
        return shown
    tail = _fitting(shown[::-1], (width - 1) // 3)[::-1] if middle else ""
    head = _fitting(shown, width - 1 - cells(tail))
    return f"{head.rstrip()}…{tail.lstrip()}"


def _fitting(text: str, width: int) -> str:
    """The longest start of `text` that takes at most `width` columns and four characters for each."""
    start = text[: 4 * width]
    while cells(start) > width:
        start = start[:-1]
    return start


def percent(share: float) -> str:
    """A share as per cent with one decimal, never rounded to a certainty that it is not."""
    if 0.9995 <= share < 1:
        return ">99.9 %"
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def markdown(text: str) -> str:
    """`text` as one table cell of Markdown that shows that text: no table, link, mathematics or HTML comes of it."""
    shown = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda found: "\\" + found[0], shown)


# Settings that name files and folders of the machine that trained.
_FILES = (
    "data",
    "train_file",
    "validation_file",
    "test_file",
    "model",
    "dense",
    "class_weights",
    "resume",
    "output_dir",
)


def without_folders(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `train` as they may be passed on: of a file or a folder the last name alone."""
    return {name: last_name(value) if name in _FILES else value for name, value in settings.items()}


def last_name(value: Any) -> Any:
    """The last part of a path; other values, and a hub's names (`hf:OWNER/NAME`, `OWNER/NAME`), stay as they are."""
    if not isinstance(value, str) or value.startswith("hf:"):
        return value
    is_path = value.startswith((".", "~")) or re.search(r"^[A-Za-z]:|\\|^/|/.*/", value) or Path(value).exists()
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if is_path else value
