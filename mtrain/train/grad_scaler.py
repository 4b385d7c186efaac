"""The factor by which a loss is multiplied where float16 would lose small gradients.

"Mixed Precision Training" (arXiv 1710.03740), section 3.2: the factor is halved when a gradient is
no longer finite, and doubled when that has not happened for long. It is a power of two, so that no
number is rounded by it. Knows what a checkpoint remembers, and nothing of updates.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mtrain.run.checkpoint import Progress

_FIRST, _MOST = 2.0**16, 2.0**24
_LONG = 2000  # updates


def begin(progress: Progress, dtype: torch.dtype) -> None:
    """Scale from the next update on if products are float16, and not otherwise."""
    progress.loss_scale = (progress.loss_scale or _FIRST) if dtype is torch.float16 else 0.0


def factor(progress: Progress) -> float:
    """Return by what the loss is multiplied; 1 if it is not scaled."""
    return progress.loss_scale or 1.0


def undo(progress: Progress, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Divide the gradients of a scaled loss by its factor."""
    if progress.loss_scale:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= progress.loss_scale


def adapt(progress: Progress, is_finite: bool) -> None:
    """Choose the factor of the next update, given whether this one's gradient was finite."""
    if not progress.loss_scale:
        return
    progress.num_scaled_well = progress.num_scaled_well + 1 if is_finite else 0
    if not is_finite:
        progress.loss_scale = max(1.0, progress.loss_scale / 2)
    elif progress.num_scaled_well == _LONG:
        progress.loss_scale, progress.num_scaled_well = min(_MOST, 2 * progress.loss_scale), 0
