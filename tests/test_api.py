"""What `import mtrain` offers: lines to lines, mistakes as exceptions, all as the verbs do."""

import ast
import re
import shutil
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from tasks import copy_task, reverse_task, tiny_tree, write_task

import mtrain
from mtrain import api
from mtrain.data.prepare import read_test
from mtrain.decode.options import DecodingOptions
from mtrain.run import checkpoint
from mtrain.run.load_model import set_weights
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.train.trainer import Trainer
from mtrain.train.validation import ValidationSet


@pytest.fixture(scope="module")
def model(trained: RunDir) -> mtrain.Model:
    return mtrain.load(trained.path)


def test_the_functions_keep_their_names_when_the_packages_of_these_names_are_imported() -> None:
    code = "import mtrain, mtrain.train.trainer, mtrain.evaluate.evaluation, mtrain.api as api; "
    code += "print(mtrain.train is api.train, mtrain.evaluate is api.evaluate)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_every_name_of_the_interface_is_there_and_is_what_type_checkers_are_told() -> None:
    text = Path(mtrain.__file__).read_text("utf-8")
    (typed,) = (node for node in ast.parse(text).body if isinstance(node, ast.If))
    told = {name.name for node in typed.body for name in node.names}  # type: ignore[attr-defined]
    assert told | {"__version__"} == set(mtrain.__all__) == set(dir(mtrain))
    for name in mtrain.__all__:
        assert getattr(mtrain, name).__doc__
    assert Path(mtrain.__file__).with_name("py.typed").is_file()


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'tarin'"):
        mtrain.tarin  # type: ignore[attr-defined]  # noqa: B018


def test_the_functions_stay_functions_whatever_was_imported(trained: RunDir) -> None:
    """A package of the same name would replace a function once anything imports it."""
    mtrain.evaluate(trained.path)
    for name in mtrain.__all__:
        assert type(getattr(mtrain, name)).__name__ != "module", name


def test_lines_become_what_the_command_line_writes(
    cli: Cli, trained: RunDir, model: mtrain.Model
) -> None:
    lines = [pair.src for pair in copy_task(20, 3)]
    by_verb = cli("translate", trained.path, stdin="".join(f"{x}\n" for x in lines).encode())
    assert model.translate(lines) == by_verb.lines
    assert model.translate(iter(lines)) == by_verb.lines


def test_odd_lines_are_one_line_each(model: mtrain.Model) -> None:
    odd = ["", "  ", "ba ce\n", "ba ce\r\n", "ba\nce", "ba\r\nce", "ba \ud800 ce"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.translate(odd)
    assert found[:6] == ["", "", "ba ce", "ba ce", "ba ce", "ba ce"]
    assert len(found) == 7
    assert model.translate([]) == []


def test_an_open_file_is_lines(model: mtrain.Model, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("ba ce\n\ndi fo\n", encoding="utf-8")
    with (tmp_path / "in").open(encoding="utf-8") as file:
        assert model.translate(file) == ["ba ce", "", "di fo"]


def test_a_line_that_is_too_long_is_cut_with_a_warning_that_names_it(model: mtrain.Model) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(model.translate(["ba", "ba ce di fo. " * 10])) == 2
    said = [str(warning.message) for warning in caught]
    assert re.match(r"mtrain: line 2: has \d+ tokens; translated in 2 parts\.", said[0])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("ba ce", "`lines` must be a list of lines, but is one text; put it in a list."),
        (["ba", 3], "line 2: must be text, but is 3 instead."),
        ([b"ba"], "line 1: must be text, but is b'ba' instead."),
    ],
)
def test_what_is_no_list_of_lines_is_an_error(model: mtrain.Model, lines: Any, said: str) -> None:
    with pytest.raises(mtrain.UserError) as error:
        model.translate(lines)
    assert str(error.value) == said


def test_settings_are_taken_from_the_run_unless_given(trained: RunDir) -> None:
    own = replace(DecodingOptions.from_config(trained.config), with_scores=False)
    assert mtrain.load(trained.path).translator.options == own
    changed = mtrain.load([trained.path], beam=1, length_alpha=0.0, device="cpu")
    assert changed.translator.options == replace(own, beam=1, length_alpha=0.0)


def test_mistakes_are_exceptions_in_the_grammar_of_the_command_line(
    trained: RunDir, tmp_path: Path
) -> None:
    with pytest.raises(mtrain.RunError, match="must be a run folder, but does not exist"):
        mtrain.load(tmp_path / "absent")
    with pytest.raises(mtrain.DataError, match="`runs` must have a run folder, but is empty"):
        mtrain.load([])
    with pytest.raises(mtrain.ConfigError) as error:
        mtrain.load(trained.path, beam=0)
    assert str(error.value) == "mtrain.load: `decoding.beam` must be >= 1, but is 0 instead."
    tree = tiny_tree(tmp_path)
    with pytest.raises(mtrain.ConfigError) as error:
        mtrain.train(tree | {"sed": 1})
    assert str(error.value) == "config: `sed` is not a key of the config; did you mean `seed`?"
    with pytest.raises(mtrain.ConfigError, match=r"absent.yaml: cannot be read"):
        mtrain.train(tmp_path / "absent.yaml")


def test_a_mapping_a_file_and_a_config_are_one(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    config = mtrain.load_config(path, ["seed=3"], tmp_path / "other")
    assert (config.seed, config.run_dir) == (3, str(tmp_path / "other"))
    tree = tiny_tree(tmp_path)
    assert mtrain.load_config(tree, ["seed=3"], tmp_path / "other") == config
    assert mtrain.load_config(config) == config
    assert mtrain.load_config(mtrain.load_config(tree), ["seed=3"], tmp_path / "other") == config
    assert "seed" not in tree


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_wants_gradients_whatever_its_caller_wants(mode: Any, tmp_path: Path) -> None:
    tree, few = tiny_tree(tmp_path), ["training.max_steps=4", "training.validate_every=4"]
    expected = mtrain.train(mtrain.load_config(tree, few, tmp_path / "plain"))
    with mode():
        found = mtrain.train(mtrain.load_config(tree, few, tmp_path / "within"))
    name = "model.safetensors"
    assert (found / name).read_bytes() == (expected / name).read_bytes()


def test_training_from_a_mapping_in_a_thread_gives_what_the_verb_gives(
    cli: Cli, tmp_path: Path
) -> None:
    """No thread but the main one may catch signals; a notebook's server may train in another."""
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (result,) = mtrain.evaluate(run)
    assert by_verb.lines[0] == f"held_out  BLEU {result.scores[0].format()}"


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
    validation = ValidationSet(lines, trainer.tokenizer, 512).translations(trainer.translator)
    assert sum(len(ids) > 5 for ids in trainer.tokenizer.encode_src(lines.src)) > 10
    model = mtrain.load(run.path, beam=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lines that are translated in parts
        assert model.translate(lines.src) == validation
        (result,) = api.evaluate(model)
    assert result.hypotheses == validation
    stdin = "".join(line + "\n" for line in lines.src).encode()
    assert cli("translate", run.path, "--beam", "1", stdin=stdin).lines == validation
