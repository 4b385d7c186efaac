"""Measure the cost of checkpoints: seconds, bytes, and their share of the training time."""

from __future__ import annotations

import argparse
import datetime
import shutil
import time
from pathlib import Path
from statistics import median

from machine import commit, describe_machine

from mtrain.config import config_file
from mtrain.data.batch import Position
from mtrain.data.prepare import prepare
from mtrain.run import checkpoint
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime import device
from mtrain.runtime.process_settings import own_process
from mtrain.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--saves", type=int, default=7)
    options = parser.parse_args()
    run = RunDir(Path("runs/benchmark_saving"))
    shutil.rmtree(run.path, ignore_errors=True)
    config = config_file.load(options.config, options.set, str(run.path))
    own_process()
    device.keep_freed_memory()
    with RunLog(run.metrics_path) as log:
        prepare(config, run, log)
        trainer = Trainer(config, run, log)
        updates = time_updates(trainer, options.updates)
        saves = time_saves(trainer, options.saves)
    newest = max(checkpoint.steps(run.checkpoints_dir).items())[1]
    num_bytes = sum(path.stat().st_size for path in newest.iterdir())
    every = config.training.save_every or config.training.validate_every
    print(f"{datetime.date.today()}  {describe_machine()}  commit {commit()}  {options.config}")
    print(f"update       {updates:.4f} s")
    print(f"checkpoint   {saves:.4f} s, {num_bytes:,} bytes")
    for interval in sorted({every, 500}):
        share = saves / (saves + interval * updates)
        print(f"share        {share:.2%} of the training time, saved every {interval:,} updates")


def time_updates(trainer: Trainer, count: int) -> float:
    """Return the median seconds of an update, after a third that do not count."""
    updates = trainer.data.updates(trainer.settings.batch_tokens, Position(), trainer.split)
    took = []
    for _ in range(count):
        started = time.monotonic()
        trainer._update(next(updates))
        trainer._read_results()
        trainer.state.progress.step += 1
        took.append(time.monotonic() - started)
    return median(took[count // 3 :])


def time_saves(trainer: Trainer, count: int) -> float:
    """Return the median seconds of a save, flushed to the disk, with what it prunes."""
    took = []
    for _ in range(count):
        trainer.state.progress.step += 1
        trainer.state.progress.note_validation(1.0, 1.0)
        trainer.checkpoints.is_current = False
        started = time.monotonic()
        trainer._save()
        took.append(time.monotonic() - started)
    return median(took)


if __name__ == "__main__":
    main()
