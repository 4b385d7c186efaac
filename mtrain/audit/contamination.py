"""Held-out sentences that stand in another corpus, by hashes. Knows no files and no text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.features import Hashes, mixed


class LeakHits(NamedTuple):
    """For each held-out line: how often it stands in the other corpus, and where first.

    Attributes:
        times: 0 if it does not.
        first: the number of that pair, from 0.
    """

    times: npt.NDArray[np.uint32]
    first: npt.NDArray[np.int64]


class HashTable:
    """The hashes of held-out lines, looked up in a corpus that goes by; 0 is no line."""

    def __init__(self, hashes: Hashes) -> None:
        self._unique, self._group = np.unique(hashes, return_inverse=True)
        self._times = np.zeros(len(self._unique), np.uint32)
        self._first = np.full(len(self._unique), -1, np.int64)

    def look_up(self, hashes: Hashes, first: int) -> npt.NDArray[np.bool_]:
        """Count the hashes of pairs from number `first` on; tell which are held out."""
        if not len(self._unique):
            return np.zeros(len(hashes), bool)
        slots = np.minimum(np.searchsorted(self._unique, hashes), len(self._unique) - 1)
        is_hit: npt.NDArray[np.bool_] = (self._unique[slots] == hashes) & (hashes != 0)
        places = np.flatnonzero(is_hit)[::-1]  # backwards: the first one is written last
        np.add.at(self._times, slots[places], 1)
        is_new = self._first[slots[places]] < 0
        self._first[slots[places[is_new]]] = places[is_new] + first
        return is_hit

    def hits(self) -> LeakHits:
        """Return what was found, for each held-out line."""
        return LeakHits(self._times[self._group], self._first[self._group])


class Held(NamedTuple):
    """Of pairs: whether a side is held out, and whether both are, as a pair and to the letter."""

    side: npt.NDArray[np.bool_]
    pair: npt.NDArray[np.bool_]


class SideHashes(NamedTuple):
    """Hashes of both sides of pairs: of the text, or of what is left without case and points."""

    src: Hashes
    tgt: Hashes

    def of_pairs(self) -> Hashes:
        """Return one hash for each pair that has two sides."""
        whole = (self.src != 0) & (self.tgt != 0)
        return np.where(whole, mixed(self.src, self.tgt), np.uint64(0))


class HashTables:
    """One table for the sources, one for the targets, one for the pairs of a held-out corpus."""

    def __init__(self, hashes: SideHashes) -> None:
        self.src, self.tgt = HashTable(hashes.src), HashTable(hashes.tgt)
        self.pairs = HashTable(hashes.of_pairs())

    def look_up(self, hashes: SideHashes, first: int) -> Held:
        """Count the pairs from number `first` on; tell which are held out."""
        side = self.src.look_up(hashes.src, first)
        side |= self.tgt.look_up(hashes.tgt, first)
        return Held(side, self.pairs.look_up(hashes.of_pairs(), first))


class Leaks:
    """What of one held-out corpus stands in another, to the letter and by its words."""

    def __init__(self, exact: SideHashes, keys: SideHashes) -> None:
        self.exact, self.by_words = HashTables(exact), HashTables(keys)

    def look_up(self, exact: SideHashes, keys: SideHashes, first: int) -> Held:
        """Look a block of the other corpus up; tell which of its pairs are held out."""
        found, by_words = self.exact.look_up(exact, first), self.by_words.look_up(keys, first)
        return Held(found.side | by_words.side, found.pair)
