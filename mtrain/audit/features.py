"""What lines are like, in numbers: one fixed-size record for each. Knows no files and no pairs.

A block of lines is one array of code points, so that nothing here is a loop over lines or
characters but for hashing and what is rare.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit.unicode_classes import CHARACTERS, IS_UNSPACED, NUM_KINDS, Kind

Records = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


class LineFlag(IntFlag):
    """What is true of a line."""

    UNDECODABLE = 1
    BLANK = 2
    TAB = 4
    BREAK = 8
    CONTROL = 16
    INVISIBLE = 32
    NOT_NFC = 64
    MOJIBAKE = 128
    UNKNOWN_PIECE = 256
    NO_PAIR = 512  # its row is none, and it stands for it


LINE = np.dtype(
    [
        ("hash", np.uint64),  # of the text as it stands
        ("names", np.uint64),  # a bit for each word that may be written alike in both languages
        ("numbers", np.uint32),  # a bit for each run of digits
        ("chars", np.uint32),
        ("solid", np.uint32),  # characters that are no spaces
        ("odd", np.uint32),  # digits, punctuation, symbols and markup among them
        ("tokens", np.uint32),  # with eos; 0 without a tokenizer
        ("marks", np.uint16),
        ("language", np.float32),  # above 0: like the source side, below: like the target side
        ("script", np.uint8),  # of most letters, as a kind; 0 if there are none
        ("ending", np.uint8),  # what the line ends with
        ("points", np.uint8),  # punctuation marks
    ]
)
NUM_ENDINGS = 8
MAX_CHARS = 20_000  # of a line that are looked at; its hash and its length are of the whole line

_ENDINGS = np.zeros(0x3100, np.uint8)  # 0: a letter or a digit, 1: anything else
for _number, _members in enumerate(
    (".。।۔．", "?？؟", "!！", ":：", ",;、，；،؛", "\"'”“»«’’)]）」』"), 2
):
    _ENDINGS[[ord(_member) for _member in _members if ord(_member) < 0x3100]] = _number

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_POWERS = np.cumprod(np.full(MAX_CHARS + 2, _FACTOR | np.uint64(1), np.uint64), dtype=np.uint64)
_NAME_LETTERS = 5  # by which words of two languages are compared
_MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|&(?:#\d+|[A-Za-z]{2,8});|\{[^{}]*\}|https?://\S+")
# UTF-8 that was read as Latin-1 or as Windows-1252: a lead byte, then the bytes that follow it.
_TRAIL = "[\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
_MOJIBAKE = re.compile(f"[\u00c2-\u00df]{_TRAIL}|[\u00e0-\u00ef]{_TRAIL}{{2}}|\u00f0{_TRAIL}{{3}}")


class Measured(NamedTuple):
    """Records of lines, with what is needed only while the lines are at hand.

    Attributes:
        lines: one record each.
        keys: hashes without case, punctuation and spaces; 0 if nothing is left.
        words: a hash of each word of all the lines.
        word_lines: the line that each word stands in.
    """

    lines: Records
    keys: Hashes
    words: Hashes
    word_lines: Ints


def measure(lines: Sequence[str]) -> Measured:
    """Return a record for each line; no line may hold a line feed."""
    records = np.zeros(len(lines), LINE)
    records["hash"] = exact_hashes(lines)
    records["chars"] = [len(line) for line in lines]
    text = "".join(line[:MAX_CHARS] + "\n" for line in lines)
    if not unicodedata.is_normalized("NFC", text):
        add_mark(records, LineFlag.NOT_NFC, _not_normalized(lines))
    if _MOJIBAKE.search(text):
        add_mark(
            records, LineFlag.MOJIBAKE, (n for n, line in enumerate(lines) if is_mojibake(line))
        )
    view = _View(text)
    _count(records, view)
    if "<" in text or "&" in text or "{" in text or "://" in text:
        _add_markup(records, lines)
    words = _Words(view)
    records["numbers"] = words.bits(words.is_number, 32)
    records["names"] = words.bits(words.is_name, 64)
    return Measured(records, _keys(view), words.hashes, words.lines)


def exact_hashes(lines: Sequence[str]) -> Hashes:
    """Return 64 bits of BLAKE2 for each line."""
    digests = (hashlib.blake2b(line.encode("utf-8"), digest_size=8).digest() for line in lines)
    return np.frombuffer(b"".join(digests), np.uint64)


def mixed(first: Hashes, second: Hashes) -> Hashes:
    """Return one hash for two, in this order."""
    return _scrambled(first * _FACTOR + _scrambled(second))


def is_mojibake(line: str) -> bool:
    """Tell whether the line holds UTF-8 that was read as a one-byte encoding."""
    return any(_decodes(match[0]) for match in _MOJIBAKE.finditer(line))


def _decodes(text: str) -> bool:
    raw = b"".join(_one_byte(character) for character in text)
    try:
        return len(raw.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


def _one_byte(character: str) -> bytes:
    try:
        return character.encode("cp1252")
    except UnicodeEncodeError:
        return character.encode("latin-1", errors="replace")


def add_mark(records: Records, mark: LineFlag, lines: Iterable[int]) -> None:
    """Mark some of the lines."""
    for line in lines:
        records["marks"][line] |= np.uint16(mark)


def _not_normalized(lines: Sequence[str]) -> Iterator[int]:
    return (n for n, line in enumerate(lines) if not unicodedata.is_normalized("NFC", line))


def _add_markup(records: Records, lines: Sequence[str]) -> None:
    """Count the letters of tags, entities and addresses as what they are: no words."""
    for number, line in enumerate(lines):
        if "<" in line or "&" in line or "{" in line or "://" in line:
            inside = sum(
                sum(map(str.isalpha, match[0])) for match in _MARKUP.finditer(line[:MAX_CHARS])
            )
            records["odd"][number] += inside


class _View:
    """A block of text, character by character.

    Attributes:
        codes, kinds: of each character.
        lines: the line that each character stands in.
        ends: where each line ends.
        num_lines: of the block.
    """

    def __init__(self, text: str) -> None:
        self.codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        self.kinds = CHARACTERS.kinds(self.codes)
        self.ends = np.flatnonzero(self.codes == 10)
        self.num_lines = len(self.ends)
        lengths = np.diff(self.ends, prepend=-1)
        self.lines = np.repeat(np.arange(self.num_lines), lengths)

    def starts(self) -> Ints:
        """Return where each line starts."""
        return np.concatenate([[0], self.ends[:-1] + 1])[: self.num_lines]


def _count(records: Records, view: _View) -> None:
    """Fill in what follows from counting characters by kind."""
    cells = np.bincount(view.lines * NUM_KINDS + view.kinds, minlength=view.num_lines * NUM_KINDS)
    counts = cells.reshape(view.num_lines, NUM_KINDS)
    solid = counts.sum(1) - counts[:, [Kind.END, Kind.SPACE, Kind.TAB, Kind.BREAK]].sum(1)
    letters = counts[:, Kind.LETTER :]
    records["solid"] = solid
    records["odd"] = solid - letters.sum(1) - counts[:, [Kind.CONTROL, Kind.INVISIBLE]].sum(1)
    records["script"] = np.where(letters.any(1), letters.argmax(1) + int(Kind.LETTER), 0)
    records["points"] = np.minimum(counts[:, Kind.POINT], 255)
    records["ending"] = _endings(view)
    for kind, mark in (
        (Kind.TAB, LineFlag.TAB),
        (Kind.BREAK, LineFlag.BREAK),
        (Kind.CONTROL, LineFlag.CONTROL),
        (Kind.INVISIBLE, LineFlag.INVISIBLE),
        (Kind.LOST, LineFlag.MOJIBAKE),
    ):
        records["marks"] |= np.where(counts[:, kind] > 0, np.uint16(mark), np.uint16(0))
    records["marks"] |= np.where(solid == 0, np.uint16(LineFlag.BLANK), np.uint16(0))


def _endings(view: _View) -> npt.NDArray[np.uint8]:
    """Return what each line ends with."""
    is_solid = (view.kinds > Kind.BREAK) | (view.kinds == Kind.OTHER)
    places = np.maximum.accumulate(np.where(is_solid, np.arange(len(view.codes)), -1))[view.ends]
    codes, kinds = view.codes[places], view.kinds[places]
    listed = np.where(codes < len(_ENDINGS), _ENDINGS[np.minimum(codes, len(_ENDINGS) - 1)], 0)
    is_word = (kinds >= Kind.LETTER) | (kinds == Kind.DIGIT)
    endings = np.where(is_word, 0, np.maximum(listed, 1))
    found: npt.NDArray[np.uint8] = np.where(places >= view.starts(), endings, 0).astype(np.uint8)
    return found


def _keys(view: _View) -> Hashes:
    """Hash the letters and digits of each line, without their case."""
    places = np.flatnonzero((view.kinds >= Kind.LETTER) | (view.kinds == Kind.DIGIT))
    firsts = np.searchsorted(places, view.starts())
    lines = view.lines[places]
    values = _scrambled(CHARACTERS.folded(view.codes[places]).astype(np.uint64) + np.uint64(1))
    return _sums(values * _POWERS[np.arange(len(places)) - firsts[lines]], firsts)


def _sums(values: Hashes, firsts: Ints) -> Hashes:
    """Sum, modulo 2^64, the values of each group, given where the groups begin."""
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    bounds = np.append(firsts, len(values))
    sums: Hashes = totals[bounds[1:]] - totals[bounds[:-1]]
    return sums


class _Words:
    """The runs of letters or digits of a block; where words have no spaces, each letter is one.

    Attributes:
        hashes: of the first letters of each word, without case.
        lines: the line that each stands in.
        is_number: made of digits.
        is_name: long enough, or written large within a line, to be alike in two languages.
    """

    def __init__(self, view: _View) -> None:
        is_digit = view.kinds == Kind.DIGIT
        is_part = (view.kinds >= Kind.LETTER) | is_digit
        group = is_part.astype(np.int8) + is_digit  # 0: none, 1: letters, 2: digits
        is_first = is_part & (group != np.concatenate([[0], group[:-1]]))
        unspaced = np.zeros(256, bool)
        unspaced[:NUM_KINDS] = IS_UNSPACED
        is_first |= unspaced[view.kinds]
        places = np.flatnonzero(is_part)
        firsts = np.flatnonzero(is_first[places])
        offsets = np.arange(len(places)) - np.repeat(
            firsts, np.diff(np.append(firsts, len(places)))
        )
        folded = CHARACTERS.folded(view.codes[places])
        values = _scrambled(folded.astype(np.uint64) + np.uint64(1))
        values *= _POWERS[np.minimum(offsets, MAX_CHARS)]
        starts = places[firsts]
        self.num_lines = view.num_lines
        self.lines = view.lines[starts]
        self.is_number = is_digit[starts]
        self.hashes = _scrambled(_sums(values, firsts))
        values[offsets >= _NAME_LETTERS] = 0
        self._stems = _scrambled(_sums(values, firsts))
        lengths = np.diff(np.append(firsts, len(places)))
        is_large = view.codes[starts] != folded[firsts]
        opens = np.concatenate([[True], self.lines[1:] != self.lines[:-1]])[: len(starts)]
        self.is_name = ~self.is_number & (lengths >= 3) & is_large & ~opens

    def bits(self, chosen: npt.NDArray[np.bool_], width: int) -> Hashes:
        """Return for each line one bit, of `width`, for each chosen word."""
        found = np.zeros(self.num_lines, np.uint64)
        lines = self.lines[chosen]
        if len(lines):
            shift = np.uint64(64 - width.bit_length() + 1)
            bits = np.uint64(1) << (self._stems[chosen] >> shift)
            firsts = np.flatnonzero(np.concatenate([[True], lines[1:] != lines[:-1]]))
            found[lines[firsts]] = np.bitwise_or.reduceat(bits, firsts)
        return found


def _scrambled(values: Hashes) -> Hashes:
    """Spread every bit over all bits (the finaliser of SplitMix64)."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    spread: Hashes = values ^ (values >> np.uint64(31))
    return spread
