"""Copies of the weights of linear maps for decoding, in float32 or a lower precision.

Shapes: M output features, K input features, P columns of a tile, U blocks of 64 weight rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mtrain.ops.header import STRUCTURES
from mtrain.ops.native import Functions

Ints = NDArray[np.int64]
Precision = Literal["float32", "bfloat16", "int8"]
_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}  # as in `ops.h`
_NUM_PROBES = 4  # weights that are compared before packed ones are used
_BLOCK = 64  # as in `decode_linear.c`
_LARGEST, _SMALLEST = 127, 1e-30  # as in `int8.c`


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of `x` [..., K] to int8, symmetrically, with the scale max|x| / 127.

    Returns:
        values: int8 from -127 to 127, [..., K].
        scales: the factor of each row, [...]; NaN for rows that are not finite.
    """
    most = x.abs().amax(-1)
    is_rounded = most.isfinite() & (most >= _SMALLEST)
    zero = torch.where(most.isfinite(), 0.0, torch.nan)
    inverse = torch.where(is_rounded, _LARGEST / most, 0.0)
    values = torch.nan_to_num(x * inverse[..., None], 0.0).round().to(torch.int8)
    return values, torch.where(is_rounded, most / _LARGEST, zero)


class RoundedCopy(NamedTuple):
    """A low-precision copy of an output layer, with which the best token is found.

    Attributes:
        packed: the copy, in bfloat16 or int8.
        weight: the exact weights, for tokens that the copy cannot rule out; None if the copy alone
            decides.
        bounds_2U: for each block, the largest norm of a row, and the largest error of the product
            of a rounded row with a unit vector.
    """

    packed: PackedWeights
    weight: Tensor | None = None
    bounds_2U: Tensor | None = None


class PackedRows(NamedTuple):
    """Some rows of packed weights: the tokens of an output layer that are ranked.

    Attributes:
        ids_C: the rows, in ascending order.
        row_map: the packed rows as C reads them; None without compiled functions.
        memory: keeps alive the memory that `row_map` points to.
    """

    ids_C: Ints
    row_map: ctypes.Structure | None
    memory: object


class PackedWeights:
    """A packed copy of the weights of a linear map, which detects when the weights change.

    It compares the parameter, its version counter (in-place operations), and its address
    (`weight.data = ...` and `Module.to`). None of these shows `weight.data.mul_(...)` or writes to
    a NumPy view, so four of the largest weights are compared, too. If such a write changes only
    other weights, it is not detected, and `pack_weights` must be called again.

    Args:
        weight: a parameter [M, K] in float32.
        functions: the compiled functions that read the copy, if there are any.
        precision: of the copy; weights that are not finite stay in float32.

    Attributes:
        weight: the parameter that was packed.
        functions, precision: of the copy.
        tiles: the copy for compiled functions; None without them.
        scan: of an output layer only: a second copy, to find the best token.
    """

    scan: RoundedCopy | None = None

    def __init__(
        self, weight: Tensor, functions: Functions | None, precision: Precision = "float32"
    ) -> None:
        own_MK = weight.detach()
        if precision != "float32" and not own_MK.isfinite().all():
            precision = "float32"
        self.weight, self.precision = weight, precision
        self._rounded_MK, self._scales_M = own_MK, None
        self._padded: list[Tensor] = []  # scales and sums, padded to whole tiles
        if precision == "bfloat16":
            self._rounded_MK = own_MK.bfloat16()
        elif precision == "int8":
            self._rounded_MK, self._scales_M = quantise(own_MK)
        self.functions = functions
        self.tiles = None if functions is None else pack_tiles(self._rounded_MK, functions)
        if self.tiles is not None and self._scales_M is not None:
            missing = self.tiles.shape[0] * self.tiles.shape[2] - len(weight)
            sums_M = self._rounded_MK.sum(1, dtype=torch.int32)
            self._padded = [
                F.pad(per_row_M, (0, missing)) for per_row_M in (self._scales_M, sums_M)
            ]
        self._memory = own_MK  # kept alive, so that nothing else gets its address
        self._address, self._version = weight.data_ptr(), weight._version
        flat = own_MK.flatten()
        size = -(-len(flat) // _NUM_PROBES)
        starts = range(0, len(flat), size)
        probed = [start + int(flat[start : start + size].abs().argmax()) for start in starts]
        addresses = [self._address + flat.element_size() * position for position in probed]
        self._probes = [ctypes.c_int32.from_address(address) for address in addresses]
        self._probed_bits = [probe.value for probe in self._probes]

    def is_current(self, weight: Tensor | None) -> bool:
        """Tell whether `weight` is the parameter that was packed, with the same values."""
        return (
            weight is self.weight
            and weight is not None
            and weight._version == self._version
            and weight.data_ptr() == self._address
            and weight.is_contiguous()
            and self.has_same_values()
        )

    def has_same_values(self) -> bool:
        """Tell whether the compared weights are unchanged; their address must be the same."""
        return [probe.value for probe in self._probes] == self._probed_bits

    def map_with(self, bias: Tensor | None) -> ctypes.Structure:
        """Return the map as C reads it; `tiles` (required) and `bias` must stay allocated."""
        assert self.tiles is not None
        tensors = (self.tiles, bias, *self._padded)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        return STRUCTURES["linear_map"](_FORMATS[self.precision], *pointers)

    def rows(self, ids: Sequence[Ints]) -> list[PackedRows]:
        """Pack the rows of several lists of ids, each in tiles of its own."""
        if self.functions is None or self.tiles is None:
            return [PackedRows(ids_C, None, None) for ids_C in ids]
        width, group_size = self.functions.tile_columns, self.tiles.shape[1]
        ends = np.cumsum([-(-len(ids_C) // width) * width for ids_C in ids])
        starts = [0, *ends[:-1].tolist()]
        padded_R = np.zeros(ends[-1], np.int64)
        for start, ids_C in zip(starts, ids, strict=True):
            padded_R[start : start + len(ids_C)] = ids_C
        rows_R = torch.from_numpy(padded_R)
        tiles = pack_tiles(self._rounded_MK[rows_R], self.functions)
        packed = [tiles, *(each[rows_R] for each in self._padded)]
        sizes = [4 * group_size, *(4 for _ in self._padded)]  # bytes of a row
        packed_rows = []
        for start, ids_C in zip(starts, ids, strict=True):
            addresses = [x.data_ptr() + start * size for x, size in zip(packed, sizes, strict=True)]
            pointers = (addresses[0], None, *addresses[1:])
            row_map = STRUCTURES["linear_map"](_FORMATS[self.precision], *pointers)
            ids_address = padded_R.ctypes.data + 8 * start
            rows = STRUCTURES["shortlist"](row_map, ids_address, len(ids_C))
            packed_rows.append(PackedRows(ids_C, rows, (padded_R, *packed)))
        return packed_rows

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return [..., M] by the plain formula of the precision, for `x` [..., K] in float32."""
        if self._scales_M is None:
            return F.linear(x.to(self._rounded_MK.dtype).float(), self._rounded_MK.float(), bias)
        values, scales = quantise(x)
        sums = F.linear(values.double(), self._rounded_MK.double()).float()  # exact
        product = sums * (scales[..., None] * self._scales_M)
        return product if bias is None else product + bias

    def make_scan(self, precision: Precision) -> RoundedCopy | None:
        """Return a copy in a precision, with error bounds that keep the best token exact.

        Returns:
            None if the weights are not finite.
        """
        own_MK, num_features = self.weight.detach(), self.weight.shape[1]
        packed = PackedWeights(self.weight, self.functions, precision)
        if packed.precision != precision:
            return None
        rounded_MK = packed._rounded_MK.float()
        if packed._scales_M is not None:
            rounded_MK = rounded_MK * packed._scales_M[:, None]
        length_M = own_MK.norm(dim=1)
        # a float32 addition has a relative error of at most 2^-24, here and in the exact product
        error_M = (own_MK - rounded_MK).norm(dim=1) + length_M * (num_features + 4) * 2**-22
        bounds_2M = F.pad(torch.stack([length_M, error_M]), (0, -len(length_M) % _BLOCK))
        return RoundedCopy(packed, self.weight, bounds_2M.view(2, -1, _BLOCK).amax(-1).contiguous())


def pack_tiles(weight_MK: Tensor, functions: Functions) -> Tensor:
    """Return weights [M, K] packed for the compiled functions, [M / P, K', P].

    They are padded with zeros. P is the number of output columns of one tile, and K' the number of
    4-byte groups of a row: element [i, g, p] is group g of row i * P + p.
    """
    per_group, width = 4 // weight_MK.element_size(), functions.tile_columns
    padded = F.pad(weight_MK, (0, -weight_MK.shape[1] % per_group, 0, -len(weight_MK) % width))
    groups = padded.view(torch.int32) if per_group > 1 else padded
    return groups.view(-1, width, groups.shape[1]).transpose(1, 2).contiguous()
