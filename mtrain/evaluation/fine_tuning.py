"""Compare a fine-tuned run with the run it began with, on the test sets of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mtrain.decode.pipeline import SearchEngine, Warn
from mtrain.errors import UserError
from mtrain.evaluation.evaluation import TestReport, read_tests, report_on, translate_tests
from mtrain.evaluation.metrics import ScoringOptions, TestSet, format_value
from mtrain.io.table import format_table
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE, ProcessGroup


def tests_of_both(run: RunDir, other: RunDir) -> dict[str, TestSet]:
    """Return the test sets of two runs by name; those with the same content are listed once.

    If both runs give different test sets the same name, that of `other` becomes "NAME of FOLDER".
    """
    tests = read_tests(run) if run.config.data.tests else {}
    if other.config.data.tests:
        for name, lines in read_tests(other).items():
            if lines not in tests.values():
                tests[f"{name} of {other.path}" if name in tests else name] = lines
    return tests


def before_and_after(
    run: RunDir,
    load: Callable[[RunDir], SearchEngine],
    warn: Warn,
    options: ScoringOptions,
    known: Mapping[str, list[str]] | None = None,
    process_group: ProcessGroup = SINGLE,
) -> list[TestReport]:
    """Score a run and the run that it began with on the test sets of both, and compare them.

    The first system of each report is the run before fine-tuning. There are no reports if the run
    has no `training.init_from`, or if that run cannot be loaded; then `warn` is called.

    Args:
        run: the fine-tuned run.
        load: loads the translator of a run.
        warn: called with warnings about translations.
        options: of the scores; without resamples there are no paired tests, and no reports.
        known: translations by the run of its own test sets, by name.
        process_group: of the translators. All ranks must call this; rank 0 returns the reports, the
            other ranks an empty list.
    """
    init_from = run.config.training.init_from
    if init_from is None or not options.num_resamples:
        return []
    other = RunDir(Path(init_from))
    try:
        tests, before = tests_of_both(run, other), load(other)
    except UserError as error:
        if process_group.is_first:
            warn(f"`training.init_from`: no scores of before: {error}")
        return []
    if not tests:
        return []
    old = dict(translate_tests(other, before, tests, lambda _: None))
    new = dict(known or {})
    missing = {name: lines for name, lines in tests.items() if name not in new}
    if missing:
        new |= translate_tests(run, load(run), missing, warn)
    if not process_group.is_first:
        return []
    systems = str(other.path), str(run.path)
    options = options.for_language(run.config.data.tgt_lang)
    return [
        report_on(name, lines, dict(zip(systems, (old[name], new[name]), strict=True)), options)
        for name, lines in tests.items()
    ]


def as_table(reports: Sequence[TestReport]) -> Iterator[str]:
    """Yield a table with a row for each test set and metric."""
    if not reports:
        return
    before, after = (result.system for result in reports[0].results)
    yield f"test sets before (with {before}) and after (with {after}):"
    rows = [["test set", "lines", "metric", "before", "after", "change", "p (bs)", "p (ar)"]]
    for report in reports:
        first, second = report.results
        for old, new, test in zip(first.scores, second.scores, report.comparisons, strict=True):
            values = [format_value(old.metric, score.value) for score in (old, new)]
            change = [test.format_difference(), *test.format_p_values()]
            num_lines = f"{len(first.lines.src):,}"
            rows.append([first.name, num_lines, old.metric, *values, *change])
    yield from format_table(rows, "<><" + ">" * 5)
