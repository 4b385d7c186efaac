"""The report of an evaluation as text for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from mtrain.evaluation.breakdown import Breakdown, Example, LineGroup
from mtrain.evaluation.evaluation import EvaluationPlan, TestReport, TestResult
from mtrain.evaluation.metrics import format_score
from mtrain.evaluation.significance import P_LIMIT
from mtrain.io.table import format_table
from mtrain.io.text_width import visible, wrapped

_WIDTH = 80
_INDENT = 4
_LABEL = 11  # least number of columns of a label, with the space after it
_MAX_ROWS = 4  # of a long line's text


def as_text(reports: Sequence[TestReport], plan: EvaluationPlan) -> Iterator[str]:
    """Yield lines of at most 80 columns, but for names and signatures, which are not cut."""
    for report in reports:
        if len(report.results) == 1:
            yield from format_scores(report.results[0])
        else:
            for index in range(len(report.results[0].scores)):
                yield from _metric_table(report, index)
        for key, value in plan.search.items():
            option = f"{key.replace('_', '-')} {value}"
            if key == "early_stop":
                option = "early-stop" if value else "exact-stop"
            if option != "precision float32":
                yield f"  translated with `--{option}`"
    if any(report.comparisons for report in reports):
        yield "p: chance of such a difference to the first system if neither is better; bs by"
        yield f"   paired bootstrap, ar by approximate randomisation; * is below {P_LIMIT}"
    for report in reports:
        for result in report.results:
            if result.breakdown is not None:
                yield from _breakdown(result, result.breakdown)
        for contrast in report.contrasts:
            yield ""
            yield (
                f"{report.results[0].name}  {contrast.system} (second) beside "
                f"{contrast.baseline} (first)"
            )
            yield from _examples("better lines, by chrF2", contrast.better)
            yield from _examples("worse lines, by chrF2", contrast.worse)


def before_and_after_table(reports: Sequence[TestReport]) -> Iterator[str]:
    """Yield a table with a row for each test set and metric."""
    if not reports:
        return
    before, after = (result.system for result in reports[0].results)
    yield f"test sets before (with {before}) and after (with {after}):"
    rows = [["test set", "lines", "metric", "before", "after", "change", "p (bs)", "p (ar)"]]
    for report in reports:
        first, second = report.results
        for old, new, test in zip(first.scores, second.scores, report.comparisons, strict=True):
            values = [format_score(old.metric, score.value) for score in (old, new)]
            change = [test.format_difference(), *test.format_p_values()]
            num_lines = f"{len(first.lines.src):,}"
            rows.append([first.name, num_lines, old.metric, *values, *change])
    yield from format_table(rows, "<><" + ">" * 5)


def as_json(
    reports: Sequence[TestReport], plan: EvaluationPlan, compared: Sequence[TestReport]
) -> Iterator[str]:
    """Yield the report as one JSON object, an object for each test set.

    Args:
        reports, plan: of the evaluation.
        compared: reports of a fine-tuned run and the run that it was tuned from; their test sets
            may be among those of `reports`.
    """
    trees = {report.results[0].name: _tree(report, plan) for report in reports}
    for report in compared:
        tree = _tree(report, plan)
        entry = trees.setdefault(report.results[0].name, {"num_lines": tree.pop("num_lines")})
        entry["before_and_after"] = {key: tree[key] for key in ("scores", "comparisons")}
    yield json.dumps(trees, indent=2)


def _tree(report: TestReport, plan: EvaluationPlan) -> dict[str, object]:
    tree: dict[str, object] = {
        "num_lines": len(report.results[0].lines.src),
        **plan.search,
        "scores": [
            {"system": result.system} | asdict(score)
            for result in report.results
            for score in result.scores
        ],
        "summary": [asdict(summary) for summary in report.summary],
        "comparisons": [asdict(comparison) for comparison in report.comparisons],
        "details": {
            result.system: asdict(result.breakdown) for result in report.results if result.breakdown
        },
        "contrasts": [asdict(contrast) for contrast in report.contrasts],
    }
    return {key: value for key, value in tree.items() if value not in (None, [], {})}


def format_scores(result: TestResult) -> Iterator[str]:
    """Yield two lines for each score: the value with its interval, and the signature."""
    for score in result.scores:
        yield f"{result.name}  {score.metric} {score.format()}"
        yield f"  {score.signature}"


def _metric_table(report: TestReport, index: int) -> Iterator[str]:
    """Yield the scores of all systems by one metric."""
    scores = [result.scores[index] for result in report.results]
    metric = scores[0].metric
    comparisons = {
        comparison.system: comparison
        for comparison in report.comparisons
        if comparison.metric == metric
    }
    heads = ["difference", "p (bs)", "p (ar)"] if comparisons else []
    rows = [[f"{report.results[0].name}  {metric}", *heads, ""]]
    for result, score in zip(report.results, scores, strict=True):
        cells = [""] * len(heads)
        if comparison := comparisons.get(result.system):
            cells = [comparison.format_difference(), *comparison.format_p_values()]
        rows.append([f"  {score.format()}", *cells, result.system])
    for summary in report.summary:
        if summary.metric == metric:
            text = f"  {format_score(metric, summary.mean)} ± {format_score(metric, summary.std)}"
            rows.append([text, f"mean and standard deviation of {summary.num_runs} runs"])
    yield from format_table(rows, f"<{'>' * len(heads)}<")
    yield f"  {scores[0].signature}"
    yield from sorted({f"  {test.randomization_signature}" for test in comparisons.values()})


def _breakdown(result: TestResult, breakdown: Breakdown) -> Iterator[str]:
    yield ""
    yield f"{result.name}  {result.system}"
    for score in result.scores:
        yield from (f"  {row}" for row in wrapped(score.verbose, _WIDTH - 2, 2))
    rows = _group_rows(f"{breakdown.unit} in the source", breakdown.by_length)
    if breakdown.by_rarity:
        rarest = f"training text has the rarest {breakdown.unit.removesuffix('s')}"
        rows += _group_rows(rarest, breakdown.by_rarity, " times")
    yield from format_table(rows, "<" + ">" * (len(rows[0]) - 1))
    if breakdown.by_rarity is None:
        yield "  by rare words: not known, for the first run has no data/shards.json"
    yield from _examples("best lines, by chrF2", breakdown.best)
    yield from _examples("worst lines, by chrF2", breakdown.worst)


def _group_rows(title: str, groups: Sequence[LineGroup], unit: str = "") -> list[list[str]]:
    rows = [[f"  {title}", "lines", *groups[0].scores]]
    for group in groups:
        interval = f"{group.first:,}"
        if group.last is None:
            interval += " or more"
        elif group.last > group.first:
            interval += f" to {group.last:,}"
        scores = [format_score(metric, value) for metric, value in group.scores.items()]
        rows.append([f"    {interval}{unit}", f"{group.num_lines:,}", *scores])
    return rows


def _examples(title: str, examples: Sequence[Example]) -> Iterator[str]:
    yield f"  {title}{':' if examples else ': none'}"
    for example in examples:
        yield from _labelled(f"line {example.line}", example.source)
        yield from _labelled("reference", example.reference)
        for translation in example.translations:
            yield from _labelled(f"{translation.score:.2f}", translation.text)


def _labelled(label: str, text: str) -> Iterator[str]:
    """Yield a line's text beside its label, in a few rows if it is long."""
    width = max(_LABEL, len(label) + 1)
    rows = wrapped(visible(text).strip(), _WIDTH - _INDENT - width, _MAX_ROWS)
    for index, row in enumerate(rows or ["(blank)"]):
        yield f"{'':{_INDENT}}{label * (index == 0):<{width}}{row}"
