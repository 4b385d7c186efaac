"""Translate with JoeyNMT's own search, by a model that carries the weights of the trained one."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from joeynmt import __version__ as joeynmt_version
from joeynmt.batch import Batch
from joeynmt.model import Model, build_model
from joeynmt.search import search
from joeynmt.vocabulary import Vocabulary
from peers.decoding import Ids, Job, Loaded, in_batches, serve
from peers.weights import Names, Weights, rename_layers
from peers.worker import BOS, EOS, NUM_SPECIAL, PAD, UNK, until_eos
from safetensors.torch import load_file

_SWAPPED = {PAD: UNK, UNK: PAD}  # JoeyNMT's first id is that of unk
_EPS = 1e-5  # of every LayerNorm; JoeyNMT's own is 1e-6

_FEED_FORWARD: Names = {
    "feed_forward.inner": ["feed_forward.pwff_layer.0"],
    "feed_forward.outer": ["feed_forward.pwff_layer.3"],
}


def attention_names(name: str) -> list[str]:
    return [f"{name}.q_layer", f"{name}.k_layer", f"{name}.v_layer"]


ENCODER: Names = {
    **_FEED_FORWARD,
    "self_attention.queries_keys_values": attention_names("src_src_att"),
    "self_attention.output": ["src_src_att.output_layer"],
    "residual_1.norm": ["layer_norm"],
    "residual_2.norm": ["feed_forward.layer_norm"],
}
DECODER: Names = {
    **_FEED_FORWARD,
    "self_attention.queries_keys_values": attention_names("trg_trg_att"),
    "self_attention.output": ["trg_trg_att.output_layer"],
    "cross_attention.queries": attention_names("src_trg_att")[:1],
    "cross_attention.source_keys_values": attention_names("src_trg_att")[1:],
    "cross_attention.output": ["src_trg_att.output_layer"],
    "residual_1.norm": ["x_layer_norm"],
    "residual_2.norm": ["dec_layer_norm"],
    "residual_3.norm": ["feed_forward.layer_norm"],
}


def main() -> None:
    serve(load)


def load(job: Job) -> Loaded:
    torch.set_num_threads(job.threads)
    model = make_model(job).eval()
    missing, unexpected = model.load_state_dict(convert(job, load_file(job.weights_path)), False)
    assert not unexpected, unexpected
    assert all(name.endswith(".pe") for name in missing), missing
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = _EPS

    def decode(rows: list[int]) -> Ids:
        sources = [job.sources[row] for row in rows]
        outputs, _, _ = search(
            model=model,
            batch=make_batch(model, sources),
            max_output_length=job.max_tokens,
            beam_size=job.beam,
            beam_alpha=job.alpha,
        )
        return [until_eos(swap(ids)) for ids in outputs.tolist()]

    return Loaded(
        in_batches(job, decode), {"joeynmt": str(joeynmt_version), "torch": torch.__version__}
    )


def make_model(job: Job) -> Model:
    """Build JoeyNMT's model of the same sizes."""
    special = SimpleNamespace(
        unk_token="<unk>",
        unk_id=_SWAPPED[UNK],
        pad_token="<pad>",
        pad_id=_SWAPPED[PAD],
        bos_token="<s>",
        bos_id=BOS,
        eos_token="</s>",
        eos_id=EOS,
        sep_token=None,
        sep_id=None,
        lang_tags=[],
    )
    vocabulary = Vocabulary([str(index) for index in range(NUM_SPECIAL, job.vocab_size)], special)
    stack = {
        "type": "transformer",
        "num_heads": job.num_heads,
        "embeddings": {"embedding_dim": job.d_model, "scale": True},
        "hidden_size": job.d_model,
        "ff_size": job.d_ff,
        "dropout": 0.0,
        "layer_norm": "post",
    }
    config = {
        "tied_embeddings": True,
        "tied_softmax": True,
        "encoder": {**stack, "num_layers": job.num_encoder_layers},
        "decoder": {**stack, "num_layers": job.num_decoder_layers},
    }
    return build_model(config, vocabulary, vocabulary)


def convert(job: Job, own: Weights) -> Weights:
    """Return mtrain's weights by JoeyNMT's names."""
    embedding = own["src_embedding.weight"][swap(list(range(job.vocab_size)))]
    names = ("src_embed.lut", "trg_embed.lut", "decoder.output_layer")
    tied = {f"{name}.weight": embedding for name in names}
    return {**tied, **rename_layers(own, ENCODER, DECODER)}


def make_batch(model: Model, sources: Ids) -> Batch:
    width = max(map(len, sources))
    pad = model.pad_index
    return Batch(
        src=torch.tensor([swap(ids) + [pad] * (width - len(ids)) for ids in sources]),
        src_length=torch.tensor([len(ids) for ids in sources]),
        src_prompt_mask=None,
        trg=None,
        trg_prompt_mask=None,
        indices=torch.arange(len(sources)),
        device=torch.device("cpu"),
        pad_index=pad,
        eos_index=model.eos_index,
        is_train=False,
    )


def swap(ids: list[int]) -> list[int]:
    """Turn mtrain's ids into JoeyNMT's, or back."""
    return [_SWAPPED.get(index, index) for index in ids]


if __name__ == "__main__":
    main()
