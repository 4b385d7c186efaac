"""Parallel text: read it, check it, account for every pair. Knows nothing of ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from mtrain.config import CorpusConfig, DataConfig
from mtrain.errors import DataError
from mtrain.files import read_lines, sha256


class Pair(NamedTuple):
    """A source line, its translation, and where they stand: a source file and a line from 1."""

    src: str
    tgt: str
    src_file: str
    line: int


class FileMark(NamedTuple):
    """What tells a file from another: its size and time at a glance, its checksum for certain."""

    size: int
    mtime_ns: int
    sha256: str


_SLACK_TOKENS = 5  # by which a target may leave the range of length ratios


class Profile(NamedTuple):
    """What is usual in a training corpus; lengths are tokens with eos.

    Attributes:
        longest_src: the longest source.
        least_ratio, most_ratio: of target to source lengths, of almost all pairs.
        share_copied: of the pairs, how many have a target that is the source.
    """

    longest_src: int
    least_ratio: float
    most_ratio: float
    share_copied: float

    def holds(self, num_src: int, num_tgt: int) -> bool:
        """Tell whether a target's length is like those of the corpus."""
        least, most = self.least_ratio * num_src, self.most_ratio * num_src
        return least - _SLACK_TOKENS <= num_tgt <= most + _SLACK_TOKENS


def read_pairs(corpus: CorpusConfig) -> Iterator[Pair]:
    """Yield every pair of a corpus, file by file, in order.

    Raises:
        DataError: for a file that cannot be read, a line that is not UTF-8, or two files whose
            numbers of lines differ.
    """
    for src_file, tgt_file in zip(corpus.src, corpus.tgt, strict=True):
        yield from _read_file_pair(src_file, tgt_file)


def _read_file_pair(src_file: str, tgt_file: str) -> Iterator[Pair]:
    src_lines, tgt_lines = read_lines(Path(src_file)), read_lines(Path(tgt_file))
    for line, (src, tgt) in enumerate(zip_longest(src_lines, tgt_lines), start=1):
        if src is None or tgt is None:
            num_src = line - 1 + (src is not None) + sum(1 for _ in src_lines)
            num_tgt = line - 1 + (tgt is not None) + sum(1 for _ in tgt_lines)
            raise DataError(
                f"{src_file} and {tgt_file} must have the same number of lines, but have "
                f"{num_src} and {num_tgt} instead."
            )
        yield Pair(src, tgt, src_file, line)


def count_pairs(corpus: CorpusConfig, key: str) -> int:
    """Read a corpus once, to find every error before anything is written.

    Raises:
        DataError: as `read_pairs`, and for a corpus without a single pair.
    """
    num_pairs = sum(1 for _ in read_pairs(corpus))
    if num_pairs == 0:
        raise DataError(f"`{key}` must have at least one pair, but {corpus.src[0]} is empty.")
    return num_pairs


def files_of(data: DataConfig) -> list[str]:
    """Return every file that a config's corpora name, once."""
    corpora = [data.train, data.valid, *data.tests.values()]
    return list(dict.fromkeys(path for own in corpora for path in (*own.src, *own.tgt)))


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
