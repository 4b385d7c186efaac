"""Hostile configs, corpora and input give a result or a one-line error."""

from __future__ import annotations

import copy
import gzip
import json
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Cli, Outcome
from hostile import (
    assert_one_line,
    assert_refused,
    bounded,
    cases,
    is_one_line,
    leftovers,
    raw_lines,
    texts,
)
from hypothesis import given
from hypothesis import strategies as st
from tasks import Said, Tree, tiny_tree, write_config, write_task

from mtrain.config import config_file, sections
from mtrain.config.corpora import FilesCorpus
from mtrain.corpus import dropped
from mtrain.corpus.reader import read_pairs
from mtrain.data import prepare
from mtrain.data.loader import TrainingData
from mtrain.errors import ConfigError, DataError, UserError
from mtrain.io.lines import read_lines
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece

VALID: Tree = {
    "run_dir": "runs/x",
    "seed": 1,
    "data": {
        "src_lang": "aa",
        "tgt_lang": "bb",
        "train": {"src": ["train.src"], "tgt": ["train.tgt"]},
        "valid": {"src": ["valid.src"], "tgt": ["valid.tgt"]},
        "tests": {"held_out": {"src": ["test.src"], "tgt": ["test.tgt"]}},
    },
    "tokenizer": {"vocab_size": 285},
    "model": {"d_model": 16},
    "training": {"max_steps": 2},
    "decoding": {"beam": 2},
}
KEYS = config_file._all_keys(sections.Config, "")
FRAGMENTS = [
    *("- ", ": ", "? ", "{", "}", "[", "]", ",", "|\n", ">-\n", "\n", "\n  ", "---\n", "...\n"),
    *("&a ", "*a", "<<: ", "*a: ", "!!set ", "!!binary ", "!!omap ", "!!float ", "!!int x", "!x "),
    *("!!int ''", "!!float ''", "!!bool x", "!!timestamp x", "!!pairs ", "! ", "!<> ", "!<x> "),
    *("%YAML 9.9\n", "%TAG ! a:\n", "#", "'", '"', '"\\ud800"', '"\\0"', '"\\x0a"', "\t", "\0"),
    *("0x", "0b", "1:30:20", ".inf", "-.inf", ".nan", "1e999", "-0", "0o17", "017", "1_000"),
    *("9" * 5000, "0x" + "f" * 5000, "1e" + "9" * 50, "~", "null", "on", "2001-01-01", "=", "<<"),
    *("\ufeff", "\u2028", "\x85", "\ud7ff", "\U0010ffff", "!!python/none x", "!!python/tuple [1]"),
    *(*(f"{key.split('.')[-1]}: " for key in KEYS), "../../x: ", "'': ", "train.src"),
]
hostile_text = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join),
    st.text(max_size=60),
    texts,
)
numbers = st.one_of(
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, -(2**70), 10**4000, -1, 0]),
    st.floats(),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), texts)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), leaves), inner, max_size=3),
    ),
    max_leaves=6,
)


def places(tree: Tree) -> Iterator[tuple[str, ...]]:
    """Yield the path of keys to each value of a config."""
    for key, value in tree.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in places(value))


PLACES = list(places(VALID))


def check_load(raw: bytes, overrides: Sequence[str] = ()) -> None:
    """Load a config from bytes; it must survive saving and loading, or give a one-line error."""
    with tempfile.TemporaryDirectory() as directory, bounded("config"):
        path = Path(directory) / "config.yaml"
        path.write_bytes(raw)
        try:
            config = config_file.load(path, overrides)
        except ConfigError as error:
            assert_one_line(error)
            return
        path.write_text(config_file.dump_tree(config.model_dump()), encoding="utf-8")
        assert config_file.load(path) == config
        assert all(Path("tests", name).parent == Path("tests") for name in config.data.tests)
        assert [entry.name for entry in Path(directory).iterdir()] == ["config.yaml"]


@cases(60)
@given(st.one_of(st.binary(max_size=200), hostile_text.map(lambda text: text.encode())))
def test_any_bytes_give_a_valid_config_or_a_one_line_error(raw: bytes) -> None:
    check_load(raw)


@st.composite
def mutated_texts(draw: st.DrawFn) -> bytes:
    """A valid config with a part replaced."""
    text = yaml.safe_dump(VALID, sort_keys=False)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.one_of(st.just(start), st.integers(start, min(start + 20, len(text)))))
        text = text[:start] + draw(hostile_text) + text[stop:]
    return text.encode()


@cases(40)
@given(mutated_texts())
def test_a_config_with_replaced_text_loads_or_gives_a_one_line_error(raw: bytes) -> None:
    check_load(raw)


@cases(60)
@given(st.sampled_from(PLACES), trees)
def test_a_config_with_any_value_loads_or_gives_a_one_line_error(
    place: tuple[str, ...], value: Any
) -> None:
    tree = copy.deepcopy(VALID)
    section = tree
    for key in place[:-1]:
        section = section[key]
    section[place[-1]] = value
    check_load(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))


overrides = st.one_of(
    st.tuples(
        st.one_of(st.sampled_from(KEYS), hostile_text),
        st.sampled_from(["=", "", "==", ".="]),
        st.one_of(hostile_text, leaves.map(repr)),
    ).map("".join),
    hostile_text,
)


@cases(40)
@given(st.lists(overrides, min_size=1, max_size=3))
def test_any_override_is_accepted_or_gives_a_one_line_error(given_overrides: list[str]) -> None:
    check_load(yaml.safe_dump(VALID).encode(), given_overrides)


BOMBS = {
    "nested lists": "a: " + "[" * 600,
    "nested and closed lists": "a: " + "[" * 400 + "]" * 400,
    "nested mappings": "{a: " * 5_000,
    "nested blocks": "\n".join(" " * depth + "a:" for depth in range(2_000)),
    "nested sequences": "- " * 5_000,
    "nested tags": "!a " * 5_000,
    "nested complex keys": "? " * 5_000,
    "laughs": "\n".join(
        ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    ),
    "laughs of mappings": "\n".join(
        ["data: &a0 {x: y}"]
        + [
            f"a{n}: &a{n} {{{', '.join(f'{k}: *a{n - 1}' for k in range(9))}}}"
            for n in range(1, 30)
        ]
    ),
    "laughs as a known key": "b: &a0 [x, x]\n"
    + "\n".join(f"c{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))
    + "\nseed: *a59",
    "a list of itself": "seed: &a [*a, *a]",
    "a mapping of itself": "data: &a {train: *a, valid: *a, src_lang: *a, tests: *a}",
    "a key of itself": "&a ? *a : 1",
    "a merge of itself": "a: &a {<<: *a}",
    "a hexadecimal number of 5,000 digits": "seed: 0x" + "f" * 5_000,
    "a number of 5,000 digits": "seed: " + "9" * 5_000,
    "a number in base 60 without end": "seed: " + ":".join(["59"] * 5_000),
    "many keys": "\n".join(f"k{n}: 1" for n in range(3_000)),
    "many aliases": "a: &a 1\nb: [" + ", ".join(["*a"] * 5_000) + "]",
    "a long key": "k" * 200_000 + ": 1",
    "a long word": "seed: " + "k" * 200_000,
    "a long line of digits and dots": "seed: " + "1" * 100_000 + "x",
    "many documents": "--- {}\n" * 5_000,
    "half a character": 'run_dir: "\\ud800"',
    "a name with a NUL": 'run_dir: "a\\0b"',
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_yaml_bomb_loads_or_gives_a_one_line_error_in_bounded_time_and_memory(text: str) -> None:
    check_load(text.encode())
    check_load(yaml.safe_dump(VALID).encode(), ["run_dir=" + text])


@st.composite
def corpora(draw: st.DrawFn, lines: st.SearchStrategy[bytes]) -> list[bytes]:
    """The two files of a corpus, mostly with the same number of lines."""
    num_lines = draw(st.integers(0, 12))
    files = []
    for _ in range(2):
        count = num_lines if draw(st.integers(0, 9)) else draw(st.integers(0, 12))
        own = draw(st.lists(lines, min_size=count, max_size=count))
        end = draw(st.sampled_from([b"\n", b"\r\n", b"\n", b"\r\r\n"]))
        bom = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"]))
        cut = draw(st.sampled_from([0, 0, 1]))
        raw = bom + b"".join(line + end for line in own)
        files.append(raw[: len(raw) - cut])
    return files


@st.composite
def packed(draw: st.DrawFn, raw: bytes) -> bytes:
    """A gzip file, often damaged."""
    data = bytearray(gzip.compress(raw, mtime=0))
    damage = draw(st.sampled_from(["none", "cut", "flip", "append", "twice", "plain", "zeros"]))
    place = draw(st.integers(0, len(data) - 1))
    if damage == "flip":
        data[place] ^= 1 << draw(st.integers(0, 7))
    pieces = {
        "cut": data[:place],
        "append": data + draw(st.binary(min_size=1, max_size=9)),
        "twice": data + data,
        "plain": raw,
        "zeros": data + bytes(20),
    }
    return bytes(pieces.get(damage, data))


def lines_of(raw: bytes) -> list[str]:
    """Split a file into lines by the rules of the format, independently of mtrain."""
    lines = raw.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    lines = [line[:-1] if line.endswith(b"\r") else line for line in lines]
    if lines and lines[0].startswith(b"\xef\xbb\xbf"):
        lines[0] = lines[0][3:]
    return [line.decode() for line in lines]


@cases(50)
@given(corpora(st.one_of(raw_lines, texts.map(str.encode))))
def test_any_two_files_are_paired_line_by_line_or_give_a_one_line_error(
    corpus: list[bytes],
) -> None:
    with tempfile.TemporaryDirectory() as directory, bounded("corpus"):
        paths = [Path(directory) / name for name in ("a", "b")]
        for path, raw in zip(paths, corpus, strict=True):
            path.write_bytes(raw)
        named = FilesCorpus(src=[str(paths[0])], tgt=[str(paths[1])])
        try:
            src, tgt = map(lines_of, corpus)
        except UnicodeDecodeError:
            src, tgt = [], ["not UTF-8"]
        if len(src) != len(tgt):
            with pytest.raises(DataError) as caught:
                list(read_pairs(named))
            assert_one_line(caught.value)
        else:
            found = list(read_pairs(named))
            assert [pair.src for pair in found] == src
            assert [pair.tgt for pair in found] == tgt
            assert [pair.line for pair in found] == list(range(1, len(src) + 1))


@cases(30)
@given(st.data(), st.lists(texts, max_size=40))
def test_a_damaged_gzip_file_gives_its_lines_or_a_one_line_error(
    data: st.DataObject, lines: list[str]
) -> None:
    raw = "".join(line + "\n" for line in lines).encode()
    packed_raw = data.draw(packed(raw))
    with tempfile.TemporaryDirectory() as directory, bounded("gzip"):
        path = Path(directory) / "a.gz"
        path.write_bytes(packed_raw)
        try:
            found = list(read_lines(path))
        except DataError as error:
            assert_one_line(error)
            return
        whole = gzip.decompress(packed_raw) if packed_raw else b""
        assert found == lines_of(whole)


def check_prepare(corpus: Sequence[bytes], tokenizing: Tree, is_retry: bool = False) -> None:
    """Prepare a run from a corpus; it must be complete, or absent with a one-line error."""
    with tempfile.TemporaryDirectory() as directory, bounded("prepare"):
        tree = tiny_tree(Path(directory), num_train=20)
        for raw, path in zip(corpus, ("train.src", "train.tgt"), strict=True):
            (Path(directory) / path).write_bytes(raw)
        tree["tokenizer"] = tokenizing
        tree["model"]["tie_embeddings"] = "none"
        config = sections.Config.model_validate(tree)
        run = RunDir(Path(config.run_dir))
        try:
            prepare.prepare(config, run, Said())
        except UserError as error:
            assert_one_line(error)
            assert not run.data_dir.exists() and not run.tokenizer_dir.exists()
            bound = re.search(r"`tokenizer.vocab_size` must be at (?:most|least) (\d+)", str(error))
            if bound and not is_retry:
                check_prepare(corpus, tokenizing | {"vocab_size": max(8, int(bound[1]))}, True)
        else:
            vocabulary = sentencepiece.load(run.tokenizer_dir)
            num_kept = len(TrainingData(run.data_dir, vocabulary, 1))
            num_pairs = len(lines_of(corpus[0]))
            assert num_kept + sum(dropped.read_counts(run.data_dir).values()) == num_pairs
        assert leftovers(Path(directory)) == []


tokenizing = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["unigram", "bpe"]),
        "vocab_size": st.sampled_from([8, 262, 300, 10_000]),
        "shared": st.booleans(),
        "byte_fallback": st.sampled_from([True, True, False]),
        "sampling_alpha": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        "character_coverage": st.sampled_from([1.0, 1.0, 0.99, 0.98]),
        "max_training_lines": st.sampled_from([500_000, 3, 1]),
    }
)


@cases(15)
@given(corpora(st.one_of(texts.map(str.encode), st.just(b"ba ce di fo gu"))), tokenizing)
def test_any_corpus_is_prepared_completely_or_not_at_all(
    corpus: list[bytes], tokenizing: Tree
) -> None:
    check_prepare(corpus, tokenizing)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "line",
    [
        "ba " * 3000,
        "a" * 6000,
        "\0",
        "\u2581",
        "\u2581 \u2581",
        "\t",
        "\ufeff",
        "<s>",
        "\x1b",
        "\u00ad",
        "\U000e0001" * 3,
    ],
    ids=lambda line: ascii(line[:9]),
)
def test_a_corpus_of_one_odd_line_is_prepared_completely_or_not_at_all(
    line: str, kind: str
) -> None:
    raw = (line + "\n").encode() * 3
    check_prepare([raw, raw], {"kind": kind, "vocab_size": 300})


NO_FILES = [
    "absent",
    "folder",
    "a\0b",
    "\ud800",
    "x" * 300,
    "a\nb",
    "",
    ".",
    "train.tgt/x",
    "\u2028",
]


@pytest.mark.parametrize("name", NO_FILES, ids=ascii)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_corpus_path_that_is_not_a_file_gives_a_one_line_error(
    cli: Cli, name: str, suffix: str, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path, num_train=20)
    for folder in ("folder", "folder.gz"):
        (tmp_path / folder).mkdir()
    tree["data"]["train"]["src"] = [f"{tmp_path}/{name}{suffix}"]
    with bounded("paths"):
        outcome = cli("tokenize", write_config(tmp_path / "config.yaml", tree))
    assert_refused(outcome)
    assert not Path(tree["run_dir"]).exists()


@pytest.mark.parametrize(
    "name",
    ["../../x", "..", "/x", "a/b", "a\\b", "", "a\nb", "a\0", "x" * 300, "-rf", "CON", "a..b"],
    ids=ascii,
)
def test_no_name_of_a_test_set_creates_a_file_outside_the_run_folder(
    cli: Cli, name: str, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path / "in", num_train=20)
    tree["data"]["tests"] = {name: tree["data"]["tests"]["held_out"]}
    path = write_config(tmp_path / "in" / "config.yaml", tree)
    before, run = set(tmp_path.rglob("*")), tmp_path / "in" / "run"
    with bounded("paths"):
        outcome = cli("tokenize", path)
    assert outcome.code == 0 or assert_refused(outcome)
    assert all(run in [new, *new.parents] for new in set(tmp_path.rglob("*")) - before)


@pytest.mark.parametrize(
    "name",
    ["a\0b", "\ud800", "x" * 300, "a\nb", "train.src", "train.src/run", "\u202e", "\x1b[2J", " "],
    ids=ascii,
)
def test_a_run_folder_of_any_name_is_created_or_gives_a_one_line_error(
    cli: Cli, name: str, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path, num_train=20) | {"run_dir": f"{tmp_path}/{name}"}
    path = write_config(tmp_path / "config.yaml", tree)
    with bounded("paths"):
        outcome = cli("tokenize", path)
    assert outcome.code == 0 or assert_refused(outcome)
    assert outcome.code == 2 or RunDir(tmp_path / name).data_dir.is_dir()
    assert leftovers(tmp_path) == []


EXTREMES = ["training.lr=1e300", "training.eps=1e-300", "training.weight_decay=1e300"]
EXTREMES += [
    "training.max_minutes=1e-300",
    "training.warmup_steps=2147483647",
    "model.d_ff=2147483647",
]
EXTREMES += [
    "model.branch_gain=100",
    "model.dropout=0.9999999999999999",
    "model.attention_window=1",
]
EXTREMES += ["seed=9223372036854775807", "decoding.beam=1000", "data.max_tokens=2"]
EXTREMES += [
    "training.device=hpu",
    "training.device=privateuseone",
    "training.device=cuda:99999999999",
]


@pytest.mark.parametrize("setting", EXTREMES)
def test_training_with_an_extreme_setting_finishes_or_gives_a_one_line_error(
    cli: Cli, setting: str, tmp_path: Path
) -> None:
    with bounded("extremes"):
        outcome = cli(
            "train", write_task(tmp_path), "--set", "training.max_steps=2", "--set", setting
        )
    last = outcome.err.removesuffix("\n").split("\n")[-1]
    assert outcome.code == 0 or (outcome.code == 2 and last.startswith("mtrain: "))
    assert is_one_line(last)
    assert leftovers(tmp_path) == []


@dataclass(frozen=True)
class Request:
    """The input and the options of one `mtrain translate` command."""

    raw: bytes
    arguments: list[str]
    format: str
    num_best: int
    prefixes: bytes | None
    wants_links: bool
    reads_file: bool
    writes_file: bool


@st.composite
def requests(draw: st.DrawFn) -> Request:
    lines = draw(st.lists(raw_lines, max_size=8))
    raw = b"\n".join(lines) + draw(st.sampled_from([b"", b"\n", b"\n\n", b"\r\n", b"\r", b"\0"]))
    raw = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe"])) + raw
    num_best = draw(st.integers(1, 2))
    searches = [["--beam", "2"], ["--beam", "3", "--no-repeat-ngram", "1", "--early-stop"]]
    samples = ["--sample", "--temperature", "100", "--seed", "7"]
    arguments = draw(st.sampled_from([*searches, samples, [*samples, "--top-k", "1"]]))
    long_lines = ["--max-input-tokens", draw(st.sampled_from(["2", "5"])), "--on-long"]
    policy = draw(st.sampled_from(["", "", "split", "truncate", "error"]))
    arguments = [*arguments, *([*long_lines, policy] if policy else [])]
    arguments += draw(st.sampled_from([[], ["--batch-tokens", "1"], ["--precision", "bfloat16"]]))
    prefixes = draw(st.one_of(st.none(), st.lists(st.one_of(raw_lines, texts.map(str.encode)))))
    if prefixes is not None and len(prefixes) < len(lines):
        prefixes += [b"ba"] * draw(st.sampled_from([0, len(lines)]))
    return Request(
        raw,
        arguments,
        draw(st.sampled_from(["text", "tsv", "jsonl"])),
        num_best,
        None if prefixes is None else b"\n".join(prefixes),
        *(draw(st.booleans()) for _ in range(3)),
    )


def raw_lines_of(raw: bytes) -> list[str]:
    """Split as `lines_of` does; replace invalid UTF-8 by U+FFFD."""
    return lines_of(raw.decode("utf-8", "replace").encode()) if raw else []


def records(out: bytes, asked: Request) -> list[list[str]]:
    """Return the translations of each line, best first; every record must be complete."""
    text = out.decode("utf-8")
    assert text == "" or text.endswith("\n")
    lines = text.split("\n")[:-1]
    if asked.format == "jsonl":
        trees = [json.loads(line, parse_constant=pytest.fail) for line in lines]
        assert [tree["line"] for tree in trees] == list(range(1, len(trees) + 1))
        sources = raw_lines_of(asked.raw)[: len(trees)]
        assert [tree["source"] for tree in trees] == sources
        return [[own["translation"] for own in tree.get("n_best", [tree])] for tree in trees]
    if asked.format == "tsv":
        rows = [line.split("\t") for line in lines]
        assert all(len(row) == 6 and math.isfinite(float(row[2]) + float(row[3])) for row in rows)
        numbers = [[int(row[0]), int(row[1])] for row in rows]
        assert numbers == [
            [1 + place // asked.num_best, 1 + place % asked.num_best] for place in range(len(rows))
        ]
        lines = [row[5] for row in rows]
    return [lines[at : at + asked.num_best] for at in range(0, len(lines), asked.num_best)]


@cases(25)
@given(asked=requests())
def test_any_bytes_are_translated_line_by_line_in_order(
    cli: Cli, noisy: RunDir, asked: Request
) -> None:
    with tempfile.TemporaryDirectory() as directory, bounded("translate"):
        folder = Path(directory)
        arguments = [*asked.arguments, "--format", asked.format, "--n-best", str(asked.num_best)]
        if asked.prefixes is not None:
            (folder / "prefixes").write_bytes(asked.prefixes)
            arguments += ["--prefix", str(folder / "prefixes")]
        if asked.wants_links:
            arguments += ["--alignments", str(folder / "links")]
        if asked.writes_file:
            (folder / "out").write_bytes(b"as it was")
            arguments += ["-o", str(folder / "out")]
        if asked.reads_file:
            (folder / "in").write_bytes(asked.raw)
            arguments = [str(folder / "in"), *arguments]
        outcome = cli("translate", noisy.path, *arguments, stdin=asked.raw)
        check_translations(outcome, asked, folder)


def check_translations(outcome: Outcome, asked: Request, folder: Path) -> None:
    """Check the output, the files and the messages of a translation, refused or not."""
    num_lines = len(raw_lines_of(asked.raw))
    written = (folder / "out").read_bytes() if asked.writes_file else outcome.out
    assert leftovers(folder) == []
    if outcome.code != 0:
        assert_refused(outcome)
        assert asked.prefixes is not None or "error" in asked.arguments
        assert not asked.writes_file or written == b"as it was"
        assert not (folder / "links").exists()
        assert asked.writes_file or len(records(written, asked)) <= num_lines
        return
    assert all(is_one_line(line) for line in outcome.err.split("\n")[:-1])
    found = records(written, asked)
    assert len(found) == num_lines
    assert not asked.writes_file or outcome.out == b""
    if asked.wants_links:
        links = (folder / "links").read_text(encoding="utf-8").split("\n")
        assert len(links) == num_lines + 1
        assert all(re.fullmatch(r"(\d+-\d+( |$))*", line) for line in links)


@pytest.mark.parametrize(
    "line",
    [
        "ba " * 5_000,
        "\u2581" * 5_000,
        "a" * 20_000,
        "\0" * 5_000,
        "\u0301" * 5_000,
        ". " * 5_000,
    ],
    ids=lambda line: ascii(line[:3]),
)
@pytest.mark.parametrize("is_split", [True, False])
def test_a_very_long_line_gives_one_output_line(
    cli: Cli, noisy: RunDir, line: str, is_split: bool
) -> None:
    arguments = ["--max-input-tokens", "100"] if is_split else []
    line = line if is_split else line[:1500]
    with bounded("long lines"):
        outcome = cli("translate", noisy.path, *arguments, stdin=f"ba\n{line}\nce\n".encode())
    assert outcome.code == 0, outcome.err
    assert len(outcome.lines) == 3
