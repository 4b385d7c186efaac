"""Atomic writes: a file or a folder is written whole or not at all."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from mtrain.errors import RunError, WriteError
from mtrain.io.lines import open_gzip_writer

_MAX_LINKS = 40  # followed in a row, as on Linux


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` on success and is deleted on failure.

    A pipe or a device is yielded itself; a link is replaced, not its target.

    Raises:
        WriteError: if the file cannot be written.
    """
    if not is_replaced(path):
        with _writing(path):
            yield path
        return
    with _writing(path), temporary_path(path) as beside:
        yield beside
        flush(beside)
        beside.replace(path)
        flush(path.parent)


def is_replaced(path: Path) -> bool:
    """Tell whether a write replaces `path`; a pipe, a device or an open file is written to.

    Raises:
        WriteError: if `path` is a folder, or below a file.
    """
    with _writing(path):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return True
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return stat.S_ISREG(mode) and not _is_open_file(path)


def resolve_links(path: Path) -> Path:
    """Follow links, but no further than to an open file, such as /dev/stdout."""
    for _ in range(_MAX_LINKS):
        if not path.is_symlink() or _is_open_file(path):
            break
        path = path.parent / path.readlink()
    return path


def _is_open_file(path: Path) -> bool:
    """Tell whether this is the name of a file descriptor, such as /proc/self/fd/1."""
    folder = Path(os.path.realpath(path.parent))
    return folder == Path("/dev/fd") or folder.match("/proc/*/fd")


@contextmanager
def whole_dir(path: Path, mark: str | None = None) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` on success and is deleted on failure.

    A link is replaced, not its target.

    Args:
        path: the folder; its previous content is renamed first and deleted last. After a kill in
            between, `sweep` renames it back.
        mark: a file name; a folder that is not empty is replaced only if it has this file.

    Raises:
        WriteError: if the folder cannot be written, or is not empty and has no `mark`.
    """
    with _writing(path), temporary_path(path) as beside:
        is_filled = path.is_dir() and any(path.iterdir())
        if mark is not None and is_filled and not (path / mark).is_file():
            raise WriteError(
                f"{path}: cannot be replaced: it holds files, but no {mark}; move it away."
            )
        beside.mkdir()
        yield beside
        for file in beside.rglob("*"):
            flush(file)
        flush(beside)
        aside = beside.with_suffix(".old")
        if path.is_dir():
            path.replace(aside)
        try:
            beside.replace(path)
        except OSError:
            if aside.is_dir():
                aside.replace(path)
            raise
        flush(path.parent)
        _remove(aside)


def remove_dir(path: Path) -> None:
    """Delete a folder; it is renamed first, so that no partial folder has its name.

    Raises:
        OSError: if it cannot be renamed, or a part of the renamed folder cannot be deleted.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    path.replace(aside)
    shutil.rmtree(aside)


def check_writable(path: Path) -> None:
    """Raise WriteError unless a file can be written to a path, before there is work to lose."""
    with _writing(path), temporary_path(path) as beside:
        beside.touch()


@contextmanager
def writable_dir(path: Path) -> Iterator[None]:
    """Make a folder if needed, and convert any OSError of the context to WriteError."""
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
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; delete it at the end, and new folders left empty."""
    new_dirs = [folder for folder in path.parents if not folder.exists()]
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
    finally:
        _remove(beside)
        with suppress(OSError):  # stops at the first folder that is not empty
            for folder in new_dirs:
                folder.rmdir()


def _remove(path: Path) -> None:
    """Delete a file, a link or a folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(path: Path, is_prefix: bool = False) -> None:
    """Delete what killed processes left beside `path`; rename back what `whole_dir` put aside.

    The caller holds the lock of the folder. With `is_prefix`, all paths that begin so are meant.
    """
    name = glob.escape(path.name) + "*" * is_prefix
    beside = f".{name}.{'[0-9a-f]' * 8}"
    for aside in path.parent.glob(f"{beside}.old"):
        replaced = aside.with_name(aside.name[1:].rsplit(".", 2)[0])
        if not replaced.exists():
            aside.replace(replaced)
    for suffix in (".tmp", ".old"):
        for leftover in path.parent.glob(beside + suffix):
            _remove(leftover)


@contextmanager
def only_process(lock_path: Path, busy: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock between processes.

    Args:
        lock_path: the lock file, which is created.
        busy: the message if another process holds the lock.
        wait_s: how long to wait for another process that holds it; -1 waits without end.

    Raises:
        RunError: if another process holds it.
        WriteError: if its file cannot be written.
    """
    from filelock import FileLock, Timeout  # not needed for translating: a faster start

    lock = FileLock(lock_path, timeout=wait_s)
    with _writing(lock_path):
        try:
            lock.acquire()
        except Timeout:  # an OSError
            raise RunError(busy) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def whole_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 file that is written whole or not at all; gzipped if its name ends in `.gz`."""
    with whole_file(path) as beside:
        if path.suffix == ".gz":
            opened: AbstractContextManager[TextIO] = open_gzip_writer(beside)
        else:
            opened = beside.open("w", encoding="utf-8", newline="\n")
        with opened as stream:
            yield stream


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write the lines of a `whole_text`."""
    with whole_text(path) as stream:
        stream.writelines(line + "\n" for line in lines)


def append(path: Path, data: bytes) -> None:
    """Append bytes to a file, all or none.

    Raises:
        WriteError: if they cannot be written, or if the path is a link.
    """
    if path.is_symlink():  # in the run folder of a stranger, it could name any file
        raise WriteError(f"{path}: cannot be written: it is a link; delete it.")
    with _writing(path), path.open("ab", buffering=0) as stream:
        size, unwritten = stream.tell(), memoryview(data)
        try:
            while unwritten:
                unwritten = unwritten[stream.write(unwritten) :]
        except OSError:
            stream.truncate(size)
            raise


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_if_readable(path: Path) -> str | None:
    """Return the SHA-256 of a file's bytes; None if it cannot be read."""
    try:
        return sha256(path)
    except (OSError, ValueError):  # ValueError: a name with a NUL
        return None


def flush(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout as UTF-8, flushing each; end silently on a broken pipe."""
    for line in lines:
        if not write_stdout(line.encode("utf-8") + b"\n"):
            break


def write_stdout(data: bytes) -> bool:
    """Write to stdout, with what is buffered; return False on a broken pipe.

    Raises:
        WriteError: for any other error of stdout, such as a full disk.
    """
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # later flushes succeed
        if isinstance(error, BrokenPipeError):
            return False
        raise WriteError(f"stdout: cannot be written: {error.strerror}.") from None
    return True
