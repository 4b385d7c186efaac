"""Several processes as torchrun would start them, but from one that has loaded torch already."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mtrain.cli import main

PATIENCE_S = 120

needs_fork_server = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="needs a fork server"
)


class Ended(NamedTuple):
    """How ranks ended: their exit codes, and what each wrote."""

    codes: list[int | None]
    out: list[str]
    err: list[str]

    @property
    def said(self) -> list[str]:
        """What all ranks said in mtrain's name."""
        lines = [line for text in self.err for line in text.splitlines()]
        return [line for line in lines if line.startswith("mtrain: ")]


class Ranks:
    """Runs a function on every rank, and looks at how they end."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.count = directory, 0

    def start(
        self, size: int, function: Callable[..., object], *arguments: Any
    ) -> list[ForkServerProcess]:
        """Start `function(*arguments)` on each of some ranks."""
        context: ForkServerContext = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mtrain.train", "mtrain.replicas", "mtrain.crew"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.count += 1
        processes = [
            context.Process(
                target=_rank, args=(self._stem(rank), rank, size, port, function, arguments)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        return processes

    def ended(self, processes: list[ForkServerProcess], patience_s: float = PATIENCE_S) -> Ended:
        """Wait for all ranks; one that hangs is an error."""
        for process in processes:
            process.join(patience_s)
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        stems = [self._stem(rank) for rank in range(len(processes))]
        out, err = ([Path(f"{stem}.{end}").read_text() for stem in stems] for end in ("out", "err"))
        assert not hanging, f"ranks {hanging} hang: {err}"
        return Ended([process.exitcode for process in processes], out, err)

    def __call__(self, size: int, function: Callable[..., object], *arguments: Any) -> Ended:
        """Run a function on all ranks, to the end."""
        return self.ended(self.start(size, function, *arguments))

    def mtrain(self, size: int, *arguments: str | Path) -> Ended:
        """Run the command line on all ranks."""
        return self(size, command_line, [str(argument) for argument in arguments])

    def _stem(self, rank: int) -> str:
        return str(self.directory / f"{self.count}-{rank}")


def _rank(
    stem: str,
    rank: int,
    size: int,
    port: int,
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{stem}.{end}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdin = sys.__stdin__ = open(os.devnull)  # noqa: SIM115, PTH123
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    function(*arguments)


def command_line(arguments: list[str]) -> None:
    """Do what `mtrain ARGUMENTS` does."""
    sys.argv = ["mtrain", *arguments]
    main()


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    directory = tmp_path / "ranks"
    directory.mkdir()
    return Ranks(directory)
