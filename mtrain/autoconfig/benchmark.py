"""Measure how fast an untrained model trains and translates on this machine."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from typing import NamedTuple

import torch

from mtrain.autoconfig.presets import MeasuredPreset, Preset
from mtrain.config.sections import ConsistencyConfig, DecodingConfig, TrainingConfig
from mtrain.data.loader import in_batches
from mtrain.decode.options import DecodingOptions
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.translator import Translator
from mtrain.errors import ConfigError
from mtrain.model.transformer import num_parameters
from mtrain.run.load_model import build_model
from mtrain.runtime.device import (
    avoid_cudnn_attention,
    compute_dtype,
    keep_freed_memory,
    pick_device,
)
from mtrain.runtime.process_group import SINGLE
from mtrain.tokenizer.sentencepiece import Tokenizer
from mtrain.training.gradients import Gradients
from mtrain.training.training_state import TrainingState

_WINDOW_S = 0.6  # of one measurement; the median of several is returned
_MIN_WINDOWS, _MAX_WINDOWS = 5, 15
USUAL_SPREAD = 1.5  # highest over lowest speed, above which more windows are measured
_WARMUP_BATCHES = 3  # not measured
_MAX_TOKENS = 256  # of a side of a pair, as `data.max_tokens`
_NUM_TRANSLATED = 200  # sentences, or up to twice as many


class Sample(NamedTuple):
    """Encoded pairs that are not too long, and their share of all pairs."""

    src: list[list[int]]  # with eos
    tgt: list[list[int]]  # without bos and eos
    tokenizer: Tokenizer
    share: float

    @property
    def src_tokens_per_pair(self) -> float:
        """The mean, eos included."""
        return statistics.fmean(map(len, self.src))

    @property
    def tgt_tokens_per_pair(self) -> float:
        """The mean, eos included."""
        return 1 + statistics.fmean(map(len, self.tgt))


def encode(pairs: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> Sample:
    """Encode the pairs that are not too long.

    Raises:
        ConfigError: if all are too long.
    """
    src_lines, tgt_lines = zip(*pairs, strict=True)
    encoded = zip(tokenizer.encode_src(src_lines), tokenizer.tgt.encode(tgt_lines), strict=True)
    kept = [(src, tgt) for src, tgt in encoded if max(len(src), len(tgt) + 1) <= _MAX_TOKENS]
    if not kept:
        raise ConfigError(
            f"the corpus must have pairs of at most {_MAX_TOKENS} tokens, but has none."
        )
    src, tgt = zip(*kept, strict=True)
    return Sample([*src], [*tgt], tokenizer, len(kept) / len(src_lines))


def load_average() -> float:
    """Return the load average of the last minute per processor; 0 if unknown."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return 0.0


def startup_s() -> float:
    """Return the seconds that a process takes to start and to import what training needs."""
    started = time.monotonic()
    program = f"import sys; sys.path[:] = {sys.path!r}; import mtrain.training.trainer"
    subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    return time.monotonic() - started


def measure(
    preset: Preset,
    batch_tokens: int,
    sample: Sample,
    device_name: str,
    consistency: ConsistencyConfig | None = None,
) -> MeasuredPreset:
    """Train a model for some seconds, with precision `auto`; return its speed.

    Raises:
        ConfigError: if there is no such device.
        RunError: if a single pair does not fit into memory.
    """
    keep_freed_memory()  # as in a training
    avoid_cudnn_attention()
    device = pick_device(device_name)
    model = build_model(preset.model, sample.tokenizer).to(device)
    model.compute_dtype = compute_dtype("auto", device)
    training = TrainingConfig(optimizer=preset.optimizer, consistency=consistency)
    gradients = Gradients(model, training, device, lambda text: None)
    optimizers = TrainingState(model, training, SINGLE).optimizers
    batches = in_batches(sample.src, sample.tgt, sample.tokenizer, batch_tokens)  # shuffled
    num_batches = 0

    def update() -> int:
        nonlocal num_batches
        batch = batches[num_batches % len(batches)]
        num_batches += 1
        gradients.backward_batch(batch, batch.num_tgt_tokens)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return batch.num_tgt_tokens

    with closing(gradients.workers):
        for _ in range(_WARMUP_BATCHES):
            update()
        speeds: list[float] = []
        while len(speeds) < _MIN_WINDOWS or (
            max(speeds) > USUAL_SPREAD * min(speeds) and len(speeds) < _MAX_WINDOWS
        ):
            started, num_tokens = time.monotonic(), update()
            while time.monotonic() - started < _WINDOW_S:
                num_tokens += update()
            speeds.append(num_tokens / (time.monotonic() - started))
    median, spread = statistics.median(speeds), max(speeds) / min(speeds)
    num_weights = num_parameters(model)
    per_batch = statistics.fmean(batch.num_tgt_tokens for batch in batches)
    return MeasuredPreset(preset, batch_tokens, num_weights, median, per_batch, spread, consistency)


def seconds_per_sentence(
    preset: Preset, sample: Sample, lines: list[str], decoding: DecodingConfig, device_name: str
) -> float:
    """Return the mean time of a translation that is as long as its source.

    An untrained model generates no eos: all translations have the longest allowed length.
    """
    device = pick_device(device_name)
    model = build_model(preset.model, sample.tokenizer).to(device)
    options = DecodingOptions(
        beam=decoding.beam,
        length_alpha=decoding.length_alpha,
        max_extra_tokens=0,
        max_input_tokens=_MAX_TOKENS,
        with_scores=decoding.beam > 1,
    )
    translator = Translator([model], sample.tokenizer, options, device)
    chosen = lines[:: len(lines) // _NUM_TRANSLATED or 1]
    started = time.monotonic()
    translate_lines(translator, chosen)
    return (time.monotonic() - started) / len(chosen)
