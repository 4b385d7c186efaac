"""Hold linear maps and the loss to the formulas that they stand for, in float64."""

import math
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from ways import (
    BOTH_PATHS,
    EACH_PRODUCT,
    EACH_WAY,
    LONG,
    MULTIPLIED,
    SAME,
    SHORT,
    Way,
    exactly,
    grads_of,
    leaf,
    normal,
)

from mtrain.ops import cross_entropy, native
from mtrain.ops import linear as linear_module
from mtrain.ops.cross_entropy import ProjectedCrossEntropy
from mtrain.ops.linear import Linear, relu_ffn
from mtrain.ops.topk import LazyLogits, Projection, TopTokens, argmax_tokens, top_tokens

MULTIPLYING = pytest.mark.parametrize("way", MULTIPLIED, ids=str)
MULTIPLYING_PAIRS = pytest.mark.parametrize("way", MULTIPLIED[1:], ids=str)
SAY_MOST = """
import ctypes, sys
import torch
from mtrain.ops import native
from mtrain.ops.cross_entropy import ProjectedCrossEntropy
from mtrain.ops.topk import Projection, top_tokens

library = native._typed(ctypes.CDLL(sys.argv[1]))
native.compiled = lambda: library

def most() -> int:  # KiB
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
"""
SAY_GROWTH_OF_LOSS = f"""{SAY_MOST}
native.Functions.has_fast_matmul = lambda functions: True
states = torch.ones(20_000, 2, dtype=getattr(torch, sys.argv[2]), requires_grad=True)
weight, targets = torch.ones(4_000, 2, requires_grad=True), torch.arange(20_000) % 4_000
ProjectedCrossEntropy.apply(states[:1], weight, targets[:1], 0.1)[0].backward()
before = most()
ProjectedCrossEntropy.apply(states, weight, targets, 0.1)[0].backward()
print(most() - before)
"""
SAY_GROWTH_OF_SEARCH = f"""{SAY_MOST}
torch.set_num_threads(1)
projection, states = Projection(2, 4_000), torch.ones(20_000, 2)
projection.pack_weights()
with torch.inference_mode():
    top_tokens(projection.logits(states[:1]), [0], 5)
    before = most()
    top_tokens(projection.logits(states), [0], 5)
print(most() - before)
"""


# Linear


def linear(weights: torch.dtype = torch.float32, bias: bool = True) -> Linear:
    torch.manual_seed(3)
    layer = Linear(6, 5, bias=bias).to(weights)
    if bias:
        nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("weights", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (2, 1, 3, 6)])
def test_linear_is_the_plain_formula_forward_and_backward(weights, bias, shape):
    """In float64 throughout, and with weights of another type than the input."""
    layer, x = linear(weights, bias), leaf(*shape)
    upstream = normal(*shape[:-1], 5, seed=1)
    parameters = list(layer.parameters())
    out, grad_x, *grads = grads_of(layer(x), upstream, [x, *parameters])
    assert out.dtype == grad_x.dtype == torch.float64
    assert {grad.dtype for grad in grads} == {weights}

    rows, up, matrix = x.detach().reshape(-1, 6), upstream.reshape(-1, 5), layer.weight.double()
    expected = rows @ matrix.T + (layer.bias.double() if bias else 0)
    torch.testing.assert_close(out, expected.view(*shape[:-1], 5), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(grad_x, (up @ matrix).view(shape), rtol=1e-14, atol=1e-14)
    one_rounding = {"rtol": 1e-7 if weights == torch.float32 else 1e-14, "atol": 1e-14}
    torch.testing.assert_close(grads[0].double(), up.T @ rows, **one_rounding)
    if bias:
        torch.testing.assert_close(grads[1].double(), up.sum(0), **one_rounding)


@pytest.mark.parametrize("num_rows", [1, 127, 128, 129, 300])
def test_filling_up_the_rows_of_a_product_changes_nothing(num_rows):
    layer, x = linear(), leaf(num_rows, 6)
    upstream = normal(num_rows, 5, seed=1)
    parameters = list(layer.parameters())
    ours = grads_of(layer(x), upstream, [x, *parameters])
    plain = F.linear(x, layer.weight.double(), layer.bias.double())
    expected = grads_of(plain, upstream, [x, *parameters])
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)


@BOTH_PATHS
def test_linear_of_its_own_type_is_torchs_where_products_are_not_compiled(way, calls):
    layer, x = linear(), normal(4, 6, dtype=torch.float32)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert calls == []


def test_batches_of_many_sizes_ask_for_products_of_few_sizes(monkeypatch):
    sizes, multiply, map_linearly = set(), torch.mm, F.linear

    def note(left: Tensor, right: Tensor, **out: Tensor) -> Tensor:
        sizes.add((tuple(left.shape), tuple(right.shape)))
        return multiply(left, right, **out)

    def note_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sizes.add((tuple(x.shape), tuple(weight.shape)))
        return map_linearly(x, weight, bias)

    monkeypatch.setattr(torch, "mm", note)
    monkeypatch.setattr(linear_module.F, "linear", note_linear)
    layer, weight = linear(), leaf(9, 5, dtype=torch.float32)
    for num_rows in range(1, 129, 7):
        states = layer(leaf(num_rows, 6, dtype=SHORT))
        ProjectedCrossEntropy.apply(states, weight, torch.arange(num_rows) % 9, 0.1)[0].backward()
    assert len(sizes) == 6  # forward, and each operand's gradient, of two projections


def test_linear_in_another_type_than_its_weights_passes_gradcheck():
    layer = linear()
    assert torch.autograd.gradcheck(layer, leaf(2, 3, 6))


def test_linear_in_bfloat16_rounds_its_operands_and_its_results():
    layer, x = linear(), leaf(40, 6, dtype=SHORT)
    upstream = normal(40, 5, seed=1, dtype=SHORT)
    out, grad_x, grad_weight, grad_bias = grads_of(layer(x), upstream, [x, *layer.parameters()])
    assert out.dtype == grad_x.dtype == SHORT
    assert grad_weight.dtype == grad_bias.dtype == torch.float32

    way, up, rows = Way(False, SHORT), upstream.double(), x.detach().double()
    matrix = layer.weight.detach().to(SHORT).double()
    way.assert_near(out, rows @ matrix.T + layer.bias.detach().to(SHORT).double())
    way.assert_near(grad_x, up @ matrix)
    way.assert_near(grad_weight, up.T @ rows)
    way.assert_near(grad_bias, up.sum(0))


def test_linear_takes_an_input_and_a_gradient_that_are_not_contiguous():
    layer, x = linear(), leaf(6, 3, 2)
    layer(x.transpose(0, 2)).sum().backward()  # the gradient of a sum is an expanded scalar
    expected = layer.weight.detach().double().sum(0)[:, None, None].expand(6, 3, 2)
    torch.testing.assert_close(x.grad, expected, **SAME)


def test_linear_has_the_weights_of_torch_linear():
    assert {name: p.shape for name, p in Linear(6, 5).named_parameters()} == {
        name: p.shape for name, p in nn.Linear(6, 5).named_parameters()
    }


# Compiled products


SHAPES = [
    *((1, 2, 2), (5, 6, 4), (6, 64, 64), (7, 66, 62), (13, 130, 80), (512, 4, 6), (513, 16, 98)),
    (1100, 10, 20),
]


@MULTIPLYING
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width", "outputs"), SHAPES)
def test_a_compiled_linear_map_is_the_plain_formula(way, calls, rows, width, outputs, bias):
    assert_linear_is_the_formula(way, rows, width, outputs, bias)
    assert calls == ["linear", "linear_grad"]


@pytest.mark.parametrize("way", MULTIPLIED[:1], ids=str)
@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 1, 1), (7, 65, 33), (515, 17, 97)])
def test_a_compiled_linear_map_in_float32_takes_odd_sizes(way, calls, rows, width, outputs):
    assert_linear_is_the_formula(way, rows, width, outputs, True)
    assert calls == ["linear", "linear_grad"]


def assert_linear_is_the_formula(way: Way, rows: int, width: int, outputs: int, bias: bool) -> None:
    layer, x = Linear(width, outputs, bias), leaf(rows, width, dtype=way.dtype)
    upstream = normal(rows, outputs, seed=1, dtype=way.dtype)
    found = grads_of(layer(x), upstream, [x, *layer.parameters()])
    dtypes = [tensor.dtype for tensor in found]
    assert dtypes == [way.dtype, way.dtype] + [torch.float32] * (1 + bias)

    exact = exactly([x, layer.weight.to(way.dtype), *([layer.bias] if bias else [])])
    expected = grads_of(F.linear(*exact), upstream, exact)
    for number, (mine, formula) in enumerate(zip(found, expected, strict=True)):
        kind = way if number < 2 else Way(True, torch.float32)
        kind.assert_near(mine, formula, roundings=1 if number < 2 else 4)


# Two linear maps and a rectifier between them


def rectified_plainly(x: Tensor, inner: Linear, outer: Linear) -> Tensor:
    return outer(F.relu(inner(x)))


def maps_around_a_rectifier(bias: bool = True) -> tuple[Linear, Linear]:
    torch.manual_seed(3)
    return Linear(10, 70, bias), Linear(70, 6, bias)


@EACH_PRODUCT
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(10,), (7, 10), (2, 3, 10), (515, 10)])
def test_rectified_is_two_linear_maps_and_a_relu_forward_and_backward(way, calls, shape, bias):
    """To the last bit: the same products, and zeros in the same places."""
    maps, x = maps_around_a_rectifier(bias), leaf(*shape, dtype=way.dtype)
    with torch.no_grad():
        x.view(-1, 10)[0] = 0  # without biases, all of its numbers between the maps are 0
    upstream = normal(*shape[:-1], 6, seed=1, dtype=way.dtype)
    inputs = [x, *maps[0].parameters(), *maps[1].parameters()]
    found = grads_of(relu_ffn(x, *maps), upstream, inputs)
    assert calls == (["linear"] * 2 + ["linear_grad"] * 2 if way.multiplies else [])
    expected = grads_of(rectified_plainly(x, *maps), upstream, inputs)
    assert all(map(torch.equal, found, expected))


@EACH_PRODUCT
def test_rectified_passes_on_what_is_not_a_number(way, calls):
    maps, x = maps_around_a_rectifier(), leaf(2, 10, dtype=way.dtype)
    with torch.no_grad():
        x[0, 0] = torch.nan
    out = relu_ffn(x, *maps)
    assert out[0].isnan().all() and out[1].isfinite().all()
    grads = grads_of(out, torch.ones_like(out), [x, maps[0].weight])
    assert grads[1].isfinite().all() and grads[2].isnan().any()


@MULTIPLYING_PAIRS
def test_rectified_is_torchs_where_one_of_its_maps_has_no_whole_pairs(way, calls):
    maps, x = (Linear(10, 70), Linear(70, 5)), leaf(4, 10, dtype=SHORT)
    out = relu_ffn(x, *maps)
    assert calls == ["linear"]
    assert torch.equal(out, rectified_plainly(x, *maps))


@BOTH_PATHS
def test_rectified_is_the_same_with_weights_that_are_laid_out(way, calls, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    maps, x = maps_around_a_rectifier(), normal(4, 10, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(relu_ffn(x, *maps), rectified_plainly(x, *maps))
        assert calls == []
        for layer in maps:
            layer.pack_weights()
        found = relu_ffn(x, *maps)
        assert calls == (["packed_linear", "packed_linear_sparse"] if way.is_compiled else [])
        assert torch.equal(found, rectified_plainly(x, *maps))


@MULTIPLYING
def test_a_row_of_a_compiled_linear_map_does_not_depend_on_the_others(way, calls):
    layer, x = Linear(66, 70), leaf(23, 66, dtype=way.dtype)
    together = layer(x)
    alone = torch.cat([layer(row) for row in x.split(1)])
    assert set(calls) == {"linear"}
    assert torch.equal(together, alone)


@MULTIPLYING_PAIRS
@pytest.mark.parametrize(("width", "outputs"), [(6, 5), (5, 6)])
def test_what_has_no_whole_pairs_is_multiplied_by_torch(way, calls, width, outputs):
    layer, x = Linear(width, outputs), leaf(9, width, dtype=SHORT)
    upstream = normal(9, outputs, seed=1, dtype=SHORT)
    out, grad_x = grads_of(layer(x), upstream, [x])
    assert calls == []
    matrix = layer.weight.detach().to(SHORT).double()
    bias = layer.bias.detach().to(SHORT).double()
    way.assert_near(out, x.detach().double() @ matrix.T + bias)
    way.assert_near(grad_x, upstream.double() @ matrix)


@MULTIPLYING_PAIRS
@pytest.mark.parametrize("reason", ["nothing is trained", "the processor has tiles", "no row"])
def test_a_linear_map_is_torchs_where_that_is_faster(way, calls, reason, monkeypatch):
    if reason == "the processor has tiles":
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x = normal(0 if reason == "no row" else 3, 6, dtype=SHORT)
    with torch.set_grad_enabled(reason != "nothing is trained"):
        assert Linear(6, 4)(x).shape == (len(x), 4)
    assert calls == []


@MULTIPLYING_PAIRS
def test_products_that_the_memory_does_not_hold_say_so(way, calls, monkeypatch):
    """An update is made in halves then."""
    library = SimpleNamespace(
        linear_bf16=lambda *_: 1,
        linear_grad_bf16=lambda *_: 1,
        projected_cross_entropy_bf16=lambda *_: 1,
    )
    out = Linear(6, 4)(leaf(3, 6, dtype=SHORT))
    out.grad_fn.functions = native.Functions(library, "bf16")
    with pytest.raises(MemoryError):
        out.sum().backward()
    monkeypatch.setattr(native, "compiled", lambda: library)
    with pytest.raises(MemoryError):
        Linear(6, 4)(leaf(3, 6, dtype=SHORT))
    with pytest.raises(MemoryError):
        ProjectedCrossEntropy.apply(leaf(3, 6, dtype=SHORT), torch.ones(5, 6), torch.arange(3), 0.1)


# ProjectedCrossEntropy


def plain_loss(
    states: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    logits = states @ weight.T
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")
    return loss, F.cross_entropy(logits, targets, reduction="sum")


@EACH_WAY
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("rows", "width"), [(5, 1), (5, 2), (1, 6), (5, 17), (129, 128), (7, 130), (3, 3001)]
)
def test_the_loss_of_logits_and_its_gradient_are_torchs(way, calls, rows, width, smoothing):
    logits, targets = normal(rows, width, dtype=way.dtype) * 3, torch.arange(rows) % width
    (exact,) = exactly([logits.clone()])
    sums = torch.full((2,), 0.5, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, targets, smoothing, True, sums)
    assert calls == (["cross_entropy"] if way.is_compiled else [])
    settings = {"reduction": "sum"}
    loss = F.cross_entropy(exact, targets, label_smoothing=smoothing, **settings)
    nll = F.cross_entropy(exact, targets, **settings)
    torch.testing.assert_close(sums - 0.5, torch.stack([loss, nll]).detach(), rtol=2e-6, atol=1e-5)
    way.assert_near(logits, torch.autograd.grad(loss, exact)[0])


@EACH_WAY
def test_without_a_gradient_the_logits_are_left_as_they_are(way, calls):
    logits, targets = normal(5, 7, dtype=way.dtype), torch.arange(5)
    before, sums = logits.clone(), torch.zeros(2, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, targets, 0.1, False, sums)
    assert torch.equal(logits, before)
    with_grad = torch.zeros(2, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, targets, 0.1, True, with_grad)
    assert torch.equal(sums, with_grad)


@EACH_PRODUCT
@pytest.mark.parametrize(
    ("num_tokens", "chunk_tokens"),
    [(1, 512), (11, 1), (11, 3), (128, 128), (130, 3), (700, 128), (700, 512)],
)
def test_projected_cross_entropy_is_torchs_on_plain_logits(
    way, calls, num_tokens, chunk_tokens, monkeypatch
):
    monkeypatch.setattr(cross_entropy, "_CHUNK_TOKENS", chunk_tokens)
    weights = LONG[way.dtype]
    states, weight = leaf(num_tokens, 4, dtype=way.dtype), leaf(6, 4, seed=1, dtype=weights)
    targets = torch.arange(num_tokens) % 6
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, 0.1)
    name = "projected_cross_entropy" if way.multiplies else "cross_entropy"
    assert set(calls) == ({name} if way.is_compiled else set())
    assert loss.dtype == nll.dtype == torch.float64
    grads = torch.autograd.grad(-2.5 * loss, [states, weight])
    assert [grad.dtype for grad in grads] == [way.dtype, weights]

    exact = exactly([states, weight.to(way.dtype)])
    expected, expected_nll = plain_loss(*exact, targets, 0.1)
    expected_grads = torch.autograd.grad(-2.5 * expected, exact)
    rounding = 0.004 if way.dtype is SHORT and not way.multiplies else 2e-6
    torch.testing.assert_close(loss, expected, rtol=rounding, atol=0)
    torch.testing.assert_close(nll, expected_nll, rtol=rounding, atol=0)
    for grad, plain in zip(grads, expected_grads, strict=True):
        way.assert_near(grad, plain, roundings=4)


@MULTIPLYING
@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("rows", "width", "pieces"),
    [(1, 2, 3), (5, 3, 7), (513, 5, 1025), (528, 4, 1024), (1100, 129, 2051)],
)
def test_the_compiled_loss_is_torchs_at_sizes_of_every_kind(
    way, calls, rows, width, pieces, smoothing, size
):
    """Odd ones, too, and those past what is computed at once."""
    width += width % 2 if way.dtype is SHORT else 0
    states, targets = leaf(rows, width, dtype=way.dtype), torch.arange(rows) * 7 % pieces
    weight = normal(pieces, width, seed=1, dtype=torch.float32) * size / width**0.5
    assert_loss_is_torchs(way, states, weight.requires_grad_(), targets, smoothing)
    assert calls == ["projected_cross_entropy"]


def assert_loss_is_torchs(
    way: Way, states: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> None:
    """Hold the compiled loss to torch's; its logits are not rounded."""
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, smoothing)
    grads = torch.autograd.grad(loss, [states, weight])
    exact = exactly([states, weight.to(way.dtype)])
    expected, expected_nll = plain_loss(*exact, targets, smoothing)
    near = {"rtol": 2e-6, "atol": 1e-6 * len(targets)}
    torch.testing.assert_close(loss.detach(), expected.detach(), **near)
    torch.testing.assert_close(nll, expected_nll.detach(), **near)
    # where one piece takes nearly all, the gradient is a difference of like numbers
    floor = 1e-7 * float(weight.detach().abs().max()) if way.dtype is torch.float32 else 0.0
    for grad, plain in zip(grads, torch.autograd.grad(expected, exact), strict=True):
        way.assert_near(grad, plain, roundings=2, floor=floor)


@MULTIPLYING
@pytest.mark.parametrize("place", [0, 63, 64, 599])
@pytest.mark.parametrize("size", [50.0, 1e3, 1e6])
def test_the_compiled_loss_is_right_where_a_logit_lies_far_above_the_targets(
    way, calls, place, size
):
    """The power of their difference is more than a float holds."""
    states, targets = normal(600, 4, dtype=way.dtype), torch.arange(600) % 9
    weight = leaf(9, 4, seed=1, dtype=torch.float32)
    logits = (states @ weight.to(way.dtype).T).detach().float()
    targets[place] = logits[place].argmin()
    states[place] *= size
    assert_loss_is_torchs(way, states.requires_grad_(), weight, targets, 0.1)


@MULTIPLYING
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_logit_that_is_no_number_makes_loss_and_nll_none(way, calls, smoothing):
    """Whatever piece it is of, wanted or not."""
    weight = leaf(9, 4, seed=1, dtype=torch.float32)
    with torch.no_grad():
        weight[7, 2] = math.nan
    states, targets = leaf(5, 4, dtype=way.dtype), torch.arange(5)
    sums = ProjectedCrossEntropy.apply(states, weight, targets, smoothing)
    assert all(bool(own.isnan()) for own in sums)
    assert calls == ["projected_cross_entropy"]


@MULTIPLYING
def test_what_a_sure_and_right_prediction_is_still_wrong_by_is_not_rounded_away(way, calls):
    """The gradient of its logit is the little that 1 - p leaves."""
    states = torch.full((3, 2), 4.0, dtype=way.dtype, requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]], requires_grad=True)
    loss, _ = ProjectedCrossEntropy.apply(states, weight, torch.zeros(3, dtype=torch.long), 0.0)
    (grad,) = torch.autograd.grad(loss, weight)
    missing = torch.full((2,), -3 * 4 / (1 + math.exp(8)), dtype=torch.float64)
    torch.testing.assert_close(grad.double(), torch.stack([missing, -missing]), rtol=0.005, atol=0)


@MULTIPLYING_PAIRS
def test_the_mean_over_tokens_scales_the_gradients_of_states_as_exactly_as_those_of_weights(
    way, calls
):
    """One over the number of tokens is not rounded to bfloat16, which would scale all alike."""
    states, weight = leaf(700, 4, dtype=SHORT), leaf(6, 4, seed=1, dtype=torch.float32)
    targets = torch.arange(700) % 6
    loss, _ = ProjectedCrossEntropy.apply(states, weight, targets, 0.1)
    (whole,) = torch.autograd.grad(loss, states, retain_graph=True)
    (mean,) = torch.autograd.grad(loss / 3001, states)
    one_rounding = {"rtol": 2.0**-8, "atol": 0}
    torch.testing.assert_close(mean.double(), whole.double() / 3001, **one_rounding)


@BOTH_PATHS
def test_targets_may_be_cut_out_of_a_larger_tensor(way, calls):
    states, weight = leaf(5, 4, dtype=torch.float32), leaf(6, 4, seed=1, dtype=torch.float32)
    targets = (torch.arange(20) % 6).view(5, 4)[:, 1]
    assert not targets.is_contiguous()
    found = ProjectedCrossEntropy.apply(states, weight, targets, 0.1)
    torch.testing.assert_close(found, plain_loss(states, weight, targets, 0.1), check_dtype=False)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_projected_cross_entropy_passes_gradcheck(smoothing, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_TOKENS", 2)
    targets = torch.tensor([0, 4, 4, 2, 1])

    def loss(states: Tensor, weight: Tensor) -> Tensor:
        return ProjectedCrossEntropy.apply(states, weight, targets, smoothing)[0]

    assert torch.autograd.gradcheck(loss, (leaf(5, 3), leaf(6, 3, seed=1)))


@pytest.mark.parametrize("frozen", ["states", "weight"])
def test_projected_cross_entropy_trains_one_input_while_the_other_is_frozen(frozen):
    inputs = {"states": leaf(5, 3), "weight": leaf(6, 3, seed=1)}
    targets = torch.tensor([0, 4, 4, 2, 1])
    inputs[frozen].requires_grad_(False)
    free = next(tensor for name, tensor in inputs.items() if name != frozen)
    loss, _ = ProjectedCrossEntropy.apply(*inputs.values(), targets, 0.1)
    expected, _ = plain_loss(*inputs.values(), targets, 0.1)
    torch.testing.assert_close(
        torch.autograd.grad(loss, free), torch.autograd.grad(expected, free), **SAME
    )


@EACH_PRODUCT
def test_projected_cross_entropy_gives_the_same_values_without_gradients(way, calls):
    states, weight = leaf(5, 3, dtype=way.dtype), leaf(6, 3, seed=1, dtype=way.dtype)
    targets = torch.tensor([0, 4, 4, 2, 1])
    with_grad = ProjectedCrossEntropy.apply(states, weight, targets, 0.1)
    without = ProjectedCrossEntropy.apply(states.detach(), weight.detach(), targets, 0.1)
    assert [value.item() for value in with_grad] == [value.item() for value in without]
    assert not without[0].requires_grad


def test_the_nll_carries_no_gradient():
    loss, nll = ProjectedCrossEntropy.apply(
        leaf(5, 3), leaf(6, 3), torch.zeros(5, dtype=torch.long), 0.1
    )
    assert loss.requires_grad
    assert not nll.requires_grad


@EACH_PRODUCT
def test_the_loss_of_no_token_is_zero(way, calls):
    states, weight = leaf(0, 3, dtype=way.dtype), leaf(6, 3, dtype=way.dtype)
    loss, nll = ProjectedCrossEntropy.apply(states, weight, torch.zeros(0, dtype=torch.long), 0.1)
    loss.backward()
    assert loss.item() == nll.item() == 0
    assert (weight.grad == 0).all()


@EACH_WAY
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_extreme_logits_stay_finite_and_right(way, calls, size):
    logits, targets = normal(9, 6, dtype=way.dtype) * size, torch.arange(9) % 6
    (exact,) = exactly([logits.clone()])
    sums = torch.zeros(2, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, targets, 0.1, True, sums)
    loss = F.cross_entropy(exact, targets, label_smoothing=0.1, reduction="sum")
    nll = F.cross_entropy(exact, targets, reduction="sum")
    torch.testing.assert_close(sums, torch.stack([loss, nll]).detach(), rtol=1e-5, atol=1e-4)
    way.assert_near(logits, torch.autograd.grad(loss, exact)[0])


def test_a_sum_over_many_tokens_is_not_rounded():
    """In float32, what a token adds to a sum of millions would be cut off."""
    states, weight = torch.zeros(70_000, 1), torch.zeros(5, 1)
    loss, nll = ProjectedCrossEntropy.apply(states, weight, torch.arange(70_000) % 5, 0.1)
    assert loss.item() == pytest.approx(70_000 * math.log(5), rel=2e-7)
    assert nll.item() == pytest.approx(70_000 * math.log(5), rel=2e-7)


class LiveMemory(TorchDispatchMode):
    """Notes the most bytes that tensors made by operations held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self._live[id(tensor)] = weakref.ref(tensor)
        live = [tensor for tensor in (ref() for ref in self._live.values()) if tensor is not None]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in live}
        self.most = max(self.most, sum(storage.nbytes() for storage in storages.values()))
        return out


@EACH_WAY
def test_the_loss_never_holds_the_logits_of_a_whole_batch(way, calls):
    num_tokens, num_pieces = 16 * cross_entropy._CHUNK_TOKENS, 1000
    weights = LONG[way.dtype]
    states, weight = leaf(num_tokens, 2, dtype=way.dtype), leaf(num_pieces, 2, dtype=weights)
    targets = torch.arange(num_tokens) % num_pieces
    with LiveMemory() as memory:
        ProjectedCrossEntropy.apply(states, weight, targets, 0.1)[0].backward()
    chunk_bytes = cross_entropy._CHUNK_TOKENS * num_pieces * way.dtype.itemsize
    num_chunks = 2.5 if way.is_compiled else 8  # one is let go when the next is there
    assert chunk_bytes < memory.most < num_chunks * chunk_bytes


@MULTIPLYING
def test_the_compiled_loss_never_holds_the_logits_of_a_whole_batch(way, calls):
    """They would be 160 MB."""
    assert growth(SAY_GROWTH_OF_LOSS, str(way.dtype).removeprefix("torch.")) < 40_000


def growth(script: str, *arguments: str) -> int:
    """Run a script in a process of its own, and return the KiB that it says."""
    command = [sys.executable, "-c", script, native.compiled()._name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    return int(done.stdout)


def test_compiled_powers_are_right_to_the_last_places(calls):
    """The gradient of the piece that was not wanted is its probability."""
    x = torch.linspace(-86, 0, 4001)
    logits = torch.stack([torch.zeros_like(x), x], 1)
    sums = torch.zeros(2, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, torch.zeros(len(x), dtype=torch.long), 0.0, True, sums)
    assert calls == ["cross_entropy"]
    torch.testing.assert_close(logits[:, 1].double(), x.double().sigmoid(), rtol=3e-7, atol=0)


@EACH_PRODUCT
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("place", [0, 4, 5, 19])
def test_a_state_that_is_not_finite_shows_in_the_loss_and_in_the_gradient(
    way, calls, value, smoothing, place
):
    states, weight = leaf(5, 4, dtype=way.dtype), leaf(40, 4, seed=1, dtype=way.dtype)
    with torch.no_grad():
        states.view(-1)[place] = value
    loss, nll = ProjectedCrossEntropy.apply(states, weight, torch.arange(5), smoothing)
    grads = torch.autograd.grad(loss, [states, weight])
    assert not loss.isfinite()
    assert not nll.isfinite()
    assert not all(grad.isfinite().all() for grad in grads)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 2, 16, 39])
def test_a_logit_that_is_not_finite_shows_in_the_loss_and_in_the_gradient(way, calls, value, place):
    logits, sums = normal(3, 40, dtype=way.dtype), torch.zeros(2, dtype=torch.float64)
    logits[1, place] = value
    cross_entropy._cross_entropy(logits, torch.tensor([0, 2, 39]), 0.1, True, sums)
    assert not sums.isfinite().any()
    assert logits[[0, 2]].isfinite().all()
    assert logits[1].isnan().all()


# top_pieces


@pytest.fixture
def one_thread(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


WIDTHS = [5, 63, 64, 65, 130, 1000]  # the compiled function reads blocks of 64


def ranked(logits_NV: Tensor, never: list[int], count: int) -> Tensor:
    """The ids of each row, greatest first and of equals the first."""
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
def test_top_pieces_are_the_greatest_of_those_allowed(way, calls, one_thread, width, never, count):
    """Those never taken are the greatest of all, and count in the probabilities."""
    logits_NV = 3 * normal(7, width, dtype=way.dtype)
    logits_NV[:, never] += 8
    before = logits_NV.clone()
    found = top_tokens(logits_NV, never, count)
    assert calls == (["topk"] if way.is_compiled else [])
    assert torch.equal(logits_NV, before)

    expected = ranked(logits_NV, never, count)
    values_NC = logits_NV.gather(1, found.ids_NC)
    assert torch.equal(values_NC, logits_NV.gather(1, expected))
    if way.is_compiled or way.dtype is not SHORT:  # else there are ties, which it may break at will
        assert torch.equal(found.ids_NC, expected)
    assert all(len({*row}) == len(row) and not {*row} & {*never} for row in found.ids_NC.tolist())
    exact = logits_NV.double().log_softmax(-1).gather(1, found.ids_NC)
    way.assert_near(found.log_prob_NC, exact, way.roundings)


@EACH_WAY
def test_where_no_piece_is_allowed_there_are_no_top_pieces(way, calls):
    found = top_tokens(normal(2, 3, dtype=way.dtype), [0, 1, 2], 4)
    assert found.ids_NC.shape == found.log_prob_NC.shape == (2, 0)
    assert calls == []


def test_compiled_top_pieces_of_ties_are_the_first(calls):
    """Within a block, across blocks, and where the last place is contested."""
    logits_NV = torch.zeros(3, 200)
    logits_NV[1, [150, 70, 199, 5]] = 1.0
    logits_NV[2] = torch.arange(200) // 50 % 2
    found = top_tokens(logits_NV, [1, 70], 6)
    assert calls == ["topk"]
    expected = [[0, 2, 3, 4, 5, 6], [5, 150, 199, 0, 2, 3], [50, 51, 52, 53, 54, 55]]
    assert found.ids_NC.tolist() == expected == ranked(logits_NV, [1, 70], 6).tolist()


@EACH_WAY
def test_top_pieces_take_logits_that_are_not_contiguous(way, calls):
    logits = [normal(100, 7, dtype=way.dtype).T, normal(7, 300, dtype=way.dtype)[:, 50:150]]
    for logits_NV in logits:
        found = top_tokens(logits_NV, [2], 5)
        values_NC = logits_NV.gather(1, found.ids_NC)
        assert torch.equal(values_NC, logits_NV.gather(1, ranked(logits_NV, [2], 5)))
        exact = logits_NV.double().log_softmax(-1).gather(1, found.ids_NC)
        way.assert_near(found.log_prob_NC, exact, way.roundings)


@EACH_WAY
@pytest.mark.parametrize("shift", [-1e4, 1e4, 1e30])
def test_top_pieces_of_extreme_logits_stay_finite_and_right(way, calls, shift):
    logits_NV = (shift * (1 + 0.1 * normal(3, 100))).to(way.dtype)
    found = top_tokens(logits_NV, [0], 3)
    exact = logits_NV.double().log_softmax(-1).gather(1, found.ids_NC)
    assert torch.equal(found.ids_NC[:, :1], ranked(logits_NV, [0], 1))
    way.assert_near(found.log_prob_NC, exact, way.roundings, floor=1e-5)


@EACH_WAY
@pytest.mark.parametrize("few", [0, 2])
def test_pieces_that_are_forbidden_by_their_logits_come_last(way, calls, few):
    """They have no probability; with few others, they are taken all the same."""
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
def test_a_logit_that_is_not_finite_leaves_no_number_in_its_row(way, calls, value, places):
    """The ids are some of the vocabulary in any case, for they are looked up."""
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
def test_no_row_has_no_pieces(way, calls):
    found = top_tokens(torch.empty(0, 9, dtype=way.dtype), [0], 4)
    assert found.ids_NC.shape == found.log_prob_NC.shape == (0, 4)


# likeliest


@EACH_WAY
@pytest.mark.parametrize("never", [[], [4, 0, 1]])
@torch.no_grad()
def test_the_likeliest_piece_of_logits_is_the_first_top_piece(way, calls, one_thread, never):
    logits_NV = 3 * normal(7, 130, dtype=way.dtype)
    logits_NV[:, never] += 8
    assert torch.equal(argmax_tokens(logits_NV, never), top_tokens(logits_NV, never, 1).ids_NC)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_where_logits_are_no_numbers_no_piece_is_likeliest(way, calls, value):
    logits_NV = normal(3, 100, dtype=way.dtype)
    logits_NV[1] = value
    expected = top_tokens(logits_NV[[0, 2]], [0], 1).ids_NC.flatten().tolist()
    assert argmax_tokens(logits_NV, [0]).flatten().tolist() == [expected[0], -1, expected[1]]


# Linear maps of decoding


def laid_out(width: int, outputs: int, bias: bool = True, seed: int = 1) -> Linear:
    layer = Linear(width, outputs, bias)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + number))
    layer.pack_weights()
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 16, 31, 64, 65, 130])
@pytest.mark.parametrize(
    ("shape", "width"), [((0,), 6), ((1,), 1), ((5,), 6), ((2, 3), 7), ((25,), 64), ((61,), 130)]
)
@torch.no_grad()
def test_a_linear_map_that_is_laid_out_is_the_plain_formula(
    calls, one_thread, shape, width, outputs, bias
):
    layer, x = laid_out(width, outputs, bias), normal(*shape, width, dtype=torch.float32)
    out = layer(x)
    assert calls == (["packed_linear"] if x.numel() else [])
    exact = F.linear(*(tensor.double() for tensor in (x, *layer.parameters())))
    Way(True, torch.float32).assert_near(out, exact, roundings=2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.04, 0.15, 0.33, 0.34, 0.6, 1.0])
@pytest.mark.parametrize(
    ("rows", "width", "outputs"),
    [(1, 1, 1), (5, 16, 65), (25, 17, 130), (24, 64, 128), (49, 300, 256), (30, 1024, 300)],
)
@torch.no_grad()
def test_zeros_that_are_skipped_change_no_bit(calls, one_thread, rows, width, outputs, share, bias):
    layer = laid_out(width, outputs, bias)
    x = normal(rows, width, dtype=torch.float32) * (normal(rows, width, seed=1).abs() < share)
    x[0] = torch.where(x[0] == 0, -0.0, x[0])
    found = layer.forward_packed(x, input_is_relu=True)
    assert found is not None
    assert torch.equal(found, layer(x))
    assert calls == ["packed_linear_sparse", "packed_linear"]


@torch.no_grad()
def test_what_is_no_number_is_not_skipped_as_zeros_are(calls, one_thread):
    layer, x = laid_out(40, 70), torch.zeros(30, 40)
    x[3, 17], x[29, 39] = math.nan, math.inf
    found = layer.forward_packed(x, input_is_relu=True)
    assert found is not None
    assert found.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [3, 29]
    assert torch.equal(found[0], layer.bias)


@torch.no_grad()
def test_what_a_row_of_a_linear_map_is_does_not_depend_on_the_others(calls, one_thread):
    layer, x = laid_out(70, 300), normal(53, 70, dtype=torch.float32)
    assert torch.equal(layer(x), torch.cat([layer(row) for row in x.split(1)]))
    assert set(calls) == {"packed_linear"}


@torch.no_grad()
def test_a_linear_map_that_is_laid_out_reads_what_is_not_contiguous(calls, one_thread):
    layer, x = laid_out(6, 5), normal(9, 12, dtype=torch.float32)[::2, 3:9]
    assert torch.equal(layer(x), layer(x.clone()))
    assert calls == ["packed_linear"] * 2


def test_a_linear_map_that_is_laid_out_still_learns(calls, one_thread):
    layer, x = laid_out(6, 5), leaf(9, 6, dtype=torch.float32)
    found = grads_of(layer(x), normal(9, 5, dtype=torch.float32), [x, *layer.parameters()])
    plain = F.linear(x, *layer.parameters())
    expected = grads_of(plain, normal(9, 5, dtype=torch.float32), [x, *layer.parameters()])
    assert calls == []
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("how", ["step", "load", "replace", "type"])
@torch.no_grad()
def test_weights_of_a_linear_map_that_change_count_as_they_are(calls, one_thread, how):
    layer, x = laid_out(6, 5), normal(9, 6, dtype=torch.float32)
    if how == "step":
        layer.weight += 1
    elif how == "load":
        layer.load_state_dict(laid_out(6, 5, seed=5).state_dict())
    elif how == "replace":
        layer.weight = laid_out(6, 5, seed=5).weight
    else:
        layer, x = layer.double(), x.double()
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert calls == []


@pytest.mark.parametrize("num_threads", [1, 2])
@torch.no_grad()
def test_on_several_threads_a_linear_map_is_torchs(calls, num_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    layer, x = laid_out(6, 5), normal(9, 6, dtype=torch.float32)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert calls == (["packed_linear"] if num_threads == 1 else [])


def test_all_linear_maps_of_a_model_are_laid_out(calls, one_thread):
    model = nn.Sequential(Linear(6, 5), nn.Sequential(nn.LayerNorm(5), Projection(5, 7)))
    linear_module.pack_weights(model)
    with torch.no_grad():
        model(normal(4, 6, dtype=torch.float32))
    assert calls == ["packed_linear"] * 2


# Projection


def projection(width: int, num_pieces: int, seed: int = 1) -> Projection:
    """A projection whose weights are laid out, with logits of a few units."""
    projected = Projection(width, num_pieces)
    with torch.no_grad():
        projected.weight.copy_(3 * normal(num_pieces, width, seed=seed) / width**0.5)
    projected.pack_weights()
    return projected


def best_of(projected: Projection, states_ND: Tensor, never: list[int], count: int) -> TopTokens:
    """The pieces that are found without logits in memory."""
    logits = projected.logits(states_ND)
    assert isinstance(logits, LazyLogits)
    return top_tokens(logits, never, count)


@pytest.mark.parametrize("num_pieces", [5, 16, 31, 64, 65, 130, 1000])
@pytest.mark.parametrize(("rows", "width"), [(0, 6), (1, 1), (5, 6), (6, 7), (25, 64), (61, 130)])
@pytest.mark.parametrize(("never", "count"), [([], 1), ([4, 0], 3), ([1], 2000)])
@torch.no_grad()
def test_top_pieces_of_a_projection_are_those_of_its_logits(
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


@torch.no_grad()
def test_what_a_row_of_a_projection_is_does_not_depend_on_the_others(calls, one_thread):
    projected, states = projection(70, 300), normal(53, 70, dtype=torch.float32)
    together = best_of(projected, states, [2], 4)
    alone = [best_of(projected, row, [2], 4) for row in states.split(1)]
    assert torch.equal(together.ids_NC, torch.cat([top.ids_NC for top in alone]))
    assert torch.equal(together.log_prob_NC, torch.cat([top.log_prob_NC for top in alone]))


@torch.no_grad()
def test_a_projection_gives_the_logits_of_any_rows(calls):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    logits = projected.logits(states)
    plain = F.linear(states, projected.weight)
    torch.testing.assert_close(logits[:], plain)
    torch.testing.assert_close(logits[torch.tensor([7, 2])], plain[[7, 2]])


@torch.no_grad()
def test_a_projection_reads_states_that_are_not_contiguous(calls, one_thread):
    projected, states = projection(6, 40), normal(9, 12, dtype=torch.float32)
    own = best_of(projected, states[::2, 3:9], [], 3)
    assert torch.equal(own.ids_NC, best_of(projected, states[::2, 3:9].clone(), [], 3).ids_NC)


@pytest.mark.parametrize("num_threads", [1, 2])
@torch.no_grad()
def test_on_several_threads_a_projection_is_torchs(calls, num_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    top = best_of(projected, states, [], 3)
    assert calls == (["packed_topk"] if num_threads == 1 else [])
    assert torch.equal(top.ids_NC, ranked(states @ projected.weight.T, [], 3))


@EACH_WAY
@torch.no_grad()
def test_weights_and_states_that_were_not_compiled_take_plain_logits(way, calls, one_thread):
    """In another type, without a compiler, and before the weights are laid out."""
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
def test_weights_that_change_after_they_were_laid_out_count_as_they_are(calls, one_thread, how):
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


def test_weights_that_were_made_where_nothing_is_trained_are_laid_out(calls, one_thread):
    with torch.inference_mode():
        projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
        top = best_of(projected, states, [], 3)
        assert torch.equal(top.ids_NC, ranked(states @ projected.weight.T, [], 3))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@torch.no_grad()
def test_a_state_that_is_not_finite_leaves_no_number_in_its_row(calls, one_thread, value):
    projected, states = projection(6, 100), normal(9, 6, dtype=torch.float32)
    whole = best_of(projected, states, [0], 4)
    states[3, 2] = value
    top = best_of(projected, states, [0], 4)
    assert not top.log_prob_NC[3].isfinite().any()
    assert ((top.ids_NC >= 0) & (top.ids_NC < 100)).all()
    others = [row for row in range(9) if row != 3]
    assert torch.equal(top.log_prob_NC[others], whole.log_prob_NC[others])


@torch.no_grad()
def test_top_pieces_that_the_memory_does_not_hold_say_so(calls, one_thread, monkeypatch):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    library = SimpleNamespace(packed_topk_float=lambda *_: 1)
    monkeypatch.setattr(native, "compiled", lambda: library)
    with pytest.raises(MemoryError):
        best_of(projected, states, [], 3)


def test_a_search_never_holds_the_logits_of_all_its_rows(calls):
    """They would be 320 MB."""
    assert growth(SAY_GROWTH_OF_SEARCH) < 20_000


def test_a_projection_has_the_weights_of_a_linear_map_without_a_bias():
    assert set(projection(6, 40).state_dict()) == {"weight"}


# The likeliest piece of a projection


@pytest.fixture
def rounds(monkeypatch, calls) -> list[str]:
    """Let projections be laid out in bfloat16 too; return the names of the functions called."""
    monkeypatch.setattr(native.Functions, "has_fast_matmul", lambda functions: True)
    return calls


def likeliest_of(projected: Projection, states_ND: Tensor, never: list[int]) -> Tensor:
    """The pieces that are found without logits in memory."""
    logits = projected.logits(states_ND)
    assert isinstance(logits, LazyLogits)
    return argmax_tokens(logits, never)


def assert_likeliest(
    found_N1: Tensor, projected: Projection, states_ND: Tensor, never: list[int]
) -> None:
    """Hold pieces to the greatest logits in float64, apart from ties of float32."""
    exact_NV = states_ND.double() @ projected.weight.double().T
    size = float((states_ND.double().abs() @ projected.weight.double().abs().T).max())
    exact_NV[:, never] = -math.inf
    short_N = exact_NV.amax(1) - exact_NV.gather(1, found_N1)[:, 0]
    assert float(short_N.max()) <= 1e-6 * size


@pytest.mark.parametrize("num_pieces", [5, 16, 31, 64, 65, 130, 1000])
@pytest.mark.parametrize(("rows", "width"), [(0, 6), (1, 2), (5, 6), (6, 8), (25, 64), (61, 130)])
@pytest.mark.parametrize("never", [[], [4, 0]])
@torch.no_grad()
def test_the_likeliest_piece_of_a_projection_has_its_greatest_logit(
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
def test_what_bfloat16_cannot_tell_apart_is_told_apart(rounds, one_thread, apart):
    """However alike the pieces are, and though their order in bfloat16 is another."""
    projected, states = projection(64, 200), normal(50, 64, dtype=torch.float32)
    alike = normal(1, 64, seed=3) + apart * normal(200, 64, seed=4)
    projected.weight.copy_(alike)
    projected.pack_weights()
    assert_likeliest(likeliest_of(projected, states, [7]), projected, states, [7])
    short_NV = states.bfloat16().double() @ projected.weight.bfloat16().double().T
    exact_NV = states.double() @ projected.weight.double().T
    assert (short_NV.argmax(1) != exact_NV.argmax(1)).sum() >= 3
    assert rounds == ["packed_argmax"]


@pytest.mark.parametrize("width", [2, 64, 1024])
@torch.no_grad()
def test_a_rounded_product_is_as_near_to_the_exact_one_as_its_margin_says(rounds, width):
    """Numbers are as far as they can be from those that they are rounded to."""
    projected = projection(width, 40)
    projected.weight[3] = 1 + 2.0**-8 - 2.0**-20
    projected.pack_weights()
    states = torch.cat([projected.weight[3:4], normal(30, width, dtype=torch.float32)])
    rounded_NV = states.bfloat16().double() @ projected.weight.bfloat16().double().T
    apart_NV = (rounded_NV - states.double() @ projected.weight.double().T).abs()
    assert projected._bf16 is not None
    share_NV = apart_NV / states.double().norm(dim=1)[:, None] / projected._bf16.margins_V
    assert 0.9 < float(share_NV.max()) <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@torch.no_grad()
def test_a_state_that_is_no_number_has_no_likeliest_piece_and_disturbs_no_other(
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
def test_a_weight_that_is_no_number_leaves_no_likeliest_piece(rounds, one_thread, value):
    """But where it forbids its own piece alone, and infinitely."""
    projected, states = projection(64, 130), normal(30, 64, dtype=torch.float32)
    expected = likeliest_of(projected, states, [1])
    projected.weight[70, 3] = value
    projected.pack_weights()
    is_left_N1 = value * states[:, 3:4] == -math.inf
    expected = torch.where(is_left_N1, expected, -1)
    assert torch.equal(likeliest_of(projected, states, [1]), expected)


@torch.no_grad()
def test_where_no_piece_is_allowed_none_is_likeliest(rounds, one_thread):
    projected, states = projection(6, 3), normal(4, 6, dtype=torch.float32)
    assert likeliest_of(projected, states, [0, 1, 2]).flatten().tolist() == [-1] * 4


@torch.no_grad()
def test_states_without_whole_pairs_and_other_processors_take_exact_logits(
    rounds, one_thread, monkeypatch
):
    states = normal(9, 7, dtype=torch.float32)
    odd, even = projection(7, 40), projection(6, 40)
    monkeypatch.setattr(native.Functions, "has_fast_matmul", lambda functions: False)
    slow = projection(6, 40)
    assert_likeliest(likeliest_of(odd, states, [1]), odd, states, [1])
    found = [likeliest_of(own, states[:, :6], [1]) for own in (slow, even)]
    assert torch.equal(*found)
    assert rounds == ["packed_topk"] * 2 + ["packed_argmax"]


@torch.no_grad()
def test_weights_that_change_are_not_searched_as_they_were_rounded(rounds, one_thread):
    projected, states = projection(6, 40), normal(9, 6, dtype=torch.float32)
    projected.weight.copy_(projection(6, 40, seed=2).weight)
    logits = projected.logits(states)
    assert isinstance(logits, Tensor)
    assert_likeliest(argmax_tokens(logits, [1]), projected, states, [1])
    projected.pack_weights()
    assert_likeliest(likeliest_of(projected, states, [1]), projected, states, [1])
