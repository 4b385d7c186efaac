"""Which of the two sides a line reads like, by the words that each side uses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtrain.audit.features import Hashes, Measured

_NUM_CELLS = 1 << 16
_MOST = 3.0  # nats that one word can say


class Languages:
    """The words of both sides, by cells that several rare words share."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, _NUM_CELLS), np.int64)

    def learn(self, src: Measured, tgt: Measured) -> None:
        """Count the words of some pairs."""
        for counts, side in zip(self._counts, (src, tgt), strict=True):
            counts += np.bincount(_cells(side.words), minlength=_NUM_CELLS)

    def scores(self, side: Measured) -> npt.NDArray[np.float32]:
        """Return for each line, in nats, how much speaks for the source side; below 0, against."""
        words = _cells(side.words)
        rates = (self._counts[:, words] + 1.0) / (self._counts.sum(1, keepdims=True) + 1.0)
        says = np.clip(np.log(rates[0] / rates[1]), -_MOST, _MOST)
        sums = np.bincount(side.word_lines, weights=says, minlength=len(side.lines))
        return sums.astype(np.float32)


def _cells(words: Hashes) -> npt.NDArray[np.int64]:
    cells: npt.NDArray[np.int64] = (words % np.uint64(_NUM_CELLS)).astype(np.int64)
    return cells
