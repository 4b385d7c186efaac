"""Byte-pair encoding that leaves out merges at random. It knows no ids and no files."""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, count, repeat

_WORD = re.compile("\u2581?[^\u2581]+|\u2581")  # no piece reaches into the next word


class Merges:
    """What can be merged, and what is merged first: the higher score, then what is further left.

    Args:
        scores: of each piece that can be made.
        symbols: pieces that are whole from the start, and are merged with nothing.
    """

    def __init__(self, scores: Mapping[str, float], symbols: Collection[str] = ()) -> None:
        self._scores = scores
        longest_first = sorted(symbols, key=len, reverse=True)
        self._symbol = re.compile(
            f"({'|'.join(map(re.escape, longest_first))})" if symbols else "$."
        )
        self._plain: dict[str, list[str]] = {}  # of words

    def sample(self, text: str, alpha: float, rng: random.Random) -> list[str]:
        """Return the pieces of a normalised text, unknown characters one by one.

        Each merge is left out for good with the probability alpha when its turn comes: BPE-dropout
        (Provilkov et al. 2020, arXiv 1910.13267) as SentencePiece has it.
        """
        pieces: list[str] = []
        for place, part in enumerate(self._symbol.split(text)):
            if place % 2:
                pieces.append(part)
            else:
                for word in _WORD.findall(part):
                    pieces += self._sample(word, alpha, rng)
        return pieces

    def _sample(self, word: str, alpha: float, rng: random.Random) -> list[str]:
        """Return the pieces of a word; most have been made before, with no merge left out."""
        if word not in self._plain:
            self._plain[word] = self._merge(word, repeat(False))
        plain = self._plain[word]
        first = [rng.random() < alpha for _ in range(len(word) - len(plain))]
        if not any(first):
            return plain
        return self._merge(word, chain(first, (rng.random() < alpha for _ in count())))

    def _merge(self, word: str, left_out: Iterator[bool]) -> list[str]:
        pieces, last = list(word), len(word) - 1  # a piece stands at its first character's place
        before, after = list(range(-1, last)), list(range(1, last + 2))
        agenda: list[tuple[float, int, int, int]] = []

        def propose(left: int, right: int) -> None:
            if left >= 0 and right <= last:
                piece = pieces[left] + pieces[right]
                if piece in self._scores:
                    heapq.heappush(agenda, (-self._scores[piece], left, right, len(piece)))

        for place in range(last):
            propose(place, place + 1)
        while agenda:
            _, left, right, length = heapq.heappop(agenda)
            is_there = pieces[left] and pieces[right]
            if not is_there or len(pieces[left]) + len(pieces[right]) != length or next(left_out):
                continue
            pieces[left] += pieces[right]
            pieces[right] = ""
            after[left] = after[right]
            if after[left] <= last:
                before[after[left]] = left
            propose(before[left], left)
            propose(left, after[left])
        return [piece for piece in pieces if piece]
