"""All layers of a decoder for the newest position of each hypothesis, in one compiled call."""

from __future__ import annotations

import ctypes
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


class CompiledDecoder:
    """The layers of a decoder with packed weights, as one compiled call.

    It computes what the layers compute one operation after the other, bit for bit.

    Args:
        layers: from the first to the last, at least one.
        num_heads: of each attention.
        window: positions before the newest that self-attention sees; None is all.
    """

    def __init__(self, layers: Sequence[LayerModules], num_heads: int, window: int | None) -> None:
        self._layers, self._num_heads, self._window = list(layers), num_heads, window
        self._modules = [module for each in layers for module in each.layer.modules()]
        self._parameters = [parameter for each in layers for parameter in each.layer.parameters()]
        self._memory = [parameter.detach() for parameter in self._parameters]  # stays allocated
        self._versions, self._state = self._read_versions(), self._read_state()
        self._weights = (DecoderLayerWeights * len(layers))(*map(_weights_of, layers))

    @staticmethod
    def of(
        layers: Sequence[LayerModules], num_heads: int, window: int | None
    ) -> CompiledDecoder | None:
        """Return the compiled layers; None where they must run one operation after the other."""
        widths = {(each.self_in.in_features, each.inner.out_features) for each in layers}
        if len(widths) != 1 or not all(_can_be_compiled(each, *min(widths)) for each in layers):
            return None
        return CompiledDecoder(layers, num_heads, window)

    def is_current(self) -> bool:
        """Tell whether the layers are what they were, with the same weights."""
        return (
            self._read_versions() == self._versions
            and self._read_state() == self._state
            and all(map(_has_packed_weights, self._layers))
        )

    def step(
        self,
        x_ND: Tensor,
        pasts: Sequence[Tensor],
        sources: Sequence[Tensor],
        past_slots_NT: Tensor,
        source_slots_NS: Tensor,
    ) -> Tensor | None:
        """Return the states [N, D] after all layers; None where the layers must run one by one.

        The keys and values of the new position are written to the slot in the last column.

        Args:
            x_ND: embeddings of the newest position.
            pasts, sources: the cache [R, X] of each layer, X = 2 * D.
            past_slots_NT, source_slots_NS: row numbers of the caches; -1 is padding.

        Raises:
            IndexError: if a slot is not in the cache.
            MemoryError: if there is no work space.
        """
        functions = functions_for(x_ND, *pasts, *sources)
        width, num_layers = self._layers[0].self_in.in_features, len(self._layers)
        if (
            functions is None
            or functions.dtype_name != "float"
            or x_ND.dim() != 2
            or x_ND.shape[1] != width
            or not len(pasts) == len(sources) == num_layers
            or not (_is_pool(pasts, width) and _is_pool(sources, width))
            or not (_are_slots(past_slots_NT, x_ND) and _are_slots(source_slots_NS, x_ND))
            or self._read_versions() != self._versions
        ):
            return None
        num_past, inner = past_slots_NT.shape[1], self._layers[0].inner
        shape = DecoderShape(
            num_layers,
            len(x_ND),
            self._num_heads,
            width // self._num_heads,
            inner.out_features,
            len(pasts[0]),
            num_past,
            past_slots_NT.stride(0),
            num_past if self._window is None else min(num_past, self._window + 1),
            len(sources[0]),
            source_slots_NS.shape[1],
            source_slots_NS.stride(0),
            (width // self._num_heads) ** -0.5,
        )
        pointers = ctypes.c_void_p * num_layers
        caches = [pointers(*(layer.data_ptr() for layer in pool)) for pool in (pasts, sources)]
        states_ND = x_ND.clone(memory_format=torch.contiguous_format)
        tensors = (past_slots_NT, source_slots_NS, states_ND)
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
            for parameter in module._parameters.values():
                state += (id(parameter), None if parameter is None else parameter.data_ptr())
        return state


def _can_be_compiled(parts: LayerModules, d_model: int, d_ff: int) -> bool:
    maps, norms = parts.linear_maps, (parts.norm_1, parts.norm_2, parts.norm_3)
    sizes = [3 * d_model, d_model, d_model, d_model, d_ff, d_model]
    return (
        [each.out_features for each in maps] == sizes
        and [each.in_features for each in maps] == [*[d_model] * 5, d_ff]
        and all(type(each) is Linear for each in maps)
        and all(type(each) is LayerNorm for each in norms)
        and _has_packed_weights(parts)
        and all(each.bias is None or is_float_vector(each.bias, each.out_features) for each in maps)
        and all(
            is_float_vector(each.weight, d_model) and is_float_vector(each.bias, d_model)
            for each in norms
        )
        and all(map(is_bare, parts.layer.modules()))
        and not any(isinstance(each, Dropout) and each.is_active for each in parts.layer.modules())
        and not any(parameter.is_inference() for parameter in parts.layer.parameters())
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


def _is_pool(pool: Sequence[Tensor], d_model: int) -> bool:
    """Tell whether all tensors of a cache are contiguous, of one shape [R, 2 D]."""
    shape = (len(pool[0]), 2 * d_model)
    return all(layer_RX.shape == shape and layer_RX.is_contiguous() for layer_RX in pool)


def _are_slots(slots_NT: Tensor, x_ND: Tensor) -> bool:
    return (
        is_plain(slots_NT)
        and slots_NT.dtype is torch.int64
        and slots_NT.dim() == 2
        and len(slots_NT) == len(x_ND)
        and slots_NT.stride(1) == 1
    )
