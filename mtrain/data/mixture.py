"""Select the pairs of each epoch and window of a mixture; reads no files.

An epoch has as many pairs as all corpora together. Each corpus is an endless sequence of passes,
each in a new random order; an epoch continues where the last one ended, so that all pairs of a
corpus are used equally often, up to one. An epoch is cut into windows with the same mixture, whose
pairs are shuffled together. A pass goes shard by shard, so that a window reads few shards. The
selection depends on (seed, epoch, window) only: resuming needs no replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from mtrain.data.batch import Indices

_ORDER, _ROWS = 1, 2  # random streams: the order of shards, and of rows in a shard


class RowSelection(NamedTuple):
    """Rows of one shard."""

    shard: int
    rows: Indices


class MixtureCorpus(NamedTuple):
    """A corpus of a mixture: the numbers and sizes of its shards, and its weight."""

    shards: Sequence[int]
    sizes: Sequence[int]
    weight: float

    @property
    def num_pairs(self) -> int:
        """Number of pairs in all its shards."""
        return sum(self.sizes)


class Mixture:
    """The epochs of a mixture of corpora.

    Attributes:
        num_pairs: per epoch.
        counts: pairs per epoch of each corpus.
        num_windows: per epoch.
        firsts: number in the epoch of the first pair of each window; last, the number of pairs.
    """

    def __init__(self, corpora: Sequence[MixtureCorpus], seed: int, window_pairs: int) -> None:
        self._corpora, self._seed = corpora, seed
        self.num_pairs = sum(corpus.num_pairs for corpus in corpora)
        self.counts = apportion(self.num_pairs, [corpus.weight for corpus in corpora])
        self.num_windows = -(-self.num_pairs // window_pairs)
        self.firsts = np.array([self._first(window) for window in range(self.num_windows + 1)])

    def _first(self, window: int) -> int:
        return sum(self._until(count, window) for count in self.counts)

    def _until(self, count: int, window: int) -> int:
        """Return how many of a corpus's `count` pairs per epoch are in windows before `window`."""
        return count * window // self.num_windows

    def window_at(self, pair: int) -> int:
        """Return the window of a pair, given the number of the pair in the epoch."""
        return int(np.searchsorted(self.firsts[1:-1], pair, side="right"))

    def select(self, epoch: int, window: int) -> list[RowSelection]:
        """Return the pairs of a window."""
        selections: list[RowSelection] = []
        for corpus, count in zip(self._corpora, self.counts, strict=True):
            first = epoch * count + self._until(count, window)
            last = epoch * count + self._until(count, window + 1)
            selections += self._range(corpus, first, last)
        return sorted(selections, key=lambda selection: selection.shard)

    def _range(self, corpus: MixtureCorpus, first: int, last: int) -> Iterator[RowSelection]:
        """Yield pairs `first` to `last` - 1 of the endless sequence of passes over a corpus."""
        while first < last:
            turn, begin = divmod(first, corpus.num_pairs)
            num_turns = (last - first) // corpus.num_pairs if begin == 0 else 0
            if num_turns:  # whole passes: batches are shuffled anyway
                for shard, size in zip(corpus.shards, corpus.sizes, strict=True):
                    yield RowSelection(shard, np.tile(np.arange(size), num_turns))
                first += num_turns * corpus.num_pairs
            else:
                end = min(corpus.num_pairs, begin + last - first)
                yield from self._part_of_turn(corpus, turn, begin, end)
                first += end - begin

    def _part_of_turn(
        self, corpus: MixtureCorpus, turn: int, begin: int, end: int
    ) -> Iterator[RowSelection]:
        """Yield pairs `begin` to `end` - 1 of pass `turn` over a corpus."""
        order = self._random(turn, _ORDER, corpus.shards[0]).permutation(len(corpus.shards))
        firsts = np.cumsum([0, *(corpus.sizes[index] for index in order)]).tolist()
        for index, first, last in zip(order.tolist(), firsts[:-1], firsts[1:], strict=True):
            low, high = max(begin, first), min(end, last)
            if low < high:
                shard, size = corpus.shards[index], corpus.sizes[index]
                rows = np.arange(size)
                if high - low < size:  # a whole shard: batches are shuffled anyway
                    rows = self._random(turn, _ROWS, shard).permutation(size)
                yield RowSelection(shard, rows[low - first : high - first])

    def _random(self, turn: int, stream: int, shard: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, turn, stream, shard])


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` into integers in proportion to the weights (largest-remainder method)."""
    total_weight = sum(map(Fraction, weights))
    exact = [total * Fraction(weight) / total_weight for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
