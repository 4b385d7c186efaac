"""Choose model, vocabulary and schedule for a corpus and a budget. Uses no files and no tensors.

The settings are published ones, or were measured for corpora of that size; docs/experiments.md has
their sources and the alternatives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from mtrain.config.sections import ConsistencyConfig, ModelConfig, OptimizerName

MIN_TOKENS_PER_PARAMETER = 5.0  # below, a smaller model reaches a better BLEU
BATCH_TOKENS, _MIN_BATCH_TOKENS = 4096, 512
_MIN_UPDATES = 2000  # with fewer, smaller batches reach a better BLEU
_MAX_WARMUP = {"adam": 4000, "muon": 300}  # updates
# updates; with Adam, a rate that rises faster ends in a model that ignores its source
_FULL_LR_WARMUP = {"adam": 1250, "muon": 300}
_MAX_FULL_LR_UPDATES = 2000  # beyond, the peak lr is scaled by a power of updates
_LENGTH_EXPONENT = {"adam": 0.0, "muon": -0.25}  # measured for `tiny` alone
_FEW_READS, _MANY_READS = 10, 60  # of a pair; from each on, dropout is higher
CONSISTENCY = ConsistencyConfig()
_CONSISTENCY_READS = 200  # of a pair without that loss; from there on, it reaches a better BLEU
NUM_AVERAGED = 5  # checkpoints
_AVERAGED_FRACTION = 0.1  # the end of the training, whose checkpoints are averaged
_MIN_SAVE_EVERY = 10  # updates; a limit in case the measured speed was too low
_MAX_LOG_EVERY = 50
_MAX_VALIDATIONS = 10
_VALIDATED_FRACTION = 0.1  # of the time of a training
_MIN_TRAINED_FRACTION = 0.5  # of the budget


@dataclass(frozen=True)
class Preset:
    """A model size with its learning rate and batch size."""

    name: str  # as shown to users
    model: ModelConfig  # the dropout is chosen by `plan_training`
    optimizer: OptimizerName  # Muon where it was measured
    # the peak for batches of BATCH_TOKENS, a warmup of _FULL_LR_WARMUP or more, and with Muon at
    # most _MAX_FULL_LR_UPDATES
    lr: float
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
    Preset("tiny", _model(128, 4, 256, 4), "muon", 0.007, 1, 0),
    Preset("small", _model(256, 4, 1024, 3), "muon", 0.003, 1, 40_000),
    Preset("medium", _model(512, 4, 1024, 6), "adam", 0.0007, 1, 120_000),
    Preset("base", _model(512, 8, 2048, 6), "adam", 0.0007, 6, 1_000_000),
    Preset("big", _model(1024, 16, 4096, 6), "adam", 0.0005, 6, 4_000_000),
)


def vocabulary_size(num_pairs: int) -> int:
    """Return the size of the shared vocabulary for a corpus; measured up to 29,000 pairs."""
    steps = ((3_000, 2000), (6_000, 4000), (20_000, 8000), (100_000, 10_000), (1_000_000, 16_000))
    return next((size for limit, size in steps if num_pairs < limit), 32_000)


class MeasuredPreset(NamedTuple):
    """A preset and its training speed on this machine."""

    preset: Preset
    batch_tokens: int
    num_parameters: int  # with the chosen vocabulary
    tokens_per_s: float  # target tokens per second of training, without padding
    tokens_per_batch: float  # target tokens, without padding; the mean
    spread: float  # the highest speed, over the lowest
    consistency: ConsistencyConfig | None = None  # of the measured updates


def fits(measured: MeasuredPreset, budget_s: float) -> bool:
    """Return whether the budget gives MIN_TOKENS_PER_PARAMETER target tokens or more."""
    return measured.tokens_per_s * budget_s >= MIN_TOKENS_PER_PARAMETER * measured.num_parameters


def choose(measured: list[MeasuredPreset], budget_s: float) -> MeasuredPreset:
    """Return the largest preset that fits the budget; the smallest if none does."""
    return next((preset for preset in reversed(measured) if fits(preset, budget_s)), measured[0])


def batch_tokens(measured: MeasuredPreset, budget_s: float) -> int:
    """Return the largest power of two that leaves _MIN_UPDATES updates in the budget, clamped."""
    tokens = measured.tokens_per_s * budget_s / (_MIN_UPDATES * measured.preset.accumulate)
    fitting = 1 << int(max(tokens, 1)).bit_length() - 1
    return max(_MIN_BATCH_TOKENS, min(BATCH_TOKENS, fitting))


class Overhead(NamedTuple):
    """Seconds that a training takes besides its updates, as measured."""

    startup_s: float  # of a process
    tokenizing_s: float
    validation_s: float  # translating the validation set
    longest_validation_s: float  # the same, if no translation ends before the limit
    tests_s: float  # translating all test sets, with a beam

    @property
    def fixed_s(self) -> float:
        """All but updates and the validations between them.

        `train` and `eval` are two processes. The last weights and the average are validated at the
        end.
        """
        processes_s = 2 * self.startup_s + self.tokenizing_s
        return processes_s + 2 * self.validation_s + self.tests_s


class TrainingPlan(NamedTuple):
    """The length and the schedule of a training."""

    training_s: float
    num_updates: int  # expected in that time
    num_epochs: float
    num_reads: float  # of each different pair; an epoch reads a pair as often as it has copies
    dropout: float
    lr: float
    warmup_steps: int
    save_every: int
    validate_every: int
    log_every: int


def plan_training(
    chosen: MeasuredPreset,
    budget_s: float,
    num_tokens: int,
    overhead: Overhead,
    num_copies: float = 1.0,
) -> TrainingPlan:
    """Return the schedule of a training.

    Args:
        chosen: the preset.
        budget_s: seconds of the whole budget, overhead included.
        num_tokens: target tokens of an epoch.
        overhead: seconds of the budget that are not spent on updates.
        num_copies: of each different pair, on average.
    """
    training_s = max(budget_s - overhead.fixed_s, _MIN_TRAINED_FRACTION * budget_s)
    num_validations = min(
        _MAX_VALIDATIONS,
        math.floor(_VALIDATED_FRACTION * training_s / max(overhead.longest_validation_s, 1e-9)),
    )
    tokens = chosen.tokens_per_s * (1 - _VALIDATED_FRACTION) * training_s
    update_tokens = chosen.tokens_per_batch * chosen.preset.accumulate
    updates, epochs = max(1, round(tokens / update_tokens)), tokens / num_tokens
    num_reads = epochs * num_copies
    optimizer = chosen.preset.optimizer
    warmup_steps = min(_MAX_WARMUP[optimizer], max(1, updates // 4))
    batch_factor = (chosen.batch_tokens / BATCH_TOKENS) ** 0.25
    length = max(updates / _MAX_FULL_LR_UPDATES, 1.0)
    length_factor = length ** _LENGTH_EXPONENT[optimizer]
    warmup_factor = warmup_steps / _FULL_LR_WARMUP[optimizer]
    return TrainingPlan(
        training_s=training_s,
        num_updates=updates,
        num_epochs=epochs,
        num_reads=num_reads,
        dropout=0.1 if num_reads < _FEW_READS else 0.2 if num_reads < _MANY_READS else 0.3,
        lr=chosen.preset.lr * min(batch_factor * length_factor, warmup_factor),
        warmup_steps=warmup_steps,
        save_every=max(_MIN_SAVE_EVERY, round(_AVERAGED_FRACTION * updates / NUM_AVERAGED)),
        validate_every=math.ceil(1.1 * updates / (num_validations + 1)),  # the last is at the end
        log_every=min(_MAX_LOG_EVERY, max(1, updates // 20)),
    )


def gains_by_consistency(plan: TrainingPlan, batch_tokens: int) -> bool:
    """Return whether a consistency loss reaches a better BLEU than a plan without it.

    Not with batches below BATCH_TOKENS: the budget has too few updates, and the loss halves them.
    """
    return plan.num_reads >= _CONSISTENCY_READS and batch_tokens >= BATCH_TOKENS
