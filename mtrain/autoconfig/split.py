"""Look a new corpus over, and hold pairs of it out. Knows neither models nor ids.

A pair that is held out stands once: neither of its sides is in any other pair, not even with
another case, punctuation or spacing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.features import Hashes, Ints, LineFlag, Records, measure
from mtrain.config.corpora import Corpus
from mtrain.corpus.formats import Advance
from mtrain.corpus.reader import Pair, read_pairs
from mtrain.errors import DataError

Flags = npt.NDArray[np.bool_]

_BLOCK_PAIRS = 4096
_SAMPLE_PAIRS = 50_000
_LEAST_CHARS, _MOST_CHARS = 6, 500  # of a line that tells something of a translator
_MOST_RATIO = 3.0  # of the characters of two sides, but for short lines


class Look(NamedTuple):
    """What a corpus is like.

    Attributes:
        num_pairs: of which a side may be blank.
        src_words, tgt_words: in all; letters, where words have no spaces.
        sample: pairs from all over it.
        alone: the numbers, from 0, of pairs that can be held out.
    """

    num_pairs: int
    src_words: int
    tgt_words: int
    sample: list[Pair]
    alone: Ints


def look(corpus: Corpus, seed: int, advance: Advance) -> Look:
    """Read a corpus once.

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
    alone = np.concatenate(is_fit) & _stand_once(src_keys) & _stand_once(tgt_keys)
    return Look(num_pairs, int(words[0]), int(words[1]), sample, np.flatnonzero(alone))


def _is_fit(src: Records, tgt: Records) -> Flags:
    """Tell which pairs are worth translating, by the look of them."""
    fit = np.ones(len(src), bool)
    for side in (src, tgt):
        fit &= (side["chars"] >= _LEAST_CHARS) & (side["chars"] <= _MOST_CHARS)
        fit &= side["marks"] & np.uint16(LineFlag.BLANK | LineFlag.MOJIBAKE | LineFlag.CONTROL) == 0
        fit &= 2 * side["odd"] < side["solid"]
    longer = np.maximum(src["chars"], tgt["chars"])
    fit &= longer <= _MOST_RATIO * np.minimum(src["chars"], tgt["chars"])
    differ: Flags = src["hash"] != tgt["hash"]
    return fit & differ


def _stand_once(blocks: Sequence[Hashes]) -> Flags:
    keys = np.concatenate(blocks)
    _, place, times = np.unique(keys, return_inverse=True, return_counts=True)
    once: Flags = (times[place] == 1) & (keys != 0)
    return once


def draw(alone: Ints, sizes: Sequence[int], seed: int) -> list[Ints]:
    """Draw sets of pairs that have none in common, each in the order of the corpus."""
    drawn = np.random.default_rng(seed).choice(alone, sum(sizes), replace=False)
    ends = np.cumsum(sizes)
    return [np.sort(part) for part in np.split(drawn, ends[:-1])]


def collect(corpus: Corpus, rows: Ints) -> Iterator[Pair]:
    """Yield the pairs with these numbers, which rise."""
    wanted = iter(rows.tolist())
    row = next(wanted, None)
    for number, pair in enumerate(read_pairs(corpus)):
        if number == row:
            yield pair
            row = next(wanted, None)
            if row is None:
                return
