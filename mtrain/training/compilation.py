"""The device of a rank, and torch.compile for models that are trained on a GPU."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from mtrain.config.sections import Config, TrainingConfig
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


class _Fallbacks(logging.Filter):
    """Replaces all compiler warnings about code that runs eagerly by a single message."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self.say, self.has_said = say, False

    def filter(self, record: logging.LogRecord) -> bool:
        """Report the first warning through `say`; drop all of them."""
        if record.levelno < logging.WARNING:
            return True
        if not self.has_said:
            error = record.exc_info[1] if record.exc_info else None
            reason = " ".join(str(error or record.getMessage()).split("\n\n")[0].split())
            self.say(f"compile  a part of a layer runs uncompiled, and slower: {reason:.300}")
        self.has_said = True
        return False


def compile_layers(
    model: Transformer,
    device: torch.device,
    config: TrainingConfig,
    process_group: ProcessGroup,
    say: Callable[[str], None],
) -> bool:
    """Compile the layers if the config enables it; return whether they are compiled.

    Requires a GPU, triton, and unsharded parameters. If one of the last two is missing, `say` gets
    the reason; a CPU needs none, because the key is true by default.
    """
    if not config.compile or device.type != "cuda":
        return False
    missing = ""
    if process_group.size > 1 and config.parallel == "fsdp":
        missing = "`training.parallel: ddp`"
    elif importlib.util.find_spec("triton") is None:
        missing = "triton, which is not installed"
    if missing:
        say(f"compile  nothing, because it needs {missing}")
        return False
    import torch._dynamo.config as compiler
    import torch._functorch.config as lowering

    compiler.suppress_errors = True  # a layer that does not compile runs eagerly
    # lazy lowering raises too late for suppress_errors
    if hasattr(lowering, "force_non_lazy_backward_lowering"):
        lowering.force_non_lazy_backward_lowering = True
    compiler.recompile_limit = max(_RECOMPILE_LIMIT, compiler.recompile_limit)
    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.filters[:] = [item for item in logger.filters if not isinstance(item, _Fallbacks)]
    logger.addFilter(_Fallbacks(say))
    warnings.filterwarnings("ignore", module=r"torch\._inductor\.")  # hints for its developers
    model.compile_layers()
    return True


def uncompiled(is_compiled: bool) -> AbstractContextManager[object]:
    """Run compiled layers eagerly in this context, so that rare shapes trigger no compilation."""
    if not is_compiled:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
