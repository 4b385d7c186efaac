"""Repeat the updates between two checkpoints, and compare the results with the later one.

Nothing is written into the run folder; the repeated training writes to a temporary folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtrain.config.sections import Config
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Checkpoint, Environment, Weights
from mtrain.run.load_model import set_weights
from mtrain.run.logger import RunLog, read_metrics
from mtrain.run.run_dir import RunDir
from mtrain.runtime import device
from mtrain.runtime.signals import Signals
from mtrain.training.trainer import Trainer

METRICS = "metrics.jsonl"  # compared if all parts of the checkpoint are the same
TIMES = {"tgt_tokens_per_s", "elapsed_s", "memory_mib"}  # these differ between equal trainings


class Span(NamedTuple):
    """Two checkpoints of a run, whose updates in between are repeated."""

    first_step: int
    last_step: int
    older: Path
    newer: Path

    @property
    def steps(self) -> range:
        """The steps of the updates that are repeated."""
        return range(self.first_step + 1, self.last_step + 1)


class _ReplayTrainer(Trainer):
    """A trainer whose elapsed time is that of the training that it repeats."""

    elapsed_after: Mapping[int, float]  # step -> seconds, where they are known

    def elapsed_s(self) -> float:
        """Return the original elapsed time after this step, or after the last step that has one."""
        progress = self.state.progress
        return self.elapsed_after.get(progress.step, progress.elapsed_s)


def elapsed_after_steps(run: RunDir, span: Span) -> dict[int, float]:
    """Return the `elapsed_s` of the training after each step of a span.

    The log has it only if the learning rate or the mixture depends on it; otherwise, or if the log
    is cut off, only that of the last step is known.
    """
    newer = checkpoint.load_progress(span.newer)
    logged = [
        (line["step"], line.get("updates_began_s")) for line in read_metrics(run.metrics_path)
    ]
    elapsed_s: dict[int, float] = {}
    for step, began_s in [*logged, (span.last_step, newer.unlogged_began_s)]:
        if isinstance(began_s, list) and all(isinstance(seconds, float) for seconds in began_s):
            elapsed_s |= zip(range(step - len(began_s), step), began_s, strict=True)
    elapsed_s[span.last_step] = newer.elapsed_s
    return {step: elapsed_s[step] for step in span.steps if step in elapsed_s}


@torch.inference_mode(False)
def replay(config: Config, run: RunDir, span: Span) -> tuple[list[str], float, str]:
    """Make the updates between two checkpoints again, and compare the result with the later one.

    Returns:
        The parts that are not bit-identical.
        The distance (L2) of repeated and stored weights, relative to that of the two checkpoints.
        Why the bits may differ (another environment, or a GPU); "" if they must not.

    Raises:
        RunError, ConfigError: if the training cannot go on from the older checkpoint here.
        WriteError: if the temporary folder cannot be written.
    """
    device.keep_freed_memory()
    saved_in, num_threads = checkpoint.load_environment(span.newer), torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="mtrain-") as folder:
        scratch = RunDir(Path(folder))
        scratch.tokenizer_dir.symlink_to(run.tokenizer_dir.resolve())
        scratch.data_dir.symlink_to(run.data_dir.resolve())
        budget = config.training.max_steps or span.last_step
        bar = (span.first_step / budget, span.last_step / budget)
        torch.set_num_threads(saved_in.num_threads if saved_in else num_threads)
        try:
            with RunLog(scratch.metrics_path, console=None, bar=bar) as log:
                trainer = _ReplayTrainer(config, scratch, log)
                trainer.elapsed_after = elapsed_after_steps(run, span)
                newer = span.newer / "model.safetensors"
                weights = checkpoint.load_model(newer, trainer.fingerprint)
                set_weights(trainer.model, weights, newer)  # raises if they are another model's
                del weights
                with closing(trainer.gradients.workers):
                    trainer.restore(span.older)
                    trainer.probe_memory()
                    trainer.run(Signals(), span.last_step)
        finally:
            torch.set_num_threads(num_threads)
        replayed = trainer.state.to_checkpoint()
        stored = checkpoint.load(span.newer, trainer.fingerprint)
        before = checkpoint.load(span.older, trainer.fingerprint)
        differing = _differing(replayed, stored)
        if not differing:
            again = _metrics(scratch.metrics_path, span)
            logged = _metrics(run.metrics_path, span)
            if any(again.get(key) != line for key, line in logged.items()):
                differing = [METRICS]
    change = _difference(stored.weights, before.weights)
    distance = _difference(replayed.weights, stored.weights) / change if change else 0.0
    return differing, distance, _environment_change(span, trainer.current_environment())


def _differing(replayed: Checkpoint, stored: Checkpoint) -> list[str]:
    """Return the parts that are not bit-identical; ignore elapsed time and the GPU's generator."""

    def parts(loaded: Checkpoint) -> dict[str, object]:
        optimizer = {key: value for key, value in loaded.optimizer.items() if key != "random.cuda"}
        return {
            "weights": checkpoint.digest(loaded.weights),
            "optimizer": checkpoint.digest(optimizer),
            "progress": loaded.progress.model_copy(update={"elapsed_s": 0.0, "min_bleu": 0.0}),
        }

    repeated, expected = parts(replayed), parts(stored)
    return [part for part in expected if repeated[part] != expected[part]]


def _difference(weights: Weights, other: Weights) -> float:
    """Return |weights - other| (L2)."""
    squares = [
        (tensor.cpu().double() - other[name].double()).square().sum()
        for name, tensor in weights.items()
    ]
    return float(torch.stack(squares).sum().sqrt())


def _environment_change(span: Span, here: Environment) -> str:
    """Return why the bits may differ; "" for the same environment without a GPU."""
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


def _metrics(path: Path, span: Span) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the lines logged in a span, without times, by kind and step."""
    logged = {}
    for line in read_metrics(path):
        kind = next((key for key in ("loss", "valid_loss") if key in line), None)
        if kind and span.first_step < line["step"] <= span.last_step:
            timeless = {key: value for key, value in line.items() if key not in TIMES}
            logged[kind, line["step"]] = timeless
    return logged
