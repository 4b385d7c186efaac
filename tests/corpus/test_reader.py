"""Parallel text is read pair by pair, and what is wrong with it is said with file and line."""

import gzip
from pathlib import Path

import pytest

from mtrain.config.corpora import FilesCorpus
from mtrain.corpus import reader
from mtrain.corpus.reader import Pair
from mtrain.errors import DataError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(src: bytes, tgt: bytes) -> FilesCorpus:
    Path("s").write_bytes(src)
    Path("t").write_bytes(tgt)
    return FilesCorpus(src=["s"], tgt=["t"])


def message(config: FilesCorpus) -> str:
    with pytest.raises(DataError) as error:
        list(reader.read_pairs(config))
    return str(error.value)


def test_line_n_is_paired_with_line_n() -> None:
    pairs = reader.read_pairs(files(b"a\nb\n\n", b"1\n\n3"))
    assert list(pairs) == [Pair("a", "1", "s", 1), Pair("b", "", "s", 2), Pair("", "3", "s", 3)]


def test_several_files_follow_each_other_each_with_its_own_lines() -> None:
    for name in ("s1", "s2", "t1", "t2"):
        Path(name).write_text(f"{name} a\n{name} b\n")
    config = FilesCorpus(src=["s1", "s2"], tgt=["t1", "t2"])
    assert list(reader.read_pairs(config)) == [
        Pair("s1 a", "t1 a", "s1", 1),
        Pair("s1 b", "t1 b", "s1", 2),
        Pair("s2 a", "t2 a", "s2", 1),
        Pair("s2 b", "t2 b", "s2", 2),
    ]


def test_a_gzipped_side_pairs_with_a_plain_one() -> None:
    Path("s.gz").write_bytes(gzip.compress("ä\nb\n".encode()))
    Path("t").write_bytes(b"1\r\n2\r\n")
    config = FilesCorpus(src=["s.gz"], tgt=["t"])
    assert [(pair.src, pair.tgt) for pair in reader.read_pairs(config)] == [("ä", "1"), ("b", "2")]


@pytest.mark.parametrize(
    ("src", "tgt", "counts"),
    [
        (b"a\nb\nc\n", b"1\n", "3 and 1"),
        (b"a\n", b"1\n2", "1 and 2"),
        (b"", b"1\n\n", "0 and 2"),
        (b"a\n\n", b"1\n", "2 and 1"),
        (b"a\n" * 1500, b"1\n", "1,500 and 1"),
        ("a\u2028b\n".encode(), b"1\n2\n", "1 and 2"),
    ],
)
def test_unequal_numbers_of_lines_are_refused_with_both_counts(
    src: bytes, tgt: bytes, counts: str
) -> None:
    said = message(files(src, tgt))
    assert said == f"s and t must have the same number of lines, but have {counts} instead."


def test_two_unequal_files_are_refused_even_if_their_sums_are_equal() -> None:
    for name, text in (("s1", "a\nb\n"), ("t1", "1\n"), ("s2", "c\n"), ("t2", "2\n3\n")):
        Path(name).write_text(text)
    said = message(FilesCorpus(src=["s1", "s2"], tgt=["t1", "t2"]))
    assert said == "s1 and t1 must have the same number of lines, but have 2 and 1 instead."


def test_a_missing_file_is_named() -> None:
    config = files(b"a\n", b"1\n")
    Path("t").unlink()
    assert message(config) == "t: cannot be read: No such file or directory."


def test_invalid_utf8_is_named_with_its_line() -> None:
    said = message(files(b"a\nb\n", b"1\n\xe4\n"))
    assert said == "t:2: must be UTF-8, but has byte 0xe4 at byte 1 of the line."


def test_counting_reads_everything() -> None:
    assert reader.count_pairs(files(b"a\n\nc\n", b"1\n2\n3\n"), "data.train") == (3, 0)
    with pytest.raises(DataError, match=r"^t:3: must be UTF-8"):
        reader.count_pairs(files(b"a\nb\nc\n", b"1\n2\n\xff\n"), "data.train")


def test_an_empty_corpus_is_refused_by_its_key() -> None:
    with pytest.raises(DataError) as error:
        reader.count_pairs(files(b"", b""), "data.tests.held_out")
    assert str(error.value) == "`data.tests.held_out` must have at least one pair, but s is empty."
