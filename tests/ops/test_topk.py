"""Compare the top tokens, of logits and of a projection, with a sort of the logits."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from ways import BOTH_PATHS, EACH_WAY, LONG, SHORT, exactly, growth, leaf, normal, peak

from mtrain.ops import native, topk
from mtrain.ops.topk import (
    LazyLogits,
    Projection,
    TopTokens,
    argmax_tokens,
    top_tokens,
    top_tokens_of,
)

WIDTHS = [5, 63, 64, 65, 130, 1000]  # the compiled function reads blocks of 64


def ranked(logits_NV: Tensor, never: list[int], count: int) -> Tensor:
    """The ids of each row by decreasing logit, and the lowest id first among equal logits."""
    rows = [
        sorted((piece for piece in range(len(row)) if piece not in never), key=lambda n: -row[n])
        for row in logits_NV.tolist()
    ]
    return torch.tensor([row[:count] for row in rows])


@EACH_WAY
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("never", [[], [4, 0, 1]])
@pytest.mark.parametrize("count", [1, 4, 2000])
@torch.no_grad()
def test_top_tokens_are_the_allowed_tokens_with_the_greatest_logits(
    way, calls, one_thread, width, never, count
):
    """The forbidden tokens have the greatest logits, and count in the probabilities."""
    logits_NV = 3 * normal(7, width, dtype=way.dtype)
    logits_NV[:, never] += 8
    before = logits_NV.clone()
    found = top_tokens(logits_NV, never, count)
    assert calls == (["topk"] if way.is_compiled else [])
    assert torch.equal(logits_NV, before)

    expected = ranked(logits_NV, never, count)
    values_NC = logits_NV.gather(1, found.ids_NC)
    assert torch.equal(values_NC, logits_NV.gather(1, expected))
    if way.is_compiled or way.dtype is not SHORT:  # else there are ties, in any order
        assert torch.equal(found.ids_NC, expected)
    assert all(len({*row}) == len(row) and not {*row} & {*never} for row in found.ids_NC.tolist())
    exact = logits_NV.double().log_softmax(-1).gather(1, found.ids_NC)
    way.assert_near(found.log_prob_NC, exact, way.roundings)


@EACH_WAY
def test_top_tokens_are_empty_where_no_token_is_allowed(way, calls):
    found = top_tokens(normal(2, 3, dtype=way.dtype), [0, 1, 2], 4)
    assert found.ids_NC.shape == found.log_prob_NC.shape == (2, 0)
    assert calls == []


def test_compiled_top_tokens_break_ties_by_the_lowest_id(calls):
    """Within a block, across blocks, and for the last of the top tokens."""
    logits_NV = torch.zeros(3, 200)
    logits_NV[1, [150, 70, 199, 5]] = 1.0
    logits_NV[2] = torch.arange(200) // 50 % 2
    found = top_tokens(logits_NV, [1, 70], 6)
    assert calls == ["topk"]
    expected = [[0, 2, 3, 4, 5, 6], [5, 150, 199, 0, 2, 3], [50, 51, 52, 53, 54, 55]]
    assert found.ids_NC.tolist() == expected == ranked(logits_NV, [1, 70], 6).tolist()


@EACH_WAY
def test_top_tokens_take_logits_that_are_not_contiguous(way, calls):
    logits = [normal(100, 7, dtype=way.dtype).T, normal(7, 300, dtype=way.dtype)[:, 50:150]]
    for logits_NV in logits:
        found = top_tokens(logits_NV, [2], 5)
        values_NC = logits_NV.gather(1, found.ids_NC)
        assert torch.equal(values_NC, logits_NV.gather(1, ranked(logits_NV, [2], 5)))
        exact = logits_NV.double().log_softmax(-1).gather(1, found.ids_NC)
        way.assert_near(found.log_prob_NC, exact, way.roundings)


@EACH_WAY
@pytest.mark.parametrize("shift", [-1e4, 1e4, 1e30])
def test_top_tokens_of_extreme_logits_have_the_log_probabilities_of_log_softmax(way, calls, shift):
    logits_NV = (shift * (1 + 0.1 * normal(3, 100))).to(way.dtype)
    found = top_tokens(logits_NV, [0], 3)
    exact = logits_NV.double().log_softmax(-1).gather(1, found.ids_NC)
    assert torch.equal(found.ids_NC[:, :1], ranked(logits_NV, [0], 1))
    way.assert_near(found.log_prob_NC, exact, way.roundings, floor=1e-5)


@EACH_WAY
@pytest.mark.parametrize("few", [0, 2])
def test_tokens_with_a_logit_of_minus_infinity_come_last(way, calls, few):
    """Their probability is zero; where there are too few others, they are returned anyway."""
    logits_NV = torch.full((2, 130), -math.inf, dtype=way.dtype)
    logits_NV[:, 100 : 103 + few] = normal(2, 3 + few, dtype=way.dtype)
    found = top_tokens(logits_NV, [0, 101], 4)
    exact = logits_NV.double().log_softmax(-1).gather(1, found.ids_NC)
    num_allowed = min(2 + few, 4)
    way.assert_near(found.log_prob_NC[:, :num_allowed], exact[:, :num_allowed], way.roundings)
    assert (found.log_prob_NC[:, num_allowed:] == -math.inf).all()
    assert found.log_prob_NC[:, :num_allowed].isfinite().all()


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("places", [[0], [64], [99], [7, 70], list(range(100))])
def test_a_nan_or_inf_logit_makes_the_top_log_probabilities_of_its_row_not_finite(
    way, calls, value, places
):
    """The ids are in the vocabulary in any case, because they are looked up."""
    logits_NV = normal(3, 100, dtype=way.dtype)
    whole = top_tokens(logits_NV, [0, 2], 4)
    logits_NV[1, places] = value
    found = top_tokens(logits_NV, [0, 2], 4)
    assert not found.log_prob_NC[1].isfinite().any()
    assert ((found.ids_NC >= 0) & (found.ids_NC < 100)).all()
    others = [0, 2]
    assert torch.equal(found.ids_NC[others], whole.ids_NC[others])
    assert torch.equal(found.log_prob_NC[others], whole.log_prob_NC[others])


@BOTH_PATHS
def test_top_tokens_of_no_rows_are_empty(way, calls):
    found = top_tokens(torch.empty(0, 9, dtype=way.dtype), [0], 4)
    assert found.ids_NC.shape == found.log_prob_NC.shape == (0, 4)


@EACH_WAY
@pytest.mark.parametrize("never", [[], [4, 0, 1]])
@torch.no_grad()
def test_the_argmax_of_logits_is_the_first_top_token(way, calls, one_thread, never):
    logits_NV = 3 * normal(7, 130, dtype=way.dtype)
    logits_NV[:, never] += 8
    assert torch.equal(argmax_tokens(logits_NV, never), top_tokens(logits_NV, never, 1).ids_NC)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_argmax_of_a_row_of_nan_inf_or_minus_inf_is_minus_one(way, calls, value):
    logits_NV = normal(3, 100, dtype=way.dtype)
    logits_NV[1] = value
    expected = top_tokens(logits_NV[[0, 2]], [0], 1).ids_NC.flatten().tolist()
    assert argmax_tokens(logits_NV, [0]).flatten().tolist() == [expected[0], -1, expected[1]]


def projection(width: int, num_pieces: int, seed: int = 1) -> Projection:
    """A projection with packed weights, and logits of a few units."""
    projected = Projection(width, num_pieces)
    with torch.no_grad():
        projected.weight.copy_(3 * normal(num_pieces, width, seed=seed) / width**0.5)
    projected.pack_weights()
    return projected


def best_of(projected: Projection, states_ND: Tensor, never: list[int], count: int) -> TopTokens:
    """The top tokens, found without logits in memory."""
    logits = projected.logits(states_ND)
    assert isinstance(logits, LazyLogits)
    return top_tokens(logits, never, count)


@pytest.mark.parametrize("num_pieces", [5, 16, 31, 64, 65, 130, 1000])
@pytest.mark.parametrize(("rows", "width"), [(0, 6), (1, 1), (5, 6), (6, 7), (25, 64), (61, 130)])
@pytest.mark.parametrize(("never", "count"), [([], 1), ([4, 0], 3), ([1], 2000)])
@torch.no_grad()
def test_top_tokens_of_a_projection_equal_those_of_its_logits(
    calls, one_thread, rows, width, num_pieces, never, count
):
    projected, states = projection(width, num_pieces), normal(rows, width, dtype=torch.float32)
    top = best_of(projected, states, never, count)
    assert calls == (["packed_topk"] if rows else [])
    exact_NV = states.double() @ projected.weight.double().T
    assert top.ids_NC.shape == (rows, min(count, num_pieces - len(never)))
    assert all(len({*ids}) == len(ids) and not {*ids} & {*never} for ids in top.ids_NC.tolist())
    exact_NV = exact_NV.log_softmax(-1)
    expected = ranked(exact_NV, never, count).long().view(top.ids_NC.shape)
    for ids_NC in (top.ids_NC, expected):  # apart from ties of float32
        exact = exact_NV.gather(1, ids_NC)
        torch.testing.assert_close(top.log_prob_NC.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", None])
@pytest.mark.parametrize(("rows", "width"), [(0, 6), (1, 1), (25, 64)])
@torch.no_grad()
def test_log_probs_of_given_tokens_equal_the_log_softmax_of_the_logits(
    calls, one_thread, rows, width, precision
):
    projected, states = projection(width, 130), normal(rows, width, dtype=torch.float32)
    if precision is None:
        projected, states = projected.double(), states.double()
    else:
        projected.pack_weights(precision)
    targets = torch.arange(rows) * 5
    found = projected.log_probs(states, targets)
    assert ("packed_topk" in calls) == (precision == "float32" and rows > 0)
    logits_NV = projected.logits(states)[:]
    expected = logits_NV.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_top_tokens_of_a_row_of_a_projection_do_not_depend_on_other_rows(calls, one_thread):
    projected, states = projection(70, 300), normal(53, 70, dtype=torch.float32)
    together = best_of(projected, states, [2], 4)
    alone = [best_of(projected, row, [2], 4) for row in states.split(1)]
    assert torch.equal(together.ids_NC, torch.cat([top.ids_NC for top in alone]))
    assert torch.equal(together.log_prob_NC, torch.cat([top.log_prob_NC for top in alone]))


@torch.no_grad()
def test_a_projection_returns_the_logits_of_all_or_selected_rows(calls):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    logits = projected.logits(states)
    plain = F.linear(states, projected.weight)
    torch.testing.assert_close(logits[:], plain)
    torch.testing.assert_close(logits[torch.tensor([7, 2])], plain[[7, 2]])


@torch.no_grad()
def test_a_projection_takes_states_that_are_not_contiguous(calls, one_thread):
    projected, states = projection(6, 40), normal(9, 12, dtype=torch.float32)
    own = best_of(projected, states[::2, 3:9], [], 3)
    assert torch.equal(own.ids_NC, best_of(projected, states[::2, 3:9].clone(), [], 3).ids_NC)


@pytest.mark.parametrize("num_threads", [1, 2])
@torch.no_grad()
def test_a_projection_uses_packed_topk_only_on_one_thread(calls, num_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    top = best_of(projected, states, [], 3)
    assert calls == (["packed_topk"] if num_threads == 1 else [])
    assert torch.equal(top.ids_NC, ranked(states @ projected.weight.T, [], 3))


@EACH_WAY
@torch.no_grad()
def test_a_projection_returns_a_tensor_unless_packed_compiled_and_in_float32(
    way, calls, one_thread
):
    """In another dtype, without a compiler, and before the weights are packed."""
    weights = LONG[way.dtype]
    projected = Projection(6, 40).to(weights)
    states = normal(9, 6, dtype=way.dtype)
    plain = projected.logits(states)
    assert isinstance(plain, Tensor)
    assert plain.dtype == weights
    projected.pack_weights()
    is_projected = isinstance(projected.logits(states), LazyLogits)
    assert is_projected == (way.is_compiled and way.dtype == torch.float32)


@pytest.mark.parametrize("how", ["step", "load", "replace"])
def test_a_projection_uses_its_new_weights_after_they_change(calls, one_thread, how):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    if how == "step":
        projected(states).square().sum().backward()
        torch.optim.SGD(projected.parameters(), lr=0.1).step()
    elif how == "load":
        projected.load_state_dict(projection(6, 40, seed=2).state_dict())
    else:
        projected.weight = projection(6, 40, seed=2).weight
    with torch.inference_mode():
        logits = projected.logits(states)
        torch.testing.assert_close(logits[:], F.linear(states, projected.weight))
        assert torch.equal(top_tokens(logits, [], 3).ids_NC, ranked(logits[:], [], 3))
        projected.pack_weights()
        assert torch.equal(best_of(projected, states, [], 3).ids_NC, ranked(logits[:], [], 3))


def test_weights_made_in_inference_mode_are_not_packed(calls, one_thread):
    with torch.inference_mode():
        projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
        projected.weight[3] += 1
        found = projected.logits(states)
        torch.testing.assert_close(found, states @ projected.weight.T)
    assert calls == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
@torch.no_grad()
def test_a_nan_or_inf_state_makes_the_top_log_probabilities_of_its_row_not_finite(
    calls, one_thread, value
):
    projected, states = projection(6, 100), normal(9, 6, dtype=torch.float32)
    whole = best_of(projected, states, [0], 4)
    states[3, 2] = value
    top = best_of(projected, states, [0], 4)
    assert not top.log_prob_NC[3].isfinite().any()
    assert ((top.ids_NC >= 0) & (top.ids_NC < 100)).all()
    others = [row for row in range(9) if row != 3]
    assert torch.equal(top.log_prob_NC[others], whole.log_prob_NC[others])


@torch.no_grad()
def test_a_failed_allocation_in_top_tokens_raises_memory_error(calls, one_thread, monkeypatch):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    library = type("Library", (), {"packed_topk_float": staticmethod(lambda *_: 1)})
    monkeypatch.setattr(native, "compiled", lambda: library)
    with pytest.raises(MemoryError):
        best_of(projected, states, [], 3)


def print_growth() -> None:
    torch.set_num_threads(1)
    projected, states = Projection(2, 4_000), torch.ones(20_000, 2)
    projected.pack_weights()
    with torch.inference_mode():
        for count in (1, 20_000):
            before = peak()
            top_tokens(projected.logits(states[:count]), [0], 5)
    print(peak() - before)


def test_the_search_for_top_tokens_never_holds_the_logits_of_all_rows(calls):
    """They would be 320 MB."""
    assert growth(print_growth) < 20_000


def test_a_projection_has_a_weight_and_no_bias():
    assert set(projection(6, 40).state_dict()) == {"weight"}


@pytest.fixture(params=["int8", "bfloat16"])
def rounds(monkeypatch, calls, request) -> list[str]:
    """Let projections be scanned in a lower precision; return the names of the functions called."""
    monkeypatch.setattr(native.Functions, "has_fast_matmul", lambda functions: True)
    is_int8 = request.param == "int8"
    monkeypatch.setattr(native.Functions, "has_fast_int8", lambda functions: is_int8)
    return calls


def likeliest_of(projected: Projection, states_ND: Tensor, never: list[int]) -> Tensor:
    """The argmax tokens, found without logits in memory."""
    logits = projected.logits(states_ND)
    assert isinstance(logits, LazyLogits)
    return argmax_tokens(logits, never)


def assert_likeliest(
    found_N1: Tensor, projected: Projection, states_ND: Tensor, never: list[int]
) -> None:
    """Compare tokens with the greatest logits in float64, apart from ties of float32."""
    exact_NV = states_ND.double() @ projected.weight.double().T
    size = float((states_ND.double().abs() @ projected.weight.double().abs().T).max())
    exact_NV[:, never] = -math.inf
    short_N = exact_NV.amax(1) - exact_NV.gather(1, found_N1)[:, 0]
    assert float(short_N.max()) <= 1e-6 * size


@pytest.mark.parametrize("num_pieces", [5, 16, 31, 64, 65, 130, 1000])
@pytest.mark.parametrize(("rows", "width"), [(0, 6), (1, 2), (5, 6), (6, 8), (25, 64), (61, 130)])
@pytest.mark.parametrize("never", [[], [4, 0]])
@torch.no_grad()
def test_the_argmax_of_a_projection_has_the_greatest_logit(
    rounds, one_thread, rows, width, num_pieces, never
):
    projected, states = projection(width, num_pieces), normal(rows, width, dtype=torch.float32)
    projected.weight[never] *= 5
    projected.pack_weights()
    found_N1 = likeliest_of(projected, states, never)
    assert found_N1.shape == (rows, 1)
    if rows:
        assert rounds == ["packed_argmax"]
        assert_likeliest(found_N1, projected, states, never)


@pytest.mark.parametrize("apart", [2.0**-6, 2.0**-9, 2.0**-12, 2.0**-20])
@torch.no_grad()
def test_the_argmax_is_exact_where_rounded_logits_have_another_order(rounds, one_thread, apart):
    """The weights of all tokens are nearly equal, and their order changes when they are rounded."""
    projected, states = projection(64, 200), normal(50, 64, dtype=torch.float32)
    alike = normal(1, 64, seed=3) + apart * normal(200, 64, seed=4)
    projected.weight.copy_(alike)
    projected.pack_weights()
    assert_likeliest(likeliest_of(projected, states, [7]), projected, states, [7])
    short_NV = states.bfloat16().double() @ projected.weight.bfloat16().double().T
    exact_NV = states.double() @ projected.weight.double().T
    assert (short_NV.argmax(1) != exact_NV.argmax(1)).sum() >= 3
    assert rounds == ["packed_argmax"]


@torch.no_grad()
def test_the_argmax_is_exact_where_only_the_states_are_rounded(rounds, one_thread):
    """Weights are whole numbers, which rounding does not change; states are rounded coarsely."""
    projected, states = projection(64, 200), 5 * normal(50, 64, dtype=torch.float32)
    projected.weight.copy_((40 * normal(200, 64, seed=5)).round().clamp(-127, 127))
    projected.weight[:, 0], states[:, 0] = 127, 1000
    projected.pack_weights()
    copied = projected._packed.scan.packed
    assert torch.equal(copied.multiply(torch.eye(64), None).T, projected.weight)
    rounded_NV = copied.multiply(states, None)
    exact_NV = states.double() @ projected.weight.double().T
    is_other_N = rounded_NV.argmax(1) != exact_NV.argmax(1)
    assert is_other_N.sum() >= 3 or copied.precision == "bfloat16"
    assert_likeliest(likeliest_of(projected, states, [7]), projected, states, [7])
    assert rounds == ["packed_argmax"]


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@torch.no_grad()
def test_a_nan_inf_or_overflowing_state_has_argmax_minus_one_and_changes_no_other_row(
    rounds, one_thread, value
):
    projected, states = projection(64, 130), normal(30, 64, dtype=torch.float32)
    expected = likeliest_of(projected, states, [1]).flatten().tolist()
    states[9, 5] = value
    expected[9] = -1
    assert likeliest_of(projected, states, [1]).flatten().tolist() == expected
    assert rounds == ["packed_argmax"] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
@torch.no_grad()
def test_a_nan_or_inf_weight_gives_argmax_minus_one_unless_its_logit_is_minus_inf(
    rounds, one_thread, value
):
    """A logit of minus infinity forbids only its own token."""
    projected, states = projection(64, 130), normal(30, 64, dtype=torch.float32)
    expected = likeliest_of(projected, states, [1])
    projected.weight[70, 3] = value
    projected.pack_weights()
    is_left_N1 = value * states[:, 3:4] == -math.inf
    expected = torch.where(is_left_N1, expected, -1)
    assert torch.equal(likeliest_of(projected, states, [1]), expected)


@torch.no_grad()
def test_the_argmax_of_a_projection_is_minus_one_where_no_token_is_allowed(rounds, one_thread):
    projected, states = projection(6, 3), normal(4, 6, dtype=torch.float32)
    assert likeliest_of(projected, states, [0, 1, 2]).flatten().tolist() == [-1] * 4


@torch.no_grad()
def test_odd_widths_are_scanned_and_processors_without_fast_products_use_packed_topk(
    rounds, one_thread, monkeypatch
):
    states = normal(9, 7, dtype=torch.float32)
    odd, even = projection(7, 40), projection(6, 40)
    for name in ("has_fast_matmul", "has_fast_int8"):
        monkeypatch.setattr(native.Functions, name, lambda functions: False)
    slow = projection(6, 40)
    assert_likeliest(likeliest_of(odd, states, [1]), odd, states, [1])
    found = [likeliest_of(own, states[:, :6], [1]) for own in (slow, even)]
    assert torch.equal(*found)
    assert rounds == ["packed_argmax", "packed_topk", "packed_argmax"]


@torch.no_grad()
def test_rounded_weights_are_not_scanned_after_the_weights_change(rounds, one_thread):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    projected.weight.copy_(projection(6, 40, seed=2).weight)
    logits = projected.logits(states)
    assert isinstance(logits, Tensor)
    assert_likeliest(argmax_tokens(logits, [1]), projected, states, [1])
    projected.pack_weights()
    assert_likeliest(likeliest_of(projected, states, [1]), projected, states, [1])


@pytest.mark.parametrize("never", [[0, 40], [2**40]])
@BOTH_PATHS
@torch.no_grad()
def test_a_forbidden_token_outside_the_vocabulary_raises_an_index_error(
    way, calls, rounds, one_thread, never
):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    logits = [states @ projected.weight.T, projected.logits(states)]
    for own in logits if way.is_compiled else logits[:1]:
        with pytest.raises(IndexError):
            top_tokens(own, never, 3)
    if way.is_compiled:
        with pytest.raises(IndexError):
            argmax_tokens(projected.logits(states), never)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_compiled_top_tokens_do_not_depend_on_the_default_dtype(calls, one_thread, dtype):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    expected = best_of(projected, states, [0], 3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = best_of(projected, states, [0], 3)
    finally:
        torch.set_default_dtype(before)
    assert calls == ["packed_topk"] * 2
    assert found.log_prob_NC.dtype == torch.float32
    assert all(map(torch.equal, found, expected))


@torch.no_grad()
def test_compiled_top_tokens_do_not_depend_on_the_default_device(calls, one_thread):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    expected = best_of(projected, states, [0, 3, 7], 3)
    topk.ids_tensor.cache_clear()
    with torch.device("meta"):
        found = best_of(projected, states, [0, 3, 7], 3)
    assert calls == ["packed_topk"] * 2
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, best_of(projected, states, [0, 3, 7], 3), expected))


@torch.no_grad()
def test_top_tokens_are_rows_of_the_weights_where_the_vocabulary_was_shortened(calls, one_thread):
    projected, states = projection(6, 100), normal(9, 6, dtype=torch.float32)
    projected.weight = torch.nn.Parameter(projected.weight[:70].clone())
    projected.pack_weights()
    top = best_of(projected, states, [1], 2000)
    assert calls == ["packed_topk"]
    assert torch.equal(top.ids_NC, ranked(states @ projected.weight.T, [1], 2000))


@pytest.mark.parametrize("frozen", ["none", "states", "weight"])
def test_log_probs_of_packed_weights_have_the_gradients_of_the_log_softmax(
    calls, one_thread, frozen
):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    states.requires_grad_(frozen != "states")
    projected.weight.requires_grad_(frozen != "weight")
    inputs = [x for x in (states, projected.weight) if x.requires_grad]
    targets = torch.arange(9) * 4
    found = torch.autograd.grad(projected.log_probs(states, targets).sum(), inputs)
    log_probs = (states @ projected.weight.T).log_softmax(-1)
    expected = torch.autograd.grad(log_probs.gather(1, targets[:, None]).sum(), inputs)
    for grad, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, plain, rtol=1e-5, atol=1e-6)


@EACH_WAY
def test_top_tokens_have_the_gradients_of_the_log_softmax(way, calls, one_thread):
    logits = leaf(5, 40, dtype=way.dtype)
    top = top_tokens(logits, [0], 3)
    assert calls == []
    (found,) = torch.autograd.grad(top.log_prob_NC.sum(), logits)
    (exact,) = exactly([logits])
    expected = exact.log_softmax(-1).gather(1, top.ids_NC).sum()
    roundings = 8 if way.dtype is SHORT else 1  # the plain formula takes several operations
    way.assert_near(found, *torch.autograd.grad(expected, exact), roundings)


def test_top_tokens_of_shortlists_have_gradients(calls, one_thread):
    projected, states = projection(6, 40), normal(4, 6, dtype=torch.float32)
    ids_C = np.array([2, 5, 9, 30])
    logits = projected.logits(states)
    top = top_tokens_of(logits, [0, 0, 0, 0], projected.rows([ids_C]), 2)
    (found,) = torch.autograd.grad(top.log_prob_NC.sum(), projected.weight)
    own = (states @ projected.weight[ids_C].T).log_softmax(-1)
    (expected,) = torch.autograd.grad(own.topk(2).values.sum(), projected.weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
