"""Begin a training with the weights and the tokenizer of another run: fine-tuning.

What the config leaves open about the tokenizer and the model is as in that run; what it says
otherwise is an error. Reads no weights, and loads nothing heavy, before the training begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.config.sections import Config
from mtrain.errors import RunError
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE, ProcessGroup

if TYPE_CHECKING:
    from mtrain.model.transformer import Transformer
    from mtrain.run.logger import RunLog


def check_weights(config: Config) -> None:
    """Refuse to begin with a run that has no weights, before any work is done.

    A run that has checkpoints of its own needs no others.

    Raises:
        RunError: if they are missing.
    """
    from mtrain.run import checkpoint

    init_from = config.training.init_from
    if init_from is None or checkpoint.steps(RunDir(Path(config.run_dir)).checkpoints_dir):
        return
    path = RunDir(Path(init_from)).model_path
    if not path.is_file():
        raise RunError(f"`training.init_from`: {path}: is missing; `mtrain train CONFIG` makes it.")


def start(
    model: Transformer,
    config: Config,
    fingerprint: str,
    log: RunLog,
    process_group: ProcessGroup = SINGLE,
) -> None:
    """Fill a model that is to be trained with the weights that it begins with, if any.

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
    weights = checkpoint.check_model(path, fingerprint)
    set_weights(model, weights, path, process_group)
    log.say(f"weights  those of {path}")
    digest = checkpoint.digest(weights)
    if not log.holds("init_weights_sha256", digest):
        log.metrics({"step": 0, "init_from": init_from, "init_weights_sha256": digest})
