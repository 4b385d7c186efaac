"""Translated lines: their flags, word alignments, and output formats; independent of models."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtrain.audit.unicode_classes import IS_UNSPACED, kinds
from mtrain.corpus.length_stats import CorpusStats

_SPACE = "\u2581"  # as SentencePiece writes it
# The end of a sentence in Chinese or Japanese, after which there is no space
_CJK_END = re.compile(
    r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff][.!?\u2026\"'\u201d\u2019)]*\Z"
)
_MAX_END = 100  # characters of a text in which its end is looked for
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte of an unknown character, as SentencePiece writes it


class Link(NamedTuple):
    """An aligned pair of word indices, from 0."""

    src: int
    tgt: int


def align_words(weights_TS: Tensor, src_words: Sequence[range], tgt: Sequence[str]) -> list[Link]:
    """Link each target word to the source word that it attends to most.

    Where a piece has several words, all of them are linked.

    Args:
        weights_TS: cross-attention weights of target and source tokens, [T, S] or larger.
        src_words: the words of each source token, as of `number_words`.
        tgt: the target tokens as SentencePiece pieces.
    """
    tgt_words = number_words(tgt)
    src_rows, tgt_rows = (
        {words: row for row, words in enumerate(dict.fromkeys(side))}
        for side in (src_words, tgt_words)
    )
    if not any(map(len, src_rows)) or not any(map(len, tgt_rows)):
        return []
    sums = weights_TS.new_zeros((len(tgt_rows), len(src_rows)))
    columns = torch.tensor([src_rows[words] for words in src_words], device=sums.device)
    for position, words in enumerate(tgt_words):
        sums[tgt_rows[words]].index_add_(0, columns, weights_TS[position, : len(src_words)])
    best = [list(src_rows)[column] for column in sums.argmax(1).tolist()]
    return [
        Link(src, tgt)
        for src_group, tgt_group in zip(best, tgt_rows, strict=True)
        for tgt in tgt_group
        for src in src_group
    ]


def word_starts(text: str) -> list[bool]:
    """Return for each character whether it begins a word.

    Spaces separate words. In a script without spaces each letter, with its marks, is a word.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
    is_letter = IS_UNSPACED[kinds(codes)].tolist()
    starts: list[bool] = []
    previous, is_after_letter = " ", False
    for character, is_unspaced in zip(text, is_letter, strict=True):
        if previous != " " and unicodedata.category(character)[0] == "M":
            starts.append(False)
            continue
        is_new = previous == " " or is_unspaced or is_after_letter
        starts.append(is_new and character != " ")
        previous, is_after_letter = character, is_unspaced
    return starts


def texts_of(pieces: Sequence[str]) -> list[str]:
    """Return the text of each piece; the first of consecutive byte pieces has that of all."""
    texts: list[str] = []
    for is_byte, run in groupby(pieces, key=lambda piece: bool(_BYTE.fullmatch(piece))):
        if is_byte:
            raw = bytes(int(piece[3:5], 16) for piece in run)
            texts += [raw.decode("utf-8", errors="replace"), *[""] * (len(raw) - 1)]
        else:
            texts += [piece.replace(_SPACE, " ") for piece in run]
    return texts


def number_words(pieces: Sequence[str]) -> list[range]:
    """Return the words of each piece, numbered from 0.

    Pieces of one word have the same range. A piece that is only a space belongs to the next word,
    at the end of the line to the last one.
    """
    texts = texts_of(pieces)
    starts = iter(word_starts("".join(texts)))
    firsts: list[int] = []  # the first word of each group of pieces
    groups, num_words = [], 0
    for text in texts:
        has_letter = False
        for character, is_start in zip(text, starts, strict=False):
            if is_start and not has_letter:
                firsts.append(num_words)
            num_words += is_start
            has_letter |= character != " "
        groups.append(len(firsts) if text and not has_letter else len(firsts) - 1)
    ranges = [range(*bounds) for bounds in pairwise([*firsts, num_words])] or [range(0)]
    return [ranges[min(group, len(ranges) - 1)] for group in groups]


Format = Literal["text", "tsv", "jsonl"]


@dataclass(frozen=True)
class Translation:
    """One translation of a line; `str` gives its text.

    Attributes:
        text: the translation.
        tokens: the target tokens as SentencePiece pieces, eos last; of a split line, eos after each
            part.
        token_log_probs: the natural logarithm of each token's probability; empty if the search
            computed none.
        log_prob: the natural logarithm of the probability of the whole translation.
        score: `log_prob` divided by the length penalty, plus, with `rerank_weight`, the weighted
            score of the other direction; of a split line, the mean of its parts by length.
        alignment: pairs of source and target word, numbered from 0; None unless
            `with_alignment`, but () for a blank line.
        flags: names of likely problems, such as loop or empty, sorted.
        alternatives: other translations of the line, best first, if `num_best` is above 1.
    """

    text: str
    tokens: tuple[str, ...] = ()
    token_log_probs: tuple[float, ...] = ()
    log_prob: float = 0.0
    score: float = 0.0
    alignment: tuple[Link, ...] | None = None
    flags: tuple[str, ...] = ()
    alternatives: tuple[Translation, ...] = ()

    def __str__(self) -> str:
        """Return the text."""
        return self.text


NOTHING = Translation("", alignment=())


@dataclass(frozen=True)
class TranslatedLine:
    """A line of the input, numbered from 1, and its translations, best first."""

    number: int
    src: str
    best: list[Translation]


def join(parts: Sequence[Translation]) -> Translation:
    """Join the translations of the parts of a line; scores are averaged, weighted by length.

    Source words are numbered in the line already, target words in each part. A space separates the
    parts, but not after Chinese or Japanese text.
    """
    if len(parts) == 1:
        return parts[0]
    weights = [max(len(part.tokens), 1) for part in parts]
    score = sum(w * part.score for w, part in zip(weights, parts, strict=True)) / sum(weights)
    text, firsts = "", list[int]()  # the place of each part in the text
    for part in parts:
        if text and part.text and not _CJK_END.search(text, max(len(text) - _MAX_END, 0)):
            text += " "
        firsts.append(len(text) + len(part.text) - len(part.text.lstrip(" ")))  # before " \u2047"
        text += part.text
    links: tuple[Link, ...] | None = None
    if all(part.alignment is not None for part in parts):
        num_words = list(accumulate(word_starts(text)))  # up to each character
        links = tuple(  # a part may continue a word
            Link(link.src, num_words[first] - 1 + link.tgt)
            for first, part in zip(firsts, parts, strict=True)
            for link in part.alignment or ()
        )
    return Translation(
        text,
        tuple(token for part in parts for token in part.tokens),
        tuple(log_prob for part in parts for log_prob in part.token_log_probs),
        sum(part.log_prob for part in parts),
        score,
        links,
        tuple(sorted({flag for part in parts for flag in part.flags})),
    )


def write(line: TranslatedLine, format: Format, num_best: int) -> Iterator[str]:
    """Yield the lines of output for a line of input.

    text: `num_best` lines, each a translation. tsv: as many, each the line's number, rank, score,
    log-probability, flags and translation. jsonl: one object.
    """
    if format == "jsonl":
        trees = [as_tree(translation) for translation in line.best]
        tree = {"line": line.number, "source": line.src, **trees[0]}
        tree |= {"n_best": trees} if num_best > 1 else {}
        yield json.dumps(tree, ensure_ascii=False)
        return
    for rank in range(num_best):
        best = line.best[rank] if rank < len(line.best) else NOTHING
        if format == "text":
            yield best.text
        else:
            numbers = f"{line.number}\t{rank + 1}\t{best.score:.6f}\t{best.log_prob:.6f}"
            yield f"{numbers}\t{','.join(best.flags)}\t{best.text.replace(chr(9), ' ')}"


def as_tree(translation: Translation) -> dict[str, Any]:
    """Return the fields of a translation, without its alternatives, as JSON has them."""
    return {
        "translation": translation.text,
        "score": translation.score,
        "log_prob": translation.log_prob,
        "tokens": translation.tokens,
        "token_log_probs": translation.token_log_probs,
        "alignment": translation.alignment,
        "flags": translation.flags,
    }


def as_pharaoh(links: Sequence[Link] | None) -> str:
    """Format an alignment as `source-target` pairs of words, counted from 0."""
    return " ".join(f"{link.src}-{link.tgt}" for link in links or [])


_MAX_REPEATS = 3  # of a phrase in a row, before it is a loop
_MAX_PHRASE = 8  # pieces
_USUAL_SHARE = 0.05  # if so many training pairs are copies, a copy is not flagged


def find_flags(
    src: str,
    tgt: str,
    src_ids: Sequence[int],
    tgt_pieces: Sequence[str],
    profile: CorpusStats | None,
) -> list[str]:
    """Return the likely problems of a translation: loop, empty, copy or length.

    Args:
        src, tgt: the text of both sides.
        src_ids, tgt_pieces: the pieces of both sides, without bos and eos.
        profile: length statistics of the training corpus, if they are known.
    """
    flags = ["loop"] if is_loop(src_ids, tgt_pieces) else []
    if not tgt.strip():
        flags.append("empty")
    elif tgt.strip() == src.strip():
        if profile is None or profile.share_copied < _USUAL_SHARE:
            flags.append("copy")
    elif profile is not None and not profile.holds(len(src_ids) + 1, len(tgt_pieces) + 1):
        flags.append("length")
    return flags


def is_loop(src: Sequence[object], tgt: Sequence[object]) -> bool:
    """Return whether a target repeats a phrase many times in a row, more often than its source."""
    # a fast test that rules out most: a token of a loop occurs more than `_MAX_REPEATS` times
    if len(tgt) - len(set(tgt)) < _MAX_REPEATS or max(Counter(tgt).values()) <= _MAX_REPEATS:
        return False
    repeats = _count_repeats(tgt)
    return repeats > _MAX_REPEATS and repeats > _count_repeats(src)


def _count_repeats(ids: Sequence[object]) -> int:
    """Return the most times that any phrase occurs in a row."""
    most = 1 if ids else 0
    for size in range(1, min(_MAX_PHRASE, len(ids) // 2) + 1):
        num_equal = 0
        for position in range(size, len(ids)):
            num_equal = num_equal + 1 if ids[position] == ids[position - size] else 0
            most = max(most, 1 + num_equal // size)
    return most
