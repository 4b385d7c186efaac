"""Repeats within a corpus, and held-out sentences in another corpus, found by hashes alone.

Pairs have 128 bits, sources 64: among five million sources, the chance of a collision is below one
in a million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.features import Flags, Hashes, Ints, PairWindow, differs_from_previous, mixed

_PASS_PAIRS = 1_000_000  # that are sorted at a time

Numbers = npt.NDArray[np.uint32]


class Repeats(NamedTuple):
    """For each pair, an earlier one, counted from 1; 0 if there is none."""

    of_pair: Numbers  # the first pair with the same two sides
    of_src: Numbers  # the first pair with the same source and another target, if `of_pair` is 0


def find(read: Callable[[], Iterator[PairWindow]], num_pairs: int) -> Repeats:
    """Find all repeats, in as many passes over the hashes as bounded memory needs."""
    repeats = Repeats(np.zeros(num_pairs, np.uint32), np.zeros(num_pairs, np.uint32))
    num_passes = num_pairs // _PASS_PAIRS + 1
    for remainder in range(num_passes):  # of the hash of the source
        blocks = [(np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.int64))]
        for window in read():
            src, tgt = window.src["hash"], window.tgt["hash"]
            rows = np.flatnonzero(src % np.uint64(num_passes) == remainder)
            blocks.append((src[rows], tgt[rows], rows + window.first))
        src, tgt, numbers = (np.concatenate(column) for column in zip(*blocks, strict=True))
        order = np.lexsort((tgt, src))  # stable: equal pairs stay in the corpus's order
        src, tgt, numbers = src[order], tgt[order], numbers[order]
        is_new_src = differs_from_previous(src)
        is_new_pair = is_new_src | differs_from_previous(tgt)
        first_of_pair = numbers[is_new_pair][np.cumsum(is_new_pair) - 1]
        is_repeated = ~is_new_pair
        repeats.of_pair[numbers[is_repeated]] = first_of_pair[is_repeated] + 1
        lowest = np.minimum.reduceat(numbers, np.flatnonzero(is_new_src))
        first_of_src = lowest[np.cumsum(is_new_src) - 1]
        is_other = is_new_pair & (numbers != first_of_src)
        repeats.of_src[numbers[is_other]] = first_of_src[is_other] + 1
    return repeats


class HashTable:
    """Hashes of held-out lines that are looked up block by block; hash 0 matches nothing."""

    def __init__(self, hashes: Hashes) -> None:
        self._unique, self._group = np.unique(hashes, return_inverse=True)
        self._times = np.zeros(len(self._unique), np.uint32)
        self._first = np.full(len(self._unique), -1, np.int64)

    def look_up(self, hashes: Hashes, first: int) -> Flags:
        """Count the hashes of pairs from number `first` on; return which are held out."""
        if not len(self._unique):
            return np.zeros(len(hashes), bool)
        slots = np.minimum(np.searchsorted(self._unique, hashes), len(self._unique) - 1)
        is_hit: Flags = (self._unique[slots] == hashes) & (hashes != 0)
        rows = np.flatnonzero(is_hit)[::-1]  # backwards: the first one is written last
        np.add.at(self._times, slots[rows], 1)
        is_new = self._first[slots[rows]] < 0
        self._first[slots[rows[is_new]]] = rows[is_new] + first
        return is_hit

    def hits(self) -> tuple[Numbers, Ints]:
        """Return for each held-out line how often it occurs, and the first pair (-1 if none)."""
        return self._times[self._group], self._first[self._group]


class SideHashes(NamedTuple):
    """Hashes of both sides of pairs: of the exact text, or keys without case and punctuation."""

    src: Hashes
    tgt: Hashes

    @classmethod
    def joined(cls, blocks: Sequence[SideHashes]) -> SideHashes:
        """Concatenate blocks."""
        empty = cls(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        return cls(*(np.concatenate(side) for side in zip(empty, *blocks, strict=True)))

    def of_pairs(self) -> Hashes:
        """Return one hash for each pair; 0 if a side's is 0."""
        is_whole = (self.src != 0) & (self.tgt != 0)
        return np.where(is_whole, mixed(self.src, self.tgt), np.uint64(0))


class HashTables:
    """Tables of the sources, of the targets and of the pairs of a held-out corpus."""

    def __init__(self, hashes: SideHashes) -> None:
        self.src, self.tgt = HashTable(hashes.src), HashTable(hashes.tgt)
        self.pairs = HashTable(hashes.of_pairs())

    def look_up(self, hashes: SideHashes, first: int) -> tuple[Flags, Flags]:
        """Return which pairs of a block have a held-out side, and which are held out."""
        is_held = self.src.look_up(hashes.src, first) | self.tgt.look_up(hashes.tgt, first)
        return is_held, self.pairs.look_up(hashes.of_pairs(), first)


class Leaks:
    """The occurrences of one held-out corpus in another, by exact text and by keys."""

    def __init__(self, exact: SideHashes, keys: SideHashes) -> None:
        self.exact, self.by_key = HashTables(exact), HashTables(keys)

    def look_up(self, exact: SideHashes, keys: SideHashes, first: int) -> tuple[Flags, Flags]:
        """Return which pairs of a block have a held-out side, and which are exactly held out."""
        is_held, is_held_pair = self.exact.look_up(exact, first)
        return is_held | self.by_key.look_up(keys, first)[0], is_held_pair
