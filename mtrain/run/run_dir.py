"""The run folder: its paths and locks. Opens no weights and no corpora."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from mtrain.config import config_file
from mtrain.config.corpora import has_both_directions
from mtrain.config.sections import Config
from mtrain.errors import ConfigError, RunError, UserError
from mtrain.io.atomic import only_process, sweep, writable_dir

LOCK_FILE = ".lock"

_WAIT_S = 0.2  # `is_locked` of another process holds the lock for an instant


@dataclass(unsafe_hash=True)
class RunDir:
    """The paths of a run folder."""

    path: Path

    def __post_init__(self) -> None:
        path = self.path
        self.config_path = path / "config.yaml"  # of the run, every key spelled out
        self.tokenizer_dir = path / "tokenizer"  # the SentencePiece models
        self.data_dir = path / "data"  # encoded pairs, the dropped ones, validation and test text
        self.check_dir = path / "check"  # the lists of the last `mtrain check`
        self.checkpoints_dir = path / "checkpoints"  # a folder for each one that is kept
        self.model_path = path / "model.safetensors"  # the weights that translate
        self.ctranslate2_dir = path / "ctranslate2"  # the export that its engine translates with
        self.shortlist_path = path / "shortlist.safetensors"  # likely target tokens
        self.metrics_path = path / "metrics.jsonl"  # a JSON object for each logged step
        self.board_dir = path / "tensorboard"  # event files
        self._work_dir = path / ".tokenizing"
        self._lock_path = path / LOCK_FILE

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock of the folder; the lock of a dead process does not count.

        Raises:
            RunError: if another process holds it.
            WriteError: if nothing can be written in it.
        """
        return self._alone(self._lock_path, "training")

    @contextmanager
    def tokenizing(self) -> Iterator[Path]:
        """Yield the working folder of tokenizing, from which an interrupted process resumes.

        It is deleted on success, and on errors before the first part is finished. A process that
        finds another text or other settings empties it.

        Raises:
            RunError: if another process holds it, it is a link, or the path is that of a file.
        """
        self.check_files()
        path = self._work_dir
        if path.is_symlink():  # it is emptied
            raise RunError(f"{path}: must be a folder, but is a link instead; delete it.")
        with writable_dir(path), self._alone(path / LOCK_FILE, "tokenizing"):
            sweep(self.data_dir)
            sweep(self.tokenizer_dir)
            try:
                yield path
            except (UserError, OSError):
                if not any(path.glob("part-*.json")):
                    shutil.rmtree(path)
                    with suppress(OSError):  # it is not empty
                        self.path.rmdir()
                raise
            shutil.rmtree(path)

    def remove_unfinished(self) -> None:
        """Remove the working folder of a process that was killed after it finished tokenizing."""
        if self._work_dir.is_dir():
            with suppress(RunError), self.tokenizing():  # another process may still be tokenizing
                pass

    def exporting(self) -> AbstractContextManager[None]:
        """Hold the lock of the export in the folder; wait for a process that holds it.

        Raises:
            WriteError: if the lock cannot be written.
        """
        return self._alone(self.path / ".exporting.lock", "exporting", wait_s=-1)

    def _alone(
        self, lock_path: Path, doing: str, wait_s: float = _WAIT_S
    ) -> AbstractContextManager[None]:
        return only_process(
            lock_path,
            f"{self.path}: another process is {doing} in it; wait until it ends, or choose "
            "another run folder.",
            wait_s,
        )

    def locked_if_possible(self) -> AbstractContextManager[None]:
        """Hold the lock of the folder if it has one, and write nothing into it.

        Without a lock file, or without the right to write it, there is no lock to hold.

        Raises:
            RunError: if another process holds it.
        """
        has_lock = self._lock_path.exists() and os.access(self._lock_path, os.W_OK)
        return self.locked() if has_lock else nullcontext()

    def is_locked(self) -> bool:
        """Tell whether a process is training in the folder; False if the lock cannot be written."""
        try:
            with self.locked_if_possible():
                return False
        except RunError:
            return True

    def save_config(self, config: Config) -> None:
        """Write the config of the run.

        Raises:
            WriteError: if it cannot be written.
        """
        config_file.save(config, self.config_path)
        self.config = config  # the cached value

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
            raise RunError(f"{error} Restore the file from a copy of the run.") from None

    @property
    def directions(self) -> list[tuple[str, str]]:
        """The directions (source, target) of the run; two if it is trained in both."""
        data = self.config.data
        direction = (data.src_lang, data.tgt_lang)
        return [direction, direction[::-1]] if has_both_directions(data.train) else [direction]

    def check_direction(self, allowed: Sequence[tuple[str, str]], why: str) -> tuple[str, str]:
        """Return a direction of this run that is in `allowed`.

        Raises:
            RunError: if none is; `why`, such as "for `--back`", is part of the message.
        """
        direction = next((pair for pair in self.directions if pair in allowed), None)
        if direction is None:
            expected = " or ".join(f"{src} to {tgt}" for src, tgt in dict.fromkeys(allowed))
            raise RunError(
                f"{self.path}: must translate {expected} {why}, but translates "
                f"{' to '.join(self.directions[0])} instead."
            )
        return direction

    def check_trained(self) -> None:
        """Check that the folder has final weights.

        Raises:
            RunError: if not.
        """
        if not self.model_path.is_file():
            raise RunError(
                f"{self.path}: must be a trained run, but has no {self.model_path.name}."
            )

    def check_exists(self) -> None:
        """Check that the folder has a config.

        Raises:
            RunError: if not.
        """
        self.check_files()
        if not self.path.is_dir():
            raise RunError(f"{self.path}: must be a run folder, but does not exist.")
        if not self.config_path.is_file():
            is_run = self.tokenizer_dir.is_dir() or self.model_path.is_file()
            advice = (
                "restore it from a copy of the run" if is_run else "`mtrain train CONFIG` makes one"
            )
            raise RunError(
                f"{self.path}: must be a run folder, but has no {self.config_path.name}; {advice}."
            )

    def check_files(self) -> None:
        """Raise RunError if the path is that of a file, or a file of the run is a pipe or a device.

        A read of those may never end.
        """
        if self.path.is_file():
            raise RunError(f"{self.path}: must be a run folder, but is a file instead.")
        parts = (self.tokenizer_dir, self.data_dir, self.checkpoints_dir, self.ctranslate2_dir)
        for path in chain(self.path.glob("*"), *(part.rglob("*") for part in parts)):
            if path.is_fifo() or path.is_char_device():
                raise RunError(f"{path}: must be a file, but is a pipe or a device instead.")
