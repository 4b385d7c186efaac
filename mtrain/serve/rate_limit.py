"""Limit the requests of each client per minute."""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict

_MAX_CLIENTS = 10_000  # with a bucket; the least recent one is dropped


class RateLimit:
    """A token bucket for each client, which holds the requests of a minute.

    Args:
        per_minute: requests; 0 is no limit.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def seconds_to_wait(self, client: str) -> int:
        """Count a request of a client; return 0 if it is allowed, else the seconds to wait."""
        if not self._per_minute:
            return 0
        # a proxy's header may name a client of any length; two long API keys may begin alike
        key = hashlib.blake2b(client.encode("utf-8", "replace"), digest_size=16).digest()
        now, rate = time.monotonic(), self._per_minute / 60
        tokens, last_s = self._buckets.pop(key, (float(self._per_minute), now))
        tokens = min(tokens + (now - last_s) * rate, float(self._per_minute))
        is_allowed = tokens >= 1
        self._buckets[key] = (tokens - is_allowed, now)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return 0 if is_allowed else math.ceil((1 - tokens) / rate)
