"""Repeat the updates between two checkpoints, and compare the results with the later one.

Nothing is written into the run folder; the repeated training writes to a temporary folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtrain.config.sections import Config
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Checkpoint, Environment, Weights
from mtrain.run.logger import RunLog, read_metrics
from mtrain.run.run_dir import RunDir
from mtrain.runtime import device
from mtrain.runtime.signals import Signals
from mtrain.train.trainer import Trainer

TIMES = {"tgt_tokens_per_s", "elapsed_s", "memory_mib"}  # these differ between equal trainings
Metrics = dict[str, dict[str, Any]]


class Span(NamedTuple):
    """Two checkpoints of a run, whose updates in between are repeated."""

    first_step: int
    last_step: int
    older: Path
    newer: Path


class Replayed(NamedTuple):
    """How the repeated updates compare with the stored checkpoint.

    Attributes:
        differing: the parts that are not bit-identical.
        distance: of repeated and stored weights, relative to that of the two checkpoints (L2).
        elsewhere: how this machine differs from the one that trained; empty if it does not.
    """

    differing: list[str]
    distance: float
    elsewhere: str


@torch.inference_mode(False)
def replay(config: Config, run: RunDir, span: Span) -> Replayed:
    """Make the updates between two checkpoints again, and compare.

    Raises:
        RunError, ConfigError: if the training cannot go on from the older checkpoint here.
        WriteError: if the temporary folder cannot be written.
    """
    device.keep_freed_memory()
    saved_in = checkpoint.load_environment(span.newer)
    with tempfile.TemporaryDirectory(prefix="mtrain-") as folder, _threads(saved_in):
        scratch = RunDir(Path(folder))
        scratch.tokenizer_dir.symlink_to(run.tokenizer_dir.resolve())
        scratch.data_dir.symlink_to(run.data_dir.resolve())
        budget = config.training.max_steps or span.last_step
        bar = (span.first_step / budget, span.last_step / budget)
        with RunLog(scratch.metrics_path, is_quiet=True, bar=bar) as log:
            trainer = Trainer(config, scratch, log)
            with closing(trainer.gradients.workers):
                trainer.restore(span.older)
                trainer.probe_memory()
                trainer.run(Signals(), span.last_step)
        replayed = trainer.state.to_checkpoint()
        stored = checkpoint.load(span.newer, trainer.fingerprint)
        before = checkpoint.load(span.older, trainer.fingerprint)
        differing = _differing(replayed, stored)
        if not differing and _metrics_differ(scratch, run, span):
            differing = ["metrics.jsonl"]
        return Replayed(
            differing,
            _distance(replayed.weights, stored.weights, before.weights),
            _environment_change(span, trainer.current_environment()),
        )


@contextmanager
def _threads(saved_in: Environment | None) -> Iterator[None]:
    """Compute on as many threads as the training did."""
    before = torch.get_num_threads()
    torch.set_num_threads(saved_in.num_threads if saved_in else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _differing(replayed: Checkpoint, stored: Checkpoint) -> list[str]:
    """Return the parts of two checkpoints that are not bit-identical; elapsed time is ignored."""
    differing = []
    if not _same(replayed.weights, stored.weights):
        differing.append("weights")
    if not _same(_optimizer_state(replayed), _optimizer_state(stored)):
        differing.append("optimizer")
    no_time = {"elapsed_s": 0.0}
    if replayed.progress.model_copy(update=no_time) != stored.progress.model_copy(update=no_time):
        differing.append("progress")
    return differing


def _optimizer_state(loaded: Checkpoint) -> Weights:
    """Return the optimizer state without that of the GPU's random generator."""
    return {name: tensor for name, tensor in loaded.optimizer.items() if name != "random.cuda"}


def _same(one: Weights, other: Weights) -> bool:
    """Return whether both have the same names, types, shapes and bits."""
    return checkpoint.digest(one) == checkpoint.digest(other)


def _distance(replayed: Weights, stored: Weights, before: Weights) -> float:
    """Return |replayed - stored| / |stored - before|, the error relative to the change replayed."""
    change = _norm_of_difference(stored, before)
    return _norm_of_difference(replayed, stored) / change if change else 0.0


def _norm_of_difference(one: Weights, other: Weights) -> float:
    squares = [
        (tensor.cpu().double() - other[name].double()).square().sum()
        for name, tensor in one.items()
    ]
    return float(torch.stack(squares).sum().sqrt())


def _environment_change(span: Span, here: Environment) -> str:
    """Return why bits may differ; "" if the environment is the same and no GPU is used."""
    for path in (span.newer, span.older):
        saved_in = checkpoint.load_environment(path)
        if saved_in is None:
            return "the checkpoint does not say what it was made with"
        here = here._replace(num_threads=min(saved_in.num_threads, os.cpu_count() or 1))
        for name, then in saved_in._asdict().items():
            now = getattr(here, name)
            if then != now:
                return f"made with {name} {then}, here is {now}"
    return "a GPU adds in any order" if here.device != "cpu" else ""


def _metrics_differ(scratch: RunDir, run: RunDir, span: Span) -> bool:
    """Return whether a logged line of the run differs from its repetition."""
    again = _metrics_of_span(scratch.metrics_path, span)
    return any(
        again.get(key) != line for key, line in _metrics_of_span(run.metrics_path, span).items()
    )


def _metrics_of_span(path: Path, span: Span) -> Metrics:
    """Return the lines logged in a span, without times, by kind and step."""
    logged: Metrics = {}
    for line in read_metrics(path):
        step = line["step"]
        kind = next((key for key in ("loss", "valid_loss") if key in line), None)
        if kind and span.first_step < step <= span.last_step:
            timeless = {key: value for key, value in line.items() if key not in TIMES}
            logged[f"{kind} {step}"] = timeless
    return logged
