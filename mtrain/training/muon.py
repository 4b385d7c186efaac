"""Muon for the weights of linear maps: momentum, made orthogonal by Newton-Schulz iterations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.model.transformer import Transformer
from mtrain.training.optimizer import UncompiledOptimizer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_EPS = 1e-7


def linear_weights(model: Transformer) -> list[Tensor]:
    """Return the weights of linear maps, except the output projection, which is an embedding."""
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not model.output
    ]


class BatchedMuon(UncompiledOptimizer):
    """`torch.optim.Muon` with `match_rms_adamw`, on all matrices of one shape together.

    Args:
        matrices: the parameters.
        weight_decay: decoupled, as in AdamW.
        momentum: the coefficient of Nesterov momentum.

    Attributes:
        found_inf: scalar, 1 to skip the update and 0 to make it, as in PyTorch's fused optimizers;
            None makes it.
    """

    def __init__(
        self, matrices: Iterable[Tensor], weight_decay: float, momentum: float = 0.95
    ) -> None:
        defaults = {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(matrices, defaults)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the matrices; there is no closure."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(matrix.shape, []).append(matrix)
            for matrices in by_shape.values():
                self._step_together(matrices, group)

    def _step_together(self, matrices: list[Tensor], group: Mapping[str, Any]) -> None:
        """Update N matrices of shape [A, B]."""
        lr, factor = group["lr"], 1.0 if self.found_inf is None else 1 - self.found_inf
        momenta_NAB = torch.empty(
            (len(matrices), *matrices[0].shape), dtype=torch.bfloat16, device=matrices[0].device
        )
        for matrix, momentum_AB in zip(matrices, momenta_NAB, strict=True):
            state, grad = self.state[matrix], matrix.grad
            assert grad is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            buffer = state["momentum_buffer"]
            if self.found_inf is not None:
                grad = torch.where(self.found_inf.bool(), buffer, grad)
            buffer.lerp_(grad, 1 - group["momentum"])
            momentum_AB.copy_(grad.lerp(buffer, group["momentum"]))
        # by match_rms_adamw
        step_size = lr * 0.2 * math.sqrt(max(matrices[0].shape)) * factor
        for matrix, update_AB in zip(matrices, orthogonalised(momenta_NAB), strict=True):
            if group["weight_decay"]:
                matrix.mul_(1 - lr * group["weight_decay"] * factor)
            matrix.sub_(update_AB.to(matrix.dtype) * step_size)


def orthogonalised(matrix_NAB: Tensor) -> Tensor:
    """Return N matrices [A, B] with all singular values moved to about 1, in bfloat16."""
    a, b, c = _COEFFICIENTS
    x_NAB = matrix_NAB.bfloat16()
    x_NAB = x_NAB / x_NAB.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    is_tall = x_NAB.shape[-2] > x_NAB.shape[-1]
    for _ in range(_NUM_ITERATIONS):
        gram = x_NAB.mT @ x_NAB if is_tall else x_NAB @ x_NAB.mT  # of the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        left, right = (x_NAB, polynomial) if is_tall else (polynomial, x_NAB)
        x_NAB = torch.baddbmm(x_NAB, left, right, beta=a)
    return x_NAB
