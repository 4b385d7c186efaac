"""BPE-dropout: byte-pair encoding that drops merges at random. Works on text, not on ids."""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import repeat

_MAX_CACHED = 1 << 17  # segmentations; some 40 MB of English and German
_MAX_LENGTH = 32  # characters of a word that is cached: a longer one, as in Chinese, rarely recurs
_WORD = re.compile("\u2581?[^\u2581]+|\u2581")  # pieces do not cross word boundaries


class Merges:
    """The merges of a BPE model; the highest score is merged first, ties from left to right.

    Args:
        scores: the score of each piece that a merge can create.
        symbols: user-defined pieces, which are never split or merged.
    """

    def __init__(self, scores: Mapping[str, float], symbols: Collection[str] = ()) -> None:
        self._scores = scores
        longest_first = sorted(symbols, key=len, reverse=True)
        self._symbol = re.compile(
            f"({'|'.join(map(re.escape, longest_first))})" if symbols else "$."
        )
        self._plain: dict[str, list[str]] = {}  # word -> pieces without dropout
        # word and draws -> pieces; None if more draws are needed
        self._sampled: dict[tuple[str, tuple[bool, ...]], list[str] | None] = {}

    def sample(self, text: str, alpha: float, rng: random.Random) -> list[str]:
        """Return the pieces of a normalised text; unknown characters are single pieces.

        A merge is dropped permanently with probability alpha when it is popped: BPE-dropout
        (Provilkov et al. 2020, arXiv 1910.13267) as in SentencePiece.
        """
        pieces: list[str] = []
        for index, part in enumerate(self._symbol.split(text)):
            if index % 2:
                pieces.append(part)
            else:
                for word in _WORD.findall(part):
                    pieces += self._sample(word, alpha, rng)
        return pieces

    def _sample(self, word: str, alpha: float, rng: random.Random) -> list[str]:
        """Return the pieces of a word; the merges follow from the draws, and are cached."""
        if len(word) > _MAX_LENGTH:
            return self._merge(word, (rng.random() < alpha for _ in repeat(None)))
        if len(self._plain) + len(self._sampled) >= _MAX_CACHED:
            self._plain.clear()
            self._sampled.clear()
        if word not in self._plain:
            self._plain[word] = self._merge(word, repeat(False))
        plain = self._plain[word]
        draws = tuple([rng.random() < alpha for _ in range(len(word) - len(plain))])
        if not any(draws):
            return plain
        while (pieces := self._pieces_after(word, draws)) is None:
            draws += (rng.random() < alpha,)
        return pieces

    def _pieces_after(self, word: str, draws: tuple[bool, ...]) -> list[str] | None:
        """Return the pieces after draws that drop merges; None if more draws are needed."""
        key = word, draws
        if key not in self._sampled:
            try:
                self._sampled[key] = self._merge(word, iter(draws))
            except StopIteration:
                self._sampled[key] = None
        return self._sampled[key]

    def _merge(self, word: str, is_dropped: Iterator[bool]) -> list[str]:
        # pieces[i] is the piece whose first character has index i; empty if merged into another
        pieces, last, score_of = list(word), len(word) - 1, self._scores.get
        before, after = list(range(-1, last)), list(range(1, last + 2))
        agenda: list[tuple[float, int, int, int]] = []

        def propose(left: int, right: int) -> None:
            if left >= 0 and right <= last:
                piece = pieces[left] + pieces[right]
                score = score_of(piece)
                if score is not None:
                    heapq.heappush(agenda, (-score, left, right, len(piece)))

        for index in range(last):
            propose(index, index + 1)
        while agenda:
            _, left, right, length = heapq.heappop(agenda)
            exists = pieces[left] and pieces[right]
            if not exists or len(pieces[left]) + len(pieces[right]) != length or next(is_dropped):
                continue
            pieces[left] += pieces[right]
            pieces[right] = ""
            after[left] = after[right]
            if after[left] <= last:
                before[after[left]] = left
            propose(before[left], left)
            propose(left, after[left])
        return [piece for piece in pieces if piece]
