"""Training learns, is reproducible bit for bit, and resumes where it stopped."""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from builders import single_rank_update
from conftest import Cli, at_a_terminal, open_terminal
from fork_server import MtrainProcess, needs_fork_server, run_in_child
from run_folders import harm, metrics, step_lines, timeless, weights
from safetensors.torch import load_file
from tasks import prepared, reverse_task, stop_at, train, write, write_task

from mtrain.cli.main import main
from mtrain.config import config_file
from mtrain.config.sections import ConsistencyConfig, TrainingConfig
from mtrain.data import prepare
from mtrain.data.batch import Batch, UpdateBatches, collate
from mtrain.decode import translator as translator_module
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.translator import Translator
from mtrain.errors import DataError, RunError
from mtrain.evaluation.metrics import bleu
from mtrain.io.lines import read_lines
from mtrain.model.transformer import Transformer
from mtrain.ops import native
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Progress
from mtrain.run.load_model import LoadOptions
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE, ProcessGroup
from mtrain.runtime.signals import Stopped
from mtrain.tokenizer import sentencepiece
from mtrain.training import gradients as gradients_module
from mtrain.training import reporting
from mtrain.training import trainer as trainer_module
from mtrain.training.checkpoint_manager import CheckpointManager
from mtrain.training.gradients import GradientPart, Gradients, GradientTask
from mtrain.training.loss import LossSum, loss_of
from mtrain.training.meters import RunningMeter
from mtrain.training.reporting import TrainingLogger, Validation
from mtrain.training.trainer import Trainer
from mtrain.training.validation import ValidationSet

STEP_KEYS = [
    "step",
    "epoch",
    "loss",
    "nll",
    "perplexity",
    "lr",
    "tgt_tokens_per_s",
    "grad_norm",
    "updates_skipped",
    "elapsed_s",
    "memory_mib",
]
VALID_KEYS = [
    "step",
    "epoch",
    "valid_loss",
    "valid_nll",
    "valid_perplexity",
    "valid_bleu",
    "elapsed_s",
]
SGD_LIKE = ("model.dropout=0.0", "training.max_grad_norm=0")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of the reverse task: 200 pairs, about eleven batches an epoch."""
    return write_task(tmp_path_factory.mktemp("reverse"), reverse_task)


@pytest.fixture(scope="module")
def straight(source: Path) -> RunDir:
    """Twelve updates without interruption. Tests only read it."""
    return train(source, run=str(source.parent / "straight"))


def stop_and_go_on(
    monkeypatch: pytest.MonkeyPatch, source: Path, run: str, step: int, *overrides: str
) -> RunDir:
    stop_at(monkeypatch, step)
    with pytest.raises(Stopped):
        train(source, *overrides, run=run)
    assert max(checkpoint.steps(RunDir(Path(run)).checkpoints_dir)) == step
    assert not RunDir(Path(run)).model_path.exists()
    return train(source, *overrides, run=run)


def contents(run: RunDir) -> dict[str, bytes]:
    paths = (path for path in run.path.rglob("*") if path.is_file())
    return {path.relative_to(run.path).as_posix(): path.read_bytes() for path in paths}


def test_training_and_validation_losses_decrease(source: Path, tmp_path: Path) -> None:
    run = train(source, "training.max_steps=60", "training.patience=99", run=str(tmp_path / "run"))
    losses = [line["loss"] for line in step_lines(run)]
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0]
    valid = [line["valid_loss"] for line in metrics(run) if "valid_loss" in line]
    assert valid[-1] < valid[0]


def test_metrics_have_exactly_the_documented_keys(straight: RunDir) -> None:
    first, *lines = metrics(straight)
    assert first == {"step": 0, "num_pairs": 200, "pairs_dropped": {}}
    assert [line["step"] for line in lines] == [2, 4, 4, 6, 8, 8, 10, 12, 12]
    for line in lines:
        assert list(line) == (STEP_KEYS if "loss" in line else VALID_KEYS)
        assert all(isinstance(value, int | float) for value in line.values())
        assert line["elapsed_s"] > 0
    for line in step_lines(straight):
        assert line["perplexity"] == pytest.approx(2.718281828459045 ** line["nll"])
        assert line["loss"] > line["nll"] > 0
        assert line["tgt_tokens_per_s"] > 0 < line["memory_mib"]
        assert line["grad_norm"] > 0


def test_thai_is_validated_with_bleu_of_characters_and_the_header_says_so(
    cli: Cli, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "th"
    monkeypatch.setattr(ValidationSet, "translations", lambda valid, _: [*valid.lines.src])
    outcome = cli("train", source, "--run", run, "--set", "data.tgt_lang=th")
    assert outcome.code == 0
    assert "scores   BLEU's tokenizer for th is char\n" in outcome.err
    lines = prepare.read_valid(RunDir(run))
    (*_, last) = (line["valid_bleu"] for line in metrics(RunDir(run)) if "valid_bleu" in line)
    assert last == bleu(lines.src, lines.tgt, "th") != bleu(lines.src, lines.tgt, "en")


def test_validation_pairs_that_are_too_long_are_translated_but_not_in_the_loss(
    cli: Cli, source: Path, straight: RunDir, tmp_path: Path
) -> None:
    lines = prepare.read_valid(straight)
    files = {"src": ["ba " * 300, *lines.src], "tgt": ["ce " * 300, *lines.tgt]}
    valid = {side: [write(tmp_path / side, text)] for side, text in files.items()}
    override = f"data.valid={json.dumps(valid)}"
    outcome = cli("train", source, "--run", tmp_path / "run", "--set", override)
    assert outcome.code == 0
    assert "         13 for validation, 1 of them too long to be in its loss\n" in outcome.err
    losses = [line["valid_loss"] for line in metrics(straight) if "valid_loss" in line]
    same = [
        line["valid_loss"] for line in metrics(RunDir(tmp_path / "run")) if "valid_loss" in line
    ]
    assert same == losses
    with pytest.raises(DataError) as caught:
        ValidationSet(lines, sentencepiece.load(straight.tokenizer_dir), 192, 2)
    assert str(caught.value) == (
        "`data.valid` must have a pair within `data.max_tokens`, which is 2, but all of its 12 are "
        "longer."
    )


def test_validation_translates_as_the_checkpoint_does_once_loaded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """In float32 with packed weights, also where the training computes in bfloat16."""
    seen, translations = [], ValidationSet.translations

    def noted(valid: ValidationSet, translator: Translator) -> list[str]:
        calls.clear()
        dtype = translator.model.compute_dtype
        seen.append((translations(valid, translator), {*calls}, dtype, translator.options))
        return seen[-1][0]

    monkeypatch.setattr(ValidationSet, "translations", noted)
    settings = ["training.precision=bfloat16", "training.max_steps=30", "training.lr=0.01"]
    settings += ["training.validate_every=30", "training.average=1"]
    run = train(source, *settings, run=str(tmp_path / "run"))
    during, names, dtype, options = seen[0]
    assert (dtype, "search_steps" in names) == (None, True)
    loaded = translator_module.load(run, options, LoadOptions("cpu", step=30))
    lines = prepare.read_valid(run)
    assert during == translate_lines(loaded, lines.src, block_lines=len(lines.src))
    assert any(during)


def test_validations_do_not_change_the_training(source: Path, tmp_path: Path) -> None:
    settings = ["training.precision=bfloat16", "training.average=1"]
    runs = [
        train(source, *settings, f"training.validate_every={every}", run=str(tmp_path / str(every)))
        for every in (2, 12)
    ]
    often, once = map(weights, runs)
    assert often == once


def test_the_validation_loss_runs_on_each_core_with_the_bits_of_one(
    straight: RunDir, calls: list[str]
) -> None:
    tokenizer = sentencepiece.load(straight.tokenizer_dir)
    valid = ValidationSet(prepare.read_valid(straight), tokenizer, 64, 500)
    model = translator_module.load(straight, loading=LoadOptions("cpu")).model
    losses = []
    for count in (1, 3):
        torch.set_num_threads(count)
        calls.clear()
        losses.append(valid.loss(model, TrainingConfig(), SINGLE))
        assert "projected_cross_entropy" in calls or "cross_entropy" in calls
        assert {"attention", "packed_linear"} <= {*calls}
    assert losses[0] == losses[1]


def test_without_label_smoothing_the_loss_is_the_nll(source: Path, tmp_path: Path) -> None:
    settings = ["training.label_smoothing=0", "training.max_steps=2"]
    run = train(source, *settings, run=str(tmp_path / "run"))
    assert [line["loss"] for line in step_lines(run)] == [line["nll"] for line in step_lines(run)]


def test_the_same_config_and_seed_give_identical_weights_and_metrics(
    source: Path, straight: RunDir, tmp_path: Path
) -> None:
    again = train(source, run=str(tmp_path / "again"))
    assert weights(again) == weights(straight)
    assert timeless(again) == timeless(straight)


def test_saving_the_same_weights_gives_the_same_bytes(straight: RunDir, tmp_path: Path) -> None:
    tensors = load_file(straight.model_path)
    files = set()
    for _ in range(16):
        checkpoint.save_model(tmp_path / "model", tensors, "a tokenizer")
        files.add((tmp_path / "model").read_bytes())
    assert len(files) == 1


def test_a_different_seed_gives_different_weights(
    source: Path, straight: RunDir, tmp_path: Path
) -> None:
    other = train(source, "seed=2", run=str(tmp_path / "other"))
    assert weights(other) != weights(straight)


@pytest.mark.parametrize("step", [4, 8])
def test_resumed_training_equals_uninterrupted_training(
    monkeypatch: pytest.MonkeyPatch, source: Path, straight: RunDir, tmp_path: Path, step: int
) -> None:
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), step)
    assert weights(run) == weights(straight)
    assert timeless(run) == timeless(straight)


def test_resuming_in_a_later_epoch_equals_uninterrupted_training(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    longer = ["training.max_steps=32", "training.validate_every=16"]
    whole = train(source, *longer, run=str(tmp_path / "whole"))
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 20, *longer)
    epoch_of_step = {line["step"]: line["epoch"] for line in step_lines(run)}
    assert epoch_of_step[18] == epoch_of_step[22] > 0
    assert weights(run) == weights(whole)
    assert timeless(run) == timeless(whole)


def test_resuming_with_gradient_accumulation_equals_uninterrupted_training(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    twice = ["training.accumulate=2", "training.schedule=noam", "training.lr=1"]
    whole = train(source, *twice, run=str(tmp_path / "whole"))
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 8, *twice)
    assert weights(run) == weights(whole)
    assert timeless(run) == timeless(whole)


def test_resuming_with_sampled_segmentations_gives_the_uninterrupted_weights(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    sampled = ["tokenizer.sampling_alpha=0.3"]
    whole = train(source, *sampled, run=str(tmp_path / "whole"))
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 8, *sampled)
    assert weights(run) == weights(whole)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_resuming_with_a_consistency_loss_equals_uninterrupted_training(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, num_threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(gradients_module, "LEAST_TOKENS", 40)
    simcut = ["training.consistency={weight: 3.0, cutoff: 0.05}"]
    whole = train(source, *simcut, run=str(tmp_path / "whole"))
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 8, *simcut)
    assert weights(run) == weights(whole)
    assert timeless(run) == timeless(whole)
    assert all(line["loss"] > line["nll"] for line in step_lines(whole))


def test_resuming_with_muon_equals_uninterrupted_training(
    monkeypatch: pytest.MonkeyPatch, source: Path, straight: RunDir, tmp_path: Path
) -> None:
    muon = ["training.optimizer=muon", "training.weight_decay=0.01"]
    whole = train(source, *muon, run=str(tmp_path / "whole"))
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 8, *muon)
    assert weights(run) == weights(whole) != weights(straight)
    assert timeless(run) == timeless(whole)


@pytest.mark.parametrize(("before", "now"), [("adam", "muon"), ("muon", "adam")])
def test_resuming_with_a_different_optimizer_is_refused(
    cli: Cli, source: Path, tmp_path: Path, before: str, now: str
) -> None:
    run = train(source, f"training.optimizer={before}", run=str(tmp_path / "run"))
    outcome = cli(
        "train",
        source,
        "--run",
        run.path,
        "--set",
        f"training.optimizer={now}",
        "--set",
        "training.max_steps=14",
    )
    path = run.checkpoints_dir / "step-00000012" / "optimizer.safetensors"
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == (
        f"mtrain: {path}: `training.optimizer` must be '{before}', as in this checkpoint, but is "
        f"'{now}' instead."
    )


def test_resuming_in_a_new_process_samples_the_same_segmentations(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    sampled = ["tokenizer.sampling_alpha=0.3", "training.max_steps=6"]
    whole = train(source, *sampled, run=str(tmp_path / "whole"))
    run = RunDir(tmp_path / "run")
    stop_at(monkeypatch, 4)
    with pytest.raises(Stopped):
        train(source, *sampled, run=str(run.path))
    options = [option for key in sampled for option in ("--set", key)]
    with MtrainProcess("train", source, "--run", run.path, *options) as process:
        assert process.wait() == 0
    assert weights(run) == weights(whole)


def test_a_stop_between_checkpoint_steps_does_not_change_the_average(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    averaging = ["training.average=3"]
    whole = train(source, *averaging, run=str(tmp_path / "whole"))
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 6, *averaging)
    assert weights(run) == weights(whole)
    kept = checkpoint.steps(run.checkpoints_dir)
    assert set(kept) == set(checkpoint.steps(whole.checkpoints_dir)) == {4, 8, 12}


def test_a_stop_between_two_logged_steps_does_not_change_the_metrics(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    logging = ["training.log_every=4"]
    whole = train(source, *logging, run=str(tmp_path / "whole"))
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 6, *logging)
    assert timeless(run) == timeless(whole)


def test_training_resumes_from_its_last_checkpoint_after_an_exception(
    monkeypatch: pytest.MonkeyPatch, source: Path, straight: RunDir, tmp_path: Path
) -> None:
    def died(trainer: Trainer) -> None:
        if trainer.state.progress.step == 7:
            raise MemoryError
        report(trainer)

    report = Trainer._report
    monkeypatch.setattr(Trainer, "_report", died)
    run = RunDir(tmp_path / "run")
    with pytest.raises(MemoryError):
        train(source, run=str(run.path))
    assert set(checkpoint.steps(run.checkpoints_dir)) == {4}
    monkeypatch.setattr(Trainer, "_report", report)
    train(source, run=str(run.path))
    assert weights(run) == weights(straight)
    assert timeless(run) == timeless(straight)


def test_a_restart_before_the_first_checkpoint_logs_no_step_twice(
    source: Path, straight: RunDir, tmp_path: Path
) -> None:
    run = prepared(config_file.load(source, run_dir=str(tmp_path / "run")))
    first = straight.metrics_path.read_text().splitlines(keepends=True)[0]
    run.metrics_path.write_text(first)
    train(source, run=str(run.path))
    assert timeless(run) == timeless(straight)


def test_a_truncated_metrics_line_does_not_prevent_resuming(
    monkeypatch: pytest.MonkeyPatch, source: Path, straight: RunDir, tmp_path: Path
) -> None:
    stop_at(monkeypatch, 4)
    with pytest.raises(Stopped):
        train(source, run=str(tmp_path / "run"))
    run = RunDir(tmp_path / "run")
    with run.metrics_path.open("a") as stream:
        stream.write('{"step": 6, "epo')
    train(source, run=str(run.path))
    assert timeless(run) == timeless(straight)


def test_two_micro_batches_give_the_same_update_as_one_batch(source: Path, tmp_path: Path) -> None:
    config = config_file.load(source, SGD_LIKE, str(tmp_path / "run"))
    run = prepared(config)
    vocabulary = sentencepiece.load(run.tokenizer_dir)
    lines = [pair.src for pair in reverse_task(9, 5)]
    src, tgt = vocabulary.encode_src(lines), vocabulary.tgt.encode(lines)
    special = vocabulary.tgt
    whole, first, second = (
        collate(src[rows], tgt[rows], special.pad, special.bos, special.eos)
        for rows in (slice(0, 9), slice(0, 2), slice(2, 9))
    )
    results = []
    for micro_batches in ([whole], [first, second]):
        with RunLog(tmp_path / "metrics.jsonl") as log:
            trainer = Trainer(config, run, log)
            trainer._update(single_rank_update(micro_batches))
        loss, nll, _ = trainer.state.meter.rates()
        weights = {name: w.detach() for name, w in trainer.model.named_parameters()}
        results.append((float(trainer.state.meter.grad_norm), loss, nll, weights))
    (one_norm, one_loss, one_nll, one_weights), (two_norm, two_loss, two_nll, _) = results
    assert two_norm == pytest.approx(one_norm, rel=1e-4)
    assert (two_loss, two_nll) == pytest.approx((one_loss, one_nll), rel=1e-5)
    moments = results[1][3]
    assert all(torch.isfinite(weight).all() for weight in one_weights.values())
    for name, weight in one_weights.items():
        torch.testing.assert_close(moments[name], weight, atol=2e-3, rtol=0)


def test_the_gradient_is_divided_by_the_tokens_of_the_whole_update(
    source: Path, tmp_path: Path
) -> None:
    """Uneven micro-batches: a mean of their means would weigh short sentences more."""
    config = config_file.load(source, SGD_LIKE, str(tmp_path / "run"))
    run = prepared(config)
    with RunLog(tmp_path / "metrics.jsonl") as log:
        trainer = Trainer(config, run, log)
        batches = trainer.data.batches(96, trainer_module.Position())
        micro_batches = [next(batches)[0] for _ in range(3)]
        num_tokens = [batch.num_tgt_tokens for batch in micro_batches]
        assert len(set(num_tokens)) > 1
        trainer.model.train()
        sums = [loss_of(trainer.model, batch, trainer.settings) for batch in micro_batches]
        (sum(part.loss for part in sums) / sum(num_tokens)).backward()
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        expected = torch.cat([grad.flatten() for grad in gradients if grad is not None]).norm()
        trainer.model.zero_grad(set_to_none=True)
        trainer._update(single_rank_update(micro_batches))
    assert float(trainer.state.meter.grad_norm) == pytest.approx(float(expected), rel=1e-4)


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Split every batch over three threads; return the number of parts of each update."""
    before, parts = torch.get_num_threads(), []
    split_over_threads = Gradients.split_over_threads

    def noted(
        gradients: Gradients, batch: Batch, num_tokens: int, seeds: Iterator[int] | None = None
    ) -> list[GradientTask]:
        tasks = split_over_threads(gradients, batch, num_tokens, seeds)
        parts.append(len(tasks))
        return tasks

    monkeypatch.setattr(gradients_module, "LEAST_TOKENS", 8)
    monkeypatch.setattr(Gradients, "split_over_threads", noted)
    torch.set_num_threads(3)
    yield parts
    torch.set_num_threads(before)


def total(parts: list[GradientPart]) -> list[torch.Tensor]:
    """Return the summed loss, nll and gradients of all parts."""
    sums = [sum(part.sums.loss for part in parts).detach(), sum(part.sums.nll for part in parts)]
    return sums + [sum(grads) for grads in zip(*(part.grads for part in parts), strict=True)]


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_of_a_batch_split_over_threads_equals_that_of_the_batch(
    source: Path, tmp_path: Path, in_threads: list[int], dtype: torch.dtype, norm: str
) -> None:
    config = config_file.load(source, (*SGD_LIKE, f"model.norm={norm}"), str(tmp_path / "run"))
    with RunLog(tmp_path / "metrics.jsonl") as log:
        trainer = Trainer(config, prepared(config), log)
        trainer.model.to(torch.float64 if dtype == torch.float64 else torch.float32).train()
        trainer.model.compute_dtype = dtype
        batch, _ = next(trainer.data.batches(192, trainer_module.Position()))
        tasks = trainer.gradients.split_over_threads(batch, batch.num_tgt_tokens)
        assert len(tasks) == 3
        assert len({task.batch.src_BS.shape[1] for task in tasks}) > 1, "parts differ in width"
        found = total(trainer.gradients.workers.map(trainer.gradients.backward, tasks))
        expected = total([trainer.gradients.backward(tasks[0]._replace(batch=batch))])
        trainer.gradients.workers.close()
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for mine, whole in zip(found, expected, strict=True):
        assert float((mine - whole).norm()) <= bound * float(whole.norm()) + 1e-12


def test_bfloat16_gradients_of_each_weight_are_close_to_those_of_float32(
    source: Path, tmp_path: Path
) -> None:
    config = config_file.load(source, SGD_LIKE, str(tmp_path / "run"))
    with RunLog(tmp_path / "metrics.jsonl") as log:
        trainer = Trainer(config, prepared(config), log)
        batch, _ = next(trainer.data.batches(192, trainer_module.Position()))
        (task,) = trainer.gradients.split_over_threads(batch, batch.num_tgt_tokens)
        exact = trainer.gradients.backward(task)
        trainer.model.compute_dtype = torch.bfloat16
        short = trainer.gradients.backward(task)
    assert {grad.dtype for grad in short.grads} == {torch.float32}
    loss, exact_loss = short.sums.loss.item(), exact.sums.loss.item()
    assert loss == pytest.approx(exact_loss, rel=0.002)
    assert loss != exact_loss
    for mine, long in zip(short.grads, exact.grads, strict=True):
        assert float((mine - long).norm()) < 0.1 * float(long.norm()) + 1e-6


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_the_same_number_of_threads_gives_identical_weights_even_after_resuming(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    in_threads: list[int],
    precision: str,
) -> None:
    settings = [f"training.precision={precision}", "model.attention_dropout=0.1"]
    first = train(source, *settings, run=str(tmp_path / "first"))
    assert in_threads == [3] * (2 + 12)  # the largest batches are tried first
    again = train(source, *settings, run=str(tmp_path / "again"))
    stopped = stop_and_go_on(monkeypatch, source, str(tmp_path / "stopped"), 5, *settings)
    assert weights(again) == weights(first) == weights(stopped)
    assert timeless(again) == timeless(first) == timeless(stopped)


def test_dropout_seeds_differ_by_thread_and_update_and_follow_from_the_seed(
    source: Path, tmp_path: Path, in_threads: list[int]
) -> None:
    config = config_file.load(source, (), str(tmp_path / "run"))
    with RunLog(tmp_path / "metrics.jsonl") as log:
        trainer = Trainer(config, prepared(config), log)
        batch, _ = next(trainer.data.batches(192, trainer_module.Position()))
        seeds = [
            task.seed for _ in range(2) for task in trainer.gradients.split_over_threads(batch, 1)
        ]
        torch.manual_seed(config.seed)
        trainer = Trainer(config, trainer.run_dir, log)
        again = [
            task.seed for _ in range(2) for task in trainer.gradients.split_over_threads(batch, 1)
        ]
    assert len(set(seeds)) == 6
    assert seeds == again


def test_a_batch_too_small_for_all_threads_is_split_over_fewer(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, in_threads: list[int]
) -> None:
    config = config_file.load(source, (), str(tmp_path / "run"))
    with RunLog(tmp_path / "metrics.jsonl") as log:
        trainer = Trainer(config, prepared(config), log)
        batch, _ = next(trainer.data.batches(192, trainer_module.Position()))
        for least, parts in ((batch.num_tgt_tokens // 2, 2), (batch.num_tgt_tokens + 1, 1)):
            monkeypatch.setattr(gradients_module, "LEAST_TOKENS", least)
            tasks = trainer.gradients.split_over_threads(batch, 7)
            assert len(tasks) == parts
            assert sum(task.batch.num_tgt_tokens for task in tasks) == batch.num_tgt_tokens
            assert {task.num_tokens for task in tasks} == {7}


def test_an_error_in_a_gradient_thread_is_raised_with_traceback_and_all_threads_end(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, in_threads: list[int]
) -> None:
    def broken(model: Transformer, batch: Batch, config: TrainingConfig) -> LossSum:
        if threading.current_thread() is threading.main_thread():
            return loss_of(model, batch, config)
        raise ZeroDivisionError("in a thread")

    monkeypatch.setattr(gradients_module, "loss_of", broken)
    with pytest.raises(ZeroDivisionError, match="in a thread") as error:
        train(source, run=str(tmp_path / "run"))
    frames = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert frames[-2:] == ["backward", "broken"]
    assert not any(thread.name.startswith("update") for thread in threading.enumerate())
    assert torch.get_num_threads() == 3


def test_the_header_prints_the_number_of_threads(
    cli: Cli, source: Path, tmp_path: Path, in_threads: list[int]
) -> None:
    outcome = cli("train", source, "--run", tmp_path / "run", "--set", "training.max_steps=1")
    assert outcome.code == 0
    assert any(
        line.startswith("device   cpu, float32, 3 threads, kernels ")
        for line in outcome.err.splitlines()
    )


@pytest.mark.parametrize(
    ("device", "fastest", "dtype", "note"),
    [
        ("cpu", "float32", "bfloat16", True),
        ("cpu", "float32", "float16", True),
        ("cpu", "bfloat16", "float16", True),
        ("cuda", "float32", "bfloat16", True),  # emulated
        ("cuda", "float32", "float16", False),
        ("cuda", "bfloat16", "float16", False),
        ("cpu", "bfloat16", "float32", False),
        ("cpu", "float32", "float32", False),
    ],
)
def test_the_header_says_that_auto_is_faster_than_a_precision_without_instructions(
    device: str, fastest: str, dtype: str, note: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(reporting, "compute_dtype", lambda *_: getattr(torch, fastest))
    log = SimpleNamespace(say=said.append)
    TrainingLogger(log, torch.device(device)).log_device(getattr(torch, dtype), 1)  # type: ignore[arg-type]
    expected = f"         {fastest} is faster here: `training.precision: auto` takes it"
    assert said[0].startswith(f"device   {device}, {dtype}")
    assert said[1:] == [expected] * note


def test_training_a_finished_run_again_leaves_it_unchanged(
    cli: Cli, source: Path, straight: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    before = contents(run)
    outcome = cli("train", source, "--run", run.path)
    assert (outcome.code, outcome.out) == (0, b"")
    assert outcome.err.splitlines() == [
        f"{run.path}: tokenized already",
        f"{run.path}: finished at step 12 (training ends after 12 updates, or after 10 validations "
        "without improvement); to go on, raise `training.max_steps`",
    ]
    after = contents(run)
    assert after.keys() == before.keys()
    assert [
        name
        for name in before
        if re.sub(rb"run_dir: .*", b"", before[name]) != re.sub(rb"run_dir: .*", b"", after[name])
    ] == []


def test_the_file_of_a_killed_save_of_the_final_weights_is_deleted(
    source: Path, straight: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    leftover = run.path / ".model.safetensors.0123abcd.tmp"
    leftover.touch()
    train(source, run=str(run.path))
    assert not leftover.exists()


@pytest.mark.parametrize("copied", ["all", "what translating needs"])
def test_a_finished_model_without_checkpoints_is_not_replaced(
    cli: Cli, source: Path, straight: RunDir, tmp_path: Path, copied: str
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    shutil.rmtree(run.checkpoints_dir)
    if copied != "all":
        shutil.rmtree(run.data_dir)
        run.metrics_path.unlink()
    before = contents(run)
    outcome = cli("train", source, "--run", run.path, "--set", "training.max_steps=20")
    assert outcome.code == 2
    assert outcome.err == (
        f"mtrain: {run.path}: holds a finished model, but no checkpoint to go on from; take "
        f"another --run, or delete {run.model_path} to train from the beginning.\n"
    )
    with pytest.raises(RunError, match="holds a finished model"):
        trainer_module.train(config_file.load(source, run_dir=str(run.path)), run)
    assert contents(run) == before
    run.model_path.unlink()
    if copied == "all":
        train(source, run=str(run.path))
        assert weights(run) == weights(straight)


def test_raising_max_steps_equals_training_with_the_higher_value_from_the_start(
    source: Path, straight: RunDir, tmp_path: Path
) -> None:
    longer = "training.max_steps=16"
    whole = train(source, longer, run=str(tmp_path / "whole"))
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    train(source, longer, run=str(run.path))
    assert weights(run) == weights(whole)
    assert timeless(run) == timeless(whole)
    assert run.config.training.max_steps == 16


def test_a_stop_after_the_last_step_of_raised_max_steps_does_not_leave_the_old_weights(
    monkeypatch: pytest.MonkeyPatch, source: Path, straight: RunDir, tmp_path: Path
) -> None:
    longer = "training.max_steps=16"
    whole = train(source, longer, run=str(tmp_path / "whole"))
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    stop_at(monkeypatch, 16)
    with pytest.raises(Stopped):
        train(source, longer, run=str(run.path))
    assert weights(run) == weights(straight)
    train(source, longer, run=str(run.path))
    assert run.model_path.read_bytes() == whole.model_path.read_bytes()
    before = contents(run)
    train(source, longer, run=str(run.path))
    assert contents(run) == before


def test_config_changes_are_printed_and_logged(
    source: Path, straight: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    config = run.config
    update = {"max_steps": 14, "betas": [0.9, 0.99], "consistency": ConsistencyConfig()}
    settings = config.training.model_copy(update=update)
    changed = config.model_copy(update={"training": settings, "seed": 2})
    trainer_module.train(changed, run)
    said = capsys.readouterr().err
    assert "changed  seed: 1 before, 2 now\n" in said
    assert "changed  training.max_steps: 12 before, 14 now\n" in said
    assert "changed  training.betas: [0.9, 0.98] before, [0.9, 0.99] now\n" in said
    assert "changed  training.consistency.weight: null before, 3.0 now\n" in said
    (line,) = [line for line in metrics(run) if "changed_config" in line]
    assert line["step"] == 12
    assert line["changed_config"] == {
        "seed": [1, 2],
        "training.max_steps": [12, 14],
        "training.betas": [[0.9, 0.98], [0.9, 0.99]],
        "training.consistency.weight": [None, 3.0],
        "training.consistency.cutoff": [None, 0.05],
    }


def test_changed_corpus_files_are_logged_once_per_change(
    tmp_path: Path,
) -> None:
    source = write_task(tmp_path)
    run = train(source, "training.max_steps=2")
    path = tmp_path / "train.src"
    old = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(b"ba ce\n")
    new = hashlib.sha256(path.read_bytes()).hexdigest()
    for steps in (4, 6):
        train(source, f"training.max_steps={steps}")
    lines = [line for line in metrics(run) if "changed_corpora" in line]
    assert lines == [{"step": 2, "changed_corpora": {str(path): [old, new]}}]
    path.write_bytes(b"ba\n")
    train(source, "training.max_steps=8")
    lines = [line for line in metrics(run) if "changed_corpora" in line]
    assert [line["step"] for line in lines] == [2, 6]
    assert set(run.config.data.train.src) == {str(path)}
    assert [line["step"] for line in step_lines(run)] == [2, 4, 6, 8]


def test_lowering_max_steps_below_an_unvalidated_stop_still_gives_a_model(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    stop_at(monkeypatch, 3)
    with pytest.raises(Stopped):
        train(source, run=str(tmp_path / "run"))
    run = train(source, "training.max_steps=2", run=str(tmp_path / "run"))
    assert run.model_path.exists()


def no_better(trainer: Trainer) -> trainer_module.Validation:
    """Return a BLEU that falls with each step, so that the first validation is the best."""
    return trainer_module.Validation(1.0, 1.0, 50.0 - trainer.state.progress.step)


def test_training_stops_when_patience_is_exhausted(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(Trainer, "_score", no_better)
    patience = ["training.validate_every=2", "training.patience=2", "training.max_steps=40"]
    run = train(source, *patience, run=str(tmp_path / "run"))
    assert [line["step"] for line in metrics(run) if "valid_bleu" in line] == [2, 4, 6]
    assert set(checkpoint.steps(run.checkpoints_dir)) == {2, 4, 6}
    best = load_file(run.checkpoints_dir / "step-00000002" / "model.safetensors")
    final = load_file(run.model_path)
    assert all(torch.equal(final[name], best[name]) for name in best)


def test_a_run_stopped_by_patience_names_the_key_that_lets_it_resume(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Trainer, "_score", no_better)
    settings = ["training.validate_every=2", "training.max_steps=40"]
    run = str(tmp_path / "run")
    train(source, *settings, "training.patience=1", run=run)
    capsys.readouterr()
    train(source, *settings, "training.patience=1", "training.max_steps=60", run=run)
    assert "finished at step 4 " in (said := capsys.readouterr().err)
    assert "to go on, raise `training.patience`\n" in said
    assert metrics(RunDir(Path(run)))[-1]["step"] == 4
    train(source, *settings, "training.patience=2", run=run)
    assert metrics(RunDir(Path(run)))[-1]["step"] == 6


def test_the_last_and_the_best_checkpoints_are_kept(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(Trainer, "_score", no_better)
    keep = ["training.validate_every=2", "training.keep_last=2", "training.keep_best=2"]
    run = train(source, *keep, run=str(tmp_path / "run"))
    assert set(checkpoint.steps(run.checkpoints_dir)) == {2, 4, 10, 12}
    assert [path.name for path in run.checkpoints_dir.iterdir() if path.name[0] == "."] == []


def test_a_best_validation_whose_checkpoint_was_not_saved_leaves_its_place_to_the_next_best(
    tmp_path: Path,
) -> None:
    run, progress = RunDir(tmp_path), Progress()
    settings = TrainingConfig(save_every=None, keep_last=1, keep_best=1, average=1)
    manager = CheckpointManager(run, settings, RunLog(None), SINGLE)
    for progress.step, score in ((10, 30.0), (20, 31.0), (30, 20.0)):
        progress.note_validation(1.0, score)
        if progress.step != 20:  # the disk is full
            checkpoint.path_of(run.checkpoints_dir, progress.step).mkdir(parents=True)
            manager.prune(progress)
    assert set(checkpoint.steps(run.checkpoints_dir)) == {10, 30}


def test_a_finished_run_takes_other_decoding_options_and_names_what_has_no_effect(
    cli: Cli, source: Path, straight: RunDir, tmp_path: Path
) -> None:
    run = RunDir(shutil.copytree(straight.path, tmp_path / "run"))
    changes = ["--set", "decoding.beam=7", "--set", "training.lr=0.5"]
    outcome = cli("train", source, "--run", run.path, *changes)
    assert outcome.code == 0
    assert outcome.err.splitlines()[2:] == [
        f"changed  decoding.beam: {straight.config.decoding.beam} before, 7 now",
        f"{run.path}: has finished; the changes of `training.lr` have no effect",
    ]
    assert RunDir(run.path).config.decoding.beam == 7
    assert RunDir(run.path).config.training == straight.config.training


def test_a_validation_that_no_checkpoint_knows_is_not_in_the_metrics_twice(tmp_path: Path) -> None:
    with RunLog(tmp_path / "metrics.jsonl") as log:
        for values in ({"step": 6, "loss": 1.0}, {"step": 6, "valid_loss": 1.0}, {"step": 7}):
            log.metrics(values)
        log.drop_after(6)
        assert [len(json.loads(line)) for line in read_lines(tmp_path / "metrics.jsonl")] == [2, 2]
        log.drop_after(6, with_validation=False)
    assert list(read_lines(tmp_path / "metrics.jsonl")) == ['{"step": 6, "loss": 1.0}']


def test_all_ranks_take_the_noise_limit_of_bleu_from_the_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfAnotherMachine(ProcessGroup):
        def broadcast_float(self, number: float) -> float:
            return 17.5 if number == 3.0 else number

    monkeypatch.setattr(trainer_module, "noise_bleu", lambda tgt_lang: 3.0)
    run = train(source, "training.max_steps=2", run=str(tmp_path / "run"))
    with RunLog(None) as log:
        trainer = Trainer(run.config, run, log, OfAnotherMachine())
    assert trainer.state.progress.min_bleu == 17.5


def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_once_and_training_continues(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    straight: RunDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if "step-" in path.name and not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        rmtree(path, ignore_errors)

    keep = ["training.keep_last=1", "training.save_every=2"]
    rmtree = shutil.rmtree
    monkeypatch.setattr("shutil.rmtree", refuse)
    run = train(source, *keep, run=str(tmp_path / "run"))
    said = [line for line in capsys.readouterr().err.splitlines() if "be deleted" in line]
    assert len(said) == 1
    assert re.fullmatch(
        rf"an old checkpoint cannot be deleted: {run.checkpoints_dir}/\.step-00000002\.\w+\.tmp: "
        "Device or resource busy; the training goes on",
        said[0],
    )
    assert set(checkpoint.steps(run.checkpoints_dir)) == {12}
    assert weights(run) == weights(straight)
    monkeypatch.undo()
    train(source, *keep, "training.max_steps=14", run=str(run.path))
    assert not list(run.checkpoints_dir.glob(".*"))


def test_the_size_of_the_run_folder_is_printed_at_the_end(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(source, run=str(tmp_path / "run"))
    sizes = {name: len(content) for name, content in contents(run).items()}
    of_checkpoints = sum(size for name, size in sizes.items() if name.startswith("checkpoints/"))
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"size     {run.path} takes {sum(sizes.values()) / 1e6:.1f} MB; its checkpoints are "
        f"{of_checkpoints / 1e6:.1f} MB of that, needed only to continue the training"
    )


def test_checkpoints_are_saved_between_validations_with_save_every(
    source: Path, tmp_path: Path
) -> None:
    every = ["training.save_every=3", "training.validate_every=12", "training.keep_last=9"]
    run = train(source, *every, run=str(tmp_path / "run"))
    assert set(checkpoint.steps(run.checkpoints_dir)) == {3, 6, 9, 12}


def test_a_lower_keep_last_deletes_checkpoints_before_a_resumed_training_writes(
    monkeypatch: pytest.MonkeyPatch, source: Path, straight: RunDir, tmp_path: Path
) -> None:
    def spied(log: RunLog, step: int, with_validation: bool = True) -> None:
        kept.append(set(checkpoint.steps(run.checkpoints_dir)))
        drop_after(log, step, with_validation)

    run, kept, drop_after = RunDir(tmp_path / "run"), list[set[int]](), RunLog.drop_after
    shutil.copytree(straight.path, run.path)
    monkeypatch.setattr(RunLog, "drop_after", spied)
    train(source, "training.keep_last=1", run=str(run.path))
    train(source, "training.keep_last=1", "training.max_steps=13", run=str(run.path))
    finished, resumed = kept
    assert finished == {4, 8, 12}
    assert 12 in resumed and len(resumed) <= 2  # the last and the best one


def test_the_final_weights_are_the_average_of_the_last_checkpoints_if_that_is_better(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    bleus = iter([10.0, 30.0, 20.0, 31.0])
    monkeypatch.setattr(
        Trainer, "_score", lambda trainer, **_: trainer_module.Validation(1.0, 1.0, next(bleus))
    )
    run = train(source, "training.average=3", run=str(tmp_path / "run"))
    paths = list(checkpoint.steps(run.checkpoints_dir).values())
    assert [path.name for path in paths] == ["step-00000004", "step-00000008", "step-00000012"]
    parts = [load_file(path / "model.safetensors") for path in paths]
    for name, weight in load_file(run.model_path).items():
        mean = torch.stack([part[name].double() for part in parts]).mean(0).float()
        torch.testing.assert_close(weight, mean, atol=1e-7, rtol=1e-6)
        assert not torch.equal(weight, parts[1][name])


def test_the_final_weights_are_the_best_checkpoint_if_the_average_is_worse(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    bleus = iter([10.0, 30.0, 20.0, 29.0])
    monkeypatch.setattr(
        Trainer, "_score", lambda trainer, **_: trainer_module.Validation(1.0, 1.0, next(bleus))
    )
    run = train(source, "training.average=3", run=str(tmp_path / "run"))
    best = load_file(checkpoint.steps(run.checkpoints_dir)[8] / "model.safetensors")
    final = load_file(run.model_path)
    assert final.keys() == best.keys()
    assert all(torch.equal(final[name], best[name]) for name in best)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_with_low_bleu_the_validation_loss_chooses_the_best_checkpoint_over_the_average(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_resumed: bool,
) -> None:
    scores = iter([(3.0, 0.9), (1.0, 0.2), (2.0, 0.5), (1.5, 0.7)])
    monkeypatch.setattr(
        Trainer,
        "_score",
        lambda trainer, **_: trainer_module.Validation((pair := next(scores))[0], 1.0, pair[1]),
    )
    average, path = "training.average=3", str(tmp_path / "run")
    if is_resumed:
        run = stop_and_go_on(monkeypatch, source, path, 10, average)
    else:
        run = train(source, average, run=path)
    best = load_file(checkpoint.steps(run.checkpoints_dir)[8] / "model.safetensors")
    final = load_file(run.model_path)
    assert all(torch.equal(final[name], best[name]) for name in best)
    info = checkpoint.load_final_weights_info(run.model_path)
    assert info is not None and (info.steps, info.bleu) == ([8], 0.2)
    said = capsys.readouterr().err
    assert "the average of 3 checkpoints: validation loss 1.5000, BLEU 0.70\n" in said
    assert "the best checkpoint (step 8): validation loss 1.0000, BLEU 0.20\n" in said


def test_the_best_checkpoint_alone_is_not_validated_again_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bleus = iter([10.0, 20.0, 30.0])  # of three validations, and none more
    monkeypatch.setattr(
        Trainer, "_score", lambda trainer, **_: trainer_module.Validation(1.0, 1.0, next(bleus))
    )
    run = train(source, "training.average=1", run=str(tmp_path / "run"))
    last = load_file(checkpoint.steps(run.checkpoints_dir)[12] / "model.safetensors")
    final = load_file(run.model_path)
    assert all(torch.equal(final[name], last[name]) for name in last)
    info = checkpoint.load_final_weights_info(run.model_path)
    assert info is not None and (info.steps, info.bleu) == ([12], 30.0)
    said = capsys.readouterr().err
    assert "the best checkpoint (step 12): validation loss 1.0000, BLEU 30.00\n" in said
    assert f"{run.model_path}: the best checkpoint\n" in said
    assert "the average of" not in said


def test_the_average_can_be_of_the_best_checkpoints(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    bleus = iter([10.0, 40.0, 30.0, 20.0, 15.0, 12.0, 41.0])
    monkeypatch.setattr(
        Trainer, "_score", lambda trainer, **_: trainer_module.Validation(1.0, 1.0, next(bleus))
    )
    best = ["training.validate_every=2", "training.keep_best=2", "training.average=2"]
    run = train(source, *best, "training.average_of=best", run=str(tmp_path / "run"))
    found = checkpoint.steps(run.checkpoints_dir)
    parts = [load_file(found[step] / "model.safetensors") for step in (4, 6)]
    for name, weight in load_file(run.model_path).items():
        torch.testing.assert_close(weight, (parts[0][name] + parts[1][name]) / 2)


def test_averaging_more_best_checkpoints_than_exist_does_not_fail(
    source: Path, straight: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    shutil.rmtree(run.checkpoints_dir / "step-00000004")
    more = ["training.keep_best=4", "training.average=4", "training.average_of=best"]
    train(source, *more, "training.max_steps=16", run=str(run.path))
    assert max(checkpoint.steps(run.checkpoints_dir)) == 16


def test_max_minutes_ends_the_training_and_sets_the_decay_of_the_learning_rate(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    clock = iter(x / 10 for x in range(10**6))
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: next(clock))
    budget = ["training.max_steps=null", "training.max_minutes=0.2", "training.schedule=linear"]
    settings = ["training.warmup_steps=0", "training.log_every=1", "training.validate_every=1000"]
    run = train(source, *budget, *settings, run=str(tmp_path / "run"))
    lines = step_lines(run)
    assert 10 < len(lines) < 121
    assert lines[-1]["elapsed_s"] >= 12 > lines[-2]["elapsed_s"]
    spent = [0.0] + [line["elapsed_s"] / 12 for line in lines[:-1]]
    assert [line["lr"] for line in lines] == pytest.approx([0.01 * (1 - x) for x in spent])
    assert run.model_path.exists()


def test_time_before_a_stop_counts_toward_max_minutes(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    clock = iter(float(x) for x in range(10**6))
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: next(clock))
    budget = ["training.max_steps=null", "training.max_minutes=1", "training.log_every=1"]
    budget += ["training.validate_every=1000"]
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 5, *budget)
    elapsed = [line["elapsed_s"] for line in step_lines(run)]
    assert elapsed == sorted(elapsed)
    assert len(elapsed) < 60


def test_the_time_of_the_last_validation_is_logged_and_saved(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    now = 0.0
    score = Trainer._score

    def slow_score(trainer: Trainer) -> Validation:
        nonlocal now
        now += 100
        return score(trainer)

    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(Trainer, "_score", slow_score)
    limits = ["training.max_steps=2", "training.validate_every=1000"]  # one validation, at the end
    run = train(source, *limits, run=str(tmp_path / "run"))
    assert [line["elapsed_s"] for line in metrics(run)[1:]] == [0, 100]
    assert checkpoint.load_progress(checkpoint.steps(run.checkpoints_dir)[2]).elapsed_s == 100


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernels", ["plain", "compiled"])
def test_a_non_finite_loss_ends_the_training_without_model_or_checkpoint(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    precision: str,
    kernels: str,
) -> None:
    if kernels == "plain":
        monkeypatch.setattr(native, "compiled", lambda: None)
    wild = ["--set", "training.lr=1e30", "--set", "training.warmup_steps=0"]
    wild += ["--set", f"training.precision={precision}"]
    outcome = cli("train", source, *wild, "--run", tmp_path / "run")
    assert outcome.code == 2
    assert "`training.lr`" in outcome.err.splitlines()[-1]
    assert not RunDir(tmp_path / "run").model_path.exists()
    assert not checkpoint.steps(RunDir(tmp_path / "run").checkpoints_dir)


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int], value: float) -> None:
    """Set one element of the gradient to `value`, NaN or infinity, at the given steps."""
    make = Trainer._update

    def spoilt(trainer: Trainer, batches: UpdateBatches) -> None:
        with monkeypatch.context() as patch:
            if trainer.state.progress.step + 1 in steps:
                patch.setattr(Gradients, "backward", spoilt_part)
            make(trainer, batches)

    def spoilt_part(gradients: Gradients, task: GradientTask) -> GradientPart:
        part = backward(gradients, task)
        part.grads[3].view(-1)[-1] = value
        return part

    backward = Gradients.backward
    monkeypatch.setattr(Trainer, "_update", spoilt)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_update_is_skipped_counted_and_reported(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    value: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(monkeypatch, {5, 7}, value)
    saved = ["training.save_every=1", "training.keep_last=20", "training.log_every=1"]
    run = train(source, *saved, run=str(tmp_path / "run"))
    before, left_out, after = (
        load_file(checkpoint.steps(run.checkpoints_dir)[step] / "model.safetensors")
        for step in (4, 5, 6)
    )
    assert all(torch.equal(before[name], left_out[name]) for name in before)
    assert not all(torch.equal(left_out[name], after[name]) for name in before)
    counts = {line["step"]: line["updates_skipped"] for line in step_lines(run)}
    assert counts == {1: 0, 2: 0, 3: 0, 4: 0, 6: 1, **dict.fromkeys(range(8, 13), 2)}
    said = capsys.readouterr().err
    assert (
        "step 5: the loss or its gradient is not finite; the update is skipped (1 so far)" in said
    )
    assert (
        "step 7: the loss or its gradient is not finite; the update is skipped (2 so far)" in said
    )


def test_resuming_between_skipped_updates_equals_uninterrupted_training(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    spoil(monkeypatch, {5, 7}, float("nan"))
    whole = train(source, run=str(tmp_path / "whole"))
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 6)
    assert weights(run) == weights(whole)
    assert timeless(run) == timeless(whole)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_resuming_when_every_update_was_skipped_equals_uninterrupted_training(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, optimizer: str
) -> None:
    spoil(monkeypatch, {1, 2}, float("nan"))
    chosen = f"training.optimizer={optimizer}"
    whole = train(source, chosen, run=str(tmp_path / "whole"))
    run = stop_and_go_on(monkeypatch, source, str(tmp_path / "run"), 2, chosen)
    assert weights(run) == weights(whole)


def test_ten_skipped_updates_in_a_row_end_the_run_and_keep_its_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    spoil(monkeypatch, {3, *range(6, 30)}, float("nan"))
    run = RunDir(tmp_path / "run")
    with pytest.raises(RunError) as error:
        train(source, "training.max_steps=40", run=str(run.path))
    assert str(error.value) == (
        "10 updates in a row were skipped; take a lower `training.lr` or more "
        "`training.warmup_steps`, and the same command goes on from the checkpoint of step 12."
    )
    path = checkpoint.steps(run.checkpoints_dir)[12]
    assert all(tensor.isfinite().all() for tensor in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize(
    ("setting", "key", "old"),
    [
        ("model.d_ff=64", "d_ff", "32"),
        ("model.norm=pre", "norm", "'post'"),
        ("model.attention_window=5", "attention_window", "null"),
    ],
)
def test_a_changed_model_config_is_refused_once_there_are_checkpoints(
    source: Path, straight: RunDir, tmp_path: Path, setting: str, key: str, old: str
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    before = contents(run)
    with pytest.raises(RunError) as error:
        train(source, setting, "training.max_steps=20", run=str(run.path))
    assert str(error.value) == (
        f"{run.path}: its checkpoints have another `model.{key}` ({old}); choose another --run, or "
        "delete this run folder."
    )
    assert contents(run) == before


def test_a_changed_model_config_is_accepted_before_there_are_checkpoints(
    source: Path, tmp_path: Path
) -> None:
    prepared(config_file.load(source, run_dir=str(tmp_path / "run")))
    run = train(source, "model.d_ff=64", "training.max_steps=1", run=str(tmp_path / "run"))
    assert run.config.model.d_ff == 64


def test_an_unknown_device_is_refused(cli: Cli, source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = cli("train", source, "--run", run, "--set", "training.device=tpu")
    assert outcome.code == 2
    assert outcome.err == (
        "mtrain: `training.device` must be auto, cpu, cuda or cuda:N, but is 'tpu' instead.\n"
    )
    assert not run.exists()


PARTS = ["model.safetensors", "optimizer.safetensors", "progress.json", "checkpoint.json"]


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_checkpoint_is_named_and_training_resumes_from_the_one_before(
    source: Path,
    straight: RunDir,
    tmp_path: Path,
    part: str,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    run.model_path.unlink()
    newest = run.checkpoints_dir / "step-00000012"
    harm(newest / part, damage)
    harmed = files_of(newest)
    train(source, run=str(run.path))
    said = capsys.readouterr().err
    named = (
        part if part != "checkpoint.json" or damage != "flipped" else ""
    )  # it may be reported as a wrong checksum of another file
    assert f"{newest / named}" in said
    assert (
        "The checkpoint before it is taken; this one is kept as damaged-step-00000012, and may be "
        "deleted."
    ) in said
    assert f"resuming from {run.checkpoints_dir / 'step-00000008'}" in said
    assert weights(run) == weights(straight)
    assert timeless(run) == timeless(straight)
    assert files_of(run.checkpoints_dir / "damaged-step-00000012") == harmed
    assert max(checkpoint.steps(run.checkpoints_dir)) == 12


def test_without_an_undamaged_checkpoint_resuming_fails_and_changes_nothing(
    source: Path, straight: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    for number, path in enumerate(checkpoint.steps(run.checkpoints_dir).values()):
        harm(path / PARTS[number], "flipped")
    before = files_of(run.path)
    with pytest.raises(RunError) as error:
        train(source, "training.max_steps=20", run=str(run.path))
    assert str(error.value) == (
        f"{run.checkpoints_dir}: holds 3 checkpoints, but none that is whole, with the optimizer's "
        "state; restore one from a copy, or delete the folder to train from the beginning."
    )
    assert files_of(run.path) == before


def test_a_damaged_checkpoint_is_left_out_of_the_average(
    source: Path, straight: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    run.model_path.unlink()
    harmed = run.checkpoints_dir / "step-00000008" / "model.safetensors"
    harm(harmed, "flipped")
    train(source, "training.average=3", run=str(run.path))
    said = capsys.readouterr().err
    assert f"{harmed}: is damaged: its checksum is another. It is skipped." in said
    assert "the average of 2 checkpoints" in said


def test_without_an_undamaged_validated_checkpoint_there_are_no_final_weights(
    source: Path, tmp_path: Path
) -> None:
    settings = ["training.save_every=2", "training.keep_last=9", "training.keep_best=9"]
    run = train(source, *settings, run=str(tmp_path / "run"))
    run.model_path.unlink()
    for step in (4, 8, 12):
        harm(run.checkpoints_dir / f"step-{step:08d}" / "model.safetensors", "flipped")
    with RunLog(run.metrics_path) as log:
        trainer = Trainer(run.config, run, log)
        trainer.state.progress = checkpoint.load_progress(run.checkpoints_dir / "step-00000012")
        with pytest.raises(RunError) as raised:
            trainer.finish()
    assert str(raised.value) == (
        f"{run.checkpoints_dir}: must have a whole checkpoint with a validation, but has 3 whole "
        "checkpoints without one; restore one from a copy, or delete the folder to train from the "
        "beginning."
    )


def test_all_ranks_use_the_checkpoints_that_the_first_rank_found(
    straight: RunDir, tmp_path: Path
) -> None:
    """On a network disk, another rank may see other files, or none."""

    class Rank(ProcessGroup):
        size = 2

        def __init__(self, rank: int, sent: list[bytes]) -> None:
            self.rank, self.sent = rank, sent

        def broadcast_bytes(self, message: bytes) -> bytes:
            if self.is_first:
                self.sent.append(message)
            return self.sent.pop(0) if not self.is_first else message

        def broadcast_float(self, number: float) -> float:
            return float(self.broadcast_bytes(str(float(number)).encode()))

    first_dir, sent = RunDir(tmp_path / "first"), []
    shutil.copytree(straight.path, first_dir.path)
    found = []
    for rank, run in enumerate((first_dir, RunDir(tmp_path / "nothing"))):
        log = RunLog(None, console=None, has_bar=False)
        settings = straight.config.training.model_copy(update={"average": 3})
        manager = CheckpointManager(run, settings, log, Rank(rank, sent))
        newest = manager.newest()
        assert newest == run.checkpoints_dir / "step-00000012"
        progress = checkpoint.load_progress(first_dir.checkpoints_dir / newest.name)
        found.append([manager.final_candidates(progress), manager.has_final_weights(12)])
    assert found[0] == found[1] == [(progress.best_steps()[0], [12, 8, 4]), True]
    assert not sent


def test_a_lock_file_that_cannot_be_written_is_an_error(
    cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(config_file.load(source, run_dir=str(tmp_path / "run")))

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "run" / ".lock"))

    monkeypatch.setattr("filelock.FileLock.acquire", read_only)
    monkeypatch.chdir(tmp_path)
    outcome = cli("train", source, "--run", "run")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == (
        "mtrain: run/.lock: cannot be written: Read-only file system."
    )


def test_a_second_training_is_refused_only_while_the_first_process_runs(
    source: Path, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    command = ["train", source, "--run", run.path]
    endless = [*command, "--set", "training.max_steps=1000000", "--set", "training.log_every=1"]
    endless += ["--set", "training.patience=1000000"]
    with MtrainProcess(*endless, stderr=PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("step 5,") for line in process.stderr)
        with MtrainProcess(*command, stderr=PIPE, text=True) as second:
            assert second.stderr is not None
            said = second.stderr.read()
            assert second.wait(60) == 2
        assert said.splitlines()[-1] == (
            f"mtrain: {run.path}: another process is training in it; wait until it ends, or "
            "choose another run folder."
        )
        process.kill()
    train(source, run=str(run.path))
    assert run.model_path.is_file()


@pytest.mark.parametrize(
    "name",
    ["tokenizer/shared.model", "data/train-00000.arrow", "data/dropped.json", "data/valid.src"],
)
def test_a_missing_file_of_the_run_folder_is_named_without_advice_to_tokenize(
    source: Path, straight: RunDir, tmp_path: Path, name: str
) -> None:
    """The data folder exists, so `mtrain tokenize` would do nothing."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path, run.path)
    (run.path / name).unlink()
    with pytest.raises(RunError) as error:
        train(source, "training.max_steps=20", run=str(run.path))
    assert str(run.path / name) in str(error.value)
    assert "mtrain tokenize" not in str(error.value)


def test_the_header_prints_model_vocabulary_stopping_rules_examples_and_pairs(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    outcome = cli("train", source, "--run", run.path, "--set", "training.max_steps=2")
    assert (outcome.code, outcome.out) == (0, b"")
    weights = load_file(run.model_path)
    said = outcome.err.splitlines()
    num_parameters = sum(weight.numel() for weight in weights.values())
    assert f"model    {num_parameters:,} parameters" in said
    assert "vocab    285 shared subwords" in said
    assert "stops    after 2 updates, or after 10 validations without improvement" in said
    for name in ("source", "reference", "translation"):
        assert sum(line.startswith(f"  {name:<11}  ") for line in said) == 1
    assert "pairs    200 for training, dropped 0," in said


@pytest.mark.parametrize(("accumulate", "shown"), [(1, "13"), (5, "2.6"), (52, "0.25")])
def test_the_header_prints_how_many_updates_an_epoch_is(
    cli: Cli, source: Path, tmp_path: Path, accumulate: int, shown: str
) -> None:
    overrides = ["training.max_steps=1", f"training.accumulate={accumulate}"]
    options = [text for key in overrides for text in ("--set", key)]
    said = cli("train", source, "--run", tmp_path / "run", *options).err.splitlines()
    (batches,) = (line for line in said if line.startswith("batches  "))
    assert batches.startswith("batches  13 an epoch, ")
    assert f"updates  {shown} an epoch, accumulation {accumulate}" in said


@pytest.mark.parametrize("num_examples", [0, 1, 5])
def test_each_validation_prints_different_examples_until_all_were_printed(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_examples: int,
) -> None:
    lines = (source.parent / "valid.src").read_text().splitlines()
    monkeypatch.setattr(ValidationSet, "translations", lambda valid, _: valid.lines.tgt)
    often = ["training.max_steps=12", "training.validate_every=1", "training.patience=99"]
    often += [f"training.num_examples={num_examples}"]
    shown = {}
    for name in ("straight", "stopped"):
        if name == "stopped":
            stop_and_go_on(monkeypatch, source, str(tmp_path / name), 5, *often)
        else:
            train(source, *often, run=str(tmp_path / name))
        said = capsys.readouterr().err.splitlines()
        shown[name] = [line.split(maxsplit=1)[1] for line in said if line.startswith("  source ")]
    assert shown["stopped"] == shown["straight"]
    assert len(shown["straight"]) == 12 * num_examples
    assert all(shown["straight"].count(line) == num_examples * lines.count(line) for line in lines)


@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_model_that_ignores_its_source_is_warned_about_in_later_validations(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_ignored: bool,
) -> None:
    same = ["ba ce"] * 12
    monkeypatch.setattr(
        ValidationSet,
        "translations",
        lambda valid, translator: same if is_ignored else valid.lines.tgt,
    )
    run = train(source, "training.average=2", run=str(tmp_path / "run"))
    assert run.model_path.exists()
    said = capsys.readouterr().err.splitlines()
    warned = [line for line in said if line.endswith("or a longer `training.warmup_steps`")]
    what = "12 different sources have only 1 different translation: the model ignores its source; "
    names = ["step 8: ", "step 12: ", "the average of 2 checkpoints: "]  # of 12 steps
    starts = [line[: line.find(what) + len(what)] for line in warned]
    assert starts == ([f"{name}{what}" for name in names] if is_ignored else [])


def test_long_lines_of_examples_are_truncated(cli: Cli, source: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load(source.read_text())
    for side in ("src", "tgt"):
        line = "ba " * 70
        path = tmp_path / f"valid.{side}"
        path.write_text(f"{line}\n" * 3)
        tree["data"]["valid"][side] = [str(path)]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    few = ["--set", "training.max_steps=2", "--set", "training.num_examples=3"]
    few += ["--set", "data.max_tokens=256", "--set", "training.batch_tokens=256"]
    outcome = cli("train", config, "--run", tmp_path / "run", *few)
    sources = [line for line in outcome.err.splitlines() if line.startswith("  source ")]
    assert outcome.code == 0, outcome.err
    assert sources == ["  source       " + ("ba " * 70)[:142] + "..."] * 3


def test_the_progress_bar_shows_step_loss_speed_learning_rate_and_time_left(
    source: Path, tmp_path: Path
) -> None:
    shown = at_a_terminal("train", source, "--run", tmp_path / "run")
    bars = [part for part in shown if "%|" in part]
    pattern = (
        r" *\d+%\|.*\| step \d+, loss [\d.]+, [\d,]+ tokens/s, lr \d\.\d\de-\d\d, [\d:?]+ left"
    )
    assert any(re.match(pattern, bar) for bar in bars)
    assert max(map(len, bars)) <= 80


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_saves_a_checkpoint_and_training_resumes_from_it(
    source: Path, tmp_path: Path, number: int, code: int
) -> None:
    run = RunDir(tmp_path / "run")
    command = ["train", source, "--run", run.path]
    endless = [*command, "--set", "training.max_steps=1000000", "--set", "training.log_every=1"]
    with MtrainProcess(*endless, stderr=PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 2,"):
                os.kill(process.pid, number)
                break
        rest = process.stderr.read().splitlines()
    assert process.returncode == code
    assert rest[-1] == (
        f"mtrain: stopped; all is saved in {run.path}, and the same command goes on from there."
    )
    step = max(checkpoint.steps(run.checkpoints_dir))
    assert step >= 2
    settings = [f"training.max_steps={step + 2}", "training.log_every=1"]
    train(source, *settings, run=str(run.path))
    assert [line["step"] for line in step_lines(run)] == list(range(1, step + 3))


def test_training_saves_a_checkpoint_when_its_terminal_is_closed(
    source: Path, tmp_path: Path
) -> None:
    """The terminal is gone when the signal arrives, so nothing can be written to it."""
    run = RunDir(tmp_path / "run")
    command = ["train", source, "--run", run.path]
    command += ["--set", "training.max_steps=1000000", "--set", "training.log_every=1"]
    master, terminal = open_terminal()
    with MtrainProcess(
        *command, stdin=terminal, stdout=terminal, stderr=terminal, has_terminal=True
    ) as process:
        os.close(terminal)
        shown = b""
        while b"step 2," not in shown:
            shown += os.read(master, 4096)
        os.close(master)
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(60) == 129
    assert max(checkpoint.steps(run.checkpoints_dir)) >= 2


def test_under_nohup_a_hangup_does_not_stop_the_training(
    monkeypatch: pytest.MonkeyPatch, source: Path, straight: RunDir, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        stop_at(monkeypatch, 3, signal.SIGHUP)
        run = train(source, run=str(tmp_path / "run"))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert weights(run) == weights(straight)


def signalled_twice(source: Path, run: str, number: int) -> None:
    """Run `mtrain train`, which receives two signals during its third update."""
    update = Trainer._update

    def interrupted(trainer: Trainer, batches: UpdateBatches) -> None:
        if trainer.state.progress.step == 2:
            signal.raise_signal(number)
            signal.raise_signal(number)
        update(trainer, batches)

    Trainer._update = interrupted  # type: ignore[method-assign]
    sys.argv = ["mtrain", "train", str(source), "--run", run, "--set", "training.save_every=1"]
    main()


@needs_fork_server
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_second_signal_stops_at_once_and_keeps_the_last_checkpoint(
    source: Path, tmp_path: Path, number: int, code: int
) -> None:
    assert run_in_child(signalled_twice, source, str(tmp_path / "run"), number) == code
    assert list(checkpoint.steps(RunDir(tmp_path / "run").checkpoints_dir)) == [1, 2]


@needs_fork_server
def test_two_hangup_signals_still_save_the_current_update(source: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run_in_child(signalled_twice, source, str(run.path), signal.SIGHUP) == 129
    assert max(checkpoint.steps(run.checkpoints_dir)) == 3


def test_tokens_before_a_stop_count_for_the_loss_but_not_for_the_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 100.0
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: clock)
    window = RunningMeter()
    window.restore(300.0, 200.0, 100)
    window.add(100.0, 50.0, 100)
    clock = 104.0
    assert window.rates() == (2.0, 1.25, 25.0)


def test_the_logged_speed_leaves_out_the_time_before_the_first_update(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, log_step = trainer_module.Trainer.probe_memory, TrainingLogger.log_step
    probed: list[float] = []
    began: list[float] = []

    def noted_probe(trainer: Trainer) -> None:
        probe(trainer)
        probed.append(time.monotonic())

    def noted_log_step(
        logger: TrainingLogger, progress: Progress, meter: RunningMeter, *others: Any
    ) -> None:
        began.append(meter.started)
        log_step(logger, progress, meter, *others)

    monkeypatch.setattr(trainer_module.Trainer, "probe_memory", noted_probe)
    monkeypatch.setattr(TrainingLogger, "log_step", noted_log_step)
    train(source, "training.max_steps=2", run=str(tmp_path / "run"))
    assert probed[0] <= began[0]
