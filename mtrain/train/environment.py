"""What decides the last bits of a training, and what it takes of the machine."""

from __future__ import annotations

import math
import resource
import sys

import torch

from mtrain import __version__
from mtrain.ops import native
from mtrain.run.checkpoint import Environment
from mtrain.runtime.device import processor


def current_environment(
    device: torch.device, dtype: torch.dtype, threads: int, room: float, ranks: int
) -> Environment:
    """Return what decides the last bits of this training."""
    cpu = f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return Environment(
        __version__,
        torch.__version__,
        device.type,
        torch.cuda.get_device_name() if device.type == "cuda" else cpu,
        str(dtype).removeprefix("torch."),
        threads,
        native.name(),
        "whole" if room == math.inf else f"halved from {room:,.0f} places",
        ranks,
    )


def memory_mib(device: torch.device) -> float:
    """Return the most memory that was in use: the device's, or the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
