"""The ways in which an operation computes, plain or compiled, held to the same in float64."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fork_server import printed_by
from torch import Tensor

from mtrain.ops.dropout import Dropout, DropoutMask
from mtrain.ops.layer_norm import LayerNorm

SAME = {"rtol": 1e-10, "atol": 1e-12}
SHORT = torch.bfloat16
LONG = {torch.float64: torch.float64, torch.float32: torch.float32, SHORT: torch.float32}
OF_EACH = {torch.float64: 1e-10, torch.float32: 2e-6, SHORT: 2.0**-8}  # one rounding
OF_LARGEST = {torch.float64: 1e-10, torch.float32: 2e-6, SHORT: 2e-6}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same numbers in every type, but for their rounding."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


class Way(NamedTuple):
    """One of the ways in which a kernel computes."""

    is_compiled: bool
    dtype: torch.dtype
    multiplies: bool = False  # products are compiled, too

    def __str__(self) -> str:
        kind = "plain" if not self.is_compiled else "multiplied" if self.multiplies else "compiled"
        return f"{kind}-{str(self.dtype)[6:]}"

    @property
    def roundings(self) -> int:
        """How often a result is rounded where the plain formula takes several operations."""
        return 8 if self.dtype is SHORT and not self.is_compiled else 1

    def assert_near(
        self, found: Tensor, exact: Tensor, roundings: int = 1, floor: float = 1e-11
    ) -> None:
        """Hold a tensor to the same in float64.

        What is computed in one go is rounded once in bfloat16: each element is right but for that.
        After several `roundings` it is right but for so many of the largest element.
        """
        assert found.shape == exact.shape
        size = float(exact.detach().abs().max()) if exact.numel() else 0.0
        of_largest = OF_LARGEST if roundings == 1 else OF_EACH
        bound = {"rtol": OF_EACH[self.dtype], "atol": roundings * of_largest[self.dtype] * size}
        bound["atol"] += floor
        torch.testing.assert_close(found.double(), exact.detach(), **bound)


PLAIN = [Way(False, dtype) for dtype in (torch.float64, torch.float32, SHORT)]
COMPILED = [Way(True, dtype) for dtype in (torch.float32, SHORT)]
MULTIPLIED = [Way(True, dtype, multiplies=True) for dtype in (torch.float32, SHORT)]
EACH_WAY = pytest.mark.parametrize("way", PLAIN + COMPILED, ids=str)
EACH_PRODUCT = pytest.mark.parametrize("way", PLAIN + COMPILED + MULTIPLIED, ids=str)
BOTH_PATHS = pytest.mark.parametrize("way", [PLAIN[1], COMPILED[0]], ids=str)


def grads_of(out: Tensor, upstream: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]


def exactly(tensors: list[Tensor]) -> list[Tensor]:
    """Return float64 leaves of the same values."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


DROPS = DropoutMask(round(0.3 * 2**16), 2**16 / (2**16 - round(0.3 * 2**16)), 0x9E3779B9)


def fixed(dropout: Dropout, drops: DropoutMask = DROPS) -> Dropout:
    """Let a dropout drop the same at every call."""
    dropout.draw = lambda: drops
    return dropout.train()


def share_of(shape: tuple[int, ...], drops: DropoutMask = DROPS) -> Tensor:
    """Return what dropout multiplies with: 0 or the scale."""
    return (fixed(Dropout(0.3), drops)(torch.ones(shape)) != 0).double() * drops.scale


def norm_of(width: int, dtype: torch.dtype = torch.float32) -> LayerNorm:
    norm = LayerNorm(width)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * normal(width, seed=11))
        norm.bias.copy_(0.3 * normal(width, seed=12))
    return norm.to(dtype)


def queries_keys_values(
    num_queries: int, num_keys: int, width: int, dtype: torch.dtype, batch: int = 2, heads: int = 3
) -> list[Tensor]:
    lengths = (num_queries, num_keys, num_keys)
    return [leaf(batch, heads, n, width, seed=i, dtype=dtype) for i, n in enumerate(lengths)]


def five_deviations(rate: float, count: int) -> float:
    return 5 * math.sqrt(rate * (1 - rate) / count)


MULTIPLYING = pytest.mark.parametrize("way", MULTIPLIED, ids=str)
MULTIPLYING_PAIRS = pytest.mark.parametrize("way", MULTIPLIED[1:], ids=str)


def peak() -> int:
    """Return the KiB of memory that this process has held at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def growth(main: Callable[[], None], *arguments: str) -> int:
    """Run a program in a process of its own, and return the KiB that it prints."""
    return int(printed_by(main, *arguments))


# a NaN that rounding as if it were a number makes 0, -0 or infinite; and one that it keeps
NANS = pytest.mark.parametrize("bits", [0xFFFFFFFF, 0x7FFFFFFF, 0x7F800001, 0x7FC00000], ids=hex)


def nan_of(bits: int) -> Tensor:
    """Return the NaN with these bits in float32."""
    return torch.tensor([bits]).to(torch.int32).view(torch.float32)[0]
