"""What the pages have made for them when the site is built: tables of options, figures of `figures.py`, mathematics.

A page says `<!-- options: train -->` or `<!-- figure: cost-minilm -->` on a line of its own, or in a line for a figure
of one word. `$...$` and `$$...$$` become MathML on pages whose head says `mathematics: true`; browsers draw it by
themselves, so that nothing is fetched.
"""

import importlib.util
import re
import sys
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from budgetformer import settings
from budgetformer.settings.rules import Checked, flag_of

CALL = re.compile(r"<!-- (options|figure): ([\w-]+) -->")
FORMULA = re.compile("formula:([0-9a-f]+):")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with the text of each page."""
    markdown = CALL.sub(lambda found: MAKERS[found[1]](found[2]), markdown)
    return mathematics(markdown) if page.meta.get("mathematics") else markdown


def on_page_content(html: str, **_: Any) -> str:
    """MkDocs calls this with what has become of it."""
    return FORMULA.sub(lambda found: bytes.fromhex(found[1]).decode(), html)


def options(command: str) -> str:
    """The options of a command, as tables by panel, from its settings class."""
    cls = settings_of(command)
    own = [field for field in fields(cls) if not field.metadata["argument"]]  # pyright: ignore[reportArgumentType]
    parts = []
    for panel in dict.fromkeys(field.metadata["panel"] for field in own):
        members = [field for field in own if field.metadata["panel"] == panel]
        lines = ["| option | what it is | default |", "| --- | --- | --- |"]
        lines += [f"| `{_flag(field)}` | {_cell(field.metadata['help'])} | {_default(field)} |" for field in members]
        parts.append(f"**{panel}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def settings_of(command: str) -> type[Checked]:
    """The settings class of a command."""
    return getattr(settings, f"{command.capitalize()}Settings")


def _flag(field: "Field[Any]") -> str:
    flag = flag_of(field)
    return f"{flag} / --no-{flag.removeprefix('--')}" if field.metadata["rule"].kind is bool else flag


def _default(field: "Field[Any]") -> str:
    if field.default is MISSING:
        return "must be given"
    if field.metadata["rule"].kind is bool:
        return "on" if field.default else "off"
    return "" if field.default is None else f"`{_cell(str(field.default))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


@cache
def _figures() -> dict[str, str]:
    path = Path(__file__).with_name("figures.py")
    spec = importlib.util.spec_from_file_location("budgetformer_docs_figures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.figures()


def figure(name: str) -> str:
    """A figure by its name."""
    return _figures()[name]


MAKERS = {"options": options, "figure": figure}


def mathematics(markdown: str) -> str:
    """LaTeX between dollars as MathML; what is code stays."""
    pieces = re.split(r"(```.*?```|`[^`]*`)", markdown, flags=re.DOTALL)
    for i in range(0, len(pieces), 2):
        blocks = re.sub(r"\$\$(.+?)\$\$", lambda m: _mathml(m[1], "block"), pieces[i], flags=re.DOTALL)
        pieces[i] = re.sub(r"\$([^$]+?)\$", lambda m: _mathml(m[1], "inline"), blocks)
    return "".join(pieces)


def _mathml(latex: str, display: str) -> str:
    """A word that Markdown leaves alone, for the MathML: at the start of a line it would take tags for a block."""
    return f"formula:{convert(' '.join(latex.split()), display=display).encode().hex()}:"
