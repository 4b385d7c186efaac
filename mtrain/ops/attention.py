"""Scaled dot-product attention for training, and paged attention for decoding.

On a CPU each runs as one compiled function; elsewhere, and without a compiled library, as the plain
formula beside it. Tests compare both with the formula in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.ops.dropout import NO_DROPOUT, Dropout, DropoutMask
from mtrain.ops.header import STRUCTURES
from mtrain.ops.native import (
    Functions,
    check_same_device,
    differentiable_once,
    functions_for,
    has_cpu_memory,
    is_bare,
    run_compiled,
)

_MAX_MATMUL_KEYS = 128  # up to this many, batched products beat PyTorch's fused kernel on a CPU
# up to this many keys, the compiled function is faster than PyTorch's
_MAX_COMPILED_KEYS = {torch.float32: 128, torch.bfloat16: 512}


def attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, dropout: Dropout | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(d_k)) v over the kept keys, [B, H, T, K] (section 3.2.1).

    Args:
        q: [B, H, T, K].
        k, v: [B, H, S, K].
        keep: bool, broadcastable to [B, H, T, S]; True takes part. A row that keeps nothing
            gives the mean of all values, never NaN.
        dropout: applied to the weights after the softmax, while training.
    """
    is_training = dropout is not None and dropout.is_active
    functions = functions_for(q, k, v, any_threads=is_training)
    if functions is not None and _has_compiled_form(q, k, v, keep, dropout):
        mask = dropout.draw() if dropout is not None else NO_DROPOUT
        return run_compiled(_AttentionFunction, q, k, v, keep, mask, functions)
    check_same_device(q, k, v, *(() if keep is None else (keep,)))
    rate = dropout.rate if dropout is not None and is_training else 0.0
    is_cpu = q.device.type == "cpu"
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if is_cpu and is_half else q.dtype
    bias = None
    if keep is not None:
        bias = torch.zeros(keep.shape, dtype=dtype, device=q.device)
        bias.masked_fill_(~keep, torch.finfo(dtype).min)
    if not is_cpu or (k.shape[-2] > _MAX_MATMUL_KEYS and rate == 0):
        mixed = F.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=bias, dropout_p=rate
        )
        return mixed.to(q.dtype)
    scores = torch.matmul(q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype).transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    weights = scores.softmax(-1)
    return torch.matmul(weights if dropout is None else dropout(weights), v.to(dtype)).to(q.dtype)


def _has_compiled_form(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, dropout: Dropout | None
) -> bool:
    """Tell whether the compiled function supports these arguments, and is faster for them."""
    q_shape, k_shape = q.shape, k.shape
    return (
        len(q_shape) == len(k_shape) == 4
        and k_shape == v.shape
        and (k_shape[0], k_shape[1], k_shape[3]) == (q_shape[0], q_shape[1], q_shape[3])
        and k_shape[2] <= _MAX_COMPILED_KEYS[q.dtype]
        and (keep is None or (keep.dtype is torch.bool and has_cpu_memory(keep)))
        and (dropout is None or (type(dropout) is Dropout and is_bare(dropout)))
    )


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        mask: DropoutMask,
        functions: Functions,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        (out,) = _empty_heads_last(q)
        shape = STRUCTURES["attention_shape"](*q.shape[:3], *k.shape[2:])
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
            getattr(shape, f"{name}_strides")[:] = x.stride()[:3]
        if keep is not None:
            shape.keep_strides[:] = keep.expand(*q.shape[:3], k.shape[2]).stride()
        shape.scale = q.shape[-1] ** -0.5
        shape.cut, shape.dropout_scale, shape.seed = mask
        functions.call("attention", (q, k, v, keep, out), structures=(shape,))
        ctx.save_for_backward(q, k, v, keep)
        ctx.shape, ctx.functions = shape, functions
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keep = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        grads = _empty_heads_last(q, k, v)
        shape = type(ctx.shape).from_buffer_copy(ctx.shape)  # a copy: `ctx` may be used again
        shape.out_strides[:] = grad.stride()[:3]
        for name, x in zip(("grad_q", "grad_k", "grad_v"), grads, strict=True):
            getattr(shape, f"{name}_strides")[:] = x.stride()[:3]
        ctx.functions.call("attention_grad", (grad, q, k, v, keep, *grads), structures=(shape,))
        return *grads, None, None, None


def chunk_last(x: Tensor, count: int) -> Sequence[Tensor]:
    """Return `x.chunk(count, -1)`; its backward pass needs no copy after `attention`.

    The gradients of q, k and v that `attention` computes are views of one tensor already; the
    gradient of `x` is that tensor, where `torch.chunk` would concatenate copies.
    """
    if not torch.is_grad_enabled() or functions_for(x) is None:
        return x.chunk(count, -1)
    result: tuple[Tensor, ...] = _ChunkFunction.apply(x, count)  # type: ignore[no-untyped-call]
    return result


class _ChunkFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return x.chunk(count, -1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        first, width = grads[0], grads[0].shape[-1]
        views = [(_layout(grad), grad.storage_offset()) for grad in grads]
        layout, start = views[0]
        if views == [(layout, start + i * width) for i in range(len(grads))]:
            whole = first.as_strided((*first.shape[:-1], len(grads) * width), first.stride())
            if whole.is_contiguous():
                return whole, None
        return torch.cat(grads, -1), None


def paged_attention(q_ND: Tensor, cache_RX: Tensor, slots_NT: Tensor, num_heads: int) -> Tensor:
    """Return the attention [N, D] of one query per row to the cache rows in its slots.

    Equals `attention` of each query to the keys and values gathered from the cache.

    Args:
        q_ND: queries, all heads side by side.
        cache_RX: the keys and values of R positions, X = 2 * D, in the dtype of the queries or in
            bfloat16.
        slots_NT: row numbers of the cache; -1 is padding. Each query has at least one real slot.
    """
    num_rows, d_model = q_ND.shape
    cache_shape, slots_shape = cache_RX.shape, slots_NT.shape
    functions = functions_for(q_ND)
    if (
        functions is not None
        and not (torch.is_grad_enabled() and (q_ND.requires_grad or cache_RX.requires_grad))
        and len(cache_shape) == len(slots_shape) == 2
        and cache_shape[1] == 2 * d_model
        and slots_shape[0] == num_rows
        and slots_NT.dtype is torch.int64
        and has_cpu_memory(slots_NT)
        and is_readable_cache(cache_RX, q_ND.dtype)
        and num_heads > 0
        and d_model % num_heads == 0
    ):
        q_ND = q_ND if q_ND.stride(1) == 1 else q_ND.contiguous()
        slots_NT = slots_NT if slots_NT.stride(1) == 1 else slots_NT.contiguous()
        out_ND = q_ND.new_empty((num_rows, d_model))
        head_size = d_model // num_heads
        sizes = (num_rows, slots_shape[1], num_heads, head_size, cache_shape[0])
        strides = (q_ND.stride(0), slots_NT.stride(0))
        in_bf16 = cache_RX.dtype is torch.bfloat16
        tensors = (q_ND, cache_RX, slots_NT, out_ND)
        functions.call("paged_attention", tensors, *sizes, *strides, in_bf16, head_size**-0.5)
        return out_ND
    # padding reads a row that its query attends to: a weight of 0 does not mask NaN of another row
    read_NT = torch.where(slots_NT < 0, slots_NT.amax(1, keepdim=True), slots_NT)
    rows_NTX = cache_RX[read_NT].to(q_ND.dtype)
    k_NHTK, v_NHTK = (
        x.view(*x.shape[:2], num_heads, -1).transpose(1, 2) for x in rows_NTX.chunk(2, -1)
    )
    q_NH1K, keep = q_ND.view(num_rows, num_heads, 1, -1), (slots_NT >= 0)[:, None, None, :]
    return attention(q_NH1K, k_NHTK, v_NHTK, keep).flatten(1)


def is_readable_cache(cache_RX: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether the compiled functions for tensors of `dtype` can read a cache [R, X]."""
    is_known = cache_RX.dtype in (dtype, torch.bfloat16)
    return is_known and has_cpu_memory(cache_RX) and cache_RX.is_contiguous()


def _empty_heads_last(*tensors: Tensor) -> list[Tensor]:
    """Return an uninitialised [B, H, T, K] for each tensor, stored as [B, T, H, K].

    Consecutive inputs that are chunks of one tensor get chunks of one new tensor.
    """
    empty: list[Tensor] = []
    for _, group in itertools.groupby(tensors, _layout):
        views = list(group)
        b, h, t, k = views[0].shape
        whole = views[0].new_empty((b, t, len(views), h, k))
        empty += [whole[:, :, i].transpose(1, 2) for i in range(len(views))]
    return empty


def _layout(x: Tensor) -> tuple[Any, ...]:
    """Return (storage, shape, strides), which are equal for the chunks of one tensor."""
    return x.untyped_storage().data_ptr(), x.shape, x.stride()
