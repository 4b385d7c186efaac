"""An epoch of several corpora: each has its share, and all its pairs are used equally often."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.config.corpora import weight_of
from mtrain.data.mixture import Mixture, MixtureCorpus, apportion

Given = tuple[int, int]  # a shard and a row


def numbered(sizes: list[list[int]], weights: list[float]) -> list[MixtureCorpus]:
    tables = itertools.count()
    return [
        MixtureCorpus([next(tables) for _ in own], own, weight)
        for own, weight in zip(sizes, weights, strict=True)
    ]


def window(mixture: Mixture, epoch: int, number: int) -> list[Given]:
    takes = mixture.select(epoch, number)
    return [(take.shard, row) for take in takes for row in take.rows.tolist()]


def epoch(mixture: Mixture, number: int) -> list[Given]:
    windows = (window(mixture, number, own) for own in range(mixture.num_windows))
    return list(itertools.chain(*windows))


corpora = st.lists(
    st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.floats(0.1, 10)),
    min_size=1,
    max_size=3,
)


@given(corpora=corpora, window_pairs=st.integers(1, 80), seed=st.integers(0, 9))
def test_each_corpus_has_its_share_of_every_window_and_its_pairs_are_drawn_equally_often(
    corpora: list[tuple[list[int], float]], window_pairs: int, seed: int
) -> None:
    sizes, weights = (list(own) for own in zip(*corpora, strict=True))
    parts = numbered(sizes, weights)
    mixture = Mixture(parts, seed, window_pairs)
    assert mixture.num_pairs == sum(mixture.counts) == sum(map(sum, sizes))
    total: Counter[Given] = Counter()
    for number in range(3):
        pairs = epoch(mixture, number)
        total.update(pairs)
        for own, count in zip(parts, mixture.counts, strict=True):
            assert sum(table in own.shards for table, _ in pairs) == count
            share = mixture.num_pairs * own.weight / sum(weights)
            assert abs(count - share) < 1
            times = [
                total[table, row]
                for table, size in zip(own.shards, own.sizes, strict=True)
                for row in range(size)
            ]
            assert max(times) - min(times) <= 1
            assert sum(times) == (number + 1) * count
    for number in range(mixture.num_windows):
        inside = window(mixture, 1, number)
        assert len(inside) == mixture.firsts[number + 1] - mixture.firsts[number]
        assert len(inside) <= window_pairs + len(parts)
        for own, count in zip(parts, mixture.counts, strict=True):
            found = sum(table in own.shards for table, _ in inside)
            assert abs(found - count / mixture.num_windows) < 1


@given(corpora=corpora, window_pairs=st.integers(1, 80))
def test_window_at_returns_the_window_that_contains_a_position(
    corpora: list[tuple[list[int], float]], window_pairs: int
) -> None:
    sizes, weights = (list(own) for own in zip(*corpora, strict=True))
    mixture = Mixture(numbered(sizes, weights), 1, window_pairs)
    for place in range(mixture.num_pairs):
        number = mixture.window_at(place)
        assert mixture.firsts[number] <= place < mixture.firsts[number + 1]


def test_one_corpus_in_one_window_gives_all_its_pairs_in_order() -> None:
    mixture = Mixture(numbered([[3, 2, 4]], [7.0]), 1, 9)
    in_order = [(table, row) for table, size in enumerate([3, 2, 4]) for row in range(size)]
    assert mixture.num_windows == 1
    assert epoch(mixture, 0) == epoch(mixture, 5) == in_order


def test_a_window_reads_few_shards_and_another_epoch_groups_the_shards_differently() -> None:
    mixture = Mixture(numbered([[100] * 20], [1.0]), 1, 500)
    touched = [[take.shard for take in mixture.select(0, number)] for number in range(4)]
    assert [len(own) for own in touched] == [5] * 4
    assert sorted(itertools.chain(*touched)) == list(range(20))
    assert touched != [[take.shard for take in mixture.select(1, number)] for number in range(4)]
    assert touched != [sorted(range(first, first + 5)) for first in range(0, 20, 5)]


def test_two_windows_that_share_a_shard_both_draw_rows_from_the_whole_shard() -> None:
    mixture = Mixture(numbered([[1000]], [1.0]), 1, 500)
    first, second = (np.concatenate([own.rows for own in mixture.select(0, n)]) for n in (0, 1))
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(1000))
    assert 300 < np.median(first) < 700
    assert 300 < np.median(second) < 700


def test_the_rows_of_a_window_depend_on_the_seed_and_are_reproducible() -> None:
    def rows(seed: int) -> list[Given]:
        return window(Mixture(numbered([[1000]], [1.0]), seed, 500), 0, 0)

    assert rows(1) == rows(1) != rows(2)


def test_an_oversampled_corpus_repeats_each_of_its_pairs_equally_often() -> None:
    mixture = Mixture(numbered([[3], [997]], [9.0, 1.0]), 1, 1000)
    counts = Counter(epoch(mixture, 0))
    assert [counts[0, row] for row in range(3)] == [300, 300, 300]
    assert sum(count for (table, _), count in counts.items() if table == 1) == 100


def test_apportion_is_exact_for_sizes_of_billions_of_pairs() -> None:
    sizes = [10**9 + 7, 3 * 10**9 + 1, 5]
    assert apportion(sum(sizes), [float(size) for size in sizes]) == sizes


@pytest.mark.parametrize(
    ("temperature", "shares"),
    [(None, [0.9, 0.1]), (1.0, [0.9, 0.1]), (2.0, [0.75, 0.25]), (1e9, [0.5, 0.5])],
)
def test_a_higher_temperature_moves_shares_from_proportional_to_size_to_equal(
    temperature: float | None, shares: list[float]
) -> None:
    weights = [weight_of(size, None, temperature) for size in (900, 100)]
    assert [weight / sum(weights) for weight in weights] == pytest.approx(shares, abs=1e-6)
    assert weight_of(900, 3.0, temperature) == 3.0
