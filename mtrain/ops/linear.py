"""Linear maps for training and decoding, in the dtype of their input.

Weights are float32 parameters; in training the products run in the dtype of the states, and the
gradients of weights have the dtype of the weights. For decoding, weights are packed once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.ops.native import Functions, functions_for
from mtrain.runtime.device import processor_has

_ROW_MULTIPLE = 128  # products in bfloat16 are padded to a multiple of this many rows


class Linear(nn.Linear):
    """`nn.Linear` in the dtype of its input, whatever the dtype of its weights."""

    _packed: Tensor | None = None
    _packed_id = (0, 0)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`, [..., in_features] to [..., out_features]."""
        if torch.is_grad_enabled():  # packing the weights in each call pays for many rows only
            functions = self.compiled_functions(input)
            result = None if functions is None else self.forward_compiled(input, functions)
        else:
            result = self.forward_packed(input)
        if result is not None:
            return result
        if input.dtype == self.weight.dtype:
            return F.linear(input, self.weight, self.bias)
        if input.device.type != "cpu":
            bias = None if self.bias is None else self.bias.to(input.dtype)
            return F.linear(input, self.weight.to(input.dtype), bias)
        mixed: Tensor = _MixedDtypeLinear.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias
        )
        return mixed

    def compiled_functions(self, x: Tensor) -> Functions | None:
        """Return the compiled functions if they multiply `x` by these weights, else None."""
        functions = functions_for_linear(x, self.weight)
        if functions is None or self.out_features % functions.k_group_size():
            return None
        return functions

    def forward_compiled(
        self,
        x: Tensor,
        functions: Functions,
        apply_relu: bool = False,
        input_is_relu: bool = False,
    ) -> Tensor:
        """Return `x @ weight.T + bias`, with a gradient.

        Args:
            x: [..., in_features], float32 or bfloat16.
            functions: what `compiled_functions` returned for `x`.
            apply_relu: return max(0, the same). Its gradient mask is applied by the next map:
            input_is_relu: `x` was made with `apply_relu`; the gradient of its zeros is zero.
        """
        result: Tensor = _CompiledLinear.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, functions, apply_relu, input_is_relu
        )
        return result

    def forward_packed(
        self, input: Tensor, apply_relu: bool = False, input_is_relu: bool = False
    ) -> Tensor | None:
        """Return `input @ weight.T + bias` from packed weights; None if there are none for `input`.

        Args:
            input: [..., in_features], float32.
            apply_relu: return max(0, the same); not together with `input_is_relu`.
            input_is_relu: skip the zeros of `input`, which are most of it in a trained model; the
                result is the same, bit for bit.
        """
        packed = self._packed_for(input)
        functions = None if packed is None else functions_for(input)
        if functions is None:
            return None
        x = input.contiguous()
        out = x.new_empty((*x.shape[:-1], self.out_features))
        tensors, sizes = (x, packed, self.bias, out), matmul_sizes(x, self.weight)
        if input_is_relu:
            functions.call("packed_linear_sparse", tensors, *sizes)
        else:
            functions.call("packed_linear", tensors, *sizes, apply_relu)
        return out

    def pack_weights(self) -> None:
        """Store a packed copy of the weights for decoding; it is used until they change.

        A packed product of a few rows is several times as fast as PyTorch's on one thread.
        """
        functions = functions_for(self.weight, is_training=True)
        if functions is None or functions.dtype_name != "float":
            return
        self._packed = pack_rows(self.weight.detach(), functions)
        self._packed_id = self._weight_id()

    def _packed_for(self, x: Tensor) -> Tensor | None:
        """Return the packed weights if they are in the dtype of `x` and still up to date."""
        packed = self._packed
        if packed is None or packed.dtype != x.dtype or self._packed_id != self._weight_id():
            return None
        return packed

    def _weight_id(self) -> tuple[int, int]:
        """Return (data_ptr, version) of the weights, which changes whenever they do."""
        weight = self.weight
        return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def relu_ffn(x: Tensor, inner: Linear, outer: Linear) -> Tensor:
    """Return outer(max(0, inner(x))), [..., D] to [..., D] (section 3.3)."""
    if torch.is_grad_enabled():
        functions = None if outer.compiled_functions(x) is None else inner.compiled_functions(x)
        if functions is not None:
            hidden = inner.forward_compiled(x, functions, apply_relu=True)
            return outer.forward_compiled(hidden, functions, input_is_relu=True)
    else:
        packed_hidden = inner.forward_packed(x, apply_relu=True)
        if packed_hidden is not None:
            result = outer.forward_packed(packed_hidden, input_is_relu=True)
            if result is not None:
                return result
    plain: Tensor = outer(F.relu(inner(x)))
    return plain


class _CompiledLinear(torch.autograd.Function):
    """A linear map with float32 weights; one compiled call each for forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        functions: Functions,
        apply_relu: bool,
        input_is_relu: bool,
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out = x.new_empty((*x.shape[:-1], len(weight)))
        functions.call("linear", (x, weight, bias, out), *matmul_sizes(x, weight), apply_relu)
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.functions = bias is not None, functions
        ctx.input_is_relu = input_is_relu
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        grad_bias = weight.new_empty(len(weight)) if ctx.has_bias else None
        tensors = (grad.contiguous(), x, weight, grad_x, grad_weight, grad_bias)
        ctx.functions.call("linear_grad", tensors, *matmul_sizes(x, weight), ctx.input_is_relu)
        return grad_x, grad_weight, grad_bias, None, None, None


class _MixedDtypeLinear(torch.autograd.Function):
    """A linear map on a CPU in the dtype of its input, with gradients in that of its weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows, cast_weight = pad_rows(flat), weight.to(x.dtype)
        ctx.save_for_backward(rows, cast_weight)
        ctx.bias_dtype, ctx.weight_dtype = bias.dtype if bias is not None else None, weight.dtype
        out = F.linear(rows, cast_weight, None if bias is None else bias.to(x.dtype))
        return out[: len(flat)].view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, cast_weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        padded = pad_rows(flat)
        grad_x = torch.mm(padded, cast_weight)[: len(flat)].view(*grad.shape[:-1], rows.shape[1])
        grad_weight = torch.mm(padded.t(), rows).to(ctx.weight_dtype)
        grad_bias = None if ctx.bias_dtype is None else flat.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


def functions_for_linear(x: Tensor, weight: Tensor) -> Functions | None:
    """Return the compiled functions if they multiply `x` by `weight` faster than PyTorch does."""
    functions = functions_for(x, is_training=True)
    if functions is None or not functions.has_fast_matmul() or weight.dtype != torch.float32:
        return None
    if x.dtype == torch.bfloat16 and processor_has("amx_tile"):
        return None
    return None if x.shape[-1] % functions.k_group_size() else functions


def pack_rows(weight_MK: Tensor, functions: Functions) -> Tensor:
    """Return weights [M, K] packed for the compiled functions, [M / P, K, P], padded with zeros.

    P is the number of output columns of one tile; element [i, k, p] is weight [i * P + p, k].
    """
    width = functions.tile_columns()
    padded = F.pad(weight_MK, (0, 0, 0, -len(weight_MK) % width))
    return padded.view(-1, width, weight_MK.shape[1]).transpose(1, 2).contiguous()


def matmul_sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Return (n, k, m) of the product of `x` [..., k], n rows in all, and `weight` [m, k]^T."""
    return x.numel() // x.shape[-1], x.shape[-1], len(weight)


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of all linear maps of a model for decoding; takes as much memory again."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack_weights()


def pad_rows(rows: Tensor) -> Tensor:
    """Pad rows [N, D] with zeros to a multiple of `_ROW_MULTIPLE` on a CPU.

    oneDNN compiles a bfloat16 product anew for each number of rows, and batches have many.
    """
    missing = -len(rows) % _ROW_MULTIPLE
    if not missing or rows.device.type != "cpu":
        return rows
    padded = rows.new_empty((len(rows) + missing, rows.shape[1]))
    padded[: len(rows)] = rows
    padded[len(rows) :] = 0
    return padded
