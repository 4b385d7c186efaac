"""The reader of parallel text: strict for training, lenient for an audit."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, repeat, zip_longest
from pathlib import Path
from typing import NamedTuple

from mtrain.config.corpora import Corpus, FilesCorpus, TrainText, corpora_of
from mtrain.config.sections import DataConfig
from mtrain.corpus.formats import (
    Fault,
    TableReader,
    check_regular,
    is_header,
    paths_of,
    table_readers,
)
from mtrain.errors import DataError
from mtrain.io.atomic import sha256
from mtrain.io.lines import BOM, Advance, ignore, open_lines, other_form, read_lines

BLOCK_PAIRS = 4096
_BLOCK_CHARACTERS = 1 << 20


class Pair(NamedTuple):
    """A source line and its translation; `line` counts from 1 in the source file."""

    src: str
    tgt: str
    src_file: str
    line: int


class FileMark(NamedTuple):
    """The size, modification time and checksum of a file, to detect changes."""

    size: int
    mtime_ns: int
    sha256: str


@dataclass
class FileNotes:
    """Counts and problems of one file."""

    path: str
    num_lines: int = 0  # lines or rows that could be read, with the header
    num_crlf: int = 0  # lines that end in CR LF (lenient reading only)
    is_last_open: bool = False  # whether nothing ends the last line (lenient reading only)
    num_undecodable: int = 0  # lines that are not UTF-8
    first_undecodable: str = ""  # the first such line, from 1, and its problem
    has_bom: bool = False  # whether the file begins with a byte-order mark (lenient reading only)
    num_faults: int = 0  # rows that are not a pair; 0 for a file of one side
    first_fault: str = ""  # the first such row, from 1, and its problem
    num_broken: int = 0  # rows with a line break within a field, which is replaced by a space
    first_row: tuple[str, str] | None = None  # both sides, of a file that may have a header
    problem: str = ""  # why the file could not be read to its end
    sha256: str = ""  # checksum of the bytes on disk, if the reader computes it


@dataclass
class FilePair:
    """A source and a target file, or one table, and their range of pairs in the whole text."""

    src: FileNotes  # the notes on the files; the same object for a table
    tgt: FileNotes
    first: int  # number of the first pair, from 0, in the whole text; faulty rows are counted
    num_pairs: int = 0  # number of pairs, faulty rows included
    corpus: str | None = None  # the key of the corpus in the config; None without a mixture
    first_line: int = 1  # the line, or row, of the first pair; 2 after a header

    def line_of(self, pair: int) -> int:
        """Return the line of a pair in its file, given its number in the whole text."""
        return pair - self.first + self.first_line

    @property
    def notes(self) -> list[FileNotes]:
        """The notes on the files, each once."""
        return [self.src] if self.tgt is self.src else [self.src, self.tgt]


@dataclass
class TextBlock:
    """Consecutive pairs of one `FilePair`."""

    first: int  # the number of the first pair, from 0, in the whole text
    src: list[str] = field(default_factory=list)  # bytes that are not UTF-8 are replaced by U+FFFD
    tgt: list[str] = field(default_factory=list)
    src_bad: list[int] = field(default_factory=list)  # indices of lines that are not UTF-8
    tgt_bad: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)  # of malformed rows; both sides are empty


_Line = tuple[str, bool]  # text, whether bytes that are not UTF-8 were replaced
_Row = tuple[_Line, _Line, bool]  # source, target, whether the row is a fault


class Reader:
    """A block-by-block reader of a corpus or a mixture; `parts` describes the last pass.

    A strict reader raises DataError at the first fault: a file that cannot be read, a line that is
    not UTF-8, two files with different numbers of lines, a row that is not a pair. A lenient reader
    records faults and continues, up to the end of the shorter file.
    """

    def __init__(
        self, text: TrainText, is_strict: bool = False, has_checksums: bool = False
    ) -> None:
        self._text = text
        self._is_strict, self._has_checksums = is_strict, has_checksums
        self.parts: list[FilePair] = []

    @property
    def num_pairs(self) -> int:
        """Number of pairs read so far."""
        return self.parts[-1].first + self.parts[-1].num_pairs if self.parts else 0

    def part_of(self, pair: int) -> FilePair:
        """Return the part that contains a pair, given its number from 0."""
        return self.parts[bisect_right(self.parts, pair, key=lambda part: part.first) - 1]

    def blocks(self, advance: Advance = ignore) -> Iterator[TextBlock]:
        """Yield all pairs; report the bytes read from disk to `advance`."""
        self.parts = []
        for named in corpora_of(self._text):
            name = named.name if isinstance(self._text, list) else None
            check_regular(paths_of(named.corpus))
            if isinstance(named.corpus, FilesCorpus):
                for src, tgt in zip(named.corpus.src, named.corpus.tgt, strict=True):
                    part = FilePair(FileNotes(src), FileNotes(tgt), self.num_pairs, corpus=name)
                    self.parts.append(part)
                    yield from _blocks(part, self._read_lines(part, advance))
            else:
                for table in table_readers(named.corpus):
                    notes = FileNotes(table.name, num_lines=int(table.header is True))
                    part = FilePair(notes, notes, self.num_pairs, 0, name, notes.num_lines + 1)
                    self.parts.append(part)
                    yield from _blocks(part, self._read_rows(table, notes, advance))

    def check_not_empty(self, name: str) -> None:
        """Check that each corpus had pairs; `name` is the key of the text in the config.

        Raises:
            DataError: if a corpus had none.
        """
        for corpus, part in self.empty_corpora().items():
            raise DataError(
                f"`{corpus or name}` must have at least one pair, but {part.src.path} is empty."
            )

    def empty_corpora(self) -> dict[str | None, FilePair]:
        """Return the first part of each corpus without pairs, by the corpus's name in a mixture."""
        sizes, first_parts = Counter[str | None](), dict[str | None, FilePair]()
        for part in self.parts:
            sizes[part.corpus] += part.num_pairs
            first_parts.setdefault(part.corpus, part)
        return {corpus: part for corpus, part in first_parts.items() if not sizes[corpus]}

    def _read_lines(self, part: FilePair, advance: Advance) -> Iterator[_Row]:
        read = self._strict_lines if self._is_strict else _lenient_lines
        for src, tgt in zip_longest(read(part.src, advance), read(part.tgt, advance)):
            if src is not None and tgt is not None:  # the longer file is only counted
                yield src, tgt, False
        if self._is_strict and part.src.num_lines != part.tgt.num_lines:
            raise DataError(
                f"{part.src.path} and {part.tgt.path} must have the same number of lines, but have "
                f"{part.src.num_lines:,} and {part.tgt.num_lines:,} instead."
            )

    def _strict_lines(self, notes: FileNotes, advance: Advance) -> Iterator[_Line]:
        digest = hashlib.sha256() if self._has_checksums else None
        for line in read_lines(Path(notes.path), advance, digest):
            notes.num_lines += 1
            yield line, False
        notes.sha256 = digest.hexdigest() if digest else ""

    def _read_rows(self, table: TableReader, notes: FileNotes, advance: Advance) -> Iterator[_Row]:
        digest = hashlib.sha256() if self._has_checksums and table.has_lines else None
        try:
            for row in table.read(advance, digest):
                notes.num_lines += 1
                if not isinstance(row, Fault):
                    if table.header is None and notes.num_lines == 1:
                        notes.first_row = row.src, row.tgt
                    notes.num_broken += row.num_breaks > 0
                    yield (row.src, False), (row.tgt, False), False
                elif self._is_strict:
                    raise DataError(f"{table.place(notes.num_lines)}: {row.what}.")
                else:
                    notes.first_fault = notes.first_fault or f"{notes.num_lines}: {row.what}"
                    notes.num_faults += 1
                    yield ("", False), ("", False), True
        except DataError as error:
            if self._is_strict:
                raise
            notes.problem = _problem(notes, error)
        notes.sha256 = digest.hexdigest() if digest else ""


def _problem(notes: FileNotes, error: DataError) -> str:
    text = str(error).removeprefix(f"{notes.path}: ").removesuffix(".")
    return text.removeprefix("cannot be read: ").removeprefix("must be whole, but ")


def _lenient_lines(notes: FileNotes, advance: Advance) -> Iterator[_Line]:
    """Yield the lines of a file without line ends, until its end or a read error."""
    try:
        with open_lines(Path(notes.path), advance) as stream:
            for line in stream:
                text = line.removesuffix(b"\n")
                notes.is_last_open = text == line
                notes.num_crlf += text.endswith(b"\r") and not notes.is_last_open
                if notes.num_lines == 0 and text.startswith(BOM):
                    notes.has_bom, text = True, text.removeprefix(BOM)
                notes.num_lines += 1
                text = text.removesuffix(b"\r")
                try:
                    yield text.decode("utf-8"), False
                except UnicodeDecodeError as error:
                    if not notes.num_undecodable:
                        byte = f"byte 0x{text[error.start]:02x} at byte {error.start + 1}"
                        described = [f"line {notes.num_lines}", byte, other_form(text)]
                        notes.first_undecodable = ", ".join(filter(None, described))
                    notes.num_undecodable += 1
                    yield text.decode("utf-8", errors="replace"), True
    except DataError as error:
        notes.problem = _problem(notes, error)


def _blocks(part: FilePair, rows: Iterator[_Row]) -> Iterator[TextBlock]:
    """Group the rows of a part into blocks; update `part.num_pairs`."""
    block, size = TextBlock(part.first), 0
    for (src, is_src_bad), (tgt, is_tgt_bad), is_fault in rows:
        if is_src_bad:
            block.src_bad.append(len(block.src))
        if is_tgt_bad:
            block.tgt_bad.append(len(block.src))
        if is_fault:
            block.faults.append(len(block.src))
        block.src.append(src)
        block.tgt.append(tgt)
        size += len(src) + len(tgt)
        if len(block.src) == BLOCK_PAIRS or size > _BLOCK_CHARACTERS:
            part.num_pairs += len(block.src)
            yield block
            block, size = TextBlock(part.first + part.num_pairs), 0
    if block.src:
        part.num_pairs += len(block.src)
        yield block


def read_pairs(text: TrainText) -> Iterator[Pair]:
    """Yield every pair of a corpus or a mixture, file by file, in order.

    Raises:
        DataError: as a strict `Reader`.
    """
    reader = Reader(text, is_strict=True)
    for block in reader.blocks():
        part = reader.parts[-1]
        lines = count(part.line_of(block.first))
        yield from map(Pair, block.src, block.tgt, repeat(part.src.path), lines)


def possible_header(notes: FileNotes, data: DataConfig) -> tuple[str, str] | None:
    """Return the first pair of a file if it looks like a header and `header` is not set."""
    row = notes.first_row
    return row if row and is_header(row, (data.src_lang, data.tgt_lang)) else None


def read_whole(corpus: Corpus, name: str) -> Reader:
    """Read and validate a whole corpus; return its reader, with the notes on its files.

    Raises:
        DataError: as a strict `Reader`, and if there is no pair.
    """
    reader = Reader(corpus, is_strict=True)
    for _ in reader.blocks():
        pass
    reader.check_not_empty(name)
    return reader


def size_of(text: TrainText) -> int:
    """Return the total size in bytes of the local files of a corpus or a mixture."""
    paths = [path for _, corpus in corpora_of(text) for path in paths_of(corpus)]
    return sum(Path(path).stat().st_size for path in filter(os.path.isfile, paths))


def all_corpora(data: DataConfig) -> list[Corpus]:
    """Return the corpora of the training, validation and test text."""
    train = [named.corpus for named in corpora_of(data.train)]
    return [*train, data.valid, *data.tests.values()]


def changed_files(marks: Mapping[str, FileMark], trust_times: bool = True) -> dict[str, str]:
    """Return {path: current checksum} of the files that differ from their marks.

    Files that are missing or cannot be read do not count as changed. With `trust_times`, equal
    size and modification time suffice, and no checksum is computed.
    """
    changed = {}
    for path, old in marks.items():
        try:
            stat = Path(path).stat()
            if trust_times and (stat.st_size, stat.st_mtime_ns) == (old.size, old.mtime_ns):
                continue
            checksum = sha256(Path(path))
        except (OSError, ValueError):  # ValueError: a name with a NUL
            continue
        if checksum != old.sha256:
            changed[path] = checksum
    return changed
