"""The log of a run: lines and a bar on stderr, `metrics.jsonl`, and TensorBoard's scalars."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from tqdm import tqdm

from mtrain.errors import WriteError, on_one_line
from mtrain.io.atomic import append, write_lines
from mtrain.io.lines import read_lines
from mtrain.io.text_width import fitted

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

_VALIDATION = "valid_"  # prefix of the metrics of a validation


class TensorBoardLog:
    """Writes event files into a folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._last_step = 0

    def drop_after(self, step: int) -> None:
        """Purge later steps, which are about to be repeated."""
        self._last_step = step

    def add(self, values: Mapping[str, object]) -> None:
        """Write the numbers of one logged step or validation, at once.

        Raises:
            OSError: if they cannot be written.
        """
        step = values["step"]
        assert isinstance(step, int)
        group = "valid" if any(key.startswith(_VALIDATION) for key in values) else "train"
        for key, value in values.items():
            if key != "step" and isinstance(value, int | float):
                tag = f"{group}/{key.removeprefix(_VALIDATION)}"
                self._open().add_scalar(tag, value, step)
        self._open().flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=self._last_step + 1)
        return self._writer


def is_live() -> bool:
    """Tell whether stderr can redraw a line: it is a terminal, and `TERM` is not dumb."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Console(Protocol):
    """Where lines for the user go."""

    def say(self, text: str = "") -> None:
        """Show one line."""


@contextmanager
def resumable(console: Console, path: Path) -> Iterator[None]:
    """Say on Ctrl-C that the command that writes `path` goes on from its finished parts."""
    try:
        yield
    except KeyboardInterrupt:
        console.say(f"{path}: stopped; finished parts are kept, and the same command resumes")
        raise


class Stderr:
    """Prints lines on stderr, above a progress bar if there is one."""

    def say(self, text: str = "") -> None:
        """Print one line; if the terminal or pipe is closed, discard it and all later output."""
        try:
            tqdm.write(fitted(on_one_line(text), sys.stderr), file=sys.stderr)
        except OSError as error:
            if error.errno in (errno.EIO, errno.EPIPE):  # closed for good
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class PythonLog:
    """Sends lines to the Python logger `mtrain`, at level INFO."""

    def say(self, text: str = "") -> None:
        """Log one line."""
        logging.getLogger("mtrain").info("%s", text)


class RunLog:
    """The console, the progress bar and the metrics of one training.

    Args:
        metrics_path: of `metrics.jsonl`; None writes none, for a rank other than the first.
        board: writes the same numbers as TensorBoard events.
        console: where lines go; None prints none.
        has_bar: draw a progress bar on stderr, if that is a terminal.
        bar: the fractions of the budget at which the bar begins and ends.
        on_metrics: is called with each line of `metrics.jsonl`.
    """

    def __init__(
        self,
        metrics_path: Path | None,
        board: TensorBoardLog | None = None,
        console: Console | None = Stderr(),  # noqa: B008 - it has no state
        has_bar: bool = True,
        bar: tuple[float, float] = (0.0, 1.0),
        on_metrics: Callable[[Mapping[str, object]], object] | None = None,
    ) -> None:
        self._path, self._board = metrics_path, board
        self._bar_start, self._bar_end = bar
        self._console, self._has_bar, self._on_metrics = console, has_bar, on_metrics
        self._bar: tqdm[NoReturn] | None = None
        self._last_note_s = 0.0
        self._unwritten = b""

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close_bar()
        if self._board is not None:
            self._board.close()

    def say(self, text: str = "") -> None:
        """Print one line on stderr."""
        if self._console is not None:
            self._console.say(text)

    def metrics(self, values: Mapping[str, object]) -> None:
        """Append one line to `metrics.jsonl`; if the disk is full, the next call writes it."""
        if self._path is None:
            return
        if self._on_metrics is not None:
            self._on_metrics(dict(values))
        if self._board is not None:
            try:
                self._board.add(values)
            except OSError as error:
                self.say(
                    f"tensorboard: cannot be written: {error}; the training goes on without it"
                )
                self._board = None
        is_first = not self._unwritten
        self._unwritten += json.dumps(values).encode() + b"\n"
        try:
            append(self._path, self._unwritten)
        except WriteError as error:
            if is_first:
                self.say(str(error))
            return
        self._unwritten = b""

    def holds(self, key: str, value: object) -> bool:
        """Tell whether a line of `metrics.jsonl` has this value; no line may be cut off."""
        if self._path is None or not self._path.exists():
            return False
        return any(json.loads(line).get(key) == value for line in read_lines(self._path))

    def drop_after(self, step: int, with_validation: bool = True) -> None:
        """Delete the metrics of later steps, which are about to be repeated.

        Without `with_validation`, the validation of `step` is about to be repeated, too.
        """
        if self._board is not None:
            self._board.drop_after(step)
        if self._path is not None and self._path.exists():
            kept = [
                line
                for line in read_lines(self._path)
                if _step(line) < step + (with_validation or _VALIDATION not in line)
            ]
            write_lines(self._path, kept)

    def open_bar(self, spent: float) -> None:
        """Show a progress bar at the fraction `spent` of the budget, on a terminal only."""
        self._bar = tqdm(
            total=1.0,
            initial=self._bar_position(spent),
            file=sys.stderr,
            disable=not (self._has_bar and is_live()),
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {desc}, {remaining} left",
        )

    def wants_note(self, interval_s: float) -> bool:
        """Tell whether a bar is shown that was last updated over `interval_s` ago."""
        is_shown = self._bar is not None and not self._bar.disable
        return is_shown and time.monotonic() - self._last_note_s > interval_s

    def advance(self, spent: float, note: str, is_logged: bool) -> None:
        """Move the bar to the fraction `spent`, with a note; without a bar, print a logged note."""
        if self._bar is None or self._bar.disable:
            if is_logged:
                self.say(note)
            return
        self._last_note_s = time.monotonic()
        self._bar.n = min(self._bar_position(spent), 1.0)
        self._bar.set_description_str(note)

    def _bar_position(self, spent: float) -> float:
        return (spent - self._bar_start) / (self._bar_end - self._bar_start)

    def close_bar(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _step(line: str) -> float:
    """Return the step of a line of metrics; infinity if the line is damaged."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return math.inf


def read_metrics(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of `metrics.jsonl` that are JSON and have a step; none without a file.

    Raises:
        DataError: if the file cannot be read.
    """
    if not path.exists():
        return
    for text in read_lines(path):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line
