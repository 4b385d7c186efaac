"""Linear maps, the loss over a vocabulary and the likeliest of it: all that multiplies by weights,
each equal to a plain formula of PyTorch.

They know tensors and nothing of the model. Products run in the type of the states, and sums of
gradients stay in the type of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.ops.native import Functions, functions_for
from mtrain.runtime.device import processor_has

_ROUND_ROWS = 128  # short products have a multiple of this many rows


class Linear(nn.Linear):
    """`nn.Linear` in the type of its input, whatever the type of its weights."""

    _panels: Tensor | None = None
    _laid_out = (0, 0)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias` in the type of `input`."""
        if torch.is_grad_enabled():  # to lay out weights pays for many rows, and decoding has few
            functions = self.functions_for(input)
            result = None if functions is None else self.forward_compiled(input, functions)
        else:
            result = self.forward_laid_out(input)
        return self._forward_plain(input) if result is None else result

    def _forward_plain(self, input: Tensor) -> Tensor:
        if input.dtype == self.weight.dtype:
            return F.linear(input, self.weight, self.bias)
        if input.device.type != "cpu":
            bias = None if self.bias is None else self.bias.to(input.dtype)
            return F.linear(input, self.weight.to(input.dtype), bias)
        result: Tensor = _ShortLinear.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias
        )
        return result

    def functions_for(self, x: Tensor) -> Functions | None:
        """Return the compiled functions, if they multiply such states by these weights."""
        functions = functions_for_linear(x, self.weight)
        if functions is None or self.out_features % functions.numbers_of_a_word():
            return None
        return functions

    def forward_compiled(
        self, x: Tensor, functions: Functions, rectifies: bool = False, is_rectified: bool = False
    ) -> Tensor:
        """Return `x @ weight.T + bias`, or the greater of this and 0 if this `rectifies`.

        The gradients of zeros are stopped where they are read, by a map whose `x` `is_rectified`.
        """
        result: Tensor = _CompiledLinear.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, functions, rectifies, is_rectified
        )
        return result

    def forward_laid_out(
        self, input: Tensor, rectifies: bool = False, is_rectified: bool = False
    ) -> Tensor | None:
        """Return the same as `forward_compiled`, if weights are laid out for such an input.

        What `is_rectified` is mostly zeros, once a model has learned: they are skipped. That map
        does not rectify in turn.
        """
        panels = self._panels_for(input)
        functions = None if panels is None else functions_for(input)
        if functions is None:
            return None
        x = input.contiguous()
        out = x.new_empty((*x.shape[:-1], self.out_features))
        tensors, sizes = (x, panels, self.bias, out), matmul_sizes(x, self.weight)
        if is_rectified:
            functions.call("project_sparse", tensors, *sizes)
        else:
            functions.call("project", tensors, *sizes, rectifies)
        return out

    def lay_out(self) -> None:
        """Lay out a copy of the weights as compiled functions read them, until they change.

        Nothing else changes; where no gradient is wanted, one thread multiplies faster by far.
        """
        functions = functions_for(self.weight, is_training=True)
        if functions is None or functions.store != "float":
            return
        self._panels = pack_panels(self.weight.detach(), functions)
        self._laid_out = self._state()

    def _panels_for(self, x: Tensor) -> Tensor | None:
        """Return the weights as they were laid out, if they are still the same."""
        panels = self._panels
        if panels is None or panels.dtype != x.dtype or self._laid_out != self._state():
            return None
        return panels

    def _state(self) -> tuple[int, int]:
        """Return what is another once the weights change."""
        weight = self.weight
        return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def relu_ffn(x: Tensor, inner: Linear, outer: Linear) -> Tensor:
    """Return outer(max(0, inner(x)))."""
    if torch.is_grad_enabled():
        functions = None if outer.functions_for(x) is None else inner.functions_for(x)
        if functions is not None:
            hidden = inner.forward_compiled(x, functions, rectifies=True)
            return outer.forward_compiled(hidden, functions, is_rectified=True)
    else:
        laid_out = inner.forward_laid_out(x, rectifies=True)
        result = None if laid_out is None else outer.forward_laid_out(laid_out, is_rectified=True)
        if result is not None:
            return result
    plain: Tensor = outer(F.relu(inner(x)))
    return plain


class _CompiledLinear(torch.autograd.Function):
    """A linear map with weights in float32, in one call each way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        functions: Functions,
        rectifies: bool,
        is_rectified: bool,
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out = x.new_empty((*x.shape[:-1], len(weight)))
        functions.call("linear", (x, weight, bias, out), *matmul_sizes(x, weight), rectifies)
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.functions = bias is not None, functions
        ctx.is_rectified = is_rectified
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        grad_bias = weight.new_empty(len(weight)) if ctx.has_bias else None
        tensors = (grad.contiguous(), x, weight, grad_x, grad_weight, grad_bias)
        ctx.functions.call("linear_grad", tensors, *matmul_sizes(x, weight), ctx.is_rectified)
        return grad_x, grad_weight, grad_bias, None, None, None


class _ShortLinear(torch.autograd.Function):
    """A linear map in the type of its input; the gradients of its weights are as long as they.

    For a CPU, whose library wants its rows filled up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows, short_weight = pad_rows(flat), weight.to(x.dtype)
        ctx.save_for_backward(rows, short_weight)
        ctx.bias_dtype, ctx.weight_dtype = bias.dtype if bias is not None else None, weight.dtype
        out = F.linear(rows, short_weight, None if bias is None else bias.to(x.dtype))
        return out[: len(flat)].view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, short_weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        filled = pad_rows(flat)
        grad_x = torch.mm(filled, short_weight)[: len(flat)].view(*grad.shape[:-1], rows.shape[1])
        grad_weight = torch.mm(filled.t(), rows).to(ctx.weight_dtype)
        grad_bias = None if ctx.bias_dtype is None else flat.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


def functions_for_linear(x: Tensor, weight: Tensor) -> Functions | None:
    """Return the compiled functions, if they multiply these tensors, and faster than PyTorch."""
    functions = functions_for(x, is_training=True)
    if functions is None or not functions.multiply() or weight.dtype != torch.float32:
        return None
    if x.dtype == torch.bfloat16 and processor_has("amx_tile"):
        return None
    return None if x.shape[-1] % functions.numbers_of_a_word() else functions


def pack_panels(words_MK: Tensor, functions: Functions) -> Tensor:
    """Return rows of words as compiled functions read them: those of a panel side by side."""
    width = functions.panel_width()
    filled = F.pad(words_MK, (0, 0, 0, -len(words_MK) % width))
    return filled.view(-1, width, words_MK.shape[1]).transpose(1, 2).contiguous()


def matmul_sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Return the rows of `x`, and how wide each is before and after."""
    return x.numel() // x.shape[-1], x.shape[-1], len(weight)


def pack_weights(model: nn.Module) -> None:
    """Lay out the weights of a model's linear maps for decoding; a copy of them."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.lay_out()


def pad_rows(rows: Tensor) -> Tensor:
    """Fill rows up with zeros to a multiple of `_ROUND_ROWS`.

    A CPU's library compiles a short product anew for each number of rows, and batches have many.
    """
    missing = -len(rows) % _ROUND_ROWS
    if not missing or rows.device.type != "cpu":
        return rows
    filled = rows.new_empty((len(rows) + missing, rows.shape[1]))
    filled[: len(rows)] = rows
    filled[len(rows) :] = 0
    return filled
