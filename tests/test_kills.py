"""Training that is killed at any moment ends with the weights that it would have had."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tasks import REPOSITORY, reverse_task, train, write_task
from test_train import timeless, weights

from mtrain import checkpoint
from mtrain.rundir import RunDir

SAVING = ["training.save_every=1", "training.keep_last=3", "training.average=3"]
NUM_RANDOM = 30
NUM_INSIDE = 24

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def in_child(work: Callable[[], object], kill_after_s: float | None = None) -> int:
    """Do some work in a process of its own; return its exit status, or minus the signal."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


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


def test_every_test_that_the_page_names_exists() -> None:
    page = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 15
    for file, name in named:
        assert f"def {name}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
    assert f"killed {NUM_RANDOM + NUM_INSIDE} times, at {NUM_RANDOM} random" in page.replace(
        "\n", " "
    )


def test_random_kills_change_nothing(source: Path, straight: RunDir, tmp_path: Path) -> None:
    rng = random.Random(1)
    began = time.monotonic()
    assert in_child(lambda: train(source, *SAVING, run=str(tmp_path / "timed"))) == 0
    whole_s = time.monotonic() - began
    num_kills = number = 0
    while num_kills < NUM_RANDOM:
        number += 1
        run = RunDir(tmp_path / f"run-{number}")
        work = lambda: train(source, *SAVING, run=str(run.path))  # noqa: B023, E731
        for _ in range(10):
            num_kills += in_child(work, rng.uniform(0.0, whole_s)) == -signal.SIGKILL
            if run.model_path.exists():
                break
        if not run.model_path.exists():
            assert in_child(work) == 0
        assert_as_if_nothing_had_happened(run, straight)


def test_kills_inside_a_save_change_nothing(
    source: Path, straight: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that changes what the disk holds is a moment at which all may end."""
    calls = {name: getattr(os, name) for name in ("fsync", "replace", "rmdir", "unlink", "mkdir")}
    left = 0

    def counting(name: str) -> Callable[..., object]:
        def call(*arguments: object, **others: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return calls[name](*arguments, **others)

        return call

    def killed_at(number: int, run: RunDir) -> int:
        def work() -> None:
            nonlocal left
            left = number
            for name in calls:
                setattr(os, name, counting(name))
            train(source, *SAVING, run=str(run.path))
            Path(f"{run.path}.count").write_text(str(number - left), "utf-8")

        return in_child(work)

    whole = RunDir(tmp_path / "whole")
    assert killed_at(10**9, whole) == 0
    num_calls = int(Path(f"{whole.path}.count").read_text("utf-8"))
    assert num_calls > 100
    moments = random.Random(2).sample(range(1, num_calls + 1), NUM_INSIDE)
    for moment in moments:
        run = RunDir(tmp_path / f"run-{moment}")
        assert killed_at(moment, run) == -signal.SIGKILL
        assert in_child(lambda: train(source, *SAVING, run=str(run.path))) == 0  # noqa: B023
        assert_as_if_nothing_had_happened(run, straight)
