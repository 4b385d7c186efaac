"""Export a model to CTranslate2, and translate with the exported model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrain.config.sections import Config
from mtrain.decode.beam import Hypothesis, length_penalty
from mtrain.decode.options import DecodingOptions
from mtrain.decode.shared_search import NO_LIMITS, PendingSearch, SearchLimits
from mtrain.decode.shortlist import Shortlist
from mtrain.decode.translator import EncodedSource, Translator
from mtrain.errors import ConfigError
from mtrain.exporters.exporter import (
    BATCH_SIZE,
    MASKED_BIAS,
    SOURCE_FILE,
    TARGET_FILE,
    Archive,
    ExportedHypothesis,
    Ids,
    Requirement,
    SentencePieceSides,
    ids_of_pieces,
    in_batches,
    longest,
    write_sentencepiece,
)
from mtrain.io.atomic import write_lines
from mtrain.model.transformer import Transformer, sinusoids
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

if TYPE_CHECKING:
    import ctranslate2

T = TypeVar("T")

PACKAGE, TITLE, TAG = "ctranslate2", "CTranslate2", "ctranslate2"
OTHER_PACKAGES: tuple[str, ...] = ()
REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "model.attention_window", None, "CTranslate2, whose encoder attends to the whole source"
    ),
)
QUANTIZATIONS: tuple[str, ...] = ("int8", "float16", "bfloat16")
ARCHIVE: Archive | None = None
USE = """\
In this folder:

```python
import ctranslate2
import sentencepiece

source = sentencepiece.SentencePieceProcessor(model_file="source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="target.spm")
translator = ctranslate2.Translator(".")

lines = [{line!r}]
results = translator.translate_batch(
    source.encode(lines, out_type=str),
    beam_size={beam},
    length_penalty={alpha:g},
    max_input_length=0,
    max_decoding_length={max_length},
)
print(target.decode([result.hypotheses[0] for result in results]))
```
"""
NOTES = """\
- `max_input_length=0` is needed: without it CTranslate2 silently cuts a source after 1,024
  tokens. The model's own limit is {num_positions:,} tokens, and a longer source is an error.
- An empty line gives an empty translation.
- CTranslate2 divides a score by length^alpha, mtrain by ((5 + length) / 6)^alpha, so that their
  beams rank a little differently. Only with `min_decoding_length=0` can the translation of a line
  that is not empty be empty, as in mtrain.
"""
MIN_POSITIONS = 4096
_BREAK = re.compile("[\t\r\n]")  # of a field or a row of `vmap.txt`
_POLL_S = 0.02  # between two checks whether a call was cancelled


def write(
    model: Transformer,
    tokenizer: Tokenizer,
    config: Config,
    directory: Path,
    quantization: str | None,
) -> None:
    """Write a model and its SentencePiece models into `directory`."""
    write_model(model, tokenizer, config, directory, quantization)
    write_sentencepiece(tokenizer, directory)


def write_model(
    model: Transformer,
    tokenizer: Tokenizer,
    config: Config,
    directory: Path,
    quantization: str | None,
) -> None:
    """Write a model without its SentencePiece models into `directory`."""
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
    _fill(spec, model, longest(config, MIN_POSITIONS), masked_ids=tgt.never_generated)
    unk, bos, eos = tgt.pieces_of([tgt.unk, tgt.bos, tgt.eos])
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = unk, bos, eos
    spec.config.decoder_start_token = bos
    spec.config.add_source_bos, spec.config.add_source_eos = False, True
    spec.config.layer_norm_epsilon = 1e-5
    spec.register_source_vocabulary(list(ids_of_pieces(tokenizer.src)))
    spec.register_target_vocabulary(list(ids_of_pieces(tgt)))
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(directory))


def write_shortlist(shortlist: Shortlist, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the likely targets of each source token as `vmap.txt`, for `use_vmap=True`.

    Pieces with a tab or a line break, which the format cannot hold, are left out.
    """
    pieces = list(ids_of_pieces(tokenizer.tgt))

    def row(source: str, targets: Iterable[int]) -> str:
        written = [pieces[token] for token in targets if not _BREAK.search(pieces[token])]
        return f"{source}\t{' '.join(written)}"

    lines = [row("", np.flatnonzero(shortlist.is_always_V))]
    for source, index in ids_of_pieces(tokenizer.src).items():
        if not _BREAK.search(source):
            likely = [token for token in shortlist.likely_SK[index].tolist() if token >= 0]
            copied = [index] if shortlist.is_shared else []
            lines.append(row(source, likely + copied))
    write_lines(directory / "vmap.txt", lines)


def _fill(spec: Any, model: Transformer, num_positions: int, masked_ids: list[int]) -> None:
    """Copy a model's weights into `spec`; a bias keeps `masked_ids` from being generated."""
    weights = {name: _as_array(weight) for name, weight in model.state_dict().items()}

    def fill_norm(norm: Any, name: str) -> None:
        norm.gamma, norm.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]

    spec.encoder.embeddings[0].weight = weights["src_embedding.weight"]
    spec.decoder.embeddings.weight = weights["tgt_embedding.weight"]
    spec.decoder.projection.weight = weights["output.weight"]
    spec.decoder.projection.bias = np.zeros(len(weights["output.weight"]), np.float32)
    spec.decoder.projection.bias[masked_ids] = MASKED_BIAS
    for stack, side, name in ((spec.encoder, "src", "encoder"), (spec.decoder, "tgt", "decoder")):
        stack.scale_embeddings = True
        encodings = weights.get(f"{side}_positions.table.weight")
        if encodings is None:
            encodings = _as_array(sinusoids(num_positions, model.config.d_model))
        elif len(encodings) < num_positions:  # the last learned one is repeated
            encodings = np.pad(encodings, ((0, num_positions - len(encodings)), (0, 0)), "edge")
        stack.position_encodings.encodings = encodings
        if model.config.norm == "pre":
            fill_norm(stack.layer_norm, f"{name}_norm")
        for index, layer in enumerate(stack.layer):
            linears = {
                "self_attention.queries_keys_values": layer.self_attention.linear[0],
                "self_attention.output": layer.self_attention.linear[1],
                "feed_forward.inner": layer.ffn.linear_0,
                "feed_forward.outer": layer.ffn.linear_1,
            }
            norms = [layer.self_attention.layer_norm, layer.ffn.layer_norm]
            if name == "decoder":
                linears["cross_attention.queries"] = layer.attention.linear[0]
                linears["cross_attention.source_keys_values"] = layer.attention.linear[1]
                linears["cross_attention.output"] = layer.attention.linear[2]
                norms.insert(1, layer.attention.layer_norm)
            for module, linear in linears.items():
                linear.weight = weights[f"{name}.{index}.{module}.weight"]
                linear.bias = weights[f"{name}.{index}.{module}.bias"]
            for number, norm in enumerate(norms, start=1):
                fill_norm(norm, f"{name}.{index}.residual_{number}.norm")


def _as_array(tensor: Tensor) -> npt.NDArray[np.float32]:
    # a copy, because quantization writes into it
    return np.array(tensor.numpy(force=True), np.float32)


def _wait(future: Future[T], limits: SearchLimits) -> T:
    """Return the result of a future; cancel it if it has not begun when `limits` are reached."""
    try:
        while not future.done():
            left_s = limits.seconds_left()
            futures.wait([future], None if limits == NO_LIMITS else min(left_s, _POLL_S))
        return future.result()
    finally:
        future.cancel()


class CTranslate2Model(SentencePieceSides):
    """An exported model, loaded by CTranslate2 on the CPU, with its SentencePiece models."""

    masks_special = True  # by the bias of the output projection

    def __init__(
        self, directory: Path, src_path: Path, tgt_path: Path, use_vmap: bool = False
    ) -> None:
        import ctranslate2

        super().__init__(src_path, tgt_path)
        self._use_vmap = use_vmap
        self._translator: ctranslate2.Translator = ctranslate2.Translator(
            str(directory), device="cpu", inter_threads=1, intra_threads=torch.get_num_threads()
        )
        # batches of concurrent calls run in turn; one that has not begun can be cancelled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ctranslate2")

    def search(self, sources: Ids, beam: int, max_lengths: list[int]) -> list[ExportedHypothesis]:
        """Return the target of the highest log-probability of each source."""
        return [best[0] for best in self.search_best(sources, beam, max_lengths, num_best=1)]

    def search_best(
        self,
        sources: Ids,
        beam: int,
        max_lengths: list[int],
        num_best: int,
        limits: SearchLimits = NO_LIMITS,
        no_repeat_ngram: int = 0,
    ) -> list[list[ExportedHypothesis]]:
        """Return the best targets of each source by log-probability, at most `num_best`.

        Raises:
            TimeoutError, CancelledError: if `limits` are reached; the current batch runs on.
        """

        def search_rows(rows: list[int]) -> list[list[ExportedHypothesis]]:
            translate = partial(
                self._translator.translate_batch,
                self._tokens([sources[row] for row in rows]),
                beam_size=beam,
                num_hypotheses=num_best,
                length_penalty=0,
                no_repeat_ngram_size=no_repeat_ngram,
                return_scores=True,
                return_end_token=True,
                max_input_length=0,
                max_decoding_length=max(max_lengths[row] for row in rows) + 1,
                min_decoding_length=0,  # by default eos cannot come first
                use_vmap=self._use_vmap,
            )
            results = _wait(self._thread.submit(translate), limits)
            return [
                list(map(self._hypothesis, result.hypotheses, result.scores)) for result in results
            ]

        return in_batches([len(ids) for ids in sources], search_rows)

    def _hypothesis(self, tokens: list[str], log_prob: float) -> ExportedHypothesis:
        ids = [self.id_of[token] for token in tokens]
        has_ended = ids[-1:] == [self.tgt.eos]
        return ExportedHypothesis(ids[:-1] if has_ended else ids, log_prob, has_ended)

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each token of a given target, and of its eos."""
        tgt_tokens = [self.tgt.pieces_of(ids) for ids in targets]
        results = self._translator.score_batch(
            self._tokens(sources), tgt_tokens, max_batch_size=BATCH_SIZE, max_input_length=0
        )
        return [list(result.log_probs) for result in results]

    def _tokens(self, sources: Ids) -> list[list[str]]:
        return [self.src.pieces_of(ids[:-1]) for ids in sources]  # CTranslate2 adds eos


def load(directory: Path, use_vmap: bool = False) -> CTranslate2Model:
    """Load an exported folder; with `use_vmap` it ranks only the tokens of `vmap.txt`."""
    return CTranslate2Model(directory, directory / SOURCE_FILE, directory / TARGET_FILE, use_vmap)


def check_options(config: Config, options: DecodingOptions) -> None:
    """Raise ConfigError if CTranslate2 does not support an option."""
    of_config = ("decoding.early_stop", "decoding.mbr")
    for key in (*of_config, "sampling", "with_alignment", "rerank_weight", "shortlist"):
        if value := getattr(options, key.removeprefix("decoding.")):
            raise ConfigError(
                f"`{key}` must be off for `--engine ctranslate2`, but is {value!r} instead."
            )
    if options.num_best > 1:
        raise ConfigError(
            f"`num_best` must be 1 for `--engine ctranslate2`, but is {options.num_best} instead."
        )
    limit = longest(config, MIN_POSITIONS) - options.max_extra_tokens - 1
    if options.max_input_tokens is None or options.max_input_tokens > limit:
        raise ConfigError(
            f"`--max-input-tokens` must be at most {limit} for `--engine ctranslate2`, but is "
            f"{options.max_input_tokens} instead."
        )


class CTranslate2Translator:
    """Translates with the CTranslate2 export of a run; gives no log-probabilities of tokens."""

    process_group = SINGLE
    reverse: Translator | None = None

    def __init__(self, run: RunDir, options: DecodingOptions, directory: Path) -> None:
        self.options, self.tokenizer = options, sentencepiece.load(run.tokenizer_dir)
        self.max_positions, self.limits = run.config.model.max_positions, NO_LIMITS
        self._config, self._exported = run.config, load(directory)

    def with_options(
        self, options: DecodingOptions, limits: SearchLimits = NO_LIMITS
    ) -> CTranslate2Translator:
        """Return a translator with other options, which shares this one's model.

        Raises:
            ConfigError: if CTranslate2 does not support an option.
        """
        check_options(self._config, options)
        other = copy.copy(self)
        other.options, other.limits = options, limits
        return other

    def search(self, sources: Sequence[EncodedSource]) -> list[list[Hypothesis]]:
        """Return the best target of each source, by mtrain's length penalty.

        Raises:
            ConfigError: if a target must begin with a prefix.
            TimeoutError, CancelledError: if `limits` are reached.
        """
        if not sources:
            return []
        if any(source.prefix for source in sources):
            raise ConfigError("`prefixes` has no effect with `--engine ctranslate2`; leave it out.")
        beam, max_extra_tokens = self.options.beam, self.options.max_extra_tokens
        limits = [source.max_length(max_extra_tokens) for source in sources]
        src_ids = [source.ids for source in sources]
        outputs_by_source = self._exported.search_best(
            src_ids, beam, limits, beam, self.limits, self.options.no_repeat_ngram
        )
        best = []
        for outputs, limit in zip(outputs_by_source, limits, strict=True):
            hypotheses = []
            for output in outputs:
                ids, log_prob = output.ids[:limit], output.log_prob
                penalty = length_penalty(float(len(ids) + 1), self.options.length_alpha)
                hypotheses.append(Hypothesis(ids, [], log_prob, log_prob / penalty))
            best.append([max(hypotheses, key=lambda hypothesis: hypothesis.score)])
        return best

    def start_search(self, sources: Sequence[EncodedSource]) -> PendingSearch:
        """Return a search that runs when its result is requested."""
        return PendingSearch(lambda: self.search(sources), lambda: None)

    def attend(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[Tensor]:
        """Raise ConfigError: CTranslate2 returns no attention weights of given targets."""
        raise ConfigError("`--alignments` has no effect with `--engine ctranslate2`; leave it out.")
