"""Read a corpus once: the records of its pairs go to a file, its faults are noted.

Memory holds a block of pairs and, of a held-out corpus, its hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mtrain.audit import duplicates
from mtrain.audit.contamination import Leaks, SideHashes
from mtrain.audit.coverage import PieceCounts
from mtrain.audit.duplicates import PairHashes, Repeats
from mtrain.audit.features import (
    LINE,
    Feature,
    LineFeatures,
    LineFlag,
    PairWindow,
    Records,
    SideClassifier,
    add_flag,
    measure,
)
from mtrain.audit.rules import PairBlock
from mtrain.config.corpora import TrainText
from mtrain.corpus.reader import FileNotes, FilePair, Reader, TextBlock
from mtrain.io.atomic import append
from mtrain.io.lines import Advance, tell_nobody
from mtrain.tokenizer.sentencepiece import Tokenizer

PAIR = np.dtype([("src", LINE), ("tgt", LINE), ("is_held", np.bool_), ("is_held_pair", np.bool_)])
_WINDOW_PAIRS = 1 << 16  # of records that are in memory together


class RecordFile:
    """A file of the records of pairs, appended to once and then read in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def append(self, records: Records) -> None:
        """Add the records of a block.

        Raises:
            WriteError: if the disk does not take them.
        """
        append(self._path, records.tobytes())

    def part(self, first: int, count: int) -> Records:
        """Return the records of `count` consecutive pairs."""
        return np.fromfile(self._path, PAIR, count, offset=first * PAIR.itemsize)

    def windows(self) -> Iterator[PairWindow]:
        """Yield all records, many at a time."""
        first = 0
        with self._path.open("rb") as stream:
            while len(records := np.fromfile(stream, PAIR, _WINDOW_PAIRS)):
                yield PairWindow(records["src"], records["tgt"], first)
                first += len(records)

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink()


class Scan:
    """One corpus, its notes and its records.

    Attributes:
        name: of the corpus.
        corpus: its files.
        reader: the notes on them.
        records: of each pair.
        leaks: the occurrences of this held-out corpus in others, by their names.
        piece_counts: of source and target, if there is a tokenizer.
        repeats: the duplicates, once `find_repeats` was called.
    """

    def __init__(
        self,
        name: str,
        corpus: TrainText,
        directory: Path,
        tokenizer: Tokenizer | None = None,
        is_strict: bool = False,
    ) -> None:
        self.name, self.corpus = name, corpus
        self.reader = Reader(corpus, is_strict, has_checksums=is_strict)
        self.records = RecordFile(directory / f".{name}.records")
        self.leaks: dict[str, Leaks] = {}
        self.piece_counts: list[PieceCounts] = []
        if tokenizer is not None:
            self.piece_counts = [PieceCounts(tokenizer.src), PieceCounts(tokenizer.tgt)]
        self.repeats: Repeats | None = None
        self._hashes: list[tuple[SideHashes, SideHashes]] = []  # exact and keys, of each block

    def read(
        self,
        classifier: SideClassifier,
        held_out: Sequence[Scan],
        is_held_out: bool,
        advance: Advance = tell_nobody,
        features: Feature = Feature.ALL,
    ) -> None:
        """Read the corpus, write its records, and look up the sentences of held-out corpora.

        Args:
            classifier: learns from every block, in the order of reading.
            held_out: corpora read before with `is_held_out`.
            is_held_out: keep the hashes, so that other corpora can be looked up.
            advance: is called with the bytes read.
            features: to compute; the others are 0 in the records.
        """
        tables = [other._table() for other in held_out]
        for block in self.reader.blocks(advance):
            src, tgt = measure(block.src, features), measure(block.tgt, features)
            if Feature.WORDS in features:
                classifier.learn(src, tgt)
                for side in (src, tgt):
                    side.lines["language"] = classifier.scores(side)
            for side, undecodable in ((src, block.src_bad), (tgt, block.tgt_bad)):
                add_flag(side.lines, LineFlag.UNDECODABLE, undecodable)
                add_flag(side.lines, LineFlag.NO_PAIR, block.faults)
            self._encode(block, src, tgt)
            zero = np.uint64(0)
            exact = SideHashes(
                *(
                    np.where(side.lines["solid"] > 0, side.lines["hash"], zero)
                    for side in (src, tgt)
                )
            )
            keys = SideHashes(src.keys, tgt.keys)
            records = np.zeros(len(block.src), PAIR)
            records["src"], records["tgt"] = src.lines, tgt.lines
            for table in tables:
                is_held, is_held_pair = table.look_up(exact, keys, block.first)
                records["is_held"] |= is_held
                records["is_held_pair"] |= is_held_pair
            self.records.append(records)
            if is_held_out:
                self._hashes.append((exact, keys))
        for other, table in zip(held_out, tables, strict=True):
            other.leaks[self.name] = table

    def resume(self, num_pairs: int) -> None:
        """Use the records of `num_pairs` pairs that an earlier process has written."""
        nowhere = FileNotes("")
        self.reader.parts = [FilePair(nowhere, nowhere, 0, num_pairs)]

    def find_repeats(self) -> None:
        """Find pairs and sources that occur earlier in the corpus."""
        self.repeats = duplicates.find(self._pair_hashes, self.reader.num_pairs)

    def pairs(self, first: int, count: int) -> PairBlock:
        """Return consecutive pairs for the rules; without `find_repeats`, none is repeated."""
        records = self.records.part(first, count)
        same_pair = same_src = np.zeros(count, np.uint32)
        if self.repeats is not None:
            here = slice(first, first + count)
            same_pair, same_src = self.repeats.of_pair[here], self.repeats.of_src[here]
        return PairBlock(
            records["src"],
            records["tgt"],
            same_pair,
            same_src,
            records["is_held"],
            records["is_held_pair"],
        )

    def _pair_hashes(self) -> Iterator[PairHashes]:
        for window in self.records.windows():
            yield PairHashes(window.src["hash"], window.tgt["hash"], window.first)

    def _encode(self, block: TextBlock, src: LineFeatures, tgt: LineFeatures) -> None:
        if not self.piece_counts:
            return
        sides = ((block.src, src), (block.tgt, tgt))
        for counts, (lines, measured) in zip(self.piece_counts, sides, strict=True):
            num_tokens, has_unknown = counts.add(lines, len(measured.words))
            measured.lines["tokens"] = num_tokens
            add_flag(measured.lines, LineFlag.UNKNOWN_PIECE, np.flatnonzero(has_unknown))

    def _table(self) -> Leaks:
        """Return the hashes of all blocks as tables."""
        empty = SideHashes(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        exact, keys = (
            SideHashes(*(np.concatenate(side) for side in zip(*blocks, strict=True)))
            for blocks in zip(*(self._hashes or [(empty, empty)]), strict=True)
        )
        return Leaks(exact, keys)
