"""Hold the merges to what little ones come to by hand."""

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
def test_what_has_the_higher_score_is_merged_first_and_of_equals_the_left(scores, text, pieces):
    assert sample(scores, text) == pieces


@pytest.mark.parametrize(("alpha", "word"), [(0.0, ["ab"]), (1.0, ["a", "b"])])
def test_a_symbol_is_whole_and_merged_with_nothing_and_the_longest_is_taken(alpha, word):
    merges = Merges({"ab": -1.0, "ba": -2.0, "b.": -3.0}, ["b.", "b.b.", ".("])
    drawn = merges.sample("abb.b.abb.a.(", alpha, random.Random(1))
    assert drawn == [*word, "b.b.", *word, "b.", "a", ".("]


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_each_merge_is_left_out_with_the_probability_alpha(alpha):
    merges, rng, num_draws = Merges(ABC), random.Random(1), 10_000
    counts = Counter(tuple(merges.sample("abc", alpha, rng)) for _ in range(num_draws))
    made = 1 - alpha
    means = {
        ("abc",): made * made + alpha * made * made,  # ab, abc; or not ab, but bc, abc
        ("ab", "c"): made * alpha,
        ("a", "bc"): alpha * made * alpha,
        ("a", "b", "c"): alpha * alpha,
    }
    assert sum(means.values()) == pytest.approx(1)
    for pieces, mean in means.items():
        assert counts[pieces] / num_draws == pytest.approx(mean, abs=3 * (mean / num_draws) ** 0.5)


def test_draws_follow_from_the_seed():
    first, again, other = (sample(ABC, "abc" * 20, 0.4, seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("max_cached", [1, 20, 1000])
def test_what_was_sampled_before_changes_no_later_draw(monkeypatch, max_cached):
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
