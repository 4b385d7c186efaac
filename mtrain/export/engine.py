"""Translate with CTranslate2 what mtrain has encoded: the same lines, another search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from mtrain.decode.beam import Hypothesis, length_penalty
from mtrain.decode.options import DecodingOptions
from mtrain.decode.translator import EncodedSource
from mtrain.errors import ConfigError
from mtrain.export.ctranslate2 import CTranslate2Model, num_positions
from mtrain.export.export import Say, ensure
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE
from mtrain.tokenizer import sentencepiece


class CTranslate2Translator:
    """Searches with CTranslate2; it gives no log-probabilities of tokens.

    Args:
        run: the run folder, for its tokenizer.
        options: of the search.
        directory: the export of the run.
    """

    process_group = SINGLE

    def __init__(self, run: RunDir, options: DecodingOptions, directory: Path) -> None:
        self.options, self.tokenizer = options, sentencepiece.load(run.tokenizer_dir)
        self.max_positions = run.config.model.max_positions
        self._exported = CTranslate2Model(directory)

    def max_length(self, source: EncodedSource) -> int:
        """Return the most tokens that the target of a source may have, without eos."""
        return source.max_target_length(self.options.max_extra_tokens)

    def search(self, sources: Sequence[EncodedSource]) -> list[list[Hypothesis]]:
        """Return the best target of each source, by mtrain's length penalty."""
        if not sources:
            return []
        beam, limits = self.options.beam, [self.max_length(source) for source in sources]
        outputs_of = self._exported.search_best(
            [source.ids for source in sources], beam, limits, beam
        )
        best = []
        for outputs, limit in zip(outputs_of, limits, strict=True):
            hypotheses = [self._hypothesis(out.ids[:limit], out.log_prob) for out in outputs]
            best.append([max(hypotheses, key=lambda hypothesis: hypothesis.score)])
        return best

    def _hypothesis(self, ids: list[int], log_prob: float) -> Hypothesis:
        penalty = length_penalty(float(len(ids) + 1), self.options.length_alpha)
        return Hypothesis(ids, [], log_prob, log_prob / penalty)

    def attend(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[Tensor]:
        """Refuse: CTranslate2 gives no attention of given targets."""
        raise ConfigError("`--alignments` must not stand beside `--engine ctranslate2`, but does.")


def load_ctranslate2(run: RunDir, options: DecodingOptions, say: Say) -> CTranslate2Translator:
    """Load a run for CTranslate2; its folder there is written first, if need be.

    Args:
        run: the run folder.
        options: of the search.
        say: is told of an export.

    Raises:
        ConfigError: if the options ask for what this engine does not do.
        RunError: as `export` does.
    """
    for key in ("no_repeat_ngram", "early_stop"):
        if value := getattr(options, key):
            raise ConfigError(
                f"`decoding.{key}` must be off for `--engine ctranslate2`, but is {value!r} "
                "instead."
            )
    limit = num_positions(run.config) - options.max_extra_tokens - 1
    if options.max_input_tokens is not None and options.max_input_tokens > limit:
        raise ConfigError(
            f"`--max-input-tokens` must be at most {limit} for `--engine ctranslate2`, but is "
            f"{options.max_input_tokens} instead."
        )
    return CTranslate2Translator(run, options, ensure(run, say))
