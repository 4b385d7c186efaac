"""Start test processes by fork from a server process that has imported PyTorch and mtrain."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest import mock

import pytest

PATIENCE_S = 240
# what tests and their processes import; DistributedDataParallel imports `torch._dynamo`
PRELOADED = ["conftest", "ranks", "serving", "hostile", "run_folders", "datasets.arrow_writer"]
PRELOADED += ["torch._dynamo", "mtrain.training.data_parallel", "mtrain.augmentation.augment"]
PRELOADED += [f"mtrain.cli.{verb}" for verb in ("train", "evaluate", "translate")]

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
