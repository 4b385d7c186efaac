"""The rules of the audit, each with its threshold, its advice and the features that it reads.

A rule judges many pairs at a time, by their records alone. A finding is a note if its share of the
pairs is at most `usual_share`, as in clean corpora.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.duplicates import Numbers, Repeats
from mtrain.audit.features import Feature, Flags, LineFlag, PairWindow, Records
from mtrain.audit.unicode_classes import Kind, kind_of

_LONG_CHARS = 1000
_FAR_RATIO = 3.0  # times the corpus's own ratio of lengths
_SLACK_CHARS = 20  # so that short lines may differ more
_RARE_SCRIPT = 0.05  # of the lines of a side, above which a script belongs to it
_SIDE_NATS = 2.0  # log-odds of the other side's language, for each side of a swapped pair
_SWAP_NATS = 8.0  # for both together
_ODD_SHARE = 0.5
_RATIO_STEPS, _NUM_RATIOS = 200, 1000  # histogram of the logarithm of ratios: bins per unit, range
_MIN_SOLID = 8  # characters; shorter lines of digits or punctuation are not listed

Sides = npt.NDArray[np.uint8]
Reasons = list[str | None]  # the names of rules; None for pairs that are kept


class SideName(IntEnum):
    """The sides of a pair that a rule hits."""

    NONE = 0
    SRC = 1
    TGT = 2
    BOTH = 3


class Severity(IntEnum):
    """The severity of a finding."""

    NOTE = 0
    WARNING = 1
    ERROR = 2


class PairBlock(NamedTuple):
    """Consecutive pairs of a corpus."""

    src: Records
    tgt: Records
    same_pair: Numbers  # an earlier pair that is equal, counted from 1; 0 if there is none
    same_src: Numbers  # likewise, an earlier pair with the same source and another target
    is_held: Flags  # whether a side of the pair is in a held-out corpus, by its key or exactly
    is_held_pair: Flags  # whether the exact pair is in one


@dataclass(frozen=True)
class CorpusProfile:
    """Statistics of the training pairs, and the limit of the config."""

    ratios: Sequence[float]  # usual ones of target to source lengths in characters
    src_scripts: Flags  # for each kind of character, whether it is a script of the source side
    tgt_scripts: Flags
    max_tokens: int  # of a training pair


Judge = Callable[[PairBlock, CorpusProfile], Sides]


@dataclass(frozen=True)
class Rule:
    """One kind of problem of a pair."""

    name: str  # of its list, and in JSON
    what: str  # the pairs or lines with the problem
    advice: str  # what to do, in one sentence
    judge: Judge  # returns for each pair the sides with the problem
    features: Feature = Feature.NONE  # that `judge` reads besides lengths and blank lines
    usual_share: float | None = 0.0  # of pairs, up to which it is a note; None: always a note
    severity: Severity = Severity.WARNING  # beyond that share
    refers: Callable[[Repeats], Numbers] | None = None  # returns the repeated pair of each pair
    held_out_advice: str | None = None  # for validation and test text
    training: str = "keeps them"  # what training does with them unless `data.clean` drops them

    def severity_of(self, count: int, total: int) -> Severity:
        """Return the severity of `count` findings among `total` pairs."""
        if self.usual_share is None or count <= self.usual_share * total:
            return Severity.NOTE
        return self.severity


def _sides(src: Flags, tgt: Flags) -> Sides:
    sides: Sides = src * np.uint8(SideName.SRC) + tgt * np.uint8(SideName.TGT)
    return sides


def _on_lines(judge: Callable[[Records], Flags]) -> Judge:
    """Judge each side by itself."""
    return lambda pairs, profile: _sides(judge(pairs.src), judge(pairs.tgt))


def _on_pairs(judge: Callable[[PairBlock, CorpusProfile], Flags]) -> Judge:
    """Judge both sides together."""
    return lambda pairs, profile: judge(pairs, profile) * np.uint8(SideName.BOTH)


def _has(flag: LineFlag) -> Callable[[Records], Flags]:
    return lambda lines: (lines["flags"] & flag) > 0


def _is_whole(pairs: PairBlock | PairWindow) -> Flags:
    """Return which pairs have no blank side."""
    return (pairs.src["solid"] > 0) & (pairs.tgt["solid"] > 0)


def _one_blank(pairs: PairBlock, profile: CorpusProfile) -> Sides:
    src, tgt = pairs.src["solid"] == 0, pairs.tgt["solid"] == 0
    return _sides(src & ~tgt, tgt & ~src)


def _both_blank(pairs: PairBlock, profile: CorpusProfile) -> Flags:
    is_blank = (pairs.src["solid"] == 0) & (pairs.tgt["solid"] == 0)
    both_blank: Flags = is_blank & ~_has(LineFlag.NO_PAIR)(pairs.src)
    return both_blank


def _is_far_in_length(pairs: PairBlock, profile: CorpusProfile) -> Flags:
    is_far = _is_whole(pairs)
    for ratio in profile.ratios:
        expected = pairs.src["chars"] * ratio
        most = expected * _FAR_RATIO + _SLACK_CHARS
        least = (expected - _SLACK_CHARS) / _FAR_RATIO
        is_far &= (pairs.tgt["chars"] > most) | (pairs.tgt["chars"] < least)
    return is_far


def _has_strange_script(pairs: PairBlock, profile: CorpusProfile) -> Sides:
    src, tgt = pairs.src["script"], pairs.tgt["script"]
    is_swapped = _is_swapped(pairs, profile)
    return _sides(
        (src > 0) & ~profile.src_scripts[src] & ~is_swapped,
        (tgt > 0) & ~profile.tgt_scripts[tgt] & ~is_swapped,
    )


def _is_swapped(pairs: PairBlock, profile: CorpusProfile) -> Flags:
    src, tgt = pairs.src["script"], pairs.tgt["script"]
    by_script = ~profile.src_scripts[src] & profile.tgt_scripts[src] & (src > 0)
    by_script &= ~profile.tgt_scripts[tgt] & profile.src_scripts[tgt] & (tgt > 0)
    like_tgt, like_src = -pairs.src["language"], pairs.tgt["language"]
    by_words = (like_tgt > _SIDE_NATS) & (like_src > _SIDE_NATS)
    by_words &= like_tgt + like_src > _SWAP_NATS
    is_swapped: Flags = by_script | by_words
    return is_swapped


SEPARATE = "Take them out of one of the two: text that chooses the weights must not measure them."

RULES = [
    Rule(
        "held-out-pair",
        "pairs that occur in the validation or test text",
        "A model that was trained on its test text scores too high.",
        _on_pairs(lambda pairs, profile: pairs.is_held_pair),
        Feature.HASH,
        usual_share=None,
        held_out_advice=SEPARATE,
    ),
    Rule(
        "held-out",
        "other pairs of which a side occurs in the validation or test text",
        "A model that was trained on its test text scores too high.",
        _on_pairs(lambda pairs, profile: pairs.is_held & ~pairs.is_held_pair),
        Feature.HASH | Feature.KEY,
        usual_share=None,
        held_out_advice=SEPARATE,
    ),
    Rule(
        "not-utf8",
        "lines that are not UTF-8",
        "Unpack the file, or convert it to UTF-8, for example with iconv.",
        _on_lines(_has(LineFlag.UNDECODABLE)),
        severity=Severity.ERROR,
        training="refuses them",
    ),
    Rule("blank-side", "pairs with one blank side", "Translate or delete them.", _one_blank),
    Rule(
        "blank-pair",
        "pairs that are blank on both sides",
        "There is nothing to translate in them.",
        _on_pairs(_both_blank),
        usual_share=None,
        held_out_advice="Nothing to do: a blank line is translated by a blank line.",
    ),
    Rule(
        "copied",
        "pairs with equal sides",
        "Delete those that need a translation: a few teach a model to copy.",
        _on_pairs(
            lambda pairs, profile: (
                (pairs.src["hash"] == pairs.tgt["hash"]) & (pairs.src["script"] > 0)
            )
        ),
        Feature.HASH | Feature.CHARACTERS,
        usual_share=0.01,
    ),
    Rule(
        "repeated-pair",
        "duplicate pairs",
        "Each copy counts as a pair of its own.",
        _on_pairs(lambda pairs, profile: pairs.same_pair > 0),
        Feature.HASH,
        usual_share=0.05,
        refers=lambda repeats: repeats.of_pair,
    ),
    Rule(
        "repeated-source",
        "sources with several targets",
        "Check that both targets are right, and that the lines belong together.",
        _on_pairs(lambda pairs, profile: pairs.same_src > 0),
        Feature.HASH,
        usual_share=0.05,
        refers=lambda repeats: repeats.of_src,
    ),
    Rule(
        "length-ratio",
        "pairs of unlike lengths",
        "Check that the lines belong together, and delete those that do not.",
        _on_pairs(_is_far_in_length),
        usual_share=0.005,
    ),
    Rule(
        "long-line",
        f"lines over {_LONG_CHARS:,} characters",
        "Split them into sentences.",
        _on_lines(lambda lines: lines["chars"] > _LONG_CHARS),
        usual_share=0.01,
        training="keeps what `data.max_tokens` allows",
    ),
    Rule(
        "strange-script",
        "lines in another script",
        "Delete the pairs that are in another language.",
        _has_strange_script,
        Feature.CHARACTERS | Feature.WORDS,
        usual_share=0.005,
    ),
    Rule(
        "swapped",
        "pairs whose sides look swapped",
        "Swap the two lines of each.",
        _on_pairs(_is_swapped),
        Feature.CHARACTERS | Feature.WORDS,
    ),
    Rule(
        "no-words",
        "lines of digits or markup",
        "Delete the pairs or remove the markup: there is no language to learn in them.",
        _on_lines(
            lambda lines: (
                (lines["odd"] > _ODD_SHARE * lines["solid"]) & (lines["solid"] >= _MIN_SOLID)
            )
        ),
        Feature.CHARACTERS,
        usual_share=0.01,
    ),
    Rule(
        "mojibake",
        "lines of mojibake",
        "They were decoded as another encoding than theirs: get them anew, or delete the pairs.",
        _on_lines(
            lambda lines: _has(LineFlag.MOJIBAKE)(lines) & ~_has(LineFlag.UNDECODABLE)(lines)
        ),
        Feature.MOJIBAKE,
    ),
    Rule(
        "line-break",
        "lines with odd line breaks",
        "Other tools break lines there, as at U+2028, VT or a lone CR: replace them by spaces.",
        _on_lines(_has(LineFlag.BREAK)),
        Feature.CHARACTERS,
    ),
    Rule(
        "control",
        "lines with control characters",
        "Delete the characters.",
        _on_lines(_has(LineFlag.CONTROL)),
        Feature.CHARACTERS,
    ),
    Rule(
        "invisible",
        "invisible characters",
        "Delete zero-width spaces, soft hyphens and direction marks that serve no purpose.",
        _on_lines(_has(LineFlag.INVISIBLE)),
        Feature.CHARACTERS,
        usual_share=0.01,
    ),
    Rule(
        "not-nfc",
        "lines not in NFC",
        "Compose all text, also what will be translated: to a model, \u00e9 as one character is "
        "another letter than as two.",
        _on_lines(_has(LineFlag.NOT_NFC)),
        Feature.NFC,
        usual_share=0.001,
    ),
    Rule(
        "tab",
        "lines with a tab",
        "Replace it by a space, and check that no two columns were joined.",
        _on_lines(_has(LineFlag.TAB)),
        Feature.CHARACTERS,
        usual_share=0.01,
    ),
    Rule(
        "unknown-piece",
        "lines with unknown characters",
        "The tokenizer lacks them: set `tokenizer.byte_fallback: true` and tokenize anew.",
        _on_lines(_has(LineFlag.UNKNOWN_PIECE)),
    ),
    Rule(
        "max-tokens",
        "pairs over `data.max_tokens`",
        "Split them, or raise `data.max_tokens`.",
        _on_pairs(
            lambda pairs, profile: (
                np.maximum(pairs.src["tokens"], pairs.tgt["tokens"]) > profile.max_tokens
            )
        ),
        usual_share=0.01,
        held_out_advice="Split them, or raise `data.max_tokens`: training sees none as long.",
    ),
]


def dropping_rules(clean: Iterable[str]) -> list[Rule]:
    """Return the rules of `data.clean` and "max-tokens", in the order in which they apply."""
    names = {*clean, "max-tokens"}
    if "blank-side" in names:
        names.add("blank-pair")
    if "held-out" in names:
        names.add("held-out-pair")
    return [rule for rule in RULES if rule.name in names]


def drop_reasons(dropping: Sequence[Rule], pairs: PairBlock, profile: CorpusProfile) -> Reasons:
    """Return for each pair the first rule that drops it; None if it is kept."""
    names: Reasons = [None] * len(pairs.src)
    for rule in reversed(dropping):
        for row in np.flatnonzero(rule.judge(pairs, profile)).tolist():
            names[row] = rule.name
    return names


def learn(windows: Iterator[PairWindow], max_tokens: int, is_bidirectional: bool) -> CorpusProfile:
    """Return the statistics of the given pairs.

    If a corpus is among them in both directions, lengths and scripts of either direction are usual.
    """
    ratios = np.zeros(2 * _NUM_RATIOS + 1, np.int64)
    scripts = np.zeros((2, 256), np.int64)
    for window in windows:
        is_whole = _is_whole(window)
        ratio = np.log(window.tgt["chars"][is_whole] / window.src["chars"][is_whole])
        ratio = np.abs(ratio) if is_bidirectional else ratio
        cells = np.clip((ratio * _RATIO_STEPS).round(), -_NUM_RATIOS, _NUM_RATIOS) + _NUM_RATIOS
        ratios += np.bincount(cells.astype(np.int64), minlength=len(ratios))
        for counts, side in zip(scripts, (window.src, window.tgt), strict=True):
            counts += np.bincount(side["script"], minlength=256)
    middle = int(np.searchsorted(np.cumsum(ratios), ratios.sum() / 2))
    median = float(np.exp((middle - _NUM_RATIOS) / _RATIO_STEPS)) if ratios.any() else 1.0
    scripts[:, int(Kind.OTHER)] = 0
    usual = scripts > _RARE_SCRIPT * scripts.sum(1, keepdims=True)
    usual[~scripts.any(1)] = True  # of a side without letters, no script is strange
    japanese = [kind_of("CJK"), kind_of("KATAKANA")]  # are written with HIRAGANA
    usual[:, japanese] |= usual[:, [kind_of("HIRAGANA")]]
    if is_bidirectional:
        usual |= usual[::-1].copy()
    usual_ratios = [median, 1 / median] if is_bidirectional else [median]
    return CorpusProfile(usual_ratios, usual[0], usual[1], max_tokens)
