"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017), whole, top to bottom.

It knows ids and tensors; nothing of text, batches, losses or search.

Shapes: B batch, S source length, T target length, D model width, F feed-forward width,
H heads, K width of a head, V vocabulary, W hypotheses of a sentence, N = B * W.
Masks are `keep`: True takes part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mtrain.config import ModelConfig
from mtrain.kernels import Dropout, LayerNorm, Linear, add_norm, attention

Sublayer = Callable[[Tensor], Tensor]

BRANCH_GAIN = 0.05  # of a residual branch's last projection, at the start of training


class Transformer(nn.Module):
    """Encoder and decoder stacks between embeddings and an output projection (section 3)."""

    def __init__(self, config: ModelConfig, num_src_pieces: int, num_tgt_pieces: int) -> None:
        super().__init__()
        self.config = config
        d_model, pre_norm = config.d_model, config.norm == "pre"
        self.src_embedding = nn.Embedding(num_src_pieces, d_model)
        self.tgt_embedding = nn.Embedding(num_tgt_pieces, d_model)
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
        self.output = Linear(d_model, num_tgt_pieces, bias=False)
        self.dropout = Dropout(config.dropout)
        self.compute_dtype: torch.dtype | None = None
        self._initialise()
        self._tie(config.tie_embeddings)

    def forward(self, src_BS: Tensor, src_keep_BS: Tensor, tgt_in_BT: Tensor) -> Tensor:
        """Return the decoder's states [B, T, D]; `output` turns them into logits."""
        return self.decode(tgt_in_BT, self.encode(src_BS, src_keep_BS), src_keep_BS)

    def encode(self, src_BS: Tensor, src_keep_BS: Tensor) -> Tensor:
        """Return the memory [B, S, D] of a source."""
        x_BSD = self._embed(self.src_embedding, self.src_positions, src_BS)
        keep = src_keep_BS[:, None, None, :]
        if self.config.attention_window is not None:
            keep = keep & near_keep(src_BS.shape[1], self.config.attention_window, x_BSD.device)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, keep)
        memory_BSD: Tensor = self.encoder_norm(x_BSD)
        return memory_BSD

    def decode(self, tgt_in_BT: Tensor, memory_BSD: Tensor, src_keep_BS: Tensor) -> Tensor:
        """Return the states [B, T, D] of a whole target at once.

        Padding stands on the right, so that causality alone keeps it from every real position.
        """
        x_BTD = self._embed(self.tgt_embedding, self.tgt_positions, tgt_in_BT)
        length = tgt_in_BT.shape[1]
        causal_keep_TT = near_keep(length, self.config.attention_window, x_BTD.device).tril()
        src_keep_B11S = src_keep_BS[:, None, None, :]
        for layer in self.decoder:
            x_BTD = layer(x_BTD, causal_keep_TT, memory_BSD, src_keep_B11S)
        states_BTD: Tensor = self.decoder_norm(x_BTD)
        return states_BTD

    def start(self, memory_BSD: Tensor, src_keep_BS: Tensor) -> DecoderState:
        """Return the state from which `step` decodes piece by piece."""
        cross = [layer.cross_attention.keys_values(memory_BSD) for layer in self.decoder]
        return DecoderState(src_keep_BS[:, None, None, :], cross, [None] * len(cross), 0)

    def step(self, ids_N: Tensor, state: DecoderState) -> Tensor:
        """Return the logits [N, V] of the piece that follows `ids_N`, and advance `state`.

        N is W hypotheses for each of the state's B sentences, in order.
        """
        x_N1D = self._embed(self.tgt_embedding, self.tgt_positions, ids_N[:, None], state.length)
        for index, layer in enumerate(self.decoder):
            x_N1D = layer.step(x_N1D, state, index)
        state.length += 1
        logits_NV: Tensor = self.output(self.decoder_norm(x_N1D[:, 0]))
        return logits_NV.to(self.output.weight.dtype)

    @torch.no_grad()
    def attention_maps(
        self, src_BS: Tensor, src_keep_BS: Tensor, tgt_in_BT: Tensor
    ) -> AttentionMaps:
        """Return how much each head of each layer attends to each position.

        The weights are written out beside the model's own pass, from the same inputs.
        """
        maps = AttentionMaps([], [], [])
        hooks = []
        for stack, own in ((self.encoder, maps.encoder), (self.decoder, maps.decoder)):
            for layer in stack:
                hooks.append(_record(layer.self_attention, own))
        hooks += [_record(layer.cross_attention, maps.cross) for layer in self.decoder]
        try:
            self(src_BS, src_keep_BS, tgt_in_BT)
        finally:
            for hook in hooks:
                hook.remove()
        return maps

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Keep states and run products in `dtype`; None is the type of the weights."""
        self.compute_dtype = dtype

    def _embed(
        self, table: nn.Embedding, positions: Positions, ids_BT: Tensor, first: int = 0
    ) -> Tensor:
        """Embed ids (section 3.4) and add the positions `first`, `first + 1`, ... (3.5)."""
        x_BTD = table(ids_BT) * math.sqrt(self.config.d_model)
        positions_TD = positions(ids_BT.shape[1], first, ids_BT.device)
        embedded_BTD: Tensor = self.dropout(x_BTD + positions_TD.to(x_BTD.dtype))
        return embedded_BTD.to(self.compute_dtype or embedded_BTD.dtype)

    def _initialise(self) -> None:
        """Draw the weights, and let each residual branch begin almost silent.

        The last projection of every branch starts at a small share of its Xavier size: the paper
        says nothing of initialisation, and with full-sized branches the many LayerNorms of a
        post-norm stack drown the residual signal, and the model learns late and badly.
        """
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
                nn.init.xavier_uniform_(module.outer.weight, gain=BRANCH_GAIN)
            elif isinstance(module, (SelfAttention, CrossAttention)):
                nn.init.xavier_uniform_(module.output.weight, gain=BRANCH_GAIN)

    def _tie(self, tie: Literal["all", "decoder", "none"]) -> None:
        if tie != "none":
            self.output.weight = self.tgt_embedding.weight
        if tie == "all":
            self.src_embedding.weight = self.tgt_embedding.weight


class Positions(nn.Module):
    """What is added to an embedding to say where it stands (section 3.5)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.d_model, self.table = config.d_model, None
        if config.max_positions is not None:
            self.table = nn.Embedding(config.max_positions, config.d_model)

    def forward(self, length: int, first: int, device: torch.device) -> Tensor:
        """Return [length, D] from position `first` on.

        Sinusoids have no end; places after the last learned position share it.
        """
        if self.table is None:
            return sinusoids(length, self.d_model, first, device)
        places_T = torch.arange(first, first + length, device=device)
        learned_TD: Tensor = self.table(places_T.clamp(max=self.table.num_embeddings - 1))
        return learned_TD


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network (section 3.1)."""

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
    """Self-attention, attention to the source, then a feed-forward network (section 3.1)."""

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

    def step(self, x_N1D: Tensor, state: DecoderState, index: int) -> Tensor:
        """Return the layer's output [N, 1, D] for one more position."""
        x_N1D = self.residual_1(x_N1D, lambda x: self.self_attention.step(x, state, index))
        x_N1D = self.residual_2(x_N1D, lambda x: self.cross_attention.step(x, state, index))
        x_N1D = self.residual_3(x_N1D, self.feed_forward)
        return x_N1D


class Residual(nn.Module):
    """A residual connection around a sublayer, with LayerNorm after it or before it.

    Post-norm is the paper's LayerNorm(x + Dropout(Sublayer(x))) (sections 3.1 and 5.4); pre-norm
    is x + Dropout(Sublayer(LayerNorm(x))).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.d_model, eps=1e-5)
        self.dropout = Dropout(config.dropout)
        self.is_post = config.norm == "post"

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """Return `x` with the sublayer's output added, normalised; the same shape."""
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

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply the same network to every position; [B, T, D] to [B, T, D]."""
        result: Tensor = self.outer(self.dropout(self.activation(self.inner(x_BTD))))
        return result


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself (section 3.2.2)."""

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
        """Return what each head gives to each position, [B, H, T, T]."""
        q_BHTK, k_BHTK, _ = self._project(x_BTD)
        return attention_weights(q_BHTK, k_BHTK, keep)

    def step(self, x_N1D: Tensor, state: DecoderState, index: int) -> Tensor:
        """Return [N, 1, D] for one more position, which sees itself and all before it."""
        q_NH1K, k_NH1K, v_NH1K = self._project(x_N1D)
        past = state.append(index, KeysValues(k_NH1K, v_NH1K), self.window)
        result: Tensor = self.output(merge_heads(attention(q_NH1K, past.keys, past.values, None)))
        return result

    def _project(self, x_BTD: Tensor) -> list[Tensor]:
        return [
            split_heads(x, self.num_heads) for x in self.queries_keys_values(x_BTD).chunk(3, -1)
        ]


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
        """Project a memory once, for all positions of the target."""
        k_BSD, v_BSD = self.source_keys_values(memory_BSD).chunk(2, -1)
        return KeysValues(split_heads(k_BSD, self.num_heads), split_heads(v_BSD, self.num_heads))

    def forward(self, x_BTD: Tensor, source: KeysValues, src_keep_B11S: Tensor) -> Tensor:
        """Return [B, T, D]."""
        q_BHTK = split_heads(self.queries(x_BTD), self.num_heads)
        mixed_BHTK = attention(q_BHTK, source.keys, source.values, src_keep_B11S, self.dropout)
        result: Tensor = self.output(merge_heads(mixed_BHTK))
        return result

    def weights(self, x_BTD: Tensor, source: KeysValues, src_keep_B11S: Tensor) -> Tensor:
        """Return what each head gives to each source position, [B, H, T, S]."""
        q_BHTK = split_heads(self.queries(x_BTD), self.num_heads)
        return attention_weights(q_BHTK, source.keys, src_keep_B11S)

    def step(self, x_N1D: Tensor, state: DecoderState, index: int) -> Tensor:
        """Return [N, 1, D]: the W hypotheses of a sentence are W queries to one source."""
        source = state.cross[index]
        x_BWD = x_N1D.view(len(source.keys), -1, x_N1D.shape[-1])
        return self.forward(x_BWD, source, state.src_keep_B11S).view_as(x_N1D)


@dataclass
class KeysValues:
    """Keys and values [B, H, S, K] of one attention."""

    keys: Tensor
    values: Tensor

    def take(self, rows: Tensor) -> KeysValues:
        """Return the given rows, in the given order."""
        return KeysValues(self.keys.index_select(0, rows), self.values.index_select(0, rows))


class AttentionMaps(NamedTuple):
    """Attention weights of a batch, one tensor for each layer.

    Attributes:
        encoder: each source position's, over the source, [B, H, S, S].
        decoder: each target position's, over the target so far, [B, H, T, T].
        cross: each target position's, over the source, [B, H, T, S].
    """

    encoder: list[Tensor]
    decoder: list[Tensor]
    cross: list[Tensor]


@dataclass
class DecoderState:
    """What decoding remembers: source keys and values per sentence, own ones per hypothesis."""

    src_keep_B11S: Tensor
    cross: list[KeysValues]
    past: list[KeysValues | None]
    length: int

    def append(self, index: int, new: KeysValues, window: int | None) -> KeysValues:
        """Add one position to layer `index`'s past and return what it sees, [N, H, T, K]."""
        past = self.past[index]
        if past is not None:
            new = KeysValues(
                torch.cat([past.keys, new.keys], 2), torch.cat([past.values, new.values], 2)
            )
        if window is not None:
            new = KeysValues(new.keys[:, :, -window - 1 :], new.values[:, :, -window - 1 :])
        self.past[index] = new
        return new

    def reorder(self, rows_N: Tensor, sentences_B: Tensor | None = None) -> None:
        """Continue with the hypotheses `rows_N`, and with `sentences_B` if some have left."""
        self.past = [past.take(rows_N) if past is not None else None for past in self.past]
        if sentences_B is not None:
            self.cross = [source.take(sentences_B) for source in self.cross]
            self.src_keep_B11S = self.src_keep_B11S.index_select(0, sentences_B)


def split_heads(x_BTD: Tensor, num_heads: int) -> Tensor:
    """Turn [B, T, D] into [B, H, T, K]."""
    heads_BTHK = x_BTD.view(*x_BTD.shape[:2], num_heads, -1)
    return heads_BTHK.transpose(1, 2)


def merge_heads(x_BHTK: Tensor) -> Tensor:
    """Turn [B, H, T, K] back into [B, T, D]."""
    return x_BHTK.transpose(1, 2).flatten(2)


def attention_weights(q_BHTK: Tensor, k_BHSK: Tensor, keep: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d_k)) over the kept keys, [B, H, T, S], written out."""
    scores_BHTS = q_BHTK @ k_BHSK.transpose(2, 3) / math.sqrt(q_BHTK.shape[-1])
    return scores_BHTS.masked_fill(~keep, torch.finfo(scores_BHTS.dtype).min).softmax(-1)


def near_keep(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return a keep-mask [T, T] of the positions that are at most `window` apart; None: all."""
    keep_TT = torch.ones(length, length, dtype=torch.bool, device=device)
    return keep_TT if window is None else keep_TT.tril(window).triu(-window)


def _record(
    attention: SelfAttention | CrossAttention, maps: list[Tensor]
) -> torch.utils.hooks.RemovableHandle:
    """Keep what an attention gives to each position, whenever it is called."""

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        maps.append(attention.weights(*inputs))

    return attention.register_forward_pre_hook(keep)


def sinusoids(
    length: int, d_model: int, first: int = 0, device: torch.device | None = None
) -> Tensor:
    """Return the positional encoding [length, D] of section 3.5 from position `first` on.

    PE(pos, 2i) = sin(pos / 10000^(2i / D)) and PE(pos, 2i + 1) = cos(the same), in float64.
    """
    position_T1 = torch.arange(first, first + length, dtype=torch.float64, device=device)[:, None]
    exponent_K = torch.arange(0, d_model, 2, dtype=torch.float64, device=device) / d_model
    angle_TK = position_T1 / 10_000.0**exponent_K
    return torch.stack([angle_TK.sin(), angle_TK.cos()], -1).flatten(1)


def num_parameters(model: nn.Module) -> int:
    """Count the weights, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
