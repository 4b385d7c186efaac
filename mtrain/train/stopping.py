"""When a training is done: after so many steps or minutes, or when it gets no better any more."""

from __future__ import annotations

from mtrain.config.sections import TrainingConfig
from mtrain.run.checkpoint import Progress


def budget_spent(settings: TrainingConfig, progress: Progress) -> float:
    """Return the share of the budget, steps or minutes, that is used up."""
    steps, minutes = settings.max_steps, settings.max_minutes
    by_steps = progress.step / steps if steps else 0.0
    by_time = progress.elapsed_s / (60 * minutes) if minutes else 0.0
    return max(by_steps, by_time)


def is_reached(settings: TrainingConfig, progress: Progress) -> bool:
    """Tell whether the budget is used up, or patience is."""
    is_patient = progress.num_bad_validations < settings.patience
    return budget_spent(settings, progress) >= 1 or not is_patient


def format_rule(settings: TrainingConfig) -> str:
    """Write the target in words."""
    steps, minutes = settings.max_steps, settings.max_minutes
    named = [f"{steps:,} steps"] if steps else []
    named += [f"{minutes:g} minutes"] if minutes else []
    return f"{' or '.join(named)}, or {settings.patience} validations without a better one"
