"""Output projection and label-smoothed cross-entropy, without the logits of a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mtrain.ops.linear import functions_for_linear, matmul_sizes, pad_rows
from mtrain.ops.native import check_same_device, differentiable_once, functions_for

_CHUNK_TOKENS = 512  # whose logits are in memory at one time, on a CPU
Formula = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]


class ProjectedCrossEntropy(torch.autograd.Function):
    """Output projection and label-smoothed cross-entropy, computed in chunks of tokens.

    `apply(states_ND, weight_VD, targets_N, smoothing, formula)` returns (loss, nll), the sums over
    the N tokens in float64 that `F.cross_entropy(states @ weight.T, targets, label_smoothing,
    reduction="sum")` gives with and without smoothing; only the loss has a gradient. Products run
    in the dtype of the states. The gradient is computed in the forward pass, so that the logits
    [N, V] are never stored. `formula` is used instead of `plain_cross_entropy` if it is given, for
    example a compiled one.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        smoothing: float,
        formula: Formula | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_arguments(states, weight, targets, smoothing)
        sums = torch.zeros(2, dtype=torch.float64, device=states.device)
        with_grad = any(ctx.needs_input_grad)
        grads = _projected(states, weight, targets, smoothing, with_grad, sums, formula)
        ctx.save_for_backward(*grads)
        loss, nll = sums[0], sums[1]
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @differentiable_once
    def backward(  # noqa: D102
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        grad_states, grad_weight = ctx.saved_tensors
        factor = grad.to(grad_weight.dtype)  # a scalar tensor does not promote the states' dtype
        return grad_states * factor, grad_weight * factor, None, None, None


def check_arguments(states: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> None:
    """Raise ValueError or RuntimeError, as PyTorch does, for arguments that do not fit together."""
    if states.dim() != 2 or targets.shape != states.shape[:1]:
        raise ValueError(
            f"targets must be one for each of the states, {tuple(states.shape)}, but are "
            f"{tuple(targets.shape)} instead."
        )
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must be between 0 and 1, but is {smoothing} instead.")
    if targets.dtype != torch.int64:
        raise RuntimeError(f"targets must be int64, but are {targets.dtype} instead.")
    check_same_device(states, weight, targets)


def chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of `rows` [N, ...] to project at one time; they are longer on a GPU."""
    size = _CHUNK_TOKENS if rows.device.type == "cpu" else 16 * _CHUNK_TOKENS
    return (slice(start, start + size) for start in range(0, len(rows), size))


def _projected(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    smoothing: float,
    with_grad: bool,
    sums: Tensor,
    formula: Formula | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Add loss and nll to `sums`; return the gradients of states and weight, if `with_grad`."""
    functions = functions_for_linear(states, weight, any_threads=with_grad)
    if functions is not None:
        states, weight = states.contiguous(), weight.contiguous()
        grads = (torch.empty_like(states), torch.empty_like(weight)) if with_grad else (None, None)
        tensors = (states, weight, targets.contiguous(), *grads)
        sizes = matmul_sizes(states, weight)
        functions.call("projected_cross_entropy", tensors, *sizes, smoothing, sums.data_ptr())
        return grads
    rows = pad_rows(states) if states.dtype == torch.bfloat16 else states
    cast_weight = weight.to(states.dtype)
    grad_rows = torch.empty_like(rows) if with_grad else None
    grad_weight = torch.zeros_like(weight) if with_grad else None
    for chunk in chunks(rows):
        logits = torch.mm(rows[chunk], cast_weight.t())
        chunk_targets = targets[chunk]
        chunk_logits = logits[: len(chunk_targets)]  # without the padded rows
        _cross_entropy(chunk_logits, chunk_targets, smoothing, with_grad, sums, formula)
        if grad_rows is not None and grad_weight is not None:
            torch.mm(logits, cast_weight, out=grad_rows[chunk])
            grad_weight += torch.mm(logits.t(), rows[chunk])
    return grad_rows[: len(states)] if grad_rows is not None else None, grad_weight


def _cross_entropy(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    with_grad: bool,
    sums: Tensor,
    formula: Formula | None = None,
) -> None:
    """Add loss and nll to `sums`; overwrite logits [N, V] with their gradient, if `with_grad`."""
    functions = functions_for(logits, any_threads=with_grad)
    if functions is not None:
        tensors = (logits, targets.contiguous())
        shape = (*logits.shape, logits.stride(0), smoothing, int(with_grad))
        functions.call("cross_entropy", tensors, *shape, sums.data_ptr())
        return
    chunk_sums, grad = (formula or plain_cross_entropy)(logits, targets, smoothing, with_grad)
    sums += chunk_sums
    if grad is not None:
        logits.copy_(grad)


def plain_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sums (loss, nll) over logits [N, V], and the gradient of the loss [N, V]."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    targets_N1 = targets[:, None]
    log_probs = wide.log_softmax(-1)
    nll = -log_probs.gather(-1, targets_N1).sum()
    uniform = -log_probs.mean(-1).sum()
    sums = torch.stack([(1 - smoothing) * nll + smoothing * uniform, nll])
    if not with_grad:
        return sums, None
    grad = log_probs.exp_().sub_(smoothing / logits.shape[1])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets_N1
    return sums, grad.add_(is_target, alpha=smoothing - 1).to(logits.dtype)
