"""The words of a translation, numbered as in its alignment, and the probability of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from mtrain.decode.formats import Translation, number_words, word_starts


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
    sums, first = [0.0] * num_words, 0
    for tokens, log_probs in _parts(translation):
        words_of = number_words(tokens)
        for words, log_prob in zip(words_of, log_probs, strict=False):
            for word in words:
                if first + word < num_words:
                    sums[first + word] += log_prob
        first += max((words.stop for words in words_of), default=0)
    return [round(math.exp(min(total, 0.0)), 4) for total in sums]


def _parts(translation: Translation) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
    """Yield tokens and log-probabilities of each part of a long line, without eos."""
    tokens, first = translation.tokens, 0
    for end, token in enumerate(tokens):
        if token == tokens[-1]:  # eos
            yield tokens[first:end], translation.token_log_probs[first:end]
            first = end + 1
