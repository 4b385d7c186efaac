"""Codes of languages, and which of them a text is in."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

_ALIASES = [{"zh", "zh-hans"}, {"zt", "zh-hant"}, {"pb", "pt-br"}, {"nb", "no"}]
_MAX_DETECTED = 3
_MAX_CHARS = 5000  # that are read of a text


def find_code(code: str, codes: Sequence[str]) -> str | None:
    """Return the one of `codes` that `code` names, in whatever case or by an alias."""
    lower = code.lower()
    wanted = {lower}.union(*(names for names in _ALIASES if lower in names))
    by_lower = {known.lower(): known for known in codes}
    return by_lower.get(lower) or next((by_lower[name] for name in wanted & by_lower.keys()), None)


class Detected(NamedTuple):
    """A language that a text may be in.

    Attributes:
        code: one of those that were asked for.
        confidence: in percent.
    """

    code: str
    confidence: float


class LanguageDetector:
    """Tells which of some languages a text is in. Any number of threads may call it.

    Args:
        codes: the languages; those that the detector does not know are never found.
    """

    def __init__(self, codes: Sequence[str]) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self._codes = list(codes)
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known: dict[str, str] = {}
        for code in codes:
            candidates = {code.lower(), code.lower().split("-")[0]}
            candidates |= {
                name.split("-")[0] for names in _ALIASES if code.lower() in names for name in names
            }
            for label in candidates & set(self._identifier.labels):
                known.setdefault(label, code)
        self._code_of = known
        if known:
            self._identifier.set_languages(sorted(known))

    def rank(self, text: str) -> list[Detected]:
        """Return at most three languages, the likeliest first.

        A text without a letter has the confidence 0, and the first language.
        """
        if not self._code_of or not has_letters(text):
            return [Detected(self._codes[0], 0.0)]
        ranked = self._identifier.rank(text[:_MAX_CHARS])[:_MAX_DETECTED]
        return [Detected(self._code_of[label], round(100 * share, 1)) for label, share in ranked]


def has_letters(text: str) -> bool:
    """Tell whether a text has something to translate: a letter, or a sign of a script."""
    return any(unicodedata.category(character)[0] == "L" for character in text)
