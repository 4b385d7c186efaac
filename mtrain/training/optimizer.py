"""PyTorch's optimizers without the import of PyTorch's compiler, which takes a second."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer


class UncompiledOptimizer(Optimizer):
    """An optimizer that is never compiled.

    PyTorch decorates some methods of `Optimizer` with a wrapper that imports `torch._dynamo`; these
    are the undecorated methods.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class Adam(UncompiledOptimizer, AdamW):
    """`torch.optim.AdamW`, fused; it equals Adam if `weight_decay` is 0.

    Args:
        parameters: the parameters to train.
        betas, eps, weight_decay: as in `torch.optim.AdamW`.
    """

    step = torch.no_grad()(inspect.unwrap(AdamW.step))

    def __init__(
        self,
        parameters: Iterable[Tensor],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
