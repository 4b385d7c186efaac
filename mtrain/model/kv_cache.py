"""A paged key-value cache for continuous batching; independent of the model's layers.

Shapes: B batch, S source length, T target length so far, D model width, N hypotheses, R slots of a
pool, X = 2 * D: a key and a value.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.ops.packed_weights import Ints

_FEW_SLOTS = 128  # a new pool of few sources has 8 slots per source position, up to this many


class Slots(NamedTuple):
    """Row numbers of the pools for each hypothesis; -1 is padding."""

    past_NT: Tensor
    source_NS: Tensor


class KVCache:
    """The keys and values of the hypotheses of a search, in pools of slots.

    A slot holds the key and value of one position. Each hypothesis has a list of slots; hypotheses
    share the slots of a common prefix. Reordering hypotheses reorders lists; a slot in no list is
    free. New sentences are admitted while others are being decoded (continuous batching).

    The pools are on the model's device, the lists are NumPy arrays. Pools in bfloat16 hold rounded
    keys and values in half the memory.

    Attributes:
        sources: the pool of the source positions, without padding.
        src_slots_NS: the slots of each hypothesis' source; -1 is padding.
        pasts: the pool of the target positions.
        slots_NT: the slots of each hypothesis' target so far, right-aligned; -1 is padding.
        length_N: the number of target positions of each hypothesis.
    """

    def __init__(self, sources: list[Tensor], src_slots_BS: Ints) -> None:
        """Take the source keys and values [R, X] of each layer, and the slots of each source."""
        self.sources = KVPool(sources, is_full=True)
        self.src_slots_NS = src_slots_BS
        num_slots = max(len(sources[0]), min(_FEW_SLOTS, 8 * len(sources[0])))
        pasts = [source_RX.new_empty((num_slots, source_RX.shape[1])) for source_RX in sources]
        self.pasts = KVPool(pasts, is_full=False)
        self.slots_NT: Ints = np.empty((len(src_slots_BS), 0), np.int64)
        self.length_N: Ints = np.zeros(len(src_slots_BS), np.int64)

    @property
    def max_length(self) -> int:
        """The columns of `slots_NT`, an upper bound of the target positions of a hypothesis."""
        return int(self.slots_NT.shape[1])

    def advance(self) -> None:
        """Allocate a slot for one more position of each hypothesis."""
        new_N = self.pasts.allocate(len(self.length_N), self.slots_NT)
        self.slots_NT = np.concatenate([self.slots_NT, new_N[:, None]], 1)
        self.length_N = self.length_N + 1

    def replace(
        self, slots_NT: Ints, src_slots_NS: Ints, length_N: Ints, num_allocated: int
    ) -> None:
        """Replace the hypotheses, after the first `num_allocated` reserved slots were taken."""
        self.slots_NT, self.src_slots_NS, self.length_N = slots_NT, src_slots_NS, length_N
        self.pasts.allocate(num_allocated, slots_NT)

    def slots(self) -> Slots:
        """Return the slots of each hypothesis as tensors on the device of the pools."""
        device = self.sources.layers[0].device
        past_NT, source_NS = torch.from_numpy(self.slots_NT), torch.from_numpy(self.src_slots_NS)
        return Slots(past_NT.to(device), source_NS.to(device))

    def reorder(self, rows_N: Ints) -> None:
        """Replace the hypotheses by these rows; each may occur once, several times or never."""
        self.slots_NT = self.slots_NT.take(rows_N, 0)
        self.src_slots_NS = self.src_slots_NS.take(rows_N, 0)
        self.length_N = self.length_N.take(rows_N)

    def admit(self, other: KVCache) -> None:
        """Append the rows of newly admitted sentences, of which no position is decoded yet."""
        longest = int(self.length_N.max(initial=0))
        old_NT = self.slots_NT[:, self.max_length - longest :]
        self.slots_NT = padded(old_NT, len(old_NT) + len(other.length_N), longest)
        self.length_N = np.concatenate([self.length_N, other.length_N])
        old_NS, new_NS = self.src_slots_NS, other.src_slots_NS
        slots_R = self.sources.allocate(len(other.sources.layers[0]), old_NS)
        slots = torch.from_numpy(slots_R).to(self.sources.layers[0].device)
        for index, source_RX in enumerate(other.sources.layers):
            self.sources.write(index, slots, source_RX)
        new_NS = np.append(slots_R, -1)[new_NS]  # index -1, the last, is padding
        width = max(old_NS.shape[1], new_NS.shape[1])
        both = [padded(slots_NS, len(slots_NS), width) for slots_NS in (old_NS, new_NS)]
        self.src_slots_NS = np.concatenate(both)


class KVPool:
    """Slots for the keys and values of positions, a tensor [R, X] for each layer.

    R grows when few slots are free. With `is_full` all slots are in use at first, else none.
    """

    def __init__(self, layers: list[Tensor], is_full: bool) -> None:
        self.layers = layers
        self._free_R = np.arange(0 if is_full else len(layers[0]))

    def allocate(self, count: int, in_use: Ints) -> Ints:
        """Return `count` free slots [count], none of them among those `in_use`."""
        slots_R = self.reserve(count, in_use)
        self._free_R = slots_R[count:]
        return slots_R[:count]

    def reserve(self, count: int, in_use: Ints) -> Ints:
        """Return the free slots, at least `count`, none of them among those `in_use`."""
        if count > len(self._free_R):
            self._find_free(count, in_use)
        return self._free_R

    def write(self, index: int, slots_N: Tensor, rows_NX: Tensor) -> Tensor:
        """Write keys and values into slots of a layer, and return the layer's whole pool [R, X]."""
        layer_RX = self.layers[index]
        return layer_RX.index_copy_(0, slots_N, rows_NX.to(layer_RX.dtype))

    def _find_free(self, count: int, in_use: Ints) -> None:
        """Collect the free slots; enlarge the pool if taking `count` would leave less than 1/4."""
        num_slots = len(self.layers[0])
        is_free_R = np.ones(num_slots + 1, np.bool_)
        is_free_R[in_use] = False  # index -1, the last, is padding
        free_R = np.flatnonzero(is_free_R[:-1])
        num_needed = num_slots - len(free_R) + count
        if num_needed > 3 * num_slots // 4:
            new_size = 2 * num_needed
            self.layers = [_enlarged(layer_RX, new_size) for layer_RX in self.layers]
            free_R = np.concatenate([free_R, np.arange(num_slots, new_size)])
        self._free_R = free_R


def padded(ids: Ints, num_rows: int, num_columns: int) -> Ints:
    """Return a matrix of this size, with -1 below `ids` and to their right."""
    result = np.full((num_rows, num_columns), -1)
    result[: ids.shape[0], : ids.shape[1]] = ids
    return result


def source_slots(keep_BS: NDArray[np.bool_]) -> Ints:
    """Number the kept positions in order, as slots of a pool without padding; -1 is padding."""
    return np.where(keep_BS, keep_BS.cumsum().reshape(keep_BS.shape) - 1, -1)


def _enlarged(layer_RX: Tensor, num_slots: int) -> Tensor:
    larger_RX = layer_RX.new_empty((num_slots, layer_RX.shape[1]))
    larger_RX[: len(layer_RX)] = layer_RX
    return larger_RX
