"""COMET, a metric that is a neural network, in the form of sacreBLEU's metrics.

So that its intervals and tests are made by the code that makes those of BLEU. The package
unbabel-comet and the model's file are the user's; nothing is fetched here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from sacrebleu.metrics.base import Metric, Score, Signature

from mtrain.errors import ConfigError
from mtrain.io.atomic import sha256

_CHECKPOINT = Path("checkpoints") / "model.ckpt"  # within the folder that comet downloads
_BATCH_LINES = 16
_SHOWN_DIGITS = 12  # of the checksum, in a signature


class Segment(NamedTuple):
    """What COMET reads of a line."""

    source: str
    reference: str
    translation: str


class CometModel:
    """A COMET model on disk, and the lines that it has scored already.

    Args:
        path: the checkpoint, or the folder that holds `checkpoints/model.ckpt`. A checkpoint is a
            pickle: loading one runs what its author wrote.
        num_gpus: how many are used.

    Raises:
        ConfigError: if the package or the file is missing.
    """

    def __init__(self, path: Path, num_gpus: int = 0) -> None:
        self._path = path / _CHECKPOINT if path.is_dir() else path
        if find_spec("comet") is None:
            raise ConfigError("`--comet` must have COMET: pip install unbabel-comet adds it.")
        if not self._path.is_file():
            raise ConfigError(
                f"`--comet` must be a model of COMET, but {self._path} is no file; "
                "comet.download_model fetches one."
            )
        self._num_gpus = num_gpus
        self._model: Any = None
        self._known: dict[Segment, float] = {}
        self.name = self.version = ""

    def load(self) -> None:
        """Load the model, which takes its time.

        Raises:
            ConfigError: if comet cannot.
        """
        with _quiet_logging():
            import comet

            try:
                self._model = comet.load_from_checkpoint(str(self._path))
            except Exception as error:  # comet raises whatever its parts raise
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ConfigError(
                    f"`--comet` must be a model of COMET, but {self._path} cannot be loaded: "
                    f"{reason.removesuffix('.')}."
                ) from None
        self.version = str(comet.__version__)
        self.name = f"{self._path.parent.parent.name}@{sha256(self._path)[:_SHOWN_DIGITS]}"

    def score(self, segments: Sequence[Segment]) -> list[float]:
        """Return the score of each line; one that was seen before is not computed again."""
        new = list(dict.fromkeys(one for one in segments if one not in self._known))
        if new:
            data = [{"src": one.source, "mt": one.translation, "ref": one.reference} for one in new]
            with _quiet_logging():
                found = self._model.predict(
                    data, batch_size=_BATCH_LINES, gpus=self._num_gpus, progress_bar=False
                )
            self._known.update(zip(new, map(float, found.scores), strict=True))
        return [self._known[one] for one in segments]


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """Undo what comet does to the logging of the whole process when it is imported."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


class _CometSignature(Signature):  # type: ignore[misc, unused-ignore]
    """Says which model scored, and the version of unbabel-comet."""

    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__(args | {"num_refs": 1})
        self.info["model"] = args["model"].name
        self.info["version"] = args["model"].version


class Comet(Metric):  # type: ignore[misc, unused-ignore]
    """The mean of the scores that a COMET model gives to lines."""

    _SIGNATURE_TYPE = _CometSignature

    def __init__(
        self, model: CometModel, sources: Sequence[str], references: Sequence[str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self._ref_cache = self._cache_references([list(sources), list(references)])

    def _extract_corpus_statistics(self, hypotheses: Sequence[str], references: Any) -> Any:
        cached = zip(hypotheses, self._ref_cache or [], strict=True)
        self.model.score([Segment(**info, translation=text) for text, info in cached])
        return super()._extract_corpus_statistics(hypotheses, references)

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, str]:
        source, reference = refs
        return {"source": source, "reference": reference}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, str]) -> Any:
        return [*self.model.score([Segment(**ref_kwargs, translation=hypothesis)]), 1.0]

    def _compute_score_from_stats(self, stats: Any) -> Score:
        total, count = stats
        return Score("COMET", float(total) / float(count))

    def _aggregate_and_compute(self, stats: Any) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])
