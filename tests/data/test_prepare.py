"""Prepare a run folder: every pair is stored or listed as dropped; an error leaves no files."""

import gzip
import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tasks import Pair, Said, Tree, copy_task, tiny_tree, write, write_config, write_corpus

from mtrain.config import config_file
from mtrain.corpus import dropped, length_stats, reader
from mtrain.corpus.length_stats import CorpusStats
from mtrain.corpus.reader import FileMark
from mtrain.data import loader, prepare
from mtrain.data.batch import Position
from mtrain.data.loader import TrainingData
from mtrain.errors import ConfigError, DataError, RunError, UserError
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return tiny_tree(tmp_path)


def make(tmp_path: Path, tree: Tree) -> tuple[RunDir, list[str]]:
    """Prepare a run; return it and the printed lines."""
    config = config_file.load(write_config(tmp_path / "config.yaml", tree))
    run, console = RunDir(Path(config.run_dir)), Said()
    prepare.prepare(config, run, console)
    return run, console.lines


def refused(tmp_path: Path, tree: Tree, has_parts: bool = False) -> UserError:
    """Return the error of preparing a run that must fail; assert that it leaves no other files.

    Finished parts are left if `has_parts`.
    """
    with pytest.raises(UserError) as error:
        make(tmp_path, tree)
    assert not prepare.is_prepared(RunDir(Path(tree["run_dir"])))
    run = Path(tree["run_dir"])
    left = {path.relative_to(run).parts[0] for path in run.rglob("*") if path.is_file()}
    assert left == ({".tokenizing"} if has_parts else set())
    return error.value


def stored_pairs(run: RunDir) -> list[tuple[str, str]]:
    """Decode the training pairs of a run folder from one epoch, sorted."""
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    table = TrainingData(run.data_dir, tokenizer, seed=1)
    found: list[tuple[str, str]] = []
    for batch, position in table.batches(256, Position()):
        src_ids = [row[keep] for row, keep in zip(batch.src_BS, batch.src_keep_BS, strict=True)]
        tgt_ids = [row[keep] for row, keep in zip(batch.tgt_out_BT, batch.tgt_keep_BT, strict=True)]
        src = tokenizer.src.decode([ids.tolist()[:-1] for ids in src_ids])
        tgt = tokenizer.tgt.decode([ids.tolist()[:-1] for ids in tgt_ids])
        found += zip(src, tgt, strict=True)
        if position.epoch == 1:
            return sorted(found)
    raise AssertionError("batches go on for ever")


def dropped_of(run: RunDir) -> list[dict[str, Any]]:
    raw = gzip.decompress((run.data_dir / "dropped.jsonl.gz").read_bytes())
    return [json.loads(line) for line in raw.splitlines()]


def test_a_run_folder_holds_tokenizer_data_and_the_whole_config(tmp_path: Path, tree: Tree) -> None:
    run, said = make(tmp_path, tree)
    assert said == [
        "tokenizer: unigram, 285 shared subwords",
        f"{run.path}: tokenized 200 training pairs",
    ]
    parts = {"config.yaml", "config.schema.json", "tokenizer", "data"}
    assert {path.name for path in run.path.iterdir()} == parts
    assert run.config == config_file.load(tmp_path / "config.yaml")
    lines = prepare.read_test(run, "held_out")
    assert list(zip(*lines, strict=True)) == copy_task(40, 3)
    assert list(zip(*prepare.read_valid(run), strict=True)) == copy_task(12, 2)
    assert dropped.read_counts(run.data_dir) == {}


def test_pairs_stay_aligned_through_several_files_gzip_and_drops(
    tmp_path: Path, tree: Tree
) -> None:
    pairs = [(f"ba {i}", f"ce {i}") for i in range(60)]
    first = write_corpus(tmp_path, "first", [*copy_task(200, 1)])
    src, tgt = ([pair[side] for pair in pairs] for side in (0, 1))
    src[7], tgt[23] = " ", ""
    src[40] = "ba " * 50
    raw = "".join(f"{line}\n" for line in src).encode()
    (tmp_path / "second.src.gz").write_bytes(gzip.compress(raw))
    tree["data"]["train"] = {
        "src": [*first["src"], str(tmp_path / "second.src.gz")],
        "tgt": [*first["tgt"], write(tmp_path / "second.tgt", tgt)],
    }
    tree["tokenizer"]["vocab_size"] = 300
    run, _ = make(tmp_path, tree)
    kept = [pair for index, pair in enumerate(pairs) if index not in (7, 23, 40)]
    assert stored_pairs(run) == sorted([*copy_task(200, 1), *kept])


def test_dropped_pairs_are_counted_and_listed_with_file_line_and_reason(
    tmp_path: Path, tree: Tree
) -> None:
    pairs = copy_task(200, 1)
    src, tgt = [pair.src for pair in pairs], [pair.tgt for pair in pairs]
    src[0], tgt[4], src[5], tgt[5] = "", "\u3000", "ba " * 50, " "
    src[6], tgt[6] = "\t", "\u2028"
    src[8], tgt[9] = "ba " * 50, "ba " * 50
    src_path = write(tmp_path / "a.src", src)
    tree["data"]["train"] = {"src": [src_path], "tgt": [write(tmp_path / "a.tgt", tgt)]}
    run, said = make(tmp_path, tree)
    assert dropped_of(run) == [
        {"file": src_path, "line": 1, "reason": "blank-side"},
        {"file": src_path, "line": 5, "reason": "blank-side"},
        {"file": src_path, "line": 6, "reason": "blank-side"},
        {"file": src_path, "line": 7, "reason": "blank-pair"},
        {"file": src_path, "line": 9, "reason": "max-tokens"},
        {"file": src_path, "line": 10, "reason": "max-tokens"},
    ]
    assert dropped.read_counts(run.data_dir) == {"blank-side": 3, "blank-pair": 1, "max-tokens": 2}
    path = run.data_dir / "dropped.jsonl.gz"
    assert said[1:4] == [
        f"dropped: 1 of 200 training pairs (blank-pair); listed in {path}",
        f"dropped: 3 of 200 training pairs (blank-side); listed in {path}",
        f"dropped: 2 of 200 training pairs (max-tokens); listed in {path}",
    ]
    assert said[-1] == f"{run.path}: tokenized 194 training pairs"


@pytest.mark.parametrize("longer", ["src", "tgt"])
def test_max_tokens_limits_the_longer_side_of_a_pair_including_eos(
    tmp_path: Path, tree: Tree, longer: str
) -> None:
    lines = [f"{pair.src} ba ce" for pair in copy_task(200, 1)]
    write(Path(tree["data"]["train"][longer][0]), lines)
    run, _ = make(tmp_path, tree)
    lengths = [len(ids) + 1 for ids in sentencepiece.load(run.tokenizer_dir).src.encode(lines)]
    limit = sorted(lengths)[len(lengths) // 2]
    tree["data"]["max_tokens"] = limit
    tree["run_dir"] = str(tmp_path / "other")
    other, _ = make(tmp_path, tree)
    num_dropped = sum(length > limit for length in lengths)
    assert 0 < num_dropped < 200
    assert dropped.read_counts(other.data_dir) == {"max-tokens": num_dropped}


def test_blank_and_long_lines_of_validation_and_test_sets_are_kept(
    tmp_path: Path, tree: Tree
) -> None:
    pairs = copy_task(12, 2)
    src = ["", "ba " * 50, *(pair.src for pair in pairs)]
    tgt = ["ba", "", *(pair.tgt for pair in pairs)]
    files = {"src": [write(tmp_path / "v.s", src)], "tgt": [write(tmp_path / "v.t", tgt)]}
    tree["data"]["valid"] = tree["data"]["tests"]["held_out"] = files
    run, _ = make(tmp_path, tree)
    assert prepare.read_valid(run) == prepare.read_test(run, "held_out") == (src, tgt)


def test_corpus_files_with_unequal_line_counts_are_refused(tmp_path: Path, tree: Tree) -> None:
    src, tgt = (tree["data"]["train"][side][0] for side in ("src", "tgt"))
    write(Path(tgt), ["ba"])
    error = refused(tmp_path, tree)
    assert isinstance(error, DataError)
    assert str(error) == (
        f"{src} and {tgt} must have the same number of lines, but have 200 and 1 instead."
    )


@pytest.mark.parametrize("name", ["train", "valid", "tests.held_out"])
@pytest.mark.parametrize("fault", ["missing", "empty", "not UTF-8"])
def test_an_error_in_any_corpus_is_reported_and_leaves_no_files(
    tmp_path: Path, tree: Tree, name: str, fault: str
) -> None:
    first, _, rest = name.partition(".")
    corpus = tree["data"][first][rest] if rest else tree["data"][first]
    src, tgt = Path(corpus["src"][0]), Path(corpus["tgt"][0])
    if fault == "missing":
        src.unlink()
        said = f"{src}: cannot be read: No such file or directory."
    elif fault == "empty":
        src.write_bytes(b"")
        tgt.write_bytes(b"")
        said = f"`data.{name}` must have at least one pair, but {src} is empty."
    else:
        tgt.write_bytes(tgt.read_bytes() + b"b\xfc\n")
        src.write_bytes(src.read_bytes() + b"b\n")
        line = len(tgt.read_bytes().splitlines())
        said = f"{tgt}:{line}: must be UTF-8, but has byte 0xfc at byte 2 of the line."
    error = refused(tmp_path, tree)
    assert isinstance(error, DataError)
    assert str(error) == said


@pytest.mark.parametrize(
    ("line", "clean", "why"),
    [
        ("", ["blank-side"], "3 (blank-pair 3); change the text or `data.clean`"),
        ("ba " * 50, ["blank-side"], "3 (max-tokens 3); change the text or `data.max_tokens`"),
        (
            "ba " * 50,
            ["repeated-pair"],
            "3 (max-tokens 1, repeated-pair 2); change the text or `data.clean` or "
            "`data.max_tokens`",
        ),
    ],
)
def test_a_corpus_with_all_pairs_dropped_is_refused_with_the_reasons(
    tmp_path: Path, tree: Tree, line: str, clean: list[str], why: str
) -> None:
    tree["data"]["clean"] = clean
    for side in ("src", "tgt"):
        write(Path(tree["data"]["train"][side][0]), [line, line, line])
    tree["tokenizer"]["vocab_size"] = 263
    error = refused(tmp_path, tree, has_parts="max-tokens" in why)
    assert isinstance(error, DataError)
    assert str(error) == (
        f"`data.train` must have a pair that can be used, but all are dropped: {why}."
    )


def test_a_corpus_whose_lines_are_all_blank_is_refused(tmp_path: Path, tree: Tree) -> None:
    for side in ("src", "tgt"):
        write(Path(tree["data"]["train"][side][0]), ["", " "])
    tree["data"]["clean"] = []
    error = refused(tmp_path, tree)
    assert isinstance(error, DataError)
    assert str(error) == "`data.train` must have lines with text, but all that are kept are blank."


def test_a_vocab_size_out_of_range_is_refused_with_the_bound(tmp_path: Path, tree: Tree) -> None:
    tree["tokenizer"]["vocab_size"] = 9000
    error = refused(tmp_path, tree)
    assert isinstance(error, ConfigError)
    text = str(error)
    assert text.startswith("`tokenizer.vocab_size` must be at most ")
    assert text.endswith(" for this corpus, but is 9000 instead.")
    tree["tokenizer"]["vocab_size"] = 100
    error = refused(tmp_path, tree)
    assert str(error).startswith("`tokenizer.vocab_size` must be at least ")
    assert str(error).endswith(
        " for this corpus (every character and byte has a piece), but is 100 instead."
    )


@pytest.mark.parametrize("shared", [True, False])
def test_the_default_vocabulary_shrinks_to_what_the_corpus_allows_and_this_is_reported(
    tmp_path: Path, tree: Tree, shared: bool
) -> None:
    tree["tokenizer"] = {"shared": shared}
    tree["model"]["tie_embeddings"] = "all" if shared else "none"
    run, said = make(tmp_path, tree)
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    assert 256 < len(tokenizer.tgt) < 8000
    notes = [line for line in said if line.startswith("tokenizer: ")]
    assert len(notes) == 1
    assert notes[0].endswith(", as near to the default of 8,000 as the text allows")
    assert run.config.tokenizer.vocab_size is None


def test_a_prepared_run_accepts_a_config_that_no_longer_sets_vocab_size(
    tmp_path: Path, tree: Tree
) -> None:
    tree["tokenizer"]["vocab_size"] = 284
    make(tmp_path, tree)
    del tree["tokenizer"]["vocab_size"]
    make(tmp_path, tree)


def test_a_vocabulary_of_the_size_that_the_error_message_allows_can_be_trained(
    tmp_path: Path, tree: Tree
) -> None:
    tree["tokenizer"]["vocab_size"] = 9000
    bound = int(str(refused(tmp_path, tree)).split(" at most ")[1].split()[0])
    tree["tokenizer"]["vocab_size"] = bound
    run, _ = make(tmp_path, tree)
    assert len(sentencepiece.load(run.tokenizer_dir).src) == bound


def test_preparing_a_run_again_changes_no_file_and_reports_that_it_is_tokenized_already(
    tmp_path: Path, tree: Tree
) -> None:
    run, _ = make(tmp_path, tree)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    Path(tree["data"]["train"]["src"][0]).unlink()
    _, said = make(tmp_path, tree)
    assert said == [f"{run.path}: tokenized already"]
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


@pytest.mark.parametrize(
    ("section", "key", "value"), [("data", "max_tokens", 31), ("tokenizer", "vocab_size", 284)]
)
def test_changed_data_or_tokenizer_settings_for_the_same_run_are_refused(
    tmp_path: Path, tree: Tree, section: str, key: str, value: int
) -> None:
    run, _ = make(tmp_path, tree)
    tree[section][key] = value
    with pytest.raises(RunError) as error:
        make(tmp_path, tree)
    assert str(error.value) == (
        f"{run.path}: was tokenized with another `{section}` section; choose another --run, "
        "or delete this run folder."
    )


def test_a_tokenized_run_folder_without_its_config_is_refused_and_left_unchanged(
    tmp_path: Path, tree: Tree
) -> None:
    run, _ = make(tmp_path, tree)
    run.config_path.unlink()
    tree["data"]["src_lang"] = "cc"
    with pytest.raises(RunError) as error:
        make(tmp_path, tree)
    assert str(error.value) == (
        f"{run.path}: was tokenized, but has no config.yaml; restore the file from a copy of the "
        "run, or delete this run folder to begin anew."
    )
    assert not run.config_path.exists()


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "another"])
def test_a_tokenizing_that_ends_before_the_lock_is_taken_counts(
    tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    tokenizing, before = RunDir.tokenizing, dict[Path, bytes]()

    def late(run: RunDir) -> AbstractContextManager[Path]:
        monkeypatch.setattr(RunDir, "tokenizing", tokenizing)
        make(tmp_path, tree if is_same else tree | {"tokenizer": {"vocab_size": 284}})
        before.update((path, path.read_bytes()) for path in run.path.rglob("*") if path.is_file())
        return tokenizing(run)

    monkeypatch.setattr(RunDir, "tokenizing", late)
    if is_same:
        run, said = make(tmp_path, tree)
        assert said == [f"{run.path}: tokenized already"]
    else:
        with pytest.raises(RunError, match="was tokenized with another `tokenizer` section"):
            make(tmp_path, tree)
    assert before
    files = {path for path in Path(tree["run_dir"]).rglob("*") if path.is_file()}
    assert {path: path.read_bytes() for path in files} == before


def test_a_leftover_tokenizing_folder_is_removed_unless_a_process_is_still_tokenizing(
    tmp_path: Path, tree: Tree
) -> None:
    run, _ = make(tmp_path, tree)
    left = run.path / ".tokenizing" / "part-0.json"
    left.parent.mkdir()
    left.write_text("{}")
    with run.tokenizing():  # it may still be running
        _, said = make(tmp_path, tree)
        assert left.exists()
        assert said == [f"{run.path}: tokenized already"]
    left.parent.mkdir(exist_ok=True)
    left.write_text("{}")
    assert make(tmp_path, tree)[1] == said
    assert not left.parent.exists()


def test_test_sets_can_change_without_tokenizing_again_and_leaked_pairs_are_reported(
    tmp_path: Path, tree: Tree
) -> None:
    run, _ = make(tmp_path, tree)
    before = {path: path.stat().st_mtime_ns for path in run.data_dir.glob("train*")}
    train = copy_task(200, 1)
    news = [
        *train[:2],
        Pair(train[2].src, "ba ba"),
        *(Pair(f"so {n}", f"so {n}") for n in range(4)),
    ]
    tree["data"]["tests"]["news"] = write_corpus(tmp_path, "news", news)
    tree["training"]["lr"] = 0.5
    _, said = make(tmp_path, tree)
    assert said == [
        f"{run.path}: test set news added, 7 pairs",
        "news: 2 of its 7 pairs and 3 of its sources occur in the training pairs; its scores will "
        "be too high",
        f"{run.path}: tokenized already",
    ]
    again = RunDir(run.path)
    assert list(zip(*prepare.read_test(again, "news"), strict=True)) == news
    assert list(zip(*prepare.read_test(again, "held_out"), strict=True)) == copy_task(40, 3)
    assert list(again.config.data.tests) == ["held_out", "news"]
    assert again.config.training.lr == 0.01  # only training itself applies the new value
    assert prepare.damaged_files(again) == []
    assert tree["data"]["tests"]["news"]["src"][0] in prepare.read_marks(again)
    assert {path: path.stat().st_mtime_ns for path in run.data_dir.glob("train*")} == before
    assert make(tmp_path, tree)[1] == [f"{run.path}: tokenized already"]

    gone = tree["data"]["tests"].pop("held_out")
    tree["data"]["tests"]["news"] = write_corpus(tmp_path, "other", [Pair("so 1", "so 2")])
    _, said = make(tmp_path, tree)
    assert said == [
        f"{run.path}: test set held_out removed",
        f"{run.path}: test set news added, 1 pair",
        f"{run.path}: tokenized already",
    ]
    again = RunDir(run.path)
    assert list(zip(*prepare.read_test(again, "news"), strict=True)) == [("so 1", "so 2")]
    assert {path.name for path in (run.data_dir / "tests").iterdir()} == {"news.src", "news.tgt"}
    assert not {*gone["src"], *gone["tgt"]} & set(prepare.read_marks(again))
    assert prepare.damaged_files(again) == []


def test_removing_a_test_set_reads_no_training_pair(
    tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make(tmp_path, tree)
    tree["data"]["tests"].clear()
    monkeypatch.setattr(loader, "read_ids", lambda *_: pytest.fail("there is nothing to find"))
    assert make(tmp_path, tree)[1] == [
        f"{run.path}: test set held_out removed",
        f"{run.path}: tokenized already",
    ]


def test_an_empty_new_test_set_is_an_error_that_changes_no_file(tmp_path: Path, tree: Tree) -> None:
    run, _ = make(tmp_path, tree)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    tree["data"]["tests"]["news"] = write_corpus(tmp_path, "news", copy_task(3, 5))
    tree["data"]["tests"]["void"] = write_corpus(tmp_path, "void", [])
    with pytest.raises(DataError, match=r"`data\.tests\.void` must have at least one pair"):
        make(tmp_path, tree)
    files = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert {path: data for path, data in files.items() if path.name != ".lock"} == before


def test_changing_the_test_sets_while_another_process_trains_is_an_error(
    tmp_path: Path, tree: Tree
) -> None:
    run, _ = make(tmp_path, tree)
    tree["data"]["tests"]["news"] = write_corpus(tmp_path, "news", copy_task(3, 5))
    with run.locked(), pytest.raises(RunError, match="another process is training in it"):
        make(tmp_path, tree)


def test_changed_training_settings_do_not_tokenize_again(tmp_path: Path, tree: Tree) -> None:
    make(tmp_path, tree)
    tree["training"]["lr"] = 0.5
    _, said = make(tmp_path, tree)
    assert said[-1].endswith("tokenized already")


@pytest.mark.parametrize("name", ["data/train.en", "data"])
def test_data_not_written_by_mtrain_is_refused_and_left_unchanged(
    tmp_path: Path, tree: Tree, name: str
) -> None:
    own = Path(tree["run_dir"]) / name
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    for _ in range(2):
        with pytest.raises(RunError) as error:
            make(tmp_path, tree)
        data_dir = Path(tree["run_dir"]) / "data"
        said = f"{data_dir}: exists, but mtrain did not write it; choose another --run."
        assert str(error.value) == said
    assert [path for path in Path(tree["run_dir"]).rglob("*") if path.is_file()] == [own]
    assert own.read_text() == "mine"


def test_an_existing_empty_data_folder_is_filled(tmp_path: Path, tree: Tree) -> None:
    (Path(tree["run_dir"]) / "data").mkdir(parents=True)
    run, _ = make(tmp_path, tree)
    assert prepare.is_prepared(run)


def test_a_deleted_shard_is_not_tokenized_again(tmp_path: Path, tree: Tree) -> None:
    run, _ = make(tmp_path, tree)
    (run.data_dir / "train-00000.arrow").unlink()
    _, said = make(tmp_path, tree)
    assert said[-1].endswith("tokenized already")


def test_tokenizing_changed_text_keeps_the_tokenizer_of_the_run_folder(
    tmp_path: Path, tree: Tree
) -> None:
    run, _ = make(tmp_path, tree)
    model, pairs = run.tokenizer_dir / "shared.model", run.data_dir / "train-00000.arrow"
    before, encoded = model.read_bytes(), pairs.read_bytes()
    shutil.rmtree(run.data_dir)
    train_src = Path(tree["data"]["train"]["src"][0])
    train_src.write_text(train_src.read_text().replace("a", "ä"))
    make(tmp_path, tree)
    assert model.read_bytes() == before
    assert pairs.read_bytes() != encoded


def test_separate_vocabularies_are_each_trained_on_their_own_side(
    tmp_path: Path, tree: Tree
) -> None:
    pairs = copy_task(200, 1)
    tree["data"]["train"] = {
        "src": [write(tmp_path / "x.s", [pair.src for pair in pairs])],
        "tgt": [write(tmp_path / "x.t", [pair.tgt.upper() for pair in pairs])],
    }
    tree["tokenizer"] |= {"vocab_size": 283, "shared": False}
    tree["model"]["tie_embeddings"] = "decoder"
    run, said = make(tmp_path, tree)
    assert said[0] == "tokenizer: unigram, 283 source and 283 target subwords"
    assert {path.name for path in run.tokenizer_dir.iterdir()} == {"src.model", "tgt.model"}
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    assert len(tokenizer.src.pieces("ba ce")) < len(tokenizer.tgt.pieces("ba ce"))
    assert len(tokenizer.src.pieces("BA CE")) > len(tokenizer.tgt.pieces("BA CE"))
    assert stored_pairs(run) == sorted((pair.src, pair.tgt.upper()) for pair in pairs)


@pytest.mark.parametrize(
    ("key", "kept", "given", "said"),
    [
        ("shared", True, False, "true, as in {}, but is false instead."),
        ("shared", False, True, "false, as in {}, but is true instead."),
        ("kind", "unigram", "bpe", "'unigram', as in {}, but is 'bpe' instead."),
        ("kind", "bpe", "unigram", "'bpe', as in {}, but is 'unigram' instead."),
        ("vocab_size", 285, 284, "285, as in {}, but is 284 instead."),
    ],
)
def test_tokenizer_settings_must_match_the_tokenizer_in_the_run_folder(
    tmp_path: Path, tree: Tree, key: str, kept: object, given: object, said: str
) -> None:
    tree["model"] |= {"tie_embeddings": "decoder"}
    tree["tokenizer"] |= {key: kept}
    run, _ = make(tmp_path, tree)
    shutil.rmtree(run.data_dir)
    run.config_path.unlink()
    tree["tokenizer"] |= {key: given}
    with pytest.raises(ConfigError) as error:
        make(tmp_path, tree)
    assert str(error.value) == f"`tokenizer.{key}` must be {said.format(run.tokenizer_dir)}"


def test_a_null_vocab_size_accepts_a_tokenizer_of_any_size_in_the_run_folder(
    tmp_path: Path, tree: Tree
) -> None:
    tree["model"] |= {"tie_embeddings": "decoder"}
    tree["tokenizer"] |= {"shared": False, "vocab_size": 283}
    other, _ = make(tmp_path, tree | {"run_dir": str(tmp_path / "other")})
    tree["tokenizer"] |= {"vocab_size": 282}
    run, _ = make(tmp_path, tree)
    shutil.copy(other.tokenizer_dir / "src.model", run.tokenizer_dir)
    shutil.rmtree(run.data_dir)
    run.config_path.unlink()
    with pytest.raises(ConfigError) as error:
        make(tmp_path, tree)
    assert str(error.value) == (
        f"`tokenizer.vocab_size` must be null, as in {run.tokenizer_dir}, but is 282 instead."
    )
    tree["tokenizer"] |= {"vocab_size": None}
    _, said = make(tmp_path, tree)
    assert said[0] == "tokenizer: unigram, 283 source and 282 target subwords"


def test_training_the_tokenizer_on_a_sample_of_lines_is_reported(
    tmp_path: Path, tree: Tree
) -> None:
    tree["tokenizer"]["max_training_lines"] = 399
    _, said = make(tmp_path, tree)
    assert said[0] == (
        "tokenizer: trained on a sample of 399 lines (`tokenizer.max_training_lines`)"
    )
    tree["tokenizer"]["max_training_lines"] = 400
    tree["run_dir"] = str(tmp_path / "other")
    _, said = make(tmp_path, tree)
    assert said[0].startswith("tokenizer: unigram")


def test_a_tokenizer_that_is_trained_on_all_kept_lines_is_not_said_to_be_trained_on_a_sample(
    tmp_path: Path, tree: Tree
) -> None:
    lines = [pair.src for pair in copy_task(200, 1)]
    write(Path(tree["data"]["train"]["src"][0]), ["", *lines[1:]])
    tree["tokenizer"]["max_training_lines"] = 398
    _, said = make(tmp_path, tree)
    assert said[0].startswith("tokenizer: unigram")


def test_max_training_lines_applies_to_each_side_of_separate_tokenizers(
    tmp_path: Path, tree: Tree
) -> None:
    tree["tokenizer"] |= {"max_training_lines": 200, "shared": False, "vocab_size": 283}
    tree["model"]["tie_embeddings"] = "none"
    _, said = make(tmp_path, tree)
    assert said[0].startswith("tokenizer: unigram")


def test_shards_have_text_columns_only_if_segmentations_are_sampled(
    tmp_path: Path, tree: Tree
) -> None:
    from datasets import Dataset

    for alpha, names in ((0.0, set()), (0.2, {"src_text", "tgt_text"})):
        tree["tokenizer"]["sampling_alpha"] = alpha
        tree["run_dir"] = str(tmp_path / f"run{alpha}")
        run, _ = make(tmp_path, tree)
        columns = set(Dataset.from_file(str(run.data_dir / "train-00000.arrow")).column_names)
        assert columns == {"src", "tgt", "src_length", "tgt_length"} | names


@pytest.mark.parametrize("name", ["valid.src", "tests/held_out.tgt"])
def test_a_missing_validation_or_test_file_of_the_run_folder_is_named_in_the_error(
    tmp_path: Path, tree: Tree, name: str
) -> None:
    run, _ = make(tmp_path, tree)
    path = run.data_dir / name
    path.unlink()
    with pytest.raises(RunError) as error:
        prepare.read_valid(run) if name.startswith("valid") else prepare.read_test(run, "held_out")
    assert str(error.value) == f"{path}: is missing; restore it from a copy of the run."


def test_a_run_folder_stores_length_statistics_and_the_share_of_copied_pairs(
    tmp_path: Path, tree: Tree
) -> None:
    pairs = [Pair(pair.src, f"{pair.tgt} {pair.tgt}") for pair in copy_task(150, 4)]
    pairs += copy_task(50, 5)
    tree["data"] |= {"train": write_corpus(tmp_path, "train", pairs), "max_tokens": 99}
    run, _ = make(tmp_path, tree)
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    src = [len(ids) for ids in tokenizer.encode_src([pair.src for pair in pairs])]
    tgt = [len(ids) + 1 for ids in tokenizer.tgt.encode([pair.tgt for pair in pairs])]
    ratios = [b / a for a, b in zip(src, tgt, strict=True)]
    profile = length_stats.load(run.data_dir)
    assert profile == CorpusStats(max(src), min(ratios), max(ratios), 0.25)
    (run.data_dir / "profile.json").unlink()
    assert length_stats.load(run.data_dir) is None


_counting: list[Counter[str]] = []
_hooks: list[object] = []


def _count_open(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _counting:
        _counting[-1][str(arguments[0])] += 1


@contextmanager
def opened() -> Iterator[Counter[str]]:
    """Count how often this process opens each file."""
    if _count_open not in _hooks:
        _hooks.append(_count_open)
        sys.addaudithook(_count_open)  # an audit hook cannot be removed
    _counting.append(Counter())
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("form", ["files", "mixture"])
def test_tokenizing_reads_each_training_file_three_times(
    tmp_path: Path, tree: Tree, form: str, shared: bool
) -> None:
    files = tree["data"]["train"]
    zipped = tmp_path / "more.src.gz"
    zipped.write_bytes(gzip.compress(Path(files["src"][0]).read_bytes()))
    files = {"src": [*files["src"], str(zipped)], "tgt": [*files["tgt"], files["tgt"][0] + ".2"]}
    shutil.copy(files["tgt"][0], files["tgt"][1])
    paths = [*files["src"], *files["tgt"]]
    tree["data"]["train"] = files
    if form == "mixture":
        (tmp_path / "a.tsv").write_text("ba\tba\n", encoding="utf-8")
        (tmp_path / "a.jsonl").write_text('{"a": "ce", "b": "ce"}\n', encoding="utf-8")
        tsv = {"tsv": [str(tmp_path / "a.tsv")]}
        jsonl = {"jsonl": [str(tmp_path / "a.jsonl")], "src": "a", "tgt": "b"}
        tree["data"]["train"] = [files, tsv, jsonl]
        paths += [*tsv["tsv"], *jsonl["jsonl"]]
    tree["tokenizer"]["shared"] = shared
    tree["tokenizer"]["vocab_size"] = 283
    tree["model"]["tie_embeddings"] = "decoder"
    with opened() as counts:
        make(tmp_path, tree)
    assert {counts[path] for path in paths} == {3}


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path, tree: Tree) -> None:
    tree["run_dir"] = write(tmp_path / "file", ["x"])
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        make(tmp_path, tree)
    assert (tmp_path / "file").read_text() == "x\n"


def test_dropped_json_is_an_empty_object_if_no_pair_was_dropped(tmp_path: Path, tree: Tree) -> None:
    run, _ = make(tmp_path, tree)
    assert json.loads((run.data_dir / "dropped.json").read_text(encoding="utf-8")) == {}


def corpora_of(tree: Tree) -> list[Path]:
    data = tree["data"]
    parts = [data["train"], data["valid"], *data["tests"].values()]
    return [Path(path) for part in parts for side in ("src", "tgt") for path in part[side]]


def change(path: Path) -> None:
    """Change a letter, and leave size and time as they were."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"a", b"e", 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))


def give_checkpoint(run: RunDir) -> None:
    (run.checkpoints_dir / "step-00000004").mkdir(parents=True)


def test_a_run_folder_records_size_time_and_checksum_of_every_corpus_file(
    tmp_path: Path, tree: Tree
) -> None:
    src = Path(tree["data"]["train"]["src"][0])
    zipped = src.with_name("train.src.gz")
    zipped.write_bytes(gzip.compress(src.read_bytes()))
    tree["data"]["train"]["src"] = [str(zipped)]
    run, _ = make(tmp_path, tree)
    assert prepare.read_marks(run) == {
        str(path): FileMark(
            path.stat().st_size,
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in corpora_of(tree)
    }


@pytest.mark.parametrize("number", range(6))
def test_a_corpus_file_that_changed_before_the_first_checkpoint_is_an_error_that_names_it(
    tmp_path: Path, tree: Tree, number: int
) -> None:
    run, _ = make(tmp_path, tree)
    path = corpora_of(tree)[number]
    change(path)
    touch(path)
    with pytest.raises(RunError) as error:
        make(tmp_path, tree)
    assert str(error.value) == (
        f"{path}: has changed since {run.path} was tokenized; choose another --run, or delete this "
        "run folder."
    )


def test_a_changed_file_is_an_error_also_if_a_test_set_that_is_added_names_it(
    tmp_path: Path, tree: Tree
) -> None:
    run, _ = make(tmp_path, tree)
    path = Path(tree["data"]["valid"]["src"][0])
    change(path)
    touch(path)
    tree["data"]["tests"]["dev"] = tree["data"]["valid"]
    for _ in range(2):
        with pytest.raises(RunError, match=rf"^{path}: has changed since"):
            make(tmp_path, tree)
    assert prepare.damaged_files(run) == []


def test_each_corpus_file_that_changed_after_a_checkpoint_gives_one_line_of_warning(
    tmp_path: Path, tree: Tree
) -> None:
    run, _ = make(tmp_path, tree)
    give_checkpoint(run)
    changed = [corpora_of(tree)[0], corpora_of(tree)[3]]
    changed[0].write_bytes(b"ba\n")
    changed[1].write_bytes(changed[1].read_bytes() + b"ce\n")
    _, said = make(tmp_path, tree)
    assert said == [
        f"changed  {path}: is not the file that was tokenized; the training goes on with the pairs "
        "as they were tokenized"
        for path in changed
    ] + [f"{run.path}: tokenized already"]


def test_a_gzip_corpus_file_with_other_compressed_bytes_counts_as_changed(
    tmp_path: Path, tree: Tree
) -> None:
    src = Path(tree["data"]["train"]["src"][0])
    zipped = src.with_name("train.src.gz")
    zipped.write_bytes(gzip.compress(src.read_bytes(), mtime=1))
    tree["data"]["train"]["src"] = [str(zipped)]
    make(tmp_path, tree)
    zipped.write_bytes(gzip.compress(src.read_bytes(), mtime=2))
    with pytest.raises(RunError, match=r"train\.src\.gz: has changed"):
        make(tmp_path, tree)


def test_a_corpus_file_is_hashed_again_only_if_its_size_or_time_changed(
    tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, tree)
    files, read = corpora_of(tree), []
    sha256 = reader.sha256
    monkeypatch.setattr(reader, "sha256", lambda path: read.append(path) or sha256(path))
    make(tmp_path, tree)
    assert read == []
    touch(files[2])
    make(tmp_path, tree)
    assert read == [files[2]]
    change(files[4])  # with its old size and time
    make(tmp_path, tree)
    assert read == [files[2]] * 2


def test_missing_corpus_files_do_not_stop_a_prepared_run(tmp_path: Path, tree: Tree) -> None:
    run, _ = make(tmp_path, tree)
    for path in corpora_of(tree):
        path.unlink()
    _, said = make(tmp_path, tree)
    assert said == [f"{run.path}: tokenized already"]


MARK_OF_NUL = json.dumps({"\0": FileMark(1, 1, "")._asdict()})
DEEP = pytest.param("[" * 100_000, id="deep")


@pytest.mark.parametrize(
    "content",
    [None, "", "[]", "{}", '{"train.src": 3}', '{"a": {"b": 1}}', MARK_OF_NUL, DEEP],
)
def test_a_missing_or_invalid_corpora_json_does_not_stop_a_prepared_run(
    tmp_path: Path, tree: Tree, content: str | None
) -> None:
    run, _ = make(tmp_path, tree)
    record = run.data_dir / "corpora.json"
    record.unlink() if content is None else record.write_text(content)
    change(corpora_of(tree)[0])
    touch(corpora_of(tree)[0])
    _, said = make(tmp_path, tree)
    assert said == [f"{run.path}: tokenized already"]


@pytest.mark.parametrize("content", ['{"\\u0000": ""}', DEEP])
def test_invalid_checksums_are_a_damaged_file(tmp_path: Path, tree: Tree, content: str) -> None:
    run, _ = make(tmp_path, tree)
    (run.data_dir / "checksums.json").write_text(content)
    assert len(prepare.damaged_files(run)) == 1


def test_a_test_set_that_is_added_is_reported_as_in_a_new_run(tmp_path: Path, tree: Tree) -> None:
    make(tmp_path, tree)
    (tmp_path / "a.tsv").write_text("source\ttarget\nba\tce\n")
    (tmp_path / "a.jsonl").write_text('{"a": "ba\\nce", "b": "ba"}\n')
    tree["data"]["tests"]["tsv"] = {"tsv": [str(tmp_path / "a.tsv")]}
    tree["data"]["tests"]["lines"] = {"jsonl": [str(tmp_path / "a.jsonl")], "src": "a", "tgt": "b"}
    _, said = make(tmp_path, tree)
    _, said_of_new = make(tmp_path, tree | {"run_dir": str(tmp_path / "new")})
    notes = [
        f"{tmp_path / 'a.tsv'}: begins with what looks like a header: source TAB target; set "
        "`header: true` for this corpus to leave the line out, or `header: false`",
        "data.tests.lines: line breaks within fields are spaces now, in 1 pair",
    ]
    assert [line for line in said if line in notes] == notes
    assert [line for line in said_of_new if line in notes] == notes


def test_a_test_set_can_be_added_to_a_run_whose_corpora_json_is_invalid(
    tmp_path: Path, tree: Tree
) -> None:
    run, _ = make(tmp_path, tree)
    (run.data_dir / "corpora.json").write_text('{"a": 3}')
    tree["data"]["tests"]["news"] = write_corpus(tmp_path, "news", copy_task(3, 4))
    assert f"{run.path}: test set news added, 3 pairs" in make(tmp_path, tree)[1]
    assert "a" not in json.loads((run.data_dir / "corpora.json").read_text())
