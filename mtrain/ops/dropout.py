"""Dropout whose mask is a function of a seed, and the seeds of an update."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.ops.native import Functions, differentiable_once, functions_for

_LEVELS = 1 << 16  # the rate is a multiple of 1 / _LEVELS


class DropoutMask(NamedTuple):
    """The mask of one call; it drops elements whose 16-bit hash of (seed, index) is below `cut`.

    Attributes:
        cut: the rate in units of 2^-16.
        scale: the factor of the other elements, 1 / (1 - rate).
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

    @property
    def is_active(self) -> bool:
        """Whether elements are dropped: while training, unless the rate is 0."""
        return self.training and self.rate > 0

    def draw(self) -> DropoutMask:
        """Draw a seed, and return the mask of one call; `NO_DROPOUT` unless training."""
        if not self.is_active:
            return NO_DROPOUT
        cut = min(max(round(self.rate * _LEVELS), 1), _LEVELS - 1)
        return DropoutMask(cut, _LEVELS / (_LEVELS - cut), _next_seed(self))

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements of `x` with probability `rate` and scale the rest, while training."""
        if not self.is_active:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        # compiled also where gradients are disabled: the first pass of a checkpoint must draw the
        # mask that its recomputation draws
        functions = functions_for(x, any_threads=True)
        result: Tensor = _DropoutFunction.apply(  # type: ignore[no-untyped-call]
            x, self.draw(), functions
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
    @differentiable_once
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


class _ThreadSeeds(threading.local):
    """A thread's generator of seeds, and the seed that each module has drawn from it.

    Attributes:
        rng: None is PyTorch's generator.
        seed_of: the seeds drawn since the last outermost `dropout_seeds` began; None for a module
            that was called several times.
    """

    def __init__(self) -> None:
        self.rng: random.Random | None = None
        self.seed_of: WeakKeyDictionary[Dropout, int | None] = WeakKeyDictionary()


_THREAD = _ThreadSeeds()


@contextlib.contextmanager
def dropout_seeds(seed: int | None) -> Iterator[None]:
    """Draw the seeds of this thread's dropout from `random.Random(seed)`.

    With None they are drawn from PyTorch's generator. A module that is called again in the backward
    pass, because `torch.utils.checkpoint` recomputes it, takes the seed that it drew before.
    """
    previous_rng = _THREAD.rng
    if previous_rng is None:
        _THREAD.seed_of.clear()
    _THREAD.rng = None if seed is None else random.Random(seed)
    try:
        yield
    finally:
        _THREAD.rng = previous_rng


def random_keep(shape: Sequence[int], rate: float, device: torch.device) -> Tensor:
    """Return a mask that is False with probability `rate`, drawn from this thread's seeds.

    On a GPU it is drawn from the GPU's generator, as PyTorch's dropout is.
    """
    if device.type != "cpu":
        return torch.rand(*shape, device=device) >= rate
    seed = int(torch.randint(2**32, ())) if _THREAD.rng is None else _THREAD.rng.getrandbits(32)
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) >= rate


def _next_seed(module: Dropout) -> int:
    """Return the seed of the next call of `module`.

    Raises:
        RuntimeError: if a backward pass recomputes one of several calls: its seed is ambiguous.
    """
    rng, seed_of = _THREAD.rng, _THREAD.seed_of
    if torch._C._current_graph_task_id() >= 0:  # in a backward pass
        if module in seed_of:
            seed = seed_of[module]
            if seed is None:
                raise RuntimeError(
                    "dropout that was called several times under `dropout_seeds` must not be "
                    "recomputed, but is; give each call a module of its own."
                )
            return seed
        rng = None  # a checkpoint has restored PyTorch's generator
    if rng is None:
        seed_of.pop(module, None)
        return int(torch.randint(2**32, ()))
    seed = rng.getrandbits(32)
    seed_of[module] = None if module in seed_of else seed
    return seed
