"""Signals that ask a training to stop: remembered, and acted on between two updates."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """Training was stopped by a signal, after saving."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number


class Signals:
    """Remembers the first SIGINT or SIGTERM; the second one stops at once."""

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> Signals:
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for later, handler in self._before.items():
            signal.signal(later, handler)
