"""How busy training keeps its device: tokens a second, their share of its matrix rate, idle time.

A config is prepared and trained for some updates by the loop that `mtrain train` runs, without
validations and saves. Products of real tokens count, padding does not.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from machine import commit, describe_machine

from mtrain import config as configs
from mtrain import kernels
from mtrain.config import ModelConfig
from mtrain.data import Dealt
from mtrain.prepare import prepare
from mtrain.rundir import RunDir
from mtrain.runlog import RunLog
from mtrain.training import Trainer

_PRODUCTS = 20


class Speed(NamedTuple):
    """What some updates took, and what was in them."""

    seconds: float
    waiting_s: float  # for the next update to be laid out
    num_tgt_tokens: int
    flop: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=30, help="updates that do not count")
    parser.add_argument("--run", default="runs/benchmark_device", help="is tokenized once")
    options = parser.parse_args()
    settings = [*options.set, "training.log_every=1000000"]
    config, run = configs.load(options.config, settings, options.run), RunDir(Path(options.run))
    kernels.keep_freed_memory()
    with RunLog(run.path.with_suffix(".jsonl")) as log:
        prepare(config, run, log)
        trainer = Trainer(config, run, log)
        began = time.monotonic()
        with closing(trainer.gradients.workers), closing(trainer._updates()) as updates:
            trainer.try_largest()
            make(trainer, updates, 1)
            first_s = time.monotonic() - began
            make(trainer, updates, options.warm_up)
            speed = make(trainer, updates, options.updates)
            idle = idle_share(trainer, updates, options.updates)
    name = describe_machine() if trainer.device.type == "cpu" else torch.cuda.get_device_name()
    print(f"{datetime.date.today()}  {name}  commit {commit()}  {options.config}")
    rate, ceiling = speed.flop / speed.seconds, matrix_rate(trainer)
    print(f"first update   after {first_s:.1f} s, with what is tried and compiled before it")
    print(f"update         {speed.seconds / options.updates:.4f} s")
    print(f"speed          {speed.num_tgt_tokens / speed.seconds:,.0f} target tokens/s")
    print(f"products       {rate / 1e12:.2f} TFLOP/s, {rate / ceiling:.0%} of {ceiling / 1e12:.2f}")
    print(f"input          {speed.waiting_s / speed.seconds:.1%} of the time waited for")
    print(f"idle           {'not measured' if idle is None else f'{idle:.1%} of the time'}")


def make(trainer: Trainer, updates: Iterator[Dealt], count: int) -> Speed:
    """Make updates, and wait for the device once, in the end."""
    began, waiting_s, num_tokens, flop = time.monotonic(), 0.0, 0, 0.0
    for _ in range(count):
        asked = time.monotonic()
        dealt = next(updates)
        waiting_s += time.monotonic() - asked
        trainer._update(dealt)
        trainer.progress.step += 1
        num_tokens += dealt.num_tokens
        flop += flop_of(dealt, trainer.config.model, len(trainer.tokenizer.tgt))
    trainer._heed()
    return Speed(time.monotonic() - began, waiting_s, num_tokens, flop)


def flop_of(dealt: Dealt, model: ModelConfig, num_pieces: int) -> float:
    """Return the operations of an update's products; the backward pass is two forward passes."""
    width, total = model.d_model, 0.0
    projection, feed_forward = 2 * width**2, 4 * width * model.d_ff
    for batch, _ in dealt.shares:
        src_B, tgt_B = batch.src_keep_BS.sum(1).double(), batch.tgt_keep_BT.sum(1).double()
        src, tgt = float(src_B.sum()), float(tgt_B.sum())
        of_self = [float((own**2).sum()) for own in (src_B, tgt_B)]
        encoder = (4 * projection + feed_forward) * src + 4 * width * of_self[0]
        decoder = (6 * projection + feed_forward) * tgt + 2 * projection * src
        decoder += 4 * width * (of_self[1] + float((src_B * tgt_B).sum()))
        total += model.num_encoder_layers * encoder + model.num_decoder_layers * decoder
        total += 2 * width * num_pieces * tgt
    return 3 * total


def matrix_rate(trainer: Trainer) -> float:
    """Return the operations a second of the best of several products of two square matrices."""
    device = trainer.device
    size = 8192 if device.type == "cuda" else 2048
    left, right = (torch.randn(size, size).to(device, trainer.compute_dtype) for _ in range(2))
    out, times = torch.empty_like(left), []
    for _ in range(_PRODUCTS):
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)


def idle_share(trainer: Trainer, updates: Iterator[Dealt], count: int) -> float | None:
    """Return how much of the time nothing runs on a GPU; None where there is none."""
    if trainer.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        speed = make(trainer, updates, count)
    busy_us = sum(event.self_device_time_total for event in profiled.key_averages())
    return max(0.0, 1 - busy_us / 1e6 / speed.seconds)


if __name__ == "__main__":
    main()
