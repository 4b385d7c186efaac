"""A thread that produces items before they are needed. Independent of PyTorch."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


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
