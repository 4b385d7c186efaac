"""Choose model, vocabulary and schedule for a corpus and a budget. Knows no files and no tensors.

The settings were published, or measured here, for corpora of that size;
docs/experiments.md says which, and what lost against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mtrain.config.sections import ModelConfig

MIN_TOKENS_PER_PARAMETER = 5.0  # below, a smaller model reaches a better BLEU
BATCH_TOKENS = 4096
_FEW_EPOCHS, _MANY_EPOCHS = 10, 60
NUM_AVERAGED = 20  # checkpoints
_AVERAGED_FRACTION = 0.3  # of the training, over which they are saved
_MAX_LOG_EVERY = 50


@dataclass(frozen=True)
class Preset:
    """A model size with its learning rate and batch size."""

    name: str  # as shown to users
    model: ModelConfig  # the dropout is chosen by `plan_training`
    lr: float  # the peak
    accumulate: int  # micro-batches of an update
    min_pairs: int  # of a corpus; a smaller one trains a smaller model


def _model(d_model: int, num_heads: int, d_ff: int, num_layers: int) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        num_heads=num_heads,
        d_ff=d_ff,
        num_encoder_layers=num_layers,
        num_decoder_layers=num_layers,
    )


PRESETS = (
    Preset("tiny", _model(128, 4, 256, 4), 0.005, 1, 0),
    Preset("small", _model(256, 4, 1024, 3), 0.002, 1, 40_000),
    Preset("medium", _model(512, 4, 1024, 6), 0.0007, 1, 120_000),
    Preset("base", _model(512, 8, 2048, 6), 0.0007, 6, 1_000_000),
    Preset("big", _model(1024, 16, 4096, 6), 0.0005, 6, 4_000_000),
)


def vocabulary_size(num_pairs: int) -> int:
    """Return the size of the shared vocabulary for a corpus."""
    steps = ((5_000, 1000), (10_000, 2000), (20_000, 4000), (100_000, 10_000), (1_000_000, 16_000))
    return next((size for limit, size in steps if num_pairs < limit), 32_000)


class MeasuredPreset(NamedTuple):
    """A preset and its training speed on this machine."""

    preset: Preset
    num_parameters: int  # with the chosen vocabulary
    tokens_per_s: float  # target tokens per second of training, without padding


def fits(measured: MeasuredPreset, budget_s: float) -> bool:
    """Return whether the budget gives MIN_TOKENS_PER_PARAMETER target tokens or more."""
    return measured.tokens_per_s * budget_s >= MIN_TOKENS_PER_PARAMETER * measured.num_parameters


def choose(measured: list[MeasuredPreset], budget_s: float) -> MeasuredPreset:
    """Return the largest preset that fits the budget; the smallest if none does."""
    return next((preset for preset in reversed(measured) if fits(preset, budget_s)), measured[0])


class TrainingPlan(NamedTuple):
    """The length and the schedule of a training."""

    num_updates: int  # expected within the budget
    num_epochs: float
    dropout: float
    warmup_steps: int
    save_every: int
    validate_every: int
    log_every: int


def plan_training(chosen: MeasuredPreset, budget_s: float, num_tokens: int) -> TrainingPlan:
    """Return the schedule for a preset, a budget in seconds and an epoch's target tokens."""
    tokens = chosen.tokens_per_s * budget_s
    update_tokens = min(BATCH_TOKENS * chosen.preset.accumulate, num_tokens)  # no pair twice
    updates, epochs = max(1, round(tokens / update_tokens)), tokens / num_tokens
    return TrainingPlan(
        num_updates=updates,
        num_epochs=epochs,
        dropout=0.1 if epochs < _FEW_EPOCHS else 0.2 if epochs < _MANY_EPOCHS else 0.3,
        warmup_steps=min(4000, max(50, updates // 4)),
        save_every=max(1, round(_AVERAGED_FRACTION * updates / NUM_AVERAGED)),
        validate_every=max(1, updates // 10),
        log_every=min(_MAX_LOG_EVERY, max(1, updates // 20)),
    )
