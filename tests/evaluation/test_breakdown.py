"""Scores by the length of the source, by the rarity of its words, and line by line."""

from collections import Counter
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest
from tasks import Said, tiny_tree, write_config

from mtrain.config import config_file
from mtrain.data import loader
from mtrain.data.prepare import prepare
from mtrain.evaluation import breakdown, evaluation, metrics
from mtrain.evaluation.breakdown import (
    NUM_EXAMPLES,
    Contrast,
    Example,
    break_down,
    contrast,
    line_scores,
)
from mtrain.evaluation.metrics import ScoringOptions
from mtrain.evaluation.report import as_text
from mtrain.run.run_dir import RunDir

SOURCES = ["one", "two words", "three words here", "four words are here", "five words are in here"]
TEST = metrics.TestSet(SOURCES * 8, [[f"{line} at last" for line in SOURCES] * 8])
OUTPUT = [line.replace("words", "birds") + " at last" for line in SOURCES] * 8
OPTIONS = ScoringOptions(metrics=("bleu", "ter"))
COMMON = dict.fromkeys(["four", "words", "are", "in", "here"], 5000)
TRAINING = COMMON | {"one": 0, "two": 9, "three": 10, "five": 1000}


def test_words_are_lowercased_and_stripped_of_surrounding_punctuation() -> None:
    line = " \u201eDer Hund,  don't -- (E-Mail) 3,5% \u0939\u093f\u0928\u094d\u0926\u0940\u0964"
    assert breakdown.split_words(line, "words") == [
        *("der", "hund", "don't", "e-mail", "3,5"),
        "\u0939\u093f\u0928\u094d\u0926\u0940",
    ]
    assert breakdown.split_words("中文，ABC。", "characters") == [*"中文abc"]


def test_lines_without_spaces_are_counted_in_characters() -> None:
    assert breakdown.unit_of(["a b", "c d e", "f"]) == "words"
    assert breakdown.unit_of(["中文句子", "很好", "a b"]) == "characters"
    assert breakdown.unit_of(["a b c", "", " ", "d e f", ""]) == "words"
    assert breakdown.unit_of(["", " "]) == "characters"
    thai = "ฉันรักเธอ และเธอ ก็รักฉัน"  # with spaces between phrases
    assert breakdown.unit_of([thai, "我有 2 只狗", "a b c"]) == "characters"


def test_groups_by_length_contain_every_line_once_and_have_the_scores_of_their_lines() -> None:
    parts = break_down(TEST, "system", OUTPUT, OPTIONS, None)
    assert [(group.first, group.last, group.num_lines) for group in parts.by_length] == [
        (1, 1, 8),
        (2, 2, 8),
        (3, 3, 8),
        (4, None, 16),
    ]
    assert parts.by_length[0].scores["TER"] == 0
    third = parts.by_length[2]
    test = metrics.TestSet([], [["three words here at last"] * 8])
    scorer = metrics.Scorer(test, ScoringOptions(metrics=("bleu", "ter"), num_resamples=0))
    scores = scorer.score(["three birds here at last"] * 8)
    assert third.scores == pytest.approx({score.metric: score.value for score in scores})
    assert parts.by_rarity is None


def test_groups_by_rarity_are_formed_by_the_rarest_word_of_the_source() -> None:
    test = metrics.TestSet([*TEST.src, "..."], [[*TEST.refs[0], "..."]])
    parts = break_down(test, "system", [*OUTPUT, "..."], OPTIONS, {"words": TRAINING})
    assert parts.by_rarity is not None
    assert [(group.first, group.last, group.num_lines) for group in parts.by_rarity] == [
        (0, 0, 8),
        (1, 9, 8),
        (10, 99, 8),
        (1000, None, 16),
    ]
    assert parts.by_length[0].first == 0


def test_best_and_worst_lines_are_ranked_by_chrf_with_longer_lines_first_on_ties() -> None:
    scores = line_scores(TEST, OUTPUT, OPTIONS)
    parts = break_down(TEST, "system", OUTPUT, OPTIONS, None)
    assert [example.line for example in parts.best] == [1, 6, 11, 16, 21]
    ends = sorted(scores)[:NUM_EXAMPLES]
    assert [example.translations[0].score for example in parts.worst] == ends
    (example, *_) = parts.worst
    row = example.line - 1
    assert (example.source, example.reference) == (TEST.src[row], TEST.refs[0][row])
    assert example.translations[0].text == OUTPUT[row]
    same = metrics.TestSet(["a b", "a b c d", "a b c"], [["x", "xyz", "xy"]])
    parts = break_down(same, "system", same.refs[0], OPTIONS, None)
    assert (
        [example.line for example in parts.best]
        == [2, 3, 1]
        == [example.line for example in parts.worst]
    )


def test_a_blank_line_translated_to_a_blank_line_is_neither_best_nor_worst() -> None:
    """sacreBLEU gives it a chrF2 of 0."""
    test = metrics.TestSet(["", "a", "b", " "], [["", "a c", "b", " "], ["", "c", "b", "d"]])
    output = ["", "a", "", " "]
    assert line_scores(test, output, OPTIONS)[0] == 0
    parts = break_down(test, "system", output, OPTIONS, None)
    assert [example.line for example in parts.best] == [2, 3]
    assert [example.line for example in parts.worst] == [3, 2]


def test_contrasts_are_the_lines_with_the_largest_gains_and_the_largest_losses() -> None:
    other = [*TEST.refs[0][:20], *["nothing"] * 20]
    contrasted = contrast(TEST, {"system": OUTPUT, "other": other}, "other", OPTIONS)
    ours, theirs = line_scores(TEST, OUTPUT, OPTIONS), line_scores(TEST, other, OPTIONS)
    gains = sorted(their - our for our, their in zip(ours, theirs, strict=True))

    def of(examples: list) -> list[float]:  # type: ignore[type-arg]
        return [
            example.translations[1].score - example.translations[0].score for example in examples
        ]

    assert of(contrasted.better) == gains[::-1][:NUM_EXAMPLES]
    assert of(contrasted.worse) == gains[:NUM_EXAMPLES]
    assert (contrasted.baseline, contrasted.system) == ("system", "other")


@pytest.mark.parametrize(
    ("src", "unit"), [(["a b", "c d e"], "words"), (["中文句子", "很好"], "characters")]
)
def test_the_report_names_the_unit_of_lengths_and_of_rarity(
    src: list[str], unit: Literal["words", "characters"]
) -> None:
    counts = {unit: Counter("".join(src))}
    test = metrics.TestSet(src, [src])
    parts = break_down(test, "system", src, OPTIONS, counts)
    report = evaluation.TestReport(
        [evaluation.TestResult("test", "system", test, src, [], parts)], []
    )
    plan = evaluation.EvaluationPlan([RunDir(Path("system"))], [], None, OPTIONS)
    lines = list(as_text([report], plan))
    assert any(line.startswith(f"  {unit} in the source ") for line in lines)
    heading = f"  training text has the rarest {unit[:-1]} "
    assert any(line.startswith(heading) for line in lines)


@pytest.mark.parametrize(("number", "label"), [(7, "line 7     "), (100_000, "line 100000 ")])
def test_a_line_of_any_number_is_separated_from_its_text(number: int, label: str) -> None:
    result = evaluation.TestResult("test", "system", TEST, OUTPUT, [])
    examples = [Example(number, "the dog", "der Hund", [])]
    report = evaluation.TestReport(
        [result], [], contrasts=[Contrast("system", "other", examples, [])]
    )
    plan = evaluation.EvaluationPlan([RunDir(Path("system"))], [], None, OPTIONS)
    assert f"    {label}the dog" in list(as_text([report], plan))


def test_scores_of_lines_ignore_case_only_with_lowercase() -> None:
    upper = [line.upper() for line in TEST.refs[0]]
    assert max(line_scores(TEST, upper, OPTIONS)) < 100
    lowercased = ScoringOptions(lowercase=True)
    assert min(line_scores(TEST, upper, lowercased)) == 100


@pytest.mark.parametrize("shared", [True, False])
def test_source_words_are_counted_in_the_training_pairs_of_the_run(
    tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tiny_tree(tmp_path)
    tree["tokenizer"]["shared"] = shared
    tree["model"]["tie_embeddings"] = "decoder"
    path = Path(tree["data"]["train"]["src"][0])
    path.write_text(path.read_text("utf-8").replace("ba ", "Ba, "), encoding="utf-8")
    config = config_file.load(write_config(tmp_path / "config.yaml", tree))
    run = RunDir(Path(config.run_dir))
    prepare(config, run, Said())
    expected = Counter(path.read_text("utf-8").lower().replace(",", "").split())
    sources = ["ba ce", "ba never"]
    texts = [sources, ["di ce"] * 2, ["ba"]]
    letters = Counter(path.read_text("utf-8").lower())
    read = Mock(side_effect=loader.read_ids)
    monkeypatch.setattr(loader, "read_ids", read)
    assert breakdown.count_in_training(run, texts) == {
        "words": {word: expected[word] for word in ("ba", "ce", "di", "never")},
        "characters": {letter: letters[letter] for letter in "ba"},
    }
    assert read.call_count == 1
    (run.data_dir / "shards.json").unlink()
    assert breakdown.count_in_training(run, texts) is None
