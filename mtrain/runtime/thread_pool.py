"""A thread pool for the micro-batches of an update, each thread on one core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


class ThreadPool:
    """A pool of threads that each run PyTorch operations on one core.

    Small matrix products gain little from several cores; splitting the batch always does.

    Args:
        count: number of threads; PyTorch's if None.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.count, "update") if self.count > 1 else None
        self._is_cancelled = Event()

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """Return the results of `function`, in the order of `tasks`."""
        if self._pool is None or len(tasks) == 1:
            return [function(task) for task in tasks]
        with self._one_core_each():
            try:
                return list(self._pool.map(function, tasks))
            except BaseException:  # Ctrl-C among them
                self._is_cancelled.set()
                raise

    def stay(self) -> None:
        """Raise CancelledError in a long task whose `map` has ended."""
        if self._is_cancelled.is_set():
            raise CancelledError

    def close(self) -> None:
        """Shut the pool down."""
        if self._pool is not None:
            self._pool.shutdown()

    @contextmanager
    def _one_core_each(self) -> Iterator[None]:
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self.count)
