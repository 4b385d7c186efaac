"""The page of the Python interface equals its docstrings; examples run; a client type-checks."""

import dataclasses
import inspect
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from tasks import REPOSITORY, reverse_task, write_task

import mtrain
from mtrain.run.run_dir import RunDir

sys.path.insert(0, str(REPOSITORY / "docs"))
import write_python

PAGE = REPOSITORY / "docs" / "python.md"
CLIENT = """
import dataclasses
import threading
from pathlib import Path

import mtrain

def translate(run: Path, lines: list[str]) -> list[str]:
    model = mtrain.load(run, beam=1, precision="float32")
    plain: list[str] = model.translate(lines, timeout_s=5.0, max_chars=10_000)
    options = dataclasses.replace(model.options, num_best=2, beam=2, sampling=mtrain.Sampling())
    found: list[mtrain.Translation] = model.translate(lines, options, details=True)
    scores: list[float] = [each.score for each in found]
    flags: tuple[str, ...] = found[0].flags
    text: str = model.translate_text("a\\nb", on_warning=print)
    return [*plain, text, *map(str, scores), *flags]

def augment(path: str, runs: list[Path]) -> int:
    options = mtrain.AugmentOptions(n_best=2, sampling=mtrain.Sampling(top_k=10), keep_best=0.8)
    report = mtrain.augment(path, runs, "bt", options, back=["mono.de"], write_config="new.yaml")
    config: mtrain.Config = report.config
    dropped: dict[str, int] = dict(report.dropped)
    print(report.directory / "record.json", config.run_dir, report.num_lines, dropped)
    return report.num_pairs

def distill(path: str, teacher: Path) -> dict[str, float]:
    report = mtrain.distill(path, teacher, student="6-1", stop=threading.Event())
    speeds: dict[str, float] = {each.search: each.lines_per_s for each in report.systems}
    for name, test in report.tests.items():
        print(name, test.results[0].scores[0].value, test.comparisons[0].p_bootstrap)
    return speeds | {str(report.run): 0.0, str(report.corpus): 0.0}

def train(path: str) -> Path:
    config: mtrain.Config = mtrain.load_config(path, ["seed=2"])
    try:
        return mtrain.train(config, stop=threading.Event(), on_metrics=print)
    except mtrain.UserError as error:
        raise SystemExit(str(error)) from None
"""
# No signature of the interface has a type of these libraries, which mypy reads slowly.
SETTINGS = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,numpy.*,transformers.*,ctranslate2.*,onnx.*,onnxruntime.*,tokenizers.*,comet.*]
follow_imports = skip
"""
WRONG = {
    "mtrain.load(3)": "arg-type",
    'mtrain.load("run", precision="int4")': "arg-type",
    'mtrain.load("run").translate(["a"]).text': "attr-defined",
    'mtrain.distill("a.yaml", "run", student="huge")': "arg-type",
    'mtrain.augment("a.yaml", "run", "bt", beam=3)': "call-arg",
    "mtrain.trian": "attr-defined",
}


def examples() -> list[str]:
    """Return the examples of all docstrings, in the order of the interface."""
    documented = [getattr(mtrain, name) for name in mtrain.__all__ if name != "__version__"]
    documented += [mtrain.Model.translate, mtrain.Model.translate_text]
    docs = [inspect.getdoc(value) or "" for value in documented]
    return [textwrap.dedent(doc.split("Example:\n")[1]) for doc in docs if "Example:\n" in doc]


def test_the_python_page_equals_the_page_generated_from_the_docstrings() -> None:
    is_same = PAGE.read_text(encoding="utf-8") == write_python.page()
    assert is_same, "python docs/write_python.py > docs/python.md"


def test_every_public_function_has_an_example() -> None:
    functions = [name for name in mtrain.__all__ if inspect.isfunction(getattr(mtrain, name))]
    assert len(functions) >= 11
    for name in functions:
        assert any(f"mtrain.{name}(" in example for example in examples()), name


def test_the_docstring_examples_run(
    reverser: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sketched: None,
    quick_init: None,
    few_trials: None,
) -> None:
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(write_task(tmp_path, reverse_task).read_text("utf-8"))
    tree |= {"run_dir": "runs/new", "model": reverser.config.model.model_dump()}
    Path("en-de.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    text = "".join(f"{pair.src}\n" for pair in reverse_task(3000, 1))
    Path("train.en").write_text(text, encoding="utf-8")
    Path("train.de").write_text(text.upper(), encoding="utf-8")
    shutil.copytree(reverser.path, "runs/en-de")
    names = {"mtrain": mtrain, "dataclasses": dataclasses}
    for example in examples():
        exec(compile(example, "docstring", "exec"), names)
    assert Path("runs/new/model.safetensors").is_file()
    assert Path("runs/short").exists() is False, "load_config writes nothing"
    assert Path("en-de-ct2/model.bin").is_file()
    assert Path("new.yaml").is_file()
    assert Path("fw/record.json").is_file()
    assert Path("runs/new-tiny/model.safetensors").is_file()
    assert Path("runs/en-de/plots/curves.png").is_file()


def test_a_client_program_type_checks_and_each_mistake_is_one_mypy_error(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    lines = [f"_{number} = {code}" for number, code in enumerate(WRONG)]
    path = tmp_path / "client.py"
    path.write_text(CLIENT + "\n".join(lines) + "\n", encoding="utf-8")
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--cache-dir=/dev/null",
        "--config-file",
        settings,
        path,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    first = CLIENT.count("\n") + 1
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == len(WRONG), done.stdout + done.stderr
    for number, (error, code) in enumerate(zip(errors, WRONG.values(), strict=True), start=first):
        assert f"client.py:{number}: error:" in error
        assert f"[{code}]" in error
