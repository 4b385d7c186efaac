"""Threads: one that reads ahead, and a pool for the micro-batches of an update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Task = TypeVar("Task")
Result = TypeVar("Result")


def read_ahead(items: Iterator[Item], count: int) -> Generator[Item]:
    """Yield `items` in order; a thread produces up to `count` of them ahead.

    Closing the generator ends the thread. An error of `items` is raised in the consumer, at the
    item that raised it.
    """
    end = object()
    pool = ThreadPoolExecutor(1, "read-ahead")
    try:
        waiting = deque(pool.submit(next, items, end) for _ in range(count))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]  # never `end`
    finally:
        pool.shutdown(cancel_futures=True)


class ThreadPool:
    """A pool of threads that each run PyTorch operations on one core.

    It has `torch.get_num_threads()` threads. Small matrix products gain little from several cores,
    so it is faster to split the batch.
    """

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.count, "update")  # starts threads when they are needed

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """Return the results of `function`, in the order of `tasks`."""
        if self.count == 1 or len(tasks) == 1:
            return [function(task) for task in tasks]
        torch.set_num_threads(1)  # each thread of the pool on one core
        try:
            return list(self._pool.map(function, tasks))
        finally:
            torch.set_num_threads(self.count)

    def close(self) -> None:
        """Shut the pool down."""
        self._pool.shutdown()
