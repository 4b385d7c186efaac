"""Translate the test sets of a run and score them by sacreBLEU, each score with its signature."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from mtrain import prepare
from mtrain.errors import ConfigError, RunError
from mtrain.prepare import Lines
from mtrain.rundir import RunDir
from mtrain.search import length_penalty
from mtrain.translate import Source, Translator


@dataclass(frozen=True)
class Score:
    """A metric's name, its value, and the signature that says how it was computed."""

    metric: str
    value: float
    signature: str


@dataclass(frozen=True)
class ScoringOptions:
    """How BLEU splits words (None: sacreBLEU's default, 13a), and whether case counts."""

    tokenize: str | None = None
    lowercase: bool = False

    def __post_init__(self) -> None:
        if self.tokenize is not None and self.tokenize not in BLEU.TOKENIZERS:
            known = ", ".join(sorted(name for name in BLEU.TOKENIZERS))
            raise ConfigError(
                f"--tokenize must be one of {known}, but is {self.tokenize!r} instead."
            )


def score(
    hypotheses: Sequence[str], references: Sequence[str], options: ScoringOptions | None = None
) -> list[Score]:
    """Return BLEU and chrF of detokenised lines against raw references."""
    options = options or ScoringOptions()
    metrics: dict[str, Metric] = {"BLEU": _bleu(options), "chrF": CHRF(lowercase=options.lowercase)}
    return [
        Score(
            name,
            float(metric.corpus_score(list(hypotheses), [list(references)]).score),
            str(metric.get_signature()),
        )
        for name, metric in metrics.items()
    ]


def _bleu(options: ScoringOptions) -> BLEU:
    try:
        return BLEU(tokenize=options.tokenize, lowercase=options.lowercase, force=True)
    except (RuntimeError, ImportError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--tokenize {options.tokenize} cannot be used here: {reason}") from None


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return BLEU with sacreBLEU's defaults."""
    return score(hypotheses, references)[0].value


@dataclass(frozen=True)
class TestResult:
    """The translations of one test set beside their references, and the scores."""

    name: str
    lines: Lines
    hypotheses: list[str]
    scores: list[Score]


def evaluate(
    run: RunDir, translator: Translator, options: ScoringOptions | None = None
) -> list[TestResult]:
    """Translate and score every test set of a run.

    Raises:
        RunError: if the run has no test sets, or their text is gone.
    """
    names = list(run.load_config().data.tests)
    if not names:
        raise RunError(f"{run.config_path}: `data.tests` must name a test set, but is empty.")
    results = []
    for name in names:
        lines = prepare.read_test(run, name)
        hypotheses = translator.translate(lines.src)
        results.append(TestResult(name, lines, hypotheses, score(hypotheses, lines.tgt, options)))
    return results


def reference_scores(run: RunDir, translator: Translator) -> Iterator[str]:
    """Yield what the model gives to each reference of each test set, tab-separated.

    The columns are the test set, the line from 1, the score, the log-probability, and the number
    of tokens, eos among them.
    """
    for name in run.load_config().data.tests:
        lines = prepare.read_test(run, name)
        sources = [Source(ids) for ids in translator.tokenizer.encode_src(lines.src)]
        targets = translator.tokenizer.tgt.encode(lines.tgt)
        for number, log_probs in enumerate(translator.score(sources, targets), start=1):
            penalty = length_penalty(len(log_probs), translator.decoding.length_alpha)
            log_prob = sum(log_probs)
            yield f"{name}\t{number}\t{log_prob / penalty:.6f}\t{log_prob:.6f}\t{len(log_probs)}"


def as_text(results: Sequence[TestResult]) -> list[str]:
    """Return two lines a score: the value, and the signature."""
    lines = []
    for result in results:
        for score in result.scores:
            lines.append(f"{result.name}  {score.metric} {score.value:.2f}")
            lines.append(f"  {score.signature}")
    return lines


def as_json(results: Sequence[TestResult]) -> list[str]:
    """Return the scores of every test set as lines of one JSON object."""
    tree = {result.name: [asdict(score) for score in result.scores] for result in results}
    return json.dumps(tree, indent=2).split("\n")
