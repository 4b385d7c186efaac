"""Measure how fast this machine multiplies matrices: `peers.ceiling THREADS` prints GFLOP/s."""

from __future__ import annotations

import json
import sys
import time

import torch

_REPEATS = 10
_SECONDS = 5.0  # after these no further product begins: some processors crawl in bfloat16


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    print(json.dumps({name: gflops(dtype) for name, dtype in dtypes.items()}))


def gflops(dtype: torch.dtype, device: str = "cpu", size: int = 2048) -> float:
    """Return the best of several products of two square matrices."""
    left, right = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    out = torch.empty_like(left)
    times: list[float] = []
    while len(times) <= _REPEATS and sum(times) < _SECONDS:
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - started)
    return round(2 * size**3 / min(times) / 1e9, 1)


if __name__ == "__main__":
    main()
