"""Join and close the process group of torchrun."""

import sys
from pathlib import Path

import pytest
from fork_server import needs_fork_server
from ranks import Ranks, ranks

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
