"""The class of each character: its script, or its effect on a line."""

from __future__ import annotations

import unicodedata
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint32]


class Kind(IntEnum):
    """The class of a character; from `LETTER` on, letters by their script."""

    OTHER = 0
    END = 1  # "\n"
    SPACE = 2
    TAB = 3
    BREAK = 4  # other tools split lines here
    CONTROL = 5
    INVISIBLE = 6
    DIGIT = 7
    PUNCTUATION = 8
    LETTER = 9  # of no script below


# Scripts in use, by the first word of the Unicode names of their letters.
SCRIPTS = (
    *("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "ARMENIAN", "GEORGIAN", "ETHIOPIC"),
    *("DEVANAGARI", "BENGALI", "GURMUKHI", "GUJARATI", "ORIYA", "TAMIL", "TELUGU", "KANNADA"),
    *("MALAYALAM", "SINHALA", "THAI", "LAO", "TIBETAN", "MYANMAR", "KHMER", "MONGOLIAN"),
    *("SYRIAC", "THAANA", "NKO", "CANADIAN", "CHEROKEE", "TIFINAGH", "YI"),
    *("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO"),
)
NUM_KINDS = Kind.LETTER + 1 + len(SCRIPTS)
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
# Of these, the scripts whose words a zero-width space may separate.
_ZERO_WIDTH = ("THAI", "LAO", "KHMER", "MYANMAR")
IS_UNSPACED, HAS_ZERO_WIDTH_SPACE = (  # of each kind
    np.array([False] * (Kind.LETTER + 1) + [script in members for script in SCRIPTS])
    for members in (_UNSPACED, _ZERO_WIDTH)
)

_BREAKS = "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_SPACES = "".join(chr(code) for code in range(0x3001) if unicodedata.category(chr(code))[0] == "Z")
BLANKS = "\t" + _BREAKS + _SPACES  # all characters of `Kind` SPACE, TAB and BREAK
# Joiners of Persian, Indic scripts and emoji, the keycap sign, and variation selectors.
_MODIFIERS = "\u200c\u200d\u20e3"
_MODIFIERS += "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
_UNKNOWN = 255


_KINDS = np.full(0x110000, _UNKNOWN, np.uint8)  # of each code point; filled by `kinds`
_FOLDED = np.arange(0x110000, dtype=np.uint32)  # its folded form; likewise


def kinds(codes: Codes) -> npt.NDArray[np.uint8]:
    """Return the `Kind` of each code point, or the number of its script after `LETTER`."""
    is_unknown = _KINDS[codes] == _UNKNOWN
    if is_unknown.any():
        for code in np.unique(codes[is_unknown]).tolist():
            character = chr(code)
            _KINDS[code] = _kind(character)
            _FOLDED[code] = _fold(character)
    return _KINDS[codes]


def folded(codes: Codes) -> Codes:
    """Return case-folded code points, and digits as ASCII; call `kinds` with them before."""
    return _FOLDED[codes]


def is_unspaced(text: str) -> bool:
    """Return whether most characters of a text are letters of scripts without spaces."""
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
    return bool(2 * IS_UNSPACED[kinds(codes)].sum() > len(codes))


def kind_of(script: str) -> int:
    """Return the kind of a script's letters."""
    return Kind.LETTER + 1 + SCRIPTS.index(script)


def _fold(character: str) -> int:
    """Return the folded code point; I and i, with and without a dot, are one letter (Turkish)."""
    if character in "İı":
        return ord("i")
    digit = unicodedata.decimal(character, None)
    forms = ("" if digit is None else str(digit), character.casefold(), character.lower())
    return next(ord(form) for form in (*forms, character) if len(form) == 1)


def _kind(character: str) -> int:
    for kind, members in ((Kind.END, "\n"), (Kind.TAB, "\t"), (Kind.BREAK, _BREAKS)):
        if character in members:
            return kind
    if character in _MODIFIERS:
        return Kind.OTHER
    category = unicodedata.category(character)
    if category[0] in "LM":
        words = unicodedata.name(character, "").replace("-", " ").split()
        words = words[1:] if words[:1] in (["FULLWIDTH"], ["HALFWIDTH"]) else words
        return kind_of(words[0]) if words and words[0] in SCRIPTS else Kind.LETTER
    if category[0] == "C":  # unassigned and private characters may be new emoji, or a font's
        return {"Cc": Kind.CONTROL, "Cf": Kind.INVISIBLE}.get(category, Kind.OTHER)
    by_group = {"N": Kind.DIGIT, "Z": Kind.SPACE, "P": Kind.PUNCTUATION}
    return by_group.get(category[0], Kind.OTHER)
