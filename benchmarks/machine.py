"""What a figure was measured on: the processor and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def describe_machine() -> str:
    """Return the processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def commit() -> str:
    """Return the commit that is measured; `-dirty` says that the code has changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    folder = Path(__file__).parent
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    return done.stdout.strip()


def peak_bytes(process: subprocess.Popen[Any]) -> int:
    """Wait for a process, which must succeed, and return the peak of its resident memory."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.args
    return usage.ru_maxrss * 1024


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (kib,) = (int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return kib / 1024
