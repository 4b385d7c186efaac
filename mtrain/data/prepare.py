"""From corpora to a run folder: the tokenizer, the encoded pairs, and what became of each pair."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from mtrain import __version__
from mtrain.audit.pair_filter import PairFilter, pair_filter_for
from mtrain.config import config_file
from mtrain.config.corpora import Corpus, NamedCorpus, corpora_of, weight_of
from mtrain.config.sections import Config
from mtrain.corpus import dropped as dropped_module
from mtrain.corpus.length_stats import CorpusStats
from mtrain.corpus.reader import (
    FileMark,
    Pair,
    changed_files,
    count_pairs,
    files_of,
    mark,
    read_pairs,
    revisions_of,
)
from mtrain.data import arrow_shards, encode
from mtrain.data.arrow_shards import SHARD_PAIRS
from mtrain.data.encode import EncodedPart, EncodeJob
from mtrain.errors import ConfigError, RunError
from mtrain.io.atomic import sha256, sha256_if_readable, whole_dir, write_lines
from mtrain.io.lines import read_lines
from mtrain.run import checkpoint
from mtrain.run.logger import Console
from mtrain.run.run_dir import LOCK_FILE, RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

PART_PAIRS = SHARD_PAIRS  # of text, that are encoded for good
_BLOCK_PAIRS = 10_000
_PROFILE_FILE = "profile.json"
_MARKS_FILE = "corpora.json"
_SUMS_FILE = "checksums.json"
_BEGUN_FILE = "begun.json"
_PROFILE = TypeAdapter(CorpusStats)
Tree = dict[str, Any]
_RARE = 0.0005  # the share of pairs whose length ratio is out of range, on either side


class ParallelLines(NamedTuple):
    """The two sides of a small corpus, in memory."""

    src: list[str]
    tgt: list[str]


def prepare(config: Config, run: RunDir, console: Console) -> None:
    """Make the run folder's tokenizer and data, unless they are there already.

    What was done before the process ended is found again, unless text or settings have changed.

    Raises:
        DataError, ConfigError: if the corpora or the settings must change; nothing is written.
        RunError: if the folder was made from other corpora, from files that have changed since,
            or with another tokenizer, has a data folder that is not mtrain's, or if another process
            is tokenizing in it.
    """
    if run.config_path.is_file():
        _check_same_data(config, run)
    if is_prepared(run):
        _check_same_files(run, console)
        console.say(f"{run.path}: tokenized already")
        return
    if run.data_dir.is_file() or (run.data_dir.is_dir() and any(run.data_dir.iterdir())):
        raise RunError(f"{run.data_dir}: is there, and not from mtrain; take another --run.")
    _check_tokenizer(config, run)
    with run.tokenizing() as work_dir, _saying_what_is_kept(run, console):
        begun = _begin(config, run, work_dir, console)
        with pair_filter_for(config.data, work_dir) as judge:
            if not (run.tokenizer_dir.is_dir() or (work_dir / "tokenizer").is_dir()):
                _say_sample(config, begun.num_pairs, console)
            vocabulary = _vocabulary(config, run, judge, work_dir)
            owner = f", those of {config.training.init_from}" if config.training.init_from else ""
            console.say(
                f"tokenizer: {config.tokenizer.kind}, {format_vocabulary_sizes(vocabulary)}{owner}"
            )
            with_text = config.tokenizer.sampling_alpha > 0
            is_mixture = isinstance(config.data.train, list)
            corpora = corpora_of(config.data.train, "data.train")
            work = EncodeJob(corpora, is_mixture, vocabulary, judge, work_dir, with_text)
            done = encode.encode(work, PART_PAIRS)
        with whole_dir(run.data_dir) as directory:
            _write_data(config, begun, done, work, directory)
            dropped = dropped_module.read_counts(directory)
            _say_left_out(console, dropped, begun.num_pairs, run)
            if not run.tokenizer_dir.is_dir():
                with whole_dir(run.tokenizer_dir) as tokenizer_dir:
                    vocabulary.save(tokenizer_dir)
            config_file.save(config, run.config_path)
    num_kept = begun.num_pairs - sum(dropped.values())
    console.say(f"{run.path}: tokenized {num_kept:,} training pairs")


@contextmanager
def _saying_what_is_kept(run: RunDir, console: Console) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        console.say(f"{run.path}: stopped; what is done is kept, and the same command goes on")
        raise


def _write_data(
    config: Config, begun: _Begun, done: list[EncodedPart], work: EncodeJob, directory: Path
) -> None:
    """Fill the data folder with all that was made."""
    (directory / _MARKS_FILE).write_text(json.dumps(begun.marks, indent=2), encoding="utf-8")
    encode.collect(done, work, config.data.temperature, directory)
    _write_profile(done, directory / _PROFILE_FILE)
    _write_text(config.data.valid, directory / "valid")
    for name, test in config.data.tests.items():
        _write_text(test, directory / "tests" / name)
    _write_sums(directory)


class _Begun(NamedTuple):
    """What a tokenizing is of: the marks of all corpora, and how many training pairs they have."""

    marks: Tree
    num_pairs: int


def _begin(config: Config, run: RunDir, work_dir: Path, console: Console) -> _Begun:
    """Read all corpora once; keep what was done before only if nothing has changed since."""
    settings, path = _settings(config, run), work_dir / _BEGUN_FILE
    begun = _read_begun(path, settings, config)
    if begun is None:
        num_pairs = _count(config, console)
        _empty(work_dir)
        marks = {name: own._asdict() for name, own in mark(files_of(config.data)).items()}
        for name, revision in revisions_of(config.data).items():
            marks[name] = {"revision": revision}
        begun = _Begun(marks, num_pairs)
        tree = {"settings": settings, **begun._asdict()}
        write_lines(path, [json.dumps(tree)])
    elif num_done := encode.num_done(work_dir):
        console.say(f"{run.path}: the tokenizing goes on after {num_done:,} training pairs")
    return begun


def _read_begun(path: Path, settings: Tree, config: Config) -> _Begun | None:
    """Return what was begun; None if there is nothing, or of other text, or with other settings."""
    try:
        old = json.loads(path.read_text("utf-8"))
        begun = _Begun(dict(old["marks"]), int(old["num_pairs"]))
        is_same = old["settings"] == settings and list(begun.marks) == _names(config)
        is_same = is_same and not changed_files(_file_marks(begun.marks))
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return begun if is_same else None


def _settings(config: Config, run: RunDir) -> Tree:
    """Return all that decides what the parts of a tokenizing hold, but for the text."""
    kept = sentencepiece.load(run.tokenizer_dir) if run.tokenizer_dir.is_dir() else None
    return {
        "mtrain": __version__,
        "part_pairs": PART_PAIRS,
        "seed": config.seed,
        "data": config.data.model_dump(),
        "tokenizer": config.tokenizer.model_dump(),
        "init_from": config.training.init_from,
        "kept_tokenizer": kept.fingerprint() if kept else None,
    }


def _names(config: Config) -> list[str]:
    return [*files_of(config.data), *revisions_of(config.data)]


def _empty(directory: Path) -> None:
    """Delete what an earlier tokenizing has left, but for the lock."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


def _check_tokenizer(config: Config, run: RunDir) -> None:
    """Refuse a tokenizer that lies in the folder already if it does not have the config's sides."""
    if not run.tokenizer_dir.is_dir():
        return
    own = sentencepiece.load(run.tokenizer_dir)
    wanted, given = own.src is own.tgt, config.tokenizer.shared
    if given != wanted:
        raise ConfigError(
            f"`tokenizer.shared` must be {str(wanted).lower()}, as in {run.tokenizer_dir}, but is "
            f"{str(given).lower()} instead."
        )


def _say_sample(config: Config, num_pairs: int, console: Console) -> None:
    num_lines = num_pairs * (2 if config.tokenizer.shared else 1)
    init_from = config.training.init_from
    if num_lines > config.tokenizer.max_training_lines and init_from is None:
        console.say(
            f"tokenizer: trained on a sample of {config.tokenizer.max_training_lines:,} lines "
            "(`tokenizer.max_training_lines`)"
        )


def _vocabulary(config: Config, run: RunDir, judge: PairFilter, work_dir: Path) -> Tokenizer:
    """Return the run's tokenizer, on which weights may depend, another run's, or a new one."""
    if run.tokenizer_dir.is_dir():
        return sentencepiece.load(run.tokenizer_dir)
    path = work_dir / "tokenizer"
    if not path.is_dir():
        with whole_dir(path) as directory:
            init_from = config.training.init_from
            if init_from is not None:
                sentencepiece.load(RunDir(Path(init_from)).tokenizer_dir).save(directory)
            else:
                _train_tokenizer(config, judge).save(directory)
    return sentencepiece.load(path)


def _count(config: Config, console: Console) -> int:
    """Read all corpora once; return how many training pairs there are."""
    train = corpora_of(config.data.train, "data.train")
    tests = [NamedCorpus(f"data.tests.{name}", own) for name, own in config.data.tests.items()]
    counts: dict[str, int] = {}
    for named in [*train, NamedCorpus("data.valid", config.data.valid), *tests]:
        count = count_pairs(named.corpus, named.name)
        if count.num_broken:
            broken = f"{count.num_broken:,} pairs"
            console.say(f"{named.name}: line breaks within {broken} are spaces now")
        counts[named.name] = count.num_pairs
    num_pairs = sum(counts[named.name] for named in train)
    temperature = config.data.temperature
    weights = [weight_of(counts[own.name], own.weight, temperature) for own in train]
    encode.check_shares([own.name for own in train], weights, num_pairs)
    return num_pairs


def is_prepared(run: RunDir) -> bool:
    """Tell whether the run folder holds encoded pairs; they appear whole, and last.

    A data folder that has lost its pairs still has checksums, and what is gone is asked for later.
    """
    return arrow_shards.are_in(run.data_dir) or (run.data_dir / _SUMS_FILE).is_file()


def _train_tokenizer(config: Config, judge: PairFilter) -> Tokenizer:
    """Train the vocabularies on the pairs that stay, long ones among them."""
    src = (pair.src for pair in _staying(config, judge))
    tgt = (pair.tgt for pair in _staying(config, judge))
    return sentencepiece.train(config.tokenizer, src, tgt, config.seed)


def _staying(config: Config, judge: PairFilter) -> Iterator[Pair]:
    """Yield the pairs that stay, and refuse a corpus of which none does."""
    pairs, first, left_out = read_pairs(config.data.train), 0, Counter[str]()
    while block := list(islice(pairs, _BLOCK_PAIRS)):
        reasons = judge.reasons(first, len(block))
        yield from (pair for pair, why in zip(block, reasons, strict=True) if why is None)
        left_out.update(why for why in reasons if why is not None)
        first += len(block)
    if left_out.total() == first:
        raise dropped_module.none_left("data.train", left_out)


def read_valid(run: RunDir) -> ParallelLines:
    """Return the validation text that the run folder holds."""
    return _read_text(run.data_dir / "valid")


def read_test(run: RunDir, name: str) -> ParallelLines:
    """Return the text of a test set that the run folder holds."""
    return _read_text(run.data_dir / "tests" / name)


def read_counts(run: RunDir) -> dict[str, int]:
    """Return how many training pairs were left out, by reason."""
    return dropped_module.read_counts(run.data_dir)


def read_profile(run: RunDir) -> CorpusStats | None:
    """Return what is usual in the training pairs; None if the run folder does not say."""
    try:
        raw = (run.data_dir / _PROFILE_FILE).read_bytes()
        return _PROFILE.validate_json(raw, strict=True)
    except (OSError, ValidationError):
        return None


def read_marks(run: RunDir) -> dict[str, FileMark]:
    """Return what the corpora were when they were tokenized; nothing if the folder is too old."""
    try:
        return _file_marks(json.loads((run.data_dir / _MARKS_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _file_marks(tree: Tree) -> dict[str, FileMark]:
    return {path: FileMark(**own) for path, own in tree.items() if "sha256" in own}


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
    was, now = old.training.init_from, config.training.init_from
    if was != now:
        raise RunError(
            f"{run.path}: `training.init_from` must stay {was or 'null'}, but is {now or 'null'} "
            "now; take another --run, or delete this run folder."
        )
    for key, new_value, old_value in (
        ("data", config.data, old.data),
        ("tokenizer", config.tokenizer, old.tokenizer),
    ):
        if new_value != old_value:
            raise RunError(
                f"{run.path}: was tokenized with another `{key}` section; take another --run, "
                "or delete this run folder."
            )


def _write_profile(done: list[EncodedPart], path: Path) -> None:
    """Write what is usual in the training pairs."""
    num_copied = sum(own.facts.num_copied for own in done)
    lengths: Counter[tuple[int, int]] = Counter()
    for own in done:
        lengths.update({(src, tgt): count for src, tgt, count in own.facts.lengths})
    by_ratio = sorted((tgt / src, count) for (src, tgt), count in lengths.items())
    rare = _RARE * lengths.total()
    least = next(ratio for ratio, below in _accumulated(by_ratio) if below > rare)
    most = next(ratio for ratio, above in _accumulated(by_ratio[::-1]) if above > rare)
    longest = max(src for src, _ in lengths)
    profile = CorpusStats(longest, least, most, num_copied / lengths.total())
    path.write_text(json.dumps(profile._asdict()), encoding="utf-8")


def _accumulated(counts: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    total = 0
    for value, count in counts:
        total += count
        yield value, total


def _say_left_out(console: Console, counts: Mapping[str, int], num_pairs: int, run: RunDir) -> None:
    for reason, count in sorted(counts.items()):
        console.say(
            f"left out: {count:,} of {num_pairs:,} training pairs ({reason}); "
            f"listed in {run.data_dir / dropped_module.LEDGER_FILE}"
        )


def format_vocabulary_sizes(vocabulary: Tokenizer) -> str:
    """Say how many pieces each side has."""
    if vocabulary.src is vocabulary.tgt:
        return f"{len(vocabulary.src):,} shared pieces"
    return f"{len(vocabulary.src):,} source and {len(vocabulary.tgt):,} target pieces"


def _write_text(corpus: Corpus, stem: Path) -> None:
    write_lines(stem.with_name(stem.name + ".src"), (pair.src for pair in read_pairs(corpus)))
    write_lines(stem.with_name(stem.name + ".tgt"), (pair.tgt for pair in read_pairs(corpus)))


def _read_text(stem: Path) -> ParallelLines:
    paths = [stem.with_name(stem.name + side) for side in (".src", ".tgt")]
    for path in paths:
        if not path.is_file():
            raise RunError(f"{path}: is missing; restore it from a copy of the run.")
    lines = ParallelLines(*(list(read_lines(path)) for path in paths))
    if not len(lines.src) == len(lines.tgt) > 0:
        raise RunError(
            f"{paths[0]} and {paths[1].name} must have the same number of lines, and not 0, but "
            f"have {len(lines.src)} and {len(lines.tgt)} instead; restore them from a copy of the "
            "run."
        )
    return lines
