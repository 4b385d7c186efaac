"""The config of a run that starts from another run's weights."""

from __future__ import annotations

from pathlib import Path

from mtrain.config.config_file import from_tree
from mtrain.config.corpora import Section
from mtrain.config.sections import Config
from mtrain.errors import ConfigError, RunError
from mtrain.run.run_dir import RunDir

# What does not say which weights there are, or what they mean.
_FREE = {"dropout", "attention_dropout", "activation_dropout", "sampling_alpha"}


def complete_config(config: Config, name: str) -> Config:
    """Return a config that is complete: `tokenizer` and `model` as in `training.init_from`.

    A run that has begun knows these sections itself, so that the other one may be gone by then.

    Args:
        config: as it was given; what stands in it counts, its defaults do not.
        name: what errors call it.

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
    other = _begun(config) or _load(init_from, name)
    sections = {}
    for section in ("tokenizer", "model"):
        ours, theirs = getattr(config, section), getattr(other, section)
        _check(ours, theirs, f"{name}: `{section}.", init_from)
        given = {key: getattr(ours, key) for key in ours.model_fields_set}
        sections[section] = theirs.model_copy(update=given)
    return from_tree(config.model_copy(update=sections).model_dump(), name)


def _begun(config: Config) -> Config | None:
    """Return the config of the run itself, if it has begun with the same weights."""
    run = RunDir(Path(config.run_dir))
    if not run.config_path.is_file():
        return None
    own = run.config
    return own if own.training.init_from == config.training.init_from else None


def _load(init_from: str, name: str) -> Config:
    try:
        return RunDir(Path(init_from)).config
    except RunError as error:
        raise ConfigError(f"{name}: `training.init_from`: {error}") from None


def _check(ours: Section, theirs: Section, prefix: str, init_from: str) -> None:
    """Refuse a key that was given and is another one in the other run."""
    for key in type(ours).model_fields:
        value, wanted = getattr(ours, key), getattr(theirs, key)
        if key in ours.model_fields_set and key not in _FREE and value != wanted:
            raise ConfigError(
                f"{prefix}{key}` must be {wanted!r}, as in {init_from}, but is {value!r} instead."
            )
