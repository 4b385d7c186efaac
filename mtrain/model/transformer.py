"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017), top to bottom.

Takes tensors of token ids; independent of text, batches and files.

Shapes: B batch, S source length, T target length, D model width, F feed-forward width,
H heads, K width of a head, V vocabulary, N hypotheses, R slots of a cache, X = 2 * D,
I = D / 2 frequencies.
Masks are `keep`: True takes part.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from mtrain.config.sections import ModelConfig
from mtrain.model.kv_cache import KVCache, KVPool, Slots, source_slots
from mtrain.ops.attention import attention, chunk_last, paged_attention
from mtrain.ops.beam_search import (
    MAX_POSITIONS,
    Cache,
    Floats,
    Hypotheses,
    SearchRules,
    SearchSteps,
    num_slots_for,
    search_steps,
)
from mtrain.ops.dropout import Dropout
from mtrain.ops.layer_norm import LayerNorm, add_norm
from mtrain.ops.linear import Linear, relu_ffn
from mtrain.ops.packed_weights import Ints, Precision
from mtrain.ops.stacks import CompiledDecoder, CompiledSources, LayerModules
from mtrain.ops.topk import Logits, Projection

Sublayer = Callable[[Tensor], Tensor]
_MIN_GROUP_POSITIONS = 512  # source positions of a group that is encoded by itself, at least


class Transformer(nn.Module):
    """Encoder and decoder stacks between embeddings and an output projection (section 3)."""

    _compiled_sources: CompiledSources | None = None
    _compiled_decoder: CompiledDecoder | None = None

    def __init__(self, config: ModelConfig, num_src_tokens: int, num_tgt_tokens: int) -> None:
        super().__init__()
        self.config = config
        d_model, pre_norm = config.d_model, config.norm == "pre"
        self.src_embedding = nn.Embedding(num_src_tokens, d_model)
        self.tgt_embedding = nn.Embedding(num_tgt_tokens, d_model)
        self.src_positions = Positions(config)
        self.tgt_positions = Positions(config)
        self.encoder: Sequence[EncoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(config) for _ in range(config.num_encoder_layers)
        )
        self.decoder: Sequence[DecoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(config) for _ in range(config.num_decoder_layers)
        )
        self.encoder_norm = LayerNorm(d_model) if pre_norm else nn.Identity()
        self.decoder_norm = LayerNorm(d_model) if pre_norm else nn.Identity()
        self.output = Projection(d_model, num_tgt_tokens)
        self.dropout = Dropout(config.dropout)
        # of states and products; None is the dtype of the weights
        self.compute_dtype: torch.dtype | None = None
        self.cache_dtype: torch.dtype | None = None
        self._initialise()
        if config.tie_embeddings != "none":
            self.output.weight = self.tgt_embedding.weight
        if config.tie_embeddings == "all":
            self.src_embedding.weight = self.tgt_embedding.weight

    def forward(
        self,
        src_BS: Tensor,
        src_keep_BS: Tensor,
        tgt_in_BT: Tensor,
        src_token_keep_BS: Tensor | None = None,
        tgt_token_keep_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the decoder's states [B, T, D]; `output` maps them to logits [B, T, V].

        Where a token keep-mask is False, the embedding is zero; the positional encoding is not.
        """
        memory_BSD = self.encode(src_BS, src_keep_BS, src_token_keep_BS)
        return self.decode(tgt_in_BT, memory_BSD, src_keep_BS, tgt_token_keep_BT)

    def encode(
        self, src_BS: Tensor, src_keep_BS: Tensor, token_keep_BS: Tensor | None = None
    ) -> Tensor:
        """Return the memory [B, S, D], the encoder's output for a source."""
        x_BSD = self._embed_all(self.src_embedding, self.src_positions, src_BS, token_keep_BS)
        keep = src_keep_BS[:, None, None, :]
        if self.config.attention_window is not None:
            keep = keep & near_keep(src_BS.shape[1], self.config.attention_window, x_BSD.device)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, keep)
        memory_BSD: Tensor = self.encoder_norm(x_BSD)
        return memory_BSD

    def decode(
        self,
        tgt_in_BT: Tensor,
        memory_BSD: Tensor,
        src_keep_BS: Tensor,
        token_keep_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the decoder's states [B, T, D] for a whole target.

        Target padding is on the right, where the causal mask hides it from every real position.
        """
        x_BTD = self._embed_all(self.tgt_embedding, self.tgt_positions, tgt_in_BT, token_keep_BT)
        length = tgt_in_BT.shape[1]
        causal_keep_TT = near_keep(length, self.config.attention_window, x_BTD.device).tril()
        src_keep_B11S = src_keep_BS[:, None, None, :]
        for layer in self.decoder:
            x_BTD = layer(x_BTD, causal_keep_TT, memory_BSD, src_keep_B11S)
        states_BTD: Tensor = self.decoder_norm(x_BTD)
        return states_BTD

    def start(self, src_BS: Tensor, src_keep_BS: Tensor) -> KVCache:
        """Encode sources; return the cache for `decode_step`, with one row for each source."""
        slots_BS = source_slots(src_keep_BS.cpu().numpy())
        # on a CPU neighbours of one length are encoded without padding, on a GPU all together
        groups = [(slice(None), src_BS.shape[1])]
        if src_BS.is_cpu and len(src_BS) > 1:
            groups = list(_group_by_length(slots_BS >= 0))
        self._compile_decoder()
        sources = self._compiled_source_keys_values(src_BS, slots_BS, groups)
        if sources is None:
            memories = []
            for rows, width in groups:
                keep_BS = src_keep_BS[rows, :width]
                memory_RD = self.encode(src_BS[rows, :width], keep_BS).flatten(0, 1)
                if len(keep_BS) > 1 or not keep_BS.all():
                    memory_RD = memory_RD.index_select(0, keep_BS.flatten().nonzero()[:, 0])
                memories.append(memory_RD)
            memory_RD = torch.cat(memories) if len(memories) > 1 else memories[0]
            sources = [layer.project_source(memory_RD) for layer in self.decoder]
            sources = [source_RX.to(self.cache_dtype or source_RX.dtype) for source_RX in sources]
        return KVCache(sources, slots_BS)

    def decode_step(self, ids_N: Tensor, cache: KVCache) -> Logits:
        """Return the logits [N, V] of the tokens that follow `ids_N`, and advance the cache."""
        stop, position_N = cache.max_length + 1, torch.from_numpy(cache.length_N)
        cache.advance()
        slots, compiled, states_ND = cache.slots(), self._compiled_decoder, None
        if compiled is not None:
            caches = (cache.pasts.layers, cache.sources.layers, *slots)
            encodings_TD = self.tgt_positions.encodings(stop, torch.float32, ids_N.device)
            states_ND = compiled.step(ids_N, position_N, encodings_TD, *caches)
        if states_ND is None:
            device = self.tgt_embedding.weight.device
            position_N, ids_N = position_N.to(device), ids_N.to(device)
            x_ND = self._embed(self.tgt_embedding, self.tgt_positions, ids_N, position_N, stop)
            for index, layer in enumerate(self.decoder):
                x_ND = layer.decode_step(x_ND, cache, index, slots)
            states_ND = self.decoder_norm(x_ND)
        return self.output.logits(states_ND)

    def search_steps(
        self,
        cache: KVCache,
        rows: Hypotheses,
        num_places_B: Ints,
        best_BM: Floats,
        rules: SearchRules,
    ) -> SearchSteps | None:
        """Decode some positions of a beam search in one compiled call, and advance the cache.

        Args:
            cache: with a row for each hypothesis.
            rows, num_places_B, best_BM, rules: as in `ops.beam_search.search_steps`.

        Returns:
            None if the next position must be decoded by `decode_step`.
        """
        decoder, device = self._compiled_decoder, self.tgt_embedding.weight.device
        if decoder is None or device.type != "cpu":
            return None
        num_slots = num_slots_for(len(rows.ids_N), len(num_places_B), rules.beam)
        free_slots = cache.pasts.reserve(num_slots, cache.slots_NT)
        pools, stop = (cache.pasts.layers, cache.sources.layers), cache.max_length + MAX_POSITIONS
        steps = search_steps(
            decoder,
            self.output,
            self.tgt_positions.encodings(stop, torch.float32, device),
            Cache(*pools, cache.slots_NT, cache.src_slots_NS, free_slots),
            rows,
            num_places_B,
            best_BM,
            rules,
        )
        if steps is not None:
            lists = (steps.past_slots_NT, steps.source_slots_NS, steps.rows.length_N)
            cache.replace(*lists, steps.num_slots)
        return steps

    @torch.no_grad()
    def attention_maps(
        self, src_BS: Tensor, src_keep_BS: Tensor, tgt_in_BT: Tensor, cross_only: bool = False
    ) -> AttentionMaps:
        """Return the attention weights of each head of each layer; with `cross_only` of `cross`.

        A forward pass does not store them, so hooks recompute them with `attention_weights` from
        the inputs of each attention.
        """
        maps = AttentionMaps([], [], [])
        hooks = [_record(layer.cross_attention, maps.cross) for layer in self.decoder]
        if not cross_only:
            hooks += [_record(layer.self_attention, maps.encoder) for layer in self.encoder]
            hooks += [_record(layer.self_attention, maps.decoder) for layer in self.decoder]
        try:
            self(src_BS, src_keep_BS, tgt_in_BT)
        finally:
            for hook in hooks:
                hook.remove()
        return maps

    def compile_layers(self, backend: Any = "inductor", fullgraph: bool = False) -> None:
        """Compile the layers and the loss with `torch.compile`, not `decode_step`.

        Args:
            backend, fullgraph: arguments of `torch.compile`.
        """
        options: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph, "dynamic": True}
        for layer in (*self.encoder, *self.decoder):
            layer.compile(**options)
        self.output.cross_entropy = torch.compile(self.output.cross_entropy, **options)
        self.output.consistency = torch.compile(self.output.consistency, **options)

    def pack_weights(self, precision: Precision = "float32") -> None:
        """Pack the weights of all linear maps for decoding on a CPU, as copies in extra memory.

        With bfloat16 and int8 the key-value cache is in bfloat16.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack_weights(precision)
        self.cache_dtype = None if precision == "float32" else torch.bfloat16

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Compute in float32 with packed weights, as a loaded model does; then as before again."""
        dtype = self.compute_dtype
        try:
            self.compute_dtype = None
            self.pack_weights()
            yield
        finally:
            self.compute_dtype = dtype
            self._compiled_sources = self._compiled_decoder = None
            for module in self.modules():
                if isinstance(module, Linear):
                    module.unpack_weights()

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the compiled layers, which point to the weights of this object."""
        excluded = ("_compiled_sources", "_compiled_decoder")
        return {name: value for name, value in vars(self).items() if name not in excluded}

    def _compiled_source_keys_values(
        self, src_BS: Tensor, slots_BS: Ints, groups: Sequence[tuple[slice, int]]
    ) -> list[Tensor] | None:
        """Return the source keys and values [R, X] of each decoder layer; one call for each group.

        Returns:
            None where layers must run one by one.
        """
        compiled = self._current_sources()
        if compiled is None or not src_BS.is_cpu:
            return None
        shape, ids_BS = (int(slots_BS.max()) + 1, 2 * self.config.d_model), src_BS.numpy()
        sources = [
            torch.empty(shape, dtype=self.cache_dtype or torch.float32, device="cpu")
            for _ in self.decoder
        ]
        encodings_TD = self.src_positions.encodings(src_BS.shape[1], torch.float32, src_BS.device)
        for rows, width in groups:
            inputs = (ids_BS[rows, :width], slots_BS[rows, :width])
            if not compiled.write(*inputs, encodings_TD, sources):
                return None
        return sources

    def _current_sources(self) -> CompiledSources | None:
        """Return the compiled encoding of sources; None where layers must run one by one."""
        has_window = self.config.attention_window is not None
        if torch.is_grad_enabled() or has_window or self._compiled_decoder is None:
            return None
        compiled = self._compiled_sources
        if compiled is None or not compiled.is_current():
            inputs = (self.src_embedding, self.src_positions, self.dropout)
            maps = [layer.cross_attention.source_keys_values for layer in self.decoder]
            layers, heads = self._stack_modules(self.encoder), self.config.num_heads
            self._compiled_sources = compiled = CompiledSources.of(layers, inputs, heads, maps)
        return compiled

    def _compile_decoder(self) -> None:
        """Compile the decoder for `decode_step` if its weights are packed and have changed."""
        compiled = self._compiled_decoder
        if compiled is None or not compiled.is_current():
            heads, window = self.config.num_heads, self.config.attention_window
            inputs = (self.tgt_embedding, self.tgt_positions, self.dropout)
            layers = self._stack_modules(self.decoder)
            self._compiled_decoder = CompiledDecoder.of(layers, inputs, heads, window=window)

    def _stack_modules(self, stack: Sequence[nn.Module]) -> list[LayerModules]:
        """Return the modules of each layer; an empty list if they cannot be one compiled call."""
        layers = [modules for modules in map(_layer_modules, stack) if modules is not None]
        is_whole = len(layers) == len(stack) and self.compute_dtype in (None, torch.float32)
        return layers if is_whole else []

    def _embed_all(
        self,
        table: nn.Embedding,
        positions: Positions,
        ids_BT: Tensor,
        token_keep_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the embeddings [B, T, D] of whole sequences."""
        length = ids_BT.shape[1]
        position_T = torch.arange(length, device=ids_BT.device)
        return self._embed(table, positions, ids_BT, position_T, length, token_keep_BT)

    def _embed(
        self,
        table: nn.Embedding,
        encoding: Positions,
        ids: Tensor,
        position: Tensor,
        stop: int,
        token_keep: Tensor | None = None,
    ) -> Tensor:
        """Return Dropout(embedding * sqrt(d_model) + positional encoding) (sections 3.4, 3.5).

        All positions are below `stop`.
        """
        x = table(ids) * math.sqrt(self.config.d_model)
        if token_keep is not None:
            x = x * token_keep[..., None]
        embedded: Tensor = self.dropout(x + encoding(position, stop, x.dtype))
        return embedded.to(self.compute_dtype or embedded.dtype)

    def _initialise(self) -> None:
        """Draw Xavier-uniform weights; those of the last map of each sublayer times `branch_gain`.

        The paper does not specify the initialisation. With sublayers at full size the LayerNorms
        of a post-norm stack attenuate the residual signal, and the model learns late.
        """
        gain = self.config.branch_gain
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
        nn.init.normal_(self.output.weight, std=self.config.d_model**-0.5)
        for module in self.modules():
            if isinstance(module, FeedForward):
                nn.init.xavier_uniform_(module.outer.weight, gain=gain)
            elif isinstance(module, (SelfAttention, CrossAttention)):
                nn.init.xavier_uniform_(module.output.weight, gain=gain)


class Positions(nn.Module):
    """The positional encoding, sinusoidal or learned (section 3.5)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.d_model, self.table = config.d_model, None
        self._cached_TD = sinusoids(0, config.d_model)
        if config.max_positions is not None:
            self.table = nn.Embedding(config.max_positions, config.d_model)

    def forward(self, position: Tensor, stop: int, dtype: torch.dtype) -> Tensor:
        """Return the encoding [..., D] of positions [...], all below `stop`.

        Sinusoids exist for any position; positions after the last learned one share its encoding.
        """
        if self.table is None:
            return F.embedding(position, self.encodings(stop, dtype, position.device))
        learned: Tensor = self.table(position.clamp(max=self.table.num_embeddings - 1))
        return learned.to(dtype)

    def encodings(self, stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the learned encodings [max_positions, D], or sinusoids [at least `stop`, D]."""
        if self.table is not None:
            return self.table.weight
        cached_TD = self._cached_TD  # twice as long as needed, to grow rarely
        if len(cached_TD) < stop or cached_TD.device != device or cached_TD.dtype != dtype:
            with torch.inference_mode(False):
                made_TD = sinusoids(2 * stop, self.d_model, device=device)
                self._cached_TD = cached_TD = made_TD.to(dtype)
        return cached_TD


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each in a residual connection (section 3.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.feed_forward = FeedForward(config)
        self.residual_1 = Residual(config)
        self.residual_2 = Residual(config)

    def forward(self, x_BSD: Tensor, keep: Tensor) -> Tensor:
        """Return the layer's output [B, S, D]; `keep` broadcasts to [B, H, S, S]."""
        x_BSD = self.residual_1(x_BSD, lambda x: self.self_attention(x, keep))
        x_BSD = self.residual_2(x_BSD, self.feed_forward)
        return x_BSD


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention, then a feed-forward network (section 3.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.cross_attention = CrossAttention(config)
        self.feed_forward = FeedForward(config)
        self.residual_1 = Residual(config)
        self.residual_2 = Residual(config)
        self.residual_3 = Residual(config)

    def forward(
        self, x_BTD: Tensor, causal_keep_TT: Tensor, memory_BSD: Tensor, src_keep_B11S: Tensor
    ) -> Tensor:
        """Return the layer's output [B, T, D] for a whole target."""
        source = self.cross_attention.keys_values(memory_BSD)
        x_BTD = self.residual_1(x_BTD, lambda x: self.self_attention(x, causal_keep_TT))
        x_BTD = self.residual_2(x_BTD, lambda x: self.cross_attention(x, source, src_keep_B11S))
        x_BTD = self.residual_3(x_BTD, self.feed_forward)
        return x_BTD

    def project_source(self, memory_RD: Tensor) -> Tensor:
        """Return the source keys and values [R, X] of the cache for a memory without padding."""
        projected_RX: Tensor = self.cross_attention.source_keys_values(memory_RD)
        return projected_RX

    def decode_step(self, x_ND: Tensor, cache: KVCache, index: int, slots: Slots) -> Tensor:
        """Return the output [N, D] of layer `index` for the newest position of the cache."""
        pasts, source_RX = cache.pasts, cache.sources.layers[index]
        self_attn, cross_attn = self.self_attention, self.cross_attention
        past_NT, source_NS = slots
        x_ND = self.residual_1(x_ND, lambda x: self_attn.decode_step(x, pasts, index, past_NT))
        x_ND = self.residual_2(x_ND, lambda x: cross_attn.decode_step(x, source_RX, source_NS))
        x_ND = self.residual_3(x_ND, self.feed_forward)
        return x_ND


class Residual(nn.Module):
    """A residual connection around a sublayer, with dropout and LayerNorm.

    Post-norm is the paper's LayerNorm(x + Dropout(Sublayer(x))) (sections 3.1 and 5.4); pre-norm
    is x + Dropout(Sublayer(LayerNorm(x))).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.d_model, eps=1e-5)
        self.dropout = Dropout(config.dropout)
        self.is_post = config.norm == "post"

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """Return the residual sum [..., D] of `x` and the sublayer."""
        if self.is_post:
            return add_norm(x, sublayer(x), self.dropout, self.norm)
        result: Tensor = x + self.dropout(sublayer(self.norm(x)))
        return result


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 (section 3.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = Linear(config.d_model, config.d_ff)
        self.outer = Linear(config.d_ff, config.d_model)
        self.activation = nn.ReLU() if config.activation == "relu" else nn.GELU()
        self.dropout = Dropout(config.activation_dropout)
        self.is_relu_ffn = config.activation == "relu" and config.activation_dropout == 0

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map each position on its own, [..., D] to [..., D]."""
        if self.is_relu_ffn:
            return relu_ffn(x_BTD, self.inner, self.outer)
        result: Tensor = self.outer(self.dropout(self.activation(self.inner(x_BTD))))
        return result


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself: Concat(head_1, ..., head_h) W_O (3.2.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.window = config.num_heads, config.attention_window
        self.queries_keys_values = Linear(config.d_model, 3 * config.d_model)
        self.output = Linear(config.d_model, config.d_model)
        self.dropout = Dropout(config.attention_dropout)

    def forward(self, x_BTD: Tensor, keep: Tensor) -> Tensor:
        """Return [B, T, D]; `keep` broadcasts to [B, H, T, T]."""
        q_BHTK, k_BHTK, v_BHTK = self._project(x_BTD)
        mixed_BHTK = attention(q_BHTK, k_BHTK, v_BHTK, keep, self.dropout)
        result: Tensor = self.output(merge_heads(mixed_BHTK))
        return result

    def weights(self, x_BTD: Tensor, keep: Tensor) -> Tensor:
        """Return the attention weights [B, H, T, T]."""
        q_BHTK, k_BHTK, _ = self._project(x_BTD)
        return attention_weights(q_BHTK, k_BHTK, keep)

    def decode_step(self, x_ND: Tensor, pasts: KVPool, index: int, slots_NT: Tensor) -> Tensor:
        """Return [N, D] for the newest position, which attends to itself and all before it."""
        d_model = x_ND.shape[1]
        q_ND, new_NX = self.queries_keys_values(x_ND).split([d_model, 2 * d_model], -1)
        past_RX = pasts.write(index, slots_NT[:, -1], new_NX)
        if self.window is not None:
            slots_NT = slots_NT[:, -self.window - 1 :]
        result: Tensor = self.output(paged_attention(q_ND, past_RX, slots_NT, self.num_heads))
        return result

    def _project(self, x_BTD: Tensor) -> list[Tensor]:
        parts = chunk_last(self.queries_keys_values(x_BTD), 3)
        return [split_heads(part_BTD, self.num_heads) for part_BTD in parts]


class CrossAttention(nn.Module):
    """Multi-head attention of a target to its source (section 3.2.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.queries = Linear(config.d_model, config.d_model)
        self.source_keys_values = Linear(config.d_model, 2 * config.d_model)
        self.output = Linear(config.d_model, config.d_model)
        self.dropout = Dropout(config.attention_dropout)

    def keys_values(self, memory_BSD: Tensor) -> KeysValues:
        """Return the keys and values of a memory, for all positions of the target."""
        k_BSD, v_BSD = chunk_last(self.source_keys_values(memory_BSD), 2)
        return KeysValues(split_heads(k_BSD, self.num_heads), split_heads(v_BSD, self.num_heads))

    def forward(self, x_BTD: Tensor, source: KeysValues, src_keep_B11S: Tensor) -> Tensor:
        """Return [B, T, D]."""
        q_BHTK = split_heads(self.queries(x_BTD), self.num_heads)
        mixed_BHTK = attention(q_BHTK, source.keys, source.values, src_keep_B11S, self.dropout)
        result: Tensor = self.output(merge_heads(mixed_BHTK))
        return result

    def weights(self, x_BTD: Tensor, source: KeysValues, src_keep_B11S: Tensor) -> Tensor:
        """Return the attention weights [B, H, T, S]."""
        q_BHTK = split_heads(self.queries(x_BTD), self.num_heads)
        return attention_weights(q_BHTK, source.keys, src_keep_B11S)

    def decode_step(self, x_ND: Tensor, source_RX: Tensor, slots_NS: Tensor) -> Tensor:
        """Return [N, D] for the newest position."""
        mixed_ND = paged_attention(self.queries(x_ND), source_RX, slots_NS, self.num_heads)
        result: Tensor = self.output(mixed_ND)
        return result


class KeysValues(NamedTuple):
    """Keys and values [B, H, S, K] of one attention."""

    keys: Tensor
    values: Tensor


class AttentionMaps(NamedTuple):
    """Attention weights of a batch, one tensor for each layer.

    Attributes:
        encoder: source to source, [B, H, S, S].
        decoder: target to the target so far, [B, H, T, T].
        cross: target to source, [B, H, T, S].
    """

    encoder: list[Tensor]
    decoder: list[Tensor]
    cross: list[Tensor]


def _layer_modules(layer: nn.Module) -> LayerModules | None:
    """Return the modules of a post-norm layer with ReLU; None for other layers."""
    if not isinstance(layer, EncoderLayer | DecoderLayer):
        return None
    self_attention, feed_forward = layer.self_attention, layer.feed_forward
    residuals = [module for module in layer.children() if isinstance(module, Residual)]
    if not (feed_forward.is_relu_ffn and all(residual.is_post for residual in residuals)):
        return None
    maps = (feed_forward.inner, feed_forward.outer)
    first, *middle, last = (residual.norm for residual in residuals)
    projections = (self_attention.queries_keys_values, self_attention.output)
    modules = LayerModules(layer, *projections, first, *maps, last)
    if isinstance(layer, DecoderLayer):
        cross = layer.cross_attention
        modules = modules._replace(queries=cross.queries, cross_out=cross.output, norm_2=middle[0])
    return modules


def split_heads(x_BTD: Tensor, num_heads: int) -> Tensor:
    """Turn [B, T, D] into [B, H, T, K]."""
    heads_BTHK = x_BTD.view(*x_BTD.shape[:2], num_heads, -1)
    return heads_BTHK.transpose(1, 2)


def merge_heads(x_BHTK: Tensor) -> Tensor:
    """Turn [B, H, T, K] back into [B, T, D]."""
    return x_BHTK.transpose(1, 2).flatten(2)


def attention_weights(q_BHTK: Tensor, k_BHSK: Tensor, keep: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d_k)) over the kept keys, [B, H, T, S]."""
    scores_BHTS = q_BHTK @ k_BHSK.transpose(2, 3) / math.sqrt(q_BHTK.shape[-1])
    return scores_BHTS.masked_fill(~keep, torch.finfo(scores_BHTS.dtype).min).softmax(-1)


def _group_by_length(keep_BS: NDArray[np.bool_]) -> Iterator[tuple[slice, int]]:
    """Yield (rows, width) of neighbouring sources of one length, to encode without padding.

    A group of few positions is joined with the next, and then padded.
    """
    widths: list[int] = (keep_BS * np.arange(1, keep_BS.shape[1] + 1)).max(1).tolist()
    first = 0
    for row in range(1, len(widths)):
        is_large = (row - first) * widths[first] >= _MIN_GROUP_POSITIONS
        if is_large and widths[row] != widths[row - 1]:
            yield slice(first, row), max(widths[first:row])
            first = row
    yield slice(first, None), max(widths[first:])


def near_keep(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return a keep-mask [T, T], True where positions are at most `window` apart; None: all."""
    keep_TT = torch.ones(length, length, dtype=torch.bool, device=device)
    return keep_TT if window is None else keep_TT.tril(window).triu(-window)


def _record(
    attention: SelfAttention | CrossAttention, maps: list[Tensor]
) -> torch.utils.hooks.RemovableHandle:
    """Append the weights of an attention to `maps` whenever this thread calls it."""
    thread = threading.get_ident()  # other threads may use the same model

    def append(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if threading.get_ident() == thread:
            maps.append(attention.weights(*inputs))

    return attention.register_forward_pre_hook(append)


def sinusoids(length: int, d_model: int, device: torch.device | None = None) -> Tensor:
    """Return the positional encoding [length, D] of section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i / D)) and PE(pos, 2i + 1) = cos(the same), in float64.
    """
    position_T1 = torch.arange(length, dtype=torch.float64, device=device)[:, None]
    exponent_I = torch.arange(0, d_model, 2, dtype=torch.float64, device=device) / d_model
    angle_TI = position_T1 / 10_000.0**exponent_I
    return torch.stack([angle_TI.sin(), angle_TI.cos()], -1).flatten(1)


def num_parameters(model: nn.Module) -> int:
    """Return the number of weights of a model; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_weights(config: ModelConfig, num_src_tokens: int, num_tgt_tokens: int) -> int:
    """Count the weights that a model of this config would have, without making one."""
    width = config.d_model
    attention, norm = 4 * width * (width + 1), 2 * width
    feed_forward = 2 * width * config.d_ff + config.d_ff + width
    encoder = config.num_encoder_layers * (attention + feed_forward + 2 * norm)
    decoder = config.num_decoder_layers * (2 * attention + feed_forward + 3 * norm)
    tables = {"all": 1, "decoder": 1, "none": 2}[config.tie_embeddings] * num_tgt_tokens
    rows = tables + (0 if config.tie_embeddings == "all" else num_src_tokens)
    rows += 2 * (config.max_positions or 0)
    return width * rows + encoder + decoder + (2 * norm if config.norm == "pre" else 0)
