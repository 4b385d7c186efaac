"""A config with a synthetic corpus among its training text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.augmentation.options import AugmentOptions
from mtrain.config import config_file
from mtrain.config.corpora import corpora_of, weight_of
from mtrain.config.sections import Config
from mtrain.corpus.reader import read_whole
from mtrain.data.prepare import check_tags
from mtrain.errors import ConfigError
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece


@dataclass(frozen=True)
class AugmentReport:
    """The result of `mtrain.augment`.

    Attributes:
        directory: the corpus folder.
        num_lines: lines of the monolingual text, and pairs of the training text, that were read.
        num_pairs: pairs in the corpus.
        dropped: number of dropped pairs by reason.
        config: that of the training, with the corpus in it.
    """

    directory: Path
    num_lines: int
    num_pairs: int
    dropped: Mapping[str, int]
    config: Config


def with_corpus(config: Config, output: Path, options: AugmentOptions) -> Config:
    """Return a config with the corpus folder `output` added, and a run folder of its own.

    Of the options, only `weight`, `tag` and `until` are used.

    Raises:
        ConfigError: if a value is not valid, or the tokenizer of `init_from` lacks the tag.
        DataError: if a corpus cannot be read to count its pairs.
    """
    weight = options.weight
    tree = config.model_dump(exclude_unset=True)
    corpora = corpora_of(config.data.train)
    train = tree["data"]["train"]
    entries: list[dict[str, Any]] = train if isinstance(train, list) else [train]
    entry: dict[str, Any] = {"synthetic": str(output)}
    weights = [named.corpus.weight for named in corpora]
    if weight is not None and None in weights:
        sizes = [read_whole(named.corpus, named.name).num_pairs for named in corpora]
        weights = [weight_of(size, None, config.data.temperature) for size in sizes]
        entries = [old | {"weight": value} for old, value in zip(entries, weights, strict=True)]
        tree["data"].pop("temperature", None)
    if None not in weights:
        entry["weight"] = (1.0 if weight is None else weight) * sum(filter(None, weights))
    keys = {"tag": options.tag, "until": options.until}
    entry |= {key: value for key, value in keys.items() if value is not None}
    tree["data"]["train"] = [*entries, entry]
    new_dir = f"{Path(config.run_dir)}-{output.name}"
    try:
        new = config_file.from_tree(tree, f"{output}", run_dir=new_dir)
    except ConfigError as error:  # of an option that is written into the new corpus
        key = rf"^.*?`data\.train\[{len(entries)}\]\.(\w+)`"
        raise ConfigError(re.sub(key, r"`--\1`", str(error))) from None
    if options.tag is not None and new.training.init_from is not None:
        init_dir = RunDir(Path(new.training.init_from))
        check_tags(new.data, sentencepiece.load(init_dir.tokenizer_dir), init_dir.path)
    return new


def check_free(config: Config, path: Path) -> None:
    """Check that a path has no other config.

    Raises:
        ConfigError: if it has one.
    """
    if path.exists() and (not path.is_file() or config_file.load(path) != config):
        raise ConfigError(f"{path}: already exists; choose another --write-config, or delete it.")


def as_text(config: Config) -> Iterator[str]:
    """Yield the section `data.train` of a config as lines of YAML."""
    tree = config.model_dump(exclude_unset=True)["data"]
    yield from config_file.dump_tree({"data": {"train": tree["train"]}}).splitlines()
