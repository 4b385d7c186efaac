"""Split a line that is too long into parts: sentences, else words, else runs of tokens."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from mtrain.decode.formats import number_words, word_starts
from mtrain.decode.translator import EncodedSource
from mtrain.tokenizer.sentencepiece import Vocabulary

SENTENCE_ENDS = ".!?…։؟۔।॥།။።፧។៕"  # a space follows
WIDE_SENTENCE_ENDS = "。！？｡"  # of Chinese and Japanese, where none follows
_SENTENCE = re.compile(
    rf"\S.*?(?:(?<=[{SENTENCE_ENDS}])[\"'”’)\]»]*\s+"
    rf"|(?<=[{WIDE_SENTENCE_ENDS}])[{WIDE_SENTENCE_ENDS}\"'”’」』｣）)》】]*"
    r"|\Z)",
    re.DOTALL,
)
_WORD = re.compile(r"\S+")
_NO_SPACE = re.compile(r"\S")
_CONTINUED = re.compile("<0x[89AB][0-9A-F]>")  # a byte of a character, but not its first one
_MAX_PIECE = 16  # characters, SentencePiece's default


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


def count_whole(pieces: Sequence[str], most: int) -> int:
    """Return how many of the first `most` pieces are kept if no character's bytes are divided."""
    kept = min(most, len(pieces))
    while 0 < kept < len(pieces) and _CONTINUED.fullmatch(pieces[kept]):
        kept -= 1
    return kept


def split_line(src: str, vocabulary: Vocabulary, max_tokens: int) -> list[LinePart]:
    """Split a line at the ends of its sentences, else between words, else between tokens.

    Each part is encoded as a line of its own.

    Returns:
        as few parts as fit, each of at most `max_tokens` tokens, eos included.
    """
    limit = max_tokens - 1  # for eos
    src = re.sub(" {2,}", " ", src)  # as SentencePiece does, so that tokens have its characters
    word_of = list(accumulate(word_starts(src), initial=-1))[1:]  # of each character
    parts: list[LinePart] = []
    for start, end in _spans(src, _sentence_ends(src, vocabulary, limit), vocabulary, limit):
        text, first = src[start:end].rstrip(), word_of[start]
        (ids,), pieces = vocabulary.encode([text]), vocabulary.pieces(text)
        words = [range(first + span.start, first + span.stop) for span in number_words(pieces)]
        for at in range(0, len(ids), limit):  # more than once if a character is too long
            cut = slice(at, at + limit)
            kept = vocabulary.text_of(pieces[cut])
            source = EncodedSource([*ids[cut], vocabulary.eos], text=kept)
            parts.append(LinePart(source, words[cut], ["split"]))
    return parts


def _sentence_ends(src: str, vocabulary: Vocabulary, limit: int) -> list[int]:
    """Return the ends of the sentences of a line; one that is too long has several."""
    ends: list[int] = []
    sentences = list(_SENTENCE.finditer(src))
    texts = [sentence[0].rstrip() for sentence in sentences]
    for sentence, text, ids in zip(sentences, texts, vocabulary.encode(texts), strict=True):
        cuts = [len(text)]
        if len(ids) > limit:
            word_ends = [word.end() for word in _WORD.finditer(text)]
            cuts = [end for _, end in _spans(text, word_ends, vocabulary, limit)]
        ends += [sentence.start() + cut for cut in cuts]
    return ends


def _spans(
    text: str, ends: list[int], vocabulary: Vocabulary, limit: int
) -> Iterator[tuple[int, int]]:
    """Cut a text at some of `ends` into as few spans of at most `limit` tokens as possible.

    Where a span has more tokens up to the next end, it ends after the last character that fits
    with its combining marks (without them, if they are too many), or after its first character if
    none does.
    """
    last = 0
    while match := _NO_SPACE.search(text, last):
        first = match.start()
        pieces = vocabulary.pieces(text[first : first + _MAX_PIECE * limit + 1])
        count = count_whole(pieces, limit)
        last = first + max(1, len(vocabulary.text_of(pieces[:count])))
        cut = last  # before the letter of the marks that do not fit
        while first < cut < len(text) and unicodedata.category(text[cut])[0] == "M":
            cut -= 1
        last = cut if cut > first else last
        for end in reversed(ends[bisect_right(ends, first) : bisect_right(ends, last)]):
            if len(vocabulary.encode([text[first:end]])[0]) <= limit:  # a token may span two units
                last = end
                break
        yield first, last
