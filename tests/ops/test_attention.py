"""Compare attention, in PyTorch and in C, with the formula written out in float64."""

import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fork_server import printed_by
from torch import Tensor
from ways import (
    BOTH_PATHS,
    EACH_WAY,
    SAME,
    SHORT,
    Way,
    exactly,
    five_deviations,
    fixed,
    grads_of,
    leaf,
    normal,
    queries_keys_values,
    share_of,
)

from mtrain.ops import attention as attention_module
from mtrain.ops import native
from mtrain.ops.attention import attention, chunk_last, paged_attention
from mtrain.ops.dropout import Dropout

KINDS = ["everything", "causal", "padding", "empty", "scattered", "window"]


def keep_of(kind: str, num_queries: int, num_keys: int, batch: int = 2) -> Tensor | None:
    """Return a mask like the model's, or a more general one."""
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool)
    lengths = torch.tensor([num_keys, min(2, num_keys), 1][:batch])
    if kind == "everything":
        return None
    if kind == "causal":
        return everything.tril()
    if kind == "window":
        return everything.tril(2).triu(-2) | everything.tril(-num_keys + 1)
    if kind == "scattered":  # different for every sentence and query
        rng = torch.Generator().manual_seed(5)
        keep = torch.rand(batch, 1, num_queries, num_keys, generator=rng) < 0.5
        keep[..., 0] |= ~keep.any(-1)
        return keep
    if kind == "empty":  # all keys of one of the sentences are masked
        lengths[1] = 0
    return (torch.arange(num_keys) < lengths[:, None])[:, None, None, :]


def mixed(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, share: Tensor | float = 1.0
) -> Tensor:
    """softmax(q k^T / sqrt(d_k)) v written out; a fully masked row weighs all keys equally."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if keep is not None:
        scores = scores - 1e200 * keep.logical_not().double()
    power = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return (share * power / power.sum(-1, keepdim=True)) @ v


BEYOND = sorted(most + 1 for most in attention_module._MAX_COMPILED_KEYS.values())
LIMITS = [count for beyond in BEYOND for count in (beyond - 1, beyond)]


def has_compiled_attention(way: Way, num_keys: int) -> bool:
    return way.is_compiled and num_keys <= attention_module._MAX_COMPILED_KEYS[way.dtype]


def roundings_of_attention(way: Way) -> int:
    """How often the terms of a sum are rounded: compiled bfloat16 rounds the weights too."""
    return 2 if way.is_compiled and way.dtype is SHORT else 1


def assert_mixed(way: Way, inputs: list[Tensor], keep: Tensor | None, floor: float = 1e-11) -> None:
    """Compare attention and its gradients with the formula."""
    upstream = normal(*inputs[0].shape, seed=9, dtype=way.dtype)
    ours = grads_of(attention(*inputs, keep), upstream, inputs)
    assert {tensor.dtype for tensor in ours} == {way.dtype}
    exact = exactly(inputs)
    expected = grads_of(mixed(*exact, keep), upstream, exact)
    for mine, formula in zip(ours, expected, strict=True):
        way.assert_near(mine, formula, roundings_of_attention(way), floor)


@EACH_WAY
@pytest.mark.parametrize("num_keys", [1, 7, 16, 17, *LIMITS])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_the_formula_written_out(way, calls, num_keys, kind):
    inputs = queries_keys_values(5, num_keys, 6, way.dtype)
    keep, is_compiled = keep_of(kind, 5, num_keys), has_compiled_attention(way, num_keys)
    if kind != "empty" or is_compiled or num_keys <= attention_module._MAX_MATMUL_KEYS:
        assert_mixed(way, inputs, keep)
    else:  # where all keys are masked, PyTorch's fused kernel has another gradient
        way.assert_near(attention(*inputs, keep), mixed(*exactly(inputs), keep))
    assert calls == (["attention", "attention_grad"] if is_compiled else [])


@EACH_WAY
@pytest.mark.parametrize("width", [1, 2, 6, 16, 17, 128, 130])
def test_attention_takes_heads_of_any_width(way, calls, width):
    assert_mixed(way, queries_keys_values(5, 18, width, way.dtype), keep_of("padding", 5, 18))


@EACH_WAY
@pytest.mark.parametrize("num_queries", [1, 3, 4, 16, 130])
@pytest.mark.parametrize("kind", ["causal", "scattered"])
def test_attention_takes_any_number_of_queries(way, calls, num_queries, kind):
    inputs = queries_keys_values(num_queries, 9, 6, way.dtype)
    assert_mixed(way, inputs, keep_of(kind, num_queries, 9))


@EACH_WAY
@pytest.mark.parametrize("kind", ["everything", "empty"])
def test_attention_takes_heads_that_are_views_of_one_tensor(way, calls, kind):
    """As the model splits the output of one linear layer into heads, and merges them again."""
    joined = leaf(3, 7, 3 * 4 * 6, dtype=way.dtype)
    upstream = normal(3, 7, 24, seed=9, dtype=way.dtype)
    keep = keep_of(kind, 7, 7, batch=3)

    def whole(joined: Tensor, mix: Callable[..., Tensor]) -> Tensor:
        q, k, v = (x.view(3, 7, 4, 6).transpose(1, 2) for x in joined.chunk(3, -1))
        return mix(q, k, v, keep).transpose(1, 2).flatten(2)

    ours = grads_of(whole(joined, attention), upstream, [joined])
    exact = exactly([joined])
    expected = grads_of(whole(exact[0], mixed), upstream, exact)
    for mine, formula in zip(ours, expected, strict=True):
        way.assert_near(mine, formula, roundings_of_attention(way))


def projected(x: Tensor, count: int) -> Tensor:
    """Return a tensor to cut into chunks, which has an autograd history."""
    return torch.cat([x * (1 + number) for number in range(count)], -1)


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 2, 3).transpose(1, 2)


@EACH_WAY
@pytest.mark.parametrize("lengths", [(5, 7), (7, 7), (1, 1)])
def test_chunk_last_equals_torch_chunk_forward_and_backward(way, calls, lengths):
    """In self-attention, and in attention to another sequence."""
    found, expected = (
        [
            grads_of(attention(*map(heads, cut(projected(x, 3), 3)), None), above, [x]),
            grads_of(
                attention(heads(x), *map(heads, cut(projected(y, 2), 2)), None), above, [x, y]
            ),
        ]
        for cut in (chunk_last, lambda tensor, count: tensor.chunk(count, -1))
        for x, y, above in [
            (
                leaf(3, lengths[0], 6, dtype=way.dtype),
                leaf(3, lengths[1], 6, seed=1, dtype=way.dtype),
                normal(3, 2, lengths[0], 3, seed=2, dtype=way.dtype),
            )
        ]
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
def test_the_backward_pass_of_chunk_last_after_attention_does_not_call_torch_cat(
    dtype, monkeypatch
):
    x = leaf(3, 7, 18, dtype=dtype)
    mixed_up = attention(*map(heads, chunk_last(x, 3)), None)
    monkeypatch.setattr(torch, "cat", None)
    mixed_up.backward(normal(3, 2, 7, 3, dtype=dtype))
    assert x.grad.is_contiguous() and x.grad.count_nonzero() == x.numel()


@EACH_WAY
@pytest.mark.parametrize("used", [[0], [2], [0, 1, 2], [0, 0, 1, 2]])
def test_the_gradient_of_chunk_last_sums_the_gradients_of_every_use_of_a_chunk(way, calls, used):
    """The gradient of an unused chunk is zero."""
    x = leaf(2, 3, 12, dtype=way.dtype)
    sums = [chunk_last(x, 3)[number] for number in used]
    (found,) = torch.autograd.grad(
        sum((place + 1) * own.sum() for place, own in enumerate(sums)), x
    )
    expected = torch.zeros(2, 3, 12, dtype=way.dtype)
    for place, number in enumerate(used):
        expected[..., 4 * number : 4 * number + 4] += place + 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("order", [(1, 0), (0, 0)])
def test_chunk_gradients_that_are_views_in_another_order_are_concatenated_in_chunk_order(order):
    x, above = leaf(2, 3, 8, dtype=torch.float32), normal(2, 3, 8, dtype=torch.float32)
    given = [above.chunk(2, -1)[number] for number in order]
    (found,) = torch.autograd.grad(chunk_last(x, 2), x, given)
    assert torch.equal(found, torch.cat(given, -1))


@EACH_WAY
def test_attention_takes_any_strides(way, calls):
    """Each of its tensors has its dimensions in another memory order."""
    sizes = {"b": 2, "h": 3, "t": 5, "s": 7, "k": 6}
    orders = ["kthb", "shbk", "bshk", "btkh"]

    def ordered(x: Tensor, order: str) -> Tensor:
        return x.permute([order.index(name) for name in ("bhsk" if "s" in order else "bhtk")])

    *stored, upstream = (
        leaf(*(sizes[name] for name in order), seed=seed, dtype=way.dtype)
        for seed, order in enumerate(orders)
    )
    exact = exactly(stored)
    inputs, plain = (
        [ordered(x, order) for x, order in zip(some, orders, strict=False)]
        for some in (stored, exact)
    )
    keep = keep_of("scattered", 5, 14)[..., ::2]
    above = ordered(upstream.detach(), orders[-1])
    ours = grads_of(attention(*inputs, keep), above, stored)
    expected = grads_of(mixed(*plain, keep), above, exact)
    for mine, formula in zip(ours, expected, strict=True):
        way.assert_near(mine, formula, roundings_of_attention(way))


@EACH_WAY
def test_attention_takes_an_expanded_scalar_as_its_output_gradient(way, calls):
    inputs = queries_keys_values(5, 7, 6, way.dtype)
    attention(*inputs, None).sum().backward()  # an expanded scalar
    exact = exactly(inputs)
    mixed(*exact, None).sum().backward()
    for mine, formula in zip(inputs, exact, strict=True):
        way.assert_near(mine.grad, formula.grad, roundings_of_attention(way))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_attention_equals_torchs_scaled_dot_product_attention(kind):
    inputs, keep = queries_keys_values(5, 7, 6, torch.float64), keep_of(kind, 5, 7)
    reference = F.scaled_dot_product_attention(*inputs, attn_mask=keep)
    torch.testing.assert_close(attention(*inputs, keep), reference, **SAME)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, SHORT])
@torch.no_grad()
def test_attention_in_pytorch_by_matmul_equals_that_by_the_fused_kernel(kind, dtype, monkeypatch):
    monkeypatch.setattr(native, "compiled", lambda: None)
    q, k, v = queries_keys_values(7, 7, 6, dtype)
    keep = keep_of(kind, 7, 7)
    batched = attention(q, k, v, keep)
    monkeypatch.setattr(attention_module, "_MAX_MATMUL_KEYS", 0)
    torch.testing.assert_close(attention(q, k, v, keep), batched)


@EACH_WAY
@pytest.mark.parametrize("num_keys", [7, *BEYOND])
def test_a_query_whose_keys_are_all_masked_gets_the_mean_of_all_values(way, calls, num_keys):
    keep = torch.ones(2, 1, 3, num_keys, dtype=torch.bool)
    keep[0, :, 1] = False
    inputs = queries_keys_values(3, num_keys, 6, way.dtype)
    out = attention(*inputs, keep)
    roundings = roundings_of_attention(way)
    way.assert_near(out[0, :, 1], inputs[2].detach().double()[0].mean(1), roundings)
    way.assert_near(out[1], mixed(*(x.double() for x in inputs), None)[1].detach(), roundings)
    out.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)


@EACH_WAY
@pytest.mark.parametrize("num_keys", [7, *BEYOND])
def test_a_masked_key_has_exactly_no_influence(way, calls, num_keys):
    keep = (torch.arange(num_keys) < num_keys - 2)[None, None, None, :]
    q, k, v = queries_keys_values(3, num_keys, 6, way.dtype)
    out = attention(q, k, v, keep)
    out.square().sum().backward()
    for tensor in (k, v):
        assert (tensor.grad[..., -2:, :] == 0).all()
        assert (tensor.grad[..., :-2, :] != 0).any()
    with torch.no_grad():
        for tensor in (k, v):
            tensor[..., -2:, :] = 1e4
    assert torch.equal(attention(q, k, v, keep), out)


@EACH_WAY
@pytest.mark.parametrize("num_keys", [7, 16, 33, *BEYOND])
@pytest.mark.parametrize("kind", ["everything", "scattered"])
def test_attention_dropout_acts_after_the_softmax_and_uses_the_same_mask_in_the_backward_pass(
    way, calls, num_keys, kind
):
    inputs, keep = queries_keys_values(5, num_keys, 6, way.dtype), keep_of(kind, 5, num_keys)
    upstream = normal(*inputs[0].shape, seed=9, dtype=way.dtype)
    out = attention(*inputs, keep, fixed(Dropout(0.3)))
    ours = grads_of(out, upstream, inputs)
    assert ("attention_grad" in calls) == has_compiled_attention(way, num_keys)
    share = share_of((2, 3, 5, num_keys))
    assert 0.2 < float((share == 0).double().mean()) < 0.4
    exact = exactly(inputs)
    expected = grads_of(mixed(*exact, keep, share), upstream, exact)
    for mine, formula in zip(ours, expected, strict=True):
        way.assert_near(mine, formula, roundings_of_attention(way))


@EACH_WAY
@pytest.mark.parametrize("num_keys", [100, 200])
def test_attention_dropout_zeroes_the_given_share_of_weights_and_keeps_their_mean(
    way, calls, num_keys
):
    """With values that are unit vectors, the output equals the weights, which are all equal."""
    rate, eye = 0.2, torch.eye(num_keys, dtype=way.dtype).expand(4, 2, num_keys, num_keys)
    q = torch.zeros(4, 2, 100, num_keys, dtype=way.dtype, requires_grad=True)
    torch.manual_seed(5)
    weights = num_keys * attention(q, eye, eye, None, Dropout(rate).train()).detach().double()
    is_zero = weights == 0
    share = float(is_zero.double().mean())
    assert share == pytest.approx(rate, abs=five_deviations(rate, weights.numel()))
    rest = weights[~is_zero]
    torch.testing.assert_close(rest, torch.full_like(rest, 1 / (1 - rate)), rtol=0.005, atol=0)
    assert float(weights.mean()) == pytest.approx(1.0, abs=0.01)


@EACH_WAY
def test_attention_dropout_is_off_in_eval_mode_and_at_rate_zero(way, calls):
    inputs = queries_keys_values(5, 7, 6, way.dtype)
    whole = attention(*inputs, None)
    for dropout in (Dropout(0.5).eval(), Dropout(0.0).train()):
        assert torch.equal(attention(*inputs, None, dropout), whole)


@pytest.mark.parametrize("num_keys", [7, *BEYOND])
@pytest.mark.parametrize("kind", ["everything", "scattered"])
def test_attention_in_pytorch_with_dropout_passes_gradcheck(num_keys, kind):
    keep, dropout = keep_of(kind, 2, num_keys), fixed(Dropout(0.3))
    inputs = queries_keys_values(2, num_keys, 2, torch.float64, heads=1)
    inputs[1:] = [x.detach() for x in inputs[1:]] if num_keys > 10 else inputs[1:]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, keep, dropout), inputs)


@EACH_WAY
def test_attention_with_extreme_scores_equals_the_formula(way, calls):
    q, k, v = queries_keys_values(5, 7, 6, way.dtype)
    with torch.no_grad():
        q *= 1e4
    # where one key has nearly all the weight, the gradient is a difference of close numbers
    assert_mixed(way, [q, k, v], keep_of("padding", 5, 7), floor=1e-7)


def run_out_of_memory() -> None:
    assert native.compiled() is not None
    q, keys = torch.ones(1, 1, 200_000, 1, requires_grad=True), torch.ones(1, 1, 100, 1)
    torch.ones(1, requires_grad=True).sum().backward()  # which starts a thread
    if sys.argv[1] == "backward":
        out = attention(q, keys, keys, None).sum()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 20_000_000, resource.RLIM_INFINITY))
    try:
        attention(q, keys, keys, None) if sys.argv[1] == "forward" else out.backward()
    except MemoryError:
        print("MemoryError")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much a process holds")
@pytest.mark.parametrize("way_through", ["forward", "backward"])
def test_attention_raises_memory_error_when_memory_runs_out(calls, way_through):
    """Training then splits the micro-batch in halves."""
    assert printed_by(run_out_of_memory, way_through) == "MemoryError\n"


HEADS = [(1, 1), (2, 6), (3, 16), (1, 17), (3, 32), (2, 64), (1, 257)]  # how many, width
HEADS += [(4, 6), (4, 32), (8, 32), (4, 64), (8, 64), (12, 64)]  # in C, four heads at once


def attended(q_ND: Tensor, cache_RX: Tensor, slots_NT: Tensor, num_heads: int) -> Tensor:
    """Attention of each query to the cache rows in its slots, written out."""
    rows = []
    for q_D, slots_T in zip(q_ND.double(), slots_NT.tolist(), strict=True):
        seen_TX = cache_RX.double()[[place for place in slots_T if place >= 0]]
        k_HTK, v_HTK = (
            x.unflatten(-1, (num_heads, -1)).transpose(0, 1) for x in seen_TX.chunk(2, -1)
        )
        rows.append(mixed(q_D.view(num_heads, 1, -1), k_HTK, v_HTK, None).flatten())
    return torch.stack(rows)


def slots_of(num_rows: int, count: int, num_stored: int, seed: int = 0) -> Tensor:
    """Cache rows in any order, some of them -1 (none); each query has at least one."""
    rng = torch.Generator().manual_seed(seed)
    slots_NT = torch.randint(-num_stored // 2, num_stored, (num_rows, count), generator=rng)
    slots_NT[:, -1].clamp_(min=0)
    return slots_NT.clamp(min=-1)


@EACH_WAY
@pytest.mark.parametrize(("num_heads", "width"), HEADS)
@pytest.mark.parametrize("count", [1, 4, 7, 33])
@torch.no_grad()
def test_paged_attention_equals_the_formula_written_out(
    way, calls, num_heads, width, count, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    d_model = num_heads * width
    q_ND = normal(5, d_model, dtype=way.dtype)
    cache_RX = normal(20, 2 * d_model, seed=1, dtype=way.dtype)
    slots_NT = slots_of(5, count, 20)
    out_ND = paged_attention(q_ND, cache_RX, slots_NT, num_heads)
    assert out_ND.dtype == way.dtype
    assert calls == (["paged_attention"] if way.is_compiled else [])
    way.assert_near(out_ND, attended(q_ND, cache_RX, slots_NT, num_heads))


@EACH_WAY
@pytest.mark.parametrize(("num_heads", "width"), HEADS)
@torch.no_grad()
def test_paged_attention_to_a_bfloat16_cache_equals_that_to_the_cache_in_the_query_dtype(
    way, calls, num_heads, width, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    d_model = num_heads * width
    q_ND, slots_NT = normal(5, d_model, dtype=way.dtype), slots_of(5, 7, 20)
    cache_RX = normal(20, 2 * d_model, seed=1, dtype=torch.bfloat16)
    found = paged_attention(q_ND, cache_RX, slots_NT, num_heads)
    assert calls == (["paged_attention"] if way.is_compiled else [])
    assert found.dtype == way.dtype
    way.assert_near(found, attended(q_ND, cache_RX, slots_NT, num_heads))
    assert torch.equal(found, paged_attention(q_ND, cache_RX.to(way.dtype), slots_NT, num_heads))


@EACH_WAY
@torch.no_grad()
def test_paged_attention_with_bfloat16_queries_rounds_a_float32_cache(way, calls):
    q_ND, slots_NT = normal(5, 12, dtype=torch.bfloat16), slots_of(5, 7, 20)
    cache_RX = normal(20, 24, seed=1, dtype=torch.float32)
    found = paged_attention(q_ND, cache_RX, slots_NT, 2)
    assert found.dtype is torch.bfloat16
    assert (
        "paged_attention" not in calls
    )  # the C function reads no cache that is wider than its queries
    rounded_RX = cache_RX.bfloat16()
    torch.testing.assert_close(
        found.double(), attended(q_ND, rounded_RX, slots_NT, 2), atol=0.03, rtol=0.03
    )


@EACH_WAY
def test_paged_attention_takes_queries_and_slots_that_are_not_contiguous(way, calls):
    """As in the model: queries are a slice of a projection, a window is a slice of the slots."""
    cache_RX, slots_NT = normal(20, 24, seed=1, dtype=way.dtype), slots_of(5, 11, 20)
    queries = normal(5, 36, dtype=way.dtype)[:, 12:24], normal(12, 5, dtype=way.dtype).T
    for q_ND in queries:
        for own_NT in (slots_NT[:, -3:], slots_NT.T.contiguous().T, slots_NT[:, -1:]):
            found = paged_attention(q_ND, cache_RX, own_NT, 2)
            way.assert_near(found, attended(q_ND, cache_RX, own_NT, 2))
    assert calls == ["paged_attention"] * (6 if way.is_compiled else 0)


TWO_OR_FOUR = pytest.mark.parametrize(("d_model", "heads"), [(12, 2), (128, 4)])


@EACH_WAY
@TWO_OR_FOUR
def test_paged_attention_reads_no_cache_row_outside_its_slots(way, calls, d_model, heads):
    """A cache has more rows than were written."""
    q_ND, cache_RX = (
        normal(5, d_model, dtype=way.dtype),
        normal(20, 2 * d_model, seed=1, dtype=way.dtype),
    )
    slots_NT = 1 + slots_of(5, 11, 9)
    slots_NT[slots_NT == 0] = -1
    expected = paged_attention(q_ND, cache_RX, slots_NT, heads)
    cache_RX[10:] = math.nan
    assert torch.equal(paged_attention(q_ND, cache_RX, slots_NT, heads), expected)


@EACH_WAY
@TWO_OR_FOUR
def test_paged_attention_with_extreme_scores_equals_the_formula(way, calls, d_model, heads):
    q_ND, cache_RX = (
        normal(5, d_model, dtype=way.dtype) * 1e4,
        normal(20, 2 * d_model, seed=1, dtype=way.dtype),
    )
    slots_NT = slots_of(5, 11, 20)
    found = paged_attention(q_ND, cache_RX, slots_NT, heads)
    way.assert_near(found, attended(q_ND, cache_RX, slots_NT, heads), floor=1e-7)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("half", [0, 1])
@TWO_OR_FOUR
def test_paged_attention_propagates_nan_and_inf_only_to_queries_that_read_them(
    way, calls, value, half, d_model, heads
):
    q_ND, cache_RX = (
        normal(2, d_model, dtype=way.dtype),
        normal(20, 2 * d_model, seed=1, dtype=way.dtype),
    )
    cache_RX[7, half * d_model + 3] = value
    out_ND = paged_attention(q_ND.abs(), cache_RX, torch.tensor([[3, 7, -1], [4, 5, 6]]), heads)
    assert not out_ND[0].isfinite().all()
    assert out_ND[1].isfinite().all()


@EACH_WAY
@TWO_OR_FOUR
def test_a_nan_in_the_first_cache_row_does_not_reach_queries_with_padding(
    way, calls, d_model, heads
):
    q_ND, cache_RX = (
        normal(2, d_model, dtype=way.dtype),
        normal(20, 2 * d_model, seed=1, dtype=way.dtype),
    )
    slots_NT = torch.tensor([[3, 7, -1], [4, 5, 6]])
    expected = paged_attention(q_ND, cache_RX, slots_NT, heads)
    cache_RX[0] = math.nan
    assert torch.equal(paged_attention(q_ND, cache_RX, slots_NT, heads), expected)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_attention_propagates_nan_and_inf_to_its_output_and_gradients(way, calls, value, which):
    inputs = queries_keys_values(5, 20, 6, way.dtype)
    tensor = inputs["qkv".index(which)]
    with torch.no_grad():
        tensor[1, 2, 3, 4] = value
    out = attention(*inputs, keep_of("padding", 5, 20).logical_not() | (torch.arange(20) < 9))
    assert not out[1, 2].isfinite().all()
    assert out[0].isfinite().all()
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert not all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("rows", [[0, 9], [9, 0], [2**61, 0], [-1, 9]])
@BOTH_PATHS
@torch.no_grad()
def test_a_slot_outside_the_cache_raises_an_index_error(way, calls, one_thread, rows):
    """Once in the first query, and once in the last."""
    q_ND, cache_RX = normal(4, 6, dtype=way.dtype), normal(9, 12, dtype=way.dtype)
    for place in (0, 3):
        slots_NT = torch.tensor([[0, 8]] * 4)
        slots_NT[place] = torch.tensor(rows)
        with pytest.raises(IndexError, match="index"):
            paged_attention(q_ND, cache_RX, slots_NT, 2)
