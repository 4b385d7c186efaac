"""Pairs and sources that occur in a corpus more than once, found by their hashes alone.

Pairs have 128 bits, sources 64: among five million sources, the chance of a collision is below one
in a million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.features import Hashes, Ints

_PASS_PAIRS = 1_000_000  # that are sorted at a time

Numbers = npt.NDArray[np.uint32]


class PairHashes(NamedTuple):
    """The hashes of consecutive pairs of a corpus, and the number of the first."""

    src: Hashes
    tgt: Hashes
    first: int


class Repeats(NamedTuple):
    """For each pair, an earlier one, counted from 1; 0 if there is none.

    Attributes:
        of_pair: the first pair with the same two sides.
        of_src: the first pair with the same source and another target, for pairs without an
            earlier equal one.
    """

    of_pair: Numbers
    of_src: Numbers


def find(read: Callable[[], Iterator[PairHashes]], num_pairs: int) -> Repeats:
    """Find all repeats, in as many passes over the hashes as bounded memory needs."""
    repeats = Repeats(np.zeros(num_pairs, np.uint32), np.zeros(num_pairs, np.uint32))
    num_passes = num_pairs // _PASS_PAIRS + 1
    for index in range(num_passes):  # each over the sources with one remainder of their hashes
        src, tgt, numbers = [], [], []
        for block in read():
            rows = np.flatnonzero(block.src % np.uint64(num_passes) == index)
            src.append(block.src[rows])
            tgt.append(block.tgt[rows])
            numbers.append(rows + block.first)
        if src:
            _find_among(np.concatenate(src), np.concatenate(tgt), np.concatenate(numbers), repeats)
    return repeats


def _find_among(src: Hashes, tgt: Hashes, numbers: Ints, repeats: Repeats) -> None:
    """Write the repeats among pairs with these numbers, which rise."""
    order = np.lexsort((tgt, src))  # stable: equal pairs stay in the corpus's order
    src, tgt, numbers = src[order], tgt[order], numbers[order]
    is_new_src = _differs(src)
    is_new_pair = is_new_src | _differs(tgt)
    starts = np.flatnonzero(is_new_pair)
    first_of_pair = np.repeat(numbers[starts], np.diff(np.append(starts, len(numbers))))
    again = ~is_new_pair
    repeats.of_pair[numbers[again]] = first_of_pair[again] + 1
    groups = np.flatnonzero(is_new_src)
    if len(groups):
        lowest = np.minimum.reduceat(numbers, groups)
        first_of_src = np.repeat(lowest, np.diff(np.append(groups, len(numbers))))
        other = is_new_pair & (numbers != first_of_src)
        repeats.of_src[numbers[other]] = first_of_src[other] + 1


def _differs(values: Hashes) -> npt.NDArray[np.bool_]:
    """Return for each value whether it differs from the one before it."""
    return np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]
