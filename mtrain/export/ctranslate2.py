"""A model as CTranslate2 has it: write it, and translate with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrain.config.sections import Config, ModelConfig
from mtrain.errors import ConfigError
from mtrain.export.parity import CopyOutput, Ids
from mtrain.model.transformer import Transformer, sinusoids
from mtrain.tokenizer.sentencepiece import Tokenizer, Vocabulary

if TYPE_CHECKING:
    import ctranslate2

Quantization = Literal["int8", "float16", "bfloat16"]
_NUM_POSITIONS = 4096  # at least
_NEVER = -1e4  # a bias that no logit outweighs, and that float16 can hold
_BATCH = 32


def refuse(config: ModelConfig) -> None:
    """Refuse a model that CTranslate2 cannot hold.

    Raises:
        ConfigError: with the reason.
    """
    if config.attention_window is not None:
        raise ConfigError(
            "`model.attention_window` must be null for CTranslate2, whose encoder attends to "
            f"the whole source, but is {config.attention_window} instead."
        )


def write(
    model: Transformer,
    tokenizer: Tokenizer,
    config: Config,
    directory: Path,
    quantization: Quantization | None,
) -> None:
    """Write a model and its SentencePiece models into a folder."""
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    sizes = model.config
    spec = TransformerSpec.from_config(
        (sizes.num_encoder_layers, sizes.num_decoder_layers),
        sizes.num_heads,
        pre_norm=sizes.norm == "pre",
        activation=Activation.RELU if sizes.activation == "relu" else Activation.GELU,
    )
    _Weights(model, num_positions(config)).put(spec, [tokenizer.tgt.pad, tokenizer.tgt.bos])
    _describe(spec.config, tokenizer.tgt)
    spec.register_source_vocabulary(_pieces(tokenizer.src))
    spec.register_target_vocabulary(_pieces(tokenizer.tgt))
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(directory))
    (directory / "source.spm").write_bytes(tokenizer.src.model)
    (directory / "target.spm").write_bytes(tokenizer.tgt.model)


def num_positions(config: Config) -> int:
    """Return how many pieces a source may have, and a target; more are an error."""
    return max(_NUM_POSITIONS, config.data.max_tokens + config.decoding.max_extra_tokens + 1)


def _describe(config: Any, tgt: Vocabulary) -> None:
    config.unk_token, config.bos_token, config.eos_token = tgt.pieces_of(
        [tgt.unk, tgt.bos, tgt.eos]
    )
    config.decoder_start_token = config.bos_token
    config.add_source_bos, config.add_source_eos = False, True
    config.layer_norm_epsilon = 1e-5


def _pieces(vocabulary: Vocabulary) -> list[str]:
    return vocabulary.pieces_of(range(len(vocabulary)))


class _Weights:
    """A model's weights, and where each stands in a specification."""

    def __init__(self, model: Transformer, num_positions: int) -> None:
        self._model, self._num_positions = model, num_positions
        self._own: dict[str, Tensor] = model.state_dict()

    def put(self, spec: Any, never: list[int]) -> None:
        """Fill a specification; a bias keeps the pieces `never` from being written."""
        spec.encoder.embeddings[0].weight = self._get("src_embedding.weight")
        spec.decoder.embeddings.weight = self._get("tgt_embedding.weight")
        spec.decoder.projection.weight = self._get("output.weight")
        spec.decoder.projection.bias = np.zeros(len(self._own["output.weight"]), np.float32)
        spec.decoder.projection.bias[never] = _NEVER
        for stack, side, name in (
            (spec.encoder, "src", "encoder"),
            (spec.decoder, "tgt", "decoder"),
        ):
            stack.scale_embeddings = True
            stack.position_encodings.encodings = self._positions(side)
            if self._model.config.norm == "pre":
                self._norm(stack.layer_norm, f"{name}_norm")
            for index, layer in enumerate(stack.layer):
                self._layer(layer, f"{name}.{index}")

    def _layer(self, spec: Any, name: str) -> None:
        attention = ["queries_keys_values", "output"]
        self._attention(spec.self_attention, f"{name}.self_attention", attention)
        norms = [spec.self_attention.layer_norm, spec.ffn.layer_norm]
        if name.startswith("decoder"):
            attention = ["queries", "source_keys_values", "output"]
            self._attention(spec.attention, f"{name}.cross_attention", attention)
            norms.insert(1, spec.attention.layer_norm)
        self._linear(spec.ffn.linear_0, f"{name}.feed_forward.inner")
        self._linear(spec.ffn.linear_1, f"{name}.feed_forward.outer")
        for number, norm in enumerate(norms, start=1):
            self._norm(norm, f"{name}.residual_{number}.norm")

    def _attention(self, spec: Any, name: str, parts: list[str]) -> None:
        for linear, part in zip(spec.linear, parts, strict=True):
            self._linear(linear, f"{name}.{part}")

    def _linear(self, spec: Any, name: str) -> None:
        spec.weight, spec.bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")

    def _norm(self, spec: Any, name: str) -> None:
        spec.gamma, spec.beta = self._get(f"{name}.weight"), self._get(f"{name}.bias")

    def _get(self, name: str) -> npt.NDArray[np.float32]:
        return _as_array(self._own[name])

    def _positions(self, side: str) -> npt.NDArray[np.float32]:
        """Return the whole table; after the last learned position all are like it."""
        learned = self._own.get(f"{side}_positions.table.weight")
        if learned is None:
            return _as_array(sinusoids(self._num_positions, self._model.config.d_model))
        num_more = max(0, self._num_positions - len(learned))
        return np.concatenate([_as_array(learned), _as_array(learned[-1:].expand(num_more, -1))])


def _as_array(tensor: Tensor) -> npt.NDArray[np.float32]:
    # a copy, because quantization writes into it
    return np.array(tensor.detach().cpu().numpy(), np.float32)


class CTranslate2Copy:
    """A folder that `write` has filled, loaded by CTranslate2 on the CPU."""

    is_closed = True  # by the bias

    def __init__(self, directory: Path) -> None:
        import ctranslate2

        self._translator: ctranslate2.Translator = ctranslate2.Translator(
            str(directory), device="cpu", inter_threads=1, intra_threads=torch.get_num_threads()
        )
        self._src = Vocabulary((directory / "source.spm").read_bytes())
        self._tgt = Vocabulary((directory / "target.spm").read_bytes())
        self._ids_of = {piece: number for number, piece in enumerate(_pieces(self._tgt))}

    def encode(self, lines: Sequence[str]) -> Ids:
        """Return pieces + eos for each line."""
        return [[*ids, self._src.eos] for ids in self._src.encode(lines)]

    def decode(self, ids: Ids) -> list[str]:
        """Return the text of each list of pieces."""
        return self._tgt.decode(ids)

    def search(self, sources: Ids, beam: int, max_lengths: list[int]) -> list[CopyOutput]:
        """Return the likeliest target of each source, its score not divided by its length."""
        return [best[0] for best in self.search_best(sources, beam, max_lengths, num_best=1)]

    def search_best(
        self, sources: Ids, beam: int, max_lengths: list[int], num_best: int
    ) -> list[list[CopyOutput]]:
        """Return the likeliest targets of each source, at most `num_best`."""
        results = self._translator.translate_batch(
            self._read(sources),
            max_batch_size=_BATCH,
            beam_size=beam,
            num_hypotheses=num_best,
            length_penalty=0,
            return_scores=True,
            return_end_token=True,
            max_input_length=0,
            max_decoding_length=max(max_lengths) + 1,
            min_decoding_length=0,  # otherwise eos has no probability at the beginning
        )
        return [
            [self._found(*one) for one in zip(result.hypotheses, result.scores, strict=True)]
            for result in results
        ]

    def _found(self, pieces: list[str], log_prob: float) -> CopyOutput:
        ids = [self._ids_of[piece] for piece in pieces]
        has_ended = ids[-1:] == [self._tgt.eos]
        return CopyOutput(ids[:-1] if has_ended else ids, log_prob, has_ended)

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each piece of a given target, and of its eos."""
        pieces = [self._tgt.pieces_of(ids) for ids in targets]
        results = self._translator.score_batch(
            self._read(sources), pieces, max_batch_size=_BATCH, max_input_length=0
        )
        return [list(result.log_probs) for result in results]

    def _read(self, sources: Ids) -> list[list[str]]:
        return [self._src.pieces_of(ids[:-1]) for ids in sources]  # it adds eos itself
