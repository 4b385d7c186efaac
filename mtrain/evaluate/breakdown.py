"""Where a translation is good and where it is not: by length, by rare words, line by line."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import median

from sacrebleu.metrics.chrf import CHRF

from mtrain.data import arrow_shards, loader
from mtrain.data.prepare import ParallelLines
from mtrain.evaluate.metrics import Scorer, ScoringOptions, SystemOutput
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer.sentencepiece import Tokenizer

NUM_EXAMPLES = 5  # lines of a kind that are shown
_NUM_LENGTH_GROUPS = 4
_COUNT_GROUPS = (0, 1, 10, 100, 1000)  # the least training count of each group by rarity


class Unit(str, Enum):
    """What the length of a line is counted in."""

    WORDS = "words"
    CHARACTERS = "characters"


@dataclass(frozen=True)
class LineGroup:
    """Lines whose length, or whose rarest word's training count, is in one interval.

    Attributes:
        first, last: the interval's bounds, inclusive; None is no bound.
        num_lines: of the group.
        scores: of these lines alone, by metric.
    """

    first: int
    last: int | None
    num_lines: int
    scores: dict[str, float]


@dataclass(frozen=True)
class ScoredLine:
    """A system's translation of a line, and its chrF2."""

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
    """A system's scores by groups of lines, and its best and worst lines.

    Attributes:
        unit: of lengths.
        by_length: groups of about equally many lines, by the length of the source.
        by_rarity: groups by how often the rarest word of the source occurs in the training text;
            None if that is unknown. A line without words is in no group.
        best, worst: lines by their chrF2; of equal ones, the longest come first.
    """

    unit: Unit
    by_length: list[LineGroup]
    by_rarity: list[LineGroup] | None
    best: list[Example]
    worst: list[Example]


@dataclass(frozen=True)
class Contrast:
    """The lines whose chrF2 differs most from the baseline's, in either direction."""

    baseline: str
    system: str
    better: list[Example]
    worse: list[Example]


def split_words(line: str, unit: Unit) -> list[str]:
    """Return a line's words in lower case, without the punctuation around them.

    Characters are letters, digits and combining marks.
    """
    if unit is Unit.CHARACTERS:
        return [character for character in line.lower() if _is_word_character(character)]
    return [stripped for word in line.split() if (stripped := _strip_punctuation(word))]


def _is_word_character(character: str) -> bool:
    return unicodedata.category(character)[0] in "LNM"


@lru_cache(maxsize=1 << 16)
def _strip_punctuation(word: str) -> str:
    indices = [index for index, character in enumerate(word) if _is_word_character(character)]
    return word[indices[0] : indices[-1] + 1].lower() if indices else ""


def unit_of(lines: Sequence[str]) -> Unit:
    """Return words, or characters where most lines have no space within."""
    return Unit.WORDS if median(len(line.split()) for line in lines) > 1 else Unit.CHARACTERS


def count_in_training(
    run: RunDir, tokenizer: Tokenizer, words: Iterable[str], unit: Unit
) -> Counter[str] | None:
    """Return how often each word occurs in the source side of the encoded training pairs.

    None if the run folder holds no encoded pairs.

    Raises:
        RunError: if they are damaged.
    """
    if not arrow_shards.are_in(run.data_dir):
        return None
    counts = Counter(dict.fromkeys(words, 0))
    for ids in loader.read_src(run.data_dir, tokenizer):
        for line in tokenizer.src.decode(ids):
            counts.update(word for word in split_words(line, unit) if word in counts)
    return counts


def break_down(
    test: ParallelLines,
    outputs: Sequence[SystemOutput],
    options: ScoringOptions,
    training_counts: Mapping[str, int] | None,
) -> list[Breakdown]:
    """Return the parts of each system's score.

    Args:
        test: the test set.
        outputs: its translation by each system.
        options: of the scores.
        training_counts: of each word of the sources in the training text, if known.
    """
    unit = unit_of(test.src)
    words = [split_words(line, unit) for line in test.src]
    lengths = [len(line) for line in words]
    ranked = sorted(lengths)
    quantiles = {
        ranked[len(ranked) * part // _NUM_LENGTH_GROUPS] for part in range(_NUM_LENGTH_GROUPS)
    }
    by_length = _groups(test, outputs, options, lengths, sorted(quantiles))
    by_rarity: list[list[LineGroup]] | list[None] = [None] * len(outputs)
    if training_counts is not None:
        rarest = [min(map(training_counts.__getitem__, line)) if line else None for line in words]
        by_rarity = _groups(test, outputs, options, rarest, _COUNT_GROUPS)
    breakdowns = []
    for output, length_groups, rarity_groups in zip(outputs, by_length, by_rarity, strict=True):
        scores = line_scores(test, output, options)
        rows = sorted(range(len(scores)), key=lambda row: -len(test.tgt[row]))
        best, worst = (
            [
                _example(test, row, [(output, scores[row])])
                for row in sorted(rows, key=lambda row: sign * scores[row])[:NUM_EXAMPLES]
            ]
            for sign in (-1, 1)
        )
        breakdowns.append(Breakdown(unit, length_groups, rarity_groups, best, worst))
    return breakdowns


def contrast(
    test: ParallelLines, baseline: SystemOutput, system: SystemOutput, options: ScoringOptions
) -> Contrast:
    """Return the lines in which a system is most above the baseline, and most below it."""
    before, after = (line_scores(test, output, options) for output in (baseline, system))
    gains = [new - old for old, new in zip(before, after, strict=True)]
    rows = sorted(range(len(gains)), key=lambda row: gains[row])

    def examples(chosen: Sequence[int]) -> list[Example]:
        return [
            _example(test, row, [(baseline, before[row]), (system, after[row])]) for row in chosen
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


def _groups(
    test: ParallelLines,
    outputs: Sequence[SystemOutput],
    options: ScoringOptions,
    values: Sequence[int | None],
    starts: Sequence[int],
) -> list[list[LineGroup]]:
    """Score the lines whose value is from each of `starts` to the next, for each system.

    A group without lines is not listed.
    """
    rows_of: dict[int, list[int]] = {}
    for row, value in enumerate(values):
        if value is not None:
            rows_of.setdefault(bisect_right(starts, value) - 1, []).append(row)
    groups: list[list[LineGroup]] = [[] for _ in outputs]
    for index, rows in sorted(rows_of.items()):
        sources, references = ([lines[row] for row in rows] for lines in test)
        scorer = Scorer(references, options, sources)
        last = starts[index + 1] - 1 if index + 1 < len(starts) else None
        for groups_of_system, output in zip(groups, outputs, strict=True):
            scores = scorer.values([output.hypotheses[row] for row in rows])
            groups_of_system.append(LineGroup(starts[index], last, len(rows), scores))
    return groups


def line_scores(test: ParallelLines, output: SystemOutput, options: ScoringOptions) -> list[float]:
    """Return the chrF2 of each line; BLEU of a single line says little."""
    metric = CHRF(lowercase=options.lowercase)
    pairs = zip(output.hypotheses, test.tgt, strict=True)
    return [float(metric.sentence_score(text, [reference]).score) for text, reference in pairs]
