"""The lists of an audit: every pair that a rule hits, with its place and its text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from mtrain.audit.rules import SideName, Sides
from mtrain.corpus.reader import FilePair, Reader, TextBlock

NUM_EXAMPLES = 2  # of each list, for the report

Entry = dict[str, Any]


class RuleHits(NamedTuple):
    """The pairs of a block that one rule hits.

    Attributes:
        name: of the list.
        sides: for each pair, the sides that are hit.
        details: returns more fields of an entry, given the row in the block.
    """

    name: str
    sides: Sides
    details: Callable[[int], Entry]


def no_details(row: int) -> Entry:
    """Return no more fields of an entry."""
    return {}


def place_of(reader: Reader, pair: int) -> Entry:
    """Return the source file and the line of a pair."""
    part = reader.part_of(pair)
    return {"file": part.src.path, "line": pair - part.first + 1} | _corpus_of(part)


def _corpus_of(part: FilePair) -> Entry:
    return {} if part.corpus is None else {"corpus": part.corpus}


class FindingLists:
    """The lists of one corpus; each is one file of JSON lines."""

    def __init__(self, directory: Path, corpus: str, reader: Reader) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[Entry]] = {}
        self._directory, self._corpus, self._reader = directory, corpus, reader
        self._streams: dict[str, TextIO] = {}

    def file_of(self, name: str) -> str:
        """Return the name of a list's file."""
        return f"{self._corpus}.{name}.jsonl"

    def add(self, hits: RuleHits, block: TextBlock) -> None:
        """Write the hits in a block."""
        for row in np.flatnonzero(hits.sides).tolist():
            entry = self._entry(block, row, SideName(int(hits.sides[row])))
            entry |= hits.details(row)
            self.counts[hits.name] += 1
            examples = self.examples.setdefault(hits.name, [])
            if len(examples) < NUM_EXAMPLES:
                examples.append(entry)
            self._stream(hits.name).write(json.dumps(entry, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close all files."""
        for stream in self._streams.values():
            stream.close()

    def _entry(self, block: TextBlock, row: int, side: SideName) -> Entry:
        part = self._reader.part_of(block.first + row)
        return {
            "src_file": part.src.path,
            "tgt_file": part.tgt.path,
            "line": block.first + row - part.first + 1,
            "side": side.name.lower(),
            "src": block.src[row],
            "tgt": block.tgt[row],
        } | _corpus_of(part)

    def _stream(self, name: str) -> TextIO:
        if name not in self._streams:
            path = self._directory / self.file_of(name)
            self._streams[name] = path.open("w", encoding="utf-8", newline="\n")
        return self._streams[name]
