"""Translate test sets by one or several systems, score them, and compare the systems.

A system is a run, or a file of translations. Inputs are checked before translating.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mtrain.config import config_file
from mtrain.config.sections import Config
from mtrain.corpus import length_stats
from mtrain.data import prepare
from mtrain.decode.beam import length_penalty
from mtrain.decode.pipeline import SearchEngine, Warn, translate_lines
from mtrain.decode.translator import Translator
from mtrain.errors import ConfigError, DataError, RunError, UserError
from mtrain.evaluation import breakdown, significance
from mtrain.evaluation.breakdown import Breakdown, Contrast
from mtrain.evaluation.metrics import (
    Score,
    Scorer,
    ScoringOptions,
    TestSet,
    ignored_source,
    tokenizer_note,
)
from mtrain.evaluation.significance import SystemComparison
from mtrain.io.lines import ignore, read_lines
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE, ProcessGroup

_KEYS_OF_A_SEED = ("run_dir", "seed")  # keys in which averaged runs may differ


@dataclass(frozen=True)
class TestResult:
    """A test set, its translations by one system, and their scores."""

    name: str  # of the test set
    system: str  # the run folder or the file of translations
    lines: TestSet
    hypotheses: list[str]
    scores: list[Score]  # by each metric
    breakdown: Breakdown | None = None  # if asked for


@dataclass(frozen=True)
class ScoreSummary:
    """The scores of several runs by one metric: their mean and sample standard deviation."""

    metric: str
    num_runs: int
    mean: float
    std: float


@dataclass(frozen=True)
class TestReport:
    """The evaluation of one test set."""

    results: list[TestResult]  # of each system, in the order of the command line
    comparisons: list[SystemComparison]  # of each other system with the first
    summary: Sequence[ScoreSummary] = ()  # of several runs
    contrasts: Sequence[Contrast] = ()  # of each other system with the first, if asked for


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate."""

    runs: list[RunDir]  # one, or several of different seeds, or of an ensemble
    others: list[Path]  # what the first system is compared with: runs, files of translations
    names: Sequence[str] | None  # the test sets; None for all of the first run
    options: ScoringOptions
    with_details: bool = False  # whether scores are broken down
    text: Mapping[str, TestSet] | None = None  # test sets from files, instead of the runs'
    search: Mapping[str, object] = field(default_factory=dict)  # options of the runs' translation
    is_ensemble: bool = False  # whether the runs translate together, as the first system

    def __post_init__(self) -> None:
        if self.others and len(self.systems) > 1:
            raise ConfigError(f"`--compare` must have one run, but has {len(self.runs)} instead.")
        if self.others and self.options.num_resamples == 0:
            raise ConfigError("`--resamples` must be > 0 with `--compare`, but is 0 instead.")
        num_refs = max((len(test.refs) for test in (self.text or {}).values()), default=1)
        if self.options.comet is not None and num_refs > 1:
            raise ConfigError(f"`--comet` must have one `--ref`, but has {num_refs} instead.")

    @property
    def systems(self) -> dict[str, list[RunDir]]:
        """The runs that each system translates with; the name of an ensemble is all its paths."""
        systems = [self.runs] if self.is_ensemble else [[run] for run in self.runs]
        return {" + ".join(str(run.path) for run in system): system for system in systems}


def read_files(src: Path, refs: Sequence[Path]) -> dict[str, TestSet]:
    """Return {name of `src`: test set} for a source file and its reference files.

    Raises:
        DataError: if a file cannot be read, is empty, or has fewer or more lines than another.
    """
    sources, *references = (list(read_lines(path)) for path in (src, *refs))
    if not sources:
        raise DataError(f"{src}: must have at least one line, but is empty.")
    for path, lines in zip(refs, references, strict=True):
        if len(lines) != len(sources):
            raise DataError(
                f"{path}: must have a line for each of the {len(sources):,} lines of {src}, but "
                f"has {len(lines):,} instead."
            )
    return {src.name: TestSet(sources, references)}


def read_tests(run: RunDir, names: Sequence[str] | None = None) -> dict[str, TestSet]:
    """Return the text of a run's test sets, all or those that are named.

    Raises:
        RunError: if the run has no test sets, or not these, or their text is missing.
    """
    known = list(run.config.data.tests)
    if not known:
        raise RunError(f"{run.config_path}: `data.tests` must name a test set, but is empty.")
    for name in names or []:
        if name not in known:
            raise RunError(
                f"{run.path}: must have a test set {name!r}, but has {', '.join(known)} instead."
            )
    texts = {name: prepare.read_test(run, name) for name in dict.fromkeys(names or known)}
    return {name: TestSet(src, [tgt]) for name, (src, tgt) in texts.items()}


def evaluate(
    runs: RunDir | Sequence[RunDir],
    translator: SearchEngine,
    warn: Warn,
    options: ScoringOptions | None = None,
) -> list[TestResult]:
    """Translate the test sets of a run, or of the first run of an ensemble, and score them.

    Translations and warnings are those of `mtrain translate` with its default options.

    Raises:
        RunError: if the run has no test sets, or their text is missing.
    """
    folders = [runs] if isinstance(runs, RunDir) else list(runs)
    options, is_ensemble = options or ScoringOptions(), len(folders) > 1
    plan = EvaluationPlan(folders, [], None, options, is_ensemble=is_ensemble)
    reports, _ = evaluate_systems(plan, lambda _: translator, warn)
    return [result for report in reports for result in report.results]


def translate_tests(
    run: RunDir, translator: SearchEngine, tests: Mapping[str, TestSet], warn: Warn
) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each test set with its translations; all ranks call together."""
    stats = length_stats.load(run.data_dir)
    for name, lines in tests.items():

        def warn_of_test(text: str, name: str = name) -> None:
            warn(f"{name}: {text}")

        hypotheses = translate_lines(translator, lines.src, stats, warn_of_test)
        if warning := ignored_source(lines.src, lines.refs[0], hypotheses):
            warn_of_test(warning)
        yield name, hypotheses


def reference_scores(translator: Translator, tests: Mapping[str, TestSet]) -> Iterator[str]:
    """Yield the model's score of each first reference of test sets, tab-separated.

    The columns are the test set, the line number from 1, the score (log-probability divided by the
    length penalty), the log-probability, and the number of tokens with eos.
    """
    for name, lines in tests.items():
        pairs = list(zip(lines.src, lines.refs[0], strict=True))
        for number, log_probs in enumerate(translator.score_texts(pairs), start=1):
            penalty = length_penalty(len(log_probs), translator.options.length_alpha)
            log_prob = sum(log_probs)
            yield f"{name}\t{number}\t{log_prob / penalty:.6f}\t{log_prob:.6f}\t{len(log_probs)}"


def evaluate_systems(
    plan: EvaluationPlan,
    load: Callable[[Sequence[RunDir]], SearchEngine],
    warn: Warn,
    is_scored: bool = True,
    read: Callable[[RunDir, Sequence[str] | None], dict[str, TestSet]] = read_tests,
    check: Callable[[Sequence[RunDir]], object] = ignore,
) -> tuple[list[TestReport], dict[str, dict[str, list[str]]]]:
    """Translate and score test sets by all systems of a plan; all ranks call together.

    All systems are scored on the text of the first run's test sets, or on `plan.text` if it is set.

    Args:
        plan: what to evaluate.
        load: loads the translator of the runs of a system.
        warn: called with differences between runs, and with warnings about lines.
        is_scored: False makes no reports, as for ranks that only translate.
        read: returns the test sets of a run, as `read_tests`.
        check: raises UserError if `load` cannot load a system; called before any translates.

    Returns:
        a report of each test set; and for each, by name, the translations by system.

    Raises:
        ConfigError, DataError, RunError: if the systems and options do not fit together.
    """
    paths = [run.path for run in plan.runs if not plan.is_ensemble] + plan.others
    resolved = [path.resolve() for path in paths]
    for path, absolute in zip(paths, resolved, strict=True):
        if resolved.count(absolute) > 1:
            raise ConfigError(f"{path}: must be named once, but is named twice.")
    tests = plan.text or read(plan.runs[0], plan.names)
    systems = plan.systems
    systems |= {str(path): [RunDir(path)] if path.is_dir() else [] for path in plan.others}
    first, *following = systems
    tests_of, translations = {first: tests}, {}
    for system in following:
        if runs := systems[system]:
            runs[0].check_direction(plan.runs[0].directions, f"as {plan.runs[0].path} does")
            tests_of[system] = plan.text or read(runs[0], list(tests))
            for name, lines in tests_of[system].items():
                _check_references(runs[0].path, name, lines.refs[0], plan, tests[name].refs[0])
        else:
            translations[system] = _read_translations(Path(system), tests)
    for runs in filter(None, systems.values()):
        check(runs)
    if plan.options.comet is not None:
        plan.options.comet.load()
    if not plan.is_ensemble:
        for text in _differences({run.path: run.config for run in plan.runs}):
            warn(text)
    tgt_lang = plan.runs[0].config.data.tgt_lang
    options = plan.options.for_language(tgt_lang)
    is_default = plan.options.tokenize is None and "bleu" in plan.options.metrics
    if is_default and (note := tokenizer_note(tgt_lang)):
        warn(f"{note}; `--tokenize` takes another")
    outputs: dict[str, dict[str, list[str]]] = {name: {} for name in tests}
    has_several = sum(map(bool, systems.values())) > 1
    for system, runs in systems.items():
        if not runs:
            (name,) = tests
            outputs[name][system] = translations[system]
            continue

        def warn_of_system(text: str, system: str = system) -> None:
            warn(f"{system}: {text}" if has_several else text)

        of_tests = translate_tests(runs[0], load(runs), tests_of[system], warn_of_system)
        for name, hypotheses in of_tests:
            outputs[name][system] = hypotheses
    if not is_scored:
        return [], outputs
    counts = None
    if plan.with_details:
        counts = breakdown.count_in_training(plan.runs[0], [lines.src for lines in tests.values()])
    return [
        _report(name, lines, outputs[name], plan, options, counts) for name, lines in tests.items()
    ], outputs


def _check_references(
    path: Path, name: str, references: Sequence[str], plan: EvaluationPlan, first: Sequence[str]
) -> None:
    """Refuse a run whose references are not those of the first run."""
    first_path = plan.runs[0].path
    if len(references) != len(first):
        raise RunError(
            f"{path}: must have the {len(first):,} lines of {name!r} that {first_path} has, but "
            f"has {len(references):,} instead."
        )
    pairs = list(zip(references, first, strict=True))
    differing = [number for number, (line, other) in enumerate(pairs, start=1) if line != other]
    is_case = all(line.lower() == other.lower() for line, other in pairs)
    if differing and not (is_case and plan.options.lowercase):
        raise RunError(
            f"{path}: must have the references of {name!r} that {first_path} has, but line "
            f"{differing[0]:,} is another{'; `--lowercase` takes both' * is_case}."
        )


def _read_translations(path: Path, tests: Mapping[str, TestSet]) -> list[str]:
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
        if len(lines) != len(test.src):
            raise ConfigError(
                f"{path}: must have a line for each of the {len(test.src):,} lines of {name!r}, "
                f"but has {len(lines):,} instead."
            )
    return lines


def _report(
    name: str,
    lines: TestSet,
    outputs: Mapping[str, list[str]],
    plan: EvaluationPlan,
    options: ScoringOptions,
    counts: Mapping[breakdown.Unit, Mapping[str, int]] | None,
) -> TestReport:
    scorer = Scorer(lines, options)
    breakdowns: dict[str, Breakdown] = {}
    contrasts = []
    if plan.with_details:
        for system, hypotheses in outputs.items():
            breakdowns[system] = breakdown.break_down(lines, system, hypotheses, options, counts)
        others = list(outputs)[1:] if plan.others else []
        contrasts = [breakdown.contrast(lines, outputs, system, options) for system in others]
    results = [
        TestResult(
            name, system, lines, hypotheses, scorer.score(hypotheses), breakdowns.get(system)
        )
        for system, hypotheses in outputs.items()
    ]
    summary = []
    if len(plan.systems) > 1:
        for scores in zip(*(result.scores for result in results), strict=True):
            values = [score.value for score in scores]
            mean, std = statistics.mean(values), statistics.stdev(values)
            summary.append(ScoreSummary(scores[0].metric, len(values), mean, std))
    comparisons = significance.compare(scorer, outputs) if plan.others else []
    return TestReport(results, comparisons, summary, contrasts)


def report_on(
    name: str, lines: TestSet, outputs: Mapping[str, list[str]], options: ScoringOptions
) -> TestReport:
    """Score translations of a test set, and compare all systems with the first."""
    scorer = Scorer(lines, options)
    results = [
        TestResult(name, system, lines, hypotheses, scorer.score(hypotheses))
        for system, hypotheses in outputs.items()
    ]
    return TestReport(results, significance.compare(scorer, outputs))


def before_and_after(
    run: RunDir,
    load: Callable[[Sequence[RunDir]], SearchEngine],
    warn: Warn,
    options: ScoringOptions,
    known: Mapping[str, list[str]] | None = None,
    process_group: ProcessGroup = SINGLE,
) -> list[TestReport]:
    """Score a run and the run that it was fine-tuned from on the test sets of both; compare them.

    The first system of each report is the run before fine-tuning. There are no reports if the run
    has no `training.init_from`, or if that run cannot be loaded; then `warn` is called.

    Args:
        run: the fine-tuned run.
        load: loads the translator of a run.
        warn: called with warnings about translations; only that of rank 0 may print.
        options: how to score; if `num_resamples` is 0, there are no reports.
        known: translations by the run of its own test sets, by name.
        process_group: of the translators. All ranks must call this; rank 0 returns the reports, the
            other ranks an empty list.
    """
    init_from = run.config.training.init_from
    if init_from is None or not options.num_resamples:
        return []
    other = RunDir(Path(init_from))
    try:
        tests, before = _tests_of_both(run, other, warn), load([other])
    except UserError as error:
        warn(f"`training.init_from`: no scores of before: {error}")
        return []
    old = dict(translate_tests(other, before, tests, lambda _: None))
    new = dict(known or {})
    missing = {name: lines for name, lines in tests.items() if name not in new}
    if missing:
        new |= translate_tests(run, load([run]), missing, warn)
    if not process_group.is_first:
        return []
    reports = []
    for name, lines in tests.items():
        outputs = {str(other.path): old[name], str(run.path): new[name]}
        owner = run if name in run.config.data.tests else other
        tgt_lang = owner.config.data.tgt_lang  # the runs may differ in it
        reports.append(report_on(name, lines, outputs, options.for_language(tgt_lang)))
    return reports


def _tests_of_both(run: RunDir, other: RunDir, warn: Warn) -> dict[str, TestSet]:
    """Return the test sets of two runs by name; those with the same content are listed once.

    If both runs give different test sets the same name, that of `other` becomes "NAME of FOLDER".
    Without the text of those of `other`, as in a copy that only translates, they are left out.
    """
    tests = read_tests(run) if run.config.data.tests else {}
    if other.config.data.tests:
        try:
            of_other = read_tests(other)
        except UserError as error:
            warn(f"`training.init_from`: its test sets are left out: {error}")
            return tests
        for name, lines in of_other.items():
            if lines not in tests.values():
                tests[f"{name} of {other.path}" if name in tests else name] = lines
    return tests


def _differences(configs: Mapping[Path, Config]) -> Iterator[str]:
    """Yield a message for each run that differs in more than the seed, or has the same seed."""
    (first_path, first), *following = configs.items()
    for path, config in following:
        keys = config_file.changes(first, config)
        if "seed" not in keys:
            yield f"{path}: has the seed of {first_path}, {config.seed}."
        differing = [f"`{key}`" for key in keys if key not in _KEYS_OF_A_SEED]
        if differing:
            yield f"{path}: differs from {first_path} in {', '.join(differing)}."
