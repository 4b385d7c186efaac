"""The strict reader reports the first error with file and line; the lenient one continues."""

import gzip
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tasks import Pair as TaskPair
from tasks import write_corpus

from mtrain.config.corpora import FilesCorpus
from mtrain.corpus import reader
from mtrain.corpus.reader import Pair, Reader
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


def test_several_files_are_read_in_order_with_line_numbers_per_file() -> None:
    for name in ("s1", "s2", "t1", "t2"):
        Path(name).write_text(f"{name} a\n{name} b\n")
    config = FilesCorpus(src=["s1", "s2"], tgt=["t1", "t2"])
    assert list(reader.read_pairs(config)) == [
        Pair("s1 a", "t1 a", "s1", 1),
        Pair("s1 b", "t1 b", "s1", 2),
        Pair("s2 a", "t2 a", "s2", 1),
        Pair("s2 b", "t2 b", "s2", 2),
    ]


def test_a_gzip_source_file_is_paired_with_a_plain_target_file() -> None:
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
def test_unequal_line_counts_are_an_error_that_names_both_counts(
    src: bytes, tgt: bytes, counts: str
) -> None:
    said = message(files(src, tgt))
    assert said == f"s and t must have the same number of lines, but have {counts} instead."


def test_unequal_file_pairs_are_an_error_even_if_the_total_line_counts_are_equal() -> None:
    for name, text in (("s1", "a\nb\n"), ("t1", "1\n"), ("s2", "c\n"), ("t2", "2\n3\n")):
        Path(name).write_text(text)
    said = message(FilesCorpus(src=["s1", "s2"], tgt=["t1", "t2"]))
    assert said == "s1 and t1 must have the same number of lines, but have 2 and 1 instead."


def test_a_missing_file_is_named_in_the_error() -> None:
    config = files(b"a\n", b"1\n")
    Path("t").unlink()
    assert message(config) == "t: cannot be read: No such file or directory."


def test_invalid_utf8_is_reported_with_file_and_line() -> None:
    said = message(files(b"a\nb\n", b"1\n\xe4\n"))
    assert said == "t:2: must be UTF-8, but has byte 0xe4 at byte 1 of the line."


def test_read_whole_reads_every_line_and_reports_invalid_utf8() -> None:
    assert reader.read_whole(files(b"a\n\nc\n", b"1\n2\n3\n"), "data.train").num_pairs == 3
    with pytest.raises(DataError, match=r"^t:3: must be UTF-8"):
        reader.read_whole(files(b"a\nb\nc\n", b"1\n2\n\xff\n"), "data.train")


def test_an_empty_corpus_is_an_error_that_names_its_config_key() -> None:
    with pytest.raises(DataError) as error:
        reader.read_whole(files(b"", b""), "data.tests.held_out")
    assert str(error.value) == "`data.tests.held_out` must have at least one pair, but s is empty."


# Lenient reading


def read_leniently(src: bytes, tgt: bytes, directory: Path) -> Reader:
    (directory / "src").write_bytes(src)
    (directory / "tgt").write_bytes(tgt)
    taken = Reader(FilesCorpus(src=[str(directory / "src")], tgt=[str(directory / "tgt")]))
    taken.pairs = [  # type: ignore[attr-defined]
        pair
        for block in taken.blocks(lambda num_bytes: None)
        for pair in zip(block.src, block.tgt, strict=True)
    ]
    return taken


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=5), max_size=9))
def test_the_lenient_reader_gives_the_same_pairs_as_the_strict_reader(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("intake")
    raw = "\n".join(lines).encode()
    taken = read_leniently(raw, raw, directory)
    corpus = FilesCorpus(src=[str(directory / "src")], tgt=[str(directory / "tgt")])
    assert taken.pairs == [(pair.src, pair.tgt) for pair in reader.read_pairs(corpus)]  # type: ignore[attr-defined]
    assert taken.num_pairs == len(taken.pairs)  # type: ignore[attr-defined]


def test_pairs_end_with_the_shorter_file_and_the_lines_of_both_files_are_counted(
    tmp_path: Path,
) -> None:
    taken = read_leniently(b"a\nb\nc\n\xff\n", b"x\ny", tmp_path)
    (part,) = taken.parts
    assert taken.num_pairs == 2
    assert (part.src.num_lines, part.tgt.num_lines) == (4, 2)


def test_lines_with_invalid_utf8_are_counted_and_their_bytes_replaced(tmp_path: Path) -> None:
    taken = read_leniently(b"a\n\xffb\nc\xe4\n", b"x\ny\nz\n", tmp_path)
    notes = taken.parts[0].src
    assert taken.pairs[1:] == [("\ufffdb", "y"), ("c\ufffd", "z")]  # type: ignore[attr-defined]
    assert notes.num_undecodable == 2
    assert notes.first_undecodable == "line 2, byte 0xff at byte 1"


def test_the_note_about_undecodable_bytes_recognizes_an_xz_file(tmp_path: Path) -> None:
    notes = read_leniently(lzma.compress(b"a\n"), b"x\n", tmp_path).parts[0].src
    said = "line 1, byte 0xfd at byte 1, which begins as xz data does: unpack it, or gzip it"
    assert notes.first_undecodable == said


def test_blocks_are_limited_in_pairs_and_characters_and_have_the_number_of_their_first_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [TaskPair("a" * (100 if n == 4 else 1), "b") for n in range(12)]
    monkeypatch.setattr(reader, "BLOCK_PAIRS", 3)
    monkeypatch.setattr(reader, "_BLOCK_CHARACTERS", 50)
    named = write_corpus(tmp_path, "corpus", pairs)
    twice = FilesCorpus(src=named["src"] * 2, tgt=named["tgt"] * 2)
    taken = Reader(twice)
    blocks = list(taken.blocks(lambda num_bytes: None))
    sizes = [len(block.src) for block in blocks]
    assert sizes == [3, 2, 3, 3, 1] * 2
    assert [block.first for block in blocks] == [0, 3, 5, 8, 11, 12, 15, 17, 20, 23]
    assert taken.part_of(11) is taken.parts[0] and taken.part_of(12) is taken.parts[1]


def test_reported_bytes_add_up_to_the_size_on_disk_also_for_gzip(tmp_path: Path) -> None:
    raw = b"some line\n" * 20_000
    (tmp_path / "a.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "b").write_bytes(raw)
    corpus = FilesCorpus(src=[str(tmp_path / "a.gz")], tgt=[str(tmp_path / "b")])
    told: list[int] = []
    assert sum(len(block.src) for block in Reader(corpus).blocks(told.append)) == 20_000
    assert sum(told) == reader.size_of(corpus)
