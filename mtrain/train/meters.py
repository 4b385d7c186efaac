"""What a training did since it last logged: sums of losses and tokens, and the time they took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.run.checkpoint import Progress


class Rates(NamedTuple):
    """Means over the tokens of a window, and its speed."""

    loss: float
    nll: float
    tokens_per_s: float


class RunningMeter:
    """What happened since the last logged step."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.num_tokens = 0
        self.num_restored_tokens = 0  # they cost no time of this process
        self.loss = self.nll = 0.0
        self.lr = self.grad_norm = 0.0  # of the last update

    def add(self, loss: float, nll: float, num_tokens: int) -> None:
        """Count one update, by its sums."""
        self.loss += loss
        self.nll += nll
        self.num_tokens += num_tokens

    def note(self, progress: Progress) -> None:
        """Write the sums into what a checkpoint remembers."""
        progress.unlogged_loss, progress.unlogged_nll = self.loss, self.nll
        progress.unlogged_tokens = self.num_tokens

    def restore(self, progress: Progress) -> None:
        """Go on from the sums that a checkpoint remembers."""
        self.loss, self.nll = progress.unlogged_loss, progress.unlogged_nll
        self.num_tokens = self.num_restored_tokens = progress.unlogged_tokens

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on training."""
        self.started += seconds

    def rates(self) -> Rates:
        """Return loss and nll per token, and target tokens per second."""
        elapsed_s = max(time.monotonic() - self.started, 1e-9)
        count, new = self.num_tokens, self.num_tokens - self.num_restored_tokens
        return Rates(self.loss / count, self.nll / count, new / elapsed_s)


class UpdateScalars(NamedTuple):
    """An update, and numbers that came out of it."""

    step: int
    num_tokens: int
    lr: float
    numbers: list[float]


class _UnreadScalars(NamedTuple):
    """The same while its numbers are under way."""

    outcome: UpdateScalars
    numbers: Tensor
    arrival: torch.cuda.Event | None


class AsyncScalars:
    """Updates whose numbers nobody has read yet, the oldest first."""

    def __init__(self) -> None:
        self._unread: deque[_UnreadScalars] = deque()

    def add(self, step: int, num_tokens: int, lr: float, numbers: Tensor) -> None:
        """Note an update; its numbers [n] may still be in the making."""
        arrival = None
        if numbers.device.type == "cuda":
            stream = torch.cuda.current_stream(numbers.device)  # which need not be the first GPU's
            numbers = numbers.to("cpu", non_blocking=True)
            arrival = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrival.record(stream)
        self._unread.append(
            _UnreadScalars(UpdateScalars(step, num_tokens, lr, []), numbers, arrival)
        )

    def read(self, behind: int) -> Iterator[UpdateScalars]:
        """Yield what came out of all updates but the last `behind`, once, in their order."""
        while len(self._unread) > behind:
            outcome, numbers, arrival = self._unread.popleft()
            if arrival is not None:
                arrival.synchronize()
            yield outcome._replace(numbers=numbers.tolist())
