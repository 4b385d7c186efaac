"""Write the tokenizer, the encoded pairs and the list of dropped pairs into a run folder."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain import __version__
from mtrain.audit.scan import PAIR, TRAIN, PairFilter, PairRecords, Scan, scan_corpora
from mtrain.config.corpora import Corpus, HubCorpus, SyntheticCorpus, corpora_of, weight_of
from mtrain.config.sections import DEFAULT_VOCAB_SIZE, Config, DataConfig, Tree, format_value
from mtrain.corpus import dropped
from mtrain.corpus.formats import paths_of, revision_of
from mtrain.corpus.reader import (
    FileMark,
    Reader,
    all_corpora,
    changed_files,
    possible_header,
    read_pairs,
    read_whole,
)
from mtrain.data import arrow_shards, encode, loader, replay
from mtrain.data.arrow_shards import SHARD_PAIRS
from mtrain.data.encode import EncodeJob
from mtrain.errors import ConfigError, DataError, RunError, damaged
from mtrain.io import text_width
from mtrain.io.atomic import flush, sha256, sha256_if_readable, whole_dir, write_lines
from mtrain.io.lines import read_lines
from mtrain.run import checkpoint
from mtrain.run.logger import Console, resumable
from mtrain.run.run_dir import LOCK_FILE, RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

PART_PAIRS = SHARD_PAIRS  # pairs per part, the unit of resuming
_BLOCK_PAIRS = 10_000
_MARKS_FILE = "corpora.json"
_CHECKSUMS_FILE = "checksums.json"
_SCAN_FILE = "scan.json"


class ParallelLines(NamedTuple):
    """The lines of both sides of a small corpus, in memory."""

    src: list[str]
    tgt: list[str]


def prepare(config: Config, run: RunDir, console: Console) -> None:
    """Create the run folder's tokenizer and data, unless they exist.

    The training text is read three times: to find errors and judge its pairs, to train the
    tokenizer, and to encode it. An interrupted run is continued, unless text or settings have
    changed.

    Raises:
        DataError, ConfigError: if the corpora or settings are invalid; finished parts may stay.
        RunError: if the folder was made from other corpora, from files that have changed since,
            or with another tokenizer, has a data folder not written by mtrain, or if another
            process is tokenizing in it.
    """
    num_kept = None
    if not _is_done(config, run):
        with resumable(console, run.path), run.tokenizing() as work_dir:
            if not _is_done(config, run):  # by a process that held the lock until now
                num_kept = _tokenize(config, run, work_dir, console)
    if num_kept is not None:
        console.say(f"{run.path}: tokenized {text_width.count(num_kept, 'training pair')}")
        return
    update_tests(config, run, console)
    _check_same_files(run, console)
    run.remove_unfinished()
    console.say(f"{run.path}: tokenized already")


def _is_done(config: Config, run: RunDir) -> bool:
    """Return whether a run folder is tokenized already, with the settings of a config.

    Raises:
        RunError: if it was tokenized with others, or has a data folder not written by mtrain.
    """
    check_same_data(config, run)
    if is_prepared(run):
        return True
    if run.data_dir.is_file() or (run.data_dir.is_dir() and any(run.data_dir.iterdir())):
        raise RunError(
            f"{run.data_dir}: exists, but mtrain did not write it; choose another --run."
        )
    return False


def _kept_tokenizer(config: Config, run: RunDir) -> Tokenizer | None:
    """Return the tokenizer that a run folder has already: checkpoints may depend on it.

    Raises:
        ConfigError: if its kind, size or number of models is not that of the config.
    """
    if not run.tokenizer_dir.is_dir():
        return None
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    src, tgt, settings = tokenizer.src, tokenizer.tgt, config.tokenizer
    size = len(src) if len(src) == len(tgt) else None
    for key, kept, given in (
        ("shared", src is tgt, settings.shared),
        ("kind", "unigram" if src.is_unigram else "bpe", settings.kind),
        ("vocab_size", size, settings.vocab_size or size),  # null accepts any
    ):
        if given != kept:
            raise ConfigError(
                f"`tokenizer.{key}` must be {format_value(kept)}, as in {run.tokenizer_dir}, "
                f"but is {format_value(given)} instead."
            )
    return tokenizer


def _tokenize(config: Config, run: RunDir, work_dir: Path, console: Console) -> int:
    """Fill the run folder; return the number of kept training pairs."""
    data, init_from = config.data, config.training.init_from
    tokenizer = _kept_tokenizer(config, run)
    replay.check(config)
    fingerprint = tokenizer.fingerprint() if tokenizer else None
    if tokenizer is not None:
        check_tags(data, tokenizer, run.path)
    elif init_from is not None:
        init_dir = RunDir(Path(init_from))
        check_tags(data, sentencepiece.load(init_dir.tokenizer_dir), init_dir.path)
    marks, sizes = _scan(config, fingerprint, run, work_dir, console)
    num_pairs = sum(sizes.values())
    pair_filter = PairFilter(data, work_dir)
    origin = f", those of {init_from}" if init_from else ""
    if tokenizer is None:
        tokenizer_dir = work_dir / "tokenizer"
        if not tokenizer_dir.is_dir():
            if init_from is None:
                tokenizer = _train_tokenizer(config, pair_filter, sizes, console)
            else:
                tokenizer = sentencepiece.load(RunDir(Path(init_from)).tokenizer_dir)
            with whole_dir(tokenizer_dir) as directory:
                tokenizer.save(directory)
        tokenizer = sentencepiece.load(tokenizer_dir)
        is_default = not init_from and config.tokenizer.vocab_size is None
        if is_default and {len(tokenizer.src), len(tokenizer.tgt)} != {DEFAULT_VOCAB_SIZE}:
            origin = f", as near to the default of {DEFAULT_VOCAB_SIZE:,} as the text allows"
    shown = format_vocabulary_sizes(tokenizer)
    console.say(f"tokenizer: {config.tokenizer.kind}, {shown}{origin}")
    job = EncodeJob(
        corpora_of(data.train),
        isinstance(data.train, list),
        tokenizer,
        pair_filter,
        work_dir,
        with_text=config.tokenizer.sampling_alpha > 0,
    )
    try:
        parts = encode.encode(job, PART_PAIRS)
    finally:  # another text may be the cause of an error
        _check_unchanged(marks, work_dir)
    with whole_dir(run.data_dir) as directory:
        marks |= _mark_texts(data)
        (directory / _MARKS_FILE).write_text(json.dumps(marks, indent=2), encoding="utf-8")
        encode.collect(parts, job, data.temperature, directory)
        encode.corpus_stats(parts, job.corpora).save(directory)
        if config.training.replay:
            num_replayed = replay.add(config, tokenizer, directory)
            console.say(
                f"replay: {num_replayed:,} training pairs of {init_from} are "
                f"{config.training.replay:.1%} of an epoch"
            )
        _write_text(data.valid, directory / "valid")
        for name, test in data.tests.items():
            _write_text(test, directory / "tests" / name)
        _write_checksums(directory)
        counts = dropped.read_counts(directory)
        for reason, count in sorted(counts.items()):
            console.say(
                f"dropped: {count:,} of {num_pairs:,} training pairs ({reason}); "
                f"listed in {run.data_dir / dropped.DROPPED_FILE}"
            )
        if not run.tokenizer_dir.is_dir():
            with whole_dir(run.tokenizer_dir) as tokenizer_dir:
                tokenizer.save(tokenizer_dir)
        run.save_config(config)
    if config.training.replay:
        _say_leaks(run, data.tests, console)
    return num_pairs - sum(counts.values())


def _scan(
    config: Config, fingerprint: str | None, run: RunDir, work_dir: Path, console: Console
) -> tuple[Tree, dict[str, int]]:
    """Return the file marks and revisions of all corpora, and each training corpus's size in pairs.

    Reads all corpora once and writes their records to the working folder. Records of an earlier
    process are reused if text and settings are the same, and the run's existing tokenizer (by its
    fingerprint) is the same or was trained by that process; if not, the working folder is emptied.
    """
    data, path = config.data, work_dir / _SCAN_FILE
    settings = {
        "mtrain": __version__,
        "part_pairs": PART_PAIRS,
        "seed": config.seed,
        "data": data.model_dump(),
        "tokenizer": config.tokenizer.model_dump(),
        "init_from": config.training.init_from,
        "kept_tokenizer": fingerprint,
    }
    corpora = all_corpora(data)
    files = list(dict.fromkeys(file for corpus in corpora for file in paths_of(corpus)))
    revisions = {
        name: {"revision": commit}
        for corpus in corpora
        for name, commit in revision_of(corpus).items()
    }
    try:
        earlier = json.loads(path.read_text("utf-8"))
        marks, sizes = dict(earlier["marks"]), dict(earlier["sizes"])
        trained_dir = work_dir / "tokenizer"
        if trained_dir.is_dir() and sentencepiece.load(trained_dir).fingerprint() == fingerprint:
            earlier["settings"]["kept_tokenizer"] = fingerprint  # that process trained it
        is_same = earlier["settings"] == settings and list(marks) == [*files, *revisions]
        is_same = is_same and marks == marks | revisions and not changed_files(_file_marks(marks))
        num_bytes = PairRecords(work_dir, TRAIN).path.stat().st_size
        is_same = is_same and num_bytes == sum(sizes.values()) * PAIR.itemsize
    except (OSError, ValueError, TypeError, LookupError, RecursionError, RunError):
        is_same = False
    if is_same:
        if num_done := encode.num_done(work_dir):
            console.say(f"{run.path}: tokenizing resumes after {num_done:,} training pairs")
        return marks, sizes
    for stale in work_dir.iterdir():
        if stale.is_dir():
            shutil.rmtree(stale)
        elif stale.name != LOCK_FILE:
            stale.unlink()
    stats = {file: Path(file).stat() for file in filter(os.path.exists, files)}  # before reading
    scans = scan_corpora(data, work_dir)
    sizes = _check_scans(scans, data, console)
    checksums = {
        notes.path: notes.sha256
        for scan in scans
        for part in scan.reader.parts
        for notes in part.notes
    }
    marks = {
        file: FileMark(
            stat.st_size, stat.st_mtime_ns, checksums.get(file) or sha256(Path(file))
        )._asdict()
        for file, stat in stats.items()
    } | revisions
    flush(scans[-1].records.path)
    write_lines(path, [json.dumps({"settings": settings, "marks": marks, "sizes": sizes})])
    return marks, sizes


def _check_unchanged(marks: Tree, work_dir: Path) -> None:
    """Reject files that have changed since the scan; then no finished part is used again."""
    for path in changed_files(_file_marks(marks)):
        (work_dir / _SCAN_FILE).unlink()
        raise DataError(
            f"{path}: must stay as it is while it is tokenized, but has changed; start again."
        )


def _check_scans(scans: Iterable[Scan], data: DataConfig, console: Console) -> dict[str, int]:
    """Reject corpora without pairs, and weights with which an epoch has no pair of a corpus.

    Returns the size of each training corpus in pairs.
    """
    num_pairs = Counter[str]()
    for scan in scans:
        name = f"data.{scan.name}"
        scan.reader.check_not_empty(name)
        _say_notes(scan.reader, name, data, console)
        for part in scan.reader.parts:
            num_pairs[part.corpus or name] += part.num_pairs
    train = corpora_of(data.train)
    sizes = {named.name: num_pairs[named.name] for named in train}
    weights = {
        name: weight_of(sizes[name], corpus.weight, data.temperature) for name, corpus in train
    }
    encode.check_shares(weights, sum(sizes.values()))
    return sizes


def _say_notes(reader: Reader, name: str, data: DataConfig, console: Console) -> None:
    """Print notes on what looks like a header, and on line breaks within fields."""
    num_broken = Counter[str]()
    for part in reader.parts:
        if cells := possible_header(part.src, data):
            console.say(
                f"{part.src.path}: begins with what looks like a header: {' TAB '.join(cells)}; "
                "set `header: true` for this corpus to leave the line out, or `header: false`"
            )
        num_broken[part.corpus or name] += part.src.num_broken
    for corpus, num_pairs in num_broken.items():
        if num_pairs:
            shown = text_width.count(num_pairs, "pair")
            console.say(f"{corpus}: line breaks within fields are spaces now, in {shown}")


def _train_tokenizer(
    config: Config, pair_filter: PairFilter, sizes: Mapping[str, int], console: Console
) -> Tokenizer:
    """Train the tokenizer on the kept pairs, and on those over `data.max_tokens`.

    Pairs of synthetic corpora are left out.
    """
    corpora, num_pairs = corpora_of(config.data.train), sum(sizes.values())
    are_real = [not isinstance(named.corpus, SyntheticCorpus) for named in corpora]
    is_real = np.repeat(are_real, [sizes[named.name] for named in corpora])
    is_kept, counts = np.zeros(num_pairs, bool), Counter[str]()
    for first in range(0, num_pairs, _BLOCK_PAIRS):
        reasons = pair_filter.reasons(first, min(_BLOCK_PAIRS, num_pairs - first))
        is_kept[first : first + len(reasons)] = [reason is None for reason in reasons]
        counts.update(reason for reason in reasons if reason is not None)
    is_kept &= is_real
    if not is_kept.any():
        raise dropped.none_left("data.train", counts)
    max_lines = config.tokenizer.max_training_lines
    if is_kept.sum() * (2 if config.tokenizer.shared else 1) > max_lines:
        console.say(
            f"tokenizer: trained on a sample of {max_lines:,} lines "
            "(`tokenizer.max_training_lines`)"
        )
    kept_pairs = compress(read_pairs(config.data.train), is_kept)
    lines = ((pair.src, pair.tgt) for pair in kept_pairs)
    tags = sorted({named.corpus.tag for named in corpora if named.corpus.tag is not None})
    return sentencepiece.train(config.tokenizer, lines, int(is_kept.sum()), config.seed, tags)


def check_tags(data: DataConfig, tokenizer: Tokenizer, path: Path) -> None:
    """Check that a tokenizer has the tags of all training corpora.

    Raises:
        ConfigError: if it lacks one.
    """
    for named in corpora_of(data.train):
        if named.corpus.tag is not None and named.corpus.tag not in tokenizer.src.tags:
            known = ", ".join(tokenizer.src.tags) or "none"
            raise ConfigError(
                f"`{named.name}.tag` must be a tag of the tokenizer of {path}, which has {known}, "
                f"but is {named.corpus.tag!r} instead; a training from the beginning learns it."
            )


def is_prepared(run: RunDir) -> bool:
    """Return whether the run folder has a data folder of mtrain, which is written atomically.

    A folder that lost its manifest but not its checksums counts; readers report missing files.
    """
    return arrow_shards.are_in(run.data_dir) or (run.data_dir / _CHECKSUMS_FILE).is_file()


def read_valid(run: RunDir) -> ParallelLines:
    """Return the validation text in the run folder."""
    return _read_text(run.data_dir / "valid")


def read_test(run: RunDir, name: str) -> ParallelLines:
    """Return the text of a test set in the run folder."""
    return _read_text(run.data_dir / "tests" / name)


def read_marks(run: RunDir) -> dict[str, FileMark]:
    """Return the marks of the corpus files at tokenizing; empty if missing or damaged."""
    try:
        return _file_marks(_read_tree(run.data_dir / _MARKS_FILE))
    except TypeError:
        return {}


def _file_marks(tree: Tree) -> dict[str, FileMark]:
    return {path: FileMark(**mark) for path, mark in tree.items() if "sha256" in mark}


def _write_checksums(directory: Path) -> None:
    """Write the checksum of every file in the data folder."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    checksums = {path.relative_to(directory).as_posix(): sha256(path) for path in files}
    (directory / _CHECKSUMS_FILE).write_text(json.dumps(checksums, indent=2), encoding="utf-8")


def damaged_files(run: RunDir) -> list[Path]:
    """Return the files of the data folder that are missing, or differ from their checksums."""
    path = run.data_dir / _CHECKSUMS_FILE
    checksums = _read_tree(path)
    if not checksums:
        return [path]
    files = {run.data_dir / name: expected for name, expected in checksums.items()}
    return [file for file, expected in files.items() if sha256_if_readable(file) != expected]


def update_tests(config: Config, run: RunDir, console: Console) -> None:
    """Add, replace and remove test sets as a config says; the training pairs stay as they are.

    A test set is written if the run's saved config does not have the same one, if its text was made
    from another corpus, or if it is missing while its files exist. Reports how many pairs of it
    were trained on.

    Raises:
        DataError: if a test set cannot be read, or is empty; nothing is written.
        RunError: if another process is training in the folder.
    """
    old, tests = run.config.data, config.data.tests
    marks, wanted = _read_tree(run.data_dir / _MARKS_FILE), _mark_texts(config.data)
    new = {
        name: corpus
        for (name, corpus), (key, mark) in zip(tests.items(), wanted.items(), strict=True)
        if corpus != old.tests.get(name)
        or marks.get(key, mark) != mark
        or _is_to_come(run, name, corpus)
    }
    gone = old.tests.keys() - tests.keys()
    if not new and not gone:
        return
    with run.locked():
        readers = {name: read_whole(corpus, f"data.tests.{name}") for name, corpus in new.items()}
        written = [run.data_dir / _MARKS_FILE]
        for name in [*gone, *new]:
            stem = run.data_dir / "tests" / name
            paths = _text_paths(stem)
            if name in new:
                _write_text(new[name], stem)
            else:
                for path in paths:
                    path.unlink(missing_ok=True)
            written += paths
        data = old.model_copy(update={"tests": tests})
        marks = _mark_tests(data, new, marks)
        write_lines(written[0], [json.dumps(marks, indent=2)])
        if checksums := _read_tree(run.data_dir / _CHECKSUMS_FILE):
            for path in written:
                checksums[path.relative_to(run.data_dir).as_posix()] = sha256_if_readable(path)
            existing = {name: checksum for name, checksum in checksums.items() if checksum}
            write_lines(run.data_dir / _CHECKSUMS_FILE, [json.dumps(existing, indent=2)])
        run.save_config(run.config.model_copy(update={"data": data}))
    for name in gone:
        console.say(f"{run.path}: test set {name} removed")
    for name, reader in readers.items():
        _say_notes(reader, f"data.tests.{name}", data, console)
        shown = text_width.count(reader.num_pairs, "pair")
        console.say(f"{run.path}: test set {name} added, {shown}")
    _say_leaks(run, new, console)


def _mark_texts(data: DataConfig) -> Tree:
    """Return marks of the corpora that the text of each test set is made from."""
    return {
        f"data.tests.{name}": {"corpus": corpus.model_dump(exclude_defaults=True)}
        for name, corpus in data.tests.items()
    }


def _mark_tests(data: DataConfig, new: Mapping[str, Corpus], marks: Tree) -> Tree:
    """Drop the marks of files that no corpus names any more, and add those of new test sets.

    The mark of a file that another corpus names, too, stays: it is of the text that was tokenized.
    """
    tests = {name: corpus for name, corpus in data.tests.items() if name not in new}
    others = all_corpora(data.model_copy(update={"tests": tests}))
    tokenized = {path for corpus in others for path in paths_of(corpus)} & marks.keys()
    needed = {path for corpus in all_corpora(data) for path in paths_of(corpus)}
    marks = {
        name: mark
        for name, mark in marks.items()
        if name in needed or (isinstance(mark, dict) and "revision" in mark)
    }
    for corpus in new.values():
        for name in (path for path in paths_of(corpus) if path not in tokenized):
            stat = Path(name).stat()
            mark = FileMark(stat.st_size, stat.st_mtime_ns, sha256(Path(name)))
            marks[name] = mark._asdict()
        marks |= {name: {"revision": commit} for name, commit in revision_of(corpus).items()}
    return marks | _mark_texts(data)


def is_not_copied(run: RunDir, name: str) -> bool:
    """Return whether a test set is new in the config: the folder has no text and no mark of it."""
    return not _has_text(run, name) and f"data.tests.{name}" not in _read_tree(
        run.data_dir / _MARKS_FILE
    )


def _is_to_come(run: RunDir, name: str, corpus: Corpus) -> bool:
    """Return whether a run folder lacks the text of a test set whose files exist."""
    is_here = not is_prepared(run) or _has_text(run, name)
    return not is_here and all(map(os.path.isfile, paths_of(corpus)))


def _has_text(run: RunDir, name: str) -> bool:
    return any(path.is_file() for path in _text_paths(run.data_dir / "tests" / name))


def _say_leaks(run: RunDir, names: Collection[str], console: Console) -> None:
    """Print how many pairs and sources of some test sets are among the training pairs."""
    if not names:
        return
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    pairs_of = {}
    for name in names:
        src, tgt = read_test(run, name)
        ids = tokenizer.encode_src(src), tokenizer.tgt.encode(tgt)
        sides = ([np.array(line, np.int32).tobytes() for line in side] for side in ids)
        pairs_of[name] = list(zip(*sides, strict=True))
    held_out = {src for pairs in pairs_of.values() for src, _ in pairs}
    tags = set(tokenizer.src.tags.values())
    trained = {
        (untagged, tgt.tobytes())
        for block in loader.read_ids(run.data_dir, tokenizer)
        for src, tgt in zip(*block, strict=True)
        if (untagged := src[int(src[0] in tags) :].tobytes()) in held_out
    }
    sources = {pair[0] for pair in trained}
    for name, pairs in pairs_of.items():
        num_pairs = sum(pair in trained for pair in pairs)
        if num_sources := sum(src in sources for src, _ in pairs):
            console.say(
                f"{name}: {num_pairs:,} of its {len(pairs):,} pairs and {num_sources:,} of its "
                "sources occur in the training pairs; its scores will be too high"
            )


def _read_tree(path: Path) -> Tree:
    """Return a JSON object; an empty one if the file is missing or damaged."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def changed_corpora(run: RunDir) -> dict[str, list[str | None]]:
    """Return {path: [checksum at tokenizing, checksum now]} of the corpus files that have changed.

    The first is None for a file that was added to a local folder of `hub` since.
    """
    marks = read_marks(run)
    changed: dict[str, list[str | None]] = {
        path: [marks[path].sha256, now] for path, now in changed_files(marks).items()
    }
    for corpus in all_corpora(run.config.data):
        if isinstance(corpus, HubCorpus) and marks:  # there are none if their file is damaged
            changed |= {
                path: [None, sha256_if_readable(Path(path))]
                for path in paths_of(corpus)
                if path not in marks
                and not Path(path).absolute().is_relative_to(run.path.absolute())
            }
    return changed


def _check_same_files(run: RunDir, console: Console) -> None:
    """Reject corpora that have changed; if there are checkpoints, only warn."""
    has_checkpoints = bool(checkpoint.steps(run.checkpoints_dir))
    for path, (before, _) in changed_corpora(run).items():
        if not has_checkpoints:
            how = "was added" if before is None else "has changed"
            raise RunError(
                f"{path}: {how} since {run.path} was tokenized; choose another --run, or "
                "delete this run folder."
            )
        what = "is new in its folder" if before is None else "is not the file that was tokenized"
        console.say(
            f"changed  {path}: {what}; the training goes on with the pairs as they were tokenized"
        )


def check_same_data(config: Config, run: RunDir) -> None:
    """Raise RunError if a run folder was tokenized, or has checkpoints, with other settings.

    Also if it was tokenized, but its config is missing, or if it is a file.
    """
    run.check_files()
    if not run.config_path.is_file():
        if is_prepared(run):
            raise RunError(
                f"{run.path}: was tokenized, but has no {run.config_path.name}; restore the file "
                "from a copy of the run, or delete this run folder to begin anew."
            )
        return
    old = run.config
    for key, was, now in (
        ("init_from", old.training.init_from, config.training.init_from),
        ("replay", str(old.training.replay), str(config.training.replay)),
    ):
        if was != now:
            raise RunError(
                f"{run.path}: `training.{key}` must stay {was or 'null'}, but is {now or 'null'} "
                "now; choose another --run, or delete this run folder."
            )
    tokenizer = config.tokenizer
    if tokenizer.vocab_size is None:  # null accepts whatever size the folder has
        tokenizer = tokenizer.model_copy(update={"vocab_size": old.tokenizer.vocab_size})
    tests = {"tests": old.data.tests}  # which may change
    for key, new_value, old_value in (
        ("data", config.data.model_copy(update=tests), old.data),
        ("tokenizer", tokenizer, old.tokenizer),
    ):
        if new_value != old_value:
            raise RunError(
                f"{run.path}: was tokenized with another `{key}` section; choose another --run, "
                "or delete this run folder."
            )
    for key, value in config.model:
        if value != getattr(old.model, key) and checkpoint.steps(run.checkpoints_dir):
            raise RunError(
                f"{run.path}: its checkpoints have another `model.{key}` "
                f"({format_value(getattr(old.model, key))}); choose another --run, or delete this "
                "run folder."
            )


def format_vocabulary_sizes(tokenizer: Tokenizer) -> str:
    """Format the vocabulary size of each side."""
    if tokenizer.src is tokenizer.tgt:
        return f"{len(tokenizer.src):,} shared subwords"
    return f"{len(tokenizer.src):,} source and {len(tokenizer.tgt):,} target subwords"


def _text_paths(stem: Path) -> list[Path]:
    return [stem.with_name(stem.name + side) for side in (".src", ".tgt")]


def _write_text(corpus: Corpus, stem: Path) -> None:
    pairs, (src_path, tgt_path) = list(read_pairs(corpus)), _text_paths(stem)
    write_lines(src_path, (pair.src for pair in pairs))
    write_lines(tgt_path, (pair.tgt for pair in pairs))


def _read_text(stem: Path) -> ParallelLines:
    paths = _text_paths(stem)
    for path in paths:
        if not path.is_file():
            raise damaged(path, "is missing")
    lines = ParallelLines(*(list(read_lines(path)) for path in paths))
    if not len(lines.src) == len(lines.tgt) > 0:
        raise RunError(
            f"{paths[0]} and {paths[1].name} must have the same number of lines, and not 0, but "
            f"have {len(lines.src)} and {len(lines.tgt)} instead; restore them from a copy of the "
            "run."
        )
    return lines
