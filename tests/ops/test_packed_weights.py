"""Compare products in bfloat16 and int8, in PyTorch and in C, with their formulas."""

import math

import pytest
import torch
from torch import Tensor
from ways import BOTH_PATHS, normal

from mtrain.ops import native
from mtrain.ops.linear import Linear
from mtrain.ops.packed_weights import PackedWeights, quantise
from mtrain.ops.topk import Projection, argmax_tokens, top_tokens

PRECISIONS = pytest.mark.parametrize("precision", ["bfloat16", "int8"])
SIZES = [
    (1, 1, 1),
    (2, 3, 5),
    (7, 64, 64),
    (13, 66, 129),
    (25, 127, 200),
    (6, 300, 65),
    (115, 130, 100),
]
FLOAT = torch.float32


def linear(width: int, outputs: int, has_bias: bool = True) -> Linear:
    layer = Linear(width, outputs, bias=has_bias)
    with torch.no_grad():
        layer.weight.copy_(normal(outputs, width, seed=1))
        if has_bias:
            layer.bias.copy_(normal(outputs, seed=2))
    return layer


def expected_of(layer: Linear, x: Tensor, precision: str) -> Tensor:
    """Return the product of the rounded operands, in float64."""
    if precision == "bfloat16":
        product = x.bfloat16().double() @ layer.weight.bfloat16().double().T
    else:
        (values, scales), (weights, weight_scales) = quantise(x), quantise(layer.weight)
        product = values.double() @ weights.double().T
        product *= scales.double()[:, None] * weight_scales.double()
    return product if layer.bias is None else product + layer.bias.double()


@pytest.mark.parametrize("width", [1, 5, 64, 1000])
def test_int8_quantisation_errors_are_at_most_half_a_step(width):
    x = normal(20, width, dtype=FLOAT)
    values, scales = quantise(x)
    assert values.dtype is torch.int8
    assert (values.abs().amax(1) == 127).all()
    rest = (x.double() - values.double() * scales.double()[:, None]).abs()
    assert (rest <= 0.5001 * scales[:, None]).all()


def test_rows_of_zeros_have_scale_zero_and_rows_with_nan_or_inf_have_a_nan_scale():
    x = torch.tensor([[0.0, 0.0], [1e-40, 0.0], [math.nan, 1.0], [math.inf, 1.0], [2.0, -1.0]])
    values, scales = quantise(x)
    assert values.tolist() == [[0, 0], [0, 0], [0, 0], [0, 0], [127, -64]]
    assert scales[:2].tolist() == [0.0, 0.0]
    assert scales[2:4].isnan().all()
    assert scales[4] == pytest.approx(2 / 127)


@BOTH_PATHS
@PRECISIONS
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("rows", "width", "outputs"), SIZES)
@torch.no_grad()
def test_compiled_and_pytorch_products_equal_the_formula_of_the_rounded_operands(
    way, calls, one_thread, precision, rows, width, outputs, has_bias
):
    layer, x = linear(width, outputs, has_bias), normal(rows, width, dtype=FLOAT)
    layer.pack_weights(precision)
    exact = expected_of(layer, x, precision)
    found = [layer(x), layer.forward_packed(x, apply_relu=True)]
    found.append(layer.forward_packed(x, input_is_relu=True))
    names = ["packed_linear", "packed_linear", "packed_linear_sparse"]
    assert calls == (names if way.is_compiled else [])
    for product, wanted in zip(found, [exact, exact.relu(), exact], strict=True):
        torch.testing.assert_close(product.double(), wanted, rtol=1e-5, atol=1e-5 * width**0.5)


@PRECISIONS
@torch.no_grad()
def test_a_row_of_a_compiled_rounded_product_does_not_depend_on_other_rows(
    calls, one_thread, precision
):
    layer, x = linear(66, 130), normal(115, 66, dtype=FLOAT)
    x[3] *= 1000
    layer.pack_weights(precision)
    apart = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(x), apart)


@BOTH_PATHS
@PRECISIONS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@torch.no_grad()
def test_a_nan_or_inf_row_of_a_compiled_product_stays_not_finite_and_changes_no_other_row(
    way, calls, one_thread, precision, value
):
    layer, x = linear(64, 70), normal(9, 64, dtype=FLOAT)
    layer.pack_weights(precision)
    before = layer(x)
    x[4, 7] = value
    after = layer(x)
    assert not after[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(after[others], before[others])


@BOTH_PATHS
@torch.no_grad()
def test_compiled_and_pytorch_int8_products_take_rows_of_any_magnitude(way, calls, one_thread):
    layer = linear(10, 70, has_bias=False)
    layer.pack_weights("int8")
    x = normal(5, 10, dtype=FLOAT) * torch.tensor([0.0, 1e-36, 1e-20, 1e20, 1e30])[:, None]
    found, exact = layer(x), expected_of(layer, x, "int8")
    assert (found[:2] == 0).all()
    size = exact.abs().amax(1, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(found.double() / size, exact / size, rtol=0, atol=1e-6)


@PRECISIONS
@pytest.mark.parametrize("value", [math.nan, math.inf])
@torch.no_grad()
def test_weights_with_nan_or_inf_are_packed_in_float32(one_thread, precision, value):
    layer, x = linear(6, 9), normal(3, 6, dtype=FLOAT)
    layer.weight[2, 1] = value
    layer.pack_weights(precision)
    assert layer._packed is not None
    assert layer._packed.precision == "float32"
    others = [0, 1, *range(3, 9)]
    exact = (x.double() @ layer.weight.double().T + layer.bias.double())[:, others]
    torch.testing.assert_close(layer(x)[:, others].double(), exact, rtol=1e-5, atol=1e-5)
    assert not layer(x)[:, 2].isfinite().any()


@PRECISIONS
@torch.no_grad()
def test_rounded_weights_are_discarded_after_the_weights_change(one_thread, precision):
    layer, x = linear(6, 9), normal(3, 6, dtype=FLOAT)
    layer.pack_weights(precision)
    layer.weight.mul_(2)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-6, atol=1e-6)
    assert layer._packed is None


@PRECISIONS
def test_rounded_weights_are_not_used_while_gradients_are_recorded(one_thread, precision):
    layer, x = linear(6, 9), normal(3, 6, dtype=FLOAT)
    layer.pack_weights(precision)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-6, atol=1e-6)


@PRECISIONS
@pytest.mark.parametrize("never", [[], [4, 0]])
@torch.no_grad()
def test_argmax_and_top_k_of_compiled_rounded_logits_agree(calls, one_thread, precision, never):
    projected, states = Projection(66, 200), normal(40, 66, dtype=FLOAT)
    projected.weight.copy_(normal(200, 66, seed=3))
    projected.weight[70:80] = projected.weight[60]  # ties
    projected.pack_weights(precision)
    logits = projected.logits(states)
    best, top = argmax_tokens(logits, never), top_tokens(logits, never, 4)
    assert calls == ["packed_argmax", "packed_topk"]
    assert torch.equal(best, top.ids_NC[:, :1])
    plain = top_tokens(projected(states), never, 4)
    assert torch.equal(plain.ids_NC, top.ids_NC)
    torch.testing.assert_close(plain.log_prob_NC, top.log_prob_NC, rtol=1e-6, atol=1e-6)


@PRECISIONS
@torch.no_grad()
def test_the_compiled_argmax_of_a_nan_state_is_minus_one(calls, one_thread, precision):
    projected, states = Projection(66, 200), normal(9, 66, dtype=FLOAT)
    projected.pack_weights(precision)
    states[4, 7] = math.nan
    best = argmax_tokens(projected.logits(states), [1]).flatten().tolist()
    assert best[4] == -1
    assert min(best[:4] + best[5:]) >= 0


@PRECISIONS
@pytest.mark.parametrize("width", [3, 64, 1000])
@torch.no_grad()
def test_the_logit_errors_of_a_compiled_scan_are_within_its_bounds(one_thread, precision, width):
    functions = native.functions_for(torch.ones(1), any_threads=True)
    if functions is None:
        pytest.skip("nothing is compiled")
    projected, states = Projection(width, 150), normal(50, width, dtype=FLOAT)
    projected.weight.copy_(normal(150, width, seed=3) * torch.linspace(0.1, 3, 150)[:, None])
    projected.weight[:, 0] *= 20
    states[:25, 0] *= 20
    scan = PackedWeights(projected.weight, functions).make_scan(precision)
    assert scan is not None
    assert scan.bounds_2U is not None
    if precision == "int8":
        values, scales = quantise(states)
        error_N = (states - values * scales[:, None]).norm(dim=1)
    else:
        error_N = 2**-8 * states.norm(dim=1)
    length_N = states.norm(dim=1) + error_N
    bounds_2V = scan.bounds_2U.repeat_interleave(64, 1)[:, :150]
    margin_NV = error_N[:, None] * bounds_2V[0] + length_N[:, None] * bounds_2V[1]
    exact_NV = states.double() @ projected.weight.double().T
    apart_NV = (scan.packed.multiply(states, None).double() - exact_NV).abs()
    assert (apart_NV <= 1.001 * margin_NV).all()
    assert (apart_NV / margin_NV).max() > (0.02 if width > 3 else 0.2)  # and they are not too loose
