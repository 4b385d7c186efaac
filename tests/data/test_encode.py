"""Tokenizing that is interrupted at any moment resumes where it stopped, with the same bytes."""

import gzip
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from fork_server import needs_fork_server, run_in_child
from tasks import (
    Pair,
    Said,
    Tree,
    copy_task,
    kill_at_call,
    reverse_task,
    tiny_tree,
    write_config,
    write_corpus,
)

from mtrain.audit import scan
from mtrain.config import config_file
from mtrain.corpus import dropped
from mtrain.data import encode, prepare
from mtrain.data.arrow_shards import ShardSet
from mtrain.data.loader import TrainingData
from mtrain.errors import ConfigError, DataError, RunError
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece

PART_PAIRS = 40
NUM_KILLS = 4
CALLS = ("fsync", "replace", "link", "unlink", "rmdir")  # calls that change the disk


def corpus(count: int, seed: int) -> list[Pair]:
    """Pairs of which every seventh is dropped."""
    pairs = reverse_task(count, seed)
    return [Pair("", own.tgt) if place % 7 == 3 else own for place, own in enumerate(pairs)]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = tiny_tree(tmp_path)
    tree["data"]["train"] = write_corpus(tmp_path, "long", corpus(230, 3))
    return tree


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PART_PAIRS", PART_PAIRS)
    monkeypatch.setattr(encode, "_BLOCK_PAIRS", 16)


def make(source: Path, run: Path) -> list[str]:
    """Do what `mtrain tokenize` does; return the printed lines."""
    config = config_file.load(source, run_dir=str(run))
    said = Said()
    prepare.prepare(config, RunDir(run), said)
    return said.lines


def contents(run: Path) -> dict[str, bytes]:
    """Return all files of a run folder, with the path of the folder replaced in them."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes().replace(str(run).encode(), b"RUN") for name, path in files.items()
    }


def child(source: Path, run: Path, kill_at: int) -> None:
    """Tokenize, killed at disk call number `kill_at`; write the number of calls and the output."""
    prepare.PART_PAIRS, encode._BLOCK_PAIRS = PART_PAIRS, 16
    num_calls = kill_at_call(CALLS, kill_at)
    said = make(source, run)
    Path(f"{run}.said").write_text(json.dumps([num_calls(), said]), "utf-8")


def in_child(source: Path, run: Path, kill_at: int = 0) -> int | None:
    return run_in_child(child, source, run, kill_at)


@needs_fork_server
def test_tokenizing_resumed_after_a_kill_writes_the_same_bytes(tmp_path: Path, tree: Tree) -> None:
    source, straight = write_config(tmp_path / "config.yaml", tree), tmp_path / "straight"
    assert in_child(source, straight) == 0
    num_calls, said = json.loads(Path(f"{straight}.said").read_text("utf-8"))
    assert said[-1] == f"{straight}: tokenized 197 training pairs"
    assert contents(straight)
    assert num_calls > 30
    went_on = 0
    for moment in random.Random(4).sample(range(1, num_calls + 1), NUM_KILLS):
        run = tmp_path / f"run-{moment}"
        assert in_child(source, run, kill_at=moment) == -signal.SIGKILL
        assert in_child(source, run) == 0
        assert contents(run) == contents(straight)
        _, again = json.loads(Path(f"{run}.said").read_text("utf-8"))
        went_on += any("tokenizing resumes after" in line for line in again)
    assert went_on > 1


def interrupted(monkeypatch: pytest.MonkeyPatch, part: int, error: BaseException) -> None:
    """Raise `error` once, when the encoding of this part begins."""
    encode_part = encode._encode_part

    def failing(*arguments: Any) -> encode.PartStats:
        if arguments[2] == part:
            monkeypatch.setattr(encode, "_encode_part", encode_part)
            raise error
        return encode_part(*arguments)

    monkeypatch.setattr(encode, "_encode_part", failing)


def test_resumed_tokenizing_reuses_the_tokenizer_the_scan_and_finished_parts(
    tmp_path: Path, tree: Tree, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = write_config(tmp_path / "config.yaml", tree), tmp_path / "run"
    interrupted(monkeypatch, 3, KeyboardInterrupt())
    config, console = config_file.load(source, run_dir=str(run)), Said()
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(config, RunDir(run), console)
    assert console.lines[-1] == (
        f"{run}: stopped; finished parts are kept, and the same command resumes"
    )
    assert not prepare.is_prepared(RunDir(run))
    parts = sorted((run / ".tokenizing").glob("part-*.arrow"))
    stats = [path.stat().st_ino for path in parts]
    again: list[object] = []
    monkeypatch.setattr(sentencepiece, "train", again.append)
    monkeypatch.setattr(scan, "_read", again.append)
    said = make(source, run)
    assert f"{run}: tokenizing resumes after 120 training pairs" in said
    assert again == []
    tables = sorted((run / "data").glob("train-*.arrow"))
    assert len(tables) == 6
    assert [path.stat().st_ino for path in tables[:3]] == stats
    assert not (run / ".tokenizing").exists()


def test_records_of_another_size_than_the_scan_noted_are_written_anew(
    tmp_path: Path, tree: Tree, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = write_config(tmp_path / "config.yaml", tree), tmp_path / "run"
    interrupted(monkeypatch, 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        make(source, run)
    os.truncate(run / ".tokenizing" / ".train.records", 1000)
    said = make(source, run)
    assert said[-1] == f"{run}: tokenized 197 training pairs"
    assert not any("resumes" in line for line in said)
    make(source, tmp_path / "straight")
    assert contents(run) == contents(tmp_path / "straight")


def test_the_records_are_on_disk_before_the_scan_counts_as_done(
    tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def note(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink().name)

    monkeypatch.setattr(os, "fsync", note)
    make(write_config(tmp_path / "config.yaml", tree), tmp_path / "run")
    scan_written = next(name for name in flushed if name.startswith(".scan.json."))
    assert ".train.records" in flushed[: flushed.index(scan_written)]


@pytest.mark.parametrize("what", ["text", "clean", "vocab_size", "seed"])
def test_tokenizing_after_the_text_or_a_setting_changed_equals_tokenizing_from_the_start(
    tmp_path: Path, tree: Tree, small_parts: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = tmp_path / "run"
    interrupted(monkeypatch, 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        make(write_config(tmp_path / "config.yaml", tree), run)
    if what == "text":
        tree["data"]["train"] = write_corpus(tmp_path, "long", corpus(229, 3))
    elif what == "clean":
        tree["data"]["clean"] = ["blank-side", "repeated-pair"]
    elif what == "vocab_size":
        tree["tokenizer"]["vocab_size"] = 284
    else:
        tree["seed"] = 2
    source = write_config(tmp_path / "config.yaml", tree)
    said = make(source, run)
    assert not any("resumes" in line for line in said)
    assert make(source, tmp_path / "straight")
    assert contents(run) == contents(tmp_path / "straight")


def test_after_a_full_disk_tokenizing_resumes_with_the_finished_parts(
    tmp_path: Path, tree: Tree, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = write_config(tmp_path / "config.yaml", tree), tmp_path / "run"
    interrupted(monkeypatch, 2, OSError(28, "No space left on device"))
    with pytest.raises(Exception, match="cannot be written: No space left on device"):
        make(source, run)
    assert f"{run}: tokenizing resumes after 80 training pairs" in make(source, run)


def test_tokenizing_starts_anew_if_the_record_of_its_scan_is_damaged(
    tmp_path: Path, tree: Tree
) -> None:
    source, run = write_config(tmp_path / "config.yaml", tree), tmp_path / "run"
    (run / ".tokenizing").mkdir(parents=True)
    (run / ".tokenizing" / "scan.json").write_text("[" * 100_000)
    assert make(source, run)[-1] == f"{run}: tokenized 197 training pairs"


@pytest.mark.parametrize("is_changed", [False, True], ids=["same text", "another text"])
def test_tokenizing_interrupted_between_tokenizer_and_data_resumes_unless_the_text_changed(
    tmp_path: Path,
    tree: Tree,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    is_changed: bool,
) -> None:
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    source, run = write_config(tmp_path / "config.yaml", tree), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "save_config", stop)
        with pytest.raises(KeyboardInterrupt):
            make(source, run)
    assert (run / "tokenizer").is_dir() and not (run / "data").exists()
    if is_changed:
        tree["data"]["train"] = write_corpus(tmp_path, "long", corpus(229, 3))
    said = make(source, run)
    assert any("resumes after 230" in line for line in said) != is_changed


@pytest.mark.parametrize("num_done", [0, 2])
def test_tokenizing_resumes_after_a_read_error_with_the_parts_that_were_finished(
    tmp_path: Path,
    tree: Tree,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    num_done: int,
) -> None:
    source, run = write_config(tmp_path / "config.yaml", tree), tmp_path / "run"
    interrupted(monkeypatch, num_done, DataError("train: cannot be read: Stale file handle."))
    with pytest.raises(DataError):
        make(source, run)
    assert run.exists() == (num_done > 0)
    said = make(source, run)
    assert (f"{run}: tokenizing resumes after 80 training pairs" in said) == (num_done > 0)


@pytest.mark.parametrize("is_restored", [False, True], ids=["left", "restored"])
@pytest.mark.parametrize("count", [230, 231, 300], ids=["replaced", "one more", "grown"])
def test_a_file_that_changes_while_it_is_tokenized_is_an_error_and_its_parts_are_not_used(
    tmp_path: Path,
    tree: Tree,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    is_restored: bool,
) -> None:
    source, run = write_config(tmp_path / "config.yaml", tree), tmp_path / "run"

    def train_then_change(*arguments: Any) -> sentencepiece.Tokenizer:
        tokenizer = train(*arguments)
        write_corpus(tmp_path, "long", corpus(count, 3 if count > 230 else 4))
        return tokenizer

    train = prepare._train_tokenizer
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_train_tokenizer", train_then_change)
        with pytest.raises(DataError) as error:
            make(source, run)
    path = tree["data"]["train"]["src"][0]
    assert str(error.value) == (
        f"{path}: must stay as it is while it is tokenized, but has changed; start again."
    )
    assert not prepare.is_prepared(RunDir(run))
    if is_restored:
        write_corpus(tmp_path, "long", corpus(230, 3))
    assert not any("resumes" in line for line in make(source, run))
    make(source, tmp_path / "straight")
    assert contents(run) == contents(tmp_path / "straight")


def test_two_processes_do_not_tokenize_in_one_folder(tmp_path: Path, tree: Tree) -> None:
    source, run = write_config(tmp_path / "config.yaml", tree), RunDir(tmp_path / "run")
    with run.tokenizing(), pytest.raises(RunError) as error:
        make(source, run.path)
    assert str(error.value) == (
        f"{run.path}: another process is tokenizing in it; wait until it ends, or choose "
        "another run folder."
    )
    assert make(source, run.path)


def test_threads_change_no_byte_and_the_block_size_does_not_change_the_largest_batches(
    tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_config(tmp_path / "config.yaml", tree)
    make(source, tmp_path / "one")
    monkeypatch.setattr(sentencepiece, "_num_threads", lambda lines: 3)
    make(source, tmp_path / "three")
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    monkeypatch.setattr(encode, "_BLOCK_PAIRS", 7)
    make(source, tmp_path / "small")
    one, small = (
        TrainingData(tmp_path / name / "data", sentencepiece.load(tmp_path / name / "tokenizer"), 1)
        for name in ("one", "small")
    )
    assert [own.src_BS.tolist() for own in one.largest(200)] == [
        own.src_BS.tolist() for own in small.largest(200)
    ]


def test_the_part_size_changes_only_shards_manifest_checksums_and_gzip_bytes(
    tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_config(tmp_path / "config.yaml", tree)
    make(source, tmp_path / "one")
    monkeypatch.setattr(prepare, "PART_PAIRS", PART_PAIRS)
    make(source, tmp_path / "many")
    one, many = contents(tmp_path / "one"), contents(tmp_path / "many")
    differing = {name for name in {*one, *many} if one.get(name) != many.get(name)}
    tables = {f"data/train-{number:05d}.arrow" for number in range(6)}
    assert differing == {
        *tables,
        *("data/shards.json", "data/checksums.json", "data/dropped.jsonl.gz"),
    }
    lists = [gzip.decompress(own["data/dropped.jsonl.gz"]) for own in (one, many)]
    assert lists[0] == lists[1]
    assert lists[0].count(b"\n") == 33


def test_a_part_with_all_pairs_dropped_has_no_shard(
    tmp_path: Path, tree: Tree, small_parts: None
) -> None:
    pairs = corpus(230, 3)
    pairs[40:80] = [Pair("", "x")] * 40
    tree["data"]["train"] = write_corpus(tmp_path, "long", pairs)
    run = tmp_path / "run"
    make(write_config(tmp_path / "config.yaml", tree), run)
    page = json.loads((run / "data" / "shards.json").read_text("utf-8"))
    assert len(page["shards"]) == 5 == len(list((run / "data").glob("train-*.arrow")))
    assert sum(map(len, ShardSet(run / "data", sentencepiece.load(run / "tokenizer")).all())) == 162


# Mixtures


def mixed(directory: Path, *weights: float | None) -> list[Tree]:
    tasks = [copy_task(120, 5), corpus(50, 6), corpus(9, 7)]
    found: list[Tree] = []
    for number, (pairs, weight) in enumerate(zip(tasks, weights, strict=True)):
        found.append({**write_corpus(directory, f"part{number}", pairs)})
        if weight is not None:
            found[-1]["weight"] = weight
    return found


def shares(run: Path) -> list[int]:
    vocabulary = sentencepiece.load(run / "tokenizer")
    return [own.num_in_epoch for own in TrainingData(run / "data", vocabulary, 1).shares]


@pytest.mark.parametrize(
    ("weights", "temperature", "expected"),
    [
        ((1.0, 1.0, 2.0), None, [43, 43, 85]),
        ((None, None, None), None, [120, 43, 8]),
        ((None, None, None), 1e6, [57, 57, 57]),
        ((None, None, None), 2.0, [92, 55, 24]),
    ],
)
def test_weights_or_temperature_set_the_share_of_each_corpus_in_an_epoch(
    tmp_path: Path, tree: Tree, weights: list[float | None], temperature: float, expected: list[int]
) -> None:
    tree["data"] |= {"train": mixed(tmp_path, *weights), "temperature": temperature}
    make(write_config(tmp_path / "config.yaml", tree), tmp_path / "run")
    assert shares(tmp_path / "run") == expected


def test_dropped_pairs_of_a_mixture_are_listed_with_their_corpus(
    tmp_path: Path, tree: Tree
) -> None:
    tree["data"]["train"] = mixed(tmp_path, 1.0, 1.0, 1.0)
    run = tmp_path / "run"
    make(write_config(tmp_path / "config.yaml", tree), run)
    lines = gzip.decompress((run / "data" / "dropped.jsonl.gz").read_bytes()).splitlines()
    entries = [json.loads(line) for line in lines]
    counts = Counter(entry["corpus"] for entry in entries)
    assert counts == {"data.train[1]": 7, "data.train[2]": 1}
    assert entries[0] == {
        "file": tree["data"]["train"][1]["src"][0],
        "line": 4,
        "reason": "blank-side",
        "corpus": "data.train[1]",
    }
    assert dropped.read_counts(RunDir(run).data_dir) == {"blank-side": 8}


def test_a_mixture_of_one_corpus_gives_the_same_plan_and_largest_batches_as_the_corpus(
    tmp_path: Path, tree: Tree
) -> None:
    make(write_config(tmp_path / "config.yaml", tree), tmp_path / "one")
    tree["data"]["train"] = [tree["data"]["train"]]
    make(write_config(tmp_path / "config.yaml", tree), tmp_path / "mixture")
    one, mixture = (
        TrainingData(tmp_path / name / "data", sentencepiece.load(tmp_path / name / "tokenizer"), 1)
        for name in ("one", "mixture")
    )
    assert one.plan(192) == mixture.plan(192)
    for own, other in zip(one.largest(192), mixture.largest(192), strict=True):
        assert own.src_BS.tolist() == other.src_BS.tolist()


def test_a_weight_below_one_pair_per_epoch_is_an_error_and_creates_no_run_folder(
    tmp_path: Path, tree: Tree
) -> None:
    tree["data"]["train"] = mixed(tmp_path, 1.0, 1.0, 1e-5)
    with pytest.raises(ConfigError) as error:
        make(write_config(tmp_path / "config.yaml", tree), tmp_path / "run")
    assert str(error.value) == (
        "`data.train[2].weight` must be enough for one of the 179 pairs of an epoch, but is too "
        "small."
    )
    assert not (tmp_path / "run").exists()


def test_a_mixture_corpus_with_all_pairs_dropped_is_named_in_the_error(
    tmp_path: Path, tree: Tree
) -> None:
    tree["data"]["train"] = mixed(tmp_path, 1.0, 1.0, 1.0)
    tree["data"]["train"][2] |= write_corpus(tmp_path, "blank", [Pair("", "ba")])
    with pytest.raises(DataError) as error:
        make(write_config(tmp_path / "config.yaml", tree), tmp_path / "run")
    assert str(error.value) == (
        "`data.train[2]` must have a pair that can be used, but all are dropped: 1 "
        "(blank-side 1); change the text or `data.clean`."
    )
    assert not prepare.is_prepared(RunDir(tmp_path / "run"))


def test_check_reports_a_mixture_corpus_with_all_pairs_dropped(
    cli: Cli, tmp_path: Path, tree: Tree
) -> None:
    tree["data"]["train"] = mixed(tmp_path, 1.0, 1.0, 1.0)
    tree["data"]["train"][2] |= write_corpus(tmp_path, "blank", [Pair("", "ba")])
    outcome = cli("check", write_config(tmp_path / "config.yaml", tree), "--json")
    assert outcome.code == 2
    (found,) = [own for own in json.loads(outcome.out)["findings"] if own["severity"] == "error"]
    assert (found["corpus"], found["name"]) == ("train", "all-dropped")
    assert found["what"] == "all pairs of data.train[2] are dropped"
    assert found["advice"].endswith("; dropped are 1 (blank-side 1).")


def test_check_reports_pairs_drops_and_share_of_each_corpus(
    cli: Cli, tmp_path: Path, tree: Tree
) -> None:
    tree["data"]["train"] = mixed(tmp_path, 1.0, 1.0, 2.0)
    source = write_config(tmp_path / "config.yaml", tree)
    outcome = cli("check", source)
    first = next(row for row, line in enumerate(outcome.lines) if "data.train[0]" in line)
    assert outcome.lines[first : first + 3] == [
        "         data.train[0]: 120 pairs, dropped 0; 25.0% of an epoch",
        "         data.train[1]: 50 pairs, dropped 7 (blank-side 7); 25.0% of an epoch",
        "         data.train[2]: 9 pairs, dropped 1 (blank-side 1); 50.0% of an epoch",
    ]
    lists = (RunDir(Path(tree["run_dir"])).check_dir / "train.blank-side.jsonl").read_text("utf-8")
    corpora = [json.loads(line)["corpus"] for line in lists.splitlines()]
    assert Counter(corpora) == {"data.train[1]": 7, "data.train[2]": 1}
    report = json.loads(cli("check", source, "--json").out)
    assert [own["share"] for own in report["corpora"][0]["mixture"]] == [0.25, 0.25, 0.5]


def test_training_on_a_mixture_prints_the_shares_and_doctor_finds_no_fault(
    cli: Cli, tmp_path: Path, tree: Tree
) -> None:
    tree["data"]["train"] = mixed(tmp_path, 1.0, 1.0, 2.0)
    outcome = cli("train", write_config(tmp_path / "config.yaml", tree))
    assert outcome.code == 0
    assert "mixed    data.train[1]: 25.1% of an epoch, each of its 43 pairs once" in outcome.err
    found = cli("doctor", tree["run_dir"])
    assert found.code == 0, found.lines
    assert any("171 pairs, all ids within the vocabulary" in line for line in found.lines)
    assert any(line.startswith("resume       ok") for line in found.lines), found.lines
