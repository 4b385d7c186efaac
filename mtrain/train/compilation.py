"""Compile the layers of a model that is trained on a GPU."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch

from mtrain.config.sections import Config
from mtrain.model.transformer import Transformer
from mtrain.runtime.device import pick_device
from mtrain.runtime.process_group import ProcessGroup

_MOST_SHAPES = 32  # kinds of shapes that a layer is compiled for: sides of one place, and so on


def device_of(config: Config, process_group: ProcessGroup) -> torch.device:
    """Return the device that a rank of this training runs on.

    Raises:
        ConfigError: if there is no such device here.
    """
    key = "training.device"
    device = pick_device(process_group.device_name(config.training.device, key), key)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # whose random numbers are drawn and saved
    return device


def compile_layers(
    model: Transformer, device: torch.device, config: Config, process_group: ProcessGroup
) -> bool:
    """Compile a model that is trained on a GPU, if that is wanted and can be done; tell whether."""
    settings = config.training
    is_wanted = device.type == "cuda" and settings.compile
    is_whole = process_group.size == 1 or settings.parallel == "ddp"
    if not is_wanted or not is_whole or importlib.util.find_spec("triton") is None:
        return False
    import torch._dynamo.config as compiler
    import torch._functorch.config as lowering

    compiler.suppress_errors = True  # what does not compile runs as it is
    if hasattr(lowering, "force_non_lazy_backward_lowering"):  # or it is told too late
        lowering.force_non_lazy_backward_lowering = True
    compiler.recompile_limit = max(_MOST_SHAPES, compiler.recompile_limit)
    model.compile_layers()
    return True


def uncompiled(is_compiled: bool) -> AbstractContextManager[object]:
    """Compile nothing anew for what happens seldom, if layers are compiled."""
    if not is_compiled:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
