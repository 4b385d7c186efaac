"""Output formats of a translated line, and the flags of suspicious translations."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mtrain.corpus.length_stats import CorpusStats
from mtrain.decode import formats
from mtrain.decode.formats import (
    NOTHING,
    Link,
    TranslatedLine,
    Translation,
    align_words,
    as_pharaoh,
    find_flags,
    join,
    number_words,
    word_starts,
    write,
)

USUAL = CorpusStats(longest_src=20, least_ratio=0.5, most_ratio=2.0, share_copied=0.0)


def flags_of(
    src_ids: Sequence[int], tgt: Sequence[str], profile: CorpusStats | None = USUAL, src: str = "in"
) -> list[str]:
    return find_flags(src, " ".join(tgt), src_ids, tgt, profile)


@pytest.mark.parametrize(
    ("tgt", "is_loop"),
    [
        ("salad salad salad salad", True),
        ("salad salad salad", False),
        ("a salad a salad a salad a salad", True),
        ("a salad a salad a salad", False),
        ("one two three four one two three four one two three four one two three four", True),
        ("so a b c d e f g h a b c d e f g h a b c d e f g h a b c d e f g h", True),
        ("a b a c a d a e a f a g", False),
        ("", False),
    ],
)
def test_a_phrase_repeated_more_than_three_times_in_a_row_is_flagged_as_a_loop(
    tgt: str, is_loop: bool
) -> None:
    assert ("loop" in flags_of([7, 8, 9], tgt.split(), None)) == is_loop


def test_a_translation_as_repetitive_as_its_source_is_not_flagged_as_a_loop() -> None:
    tgt = ["ha"] * 6
    assert flags_of([5] * 6, tgt, None) == []
    assert flags_of([5] * 5, tgt, None) == ["loop"]


@pytest.mark.parametrize(
    ("num_src", "num_tgt", "is_usual"),
    [(9, 9, True), (9, 24, True), (9, 25, False), (39, 14, True), (39, 13, False), (1, 8, True)],
)
def test_a_length_is_flagged_if_it_is_a_few_tokens_outside_the_ratios_of_the_corpus(
    num_src: int, num_tgt: int, is_usual: bool
) -> None:
    src, tgt = list(range(num_src)), [str(number) for number in range(num_tgt)]
    assert flags_of(src, tgt) == ([] if is_usual else ["length"])
    assert flags_of(src, tgt, None) == []


def test_empty_and_copied_translations_are_flagged_unless_copies_are_common_in_the_corpus() -> None:
    assert flags_of([1], [], None) == ["empty"]
    assert flags_of([1], ["in"], USUAL) == ["copy"]
    assert flags_of([1], ["in"], None) == ["copy"]
    assert flags_of([1], ["in"], USUAL._replace(share_copied=0.5)) == []
    assert flags_of([1], ["in"], USUAL, src=" in ") == ["copy"]
    assert flags_of([1], ["In"], USUAL) == []


def numbers(pieces: list[str]) -> list[int]:
    """The word number of each piece; every piece has exactly one word."""
    words = number_words(pieces)
    assert all(len(own) == 1 for own in words)
    return [own.start for own in words]


def test_pieces_are_numbered_by_the_words_they_belong_to() -> None:
    assert numbers(["▁a", "▁b", "c", "d", "▁e"]) == [0, 1, 1, 1, 2]
    assert numbers(["b", "c", "▁e"]) == [0, 0, 1]
    assert numbers(["▁", "x", "▁y"]) == [0, 0, 1]
    assert number_words([]) == []


def test_space_pieces_do_not_count_as_words_of_their_own() -> None:
    assert numbers(["▁a", "▁", "▁", "▁b", "▁"]) == [0, 1, 1, 1, 1]
    assert numbers(["▁", "▁a", "▁", "b"]) == [0, 0, 1, 1]
    assert number_words(["▁", "▁"]) == [range(0), range(0)]
    weights_TS, one = torch.ones(4, 1), [range(1)]
    assert align_words(weights_TS, one, ["▁a", "▁", "▁b", "▁"]) == [Link(0, 0), Link(0, 1)]
    assert align_words(weights_TS, one, ["▁", "▁"]) == []


def test_characters_of_scripts_without_spaces_are_words_with_their_combining_marks() -> None:
    text = "你好，世界 ab กี่คน Python3が好き"
    bounds = [place for place, is_start in enumerate(word_starts(text)) if is_start]
    words = [text[i:j].strip() for i, j in pairwise([*bounds, len(text)])]
    assert words == [*"你好，世界", "ab", "กี่", "ค", "น", "Python3", *"が好き"]
    assert word_starts("") == []
    pieces = ["▁你好", "，", "世", "界。", "<0xE4>", "<0xBD>", "<0xA0>", "x", "▁y", "z"]
    bounds = [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7), (6, 7), (6, 7), (7, 8), (8, 9), (8, 9)]
    assert number_words(pieces) == [range(*own) for own in bounds]


def test_all_words_of_a_piece_get_alignment_links() -> None:
    src, tgt = ["▁hello", ",", "▁wor", "ld"], ["▁你好", "，", "世", "界"]
    weights_TS = torch.tensor(
        [
            [0.7, 0.1, 0.1, 0.1],
            [0.6, 0.4, 0.0, 0.0],
            [0.4, 0.0, 0.3, 0.3],
            [0.0, 0.0, 0.0, 1.0],
        ]
    )
    links = align_words(weights_TS, number_words(src), tgt)
    assert links == [Link(0, 0), Link(0, 1), Link(0, 2), Link(1, 3), Link(1, 4)]
    weights_TS = torch.tensor(
        [[0.7, 0.2, 0.1, 0.0], [0.5, 0.3, 0.1, 0.1], [0.0, 0.0, 0.3, 0.7], [0.0, 0.0, 0.2, 0.8]]
    )
    links = align_words(weights_TS, number_words(tgt), src)
    assert links == [Link(0, 0), Link(1, 0), Link(4, 1)]


def test_a_target_word_is_aligned_to_the_source_word_with_the_most_attention() -> None:
    src, tgt = ["▁the", "▁do", "g"], ["▁der", "▁Hu", "nd"]
    weights_TS = torch.tensor(
        [
            [0.60, 0.20, 0.10, 0.10],
            [0.35, 0.30, 0.25, 0.10],  # alone "do" gets less than "the", but with "g" more
            [0.30, 0.10, 0.50, 0.10],
            [0.00, 0.00, 0.00, 1.00],  # eos
        ]
    )
    assert align_words(weights_TS, number_words(src), tgt) == [Link(0, 0), Link(1, 1)]
    assert align_words(weights_TS, [range(5, 6), range(6, 7), range(6, 7)], tgt) == [
        Link(5, 0),
        Link(6, 1),
    ]
    assert align_words(weights_TS, number_words(src), []) == []
    assert align_words(weights_TS, [], tgt) == []


def translation(text: str, log_probs: list[float], **others: object) -> Translation:
    pieces = [*(f"▁{word}" for word in text.split()), "</s>"]
    log_prob = sum(log_probs)
    log_probs_of = tuple(log_probs)
    return Translation(text, tuple(pieces), log_probs_of, log_prob, log_prob / 2, **others)  # type: ignore[arg-type]


def test_joined_parts_form_one_translation_with_consecutively_numbered_target_words() -> None:
    first = translation("x y", [-1.0, -2.0, -3.0], alignment=(Link(0, 1), Link(1, 0)))
    second = translation("z", [-4.0, -5.0], alignment=(Link(4, 0),), flags=("limit",))
    whole = join([first, second])
    assert whole.text == "x y z"
    assert whole.tokens == ("▁x", "▁y", "</s>", "▁z", "</s>")
    assert whole.token_log_probs == (-1.0, -2.0, -3.0, -4.0, -5.0)
    assert whole.log_prob == -15.0
    assert whole.score == pytest.approx((3 * -3.0 + 2 * -4.5) / 5)
    assert whole.alignment == (Link(0, 1), Link(1, 0), Link(4, 2))
    assert whole.flags == ("limit",)
    assert join([first]) is first


def test_a_no_break_space_does_not_divide_target_words_in_alignment_links() -> None:
    first = translation("x\u00a0!", [-1.0], alignment=(Link(0, 0),))
    second = translation("z", [-1.0], alignment=(Link(1, 0),))
    assert join([first, second]).alignment == (Link(0, 0), Link(1, 1))


def test_a_part_that_begins_with_an_unknown_character_has_its_own_first_word() -> None:
    first = translation(" \u2047 x", [-1.0], alignment=(Link(0, 0), Link(1, 1)))
    second = translation(" \u2047 z", [-1.0], alignment=(Link(2, 0), Link(3, 1)))
    assert join([first, second]).alignment == tuple(Link(word, word) for word in range(4))


def test_joined_alignments_count_chinese_target_words_by_character() -> None:
    first = translation("你好", [-1.0], alignment=(Link(0, 0), Link(0, 1)))
    second = translation("z", [-1.0], alignment=(Link(1, 0),))
    assert join([first, second]).alignment == (Link(0, 0), Link(0, 1), Link(1, 2))


@pytest.mark.parametrize(
    ("parts", "text", "links"),
    [
        (["你好。", "再见！"], "你好。再见！", [0, 3]),
        (["你好。”", "“再见"], "你好。”“再见", [0, 2]),
        (["去1号。", "2月"], "去1号。2月", [0, 3]),
        (["はい。", "", "OK."], "はい。OK.", [0, None, 2]),
        (["สวัสดี", "ครับ"], "สวัสดี ครับ", [0, 4]),
        (["OK.", "你好"], "OK. 你好", [0, 1]),
    ],
)
def test_parts_in_chinese_or_japanese_are_joined_without_a_space(
    parts: list[str], text: str, links: list[int | None]
) -> None:
    found = [
        translation(part, [-1.0], alignment=(Link(number, 0),) if part else ())
        for number, part in enumerate(parts)
    ]
    whole = join(found)
    assert whole.text == text
    firsts = [Link(row, link) for row, link in enumerate(links) if link is not None]
    assert list(whole.alignment or ()) == firsts


def test_joining_parts_counts_the_words_of_each_character_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_counted = 0

    def counting(text: str) -> list[bool]:
        nonlocal num_counted
        num_counted += len(text)
        return word_starts(text)

    monkeypatch.setattr(formats, "word_starts", counting)
    parts = [translation("a b", [-1.0], alignment=(Link(row, 1),)) for row in range(50)]
    whole = join(parts)
    assert whole.alignment == tuple(Link(row, 2 * row + 1) for row in range(50))
    assert num_counted == len(whole.text)
    num_counted = 0
    assert join([replace(part, alignment=None) for part in parts]).alignment is None
    assert num_counted == 0


FOUND = TranslatedLine(
    7,
    "in\there",
    [
        translation("out\tthere", [-0.5, -0.25], alignment=(Link(0, 0),), flags=("copy", "loop")),
        translation("about", [-1.0, -1.0], alignment=()),
    ],
)


def test_text_output_has_num_best_lines_padded_with_empty_lines() -> None:
    assert list(write(FOUND, "text", 1)) == ["out\tthere"]
    assert list(write(FOUND, "text", 3)) == ["out\tthere", "about", ""]
    assert list(write(TranslatedLine(1, "", [NOTHING]), "text", 2)) == ["", ""]


def test_tsv_output_has_six_columns_even_if_the_text_has_tabs() -> None:
    assert list(write(FOUND, "tsv", 2)) == [
        "7\t1\t-0.375000\t-0.750000\tcopy,loop\tout there",
        "7\t2\t-1.000000\t-2.000000\t\tabout",
    ]


def test_jsonl_output_is_one_object_per_input_line() -> None:
    (text,) = write(FOUND, "jsonl", 1)
    assert json.loads(text) == {
        "line": 7,
        "source": "in\there",
        "translation": "out\tthere",
        "score": -0.375,
        "log_prob": -0.75,
        "tokens": ["▁out", "▁there", "</s>"],
        "token_log_probs": [-0.5, -0.25],
        "alignment": [[0, 0]],
        "flags": ["copy", "loop"],
    }
    (text,) = write(FOUND, "jsonl", 2)
    tree = json.loads(text)
    assert [best["translation"] for best in tree["n_best"]] == ["out\tthere", "about"]
    assert tree["translation"] == "out\tthere"


def test_an_alignment_is_written_in_pharaoh_format() -> None:
    assert as_pharaoh([Link(0, 1), Link(12, 3)]) == "0-1 12-3"
    assert as_pharaoh([]) == as_pharaoh(None) == ""
