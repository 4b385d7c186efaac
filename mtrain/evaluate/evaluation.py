"""Translate the test sets of a run and score them, or score their references by the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from mtrain.data import prepare
from mtrain.data.prepare import ParallelLines
from mtrain.decode.beam import length_penalty
from mtrain.decode.pipeline import BLOCK_LINES, LineTranslator, LongLines, Options, Warn
from mtrain.decode.translator import EncodedSource, Translator
from mtrain.errors import RunError
from mtrain.evaluate.metrics import Score, ScoringOptions, score
from mtrain.run.run_dir import RunDir


@dataclass(frozen=True)
class TestResult:
    """The translations of one test set beside their references, and the scores."""

    name: str
    lines: ParallelLines
    hypotheses: list[str]
    scores: list[Score]


def read_tests(run: RunDir, names: Sequence[str] | None = None) -> dict[str, ParallelLines]:
    """Return the text of a run's test sets, all or those that are named.

    Raises:
        RunError: if the run has no test sets, or not these, or their text is gone.
    """
    known = list(run.load_config().data.tests)
    if not known:
        raise RunError(f"{run.config_path}: `data.tests` must name a test set, but is empty.")
    for name in names or []:
        if name not in known:
            raise RunError(
                f"{run.path}: must have a test set {name!r}, but has {', '.join(known)} instead."
            )
    return {name: prepare.read_test(run, name) for name in dict.fromkeys(names or known)}


def evaluate(
    run: RunDir,
    translator: Translator,
    warn: Warn,
    options: ScoringOptions | None = None,
    names: Sequence[str] | None = None,
) -> list[TestResult]:
    """Translate test sets of a run, all or those that are named, and score them.

    Their lines are cut, and warned of, as `mtrain translate` does where nothing else is asked for.

    Raises:
        RunError: if the run has no test sets, or not these, or their text is gone.
    """
    results = []
    for name, lines in read_tests(run, names).items():
        hypotheses = list(_translated(run, translator, partial(_warn_of_test, warn, name), lines))
        scores = score(hypotheses, lines.tgt, options, lines.src)
        results.append(TestResult(name, lines, hypotheses, scores))
    return results


def _translated(
    run: RunDir, translator: Translator, warn: Warn, lines: ParallelLines
) -> Iterator[str]:
    options = Options(LongLines(run.load_config().data.max_tokens), with_scores=False)
    stream = LineTranslator(translator, options, prepare.read_profile(run), warn)
    firsts = range(0, len(lines.src), BLOCK_LINES)
    for line in stream.translate(lines.src[first : first + BLOCK_LINES] for first in firsts):
        yield line.best[0].text


def _warn_of_test(warn: Warn, name: str, text: str) -> None:
    warn(f"{name}: {text}")


def reference_scores(
    run: RunDir, translator: Translator, names: Sequence[str] | None = None
) -> Iterator[str]:
    """Yield what the model gives to each reference of test sets, tab-separated.

    The columns are the test set, the line from 1, the score, the log-probability, and the number
    of tokens, eos among them.
    """
    for name, lines in read_tests(run, names).items():
        sources = [EncodedSource(ids) for ids in translator.tokenizer.encode_src(lines.src)]
        targets = translator.tokenizer.tgt.encode(lines.tgt)
        for number, log_probs in enumerate(translator.score(sources, targets), start=1):
            penalty = length_penalty(len(log_probs), translator.decoding.length_alpha)
            log_prob = sum(log_probs)
            yield f"{name}\t{number}\t{log_prob / penalty:.6f}\t{log_prob:.6f}\t{len(log_probs)}"


def as_text(results: Sequence[TestResult]) -> list[str]:
    """Return two lines a score: the value with its interval, and the signature."""
    lines = []
    for result in results:
        for own in result.scores:
            lines.append(f"{result.name}  {own.metric} {own.shown()}")
            lines.append(f"  {own.signature}")
    return lines
