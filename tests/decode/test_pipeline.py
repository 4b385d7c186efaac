"""One output line per input line, in order: long, prefixed and blank lines, endless input."""

import functools
import math
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from copy import copy
from dataclasses import replace
from itertools import chain, islice, pairwise

import pytest
import torch
from builders import SRC_LINES, endless_model, model_config, randomise, vocabularies
from hypothesis import example, given
from hypothesis import strategies as st
from tasks import WORDS, copy_task

from mtrain.config.sections import TokenizerConfig
from mtrain.corpus.length_stats import CorpusStats
from mtrain.decode import pipeline
from mtrain.decode.beam import Hypothesis
from mtrain.decode.formats import Link, TranslatedLine, word_starts
from mtrain.decode.options import DecodingOptions, Sampling
from mtrain.decode.pipeline import LineTranslator, Warn, translate_lines
from mtrain.decode.shared_search import PendingSearch, SearchLimits
from mtrain.decode.split_long import split_line
from mtrain.decode.translator import EncodedSource, Translator, load
from mtrain.errors import DataError
from mtrain.run.load_model import LoadOptions, build_model
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import ProcessGroup
from mtrain.tokenizer import sentencepiece

LINES = [pair.src for pair in copy_task(12, 5)]
USUAL = CorpusStats(longest_src=20, least_ratio=0.1, most_ratio=9.0, share_copied=1.0)


@pytest.fixture(scope="module")
def translator(trained: RunDir) -> Translator:
    return load(trained, loading=LoadOptions("cpu"))


def never(text: str) -> None:
    raise AssertionError(f"warned: {text}")


def stream(
    translator: Translator,
    blocks: Sequence[list[str]],
    warn: Warn = never,
    prefixes: Sequence[str] | None = None,
    stats: CorpusStats | None = USUAL,
) -> list[TranslatedLine]:
    forced = iter(prefixes) if prefixes is not None else None
    return list(LineTranslator(translator, stats, warn).translate(blocks, forced))


def with_options(translator: Translator, **changes: object) -> Translator:
    options = replace(translator.options, **changes)  # type: ignore[arg-type]
    return Translator(translator.ensemble.models, translator.tokenizer, options, translator.device)


def texts(lines: Sequence[TranslatedLine]) -> list[str]:
    return [line.best[0].text for line in lines]


def assert_same(some: Sequence[TranslatedLine], others: Sequence[TranslatedLine]) -> None:
    """Equal except for the rounding of the log-probabilities, which depends on the batch."""
    for one, other in zip(some, others, strict=True):
        assert (one.number, one.src) == (other.number, other.src)
        for best, same in zip(one.best, other.best, strict=True):
            assert best.tokens == same.tokens
            assert best.text == same.text
            assert best.token_log_probs == pytest.approx(same.token_log_probs, abs=1e-4)


def num_tokens(line: str, translator: Translator) -> int:
    return len(translator.tokenizer.encode_src([line])[0])


def test_splitting_the_input_into_blocks_does_not_change_the_translations(
    translator: Translator,
) -> None:
    lines = ["", *LINES[:5], "  ", *LINES[5:], "\t"]
    whole = stream(translator, [lines])
    assert texts(whole) == translate_lines(translator, lines)
    assert [(line.number, line.src) for line in whole] == list(enumerate(lines, start=1))
    parts = stream(translator, [lines[:1], lines[1:4], [], lines[4:]])
    assert_same(parts, whole)


def test_exactly_one_block_of_an_endless_input_is_read_ahead(translator: Translator) -> None:
    num_read = 0

    def endless() -> Iterator[list[str]]:
        nonlocal num_read
        while True:
            num_read += 1
            yield LINES[:3]

    found = LineTranslator(translator, USUAL, never).translate(endless())
    for index, line in enumerate(islice(found, 9)):
        assert num_read == index // 3 + 2
        assert line.number == index + 1


def test_the_next_block_is_decoded_while_lines_are_yielded(translator: Translator) -> None:
    searches: list[str] = []

    class Recorded(Translator):
        def start_search(self, sources: Sequence[EncodedSource]) -> PendingSearch:
            pending, number = super().start_search(sources), len(searches)
            searches.append("running")

            def result() -> list[list[Hypothesis]]:
                found = pending.result()
                searches[number] = "done"
                return found

            def cancel() -> None:
                searches[number] += ", cancelled"
                pending.cancel()

            return PendingSearch(result, cancel)

    parts = translator.ensemble.models, translator.tokenizer, translator.options
    recorded = Recorded(*parts, translator.device)
    lines = LineTranslator(recorded, USUAL, never).translate([LINES[:2], LINES[2:4], LINES[4:6]])
    next(lines)
    assert searches == ["done", "running"]
    next(lines)
    next(lines)
    assert searches == ["done", "done", "running"]
    lines.close()
    assert searches == ["done", "done, cancelled", "running, cancelled"]


def test_an_empty_block_stops_reading_ahead_until_the_earlier_lines_are_yielded(
    translator: Translator,
) -> None:
    """A program that waits for its translations before it writes more lines gets them."""
    is_answered = False

    def asking() -> Iterator[list[str]]:
        yield LINES[:2]
        yield []
        assert is_answered
        yield LINES[2:3]

    lines = LineTranslator(translator, USUAL, never).translate(asking())
    assert [next(lines).src, next(lines).src] == LINES[:2]
    is_answered = True
    assert [line.src for line in lines] == LINES[2:3]


def test_the_lines_before_an_error_are_yielded_first(translator: Translator) -> None:
    def broken() -> Iterator[list[str]]:
        yield LINES[:2]
        raise DataError("in.gz: must be whole.")

    lines = LineTranslator(translator, USUAL, never).translate(broken())
    assert [next(lines).src, next(lines).src] == LINES[:2]
    with pytest.raises(DataError, match=r"in\.gz"):
        next(lines)
    strict = with_options(translator, max_input_tokens=3, on_long="error")
    lines = LineTranslator(strict, USUAL, never).translate([[""], [LINES[0]]])
    assert next(lines).src == ""
    with pytest.raises(DataError, match="line 2: must have at most 3 tokens"):
        next(lines)


def test_tokens_log_probs_and_alignment_match_the_translated_text(translator: Translator) -> None:
    found = stream(with_options(translator, with_alignment=True), [LINES])
    copies = [line for line in found if line.best[0].text == line.src]
    assert len(copies) >= 8
    links: list[Link] = []
    for line in copies:
        (best,) = line.best
        tgt = translator.tokenizer.tgt
        assert best.tokens == (*tgt.pieces(best.text), "</s>")
        assert len(best.token_log_probs) == len(best.tokens)
        assert best.log_prob == pytest.approx(sum(best.token_log_probs))
        assert best.alignment is not None
        links += best.alignment
    assert sum(link.src == link.tgt for link in links) > 0.8 * len(links)


def test_greedy_search_without_scores_gives_the_same_text_tokens_alignment_and_flags(
    translator: Translator,
) -> None:
    long, limit = " ".join(LINES[:4]), num_tokens(LINES[0], translator) + 1
    greedy = with_options(translator, beam=1, max_input_tokens=limit, with_alignment=True)
    warned: list[str] = []
    scored = stream(greedy, [["", *LINES, long]], warned.append)
    unscored = with_options(greedy, with_scores=False)
    found = stream(unscored, [["", *LINES, long]], lambda _: None)
    assert any("parts" in text for text in warned)
    for one, other in zip(found, scored, strict=True):
        (best,), (expected,) = one.best, other.best
        assert (best.text, best.tokens) == (expected.text, expected.tokens)
        assert (best.alignment, best.flags) == (expected.alignment, expected.flags)
        assert math.isnan(best.score) == (one.src != "")


def test_an_n_best_list_is_sorted_and_begins_with_the_single_best_translation(
    translator: Translator,
) -> None:
    single = with_options(translator, beam=4)
    ranking = with_options(single, num_best=3)
    ranked = stream(ranking, [["", *LINES]])
    assert texts(ranked) == translate_lines(single, ["", *LINES])
    assert ranked[0].best[0].text == ""
    for line in ranked[1:]:
        scores = [best.score for best in line.best]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert len({best.tokens for best in line.best}) == 3


def test_samples_depend_on_the_seed_and_the_line_number_but_not_on_the_blocks(
    translator: Translator,
) -> None:
    drawing = with_options(translator, num_best=2, sampling=Sampling(temperature=2.5))
    same = ["ba ce di"] * 8
    first = stream(drawing, [same], warn=lambda _: None)
    parts = stream(drawing, [same[:3], same[3:]], warn=lambda _: None)
    assert_same(parts, first)
    other = stream(with_options(drawing, seed=2), [same], warn=lambda _: None)
    assert texts(other) != texts(first)
    assert len({tuple(best.text for best in line.best) for line in first}) > 4


# Ranks


class Rank(ProcessGroup):
    """One of two ranks; `sent` has the messages that the first one broadcasts."""

    size = 2

    def __init__(self, rank: int, sent: list[bytes]) -> None:
        self.rank, self.sent = rank, sent

    def broadcast_bytes(self, message: bytes) -> bytes:
        if self.is_first:
            self.sent.append(message)
            return message
        return self.sent.pop(0)


def test_all_ranks_translate_the_lines_and_prefixes_of_the_first_rank(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[EncodedSource]] = []

    def start_search(self: Translator, sources: list[EncodedSource]) -> PendingSearch:
        asked.append(list(sources))
        found = [[Hypothesis([], [], 0.0, 0.0)] for _ in sources]
        return PendingSearch(lambda: found, lambda: None)

    monkeypatch.setattr(Translator, "start_search", start_search)
    sent: list[bytes] = []
    models, tokenizer = translator.ensemble.models, translator.tokenizer
    first, second = (
        Translator(
            models,
            tokenizer,
            translator.options,
            translator.device,
            process_group=Rank(rank, sent),
        )
        for rank in range(2)
    )
    blocks, prefixes = [["ba", "", "b\N{SNOWMAN}"], [], ["ce"]], ["tu", "", "gu", ""]
    said: list[str] = []
    lines = stream(first, blocks, said.append, prefixes)
    assert said
    assert stream(second, [], never) == lines
    assert sent == []
    assert asked[: len(blocks)] == asked[len(blocks) :]
    assert [source.text for source in asked[0]] == ["ba", "b\N{SNOWMAN}"]
    assert asked[0][0].prefix == tuple(tokenizer.tgt.encode(["tu"])[0])


def test_all_ranks_yield_the_lines_read_before_the_first_rank_fails_to_read_more(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_search(self: Translator, sources: list[EncodedSource]) -> PendingSearch:
        group, found = self.process_group, [[Hypothesis([], [], 0.0, 0.0)] for _ in sources]
        assert group.broadcast_bytes(b"all ranks search") == b"all ranks search"

        def gather() -> list[list[Hypothesis]]:
            assert group.broadcast_bytes(b"all ranks gather") == b"all ranks gather"
            return found

        return PendingSearch(gather, lambda: None)

    def broken() -> Iterator[list[str]]:
        yield LINES[:2]
        raise DataError("in.gz: must be whole.")

    monkeypatch.setattr(Translator, "start_search", start_search)
    sent: list[bytes] = []
    parts = translator.ensemble.models, translator.tokenizer, translator.options
    ranks = [
        Translator(*parts, translator.device, process_group=Rank(rank, sent)) for rank in range(2)
    ]
    first, second = (LineTranslator(rank, USUAL) for rank in ranks)
    lines = first.translate(broken())
    expected = [next(lines), next(lines)]
    with pytest.raises(DataError, match=r"in\.gz"):
        next(lines)
    lines = second.translate([])
    assert list(lines) == expected  # then it ends, while the first rank reports the error
    assert sent == []


# Prefixes


def test_a_translation_begins_with_its_prefix(translator: Translator) -> None:
    prefixes = ["tu so", "", "gu"]
    found = stream(translator, [LINES[:2], LINES[2:3]], prefixes=prefixes, warn=lambda _: None)
    for line, prefix in zip(found, prefixes, strict=True):
        assert line.best[0].text.startswith(prefix)
    assert found[1].best[0].text == translate_lines(translator, LINES[1:2])[0]
    assert not translate_lines(translator, LINES[:1])[0].startswith("tu so")


def test_a_prefix_with_characters_that_cannot_be_written_gives_a_warning(
    translator: Translator,
) -> None:
    said: list[str] = []
    stream(without_bytes(), [["The", "The", ""]], said.append, ["The ☃ é", "The", "☃"], None)
    assert [line for line in said if "prefix" in line] == [
        "line 1: has a prefix with characters that the tokenizer did not learn; the translation "
        "has \u2047 in place of them: 'é', '☃'."
    ]
    stream(translator, [["ba"]], never, ["☃"])  # as bytes


def test_fewer_prefixes_than_lines_are_an_error_that_names_the_line(
    translator: Translator,
) -> None:
    with pytest.raises(DataError) as error:
        stream(translator, [LINES[:2], LINES[2:]], prefixes=["ba"] * 3)
    assert str(error.value) == (
        "`--prefix` must have a line for each line of the input, but ends at line 3."
    )


def test_more_prefixes_than_lines_are_an_error_after_the_last_line(translator: Translator) -> None:
    with pytest.raises(DataError) as error:
        stream(translator, [LINES[:2], LINES[2:3]], lambda _: None, ["ba"] * 4)
    assert str(error.value) == (
        "`--prefix` must have a line for each line of the input, but goes on after line 3."
    )


def test_only_the_translations_that_are_returned_are_aligned(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    attend = Translator.attend

    def counted(self: Translator, sources: list[EncodedSource], targets: list[list[int]]) -> object:
        counts.append(len(targets))
        return attend(self, sources, targets)

    monkeypatch.setattr(Translator, "attend", counted)
    monkeypatch.setattr(pipeline, "_ALIGNED_AT_ONCE", 3)
    options = {"with_alignment": True, "mbr": "chrf", "beam": 4}
    lines = [line for line in LINES if line.strip()]
    found = stream(with_options(translator, **options), [lines])
    assert sum(counts) == len(lines)
    assert max(counts) == 3
    monkeypatch.setattr(pipeline, "_ALIGNED_AT_ONCE", 1000)
    assert stream(with_options(translator, **options), [lines]) == found
    assert all(line.best[0].alignment for line in found)


def test_scoring_and_aligning_end_with_the_limits_of_the_call(translator: Translator) -> None:
    cancelled = threading.Event()
    cancelled.set()
    reversing = copy(translator)
    reversing.reverse = translator
    limited = reversing.with_options(translator.options, SearchLimits(cancel=cancelled))
    assert limited.reverse is not None
    for scoring in (limited, limited.reverse):
        with pytest.raises(CancelledError):
            scoring.score_texts([("ba", "ba")])


# Lengths


@pytest.mark.parametrize(("ratio", "which"), [(9.0, "short"), (0.1, "long")])
def test_the_warning_about_an_unusual_length_has_the_token_counts_of_both_sides(
    translator: Translator, ratio: float, which: str
) -> None:
    line, said = " ".join(WORDS[:6] * 2), []
    stats = USUAL._replace(least_ratio=ratio, most_ratio=ratio, share_copied=1.0)
    (found,) = stream(translator, [[line]], said.append, stats=stats)
    assert "length" in found.best[0].flags
    num_tgt, num_src = len(found.best[0].tokens), num_tokens(line, translator)
    assert f" is very {which}: {num_tgt} tokens for {num_src}" in said[-1]


def test_the_warnings_about_a_split_line_have_the_same_token_count(translator: Translator) -> None:
    line, said = f"{' '.join(WORDS[:6] * 2)} .", []
    num_src = num_tokens(line, translator)
    splitting = with_options(translator, max_input_tokens=num_src // 2)
    stats = USUAL._replace(least_ratio=9.0, most_ratio=9.0, share_copied=1.0)
    (found,) = stream(splitting, [[line]], said.append, stats=stats)
    num_tgt = len(found.best[0].tokens) - 2  # with one eos of three
    assert f"line 1: has {num_src} tokens; translated in 3 parts." in said
    assert f": {num_tgt} tokens for {num_src}" in said[-1]


def test_the_length_of_a_split_line_is_judged_without_the_eos_of_its_parts(
    translator: Translator,
) -> None:
    line = f"{' '.join(WORDS[:6] * 6)} ."  # which is not copied
    splitting = with_options(translator, max_input_tokens=3)
    (found,) = stream(splitting, [[line]], lambda _: None)
    num_parts = len(split_line(line, translator.tokenizer.src, 3))
    num_tgt = len(found.best[0].tokens) - num_parts  # without eos
    num_src = num_tokens(line, translator) - 1
    ratio = (num_tgt + 1) / (num_src + 1)
    stats = USUAL._replace(least_ratio=ratio, most_ratio=ratio, share_copied=1.0)
    (found,) = stream(splitting, [[line]], lambda _: None, stats=stats)
    assert num_parts > 6
    assert found.best[0].text != line
    assert "length" not in found.best[0].flags


# Long lines

TWO = "ba ce. di fo gu!"  # the tokenizer was trained without punctuation
OF_TWO = (
    "line 1: has characters that the tokenizer did not learn, and the model may not read: '!', '.'."
)


def cut(
    translator: Translator, line: str, limit: int, policy: str, warn: Warn = never
) -> TranslatedLine:
    cutting = with_options(translator, max_input_tokens=limit, on_long=policy)
    (found,) = stream(cutting, [[line]], warn)
    return found


def test_a_line_within_max_input_tokens_is_not_cut(translator: Translator) -> None:
    limit = num_tokens(TWO, translator)
    for policy in ("split", "truncate", "error"):
        said: list[str] = []
        found = cut(translator, TWO, limit, policy, said.append)
        assert found.best[0].text == translate_lines(translator, [TWO])[0]
        assert found.best[0].flags == ("unknown",)
        assert said == [OF_TWO]


def test_split_cuts_at_sentence_ends_and_joins_the_translations_of_the_parts(
    translator: Translator,
) -> None:
    said: list[str] = []
    found = cut(translator, TWO, num_tokens(TWO, translator) - 1, "split", said.append)
    assert found.best[0].text == " ".join(translate_lines(translator, ["ba ce.", "di fo gu!"]))
    assert found.best[0].flags == ("split", "unknown")
    in_parts = f"line 1: has {num_tokens(TWO, translator)} tokens; translated in 2 parts."
    assert said == [in_parts, OF_TWO]


def test_characters_unknown_to_the_tokenizer_give_a_warning(translator: Translator) -> None:
    said: list[str] = []
    lines = ["ba ce", "ba\tce", "\xa0", "ba\xa0c\u0301e 123456", " di fo "]
    found = stream(translator, [lines], warn=said.append)
    flags = [line.best[0].flags for line in found]
    assert flags == [(), ("unknown",), (), ("unknown",), ()]
    learned_not = "has characters that the tokenizer did not learn, and the model may not read"
    assert said == [
        f"line 2: {learned_not}: '\\t'.",
        f"line 4: {learned_not}: '1', '2', '3', '4', '5', ...",
    ]
    said.clear()
    stream(translator, [["ba\t" * 3] * 8], warn=said.append)
    assert len(said) == 6
    assert said[-1] == "3 more lines: with characters that the tokenizer did not learn."


def test_a_replacement_character_is_flagged_as_unknown_without_a_second_warning(
    translator: Translator,
) -> None:
    (found,) = stream(translator, [["ba \ufffd ce"]], warn=never)
    assert found.best[0].flags == ("unknown",)


def split(translator: Translator, line: str, limit: int) -> list[list[int]]:
    return [part.source.ids for part in split_line(line, translator.tokenizer.src, limit)]


def test_split_keeps_closing_quotes_and_brackets_with_their_sentence(
    translator: Translator,
) -> None:
    line = 'ba (ce "di.") fo gu!'
    limit = num_tokens('ba (ce "di.")', translator)
    parts = split(translator, line, limit)
    found = translator.tokenizer.src.decode([part[:-1] for part in parts])
    assert found == ['ba (ce "di.")', "fo gu!"]


@pytest.mark.parametrize("mark", list("؟۔।॥។៕။։።፧།"))
def test_split_cuts_at_sentence_final_punctuation_of_other_scripts(
    translator: Translator, mark: str
) -> None:
    line = f"ba ce di{mark} fo gu"
    src = translator.tokenizer.src
    found = src.decode(
        [part[:-1] for part in split(translator, line, num_tokens(line, translator) - 1)]
    )
    assert found[-1] == "fo gu"


def test_split_makes_as_few_parts_as_possible(translator: Translator) -> None:
    line = " ".join(f"{word}." for word in WORDS[:6])
    limit = num_tokens(" ".join(f"{word}." for word in WORDS[:3]), translator)
    parts = split(translator, line, limit)
    assert [len(part) for part in parts] == [limit, num_tokens(line, translator) - limit + 1]


def test_split_cuts_a_long_sentence_between_words_and_a_long_word_between_pieces(
    translator: Translator,
) -> None:
    src = translator.tokenizer.src
    words = split(translator, "ba ce di fo gu", 4)
    assert [src.decode([part[:-1]])[0] for part in words] == ["ba ce di", "fo gu"]
    pieces = split(translator, "ba" * 30, 4)
    assert "".join(src.decode([part[:-1]])[0] for part in pieces) == "ba" * 30
    assert len(pieces) > 5


def test_split_makes_the_same_parts_of_a_line_with_repeated_spaces(translator: Translator) -> None:
    src, line = translator.tokenizer.src, " ".join(WORDS[:12])
    whole = num_tokens(line, translator)
    for limit in (whole, whole // 2, 3):
        expected = split_line(f"{line}. {line}.", src, limit)
        for gap in ("  ", " " * 40):
            spaced = split_line(f"{line}. {line}.".replace(" ", gap), src, limit)
            assert [part.source.text for part in spaced] == [p.source.text for p in expected]
            assert [part.words for part in spaced] == [part.words for part in expected]


def test_split_encodes_each_part_of_chinese_text_as_it_stands_without_spaces() -> None:
    src, line = vocabularies().src, "你好。再见。谢谢。"
    limit = len(src.encode(["你好。再见。"])[0]) + 1
    parts = split_line(line, src, limit)
    assert [part.source.text for part in parts] == ["你好。再见。", "谢谢。"]
    assert [part.source.ids[:-1] for part in parts] == src.encode(["你好。再见。", "谢谢。"])
    assert [{*part.words} for part in parts] == [{range(6)}, {range(6, 9)}]


@pytest.mark.parametrize("end", ["。”", "｡", "｡｣", "！」", "？）", "！？』", "。》】"])
def test_split_keeps_closing_marks_with_their_chinese_or_japanese_sentence(end: str) -> None:
    sentence = f"他说：“你好{end}"
    limit = len(vocabularies().src.encode([sentence])[0]) + 5
    parts = split_line(f"{sentence}她走了。", vocabularies().src, limit)
    assert [part.source.text for part in parts] == [sentence, "她走了。"]


@pytest.mark.parametrize("limit", range(11, 20))  # a letter and two marks have 9 bytes
def test_split_does_not_part_a_letter_from_its_marks_in_a_script_without_spaces(
    limit: int,
) -> None:
    line = "ที่นี่ใจดีเพื่อนบ้านน้ำใจ" * 3
    parts = split_line(line, vocabularies().src, limit)
    texts = [part.source.text for part in parts]
    assert "".join(texts) == line
    assert not any(unicodedata.category(text[0])[0] == "M" for text in texts)


@pytest.mark.parametrize("limit", range(5, 13))
def test_split_cuts_no_character_whose_bytes_fit(limit: int) -> None:
    src, text = vocabularies().src, "日本語 x ☃☃☃☃ abc"
    parts = split_line(text, src, limit)
    letters = "".join("".join(part.source.text or "" for part in parts).split())
    assert letters == "".join(text.split())
    assert max(len(part.source.ids) for part in parts) <= limit


@pytest.mark.parametrize("limit", range(3, 12))
def test_truncate_drops_whole_characters(translator: Translator, limit: int) -> None:
    cutting = with_options(translator, max_input_tokens=limit, on_long="truncate")
    said: list[str] = []
    (part,) = LineTranslator(cutting, warn=said.append)._parts([1], ["☃☃☃ ba"], None)[0]
    src = translator.tokenizer.src
    assert part.source.text == "☃" * min(3, (limit - 2) // 3)
    kept = len(part.source.ids) - 1
    assert part.source.ids == [*src.encode(["☃☃☃ ba"])[0][:kept], src.eos]
    assert said[0].endswith(f"; all after the first {kept} are dropped.")


ODD_TEXT = st.text(st.sampled_from("abc.!?…。\"'”)]» \t\r\n\u00a0\u2028é☃"), max_size=60)


@given(text=ODD_TEXT, limit=st.integers(2, 12))
def test_split_loses_no_text_and_keeps_every_part_within_the_limit(text: str, limit: int) -> None:
    src = vocabularies().src
    parts = split(untrained(), text, limit)
    assert all(2 <= len(part) <= limit and part[-1] == src.eos for part in parts)
    (letters,) = src.decode([[piece for part in parts for piece in part[:-1]]]) or [""]
    assert "".join(letters.split()) == "".join(text.split())


@given(text=ODD_TEXT, limit=st.integers(2, 12))
@example("Aaaabbbbcccc dog", 3)
@example("a。b。 c", 12)
def test_every_piece_of_a_split_line_has_the_numbers_of_its_words_in_the_whole_line(
    text: str, limit: int
) -> None:
    pieces_of: dict[range, list[int]] = {}
    for part in split_line(text, vocabularies().src, limit):
        for piece, words in zip(part.source.ids[:-1], part.words, strict=True):
            pieces_of.setdefault(words, []).append(piece)
    starts = [place for place, is_start in enumerate(word_starts(text)) if is_start]
    words_of = [text[i:j].strip(" ") for i, j in pairwise([*starts, len(text)])]
    groups = sorted(pieces_of, key=lambda words: words.start)
    found = {place for words in groups for place in words}
    assert found <= {*range(len(words_of))}
    assert {place for place, word in enumerate(words_of) if word.strip()} <= found
    for words in groups:
        (letters,) = vocabularies().src.decode([pieces_of[words]])
        assert "".join(letters.split()) == "".join("".join(words_of[i] for i in words).split())


@given(text=ODD_TEXT, limit=st.integers(2, 12))
def test_the_parts_of_a_cut_line_keep_the_source_text_with_unknown_characters(
    text: str, limit: int
) -> None:
    parts = split_line(text, without_bytes().tokenizer.src, limit)
    told = [part.source.text or "" for part in parts]
    assert "".join("".join(told).split()) == "".join(text.split())
    cutting = with_options(without_bytes(), max_input_tokens=limit, on_long="truncate")
    for part in LineTranslator(cutting)._parts([1], [text], None)[0]:
        assert "".join(text.split()).startswith("".join((part.source.text or "").split()))
        assert len(without_bytes().tokenizer.encode_src([part.source.text or ""])[0]) <= limit


@functools.cache
def without_bytes() -> Translator:
    config = TokenizerConfig(vocab_size=120, byte_fallback=False, shared=False)
    pairs = zip(SRC_LINES, SRC_LINES, strict=True)
    vocabulary = sentencepiece.train(config, pairs, len(SRC_LINES), seed=1).src
    own = sentencepiece.Tokenizer(vocabulary, vocabulary)
    model = build_model(model_config(), own)
    return Translator([model], own, DecodingOptions(), torch.device("cpu"))


def test_alignment_links_of_a_split_line_refer_to_existing_words(translator: Translator) -> None:
    for line, limit in [("babababababababa ce di", 4), ("ba。ce。di。 fo", 6)]:
        linking = with_options(translator, max_input_tokens=limit, with_alignment=True)
        (found,) = stream(linking, [[line]], warn=lambda _: None)
        (best,) = found.best
        assert best.alignment is not None
        assert {link.tgt for link in best.alignment} == {*range(sum(word_starts(best.text)))}
        assert max(link.src for link in best.alignment) < sum(word_starts(line))


def test_unknown_pieces_are_words_of_their_own_in_alignments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    translator, line = without_bytes(), "The ☃☃ house x☃y"
    tgt, unk = translator.tokenizer.tgt, translator.tokenizer.tgt.unk
    first, second = tgt.encode(["The", "house"])
    found = [Hypothesis([*first, unk, *second, unk, *second], [], -1.0, -1.0)]
    search = PendingSearch(lambda: [found], lambda: None)
    monkeypatch.setattr(Translator, "start_search", lambda *_: search)
    linking = with_options(translator, with_alignment=True, retry_flagged=False)
    (best,) = stream(linking, [[line]], warn=lambda _: None)[0].best
    assert best.text == "The \u2047  house \u2047  house"
    assert best.alignment is not None
    assert {link.tgt for link in best.alignment} == {*range(5)}
    (part,) = LineTranslator(linking)._parts([1], [line], None)[0]
    words = [words.start for words in part.words]
    pieces = zip(words, tgt.pieces(line), strict=True)
    assert [word for word, piece in pieces if "☃" in piece] == [1, 3]
    assert words[-1] == 3


def untrained() -> Translator:
    torch.manual_seed(1)
    model = build_model(model_config(), vocabularies()).double()
    randomise(model, seed=1)
    return Translator(
        [model], vocabularies(), DecodingOptions(beam=2, max_extra_tokens=3), torch.device("cpu")
    )


def test_truncate_translates_the_beginning_with_a_warning(translator: Translator) -> None:
    said: list[str] = []
    found = cut(translator, "ba ce di fo gu", 4, "truncate", said.append)
    assert found.best[0].text == translate_lines(translator, ["ba ce di"])[0]
    assert found.best[0].flags == ("truncated",)
    assert said == ["line 1: has 6 tokens; all after the first 3 are dropped."]


def test_on_long_error_raises_an_error_that_names_the_line(translator: Translator) -> None:
    with pytest.raises(DataError) as error:
        cut(translator, "ba ce di fo gu", 4, "error")
    assert str(error.value) == (
        "line 1: must have at most 4 tokens, but has 6 instead; `--on-long split` or `--on-long "
        "truncate` takes it."
    )


def test_a_line_longer_than_any_training_source_is_translated_whole_with_a_warning(
    translator: Translator,
) -> None:
    said: list[str] = []
    usual = USUAL._replace(longest_src=4)
    found = stream(translator, [["ba ce di", "ba ce di fo"]], warn=said.append, stats=usual)
    assert texts(found) == translate_lines(translator, ["ba ce di", "ba ce di fo"])
    assert said == [
        "line 2: has 5 tokens, the longest of the training 4; translated whole. "
        "`mtrain translate --max-input-tokens` cuts such lines."
    ]


def test_a_line_longer_than_the_learned_positions_gives_a_warning() -> None:
    lines = ["a", "", " ".join(SRC_LINES[:2])]
    limit = len(vocabularies().encode_src(lines[2:])[0]) - 1
    config = model_config(positions="learned", max_positions=limit)
    model = build_model(config, vocabularies()).eval()
    learned = Translator([model], vocabularies(), DecodingOptions(beam=1), torch.device("cpu"))
    said: list[str] = []
    stream(learned, [lines], warn=said.append, stats=None)
    assert said[0] == (
        f"line 3: has {limit + 1} tokens, but the model learned {limit} positions; the tokens "
        "after them share the last one. `mtrain translate --max-input-tokens` cuts such lines."
    )


# Warnings


def test_warnings_name_the_first_five_flagged_lines_and_count_the_others(
    translator: Translator,
) -> None:
    said: list[str] = []
    copies = ["ba ce", "fo", *LINES]
    unusual = USUAL._replace(share_copied=0.0)
    found = stream(translator, [copies[:3], copies[3:]], warn=said.append, stats=unusual)
    numbers = [line.number for line in found if line.best[0].flags == ("copy",)]
    assert len(numbers) > 7
    assert said == [
        *(f"line {number}: the translation is a copy of the line." for number in numbers[:5]),
        f"{len(numbers) - 5} more lines: the translation is a copy of the line.",
    ]


def test_a_translation_that_reached_the_length_limit_is_flagged(translator: Translator) -> None:
    options = replace(translator.options, beam=1, max_extra_tokens=0)
    model = endless_model(translator.model.config, translator.tokenizer)
    endless = Translator([model], translator.tokenizer, options, translator.device)
    said: list[str] = []
    (line,) = stream(endless, [["ba ce di"]], warn=said.append)
    assert len(line.best[0].tokens) == num_tokens("ba ce di", translator)
    assert "limit" in line.best[0].flags
    assert any("reached the length limit" in text for text in said)
    finished = stream(translator, [LINES])
    assert all(not line.best[0].flags for line in finished)
    assert len(list(chain(*(line.best for line in finished)))) == len(LINES)


# Second searches


@pytest.fixture(scope="module")
def looping() -> Translator:
    """An untrained model, some of whose translations loop."""
    tokenizer = vocabularies()
    torch.manual_seed(4)
    model = build_model(model_config(), tokenizer)
    randomise(model, 4)
    options = DecodingOptions(beam=2, max_extra_tokens=12)
    return Translator([model.eval()], tokenizer, options, torch.device("cpu"))


def flags_of(lines: Sequence[TranslatedLine]) -> list[set[str]]:
    return [{flag for flag in line.best[0].flags if flag != "limit"} for line in lines]


def ignore(_: str) -> None:
    pass


@pytest.mark.parametrize("beam", [1, 2])
def test_a_line_whose_translation_loops_is_searched_again_without_repeated_trigrams(
    looping: Translator, beam: int
) -> None:
    retrying = with_options(looping, beam=beam)
    plain = with_options(looping, beam=beam, retry_flagged=False)
    lines = [" ".join(line.split()[: 1 + index % 5]) for index, line in enumerate(SRC_LINES[:20])]
    first, second = (stream(own, [lines], ignore, stats=None) for own in (plain, retrying))
    is_loop = ["loop" in flags for flags in flags_of(first)]
    assert set(is_loop) == {False, True}
    assert not any("retried" in flags for flags in flags_of(first))
    for had_loop, before, after in zip(is_loop, first, second, strict=True):
        flags = set(after.best[0].flags)
        assert ("retried" in flags, "loop" in flags) == (had_loop, False)
        if not had_loop:
            assert_same([before], [after])
        windows = [*zip(*(after.best[0].tokens[n:] for n in range(3)), strict=False)]
        assert not had_loop or len(set(windows)) == len(windows)
        alone = stream(retrying, [[after.src]], ignore, stats=None)
        assert alone[0].best[0].tokens == after.best[0].tokens
        assert alone[0].best[0].flags == after.best[0].flags


def test_a_retried_line_takes_its_whole_n_best_list_from_the_second_search(
    looping: Translator,
) -> None:
    options = {"beam": 3, "num_best": 3}
    plain = stream(with_options(looping, **options, retry_flagged=False), [SRC_LINES], ignore)
    again = stream(with_options(looping, **options), [SRC_LINES], ignore)
    bound = stream(with_options(looping, **options, no_repeat_ngram=3), [SRC_LINES], ignore)
    retried = [row for row, line in enumerate(plain) if "loop" in line.best[0].flags]
    assert retried
    for row in retried:
        assert_same([again[row]], [bound[row]])
        assert all("retried" in each.flags for each in again[row].best)


def test_a_looping_prefix_keeps_the_loop_flag_and_is_not_marked_as_retried(
    looping: Translator,
) -> None:
    word = SRC_LINES[0].split()[0]
    (line,) = stream(looping, [[SRC_LINES[0]]], ignore, [" ".join([word] * 6)])
    assert "loop" in line.best[0].flags
    assert "retried" not in line.best[0].flags


def test_sampled_translations_that_loop_are_not_searched_again(looping: Translator) -> None:
    sampled = {"sampling": Sampling(temperature=0.05), "num_best": 1}
    lines = [
        stream(with_options(looping, **sampled, retry_flagged=own), [SRC_LINES], ignore, stats=None)
        for own in (True, False)
    ]
    assert any("loop" in flags for flags in flags_of(lines[0]))
    assert_same(*lines)
    assert not any("retried" in flags for flags in flags_of(lines[0]))
