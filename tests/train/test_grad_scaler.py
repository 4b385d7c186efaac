import json
from pathlib import Path

import pytest
import torch
from conftest import Cli
from tasks import prepared, reverse_task, write_task

from mtrain.config import config_file
from mtrain.data.sampler import Position, single_rank_update
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Progress
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.train import grad_scaler
from mtrain.train.trainer import Trainer


def scaled(loss_scale: float, num_scaled_well: int = 0) -> Progress:
    return Progress(loss_scale=loss_scale, num_scaled_well=num_scaled_well)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_float16_is_scaled(dtype: torch.dtype) -> None:
    progress = scaled(8.0)
    grad_scaler.begin(progress, dtype)
    assert (progress.loss_scale, grad_scaler.factor(progress)) == (0, 1)
    grad_scaler.adapt(progress, is_finite=False)
    assert (progress.loss_scale, progress.num_scaled_well) == (0, 0)


def test_a_training_that_goes_on_goes_on_with_its_factor() -> None:
    fresh, old = Progress(), scaled(1.0)
    grad_scaler.begin(fresh, torch.float16)
    grad_scaler.begin(old, torch.float16)
    assert (fresh.loss_scale, old.loss_scale) == (2**16, 1)


def test_the_factor_is_halved_at_once_and_doubled_after_long() -> None:
    progress = scaled(8.0, num_scaled_well=1998)
    factors = []
    for is_finite in (True, True, False, False, False, False):
        grad_scaler.adapt(progress, is_finite)
        factors.append(progress.loss_scale)
    assert factors == [8, 16, 8, 4, 2, 1]
    grad_scaler.adapt(progress, is_finite=False)
    assert (progress.loss_scale, progress.num_scaled_well) == (1, 0)


def test_the_factor_has_a_limit() -> None:
    progress = scaled(2.0**24, num_scaled_well=1999)
    grad_scaler.adapt(progress, is_finite=True)
    assert progress.loss_scale == 2**24


def trainer_of(tmp_path: Path, log: RunLog, *settings: str) -> Trainer:
    source = write_task(tmp_path, reverse_task)
    config = config_file.load(source, ["model.dropout=0", *settings], str(tmp_path / "run"))
    return Trainer(config, prepared(config), log)


def test_a_scaled_gradient_is_that_of_float32_once_the_factor_is_taken_out(tmp_path: Path) -> None:
    grads = {}
    with RunLog(tmp_path / "metrics.jsonl") as log:
        for precision, factor in (("float32", 1.0), ("float16", 4096.0)):
            trainer = trainer_of(tmp_path, log, f"training.precision={precision}")
            trainer.progress.loss_scale = factor if precision == "float16" else 0.0
            batch, _ = next(trainer.data.batches(192, Position()))
            trainer.gradients.add_up(single_rank_update([batch]), factor)
            grad_scaler.undo(trainer.progress, trainer.parameters)
            grads[precision] = [own.grad for own in trainer.parameters]
    for exact, short in zip(grads["float32"], grads["float16"], strict=True):
        assert exact is not None and short is not None
        assert float((exact - short).norm()) < 0.02 * float(exact.norm()) + 1e-6


def test_without_the_factor_float16_loses_small_gradients(tmp_path: Path) -> None:
    kept = {}
    with RunLog(tmp_path / "metrics.jsonl") as log:
        for factor in (1.0, 2.0**16):
            trainer = trainer_of(tmp_path, log, "training.precision=float16")
            batch, _ = next(trainer.data.batches(192, Position()))
            update = single_rank_update([batch])._replace(num_tokens=10**6)  # one of many batches
            trainer.gradients.add_up(update, factor)
            found = torch.cat([own.grad.flatten() for own in trainer.parameters])  # type: ignore
            kept[factor] = int(found.count_nonzero())
    assert kept[1.0] < 0.9 * kept[2.0**16]


def test_a_factor_that_is_too_large_costs_updates_and_the_training_learns(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grad_scaler, "_FIRST", 2.0**24)
    source = write_task(tmp_path, reverse_task)
    outcome = cli("train", source, "--set", "training.precision=float16", "--run", tmp_path / "run")
    assert outcome.code == 0
    left_out = [line for line in outcome.err.splitlines() if "left out (" in line]
    lowered = [line for line in outcome.err.splitlines() if "the loss is multiplied by" in line]
    assert len(left_out) == len(lowered) > 0
    assert lowered[0] == "  the loss is multiplied by 8,388,608 from now on"
    run = RunDir(tmp_path / "run")
    found = checkpoint.steps(run.checkpoints_dir)
    progress = checkpoint.load_progress(found[max(found)])
    assert progress.num_left_out == len(left_out)
    assert progress.loss_scale == 2.0 ** (24 - len(left_out))
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
