"""Time each compiled operation against the plain formula beside it, by turns, on one thread.

    python benchmarks/operation_speed.py [--repeats 41]

Forward and backward, at the sizes of a small batch: 512 tokens, width 128, heads of 32, a
vocabulary of 8,000. Prints the median over the repeats of plain / compiled; a row is above 1 where
the C is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from machine import commit, describe_machine

from mtrain.ops import native
from mtrain.ops.attention import attention
from mtrain.ops.cross_entropy import ProjectedCrossEntropy
from mtrain.ops.dropout import Dropout
from mtrain.ops.layer_norm import LayerNorm, add_norm
from mtrain.ops.linear import Linear, relu_ffn
from mtrain.runtime.device import keep_freed_memory

Case = Callable[[], object]
Forward = Callable[[], torch.Tensor]


def cases(dtype: torch.dtype) -> dict[str, Case]:
    """Return each operation with its gradients, in a type."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    def differentiated(function: Forward, inputs: list[torch.Tensor]) -> Case:
        upstream = torch.randn_like(function())
        return lambda: torch.autograd.grad(function(), inputs, upstream)

    x, branch = random(512, 128), random(512, 128)
    linear, inner, outer = Linear(128, 384), Linear(128, 512), Linear(512, 128)
    norm, dropout = LayerNorm(128), Dropout(0.1).train()
    q, k, v = (random(32, 4, 16, 32) for _ in range(3))
    keep = torch.rand(32, 1, 1, 16) > 0.2
    weight, targets = torch.randn(8000, 128).mul_(0.05).requires_grad_(), torch.arange(512)
    return {
        "linear": differentiated(lambda: linear(x), [x, *linear.parameters()]),
        "feed-forward": differentiated(
            lambda: relu_ffn(x, inner, outer), [x, *inner.parameters(), *outer.parameters()]
        ),
        "attention": differentiated(lambda: attention(q, k, v, keep, dropout), [q, k, v]),
        "add, dropout, norm": differentiated(
            lambda: add_norm(x, branch, dropout, norm), [x, branch, *norm.parameters()]
        ),
        "dropout": differentiated(lambda: dropout(x), [x]),
        "loss": lambda: torch.autograd.grad(
            ProjectedCrossEntropy.apply(x, weight, targets, 0.1)[0],  # type: ignore[no-untyped-call]
            [x, weight],
        ),
    }


def seconds(case: Case) -> float:
    """Return the least time of three calls, after one that is not counted."""
    case()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        case()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=41)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does
    compiled = native.compiled
    print(f"{describe_machine()}, {commit()}, kernels {native.describe()}, median of {repeats}")
    for dtype in (torch.float32, torch.bfloat16):
        for name, case in cases(dtype).items():
            ratios = []
            for _ in range(repeats):
                native.compiled = lambda: None
                plain = seconds(case)
                native.compiled = compiled
                ratios.append(plain / seconds(case))
            print(f"{str(dtype)[6:]:9} {name:20} {statistics.median(ratios):5.2f}")


if __name__ == "__main__":
    main()
