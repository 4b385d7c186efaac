"""The device, its compute type, and process-wide settings of memory and attention."""

from __future__ import annotations

import ctypes.util
import platform
import sys
from pathlib import Path

import torch

from mtrain.errors import ConfigError


def pick_device(name: str, key: str = "device") -> torch.device:
    """Return the device that `name` asks for; `auto` takes a GPU if there is one.

    Args:
        name: of the device.
        key: what the user calls the setting.

    Raises:
        ConfigError: if there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # a device that only pretends fails here
    except (RuntimeError, AssertionError, ImportError):
        raise ConfigError(
            f"`{key}` must be one of this machine, such as cpu or cuda, but is {name!r} instead."
        ) from None
    return device


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations and matrix products for `precision`."""
    if precision == "bfloat16":
        return torch.bfloat16
    if precision == "float16":
        return torch.float16
    if precision == "float32":
        return torch.float32
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bfloat16 else torch.float32
    fast = device.type == "cpu" and processor_has("avx512_bf16", "amx_tile")
    return torch.bfloat16 if fast else torch.float32


def avoid_cudnn_attention() -> None:
    """Disable cuDNN attention, which plans each new shape for up to a second.

    PyTorch prefers it on some GPUs; batches have thousands of shapes.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks, so that no step faults its memory in again."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(ctypes.util.find_library("c")).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 256 << 20)


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def processor_has(*features: str) -> bool:
    """Tell whether the processor has one of these features, such as "amx_tile"."""
    checks = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in features]
    return any(check() for check in checks if check is not None)
