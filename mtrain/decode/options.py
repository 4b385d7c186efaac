"""The options of decoding: one object, made from a config and command-line options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from mtrain.config.sections import MAX_BEAM, MAX_EXTRA_TOKENS, Config, DecodingConfig
from mtrain.errors import ConfigError

_DEFAULTS = DecodingConfig()
_LIMITS: Mapping[str, tuple[float, float]] = {  # the least and the greatest value
    "beam": (1, MAX_BEAM),
    "length_alpha": (0, 10),
    "no_repeat_ngram": (0, 2**31),
    "max_extra_tokens": (0, MAX_EXTRA_TOKENS),
    "batch_tokens": (1, 2**63),
    "num_best": (1, 2**31),
    "max_input_tokens": (2, 2**63),
    "seed": (0, math.inf),
    "temperature": (0.01, 100),
    "top_k": (0, 2**31),
    "top_p": (1e-9, 1),
    "rerank_weight": (0, 100),
}
RERANK_WEIGHT = 0.3  # chosen by the BLEU of six pairs of models on the validation set of Multi30k
_LENGTHS = ("split", "truncate", "error")
_SWITCHES = ("early_stop", "retry_flagged", "with_alignment", "with_scores")


@dataclass(frozen=True)
class Sampling:
    """How target tokens are sampled.

    Attributes:
        temperature: divides the logits; below 1, likely tokens become likelier.
        top_k: sample from the `top_k` likeliest tokens only; 0 is all.
        top_p: nucleus sampling: sample from the smallest set of the likeliest tokens whose
            probabilities sum to at least `top_p`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True)
class DecodingOptions:
    """How lines are translated.

    Attributes:
        beam: the beam width: hypotheses of a sentence, open and finished together; 1 is greedy.
        length_alpha: exponent of the length penalty, ((5 + tokens) / 6) ^ length_alpha.
        early_stop: end the search of a sentence when no open hypothesis, if it ended now, would
            have a score among the `num_best`. Otherwise the search ends when none can reach such a
            score at any length.
        no_repeat_ngram: write no n-gram of this order twice in a translation; 0 allows all.
        retry_flagged: search again, without repeated 3-grams, for a line whose best translation,
            except empty ones, has the flag loop; `mbr` and `rerank_weight` rank such translations
            after others, and empty ones last. Not for samples.
        mbr: minimum Bayes risk: rank `beam` hypotheses or samples by their mean agreement with the
            others, measured by chrF or by BLEU of subwords.
        rerank_weight: add this times the score of a model of the other direction to the scores of
            `beam` hypotheses or samples (noisy-channel reranking), before `mbr`; None does not.
        max_extra_tokens: a target may have this many tokens more than its source.
        batch_tokens: the limit of a batch: source tokens times `beam`, or times the samples.
        num_best: translations of each line, best first; at most `beam` unless they are sampled.
        sampling: sample the translations instead of searching.
        seed: the seed of the samples.
        max_input_tokens: lines with more tokens, eos included, are handled as `on_long` says; None
            translates each line whole, in memory and time that grow with the square of its length.
        on_long: `split` translates a long line in as few parts of whole sentences as possible;
            `truncate` drops the tokens beyond the limit; `error` raises DataError.
        shortlist: `fast` ranks only frequent tokens and those that co-occur with tokens of the
            source in the training text. Greedy search, which is faster without it, ranks all.
        with_alignment: align source and target words.
        with_scores: compute log-probabilities. Greedy search is faster without.
    """

    beam: int = _DEFAULTS.beam
    length_alpha: float = _DEFAULTS.length_alpha
    early_stop: bool = _DEFAULTS.early_stop
    no_repeat_ngram: int = _DEFAULTS.no_repeat_ngram
    retry_flagged: bool = _DEFAULTS.retry_flagged
    mbr: Literal["chrf", "bleu"] | None = _DEFAULTS.mbr
    rerank_weight: float | None = None
    max_extra_tokens: int = _DEFAULTS.max_extra_tokens
    batch_tokens: int = _DEFAULTS.batch_tokens
    num_best: int = 1
    sampling: Sampling | None = None
    seed: int = 1
    max_input_tokens: int | None = None
    on_long: Literal["split", "truncate", "error"] = "split"
    shortlist: Literal["fast"] | None = None
    with_alignment: bool = False
    with_scores: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self)
        for key in _SWITCHES:
            if not isinstance(value := getattr(self, key), bool):
                raise ConfigError(f"`{key}` must be True or False, but is {value!r} instead.")
        if self.on_long not in _LENGTHS:
            raise ConfigError(
                f"`on_long` must be {', '.join(_LENGTHS)}, but is {self.on_long!r} instead."
            )
        if self.mbr not in (None, "chrf", "bleu"):
            raise ConfigError(f"`mbr` must be chrf, bleu or None, but is {self.mbr!r} instead.")
        for key in ("rerank_weight", "mbr"):
            if getattr(self, key) is not None and self.beam == 1:
                advice = "; `--mbr none` turns it off" * (key == "mbr")
                raise ConfigError(
                    f"`beam` must be at least 2 for `{key}`, but is 1 instead{advice}."
                )
        if not isinstance(self.sampling, Sampling | None):
            raise ConfigError(
                f"`sampling` must be a Sampling or None, but is {self.sampling!r} instead."
            )
        if self.sampling is not None and None not in (self.mbr, self.rerank_weight):
            raise ConfigError(
                f"`mbr` must be None with `rerank_weight` for samples, but is {self.mbr} instead; "
                "`--mbr none` turns it off."
            )
        if self.shortlist not in (None, "fast"):
            raise ConfigError(
                f"`shortlist` must be fast or None, but is {self.shortlist!r} instead."
            )
        if self.shortlist is not None and self.sampling is not None:
            raise ConfigError("`shortlist` must be None with `sampling`, but is fast instead.")
        if self.num_best > self.beam and self.sampling is None:
            raise ConfigError(
                f"`num_best` must be at most the beam ({self.beam}), but is {self.num_best} "
                "instead."
            )

    @staticmethod
    def from_config(config: Config) -> DecodingOptions:
        """Return the options of a run's config."""
        return DecodingOptions(
            **config.decoding.model_dump(), max_input_tokens=config.data.max_tokens
        )

    @property
    def num_candidates(self) -> int:
        """The number of translations of each line before the best `num_best` are chosen."""
        if self.mbr is None and self.rerank_weight is None:
            return self.num_best
        return max(self.num_best, self.beam)

    @property
    def num_targets(self) -> int:
        """The number of targets of each source that are decoded together."""
        return self.num_best if self.sampling is not None else self.beam

    @property
    def argmax_only(self) -> bool:
        """Whether the search needs only the best token of each position, without its score."""
        return self.beam == 1 and not self.with_scores


def _check_numbers(options: DecodingOptions | Sampling) -> None:
    """Raise ConfigError unless each numeric option has its type and is within its limits."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in _LIMITS or (value is None and "None" in str(field.type)):
            continue
        (least, most), is_float = _LIMITS[field.name], str(field.type).startswith("float")
        if isinstance(value, bool) or not isinstance(value, float | int if is_float else int):
            kind = "a number" if is_float else "a whole number"
            raise ConfigError(f"`{field.name}` must be {kind}, but is {value!r} instead.")
        if not least <= value <= most:
            raise ConfigError(
                f"`{field.name}` must be between {least} and {most}, but is {value!r} instead."
            )
