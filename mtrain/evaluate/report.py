"""The report of an evaluation as a page for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from mtrain.evaluate import evaluation
from mtrain.evaluate.breakdown import Breakdown, Contrast, Example, LineGroup
from mtrain.evaluate.metrics import number
from mtrain.evaluate.scoreboard import System, TestReport
from mtrain.evaluate.significance import SystemComparison
from mtrain.io.text_width import visible, wrapped

_WIDTH = 80
_INDENT = 4
_LABEL = 11  # columns before the text of a line
_MAX_ROWS = 4  # of a long line's text
_LIKELY = 0.05  # a p-value from which a difference may well be chance


def as_text(reports: Sequence[TestReport]) -> Iterator[str]:
    """Yield the lines of a page of 80 columns, names and signatures apart, which are not cut."""
    for report in reports:
        if len(report.systems) == 1:
            yield from evaluation.as_text([report.systems[0].result])
        else:
            for place in range(len(report.systems[0].result.scores)):
                yield from _table(report, place)
    if any(report.comparisons for report in reports):
        yield "p: chance of such a difference to the first system if neither is better; bs by"
        yield f"   paired bootstrap, ar by approximate randomisation; * is below {_LIKELY}"
    for report in reports:
        for system in report.systems:
            if system.parts is not None:
                yield from _parts(report.name, system, system.parts)
        for contrast in report.contrasts:
            yield from _contrast(report.name, contrast)


def as_json(reports: Sequence[TestReport]) -> Iterator[str]:
    """Yield the report as one JSON object, an object for each test set."""
    yield json.dumps({report.name: _tree(report) for report in reports}, indent=2)


def _tree(report: TestReport) -> dict[str, object]:
    scores = [
        {"system": system.name} | asdict(score)
        for system in report.systems
        for score in system.result.scores
    ]
    tree: dict[str, object] = {"num_lines": report.num_lines, "scores": scores}
    if report.summary:
        tree["summary"] = [asdict(summary) for summary in report.summary]
    if report.comparisons:
        tree["comparisons"] = [asdict(comparison) for comparison in report.comparisons]
    parts = {system.name: asdict(system.parts) for system in report.systems if system.parts}
    if parts:
        tree["details"] = parts
    if report.contrasts:
        tree["contrasts"] = [asdict(contrast) for contrast in report.contrasts]
    return tree


def _table(report: TestReport, place: int) -> Iterator[str]:
    """Yield the scores of all systems by one metric."""
    scores = [system.result.scores[place] for system in report.systems]
    metric = scores[0].metric
    against = {own.system: own for own in report.comparisons if own.metric == metric}
    head = f"{report.name}  {metric}"
    width = max(len(score.shown()) for score in scores)
    yield f"{head:<{width + 2}}  difference   p (bs)   p (ar)" if against else head
    for system, score in zip(report.systems, scores, strict=True):
        columns = _columns(metric, against.get(system.name)) if against else ""
        yield f"  {score.shown():<{width}}{columns}  {system.name}"
    for summary in report.summary:
        if summary.metric == metric:
            shown = f"{number(metric, summary.mean)} ± {number(metric, summary.std)}"
            yield f"  {shown:<{width}}  mean and standard deviation of {summary.num_runs} runs"
    yield f"  {scores[0].signature}"
    yield from sorted({f"  {own.randomization_signature}" for own in against.values()})


def _columns(metric: str, comparison: SystemComparison | None) -> str:
    if comparison is None:
        return " " * 30
    difference = number(metric, comparison.difference)
    sign = "" if difference.startswith("-") else "+"
    chances = [
        f"{p:>8.4f}{'*' if p < _LIKELY else ' '}"
        for p in (comparison.p_bootstrap, comparison.p_randomization)
    ]
    return f"{sign + difference:>12}{''.join(chances)}"


def _parts(name: str, system: System, parts: Breakdown) -> Iterator[str]:
    yield ""
    yield f"{name}  {system.name}"
    for score in system.result.scores:
        if score.verbose:
            yield from (f"  {row}" for row in wrapped(score.verbose, _WIDTH - 2, 2))
    yield from _groups(f"{parts.unit.value} in the source", parts.by_length)
    if parts.by_rarity is None:
        yield "  by rare words: not known, for the first run has no data/train.arrow"
    else:
        yield from _groups("training text has the rarest word", parts.by_rarity, " times")
    yield from _examples("best lines, by chrF2", parts.best)
    yield from _examples("worst lines, by chrF2", parts.worst)


def _groups(title: str, groups: Sequence[LineGroup], unit: str = "") -> Iterator[str]:
    if groups:
        metrics = "".join(f"{metric:>9}" for metric in groups[0].scores)
        yield f"  {title:<34}{'lines':>8}{metrics}"
    for group in groups:
        if group.last is None:
            span = f"{group.first:,} or more"
        else:
            span = f"{group.first:,}" + f" to {group.last:,}" * (group.last > group.first)
        scores = "".join(f"{number(metric, own):>9}" for metric, own in group.scores.items())
        yield f"    {span + unit:<32}{group.num_lines:>8,}{scores}"


def _contrast(name: str, contrast: Contrast) -> Iterator[str]:
    yield ""
    yield f"{name}  {contrast.system} (second) beside {contrast.baseline} (first)"
    yield from _examples("better lines, by chrF2", contrast.better)
    yield from _examples("worse lines, by chrF2", contrast.worse)


def _examples(title: str, examples: Sequence[Example]) -> Iterator[str]:
    yield f"  {title}{':' if examples else ': none'}"
    for example in examples:
        yield from _row(f"line {example.line}", example.source)
        yield from _row("reference", example.reference)
        for translation in example.translations:
            yield from _row(f"{translation.score:.2f}", translation.text)


def _row(label: str, text: str) -> Iterator[str]:
    """Write a line's text beside its label, in a few rows if it is long."""
    rows = wrapped(visible(text).strip(), _WIDTH - _INDENT - _LABEL, _MAX_ROWS)
    for place, row in enumerate(rows or ["(blank)"]):
        yield f"{'':{_INDENT}}{label * (place == 0):<{_LABEL}}{row}"
