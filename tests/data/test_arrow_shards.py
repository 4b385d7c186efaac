"""Several Arrow shards of pairs: read window by window, checked when opened, sought directly."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from builders import SRC_LINES, TGT_LINES, vocabularies
from encoded_pairs import (
    BATCH_TOKENS,
    NUM_PAIRS,
    BatchAndPosition,
    EncodedPair,
    assert_continues,
    encoded_pairs,
    epoch,
    pairs_in,
    texts_of,
    training_data,
    write_shards,
    written,
)

from mtrain.data import arrow_shards, loader
from mtrain.data.arrow_shards import ShardSet
from mtrain.data.batch import Batch, Position
from mtrain.data.loader import TrainingData, read_ids
from mtrain.errors import RunError

WINDOW_PAIRS = 37
SAMPLED_BATCH_TOKENS = 256  # few batches: to resume in a window samples all of it


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "WINDOW_PAIRS", WINDOW_PAIRS)
    monkeypatch.setattr(loader, "SAMPLED_WINDOW_PAIRS", 30)


@pytest.fixture
def directory(tmp_path: Path, small_windows: None) -> Path:
    return write_shards(tmp_path, encoded_pairs(), [20, 21, 50, 60, 85])


@pytest.fixture
def text_directory(tmp_path: Path, small_windows: None) -> Path:
    tokenizer = vocabularies()
    ids = zip(tokenizer.encode_src(SRC_LINES), tokenizer.tgt.encode(TGT_LINES), strict=True)
    texts = zip(SRC_LINES, TGT_LINES, strict=True)
    pairs = [EncodedPair(*own, *text) for own, text in zip(ids, texts, strict=True)]
    return write_shards(tmp_path, pairs, [len(pairs) // 3, len(pairs) // 2])


def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the numbers of the shards that are opened."""
    numbers: list[int] = []
    open_ = ShardSet.open

    def noting(tables: ShardSet, number: int) -> arrow_shards.ShardTable:
        numbers.append(number)
        return open_(tables, number)

    monkeypatch.setattr(ShardSet, "open", noting)
    return numbers


def test_several_shards_in_one_window_give_the_same_batches_as_one_shard(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    write_shards(tmp_path / "one", encoded_pairs())
    several = write_shards(tmp_path, encoded_pairs(), [20, 21, 50])
    one, other = training_data(tmp_path / "one"), training_data(several)
    assert one.plan(BATCH_TOKENS) == other.plan(BATCH_TOKENS)
    assert (one.num_src_tokens, one.num_tgt_tokens) == (other.num_src_tokens, other.num_tgt_tokens)
    for number in (0, 3):
        assert pairs_in(epoch(one, number)) == pairs_in(epoch(other, number))
    assert pairs_in(one.largest(BATCH_TOKENS)) == pairs_in(other.largest(BATCH_TOKENS))


@pytest.mark.parametrize("number", [0, 1, 6])
def test_an_epoch_of_several_windows_has_every_pair_exactly_once(
    directory: Path, number: int
) -> None:
    batches = pairs_in(epoch(training_data(directory), number))
    assert sorted(itertools.chain(*batches)) == sorted(written())


@pytest.mark.parametrize("batch_tokens", [20, 64, 1000])
def test_no_batch_of_any_window_exceeds_the_batches_that_largest_returns(
    directory: Path, batch_tokens: int
) -> None:
    def positions(batch: Batch) -> int:
        return batch.num_positions

    def scores(batch: Batch) -> int:
        src, tgt = batch.src_BS.shape[1], batch.tgt_in_BT.shape[1]
        return len(batch.src_BS) * (src**2 + tgt**2 + src * tgt)

    data = training_data(directory)
    largest = data.largest(batch_tokens)
    batches = [*epoch(data, 0, batch_tokens), *epoch(data, 1, batch_tokens)]
    for batch, size in zip(largest, (positions, scores), strict=True):
        assert size(batch) >= max(map(size, batches))
        assert max(batch.src_BS.numel(), batch.tgt_in_BT.numel()) <= batch_tokens


def test_resuming_at_a_position_of_any_window_gives_exactly_the_batches_that_follow_it(
    directory: Path,
) -> None:
    data = training_data(directory)
    count = len(epoch(data, 0)) + len(epoch(data, 1)) + 3
    assert_continues(data, count)


def test_seeking_the_last_batch_of_an_epoch_opens_only_some_of_the_shards_each_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = [BatchAndPosition(*own) for own in itertools.islice(
        training_data(directory).batches(BATCH_TOKENS, Position()), 200)]  # fmt: skip
    last = next(place for place, own in enumerate(straight) if own.after.epoch == 1)
    before = straight[last - 1].after
    assert before.epoch == 0
    assert before.batch > 60  # the third window begins there
    fresh = training_data(directory)
    numbers = opened(monkeypatch)
    batch, after = next(fresh.batches(BATCH_TOKENS, before))
    assert after == Position(1, 0)
    assert pairs_in([batch]) == pairs_in([straight[last].batch])
    assert len(numbers) == len(set(numbers)) < 5


def test_the_plan_and_the_first_batch_open_only_some_of_the_shards_each_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = opened(monkeypatch)
    data = training_data(directory)
    assert numbers == []
    data.plan(BATCH_TOKENS)
    data.largest(BATCH_TOKENS)
    touched = len(numbers)
    assert 0 < touched == len(set(numbers)) < 6
    next(data.batches(BATCH_TOKENS, Position()))
    assert len(numbers) == touched


def test_the_plan_of_several_windows_estimates_the_number_of_batches_within_three(
    directory: Path,
) -> None:
    data = training_data(directory)
    for batch_tokens in (20, 64, 200):
        counts = [len(epoch(data, number, batch_tokens)) for number in range(4)]
        assert abs(data.plan(batch_tokens).num_batches - np.mean(counts)) <= 3


def test_windows_with_sampled_segmentations_have_all_text_and_can_be_resumed(
    text_directory: Path,
) -> None:
    data = training_data(text_directory, sampling_alpha=0.3)
    assert data._mixture.num_windows > 1
    texts = sorted(zip(SRC_LINES, TGT_LINES, strict=True))
    assert texts_of(epoch(data, 0)) == texts_of(epoch(data, 1)) == texts
    assert sorted(pairs_in(epoch(data, 0))) != sorted(pairs_in(epoch(data, 1)))
    num_batches = len(epoch(data, 0, SAMPLED_BATCH_TOKENS))
    assert num_batches > data._mixture.num_windows
    most_of_a_window = math.ceil(num_batches / data._mixture.num_windows)
    assert_continues(data, 2 * num_batches, SAMPLED_BATCH_TOKENS, num_compared=most_of_a_window + 2)


def test_each_window_of_an_epoch_has_its_own_sampling_seed(text_directory: Path) -> None:
    data = training_data(text_directory, sampling_alpha=0.3)
    seeds = [data._open(0, number).seed for number in range(data._mixture.num_windows)]
    assert len({tuple(seed) for seed in seeds}) == len(seeds)


def test_a_mixture_draws_pairs_from_each_corpus_in_proportion_to_its_weight(
    tmp_path: Path, small_windows: None
) -> None:
    directory = write_shards(tmp_path, encoded_pairs(), [10], weights=[3.0, 1.0])
    data = training_data(directory)
    assert [own.num_in_epoch for own in data.shares] == [68, 22]
    assert data.format_shares() == [
        "data.train[0]: 75.6% of an epoch, each of its 10 pairs 6.8 times",
        "data.train[1]: 24.4% of an epoch, each of its 80 pairs 0.275 times",
    ]
    small = set(written()[:10])
    times: Counter[object] = Counter()
    for number in range(4):
        batches = epoch(data, number)
        times.update(itertools.chain(*pairs_in(batches)))
        assert sum(len(batch.src_BS) for batch in batches) == NUM_PAIRS == len(data)
    assert sum(count for pair, count in times.items() if pair in small) == 4 * 68
    assert {count for pair, count in times.items() if pair in small} <= {27, 28}
    assert {times[pair] for pair in written()[10:]} <= {1, 2}
    tokens = [sum(int(batch.src_keep_BS.sum()) for batch in epoch(data, n)) for n in range(8)]
    assert data.num_src_tokens == pytest.approx(np.mean(tokens), rel=0.05)
    assert_continues(data, 60)


def test_read_ids_gives_the_pairs_of_all_shards_in_order(directory: Path) -> None:
    found = [
        pair for block in read_ids(directory, vocabularies()) for pair in zip(*block, strict=True)
    ]
    written = [(pair.src, pair.tgt) for pair in encoded_pairs()]
    assert [(src.tolist(), tgt.tolist()) for src, tgt in found] == written
    assert sum(map(len, ShardSet(directory, vocabularies()).all())) == NUM_PAIRS


# Shards and their manifest


def assert_refused(directory: Path, message: str) -> None:
    for read in (lambda: list(TrainingData(directory, vocabularies(), 1).batches(64, Position())),
                 lambda: list(ShardSet(directory, vocabularies()).all())):  # fmt: skip
        with pytest.raises(RunError) as error:
            read()
        assert str(error.value) == message


def test_a_missing_shard_is_named_in_the_error(directory: Path) -> None:
    path = arrow_shards.shard_path(directory, 4)
    path.unlink()
    assert_refused(directory, f"{path}: is missing; restore it from a copy of the run.")


def test_a_shard_replaced_by_another_is_an_error(directory: Path) -> None:
    paths = [arrow_shards.shard_path(directory, number) for number in (0, 2)]
    paths[0].write_bytes(paths[1].read_bytes())
    message = f"{paths[0]}: must hold what shards.json says, but does not; restore both from a "
    with pytest.raises(RunError) as error:
        for _ in epoch(training_data(directory), 0):
            pass
    assert str(error.value) == message + "copy of the run."


PAGES = {
    "no page": lambda page: [],
    "no corpus": lambda page: page | {"corpora": []},
    "no table": lambda page: page | {"shards": []},
    "a corpus that is not there": lambda page: page | {"shards": [[1, 5, 9, 9]]},
    "a table without pairs": lambda page: page | {"shards": [*page["shards"], [0, 0, 0, 0]]},
    "another number of pairs": lambda page: page | {"shards": page["shards"][1:]},
    "a weight of nothing": lambda page: changed(page, "weight", 0.0),
    "a weight that is text": lambda page: changed(page, "weight", "1"),
    "a negative count": lambda page: changed(page, "lengths", [91, -1]),
    "no counts": lambda page: changed(page, "lengths", []),
}


def changed(page: dict[str, object], key: str, value: object) -> dict[str, object]:
    (corpus,) = page["corpora"]
    return page | {"corpora": [corpus | {key: value}]}


@pytest.mark.parametrize("change", PAGES.values(), ids=PAGES)
def test_an_invalid_manifest_is_a_one_line_error(directory: Path, change: object) -> None:
    path = directory / arrow_shards.MANIFEST_FILE
    path.write_text(json.dumps(change(json.loads(path.read_text("utf-8")))), encoding="utf-8")
    assert_refused(
        directory,
        f"{path}: must say what each table of pairs holds, but does not; restore it from a copy "
        "of the run.",
    )
