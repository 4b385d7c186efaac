"""A batch of encoded pairs: padded ids, keep-masks, token counts.

Shapes: B batch, S source length, T target length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Ids = Sequence[int] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """Padded ids of B pairs. `tgt_in` begins with bos, `tgt_out` ends with eos."""

    src_BS: Tensor
    src_keep_BS: Tensor
    tgt_in_BT: Tensor
    tgt_out_BT: Tensor
    tgt_keep_BT: Tensor
    num_src_tokens: int
    num_tgt_tokens: int

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; the copies from pinned memory are asynchronous."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return the batch in pinned memory."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        tensors = (self.src_BS, self.src_keep_BS, self.tgt_in_BT, self.tgt_out_BT, self.tgt_keep_BT)
        src, src_keep, tgt_in, tgt_out, tgt_keep = map(change, tensors)
        return Batch(
            src, src_keep, tgt_in, tgt_out, tgt_keep, self.num_src_tokens, self.num_tgt_tokens
        )

    @property
    def num_places(self) -> int:
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
            int(src_keep_BS.sum()),
            int(tgt_keep_BT.sum()),
        )


def collate(src: Sequence[Ids], tgt: Sequence[Ids], pad: int, bos: int, eos: int) -> Batch:
    """Pad encoded pairs into a batch: `src` with eos, `tgt` without bos and eos."""
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
        sum(src_lengths),
        sum(tgt_lengths),
    )


def pad_right(rows: Sequence[Ids], pad: int) -> Tensor:
    """Return the rows as one int64 tensor, padded on the right with `pad`."""
    lengths = np.array([len(row) for row in rows])
    padded = np.full((len(rows), lengths.max()), pad, dtype=np.int64)
    is_filled = np.arange(padded.shape[1]) < lengths[:, None]
    padded[is_filled] = np.concatenate(rows, dtype=np.int64, casting="unsafe")
    return torch.from_numpy(padded)


def keep_first(lengths: Sequence[int]) -> Tensor:
    """Return a bool mask (B, longest length), True at the first `lengths[i]` positions of row i."""
    lengths_B = torch.tensor(lengths)
    return torch.arange(max(lengths)) < lengths_B[:, None]
