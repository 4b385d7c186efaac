"""Word alignments from cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

_SPACE = "\u2581"  # as SentencePiece writes it


class Link(NamedTuple):
    """A source word and a target word that belong together, counted from 0."""

    src: int
    tgt: int


def align_words(weights_TS: Tensor, src_words: Sequence[int], tgt: Sequence[str]) -> list[Link]:
    """Link each target word to the source word that it attends to most.

    Args:
        weights_TS: what each target piece gives to each source piece, [T, S] or larger.
        src_words: which word each source piece belongs to.
        tgt: the target pieces, as SentencePiece writes them.
    """
    tgt_words = number_words(tgt)
    if not src_words or all(piece == _SPACE for piece in tgt):
        return []
    first = min(src_words)
    by_word = weights_TS.new_zeros((tgt_words[-1] + 1, max(src_words) - first + 1))
    for place, word in enumerate(tgt_words):
        own = weights_TS[place, : len(src_words)]
        by_word[word].index_add_(0, own.new_tensor(src_words).long() - first, own)
    return [Link(first + int(src_word), word) for word, src_word in enumerate(by_word.argmax(1))]


def number_words(pieces: Sequence[str]) -> list[int]:
    """Return which word each piece belongs to; a piece with a leading space begins one.

    Pieces that are a space alone belong to the word that follows, or at the end to the last one.
    """
    words, word, is_open = [], 0, False
    for piece in pieces:
        if piece.startswith(_SPACE) and is_open:
            word, is_open = word + 1, False
        is_open = is_open or piece != _SPACE
        words.append(word)
    last = word if is_open else max(word - 1, 0)
    return [min(word, last) for word in words]
