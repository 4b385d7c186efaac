"""Which checkpoints of a run stay, and which of them its final weights are made of.

The one place that deletes checkpoints; how one lies on disk is the business of `run.checkpoint`.
"""

from __future__ import annotations

from pathlib import Path

from mtrain.config.sections import Config, TrainingConfig
from mtrain.errors import RunError
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Checkpoint, Environment, Progress
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import ProcessGroup


class CheckpointManager:
    """The checkpoints of one run; of several ranks, the first reads, writes and deletes them.

    Attributes:
        is_current: the newest checkpoint holds the training as it stands.
    """

    def __init__(
        self, run: RunDir, config: TrainingConfig, log: RunLog, process_group: ProcessGroup
    ) -> None:
        self.run, self.directory, self.config = run, run.checkpoints_dir, config
        self.log, self.process_group = log, process_group
        self.is_current = False

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint, as the first rank sees it, or None.

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

    def save(self, state: Checkpoint, fingerprint: str, environment: Environment) -> None:
        """Write a checkpoint, then delete those that need not stay beside it.

        Raises:
            WriteError: if the disk does not take it; the older checkpoints are as they were.
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
        """Delete all checkpoints but the last `keep_last`, the `keep_best` and the current one."""
        regular = [step for step in checkpoint.steps(self.directory) if self.is_due(step, progress)]
        best = progress.best_steps()[: self.config.keep_best]
        kept = [*regular[-self.config.keep_last :], *best, progress.step]
        checkpoint.delete_all_but(self.directory, kept)

    def is_due(self, step: int, progress: Progress) -> bool:
        """Tell whether a checkpoint is due at `step`: by `save_every`, or after a validation."""
        every = self.config.save_every
        return (every is not None and step % every == 0) or str(step) in progress.bleu_of_step

    def final_candidates(self, progress: Progress) -> tuple[int, list[int], dict[int, Path]]:
        """Return what the final weights may be made of, and warn of damaged checkpoints.

        Returns:
            The step of the best checkpoint, the steps of those to average, and all whole
            checkpoints by step.
        """
        if self.process_group.is_first:
            self.prune(progress)  # a process killed inside a save had not pruned yet
        self.process_group.barrier()
        whole = {}
        for step, path in checkpoint.steps(self.directory).items():
            try:
                checkpoint.check(path)
                whole[step] = path
            except RunError as error:
                self.log.say(f"{error} It is skipped.")
        best = [step for step in progress.best_steps() if step in whole]
        last = [step for step in reversed(whole) if self.is_due(step, progress)]
        averaged = last if self.config.average_of == "last" else best
        return best[0], averaged[: self.config.average], whole

    def has_final_weights(self, step: int) -> bool:
        """Tell whether the run has final weights, and not those of a training that was shorter."""
        info = checkpoint.load_final_weights_info(self.run.model_path)
        return self.run.model_path.exists() and (info is None or info.last_step == step)

    def next_start(self) -> str | None:
        """Name the checkpoint that the same command would resume from, or None."""
        saved = checkpoint.steps(self.directory)
        return f"the checkpoint of step {max(saved):,}" if saved else None


def check_unfinished(run: RunDir) -> None:
    """Refuse to replace a finished model without checkpoints to resume from: a copy, most likely.

    Raises:
        RunError: if that would happen.
    """
    if run.model_path.exists() and not checkpoint.steps(run.checkpoints_dir):
        raise RunError(
            f"{run.path}: holds a finished model, but no checkpoint to go on from; take another "
            f"--run, or delete {run.model_path} to train from the beginning."
        )


def check_model_config(config: Config, run: RunDir) -> None:
    """Refuse to resume from the checkpoints of another model.

    Raises:
        RunError: if `model` is not as in the run's own config.
    """
    old = run.load_config()
    if checkpoint.steps(run.checkpoints_dir) and config.model != old.model:
        changed = [key for key, value in config.model if value != getattr(old.model, key)]
        raise RunError(
            f"{run.path}: its checkpoints have another `model.{changed[0]}` "
            f"({getattr(old.model, changed[0])!r}); take another --run, or delete this run folder."
        )
