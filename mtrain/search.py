"""Greedy and beam search over any step function. It knows no model, no text and no special id.

Shapes: B sentences, W beam width, N = B * W hypotheses, V vocabulary, T pieces so far.

A step function takes the last ids and a state, and returns the logits of the next piece. Its
state keeps one row for each hypothesis, and can `reorder` them. With B = 3 and W = 2:

    row         0    1   |   2    3   |   4    5
    sentence    0    0   |   1    1   |   2    2
    hypothesis  0    1   |   0    1   |   0    1       row = sentence * W + hypothesis

When hypothesis 0 of sentence 1 continues in two ways, and sentence 2 is finished, the rows that
live on are [0, 1, 2, 2] and the sentences that live on are [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor


class State(Protocol):
    """What a step function remembers of each hypothesis."""

    def reorder(self, rows_N: Tensor, sentences_B: Tensor | None = None) -> None:
        """Continue with these rows, and with these sentences if some have left."""


S = TypeVar("S", bound=State)
Step = Callable[[Tensor, S], Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """A translation: its pieces without bos and eos, and how likely it is."""

    ids: list[int]
    log_prob: float
    score: float


@dataclass(frozen=True)
class Limits:
    """What a search may write.

    Attributes:
        bos: the id that starts a target.
        eos: the id that ends it.
        never: ids that are never written.
        max_lengths_B: pieces that each target may have, eos apart; on the model's device.
    """

    bos: int
    eos: int
    never: list[int]
    max_lengths_B: Tensor


def length_penalty(length: int, alpha: float) -> float:
    """Return ((5 + length) / 6) ^ alpha (Wu et al. 2016, arXiv 1609.08144); eos counts."""
    return float(((5 + length) / 6) ** alpha)


@torch.inference_mode()
def greedy(step: Step[S], state: S, limits: Limits, alpha: float = 0.0) -> list[Hypothesis]:
    """Take the most likely piece at every step; one hypothesis for each sentence."""
    sentence_B = torch.arange(len(limits.max_lengths_B), device=limits.max_lengths_B.device)
    ids_B = torch.full_like(sentence_B, limits.bos)
    written_BT = ids_B[:, None][:, :0]
    log_prob_B: Tensor | float = 0.0
    finished: dict[int, Hypothesis] = {}
    while len(sentence_B):
        is_full_B = limits.max_lengths_B[sentence_B] <= written_BT.shape[1]
        top = _top_pieces(step(ids_B, state), is_full_B, limits, 1)
        ids_B, log_prob_B = top.ids_NK[:, 0], log_prob_B + top.log_prob_NK[:, 0]
        written_BT = torch.cat([written_BT, ids_B[:, None]], 1)
        ends_B = ids_B == limits.eos
        if not ends_B.any():
            continue
        for row in ends_B.nonzero()[:, 0].tolist():
            hypothesis = _hypothesis(written_BT[row], float(log_prob_B[row]), alpha)
            finished[int(sentence_B[row])] = hypothesis
        rows_B = (~ends_B).nonzero()[:, 0]
        state.reorder(rows_B, rows_B)
        sentence_B, ids_B = sentence_B[rows_B], ids_B[rows_B]
        written_BT, log_prob_B = written_BT[rows_B], log_prob_B[rows_B]
    return [finished[sentence] for sentence in range(len(finished))]


@torch.inference_mode()
def beam(
    step: Step[S], state: S, limits: Limits, width: int, alpha: float = 0.0
) -> list[Hypothesis]:
    """Keep the `width` most likely hypotheses at every step; return the best-scored of each.

    Finished hypotheses keep their places, so that a beam of 1 is greedy search. A sentence ends
    when every place is finished, or when no open hypothesis can still reach the best score.
    """
    beams = _Beams.start(limits, width)
    finished: dict[int, list[Hypothesis]] = {}
    while len(beams.sentence_B):
        rows_N = beams.grow(step(beams.ids_BW.flatten(), state), limits)
        for row, place in beams.ends_BW.nonzero().tolist():
            log_prob = float(beams.log_prob_BW[row, place])
            hypothesis = _hypothesis(beams.written_BWT[row, place], log_prob, alpha)
            finished.setdefault(int(beams.sentence_B[row]), []).append(hypothesis)
            beams.best_score_B[row] = max(float(beams.best_score_B[row]), hypothesis.score)
        lives_B = beams.close_finished(limits, alpha)
        if lives_B.all():
            if not torch.equal(rows_N, torch.arange(len(rows_N), device=rows_N.device)):
                state.reorder(rows_N)
            continue
        sentences_B = lives_B.nonzero()[:, 0]
        state.reorder(rows_N.view(-1, width)[sentences_B].flatten(), sentences_B)
        beams.keep(sentences_B)
    return [
        max(finished[sentence], key=lambda hypothesis: hypothesis.score)
        for sentence in range(len(finished))
    ]


@dataclass
class _Beams:
    """The places of the sentences that are not finished; a dead place has log_prob -inf."""

    sentence_B: Tensor
    ids_BW: Tensor
    log_prob_BW: Tensor
    written_BWT: Tensor
    ends_BW: Tensor
    num_places_B: Tensor
    best_score_B: Tensor

    @staticmethod
    def start(limits: Limits, width: int) -> _Beams:
        """Open one place of each sentence."""
        sentence_B = torch.arange(len(limits.max_lengths_B), device=limits.max_lengths_B.device)
        ids_BW = torch.full_like(sentence_B, limits.bos)[:, None].repeat(1, width)
        log_prob_BW = torch.full_like(ids_BW, -torch.inf, dtype=torch.float32)
        log_prob_BW[:, 0] = 0.0
        return _Beams(
            sentence_B,
            ids_BW,
            log_prob_BW,
            ids_BW[:, :, None][:, :, :0],
            torch.zeros_like(ids_BW, dtype=torch.bool),
            torch.full_like(sentence_B, width),
            torch.full_like(sentence_B, -torch.inf, dtype=torch.float32),
        )

    def grow(self, logits_NV: Tensor, limits: Limits) -> Tensor:
        """Continue every open place by its best pieces; return the rows they continue."""
        num_sentences, width = self.ids_BW.shape
        is_full_B = limits.max_lengths_B[self.sentence_B] <= self.written_BWT.shape[2]
        top = _top_pieces(logits_NV, is_full_B.repeat_interleave(width), limits, width)
        total_BWK = self.log_prob_BW[:, :, None] + top.log_prob_NK.view(num_sentences, width, -1)
        num_pieces = total_BWK.shape[2]
        self.log_prob_BW, choice_BW = total_BWK.flatten(1).topk(width)
        parent_BW = choice_BW // num_pieces
        self.ids_BW = top.ids_NK.view(num_sentences, -1).gather(1, choice_BW)
        rank_W = torch.arange(width, device=choice_BW.device)
        self.log_prob_BW[rank_W >= self.num_places_B[:, None]] = -torch.inf
        self.ends_BW = (self.ids_BW == limits.eos) & self.log_prob_BW.isfinite()
        rows_BW = torch.arange(num_sentences, device=choice_BW.device)[:, None] * width + parent_BW
        past_BWT = self.written_BWT.flatten(0, 1)[rows_BW]
        self.written_BWT = torch.cat([past_BWT, self.ids_BW[:, :, None]], 2)
        return rows_BW.flatten()

    def close_finished(self, limits: Limits, alpha: float) -> Tensor:
        """Close the places that have ended; tell which sentences can still find better."""
        self.num_places_B = self.num_places_B - self.ends_BW.sum(1)
        self.log_prob_BW = self.log_prob_BW.masked_fill(self.ends_BW, -torch.inf)
        longest_B = limits.max_lengths_B[self.sentence_B] + 1
        bound_B = self.log_prob_BW.amax(1) / ((5 + longest_B) / 6) ** alpha
        return bound_B > self.best_score_B

    def keep(self, sentences_B: Tensor) -> None:
        """Let all other sentences leave."""
        self.sentence_B = self.sentence_B[sentences_B]
        self.ids_BW = self.ids_BW[sentences_B]
        self.log_prob_BW = self.log_prob_BW[sentences_B]
        self.written_BWT = self.written_BWT[sentences_B]
        self.ends_BW = self.ends_BW[sentences_B]
        self.num_places_B = self.num_places_B[sentences_B]
        self.best_score_B = self.best_score_B[sentences_B]


class _TopPieces(NamedTuple):
    """The K best pieces of each row and their log-probabilities."""

    ids_NK: Tensor
    log_prob_NK: Tensor


def _top_pieces(logits_NV: Tensor, is_full_N: Tensor, limits: Limits, count: int) -> _TopPieces:
    """Rank the next pieces of each row; a row that is full can only end."""
    logits_NV = logits_NV.float()
    log_total_N1 = logits_NV.logsumexp(-1, keepdim=True)
    allowed_NV = logits_NV.clone()
    allowed_NV[:, limits.never] = -torch.inf
    if is_full_N.any():
        eos_N = allowed_NV[:, limits.eos].clone()
        allowed_NV[is_full_N] = -torch.inf
        allowed_NV[:, limits.eos] = eos_N
    top_NK, ids_NK = allowed_NV.topk(min(count, allowed_NV.shape[1]), dim=-1)
    return _TopPieces(ids_NK, top_NK - log_total_N1)


def _hypothesis(written_T: Tensor, log_prob: float, alpha: float) -> Hypothesis:
    ids = written_T.tolist()
    return Hypothesis(ids[:-1], log_prob, log_prob / length_penalty(len(ids), alpha))
