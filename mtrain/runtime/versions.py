"""Versions of Python and PyTorch, the device and its precision, for `mtrain --version`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

import torch

from mtrain.io.text_width import count
from mtrain.runtime.device import compute_dtype, pick_device, processor


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
    yield f"device     {_device(device)}"
    yield f"precision  {dtype} in training, float32 in translation, unless asked otherwise"
    yield f"kernels    {kernels()}"


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, {processor()}, {count(torch.get_num_threads(), 'thread')}"
    properties = torch.cuda.get_device_properties(device)
    return f"{device}, {properties.name}, {properties.total_memory / 2**30:,.0f} GiB"
