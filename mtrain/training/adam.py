"""PyTorch's Adam without the import of PyTorch's compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_NOT_COMPILED = "__dynamo_disable"  # where PyTorch keeps the form of a method that it calls


class Adam(torch.optim.AdamW):
    """`torch.optim.AdamW`, fused; it equals Adam if `weight_decay` is 0.

    Some methods of PyTorch's optimizers import `torch._dynamo`, which takes a second and is of use
    only where they are compiled. These are not.

    Args:
        parameters: what is trained.
        betas, eps, weight_decay: as in `torch.optim.AdamW`.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        leave_uncompiled()
        super().__init__(parameters, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters; there is no closure."""
        inspect.unwrap(torch.optim.AdamW.step)(self)


def leave_uncompiled() -> None:
    """Let the methods of all optimizers that the compiler must not enter do without its import."""
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        if not hasattr(method, _NOT_COMPILED):
            setattr(method, _NOT_COMPILED, method)
