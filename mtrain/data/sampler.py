"""Which pairs make a batch, and which rank computes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.data.arrow_shards import Lengths
from mtrain.data.batch import Batch

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Position:
    """The next micro-batch to read: batch `batch` of epoch `epoch`, both from 0.

    The batches of an epoch's second window are numbered from the number of pairs in the first one
    on, and so forth: a number says in which window it is, whatever the batches before it were.
    """

    epoch: int = 0
    batch: int = 0


class MicroBatch(NamedTuple):
    """Pairs that one rank computes at a time.

    Attributes:
        batch: the pairs.
        counts: False if its gradients are discarded: it only keeps the ranks in step where a batch
            has fewer rows than there are ranks.
    """

    batch: Batch
    counts: bool = True


class MicroBatchSplit(NamedTuple):
    """How the batches of an update are split into the micro-batches of all ranks.

    Every batch is cut into as few parts as give all ranks equally many, and the parts are assigned
    in turn: whole batches if the ranks divide their number, rows of each if not. The pairs of an
    update do not depend on the number of ranks.
    """

    num_batches: int
    rank: int = 0
    num_ranks: int = 1

    @property
    def num_parts(self) -> int:
        """Into how many parts a batch is cut."""
        return self.num_ranks // math.gcd(self.num_batches, self.num_ranks)

    @property
    def num_shares(self) -> int:
        """How many micro-batches an update has, of all ranks."""
        return self.num_batches * self.num_parts

    def of_rank(self) -> list[tuple[int, int]]:
        """Return this rank's micro-batches: the number of the batch, and the part of it."""
        numbers = range(self.rank, self.num_shares, self.num_ranks)
        return [divmod(number, self.num_parts) for number in numbers]


class UpdateBatches(NamedTuple):
    """What one rank computes of an update.

    Attributes:
        shares: the micro-batches of the rank.
        num_tokens: target tokens of the whole update, of all ranks.
        after: the position that follows the update.
        deal: how the update was split.
    """

    shares: list[MicroBatch]
    num_tokens: int
    after: Position
    deal: MicroBatchSplit


def single_rank_update(batches: Sequence[Batch], after: Position = Position()) -> UpdateBatches:
    """Return an update that a single rank makes."""
    num_tokens = sum(batch.num_tgt_tokens for batch in batches)
    return UpdateBatches(
        [MicroBatch(batch) for batch in batches], num_tokens, after, MicroBatchSplit(len(batches))
    )


class EpochPlan(NamedTuple):
    """The number of batches of an epoch, and the fraction of their tokens that is padding."""

    num_batches: int
    padding: float


def plan_batches(
    src_lengths: Lengths, tgt_lengths: Lengths, batch_tokens: int, rng: np.random.Generator
) -> list[Indices]:
    """Cut all pairs into batches of like length, in random order.

    A batch's rows times its longest side, source or target, padding included, is at most
    `batch_tokens`; a single pair that is longer makes a batch of its own. Pairs whose longer sides
    are alike go from long targets to long sources, and back at the next length, so that their
    shorter sides are alike, too.
    """
    longer = np.maximum(src_lengths, tgt_lengths)
    difference = np.where(longer % 2, src_lengths - tgt_lengths, tgt_lengths - src_lengths)
    shuffled = rng.permutation(len(longer))
    by_length = shuffled[np.lexsort((difference[shuffled], longer[shuffled]))]
    ordered = longer[by_length]
    ends = np.append(np.flatnonzero(np.diff(ordered)) + 1, len(ordered))
    batches = np.split(by_length, batch_cuts(ordered[ends - 1], ends, batch_tokens))
    return [batches[index] for index in rng.permutation(len(batches))]


def batch_cuts(lengths: npt.NDArray[np.integer], ends: Indices, batch_tokens: int) -> list[int]:
    """Return where pairs, sorted by length, are cut into batches.

    Args:
        lengths: those that there are, in order.
        ends: for each, how many pairs are not longer.
        batch_tokens: the budget.
    """
    cuts: list[int] = []
    first = begin = 0  # of the batch, and of the pairs of a length
    for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
        max_rows = max(1, batch_tokens // max(1, length))
        new_cuts = range(max(begin, first + max_rows), end, max_rows)
        cuts += new_cuts
        first, begin = new_cuts[-1] if new_cuts else first, end
    return cuts
