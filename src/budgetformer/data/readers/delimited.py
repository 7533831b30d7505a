"""CSV and TSV through pyarrow: every cell a string, ragged rows reported one by one, physical line numbers."""

import csv
import io
from collections import deque
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from budgetformer.data.readers import MAX_ROW_BYTES, Reader, Record
from budgetformer.errors import DataError, UsageError

_SEPARATORS = {",": ",", ";": ";", "\t": "\\t", "|": "|"}
_PIECE_ROWS = 4096
"""So many rows become Python strings at a time; what pyarrow holds of a block is several times smaller."""
_LINE_END = r"\r\n|\r|\n"
_END = "\x1e"
"""What every cell of the row holds that we append to the file: see `_Blocks`."""


def read_delimited(name: str, stream: io.BufferedReader, delimiter: str | None, default: str) -> Reader:
    """A reader of the rows under a header line.

    Args:
        name: what messages call the file.
        stream: its content as checked UTF-8.
        delimiter: what the caller says stands between cells; None takes `default`, and then a header of one column
            that holds another usual separator is refused, since no reader can know which of the two is meant.
        default: "," or a tab.

    Raises:
        UsageError: the delimiter is not one usable character.
        DataError: the file is empty, or its header is unreadable, repeats a name or looks separated by something else.
    """
    mark = default if delimiter is None else _checked(delimiter)
    header, first_line = _header(name, stream, mark)
    if delimiter is None and len(header) == 1:
        other = next((s for s in _SEPARATORS if s != mark and s in header[0]), None)
        if other is not None:
            raise DataError(
                f"{name}: the header has one column and holds {_SEPARATORS[other]!r}; say what separates the cells: "
                f"--delimiter '{_SEPARATORS[other]}' (or --delimiter '{_SEPARATORS[mark]}' if it is one column)"
            )
    repeated = next((c for i, c in enumerate(header) if c and c in header[:i]), None)
    if repeated is not None:
        raise DataError(f"{name}: column {repeated!r} stands twice in the header; rename one of them")

    def records(wanted: Sequence[str]) -> Iterator[Record]:
        return _records(name, stream, mark, len(header), [header.index(column) for column in wanted], first_line)

    return Reader(name=name, columns=header, records=records)


def _checked(delimiter: str) -> str:
    mark = "\t" if delimiter in ("\\t", "tab") else delimiter
    if len(mark) != 1 or not mark.isascii() or (not mark.isprintable() and mark != "\t") or mark == '"':
        raise UsageError(f"delimiter={delimiter!r}: must be one plain character such as ',' ';' '|' or '\\t'")
    return mark


def _header(name: str, stream: io.BufferedReader, mark: str) -> tuple[list[str], int]:
    """The column names, and the number of the line under them. Lines that are empty may stand above them."""
    reader = csv.reader((line.decode() for line in iter(stream.readline, b"")), delimiter=mark)
    try:
        header = next((row for row in reader if any(row)), None)
    except csv.Error as error:
        raise DataError(f"{name}: line {reader.line_num}: the header cannot be read ({error}); repair it") from error
    if header is None:
        raise DataError(f"{name}: the file is empty; it needs a header line and a row for each text")
    return header, reader.line_num + 1


class _Blocks(io.RawIOBase):
    """The rest of `stream` in the blocks that pyarrow parses one by one, and at its end one more row of `_END` cells.

    The row is a guard: pyarrow reads a quote that never closes up to the end of the file and says nothing, and rows
    vanish into one cell. If the row we appended does not come back as the last one, that is what has happened.

    The blocks step around two faults of pyarrow at their edges. A CR LF on an edge inside a quoted cell loses its LF
    (apache/arrow#51368), so no block ends in CR. And NUL bytes can hide a quote beside them from the search for the
    last whole row of a block (apache/arrow#50481), so a file with NUL bytes must fit into one.
    """

    def __init__(self, name: str, stream: io.BufferedReader, row: bytes):
        self._name, self._stream, self._row = name, stream, row
        self._held, self._last = b"", b"\n"
        self._ended = self._nul = False
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        size = len(buffer)
        data = self._held + self._stream.read(max(size - len(self._held), 0))
        if len(data) < size and not self._ended:
            self._ended = True
            data += (b"" if (data or self._last).endswith((b"\n", b"\r")) else b"\n") + self._row
        if len(data) == size and data.endswith(b"\r"):
            size -= 1
        block, self._held = data[:size], data[size:]
        self._last = block[-1:]
        self._count += bool(block)
        self._nul = self._nul or b"\0" in block
        if self._nul and self._count > 1:
            raise DataError(
                f"{self._name}: holds NUL bytes and is over {MAX_ROW_BYTES >> 20} MiB, which cannot be read safely; "
                "take them out, cut the file in parts, or write JSON lines"
            )
        buffer[: len(block)] = block
        return len(block)


def _records(
    name: str, stream: io.BufferedReader, mark: str, columns: int, places: Sequence[int], line: int
) -> Iterator[Record]:
    row = (mark.join([_END] * columns) + "\n").encode()
    held: Record | None = None
    for record in _rows(name, _Blocks(name, stream, row), mark, columns, places, line):
        if held is not None:
            yield held
        held = record
    if held is None or held.values is None or any(value != _END for value in held.values):
        raise DataError(_unclosed(name, line if held is None else held.line))


def _unclosed(name: str, line: int) -> str:
    return (
        f"{name}: line {line}: a quote opens a cell and never closes (or the row is over {MAX_ROW_BYTES >> 20} MiB); "
        'write a quote inside a quoted cell twice: ""'
    )


def _rows(
    name: str, source: io.RawIOBase, mark: str, columns: int, places: Sequence[int], line: int
) -> Iterator[Record]:
    """Good and ragged rows in the order of the file. pyarrow gives them apart: batches of columns, and a callback."""
    ragged: deque[pa_csv.InvalidRow] = deque()

    def keep(row: pa_csv.InvalidRow) -> str:
        ragged.append(row)
        return "skip"

    names = [str(i) for i in range(columns)]
    number = 1
    try:
        with pa_csv.open_csv(
            source,
            # Without threads pyarrow tells the number of an invalid row, which is what puts it back in its place.
            read_options=pa_csv.ReadOptions(use_threads=False, block_size=MAX_ROW_BYTES, column_names=names),
            parse_options=pa_csv.ParseOptions(
                delimiter=mark, newlines_in_values=True, ignore_empty_lines=False, invalid_row_handler=keep
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False, null_values=[]
            ),
        ) as reader:
            for batch in (b.slice(i, _PIECE_ROWS) for b in reader for i in range(0, b.num_rows, _PIECE_ROWS)):
                heights = _heights(batch)
                cells = [batch.column(place).to_pylist() for place in places]
                for height, values in zip(heights, zip(*cells, strict=True), strict=True):
                    while ragged and ragged[0].number == number:
                        record, line = _ragged(ragged.popleft(), line)
                        yield record
                        number += 1
                    yield Record(line, values)
                    line += height
                    number += 1
    except pa.ArrowInvalid as error:
        for row in ragged:
            line = _ragged(row, line)[1]
        raise DataError(_unclosed(name, line)) from error
    for row in ragged:
        record, line = _ragged(row, line)
        yield record


def _ragged(row: pa_csv.InvalidRow, line: int) -> tuple[Record, int]:
    """The record of a row with too many or too few cells, and the line after it."""
    cells = "1 cell" if row.actual_columns == 1 else f"{row.actual_columns} cells"
    height = len(row.text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    return Record(line, None, f"{cells} where the header has {row.expected_columns}"), line + height


def _heights(batch: pa.RecordBatch) -> list[int]:
    """How many physical lines each row takes: one, and one more for each line end inside a quoted cell."""
    options = pc.MatchSubstringOptions(_LINE_END)
    # By name and without pa.array: pyright does not see generated functions, and pa.array would import pandas.
    first, *others = (pc.call_function("count_substring_regex", [column], options) for column in batch.columns)
    for ends in others:
        first = pc.call_function("add", [first, ends])
    return [1 + ends for ends in first.to_pylist()]
