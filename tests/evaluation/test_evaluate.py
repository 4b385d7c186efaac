"""A run is scored on its own test sets; the output is text or JSON."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from conftest import Cli
from serving import with_languages
from tasks import copy_task, write, write_config

from mtrain.decode.pipeline import translate_lines
from mtrain.decode.translator import load
from mtrain.errors import RunError
from mtrain.evaluation import evaluation
from mtrain.evaluation.metrics import Scorer, ScoringOptions
from mtrain.run.run_dir import RunDir


def never(text: str) -> None:
    raise AssertionError(f"warned: {text}")


def test_a_tokenizer_whose_package_is_missing_gives_a_one_line_error(
    cli: Cli, trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MeCab", "ipadic"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    outcome = cli("eval", trained.path, "--tokenize", "ja-mecab")
    assert outcome.code == 2
    assert outcome.err.startswith("mtrain: `--tokenize ja-mecab` ")
    assert outcome.err.count("\n") == 1


def test_a_run_is_scored_on_its_own_test_sets(trained: RunDir) -> None:
    translator = load(trained)
    (result,) = evaluation.evaluate(trained, translator, never)
    pairs = copy_task(40, 3)
    assert result.name == "held_out"
    assert result.lines.src == [pair.src for pair in pairs]
    assert result.lines.refs[0] == [pair.tgt for pair in pairs]
    assert result.hypotheses == translate_lines(translator, result.lines.src)
    assert result.scores == Scorer(result.lines, ScoringOptions()).score(result.hypotheses)


def test_text_output_has_each_score_with_its_interval_and_its_signature(
    cli: Cli, trained: RunDir
) -> None:
    (result,) = evaluation.evaluate(trained, load(trained), never)
    outcome = cli("eval", trained.path)
    assert (outcome.code, outcome.err) == (0, "")
    bleu, chrf = result.scores
    assert outcome.lines == [
        f"held_out  BLEU {bleu.value:.2f} (μ = {bleu.mean:.2f} ± {bleu.half_width:.2f})",
        f"  {bleu.signature}",
        f"held_out  chrF2 {chrf.value:.2f} (μ = {chrf.mean:.2f} ± {chrf.half_width:.2f})",
        f"  {chrf.signature}",
    ]
    assert "|bs:1000|seed:12345|" in bleu.signature


def test_without_resampling_there_is_no_interval_and_no_bootstrap_in_the_signature(
    cli: Cli, trained: RunDir
) -> None:
    outcome = cli("eval", trained.path, "--resamples", "0", "--metrics", "chrf++")
    assert (outcome.code, outcome.err) == (0, "")
    assert len(outcome.lines) == 2
    assert re.fullmatch(r"held_out  chrF2\+\+ \d+\.\d\d", outcome.lines[0])
    assert outcome.lines[1].startswith("  nrefs:1|case:mixed|eff:yes|nc:6|nw:2|")


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_scores_at_a_lower_precision_are_reported_with_that_precision(
    cli: Cli, trained: RunDir, precision: str
) -> None:
    arguments = [trained.path, "--resamples", "0", "--metrics", "bleu", "--precision", precision]
    outcome = cli("eval", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.lines[2:] == [f"  translated with `--precision {precision}`"]
    tree = json.loads(cli("eval", *arguments, "--json").out)
    assert tree["held_out"]["precision"] == precision


def test_json_has_a_record_for_each_score(cli: Cli, trained: RunDir) -> None:
    outcome = cli("eval", trained.path, "--json", "--tokenize", "none", "--lowercase")
    assert (outcome.code, outcome.err) == (0, "")
    options = ScoringOptions("none", True)
    (result,) = evaluation.evaluate(trained, load(trained), never, options)
    assert json.loads(outcome.out) == {
        "held_out": {
            "num_lines": 40,
            "precision": "float32",
            "scores": [
                {
                    "system": str(trained.path),
                    "metric": score.metric,
                    "value": score.value,
                    "signature": score.signature,
                    "mean": score.mean,
                    "half_width": score.half_width,
                    "verbose": score.verbose,
                }
                for score in result.scores
            ],
        }
    }
    assert "|tok:none|" in outcome.out.decode()


def test_thai_is_scored_by_characters_unless_another_tokenizer_is_given(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    run = with_languages(trained, tmp_path / "th", "aa", "th")
    asked, by_default = (cli("eval", run, *more) for more in (["--tokenize", "char"], []))
    assert (asked.code, asked.err) == (0, "")
    assert by_default.lines == asked.lines and "|tok:char|" in by_default.lines[1]
    assert by_default.err == (
        "mtrain: BLEU's tokenizer for th is char; `--tokenize` takes another\n"
    )
    written = cli("eval", run, "--tokenize", "13a")
    assert (written.err, written.lines) == ("", cli("eval", trained.path).lines)


def test_eval_says_that_korean_has_a_better_tokenizer_than_the_default(
    cli: Cli, trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ko_mecab.MeCab", None)
    outcome = cli("eval", with_languages(trained, tmp_path / "ko", "aa", "ko"))
    assert outcome.err.startswith("mtrain: BLEU's tokenizer for ko is 13a; ko-mecab needs `pip ")


@pytest.fixture
def two_tests(trained: RunDir, tmp_path: Path) -> RunDir:
    """A run with a second test set, `short`, which has five lines of the first."""
    run = RunDir(Path(shutil.copytree(trained.path, tmp_path / "two")))
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    tree["data"]["tests"]["short"] = tree["data"]["tests"]["held_out"]
    write_config(run.config_path, tree)
    for side in ("src", "tgt"):
        lines = (run.data_dir / "tests" / f"held_out.{side}").read_text("utf-8").split("\n")
        write(run.data_dir / "tests" / f"short.{side}", lines[:5])
    return run


def test_only_the_named_test_sets_are_scored_in_the_given_order(
    cli: Cli, two_tests: RunDir
) -> None:
    def names(*options: str) -> list[str]:
        outcome = cli("eval", two_tests.path, "--metrics", "bleu", "--beam", "1", *options)
        assert (outcome.code, outcome.err) == (0, "")
        return [line.split()[0] for line in outcome.lines[::3]]

    assert names() == ["held_out", "short"]
    assert names("--tests", "short") == ["short"]
    assert names("--tests", "short,held_out") == ["short", "held_out"]
    outcome = cli("eval", two_tests.path, "--score", "--tests", "short")
    assert [line.split("\t")[:2] for line in outcome.lines] == [
        ["short", str(number)] for number in range(1, 6)
    ]


def test_an_unknown_test_set_is_refused_and_the_known_ones_are_listed(
    cli: Cli, noisy: RunDir
) -> None:
    said = f"mtrain: {noisy.path}: must have a test set 'dev', but has held_out instead.\n"
    for options in ([], ["--score"]):
        outcome = cli("eval", noisy.path, "--tests", "held_out,dev", *options)
        assert (outcome.code, outcome.out, outcome.err) == (2, b"", said)


def test_a_run_without_test_sets_is_refused(cli: Cli, noisy: RunDir, tmp_path: Path) -> None:
    run = RunDir(Path(shutil.copytree(noisy.path, tmp_path / "none")))
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    tree["data"]["tests"] = {}
    write_config(run.config_path, tree)
    said = f"mtrain: {run.config_path}: `data.tests` must name a test set, but is empty.\n"
    for options in ([], ["--score"]):
        assert cli("eval", run.path, *options).err == said


def test_a_missing_file_of_a_test_set_is_named(cli: Cli, trained: RunDir, tmp_path: Path) -> None:
    for name in ("config.yaml", "model.safetensors"):
        (tmp_path / name).symlink_to(trained.path / name)
    (tmp_path / "tokenizer").symlink_to(trained.tokenizer_dir)
    with pytest.raises(RunError) as error:
        evaluation.evaluate(RunDir(tmp_path), load(RunDir(tmp_path)), never)
    path = tmp_path / "data" / "tests" / "held_out.src"
    assert str(error.value) == f"{path}: is missing; restore it from a copy of the run."
    outcome = cli("eval", tmp_path)
    assert (outcome.code, outcome.err) == (2, f"mtrain: {error.value}\n")


def test_a_model_that_ignores_its_source_is_reported(
    cli: Cli, trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "translate_lines", lambda _, lines, *rest: ["ba"] * len(lines))
    outcome = cli("eval", trained.path)
    assert outcome.code == 0
    assert re.fullmatch(
        r"mtrain: held_out: \d+ different sources have only 1 different translation: the model "
        r"ignores its source; .*\n",
        outcome.err,
    )
