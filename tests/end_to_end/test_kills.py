"""Training that is killed and resumed ends with the same weights as without the kills."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from fork_server import fork_server, needs_fork_server
from hostile import TIMES
from run_folders import timeless, weights
from tasks import REPOSITORY, kill_at_call, reverse_task, train, write_task

from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir

SAVING = ["training.save_every=1", "training.keep_last=3", "training.average=3"]
NUM_KILLS = (6, 30)  # at random moments and as many inside saves: (make test, make fuzz)

CALLS = ("fsync", "replace", "rmdir", "unlink", "mkdir")  # the calls that change the disk
PATIENCE_S = 120

pytestmark = needs_fork_server


def child(source: Path, run: Path, kill_at: int) -> None:
    """Train, killed by SIGKILL at call number `kill_at`; at the end, write the number of calls."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    num_calls = kill_at_call(CALLS, kill_at)
    train(source, *SAVING, run=str(run))
    Path(f"{run}.count").write_text(str(num_calls()), "utf-8")


def in_child(
    source: Path, run: RunDir, kill_after_s: float | None = None, kill_at: int = 0
) -> int | None:
    """Train in a subprocess; return its exit status, or minus the number of its signal."""
    process = fork_server().Process(target=child, args=(source, run.path, kill_at))
    process.start()
    process.join(PATIENCE_S if kill_after_s is None else kill_after_s)
    if process.is_alive():
        assert kill_after_s is not None, "a training hangs"
        process.kill()
        process.join(PATIENCE_S)
    return process.exitcode


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("killed"), reverse_task)


@pytest.fixture(scope="module")
def straight(source: Path) -> RunDir:
    return train(source, *SAVING, run=str(source.parent / "straight"))


def assert_as_if_nothing_had_happened(run: RunDir, straight: RunDir) -> None:
    assert weights(run) == weights(straight)
    assert timeless(run) == timeless(straight)
    assert set(checkpoint.steps(run.checkpoints_dir)) == set(
        checkpoint.steps(straight.checkpoints_dir)
    )
    assert all(path.name.startswith("step-") for path in run.checkpoints_dir.iterdir())


def test_the_reliability_page_names_the_right_numbers_of_kills() -> None:
    page = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    text = page.replace("\n", " ")
    few, many = NUM_KILLS
    assert f"killed {2 * few} times, at {few} random moments and at {few} calls" in text
    assert f"kills {2 * many} times, {many} times at random" in text


def test_a_training_killed_at_random_moments_ends_with_the_same_weights_and_metrics(
    source: Path, straight: RunDir, tmp_path: Path
) -> None:
    rng = random.Random(1)
    timed = RunDir(tmp_path / "timed")
    assert in_child(source, RunDir(tmp_path / "first")) == 0
    began = time.monotonic()
    assert in_child(source, timed) == 0
    whole_s = time.monotonic() - began
    num_kills = number = 0
    while num_kills < NUM_KILLS[TIMES > 1]:
        number += 1
        run = RunDir(tmp_path / f"run-{number}")
        for _ in range(10):
            killed = in_child(source, run, kill_after_s=rng.uniform(0.0, whole_s))
            num_kills += killed == -signal.SIGKILL
            if run.model_path.exists():
                break
        if not run.model_path.exists():
            assert in_child(source, run) == 0
        assert_as_if_nothing_had_happened(run, straight)


def test_a_training_killed_inside_a_save_ends_with_the_same_weights_and_metrics(
    source: Path, straight: RunDir, tmp_path: Path
) -> None:
    """The moments of the kills are a sample of the calls that change the disk."""
    assert in_child(source, RunDir(tmp_path / "whole")) == 0
    num_calls = int((tmp_path / "whole.count").read_text("utf-8"))
    assert num_calls > 100
    for moment in random.Random(2).sample(range(1, num_calls + 1), NUM_KILLS[TIMES > 1]):
        run = RunDir(tmp_path / f"run-{moment}")
        assert in_child(source, run, kill_at=moment) == -signal.SIGKILL
        if not run.model_path.exists():  # else it was killed after writing the final weights
            assert in_child(source, run) == 0
        assert_as_if_nothing_had_happened(run, straight)
