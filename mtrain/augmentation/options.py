"""The settings of synthetic pairs and of students. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mtrain.decode.options import Sampling
from mtrain.errors import ConfigError

Mode = Literal["back", "forward", "again"]
Student = Literal["deep-shallow", "6-1", "12-1", "6-2", "tiny"]
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class AugmentOptions:
    """How synthetic pairs are translated, filtered, and used in training.

    Attributes:
        beam: the beam width; None takes it from the run's config.
        length_alpha: exponent of the length penalty; None takes it from the run's config.
        n_best: translations of each line; at most `beam` unless they are sampled.
        sampling: sample the translations instead of searching.
        seed: the seed of the samples; None is 1.
        batch_tokens: the limit of a batch, source tokens times `beam`; None takes it from the
            run's config.
        score: write the log-probability of each translation.
        keep_best: the share of pairs to keep, best scores first; None keeps all.
        agree_with: a run of the reverse direction; `keep_best` then ranks pairs by the mean
            log-probability per token that it gives to the real side.
        weight: the weight of the corpus relative to all others together; None is 1 if the others
            have weights, else the corpora are sampled by their sizes.
        tag: the name of a reserved token that begins each source.
        until: the share of the training budget after which the corpus is no longer used.
    """

    beam: int | None = None
    length_alpha: float | None = None
    n_best: int = 1
    sampling: Sampling | None = None
    seed: int | None = None
    batch_tokens: int | None = None
    score: bool = False
    keep_best: float | None = None
    agree_with: str | os.PathLike[str] | None = None
    weight: float | None = None
    tag: str | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        if self.sampling is not None:
            why = "has no effect with `--sample`; leave it out"
            _refuse("--beam", self.beam, why)
            if not self.needs_scores:
                _refuse("--length-alpha", self.length_alpha, why)
        else:
            _refuse("--seed", self.seed, "needs `--sample`")
        if self.weight is not None and not self.weight > 0:
            raise ConfigError(f"`--weight` must be > 0, but is {self.weight} instead.")
        if self.keep_best is None:
            _refuse("--agree-with", self.agree_with, "needs `--keep-best`")
        elif not _LEAST_SHARE <= self.keep_best <= 1:
            raise ConfigError(
                f"`--keep-best` must be from {_LEAST_SHARE} to 1, but is {self.keep_best} instead."
            )

    def check(self, mode: Mode, beams: Sequence[int]) -> None:
        """Check that the options fit what is translated, and the beams of the runs' configs.

        Raises:
            ConfigError: if they do not.
        """
        if mode == "again":
            _refuse("--agree-with", self.agree_with, "has no effect with `--again`; leave it out")
        for width in [] if self.sampling else [self.beam or beam for beam in beams]:
            if self.n_best > width:
                raise ConfigError(
                    f"`--n-best` must be at most the beam ({width}), but is {self.n_best} instead."
                )

    @property
    def needs_scores(self) -> bool:
        """Whether translations are scored by the model that made them."""
        return self.score or (self.keep_best is not None and self.agree_with is None)

    @property
    def decoding(self) -> dict[str, Any]:
        """The fields of `DecodingOptions` that replace those of a run."""
        keys = ("beam", "length_alpha", "batch_tokens", "seed")
        overrides = {key: value for key in keys if (value := getattr(self, key)) is not None}
        if self.sampling is not None or self.beam == 1:  # nothing to choose from, or all is wanted
            overrides["mbr"] = None
        return overrides | {"num_best": self.n_best, "sampling": self.sampling}


def mode_of(has_back: bool, has_forward: bool, is_again: bool) -> Mode:
    """Return the mode that is given.

    Raises:
        ConfigError: if none or several are.
    """
    given: dict[Mode, bool] = {"back": has_back, "forward": has_forward, "again": is_again}
    modes = [mode for mode, is_given in given.items() if is_given]
    if len(modes) != 1:
        shown = " and ".join(f"`--{mode}`" for mode in modes)
        raise ConfigError(
            "one of `--back`, `--forward` and `--again` must be given, but "
            f"{shown + ' are' if modes else 'none is'}."
        )
    return modes[0]


def _refuse(option: str, value: object, why: str) -> None:
    if value is not None:
        raise ConfigError(f"`{option}` {why}.")
