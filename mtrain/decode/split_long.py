"""Split a line that is too long into parts: sentences, else words, else runs of tokens."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import NamedTuple

from mtrain.decode.formats import number_words, word_starts
from mtrain.decode.translator import EncodedSource
from mtrain.tokenizer.sentencepiece import Vocabulary

_SENTENCE = re.compile(
    r"\S.*?(?:(?<=[.!?\u2026\u061f\u06d4\u0964\u0965\u17d4\u104b])[\"'\u201d\u2019)\]\u00bb]*\s+|(?<=[\u3002\uff01\uff1f])|\Z)",
    re.DOTALL,
)
_WORD = re.compile(r"\S+")


class LinePart(NamedTuple):
    """A part of a line that is translated on its own.

    Attributes:
        source: its tokens.
        words: the words of each token, numbered in the whole line.
        flags: of its translation.
    """

    source: EncodedSource
    words: list[range]
    flags: list[str]


class _Token(NamedTuple):
    """A token of a line, and its words in the line, numbered from 0."""

    id: int
    piece: str
    words: range


def split_line(src: str, vocabulary: Vocabulary, max_tokens: int) -> list[LinePart]:
    """Split a line at the ends of its sentences, else between words, else between tokens.

    Returns:
        as few parts as fit, each of at most `max_tokens` tokens, eos included.
    """
    limit = max_tokens - 1  # for eos
    words = list(accumulate(word_starts(src), initial=-1))[1:]  # of each character
    sentences = list(_SENTENCE.finditer(src))
    units: list[list[_Token]] = []
    for sentence, tokens in zip(sentences, _encode(vocabulary, sentences, words), strict=True):
        if len(tokens) <= limit:
            units.append(tokens)
            continue
        tokens_of_words = _encode(vocabulary, list(_WORD.finditer(src, *sentence.span())), words)
        fragments = [
            tokens[start : start + limit]
            for tokens in tokens_of_words
            for start in range(0, len(tokens), limit)
        ]
        units += _pack(fragments, limit)
    return [
        LinePart(
            EncodedSource(
                [*(token.id for token in part), vocabulary.eos],
                text=vocabulary.text_of([token.piece for token in part]),
            ),
            [token.words for token in part],
            ["split"],
        )
        for part in _pack(units, limit)
    ]


def _encode(
    vocabulary: Vocabulary, matches: list[re.Match[str]], words: list[int]
) -> list[list[_Token]]:
    """Return the tokens of each match in a line; a match may begin within a word."""
    passages = [match[0].rstrip() for match in matches]
    tokens_of: list[list[_Token]] = []
    for match, text, ids in zip(matches, passages, vocabulary.encode(passages), strict=True):
        pieces, first = vocabulary.pieces(text), words[match.start()]
        numbers = [range(first + span.start, first + span.stop) for span in number_words(pieces)]
        tokens_of.append([_Token(*token) for token in zip(ids, pieces, numbers, strict=True)])
    return tokens_of


def _pack(units: list[list[_Token]], limit: int) -> list[list[_Token]]:
    """Join neighbouring units while they have at most `limit` tokens."""
    packed: list[list[_Token]] = []
    for unit in units:
        if packed and len(packed[-1]) + len(unit) <= limit:
            packed[-1] = packed[-1] + unit
        else:
            packed.append(unit)
    return packed
