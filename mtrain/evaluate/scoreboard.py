"""Which systems are measured, and what is said of them: runs, other runs, files of translations.

A report of each test set. What can be checked is checked before anything is translated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.data.prepare import ParallelLines
from mtrain.decode.distributed import Load
from mtrain.decode.pipeline import Warn
from mtrain.errors import ConfigError, RunError
from mtrain.evaluate import breakdown, frequencies, significance
from mtrain.evaluate.breakdown import Breakdown, Contrast
from mtrain.evaluate.evaluation import TestResult, evaluate, read_tests
from mtrain.evaluate.metrics import ScoringOptions, score
from mtrain.evaluate.significance import SystemComparison, SystemOutput
from mtrain.io.lines import read_lines
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece

_APART = ("run_dir", "seed")  # what may differ between runs whose scores are averaged


@dataclass(frozen=True)
class EvaluationPlan:
    """What is to be measured.

    Attributes:
        runs: one, or several of different seeds.
        others: what a single run is compared with: run folders and files of translations.
        names: the test sets; None for all that the first run has.
        options: how is scored.
        with_details: whether scores are broken down.
    """

    runs: list[RunDir]
    others: list[Path]
    names: list[str] | None
    options: ScoringOptions
    with_details: bool = False

    def __post_init__(self) -> None:
        if self.others and len(self.runs) > 1:
            raise ConfigError(f"`--compare` must have one run, but has {len(self.runs)} instead.")
        if self.others and self.options.num_resamples == 0:
            raise ConfigError("`--resamples` must not be 0 beside `--compare`, but is.")

    @property
    def paths(self) -> list[Path]:
        """All systems, in the order of the command line."""
        return [run.path for run in self.runs] + self.others


@dataclass(frozen=True)
class ScoreSummary:
    """The scores of several runs by one metric: their mean and sample standard deviation."""

    metric: str
    num_runs: int
    mean: float
    std: float


@dataclass(frozen=True)
class System:
    """A system, by the name that the user gave it, its result, and the parts of its scores."""

    name: str
    result: TestResult
    parts: Breakdown | None


@dataclass(frozen=True)
class TestReport:
    """All that is said of a test set.

    Attributes:
        name: of the test set.
        num_lines: of the test set.
        systems: in the order of the command line.
        summary: of several runs, by metric.
        comparisons: of each other system with the first, by metric.
        contrasts: of each other system with the first, if details are wanted.
    """

    name: str
    num_lines: int
    systems: list[System]
    summary: list[ScoreSummary]
    comparisons: list[SystemComparison]
    contrasts: list[Contrast]


def measure(plan: EvaluationPlan, load: Load, warn: Warn) -> list[TestReport]:
    """Translate and score test sets; return a report of each.

    Args:
        plan: what is measured.
        load: lends the translator of a run.
        warn: is told what makes runs hard to compare, and what looks wrong about lines.

    Raises:
        ConfigError, DataError, RunError: if what is asked for does not fit together.
    """
    tests, translations = _checked(plan)
    if plan.options.comet is not None:
        plan.options.comet.load()
    for text in _differences(plan.runs):
        warn(text)
    found: dict[str, list[System]] = {name: [] for name in tests}
    for path in plan.paths:
        if path in translations:
            results = _scored(translations[path], plan, tests)
        else:
            results = _translated(path, plan, tests, load, warn)
        for result in results:
            found[result.name].append(System(str(path), result, None))
    return [_report(name, tests[name], systems, plan) for name, systems in found.items()]


class _Checked(NamedTuple):
    """The test sets, and the lines of each file of translations, which is read but once."""

    tests: dict[str, ParallelLines]
    translations: dict[Path, list[str]]


def _checked(plan: EvaluationPlan) -> _Checked:
    """Return the test sets of the first run, and see that the other systems are of the same."""
    paths = plan.paths
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{path}: must be named once, but is named twice.")
    tests = read_tests(plan.runs[0], plan.names)
    translations = {}
    for path in paths[1:]:
        if path.is_dir():
            own = read_tests(RunDir(path), list(tests))
            for name, lines in own.items():
                _check_references(path, name, lines.tgt, plan, tests[name].tgt)
        else:
            translations[path] = _read_file(path, tests)
    return _Checked(tests, translations)


def _check_references(
    path: Path, name: str, own: Sequence[str], plan: EvaluationPlan, wanted: Sequence[str]
) -> None:
    """Refuse a run whose references are not those of the first run."""
    first = plan.runs[0].path
    if len(own) != len(wanted):
        raise RunError(
            f"{path}: must have the {len(wanted):,} lines of {name!r} that {first} has, but has "
            f"{len(own):,} instead."
        )
    pairs = list(zip(own, wanted, strict=True))
    differing = [row for row, (one, other) in enumerate(pairs, start=1) if one != other]
    is_case = all(one.lower() == other.lower() for one, other in pairs)
    if differing and not (is_case and plan.options.lowercase):
        raise RunError(
            f"{path}: must have the references of {name!r} that {first} has, but line "
            f"{differing[0]:,} is another{'; `--lowercase` takes both' * is_case}."
        )


def _read_file(path: Path, tests: Mapping[str, ParallelLines]) -> list[str]:
    """Read a file of translations, which can be of one test set only."""
    if not path.exists():
        raise ConfigError(f"{path}: must be a run folder or a file of translations, but is none.")
    if len(tests) > 1:
        raise ConfigError(
            f"{path}: must be compared on one test set, but there are {', '.join(tests)}; choose "
            "one with `--tests`."
        )
    lines = list(read_lines(path))
    for name, test in tests.items():
        if len(lines) != len(test.tgt):
            raise ConfigError(
                f"{path}: must have a line for each of the {len(test.tgt):,} lines of {name!r}, "
                f"but has {len(lines):,} instead."
            )
    return lines


def _translated(
    path: Path, plan: EvaluationPlan, tests: Mapping[str, ParallelLines], load: Load, warn: Warn
) -> Iterator[TestResult]:
    """Translate the test sets by a run, and score them."""
    run = RunDir(path)
    with load(run) as translator:
        yield from evaluate(run, translator, warn, plan.options, list(tests))


def _scored(
    hypotheses: list[str], plan: EvaluationPlan, tests: Mapping[str, ParallelLines]
) -> Iterator[TestResult]:
    """Score translations of the one test set."""
    for name, lines in tests.items():
        scores = score(hypotheses, lines.tgt, plan.options, lines.src)
        yield TestResult(name, lines, hypotheses, scores)


def _report(
    name: str, lines: ParallelLines, systems: list[System], plan: EvaluationPlan
) -> TestReport:
    outputs = [SystemOutput(system.name, system.result.hypotheses) for system in systems]
    comparisons, contrasts = [], []
    if plan.others:
        comparisons = significance.compare(outputs, lines.tgt, plan.options, lines.src)
    if plan.with_details:
        training = _training_counts(plan.runs[0], lines.src)
        systems = [
            replace(system, parts=breakdown.break_down(lines, output, plan.options, training))
            for system, output in zip(systems, outputs, strict=True)
        ]
        others = outputs[1:] if plan.others else []
        contrasts = [breakdown.contrast(lines, outputs[0], one, plan.options) for one in others]
    summary = _summary(systems) if len(plan.runs) > 1 else []
    return TestReport(name, len(lines.tgt), systems, summary, comparisons, contrasts)


def _training_counts(run: RunDir, sources: Sequence[str]) -> Mapping[str, int] | None:
    """Return how often the words of a test set stand in the training text of the first run."""
    unit = frequencies.unit_of(sources)
    words = {word for line in sources for word in frequencies.split(line, unit)}
    return frequencies.in_training(run, sentencepiece.load(run.tokenizer_dir), words, unit)


def _summary(systems: Sequence[System]) -> list[ScoreSummary]:
    found = []
    for scores in zip(*(system.result.scores for system in systems), strict=True):
        values = [score.value for score in scores]
        mean, std = statistics.mean(values), statistics.stdev(values)
        found.append(ScoreSummary(scores[0].metric, len(values), mean, std))
    return found


def _differences(runs: Sequence[RunDir]) -> Iterator[str]:
    """Say which runs differ from the first one in more than the seed, or not even in it."""
    first = dict(_keys(runs[0].load_config().model_dump()))
    for run in runs[1:]:
        own = dict(_keys(run.load_config().model_dump()))
        keys = [key for key in first | own if first.get(key) != own.get(key)]
        if "seed" not in keys:
            yield f"{run.path}: has the seed of {runs[0].path}, {own['seed']}."
        others = [f"`{key}`" for key in keys if key not in _APART]
        if others:
            yield f"{run.path}: differs from {runs[0].path} in {', '.join(others)}."


def _keys(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and above != "data.":
            yield from _keys(value, f"{above}{key}.")
        else:
            yield above + key, value
