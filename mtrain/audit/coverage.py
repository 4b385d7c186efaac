"""How well a tokenizer fits a corpus: pieces per word, bytes, unknown and unseen pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from mtrain.audit.features import Ints
from mtrain.tokenizer.sentencepiece import Vocabulary


@dataclass(frozen=True)
class Coverage:
    """How well a vocabulary fits one side of a corpus.

    Attributes:
        pieces_per_word: words are runs of letters or of digits.
        byte_share, unknown_share: of pieces.
        unseen_share: of pieces, those that the training text never has.
    """

    pieces_per_word: float
    byte_share: float
    unknown_share: float
    unseen_share: float


class PieceCounts:
    """Counts of the pieces in one side of a corpus."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._num_words = 0
        self.counts = np.zeros(len(vocabulary), np.int64)

    def add(self, lines: Sequence[str], num_words: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Encode lines; return the tokens of each, with eos, and whether one is unknown."""
        encoded = self._vocabulary.encode(lines)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ids = np.fromiter(chain.from_iterable(encoded), np.int64, int(lengths.sum()))
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self._num_words += num_words
        line_of = np.repeat(np.arange(len(lengths)), lengths)
        has_unknown = np.zeros(len(lengths), bool)
        has_unknown[line_of[ids == self._vocabulary.unk]] = True
        return lengths + 1, has_unknown

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
