"""The checkpoints of a training: which are kept, what its model is made of, whether it may go on.

How one lies on disk is the business of `checkpoint`; this room knows no model and no optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mtrain.config.sections import Config, TrainingConfig
from mtrain.errors import RunError
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Checkpoint, Environment, Progress
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import ProcessGroup


class FinalCandidates(NamedTuple):
    """Of what the final weights may be made: the best checkpoint, or the mean of several."""

    best: int  # a step
    averaged: list[int]  # steps
    paths: dict[int, Path]  # of all that are whole


class CheckpointManager:
    """The checkpoints of one run. Of several ranks, the first reads, writes and deletes them."""

    def __init__(
        self, run: RunDir, settings: TrainingConfig, log: RunLog, process_group: ProcessGroup
    ) -> None:
        self.run, self.directory, self.settings = run, run.checkpoints_dir, settings
        self.log, self.process_group = log, process_group
        self.is_current = False  # the newest holds the training as it stands

    def newest(self) -> Path | None:
        """Return the newest checkpoint that is whole, as the first rank finds it.

        Raises:
            RunError: if there are checkpoints, but none is whole.
        """
        step = -1
        if self.process_group.is_first:
            checkpoint.delete_unfinished(self.directory)
            path = checkpoint.newest_whole(self.directory, self.log.say)
            step = -1 if path is None else checkpoint.load_progress(path).step
        step = int(self.process_group.broadcast_float(step))
        return None if step < 0 else checkpoint.path_of(self.directory, step)

    def add(self, snapshot: Checkpoint, tokenizer: str, made_with: Environment) -> None:
        """Write a checkpoint, and delete those that are not to be kept beside it.

        Raises:
            WriteError: if the disk does not take it; the checkpoints before it are as they were.
        """
        is_saved = False
        try:
            if self.process_group.is_first:
                checkpoint.save(self.directory, *snapshot, tokenizer, made_with)
                is_saved = True
                self.prune(snapshot.progress)
        finally:
            self.is_current = bool(self.process_group.broadcast_float(is_saved))

    def prune(self, progress: Progress) -> None:
        """Delete the checkpoints that are neither of the last nor of the best."""
        last = [step for step in checkpoint.steps(self.directory) if self.is_due(step, progress)]
        best = progress.best_steps()[: self.settings.keep_best]
        kept = [*last[-self.settings.keep_last :], *best, progress.step]
        checkpoint.delete_all_but(self.directory, kept)

    def is_due(self, step: int, progress: Progress) -> bool:
        """Tell whether a checkpoint is due at `step`; a signal saves others besides."""
        every = self.settings.save_every
        is_regular = every is not None and step % every == 0
        return is_regular or str(step) in progress.bleu_of_step

    def candidates(self, progress: Progress) -> FinalCandidates:
        """Return what the final weights may be made of, and warn of what is damaged."""
        if self.process_group.is_first:
            self.prune(progress)  # whoever was killed while saving had no time to
        self.process_group.barrier()
        found = self._whole()
        best_steps = [step for step in progress.best_steps() if step in found]
        last_steps = [step for step in reversed(found) if self.is_due(step, progress)]
        averaged = last_steps if self.settings.average_of == "last" else best_steps
        return FinalCandidates(best_steps[0], averaged[: self.settings.average], found)

    def _whole(self) -> dict[int, Path]:
        """Return the checkpoints that are as they were saved, by step, and warn of the others."""
        whole = {}
        for step, path in checkpoint.steps(self.directory).items():
            try:
                checkpoint.check(path)
                whole[step] = path
            except RunError as error:
                self.log.say(f"{error} It is left out.")
        return whole

    def has_final_weights(self, step: int) -> bool:
        """Tell whether the final weights are there, and not those of an earlier target."""
        origin = checkpoint.load_final_weights_info(self.run.model_path)
        reached = None if origin is None else origin.reached
        return self.run.model_path.exists() and reached in (None, step)

    def next_start(self) -> str | None:
        """Name the checkpoint that the same command would go on from; None if there is none."""
        saved = checkpoint.steps(self.directory)
        return f"the checkpoint of step {max(saved):,}" if saved else None


def check_unfinished(run: RunDir) -> None:
    """Refuse to replace a finished model from which no checkpoint goes on: a copy, most likely."""
    if run.model_path.exists() and not checkpoint.steps(run.checkpoints_dir):
        raise RunError(
            f"{run.path}: holds a finished model, but no checkpoint to go on from; take another "
            f"--run, or delete {run.model_path} to train from the beginning."
        )


def check_model(config: Config, run: RunDir) -> None:
    """Refuse to go on from the checkpoints of another model."""
    old = run.load_config()
    if checkpoint.steps(run.checkpoints_dir) and config.model != old.model:
        changed = [key for key, value in config.model if value != getattr(old.model, key)]
        raise RunError(
            f"{run.path}: its checkpoints have another `model.{changed[0]}` "
            f"({getattr(old.model, changed[0])!r}); take another --run, or delete this run folder."
        )
