"""PyTorch's threads: a pool for the micro-batches of an update, and one thread for each core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")
NUM_THREADS_LOCK = threading.Lock()  # held while threads start


def num_threads() -> int:
    """Return PyTorch's number of threads; a new thread must call this before it uses PyTorch.

    PyTorch gives a new thread the number that was set last; while a worker starts, that is 1.
    """
    with NUM_THREADS_LOCK:
        return torch.get_num_threads()


def map_on_cores(function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """Return the results of `function`, in the order of `tasks`; each task runs on one core.

    Unless PyTorch has one thread, the tasks run in new threads. Any number of threads may call it.
    """
    count = num_threads()
    if count == 1 or not tasks:
        return [function(task) for task in tasks]
    num_workers = min(count, len(tasks))
    are_started = threading.Barrier(num_workers + 1)

    def use_one_core() -> None:
        torch.get_num_threads()  # the first call in a thread takes over the number set last
        torch.set_num_threads(1)
        with suppress(threading.BrokenBarrierError):
            are_started.wait()

    with ThreadPoolExecutor(num_workers, "core", use_one_core) as pool:
        try:
            with NUM_THREADS_LOCK:
                try:
                    results = pool.map(function, tasks)
                    are_started.wait()
                except BaseException:  # a signal, or no thread can start
                    pool.shutdown(wait=False, cancel_futures=True)
                    are_started.abort()
                    pool.shutdown()
                    raise
                finally:
                    torch.set_num_threads(count)
            return list(results)
        except BaseException:  # without waiting tasks, the pool ends soon
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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
