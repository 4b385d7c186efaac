"""What kind each character is: of which script, or what it does to a line. Knows no files."""

from __future__ import annotations

import unicodedata
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint32]


class Kind(IntEnum):
    """What a character is to a corpus; from `LETTER` on, a letter, by its script."""

    OTHER = 0
    END = 1  # the "\n" that ends a line
    SPACE = 2
    TAB = 3
    BREAK = 4  # other tools split lines here
    CONTROL = 5
    INVISIBLE = 6
    LOST = 7  # U+FFFD: what stood here could not be decoded once
    DIGIT = 8
    POINT = 9  # punctuation
    LETTER = 10  # of no script below


# The scripts of living languages with text on the web; names are the first words of Unicode's.
SCRIPTS = (
    *("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "ARMENIAN", "GEORGIAN", "ETHIOPIC"),
    *("DEVANAGARI", "BENGALI", "GURMUKHI", "GUJARATI", "ORIYA", "TAMIL", "TELUGU", "KANNADA"),
    *("MALAYALAM", "SINHALA", "THAI", "LAO", "TIBETAN", "MYANMAR", "KHMER", "MONGOLIAN"),
    *("SYRIAC", "THAANA", "NKO", "CANADIAN", "CHEROKEE", "TIFINAGH", "YI"),
    *("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO"),
)
NUM_KINDS = Kind.LETTER + 1 + len(SCRIPTS)
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
IS_UNSPACED = np.array([False] * (Kind.LETTER + 1) + [name in _UNSPACED for name in SCRIPTS])

_BREAKS = "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
# Of the format characters, those that join or part letters in Persian, Indic scripts and emoji.
_USEFUL = "\u200c\u200d"
_UNKNOWN = 255


class Characters:
    """The kinds and the lower-case forms of characters, looked up once for each that occurs."""

    def __init__(self) -> None:
        self._kinds = np.full(0x110000, _UNKNOWN, np.uint8)
        self._folded = np.arange(0x110000, dtype=np.uint32)

    def kinds(self, codes: Codes) -> npt.NDArray[np.uint8]:
        """Return the `Kind` of each code point, or the number of its script after `LETTER`."""
        found = self._kinds[codes]
        if (found == _UNKNOWN).any():
            for code in np.unique(codes[found == _UNKNOWN]).tolist():
                self._kinds[code] = _kind(chr(code))
                self._folded[code] = _fold(chr(code))
            found = self._kinds[codes]
        return found

    def folded(self, codes: Codes) -> Codes:
        """Return code points without their case; `kinds` must have seen them."""
        return self._folded[codes]


def kind_of(script: str) -> int:
    """Return the number of a script's letters."""
    return Kind.LETTER + 1 + SCRIPTS.index(script)


def _kind(character: str) -> int:
    for kind, members in ((Kind.END, "\n"), (Kind.TAB, "\t"), (Kind.BREAK, _BREAKS)):
        if character in members:
            return kind
    if character == "\ufffd":
        return Kind.LOST
    category = unicodedata.category(character)
    if category[0] in "LM":
        return _script(character)
    if category == "Cf":
        return Kind.OTHER if character in _USEFUL else Kind.INVISIBLE
    by_group = {"N": Kind.DIGIT, "Z": Kind.SPACE, "P": Kind.POINT, "C": Kind.CONTROL}
    return by_group.get(category[0], Kind.OTHER)


def _script(character: str) -> int:
    words = unicodedata.name(character, "").replace("-", " ").split()
    words = words[1:] if words[:1] in (["FULLWIDTH"], ["HALFWIDTH"]) else words
    if words[:1] and words[0] in SCRIPTS:
        return kind_of(words[0])
    return Kind.LETTER


def _fold(character: str) -> int:
    for form in (character.casefold(), character.lower()):
        if len(form) == 1:
            return ord(form)
    return ord(character)


CHARACTERS = Characters()
