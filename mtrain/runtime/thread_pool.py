"""A thread pool for the micro-batches of an update, each thread on one core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


class ThreadPool:
    """A pool of threads that each run PyTorch operations on one core.

    It has `torch.get_num_threads()` threads. Small matrix products gain little from several cores,
    so it is faster to split the batch.
    """

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.count, "update") if self.count > 1 else None

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """Return the results of `function`, in the order of `tasks`."""
        if self._pool is None or len(tasks) == 1:
            return [function(task) for task in tasks]
        torch.set_num_threads(1)  # each thread of the pool on one core
        try:
            return list(self._pool.map(function, tasks))
        finally:
            torch.set_num_threads(self.count)

    def close(self) -> None:
        """Shut the pool down."""
        if self._pool is not None:
            self._pool.shutdown()
