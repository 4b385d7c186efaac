"""Which model, vocabulary and schedule fit a corpus and a budget. Knows no files and no tensors.

The settings are those that were published, or measured here, for corpora of such a size;
docs/experiments.md says which, and what lost against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mtrain.config.sections import ModelConfig

TOKENS_A_WEIGHT = 5.0  # that a training reads at least; below, a smaller model gets further
BATCH_TOKENS = 4096
_FEW_EPOCHS, _MANY_EPOCHS = 10, 60
AVERAGED = 20  # checkpoints, over the last part of the training
_AVERAGED_PART = 0.3
_LOG_EVERY = 50


@dataclass(frozen=True)
class Size:
    """A size of model, and what goes with it.

    Attributes:
        name: by which users know it.
        model: its sizes; the dropout is another's to choose.
        lr: the highest learning rate.
        accumulate: batches of an update.
        least_pairs: below which a corpus has not enough to teach it.
    """

    name: str
    model: ModelConfig
    lr: float
    accumulate: int
    least_pairs: int


def _model(width: int, heads: int, inner: int, layers: int) -> ModelConfig:
    return ModelConfig(
        d_model=width,
        num_heads=heads,
        d_ff=inner,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
    )


SIZES = (
    Size("tiny", _model(128, 4, 256, 4), 0.005, 1, 0),
    Size("small", _model(256, 4, 1024, 3), 0.002, 1, 40_000),
    Size("medium", _model(512, 4, 1024, 6), 0.0007, 1, 120_000),
    Size("base", _model(512, 8, 2048, 6), 0.0007, 6, 1_000_000),
    Size("big", _model(1024, 16, 4096, 6), 0.0005, 6, 4_000_000),
)


def vocabulary_size(num_pairs: int) -> int:
    """Return how many shared pieces a corpus can teach."""
    steps = ((5_000, 1000), (10_000, 2000), (20_000, 4000), (100_000, 10_000), (1_000_000, 16_000))
    return next((size for limit, size in steps if num_pairs < limit), 32_000)


class Tried(NamedTuple):
    """A size, and how it did on this machine.

    Attributes:
        size: what was tried.
        num_weights: with the vocabulary that was chosen.
        tokens_per_s: target tokens, padding apart, that one second of training takes in.
    """

    size: Size
    num_weights: int
    tokens_per_s: float


def fits(tried: Tried, budget_s: float) -> bool:
    """Tell whether a budget is enough to teach a model of this size."""
    return tried.tokens_per_s * budget_s >= TOKENS_A_WEIGHT * tried.num_weights


def choose(tried: list[Tried], budget_s: float) -> Tried:
    """Return the largest that fits the budget; the smallest if none does."""
    return next((own for own in reversed(tried) if fits(own, budget_s)), tried[0])


class Recipe(NamedTuple):
    """How long and how to train a model of some size.

    Attributes:
        num_updates, num_epochs: that the budget is good for.
        dropout: more of it, the more often a corpus is seen.
        warmup_steps: until the learning rate is at its highest.
        save_every: so that the checkpoints that are averaged lie in the last part.
        validate_every: ten times in all.
        log_every: twenty times in all, or more often.
    """

    num_updates: int
    num_epochs: float
    dropout: float
    warmup_steps: int
    save_every: int
    validate_every: int
    log_every: int


def recipe(chosen: Tried, budget_s: float, num_tokens: int) -> Recipe:
    """Return how to train.

    Args:
        chosen: the size.
        budget_s: seconds.
        num_tokens: target tokens of an epoch.
    """
    tokens = chosen.tokens_per_s * budget_s
    each = min(BATCH_TOKENS * chosen.size.accumulate, num_tokens)  # a batch has no pair twice
    updates = max(1, round(tokens / each))
    epochs = tokens / num_tokens
    dropout = 0.1 if epochs < _FEW_EPOCHS else 0.2 if epochs < _MANY_EPOCHS else 0.3
    return Recipe(
        num_updates=updates,
        num_epochs=epochs,
        dropout=dropout,
        warmup_steps=min(4000, max(50, updates // 4)),
        save_every=max(1, round(_AVERAGED_PART * updates / AVERAGED)),
        validate_every=max(1, updates // 10),
        log_every=min(_LOG_EVERY, max(1, updates // 20)),
    )
