"""What a checkpoint keeps beside the weights: Adam's moments and the state of random numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from mtrain.errors import RunError
from mtrain.run.checkpoint import Weights
from mtrain.runtime.process_group import SINGLE, ProcessGroup

_ADAM = ("step", "exp_avg", "exp_avg_sq")  # what it keeps of each parameter


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, process_group: ProcessGroup = SINGLE
) -> Weights:
    """Return what the optimizer remembers of each parameter, whole."""
    return {
        f"{key}.{name}": process_group.full_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def check_optimizer(model: torch.nn.Module, tensors: Weights, path: Path) -> None:
    """Refuse the state of another optimizer, or of another model's.

    Raises:
        RunError: if it is one.
    """
    for name, parameter in model.named_parameters():
        for key in _ADAM:
            found = tensors.get(f"{key}.{name}")
            wanted = torch.Size() if key == "step" else parameter.shape
            if found is None or found.shape != wanted or found.dtype != parameter.dtype:
                raise RunError(
                    f"{path / 'optimizer.safetensors'}: `{key}.{name}` must be "
                    f"{parameter.dtype} in the shape {tuple(wanted)}, but is not."
                )


def set_optimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    tensors: Weights,
    process_group: ProcessGroup = SINGLE,
) -> None:
    """Let the optimizer remember what it did when a checkpoint was saved."""
    for name, parameter in model.named_parameters():
        for key in _ADAM:
            value = tensors[f"{key}.{name}"]
            is_alike = key != "step"  # which is one number
            optimizer.state[parameter][key] = (
                process_group.distribute_like(value, parameter)
                if is_alike
                else value.to(parameter.device)
            )


def random_state() -> Weights:
    """Return the state of PyTorch's random numbers."""
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(tensors: Weights) -> None:
    """Go on with the random numbers that follow a state."""
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])


def restore_random_state(tensors: Weights, path: Path) -> None:
    """Go on with the random numbers that follow the state of a checkpoint.

    Raises:
        RunError: if it holds no such state.
    """
    try:
        set_random_state(tensors)
    except (KeyError, RuntimeError, TypeError):
        raise RunError(
            f"{path / 'optimizer.safetensors'}: must hold a state of PyTorch's random numbers, "
            "but holds none that this version can take."
        ) from None
