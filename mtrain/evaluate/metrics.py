"""Scores of translations by sacreBLEU, each with its interval and its signature.

Knows lines, no runs: a translation may come from anywhere. What is computed here, and how, is what
the `sacrebleu` command computes on the same lines.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from mtrain.errors import ConfigError
from mtrain.evaluate.comet import Comet, CometModel

METRICS = ("bleu", "chrf", "chrf++", "ter")  # as the user names them
_LEAST_RESAMPLES = 40  # an interval of 95% leaves out one in 40 on either side


@dataclass(frozen=True)
class Score:
    """What a metric says of a translation.

    Attributes:
        metric: its name, as sacreBLEU prints it.
        value: the score.
        signature: says how it was computed.
        mean: of the scores of the resampled test sets; None if there are none.
        half_width: of the interval around `mean` that holds 95% of them.
        verbose: what sacreBLEU says beside the score: BLEU's precisions and lengths.
    """

    metric: str
    value: float
    signature: str
    mean: float | None = None
    half_width: float | None = None
    verbose: str = ""

    def shown(self) -> str:
        """Return the value and the interval, if not all is zero, as sacreBLEU writes them."""
        text = number(self.metric, self.value)
        if not self.mean or self.half_width is None:
            return text
        mean, half_width = (number(self.metric, own) for own in (self.mean, self.half_width))
        return f"{text} (μ = {mean} ± {half_width})"


def number(metric: str, value: float) -> str:
    """Write a score with as many digits as are usual; COMET's scores end at about 1."""
    return f"{value:.{4 if metric == 'COMET' else 2}f}"


@dataclass(frozen=True)
class ScoringOptions:
    """What is computed.

    Attributes:
        tokenize: how BLEU splits words; None is sacreBLEU's default, 13a.
        lowercase: whether BLEU and chrF ignore case. TER always does, COMET never.
        metrics: some of `METRICS`.
        num_resamples: test sets drawn from the test set for intervals and for the paired
            bootstrap; 0 leaves intervals out. Memory grows with this times the number of lines.
        comet: one more metric, if there is a model.

    Raises:
        ConfigError: if one of them cannot be.
    """

    tokenize: str | None = None
    lowercase: bool = False
    metrics: Sequence[str] = ("bleu", "chrf")
    num_resamples: int = 1000
    comet: CometModel | None = None

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"`--metrics` must be some of {', '.join(METRICS)}, but has {name!r} instead"
                    f"{'; `--comet PATH` asks for COMET' * (name == 'comet')}."
                )
        if self.tokenize is not None and self.tokenize not in BLEU.TOKENIZERS:
            known = ", ".join(sorted(name for name in BLEU.TOKENIZERS))
            raise ConfigError(
                f"`--tokenize` must be one of {known}, but is {self.tokenize!r} instead."
            )
        if self.tokenize is not None and "bleu" not in self.metrics:
            raise ConfigError("`--tokenize` must stand beside the metric bleu, but does not.")
        if self.lowercase and not {"bleu", "chrf", "chrf++"} & set(self.metrics):
            raise ConfigError("`--lowercase` must stand beside bleu, chrf or chrf++, but does not.")
        if "bleu" in self.metrics:
            _bleu(None, self)  # before anything is translated
        if 0 < self.num_resamples < _LEAST_RESAMPLES:
            raise ConfigError(
                f"`--resamples` must be 0 or at least {_LEAST_RESAMPLES}, but is "
                f"{self.num_resamples} instead."
            )
        seed = os.environ.get("SACREBLEU_SEED", "none")
        if seed.lower() != "none" and not (seed.isascii() and seed.isdigit()):
            raise ConfigError(
                f"`SACREBLEU_SEED` must be a whole number or none, but is {seed!r} instead."
            )


class Scorer:
    """The metrics of a test set, which reads its references once for all systems.

    Args:
        references: one for each line, raw text.
        options: which metrics, and how.
        sources: one for each line; only COMET reads them.
    """

    def __init__(
        self, references: Sequence[str], options: ScoringOptions, sources: Sequence[str] = ()
    ) -> None:
        self._num_resamples = options.num_resamples
        names = dict.fromkeys(options.metrics)
        self.metrics = [_metric(name, [list(references)], options) for name in names]
        if options.comet is not None:
            self.metrics.append(Comet(options.comet, sources, references))

    def score(self, hypotheses: Sequence[str]) -> list[Score]:
        """Return the score of detokenised lines by each metric."""
        return [self._score(metric, list(hypotheses)) for metric in self.metrics]

    def _score(self, metric: Metric, hypotheses: list[str]) -> Score:
        found = metric.corpus_score(hypotheses, None)
        name, value, verbose = found.name, float(found.score), str(found._verbose)
        if not self._num_resamples:
            return Score(name, value, str(metric.get_signature()), verbose=verbose)
        interval = _interval(metric, hypotheses, self._num_resamples)
        signature = str(metric.get_signature())  # which names the resampling, once it is done
        return Score(name, value, signature, interval.mean, interval.half_width, verbose)

    def values(self, hypotheses: Sequence[str]) -> dict[str, float]:
        """Return the scores alone, by the names of their metrics."""
        found = [metric.corpus_score(list(hypotheses), None) for metric in self.metrics]
        return {score.name: float(score.score) for score in found}


class _Interval(NamedTuple):
    mean: float
    half_width: float


def _interval(metric: Metric, hypotheses: list[str], num_resamples: int) -> _Interval:
    """Return the interval that the `sacrebleu` command shows, by private fields of its score.

    sacreBLEU 2.6 fails where some of the drawn test sets score 0: it cannot take the mean of their
    Python floats and the others' float32. Its paired test of one system can, and differs in the
    last digits of a float32 only.
    """
    try:
        found = metric.corpus_score(hypotheses, None, n_bootstrap=num_resamples)
        return _Interval(float(found._mean), float(found._ci))
    except TypeError:
        test = PairedTest([("", hypotheses)], {"": metric}, None, "bs", num_resamples)
        result: Any = next(found[0] for key, found in test()[1].items() if key != "System")
        return _Interval(float(result.mean), float(result.ci))


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    options: ScoringOptions | None = None,
    sources: Sequence[str] = (),
) -> list[Score]:
    """Return the scores of detokenised lines against raw references."""
    return Scorer(references, options or ScoringOptions(), sources).score(hypotheses)


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return BLEU with sacreBLEU's defaults."""
    options = ScoringOptions(metrics=("bleu",), num_resamples=0)
    return score(hypotheses, references, options)[0].value


def _metric(name: str, references: list[list[str]], options: ScoringOptions) -> Metric:
    if name == "bleu":
        return _bleu(references, options)
    if name == "ter":
        return TER(references=references)
    word_order = 2 if name == "chrf++" else 0
    return CHRF(word_order=word_order, lowercase=options.lowercase, references=references)


def _bleu(references: list[list[str]] | None, options: ScoringOptions) -> BLEU:
    try:
        return BLEU(options.lowercase, True, options.tokenize, references=references)
    except (RuntimeError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())  # how to install it comes last
        raise ConfigError(
            f"`--tokenize {options.tokenize}` cannot be used here: {reason}"
        ) from None
