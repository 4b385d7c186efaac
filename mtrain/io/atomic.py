"""Bytes on disk: lines in, whole files out. Knows nothing of what the lines mean."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import queue
import shutil
import stat
import sys
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from mtrain.errors import DataError, WriteError

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 18  # that are decoded at once
_LINES_TOLD = 4096  # after which a reader says how far it is
_PATIENCE_S = 0.05  # that a block waits for one more line
_MAX_BLOCK_CHARACTERS = 4_000_000
_MAX_WARNINGS = 5  # of lines that are not UTF-8; the others are counted
_MAX_LINKS = 40  # one after the other, as Linux follows them
_OTHER_FORMS = {  # how files begin that hold no lines of UTF-8
    b"\x1f\x8b": "which begins as gzip data does: let the file's name end in .gz",
    b"\xfd7zXZ": "which begins as xz data does: unpack it, or gzip it",
    b"BZh": "which begins as bzip2 data does: unpack it, or gzip it",
    b"\x28\xb5\x2f\xfd": "which begins as zstd data does: unpack it, or gzip it",
    b"PK\x03\x04": "which begins as zip data does: unpack it",
    b"\xff\xfe": "which begins as UTF-16 text does: convert it, for example with iconv",
    b"\xfe\xff": "which begins as UTF-16 text does: convert it, for example with iconv",
}


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
            raise DataError(f"{path}:{number}: {say_undecodable(error)}.") from None
        yield text.removesuffix("\n").removesuffix("\r")


def read_forgiving(path: Path | None, warn: Callable[[str], None]) -> Iterator[str]:
    """Yield the lines of a file, or of stdin; replace bytes that are not UTF-8, and warn.

    The first such lines are named, the others counted.

    Raises:
        DataError: for a file that cannot be read.
    """
    num_bad = 0
    for number, line in enumerate(_read_raw(path), start=1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            num_bad += 1
            if num_bad <= _MAX_WARNINGS:
                warn(f"line {number}: is not UTF-8: {_culprit(error)}; replaced by U+FFFD.")
            yield line.decode("utf-8", errors="replace")
    if num_bad > _MAX_WARNINGS:
        warn(f"{num_bad - _MAX_WARNINGS:,} more lines: not UTF-8.")


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


def say_undecodable(error: UnicodeDecodeError) -> str:
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


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write to, which becomes `path` when all went well and vanishes otherwise.

    What cannot be replaced is given as it is; a link is replaced, not what it leads to.

    Raises:
        WriteError: if the file cannot be written.
    """
    if not is_replaced(path):
        with _writing(path):
            yield path
        return
    with _writing(path), _beside(path) as beside:
        yield beside
        _flush(beside)
        beside.replace(path)
        _flush(path.parent)


def is_replaced(path: Path) -> bool:
    """Tell whether a file takes the place of `path`; a pipe, a device, an open file does not.

    Raises:
        WriteError: for what can never be a file: a folder, or a name below a file.
    """
    with _writing(path):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return True
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return stat.S_ISREG(mode) and not _is_open_file(path)


def followed(path: Path) -> Path:
    """Return where links lead, but go no further than to an open file, such as /dev/stdout."""
    for _ in range(_MAX_LINKS):
        if not path.is_symlink() or _is_open_file(path):
            break
        path = path.parent / path.readlink()
    return path


def _is_open_file(path: Path) -> bool:
    """Tell whether this is the name that the system gives to what a process has opened."""
    folder = Path(os.path.realpath(path.parent))
    return folder == Path("/dev/fd") or folder.match("/proc/*/fd")


@contextmanager
def whole_dir(path: Path, mark: str | None = None) -> Iterator[Path]:
    """Give a folder to fill, which becomes `path` when all went well and vanishes otherwise.

    Args:
        path: the folder; what it holds before is deleted.
        mark: a file without which a folder that holds anything is somebody else's, and stays.

    Raises:
        WriteError: if the folder cannot be written, or is somebody else's.
    """
    with _writing(path), _beside(path) as beside:
        is_filled = path.is_dir() and any(path.iterdir())
        if mark is not None and is_filled and not (path / mark).is_file():
            raise WriteError(
                f"{path}: cannot be replaced: it holds files, but no {mark}; move it away."
            )
        beside.mkdir()
        yield beside
        for file in beside.rglob("*"):
            _flush(file)
        _flush(beside)
        if path.is_dir():
            shutil.rmtree(path)
        beside.replace(path)
        _flush(path.parent)


def check_writable(path: Path) -> None:
    """Refuse a path where no file can be written, before there is work to lose.

    Raises:
        WriteError: if it is one.
    """
    with _writing(path), _beside(path) as beside:
        beside.touch()


@contextmanager
def making(path: Path) -> Iterator[None]:
    """Make a folder, unless it is there, and explain what its disk does not take.

    Raises:
        WriteError: if it cannot be written.
    """
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}.") from None


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Give a name beside `path`, and leave nothing there, nor a folder that was made in vain."""
    new = [folder for folder in path.parents if not folder.exists()]
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
    finally:
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)
        with suppress(OSError):  # the first that holds something ends it
            for folder in new:
                folder.rmdir()


def sweep(path: Path) -> None:
    """Delete what processes that were killed have left beside `path`; let no other be at it."""
    for beside in path.parent.glob(f".{path.name}.*.tmp"):
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a UTF-8 file of lines, whole or not at all."""
    with whole_file(path) as beside, beside.open("w", encoding="utf-8", newline="\n") as stream:
        for line in lines:
            stream.write(line + "\n")


def append(path: Path, data: bytes) -> None:
    """Add bytes at the end of a file, all of them or none.

    Raises:
        WriteError: if the disk does not take them.
    """
    with _writing(path), path.open("ab", buffering=0) as stream:
        size, rest = stream.tell(), memoryview(data)
        try:
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError:
            stream.truncate(size)
            raise


def sha256(path: Path) -> str:
    """Return the checksum of a file's bytes, compressed or not."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def sha256_if_readable(path: Path) -> str | None:
    """Return the checksum of a file; None if it cannot be read."""
    try:
        return sha256(path)
    except OSError:
        return None


def _flush(path: Path) -> None:
    """Ask the disk to keep what was written; folders too, where the system can."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout as UTF-8, each at once; a reader that has gone away ends it quietly.

    Raises:
        WriteError: if stdout goes to a disk that does not take them.
    """
    for line in lines:
        try:
            sys.stdout.buffer.write(line.encode("utf-8") + b"\n")
            sys.stdout.buffer.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left
            if isinstance(error, BrokenPipeError):
                return
            raise WriteError(f"stdout: cannot be written: {error.strerror}.") from None
