"""Translate with CTranslate2 what mtrain has read: the same lines, another search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtrain.config.sections import DecodingConfig
from mtrain.decode.beam import Hypothesis, length_penalty
from mtrain.decode.translator import EncodedSource, Translator, load
from mtrain.errors import ConfigError
from mtrain.export.ctranslate2 import CTranslate2Model, num_positions
from mtrain.export.export import Say, ensure
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir


class CTranslate2Translator(Translator):
    """A translator whose searches are CTranslate2's; it gives no log-probabilities of pieces."""

    def __init__(self, translator: Translator, directory: Path) -> None:
        models, device = translator.ensemble.models, translator.device
        super().__init__(models, translator.tokenizer, translator.decoding, device)
        self._exported = CTranslate2Model(directory)

    def search(
        self, sources: Sequence[EncodedSource], with_scores: bool = True
    ) -> list[list[Hypothesis]]:
        """Return the best target of each source, by mtrain's length penalty."""
        if not sources:
            return []
        beam, limits = self.decoding.beam, [self.max_length(source) for source in sources]
        found = self._exported.search_best([source.ids for source in sources], beam, limits, beam)
        return [
            [
                max(
                    (self._hypothesis(one.ids[:limit], one.log_prob) for one in best),
                    key=lambda hypothesis: hypothesis.score,
                )
            ]
            for best, limit in zip(found, limits, strict=True)
        ]

    def _hypothesis(self, ids: list[int], log_prob: float) -> Hypothesis:
        penalty = length_penalty(float(len(ids) + 1), self.decoding.length_alpha)
        return Hypothesis(ids, [], log_prob, log_prob / penalty)


def load_ctranslate2(
    run: RunDir, decoding: DecodingConfig, max_tokens: int, say: Say
) -> Translator:
    """Load a run for CTranslate2; its folder there is written first, if need be.

    Args:
        run: the run folder.
        decoding: how to search.
        max_tokens: of a source.
        say: is told of an export.

    Raises:
        ConfigError: if the config asks for what CTranslate2 is not asked for here.
        RunError: as `export` does.
    """
    for key in ("no_repeat_ngram", "early_stop"):
        if value := getattr(decoding, key):
            raise ConfigError(
                f"`decoding.{key}` must be off for `--engine ctranslate2`, but is {value!r} "
                "instead."
            )
    limit = num_positions(run.load_config()) - decoding.max_extra_tokens - 1
    if max_tokens > limit:
        raise ConfigError(
            f"`--max-input-tokens` must be at most {limit} for `--engine ctranslate2`, but is "
            f"{max_tokens} instead."
        )
    directory = ensure(run, say)
    return CTranslate2Translator(load(run, decoding, LoadOptions("cpu")), directory)
