"""Misalignment: the CUSUM test equals a loop over pairs, and shifts in real text are found."""

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from builders import DEMO_DIR
from hypothesis import example, given
from hypothesis import strategies as st

from mtrain.audit import misalignment
from mtrain.audit.features import PairWindow, Records, measure
from mtrain.audit.misalignment import MAX_OFFSET, Shift


def demo_records(side: str, count: int) -> Records:
    return measure((DEMO_DIR / f"train.{side}").read_text("utf-8").split("\n")[:count]).lines


SRC, TGT = demo_records("en", 3000), demo_records("de", 3000)


def reader(src: Records, tgt: Records, size: int = 1000) -> Callable[[], Iterator[PairWindow]]:
    def read() -> Iterator[PairWindow]:
        for first in range(0, len(src), size):
            yield PairWindow(src[first : first + size], tgt[first : first + size], first)

    return read


def rises(evidence: list[float], size: int) -> list[tuple[int, int]]:
    found = misalignment._CusumTest(offset=1)
    for first in range(0, len(evidence), size):
        found.feed(np.array(evidence[first : first + size]), first)
    return [(shift.first, shift.last) for shift in found.finish()]


def plain_rises(evidence: list[float]) -> list[tuple[int, int]]:
    """Compute what `rises` does in a loop over pairs."""
    found, height, start, peak, peak_at = [], 0.0, 0, 0.0, -1
    for pair, step in enumerate(evidence):
        height += step
        if peak:
            if height > peak:
                peak, peak_at = height, pair
            if height <= peak - misalignment._THRESHOLD:
                found.append((start, peak_at))
                height, start, peak = 0.0, pair + 1, 0.0
        elif height <= 0:
            height, start = 0.0, pair + 1
        elif height >= misalignment._THRESHOLD:
            peak, peak_at = height, pair
    return found + ([(start, peak_at)] if peak else [])


@example([12, 12, 12, -12, -12, -12, 3, -4, 12, 12, 12, -3], 7)  # two rises
@given(st.lists(st.integers(-12, 12), max_size=60), st.sampled_from([1, 7, 100]))
def test_the_cusum_test_equals_a_loop_for_every_window_size(steps: list[int], size: int) -> None:
    evidence = [float(step) for step in steps]
    assert rises(evidence, size) == plain_rises(evidence)


@pytest.mark.parametrize("size", [5, 99, 697])
def test_each_window_includes_max_offset_targets_before_and_after_it(size: int) -> None:
    tgt = TGT[:700]
    edge = np.zeros(MAX_OFFSET, TGT.dtype)
    whole = np.concatenate([edge, tgt, edge])
    for window in misalignment._overlapping(reader(SRC[:700], tgt, size)()):
        end = window.first + len(window.src) + 2 * MAX_OFFSET
        assert (window.tgt == whole[window.first : end]).all()


def test_aligned_pairs_have_no_shift() -> None:
    assert misalignment.find(reader(SRC, TGT)) == []


@pytest.mark.parametrize("size", [37, 1000, 5000])
@pytest.mark.parametrize("offset", [-MAX_OFFSET, -1, 1, 2, MAX_OFFSET])
def test_a_shift_is_found_with_its_offset_for_every_window_size(offset: int, size: int) -> None:
    begin, end = 1200, 1500
    if offset > 0:  # targets are inserted, and lost again further on
        parts = [TGT[:begin], TGT[:offset], TGT[begin:end], TGT[end + offset :]]
    else:
        parts = [TGT[:begin], TGT[begin - offset : end], TGT[:-offset], TGT[end:]]
    tgt = np.concatenate(parts)
    (found,) = misalignment.find(reader(SRC, tgt, size))
    assert found.offset == offset
    assert abs(found.first - begin) <= 4
    assert abs(found.last - end) <= 8
    assert found.evidence > 25


def test_two_shifts_are_found_separately_and_the_second_may_reach_the_last_pair() -> None:
    tgt = np.concatenate([TGT[:500], TGT[501:900], TGT[:1], TGT[900:2000], TGT[2001:], TGT[:1]])
    first, second = misalignment.find(reader(SRC, tgt))
    assert (first.offset, second.offset) == (-1, -1)
    assert abs(first.first - 500) <= 3 and abs(first.last - 899) <= 5
    assert abs(second.first - 2000) <= 3 and second.last >= 2990


def test_shuffled_pairs_are_not_reported_as_a_shift() -> None:
    order = list(range(1000, 2000))
    random.Random(1).shuffle(order)
    tgt = np.concatenate([TGT[:1000], TGT[order], TGT[2000:]])
    assert misalignment.find(reader(SRC, tgt)) == []


def test_stretches_of_several_lost_lines_are_all_found_though_their_ends_overlap() -> None:
    tgt = np.concatenate([TGT[:700], TGT[701:1400], TGT[1401:2100], TGT[2101:]])
    found = misalignment.find(reader(SRC[: len(tgt)], tgt))
    assert [shift.offset for shift in found] == [-1, -2, -3]
    firsts, lasts = ([getattr(shift, end) for shift in found] for end in ("first", "last"))
    assert np.abs(np.subtract(firsts, [700, 1399, 2098])).max() <= 8
    assert np.abs(np.subtract(lasts, [1398, 2097, len(tgt) - 1])).max() <= 8


def test_a_stretch_that_overlaps_a_stronger_one_is_cut_or_dropped_if_little_is_left() -> None:
    strong, cut, weak = Shift(5, 50, 1, 90.0), Shift(41, 80, 2, 40.0), Shift(31, 70, 3, 26.0)
    assert misalignment._strongest([cut, strong]) == [strong, Shift(51, 80, 2, 30.0)]
    assert misalignment._strongest([weak, strong]) == [strong]
    assert misalignment._strongest([Shift(10, 20, 4, 80.0), strong]) == [strong]


STRETCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=12)


@given(STRETCHES)
def test_kept_stretches_do_not_overlap_and_lie_within_those_that_were_found(
    stretches: list[tuple[int, int]],
) -> None:
    shifts = [
        Shift(first, first + length, number, float(100 - number))
        for number, (first, length) in enumerate(stretches)
    ]
    kept = misalignment._strongest(shifts[::-1])
    assert all(left.last < right.first for left, right in itertools.pairwise(kept))
    assert shifts[:1] == [shift for shift in kept if shift.offset == 0]  # the strongest, whole
    for shift in kept:
        whole = shifts[shift.offset]
        assert whole.first <= shift.first <= shift.last <= whole.last
