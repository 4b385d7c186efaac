"""The projection onto a vocabulary, and the most probable tokens under it."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.ops.consistency import ConsistencyFormula, plain_consistency
from mtrain.ops.cross_entropy import Formula, plain_cross_entropy
from mtrain.ops.linear import Linear, matmul_sizes
from mtrain.ops.native import Functions, functions_for, is_bare
from mtrain.ops.packed_weights import Ints, PackedRows, PackedWeights, Precision, RoundedCopy


class Projection(Linear):
    """A linear map without a bias onto a vocabulary.

    Attributes:
        cross_entropy: computes the loss of its logits; may be replaced by a compiled function.
        consistency: computes the loss with the divergence from the logits of a second pass.
    """

    def __init__(self, num_features: int, num_tokens: int) -> None:
        super().__init__(num_features, num_tokens, bias=False)
        self.cross_entropy: Formula = plain_cross_entropy
        self.consistency: ConsistencyFormula = plain_consistency

    def pack_weights(self, precision: Precision = "float32") -> None:
        """Store a packed copy of the weights, and a second one to find the best token faster.

        Beside a float32 copy, the second one is in int8 or bfloat16, if the processor multiplies
        these faster; the best token is still that of float32.
        """
        super().pack_weights(precision)
        packed = self._packed
        if packed is None or packed.functions is None:
            return
        if packed.precision != "float32":
            packed.scan = RoundedCopy(packed)
        elif packed.functions.has_fast_int8():
            packed.scan = packed.make_scan("int8")
        else:
            bf16_functions = functions_for(torch.empty(1, dtype=torch.bfloat16), any_threads=True)
            if bf16_functions is not None and bf16_functions.has_fast_matmul():
                packed.scan = packed.make_scan("bfloat16")

    def packed_for_search(self, states_ND: Tensor) -> PackedWeights | None:
        """Return the packed weights if they can multiply `states_ND`, and there are no hooks."""
        return self._packed_for(states_ND) if is_bare(self) else None

    def rows(self, ids: Sequence[Ints]) -> list[PackedRows]:
        """Return the rows of each list of tokens, in ascending order, packed as the weights are."""
        if self._packed is None:
            return [PackedRows(ids_C, None, None) for ids_C in ids]
        return self._packed.rows(ids)

    def logits(self, states_ND: Tensor) -> Logits:
        """Return logits [N, V] in the dtype of the weights; `LazyLogits` if weights are packed."""
        packed = self.packed_for_search(states_ND)
        if packed is None or states_ND.dim() != 2:
            logits_NV: Tensor = self(states_ND).to(self.weight.dtype)
            return logits_NV
        return LazyLogits(states_ND.contiguous(), self, packed)

    def log_probs(self, states_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Return the log-probability [N] of one token of each row.

        Logits in float32 are not stored if weights are packed: the best token's log-probability and
        the difference of two logits give that of any token.
        """
        logits = self.logits(states_ND)
        if isinstance(logits, LazyLogits) and logits.packed.precision == "float32":
            top = top_tokens(logits, [], 1)
            weight_ND = self.weight[targets_N] - self.weight[top.ids_NC[:, 0]]
            return (states_ND * weight_ND).sum(-1) + top.log_prob_NC[:, 0]
        logits_NV = logits[:]
        wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        return wide_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0]


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
    structures: tuple[ctypes.Structure, ...] = ()
    if isinstance(logits_NV, LazyLogits):
        name, rows, packed = "packed_topk", logits_NV.states_ND, logits_NV.packed
        sizes = (*rows.shape, len(packed.weight))
        is_packed = packed.tiles is not None
        functions = _functions_without_grad(rows, packed.weight) if is_packed else None
        if functions is not None:
            structures = (packed.map_with(None),)
    else:
        name, rows, sizes = "topk", logits_NV.contiguous(), logits_NV.shape
        functions = _functions_without_grad(rows)
    count = min(count, sizes[-1] - len(never))
    is_matrix = rows.dim() == 2
    if functions is not None and is_matrix and count > 0 and _are_ids(never, sizes[-1]):
        return _compiled_top(functions, name, structures, rows, sizes, never, count)
    logits_NV = logits_NV[:]
    log_total_N1 = logits_NV.logsumexp(-1, keepdim=True)
    allowed_NV = logits_NV.clone()
    for index in never:  # indexing with a list would copy it to a GPU, and synchronise
        allowed_NV[..., index] = -torch.inf
    top_NC, ids_NC = allowed_NV.topk(count, dim=-1)
    return TopTokens(ids_NC, top_NC - log_total_N1)


def top_tokens_of(
    logits_NV: Logits, sentence_N: Sequence[int], shortlists: Sequence[PackedRows], count: int
) -> TopTokens:
    """Return the `count` most probable tokens of each row, among those of its shortlist.

    The softmax is over the shortlist. If it has fewer than `count` tokens, others follow with -inf.

    Args:
        logits_NV: of rows that are sorted by sentence.
        sentence_N: the sentence of each row, an index of `shortlists`.
        shortlists: the ranked tokens of each sentence.
        count: at most V.
    """
    states_ND, functions = None, None
    if isinstance(logits_NV, LazyLogits):
        states_ND = logits_NV.states_ND
        functions = _functions_without_grad(states_ND, logits_NV.packed.weight)
    tops, first = [], 0
    for sentence, rows in itertools.groupby(sentence_N):
        end, ranked = first + len(list(rows)), shortlists[sentence]
        ids_C, row_map = torch.from_numpy(ranked.ids_C), ranked.row_map
        if functions and states_ND is not None and row_map and count <= len(ids_C):
            group_ND, maps = states_ND[first:end], (row_map.map,)
            sizes = (*group_ND.shape, len(ids_C))
            top = _compiled_top(functions, "packed_topk", maps, group_ND, sizes, [], count)
            tops.append(TopTokens(ids_C[top.ids_NC], top.log_prob_NC))
        else:
            whole_NV = logits_NV[first:end]
            own_NV = torch.full_like(whole_NV, -torch.inf)
            own_NV[:, ids_C] = whole_NV[:, ids_C]
            tops.append(top_tokens(own_NV, [], count))
        first = end
    return TopTokens(*map(torch.cat, zip(*tops, strict=True)))


def _functions_without_grad(*tensors: Tensor) -> Functions | None:
    """Return the compiled functions, which have no gradient; None where one is needed."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    return functions_for(*tensors)


def _compiled_top(
    functions: Functions,
    name: str,
    structures: tuple[ctypes.Structure, ...],
    rows: Tensor,
    sizes: Sequence[int],
    never: list[int],
    count: int,
) -> TopTokens:
    """Call `topk` or `packed_topk` for contiguous rows."""
    never_ids = ids_tensor(*never)
    ids_NC = never_ids.new_empty((len(rows), count))
    log_prob_NC = torch.empty((len(rows), count), dtype=torch.float32, device="cpu")
    tensors = (rows, never_ids, ids_NC, log_prob_NC)
    functions.call(name, tensors, *sizes, len(never), count, structures=structures)
    return TopTokens(ids_NC, log_prob_NC)


@functools.lru_cache(maxsize=16)
def ids_tensor(*ids: int) -> Tensor:
    """Return an int64 tensor of ids; it is cached, and must not be modified."""
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def _are_ids(ids: list[int], num_tokens: int) -> bool:
    return not ids or 0 <= min(ids) <= max(ids) < num_tokens


def argmax_tokens(logits_NV: Logits, never: list[int]) -> Tensor:
    """Return the most probable token [N, 1] of each row, except those in `never`.

    It is -1 where no logit is finite.
    """
    scan = logits_NV.packed.scan if isinstance(logits_NV, LazyLogits) else None
    if isinstance(logits_NV, LazyLogits) and scan is not None:
        states_ND, weight_VD = logits_NV.states_ND, logits_NV.projection.weight
        functions = functions_for(states_ND)
        if functions is not None and _are_ids(never, len(weight_VD)):
            never_ids = ids_tensor(*never)
            ids_N1 = never_ids.new_empty((len(states_ND), 1))
            tensors = (states_ND, scan.weight, scan.bounds_2U, never_ids, ids_N1)
            sizes = (*matmul_sizes(states_ND, weight_VD), len(never))
            structures = (scan.packed.map_with(None),)
            functions.call("packed_argmax", tensors, *sizes, structures=structures)
            return ids_N1
    top = top_tokens(logits_NV, never, 1)
    return torch.where(top.log_prob_NC.isfinite(), top.ids_NC, -1)
