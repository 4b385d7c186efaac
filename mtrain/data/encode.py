"""Encode text part by part; after an interruption, only unfinished parts are encoded again.

A part is a range of one corpus. Its table is written first and its statistics last: a part with
statistics is complete. The same text, tokenizer and filter result in the same bytes on any number
of cores. The caller passes the corpora and the filter of pairs.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from mtrain.config.corpora import NamedCorpus, weight_of
from mtrain.corpus import dropped
from mtrain.corpus.dropped import DroppedPair
from mtrain.corpus.length_stats import CorpusStats
from mtrain.corpus.reader import Pair, read_pairs
from mtrain.data import arrow_shards
from mtrain.data.arrow_shards import CorpusEntry, EncodedBlock, Lengths, Manifest, Shard
from mtrain.data.mixture import apportion
from mtrain.errors import ConfigError
from mtrain.io.atomic import whole_file
from mtrain.tokenizer.sentencepiece import Tokenizer

_BLOCK_PAIRS = 1 << 14  # encoded in one call
_NUM_AHEAD = 2  # blocks encoded while another is written
_RARE = 0.0005  # fraction of pairs below, and above, the usual range of length ratios
Ints = npt.NDArray[np.int64]


class Filter(Protocol):
    """Decides which pairs are dropped, and why."""

    def reasons_of_encoded(
        self, first: int, src_tokens: Ints, tgt_tokens: Ints
    ) -> Sequence[str | None]:
        """Return the reason to drop each pair from number `first` on, None to keep it.

        Lengths are tokens, eos included.
        """


@dataclass
class PartStats:
    """Statistics of a part of the text.

    Attributes:
        corpus: the number of the corpus.
        num_read: number of pairs in the text.
        num_copied: number of kept pairs whose target equals the source.
        lengths: (source length, target length, number of kept pairs with them).
        dropped: number of dropped pairs by reason.
    """

    corpus: int
    num_read: int = 0
    num_copied: int = 0
    lengths: list[tuple[int, int, int]] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        """Number of pairs in the table."""
        return sum(count for _, _, count in self.lengths)


_STATS = TypeAdapter(PartStats)


class PartFiles(NamedTuple):
    """The paths of a part's files in the working folder."""

    table: Path
    dropped: Path
    stats: Path

    @classmethod
    def number(cls, directory: Path, number: int) -> PartFiles:
        """Return the paths of part `number`."""
        stem = directory / f"part-{number:05d}"
        return cls(*(stem.with_suffix(end) for end in (".arrow", ".jsonl.gz", ".json")))

    def read_stats(self) -> PartStats | None:
        """Return the statistics of the part; None if it is not complete."""
        try:
            return _STATS.validate_json(self.stats.read_bytes(), strict=True)
        except (OSError, ValidationError):
            return None


class EncodeJob(NamedTuple):
    """The inputs and settings of `encode`.

    Attributes:
        corpora: all corpora of a mixture, or a single corpus.
        is_mixture: whether the config names a mixture.
        tokenizer: encodes both sides.
        pair_filter: decides which pairs are dropped.
        directory: working folder of the parts.
        with_text: whether the tables also store the text.
    """

    corpora: Sequence[NamedCorpus]
    is_mixture: bool
    tokenizer: Tokenizer
    pair_filter: Filter
    directory: Path
    with_text: bool


class EncodedPart(NamedTuple):
    """A complete part."""

    files: PartFiles
    stats: PartStats


def num_done(directory: Path) -> int:
    """Return the number of pairs read for the parts before the first incomplete part."""
    total = number = 0
    while stats := PartFiles.number(directory, number).read_stats():
        total, number = total + stats.num_read, number + 1
    return total


def encode(job: EncodeJob, part_pairs: int) -> list[EncodedPart]:
    """Encode the kept pairs of all incomplete parts; return all parts.

    Raises:
        DataError: if the text cannot be read.
        WriteError: if a part cannot be written.
    """
    parts: list[EncodedPart] = []
    first = 0
    for number, named in enumerate(job.corpora):
        pairs = read_pairs(named.corpus)
        while head := list(islice(pairs, 1)):
            text = chain(head, islice(pairs, part_pairs - 1))
            files = PartFiles.number(job.directory, len(parts))
            stats = files.read_stats()
            if stats is None:
                stats = _encode_part(text, first, files, job, PartStats(number))
            else:
                deque(text, maxlen=0)  # read and discard
            parts.append(EncodedPart(files, stats))
            first += stats.num_read
    return parts


def _encode_part(
    text: Iterator[Pair], first: int, files: PartFiles, job: EncodeJob, stats: PartStats
) -> PartStats:
    corpus = job.corpora[stats.corpus].name if job.is_mixture else None
    lengths: Counter[tuple[int, int]] = Counter()
    with (
        whole_file(files.table) as table_path,
        whole_file(files.dropped) as dropped_path,
        dropped.open_writer(dropped_path) as writer,
    ):

        def blocks() -> Iterator[EncodedBlock]:
            for block in _encoded(text, job.tokenizer):
                reasons = job.pair_filter.reasons_of_encoded(
                    first + stats.num_read, block.src.lengths, block.tgt.lengths
                )
                for pair, reason in zip(block.pairs, reasons, strict=True):
                    if reason is not None:
                        writer.add(DroppedPair(pair.src_file, pair.line, reason, corpus))
                stats.num_read += len(block.pairs)
                kept = _only(block, np.array([reason is None for reason in reasons]))
                stats.num_copied += sum(pair.src == pair.tgt for pair in kept.pairs)
                lengths.update(
                    zip(kept.src.lengths.tolist(), kept.tgt.lengths.tolist(), strict=True)
                )
                ends = np.cumsum(kept.src.lengths - 1)
                yield EncodedBlock(
                    np.insert(kept.src.ids, ends, job.tokenizer.src.eos),
                    kept.tgt.ids,
                    kept.src.lengths.astype(np.int32),
                    kept.tgt.lengths.astype(np.int32),
                    [pair.src for pair in kept.pairs] if job.with_text else None,
                    [pair.tgt for pair in kept.pairs] if job.with_text else None,
                )

        arrow_shards.write_blocks(table_path, blocks(), job.with_text)
    stats.dropped = dict(writer.counts)
    stats.lengths = sorted((*sides, count) for sides, count in lengths.items())
    with whole_file(files.stats) as path:
        path.write_bytes(_STATS.dump_json(stats))
    return stats


class _EncodedSide(NamedTuple):
    """Concatenated ids of many lines, without bos and eos; lengths include eos."""

    ids: Lengths
    lengths: Ints

    def only(self, is_kept: npt.NDArray[np.bool_]) -> _EncodedSide:
        return _EncodedSide(self.ids[np.repeat(is_kept, self.lengths - 1)], self.lengths[is_kept])


class _EncodedPairs(NamedTuple):
    """Consecutive pairs of the text, and their ids."""

    pairs: list[Pair]
    src: _EncodedSide
    tgt: _EncodedSide


def _encoded(text: Iterator[Pair], tokenizer: Tokenizer) -> Iterator[_EncodedPairs]:
    """Yield encoded blocks of the text; a thread encodes some blocks ahead of the consumer."""
    with ThreadPoolExecutor(1, "encode") as pool:
        ahead: deque[Future[_EncodedPairs]] = deque()
        while pairs := list(islice(text, _BLOCK_PAIRS)):
            ahead.append(pool.submit(_encode_block, pairs, tokenizer))
            if len(ahead) > _NUM_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _encode_block(pairs: list[Pair], tokenizer: Tokenizer) -> _EncodedPairs:
    src = _side(tokenizer.src.encode([pair.src for pair in pairs]))
    tgt = _side(tokenizer.tgt.encode([pair.tgt for pair in pairs]))
    return _EncodedPairs(pairs, src, tgt)


def _side(ids: list[list[int]]) -> _EncodedSide:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    tokens = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))
    return _EncodedSide(tokens, lengths + 1)


def _only(block: _EncodedPairs, kept: npt.NDArray[np.bool_]) -> _EncodedPairs:
    if kept.all():
        return block
    pairs = [block.pairs[index] for index in np.flatnonzero(kept).tolist()]
    return _EncodedPairs(pairs, block.src.only(kept), block.tgt.only(kept))


def collect(
    parts: Sequence[EncodedPart], job: EncodeJob, temperature: float | None, directory: Path
) -> None:
    """Link the tables of all parts into a data folder; write its dropped pairs and manifest.

    Args:
        parts: the result of `encode`.
        job: the argument of `encode`.
        temperature: for corpora without weights.
        directory: the data folder.

    Raises:
        DataError: if all pairs of a corpus are dropped.
        ConfigError: if a weight is so small that an epoch has no pair of the corpus.
    """
    dropped.join([part.files.dropped for part in parts], _num_dropped(parts), directory)
    kept = [part for part in parts if part.stats.num_kept]
    entries = []
    for number, named in enumerate(job.corpora):
        longer: Counter[int] = Counter()
        for part in kept:
            if part.stats.corpus == number:
                for src, tgt, count in part.stats.lengths:
                    longer[max(src, tgt)] += count
        if not longer:
            of_corpus = [part for part in parts if part.stats.corpus == number]
            raise dropped.none_left(named.name, _num_dropped(of_corpus))
        weight = weight_of(longer.total(), named.weight, temperature)
        lengths = [longer[length] for length in range(max(longer) + 1)]
        entries.append(CorpusEntry(named.name, weight, lengths))
    shards = []
    for number, (files, stats) in enumerate(kept):
        path = arrow_shards.shard_path(directory, number)
        try:
            os.link(files.table, path)
        except OSError:  # the file system does not support hard links
            shutil.copyfile(files.table, path)
        num_src = sum(src * count for src, _, count in stats.lengths)
        num_tgt = sum(tgt * count for _, tgt, count in stats.lengths)
        shards.append(Shard(stats.corpus, stats.num_kept, num_src, num_tgt))
    arrow_shards.write_manifest(directory, Manifest(entries, shards))
    check_shares(
        [entry.name for entry in entries],
        [entry.weight for entry in entries],
        sum(shard.num_pairs for shard in shards),
    )


def _num_dropped(parts: Sequence[EncodedPart]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part.stats.dropped)
    return total


def corpus_stats(parts: Sequence[EncodedPart]) -> CorpusStats:
    """Return the length and copy statistics of the kept pairs."""
    lengths: Counter[tuple[int, int]] = Counter()
    for part in parts:
        lengths.update({(src, tgt): count for src, tgt, count in part.stats.lengths})
    num_copied = sum(part.stats.num_copied for part in parts)
    ratios = sorted((tgt / src, count) for (src, tgt), count in lengths.items())

    def first_usual(ratios: list[tuple[float, int]]) -> float:
        totals = accumulate(count for _, count in ratios)
        rare = _RARE * lengths.total()
        return next(ratio for (ratio, _), total in zip(ratios, totals, strict=True) if total > rare)

    longest_src = max(src for src, _ in lengths)
    least, most = first_usual(ratios), first_usual(ratios[::-1])
    return CorpusStats(longest_src, least, most, num_copied / lengths.total())


def check_shares(names: Sequence[str], weights: Sequence[float], num_pairs: int) -> None:
    """Check that an epoch has at least one pair of each corpus of a mixture.

    Raises:
        ConfigError: if a corpus has none.
    """
    for name, count in zip(names, apportion(num_pairs, weights), strict=True):
        if count == 0:
            raise ConfigError(
                f"`{name}.weight` must be enough for one of the {num_pairs:,} pairs of an epoch, "
                "but is too small."
            )
