"""Break scores down by source length and by rarest word, and find the best and worst lines."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Literal

from sacrebleu.metrics.chrf import CHRF

from mtrain.audit.unicode_classes import is_unspaced
from mtrain.data import arrow_shards, loader
from mtrain.evaluation.metrics import Scorer, ScoringOptions, TestSet
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece

NUM_EXAMPLES = 5  # lines of a kind that are shown
Unit = Literal["words", "characters"]  # what the length of a line is counted in
_NUM_LENGTH_GROUPS = 4
_COUNT_GROUPS = (0, 1, 10, 100, 1000)  # the least training count of each group by rarity


@dataclass(frozen=True)
class LineGroup:
    """Lines whose length, or whose rarest word's training count, is in one interval."""

    first: int  # the bounds, inclusive
    last: int | None  # None is no bound
    num_lines: int
    scores: dict[str, float]  # of these lines alone, by metric


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
    reference: str  # the first of several
    translations: list[ScoredLine]


@dataclass(frozen=True)
class Breakdown:
    """A system's scores by groups of lines, and its best and worst lines."""

    unit: Unit  # of lengths
    by_length: list[LineGroup]  # of about equally many lines, by the length of the source
    # by how often the rarest word of the source occurs in the training text, None if that is
    # unknown; a line without words is in no group
    by_rarity: list[LineGroup] | None
    # by chrF2; of equal scores, the longest reference first; without blank lines translated to
    # blank lines, whose chrF2 is 0
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
    """Return the words of a line, or its characters, in lower case.

    Words lose the punctuation around them. Characters are letters, numbers and combining marks.
    """
    if unit == "characters":
        return [character for character in line.lower() if _is_word_character(character)]
    return [stripped for word in line.split() if (stripped := _strip_punctuation(word))]


def _is_word_character(character: str) -> bool:
    return unicodedata.category(character)[0] in "LNM"


@lru_cache(maxsize=1 << 16)
def _strip_punctuation(word: str) -> str:
    indices = [index for index, character in enumerate(word) if _is_word_character(character)]
    return word[indices[0] : indices[-1] + 1].lower() if indices else ""


def unit_of(lines: Sequence[str]) -> Unit:
    """Return "characters" in scripts without spaces, or if the median line has one word.

    Blank lines do not count.
    """
    num_words = [len(line.split()) for line in lines if line.strip()]
    if is_unspaced("".join(lines)) or median(num_words or [0]) <= 1:
        return "characters"
    return "words"


def count_in_training(
    run: RunDir, texts: Iterable[Sequence[str]]
) -> dict[Unit, Counter[str]] | None:
    """Return how often each word of some texts occurs in the sources of the training pairs.

    There are counts for each unit of the texts; None if the run folder holds no encoded pairs.

    Raises:
        RunError: if the encoded pairs are damaged.
    """
    if not arrow_shards.are_in(run.data_dir):
        return None
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    counts_of: dict[Unit, Counter[str]] = {}
    for sources in texts:
        unit = unit_of(sources)
        words = {word: 0 for line in sources for word in split_words(line, unit)}
        counts_of.setdefault(unit, Counter()).update(words)
    for src_ids, _ in loader.read_ids(run.data_dir, tokenizer):
        for line in tokenizer.src.decode([ids[:-1].tolist() for ids in src_ids]):
            for unit, counts in counts_of.items():
                counts.update(word for word in split_words(line, unit) if word in counts)
    return counts_of


def break_down(
    test: TestSet,
    system: str,
    hypotheses: Sequence[str],
    options: ScoringOptions,
    training_counts: Mapping[Unit, Mapping[str, int]] | None,
) -> Breakdown:
    """Return the scores of groups of lines, and the best and the worst lines, of a system.

    `training_counts`, if known, is how often the training text has each word of the sources, by
    unit.
    """
    unit = unit_of(test.src)
    words = [split_words(line, unit) for line in test.src]
    lengths = [len(line) for line in words]
    ranked = sorted(lengths)
    quantiles = {
        ranked[len(ranked) * part // _NUM_LENGTH_GROUPS] for part in range(_NUM_LENGTH_GROUPS)
    }
    by_length, by_rarity = _groups(test, hypotheses, options, lengths, sorted(quantiles)), None
    if training_counts is not None:
        count = training_counts[unit].__getitem__
        rarest = [min(map(count, line)) if line else None for line in words]
        by_rarity = _groups(test, hypotheses, options, rarest, _COUNT_GROUPS)
    scores = line_scores(test, hypotheses, options)
    rows = [row for row in range(len(scores)) if not _is_blank(row, test, hypotheses)]
    longest_first = sorted(rows, key=lambda row: -len(test.refs[0][row]))
    best = sorted(longest_first, key=lambda row: -scores[row])
    worst = sorted(longest_first, key=lambda row: scores[row])
    systems = {system: (hypotheses, scores)}
    return Breakdown(
        unit, by_length, by_rarity, _examples(test, best, systems), _examples(test, worst, systems)
    )


def _is_blank(row: int, test: TestSet, hypotheses: Sequence[str]) -> bool:
    """Tell whether the translation and a reference are blank."""
    return not (hypotheses[row].strip() or all(lines[row].strip() for lines in test.refs))


def contrast(
    test: TestSet, outputs: Mapping[str, Sequence[str]], system: str, options: ScoringOptions
) -> Contrast:
    """Return the lines whose chrF2 is most above, and most below, that of the first system."""
    baseline = next(iter(outputs))
    systems = {
        name: (outputs[name], line_scores(test, outputs[name], options))
        for name in (baseline, system)
    }
    (_, before), (_, after) = systems.values()
    gains = [new - old for old, new in zip(before, after, strict=True)]
    rows = sorted(range(len(gains)), key=lambda row: gains[row])
    better = [row for row in reversed(rows) if gains[row] > 0]
    worse = [row for row in rows if gains[row] < 0]
    return Contrast(
        baseline, system, _examples(test, better, systems), _examples(test, worse, systems)
    )


def _examples(
    test: TestSet,
    rows: Sequence[int],
    systems: Mapping[str, tuple[Sequence[str], Sequence[float]]],
) -> list[Example]:
    """Return the first rows as examples, with the translations and scores of each system."""
    return [
        Example(
            row + 1,
            test.src[row],
            test.refs[0][row],
            [
                ScoredLine(name, scores[row], lines[row])
                for name, (lines, scores) in systems.items()
            ],
        )
        for row in rows[:NUM_EXAMPLES]
    ]


def _groups(
    test: TestSet,
    hypotheses: Sequence[str],
    options: ScoringOptions,
    values: Sequence[int | None],
    starts: Sequence[int],
) -> list[LineGroup]:
    """Score the lines whose value is from each of `starts` to the next; skip empty groups."""
    rows_of: dict[int, list[int]] = {}
    for row, value in enumerate(values):
        if value is not None:
            rows_of.setdefault(bisect_right(starts, value) - 1, []).append(row)
    no_intervals, groups = replace(options, num_resamples=0), []
    for index, rows in sorted(rows_of.items()):
        scorer = Scorer(test.rows(rows), no_intervals)
        scored = scorer.score([hypotheses[row] for row in rows])
        scores = {score.metric: score.value for score in scored}
        last = starts[index + 1] - 1 if index + 1 < len(starts) else None
        groups.append(LineGroup(starts[index], last, len(rows), scores))
    return groups


def line_scores(test: TestSet, hypotheses: Sequence[str], options: ScoringOptions) -> list[float]:
    """Return the chrF2 of each line; BLEU of single lines is too noisy."""
    metric = CHRF(lowercase=options.lowercase)
    rows = zip(hypotheses, *test.refs, strict=True)
    return [float(metric.sentence_score(text, refs).score) for text, *refs in rows]
