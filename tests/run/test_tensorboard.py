"""TensorBoard shows the numbers of `metrics.jsonl`, once for each step, also after a resume."""

import json
import sys
from pathlib import Path

import pytest
from conftest import Cli
from tasks import prepared, stop_at, write_task

import mtrain
from mtrain import errors
from mtrain.run.run_dir import RunDir
from mtrain.training.trainer import Stopped

Shown = dict[tuple[str, int], float]


@pytest.fixture
def installed() -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")


def shown(run: RunDir) -> Shown:
    """Read the event files as TensorBoard does; assert that no number is there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.board_dir), size_guidance={"scalars": 0})
    found.Reload()
    scalars = [
        ((tag, event.step), event.value)
        for tag in found.Tags()["scalars"]
        for event in found.Scalars(tag)
    ]
    assert len(scalars) == len(dict(scalars))
    return dict(scalars)


def logged(run: RunDir) -> Shown:
    """Return the numbers of `metrics.jsonl`, named as TensorBoard groups them."""
    numbers = {}
    for line in map(json.loads, run.metrics_path.read_text("utf-8").splitlines()):
        group = "valid" if "valid_loss" in line else "train"
        for key, value in line.items():
            if key != "step" and isinstance(value, (int, float)):
                numbers[f"{group}/{key.removeprefix('valid_')}", line["step"]] = value
    return numbers


@pytest.mark.usefixtures("installed")
def test_tensorboard_shows_every_number_of_every_step_and_validation(
    cli: Cli, tmp_path: Path
) -> None:
    outcome = cli("train", write_task(tmp_path), "--log", "tensorboard")
    assert outcome.code == 0, outcome.err
    run = RunDir(tmp_path / "run")
    found, expected = shown(run), logged(run)
    assert found == pytest.approx(expected, rel=1e-6)
    assert {("train/loss", 2), ("train/lr", 12), ("valid/bleu", 8), ("valid/loss", 4)} <= set(found)


@pytest.mark.usefixtures("installed")
def test_a_resumed_training_shows_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after the newest checkpoint are repeated, and replace those already shown."""
    config, run = mtrain.load_config(write_task(tmp_path)), RunDir(tmp_path / "run")
    prepared(config)
    stop_at(monkeypatch, 9)
    with pytest.raises(Stopped):
        mtrain.train(config, tensorboard=True)
    assert max(step for _, step in shown(run)) == 8
    newest = run.checkpoints_dir / "step-00000009"
    (newest / "progress.json").write_text("damaged")  # so that it resumes from step 8
    mtrain.train(config, tensorboard=True)
    assert shown(run) == pytest.approx(logged(run), rel=1e-6)
    assert len(list(run.board_dir.iterdir())) == 2


@pytest.mark.usefixtures("installed")
def test_a_tensorboard_folder_that_cannot_be_written_does_not_end_the_training(
    cli: Cli, tmp_path: Path
) -> None:
    path = write_task(tmp_path)
    assert cli("tokenize", path).code == 0
    (tmp_path / "run" / "tensorboard").write_text("a file")
    outcome = cli("train", path, "--log", "tensorboard")
    assert outcome.code == 0
    (said,) = (line for line in outcome.err.split("\n") if line.startswith("tensorboard: "))
    assert said.endswith("the training goes on without it")
    assert len(logged(RunDir(tmp_path / "run"))) > 20


def test_a_missing_tensorboard_package_is_a_one_line_error_and_creates_no_run_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    outcome = cli("train", write_task(tmp_path), "--log", "tensorboard")
    assert (outcome.code, outcome.err) == (
        2,
        "mtrain: `--log tensorboard` must have tensorboard: pip install 'mtrain[tensorboard]' "
        "adds it.\n",
    )
    assert not (tmp_path / "run").exists()


def test_training_without_log_tensorboard_does_not_need_the_package(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert cli("train", write_task(tmp_path)).code == 0
    assert not (tmp_path / "run" / "tensorboard").exists()
