"""Training survives a lack of memory or disk space, at the cost of time or checkpoints."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from conftest import Cli
from fork_server import MtrainProcess, run_in_child
from run_folders import metrics, step_lines, timeless, weights
from tasks import prepared, reverse_task, stop_at, train, write, write_task

from mtrain.config import config_file
from mtrain.data.batch import Batch
from mtrain.errors import RunError, WriteError
from mtrain.io import atomic
from mtrain.run import checkpoint
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.training.gradients import GradientPart, Gradients, GradientTask
from mtrain.training.trainer import Position, Trainer

OFTEN = ["training.save_every=2", "training.keep_last=9", "training.log_every=1"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("limits"), reverse_task)


@contextlib.contextmanager
def trainer_of(source: Path, directory: Path, *overrides: str) -> Iterator[Trainer]:
    config = config_file.load(source, overrides, str(directory / "run"))
    run = prepared(config)
    with RunLog(directory / "metrics.jsonl") as log:
        yield Trainer(config, run, log)


def hold_at_most(
    monkeypatch: pytest.MonkeyPatch, num_positions: int, error: Exception
) -> list[int]:
    """Raise `error` for larger batches; return a list that gets the size of each batch tried."""
    backward, tried = Gradients.backward, []

    def limited(gradients: Gradients, task: GradientTask) -> GradientPart:
        tried.append(task.batch.num_positions)
        if task.batch.num_positions > num_positions:
            raise error
        return backward(gradients, task)

    monkeypatch.setattr(Gradients, "backward", limited)
    return tried


def gradients(trainer: Trainer, batch: Batch) -> torch.Tensor:
    trainer.gradients.backward_batch(batch, batch.num_tgt_tokens)
    found = torch.cat(
        [own.grad.flatten() for own in trainer.state.parameters if own.grad is not None]
    )
    trainer.model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("could not create a primitive"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "onednn", "python"],
)
def test_a_batch_that_runs_out_of_memory_is_split_and_the_gradients_stay_the_same(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    with trainer_of(source, tmp_path, "model.dropout=0.0") as trainer:
        batch = trainer.data.largest(192)[0]
        expected = gradients(trainer, batch)
        tried = hold_at_most(monkeypatch, batch.num_positions // 3, error)
        torch.testing.assert_close(gradients(trainer, batch), expected, atol=1e-7, rtol=1e-5)
        assert tried[0] == batch.num_positions
        assert tried.count(batch.num_positions) == 1
        before = len(tried)
        torch.testing.assert_close(gradients(trainer, batch), expected, atol=1e-7, rtol=1e-5)
        assert max(tried[before:]) <= batch.num_positions // 3  # no retry of the failing size
    said = capsys.readouterr().err
    assert (
        f"memory   does not hold a batch of {len(batch.src_BS)} pairs; such batches are made in "
        "halves, and the updates stay the same" in said
    )


def test_a_training_that_splits_batches_for_lack_of_memory_has_the_same_losses(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    settings = ["model.dropout=0.0", "training.log_every=1"]
    ample = train(source, *settings, run=str(tmp_path / "ample"))
    tried = hold_at_most(monkeypatch, 100, MemoryError())
    short = train(source, *settings, run=str(tmp_path / "short"))
    assert max(tried) > 100
    losses = [[line["loss"] for line in step_lines(run)] for run in (ample, short)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_memory_probe_runs_before_the_first_update(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    called: list[str] = []

    def noting(name: str) -> Callable[..., object]:
        original = getattr(Trainer, name)

        def noted(*arguments: object) -> object:
            called.append(name)
            return original(*arguments)

        return noted

    for name in ("probe_memory", "_update"):
        monkeypatch.setattr(Trainer, name, noting(name))
    train(source, "training.max_steps=2", run=str(tmp_path / "run"))
    assert called == ["probe_memory", "_update", "_update"]


def test_too_little_memory_for_a_single_pair_is_an_error(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    hold_at_most(monkeypatch, 1, MemoryError())
    with pytest.raises(RunError, match="the memory must hold a single training pair"):
        train(source, run=str(tmp_path / "run"))


def test_another_runtime_error_is_not_treated_as_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    tried = hold_at_most(monkeypatch, 1, RuntimeError("expected scalar type Float but found Half"))
    with pytest.raises(RuntimeError, match="expected scalar type"):
        train(source, run=str(tmp_path / "run"))
    assert len(tried) == 1


def test_the_memory_probe_runs_the_batches_of_most_positions_and_of_most_attention_weights(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    tried = hold_at_most(monkeypatch, 10**9, MemoryError())
    with trainer_of(source, tmp_path) as trainer:
        trainer.probe_memory()
        batches = trainer.data.batches(192, Position())
        epoch = [next(batches)[0] for _ in range(trainer.data.plan(192).num_batches)]
        most_places = max(batch.src_BS.numel() + batch.tgt_in_BT.numel() for batch in epoch)
        most_pairs = max(
            len(batch.src_BS) * (s * s + s * t + t * t)
            for batch in epoch
            for s, t in [(batch.src_BS.shape[1], batch.tgt_in_BT.shape[1])]
        )
        assert tried[0] == most_places
        _, second = trainer.data.largest(192)
        s, t = second.src_BS.shape[1], second.tgt_in_BT.shape[1]
        assert len(second.src_BS) * (s * s + s * t + t * t) == most_pairs
        assert len(tried) == 2
        assert all(parameter.grad is None for parameter in trainer.state.parameters)


def test_the_memory_probe_does_not_change_the_final_weights_or_the_metrics(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    with_trial = train(source, run=str(tmp_path / "with"))
    monkeypatch.setattr(Trainer, "probe_memory", lambda trainer: None)
    without = train(source, run=str(tmp_path / "without"))
    assert weights(with_trial) == weights(without)
    assert timeless(with_trial) == timeless(without)


def in_little_memory(source: Path, directory: Path) -> None:
    """Exceed a real memory limit; assert that a split batch has the gradients of the whole one."""
    wide = ["training.batch_tokens=8000", "model.d_ff=4096", "model.dropout=0.0"]
    with trainer_of(source, directory, *wide) as trainer:
        batch = trainer.data.largest(8000)[0]
        whole = gradients(trainer, batch)
        status = Path("/proc/self/status").read_text("utf-8")
        size = next(int(line.split()[1]) for line in status.splitlines() if "VmSize" in line)
        resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + 2**25, -1))
        halved = gradients(trainer, batch)
        assert trainer.gradients.oom_size < float("inf"), "the limit was never reached"
        torch.testing.assert_close(halved, whole, atol=1e-6, rtol=1e-4)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_batch_beyond_a_real_memory_limit_is_split_and_the_gradients_stay_the_same(
    tmp_path: Path,
) -> None:
    source = write_task(tmp_path, reverse_task, num_train=1500)
    assert run_in_child(in_little_memory, source, tmp_path) == 0


@contextlib.contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """Limit the size of files, so that writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Simulate a full disk whenever one of these steps is saved."""
    save = checkpoint.save

    def limited(directory: Path, *arguments: object) -> Path:
        progress = arguments[2]
        assert isinstance(progress, checkpoint.Progress)
        with files_at_most(20_000) if progress.step in steps else contextlib.nullcontext():
            return save(directory, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save", limited)


def contents(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def test_a_full_disk_skips_a_checkpoint_and_training_continues(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ample = train(source, *OFTEN, run=str(tmp_path / "ample"))
    full_at(monkeypatch, 4, 6)
    run = train(source, *OFTEN, run=str(tmp_path / "run"))
    assert list(checkpoint.steps(ample.checkpoints_dir)) == [2, 4, 6, 8, 10, 12]
    assert list(checkpoint.steps(run.checkpoints_dir)) == [2, 8, 10, 12]
    for step, path in checkpoint.steps(run.checkpoints_dir).items():
        checkpoint.check(path)
        theirs = contents(checkpoint.steps(ample.checkpoints_dir)[step])
        ours = contents(path)
        assert ours.keys() == theirs.keys()
        assert ("optimizer.safetensors" in ours) == (step >= 10)
        tensors = [name for name in ours if name.endswith(".safetensors")]
        assert [ours[name] for name in tensors] == [theirs[name] for name in tensors]
    assert timeless(run) == timeless(ample)
    assert not list(run.path.rglob("*.tmp"))
    failed = run.checkpoints_dir / "step-00000004"
    assert (
        f"step 4: nothing is saved: {failed}: cannot be written: File too large. Training goes "
        "on; the next save tries again" in capsys.readouterr().err
    )


def test_a_disk_that_is_full_at_the_end_is_an_error_that_names_the_checkpoint_to_resume_from(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    ample = train(source, *OFTEN, run=str(tmp_path / "ample"))
    with monkeypatch.context() as patch:
        full_at(patch, 10, 12)
        with pytest.raises(WriteError) as error:
            train(source, *OFTEN, run=str(tmp_path / "run"))
    run = RunDir(tmp_path / "run")
    assert str(error.value) == (
        f"{run.checkpoints_dir}/step-00000012: cannot be written: File too large. Once there is "
        "room, the same command goes on from the checkpoint of step 8."
    )
    assert not run.model_path.exists()
    train(source, *OFTEN, run=str(run.path))
    assert weights(run) == weights(ample)


def test_a_signal_on_a_full_disk_does_not_claim_that_all_is_saved(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, cli: Cli
) -> None:
    full_at(monkeypatch, 3)
    stop_at(monkeypatch, 3)
    outcome = cli("train", source, "--run", tmp_path / "run")
    assert outcome.code == 2
    assert "all is saved" not in outcome.err
    assert outcome.err.splitlines()[-1].endswith(
        "cannot be written: File too large. Once there is room, the same command goes on from the "
        "beginning."
    )


def test_metrics_that_a_full_disk_rejects_are_written_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    with RunLog(path) as log:
        log.metrics({"step": 1})
        with files_at_most(20):
            log.metrics({"step": 2})
            log.metrics({"step": 3})
            assert path.read_bytes() == b'{"step": 1}\n'
        log.metrics({"step": 4})
    assert metrics_of(path) == [1, 2, 3, 4]
    said = capsys.readouterr().err
    assert said == f"{path}: cannot be written: File too large.\n"


def metrics_of(path: Path) -> list[object]:
    return [line["step"] for line in metrics(RunDir(path.parent))]


@pytest.mark.parametrize("num_bytes", [100, 3_000, 8_000, 20_000])
def test_a_disk_that_is_full_while_tokenizing_leaves_no_files(
    source: Path, tmp_path: Path, cli: Cli, num_bytes: int
) -> None:
    run = RunDir(tmp_path / "run")
    with files_at_most(num_bytes):
        outcome = cli("tokenize", source, "--run", run.path)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].endswith("cannot be written: File too large.")
    assert contents(run.path) == {}
    assert cli("tokenize", source, "--run", run.path).code == 0


def test_a_config_that_does_not_fit_on_the_disk_leaves_the_old_file_unchanged(
    tmp_path: Path,
) -> None:
    source = write_task(tmp_path, reverse_task)
    config = config_file.load(source)
    before = contents(tmp_path)
    with files_at_most(100), pytest.raises(WriteError, match="cannot be written: File too large"):
        config_file.save(config, source)
    assert contents(tmp_path) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_as_stdout_gives_a_one_line_error(trained: RunDir, tmp_path: Path) -> None:
    source = write(tmp_path / "source", ["ba ce"])
    with (
        Path("/dev/full").open("wb") as full,
        MtrainProcess("translate", trained.path, source, stdout=full.fileno(), stderr=PIPE) as own,
    ):
        said = own.stderr.read()
        assert own.wait() == 2
    assert said == b"mtrain: stdout: cannot be written: No space left on device.\n"


def test_appending_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic.append(path, b"first\n")
    with files_at_most(10), pytest.raises(WriteError):
        atomic.append(path, b"second\n")
    assert path.read_bytes() == b"first\n"
    atomic.append(path, b"third\n")
    assert path.read_bytes() == b"first\nthird\n"
