"""Repeats and leaks found by hashes equal those found by comparing the lines themselves."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.audit import duplicates
from mtrain.audit.duplicates import Leaks, PairHashes
from mtrain.audit.features import LINE, Hashes, PairWindow, Records

SIDES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=40)
OR_BLANK = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=40)  # 0 is blank
Sides = list[tuple[int, int]]


def hashes(values: list[int]) -> Hashes:
    return np.array(values, np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def records(values: list[int]) -> Records:
    lines = np.zeros(len(values), LINE)
    lines["hash"] = hashes(values)
    return lines


def windows(pairs: Sides) -> Iterator[PairWindow]:
    for first in range(0, len(pairs), 7):
        part = pairs[first : first + 7]
        src, tgt = [src for src, _ in part], [tgt for _, tgt in part]
        yield PairWindow(records(src), records(tgt), first)


@pytest.mark.parametrize("pass_pairs", [1000, 5])
@given(pairs=OR_BLANK, dropped=st.sets(st.tuples(st.integers(1, 6), st.integers(1, 4))))
def test_repeats_found_by_hashes_equal_those_found_with_dictionaries(
    pass_pairs: int, pairs: Sides, dropped: set[tuple[int, int]]
) -> None:
    is_dropped = np.array([pair in dropped for pair in pairs], bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_PASS_PAIRS", pass_pairs)
        found = duplicates.find(lambda: windows(pairs), is_dropped)
    first_pair: dict[tuple[int, int], int] = {}
    first_src: dict[int, int] = {}
    of_pair, of_src = [], []
    for number, (src, tgt) in enumerate(pairs, start=1):
        of_pair.append(first_pair.get((src, tgt), 0))
        is_other = src in first_src and tgt > 0 and (src, tgt) not in first_pair
        of_src.append(first_src[src] if is_other else 0)
        if src and tgt:
            first_pair.setdefault((src, tgt), number)
            if (src, tgt) not in dropped:
                first_src.setdefault(src, number)
    assert found.of_pair.tolist() == of_pair
    assert found.of_src.tolist() == of_src


def pair_hashes(pairs: Sides) -> PairHashes:
    return PairHashes.of(hashes([src for src, _ in pairs]), hashes([tgt for _, tgt in pairs]))


@given(SIDES, SIDES)
def test_leaks_found_by_hashes_equal_those_found_by_direct_comparison(
    held_out: Sides, train: Sides
) -> None:
    leaks = Leaks(pair_hashes(held_out), pair_hashes([(0, 0)] * len(held_out)))
    marks: list[bool] = []
    pair_marks: list[bool] = []
    for first in range(0, len(train), 7):
        part = train[first : first + 7]
        is_held, is_held_pair = leaks.look_up(
            pair_hashes(part), pair_hashes([(0, 0)] * len(part)), first
        )
        marks += is_held.tolist()
        pair_marks += is_held_pair.tolist()
    sources, targets = {src for src, _ in held_out}, {tgt for _, tgt in held_out}
    assert marks == [src in sources or tgt in targets for src, tgt in train]
    assert pair_marks == [pair in held_out for pair in train]
    for occurrences, lines, other in zip(
        leaks.occurrences(),
        ([s for s, _ in held_out], [t for _, t in held_out], held_out),
        ([s for s, _ in train], [t for _, t in train], train),
        strict=True,
    ):
        times, exact_times, first_pairs, _ = occurrences
        assert times.tolist() == [other.count(line) for line in lines]
        assert exact_times.tolist() == times.tolist()
        expected = []
        for line in lines:
            numbers = [number for number, found in enumerate(other) if found == line]
            beside = [number for number in numbers if other is train or not pair_marks[number]]
            expected.append(next(iter(beside or numbers), -1))
        assert first_pairs.tolist() == expected


def test_a_key_match_is_not_counted_as_exact_and_the_first_exact_match_is_preferred() -> None:
    leaks = Leaks(pair_hashes([(1, 1), (2, 2)]), pair_hashes([(3, 3), (4, 4)]))
    leaks.look_up(pair_hashes([(5, 5), (1, 1), (6, 6)]), pair_hashes([(3, 3), (3, 3), (4, 4)]), 7)
    for times, exact_times, first_pairs, _ in leaks.occurrences():
        assert times.tolist() == [2, 1]
        assert exact_times.tolist() == [1, 0]
        assert first_pairs.tolist() == [8, 9]


@pytest.mark.parametrize("key", [1, 0])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_side_is_first_found_beside_another_one_even_if_that_match_is_not_exact(
    order: tuple[int, int], key: int
) -> None:
    leaks = Leaks(pair_hashes([(1, 1)]), pair_hashes([(key, key)]))
    exact, keys = [(1, 1), (2, 2)], [(key, key), (1, 3)]
    for number, row in enumerate(order):
        leaks.look_up(pair_hashes([exact[row]]), pair_hashes([keys[row]]), number)
    (_, _, of_src, _), _, (_, _, of_pair, _) = leaks.occurrences()
    assert of_src.tolist() == [order.index(key)]
    assert of_pair.tolist() == [order.index(0)]


def test_a_line_with_a_zero_hash_is_never_a_leak() -> None:
    nothing = pair_hashes([(0, 0)])
    leaks = Leaks(nothing, nothing)
    assert leaks.look_up(nothing, nothing, 0)[0].tolist() == [False]
    assert [times.tolist() for times, *_ in leaks.occurrences()] == [[0]] * 3
