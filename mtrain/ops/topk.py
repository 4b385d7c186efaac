"""The projection onto a vocabulary, and its most probable tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.ops.cross_entropy import Formula, plain_cross_entropy
from mtrain.ops.linear import Linear, matmul_sizes, pack_panels
from mtrain.ops.native import functions_for


class Projection(Linear):
    """A linear map onto a vocabulary, of which the likeliest pieces may be all that is wanted.

    Attributes:
        cross_entropy: the formula of the loss of its logits.
    """

    _rounded: _Rounded | None = None

    def __init__(self, num_features: int, num_pieces: int) -> None:
        super().__init__(num_features, num_pieces, bias=False)
        self.cross_entropy: Formula = plain_cross_entropy

    def lay_out(self) -> None:
        """Lay out a copy of the weights, and one in bfloat16 where that multiplies faster."""
        super().lay_out()
        short = self.weight.detach().bfloat16()
        functions = functions_for(short, is_training=True)
        self._rounded = None
        if functions is None or not functions.multiply() or self.in_features % 2:
            return
        margins_V = self.weight.detach().norm(dim=1) * _rounding(self.in_features)
        if margins_V.isfinite().all():
            panels = pack_panels(short.view(torch.int32), functions)
            self._rounded = _Rounded(panels, margins_V)

    def logits(self, states_ND: Tensor) -> Logits:
        """Return logits [N, V] in the type of the weights; `LazyLogits` if those are laid out."""
        panels = self._panels_for(states_ND)
        if panels is None:
            logits_NV: Tensor = self(states_ND).to(self.weight.dtype)
            return logits_NV
        return LazyLogits(states_ND.contiguous(), self, panels, self._rounded)


class _Rounded(NamedTuple):
    """Weights in bfloat16, as compiled functions read them.

    Attributes:
        panels: the weights.
        margins_V: how far the product of such a row and a state in bfloat16 may be from the exact
            one, for a state of length 1.
    """

    panels: Tensor
    margins_V: Tensor


def _rounding(num_features: int) -> float:
    """Return how far a sum of rounded products may be from the exact one, as a share.

    The share is of the product of both lengths. A number in bfloat16 is at most 2^-8 of itself
    away from what was rounded, and each sum in float 2^-24; a little is added for the lengths.
    """
    return 1.001 * (2**-7 + 2**-16 + (num_features + 2) * 2**-23)


@dataclass(frozen=True)
class LazyLogits:
    """Logits [N, V] that are multiplied out where they are asked for: `logits[rows]`."""

    states_ND: Tensor
    projection: Projection
    panels: Tensor
    rounded: _Rounded | None

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Return the logits of some rows."""
        logits: Tensor = self.projection(self.states_ND[rows])
        return logits


Logits = Tensor | LazyLogits


class TopTokens(NamedTuple):
    """The best pieces of each row, best first, and their log-probabilities."""

    ids_NC: Tensor
    log_prob_NC: Tensor


def top_tokens(logits_NV: Logits, never: list[int], count: int) -> TopTokens:
    """Return the `count` likeliest pieces of each row, apart from those that are never written.

    The log-probabilities are over the whole vocabulary, those never written too.
    """
    inputs: tuple[Tensor, ...]
    if isinstance(logits_NV, LazyLogits):
        name, inputs = "project_top_pieces", (logits_NV.states_ND, logits_NV.panels)
        sizes = (*logits_NV.states_ND.shape, logits_NV.projection.out_features)
    else:
        name, inputs, sizes = "top_pieces", (logits_NV.contiguous(),), logits_NV.shape
    count = min(count, sizes[-1] - len(never))
    functions = functions_for(inputs[0]) if count else None  # compiled, they look at the best
    if functions is not None:
        banned = torch.tensor(never, dtype=torch.int64)
        ids_NC = banned.new_empty((sizes[0], count))
        log_prob_NC = torch.empty((sizes[0], count))
        tensors = (*inputs, banned, ids_NC, log_prob_NC)
        functions.call(name, tensors, *sizes, len(never), count)
        return TopTokens(ids_NC, log_prob_NC)
    logits_NV = logits_NV[:]
    log_total_N1 = logits_NV.logsumexp(-1, keepdim=True)
    allowed_NV = logits_NV.clone()
    for index in never:  # a list of them would be copied to a GPU, which waits
        allowed_NV[:, index] = -torch.inf
    top_NC, ids_NC = allowed_NV.topk(count, dim=-1)
    return TopTokens(ids_NC, top_NC - log_total_N1)


def argmax_tokens(logits_NV: Logits, never: list[int]) -> Tensor:
    """Return the likeliest piece [N, 1] of each row, apart from those that are never written.

    It is -1 where there is none, as the logits are no numbers.
    """
    if isinstance(logits_NV, LazyLogits) and logits_NV.rounded is not None:
        states_ND, weight_VD = logits_NV.states_ND, logits_NV.projection.weight
        functions = functions_for(states_ND)
        if functions is not None and weight_VD.is_contiguous():
            banned = torch.tensor(never, dtype=torch.int64)
            ids_N1 = banned.new_empty((len(states_ND), 1))
            tensors = (states_ND, weight_VD, *logits_NV.rounded, banned, ids_N1)
            functions.call(
                "project_likeliest", tensors, *matmul_sizes(states_ND, weight_VD), len(never)
            )
            return ids_N1
    top = top_tokens(logits_NV, never, 1)
    return torch.where(top.log_prob_NC.isfinite(), top.ids_NC, -1)
