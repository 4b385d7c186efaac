"""Adam and Muon without the import of PyTorch's compiler, which takes a second."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mtrain.model.transformer import Transformer
from mtrain.runtime.device import compute_dtype

# ax + bx^3 + cx^5, an iteration of Muon each: the nearest to 1 on the interval of the singular
# values, which is [0.01, 1] at first, and [0.003, 1] for larger matrices, whose values are smaller
# beside their norm (Polar Express, Amsel et al. 2025, arXiv 2505.16932)
_POLYNOMIALS = (
    (8.0934, -23.6204, 17.4462),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
)
_POLYNOMIALS_OF_LARGER = (
    (8.3837, -24.7659, 18.3571),
    (4.0434, -3.0114, 0.5695),
    (3.5056, -2.6267, 0.5257),
    (2.4901, -1.8343, 0.4368),
)
_LARGER = 128  # the shorter side is longer than this
_MARGIN = 1.02  # above 1 the polynomials grow fast: rounding in bfloat16 must not lead there
_EPS = 1e-7
_MOMENTUM = 0.95  # of Muon, in Nesterov's form


class UncompiledOptimizer(Optimizer):
    """An optimizer that is never compiled.

    PyTorch decorates some methods of `Optimizer` with a wrapper that imports `torch._dynamo`; these
    are the undecorated methods.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class Adam(UncompiledOptimizer, AdamW):
    """`torch.optim.AdamW`; it equals Adam if `weight_decay` is 0."""

    step = torch.no_grad()(inspect.unwrap(AdamW.step))


def linear_weights(model: Transformer) -> list[Tensor]:
    """Return the weights of linear maps, except the output projection, which is an embedding."""
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not model.output
    ]


class BatchedMuon(UncompiledOptimizer):
    """`torch.optim.Muon` with `match_rms_adamw`, on all matrices of one shape together.

    It updates by momentum, made orthogonal by three or four iterations instead of PyTorch's five.

    Attributes:
        found_inf: scalar, 1 to skip the update and 0 to make it, as in PyTorch's fused optimizers;
            None makes it. On a CPU it is read, so that a skipped update costs nothing.
    """

    def __init__(self, matrices: Iterable[Tensor], weight_decay: float) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for matrix in group["params"]:  # now, because a checkpoint may follow a skipped update
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the matrices; there is no closure."""
        found_inf = self.found_inf
        if found_inf is not None and found_inf.device.type == "cpu":  # a GPU would synchronise
            if found_inf:
                return
            found_inf = None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(matrix.shape, []).append(matrix)
            for matrices in by_shape.values():
                self.step_together(matrices, group, found_inf)

    @torch.no_grad()
    def step_together(
        self, matrices: list[Tensor], group: Mapping[str, Any], found_inf: Tensor | None
    ) -> None:
        """Update N matrices of shape [A, B] in few operations, because a GPU must launch each.

        The gradients may be overwritten.

        Args:
            matrices: on one device, with a gradient.
            group: their parameter group.
            found_inf: as the attribute; it is not read, so that a GPU is not synchronised.
        """
        lr, factor = group["lr"], 1.0 if found_inf is None else 1 - found_inf
        grads = [matrix.grad for matrix in matrices if matrix.grad is not None]
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        if found_inf is not None:
            stacks = torch.stack(buffers), torch.stack(grads)
            grads = list(torch.where(found_inf.bool(), *stacks))
        torch._foreach_lerp_(buffers, grads, 1 - _MOMENTUM)
        torch._foreach_lerp_(grads, buffers, _MOMENTUM)
        dtype = compute_dtype("auto", grads[0].device)  # bfloat16 where it is the faster one
        momenta_NAB = grads[0].new_empty((len(grads), *grads[0].shape), dtype=dtype)
        torch._foreach_copy_(list(momenta_NAB), grads)
        # match_rms_adamw (Liu et al. 2025, arXiv 2502.16982)
        step_size = lr * 0.2 * math.sqrt(max(matrices[0].shape)) * factor
        updates_NAB = orthogonalised(momenta_NAB).to(matrices[0].dtype) * step_size
        if group["weight_decay"]:
            torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"] * factor)
        torch._foreach_sub_(matrices, list(updates_NAB))


def orthogonalised(matrix_NAB: Tensor) -> Tensor:
    """Return N matrices [A, B] with all singular values moved to about 1."""
    norm_N11: Tensor = matrix_NAB.norm(dim=(-2, -1), keepdim=True)
    x_NAB = matrix_NAB / (_MARGIN * norm_N11).clamp(min=_EPS)
    is_tall = x_NAB.shape[-2] > x_NAB.shape[-1]
    is_larger = min(x_NAB.shape[-2:]) > _LARGER
    for a, b, c in _POLYNOMIALS_OF_LARGER if is_larger else _POLYNOMIALS:
        gram = x_NAB.mT @ x_NAB if is_tall else x_NAB @ x_NAB.mT  # of the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        left, right = (x_NAB, polynomial) if is_tall else (polynomial, x_NAB)
        x_NAB = torch.baddbmm(x_NAB, left, right, beta=a)
    return x_NAB
