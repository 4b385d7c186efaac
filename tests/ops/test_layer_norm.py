"""Compare layer normalisation, in PyTorch and in C, with the formula written out in float64."""

import math

import pytest
import torch
from torch import Tensor
from ways import (
    DROPS,
    EACH_WAY,
    LONG,
    SHORT,
    Way,
    exactly,
    fixed,
    grads_of,
    leaf,
    norm_of,
    normal,
    share_of,
)

from mtrain.ops import native
from mtrain.ops.dropout import Dropout, DropoutMask
from mtrain.ops.layer_norm import add_norm


def normalised(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer normalisation written out."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * gain + bias


# of one or two elements only signs are left: their gradient is a difference of close numbers
FLOOR = {False: 1e-11, True: 5e-4}


def spread_out(*shape: int, seed: int = 0, dtype: torch.dtype) -> Tensor:
    """Return a leaf whose first column is far from the others: no row is nearly constant."""
    x = normal(*shape, seed=seed, dtype=dtype)
    x[..., 0] += 5
    return x.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, SHORT])
@pytest.mark.parametrize("width", [1, 2, 6, 130])
def test_layer_norm_equals_the_formula_and_gradients_have_the_dtype_of_their_tensors(width, dtype):
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
def test_add_norm_equals_the_formula_written_out(way, calls, drops, rows, width):
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
    monkeypatch.setattr(native, "compiled", lambda: None)
    norm, dropout = norm_of(6, torch.float64), fixed(Dropout(0.3))
    inputs = (leaf(2, 3, 6), leaf(2, 3, 6, seed=1))
    assert torch.autograd.gradcheck(lambda x, branch: add_norm(x, branch, dropout, norm), inputs)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["x", "branch"])
def test_a_nan_or_inf_input_makes_its_row_of_add_norm_and_of_the_gradient_nan(
    way, calls, value, which
):
    norm = norm_of(20, LONG[way.dtype])
    x, branch = (leaf(3, 20, seed=seed, dtype=way.dtype) for seed in range(2))
    with torch.no_grad():
        (x if which == "x" else branch)[1, 18] = value
    out = add_norm(x, branch, Dropout(0.0), norm)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    grads = torch.autograd.grad(out, [x, branch], torch.ones_like(out))
    assert all(grad[1].isnan().all() for grad in grads)
