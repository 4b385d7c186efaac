"""Held-out sentences that occur in another corpus, found by hashes. Knows no files and no text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.features import Hashes, mixed


class LeakHits(NamedTuple):
    """The occurrences of each held-out line in the other corpus.

    Attributes:
        times: how many there are.
        first: the number of the first pair, from 0; -1 if there is none.
    """

    times: npt.NDArray[np.uint32]
    first: npt.NDArray[np.int64]


class HashTable:
    """Hashes of held-out lines that are looked up block by block; hash 0 matches nothing."""

    def __init__(self, hashes: Hashes) -> None:
        self._unique, self._group = np.unique(hashes, return_inverse=True)
        self._times = np.zeros(len(self._unique), np.uint32)
        self._first = np.full(len(self._unique), -1, np.int64)

    def look_up(self, hashes: Hashes, first: int) -> npt.NDArray[np.bool_]:
        """Count the hashes of pairs from number `first` on; return which are held out."""
        if not len(self._unique):
            return np.zeros(len(hashes), bool)
        slots = np.minimum(np.searchsorted(self._unique, hashes), len(self._unique) - 1)
        is_hit: npt.NDArray[np.bool_] = (self._unique[slots] == hashes) & (hashes != 0)
        rows = np.flatnonzero(is_hit)[::-1]  # backwards: the first one is written last
        np.add.at(self._times, slots[rows], 1)
        is_new = self._first[slots[rows]] < 0
        self._first[slots[rows[is_new]]] = rows[is_new] + first
        return is_hit

    def hits(self) -> LeakHits:
        """Return the occurrences of each held-out line."""
        return LeakHits(self._times[self._group], self._first[self._group])


class SideHashes(NamedTuple):
    """Hashes of both sides of pairs: of the exact text, or keys without case and punctuation."""

    src: Hashes
    tgt: Hashes

    def of_pairs(self) -> Hashes:
        """Return one hash for each pair; 0 if a side's is 0."""
        is_whole = (self.src != 0) & (self.tgt != 0)
        return np.where(is_whole, mixed(self.src, self.tgt), np.uint64(0))


class HashTables:
    """Tables of the sources, of the targets and of the pairs of a held-out corpus."""

    def __init__(self, hashes: SideHashes) -> None:
        self.src, self.tgt = HashTable(hashes.src), HashTable(hashes.tgt)
        self.pairs = HashTable(hashes.of_pairs())

    def look_up(
        self, hashes: SideHashes, first: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which pairs of a block have a held-out side, and which are held out."""
        is_held = self.src.look_up(hashes.src, first)
        is_held |= self.tgt.look_up(hashes.tgt, first)
        return is_held, self.pairs.look_up(hashes.of_pairs(), first)


class Leaks:
    """The occurrences of one held-out corpus in another, by exact text and by keys."""

    def __init__(self, exact: SideHashes, keys: SideHashes) -> None:
        self.exact, self.by_key = HashTables(exact), HashTables(keys)

    def look_up(
        self, exact: SideHashes, keys: SideHashes, first: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which pairs of a block have a held-out side, and which are exactly held out."""
        is_held, is_held_pair = self.exact.look_up(exact, first)
        return is_held | self.by_key.look_up(keys, first)[0], is_held_pair
