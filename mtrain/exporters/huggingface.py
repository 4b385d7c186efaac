"""Export a model as Hugging Face's MarianMTModel, and run the exported model.

Marian's sinusoids have all sines before all cosines, mtrain's alternate. The model dimension of
every weight is permuted accordingly, which changes no output.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrain.config.sections import Config
from mtrain.data.batch import Batch, keep_first, pad_right
from mtrain.exporters.exporter import (
    LAYER_WEIGHT,
    Archive,
    ExportedHypothesis,
    ExportedModel,
    Ids,
    Requirement,
    SpecialIds,
    ids_of_pieces,
    in_batches,
    longest,
    score_by_logits,
    sines_first,
    write_sentencepiece,
)
from mtrain.model.transformer import Transformer
from mtrain.run.checkpoint import save_tensors
from mtrain.tokenizer.sentencepiece import Tokenizer, Vocabulary

PACKAGE, TAG = "transformers", "marian"
OTHER_PACKAGES: tuple[str, ...] = ()
TITLE = "Hugging Face transformers (`MarianMTModel`)"
_MARIAN = "Hugging Face's MarianMTModel, which"
REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement("model.norm", "post", f"{_MARIAN} has no pre-norm layers"),
    Requirement(
        "model.positions", "sinusoidal", f"{_MARIAN} forgets any other table when it is saved again"
    ),
    Requirement("model.attention_window", None, f"{_MARIAN} attends to all positions"),
)
QUANTIZATIONS: tuple[str, ...] = ("float16", "bfloat16")
ARCHIVE: Archive | None = None
USE = """\
In this folder:

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForSeq2SeqLM.from_pretrained(".")

lines = [{line!r}]
batch = tokenizer(lines, return_tensors="pt", padding=True)
outputs = model.generate(**batch)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True))
```
"""
NOTES = """\
- If the model is on the Hub, use its name there instead of `"."`.
- transformers before version 5 has `pipeline("translation", model=".")` too.
- A source of more than {num_positions:,} tokens is an error; an output ends after {max_length}.
- transformers divides a score by length^alpha, mtrain by ((5 + length) / 6)^alpha, so that
  their beams rank a little differently.
- A blank line does not give an empty translation: remove such lines.
- `>>x<<` at the beginning of a line is read as a language code; mtrain reads it as text.
- "Recommended: pip install sacremoses" is a warning of the tokenizer that can be ignored.
"""
MIN_POSITIONS = 1024  # not more, because transformers computes their table at each load
_MODULES = {  # of a layer, by their names in mtrain; a weight is split by rows among several
    "self_attention.queries_keys_values": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention.output": "self_attn.out_proj",
    "cross_attention.queries": "encoder_attn.q_proj",
    "cross_attention.source_keys_values": "encoder_attn.k_proj encoder_attn.v_proj",
    "cross_attention.output": "encoder_attn.out_proj",
    "feed_forward.inner": "fc1",
    "feed_forward.outer": "fc2",
    "residual_1.norm": "self_attn_layer_norm",
    "residual_3.norm": "final_layer_norm",
}
_SECOND_NORM = {"encoder": "final_layer_norm", "decoder": "encoder_attn_layer_norm"}


def write(
    model: Transformer,
    tokenizer: Tokenizer,
    config: Config,
    directory: Path,
    quantization: str | None,
) -> None:
    """Write a model and its tokenizer into `directory`."""
    dtype = getattr(torch, quantization or "float32")
    weights = {name: weight.to(dtype) for name, weight in _weights(model).items()}
    save_tensors(directory / "model.safetensors", weights, {"format": "pt"})
    limit, sizes = longest(config, MIN_POSITIONS), model.config
    tgt, decoding = tokenizer.tgt, config.decoding
    model_settings = architecture(model, tokenizer) | {
        "decoder_vocab_size": len(tgt),
        "dropout": sizes.dropout,
        "attention_dropout": sizes.attention_dropout,
        "activation_dropout": sizes.activation_dropout,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": sizes.tie_embeddings == "all",
        "tie_word_embeddings": sizes.tie_embeddings != "none",
        "max_position_embeddings": limit,
    }
    # as in mtrain, but for the length penalty; a `max_length` would contradict the
    # `max_new_tokens` of a caller, and transformers warns of that
    generation_settings = {
        "num_beams": decoding.beam,
        "length_penalty": decoding.length_alpha if decoding.beam > 1 else 1.0,
        "max_new_tokens": config.data.max_tokens + decoding.max_extra_tokens + 1,  # and eos
        "suppress_tokens": tgt.never_generated,
        **special_ids(tgt),
    }
    with _quiet() as transformers:
        settings = transformers.MarianConfig(**model_settings)
        settings.dtype = dtype
        settings.save_pretrained(directory)
        transformers.GenerationConfig(**generation_settings).save_pretrained(directory)
    _write_tokenizer(tokenizer, config, limit, directory)


def architecture(model: Transformer, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the settings of a MarianMTModel that describe its layers, and the special ids."""
    config = model.config
    return {
        "architectures": ["MarianMTModel"],
        "vocab_size": len(tokenizer.src),
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": config.activation,
        **special_ids(tokenizer.tgt),
    }


def special_ids(tgt: Vocabulary) -> dict[str, int]:
    """Return the ids that transformers and transformers.js read in settings."""
    return {
        "pad_token_id": tgt.pad,
        "bos_token_id": tgt.bos,
        "eos_token_id": tgt.eos,
        "forced_eos_token_id": tgt.eos,
        "decoder_start_token_id": tgt.bos,
    }


def _write_tokenizer(tokenizer: Tokenizer, config: Config, limit: int, directory: Path) -> None:
    """Write the files of a MarianTokenizer, with a second vocabulary if it is not shared."""
    write_sentencepiece(tokenizer, directory)
    src, is_separate = tokenizer.src, tokenizer.src is not tokenizer.tgt
    _write_json(ids_of_pieces(src), directory / "vocab.json")
    if is_separate:
        _write_json(ids_of_pieces(tokenizer.tgt), directory / "target_vocab.json")
    unk, eos, pad = src.pieces_of([src.unk, src.eos, src.pad])
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": config.data.src_lang,
        "target_lang": config.data.tgt_lang,
        "separate_vocabs": is_separate,
        "unk_token": unk,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": limit,
        "clean_up_tokenization_spaces": False,  # of " ." and the like
        "split_special_tokens": True,  # "</s>" in a text is text
    }
    _write_json(settings, directory / "tokenizer_config.json")


def has_language_code(line: str) -> bool:
    """Tell whether transformers reads the beginning of a line as a language code, not as text."""
    return line.startswith(">>") and "<<" in line


def _write_json(tree: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights(model: Transformer) -> dict[str, Tensor]:
    """Return a model's weights by their Marian names; a tied embedding is stored once."""
    tie, weights = model.config.tie_embeddings, sines_first(model)
    renamed = {}
    for name, weight in weights.items():
        if match := LAYER_WEIGHT.fullmatch(name):
            stack, index, module, kind = match.groups()
            names = (_MODULES | {"residual_2.norm": _SECOND_NORM[stack]})[module].split()
            for new_name, rows in zip(names, weight.chunk(len(names)), strict=True):
                renamed[f"model.{stack}.layers.{index}.{new_name}.{kind}"] = rows
    if tie == "all":
        renamed["model.shared.weight"] = weights["src_embedding.weight"]
    else:
        renamed["model.encoder.embed_tokens.weight"] = weights["src_embedding.weight"]
        renamed["model.decoder.embed_tokens.weight"] = weights["tgt_embedding.weight"]
    if tie == "none":
        renamed["lm_head.weight"] = weights["output.weight"]
    renamed["final_logits_bias"] = torch.zeros(1, len(weights["output.weight"]))
    return {name: weight.contiguous() for name, weight in renamed.items()}


class MarianModel(ExportedModel):
    """An exported folder, loaded by transformers on the CPU."""

    masks_special = False  # `generate` suppresses <pad>, <s> and tags; the model's scores do not

    def __init__(self, directory: Path) -> None:
        with _quiet() as transformers:
            self.model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        generation = self.model.generation_config
        self._special = SpecialIds(
            int(generation.pad_token_id),
            int(generation.decoder_start_token_id),
            int(generation.eos_token_id),
        )

    def encode(self, lines: Sequence[str]) -> Ids:
        """Return tokens + eos for each line."""
        return [self._tokenizer(line)["input_ids"] for line in lines]

    def decode(self, ids: Ids) -> list[str]:
        """Return the text of each list of tokens."""
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in ids]

    @torch.inference_mode()
    def search(self, sources: Ids, beam: int, max_lengths: list[int]) -> list[ExportedHypothesis]:
        """Return the target of the highest log-probability of each source."""

        def search_rows(rows: list[int]) -> list[ExportedHypothesis]:
            src = [sources[row] for row in rows]
            max_new_tokens = max(max_lengths[row] for row in rows) + 1
            with _quiet():
                result = self.model.generate(
                    pad_right(src, self._special.pad),
                    attention_mask=keep_first([len(ids) for ids in src]).long(),
                    num_beams=beam,
                    length_penalty=0.0 if beam > 1 else 1.0,
                    max_new_tokens=max_new_tokens,
                    return_dict_in_generate=True,
                    output_scores=beam > 1,
                )
            log_probs = result.sequences_scores.tolist() if beam > 1 else [0.0] * len(src)
            hypotheses = []
            for ids, log_prob in zip(result.sequences[:, 1:].tolist(), log_probs, strict=True):
                length = ids.index(self._special.eos)  # forced at the limit
                has_ended = length + 1 < max_new_tokens
                hypotheses.append(ExportedHypothesis(ids[:length], log_prob, has_ended))
            return hypotheses

        found = in_batches([len(ids) for ids in sources], search_rows)
        if beam > 1:
            return found
        scores = self.score(sources, [hypothesis.ids for hypothesis in found])
        return [
            each._replace(log_prob=sum(values if each.has_ended else values[:-1]))
            for each, values in zip(found, scores, strict=True)
        ]

    @torch.inference_mode()
    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each token of a given target, and of its eos."""

        def logits_of(batch: Batch) -> Tensor:
            logits_BTV: Tensor = self.model(
                input_ids=batch.src_BS,
                attention_mask=batch.src_keep_BS.long(),
                decoder_input_ids=batch.tgt_in_BT,
            ).logits
            return logits_BTV

        return score_by_logits(sources, targets, self._special, logits_of)


load = MarianModel  # the `load` of the `Exporter` protocol


@contextmanager
def _quiet() -> Iterator[Any]:
    """Yield transformers, without its progress bars and warnings."""
    with ExitStack() as restored, warnings.catch_warnings(action="ignore"):
        disabled_level = logging.root.manager.disable
        restored.callback(logging.disable, disabled_level)
        logging.disable(max(disabled_level, logging.WARNING))
        import transformers
        from transformers.utils import logging as transformers_logging

        if transformers_logging.is_progress_bar_enabled():
            restored.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        yield transformers
