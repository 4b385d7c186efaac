"""The report of an audit: its corpora and findings, as text for a terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mtrain.audit.rules import Severity
from mtrain.audit.scan import TRAIN, Coverage
from mtrain.corpus.dropped import format_counts
from mtrain.io.table import format_table
from mtrain.io.text_width import count, shortened, visible, wrapped

_WIDTH = 80
_INDENT = " " * 9
_SUMMARY_ROWS = 6
NUM_EXAMPLES = 2  # of each list

Entry = dict[str, Any]  # an entry of a list: a pair with a problem


@dataclass(frozen=True)
class AuditFinding:
    """One kind of problem of a corpus."""

    corpus: str
    name: str  # of the rule, and of the list
    severity: Severity
    what: str  # the pairs, lines or files with the problem
    advice: str
    count: int  # number of pairs, lines or files with the problem
    total: int  # number of all pairs, or of all files
    training: str  # what training does with them, such as "drops them"; "" for held-out text
    examples: list[Entry]  # the first entries of the list; of files, {"file", "problem"} of each
    list_file: str | None = None  # the name of the file with all entries, if there is one

    @property
    def share(self) -> float:
        """The share of pairs or files with the problem."""
        return self.count / self.total

    def rank(self) -> tuple[int, float]:
        """Return a key to sort by severity, then by the share of pairs; files come last."""
        return -self.severity, -self.share if self.list_file else 0.0

    @property
    def label(self) -> str:
        """The severity as a word."""
        return self.severity.name.lower()

    @property
    def headline(self) -> str:
        """The problem, its extent, and what training does about it."""
        share = f"{self.share:.1%}" if self.share >= 0.001 else "<0.1%"
        text = f"{self.corpus}: {self.what}: {self.count:,} ({share})"
        return f"{text}; training {self.training}" if self.training else text


@dataclass(frozen=True)
class CorpusSummary:
    """A corpus, and what training does with its pairs."""

    name: str
    num_pairs: int  # without malformed rows
    num_dropped: dict[str, int]  # by reason; `max-tokens` is only known with a tokenizer
    share: float = 1.0  # of the pairs of an epoch, if it is one of a mixture
    coverage: list[Coverage] = field(default_factory=list)  # of both sides, with a tokenizer
    mixture: list[CorpusSummary] = field(default_factory=list)  # its corpora, if it is a mixture


@dataclass(frozen=True)
class AuditReport:
    """All corpora, training first, and all findings, by severity and share."""

    corpora: list[CorpusSummary]
    findings: list[AuditFinding]

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)


def as_text(report: AuditReport, directory: Path) -> Iterator[str]:
    """Yield lines of at most `_WIDTH` columns, except the last: where the lists are."""
    yield from _summary(report)
    yield ""
    for number, corpus in enumerate(report.corpora):
        text, num_dropped = f"{corpus.name}: {count(corpus.num_pairs, 'pair')}", corpus.num_dropped
        if corpus.name == TRAIN:
            num_kept = corpus.num_pairs - sum(num_dropped.values())
            text += f"; training drops {format_counts(num_dropped)} and keeps {num_kept:,}"
            text += "" if corpus.coverage else ", less what exceeds `data.max_tokens`"
        yield from _rows(text, "corpora" if number == 0 else "")
        for part in corpus.mixture:
            text = f"{part.name}: {count(part.num_pairs, 'pair')}, dropped "
            yield from _rows(
                f"{text}{format_counts(part.num_dropped)}; {part.share:.1%} of an epoch"
            )
    if report.corpora[0].coverage:
        yield ""
        rows = [["tokenizer", "subwords/word", "bytes", "unknown", "unseen"]]
        for corpus in report.corpora:
            for side, coverage in zip(("src", "tgt"), corpus.coverage, strict=True):
                shares = (coverage.byte_share, coverage.unknown_share, coverage.unseen_share)
                cells = [f"{coverage.pieces_per_word:.2f}", *(f"{share:.2%}" for share in shares)]
                rows.append([shortened(f"{corpus.name} {side}", 24), *cells])
        yield from format_table(rows, "<>>>>")
        if any(side.pieces_per_word < 1 for side in report.corpora[0].coverage):
            yield "In scripts without spaces, each letter counts as a word."
    for finding in report.findings:
        yield ""
        yield from _rows(finding.headline, finding.label)
        for entry in finding.examples[:NUM_EXAMPLES]:
            yield from _example(entry)
        if finding.list_file is None and (num_more := len(finding.examples) - NUM_EXAMPLES) > 0:
            yield f"{_INDENT}and {count(num_more, 'more file')}"
        yield from _rows(finding.advice)
    yield ""
    counts = [(report.count(severity), severity.name.lower()) for severity in reversed(Severity)]
    yield ", ".join(count(number, name) for number, name in counts)
    has_lists = any(finding.list_file for finding in report.findings)
    yield f"lists of every line: {directory}" if has_lists else f"report: {directory}/report.json"


def as_json(report: AuditReport) -> Iterator[str]:
    """Yield the report as one JSON object."""
    findings = [asdict(finding) | {"severity": finding.label} for finding in report.findings]
    tree = {"corpora": [asdict(corpus) for corpus in report.corpora], "findings": findings}
    yield json.dumps(tree, ensure_ascii=False, indent=2)


def _summary(report: AuditReport) -> list[str]:
    """Return the errors and warnings in at most `_SUMMARY_ROWS` rows, the most serious first."""
    serious = [finding for finding in report.findings if finding.severity > Severity.NOTE]
    if not serious:
        return ["no errors and no warnings"]
    rows = [_rows(finding.headline, finding.label, max_rows=1)[0] for finding in serious]
    if len(rows) > _SUMMARY_ROWS:
        num_more = len(rows) - _SUMMARY_ROWS + 1
        rows[-num_more:] = [f"{_INDENT}and {num_more:,} more"]
    return rows


def _example(entry: Entry) -> Iterator[str]:
    if "problem" in entry:
        yield from _rows(f"{entry['file']}: {entry['problem']}")
        return
    file = entry["tgt_file"] if entry["side"] == "tgt" else entry["src_file"]
    where = f"{file}:{entry['line']}"
    if "last" in entry:
        offset, last = entry["offset"], entry["last"]
        direction = "later" if offset > 0 else "earlier"
        end = last["line"] if last["file"] == file else f"{last['file']}:{last['line']}"
        where += f" to {end}: targets {count(abs(offset), 'line')} {direction}"
    elif "first" in entry:
        where += f", first at {entry['first']['file']}:{entry['first']['line']}"
    yield from _rows(where)
    for side, other in (("src", "tgt"), ("tgt", "src")):
        if entry["side"] in (side, "both") or not entry[other].strip():
            text = visible(entry[side]) if entry[side].strip() else "(blank)"
            yield f"{_INDENT}  {shortened(text, _WIDTH - len(_INDENT) - 2)}"


def _rows(text: str, label: str = "", max_rows: int = 20) -> list[str]:
    """Break text into rows after a label in the first columns."""
    rows = wrapped(text, _WIDTH - len(_INDENT), max_rows)
    return [f"{label if number == 0 else '':<9}{row}" for number, row in enumerate(rows)]
