"""Compare linear layers, in training and in decoding, with the formula in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import (
    BOTH_PATHS,
    EACH_PRODUCT,
    MULTIPLIED,
    MULTIPLYING,
    MULTIPLYING_PAIRS,
    NANS,
    SAME,
    SHORT,
    Way,
    exactly,
    grads_of,
    leaf,
    nan_of,
    normal,
)

from mtrain.ops import linear as linear_module
from mtrain.ops import native
from mtrain.ops.cross_entropy import ProjectedCrossEntropy
from mtrain.ops.linear import Linear, relu_ffn


def linear(weights: torch.dtype = torch.float32, bias: bool = True) -> Linear:
    torch.manual_seed(3)
    layer = Linear(6, 5, bias=bias).to(weights)
    if bias:
        nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("weights", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (2, 1, 3, 6)])
def test_linear_equals_the_formula_forward_and_backward(weights, bias, shape):
    """In float64 throughout, and with weights of another dtype than the input."""
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
def test_padding_the_rows_of_a_matrix_product_does_not_change_the_result(num_rows):
    layer, x = linear(), leaf(num_rows, 6)
    upstream = normal(num_rows, 5, seed=1)
    parameters = list(layer.parameters())
    ours = grads_of(layer(x), upstream, [x, *parameters])
    plain = F.linear(x, layer.weight.double(), layer.bias.double())
    expected = grads_of(plain, upstream, [x, *parameters])
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)


@BOTH_PATHS
def test_linear_in_the_dtype_of_its_weights_equals_torchs_where_products_are_not_compiled(
    way, calls
):
    layer, x = linear(), normal(4, 6, dtype=torch.float32)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert calls == []


def test_batches_of_many_sizes_use_matrix_products_of_six_sizes(monkeypatch):
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


def test_linear_in_another_dtype_than_its_weights_passes_gradcheck():
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


def test_linear_has_the_parameter_names_and_shapes_of_torch_linear():
    assert {name: p.shape for name, p in Linear(6, 5).named_parameters()} == {
        name: p.shape for name, p in nn.Linear(6, 5).named_parameters()
    }


SHAPES = [
    *((1, 2, 2), (5, 6, 4), (6, 64, 64), (7, 66, 62), (13, 130, 80), (512, 4, 6), (513, 16, 98)),
    (17, 34, 32),
    (33, 96, 100),
    (48, 130, 40),
    (1100, 10, 20),
]


@MULTIPLYING
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width", "outputs"), SHAPES)
def test_a_compiled_linear_layer_equals_the_formula(way, calls, rows, width, outputs, bias):
    assert_linear_is_the_formula(way, rows, width, outputs, bias)
    assert calls == ["linear", "linear_grad"]


@pytest.mark.parametrize("way", MULTIPLIED[:1], ids=str)
@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 1, 1), (7, 65, 33), (515, 17, 97)])
def test_a_compiled_linear_layer_in_float32_takes_odd_sizes(way, calls, rows, width, outputs):
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


def rectified_plainly(x: Tensor, inner: Linear, outer: Linear) -> Tensor:
    return outer(F.relu(inner(x)))


def maps_around_a_rectifier(bias: bool = True) -> tuple[Linear, Linear]:
    torch.manual_seed(3)
    return Linear(10, 70, bias), Linear(70, 6, bias)


@EACH_PRODUCT
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(10,), (7, 10), (2, 3, 10), (515, 10)])
def test_relu_ffn_equals_two_linear_layers_and_a_relu_forward_and_backward(way, calls, shape, bias):
    """Bit for bit: the same products, and zeros at the same positions."""
    maps, x = maps_around_a_rectifier(bias), leaf(*shape, dtype=way.dtype)
    with torch.no_grad():
        x.view(-1, 10)[0] = 0  # without biases, all of its hidden activations are 0
    upstream = normal(*shape[:-1], 6, seed=1, dtype=way.dtype)
    inputs = [x, *maps[0].parameters(), *maps[1].parameters()]
    found = grads_of(relu_ffn(x, *maps), upstream, inputs)
    assert calls == (["linear"] * 2 + ["linear_grad"] * 2 if way.multiplies else [])
    expected = grads_of(rectified_plainly(x, *maps), upstream, inputs)
    assert all(map(torch.equal, found, expected))


@EACH_PRODUCT
def test_relu_ffn_propagates_nan_to_its_output_and_gradients(way, calls):
    maps, x = maps_around_a_rectifier(), leaf(2, 10, dtype=way.dtype)
    with torch.no_grad():
        x[0, 0] = torch.nan
    out = relu_ffn(x, *maps)
    assert out[0].isnan().all() and out[1].isfinite().all()
    grads = grads_of(out, torch.ones_like(out), [x, maps[0].weight])
    assert grads[1].isfinite().all() and grads[2].isnan().any()


@MULTIPLYING_PAIRS
def test_relu_ffn_in_bfloat16_uses_torch_for_a_layer_with_an_odd_number_of_outputs(way, calls):
    maps, x = (Linear(10, 70), Linear(70, 5)), leaf(4, 10, dtype=SHORT)
    out = relu_ffn(x, *maps)
    assert calls == ["linear"]
    assert torch.equal(out, rectified_plainly(x, *maps))


@BOTH_PATHS
def test_relu_ffn_with_packed_weights_equals_two_packed_linear_layers_and_a_relu(
    way, calls, monkeypatch
):
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
def test_a_row_of_a_compiled_linear_layer_does_not_depend_on_other_rows(way, calls):
    layer, x = Linear(66, 70), leaf(115, 66, dtype=way.dtype)
    together = layer(x)
    alone = torch.cat([layer(row) for row in x.split(1)])
    assert set(calls) == {"linear"}
    assert torch.equal(together, alone)


@MULTIPLYING_PAIRS
@pytest.mark.parametrize(("width", "outputs"), [(6, 5), (5, 6)])
def test_bfloat16_layers_with_odd_inputs_or_outputs_are_multiplied_by_torch(
    way, calls, width, outputs
):
    layer, x = Linear(width, outputs), leaf(9, width, dtype=SHORT)
    upstream = normal(9, outputs, seed=1, dtype=SHORT)
    out, grad_x = grads_of(layer(x), upstream, [x])
    assert calls == []
    matrix = layer.weight.detach().to(SHORT).double()
    bias = layer.bias.detach().to(SHORT).double()
    way.assert_near(out, x.detach().double() @ matrix.T + bias)
    way.assert_near(grad_x, upstream.double() @ matrix)


@MULTIPLYING_PAIRS
@pytest.mark.parametrize("reason", ["nothing is trained", "no row"])
def test_the_compiled_linear_layer_is_not_used_where_torch_is_faster(
    way, calls, reason, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x = normal(0 if reason == "no row" else 3, 6, dtype=SHORT)
    with torch.set_grad_enabled(reason != "nothing is trained"):
        assert Linear(6, 4)(x).shape == (len(x), 4)
    assert calls == []


@MULTIPLYING_PAIRS
def test_failed_allocations_in_compiled_products_raise_memory_error(way, calls, monkeypatch):
    """Training then splits the micro-batch in halves."""

    class Library:
        linear_bf16 = linear_grad_bf16 = staticmethod(lambda *_: 1)
        projected_cross_entropy_bf16 = linear_bf16

    library = Library()
    out = Linear(6, 4)(leaf(3, 6, dtype=SHORT))
    out.grad_fn.functions = native.Functions(library, "bf16")
    with pytest.raises(MemoryError):
        out.sum().backward()
    monkeypatch.setattr(native, "compiled", lambda: library)
    with pytest.raises(MemoryError):
        Linear(6, 4)(leaf(3, 6, dtype=SHORT))
    with pytest.raises(MemoryError):
        ProjectedCrossEntropy.apply(leaf(3, 6, dtype=SHORT), torch.ones(5, 6), torch.arange(3), 0.1)


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
def test_a_packed_linear_layer_equals_the_formula(calls, one_thread, shape, width, outputs, bias):
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
def test_skipping_zeros_of_the_input_does_not_change_a_bit(
    calls, one_thread, rows, width, outputs, share, bias
):
    layer = laid_out(width, outputs, bias)
    x = normal(rows, width, dtype=torch.float32) * (normal(rows, width, seed=1).abs() < share)
    x[0] = torch.where(x[0] == 0, -0.0, x[0])
    found = layer.forward_packed(x, input_is_relu=True)
    assert found is not None
    assert torch.equal(found, layer(x))
    assert calls == ["packed_linear_sparse", "packed_linear"]


@torch.no_grad()
def test_nan_and_inf_are_not_skipped_like_zeros(calls, one_thread):
    layer, x = laid_out(40, 70), torch.zeros(30, 40)
    x[3, 17], x[29, 39] = math.nan, math.inf
    found = layer.forward_packed(x, input_is_relu=True)
    assert found is not None
    assert found.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [3, 29]
    assert torch.equal(found[0], layer.bias)


@torch.no_grad()
def test_a_row_of_a_packed_linear_layer_does_not_depend_on_other_rows(calls, one_thread):
    layer, x = laid_out(70, 300), normal(53, 70, dtype=torch.float32)
    assert torch.equal(layer(x), torch.cat([layer(row) for row in x.split(1)]))
    assert set(calls) == {"packed_linear"}


@torch.no_grad()
def test_a_packed_linear_layer_takes_an_input_that_is_not_contiguous(calls, one_thread):
    layer, x = laid_out(6, 5), normal(9, 12, dtype=torch.float32)[::2, 3:9]
    assert torch.equal(layer(x), layer(x.clone()))
    assert calls == ["packed_linear"] * 2


def test_a_packed_linear_layer_has_the_gradients_of_an_unpacked_one(calls, one_thread):
    layer, x = laid_out(6, 5), leaf(9, 6, dtype=torch.float32)
    found = grads_of(layer(x), normal(9, 5, dtype=torch.float32), [x, *layer.parameters()])
    plain = F.linear(x, *layer.parameters())
    expected = grads_of(plain, normal(9, 5, dtype=torch.float32), [x, *layer.parameters()])
    assert calls == []
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("how", ["step", "load", "replace", "type"])
@torch.no_grad()
def test_a_packed_linear_layer_uses_its_new_weights_after_they_change(calls, one_thread, how):
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
def test_packed_weights_are_used_only_on_one_thread(calls, num_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    layer, x = laid_out(6, 5), normal(9, 6, dtype=torch.float32)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert calls == (["packed_linear"] if num_threads == 1 else [])


@NANS
@EACH_PRODUCT
def test_a_nan_weight_makes_exactly_its_outputs_and_input_gradients_nan_in_every_dtype(
    way, calls, bits
):
    """For NaNs whose bits could be rounded to a number."""
    layer, x = Linear(6, 40), leaf(3, 6, dtype=way.dtype)
    with torch.no_grad():
        layer.weight.view(torch.int32)[5, 2] = nan_of(bits).view(torch.int32)
    out, grad_x = grads_of(layer(x), torch.ones(3, 40), [x])
    assert out[:, 5].isnan().all() and out.isnan().sum() == 3
    assert grad_x[:, 2].isnan().all() and grad_x.isnan().sum() == 3


@MULTIPLYING_PAIRS
@pytest.mark.parametrize("num_outputs", [5, 4])
def test_a_linear_map_whose_weights_were_shortened_equals_the_formula(way, calls, num_outputs):
    """The attribute `out_features` is not updated; odd numbers of outputs are not compiled."""
    layer, x = Linear(6, 9 - num_outputs, bias=False), leaf(3, 6, dtype=way.dtype)
    layer.weight = nn.Parameter(normal(num_outputs, 6, seed=1, dtype=torch.float32))
    out, *grads = grads_of(layer(x), torch.ones(3, num_outputs), [x, layer.weight])
    assert calls == (["linear", "linear_grad"] if num_outputs == 4 else [])
    exact = exactly([x, layer.weight.to(way.dtype)])
    expected = grads_of(exact[0] @ exact[1].T, torch.ones(3, num_outputs), exact)
    for found, plain in zip((out, *grads), expected, strict=True):
        way.assert_near(found, plain, roundings=2)
