"""Scores of translations by sacreBLEU, each with its interval and its signature.

They equal what the `sacrebleu` command prints for the same lines. Independent of run folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.error import URLError

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest, estimate_ci
from sacrebleu.utils import SACREBLEU_DIR

from mtrain.errors import ConfigError
from mtrain.evaluation.comet import CometModel, Floats, resampled_means
from mtrain.io.text_width import count

METRICS = ("bleu", "chrf", "chrf++", "ter")  # as the user names them
_CASED = tuple(name for name in METRICS if name != "ter")  # of which case can be ignored
_MIN_VARIETY = 0.2  # distinct outputs per distinct reference; below it, a warning
_MIN_VARIED = 10  # distinct references; with fewer, no warning
_MAX_DIGITS = 30  # after the point, so that a printed float is the same float
# an interval of 95% cuts one in 40 on either side; a resample of a line takes 80 bytes
_LEAST_RESAMPLES, _MOST_RESAMPLES = 40, 10_000
# sacreBLEU's tokenizers for languages that are written without spaces, or are scored by morphemes:
# the first that is installed. Names and the usual wrong codes count, too
_TOKENIZERS = {
    "bo bod dz dzo km khm lo lao my mya shn th tha tib bur": ["char"],
    "burmese dzongkha khmer shan thai tibetan": ["char"],
    "ja jpn japanese jp": ["ja-mecab", "char"],
    "ko kor korean": ["ko-mecab"],
    "zh chi cmn lzh wuu yue zho zt cantonese chinese cn mandarin": ["zh"],
}
# BLEU that the same output for every source can reach, by tokenizer, with a margin
_NOISE_BLEU = {"char": 20.0, "zh": 10.0}
_NOISE_BLEU_OF_WORDS = 3.0
_TOKENIZERS_OF = {code: names for codes, names in _TOKENIZERS.items() for code in codes.split()}


class TestSet(NamedTuple):
    """Lines to translate, and one or several lists of references with a line for each."""

    src: list[str]
    refs: list[list[str]]

    def rows(self, rows: Sequence[int]) -> TestSet:
        """Return the test set of these rows, in this order."""
        src, *refs = ([lines[row] for row in rows] for lines in (self.src, *self.refs))
        return TestSet(src, refs)


def ignored_source(
    src: Sequence[str], references: Sequence[str], hypotheses: Sequence[str]
) -> str | None:
    """Return a warning that a model ignores its source; None if it does not.

    Such a model has far fewer distinct outputs than there are distinct references. None also if
    there are too few distinct references to tell.
    """
    outputs = dict(zip(src, zip(references, hypotheses, strict=True), strict=True))
    num_expected = len({reference for reference, _ in outputs.values()})
    num_found = len({hypothesis for _, hypothesis in outputs.values()})
    if num_expected < _MIN_VARIED or num_found >= _MIN_VARIETY * num_expected:
        return None
    alike = count(num_found, "different translation")
    return (
        f"{len(outputs):,} different sources have only {alike}: the model ignores its source; "
        "train it longer, with a lower `training.lr` or a longer `training.warmup_steps`"
    )


@dataclass(frozen=True)
class Score:
    """The score of a translation by one metric."""

    metric: str  # as sacreBLEU prints it
    value: float
    signature: str  # sacreBLEU's, with the version and all settings
    mean: float | None = None  # of the scores of the bootstrap resamples, if there are any
    half_width: float | None = None  # of the interval around `mean` that holds 95% of them
    verbose: str = ""  # BLEU's precisions and lengths, as sacreBLEU prints them

    def format(self) -> str:
        """Return the value, and the interval unless its mean is 0, as sacreBLEU prints them."""
        text = format_score(self.metric, self.value)
        if not self.mean or self.half_width is None:
            return text
        mean = format_score(self.metric, self.mean)
        return f"{text} (μ = {mean} ± {format_score(self.metric, self.half_width)})"


def format_score(metric: str, value: float) -> str:
    """Format a score: COMET's, which is at most about 1, with more decimals than the others."""
    return f"{value:.{4 if metric == 'COMET' else 2}f}"


@dataclass(frozen=True)
class ScoringOptions:
    """Which metrics are computed, and how.

    Args:
        tokenize: sacreBLEU's tokenizer for BLEU; None is that of the target language, and 13a where
            no language is known.
        lowercase: whether BLEU and chrF ignore case; TER always does, COMET never.
        metrics: some of bleu, chrf, chrf++ and ter.
        num_resamples: of the test set, for intervals and the paired bootstrap; 0 computes no
            intervals. Memory grows with this times the number of lines.
        comet: a model of COMET, one more metric.

    Raises:
        ConfigError: if an option is invalid, or does not apply to the metrics.
    """

    tokenize: str | None = None
    lowercase: bool = False
    metrics: Sequence[str] = ("bleu", "chrf")
    num_resamples: int = 1000
    comet: CometModel | None = None

    def __post_init__(self) -> None:
        if isinstance(self.metrics, str):
            raise ConfigError(
                "`metrics` must be a list of metrics, but is one text; put it in a list."
            )
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"`--metrics` must be some of {', '.join(METRICS)}, but has {name!r} instead"
                    f"{'; `--comet PATH` asks for COMET' * (name == 'comet')}."
                )
        if self.tokenize is not None and self.tokenize not in BLEU.TOKENIZERS:
            known = ", ".join(sorted(BLEU.TOKENIZERS))
            raise ConfigError(
                f"`--tokenize` must be one of {known}, but is {self.tokenize!r} instead."
            )
        if self.tokenize is not None and "bleu" not in self.metrics:
            raise ConfigError("`--tokenize` needs the metric bleu.")
        if self.lowercase and not set(_CASED) & set(self.metrics):
            named = f"{', '.join(_CASED[:-1])} or {_CASED[-1]}"
            raise ConfigError(f"`--lowercase` needs the metric {named}.")
        if "bleu" in self.metrics:
            _bleu(None, self)  # raises before anything is translated
        if self.num_resamples and not _LEAST_RESAMPLES <= self.num_resamples <= _MOST_RESAMPLES:
            raise ConfigError(
                f"`--resamples` must be 0 or from {_LEAST_RESAMPLES} to {_MOST_RESAMPLES:,}, but "
                f"is {self.num_resamples} instead."
            )
        seed = os.environ.get("SACREBLEU_SEED", "none")
        is_seed = seed.lower() == "none" or (seed.isascii() and seed.isdigit())
        if self.num_resamples and not is_seed:
            raise ConfigError(
                f"`SACREBLEU_SEED` must be a whole number or none, but is {seed!r} instead."
            )

    def for_language(self, tgt_lang: str) -> ScoringOptions:
        """Return the options with BLEU's tokenizer for a target language, unless they name one."""
        if self.tokenize is not None or "bleu" not in self.metrics:
            return self
        return replace(self, tokenize=language_tokenizer(tgt_lang))


def language_tokenizer(tgt_lang: str) -> str | None:
    """Return sacreBLEU's tokenizer for a target language; None if it is the default, 13a.

    `tgt_lang` is a code such as zh, zh-TW or tha_Thai.
    """
    return next(filter(_is_installed, _fitting_tokenizers(tgt_lang)), None)


def _fitting_tokenizers(tgt_lang: str) -> list[str]:
    code, *subtags = re.split("[-_]", tgt_lang.lower())
    return [] if "latn" in subtags else _TOKENIZERS_OF.get(code, [])


def tokenizer_note(tgt_lang: str) -> str | None:
    """Return a note on BLEU's tokenizer for a target language; None if the default, 13a, fits."""
    fitting = _fitting_tokenizers(tgt_lang)
    if not fitting:
        return None
    name, better = language_tokenizer(tgt_lang) or "13a", fitting[0]
    note = f"BLEU's tokenizer for {tgt_lang} is {name}"
    if name != better:
        note += f"; {better} needs `pip install 'sacrebleu[{better.partition('-')[0]}]'`"
    return note


def noise_bleu(tgt_lang: str) -> float:
    """Return the BLEU below which differences are noise, by the tokenizer of the language."""
    return _NOISE_BLEU.get(language_tokenizer(tgt_lang) or "", _NOISE_BLEU_OF_WORDS)


def _is_installed(tokenizer: str) -> bool:
    try:
        BLEU(tokenize=tokenizer)
    except (RuntimeError, ImportError, OSError, AssertionError):  # or has another dictionary
        return False
    return True


class Scorer:
    """The metrics of a test set; the references are processed once for all systems."""

    def __init__(self, test: TestSet, options: ScoringOptions) -> None:
        """Take raw text; only COMET reads the sources, and it reads the first references only."""
        self.options, self._test = options, test
        self.metrics = [
            _metric(name, test.refs, options) for name in dict.fromkeys(options.metrics)
        ]

    def score(self, hypotheses: Sequence[str]) -> list[Score]:
        """Return the score of detokenised lines by each metric."""
        scores = [self._score(metric, list(hypotheses)) for metric in self.metrics]
        comet, num_resamples = self.options.comet, self.options.num_resamples
        if comet is not None:
            values = self.comet_values(hypotheses)
            value, signature = float(values.mean()), comet.signature()
            mean = half_width = None
            if num_resamples:
                mean, half_width = map(float, estimate_ci(resampled_means(values, num_resamples)))
                signature = comet.signature("bs", num_resamples)
            scores.append(Score("COMET", value, signature, mean, half_width))
        return scores

    def _score(self, metric: Metric, hypotheses: list[str]) -> Score:
        """Return a score with the interval that the `sacrebleu` command shows.

        sacreBLEU 2.6 fails where some resamples score 0: it cannot take the mean of their Python
        floats and the others' float32. Its paired test of one system can, and differs in the last
        digits of a float32 only.
        """
        num_resamples = self.options.num_resamples
        drawn: Any = None
        try:
            result = metric.corpus_score(hypotheses, None, n_bootstrap=num_resamples or 1)
        except TypeError:
            result = metric.corpus_score(hypotheses, None)
            test = PairedTest([("", hypotheses)], {"": metric}, None, "bs", num_resamples)
            drawn = test()[1][result.name][0]
        signature = str(metric.get_signature())  # names the resampling, if there was one
        printed = json.loads(result.format(_MAX_DIGITS, signature=signature, is_json=True))
        mean = half_width = None
        if drawn is not None:
            mean, half_width = float(drawn.mean), float(drawn.ci)
        elif num_resamples:
            mean, half_width = (printed.get(f"confidence_{key}", 0.0) for key in ("mean", "var"))
        verbose = printed.get("verbose_score", "")
        return Score(result.name, float(result.score), signature, mean, half_width, verbose)

    def comet_values(self, hypotheses: Sequence[str]) -> Floats:
        """Return COMET's score of each line."""
        assert self.options.comet is not None
        return self.options.comet.score(self._test.src, self._test.refs[0], hypotheses)


def bleu(hypotheses: Sequence[str], references: Sequence[str], tgt_lang: str) -> float:
    """Return BLEU with sacreBLEU's defaults for a target language."""
    options = ScoringOptions(metrics=("bleu",), num_resamples=0).for_language(tgt_lang)
    return Scorer(TestSet([], [list(references)]), options).score(hypotheses)[0].value


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
    except URLError as error:
        raise ConfigError(
            f"`--tokenize {options.tokenize}` needs a model that sacreBLEU downloads into "
            f"{SACREBLEU_DIR}/models, but it cannot be reached: {error.reason}."
        ) from None
    except (RuntimeError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())  # ends with how to install it
        raise ConfigError(
            f"`--tokenize {options.tokenize}` cannot be used here: {reason}"
        ) from None
