"""The few operations that make training fast, each equal to a plain formula of PyTorch.

They know tensors and nothing of the model. A test checks each against the formula in float64.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SHORT = 128  # up to this many keys, plain batched products beat the fused kernel on a CPU
_ROUND_ROWS = 128  # products have a multiple of this many rows
_CHUNK_TOKENS = 512  # tokens whose logits the loss holds at once


class Linear(nn.Linear):
    """`nn.Linear` whose matrix products can run in a shorter type than its weights."""

    matmul_dtype: torch.dtype | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias` in the type of `input`."""
        if self.matmul_dtype is None:
            return F.linear(input, self.weight, self.bias)
        result: Tensor = _ShortLinear.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.matmul_dtype
        )
        return result


class _ShortLinear(torch.autograd.Function):
    """A linear map with products in `dtype`, sums in float32, and everything else as it came."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows, short_weight = _shorten(flat, dtype), weight.to(dtype)
        ctx.save_for_backward(rows, short_weight)
        ctx.has_bias, ctx.shape = bias is not None, x.shape
        out = torch.mm(rows, short_weight.t())[: len(flat)].to(x.dtype)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        rows, short_weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        short = _shorten(flat, rows.dtype)
        grad_x = torch.mm(short, short_weight)[: len(flat)].to(grad.dtype).view(ctx.shape)
        grad_weight = torch.mm(short.t(), rows).to(grad.dtype)
        return grad_x, grad_weight, flat.sum(0) if ctx.has_bias else None, None


def _shorten(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy rows into `dtype`, filled up with zeros to a multiple of `_ROUND_ROWS`.

    A CPU's library compiles a product anew for each number of rows, and batches have many.
    """
    if rows.dtype == dtype:
        return rows
    num_rows = len(rows)
    filled = rows.new_empty((-(-num_rows // _ROUND_ROWS) * _ROUND_ROWS, rows.shape[1]), dtype=dtype)
    filled[:num_rows] = rows
    filled[num_rows:] = 0
    return filled


def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """Return softmax(q k^T / sqrt(d_k)) v over the kept keys (section 3.2.1).

    Args:
        q: [..., T, K].
        k, v: [..., S, K].
        keep: bool, broadcastable to [..., T, S]; True takes part. A row that keeps nothing
            gives the mean of all values, never NaN.
    """
    bias = None
    if keep is not None:
        bias = torch.zeros(keep.shape, dtype=q.dtype, device=q.device)
        bias.masked_fill_(~keep, torch.finfo(q.dtype).min)
    if q.device.type != "cpu" or k.shape[-2] > _SHORT:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    return torch.matmul(scores.softmax(-1), v)


class Dropout(nn.Module):
    """`nn.Dropout` from 16 random bits an element: on a CPU a fraction of the time."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Zero a share `rate` of `x` and scale the rest, while training."""
        if not self.training or self.rate == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        result: Tensor = _Dropout.apply(x, self.rate)  # type: ignore[no-untyped-call]
        return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        levels = 1 << 16
        cut = min(max(round(rate * levels), 1), levels - 1)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        bits = words.view(torch.int16)[: x.numel()].view(x.shape)
        keep = bits >= cut - levels // 2
        ctx.scale = levels / (levels - cut)
        ctx.save_for_backward(keep)
        return torch.ops.aten.native_dropout_backward(x, keep, ctx.scale)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, keep, ctx.scale), None


class ProjectedCrossEntropy(torch.autograd.Function):
    """Output projection and label-smoothed cross-entropy, a chunk of tokens at a time.

    The gradient is made in the forward pass, so that the logits of a whole batch never exist.
    `apply(states_ND, weight_VD, targets_N, smoothing, dtype)` returns (loss, nll), two sums over
    the N tokens; only the first carries a gradient.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        smoothing: float,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        short_states = _shorten(states, dtype or states.dtype)
        short_weight = weight.to(dtype or weight.dtype)
        with_grad = any(ctx.needs_input_grad)
        grad_states = torch.empty_like(states) if with_grad else None
        grad_weight = torch.zeros_like(weight) if with_grad else None
        loss, nll = states.new_zeros(()), states.new_zeros(())
        for start in range(0, len(states), _CHUNK_TOKENS):
            part = slice(start, start + _CHUNK_TOKENS)
            products = torch.mm(short_states[part], short_weight.t())
            logits = products[: len(states) - start].to(states.dtype)
            wanted = targets[part, None]
            top = logits.amax(-1, keepdim=True)
            sum_logits = logits.sum(-1, keepdim=True)
            wanted_logits = logits.gather(-1, wanted)
            probs = logits.softmax(-1)
            log_total = top - probs.amax(-1, keepdim=True).log()
            part_nll = (log_total - wanted_logits).sum()
            uniform = (log_total - sum_logits / len(weight)).sum()
            nll += part_nll
            loss += (1 - smoothing) * part_nll + smoothing * uniform
            if grad_states is not None and grad_weight is not None:
                probs -= smoothing / len(weight)
                probs.scatter_add_(-1, wanted, torch.full_like(wanted_logits, smoothing - 1))
                short = _shorten(probs, short_weight.dtype)[: len(products)]
                grad_states[part] = torch.mm(short, short_weight)[: len(probs)]
                grad_weight += torch.mm(short.t(), short_states[part])
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * grad, grad_weight * grad, None, None, None


def matmul_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the type of matrix products for `precision`; None is the weights' own type."""
    if precision == "bfloat16":
        return torch.bfloat16
    if precision == "float32":
        return None
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
    fast = device.type == "cpu" and _cpu_multiplies_bfloat16()
    return torch.bfloat16 if fast else None


def _cpu_multiplies_bfloat16() -> bool:
    cpu = torch.cpu
    checks = [
        getattr(cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    return any(check() for check in checks if check is not None)


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
