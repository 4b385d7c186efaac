"""Linear maps for training and decoding, in the dtype of their input.

Weights are float32 parameters; in training the products run in the dtype of the states, and the
gradients of weights have the dtype of the weights. For decoding, weights are packed once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.ops.native import (
    Functions,
    check_same_device,
    differentiable_once,
    functions_for,
    has_cpu_memory,
    is_bare,
    is_float_vector,
)
from mtrain.ops.packed_weights import PackedWeights, Precision

_ROW_MULTIPLE = 128  # products in bfloat16 are padded to a multiple of this many rows


class Linear(nn.Linear):
    """`nn.Linear` in the dtype of its input, whatever the dtype of its weights."""

    _packed: PackedWeights | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the packed weights, which are tied to the address of this object's weights."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`, [..., in_features] to [..., out_features]."""
        result = self.forward_compiled(input)
        if result is not None:
            return result
        check_same_device(input, self.weight)
        if input.dtype == self.weight.dtype:
            return F.linear(input, self.weight, self.bias)
        if input.device.type != "cpu":
            bias = None if self.bias is None else self.bias.to(input.dtype)
            return F.linear(input, self.weight.to(input.dtype), bias)
        mixed: Tensor = _MixedDtypeLinear.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias
        )
        return mixed

    def forward_compiled(
        self, x: Tensor, apply_relu: bool = False, input_is_relu: bool = False
    ) -> Tensor | None:
        """Return `x @ weight.T + bias`; None where the plain formula is used.

        Args:
            x: [..., in_features].
            apply_relu: apply ReLU to the result. The backward pass does not mask the gradient; the
                next map must do so, with `input_is_relu`.
            input_is_relu: `x` is a result of `apply_relu`; zero the gradient where `x` is zero.
        """
        if not torch.is_grad_enabled():
            return self.forward_packed(x, apply_relu, input_is_relu)
        # packing the weights in each call pays off only for many rows
        weight, bias = self.weight, self.bias
        functions = functions_for_linear(x, weight, bias)
        if functions is None or len(weight) % functions.k_group_size:
            return None
        result: Tensor = _CompiledLinear.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, functions, apply_relu, input_is_relu
        )
        return result

    def forward_packed(
        self, input: Tensor, apply_relu: bool = False, input_is_relu: bool = False
    ) -> Tensor | None:
        """Return `input @ weight.T + bias` from packed weights; None if there are none for `input`.

        Without compiled functions, only bfloat16 and int8 copies are used, by the plain formula.

        Args:
            input: [..., in_features], float32.
            apply_relu: apply ReLU to the result; not together with `input_is_relu`.
            input_is_relu: skip the zeros of `input`, which are most of it in a trained model; the
                result is the same, bit for bit, for finite weights.
        """
        packed = self._packed_for(input)
        if packed is None or "bias" not in self._parameters:
            return None
        # faster than `self.bias`
        bias, out_features = self._parameters["bias"], packed.weight.shape[0]
        if not (bias is None or is_float_vector(bias, out_features)):
            return None
        functions = None if packed.tiles is None else functions_for(input)
        if functions is None:
            if packed.precision == "float32":
                return None
            plain = packed.multiply(input, bias)
            return F.relu(plain) if apply_relu else plain
        x = input.contiguous()
        out = x.new_empty((*x.shape[:-1], out_features))
        sizes, structures = matmul_sizes(x, packed.weight), (packed.map_with(bias),)
        if input_is_relu:
            functions.call("packed_linear_sparse", (x, out), *sizes, structures=structures)
        else:
            functions.call("packed_linear", (x, out), *sizes, apply_relu, structures=structures)
        return out

    def pack_weights(self, precision: Precision = "float32") -> None:
        """Store a packed copy of the weights for decoding; it is used until they change.

        A packed product of a few rows is several times as fast as PyTorch's on one thread.

        Args:
            precision: of the copy. With bfloat16 and int8 the input of a product is rounded, too:
                to bfloat16, or each row to int8 with the scale max|x| / 127.
        """
        self.unpack_weights()
        weight = self.weight
        functions = functions_for(weight, any_threads=True)
        is_usable = weight.dtype is torch.float32 and weight.is_cpu and weight.is_contiguous()
        if not is_usable or (functions is None and precision == "float32"):
            return
        if not weight.is_inference():  # inference tensors do not count their versions
            self._packed = PackedWeights(weight, functions, precision)

    def unpack_weights(self) -> None:
        """Delete the packed copy."""
        self._packed = None

    def _packed_for(self, x: Tensor) -> PackedWeights | None:
        """Return the packed weights if `x` [..., in_features] can be multiplied by them.

        They are discarded if the weights have changed.
        """
        packed = self._packed
        if packed is None or x.dtype is not torch.float32 or not _fits(x, packed.weight):
            return None
        if not packed.is_current(self._parameters.get("weight")):
            self._packed = packed = None
        return packed


def relu_ffn(x: Tensor, inner: Linear, outer: Linear) -> Tensor:
    """Return outer(max(0, inner(x))), [..., D] to [..., D] (section 3.3).

    Modules with hooks, or of another class, are called as modules, one after the other.
    """
    hidden = None
    if type(inner) is type(outer) is Linear and is_bare(inner) and is_bare(outer):
        hidden = inner.forward_compiled(x, apply_relu=True)
    if hidden is None:
        plain: Tensor = outer(F.relu(inner(x)))
        return plain
    result = outer.forward_compiled(hidden, input_is_relu=True)
    if result is None:
        result = outer(F.relu(hidden))  # ReLU again: same values, masked gradient
    return result


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
    @differentiable_once
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
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, cast_weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        padded = pad_rows(flat)
        grad_x = torch.mm(padded, cast_weight)[: len(flat)].view(*grad.shape[:-1], rows.shape[1])
        grad_weight = torch.mm(padded.t(), rows).to(ctx.weight_dtype)
        grad_bias = None if ctx.bias_dtype is None else flat.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


def functions_for_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, any_threads: bool = False
) -> Functions | None:
    """Return the compiled functions if they multiply `x` by `weight` faster than PyTorch does."""
    functions = functions_for(x, any_threads=any_threads)
    if functions is None or not functions.has_fast_matmul():
        return None
    if weight.dtype is not torch.float32 or not has_cpu_memory(weight):
        return None
    if not _fits(x, weight) or not (bias is None or is_float_vector(bias, len(weight))):
        return None
    return None if x.shape[-1] % functions.k_group_size else functions


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `x` [..., K] can be multiplied by `weight` [M, K]."""
    shape = weight.shape
    return len(shape) == 2 and x.dim() > 0 and x.shape[-1] == shape[1]


def matmul_sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Return (n, k, m) of the product of `x` [..., k], n rows in all, and `weight` [m, k]^T."""
    return x.numel() // x.shape[-1], x.shape[-1], len(weight)


def pad_rows(rows: Tensor) -> Tensor:
    """Pad rows [N, D] with zeros to a multiple of `_ROW_MULTIPLE` on a CPU.

    oneDNN compiles a bfloat16 product for each number of rows, which differs between batches.
    """
    missing = -len(rows) % _ROW_MULTIPLE
    if not missing or rows.device.type != "cpu":
        return rows
    padded = rows.new_empty((len(rows) + missing, rows.shape[1]))
    padded[: len(rows)] = rows
    padded[len(rows) :] = 0
    return padded
