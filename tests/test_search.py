"""Hold greedy and beam search to exhaustive search, to plain Python, and to each other."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from builders import Prefixes, TableModel, left_keep, model_config, transformer
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.model import Transformer
from mtrain.search import Hypothesis, Limits, beam, greedy, length_penalty

# The special ids are scattered on purpose: search must know none but those it is told.
NUM_PIECES, EOS, PAD, BOS = 6, 1, 3, 4
NEVER = [PAD, BOS]
WRITABLE = [0, 2, 5]
ALPHAS = [0.0, 0.6, 1.0, 2.0]
WIDE = 2 * len(WRITABLE) ** 4  # more places than there are targets of the lengths used here


def limits(max_lengths: Sequence[int], never: list[int] = NEVER) -> Limits:
    return Limits(BOS, EOS, never, torch.tensor(max_lengths))


def run_greedy(
    model: TableModel, sentences: Sequence[int], max_lengths: Sequence[int], alpha: float = 0.0
) -> list[Hypothesis]:
    return greedy(model.step, Prefixes(sentences), limits(max_lengths), alpha)


def run_beam(
    model: TableModel,
    sentences: Sequence[int],
    max_lengths: Sequence[int],
    width: int,
    alpha: float = 0.0,
) -> list[Hypothesis]:
    return beam(model.step, Prefixes(sentences), limits(max_lengths), width, alpha)


def forced(model: TableModel, sentence: int, ids: Sequence[int]) -> float:
    """The log-probability of a target that is read out piece by piece, eos included."""
    target = [*ids, EOS]
    return sum(
        model.log_probs(sentence, [BOS, *target[:place]])[piece]
        for place, piece in enumerate(target)
    )


class Found(NamedTuple):
    score: float
    ids: tuple[int, ...]


def exhaustive(model: TableModel, sentence: int, max_length: int, alpha: float) -> list[Found]:
    """Every target there is, best first."""
    every = [
        Found(forced(model, sentence, ids) / ((5 + length + 1) / 6) ** alpha, ids)
        for length in range(max_length + 1)
        for ids in itertools.product(WRITABLE, repeat=length)
    ]
    return sorted(every, reverse=True)


def plain_beam(
    model: TableModel, sentence: int, max_length: int, width: int, alpha: float
) -> Found:
    """Beam search in lists: finished hypotheses keep their places, and nothing stops early."""
    still_open: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Found] = []
    while still_open and len(finished) < width:
        continued = []
        for log_prob, ids in still_open:
            log_probs = model.log_probs(sentence, [BOS, *ids])
            pieces = [EOS] if len(ids) == max_length else [EOS, *WRITABLE]
            continued += [(log_prob + log_probs[piece], (*ids, piece)) for piece in pieces]
        survivors = sorted(continued, reverse=True)[: width - len(finished)]
        still_open = [(log_prob, ids) for log_prob, ids in survivors if ids[-1] != EOS]
        finished += [
            Found(log_prob / length_penalty(len(ids), alpha), ids[:-1])
            for log_prob, ids in survivors
            if ids[-1] == EOS
        ]
    return max(finished)


def ids_of(hypotheses: list[Hypothesis]) -> list[list[int]]:
    return [hypothesis.ids for hypothesis in hypotheses]


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert ids_of(found) == ids_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-5)
        assert one.score == pytest.approx(other.score, abs=1e-5)


# Against other ways to search


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_beam_of_one_is_greedy_search(alpha):
    sentences, max_lengths = list(range(12)), [0, 1, 2, 3, 4, 5] * 2
    model = TableModel(NUM_PIECES)
    by_beam = run_beam(model, sentences, max_lengths, width=1, alpha=alpha)
    assert_same(by_beam, run_greedy(model, sentences, max_lengths, alpha))


def test_greedy_search_takes_the_most_likely_piece_at_every_step():
    model = TableModel(NUM_PIECES)
    found = run_greedy(model, range(10), [5] * 10)
    assert len({len(hypothesis.ids) for hypothesis in found}) > 2
    for sentence, hypothesis in enumerate(found):
        target = [*hypothesis.ids, EOS]
        for place, piece in enumerate(target[:5]):
            log_probs = model.log_probs(sentence, [BOS, *target[:place]])
            assert piece == max([EOS, *WRITABLE], key=lambda candidate: log_probs[candidate])


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_as_wide_as_the_space_finds_the_best_target_of_all(alpha, seed):
    model = TableModel(NUM_PIECES, seed)
    max_lengths = [3, 0, 2, 1, 3, 3]
    found = run_beam(model, range(6), max_lengths, WIDE, alpha)
    for sentence, (max_length, hypothesis) in enumerate(zip(max_lengths, found, strict=True)):
        best = exhaustive(model, sentence, max_length, alpha)[0]
        assert tuple(hypothesis.ids) == best.ids
        assert hypothesis.score == pytest.approx(best.score, abs=1e-5)


def test_the_tests_above_tell_searches_apart():
    # the best target changes with alpha, and greedy search does not find it
    model, sentences = TableModel(NUM_PIECES), range(12)
    by_alpha = [ids_of(run_beam(model, sentences, [3] * 12, WIDE, alpha)) for alpha in ALPHAS]
    assert by_alpha[0] != by_alpha[-1]
    assert ids_of(run_greedy(model, sentences, [3] * 12)) != by_alpha[0]


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 7),
    max_lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    alpha=st.sampled_from(ALPHAS),
)
@settings(derandomize=True, database=None, deadline=None, max_examples=60)
def test_a_beam_is_the_beam_written_in_plain_python(seed, width, max_lengths, alpha):
    model = TableModel(NUM_PIECES, seed)
    found = run_beam(model, range(len(max_lengths)), max_lengths, width, alpha)
    for sentence, (max_length, hypothesis) in enumerate(zip(max_lengths, found, strict=True)):
        expected = plain_beam(model, sentence, max_length, width, alpha)
        assert tuple(hypothesis.ids) == expected.ids
        assert hypothesis.score == pytest.approx(expected.score, abs=1e-5)


def test_a_beam_may_be_wider_than_the_vocabulary():
    model = TableModel(NUM_PIECES)
    found = run_beam(model, range(4), [2] * 4, width=NUM_PIECES + 5, alpha=0.6)
    for sentence, hypothesis in enumerate(found):
        assert tuple(hypothesis.ids) == exhaustive(model, sentence, 2, 0.6)[0].ids


def test_a_beam_stops_when_no_open_hypothesis_can_still_win():
    # eos is near certain at once: reading on to the limit would be wasted
    model = TableModel(NUM_PIECES)
    model.offsets[EOS] = 30.0
    found = run_beam(model, [0], [1000], width=3, alpha=0.6)
    assert found[0].ids == []
    assert model.num_rows_read < 3 * 20


# Neighbours and order


@pytest.mark.parametrize("width", [1, 3])
def test_the_result_of_a_sentence_does_not_depend_on_its_neighbours(width):
    model = TableModel(NUM_PIECES)
    sentences, max_lengths = [7, 2, 9, 4, 5], [4, 0, 6, 1, 3]
    together = run_beam(model, sentences, max_lengths, width, alpha=0.6)
    alone = [
        run_beam(model, [sentence], [max_length], width, alpha=0.6)[0]
        for sentence, max_length in zip(sentences, max_lengths, strict=True)
    ]
    assert_same(together, alone)


def test_greedy_results_do_not_depend_on_neighbours():
    model = TableModel(NUM_PIECES)
    sentences, max_lengths = [7, 2, 9, 4, 5], [4, 0, 6, 1, 3]
    alone = [
        run_greedy(model, [sentence], [max_length])[0]
        for sentence, max_length in zip(sentences, max_lengths, strict=True)
    ]
    assert_same(run_greedy(model, sentences, max_lengths), alone)


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_translations_come_in_the_order_of_their_sentences(search):
    model = TableModel(NUM_PIECES)
    model.offsets[EOS] = -3.0  # long enough to be told apart
    sentences, max_lengths = list(range(8)), [5, 0, 3, 1, 4, 2, 5, 1]

    def translate(order: Sequence[int]) -> list[list[int]]:
        picked = [sentences[index] for index in order], [max_lengths[index] for index in order]
        if search == "greedy":
            return ids_of(run_greedy(model, *picked))
        return ids_of(run_beam(model, *picked, width=3))

    forward = translate(range(8))
    assert len({tuple(ids) for ids in forward}) > 4
    assert translate(range(7, -1, -1)) == forward[::-1]


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_no_sentence_gives_no_translation(search):
    model = TableModel(NUM_PIECES)
    none: list[int] = []
    empty = Limits(BOS, EOS, NEVER, torch.tensor(none, dtype=torch.long))
    if search == "greedy":
        assert greedy(model.step, Prefixes(none), empty) == []
    else:
        assert beam(model.step, Prefixes(none), empty, 3) == []


# Limits


@pytest.mark.parametrize("width", [0, 1, 2, 3])
def test_the_output_limit_is_respected_and_eos_is_forced_and_paid_for(width):
    # eos is never among the three best, so that every target runs into its limit
    model = TableModel(NUM_PIECES)
    model.offsets[EOS] = -20.0
    max_lengths = [0, 1, 3, 5]
    found = (
        run_beam(model, range(4), max_lengths, width)
        if width
        else run_greedy(model, range(4), max_lengths)
    )
    assert [len(hypothesis.ids) for hypothesis in found] == max_lengths
    for sentence, hypothesis in enumerate(found):
        assert hypothesis.log_prob < -15
        assert hypothesis.log_prob == pytest.approx(
            forced(model, sentence, hypothesis.ids), abs=1e-4
        )


@pytest.mark.parametrize("width", [0, 1, 4])
def test_ids_that_are_never_written_are_not_written(width):
    # they are the likeliest of all, and still count in the normalisation
    model = TableModel(NUM_PIECES)
    model.offsets[NEVER] = 10.0
    sentences, max_lengths = range(6), [4] * 6
    found = (
        run_beam(model, sentences, max_lengths, width)
        if width
        else run_greedy(model, sentences, max_lengths)
    )
    assert not {piece for hypothesis in found for piece in hypothesis.ids} & {*NEVER, EOS}
    for sentence, hypothesis in enumerate(found):
        expected = forced(model, sentence, hypothesis.ids)
        assert hypothesis.log_prob == pytest.approx(expected, abs=1e-4)
        assert expected < -5


def test_with_nothing_forbidden_any_piece_may_be_written():
    model = TableModel(NUM_PIECES)
    model.offsets[PAD] = 10.0
    found = beam(model.step, Prefixes([0]), limits([3], never=[]), 2)
    assert found[0].ids == [PAD] * 3


# Scores


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("width", [0, 1, 3])
def test_a_score_is_the_log_prob_over_the_length_penalty(alpha, width):
    model = TableModel(NUM_PIECES)
    sentences, max_lengths = range(8), [5] * 8
    found = (
        run_beam(model, sentences, max_lengths, width, alpha)
        if width
        else run_greedy(model, sentences, max_lengths, alpha)
    )
    for sentence, hypothesis in enumerate(found):
        assert hypothesis.log_prob == pytest.approx(
            forced(model, sentence, hypothesis.ids), abs=1e-5
        )
        penalty = length_penalty(len(hypothesis.ids) + 1, alpha)
        assert hypothesis.score == pytest.approx(hypothesis.log_prob / penalty, rel=1e-6)


def test_the_length_penalty_is_its_formula():
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 1.0) == 2.0
    assert length_penalty(100, 0.0) == 1.0
    assert length_penalty(19, 0.5) == pytest.approx(2.0)
    assert length_penalty(30, 0.6) == pytest.approx(math.exp(0.6 * math.log(35 / 6)))


# With a real model

LENGTHS = [5, 2, 7, 3]
MODEL_BOS, MODEL_EOS, MODEL_NEVER = 2, 3, [0, 2]
SEEDS = [3, 23, 25]  # models that end some sentences early and others at the limit


def peaked_transformer(seed: int) -> Transformer:
    """A tiny model that is sure of itself, so that hypotheses differ."""
    model = transformer(model_config(num_encoder_layers=1), 12, 12, seed=seed)
    with torch.no_grad():
        model.output.weight *= 4
        model.output.weight[MODEL_EOS] *= 0.5
    return model


def source(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    src_BS = torch.randint(4, 12, (len(lengths), max(lengths)), generator=rng)
    keep_BS = left_keep(lengths)
    return src_BS.masked_fill(~keep_BS, 0), keep_BS


@torch.no_grad()
def translate(
    model: Transformer, src_BS: torch.Tensor, keep_BS: torch.Tensor, width: int
) -> list[Hypothesis]:
    state = model.start(model.encode(src_BS, keep_BS), keep_BS)
    bounds = Limits(MODEL_BOS, MODEL_EOS, MODEL_NEVER, keep_BS.sum(1) + 4)
    if width == 0:
        return greedy(model.step, state, bounds, 0.6)
    return beam(model.step, state, bounds, width, 0.6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [0, 1, 3, 5])
def test_a_batch_of_different_lengths_translates_as_its_sentences_do_alone(seed, width):
    model = peaked_transformer(seed)
    src_BS, keep_BS = source(LENGTHS)
    together = translate(model, src_BS, keep_BS, width)
    alone = [
        translate(model, src_BS[row : row + 1, :length], keep_BS[row : row + 1, :length], width)[0]
        for row, length in enumerate(LENGTHS)
    ]
    assert_same(together, alone)


def test_the_models_above_translate_in_many_ways():
    found = [
        tuple(hypothesis.ids)
        for seed in SEEDS
        for hypothesis in translate(peaked_transformer(seed), *source(LENGTHS), 3)
    ]
    assert len(set(found)) > 6
    assert len({len(ids) for ids in found}) > 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_beam_of_one_is_greedy_search_with_a_real_model(seed):
    model = peaked_transformer(seed)
    assert_same(translate(model, *source(LENGTHS), 1), translate(model, *source(LENGTHS), 0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [0, 4])
@torch.no_grad()
def test_a_log_prob_is_that_of_the_whole_target_decoded_at_once(seed, width):
    model = peaked_transformer(seed)
    src_BS, keep_BS = source(LENGTHS)
    for row, hypothesis in enumerate(translate(model, src_BS, keep_BS, width)):
        target = [*hypothesis.ids, MODEL_EOS]
        tgt_in_1T = torch.tensor([[MODEL_BOS, *hypothesis.ids]])
        states = model(src_BS[row : row + 1], keep_BS[row : row + 1], tgt_in_1T)
        log_probs_TV = model.output(states)[0].log_softmax(-1)
        expected = float(log_probs_TV[torch.arange(len(target)), target].sum())
        assert hypothesis.log_prob == pytest.approx(expected, abs=1e-4)
