"""What a training did since it last logged: sums of losses and tokens, and the time they took."""

from __future__ import annotations

import time
from typing import NamedTuple

from mtrain.run.checkpoint import Progress


class Rates(NamedTuple):
    """Means over the tokens of a window, and its speed."""

    loss: float
    nll: float
    tokens_per_s: float


class Window:
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
