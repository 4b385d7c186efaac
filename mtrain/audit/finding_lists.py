"""The lists of an audit: every pair that a rule found, with its place and its text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from mtrain.audit.rules import SideName, Sides
from mtrain.corpus.lenient_reader import FilePair, Reader, TextBlock

NUM_EXAMPLES = 2  # of each list, that are remembered

Entry = dict[str, Any]


class RuleHits(NamedTuple):
    """What one rule found among the pairs of a block.

    Attributes:
        name: of the list.
        sides: for each pair, where it was found.
        describe: what else to say of a pair, by its place in the block.
    """

    name: str
    sides: Sides
    describe: Callable[[int], Entry]


def nothing_more(place: int) -> Entry:
    """Say nothing else of a pair."""
    return {}


def place_of(intake: Reader, pair: int) -> Entry:
    """Return the source file and the line of a pair."""
    part = intake.part_of(pair)
    return {"file": part.src.path, "line": pair - part.first + 1} | _corpus_of(part)


def _corpus_of(part: FilePair) -> Entry:
    return {} if part.corpus is None else {"corpus": part.corpus}


class FindingLists:
    """The lists of one corpus; each is one file of JSON lines."""

    def __init__(self, directory: Path, corpus: str, intake: Reader) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[Entry]] = {}
        self._directory, self._corpus, self._intake = directory, corpus, intake
        self._streams: dict[str, TextIO] = {}

    def file_of(self, name: str) -> str:
        """Return the name of a list's file."""
        return f"{self._corpus}.{name}.jsonl"

    def add(self, hits: RuleHits, block: TextBlock) -> None:
        """Write down what was found in a block."""
        for place in np.flatnonzero(hits.sides).tolist():
            entry = self._entry(block, place, SideName(int(hits.sides[place])))
            entry |= hits.describe(place)
            self.counts[hits.name] += 1
            examples = self.examples.setdefault(hits.name, [])
            if len(examples) < NUM_EXAMPLES:
                examples.append(entry)
            self._stream(hits.name).write(json.dumps(entry, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close all files."""
        for stream in self._streams.values():
            stream.close()

    def _entry(self, block: TextBlock, place: int, side: SideName) -> Entry:
        part = self._intake.part_of(block.first + place)
        return {
            "src_file": part.src.path,
            "tgt_file": part.tgt.path,
            "line": block.first + place - part.first + 1,
            "side": side.name.lower(),
            "src": block.src[place],
            "tgt": block.tgt[place],
        } | _corpus_of(part)

    def _stream(self, name: str) -> TextIO:
        if name not in self._streams:
            path = self._directory / self.file_of(name)
            self._streams[name] = path.open("w", encoding="utf-8", newline="\n")
        return self._streams[name]
