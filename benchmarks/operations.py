"""How many operations training takes: those of the matrix products of real tokens, by formula.

A product and a sum are two operations, a backward pass is two forward passes. Padding does not
count; positions of the attention that a causal mask hides do.
"""

from __future__ import annotations

from typing import NamedTuple


class Tokens(NamedTuple):
    """How many tokens some pairs have, and sums over the pairs that attention follows from."""

    src: float
    tgt: float
    src_squares: float
    tgt_squares: float
    products: float  # of a pair's two lengths


class Sizes(NamedTuple):
    """The sizes of a Transformer that decide what it costs."""

    num_encoder_layers: int
    num_decoder_layers: int
    d_model: int
    d_ff: int
    vocab_size: int


def flop(tokens: Tokens, sizes: Sizes) -> float:
    """Return the operations of training on some pairs once."""
    width = sizes.d_model
    projection, feed_forward = 2 * width**2, 4 * width * sizes.d_ff
    attention = 4 * width  # scores and mixtures, over all heads, for each pair of places
    encoder = (4 * projection + feed_forward) * tokens.src + attention * tokens.src_squares
    decoder = (6 * projection + feed_forward) * tokens.tgt + attention * tokens.tgt_squares
    decoder += 2 * projection * tokens.src + attention * tokens.products  # across
    layers = sizes.num_encoder_layers * encoder + sizes.num_decoder_layers * decoder
    return 3 * (layers + 2 * width * sizes.vocab_size * tokens.tgt)
