"""Translate with CTranslate2, from a converted copy of the trained model."""

from __future__ import annotations

import math
import tempfile

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerSpec
from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec
from ctranslate2.specs.common_spec import LayerNormSpec, LinearSpec
from ctranslate2.specs.transformer_spec import FeedForwardSpec
from peers.decoding import Ids, Job, Loaded, in_batches, run_apart, serve
from peers.worker import BOS, EOS, NUM_SPECIAL, PAD, UNK
from safetensors.numpy import load_file

_NEVER = -1e9  # a bias that no logit outweighs
_NUM_POSITIONS = 4096  # the table is a hard limit on lengths

Weights = dict[str, np.ndarray]


def main() -> None:
    serve(load)


def load(job: Job) -> Loaded:
    with tempfile.TemporaryDirectory() as folder:
        run_apart(convert, job, folder)
        translator = ctranslate2.Translator(
            folder,
            device="cpu",
            compute_type=job.precision,
            inter_threads=1,
            intra_threads=job.threads,
        )
    pieces = vocabulary(job.vocab_size)
    ids_of = {piece: index for index, piece in enumerate(pieces)}

    def decode(rows: list[int]) -> Ids:
        sources = [job.sources[row] for row in rows]
        found = translator.translate_batch(
            [[pieces[index] for index in ids] for ids in sources],
            beam_size=job.beam,
            length_penalty=job.alpha,
            max_decoding_length=job.max_tokens,
        )
        return [[ids_of[piece] for piece in result.hypotheses[0]] for result in found]

    versions = {"ctranslate2": ctranslate2.__version__, "in": translator.compute_type}
    return Loaded(in_batches(job, decode), versions)


def vocabulary(size: int) -> list[str]:
    """Return the ids as words, the special ones by the names that CTranslate2 knows."""
    special = {PAD: "<blank>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
    return [special[index] for index in range(NUM_SPECIAL)] + [
        str(index) for index in range(NUM_SPECIAL, size)
    ]


def convert(job: Job, folder: str) -> None:
    """Write mtrain's weights as a model of CTranslate2; pad and bos are never written."""
    own = load_file(job.weights_path)
    num_layers = (job.num_encoder_layers, job.num_decoder_layers)
    spec = TransformerSpec.from_config(num_layers, job.num_heads, pre_norm=False)
    embedding, positions = own["src_embedding.weight"], sinusoids(_NUM_POSITIONS, job.d_model)
    for stack in (spec.encoder, spec.decoder):
        stack.scale_embeddings = True
        stack.position_encodings.encodings = positions
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = embedding
    spec.decoder.projection.weight = embedding
    spec.decoder.projection.bias = np.zeros(job.vocab_size, np.float32)
    spec.decoder.projection.bias[[PAD, BOS]] = _NEVER
    for index, layer in enumerate(spec.encoder.layer):
        prefix = f"encoder.{index}"
        put_self_attention(layer.self_attention, own, prefix)
        put_feed_forward(layer.ffn, own, f"{prefix}.feed_forward", f"{prefix}.residual_2")
    for index, layer in enumerate(spec.decoder.layer):
        prefix = f"decoder.{index}"
        put_self_attention(layer.self_attention, own, prefix)
        put_cross_attention(layer.attention, own, prefix)
        put_feed_forward(layer.ffn, own, f"{prefix}.feed_forward", f"{prefix}.residual_3")
    spec.config.add_source_eos = False  # the sources have it
    spec.config.decoder_start_token = "<s>"
    spec.config.layer_norm_epsilon = 1e-5
    for register in (spec.register_source_vocabulary, spec.register_target_vocabulary):
        register(vocabulary(job.vocab_size))
    spec.validate()
    spec.optimize(quantization=None if job.precision == "float32" else job.precision)
    spec.save(folder)


def sinusoids(length: int, d_model: int) -> np.ndarray:
    """Return positions as mtrain computes them: a sine, its cosine, the next sine, ..."""
    exponents = np.arange(0, d_model, 2) / d_model
    angles = np.arange(length)[:, None] * np.exp(-math.log(10_000.0) * exponents)
    pairs = np.stack([np.sin(angles), np.cos(angles)], -1)
    return pairs.reshape(length, d_model).astype(np.float32)


def put_self_attention(spec: MultiHeadAttentionSpec, own: Weights, prefix: str) -> None:
    put_linear(spec.linear[0], own, f"{prefix}.self_attention.queries_keys_values")
    put_linear(spec.linear[1], own, f"{prefix}.self_attention.output")
    put_norm(spec.layer_norm, own, f"{prefix}.residual_1")


def put_cross_attention(spec: MultiHeadAttentionSpec, own: Weights, prefix: str) -> None:
    put_linear(spec.linear[0], own, f"{prefix}.cross_attention.queries")
    put_linear(spec.linear[1], own, f"{prefix}.cross_attention.source_keys_values")
    put_linear(spec.linear[2], own, f"{prefix}.cross_attention.output")
    put_norm(spec.layer_norm, own, f"{prefix}.residual_2")


def put_feed_forward(spec: FeedForwardSpec, own: Weights, name: str, residual: str) -> None:
    put_linear(spec.linear_0, own, f"{name}.inner")
    put_linear(spec.linear_1, own, f"{name}.outer")
    put_norm(spec.layer_norm, own, residual)


def put_linear(spec: LinearSpec, own: Weights, name: str) -> None:
    spec.weight, spec.bias = own[f"{name}.weight"], own[f"{name}.bias"]


def put_norm(spec: LayerNormSpec, own: Weights, residual: str) -> None:
    spec.gamma, spec.beta = own[f"{residual}.norm.weight"], own[f"{residual}.norm.bias"]


if __name__ == "__main__":
    main()
