"""Scores are sacreBLEU's, said with its signatures."""

import json
import sys
from pathlib import Path

import pytest
import sacrebleu
from conftest import Cli
from tasks import copy_task

from mtrain import evaluate, translate
from mtrain.errors import ConfigError, RunError
from mtrain.evaluate import ScoringOptions
from mtrain.rundir import RunDir

HYPOTHESES = [
    "The cat sat on the mat.",
    "A dog , a house and THE tree",
    "Hello, world!",
    "",
    "Der Hund lief über die Straße.",
]
REFERENCES = [
    "The cat is on the mat.",
    "a dog, a house, and the tree",
    "Hello, world!",
    "Nothing was said.",
    "Der Hund lief über die nasse Straße.",
]
VERSION = sacrebleu.__version__


def by_sacrebleu(options: ScoringOptions) -> list[float]:
    bleu = sacrebleu.corpus_bleu(
        HYPOTHESES,
        [REFERENCES],
        lowercase=options.lowercase,
        tokenize=options.tokenize or "13a",
        force=True,
    )
    chrf = sacrebleu.metrics.chrf.CHRF(lowercase=options.lowercase)
    return [bleu.score, chrf.corpus_score(HYPOTHESES, [REFERENCES]).score]


@pytest.mark.parametrize("tokenize", [None, "13a", "none", "intl", "char", "zh"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_scores_equal_those_of_sacrebleu(tokenize: str | None, lowercase: bool) -> None:
    options = ScoringOptions(tokenize, lowercase)
    scores = evaluate.score(HYPOTHESES, REFERENCES, options)
    assert [score.metric for score in scores] == ["BLEU", "chrF"]
    assert [score.value for score in scores] == by_sacrebleu(options)
    case = "lc" if lowercase else "mixed"
    assert [score.signature for score in scores] == [
        f"nrefs:1|case:{case}|eff:no|tok:{tokenize or '13a'}|smooth:exp|version:{VERSION}",
        f"nrefs:1|case:{case}|eff:yes|nc:6|nw:0|space:no|version:{VERSION}",
    ]


def test_the_options_matter() -> None:
    options = [ScoringOptions(), ScoringOptions("none"), ScoringOptions(None, True)]
    values = {evaluate.score(HYPOTHESES, REFERENCES, each)[0].value for each in options}
    assert len(values) == 3


def test_bleu_alone_is_the_default_bleu_and_knows_a_perfect_score() -> None:
    assert evaluate.bleu(HYPOTHESES, REFERENCES) == by_sacrebleu(ScoringOptions())[0]
    assert evaluate.bleu(REFERENCES, REFERENCES) == pytest.approx(100.0)
    assert evaluate.bleu([""] * 5, REFERENCES) == 0.0


def test_text_that_looks_tokenized_is_scored_without_a_lecture(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tokenized = ["a b c d ."] * 200
    assert evaluate.bleu(tokenized, tokenized) == pytest.approx(100.0)
    assert capsys.readouterr() == ("", "")
    assert caplog.text == ""


def test_an_unknown_way_to_split_words_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as error:
        ScoringOptions("14b")
    known = ", ".join(sorted(sacrebleu.BLEU.TOKENIZERS))
    assert str(error.value) == f"--tokenize must be one of {known}, but is '14b' instead."


def test_a_way_to_split_words_that_is_not_installed_is_one_line(
    cli: Cli, trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MeCab", "ipadic"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    outcome = cli("eval", trained.path, "--tokenize", "ja-mecab")
    assert outcome.code == 2
    assert outcome.err.startswith("mtrain: --tokenize ")
    assert outcome.err.count("\n") == 1


def test_a_run_is_scored_on_its_own_test_sets(trained: RunDir) -> None:
    translator = translate.load(trained)
    (result,) = evaluate.evaluate(trained, translator)
    pairs = copy_task(40, 3)
    assert result.name == "held_out"
    assert result.lines.src == [pair.src for pair in pairs]
    assert result.lines.tgt == [pair.tgt for pair in pairs]
    assert result.hypotheses == translator.translate(result.lines.src)
    assert result.scores == evaluate.score(result.hypotheses, result.lines.tgt)


def test_text_has_the_value_and_its_signature(cli: Cli, trained: RunDir) -> None:
    results = evaluate.evaluate(trained, translate.load(trained))
    outcome = cli("eval", trained.path)
    assert (outcome.code, outcome.err) == (0, "")
    bleu, chrf = results[0].scores
    assert outcome.lines == [
        f"held_out  BLEU {bleu.value:.2f}",
        f"  {bleu.signature}",
        f"held_out  chrF {chrf.value:.2f}",
        f"  {chrf.signature}",
    ]


def test_json_has_test_sets_with_metric_value_and_signature(cli: Cli, trained: RunDir) -> None:
    outcome = cli("eval", trained.path, "--json", "--tokenize", "none", "--lowercase")
    assert (outcome.code, outcome.err) == (0, "")
    options = ScoringOptions("none", True)
    (result,) = evaluate.evaluate(trained, translate.load(trained), options)
    assert json.loads(outcome.out) == {
        "held_out": [
            {"metric": score.metric, "value": score.value, "signature": score.signature}
            for score in result.scores
        ]
    }
    assert "|tok:none|" in outcome.out.decode()


def test_two_test_sets_are_scored_each_by_its_name() -> None:
    lines = evaluate.Lines(REFERENCES, REFERENCES)
    results = [
        evaluate.TestResult(name, lines, found, evaluate.score(found, REFERENCES))
        for name, found in (("one", REFERENCES), ("two", HYPOTHESES))
    ]
    tree = json.loads("\n".join(evaluate.as_json(results)))
    assert list(tree) == ["one", "two"]
    assert tree["one"][0]["value"] > tree["two"][0]["value"]
    names = [line.split()[0] for line in evaluate.as_text(results) if "|" not in line]
    assert names == ["one", "one", "two", "two"]


def test_a_test_set_whose_text_is_gone_is_named(cli: Cli, trained: RunDir, tmp_path: Path) -> None:
    for name in ("config.yaml", "model.safetensors"):
        (tmp_path / name).symlink_to(trained.path / name)
    (tmp_path / "tokenizer").symlink_to(trained.tokenizer_dir)
    with pytest.raises(RunError) as error:
        evaluate.evaluate(RunDir(tmp_path), translate.load(RunDir(tmp_path)))
    path = tmp_path / "data" / "tests" / "held_out.src"
    assert str(error.value) == f"{path}: is missing; restore it from a copy of the run."
    outcome = cli("eval", tmp_path)
    assert (outcome.code, outcome.err) == (2, f"mtrain: {error.value}\n")
