import numpy as np
import pytest

from mtrain.autoconfig import split
from mtrain.config.corpora import FilesCorpus
from mtrain.errors import DataError


def corpus(tmp_path, pairs):
    for side, name in enumerate(("a.en", "a.de")):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return FilesCorpus(src=[str(tmp_path / "a.en")], tgt=[str(tmp_path / "a.de")])


def look(tmp_path, pairs):
    return split.read_overview(corpus(tmp_path, pairs), 1, lambda _: None)


GOOD = [(f"sentence number {n} of many", f"Satz Nummer {n} von vielen") for n in range(40)]


def test_a_pair_is_alone_if_neither_side_stands_in_another_pair_however_it_is_written(tmp_path):
    others = [
        ("Sentence number 3, of many!", "etwas ganz anderes hier"),  # the source of pair 3
        ("something else altogether", "SATZ NUMMER 5 VON VIELEN"),  # the target of pair 5
        ("a pair that is there twice", "ein Paar zweimal"),
        ("a pair that is there twice", "ein Paar zweimal"),
    ]
    found = look(tmp_path, GOOD + others)
    assert found.num_pairs == 44
    assert found.unique_rows.tolist() == [n for n in range(40) if n not in (3, 5)]


@pytest.mark.parametrize(
    ("src", "tgt"),
    [
        ("", "kein Wort auf der anderen Seite"),
        ("short", "kurz!"),
        ("the same text on both sides", "the same text on both sides"),
        ("this one is short", "und das hier ist sehr viel länger, " * 4),
        ("12 345 67 89 10 11 12", "12.345.67.89.10.11.13"),
        ("a long line " * 60, "eine lange Zeile " * 40),
        ("broken on the way here", "kaputt fÃ¼r immer und ewig"),
    ],
)
def test_a_pair_that_says_nothing_of_a_translator_is_not_held_out(tmp_path, src, tgt):
    found = look(tmp_path, [*GOOD, (src, tgt)])
    assert found.unique_rows.tolist() == list(range(40))


def test_words_are_counted_and_every_pair_of_a_small_corpus_is_in_the_sample(tmp_path):
    found = look(tmp_path, [("one two", "eins zwei drei"), ("four", "")])
    assert (found.src_words, found.tgt_words) == (3, 3)
    assert [pair.src for pair in found.sample] == ["one two", "four"]


def test_the_sample_of_a_large_corpus_is_from_all_over_it(tmp_path, monkeypatch):
    monkeypatch.setattr(split, "_SAMPLE_PAIRS", 10)
    lines = [pair.line for pair in look(tmp_path, GOOD).sample]
    assert len(set(lines)) == 10
    assert max(lines) > 20 > min(lines)


def test_a_corpus_without_a_pair_is_an_error(tmp_path):
    with pytest.raises(DataError, match="must have at least one pair, but is empty"):
        look(tmp_path, [])


def test_sets_are_drawn_without_a_pair_in_common_and_the_same_each_time():
    alone = np.arange(0, 200, 2)
    first, second = split.draw(alone, [10, 20], seed=3)
    assert (len(first), len(second)) == (10, 20)
    assert len({*first.tolist(), *second.tolist()}) == 30
    assert {*first.tolist(), *second.tolist()} <= {*alone.tolist()}
    assert (np.diff(first) > 0).all()
    assert [part.tolist() for part in split.draw(alone, [10, 20], seed=3)] == [
        first.tolist(),
        second.tolist(),
    ]
    assert split.draw(alone, [10], seed=4)[0].tolist() != first.tolist()


def test_pairs_are_collected_by_their_numbers(tmp_path):
    found = split.collect(corpus(tmp_path, GOOD), np.array([0, 7, 39]))
    assert [(pair.src, pair.tgt) for pair in found] == [GOOD[0], GOOD[7], GOOD[39]]
