"""Lines to lines, block by block: one line out for every line in, in order, whatever it holds."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple

from mtrain.corpus import Profile
from mtrain.errors import DataError
from mtrain.output import (
    NOTHING,
    Line,
    Link,
    Translation,
    align_words,
    find_flaws,
    join,
    number_words,
)
from mtrain.search import Hypothesis
from mtrain.tokenizer import Vocabulary
from mtrain.translate import Source, Translator

Warn = Callable[[str], None]

BLOCK_LINES = 2048  # lines that are sorted by length and translated together, at most
_MAX_WARNINGS = 5  # of a kind; the others are counted
_SENTENCE = re.compile(
    r"\S.*?(?:(?<=[.!?\u2026])[\"'\u201d\u2019)\]\u00bb]*\s+|(?<=[\u3002\uff01\uff1f])|\Z)",
    re.DOTALL,
)


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
    """

    long_lines: LongLines = LongLines()
    with_alignment: bool = False
    seed: int = 1


class Warnings:
    """Warnings about lines: the first of each kind, and in the end how many more there were."""

    def __init__(self, warn: Warn) -> None:
        self._warn, self._counts = warn, Counter[str]()

    def add(self, kind: str, number: int, text: str) -> None:
        """Warn of a line, unless the kind was often warned of."""
        self._counts[kind] += 1
        if self._counts[kind] <= _MAX_WARNINGS:
            self._warn(f"line {number}: {text}")

    def close(self) -> None:
        """Say how many lines there were that nobody was warned of."""
        for kind, count in self._counts.items():
            if count > _MAX_WARNINGS:
                self._warn(f"{count - _MAX_WARNINGS:,} more lines: {kind}.")


_FLAWS = {
    "empty": "is empty",
    "copy": "is the line itself",
    "loop": "repeats itself",
    "length": "is far longer or shorter than those of the training",
    "limit": "reached its limit and may be cut off",
}


class _Part(NamedTuple):
    """A part of a line that is translated on its own."""

    source: Source
    marks: list[str]


class _Cut(NamedTuple):
    """The pieces of a line's parts, and what was done to it."""

    parts: list[list[int]]
    marks: list[str]


class Stream:
    """Translates blocks of lines, and warns of what it notices."""

    def __init__(
        self,
        translator: Translator,
        options: Options,
        profile: Profile | None,
        warn: Warn,
    ) -> None:
        self.translator, self.options, self.profile = translator, options, profile
        self.warnings = Warnings(warn)
        self._num_lines = 0

    def translate(
        self, blocks: Iterable[list[str]], prefixes: Iterator[str] | None = None
    ) -> Iterator[Line]:
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
                    f"--prefix must have a line for each line of the input, but ends at line "
                    f"{self._num_lines + len(own):,}."
                )
            yield from self._translate_block(block, own)
            self._num_lines += len(block)
        self.warnings.close()

    def _translate_block(self, block: list[str], prefixes: list[str]) -> Iterator[Line]:
        numbers = range(self._num_lines + 1, self._num_lines + len(block) + 1)
        parts_of = self._parts(numbers, block, prefixes)
        found = iter(self._translations([part.source for own in parts_of for part in own]))
        for number, src, own in zip(numbers, block, parts_of, strict=True):
            ranks = zip(*islice(found, len(own)), strict=False)  # the best of each part, and so on
            num_words = [self._num_words(part) for part in own] if len(own) > 1 else []
            best = [self._checked(src, own, join(parts, num_words)) for parts in ranks]
            if best:
                self._warn_of(number, best[0])
            yield Line(number, src, best or [NOTHING])

    def _translations(self, sources: list[Source]) -> list[list[Translation]]:
        """Return the best translations of each source."""
        tgt = self.translator.tokenizer.tgt
        found = self.translator.search(sources)
        owners = [source for source, own in zip(sources, found, strict=True) for _ in own]
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
                ["limit"] if len(hypothesis.ids) >= self.translator.max_length(source) else [],
            )
            for text, source, hypothesis, links in zip(texts, owners, flat, alignments, strict=True)
        )
        return [list(islice(translations, len(own))) for own in found]

    def _align(self, sources: list[Source], found: list[Hypothesis]) -> Sequence[list[Link] | None]:
        """Link the words of each translation to those of its source, if anybody asked."""
        if not self.options.with_alignment:
            return [None] * len(sources)
        tokenizer = self.translator.tokenizer
        weights = self.translator.attend(sources, [hypothesis.ids for hypothesis in found])
        return [
            align_words(
                own_TS,
                tokenizer.src.pieces_of(source.ids[:-1]),
                tokenizer.tgt.pieces_of(hypothesis.ids),
            )
            for own_TS, source, hypothesis in zip(weights, sources, found, strict=True)
        ]

    def _checked(self, src: str, parts: Sequence[_Part], translation: Translation) -> Translation:
        """Mark what looks wrong about the translation of a line."""
        src_ids = [piece for part in parts for piece in part.source.ids[:-1]]
        flaws = find_flaws(src, translation.text, src_ids, translation.pieces[:-1], self.profile)
        marks = {mark for part in parts for mark in part.marks}
        return replace(translation, flags=sorted({*marks, *translation.flags, *flaws}))

    def _warn_of(self, number: int, translation: Translation) -> None:
        flaws = [words for flag, words in _FLAWS.items() if flag in translation.flags]
        if flaws:
            text = f"the translation {', and '.join(flaws)}"
            self.warnings.add(text, number, f"{text}.")

    def _parts(
        self, numbers: Iterable[int], block: list[str], prefixes: list[str]
    ) -> list[list[_Part]]:
        """Encode each line as the parts that are translated; a blank line has none."""
        tokenizer = self.translator.tokenizer
        forced = tokenizer.tgt.encode(prefixes)
        parts_of: list[list[_Part]] = []
        for number, src, ids, prefix in zip(
            numbers, block, tokenizer.encode_src(block), forced, strict=True
        ):
            cut = self._cut(number, src, ids) if src.strip() else _Cut([], [])
            parts_of.append(
                [
                    _Part(
                        Source(own, tuple(prefix) if index == 0 else (), self._seed(number, index)),
                        cut.marks,
                    )
                    for index, own in enumerate(cut.parts)
                ]
            )
        return parts_of

    def _num_words(self, part: _Part) -> int:
        pieces = self.translator.tokenizer.src.pieces_of(part.source.ids[:-1])
        return len(set(number_words(pieces)))

    def _seed(self, number: int, part: int) -> int:
        """Return what decides the sampling of a part of a line, wherever the line stands."""
        text = f"{self.options.seed} {number} {part}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def _cut(self, number: int, src: str, ids: list[int]) -> _Cut:
        """Cut a line that is too long, as the options say, or warn that it is not cut."""
        limit, policy = self.options.long_lines.max_tokens, self.options.long_lines.policy
        if limit is None or len(ids) <= limit:
            self._check_length(number, len(ids))
            return _Cut([ids], [])
        if policy == "error":
            raise DataError(
                f"line {number}: must have at most {limit:,} tokens, but has {len(ids):,} "
                "instead; `--on-long split` or `--on-long truncate` takes it."
            )
        if policy == "truncate":
            text = f"has {len(ids):,} tokens; all after the first {limit - 1:,} are left out."
            self.warnings.add("cut off", number, text)
            return _Cut([[*ids[: limit - 1], ids[-1]]], ["truncated"])
        parts = self._split(src, limit)
        text = f"has {len(ids):,} tokens; translated in {len(parts):,} parts."
        self.warnings.add("translated in parts", number, text)
        return _Cut(parts, ["split"])

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

    def _split(self, src: str, limit: int) -> list[list[int]]:
        """Cut a line at the ends of its sentences, else between words, else between pieces."""
        tokenizer = self.translator.tokenizer
        room = limit - 1  # for eos
        units: list[list[int]] = []
        sentences = [text.rstrip() for text in _SENTENCE.findall(src)]
        for sentence, ids in zip(sentences, tokenizer.src.encode(sentences), strict=True):
            units += [ids] if len(ids) <= room else _cut_words(tokenizer.src, sentence, room)
        return [[*part, tokenizer.src.eos] for part in _pack(units, room)]


def _cut_words(vocabulary: Vocabulary, sentence: str, room: int) -> list[list[int]]:
    """Return the pieces of a sentence as units that fit: words, or runs of pieces of long ones."""
    words = vocabulary.encode(sentence.split())
    units = [ids[start : start + room] for ids in words for start in range(0, len(ids), room)]
    return _pack(units, room)


def _pack(units: list[list[int]], room: int) -> list[list[int]]:
    """Join neighbours as long as they fit."""
    packed: list[list[int]] = []
    for unit in units:
        if packed and len(packed[-1]) + len(unit) <= room:
            packed[-1] = packed[-1] + unit
        else:
            packed.append(unit)
    return packed
