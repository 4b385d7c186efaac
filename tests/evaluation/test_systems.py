"""Several systems on one test set: seeds, comparisons, details, and refused combinations."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import Cli, Logged
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tasks import copy_task, write, write_config

import mtrain
from mtrain.data import prepare
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.translator import Translator, load
from mtrain.evaluation import evaluation, metrics, significance
from mtrain.evaluation.evaluation import EvaluationPlan
from mtrain.evaluation.metrics import Scorer, ScoringOptions
from mtrain.run.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("few_trials")

SOURCES = [pair.src for pair in copy_task(40, 3)]
AS_TEST = metrics.TestSet(SOURCES, [SOURCES])
GREEDY = ["--beam", "1", "--metrics", "bleu"]
Changed = Callable[..., RunDir]


@pytest.fixture
def changed(noisy: RunDir, tmp_path: Path) -> Changed:
    """Return a function that copies a run with other settings or another test set."""

    def make(
        name: str, src: Any = None, tgt: Any = None, origin: RunDir = noisy, **keys: Any
    ) -> RunDir:
        run = RunDir(Path(shutil.copytree(origin.path, tmp_path / name)))
        tree = yaml.safe_load(run.config_path.read_text("utf-8"))
        for key, value in keys.items():
            section, _, setting = key.partition("__")
            if setting:
                tree[section][setting] = value
            else:
                tree[section] = value
        write_config(run.config_path, tree)
        for side, lines in (("src", src), ("tgt", tgt)):
            if lines is not None:
                write(run.data_dir / "tests" / f"held_out.{side}", lines)
        return run

    return make


@pytest.fixture
def noised(trained: RunDir, changed: Changed) -> RunDir:
    """A copy of the trained run with noise in its weights."""
    run = changed("noised", origin=trained)
    with safe_open(run.model_path, "pt") as file:
        metadata = file.metadata()
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(run.model_path).items()
    }
    save_file(tensors, run.model_path, metadata)
    return run


def read(path: Path | str) -> list[str]:
    return Path(path).read_text("utf-8").splitlines()


def error_line(outcome: Any) -> str:
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.count("\n") == 1
    return str(outcome.err.removeprefix("mtrain: ").rstrip("\n"))


def without_warnings_of_lines(outcome: Any) -> list[str]:
    """Return the lines of stderr without the warnings about poor translations."""
    pattern = r"mtrain: (\S+: )?held_out: "
    return [line for line in outcome.err.splitlines() if not re.match(pattern, line)]


def test_a_run_is_compared_with_a_run_and_a_file_by_paired_tests(
    cli: Cli, trained: RunDir, noisy: RunDir, tmp_path: Path
) -> None:
    hypotheses = translate_lines(load(trained), SOURCES)
    worse = [*hypotheses[:-2], "ba", "ce"]
    path = write(tmp_path / "worse.txt", worse)
    arguments = [trained.path, "--compare", noisy.path, "--compare", path, "--metrics", "bleu"]
    outcome = cli("eval", *arguments, "--json")
    assert outcome.code == 0
    assert without_warnings_of_lines(outcome) == []
    tree = json.loads(outcome.out)["held_out"]
    assert set(tree) == {"num_lines", "precision", "scores", "comparisons"}
    names = [str(trained.path), str(noisy.path), path]
    assert [record["system"] for record in tree["scores"]] == names
    noise = translate_lines(load(noisy), SOURCES)
    outputs = dict(zip(names, (hypotheses, noise, worse), strict=True))
    expected = significance.compare(Scorer(AS_TEST, ScoringOptions(metrics=["bleu"])), outputs)
    assert tree["comparisons"] == [vars(record) for record in expected]
    by_noise = tree["comparisons"][0]
    assert by_noise["system"] == names[1]
    assert by_noise["p_bootstrap"] < 0.01 > by_noise["p_randomization"]
    lines = cli("eval", *arguments).lines
    assert re.fullmatch(r"held_out  BLEU +difference   p \(bs\)   p \(ar\)", lines[0])
    assert lines[1].endswith(f"  {names[0]}")
    assert by_noise["difference"] <= -10
    row = re.escape(
        f"{by_noise['difference']:.2f}  0.0010*  {1 / (significance.NUM_TRIALS + 1):.4f}*"
    )
    assert re.fullmatch(rf"  (0\.00|0\.\d\d \(μ = \S+ ± \S+\)) +{row}  .*", lines[2])
    assert lines[2].endswith(f"  {names[1]}")
    assert re.fullmatch(r"  \S+ \(μ = \S+ ± \S+\) +-\d\.\d\d  0\.\d{4}.  0\.\d{4}.  .*", lines[3])
    assert lines[4:6] == [
        f"  {expected[0].bootstrap_signature}",
        f"  {expected[0].randomization_signature}",
    ]
    assert len(lines) == 8


def test_a_system_with_identical_output_has_difference_0_and_p_values_of_1(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    outcome = cli("translate", trained.path, "--beam", "1", stdin="\n".join(SOURCES).encode())
    path = write(tmp_path / "same.txt", outcome.lines)
    outcome = cli("eval", trained.path, *GREEDY, "--compare", path, "--json", "--details")
    tree = json.loads(outcome.out)["held_out"]
    (comparison,) = tree["comparisons"]
    assert [comparison["difference"], comparison["p_bootstrap"], comparison["p_randomization"]] == [
        0.0,
        1.0,
        1.0,
    ]
    assert tree["contrasts"] == [
        {"baseline": str(trained.path), "system": path, "better": [], "worse": []}
    ]


def test_runs_of_several_seeds_have_a_mean_and_a_standard_deviation(
    cli: Cli, trained: RunDir, changed: Changed
) -> None:
    other = changed("other", origin=trained, seed=2)
    third = changed("third", origin=trained, seed=3, src=SOURCES[::-1], training__lr=0.5)
    runs = [trained.path, other.path, third.path]
    outcome = cli("eval", *runs, "--json", "--beam", "1", "--metrics", "chrf,ter")
    assert outcome.code == 0
    assert outcome.err == (f"mtrain: {third.path}: differs from {trained.path} in `training.lr`.\n")
    tree = json.loads(outcome.out)["held_out"]
    for place, metric in enumerate(("chrF2", "TER")):
        values = [record["value"] for record in tree["scores"] if record["metric"] == metric]
        assert len(set(values)) == 2
        assert tree["summary"][place] == {
            "metric": metric,
            "num_runs": 3,
            "mean": statistics.mean(values),
            "std": statistics.stdev(values),
        }
    *lines, greedy = cli("eval", *runs, *GREEDY).lines
    assert greedy == "  translated with `--beam 1`"
    assert lines[0] == "held_out  BLEU"
    assert [line.rpartition("  ")[2] for line in lines[1:5]] == [
        *map(str, runs),
        "mean and standard deviation of 3 runs",
    ]
    assert lines[5].startswith("  nrefs:1|bs:1000|")
    assert len(lines) == 6


def test_the_translations_of_an_ensemble_equal_those_of_translate(
    cli: Cli, trained: RunDir, noised: RunDir, tmp_path: Path
) -> None:
    runs, options = [trained.path, noised.path], ["--mbr", "bleu", "--beam", "3"]
    text = "\n".join(SOURCES).encode()
    lines = cli("translate", *runs, *options, stdin=text).lines
    alone = [cli("translate", run, *options, stdin=text).lines for run in runs]
    assert lines not in alone
    path = write(tmp_path / "ensemble.txt", lines)
    compared = ["--compare", noised.path, "--compare", path]
    outcome = cli("eval", *runs, "--ensemble", *options, *compared, "--json", "--metrics", "bleu")
    assert (outcome.code, without_warnings_of_lines(outcome)) == (0, []), outcome.err
    tree = json.loads(outcome.out)["held_out"]
    name = f"{trained.path} + {noised.path}"
    assert [score["system"] for score in tree["scores"]] == [name, str(noised.path), path]
    scorer = Scorer(AS_TEST, ScoringOptions(metrics=["bleu"]))
    expected = [scorer.score(output)[0].value for output in (lines, alone[1], lines)]
    assert [score["value"] for score in tree["scores"]] == expected
    assert (tree["mbr"], tree["comparisons"][1]["difference"]) == ("bleu", 0.0)
    options += ["--resamples", "0", "--exact-stop", "--length-alpha", "0.5"]
    shown = cli("eval", *runs, "--ensemble", *options).lines
    assert [line for line in shown if "translated" in line] == [
        f"  translated with `--{option}`"
        for option in ("beam 3", "exact-stop", "length-alpha 0.5", "mbr bleu")
    ]
    tree = json.loads(cli("eval", *runs, "--ensemble", *options, "--json").out)["held_out"]
    assert (tree["beam"], tree["early_stop"], tree["length_alpha"]) == (3, False, 0.5)


def test_an_ensemble_scores_references_by_the_mean_of_the_probabilities(
    cli: Cli, trained: RunDir, noised: RunDir
) -> None:
    def log_probs(*arguments: Path | str) -> list[float]:
        return [float(row.split("\t")[3]) for row in cli("eval", *arguments, "--score").lines]

    first, second = log_probs(trained.path), log_probs(noised.path)
    together = log_probs(trained.path, noised.path, "--ensemble")
    for ensemble, *alone in zip(together, first, second, strict=True):
        assert sum(alone) / 2 < ensemble < max(alone)  # Jensen's inequality, and the best model


def test_two_runs_with_the_same_seed_give_a_warning(
    cli: Cli, noisy: RunDir, changed: Changed
) -> None:
    same = changed("same")
    outcome = cli("eval", noisy.path, same.path, *GREEDY)
    assert outcome.code == 0
    said = [f"mtrain: {same.path}: has the seed of {noisy.path}, 1."]
    assert without_warnings_of_lines(outcome) == said


def test_details_have_scores_by_length_and_by_rarity_and_the_best_and_worst_lines(
    cli: Cli, trained: RunDir, noisy: RunDir
) -> None:
    arguments = ["eval", trained.path, "--compare", noisy.path, "--metrics", "chrf", "--details"]
    tree = json.loads(cli(*arguments, "--json").out)["held_out"]
    details = tree["details"][str(trained.path)]
    hypotheses = translate_lines(load(trained), SOURCES)
    assert details["unit"] == "words"
    assert sum(group["num_lines"] for group in details["by_length"]) == 40
    for group in details["by_length"]:
        rows = [
            row
            for row, line in enumerate(SOURCES)
            if group["first"] <= len(line.split()) <= (group["last"] or 99)
        ]
        assert len(rows) == group["num_lines"]
        options = ScoringOptions(metrics=["chrf"], num_resamples=0)
        lines, lines_of_group = [SOURCES[row] for row in rows], [hypotheses[row] for row in rows]
        (score,) = Scorer(metrics.TestSet([], [lines]), options).score(lines_of_group)
        assert group["scores"] == {"chrF2": score.value}
    (common,) = details["by_rarity"]  # every word occurs in most of the 1,500 training pairs
    assert (common["first"], common["last"], common["num_lines"]) == (100, 999, 40)
    assert details["best"][0]["translations"][0]["score"] == 100.0
    worst = details["worst"][0]
    assert worst["source"] == SOURCES[worst["line"] - 1] == worst["reference"]
    assert worst["translations"][0]["text"] == hypotheses[worst["line"] - 1]
    (contrast,) = tree["contrasts"]
    assert contrast["better"] == []
    assert len(contrast["worse"]) == 5
    for example in contrast["worse"]:
        ours, theirs = example["translations"]
        assert (ours["system"], theirs["system"]) == (str(trained.path), str(noisy.path))
        assert ours["score"] > theirs["score"]
    text = cli(*arguments).out.decode()
    label = f"line {worst['line']}"
    assert f"\nheld_out  {trained.path}\n  words in the source " in text
    assert f"\n    100 to 999 times{'':20}40 " in text
    assert f"\n    {label:<11}{worst['source']}\n    reference  {worst['source']}\n" in text
    assert "\n  better lines, by chrF2: none\n" in text


def test_without_training_pairs_scores_by_rare_words_are_reported_as_not_known(
    cli: Cli, noisy: RunDir, changed: Changed
) -> None:
    run = changed("moved")
    (run.data_dir / "shards.json").unlink()
    outcome = cli("eval", run.path, *GREEDY, "--details")
    assert outcome.code == 0
    assert "  by rare words: not known, for the first run has no data/shards.json" in outcome.lines
    tree = json.loads(cli("eval", run.path, *GREEDY, "--details", "--json").out)["held_out"]
    assert tree["details"][str(run.path)]["by_rarity"] is None


def test_damaged_training_pairs_give_a_one_line_error(
    cli: Cli, trained: RunDir, changed: Changed
) -> None:
    run = changed("damaged", origin=trained)
    path = run.data_dir / "train-00000.arrow"
    path.write_bytes(path.read_bytes()[:1000])
    assert error_line(cli("eval", run.path, *GREEDY, "--details")) == (
        f"{path}: must be a whole table of pairs of this run's tokenizer, but is not; restore it "
        "from a copy of the run."
    )


def test_systems_that_cannot_be_compared_are_refused_before_anything_is_translated(
    cli: Cli, noisy: RunDir, changed: Changed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Translator, "start_search")
    short, run = write(tmp_path / "short", SOURCES[:-1]), noisy.path
    fewer = changed("fewer", src=SOURCES[:3], tgt=SOURCES[:3]).path
    other = changed("other", tgt=[*SOURCES[:6], "other", *SOURCES[7:]]).path
    upper = changed("upper", tgt=[*SOURCES[:6], SOURCES[6].upper(), *SOURCES[7:]]).path
    tests = noisy.config.data.model_dump()["tests"]
    renamed = changed("renamed", data__tests={"dev": tests["held_out"]}).path
    for path in (renamed / "data" / "tests").iterdir():
        path.rename(path.with_stem("dev"))
    differs = f"must have the references of 'held_out' that {run} has, but line 7 is another"
    for options, said in [
        (
            ["--compare", short],
            f"{short}: must have a line for each of the 40 lines of 'held_out', but has 39 "
            "instead.",
        ),
        (
            ["--compare", tmp_path / "x"],
            f"{tmp_path / 'x'}: must be a run folder or a file of translations, but is none.",
        ),
        (
            ["--compare", fewer],
            f"{fewer}: must have the 40 lines of 'held_out' that {run} has, but has 3 instead.",
        ),
        (["--compare", other], f"{other}: {differs}."),
        ([upper], f"{upper}: {differs}; `--lowercase` takes both."),
        (
            ["--compare", renamed],
            f"{renamed}: must have a test set 'held_out', but has dev instead.",
        ),
        (["--compare", run], f"{run}: must be named once, but is named twice."),
        ([upper, "--compare", short], "`--compare` must have one run, but has 2 instead."),
        (
            ["--compare", short, "--resamples", "0"],
            "`--resamples` must be > 0 with `--compare`, but is 0 instead.",
        ),
        ([upper, "--score"], "`--score` must have one run, but has 2 instead."),
        (["--ensemble", "--score"], "`--ensemble` must have two runs or more, but has 1 instead."),
        (["--ensemble"], "`--ensemble` must have two runs or more, but has 1 instead."),
        (["--score", "--mbr", "bleu"], "`--mbr` has no effect with `--score`; leave it out."),
    ]:
        assert error_line(cli("eval", run, *options)) == said


def test_a_second_run_that_cannot_translate_is_refused_before_anything_is_translated(
    cli: Cli, noisy: RunDir, changed: Changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Translator, "start_search")
    agreeing = changed("agreeing", seed=2, decoding__mbr="chrf").path
    untrained = changed("untrained", seed=3)
    untrained.model_path.unlink()
    shutil.rmtree(untrained.checkpoints_dir)
    missing = f"{untrained.model_path}: is missing; `mtrain train CONFIG` makes it."
    no_step = "must have a checkpoint of step 7, but has those of"
    for run, options, said in (
        (untrained.path, [], missing),
        (agreeing, ["--beam", "1"], "`beam` must be at least 2 for `mbr`, but is 1 instead"),
        (agreeing, ["--checkpoint", "7"], f"{noisy.path}: {no_step}"),
    ):
        for option in ([], ["--compare"]):
            assert error_line(cli("eval", noisy.path, *option, run, *options)).startswith(said)


@pytest.mark.parametrize("options", [["--ensemble"], [], ["--compare"]], ids=str)
def test_a_run_of_the_opposite_direction_is_refused_beside_another(
    cli: Cli, reverser: RunDir, back_run: Path, tmp_path: Path, options: list[str]
) -> None:
    path, run = write(tmp_path / "text", SOURCES), reverser.path
    said = f"{back_run}: must translate aa to bb as {run} does, but translates bb to aa instead."
    outcome = cli("eval", run, *options, back_run, "--src", path, "--ref", path, *GREEDY)
    assert error_line(outcome) == said
    assert error_line(cli("translate", run, back_run, path)) == said


def test_a_run_of_both_directions_is_an_ensemble_with_a_run_of_either(
    cli: Cli, reverser: RunDir, back_run: Path, tmp_path: Path
) -> None:
    both = RunDir(Path(shutil.copytree(reverser.path, tmp_path / "both")))
    tree = yaml.safe_load(both.config_path.read_text("utf-8"))
    files = tree["data"]["train"]
    tree["data"]["train"] = [files, {"src": files["tgt"], "tgt": files["src"]}]
    write_config(both.config_path, tree)
    for runs in ([both.path, back_run], [back_run, both.path], [reverser.path, both.path]):
        assert cli("translate", *runs, stdin=b"ba ce di").code == 0


def test_references_that_differ_only_in_case_are_accepted_with_lowercase(
    cli: Cli, noisy: RunDir, changed: Changed
) -> None:
    upper = changed("upper", tgt=[line.upper() for line in SOURCES]).path
    outcome = cli("eval", noisy.path, "--compare", upper, "--lowercase", *GREEDY, "--json")
    assert outcome.code == 0
    first, second = json.loads(outcome.out)["held_out"]["scores"]
    assert first | {"system": ""} == second | {"system": ""}


def test_a_file_of_translations_needs_one_test_set(
    cli: Cli, changed: Changed, tmp_path: Path
) -> None:
    run = changed("two")
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    tree["data"]["tests"]["short"] = tree["data"]["tests"]["held_out"]
    write_config(run.config_path, tree)
    for side in ("src", "tgt"):
        write(run.data_dir / "tests" / f"short.{side}", SOURCES[:4])
    path = write(tmp_path / "out.txt", SOURCES[:4])
    arguments = ["eval", run.path, *GREEDY, "--compare", path]
    assert error_line(cli(*arguments)) == (
        f"{path}: must be compared on one test set, but there are held_out, short; choose one with "
        "`--tests`."
    )
    outcome = cli(*arguments, "--tests", "short", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["short"]["scores"][1]["value"] == pytest.approx(100)


def test_translations_to_compare_may_come_from_a_pipe(cli: Cli, noisy: RunDir) -> None:
    reader, writer = os.pipe()
    os.write(writer, "\n".join(SOURCES).encode())
    os.close(writer)
    outcome = cli("eval", noisy.path, "--compare", f"/dev/fd/{reader}", *GREEDY, "--json")
    os.close(reader)
    assert outcome.code == 0
    assert json.loads(outcome.out)["held_out"]["scores"][1]["value"] == pytest.approx(100)


@pytest.mark.skipif(sys.platform != "linux", reason="every name is text there")
def test_a_file_name_that_is_not_utf8_is_printed_with_escapes(
    cli: Cli, noisy: RunDir, tmp_path: Path
) -> None:
    path = write(tmp_path / os.fsdecode(b"latin-\xe9.de"), SOURCES)
    outcome = cli("eval", noisy.path, "--compare", path, *GREEDY)
    assert outcome.code == 0
    assert "latin-\\udce9.de" in outcome.out.decode()


def test_eval_splits_long_lines_and_warns_as_translate_does(
    cli: Cli,
    trained: RunDir,
    changed: Changed,
    tmp_path: Path,
    logged: Logged,
) -> None:
    run = changed("short", origin=trained, data__max_tokens=5)
    translated = cli("translate", run.path, stdin="\n".join(SOURCES).encode())
    assert "translated in 2 parts" in translated.err
    (result,) = mtrain.evaluate(run.path)
    assert result.hypotheses == translated.lines
    said = [
        f"mtrain: held_out: {line.removeprefix('mtrain: ')}" for line in translated.err.splitlines()
    ]
    assert [f"mtrain: {message}" for message in logged.messages] == said
    path = write(tmp_path / "same.txt", translated.lines)
    outcome = cli("eval", run.path, "--compare", path, "--metrics", "bleu", "--json", "--details")
    assert outcome.code == 0
    assert [line for line in outcome.err.splitlines() if "held_out" in line] == said
    tree = json.loads(outcome.out)["held_out"]
    assert tree["scores"][0]["value"] == result.scores[0].value
    assert [record["difference"] for record in tree["comparisons"]] == [0.0]
    assert [record["worse"] for record in tree["contrasts"]] == [[]]


def test_a_warning_about_lines_names_the_run_where_several_translate(
    cli: Cli, trained: RunDir, changed: Changed
) -> None:
    run = changed("short", origin=trained, data__max_tokens=5)
    translated = cli("translate", run.path, stdin="\n".join(SOURCES).encode())
    expected = [
        f"mtrain: {run.path}: held_out: {line.removeprefix('mtrain: ')}"
        for line in translated.err.splitlines()
    ]
    outcome = cli("eval", trained.path, "--compare", run.path, "--metrics", "bleu")
    assert outcome.code == 0
    assert [line for line in outcome.err.splitlines() if str(run.path) in line] == expected != []


def test_details_fit_80_columns_for_odd_lines_and_control_characters_are_escaped(
    cli: Cli, changed: Changed, tmp_path: Path
) -> None:
    odd = ["\x1b[31mred " + "long " * 100, "", "x" * 500, "\u202eba", "中文句子" * 40, *SOURCES[5:]]
    run = changed("odd", src=odd, tgt=odd)
    outcome = cli("eval", run.path, *GREEDY, "--details")
    assert outcome.code == 0
    assert without_warnings_of_lines(outcome) == []
    assert "\x1b" not in outcome.out.decode()
    assert "\\x1b[31mred" in outcome.out.decode()
    shown = [line for line in outcome.lines if "|" not in line and str(run.path) not in line]
    assert max(map(columns, shown)) <= 80
    assert len(shown) < 150


def columns(text: str) -> int:
    import unicodedata

    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def test_evaluating_the_only_test_set_by_name_equals_evaluating_all_test_sets(
    noisy: RunDir,
) -> None:
    translator = load(noisy)
    some, whole = (
        evaluation.evaluate_systems(
            EvaluationPlan([noisy], [], names, ScoringOptions()), lambda _: translator, print
        )
        for names in (["held_out"], None)
    )
    assert some == whole


def test_a_text_with_two_references_has_the_scores_of_the_sacrebleu_command(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    src = write(tmp_path / "news.aa", SOURCES[:9])
    reversed_ = [" ".join(reversed(line.split())) for line in SOURCES[:9]]
    refs = [write(tmp_path / "one", reversed_), write(tmp_path / "two", SOURCES[:9])]
    given = ["--src", src, "--ref", refs[0], "--ref", refs[1]]
    outcome = cli("eval", trained.path, *given, "--json", "--details", "--metrics", "bleu,chrf,ter")
    assert (outcome.code, outcome.err) == (0, "")
    report = json.loads(outcome.out)["news.aa"]
    out = write(tmp_path / "out", translate_lines(load(trained), SOURCES[:9]))
    command = [sys.executable, "-m", "sacrebleu", *refs, "-i", out, "-m", "bleu", "chrf", "ter"]
    printed = subprocess.run([*command, "--confidence"], capture_output=True, check=True, text=True)
    expected = json.loads(printed.stdout)
    assert [score["metric"] for score in report["scores"]] == ["BLEU", "chrF2", "TER"]
    for ours, theirs in zip(report["scores"], expected, strict=True):
        assert ours["value"] == pytest.approx(theirs["score"], abs=0.05)
        assert ours["signature"].split("|")[0] == "nrefs:2"
    assert report["scores"][0]["value"] > 90  # as none of the reversed lines would have
    assert report["num_lines"] == 9
    best = report["details"][str(trained.path)]["best"][0]
    assert best["translations"][0]["score"] == 100
    assert best["reference"] == reversed_[best["line"] - 1]


def test_a_text_is_compared_and_scored_like_a_test_set(
    cli: Cli, trained: RunDir, noisy: RunDir, tmp_path: Path
) -> None:
    src = write(tmp_path / "text", SOURCES)
    arguments = ["--compare", noisy.path, "--json"]
    by_file = cli("eval", trained.path, "--src", src, "--ref", src, *arguments)
    by_name = cli("eval", trained.path, *arguments)
    assert json.loads(by_file.out)["text"] == json.loads(by_name.out)["held_out"]
    scores = cli("eval", trained.path, "--src", src, "--ref", src, "--score").lines
    assert scores == [
        line.replace("held_out", "text") for line in cli("eval", trained.path, "--score").lines
    ]


def test_invalid_combinations_of_a_text_references_and_options_are_refused(
    cli: Cli, noisy: RunDir, tmp_path: Path
) -> None:
    src, short, void = (
        write(tmp_path / name, lines)
        for name, lines in (("src", SOURCES[:3]), ("short", SOURCES[:2]), ("void", []))
    )
    for options, said in [
        (["--src", src], "`--src` needs `--ref`."),
        (["--ref", src], "`--ref` needs `--src`."),
        (
            ["--src", src, "--ref", src, "--tests", "held_out"],
            "`--tests` has no effect with `--src`; leave it out.",
        ),
        (
            ["--src", src, "--ref", src, "--ref", short],
            f"{short}: must have a line for each of the 3 lines of {src}, but has 2 instead.",
        ),
        (["--src", void, "--ref", void], f"{void}: must have at least one line, but is empty."),
        (
            ["--src", src, "--ref", src, "--ref", src, "--score"],
            "`--score` must have one `--ref`, but has 2 instead.",
        ),
        (
            ["--src", src, "--ref", src, "-o", src],
            f"`--output` would overwrite the input {src}; choose another file.",
        ),
    ]:
        assert error_line(cli("eval", noisy.path, *options)) == said


def test_a_test_set_that_is_new_in_the_config_is_added_to_the_run_and_scored(
    cli: Cli, changed: Changed, tmp_path: Path
) -> None:
    run = changed("more")
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    news = write(tmp_path / "news", SOURCES[:4])
    tree["data"]["tests"]["news"] = {"src": [news], "tgt": [news]}
    write_config(run.config_path, tree)
    outcome = cli("eval", run.path, *GREEDY, "--tests", "news", "--json")
    assert outcome.code == 0
    assert f"{run.path}: test set news added, 4 pairs\n" in outcome.err
    assert json.loads(outcome.out)["news"]["num_lines"] == 4


@pytest.mark.parametrize("option", [[], ["--compare"]], ids=str)
def test_a_new_test_set_is_added_to_each_run_that_is_scored(
    cli: Cli, changed: Changed, tmp_path: Path, option: list[str]
) -> None:
    news = write(tmp_path / "news", SOURCES[:4])
    tests = {"news": {"src": [news], "tgt": [news]}}
    paths = [changed(name, data__tests=tests, seed=seed).path for seed, name in enumerate("ab")]
    outcome = cli("eval", paths[0], *option, paths[1], *GREEDY, "--json")
    assert outcome.code == 0, outcome.err
    for path in paths:
        assert f"{path}: test set news added, 4 pairs\n" in outcome.err
    assert len(json.loads(outcome.out)["news"]["scores"]) == 2


def test_a_test_set_whose_files_change_in_the_config_of_the_run_is_read_again(
    cli: Cli, changed: Changed, tmp_path: Path
) -> None:
    run = changed("other_files")
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    held_out = tree["data"]["tests"]["held_out"]
    news = write(tmp_path / "news", SOURCES[:4])
    arguments = ["eval", run.path, *GREEDY, "--json", "--resamples", "0"]
    for corpus, num_lines in (
        ({"src": [news], "tgt": [news]}, 4),
        (tree["data"]["valid"], len(read(tree["data"]["valid"]["src"][0]))),  # known files
        (held_out, 40),
    ):
        tree["data"]["tests"]["held_out"] = corpus
        write_config(run.config_path, tree)
        for is_new in (True, False):
            outcome = cli(*arguments)
            assert json.loads(outcome.out)["held_out"]["num_lines"] == num_lines
            assert (f"{run.path}: test set held_out added" in outcome.err) == is_new
        assert prepare.damaged_files(run) == []
        assert set(prepare.read_marks(run)) >= {*corpus["src"], *corpus["tgt"]}
        assert (news in prepare.read_marks(run)) == (num_lines == 4)
