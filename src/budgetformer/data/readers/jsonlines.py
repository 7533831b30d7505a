"""JSON lines with the standard library: one object a line, so one bad line costs one row and not the file."""

import io
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from budgetformer.data.readers import MAX_ROW_BYTES, Reader, Record
from budgetformer.errors import DataError

_LOOK_AHEAD = 1024
_BLANK = b" \t\r\n"


def read_json_lines(name: str, stream: io.BufferedReader) -> Reader:
    """A reader of one JSON object a line.

    The columns are the keys of the first 1,024 lines together, since a row may leave a key out. Numbers stay as they
    are written ("1.10"), true and false become "true" and "false", null is a missing cell.

    Raises:
        DataError: the file is empty, holds one JSON array, or a line is longer than 32 MiB.
    """
    lines = _lines(name, stream)
    first = list(itertools.islice(lines, _LOOK_AHEAD))
    start = next(filter(None, first), b"")
    if not start:
        raise DataError(f"{name}: the file is empty; it needs a JSON object on a line for each text")
    if start.startswith(b"["):
        raise DataError(f"{name}: holds a JSON array; write one object a line, for example with: jq -c '.[]'")
    parsed = [_parse(line) for line in first]
    columns = list(dict.fromkeys(key for item in parsed if isinstance(item, dict) for key in item))

    def records(wanted: Sequence[str]) -> Iterator[Record]:
        for number, item in enumerate(itertools.chain(parsed, map(_parse, lines)), start=1):
            if isinstance(item, str):
                yield Record(number, None, item)
            else:
                yield Record(number, tuple(_plain(item.get(column)) for column in wanted))

    return Reader(name=name, columns=columns, records=records)


def _lines(name: str, stream: io.BufferedReader) -> Iterator[bytes]:
    for number in itertools.count(1):
        # Lines end at "\n" alone: texts hold U+2028 and U+0085, which other splitters take for line ends.
        line = stream.readline(MAX_ROW_BYTES)
        if not line:
            return
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            raise DataError(f"{name}: line {number}: longer than {MAX_ROW_BYTES >> 20} MiB; write one object a line")
        yield line.strip(_BLANK)


class _Refused(ValueError):
    """Valid for Python's parser, but not something we take."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    item = dict(pairs)
    if len(item) < len(pairs):
        raise _Refused("a key stands twice in an object")
    return item


def _constant(_: str) -> Any:
    raise _Refused("NaN and Infinity are not JSON")


def _parse(line: bytes) -> dict[str, Any] | str:
    """The object on a line, or why there is none. The reason never quotes the line."""
    if not line:
        return "the line is empty"
    try:
        item = json.loads(
            line.decode(), parse_int=str, parse_float=str, parse_constant=_constant, object_pairs_hook=_object
        )
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except _Refused as error:
        return f"not JSON: {error}"
    except RecursionError:
        return "not JSON: nested too deeply"
    return item if isinstance(item, dict) else "not a JSON object"


def _plain(value: Any) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return [_plain(item) for item in value] if isinstance(value, list) else value
