"""Repeats within a corpus, and held-out sentences in another corpus, found by hashes alone.

Repeated pairs are compared by 128 bits, sources and held-out text by 64: among five million
sources, the chance of a collision is below one in a million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.features import (
    Flags,
    Hashes,
    Ints,
    LineFeatures,
    PairWindow,
    differs_from_previous,
    mixed,
)

_PASS_PAIRS = 1_000_000  # sorted at a time, on average

Numbers = npt.NDArray[np.uint32]


class Repeats(NamedTuple):
    """For each pair, the number of an earlier pair, from 1; 0 if there is none."""

    of_pair: Numbers  # the first pair with the same two sides, neither of them blank
    of_src: Numbers  # the first kept one with the same source, another target, if `of_pair` is 0


def find(read: Callable[[], Iterator[PairWindow]], is_dropped: Flags) -> Repeats:
    """Find all repeats, given for each pair whether another rule drops it.

    Each pass over the records sorts about `_PASS_PAIRS` hashes in memory.
    """
    num_pairs = len(is_dropped)
    repeats = Repeats(np.zeros(num_pairs, np.uint32), np.zeros(num_pairs, np.uint32))
    num_passes = num_pairs // _PASS_PAIRS + 1
    for remainder in range(num_passes):  # of the hash of the source
        blocks = [(np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.int64))]
        for window in read():
            src, tgt = window.src["hash"], window.tgt["hash"]
            is_whole = (src != 0) & (tgt != 0)
            rows = np.flatnonzero(is_whole & (src % np.uint64(num_passes) == remainder))
            blocks.append((src[rows], tgt[rows], rows + window.first))
        src, tgt, numbers = (np.concatenate(column) for column in zip(*blocks, strict=True))
        order = np.lexsort((tgt, src))  # stable: equal pairs stay in the corpus's order
        src, tgt, numbers = src[order], tgt[order], numbers[order]
        is_new_src = differs_from_previous(src)
        is_new_pair = is_new_src | differs_from_previous(tgt)
        first_of_pair = numbers[is_new_pair][np.cumsum(is_new_pair) - 1]
        is_repeated = ~is_new_pair
        repeats.of_pair[numbers[is_repeated]] = first_of_pair[is_repeated] + 1
        kept_numbers = np.where(is_dropped[numbers], num_pairs, numbers)
        lowest = np.minimum.reduceat(kept_numbers, np.flatnonzero(is_new_src))
        first_of_src = lowest[np.cumsum(is_new_src) - 1]
        is_other = is_new_pair & (numbers > first_of_src)
        repeats.of_src[numbers[is_other]] = first_of_src[is_other] + 1
    return repeats


class PairHashes(NamedTuple):
    """Hashes of pairs by exact text, or by keys without case and punctuation; 0 for no text."""

    src: Hashes
    tgt: Hashes
    pair: Hashes

    @classmethod
    def of(cls, src: Hashes, tgt: Hashes) -> PairHashes:
        """Return the hashes of pairs, given those of both sides."""
        return cls(src, tgt, np.where((src != 0) & (tgt != 0), mixed(src, tgt), np.uint64(0)))

    def exchanged(self) -> PairHashes:
        """Return the hashes of the pairs with their sides exchanged; 0 for two equal sides."""
        differs = self.src != self.tgt
        src, tgt = (np.where(differs, side, np.uint64(0)) for side in (self.tgt, self.src))
        return PairHashes.of(src, tgt)

    @classmethod
    def joined(cls, blocks: Sequence[PairHashes]) -> PairHashes:
        """Concatenate one or more blocks."""
        return cls(*map(np.concatenate, zip(*blocks, strict=True)))


NO_HASHES = PairHashes(*(np.zeros(0, np.uint64) for _ in range(3)))


def hashes_of(src: LineFeatures, tgt: LineFeatures) -> tuple[PairHashes, PairHashes]:
    """Return the hashes of pairs by their exact text, and by their keys."""
    exact = PairHashes.of(src.lines["hash"], tgt.lines["hash"])
    return exact, PairHashes.of(src.keys, tgt.keys)


class Leaks:
    """The occurrences of one held-out corpus in another, by exact text and by keys."""

    def __init__(self, exact: PairHashes, keys: PairHashes) -> None:
        self._exact = [_HashTable(hashes) for hashes in exact]
        self._by_key = [_HashTable(hashes) for hashes in keys]

    def look_up(
        self, exact: PairHashes, keys: PairHashes, first: int, both_directions: bool = False
    ) -> tuple[Flags, Flags]:
        """Count held-out text in a block of pairs from number `first` on.

        With `both_directions`, also in the pairs with their sides exchanged. Returns which pairs
        have a held-out side, and which are exactly a held-out pair.
        """
        is_held, is_held_pair = self._look_up(exact, keys, first, is_exchanged=False)
        if both_directions:
            others = self._look_up(exact.exchanged(), keys.exchanged(), first, is_exchanged=True)
            is_held, is_held_pair = is_held | others[0], is_held_pair | others[1]
        return is_held, is_held_pair

    def _look_up(
        self, exact: PairHashes, keys: PairHashes, first: int, is_exchanged: bool
    ) -> tuple[Flags, Flags]:
        both = (self._exact, exact), (self._by_key, keys)
        is_held_pair, is_key_pair = (
            tables[2].look_up(hashes.pair, first, np.zeros(len(hashes.pair), bool), is_exchanged)
            for tables, hashes in both
        )
        is_held: Flags = np.logical_or.reduce(
            [
                table.look_up(hashes, first, is_held_pair | is_key_pair, is_exchanged)
                for tables, block in both
                for table, hashes in zip(tables[:2], block[:2], strict=True)
            ]
        )
        return is_held, is_held_pair

    def occurrences(self) -> list[tuple[Numbers, Numbers, Ints, Flags]]:
        """Return (times, exact_times, first, is_exchanged) of sources, of targets and of pairs.

        Each array has an entry per held-out pair: the number of occurrences, of those with the same
        case and punctuation, the pair of the first occurrence, -1 if there is none, and whether its
        sides were exchanged for the search. The first of a side is, if possible, in another pair,
        and that of any, if possible, an exact one.
        """
        occurrences = []
        for exact, by_key in zip(self._exact, self._by_key, strict=True):
            exact_times, is_exact_other, *exact_first = exact.hits()
            key_times, is_key_other, *key_first = by_key.hits()
            times = np.maximum(exact_times, key_times)
            is_exact_first = (exact_times > 0) & (is_exact_other | ~is_key_other)
            first, is_exchanged = np.where(is_exact_first, exact_first, key_first)
            occurrences.append((times, exact_times, first, is_exchanged > 0))
        return occurrences


class _HashTable:
    """Hashes of held-out text that are looked up block by block."""

    def __init__(self, hashes: Hashes) -> None:
        self._unique, self._group = np.unique(hashes, return_inverse=True)
        self._times = np.zeros(len(self._unique), np.uint32)
        self._first = np.full(len(self._unique), -1, np.int64)
        self._is_exchanged = np.zeros(len(self._unique), bool)  # whether the sides of that pair are
        self._is_other = np.zeros(len(self._unique), bool)  # whether it is not in a held-out pair

    def look_up(self, hashes: Hashes, first: int, is_held_pair: Flags, is_exchanged: bool) -> Flags:
        """Count the hashes of pairs from number `first` on; return which are held out.

        The first of them is one of those that are not `is_held_pair`, if there are any.
        """
        if not len(self._unique):
            return np.zeros(len(hashes), bool)
        slots = np.minimum(np.searchsorted(self._unique, hashes), len(self._unique) - 1)
        is_hit: Flags = (self._unique[slots] == hashes) & (hashes != 0)
        rows = np.flatnonzero(is_hit)[::-1]  # in reverse: the first is written last
        np.add.at(self._times, slots[rows], 1)
        rows = np.concatenate([rows[is_held_pair[rows]], rows[~is_held_pair[rows]]])
        is_new = self._first[slots[rows]] < 0
        is_new |= ~self._is_other[slots[rows]] & ~is_held_pair[rows]
        rows = rows[is_new]
        self._first[slots[rows]] = rows + first
        self._is_exchanged[slots[rows]] = is_exchanged
        self._is_other[slots[rows]] = ~is_held_pair[rows]
        return is_hit

    def hits(self) -> tuple[Numbers, Flags, Ints, Flags]:
        """Return for each held-out line (times, is_other, first, is_exchanged); first may be -1."""
        group = self._group
        first, is_exchanged = self._first[group], self._is_exchanged[group]
        return self._times[group], self._is_other[group], first, is_exchanged
