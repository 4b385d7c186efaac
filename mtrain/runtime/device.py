"""The device, its compute type, versions, and process-wide settings of memory and attention."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mtrain.errors import ConfigError
from mtrain.io.text_width import count
from mtrain.runtime.process_settings import is_own_process

_REQUEST_TILES = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


def pick_device(name: str, key: str = "device") -> torch.device:
    """Return the device `name`, the value of the setting `key`; `auto` takes a GPU if there is one.

    Raises:
        ConfigError: if there is no such device here, or it cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = re.fullmatch(r"cuda(?::(\d+))?", name) if isinstance(name, str) else None
    if name != "cpu" and not gpu:
        raise ConfigError(f"`{key}` must be auto, cpu, cuda or cuda:N, but is {name!r} instead.")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # an unusable device fails here
    except (RuntimeError, AssertionError, ImportError) as error:
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not num_gpus:
            problem = f"is {name!r}, but no CUDA GPU was found here; use cpu or auto"
        elif gpu and int(gpu[1] or 0) < num_gpus:  # as when other processes take all of its memory
            reason = str(error).partition("\n")[0].rstrip(".")
            problem = f"is {name!r}, but this GPU cannot be used: {reason}; use cpu or another GPU"
        else:
            problem = (
                f"is {name!r}, but this machine has {count(num_gpus, 'CUDA GPU')}, from cuda:0 on"
            )
        raise ConfigError(f"`{key}` {problem}.") from None
    return device


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations and matrix products for `precision`."""
    dtype_of = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if precision in dtype_of:
        return dtype_of[precision]
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bfloat16 else torch.float32
    fast = device.type == "cpu" and processor_has("avx512_bf16", "amx_tile")
    return torch.bfloat16 if fast else torch.float32


def avoid_cudnn_attention() -> None:
    """Disable cuDNN attention, which plans each new shape for up to a second.

    PyTorch prefers it on some GPUs; batches have thousands of shapes. Without `own_process`, this
    does nothing.
    """
    if is_own_process():
        torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks, so that no step faults its memory in again.

    Without `own_process`, and on other systems than Linux, this does nothing.
    """
    if not sys.platform.startswith("linux") or not is_own_process():
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 256 << 20)


def describe(kernels: Callable[[], str]) -> Iterator[str]:
    """Yield versions, the device and precision that `auto` selects, and kernels.

    Args:
        kernels: `ops.native.describe`, which says whether the operations on a CPU are compiled.

    Raises:
        ConfigError: after the versions, if the GPU or the kernels cannot be used.
    """
    yield f"python     {platform.python_version()}"
    yield f"torch      {torch.__version__}"
    device = pick_device("auto")
    dtype = str(compute_dtype("auto", device)).removeprefix("torch.")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details = f"{properties.name}, {properties.total_memory / 2**30:,.0f} GiB"
    else:
        details = f"{processor()}, {count(torch.get_num_threads(), 'thread')}"
    yield f"device     {device}, {details}"
    yield f"precision  {dtype} in training, float32 in translation, unless asked otherwise"
    yield f"kernels    {kernels()}"


def processor() -> str:
    """Return the name of the processor."""
    return next(_cpuinfo("model name"), platform.processor() or platform.machine())


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the features of the processor, such as "avx2", as Linux names them.

    They include only those that the operating system has enabled. Empty on other systems.
    """
    return frozenset(next(_cpuinfo("flags", "Features"), "").split())  # on x86 and ARM


def processor_has(*features: str) -> bool:
    """Tell whether the processor has one of these features, such as "amx_tile"."""
    return not processor_features().isdisjoint(features)


@functools.cache
def request_tiles() -> bool:
    """Ask Linux for the tile registers (AMX) of an x86-64 processor; tell whether it grants them.

    The permission is for all threads of this process, and for the processes that it forks.
    """
    if not processor_has("amx_tile"):
        return False
    status: int = ctypes.CDLL(None).syscall(*_REQUEST_TILES)
    return status == 0


def _cpuinfo(*keys: str) -> Iterator[str]:
    """Yield the values of /proc/cpuinfo that have one of these keys."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            yield value.strip()
