"""Translate lines block by block: exactly one line of output for each line of input, in order.

Validation, `mtrain eval`, `mtrain translate` and `Model.translate` all translate through it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

from torch import Tensor

from mtrain.corpus.length_stats import CorpusStats
from mtrain.decode.beam import Hypothesis
from mtrain.decode.formats import (
    NOTHING,
    TranslatedLine,
    Translation,
    align_words,
    find_flags,
    is_loop,
    join,
    number_words,
)
from mtrain.decode.mbr import by_agreement
from mtrain.decode.options import DecodingOptions
from mtrain.decode.rerank import rerank
from mtrain.decode.shared_search import NO_LIMITS, PendingSearch, SearchLimits
from mtrain.decode.split_long import LinePart, count_whole, split_line
from mtrain.decode.translator import EncodedSource, Translator
from mtrain.errors import ConfigError, DataError
from mtrain.io.lines import LineWarnings, ignore
from mtrain.io.text_width import count
from mtrain.runtime.process_group import ProcessGroup
from mtrain.tokenizer.sentencepiece import Tokenizer

Warn = Callable[[str], None]
_Block = tuple[list[str], list[str] | None]  # lines, and the prefixes of their translations

BLOCK_LINES = 2048  # lines that are sorted by length and translated together, at most
_ALIGNED_AT_ONCE = 256  # translations, whose attention is in memory
_MAX_SHOWN = 5  # unknown characters that a warning lists
_RETRY_NGRAM = 3  # a target without a repeated 3-gram is never a loop
_FLAG_TEXTS = {
    "empty": "is empty",
    "copy": "is a copy of the line",
    "loop": "repeats itself",
    "length": "is very short or very long",
    "limit": "reached the length limit and may be cut off",
}


class SearchEngine(Protocol):
    """The interface of engines that search targets of encoded sources, such as `Translator`."""

    tokenizer: Tokenizer
    options: DecodingOptions
    process_group: ProcessGroup
    limits: SearchLimits
    reverse: Translator | None

    @property
    def max_positions(self) -> int | None:
        """The number of learned positions; None if positions are sinusoids."""

    def with_options(
        self, options: DecodingOptions, limits: SearchLimits = NO_LIMITS
    ) -> SearchEngine:
        """Return this engine with other options and limits."""

    def start_search(self, sources: Sequence[EncodedSource]) -> PendingSearch:
        """Begin to search for the best targets of each source."""

    def attend(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[Tensor]:
        """Return the cross-attention weights of given targets, each [T, S]."""


def search(
    engine: SearchEngine, sources: Sequence[EncodedSource], pending: PendingSearch
) -> tuple[list[list[Hypothesis]], set[int]]:
    """Return the best targets of each source, and the rows that were searched again.

    `pending` is the search of these sources, which was started before.

    With `retry_flagged`, a source whose best target, except empty ones, repeats itself is searched
    again so that no n-gram of order `_RETRY_NGRAM` occurs twice. If the new best target repeats
    itself, too, as a prefix can, the source keeps its old targets.
    """
    best_of, options = pending.result(), engine.options
    cannot_loop = 0 < options.no_repeat_ngram <= _RETRY_NGRAM
    if not options.retry_flagged or options.sampling is not None or cannot_loop:
        return best_of, set()
    rows = [row for row, best in enumerate(best_of) if best and _repeats(sources[row], best)]
    if not rows:
        return best_of, set()
    retrying = copy.copy(engine)
    retrying.options = replace(options, no_repeat_ngram=_RETRY_NGRAM)
    retried = retrying.start_search([sources[row] for row in rows])
    improved = {
        row: best
        for row, best in zip(rows, retried.result(), strict=True)
        if best and not _repeats(sources[row], best)
    }
    return [improved.get(row, best) for row, best in enumerate(best_of)], {*improved}


def _repeats(source: EncodedSource, best: list[Hypothesis]) -> bool:
    """Return whether the best target of a source that is not empty repeats itself."""
    target = next((hypothesis.ids for hypothesis in best if hypothesis.ids), [])
    return is_loop(source.ids[:-1], target)


def _flaws(part: LinePart, translation: Translation) -> tuple[bool, bool]:
    """Return whether a translation is empty, and whether it repeats itself."""
    target = translation.tokens[:-1]
    return not target, is_loop(part.source.ids[:-1], target)


class _StartedBlock(NamedTuple):
    """Lines whose translations are being searched for."""

    first: int  # the number of the first line
    lines: list[str]
    parts_of: list[list[LinePart]]
    pending: PendingSearch


class LineTranslator:
    """Translates blocks of lines, and flags translations that look wrong.

    Args:
        translator: the engine; its options apply.
        stats: length statistics of the training corpus, if they are known.
        warn: is called with warnings about lines, on the first rank only.
        num_before: the number of lines before the first one that is translated.

    Raises:
        ConfigError: for a `rerank_weight` without a model of the other direction.
    """

    def __init__(
        self,
        translator: SearchEngine,
        stats: CorpusStats | None = None,
        warn: Warn = ignore,
        num_before: int = 0,
    ) -> None:
        self.translator, self.options, self.stats = translator, translator.options, stats
        if self.options.rerank_weight is not None and translator.reverse is None:
            raise ConfigError(
                "`rerank_weight` must be None without a run of the other direction, but is "
                f"{self.options.rerank_weight} instead."
            )
        if self.options.num_candidates > self.options.num_best:
            search_options = replace(self.options, num_best=self.options.num_candidates)
            self.translator = translator.with_options(search_options, translator.limits)
        self.warnings = LineWarnings(warn if translator.process_group.is_first else ignore)
        self._num_lines = num_before

    def translate(
        self, blocks: Iterable[list[str]], prefixes: Iterator[str] | None = None
    ) -> Generator[TranslatedLine, None, None]:
        """Yield each line with its translations, as soon as its block is done.

        One block is read ahead, and searched while the lines before it are written. All ranks
        yield the same; only the first one reads the arguments.

        Args:
            blocks: the lines; possibly without end. An empty block is a flush: all
                lines before it are yielded before the next block is read.
            prefixes: what the translation of each line must begin with.

        Raises:
            DataError: if a line is too long and may not be cut, or prefixes and lines differ in
                number.
        """
        started = self._started(self._broadcast(self._with_prefixes(blocks, prefixes)))
        current: _StartedBlock | None = None
        following: _StartedBlock | None = None
        is_last, error = False, None
        try:
            while not is_last:
                try:
                    following = next(started)
                except StopIteration:
                    is_last = True
                except DataError as caught:  # raised once the lines before it are yielded
                    is_last, error = True, caught
                if current is not None:
                    yield from self._finished(current)
                current, following = following, None
        finally:
            for block in (current, following):
                if block is not None:
                    block.pending.cancel()
        if error is not None:
            raise error
        self.warnings.close()

    def _started(self, blocks: Iterable[_Block]) -> Iterator[_StartedBlock]:
        """Encode each block, and begin its search."""
        for lines, prefixes in blocks:
            first = self._num_lines + 1
            parts_of = self._parts(range(first, first + len(lines)), lines, prefixes)
            self._num_lines += len(lines)
            sources = [part.source for parts in parts_of for part in parts]
            pending = self.translator.start_search(sources)
            yield _StartedBlock(first, lines, parts_of, pending)

    def _with_prefixes(
        self, blocks: Iterable[list[str]], prefixes: Iterator[str] | None
    ) -> Iterator[_Block]:
        for lines in blocks:
            line_prefixes = None if prefixes is None else list(islice(prefixes, len(lines)))
            if line_prefixes is not None and len(line_prefixes) < len(lines):
                raise DataError(
                    f"`--prefix` must have a line for each line of the input, but ends at line "
                    f"{self._num_lines + len(line_prefixes):,}."
                )
            yield lines, line_prefixes
        if prefixes is not None and next(prefixes, None) is not None:
            raise DataError(
                "`--prefix` must have a line for each line of the input, but goes on after line "
                f"{self._num_lines:,}."
            )

    def _broadcast(self, blocks: Iterator[_Block]) -> Iterator[_Block]:
        """Yield the blocks of the first rank on all ranks; an empty message ends them."""
        process_group = self.translator.process_group
        if process_group.size == 1:
            yield from blocks
        elif process_group.is_first:
            try:
                for block in blocks:
                    process_group.broadcast_bytes(json.dumps(block).encode())
                    yield block
            except DataError:  # raised here once all ranks have yielded the lines before it
                process_group.broadcast_bytes(b"")
                raise
            process_group.broadcast_bytes(b"")
        else:
            while message := process_group.broadcast_bytes(b""):
                lines, line_prefixes = json.loads(message)
                yield lines, line_prefixes

    def _finished(self, block: _StartedBlock) -> Iterator[TranslatedLine]:
        """Wait for the search of a block, and yield its lines."""
        all_parts = [part for parts in block.parts_of for part in parts]
        best_of_parts = iter(self._translate_parts(all_parts, block.pending))
        of_lines = zip(block.lines, block.parts_of, strict=True)
        for number, (src, parts) in enumerate(of_lines, block.first):
            # the best translations of all parts, then the second best, and so on
            ranked = zip(*islice(best_of_parts, len(parts)), strict=False)
            best = [self._flagged(src, parts, join(of_parts)) for of_parts in ranked]
            if best:
                texts = [text for flag, text in _FLAG_TEXTS.items() if flag in best[0].flags]
                if texts:
                    text = f"the translation {', and '.join(texts)}"
                    length = self._describe_length(parts, best[0])
                    warning = text.replace(_FLAG_TEXTS["length"], length)
                    self.warnings.add(text, number, f"{warning}.")
            yield TranslatedLine(number, src, best or [NOTHING])

    def _describe_length(self, parts: list[LinePart], best: Translation) -> str:
        """Format whether a translation is short or long, and the token counts of both sides."""
        num_src, num_tgt = (len(side) + 1 for side in _without_eos(parts, best))  # with one eos
        is_short = self.stats is not None and num_tgt < self.stats.most_ratio * num_src
        return (
            f"is very {'short' if is_short else 'long'}: {count(num_tgt, 'token')} for {num_src:,}"
        )

    def _translate_parts(
        self, parts: list[LinePart], pending: PendingSearch
    ) -> list[list[Translation]]:
        """Return the best translations of each part, whose search was started."""
        tgt, max_extra_tokens = self.translator.tokenizer.tgt, self.options.max_extra_tokens
        sources = [part.source for part in parts]
        best_of, retried = search(self.translator, sources, pending)
        texts = iter(tgt.decode([hypothesis.ids for best in best_of for hypothesis in best]))
        ranked_of = [
            [
                Translation(
                    next(texts),
                    tuple(tgt.pieces_of([*hypothesis.ids, tgt.eos])),
                    tuple(hypothesis.log_probs),
                    hypothesis.log_prob,
                    hypothesis.score,
                    None,
                    ("limit",) * (len(hypothesis.ids) >= source.max_length(max_extra_tokens))
                    + ("retried",) * (row in retried),
                )
                for hypothesis in best
            ]
            for row, (source, best) in enumerate(zip(sources, best_of, strict=True))
        ]
        ranked_of = self._reordered(parts, ranked_of)
        ranked_of = [ranked[: self.options.num_best] for ranked in ranked_of]
        return self._aligned(parts, ranked_of) if self.options.with_alignment else ranked_of

    def _reordered(
        self, parts: list[LinePart], ranked_of: list[list[Translation]]
    ) -> list[list[Translation]]:
        """Return the translations of each part, ranked by `rerank_weight` and `mbr` if set."""
        options, reverse = self.options, self.translator.reverse
        if options.mbr is None and options.rerank_weight is None:
            return ranked_of
        are_samples = options.sampling is not None
        if options.rerank_weight is not None and reverse is not None:
            texts = [part.source.text or "" for part in parts]
            ranked_of = rerank(
                reverse, texts, ranked_of, options.rerank_weight, options.length_alpha
            )
        if options.mbr is not None:
            agreed_of = []
            for ranked in ranked_of:
                self.translator.limits.seconds_left()
                agreed_of.append(by_agreement(ranked, options.mbr, are_samples))
            ranked_of = agreed_of
        if not options.retry_flagged or are_samples:
            return ranked_of
        return [
            sorted(ranked, key=partial(_flaws, part))
            for part, ranked in zip(parts, ranked_of, strict=True)
        ]

    def _aligned(
        self, parts: list[LinePart], ranked_of: list[list[Translation]]
    ) -> list[list[Translation]]:
        """Link the words of each translation to those of its line, some translations at a time."""
        tgt = self.translator.tokenizer.tgt
        entries = [
            (part, translation)
            for part, ranked in zip(parts, ranked_of, strict=True)
            for translation in ranked
        ]
        aligned: list[Translation] = []
        for first in range(0, len(entries), _ALIGNED_AT_ONCE):
            block = entries[first : first + _ALIGNED_AT_ONCE]
            targets = [tgt.ids_of(translation.tokens[:-1]) for _, translation in block]
            weights = self.translator.attend([part.source for part, _ in block], targets)
            for (part, translation), ids, weights_TS in zip(block, targets, weights, strict=True):
                links = align_words(weights_TS, part.words, tgt.decoded_pieces_of(ids))
                aligned.append(replace(translation, alignment=tuple(links)))
        iterator = iter(aligned)
        return [list(islice(iterator, len(ranked))) for ranked in ranked_of]

    def _flagged(
        self, src: str, parts: Sequence[LinePart], translation: Translation
    ) -> Translation:
        """Return the translation of a line with the flags of its likely problems."""
        src_ids, tgt_pieces = _without_eos(parts, translation)
        flags = find_flags(src, translation.text, src_ids, tgt_pieces, self.stats)
        of_parts = (flag for part in parts for flag in part.flags)
        all_flags = tuple(sorted({*of_parts, *translation.flags, *flags}))
        return replace(translation, flags=all_flags) if all_flags else translation

    def _parts(
        self, numbers: Iterable[int], lines: list[str], prefixes: list[str] | None
    ) -> list[list[LinePart]]:
        """Encode each line as the parts that are translated; a blank line has none."""
        tokenizer = self.translator.tokenizer
        starts = prefixes or [""] * len(lines)
        prefix_ids = tokenizer.tgt.encode(starts)
        parts_of: list[list[LinePart]] = []
        for number, src, ids, start, prefix in zip(
            numbers, lines, tokenizer.encode_src(lines), starts, prefix_ids, strict=True
        ):
            parts = self._cut(number, src, ids) if src.strip() else []
            flags = self._flag_unknown(number, src) if parts else []
            for index, part in enumerate(parts):
                part.flags.extend(flags)
                if index == 0 and tokenizer.tgt.unk in prefix:
                    self._warn_of_prefix(number, start)
                if index == 0 and prefix:
                    parts[0] = part._replace(source=replace(part.source, prefix=tuple(prefix)))
                if self.options.sampling is not None:
                    # samples depend on the seed, the line number and the part only
                    text = f"{self.options.seed} {number} {index}"
                    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                    source = replace(parts[index].source, seed=int.from_bytes(digest, "big"))
                    parts[index] = part._replace(source=source)
            parts_of.append(parts)
        return parts_of

    def _warn_of_prefix(self, number: int, prefix: str) -> None:
        """Warn of a prefix with characters that the model cannot write."""
        text = "a prefix with characters that the tokenizer did not learn"
        unknown = _listed(self.translator.tokenizer.tgt.unknown(prefix))
        warning = f"has {text}; the translation has \u2047 in place of them: {unknown}"
        self.warnings.add(f"with {text}", number, warning)

    def _flag_unknown(self, number: int, src: str) -> list[str]:
        """Flag, and warn of, a line with characters that are not in the vocabulary."""
        unknown = self.translator.tokenizer.src.unknown(src)
        named = [character for character in unknown if character != "\ufffd"]
        if named:  # U+FFFD stands for invalid bytes, of which the reader has warned
            text = "characters that the tokenizer did not learn"
            warning = f"has {text}, and the model may not read: {_listed(named)}"
            self.warnings.add(f"with {text}", number, warning)
        return ["unknown"] if unknown else []

    def _cut(self, number: int, src: str, ids: list[int]) -> list[LinePart]:
        """Return the parts of a line, cut by `on_long` if it is too long; warn of its length."""
        limit, vocabulary = self.options.max_input_tokens, self.translator.tokenizer.src
        if limit is None or len(ids) <= limit:
            self._check_length(number, len(ids))
            with_words = self.options.with_alignment
            words = number_words(vocabulary.pieces(src)) if with_words else []
            return [LinePart(EncodedSource(ids, text=src), words, [])]
        if self.options.on_long == "error":
            raise DataError(
                f"line {number}: must have at most {limit:,} tokens, but has {len(ids):,} "
                "instead; `--on-long split` or `--on-long truncate` takes it."
            )
        if self.options.on_long == "truncate":
            pieces = vocabulary.pieces(src)
            kept = count_whole(pieces, limit - 1)
            text = f"has {len(ids):,} tokens; all after the first {kept:,} are dropped."
            self.warnings.add("cut off", number, text)
            pieces = pieces[:kept]
            source = EncodedSource([*ids[:kept], ids[-1]], text=vocabulary.text_of(pieces))
            return [LinePart(source, number_words(pieces), ["truncated"])]
        parts = split_line(src, vocabulary, limit)
        text = f"has {len(ids):,} tokens; translated in {len(parts):,} parts."
        self.warnings.add("translated in parts", number, text)
        return parts

    def _check_length(self, number: int, length: int) -> None:
        learned = self.translator.max_positions
        if learned is not None and length > learned:
            text = (
                f"has {length:,} tokens, but the model learned {learned:,} positions; the tokens "
                "after them share the last one. `mtrain translate --max-input-tokens` cuts such "
                "lines."
            )
            self.warnings.add("longer than those of the training", number, text)
        elif self.stats is not None and length > self.stats.longest_src:
            text = (
                f"has {length:,} tokens, the longest of the training {self.stats.longest_src:,}; "
                "translated whole. `mtrain translate --max-input-tokens` cuts such lines."
            )
            self.warnings.add("longer than those of the training", number, text)


def _without_eos(
    parts: Sequence[LinePart], translation: Translation
) -> tuple[list[int], list[str]]:
    """Return the source ids and target pieces of a line, without the eos of each part."""
    src_ids = [token for part in parts for token in part.source.ids[:-1]]
    eos = translation.tokens[-1:]
    return src_ids, [piece for piece in translation.tokens if piece not in eos]


def _listed(characters: Sequence[str]) -> str:
    """Format the first characters of a list for the end of a warning."""
    shown = ", ".join(map(repr, characters[:_MAX_SHOWN]))
    return shown + (", ..." if len(characters) > _MAX_SHOWN else ".")


def translate_lines(
    translator: SearchEngine,
    lines: Iterable[str],
    stats: CorpusStats | None = None,
    warn: Warn = ignore,
    block_lines: int = BLOCK_LINES,
) -> list[str]:
    """Return the best translation of each line; a blank line gives an empty one.

    Args:
        translator, stats, warn: as in `LineTranslator`.
        lines: the text, translated as by `mtrain translate`.
        block_lines: lines that are sorted by length and translated together.
    """
    iterator = iter(lines)
    blocks = iter(lambda: list(islice(iterator, block_lines)), [])
    line_translator = LineTranslator(translator, stats, warn)
    return [line.best[0].text for line in line_translator.translate(blocks)]
