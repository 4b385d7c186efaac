"""The text that is translated, in parts, and which of its lines repeat earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.audit.features import Feature, Flags, measure
from mtrain.config.corpora import SyntheticCorpus, TrainText, corpora_of
from mtrain.corpus.formats import paths_of
from mtrain.decode.pipeline import Warn
from mtrain.io.atomic import append
from mtrain.io.lines import read_forgiving

_BLOCK_LINES = 4096
_PASS_LINES = 1_000_000  # whose keys are sorted together


class InputRow(NamedTuple):
    """A line of monolingual text, whose other side is empty, or a pair; `line` counts from 1."""

    src: str
    tgt: str
    file: str
    line: int


def mono_rows(paths: Sequence[Path], is_target: bool, warn: Warn) -> Iterator[InputRow]:
    """Yield the lines of files; bytes that are not UTF-8 become U+FFFD, and are warned of.

    Raises:
        DataError: if a file cannot be read.
    """
    for path in paths:
        for number, text in enumerate(read_forgiving(path, warn), start=1):
            src, tgt = ("", text) if is_target else (text, "")
            yield InputRow(src, tgt, str(path), number)


def real_text(train: TrainText) -> TrainText:
    """Return the corpora of the training text that are not synthetic."""
    real = [named.corpus for named in corpora_of(train, "data.train")]
    return [corpus for corpus in real if not isinstance(corpus, SyntheticCorpus)]


def paths_of_text(train: TrainText) -> list[str]:
    """Return the local files of real training text."""
    corpora = corpora_of(train, "data.train")
    return list(dict.fromkeys(path for named in corpora for path in paths_of(named.corpus)))


class RepeatedSides(NamedTuple):
    """For each row, whether its side occurs in an earlier row, ignoring case and punctuation."""

    src: Flags
    tgt: Flags


def find_repeats(rows: Iterable[InputRow], directory: Path) -> RepeatedSides:
    """Find the rows whose sides repeat earlier ones.

    Memory holds two bytes a row, and about `_PASS_LINES` keys at a time.

    Args:
        rows: the text, which is read once.
        directory: of the temporary files.
    """
    paths = [directory / name for name in ("src.keys", "tgt.keys")]
    for path in paths:
        path.unlink(missing_ok=True)
        path.touch()
    rows = iter(rows)
    while block := list(islice(rows, _BLOCK_LINES)):
        for path, side in zip(paths, ("src", "tgt"), strict=True):
            lines = [getattr(row, side) for row in block]
            keys = (
                measure(lines, Feature.KEY).keys if any(lines) else np.zeros(len(lines), np.uint64)
            )
            append(path, keys.tobytes())
    repeats = RepeatedSides(*map(_repeated, paths))
    for path in paths:
        path.unlink()
    return repeats


def _repeated(path: Path) -> Flags:
    """Return which keys of a file occur earlier in it; a key of 0 repeats nothing."""
    num_lines = path.stat().st_size // 8
    is_repeat = np.zeros(num_lines, bool)
    num_passes = num_lines // _PASS_LINES + 1
    for remainder in range(num_passes):
        keys, numbers, first = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], 0
        with path.open("rb") as stream:
            while len(window := np.fromfile(stream, np.uint64, _PASS_LINES)):
                rows = np.flatnonzero((window % np.uint64(num_passes) == remainder) & (window != 0))
                keys.append(window[rows])
                numbers.append(rows + first)
                first += len(window)
        of_pass = np.concatenate(numbers)
        _, first_rows = np.unique(np.concatenate(keys), return_index=True)
        is_repeat[of_pass] = True
        is_repeat[of_pass[first_rows]] = False
    return is_repeat
