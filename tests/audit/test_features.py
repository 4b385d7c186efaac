"""Records of lines against the same facts found character by character."""

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
        st.sampled_from("aB1. ,é\u0301\t\r\u2028\x07\u200bжШ寿か한\ufffd<>&;"),
    ),
    max_size=30,
)
LINES = st.lists(line_text, max_size=8)


def marks(line: str) -> LineFlag:
    return LineFlag(int(measure(["x", line, "y"]).lines["flags"][1]))


def plain_key(line: str) -> str:
    """Return what a key is made of, one character at a time."""
    kept = [c for c in line if unicodedata.category(c)[0] in "LMN"]
    return "".join(_folded(c) for c in kept)


def _folded(character: str) -> str:
    forms = [character.casefold(), character.lower(), character]
    return next(form for form in forms if len(form) == 1)


@example(["", "", "a", ""])
@given(LINES)
def test_counts_are_those_of_a_loop_over_characters(lines: list[str]) -> None:
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
        assert record["solid"] - record["odd"] >= sum(kind in "LM" for kind in categories)


@given(LINES)
def test_lines_have_equal_keys_when_their_letters_and_digits_are_equal(lines: list[str]) -> None:
    keys = measure(lines).keys.tolist()
    plain = [plain_key(line) for line in lines]
    assert [key == 0 for key in keys] == [not text for text in plain]
    for i, key in enumerate(keys):
        assert [key == other for other in keys] == [plain[i] == text for text in plain]


def test_case_punctuation_and_spaces_make_no_other_key_but_order_does() -> None:
    same = measure(["Don't 1,000 ΣΑΣ!", "dont1000 «σας»", "  DON T 1000ΣΑΣ"]).keys
    assert len(set(same.tolist())) == 1
    assert len(set(measure(["listen", "silent", "listens", "stenil"]).keys.tolist())) == 4


@given(LINES)
def test_a_line_is_measured_as_if_it_stood_alone(lines: list[str]) -> None:
    together = measure(lines)
    for number, line in enumerate(lines):
        alone = measure([line])
        assert alone.lines[0] == together.lines[number]
        assert alone.keys[0] == together.keys[number]
        assert alone.words.tolist() == together.words[together.word_lines == number].tolist()


@example(["", " ", "\x1f", "\x1c\u2028\u3000\r"])
@given(LINES)
def test_what_is_not_asked_for_is_not_computed_and_blank_lines_are_the_same(
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


def test_words_are_runs_of_letters_or_of_digits_and_single_letters_without_spaces() -> None:
    measured = measure(["Two dogs, 12ab", "寿司か", "TWO"])
    assert measured.word_lines.tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
    assert measured.words[0] == measured.words[-1]
    assert len(set(measured.words.tolist())) == 7


def test_names_and_numbers_share_bits_across_languages() -> None:
    src, tgt = measure(["on 12 May Tolstoy left"]).lines, measure(["12 мая Tolstois, ein"]).lines
    assert src["numbers"] == tgt["numbers"] != 0
    assert src["names"] & tgt["names"] != 0
    other = measure(["On 13 we left"]).lines
    assert other["names"] == 0  # a first word is large whatever it is
    assert other["numbers"] & src["numbers"] == 0


@pytest.mark.parametrize(
    ("line", "ending"),
    [
        ("ab.", 2), ("ab。", 2), ("ab?", 3), ("ab !  ", 4), ("ab:", 5), ("ab,", 6), ("ab”", 7),
        ("ab", 0), ("ab1", 0), ("", 0), ("  ", 0), ("ab+", 1),
    ],
)  # fmt: skip
def test_lines_end_in_a_way(line: str, ending: int) -> None:
    assert measure(["x!", line, "y?"]).lines["ending"][1] == ending


@pytest.mark.parametrize(
    ("line", "mark"),
    [
        ("a\tb", LineFlag.TAB),
        *((f"a{c}b", LineFlag.BREAK) for c in "\r\x0b\x0c\x1c\x85\u2028\u2029"),
        *((f"a{c}b", LineFlag.CONTROL) for c in "\x00\x07\x1b\x7f\x9f"),
        *((f"a{c}b", LineFlag.INVISIBLE) for c in "\u200b\u00ad\ufeff\u202e\u2060"),
        ("e\u0301", LineFlag.NOT_NFC),
        ("fÃ¼r", LineFlag.MOJIBAKE),
        ("donâ€™t", LineFlag.MOJIBAKE),
        ("a\ufffdb", LineFlag.MOJIBAKE),
        (" \u3000", LineFlag(0)),
        ("", LineFlag(0)),
    ],
)
def test_a_mark_is_set_where_it_belongs_and_no_other(line: str, mark: LineFlag) -> None:
    assert marks(line) == mark
    assert measure([line, "für é ç – “x” नमस्ते می\u200cخواهم 👩\u200d🚀"]).lines["flags"][1] == 0


def test_blank_lines_have_neither_characters_nor_a_hash() -> None:
    lines = measure(["", " \u3000\t", "\x1c\r", "."]).lines
    assert lines["solid"].tolist() == [0, 0, 0, 1]
    assert (lines["hash"] > 0).tolist() == [False, False, False, True]


@pytest.mark.parametrize("line", ["NÃO", "Â", "café", "Ã la", "naïve", "São Paulo", "ÀÉ"])
def test_text_that_only_resembles_mojibake_is_none(line: str) -> None:
    assert not is_mojibake(line)


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("dogs", "LATIN"), ("собаки", "CYRILLIC"), ("σκύλοι", "GREEK"), ("寿司", "CJK"),
        ("すし", "HIRAGANA"), ("한국어", "HANGUL"), ("नमस्ते", "DEVANAGARI"), ("ＦＵＬＬ", "LATIN"),
        ("ab собаки", "CYRILLIC"),
    ],
)  # fmt: skip
def test_the_script_of_most_letters_is_the_lines(line: str, script: str) -> None:
    assert measure([line]).lines["script"][0] == kind_of(script)


def test_a_line_without_letters_is_in_no_script() -> None:
    assert measure(["12 + 3"]).lines["script"][0] == 0


def test_markup_is_no_words() -> None:
    records = measure(['<a href="some">12</a>', "a < b & c", "&nbsp;&amp;", "http://a.b/c"]).lines
    assert (records["odd"] == records["solid"]).tolist() == [True, False, True, True]


def test_of_an_endless_line_only_the_beginning_is_looked_at_and_all_of_it_is_hashed() -> None:
    long = "a" * (3 * MAX_CHARS)
    records = measure([long, long + "b"]).lines
    assert records["chars"].tolist() == [3 * MAX_CHARS, 3 * MAX_CHARS + 1]
    assert records["solid"].tolist() == [MAX_CHARS, MAX_CHARS]
    assert records["hash"][0] != records["hash"][1]


def test_hashes_of_pairs_know_their_order() -> None:
    first, second = exact_hashes(["a", "b"]), exact_hashes(["b", "a"])
    assert len(np.unique(np.concatenate([mixed(first, second), first]))) == 4
