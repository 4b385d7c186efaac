"""The learning rate schedules: their formulas, peaks and final values."""

import itertools
import math

import pytest
import torch
from builders import single_rank_update
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import prepared, write_task
from torch import Tensor

from mtrain.config.config_file import load
from mtrain.config.sections import TrainingConfig
from mtrain.data.batch import Position
from mtrain.run.logger import RunLog
from mtrain.training.schedule import learning_rate, noam
from mtrain.training.trainer import Trainer

SCHEDULES = ["inverse_sqrt", "noam", "linear", "cosine"]
D_MODEL = 512


def config(schedule: str, warmup_steps: int, lr: float = 0.003) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"schedule": schedule, "warmup_steps": warmup_steps, "lr": lr}
    )


def rates(schedule: str, warmup_steps: int, num_steps: int) -> list[float]:
    """Return the learning rates of a training of `num_steps` updates."""
    settings_ = config(schedule, warmup_steps)
    return [
        learning_rate(settings_, D_MODEL, step, (step - 1) / num_steps)
        for step in range(1, num_steps + 1)
    ]


def peak(settings_: TrainingConfig, d_model: int) -> float:
    if settings_.schedule == "noam":
        return settings_.lr * (d_model * max(settings_.warmup_steps, 1)) ** -0.5
    return settings_.lr


@pytest.mark.parametrize("step", [1, 2, 100, 3999, 4000, 4001, 100_000])
def test_noam_equals_the_formula_of_the_paper(step):
    papers = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
    assert noam(step, 4000, 512) == pytest.approx(papers, rel=1e-14)
    of_config = learning_rate(config("noam", 4000, lr=2.0), 512, step, 0.9)
    assert of_config == pytest.approx(2.0 * papers, rel=1e-14)


def test_noam_of_the_base_model_peaks_at_7e_minus_4_after_4000_steps():
    every = [noam(step, 4000, 512) for step in range(1, 12_001)]
    assert every.index(max(every)) + 1 == 4000
    assert max(every) == pytest.approx((512 * 4000) ** -0.5, rel=1e-14)
    assert max(every) == pytest.approx(7e-4, rel=0.01)


def test_inverse_sqrt_peaks_at_lr_at_the_end_of_the_warmup():
    every = rates("inverse_sqrt", 50, 300)
    assert every.index(max(every)) + 1 == 50
    assert max(every) == pytest.approx(0.003, rel=1e-14)
    assert every[24] == pytest.approx(0.003 / 2)
    assert every[199] == pytest.approx(0.003 / 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_changes_by_more_than_one_warmup_step_per_update(schedule):
    every = rates(schedule, 50, 300)
    jumps = [abs(after - before) for before, after in itertools.pairwise(every)]
    assert max(jumps) <= 1.001 * peak(config(schedule, 50), D_MODEL) / 50


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_rises_to_one_peak_and_falls(schedule):
    every = rates(schedule, 50, 300)
    top = every.index(max(every))
    assert every[: top + 1] == sorted(every[: top + 1])
    assert every[top:] == sorted(every[top:], reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_warmup_is_linear(schedule):
    every = [learning_rate(config(schedule, 50), D_MODEL, step, 0.0) for step in range(1, 51)]
    for step, rate in enumerate(every, start=1):
        assert rate == pytest.approx(every[0] * step, rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_linear_and_cosine_decay_from_lr_to_zero_over_the_budget(schedule):
    settings_ = config(schedule, 10)
    assert learning_rate(settings_, D_MODEL, 10, 0.0) == pytest.approx(0.003, rel=1e-14)
    assert learning_rate(settings_, D_MODEL, 500, 0.5) == pytest.approx(0.003 / 2, rel=1e-12)
    assert learning_rate(settings_, D_MODEL, 1000, 1.0) == pytest.approx(0.0, abs=1e-18)


def test_linear_and_cosine_equal_their_formulas():
    for spent in (0.1, 0.25, 0.8):
        line = learning_rate(config("linear", 0), D_MODEL, 7, spent)
        assert line == pytest.approx(0.003 * (1 - spent), rel=1e-12)
        wave = learning_rate(config("cosine", 0), D_MODEL, 7, spent)
        assert wave == pytest.approx(0.003 * (1 + math.cos(math.pi * spent)) / 2, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warmup_the_first_rate_is_the_highest(schedule):
    every = rates(schedule, 0, 100)
    assert every[0] == max(every) == pytest.approx(peak(config(schedule, 0), D_MODEL), rel=1e-14)
    assert all(rate > 0 for rate in every)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_is_zero_after_the_budget_is_exceeded(schedule):
    assert learning_rate(config(schedule, 0), D_MODEL, 7, 1.2) == pytest.approx(0, abs=1e-18)


@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup_steps=st.integers(0, 100_000),
    lr=st.floats(1e-8, 10),
    d_model=st.integers(1, 4096).map(lambda half: 2 * half),
    step=st.integers(1, 10_000_000),
    spent=st.floats(-0.1, 1.5),
)
@settings(derandomize=True, database=None, deadline=None, max_examples=300)
def test_a_rate_is_never_negative_and_never_above_the_peak(
    schedule, warmup_steps, lr, d_model, step, spent
):
    settings_ = config(schedule, warmup_steps, lr)
    rate = learning_rate(settings_, d_model, step, spent)
    assert 0 <= rate <= peak(settings_, d_model) * (1 + 1e-12)


def test_trainer_updates_equal_the_written_out_adam_and_noam_formulas(tmp_path):
    """Adam (Kingma and Ba 2015, algorithm 1) on the gradients that the trainer saw, in float64."""
    betas, eps, warmup_steps, factor, limit = (0.9, 0.98), 1e-9, 3, 2.0, 0.5
    settings_ = ["schedule=noam", f"lr={factor}", f"warmup_steps={warmup_steps}", f"eps={eps}"]
    overrides = [f"training.{setting}" for setting in [*settings_, f"max_grad_norm={limit}"]]
    config = load(write_task(tmp_path, num_train=60), overrides)
    with RunLog(tmp_path / "metrics.jsonl") as log:
        trainer = Trainer(config, prepared(config), log)
        trainer.model.double()
        weights = list(trainer.model.parameters())
        seen: list[list[Tensor]] = []
        trainer.state.optimizers[0].register_step_pre_hook(
            lambda *_: seen.append([weight.grad.clone() for weight in weights])
        )
        expected = [weight.detach().clone() for weight in weights]
        moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
        batches = trainer.data.batches(96, Position())
        for step in range(1, 8):
            trainer._update(single_rank_update([next(batches)[0]]))
            trainer.state.progress.step = step
            norm = torch.cat([gradient.flatten() for gradient in seen[-1]]).norm()
            assert norm.item() == pytest.approx(min(limit, trainer.state.meter.grad_norm), rel=1e-5)
            d_model = config.model.d_model
            rate = factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)
            for index, gradient in enumerate(seen[-1]):
                m, v = moments[index]
                m = betas[0] * m + (1 - betas[0]) * gradient
                v = betas[1] * v + (1 - betas[1]) * gradient * gradient
                moments[index] = (m, v)
                m_hat, v_hat = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
                expected[index] -= rate * m_hat / (v_hat.sqrt() + eps)
            assert trainer.state.meter.lr == pytest.approx(rate, rel=1e-14)
            for weight, ours in zip(weights, expected, strict=True):
                torch.testing.assert_close(weight.detach(), ours, rtol=1e-9, atol=1e-11)
    assert len(seen) == 7
    assert trainer.state.meter.grad_norm > limit
