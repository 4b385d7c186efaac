"""Encoded pairs of many lengths, and the batches that a loader makes of them."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from builders import vocabularies

from mtrain.data.arrow_shards import (
    CorpusEntry,
    EncodedBlock,
    Manifest,
    Shard,
    shard_path,
    write_blocks,
    write_manifest,
)
from mtrain.data.batch import Batch, Position
from mtrain.data.loader import TrainingData

BATCH_TOKENS = 64


NUM_PAIRS = 90


Pair = tuple[tuple[int, ...], tuple[int, ...]]


class EncodedPair(NamedTuple):
    """Source ids with eos, target ids without, and the text if training samples from it."""

    src: list[int]
    tgt: list[int]
    src_text: str | None = None
    tgt_text: str | None = None


def write_pairs(path: Path, pairs: Iterable[EncodedPair], with_text: bool) -> None:
    """Write encoded pairs as an Arrow table."""
    rows = list(pairs)
    block = EncodedBlock(
        np.array([token for row in rows for token in row.src], np.int32),
        np.array([token for row in rows for token in row.tgt], np.int32),
        np.array([len(row.src) for row in rows], np.int32),
        np.array([len(row.tgt) + 1 for row in rows], np.int32),
        [row.src_text or "" for row in rows] if with_text else None,
        [row.tgt_text or "" for row in rows] if with_text else None,
    )
    write_blocks(path, [block], with_text)


def write_shards(
    directory: Path,
    pairs: Iterable[EncodedPair],
    ends: Sequence[int] = (),
    weights: Sequence[float] | None = None,
) -> Path:
    """Write shards that end at the given rows, and the manifest; with weights, each is a corpus."""
    rows = list(pairs)
    with_text = rows[0].src_text is not None
    parts = [rows[first:end] for first, end in itertools.pairwise([0, *ends, len(rows)])]
    shards, lengths = [], []
    for number, part in enumerate(parts):
        write_pairs(shard_path(directory, number), part, with_text)
        longer = [max(len(pair.src), len(pair.tgt) + 1) for pair in part]
        tokens = sum(len(pair.src) for pair in part), sum(len(pair.tgt) + 1 for pair in part)
        shards.append(Shard(number if weights else 0, len(part), *tokens))
        lengths.append(np.bincount(longer, minlength=200))
    counts = [count.tolist() for count in (lengths if weights else [sum(lengths)])]
    names = [f"data.train[{number}]" for number in range(len(counts))]
    entries = [CorpusEntry(*row) for row in zip(names, weights or [1.0], counts, strict=True)]
    write_manifest(directory, Manifest(entries, shards))
    return directory


def encoded_pairs() -> list[EncodedPair]:
    """Pairs of all lengths from one to nineteen; a number of its own makes each unique."""
    rng = np.random.default_rng(5)
    eos = vocabularies().src.eos
    return [
        EncodedPair(
            [300 + number, *rng.integers(4, 300, rng.integers(0, 18)).tolist(), eos],
            [300 + number, *rng.integers(4, 300, rng.integers(0, 18)).tolist()],
            None,
            None,
        )
        for number in range(NUM_PAIRS)
    ]


def training_data(directory: Path, seed: int = 1, sampling_alpha: float = 0.0) -> TrainingData:
    return TrainingData(directory, vocabularies(), seed, sampling_alpha)


class BatchAndPosition(NamedTuple):
    batch: Batch
    after: Position


def take_batches(
    data: TrainingData, start: Position, count: int, batch_tokens: int = BATCH_TOKENS
) -> list[BatchAndPosition]:
    batches = data.batches(batch_tokens, start)
    return [BatchAndPosition(*item) for item in itertools.islice(batches, count)]


def epoch(data: TrainingData, number: int, batch_tokens: int = BATCH_TOKENS) -> list[Batch]:
    batches = []
    for batch, after in data.batches(batch_tokens, Position(number, 0)):
        batches.append(batch)
        if after.epoch != number:
            return batches
    raise AssertionError("batches go on for ever")


def pairs_of(batch: Batch) -> list[Pair]:
    """The pairs of a batch: source with eos, target without bos and eos."""
    pairs = []
    for row in range(len(batch.src_BS)):
        src = batch.src_BS[row][batch.src_keep_BS[row]].tolist()
        tgt_in = batch.tgt_in_BT[row][batch.tgt_keep_BT[row]].tolist()
        tgt_out = batch.tgt_out_BT[row][batch.tgt_keep_BT[row]].tolist()
        assert tgt_in[1:] == tgt_out[:-1]
        pairs.append((tuple(src), tuple(tgt_in[1:])))
    return pairs


def pairs_in(batches: list[Batch]) -> list[list[Pair]]:
    return [pairs_of(batch) for batch in batches]


def written() -> list[Pair]:
    return [(tuple(pair.src), tuple(pair.tgt)) for pair in encoded_pairs()]


def assert_continues(
    data: TrainingData, count: int, batch_tokens: int = BATCH_TOKENS, num_compared: int = 10**6
) -> None:
    """Stop after each batch in turn, start again there, and compare the batches that follow."""
    straight = take_batches(data, Position(), count, batch_tokens)
    for stop in range(1, count):
        following = straight[stop : stop + num_compared]
        resumed = take_batches(data, straight[stop - 1].after, len(following), batch_tokens)
        for one, other in zip(resumed, following, strict=True):
            assert one.after == other.after
            assert torch.equal(one.batch.src_BS, other.batch.src_BS)
            assert torch.equal(one.batch.tgt_in_BT, other.batch.tgt_in_BT)
            assert torch.equal(one.batch.tgt_out_BT, other.batch.tgt_out_BT)


def texts_of(batches: list[Batch]) -> list[tuple[str, str]]:
    tokenizer, pairs = vocabularies(), list(itertools.chain(*pairs_in(batches)))
    eos = tokenizer.src.eos
    assert all(src[-1] == eos and eos not in src[:-1] for src, _ in pairs)
    src = tokenizer.src.decode([pair[0][:-1] for pair in pairs])
    tgt = tokenizer.tgt.decode([pair[1] for pair in pairs])
    return sorted(zip(src, tgt, strict=True))
