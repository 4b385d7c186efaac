"""All corpus formats give the same pairs; a malformed row is reported with its file and row."""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import yaml
from conftest import Cli
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled, RevisionNotFoundError
from pyarrow import parquet
from tasks import REPOSITORY, Pair, Tree, copy_task, reverse_task, tiny_tree, write_config

from mtrain.config import config_file
from mtrain.config.corpora import Corpus
from mtrain.config.sections import Config, DataConfig
from mtrain.corpus import formats, reader
from mtrain.corpus.reader import Reader, size_of
from mtrain.data import arrow_shards, prepare
from mtrain.errors import ConfigError, DataError
from mtrain.io.lines import ignore
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece

Form = Callable[[Path, str, list[Pair]], Tree]
FIELDS = {"src": "translation.aa", "tgt": "translation.bb"}


def rows(pairs: list[Pair]) -> list[Tree]:
    return [{"id": n, "translation": {"aa": p.src, "bb": p.tgt}} for n, p in enumerate(pairs)]


def write_jsonl(path: Path, pairs: list[Pair]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(pairs)), "utf-8")
    return str(path)


def write_parquet(path: Path, pairs: list[Pair]) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows(pairs)), path, row_group_size=50)
    return str(path)


def as_tsv(directory: Path, name: str, pairs: list[Pair]) -> Tree:
    half = len(pairs) // 2
    lines = [f"{src}\t{tgt}\n".encode() for src, tgt in pairs]
    (directory / f"{name}.1.tsv").write_bytes(b"".join(lines[:half]))
    (directory / f"{name}.2.tsv.gz").write_bytes(gzip.compress(b"".join(lines[half:])))
    return {"tsv": [str(directory / f"{name}.1.tsv"), str(directory / f"{name}.2.tsv.gz")]}


def as_columns(directory: Path, name: str, pairs: list[Pair]) -> Tree:
    text = "".join(f"{tgt}\t{number}\t{src}\r\n" for number, (src, tgt) in enumerate(pairs))
    path = directory / f"{name}.tsv"
    path.write_bytes(text.encode())
    return {"tsv": [str(path)], "columns": [3, 1]}


def as_header(directory: Path, name: str, pairs: list[Pair]) -> Tree:
    half = len(pairs) // 2
    paths = [directory / f"{name}.{number}.tsv" for number in (1, 2)]
    for path, part in zip(paths, (pairs[:half], pairs[half:]), strict=True):
        path.write_text("source\ttarget\n" + "".join(f"{src}\t{tgt}\n" for src, tgt in part))
    return {"tsv": [str(path) for path in paths], "header": True}


def as_jsonl(directory: Path, name: str, pairs: list[Pair]) -> Tree:
    path = write_jsonl(directory / f"{name}.jsonl", pairs)
    Path(f"{path}.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
    return {"jsonl": [f"{path}.gz"], **FIELDS}


def as_parquet(directory: Path, name: str, pairs: list[Pair]) -> Tree:
    half = len(pairs) // 2
    parts = [pairs[:half], pairs[half:]]
    paths = [write_parquet(directory / f"{name}.{n}.parquet", p) for n, p in enumerate(parts)]
    return {"parquet": paths, **FIELDS}


def as_hub(write: Callable[[Path, list[Pair]], str], streaming: bool) -> Form:
    """Write a folder as on the hub: data files, and a dataset card that lists them."""

    def make(directory: Path, name: str, pairs: list[Pair]) -> Tree:
        folder = directory / f"{name}-set"
        (folder / "aa-bb").mkdir(parents=True)
        file = Path(write(folder / "aa-bb" / f"part.{write.__name__[6:]}", pairs))
        files = [{"split": "train", "path": str(file.relative_to(folder))}]
        card = {"configs": [{"config_name": "aa-bb", "data_files": files}]}
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n# A set\n", "utf-8")
        named = {"hub": str(folder), "config": "aa-bb", "split": "train", **FIELDS}
        return named | {"streaming": streaming}

    return make


FORMS: dict[str, Form] = {
    "tsv": as_tsv,
    "columns": as_columns,
    "header": as_header,
    "jsonl": as_jsonl,
    "parquet": as_parquet,
    "hub-parquet": as_hub(write_parquet, streaming=False),
    "hub-parquet-streamed": as_hub(write_parquet, streaming=True),
    "hub-jsonl": as_hub(write_jsonl, streaming=False),
    "hub-jsonl-streamed": as_hub(write_jsonl, streaming=True),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


@pytest.fixture(autouse=True)
def without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to the hub from this process reach a closed port; its cache is empty."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    formats._resolve.cache_clear()


def corpus_of(tree: Tree) -> Corpus:
    """Validate a corpus as the config does."""
    named = {"src": ["a"], "tgt": ["b"]}
    data = {"src_lang": "aa", "tgt_lang": "bb", "train": tree, "valid": named}
    return DataConfig.model_validate(data).train


def config_with(directory: Path, form: Form) -> Path:
    """Write a task with all corpora in this format; return the path of its config."""
    tree = tiny_tree(directory)
    data = tree["data"]
    data["train"] = form(directory, "train", reverse_task(200, 1))
    data["valid"] = form(directory, "valid", reverse_task(12, 2))
    data["tests"] = {"held_out": form(directory, "test", reverse_task(40, 3))}
    return write_config(directory / "config.yaml", tree)


def message(tree: Tree) -> str:
    with pytest.raises(DataError) as error:
        list(reader.read_pairs(corpus_of(tree)))
    return str(error.value)


def stored(run: RunDir) -> dict[str, bytes]:
    """Return the data files and the tokenizer of a run folder, without the corpus records."""
    origin = ("corpora.json", "checksums.json")
    files = (path for path in sorted(run.data_dir.rglob("*")) if path.is_file())
    found = {path.name: path.read_bytes() for path in files if path.name not in origin}
    return found | {"model": (run.tokenizer_dir / "shared.model").read_bytes()}


@each_form
def test_every_corpus_format_gives_the_same_data_and_tokenizer_as_plain_text_files(
    cli: Cli, tmp_path: Path, form: Form
) -> None:
    for name in ("plain", "other"):
        (tmp_path / name).mkdir()
    plain = write_config(tmp_path / "p.yaml", tiny_tree(tmp_path / "plain", reverse_task))
    other = config_with(tmp_path / "other", form)
    assert cli("tokenize", plain).code == 0
    outcome = cli("tokenize", other)
    assert outcome.code == 0, outcome.err
    runs = [RunDir(tmp_path / name / "run") for name in ("plain", "other")]
    assert stored(runs[0]) == stored(runs[1])
    config = config_file.load(other)
    assert runs[1].config == config
    marked = set(prepare.read_marks(runs[1]))
    assert marked == {path for own in corpora(config) for path in formats.paths_of(own)}
    assert all(Path(path).is_file() for path in marked) and marked


def corpora(config: Config) -> list[Corpus]:
    return [config.data.train, config.data.valid, *config.data.tests.values()]


@each_form
def test_check_and_train_accept_every_corpus_format(cli: Cli, tmp_path: Path, form: Form) -> None:
    config = config_with(tmp_path, form)
    outcome = cli("check", config, "--json")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert [own["num_pairs"] for own in report["corpora"]] == [200, 12, 40]
    held = next(found for found in report["findings"] if found["name"] == "held-out-pair")
    line = held["examples"][0]["line"]
    first_line = 2 if form is as_header else 1
    assert held["examples"][0]["src"] == reverse_task(200, 1)[line - first_line].src
    outcome = cli("train", config, "--set", "training.max_steps=2")
    assert outcome.code == 0, outcome.err
    assert "pairs    200 for training, dropped 0," in outcome.err


@each_form
def test_the_reader_counts_the_pairs_and_reports_the_bytes_of_every_corpus_format(
    tmp_path: Path, form: Form
) -> None:
    own = corpus_of(form(tmp_path, "corpus", copy_task(5000, 1)))
    told: list[int] = []
    intake = Reader(own)
    found = [pair for b in intake.blocks(told.append) for pair in zip(b.src, b.tgt, strict=True)]
    assert found == copy_task(5000, 1)
    assert intake.num_pairs == 5000
    assert sum(told) == size_of(own) > 0


@each_form
def test_tokenize_refuses_a_changed_corpus_file_of_every_format(
    cli: Cli, tmp_path: Path, form: Form
) -> None:
    config = config_with(tmp_path, form)
    assert cli("tokenize", config).code == 0
    path = Path(formats.paths_of(config_file.load(config).data.train)[-1])
    path.write_bytes(path.read_bytes() + b"\n")
    outcome = cli("tokenize", config)
    assert (outcome.code, "has changed since" in outcome.err) == (2, True)


def test_a_file_that_is_added_to_a_local_dataset_folder_is_reported_as_a_changed_file_is(
    cli: Cli, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path)
    make = as_hub(write_jsonl, streaming=False)
    tree["data"]["train"] = make(tmp_path, "train", reverse_task(200, 1))
    folder = Path(tree["data"]["train"]["hub"])
    tree["run_dir"] = str(folder / "run")  # its files are not the data set's
    config, run = write_config(tmp_path / "config.yaml", tree), RunDir(folder / "run")
    assert cli("tokenize", config).code == 0
    assert cli("tokenize", config).code == 0
    path, part = folder / "aa-bb" / "more.jsonl", folder / "aa-bb" / "part.jsonl"
    said = f"{path}: was added since {run.path} was tokenized; choose another --run, or delete "
    for add in (lambda: part.rename(path), lambda: shutil.copy(path, part)):
        add()
        outcome = cli("train", config)
        assert (outcome.code, outcome.err) == (2, f"mtrain: {said}this run folder.\n")
    path.rename(tmp_path / path.name)
    assert cli("train", config, "--set", "training.max_steps=2").code == 0
    (tmp_path / path.name).rename(path)
    for _ in range(2):
        outcome = cli("train", config, "--set", "training.max_steps=4")
        assert outcome.code == 0
        assert (
            f"changed  {path}: is new in its folder; the training goes on with the pairs as they "
            "were tokenized"
        ) in outcome.err.splitlines()
    lines = map(json.loads, run.metrics_path.read_text("utf-8").splitlines())
    (changed,) = [line["changed_corpora"] for line in lines if "changed_corpora" in line]
    assert changed == {str(path): [None, hashlib.sha256(path.read_bytes()).hexdigest()]}


# Errors


@pytest.mark.parametrize(
    ("raw", "columns", "said"),
    [
        (
            b"a\tb\nc\n",
            None,
            "2: must have 2 columns, source TAB target (or `columns` must name two), but has 1 "
            "instead.",
        ),
        (
            b"a\tb\tc\n",
            None,
            "1: must have 2 columns, source TAB target (or `columns` must name two), but has 3 "
            "instead.",
        ),
        (b"a\tb\tc\na\tb\n", [1, 3], "2: must have at least 3 columns, but has 2 instead."),
        (b"a\tb\nc\t\xffd\n", None, "2: must be UTF-8, but has byte 0xff at byte 3 of the line."),
    ],
)
def test_a_malformed_tsv_line_is_reported_with_its_line_number(
    tmp_path: Path, raw: bytes, columns: list[int] | None, said: str
) -> None:
    (tmp_path / "a.tsv").write_bytes(raw)
    tree = {"tsv": [str(tmp_path / "a.tsv")], "columns": columns}
    assert message(tree) == f"{tmp_path / 'a.tsv'}:{said}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            b"{'s': 1}",
            "must be JSON, but is not: Expecting property name enclosed in double quotes, "
            "at character 2.",
        ),
        (b"", "must be JSON, but is not: Expecting value, at character 1."),
        (b"[1]", "must be a JSON object, but is not."),
        (b"[" * 100_000, "must be JSON, but is not: "),
        (b'{"s": "a"}', "must have `t.x`, but has s instead."),
        (b'{"s": "a", "t": "b"}', "must have `t.x`, but has s, t instead."),
        (b'{"s": "a", "t": {"y": 1, "z": 2}}', "must have `t.x`, but has s, t.y, t.z instead."),
        (b"{}", "must have `s`, but has no fields instead."),
        (b'{"s": "a", "\\n": 1}', "must have `t.x`, but has s, \\n instead."),
        (b'{"s": "a", "t": {"x": null}}', "`t.x` must be text, but is null instead."),
        (b'{"s": 3, "t": {"x": "b"}}', "`s` must be text, but is 3 instead."),
        (b'{"s": "\\ud800", "t": {"x": "b"}}', "`s` must be text, but has half of a surrogate"),
        (b'{"s": "\xff"}', "must be UTF-8, but has byte 0xff at byte 8 of the line."),
    ],
)
def test_a_malformed_jsonl_line_is_reported_with_its_line_number(
    tmp_path: Path, line: bytes, said: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"s": "a", "t": {"x": "b"}}\n' + line + b"\n")
    found = message({"jsonl": [str(path)], "src": "s", "tgt": "t.x"})
    assert found.startswith(f"{path}:2: {said}")


def test_faulty_parquet_rows_columns_and_files_are_reported_with_their_path(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    tree = {"parquet": [path], "src": "s", "tgt": "t"}
    parquet.write_table(pyarrow.table({"s": ["a", "b"], "t": ["c", None], "u": [1, 2]}), path)
    assert message(tree) == f"{path}: row 2: `t` must be text, but is null instead."
    assert message(tree | {"tgt": "u"}) == f"{path}: row 1: `u` must be text, but is 1 instead."
    assert message(tree | {"tgt": "x.y"}) == (
        f"{path}: must have a column `x`, but has s, t, u instead."
    )
    raw = Path(path).read_bytes()
    Path(path).write_bytes(raw[: len(raw) // 2])
    assert message(tree).startswith(f"{path}: must be a whole Parquet file, but: ")
    Path(path).unlink()
    assert message(tree) == f"{path}: cannot be read: No such file or directory."


def test_the_uri_of_a_parquet_file_is_not_taken_for_its_path(tmp_path: Path) -> None:
    uri = Path(write_parquet(tmp_path / "a.parquet", copy_task(3, 1))).as_uri()
    assert message({"parquet": [uri], **FIELDS}) == (
        f"{uri}: cannot be read: No such file or directory."
    )


def test_a_field_whose_name_has_a_dot_is_read_before_a_field_of_a_nested_object(
    tmp_path: Path,
) -> None:
    flat = {FIELDS["src"]: "a", FIELDS["tgt"]: "NA", "translation": {"aa": "x", "bb": "y"}}
    nested = {"translation.cc": "a", "translation": {"aa": "b", "bb": "c"}}
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.csv").write_text(f"{FIELDS['src']},{FIELDS['tgt']}\na,NA\n")
    for name, row, pair in (("flat", flat, ("a", "NA")), ("nested", nested, ("b", "c"))):
        jsonl, table = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.parquet"
        jsonl.write_text(json.dumps(row) + "\n")
        parquet.write_table(pyarrow.Table.from_pylist([row]), table)
        trees = [{"jsonl": [str(jsonl)]}, {"parquet": [str(table)]}]
        if name == "flat":
            trees.append({"hub": str(folder), "split": "train"})
        for tree in trees:
            (found,) = reader.read_pairs(corpus_of(tree | FIELDS))
            assert (found.src, found.tgt) == pair


def test_a_wrong_column_split_config_or_revision_of_a_dataset_is_named_in_the_error(
    tmp_path: Path,
) -> None:
    tree = as_hub(write_parquet, streaming=True)(tmp_path, "x", copy_task(3, 1))
    name = f"{tree['hub']}/aa-bb/train"
    assert message(tree | {"tgt": "text"}) == (
        f"{name}: must have a column `text`, but has id, translation instead."
    )
    assert message(tree | {"tgt": "id"}) == (f"{name}: row 1: `id` must be text, but is 0 instead.")
    said = message(tree | {"split": "dev"})
    assert said.startswith(f"{tree['hub']}/aa-bb/dev: cannot be loaded as a data set: ")
    assert "['train']" in said and "\n" not in said
    said = message(tree | {"config": "zz"})
    assert "cannot be loaded as a data set: BuilderConfig 'zz' not found" in said
    assert message(tree | {"revision": "main"}) == (
        f"{name}: must have no `revision`, for it is a local folder, but has 'main'; leave it out."
    )


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"train-0.jsonl": '{"s": "a", "t": "b"}\n', "train-1.jsonl": '{"s": "a", "n": 1}\n'},
            "its files must have the same columns, but only some have n.",
        ),
        (
            {"train-0.jsonl": '{"s": "a", "t": "b"}\n{"s'},
            "JSON parse error: Missing a closing quotation mark in string. in row 1.",
        ),
        ({"train.jsonl": ""}, "its first file is empty."),
        (
            {
                "a.csv": "s,t\na,b\n",
                "README.md": "---\nconfigs:\n- {config_name: x, data_files: a.csv}\n"
                "- {config_name: y, data_files: a.csv}\n---\n",
            },
            "Config name is missing. Please pick one among the available configs: ['x', 'y']",
        ),
    ],
)
def test_the_cause_is_named_if_a_dataset_cannot_be_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    said: str,
    is_local: bool,
) -> None:
    folder, loaded = tmp_path / "set", datasets.load_dataset
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    if not is_local:

        def load(name: str, *arguments: str, revision: str, **options: Any) -> Any:
            return loaded(str(folder), *arguments, **options)

        monkeypatch.setattr(datasets, "load_dataset", load)
        monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **options: SimpleNamespace(sha="a"))
    hub = str(folder) if is_local else "some/set"
    found = message({"hub": hub, "split": "train", "src": "s", "tgt": "t"})
    assert found.startswith(f"{hub}/train: cannot be loaded as a data set: {said}")
    assert "\n" not in found


@pytest.mark.parametrize("separator", [",", "\t"])
def test_cells_of_a_local_csv_are_text_whatever_they_look_like(
    tmp_path: Path, separator: str
) -> None:
    path = tmp_path / "set" / ("train.csv" if separator == "," else "train.tsv")
    path.parent.mkdir()
    corpus = corpus_of({"hub": str(path.parent), "split": "train", "src": "s", "tgt": "t"})

    def read(*rows: list[str]) -> list[formats.Row | formats.Fault]:
        path.write_text("".join(f"{separator.join(row)}\n" for row in rows))
        return list(formats.table_readers(corpus)[0].read(ignore, None))

    found = read(["s", "t", "u"], ['"a , b"', "None", "1"], ["NA", "1.0", ""], ["nan", " ", "x"])
    assert found == [("a , b", "None", 0), ("NA", "1.0", 0), ("nan", " ", 0)]
    assert read(["s", "t"], ["1", "2"], ["3", ""]) == [("1", "2", 0), ("3", "", 0)]


@pytest.mark.parametrize("rows", [slice(3), slice(2, None), slice(1, 4), slice(3, 9), slice(None)])
def test_a_slice_of_a_local_dataset_has_these_rows(tmp_path: Path, rows: slice) -> None:
    pairs = copy_task(5, 1)
    tree = as_hub(write_parquet, streaming=False)(tmp_path, "x", pairs)
    split = f"train[{'' if rows.start is None else rows.start}:{rows.stop or ''}]"
    read = reader.read_pairs(corpus_of(tree | {"split": split}))
    assert [(pair.src, pair.tgt) for pair in read] == pairs[rows]


@pytest.mark.parametrize("form", ["src", "tsv", "jsonl"])
def test_a_pipe_is_refused_as_a_corpus_and_not_opened(tmp_path: Path, form: str) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.write_text("a\n")
    trees: dict[str, Tree] = {
        "src": {"src": [str(file)], "tgt": [str(pipe)]},
        "tsv": {"tsv": [str(pipe)]},
        "jsonl": {"jsonl": [str(pipe)], "src": "a", "tgt": "b"},
    }
    assert message(trees[form]) == (
        f"{pipe}: must be a regular file, for it is read several times, but is a pipe or a device "
        "instead; write its text into a file."
    )


@pytest.mark.parametrize("form", ["src", "tsv", "parquet", "hub"])
def test_a_path_that_cannot_be_looked_up_is_named_by_tokenize_and_check(
    cli: Cli, tmp_path: Path, form: str
) -> None:
    """As without the right to search its folder, which does not stop root."""
    path = str(tmp_path / ("x" * 300))
    fields = {"src": "a", "tgt": "b"}
    trees: dict[str, Tree] = {
        "src": {"src": [path], "tgt": [path]},
        "tsv": {"tsv": [path]},
        "parquet": {"parquet": [path], **fields},
        "hub": {"hub": path, "split": "train", **fields},
    }
    tree = tiny_tree(tmp_path)
    tree["data"]["train"] = trees[form]
    config = write_config(tmp_path / "config.yaml", tree)
    outcome = cli("tokenize", config)
    problem = "must be a folder, or" if form == "hub" else "cannot be read: "
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.startswith(f"mtrain: {path}: {problem}")
    assert form == "hub" or "File name too long" in outcome.err
    outcome = cli("check", config, "--json")
    assert outcome.code == 2, outcome.err
    findings = json.loads(outcome.out)["findings"]
    (found,) = [found for found in findings if found["name"] == "unreadable"]
    assert found["examples"][0]["file"].startswith(path)


def test_python_code_that_comes_with_a_dataset_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "set.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    tree = {"hub": str(folder), "split": "train", "src": "a", "tgt": "b"}
    assert "cannot be loaded as a data set: " in message(tree)
    assert not (tmp_path / "ran").exists()
    assert "trust_remote_code" not in Path(formats.__file__).read_text(encoding="utf-8")


TOKENIZE_AND_CHECK = """
import sys
from mtrain.cli.main import main
for verb in ("tokenize", "check"):
    sys.argv = ["mtrain", verb, sys.argv[-1]]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
"""


@pytest.mark.parametrize(
    "closed", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}], ids=lambda e: str(e)
)
def test_an_unreachable_hub_is_a_one_line_error_that_suggests_local_files(
    tmp_path: Path, closed: dict[str, str]
) -> None:
    tree = tiny_tree(tmp_path)
    tree["data"]["train"] = {"hub": "nobody/nothing", "split": "train", "src": "a", "tgt": "b"}
    config = write_config(tmp_path / "config.yaml", tree)
    environment = os.environ | closed | {"HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", TOKENIZE_AND_CHECK, str(config)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert result.returncode == 0, result.stderr
    by_tokenize, _ = result.stderr.splitlines()
    for said in (by_tokenize, " ".join(result.stdout.split())):
        assert "nobody/nothing" in said
        assert "cannot be reached (" in said
        assert "`parquet:` or `jsonl:`" in said


@pytest.mark.parametrize("hub", ["/no/such/folder", "../x", "a b"])
def test_a_missing_local_folder_is_not_looked_up_on_the_hub(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    said = message({"hub": hub, "split": "train", "src": "a", "tgt": "b"})
    assert said == (
        f"{hub}: must be a folder, or a data set of the Hugging Face hub that you may read, but is "
        "neither."
    )


def test_a_revision_that_a_hub_dataset_lacks_is_named_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def info(*_: object, **options: Any) -> Any:
        response: Any = SimpleNamespace(headers={}, request=None)
        raise RevisionNotFoundError("404 Client Error", response=response)

    monkeypatch.setattr(HfApi, "dataset_info", info)
    tree = {"hub": "some/set", "split": "train", "revision": "mian", **FIELDS}
    assert message(tree) == (
        "some/set: `revision` must be a branch, a tag or a commit of this data set, but is 'mian' "
        "instead."
    )


def test_every_read_of_a_hub_dataset_uses_the_commit_recorded_in_the_run_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = as_hub(write_jsonl, streaming=False)(tmp_path, "x", copy_task(200, 1))
    loaded, asked = datasets.load_dataset, []

    def load(name: str, *arguments: str, **options: Any) -> Any:
        asked.append((name, options.pop("revision")))
        return loaded(local["hub"], *arguments, **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    commits = iter(["abc123", "def456"])

    def info(api: object, name: str, **options: Any) -> Any:
        return SimpleNamespace(sha=next(commits))

    monkeypatch.setattr(HfApi, "dataset_info", info)
    tree = tiny_tree(tmp_path)
    tree["data"]["train"] = local | {"hub": "some/set"}
    outcome = cli("tokenize", write_config(tmp_path / "config.yaml", tree))
    assert outcome.code == 0, outcome.err
    run = RunDir(tmp_path / "run")
    marks = json.loads((run.data_dir / "corpora.json").read_text("utf-8"))
    assert marks["some/set/aa-bb/train"] == {"revision": "abc123"}
    assert len(asked) == 3
    assert set(asked) == {("some/set", "abc123")}
    assert "some/set/aa-bb/train" not in prepare.read_marks(run)
    assert cli("tokenize", tmp_path / "config.yaml").code == 0


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_local_dataset_folder_is_read_again_after_its_files_changed(
    tmp_path: Path, write: Callable[[Path, list[Pair]], str]
) -> None:
    for seed in (1, 2):
        shutil.rmtree(tmp_path / "x-set", ignore_errors=True)
        tree = as_hub(write, streaming=False)(tmp_path, "x", copy_task(20, seed))
        found = [pair.src for pair in reader.read_pairs(corpus_of(tree))]
        assert found == [pair.src for pair in copy_task(20, seed)]


@pytest.mark.parametrize(
    ("revision", "expected"),
    [(None, formats.OFFLINE), ("main", formats.OFFLINE), ("0a" * 20, "0a" * 20)],
)
def test_offline_only_a_revision_that_is_a_commit_is_recorded_as_one(
    monkeypatch: pytest.MonkeyPatch, revision: str | None, expected: str
) -> None:
    def info(*_: object, **options: Any) -> Any:
        raise OfflineModeIsEnabled

    monkeypatch.setattr(HfApi, "dataset_info", info)
    corpus = corpus_of({"hub": "cached/set", "split": "train", "revision": revision, **FIELDS})
    assert formats.revision_of(corpus) == {"cached/set/train": expected}


def test_a_hub_dataset_with_a_new_commit_after_an_interrupt_is_tokenized_from_the_start(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {}
    for commit, seed in (("abc123", 1), ("def456", 2)):
        texts[commit] = as_hub(write_jsonl, False)(tmp_path, commit, copy_task(200, seed))
    loaded, commits = datasets.load_dataset, iter(["abc123", "abc123", "def456"])

    def load(name: str, *arguments: str, revision: str, **options: Any) -> Any:
        return loaded(texts[revision]["hub"], *arguments, **options)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(
        HfApi, "dataset_info", lambda *_, **options: SimpleNamespace(sha=next(commits))
    )
    tree = tiny_tree(tmp_path)
    tree["data"]["train"] = texts["abc123"] | {"hub": "moving/set"}
    config, goes_on = write_config(tmp_path / "config.yaml", tree), []
    with monkeypatch.context() as patch:
        patch.setattr(prepare.encode, "collect", stop)
        for _ in range(2):  # the second time the commit is the same, and it resumes
            outcome = cli("tokenize", config)
            assert outcome.code == 130
            goes_on.append("tokenizing resumes after 200 training pairs" in outcome.err)
            formats._resolve.cache_clear()
    outcome = cli("tokenize", config)
    assert outcome.code == 0
    goes_on.append("tokenizing resumes" in outcome.err)
    assert goes_on == [False, True, False]
    run = RunDir(tmp_path / "run")
    marks = json.loads((run.data_dir / "corpora.json").read_text("utf-8"))
    assert marks["moving/set/aa-bb/train"] == {"revision": "def456"}
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    (table,) = arrow_shards.ShardSet(run.data_dir, tokenizer).all()
    src, _ = table.take(np.arange(200))
    lines = tokenizer.src.decode([ids[:-1].tolist() for ids in src])
    assert lines == [pair.src for pair in copy_task(200, 2)]


def test_check_reports_the_first_malformed_row_of_a_file_and_continues_after_it(
    cli: Cli, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path)
    lines = [f"{pair.src}\t{pair.tgt}" for pair in copy_task(200, 1)]
    lines[4], lines[9], lines[19] = "ba", "ba\tba\tba", "ce\t"
    (tmp_path / "a.tsv").write_text("".join(f"{line}\n" for line in lines))
    tree["data"]["train"] = {"tsv": [str(tmp_path / "a.tsv")]}
    outcome = cli("check", write_config(tmp_path / "config.yaml", tree), "--json")
    assert outcome.code == 2
    findings = {found["name"]: found for found in json.loads(outcome.out)["findings"]}
    assert findings["malformed-row"]["severity"] == "error"
    (example,) = findings["malformed-row"]["examples"]
    assert example["file"] == str(tmp_path / "a.tsv")
    assert example["problem"].startswith("2 rows; the first is row 5: must have 2 columns")
    assert "blank-pair" not in findings
    assert [entry["line"] for entry in findings["blank-side"]["examples"]] == [20]
    assert findings["blank-side"]["examples"][0]["tgt_file"] == str(tmp_path / "a.tsv")


def test_check_counts_a_malformed_row_only_as_malformed(cli: Cli, tmp_path: Path) -> None:
    rows = [{"src": pair.src, "tgt": pair.tgt} for pair in copy_task(200, 1)]
    rows[3], rows[7] = {"src": "ba"}, {"src": " ", "tgt": ""}
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tree = tiny_tree(tmp_path)
    one = {"jsonl": [str(tmp_path / "a.jsonl")], "src": "src", "tgt": "tgt"}
    tree["data"]["train"] = [one]
    outcome = cli("check", write_config(tmp_path / "config.yaml", tree), "--json")
    report = json.loads(outcome.out)
    (train,) = (own for own in report["corpora"] if own["name"] == "train")
    assert (train["num_pairs"], train["num_dropped"]["blank-pair"]) == (199, 1)
    assert train["mixture"][0]["num_pairs"] == 199
    findings = {found["name"]: found for found in report["findings"]}
    assert findings["malformed-row"]["examples"][0]["problem"].startswith("1 row; the first is row")
    assert [entry["line"] for entry in findings["blank-pair"]["examples"]] == [8]
    assert findings["blank-pair"]["count"] == 1


# Headers


@pytest.mark.parametrize(
    ("cells", "is_one"),
    [
        (("aa", "bb"), True),
        (("BB", "aa"), True),
        (("Source", "Target"), True),
        (("source_text", "translation aa"), True),
        (("English", "bb sentence"), True),
        (("aa", "dogs"), False),
        (("aa", ""), False),
        (("12", "13"), False),
        (("cc", "dd"), False),
        (("the source", "the target"), False),
    ],
)
def test_is_header_recognizes_column_names_and_the_language_codes_of_the_config(
    cells: tuple[str, str], is_one: bool
) -> None:
    assert formats.is_header(cells, ["aa", "bb"]) == is_one


@pytest.mark.parametrize("cells", [("Lao", "khmer text"), ("lo", "pt-BR"), ("Portuguese", "km")])
def test_is_header_recognizes_names_and_codes_of_the_configured_languages_only(
    cells: tuple[str, str],
) -> None:
    assert formats.is_header(cells, ["lo", "km", "pt-BR"])
    assert not formats.is_header(cells, ["en", "de"])


@pytest.mark.parametrize("header", [None, True, False])
def test_a_header_is_reported_unless_the_config_sets_header(
    cli: Cli, tmp_path: Path, header: bool | None
) -> None:
    tree, path = tiny_tree(tmp_path), tmp_path / "a.tsv"
    rows = ["Target\tid\tSource", *(f"{pair.tgt}\t1\t{pair.src}" for pair in copy_task(200, 1))]
    path.write_text("".join(f"{row}\n" for row in [*rows, "ba\t1\t"]))
    tree["data"]["train"] = {"tsv": [str(path)], "columns": [3, 1], "header": header}
    config = write_config(tmp_path / "config.yaml", tree)
    report = json.loads(cli("check", config, "--json").out)
    findings = {found["name"]: found for found in report["findings"]}
    assert findings["blank-side"]["examples"][0]["line"] == 202
    assert report["corpora"][0]["num_pairs"] == (201 if header else 202)
    assert ("header" in findings) == (header is None)
    outcome = cli("tokenize", config)
    line = f"{path}: begins with what looks like a header: Source TAB Target; set `header: true` "
    line += "for this corpus to leave the line out, or `header: false`"
    assert (line in outcome.err.splitlines()) == (header is None)
    if header is None:
        assert findings["header"]["severity"] == "warning"
        (example,) = findings["header"]["examples"]
        assert example == {"file": str(path), "problem": "Source TAB Target"}
    assert config_file.load(RunDir(tmp_path / "run").config_path).data.train.header is header
    raw = gzip.decompress((tmp_path / "run" / "data" / "dropped.jsonl.gz").read_bytes())
    assert json.loads(raw)["line"] == 202


def test_an_error_after_a_header_has_the_line_number_counted_with_the_header(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"s\xff\nba\tba\nce\n")
    tree = {"tsv": [str(path)], "header": True}
    assert message(tree).startswith(f"{path}:3: must have 2 columns")
    path.write_bytes(b"")
    with pytest.raises(DataError, match="must have at least one pair"):
        reader.read_whole(corpus_of(tree), "data.train")


# Line breaks within fields


@pytest.mark.parametrize("form", [as_jsonl, as_parquet, FORMS["hub-parquet"]], ids=lambda f: "")
def test_a_line_break_within_a_field_becomes_a_space_and_is_reported(
    cli: Cli, tmp_path: Path, form: Form
) -> None:
    pairs = copy_task(200, 1)
    pairs[3], pairs[8] = Pair("ba\nce\r\ndi", "ba\n\nce"), Pair("ba\rce\n", "ba\u2028ce\r\n")
    tree = tiny_tree(tmp_path)
    tree["data"]["train"] = form(tmp_path, "train", pairs)
    own = corpus_of(tree["data"]["train"])
    found = list(reader.read_pairs(own))
    assert found[3][:2] == ("ba ce di", "ba  ce")
    assert found[8][:2] == ("ba\rce", "ba\u2028ce")
    assert reader.read_whole(own, "data.train").num_pairs == 200
    config = write_config(tmp_path / "config.yaml", tree)
    outcome = cli("tokenize", config)
    assert (
        "data.train: line breaks within fields are spaces now, in 1 pair"
        in outcome.err.splitlines()
    )
    findings = json.loads(cli("check", config, "--json").out)["findings"]
    (found_break,) = [found for found in findings if found["name"] == "field-break"]
    assert found_break["severity"] == "note"
    assert [example["problem"] for example in found_break["examples"]] == ["1 row"]


# The config


def test_two_parquet_columns_with_the_same_name_are_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["c"])]
    parquet.write_table(pyarrow.table(columns, names=["s", "t", "t"]), path)
    tree = {"parquet": [path], "src": "s", "tgt": "t"}
    assert message(tree) == f"{path}: must have one column `t`, but has several."
    pair = pyarrow.StructArray.from_arrays(columns, names=["s", "t", "t"])
    parquet.write_table(pyarrow.table({"x": pair}), path)
    found = message(tree | {"src": "x.s", "tgt": "x.t"})
    assert found.startswith(f"{path}: must be a whole Parquet file, but: ")


def test_a_parquet_row_that_is_not_utf8_is_reported_and_the_other_rows_are_read(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "a.parquet")
    raw = pyarrow.array([b"a", b"\xff", b"c", b"d\xfe"], pyarrow.binary())
    bad = pyarrow.Array.from_buffers(pyarrow.utf8(), len(raw), raw.buffers())
    parquet.write_table(pyarrow.table({"s": ["a", "b", "c", "d"], "t": bad}), path)
    tree = {"parquet": [path], "src": "s", "tgt": "t"}
    assert message(tree) == f"{path}: row 2: must be UTF-8, but has byte 0xff."
    (source,) = formats.table_readers(corpus_of(tree))
    assert list(source.read(ignore, None)) == [
        formats.Row("a", "a"),
        formats.Fault("must be UTF-8, but has byte 0xff"),
        formats.Row("c", "c"),
        formats.Fault("must be UTF-8, but has byte 0xfe"),
    ]


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        (
            "{jsonl: [a], src: x.y, tgt: x.y}",
            "`data.train.tgt` must be another field than `src`, but is 'x.y' too.",
        ),
        (
            "{parquet: [a], src: x, tgt: x}",
            "`data.train.tgt` must be another field than `src`, but is 'x' too.",
        ),
        (
            "{hub: a, split: s, src: x, tgt: x}",
            "`data.train.tgt` must be another field than `src`, but is 'x' too.",
        ),
        (
            "{csv: [a.csv]}",
            "`data.train` must have `src` and `tgt`, or one of `tsv`, `jsonl`, `parquet`, `hub`, "
            "`synthetic`, "
            "but has csv instead.",
        ),
        ("{tsv: []}", "`data.train.tsv` must be a list of at least 1, but is [] instead."),
        ("{tsv: a.tsv}", "`data.train.tsv` must be a list, but is 'a.tsv' instead."),
        ("{jsonl: [a], src: x}", "`data.train.tgt` must be given, but is missing."),
        ("{parquet: [a], src: x, tgt: 3}", "`data.train.tgt` must be text, but is 3 instead."),
        ("{hub: a, src: x, tgt: y}", "`data.train.split` must be given, but is missing."),
        (
            "{tsv: [a], columns: [0, 1]}",
            "`data.train.columns` must be two columns, counted from 1, but is [0, 1] instead.",
        ),
        (
            "{tsv: [a], columns: [2, 2]}",
            "`data.train.columns` must be two columns, counted from 1, but is [2, 2] instead.",
        ),
        (
            "{tsv: [a], src: x}",
            "`data.train.src` is not a key of the config; known here: tsv, columns, header.",
        ),
        (
            "{hub: a, split: s, src: x, tgt: y, steaming: true}",
            "`data.train.steaming` is not a key of the config; did you mean "
            "`data.train.streaming`?",
        ),
        (
            "{hub: a, split: s, src: x, tgt: y, streaming: 1}",
            "`data.train.streaming` must be true or false, but is 1 instead.",
        ),
    ],
)
def test_an_invalid_corpus_section_is_an_error_that_names_its_key(
    tmp_path: Path, corpus: str, said: str
) -> None:
    tree: dict[str, Any] = tiny_tree(tmp_path)
    tree["data"]["train"] = yaml.safe_load(corpus)
    tree["data"]["tests"] = {"x": tree["data"]["train"]}
    path = write_config(tmp_path / "config.yaml", tree)
    for key in ("data.train", "data.tests.x"):
        with pytest.raises(ConfigError) as error:
            config_file.load(path)
        assert str(error.value) == f"{path}: {said.replace('data.train', key)}"
        tree["data"]["train"] = {"src": ["a"], "tgt": ["b"]}
        write_config(path, tree)


def test_the_examples_in_docs_corpora_md_are_valid_and_cover_five_corpus_formats(
    tmp_path: Path,
) -> None:
    page = (REPOSITORY / "docs" / "corpora.md").read_text(encoding="utf-8")
    shown = re.findall(r"^train: (\{.*\})$", page, flags=re.MULTILINE)
    forms = {type(corpus_of(yaml.safe_load(text))) for text in shown}
    assert len(shown) > len(forms) == 5


def test_a_changed_corpus_format_is_reported_as_a_change_of_data_train(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    old = config_file.load(write_config(tmp_path / "a.yaml", tree))
    tree["data"]["train"] = {"tsv": ["a.tsv"]}
    new = config_file.load(write_config(tmp_path / "b.yaml", tree))
    assert [*config_file.changes(old, new)] == ["data.train"]
