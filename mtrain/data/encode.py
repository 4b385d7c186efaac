"""Encode text part by part; after an interruption, only unfinished parts are encoded again.

A part is a range of one corpus. Its table is written first and its statistics last: a part with
statistics is complete. The same text, tokenizer and filter result in the same bytes on any number
of cores.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from mtrain.audit.scan import PairFilter
from mtrain.config.corpora import NamedCorpus, SyntheticCorpus, weight_of
from mtrain.corpus import dropped
from mtrain.corpus.dropped import DroppedPair
from mtrain.corpus.length_stats import CorpusStats
from mtrain.corpus.reader import Pair, read_pairs
from mtrain.data import arrow_shards
from mtrain.data.arrow_shards import CorpusEntry, EncodedBlock, Manifest, Shard
from mtrain.data.batch import Indices, TokenIds
from mtrain.data.mixture import apportion
from mtrain.errors import ConfigError
from mtrain.io.atomic import whole_file
from mtrain.runtime.prefetch import read_ahead
from mtrain.tokenizer.sentencepiece import Tokenizer

_BLOCK_PAIRS = 1 << 14  # encoded in one call
_NUM_AHEAD = 2  # blocks encoded while another is written
_RARE = 0.0005  # fraction of pairs below, and above, the usual range of length ratios
_TABLE, _DROPPED, _STATS = ".arrow", ".jsonl.gz", ".json"  # the files of a part


@dataclass
class PartStats:
    """Statistics of a part of the text."""

    corpus: int  # its number
    num_read: int = 0  # pairs in the text
    num_copied: int = 0  # kept pairs whose target equals the source
    # source length, target length, number of kept pairs with them
    lengths: list[tuple[int, int, int]] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # pairs by reason

    @property
    def num_kept(self) -> int:
        """Number of pairs in the table."""
        return sum(count for _, _, count in self.lengths)


_ADAPTER = TypeAdapter(PartStats)


class EncodeJob(NamedTuple):
    """The inputs and settings of `encode`."""

    corpora: Sequence[NamedCorpus]
    is_mixture: bool  # whether the config names a mixture
    tokenizer: Tokenizer
    pair_filter: PairFilter
    directory: Path  # working folder of the parts
    with_text: bool  # whether the tables also store the text


def _part_path(directory: Path, number: int, suffix: str) -> Path:
    return directory / f"part-{number:05d}{suffix}"


def _read_stats(directory: Path, number: int) -> PartStats | None:
    """Return the statistics of a part; None if it is not complete."""
    try:
        raw = _part_path(directory, number, _STATS).read_bytes()
        return _ADAPTER.validate_json(raw, strict=True)
    except (OSError, ValidationError):
        return None


def num_done(directory: Path) -> int:
    """Return the number of pairs read for the parts before the first incomplete part."""
    total = number = 0
    while stats := _read_stats(directory, number):
        total, number = total + stats.num_read, number + 1
    return total


def encode(job: EncodeJob, part_pairs: int) -> list[PartStats]:
    """Encode the kept pairs of all incomplete parts; return the statistics of all parts.

    Raises:
        DataError: if the text cannot be read.
        WriteError: if a part cannot be written.
    """
    parts: list[PartStats] = []
    first = 0
    for corpus, named in enumerate(job.corpora):
        pairs = read_pairs(named.corpus)
        while head := list(islice(pairs, 1)):
            text = chain(head, islice(pairs, part_pairs - 1))
            stats = _read_stats(job.directory, len(parts))
            if stats is None:
                stats = _encode_part(text, first, len(parts), corpus, job)
            else:
                deque(text, maxlen=0)  # read and discard
            parts.append(stats)
            first += stats.num_read
    return parts


def _encode_part(
    text: Iterator[Pair], first: int, number: int, corpus: int, job: EncodeJob
) -> PartStats:
    """Encode part `number`; its pairs are numbered from `first` on, over all corpora."""
    name = job.corpora[corpus].name if job.is_mixture else None
    stats, lengths = PartStats(corpus), Counter[tuple[int, int]]()
    tag = job.corpora[corpus].corpus.tag
    prefix = [] if tag is None else [job.tokenizer.src.tags[tag]]
    encoded = read_ahead(_encoded(text, job.tokenizer, prefix), _NUM_AHEAD)
    with (
        whole_file(_part_path(job.directory, number, _TABLE)) as table_path,
        whole_file(_part_path(job.directory, number, _DROPPED)) as dropped_path,
        dropped.open_writer(dropped_path) as writer,
        closing(encoded),
    ):

        def blocks() -> Iterator[EncodedBlock]:
            for pairs, src, tgt in encoded:
                reasons = job.pair_filter.reasons_of_encoded(
                    first + stats.num_read, src.lengths, tgt.lengths
                )
                for pair, reason in zip(pairs, reasons, strict=True):
                    if reason is not None:
                        writer.add(DroppedPair(pair.src_file, pair.line, reason, name))
                stats.num_read += len(pairs)
                is_kept = np.array([reason is None for reason in reasons])
                if not is_kept.all():
                    pairs = list(compress(pairs, is_kept))
                    src, tgt = src.only(is_kept), tgt.only(is_kept)
                stats.num_copied += sum(pair.src == pair.tgt for pair in pairs)
                lengths.update(zip(src.lengths.tolist(), tgt.lengths.tolist(), strict=True))
                yield EncodedBlock(
                    np.insert(src.ids, np.cumsum(src.lengths - 1), job.tokenizer.src.eos),
                    tgt.ids,
                    src.lengths,
                    tgt.lengths,
                    [pair.src for pair in pairs] if job.with_text else None,
                    [pair.tgt for pair in pairs] if job.with_text else None,
                )

        arrow_shards.write_blocks(table_path, blocks(), job.with_text)
    stats.dropped = dict(writer.counts)
    stats.lengths = sorted((*sides, count) for sides, count in lengths.items())
    with whole_file(_part_path(job.directory, number, _STATS)) as path:
        path.write_bytes(_ADAPTER.dump_json(stats))
    return stats


class _EncodedSide(NamedTuple):
    """The concatenated ids of many lines, without bos and eos; lengths include eos."""

    ids: TokenIds
    lengths: Indices

    @classmethod
    def of(cls, ids: list[list[int]]) -> _EncodedSide:
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))
        return cls(tokens, lengths + 1)

    def only(self, is_kept: npt.NDArray[np.bool_]) -> _EncodedSide:
        return _EncodedSide(self.ids[np.repeat(is_kept, self.lengths - 1)], self.lengths[is_kept])


def _encoded(
    text: Iterator[Pair], tokenizer: Tokenizer, prefix: list[int]
) -> Iterator[tuple[list[Pair], _EncodedSide, _EncodedSide]]:
    """Yield blocks of pairs with the ids of both sides; the sources begin with `prefix`."""
    while pairs := list(islice(text, _BLOCK_PAIRS)):
        src_ids = tokenizer.src.encode([pair.src for pair in pairs])
        src = _EncodedSide.of([prefix + ids for ids in src_ids] if prefix else src_ids)
        yield pairs, src, _EncodedSide.of(tokenizer.tgt.encode([pair.tgt for pair in pairs]))


def collect(
    parts: Sequence[PartStats], job: EncodeJob, temperature: float | None, directory: Path
) -> None:
    """Link the tables of all parts into a data folder; write its dropped pairs and manifest.

    Raises:
        DataError: if all pairs of a corpus are dropped.
        ConfigError: if a weight is so small that an epoch has no pair of the corpus.
    """
    dropped_paths = [_part_path(job.directory, number, _DROPPED) for number in range(len(parts))]
    dropped.join(dropped_paths, _num_dropped(parts), directory)
    entries = []
    for number, named in enumerate(job.corpora):
        of_corpus = [stats for stats in parts if stats.corpus == number]
        longer: Counter[int] = Counter()
        for stats in of_corpus:
            for src, tgt, count in stats.lengths:
                longer[max(src, tgt)] += count
        if not longer:
            raise dropped.none_left(named.name, _num_dropped(of_corpus))
        weight = weight_of(longer.total(), named.corpus.weight, temperature)
        lengths = [longer[length] for length in range(max(longer) + 1)]
        corpus = named.corpus
        entries.append(CorpusEntry(named.name, weight, lengths, corpus.tag, corpus.until))
    shards: list[Shard] = []
    for number, stats in enumerate(parts):
        if not stats.num_kept:
            continue
        arrow_shards.link(_part_path(job.directory, number, _TABLE), directory, len(shards))
        num_src = sum(src * count for src, _, count in stats.lengths)
        num_tgt = sum(tgt * count for _, tgt, count in stats.lengths)
        shards.append(Shard(stats.corpus, stats.num_kept, num_src, num_tgt))
    arrow_shards.write_manifest(directory, Manifest(entries, shards))
    weights = {entry.name: entry.weight for entry in entries}
    check_shares(weights, sum(shard.num_pairs for shard in shards))


def _num_dropped(parts: Sequence[PartStats]) -> Counter[str]:
    return sum((Counter(stats.dropped) for stats in parts), Counter[str]())


def corpus_stats(parts: Sequence[PartStats], corpora: Sequence[NamedCorpus]) -> CorpusStats:
    """Return the length and copy statistics of the kept pairs.

    Ratios and copies are those of the real corpora, unless all corpora are synthetic; the longest
    source is that of all pairs.
    """
    longest_src = max(src for stats in parts for src, _, _ in stats.lengths)
    is_synthetic = [isinstance(named.corpus, SyntheticCorpus) for named in corpora]
    if not all(is_synthetic):
        parts = [stats for stats in parts if not is_synthetic[stats.corpus]]
    lengths: Counter[tuple[int, int]] = Counter()
    for stats in parts:
        lengths.update({(src, tgt): count for src, tgt, count in stats.lengths})
    num_copied = sum(stats.num_copied for stats in parts)
    ratios = sorted((tgt / src, count) for (src, tgt), count in lengths.items())

    def first_usual(ratios: list[tuple[float, int]]) -> float:
        totals = accumulate(count for _, count in ratios)
        rare = _RARE * lengths.total()
        return next(ratio for (ratio, _), total in zip(ratios, totals, strict=True) if total > rare)

    least, most = first_usual(ratios), first_usual(ratios[::-1])
    return CorpusStats(longest_src, least, most, num_copied / lengths.total())


def check_shares(weights: Mapping[str, float], num_pairs: int) -> None:
    """Check that an epoch has at least one pair of each corpus, given their weights by name.

    Raises:
        ConfigError: if a corpus has none.
    """
    for name, count in zip(weights, apportion(num_pairs, [*weights.values()]), strict=True):
        if count == 0:
            raise ConfigError(
                f"`{name}.weight` must be enough for one of the {num_pairs:,} pairs of an epoch, "
                "but is too small."
            )
