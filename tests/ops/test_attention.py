"""Hold each fast operation, plain and compiled, to the formula that it stands for, in float64."""

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from ways import (
    BOTH_PATHS,
    EACH_WAY,
    LONG,
    SAME,
    SHORT,
    Way,
    exactly,
    grads_of,
    leaf,
    normal,
)

from mtrain.ops import attention as attention_module
from mtrain.ops import native
from mtrain.ops.attention import attention, chunk_last, paged_attention
from mtrain.ops.dropout import Dropout, DropoutMask, dropout_seeds
from mtrain.ops.layer_norm import LayerNorm, add_norm
from mtrain.ops.topk import top_tokens
from mtrain.runtime.device import compute_dtype

DROPS = DropoutMask(round(0.3 * 2**16), 2**16 / (2**16 - round(0.3 * 2**16)), 0x9E3779B9)


def fixed(dropout: Dropout, drops: DropoutMask = DROPS) -> Dropout:
    """Let a dropout drop the same at every call."""
    dropout.draw = lambda: drops
    return dropout.train()


def share_of(shape: tuple[int, ...], drops: DropoutMask = DROPS) -> Tensor:
    """Return what dropout multiplies with: 0 or the scale."""
    return (fixed(Dropout(0.3), drops)(torch.ones(shape)) != 0).double() * drops.scale


# LayerNorm, and add_norm


def norm_of(width: int, dtype: torch.dtype = torch.float32) -> LayerNorm:
    norm = LayerNorm(width)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * normal(width, seed=11))
        norm.bias.copy_(0.3 * normal(width, seed=12))
    return norm.to(dtype)


def normalised(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer normalisation written out."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * gain + bias


# of one number or two, only signs are left: their gradient is a difference of like numbers
FLOOR = {False: 1e-11, True: 5e-4}


def spread_out(*shape: int, seed: int = 0, dtype: torch.dtype) -> Tensor:
    """Return a leaf whose first column is far from the others, so that no row is nearly even."""
    x = normal(*shape, seed=seed, dtype=dtype)
    x[..., 0] += 5
    return x.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, SHORT])
@pytest.mark.parametrize("width", [1, 2, 6, 130])
def test_layer_norm_is_the_formula_written_out_in_the_type_of_its_weights(width, dtype):
    norm, x = norm_of(width, LONG[dtype]), spread_out(3, 7, width, dtype=dtype)
    upstream = normal(3, 7, width, seed=1, dtype=dtype)
    ours = grads_of(norm(x), upstream, [x, *norm.parameters()])
    exact = exactly([x, *norm.parameters()])
    expected = grads_of(normalised(*exact), upstream, exact)
    assert [tensor.dtype for tensor in ours] == [dtype, dtype, LONG[dtype], LONG[dtype]]
    for mine, formula in zip(ours, expected, strict=True):
        Way(False, dtype).assert_near(mine, formula, floor=FLOOR[width < 3])


@EACH_WAY
@pytest.mark.parametrize("drops", [DropoutMask(0, 1.0, 0), DROPS], ids=["whole", "dropped"])
@pytest.mark.parametrize(
    ("rows", "width"), [(5, 1), (5, 2), (5, 6), (1, 17), (5, 17), (129, 128), (7, 130), (300, 6)]
)
def test_add_norm_is_the_formula_written_out(way, calls, drops, rows, width):
    norm = norm_of(width, LONG[way.dtype])
    x = spread_out(1, rows, width, dtype=way.dtype)
    branch = leaf(1, rows, width, seed=1, dtype=way.dtype)
    dropout = fixed(Dropout(0.3), drops) if drops.cut else Dropout(0.0)
    upstream = normal(1, rows, width, seed=2, dtype=way.dtype)
    inputs = [x, branch, *norm.parameters()]
    ours = grads_of(add_norm(x, branch, dropout, norm), upstream, inputs)
    assert calls == (["add_norm", "add_norm_grad"] if way.is_compiled else [])
    assert [tensor.dtype for tensor in ours] == [way.dtype, *(one.dtype for one in inputs)]

    exact = exactly(inputs)
    share = share_of((1, rows, width), drops)
    expected = grads_of(normalised(exact[0] + share * exact[1], *exact[2:]), upstream, exact)
    for mine, formula in zip(ours, expected, strict=True):
        way.assert_near(mine, formula, way.roundings, FLOOR[width < 3])


@EACH_WAY
def test_add_norm_takes_tensors_that_are_not_contiguous(way, calls):
    norm = norm_of(6, LONG[way.dtype])
    x, branch = leaf(6, 4, 3, dtype=way.dtype), leaf(3, 6, 4, seed=1, dtype=way.dtype)
    inputs = [x, branch, *norm.parameters()]
    upstream = normal(6, 3, 4, seed=2, dtype=way.dtype).permute(1, 2, 0)
    out = add_norm(x.transpose(0, 2), branch.transpose(1, 2), Dropout(0.0), norm)
    ours = grads_of(out, upstream, inputs)
    exact = exactly(inputs)
    summed = exact[0].transpose(0, 2) + exact[1].transpose(1, 2)
    expected = grads_of(normalised(summed, *exact[2:]), upstream, exact)
    for mine, formula in zip(ours, expected, strict=True):
        way.assert_near(mine, formula, way.roundings)


def test_add_norm_without_a_compiler_passes_gradcheck(monkeypatch):
    monkeypatch.setattr(attention_module.native, "compiled", lambda: None)
    norm, dropout = norm_of(6, torch.float64), fixed(Dropout(0.3))
    inputs = (leaf(2, 3, 6), leaf(2, 3, 6, seed=1))
    assert torch.autograd.gradcheck(lambda x, branch: add_norm(x, branch, dropout, norm), inputs)


# attention

KINDS = ["everything", "causal", "padding", "empty", "scattered", "window"]


def keep_of(kind: str, num_queries: int, num_keys: int, batch: int = 2) -> Tensor | None:
    """Return a mask as the model makes it, or wilder."""
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
    if kind == "empty":  # one of the sentences keeps no key
        lengths[1] = 0
    return (torch.arange(num_keys) < lengths[:, None])[:, None, None, :]


def mixed(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, share: Tensor | float = 1.0
) -> Tensor:
    """softmax(q k^T / sqrt(d_k)) v written out; a row that keeps nothing weighs all alike."""
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
    """How often a sum's terms are rounded: weights are, where products come in pairs."""
    return 2 if way.is_compiled and way.dtype is SHORT else 1


def queries_keys_values(
    num_queries: int, num_keys: int, width: int, dtype: torch.dtype, batch: int = 2, heads: int = 3
) -> list[Tensor]:
    lengths = (num_queries, num_keys, num_keys)
    return [leaf(batch, heads, n, width, seed=i, dtype=dtype) for i, n in enumerate(lengths)]


def assert_mixed(way: Way, inputs: list[Tensor], keep: Tensor | None, floor: float = 1e-11) -> None:
    """Hold attention and its gradients to the formula."""
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
def test_attention_is_the_formula_written_out(way, calls, num_keys, kind):
    inputs = queries_keys_values(5, num_keys, 6, way.dtype)
    keep, is_compiled = keep_of(kind, 5, num_keys), has_compiled_attention(way, num_keys)
    if kind != "empty" or is_compiled or num_keys <= attention_module._MAX_MATMUL_KEYS:
        assert_mixed(way, inputs, keep)
    else:  # where nothing is kept, PyTorch's fused kernel has another gradient
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
def test_attention_takes_heads_that_lie_side_by_side(way, calls, kind):
    """As the model cuts them out of one product, and merges them again."""
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
    """Return what parts are cut out of: a tensor that has a history."""
    return torch.cat([x * (1 + number) for number in range(count)], -1)


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 2, 3).transpose(1, 2)


@EACH_WAY
@pytest.mark.parametrize("lengths", [(5, 7), (7, 7), (1, 1)])
def test_parts_are_torchs_chunks_forward_and_backward(way, calls, lengths):
    """Of a sequence that attends to itself, and of one that attends to another."""
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
def test_the_gradients_of_parts_that_attention_made_stay_where_they_are(dtype, monkeypatch):
    x = leaf(3, 7, 18, dtype=dtype)
    mixed_up = attention(*map(heads, chunk_last(x, 3)), None)
    monkeypatch.setattr(torch, "cat", None)
    mixed_up.backward(normal(3, 2, 7, 3, dtype=dtype))
    assert x.grad.is_contiguous() and x.grad.count_nonzero() == x.numel()


@EACH_WAY
@pytest.mark.parametrize("used", [[0], [2], [0, 1, 2], [0, 0, 1, 2]])
def test_the_gradients_of_parts_come_from_anywhere(way, calls, used):
    """Of parts that nothing reads they are zero."""
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
def test_gradients_that_lie_side_by_side_in_another_order_are_put_in_theirs(order):
    x, above = leaf(2, 3, 8, dtype=torch.float32), normal(2, 3, 8, dtype=torch.float32)
    given = [above.chunk(2, -1)[number] for number in order]
    (found,) = torch.autograd.grad(chunk_last(x, 2), x, given)
    assert torch.equal(found, torch.cat(given, -1))


@EACH_WAY
def test_attention_takes_any_strides(way, calls):
    """Each of its tensors lies in memory in an order of its own."""
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
def test_the_gradient_of_attention_can_be_a_single_number_for_all(way, calls):
    inputs = queries_keys_values(5, 7, 6, way.dtype)
    attention(*inputs, None).sum().backward()  # an expanded scalar
    exact = exactly(inputs)
    mixed(*exact, None).sum().backward()
    for mine, formula in zip(inputs, exact, strict=True):
        way.assert_near(mine.grad, formula.grad, roundings_of_attention(way))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_attention_is_torchs_own(kind):
    inputs, keep = queries_keys_values(5, 7, 6, torch.float64), keep_of(kind, 5, 7)
    reference = F.scaled_dot_product_attention(*inputs, attn_mask=keep)
    torch.testing.assert_close(attention(*inputs, keep), reference, **SAME)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, SHORT])
@torch.no_grad()
def test_all_plain_paths_of_attention_agree(kind, dtype, monkeypatch):
    q, k, v = queries_keys_values(7, 7, 6, dtype)
    keep = keep_of(kind, 7, 7)
    batched = attention(q, k, v, keep)
    monkeypatch.setattr(attention_module, "_MAX_MATMUL_KEYS", 0)
    torch.testing.assert_close(attention(q, k, v, keep), batched)


@EACH_WAY
@pytest.mark.parametrize("num_keys", [7, *BEYOND])
def test_a_query_that_keeps_no_key_gets_the_mean_of_all_values(way, calls, num_keys):
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
def test_a_key_that_is_not_kept_has_exactly_no_influence(way, calls, num_keys):
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
def test_attention_drops_weights_after_the_softmax_and_the_same_ones_backward(
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
def test_attention_zeroes_a_share_of_the_weights_and_keeps_their_expectation(way, calls, num_keys):
    """With values that are unit vectors, the output is the weights themselves: all the same."""
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
def test_plain_attention_with_dropout_passes_gradcheck(num_keys, kind):
    keep, dropout = keep_of(kind, 2, num_keys), fixed(Dropout(0.3))
    inputs = queries_keys_values(2, num_keys, 2, torch.float64, heads=1)
    inputs[1:] = [x.detach() for x in inputs[1:]] if num_keys > 10 else inputs[1:]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, keep, dropout), inputs)


@EACH_WAY
def test_attention_of_extreme_scores_stays_finite_and_right(way, calls):
    q, k, v = queries_keys_values(5, 7, 6, way.dtype)
    with torch.no_grad():
        q *= 1e4
    # where one key takes nearly all, the gradient is a difference of like numbers
    assert_mixed(way, [q, k, v], keep_of("padding", 5, 7), floor=1e-7)


RUN_OUT_OF_MEMORY = """
import ctypes, resource, sys
import torch
from mtrain.ops import native
from mtrain.ops.attention import attention

library = native._typed(ctypes.CDLL(sys.argv[1]))
native.compiled = lambda: library

def leave_only(num_bytes: int) -> None:
    with open("/proc/self/statm") as pages:
        held = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + num_bytes, resource.RLIM_INFINITY))

q, keys = torch.ones(1, 1, 200_000, 1, requires_grad=True), torch.ones(1, 1, 100, 1)
torch.ones(1, requires_grad=True).sum().backward()  # which starts a thread
if sys.argv[2] == "backward":
    out = attention(q, keys, keys, None).sum()
leave_only(20_000_000)
try:
    attention(q, keys, keys, None) if sys.argv[2] == "forward" else out.backward()
except MemoryError:
    print("MemoryError")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much a process holds")
@pytest.mark.parametrize("way_through", ["forward", "backward"])
def test_attention_that_the_memory_does_not_hold_says_so(calls, way_through):
    """An update is made in halves then."""
    command = [sys.executable, "-c", RUN_OUT_OF_MEMORY, native.compiled()._name, way_through]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "MemoryError\n", "")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_not_trained_is_compiled_on_one_thread_alone(calls, num_threads, monkeypatch):
    """With several, a plain formula splits its work over them, and a compiled function does not."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    inputs = queries_keys_values(5, 7, 6, torch.float32)
    cache_RX, slots_NT = normal(9, 12, dtype=torch.float32), torch.tensor([[0, 8], [2, -1]])
    with torch.inference_mode():
        attention(*inputs, None)
        add_norm(inputs[0], inputs[0], Dropout(0.0), norm_of(6))
        Dropout(0.5).train()(inputs[0])
        paged_attention(cache_RX[:2, :6], cache_RX, slots_NT, 2)
        top_tokens(cache_RX, [0], 3)
    compiled = ["attention", "add_norm", "dropout", "paged_attention", "topk"]
    assert calls == (compiled if num_threads == 1 else [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_types_that_were_not_compiled_take_the_plain_formula(calls, dtype):
    x = normal(2, 3, 5, 6, dtype=dtype)
    assert attention(x, x, x, None).dtype == dtype
    assert Dropout(0.5).train()(x).dtype == dtype
    assert add_norm(x, x, Dropout(0.5).train(), norm_of(6)).dtype == dtype
    assert (
        paged_attention(x[0, 0, :, :3], x[0, 0], torch.zeros(5, 1, dtype=torch.long), 1).dtype
        == dtype
    )
    assert top_tokens(x[0, 0], [], 2).log_prob_NC.dtype == dtype
    assert calls == []


def test_types_that_are_mixed_take_the_plain_formula(calls):
    x, branch, norm = normal(5, 6, dtype=torch.float32), normal(5, 6, dtype=SHORT), norm_of(6)
    mixed_types = add_norm(x, branch, Dropout(0.0), norm)
    torch.testing.assert_close(mixed_types, norm(x + branch))
    assert calls == []


# attend

HEADS = [(1, 1), (2, 6), (3, 16), (1, 17), (3, 32), (2, 64), (1, 257)]  # how many, width


def attended(q_ND: Tensor, cache_RX: Tensor, slots_NT: Tensor, num_heads: int) -> Tensor:
    """Each query over the rows that it names, written out."""
    rows = []
    for q_D, slots_T in zip(q_ND.double(), slots_NT.tolist(), strict=True):
        seen_TX = cache_RX.double()[[place for place in slots_T if place >= 0]]
        k_HTK, v_HTK = (
            x.unflatten(-1, (num_heads, -1)).transpose(0, 1) for x in seen_TX.chunk(2, -1)
        )
        rows.append(mixed(q_D.view(num_heads, 1, -1), k_HTK, v_HTK, None).flatten())
    return torch.stack(rows)


def slots_of(num_rows: int, count: int, num_stored: int, seed: int = 0) -> Tensor:
    """Rows of the store in any order, some of them none; each query names at least one."""
    rng = torch.Generator().manual_seed(seed)
    slots_NT = torch.randint(-num_stored // 2, num_stored, (num_rows, count), generator=rng)
    slots_NT[:, -1].clamp_(min=0)
    return slots_NT.clamp(min=-1)


@EACH_WAY
@pytest.mark.parametrize(("num_heads", "width"), HEADS)
@pytest.mark.parametrize("count", [1, 7, 33])
@torch.no_grad()
def test_attend_is_the_formula_written_out(way, calls, num_heads, width, count, monkeypatch):
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
def test_attend_takes_queries_and_places_that_are_not_contiguous(way, calls):
    """As the model cuts them: queries out of one product, a window out of all places."""
    cache_RX, slots_NT = normal(20, 24, seed=1, dtype=way.dtype), slots_of(5, 11, 20)
    queries = normal(5, 36, dtype=way.dtype)[:, 12:24], normal(12, 5, dtype=way.dtype).T
    for q_ND in queries:
        for own_NT in (slots_NT[:, -3:], slots_NT.T.contiguous().T, slots_NT[:, -1:]):
            found = paged_attention(q_ND, cache_RX, own_NT, 2)
            way.assert_near(found, attended(q_ND, cache_RX, own_NT, 2))
    assert calls == ["paged_attention"] * (6 if way.is_compiled else 0)


@EACH_WAY
def test_attend_reads_no_row_that_is_not_named(way, calls):
    """A store is larger than what was written into it."""
    q_ND, cache_RX = normal(5, 12, dtype=way.dtype), normal(20, 24, seed=1, dtype=way.dtype)
    slots_NT = 1 + slots_of(5, 11, 9)
    slots_NT[slots_NT == 0] = -1
    expected = paged_attention(q_ND, cache_RX, slots_NT, 2)
    cache_RX[10:] = math.nan
    assert torch.equal(paged_attention(q_ND, cache_RX, slots_NT, 2), expected)


@EACH_WAY
def test_attend_of_extreme_scores_stays_finite_and_right(way, calls):
    q_ND, cache_RX = normal(5, 12, dtype=way.dtype) * 1e4, normal(20, 24, seed=1, dtype=way.dtype)
    slots_NT = slots_of(5, 11, 20)
    found = paged_attention(q_ND, cache_RX, slots_NT, 2)
    way.assert_near(found, attended(q_ND, cache_RX, slots_NT, 2), floor=1e-7)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("column", [3, 15])
def test_attend_hands_on_what_is_not_finite_to_those_who_read_it(way, calls, value, column):
    q_ND, cache_RX = normal(2, 12, dtype=way.dtype), normal(20, 24, seed=1, dtype=way.dtype)
    cache_RX[7, column] = value
    out_ND = paged_attention(q_ND.abs(), cache_RX, torch.tensor([[3, 7, -1], [4, 5, 6]]), 2)
    assert not out_ND[0].isfinite().all()
    assert out_ND[1].isfinite().all()


# Dropout

MANY_ELEMENTS = 1 << 18


def dropped(x: Tensor, rate: float, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return Dropout(rate).train()(x)


def five_deviations(rate: float, count: int) -> float:
    return 5 * math.sqrt(rate * (1 - rate) / count)


@EACH_WAY
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_dropout_zeroes_its_rate_and_scales_the_rest(way, calls, rate):
    x = torch.full((MANY_ELEMENTS,), 3.0, dtype=way.dtype)
    out = dropped(x, rate)
    assert out.dtype == way.dtype
    assert calls == (["dropout"] if way.is_compiled else [])
    share = float((out == 0).double().mean())
    assert share == pytest.approx(rate, abs=five_deviations(rate, MANY_ELEMENTS))
    rest = out[out != 0].double()
    torch.testing.assert_close(rest, torch.full_like(rest, 3.0 / (1 - rate)), rtol=0.004, atol=0)
    assert float(out.double().mean()) == pytest.approx(3.0, rel=0.05)


@BOTH_PATHS
def test_dropout_keeps_the_expectation_exactly(way, calls):
    # 16 bits cannot express every rate: the scale must fit the rate that is really used
    rate = 1 / 3
    scale = float(dropped(torch.ones(100), rate).max())
    kept_levels = 2**16 / scale
    assert kept_levels == pytest.approx(round(kept_levels), abs=0.01)
    assert 1 - kept_levels / 2**16 == pytest.approx(rate, abs=2**-16)


@BOTH_PATHS
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 16, 128, 512, 32768])
def test_dropout_draws_every_element_on_its_own(way, calls, distance):
    """Of neighbours in a row, and of those below each other, both go as often as chance has it."""
    rate = 0.3
    is_zero = (dropped(torch.ones(MANY_ELEMENTS), rate) == 0).double()
    both = float((is_zero[distance:] * is_zero[:-distance]).mean())
    bound = five_deviations(rate**2, MANY_ELEMENTS - distance)
    assert both == pytest.approx(rate**2, abs=1.5 * bound)


@BOTH_PATHS
def test_dropout_has_the_same_rate_at_every_place(way, calls):
    rate = 0.3
    is_zero = (dropped(torch.ones(MANY_ELEMENTS), rate) == 0).double()
    for width in (4, 16, 128):
        shares = is_zero.view(-1, width).mean(0)
        bound = five_deviations(rate, MANY_ELEMENTS // width)
        torch.testing.assert_close(shares, torch.full_like(shares, rate), rtol=0, atol=bound)


@BOTH_PATHS
@pytest.mark.parametrize("change", [1, 2, 0x80, 0x10000, 0x80000000])
def test_dropout_of_two_seeds_is_independent(way, calls, change):
    first, second = (
        share_of((MANY_ELEMENTS,), DROPS._replace(seed=seed)) == 0
        for seed in (DROPS.seed, DROPS.seed ^ change)
    )
    both = float((first & second).double().mean())
    rate = DROPS.cut / 2**16
    assert both == pytest.approx(rate**2, abs=five_deviations(rate**2, MANY_ELEMENTS))


@EACH_WAY
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 7), (2, 3, 5), (1000,)])
def test_dropout_drops_the_same_elements_backward_as_forward(way, calls, shape):
    x = leaf(*shape, dtype=way.dtype)
    upstream = normal(*shape, seed=1, dtype=way.dtype)
    out, grad = grads_of(fixed(Dropout(0.3))(x), upstream, [x])
    assert calls == (["dropout"] * 2 if way.is_compiled else [])
    share = share_of(shape)
    way.assert_near(out, share * x.detach().double())
    way.assert_near(grad, share * upstream.double())


@EACH_WAY
def test_dropout_takes_an_input_and_a_gradient_that_are_not_contiguous(way, calls):
    x = torch.arange(1.0, 13.0, dtype=way.dtype).view(3, 4).requires_grad_()
    out = fixed(Dropout(0.3))(x.T)
    way.assert_near(out, share_of((4, 3)) * x.detach().T.double())
    out.sum().backward()  # an expanded scalar
    way.assert_near(x.grad, share_of((4, 3)).T)


@pytest.mark.parametrize("module", [Dropout(0.5).eval(), Dropout(0.0).train()])
def test_dropout_is_the_identity_in_eval_mode_and_at_rate_zero(module):
    x = normal(3, 4)
    assert module(x) is x
    assert module.draw() == DropoutMask(0, 1.0, 0)


@BOTH_PATHS
def test_dropout_follows_from_the_seed(way, calls):
    x = torch.ones(64)
    assert torch.equal(dropped(x, 0.5, seed=7), dropped(x, 0.5, seed=7))
    assert not torch.equal(dropped(x, 0.5, seed=7), dropped(x, 0.5, seed=8))


@BOTH_PATHS
def test_dropout_draws_anew_at_every_call(way, calls):
    torch.manual_seed(0)
    module = Dropout(0.5).train()
    x = torch.ones(64)
    assert not torch.equal(module(x), module(x))


@BOTH_PATHS
@pytest.mark.parametrize("cut", [1, 2**16 - 1])
def test_one_level_of_dropout_is_neither_none_nor_two(way, calls, cut):
    num_kept = int((share_of((MANY_ELEMENTS,), DropoutMask(cut, 1.0, 3)) != 0).sum())
    exceptions = num_kept if cut > 1 else MANY_ELEMENTS - num_kept
    assert 0 < exceptions < 12  # four, as chance has it


@pytest.mark.parametrize("rate", [1e-9, 0.999999])
def test_the_least_and_the_greatest_rate_leave_something_to_chance(rate):
    drops = Dropout(rate).train().draw()
    assert 0 < drops.cut < 2**16
    assert drops.scale == 2**16 / (2**16 - drops.cut)


# dropout_seeds


def draws(count: int = 3) -> list[int]:
    return [Dropout(0.5).train().draw().seed for _ in range(count)]


def test_dropout_follows_from_its_own_seed_whatever_pytorch_draws():
    torch.manual_seed(1)
    with dropout_seeds(7):
        first = draws()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    with dropout_seeds(7):
        assert draws() == first
    with dropout_seeds(8):
        assert draws() != first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "nothing was drawn from PyTorch"
    assert len(set(first)) == 3
    assert all(0 <= seed < 2**32 for seed in first)


def test_without_a_seed_dropout_follows_from_pytorch():
    torch.manual_seed(1)
    expected = draws()
    torch.manual_seed(1)
    with dropout_seeds(None):
        assert draws() == expected
    torch.manual_seed(1)
    with dropout_seeds(7):
        draws()
    assert draws() == expected


def test_the_seed_is_forgotten_after_an_error():
    torch.manual_seed(1)
    expected = draws()
    torch.manual_seed(1)
    with pytest.raises(MemoryError), dropout_seeds(7):
        raise MemoryError
    assert draws() == expected


def test_each_thread_has_a_seed_of_its_own():
    barrier, found = threading.Barrier(2), {}

    def draw(seed: int) -> None:
        with dropout_seeds(seed):
            barrier.wait(timeout=60)
            found[seed] = draws()
            barrier.wait(timeout=60)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in (7, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (7, 8):
        with dropout_seeds(seed):
            assert found[seed] == draws()


# How compiled numbers are stored, and powers computed


def test_compiled_functions_round_to_bfloat16_as_pytorch_does(calls):
    """To the nearest, ties to even: half of these products lie between two numbers."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(SHORT)
    found = fixed(Dropout(0.3), DropoutMask(0, 1.5, 1))(x)
    assert calls == ["dropout"]
    assert torch.equal(found.isnan(), x.isnan())
    expected = (x.float() * 1.5).to(SHORT)
    is_number = ~x.isnan()
    assert torch.equal(found[is_number].view(torch.int16), expected[is_number].view(torch.int16))


# What is not a number must not get lost: training stops when it sees one


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_attention_hands_on_what_is_not_finite(way, calls, value, which):
    inputs = queries_keys_values(5, 20, 6, way.dtype)
    tensor = inputs["qkv".index(which)]
    with torch.no_grad():
        tensor[1, 2, 3, 4] = value
    out = attention(*inputs, keep_of("padding", 5, 20).logical_not() | (torch.arange(20) < 9))
    assert not out[1, 2].isfinite().all()
    assert out[0].isfinite().all()
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert not all(grad.isfinite().all() for grad in grads)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["x", "branch"])
def test_add_norm_hands_on_what_is_not_finite(way, calls, value, which):
    norm = norm_of(20, LONG[way.dtype])
    x, branch = (leaf(3, 20, seed=seed, dtype=way.dtype) for seed in range(2))
    with torch.no_grad():
        (x if which == "x" else branch)[1, 18] = value
    out = add_norm(x, branch, Dropout(0.0), norm)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    grads = torch.autograd.grad(out, [x, branch], torch.ones_like(out))
    assert all(grad[1].isnan().all() for grad in grads)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_handed_on(way, calls, value):
    inputs = queries_keys_values(5, 20, 6, way.dtype)
    norm = norm_of(6, LONG[way.dtype])
    upstream = normal(2, 3, 5, 6, dtype=way.dtype)
    upstream[1, 2, 4, 5] = value
    for out in (
        attention(*inputs, None),
        add_norm(inputs[0], inputs[0], Dropout(0.0), norm),
        fixed(Dropout(0.3), DropoutMask(1, 1.0, 1))(inputs[0]),
    ):
        (grad,) = torch.autograd.grad(out, inputs[:1], upstream)
        assert not grad.isfinite().all()


@EACH_WAY
def test_dropout_hands_on_what_is_not_finite(way, calls):
    x = leaf(3, 4, dtype=way.dtype)
    with torch.no_grad():
        x[1] = math.nan
        x[2] = math.inf
    out = fixed(Dropout(0.3), DropoutMask(1, 1.0, 1))(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()


# the type of states and products


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_named_precision_decides_the_type_of_states_and_products(kind):
    device = torch.device(kind)
    assert compute_dtype("bfloat16", device) is torch.bfloat16
    assert compute_dtype("float32", device) is torch.float32


@pytest.mark.parametrize(("major", "expected"), [(7, torch.float32), (9, torch.bfloat16)])
def test_automatic_precision_is_bfloat16_where_the_gpu_has_it(major, expected, monkeypatch):
    """PyTorch lets an older GPU emulate it, which is slow."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    assert compute_dtype("auto", torch.device("cuda")) is expected


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ({}, torch.float32),  # a PyTorch that knows nothing of the processor
        ({"_is_avx512_bf16_supported": False}, torch.float32),
        ({"_is_avx512_bf16_supported": False, "_is_amx_tile_supported": True}, torch.bfloat16),
        ({"_is_avx512_bf16_supported": True}, torch.bfloat16),
    ],
)
def test_automatic_precision_is_bfloat16_where_the_processor_has_it(checks, expected, monkeypatch):
    known = SimpleNamespace(**{name: lambda fast=fast: fast for name, fast in checks.items()})
    monkeypatch.setattr(torch, "cpu", known)
    assert compute_dtype("auto", torch.device("cpu")) is expected
