"""Compare numbers of processes: target tokens a second, share of the exchange, saves, resumes."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from machine import commit, describe_machine

from mtrain.config import config_file
from mtrain.config.sections import Config
from mtrain.data.batch import Batch, Position
from mtrain.data.prepare import prepare
from mtrain.run.logger import RunLog, Stderr
from mtrain.run.run_dir import RunDir
from mtrain.runtime import device
from mtrain.runtime.process_group import SINGLE, ProcessGroup, read_torchrun_env
from mtrain.runtime.process_settings import own_process
from mtrain.training.loss import LossSum
from mtrain.training.trainer import Trainer

RUN = Path("runs/benchmark_parallel")


class Measured(NamedTuple):
    """Medians of one number of processes, in seconds but for the tokens."""

    tokens_per_s: float
    update_s: float
    alone_s: float
    save_s: float
    resume_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--processes", default="1,2", metavar="N,N")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=3, help="how often all are measured in turn")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = config_file.load(options.config, options.set, str(RUN))
    if options.worker:
        work(config, options.updates)
        return
    shutil.rmtree(RUN, ignore_errors=True)
    prepare(config, RunDir(RUN), Stderr())
    counts = [int(count) for count in options.processes.split(",")]
    found: dict[int, list[Measured]] = {count: [] for count in counts}
    for _ in range(options.pairs):
        for count in counts:
            found[count].append(measure(count))
    print(f"{datetime.date.today()}  {describe_machine()}  commit {commit()}  {options.config}")
    print("| processes | target tokens/s | update | of it exchange | save | resume |")
    print("| --: | --: | --: | --: | --: | --: |")
    for count, several in found.items():
        one = Measured(*(median(values) for values in zip(*several, strict=True)))
        share = 1 - one.alone_s / one.update_s if count > 1 else 0.0
        print(
            f"| {count} | {one.tokens_per_s:,.0f} | {one.update_s:.3f} s | {share:.1%} "
            f"| {one.save_s:.3f} s | {one.resume_s:.3f} s |"
        )


def measure(count: int) -> Measured:
    """Measure so many processes, with one thread each."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = [sys.executable, *(launch if count > 1 else []), __file__, *sys.argv[1:], "--worker"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def work(config: Config, num_updates: int) -> None:
    """Measure as one of the processes; the first prints what all took."""
    place, process_group = read_torchrun_env(), SINGLE
    if place is not None:
        from mtrain.runtime import torch_process_group

        process_group = torch_process_group.join(place)
    own_process()
    device.keep_freed_memory()
    log = RunLog(None, console=None, has_bar=False)
    trainer = Trainer(config, RunDir(RUN), log, process_group)
    trainer.probe_memory()
    tokens: list[int] = []
    updates = trainer.data.updates(config.training.batch_tokens, Position(), trainer.split)

    def update() -> None:
        batches = next(updates)
        tokens.append(batches.num_tokens)
        trainer._update(batches)
        trainer.state.progress.step += 1

    update_s = timed(update, num_updates)
    tokens_per_s = median(tokens) / update_s
    if process_group.size > 1:
        keep_gradients_at_home(trainer)
    alone_s = timed(update, num_updates)
    save_s = timed(lambda: save(trainer, process_group), 5)
    path = trainer.checkpoints.newest()
    assert path is not None
    resume_s = timed(lambda: trainer.restore(path), 5)
    if process_group.is_first:
        print(json.dumps(Measured(tokens_per_s, update_s, alone_s, save_s, resume_s)._asdict()))
    process_group.close()


def keep_gradients_at_home(trainer: Trainer) -> None:
    """Let ranks compute their gradients without exchanging them."""
    from mtrain.training.data_parallel import DDPGradients, FSDPGradients

    by_fsdp = FSDPGradients.backward_micro_batch

    def bare(
        self: DDPGradients, batch: Batch, num_tokens: float, seeds: Iterator[int], is_last: bool
    ) -> list[LossSum]:
        return self.backward_batch(batch, num_tokens, seeds)

    def unexchanged(
        self: FSDPGradients, batch: Batch, num_tokens: float, seeds: Iterator[int], is_last: bool
    ) -> list[LossSum]:
        return by_fsdp(self, batch, num_tokens, seeds, is_last=False)

    DDPGradients.backward_micro_batch = bare  # type: ignore[method-assign]
    FSDPGradients.backward_micro_batch = unexchanged  # type: ignore[method-assign]


def save(trainer: Trainer, process_group: ProcessGroup) -> None:
    """Save anew, and wait until it is done."""
    trainer.checkpoints.is_current = False
    trainer._save()
    process_group.barrier()


def timed(work: Callable[[], None], count: int) -> float:
    """Return the median seconds of doing something, after a third that do not count."""
    took = []
    for _ in range(count):
        started = time.monotonic()
        work()
        took.append(time.monotonic() - started)
    return median(took[count // 3 :])


if __name__ == "__main__":
    main()
