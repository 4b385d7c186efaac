"""Fine-tuning: initialise a training from the weights of another run, `training.init_from`.

Imports torch lazily: `check_weights` runs before the corpora are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.config.sections import Config
from mtrain.errors import RunError
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import ProcessGroup

if TYPE_CHECKING:
    from mtrain.model.transformer import Transformer
    from mtrain.run.logger import RunLog


def check_weights(config: Config) -> None:
    """Check that the run `training.init_from` has weights.

    Not checked if this run has checkpoints, because it resumes from them.

    Raises:
        RunError: if the weights are missing.
    """
    from mtrain.run import checkpoint

    init_from = config.training.init_from
    if init_from is None or checkpoint.steps(RunDir(Path(config.run_dir)).checkpoints_dir):
        return
    path = RunDir(Path(init_from)).model_path
    if not path.is_file():
        raise RunError(f"`training.init_from`: {path}: is missing; `mtrain train CONFIG` makes it.")


def load_initial_weights(
    model: Transformer, config: Config, fingerprint: str, log: RunLog, process_group: ProcessGroup
) -> None:
    """Load the weights of `training.init_from`, if set, into a model, and log their SHA-256.

    Raises:
        RunError: if they are missing, damaged, or belong to another tokenizer.
    """
    init_from = config.training.init_from
    if init_from is None:
        return
    from mtrain.run import checkpoint
    from mtrain.run.load_model import set_weights

    path = RunDir(Path(init_from)).model_path
    if checkpoint.load_fingerprint(path) not in (None, fingerprint):
        raise RunError(
            f"{path}: must belong to the tokenizer that {config.run_dir} was tokenized with, but "
            "was trained with another one since; take another --run."
        )
    weights = checkpoint.load_model(path, fingerprint, verify=True)
    set_weights(model, weights, path, process_group)
    log.say(f"weights  those of {path}")
    digest = checkpoint.digest(weights)
    if not log.holds("init_weights_sha256", digest):
        log.metrics({"step": 0, "init_from": init_from, "init_weights_sha256": digest})
