"""Forgiving reading gives what strict reading gives, and goes on where that stops."""

import gzip
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tasks import Pair, write_corpus

from mtrain.config.corpora import FilesCorpus
from mtrain.corpus import lenient_reader
from mtrain.corpus.lenient_reader import Reader
from mtrain.corpus.reader import read_pairs


def read(src: bytes, tgt: bytes, directory: Path) -> Reader:
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
def test_what_training_reads_an_audit_reads(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("intake")
    raw = "\n".join(lines).encode()
    taken = read(raw, raw, directory)
    corpus = FilesCorpus(src=[str(directory / "src")], tgt=[str(directory / "tgt")])
    assert taken.pairs == [(pair.src, pair.tgt) for pair in read_pairs(corpus)]  # type: ignore[attr-defined]
    assert taken.num_pairs == len(taken.pairs)  # type: ignore[attr-defined]


def test_a_file_that_ends_early_ends_the_pairs_and_both_are_counted(tmp_path: Path) -> None:
    taken = read(b"a\nb\nc\n\xff\n", b"x\ny", tmp_path)
    (part,) = taken.parts
    assert taken.num_pairs == 2
    assert (part.src.num_lines, part.tgt.num_lines) == (4, 2)


def test_bytes_that_are_no_text_are_replaced_and_counted(tmp_path: Path) -> None:
    taken = read(b"a\n\xffb\nc\xe4\n", b"x\ny\nz\n", tmp_path)
    notes = taken.parts[0].src
    assert taken.pairs[1:] == [("\ufffdb", "y"), ("c\ufffd", "z")]  # type: ignore[attr-defined]
    assert notes.num_undecodable == 2
    assert notes.first_undecodable == "line 2, byte 0xff at byte 1"


def test_a_file_in_another_form_is_named_as_what_it_looks_like(tmp_path: Path) -> None:
    notes = read(lzma.compress(b"a\n"), b"x\n", tmp_path).parts[0].src
    said = "line 1, byte 0xfd at byte 1, which begins as xz data does: unpack it, or gzip it"
    assert notes.first_undecodable == said


def test_blocks_are_cut_by_pairs_and_by_bytes_and_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [Pair("a" * (100 if n == 4 else 1), "b") for n in range(12)]
    monkeypatch.setattr(lenient_reader, "BLOCK_PAIRS", 3)
    monkeypatch.setattr(lenient_reader, "_BLOCK_BYTES", 50)
    named = write_corpus(tmp_path, "corpus", pairs)
    twice = FilesCorpus(src=named["src"] * 2, tgt=named["tgt"] * 2)
    taken = Reader(twice)
    blocks = list(taken.blocks(lambda num_bytes: None))
    sizes = [len(block.src) for block in blocks]
    assert sizes == [3, 2, 3, 3, 1] * 2
    assert [block.first for block in blocks] == [0, 3, 5, 8, 11, 12, 15, 17, 20, 23]
    assert taken.part_of(11) is taken.parts[0] and taken.part_of(12) is taken.parts[1]


def test_the_bytes_that_are_told_are_those_on_disk_also_of_gzip(tmp_path: Path) -> None:
    raw = b"some line\n" * 20_000
    (tmp_path / "a.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "b").write_bytes(raw)
    corpus = FilesCorpus(src=[str(tmp_path / "a.gz")], tgt=[str(tmp_path / "b")])
    told: list[int] = []
    assert sum(len(block.src) for block in Reader(corpus).blocks(told.append)) == 20_000
    assert sum(told) == lenient_reader.size_of(corpus)
