"""The features of lines equal the same features computed one character at a time."""

import re
import unicodedata

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtrain.audit.features import (
    LINE,
    MAX_CHARS,
    Feature,
    LineFlag,
    exact_hashes,
    is_mojibake,
    measure,
    mixed,
)
from mtrain.audit.unicode_classes import kind_of

line_text = st.text(
    st.one_of(
        st.characters(blacklist_categories=["Cs"], blacklist_characters="\n"),
        st.sampled_from("aB1. ,é\u0301\ufe0f\t\r\u2028\x07\u200bжШ寿か한\ufffd<>&;"),
    ),
    max_size=30,
)
LINES = st.lists(line_text, max_size=8)


def marks(line: str) -> LineFlag:
    return LineFlag(int(measure(["x", line, "y"]).lines["flags"][1]))


def is_in(groups: str, character: str) -> bool:
    """Return whether a character is in the groups of categories, and modifies no symbol."""
    modifies = "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
    return unicodedata.category(character)[0] in groups and not modifies and character != "\u20e3"


def plain_key(line: str) -> str:
    """Return the text that a key hashes: the folded letters, marks and digits of a line."""
    kept = [c for c in line if is_in("LMN", c)]
    return "".join(_folded(c) for c in kept)


def _folded(character: str) -> str:
    if character in "İı":
        return "i"
    if unicodedata.category(character) == "Nd":
        return str(int(character))
    forms = [character.casefold(), character.lower(), character]
    return next(form for form in forms if len(form) == 1)


@example(["", "", "a", ""])
@example(["<A>", "a <b c", "&amp; é</i>"])
@given(LINES)
def test_character_counts_equal_those_of_a_loop_over_characters(lines: list[str]) -> None:
    records = measure(lines).lines
    for line, record in zip(lines, records, strict=True):
        categories = [unicodedata.category(c)[0] for c in line]
        assert record["chars"] == len(line)
        assert bool(record["solid"]) == any(
            c not in "\t\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
            and unicodedata.category(c)[0] != "Z"
            for c in line
        )
        assert record["punctuation"] == categories.count("P")
        markup = "".join(re.findall("</?[A-Za-z][^<>]*>|&[A-Za-z]{2,8};", line))
        num_letters = sum(is_in("LM", c) for c in line) - sum(map(str.isalpha, markup))
        assert record["solid"] - record["odd"] >= num_letters


@given(LINES)
def test_keys_are_equal_exactly_if_the_folded_letters_marks_and_digits_are_equal(
    lines: list[str],
) -> None:
    keys = measure(lines).keys.tolist()
    plain = [plain_key(line) for line in lines]
    assert [key == 0 for key in keys] == [not text for text in plain]
    for i, key in enumerate(keys):
        assert [key == other for other in keys] == [plain[i] == text for text in plain]


def test_keys_ignore_case_punctuation_and_spaces_but_not_the_order_of_letters() -> None:
    same = measure(["Don't 1,000 ΣΑΣ!", "dont1000 «σας»", "  DON T 1000ΣΑΣ"]).keys
    assert len(set(same.tolist())) == 1
    assert len(set(measure(["ISPARTA’DA IŞIK", "İsparta’da ışık"]).keys.tolist())) == 1
    assert len(set(measure(["listen", "silent", "listens", "stenil"]).keys.tolist())) == 4


@given(LINES)
def test_a_line_has_the_same_features_alone_and_among_other_lines(lines: list[str]) -> None:
    together = measure(lines)
    for number, line in enumerate(lines):
        alone = measure([line])
        assert alone.lines[0] == together.lines[number]
        assert alone.keys[0] == together.keys[number]
        assert alone.words.tolist() == together.words[together.word_lines == number].tolist()


@example(["", " ", "\x1f", "\x1c\u2028\u3000\r"])
@given(LINES)
def test_features_not_requested_stay_zero_and_blank_lines_are_still_detected(
    lines: list[str],
) -> None:
    whole, least = measure(lines), measure(lines, Feature.NONE)
    assert ((whole.lines["solid"] > 0) == (least.lines["solid"] > 0)).all()
    computed = {name for name in LINE.names if least.lines[name].any()}
    assert computed <= {"chars", "solid"}
    assert not least.keys.any() and not least.words.size
    for feature in Feature:
        part = measure(lines, feature)
        for name in set(LINE.names) - {"solid", "flags"}:
            assert not part.lines[name].any() or (part.lines[name] == whole.lines[name]).all()
    parts = [measure(lines, feature) for feature in Feature]
    for name in set(LINE.names) - {"solid", "flags"}:
        is_computed = any((part.lines[name] == whole.lines[name]).all() for part in parts)
        assert is_computed, f"no feature computes {name}"


def test_words_are_runs_of_letters_or_digits_and_single_characters_of_unspaced_scripts() -> None:
    measured = measure(["Two dogs, 12ab", "寿司か", "TWO"])
    assert measured.word_lines.tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
    assert measured.words[0] == measured.words[-1]
    assert len(set(measured.words.tolist())) == 7


def test_equal_numbers_and_similar_names_set_common_bits_across_languages() -> None:
    src, tgt = measure(["on 12 May Tolstoy left"]).lines, measure(["12 мая Tolstois, ein"]).lines
    assert src["numbers"] == tgt["numbers"] != 0
    assert src["names"] & tgt["names"] != 0
    turkish = measure(["Dün İstanbul", "güzel ışık", "x istanbul"]).lines["names"]
    assert (turkish > 0).tolist() == [True, False, False]
    other = measure(["On 13 we left"]).lines
    assert other["names"] == 0  # a first word is capitalized even if it is no name
    assert other["numbers"] & src["numbers"] == 0


@pytest.mark.parametrize("digits", ["١٩٨٧", "۱۹۸۷", "१९८७", "၁၉၈၇", "１９８７"])
def test_a_number_is_the_same_in_the_digits_of_any_script(digits: str) -> None:
    plain, line = measure(["12 1987", f"12 {digits}"]).lines["numbers"]
    assert line == plain


@pytest.mark.parametrize(
    ("line", "ending"),
    [
        ("ab.", 2), ("ab。", 2), ("ab?", 3), ("ab !  ", 4), ("ab:", 5), ("ab,", 6), ("ab”", 7),
        ("ab", 0), ("ab1", 0), ("", 0), ("  ", 0), ("ab+", 1),
        ("ab😀", 1), ("ab．", 2), ("ab？", 3), ("ab！", 4), ("ab：", 5), ("ab；", 6), ("ab，", 6),
        ("ab）", 7),
    ],
)  # fmt: skip
def test_the_last_character_of_a_line_sets_its_ending_class(line: str, ending: int) -> None:
    assert measure(["x!", line, "y?"]).lines["ending"][1] == ending


@pytest.mark.parametrize(
    ("line", "mark"),
    [
        ("a\tb", LineFlag.TAB),
        *((f"a{c}b", LineFlag.BREAK) for c in "\r\x0b\x0c\x1c\x85\u2028\u2029"),
        *((f"a{c}b", LineFlag.CONTROL) for c in "\x00\x07\x1b\x7f\x9f"),
        *((f"a{c}b", LineFlag.INVISIBLE) for c in "\u200b\u00ad\ufeff\u202e\u2060"),
        *((f"a{c}b", LineFlag(0)) for c in "\u0378\ue000\U0010ffff"),  # unassigned or private
        ("e\u0301", LineFlag.NOT_NFC),
        ("fÃ¼r", LineFlag.MOJIBAKE),
        ("donâ€™t", LineFlag.MOJIBAKE),
        ("a\ufffdb", LineFlag.MOJIBAKE),
        (" \u3000", LineFlag(0)),
        ("", LineFlag(0)),
    ],
)
def test_a_line_has_exactly_the_flag_of_its_defect(line: str, mark: LineFlag) -> None:
    assert marks(line) == mark
    assert measure([line, "für é ç – “x” नमस्ते می\u200cخواهم 👩\u200d🚀"]).lines["flags"][1] == 0


def test_blank_lines_have_no_visible_characters_and_no_hash() -> None:
    lines = measure(["", " \u3000\t", "\x1c\r", "."]).lines
    assert lines["solid"].tolist() == [0, 0, 0, 1]
    assert (lines["hash"] > 0).tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    "line",
    [
        "NÃO", "Â", "café", "Ã la", "naïve", "São Paulo", "ÀÉ",
        "«\xa0liberté\xa0»", "voilà\xa0…", "no sé…¿qué?", "„Das macht Spaß“", "»Spaß«", "Spaß…",
        "«CAFÉ»", "CAFÉ\xa0!", "“É”", "”HYVÄ”", "«SJØ»", "ODTÜ’nün", "2\xa0×\xa03",
    ],
)  # fmt: skip
def test_text_that_only_resembles_mojibake_is_not_flagged(line: str) -> None:
    assert not is_mojibake(line)


def test_a_zero_width_space_between_words_of_khmer_or_thai_is_a_space() -> None:
    lines = ["ខ្ញុំ\u200bទៅ\u200b12\u200bផ្ទះ។", "ฉัน\u200bรัก", "a\u200bb", "我\u200b们", "ទៅ\u00adផ្ទះ"]
    records = measure(lines).lines
    marked = (records["flags"] & LineFlag.INVISIBLE) > 0
    assert marked.tolist() == [False, False, True, True, True]
    assert records["solid"][0] == len(lines[0]) - 3


@pytest.mark.parametrize(
    "text",
    ["à", "voilà", "«", "œuvre", "są", "město", "Hawaiʻi", "дал", "שלום", "“x”", "寿司", "😀"],
)
def test_mojibake_is_flagged_also_where_it_ends_in_punctuation(text: str) -> None:
    octets = text.encode("utf-8")
    assert is_mojibake(
        "".join(bytes([octet]).decode("cp1252", "ignore") or chr(octet) for octet in octets)
    )


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("dogs", "LATIN"), ("собаки", "CYRILLIC"), ("σκύλοι", "GREEK"), ("寿司", "CJK"),
        ("すし", "HIRAGANA"), ("한국어", "HANGUL"), ("नमस्ते", "DEVANAGARI"), ("ＦＵＬＬ", "LATIN"),
        ("ab собаки", "CYRILLIC"),
    ],
)  # fmt: skip
def test_the_script_of_a_line_is_that_of_most_of_its_letters(line: str, script: str) -> None:
    assert measure([line]).lines["script"][0] == kind_of(script)


def test_a_line_without_letters_has_no_script() -> None:
    assert measure(["12 + 3"]).lines["script"][0] == 0


def test_variation_selectors_and_keycap_signs_are_no_letters() -> None:
    records = measure(["☀\ufe0f 25°", "1\ufe0f\u20e3"]).lines
    assert records["script"].tolist() == [0, 0]
    assert (records["odd"] == records["solid"]).all()
    for line in ("I ❤\ufe0f you", "葛\U000e0100城", "no 1\ufe0f\u20e3"):
        plain = re.sub("[\ufe0f\u20e3\U000e0100]", "", line)
        keys = measure([line, plain]).keys
        assert keys[0] == keys[1] != 0


def test_letters_of_markup_entities_and_urls_do_not_count_as_words() -> None:
    records = measure(['<a href="some">12</a>', "a < b & c", "&nbsp;&amp;", "http://a.b/c"]).lines
    assert (records["odd"] == records["solid"]).tolist() == [True, False, True, True]


def test_a_very_long_line_is_analysed_up_to_max_chars_but_hashed_whole() -> None:
    long = "a" * (3 * MAX_CHARS)
    records = measure([long, long + "b"]).lines
    assert records["chars"].tolist() == [3 * MAX_CHARS, 3 * MAX_CHARS + 1]
    assert records["solid"].tolist() == [MAX_CHARS, MAX_CHARS]
    assert records["hash"][0] != records["hash"][1]


def test_pair_hashes_depend_on_the_order_of_the_sides() -> None:
    first, second = exact_hashes(["a", "b"]), exact_hashes(["b", "a"])
    assert len(np.unique(np.concatenate([mixed(first, second), first]))) == 4
