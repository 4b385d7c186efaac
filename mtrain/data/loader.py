"""Encoded pairs dealt out in batches.

Batches hold pairs of like length under a budget that counts padding. A large corpus is dealt out
window by window; the pairs of a window are planned together, and no more of them are in memory.
All follows from (seed, epoch, window), so that a position is two numbers and seeking to it reads
nothing that comes before.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.data.arrow_shards import Lengths, ShardSet, ShardTable
from mtrain.data.batch import Batch, collate
from mtrain.data.mixture import Mixture, MixtureCorpus, RowSelection
from mtrain.data.sampler import (
    BatchPart,
    EpochPlan,
    Indices,
    MicroBatch,
    MicroBatchSplit,
    Position,
    UpdateBatches,
    batch_cuts,
    plan_batches,
)
from mtrain.tokenizer.sentencepiece import Tokenizer

WINDOW_PAIRS = 1 << 19  # that are shuffled together
SAMPLED_WINDOW_PAIRS = 1 << 18  # sampled ids are in memory, others stay on disk
_PAIRS_READ = 1024


def check_pairs(directory: Path, tokenizer: Tokenizer) -> int:
    """Check that every encoded pair fits the vocabularies; return their number.

    Raises:
        RunError: if a file is missing or damaged, or a pair does not fit.
    """
    tables = ShardSet(directory, len(tokenizer.src), len(tokenizer.tgt), with_text=False)
    return sum(len(table) for table in tables.all())


def read_src(directory: Path, tokenizer: Tokenizer) -> Iterator[list[list[int]]]:
    """Yield the source pieces of all pairs, without eos, some pairs at a time.

    Raises:
        RunError: if a file is missing or damaged, or a pair does not fit.
    """
    tables = ShardSet(directory, len(tokenizer.src), len(tokenizer.tgt), with_text=False)
    for table in tables.all():
        for first in range(0, len(table), _PAIRS_READ):
            src, _ = table.take(np.arange(first, min(first + _PAIRS_READ, len(table))))
            yield [ids[:-1].tolist() for ids in src]


class CorpusShare(NamedTuple):
    """A corpus of a mixture: its name, its pairs, and how many pairs of an epoch are its own."""

    name: str
    num_pairs: int
    num_in_epoch: int


class _Shapes(NamedTuple):
    """How many rows batches have, and places on either side, padding included."""

    num_rows: Indices
    num_src: Indices
    num_tgt: Indices

    @property
    def num_places(self) -> Indices:
        return self.num_rows * (self.num_src + self.num_tgt)

    @property
    def num_pairs_of_places(self) -> Indices:
        return self.num_rows * (self.num_src**2 + self.num_tgt**2 + self.num_src * self.num_tgt)


class TrainingData:
    """The encoded training pairs, dealt out in batches."""

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, seed: int, sampling_alpha: float = 0.0
    ) -> None:
        self._tokenizer, self._seed, self._alpha = tokenizer, seed, sampling_alpha
        sizes = len(tokenizer.src), len(tokenizer.tgt)
        self._tables = ShardSet(directory, *sizes, with_text=sampling_alpha > 0)
        self._contents = self._tables.contents
        shards = self._contents.shards
        corpora = [
            MixtureCorpus(own, [shards[table].num_pairs for table in own], mixed.weight)
            for number, mixed in enumerate(self._contents.corpora)
            for own in [self._contents.of_corpus(number)]
        ]
        window_pairs = SAMPLED_WINDOW_PAIRS if sampling_alpha else WINDOW_PAIRS
        one_window = self._tables.is_one  # as it was before there could be more
        self._mixture = Mixture(corpora, seed, None if one_window else window_pairs)
        self._window: _ShuffleWindow | None = None

    def __len__(self) -> int:
        return self._mixture.num_pairs

    @property
    def num_src_tokens(self) -> int:
        """Source tokens of an epoch, eos included; of a mixture, about so many."""
        return self._num_tokens([own.num_src_tokens for own in self._contents.shards])

    @property
    def num_tgt_tokens(self) -> int:
        """Target tokens of an epoch, eos included; of a mixture, about so many."""
        return self._num_tokens([own.num_tgt_tokens for own in self._contents.shards])

    def _num_tokens(self, of_shards: list[int]) -> int:
        total = 0
        for number, own in enumerate(self.shares):
            tokens = sum(of_shards[table] for table in self._contents.of_corpus(number))
            total += tokens * own.num_in_epoch // own.num_pairs
        return total

    @property
    def shares(self) -> list[CorpusShare]:
        """What each corpus gives to an epoch."""
        corpora = self._contents.corpora
        return [
            CorpusShare(own.name, self._contents.num_pairs(number), count)
            for number, (own, count) in enumerate(zip(corpora, self._mixture.counts, strict=True))
        ]

    def say_shares(self) -> list[str]:
        """Say what each corpus of a mixture gives to an epoch; nothing of one corpus."""
        if len(self.shares) == 1:
            return []
        return [
            f"{own.name}: {own.num_in_epoch / len(self):.1%} of an epoch, each of its "
            f"{own.num_pairs:,} pairs {own.num_in_epoch / own.num_pairs:.3g} times"
            for own in self.shares
        ]

    def batches(self, batch_tokens: int, start: Position) -> Iterator[tuple[Batch, Position]]:
        """Yield batches for ever from `start` on, each with the position that follows it."""
        for dealt in self.updates(batch_tokens, start, MicroBatchSplit(1)):
            yield dealt.shares[0].batch, dealt.after

    def updates(
        self, batch_tokens: int, start: Position, deal: MicroBatchSplit
    ) -> Generator[UpdateBatches]:
        """Yield one rank's shares of updates for ever from `start` on; it reads no others."""
        planned = self._planned(batch_tokens, start)
        while True:
            batches = list(islice(planned, deal.num_batches))
            num_tokens = sum(own.window.num_tgt_tokens(own.rows) for own in batches)
            shares = [self._share(batches[cut.batch], cut, deal) for cut in deal.of_rank()]
            after = batches[-1].after
            del batches  # they hold on to their windows
            yield UpdateBatches(shares, num_tokens, after, deal)

    def _share(self, planned: _PlannedBatch, cut: BatchPart, deal: MicroBatchSplit) -> MicroBatch:
        """Read a part of a batch; of a batch with too few rows, one that does not count."""
        rows = np.array_split(planned.rows, deal.num_parts)[cut.part]
        own = rows if len(rows) else planned.rows[:1]
        return MicroBatch(self._collate(planned.window, own), bool(len(rows)))

    def _planned(self, batch_tokens: int, start: Position) -> Iterator[_PlannedBatch]:
        """Yield what is in each batch, unread."""
        epoch, place = start.epoch, start.batch
        while True:
            number = self._mixture.window_at(place)
            window = self._open(epoch, number)
            plan, first = window.plan(batch_tokens), int(self._mixture.firsts[number])
            following = Position(epoch, int(self._mixture.firsts[number + 1]))
            if number + 1 == self._mixture.num_windows:
                following = Position(epoch + 1, 0)
            for index in range(place - first, len(plan)):
                is_end = index + 1 == len(plan)
                after = following if is_end else Position(epoch, first + index + 1)
                yield _PlannedBatch(window, plan[index], after)
            del window  # the next one takes its memory
            epoch, place = following.epoch, following.batch

    def plan(self, batch_tokens: int) -> EpochPlan:
        """Say what an epoch looks like, before any is read; sampled ones differ a little.

        Of more than one window, the padding is that of the first, and the number of batches
        supposes that all have pairs of the same lengths.
        """
        window = self._open(0, 0)
        batches, shapes = window.plan(batch_tokens), window.shapes(batch_tokens)
        padding = 1 - window.num_tokens / int(shapes.num_places.sum())
        if self._mixture.num_windows == 1:
            return EpochPlan(len(batches), padding)
        return EpochPlan(self._count_batches(batch_tokens), padding)

    def _count_batches(self, batch_tokens: int) -> int:
        counts = [np.array(own.lengths) for own in self._contents.corpora]
        longest = max(map(len, counts))
        shares = [own.num_in_epoch / own.num_pairs for own in self.shares]
        total = sum(
            np.pad(own, (0, longest - len(own))) * share
            for own, share in zip(counts, shares, strict=True)
        )
        windows = self._mixture.num_windows
        ends = np.cumsum(total / windows).round().astype(np.int64)
        return windows * (len(batch_cuts(np.arange(longest), ends, batch_tokens)) + 1)

    def largest(self, batch_tokens: int) -> list[Batch]:
        """Return the batches of an epoch, or of its first window, that take the most memory.

        One has the most places, the other the most pairs of places, which attention looks at.
        """
        window = self._open(0, 0)
        batches, shapes = window.plan(batch_tokens), window.shapes(batch_tokens)
        most = [int(own.argmax()) for own in (shapes.num_places, shapes.num_pairs_of_places)]
        return [self._collate(window, batches[index]) for index in most]

    def lengths(self) -> tuple[Lengths, Lengths]:
        """Return the lengths of the pairs of an epoch, or of its first window, with eos."""
        return self._open(0, 0).lengths

    def _collate(self, window: _ShuffleWindow, rows: Indices) -> Batch:
        tgt = self._tokenizer.tgt
        src_ids, tgt_ids = window.take(rows)
        return collate(src_ids, tgt_ids, tgt.pad, tgt.bos, tgt.eos)

    def _open(self, epoch: int, number: int) -> _ShuffleWindow:
        """Return a window; the one before it is let go first."""
        seed = [self._seed, epoch, number] if number else [self._seed, epoch]
        if self._window is None or self._window.seed != seed:
            self._window = None
            pairs = _StoredPairs(self._tables, self._mixture.takes(epoch, number))
            sampled = (
                _SampledPairs(pairs, self._tokenizer, self._alpha, seed) if self._alpha else pairs
            )
            self._window = _ShuffleWindow(sampled, seed)
        return self._window


class _StoredPairs:
    """Pairs as they lie in the tables."""

    def __init__(self, tables: ShardSet, takes: list[RowSelection]) -> None:
        opened: dict[int, ShardTable] = {}
        for take in takes:
            if take.table not in opened:
                opened[take.table] = tables.open(take.table)
        self._tables = [opened[take.table] for take in takes]
        self._rows = np.concatenate([take.rows for take in takes])
        self._firsts = np.cumsum([0, *(len(take.rows) for take in takes)])
        parts = list(zip(self._tables, (take.rows for take in takes), strict=True))
        self.src_lengths: Lengths = np.concatenate([own.src_lengths[rows] for own, rows in parts])
        self.tgt_lengths: Lengths = np.concatenate([own.tgt_lengths[rows] for own, rows in parts])

    def take(self, rows: Indices) -> tuple[list[Lengths], list[Lengths]]:
        """Return the ids of some pairs: sources with eos, targets without."""
        numbers = np.searchsorted(self._firsts, rows, side="right") - 1
        src: list[Lengths] = [np.empty(0, np.int32)] * len(rows)
        tgt = src.copy()
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            found = self._tables[number].take(self._rows[rows[places]])
            for place, src_ids, tgt_ids in zip(places.tolist(), *found, strict=True):
                src[place], tgt[place] = src_ids, tgt_ids
        return src, tgt

    def texts(self) -> tuple[list[str], list[str]]:
        """Return the text of all pairs."""
        src: list[str] = []
        tgt: list[str] = []
        ends = zip(self._tables, self._firsts[:-1], self._firsts[1:], strict=True)
        for table, first, last in ends:
            src_texts, tgt_texts = table.texts(self._rows[first:last])
            src += src_texts
            tgt += tgt_texts
        return src, tgt


class _SampledPairs:
    """Pairs segmented anew from their text."""

    def __init__(
        self, pairs: _StoredPairs, tokenizer: Tokenizer, alpha: float, seed: list[int]
    ) -> None:
        eos = tokenizer.src.eos
        src_seed, tgt_seed = (int(x) for x in np.random.SeedSequence(seed).generate_state(2))
        src_text, tgt_text = pairs.texts()
        src_ids = tokenizer.src.sample(src_text, alpha, src_seed)
        tgt_ids = tokenizer.tgt.sample(tgt_text, alpha, tgt_seed)
        self._src = [np.array([*ids, eos], dtype=np.int32) for ids in src_ids]
        self._tgt = [np.array(ids, dtype=np.int32) for ids in tgt_ids]
        self.src_lengths: Lengths = np.array([len(ids) for ids in self._src], dtype=np.int32)
        self.tgt_lengths: Lengths = np.array([len(ids) + 1 for ids in self._tgt], dtype=np.int32)

    def take(self, rows: Indices) -> tuple[list[Lengths], list[Lengths]]:
        return [self._src[row] for row in rows], [self._tgt[row] for row in rows]


class _ShuffleWindow:
    """The pairs that are shuffled together, and the order that their batches have."""

    def __init__(self, pairs: _StoredPairs | _SampledPairs, seed: list[int]) -> None:
        self.seed = seed
        self.take = pairs.take
        self._src_lengths, self._tgt_lengths = pairs.src_lengths, pairs.tgt_lengths
        self._planned: tuple[int, list[Indices]] = (0, [])

    @property
    def lengths(self) -> tuple[Lengths, Lengths]:
        """The lengths of both sides of all pairs, eos included."""
        return self._src_lengths, self._tgt_lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides, eos included."""
        src, tgt = self._src_lengths, self._tgt_lengths
        return int(src.sum(dtype=np.int64) + tgt.sum(dtype=np.int64))

    def num_tgt_tokens(self, rows: Indices) -> int:
        """Target tokens of some pairs, eos included."""
        return int(self._tgt_lengths[rows].sum(dtype=np.int64))

    def plan(self, batch_tokens: int) -> list[Indices]:
        """Return the batches, in order."""
        if self._planned[0] != batch_tokens:
            rng = np.random.default_rng(self.seed)
            plan = plan_batches(self._src_lengths, self._tgt_lengths, batch_tokens, rng)
            self._planned = (batch_tokens, plan)
        return self._planned[1]

    def shapes(self, batch_tokens: int) -> _Shapes:
        """Return the shapes of the batches."""
        plan = self.plan(batch_tokens)
        num_rows = np.array([len(rows) for rows in plan], np.int64)
        firsts, rows = np.cumsum(num_rows) - num_rows, np.concatenate(plan)
        src, tgt = (
            np.maximum.reduceat(own[rows], firsts).astype(np.int64)
            for own in (self._src_lengths, self._tgt_lengths)
        )
        return _Shapes(num_rows, src, tgt)


class _PlannedBatch(NamedTuple):
    """A batch that is not read yet, and the position that follows it."""

    window: _ShuffleWindow
    rows: Indices
    after: Position


def in_batches(
    src: Sequence[list[int]], tgt: Sequence[list[int]], tokenizer: Tokenizer, batch_tokens: int
) -> list[Batch]:
    """Return encoded pairs in batches of like length, the same each time.

    Args:
        src: sources with eos.
        tgt: targets without.
        tokenizer: that encoded them.
        batch_tokens: the budget of `plan_batches`.
    """
    src_lengths = np.array([len(ids) for ids in src], dtype=np.int32)
    tgt_lengths = np.array([len(ids) + 1 for ids in tgt], dtype=np.int32)
    plan = plan_batches(src_lengths, tgt_lengths, batch_tokens, np.random.default_rng(0))
    special = tokenizer.tgt
    return [
        collate(
            [src[row] for row in rows],
            [tgt[row] for row in rows],
            special.pad,
            special.bos,
            special.eos,
        )
        for rows in plan
    ]
