"""Names of languages in English."""

from __future__ import annotations

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
_NAME_OF = {
    code: name
    for line in _NAMES.split("\n")
    for entry in line.split("|")
    for code, _, name in [entry.partition(" ")]
}


def name_of(code: str) -> str:
    """Return the English name of a language; the code itself if it is unknown."""
    return _NAME_OF.get(code.lower(), code)
