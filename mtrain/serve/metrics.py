"""Counters of a server, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counts requests by path and status, and their durations; not thread-safe."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._seconds: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self.num_in_flight = 0

    def add_request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request; `path` is that of a route, not what a client has sent."""
        self._requests[path, status] += 1
        self._seconds[path] += seconds  # type: ignore[assignment]
        for bound in _BOUNDS_S:
            self._buckets[path, bound] += seconds <= bound

    def add(self, num_texts: int, num_chars: int) -> None:
        """Count translated texts."""
        self._counts["texts"] += num_texts
        self._counts["characters"] += num_chars

    def lines(self) -> Iterator[str]:
        """Yield the lines that Prometheus reads."""
        name = "mtrain_http_requests_total"
        yield from (f"# HELP {name} Answered requests.", f"# TYPE {name} counter")
        for (path, status), count in sorted(self._requests.items()):
            yield f'{name}{{path="{path}",status="{status}"}} {count}'
        name = "mtrain_http_request_duration_seconds"
        yield from (f"# HELP {name} Time until the answer.", f"# TYPE {name} histogram")
        for path in sorted(self._seconds):
            total = sum(count for (other, _), count in self._requests.items() if other == path)
            for bound in _BOUNDS_S:
                count = self._buckets[path, bound]
                yield f'{name}_bucket{{path="{path}",le="{bound:g}"}} {count}'
            yield f'{name}_bucket{{path="{path}",le="+Inf"}} {total}'
            yield f'{name}_sum{{path="{path}"}} {self._seconds[path]:.6f}'
            yield f'{name}_count{{path="{path}"}} {total}'
        name = "mtrain_http_requests_in_flight"
        yield from (f"# HELP {name} Requests that are being answered.", f"# TYPE {name} gauge")
        yield f"{name} {self.num_in_flight}"
        for unit in ("texts", "characters"):
            name = f"mtrain_translated_{unit}_total"
            yield from (f"# HELP {name} Translated {unit}.", f"# TYPE {name} counter")
            yield f"{name} {self._counts[unit]}"
