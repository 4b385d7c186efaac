"""Audit the corpora of a config: which problems they have, where, and how serious they are.

A first pass over each corpus writes a record of every pair to disk. The rules judge the records,
while a second pass writes the lists of affected pairs, with their text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from mtrain.audit import misalignment, rules
from mtrain.audit.duplicates import Numbers
from mtrain.audit.features import Flags, Ints
from mtrain.audit.report import NUM_EXAMPLES, AuditFinding, AuditReport, CorpusSummary, Entry
from mtrain.audit.rules import RULES, CorpusProfile, Rule, Severity, SideName, Sides
from mtrain.audit.scan import TRAIN, Scan, corpora, scan_corpora
from mtrain.config.corpora import bidirectional_corpora, corpora_of, weight_of
from mtrain.config.sections import CLEAN, Config, DataConfig
from mtrain.corpus.dropped import format_counts, format_remedy
from mtrain.corpus.reader import FileNotes, FilePair, Reader, TextBlock, possible_header, size_of
from mtrain.io.lines import Advance
from mtrain.io.text_width import count
from mtrain.tokenizer.sentencepiece import Tokenizer

REPORT_FILE = "report.json"  # beside the lists, in every folder of them
_USUAL_LEAK_SHARE = 0.01  # of held-out pairs with one side elsewhere, up to which it is a note
_SPLIT_LEAK_SHARE = 0.1  # of held-out pairs in training; above it, but below 1, it is a warning

Dropped = dict[str | None, Counter[str]]  # for each corpus of a mixture, dropped pairs by reason


def num_bytes(config: Config) -> int:
    """Return the bytes of all corpora on disk."""
    return sum(size_of(corpus) for corpus in corpora(config.data).values())


def audit(
    config: Config, tokenizer: Tokenizer | None, directory: Path, advance: Advance
) -> AuditReport:
    """Audit all corpora of a config.

    Writes the lists into `directory`. Calls `advance` with newly read bytes, in two passes.
    """
    data = config.data
    scans = scan_corpora(data, directory, tokenizer, advance, is_strict=False)
    train = scans[-1]
    is_bidirectional = bool(bidirectional_corpora(data.train))
    profile = rules.learn(train.records.windows(), data.max_tokens, is_bidirectional)
    summaries: list[CorpusSummary] = []
    findings: list[AuditFinding] = []
    for scan in reversed(scans):
        with ExitStack() as files:
            lists = _FindingLists(directory, scan, files)
            pair_findings, dropped = _judge(scan, lists, profile, data.clean, advance)
        scan.records.path.unlink()
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
        findings += [*_file_findings(scan, data), *pair_findings, *_all_dropped(summary)]
    return AuditReport(summaries, sorted(findings, key=AuditFinding.rank))


class _FindingLists:
    """The lists of one corpus, by name: each is a file of JSON lines, one for each pair."""

    def __init__(self, directory: Path, scan: Scan, files: ExitStack) -> None:
        self.counts: Counter[str] = Counter()  # of entries
        self.details: dict[str, Callable[[int], Entry]] = {}  # return more fields of a pair's entry
        self._examples: dict[str, list[Entry]] = {}  # the first entries
        self._directory, self._scan = directory, scan
        self._files, self._streams = files, dict[str, TextIO]()

    def add(self, name: str, sides: Sides, block: TextBlock) -> None:
        """Append the pairs of a block whose entry in `sides` is not NONE to the list `name`."""
        for row in np.flatnonzero(sides).tolist():
            pair = block.first + row
            part = self._scan.reader.part_of(pair)
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
            if self.counts[name] <= NUM_EXAMPLES:
                self._examples.setdefault(name, []).append(entry)
            if name not in self._streams:
                path = self._directory / self._file(name)
                stream = path.open("w", encoding="utf-8", newline="\n")
                self._streams[name] = self._files.enter_context(stream)
            self._streams[name].write(json.dumps(entry, ensure_ascii=False) + "\n")

    def finding(
        self, name: str, severity: Severity, what: str, advice: str, training: str
    ) -> AuditFinding:
        """Return the finding of a whole list; `training` is what training does with its pairs."""
        return AuditFinding(
            self._scan.name,
            name,
            severity,
            what,
            advice,
            self.counts[name],
            self._scan.reader.num_pairs,
            training if self._scan.name == TRAIN or "-in-train" in name else "",
            self._examples[name],
            self._file(name),
        )

    def _file(self, name: str) -> str:
        return f"{self._scan.name}.{name}.jsonl"


def _corpus_field(part: FilePair) -> Entry:
    return {} if part.corpus is None else {"corpus": part.corpus}


def _place(reader: Reader, pair: int, is_tgt: bool = False) -> Entry:
    """Return the file of one side, and the line, of a pair."""
    part = reader.part_of(pair)
    file = part.tgt if is_tgt else part.src
    return {"file": file.path, "line": part.line_of(pair)} | _corpus_field(part)


def _judge(
    scan: Scan, lists: _FindingLists, profile: CorpusProfile, clean: list[str], advance: Advance
) -> tuple[list[AuditFinding], Dropped]:
    """Judge all pairs of a corpus and write its lists; return the findings and dropped pairs."""
    dropping = rules.dropping_rules(clean) if scan.name == TRAIN else []
    dropped: Dropped = {}
    repeats = scan.records.find_repeats(dropping, profile)
    for rule in RULES:
        if rule.refers is not None:
            lists.details[rule.name] = partial(_earlier, scan.reader, rule.refers(repeats))
    leaks = list(_leaks(scan))
    lists.details |= {leak.name: leak.details for leak in leaks}
    shifts = {}
    if scan.reader.num_pairs >= misalignment.MIN_PAIRS:
        shifts = {shift.first: shift for shift in misalignment.find(scan.records.windows)}
    lists.details["shift"] = lambda pair: {
        "last": _place(scan.reader, shifts[pair].last),
        "offset": shifts[pair].offset,
    }
    for block in Reader(scan.corpus).blocks(advance):
        end = block.first + len(block.src)
        pairs = scan.records.pairs(block.first, len(block.src))
        counts = dropped.setdefault(scan.reader.part_of(block.first).corpus, Counter())
        counts.update(filter(None, rules.drop_reasons(dropping, pairs, profile)))
        for rule in RULES:
            lists.add(rule.name, rule.judge(pairs, profile), block)
        is_start = np.isin(np.arange(block.first, end), list(shifts))
        lists.add("shift", is_start * np.uint8(SideName.BOTH), block)
        for leak in leaks:
            is_leaked = leak.times[block.first : end] > 0
            lists.add(leak.name, is_leaked * np.uint8(leak.side), block)
    findings = [_leak_finding(lists, leak, scan, clean) for leak in leaks]
    findings += [_rule_finding(lists, rule, scan, clean) for rule in RULES]
    if shifts:
        advice = "Find the line that is missing or surplus near the first pair of each stretch."
        finding = lists.finding("shift", Severity.WARNING, "misaligned pairs", advice, "keeps them")
        num_shifted = sum(shift.last - shift.first + 1 for shift in shifts.values())
        findings.append(replace(finding, count=num_shifted))
    return list(filter(None, findings)), dropped


def _earlier(reader: Reader, numbers: Numbers, pair: int) -> Entry:
    return {"first": _place(reader, int(numbers[pair]) - 1)}


def _rule_finding(
    lists: _FindingLists, rule: Rule, scan: Scan, clean: list[str]
) -> AuditFinding | None:
    """Return the finding of a rule; None if no pair has the problem."""
    if not lists.counts[rule.name]:
        return None
    severity = rule.severity_of(lists.counts[rule.name], scan.reader.num_pairs)
    what, advice, training = rule.what, rule.advice, rule.training
    if severity == Severity.ERROR:
        files = (notes for part in scan.reader.parts for notes in part.notes)
        first = next(notes for notes in files if notes.num_undecodable)
        advice += f" The first is in {first.path}, {first.first_undecodable}."
    elif scan.name != TRAIN:
        what = what.replace("validation or test", "test")  # training is not held out
        advice = rule.held_out_advice or advice
    elif rule in rules.dropping_rules(clean):
        training = "drops them"
    else:
        name = "blank-side" if rule.name == "blank-pair" else rule.name
        if name in CLEAN and severity > Severity.NOTE:
            advice += f" To drop them: {_clean_with(clean, name)}."
    return lists.finding(rule.name, severity, what, advice, training)


def _clean_with(clean: list[str], name: str) -> str:
    return f"`data.clean: [{', '.join([*clean, name])}]`"


class _Leak(NamedTuple):
    """The pairs, the sources or the targets of a held-out corpus that occur in another one."""

    kind: str  # "pair", "source" or "target"
    side: SideName  # of the pair
    other: Scan  # of the corpus in which they occur
    times: Numbers  # for each held-out pair, how often
    exact_times: Numbers  # how often with the same case and punctuation
    first: Ints  # the pair of the first occurrence
    is_exchanged: Flags  # whether the sides of that pair are exchanged

    @property
    def name(self) -> str:
        """The name of the list."""
        return f"{self.kind}-in-{self.other.name}"

    def details(self, pair: int) -> Entry:
        """Return further fields of a pair's entry."""
        is_tgt = (self.side == SideName.TGT) != bool(self.is_exchanged[pair])
        return {
            "first": _place(self.other.reader, int(self.first[pair]), is_tgt),
            "times": int(self.times[pair]),
            "exact_times": int(self.exact_times[pair]),
        }


def _leaks(scan: Scan) -> Iterator[_Leak]:
    """Yield the leaks of a held-out corpus; occurrences of a pair do not count for its sides."""
    for other, leaks in scan.leaks:
        src, tgt, pair = leaks.occurrences()
        yield _Leak("pair", SideName.BOTH, other, *pair)
        for kind, side, of_side in (("source", SideName.SRC, src), ("target", SideName.TGT, tgt)):
            times = of_side[0] - pair[0]
            exact_times = np.minimum(of_side[1] - pair[1], times)
            yield _Leak(kind, side, other, times, exact_times, *of_side[2:])


def _leak_finding(
    lists: _FindingLists, leak: _Leak, scan: Scan, clean: list[str]
) -> AuditFinding | None:
    """Return the finding of a leak; None if no pair has it."""
    num_found, num_exact = lists.counts[leak.name], np.count_nonzero(leak.exact_times)
    if not num_found:
        return None
    num_left, advice = num_found, rules.SEPARATE
    if leak.other.name == TRAIN:
        advice = "A model that was trained on them scores too high."
        if "held-out" in clean:
            num_left = 0
        elif "held-out-pair" in clean and leak.kind == "pair":
            num_left = int(np.count_nonzero(leak.times > leak.exact_times))
    training = "keeps them" if num_left == num_found else f"keeps {num_left:,}"
    usual = 0 if leak.kind == "pair" else _USUAL_LEAK_SHARE * len(leak.times)
    severity = Severity.WARNING if num_left > usual else Severity.NOTE
    if severity > Severity.NOTE and leak.other.name == TRAIN:
        num_held, num_pairs = leak.other.num_held, leak.other.reader.num_pairs
        if 2 * num_held > num_pairs:
            advice += f" {num_held:,} of {num_pairs:,} pairs share a side with held-out text: too "
            advice += "many to drop."
        else:
            advice += f" To drop the {num_held:,} pairs of {TRAIN} that share a side with held-out "
            advice += f"text: {_clean_with(clean, 'held-out')}."
    if num_left == 0:
        training, advice = "drops them", "Nothing to do: training drops all their copies."
        if _SPLIT_LEAK_SHARE * len(leak.times) < num_found < np.count_nonzero(scan.exact.pair):
            severity = Severity.WARNING
            advice = "Scores are sound, but training loses every copy; hold out other pairs."
    if num_exact < num_found:
        advice += f" {num_found - num_exact:,} differ in case, punctuation or spaces alone."
    what = f"{leak.kind}s found in {leak.other.name}"
    return lists.finding(leak.name, severity, what, advice, training)


_OTHER_TOOLS = "mtrain removes the CR, but other tools keep it: end all lines in LF alone."
_FILE_RULES = {  # problems of files by their names: the files, and what to do
    Severity.ERROR: {
        "unreadable": (
            "files that cannot be read",
            "Correct the path or the keys, or replace the file.",
        ),
        "unequal-lines": ("files of unequal length", "Find the lines missing or surplus."),
        "malformed-row": ("files with malformed rows", "Correct or delete the rows."),
        "empty": ("files without a pair", "Name files with text."),
    },
    Severity.WARNING: {
        "header": (
            "files with a header, it seems",
            "It is read as a pair: set `header: true` for the corpus to leave it out, or "
            "`header: false`.",
        ),
        "mixed-line-ends": ("files with LF and CR LF at line ends", _OTHER_TOOLS),
    },
    Severity.NOTE: {
        "line-ends": ("files with CR LF at line ends", _OTHER_TOOLS),
        "byte-order-mark": (
            "files that begin with a byte-order mark",
            "mtrain skips it, but other tools take it for text: delete it.",
        ),
        "field-break": (
            "files with line breaks within fields",
            "Nothing to do: mtrain reads a line break as a space.",
        ),
    },
}


def _file_findings(scan: Scan, data: DataConfig) -> Iterator[AuditFinding]:
    """Yield the findings on whole files."""
    problems: dict[str, list[Entry]] = {}
    num_files = 0
    empty_corpora = scan.reader.empty_corpora()
    for part in scan.reader.parts:
        for notes in part.notes:
            num_files += 1
            for name, problem in _file_problems(part, notes, data):
                problems.setdefault(name, []).append({"file": notes.path, "problem": problem})
            if part.corpus in empty_corpora and _is_read(part):
                problems.setdefault("empty", []).append({"file": notes.path, "problem": "no pairs"})
    for severity, file_rules in _FILE_RULES.items():
        for name, (what, advice) in file_rules.items():
            if files := problems.get(name):
                sizes = len(files), num_files
                training = "refuses them" if severity == Severity.ERROR else ""
                yield AuditFinding(scan.name, name, severity, what, advice, *sizes, training, files)


def _is_read(part: FilePair) -> bool:
    return not (part.src.problem or part.tgt.problem)


def _file_problems(part: FilePair, notes: FileNotes, data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield the name and a description of each problem of a file."""
    if notes.problem:
        yield "unreadable", notes.problem
    if _is_read(part) and part.src.num_lines != part.tgt.num_lines:
        yield "unequal-lines", count(notes.num_lines, "line")
    if notes.num_faults:
        rows = count(notes.num_faults, "row")
        yield "malformed-row", f"{rows}; the first is row {notes.first_fault}"
    if cells := possible_header(notes, data):
        yield "header", " TAB ".join(cells)
    if notes.num_crlf:
        is_mixed = notes.num_crlf < notes.num_lines - notes.is_last_open
        name = "mixed-line-ends" if is_mixed else "line-ends"
        yield name, f"CR LF at {notes.num_crlf:,} of {count(notes.num_lines, 'line')}"
    if notes.has_bom:
        yield "byte-order-mark", "begins with U+FEFF"
    if notes.num_broken:
        yield "field-break", count(notes.num_broken, "row")


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
    for name, corpus in corpora_of(data.train):
        num_kept = sizes[name] - dropped.get(name, Counter()).total()
        weights[name] = weight_of(num_kept, corpus.weight, data.temperature)
    total = sum(weights.values()) or 1.0
    return [
        CorpusSummary(name, sizes[name], dict(dropped.get(name, {})), weight / total)
        for name, weight in weights.items()
    ]
