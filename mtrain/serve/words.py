"""The words of a translation, numbered as in its alignment, and the probability of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mtrain.decode.formats import Link, Translation, join, number_words, texts_of, word_starts
from mtrain.tokenizer.sentencepiece import DECODED_UNKNOWN


def cut_words(text: str) -> list[str]:
    """Return the words of a text, each with the spaces after it."""
    firsts = [at for at, is_start in enumerate(word_starts(text)) if is_start]
    return [text[start:end] for start, end in pairwise([*firsts, len(text)])]


def word_probs(translation: Translation, num_words: int) -> list[float]:
    """Return the probability of each word: the product of those of its tokens.

    It is empty if the search computed no log-probabilities.
    """
    if not translation.token_log_probs:
        return []
    sums = [0.0] * num_words
    for token, word in join(list(_parts(translation.tokens))).alignment or ():
        if word < num_words:
            sums[word] += translation.token_log_probs[token]
    return [round(math.exp(min(total, 0.0)), 4) for total in sums]


def _parts(tokens: Sequence[str]) -> Iterator[Translation]:
    """Yield each part of a long line, with its words linked to the tokens of the line."""
    first = 0
    for end, token in enumerate(tokens):
        if token == tokens[-1]:  # eos
            pieces = [DECODED_UNKNOWN if piece == "<unk>" else piece for piece in tokens[first:end]]
            numbered = enumerate(number_words(pieces), first)
            links = tuple(Link(number, word) for number, words in numbered for word in words)
            yield Translation("".join(texts_of(pieces)).lstrip(" "), alignment=links)
            first = end + 1
