"""Audit the corpora of a config: which problems they have, where, and how serious they are.

Each corpus is read once into records on disk; the rules judge the records, and a second reading
of the text fills the lists.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from mtrain.audit import misalignment, rules
from mtrain.audit.duplicates import Numbers, Occurrences
from mtrain.audit.features import SideClassifier
from mtrain.audit.report import NUM_EXAMPLES, AuditFinding, AuditReport, CorpusSummary, Entry
from mtrain.audit.rules import RULES, CorpusProfile, Rule, Severity, SideName
from mtrain.audit.scan import TRAIN, VALID, Scan, corpora
from mtrain.config.corpora import corpora_of, weight_of
from mtrain.config.sections import CLEAN, Config, DataConfig
from mtrain.corpus.dropped import format_counts, format_remedy
from mtrain.corpus.reader import (
    FileNotes,
    FilePair,
    Reader,
    TextBlock,
    possible_header,
    size_of,
)
from mtrain.io.lines import Advance
from mtrain.io.text_width import count
from mtrain.tokenizer.sentencepiece import Tokenizer

REPORT_FILE = "report.json"  # beside the lists, in every folder of them
_USUAL_LEAK_SHARE = 0.01  # of held-out lines of which one side occurs elsewhere
_SPLIT_LEAK_SHARE = 0.1  # of the pairs of a held-out corpus in training, above which it is no split

Dropped = dict[str | None, Counter[str]]  # for each corpus of a mixture, dropped pairs by reason


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
    data = config.data
    scans = [Scan(name, text, directory, tokenizer) for name, text in corpora(data).items()]
    classifier = SideClassifier()
    for num_before, scan in enumerate(scans):
        held_out = scans[:num_before] if scan.name in (VALID, TRAIN) else []
        scan.read(classifier, held_out, advance)
    train = scans[-1]
    profile = rules.learn(train.windows(), data.max_tokens)
    readers = {scan.name: scan.reader for scan in scans}
    summaries: list[CorpusSummary] = []
    findings: list[AuditFinding] = []
    for scan in reversed(scans):
        lists = _FindingLists(directory, scan)
        scan_findings, dropped = _judge(scan, profile, readers, lists, data, advance)
        lists.close()
        scan.records_path.unlink()
        summary = CorpusSummary(
            scan.name,
            sum(part.num_pairs - part.src.num_faults for part in scan.reader.parts),
            dict(sum(dropped.values(), Counter())),
            coverage=[
                counts.coverage(train_counts)
                for counts, train_counts in zip(scan.piece_counts, train.piece_counts, strict=True)
            ],
            mixture=_mixture(data, scan, dropped) if scan is train else [],
        )
        summaries.append(summary)
        findings += [*scan_findings, *_all_dropped(summary)]
    findings.sort(key=lambda finding: (-finding.severity, -finding.share))
    return AuditReport(summaries, findings)


class _FindingLists:
    """The lists of one corpus, by name: each is a file of JSON lines, one for each pair."""

    def __init__(self, directory: Path, scan: Scan) -> None:
        self.counts: Counter[str] = Counter()  # of entries
        self.details: dict[str, Callable[[int], Entry]] = {}  # return more fields of a pair's entry
        self._examples: dict[str, list[Entry]] = {}  # the first entries
        self._directory, self._corpus, self._reader = directory, scan.name, scan.reader
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
            examples = self._examples.setdefault(name, [])
            if len(examples) < NUM_EXAMPLES:
                examples.append(entry)
            if name not in self._streams:
                path = self._directory / self._file(name)
                self._streams[name] = path.open("w", encoding="utf-8", newline="\n")
            self._streams[name].write(json.dumps(entry, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close all files."""
        for stream in self._streams.values():
            stream.close()

    def finding(
        self, name: str, severity: Severity, what: str, advice: str, training: str
    ) -> AuditFinding:
        """Return the finding of a whole list."""
        return AuditFinding(
            self._corpus,
            name,
            severity,
            what,
            advice,
            self.counts[name],
            self._reader.num_pairs,
            training,
            self._examples[name],
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


def _judge(
    scan: Scan,
    profile: CorpusProfile,
    readers: dict[str, Reader],
    lists: _FindingLists,
    data: DataConfig,
    advance: Advance,
) -> tuple[list[AuditFinding], Dropped]:
    """Judge all pairs of a corpus and write its lists; return the findings and dropped pairs."""
    dropping = rules.dropping_rules(data.clean) if scan.name == TRAIN else []
    dropped: Dropped = {}
    repeats = scan.find_repeats()
    for rule in RULES:
        if rule.refers is not None:
            lists.details[rule.name] = partial(_earlier, scan.reader, rule.refers(repeats))
    has_enough_pairs = scan.reader.num_pairs >= misalignment.MIN_PAIRS
    shifts = misalignment.find(scan.windows) if has_enough_pairs else []
    shift_starts = np.array([shift.first for shift in shifts], np.int64)
    by_start = dict(zip(shift_starts.tolist(), shifts, strict=True))
    lists.details["shift"] = lambda pair: {
        "last": _place(scan.reader, by_start[pair].last),
        "offset": by_start[pair].offset,
    }
    leaks = list(_leaks(scan))
    for leak in leaks:
        lists.details[leak.name] = partial(leak.details, readers[leak.other])
    for block in Reader(scan.corpus).blocks(advance):
        end = block.first + len(block.src)
        pairs = scan.pairs(block.first, len(block.src))
        counts = dropped.setdefault(scan.reader.part_of(block.first).corpus, Counter())
        counts.update(filter(None, rules.drop_reasons(dropping, pairs, profile)))
        for rule in RULES:
            lists.add(rule.name, rule.judge(pairs, profile), block)
        starts = shift_starts[slice(*np.searchsorted(shift_starts, [block.first, end]))]
        is_start = np.zeros(len(block.src), np.uint8)
        is_start[starts - block.first] = SideName.BOTH
        lists.add("shift", is_start, block)
        for leak in leaks:
            is_leaked = leak.occurrences.times[block.first : end] > 0
            lists.add(leak.name, is_leaked * np.uint8(leak.side), block)
    findings = list(_file_findings(scan, data))
    if shifts:
        finding = lists.finding(
            "shift",
            Severity.WARNING,
            "misaligned pairs",
            "Find the line that is missing or surplus near the first pair of each stretch.",
            "keeps them" if scan.name == TRAIN else "",
        )
        num_shifted = sum(shift.last - shift.first + 1 for shift in shifts)
        findings.append(replace(finding, count=num_shifted))
    findings += [
        _leak_finding(lists, leak, scan, data.clean) for leak in leaks if lists.counts[leak.name]
    ]
    findings += [
        _rule_finding(lists, rule, scan, data.clean) for rule in RULES if lists.counts[rule.name]
    ]
    return findings, dropped


def _earlier(reader: Reader, numbers: Numbers, pair: int) -> Entry:
    return {"first": _place(reader, int(numbers[pair]) - 1)}


def _rule_finding(lists: _FindingLists, rule: Rule, scan: Scan, clean: list[str]) -> AuditFinding:
    severity = rule.severity_of(lists.counts[rule.name], scan.reader.num_pairs)
    advice, training = rule.advice, ""
    if severity == Severity.ERROR:
        files = (notes for part in scan.reader.parts for notes in part.notes)
        first = next(notes for notes in files if notes.num_undecodable)
        advice += f" The first is in {first.path}, {first.first_undecodable}."
        training = "refuses them"
    elif scan.name != TRAIN:
        advice = rule.held_out_advice or advice
    elif rule in rules.dropping_rules(clean):
        training = "drops them"
    else:
        training = rule.training
        name = "blank-side" if rule.name == "blank-pair" else rule.name
        if name in CLEAN and severity > Severity.NOTE:
            advice += f" To drop them: {_clean_with(clean, name)}."
    return lists.finding(rule.name, severity, rule.what, advice, training)


def _clean_with(clean: list[str], name: str) -> str:
    return f"`data.clean: [{', '.join([*clean, name])}]`"


class _Leak(NamedTuple):
    """The pairs, the sources or the targets of a held-out corpus that occur in another one."""

    kind: str  # "pair", "source" or "target"
    side: SideName  # of the pair
    other: str  # the name of the other corpus
    occurrences: Occurrences

    @property
    def name(self) -> str:
        """The name of the list."""
        return f"{self.kind}-in-{self.other}"

    def details(self, reader: Reader, pair: int) -> Entry:
        """Return further fields of a pair's entry, given the reader of the other corpus."""
        return {
            "first": _place(reader, int(self.occurrences.first[pair])),
            "times": int(self.occurrences.times[pair]),
            "exact_times": int(self.occurrences.exact_times[pair]),
        }


def _leaks(scan: Scan) -> Iterator[_Leak]:
    """Yield the leaks of a held-out corpus; where a pair leaks, its sides are not counted again."""
    for other, leaks in scan.leaks.items():
        src, tgt, pair = leaks.occurrences()
        yield _Leak("pair", SideName.BOTH, other, pair)
        for kind, side, of_side in (("source", SideName.SRC, src), ("target", SideName.TGT, tgt)):
            times = np.where(pair.times > 0, np.uint32(0), of_side.times)
            yield _Leak(kind, side, other, of_side._replace(times=times))


def _leak_finding(lists: _FindingLists, leak: _Leak, scan: Scan, clean: list[str]) -> AuditFinding:
    times, exact_times, _ = leak.occurrences
    num_found, num_exact = lists.counts[leak.name], int(((times > 0) & (exact_times > 0)).sum())
    num_left, training, advice = num_found, "", rules.SEPARATE
    if leak.other == TRAIN:
        if "held-out" in clean:
            num_left = 0
        elif "held-out-pair" in clean and leak.kind == "pair":
            num_left = int((times > exact_times).sum())
        training = "keeps them" if num_left == num_found else f"keeps {num_left:,}"
        advice = "A model that was trained on them scores too high."
    usual = 0 if leak.kind == "pair" else _USUAL_LEAK_SHARE * len(times)
    severity = Severity.WARNING if num_left > usual else Severity.NOTE
    if severity > Severity.NOTE and leak.other == TRAIN:
        advice += f" To drop them: {_clean_with(clean, 'held-out')}."
    if num_left == 0:
        training, advice = "drops them", "Nothing to do: training drops all their copies."
        if _SPLIT_LEAK_SHARE * len(times) < num_found < np.count_nonzero(scan.exact.pair):
            severity = Severity.WARNING
            advice = "Scores are sound, but training loses every copy; hold out other pairs."
    if num_exact < num_found:
        advice += f" {num_found - num_exact:,} differ in case, punctuation or spaces alone."
    what = f"{leak.kind}s found in {leak.other}"
    return lists.finding(leak.name, severity, what, advice, training)


class _FileRule(NamedTuple):
    """One kind of problem of a file."""

    name: str
    severity: Severity
    what: str  # the files
    advice: str
    problem: Callable[[FilePair, FileNotes, DataConfig], str]  # returns "" if there is none
    training: str = ""  # what training does with them


_FILE_RULES = [
    _FileRule(
        "unreadable",
        Severity.ERROR,
        "files that cannot be read",
        "Replace them by whole files.",
        lambda part, notes, data: notes.problem,
        "refuses them",
    ),
    _FileRule(
        "unequal-lines",
        Severity.ERROR,
        "files of unequal length",
        "Find the lines that are missing or surplus.",
        lambda part, notes, data: (
            count(notes.num_lines, "line")
            if part.src.num_lines != part.tgt.num_lines
            and not (part.src.problem or part.tgt.problem)
            else ""
        ),
        "refuses them",
    ),
    _FileRule(
        "malformed-row",
        Severity.ERROR,
        "files with malformed rows",
        "Correct or delete the rows.",
        lambda part, notes, data: (
            f"{count(notes.num_faults, 'row')}; the first is row {notes.first_fault}"
            if notes.num_faults
            else ""
        ),
        "refuses them",
    ),
    _FileRule(
        "header",
        Severity.WARNING,
        "files with a header, it seems",
        "Set `header: true` for the corpus to leave the line out, or `header: false` to keep it.",
        lambda part, notes, data: " TAB ".join(possible_header(notes, data) or ()),
        "keeps it",
    ),
    _FileRule(
        "line-ends",
        Severity.WARNING,
        "files with LF and CR LF at line ends",
        "mtrain removes the CR, but other tools keep it: end all lines in LF alone.",
        lambda part, notes, data: (
            f"{notes.num_crlf:,} of {count(notes.num_lines, 'line')} with CR LF"
            if 0 < notes.num_crlf < notes.num_lines
            else ""
        ),
    ),
    _FileRule(
        "line-ends",
        Severity.NOTE,
        "files with CR LF at line ends",
        "mtrain removes the CR, but other tools keep it: end all lines in LF alone.",
        lambda part, notes, data: (
            count(notes.num_lines, "line") if notes.num_crlf == notes.num_lines > 0 else ""
        ),
    ),
    _FileRule(
        "byte-order-mark",
        Severity.NOTE,
        "files that begin with a byte-order mark",
        "mtrain skips it, but other tools take it for text: delete it.",
        lambda part, notes, data: "begins with U+FEFF" if notes.has_bom else "",
    ),
    _FileRule(
        "field-break",
        Severity.NOTE,
        "files with line breaks within fields",
        "Nothing to do: mtrain reads a line break as a space.",
        lambda part, notes, data: count(notes.num_broken, "row") if notes.num_broken else "",
    ),
]
_NO_PAIRS = _FileRule(
    "empty",
    Severity.ERROR,
    "files without a pair",
    "Name files with text.",
    lambda part, notes, data: "no pairs",
    "refuses the corpus",
)


def _file_findings(scan: Scan, data: DataConfig) -> Iterator[AuditFinding]:
    """Yield what is wrong with whole files."""
    files = [(part, notes) for part in scan.reader.parts for notes in part.notes]
    for rule in _FILE_RULES if scan.reader.num_pairs else [*_FILE_RULES, _NO_PAIRS]:
        problems = ((notes.path, rule.problem(part, notes, data)) for part, notes in files)
        examples = [{"file": path, "problem": problem} for path, problem in problems if problem]
        if examples:
            is_held_out = scan.name != TRAIN and rule.severity < Severity.ERROR
            yield AuditFinding(
                scan.name,
                rule.name,
                rule.severity,
                rule.what,
                rule.advice,
                len(examples),
                len(files),
                "" if is_held_out else rule.training,
                examples,
            )


def _all_dropped(summary: CorpusSummary) -> Iterator[AuditFinding]:
    """Yield an error for each corpus that has pairs, all of which are dropped."""
    for part in summary.mixture or [summary]:
        if 0 < part.num_pairs == sum(part.num_dropped.values()):
            yield AuditFinding(
                summary.name,
                "all-dropped",
                Severity.ERROR,
                f"all pairs of {part.name} are dropped",
                f"Change {format_remedy(part.num_dropped)}; dropped are "
                f"{format_counts(part.num_dropped)}.",
                part.num_pairs,
                part.num_pairs,
                "refuses the corpus",
                [],
            )


def _mixture(data: DataConfig, train: Scan, dropped: Dropped) -> list[CorpusSummary]:
    """Return a summary of each corpus of a mixture; nothing if there is one corpus."""
    if not isinstance(data.train, list):
        return []
    sizes, weights = Counter[str](), dict[str, float]()
    for part in train.reader.parts:
        sizes[part.corpus or ""] += part.num_pairs - part.src.num_faults
    for corpus in corpora_of(data.train, "data.train"):
        num_kept = sizes[corpus.name] - dropped.get(corpus.name, Counter()).total()
        weights[corpus.name] = weight_of(num_kept, corpus.weight, data.temperature)
    total = sum(weights.values()) or 1.0
    return [
        CorpusSummary(name, sizes[name], dict(dropped.get(name, {})), weight / total)
        for name, weight in weights.items()
    ]
