"""What step-by-step decoding remembers of each hypothesis. It knows tensors, and no model.

Shapes: B batch, S source length, T target length so far, D model width, N hypotheses, R rows of a
store, X = 2 * D: a key and a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """What decoding remembers of each hypothesis: where its source and its past are kept.

    Keys and values lie in stores, and each hypothesis has lists of places there: to reorder
    hypotheses is to reorder lists, and rows that no list names are written anew.

    Attributes:
        sources: the positions of the sources, without padding.
        src_places_NS: where each hypothesis finds its source; -1 is padding.
        pasts: the pieces that were read.
        places_NT: where each finds those that it has read, at the right; -1 before them.
        length_N: how many those are.
    """

    def __init__(self, sources: list[Tensor], src_keep_BS: Tensor) -> None:
        """Start with keys and values [R, X] of each layer for the R positions that are kept."""
        count_BS = src_keep_BS.flatten().cumsum(0).view_as(src_keep_BS)
        self.sources = KVPool(sources, is_full=True)
        self.src_places_NS = torch.where(src_keep_BS, count_BS - 1, -1)
        self.pasts = KVPool([torch.empty_like(source_RX) for source_RX in sources], is_full=False)
        self.places_NT, self.length_N = count_BS[:, :0], torch.zeros_like(count_BS[:, 0])

    @property
    def max_length(self) -> int:
        """How many pieces a hypothesis has read, at most."""
        return self.places_NT.shape[1]

    def advance(self) -> None:
        """Make room for one more piece of each hypothesis."""
        new_N = self.pasts.take(len(self.length_N), self.places_NT)
        self.places_NT = torch.cat([self.places_NT, new_N[:, None]], 1)
        self.length_N = self.length_N + 1

    def reorder(self, rows_N: Tensor) -> None:
        """Continue with these hypotheses; each may stand once, often, or not at all."""
        self.places_NT = self.places_NT.index_select(0, rows_N)
        self.src_places_NS = self.src_places_NS.index_select(0, rows_N)
        self.length_N = self.length_N.index_select(0, rows_N)

    def extend(self, other: KVCache) -> None:
        """Let the hypotheses of another state, which has read nothing yet, join after one's own."""
        longest = int(self.length_N.max()) if len(self.length_N) else 0
        own_NT = self.places_NT[:, self.max_length - longest :]
        self.places_NT = F.pad(own_NT, (0, 0, 0, len(other.length_N)), value=-1)
        self.length_N = torch.cat([self.length_N, other.length_N])
        own_NS, new_NS = self.src_places_NS, other.src_places_NS
        taken_R = self.sources.take(len(other.sources.layers[0]), own_NS)
        for index, source_RX in enumerate(other.sources.layers):
            self.sources.write(index, taken_R, source_RX)
        new_NS = F.pad(taken_R, (0, 1), value=-1)[new_NS]  # -1 is the last
        width = max(own_NS.shape[1], new_NS.shape[1])
        both = [F.pad(own, (0, width - own.shape[1]), value=-1) for own in (own_NS, new_NS)]
        self.src_places_NS = torch.cat(both)


class KVPool:
    """Keys and values of positions, a store [R, X] for each layer; R grows as it must.

    At first, all rows are in use, or none.
    """

    def __init__(self, layers: list[Tensor], is_full: bool) -> None:
        self.layers = layers
        self._free_R = torch.arange(0 if is_full else len(layers[0]), device=layers[0].device)

    def take(self, count: int, in_use: Tensor) -> Tensor:
        """Return the places of rows to be written, none of them among those `in_use`."""
        if count > len(self._free_R):
            self._find_free(count, in_use)
        taken_N, self._free_R = self._free_R[:count], self._free_R[count:]
        return taken_N

    def write(self, index: int, places_N: Tensor, rows_NX: Tensor) -> Tensor:
        """Fill rows of a layer's store, and return the store."""
        return self.layers[index].index_copy_(0, places_N, rows_NX)

    def _find_free(self, count: int, in_use: Tensor) -> None:
        """Find the rows that nobody reads; where they are few, make room for many more."""
        num_rows = len(self.layers[0])
        is_free_R = torch.ones(num_rows + 1, dtype=torch.bool, device=in_use.device)
        is_free_R[in_use] = False  # -1 is the last, which is no row
        free_R = is_free_R[:-1].nonzero()[:, 0]
        num_needed = num_rows - len(free_R) + count
        if num_needed > 3 * num_rows // 4:
            enough = 2 * num_needed
            self.layers = [_enlarged(layer_RX, enough) for layer_RX in self.layers]
            free_R = torch.cat([free_R, torch.arange(num_rows, enough, device=free_R.device)])
        self._free_R = free_R


def _enlarged(layer_RX: Tensor, num_rows: int) -> Tensor:
    larger_RX = layer_RX.new_empty((num_rows, layer_RX.shape[1]))
    larger_RX[: len(layer_RX)] = layer_RX
    return larger_RX
