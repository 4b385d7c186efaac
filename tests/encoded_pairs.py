"""Encoded pairs of many lengths, and the batches that a loader makes of them."""

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from builders import vocabularies

from mtrain.data.arrow_shards import EncodedPair
from mtrain.data.batch import Batch
from mtrain.data.loader import TrainingData
from mtrain.data.sampler import Position

BATCH_TOKENS = 64


NUM_PAIRS = 90


Pair = tuple[tuple[int, ...], tuple[int, ...]]


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


class Dealt(NamedTuple):
    batch: Batch
    after: Position


def deal(
    data: TrainingData, start: Position, count: int, batch_tokens: int = BATCH_TOKENS
) -> list[Dealt]:
    dealt = data.batches(batch_tokens, start)
    return [Dealt(*item) for item in itertools.islice(dealt, count)]


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


def assert_continues(data: TrainingData, count: int, batch_tokens: int = BATCH_TOKENS) -> None:
    """Stop after each batch in turn, start again there, and compare all that follows."""
    straight = deal(data, Position(), count, batch_tokens)
    for stop in range(1, count):
        resumed = deal(data, straight[stop - 1].after, count - stop, batch_tokens)
        for one, other in zip(resumed, straight[stop:], strict=True):
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
