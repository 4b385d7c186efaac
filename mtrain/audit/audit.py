"""Audit the corpora of a config: which problems they have, where, and how serious they are.

Each corpus is read once into records on disk; the rules judge the records, and a second reading
of the text fills the lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtrain.audit import duplicates, misalignment, pair_filter, rules
from mtrain.audit.contamination import HashTable, Leaks
from mtrain.audit.coverage import Coverage
from mtrain.audit.features import SideClassifier
from mtrain.audit.finding_lists import Entry, FindingLists, RuleHits, no_details, place_of
from mtrain.audit.misalignment import Shift
from mtrain.audit.rules import RULES, CorpusProfile, Severity, SideName
from mtrain.audit.scan import Scan
from mtrain.config.corpora import TrainText, corpora_of, weight_of
from mtrain.config.sections import Config
from mtrain.corpus.dropped import format_counts, format_remedy
from mtrain.corpus.reader import FileNotes, Reader, size_of
from mtrain.io.lines import Advance
from mtrain.tokenizer.sentencepiece import Tokenizer

TRAIN, VALID = "train", "valid"
REPORT_FILE = "report.json"  # beside the lists, in every folder of them
_DROPPED = "Nothing need be done: training leaves them out (`data.clean`)."
_USUAL_LEAK_SHARE = 0.01  # of held-out lines of which one side occurs elsewhere


@dataclass(frozen=True)
class AuditFinding:
    """One kind of problem of a corpus.

    Attributes:
        corpus: its name.
        name: of the rule, and of the list.
        severity: of the problem.
        what: the problem, without its count.
        advice: what to do, in one sentence.
        count, total: the pairs with the problem, and all pairs.
        examples: the first entries of the list.
        list_file: the name of the file with all entries, if there is one.
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
    """A corpus of a mixture: as `CorpusSummary`, and its share of the pairs of an epoch."""

    name: str
    num_pairs: int
    num_dropped: dict[str, int]
    share: float


@dataclass(frozen=True)
class CorpusSummary:
    """A corpus, and what training does with its pairs.

    Attributes:
        name: of the corpus.
        num_pairs: without rows that are no pair.
        num_dropped: how many of them training drops, by reason; without a tokenizer, those over
            `data.max_tokens` are unknown.
        coverage: of source and target, if there is a tokenizer.
        mixture: its corpora, if it is a mixture.
    """

    name: str
    num_pairs: int
    num_dropped: dict[str, int]
    coverage: list[Coverage] = field(default_factory=list)
    mixture: list[MixedSummary] = field(default_factory=list)


@dataclass(frozen=True)
class AuditReport:
    """All corpora, training first, and all findings, the most serious first."""

    corpora: list[CorpusSummary]
    findings: list[AuditFinding]

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)


def corpora(config: Config) -> dict[str, TrainText]:
    """Return the corpora by name, in the order in which they are read: training comes last."""
    tests = {f"tests.{name}": corpus for name, corpus in config.data.tests.items()}
    return {**tests, VALID: config.data.valid, TRAIN: config.data.train}


def num_bytes(config: Config) -> int:
    """Return the bytes of all corpora on disk."""
    return sum(size_of(corpus) for corpus in corpora(config).values())


def audit(
    config: Config, tokenizer: Tokenizer | None, directory: Path, advance: Advance
) -> AuditReport:
    """Audit all corpora of a config.

    Args:
        config: names them.
        tokenizer: of the run, if it has one.
        directory: of the lists.
        advance: is called with the bytes read; the sum is twice the size of the corpora.
    """
    scans = [Scan(name, text, directory, tokenizer) for name, text in corpora(config).items()]
    classifier = SideClassifier()
    for scan in scans:
        held_out = [other for other in scans if _is_held_out_of(other.name, scan.name)]
        scan.read(classifier, held_out, scan.name != TRAIN, advance)
    train = scans[-1]
    profile = rules.learn(train.records.windows(), config.data.max_tokens)
    readers = {scan.name: scan.reader for scan in scans}
    summaries, findings = [], []
    for scan in reversed(scans):
        lists = FindingLists(directory, scan.name, scan.reader)
        found, dropped = _judge(scan, profile, readers, lists, config.data.clean, advance)
        summary = CorpusSummary(
            scan.name,
            sum(part.num_pairs - part.num_faults for part in scan.reader.parts),
            dict(sum(dropped.values(), Counter())),
            [
                counts.coverage(of_train)
                for counts, of_train in zip(scan.piece_counts, train.piece_counts, strict=True)
            ],
            _mixture(config, scan, dropped) if scan is train else [],
        )
        summaries.append(summary)
        findings += [*found, *_all_dropped_findings(summary)]
        scan.records.remove()
    return AuditReport(summaries, sorted(findings, key=lambda finding: -finding.severity))


def _is_held_out_of(name: str, other: str) -> bool:
    """Return whether no sentence of one corpus should occur in the other."""
    return name != other and (other == TRAIN or (other == VALID and name != TRAIN))


def _judge(
    scan: Scan,
    profile: CorpusProfile,
    readers: dict[str, Reader],
    lists: FindingLists,
    clean: list[str],
    advance: Advance,
) -> tuple[list[AuditFinding], dict[str | None, Counter[str]]]:
    """Judge all pairs of a corpus and write its lists.

    Returns the findings, and for each corpus of a mixture the dropped pairs by reason.
    """
    chosen = pair_filter.rules_of(clean) if scan.name == TRAIN else []
    dropped: dict[str | None, Counter[str]] = {}
    total = scan.reader.num_pairs
    scan.find_repeats()
    shifts = misalignment.find(scan.records.windows) if total >= misalignment.MIN_PAIRS else []
    leaks = [_LeakFinder(name, readers[name], leak, clean) for name, leak in scan.leaks.items()]
    for block in Reader(scan.corpus).blocks(advance):
        first, last = block.first, block.first + len(block.src)
        pairs = scan.pairs(first, len(block.src))
        counts = dropped.setdefault(scan.reader.part_of(first).corpus, Counter())
        counts.update(filter(None, pair_filter.reasons(chosen, pairs, profile)))
        for rule in RULES:
            details = no_details
            if rule.refers is not None:
                details = partial(_earlier, scan.reader, rule.refers(pairs))
            lists.add(RuleHits(rule.name, rule.judge(pairs, profile), details), block)
        for hits in (
            _shift_hits(shifts, first, last, scan.reader),
            *(hits for leak in leaks for hits in leak.hits(first, last)),
        ):
            lists.add(hits, block)
    lists.close()
    findings = [
        *_file_findings(scan),
        *_shift_findings(scan.name, shifts, lists, total),
        *(finding for leak in leaks for finding in leak.findings(scan.name, lists, total)),
    ]
    for rule in RULES:
        if count := lists.counts[rule.name]:
            advice = rule.advice if scan.name == TRAIN else rule.held_out_advice or rule.advice
            severity = rule.severity_of(count, total)
            findings.append(
                _listed(scan.name, rule.name, severity, rule.what, advice, lists, total)
            )
    return findings, dropped


def _earlier(reader: Reader, numbers: duplicates.Numbers, row: int) -> Entry:
    return {"first": place_of(reader, int(numbers[row]) - 1)}


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


def _shift_hits(shifts: Sequence[Shift], first: int, last: int, reader: Reader) -> RuleHits:
    """Return the first pair of each stretch as a hit."""
    here = {shift.first - first: shift for shift in shifts if first <= shift.first < last}
    sides = np.zeros(last - first, np.uint8)
    sides[list(here)] = SideName.BOTH

    def details(row: int) -> Entry:
        shift = here[row]
        return {"last": place_of(reader, shift.last), "offset": shift.offset}

    return RuleHits("shift", sides, details)


def _shift_findings(
    corpus: str, shifts: Sequence[Shift], lists: FindingLists, total: int
) -> Iterator[AuditFinding]:
    for shift, example in zip(shifts, lists.examples.get("shift", []), strict=False):
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


_LEAK_SIDES = {"pair": SideName.BOTH, "source": SideName.SRC, "target": SideName.TGT}


class _LeakFinder:
    """The lines of a held-out corpus that occur in another one, as findings."""

    def __init__(self, other: str, reader: Reader, leaks: Leaks, clean: list[str]) -> None:
        self._other, self._reader, self._clean = other, reader, clean
        exact, by_key = leaks.exact, leaks.by_key
        self._counts = {
            "pair": _LeakCounts(by_key.pairs, exact.pairs),
            "source": _LeakCounts(by_key.src, exact.src),
            "target": _LeakCounts(by_key.tgt, exact.tgt),
        }
        is_pair = self._counts["pair"].times > 0
        for kind in ("source", "target"):
            self._counts[kind].times[is_pair] = 0

    def hits(self, first: int, last: int) -> Iterator[RuleHits]:
        """Yield those of the held-out pairs from number `first` to the one before `last`."""
        for kind, counts in self._counts.items():
            is_hit = counts.times[first:last] > 0
            sides = (is_hit * np.uint8(_LEAK_SIDES[kind])).astype(np.uint8)
            yield RuleHits(self._name(kind), sides, partial(self._details, counts, first))

    def _details(self, counts: _LeakCounts, first: int, row: int) -> Entry:
        return {
            "first": place_of(self._reader, int(counts.first[first + row])),
            "times": int(counts.times[first + row]),
            "to_the_letter": bool(counts.is_exact[first + row]),
        }

    def findings(self, corpus: str, lists: FindingLists, total: int) -> Iterator[AuditFinding]:
        """Yield a finding for each kind of leak."""
        for kind, counts in self._counts.items():
            if count := lists.counts[self._name(kind)]:
                usual = 0 if kind == "pair" else _USUAL_LEAK_SHARE * total
                num_exact = int((counts.is_exact & (counts.times > 0)).sum())
                # Does training drop all of them, by `data.clean`?
                is_exact_pair = kind == "pair" and num_exact == count
                is_dropped = self._other == TRAIN and (
                    "held-out" in self._clean or ("held-out-pair" in self._clean and is_exact_pair)
                )
                severity = Severity.WARNING if not is_dropped and count > usual else Severity.NOTE
                what = f"{kind}s that stand in {self._other} too ({num_exact:,} to the letter)"
                advice = rules.APART
                if is_dropped:
                    advice = _DROPPED
                elif self._other == TRAIN:
                    advice = (
                        f"Delete them from {TRAIN} ({TRAIN}.held-out.jsonl), or scores flatter."
                    )
                yield _listed(corpus, self._name(kind), severity, what, advice, lists, total)

    def _name(self, kind: str) -> str:
        return f"{kind}-in-{self._other}"


class _LeakCounts:
    """The occurrences of each held-out line or pair: how many, the first, whether any is exact."""

    def __init__(self, by_key: HashTable, exact: HashTable) -> None:
        exact_hits, key_hits = exact.hits(), by_key.hits()
        self.times = np.maximum(key_hits.times, exact_hits.times)
        self.is_exact: npt.NDArray[np.bool_] = exact_hits.times > 0
        self.first = np.where(self.is_exact, exact_hits.first, key_hits.first)


def _file_findings(scan: Scan) -> Iterator[AuditFinding]:
    for part in scan.reader.parts:
        for notes in part.notes:
            yield from _notes_findings(scan.name, notes)
        is_complete = not (part.src.problem or part.tgt.problem)
        if is_complete and part.src.num_lines != part.tgt.num_lines:
            yield _of_file(
                scan.name,
                "unequal-lines",
                Severity.ERROR,
                f"{part.src.path} has {part.src.num_lines:,} lines and {part.tgt.path} has "
                f"{part.tgt.num_lines:,}",
                "Find the lines that are lost or one too many; training refuses the files.",
            )
    if scan.reader.num_pairs == 0:
        what = "there is not a single pair"
        yield _of_file(scan.name, "empty", Severity.ERROR, what, "Name files that have some.")


def _all_dropped_findings(summary: CorpusSummary) -> Iterator[AuditFinding]:
    """Yield the corpora of which training keeps no pair."""
    corpora: Sequence[CorpusSummary | MixedSummary] = summary.mixture or [summary]
    for corpus in corpora:
        if 0 < corpus.num_pairs == sum(corpus.num_dropped.values()):
            what = f"all pairs of {corpus.name} are dropped: {format_counts(corpus.num_dropped)}"
            advice = f"Change {format_remedy(corpus.num_dropped)}; training refuses the corpus."
            yield _of_file(summary.name, "all-dropped", Severity.ERROR, what, advice)


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


def _mixture(
    config: Config, train: Scan, dropped: dict[str | None, Counter[str]]
) -> list[MixedSummary]:
    """Return a summary of each corpus of a mixture; nothing if there is one corpus."""
    if not isinstance(config.data.train, list):
        return []
    mixed = corpora_of(config.data.train, "data.train")
    sizes = Counter({corpus.name: 0 for corpus in mixed})
    for part in train.reader.parts:
        sizes[part.corpus or ""] += part.num_pairs - part.num_faults
    counts_of = [dict(dropped.get(corpus.name, {})) for corpus in mixed]
    weights = [
        weight_of(sizes[corpus.name] - sum(counts.values()), corpus.weight, config.data.temperature)
        for corpus, counts in zip(mixed, counts_of, strict=True)
    ]
    return [
        MixedSummary(corpus.name, sizes[corpus.name], counts, weight / (sum(weights) or 1.0))
        for corpus, counts, weight in zip(mixed, counts_of, weights, strict=True)
    ]
