"""How fast a model would train on this machine: a few real updates of an untrained one.

It keeps nothing: neither weights nor what it read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from mtrain.autoconfig import presets
from mtrain.autoconfig.presets import Size, Tried
from mtrain.corpus.reader import Pair
from mtrain.data.batch import Batch
from mtrain.data.loader import in_batches
from mtrain.errors import ConfigError
from mtrain.model.transformer import num_parameters
from mtrain.run.load_model import build_model
from mtrain.runtime.device import (
    avoid_cudnn_attention,
    compute_dtype,
    keep_freed_memory,
    pick_device,
)
from mtrain.tokenizer.sentencepiece import Tokenizer
from mtrain.train.gradients import Gradients

_LEAST_S, _LEAST_BATCHES = 3.0, 3  # of a measurement
_NUM_FIRST = 3  # batches that do not count: memory and kernels are got ready
_MAX_TOKENS = 256  # of a pair that is trained on
_SMOOTHING = 0.1


class Sample(NamedTuple):
    """Batches of pairs from all over a corpus, and how many target tokens a pair has."""

    batches: list[Batch]
    tgt_tokens_a_pair: float


def encode(pairs: Sequence[Pair], vocabulary: Tokenizer) -> Sample:
    """Return batches, in an order of their own, of all pairs that are not too long.

    Raises:
        ConfigError: if all are.
    """
    src = vocabulary.encode_src([pair.src for pair in pairs])
    tgt = vocabulary.tgt.encode([pair.tgt for pair in pairs])
    fit = [
        row
        for row in range(len(pairs))
        if len(src[row]) <= _MAX_TOKENS and len(tgt[row]) < _MAX_TOKENS  # and eos
    ]
    if not fit:
        raise ConfigError(
            f"the corpus must have pairs of at most {_MAX_TOKENS} tokens, but has none."
        )
    src, tgt = [src[row] for row in fit], [tgt[row] for row in fit]
    num_tgt = sum(len(ids) + 1 for ids in tgt)
    return Sample(in_batches(src, tgt, vocabulary, presets.BATCH_TOKENS), num_tgt / len(tgt))


def measure(size: Size, sample: Sample, vocabulary: Tokenizer, device_name: str) -> Tried:
    """Train a model of this size for some seconds, at the precision that training would take.

    Raises:
        ConfigError: if there is no such device.
        RunError: if the memory does not hold a single pair.
    """
    keep_freed_memory()  # as a training does
    avoid_cudnn_attention()
    device = pick_device(device_name)
    model = build_model(size.model, vocabulary).to(device)
    model.compute_in(compute_dtype("auto", device))
    gradients = Gradients(model, _SMOOTHING, device, lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    num_tokens = num_batches = 0
    with closing(gradients.workers):
        started = time.monotonic()
        while time.monotonic() - started < _LEAST_S or num_batches < _NUM_FIRST + _LEAST_BATCHES:
            batch = sample.batches[num_batches % len(sample.batches)]
            gradients.accumulate(batch, batch.num_tgt_tokens)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            num_batches += 1
            if num_batches == _NUM_FIRST:
                started, num_tokens = time.monotonic(), 0
            else:
                num_tokens += batch.num_tgt_tokens
    return Tried(size, num_parameters(model), num_tokens / (time.monotonic() - started))
