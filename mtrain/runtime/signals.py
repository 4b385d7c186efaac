"""SIGINT, SIGTERM, SIGHUP: training stops between two updates, other commands at once."""

from __future__ import annotations

import atexit
import math
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

_HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
STOPPING = (signal.SIGINT, signal.SIGTERM, _HANGUP)
_WAIT_S = 0.02  # until it is tried again whether an import is done
_BURST_S = 2.0  # after a signal, in which further ones are repeats of it


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """Training was stopped by a signal, after saving."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number

    def __str__(self) -> str:
        return f"stopped by signal {self.signal_number}"


class Signals:
    """Records the first signal of `STOPPING`; the next one goes to the previous handlers.

    Further SIGHUPs are ignored: when a terminal is closed, both the shell and the kernel may send
    one. A signal that the process ignores from its start, as under nohup, stays ignored.

    Args:
        may_repeat: ignore all further signals: a launcher forwards those that a cluster has
            already sent to every process.
        stop: an event that another thread sets; it counts as SIGTERM.
    """

    def __init__(self, may_repeat: bool = False, stop: threading.Event | None = None) -> None:
        self._received, self._may_repeat, self._stop = 0, may_repeat, stop
        in_main = threading.current_thread() is threading.main_thread()  # signal.signal needs it
        self._numbers = _not_ignored() if in_main else []
        self._before: dict[int, Any] = {}  # the handlers that are replaced, by signal

    @property
    def received(self) -> int:
        """The number of the first signal; 0 before it."""
        is_stopped = self._stop is not None and self._stop.is_set()
        return self._received or (int(signal.SIGTERM) if is_stopped else 0)

    def __enter__(self) -> Signals:
        self._before = {number: signal.getsignal(number) for number in self._numbers}
        for number in self._numbers:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number
        if self._may_repeat:
            return
        for later, handler in self._before.items():
            if later != _HANGUP:
                signal.signal(later, handler)


def unwind_when_stopped(numbers: Sequence[int] = STOPPING) -> None:
    """Make SIGTERM and SIGHUP raise SystemExit, and SIGINT KeyboardInterrupt; ignore repeats.

    While a module is imported, which may catch the exception, they wait until that is done.
    """
    last = -math.inf
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # Python's handlers end before it does

    def unwind(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if _is_importing(frame):
            signal.signal(signal.SIGALRM, lambda _, later: unwind(number, later))
            signal.setitimer(signal.ITIMER_REAL, _WAIT_S)
        elif time.monotonic() - last > _BURST_S:
            last = time.monotonic()
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    for number in _not_ignored():
        if number in numbers:
            signal.signal(number, unwind)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _not_ignored() -> list[signal.Signals]:
    """Return the signals of `STOPPING` but those that a shell or nohup lets this process ignore."""
    return [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
