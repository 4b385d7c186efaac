"""Scalars of updates: copied asynchronously from a GPU, and summed between log lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class RunningMeter:
    """Sums of losses, tokens and seconds since the last log line."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.num_tokens = 0
        self.num_restored_tokens = 0  # of num_tokens, those counted before resuming
        self.loss = self.nll = 0.0
        self.lr = self.grad_norm = 0.0  # of the last update

    def add(self, loss: float, nll: float, num_tokens: int) -> None:
        """Add the loss sums of one update."""
        self.loss += loss
        self.nll += nll
        self.num_tokens += num_tokens

    def restore(self, loss: float, nll: float, num_tokens: int) -> None:
        """Restore the sums of a checkpoint."""
        self.loss, self.nll = loss, nll
        self.num_tokens = self.num_restored_tokens = num_tokens

    def pause(self, seconds: float) -> None:
        """Exclude seconds that were not spent on training."""
        self.started += seconds

    def rates(self) -> tuple[float, float, float]:
        """Return loss and nll per target token, and target tokens per second."""
        elapsed_s = max(time.monotonic() - self.started, 1e-9)
        num_new = self.num_tokens - self.num_restored_tokens
        return self.loss / self.num_tokens, self.nll / self.num_tokens, num_new / elapsed_s


class UpdateScalars(NamedTuple):
    """An update and the scalars that it computed on the device."""

    step: int
    num_tokens: int
    lr: float
    values: list[float]


class AsyncScalars:
    """A queue of updates whose scalars are being copied from the device, oldest first."""

    def __init__(self) -> None:
        self.queue: deque[tuple[UpdateScalars, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, step: int, num_tokens: int, lr: float, values: Tensor) -> None:
        """Enqueue an update, and start an asynchronous copy of its values [n] to the CPU."""
        copied = None
        if values.device.type == "cuda":
            stream = torch.cuda.current_stream(values.device)  # may not be the current device
            values = values.to("cpu", non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(stream)
        self.queue.append((UpdateScalars(step, num_tokens, lr, []), values, copied))

    def read(self, num_pending: int) -> Iterator[UpdateScalars]:
        """Wait for all updates but the last `num_pending`, and yield each once, in order."""
        while len(self.queue) > num_pending:
            update, values, copied = self.queue.popleft()
            if copied is not None:
                copied.synchronize()
            yield update._replace(values=values.tolist())
