"""Read corpora once, write records of their pairs to files, and decide which pairs are dropped.

Memory holds a block of pairs and, of a held-out corpus, its hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import or_
from pathlib import Path

import numpy as np

from mtrain.audit import duplicates, rules
from mtrain.audit.duplicates import NO_HASHES, Leaks, PairHashes, Repeats
from mtrain.audit.features import (
    LINE,
    Feature,
    Ints,
    LineFeatures,
    LineFlag,
    PairWindow,
    SideClassifier,
    WordCells,
    add_flag,
    measure,
    word_cells,
)
from mtrain.audit.rules import CorpusProfile, PairBlock, Reasons, Rule
from mtrain.config.corpora import TrainText, bidirectional_corpora, corpora_of
from mtrain.config.sections import DataConfig
from mtrain.corpus.reader import Reader
from mtrain.io.atomic import append
from mtrain.io.lines import Advance, ignore
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
    unseen_share: float  # of pieces that do not occur in the training text


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
        """Return the coverage; pieces without a count in `train` are unseen."""
        total = max(int(self.counts.sum()), 1)
        num_bytes = int(self.counts[self._vocabulary.byte_pieces].sum())
        return Coverage(
            total / max(self._num_words, 1),
            num_bytes / total,
            int(self.counts[self._vocabulary.unk]) / total,
            int(self.counts[train.counts == 0].sum()) / total,
        )


class PairRecords:
    """The file of the records of a corpus's pairs, and the earlier pairs that they repeat."""

    def __init__(self, directory: Path, corpus: str) -> None:
        self.path = directory / f".{corpus}.records"
        self._repeats: Repeats | None = None
        self._words_path = directory / f".{corpus}.words"
        self._word_blocks: list[tuple[int, int, int, int]] = []  # see `add_words`

    def add_words(self, first: int, num_pairs: int, src: WordCells, tgt: WordCells) -> None:
        """Write the words of a block of pairs, for `classify`."""
        append(self._words_path, src.tobytes() + tgt.tobytes())
        self._word_blocks.append((first, num_pairs, src.shape[1], tgt.shape[1]))

    def classify(self, classifier: SideClassifier) -> None:
        """Set `language` of the records whose words were added, and delete the words."""
        if not self._word_blocks:
            return
        with self._words_path.open("rb") as stream:
            for first, num_pairs, *num_words in self._word_blocks:
                records = np.memmap(self.path, PAIR, "r+", first * PAIR.itemsize, (num_pairs,))
                for side, count in zip(("src", "tgt"), num_words, strict=True):
                    words = np.fromfile(stream, np.uint16, 2 * count).reshape(2, -1)
                    records[side]["language"] = classifier.scores(words, num_pairs)
        self._words_path.unlink()

    def windows(self) -> Iterator[PairWindow]:
        """Yield all records, many at a time."""
        first = 0
        with self.path.open("rb") as stream:
            while len(records := np.fromfile(stream, PAIR, _WINDOW_PAIRS)):
                yield PairWindow(records["src"], records["tgt"], first)
                first += len(records)

    def find_repeats(self, dropping: Sequence[Rule], profile: CorpusProfile) -> Repeats:
        """Find pairs that occur earlier in the corpus, and sources that do in a kept pair."""
        others = [rule for rule in dropping if not rule.refers and rule.name != "max-tokens"]
        num_pairs = self.path.stat().st_size // PAIR.itemsize
        is_dropped = np.zeros(num_pairs, bool)
        for first in range(0, num_pairs, _WINDOW_PAIRS) if others else ():
            pairs = self.pairs(first, min(_WINDOW_PAIRS, num_pairs - first))
            reasons = rules.drop_reasons(others, pairs, profile)
            is_dropped[first : first + len(reasons)] = [reason is not None for reason in reasons]
        self._repeats = duplicates.find(self.windows, is_dropped)
        return self._repeats

    def pairs(self, first: int, count: int) -> PairBlock:
        """Return consecutive pairs for the rules; without `find_repeats`, none is repeated."""
        records = np.fromfile(self.path, PAIR, count, offset=first * PAIR.itemsize)
        same_pair = same_src = np.zeros(count, np.uint32)
        if self._repeats is not None:
            same_pair, same_src = (numbers[first : first + count] for numbers in self._repeats)
        src, tgt = records["src"], records["tgt"]
        is_held, is_held_pair = records["is_held"], records["is_held_pair"]
        return PairBlock(src, tgt, same_pair, same_src, is_held, is_held_pair)


@dataclass
class Scan:
    """One corpus after its first reading."""

    name: str
    corpus: TrainText
    reader: Reader  # has the notes on the files
    records: PairRecords
    piece_counts: list[PieceCounts]  # of both sides, if there is a tokenizer
    exact: PairHashes = NO_HASHES  # of all pairs, if the corpus is held out
    keys: PairHashes = NO_HASHES
    leaks: list[tuple[Scan, Leaks]] = field(default_factory=list)  # into other corpora
    num_held: int = 0  # number of pairs of which a side occurs in a held-out corpus


def scan_corpora(
    data: DataConfig,
    directory: Path,
    tokenizer: Tokenizer | None = None,
    advance: Advance = ignore,
    is_strict: bool = True,
) -> list[Scan]:
    """Read all corpora once, training text last, and write the records of their pairs to a folder.

    If `is_strict`, the first fault is an error, and only the features that the rules of
    `data.clean` read are computed.

    Raises:
        DataError: as a strict `Reader`.
        WriteError: if the records cannot be written.
    """
    features = Feature.ALL
    if is_strict:
        dropping = rules.dropping_rules(data.clean)
        features = reduce(or_, (rule.features for rule in dropping), Feature.NONE)
    classifier = SideClassifier()
    scans: list[Scan] = []
    for name, corpus in corpora(data).items():
        sides = (tokenizer.src, tokenizer.tgt) if tokenizer else ()
        reader = Reader(corpus, is_strict, has_checksums=is_strict)
        records = PairRecords(directory, name)
        scan = Scan(name, corpus, reader, records, [PieceCounts(side) for side in sides])
        _read(scan, classifier, scans if name in (VALID, TRAIN) else [], advance, features)
        scans.append(scan)
    for scan in scans:  # by the words of all pairs, so that their order does not matter
        scan.records.classify(classifier)
    return scans


def _read(
    scan: Scan,
    classifier: SideClassifier,
    held_out: Sequence[Scan],
    advance: Advance,
    features: Feature,
) -> None:
    """Read a corpus, write its records, and look up the text of held-out corpora."""
    scan.records.path.touch()
    bidirectional = bidirectional_corpora(scan.corpus)
    tagged = {name for name, corpus in corpora_of(scan.corpus) if corpus.tag is not None}
    tables = [Leaks(held_out_scan.exact, held_out_scan.keys) for held_out_scan in held_out]
    hashes = [(NO_HASHES, NO_HASHES)]  # by exact text, and by keys
    for block in scan.reader.blocks(advance):
        src, tgt = measure(block.src, features), measure(block.tgt, features)
        corpus_name = scan.reader.parts[-1].corpus
        if Feature.WORDS in features and corpus_name not in bidirectional:
            words = word_cells(src), word_cells(tgt)
            classifier.learn(*words)
            scan.records.add_words(block.first, len(block.src), *words)
        for side, undecodable in ((src, block.src_bad), (tgt, block.tgt_bad)):
            add_flag(side.lines, LineFlag.UNDECODABLE, undecodable)
            add_flag(side.lines, LineFlag.NO_PAIR, block.faults)
        if scan.piece_counts:
            scan.piece_counts[0].add(block.src, src)
            src.lines["tokens"] += corpus_name in tagged
            scan.piece_counts[1].add(block.tgt, tgt)
        exact, keys = duplicates.hashes_of(src, tgt)
        records = np.zeros(len(block.src), PAIR)
        records["src"], records["tgt"] = src.lines, tgt.lines
        for table in tables:
            is_held, is_held_pair = table.look_up(exact, keys, block.first, bool(bidirectional))
            records["is_held"] |= is_held
            records["is_held_pair"] |= is_held_pair
        scan.num_held += int(np.count_nonzero(records["is_held"]))
        append(scan.records.path, records.tobytes())
        if scan.name != TRAIN:
            hashes.append((exact, keys))
    scan.exact, scan.keys = map(PairHashes.joined, zip(*hashes, strict=True))
    for held_out_scan, table in zip(held_out, tables, strict=True):
        held_out_scan.leaks.append((scan, table))


class PairFilter:
    """Decides which training pairs are dropped, and why; pairs can be read in any order."""

    def __init__(self, data: DataConfig, directory: Path) -> None:
        """Use the records of the training pairs that `scan_corpora` has written."""
        self._records = PairRecords(directory, TRAIN)
        self._rules = rules.dropping_rules(data.clean)
        self._profile = rules.learn(
            self._records.windows(), data.max_tokens, bool(bidirectional_corpora(data.train))
        )
        if any(rule.refers for rule in self._rules):
            self._records.find_repeats(self._rules, self._profile)

    def reasons(self, first: int, count: int) -> Reasons:
        """Return why `count` pairs from `first` on are dropped; `max-tokens` is not applied."""
        return rules.drop_reasons(self._rules, self._records.pairs(first, count), self._profile)

    def reasons_of_encoded(self, first: int, src_tokens: Ints, tgt_tokens: Ints) -> Reasons:
        """Return why pairs from `first` on are dropped, given their token counts with eos."""
        pairs = self._records.pairs(first, len(src_tokens))
        pairs.src["tokens"], pairs.tgt["tokens"] = src_tokens, tgt_tokens
        return rules.drop_reasons(self._rules, pairs, self._profile)
