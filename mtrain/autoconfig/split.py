"""Read a new corpus, and draw held-out pairs from it. Knows neither models nor ids.

A pair can be held out if neither of its sides occurs in another pair, also not with other case,
punctuation or spacing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import compress, islice
from typing import NamedTuple

import numpy as np

from mtrain.audit.features import Flags, Hashes, Ints, LineFlag, Records, measure
from mtrain.config.corpora import Corpus
from mtrain.corpus.reader import Pair, read_pairs
from mtrain.errors import DataError
from mtrain.io.lines import Advance

_BLOCK_PAIRS = 4096
_SAMPLE_PAIRS = 50_000
_MIN_CHARS, _MAX_CHARS = 6, 500  # of a held-out line
_MAX_RATIO = 3.0  # of the characters of the two sides


class CorpusOverview(NamedTuple):
    """The size of a corpus, a sample of it, and the pairs that can be held out."""

    num_pairs: int  # of all, blank ones too
    src_words: int  # of all pairs; letters, in scripts without spaces
    tgt_words: int
    sample: list[Pair]  # pairs drawn uniformly
    unique_rows: Ints  # the rows, from 0, of the pairs that can be held out


def read_overview(corpus: Corpus, seed: int, advance: Advance) -> CorpusOverview:
    """Read a corpus once; `advance` is called with the bytes read since its last call.

    Raises:
        DataError: as `corpus.read_pairs`, and if there is no pair.
    """
    rng, pairs = random.Random(seed), read_pairs(corpus)
    sample: list[Pair] = []
    src_keys: list[Hashes] = []
    tgt_keys: list[Hashes] = []
    is_fit, num_pairs, words = [], 0, np.zeros(2, np.int64)
    while block := list(islice(pairs, _BLOCK_PAIRS)):
        src, tgt = (measure([getattr(pair, side) for pair in block]) for side in ("src", "tgt"))
        src_keys.append(src.keys)
        tgt_keys.append(tgt.keys)
        is_fit.append(_is_fit(src.lines, tgt.lines))
        words += (len(src.words), len(tgt.words))
        for pair in block:
            num_pairs += 1
            if len(sample) < _SAMPLE_PAIRS:
                sample.append(pair)
            elif (slot := rng.randrange(num_pairs)) < _SAMPLE_PAIRS:
                sample[slot] = pair
        advance(sum(len(pair.src.encode()) + len(pair.tgt.encode()) + 2 for pair in block))
    if not num_pairs:
        raise DataError("the corpus must have at least one pair, but is empty.")
    is_candidate = np.concatenate(is_fit)
    for blocks in (src_keys, tgt_keys):
        keys = np.concatenate(blocks)
        _, index, count = np.unique(keys, return_inverse=True, return_counts=True)
        is_candidate &= (count[index] == 1) & (keys != 0)
    unique_rows = np.flatnonzero(is_candidate)
    return CorpusOverview(num_pairs, int(words[0]), int(words[1]), sample, unique_rows)


def _is_fit(src: Records, tgt: Records) -> Flags:
    """Return which pairs look like translations of usual length."""
    fit = np.ones(len(src), bool)
    for side in (src, tgt):
        fit &= (side["chars"] >= _MIN_CHARS) & (side["chars"] <= _MAX_CHARS)
        fit &= side["flags"] & np.uint16(LineFlag.BLANK | LineFlag.MOJIBAKE | LineFlag.CONTROL) == 0
        fit &= 2 * side["odd"] < side["solid"]
    longer = np.maximum(src["chars"], tgt["chars"])
    fit &= longer <= _MAX_RATIO * np.minimum(src["chars"], tgt["chars"])
    differ: Flags = src["hash"] != tgt["hash"]
    return fit & differ


def draw(rows: Ints, sizes: Sequence[int], seed: int) -> list[Ints]:
    """Draw disjoint sets of rows, each in ascending order."""
    drawn = np.random.default_rng(seed).choice(rows, sum(sizes), replace=False)
    return [np.sort(part) for part in np.split(drawn, np.cumsum(sizes)[:-1])]


def collect(corpus: Corpus, rows: Ints) -> Iterator[Pair]:
    """Yield the pairs of at least one row; rows ascend."""
    is_collected = np.zeros(int(rows[-1]) + 1, bool)
    is_collected[rows] = True
    return compress(read_pairs(corpus), is_collected)
