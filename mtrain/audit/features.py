"""Features of lines: one fixed-size record for each line. Reads no files.

A block of lines is one array of code points; Python loops over lines only to hash them, and over
characters in rare cases.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.unicode_classes import (
    BLANKS,
    HAS_ZERO_WIDTH_SPACE,
    IS_UNSPACED,
    NUM_KINDS,
    Kind,
    folded,
    kinds,
)

Records = npt.NDArray[np.void]
Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
WordCells = npt.NDArray[np.uint16]  # [2, words]: the line of each word in its block, and its cell


class LineFlag(IntFlag):
    """Properties of a line."""

    UNDECODABLE = 1
    TAB = 2
    BREAK = 4
    CONTROL = 8
    INVISIBLE = 16
    NOT_NFC = 32
    MOJIBAKE = 64
    UNKNOWN_PIECE = 128
    NO_PAIR = 256  # the row could not be read as a pair; both sides are blank in its place


class Feature(IntFlag):
    """Groups of features that `measure` computes together.

    The length in characters and whether a line is blank are always computed.
    """

    NONE = 0
    HASH = 1  # the field `hash`
    KEY = 2  # `LineFeatures.keys`
    CHARACTERS = 4  # solid, odd, script, punctuation, ending; TAB, BREAK, CONTROL, INVISIBLE
    WORDS = 8  # numbers, names; `LineFeatures.words`; with them, `language`
    NFC = 16  # NOT_NFC
    MOJIBAKE = 32  # MOJIBAKE
    ALL = 63


LINE = np.dtype(
    [
        ("hash", np.uint64),  # of the exact text; 0 for a blank line
        ("names", np.uint64),  # a Bloom filter of the words that may be names
        ("numbers", np.uint32),  # a Bloom filter of the runs of digits
        ("chars", np.uint32),
        ("solid", np.uint32),  # characters other than spaces; without CHARACTERS, 1 if any
        ("odd", np.uint32),  # digits, punctuation, symbols and markup among them
        ("tokens", np.uint32),  # with eos; 0 without a tokenizer
        ("flags", np.uint16),  # of `LineFlag`
        ("language", np.float32),  # > 0: like the source side, < 0: like the target side
        ("script", np.uint8),  # of most letters, as a kind; 0 without letters
        ("ending", np.uint8),  # class of the last character
        ("punctuation", np.uint8),  # number of its characters
    ]
)
NUM_ENDINGS = 8
MAX_CHARS = 20_000  # analysed per line; `hash` and `chars` are of the whole line

_ENDINGS = np.zeros(0x10000, np.uint8)  # 0: a letter or a digit, 1: anything else
for _number, _members in enumerate(
    (".。।۔．", "?？؟", "!！", ":：", ",;、，；،؛", "\"'”“»«’’)]）」』"), 2
):
    _ENDINGS[list(map(ord, _members))] = _number

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_POWERS = np.cumprod(np.full(MAX_CHARS + 2, _FACTOR | np.uint64(1), np.uint64), dtype=np.uint64)
_ZERO_WIDTH_SPACE = 0x200B
_STEM_LETTERS = 5  # first letters, by which words of two languages are compared
_MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|&(?:#\d+|[A-Za-z]{2,8});|\{[^{}]*\}|https?://\S+")
# UTF-8 that was read as Latin-1 or as Windows-1252: a lead byte, then continuation bytes.
_TRAIL = "[\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
_MOJIBAKE = re.compile(f"[\u00c2-\u00df]{_TRAIL}|[\u00e0-\u00ef]{_TRAIL}{{2}}|\u00f0{_TRAIL}{{3}}")
_WORD_END = re.compile("[\u00a0¡«»¿‘’“”„‹›…–—•]+")  # may follow a letter such as é in correct text


class PairWindow(NamedTuple):
    """Records of both sides of consecutive pairs, and the number of the first pair, from 0."""

    src: Records
    tgt: Records
    first: int


class LineFeatures(NamedTuple):
    """Records of lines, and features that are not kept in them."""

    lines: Records  # one record each
    keys: Hashes  # hashes without case, punctuation and spaces; 0 where nothing is left
    words: Hashes  # a hash of each word of all lines
    word_lines: Ints  # the line of each word


def measure(lines: Sequence[str], features: Feature = Feature.ALL) -> LineFeatures:
    """Compute `features` of lines without line feeds; the fields of other features are 0."""
    records = np.zeros(len(lines), LINE)
    keys, words = np.zeros(len(lines), np.uint64), np.zeros(0, np.uint64)
    word_lines = np.zeros(0, np.int64)
    records["chars"] = [len(line) for line in lines]
    if Feature.HASH in features:
        records["hash"] = exact_hashes(lines)
    text = "".join(line[:MAX_CHARS] + "\n" for line in lines)
    if Feature.NFC in features and not unicodedata.is_normalized("NFC", text):
        is_not_nfc = [not unicodedata.is_normalized("NFC", line) for line in lines]
        add_flag(records, LineFlag.NOT_NFC, is_not_nfc)
    if Feature.MOJIBAKE in features and ("\ufffd" in text or _MOJIBAKE.search(text)):
        add_flag(records, LineFlag.MOJIBAKE, [is_mojibake(line) for line in lines])
    if features & (Feature.CHARACTERS | Feature.KEY | Feature.WORDS):
        block = _CharacterBlock(text)
        if Feature.CHARACTERS in features:
            _count_characters(records, block)
            for row, line in enumerate(lines):  # letters of tags, entities and addresses are odd
                if "<" in line or "&" in line or "{" in line or "://" in line:
                    for markup in _MARKUP.findall(line[:MAX_CHARS]):
                        records["odd"][row] += sum(map(str.isalpha, markup))
        if Feature.KEY in features:
            keys = _keys(block)
        if Feature.WORDS in features:
            split = _WordBlock(block)
            records["numbers"] = split.bloom_filters(split.is_number, 32)
            records["names"] = split.bloom_filters(split.is_name, 64)
            words, word_lines = split.hashes, split.lines
    if Feature.CHARACTERS not in features:
        records["solid"] = [bool(line[:MAX_CHARS].strip(BLANKS)) for line in lines]
    records["hash"][records["solid"] == 0] = 0
    return LineFeatures(records, keys, words, word_lines)


def exact_hashes(lines: Sequence[str]) -> Hashes:
    """Return 64 bits of BLAKE2 for each line."""
    digests = (hashlib.blake2b(line.encode("utf-8"), digest_size=8).digest() for line in lines)
    return np.frombuffer(b"".join(digests), np.uint64)


def mixed(first: Hashes, second: Hashes) -> Hashes:
    """Return one hash for each pair of hashes; it depends on their order."""
    return _scrambled(first * _FACTOR + _scrambled(second))


def differs_from_previous(values: npt.NDArray[Any]) -> Flags:
    """Return for each value whether it differs from the one before it; the first does."""
    return np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]


def is_mojibake(line: str) -> bool:
    """Return whether the line holds UTF-8 decoded as a one-byte encoding, or U+FFFD."""
    line = line[:MAX_CHARS]
    return "\ufffd" in line or any(
        _is_one_character(match[0]) and not _is_end_of_word(match)
        for match in _MOJIBAKE.finditer(line)
    )


def _is_end_of_word(match: re.Match[str]) -> bool:
    """Return whether a match is rather the last letter of a word, and punctuation or a space.

    As in « été » with no-break spaces, „Spaß“ or «CAFÉ». A capital after a small letter, or before
    one at the start of a word, is no such letter; nor are Â and Ã, as in Ã\xa0 for à.
    """
    first, rest = match[0][0], match[0][1:]
    if first in "ÂÃ" or not _WORD_END.fullmatch(rest):
        return False
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return first.islower() or not (before.islower() or (not before.isalpha() and after.isalpha()))


def _is_one_character(text: str) -> bool:
    """Return whether the characters, encoded in one byte each, are the UTF-8 of one character."""
    encoded = b""
    for character in text:
        try:
            encoded += character.encode("cp1252")
        except UnicodeEncodeError:
            encoded += character.encode("latin-1", errors="replace")
    try:
        return len(encoded.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


def add_flag(records: Records, flag: LineFlag, lines: Sequence[int] | Ints | Flags) -> None:
    """Set a flag of some lines, given as their numbers or as a mask."""
    records["flags"][lines] |= np.uint16(flag)


class _CharacterBlock:
    """The characters of a block of lines, each with its "\\n"."""

    def __init__(self, text: str) -> None:
        self.codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        self.kinds = kinds(self.codes)
        (places,) = np.nonzero(self.codes == _ZERO_WIDTH_SPACE)  # none is last: "\n" is
        is_beside = HAS_ZERO_WIDTH_SPACE[self.kinds[[places - 1, places + 1]]].any(0)
        self.kinds[places[is_beside]] = Kind.SPACE
        self.ends = np.flatnonzero(self.codes == 10)  # of lines
        self.num_lines = len(self.ends)
        self.starts = np.concatenate([[0], self.ends[:-1] + 1])[: self.num_lines]  # of lines
        self.lines = np.repeat(np.arange(self.num_lines), np.diff(self.ends, prepend=-1))


def _count_characters(records: Records, block: _CharacterBlock) -> None:
    """Set the fields and flags that follow from the kinds of the characters."""
    cells = block.lines * NUM_KINDS + block.kinds
    counts = np.bincount(cells, minlength=block.num_lines * NUM_KINDS).reshape(-1, NUM_KINDS)
    solid = counts.sum(1) - counts[:, [Kind.END, Kind.SPACE, Kind.TAB, Kind.BREAK]].sum(1)
    letters = counts[:, Kind.LETTER :]
    records["solid"] = solid
    records["odd"] = solid - letters.sum(1) - counts[:, [Kind.CONTROL, Kind.INVISIBLE]].sum(1)
    records["script"] = np.where(letters.any(1), letters.argmax(1) + int(Kind.LETTER), 0)
    records["punctuation"] = np.minimum(counts[:, Kind.PUNCTUATION], 255)
    for kind, flag in (
        (Kind.TAB, LineFlag.TAB),
        (Kind.BREAK, LineFlag.BREAK),
        (Kind.CONTROL, LineFlag.CONTROL),
        (Kind.INVISIBLE, LineFlag.INVISIBLE),
    ):
        add_flag(records, flag, counts[:, kind] > 0)
    is_solid = (block.kinds > Kind.BREAK) | (block.kinds == Kind.OTHER)
    last = np.maximum.accumulate(np.where(is_solid, np.arange(len(block.codes)), -1))[block.ends]
    last_kinds = block.kinds[last]
    classes = _ENDINGS[np.minimum(block.codes[last], len(_ENDINGS) - 1)]
    is_word = (last_kinds >= Kind.LETTER) | (last_kinds == Kind.DIGIT)
    records["ending"] = np.where((last < block.starts) | is_word, 0, np.maximum(classes, 1))


def _keys(block: _CharacterBlock) -> Hashes:
    """Hash the letters and digits of each line, without their case."""
    places = np.flatnonzero((block.kinds >= Kind.LETTER) | (block.kinds == Kind.DIGIT))
    firsts = np.searchsorted(places, block.starts)
    values = _scrambled(folded(block.codes[places]).astype(np.uint64) + np.uint64(1))
    return _sums(values * _POWERS[np.arange(len(places)) - firsts[block.lines[places]]], firsts)


def _sums(values: Hashes, firsts: Ints) -> Hashes:
    """Sum, modulo 2^64, the values of each group, given where the groups begin."""
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    bounds = np.append(firsts, len(values))
    sums: Hashes = totals[bounds[1:]] - totals[bounds[:-1]]
    return sums


class _WordBlock:
    """The words of a block: runs of letters or digits; in scripts without spaces, each letter."""

    def __init__(self, block: _CharacterBlock) -> None:
        is_digit = block.kinds == Kind.DIGIT
        is_part = (block.kinds >= Kind.LETTER) | is_digit
        group = is_part.astype(np.int8) + is_digit  # 0: none, 1: letters, 2: digits
        is_first = is_part & (group != np.concatenate([[0], group[:-1]]))
        is_first |= IS_UNSPACED[block.kinds]
        places = np.flatnonzero(is_part)
        firsts = np.flatnonzero(is_first[places])
        lengths = np.diff(np.append(firsts, len(places)))
        offsets = np.arange(len(places)) - np.repeat(firsts, lengths)
        codes = folded(block.codes[places])
        values = _scrambled(codes.astype(np.uint64) + np.uint64(1))
        values *= _POWERS[np.minimum(offsets, MAX_CHARS)]
        starts = places[firsts]
        self._num_lines = block.num_lines
        self.lines = block.lines[starts]  # of each word
        self.is_number = is_digit[starts]
        self.hashes = _scrambled(_sums(values, firsts))  # without case
        values[offsets >= _STEM_LETTERS] = 0
        self._stems = _scrambled(_sums(values, firsts))
        is_upper = (block.codes[starts] != codes[firsts]) & (block.codes[starts] != ord("ı"))
        is_initial = differs_from_previous(self.lines)  # capitalised even if it is no name
        self.is_name = ~self.is_number & (lengths >= 3) & is_upper & ~is_initial

    def bloom_filters(self, is_member: Flags, width: int) -> Hashes:
        """Return for each line a Bloom filter of `width` bits of the stems of its member words."""
        filters = np.zeros(self._num_lines, np.uint64)
        shift = np.uint64(64 - width.bit_length() + 1)
        bits = np.uint64(1) << (self._stems[is_member] >> shift)
        np.bitwise_or.at(filters, self.lines[is_member], bits)
        return filters


def _scrambled(values: Hashes) -> Hashes:
    """Spread every bit over all bits (the finaliser of SplitMix64)."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    scrambled: Hashes = values ^ (values >> np.uint64(31))
    return scrambled


_NUM_CELLS = 1 << 16
_MAX_NATS = 3.0  # of one word


def word_cells(side: LineFeatures) -> WordCells:
    """Return the line of each word, and its cell in the tables of a `SideClassifier`."""
    cells = side.words % np.uint64(_NUM_CELLS)
    return np.array([side.word_lines.astype(np.uint16), cells.astype(np.uint16)])


class SideClassifier:
    """Classifies lines as source or target language: naive Bayes over hashed words."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, _NUM_CELLS), np.int64)

    def learn(self, src: WordCells, tgt: WordCells) -> None:
        """Count the words of some pairs."""
        for counts, words in zip(self._counts, (src, tgt), strict=True):
            counts += np.bincount(words[1], minlength=_NUM_CELLS)

    def scores(self, words: WordCells, num_lines: int) -> npt.NDArray[np.float32]:
        """Return the log-odds of the source side for each line, in nats."""
        lines, cells = words
        rates = (self._counts[:, cells] + 1.0) / (self._counts.sum(1, keepdims=True) + 1.0)
        nats = np.clip(np.log(rates[0] / rates[1]), -_MAX_NATS, _MAX_NATS)
        return np.bincount(lines, weights=nats, minlength=num_lines).astype(np.float32)
