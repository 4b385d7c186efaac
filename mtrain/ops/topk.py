"""The projection onto a vocabulary, and the most probable tokens under it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.ops.consistency import ConsistencyFormula, plain_consistency
from mtrain.ops.cross_entropy import Formula, plain_cross_entropy
from mtrain.ops.linear import Bf16Weights, Linear, PackedWeights, matmul_sizes, pack_rows
from mtrain.ops.native import functions_for, is_bare


class Projection(Linear):
    """A linear map without a bias onto a vocabulary.

    Attributes:
        cross_entropy: the formula of the loss of its logits.
        consistency: the same with the divergence from the logits of a second pass.
    """

    def __init__(self, num_features: int, num_tokens: int) -> None:
        super().__init__(num_features, num_tokens, bias=False)
        self.cross_entropy: Formula = plain_cross_entropy
        self.consistency: ConsistencyFormula = plain_consistency

    def pack_weights(self) -> None:
        """Store a packed copy of the weights, and one in bfloat16 where that multiplies faster."""
        super().pack_weights()
        bf16_VD = self.weight.detach().bfloat16()
        functions = functions_for(bf16_VD, is_training=True)
        if self._packed is None or functions is None or self.in_features % 2:
            return
        if not functions.has_fast_matmul():
            return
        margins_V = self.weight.detach().norm(dim=1) * _relative_error(self.in_features)
        if margins_V.isfinite().all():
            pairs = pack_rows(bf16_VD.view(torch.int32), functions)
            self._packed.bf16 = Bf16Weights(pairs, margins_V)

    def packed_for_search(self, states_ND: Tensor) -> PackedWeights | None:
        """Return the packed weights if such states are multiplied by them, and by nothing else."""
        return self._packed_for(states_ND) if is_bare(self) else None

    def logits(self, states_ND: Tensor) -> Logits:
        """Return logits [N, V] in the dtype of the weights; `LazyLogits` if those are packed."""
        packed = self.packed_for_search(states_ND)
        if packed is None or states_ND.dim() != 2:
            logits_NV: Tensor = self(states_ND).to(self.weight.dtype)
            return logits_NV
        return LazyLogits(states_ND.contiguous(), self, packed)


def _relative_error(num_features: int) -> float:
    """Return a bound of |rounded product - exact product| / (|state| |weight|) in bfloat16.

    Rounding to bfloat16 changes a number by at most 2^-8 of it, and each addition in float32 by
    2^-24; the factor allows for the rounding of both lengths.
    """
    return 1.001 * (2**-7 + 2**-16 + (num_features + 2) * 2**-23)


@dataclass(frozen=True)
class LazyLogits:
    """Logits [N, V] that are computed only where they are read: `logits[rows]`.

    `top_tokens` and `argmax_tokens` search them without holding them in memory.
    """

    states_ND: Tensor
    projection: Projection
    packed: PackedWeights

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Return the logits [rows, V] of some rows."""
        logits: Tensor = self.projection(self.states_ND[rows])
        return logits


Logits = Tensor | LazyLogits


class TopTokens(NamedTuple):
    """The C best tokens of each row, best first, and their log-probabilities."""

    ids_NC: Tensor
    log_prob_NC: Tensor


def top_tokens(logits_NV: Logits, never: list[int], count: int) -> TopTokens:
    """Return the `count` most probable tokens of each row, except those in `never`.

    Equals `logits.log_softmax(-1)`, then `topk` without the columns in `never`, which count in the
    softmax. There are fewer columns than `count` if the vocabulary has fewer tokens.
    """
    inputs: tuple[Tensor, ...]
    if isinstance(logits_NV, LazyLogits):
        name, inputs = "packed_topk", (logits_NV.states_ND, logits_NV.packed.tiles)
        sizes = (*logits_NV.states_ND.shape, logits_NV.projection.out_features)
    else:
        name, inputs, sizes = "topk", (logits_NV.contiguous(),), logits_NV.shape
    count = min(count, sizes[-1] - len(never))
    functions = functions_for(inputs[0])
    is_matrix = inputs[0].dim() == 2
    if functions is not None and is_matrix and count > 0 and _are_ids(never, sizes[-1]):
        never_ids = ids_tensor(*never)
        ids_NC = never_ids.new_empty((sizes[0], count))
        log_prob_NC = torch.empty((sizes[0], count))
        tensors = (*inputs, never_ids, ids_NC, log_prob_NC)
        functions.call(name, tensors, *sizes, len(never), count)
        return TopTokens(ids_NC, log_prob_NC)
    logits_NV = logits_NV[:]
    log_total_N1 = logits_NV.logsumexp(-1, keepdim=True)
    allowed_NV = logits_NV.clone()
    for index in never:  # a list of them would be copied to a GPU, which waits
        allowed_NV[..., index] = -torch.inf
    top_NC, ids_NC = allowed_NV.topk(count, dim=-1)
    return TopTokens(ids_NC, top_NC - log_total_N1)


@functools.lru_cache(maxsize=16)
def ids_tensor(*ids: int) -> Tensor:
    """Return a tensor of ids, the same for the same ids."""
    return torch.tensor(ids, dtype=torch.int64)


def _are_ids(ids: list[int], num_tokens: int) -> bool:
    return not ids or 0 <= min(ids) <= max(ids) < num_tokens


def argmax_tokens(logits_NV: Logits, never: list[int]) -> Tensor:
    """Return the most probable token [N, 1] of each row, except those in `never`.

    It is -1 where no logit is finite.
    """
    if isinstance(logits_NV, LazyLogits) and logits_NV.packed.bf16 is not None:
        states_ND, weight_VD = logits_NV.states_ND, logits_NV.projection.weight
        functions = functions_for(states_ND)
        if functions is not None and _are_ids(never, len(weight_VD)):
            never_ids = ids_tensor(*never)
            ids_N1 = never_ids.new_empty((len(states_ND), 1))
            tensors = (states_ND, weight_VD, *logits_NV.packed.bf16, never_ids, ids_N1)
            functions.call(
                "packed_argmax", tensors, *matmul_sizes(states_ND, weight_VD), len(never)
            )
            return ids_N1
    top = top_tokens(logits_NV, never, 1)
    return torch.where(top.log_prob_NC.isfinite(), top.ids_NC, -1)
