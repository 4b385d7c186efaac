"""Read lines of text: plain or gzipped, strictly or replacing what is not UTF-8."""

from __future__ import annotations

import gzip
import os
import queue
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from mtrain.errors import DataError

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 18  # that are decoded at once
_LINES_TOLD = 4096  # after which a reader says how far it is
_PATIENCE_S = 0.05  # that a block waits for one more line
_MAX_BLOCK_CHARACTERS = 4_000_000
_MAX_WARNINGS = 5  # of each kind; the others are counted
_OTHER_FORMS = {  # how files begin that hold no lines of UTF-8
    b"\x1f\x8b": "which begins as gzip data does: let the file's name end in .gz",
    b"\xfd7zXZ": "which begins as xz data does: unpack it, or gzip it",
    b"BZh": "which begins as bzip2 data does: unpack it, or gzip it",
    b"\x28\xb5\x2f\xfd": "which begins as zstd data does: unpack it, or gzip it",
    b"PK\x03\x04": "which begins as zip data does: unpack it",
    b"\xff\xfe": "which begins as UTF-16 text does: convert it, for example with iconv",
    b"\xfe\xff": "which begins as UTF-16 text does: convert it, for example with iconv",
}


class LineWarnings:
    """Warns of the first lines of each kind, and counts the others."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._counts = warn, Counter[str]()

    def add(self, kind: str, number: int, text: str) -> None:
        """Warn of line `number`, unless `kind` has reached its limit."""
        self._counts[kind] += 1
        if self._counts[kind] <= _MAX_WARNINGS:
            self._warn(f"line {number}: {text}")

    def close(self) -> None:
        """Warn of the number of further lines of each kind."""
        for kind, count in self._counts.items():
            if count > _MAX_WARNINGS:
                self._warn(f"{count - _MAX_WARNINGS:,} more lines: {kind}.")


def raw_lines(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines without their ends: split at "\\n" only, one trailing "\\r" removed.

    Args:
        stream: a binary file, which Python itself splits at "\\n" alone.
    """
    for number, line in enumerate(stream):
        text = line.removesuffix(b"\n").removesuffix(b"\r")
        yield text.removeprefix(_BOM) if number == 0 else text


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, plain or gzipped.

    Raises:
        DataError: for a file that cannot be read, or a line that is not UTF-8.
    """
    num_read = 0
    with _explaining(path), _open(path) as stream:
        while block := stream.readlines(_BLOCK_BYTES):
            whole = b"".join(block)
            try:
                text = (whole if num_read else whole.removeprefix(_BOM)).decode("utf-8")
            except UnicodeDecodeError:
                yield from _read_to_the_bad_one(path, block, num_read)
            lines = text.removesuffix("\n").split("\n")  # faster than line by line
            yield from (line.removesuffix("\r") for line in lines) if "\r" in text else lines
            num_read += len(lines)


def _read_to_the_bad_one(path: Path, block: Iterable[bytes], num_before: int) -> Iterator[str]:
    for number, line in enumerate(block, start=num_before + 1):
        try:
            text = (line.removeprefix(_BOM) if number == 1 else line).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: {format_undecodable(error)}.") from None
        yield text.removesuffix("\n").removesuffix("\r")


def read_forgiving(path: Path | None, warn: Callable[[str], None]) -> Iterator[str]:
    """Yield the lines of a file, or of stdin; replace bytes that are not UTF-8, and warn.

    The first such lines are named, the others counted.

    Raises:
        DataError: for a file that cannot be read.
    """
    warnings = LineWarnings(warn)
    for number, line in enumerate(_read_raw(path), start=1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            text = f"is not UTF-8: {_culprit(error)}; replaced by U+FFFD."
            warnings.add("not UTF-8", number, text)
            yield line.decode("utf-8", errors="replace")
    warnings.close()


def read_blocks(
    path: Path | None, warn: Callable[[str], None], max_lines: int
) -> Iterator[list[str]]:
    """Yield the lines of a file, or of stdin, as `read_forgiving` does, some at a time.

    A block ends when it is full, or when the next line is long in coming: whoever types at a pipe
    or waits for one gets an answer. No more than two blocks are held.

    Raises:
        DataError: for a file that cannot be read.
    """
    lines: queue.Queue[str | BaseException | None] = queue.Queue(max_lines)

    def read() -> None:
        try:
            for line in read_forgiving(path, warn):
                lines.put(line)
            lines.put(None)
        except BaseException as error:  # for the thread that waits
            lines.put(error)

    threading.Thread(target=read, name="reader", daemon=True).start()
    item = lines.get()
    while item is not None:
        block: list[str] = []
        size = 0
        while isinstance(item, str):
            block.append(item)
            size += len(item)
            if len(block) == max_lines or size > _MAX_BLOCK_CHARACTERS:
                break
            try:
                item = lines.get(timeout=_PATIENCE_S)
            except queue.Empty:
                break
        if block:
            yield block
        if isinstance(item, BaseException):
            raise item
        item = lines.get() if isinstance(item, str) else None


def raw_lines_of(path: Path, advance: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the lines of a file, plain or gzipped, as they are; tell `advance` the bytes read.

    Raises:
        DataError: for a file that cannot be read.
    """
    with _explaining(path), path.open("rb") as raw:
        position = 0
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        for number, line in enumerate(raw_lines(stream)):
            if number % _LINES_TOLD == 0:
                advance(raw.tell() - position)
                position = raw.tell()
            yield line
        advance(raw.tell() - position)


def format_undecodable(error: UnicodeDecodeError) -> str:
    """Say what is wrong with a line that is not UTF-8."""
    return f"must be UTF-8, but has {_culprit(error)}"


def _read_raw(path: Path | None) -> Iterator[bytes]:
    with (
        _explaining(path),
        _open_stdin() if path is None else _open(path) as stream,
    ):
        yield from raw_lines(stream)


def _open_stdin() -> BinaryIO:
    """Open stdin anew: a thread that still reads when Python ends must not hold Python's own."""
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb")


@contextmanager
def _explaining(path: Path | None) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error):
        raise DataError(
            f"{path}: must be whole, but its gzip data is cut off or damaged."
        ) from None
    except OSError as error:
        raise DataError(f"{path or 'stdin'}: cannot be read: {error.strerror or error}.") from None


def _culprit(error: UnicodeDecodeError) -> str:
    line = error.object
    byte = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
    return f"{byte}, {form}" if (form := other_form(line)) else byte


def other_form(line: bytes) -> str:
    """Say which data that is no text a line begins as, and what to do; nothing if it is none."""
    return next((said for start, said in _OTHER_FORMS.items() if line.startswith(start)), "")


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")
