"""torchrun itself: ranks that are killed, restarted and preempted, on one machine and on two."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
import torch.distributed.run
from fork_server import ForkedProcess, needs_fork_server
from ranks import Ranks, ranks
from run_folders import step_lines, timeless, weights
from tasks import reverse_task, train, write_task

from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir

__all__ = ["ranks"]

ALONE = ["--standalone", "--nproc-per-node=2"]
OFTEN = ["training.log_every=1", "training.save_every=1", "training.keep_last=3"]
ENDLESS = ["training.max_steps=1000000", "training.patience=1000000", "training.validate_every=999"]

pytestmark = [
    needs_fork_server,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("torchrun"), reverse_task)


@contextlib.contextmanager
def torchrun(
    launch: list[str], source: Path, run: RunDir, *settings: str
) -> Iterator[ForkedProcess]:
    """Start `mtrain train` under torchrun; at the end, kill all its processes."""
    command = ["torchrun", *launch, "-m", "--", "mtrain", "train", str(source)]
    command += ["--run", str(run.path)]
    command += [part for setting in settings for part in ("--set", setting)]
    with ForkedProcess(torch.distributed.run.main, command, stderr=PIPE, text=True) as agent:
        try:
            yield agent
        finally:
            for pid in (*workers(agent).values(), agent.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def workers(agent: ForkedProcess) -> dict[int, int]:
    """Return the process ids that an agent has started, by their rank."""
    found = {}
    try:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
    except OSError:  # it has ended
        return {}
    for pid in map(int, children.split()):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for entry in environment:
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = pid
    return found


def read_until(agent: ForkedProcess, start: str) -> list[str]:
    """Return the lines of stderr up to the first that starts with `start`."""
    assert agent.stderr is not None
    said = []
    for line in agent.stderr:
        said.append(line)
        if line.startswith(start):
            return said
    raise AssertionError("".join(said))


def rest_of(agent: ForkedProcess) -> list[str]:
    """Wait for an agent to end; return the remaining lines of stderr that mtrain printed."""
    assert agent.stderr is not None
    err = agent.stderr.read()
    agent.wait()
    print(err)
    return [line for line in err.splitlines() if line.startswith("mtrain: ")]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_training_restarted_by_torchrun_after_a_kill_equals_uninterrupted_training(
    source: Path, tmp_path: Path, ranks: Ranks
) -> None:
    settings = [*OFTEN, "training.max_steps=40", "training.validate_every=20"]
    straight, run = RunDir(tmp_path / "straight"), RunDir(tmp_path / "run")
    options = [part for setting in settings for part in ("--set", setting)]
    ended = ranks.mtrain(2, "train", source, "--run", straight.path, *options)
    assert ended.codes == [0, 0], ended.err
    with torchrun([*ALONE, "--max-restarts=1"], source, run, *settings) as agent:
        read_until(agent, "step 5,")
        os.kill(workers(agent)[1], signal.SIGKILL)
        read_until(agent, "resuming from ")
        rest_of(agent)
        assert agent.returncode == 0
    assert weights(run) == weights(straight)
    assert timeless(run) == timeless(straight)


def test_sigterm_to_torchrun_saves_a_checkpoint_and_one_process_resumes(
    source: Path, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    with torchrun(ALONE, source, run, *ENDLESS, "training.log_every=1") as agent:
        read_until(agent, "step 3,")
        agent.send_signal(signal.SIGTERM)
        said = rest_of(agent)
    assert said == [
        f"mtrain: stopped; all is saved in {run.path}, and the same command goes on from there."
    ]
    step = max(checkpoint.steps(run.checkpoints_dir))
    assert step >= 3
    train(source, f"training.max_steps={step + 2}", "training.log_every=1", run=str(run.path))
    assert [line["step"] for line in step_lines(run)] == list(range(1, step + 3))


def test_the_failure_report_of_torchrun_repeats_the_error_message(
    source: Path, tmp_path: Path
) -> None:
    with torchrun(ALONE, source, RunDir(tmp_path / "run"), "model.d_modl=8") as agent:
        assert agent.stderr is not None
        err = agent.stderr.read()
    said = [line for line in err.splitlines() if line.startswith("mtrain: ")]
    assert said == [
        f"mtrain: rank 0: {source}: `model.d_modl` is not a key of the config; did you mean "
        "`model.d_model`?"
    ]
    assert f"traceback : {said[0]}" in err


def two_nodes() -> list[str]:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    return ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two", endpoint]


def test_two_nodes_with_one_rank_each_equal_one_node_with_two_ranks(
    source: Path, tmp_path: Path, ranks: Ranks
) -> None:
    run, together, launch = RunDir(tmp_path / "run"), RunDir(tmp_path / "together"), two_nodes()
    with torchrun(launch, source, run) as one, torchrun(launch, source, run) as other:
        said = [rest_of(agent) for agent in (one, other)]
        assert (one.returncode, other.returncode) == (0, 0), said
    assert ranks.mtrain(2, "train", source, "--run", together.path).codes == [0, 0]
    assert weights(run) == weights(together)
    assert timeless(run) == timeless(together)


def test_when_the_rank_of_one_node_is_killed_both_nodes_end_with_one_message(
    source: Path, tmp_path: Path
) -> None:
    run, launch = RunDir(tmp_path / "run"), two_nodes()
    settings = [*ENDLESS, "training.save_every=3"]
    with (
        torchrun(launch, source, run, *settings) as one,
        torchrun(launch, source, run, *settings) as other,
    ):
        while not checkpoint.steps(run.checkpoints_dir):
            time.sleep(0.1)
            assert one.poll() is other.poll() is None
        (pid,) = workers(other).values()
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        said = [line for agent in (one, other) for line in rest_of(agent)]
        assert time.monotonic() - started < 30
        assert 0 not in (one.returncode, other.returncode)
    (message,) = said
    assert (
        "another rank ended without an error message: it was killed, or its machine is gone; "
        in message
    )
