"""The probabilities of the words of a translation."""

from __future__ import annotations

import math

import pytest

from mtrain.decode.formats import Translation, join
from mtrain.serve.words import cut_words, word_probs


def translation(text: str, pieces: str, log_probs: list[float]) -> Translation:
    return Translation(text, (*pieces.split(), "</s>"), (*log_probs, -0.5))


def probs(whole: Translation) -> list[float]:
    return word_probs(whole, len(cut_words(whole.text)))


def exp(*log_probs: float) -> list[float]:
    return [pytest.approx(math.exp(log_prob), abs=1e-4) for log_prob in log_probs]


def test_the_probability_of_a_word_is_the_product_of_those_of_its_pieces() -> None:
    found = translation("Ein Hund bellt", "▁Ein ▁Hu nd ▁ bellt", [-0.1, -0.2, -1, -3, -0.5])
    assert probs(found) == exp(-0.1, -1.2, -3.5)
    assert word_probs(Translation("Ein", ("▁Ein", "</s>")), 1) == []


def test_an_unknown_piece_is_a_word_of_its_own() -> None:
    found = translation("Ein \u2047  Hund bellt", "▁Ein <unk> ▁Hund ▁bellt", [-0.1, -0.2, -1, -3])
    assert probs(found) == exp(-0.1, -0.2, -1, -3)
    found = translation(" \u2047  Hund", "<unk> ▁Hund", [-0.2, -1])
    assert probs(found) == exp(-0.2, -1)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (("你好。", "▁你好 。"), ("再见", "▁ 再见"), [-1, -1, -2, -7, -7]),
        (("好。”", "▁好 。”"), ("OK 好", "▁OK ▁好"), [-1, -5, -4]),
        (("好。 ", "▁好 。 ▁"), ("OK", "▁OK"), [-1, -5, -3]),
        (("好。", "▁好 <0xE3> <0x80> <0x82>"), ("OK", "▁OK"), [-1, -12]),
        (("好。", "▁好 。"), ("", ""), [-1, -2]),
        (("OK.", "▁O K."), ("a b", "▁a ▁b"), [-3, -3, -4]),
    ],
)
def test_words_are_numbered_over_the_parts_of_a_long_line_as_they_are_joined(
    first: tuple[str, str], second: tuple[str, str], expected: list[float]
) -> None:
    """A part may continue the last word of the part before it."""
    parts = [
        translation(*first, [-1, -2, -3, -4][: len(first[1].split())]),
        translation(*second, [-3, -4][: len(second[1].split())]),
    ]
    assert probs(join(parts)) == exp(*expected)
