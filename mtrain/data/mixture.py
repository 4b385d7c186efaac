"""Which pairs an epoch has, and in which order they are looked at: arithmetic, and nothing else.

An epoch has as many pairs as all corpora together. Each corpus gives its share of them: it goes
through its pairs in random order, begins anew when all were given, and goes on in the next epoch
where it stopped, so that no pair is given twice as often as another. An epoch is cut into windows,
each with the same mixture, whose pairs are shuffled together; the tables of a corpus are taken in
random order, whole ones if a window has room, so that a window touches few of them.
All follows from (seed, epoch, window): nothing need be replayed to begin anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_ORDER, _ROWS = 1, 2  # what a random order is of: tables, or pairs of a table


class RowSelection(NamedTuple):
    """Pairs of one table."""

    table: int
    rows: Indices


class MixtureCorpus(NamedTuple):
    """A corpus of a mixture: the numbers and sizes of its tables, and its weight."""

    tables: Sequence[int]
    sizes: Sequence[int]
    weight: float

    @property
    def num_pairs(self) -> int:
        """How many pairs it has."""
        return sum(self.sizes)


class Mixture:
    """The epochs of some corpora.

    Attributes:
        num_pairs: of an epoch.
        counts: of each corpus, how many pairs of an epoch are its own.
        num_windows: of an epoch.
    """

    def __init__(
        self, corpora: Sequence[MixtureCorpus], seed: int, window_pairs: int | None
    ) -> None:
        self._corpora, self._seed = corpora, seed
        self.num_pairs = sum(own.num_pairs for own in corpora)
        self.counts = apportion(self.num_pairs, [own.weight for own in corpora])
        self.num_windows = -(-self.num_pairs // (window_pairs or self.num_pairs))
        self.firsts = np.cumsum([0, *(self._size(number) for number in range(self.num_windows))])

    def _size(self, window: int) -> int:
        return sum(
            self._until(count, window + 1) - self._until(count, window) for count in self.counts
        )

    def _until(self, count: int, window: int) -> int:
        return count * window // self.num_windows

    def window_at(self, place: int) -> int:
        """Return the window that holds a place, counted in pairs from the epoch's first."""
        return int(np.searchsorted(self.firsts[1:-1], place, side="right"))

    def takes(self, epoch: int, window: int) -> list[RowSelection]:
        """Return the pairs of a window."""
        found: list[RowSelection] = []
        for corpus, count in zip(self._corpora, self.counts, strict=True):
            first = epoch * count + self._until(count, window)
            found += self._stretch(corpus, first, epoch * count + self._until(count, window + 1))
        return sorted(found, key=lambda take: take.table)

    def _stretch(self, corpus: MixtureCorpus, first: int, last: int) -> Iterator[RowSelection]:
        """Yield the pairs from number `first` to the one before `last` of a corpus without end."""
        while first < last:
            turn, begin = divmod(first, corpus.num_pairs)
            num_turns = (last - first) // corpus.num_pairs if begin == 0 else 0
            if num_turns:  # whole ones: plans shuffle the pairs of a window anyway
                for table, size in zip(corpus.tables, corpus.sizes, strict=True):
                    yield RowSelection(table, np.tile(np.arange(size), num_turns))
                first += num_turns * corpus.num_pairs
            else:
                end = min(corpus.num_pairs, begin + last - first)
                yield from self._part_of_turn(corpus, turn, begin, end)
                first += end - begin

    def _part_of_turn(
        self, corpus: MixtureCorpus, turn: int, begin: int, end: int
    ) -> Iterator[RowSelection]:
        """Yield the pairs `begin` to `end` of a corpus that is gone through for the time `turn`."""
        order = self._random(turn, _ORDER, corpus.tables[0]).permutation(len(corpus.tables))
        firsts = np.cumsum([0, *(corpus.sizes[place] for place in order)]).tolist()
        for place, first, last in zip(order.tolist(), firsts[:-1], firsts[1:], strict=True):
            low, high = max(begin, first), min(end, last)
            if low < high:
                rows = self._rows(corpus, place, turn, is_whole=high - low == last - first)
                yield RowSelection(corpus.tables[place], rows[low - first : high - first])

    def _rows(self, corpus: MixtureCorpus, place: int, turn: int, is_whole: bool) -> Indices:
        table, size = corpus.tables[place], corpus.sizes[place]
        return np.arange(size) if is_whole else self._random(turn, _ROWS, table).permutation(size)

    def _random(self, turn: int, what: int, table: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, turn, what, table])


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Cut a number into whole parts that are as the weights; what is left goes to the nearest."""
    whole = sum(map(Fraction, weights))
    exact = [total * Fraction(weight) / whole for weight in weights]
    parts = [int(own) for own in exact]
    by_rest = sorted(range(len(parts)), key=lambda place: parts[place] - exact[place])
    for place in by_rest[: total - sum(parts)]:
        parts[place] += 1
    return parts
