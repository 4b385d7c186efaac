"""From text to encoded pairs, part by part: what is done stays done, whatever ends the process.

A part is a stretch of one corpus. Its table appears first and its facts last; one that has facts is
not made again. The same text, tokenizer and judgements give the same bytes, on any number of
cores. Knows no config: who calls says which corpora there are, and which pairs stay.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from mtrain.config.corpora import NamedCorpus, weight_of
from mtrain.corpus import dropped
from mtrain.corpus.dropped import DroppedPair, DroppedWriter
from mtrain.corpus.reader import Pair, read_pairs
from mtrain.data import arrow_shards
from mtrain.data.arrow_shards import CorpusEntry, EncodedBlock, Lengths, Manifest, Shard
from mtrain.data.mixture import apportion
from mtrain.errors import ConfigError
from mtrain.io.atomic import whole_file
from mtrain.tokenizer.sentencepiece import Tokenizer

_BLOCK_PAIRS = 1 << 14  # that are encoded together
_NUM_AHEAD = 2  # blocks that are encoded while one is written
Ints = npt.NDArray[np.int64]
LengthCounts = list[tuple[int, int, int]]  # source and target length, and how many pairs have them


class Filter(Protocol):
    """Says why pairs are left out."""

    def reasons_of_encoded(
        self, first: int, src_tokens: Ints, tgt_tokens: Ints
    ) -> Sequence[str | None]:
        """Judge pairs from number `first` on, given how many tokens, eos included, they have."""


@dataclass
class PartStats:
    """What became of a part of the text.

    Attributes:
        corpus: the number of the corpus.
        num_read: how many pairs the text has.
        num_copied: of those kept, how many have a target that is the source.
        lengths: of those kept.
        left_out: how many are not kept, by reason.
    """

    corpus: int
    num_read: int = 0
    num_copied: int = 0
    lengths: LengthCounts = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        """How many pairs its table has."""
        return sum(count for _, _, count in self.lengths)


_FACTS = TypeAdapter(PartStats)


class PartFiles(NamedTuple):
    """The files of a part in the folder of those that are done."""

    table: Path
    left_out: Path
    facts: Path

    @classmethod
    def number(cls, directory: Path, number: int) -> PartFiles:
        """Name the files of a part."""
        stem = directory / f"part-{number:05d}"
        return cls(*(stem.with_suffix(end) for end in (".arrow", ".jsonl.gz", ".json")))

    def read_facts(self) -> PartStats | None:
        """Return what became of the part; None if it is not done."""
        try:
            return _FACTS.validate_json(self.facts.read_bytes(), strict=True)
        except (OSError, ValidationError):
            return None


class EncodeJob(NamedTuple):
    """What it takes to encode.

    Attributes:
        corpora: those of a mixture, or the one.
        is_mixture: which of the two.
        vocabulary: the tokenizer.
        judge: who says which pairs stay.
        directory: of the parts.
        with_text: whether the tables have the text, too.
    """

    corpora: Sequence[NamedCorpus]
    is_mixture: bool
    vocabulary: Tokenizer
    judge: Filter
    directory: Path
    with_text: bool


class EncodedPart(NamedTuple):
    """A part that is done, and what became of it."""

    part: PartFiles
    facts: PartStats


def num_done(directory: Path) -> int:
    """Return how many pairs were read for the parts that are done, up to the first that is not."""
    total = number = 0
    while facts := PartFiles.number(directory, number).read_facts():
        total, number = total + facts.num_read, number + 1
    return total


def encode(work: EncodeJob, part_pairs: int) -> list[EncodedPart]:
    """Encode all pairs that stay, but for the parts that are done; return all parts.

    Raises:
        DataError: for text that cannot be read.
        WriteError: if the disk does not take the parts.
    """
    done: list[EncodedPart] = []
    first = 0
    for number, named in enumerate(work.corpora):
        pairs = read_pairs(named.corpus)
        while head := list(islice(pairs, 1)):
            text = chain(head, islice(pairs, part_pairs - 1))
            part = PartFiles.number(work.directory, len(done))
            facts = part.read_facts()
            if facts is None:
                facts = _encode_part(text, first, part, work, PartStats(number))
            else:
                deque(text, maxlen=0)  # read, and let go
            done.append(EncodedPart(part, facts))
            first += facts.num_read
    return done


def _encode_part(
    text: Iterator[Pair], first: int, part: PartFiles, work: EncodeJob, facts: PartStats
) -> PartStats:
    name = work.corpora[facts.corpus].name if work.is_mixture else None
    lengths: Counter[tuple[int, int]] = Counter()
    with (
        whole_file(part.table) as table_path,
        whole_file(part.left_out) as left_out_path,
        dropped.writing(left_out_path) as left_out,
    ):

        def blocks() -> Iterator[EncodedBlock]:
            for block in _encoded(text, work.vocabulary):
                reasons = work.judge.reasons_of_encoded(
                    first + facts.num_read, block.src.lengths, block.tgt.lengths
                )
                _enter(left_out, block.pairs, reasons, name)
                kept = _only(block, np.array([reason is None for reason in reasons]))
                facts.num_read += len(block.pairs)
                facts.num_copied += sum(pair.src == pair.tgt for pair in kept.pairs)
                lengths.update(
                    zip(kept.src.lengths.tolist(), kept.tgt.lengths.tolist(), strict=True)
                )
                yield _for_table(kept, work.with_text)

        arrow_shards.write_blocks(table_path, blocks(), work.with_text)
    facts.left_out = dict(left_out.counts)
    facts.lengths = sorted((*sides, count) for sides, count in lengths.items())
    with whole_file(part.facts) as path:
        path.write_bytes(_FACTS.dump_json(facts))
    return facts


class _EncodedSide(NamedTuple):
    """The ids of many lines, one after the other, without bos and eos; lengths count eos."""

    ids: Lengths
    lengths: Ints

    def only(self, kept: npt.NDArray[np.bool_]) -> _EncodedSide:
        return _EncodedSide(self.ids[np.repeat(kept, self.lengths - 1)], self.lengths[kept])


class _EncodedPairs(NamedTuple):
    """Pairs that stand together in the text, and their ids."""

    pairs: list[Pair]
    src: _EncodedSide
    tgt: _EncodedSide
    eos: int


def _encoded(text: Iterator[Pair], vocabulary: Tokenizer) -> Iterator[_EncodedPairs]:
    """Cut text into blocks and encode them, some of them ahead of whoever takes them."""
    with ThreadPoolExecutor(1, "encode") as pool:
        ahead: deque[Future[_EncodedPairs]] = deque()
        while pairs := list(islice(text, _BLOCK_PAIRS)):
            ahead.append(pool.submit(_encode_block, pairs, vocabulary))
            if len(ahead) > _NUM_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _encode_block(pairs: list[Pair], vocabulary: Tokenizer) -> _EncodedPairs:
    src = _side(vocabulary.src.encode([pair.src for pair in pairs]))
    tgt = _side(vocabulary.tgt.encode([pair.tgt for pair in pairs]))
    return _EncodedPairs(pairs, src, tgt, vocabulary.src.eos)


def _side(ids: list[list[int]]) -> _EncodedSide:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    pieces = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))
    return _EncodedSide(pieces, lengths + 1)


def _only(block: _EncodedPairs, kept: npt.NDArray[np.bool_]) -> _EncodedPairs:
    if kept.all():
        return block
    pairs = [block.pairs[place] for place in np.flatnonzero(kept).tolist()]
    return _EncodedPairs(pairs, block.src.only(kept), block.tgt.only(kept), block.eos)


def _for_table(block: _EncodedPairs, with_text: bool) -> EncodedBlock:
    ends = np.cumsum(block.src.lengths - 1)
    return EncodedBlock(
        np.insert(block.src.ids, ends, block.eos),
        block.tgt.ids,
        block.src.lengths.astype(np.int32),
        block.tgt.lengths.astype(np.int32),
        [pair.src for pair in block.pairs] if with_text else None,
        [pair.tgt for pair in block.pairs] if with_text else None,
    )


def _enter(
    left_out: DroppedWriter, pairs: list[Pair], reasons: Sequence[str | None], corpus: str | None
) -> None:
    for pair, reason in zip(pairs, reasons, strict=True):
        if reason is not None:
            left_out.add(DroppedPair(pair.src_file, pair.line, reason, corpus))


def collect(
    done: Sequence[EncodedPart], work: EncodeJob, temperature: float | None, directory: Path
) -> None:
    """Give the tables and the ledger of all parts to a data folder, and keep them where they are.

    Args:
        done: the parts.
        work: that made them.
        temperature: of corpora without weights.
        directory: the data folder.

    Raises:
        DataError: if of a corpus no pair is left.
        ConfigError: if a weight is so small that an epoch has no pair of the corpus.
    """
    dropped.join([own.part.left_out for own in done], _left_out(done), directory)
    kept = [own for own in done if own.facts.num_kept]
    for number, named in enumerate(work.corpora):
        if not any(own.facts.corpus == number for own in kept):
            raise dropped.none_left(
                named.name, _left_out([own for own in done if own.facts.corpus == number])
            )
    if len(kept) == 1 and not work.is_mixture:
        _link(kept[0].part.table, directory / arrow_shards.TRAIN_FILE)
        return
    for number, own in enumerate(kept):
        _link(own.part.table, arrow_shards.shard_path(directory, number))
    contents = _contents(kept, work.corpora, temperature)
    arrow_shards.write_contents(directory, contents)
    check_shares(
        [own.name for own in contents.corpora],
        [own.weight for own in contents.corpora],
        sum(own.num_pairs for own in contents.shards),
    )


def _left_out(done: Sequence[EncodedPart]) -> Counter[str]:
    total: Counter[str] = Counter()
    for own in done:
        total.update(own.facts.left_out)
    return total


def _link(path: Path, target: Path) -> None:
    """Give a file a second name; where the disk knows no such thing, copy it."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def _contents(
    kept: Sequence[EncodedPart], corpora: Sequence[NamedCorpus], temperature: float | None
) -> Manifest:
    mixed = []
    for number, named in enumerate(corpora):
        longer: Counter[int] = Counter()
        for own in kept:
            if own.facts.corpus == number:
                for src, tgt, count in own.facts.lengths:
                    longer[max(src, tgt)] += count
        weight = weight_of(longer.total(), named.weight, temperature)
        lengths = [longer[length] for length in range(max(longer) + 1)]
        mixed.append(CorpusEntry(named.name, weight, lengths))
    return Manifest(mixed, [_shard(own.facts) for own in kept])


def _shard(facts: PartStats) -> Shard:
    num_src = sum(src * count for src, _, count in facts.lengths)
    num_tgt = sum(tgt * count for _, tgt, count in facts.lengths)
    return Shard(facts.corpus, facts.num_kept, num_src, num_tgt)


def check_shares(names: Sequence[str], weights: Sequence[float], num_pairs: int) -> None:
    """Hold the corpora of a mixture to have at least one of an epoch's pairs each.

    Raises:
        ConfigError: if one has none.
    """
    for name, count in zip(names, apportion(num_pairs, weights), strict=True):
        if count == 0:
            raise ConfigError(
                f"`{name}.weight` must be enough for one of the {num_pairs:,} pairs of an epoch, "
                "but is too small."
            )
