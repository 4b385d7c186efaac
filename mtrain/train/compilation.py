"""The device of a rank, and torch.compile for models that are trained on a GPU."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch

from mtrain.config.sections import Config
from mtrain.model.transformer import Transformer
from mtrain.runtime.device import pick_device
from mtrain.runtime.process_group import ProcessGroup

_RECOMPILE_LIMIT = 32  # graphs per layer; a dimension of size 1, for example, is a separate graph


def device_of(config: Config, process_group: ProcessGroup) -> torch.device:
    """Return the device that a rank of this training runs on.

    Raises:
        ConfigError: if this machine has no such device.
    """
    key = "training.device"
    device = pick_device(process_group.device_name(config.training.device, key), key)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # torch.cuda.get_rng_state() reads the current device
    return device


def compile_layers(
    model: Transformer, device: torch.device, config: Config, process_group: ProcessGroup
) -> bool:
    """Compile the layers if the config enables it; return whether they are compiled.

    Requires a GPU, triton, and unsharded parameters (no fsdp).
    """
    settings = config.training
    is_sharded = process_group.size > 1 and settings.parallel == "fsdp"
    if device.type != "cuda" or not settings.compile or is_sharded:
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    import torch._dynamo.config as compiler
    import torch._functorch.config as lowering

    compiler.suppress_errors = True  # a layer that does not compile runs eagerly
    if hasattr(
        lowering, "force_non_lazy_backward_lowering"
    ):  # lazy lowering raises too late for suppress_errors
        lowering.force_non_lazy_backward_lowering = True
    compiler.recompile_limit = max(_RECOMPILE_LIMIT, compiler.recompile_limit)
    model.compile_layers()
    return True


def uncompiled(is_compiled: bool) -> AbstractContextManager[object]:
    """Run compiled layers eagerly in this context, so that rare shapes trigger no compilation."""
    if not is_compiled:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
