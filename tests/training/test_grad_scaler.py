import json
from pathlib import Path

import pytest
import torch
from builders import single_rank_update
from conftest import Cli
from tasks import prepared, reverse_task, write_task

from mtrain.config import config_file
from mtrain.data.batch import Position
from mtrain.run import checkpoint
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.training import gradients
from mtrain.training.gradients import GradScaler
from mtrain.training.trainer import Trainer


def scaler_at(scale: float, growth_tracker: int = 0) -> GradScaler:
    scaler = GradScaler(torch.float16)
    scaler.restore(scale, growth_tracker)
    return scaler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_and_bfloat16_are_not_scaled(dtype: torch.dtype) -> None:
    scaler = GradScaler(dtype)
    scaler.restore(8.0, 0)
    assert (scaler.is_enabled, scaler.scale) == (False, 1)
    scaler.update(is_finite=False)
    assert (scaler.scale, scaler.growth_tracker) == (1, 0)


def test_a_restored_loss_scale_is_kept_and_zero_gives_the_initial_scale() -> None:
    assert (scaler_at(0.0).scale, scaler_at(1.0).scale) == (2**16, 1)


def test_the_loss_scale_halves_after_each_overflow_and_doubles_after_2000_finite_updates() -> None:
    scaler = scaler_at(8.0, growth_tracker=1998)
    factors = []
    for is_finite in (True, True, False, False, False, False):
        scaler.update(is_finite)
        factors.append(scaler.scale)
    assert factors == [8, 16, 8, 4, 2, 1]
    scaler.update(is_finite=False)
    assert (scaler.scale, scaler.growth_tracker) == (1, 0)


def test_the_loss_scale_has_an_upper_limit() -> None:
    scaler = scaler_at(2.0**24, growth_tracker=1999)
    scaler.update(is_finite=True)
    assert scaler.scale == 2**24


def trainer_of(tmp_path: Path, log: RunLog, *settings: str) -> Trainer:
    source = write_task(tmp_path, reverse_task)
    config = config_file.load(source, ["model.dropout=0", *settings], str(tmp_path / "run"))
    return Trainer(config, prepared(config), log)


def test_an_unscaled_float16_gradient_is_close_to_that_of_float32(tmp_path: Path) -> None:
    grads = {}
    with RunLog(tmp_path / "metrics.jsonl") as log:
        for precision, factor in (("float32", 1.0), ("float16", 4096.0)):
            trainer = trainer_of(tmp_path, log, f"training.precision={precision}")
            trainer.state.grad_scaler.restore(factor, 0)
            batch, _ = next(trainer.data.batches(192, Position()))
            trainer.gradients.backward_update(single_rank_update([batch]), factor)
            trainer.state.grad_scaler.unscale(trainer.state.parameters)
            grads[precision] = [own.grad for own in trainer.state.parameters]
    for exact, short in zip(grads["float32"], grads["float16"], strict=True):
        assert exact is not None and short is not None
        assert float((exact - short).norm()) < 0.02 * float(exact.norm()) + 1e-6


def test_without_loss_scaling_small_float16_gradients_underflow_to_zero(tmp_path: Path) -> None:
    kept = {}
    with RunLog(tmp_path / "metrics.jsonl") as log:
        for factor in (1.0, 2.0**16):
            trainer = trainer_of(tmp_path, log, "training.precision=float16")
            batch, _ = next(trainer.data.batches(192, Position()))
            update = single_rank_update([batch])._replace(num_tokens=10**6)  # one of many batches
            trainer.gradients.backward_update(update, factor)
            found = torch.cat([own.grad.flatten() for own in trainer.state.parameters])  # type: ignore
            kept[factor] = int(found.count_nonzero())
    assert kept[1.0] < 0.9 * kept[2.0**16]


def test_a_too_large_initial_loss_scale_skips_updates_and_the_training_still_learns(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gradients, "INITIAL_SCALE", 2.0**24)
    source = write_task(tmp_path, reverse_task)
    outcome = cli("train", source, "--set", "training.precision=float16", "--run", tmp_path / "run")
    assert outcome.code == 0
    left_out = [line for line in outcome.err.splitlines() if "is skipped (" in line]
    lowered = [line for line in outcome.err.splitlines() if "the loss is multiplied by" in line]
    assert len(left_out) == len(lowered) > 0
    assert lowered[0] == "  the loss is multiplied by 8,388,608 from now on"
    run = RunDir(tmp_path / "run")
    found = checkpoint.steps(run.checkpoints_dir)
    progress = checkpoint.load_progress(found[max(found)])
    assert progress.num_skipped == len(left_out)
    assert progress.loss_scale == 2.0 ** (24 - len(left_out))
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
