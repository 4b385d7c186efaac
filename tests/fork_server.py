"""Start test processes by fork from a server process that has imported PyTorch and mtrain."""

from __future__ import annotations

import contextlib
import fcntl
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import TracebackType
from typing import IO, Any, Self
from unittest import mock

import pytest

from mtrain.cli.main import main

PATIENCE_S = 240
# what tests and their processes import; DistributedDataParallel imports `torch._dynamo`
PRELOADED = ["conftest", "ranks", "serving", "hostile", "run_folders", "datasets.arrow_writer"]
PRELOADED += ["torch._dynamo", "mtrain.training.data_parallel", "mtrain.augmentation.augment"]
PRELOADED += [f"mtrain.cli.verbs.{verb}" for verb in ("train", "evaluate", "translate")]
PRELOADED += ["mtrain.serve.server", "mtrain.exporters.export", "torch.distributed.run"]

needs_fork_server = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="needs a fork server"
)


def fork_server() -> ForkServerContext:
    """Return the context of a running server, one for all tests of this process."""
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # before Python 3.12 the server has no other path, and leaves out what it does not find
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return context


def run_in_child(
    function: Callable[..., object], *arguments: Any, patience_s: float = PATIENCE_S
) -> int | None:
    """Call a function in a process of its own; return its exit status, or minus the signal."""
    process = fork_server().Process(target=function, args=arguments)
    process.start()
    process.join(patience_s)
    if process.is_alive():
        process.kill()
        raise AssertionError("a process hangs")
    return process.exitcode


class ForkedProcess:
    """A program in a process of its own: `subprocess.Popen`, without the imports.

    Args:
        main: the program.
        argv: what it finds in `sys.argv`.
        stdin, stdout, stderr: `PIPE`, `DEVNULL`, or a file descriptor.
        text: whether pipes take and give str instead of bytes.
        env: the environment; by default that of the tests.
        has_terminal: whether `stdin` is a terminal, which becomes that of a session of its own.
    """

    def __init__(
        self,
        main: Callable[[], object],
        argv: Sequence[str | Path],
        *,
        stdin: int = DEVNULL,
        stdout: int = DEVNULL,
        stderr: int = DEVNULL,
        text: bool = False,
        env: Mapping[str, str] | None = None,
        has_terminal: bool = False,
    ) -> None:
        own_ends: list[IO[Any] | None] = []
        ends = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            own_end = None
            if stream == PIPE:
                pipe = os.pipe()
                end, own = pipe if number == 0 else pipe[::-1]
                mode = "w" if number == 0 else "r"
                mode += "" if text else "b"
                own_end = os.fdopen(own, mode, encoding="utf-8" if text else None)
            else:
                end = os.open(os.devnull, os.O_RDWR) if stream == DEVNULL else os.dup(stream)
            own_ends.append(own_end)
            ends.append(end)
        self.stdin, self.stdout, self.stderr = own_ends
        self._process = fork_server().Process(
            target=_run_program,
            args=(
                main,
                list(map(str, argv)),
                list(map(_Descriptor, ends)),
                dict(os.environ if env is None else env),
                has_terminal,
            ),
        )
        self._process.start()
        for end in ends:
            os.close(end)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the signal that killed it, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = PATIENCE_S) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            # the fork server may have reaped it before its exit code arrives here
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        for end in (self.stdin, self.stdout, self.stderr):
            if end is not None:
                end.close()
        self.wait()


def printed_by(main: Callable[[], object], *arguments: str) -> str:
    """Run a program in a process of its own; return what it prints to stdout."""
    process = ForkedProcess(main, ["program", *arguments], stdout=PIPE, stderr=PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stderr is not None
        out, error = process.stdout.read(), process.stderr.read()
        assert process.wait() == 0, error
    return out


class MtrainProcess(ForkedProcess):
    """`mtrain ARGUMENTS` in a process of its own."""

    def __init__(self, *arguments: str | Path, **streams: Any) -> None:
        super().__init__(main, ["mtrain", *arguments], **streams)


class _Descriptor:
    """A file descriptor that a new process gets a duplicate of."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[object]]:
        return _duplicate, (reduction.DupFd(self.number),)


def _duplicate(sent: Any) -> int:
    number: int = sent.detach()
    return number


def _run_program(
    main: Callable[[], object],
    argv: list[str],
    ends: list[int],
    env: dict[str, str],
    has_terminal: bool,
) -> None:
    if has_terminal:
        os.setsid()
        fcntl.ioctl(ends[0], termios.TIOCSCTTY, 0)
    for number, end in enumerate(ends):
        os.dup2(end, number)
        os.close(end)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = sys.__stdin__ = _opened(0, "strict")
    sys.stdout = sys.__stdout__ = _opened(1, "strict")
    sys.stderr = sys.__stderr__ = _opened(2, "backslashreplace")
    sys.argv = argv
    main()


def _opened(number: int, errors: str) -> io.TextIOWrapper:
    """Open a standard stream as Python does when it starts."""
    stream = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115
    is_line_buffered = number == 2 or os.isatty(number)
    return io.TextIOWrapper(
        stream, encoding="utf-8", errors=errors, line_buffering=is_line_buffered
    )
