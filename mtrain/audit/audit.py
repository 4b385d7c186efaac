"""Audit the corpora of a config: which problems they have, where, and how serious they are.

Each corpus is read once into records on disk; the rules judge the records, and a second reading
of the text fills the lists.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from mtrain.audit import misalignment, rules
from mtrain.audit.duplicates import Numbers
from mtrain.audit.features import Flags, Ints, SideClassifier
from mtrain.audit.misalignment import Shift
from mtrain.audit.rules import RULES, CorpusProfile, Severity, SideName
from mtrain.audit.scan import TRAIN, VALID, Coverage, Scan, corpora
from mtrain.config.corpora import corpora_of, weight_of
from mtrain.config.sections import Config, DataConfig
from mtrain.corpus.dropped import format_counts, format_remedy
from mtrain.corpus.reader import (
    FileNotes,
    FilePair,
    Reader,
    TextBlock,
    possible_headers,
    size_of,
)
from mtrain.io.lines import Advance
from mtrain.tokenizer.sentencepiece import Tokenizer

REPORT_FILE = "report.json"  # beside the lists, in every folder of them
_NUM_EXAMPLES = 2  # of each list, for the report
_USUAL_LEAK_SHARE = 0.01  # of held-out lines of which one side occurs elsewhere

Entry = dict[str, Any]  # of a list


@dataclass(frozen=True)
class AuditFinding:
    """One kind of problem of a corpus."""

    corpus: str
    name: str  # of the rule, and of the list
    severity: Severity
    what: str  # the problem, without its count
    advice: str  # what to do, in one sentence
    count: int  # pairs with the problem
    total: int  # pairs
    examples: list[Entry]  # the first entries of the list
    list_file: str | None = None  # the name of the file with all entries, if there is one


@dataclass(frozen=True)
class MixedSummary:
    """A corpus of a mixture: as `CorpusSummary`, and its share of the pairs of an epoch."""

    name: str
    num_pairs: int
    num_dropped: dict[str, int]
    share: float


@dataclass(frozen=True)
class CorpusSummary:
    """A corpus, and what training does with its pairs."""

    name: str
    num_pairs: int  # without rows that are no pair
    num_dropped: dict[str, int]  # by reason; `max-tokens` is only known with a tokenizer
    coverage: list[Coverage] = field(default_factory=list)  # of both sides, with a tokenizer
    mixture: list[MixedSummary] = field(default_factory=list)  # its corpora, if it is a mixture


@dataclass(frozen=True)
class AuditReport:
    """All corpora, training first, and all findings, the most serious first."""

    corpora: list[CorpusSummary]
    findings: list[AuditFinding]

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)


class FindingLists:
    """The lists of one corpus, by name: each is a file of JSON lines, one for each pair."""

    def __init__(self, directory: Path, corpus: str, reader: Reader) -> None:
        self.counts: Counter[str] = Counter()  # of entries
        self.examples: dict[str, list[Entry]] = {}  # the first entries
        self.details: dict[str, Callable[[int], Entry]] = {}  # return more fields of a pair's entry
        self._directory, self._corpus, self._reader = directory, corpus, reader
        self._streams: dict[str, TextIO] = {}

    def add(self, name: str, sides: npt.NDArray[np.uint8], block: TextBlock) -> None:
        """Write those pairs of a block of which a side has the problem."""
        for row in np.flatnonzero(sides).tolist():
            pair = block.first + row
            part = self._reader.part_of(pair)
            entry = {
                "src_file": part.src.path,
                "tgt_file": part.tgt.path,
                "line": part.line_of(pair),
                "side": SideName(int(sides[row])).name.lower(),
                "src": block.src[row],
                "tgt": block.tgt[row],
            } | _corpus_field(part)
            if name in self.details:
                entry |= self.details[name](pair)
            self.counts[name] += 1
            examples = self.examples.setdefault(name, [])
            if len(examples) < _NUM_EXAMPLES:
                examples.append(entry)
            if name not in self._streams:
                path = self._directory / self._file(name)
                self._streams[name] = path.open("w", encoding="utf-8", newline="\n")
            self._streams[name].write(json.dumps(entry, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close all files."""
        for stream in self._streams.values():
            stream.close()

    def finding(self, name: str, severity: Severity, what: str, advice: str) -> AuditFinding:
        """Return the finding of a whole list."""
        return AuditFinding(
            self._corpus,
            name,
            severity,
            what,
            advice,
            self.counts[name],
            self._reader.num_pairs,
            self.examples[name],
            self._file(name),
        )

    def _file(self, name: str) -> str:
        return f"{self._corpus}.{name}.jsonl"


def _corpus_field(part: FilePair) -> Entry:
    return {} if part.corpus is None else {"corpus": part.corpus}


def _place(reader: Reader, pair: int) -> Entry:
    """Return the source file and the line of a pair."""
    part = reader.part_of(pair)
    return {"file": part.src.path, "line": part.line_of(pair)} | _corpus_field(part)


def num_bytes(config: Config) -> int:
    """Return the bytes of all corpora on disk."""
    return sum(size_of(corpus) for corpus in corpora(config.data).values())


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
    scans = [Scan(name, text, directory, tokenizer) for name, text in corpora(config.data).items()]
    classifier = SideClassifier()
    for num_before, scan in enumerate(scans):
        held_out = scans[:num_before] if scan.name in (VALID, TRAIN) else []
        scan.read(classifier, held_out, advance)
    train = scans[-1]
    profile = rules.learn(train.windows(), config.data.max_tokens)
    readers = {scan.name: scan.reader for scan in scans}
    summaries: list[CorpusSummary] = []
    findings: list[AuditFinding] = []
    for scan in reversed(scans):
        lists = FindingLists(directory, scan.name, scan.reader)
        of_scan, dropped = _judge(scan, profile, readers, lists, config.data, advance)
        lists.close()
        summary = CorpusSummary(
            scan.name,
            sum(part.num_pairs - part.src.num_faults for part in scan.reader.parts),
            dict(sum(dropped.values(), Counter())),
            [
                counts.coverage(of_train)
                for counts, of_train in zip(scan.piece_counts, train.piece_counts, strict=True)
            ],
            _mixture(config, scan, dropped) if scan is train else [],
        )
        summaries.append(summary)
        findings += of_scan
        parts: list[CorpusSummary | MixedSummary] = [*summary.mixture] or [summary]
        for part in parts:
            if 0 < part.num_pairs == sum(part.num_dropped.values()):
                what = f"all pairs of {part.name} are dropped: {format_counts(part.num_dropped)}"
                advice = f"Change {format_remedy(part.num_dropped)}; training refuses the corpus."
                problem = ("all-dropped", Severity.ERROR, what, advice)
                findings.append(AuditFinding(scan.name, *problem, 1, 1, []))
        scan.records_path.unlink()
    return AuditReport(summaries, sorted(findings, key=lambda finding: -finding.severity))


def _judge(
    scan: Scan,
    profile: CorpusProfile,
    readers: dict[str, Reader],
    lists: FindingLists,
    data: DataConfig,
    advance: Advance,
) -> tuple[list[AuditFinding], dict[str | None, Counter[str]]]:
    """Judge all pairs of a corpus and write its lists.

    Returns the findings, and for each corpus of a mixture the dropped pairs by reason.
    """
    dropping = rules.dropping_rules(data.clean) if scan.name == TRAIN else []
    dropped: dict[str | None, Counter[str]] = {}
    repeats = scan.find_repeats()
    for rule in RULES:
        if rule.refers is not None:
            lists.details[rule.name] = partial(_earlier, scan.reader, rule.refers(repeats))
    shifts: list[Shift] = []
    if scan.reader.num_pairs >= misalignment.MIN_PAIRS:
        shifts = misalignment.find(scan.windows)
        lists.details["shift"] = partial(_end_of_shift, scan.reader, shifts)
    leaks = list(_leaks(scan))
    for leak in leaks:
        lists.details[leak.name] = partial(leak.details, readers[leak.other])
    for block in Reader(scan.corpus).blocks(advance):
        here = slice(block.first, block.first + len(block.src))
        pairs = scan.pairs(block.first, len(block.src))
        counts = dropped.setdefault(scan.reader.part_of(block.first).corpus, Counter())
        counts.update(filter(None, rules.drop_reasons(dropping, pairs, profile)))
        for rule in RULES:
            lists.add(rule.name, rule.judge(pairs, profile), block)
        is_start = np.isin(np.arange(here.start, here.stop), [shift.first for shift in shifts])
        lists.add("shift", is_start * np.uint8(SideName.BOTH), block)
        for leak in leaks:
            lists.add(leak.name, (leak.times[here] > 0) * np.uint8(leak.side), block)
    findings = [
        AuditFinding(scan.name, *problem, 1, 1, [])
        for problem in _problems_of_files(scan.reader, data)
    ]
    findings += [
        _shift_finding(lists, shift, example)
        for shift, example in zip(shifts, lists.examples.get("shift", []), strict=False)
    ]
    findings += [
        _leak_finding(lists, leak, data.clean) for leak in leaks if lists.counts[leak.name]
    ]
    for rule in RULES:
        if count := lists.counts[rule.name]:
            advice = rule.advice if scan.name == TRAIN else rule.held_out_advice or rule.advice
            severity = rule.severity_of(count, scan.reader.num_pairs)
            findings.append(lists.finding(rule.name, severity, rule.what, advice))
    return findings, dropped


def _earlier(reader: Reader, numbers: Numbers, pair: int) -> Entry:
    return {"first": _place(reader, int(numbers[pair]) - 1)}


def _end_of_shift(reader: Reader, shifts: list[Shift], pair: int) -> Entry:
    shift = next(shift for shift in shifts if shift.first == pair)
    return {"last": _place(reader, shift.last), "offset": shift.offset}


def _shift_finding(lists: FindingLists, shift: Shift, example: Entry) -> AuditFinding:
    lines = "a line" if abs(shift.offset) == 1 else f"{abs(shift.offset)} lines"
    where = "after" if shift.offset > 0 else "before"
    finding = lists.finding(
        "shift",
        Severity.WARNING,
        f"pairs in a row whose translation stands {lines} {where} its place",
        "Find the lines that are lost or one too many near the first, and mend the file.",
    )
    return replace(finding, count=shift.last - shift.first + 1, examples=[example])


class _Leak(NamedTuple):
    """The pairs, the sources or the targets of a held-out corpus that occur in another one."""

    kind: str  # "pair", "source" or "target"
    side: SideName  # of the pair
    other: str  # the name of the other corpus
    times: Numbers  # for each held-out pair, the number of occurrences
    first: Ints  # the pair of the first occurrence, of an exact one if there is one
    is_exact: Flags  # whether there is an exact occurrence

    @property
    def name(self) -> str:
        """The name of the list."""
        return f"{self.kind}-in-{self.other}"

    def details(self, reader: Reader, pair: int) -> Entry:
        """Return further fields of a pair's entry, given the reader of the other corpus."""
        return {
            "first": _place(reader, int(self.first[pair])),
            "times": int(self.times[pair]),
            "to_the_letter": bool(self.is_exact[pair]),
        }


def _leaks(scan: Scan) -> Iterator[_Leak]:
    """Yield the leaks of a held-out corpus; where a pair leaks, its sides are not counted again."""
    for other, leaks in scan.leaks.items():
        exact, by_key = leaks.exact, leaks.by_key
        is_pair = np.zeros(scan.reader.num_pairs, bool)
        for kind, side, exact_table, key_table in (
            ("pair", SideName.BOTH, exact.pairs, by_key.pairs),
            ("source", SideName.SRC, exact.src, by_key.src),
            ("target", SideName.TGT, exact.tgt, by_key.tgt),
        ):
            exact_times, exact_first = exact_table.hits()
            key_times, key_first = key_table.hits()
            is_exact = exact_times > 0
            times = np.where(is_pair, np.uint32(0), np.maximum(exact_times, key_times))
            first = np.where(is_exact, exact_first, key_first)
            yield _Leak(kind, side, other, times, first, is_exact)
            if kind == "pair":
                is_pair = times > 0


def _leak_finding(lists: FindingLists, leak: _Leak, clean: list[str]) -> AuditFinding:
    count, num_exact = lists.counts[leak.name], int((leak.is_exact & (leak.times > 0)).sum())
    is_exact_pair = leak.kind == "pair" and num_exact == count
    is_dropped = leak.other == TRAIN and (
        "held-out" in clean or ("held-out-pair" in clean and is_exact_pair)
    )
    usual = 0 if leak.kind == "pair" else _USUAL_LEAK_SHARE * len(leak.times)
    severity = Severity.WARNING if not is_dropped and count > usual else Severity.NOTE
    what = f"{leak.kind}s that stand in {leak.other} too ({num_exact:,} to the letter)"
    advice = rules.APART
    if is_dropped:
        advice = "Nothing need be done: training leaves them out (`data.clean`)."
    elif leak.other == TRAIN:
        advice = f"Delete them from {TRAIN} ({TRAIN}.held-out.jsonl), or scores flatter."
    return lists.finding(leak.name, severity, what, advice)


_Problem = tuple[str, Severity, str, str]  # name, severity, what, advice


def _problems_of_files(reader: Reader, data: DataConfig) -> Iterator[_Problem]:
    for part in reader.parts:
        for notes in part.notes:
            yield from _problems_of_file(notes)
        is_complete = not (part.src.problem or part.tgt.problem)
        if is_complete and part.src.num_lines != part.tgt.num_lines:
            what = f"{part.src.path} has {part.src.num_lines:,} lines and {part.tgt.path} has "
            what += f"{part.tgt.num_lines:,}"
            advice = "Find the lines that are lost or one too many; training refuses the files."
            yield "unequal-lines", Severity.ERROR, what, advice
    for path, cells in possible_headers(reader, data).items():
        what = f"{path} begins with what looks like a header: {' TAB '.join(cells)}"
        advice = "Set `header: true` for this corpus to leave the line out, or `header: false`."
        yield "header", Severity.WARNING, what, advice
    if reader.num_pairs == 0:
        what = "there is not a single pair"
        yield "empty", Severity.ERROR, what, "Name files that have some."


def _problems_of_file(notes: FileNotes) -> Iterator[_Problem]:
    if notes.problem:
        what = f"{notes.path} cannot be read to its end: {notes.problem}"
        yield "unreadable", Severity.ERROR, what, "Put the whole file there."
    if notes.num_undecodable:
        what = f"{notes.path} is not UTF-8 (lines: {notes.num_undecodable:,}; the first is "
        what += f"{notes.first_undecodable})"
        advice = "Unpack or convert it, for example with iconv; training refuses it."
        yield "encoding", Severity.ERROR, what, advice
    if notes.num_faults:
        what = f"{notes.path} has rows that are no pair: {notes.num_faults:,}; the first is row "
        what += notes.first_fault
        yield "faulty-row", Severity.ERROR, what, "Mend them; training refuses them."
    if notes.num_broken:
        what = f"{notes.path} has {notes.num_broken:,} rows with a line break within a field"
        advice = "Nothing need be done: a line break is a space to mtrain."
        yield "field-break", Severity.NOTE, what, advice
    if notes.has_bom:
        what = f"{notes.path} begins with a byte-order mark"
        advice = "Delete it: mtrain passes over it, other tools take it for text."
        yield "byte-order-mark", Severity.NOTE, what, advice
    if notes.num_crlf:
        what = f"{notes.path} ends {notes.num_crlf:,} of {notes.num_lines:,} lines with CR LF"
        advice = "End all lines with LF alone: mtrain takes the CR off, other tools do not."
        severity = Severity.WARNING if notes.num_crlf < notes.num_lines else Severity.NOTE
        yield "line-ends", severity, what, advice


def _mixture(
    config: Config, train: Scan, dropped: dict[str | None, Counter[str]]
) -> list[MixedSummary]:
    """Return a summary of each corpus of a mixture; nothing if there is one corpus."""
    if not isinstance(config.data.train, list):
        return []
    sizes, weights = Counter[str](), dict[str, float]()
    for part in train.reader.parts:
        sizes[part.corpus or ""] += part.num_pairs - part.src.num_faults
    for corpus in corpora_of(config.data.train, "data.train"):
        num_kept = sizes[corpus.name] - dropped.get(corpus.name, Counter()).total()
        weights[corpus.name] = weight_of(num_kept, corpus.weight, config.data.temperature)
    total = sum(weights.values()) or 1.0
    return [
        MixedSummary(name, sizes[name], dict(dropped.get(name, {})), weight / total)
        for name, weight in weights.items()
    ]
