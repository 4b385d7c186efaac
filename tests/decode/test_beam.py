"""Compare beam search and sampling with exhaustive search, plain Python, and each other."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from builders import Prefixes, TableModel, beam, left_keep, model_config, transformer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtrain.config.sections import ModelConfig
from mtrain.data.batch import pad_right
from mtrain.decode.beam import (
    NUM_GROUPS,
    Constraints,
    Hypothesis,
    NotFiniteError,
    RequestGroup,
    length_penalty,
)
from mtrain.decode.options import DecodingOptions, Sampling
from mtrain.decode.sampling import sample_steps
from mtrain.model.kv_cache import KVCache
from mtrain.model.transformer import Transformer
from mtrain.ops import native

# The special ids are unusual on purpose: a search must use only the ids that it is given.
NUM_PIECES, EOS, PAD, BOS = 6, 1, 3, 4
NEVER = [PAD, BOS]
WRITABLE = [0, 2, 5]
ALPHAS = [0.0, 0.6, 1.0, 2.0]
WIDE = 2 * len(WRITABLE) ** 4  # wider than the number of targets of the lengths used here
DTYPES = [torch.float32, torch.float64]  # float32 runs the compiled functions
SUM_OF = {torch.float32: 1e-5, torch.float64: 1e-9}  # tolerances for a sum of log-probabilities
of_each_type = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])

Item = TypeVar("Item")


def sample(
    step: Any,
    group: RequestGroup[Any],
    settings: Sampling,
    uniform_NT: torch.Tensor,
    length_alpha: float = 0.0,
) -> list[list[Hypothesis]]:
    """Sample targets until all have ended."""
    steps = sample_steps(step, group, settings, uniform_NT, length_alpha)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def beam_options(
    beam: int,
    length_alpha: float = 0.0,
    num_best: int = 1,
    early_stop: bool = False,
    with_scores: bool = True,
) -> DecodingOptions:
    return DecodingOptions(
        beam=beam,
        length_alpha=length_alpha,
        num_best=num_best,
        early_stop=early_stop,
        with_scores=with_scores,
    )


dtypes = st.sampled_from(DTYPES)
alphas = st.sampled_from(ALPHAS)
group_sizes = st.lists(st.integers(1, 3), max_size=5)
prefixes = st.lists(st.sampled_from([*WRITABLE, PAD]), max_size=4).map(tuple)


class Task(NamedTuple):
    """One sentence, with the length limit and the prefix of its target."""

    sentence: int
    max_length: int
    prefix: tuple[int, ...] = ()


def tasks_of(max_lengths: Iterable[int]) -> list[Task]:
    return [Task(sentence, length) for sentence, length in enumerate(max_lengths)]


def limits_of(
    tasks: Sequence[Task], never: list[int] = NEVER, no_repeat_ngram: int = 0
) -> Constraints:
    prefix_BP = None
    if any(task.prefix for task in tasks):
        prefix_BP = pad_right([list(task.prefix) for task in tasks], -1).numpy()
    max_lengths_B = np.array([task.max_length for task in tasks], np.int64)
    return Constraints(BOS, EOS, never, max_lengths_B, prefix_BP, no_repeat_ngram)


def group_of(
    tasks: Sequence[Task], never: list[int] = NEVER, no_repeat_ngram: int = 0
) -> RequestGroup[Prefixes]:
    bounds = limits_of(tasks, never, no_repeat_ngram)
    return RequestGroup(Prefixes([task.sentence for task in tasks]), bounds)


def cut(items: Sequence[Item], sizes: Sequence[int]) -> Iterator[Sequence[Item]]:
    """Cut into parts of these sizes, and one part of the remaining items."""
    first = 0
    for size in [*sizes, len(items)]:
        if first < len(items):
            yield items[first : first + size]
        first += size


def all_by_beam(
    model: TableModel,
    tasks: Sequence[Task],
    wanted: DecodingOptions,
    no_repeat_ngram: int = 0,
    sizes: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """The best targets of each sentence; sentences are admitted in groups of these sizes."""
    groups = (group_of(part, no_repeat_ngram=no_repeat_ngram) for part in cut(tasks, sizes))
    return beam((getattr(model, "decode_step", None) or model.step), groups, wanted)


def by_beam(
    model: TableModel, max_lengths: Sequence[int], width: int, alpha: float = 0.0
) -> list[Hypothesis]:
    """The best target of each sentence."""
    return [
        best for (best,) in all_by_beam(model, tasks_of(max_lengths), beam_options(width, alpha))
    ]


def all_by_sampling(
    model: TableModel,
    tasks: Sequence[Task],
    wanted: Sampling,
    uniform_NT: Tensor,
    no_repeat_ngram: int = 0,
) -> list[list[Hypothesis]]:
    group = group_of(tasks, no_repeat_ngram=no_repeat_ngram)
    return sample((getattr(model, "decode_step", None) or model.step), group, wanted, uniform_NT)


def uniform(num_rows: int, length: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(num_rows, length, generator=rng, dtype=torch.float64)


# Reference searches in plain Python


def forced(model: TableModel, sentence: int, ids: Sequence[int]) -> list[float]:
    """The log-probabilities of a given target, token by token, eos included."""
    target = [*ids, EOS]
    return [
        model.log_probs(sentence, [BOS, *target[:place]])[piece]
        for place, piece in enumerate(target)
    ]


class Found(NamedTuple):
    score: float
    ids: tuple[int, ...]


def exhaustive(model: TableModel, sentence: int, max_length: int, alpha: float) -> list[Found]:
    """All possible targets, best first."""
    every = [
        Found(sum(forced(model, sentence, ids)) / ((5 + length + 1) / 6) ** alpha, ids)
        for length in range(max_length + 1)
        for ids in itertools.product(WRITABLE, repeat=length)
    ]
    return sorted(every, reverse=True)


def repeats(ids: Sequence[int], n: int) -> bool:
    """Tell whether the last n-gram occurred before."""
    earlier = [tuple(ids[place : place + n]) for place in range(len(ids) - n)]
    return n > 0 and tuple(ids[-n:]) in earlier


def pieces_after(task: Task, ids: tuple[int, ...], n: int = 0) -> list[int]:
    """The tokens that may come next."""
    if len(ids) < len(task.prefix):
        return [task.prefix[len(ids)]]
    if len(ids) >= task.max_length:
        return [EOS]
    return [piece for piece in [EOS, *WRITABLE] if not repeats([*ids, piece], n)]


def plain_greedy(model: TableModel, task: Task, n: int = 0) -> tuple[int, ...]:
    """The best allowed token at every step."""
    ids: tuple[int, ...] = ()
    while EOS not in ids:
        log_probs = model.log_probs(task.sentence, [BOS, *ids])
        ids = (*ids, max(pieces_after(task, ids, n), key=lambda piece: log_probs[piece]))
    return ids[:-1]


def plain_beam(model: TableModel, task: Task, wanted: DecodingOptions, n: int = 0) -> list[Found]:
    """Beam search in lists: finished hypotheses keep their slots of the beam.

    It stops only when all slots are finished, unless `wanted.early_stop`.
    """
    still_open: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Found] = []
    while still_open:
        continued = []
        for log_prob, ids in still_open:
            log_probs = model.log_probs(task.sentence, [BOS, *ids])
            pieces = pieces_after(task, ids, n)
            continued += [(log_prob + log_probs[piece], (*ids, piece)) for piece in pieces]
        survivors = sorted(continued, reverse=True)[: wanted.beam - len(finished)]
        still_open = [(log_prob, ids) for log_prob, ids in survivors if ids[-1] != EOS]
        finished += [
            Found(log_prob / length_penalty(len(ids), wanted.length_alpha), ids[:-1])
            for log_prob, ids in survivors
            if ids[-1] == EOS
        ]
        finished.sort(reverse=True)
        if wanted.early_stop and len(finished) >= wanted.num_best:
            to_beat = finished[wanted.num_best - 1].score
            now = [
                log_prob / length_penalty(len(ids) + 1, wanted.length_alpha)
                for log_prob, ids in still_open
            ]
            if not any(score > to_beat for score in now):
                break
    return finished[: wanted.num_best]


def chances(
    model: TableModel, task: Task, ids: tuple[int, ...], wanted: Sampling, n: int = 0
) -> dict[int, float]:
    """The probability of each token that may be sampled next."""
    logits = model.logits(task.sentence, [BOS, *ids]).tolist()
    allowed = sorted(pieces_after(task, ids, n), key=lambda piece: -logits[piece])
    allowed = allowed[: wanted.top_k or None]
    weights = {piece: math.exp(logits[piece] / wanted.temperature) for piece in allowed}
    total, kept, sum_before = sum(weights.values()), {}, 0.0
    for piece, weight in weights.items():
        if sum_before < wanted.top_p * total:
            kept[piece] = weight
        sum_before += weight
    return {piece: weight / sum(kept.values()) for piece, weight in kept.items()}


def plain_sample(
    model: TableModel, task: Task, wanted: Sampling, uniforms: Sequence[float], n: int = 0
) -> tuple[int, ...]:
    """Sample by inverting the cumulative probabilities, in the order of the ids."""
    ids: tuple[int, ...] = ()
    for point in uniforms:
        shares = sorted(chances(model, task, ids, wanted, n).items())
        ends = itertools.accumulate(share for _, share in shares)
        piece = next(piece for (piece, _), end in zip(shares, ends, strict=True) if point < end)
        if piece == EOS:
            return ids
        ids = (*ids, piece)
    raise AssertionError("more pieces than numbers")


def ids_of(hypotheses: Iterable[Hypothesis]) -> list[tuple[int, ...]]:
    return [tuple(hypothesis.ids) for hypothesis in hypotheses]


def assert_same(
    found: Sequence[Hypothesis], expected: Sequence[Hypothesis], bound: float = 1e-5
) -> None:
    assert ids_of(found) == ids_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=bound)
        assert one.log_prob == pytest.approx(other.log_prob, abs=bound)
        assert one.score == pytest.approx(other.score, abs=bound)


def assert_found(
    found: Sequence[Hypothesis], expected: Sequence[Found], dtype: torch.dtype
) -> None:
    assert ids_of(found) == [one.ids for one in expected]
    scores = [one.score for one in expected]
    assert [one.score for one in found] == pytest.approx(scores, abs=SUM_OF[dtype])


def assert_adds_up(
    model: TableModel, sentence: int, found: Hypothesis, alpha: float, bound: float
) -> None:
    """Compare a hypothesis with the same given target, and its sums with their formulas."""
    assert found.log_probs == pytest.approx(forced(model, sentence, found.ids), abs=bound)
    assert found.log_prob == pytest.approx(math.fsum(found.log_probs), abs=1e-12)
    penalty = length_penalty(len(found.ids) + 1, alpha)
    assert found.score == pytest.approx(found.log_prob / penalty, rel=1e-12)


# Beam search against other searches


@of_each_type
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_beam_of_one_equals_greedy_search(alpha, dtype):
    """With and without early stopping, for any length penalty."""
    model, tasks = TableModel(NUM_PIECES, dtype=dtype), tasks_of([0, 1, 2, 3, 4, 5] * 4)
    greedy = [plain_greedy(model, task) for task in tasks]
    assert len({len(ids) for ids in greedy}) > 3
    for stops_early in (False, True):
        found = all_by_beam(model, tasks, beam_options(1, alpha, early_stop=stops_early))
        assert [ids_of(best) for best in found] == [[ids] for ids in greedy]


@of_each_type
@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("sizes", [(), (2, 1, 5)], ids=["together", "joining"])
def test_greedy_search_without_scores_finds_the_same_targets(n, sizes, dtype):
    """Also for targets that end at the limit, and with forced prefixes."""
    model = TableModel(NUM_PIECES, dtype=dtype)
    tasks = [*tasks_of([0, 1, 2, 3, 4, 5] * 4), Task(7, 4, (0, 2)), Task(8, 2, (5, 0, 0))]
    scored = all_by_beam(model, tasks, beam_options(1, 0.6), n, sizes)
    found = all_by_beam(model, tasks, beam_options(1, 0.6, with_scores=False), n, sizes)
    assert [ids_of(best) for best in found] == [ids_of(best) for best in scored]
    assert all(best.log_probs == [] for (best,) in found)
    assert all(math.isnan(best.score) and math.isnan(best.log_prob) for (best,) in found)


def test_a_beam_wider_than_one_returns_scores_even_if_with_scores_is_false():
    model, tasks = TableModel(NUM_PIECES), tasks_of([0, 1, 2, 3, 4, 5])
    found = all_by_beam(model, tasks, beam_options(3, 0.6, 2, with_scores=False))
    assert found == all_by_beam(model, tasks, beam_options(3, 0.6, 2))


@of_each_type
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_wider_than_the_number_of_targets_ranks_them_like_exhaustive_search(
    alpha, seed, dtype
):
    model, tasks = TableModel(NUM_PIECES, seed, dtype=dtype), tasks_of([3, 0, 2, 1, 3, 3])
    every = [exhaustive(model, *task[:2], alpha) for task in tasks]
    assert [len(ranked) for ranked in every] == [40, 1, 13, 4, 40, 40]
    for num_best in (1, 3, 40, WIDE):
        found = all_by_beam(model, tasks, beam_options(WIDE, alpha, num_best))
        for hypotheses, ranked in zip(found, every, strict=True):
            assert_found(hypotheses, ranked[:num_best], dtype)


def test_the_best_target_of_the_test_model_depends_on_alpha_and_greedy_search_misses_it():
    # the best target changes with alpha, and greedy search does not find it
    model, lengths = TableModel(NUM_PIECES), [3] * 12
    by_alpha = [ids_of(by_beam(model, lengths, WIDE, alpha)) for alpha in ALPHAS]
    assert by_alpha[0] != by_alpha[-1]
    assert [plain_greedy(model, task) for task in tasks_of(lengths)] != by_alpha[0]


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 7),
    share=st.floats(0, 1),
    max_lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    sizes=group_sizes,
    alpha=alphas,
    stops_early=st.booleans(),
    dtype=dtypes,
)
@settings(max_examples=80)
def test_beam_search_equals_the_plain_python_beam_search(
    seed, width, share, max_lengths, sizes, alpha, stops_early, dtype
):
    model, tasks = TableModel(NUM_PIECES, seed, dtype=dtype), tasks_of(max_lengths)
    wanted = beam_options(width, alpha, 1 + round(share * (width - 1)), stops_early)
    found = all_by_beam(model, tasks, wanted, sizes=sizes)
    for task, hypotheses in zip(tasks, found, strict=True):
        assert_found(hypotheses, plain_beam(model, task, wanted), dtype)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("alpha", [0.6, 2.0])
def test_beam_search_of_many_seeds_equals_the_plain_python_beam_search(
    width: int, alpha: float
) -> None:
    """If a finished hypothesis lost its slot, only a few sentences of many would differ."""
    for seed in range(20, 40):
        model, tasks = TableModel(NUM_PIECES, seed), tasks_of([5] * 4)
        for wanted in (beam_options(width, alpha), beam_options(width, alpha, 2)):
            found = all_by_beam(model, tasks, wanted)
            expected = [[one.ids for one in plain_beam(model, task, wanted)] for task in tasks]
            assert [ids_of(hypotheses) for hypotheses in found] == expected, seed


@pytest.mark.parametrize("num_best", [1, 2, 3])
def test_early_stopping_equals_plain_python_reads_no_more_rows_and_changes_some_results(num_best):
    """Compare with plain Python, and with a search that stops only when nothing can win."""
    num_changed = 0
    for seed in range(25):
        model, tasks = TableModel(NUM_PIECES, seed, spread=4.0), tasks_of([6] * 4)
        rows_read, ranked = [], []
        for stops_early in (True, False):
            wanted, before = beam_options(4, 2.0, num_best, stops_early), model.num_rows_read
            found = all_by_beam(model, tasks, wanted)
            for task, hypotheses in zip(tasks, found, strict=True):
                assert_found(hypotheses, plain_beam(model, task, wanted), torch.float32)
            ranked.append([ids_of(hypotheses) for hypotheses in found])
            rows_read.append(model.num_rows_read - before)
        assert rows_read[0] <= rows_read[1]
        num_changed += ranked[0] != ranked[1]
    assert num_changed > 0


def test_a_beam_may_be_wider_than_the_vocabulary():
    model = TableModel(NUM_PIECES)
    found = by_beam(model, [2] * 4, width=NUM_PIECES + 5, alpha=0.6)
    expected = [exhaustive(model, sentence, 2, 0.6)[0].ids for sentence in range(4)]
    assert ids_of(found) == expected


def test_a_beam_stops_when_no_open_hypothesis_can_still_win():
    # eos is nearly certain at once: decoding up to the limit would be wasted
    model = TableModel(NUM_PIECES)
    model.offsets[EOS] = 30.0
    assert by_beam(model, [1000], width=3, alpha=0.6)[0].ids == []
    assert model.num_rows_read < 3 * 20


def test_finished_hypotheses_and_sentences_are_not_decoded_further():
    # one token and eos: of each sentence, one hypothesis ends at once, and three take one more step
    model = TableModel(NUM_PIECES)
    model.offsets[EOS] = -2.0
    all_by_beam(model, tasks_of([1] * 5), beam_options(4, 0.0, num_best=4))
    assert model.num_rows_read == 5 + 5 * 3
    all_by_beam(model, tasks_of([0] * 5), beam_options(4))
    assert model.num_rows_read == 5 + 5 * 3 + 5


class Script:
    """A step function that returns one given row of logits per step, for any input."""

    def __init__(self, steps: list[list[float]]) -> None:
        self.steps = list(steps)

    def step(self, ids_N: Tensor, state: Prefixes) -> Tensor:
        row_V = torch.tensor(self.steps.pop(0), dtype=torch.float64)
        return row_V.expand(len(ids_N), -1)


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_the_search_waits_for_a_hypothesis_that_wins_by_a_relative_margin_of_1e_9(alpha):
    """The bound on reachable scores is not rounded: the long target wins only at its last token."""
    hair, blocked = 1e-9, -1e9
    on, last = [0.0, blocked, blocked], [blocked, 0.0, blocked]
    for length in range(10, 25):
        end = -1.0  # log-probability of the target that ends at once
        gain = length_penalty(length + 1, alpha) / length_penalty(1, alpha)
        begin = end * gain * (1 - hair)
        first = [begin, end, math.log(1 - math.exp(begin) - math.exp(end))]
        script = Script([first, *[on] * (length - 1), last])
        group = RequestGroup(Prefixes([0]), Constraints(0, 1, [2], np.array([length])))
        ((found,),) = beam(script.step, iter([group]), beam_options(2, alpha))
        assert found.ids == [0] * length


# Wider beams


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_narrower_beam_scores_higher_than_an_exhaustive_one(alpha):
    model, lengths = TableModel(NUM_PIECES, seed=3), [3] * 8
    best = [hypothesis.score for hypothesis in by_beam(model, lengths, WIDE, alpha)]
    num_worse = 0
    for width in range(1, 8):
        for hypothesis, bound in zip(by_beam(model, lengths, width, alpha), best, strict=True):
            assert hypothesis.score <= bound + 1e-6
            num_worse += hypothesis.score < bound - 1e-3
    assert num_worse > 0


@pytest.mark.parametrize("alpha", ALPHAS)
def test_for_targets_of_at_most_one_token_a_wider_beam_never_scores_lower(alpha):
    model, lengths = TableModel(NUM_PIECES, seed=4), [1] * 12
    scores = [
        [hypothesis.score for hypothesis in by_beam(model, lengths, width, alpha)]
        for width in range(1, 7)
    ]
    for narrow, wide in itertools.pairwise(scores):
        assert all(one <= other + 1e-6 for one, other in zip(narrow, wide, strict=True))
    assert scores[0] != scores[-1]


# Batch rows and order

MIXED = [Task(7, 4), Task(2, 0), Task(9, 6, (2, 0)), Task(4, 1), Task(5, 3), Task(1, 2, (0,) * 4)]


@of_each_type
@pytest.mark.parametrize(
    "wanted",
    [beam_options(1), beam_options(3, 0.6), beam_options(4, 1.0, 4), beam_options(4, 1.0, 2, True)],
)
@pytest.mark.parametrize("no_repeat_ngram", [0, 1])
def test_beam_search_of_a_sentence_does_not_depend_on_the_other_sentences(
    wanted, no_repeat_ngram, dtype
):
    model = TableModel(NUM_PIECES, dtype=dtype)
    alone = [all_by_beam(model, [task], wanted, no_repeat_ngram)[0] for task in MIXED]
    for sizes in ((), (1, 1, 1, 1, 1), (2, 1, 3), (4,)):
        together = all_by_beam(model, MIXED, wanted, no_repeat_ngram, sizes)
        for hypotheses, own in zip(together, alone, strict=True):
            assert_same(hypotheses, own, SUM_OF[dtype])


@of_each_type
@pytest.mark.parametrize("no_repeat_ngram", [0, 1])
def test_samples_of_a_sentence_do_not_depend_on_the_other_sentences(no_repeat_ngram, dtype):
    model, wanted = TableModel(NUM_PIECES, dtype=dtype), Sampling(1.3, top_p=0.9)
    uniform_NT = uniform(2 * len(MIXED), 7)
    together = all_by_sampling(model, MIXED, wanted, uniform_NT, no_repeat_ngram)
    for index, (task, hypotheses) in enumerate(zip(MIXED, together, strict=True)):
        own_NT = uniform_NT[2 * index : 2 * index + 2]
        (alone,) = all_by_sampling(model, [task], wanted, own_NT, no_repeat_ngram)
        assert_same(hypotheses, alone, SUM_OF[dtype])


@pytest.mark.parametrize("way", ["greedy", "beam", "sample"])
def test_translations_are_returned_in_the_order_of_their_sentences(way):
    model = TableModel(NUM_PIECES)
    model.offsets[EOS] = -3.0  # targets long enough to differ
    tasks, uniform_NT = tasks_of([5, 0, 3, 1, 4, 2, 5, 1]), uniform(8, 6)

    def translate(order: Sequence[int]) -> list[list[tuple[int, ...]]]:
        picked = [tasks[index] for index in order]
        if way == "sample":
            found = all_by_sampling(model, picked, Sampling(), uniform_NT[list(order)])
        else:
            found = all_by_beam(
                model, picked, beam_options(1 if way == "greedy" else 3), 0, (3, 1, 2)
            )
        return [ids_of(hypotheses) for hypotheses in found]

    forward = translate(range(8))
    assert len({ids for (ids,) in forward}) > 4
    assert translate(range(7, -1, -1)) == forward[::-1]


@pytest.mark.parametrize("num_groups", [0, 1, 3])
def test_an_empty_batch_gives_no_translations_and_decodes_no_row(num_groups):
    model, empty = TableModel(NUM_PIECES), [group_of([]) for _ in range(num_groups)]
    assert (
        beam((getattr(model, "decode_step", None) or model.step), iter(empty), beam_options(3))
        == []
    )
    assert all_by_sampling(model, [], Sampling(), uniform(0, 5)) == []
    assert model.num_rows_read == 0


def test_groups_are_admitted_when_there_is_room_and_never_exceed_it():
    """The batch stays nearly full, and no group is made before there is room for it."""
    num_groups, size, width = 12, 2, 3
    model, waits = TableModel(NUM_PIECES), []
    model.offsets[EOS] = -30.0  # no target ends before its limit
    lengths = itertools.cycle([2, 9, 5, 3])
    tasks = [Task(sentence, next(lengths)) for sentence in range(num_groups * size)]

    def groups() -> Iterator[RequestGroup[Prefixes]]:
        for part in cut(tasks, [size] * num_groups):
            waits.append(len(model.rows_read))
            yield group_of(part)

    found = beam((getattr(model, "decode_step", None) or model.step), groups(), beam_options(width))
    assert [len(best.ids) for (best,) in found] == [task.max_length for task in tasks]
    assert max(model.rows_read) <= NUM_GROUPS * size * width
    assert sum(model.rows_read[:-9]) / len(model.rows_read[:-9]) > (NUM_GROUPS - 2) * size * width
    assert len(model.rows_read) < sum(task.max_length + 1 for task in tasks[::size]) / 2
    assert waits[:2] == [0, 0]
    assert len({*waits}) > num_groups / 3


# Limits


@of_each_type
@pytest.mark.parametrize("width", [1, 2, 3])
def test_at_the_length_limit_eos_is_forced_and_its_log_prob_is_counted(width, dtype):
    # eos is never among the three best tokens, so that every target reaches its limit
    model = TableModel(NUM_PIECES, dtype=dtype)
    model.offsets[EOS] = -20.0
    max_lengths = [0, 1, 3, 5]
    (sampled,) = zip(
        *all_by_sampling(model, tasks_of(max_lengths), Sampling(), uniform(4, 6)), strict=True
    )
    for found in (by_beam(model, max_lengths, width, 0.6), sampled):
        assert [len(hypothesis.ids) for hypothesis in found] == max_lengths
        for sentence, hypothesis in enumerate(found):
            assert hypothesis.log_prob < -15
            alpha = 0.0 if found is sampled else 0.6
            assert_adds_up(model, sentence, hypothesis, alpha, 10 * SUM_OF[dtype])


@of_each_type
@pytest.mark.parametrize("no_repeat_ngram", [0, 2])
@pytest.mark.parametrize("width", [1, 4])
def test_forbidden_ids_are_never_generated_but_count_in_the_normalization(
    width, no_repeat_ngram, dtype
):
    # they have the highest logits, and still count in the normalization
    model, tasks = TableModel(NUM_PIECES, dtype=dtype), tasks_of([4] * 6)
    model.offsets[NEVER] = 10.0
    searched = all_by_beam(model, tasks, beam_options(width, 0.0, width), no_repeat_ngram)
    sampled = all_by_sampling(model, tasks, Sampling(), uniform(12, 5), no_repeat_ngram)
    for found in (searched, sampled):
        for sentence, hypotheses in enumerate(found):
            for hypothesis in hypotheses:
                assert not {*hypothesis.ids} & {*NEVER, EOS}
                assert_adds_up(model, sentence, hypothesis, 0.0, 10 * SUM_OF[dtype])
                assert hypothesis.log_prob < -5


def test_without_forbidden_ids_the_padding_id_can_be_generated():
    model = TableModel(NUM_PIECES)
    model.offsets[PAD] = 10.0
    (searched,) = beam(
        (getattr(model, "decode_step", None) or model.step),
        iter([group_of(tasks_of([3]), never=[])]),
        beam_options(2),
    )
    group = group_of(tasks_of([3]), never=[])
    (sampled,) = sample(
        (getattr(model, "decode_step", None) or model.step), group, Sampling(top_k=1), uniform(1, 4)
    )
    assert searched[0].ids == sampled[0].ids == [PAD] * 3


# Prefixes


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    asked=st.lists(st.tuples(st.integers(0, 5), prefixes), min_size=1, max_size=6),
    sizes=group_sizes,
    alpha=alphas,
    n=st.sampled_from([0, 0, 1, 2]),
    stops_early=st.booleans(),
    dtype=dtypes,
)
@settings(max_examples=80)
def test_beam_search_with_prefixes_and_no_repeat_ngram_equals_plain_python(
    seed, width, asked, sizes, alpha, n, stops_early, dtype
):
    """A prefix longer than the limit is generated in full, and may have forbidden ids."""
    model = TableModel(NUM_PIECES, seed, dtype=dtype)
    model.offsets[NEVER] = 3.0
    tasks = [Task(sentence, *one) for sentence, one in enumerate(asked)]
    wanted = beam_options(width, alpha, (width + 1) // 2, stops_early)
    for task, found in zip(tasks, all_by_beam(model, tasks, wanted, n, sizes), strict=True):
        assert_found(found, plain_beam(model, task, wanted, n), dtype)
        for hypothesis in found:
            assert tuple(hypothesis.ids[: len(task.prefix)]) == task.prefix
            assert len(hypothesis.ids) <= max(task.max_length, len(task.prefix))
            assert_adds_up(model, task.sentence, hypothesis, alpha, 1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_prefix_log_probs_count_and_a_prefix_beyond_the_limit_is_generated_in_full(width):
    # its tokens are unlikely, and one of them is forbidden elsewhere
    model = TableModel(NUM_PIECES)
    model.offsets[2] = model.offsets[PAD] = -12.0
    tasks = [Task(0, 1, (2, PAD, 2)), Task(1, 3, (2, PAD, 2)), Task(2, 4, (2,)), Task(3, 4)]
    searched = all_by_beam(model, tasks, beam_options(width))
    sampled = all_by_sampling(model, tasks, Sampling(0.5, top_k=1), uniform(4, 5))
    for found in (searched, sampled):
        for task, (hypothesis,) in zip(tasks, found, strict=True):
            length = len(task.prefix)
            assert tuple(hypothesis.ids[:length]) == task.prefix
            assert max(hypothesis.log_probs[:length], default=-99) < -8
            assert_adds_up(model, task.sentence, hypothesis, 0.0, 1e-4)
        assert [len(hypothesis.ids) for (hypothesis,) in found[:2]] == [3, 3]
        assert 2 not in found[3][0].ids


def test_a_prefix_of_the_greedy_target_does_not_change_the_target():
    model, wanted = TableModel(NUM_PIECES, 5), beam_options(1)
    model.offsets[EOS] = -1.0
    tasks = tasks_of([5] * 8)
    free = all_by_beam(model, tasks, wanted)
    for length in range(6):
        led = [
            task._replace(prefix=tuple(best.ids[:length]))
            for task, (best,) in zip(tasks, free, strict=True)
        ]
        for (hypothesis,), (best,) in zip(all_by_beam(model, led, wanted), free, strict=True):
            assert_same([hypothesis], [best])


# Repeated n-grams


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_repeat_ngram_prevents_every_repeated_ngram(n):
    model, tasks = TableModel(NUM_PIECES, spread=0.5), tasks_of([12] * 6)
    model.offsets[EOS] = -4.0
    for no_repeat in (0, n):
        searched = all_by_beam(model, tasks, beam_options(4, 0.0, 4), no_repeat)
        sampled = all_by_sampling(model, tasks, Sampling(), uniform(24, 13), no_repeat)
        for found in (searched, sampled):
            counts: list[int] = []
            for sentence, hypotheses in enumerate(found):
                for hypothesis in hypotheses:
                    ids = hypothesis.ids
                    windows = Counter(zip(*(ids[place:] for place in range(n)), strict=False))
                    counts += windows.values()
                    assert_adds_up(model, sentence, hypothesis, 0.0, 1e-5)
            assert (max(counts) == 1) == (no_repeat == n)


@pytest.mark.parametrize("n", [1, 2])
def test_greedy_search_with_no_repeat_ngram_takes_the_best_remaining_token(n):
    model, tasks = TableModel(NUM_PIECES, spread=1.0), tasks_of([8] * 10)
    model.offsets[EOS] = -2.0
    found = [hypothesis for (hypothesis,) in all_by_beam(model, tasks, beam_options(1), n)]
    assert ids_of(found) == [plain_greedy(model, task, n) for task in tasks]
    assert ids_of(found) != [plain_greedy(model, task) for task in tasks]


# Sampling


@given(
    seed=st.integers(0, 10_000),
    asked=st.lists(st.tuples(st.integers(0, 5), prefixes), min_size=1, max_size=4),
    num_samples=st.integers(1, 3),
    temperature=st.sampled_from([0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    n=st.sampled_from([0, 0, 1, 2]),
    dtype=dtypes,
)
@settings(max_examples=80)
def test_sampling_equals_the_plain_python_sampling(
    seed, asked, num_samples, temperature, top_k, top_p, n, dtype
):
    """The log-probabilities are the model's own, not those of the distribution sampled from."""
    model = TableModel(NUM_PIECES, seed, dtype=dtype)
    tasks = [Task(sentence, *one) for sentence, one in enumerate(asked)]
    uniform_NT = uniform(num_samples * len(tasks), 6, seed)
    wanted = Sampling(temperature, top_k, top_p)
    found = all_by_sampling(model, tasks, wanted, uniform_NT, n)
    uniforms = iter(uniform_NT.tolist())
    for task, hypotheses in zip(tasks, found, strict=True):
        expected = [plain_sample(model, task, wanted, next(uniforms), n) for _ in hypotheses]
        assert len(expected) == num_samples
        assert sorted(ids_of(hypotheses)) == sorted(expected)
        for hypothesis in hypotheses:
            assert_adds_up(model, task.sentence, hypothesis, 0.0, SUM_OF[dtype])


def test_samples_are_returned_in_the_order_of_their_random_numbers():
    """Sorted neither by length nor by score."""
    model, tasks = TableModel(NUM_PIECES), tasks_of([5] * 3)
    uniform_NT = uniform(12, 6)
    found = all_by_sampling(model, tasks, Sampling(), uniform_NT)
    uniforms = iter(uniform_NT.tolist())
    expected = [
        [plain_sample(model, task, Sampling(), next(uniforms)) for _ in range(4)] for task in tasks
    ]
    assert all(ids != sorted(ids, key=len) for ids in expected)
    assert [ids_of(hypotheses) for hypotheses in found] == expected


@of_each_type
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("n", [0, 2])
def test_sampling_from_the_best_token_alone_equals_greedy_search(temperature, n, dtype):
    model, tasks = TableModel(NUM_PIECES, dtype=dtype), tasks_of([0, 1, 2, 3, 4, 5] * 2)
    greedy = [best for (best,) in all_by_beam(model, tasks, beam_options(1), n)]
    for wanted in (Sampling(temperature, top_k=1), Sampling(temperature, top_p=0.01)):
        drawn = [best for (best,) in all_by_sampling(model, tasks, wanted, uniform(12, 6), n)]
        assert_same(drawn, greedy)


SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.5),
    "hot": Sampling(temperature=2.0),
    "top_k": Sampling(top_k=2),
    "top_p": Sampling(top_p=0.7),
    "all": Sampling(1.5, 3, 0.8),
}


@pytest.mark.parametrize("wanted", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_sampled_targets_have_the_expected_frequencies(wanted):
    """Each count is within five standard deviations of what is expected."""
    num_draws, max_length = 4000, 2
    model, tasks = TableModel(NUM_PIECES, seed=2, spread=1.0), tasks_of([max_length] * 2)
    uniform_NT = uniform(2 * num_draws, max_length + 1, seed=3)
    for task, drawn in zip(tasks, all_by_sampling(model, tasks, wanted, uniform_NT), strict=True):
        counts = Counter(ids_of(drawn))
        assert counts.total() == num_draws
        expected = Counter[tuple[int, ...]]()
        for ids in (one.ids for one in exhaustive(model, task.sentence, max_length, 0.0)):
            share, target = 1.0, (*ids, EOS)
            for place, piece in enumerate(target):
                share *= chances(model, task, target[:place], wanted).get(piece, 0.0)
            expected[ids] = share
        assert sum(expected.values()) == pytest.approx(1.0)
        assert set(counts) <= {ids for ids, share in expected.items() if share}
        for ids, share in expected.items():
            deviation = math.sqrt(num_draws * share * (1 - share))
            assert abs(counts[ids] - num_draws * share) <= 5 * deviation + 1e-6


@pytest.mark.parametrize("wanted", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_evenly_spaced_random_numbers_give_every_token_its_exact_share(wanted):
    num_draws, task = 2000, Task(0, 1)
    model = TableModel(NUM_PIECES, seed=2, spread=1.0)
    even_N = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    uniform_NT = torch.stack([even_N, even_N], 1)
    (drawn,) = all_by_sampling(model, [task], wanted, uniform_NT)
    counts = Counter(ids_of(drawn))
    expected = chances(model, task, (), wanted)
    for piece in [EOS, *WRITABLE]:
        count = counts[() if piece == EOS else (piece,)]
        assert abs(count - num_draws * expected.get(piece, 0.0)) <= 1


def test_the_smallest_and_the_largest_random_number_draw_allowed_tokens():
    """The lowest or the highest ids are forbidden."""
    model, tasks = TableModel(NUM_PIECES), tasks_of([5] * 20)
    for number, never, expected in ((0.0, [0, EOS], 2), (1 - 2**-53, [5, EOS], BOS)):
        uniform_NT = torch.full((20, 6), number, dtype=torch.float64)
        found = sample(
            (getattr(model, "decode_step", None) or model.step),
            group_of(tasks, never),
            Sampling(),
            uniform_NT,
        )
        assert [ids_of(drawn) for drawn in found] == [[(expected,) * 5]] * 20


# NaN and infinite logits


def broken(model: TableModel, value: float, after: int) -> TableModel:
    """Set all logits of sentence 1 to `value` from the given length on."""
    whole = model.logits

    def logits(sentence: int, prefix: Iterable[int]) -> Tensor:
        read = tuple(prefix)
        logits_V = whole(sentence, read)
        return logits_V.fill_(value) if sentence == 1 and len(read) > after else logits_V

    model.logits = logits  # type: ignore[method-assign]
    return model


@of_each_type
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize(
    "wanted", [beam_options(1), beam_options(3), beam_options(1, with_scores=False)], ids=str
)
@pytest.mark.parametrize("sizes", [(), (1, 1)], ids=["together", "joining"])
def test_nan_or_infinite_logits_in_beam_search_are_an_error(value, after, n, wanted, sizes, dtype):
    model = broken(TableModel(NUM_PIECES, dtype=dtype), value, after)
    model.offsets[EOS] = -20.0
    with pytest.raises(NotFiniteError):
        all_by_beam(model, tasks_of([4] * 3), wanted, n, sizes)


@of_each_type
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("wanted", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_nan_or_infinite_logits_in_sampling_are_an_error(value, after, wanted, dtype):
    model = broken(TableModel(NUM_PIECES, dtype=dtype), value, after)
    model.offsets[EOS] = -20.0
    with pytest.raises(NotFiniteError):
        all_by_sampling(model, tasks_of([4] * 3), wanted, uniform(3, 5))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("task", [Task(1, 0), Task(1, 2, (0, 2))], ids=["full", "prefix"])
@pytest.mark.parametrize("way", ["beam", "sample"])
def test_nan_or_infinite_logits_are_an_error_even_where_the_next_token_is_forced(value, task, way):
    model = broken(TableModel(NUM_PIECES), value, 0)
    group = group_of([task])
    with pytest.raises(NotFiniteError):
        _ = (
            beam(
                (getattr(model, "decode_step", None) or model.step), iter([group]), beam_options(2)
            )
            if way == "beam"
            else sample(
                (getattr(model, "decode_step", None) or model.step),
                group,
                Sampling(),
                uniform(1, 5),
            )
        )


# Scores


@of_each_type
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("width", [1, 3])
def test_a_score_is_the_log_prob_divided_by_the_length_penalty(alpha, width, dtype):
    model, tasks = TableModel(NUM_PIECES, dtype=dtype), tasks_of([5] * 8)
    for sentence, found in enumerate(all_by_beam(model, tasks, beam_options(width, alpha, width))):
        assert len(found) == width
        scores = [hypothesis.score for hypothesis in found]
        assert scores == sorted(scores, reverse=True)
        for hypothesis in found:
            assert_adds_up(model, sentence, hypothesis, alpha, SUM_OF[dtype])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_score_of_a_sample_is_its_log_prob_divided_by_the_length_penalty(alpha):
    model, tasks = TableModel(NUM_PIECES, dtype=torch.float64), tasks_of([5] * 8)
    drawn = sample(model.step, group_of(tasks), Sampling(), uniform(24, 6), alpha)
    for sentence, found in enumerate(drawn):
        for hypothesis in found:
            assert_adds_up(model, sentence, hypothesis, alpha, SUM_OF[torch.float64])


def test_length_penalty_equals_the_written_out_formula():
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 1.0) == 2.0
    assert length_penalty(100, 0.0) == 1.0
    assert length_penalty(19, 0.5) == pytest.approx(2.0)
    assert length_penalty(30, 0.6) == pytest.approx(math.exp(0.6 * math.log(35 / 6)))


# With a transformer

LENGTHS = [5, 2, 7, 3]
MODEL_BOS, MODEL_EOS, MODEL_NEVER = 2, 3, [0, 2]
SEEDS = [3, 23, 25]  # models that end some sentences early and others at the limit
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}
VARIANTS = [
    model_config(num_encoder_layers=1),
    model_config(norm="pre", **ONE_LAYER),
    model_config(activation="gelu", tie_embeddings="decoder", **ONE_LAYER),
    model_config(positions="learned", max_positions=4, tie_embeddings="all", **ONE_LAYER),
    model_config(attention_window=1, **ONE_LAYER),
    model_config(attention_window=2, norm="pre", positions="learned", max_positions=20),
]


def peaked_transformer(
    seed: int, dtype: torch.dtype = torch.float64, config: ModelConfig = VARIANTS[0]
) -> Transformer:
    """A tiny model with peaked output distributions, so that hypotheses differ."""
    model = transformer(config, 12, 12, seed=seed)
    with torch.no_grad():
        model.output.weight *= 4
        model.output.weight[MODEL_EOS] *= 0.5
    return model.to(dtype)


def source(lengths: Sequence[int], seed: int = 2) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 12, (length,), generator=rng).tolist() for length in lengths]


def read(model: Transformer, src: Sequence[list[int]], padding: int = 0) -> RequestGroup[KVCache]:
    """Encode a batch, padded on the right by `padding` columns more than it needs."""
    lengths = [len(ids) for ids in src]
    more = torch.full((len(src), padding), 5)
    src_BS = torch.cat([pad_right(src, 0), more], 1)
    keep_BS = torch.cat([left_keep(lengths), more != 5], 1)
    state = model.start(src_BS, keep_BS)
    bounds = Constraints(MODEL_BOS, MODEL_EOS, MODEL_NEVER, np.array(lengths) + 4)
    return RequestGroup(state, bounds)


@torch.inference_mode()
def translate(
    model: Transformer, src: list[list[int]], wanted: DecodingOptions, sizes: Sequence[int] = ()
) -> list[list[Hypothesis]]:
    """Search in groups of these sizes; every other group has an extra column of padding."""
    parts = enumerate(cut(src, sizes))
    return beam(
        (getattr(model, "decode_step", None) or model.step),
        (read(model, part, index % 2) for index, part in parts),
        wanted,
    )


@torch.inference_mode()
def draw(
    model: Transformer,
    src: list[list[int]],
    wanted: Sampling,
    uniform_NT: Tensor,
    padding: int = 0,
) -> list[list[Hypothesis]]:
    return sample(
        (getattr(model, "decode_step", None) or model.step),
        read(model, src, padding),
        wanted,
        uniform_NT,
    )


@torch.no_grad()
def forced_by(model: Transformer, src: list[int], ids: list[int]) -> list[float]:
    """The log-probabilities of a target decoded in one forward pass, eos included."""
    src_1S, target = torch.tensor([src]), torch.tensor([*ids, MODEL_EOS])
    states_1TD = model(src_1S, torch.ones_like(src_1S).bool(), torch.tensor([[MODEL_BOS, *ids]]))
    log_probs_TV = model.output(states_1TD)[0].log_softmax(-1)
    found: list[float] = log_probs_TV.gather(1, target[:, None])[:, 0].tolist()
    return found


def assert_as_good(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    """The same but for rounding in float32, where ties may be broken in another way."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if one.ids == other.ids:
            assert one.log_probs == pytest.approx(other.log_probs, abs=2e-5)
        assert one.score == pytest.approx(other.score, rel=1e-6, abs=1e-5)


def assert_is_itself(found: list[Hypothesis], alone: list[Hypothesis], dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        assert_same(found, alone, 1e-9)
    else:
        assert_as_good(found, alone)


batches = st.lists(st.integers(1, 9), min_size=1, max_size=6)
a_beam = st.builds(
    lambda width, alpha, share, early: beam_options(
        width, alpha, 1 + round(share * (width - 1)), early
    ),
    st.integers(1, 6),
    alphas,
    st.floats(0, 1),
    st.booleans(),
)


@of_each_type
@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
@given(
    seed=st.integers(0, 1000),
    lengths=batches,
    wanted=a_beam,
    order=st.randoms(use_true_random=False),
    sizes=group_sizes,
)
@settings(max_examples=4)
def test_beam_search_with_a_transformer_depends_only_on_the_sentence_itself(
    config, dtype, seed, lengths, wanted, order, sizes
):
    """Not on the other sentences, their number, order and padding, or when they are admitted."""
    model, src = peaked_transformer(seed, dtype, config), source(lengths, seed)
    places = list(range(len(src)))
    order.shuffle(places)
    together = translate(model, [src[place] for place in places], wanted, sizes)
    for place, hypotheses in zip(places, together, strict=True):
        (alone,) = translate(model, [src[place]], wanted)
        assert_is_itself(hypotheses, alone, dtype)


@of_each_type
@given(
    seed=st.integers(0, 1000),
    config=st.sampled_from(VARIANTS),
    lengths=batches,
    num_samples=st.integers(1, 3),
    wanted=st.builds(
        Sampling,
        st.sampled_from([0.7, 1.0, 1.5]),
        st.sampled_from([0, 0, 4]),
        st.sampled_from([1.0, 0.9]),
    ),
    order=st.randoms(use_true_random=False),
    padding=st.integers(0, 3),
)
@settings(max_examples=15)
def test_sampling_with_a_transformer_depends_only_on_the_sentence_and_its_random_numbers(
    dtype, seed, config, lengths, num_samples, wanted, order, padding
):
    model, src = peaked_transformer(seed, dtype, config), source(lengths, seed)
    uniforms = uniform(num_samples * len(src), max(lengths) + 5, seed).split(num_samples)
    places = list(range(len(src)))
    order.shuffle(places)
    shuffled_NT = torch.cat([uniforms[place] for place in places])
    shuffled = [src[place] for place in places]
    together = draw(model, shuffled, wanted, shuffled_NT, padding)
    for place, hypotheses in zip(places, together, strict=True):
        (alone,) = draw(model, [src[place]], wanted, uniforms[place])
        assert_is_itself(hypotheses, alone, dtype)


def test_the_test_transformers_give_diverse_translations_of_several_lengths():
    found = [
        hypothesis
        for seed in SEEDS
        for (hypothesis,) in translate(
            peaked_transformer(seed), source(LENGTHS), beam_options(3, 0.6)
        )
    ]
    assert len(set(ids_of(found))) > 6
    assert len({len(hypothesis.ids) for hypothesis in found}) > 3


@of_each_type
@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_a_beam_of_one_equals_greedy_search_with_a_transformer(seed, dtype):
    model, src = peaked_transformer(seed, dtype), source(LENGTHS)
    for ids, (hypothesis,) in zip(src, translate(model, src, beam_options(1, 0.6)), strict=True):
        src_1S, written = torch.tensor([ids]), [MODEL_BOS]
        while written[-1] != MODEL_EOS:
            states_1TD = model(src_1S, torch.ones_like(src_1S).bool(), torch.tensor([written]))
            logits_V = model.output(states_1TD)[0, -1]
            logits_V[MODEL_NEVER] = -math.inf
            is_full = len(written) > len(ids) + 4
            written.append(MODEL_EOS if is_full else int(logits_V.argmax()))
        assert hypothesis.ids == written[1:-1]


@of_each_type
@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_greedy_search_without_scores_finds_the_same_targets_with_a_transformer(
    seed, dtype, monkeypatch
):
    """Also with the bfloat16 scan of the vocabulary, where that is faster."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(native.Functions, "has_fast_matmul", lambda functions: True)
    model, src = peaked_transformer(seed, dtype), source(LENGTHS * 3, seed)
    model.pack_weights()
    scored = translate(model, src, beam_options(1), (2, 3))
    found = translate(model, src, beam_options(1, with_scores=False), (2, 3))
    assert [ids_of(best) for best in found] == [ids_of(best) for best in scored]


@of_each_type
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "wanted", [beam_options(1), beam_options(4, 0.6, 4), beam_options(6, 1.0, 2, True), Sampling()]
)
def test_log_probs_equal_those_of_the_whole_target_decoded_in_one_forward_pass(seed, wanted, dtype):
    model, src = peaked_transformer(seed, dtype), source(LENGTHS)
    if isinstance(wanted, DecodingOptions):
        found_by_all = translate(model, src, wanted, (1, 2))
    else:
        found_by_all = draw(model, src, wanted, uniform(8, 12))
    for ids, found in zip(src, found_by_all, strict=True):
        for hypothesis in found:
            expected = forced_by(model, ids, hypothesis.ids)
            assert hypothesis.log_probs == pytest.approx(expected, abs=SUM_OF[dtype])
            assert hypothesis.log_prob == pytest.approx(sum(expected), abs=SUM_OF[dtype])
            alpha = wanted.length_alpha if isinstance(wanted, DecodingOptions) else 0.0
            penalty = length_penalty(len(hypothesis.log_probs), alpha)
            assert hypothesis.score == pytest.approx(hypothesis.log_prob / penalty, rel=1e-12)
