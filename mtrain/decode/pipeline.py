"""Lines to lines, block by block: one line out for every line in, in order, whatever it holds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import Literal, NamedTuple

from mtrain.corpus.length_stats import CorpusStats
from mtrain.decode.alignment import Link, align_words, number_words
from mtrain.decode.beam import Hypothesis
from mtrain.decode.flags import find_flags
from mtrain.decode.formats import NOTHING, TranslatedLine, Translation, join
from mtrain.decode.translator import EncodedSource, Translator
from mtrain.errors import DataError
from mtrain.io.lines import LineWarnings
from mtrain.tokenizer.sentencepiece import Vocabulary

Warn = Callable[[str], None]

BLOCK_LINES = 2048  # lines that are sorted by length and translated together, at most
_MAX_SHOWN = 5  # characters
_SENTENCE = re.compile(
    r"\S.*?(?:(?<=[.!?\u2026])[\"'\u201d\u2019)\]\u00bb]*\s+|(?<=[\u3002\uff01\uff1f])|\Z)",
    re.DOTALL,
)
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class LongLines:
    """What becomes of a line of more than `max_tokens` tokens, eos among them.

    Attributes:
        max_tokens: None translates every line whole, in memory and time that grow with its square.
        policy: `split` translates its sentences apart, as few parts as fit; `truncate` leaves out
            what does not fit; `error` stops.
    """

    max_tokens: int | None = None
    policy: Literal["split", "truncate", "error"] = "split"


@dataclass(frozen=True)
class Options:
    """How a stream of lines is translated.

    Attributes:
        long_lines: what becomes of them.
        with_alignment: link the words of both sides.
        seed: decides what is sampled.
        with_scores: say how likely each is; where nobody asks, greedy search is faster.
    """

    long_lines: LongLines = LongLines()
    with_alignment: bool = False
    seed: int = 1
    with_scores: bool = True


_FLAG_TEXTS = {
    "empty": "is empty",
    "copy": "is the line itself",
    "loop": "repeats itself",
    "length": "is far longer or shorter than those of the training",
    "limit": "reached its limit and may be cut off",
}


class _LineToken(NamedTuple):
    """A piece of a line, as an id and as text, and the line's word that it belongs to, from 0."""

    id: int
    text: str
    word: int


class _LinePart(NamedTuple):
    """A part of a line that is translated on its own, and the line's word of each piece."""

    source: EncodedSource
    words: list[int]
    marks: list[str]


class LineTranslator:
    """Translates blocks of lines, and warns of what it notices."""

    def __init__(
        self,
        translator: Translator,
        options: Options,
        profile: CorpusStats | None,
        warn: Warn,
    ) -> None:
        self.translator, self.options, self.profile = translator, options, profile
        self.warnings = LineWarnings(warn)
        self._num_lines = 0

    def translate(
        self, blocks: Iterable[list[str]], prefixes: Iterator[str] | None = None
    ) -> Iterator[TranslatedLine]:
        """Yield what becomes of each line, as soon as its block is done.

        Args:
            blocks: the lines, as they come; without end, if need be.
            prefixes: what each line's translation must begin with.

        Raises:
            DataError: if a line is too long and may not be cut, or has no prefix.
        """
        for block in blocks:
            own = list(islice(prefixes, len(block))) if prefixes is not None else [""] * len(block)
            if len(own) < len(block):
                raise DataError(
                    f"`--prefix` must have a line for each line of the input, but ends at line "
                    f"{self._num_lines + len(own):,}."
                )
            yield from self._translate_block(block, own)
            self._num_lines += len(block)
        self.warnings.close()

    def _translate_block(self, block: list[str], prefixes: list[str]) -> Iterator[TranslatedLine]:
        numbers = range(self._num_lines + 1, self._num_lines + len(block) + 1)
        parts_of = self._parts(numbers, block, prefixes)
        found = iter(self._translations([part for own in parts_of for part in own]))
        for number, src, own in zip(numbers, block, parts_of, strict=True):
            ranks = zip(*islice(found, len(own)), strict=False)  # the best of each part, and so on
            best = [self._checked(src, own, join(parts)) for parts in ranks]
            if best:
                self._warn_of(number, best[0])
            yield TranslatedLine(number, src, best or [NOTHING])

    def _translations(self, parts: list[_LinePart]) -> list[list[Translation]]:
        """Return the best translations of each part."""
        tgt = self.translator.tokenizer.tgt
        sources = [part.source for part in parts]
        found = self.translator.search(sources, self.options.with_scores)
        owners = [part for part, own in zip(parts, found, strict=True) for _ in own]
        flat = [hypothesis for own in found for hypothesis in own]
        texts = tgt.decode([hypothesis.ids for hypothesis in flat])
        alignments = self._align(owners, flat)
        translations = iter(
            Translation(
                text,
                tgt.pieces_of([*hypothesis.ids, tgt.eos]),
                hypothesis.log_probs,
                hypothesis.log_prob,
                hypothesis.score,
                links,
                ["limit"] if len(hypothesis.ids) >= self.translator.max_length(part.source) else [],
            )
            for text, part, hypothesis, links in zip(texts, owners, flat, alignments, strict=True)
        )
        return [list(islice(translations, len(own))) for own in found]

    def _align(
        self, parts: list[_LinePart], found: list[Hypothesis]
    ) -> Sequence[list[Link] | None]:
        """Link the words of each translation to those of its line, if anybody asked."""
        if not self.options.with_alignment:
            return [None] * len(parts)
        sources, targets = [part.source for part in parts], [own.ids for own in found]
        weights = self.translator.attend(sources, targets)
        pieces_of = self.translator.tokenizer.tgt.pieces_of
        return [
            align_words(own_TS, part.words, pieces_of(ids))
            for own_TS, part, ids in zip(weights, parts, targets, strict=True)
        ]

    def _checked(
        self, src: str, parts: Sequence[_LinePart], translation: Translation
    ) -> Translation:
        """Mark what looks wrong about the translation of a line."""
        src_ids = [piece for part in parts for piece in part.source.ids[:-1]]
        flaws = find_flags(src, translation.text, src_ids, translation.pieces[:-1], self.profile)
        marks = {mark for part in parts for mark in part.marks}
        return replace(translation, flags=sorted({*marks, *translation.flags, *flaws}))

    def _warn_of(self, number: int, translation: Translation) -> None:
        flaws = [words for flag, words in _FLAG_TEXTS.items() if flag in translation.flags]
        if flaws:
            text = f"the translation {', and '.join(flaws)}"
            self.warnings.add(text, number, f"{text}.")

    def _parts(
        self, numbers: Iterable[int], block: list[str], prefixes: list[str]
    ) -> list[list[_LinePart]]:
        """Encode each line as the parts that are translated; a blank line has none."""
        tokenizer = self.translator.tokenizer
        forced = tokenizer.tgt.encode(prefixes)
        parts_of: list[list[_LinePart]] = []
        for number, src, ids, prefix in zip(
            numbers, block, tokenizer.encode_src(block), forced, strict=True
        ):
            own = self._cut(number, src, ids) if src.strip() else []
            marks = self._warn_of_unknown(number, src) if own else []
            for index, part in enumerate(own):
                forced_here = tuple(prefix) if index == 0 else ()
                source = replace(part.source, prefix=forced_here, seed=self._seed(number, index))
                own[index] = part._replace(source=source, marks=part.marks + marks)
            parts_of.append(own)
        return parts_of

    def _warn_of_unknown(self, number: int, src: str) -> list[str]:
        """Return the mark of a line with characters that the tokenizer did not learn."""
        replaced = "\ufffd"  # whoever read the line has warned of it
        unknown = self.translator.tokenizer.src.unknown(src.replace(replaced, ""))
        if not unknown:
            return []
        shown = ", ".join(map(repr, unknown[:_MAX_SHOWN]))
        shown += ", ..." if len(unknown) > _MAX_SHOWN else "."
        self.warnings.add(
            "with characters that the tokenizer did not learn",
            number,
            f"has characters that the tokenizer did not learn, and the model may not read: {shown}",
        )
        return ["unknown"]

    def _seed(self, number: int, part: int) -> int:
        """Return what decides the sampling of a part of a line, wherever the line stands."""
        text = f"{self.options.seed} {number} {part}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def _cut(self, number: int, src: str, ids: list[int]) -> list[_LinePart]:
        """Cut a line that is too long, as the options say, or warn that it is not cut."""
        limit, policy = self.options.long_lines.max_tokens, self.options.long_lines.policy
        vocabulary = self.translator.tokenizer.src
        if limit is None or len(ids) <= limit:
            self._check_length(number, len(ids))
            words = number_words(vocabulary.pieces_of(ids[:-1]))
            return [_LinePart(EncodedSource(ids, text=src), words, [])]
        if policy == "error":
            raise DataError(
                f"line {number}: must have at most {limit:,} tokens, but has {len(ids):,} "
                "instead; `--on-long split` or `--on-long truncate` takes it."
            )
        if policy == "truncate":
            text = f"has {len(ids):,} tokens; all after the first {limit - 1:,} are left out."
            self.warnings.add("cut off", number, text)
            pieces = vocabulary.pieces(src)[: limit - 1]
            first = EncodedSource([*ids[: limit - 1], ids[-1]], text=vocabulary.text_of(pieces))
            return [_LinePart(first, number_words(pieces), ["truncated"])]
        parts = self._split(src, limit)
        text = f"has {len(ids):,} tokens; translated in {len(parts):,} parts."
        self.warnings.add("translated in parts", number, text)
        return parts

    def _check_length(self, number: int, length: int) -> None:
        learned = self.translator.model.config.max_positions
        if learned is not None and length > learned:
            text = (
                f"has {length:,} tokens, but the model learned {learned:,} positions; the tokens "
                "after them share the last one. `--max-input-tokens` cuts such lines."
            )
            self.warnings.add("longer than those of the training", number, text)
        elif self.profile is not None and length > self.profile.longest_src:
            text = (
                f"has {length:,} tokens, the longest of the training {self.profile.longest_src:,}; "
                "translated whole. `--max-input-tokens` cuts such lines."
            )
            self.warnings.add("longer than those of the training", number, text)

    def _split(self, src: str, limit: int) -> list[_LinePart]:
        """Cut a line at the ends of its sentences, else between words, else between pieces."""
        vocabulary = self.translator.tokenizer.src
        room = limit - 1  # for eos
        begins = (before == " " != here for before, here in pairwise(f" {src}"))
        words = list(accumulate(begins, initial=-1))[1:]  # of each character
        sentences = list(_SENTENCE.finditer(src))
        units: list[list[_LineToken]] = []
        for sentence, pieces in zip(sentences, _encode(vocabulary, sentences, words), strict=True):
            if len(pieces) <= room:
                units.append(pieces)
            else:
                within = list(_WORD.finditer(src, *sentence.span()))
                units += _cut_words(_encode(vocabulary, within, words), room)
        return [
            _LinePart(
                EncodedSource(
                    [*(piece.id for piece in part), vocabulary.eos],
                    text=vocabulary.text_of([piece.text for piece in part]),
                ),
                [piece.word for piece in part],
                ["split"],
            )
            for part in _pack(units, room)
        ]


def _encode(
    vocabulary: Vocabulary, texts: list[re.Match[str]], words: list[int]
) -> list[list[_LineToken]]:
    """Return the pieces of texts out of a line, each of which may begin within a word."""
    stripped = [text[0].rstrip() for text in texts]
    found: list[list[_LineToken]] = []
    for text, line, ids in zip(texts, stripped, vocabulary.encode(stripped), strict=True):
        pieces, first = vocabulary.pieces(line), words[text.start()]
        numbers = [first + word for word in number_words(pieces)]
        found.append([_LineToken(*own) for own in zip(ids, pieces, numbers, strict=True)])
    return found


def _cut_words(words: list[list[_LineToken]], room: int) -> list[list[_LineToken]]:
    """Return the pieces of words as units that fit: words, or runs of pieces of long ones."""
    units = [own[start : start + room] for own in words for start in range(0, len(own), room)]
    return _pack(units, room)


def _pack(units: list[list[_LineToken]], room: int) -> list[list[_LineToken]]:
    """Join neighbours as long as they fit."""
    packed: list[list[_LineToken]] = []
    for unit in units:
        if packed and len(packed[-1]) + len(unit) <= room:
            packed[-1] = packed[-1] + unit
        else:
            packed.append(unit)
    return packed
