"""Audit rules at their thresholds, on lines that are written for each rule."""

from collections.abc import Iterator

import numpy as np
import pytest

from mtrain.audit.features import PairWindow, measure
from mtrain.audit.rules import RULES, CorpusProfile, PairBlock, Rule, Severity, SideName, learn

BY_NAME = {rule.name: rule for rule in RULES}
LATIN, CYRILLIC = ["ten small dogs"] * 97, ["десять собак там"] * 97


def usual(src: list[str], tgt: list[str], is_bidirectional: bool = False) -> CorpusProfile:
    def windows() -> Iterator[PairWindow]:
        yield PairWindow(measure(src).lines, measure(tgt).lines, 0)

    return learn(windows(), 50, is_bidirectional)


def judge(name: str, src: str, tgt: str, of: CorpusProfile) -> SideName:
    none = np.zeros(1, np.uint32)
    lines = measure([src]).lines, measure([tgt]).lines
    return SideName(
        int(BY_NAME[name].judge(PairBlock(*lines, none, none, none > 0, none > 0), of)[0])
    )


def test_strange_and_swapped_scripts_are_judged_by_the_usual_scripts_of_each_side() -> None:
    of = usual(LATIN, CYRILLIC)
    assert judge("strange-script", "small dogs", "собаки", of) == SideName.NONE
    assert judge("strange-script", "small dogs", "small cats", of) == SideName.TGT
    assert judge("strange-script", "σκύλοι", "寿司", of) == SideName.BOTH
    assert judge("strange-script", "12 + 3", "...", of) == SideName.NONE
    assert judge("strange-script", "dogs ✔\ufe0f", "✔\ufe0f✔\ufe0f", of) == SideName.NONE
    assert judge("swapped", "собаки", "small dogs", of) == SideName.BOTH
    assert judge("strange-script", "собаки", "small dogs", of) == SideName.NONE
    assert judge("swapped", "small dogs", "small dogs", of) == SideName.NONE


@pytest.mark.parametrize(
    ("src", "tgt", "is_swapped"),
    [(-9, 9, True), (-3, 6, True), (-3, 4, False), (-9, 1, False), (-1, 9, False), (9, -9, False)],
)
def test_a_pair_is_swapped_only_if_the_language_scores_of_both_sides_say_so(
    src: float, tgt: float, is_swapped: bool
) -> None:
    lines = measure(["dogs"]).lines, measure(["cats"]).lines
    lines[0]["language"], lines[1]["language"] = src, tgt
    none = np.zeros(1, np.uint32)
    pairs = PairBlock(*lines, none, none, none > 0, none > 0)
    found = BY_NAME["swapped"].judge(pairs, usual(LATIN, LATIN))
    assert found[0] == (SideName.BOTH if is_swapped else SideName.NONE)


def test_a_script_that_seven_percent_of_the_lines_use_is_not_strange() -> None:
    mixed = [*LATIN[:90], *CYRILLIC[:7]]
    assert judge("strange-script", "собаки", "собаки", usual(mixed, CYRILLIC)) == SideName.NONE


def test_no_script_is_strange_on_a_side_whose_corpus_has_no_letters() -> None:
    for of in (usual([], []), usual(["12", ""], ["...", "3"])):
        assert judge("strange-script", "small dogs", "собаки", of) == SideName.NONE
        assert judge("swapped", "small dogs", "собаки", of) == SideName.NONE
    of = usual(["12"], CYRILLIC[:1])
    assert judge("strange-script", "small dogs", "small dogs", of) == SideName.TGT
    assert judge("swapped", "собаки", "small dogs", of) == SideName.NONE


def test_a_hiragana_corpus_accepts_kanji_and_katakana_but_a_kanji_corpus_not_hiragana() -> None:
    of = usual(["これはすしです"] * 97, LATIN)
    assert judge("strange-script", "東京都", "dogs", of) == SideName.NONE
    assert judge("strange-script", "コンピューター", "dogs", of) == SideName.NONE
    assert judge("strange-script", "собаки", "dogs", of) == SideName.SRC
    of = usual(["東京都東京"] * 97, LATIN)
    assert judge("strange-script", "これはすしです", "dogs", of) == SideName.SRC


@pytest.mark.parametrize(
    ("src", "tgt", "is_far"),
    [(10, 80, False), (10, 81, True), (100, 620, False), (100, 622, True), (100, 60, True),
     (100, 61, False), (10, 1, False), (0, 400, False)],
)  # fmt: skip
def test_a_length_ratio_over_three_times_the_usual_plus_slack_is_reported(
    src: int, tgt: int, is_far: bool
) -> None:
    of = usual(["a" * 10] * 5, ["b" * 20] * 5)
    assert of.ratios == [pytest.approx(2, rel=0.01)]
    assert (judge("length-ratio", "a" * src, "b" * tgt, of) == SideName.BOTH) == is_far


def test_a_copied_pair_has_identical_sides_that_contain_a_letter() -> None:
    of = usual(LATIN, LATIN)
    assert judge("copied", "dogs", "dogs", of) == SideName.BOTH
    assert judge("copied", "12 + 3", "12 + 3", of) == SideName.NONE
    assert judge("copied", "☀\ufe0f 25°", "☀\ufe0f 25°", of) == SideName.NONE
    assert judge("copied", "dogs", "Dogs", of) == SideName.NONE


def test_one_blank_side_is_reported_with_its_side_and_two_as_a_blank_pair() -> None:
    of = usual(LATIN, LATIN)
    assert judge("blank-side", "", "dogs", of) == SideName.SRC
    assert judge("blank-side", "dogs", " \u3000", of) == SideName.TGT
    assert judge("blank-side", "", " ", of) == SideName.NONE
    assert judge("blank-pair", "", " ", of) == SideName.BOTH
    assert judge("blank-side", "\u3000\u00a0\t\u2028", "dogs", of) == SideName.SRC
    assert judge("blank-side", ".", "0", of) == SideName.NONE


def test_no_words_is_reported_for_long_lines_of_which_over_half_is_not_letters() -> None:
    of = usual(LATIN, LATIN)
    assert judge("no-words", "abcd 1234", "abc 12345", of) == SideName.TGT
    assert judge("no-words", "(1) 23", "...", of) == SideName.NONE  # too short for the rule


def test_a_finding_is_a_note_up_to_the_usual_share_of_its_rule_and_then_a_warning() -> None:
    rule = Rule("x", "x", "x", BY_NAME["tab"].judge, usual_share=0.01)
    assert rule.severity_of(10, 1000) == Severity.NOTE
    assert rule.severity_of(11, 1000) == Severity.WARNING
    assert BY_NAME["blank-pair"].severity_of(1000, 1000) == Severity.NOTE
    assert BY_NAME["not-utf8"].severity_of(1, 1000) == Severity.ERROR


def test_rule_names_are_unique_and_each_advice_is_one_sentence() -> None:
    assert len(BY_NAME) == len(RULES)
    for advice in (own for rule in RULES for own in (rule.advice, rule.held_out_advice) if own):
        assert advice[0].isupper() and advice.endswith(".")
        assert ". " not in advice


def test_the_usual_length_ratio_of_an_empty_corpus_is_one() -> None:
    assert usual([], []).ratios == [1.0]
