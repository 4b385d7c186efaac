"""What every worker process shares: the special ids, its peak of memory, and its answer.

A worker runs one system in a fresh process of that system's own environment, so that this file
imports nothing but the standard library.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

PAD, UNK, BOS, EOS = range(4)  # as mtrain numbers them, and as the corpus is written
NUM_SPECIAL = 4


def keep_stdout() -> Callable[[str], None]:
    """Point file descriptor 1 at stderr, so that no library can print among the answers.

    Returns:
        A function that prints an answer as a line to the original stdout.
    """
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(line: str) -> None:
        stdout.write((line + "\n").encode())
        stdout.flush()

    return answer


def until_eos(ids: list[int]) -> list[int]:
    """Return what stands before the first eos."""
    return ids[: ids.index(EOS)] if EOS in ids else ids


def sort_batches(sources: list[list[int]], size: int) -> list[list[int]]:
    """Return the rows of sources in batches of like length."""
    rows = sorted(range(len(sources)), key=lambda row: len(sources[row]))
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def decode_batches(
    batches: list[list[int]], decode: Callable[[list[int]], list[list[int]]]
) -> list[list[int]]:
    """Return the outputs in the order of the rows; `decode` returns those of a batch of rows."""
    outputs: dict[int, list[int]] = {}
    for rows in batches:
        outputs.update(zip(rows, decode(rows), strict=True))
    return [outputs[row] for row in range(len(outputs))]


def max_rss_mib() -> float:
    """Return the most memory that this process has held at once so far."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss also remembers the process that started this one
        for line in status.read_text("utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
