"""What every worker of decode_speed.py shares: the job that it is given, and its stopwatch.

Like worker.py, this file imports nothing but the standard library.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from peers.worker import decode_batches, keep_stdout, max_rss_mib, sort_batches

Ids = list[list[int]]


@dataclass(frozen=True)
class Job:
    """What to translate, with which model, and how."""

    run: str  # mtrain's run folder
    num_encoder_layers: int
    num_decoder_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    vocab_size: int
    lines: list[str]
    sources: Ids  # the same lines as pieces, each with eos
    beam: int
    alpha: float
    batch_size: int  # sentences
    max_tokens: int  # of an output
    lengths: list[int]  # of the outputs of a model with random weights, eos included
    precision: str
    threads: int
    seconds: float  # of whole passes that are timed, at least; 0 for one pass without a stopwatch

    @property
    def weights_path(self) -> Path:
        """The weights of the trained model."""
        return Path(self.run) / "model.safetensors"


@dataclass(frozen=True)
class Loaded:
    """A system that is ready: `translate` makes one pass over all sentences of the job."""

    translate: Callable[[], list[Any]]
    versions: dict[str, str]


def in_batches(job: Job, decode: Callable[[list[int]], Ids]) -> Callable[[], Ids]:
    """Return a pass over the sources, sorted by length, a batch at a time; its outputs in order.

    `decode` gets the numbers of some sources, and returns their outputs.
    """
    return partial(decode_batches, sort_batches(job.sources, job.batch_size), decode)


def run_apart(prepare: Callable[[Job, str], None], job: Job, folder: str) -> None:
    """Let `prepare` write a model into a folder, in another process: its memory is not measured."""
    process = multiprocessing.get_context("spawn").Process(target=prepare, args=(job, folder))
    process.start()
    process.join()
    assert process.exitcode == 0, f"{prepare.__name__} failed"


def serve(load: Callable[[Job], Loaded]) -> None:
    """Do the job that the command line names and print one JSON line.

    After a pass that is not timed, passes are timed until the job's seconds are over; the median
    counts. Outputs are ids without eos, or text.
    """
    print_answer = keep_stdout()
    job = Job(**json.loads(Path(sys.argv[1]).read_text("utf-8")))
    loaded = load(job)
    outputs = loaded.translate()
    times: list[float] = []
    cpu_s = time.process_time()
    while sum(times) < job.seconds:
        started = time.monotonic()
        loaded.translate()
        times.append(time.monotonic() - started)
    cpu_s = time.process_time() - cpu_s
    answer = {
        "outputs": outputs,
        "seconds": median(times) if times else 0.0,
        "passes": len(times),
        "cores": cpu_s / sum(times) if times else 0.0,
        "max_rss_mib": round(max_rss_mib()),
        "versions": loaded.versions,
    }
    print_answer(json.dumps(answer))
