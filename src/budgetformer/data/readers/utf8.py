"""A text file as a stream of bytes that are known to be valid UTF-8, whatever its encoding and compression."""

import codecs
import gzip
import io
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from budgetformer.errors import DataError, UsageError

_CHUNK = 1 << 20
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def open_utf8(path: Path, encoding: str, stack: ExitStack) -> io.BufferedReader:
    """Open `path` (gzip if it ends in .gz) and give its content as UTF-8 without a byte order mark.

    Args:
        path: the file.
        encoding: a Python name of its encoding; "utf-8" also takes a byte order mark.
        stack: closes the file.

    Raises:
        UsageError: there is no such encoding.
        DataError: the file cannot be opened, or (while reading) its bytes do not fit the encoding.
    """
    try:
        if path.suffix == ".gz":
            file = stack.enter_context(gzip.GzipFile(path, "rb"))
        else:
            file = stack.enter_context(path.open("rb"))
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror}); check the path and its permissions") from error
    return utf8_stream(file, str(path), encoding, stack)


def utf8_stream(file: BinaryIO | gzip.GzipFile, name: str, encoding: str, stack: ExitStack) -> io.BufferedReader:
    """The same for a file that is already open, such as standard input, which stays open."""
    stream: io.BufferedReader = io.BufferedReader(_Utf8(file, name, encoding), _CHUNK)
    return stack.enter_context(stream)


class _Utf8(io.RawIOBase):
    """Decodes piece by piece and encodes again: pyarrow on its own turns a column of bad bytes into a binary one."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, name: str, encoding: str):
        self._file, self._name, self._encoding = file, name, encoding
        self._decoder = _decoder(encoding)
        self._taken = 0
        self._lines = 0
        self._pending = memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._pending and not self._ended:
            self._pending = memoryview(self._next_chunk())
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def _next_chunk(self) -> bytes:
        try:
            data = self._file.read(_CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self._name}: the gzip file is damaged or cut short; make it again") from error
        except OSError as error:
            raise DataError(f"{self._name}: cannot be read ({error.strerror}); check the file") from error
        self._ended = not data
        first = self._taken == 0
        self._taken += len(data)
        try:
            text = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise DataError(self._complaint(error, utf16=first and data.startswith(_UTF16_MARKS))) from error
        self._lines += text.count("\n")
        return text.encode("utf-8")

    def _complaint(self, error: UnicodeDecodeError, utf16: bool) -> str:
        # What the decoder was given ends where the file has been read to, so the offset counts back from there.
        offset = self._taken - len(error.object) + error.start
        line = 1 + self._lines + error.object[: error.start].count(b"\n")
        byte = error.object[error.start] if error.start < len(error.object) else 0
        other = "utf-16" if utf16 else "latin-1"
        return (
            f"{self._name}: byte 0x{byte:02x} at offset {offset} (line {line}) is not valid {self._encoding}; "
            f"name the file's encoding, for example --encoding {other}, or save it as UTF-8"
        )


def _decoder(encoding: str) -> codecs.IncrementalDecoder:
    try:
        info = codecs.lookup(encoding)
        # Python also has codecs from bytes to bytes and from text to text, which make no text of a file.
        if not getattr(info, "_is_text_encoding", True) or info.incrementaldecoder is None:
            raise LookupError
    except LookupError:
        raise UsageError(
            f"encoding={encoding!r}: no such text encoding; use a name like utf-8, utf-16, latin-1 or cp1252"
        ) from None
    return codecs.getincrementaldecoder("utf-8-sig" if info.name == "utf-8" else encoding)("strict")
