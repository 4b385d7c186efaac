"""Translate with Hugging Face's MarianMTModel, which carries the weights of the trained model.

Its positions hold all sines before all cosines, where mtrain's alternate. The axis of the residual
stream is permuted accordingly wherever a weight touches it, which changes no result.
"""

from __future__ import annotations

import torch
import transformers
from peers.decoding import Ids, Job, Loaded, in_batches, serve
from peers.weights import Names, Weights, rename_layers
from peers.worker import BOS, EOS, PAD, until_eos
from safetensors.torch import load_file
from torch import Tensor

_NEVER = -1e9  # a bias that no logit outweighs

_BOTH: Names = {
    "self_attention.queries_keys_values": [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    ],
    "self_attention.output": ["self_attn.out_proj"],
    "residual_1.norm": ["self_attn_layer_norm"],
    "feed_forward.inner": ["fc1"],
    "feed_forward.outer": ["fc2"],
}
ENCODER: Names = {**_BOTH, "residual_2.norm": ["final_layer_norm"]}
DECODER: Names = {
    **_BOTH,
    "cross_attention.queries": ["encoder_attn.q_proj"],
    "cross_attention.source_keys_values": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "cross_attention.output": ["encoder_attn.out_proj"],
    "residual_2.norm": ["encoder_attn_layer_norm"],
    "residual_3.norm": ["final_layer_norm"],
}


def main() -> None:
    serve(load)


def load(job: Job) -> Loaded:
    torch.set_num_threads(job.threads)
    model = transformers.MarianMTModel(model_config(job)).eval()
    missing, unexpected = model.load_state_dict(convert(job, load_file(job.weights_path)), False)
    assert not unexpected, unexpected
    own = [name for name in missing if not name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    assert all(name.endswith("embed_positions.weight") for name in own), own
    settings = transformers.GenerationConfig(
        num_beams=job.beam,
        length_penalty=job.alpha if job.beam > 1 else 1.0,
        early_stopping=job.beam > 1,  # once the beam is full, as CTranslate2 does
        max_new_tokens=job.max_tokens,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        forced_eos_token_id=EOS,
        decoder_start_token_id=BOS,
    )

    @torch.inference_mode()
    def decode(rows: list[int]) -> Ids:
        sources = [job.sources[row] for row in rows]
        width = max(map(len, sources))
        src = torch.tensor([ids + [PAD] * (width - len(ids)) for ids in sources])
        keep = (src != PAD).long()
        found = model.generate(src, attention_mask=keep, generation_config=settings)
        return [until_eos(ids[1:]) for ids in found.tolist()]

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return Loaded(in_batches(job, decode), versions)


def model_config(job: Job) -> transformers.MarianConfig:
    return transformers.MarianConfig(
        vocab_size=job.vocab_size,
        d_model=job.d_model,
        encoder_layers=job.num_encoder_layers,
        decoder_layers=job.num_decoder_layers,
        encoder_attention_heads=job.num_heads,
        decoder_attention_heads=job.num_heads,
        encoder_ffn_dim=job.d_ff,
        decoder_ffn_dim=job.d_ff,
        activation_function="relu",
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
    )


def convert(job: Job, own: Weights) -> Weights:
    """Return mtrain's weights by MarianMTModel's names; pad and bos are never written."""
    order = [*range(0, job.d_model, 2), *range(1, job.d_model, 2)]
    own = {name: permute(name, weight, order) for name, weight in own.items()}
    bias = torch.zeros(1, job.vocab_size)
    bias[0, [PAD, BOS]] = _NEVER
    return {
        "model.shared.weight": own["src_embedding.weight"],
        "final_logits_bias": bias,
        **rename_layers(own, ENCODER, DECODER, "model."),
    }


def permute(name: str, weight: Tensor, order: list[int]) -> Tensor:
    """Reorder the axis of the residual stream, which a module reads, writes or normalises."""
    module = name.rpartition(".")[0]
    if module.endswith((".norm", ".output", ".outer")):
        return weight[order]
    return weight[:, order] if weight.dim() == 2 else weight


if __name__ == "__main__":
    main()
