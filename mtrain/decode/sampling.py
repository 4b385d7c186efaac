"""Sampling of targets from a step function."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mtrain.decode.beam import (
    Candidates,
    Constraints,
    FinishedHypotheses,
    Hypothesis,
    NotFiniteError,
    OpenRows,
    RequestGroup,
    S,
    Step,
    length_penalty,
    repeats,
)
from mtrain.decode.options import Sampling
from mtrain.ops.topk import TopTokens


@torch.inference_mode()
def sample_steps(
    step: Step[S],
    group: RequestGroup[S],
    settings: Sampling,
    uniform_NT: Tensor,
    length_alpha: float,
) -> Generator[None, None, list[list[Hypothesis]]]:
    """Draw targets token by token; return those of each sentence, in the order they were drawn.

    Yields after each position.

    Args:
        step: as of `BeamSearch`.
        group: the sentences.
        settings: temperature, top_k and top_p.
        uniform_NT: random numbers in [0, 1), a row for each target, the same number for each
            sentence; a column for each token of the longest allowed target and eos.
        length_alpha: exponent of the length penalty, by which scores are divided.

    Raises:
        NotFiniteError: if the logits are not finite.
    """
    state, constraints = group.state, group.constraints
    num_sentences = len(constraints.max_lengths_B)
    per_sentence = len(uniform_NT) // max(num_sentences, 1)
    sentence_N = np.arange(num_sentences).repeat(per_sentence)
    state.reorder(sentence_N)
    prefix_NP = None if constraints.prefix_BP is None else constraints.prefix_BP[sentence_N]
    constraints = replace(
        constraints, max_lengths_B=constraints.max_lengths_B[sentence_N], prefix_BP=prefix_NP
    )
    draw_N = np.arange(len(sentence_N))  # each target is a sentence of its own
    rows, finished = OpenRows.start(draw_N, constraints), FinishedHypotheses()
    while len(rows.ids_N):
        logits_NV = step(torch.from_numpy(rows.ids_N), state)[:]
        drawn = _draw(logits_NV, rows, constraints, settings, uniform_NT)
        all_N = np.arange(len(rows.ids_N))
        rows = rows.grow(all_N, drawn.ids_NC[:, 0], drawn.log_prob_NC[:, 0])
        ended_N = np.flatnonzero(rows.ids_N == constraints.eos)
        ended = rows.take(ended_N)
        penalty_N = length_penalty(ended.length_N.astype(np.float64), length_alpha)
        finished.add(ended, ended.sentence_N, ended.log_prob_N / penalty_N)
        open_N = np.flatnonzero(rows.ids_N != constraints.eos)
        rows, uniform_NT = rows.take(open_N), uniform_NT[open_N]
        state.reorder(open_N)
        yield
    samples = [finished.take(draw)[0] for draw in range(len(sentence_N))]
    firsts = range(0, len(samples), max(per_sentence, 1))
    return [samples[first : first + per_sentence] for first in firsts]


def _draw(
    logits_NV: Tensor,
    rows: OpenRows,
    constraints: Constraints,
    settings: Sampling,
    uniform_NT: Tensor,
) -> Candidates:
    """Draw the next token of each row; its log-probability is that of the unmodified logits."""
    allowed_NV = logits_NV.clone()
    for index in constraints.never:
        allowed_NV[:, index] = -torch.inf
    if constraints.no_repeat_ngram:
        allowed_NV[repeats(rows, constraints.no_repeat_ngram)] = -torch.inf
    only_N = rows.forced_token(constraints)
    forced_L = np.flatnonzero(only_N >= 0)
    allowed_NV[forced_L] = -torch.inf
    allowed_NV[forced_L, only_N[forced_L]] = 0.0
    if 0 < settings.top_k < allowed_NV.shape[1]:
        least_N1 = allowed_NV.topk(settings.top_k)[0][:, -1:]
        allowed_NV = allowed_NV.masked_fill(allowed_NV < least_N1, -torch.inf)
    probs_NV = (allowed_NV.double() / settings.temperature).softmax(-1)
    if settings.top_p < 1:
        sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
        is_beyond_NV = sorted_NV.cumsum(-1) - sorted_NV >= settings.top_p
        probs_NV.scatter_(1, order_NV, sorted_NV.masked_fill(is_beyond_NV, 0.0))
    cdf_NV = probs_NV.cumsum(-1)
    if not cdf_NV[:, -1].isfinite().all():
        raise NotFiniteError
    uniform_N1 = uniform_NT[:, rows.written_NT.shape[1], None].to(cdf_NV.device)
    point_N1 = uniform_N1 * cdf_NV[:, -1:]
    ids_N1 = torch.searchsorted(cdf_NV, point_N1, right=True).clamp(max=cdf_NV.shape[1] - 1)
    log_prob_N1 = logits_NV.double().log_softmax(-1).gather(1, ids_N1)
    if not log_prob_N1.isfinite().all():
        raise NotFiniteError
    return Candidates.read(TopTokens(ids_N1, log_prob_N1))
