"""Where a translation is good and where it is not: by length, by rare words, line by line.

Knows lines, no runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sacrebleu.metrics.chrf import CHRF

from mtrain.data.prepare import ParallelLines
from mtrain.evaluate.frequencies import Unit, split, unit_of
from mtrain.evaluate.metrics import Scorer, ScoringOptions
from mtrain.evaluate.significance import SystemOutput

NUM_EXAMPLES = 5  # lines of a kind that are shown
_NUM_GROUPS = 4
_FREQUENCIES = (0, 1, 10, 100, 1000)  # where the groups begin


@dataclass(frozen=True)
class LineGroup:
    """Lines that have something in common.

    Attributes:
        first: the least of what they have in common.
        last: the most of it; None is no bound.
        num_lines: how many they are.
        scores: of these lines alone, by metric.
    """

    first: int
    last: int | None
    num_lines: int
    scores: dict[str, float]


@dataclass(frozen=True)
class ScoredLine:
    """What a system made of a line, and the line's chrF2."""

    system: str
    score: float
    text: str


@dataclass(frozen=True)
class Example:
    """A line of a test set, numbered from 1, and its translations."""

    line: int
    source: str
    reference: str
    translations: list[ScoredLine]


@dataclass(frozen=True)
class Breakdown:
    """The parts of a system's score.

    Attributes:
        unit: what lengths are counted in.
        by_length: groups of about equally many lines, by the length of the source.
        by_rarity: groups of lines by how often the rarest word of the source stands in the
            training text; None if that is not known. A line without a word is in none.
        best, worst: lines by their chrF2, the longest first of those that are equal.
    """

    unit: Unit
    by_length: list[LineGroup]
    by_rarity: list[LineGroup] | None
    best: list[Example]
    worst: list[Example]


@dataclass(frozen=True)
class Contrast:
    """The lines in which a system differs most from the baseline, by their chrF2."""

    baseline: str
    system: str
    better: list[Example]
    worse: list[Example]


def break_down(
    test: ParallelLines,
    output: SystemOutput,
    options: ScoringOptions,
    training: Mapping[str, int] | None,
) -> Breakdown:
    """Take a system's score apart.

    Args:
        test: the test set.
        output: its translation.
        options: how is scored.
        training: how often each word of the sources stands in the training text, if known.
    """
    unit = unit_of(test.src)
    words = [split(line, unit) for line in test.src]
    lengths = [len(line) for line in words]
    by_rarity = None
    if training is not None:
        rarest = [min(training[word] for word in line) if line else None for line in words]
        by_rarity = _groups(test, output, options, rarest, _FREQUENCIES)
    scores = line_scores(test, output, options)
    rows = sorted(range(len(scores)), key=lambda row: -len(test.tgt[row]))
    best = sorted(rows, key=lambda row: -scores[row])[:NUM_EXAMPLES]
    worst = sorted(rows, key=lambda row: scores[row])[:NUM_EXAMPLES]
    return Breakdown(
        unit,
        _groups(test, output, options, lengths, _quantiles(lengths)),
        by_rarity,
        [_example(test, row, [(output, scores[row])]) for row in best],
        [_example(test, row, [(output, scores[row])]) for row in worst],
    )


def contrast(
    test: ParallelLines, baseline: SystemOutput, system: SystemOutput, options: ScoringOptions
) -> Contrast:
    """Find the lines in which a system is most above the baseline, and most below it."""
    ours, theirs = (line_scores(test, output, options) for output in (baseline, system))
    gains = [their - our for our, their in zip(ours, theirs, strict=True)]
    rows = sorted(range(len(gains)), key=lambda row: gains[row])

    def examples(chosen: Sequence[int]) -> list[Example]:
        return [
            _example(test, row, [(baseline, ours[row]), (system, theirs[row])]) for row in chosen
        ]

    better = [row for row in rows[::-1][:NUM_EXAMPLES] if gains[row] > 0]
    worse = [row for row in rows[:NUM_EXAMPLES] if gains[row] < 0]
    return Contrast(baseline.name, system.name, examples(better), examples(worse))


def _example(
    test: ParallelLines, row: int, outputs: Sequence[tuple[SystemOutput, float]]
) -> Example:
    translations = [
        ScoredLine(output.name, score, output.hypotheses[row]) for output, score in outputs
    ]
    return Example(row + 1, test.src[row], test.tgt[row], translations)


def _quantiles(values: Sequence[int]) -> list[int]:
    """Return where groups of about equally many lines begin."""
    ranked = sorted(values)
    return sorted({ranked[len(ranked) * part // _NUM_GROUPS] for part in range(_NUM_GROUPS)})


def _groups(
    test: ParallelLines,
    output: SystemOutput,
    options: ScoringOptions,
    values: Sequence[int | None],
    starts: Sequence[int],
) -> list[LineGroup]:
    """Score the lines from each of `starts` to the next one; a group without lines is left out."""
    members: dict[int, list[int]] = {}
    for row, value in enumerate(values):
        if value is not None:
            members.setdefault(bisect_right(starts, value) - 1, []).append(row)
    lasts = [start - 1 for start in starts[1:]]
    return [
        LineGroup(
            starts[place],
            lasts[place] if place < len(lasts) else None,
            len(rows),
            _score(test, output, options, rows),
        )
        for place, rows in sorted(members.items())
    ]


def _score(
    test: ParallelLines, output: SystemOutput, options: ScoringOptions, rows: Sequence[int]
) -> dict[str, float]:
    sources, references, hypotheses = (
        [lines[row] for row in rows] for lines in (*test, output.hypotheses)
    )
    return Scorer(references, options, sources).values(hypotheses)


def line_scores(test: ParallelLines, output: SystemOutput, options: ScoringOptions) -> list[float]:
    """Return the chrF2 of each line, which means more of a single line than BLEU does."""
    metric = CHRF(lowercase=options.lowercase)
    pairs = zip(output.hypotheses, test.tgt, strict=True)
    return [float(metric.sentence_score(text, [reference]).score) for text, reference in pairs]
