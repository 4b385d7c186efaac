"""Measure training on a device: tokens a second, share of its matrix rate, idle time.

A config is prepared and trained for some updates by the loop that `mtrain train` runs, without
validations and saves. Products of real tokens count, padding does not.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import commit, describe_machine
from operations import Sizes, Tokens, flop
from peers.ceiling import gflops

from mtrain.config import config_file
from mtrain.data.batch import UpdateBatches
from mtrain.data.prepare import prepare
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime import device
from mtrain.runtime.process_settings import own_process
from mtrain.training.trainer import Trainer


class Speed(NamedTuple):
    """What some updates took, and what was in them."""

    seconds: float
    waiting_s: float  # for the next batches
    optimizer_s: float  # in `step` of the optimizers; on a GPU, of its launches
    tokens: Tokens


@contextmanager
def timing_optimizers(trainer: Trainer) -> Iterator[list[float]]:
    """Collect the moments at which the optimizers of a trainer begin and end a step, by turns."""
    moments: list[float] = []

    def note(*_: Any) -> None:
        moments.append(time.monotonic())

    with ExitStack() as hooks:
        for optimizer in trainer.state.optimizers:
            for register in (
                optimizer.register_step_pre_hook,
                optimizer.register_step_post_hook,
            ):
                hooks.callback(register(note).remove)
        yield moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=30, help="updates that do not count")
    parser.add_argument("--run", default="runs/benchmark_device", help="is tokenized once")
    options = parser.parse_args()
    settings = [*options.set, "training.log_every=1000000"]
    config, run = config_file.load(options.config, settings, options.run), RunDir(Path(options.run))
    own_process()
    device.keep_freed_memory()
    with RunLog(run.path.with_suffix(".jsonl")) as log:
        prepare(config, run, log)
        trainer = Trainer(config, run, log)
        began = time.monotonic()
        with closing(trainer.gradients.workers), closing(trainer._updates()) as updates:
            trainer.probe_memory()
            make(trainer, updates, 1)
            first_s = time.monotonic() - began
            make(trainer, updates, options.warm_up)
            speed = make(trainer, updates, options.updates)
            idle = idle_share(trainer, updates, options.updates)
    name = describe_machine() if trainer.device.type == "cpu" else torch.cuda.get_device_name()
    print(f"{datetime.date.today()}  {name}  commit {commit()}  {options.config}")
    rate = flop(speed.tokens, sizes_of(trainer)) / speed.seconds
    size = 2048 if trainer.device.type == "cpu" else 8192
    ceiling = 1e9 * gflops(trainer.compute_dtype, str(trainer.device), size)
    print(f"first update   after {first_s:.1f} s, with what is tried and compiled before it")
    print(f"update         {speed.seconds / options.updates:.4f} s")
    print(f"speed          {speed.tokens.tgt / speed.seconds:,.0f} target tokens/s")
    print(f"products       {rate / 1e12:.2f} TFLOP/s, {rate / ceiling:.0%} of {ceiling / 1e12:.2f}")
    print(f"input          {speed.waiting_s / speed.seconds:.1%} of the time waited for")
    print(f"optimizer      {speed.optimizer_s / speed.seconds:.1%} of the time")
    print(f"idle           {'not measured' if idle is None else f'{idle:.1%} of the time'}")


def make(trainer: Trainer, updates: Iterator[UpdateBatches], count: int) -> Speed:
    """Make updates, and wait for the device once, in the end."""
    began, waiting_s, tokens = time.monotonic(), 0.0, []
    with timing_optimizers(trainer) as moments:
        for _ in range(count):
            asked = time.monotonic()
            batches = next(updates)
            waiting_s += time.monotonic() - asked
            trainer._update(batches)
            trainer.state.progress.step += 1
            tokens.append(tokens_of(batches))
        trainer._read_results()
    total = Tokens(*(sum(counts) for counts in zip(*tokens, strict=True)))
    optimizer_s = sum(moments[1::2]) - sum(moments[::2])
    return Speed(time.monotonic() - began, waiting_s, optimizer_s, total)


def tokens_of(batches: UpdateBatches) -> Tokens:
    """Count what an update reads."""
    total = torch.zeros(len(Tokens._fields), dtype=torch.float64)
    for batch, _ in batches.micro_batches:
        src_B, tgt_B = batch.src_keep_BS.sum(1).double(), batch.tgt_keep_BT.sum(1).double()
        counts = (src_B, tgt_B, src_B.square(), tgt_B.square(), src_B * tgt_B)
        total += torch.stack([count_B.sum() for count_B in counts])
    return Tokens(*total.tolist())


def sizes_of(trainer: Trainer) -> Sizes:
    """Return the sizes of the model that is trained."""
    model = trainer.config.model
    layers = (model.num_encoder_layers, model.num_decoder_layers)
    return Sizes(*layers, model.d_model, model.d_ff, len(trainer.tokenizer.tgt))


def idle_share(trainer: Trainer, updates: Iterator[UpdateBatches], count: int) -> float | None:
    """Return how much of the time nothing runs on a GPU; None where there is none."""
    if trainer.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        speed = make(trainer, updates, count)
    busy_us: float = sum(event.self_device_time_total for event in profiled.key_averages())
    return max(0.0, 1 - busy_us / 1e6 / speed.seconds)


if __name__ == "__main__":
    main()
