"""Losses as sums with a count; the caller divides, once per update.

Shapes: B batch, S source length, T target length, D model width, V vocabulary, N kept target
tokens, X = 2 * B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.config.sections import ConsistencyConfig, TrainingConfig
from mtrain.data.batch import Batch
from mtrain.model.transformer import Transformer
from mtrain.ops import dropout
from mtrain.ops.consistency import ProjectedConsistency
from mtrain.ops.cross_entropy import Formula, ProjectedCrossEntropy


class LossSum(NamedTuple):
    """Sums over target tokens: the loss and the nll; only `loss` has a gradient."""

    loss: Tensor
    nll: Tensor
    num_tokens: int


def loss_of(model: Transformer, batch: Batch, config: TrainingConfig) -> LossSum:
    """Return the loss sums of a batch under a model; the consistency loss only while training."""
    if config.consistency is not None and model.training:
        return simcut(model, batch, config.label_smoothing, config.consistency)
    states_BTD = model(batch.src_BS, batch.src_keep_BS, batch.tgt_in_BT)
    return label_smoothed(
        states_BTD,
        model.output.weight,
        batch.tgt_out_BT,
        batch.tgt_keep_BT,
        config.label_smoothing,
        batch.num_tgt_tokens,
        model.output.cross_entropy,
    )


def label_smoothed(
    states_BTD: Tensor,
    weight_VD: Tensor,
    tgt_out_BT: Tensor,
    tgt_keep_BT: Tensor,
    smoothing: float,
    num_tokens: int,
    formula: Formula | None = None,
) -> LossSum:
    """Sum `F.cross_entropy(label_smoothing=smoothing)` over the kept target tokens.

    Args:
        states_BTD: the decoder's output.
        weight_VD: the output projection.
        tgt_out_BT: the ids to predict.
        tgt_keep_BT: bool, True for real tokens.
        smoothing: the probability mass spread evenly over the vocabulary (section 5.4).
        num_tokens: the number of kept tokens; counting them on a GPU would synchronise.
        formula: computes the loss from logits, like `ops.cross_entropy.plain_cross_entropy`.
    """
    rows = _first_true(tgt_keep_BT, num_tokens)
    states_ND = states_BTD.flatten(0, 1).index_select(0, rows)
    targets_N = tgt_out_BT.flatten().index_select(0, rows)
    if not torch.is_grad_enabled():  # inside Function.forward, gradients are always disabled
        states_ND, weight_VD = states_ND.detach(), weight_VD.detach()
    loss, nll = ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states_ND, weight_VD, targets_N, smoothing, formula
    )
    return LossSum(loss, nll, len(rows))


def simcut(
    model: Transformer, batch: Batch, smoothing: float, config: ConsistencyConfig
) -> LossSum:
    """Return the sums of `label_smoothed`, plus the consistency loss of SimCut (Gao et al. 2022).

    A second pass draws new dropout masks and zeroes a share `cutoff` of the token embeddings on
    both sides; `weight` times KL(first pass || second pass) is added for each target token, with
    gradients through both passes. Both passes run as one batch of twice the rows.
    """
    src_BS, src_keep_BS, tgt_in_BT = batch.src_BS, batch.src_keep_BS, batch.tgt_in_BT
    src_token_keep_BS, tgt_token_keep_BT = (
        torch.cat(
            [
                torch.ones_like(ids, dtype=torch.bool),
                dropout.random_keep(ids.shape, config.cutoff, ids.device),
            ]
        )
        for ids in (src_BS, tgt_in_BT)
    )
    states_XTD = model(
        *(torch.cat([tensor, tensor]) for tensor in (src_BS, src_keep_BS, tgt_in_BT)),
        src_token_keep_BS,
        tgt_token_keep_BT,
    )
    rows = _first_true(batch.tgt_keep_BT, batch.num_tgt_tokens)
    states_ND, cut_ND = (half.flatten(0, 1).index_select(0, rows) for half in states_XTD.chunk(2))
    loss, nll = ProjectedConsistency.apply(  # type: ignore[no-untyped-call]
        states_ND,
        cut_ND,
        model.output.weight,
        batch.tgt_out_BT.flatten().index_select(0, rows),
        smoothing,
        config.weight,
        model.output.consistency,
    )
    return LossSum(loss, nll, len(rows))


def _first_true(is_true_BT: Tensor, count: int) -> Tensor:
    """Return the indices of the first `count` True values in the flattened mask, ascending."""
    return is_true_BT.flatten().byte().argsort(descending=True, stable=True)[:count]
