"""Read a corpus once, for an audit: a record of each pair goes to disk, its files are noted.

Memory holds a block of pairs and, of a held-out corpus, its hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.audit import duplicates
from mtrain.audit.contamination import Leaks, SideHashes
from mtrain.audit.coverage import PieceCounts
from mtrain.audit.duplicates import PairHashes, Repeats
from mtrain.audit.features import LINE, Hashes, LineFlag, Measured, Records, add_mark, measure
from mtrain.audit.misalignment import PairWindow
from mtrain.audit.rules import PairBlock
from mtrain.audit.side_classifier import Languages
from mtrain.config.corpora import TrainText
from mtrain.corpus.formats import Advance
from mtrain.corpus.lenient_reader import FileNotes, FilePair, Reader, TextBlock
from mtrain.io.atomic import append
from mtrain.tokenizer.sentencepiece import Tokenizer

PAIR = np.dtype([("src", LINE), ("tgt", LINE), ("is_held", np.bool_), ("is_held_pair", np.bool_)])
_WINDOW_PAIRS = 1 << 16  # of records that are in memory together


class RecordFile:
    """Records of pairs on disk, written once and read in order as often as one asks."""

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
        """Return the records of some pairs that stand together."""
        return np.fromfile(self._path, PAIR, count, offset=first * PAIR.itemsize)

    def windows(self) -> Iterator[Records]:
        """Yield all records, many at a time."""
        with self._path.open("rb") as stream:
            while len(records := np.fromfile(stream, PAIR, _WINDOW_PAIRS)):
                yield records

    def remove(self) -> None:
        """Delete them."""
        self._path.unlink()


class _BlockHashes(NamedTuple):
    exact: SideHashes
    keys: SideHashes


class Scan:
    """One corpus, read or to be read.

    Attributes:
        name: of the corpus.
        corpus: its files.
        intake: the notes on them.
        spool: a record for each pair.
        leaks: what of it stands in another corpus, by the name of that one.
        pieces: of source and target, if there is a tokenizer.
        repeats: what stands in it before, once it was looked for.
    """

    def __init__(
        self, name: str, corpus: TrainText, directory: Path, tokenizer: Tokenizer | None
    ) -> None:
        self.name, self.corpus = name, corpus
        self.intake = Reader(corpus)
        self.spool = RecordFile(directory / f".{name}.records")
        self.leaks: dict[str, Leaks] = {}
        self.pieces: list[PieceCounts] = []
        if tokenizer is not None:
            self.pieces = [PieceCounts(tokenizer.src), PieceCounts(tokenizer.tgt)]
        self.repeats: Repeats | None = None
        self._hashes: list[_BlockHashes] = []

    def read(
        self,
        languages: Languages,
        held_out: Sequence[Scan],
        is_held_out: bool,
        advance: Advance,
    ) -> None:
        """Read the corpus: write its records, and look for the sentences of held-out ones."""
        tables = [other._table() for other in held_out]
        for block in self.intake.blocks(advance):
            src, tgt = measure(block.src), measure(block.tgt)
            languages.learn(src, tgt)
            for side, bad in ((src, block.src_bad), (tgt, block.tgt_bad)):
                side.lines["language"] = languages.scores(side)
                add_mark(side.lines, LineFlag.UNDECODABLE, bad)
                add_mark(side.lines, LineFlag.NO_PAIR, block.faults)
            self._encode(block, src, tgt)
            exact = SideHashes(_unless_blank(src.lines), _unless_blank(tgt.lines))
            hashes = _BlockHashes(exact, SideHashes(src.keys, tgt.keys))
            records = np.zeros(len(block.src), PAIR)
            records["src"], records["tgt"] = src.lines, tgt.lines
            for table in tables:
                held = table.look_up(hashes.exact, hashes.keys, block.first)
                records["is_held"] |= held.side
                records["is_held_pair"] |= held.pair
            self.spool.append(records)
            if is_held_out:
                self._hashes.append(hashes)
        for other, table in zip(held_out, tables, strict=True):
            other.leaks[self.name] = table

    def take_over(self, num_pairs: int) -> None:
        """Go on with the records of so many pairs, which an earlier reading has left."""
        nowhere = FileNotes("")
        self.intake.parts = [FilePair(nowhere, nowhere, 0, num_pairs)]

    def find_repeats(self) -> None:
        """Look for pairs and sources that stand in the corpus before."""
        self.repeats = duplicates.find(self._pair_hashes, self.intake.num_pairs)

    def pairs(self, first: int, count: int) -> PairBlock:
        """Return some pairs as rules judge them; nothing is repeated unless it was looked for."""
        records = self.spool.part(first, count)
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
        """Yield the hashes of all pairs."""
        first = 0
        for records in self.spool.windows():
            yield PairHashes(records["src"]["hash"], records["tgt"]["hash"], first)
            first += len(records)

    def windows(self) -> Iterator[PairWindow]:
        """Yield the records of all pairs."""
        first = 0
        for records in self.spool.windows():
            yield PairWindow(records["src"], records["tgt"], first)
            first += len(records)

    def _encode(self, block: TextBlock, src: Measured, tgt: Measured) -> None:
        if not self.pieces:
            return
        sides = ((block.src, src), (block.tgt, tgt))
        for counts, (lines, measured) in zip(self.pieces, sides, strict=True):
            encoded = counts.add(lines, len(measured.words))
            measured.lines["tokens"] = encoded.tokens
            add_mark(measured.lines, LineFlag.UNKNOWN_PIECE, np.flatnonzero(encoded.has_unknown))

    def _table(self) -> Leaks:
        return Leaks(
            _joined([block.exact for block in self._hashes]),
            _joined([block.keys for block in self._hashes]),
        )


def _joined(blocks: Sequence[SideHashes]) -> SideHashes:
    if not blocks:
        return SideHashes(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
    src = np.concatenate([block.src for block in blocks])
    return SideHashes(src, np.concatenate([block.tgt for block in blocks]))


def _unless_blank(lines: Records) -> Hashes:
    return np.where(lines["solid"] > 0, lines["hash"], np.uint64(0))
