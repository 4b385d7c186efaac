"""COMET, a neural metric, with the intervals and paired tests that sacreBLEU has for its metrics.

The user installs unbabel-comet and downloads the model; nothing is downloaded here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrain.errors import ConfigError, require_package
from mtrain.io.atomic import sha256

NUM_TRIALS = 10_000  # of approximate randomisation, sacreBLEU's default
_CHECKPOINT = Path("checkpoints") / "model.ckpt"  # within the folder that comet downloads
_BATCH_LINES = 16
_SHOWN_DIGITS = 12  # of the checksum, in a signature

Floats = npt.NDArray[np.float64]


class CometModel:
    """A COMET model on disk, and a cache of the lines that it has scored.

    Args:
        path: the checkpoint, or the folder that holds `checkpoints/model.ckpt`. A checkpoint is a
            pickle: loading it runs code of its author.
        num_gpus: how many are used.

    Raises:
        ConfigError: if the package or the file is missing.
    """

    def __init__(self, path: Path, num_gpus: int = 0) -> None:
        self._path = path / _CHECKPOINT if path.is_dir() else path
        require_package("comet", "--comet", "unbabel-comet")
        if not self._path.is_file():
            raise ConfigError(
                f"`--comet` must be a model of COMET, but {self._path} is no file; "
                "comet.download_model fetches one."
            )
        self._num_gpus = num_gpus
        self._model: Any = None
        self._cache: dict[tuple[str, str, str], float] = {}
        self._version = ""

    def load(self) -> None:
        """Load the model.

        Raises:
            ConfigError: if comet cannot load it.
        """
        with _quiet_logging():
            import comet

            try:
                self._model = comet.load_from_checkpoint(str(self._path))
            except Exception as error:  # comet passes on any exception of its dependencies
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ConfigError(
                    f"`--comet` must be a model of COMET, but {self._path} cannot be loaded: "
                    f"{reason.removesuffix('.')}."
                ) from None
        name = f"{self._path.parent.parent.name}@{sha256(self._path)[:_SHOWN_DIGITS]}"
        self._version = f"model:{name}|version:{comet.__version__}"

    def score(
        self, sources: Sequence[str], references: Sequence[str], hypotheses: Sequence[str]
    ) -> Floats:
        """Return the score of each line; scores are cached by (source, hypothesis, reference)."""
        segments = list(zip(sources, hypotheses, references, strict=True))
        unseen = [segment for segment in dict.fromkeys(segments) if segment not in self._cache]
        if unseen:
            data = [{"src": src, "mt": hypothesis, "ref": ref} for src, hypothesis, ref in unseen]
            with _quiet_logging():
                prediction = self._model.predict(
                    data, batch_size=_BATCH_LINES, gpus=self._num_gpus, progress_bar=False
                )
            self._cache.update(zip(unseen, map(float, prediction.scores), strict=True))
        return np.array([self._cache[segment] for segment in segments])

    def signature(self, test: str = "", num_samples: int = 0) -> str:
        """Return sacreBLEU's kind of signature; `test` is empty, or bs or ar with `num_samples`."""
        drawn = f"{test}:{num_samples}|seed:{_seed().lower()}|" if test else ""
        return f"nrefs:1|{drawn}{self._version}"


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """Restore the level and handlers of the root logger, which importing comet changes."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def resampled_means(values: Floats, num_samples: int) -> Floats:
    """Return the mean of each bootstrap resample; the lines drawn are the same as sacreBLEU's."""
    rows = _random().choice(len(values), size=(num_samples, len(values)), replace=True)
    means: Floats = values[rows].mean(1)
    return means


def paired_p_values(baseline: Floats, system: Floats, num_resamples: int) -> tuple[float, float]:
    """Return the p-values of the paired bootstrap and of approximate randomisation.

    The statistics are those of `sacrebleu.significance`; a system's score is the mean of its lines.
    """
    gain = abs(system.mean() - baseline.mean())
    drawn = np.abs(resampled_means(system - baseline, num_resamples))
    is_kept = _random().integers(2, size=(NUM_TRIALS, len(system)), dtype=bool)
    first = is_kept @ baseline + ~is_kept @ system
    second = ~is_kept @ baseline + is_kept @ system
    swapped = np.abs(first - second) / len(system)
    bootstrap, randomization = (drawn - drawn.mean() > gain).sum(), (swapped > gain).sum()
    return (int(bootstrap) + 1) / (num_resamples + 1), (int(randomization) + 1) / (NUM_TRIALS + 1)


def _seed() -> str:
    return os.environ.get("SACREBLEU_SEED", "12345")


def _random() -> np.random.Generator:
    seed = _seed()
    return np.random.default_rng(None if seed.lower() == "none" else int(seed))
