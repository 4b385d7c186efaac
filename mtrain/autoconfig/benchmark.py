"""Measure how fast a model trains on this machine, by updates of an untrained one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from mtrain.autoconfig import presets
from mtrain.autoconfig.presets import MeasuredPreset, Preset
from mtrain.config.sections import TrainingConfig
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

_MIN_S, _MIN_BATCHES = 3.0, 3  # of a measurement
_WARMUP_BATCHES = 3  # not measured
_MAX_TOKENS = 256  # of a side of a pair


class Sample(NamedTuple):
    """Batches of pairs sampled from a corpus, and the mean target tokens of a pair."""

    batches: list[Batch]
    tgt_tokens_per_pair: float


def encode(pairs: Sequence[Pair], tokenizer: Tokenizer) -> Sample:
    """Return shuffled batches of the pairs that are not too long.

    Raises:
        ConfigError: if all are too long.
    """
    all_src = tokenizer.encode_src([pair.src for pair in pairs])
    all_tgt = tokenizer.tgt.encode([pair.tgt for pair in pairs])
    src, tgt = [], []
    for src_ids, tgt_ids in zip(all_src, all_tgt, strict=True):
        if len(src_ids) <= _MAX_TOKENS and len(tgt_ids) < _MAX_TOKENS:
            src.append(src_ids)
            tgt.append(tgt_ids)
    if not src:
        raise ConfigError(
            f"the corpus must have pairs of at most {_MAX_TOKENS} tokens, but has none."
        )
    num_tgt = sum(len(ids) + 1 for ids in tgt)
    return Sample(in_batches(src, tgt, tokenizer, presets.BATCH_TOKENS), num_tgt / len(tgt))


def measure(
    preset: Preset, sample: Sample, tokenizer: Tokenizer, device_name: str
) -> MeasuredPreset:
    """Train a model for some seconds, in the precision of a training.

    Raises:
        ConfigError: if there is no such device.
        RunError: if a single pair does not fit into memory.
    """
    keep_freed_memory()  # as in a training
    avoid_cudnn_attention()
    device = pick_device(device_name)
    model = build_model(preset.model, tokenizer).to(device)
    model.compute_in(compute_dtype("auto", device))
    gradients = Gradients(model, TrainingConfig(), device, lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    num_tokens = num_batches = 0
    with closing(gradients.workers):
        started = time.monotonic()
        while time.monotonic() - started < _MIN_S or num_batches < _WARMUP_BATCHES + _MIN_BATCHES:
            batch = sample.batches[num_batches % len(sample.batches)]
            gradients.backward_batch(batch, batch.num_tgt_tokens)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            num_batches += 1
            if num_batches == _WARMUP_BATCHES:
                started, num_tokens = time.monotonic(), 0
            else:
                num_tokens += batch.num_tgt_tokens
    return MeasuredPreset(preset, num_parameters(model), num_tokens / (time.monotonic() - started))
