"""Layer normalisation; with the residual sum and dropout of a sublayer in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtrain.ops.dropout import Dropout, DropoutMask
from mtrain.ops.native import (
    Functions,
    differentiable_once,
    functions_for,
    is_bare,
    is_float_vector,
    run_compiled,
)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that computes in its weights' dtype and returns its input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` [..., D], normalised over D."""
        dtype = input.dtype if self.weight is None else self.weight.dtype
        result: Tensor = super().forward(input.to(dtype)).to(input.dtype)
        return result


def add_norm(x: Tensor, branch: Tensor, dropout: Dropout, norm: LayerNorm) -> Tensor:
    """Return LayerNorm(x + Dropout(branch)), all [..., D], in the dtype of `x` (section 5.4)."""
    functions = functions_for(x, branch, any_threads=dropout.is_active)
    gain, bias = norm.weight, norm.bias
    if (
        functions is None
        or x.shape != branch.shape
        or not (is_float_vector(gain, x.shape[-1]) and is_float_vector(bias, x.shape[-1]))
        or not (type(norm) is LayerNorm and is_bare(norm))
        or not (type(dropout) is Dropout and is_bare(dropout))
    ):
        plain: Tensor = norm(x + dropout(branch))
        return plain
    mask = dropout.draw()
    return run_compiled(_AddNormFunction, x, branch, gain, bias, norm.eps, mask, functions)


class _AddNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        gain: Tensor,
        bias: Tensor,
        eps: float,
        mask: DropoutMask,
        functions: Functions,
    ) -> Tensor:
        x, branch = x.contiguous(), branch.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        out, mean, rstd = torch.empty_like(x), gain.new_empty(rows), gain.new_empty(rows)
        tensors = (x, branch, gain, bias, out, mean, rstd)
        functions.call("add_norm", tensors, rows, width, eps, *mask)
        ctx.save_for_backward(x, branch, gain, mean, rstd)
        ctx.mask, ctx.functions = mask, functions
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, branch, gain, mean, rstd = ctx.saved_tensors
        grad_x, grad_branch = torch.empty_like(x), torch.empty_like(x)
        grad_gain, grad_bias = torch.zeros_like(gain), torch.zeros_like(gain)
        grads = (grad_x, grad_branch, grad_gain, grad_bias)
        tensors = (grad.contiguous(), x, branch, gain, mean, rstd, *grads)
        ctx.functions.call("add_norm_grad", tensors, len(mean), len(gain), *ctx.mask)
        return *grads, None, None, None
