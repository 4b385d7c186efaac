"""Dropout whose mask follows from a seed, and the seeds of an update."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.ops.native import Functions, functions_for

_LEVELS = 1 << 16  # the rate is a multiple of 1 / _LEVELS


class DropoutMask(NamedTuple):
    """The elements that one call mask: those whose 16-bit hash of (seed, index) is below `cut`.

    Attributes:
        cut: the rate in units of 2^-16.
        scale: what the other elements are multiplied by, 1 / (1 - rate).
        seed: 32 bits.
    """

    cut: int
    scale: float
    seed: int


NO_DROPOUT = DropoutMask(0, 1.0, 0)


class Dropout(nn.Module):
    """`nn.Dropout` with 16 random bits per element; the rate is rounded to 2^-16.

    On a CPU it takes a fraction of the time of `nn.Dropout`, and the mask is a function of a seed,
    so that the backward pass computes it again.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"rate must be at least 0 and below 1, but is {rate} instead.")
        self.rate = rate

    def draw(self) -> DropoutMask:
        """Draw a seed, and return the mask of one call; `NO_DROPOUT` unless training."""
        if not self.training or self.rate == 0:
            return NO_DROPOUT
        cut = min(max(round(self.rate * _LEVELS), 1), _LEVELS - 1)
        return DropoutMask(cut, _LEVELS / (_LEVELS - cut), _next_seed())

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements of `x` with probability `rate` and scale the rest, while training."""
        if not self.training or self.rate == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        result: Tensor = _DropoutFunction.apply(  # type: ignore[no-untyped-call]
            x, self.draw(), functions_for(x)
        )
        return result


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: DropoutMask, functions: Functions | None) -> Tensor:
        ctx.mask, ctx.functions = mask, functions
        if functions is not None:
            return _apply_mask(x, mask, functions)
        rng = torch.Generator().manual_seed(mask.seed)
        random_int64 = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
        random_int64.random_(-(2**63), None, generator=rng)
        bits = random_int64.view(torch.int16)[: x.numel()].view(x.shape)
        keep = bits >= mask.cut - _LEVELS // 2
        ctx.save_for_backward(keep)
        return torch.ops.aten.native_dropout_backward(x, keep, mask.scale)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.functions is not None:
            return _apply_mask(grad, ctx.mask, ctx.functions), None, None
        (keep,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, keep, ctx.mask.scale), None, None


def _apply_mask(x: Tensor, mask: DropoutMask, functions: Functions) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    functions.call("dropout", (x, out), x.numel(), *mask)
    return out


class _ThreadRng(threading.local):
    rng: random.Random | None = None


_THREAD = _ThreadRng()


@contextlib.contextmanager
def dropout_seeds(seed: int | None) -> Iterator[None]:
    """Draw the seeds of this thread's dropout from `random.Random(seed)`.

    With None they are drawn from PyTorch's generator.
    """
    _THREAD.rng = None if seed is None else random.Random(seed)
    try:
        yield
    finally:
        _THREAD.rng = None


def _next_seed() -> int:
    if _THREAD.rng is not None:
        return _THREAD.rng.getrandbits(32)
    return int(torch.randint(2**32, ()))
