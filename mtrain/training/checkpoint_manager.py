"""Choose which checkpoints to keep, and which to average into the final weights.

Only this module deletes checkpoints; `run.checkpoint` defines their files.
"""

from __future__ import annotations

import json
from pathlib import Path

from mtrain.config.sections import TrainingConfig
from mtrain.errors import RunError, WriteError
from mtrain.io.atomic import sweep
from mtrain.io.text_width import count
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Checkpoint, Environment, Progress
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import ProcessGroup


class CheckpointManager:
    """The checkpoints of one run; only rank 0 writes and deletes them."""

    def __init__(
        self, run: RunDir, config: TrainingConfig, log: RunLog, process_group: ProcessGroup
    ) -> None:
        self.run, self.directory, self.config = run, run.checkpoints_dir, config
        self.log, self.process_group = log, process_group
        self.is_current = False  # whether the newest checkpoint holds the current training state
        self.has_warned = False

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint on rank 0's disk; None if there are none.

        Raises:
            RunError: if there are checkpoints, but none to resume from.
        """
        step = -1
        if self.process_group.is_first:
            sweep(self.directory / "step-", is_prefix=True)  # temporary files of killed saves
            sweep(self.run.model_path)
            if path := checkpoint.newest_whole(self.directory, self.log.say):
                step = checkpoint.load_progress(path).step
        step = int(self.process_group.broadcast_float(step))
        return None if step < 0 else checkpoint.path_of(self.directory, step)

    def save(self, state: Checkpoint, fingerprint: str, environment: Environment) -> None:
        """Write a checkpoint, then prune the older ones.

        Raises:
            WriteError: if the write fails; the older checkpoints are unchanged.
        """
        is_saved = False
        try:
            if self.process_group.is_first:
                checkpoint.save(self.directory, *state, fingerprint, environment)
                is_saved = True
                self.prune(state.progress)
        finally:
            self.is_current = bool(self.process_group.broadcast_float(is_saved))

    def prune(self, progress: Progress) -> None:
        """Delete all checkpoints but the last `keep_last`, the `keep_best` and the current one.

        A checkpoint that cannot be deleted stays; the first such failure is logged.
        """
        saved = checkpoint.steps(self.directory)
        regular = [step for step in saved if self.is_due(step, progress)]
        best = [step for step in progress.best_steps() if step in saved]  # a save may have failed
        last = regular[-self.config.keep_last :]
        kept = [*last, *best[: self.config.keep_best], progress.step]
        checkpoint.prune(self.directory, kept, self._warn)

    def _warn(self, error: OSError | WriteError) -> None:
        """Log the first failure to delete an old checkpoint."""
        if not self.has_warned:
            reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
            self.log.say(f"an old checkpoint cannot be deleted: {reason}; the training goes on")
        self.has_warned = True

    def is_due(self, step: int, progress: Progress) -> bool:
        """Return whether `save_every` or a validation makes a checkpoint due at `step`."""
        every = self.config.save_every
        return (every is not None and step % every == 0) or str(step) in progress.bleu_of_step

    def final_candidates(self, progress: Progress) -> tuple[int, list[int]]:
        """Return the step of the best checkpoint, and the steps of those to average.

        Rank 0 chooses. Damaged checkpoints are skipped, with a message for each.

        Raises:
            RunError: if no validated checkpoint is whole.
        """
        chosen: tuple[int, list[int]] | None = None
        if self.process_group.is_first:
            self.prune(progress)  # a process killed during a save did not prune
            whole = []
            for step, path in checkpoint.steps(self.directory).items():
                try:
                    checkpoint.check(path)
                    whole.append(step)
                except RunError as error:
                    self.log.say(f"{error} It is skipped.")
            best = [step for step in progress.best_steps() if step in whole]
            if not best:
                raise RunError(
                    f"{self.directory}: must have a whole checkpoint with a validation, but has "
                    f"{count(len(whole), 'whole checkpoint')} without one; restore one from a "
                    "copy, or delete the folder to train from the beginning."
                )
            last = [step for step in reversed(whole) if self.is_due(step, progress)]
            averaged = last if self.config.average_of == "last" else best
            chosen = best[0], averaged[: self.config.average]
        step, steps = json.loads(self.process_group.broadcast_bytes(json.dumps(chosen).encode()))
        return step, steps

    def has_final_weights(self, step: int) -> bool:
        """Return whether the run has final weights that include the training up to `step`."""
        path, has_weights = self.run.model_path, False
        if self.process_group.is_first and path.exists():
            info = checkpoint.load_final_weights_info(path)
            has_weights = info is None or info.last_step == step
        return bool(self.process_group.broadcast_float(has_weights))

    def next_start(self) -> str | None:
        """Describe the checkpoint that the same command resumes from; None without checkpoints."""
        saved = checkpoint.steps(self.directory)
        return f"the checkpoint of step {max(saved):,}" if saved else None


def check_unfinished(run: RunDir) -> None:
    """Refuse to overwrite a finished model that has no checkpoints, such as a copied run folder.

    Raises:
        RunError: if the run folder holds such a model.
    """
    if run.model_path.exists() and not checkpoint.steps(run.checkpoints_dir):
        raise RunError(
            f"{run.path}: holds a finished model, but no checkpoint to go on from; take another "
            f"--run, or delete {run.model_path} to train from the beginning."
        )
