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

_LEVELS = 1 << 16  # of a dropout rate


class DropoutMask(NamedTuple):
    """What one call of dropout drops: 16 bits of a hash of (seed, place) below `cut`."""

    cut: int
    scale: float
    seed: int


NO_DROPOUT = DropoutMask(0, 1.0, 0)


class Dropout(nn.Module):
    """`nn.Dropout` from 16 random bits an element: on a CPU a fraction of the time."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def draw(self) -> DropoutMask:
        """Decide what the next call drops: nothing, unless training."""
        if not self.training or self.rate == 0:
            return NO_DROPOUT
        cut = min(max(round(self.rate * _LEVELS), 1), _LEVELS - 1)
        return DropoutMask(cut, _LEVELS / (_LEVELS - cut), _next_seed())

    def forward(self, x: Tensor) -> Tensor:
        """Zero a share `rate` of `x` and scale the rest, while training."""
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
    def forward(ctx: Any, x: Tensor, drops: DropoutMask, functions: Functions | None) -> Tensor:
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


def _drop(x: Tensor, drops: DropoutMask, functions: Functions) -> Tensor:
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
