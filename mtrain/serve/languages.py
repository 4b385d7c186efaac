"""Language codes, and the detection of a text's language."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

_ALIASES = [{"zh", "zh-hans"}, {"zt", "zh-hant"}, {"pb", "pt-br"}, {"nb", "no"}]
_MAX_DETECTED = 3
_MAX_CHARS = 5000  # of a text that detection reads


def find_code(code: str, codes: Sequence[str]) -> str | None:
    """Return the one of `codes` that is `code` or an alias of it, ignoring case; else None."""
    lower = code.lower()
    aliases = {lower}.union(*(names for names in _ALIASES if lower in names))
    by_lower = {known.lower(): known for known in codes}
    return by_lower.get(lower) or next((by_lower[name] for name in aliases & by_lower.keys()), None)


class Detected(NamedTuple):
    """A language that a text may be in."""

    code: str  # one of the detector's codes
    confidence: float  # in percent


class LanguageDetector:
    """Detects which of the languages `codes` a text is in; thread-safe.

    Attributes:
        detected: the languages that py3langid supports; others are never detected.
    """

    def __init__(self, codes: Sequence[str]) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self._codes = list(codes)
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        self._code_of: dict[str, str] = {}
        for code in codes:
            names = {code.lower(), re.split("[-_]", code.lower())[0]}
            names = names.union(*(aliases for aliases in _ALIASES if names & aliases))
            candidates = {name.split("-")[0] for name in names}
            for label in candidates & set(self._identifier.labels):
                self._code_of.setdefault(label, code)
        self.detected = [code for code in codes if code in self._code_of.values()]
        if self._code_of:
            self._identifier.set_languages(sorted(self._code_of))

    def rank(self, text: str, max_detected: int = _MAX_DETECTED) -> list[Detected]:
        """Return at most `max_detected` languages, the likeliest first.

        Without letters or supported languages: the first language, with confidence 0.
        """
        if not self._code_of or not has_letters(text):
            return [Detected(self._codes[0], 0.0)]
        ranked = self._identifier.rank(text[:_MAX_CHARS])[:max_detected]
        return [Detected(self._code_of[label], round(100 * share, 1)) for label, share in ranked]


def has_letters(text: str) -> bool:
    """Tell whether a text has something to translate: a letter of any script."""
    return any(unicodedata.category(character)[0] == "L" for character in text)
