"""Build a model, and load the trained weights of a run folder into it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mtrain.config.sections import ModelConfig
from mtrain.errors import ConfigError, RunError
from mtrain.model.transformer import Transformer, count_weights
from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE, ProcessGroup
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

_DRAWING = (  # the functions that draw the initial weights of layers and of the Transformer
    nn.init.kaiming_uniform_,
    nn.init.normal_,
    nn.init.uniform_,
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
)


@dataclass(frozen=True)
class LoadOptions:
    """How models are loaded.

    With the precisions bfloat16 and int8, the key-value cache is in bfloat16. On a GPU, bfloat16
    also applies to activations, and int8 is an error.
    """

    device: str = "auto"  # or cpu, cuda, ...
    # of matrix products; `auto` is float32
    precision: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    step: int | None = None  # of a checkpoint to load instead of the final weights
    process_group: ProcessGroup = SINGLE  # shares the work, each rank on a device of its own
    reverse: RunDir | None = None  # a run of the other direction, to rank hypotheses with

    @property
    def products(self) -> Literal["float32", "bfloat16", "int8"]:
        """The precision of matrix products; `auto` is resolved."""
        return "float32" if self.precision == "auto" else self.precision


@torch.inference_mode(False)  # inference tensors have no version, which packed weights need
def load_model(
    run: RunDir, vocabulary: Tokenizer, loading: LoadOptions, device: torch.device
) -> Transformer:
    """Return a run's trained model on `device`, ready to translate.

    Raises:
        RunError: if the weights are missing, damaged, or do not fit the config or the tokenizer.
        ConfigError: if the weights exceed this machine's memory, or the device does not support the
            precision.
    """
    if loading.precision == "int8" and device.type != "cpu":
        raise ConfigError(f"`precision` int8 must be on a CPU, but the device is {device} instead.")
    path = weights_path(run, loading.step)
    weights = checkpoint.load_model(path, vocabulary.fingerprint())
    num_stored = sum(tensor.numel() for tensor in weights.values())
    num_needed = count_weights(run.config.model, len(vocabulary.src), len(vocabulary.tgt))
    if num_needed > num_stored:  # checked before a wrong config makes `build_model` allocate memory
        raise RunError(
            f"{path}: `model` of config.yaml asks for {num_needed:,} weights, but it holds "
            f"{num_stored:,} instead; restore the run's own config.yaml."
        )
    model = model_with_weights(run.config.model, vocabulary, weights, path)
    model.to(device).eval()
    if device.type == "cpu":
        model.pack_weights(loading.products)
    elif loading.products == "bfloat16":
        model.compute_dtype = torch.bfloat16
    return model


class _WithoutDrawing(TorchFunctionMode):
    """Skips random initialisation: the functions of `_DRAWING` leave their tensor as it is."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func in _DRAWING:
            return args[0] if args else keywords["tensor"]
        return func(*args, **keywords)


def check_weights(run: RunDir, step: int | None) -> None:
    """Check that a run has weights of its tokenizer, final ones or those of a step, unread.

    Raises:
        RunError: if not.
    """
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    checkpoint.check_header(weights_path(run, step), tokenizer.fingerprint())


def weights_path(run: RunDir, step: int | None) -> Path:
    """Return the path of a run's final weights, or of those of a checkpoint.

    Raises:
        RunError: if there are none.
    """
    if step is None:
        if not run.model_path.is_file() and (saved := checkpoint.steps(run.checkpoints_dir)):
            raise RunError(
                f"{run.model_path}: is missing until the training ends; `mtrain train CONFIG` goes "
                f"on with it, and `mtrain translate --checkpoint {max(saved)}` takes the weights "
                "so far."
            )
        return run.model_path
    saved = checkpoint.steps(run.checkpoints_dir)
    if step not in saved:
        steps = f"those of {', '.join(map(str, saved))}" if saved else "none"  # as an option has it
        raise RunError(
            f"{run.path}: must have a checkpoint of step {step}, but has {steps} instead."
        )
    return saved[step] / "model.safetensors"


def build_model(config: ModelConfig, vocabulary: Tokenizer) -> Transformer:
    """Return an untrained model for these vocabularies.

    Raises:
        ConfigError: if the weights exceed this machine's memory.
    """
    num_src, num_tgt = len(vocabulary.src), len(vocabulary.tgt)
    needed_bytes = 4 * count_weights(config, num_src, num_tgt)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > memory_bytes:
        raise ConfigError(
            f"`model` must fit into this machine's memory of {memory_bytes / 2**30:,.1f} GiB, but "
            f"its weights need {needed_bytes / 2**30:,.1f} GiB."
        )
    return Transformer(config, num_src, num_tgt)


def model_with_weights(
    config: ModelConfig, vocabulary: Tokenizer, weights: Mapping[str, Tensor], path: Path
) -> Transformer:
    """Return a model with weights that were read from `path`; no random numbers are drawn.

    Raises:
        ConfigError: as `build_model` does.
        RunError: as `set_weights` does.
    """
    with _WithoutDrawing():
        model = build_model(config, vocabulary)
    set_weights(model, weights, path)
    return model


def set_weights(
    model: Transformer,
    weights: Mapping[str, Tensor],
    path: Path,
    process_group: ProcessGroup = SINGLE,
) -> None:
    """Fill `model` with weights that were read from `path`; tied weights were stored once.

    Raises:
        RunError: if the weights are those of another model.
    """
    named = dict(model.named_parameters())
    if unused := sorted(weights.keys() - named.keys()):
        raise RunError(
            f"{path}: must hold the weights of the model that config.yaml asks for, but also holds "
            f"`{unused[0]}`; restore the run's own config.yaml."
        )
    for name, parameter in named.items():
        tensor = weights.get(name)
        if tensor is None or tensor.shape != parameter.shape:
            actual = tuple(tensor.shape) if tensor is not None else "missing"
            raise RunError(
                f"{path}: `{name}` must have the shape {tuple(parameter.shape)} that config.yaml "
                f"asks for, but is {actual} instead; restore the run's own config.yaml."
            )
        if not tensor.is_floating_point():
            raise RunError(
                f"{path}: `{name}` must hold floating-point numbers, but holds "
                f"{tensor.dtype} instead."
            )
        with torch.no_grad():
            parameter.copy_(process_group.distribute_like(tensor, parameter))
