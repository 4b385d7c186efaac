"""Items that are made in a thread of their own, some of them ahead of whoever takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Iterator[Item], count: int) -> Generator[Item]:
    """Yield the same items in the same order, at most `count` of them made before they are wanted.

    To close it ends the thread. The first error that an item raises is raised where it is wanted.
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
