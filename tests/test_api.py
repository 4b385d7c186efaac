"""The Python interface: it translates and trains as the command line does; mistakes raise."""

import ast
import asyncio
import json
import logging
import math
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import Cli, Logged
from tasks import copy_task, reverse_task, tiny_tree, write, write_config, write_task

import mtrain
from mtrain import api
from mtrain.augmentation import augment as augmenting
from mtrain.autoconfig import write_config as initialising
from mtrain.data.prepare import read_test
from mtrain.decode.options import DecodingOptions
from mtrain.run import checkpoint
from mtrain.run.load_model import set_weights
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.training.trainer import Trainer
from mtrain.training.validation import ValidationSet


@pytest.fixture(scope="module")
def model(trained: RunDir) -> mtrain.Model:
    return mtrain.load(trained.path)


def test_every_public_name_exists_has_a_docstring_and_is_declared_for_type_checkers() -> None:
    text = Path(mtrain.__file__).read_text("utf-8")
    (typed,) = (node for node in ast.parse(text).body if isinstance(node, ast.If))
    told = {name.name for node in typed.body for name in node.names}  # type: ignore[attr-defined]
    assert told | {"__version__"} == set(mtrain.__all__) == set(dir(mtrain))
    for name in mtrain.__all__:
        assert getattr(mtrain, name).__doc__
    assert Path(mtrain.__file__).with_name("py.typed").is_file()


SETTINGS = """
import random, signal, sys, threading
import torch
torch.set_num_threads(2)
torch.backends.cuda.enable_cudnn_sdp(True)

def settings():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return [
        seen, torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(), torch.get_rng_state().tolist(),
        random.getstate(), [signal.getsignal(number) for number in signal.valid_signals()],
    ]

before = settings()
import mtrain
model = mtrain.load(sys.argv[1])
model.translate(["ba"] * 3)
print([number for number, (a, b) in enumerate(zip(before, settings(), strict=True)) if a != b])
"""


def test_translating_keeps_the_settings_of_the_calling_program(trained: RunDir) -> None:
    """Number of threads, in old and new threads, random state, signal handlers and backends."""
    command = [sys.executable, "-c", SETTINGS, str(trained.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_two_models_in_two_threads_translate_as_one_model_alone(
    trained: RunDir, model: mtrain.Model
) -> None:
    """The number of PyTorch's threads stays the same in old and new threads."""
    torch.set_num_threads(2)
    lines = [pair.src for pair in copy_task(20, 5)]
    expected = model.translate(lines)
    models = [model, mtrain.load(trained.path)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: each.translate(lines), 3 * models))
        assert list(pool.map(lambda _: torch.get_num_threads(), range(2))) == [2, 2]
    assert found == 6 * [expected]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'tarin'"):
        mtrain.tarin  # type: ignore[attr-defined]  # noqa: B018


def test_public_names_are_not_replaced_by_modules_after_evaluate(trained: RunDir) -> None:
    """A subpackage of the same name would replace a function when it is imported."""
    mtrain.evaluate(trained.path)
    for name in mtrain.__all__:
        assert type(getattr(mtrain, name)).__name__ != "module", name


def test_translations_equal_those_of_the_command_line(
    cli: Cli, trained: RunDir, model: mtrain.Model
) -> None:
    lines = [pair.src for pair in copy_task(20, 3)]
    by_verb = cli("translate", trained.path, stdin="".join(f"{x}\n" for x in lines).encode())
    assert model.translate(lines) == by_verb.lines
    assert model.translate(iter(lines)) == by_verb.lines


def test_blank_lines_line_breaks_and_surrogates_give_one_translation_each(
    model: mtrain.Model,
) -> None:
    odd = ["", "  ", "ba ce\n", "ba ce\r\n", "ba\nce", "ba\r\nce", "ba \ud800 ce"]
    found = model.translate(odd)
    assert found[:6] == ["", "", "ba ce", "ba ce", "ba ce", "ba ce"]
    assert len(found) == 7
    assert model.translate([]) == []


def test_the_lines_of_an_open_file_are_translated(model: mtrain.Model, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("ba ce\n\ndi fo\n", encoding="utf-8")
    with (tmp_path / "in").open(encoding="utf-8") as file:
        assert model.translate(file) == ["ba ce", "", "di fo"]


def test_each_call_warns_about_a_too_long_line_with_its_line_number(
    model: mtrain.Model, logged: Logged
) -> None:
    for _ in range(3):
        assert len(model.translate(["ba", "ba ce di fo. " * 10])) == 2
    assert len(logged.messages) == 3 * len(set(logged.messages)), "each call warns"
    assert re.match(r"line 2: has \d+ tokens; translated in 2 parts\.", logged.messages[0])
    assert {record.name for record in logged.records} == {"mtrain"}
    said: list[str] = []
    model.translate(["ba", "ba ce di fo. " * 10], on_warning=said.append)
    assert said == logged.messages[: len(said)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("ba ce", "`lines` must be a list of lines, but is one text; put it in a list."),
        (["ba", 3], "`lines`: line 2 must be text, but is 3 instead."),
        ([b"ba"], "`lines`: line 1 must be text, but is b'ba' instead."),
        (None, "`lines` must be a list of lines, but is None instead."),
    ],
)
def test_an_invalid_list_of_lines_is_an_error(model: mtrain.Model, lines: Any, said: str) -> None:
    with pytest.raises(mtrain.UserError) as error:
        model.translate(lines)
    assert str(error.value) == said


def test_decoding_options_come_from_the_run_unless_given_to_load(trained: RunDir) -> None:
    own = replace(DecodingOptions.from_config(trained.config), with_scores=False)
    assert mtrain.load(trained.path).translator.options == own
    changed = mtrain.load([trained.path], beam=1, length_alpha=0.0, device="cpu")
    assert changed.translator.options == replace(own, beam=1, length_alpha=0.0)


def test_invalid_arguments_raise_exceptions_with_command_line_messages(
    trained: RunDir, tmp_path: Path
) -> None:
    with pytest.raises(mtrain.RunError, match="must be a run folder, but does not exist"):
        mtrain.load(tmp_path / "absent")
    with pytest.raises(mtrain.DataError, match="`runs` must have a run folder, but is empty"):
        mtrain.load([])
    with pytest.raises(mtrain.ConfigError) as error:
        mtrain.load(trained.path, beam=0)
    assert str(error.value) == "`beam` must be between 1 and 1000, but is 0 instead."
    with pytest.raises(mtrain.DataError, match="`runs` must be a run folder or several, but is 3"):
        mtrain.load(3)  # type: ignore[arg-type]
    wrong: Any = None
    for function in (mtrain.train, mtrain.check, mtrain.tokenize, mtrain.load_config):
        with pytest.raises(mtrain.ConfigError, match="`config` must be a file, a mapping or a Con"):
            function(wrong)
    for opening in (mtrain.plot, lambda run: mtrain.export(run, "x", "ctranslate2")):
        with pytest.raises(mtrain.DataError, match="`run` must be a run folder, but is None inste"):
            opening(wrong)
    wrong = "other"
    for key in ("precision", "engine"):
        with pytest.raises(mtrain.ConfigError, match=f"`{key}` must be one of .*, but is 'other'"):
            mtrain.load(trained.path, **{key: wrong})
    with pytest.raises(
        mtrain.ConfigError, match=r"`to` must be one of ctranslate2, .* but is 'other'"
    ):
        mtrain.export(trained.path, "x", wrong)
    with pytest.raises(mtrain.ConfigError, match="`check_lines` must be >= 1, but is -5 instead"):
        mtrain.export(trained.path, "x", "ctranslate2", check_lines=-5)
    for wrong in (0, torch.device("cpu")):
        with pytest.raises(
            mtrain.ConfigError, match="`device` must be auto, cpu, cuda or cuda:N, "
        ):
            mtrain.load(trained.path, device=wrong)
    wrong = "250"
    with pytest.raises(mtrain.ConfigError, match="`checkpoint` must be a step, but is '250' inst"):
        mtrain.load(trained.path, checkpoint=wrong)
    tree = tiny_tree(tmp_path)
    for taking in (partial(mtrain.load_config, tree), partial(mtrain.init, "en", "de")):
        with pytest.raises(mtrain.ConfigError, match="`overrides` must be a list of settings, but"):
            taking(overrides="seed=3")
    with pytest.raises(mtrain.ConfigError) as error:
        mtrain.train(tree | {"sed": 1})
    assert str(error.value) == "config: `sed` is not a key of the config; did you mean `seed`?"
    with pytest.raises(mtrain.ConfigError, match=r"absent.yaml: cannot be read"):
        mtrain.train(tmp_path / "absent.yaml")


def test_a_mapping_a_file_and_a_config_object_load_the_same_config(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    config = mtrain.load_config(path, ["seed=3"], tmp_path / "other")
    assert (config.seed, config.run_dir) == (3, str(tmp_path / "other"))
    tree = tiny_tree(tmp_path)
    assert mtrain.load_config(tree, ["seed=3"], tmp_path / "other") == config
    assert mtrain.load_config(config) == config
    assert mtrain.load_config(mtrain.load_config(tree), ["seed=3"], tmp_path / "other") == config
    assert "seed" not in tree


def test_a_tilde_at_the_start_of_a_path_is_the_home_folder_as_in_a_config(
    trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, config = trained.path.parent, trained.config
    monkeypatch.setenv("HOME", str(home))
    requests = list[Any]()

    def stop(request: object, *_: object) -> None:
        requests.append(request)
        raise mtrain.DataError("nothing is written")

    monkeypatch.setattr(augmenting, "augment", stop)
    monkeypatch.setattr(initialising, "init", stop)
    options = mtrain.AugmentOptions(keep_best=0.5, agree_with="~/judge")
    calls = [
        partial(mtrain.augment, config, "~/run", "~/out", options, forward="~/a"),
        partial(mtrain.distill, config, "~/run", run_dir="~/new"),
        partial(mtrain.init, "a", "b", src="~/a", tgt="~/b", output="~/c.yaml", run_dir="~/new"),
    ]
    for call in calls:
        with pytest.raises(mtrain.DataError, match="nothing is written"):
            call()
    augmentation, distillation, new = requests
    assert [*augmentation.texts, augmentation.output] == [home / "a", home / "out"]
    assert augmentation.judge.path == home / "judge"
    assert distillation.output == home / "new-pairs"
    assert (new.config_path, new.run_dir) == (home / "c.yaml", str(home / "new"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_under_no_grad_or_inference_mode_gives_the_same_weights(
    mode: Any, tmp_path: Path
) -> None:
    tree, few = tiny_tree(tmp_path), ["training.max_steps=4", "training.validate_every=4"]
    expected = mtrain.train(mtrain.load_config(tree, few, tmp_path / "plain"))
    with mode():
        found = mtrain.train(mtrain.load_config(tree, few, tmp_path / "within"))
    name = "model.safetensors"
    assert (found / name).read_bytes() == (expected / name).read_bytes()


def test_training_from_a_mapping_in_a_thread_equals_training_by_command_line(
    cli: Cli, tmp_path: Path
) -> None:
    """Only the main thread may handle signals, but a notebook may train in another thread."""
    runs: list[Path] = []
    tree = tiny_tree(tmp_path, reverse_task)
    thread = threading.Thread(target=lambda: runs.append(mtrain.train(tree)))
    thread.start()
    thread.join()
    (run,) = runs
    assert run == Path(tree["run_dir"])
    assert cli("train", write_task(tmp_path, reverse_task), "--run", tmp_path / "verb").code == 0
    assert (run / "model.safetensors").read_bytes() == (
        tmp_path / "verb" / "model.safetensors"
    ).read_bytes()
    by_verb = cli("eval", run)
    (result,) = mtrain.evaluate(run)
    assert by_verb.lines[0] == f"held_out  BLEU {result.scores[0].format()}"


def test_evaluate_adds_the_test_sets_that_the_config_names_since(
    trained: RunDir, tmp_path: Path
) -> None:
    run = RunDir(shutil.copytree(trained.path, tmp_path / "run"))
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    sides = {
        side: [write(tmp_path / f"news.{side}", ["ba ce di", "fo gu"])] for side in ("src", "tgt")
    }
    tree["data"]["tests"]["news"] = sides
    model = mtrain.load(run.path)
    write_config(run.config_path, tree)
    results = {result.name: result for result in mtrain.evaluate(model)}
    assert results["news"].lines.src == ["ba ce di", "fo gu"]
    assert len(results) == 2


def test_the_results_of_an_ensemble_have_the_names_of_all_its_runs(
    trained: RunDir, tmp_path: Path
) -> None:
    other = shutil.copytree(trained.path, tmp_path / "other")
    (result,) = mtrain.evaluate(mtrain.load([trained.path, other]))
    assert result.system == f"{trained.path} + {other}"


def test_greedy_search_needs_no_option_against_the_mbr_of_the_run(
    trained: RunDir, tmp_path: Path
) -> None:
    run = RunDir(shutil.copytree(trained.path, tmp_path / "run"))
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    tree["decoding"] = {"beam": 3, "mbr": "chrf"}
    write_config(run.config_path, tree)
    assert mtrain.load(run.path).options.mbr == "chrf"
    assert mtrain.load(run.path, beam=1).options.mbr is None


def test_a_long_line_has_the_same_translation_in_validation_eval_translate_and_the_api(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    run = RunDir(shutil.copytree(trained.path, tmp_path / "short"))
    text = run.config_path.read_text("utf-8")
    run.config_path.write_text(text.replace("max_tokens: 32", "max_tokens: 5"), encoding="utf-8")
    config, lines = run.config, read_test(run, "held_out")
    with RunLog(tmp_path / "metrics.jsonl") as log:
        trainer = Trainer(config, run, log)
    weights = checkpoint.load_model(run.model_path, trainer.fingerprint)
    set_weights(trainer.model, weights, run.model_path)
    validation = ValidationSet(lines, trainer.tokenizer, 512, 5).translations(trainer.translator)
    assert sum(len(ids) > 5 for ids in trainer.tokenizer.encode_src(lines.src)) > 10
    model = mtrain.load(run.path, beam=1)
    assert model.translate(lines.src) == validation
    (result,) = api.evaluate(model)
    assert result.hypotheses == validation
    stdin = "".join(line + "\n" for line in lines.src).encode()
    assert cli("translate", run.path, "--beam", "1", stdin=stdin).lines == validation


def test_details_equal_the_jsonl_output_of_the_command_line(
    cli: Cli, trained: RunDir, model: mtrain.Model
) -> None:
    lines = ["ba ce", "", "di fo gu ba. " * 8, "\N{SNOWMAN} ba"]
    options = replace(model.options, num_best=2, with_alignment=True)
    found = model.translate(lines, options, details=True)
    stdin = "".join(f"{line}\n" for line in lines).encode()
    verb = cli("translate", trained.path, "--format", "jsonl", "--n-best", "2", stdin=stdin)
    for translation, tree in zip(found, map(json.loads, verb.lines), strict=True):
        each = [translation, *translation.alternatives]
        assert str(translation) == translation.text == tree["translation"]
        assert [list(one.flags) for one in each] == [best["flags"] for best in tree["n_best"]]
        assert [list(one.tokens) for one in each] == [best["tokens"] for best in tree["n_best"]]
        assert [one.score for one in each] == [best["score"] for best in tree["n_best"]]
        assert [list(map(list, one.alignment or ())) for one in each] == [
            best["alignment"] for best in tree["n_best"]
        ]
        assert hash(translation) == hash(replace(translation))
    assert "split" in found[2].flags
    assert "unknown" in found[3].flags
    assert [one.text for one in found] == model.translate(lines, options)


def test_options_of_a_call_translate_like_the_flags_of_the_command_line(
    cli: Cli, trained: RunDir, model: mtrain.Model, tmp_path: Path
) -> None:
    lines, prefixes = ["ba ce di", "fo gu"], ["di", "gu"]
    stdin = "".join(f"{line}\n" for line in lines).encode()
    (tmp_path / "prefix").write_text("di\ngu\n", encoding="utf-8")
    drawing = replace(model.options, sampling=mtrain.Sampling(0.7, 5, 0.9), seed=3, num_best=3)
    greedy = replace(model.options, beam=1, no_repeat_ngram=1, length_alpha=0.0)
    for options, flags in (
        (drawing, "--sample --temperature 0.7 --top-k 5 --top-p 0.9 --seed 3 --n-best 3"),
        (greedy, "--beam 1 --no-repeat-ngram 1 --length-alpha 0"),
    ):
        verb = cli("translate", trained.path, *flags.split(), stdin=stdin)
        found = model.translate(lines, options, details=True)
        assert verb.lines == [str(each) for best in found for each in (best, *best.alternatives)]
    verb = cli("translate", trained.path, "--prefix", tmp_path / "prefix", stdin=stdin)
    assert model.translate(lines, prefixes=prefixes) == verb.lines


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"beam": 0}, "`beam` must be between 1 and 1000, but is 0 instead."),
        ({"num_best": 9}, "`num_best` must be at most the beam (2), but is 9 instead."),
        ({"max_input_tokens": 1}, "`max_input_tokens` must be between 2 and "),
        ({"max_extra_tokens": 100_001}, "`max_extra_tokens` must be between 0 and 100000, but is "),
        ({"length_alpha": -1.0}, "`length_alpha` must be between 0 and 10, but is -1.0 instead."),
        ({"beam": "5"}, "`beam` must be a whole number, but is '5' instead."),
        ({"beam": None}, "`beam` must be a whole number, but is None instead."),
        ({"num_best": 1.5}, "`num_best` must be a whole number, but is 1.5 instead."),
        ({"length_alpha": True}, "`length_alpha` must be a number, but is True instead."),
        ({"early_stop": None}, "`early_stop` must be True or False, but is None instead."),
        ({"retry_flagged": "no"}, "`retry_flagged` must be True or False, but is 'no' instead."),
        ({"on_long": "cut"}, "`on_long` must be split, truncate, error, but is 'cut' instead."),
        ({"sampling": 3}, "`sampling` must be a Sampling or None, but is 3 instead."),
    ],
)
def test_an_option_of_the_wrong_type_or_out_of_range_is_an_error_that_names_it(
    model: mtrain.Model, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(mtrain.ConfigError) as error:
        replace(model.options, **change)
    assert str(error.value).startswith(said)


def test_invalid_sampling_values_and_options_of_a_call_are_errors(model: mtrain.Model) -> None:
    with pytest.raises(
        mtrain.ConfigError, match=r"`temperature` must be between 0\.01 and 100, bu"
    ):
        mtrain.Sampling(temperature=0.0)
    with pytest.raises(mtrain.ConfigError, match="`timeout_s` must be a number of seconds, but"):
        model.translate(["ba"], timeout_s=math.nan)
    wrong: Any = "3"
    with pytest.raises(mtrain.ConfigError, match="`timeout_s` must be a number of seconds, but is"):
        model.translate(["ba"], timeout_s=wrong)
    wrong = [None]
    with pytest.raises(
        mtrain.DataError, match="`prefixes`: line 1 must be text, but is None instead"
    ):
        model.translate(["ba"], prefixes=wrong)
    with pytest.raises(mtrain.ConfigError, match="`top_k` must be a whole number, but is 2"):
        mtrain.Sampling(top_k=2.5)  # type: ignore[arg-type]
    with pytest.raises(
        mtrain.ConfigError, match="`options` must be a DecodingOptions or None, but"
    ):
        model.translate(["ba"], {"beam": 1})  # type: ignore[call-overload]
    with pytest.raises(mtrain.ConfigError, match="`shortlist` has no effect with a beam of 1"):
        mtrain.load(model.run.path, beam=1, shortlist="fast")


def test_ctranslate2_translates_like_the_command_line_and_refuses_unsupported_options(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    path = shutil.copytree(trained.path, tmp_path / "run")
    model = mtrain.load(path, engine="ctranslate2", beam=2)
    lines = ["ba ce di", "", "fo gu ha je ki lo"]
    stdin = "".join(f"{line}\n" for line in lines).encode()
    verb = cli("translate", path, "--engine", "ctranslate2", "--beam", "2", stdin=stdin)
    assert model.translate(lines, timeout_s=60) == model.translate(lines) == verb.lines
    details = model.translate(lines, details=True)
    ours = mtrain.load(path, beam=2).translate(lines, details=True)
    assert [each.text for each in details] == verb.lines
    scores = [each.score for each in ours]
    assert [each.score for each in details] == pytest.approx(
        scores, abs=1e-3
    )  # CTranslate2 masks padding
    assert details[0].token_log_probs == ()
    greedy = replace(model.options, beam=1)
    assert model.translate(lines, greedy) == mtrain.load(path, beam=1).translate(lines)
    (result,) = mtrain.evaluate(model)
    assert result.hypotheses == model.translate(result.lines.src)
    with pytest.raises(TimeoutError, match="1 line took more than 0 seconds"):
        model.translate(["ba ce"], timeout_s=0)
    for change, said in (
        ({"num_best": 2}, "`num_best` must be 1 for `--engine ctranslate2`, but is 2 instead."),
        ({"with_alignment": True}, "`with_alignment` must be off for `--engine ctranslate2`, but"),
        ({"sampling": mtrain.Sampling()}, "`sampling` must be off for `--engine ctranslate2`, bu"),
    ):
        options: dict[str, Any] = change
        with pytest.raises(mtrain.ConfigError) as error:
            model.translate(lines, replace(model.options, **options))
        assert str(error.value).startswith(said)
    with pytest.raises(mtrain.ConfigError, match="`prefixes` has no effect with `--engine ctran"):
        model.translate(["ba"], prefixes=["di"])
    for key, value in (("checkpoint", 5), ("device", "cuda"), ("precision", "bfloat16")):
        wrong: dict[str, Any] = {key: value}
        with pytest.raises(mtrain.ConfigError, match=f"`{key}` has no effect with `engine='ctra"):
            mtrain.load(path, engine="ctranslate2", **wrong)
    with pytest.raises(mtrain.ConfigError, match="`engine='ctranslate2'` must have one run, but h"):
        mtrain.load([path, path], engine="ctranslate2")


def test_the_progress_of_an_export_is_logged_as_info_and_its_warnings_as_warnings(
    trained: RunDir,
    tmp_path: Path,
    logged: Logged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")

    def fail(run: RunDir) -> None:
        raise mtrain.RunError("no text")

    monkeypatch.setattr("mtrain.evaluation.evaluation.read_tests", fail)
    monkeypatch.setattr(logging.getLogger("mtrain"), "level", logging.INFO)
    run = shutil.copytree(trained.path, tmp_path / "run")
    mtrain.export(run, tmp_path / "out", "ctranslate2", check_lines=2)
    mtrain.load(run, engine="ctranslate2")
    levels = [(record.levelname, record.getMessage()) for record in logged.records]
    assert levels == [
        ("INFO", f"{tmp_path / 'out'}: writing, then checking on 2 lines"),
        ("WARNING", "the model card has no scores: no text"),
        ("INFO", f"{run / 'ctranslate2'}: writing, then checking on 12 lines"),
    ]


def test_ctranslate2_begins_no_batch_after_a_call_is_cancelled(
    trained: RunDir, tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    path = shutil.copytree(trained.path, tmp_path / "run")
    model: Any = mtrain.load(path, engine="ctranslate2")
    cancel, num_lines = threading.Event(), 0
    library = model.translator._exported._translator

    class CancellingLibrary:
        def translate_batch(self, lines: list[list[str]], **options: Any) -> Any:
            nonlocal num_lines
            num_lines += len(lines)
            cancel.set()
            return library.translate_batch(lines, **options)

    model.translator._exported._translator = CancellingLibrary()
    with pytest.raises(CancelledError):
        model.translate(["ba ce"] * 1000, cancel=cancel)
    assert num_lines <= 32


NEWER = "must be of mtrain 0.2.0 or older, but was written by mtrain 0.10.3; install that version."


@pytest.mark.parametrize(
    "verb",
    [
        *("translate RUN", "eval RUN", "eval OLD --compare RUN", "plot RUN", "doctor RUN"),
        *("export RUN new --to huggingface", "train CONFIG", "tokenize CONFIG", "train TUNED"),
    ],
)
def test_a_run_folder_of_a_newer_version_is_reported_once_by_each_command(
    cli: Cli, trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(shutil.copytree(trained.path, tmp_path / "run"))
    text = run.config_path.read_text("utf-8")
    assert text.count(f"# written by mtrain {mtrain.__version__}\n") == 1
    newer = text.replace(mtrain.__version__, "0.10.3", 1).replace("seed:", "new_key: 3\nseed:")
    run.config_path.write_text(newer, encoding="utf-8")
    names = {"RUN": run.path, "OLD": trained.path, "CONFIG": tmp_path / "config.yaml"}
    names["CONFIG"].write_text(text.replace(str(trained.config.run_dir), "run"), encoding="utf-8")
    names["TUNED"] = tmp_path / "tuned.yaml"
    tuned = {"run_dir": "new", "data": yaml.safe_load(text)["data"]}
    tuned["training"] = {"max_steps": 2, "init_from": "run"}
    names["TUNED"].write_text(yaml.safe_dump(tuned), encoding="utf-8")
    outcome = cli(*(names.get(word, word) for word in verb.split()))
    assert outcome.code == 2
    said = outcome.err + outcome.out.decode() if verb.startswith("doctor") else outcome.err
    folder = "" if verb.startswith("doctor") else f"{run.path.name}/"
    assert said.count(f"{folder}config.yaml: {NEWER}\n") == 1
    assert said.count(NEWER) == 1


def test_a_run_folder_of_a_newer_patch_version_is_read(trained: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(trained.path, tmp_path / "run"))
    text = run.config_path.read_text("utf-8")
    assert mtrain.__version__.count(".") == 2
    patched = f"{mtrain.__version__.rpartition('.')[0]}.99"
    run.config_path.write_text(text.replace(mtrain.__version__, patched, 1), encoding="utf-8")
    assert mtrain.load(run.path).translate(["ba ce"]) == ["ba ce"]


def test_translate_text_keeps_line_breaks_and_indents(model: mtrain.Model) -> None:
    text = "ba ce\r\n\r\n  di fo  \n\t\n\nfo"
    assert model.translate_text(text) == "ba ce\r\n\r\n  di fo  \n\t\n\nfo"
    assert model.translate_text("") == ""
    with pytest.raises(mtrain.DataError, match="`text` must be text, but is 3 instead"):
        model.translate_text(3)  # type: ignore[arg-type]


def test_a_call_can_limit_characters_and_time_and_be_cancelled(model: mtrain.Model) -> None:
    with pytest.raises(mtrain.DataError, match="`lines` must have at most 4 characters"):
        model.translate(["ba", "ce."], max_chars=4)
    assert model.translate(["ba", "ce"], max_chars=4) == ["ba", "ce"]
    with pytest.raises(TimeoutError, match="1 line took more than 0 seconds"):
        model.translate(["ba ce"], timeout_s=0)
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError):
        model.translate(["ba ce " * 40] * 40, cancel=cancelled)


def test_concurrent_calls_get_only_their_own_flags_and_warnings(model: mtrain.Model) -> None:
    def warned(number: int) -> list[str]:
        said: list[str] = []
        line = "ba ce" if number % 2 else "\N{SNOWMAN}"
        (found,) = model.translate([line], details=True, on_warning=said.append)
        assert ("unknown" in found.flags) == (line == "\N{SNOWMAN}")
        return said

    expected = [warned(0), warned(1)]
    assert expected[0] != expected[1]
    with ThreadPoolExecutor(6) as pool:
        for number, said in enumerate(pool.map(warned, range(24))):
            assert said == expected[number % 2]


def test_translate_runs_in_threads_of_an_asyncio_event_loop(model: mtrain.Model) -> None:
    async def both() -> list[list[str]]:
        one, other = (asyncio.to_thread(model.translate, [line]) for line in ("ba ce", "di fo"))
        return await asyncio.gather(one, other)

    assert asyncio.run(both()) == [["ba ce"], ["di fo"]]


def test_loading_and_translating_leave_the_process_state_unchanged(trained: RunDir) -> None:
    def state() -> list[object]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            torch.get_num_threads(),
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            list(warnings.filters),
            torch.is_grad_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ]

    before = state()
    mtrain.load(trained.path).translate(["ba ce", "di " * 40])
    assert state() == before


def test_models_have_a_repr_and_identity_and_exceptions_survive_pickling(
    trained: RunDir, model: mtrain.Model
) -> None:
    assert repr(model) == f"<mtrain.Model of {trained.path}>"
    assert model == model != mtrain.load(trained.path)
    assert len({model, model}) == 1
    names = [name for name in mtrain.__all__ if name.endswith("Error")]
    errors = [getattr(mtrain, name)("one line") for name in names] + [mtrain.Stopped(15)]
    for error in errors:
        same = pickle.loads(pickle.dumps(error))
        assert type(same) is type(error)
        assert str(same) == str(error)
    assert pickle.loads(pickle.dumps(mtrain.Stopped(15))).signal_number == 15


def test_training_reports_metrics_stops_at_the_stop_event_and_resumes_identically(
    tmp_path: Path,
    logged: Logged,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = tiny_tree(tmp_path)
    few = mtrain.load_config(tree, ["training.max_steps=6", "training.log_every=1"])
    metrics: list[dict[str, Any]] = []
    stop = threading.Event()

    def note(values: Any) -> None:
        metrics.append(values)
        if values.get("step") == 2:
            stop.set()

    monkeypatch.setattr(logging.getLogger("mtrain"), "level", logging.INFO)
    with pytest.raises(mtrain.Stopped) as stopped:
        mtrain.train(few, on_metrics=note, stop=stop)
    assert stopped.value.signal_number == signal.SIGTERM
    assert [values["step"] for values in metrics if "loss" in values] == [1, 2]
    assert any(line.startswith("step 2, loss") for line in logged.messages)
    run = mtrain.train(few, on_metrics=metrics.append)
    assert any(line.startswith("resuming from") for line in logged.messages)
    written = [json.loads(line) for line in RunDir(run).metrics_path.read_text().splitlines()]
    assert [values for values in metrics if "step" in values] == [
        line for line in written if "step" in line
    ]
    straight = mtrain.load_config(few, [], tmp_path / "straight")
    expected = mtrain.train(straight)
    assert (run / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert capfd.readouterr() == ("", "")
