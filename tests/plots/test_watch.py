"""`mtrain plot --watch`: the plots of a run are redrawn while it trains, until it ends."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import Cli
from fork_server import MtrainProcess
from tasks import write_task

from mtrain.plots import draw
from mtrain.run.run_dir import RunDir

CURVES = ["curves.png", "curves.svg"]


pytestmark = pytest.mark.usefixtures("sketched")


@pytest.fixture
def run(noisy: RunDir, tmp_path: Path) -> RunDir:
    """A run without data and final weights, so that few plots can be drawn."""
    run = RunDir(shutil.copytree(noisy.path, tmp_path / "run"))
    shutil.rmtree(run.data_dir)
    run.model_path.unlink()
    return run


def watched(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, events: list[Callable[[], object]]
) -> list[str]:
    """Watch a run that trains until the last event; return the names of the files drawn."""
    with ExitStack() as training:
        training.enter_context(run.locked())
        coming = iter([*events, training.close])
        monkeypatch.setattr(draw, "sleep", lambda seconds: next(coming)())
        drawn = draw.watch(run, None, run.path / "plots", lambda text: None, 1.0)
        return [path.name for path in drawn]


def log(run: RunDir, step: int) -> None:
    line = json.loads(run.metrics_path.read_text("utf-8").splitlines()[-1])
    with run.metrics_path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | {"step": step}) + "\n")


def test_curves_are_redrawn_after_a_new_log_line_and_all_plots_when_the_training_ends(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = watched(run, monkeypatch, [lambda: None, lambda: log(run, 9), lambda: None])
    once = names[: len(names) // 2 - 1]
    assert {*CURVES, "positions.png"} <= set(once)
    assert names == [*once, *CURVES, *once]


def test_watching_waits_for_the_first_log_line_of_a_training(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run.metrics_path.read_bytes()
    run.metrics_path.unlink()
    shutil.rmtree(run.tokenizer_dir)  # so that there is nothing at all to draw
    run.config_path.rename(run.path / "aside")

    def begin() -> None:
        run.metrics_path.write_bytes(whole)
        (run.path / "aside").rename(run.config_path)

    names = watched(run, monkeypatch, [begin])
    assert names[:2] == CURVES


def test_a_run_that_is_not_training_is_drawn_once(cli: Cli, run: RunDir) -> None:
    outcome = cli("plot", run.path, "--watch", "--out", run.path / "out")
    assert outcome.code == 0
    assert outcome.err.startswith(f"mtrain: nobody is training in {run.path}; it is drawn once.\n")
    assert len(outcome.lines) == len(set(outcome.lines)) >= 4


def test_a_blank_sentence_and_a_missing_folder_are_refused_at_once(cli: Cli, run: RunDir) -> None:
    with run.locked():
        blank = cli("plot", run.path, "--watch", "--sentence", " ")
    assert (blank.code, blank.err) == (2, "mtrain: --sentence must have text, but is blank.\n")
    missing = run.path / "missing"
    said = f"mtrain: {missing}: must be a run folder, but does not exist.\n"
    assert cli("plot", missing, "--watch").err == said
    assert (
        "`--every` must be <= 86400.0, but is 'inf' instead"
        in cli("plot", run.path, "--watch", "--every", "inf").err
    )


def test_a_training_that_begins_after_the_warning_that_none_runs_is_watched(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as training:

        def begin(warning: str) -> None:
            if "nobody is training" in warning:
                training.enter_context(run.locked())

        events = iter([lambda: log(run, 9), training.close])
        monkeypatch.setattr(draw, "sleep", lambda seconds: next(events)())
        names = [path.name for path in draw.watch(run, None, run.path / "plots", begin, 1.0)]
    assert names[:2] == CURVES
    assert len(names) > 4


def test_the_option_every_without_watch_is_refused(cli: Cli, run: RunDir) -> None:
    outcome = cli("plot", run.path, "--every", "3")
    said = "mtrain: `--every` needs `--watch`.\n"
    assert (outcome.code, outcome.err) == (2, said)


def test_watching_a_real_training_ends_when_the_training_ends(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    endless = ["--set", "training.max_steps=null", "--set", "training.max_minutes=9"]
    endless += ["--set", "training.log_every=1", "--set", "training.patience=99999"]
    run = RunDir(tmp_path / "run")
    with MtrainProcess("train", path, *endless) as training:
        while not (run.metrics_path.exists() and run.metrics_path.stat().st_size):
            assert training.poll() is None
            time.sleep(0.05)
        num_drawn = 0
        for path in draw.watch(run, None, tmp_path / "plots", lambda text: None, every_s=0.1):
            num_drawn += path.name == "curves.png"
            if num_drawn == 2 and training.poll() is None:
                training.send_signal(signal.SIGTERM)
                training.wait()
        assert num_drawn >= 3
    assert training.returncode == 143
