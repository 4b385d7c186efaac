"""Learning-rate schedules and stopping rules, as pure functions of step and budget."""

from __future__ import annotations

import math

from mtrain.config.corpora import corpora_of
from mtrain.config.sections import Config, TrainingConfig
from mtrain.io.text_width import count
from mtrain.run.checkpoint import Progress


def learning_rate(config: TrainingConfig, d_model: int, step: int, spent: float) -> float:
    """Return the learning rate of update `step`, counted from 1.

    Args:
        config: `schedule`, `lr` (for noam: the factor) and `warmup_steps`.
        d_model: the model width, used by noam.
        step: the number of the next update.
        spent: the fraction of the budget, steps or minutes, that is used up, in [0, 1].
    """
    if config.schedule == "noam":
        return config.lr * noam(step, config.warmup_steps, d_model)
    warm = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "inverse_sqrt":
        return config.lr * warm * min(1.0, math.sqrt(max(config.warmup_steps, 1) / step))
    remaining = 1.0 - min(max(spent, 0.0), 1.0)
    if config.schedule == "linear":
        return config.lr * warm * remaining
    return config.lr * warm * 0.5 * (1.0 - math.cos(math.pi * remaining))


def noam(step: int, warmup_steps: int, d_model: int) -> float:
    """Return d_model^-0.5 * min(step^-0.5, step * warmup^-1.5) (section 5.3)."""
    warm = step * warmup_steps**-1.5 if warmup_steps else math.inf
    return float(d_model**-0.5 * min(step**-0.5, warm))


def budget_spent(config: TrainingConfig, progress: Progress) -> float:
    """Return the fraction of the budget, steps or minutes, that is used up."""
    steps, minutes = config.max_steps, config.max_minutes
    by_steps = progress.step / steps if steps else 0.0
    by_time = progress.elapsed_s / (60 * minutes) if minutes else 0.0
    return max(by_steps, by_time)


def follows_clock(config: Config) -> bool:
    """Return whether the learning rate or the mixture depends on elapsed time."""
    follows = config.training.schedule in ("linear", "cosine")
    follows |= any(corpus.until is not None for _, corpus in corpora_of(config.data.train))
    return config.training.max_minutes is not None and follows


def reached_limits(config: TrainingConfig, progress: Progress) -> list[str]:
    """Return the keys of `training` whose limits are reached; any of them ends the training."""
    used = {
        "max_steps": progress.step,
        "max_minutes": progress.elapsed_s / 60,
        "patience": progress.num_bad_validations,
    }
    limits = {key: getattr(config, key) for key in used}
    return [key for key, limit in limits.items() if limit is not None and used[key] >= limit]


def format_stopping_rule(config: TrainingConfig) -> str:
    """Describe when the training ends."""
    steps, minutes = config.max_steps, config.max_minutes
    limits = [count(steps, "update")] if steps else []
    limits += [f"{minutes:g} minute{'s' * (minutes != 1)}"] if minutes else []
    patience = count(config.patience, "validation")
    return f"after {' or '.join(limits)}, or after {patience} without improvement"
