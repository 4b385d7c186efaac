"""Read corpora once, write records of their pairs to files, and decide which pairs are dropped.

Memory holds a block of pairs and, of a held-out corpus, its hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import or_
from pathlib import Path

import numpy as np

from mtrain.audit import duplicates, rules
from mtrain.audit.duplicates import Leaks, PairHashes, Repeats
from mtrain.audit.features import (
    LINE,
    Feature,
    Ints,
    LineFeatures,
    LineFlag,
    PairWindow,
    SideClassifier,
    add_flag,
    measure,
)
from mtrain.audit.rules import PairBlock, Reasons
from mtrain.config.corpora import TrainText
from mtrain.config.sections import DataConfig
from mtrain.corpus.reader import FileNotes, FilePair, Reader
from mtrain.io.atomic import append
from mtrain.io.lines import Advance, tell_nobody
from mtrain.tokenizer.sentencepiece import Tokenizer, Vocabulary

TRAIN, VALID = "train", "valid"
PAIR = np.dtype([("src", LINE), ("tgt", LINE), ("is_held", np.bool_), ("is_held_pair", np.bool_)])
_WINDOW_PAIRS = 1 << 16  # of records that are in memory together


def corpora(data: DataConfig) -> dict[str, TrainText]:
    """Return the corpora by name, in the order in which they are read: training comes last."""
    tests = {f"tests.{name}": corpus for name, corpus in data.tests.items()}
    return {**tests, VALID: data.valid, TRAIN: data.train}


@dataclass(frozen=True)
class Coverage:
    """How well a vocabulary fits one side of a corpus."""

    pieces_per_word: float  # words are runs of letters or of digits
    byte_share: float  # of all pieces
    unknown_share: float
    unseen_share: float  # pieces that the training text never has


class PieceCounts:
    """Counts of the pieces in one side of a corpus."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._num_words = 0
        self.counts = np.zeros(len(vocabulary), np.int64)

    def add(self, lines: Sequence[str], side: LineFeatures) -> None:
        """Encode and count lines; set `tokens`, with eos, and UNKNOWN_PIECE in their records."""
        encoded = self._vocabulary.encode(lines)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ids = np.fromiter(chain.from_iterable(encoded), np.int64, int(lengths.sum()))
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self._num_words += len(side.words)
        side.lines["tokens"] = lengths + 1
        line_of_id = np.repeat(np.arange(len(lengths)), lengths)
        has_unknown = np.unique(line_of_id[ids == self._vocabulary.unk])
        add_flag(side.lines, LineFlag.UNKNOWN_PIECE, has_unknown)

    def coverage(self, train: PieceCounts) -> Coverage:
        """Return the coverage; unseen are pieces without a count in `train`."""
        total = max(int(self.counts.sum()), 1)
        num_bytes = int(self.counts[self._vocabulary.byte_pieces].sum())
        return Coverage(
            total / max(self._num_words, 1),
            num_bytes / total,
            int(self.counts[self._vocabulary.unk]) / total,
            int(self.counts[train.counts == 0].sum()) / total,
        )


class Scan:
    """One corpus, the notes on its files in `reader`, and the file of the records of its pairs."""

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
        self.records_path = directory / f".{name}.records"
        self.records_path.touch()
        self.leaks: list[tuple[Scan, Leaks]] = []  # of this held-out corpus into others
        self.num_held = 0  # number of pairs of which a side occurs in a held-out corpus
        self.piece_counts: list[PieceCounts] = []  # of both sides, if there is a tokenizer
        if tokenizer is not None:
            self.piece_counts = [PieceCounts(tokenizer.src), PieceCounts(tokenizer.tgt)]
        self.repeats: Repeats | None = None
        self.exact = self.keys = PairHashes.joined([])  # of all pairs, if the corpus is held out

    def read(
        self,
        classifier: SideClassifier,
        held_out: Sequence[Scan],
        advance: Advance = tell_nobody,
        features: Feature = Feature.ALL,
    ) -> None:
        """Read the corpus, write its records, and look up the sentences of held-out corpora.

        Args:
            classifier: learns from every block, in the order of reading.
            held_out: corpora other than the training text that were read before.
            advance: is called with the bytes read.
            features: to compute; the others are 0 in the records.

        Raises:
            WriteError: if the disk does not take the records.
        """
        tables = [Leaks(other.exact, other.keys) for other in held_out]
        exact_blocks: list[PairHashes] = []
        key_blocks: list[PairHashes] = []
        for block in self.reader.blocks(advance):
            src, tgt = measure(block.src, features), measure(block.tgt, features)
            if Feature.WORDS in features:
                classifier.learn(src, tgt)
                for side in (src, tgt):
                    side.lines["language"] = classifier.scores(side)
            for side, undecodable in ((src, block.src_bad), (tgt, block.tgt_bad)):
                add_flag(side.lines, LineFlag.UNDECODABLE, undecodable)
                add_flag(side.lines, LineFlag.NO_PAIR, block.faults)
            if self.piece_counts:
                self.piece_counts[0].add(block.src, src)
                self.piece_counts[1].add(block.tgt, tgt)
            exact, keys = duplicates.hashes_of(src, tgt)
            records = np.zeros(len(block.src), PAIR)
            records["src"], records["tgt"] = src.lines, tgt.lines
            for table in tables:
                is_held, is_held_pair = table.look_up(exact, keys, block.first)
                records["is_held"] |= is_held
                records["is_held_pair"] |= is_held_pair
            self.num_held += np.count_nonzero(records["is_held"])
            append(self.records_path, records.tobytes())
            if self.name != TRAIN:
                exact_blocks.append(exact)
                key_blocks.append(keys)
        self.exact, self.keys = PairHashes.joined(exact_blocks), PairHashes.joined(key_blocks)
        for other, table in zip(held_out, tables, strict=True):
            other.leaks.append((self, table))

    def windows(self) -> Iterator[PairWindow]:
        """Yield all records, many at a time."""
        first = 0
        with self.records_path.open("rb") as stream:
            while len(records := np.fromfile(stream, PAIR, _WINDOW_PAIRS)):
                yield PairWindow(records["src"], records["tgt"], first)
                first += len(records)

    def find_repeats(self) -> Repeats:
        """Find pairs and sources that occur earlier in the corpus."""
        self.repeats = duplicates.find(self.windows, self.reader.num_pairs)
        return self.repeats

    def pairs(self, first: int, count: int) -> PairBlock:
        """Return consecutive pairs for the rules; without `find_repeats`, none is repeated."""
        records = np.fromfile(self.records_path, PAIR, count, offset=first * PAIR.itemsize)
        same_pair = same_src = np.zeros(count, np.uint32)
        if self.repeats is not None:
            same_pair, same_src = (numbers[first : first + count] for numbers in self.repeats)
        src, tgt = records["src"], records["tgt"]
        is_held, is_held_pair = records["is_held"], records["is_held_pair"]
        return PairBlock(src, tgt, same_pair, same_src, is_held, is_held_pair)


def scan_corpora(data: DataConfig, directory: Path) -> list[Scan]:
    """Read all corpora once, strictly, and write the records of their pairs to a folder.

    Only the features that the rules of `data.clean` read are computed. Training text comes last.

    Raises:
        DataError: as a strict `Reader`.
    """
    dropping = rules.dropping_rules(data.clean)
    features = reduce(or_, (rule.features for rule in dropping), Feature.NONE)
    classifier = SideClassifier()
    scans: list[Scan] = []
    for name, corpus in corpora(data).items():
        scan = Scan(name, corpus, directory, is_strict=True)
        scan.read(classifier, scans if name == TRAIN else [], features=features)
        scans.append(scan)
    return scans


class PairFilter:
    """Returns for training pairs, in any order, why they are dropped."""

    def __init__(self, data: DataConfig, directory: Path, num_pairs: int) -> None:
        """Use the records of `num_pairs` training pairs that `scan_corpora` has written."""
        self._train = Scan(TRAIN, data.train, directory)
        self._train.reader.parts = [FilePair(FileNotes(""), FileNotes(""), 0, num_pairs)]
        self._rules = rules.dropping_rules(data.clean)
        self._profile = rules.learn(self._train.windows(), data.max_tokens)
        if any(rule.refers for rule in self._rules):
            self._train.find_repeats()

    def reasons(self, first: int, count: int) -> Reasons:
        """Judge `count` pairs from number `first` on by their text alone."""
        return rules.drop_reasons(self._rules, self._train.pairs(first, count), self._profile)

    def reasons_of_encoded(self, first: int, src_tokens: Ints, tgt_tokens: Ints) -> Reasons:
        """Judge pairs from number `first` on, given their numbers of tokens, eos included."""
        pairs = self._train.pairs(first, len(src_tokens))
        pairs.src["tokens"], pairs.tgt["tokens"] = src_tokens, tgt_tokens
        return rules.drop_reasons(self._rules, pairs, self._profile)
