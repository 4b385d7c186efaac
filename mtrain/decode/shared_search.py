"""One search, with continuous batching, for the calls of many threads.

Each worker decodes on one core. It admits waiting sources while it decodes others, one group of
each call in turn, so that a long call does not keep a short one waiting. The targets of a source do
not depend on what is decoded beside it.

A worker runs in a thread of its own. If one worker is enough, the thread of the first caller
decodes until its call has ended, and a new thread continues with the calls of other threads.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol

import torch

from mtrain.decode.beam import BeamSearch, Hypothesis, RequestGroup, S, Step, Steps
from mtrain.decode.options import DecodingOptions
from mtrain.runtime.threads import NUM_THREADS_LOCK

Rows = list[int]  # numbers of the sources of a call
_Decoding = Generator[None, None, list[list[Hypothesis]]]
_IDLE_S = 0.02  # a thread ends after this time without a call; starting one takes time
_MAX_PASSED = 100  # groups that may overtake a group that does not fit yet


@dataclass(frozen=True)
class SearchLimits:
    """The deadline and the cancellation of a call.

    Attributes:
        deadline_s: a time of `time.monotonic`, in seconds.
        cancel: an event that another thread sets; workers check it between two calls of the search.
    """

    deadline_s: float = math.inf
    cancel: threading.Event | None = None

    def seconds_left(self) -> float:
        """Return the seconds until the deadline.

        Raises:
            TimeoutError: at the deadline.
            CancelledError: once `cancel` is set.
        """
        if self.is_cancelled():
            raise CancelledError
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def is_cancelled(self) -> bool:
        """Return whether `cancel` is set."""
        return self.cancel is not None and self.cancel.is_set()


NO_LIMITS = SearchLimits()


class PendingSearch(NamedTuple):
    """A search that was started, and may continue while its caller does something else.

    Attributes:
        result: waits for it; returns the best targets of each source, in the order of the sources.
        cancel: ends it; `result` may not be called then.
    """

    result: Callable[[], list[list[Hypothesis]]]
    cancel: Callable[[], None]


class Source(Protocol):
    """The interface of a source to decode."""

    @property
    def ids(self) -> Sequence[int]:
        """The token ids, with eos."""


class SearchCall(Generic[S]):
    """Sources that are decoded for one caller.

    Args:
        sources: by row.
        options: of the search.
        start: returns the initial state and the constraints of sources, which may include sources
            of other calls with the same options.
        decode: decodes sources apart from other calls: yields after each position, and returns
            their hypotheses. None if the sources join the running search.
        limits: the deadline and the cancellation by the caller.
    """

    def __init__(
        self,
        sources: Mapping[int, Source],
        options: DecodingOptions,
        start: Callable[[list[Any]], RequestGroup[S]],
        decode: Callable[[list[Any]], _Decoding] | None = None,
        limits: SearchLimits = NO_LIMITS,
    ) -> None:
        self.sources, self.options, self.start, self.decode = sources, options, start, decode
        self.limits = limits
        self.best: dict[int, list[Hypothesis]] = {}
        self.error: BaseException | None = None
        self.is_cancelled, self.num_passed = False, 0
        self.done = threading.Event()

    def cancel(self) -> None:
        """End the call; a worker drops its sources."""
        self.is_cancelled = True
        self.done.set()

    def add(self, row: int, best: list[Hypothesis]) -> None:
        """Store the hypotheses of a row."""
        self.best[row] = best
        if len(self.best) == len(self.sources):
            self.done.set()

    def fail(self, error: BaseException) -> None:
        """End the call with an error."""
        self.error = error
        self.cancel()

    def wait(self) -> None:
        """Wait until the call has ended; a worker ends it when it is cancelled.

        Raises:
            TimeoutError: at the deadline.
            CancelledError: if it was cancelled before.
        """
        while not self.done.is_set():
            self.done.wait(min(self.limits.seconds_left(), threading.TIMEOUT_MAX))

    def num_cells(self, rows: Rows) -> int:
        """Return the source positions of a padded group, times the targets of each source."""
        num_targets = self.options.num_targets
        return max(len(self.sources[row].ids) for row in rows) * len(rows) * num_targets


class _RunningSearch(Generic[S]):
    """The search for one set of options, and the call and row of each sentence in it."""

    def __init__(self, search: BeamSearch[S]) -> None:
        self.search = search
        self.owners: dict[int, tuple[SearchCall[S], int]] = {}
        self.num_cells = 0  # of all sentences

    def has_room(self, call: SearchCall[S], rows: Rows) -> bool:
        """Return whether a group fits beside what is being decoded."""
        if self.search.can_admit(len(rows)):
            return True
        return self.num_cells + call.num_cells(rows) <= call.options.batch_tokens

    def admit(self, groups: Sequence[tuple[SearchCall[S], Rows]]) -> None:
        """Admit rows of calls, which are encoded together."""
        owners = [(call, row) for call, rows in groups for row in rows]
        group = groups[0][0].start([call.sources[row] for call, row in owners])
        self.owners |= dict(zip(self.search.admit(group), owners, strict=True))
        for call, row in owners:
            self.num_cells += len(call.sources[row].ids) * call.options.num_targets

    def advance(self) -> None:
        """Drop cancelled sentences, decode at least one position, and store ended sentences."""
        cancelled = [number for number, (call, _) in self.owners.items() if call.is_cancelled]
        if cancelled:
            self.search.drop(cancelled)
            for number in cancelled:
                self._remove(number)
        if not self.search.num_open:
            return
        for number in self.search.advance():
            call, row = self._remove(number)
            try:
                call.add(row, self.search.take_best(number))
            except ArithmeticError as error:
                call.fail(error)

    def _remove(self, number: int) -> tuple[SearchCall[S], int]:
        call, row = self.owners.pop(number)
        self.num_cells -= len(call.sources[row].ids) * call.options.num_targets
        return call, row

    def fail(self, error: BaseException) -> None:
        """End all calls with an error."""
        for call, _ in self.owners.values():
            call.fail(error)
        self.owners.clear()


class _Worker(Generic[S]):
    """Decodes the calls that are added to it, in a thread of its own or in that of a caller."""

    def __init__(self, step: Step[S], steps: Steps[S] | None, number: int) -> None:
        self._step, self._steps, self._name = step, steps, f"search-{number}"
        self._lock = threading.Lock()
        self._added = threading.Condition(self._lock)
        self._is_running = False
        self._calls: list[SearchCall[S]] = []  # ended ones stay until the next is added
        self._waiting: list[tuple[SearchCall[S], deque[Rows]]] = []
        self._searches: dict[DecodingOptions, _RunningSearch[S]] = {}
        self._decodings: list[tuple[SearchCall[S], Rows, _Decoding]] = []  # apart from the searches

    def load(self) -> int:
        """Return the number of sources that wait or are being decoded."""
        with self._lock:
            num_waiting = sum(len(rows) for _, groups in self._waiting for rows in groups)
            num_alone = sum(len(rows) for _, rows, _ in self._decodings)
            searches = self._searches.values()
            return num_waiting + num_alone + sum(len(running.owners) for running in searches)

    def submit(self, call: SearchCall[S], groups: Sequence[Rows]) -> None:
        """Decode the groups of a call, in order, beside those of other calls, in a thread."""
        with self._lock:
            self._add(call, groups)
            if not self._is_running:
                self._start_thread()

    def decode_here(self, call: SearchCall[S], groups: Sequence[Rows]) -> None:
        """Decode the groups of a call in the caller's thread, and those of calls that join it.

        If something is being decoded, the call joins it.
        """
        with self._lock:
            self._add(call, groups)
            is_alone, self._is_running = not self._is_running, True
        if not is_alone:
            call.wait()
            return
        try:
            while not call.done.is_set():
                call.limits.seconds_left()
                self._advance()
        except BaseException as error:
            call.cancel()
            if not isinstance(error, Exception):  # a signal may have interrupted a step
                self._restart()
            raise
        finally:
            with self._lock:
                self._is_running = False
                if self._waiting or self._searches or self._decodings:
                    self._start_thread()

    def _add(self, call: SearchCall[S], groups: Sequence[Rows]) -> None:
        self._waiting.append((call, deque(groups)))
        self._added.notify()
        self._calls = [each for each in self._calls if not each.done.is_set()] + [call]

    def _restart(self) -> None:
        """Move all sentences that have not ended back to the waiting groups."""
        with self._lock:
            self._searches.clear()
            self._decodings.clear()
            self._waiting.clear()
            for call in self._calls:
                if missing := [[row] for row in call.sources if row not in call.best]:
                    self._waiting.append((call, deque(missing)))
                else:
                    call.done.set()

    def _start_thread(self) -> None:
        """Decode in a new thread; end all calls with an error if it cannot start."""
        started, self._is_running = threading.Event(), True
        with NUM_THREADS_LOCK:
            try:
                threading.Thread(target=self._run, args=[started], name=self._name).start()
            except RuntimeError as error:
                self._is_running = False
                for call in self._calls:
                    if not call.done.is_set():
                        call.fail(error)
                for entries in (self._waiting, self._searches, self._decodings):
                    entries.clear()
                return
            started.wait()
            # threads that have not used PyTorch yet take over the number set last
            torch.set_num_threads(torch.get_num_threads())

    def _run(self, started: threading.Event) -> None:
        torch.get_num_threads()  # the first call in a thread takes over the number set last
        torch.set_num_threads(1)
        started.set()
        while True:
            while self._advance():
                pass
            with self._lock:
                if not self._added.wait_for(lambda: self._waiting, _IDLE_S):
                    self._is_running = False
                    return

    def _advance(self) -> bool:
        """Admit groups, or decode some positions; return False if there is nothing to do."""
        with self._lock:
            for call in self._calls:
                if call.limits.is_cancelled() and not call.done.is_set():
                    call.fail(CancelledError())
            groups = self._next_groups()
            if not groups and not self._searches and not self._decodings:
                return False
        if groups:
            self._admit(groups)
            return True
        for decoding in list(self._decodings):
            self._advance_alone(*decoding)
        for options, running in list(self._searches.items()):
            try:
                running.advance()
            except Exception as error:
                running.fail(error)
            if not running.owners:
                with self._lock:
                    del self._searches[options]
        return True

    def _advance_alone(self, call: SearchCall[S], rows: Rows, decoding: _Decoding) -> None:
        try:
            if not call.is_cancelled:
                next(decoding)
                return
        except StopIteration as end:
            for row, best in zip(rows, end.value, strict=True):
                call.add(row, best)
        except Exception as error:
            call.fail(error)
        with self._lock:
            self._decodings = [each for each in self._decodings if each[2] is not decoding]

    def _next_groups(self) -> list[tuple[SearchCall[S], Rows]]:
        """Return a group that fits, and one of each other call that fits beside it."""
        first = self._next_group()
        if first is None or first[0].decode is not None:
            return [first] if first else []
        groups, running = [first], self._searches.get(first[0].options)
        num_cells = first[0].num_cells(first[1]) + (running.num_cells if running else 0)
        for call, waiting in [entry for entry in self._waiting if entry[0] is not first[0]]:
            num_cells += call.num_cells(waiting[0])
            if call.options != first[0].options or num_cells > call.options.batch_tokens:
                break
            groups.append((call, waiting.popleft()))
            call.num_passed = 0
        self._waiting = [entry for entry in self._waiting if entry[1]]
        return groups

    def _next_group(self) -> tuple[SearchCall[S], Rows] | None:
        """Return a group that fits, of each call in turn; None if there is none."""
        self._waiting = [entry for entry in self._waiting if not entry[0].is_cancelled]
        for index, (call, groups) in enumerate(self._waiting):
            if self._has_room(call, groups[0]):
                for passed, _ in self._waiting[:index]:
                    passed.num_passed += 1
                del self._waiting[index]
                rows, call.num_passed = groups.popleft(), 0
                if groups:
                    self._waiting.append((call, groups))
                return call, rows
            if call.num_passed >= _MAX_PASSED:
                break
        return None

    def _has_room(self, call: SearchCall[S], rows: Rows) -> bool:
        if call.decode is None:
            running = self._searches.get(call.options)
            return running is None or running.has_room(call, rows)
        num_cells = sum(other.num_cells(other_rows) for other, other_rows, _ in self._decodings)
        return not num_cells or num_cells + call.num_cells(rows) <= call.options.batch_tokens

    def _admit(self, groups: Sequence[tuple[SearchCall[S], Rows]]) -> None:
        call, rows = groups[0]
        try:
            if call.decode is not None:
                decoding = call.decode([call.sources[row] for row in rows])
                with self._lock:
                    self._decodings.append((call, rows, decoding))
                return
            running = self._searches.get(call.options)
            if running is None:
                running = _RunningSearch(BeamSearch(self._step, call.options, self._steps))
            running.admit(groups)
            with self._lock:
                self._searches[call.options] = running
        except Exception as error:
            if len(groups) == 1:
                call.fail(error)
            else:  # the other groups may be able to start without the one that failed
                for group in groups:
                    self._admit([group])


class SharedSearch(Generic[S]):
    """Decodes the calls of all threads together.

    Args:
        step, steps: as of `BeamSearch`.
    """

    def __init__(self, step: Step[S], steps: Steps[S] | None = None) -> None:
        self._step, self._steps = step, steps
        self._start()

    def _start(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        self._workers: list[_Worker[S]] = []

    def submit(
        self, call: SearchCall[S], groups_of: Sequence[Sequence[Rows]]
    ) -> Callable[[], dict[int, list[Hypothesis]]]:
        """Begin to decode the groups of a call, each entry of `groups_of` by another worker.

        Returns a function that waits for the hypotheses of each row. That function decodes a single
        entry itself, in the caller's thread, unless PyTorch has several threads there. It raises:
            TimeoutError, CancelledError: as the limits of the call say.
            NotFiniteError: if the logits are not finite.
        """
        if self._process != os.getpid():  # a fork has the locks, but not the threads
            self._start()
        if not any(groups_of):
            return dict
        is_in_thread = len(groups_of) > 1 or torch.get_num_threads() > 1
        try:
            with self._lock:
                for number in range(len(self._workers), len(groups_of)):
                    self._workers.append(_Worker(self._step, self._steps, number))
                least_loaded = sorted(self._workers, key=_Worker.load)
                for worker, groups in zip(least_loaded, groups_of, strict=False):
                    if groups and is_in_thread:
                        worker.submit(call, groups)
        except BaseException:  # a signal, while a thread starts
            call.cancel()
            raise
        decode_here = partial(least_loaded[0].decode_here, call, groups_of[0])
        return partial(_result, call, call.wait if is_in_thread else decode_here)


def _result(call: SearchCall[S], wait: Callable[[], None]) -> dict[int, list[Hypothesis]]:
    """Wait until a call has ended; return the hypotheses of each row."""
    try:
        wait()
    finally:
        call.cancel()
    if call.error is not None:
        raise call.error
    return call.best
