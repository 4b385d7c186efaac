"""Cross-entropy of a forward pass plus its KL divergence from a second, in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtrain.ops.cross_entropy import check_arguments, chunks
from mtrain.ops.native import check_same_device, differentiable_once

ConsistencyFormula = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor, Tensor]]


class ProjectedConsistency(torch.autograd.Function):
    """Label-smoothed cross-entropy of a pass, plus its weighted KL divergence from another pass.

    `apply(states_ND, other_ND, weight_VD, targets_N, smoothing, divergence_weight, formula)`
    returns (loss, nll), sums over the N tokens in float64. With p and q, the softmax of the
    projected states of the first and the other pass, the loss is the cross-entropy of p plus
    `divergence_weight` * sum p * log(p / q); gradients flow through p and q. They are computed in
    the forward pass, chunk by chunk, so that the logits [N, V] are never stored. `formula` is used
    instead of `plain_consistency` if it is given, for example a compiled one.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        states: Tensor,
        other: Tensor,
        weight: Tensor,
        targets: Tensor,
        smoothing: float,
        divergence_weight: float,
        formula: ConsistencyFormula | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_arguments(states, weight, targets, smoothing)
        check_same_device(states, other)
        cast_weight = weight.to(states.dtype)
        sums = torch.zeros(2, dtype=torch.float64, device=states.device)
        grad_states, grad_other = torch.empty_like(states), torch.empty_like(other)
        grad_weight = torch.zeros_like(weight)
        for chunk in chunks(states):
            chunk_sums, grad_logits, grad_other_logits = (formula or plain_consistency)(
                torch.mm(states[chunk], cast_weight.t()),
                torch.mm(other[chunk], cast_weight.t()),
                targets[chunk],
                smoothing,
                divergence_weight,
            )
            sums += chunk_sums
            grad_states[chunk] = torch.mm(grad_logits, cast_weight)
            grad_other[chunk] = torch.mm(grad_other_logits, cast_weight)
            grad_weight += torch.mm(grad_logits.t(), states[chunk])
            grad_weight += torch.mm(grad_other_logits.t(), other[chunk])
        ctx.save_for_backward(grad_states, grad_other, grad_weight)
        loss, nll = sums[0], sums[1]
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @differentiable_once
    def backward(  # noqa: D102
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_states, grad_other, grad_weight = ctx.saved_tensors
        factor = grad.to(grad_weight.dtype)  # a scalar tensor does not promote the states' dtype
        scaled = grad_states * factor, grad_other * factor, grad_weight * factor
        return (*scaled, None, None, None, None)


def plain_consistency(
    logits: Tensor,
    other: Tensor,
    targets: Tensor,
    smoothing: float,
    divergence_weight: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums (loss, nll) over logits [N, V], and the gradients of both passes' logits."""
    dtype = logits.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    log_p, log_q = logits.log_softmax(-1, dtype=wide), other.log_softmax(-1, dtype=wide)
    targets_N1 = targets[:, None]
    nll_N1 = -log_p.gather(-1, targets_N1)
    nll, uniform = nll_N1.sum(), -log_p.mean(-1).sum()
    p, q = log_p.exp(), log_q.exp()
    log_ratio = log_p - log_q
    divergence_N1 = torch.linalg.vecdot(p, log_ratio)[:, None]
    cross_entropy = (1 - smoothing) * nll + smoothing * uniform
    sums = torch.stack([cross_entropy + divergence_weight * divergence_N1.sum(), nll])
    grad_other = (q - p).mul_(divergence_weight)
    grad = log_ratio.sub_(divergence_N1).mul_(divergence_weight).add_(1).mul_(p)
    grad = grad.sub_(smoothing / logits.shape[1])
    grad.scatter_add_(-1, targets_N1, torch.full_like(nll_N1, smoothing - 1))
    return sums, grad.to(dtype), grad_other.to(dtype)
