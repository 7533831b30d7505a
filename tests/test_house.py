"""The README's tree names every file of the package, and what it names is there."""

import re
from pathlib import Path

import budgetformer

PACKAGE = Path(budgetformer.__file__).parent
README = PACKAGE.parents[1] / "README.md"


def tree() -> str:
    return README.read_text(encoding="utf-8").partition("src/budgetformer/\n")[2].partition("\n```")[0]


def test_every_file_is_in_the_tree():
    files = {path.name for path in PACKAGE.rglob("*.py")} - {"__init__.py", "__main__.py"}
    assert files - set(re.findall(r"[a-z0-9_]+\.py", tree())) == set()


def test_every_name_in_the_tree_is_a_file():
    root = PACKAGE.parents[1]
    named = set(re.findall(r"[a-z0-9_]+\.py", tree()))
    folders = ("src", "tests", "examples", "experiments", "docs")
    there = {path.name for folder in folders for path in (root / folder).rglob("*")}
    assert named - there == set()
