"""The report of an audit as text for a terminal, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from mtrain.audit.audit import AuditFinding, AuditReport
from mtrain.audit.rules import Severity
from mtrain.corpus.dropped import format_counts
from mtrain.io.table import format_table
from mtrain.io.text_width import shortened, visible

_WIDTH = 80
_INDENT = " " * 9


def as_text(report: AuditReport, directory: Path) -> Iterator[str]:
    """Yield lines of at most 80 columns."""
    for summary in report.corpora:
        text = f"{summary.name}: {summary.num_pairs:,} pair{'s' * (summary.num_pairs != 1)}"
        if summary.name == "train":
            text += f"; training drops {format_counts(summary.num_dropped)}"
            text += "" if summary.coverage else ", and what is over `data.max_tokens`"
        yield from _wrapped(text, "")
        for part in summary.mixture:
            dropped = f"dropped {format_counts(part.num_dropped)}"
            text = f"{part.name}: {part.num_pairs:,} pairs, {dropped}; {part.share:.1%} of an epoch"
            yield from _wrapped(text, "  ")
    if report.corpora[0].coverage:
        yield ""
        rows = [["tokenizer", "pieces/word", "bytes", "unknown", "unseen"]]
        for summary in report.corpora:
            for side, coverage in zip(("src", "tgt"), summary.coverage, strict=True):
                shares = (coverage.byte_share, coverage.unknown_share, coverage.unseen_share)
                cells = [f"{coverage.pieces_per_word:.2f}", *(f"{share:.2%}" for share in shares)]
                rows.append([shortened(f"{summary.name} {side}", 24), *cells])
        yield from format_table(rows, "<>>>>")
    for finding in report.findings:
        yield ""
        yield from _finding(finding)
    yield ""
    counts = [(report.count(severity), severity.name.lower()) for severity in reversed(Severity)]
    yield ", ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts)
    yield f"lists of every line: {directory}"


def as_json(report: AuditReport) -> Iterator[str]:
    """Yield the report as one JSON object."""
    findings = [
        asdict(finding) | {"severity": finding.severity.name.lower()} for finding in report.findings
    ]
    tree = {"corpora": [asdict(summary) for summary in report.corpora], "findings": findings}
    yield json.dumps(tree, ensure_ascii=False, indent=2)


def _finding(finding: AuditFinding) -> Iterator[str]:
    what = f"{finding.corpus}: {finding.what}"
    if finding.list_file:
        share = 100 * finding.count / max(finding.total, 1)
        what = f"{finding.corpus}: {finding.what}: {finding.count:,} ({share:.2f}%)"
    yield from _wrapped(what, f"{finding.severity.name.lower():<9}")
    for entry in finding.examples:
        file = entry["tgt_file"] if entry["side"] == "tgt" else entry["src_file"]
        where = f"{file}:{entry['line']}"
        if "last" in entry:
            where += f" to {entry['last']['line']}"
        elif "first" in entry:
            where += f", as {entry['first']['file']}:{entry['first']['line']}"
        yield from _wrapped(where, _INDENT)
        for side, other in (("src", "tgt"), ("tgt", "src")):
            if entry["side"] in (side, "both") or not entry[other].strip():
                text = visible(entry[side]) if entry[side].strip() else "(blank)"
                yield f"{_INDENT}  {shortened(text, _WIDTH - len(_INDENT) - 2)}"
    yield from _wrapped(finding.advice, _INDENT)


def _wrapped(text: str, first: str) -> list[str]:
    """Break a sentence into lines; what is too long for a line is cut."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=_INDENT, break_on_hyphens=False
    )
