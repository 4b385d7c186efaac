"""Scores equal those of the sacrebleu command on the same files, to the last digit."""

import json
import logging
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import sacrebleu
from conftest import Cli, Logged
from tasks import WORDS, write

from mtrain.errors import ConfigError
from mtrain.evaluation import metrics, significance
from mtrain.evaluation.comet import CometModel, paired_p_values
from mtrain.evaluation.metrics import Scorer, ScoringOptions, ignored_source
from mtrain.io.text_width import count
from mtrain.run.run_dir import RunDir

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
ALL = ("bleu", "chrf", "chrf++", "ter")


def scores_of(
    hypotheses: list[str], references: list[str], options: ScoringOptions
) -> list[metrics.Score]:
    """Score lines; the references are also the sources, which only COMET reads."""
    return Scorer(metrics.TestSet(references, [references]), options).score(hypotheses)


def noisy_copy(lines: list[str], seed: int, rate: float) -> list[str]:
    """Replace a share of the words by random words."""
    rng = random.Random(seed)
    return [
        " ".join(rng.choice(WORDS) if rng.random() < rate else word for word in line.split())
        for line in lines
    ]


rng = random.Random(5)
LINES = [
    " ".join(rng.choice([*WORDS, "Ba", "so,"]) for _ in range(rng.randint(3, 12)))
    + rng.choice(". ")
    for _ in range(60)
]
ONE, TWO, THREE = (
    noisy_copy(LINES, seed, rate) for seed, rate in enumerate((0.2, 0.25, 0.5), start=1)
)


def by_command(directory: Path, systems: list[list[str]], *options: str) -> str:
    """Return what the `sacrebleu` command prints for the files of these lines."""
    paths = [write(directory / f"{place}.hyp", lines) for place, lines in enumerate(systems)]
    reference = write(directory / "ref", LINES)
    command = [sys.executable, "-m", "sacrebleu", reference, "-i", *paths, "--quiet", *options]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("num_different", "is_ignored"), [(1, True), (3, True), (59, True), (60, False), (300, False)]
)
def test_a_model_with_few_different_translations_is_reported_as_ignoring_its_source(
    num_different: int, is_ignored: bool
) -> None:
    src, refs = ([f"{side} {number}" for number in range(300)] for side in ("source", "reference"))
    hypotheses = [f"output {number % num_different}" for number in range(300)]
    alike = count(num_different, "different translation")
    expected = (
        f"300 different sources have only {alike}: the model ignores its source; "
        "train it longer, with a lower `training.lr` or a longer `training.warmup_steps`"
    )
    assert ignored_source(src, refs, hypotheses) == (expected if is_ignored else None)


def test_few_different_references_or_sources_are_not_reported_as_an_ignored_source() -> None:
    assert ignored_source([], [], []) is None
    src, same = [f"source {number}" for number in range(300)], ["yes"] * 300
    assert ignored_source(src, [f"{number % 9}" for number in range(300)], same) is None
    assert ignored_source(["source"] * 300, [f"{number}" for number in range(300)], same) is None
    twenty = [f"{number % 20}" for number in range(300)]
    assert ignored_source(src, twenty, twenty) is None
    assert ignored_source(src, twenty, same) is not None


@pytest.mark.parametrize("lowercase", [False, True])
def test_scores_intervals_and_signatures_equal_those_of_the_sacrebleu_command(
    tmp_path: Path, lowercase: bool
) -> None:
    shown = json.loads(
        by_command(
            tmp_path,
            [ONE],
            *("-m", "bleu", "chrf", "ter", "--confidence", "-w", "12"),
            *(["--lowercase", "--chrf-lowercase"] * lowercase),
        )
    )
    options = ScoringOptions(lowercase=lowercase, metrics=("bleu", "chrf", "ter"))
    scores = scores_of(ONE, LINES, options)
    assert [(record["name"], record["signature"]) for record in shown] == [
        (score.metric, score.signature) for score in scores
    ]
    for record, score in zip(shown, scores, strict=True):
        ours = [score.value, score.mean, score.half_width]
        theirs = [record["score"], record["confidence_mean"], record["confidence_var"]]
        assert [float(f"{value:.12f}") for value in ours if value is not None] == theirs
        assert record.get("verbose_score", "") == score.verbose
        assert 0 < record["confidence_var"] < record["score"]


@pytest.mark.parametrize("lines", [ONE, LINES], ids=["with faults", "perfect"])
def test_a_score_is_printed_as_by_the_sacrebleu_command(tmp_path: Path, lines: list[str]) -> None:
    """A TER without any error is 0.00, and has no interval."""
    options = ("-m", "chrf", "ter", "--chrf-word-order", "2", "-ci", "-cin", "200", "-w", "2")
    shown = by_command(tmp_path, [lines], *options, "-f", "text", "--no-color")
    scores = scores_of(lines, LINES, ScoringOptions(metrics=["chrf++", "ter"], num_resamples=200))
    ours = [f"{score.metric}|{score.signature} = {score.format()}" for score in scores]
    assert [line.lstrip() for line in shown.splitlines()] == ours
    assert ours[1].endswith(" = 0.00") == (lines is LINES)
    assert scores[0].metric == "chrF2++"


@pytest.mark.parametrize("kind", ["bs", "ar"])
def test_paired_tests_have_the_p_values_and_signatures_of_the_sacrebleu_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert significance.NUM_TRIALS == 10_000  # as sacreBLEU's default; here 1,000 save time
    monkeypatch.setattr(significance, "NUM_TRIALS", 1000)
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    flags = [f"--paired-{kind}", f"--paired-{kind}-n", "1000"]
    systems = [ONE, TWO, THREE]
    told = ["bleu"] if kind == "bs" else ["bleu", "chrf"]  # JSON cannot hold the others' float32
    shown = json.loads(by_command(tmp_path, systems, "-m", *told, *flags))
    outputs = {str(place): lines for place, lines in enumerate(systems)}
    options = ScoringOptions(metrics=("bleu", "chrf", "ter"))
    scorer = Scorer(metrics.TestSet(LINES, [LINES]), options)
    scorer.score(ONE)  # its resampling must not affect the tests
    comparisons = {
        (comparison.metric, comparison.system): comparison
        for comparison in significance.compare(scorer, outputs)
    }
    assert len(comparisons) == 6
    assert {comparison.baseline for comparison in comparisons.values()} == {"0"}

    def p_value(metric: str, system: str) -> float:
        comparison = comparisons[metric, system]
        return comparison.p_bootstrap if kind == "bs" else comparison.p_randomization

    for metric, system in comparisons:
        if metric in shown[0]:
            theirs, baseline = shown[int(system)][metric], shown[0][metric]
            assert p_value(metric, system) == theirs["p_value"]
            assert comparisons[metric, system].difference == theirs["score"] - baseline["score"]
    assert p_value("BLEU", "1") > 0.05 > p_value("BLEU", "2")
    text = by_command(tmp_path, systems, "-m", "chrf", "ter", *flags, "-f", "text")
    ours = [f"{p_value(metric, system):.4f}" for system in "12" for metric in ("chrF2", "TER")]
    assert re.findall("p = ([0-9.]+)", text) == ours
    comparison = comparisons["TER", "1"]
    signature = (
        comparison.bootstrap_signature if kind == "bs" else comparison.randomization_signature
    )
    assert f"{kind}:1000|seed:7|" in signature
    assert text.rstrip().endswith(f" {signature}")


def test_a_run_has_the_scores_that_the_sacrebleu_command_gives_its_files(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    test = trained.data_dir / "tests" / "held_out"
    outcome = cli("translate", trained.path, test.with_suffix(".src"), "-o", tmp_path / "hyp")
    assert outcome.code == 0
    command = [sys.executable, "-m", "sacrebleu", test.with_suffix(".tgt"), "-i", tmp_path / "hyp"]
    options = ["-m", "bleu", "chrf", "ter", "-ci", "-w", "2", "-f", "text", "--no-color", "-q"]
    result = subprocess.run([*command, *options], capture_output=True, text=True)
    lines = cli("eval", trained.path, "--metrics", "bleu,chrf,ter").lines
    assert len(lines) == 6
    for shown, head, signature in zip(
        result.stdout.splitlines(), lines[::2], lines[1::2], strict=True
    ):
        _, metric, score = head.split(" ", 3)[1:]
        assert shown.lstrip().startswith(f"{metric}|{signature.strip()} = {score}")


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
def test_scores_equal_those_of_the_sacrebleu_library(tokenize: str | None, lowercase: bool) -> None:
    options = ScoringOptions(tokenize, lowercase)
    scores = scores_of(HYPOTHESES, REFERENCES, options)
    assert [score.metric for score in scores] == ["BLEU", "chrF2"]
    assert [score.value for score in scores] == by_sacrebleu(options)
    case = "lc" if lowercase else "mixed"
    drawn = "nrefs:1|bs:1000|seed:12345"
    assert [score.signature for score in scores] == [
        f"{drawn}|case:{case}|eff:no|tok:{tokenize or '13a'}|smooth:exp|version:{VERSION}",
        f"{drawn}|case:{case}|eff:yes|nc:6|nw:0|space:no|version:{VERSION}",
    ]


def test_the_tokenizer_and_lowercasing_change_the_bleu_score() -> None:
    options = [ScoringOptions(), ScoringOptions("none"), ScoringOptions(lowercase=True)]
    values = {scores_of(HYPOTHESES, REFERENCES, each)[0].value for each in options}
    assert len(values) == 3


def test_the_bleu_function_gives_the_default_bleu_and_100_for_the_references() -> None:
    assert metrics.bleu(HYPOTHESES, REFERENCES, "en") == by_sacrebleu(ScoringOptions())[0]
    assert metrics.bleu(REFERENCES, REFERENCES, "en") == pytest.approx(100.0)
    assert metrics.bleu([""] * 5, REFERENCES, "en") == 0.0


@pytest.fixture
def no_mecab(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ja", "ko"):
        monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{name}_mecab.MeCab", None)


@pytest.mark.usefixtures("no_mecab")
@pytest.mark.parametrize(
    ("tgt_lang", "name"),
    [
        *[("zh", "zh"), ("zh-TW", "zh"), ("zho_Hans", "zh"), ("ZH", "zh"), ("yue", "zh")],
        *[("th", "char"), ("lo", "char"), ("khm_Khmr", "char"), ("my", "char"), ("ja", "char")],
        *[("cn", "zh"), ("Chinese", "zh"), ("chinese-tw", "zh"), ("jp", "char"), ("Thai", "char")],
        *[("ko", None), ("en", None), ("zh-Latn", None), ("zha", None), ("aa", None)],
    ],
)
def test_a_target_language_without_spaces_has_its_own_tokenizer(
    tgt_lang: str, name: str | None
) -> None:
    assert metrics.language_tokenizer(tgt_lang) == name
    assert ScoringOptions().for_language(tgt_lang).tokenize == name
    assert ScoringOptions("none").for_language(tgt_lang).tokenize == "none"
    assert ScoringOptions(metrics=["chrf"]).for_language(tgt_lang).tokenize is None


def test_chinese_bleu_is_near_0_with_the_english_tokenizer_and_above_60_with_its_own() -> None:
    references = ["我在公园里看见一只小狗。", "他每天早上都去学校。"]
    hypotheses = ["我在公园里看见一只大狗。", "他每天晚上都去学校。"]
    assert metrics.bleu(hypotheses, references, "en") < 0.01
    assert metrics.bleu(hypotheses, references, "zh") > 60
    (score, _) = scores_of(hypotheses, references, ScoringOptions().for_language("zh"))
    assert "|tok:zh|" in score.signature


@pytest.mark.usefixtures("no_mecab")
def test_the_bleu_of_one_sentence_for_all_lines_is_below_the_noise_bleu() -> None:
    assert [metrics.noise_bleu(code) for code in ("en", "zh", "th", "ja")] == [3, 10, 20, 20]
    for line in LINES[:20]:
        assert metrics.bleu([line] * len(LINES), LINES, "th") < metrics.noise_bleu("th")


@pytest.mark.usefixtures("no_mecab")
def test_the_note_on_a_tokenizer_names_the_package_of_a_better_one() -> None:
    assert metrics.tokenizer_note("en") is None
    assert metrics.tokenizer_note("ko") == (
        "BLEU's tokenizer for ko is 13a; ko-mecab needs `pip install 'sacrebleu[ko]'`"
    )
    assert metrics.tokenizer_note("th") == "BLEU's tokenizer for th is char"
    assert metrics.tokenizer_note("ja") == (
        "BLEU's tokenizer for ja is char; ja-mecab needs `pip install 'sacrebleu[ja]'`"
    )


def test_japanese_and_korean_use_a_mecab_tokenizer_if_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "BLEU", lambda tokenize: None)
    assert metrics.language_tokenizer("ja") == "ja-mecab"
    assert metrics.language_tokenizer("ko") == "ko-mecab"
    assert metrics.tokenizer_note("ja") == "BLEU's tokenizer for ja is ja-mecab"


def test_text_that_looks_tokenized_is_scored_without_a_warning(
    capsys: pytest.CaptureFixture[str], logged: Logged
) -> None:
    tokenized = ["a b c d ."] * 200
    assert metrics.bleu(tokenized, tokenized, "en") == pytest.approx(100.0)
    assert capsys.readouterr() == ("", "")
    assert logged.messages == []


def test_an_unknown_tokenizer_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ConfigError) as error:
        ScoringOptions("14b")
    known = ", ".join(sorted(sacrebleu.BLEU.TOKENIZERS))
    assert str(error.value) == f"`--tokenize` must be one of {known}, but is '14b' instead."


def test_a_tokenizer_whose_package_is_missing_is_an_error_that_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    with pytest.raises(ConfigError) as error:
        scores_of(["a"], ["a"], ScoringOptions("ja-mecab"))
    said = str(error.value)
    assert said.startswith("`--tokenize ja-mecab` cannot be used here: Japanese tokenization ")
    assert said.endswith(" pip install sacrebleu[ja]")
    assert "\n" not in said


def test_a_tokenizer_whose_model_cannot_be_downloaded_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.SACREBLEU_DIR", str(tmp_path))
    unreachable = Mock(side_effect=URLError("Name or service not known"))
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    with pytest.raises(ConfigError) as error:
        ScoringOptions("flores200")
    assert unreachable.call_count == 1
    folder = f"{sacrebleu.utils.SACREBLEU_DIR}/models"
    assert str(error.value) == (
        f"`--tokenize flores200` needs a model that sacreBLEU downloads into {folder}, but it "
        "cannot be reached: Name or service not known."
    )


def test_metrics_are_scored_once_each_in_the_given_order() -> None:
    names = [
        score.metric for score in scores_of(ONE, LINES, ScoringOptions(metrics=(*ALL[::-1], "ter")))
    ]
    assert names == ["TER", "chrF2++", "chrF2", "BLEU"]


def test_a_scorer_shared_by_two_systems_gives_the_scores_of_one_scorer_per_system() -> None:
    options = ScoringOptions(metrics=ALL)
    scorer = Scorer(metrics.TestSet(LINES, [LINES]), options)
    both = [scorer.score(ONE), scorer.score(TWO)]
    assert both == [scores_of(ONE, LINES, options), scores_of(TWO, LINES, options)]
    no_intervals = scores_of(ONE, LINES, replace(options, num_resamples=0))
    assert [score.value for score in no_intervals] == [score.value for score in both[0]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"metrics": ["bleu", "blue"]},
            "`--metrics` must be some of bleu, chrf, chrf++, ter, but has 'blue' instead.",
        ),
        (
            {"metrics": ["comet"]},
            "`--metrics` must be some of bleu, chrf, chrf++, ter, but has 'comet' instead; "
            "`--comet PATH` asks for COMET.",
        ),
        (
            {"metrics": [""]},
            "`--metrics` must be some of bleu, chrf, chrf++, ter, but has '' instead.",
        ),
        (
            {"metrics": "bleu"},
            "`metrics` must be a list of metrics, but is one text; put it in a list.",
        ),
        (
            {"metrics": ["ter"], "tokenize": "intl"},
            "`--tokenize` needs the metric bleu.",
        ),
        (
            {"metrics": ["ter"], "lowercase": True},
            "`--lowercase` needs the metric bleu, chrf or chrf++.",
        ),
        *(
            (
                {"num_resamples": number},
                f"`--resamples` must be 0 or from 40 to 10,000, but is {number} instead.",
            )
            for number in (39, 10_001, 99_999_999_999)
        ),
    ],
)
def test_invalid_scoring_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        ScoringOptions(**options)
    assert str(error.value) == said


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", ""])
def test_a_seed_that_sacrebleu_cannot_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, seed: str
) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    with pytest.raises(ConfigError) as error:
        ScoringOptions()
    said = f"`SACREBLEU_SEED` must be a whole number or none, but is {seed!r} instead."
    assert str(error.value) == said
    assert ScoringOptions(num_resamples=0).num_resamples == 0, "nothing is drawn"


def test_a_test_set_of_one_line_shows_no_difference_between_systems() -> None:
    options = ScoringOptions(metrics=["bleu", "chrf"], num_resamples=50)
    outputs = {"first": [LINES[0]], "second": ["something else"]}
    compared = significance.compare(
        Scorer(metrics.TestSet(LINES[:1], [LINES[:1]]), options), outputs
    )
    assert [(each.p_bootstrap, each.p_randomization) for each in compared] == [(1.0, 1.0)] * 2
    assert all(each.difference < 0 for each in compared)


FAKE_COMET = """
import logging
from pathlib import Path

logging.basicConfig(level=logging.INFO, format="%(message)s")
__version__ = "2.2.7"
calls = []

class Prediction(dict):
    __getattr__ = dict.__getitem__

class Model:
    def predict(self, samples, batch_size=16, gpus=1, devices=None, mc_dropout=0,
                progress_bar=True, accelerator="auto", num_workers=None, length_batching=True):
        calls.append((len(samples), gpus, progress_bar))
        scores = [len(set(one["mt"].split()) & set(one["ref"].split())) / 10
                  + len(one["src"]) / 1000 for one in samples]
        return Prediction(scores=scores, system_score=sum(scores) / len(scores))

def load_from_checkpoint(checkpoint_path, reload_hparams=False, strict=False,
                         local_files_only=False):
    parent_folder = Path(checkpoint_path).parents[1]
    if not (parent_folder / "hparams.yaml").is_file():
        raise Exception(f"hparams.yaml file is missing from {parent_folder}!")
    return Model()
"""


@pytest.fixture
def comet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put a fake package `comet` on the path; return the folder of a model."""
    package = tmp_path / "packages" / "comet"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_COMET)
    monkeypatch.delitem(sys.modules, "comet", raising=False)
    monkeypatch.syspath_prepend(package.parent)
    model = tmp_path / "wmt22-comet-da"
    (model / "checkpoints").mkdir(parents=True)
    (model / "checkpoints" / "model.ckpt").write_bytes(b"weights")
    (model / "hparams.yaml").write_text("class_identifier: regression_metric")
    yield model
    sys.modules.pop("comet", None)


def test_comet_has_intervals_and_paired_tests_like_the_other_metrics(comet: Path) -> None:
    model = CometModel(comet)
    model.load()
    options = ScoringOptions(metrics=["bleu"], comet=model)
    _, score = scores_of(ONE, LINES, options)
    samples = [{"src": x, "mt": y, "ref": x} for x, y in zip(LINES, ONE, strict=True)]
    module = sys.modules["comet"]
    prediction = module.load_from_checkpoint(comet / "checkpoints" / "model.ckpt").predict(samples)
    assert score.metric == "COMET"
    assert score.value == pytest.approx(prediction.system_score, abs=1e-12)
    assert score.mean == pytest.approx(score.value, abs=0.02)
    assert score.half_width is not None
    assert 0 < score.half_width < 0.1
    name = "wmt22-comet-da@9a129038d9a0"
    assert score.signature == f"nrefs:1|bs:1000|seed:12345|model:{name}|version:2.2.7"
    outputs = {"one": ONE, "two": TWO, "three": THREE}
    compared = significance.compare(Scorer(metrics.TestSet(LINES, [LINES]), options), outputs)[2:]
    assert [comparison.metric for comparison in compared] == ["COMET", "COMET"]
    assert compared[1].difference < -0.05
    assert compared[1].p_bootstrap < 0.01 > compared[1].p_randomization
    assert compared[0].p_randomization > compared[1].p_randomization


@pytest.mark.parametrize("seed", ["12345", "none"])
def test_the_bootstrap_of_comet_draws_the_same_lines_of_both_systems(
    monkeypatch: pytest.MonkeyPatch, seed: str
) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    baseline = np.random.default_rng(1).random(200)
    p_bootstrap, _ = paired_p_values(baseline, baseline + 0.01, 1000)
    assert p_bootstrap == 1 / 1001


def test_a_comet_score_is_printed_with_four_decimals_and_a_bleu_score_with_two() -> None:
    comet, bleu = (
        metrics.Score(name, 0.81234, "", mean=0.81236, half_width=0.01)
        for name in ("COMET", "BLEU")
    )
    assert comet.format() == "0.8123 (μ = 0.8124 ± 0.0100)"
    assert bleu.format() == "0.81 (μ = 0.81 ± 0.01)"


def test_comet_scores_a_line_once_prints_nothing_and_leaves_the_root_logger_unchanged(
    comet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    model = CometModel(comet / "checkpoints" / "model.ckpt", num_gpus=1)
    model.load()
    options = ScoringOptions(metrics=[], comet=model)
    first = scores_of(ONE, LINES, options)
    assert scores_of(ONE, LINES, options) == first
    num_lines = len(set(zip(LINES, ONE, strict=True)))
    assert sys.modules["comet"].calls == [(num_lines, 1, False)]
    assert (root.level, root.handlers) == before
    assert capsys.readouterr() == ("", "")


def test_the_comet_option_of_eval_takes_the_path_of_a_model(
    cli: Cli, noisy: RunDir, comet: Path
) -> None:
    outcome = cli("eval", noisy.path, "--comet", comet, "--metrics", "bleu", "--device", "cpu")
    assert outcome.code == 0
    assert all(line.startswith("mtrain: held_out: ") for line in outcome.err.splitlines())
    bleu, _, score, signature = outcome.lines
    assert bleu.startswith("held_out  BLEU 0.")
    assert score.startswith("held_out  COMET 0.0")
    assert "|model:wmt22-comet-da@" in signature


def test_a_missing_comet_package_or_model_gives_a_one_line_error(
    cli: Cli, noisy: RunDir, comet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(path: Path) -> str:
        outcome = cli("eval", noisy.path, "--comet", path)
        assert (outcome.code, outcome.out) == (2, b"")
        return outcome.err

    path = comet / "other.ckpt"
    assert said(path) == (
        f"mtrain: `--comet` must be a model of COMET, but {path} is no file; comet.download_model "
        "fetches one.\n"
    )
    (comet / "hparams.yaml").unlink()
    path = comet / "checkpoints" / "model.ckpt"
    assert said(comet) == (
        f"mtrain: `--comet` must be a model of COMET, but {path} cannot be loaded: hparams.yaml "
        f"file is missing from {comet}!.\n"
    )
    monkeypatch.setitem(sys.modules, "comet", None)
    assert said(comet) == (
        "mtrain: `--comet` must have comet: pip install unbabel-comet adds it.\n"
    )
