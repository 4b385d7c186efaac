"""Threads that share the work of one update. Knows neither models nor batches."""

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
    """As many threads as PyTorch was given, each computing on its own, on one core.

    Small products gain little from being split over cores; a batch can be split in any case.

    Args:
        count: fewer or more threads than that.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.count, "update") if self.count > 1 else None
        self._is_left = Event()

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """Return the function's results, in the order of the tasks."""
        if self._pool is None or len(tasks) == 1:
            return [function(task) for task in tasks]
        with self._one_core_each():
            try:
                return list(self._pool.map(function, tasks))
            except BaseException:  # Ctrl-C among them
                self._is_left.set()
                raise

    def stay(self) -> None:
        """End a task that is long, and asks now and then, once nobody waits for its result."""
        if self._is_left.is_set():
            raise CancelledError

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    @contextmanager
    def _one_core_each(self) -> Iterator[None]:
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self.count)
