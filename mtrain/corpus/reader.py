"""Parallel text: read it, check it, account for every pair. Knows nothing of ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from mtrain.config.corpora import Corpus, FilesCorpus, TrainText, corpora_of
from mtrain.config.sections import DataConfig
from mtrain.corpus.formats import Fault, TableReader, paths_of, revision_of, sources, tell_nobody
from mtrain.errors import DataError
from mtrain.io.atomic import sha256
from mtrain.io.lines import read_lines


class Pair(NamedTuple):
    """A source line, its translation, and where they stand: a source file and a line from 1.

    `num_breaks` counts the line breaks within them that became spaces.
    """

    src: str
    tgt: str
    src_file: str
    line: int
    num_breaks: int = 0


class PairCount(NamedTuple):
    """How many pairs a corpus has, and of how many a line break became a space."""

    num_pairs: int
    num_broken: int


class FileMark(NamedTuple):
    """What tells a file from another: its size and time at a glance, its checksum for certain."""

    size: int
    mtime_ns: int
    sha256: str


def read_pairs(corpus: TrainText) -> Iterator[Pair]:
    """Yield every pair of a corpus, or of all those of a mixture, file by file, in order.

    Raises:
        DataError: for a file that cannot be read, a line that is not UTF-8, two files whose
            numbers of lines differ, or a row that is no pair.
    """
    if isinstance(corpus, list):
        for own in corpus:
            yield from read_pairs(own)
    elif isinstance(corpus, FilesCorpus):
        for src_file, tgt_file in zip(corpus.src, corpus.tgt, strict=True):
            yield from _read_file_pair(src_file, tgt_file)
    else:
        for source in sources(corpus):
            yield from _read_rows(source)


def _read_rows(source: TableReader) -> Iterator[Pair]:
    for number, row in enumerate(source.read(tell_nobody), start=1):
        if isinstance(row, Fault):
            raise DataError(f"{source.place(number)}: {row.what}.")
        yield Pair(row.src, row.tgt, source.name, number, row.num_breaks)


def _read_file_pair(src_file: str, tgt_file: str) -> Iterator[Pair]:
    src_lines, tgt_lines = read_lines(Path(src_file)), read_lines(Path(tgt_file))
    for line, (src, tgt) in enumerate(zip_longest(src_lines, tgt_lines), start=1):
        if src is None or tgt is None:
            num_src = line - 1 + (src is not None) + sum(1 for _ in src_lines)
            num_tgt = line - 1 + (tgt is not None) + sum(1 for _ in tgt_lines)
            raise DataError(
                f"{src_file} and {tgt_file} must have the same number of lines, but have "
                f"{num_src:,} and {num_tgt:,} instead."
            )
        yield Pair(src, tgt, src_file, line)


def count_pairs(corpus: Corpus, key: str) -> PairCount:
    """Read a corpus once, to find every error before anything is written.

    Raises:
        DataError: as `read_pairs`, and for a corpus without a single pair.
    """
    num_pairs = num_broken = 0
    for pair in read_pairs(corpus):
        num_pairs += 1
        num_broken += pair.num_breaks > 0
    if num_pairs == 0:
        name = corpus.src[0] if isinstance(corpus, FilesCorpus) else sources(corpus)[0].name
        raise DataError(f"`{key}` must have at least one pair, but {name} is empty.")
    return PairCount(num_pairs, num_broken)


def files_of(data: DataConfig) -> list[str]:
    """Return every file that a config's corpora name, once."""
    return list(dict.fromkeys(path for own in _corpora(data) for path in paths_of(own)))


def revisions_of(data: DataConfig) -> dict[str, str]:
    """Return the revision of every data set of the hub that a config names."""
    return {name: own for each in _corpora(data) for name, own in revision_of(each).items()}


def _corpora(data: DataConfig) -> list[Corpus]:
    train = [named.corpus for named in corpora_of(data.train, "data.train")]
    return [*train, data.valid, *data.tests.values()]


def mark(paths: Iterable[str]) -> dict[str, FileMark]:
    """Return what the files are now, to know them again."""
    marks = {}
    for path in paths:
        stat = Path(path).stat()
        marks[path] = FileMark(stat.st_size, stat.st_mtime_ns, sha256(Path(path)))
    return marks


def changed_files(marks: Mapping[str, FileMark], trust_times: bool = True) -> dict[str, str]:
    """Return the files that are no longer as they were marked, each with its checksum now.

    A file that is gone, or cannot be read, has not changed.

    Args:
        marks: of the files.
        trust_times: take a file whose size and time are the same for the same.
    """
    changed = {}
    for path, old in marks.items():
        try:
            stat = Path(path).stat()
            if trust_times and (stat.st_size, stat.st_mtime_ns) == (old.size, old.mtime_ns):
                continue
            now = sha256(Path(path))
        except OSError:
            continue
        if now != old.sha256:
            changed[path] = now
    return changed
