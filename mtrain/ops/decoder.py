"""All layers of a decoder for the newest position of each hypothesis, in one compiled call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mtrain.ops.dropout import Dropout
from mtrain.ops.layer_norm import LayerNorm
from mtrain.ops.linear import Linear
from mtrain.ops.native import (
    DecoderLayerWeights,
    DecoderShape,
    functions_for,
    is_bare,
    is_float_vector,
    is_plain,
)

_MAP_NAMES = ("self_in", "self_out", "queries", "cross_out", "inner", "outer")


class LayerModules(NamedTuple):
    """The modules of a post-norm layer with ReLU and without dropout, in the order of their use.

    Attributes:
        layer: which holds the others.
        self_in: to queries, keys and values.
        inner, outer: the feed-forward network.
    """

    layer: nn.Module
    self_in: Linear
    self_out: Linear
    norm_1: LayerNorm
    queries: Linear
    cross_out: Linear
    norm_2: LayerNorm
    inner: Linear
    outer: Linear
    norm_3: LayerNorm

    @property
    def linear_maps(self) -> tuple[Linear, ...]:
        """The linear maps."""
        return self.self_in, self.self_out, self.queries, self.cross_out, self.inner, self.outer


class DecoderModules(NamedTuple):
    """The modules of a decoder.

    Attributes:
        embedding: of the target tokens.
        positions: returns the encodings that are added.
        dropout: of the sum.
        layers: from the first to the last.
    """

    embedding: nn.Embedding
    positions: nn.Module
    dropout: Dropout
    layers: Sequence[LayerModules]

    def descendants(self) -> list[nn.Module]:
        """Return all modules, with those inside of them."""
        roots = (
            self.embedding,
            self.positions,
            self.dropout,
            *(each.layer for each in self.layers),
        )
        return [module for root in roots for module in root.modules()]


class CompiledDecoder:
    """The layers of a decoder with packed weights, as one compiled call.

    It computes what the layers compute one operation after the other, bit for bit.

    Args:
        parts: of the decoder.
        num_heads: of each attention.
        window: positions before the newest that self-attention sees; None is all.
    """

    def __init__(self, parts: DecoderModules, num_heads: int, window: int | None) -> None:
        self._layers, self._num_heads, self._window = parts.layers, num_heads, window
        self._table, self._modules = parts.embedding.weight.detach(), parts.descendants()
        self._parameters = _parameters_of(self._modules)
        self._memory = [parameter.detach() for parameter in self._parameters]  # stays allocated
        self._versions, self._state = self._read_versions(), self._read_state()
        self._weights = (DecoderLayerWeights * len(parts.layers))(*map(_weights_of, parts.layers))

    @staticmethod
    def of(parts: DecoderModules, num_heads: int, window: int | None) -> CompiledDecoder | None:
        """Return the compiled layers; None where they must run one operation after the other."""
        if not parts.layers or not all(map(_has_packed_weights, parts.layers)):
            return None
        first, table_VD, modules = parts.layers[0], parts.embedding.weight, parts.descendants()
        d_model, d_ff = first.inner.in_features, first.inner.out_features
        if (
            all(_can_be_compiled(each, d_model, d_ff) for each in parts.layers)
            and type(parts.embedding) is nn.Embedding
            and table_VD.shape[1:] == (d_model,)
            and _is_float(table_VD)
            and all(map(is_bare, modules))
            and not any(isinstance(each, Dropout) and each.is_active for each in modules)
            and not any(parameter.is_inference() for parameter in _parameters_of(modules))
        ):
            return CompiledDecoder(parts, num_heads, window)
        return None

    def is_current(self) -> bool:
        """Tell whether the decoder is what it was, with the same weights."""
        return (
            self._read_versions() == self._versions
            and self._read_state() == self._state
            and all(map(_has_packed_weights, self._layers))
        )

    def step(
        self,
        ids_N: Tensor,
        position_N: Tensor,
        encodings_TD: Tensor,
        pasts: Sequence[Tensor],
        sources: Sequence[Tensor],
        past_slots_NT: Tensor,
        source_slots_NS: Tensor,
    ) -> Tensor | None:
        """Return the states [N, D] after all layers; None where the layers must run one by one.

        The keys and values of the new position are written to the slot in the last column.

        Args:
            ids_N, position_N: the newest token of each hypothesis, and its position.
            encodings_TD: of positions; those after the last have that one.
            pasts, sources: the cache [R, X] of each layer, X = 2 * D.
            past_slots_NT, source_slots_NS: row numbers of the caches; -1 is padding.

        Raises:
            IndexError: if a token, a position or a slot is out of range.
            MemoryError: if there is no work space.
        """
        table_VD, num_layers, num_rows = self._table, len(self._layers), len(ids_N)
        width, slots = table_VD.shape[1], (past_slots_NT, source_slots_NS)
        functions = functions_for(encodings_TD, *pasts, *sources)
        if (
            functions is None
            or not (_is_float(encodings_TD) and encodings_TD.shape[1:] == (width,))
            or not len(pasts) == len(sources) == num_layers
            or not (_is_pool(pasts, width) and _is_pool(sources, width))
            or not (_are_ids(ids_N, num_rows) and _are_ids(position_N, num_rows))
            or not all(_are_ids(each, num_rows, each.shape[-1]) for each in slots)
            or self._read_versions() != self._versions
        ):
            return None
        num_past, head_size = past_slots_NT.shape[1], width // self._num_heads
        shape = DecoderShape(
            num_layers,
            num_rows,
            self._num_heads,
            head_size,
            self._layers[0].inner.out_features,
            len(pasts[0]),
            num_past,
            num_past,
            num_past if self._window is None else min(num_past, self._window + 1),
            len(sources[0]),
            source_slots_NS.shape[1],
            source_slots_NS.shape[1],
            len(table_VD),
            len(encodings_TD),
            head_size**-0.5,
            math.sqrt(width),
        )
        pointers = ctypes.c_void_p * num_layers
        caches = [pointers(*(layer.data_ptr() for layer in pool)) for pool in (pasts, sources)]
        states_ND = table_VD.new_empty((num_rows, width))
        tensors = (ids_N, position_N, table_VD, encodings_TD, *slots, states_ND)
        functions.call("decoder_step", tensors, structures=(shape, self._weights, *caches))
        return states_ND

    def _read_versions(self) -> list[int]:
        """Return numbers of which one changes when a weight is changed in place."""
        return [parameter._version for parameter in self._parameters]

    def _read_state(self) -> list[object]:
        """Return what changes when a hook is added, or a module or a parameter is replaced."""
        state: list[object] = []
        for module in self._modules:
            state += (is_bare(module), module.training, module.__dict__.get("eps"))
            state += map(id, module._modules.values())
            state += map(id, module._parameters.values())
        return state + [parameter.data_ptr() for parameter in self._parameters]


def _can_be_compiled(parts: LayerModules, d_model: int, d_ff: int) -> bool:
    maps, norms = parts.linear_maps, (parts.norm_1, parts.norm_2, parts.norm_3)
    sizes = [3 * d_model, d_model, d_model, d_model, d_ff, d_model]
    return (
        [each.out_features for each in maps] == sizes
        and [each.in_features for each in maps] == [*[d_model] * 5, d_ff]
        and all(type(each) is Linear for each in maps)
        and all(type(each) is LayerNorm for each in norms)
        and all(each.bias is None or is_float_vector(each.bias, each.out_features) for each in maps)
        and all(
            is_float_vector(each.weight, d_model) and is_float_vector(each.bias, d_model)
            for each in norms
        )
    )


def _has_packed_weights(parts: LayerModules) -> bool:
    """Tell whether all linear maps have packed weights, which are those that they have now."""
    return all(
        each._packed is not None and each._packed.is_current(each._parameters.get("weight"))
        for each in parts.linear_maps
    )


def _weights_of(parts: LayerModules) -> DecoderLayerWeights:
    pointers: dict[str, int | None] = {}
    for name, linear in zip(_MAP_NAMES, parts.linear_maps, strict=True):
        assert linear._packed is not None
        pointers[name] = linear._packed.tiles.data_ptr()
        pointers[f"{name}_bias"] = None if linear.bias is None else linear.bias.data_ptr()
    layer = DecoderLayerWeights(**pointers)
    for number, norm in enumerate((parts.norm_1, parts.norm_2, parts.norm_3), 1):
        setattr(layer, f"gain_{number}", norm.weight.data_ptr())
        setattr(layer, f"norm_bias_{number}", norm.bias.data_ptr())
        setattr(layer, f"eps_{number}", norm.eps)
    return layer


def _parameters_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    parameters = (each for module in modules for each in module._parameters.values())
    return [parameter for parameter in parameters if parameter is not None]


def _is_float(x_RD: Tensor) -> bool:
    return is_plain(x_RD) and x_RD.dtype is torch.float32 and x_RD.is_contiguous()


def _is_pool(pool: Sequence[Tensor], d_model: int) -> bool:
    """Tell whether all tensors of a cache are contiguous, of one shape [R, 2 D]."""
    shape = (len(pool[0]), 2 * d_model)
    return all(layer_RX.shape == shape and layer_RX.is_contiguous() for layer_RX in pool)


def _are_ids(ids: Tensor, *shape: int) -> bool:
    """Tell whether a tensor is contiguous numbers of rows, of this shape."""
    return is_plain(ids) and ids.dtype is torch.int64 and ids.shape == shape and ids.is_contiguous()
