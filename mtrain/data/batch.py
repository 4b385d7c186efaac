"""Batches of encoded pairs: how pairs are grouped, padded, and assigned to ranks.

Shapes: B batch, S source length, T target length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Indices = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
TokenIds = npt.NDArray[np.int32]
Ids = Sequence[int] | TokenIds


@dataclass(frozen=True)
class Batch:
    """Padded int64 ids of B pairs, and bool masks that are True at tokens, False at padding.

    `tgt_in` begins with bos, `tgt_out` ends with eos.
    """

    src_BS: Tensor
    src_keep_BS: Tensor
    tgt_in_BT: Tensor
    tgt_out_BT: Tensor
    tgt_keep_BT: Tensor
    num_tgt_tokens: int

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; the copies from pinned memory are asynchronous."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return the batch in pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        tensors = (self.src_BS, self.src_keep_BS, self.tgt_in_BT, self.tgt_out_BT, self.tgt_keep_BT)
        src, src_keep, tgt_in, tgt_out, tgt_keep = map(change, tensors)
        return Batch(src, src_keep, tgt_in, tgt_out, tgt_keep, self.num_tgt_tokens)

    @property
    def num_positions(self) -> int:
        """Number of positions on both sides, padding included."""
        return self.src_BS.numel() + self.tgt_in_BT.numel()

    def split(self, parts: int) -> list[Batch]:
        """Cut into at most `parts` batches of similar size; trim the padding of each."""
        size = -(-len(self.src_BS) // parts)
        return [
            self._take(slice(first, first + size)) for first in range(0, len(self.src_BS), size)
        ]

    def _take(self, rows: slice) -> Batch:
        src_keep_BS, tgt_keep_BT = self.src_keep_BS[rows], self.tgt_keep_BT[rows]
        width_S, width_T = int(src_keep_BS.sum(1).max()), int(tgt_keep_BT.sum(1).max())
        return Batch(
            self.src_BS[rows, :width_S],
            src_keep_BS[:, :width_S],
            self.tgt_in_BT[rows, :width_T],
            self.tgt_out_BT[rows, :width_T],
            tgt_keep_BT[:, :width_T],
            int(tgt_keep_BT.sum()),
        )


def collate(src: Sequence[Ids], tgt: Sequence[Ids], pad: int, bos: int, eos: int) -> Batch:
    """Pad encoded pairs into a batch: `src` with eos, `tgt` without bos and eos."""
    import torch
    import torch.nn.functional as F

    src_lengths, tgt_lengths = [len(ids) for ids in src], [len(ids) + 1 for ids in tgt]
    tokens_BT, rows = pad_right(tgt, pad), torch.arange(len(tgt))
    tgt_out_BT = F.pad(tokens_BT, (0, 1), value=pad)
    tgt_out_BT[rows, torch.tensor(tgt_lengths) - 1] = eos
    return Batch(
        pad_right(src, pad),
        keep_first(src_lengths),
        F.pad(tokens_BT, (1, 0), value=bos),
        tgt_out_BT,
        keep_first(tgt_lengths),
        sum(tgt_lengths),
    )


def pad_right(rows: Sequence[Ids], pad: int) -> Tensor:
    """Return the rows as one int64 tensor, padded on the right with `pad`."""
    import torch

    lengths = np.array([len(row) for row in rows])
    padded = np.full((len(rows), lengths.max()), pad, dtype=np.int64)
    is_filled = np.arange(padded.shape[1]) < lengths[:, None]
    padded[is_filled] = np.concatenate(rows, dtype=np.int64, casting="unsafe")
    return torch.from_numpy(padded)


def keep_first(lengths: Sequence[int]) -> Tensor:
    """Return a bool mask (B, longest length), True at the first `lengths[i]` positions of row i."""
    import torch

    return torch.from_numpy(np.arange(max(lengths)) < np.array(lengths)[:, None])


class Position(NamedTuple):
    """The next batch to read: batch `batch` of epoch `epoch`, both from 0.

    A window's batches are numbered from the number of pairs in the windows before it, so that the
    number alone identifies the window.
    """

    epoch: int = 0
    batch: int = 0


class MicroBatch(NamedTuple):
    """One forward and backward of one rank.

    The gradients of a dummy are discarded: it is the batch of a rank that gets no rows of a small
    batch, but must take part in the collectives.
    """

    batch: Batch
    is_dummy: bool = False


class MicroBatchSplit(NamedTuple):
    """How the batches of an update are split into the micro-batches of all ranks.

    Each batch is cut into the smallest number of parts that makes the total divisible by the number
    of ranks; the parts are assigned round-robin. The pairs of an update do not depend on the number
    of ranks.
    """

    num_batches: int
    rank: int = 0
    num_ranks: int = 1

    @property
    def num_parts(self) -> int:
        """Number of parts of a batch."""
        return self.num_ranks // math.gcd(self.num_batches, self.num_ranks)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of an update, over all ranks."""
        return self.num_batches * self.num_parts

    def of_rank(self) -> list[tuple[int, int]]:
        """Return (batch number, part number) of each micro-batch of this rank."""
        numbers = range(self.rank, self.num_micro_batches, self.num_ranks)
        return [divmod(number, self.num_parts) for number in numbers]


class UpdateBatches(NamedTuple):
    """One rank's micro-batches of an update."""

    micro_batches: list[MicroBatch]
    num_tokens: int  # target tokens of the whole update, over all ranks
    after: Position  # the position after the update
    split: MicroBatchSplit  # of the update over ranks


class EpochPlan(NamedTuple):
    """The number of batches of an epoch, and the fraction of positions that are padding."""

    num_batches: int
    padding: float


def plan_batches(
    src_lengths: Lengths, tgt_lengths: Lengths, batch_tokens: int, rng: np.random.Generator
) -> list[Indices]:
    """Return the rows of batches of similar length, in random order.

    A batch's rows times its longest side, source or target, is at most `batch_tokens`; a longer
    pair is a batch by itself. Pairs are sorted by the length of the longer side, then by source
    minus target length, in alternating direction, so that the shorter sides are similar, too.
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
    """Return the indices at which pairs, sorted by length, are cut into batches.

    Args:
        lengths: the distinct lengths, ascending.
        ends: for each, the number of pairs of at most this length.
        batch_tokens: the budget of a batch.
    """
    cuts: list[int] = []
    first = begin = 0  # of the batch, and of the pairs of a length
    for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
        max_rows = max(1, batch_tokens // max(1, length))
        new_cuts = range(max(begin, first + max_rows), end, max_rows)
        cuts += new_cuts
        first, begin = new_cuts[-1] if new_cuts else first, end
    return cuts
