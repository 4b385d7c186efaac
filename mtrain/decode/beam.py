"""Beam search over any step function, independent of model, tokenizer and special ids.

Shapes: B sentences, W beam width (slots of a sentence), N open hypotheses, V vocabulary, T tokens
so far, P tokens of a prefix, C candidates, R = B * W cells, X = W * C, M hypotheses to return,
L rows with a forced token, or pairs of a row and a repeated token, U windows of n tokens, n n-gram
order.

A step function takes the last ids and a state, and returns the logits of the next token. The
state has one row for each open hypothesis, initially one for each sentence, and can `reorder`
them. The open hypotheses of all sentences form one flat batch; finished and pruned ones have no
row. With B = 3 and W = 2, when one hypothesis of sentence 1 has finished:

    row         0    1    2    3    4
    sentence    0    0    1    2    2
    slot        0    1    0    0    1          cell = sentence * W + slot
    cell        0    1    2    4    5

At each step the candidates of all rows are scattered into a table of B * W cells, the best W of
each sentence are kept, and the unfinished ones become the new rows: row n continues the old row
rows_N[n]. When sentences end, others are admitted. The tokens of a row are right-aligned and padded
with -1.

The logits are on the model's device. The state of the search is in NumPy arrays: operations on a
few numbers take a fraction of the time that they take in PyTorch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.decode.options import DecodingOptions
from mtrain.ops.beam_search import Floats, Hypotheses, SearchRules, SearchSteps
from mtrain.ops.packed_weights import Ints, PackedRows
from mtrain.ops.topk import Logits, TopTokens, argmax_tokens, top_tokens, top_tokens_of


class State(Protocol):
    """The cache of a step function, one row for each open hypothesis."""

    def reorder(self, rows_N: Ints) -> None:
        """Keep these rows, in this order; a row may be repeated or dropped."""

    def admit(self, other: Any) -> None:
        """Append the rows of another state, which has decoded no token yet."""


S = TypeVar("S", bound=State)
Bools = NDArray[np.bool_]
Step = Callable[[Tensor, S], Logits]  # (ids [N] on the CPU, state) to logits [N, V]
# several positions in one call, as `ops.beam_search.search_steps`
Steps = Callable[[S, Hypotheses, Ints, Floats, SearchRules], SearchSteps | None]
NUM_GROUPS = 4  # request groups that are decoded together


@dataclass(frozen=True)
class Hypothesis:
    """A finished target with its log-probabilities.

    Attributes:
        ids: tokens without bos and eos.
        log_probs: of each token and of eos; empty if a greedy search computes no scores.
        log_prob: their sum; NaN without scores.
        score: `log_prob` divided by the length penalty; NaN without scores.
    """

    ids: list[int]
    log_probs: list[float]
    log_prob: float
    score: float


@dataclass(frozen=True)
class Constraints:
    """Constraints on the targets of a group of sentences.

    Attributes:
        bos: the first decoder input.
        eos: the id that ends a target.
        never: ids that are never generated.
        max_lengths_B: the most tokens of each target, without eos.
        prefix_BP: the tokens that each target begins with, padded with -1.
        no_repeat_ngram: generate no n-gram of this order twice; 0 allows all.
        shortlists: the tokens that are ranked for each sentence; empty is all tokens.
    """

    bos: int
    eos: int
    never: list[int]
    max_lengths_B: Ints
    prefix_BP: Ints | None = None
    no_repeat_ngram: int = 0
    shortlists: Sequence[PackedRows] = ()


@dataclass(frozen=True)
class RequestGroup(Generic[S]):
    """Sentences that are admitted together: their initial state, and their constraints."""

    state: S
    constraints: Constraints


class NotFiniteError(ArithmeticError):
    """No token has a finite log-probability."""


Length = TypeVar("Length", float, Floats)


def length_penalty(length: Length, alpha: float) -> Length:
    """Return ((5 + length) / 6) ^ alpha (Wu et al. 2016, arXiv 1609.08144); eos is counted."""
    penalty: Length = ((5 + length) / 6) ** alpha
    return penalty


@functools.lru_cache(maxsize=16)
def penalties(max_length: int, alpha: float) -> Floats:
    """Return `length_penalty` of the numbers of tokens from 0 to at least `max_length` + 2."""
    return length_penalty(np.arange(2 ** (max_length + 2).bit_length(), dtype=np.float64), alpha)


class OpenRows(Hypotheses):
    """The open hypotheses, sorted by sentence."""

    @staticmethod
    def start(sentence_N: Ints, constraints: Constraints) -> OpenRows:
        """Return an empty hypothesis for each of these sentences."""
        ids_N, length_N = np.full_like(sentence_N, constraints.bos), np.zeros_like(sentence_N)
        log_prob_N = np.zeros(len(sentence_N))
        written_NT, log_probs_NT = ids_N[:, None][:, :0], log_prob_N[:, None][:, :0]
        return OpenRows(sentence_N, ids_N, length_N, log_prob_N, written_NT, log_probs_NT)

    def grow(self, rows_N: Ints, ids_N: Ints, token_log_prob_N: Floats) -> OpenRows:
        """Append a token with its log-probability to each of the old rows `rows_N`."""
        return OpenRows(
            self.sentence_N[rows_N],
            ids_N,
            self.length_N[rows_N] + 1,
            self.log_prob_N[rows_N] + token_log_prob_N,
            np.concatenate([self.written_NT.take(rows_N, 0), ids_N[:, None]], 1),
            np.concatenate([self.log_probs_NT.take(rows_N, 0), token_log_prob_N[:, None]], 1),
        )

    def take(self, rows_N: Ints) -> OpenRows:
        """Return the given rows, in the given order."""
        return OpenRows._make(field.take(rows_N, 0) for field in self)

    def join(self, others: OpenRows) -> OpenRows:
        """Append other rows, which have no tokens yet."""
        width = int(self.length_N.max(initial=0))
        first = self.written_NT.shape[1] - width
        trimmed = self._replace(
            written_NT=self.written_NT[:, first:], log_probs_NT=self.log_probs_NT[:, first:]
        )
        shape = (len(others.ids_N), width)
        empty = others._replace(written_NT=np.full(shape, -1), log_probs_NT=np.zeros(shape))
        return OpenRows._make(np.concatenate(pair) for pair in zip(trimmed, empty, strict=True))

    def forced_token(self, constraints: Constraints) -> Ints:
        """Return the forced next token of each row (prefix, or eos at the limit), or -1."""
        is_full_N = constraints.max_lengths_B[self.sentence_N] <= self.length_N
        only_N = np.where(is_full_N, constraints.eos, -1)
        if constraints.prefix_BP is None:
            return only_N
        num_forced = constraints.prefix_BP.shape[1]
        position_N = np.minimum(self.length_N, num_forced - 1)
        forced_N = constraints.prefix_BP[self.sentence_N, position_N]
        return np.where((self.length_N < num_forced) & (forced_N >= 0), forced_N, only_N)


class FinishedHypotheses:
    """The finished hypotheses of each sentence.

    Args:
        has_scores: False leaves log-probabilities and scores out.
    """

    def __init__(self, has_scores: bool = True) -> None:
        self._has_scores = has_scores
        self._of_sentence: dict[int, list[Hypothesis]] = {}  # the first to end first

    def add(self, rows: OpenRows, number_N: Ints, score_N: Floats) -> None:
        """Add rows that end with eos, with their sentence numbers and scores."""
        numbers, lengths, ids = number_N.tolist(), rows.length_N.tolist(), rows.written_NT.tolist()
        scores: Iterable[float] = repeat(math.nan)
        log_probs: Iterable[list[float]] = repeat([])
        sums = scores
        if self._has_scores:
            scores, log_probs = score_N.tolist(), rows.log_probs_NT.tolist()
            sums = rows.log_prob_N.tolist()
        finished = zip(numbers, lengths, ids, log_probs, sums, scores, strict=False)
        for number, length, ids_T, log_probs_T, log_prob, score in finished:
            hypothesis = Hypothesis(ids_T[-length:-1], log_probs_T[-length:], log_prob, score)
            self._of_sentence.setdefault(number, []).append(hypothesis)

    def take(self, number: int, count: int = 1) -> list[Hypothesis]:
        """Remove a sentence, and return its `count` best hypotheses, best first.

        Of equal scores the hypothesis that ended first is the better one.

        Raises:
            NotFiniteError: if it has none.
        """
        if number not in self._of_sentence:
            raise NotFiniteError
        finished = self._of_sentence.pop(number)
        return sorted(finished, key=lambda hypothesis: -hypothesis.score)[:count]

    def discard(self, numbers: Iterable[int]) -> None:
        """Remove the hypotheses of sentences."""
        for number in numbers:
            self._of_sentence.pop(number, None)


class _Sentences(NamedTuple):
    """The sentences that have open hypotheses.

    Attributes:
        number_B: the number of each among all sentences.
        num_places_B: slots without a finished hypothesis.
        best_BM: the M best finished scores, -inf where there are fewer.
        max_lengths_B, prefix_BP: as in `Constraints`.
        shortlist_B: the `PackedRows` of each; None without shortlists.
    """

    number_B: Ints
    num_places_B: Ints
    best_BM: Floats
    max_lengths_B: Ints
    prefix_BP: Ints
    shortlist_B: NDArray[np.object_]

    @staticmethod
    def start(constraints: Constraints, options: DecodingOptions, first: int) -> _Sentences:
        """Return the sentences of a group, numbered from `first`."""
        lengths_B, prefix_BP = constraints.max_lengths_B, constraints.prefix_BP
        shortlist_B = np.full(len(lengths_B), None)
        for sentence, shortlist in enumerate(constraints.shortlists):
            shortlist_B[sentence] = shortlist
        return _Sentences(
            np.arange(first, first + len(lengths_B)),
            np.full_like(lengths_B, options.beam),
            np.full((len(lengths_B), options.num_best), -np.inf),
            lengths_B,
            lengths_B[:, None][:, :0] if prefix_BP is None else prefix_BP,
            shortlist_B,
        )

    def take(self, sentences_B: Ints) -> _Sentences:
        """Return the given sentences."""
        return _Sentences._make(field.take(sentences_B, 0) for field in self)

    def join(self, others: _Sentences) -> _Sentences:
        """Append other sentences."""
        width = max(self.prefix_BP.shape[1], others.prefix_BP.shape[1])
        both = []
        for group in (self, others):
            missing = (0, 0), (0, width - group.prefix_BP.shape[1])
            prefix_BP = np.pad(group.prefix_BP, missing, constant_values=-1)
            both.append(group._replace(prefix_BP=prefix_BP))
        return _Sentences._make(np.concatenate(pair) for pair in zip(*both, strict=True))


class BeamSearch(Generic[S]):
    """A search that admits sentences while others are being decoded (continuous batching).

    Finished hypotheses keep their slots, so that a beam of 1 is greedy search. A sentence ends
    when all its slots are finished, or when no open hypothesis can still be among the best. The
    hypotheses of a sentence do not depend on the others.

    Args:
        step: decodes one position.
        options: of the search.
        steps: decodes several positions in one call, where it can.

    Attributes:
        num_sentences: how many were admitted.
        num_open: how many hypotheses are open; each has a row, and `cell_N` is its cell.
    """

    state: S
    constraints: Constraints
    sentences: _Sentences
    rows: OpenRows
    cell_N: Ints
    penalty_T: Floats

    def __init__(
        self, step: Step[S], options: DecodingOptions, steps: Steps[S] | None = None
    ) -> None:
        self.step, self.options, self.steps = step, options, steps
        self.finished = FinishedHypotheses(has_scores=not options.argmax_only)
        self.num_sentences = self.num_open = 0

    def can_admit(self, num_new: int) -> bool:
        """Return whether few enough slots are open to admit a group of `num_new` sentences."""
        if not self.num_open:
            return True
        num_places = int(self.sentences.num_places_B[np.unique(self.rows.sentence_N)].sum())
        return num_places <= (NUM_GROUPS - 1) * num_new * self.options.beam

    @torch.inference_mode()
    def admit(self, group: RequestGroup[S]) -> range:
        """Append the sentences of a group, and return their numbers.

        Sentences are numbered from 0 in the order in which they are admitted.
        """
        constraints, width = group.constraints, self.options.beam
        new = _Sentences.start(constraints, self.options, self.num_sentences)
        new_B = np.arange(len(new.number_B))
        if self.num_open:
            open_B, local_N = np.unique(self.rows.sentence_N, return_inverse=True)
            place_N, first = self.cell_N % width, len(open_B)
            self.cell_N = np.concatenate([local_N * width + place_N, (first + new_B) * width])
            self.rows = self.rows._replace(sentence_N=local_N).join(
                OpenRows.start(first + new_B, constraints)
            )
            self.sentences = self.sentences.take(open_B).join(new)
            self.state.admit(group.state)
        else:  # no hypothesis is open: replace the state
            self.state, self.sentences, self.cell_N = group.state, new, new_B * width
            self.rows = OpenRows.start(new_B, constraints)
        self.constraints = replace(
            constraints,
            max_lengths_B=self.sentences.max_lengths_B,
            prefix_BP=self.sentences.prefix_BP if self.sentences.prefix_BP.shape[1] else None,
            shortlists=self.sentences.shortlist_B.tolist() if constraints.shortlists else (),
        )
        longest = max(
            int(self.sentences.max_lengths_B.max(initial=0)), self.sentences.prefix_BP.shape[1]
        )
        self.penalty_T = penalties(longest, self.options.length_alpha)
        self.num_open = len(self.rows.ids_N)
        first_number, self.num_sentences = self.num_sentences, self.num_sentences + len(new_B)
        return range(first_number, self.num_sentences)

    @torch.inference_mode()
    def advance(self) -> list[int]:
        """Extend every open hypothesis by a token, or several; return the sentences that end."""
        before_N = self.rows.sentence_N
        if not self._advance_compiled():
            rows_N = self._grow(self.step(torch.from_numpy(self.rows.ids_N), self.state))
            self.state.reorder(rows_N)
        self.num_open = len(self.rows.ids_N)
        is_ended_B = np.zeros(len(self.sentences.number_B), np.bool_)
        is_ended_B[before_N] = True
        is_ended_B[self.rows.sentence_N] = False
        ended: list[int] = self.sentences.number_B[is_ended_B].tolist()
        return ended

    def drop(self, numbers: Sequence[int]) -> None:
        """Discard open sentences and their hypotheses."""
        number_N = self.sentences.number_B[self.rows.sentence_N]
        rows_N = np.flatnonzero(np.isin(number_N, numbers, invert=True))
        self.rows, self.cell_N = self.rows.take(rows_N), self.cell_N[rows_N]
        self.state.reorder(rows_N)
        self.num_open = len(rows_N)
        self.finished.discard(numbers)

    def take_best(self, number: int) -> list[Hypothesis]:
        """Remove a sentence that has ended; return its `num_best` best hypotheses, best first.

        Raises:
            NotFiniteError: if no hypothesis ended, because the logits were not finite.
        """
        return self.finished.take(number, self.options.num_best)

    def _advance_compiled(self) -> bool:
        """Decode several positions in one call; return False if `step` must decode the next one."""
        constraints, options, sentences = self.constraints, self.options, self.sentences
        has_prefix = constraints.prefix_BP is not None
        if self.steps is None or has_prefix or constraints.no_repeat_ngram:
            return False
        rules = SearchRules(
            options.beam,
            constraints.eos,
            constraints.never,
            sentences.max_lengths_B,
            self.penalty_T,
            options.early_stop,
            options.argmax_only,
            constraints.shortlists,
        )
        steps = self.steps(self.state, self.rows, sentences.num_places_B, sentences.best_BM, rules)
        if steps is None:
            return False
        ended = OpenRows(*steps.ended)
        self.finished.add(ended, sentences.number_B[ended.sentence_N], steps.score_E)
        self.rows, self.cell_N = OpenRows(*steps.rows), steps.cell_N
        self.sentences = sentences._replace(num_places_B=steps.num_places_B, best_BM=steps.best_BM)
        return True

    def _grow(self, logits_NV: Logits) -> Ints:
        """Extend the open hypotheses by one token; return the old row of each new one."""
        top = _best_tokens(logits_NV, self.rows, self.constraints, self.options)
        total_NC = self.rows.log_prob_N[:, None] + top.log_prob_NC
        rows_N, candidate_N, cell_N = self._choose(total_NC)
        ids_N, log_prob_N = top.ids_NC[rows_N, candidate_N], top.log_prob_NC[rows_N, candidate_N]
        self.rows = grown = self.rows.grow(rows_N, ids_N, log_prob_N)
        self.cell_N = cell_N
        is_open_N = ids_N != self.constraints.eos
        if not is_open_N.all():
            ended_N = np.flatnonzero(~is_open_N)
            self._finish(grown.take(ended_N), cell_N[ended_N])
        if self.options.beam > 1:  # a single slot is open until its sentence ends
            is_open_N &= self._can_win(grown, is_open_N)
        if not is_open_N.all():
            open_N = np.flatnonzero(is_open_N)
            self.rows, self.cell_N, rows_N = grown.take(open_N), cell_N[open_N], rows_N[open_N]
        return rows_N

    def _choose(self, total_NC: Floats) -> tuple[Ints, Ints, Ints]:
        """Choose the best candidates of each sentence, as many as it has open slots.

        Returns:
            the old row of each, its candidate index there, and its cell.
        """
        width, num_candidates = self.options.beam, total_NC.shape[1]
        num_sentences = len(self.sentences.number_B)
        table_RC = np.full((num_sentences * width, num_candidates), -np.inf)
        table_RC[self.cell_N] = total_NC
        table_BX = table_RC.reshape(num_sentences, width * num_candidates)
        choice_BW = (-table_BX).argsort(1, kind="stable")[:, :width]
        best_BW = table_BX[np.arange(num_sentences)[:, None], choice_BW]
        is_free_BW = np.arange(width) < self.sentences.num_places_B[:, None]
        cell_N = np.flatnonzero(np.isfinite(best_BW) & is_free_BW)
        choice_N = choice_BW.ravel()[cell_N]
        row_of_cell_R = np.zeros(num_sentences * width, np.int64)
        row_of_cell_R[self.cell_N] = np.arange(len(total_NC))
        parent_N = cell_N // width * width + choice_N // num_candidates
        return row_of_cell_R[parent_N], choice_N % num_candidates, cell_N

    def _finish(self, ended: OpenRows, cell_N: Ints) -> None:
        """Store finished hypotheses, and close their slots."""
        width, sentences = self.options.beam, self.sentences
        num_sentences = len(sentences.number_B)
        score_N = ended.log_prob_N / self.penalty_T[ended.length_N]
        self.finished.add(ended, sentences.number_B[ended.sentence_N], score_N)
        num_ended_B = np.bincount(ended.sentence_N, minlength=num_sentences)
        score_R = np.full(num_sentences * width, -np.inf)
        score_R[cell_N] = score_N
        scores = np.concatenate([sentences.best_BM, score_R.reshape(-1, width)], 1)
        self.sentences = sentences._replace(
            num_places_B=sentences.num_places_B - num_ended_B,
            best_BM=-np.sort(-scores, 1)[:, : self.options.num_best],
        )

    def _can_win(self, grown: OpenRows, is_open_N: Bools) -> Bools:
        """Return for each row whether its sentence can still improve its M best.

        An open hypothesis is bounded by its log-probability at the longest length, or with
        `early_stop` at its present length.
        """
        if self.options.early_stop:
            length_N = grown.length_N
        else:
            length_N = self.sentences.max_lengths_B[grown.sentence_N]
        bound_N = np.where(is_open_N, grown.log_prob_N / self.penalty_T[length_N + 1], -np.inf)
        bound_B = np.full(len(self.sentences.number_B), -np.inf)
        np.maximum.at(bound_B, grown.sentence_N, bound_N)
        can_win: Bools = bound_B > self.sentences.best_BM[:, -1]
        return can_win[grown.sentence_N]


class Candidates(NamedTuple):
    """The C best tokens of each row, best first, and their log-probabilities."""

    ids_NC: Ints
    log_prob_NC: Floats

    @staticmethod
    def read(top: TopTokens) -> Candidates:
        """Return a copy on the CPU."""
        return Candidates(top.ids_NC.cpu().numpy(), top.log_prob_NC.cpu().double().numpy())


def _best_tokens(
    logits_NV: Logits, rows: OpenRows, constraints: Constraints, options: DecodingOptions
) -> Candidates:
    """Return at least the W best allowed next tokens of each row; disallowed ones have -inf."""

    def find_top(count: int) -> Candidates:
        if not constraints.shortlists:
            return Candidates.read(top_tokens(logits_NV, constraints.never, count))
        sentences = rows.sentence_N.tolist()
        return Candidates.read(top_tokens_of(logits_NV, sentences, constraints.shortlists, count))

    if constraints.no_repeat_ngram:
        row_L, ids_L = repeats(rows, constraints.no_repeat_ngram)
        num_repeats = int(np.bincount(row_L).max(initial=0))
        top = find_top(options.beam + num_repeats)
        repeat_L, candidate_L = (top.ids_NC[row_L] == ids_L[:, None]).nonzero()
        top.log_prob_NC[row_L[repeat_L], candidate_L] = -np.inf
    elif options.argmax_only and not constraints.shortlists:
        ids_N1 = argmax_tokens(logits_NV, constraints.never).cpu().numpy()
        top = Candidates(ids_N1, np.where(ids_N1 < 0, -np.inf, 0.0))
    else:
        top = find_top(options.beam)
    only_N = rows.forced_token(constraints)
    if (only_N >= 0).any():
        forced_L = np.flatnonzero(only_N >= 0)
        only_L = only_N[forced_L]
        logits_LV = logits_NV[torch.from_numpy(forced_L)]
        if constraints.shortlists:  # the softmax is over the shortlist, if it has the token
            for row, sentence in enumerate(rows.sentence_N[forced_L].tolist()):
                is_other_V = np.ones(logits_LV.shape[1], np.bool_)
                is_other_V[constraints.shortlists[sentence].ids_C] = False
                if not is_other_V[only_L[row]]:
                    logits_LV[row, torch.from_numpy(is_other_V)] = -torch.inf
        log_probs_LV = logits_LV.log_softmax(-1).cpu()
        top.log_prob_NC[forced_L] = -np.inf
        top.ids_NC[forced_L, 0] = only_L
        top.log_prob_NC[forced_L, 0] = log_probs_LV[np.arange(len(only_L)), only_L]
    return top


def repeats(rows: OpenRows, n: int) -> tuple[Ints, Ints]:
    """Return (rows, tokens), arrays of each next token that would repeat an n-gram of its row."""
    length = rows.written_NT.shape[1]
    if length < n:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    windows_NUn = np.lib.stride_tricks.sliding_window_view(rows.written_NT, n, 1)
    last_N1n = rows.written_NT[:, None, length - n + 1 :]
    is_repeat_NU = (windows_NUn[:, :, :-1] == last_N1n).all(-1) & (windows_NUn >= 0).all(-1)
    row_L, window_L = is_repeat_NU.nonzero()
    row_L, ids_L = np.unique([row_L, windows_NUn[row_L, window_L, -1]], axis=1)
    return row_L, ids_L
