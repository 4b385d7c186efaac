"""Batches of the encoded pairs, in an order that can be resumed at any batch.

A batch holds pairs of similar length under a budget that counts padding. A large corpus is shuffled
window by window, with one window in memory. The order depends on (seed, epoch, window) only: a
position is two numbers, and seeking to it does not read the batches before it.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.data import replay
from mtrain.data.arrow_shards import ShardSet, ShardTable
from mtrain.data.batch import (
    Batch,
    EpochPlan,
    Indices,
    Lengths,
    MicroBatch,
    MicroBatchSplit,
    Position,
    TokenIds,
    UpdateBatches,
    batch_cuts,
    collate,
    plan_batches,
)
from mtrain.data.mixture import Mixture, MixtureCorpus, RowSelection
from mtrain.tokenizer.sentencepiece import Tokenizer

WINDOW_PAIRS = 1 << 19  # shuffled together
SAMPLED_WINDOW_PAIRS = 1 << 18  # fewer: sampled ids are in memory, stored ids on disk
_PAIRS_READ = 1024


def read_ids(
    directory: Path, tokenizer: Tokenizer
) -> Iterator[tuple[list[TokenIds], list[TokenIds]]]:
    """Yield the ids of all pairs, some pairs at a time: sources with eos, targets without.

    Raises:
        RunError: if a file is missing or damaged, or an id is not in the vocabulary.
    """
    for table in ShardSet(directory, tokenizer).all():
        for first in range(0, len(table), _PAIRS_READ):
            yield table.take(np.arange(first, min(first + _PAIRS_READ, len(table))))


class CorpusShare(NamedTuple):
    """A corpus, the number of its pairs, and the number of pairs sampled from it per epoch."""

    name: str
    num_pairs: int
    num_in_epoch: int


class TrainingData:
    """The encoded training pairs, in batches."""

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, seed: int, sampling_alpha: float = 0.0
    ) -> None:
        self._tokenizer, self._seed, self._alpha = tokenizer, seed, sampling_alpha
        self._shards = ShardSet(directory, tokenizer, with_text=sampling_alpha > 0)
        self._manifest = self._shards.manifest
        self.ends = sorted({entry.until for entry in self._manifest.corpora if entry.until})
        self.enter(0)

    def enter(self, phase: int) -> None:
        """Use the corpora of a phase of the training: those whose `until` is not yet reached.

        Phase n ends when the share `ends[n]` of the budget is spent; the last one has no end.
        Replayed corpora keep their share of an epoch.
        """
        entries = self._manifest.corpora
        self._used = []
        for corpus, entry in enumerate(entries):
            if entry.until is None or entry.until in self.ends[phase:]:
                self._used.append(corpus)
        is_replayed = [entry.name.startswith(replay.PREFIX) for entry in entries]
        total, remaining = (
            math.fsum(entries[corpus].weight for corpus in used if not is_replayed[corpus])
            for used in (range(len(entries)), self._used)
        )
        corpora = []
        for corpus in self._used:
            numbers = self._manifest.of_corpus(corpus)
            num_pairs = [self._manifest.shards[number].num_pairs for number in numbers]
            weight = entries[corpus].weight * (remaining / total if is_replayed[corpus] else 1.0)
            corpora.append(MixtureCorpus(numbers, num_pairs, weight))
        window_pairs = SAMPLED_WINDOW_PAIRS if self._alpha else WINDOW_PAIRS
        self._mixture = Mixture(corpora, self._seed, window_pairs)
        self._window: _ShuffleWindow | None = None

    def __len__(self) -> int:
        return self._mixture.num_pairs

    @property
    def num_src_tokens(self) -> int:
        """Number of source tokens per epoch, eos included; an estimate for a mixture."""
        return self._num_tokens([shard.num_src_tokens for shard in self._manifest.shards])

    @property
    def num_tgt_tokens(self) -> int:
        """Number of target tokens per epoch, eos included; an estimate for a mixture."""
        return self._num_tokens([shard.num_tgt_tokens for shard in self._manifest.shards])

    def _num_tokens(self, of_shards: list[int]) -> int:
        total = 0
        for corpus, share in zip(self._used, self.shares, strict=True):
            tokens = sum(of_shards[number] for number in self._manifest.of_corpus(corpus))
            total += tokens * share.num_in_epoch // share.num_pairs
        return total

    @property
    def shares(self) -> list[CorpusShare]:
        """The share of each corpus in an epoch."""
        entries = [self._manifest.corpora[corpus] for corpus in self._used]
        return [
            CorpusShare(entry.name, sum(entry.lengths), count)
            for entry, count in zip(entries, self._mixture.counts, strict=True)
        ]

    def format_shares(self) -> list[str]:
        """Return a line on the share of each corpus of a mixture; nothing for a single corpus."""
        if len(self.shares) == 1:
            return []
        lines = []
        for share in self.shares:
            reads = f"{share.num_in_epoch / share.num_pairs:.3g}"
            lines.append(
                f"{share.name}: {share.num_in_epoch / len(self):.1%} of an epoch, each of its "
                f"{share.num_pairs:,} pairs {'once' if reads == '1' else f'{reads} times'}"
            )
        return lines

    def batches(self, batch_tokens: int, start: Position) -> Iterator[tuple[Batch, Position]]:
        """Yield batches endlessly from `start` on, each with the position after it."""
        for update in self.updates(batch_tokens, start, MicroBatchSplit(1)):
            yield update.micro_batches[0].batch, update.after

    def updates(
        self, batch_tokens: int, start: Position, split: MicroBatchSplit
    ) -> Generator[UpdateBatches]:
        """Yield updates endlessly from `start` on; read only this rank's micro-batches."""
        planned = self._planned(batch_tokens, start)
        while True:
            batches = list(islice(planned, split.num_batches))
            num_tokens = sum(window.num_tgt_tokens(rows) for window, rows, _ in batches)
            micro_batches = []
            for number, part in split.of_rank():
                window, rows, _ = batches[number]
                part_rows = np.array_split(rows, split.num_parts)[part]
                is_dummy = len(part_rows) == 0
                batch = self._collate(window, rows[:1] if is_dummy else part_rows)
                micro_batches.append(MicroBatch(batch, is_dummy))
            after = batches[-1][2]
            del batches, window  # so that the next window can be loaded in their memory
            yield UpdateBatches(micro_batches, num_tokens, after, split)

    def _planned(
        self, batch_tokens: int, start: Position
    ) -> Iterator[tuple[_ShuffleWindow, Indices, Position]]:
        """Yield the window and rows of each batch, and the position after it; read no ids."""
        epoch, first_batch = start.epoch, start.batch
        while True:
            number = self._mixture.window_at(first_batch)
            window = self._open(epoch, number)
            plan, first = window.plan(batch_tokens), int(self._mixture.firsts[number])
            following = Position(epoch, int(self._mixture.firsts[number + 1]))
            if number + 1 == self._mixture.num_windows:
                following = Position(epoch + 1, 0)
            for index in range(first_batch - first, len(plan)):
                is_end = index + 1 == len(plan)
                after = following if is_end else Position(epoch, first + index + 1)
                yield window, plan[index], after
            del window  # frees its memory before the next window is loaded
            epoch, first_batch = following.epoch, following.batch

    def plan(self, batch_tokens: int) -> EpochPlan:
        """Estimate the number of batches and the padding of an epoch; exact for a single window.

        With several windows, the padding is measured on the first, and the number of batches
        assumes the same distribution of lengths in all. Sampled segmentations differ slightly.
        """
        window = self._open(0, 0)
        num_tokens = sum(int(side.sum(dtype=np.int64)) for side in window.lengths)
        num_positions, _ = window.batch_sizes(batch_tokens)
        padding = 1 - num_tokens / int(num_positions.sum())
        if self._mixture.num_windows == 1:
            return EpochPlan(len(num_positions), padding)
        return EpochPlan(self._count_batches(batch_tokens), padding)

    def _count_batches(self, batch_tokens: int) -> int:
        counts = [np.array(self._manifest.corpora[corpus].lengths) for corpus in self._used]
        longest = max(map(len, counts))
        total = sum(
            np.pad(count, (0, longest - len(count))) * (share.num_in_epoch / share.num_pairs)
            for count, share in zip(counts, self.shares, strict=True)
        )
        windows = self._mixture.num_windows
        ends = np.cumsum(total / windows).round().astype(np.int64)
        return windows * (len(batch_cuts(np.arange(longest), ends, batch_tokens)) + 1)

    def largest(self, batch_tokens: int) -> list[Batch]:
        """Return the two batches that need the most memory.

        The first has the most positions, the second the most attention scores. If an epoch has
        several windows, only the first is read: the batches are then made of its pairs, repeated to
        the largest number of rows and the greatest length that any window can have.
        """
        window = self._open(0, 0)
        largest = [int(sizes.argmax()) for sizes in window.batch_sizes(batch_tokens)]
        batches = [window.plan(batch_tokens)[index] for index in largest]
        if self._mixture.num_windows == 1:
            return [self._collate(window, rows) for rows in batches]
        used = [np.flatnonzero(self._manifest.corpora[corpus].lengths) for corpus in self._used]
        lengths = np.unique(np.concatenate([*used, np.maximum(*window.lengths)]))
        num_rows, tgt = np.maximum(batch_tokens // lengths, 1), self._tokenizer.tgt
        results = []
        for rows, sizes in zip(batches, (num_rows * lengths, num_rows * lengths**2), strict=True):
            ids, count = window.take(rows[:1]), int(num_rows[sizes.argmax()])
            width = int(lengths[sizes.argmax()])  # eos included
            src, out = (np.resize(side[0], width) for side in ids)
            results.append(collate([src] * count, [out[1:]] * count, tgt.pad, tgt.bos, tgt.eos))
        return results

    def lengths(self) -> tuple[Lengths, Lengths]:
        """Return the source and target lengths of the first window's pairs, eos included."""
        return self._open(0, 0).lengths

    def _collate(self, window: _ShuffleWindow, rows: Indices) -> Batch:
        tgt = self._tokenizer.tgt
        src_ids, tgt_ids = window.take(rows)
        return collate(src_ids, tgt_ids, tgt.pad, tgt.bos, tgt.eos)

    def _open(self, epoch: int, number: int) -> _ShuffleWindow:
        """Load a window; the previous window is freed first."""
        seed = [self._seed, epoch, number] if number else [self._seed, epoch]
        if self._window is None or self._window.seed != seed:
            self._window = None
            pairs = _StoredPairs(self._shards, self._mixture.select(epoch, number))
            sampled = (
                _SampledPairs(pairs, self._tokenizer, self._alpha, seed) if self._alpha else pairs
            )
            self._window = _ShuffleWindow(sampled, seed)
        return self._window


class _StoredPairs:
    """Selected rows of the shards, read on demand."""

    def __init__(self, shards: ShardSet, selections: list[RowSelection]) -> None:
        numbers = dict.fromkeys(number for number, _ in selections)
        opened = {number: shards.open(number) for number in numbers}
        parts = [(opened[number], rows) for number, rows in selections]
        self._tables: list[ShardTable] = [table for table, _ in parts]
        self._rows = np.concatenate([rows for _, rows in parts])
        self._firsts = np.cumsum([0, *(len(rows) for _, rows in parts)])
        self.src_lengths = np.concatenate([table.src_lengths[rows] for table, rows in parts])
        self.tgt_lengths = np.concatenate([table.tgt_lengths[rows] for table, rows in parts])

    def take(self, rows: Indices) -> tuple[list[TokenIds], list[TokenIds]]:
        """Return the ids of the given rows: sources with eos, targets without."""
        numbers = np.searchsorted(self._firsts, rows, side="right") - 1
        src: list[TokenIds] = [np.empty(0, np.int32)] * len(rows)
        tgt = src.copy()
        for number in np.unique(numbers).tolist():
            indices = np.flatnonzero(numbers == number)
            ids = self._tables[number].take(self._rows[rows[indices]])
            for index, src_ids, tgt_ids in zip(indices.tolist(), *ids, strict=True):
                src[index], tgt[index] = src_ids, tgt_ids
        return src, tgt

    def texts(self) -> tuple[list[str], list[str]]:
        """Return the text of all pairs."""
        rows = (self._rows[first:last] for first, last in pairwise(self._firsts))
        texts = [table.texts(part) for table, part in zip(self._tables, rows, strict=True)]
        src, tgt = (list(chain.from_iterable(side)) for side in zip(*texts, strict=True))
        return src, tgt


class _SampledPairs:
    """Pairs with segmentations sampled from their text, in memory."""

    def __init__(
        self, pairs: _StoredPairs, tokenizer: Tokenizer, alpha: float, seed: list[int]
    ) -> None:
        eos, tags = tokenizer.src.eos, set(tokenizer.src.tags.values())
        src_seed, tgt_seed = (int(x) for x in np.random.SeedSequence(seed).generate_state(2))
        src_text, tgt_text = pairs.texts()
        src_ids = tokenizer.src.sample(src_text, alpha, src_seed)
        tgt_ids = tokenizer.tgt.sample(tgt_text, alpha, tgt_seed)
        stored, _ = pairs.take(np.arange(len(src_ids))) if tags else ([], [])
        prefixes = [ids[:1].tolist() if ids[0] in tags else [] for ids in stored]
        prefixes = prefixes or [[]] * len(src_ids)
        self._src = [
            np.array([*prefix, *ids, eos], dtype=np.int32)
            for prefix, ids in zip(prefixes, src_ids, strict=True)
        ]
        self._tgt = [np.array(ids, dtype=np.int32) for ids in tgt_ids]
        self.src_lengths: Lengths = np.array([len(ids) for ids in self._src], dtype=np.int32)
        self.tgt_lengths: Lengths = np.array([len(ids) + 1 for ids in self._tgt], dtype=np.int32)

    def take(self, rows: Indices) -> tuple[list[TokenIds], list[TokenIds]]:
        return [self._src[row] for row in rows], [self._tgt[row] for row in rows]


class _ShuffleWindow:
    """Pairs that are shuffled together, and the order of their batches."""

    def __init__(self, pairs: _StoredPairs | _SampledPairs, seed: list[int]) -> None:
        self.seed = seed
        self.take = pairs.take
        self.lengths = pairs.src_lengths, pairs.tgt_lengths  # eos included
        self._planned: tuple[int, list[Indices]] = (0, [])

    def num_tgt_tokens(self, rows: Indices) -> int:
        """Return the number of target tokens of the given rows, eos included."""
        return int(self.lengths[1][rows].sum(dtype=np.int64))

    def plan(self, batch_tokens: int) -> list[Indices]:
        """Return the rows of each batch, in order; cached."""
        if self._planned[0] != batch_tokens:
            rng = np.random.default_rng(self.seed)
            self._planned = batch_tokens, plan_batches(*self.lengths, batch_tokens, rng)
        return self._planned[1]

    def batch_sizes(self, batch_tokens: int) -> tuple[Indices, Indices]:
        """Return the number of positions and of attention scores of each batch, with padding."""
        plan = self.plan(batch_tokens)
        num_rows = np.array([len(rows) for rows in plan], np.int64)
        firsts, rows = np.cumsum(num_rows) - num_rows, np.concatenate(plan)
        src, tgt = (
            np.maximum.reduceat(lengths[rows], firsts).astype(np.int64) for lengths in self.lengths
        )
        return num_rows * (src + tgt), num_rows * (src**2 + tgt**2 + src * tgt)


def in_batches(
    src: Sequence[list[int]], tgt: Sequence[list[int]], tokenizer: Tokenizer, batch_tokens: int
) -> list[Batch]:
    """Return pairs in batches, as `plan_batches` does; `src` ids with eos, `tgt` ids without."""
    src_lengths = np.array([len(ids) for ids in src], dtype=np.int32)
    tgt_lengths = np.array([len(ids) + 1 for ids in tgt], dtype=np.int32)
    plan = plan_batches(src_lengths, tgt_lengths, batch_tokens, np.random.default_rng(0))
    special_ids = tokenizer.tgt.pad, tokenizer.tgt.bos, tokenizer.tgt.eos
    return [
        collate([src[row] for row in rows], [tgt[row] for row in rows], *special_ids)
        for rows in plan
    ]
