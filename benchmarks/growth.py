"""Measure how the cost of training grows with the batch, the sentence, the model, the vocabulary.

Each point is a process of its own, on one thread, that makes whole updates (forward, backward,
Adam) of random sentences of one length, so that no place is padding.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from machine import commit, describe_machine
from report import print_table, say

SIZES = {  # d_model, d_ff, heads, layers on either side
    "tiny": (128, 256, 4, 4),
    "small": (256, 1024, 4, 3),
    "base": (512, 2048, 8, 6),
    "big": (1024, 4096, 16, 6),
}
MIN_UPDATES = 3


@dataclass(frozen=True)
class Point:
    """What is trained: a model, its vocabulary, and batches of sentences of one length."""

    model: str = "tiny"
    vocabulary: int = 8000
    length: int = 16
    batch_tokens: int = 4096


@dataclass(frozen=True)
class Cost:
    """Target tokens a second, and the process's peak memory."""

    tokens_per_s: float
    peak_mib: float


POINT = Point()
AXES = {
    "batch_tokens": [replace(POINT, batch_tokens=2**power) for power in range(8, 15)],
    "length": [replace(POINT, length=2**power) for power in range(4, 11)],
    "vocabulary": [replace(POINT, vocabulary=1000 * 2**power) for power in range(1, 7)],
    "model": [replace(POINT, model=name, batch_tokens=2048) for name in SIZES],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured for each point")
    parser.add_argument("--picture", type=Path, help="draw the costs, as PNG")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(asdict(train(Point(**json.loads(options.point)), options.seconds))))
        return
    print(f"{datetime.date.today()}  {describe_machine()}  commit {commit()}, one thread")
    costs = {axis: [measure(own, options.seconds) for own in AXES[axis]] for axis in AXES}
    for axis, own in costs.items():
        rows = [[axis, "target tokens/s", "peak MiB"]]
        for point, cost in zip(AXES[axis], own, strict=True):
            value = f"{getattr(point, axis)}"
            rows.append([value, f"{cost.tokens_per_s:,.0f}", f"{cost.peak_mib:,.0f}"])
        print()
        print_table(rows, is_markdown=True)
    if options.picture:
        draw(costs, options.picture)


def measure(point: Point, seconds: float) -> Cost:
    """Train in a process of its own, on one thread."""
    arguments = ["--point", json.dumps(asdict(point)), "--seconds", str(seconds)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    cost = Cost(**json.loads(done.stdout))
    say(f"{point}: {cost.tokens_per_s:,.0f} tokens/s, {cost.peak_mib:,.0f} MiB")
    return cost


def train(point: Point, seconds: float) -> Cost:
    """Make updates for some seconds, after one that does not count; take the median update."""
    import torch

    from mtrain.config.sections import ModelConfig, TrainingConfig
    from mtrain.data.batch import collate
    from mtrain.model.transformer import Transformer
    from mtrain.runtime import device
    from mtrain.runtime.process_settings import own_process
    from mtrain.training.loss import loss_of

    own_process()
    device.keep_freed_memory()
    torch.manual_seed(1)
    d_model, d_ff, num_heads, num_layers = SIZES[point.model]
    config = ModelConfig(
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        num_encoder_layers=num_layers,
        num_decoder_layers=num_layers,
    )
    model = Transformer(config, point.vocabulary, point.vocabulary)
    training = TrainingConfig()
    model.compute_dtype = device.compute_dtype("auto", torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = max(1, point.batch_tokens // point.length)
    ids = torch.randint(4, point.vocabulary, (2, rows, point.length - 1)).tolist()
    batch = collate([[*row, 3] for row in ids[0]], ids[1], 0, 2, 3)
    took: list[float] = []
    started = time.monotonic()
    while len(took) < MIN_UPDATES + 1 or time.monotonic() - started < seconds:
        before = time.monotonic()
        sums = loss_of(model, batch, training)
        (sums.loss / batch.num_tgt_tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        took.append(time.monotonic() - before)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Cost(batch.num_tgt_tokens / median(took[1:]), peak_mib)


def shortened(value: int) -> str:
    """Write a power of two, or thousands, briefly."""
    return str(value) if value < 1000 else f"{value // (1000 if value % 1000 == 0 else 1024)}k"


def draw(costs: dict[str, list[Cost]], path: Path) -> None:
    """Draw speed and memory along each axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = {
        "batch_tokens": "target tokens a batch",
        "length": "tokens a sentence",
        "vocabulary": "pieces",
        "model": "model",
    }
    figure, panels = plt.subplots(2, len(AXES), figsize=(13, 5.5), sharex="col", sharey="row")
    for column, (axis, own) in enumerate(costs.items()):
        labels = [getattr(point, axis) for point in AXES[axis]]
        texts = [x if isinstance(x, str) else shortened(x) for x in labels]
        for row, values in enumerate(
            ([cost.tokens_per_s for cost in own], [cost.peak_mib for cost in own])
        ):
            panel = panels[row][column]
            panel.plot(range(len(values)), values, marker="o", color=("#1f4e79", "#9c2f2f")[row])
            panel.set_yscale("log")
            panel.grid(alpha=0.3)
        panels[1][column].set_xticks(range(len(texts)), texts)
        panels[1][column].set_xlabel(names[axis])
    panels[0][0].set_ylabel("target tokens a second")
    panels[1][0].set_ylabel("peak memory, MiB")
    figure.suptitle("What training costs, on one thread")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
