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


def look(tmp_path, pairs, *given):
    return split.read_overview(corpus(tmp_path, pairs), given, 1, lambda _: None)


GOOD = [(f"sentence number {n} of many", f"Satz Nummer {n} von vielen") for n in range(40)]


def key(line):
    return "".join(filter(str.isalnum, line)).casefold()


def check_drawn(pairs, held_out, size):
    """Check that the sets have this size and share no sentence with each other or other pairs."""
    drawn = [row for rows in held_out.sets for row in rows.tolist()]
    keys = [(key(pairs[row][0]), key(pairs[row][1])) for row in drawn]
    assert [len(rows) for rows in held_out.sets] == [size] * len(held_out.sets)
    assert len({*keys}) == len(keys)
    sides = [{k for row in rows for k in map(key, pairs[row])} for rows in held_out.sets]
    assert sum(map(len, sides)) == len(set.union(*sides))
    rest = [pair for pair, out in zip(pairs, held_out.is_excluded, strict=True) if not out]
    assert not {k for pair in rest for k in map(key, pair)} & set.union(*sides)
    return rest


def test_sentences_that_differ_only_in_case_and_punctuation_have_one_id(tmp_path):
    others = [
        ("Sentence number 3, of many!", "etwas ganz anderes hier"),  # the source of pair 3
        ("something else altogether", "SATZ NUMMER 5 VON VIELEN"),  # the target of pair 5
        ("a pair that is there twice", "ein Paar zweimal"),
        ("A pair that is there twice.", "ein Paar, zweimal"),
    ]
    overview = look(tmp_path, GOOD + others)
    assert overview.num_pairs == 44
    assert overview.num_distinct(overview.is_fit) == 43
    src, tgt = overview.src_ids, overview.tgt_ids
    assert (src[3], tgt[5], src[42], tgt[42]) == (src[40], tgt[41], src[43], tgt[43])
    assert (len({*src}), len({*tgt})) == (42, 42)


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
def test_a_pair_that_is_unfit_for_evaluation_is_not_held_out(tmp_path, src, tgt):
    assert look(tmp_path, [*GOOD, (src, tgt)]).is_fit.tolist() == [True] * 40 + [False]


def test_pairs_of_a_script_with_few_characters_can_be_held_out_read_one_way_or_both(tmp_path):
    pairs = [
        (f"the sentence number {n} of many sentences", f"第{n}句话的译文") for n in range(40, 80)
    ]
    pairs.append(("a sentence and its translation", "译文和它的句子比通常的长得多" * 3))
    one_way = corpus(tmp_path, pairs)
    reverse = FilesCorpus(src=one_way.tgt, tgt=one_way.src)
    for text in (one_way, [one_way, reverse]):
        is_fit = split.read_overview(text, [], 1, lambda _: None).is_fit
        assert is_fit.tolist() == ([True] * 40 + [False]) * (2 if text is not one_way else 1)


def test_short_lines_of_a_script_with_few_characters_can_be_held_out(tmp_path):
    short = [
        ("Thank you.", "谢谢。"),
        ("Hello!", "안녕하세요"),
        ("I am here.", "います"),
        ("Hello!", "嗨"),
        ("Aye", "是的是的"),
    ]
    assert look(tmp_path, short).is_fit.tolist() == [True, True, True, False, False]


def test_words_are_counted_and_every_pair_of_a_small_corpus_is_in_the_sample(tmp_path):
    found = look(tmp_path, [("one two", "eins zwei drei"), ("four", "")])
    assert (found.src_words, found.tgt_words) == (3, 3)
    assert found.sample == {0: ("one two", "eins zwei drei"), 1: ("four", "")}
    assert found.is_blank.tolist() == [False, True]


def test_the_sample_of_a_large_corpus_has_pairs_of_both_its_halves(tmp_path, monkeypatch):
    monkeypatch.setattr(split, "_SAMPLE_PAIRS", 10)
    sample = look(tmp_path, GOOD).sample
    assert len(sample) == 10
    assert max(sample) > 20 > min(sample)
    assert all(GOOD[row] == pair for row, pair in sample.items())


def test_a_corpus_without_a_pair_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"must have at least one pair, but .*a\.en is empty"):
        look(tmp_path, [])


def test_the_drawn_sets_are_reproducible_and_differ_with_another_seed(tmp_path):
    overview = look(tmp_path, GOOD)
    first, again, other = (split.draw(overview, 2, 10, seed) for seed in (3, 3, 4))
    assert [rows.tolist() for rows in first.sets] == [rows.tolist() for rows in again.sets]
    assert [rows.tolist() for rows in first.sets] != [rows.tolist() for rows in other.sets]
    assert all((np.diff(rows) > 0).all() for rows in first.sets)
    assert len(check_drawn(GOOD, first, 10)) == 20


def test_each_set_is_a_twentieth_of_a_corpus_without_repeats_up_to_the_requested_size(tmp_path):
    pairs = [(f"sentence number {n} of many", f"Satz Nummer {n} von vielen") for n in range(600)]
    overview = look(tmp_path, pairs)
    assert len(check_drawn(pairs, split.draw(overview, 2, 1000, 1), 30)) == 540
    assert len(check_drawn(pairs, split.draw(overview, 2, 12, 1), 12)) == 576
    assert len(check_drawn(pairs, split.draw(overview, 1, 1000, 1), 30)) == 570
    assert split.draw(overview, 0, 1000, 1).is_excluded.tolist() == [False] * 600


def test_copies_of_a_pair_are_held_out_with_it(tmp_path):
    pairs = [pair for n in range(4) for pair in GOOD for _ in range(n + 1)]
    pairs = [(src.upper() if n % 3 else src, tgt) for n, (src, tgt) in enumerate(pairs)]
    rest = check_drawn(pairs, split.draw(look(tmp_path, pairs), 2, 1000, 1), 10)
    assert len(rest) == len(pairs) // 2


def test_the_least_repeated_pairs_are_drawn_first(tmp_path):
    pairs = [pair for n, pair in enumerate(GOOD) for _ in range(1 if n < 20 else 5)]
    rest = check_drawn(pairs, split.draw(look(tmp_path, pairs), 2, 1000, 1), 10)
    assert {*rest} == {*GOOD[20:]}


@pytest.mark.parametrize("side", [0, 1])
def test_all_translations_of_a_sentence_are_held_out_with_it(tmp_path, side):
    pairs = [
        (f"command number {n} of many", f"Wunsch {n} in Worten {way}"[:: 1 - 2 * (way % 2)])
        for n in range(100)
        for way in range(11)
    ]
    pairs = [pair[:: 1 - 2 * side] for pair in pairs]
    rest = check_drawn(pairs, split.draw(look(tmp_path, pairs), 2, 1000, 1), 55)
    assert len(rest) == 1100 - 2 * 55


def test_sets_are_drawn_even_if_shared_sentences_link_all_pairs_and_most_pairs_remain(tmp_path):
    pairs = [
        (f"this is source number {n % 400}", f"das ist Ziel Nummer {(n * 7 + n // 400) % 401}")
        for n in range(2000)
    ]
    overview = look(tmp_path, pairs)
    held_out = split.draw(overview, 2, 1000, 1)
    size = len(held_out.sets[0])
    rest = check_drawn(pairs, held_out, size)
    assert size >= split.MIN_HELD_OUT
    assert len(rest) >= 0.75 * len(pairs)


def test_a_corpus_with_too_few_separable_pairs_to_hold_out_is_an_error(tmp_path):
    pairs = [(f"source number {n % 3}", f"Ziel Nummer {n // 3}") for n in range(300)]
    with pytest.raises(DataError) as error:
        split.draw(look(tmp_path, pairs), 2, 1000, 1)
    assert str(error.value) == (
        "the corpus must have 20 pairs that can be held out, but has 0 instead; those cannot that "
        "are very short or very long, have equal sides, or share a sentence with many others. "
        "Give --valid and --test."
    )
    with pytest.raises(DataError, match=r"but has 0 instead; .* have equal sides, or "):
        split.draw(look(tmp_path, [(line, line) for line, _ in GOOD]), 2, 1000, 1)


def test_pairs_that_share_a_sentence_with_a_given_set_are_not_fit_to_be_held_out(tmp_path):
    (tmp_path / "given").mkdir()
    own = [*GOOD[:3], ("Sentence number 3 of many?", "ein anderer Satz")]
    leaks, size = split.read_set(corpus(tmp_path / "given", own), "data.valid")
    overview = look(tmp_path, [*GOOD, ("", "")], leaks)
    assert size == 4
    assert np.flatnonzero(overview.is_given).tolist() == [0, 1, 2]
    assert np.flatnonzero(overview.shares_given).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(overview.is_fit).tolist() == list(range(4, 40))


def test_pairs_are_collected_by_their_row_numbers(tmp_path):
    found = split.collect(corpus(tmp_path, GOOD), np.array([0, 7, 39]))
    assert [(pair.src, pair.tgt) for pair in found] == [GOOD[0], GOOD[7], GOOD[39]]
