"""Read lines of text: plain or gzipped, strictly or replacing what is not UTF-8."""

from __future__ import annotations

import gzip
import io
import os
import queue
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO, cast

from mtrain.errors import DataError
from mtrain.io.text_width import count

BOM = b"\xef\xbb\xbf"
_GZIP_LEVEL = 6  # half the time of 9 for one percent more bytes
_BLOCK_BYTES = 1 << 18  # decoded at once
_PATIENCE_S = 0.05  # how long a block waits for its next line
_MAX_BLOCK_CHARACTERS = 4_000_000
_MAX_WARNINGS = 5  # of each kind; the others are counted
_OTHER_FORMS = {  # the first bytes of other formats, and what to do
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
        for kind, num_lines in self._counts.items():
            if num_lines > _MAX_WARNINGS:
                self._warn(f"{count(num_lines - _MAX_WARNINGS, 'more line')}: {kind}.")


Advance = Callable[[int], object]


class Digest(Protocol):
    """A checksum, such as `hashlib.sha256()`."""

    def update(self, data: memoryview, /) -> object:
        """Add some bytes."""


class _CountedFile(io.RawIOBase):
    """A file that reports how many bytes are read from it, and adds them to a checksum."""

    def __init__(self, file: io.FileIO, advance: Advance, digest: Digest | None) -> None:
        self._file, self._advance, self._digest = file, advance, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = self._file.readinto(buffer)
        self._advance(num_bytes)
        if self._digest is not None:
            self._digest.update(memoryview(buffer)[:num_bytes])
        return num_bytes


def ignore(value: object) -> None:
    """Do nothing; the default callback."""


@contextmanager
def open_lines(
    path: Path, advance: Advance = ignore, digest: Digest | None = None
) -> Iterator[BinaryIO]:
    """Open a file, plain or gzipped, to read its bytes.

    Args:
        path: of the file; it is unzipped if its name ends in .gz.
        advance: called with the number of bytes of each read from disk.
        digest: is updated with the bytes as they are on disk; complete at the end of the file.

    Raises:
        DataError: within the context too, if the file cannot be read.
    """
    with (
        _explaining(path),
        path.open("rb", buffering=0) as file,
        io.BufferedReader(_CountedFile(file, advance, digest), _BLOCK_BYTES) as raw,
    ):
        yield cast(BinaryIO, gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw)


@contextmanager
def open_gzip_writer(path: Path) -> Iterator[TextIO]:
    """Open a gzipped UTF-8 file for writing; the same lines result in the same bytes."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", _GZIP_LEVEL, fileobj=raw, mtime=0) as zipped,
        io.TextIOWrapper(zipped, "utf-8", newline="\n") as stream,
    ):
        yield stream


def raw_lines(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a binary file, split at LF only, without LF, CR LF and a leading BOM."""
    for number, line in enumerate(stream):
        text = line.removesuffix(b"\n").removesuffix(b"\r")
        yield text.removeprefix(BOM) if number == 0 else text


def read_lines(
    path: Path, advance: Advance = ignore, digest: Digest | None = None
) -> Generator[str, None, None]:
    """Yield the lines of a UTF-8 file, plain or gzipped; `advance` and `digest` as in `open_lines`.

    Raises:
        DataError: for a file that cannot be read, or a line that is not UTF-8.
    """
    num_read = 0
    with open_lines(path, advance, digest) as stream:
        while block := stream.readlines(_BLOCK_BYTES):
            data = b"".join(block)
            try:
                text = (data if num_read else data.removeprefix(BOM)).decode("utf-8")
            except UnicodeDecodeError:
                yield from _read_to_undecodable(path, block, num_read)
            lines = text.removesuffix("\n").split("\n")  # faster than line by line
            yield from (line.removesuffix("\r") for line in lines) if "\r" in text else lines
            num_read += len(lines)


def _read_to_undecodable(path: Path, block: Iterable[bytes], num_before: int) -> Iterator[str]:
    for number, line in enumerate(block, start=num_before + 1):
        try:
            text = (line.removeprefix(BOM) if number == 1 else line).decode("utf-8")
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
    with open_lines(path) if path is not None else _open_stdin() as stream:
        for number, line in enumerate(raw_lines(stream), start=1):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                text = f"is not UTF-8: {_culprit(error)}; replaced by U+FFFD."
                warnings.add("not UTF-8", number, text)
                yield line.decode("utf-8", errors="replace")
    warnings.close()


def read_blocks(
    path: Path | None, warn: Callable[[str], None], max_lines: int
) -> Generator[list[str], None, None]:
    """Yield the lines of a file, or of stdin, as `read_forgiving` does, some at a time.

    A block ends when it holds `max_lines`, or when no next line arrives within a short time, so
    that a user who types lines into a pipe sees each result. An empty block means that the input
    has paused. At most two blocks are in memory.

    Raises:
        DataError: for a file that cannot be read.
    """
    lines: queue.Queue[str | BaseException | None] = queue.Queue(max_lines)
    is_idle = False

    def read() -> None:
        try:
            for line in read_forgiving(path, warn):
                lines.put(line)
            lines.put(None)
        except BaseException as error:  # raised in the thread of the caller
            lines.put(error)

    def soon() -> str | BaseException | None:
        nonlocal is_idle
        try:
            return lines.get(timeout=_PATIENCE_S)
        except queue.Empty:
            is_idle = True
            return None

    threading.Thread(target=read, name="reader", daemon=True).start()
    item = lines.get()
    while item is not None:
        block: list[str] = []
        size = 0
        while isinstance(item, str):
            block.append(item)
            size += len(item)
            item = soon()
            if len(block) == max_lines or size > _MAX_BLOCK_CHARACTERS:
                break
        if block:
            yield block
        if isinstance(item, BaseException):
            raise item
        if is_idle:
            yield []
            item, is_idle = lines.get(), False


def format_undecodable(error: UnicodeDecodeError) -> str:
    """Format the error of a line that is not UTF-8."""
    return f"must be UTF-8, but has {_culprit(error)}"


@contextmanager
def _open_stdin() -> Iterator[BinaryIO]:
    """Open a copy of stdin: a thread that still reads at exit must not lock `sys.stdin`."""
    with _explaining(None), os.fdopen(os.dup(sys.stdin.fileno()), "rb") as stream:
        yield stream


@contextmanager
def _explaining(path: Path | None) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error):
        raise DataError(
            f"{path}: must be whole, but its gzip data is cut off or damaged."
        ) from None
    except gzip.BadGzipFile as error:  # also if bytes of another form follow
        raise DataError(f"{path}: must be gzip data to its end, but is not: {error}.") from None
    except OSError as error:
        raise DataError(f"{path or 'stdin'}: cannot be read: {error.strerror or error}.") from None


def _culprit(error: UnicodeDecodeError) -> str:
    line = error.object
    byte = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
    return f"{byte}, {form}" if (form := other_form(line)) else byte


def other_form(line: bytes) -> str:
    """Return which other format a line begins like, and what to do; "" if none."""
    return next((text for start, text in _OTHER_FORMS.items() if line.startswith(start)), "")
