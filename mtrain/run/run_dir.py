"""The run folder: its paths and locks. Opens no weights and no corpora."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mtrain.config import config_file
from mtrain.config.sections import Config
from mtrain.errors import ConfigError, DataError, RunError, UserError
from mtrain.io.atomic import only_process, sweep, writable_dir

LOCK_FILE = ".lock"

_WAIT_S = 0.2  # `is_locked` of another process holds the lock for an instant


@dataclass(frozen=True)
class RunDir:
    """The paths of a run folder."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The config that the run was made with, every key spelled out."""
        return self.path / "config.yaml"

    @property
    def tokenizer_dir(self) -> Path:
        """The SentencePiece models."""
        return self.path / "tokenizer"

    @property
    def data_dir(self) -> Path:
        """The encoded training pairs, the list of dropped ones, validation and test text."""
        return self.path / "data"

    @property
    def check_dir(self) -> Path:
        """The lists of the last `mtrain check`."""
        return self.path / "check"

    @property
    def checkpoints_dir(self) -> Path:
        """One folder for each checkpoint that is kept."""
        return self.path / "checkpoints"

    @property
    def model_path(self) -> Path:
        """The weights that translate: the result of the training."""
        return self.path / "model.safetensors"

    @property
    def metrics_path(self) -> Path:
        """One JSON object for each logged step."""
        return self.path / "metrics.jsonl"

    @property
    def board_dir(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tensorboard"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder; the lock of a dead process does not count.

        Raises:
            RunError: if another process holds it.
            WriteError: if nothing can be written in it.
        """
        with self._alone(self._lock_path, "training"):
            yield

    @contextmanager
    def tokenizing(self) -> Iterator[Path]:
        """Yield the working folder of tokenizing, from which an interrupted process resumes.

        It is deleted on success, on errors in config or corpora, and on other errors before the
        first part is finished.

        Raises:
            RunError: if another process holds it.
        """
        path = self._work_dir
        with writable_dir(path), self._alone(path / LOCK_FILE, "tokenizing"):
            sweep(self.data_dir)
            sweep(self.tokenizer_dir)
            try:
                yield path
            except (UserError, OSError) as error:
                has_parts = any(path.glob("part-*.json"))
                if isinstance(error, ConfigError | DataError) or not has_parts:
                    shutil.rmtree(path)
                    with suppress(OSError):  # it is not empty
                        self.path.rmdir()
                raise
            shutil.rmtree(path)

    @property
    def _work_dir(self) -> Path:
        return self.path / ".tokenizing"

    def remove_unfinished(self) -> None:
        """Remove the working folder of a process that was killed after it finished tokenizing."""
        if self._work_dir.is_dir():
            with suppress(RunError), self.tokenizing():  # another process may still be tokenizing
                pass

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Hold the lock of the export in the folder; wait for a process that holds it.

        Raises:
            WriteError: if the lock cannot be written.
        """
        with self._alone(self.path / ".exporting.lock", "exporting", wait_s=-1):
            yield

    def _alone(
        self, lock_path: Path, doing: str, wait_s: float = _WAIT_S
    ) -> AbstractContextManager[None]:
        return only_process(
            lock_path,
            f"{self.path}: another process is {doing} in it; wait until it ends, or take another "
            "--run.",
            wait_s,
        )

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Hold the lock of the folder if it has one, and write nothing into it.

        Without a lock file, or without the right to write it, there is no lock to hold.

        Raises:
            RunError: if another process holds it.
        """
        if self._lock_path.exists() and os.access(self._lock_path, os.W_OK):
            with self.locked():
                yield
        else:
            yield

    @property
    def _lock_path(self) -> Path:
        return self.path / LOCK_FILE

    def is_locked(self) -> bool:
        """Tell whether a process is training in the folder; False if the lock cannot be written."""
        try:
            with self.left_alone():
                return False
        except RunError:
            return True

    def save_config(self, config: Config) -> None:
        """Write the config of the run.

        Raises:
            WriteError: if it cannot be written.
        """
        config_file.save(config, self.config_path)
        self.__dict__["config"] = config  # the cached value of `config`

    @cached_property
    def config(self) -> Config:
        """The config of an existing run, read once by each `RunDir`.

        Raises:
            RunError: if this is not a run folder, or its config cannot be used.
        """
        self.check_exists()
        try:
            return config_file.load(self.config_path)
        except config_file.NewerVersionError as error:
            raise RunError(str(error)) from None
        except ConfigError as error:
            raise RunError(f"{error} Restore the file from the run's own copy.") from None

    def check_direction(self, allowed: Sequence[tuple[str, str]], option: str) -> tuple[str, str]:
        """Return the languages of source and target; check that this is a trained run.

        Args:
            allowed: languages that the run may translate between.
            option: that names the run, for messages.

        Raises:
            RunError: if it translates between others, or is not trained.
        """
        direction = self.config.data.src_lang, self.config.data.tgt_lang
        if direction not in allowed:
            expected = " or ".join(f"{src} to {tgt}" for src, tgt in dict.fromkeys(allowed))
            raise RunError(
                f"{self.path}: must translate {expected} for `{option}`, but translates "
                f"{direction[0]} to {direction[1]} instead."
            )
        if not self.model_path.is_file():
            raise RunError(
                f"{self.path}: must be a trained run, but has no {self.model_path.name}."
            )
        return direction

    def check_exists(self) -> None:
        """Check that the folder has a config.

        Raises:
            RunError: if not.
        """
        if self.path.is_file():
            raise RunError(f"{self.path}: must be a run folder, but is a file instead.")
        if not self.path.is_dir():
            raise RunError(f"{self.path}: must be a run folder, but does not exist.")
        if not self.config_path.is_file():
            raise RunError(
                f"{self.path}: must be a run folder, but has no {self.config_path.name}; "
                "`mtrain train CONFIG` makes one."
            )
