"""Codes and names of languages, and which of them a text is in."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

_NAMES = """
aa Afar|ab Abkhazian|af Afrikaans|ak Akan|am Amharic|an Aragonese|ar Arabic|as Assamese|av Avaric
ay Aymara|az Azerbaijani|ba Bashkir|be Belarusian|bg Bulgarian|bi Bislama|bm Bambara|bn Bengali
bo Tibetan|br Breton|bs Bosnian|ca Catalan|ce Chechen|ch Chamorro|co Corsican|cs Czech|cv Chuvash
cy Welsh|da Danish|de German|dv Divehi|dz Dzongkha|ee Ewe|el Greek|en English|eo Esperanto
es Spanish|et Estonian|eu Basque|fa Persian|ff Fulah|fi Finnish|fj Fijian|fo Faroese|fr French
fy Western Frisian|ga Irish|gd Scottish Gaelic|gl Galician|gn Guarani|gu Gujarati|gv Manx|ha Hausa
he Hebrew|hi Hindi|hr Croatian|ht Haitian Creole|hu Hungarian|hy Armenian|ia Interlingua
id Indonesian|ig Igbo|is Icelandic|it Italian|iu Inuktitut|ja Japanese|jv Javanese|ka Georgian
kg Kongo|kk Kazakh|kl Greenlandic|km Khmer|kn Kannada|ko Korean|ks Kashmiri|ku Kurdish|kw Cornish
ky Kyrgyz|la Latin|lb Luxembourgish|lg Ganda|li Limburgish|ln Lingala|lo Lao|lt Lithuanian
lv Latvian|mg Malagasy|mi Maori|mk Macedonian|ml Malayalam|mn Mongolian|mr Marathi|ms Malay
mt Maltese|my Burmese|nb Norwegian Bokmål|ne Nepali|nl Dutch|nn Norwegian Nynorsk|no Norwegian
nv Navajo|ny Chichewa|oc Occitan|om Oromo|or Odia|os Ossetian|pa Punjabi|pb Portuguese (Brazil)
pl Polish|ps Pashto|pt Portuguese|pt-br Portuguese (Brazil)|qu Quechua|rm Romansh|rn Rundi
ro Romanian|ru Russian|rw Kinyarwanda|sa Sanskrit|sc Sardinian|sd Sindhi|se Northern Sami|sg Sango
si Sinhala|sk Slovak|sl Slovenian|sm Samoan|sn Shona|so Somali|sq Albanian|sr Serbian|ss Swati
st Southern Sotho|su Sundanese|sv Swedish|sw Swahili|ta Tamil|te Telugu|tg Tajik|th Thai
ti Tigrinya|tk Turkmen|tl Tagalog|tn Tswana|to Tonga|tr Turkish|ts Tsonga|tt Tatar|ty Tahitian
ug Uyghur|uk Ukrainian|ur Urdu|uz Uzbek|ve Venda|vi Vietnamese|wa Walloon|wo Wolof|xh Xhosa
yi Yiddish|yo Yoruba|za Zhuang|zh Chinese|zh-hans Chinese (simplified)
zh-hant Chinese (traditional)|zt Chinese (traditional)|zu Zulu
"""
_ALIASES = [{"zh", "zh-hans"}, {"zt", "zh-hant"}, {"pb", "pt-br"}, {"nb", "no"}]
_MAX_DETECTED = 3
_MAX_CHARS = 5000  # that are read of a text


def name_of(code: str) -> str:
    """Return the English name of a language; its code where there is none here."""
    return _NAME_OF.get(code.lower(), code)


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


_NAME_OF = {
    code: name
    for line in _NAMES.split("\n")
    for entry in line.split("|")
    for code, _, name in [entry.partition(" ")]
}
