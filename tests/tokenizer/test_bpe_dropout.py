"""BPE merges and BPE-dropout, on small examples worked out by hand."""

import random
from collections import Counter

import pytest

from mtrain.tokenizer import bpe_dropout
from mtrain.tokenizer.bpe_dropout import Merges

ABC = {"ab": -1.0, "abc": -2.0, "bc": -3.0}


def sample(scores, text, alpha=0.0, seed=1):
    return Merges(scores).sample(text, alpha, random.Random(seed))


@pytest.mark.parametrize(
    ("scores", "text", "pieces"),
    [
        (ABC, "abc", ["abc"]),
        ({"ab": -2.0, "bc": -1.0}, "abc", ["a", "bc"]),
        ({"ab": -1.0, "bc": -1.0}, "abc", ["ab", "c"]),
        ({"aa": -1.0, "aaaa": -2.0}, "aaaaa", ["aaaa", "a"]),
        ({"\u2581a": -1.0, "a\u2581": 0.0}, "\u2581a\u2581a", ["\u2581a", "\u2581a"]),
        ({}, "\u2581\u2581a\nb", ["\u2581", "\u2581", "a", "\n", "b"]),
        (ABC, "", []),
    ],
)
def test_the_pair_with_the_highest_score_is_merged_first_and_ties_go_to_the_leftmost(
    scores, text, pieces
):
    assert sample(scores, text) == pieces


@pytest.mark.parametrize(("alpha", "word"), [(0.0, ["ab"]), (1.0, ["a", "b"])])
def test_user_defined_symbols_are_never_split_or_merged_and_the_longest_match_wins(alpha, word):
    merges = Merges({"ab": -1.0, "ba": -2.0, "b.": -3.0}, ["b.", "b.b.", ".("])
    drawn = merges.sample("abb.b.abb.a.(", alpha, random.Random(1))
    assert drawn == [*word, "b.b.", *word, "b.", "a", ".("]


@pytest.mark.parametrize("max_length", [2, 32], ids=["longer", "cached"])
@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_each_merge_is_dropped_with_probability_alpha(alpha, max_length, monkeypatch):
    monkeypatch.setattr(bpe_dropout, "_MAX_LENGTH", max_length)
    merges, rng, num_draws = Merges(ABC), random.Random(1), 10_000
    counts = Counter(tuple(merges.sample("abc", alpha, rng)) for _ in range(num_draws))
    made = 1 - alpha
    means = {
        ("abc",): made * made + alpha * made * made,  # ab, abc; or drops ab, then bc, abc
        ("ab", "c"): made * alpha,
        ("a", "bc"): alpha * made * alpha,
        ("a", "b", "c"): alpha * alpha,
    }
    assert sum(means.values()) == pytest.approx(1)
    for pieces, mean in means.items():
        assert counts[pieces] / num_draws == pytest.approx(mean, abs=3 * (mean / num_draws) ** 0.5)


def test_a_long_text_without_spaces_is_not_cached():
    merges = Merges(ABC)
    assert merges.sample("abc" * 11, 0.0, random.Random(1)) == ["abc"] * 11
    assert merges.sample("abc" * 11, 1.0, random.Random(1)) == list("abc" * 11)
    assert not merges._plain and not merges._sampled


def test_samples_are_determined_by_the_seed():
    first, again, other = (sample(ABC, "abc" * 20, 0.4, seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("max_cached", [1, 20, 1000])
def test_earlier_samples_and_the_cache_size_do_not_change_later_samples(monkeypatch, max_cached):
    monkeypatch.setattr(bpe_dropout, "_MAX_CACHED", max_cached)
    used, rng = Merges(ABC), random.Random(7)
    words = ["".join(rng.choices("abc", k=rng.randrange(1, 9))) for _ in range(30)] * 3
    text = "\u2581".join(words)
    for seed in range(5):
        assert used.sample(text, 0.4, random.Random(seed)) == sample(ABC, text, 0.4, seed)
    one_by_one = random.Random(0)
    alone = [Merges(ABC).sample(word, 0.4, one_by_one) for word in words]
    together = random.Random(0)
    assert alone == [used.sample(word, 0.4, together) for word in words]
