"""What came out of updates, read from a device some updates later.

A GPU works behind the loop that tells it what to do, and whoever asks for one of its numbers waits
until it has caught up. So the loop goes on, and reads what came out of an update when it has given
out later ones. Knows neither models nor batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Outcome(NamedTuple):
    """An update, and numbers that came out of it."""

    step: int
    num_tokens: int
    lr: float
    numbers: list[float]


class _Unread(NamedTuple):
    """The same while its numbers are under way."""

    outcome: Outcome
    numbers: Tensor
    arrival: torch.cuda.Event | None


class Outcomes:
    """Updates whose numbers nobody has read yet, the oldest first."""

    def __init__(self) -> None:
        self._unread: deque[_Unread] = deque()

    def add(self, step: int, num_tokens: int, lr: float, numbers: Tensor) -> None:
        """Note an update; its numbers [n] may still be in the making."""
        arrival = None
        if numbers.device.type == "cuda":
            stream = torch.cuda.current_stream(numbers.device)  # which need not be the first GPU's
            numbers = numbers.to("cpu", non_blocking=True)
            arrival = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrival.record(stream)
        self._unread.append(_Unread(Outcome(step, num_tokens, lr, []), numbers, arrival))

    def read(self, behind: int) -> Iterator[Outcome]:
        """Yield what came out of all updates but the last `behind`, once, in their order."""
        while len(self._unread) > behind:
            outcome, numbers, arrival = self._unread.popleft()
            if arrival is not None:
                arrival.synchronize()
            yield outcome._replace(numbers=numbers.tolist())
