"""Training data: every pair exactly once per epoch, in a reproducible order."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from builders import SRC_LINES, TGT_LINES, vocabularies
from encoded_pairs import (
    BATCH_TOKENS,
    NUM_PAIRS,
    BatchAndPosition,
    EncodedPair,
    Pair,
    assert_continues,
    encoded_pairs,
    epoch,
    pairs_in,
    pairs_of,
    take_batches,
    texts_of,
    training_data,
    write_pairs,
    write_shards,
    written,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.data.batch import Batch, Position, plan_batches
from mtrain.errors import RunError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_shards(tmp_path, encoded_pairs())


@pytest.fixture
def text_directory(tmp_path: Path) -> Path:
    tokenizer = vocabularies()
    rows = zip(
        tokenizer.encode_src(SRC_LINES), tokenizer.tgt.encode(TGT_LINES), SRC_LINES, TGT_LINES,
        strict=True,
    )  # fmt: skip
    return write_shards(tmp_path, [EncodedPair(*row) for row in rows])


# An epoch


@pytest.mark.parametrize("number", [0, 1, 7])
def test_an_epoch_has_every_pair_exactly_once(number, directory):
    batches = pairs_in(epoch(training_data(directory), number))
    assert sorted(itertools.chain(*batches)) == sorted(written())


def test_pair_and_token_counts_equal_those_of_an_epoch(directory):
    data = training_data(directory)
    batches = epoch(data, 0)
    assert len(data) == NUM_PAIRS == sum(len(batch.src_BS) for batch in batches)
    assert data.num_src_tokens == sum(int(batch.src_keep_BS.sum()) for batch in batches)
    assert data.num_tgt_tokens == sum(batch.num_tgt_tokens for batch in batches)
    assert data.num_src_tokens == sum(len(pair.src) for pair in encoded_pairs())
    assert data.num_tgt_tokens == sum(len(pair.tgt) + 1 for pair in encoded_pairs())


@pytest.mark.parametrize("batch_tokens", [20, 64, 1000])
def test_padded_batches_stay_within_batch_tokens_on_both_sides_and_fill_most_of_it(
    batch_tokens, directory
):
    sizes = []
    for batch in epoch(training_data(directory), 0, batch_tokens):
        cells = max(batch.src_BS.numel(), batch.tgt_in_BT.numel())
        assert cells <= batch_tokens
        sizes.append(cells)
    assert np.mean(sizes) > 0.6 * batch_tokens


def test_a_pair_longer_than_batch_tokens_gets_a_batch_of_its_own(directory):
    batches = epoch(training_data(directory), 0, batch_tokens=8)
    over = [b for b in batches if max(b.src_BS.numel(), b.tgt_in_BT.numel()) > 8]
    assert over
    assert all(len(batch.src_BS) == 1 for batch in over)
    assert sorted(itertools.chain(*pairs_in(batches))) == sorted(written())


def test_batches_have_pairs_of_similar_length(directory):
    def longer_sides(batch: list[Pair]) -> list[int]:
        return [max(len(src), len(tgt) + 1) for src, tgt in batch]

    batches = pairs_in(epoch(training_data(directory), 0))
    by_length = sorted(map(longer_sides, batches), key=lambda sides: (min(sides), max(sides)))
    for shorter, following in itertools.pairwise(by_length):
        assert max(shorter) <= min(following)


def test_the_batches_of_an_epoch_are_not_sorted_by_length(directory):
    batches = epoch(training_data(directory), 0)
    lengths = [max(batch.src_BS.shape[1], batch.tgt_in_BT.shape[1]) for batch in batches]
    assert lengths != sorted(lengths)
    assert lengths != sorted(lengths, reverse=True)


# Reproducibility and resuming


def test_the_same_seed_and_epoch_give_the_same_batches(directory):
    first, again = training_data(directory), training_data(directory)
    epoch(again, 0)  # reading another epoch first must not matter
    assert pairs_in(epoch(first, 3)) == pairs_in(epoch(again, 3))


def test_another_epoch_has_other_batches(directory):
    data = training_data(directory)
    zero, one = pairs_in(epoch(data, 0)), pairs_in(epoch(data, 1))
    assert zero != one
    assert {frozenset(batch) for batch in zero} != {frozenset(batch) for batch in one}


def test_another_seed_gives_other_batches(directory):
    first, other = training_data(directory, seed=1), training_data(directory, seed=2)
    assert pairs_in(epoch(first, 0)) != pairs_in(epoch(other, 0))


def test_resuming_at_a_position_gives_exactly_the_batches_that_follow_it(directory):
    data = training_data(directory)
    assert_continues(data, 2 * data.plan(BATCH_TOKENS).num_batches + 3)


def test_positions_count_the_batches_of_each_epoch(directory):
    data = training_data(directory)
    first, second = len(epoch(data, 0)), len(epoch(data, 1))
    positions = [item.after for item in take_batches(data, Position(), first + second)]
    expected = [Position(0, batch) for batch in range(1, first)] + [Position(1, 0)]
    expected += [Position(1, batch) for batch in range(1, second)] + [Position(2, 0)]
    assert positions == expected


# The plan


@pytest.mark.parametrize("batch_tokens", [BATCH_TOKENS // 2, 4 * BATCH_TOKENS])
def test_another_batch_size_resumes_at_the_same_batch_number_and_the_next_epoch_is_whole(
    directory, batch_tokens
):
    data = training_data(directory)
    (*_, (_, stop)) = take_batches(data, Position(), 20)
    own, following = (pairs_in(epoch(data, number, batch_tokens)) for number in (0, 1))
    rest = own[stop.batch :]
    assert (rest == []) == (batch_tokens > BATCH_TOKENS)
    count = len(rest) + len(following)
    batches = itertools.islice(data.batches(batch_tokens, stop), count)
    assert pairs_in([batch for batch, _ in batches]) == rest + following
    assert sorted(itertools.chain(*following)) == sorted(itertools.chain(*own)) == sorted(written())


def test_the_plan_has_the_batch_count_and_padding_share_of_the_first_epoch(directory):
    data = training_data(directory)
    batches = epoch(data, 0)
    plan = data.plan(BATCH_TOKENS)
    assert plan.num_batches == len(batches)
    cells = sum(batch.src_BS.numel() + batch.tgt_in_BT.numel() for batch in batches)
    kept = sum(int(batch.src_keep_BS.sum() + batch.tgt_keep_BT.sum()) for batch in batches)
    assert plan.padding == pytest.approx(1 - kept / cells, rel=1e-12)
    assert 0 < plan.padding < 0.4


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=80),
    batch_tokens=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
@settings(derandomize=True, database=None, deadline=None, max_examples=150)
def test_plan_batches_puts_pairs_of_any_lengths_into_batches_within_the_budget(
    lengths, batch_tokens, seed
):
    src, tgt = (np.array(side, dtype=np.int32) for side in zip(*lengths, strict=True))
    batches = plan_batches(src, tgt, batch_tokens, np.random.default_rng(seed))
    assert sorted(itertools.chain(*(rows.tolist() for rows in batches))) == list(range(len(src)))
    for rows in batches:
        longest = max(src[rows].max(), tgt[rows].max())
        assert len(rows) == 1 or len(rows) * longest <= batch_tokens


def test_padding_is_below_7_percent_even_if_source_and_target_lengths_are_independent():
    """Sorted by the longer side and then by the source, 17% of these batches would be padding."""
    src, tgt = np.random.default_rng(1).integers(1, 41, (2, 4000), dtype=np.int32)
    batches = plan_batches(src, tgt, 400, np.random.default_rng(0))
    cells = sum(len(rows) * int(src[rows].max() + tgt[rows].max()) for rows in batches)
    assert 1 - int(src.sum() + tgt.sum()) / cells < 0.07


# Files


def test_pairs_with_an_empty_target_are_read_back(tmp_path):
    eos = vocabularies().src.eos
    pairs = [EncodedPair([7, eos], [], None, None), EncodedPair([eos], [8, 9], None, None)]
    write_shards(tmp_path, pairs)
    (batch,) = epoch(training_data(tmp_path), 0)
    assert sorted(pairs_of(batch)) == [((eos,), (8, 9)), ((7, eos), ())]


def test_more_pairs_than_arrow_writes_at_once_are_read_back(tmp_path):
    count, eos = 2500, vocabularies().src.eos
    keys = [(4 + number // 400, 4 + number % 400) for number in range(count)]
    pairs = (EncodedPair([*key, eos], list(key), None, None) for key in keys)
    write_shards(tmp_path, pairs)
    assert len(training_data(tmp_path)) == count
    batches = pairs_in(epoch(training_data(tmp_path), 0, batch_tokens=3000))
    assert sorted(itertools.chain(*batches)) == [((*key, eos), key) for key in keys]


def test_text_is_stored_with_the_ids_only_if_requested(tmp_path):
    pair = EncodedPair([7, 3], [8], "seven", "eight")
    for with_text in (True, False):
        path = tmp_path / f"{with_text}.arrow"
        write_pairs(path, [pair], with_text)
        assert (b"seven" in path.read_bytes()) == with_text


def test_a_missing_manifest_is_an_error_that_says_to_restore_it(tmp_path):
    with pytest.raises(RunError, match=r"shards\.json: is missing; restore it"):
        training_data(tmp_path)


# Sampling


def sorted_pairs(batches: list[Batch]) -> list[Pair]:
    return sorted(itertools.chain(*pairs_in(batches)))


def test_epochs_with_sampled_segmentations_have_the_same_text(text_directory):
    data = training_data(text_directory, sampling_alpha=0.3)
    for number in range(3):
        assert texts_of(epoch(data, number)) == sorted(zip(SRC_LINES, TGT_LINES, strict=True))


def test_sampled_segmentations_of_an_epoch_are_reproducible(text_directory):
    first, again = (training_data(text_directory, sampling_alpha=0.3) for _ in range(2))
    epoch(again, 4)
    assert pairs_in(epoch(first, 2)) == pairs_in(epoch(again, 2))


def test_sampled_segmentations_differ_between_epochs_and_seeds(text_directory):
    data = training_data(text_directory, sampling_alpha=0.3)
    other = training_data(text_directory, seed=2, sampling_alpha=0.3)
    plain = training_data(text_directory)
    everything = [sorted_pairs(epoch(data, number)) for number in range(3)]
    everything += [sorted_pairs(epoch(other, 0)), sorted_pairs(epoch(plain, 0))]
    for one, another in itertools.combinations(everything, 2):
        assert one != another


def test_without_sampling_all_epochs_have_the_same_segmentations(text_directory):
    data = training_data(text_directory)
    assert sorted_pairs(epoch(data, 0)) == sorted_pairs(epoch(data, 1))


def test_batches_of_sampled_segmentations_stay_within_batch_tokens(text_directory):
    for batch in epoch(training_data(text_directory, sampling_alpha=0.3), 0, batch_tokens=120):
        assert max(batch.src_BS.numel(), batch.tgt_in_BT.numel()) <= 120


def test_source_and_target_with_the_same_text_mostly_get_different_segmentations(tmp_path):
    # the same text on both sides: one seed for both would always segment it alike
    tokenizer = vocabularies()
    ids = tokenizer.tgt.encode(TGT_LINES)
    pairs = [
        EncodedPair([*row, tokenizer.src.eos], row, line, line)
        for row, line in zip(ids, TGT_LINES, strict=True)
    ]
    write_shards(tmp_path, pairs)
    sampled = sorted_pairs(epoch(training_data(tmp_path, sampling_alpha=0.3), 0))
    assert sum(src[:-1] != tgt for src, tgt in sampled) > len(sampled) / 2


def test_resuming_in_a_sampled_epoch_gives_exactly_the_batches_that_follow(text_directory):
    data = training_data(text_directory, sampling_alpha=0.3)
    straight = [
        BatchAndPosition(*item) for item in itertools.islice(data.batches(500, Position()), 20)
    ]
    assert straight[-1].after.epoch > 0
    for stop in (1, 9, 15, 19):
        resumed = [
            BatchAndPosition(*item)
            for item in itertools.islice(data.batches(500, straight[stop - 1].after), 20 - stop)
        ]
        assert [item.after for item in resumed] == [item.after for item in straight[stop:]]
        assert pairs_in([item.batch for item in resumed]) == pairs_in(
            [item.batch for item in straight[stop:]]
        )
