"""Add encoded training pairs of `training.init_from` to those of a fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mtrain.config.sections import Config
from mtrain.data import arrow_shards
from mtrain.data.arrow_shards import CorpusEntry, Manifest, ShardSet
from mtrain.errors import ConfigError, RunError
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

PREFIX = "training.replay: "  # of the names of the replayed corpora


def check(config: Config) -> None:
    """Check that the training pairs of `training.init_from` can be replayed.

    Raises:
        ConfigError: if its pairs are too long for the config, or lack the text to segment.
        RunError: if it has no encoded pairs.
    """
    if not config.training.replay:
        return
    other = _other(config)
    longest = other.config.data.max_tokens
    if config.data.max_tokens < longest:
        raise ConfigError(
            f"`data.max_tokens` must be >= {longest} to replay {other.path}, but is "
            f"{config.data.max_tokens} instead."
        )
    if config.tokenizer.sampling_alpha and not other.config.tokenizer.sampling_alpha:
        raise ConfigError(
            f"`tokenizer.sampling_alpha` must be 0 to replay {other.path}, whose training pairs "
            f"have no text to segment, but is {config.tokenizer.sampling_alpha} instead."
        )
    if not arrow_shards.are_in(other.data_dir):
        raise RunError(
            f"`training.replay`: {other.path}: must have its encoded training pairs, but has none."
        )


def add(config: Config, tokenizer: Tokenizer, directory: Path) -> int:
    """Add the other run's pairs to a data folder, as corpora of its mixture; return their number.

    Together they have the share `training.replay` of each epoch. The corpora keep their
    proportions. Their `until`, a share of the other run's budget, does not apply.

    Raises:
        RunError: if pairs are missing or damaged, or of another tokenizer.
    """
    other = _other(config)
    if sentencepiece.load(other.tokenizer_dir).fingerprint() != tokenizer.fingerprint():
        raise RunError(
            f"`training.replay`: {other.path}: must have the tokenizer of {config.run_dir}, but "
            "has another one since; choose another --run."
        )
    with_text = config.tokenizer.sampling_alpha > 0
    ours = ShardSet(directory, tokenizer, with_text).manifest
    theirs = ShardSet(other.data_dir, tokenizer, with_text)
    share, first = config.training.replay, len(ours.shards)
    for number in range(len(theirs.manifest.shards)):
        theirs.open(number)  # raises if it is damaged
        shard = arrow_shards.shard_path(other.data_dir, number)
        arrow_shards.link(shard, directory, first + number)
    moved = [
        shard._replace(corpus=len(ours.corpora) + shard.corpus) for shard in theirs.manifest.shards
    ]
    corpora = _with_share(ours.corpora, 1 - share)
    for entry in _with_share(theirs.manifest.corpora, share):
        name = f"{PREFIX}{entry.name.removeprefix(PREFIX)}"
        corpora.append(replace(entry, name=name, until=None))
    arrow_shards.write_manifest(directory, Manifest(corpora, [*ours.shards, *moved]))
    return sum(shard.num_pairs for shard in moved)


def _other(config: Config) -> RunDir:
    assert config.training.init_from is not None, "the config has checked it"
    return RunDir(Path(config.training.init_from))


def _with_share(corpora: Sequence[CorpusEntry], share: float) -> list[CorpusEntry]:
    total = math.fsum(entry.weight for entry in corpora)
    return [replace(entry, weight=share * entry.weight / total) for entry in corpora]
