"""Each command reads the config of a run only once."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from mtrain.plots import draw
from mtrain.run.run_dir import RunDir


@pytest.fixture(scope="module")
def reads() -> list[str]:
    """The paths of all files that are opened from now on.

    Python cannot remove an audit hook, which makes all later tests of a process slower.
    """
    paths: list[str] = []

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            paths.append(arguments[0])

    sys.addaudithook(listen)
    return paths


@pytest.mark.parametrize(
    "arguments",
    [
        ["translate", "RUN", "line"],
        ["translate", "RUN", "line", "--engine", "ctranslate2"],
        ["eval", "RUN", "--details"],
        ["eval", "RUN", "--score"],
        ["eval", "OTHER", "--compare", "RUN"],
        ["plot", "RUN", "--out", "plots"],
        ["export", "RUN", "new", "--to", "ctranslate2"],
        ["export", "RUN", "new", "--to", "huggingface"],
        ["doctor", "RUN", "--no-replay"],
        ["train", "config.yaml", "--run", "RUN"],
        ["tokenize", "config.yaml", "--run", "RUN"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_each_command_reads_the_config_of_a_run_once(
    arguments: list[str],
    cli: Cli,
    trained: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: list[str],
    few_trials: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = tmp_path / "run", tmp_path / "other"
    for path in (run, other):
        shutil.copytree(trained.path, path)
    shutil.copy(run / "config.yaml", "config.yaml")
    Path("line").write_text("ba ce\n", "utf-8")
    given = {"RUN": str(run), "OTHER": str(other)}
    if arguments[0] == "train":  # resume the run
        arguments = [*arguments, "--set", "training.max_steps=502"]
    monkeypatch.setattr(draw, "encode", lambda draw_figure: {})  # the slow half of `plot`
    reads.clear()
    outcome = cli(*(given.get(word, word) for word in arguments))
    assert outcome.code == 0, outcome.err
    assert reads.count(str(run / "config.yaml")) == 1
