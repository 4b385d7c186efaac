"""The few operations that make training fast, each equal to a plain formula of PyTorch.

They know tensors and nothing of the model. On a CPU the work between two matrix products runs in
compiled functions (`native`), one pass over memory each; everywhere else, and without a compiler,
in the plain formula that stands beside them. A test checks each against the formula in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.ops import native
from mtrain.ops.dropout import NO_DROPOUT, Dropout, DropoutMask
from mtrain.ops.native import Functions, functions_for

_SHORT = 128  # up to this many keys, plain batched products beat the fused kernel on a CPU
_MOST_KEYS = {torch.float32: 128, torch.bfloat16: 512}  # that compiled attention wins with


class _Forgetful:
    """The context of a forward pass that no backward pass follows."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""


def run_compiled(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Run a function; where no gradient is wanted, without what keeps it."""
    result: Tensor
    if torch.is_grad_enabled():
        result = function.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        result = function.forward(_Forgetful(), *arguments)
    return result


def attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, dropout: Dropout | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(d_k)) v over the kept keys (section 3.2.1).

    Args:
        q: [B, H, T, K].
        k, v: [B, H, S, K].
        keep: bool, broadcastable to [B, H, T, S]; True takes part. A row that keeps nothing
            gives the mean of all values, never NaN.
        dropout: zeroes a share of the weights, while training.
    """
    functions = functions_for(q, k, v)
    if functions is not None and q.dim() == 4 and k.shape[-2] <= _MOST_KEYS[q.dtype]:
        drops = dropout.draw() if dropout is not None else NO_DROPOUT
        return run_compiled(_AttentionFunction, q, k, v, keep, drops, functions)
    rate = dropout.rate if dropout is not None and dropout.training else 0.0
    is_cpu = q.device.type == "cpu"
    is_short = q.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if is_cpu and is_short else q.dtype
    bias = None
    if keep is not None:
        bias = torch.zeros(keep.shape, dtype=dtype, device=q.device)
        bias.masked_fill_(~keep, torch.finfo(dtype).min)
    if not is_cpu or (k.shape[-2] > _SHORT and rate == 0):
        mixed = F.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=bias, dropout_p=rate
        )
        return mixed.to(q.dtype)
    scores = torch.matmul(q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype).transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    weights = scores.softmax(-1)
    return torch.matmul(weights if dropout is None else dropout(weights), v.to(dtype)).to(q.dtype)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        drops: DropoutMask,
        functions: Functions,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        (out,) = _heads_last(q)
        shape = _attention_shape(q, k, v, keep, out, drops)
        functions.call("attention", (q, k, v, keep, out), shape=shape)
        ctx.save_for_backward(q, k, v, keep)
        ctx.shape, ctx.functions = shape, functions
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keep = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        grads = _heads_last(q, k, v)
        ctx.shape.out_strides[:] = grad.stride()[:3]
        for name, own in zip(("grad_q", "grad_k", "grad_v"), grads, strict=True):
            getattr(ctx.shape, f"{name}_strides")[:] = own.stride()[:3]
        ctx.functions.call("attention_grad", (grad, q, k, v, keep, *grads), shape=ctx.shape)
        return *grads, None, None, None


def parts(x: Tensor, count: int) -> Sequence[Tensor]:
    """Return equal parts of the last dimension of `x`.

    The gradients that attention makes of its parts are one tensor already, and stay where they are.
    """
    if not torch.is_grad_enabled() or functions_for(x) is None:
        return x.chunk(count, -1)
    result: tuple[Tensor, ...] = _PartsFunction.apply(x, count)  # type: ignore[no-untyped-call]
    return result


class _PartsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return x.chunk(count, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        first, width = grads[0], grads[0].shape[-1]
        places = [(_memory(grad), grad.storage_offset()) for grad in grads]
        here, start = places[0]
        if places == [(here, start + i * width) for i in range(len(grads))]:
            whole = first.as_strided((*first.shape[:-1], len(grads) * width), first.stride())
            if whole.is_contiguous():
                return whole, None
        return torch.cat(grads, -1), None


def paged_attention(q_ND: Tensor, store_RX: Tensor, places_NT: Tensor, num_heads: int) -> Tensor:
    """Return the attention [N, D] of one query each to the rows of a store that it names.

    Args:
        q_ND: queries, all heads side by side.
        store_RX: a row of keys and values for each position, X = 2 * D.
        places_NT: rows of the store; -1 is no row. Each query names at least one.
    """
    num_rows, d_model = q_ND.shape
    functions = functions_for(q_ND, store_RX)
    if functions is not None:
        q_ND = q_ND if q_ND.stride(1) == 1 else q_ND.contiguous()
        places_NT = places_NT if places_NT.stride(1) == 1 else places_NT.contiguous()
        out_ND = torch.empty_like(q_ND, memory_format=torch.contiguous_format)
        sizes = (*places_NT.shape, num_heads, d_model // num_heads)
        functions.call(
            "attend",
            (q_ND, store_RX, places_NT, out_ND),
            *(*sizes, q_ND.stride(0), places_NT.stride(0), (d_model // num_heads) ** -0.5),
        )
        return out_ND
    rows_NTX = store_RX[places_NT.clamp(min=0)]
    k_NHTK, v_NHTK = (
        x.view(*x.shape[:2], num_heads, -1).transpose(1, 2) for x in rows_NTX.chunk(2, -1)
    )
    q_NH1K, keep = q_ND.view(num_rows, num_heads, 1, -1), (places_NT >= 0)[:, None, None, :]
    return attention(q_NH1K, k_NHTK, v_NHTK, keep).flatten(1)


def _heads_last(*tensors: Tensor) -> list[Tensor]:
    """Return an empty [B, H, T, K] like each; heads lie side by side, as [B, T, D] wants them.

    Those that are like parts of one tensor are parts of one, too.
    """
    empty: list[Tensor] = []
    for _, group in itertools.groupby(tensors, _memory):
        same = list(group)
        b, h, t, k = same[0].shape
        whole = same[0].new_empty((b, t, len(same), h, k))
        empty += [whole[:, :, i].transpose(1, 2) for i in range(len(same))]
    return empty


def _memory(x: Tensor) -> tuple[Any, ...]:
    """Return what two parts of one tensor have in common."""
    return x.untyped_storage().data_ptr(), x.shape, x.stride()


def _attention_shape(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, out: Tensor, drops: DropoutMask
) -> native.AttentionShape:
    shape = native.AttentionShape(*q.shape[:3], *k.shape[2:])
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        getattr(shape, f"{name}_strides")[:] = x.stride()[:3]
    if keep is not None:
        shape.keep_strides[:] = keep.expand(*q.shape[:3], k.shape[2]).stride()
    shape.scale = q.shape[-1] ** -0.5
    shape.cut, shape.dropout_scale, shape.seed = drops
    return shape
