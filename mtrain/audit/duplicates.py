"""Pairs and sources that stand in a corpus more than once, found by their hashes alone.

A pair is known by 128 bits, a source by 64: among five million sources, the chance that two
different ones are taken for the same is below one in a million.
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
    """The hashes of pairs that stand together in a corpus, and the number of the first."""

    src: Hashes
    tgt: Hashes
    first: int


class Repeats(NamedTuple):
    """For each pair, an earlier one, counted from 1; 0 if there is none.

    Attributes:
        of_pair: the first pair with the same two sides.
        of_src: the first pair with the same source and another target, where this pair is the
            first of its kind.
    """

    of_pair: Numbers
    of_src: Numbers


def find(read: Callable[[], Iterator[PairHashes]], num_pairs: int) -> Repeats:
    """Find all repeats; the hashes are read as often as memory for a part of them needs."""
    found = Repeats(np.zeros(num_pairs, np.uint32), np.zeros(num_pairs, np.uint32))
    num_passes = num_pairs // _PASS_PAIRS + 1
    for turn in range(num_passes):
        _find_among(_gather(read(), turn, num_passes), found)
    return found


class _Gathered(NamedTuple):
    src: Hashes
    tgt: Hashes
    numbers: Ints


def _gather(blocks: Iterator[PairHashes], turn: int, num_passes: int) -> _Gathered:
    """Return the pairs whose source belongs to this pass."""
    src, tgt, numbers = [], [], []
    for block in blocks:
        own = np.flatnonzero(block.src % np.uint64(num_passes) == turn)
        src.append(block.src[own])
        tgt.append(block.tgt[own])
        numbers.append(own + block.first)
    if not src:
        return _Gathered(np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.int64))
    return _Gathered(np.concatenate(src), np.concatenate(tgt), np.concatenate(numbers))


def _find_among(pairs: _Gathered, found: Repeats) -> None:
    order = np.lexsort((pairs.tgt, pairs.src))  # stable: equal pairs stay in the corpus's order
    src, tgt, numbers = pairs.src[order], pairs.tgt[order], pairs.numbers[order]
    is_new_src = _differs(src)
    is_new_pair = is_new_src | _differs(tgt)
    starts = np.flatnonzero(is_new_pair)
    first_of_pair = np.repeat(numbers[starts], np.diff(np.append(starts, len(numbers))))
    again = ~is_new_pair
    found.of_pair[numbers[again]] = first_of_pair[again] + 1
    groups = np.flatnonzero(is_new_src)
    if len(groups):
        lowest = np.minimum.reduceat(numbers, groups)
        first_of_src = np.repeat(lowest, np.diff(np.append(groups, len(numbers))))
        other = is_new_pair & (numbers != first_of_src)
        found.of_src[numbers[other]] = first_of_src[other] + 1


def _differs(values: Hashes) -> npt.NDArray[np.bool_]:
    """Tell of each value whether it is not the one before it."""
    return np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]
