"""Join and close the process group of torchrun."""

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from fork_server import needs_fork_server
from ranks import Ranks, ranks
from torch.distributed import TCPStore

from mtrain.runtime import torch_process_group
from mtrain.runtime.process_group import read_torchrun_env

__all__ = ["ranks"]


def threads_of_groups() -> int:
    """Return how many threads of this process run a group's operations."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.strip() == "pt_gloo_runloop" for name in names)


def join_and_close() -> None:
    launch = read_torchrun_env()
    assert launch is not None
    group = torch_process_group.join(launch)
    assert group.broadcast_float(launch.rank) == 0
    before = threads_of_groups()
    group.close()
    print(before, threads_of_groups())
    sys.stdout.flush()


@needs_fork_server
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_closing_a_process_group_ends_its_threads(ranks: Ranks) -> None:
    # a thread that waits for the GIL while Python exits aborts the process
    ended = ranks(2, join_and_close)
    assert ended.codes == [0, 0], ended.err
    for line in ended.out:
        before, after = map(int, line.split())
        assert (before > 0, after) == (True, 0)


def connections() -> list[socket.socket]:
    """Return this process's TCP connections."""
    found = []
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            found.append(socket.socket(fileno=int(path.name)))
    return [own for own in found if own.family != socket.AF_UNIX]


def print_keepalive() -> None:
    launch = read_torchrun_env()
    assert launch is not None
    group = torch_process_group.join(launch)
    for connection in connections():
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1:  # established
            is_on = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, interval, count = (
                connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            print(is_on, idle + interval * count)
        connection.detach()
    group.close()
    sys.stdout.flush()


@needs_fork_server
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_connections_of_a_process_group_are_probed_so_that_a_lost_machine_is_noticed(
    ranks: Ranks,
) -> None:
    ended = ranks(2, print_keepalive)
    assert ended.codes == [0, 0], ended.err
    for out in ended.out:
        lines = out.splitlines()
        assert len(lines) >= 3  # the store and both groups
        assert set(lines) == {"1 600"}


def claim_from_a_stopped_host() -> None:
    """Claim an error report from a store that is hosted by the other rank, which has stopped."""
    launch = read_torchrun_env()
    assert launch is not None
    torch_process_group._STORE_TIMEOUT_S = 0.2
    group = torch_process_group.join(launch)
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, pid = (int(group.broadcast_float(number)) for number in (host.port, os.getpid()))
    if not group.is_first:
        group._store = TCPStore("127.0.0.1", port)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        print(group.claim_error_report(), time.monotonic() - started < 10)
        os.kill(pid, signal.SIGCONT)
        sys.stdout.flush()
    group.close()


@needs_fork_server
def test_an_error_is_reported_soon_although_the_machine_of_the_store_is_lost(ranks: Ranks) -> None:
    ended = ranks.ended(ranks.start(2, claim_from_a_stopped_host), patience_s=15)
    assert ended.codes == [0, 0], ended.err
    assert ended.out == ["", "True True\n"]
