"""Fine-tuning: a run that starts from the config and weights of another, `training.init_from`.

Imports torch only in the functions that read weights or checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.config.config_file import from_tree
from mtrain.config.sections import Config, format_value
from mtrain.errors import ConfigError, RunError
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import ProcessGroup

if TYPE_CHECKING:
    from mtrain.model.transformer import Transformer
    from mtrain.run.logger import RunLog

# keys that may differ from those of `training.init_from`
MAY_DIFFER = {"dropout", "attention_dropout", "activation_dropout", "sampling_alpha"}


def complete_config(config: Config, name: str) -> Config:
    """Return a config with the `tokenizer` and `model` sections of the run `training.init_from`.

    If this run's folder already has a config with the same `training.init_from`, the sections are
    taken from it, so that the other run may have been deleted.

    Args:
        config: as the user gave it; only explicitly set keys must agree with the other run.
        name: of the config in error messages.

    Raises:
        ConfigError: if the other run cannot be used, or a key contradicts it.
    """
    init_from = config.training.init_from
    if init_from is None:
        return config
    if Path(init_from).resolve() == Path(config.run_dir).resolve():
        raise ConfigError(
            f"{name}: `training.init_from` must be another run than `run_dir`, but is the same."
        )
    run = RunDir(Path(config.run_dir))
    if run.config_path.is_file() and run.config.training.init_from == init_from:
        other = run.config
    else:
        try:
            other = RunDir(Path(init_from)).config
        except RunError as error:
            raise ConfigError(f"{name}: `training.init_from`: {error}") from None
    sections = {}
    for section in ("tokenizer", "model"):
        ours, theirs = getattr(config, section), getattr(other, section)
        explicit = ours.model_dump(exclude_unset=True)
        for key, value in explicit.items():
            expected = getattr(theirs, key)
            if key not in MAY_DIFFER and value != expected:
                raise ConfigError(
                    f"{name}: `{section}.{key}` must be {format_value(expected)}, as in "
                    f"{init_from}, but is {format_value(value)} instead."
                )
        sections[section] = theirs.model_copy(update=explicit)
    return from_tree(config.model_copy(update=sections).model_dump(exclude_unset=True), name)


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
            "was trained with another one since; choose another --run."
        )
    weights = checkpoint.load_model(path, fingerprint, verify=True)
    set_weights(model, weights, path, process_group)
    log.say(f"weights  those of {path}")
    digest = checkpoint.digest(weights)
    if not log.holds("init_weights_sha256", digest):
        log.metrics({"step": 0, "init_from": init_from, "init_weights_sha256": digest})
