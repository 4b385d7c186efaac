"""From corpora to a run folder: the tokenizer, the encoded pairs, and what became of each pair."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from mtrain import checkpoint, data, ledger, tokenizer
from mtrain import config as configs
from mtrain.cleaning import Cleaner, cleaner
from mtrain.config import Config, Corpus
from mtrain.corpus import (
    FileMark,
    Pair,
    Profile,
    changed_files,
    count_pairs,
    files_of,
    mark,
    read_pairs,
    revisions_of,
)
from mtrain.errors import DataError, RunError
from mtrain.files import read_lines, sha256, sha256_if_readable, whole_dir, write_lines
from mtrain.ledger import Drop
from mtrain.rundir import RunDir
from mtrain.runlog import Console
from mtrain.tokenizer import Tokenizer

_BLOCK_PAIRS = 10_000  # pairs that are encoded together
_PROFILE_FILE = "profile.json"
_MARKS_FILE = "corpora.json"
_SUMS_FILE = "checksums.json"
_PROFILE = TypeAdapter(Profile)
_RARE = 0.0005  # the share of pairs whose length ratio is out of range, on either side


class Lines(NamedTuple):
    """The two sides of a small corpus, in memory."""

    src: list[str]
    tgt: list[str]


def prepare(config: Config, run: RunDir, console: Console) -> None:
    """Make the run folder's tokenizer and data, unless they are there already.

    Raises:
        DataError, ConfigError: if the corpora or the settings must change; nothing is written.
        RunError: if the folder was made from other corpora, from files that have changed since,
            or with another tokenizer.
    """
    if run.config_path.is_file():
        _check_same_data(config, run)
    if is_prepared(run):
        _check_same_files(run, console)
        console.say(f"{run.path}: tokenized already")
        return
    num_pairs = _count(config, console)
    num_lines = num_pairs * (2 if config.tokenizer.shared else 1)
    if num_lines > config.tokenizer.max_training_lines:
        console.say(
            f"tokenizer: trained on a sample of {config.tokenizer.max_training_lines:,} lines "
            "(`tokenizer.max_training_lines`)"
        )
    has_tokenizer = run.tokenizer_dir.is_dir()  # weights may depend on it
    with whole_dir(run.data_dir) as directory:
        _write_marks(config, directory)
        with cleaner(config.data, directory) as judge:
            if has_tokenizer:
                vocabulary = tokenizer.load(run.tokenizer_dir)
            else:
                vocabulary = _train_tokenizer(config, judge)
            console.say(f"tokenizer: {config.tokenizer.kind}, {say_sizes(vocabulary)}")
            dropped = _write_train(config, vocabulary, judge, directory)
        _write_text(config.data.valid, directory / "valid")
        for name, test in config.data.tests.items():
            _write_text(test, directory / "tests" / name)
        _write_sums(directory)
        _say_left_out(console, dropped, num_pairs, run)
        if not has_tokenizer:
            with whole_dir(run.tokenizer_dir) as tokenizer_dir:
                vocabulary.save(tokenizer_dir)
        configs.save(config, run.config_path)
    console.say(f"{run.path}: tokenized {num_pairs - sum(dropped.values()):,} training pairs")


def _count(config: Config, console: Console) -> int:
    """Read all corpora once; return how many training pairs there are."""
    tests = {f"data.tests.{name}": test for name, test in config.data.tests.items()}
    corpora = {"data.train": config.data.train, "data.valid": config.data.valid} | tests
    counts = {key: count_pairs(corpus, key) for key, corpus in corpora.items()}
    for key, count in counts.items():
        if count.num_broken:
            console.say(f"{key}: line breaks within {count.num_broken:,} pairs are spaces now")
    return counts["data.train"].num_pairs


def is_prepared(run: RunDir) -> bool:
    """Tell whether the run folder holds encoded pairs; they appear whole, and last."""
    return run.data_dir.is_dir()


def _train_tokenizer(config: Config, judge: Cleaner) -> Tokenizer:
    """Train the vocabularies on the pairs that stay, long ones among them."""
    src = (pair.src for pair in _staying(config, judge))
    tgt = (pair.tgt for pair in _staying(config, judge))
    return tokenizer.train(config.tokenizer, src, tgt, config.seed)


def _staying(config: Config, judge: Cleaner) -> Iterator[Pair]:
    for block in _blocks(config):
        reasons = judge.reasons(block.first, len(block.pairs))
        yield from (pair for pair, why in zip(block.pairs, reasons, strict=True) if why is None)


class _Block(NamedTuple):
    """Training pairs that stand together, and the number of the first."""

    first: int
    pairs: list[Pair]


def _blocks(config: Config) -> Iterator[_Block]:
    pairs, first = read_pairs(config.data.train), 0
    while block := list(islice(pairs, _BLOCK_PAIRS)):
        yield _Block(first, block)
        first += len(block)


def read_valid(run: RunDir) -> Lines:
    """Return the validation text that the run folder holds."""
    return _read_text(run.data_dir / "valid")


def read_test(run: RunDir, name: str) -> Lines:
    """Return the text of a test set that the run folder holds."""
    return _read_text(run.data_dir / "tests" / name)


def read_counts(run: RunDir) -> dict[str, int]:
    """Return how many training pairs were left out, by reason."""
    return ledger.read_counts(run.data_dir)


def read_profile(run: RunDir) -> Profile | None:
    """Return what is usual in the training pairs; None if the run folder does not say."""
    try:
        raw = (run.data_dir / _PROFILE_FILE).read_bytes()
        return _PROFILE.validate_json(raw, strict=True)
    except (OSError, ValidationError):
        return None


def read_marks(run: RunDir) -> dict[str, FileMark]:
    """Return what the corpora were when they were tokenized; nothing if the folder is too old."""
    try:
        tree = json.loads((run.data_dir / _MARKS_FILE).read_text("utf-8"))
        return {path: FileMark(**own) for path, own in tree.items() if "sha256" in own}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_marks(config: Config, directory: Path) -> None:
    tree: dict[str, object] = {
        path: own._asdict() for path, own in mark(files_of(config.data)).items()
    }
    for name, revision in revisions_of(config.data).items():
        tree[name] = {"revision": revision}
    (directory / _MARKS_FILE).write_text(json.dumps(tree, indent=2), encoding="utf-8")


def _write_sums(directory: Path) -> None:
    """Write the checksum of every file that the data folder holds."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sums = {path.relative_to(directory).as_posix(): sha256(path) for path in files}
    (directory / _SUMS_FILE).write_text(json.dumps(sums, indent=2), encoding="utf-8")


def damaged_files(run: RunDir) -> list[Path]:
    """Return the files of the data folder that are gone, or are not those that were written.

    A folder that is too old to have checksums is taken as it is.
    """
    path = run.data_dir / _SUMS_FILE
    if not path.exists():
        return []
    try:
        sums = dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return [path]
    files = {run.data_dir / name: expected for name, expected in sums.items()}
    return [own for own, expected in files.items() if sha256_if_readable(own) != expected]


def _check_same_files(run: RunDir, console: Console) -> None:
    """Refuse corpora that have changed; once there are checkpoints, only warn of them."""
    has_checkpoints = bool(checkpoint.steps(run.checkpoints_dir))
    for path in changed_files(read_marks(run)):
        if not has_checkpoints:
            raise RunError(
                f"{path}: has changed since {run.path} was tokenized; take another --run, or "
                "delete this run folder."
            )
        console.say(
            f"changed  {path}: is not the file that was tokenized; the training goes on with the "
            "pairs as they were tokenized"
        )


def _check_same_data(config: Config, run: RunDir) -> None:
    old = run.load_config()
    for key, new_value, old_value in (
        ("data", config.data, old.data),
        ("tokenizer", config.tokenizer, old.tokenizer),
    ):
        if new_value != old_value:
            raise RunError(
                f"{run.path}: was tokenized with another `{key}` section; take another --run, "
                "or delete this run folder."
            )


def _write_train(
    config: Config, vocabulary: Tokenizer, judge: Cleaner, directory: Path
) -> Counter[str]:
    """Encode the training pairs; list those left out, with the reason."""
    lengths: Counter[tuple[int, int]] = Counter()
    copies: Counter[bool] = Counter()
    with_text = config.tokenizer.sampling_alpha > 0
    with ledger.writing(directory) as left_out:
        pairs = _encode(config, vocabulary, judge)

        def kept() -> Iterator[data.EncodedPair]:
            for item in pairs:
                if isinstance(item, Drop):
                    left_out.add(item)
                else:
                    lengths[len(item.src), len(item.tgt) + 1] += 1
                    copies[item.src_text == item.tgt_text] += 1
                    yield item

        num_kept = data.write_pairs(directory / data.TRAIN_FILE, kept(), with_text)
    if num_kept == 0:
        raise DataError("`data.train` must have a pair that can be used, but all are left out.")
    _write_profile(lengths, copies[True], directory / _PROFILE_FILE)
    return left_out.counts


def _write_profile(lengths: Counter[tuple[int, int]], num_copied: int, path: Path) -> None:
    """Write what is usual in the training pairs."""
    by_ratio = sorted((tgt / src, count) for (src, tgt), count in lengths.items())
    rare = _RARE * lengths.total()
    least = next(ratio for ratio, below in _accumulated(by_ratio) if below > rare)
    most = next(ratio for ratio, above in _accumulated(by_ratio[::-1]) if above > rare)
    longest = max(src for src, _ in lengths)
    profile = Profile(longest, least, most, num_copied / lengths.total())
    path.write_text(json.dumps(profile._asdict()), encoding="utf-8")


def _accumulated(counts: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    total = 0
    for value, count in counts:
        total += count
        yield value, total


def _encode(
    config: Config, vocabulary: Tokenizer, judge: Cleaner
) -> Iterator[data.EncodedPair | Drop]:
    """Encode the training pairs in blocks, or say why one is left out."""
    for block in _blocks(config):
        src_ids = vocabulary.encode_src([pair.src for pair in block.pairs])
        tgt_ids = vocabulary.tgt.encode([pair.tgt for pair in block.pairs])
        num_src, num_tgt = np.array([*map(len, src_ids)]), np.array([*map(len, tgt_ids)]) + 1
        reasons = judge.reasons_of_encoded(block.first, num_src, num_tgt)
        for pair, src, tgt, reason in zip(block.pairs, src_ids, tgt_ids, reasons, strict=True):
            if reason:
                yield Drop(pair.src_file, pair.line, reason)
            else:
                yield data.EncodedPair(src, tgt, pair.src, pair.tgt)


def _say_left_out(console: Console, counts: Counter[str], num_pairs: int, run: RunDir) -> None:
    for reason, count in sorted(counts.items()):
        console.say(
            f"left out: {count:,} of {num_pairs:,} training pairs ({reason}); "
            f"listed in {run.data_dir / ledger.LEDGER_FILE}"
        )


def say_sizes(vocabulary: Tokenizer) -> str:
    """Say how many pieces each side has."""
    if vocabulary.src is vocabulary.tgt:
        return f"{len(vocabulary.src):,} shared pieces"
    return f"{len(vocabulary.src):,} source and {len(vocabulary.tgt):,} target pieces"


def _write_text(corpus: Corpus, stem: Path) -> None:
    write_lines(stem.with_name(stem.name + ".src"), (pair.src for pair in read_pairs(corpus)))
    write_lines(stem.with_name(stem.name + ".tgt"), (pair.tgt for pair in read_pairs(corpus)))


def _read_text(stem: Path) -> Lines:
    paths = [stem.with_name(stem.name + side) for side in (".src", ".tgt")]
    for path in paths:
        if not path.is_file():
            raise RunError(f"{path}: is missing; restore it from a copy of the run.")
    lines = Lines(*(list(read_lines(path)) for path in paths))
    if not len(lines.src) == len(lines.tgt) > 0:
        raise RunError(
            f"{paths[0]} and {paths[1].name} must have the same number of lines, and not 0, but "
            f"have {len(lines.src)} and {len(lines.tgt)} instead; restore them from a copy of the "
            "run."
        )
    return lines
