"""The text that is translated, in parts, and which of its lines repeat earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from mtrain.audit.features import Feature, Flags, measure
from mtrain.config.corpora import Corpus, SyntheticCorpus, TrainText, corpora_of
from mtrain.corpus.formats import check_regular
from mtrain.corpus.reader import Pair
from mtrain.decode.pipeline import Warn
from mtrain.io.atomic import append
from mtrain.io.lines import read_forgiving

_BLOCK_LINES = 4096
_PASS_LINES = 1_000_000  # keys that are sorted at a time, on average


def mono_rows(paths: Sequence[Path], is_target: bool, warn: Warn) -> Iterator[Pair]:
    """Yield the lines of files as pairs whose other side is empty; `src_file` is always that file.

    Bytes that are not UTF-8 become U+FFFD, and are warned of.

    Raises:
        DataError: if a file cannot be read.
    """
    check_regular(paths)
    for path in paths:

        def warn_of_file(text: str, path: Path = path) -> None:
            warn(f"{path}: {text}")

        for number, text in enumerate(read_forgiving(path, warn_of_file), start=1):
            src, tgt = ("", text) if is_target else (text, "")
            yield Pair(src, tgt, str(path), number)


def real_text(train: TrainText) -> list[Corpus]:
    """Return the corpora of the training text that are not synthetic."""
    real = [named.corpus for named in corpora_of(train)]
    return [corpus for corpus in real if not isinstance(corpus, SyntheticCorpus)]


def find_repeats(rows: Iterable[Pair], directory: Path) -> tuple[Flags, Flags]:
    """Return for the source and the target of each row whether it occurs in an earlier row.

    Case and punctuation are ignored. The rows are read once, and their keys written to `directory`,
    an empty folder. Memory holds two bytes a row, and about `_PASS_LINES` keys at a time.
    """
    paths = [directory / name for name in ("src.keys", "tgt.keys")]
    for path in paths:
        path.touch()
    rows = iter(rows)
    while block := list(islice(rows, _BLOCK_LINES)):
        for path, side in zip(paths, ("src", "tgt"), strict=True):
            lines = [getattr(row, side) for row in block]
            append(path, measure(lines, Feature.KEY).keys.tobytes())
    src, tgt = map(_repeated, paths)
    return src, tgt


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
