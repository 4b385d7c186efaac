"""Read parallel files and go on whatever they hold, noting what is wrong with them.

Training reads by `corpus` and stops at the first fault; an audit lists them all.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from mtrain.config.corpora import FilesCorpus, NamedCorpus, TrainText, corpora_of
from mtrain.corpus.formats import Advance, Fault, TableReader, paths_of, sources
from mtrain.errors import DataError
from mtrain.io.lines import other_form

BLOCK_PAIRS = 4096
_BLOCK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass
class FileNotes:
    """What an audit notes about one file.

    Attributes:
        num_lines: how many could be read.
        num_crlf: how many of them end in CR LF.
        num_undecodable: how many are not UTF-8.
        first_undecodable: the first of those, from 1, and what is wrong with it.
        has_bom: whether it begins with a byte-order mark.
        num_faults: how many of its rows are no pair.
        first_fault: the first of those, from 1, and what is wrong with it.
        num_broken: how many of its rows have a line break within them.
        problem: why it could not be read to its end.
    """

    path: str
    num_lines: int = 0
    num_crlf: int = 0
    num_undecodable: int = 0
    first_undecodable: str = ""
    has_bom: bool = False
    num_faults: int = 0
    first_fault: str = ""
    num_broken: int = 0
    problem: str = ""


@dataclass
class FilePair:
    """Two files of a corpus, or twice the same, and which of its pairs, from 0, they hold.

    Rows that are no pair are numbered among them.

    Of a mixture, `corpus` is what the config calls the corpus that they are of.
    """

    src: FileNotes
    tgt: FileNotes
    first: int
    num_pairs: int = 0
    corpus: str | None = None

    @property
    def num_faults(self) -> int:
        """How many of its rows are no pair."""
        return self.src.num_faults  # lines in two files have none

    @property
    def notes(self) -> list[FileNotes]:
        """The notes on its files, each once."""
        return [self.src] if self.tgt is self.src else [self.src, self.tgt]


@dataclass
class TextBlock:
    """Some pairs of a corpus that stand together.

    Attributes:
        first: the number of the first pair, from 0, in the corpus.
        src, tgt: the lines, with U+FFFD for what is not UTF-8.
        src_bad, tgt_bad: which of them are not UTF-8, from 0 in the block.
        faults: which rows are no pair, likewise; two blank lines stand in their places.
    """

    first: int
    src: list[str] = field(default_factory=list)
    tgt: list[str] = field(default_factory=list)
    src_bad: list[int] = field(default_factory=list)
    tgt_bad: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)


class Reader:
    """One corpus, or a mixture, read as often as one asks; the notes are of the last reading."""

    def __init__(self, text: TrainText) -> None:
        self._text = text
        self.parts: list[FilePair] = []

    @property
    def num_pairs(self) -> int:
        """How many pairs were read."""
        return sum(part.num_pairs for part in self.parts)

    def part_of(self, pair: int) -> FilePair:
        """Return the files that hold a pair."""
        return next(part for part in self.parts if pair < part.first + part.num_pairs)

    def blocks(self, advance: Advance) -> Iterator[TextBlock]:
        """Yield all pairs, as far as both files of a part go; tell `advance` the bytes read."""
        self.parts = []
        for named in corpora_of(self._text, "data.train"):
            yield from self._blocks_of(named, advance)

    def _blocks_of(self, named: NamedCorpus, advance: Advance) -> Iterator[TextBlock]:
        corpus, name = named.corpus, named.name if isinstance(self._text, list) else None
        if isinstance(corpus, FilesCorpus):
            for src_file, tgt_file in zip(corpus.src, corpus.tgt, strict=True):
                part = self._open(FileNotes(src_file), FileNotes(tgt_file), name)
                yield from _cut(part, _read_lines(part, advance))
        else:
            for source in sources(corpus):
                notes = FileNotes(source.name)
                part = self._open(notes, notes, name)
                yield from _cut(part, _read_rows(source, notes, advance))

    def _open(self, src: FileNotes, tgt: FileNotes, corpus: str | None) -> FilePair:
        self.parts.append(FilePair(src, tgt, self.num_pairs, corpus=corpus))
        return self.parts[-1]


def size_of(text: TrainText) -> int:
    """Return the bytes of a corpus, or of a mixture, on disk, as far as its files are there."""
    corpora = corpora_of(text, "data.train")
    paths = [Path(path) for named in corpora for path in paths_of(named.corpus)]
    return sum(path.stat().st_size for path in paths if path.is_file())


class _DecodedLine(NamedTuple):
    """A line, and whether something was replaced in it."""

    text: str
    is_bad: bool = False


class _LenientPair(NamedTuple):
    src: _DecodedLine
    tgt: _DecodedLine
    is_fault: bool = False


def _read_rows(source: TableReader, notes: FileNotes, advance: Advance) -> Iterator[_LenientPair]:
    """Yield the pairs of a file; in the place of a row that is none stands a blank pair."""
    try:
        for row in source.read(advance):
            notes.num_lines += 1
            if isinstance(row, Fault):
                notes.first_fault = notes.first_fault or f"{notes.num_lines}: {row.what}"
                notes.num_faults += 1
                yield _LenientPair(_DecodedLine(""), _DecodedLine(""), is_fault=True)
            else:
                notes.num_broken += row.num_breaks > 0
                yield _LenientPair(_DecodedLine(row.src), _DecodedLine(row.tgt))
    except DataError as error:
        notes.problem = str(error).removeprefix(f"{notes.path}: ").removesuffix(".")


def _read_lines(part: FilePair, advance: Advance) -> Iterator[_LenientPair]:
    for src, tgt in zip_longest(_lines(part.src, advance), _lines(part.tgt, advance)):
        if src is not None and tgt is not None:  # the longer file is only counted
            yield _LenientPair(_decode(src, part.src), _decode(tgt, part.tgt))


def _cut(part: FilePair, pairs: Iterator[_LenientPair]) -> Iterator[TextBlock]:
    """Cut the pairs of a part into blocks, and count them."""
    block, size = TextBlock(part.first), 0
    for src, tgt, is_fault in pairs:
        if is_fault:
            block.faults.append(len(block.src))
        _append(block.src, block.src_bad, src)
        _append(block.tgt, block.tgt_bad, tgt)
        size += len(src.text) + len(tgt.text)
        if len(block.src) == BLOCK_PAIRS or size > _BLOCK_BYTES:
            part.num_pairs += len(block.src)
            yield block
            block, size = TextBlock(part.first + part.num_pairs), 0
    if block.src:
        part.num_pairs += len(block.src)
        yield block


def _append(lines: list[str], bad: list[int], line: _DecodedLine) -> None:
    if line.is_bad:
        bad.append(len(lines))
    lines.append(line.text)


def _decode(line: bytes, notes: FileNotes) -> _DecodedLine:
    try:
        return _DecodedLine(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        if not notes.num_undecodable:
            byte = f"byte 0x{line[error.start]:02x} at byte {error.start + 1}"
            said = [f"line {notes.num_lines}", byte, other_form(line)]
            notes.first_undecodable = ", ".join(filter(None, said))
        notes.num_undecodable += 1
        return _DecodedLine(line.decode("utf-8", errors="replace"), is_bad=True)


def _lines(notes: FileNotes, advance: Advance) -> Iterator[bytes]:
    """Yield the lines of a file without their ends, as training reads them."""
    try:
        with Path(notes.path).open("rb") as raw:
            position = 0
            for line in _unzipped(notes.path, raw):
                text = line.removesuffix(b"\n")
                notes.num_crlf += text.endswith(b"\r")
                if notes.num_lines == 0 and text.startswith(_BOM):
                    notes.has_bom, text = True, text.removeprefix(_BOM)
                notes.num_lines += 1
                if notes.num_lines % BLOCK_PAIRS == 0:
                    advance(raw.tell() - position)
                    position = raw.tell()
                yield text.removesuffix(b"\r")
            advance(raw.tell() - position)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        notes.problem = "its gzip data is cut off or damaged"
    except OSError as error:
        notes.problem = error.strerror or str(error)


def _unzipped(path: str, raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.open(raw, "rb")) if path.endswith(".gz") else raw
