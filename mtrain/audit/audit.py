"""Audit the corpora of a config: what is wrong with them, where, and how serious it is.

Each corpus is read once, into records on disk; the rules judge the records, and a second look at
the text fills the lists. Knows no page and no command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit import duplicates, misalignment, pair_filter, rules
from mtrain.audit.contamination import LeakHits, Leaks
from mtrain.audit.coverage import Coverage
from mtrain.audit.finding_lists import Entry, FindingLists, RuleHits, nothing_more, place_of
from mtrain.audit.misalignment import Shift
from mtrain.audit.rules import RULES, PairBlock, Rule, Severity, SideName, UsualRatios
from mtrain.audit.scan import Scan
from mtrain.audit.side_classifier import Languages
from mtrain.config.corpora import TrainText, corpora_of, weight_of
from mtrain.config.sections import Config
from mtrain.corpus.dropped import format_counts, format_precedence
from mtrain.corpus.formats import Advance
from mtrain.corpus.lenient_reader import FileNotes, Reader, size_of
from mtrain.tokenizer.sentencepiece import Tokenizer

TRAIN, VALID = "train", "valid"
REPORT_FILE = "report.json"  # beside the lists, in every folder of them
_LEFT_OUT = "Nothing need be done: training leaves them out (`data.clean`)."
_FEW_LEAKS = 0.01  # the share of held-out lines of which one side may stand elsewhere


@dataclass(frozen=True)
class AuditFinding:
    """One thing that is wrong with a corpus.

    Attributes:
        corpus: which one.
        name: of the rule, and of the list.
        severity: how serious it is.
        what: what was found, without its number.
        advice: what to do, in one sentence.
        count, total: how many have it, of how many.
        examples: the first entries of the list.
        list_file: the name of the file with all of them, if there is one.
    """

    corpus: str
    name: str
    severity: Severity
    what: str
    advice: str
    count: int
    total: int
    examples: list[Entry]
    list_file: str | None = None


@dataclass(frozen=True)
class MixedSummary:
    """A corpus of a mixture: as `Summary`, and its share of an epoch's pairs."""

    name: str
    num_pairs: int
    left_out: dict[str, int]
    share: float


@dataclass(frozen=True)
class CorpusSummary:
    """A corpus, and what becomes of its pairs.

    Attributes:
        name: of the corpus.
        num_pairs: that could be read; a row that is no pair is none.
        left_out: how many of them training leaves out, by reason; without a tokenizer, those over
            `data.max_tokens` are not known.
        coverage: of source and target, if there is a tokenizer.
        mixture: the corpora that it is mixed of.
    """

    name: str
    num_pairs: int
    left_out: dict[str, int]
    coverage: list[Coverage] = field(default_factory=list)
    mixture: list[MixedSummary] = field(default_factory=list)


@dataclass(frozen=True)
class AuditReport:
    """All corpora, training first, and all findings, the most serious first."""

    corpora: list[CorpusSummary]
    findings: list[AuditFinding]

    def count(self, severity: Severity) -> int:
        """Count the findings that are that serious."""
        return sum(found.severity == severity for found in self.findings)


class NamedText(NamedTuple):
    """A corpus, or a mixture, and what a report calls it."""

    name: str
    text: TrainText


def corpora(config: Config) -> list[NamedText]:
    """Return the corpora in the order in which they are read: training comes last."""
    tests = [NamedText(f"tests.{name}", corpus) for name, corpus in config.data.tests.items()]
    valid, train = NamedText(VALID, config.data.valid), NamedText(TRAIN, config.data.train)
    return [*tests, valid, train]


def num_bytes(config: Config) -> int:
    """Return the bytes of all corpora on disk."""
    return sum(size_of(corpus) for _, corpus in corpora(config))


def audit(
    config: Config, tokenizer: Tokenizer | None, directory: Path, advance: Advance
) -> AuditReport:
    """Audit all corpora of a config.

    Args:
        config: names them.
        tokenizer: the run's own, if it has one.
        directory: where the lists go.
        advance: is told the bytes that have been read; twice those of the corpora in the end.
    """
    surveys = [Scan(name, corpus, directory, tokenizer) for name, corpus in corpora(config)]
    languages = Languages()
    for survey in surveys:
        held_out = [other for other in surveys if _is_held_out_of(other.name, survey.name)]
        survey.read(languages, held_out, survey.name != TRAIN, advance)
    train = surveys[-1]
    usual = rules.learn(train.windows(), config.data.max_tokens)
    chosen = pair_filter.rules_of(config.data.clean)
    summaries, findings = [], []
    for survey in reversed(surveys):
        lists = FindingLists(directory, survey.name, survey.intake)
        tally = _Tally(chosen if survey is train else [], usual)
        intakes = {s.name: s.intake for s in surveys}
        findings += _judge(survey, usual, intakes, lists, tally, config.data.clean, advance)
        mixture = _mixture(config, survey, tally) if survey is train else []
        summaries.append(_summary(survey, train, tally, mixture))
        findings += _left_out_findings(summaries[-1])
        survey.spool.remove()
    return AuditReport(summaries, sorted(findings, key=lambda finding: -finding.severity))


def _is_held_out_of(name: str, other: str) -> bool:
    """Tell whether no sentence of one corpus should stand in the other."""
    return name != other and (other == TRAIN or (other == VALID and name != TRAIN))


def _judge(
    survey: Scan,
    usual: UsualRatios,
    intakes: dict[str, Reader],
    lists: FindingLists,
    tally: _Tally,
    clean: list[str],
    advance: Advance,
) -> list[AuditFinding]:
    """Judge all pairs of a corpus, write its lists, and return the findings."""
    total = survey.intake.num_pairs
    survey.find_repeats()
    moved = misalignment.find(survey.windows) if total >= misalignment.MIN_PAIRS else []
    leaked = [_Leaked(name, intakes[name], leaks, clean) for name, leaks in survey.leaks.items()]
    for block in Reader(survey.corpus).blocks(advance):
        first, last = block.first, block.first + len(block.src)
        pairs = survey.pairs(first, len(block.src))
        tally.add(pairs, survey.intake.part_of(first).corpus)
        for hits in [
            *_rule_hits(pairs, usual, survey.intake),
            *_shift_hits(moved, first, last, survey.intake),
            *(hits for leak in leaked for hits in leak.hits(first, last)),
        ]:
            lists.add(hits, block)
    lists.close()
    return [
        *_file_findings(survey),
        *_shift_findings(survey.name, moved, lists, total),
        *(found for leak in leaked for found in leak.findings(survey.name, lists, total)),
        *_rule_findings(survey.name, lists, total),
    ]


class _Tally:
    """How many pairs training leaves out, by reason."""

    def __init__(self, chosen: Sequence[Rule], usual: UsualRatios) -> None:
        self._chosen, self._usual = chosen, usual
        self.counts: Counter[str] = Counter()
        self.by_corpus: dict[str, Counter[str]] = {}

    def add(self, pairs: PairBlock, corpus: str | None) -> None:
        """Judge some more pairs as training does; `corpus` says of which part of a mixture."""
        found = pair_filter.reasons(self._chosen, pairs, self._usual)
        counts = Counter(reason for reason in found if reason is not None)
        self.counts.update(counts)
        if corpus is not None:
            self.by_corpus.setdefault(corpus, Counter()).update(counts)


def _rule_hits(pairs: PairBlock, usual: UsualRatios, intake: Reader) -> Iterator[RuleHits]:
    for rule in RULES:
        sides = rule.judge(pairs, usual)
        if rule.refers is None:
            yield RuleHits(rule.name, sides, nothing_more)
        else:
            earlier = rule.refers(pairs)
            yield RuleHits(rule.name, sides, _Earlier(earlier, intake).describe)


class _Earlier(NamedTuple):
    numbers: duplicates.Numbers
    intake: Reader

    def describe(self, place: int) -> Entry:
        return {"first": place_of(self.intake, int(self.numbers[place]) - 1)}


def _rule_findings(corpus: str, lists: FindingLists, total: int) -> Iterator[AuditFinding]:
    for rule in RULES:
        if count := lists.counts[rule.name]:
            severity = rule.severity_of(count, total)
            advice = rule.advice if corpus == TRAIN else rule.held_out_advice or rule.advice
            yield _listed(corpus, rule.name, severity, rule.what, advice, lists, total)


def _listed(
    corpus: str,
    name: str,
    severity: Severity,
    what: str,
    advice: str,
    lists: FindingLists,
    total: int,
) -> AuditFinding:
    examples, file = lists.examples[name], lists.file_of(name)
    count = lists.counts[name]
    return AuditFinding(corpus, name, severity, what, advice, count, total, examples, file)


def _shift_hits(
    moved: Sequence[Shift], first: int, last: int, intake: Reader
) -> Iterator[RuleHits]:
    """Mark the first pair of each stretch."""
    here = {shift.first - first: shift for shift in moved if first <= shift.first < last}
    sides = np.zeros(last - first, np.uint8)
    sides[list(here)] = SideName.BOTH

    def describe(place: int) -> Entry:
        shift = here[place]
        return {"last": place_of(intake, shift.last), "offset": shift.offset}

    yield RuleHits("shift", sides, describe)


def _shift_findings(
    corpus: str, moved: Sequence[Shift], lists: FindingLists, total: int
) -> Iterator[AuditFinding]:
    for shift, example in zip(moved, lists.examples.get("shift", []), strict=False):
        lines = "a line" if abs(shift.offset) == 1 else f"{abs(shift.offset)} lines"
        where = "after" if shift.offset > 0 else "before"
        yield AuditFinding(
            corpus,
            "shift",
            Severity.WARNING,
            f"pairs in a row whose translation stands {lines} {where} its place",
            "Find the lines that are lost or one too many near the first, and mend the file.",
            shift.last - shift.first + 1,
            total,
            [example],
            lists.file_of("shift"),
        )


class _Leaked:
    """What of a held-out corpus stands in another one, as findings."""

    def __init__(self, other: str, intake: Reader, leaks: Leaks, clean: list[str]) -> None:
        self._other, self._intake, self._clean = other, intake, clean
        exact, by_words = leaks.exact, leaks.by_words
        pairs = _LeakCounts.of(by_words.pairs.hits(), exact.pairs.hits())
        self._found = {
            "pair": pairs,
            "source": _LeakCounts.of(by_words.src.hits(), exact.src.hits()).without(pairs),
            "target": _LeakCounts.of(by_words.tgt.hits(), exact.tgt.hits()).without(pairs),
        }

    def hits(self, first: int, last: int) -> Iterator[RuleHits]:
        """Mark the held-out pairs from number `first` to the one before `last`."""
        sides = {"pair": SideName.BOTH, "source": SideName.SRC, "target": SideName.TGT}
        for kind, found in self._found.items():
            marks = np.where(found.times[first:last] > 0, sides[kind], SideName.NONE).astype(
                np.uint8
            )
            yield RuleHits(self._name(kind), marks, _At(found, first, self._intake).describe)

    def findings(self, corpus: str, lists: FindingLists, total: int) -> Iterator[AuditFinding]:
        """Return a finding for each kind of leak."""
        for kind, found in self._found.items():
            if count := lists.counts[self._name(kind)]:
                few = 0 if kind == "pair" else _FEW_LEAKS * total
                exact = int((found.is_exact & (found.times > 0)).sum())
                is_open = not self._is_left_out(kind, count, exact)
                severity = Severity.WARNING if is_open and count > few else Severity.NOTE
                what = f"{kind}s that stand in {self._other} too ({exact:,} to the letter)"
                advice = self._advice() if is_open else _LEFT_OUT
                yield _listed(corpus, self._name(kind), severity, what, advice, lists, total)

    def _is_left_out(self, kind: str, count: int, exact: int) -> bool:
        """Tell whether training does without all that was found, as `data.clean` says."""
        if self._other != TRAIN:
            return False
        is_whole_pair = kind == "pair" and exact == count
        return "held-out" in self._clean or ("held-out-pair" in self._clean and is_whole_pair)

    def _name(self, kind: str) -> str:
        return f"{kind}-in-{self._other}"

    def _advice(self) -> str:
        if self._other == TRAIN:
            return f"Delete them from {TRAIN} ({TRAIN}.held-out.jsonl), or scores flatter."
        return rules.APART


class _LeakCounts(NamedTuple):
    """Of each held-out pair: how often it was found, where first, and whether to the letter."""

    times: duplicates.Numbers
    first: npt.NDArray[np.int64]
    is_exact: rules.Flags

    @classmethod
    def of(cls, by_words: LeakHits, exact: LeakHits) -> _LeakCounts:
        is_exact = exact.times > 0
        first = np.where(is_exact, exact.first, by_words.first)
        return cls(np.maximum(by_words.times, exact.times), first, is_exact)

    def without(self, others: _LeakCounts) -> _LeakCounts:
        times = np.where(others.times > 0, np.uint32(0), self.times)
        return _LeakCounts(times, self.first, self.is_exact)


class _At(NamedTuple):
    found: _LeakCounts
    offset: int
    intake: Reader

    def describe(self, place: int) -> Entry:
        pair = self.offset + place
        return {
            "first": place_of(self.intake, int(self.found.first[pair])),
            "times": int(self.found.times[pair]),
            "to_the_letter": bool(self.found.is_exact[pair]),
        }


def _file_findings(survey: Scan) -> Iterator[AuditFinding]:
    for part in survey.intake.parts:
        for notes in part.notes:
            yield from _notes_findings(survey.name, notes)
        is_whole = not (part.src.problem or part.tgt.problem)
        if is_whole and part.src.num_lines != part.tgt.num_lines:
            yield _of_file(
                survey.name,
                "unequal-lines",
                Severity.ERROR,
                f"{part.src.path} has {part.src.num_lines:,} lines and {part.tgt.path} has "
                f"{part.tgt.num_lines:,}",
                "Find the lines that are lost or one too many; training refuses the files.",
            )
    if survey.intake.num_pairs == 0:
        what = "there is not a single pair"
        yield _of_file(survey.name, "empty", Severity.ERROR, what, "Name files that have some.")


def _left_out_findings(summary: CorpusSummary) -> Iterator[AuditFinding]:
    """Find corpora of which training has nothing left."""
    corpora: Sequence[CorpusSummary | MixedSummary] = summary.mixture or [summary]
    for own in corpora:
        if 0 < own.num_pairs == sum(own.left_out.values()):
            what = f"all pairs of {own.name} are left out: {format_counts(own.left_out)}"
            advice = f"Change {format_precedence(own.left_out)}; training refuses the corpus."
            yield _of_file(summary.name, "all-left-out", Severity.ERROR, what, advice)


def _notes_findings(corpus: str, notes: FileNotes) -> Iterator[AuditFinding]:
    if notes.problem:
        what = f"{notes.path} cannot be read to its end: {notes.problem}"
        yield _of_file(corpus, "unreadable", Severity.ERROR, what, "Put the whole file there.")
    if notes.num_undecodable:
        what = f"{notes.path} is not UTF-8 (lines: {notes.num_undecodable:,}; the first is "
        what += f"{notes.first_undecodable})"
        advice = "Unpack or convert it, for example with iconv; training refuses it."
        yield _of_file(corpus, "encoding", Severity.ERROR, what, advice)
    if notes.num_faults:
        what = f"{notes.path} has rows that are no pair: {notes.num_faults:,}; the first is row "
        what += notes.first_fault
        yield _of_file(
            corpus, "faulty-row", Severity.ERROR, what, "Mend them; training refuses them."
        )
    if notes.num_broken:
        what = f"{notes.path} has {notes.num_broken:,} rows with a line break within a field"
        advice = "Nothing need be done: a line break is a space to mtrain."
        yield _of_file(corpus, "field-break", Severity.NOTE, what, advice)
    if notes.has_bom:
        what = f"{notes.path} begins with a byte-order mark"
        advice = "Delete it: mtrain passes over it, other tools take it for text."
        yield _of_file(corpus, "byte-order-mark", Severity.NOTE, what, advice)
    if notes.num_crlf:
        is_mixed = notes.num_crlf < notes.num_lines
        what = f"{notes.path} ends {notes.num_crlf:,} of {notes.num_lines:,} lines with CR LF"
        advice = "End all lines with LF alone: mtrain takes the CR off, other tools do not."
        severity = Severity.WARNING if is_mixed else Severity.NOTE
        yield _of_file(corpus, "line-ends", severity, what, advice)


def _of_file(corpus: str, name: str, severity: Severity, what: str, advice: str) -> AuditFinding:
    return AuditFinding(corpus, name, severity, what, advice, 1, 1, [])


def _mixture(config: Config, train: Scan, tally: _Tally) -> list[MixedSummary]:
    """Return what becomes of the corpora of a mixture; nothing if there is one corpus."""
    if not isinstance(config.data.train, list):
        return []
    corpora = corpora_of(config.data.train, "data.train")
    sizes = Counter({named.name: 0 for named in corpora})
    for part in train.intake.parts:
        sizes[part.corpus or ""] += part.num_pairs - part.num_faults
    left_out = [dict(tally.by_corpus.get(named.name, {})) for named in corpora]
    kept = [sizes[own.name] - sum(out.values()) for own, out in zip(corpora, left_out, strict=True)]
    weights = [
        weight_of(count, own.weight, config.data.temperature)
        for own, count in zip(corpora, kept, strict=True)
    ]
    return [
        MixedSummary(own.name, sizes[own.name], out, weight / (sum(weights) or 1.0))
        for own, out, weight in zip(corpora, left_out, weights, strict=True)
    ]


def _summary(
    survey: Scan, train: Scan, tally: _Tally, mixture: list[MixedSummary]
) -> CorpusSummary:
    sides = zip(survey.pieces, train.pieces, strict=True)
    return CorpusSummary(
        survey.name,
        sum(part.num_pairs - part.num_faults for part in survey.intake.parts),
        dict(tally.counts),
        [own.coverage(counts) for own, counts in sides],
        mixture,
    )
