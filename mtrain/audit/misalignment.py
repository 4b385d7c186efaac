"""Stretches of a corpus where the translation of each source is some lines before or after it.

A line that is missing on one side shifts all pairs after it. Two lines are compared by length,
numbers, names, punctuation and ending. The log-likelihood ratio of each agreement is estimated from
the corpus: its frequency in pairs over that in unrelated lines. A CUSUM test (Page 1954) finds the
stretches where the evidence for an offset exceeds that for offset 0; a stretch begins where the sum
began to rise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.features import LINE, NUM_ENDINGS, Ints, PairWindow, Records

MAX_OFFSET = 5
MIN_PAIRS = 200  # of a corpus; fewer are too few to estimate the ratios
_THRESHOLD = 25.0  # nats of evidence that make a finding
_MAX_NATS = 3.0  # limit of the log-likelihood ratio of one agreement

_NUM_CELLS = (610, 64, 64, NUM_ENDINGS**2, 64)  # of the tables of `_cells`

Floats = npt.NDArray[np.float64]
Read = Callable[[], Iterator[PairWindow]]


class Shift(NamedTuple):
    """A stretch of pairs, first and last from 0, whose targets are `offset` lines later."""

    first: int
    last: int
    offset: int
    evidence: float


def find(read: Read) -> list[Shift]:
    """Find the misaligned stretches of a corpus, sorted by position.

    Its windows must follow each other without a gap, and all but the last must have at least
    `MAX_OFFSET` pairs.
    """
    model = _learn(read)
    offsets = [k for k in range(-MAX_OFFSET, MAX_OFFSET + 1) if k]
    tests = {k: _CusumTest(k) for k in offsets}
    for window in _overlapping(read()):
        aligned = _scores(model, window, 0)
        for k in offsets:
            tests[k].feed(_scores(model, window, k) - np.maximum(aligned, 0.0), window.first)
    return _strongest([shift for k in offsets for shift in tests[k].finish()])


def _overlapping(windows: Iterator[PairWindow]) -> Iterator[PairWindow]:
    """Add to the targets of each window the `MAX_OFFSET` before and after it."""
    before = edge = np.zeros(MAX_OFFSET, LINE)
    end = PairWindow(edge, edge, 0)
    for window, following in pairwise(chain(windows, [end])):
        after = np.concatenate([following.tgt, edge])[:MAX_OFFSET]
        yield window._replace(tgt=np.concatenate([before, window.tgt, after]))
        before = window.tgt[-MAX_OFFSET:]


def _cells(src: Records, tgt: Records) -> list[Ints]:
    """Return the cell of each pair of lines in each table of agreements."""
    ratio = np.log((tgt["chars"] + 5.0) / (src["chars"] + 5.0))
    size = np.minimum(np.log2(src["chars"] + 1.0).astype(np.int64), 9)
    return [
        size * 61 + np.clip((ratio * 10).round().astype(np.int64) + 30, 0, 60),
        _overlaps(src["numbers"], tgt["numbers"]),
        _overlaps(src["names"], tgt["names"]),
        src["ending"].astype(np.int64) * NUM_ENDINGS + tgt["ending"],
        np.minimum(src["punctuation"], 7).astype(np.int64) * 8 + np.minimum(tgt["punctuation"], 7),
    ]


def _overlaps(src: npt.NDArray[Any], tgt: npt.NDArray[Any]) -> Ints:
    """Return cells of pairs of bit sets, by their sizes and the size of their intersection."""
    num_src, num_tgt, num_both = (
        np.minimum(np.bitwise_count(bits), 3).astype(np.int64) for bits in (src, tgt, src & tgt)
    )
    cells: Ints = num_src * 16 + num_tgt * 4 + num_both
    return cells


def _learn(read: Read) -> list[Floats]:
    """Return the log-likelihood ratio of each cell of each table, in nats; 0 without counts."""
    pair_counts = [np.full(size, 0.5) for size in _NUM_CELLS]
    unrelated_counts = [np.full(size, 0.5) for size in _NUM_CELLS]
    for window in read():
        unrelated_tgt = np.roll(window.tgt, len(window.tgt) // 2 + 1)
        for counts, tgt in ((pair_counts, window.tgt), (unrelated_counts, unrelated_tgt)):
            for total, cells in zip(counts, _cells(window.src, tgt), strict=True):
                total += np.bincount(cells, minlength=len(total))
    return [
        np.clip(np.log(pairs / pairs.sum()) - np.log(others / others.sum()), -_MAX_NATS, _MAX_NATS)
        for pairs, others in zip(pair_counts, unrelated_counts, strict=True)
    ]


def _scores(model: list[Floats], window: PairWindow, offset: int) -> Floats:
    """Return for each source the evidence for the target `offset` further, in nats."""
    start = MAX_OFFSET + offset
    tgt = window.tgt[start : start + len(window.src)]
    scores = np.zeros(len(tgt))
    for table, cells in zip(model, _cells(window.src, tgt), strict=True):
        scores += table[cells]
    scores[(tgt["solid"] == 0) | (window.src["solid"] == 0)] = 0.0
    return scores


class _CusumTest:
    """Finds the stretches over which a sum of evidence rises by `_THRESHOLD` or more."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._shifts: list[Shift] = []
        self._height = 0.0  # of the sum above its lowest point, where a stretch may have begun
        self._start = 0  # the pair after that point
        self._peak = 0.0  # above 0 while a stretch is open
        self._peak_at = -1

    def feed(self, evidence: Floats, first: int) -> None:
        """Add the evidence of the pairs from number `first` on."""
        for pair, nats in enumerate(evidence.tolist(), first):
            self._height += nats
            if self._peak:
                if self._height > self._peak:
                    self._peak, self._peak_at = self._height, pair
                elif self._height <= self._peak - _THRESHOLD:
                    self.finish()
                    self._start, self._height = pair + 1, 0.0
            elif self._height <= 0.0:
                self._start, self._height = pair + 1, 0.0
            elif self._height >= _THRESHOLD:
                self._peak, self._peak_at = self._height, pair

    def finish(self) -> list[Shift]:
        """Close the stretch that is open; return all stretches."""
        if self._peak:
            # Missing targets leave their sources without a translation: the stretch begins there.
            first = max(self._start + min(self._offset, 0), 0)
            self._shifts.append(Shift(first, self._peak_at, self._offset, self._peak))
            self._peak = 0.0
        return self._shifts


def _strongest(shifts: list[Shift]) -> list[Shift]:
    """Cut overlapping stretches, so that the stronger one keeps its pairs; sort by position.

    What is left of a stretch is dropped if its share of the evidence is too small for a finding.
    """
    kept: list[Shift] = []  # by position; none overlaps another
    for shift in sorted(shifts, key=lambda shift: -shift.evidence):
        position = bisect_left(kept, shift)
        first = max([shift.first, *(other.last + 1 for other in kept[:position][-1:])])
        last = min([shift.last, *(other.first - 1 for other in kept[position:][:1])])
        share = (last - first + 1) / (shift.last - shift.first + 1)
        if share * shift.evidence >= _THRESHOLD:
            kept.insert(position, Shift(first, last, shift.offset, share * shift.evidence))
    return kept
