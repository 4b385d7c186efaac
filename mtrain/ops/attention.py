"""The few operations that make training fast, each equal to a plain formula of PyTorch.

They know tensors and nothing of the model. On a CPU the work between two matrix products runs in
compiled functions (`native`), one pass over memory each; everywhere else, and without a compiler,
in the plain formula that stands beside them. A test checks each against the formula in float64.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import itertools
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.ops import native
from mtrain.ops.native import Functions, functions_for

_SHORT = 128  # up to this many keys, plain batched products beat the fused kernel on a CPU
_MOST_KEYS = {torch.float32: 128, torch.bfloat16: 512}  # that compiled attention wins with
_LEVELS = 1 << 16  # of a dropout rate


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that computes in the type of its weights, and answers in that of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` normalised over its last dimension."""
        result: Tensor = super().forward(input.to(self.weight.dtype)).to(input.dtype)
        return result


def add_norm(x: Tensor, branch: Tensor, dropout: Dropout, norm: LayerNorm) -> Tensor:
    """Return LayerNorm(x + Dropout(branch))."""
    functions = functions_for(x, branch)
    if functions is None or norm.weight.dtype != torch.float32:
        plain: Tensor = norm(x + dropout(branch))
        return plain
    return _run(_AddNorm, x, branch, norm.weight, norm.bias, norm.eps, dropout.draw(), functions)


class _Forgetful:
    """The context of a forward pass that no backward pass follows."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""


def _run(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Run a function; where no gradient is wanted, without what keeps it."""
    result: Tensor
    if torch.is_grad_enabled():
        result = function.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        result = function.forward(_Forgetful(), *arguments)
    return result


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        gain: Tensor,
        bias: Tensor,
        eps: float,
        drops: Drops,
        functions: Functions,
    ) -> Tensor:
        x, branch = x.contiguous(), branch.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        out, mean, rstd = torch.empty_like(x), gain.new_empty(rows), gain.new_empty(rows)
        tensors = (x, branch, gain, bias, out, mean, rstd)
        functions.call("add_norm", tensors, rows, width, eps, *drops)
        ctx.save_for_backward(x, branch, gain, mean, rstd)
        ctx.drops, ctx.functions = drops, functions
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, branch, gain, mean, rstd = ctx.saved_tensors
        grad_x, grad_branch = torch.empty_like(x), torch.empty_like(x)
        grad_gain, grad_bias = torch.zeros_like(gain), torch.zeros_like(gain)
        grads = (grad_x, grad_branch, grad_gain, grad_bias)
        tensors = (grad.contiguous(), x, branch, gain, mean, rstd, *grads)
        ctx.functions.call("add_norm_grad", tensors, len(mean), len(gain), *ctx.drops)
        return *grads, None, None, None


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
        drops = dropout.draw() if dropout is not None else _NO_DROPS
        return _run(_Attention, q, k, v, keep, drops, functions)
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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        drops: Drops,
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
    result: tuple[Tensor, ...] = _Parts.apply(x, count)  # type: ignore[no-untyped-call]
    return result


class _Parts(torch.autograd.Function):
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


def attend(q_ND: Tensor, store_RX: Tensor, places_NT: Tensor, num_heads: int) -> Tensor:
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
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, out: Tensor, drops: Drops
) -> native.AttentionShape:
    shape = native.AttentionShape(*q.shape[:3], *k.shape[2:])
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        getattr(shape, f"{name}_strides")[:] = x.stride()[:3]
    if keep is not None:
        shape.keep_strides[:] = keep.expand(*q.shape[:3], k.shape[2]).stride()
    shape.scale = q.shape[-1] ** -0.5
    shape.cut, shape.dropout_scale, shape.seed = drops
    return shape


class Drops(NamedTuple):
    """What one call of dropout drops: 16 bits of a hash of (seed, place) below `cut`."""

    cut: int
    scale: float
    seed: int


_NO_DROPS = Drops(0, 1.0, 0)


class Dropout(nn.Module):
    """`nn.Dropout` from 16 random bits an element: on a CPU a fraction of the time."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def draw(self) -> Drops:
        """Decide what the next call drops: nothing, unless training."""
        if not self.training or self.rate == 0:
            return _NO_DROPS
        cut = min(max(round(self.rate * _LEVELS), 1), _LEVELS - 1)
        return Drops(cut, _LEVELS / (_LEVELS - cut), _next_seed())

    def forward(self, x: Tensor) -> Tensor:
        """Zero a share `rate` of `x` and scale the rest, while training."""
        if not self.training or self.rate == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        result: Tensor = _Dropout.apply(  # type: ignore[no-untyped-call]
            x, self.draw(), functions_for(x)
        )
        return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, drops: Drops, functions: Functions | None) -> Tensor:
        ctx.drops, ctx.functions = drops, functions
        if functions is not None:
            return _drop(x, drops, functions)
        rng = torch.Generator().manual_seed(drops.seed)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
        words.random_(-(2**63), None, generator=rng)
        bits = words.view(torch.int16)[: x.numel()].view(x.shape)
        keep = bits >= drops.cut - _LEVELS // 2
        ctx.save_for_backward(keep)
        return torch.ops.aten.native_dropout_backward(x, keep, drops.scale)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.functions is not None:
            return _drop(grad, ctx.drops, ctx.functions), None, None
        (keep,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, keep, ctx.drops.scale), None, None


def _drop(x: Tensor, drops: Drops, functions: Functions) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    functions.call("dropout", (x, out), x.numel(), *drops)
    return out


class _Seeds(threading.local):
    source: random.Random | None = None


_SEEDS = _Seeds()


@contextlib.contextmanager
def dropout_seeds(seed: int | None) -> Iterator[None]:
    """Let all dropout of this thread follow from `seed`, whatever other threads draw.

    With None it follows from PyTorch's own generator.
    """
    _SEEDS.source = None if seed is None else random.Random(seed)
    try:
        yield
    finally:
        _SEEDS.source = None


def _next_seed() -> int:
    if _SEEDS.source is not None:
        return _SEEDS.source.getrandbits(32)
    return int(torch.randint(2**32, ()))


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the type of a model's states and products for `precision`."""
    if precision == "bfloat16":
        return torch.bfloat16
    if precision == "float16":
        return torch.float16
    if precision == "float32":
        return torch.float32
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bfloat16 else torch.float32
    fast = device.type == "cpu" and native.processor_has("avx512_bf16", "amx_tile")
    return torch.bfloat16 if fast else torch.float32


def avoid_cudnn_attention() -> None:
    """Keep a GPU from the attention that makes a plan for each shape: batches have thousands.

    PyTorch prefers it on some GPUs, and a plan takes up to a second.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks, so that no step faults its memory in again."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(ctypes.util.find_library("c")).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 256 << 20)
