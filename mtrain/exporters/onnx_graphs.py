"""The encoder and the decoder of a model as ONNX graphs, in float32 and with weights of 8 bits.

The graphs are those that transformers.js runs for a Marian model: the decoder reads and returns its
key-value cache. One decoder graph runs the first step and all later ones: it projects only the
source positions that the cache does not hold, which are all at the first step and none later.

Shapes: B batch, S source length, T new target positions, P cached ones, D model width, H heads,
K width of a head, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from io import BytesIO
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.model.transformer import (
    CrossAttention,
    DecoderLayer,
    EncoderLayer,
    Positions,
    SelfAttention,
    Transformer,
    merge_heads,
)

if TYPE_CHECKING:
    import onnx

_MASKED = -1e9
_MAX_INT8 = 63  # so that the sum of two products with uint8 fits int16, where some CPUs add them
_OPSET = 17
Axes = dict[int, str]  # names of the dynamic axes
Inputs = dict[str, tuple[Tensor, Axes]]  # an example and the dynamic axes of each input


def encoder(model: Transformer) -> onnx.ModelProto:
    """Return the graph of the encoder: ids and mask [B, S] to the memory [B, S, D]."""
    axes = {0: "batch_size", 1: "encoder_sequence_length"}
    inputs = {
        "input_ids": (torch.ones(2, 3, dtype=torch.int64), axes),
        "attention_mask": (torch.ones(2, 3, dtype=torch.int64), axes),
    }
    return _traced(EncoderGraph(model), inputs, {"last_hidden_state": axes})


def decoder(model: Transformer) -> onnx.ModelProto:
    """Return the graph of the decoder: ids and a cache to logits [B, T, V] and a longer cache."""
    sizes = model.config
    batch, source = {0: "batch_size"}, {0: "batch_size", 1: "encoder_sequence_length"}
    target = batch | {1: "decoder_sequence_length"}
    inputs: Inputs = {
        "encoder_attention_mask": (torch.ones(2, 5, dtype=torch.int64), source),
        "input_ids": (torch.ones(2, 4, dtype=torch.int64), target),
        "encoder_hidden_states": (torch.zeros(2, 5, sizes.d_model), source),
    }
    outputs = {"logits": target}
    sides = (("decoder", 3), ("encoder", 2))  # with numbers of cached positions
    for layer, (side, num_cached), kind in product(
        range(sizes.num_decoder_layers), sides, ("key", "value")
    ):
        cached_BHPK = torch.zeros(2, sizes.num_heads, num_cached, sizes.d_model // sizes.num_heads)
        axes, name = batch | {2: f"past_{side}_sequence_length"}, f"{layer}.{side}.{kind}"
        inputs[f"past_key_values.{name}"] = (cached_BHPK, axes)
        outputs[f"present.{name}"] = batch | {2: f"present_{side}_sequence_length"}
    return _traced(DecoderGraph(model), inputs, outputs)


class EncoderGraph(nn.Module):
    """`Transformer.encode` with attention and positions in operations that ONNX has."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the memory [B, S, D] of sources [B, S], whose mask is 1 at tokens."""
        model, window = self.model, self.model.config.attention_window
        position_S = torch.arange(input_ids.shape[1])
        x_BSD = _embed(model.src_embedding(input_ids), model.src_positions, position_S)
        keep = attention_mask[:, None, None, :] != 0
        if window is not None:
            keep = keep & ((position_S[:, None] - position_S).abs() <= window)
        for layer in model.encoder:
            x_BSD = _encoder_layer(layer, x_BSD, keep)
        memory_BSD: Tensor = model.encoder_norm(x_BSD)
        return memory_BSD


class DecoderGraph(nn.Module):
    """`Transformer.decode` for the positions that follow those of a cache."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        encoder_attention_mask: Tensor,
        input_ids: Tensor,
        encoder_hidden_states: Tensor,
        *cache: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the logits [B, T, V] of new positions, and the cache with them.

        The cache has four tensors [B, H, P, K] for each layer: keys and values of the target, then
        those of the source.
        """
        model, config = self.model, self.model.config
        num_past, num_new = cache[0].shape[2], input_ids.shape[1]
        position_T = torch.arange(num_new) + num_past
        behind = position_T[:, None] - torch.arange(num_past + num_new)
        keep = behind >= 0
        if config.attention_window is not None:
            keep = keep & (behind <= config.attention_window)
        src_keep = encoder_attention_mask[:, None, None, :] != 0
        new_memory_BSD = encoder_hidden_states[:, cache[2].shape[2] :]
        x_BTD = _embed(model.tgt_embedding(input_ids), model.tgt_positions, position_T)
        present: list[Tensor] = []
        for index, layer in enumerate(model.decoder):
            past = cache[4 * index : 4 * index + 4]
            x_BTD = _decoder_layer(layer, x_BTD, new_memory_BSD, past, present, keep, src_keep)
        return model.output(model.decoder_norm(x_BTD)), *present


def _encoder_layer(layer: EncoderLayer, x_BSD: Tensor, keep: Tensor) -> Tensor:
    def attend(x_BSD: Tensor) -> Tensor:
        projected = layer.self_attention.queries_keys_values(x_BSD).chunk(3, -1)
        return _attend(layer.self_attention, projected, keep, [], [])

    x_BSD = layer.residual_1(x_BSD, attend)
    x_BSD = layer.residual_2(x_BSD, layer.feed_forward)
    return x_BSD


def _decoder_layer(
    layer: DecoderLayer,
    x_BTD: Tensor,
    new_memory_BSD: Tensor,
    past: Sequence[Tensor],
    present: list[Tensor],
    keep: Tensor,
    src_keep: Tensor,
) -> Tensor:
    """Return the layer's output [B, T, D]; append its four tensors of the cache to `present`."""

    def attend_to_target(x_BTD: Tensor) -> Tensor:
        projected = layer.self_attention.queries_keys_values(x_BTD).chunk(3, -1)
        return _attend(layer.self_attention, projected, keep, past[:2], present)

    def attend_to_source(x_BTD: Tensor) -> Tensor:
        cross = layer.cross_attention
        projected = cross.queries(x_BTD), *cross.source_keys_values(new_memory_BSD).chunk(2, -1)
        return _attend(cross, projected, src_keep, past[2:], present)

    x_BTD = layer.residual_1(x_BTD, attend_to_target)
    x_BTD = layer.residual_2(x_BTD, attend_to_source)
    x_BTD = layer.residual_3(x_BTD, layer.feed_forward)
    return x_BTD


def _embed(embedded_BTD: Tensor, positions: Positions, position_T: Tensor) -> Tensor:
    """Return scaled embeddings [B, T, D] plus the encoding of their positions.

    Sinusoids are computed by the graph, in float64, instead of being stored as a table. A cosine is
    a sine a quarter turn on: ONNX Runtime had no cosine in float64 before 1.29.
    """
    x_BTD = embedded_BTD * math.sqrt(embedded_BTD.shape[-1])
    if positions.table is not None:
        last = positions.table.num_embeddings - 1
        return x_BTD + F.embedding(position_T.clamp(max=last), positions.table.weight)
    exponent_K = torch.arange(0, positions.d_model, 2, dtype=torch.float64) / positions.d_model
    angle_TK = position_T[:, None].double() / 10_000.0**exponent_K
    angle_TD = torch.stack([angle_TK, angle_TK + math.pi / 2], -1).flatten(1)
    return x_BTD + angle_TD.sin().float()


def _attend(
    attention: SelfAttention | CrossAttention,
    projected: Sequence[Tensor],
    keep: Tensor,
    past: Sequence[Tensor],
    present: list[Tensor],
) -> Tensor:
    """Return [B, T, D] for projected queries [B, T, D], keys and values [B, S, D].

    Keys and values follow those of `past`, if it has any, and are then appended to `present`.
    """
    q_BHTK, k_BHSK, v_BHSK = (_split_heads(x_BTD, attention.num_heads) for x_BTD in projected)
    if past:
        k_BHSK, v_BHSK = torch.cat([past[0], k_BHSK], 2), torch.cat([past[1], v_BHSK], 2)
        present += [k_BHSK, v_BHSK]
    scores_BHTS = q_BHTK @ k_BHSK.transpose(2, 3) * q_BHTK.shape[-1] ** -0.5
    weights_BHTS = torch.where(keep, scores_BHTS, _MASKED).softmax(-1)
    mixed_BTD: Tensor = attention.output(merge_heads(weights_BHTS @ v_BHSK))
    return mixed_BTD


def _split_heads(x_BTD: Tensor, num_heads: int) -> Tensor:
    """Turn [B, T, D] into [B, H, T, K]; T may be 0."""
    d_head = int(x_BTD.shape[2]) // num_heads
    return x_BTD.view(x_BTD.shape[0], x_BTD.shape[1], num_heads, d_head).transpose(1, 2)


def _traced(graph: nn.Module, inputs: Inputs, outputs: dict[str, Axes]) -> onnx.ModelProto:
    import onnx

    stream = BytesIO()
    # the older of PyTorch's two exporters, which is faster, but warns that it is deprecated
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        torch.onnx.export(
            graph,
            tuple(tensor for tensor, _ in inputs.values()),
            stream,  # type: ignore[arg-type]
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes={name: axes for name, (_, axes) in inputs.items()} | outputs,
            opset_version=_OPSET,
            do_constant_folding=False,  # it would store a tied matrix twice
            dynamo=False,
        )
    proto = onnx.load_model_from_string(stream.getvalue())
    for node in proto.graph.node:
        node.ClearField("doc_string")  # it holds lines of Python and their file names
    return proto


def quantised(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph whose matrices are int8, with a scale for each row.

    A row is an embedding, or the weights of one output of a product. Activations are quantised
    while the graph runs, with one scale for each product.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    result = onnx.ModelProto()
    result.CopyFrom(proto)
    graph, nodes = result.graph, dict[str, onnx.NodeProto]()
    matrices = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if len(tensor.dims) == 2 and tensor.data_type == TensorProto.FLOAT
    }
    transposed = {  # matrices, by the output of the node that transposes them
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Transpose" and node.input[0] in matrices
    }

    attributes: dict[str, dict[str, Any]] = {
        "Cast": {"to": TensorProto.FLOAT},
        "Transpose": {"perm": [1, 0]},
    }

    def add(op: str, inputs: Sequence[str], *outputs: str) -> None:
        nodes[outputs[0]] = helper.make_node(op, inputs, outputs, **attributes.get(op, {}))

    for node in graph.node:
        name, *other_inputs = node.input or [""]
        output = node.output[0]
        if node.op_type == "Gather" and name in matrices:
            add("Gather", [f"{name}.int8", *other_inputs], f"{output}.int8")
            add("Gather", [f"{name}.scale", *other_inputs], f"{output}.scale")
            add("Cast", [f"{output}.int8"], f"{output}.unscaled")
            add("Mul", [f"{output}.unscaled", f"{output}.scale"], output)
        elif output in transposed:
            add("Transpose", [f"{name}.int8"], f"{output}.int8")
            add("Transpose", [f"{name}.scale"], f"{output}.scale")
        elif node.op_type == "MatMul" and other_inputs[0] in transposed:
            uint8, scale, zero_point = f"{name}.uint8", f"{name}.scale", f"{name}.zero_point"
            add("DynamicQuantizeLinear", [name], uint8, scale, zero_point)
            add("MatMulInteger", [uint8, f"{other_inputs[0]}.int8", zero_point], f"{output}.int32")
            add("Cast", [f"{output}.int32"], f"{output}.unscaled")
            add("Mul", [scale, f"{other_inputs[0]}.scale"], f"{output}.scale")
            add("Mul", [f"{output}.unscaled", f"{output}.scale"], output)
        else:
            nodes[output] = node
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for name, matrix in matrices.items():
        scales = np.abs(matrix).max(1, keepdims=True) / _MAX_INT8
        scales = np.maximum(scales, np.finfo(np.float32).tiny)
        int8 = np.rint(matrix / scales).astype(np.int8)
        weights[f"{name}.int8"] = numpy_helper.from_array(int8, f"{name}.int8")
        weights[f"{name}.scale"] = numpy_helper.from_array(scales, f"{name}.scale")
    used = {name for node in nodes.values() for name in node.input}
    kept = list(nodes.values())
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(weight for name, weight in weights.items() if name in used)
    return result
