"""Several models that decode as one, by the mean of their probabilities. Knows ids, not text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.model.kv_cache import KVCache
from mtrain.model.transformer import Transformer
from mtrain.ops.topk import Logits


class Padded(NamedTuple):
    """The sources of a batch as the pieces of one vocabulary."""

    src_BS: Tensor
    src_keep_BS: Tensor


class Ensemble:
    """Models of the same target vocabulary; one model alone is itself.

    Each reads the sources as its own source vocabulary has them, which are given for each model.
    """

    def __init__(self, models: Sequence[Transformer]) -> None:
        self.models = list(models)

    def start(self, sources: Sequence[Padded]) -> EnsembleState:
        """Read the sources and return the state from which `step` decodes."""
        return EnsembleState(
            [model.start(*own) for model, own in zip(self.models, sources, strict=True)]
        )

    def step(self, ids_N: Tensor, state: EnsembleState) -> Logits:
        """Return the logits [N, V] of the piece that follows `ids_N`, and advance `state`."""
        logits = [
            model.decode_step(ids_N, cache)
            for model, cache in zip(self.models, state.states, strict=True)
        ]
        return logits[0] if len(logits) == 1 else _log_mean([own[:] for own in logits])

    def log_probs(self, sources: Sequence[Padded], tgt_in_BT: Tensor) -> Tensor:
        """Return the log-probabilities [B, T, V] of every piece at every place, in float64."""
        logits = [
            model.output(model(*own, tgt_in_BT)).double()
            for model, own in zip(self.models, sources, strict=True)
        ]
        return _log_mean(logits)

    def cross_attention(self, sources: Sequence[Padded], tgt_in_BT: Tensor) -> Tensor:
        """Return what each target place gives to each source place, [B, T, S].

        It is the mean of all heads, layers and models, as far as they read what the first reads.
        """
        maps = [
            weights_BHTS.double().mean(1)
            for model, own in zip(self.models, sources, strict=True)
            if own is sources[0]
            for weights_BHTS in model.attention_maps(*own, tgt_in_BT).cross
        ]
        return torch.stack(maps).mean(0)


class EnsembleState:
    """The states of all models."""

    def __init__(self, states: list[KVCache]) -> None:
        self.states = states

    def reorder(self, rows_N: Tensor) -> None:
        """Continue with these hypotheses; each may stand once, often, or not at all."""
        for state in self.states:
            state.reorder(rows_N)

    def admit(self, other: EnsembleState) -> None:
        """Append the hypotheses of newly admitted sentences."""
        for state, new in zip(self.states, other.states, strict=True):
            state.admit(new)


def _log_mean(logits: list[Tensor]) -> Tensor:
    """Return the logarithm of the mean of the probabilities."""
    log_probs = torch.stack([own.log_softmax(-1) for own in logits])
    return log_probs.logsumexp(0) - math.log(len(logits))
