"""Write a model for CTranslate2, and run what was written."""

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
from mtrain.export.parity import ExportedHypothesis, Ids
from mtrain.model.transformer import Transformer, sinusoids
from mtrain.tokenizer.sentencepiece import Tokenizer, Vocabulary

if TYPE_CHECKING:
    import ctranslate2

Quantization = Literal["int8", "float16", "bfloat16"]
_MIN_POSITIONS = 4096
_MASKED_BIAS = -1e4  # below every logit, and within float16
_BATCH_SIZE = 32


def check_supported(config: ModelConfig) -> None:
    """Raise ConfigError for a model that CTranslate2 does not support."""
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
    """Write a model and its SentencePiece models into `directory`."""
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    activations = {"relu": Activation.RELU, "gelu": Activation.GELU}
    sizes = model.config
    spec = TransformerSpec.from_config(
        (sizes.num_encoder_layers, sizes.num_decoder_layers),
        sizes.num_heads,
        pre_norm=sizes.norm == "pre",
        activation=activations[sizes.activation],
    )
    tgt = tokenizer.tgt
    _SpecFiller(model, num_positions(config)).fill(spec, masked_ids=[tgt.pad, tgt.bos])
    unk, bos, eos = tgt.pieces_of([tgt.unk, tgt.bos, tgt.eos])
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = unk, bos, eos
    spec.config.decoder_start_token = bos
    spec.config.add_source_bos, spec.config.add_source_eos = False, True
    spec.config.layer_norm_epsilon = 1e-5
    spec.register_source_vocabulary(_pieces(tokenizer.src))
    spec.register_target_vocabulary(_pieces(tgt))
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(directory))
    (directory / "source.spm").write_bytes(tokenizer.src.model)
    (directory / "target.spm").write_bytes(tokenizer.tgt.model)


def num_positions(config: Config) -> int:
    """Return the most tokens of a source, and of a target; more are an error."""
    return max(_MIN_POSITIONS, config.data.max_tokens + config.decoding.max_extra_tokens + 1)


def _pieces(vocabulary: Vocabulary) -> list[str]:
    return vocabulary.pieces_of(range(len(vocabulary)))


class _SpecFiller:
    """Copies a model's weights into a CTranslate2 specification."""

    def __init__(self, model: Transformer, num_positions: int) -> None:
        self._model, self._num_positions = model, num_positions
        self._weights: dict[str, Tensor] = model.state_dict()

    def fill(self, spec: Any, masked_ids: list[int]) -> None:
        """Fill `spec`; a bias keeps the tokens `masked_ids` from being generated."""
        spec.encoder.embeddings[0].weight = self._get("src_embedding.weight")
        spec.decoder.embeddings.weight = self._get("tgt_embedding.weight")
        spec.decoder.projection.weight = self._get("output.weight")
        spec.decoder.projection.bias = np.zeros(len(self._weights["output.weight"]), np.float32)
        spec.decoder.projection.bias[masked_ids] = _MASKED_BIAS
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
        projections = ["queries_keys_values", "output"]
        self._attention(spec.self_attention, f"{name}.self_attention", projections)
        norms = [spec.self_attention.layer_norm, spec.ffn.layer_norm]
        if name.startswith("decoder"):
            projections = ["queries", "source_keys_values", "output"]
            self._attention(spec.attention, f"{name}.cross_attention", projections)
            norms.insert(1, spec.attention.layer_norm)
        self._linear(spec.ffn.linear_0, f"{name}.feed_forward.inner")
        self._linear(spec.ffn.linear_1, f"{name}.feed_forward.outer")
        for number, norm in enumerate(norms, start=1):
            self._norm(norm, f"{name}.residual_{number}.norm")

    def _attention(self, spec: Any, name: str, projections: list[str]) -> None:
        for linear, projection in zip(spec.linear, projections, strict=True):
            self._linear(linear, f"{name}.{projection}")

    def _linear(self, spec: Any, name: str) -> None:
        spec.weight, spec.bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")

    def _norm(self, spec: Any, name: str) -> None:
        spec.gamma, spec.beta = self._get(f"{name}.weight"), self._get(f"{name}.bias")

    def _get(self, name: str) -> npt.NDArray[np.float32]:
        return _as_array(self._weights[name])

    def _positions(self, side: str) -> npt.NDArray[np.float32]:
        """Return the positional encodings; the last learned one is repeated to fill the table."""
        learned = self._weights.get(f"{side}_positions.table.weight")
        if learned is None:
            return _as_array(sinusoids(self._num_positions, self._model.config.d_model))
        num_more = max(0, self._num_positions - len(learned))
        return np.concatenate([_as_array(learned), _as_array(learned[-1:].expand(num_more, -1))])


def _as_array(tensor: Tensor) -> npt.NDArray[np.float32]:
    # a copy, because quantization writes into it
    return np.array(tensor.detach().cpu().numpy(), np.float32)


class CTranslate2Model:
    """An exported folder, loaded by CTranslate2 on the CPU."""

    masks_special = True  # by the bias of the output projection

    def __init__(self, directory: Path) -> None:
        import ctranslate2

        self._translator: ctranslate2.Translator = ctranslate2.Translator(
            str(directory), device="cpu", inter_threads=1, intra_threads=torch.get_num_threads()
        )
        self._src = Vocabulary((directory / "source.spm").read_bytes())
        self._tgt = Vocabulary((directory / "target.spm").read_bytes())
        self._id_of = {piece: index for index, piece in enumerate(_pieces(self._tgt))}

    def encode(self, lines: Sequence[str]) -> Ids:
        """Return tokens + eos for each line."""
        return [[*ids, self._src.eos] for ids in self._src.encode(lines)]

    def decode(self, ids: Ids) -> list[str]:
        """Return the text of each list of tokens."""
        return self._tgt.decode(ids)

    def search(self, sources: Ids, beam: int, max_lengths: list[int]) -> list[ExportedHypothesis]:
        """Return the target of the highest log-probability of each source."""
        return [best[0] for best in self.search_best(sources, beam, max_lengths, num_best=1)]

    def search_best(
        self, sources: Ids, beam: int, max_lengths: list[int], num_best: int
    ) -> list[list[ExportedHypothesis]]:
        """Return the best targets of each source by log-probability, at most `num_best`."""
        results = self._translator.translate_batch(
            self._tokens(sources),
            max_batch_size=_BATCH_SIZE,
            beam_size=beam,
            num_hypotheses=num_best,
            length_penalty=0,
            return_scores=True,
            return_end_token=True,
            max_input_length=0,
            max_decoding_length=max(max_lengths) + 1,
            min_decoding_length=0,  # by default eos cannot come first
        )
        return [
            [
                self._hypothesis(tokens, log_prob)
                for tokens, log_prob in zip(result.hypotheses, result.scores, strict=True)
            ]
            for result in results
        ]

    def _hypothesis(self, tokens: list[str], log_prob: float) -> ExportedHypothesis:
        ids = [self._id_of[token] for token in tokens]
        has_ended = ids[-1:] == [self._tgt.eos]
        return ExportedHypothesis(ids[:-1] if has_ended else ids, log_prob, has_ended)

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each token of a given target, and of its eos."""
        tgt_tokens = [self._tgt.pieces_of(ids) for ids in targets]
        results = self._translator.score_batch(
            self._tokens(sources), tgt_tokens, max_batch_size=_BATCH_SIZE, max_input_length=0
        )
        return [list(result.log_probs) for result in results]

    def _tokens(self, sources: Ids) -> list[list[str]]:
        return [self._src.pieces_of(ids[:-1]) for ids in sources]  # CTranslate2 adds eos
