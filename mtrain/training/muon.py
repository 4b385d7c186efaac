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
    """Return the weights of linear maps, without the output projection, an embedding in effect."""
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
        momentum: of Nesterov's kind.

    Attributes:
        found_inf: 1 if an update must change nothing, as for a fused optimizer; else 0.
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
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
            for matrices in by_shape.values():
                self._step_together(matrices, group)

    def _step_together(self, matrices: list[Tensor], group: Mapping[str, Any]) -> None:
        """Update matrices [A, B] or [B, A]; those of more rows than columns are transposed."""
        grads, buffers = [], []
        for matrix in matrices:
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
            buffer = self.state[matrix]["momentum_buffer"]
            assert matrix.grad is not None
            grads.append(_wide(matrix.grad))
            buffers.append(_wide(buffer))
        grad_NAB, buffer_NAB = torch.stack(grads), torch.stack(buffers)
        factor: float | Tensor = 1.0
        if self.found_inf is not None:
            grad_NAB = torch.where(self.found_inf.bool(), buffer_NAB, grad_NAB)
            factor = 1 - self.found_inf
        buffer_NAB.lerp_(grad_NAB, 1 - group["momentum"])
        update_NAB = orthogonalised(grad_NAB.lerp(buffer_NAB, group["momentum"]))
        lr = group["lr"]
        adjusted_lr = lr * 0.2 * math.sqrt(max(matrices[0].shape))
        steps_NAB = update_NAB.to(grad_NAB.dtype) * (adjusted_lr * factor)
        for matrix, buffer, new_AB, step_AB in zip(
            matrices, buffers, buffer_NAB, steps_NAB, strict=True
        ):
            buffer.copy_(new_AB)
            if group["weight_decay"]:
                matrix.mul_(1 - lr * group["weight_decay"] * factor)
            _wide(matrix).sub_(step_AB)


def orthogonalised(matrix_NAB: Tensor) -> Tensor:
    """Map the singular values of N matrices to about 1, in bfloat16; A is at most B."""
    a, b, c = _COEFFICIENTS
    x_NAB = matrix_NAB.bfloat16()
    x_NAB = x_NAB / x_NAB.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_NUM_ITERATIONS):
        gram_NAA = x_NAB @ x_NAB.mT
        polynomial_NAA = torch.baddbmm(gram_NAA, gram_NAA, gram_NAA, beta=b, alpha=c)
        x_NAB = torch.baddbmm(x_NAB, polynomial_NAA, x_NAB, beta=a)
    return x_NAB


def _wide(matrix: Tensor) -> Tensor:
    """Return a view with at least as many columns as rows."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
