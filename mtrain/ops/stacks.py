"""All layers of an encoder, or of a decoder for the newest positions, in one compiled call.

Shapes: B batch, S source length, N hypotheses, D model width, V vocabulary, R slots of a cache,
X = 2 * D.
"""

from __future__ import annotations

import ctypes
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.ops.attention import is_readable_cache
from mtrain.ops.dropout import Dropout
from mtrain.ops.header import STRUCTURES
from mtrain.ops.layer_norm import LayerNorm
from mtrain.ops.linear import Linear
from mtrain.ops.native import (
    Functions,
    functions_for,
    has_cpu_memory,
    has_global_hooks,
    hooks_of,
    is_bare,
    is_float_vector,
)
from mtrain.ops.packed_weights import Ints

# above this many, one call is slower than layer by layer: it holds all scores of a head
_MAX_SOURCE_POSITIONS = 512


class LayerModules(NamedTuple):
    """The modules of a post-norm layer with ReLU and without activation dropout.

    Attributes:
        layer: the module that contains the others.
        self_in: the projection to queries, keys and values of self-attention.
        inner, outer: the feed-forward network.
        queries, cross_out, norm_2: of cross-attention; None in an encoder.
    """

    layer: nn.Module
    self_in: Linear
    self_out: Linear
    norm_1: LayerNorm
    inner: Linear
    outer: Linear
    norm_3: LayerNorm
    queries: Linear | None = None
    cross_out: Linear | None = None
    norm_2: LayerNorm | None = None

    def linear_maps(self) -> dict[str, Linear]:
        """Return the linear maps by their names."""
        named = self._asdict().items()
        return {name: module for name, module in named if isinstance(module, Linear)}

    def norms(self) -> dict[str, LayerNorm]:
        """Return the norms by their numbers."""
        named = {"1": self.norm_1, "2": self.norm_2, "3": self.norm_3}
        return {number: norm for number, norm in named.items() if norm is not None}


class _CompiledStack:
    """Layers with packed weights and their embedding, which detect when modules or weights change.

    Args:
        layers: from the first to the last.
        inputs: embedding, positional encoding and dropout; the first layer's input is the dropout
            of the sum of the scaled embedding and what the second returns.
        num_heads: of each attention.
        maps: from an encoder's output to the source keys and values of each layer of the decoder;
            empty in a decoder.
        window: positions before the newest that a decoder's self-attention reads; None is all.
    """

    def __init__(
        self,
        layers: Sequence[LayerModules],
        inputs: tuple[nn.Embedding, nn.Module, Dropout],
        num_heads: int,
        maps: Sequence[Linear] = (),
        window: int | None = None,
    ) -> None:
        self._layers, self._num_heads = layers, num_heads
        self._d_model, self._d_ff = layers[0].inner.in_features, layers[0].inner.out_features
        self._head_size = self._d_model // num_heads
        self.table_VD = inputs[0].weight.detach()
        self.window = sys.maxsize if window is None else window + 1
        self._maps = (STRUCTURES["linear_map"] * len(maps))(*map(_linear_map, maps))
        self._num_pools = len(maps) or len(layers)
        self._modules, self._parameters = _descendants(layers, (*inputs, *maps))
        self._memory = [parameter.detach() for parameter in self._parameters]  # stays allocated
        self._hooks = [hooks for module in self._modules for hooks in hooks_of(module)]
        self._contents: list[Any] = [  # the dictionaries of submodules and parameters
            values
            for module in self._modules
            for values in (module._modules, module._parameters)
            if values
        ]
        self._values = self._read_values()
        self._linear_maps = [linear for layer in layers for linear in layer.linear_maps().values()]
        self._linear_maps += maps
        self._packed = [linear._packed for linear in self._linear_maps]
        self._norms = [norm for layer in layers for norm in layer.norms().values()]
        self._versions, self._state = self._read_versions(), self._read_state()
        self.weights = (STRUCTURES["stack_layer"] * len(layers))(*map(_weights_of, layers))

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerModules],
        inputs: tuple[nn.Embedding, nn.Module, Dropout],
        num_heads: int,
        maps: Sequence[Linear] = (),
        window: int | None = None,
    ) -> Self | None:
        """Return the compiled modules; None where they must run one operation after the other."""
        others = (*inputs, *maps)
        if not layers or not all(map(_has_packed_weights, (*layers, others))):
            return None
        modules, parameters = _descendants(layers, others)
        d_model, d_ff = layers[0].inner.in_features, layers[0].inner.out_features
        is_usable = (
            all(_has_widths(layer, d_model, d_ff) for layer in layers)
            and all(map(is_bare, modules))
            and not any(isinstance(module, Dropout) and module.is_active for module in modules)
            and not any(parameter.is_inference() for parameter in parameters)
            and _is_table(inputs[0], d_model)
            and all(_is_map(linear, d_model, 2 * d_model) for linear in maps)
        )
        return cls(layers, inputs, num_heads, maps, window) if is_usable else None

    def is_current(self) -> bool:
        """Tell whether modules and weights are unchanged since they were packed."""
        values = self._read_values()
        return (
            self._read_versions() == self._versions
            and len(values) == len(self._values)
            and all(map(operator.is_, values, self._values))
            and self._read_state() == self._state
            and [linear._packed for linear in self._linear_maps] == self._packed
            and all(packed is not None and packed.has_same_values() for packed in self._packed)
        )

    def functions_for(self, encodings_TD: Tensor, *caches: Sequence[Tensor]) -> Functions | None:
        """Return the compiled functions if they take these encodings and pools [R, X].

        They are not used where gradients are enabled, and after a weight was changed in place.
        """
        if torch.is_grad_enabled() or self._read_versions() != self._versions:
            return None
        functions = functions_for(encodings_TD)
        is_usable = (
            functions is not None
            and functions.dtype_name == "float"
            and _is_float(encodings_TD)
            and encodings_TD.shape[1:] == (self._d_model,)
            and all(len(pools) == self._num_pools for pools in caches)
            and all(_is_pool(pools, self._d_model) for pools in caches)
            and len({layer_RX.dtype for pools in caches for layer_RX in pools}) == 1
        )
        return functions if is_usable else None

    def _read_versions(self) -> list[int]:
        """Return the version counter of each parameter; in-place operations increment it."""
        return [parameter._version for parameter in self._parameters]

    def _read_state(self) -> list[object]:
        """Return whether there are hooks, the modes of modules, eps, and parameter addresses."""
        return [
            any(self._hooks) or has_global_hooks(),
            [("forward" in module.__dict__, module.training) for module in self._modules],
            [norm.eps for norm in self._norms],
            list(map(Tensor.data_ptr, self._parameters)),
        ]

    def _read_values(self) -> list[object]:
        """Return the submodules and parameters of all modules."""
        return [*chain.from_iterable(map(dict.values, self._contents))]


class CompiledSources(_CompiledStack):
    """Embedding, encoder, and source keys and values of a decoder's layers, as one compiled call.

    It computes what they compute one operation after the other: bit for bit up to 128 source
    positions, above which the layers use PyTorch's attention.
    """

    def write(
        self, ids_BS: Ints, slots_BS: Ints, encodings_TD: Tensor, pools: Sequence[Tensor]
    ) -> bool:
        """Write the keys and values of sources; return False where modules must run one by one.

        Args:
            ids_BS: token ids, int64.
            slots_BS: the row of the pools for each position, int64; -1 is padding.
            encodings_TD: positional encodings; later positions share the last one.
            pools: the pool [R, X] of each layer of the decoder, in float32 or bfloat16.

        Raises:
            IndexError: if a token or a slot is out of range.
            MemoryError: if the work space cannot be allocated.
        """
        functions = self.functions_for(encodings_TD, pools)
        if (
            functions is None
            or not (ids_BS.shape == slots_BS.shape and ids_BS.ndim == 2 and ids_BS.size)
            or not ids_BS.dtype == slots_BS.dtype == np.int64
            or ids_BS.shape[1] > _MAX_SOURCE_POSITIONS
        ):
            return False
        ids_BS, slots_BS = np.ascontiguousarray(ids_BS), np.ascontiguousarray(slots_BS)
        layer_sizes = (self._num_heads, self._head_size, self._d_ff)
        sizes = (len(self.table_VD), len(encodings_TD), len(pools), len(pools[0]))
        in_bf16 = pools[0].dtype is torch.bfloat16
        structures = (
            STRUCTURES["encoder_shape"](
                len(self._layers), *ids_BS.shape, *layer_sizes, self._head_size**-0.5
            ),
            self.weights,
            STRUCTURES["sources_shape"](*sizes, in_bf16, math.sqrt(self._d_model)),
            self._maps,
            pointers(pools),
        )
        addresses = (ids_BS.ctypes.data, slots_BS.ctypes.data)
        tensors = (self.table_VD, encodings_TD)
        functions.call("encode_sources", tensors, *addresses, structures=structures)
        return True


class CompiledDecoder(_CompiledStack):
    """The layers of a decoder with packed weights, as one compiled call for the newest positions.

    It computes what the layers compute one operation after the other, bit for bit.
    """

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
            encodings_TD: positional encodings; later positions share the last one.
            pasts, sources: the cache [R, X] of each layer, X = 2 * D, in float32 or bfloat16.
            past_slots_NT, source_slots_NS: row numbers of the caches; -1 is padding.

        Raises:
            IndexError: if a token, a position or a slot is out of range.
            MemoryError: if the work space cannot be allocated.
        """
        num_rows, slots = len(ids_N), (past_slots_NT, source_slots_NS)
        functions = self.functions_for(encodings_TD, pasts, sources)
        if (
            functions is None
            or not (_are_ids(ids_N, num_rows) and _are_ids(position_N, num_rows))
            or not all(_are_ids(each, num_rows, each.shape[-1]) for each in slots)
        ):
            return None
        num_past, num_source = past_slots_NT.shape[1], source_slots_NS.shape[1]
        shape = self.shape(num_rows, num_past, num_source, encodings_TD, pasts, sources)
        states_ND = self.table_VD.new_empty((num_rows, self._d_model))
        tensors = (ids_N, position_N, self.table_VD, encodings_TD, *slots, states_ND)
        structures = (shape, self.weights, pointers(pasts), pointers(sources))
        functions.call("decoder_step", tensors, structures=structures)
        return states_ND

    def shape(
        self,
        num_rows: int,
        num_past: int,
        num_source: int,
        encodings_TD: Tensor,
        pasts: Sequence[Tensor],
        sources: Sequence[Tensor],
    ) -> ctypes.Structure:
        """Return the sizes of a step with contiguous slots."""
        return STRUCTURES["decoder_shape"](
            len(self._layers),
            num_rows,
            self._num_heads,
            self._head_size,
            self._d_ff,
            len(pasts[0]),
            num_past,
            num_past,
            min(num_past, self.window),
            len(sources[0]),
            num_source,
            num_source,
            len(self.table_VD),
            len(encodings_TD),
            pasts[0].dtype is torch.bfloat16,
            self._head_size**-0.5,
            math.sqrt(self._d_model),
        )


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[Any]:
    """Return the addresses of tensors as C reads them; they must stay allocated."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _descendants(
    layers: Sequence[LayerModules], others: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[Tensor]]:
    """Return all modules, recursively, and their parameters."""
    roots = [*others, *(layer.layer for layer in layers)]
    modules = [module for root in roots for module in root.modules()]
    parameters = (value for module in modules for value in module._parameters.values())
    return modules, [parameter for parameter in parameters if parameter is not None]


def _has_packed_weights(modules: Iterable[nn.Module | None]) -> bool:
    """Tell whether all linear maps have packed weights that are up to date."""
    return all(
        module._packed is not None
        and module._packed.tiles is not None
        and module._packed.is_current(module._parameters.get("weight"))
        for module in modules
        if isinstance(module, Linear)
    )


def _has_widths(layer: LayerModules, d_model: int, d_ff: int) -> bool:
    """Tell whether maps and norms have the shapes of a layer, and are not of subclasses."""
    outputs = {"self_in": 3 * d_model, "inner": d_ff}
    return all(
        _is_map(linear, d_ff if name == "outer" else d_model, outputs.get(name, d_model))
        for name, linear in layer.linear_maps().items()
    ) and all(
        type(norm) is LayerNorm
        and is_float_vector(norm.weight, d_model)
        and is_float_vector(norm.bias, d_model)
        for norm in layer.norms().values()
    )


def _is_map(linear: Linear, in_features: int, out_features: int) -> bool:
    return (
        type(linear) is Linear
        and linear.weight.shape == (out_features, in_features)
        and (linear.bias is None or is_float_vector(linear.bias, out_features))
    )


def _linear_map(linear: Linear) -> ctypes.Structure:
    assert linear._packed is not None
    return linear._packed.map_with(linear.bias)


def _weights_of(layer: LayerModules) -> ctypes.Structure:
    weights = STRUCTURES["stack_layer"]()
    for name, linear in layer.linear_maps().items():
        setattr(weights, name, _linear_map(linear))
    for number, norm in layer.norms().items():
        setattr(weights, f"gain_{number}", norm.weight.data_ptr())
        setattr(weights, f"norm_bias_{number}", norm.bias.data_ptr())
        setattr(weights, f"eps_{number}", norm.eps)
    return weights


def _is_float(x_RD: Tensor) -> bool:
    return has_cpu_memory(x_RD) and x_RD.dtype is torch.float32 and x_RD.is_contiguous()


def _is_table(embedding: nn.Embedding, d_model: int) -> bool:
    table_VD = embedding.weight.detach()
    is_plain_lookup = type(embedding) is nn.Embedding
    return is_plain_lookup and _is_float(table_VD) and table_VD.shape[1:] == (d_model,)


def _is_pool(pool: Sequence[Tensor], d_model: int) -> bool:
    """Tell whether compiled functions can read a pool: tensors of one shape [R, 2 D]."""
    shape = (len(pool[0]), 2 * d_model)
    return all(
        layer_RX.shape == shape and is_readable_cache(layer_RX, torch.float32) for layer_RX in pool
    )


def _are_ids(ids: Tensor, *shape: int) -> bool:
    """Tell whether a tensor holds int64 ids of this shape, contiguous and on the CPU."""
    is_usable = has_cpu_memory(ids) and ids.dtype is torch.int64
    return is_usable and ids.shape == shape and ids.is_contiguous()
