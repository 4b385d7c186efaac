"""The training state that exact resumption needs, and its conversion to and from checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from mtrain.config.sections import TrainingConfig
from mtrain.errors import RunError
from mtrain.model.transformer import Transformer
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Checkpoint, Progress, Weights
from mtrain.run.load_model import set_weights
from mtrain.runtime.process_group import ProcessGroup
from mtrain.training.gradients import GradScaler
from mtrain.training.meters import RunningMeter
from mtrain.training.optimizer import Adam, BatchedMuon, linear_weights

_ADAM = ("step", "exp_avg", "exp_avg_sq")  # optimizer state of each parameter
_MUON = ("momentum_buffer",)


class TrainingState:
    """The model, which may be sharded, optimizers, progress, loss scale and running sums."""

    def __init__(
        self, model: Transformer, config: TrainingConfig, process_group: ProcessGroup
    ) -> None:
        self.model, self.process_group = model, process_group
        self.parameters = list(model.parameters())
        matrices = linear_weights(model) if config.optimizer == "muon" else []
        self.is_matrix: set[torch.Tensor] = set(matrices)  # for Muon
        adam = Adam(
            [parameter for parameter in self.parameters if parameter not in self.is_matrix],
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.optimizers: list[torch.optim.Optimizer] = [adam]
        if matrices:
            self.optimizers.append(BatchedMuon(matrices, config.weight_decay))
        self.progress = Progress()
        self.grad_scaler = GradScaler(model.compute_dtype)
        self.meter = RunningMeter()

    def is_finite(self) -> bool:
        """Return whether all weights on this rank are finite."""
        return all(
            bool(self.process_group.to_local(weight).isfinite().all()) for weight in self.parameters
        )

    def to_checkpoint(self) -> Checkpoint:
        """Return the state as a `Checkpoint`; all ranks must call it together.

        One tensor is gathered at a time, and only rank 0 keeps it.
        """
        named = dict(self.model.named_parameters())
        weights = self._gathered((name, weight.detach()) for name, weight in named.items())
        optimizer = self._gathered(
            (f"{key}.{name}", value)
            for name, parameter in named.items()
            for key, value in self._optimizer_of(parameter).state[parameter].items()
        )
        scaler, meter = self.grad_scaler, self.meter
        progress = self.progress.model_copy(
            update={
                "loss_scale": scaler.scale if scaler.is_enabled else 0.0,
                "growth_tracker": scaler.growth_tracker,
                "unlogged_loss": meter.loss,
                "unlogged_nll": meter.nll,
                "unlogged_tokens": meter.num_tokens,
            }
        )
        return Checkpoint(weights, optimizer | random_state(), progress)

    def _gathered(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Weights:
        """Return the full tensors on the CPU; an empty dict on ranks other than 0."""
        weights: Weights = {}
        for name, tensor in named_tensors:
            full = self.process_group.full_tensor(tensor)
            if self.process_group.is_first:
                weights[name] = full.cpu()
        return weights

    def from_checkpoint(self, path: Path, fingerprint: str) -> None:
        """Restore the state from a checkpoint folder.

        Raises:
            RunError: if it is missing or damaged, or belongs to another model or tokenizer.
        """
        weights, optimizer, progress = checkpoint.load(path, fingerprint)
        set_weights(self.model, weights, path / "model.safetensors", self.process_group)
        self._restore_optimizer(optimizer, path / "optimizer.safetensors")
        try:
            set_random_state(optimizer)
        except (KeyError, RuntimeError, TypeError):
            raise RunError(
                f"{path / 'optimizer.safetensors'}: must hold a state of PyTorch's random numbers, "
                "but holds none that this version can take."
            ) from None
        self.progress = progress.model_copy(update={"min_bleu": self.progress.min_bleu})
        self.grad_scaler.restore(progress.loss_scale, progress.growth_tracker)
        self.meter.restore(progress.unlogged_loss, progress.unlogged_nll, progress.unlogged_tokens)

    def _optimizer_of(self, parameter: torch.Tensor) -> torch.optim.Optimizer:
        return self.optimizers[parameter in self.is_matrix]

    def _restore_optimizer(self, tensors: Weights, path: Path) -> None:
        """Load the optimizer state, after checking all shapes and dtypes."""
        has_muon_state = any(name.startswith("momentum_buffer.") for name in tensors)
        if has_muon_state != bool(self.is_matrix):
            stored, expected = ("muon", "adam") if has_muon_state else ("adam", "muon")
            raise RunError(
                f"{path}: `training.optimizer` must be {stored!r}, as in this checkpoint, but is "
                f"{expected!r} instead."
            )
        entries = [
            (key, f"{key}.{name}", parameter)
            for name, parameter in self.model.named_parameters()
            for key in (_MUON if parameter in self.is_matrix else _ADAM)
        ]
        for key, name, parameter in entries:
            tensor = tensors.get(name)
            shape = torch.Size() if key == "step" else parameter.shape
            if tensor is None or tensor.shape != shape or tensor.dtype != parameter.dtype:
                raise RunError(
                    f"{path}: `{name}` must be {parameter.dtype} in the shape {tuple(shape)}, but "
                    "is not."
                )
        for key, name, parameter in entries:
            self._optimizer_of(parameter).state[parameter][key] = (
                tensors[name].to(parameter.device)
                if key == "step"  # a scalar, which is not sharded
                else self.process_group.distribute_like(tensors[name], parameter)
            )


def random_state() -> Weights:
    """Return the state of PyTorch's random number generators."""
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(tensors: Weights) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
