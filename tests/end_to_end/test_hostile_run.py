"""Hostile run folders: every command gives a result or a one-line error."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from conftest import Cli, Outcome
from hostile import (
    TIMES,
    assert_one_line,
    assert_refused,
    bounded,
    cases,
    is_one_line,
    leftovers,
    tried,
)
from hypothesis import given
from hypothesis import strategies as st
from tasks import REPOSITORY, Said, Tree

import mtrain
from mtrain.config import config_file
from mtrain.data.arrow_shards import MANIFEST_FILE
from mtrain.errors import RunError, UserError
from mtrain.plots import collect
from mtrain.plots.draw import draw_curves, encode
from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir

PACKAGE = Path(mtrain.__file__).parent
NEWEST = "checkpoints/step-00000003"
FILES = [
    *("config.yaml", "tokenizer/shared.model", "model.safetensors", "metrics.jsonl", ".lock"),
    *("data/train-00000.arrow", "data/valid.src", "data/valid.tgt", "data/dropped.json"),
    *("data/profile.json", "data/dropped.jsonl.gz", "data/tests/held_out.src"),
    *("data/tests/held_out.tgt", "data", "data/tests", "checkpoints", "tokenizer", NEWEST),
    *(f"{NEWEST}/{part}" for part in (*checkpoint._PARTS, "checkpoint.json")),
]
JSON_FILES = ["data/dropped.json", "data/profile.json", f"{NEWEST}/checkpoint.json"]
JSON_FILES += [f"{NEWEST}/progress.json", "metrics.jsonl", "data/corpora.json"]
JSON_FILES += ["data/checksums.json"]
TENSORS = ["model.safetensors", f"{NEWEST}/model.safetensors", f"{NEWEST}/optimizer.safetensors"]
VERBS = ["translate", "eval", "score", "train", "gather", "checkpoint", "doctor"]


@contextmanager
def copied(run: RunDir) -> Iterator[RunDir]:
    """Copy a run folder for one case."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        shutil.copytree(run.path, path, symlinks=True)
        yield RunDir(path)


def check_verb(cli: Cli, run: RunDir, original: RunDir, verb: str) -> Outcome | None:
    """Run a command on a damaged run folder; assert a result or a one-line error."""
    output = run.path.parent / "out"
    output.write_bytes(b"as it was")
    if verb == "gather":
        try:
            found = collect.gather(run, None)
        except UserError as error:
            assert_one_line(error)
        else:
            assert all(is_one_line(line) for line in found.skipped)
        return None
    if verb == "doctor":
        outcome = cli("doctor", run.path, "--no-replay")
        assert outcome.code in (0, 2) and all(is_one_line(line) for line in outcome.lines), outcome
        assert outcome.lines or assert_refused(outcome)
        return outcome
    device = ["--device", "cpu"]
    arguments: dict[str, list[str | Path]] = {
        "translate": ["translate", run.path, "-o", output, *device, "--alignments", f"{output}2"],
        "checkpoint": ["translate", run.path, "-o", output, *device, "--checkpoint", "3"],
        "eval": ["eval", run.path, "-o", output, *device],
        "score": ["eval", run.path, "-o", output, *device, "--score"],
        "train": [
            *("train", original.path / "config.yaml", "--run", run.path),
            *("--set", "training.max_steps=4", "--set", "training.log_every=1"),
        ],
    }
    outcome = cli(*arguments[verb], stdin=b"ba ce\n\n\xff\x00\n")
    assert leftovers(run.path.parent) == []
    if outcome.code != 0:
        if verb == "train":
            assert outcome.code == 2
            assert_one_line(outcome.err.removesuffix("\n").split("\n")[-1])
        else:
            assert_refused(outcome)
            assert output.read_bytes() == b"as it was"
            assert not output.with_name("out2").exists()
    elif verb in ("translate", "checkpoint"):
        assert output.read_bytes().count(b"\n") == 3
        output.read_bytes().decode("utf-8")
    return outcome


def seal(folder: Path) -> None:
    """Recompute the checksums of a checkpoint from its files, as an attacker would."""
    sums = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in checkpoint._PARTS
        if (folder / name).is_file()
    }
    text = json.dumps({"format": checkpoint.FORMAT, "sha256": sums})
    (folder / "checkpoint.json").write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def damage(path: Path, draw: st.DrawFn) -> None:
    """Damage or delete a file, or replace it by a folder or a link."""
    raw = bytearray(path.read_bytes()) if path.is_file() else bytearray(b"a file")
    kinds = ["cut", "flip", "swap", "grow", "empty", "noise", "gone", "folder", "link", "loop"]
    kind = draw(st.sampled_from(kinds))
    place = draw(st.integers(0, max(0, len(raw) - 1)))
    if kind == "flip" and raw:
        for _ in range(draw(st.integers(1, 3))):
            raw[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
    if kind == "swap":
        stop = place + draw(st.integers(0, 40))
        raw[place:stop] = draw(st.binary(max_size=40))
    contents = {
        "cut": raw[:place],
        "grow": raw + draw(st.binary(max_size=20)),
        "empty": b"",
        "noise": draw(st.binary(max_size=60)),
    }
    remove(path)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind != "gone":
        path.write_bytes(contents.get(kind, raw))


@cases(25)
@given(st.data(), st.sampled_from(FILES), st.sampled_from(VERBS), st.booleans())
def test_a_damaged_file_gives_a_result_or_a_one_line_error(
    cli: Cli, noisy: RunDir, data: st.DataObject, name: str, verb: str, is_sealed: bool
) -> None:
    with copied(noisy) as run, bounded("damaged files"):
        damage(run.path / name, data.draw)
        if is_sealed and (run.path / NEWEST).is_dir() and not name.endswith("checkpoint.json"):
            seal(run.path / NEWEST)
        check_verb(cli, run, noisy, verb)


numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, -1, 10**400, -(10**400), 2**31, 2**63, 1e308, math.nan, math.inf]),
)
leaves = st.one_of(numbers, st.none(), st.booleans(), st.text(max_size=5), st.just("../../x"))
json_values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
DEEP = ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 50_000]


def change_tree(tree: Any, draw: st.DrawFn) -> Any:
    """Change a value, a key or an item somewhere in a tree."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(tree)))
        kind = draw(st.sampled_from(["value", "value", "value", "key", "gone", "extra"]))
        rest = {own: value for own, value in tree.items() if own != key}
        if kind == "value":
            return tree | {key: change_tree(tree[key], draw)}
        if kind == "key":
            return rest | {draw(st.one_of(st.text(max_size=4), st.just("\u0663"))): tree[key]}
        return rest if kind == "gone" else tree | {"extra": draw(json_values)}
    if isinstance(tree, list) and tree and draw(st.booleans()):
        place = draw(st.integers(0, len(tree) - 1))
        return [*tree[:place], change_tree(tree[place], draw), *tree[place + 1 :]]
    return draw(json_values)


@cases(25)
@given(st.data(), st.sampled_from(JSON_FILES), st.sampled_from(VERBS))
def test_any_json_gives_a_result_or_a_one_line_error(
    cli: Cli, noisy: RunDir, data: st.DataObject, name: str, verb: str
) -> None:
    with copied(noisy) as run, bounded("json"):
        path = run.path / name
        lines = path.read_text(encoding="utf-8").split("\n")
        whole = lines if name.endswith(".jsonl") else ["\n".join(lines)]
        place = data.draw(st.integers(0, len(whole) - 1))
        if whole[place]:
            tree = change_tree(json.loads(whole[place]), data.draw)
            whole[place] = data.draw(st.sampled_from([json.dumps(tree)] * 12 + DEEP))
        path.write_text("\n".join(whole), encoding="utf-8")
        if not name.endswith("checkpoint.json"):
            seal(run.path / NEWEST)
        check_verb(cli, run, noisy, verb)


CONFIG_VALUES = [0, 1, 2, -1, 3, 7, 1000, 10**6, 2**31 - 1, 2**31, 2**63, 2**64, 10**400]
CONFIG_VALUES += [0.0, -0.5, 1e-300, 1e300, 0.999, "x", "", None, True, [], {}, "../x", ["a"]]


@cases(25)
@given(st.data(), st.sampled_from(VERBS))
def test_any_value_in_the_config_of_a_run_gives_a_result_or_a_one_line_error(
    cli: Cli, noisy: RunDir, data: st.DataObject, verb: str
) -> None:
    with copied(noisy) as run, bounded("config of a run"):
        tree = yaml.safe_load(run.config_path.read_text(encoding="utf-8"))
        name = data.draw(st.sampled_from(["model", "model", "decoding", "training", "data"]))
        section = tree[name]
        key = data.draw(st.sampled_from(sorted(section)))
        section[key] = data.draw(st.one_of(st.sampled_from(CONFIG_VALUES), json_values))
        run.config_path.write_bytes(
            yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")
        )
        check_verb(cli, run, noisy, verb)


DTYPES = ["BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64"]
DTYPES += [
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "C64",
    "C128",
    "x",
    "",
    None,
]
SHAPES = [[], [0], [2**40, 0], [2**63], [2**32, 2**32], [-1], [1.5], ["1"], None, [[1]], [1] * 5000]
OFFSETS = [
    [0, 0],
    [0, 2**63],
    [2**64, 0],
    [-1, 4],
    [8, 4],
    [0],
    [0, 4, 8],
    None,
    ["0", "4"],
    [0.0, 4.0],
]
NAMES = ["../../x", "", "\0", "a/b", "src_embedding.weight.x", "\u202e", "x" * 10_000, "random.cpu"]
METADATA = [None, {}, [], {"mtrain": 1}, {"mtrain": None}, {"mtrain": ""}, {"mtrain": "{"}, "x"]


def split_tensors(raw: bytes) -> tuple[Tree, bytes]:
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def join_tensors(header: bytes, data: bytes, size: int | None = None) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header) if size is None else size) + header + data


def change_tensors(raw: bytes, draw: st.DrawFn) -> bytes:
    """Change one part of a safetensors file so that the file may still be accepted."""
    header, data = split_tensors(raw)
    name = draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
    entry = header[name]
    kinds = ["dtype", "shape", "offsets", "name", "metadata", "own", "size", "twice", "gone"]
    kind = draw(st.sampled_from([*kinds, "own", "values", "same size", "aliased", "nested"]))
    if kind == "dtype":
        entry["dtype"] = draw(st.sampled_from(DTYPES))
    elif kind == "shape":
        entry["shape"] = draw(st.one_of(st.sampled_from(SHAPES), json_values))
    elif kind == "offsets":
        entry["data_offsets"] = draw(st.one_of(st.sampled_from(OFFSETS), json_values))
    elif kind == "name":
        header[draw(st.sampled_from(NAMES))] = header.pop(name)
    elif kind == "metadata":
        header["__metadata__"] = draw(st.one_of(st.sampled_from(METADATA), json_values))
    elif kind == "own":  # the metadata that mtrain writes
        own = json.loads(header["__metadata__"]["mtrain"])
        text = json.dumps(change_tree(own, draw))
        header["__metadata__"]["mtrain"] = draw(st.sampled_from([text] * 12 + DEEP))
    elif kind == "gone":
        del header[name]
    elif kind == "values":
        noise = draw(st.sampled_from([b"\xff", b"\x00", b"\x7f", b"\x80"]))
        data = noise * len(data)
    elif kind == "same size":  # another dtype with the same number of bytes
        start, stop = entry["data_offsets"]
        width = {"I32": 4, "U8": 1, "I16": 2, "F64": 8, "I64": 8, "BOOL": 1, "C64": 8, "F8_E4M3": 1}
        entry["dtype"] = draw(st.sampled_from(sorted(width)))
        entry["shape"] = [(stop - start) // width[entry["dtype"]]]
    elif kind == "aliased":
        entry["data_offsets"] = header[
            draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
        ]["data_offsets"]
    if kind == "size":
        sizes = st.sampled_from([0, 1, 7, 2**20, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1])
        return join_tensors(json.dumps(header).encode(), data, draw(sizes))
    if kind == "twice":
        text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}"
        return join_tensors(text.encode(), data)
    if kind == "nested":
        return join_tensors(draw(st.sampled_from(DEEP)).encode(), data)
    return join_tensors(json.dumps(header).encode(), data)


@cases(25)
@given(st.data(), st.sampled_from(TENSORS), st.sampled_from(VERBS))
def test_any_tensor_file_gives_a_result_or_a_one_line_error(
    cli: Cli, noisy: RunDir, data: st.DataObject, name: str, verb: str
) -> None:
    with copied(noisy) as run, bounded("tensors"):
        path = run.path / name
        path.write_bytes(change_tensors(path.read_bytes(), data.draw))
        seal(run.path / NEWEST)
        check_verb(cli, run, noisy, verb)


def test_float32_weights_load_and_every_other_dtype_gives_a_one_line_error(
    cli: Cli, noisy: RunDir
) -> None:
    for dtype in DTYPES:
        with copied(noisy) as run, bounded("tensors"):
            header, data = split_tensors(run.model_path.read_bytes())
            for name in set(header) - {"__metadata__"}:
                header[name]["dtype"] = dtype
            run.model_path.write_bytes(join_tensors(json.dumps(header).encode(), data))
            outcome = check_verb(cli, run, noisy, "translate")
            assert outcome is not None and (outcome.code == 0) == (dtype == "F32")


ODD_STEPS = ["step-\u0663", "step-3", "step-000000003", "step--0000003", "step-", "step-0x3"]
ODD_STEPS += ["step-1e3", "step- 3", "step-00000009 ", "step-\u00b2", "step-..", "Step-00000009"]


@pytest.mark.parametrize("name", ODD_STEPS, ids=ascii)
@pytest.mark.parametrize("verb", ["train", "checkpoint"])
def test_a_folder_with_a_malformed_step_name_is_not_a_checkpoint_and_is_kept(
    cli: Cli, noisy: RunDir, name: str, verb: str
) -> None:
    with copied(noisy) as run, bounded("step folders"):
        odd = run.checkpoints_dir / name
        shutil.copytree(run.path / NEWEST, odd)
        outcome = check_verb(cli, run, noisy, verb)
        assert outcome is not None and outcome.code == 0
        assert len(list(odd.iterdir())) == 4
        assert max(checkpoint.steps(run.checkpoints_dir)) == (4 if verb == "train" else 3)


def test_a_checkpoint_in_the_folder_of_another_step_is_refused(cli: Cli, noisy: RunDir) -> None:
    for step in ("99999999999999999999", "00000009"):
        with copied(noisy) as run, bounded("step folders"):
            shutil.copytree(run.path / NEWEST, run.checkpoints_dir / f"step-{step}")
            outcome = check_verb(cli, run, noisy, "train")
            assert outcome is not None and "`step` must be that of its folder" in outcome.err


def test_a_second_damaged_checkpoint_of_a_step_is_set_aside_too(cli: Cli, noisy: RunDir) -> None:
    with copied(noisy) as run, bounded("step folders"):
        for _ in range(3):
            shutil.copytree(noisy.path / NEWEST, run.path / NEWEST, dirs_exist_ok=True)
            (run.path / NEWEST / "progress.json").write_bytes(b"{}")
            assert checkpoint.newest_whole(run.checkpoints_dir, Said().say) is not None
        assert len(list(run.checkpoints_dir.glob("damaged-step-*"))) == 3


def test_a_pipe_or_device_in_a_run_folder_is_refused(cli: Cli, noisy: RunDir) -> None:
    with copied(noisy) as run:
        model = run.tokenizer_dir / "shared.model"
        model.unlink()
        os.mkfifo(model)
        with pytest.raises(RunError, match=r"shared\.model: must be a file, but is a pipe"):
            _ = run.config
    with copied(noisy) as run:
        run.metrics_path.unlink()
        run.metrics_path.symlink_to(os.devnull)
        refused = f"{run.metrics_path}: must be a file, but is a pipe or a device instead."
        for command in (["doctor", run.path], ["train", noisy.config_path, "--run", run.path]):
            assert cli(*command).err == f"mtrain: {refused}\n"


def test_tokenizing_does_not_empty_a_folder_that_a_link_in_the_run_folder_names(
    cli: Cli, noisy: RunDir, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was", encoding="utf-8")
    with copied(noisy) as run:
        shutil.rmtree(run.data_dir)
        (run.path / ".tokenizing").symlink_to(tmp_path)
        assert_refused(cli("tokenize", noisy.config_path, "--run", run.path))
    assert [*tmp_path.iterdir()] == [precious]


def test_a_folder_that_is_no_run_is_not_searched_for_pipes(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "other" / "pipe")
    with pytest.raises(RunError, match=r"must be a run folder, but has no config\.yaml"):
        RunDir(tmp_path).check_exists()


def test_pruning_checkpoints_does_not_follow_links_out_of_the_run_folder(
    cli: Cli, noisy: RunDir
) -> None:
    with copied(noisy) as run, bounded("links"):
        outside = run.path.parent / "outside"
        shutil.copytree(run.path / NEWEST, outside)
        for step in (1, 2, 5):
            link = run.checkpoints_dir / f"step-{step:08d}"
            remove(link)
            link.symlink_to(outside, target_is_directory=True)
        outcome = check_verb(cli, run, noisy, "train")
        assert outcome is not None and outcome.code == 0
        assert len(list(outside.iterdir())) == 4
        assert sorted(checkpoint.steps(run.checkpoints_dir)) == [3, 4]


IDS = pa.list_(pa.int32())
TABLE = {
    "src": pa.array([[4, 5, 3], [6, 3]], IDS),
    "tgt": pa.array([[4], []], IDS),
    "src_length": pa.array([3, 2], pa.int32()),
    "tgt_length": pa.array([2, 1], pa.int32()),
}
CHANGES: dict[str, dict[str, Any]] = {
    "an id beyond the pieces": {"src": pa.array([[4, 285, 3], [6, 3]], IDS)},
    "a negative id": {"tgt": pa.array([[-1], []], IDS)},
    "ids that are missing": {"src": pa.array([[4, None, 3], [6, 3]], IDS)},
    "a row that is missing": {"src": pa.array([[4, 5, 3], None], IDS)},
    "a length that is none": {"src_length": pa.array([3, 2**31 - 1], pa.int32())},
    "a length that is missing": {"tgt_length": pa.array([None, 1], pa.int32())},
    "a negative length": {"tgt_length": pa.array([2, -1], pa.int32())},
    "ids of another type": {"src": pa.array([[4, 5, 3], [6, 3]], pa.list_(pa.int64()))},
    "text": {"src": pa.array(["4 5 3", "6 3"])},
    "no column of targets": {"tgt": None},
    "no pairs": {name: column[:0] for name, column in TABLE.items()},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_invalid_table_of_pairs_is_refused_in_one_line(
    cli: Cli, noisy: RunDir, change: dict[str, Any]
) -> None:
    columns = {name: column for name, column in (TABLE | change).items() if column is not None}
    assert_table(cli, noisy, pa.table(columns), is_whole=False)


@pytest.mark.parametrize(
    "metadata", [None, {"huggingface": "{"}, {"huggingface": '{"info": 1}'}, {"pandas": "x"}]
)
def test_the_schema_metadata_of_a_table_of_pairs_is_ignored(
    cli: Cli, noisy: RunDir, metadata: dict[str, str] | None
) -> None:
    assert_table(cli, noisy, pa.table(TABLE).replace_schema_metadata(metadata), is_whole=True)


@pytest.mark.parametrize(
    "offsets",
    [[0, 2**30, 2**31 - 1], [0, 5, 2**31 - 1], [5, -9, 2], [0, -1, 5], [-(2**31), 3, 5], [3, 3, 5]],
    ids=str,
)
def test_a_table_of_pairs_with_invalid_list_offsets_is_refused_in_one_line(
    cli: Cli, noisy: RunDir, offsets: list[int]
) -> None:
    wanted, lying = struct.pack("<3i", 0, 3, 5), struct.pack("<3i", *offsets)
    assert_table(cli, noisy, pa.table(TABLE), is_whole=False, change=(wanted, lying))


def test_a_missing_id_that_is_in_no_row_of_a_table_is_refused_in_one_line(
    cli: Cli, noisy: RunDir
) -> None:
    columns = {
        "src": pa.array([[None, 5, 3], [6, 3]], IDS),
        "src_length": pa.array([2, 2], pa.int32()),
    }
    wanted, lying = struct.pack("<3i", 0, 3, 5), struct.pack("<3i", 1, 3, 5)
    table = pa.table(TABLE | columns)
    assert_table(cli, noisy, table, is_whole=False, change=(wanted, lying))


def assert_table(
    cli: Cli,
    noisy: RunDir,
    table: pa.Table,
    is_whole: bool,
    change: tuple[bytes, bytes] = (b"", b""),
) -> None:
    with copied(noisy) as run, bounded("tables"):
        with pa.ipc.new_stream(str(run.data_dir / "train-00000.arrow"), table.schema) as stream:
            stream.write_table(table)
        if is_whole:  # the manifest must match the shard
            manifest = json.loads((run.data_dir / MANIFEST_FILE).read_text("utf-8"))
            manifest["shards"] = [
                {"corpus": 0, "num_pairs": 2, "num_src_tokens": 5, "num_tgt_tokens": 3}
            ]
            manifest["corpora"][0]["lengths"] = [0, 0, 1, 1]
            (run.data_dir / MANIFEST_FILE).write_text(json.dumps(manifest), "utf-8")
        raw = (run.data_dir / "train-00000.arrow").read_bytes()
        assert not change[0] or raw.count(change[0]) == 1
        (run.data_dir / "train-00000.arrow").write_bytes(raw.replace(*change) if change[0] else raw)
        check_verb(cli, run, noisy, "gather")
        outcome = check_verb(cli, run, noisy, "train")
        assert outcome is not None and (outcome.code == 0) == is_whole
        assert is_whole or "train-00000.arrow: must be a whole table of pairs" in outcome.err


TAGS = [
    "!!python/object/apply:os.system",
    "!!python/object/new:os.system",
    "!!python/name:os.system",
]
TAGS += [
    "!!python/object/apply:subprocess.check_output",
    "!<tag:yaml.org,2002:python/object/apply:os.system>",
]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("verb", ["translate", "eval", "train", "gather"])
def test_a_command_in_a_config_is_never_run(
    cli: Cli, noisy: RunDir, tag: str, verb: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    with copied(noisy) as run, bounded("tags"):
        text = run.config_path.read_text(encoding="utf-8")
        command = f"seed: {tag} ['touch {trace}']"
        run.config_path.write_text(text.replace("seed: 1", command), encoding="utf-8")
        assert command in run.config_path.read_text(encoding="utf-8")
        outcome = check_verb(cli, run, noisy, verb)
        assert verb == "gather" or (outcome is not None and "must have no YAML tag" in outcome.err)
        assert not trace.exists()


def test_a_pickle_in_place_of_any_file_is_never_unpickled(
    cli: Cli, noisy: RunDir, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    for name in FILES:
        verb = "eval" if "tests" in name else "train" if "/" in name else "translate"
        with copied(noisy) as run, bounded("pickles"):
            if (run.path / name).is_file():
                (run.path / name).write_bytes(pickle.dumps(_Touch(trace)))
                seal(run.path / NEWEST)
                check_verb(cli, run, noisy, verb)
    assert not trace.exists()
    pickle.loads(pickle.dumps(_Touch(trace)))
    assert trace.exists()


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix()
)
def test_no_module_calls_a_function_that_executes_code_from_a_file(path: Path) -> None:
    forbidden = {"eval", "exec", "compile", "torch.load", "numpy.load", "np.load", "os.system"}
    forbidden |= {"yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "importlib.import_module"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert {ast.unparse(call.func) for call in calls} & forbidden == set()
    if path.name not in ("native.py", "device.py"):  # the compiled operations, and the C library
        assert "CDLL" not in ast.unparse(tree)
    loads = [ast.unparse(call) for call in calls if ast.unparse(call.func) == "yaml.load"]
    assert loads == (["yaml.load(text, Loader=_Loader)"] if path.name == "config_file.py" else [])
    assert issubclass(config_file._Loader, yaml.SafeLoader)


def test_a_damaged_tokenizer_never_crashes_the_process(noisy: RunDir) -> None:
    """Runs in a subprocess, because SentencePiece is C++ and could crash it."""
    script, count = REPOSITORY / "tests" / "hostile_tokenizers.py", 100 * TIMES
    model = noisy.tokenizer_dir / "shared.model"
    command = [sys.executable, str(script), str(model), str(count)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    tried["tokenizers"] += count


@cases(4)  # the first one is the simplest
@given(st.data())
def test_any_metrics_are_drawn_or_give_a_one_line_error(noisy: RunDir, data: st.DataObject) -> None:
    with copied(noisy) as run, bounded("curves"):
        lines = run.metrics_path.read_text(encoding="utf-8").splitlines()
        for place in data.draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=4)):
            lines[place] = json.dumps(change_tree(json.loads(lines[place]), data.draw))
        run.metrics_path.write_text("\n".join(lines), encoding="utf-8")
        try:
            curves = collect.read_curves(run, [])
        except UserError as error:
            assert_one_line(error)
        else:
            drawn = encode(lambda: draw_curves(curves, "x", 0.1))
            assert drawn["png"].startswith(b"\x89PNG")
