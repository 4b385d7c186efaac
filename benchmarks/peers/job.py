"""What every worker of train_speed.py shares: the job that it is given, and its stopwatch.

Like worker.py, this file imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.worker import (
    EOS,
    NUM_SPECIAL,
    decode_batches,
    keep_stdout,
    max_rss_mib,
    sort_batches,
    until_eos,
)

_MIN_UPDATES = 20  # of the warm-up
VALID_MAX_TOKENS = 100  # of an output of the validation text
_VALID_SENTENCES = 64  # of a batch of it
_NUM_LOSSES = 10  # updates whose mean loss is reported, at the start and at the end


@dataclass(frozen=True)
class Job:
    """What to train, on which corpus and for how long."""

    corpus: str
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    vocab_size: int
    dropout: float
    label_smoothing: float
    batch_tokens: int
    lr: float
    warmup_steps: int
    adam_betas: tuple[float, float]
    max_grad_norm: float
    precision: str
    threads: int
    seconds: float
    warm_up_s: float
    overrides: tuple[str, ...]  # mtrain's --set
    decay_steps: int = 0  # updates over which the rate falls to 0; 0: inverse square root
    validate_every: int = 0  # updates, of a curve

    @property
    def num_pairs(self) -> int:
        """The pairs of an epoch."""
        counts = json.loads((Path(self.corpus) / "counts.json").read_text("utf-8"))
        return int(counts["pairs"])

    def read_ids(self, name: str) -> list[list[int]]:
        """Return the ids of each line of a file of the corpus, without bos and eos."""
        with (Path(self.corpus) / name).open(encoding="utf-8") as stream:
            return [[int(word) for word in line.split()] for line in stream]


@dataclass
class Epoch:
    """What a system reads in one epoch: target tokens are pieces and eos, without padding."""

    pairs: int = 0
    src_tokens: int = 0
    tgt_tokens: int = 0
    id_sum: int = 0  # over the ids of all pieces, both sides: are they the same ones?
    cells: int = 0  # both sides, padding included
    batches: int = 0

    def add(self, rows: int, src: list[int], tgt: list[int], width: int) -> None:
        """Count a batch of `rows` pairs, given the ids of each side without padding and bos."""
        self.pairs += rows
        self.src_tokens += len(src)
        self.tgt_tokens += len(tgt)
        self.id_sum += sum(index for index in (*src, *tgt) if index >= NUM_SPECIAL)
        self.cells += rows * width
        self.batches += 1


class Done(Exception):  # noqa: N818 - nothing went wrong
    """The time of a measurement is over."""


class Meter:
    """Times a training from within: it is told of each batch that is about to be trained on.

    When a batch begins, all batches before it have gone through forward pass, backward pass and
    optimizer. A measurement goes from the beginning of one batch to the beginning of another,
    so that it holds as many fetched batches as trained ones.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._first: float | None = None
        self._started: float | None = None
        self._cpu_s = self._seconds = self._max_rss_mib = 0.0
        self._num_updates = self._tgt_tokens = self._num_measured = 0
        self._losses: list[float] = []

    def begin(self, tgt_tokens: int) -> None:
        """Note that training on `tgt_tokens` begins now.

        Raises:
            Done: if the time is over; the batch is not counted.
        """
        now = time.monotonic()
        self._first = self._first or now
        is_warm = self._num_updates >= _MIN_UPDATES and now - self._first >= self._job.warm_up_s
        if self._started is None and is_warm:
            self._started, self._cpu_s = now, time.process_time()
        elif self._started is not None and now - self._started >= self._job.seconds:
            self._seconds, self._cpu_s = now - self._started, time.process_time() - self._cpu_s
            self._max_rss_mib = max_rss_mib()
            raise Done
        self._num_updates += 1
        if self._started is not None:
            self._tgt_tokens += tgt_tokens
            self._num_measured += 1

    def note_loss(self, loss: float, num_updates: int = 1) -> None:
        """Note the mean loss per target token of some updates, as the system defines it."""
        self._losses += [loss] * num_updates

    def result(self, versions: dict[str, str]) -> dict[str, object]:
        """Return the measurement as the worker prints it."""
        first, last = self._losses[:_NUM_LOSSES], self._losses[-_NUM_LOSSES:]
        return {
            "tgt_tokens": self._tgt_tokens,
            "seconds": round(self._seconds, 3),
            "max_rss_mib": round(self._max_rss_mib),
            "loss": round(sum(last) / len(last), 4),
            "first_loss": round(sum(first) / len(first), 4),
            "updates": self._num_measured,
            "all_updates": self._num_updates,
            "cores": round(self._cpu_s / self._seconds, 2),
            "versions": versions,
        }


class CurveMeter(Meter):
    """A training that is interrupted again and again to translate the validation text.

    It begins when a line comes to stdin. At each point it prints the seconds of training so far and
    the translations, ids or text, and waits for the next line; at the end of stdin it ends. The
    clock is stopped meanwhile.

    Attributes:
        translate: returns the translations by the current weights; the system sets it.
    """

    translate: Callable[[], list[Any]]

    def __init__(self, job: Job, print_answer: Callable[[str], None]) -> None:
        super().__init__(job)
        self._print_answer = print_answer
        self._began: float | None = None
        self._trained_s = 0.0

    def begin(self, tgt_tokens: int) -> None:
        """Stop the clock and show a point, if one is due.

        Raises:
            Done: if no more is wanted.
        """
        if self._began is not None:
            self._trained_s += time.monotonic() - self._began
        if self._num_updates % self._job.validate_every == 0:
            if self._num_updates:
                point = {"updates": self._num_updates, "seconds": round(self._trained_s, 3)}
                self._print_answer(json.dumps(point | {"outputs": self.translate()}))
            if not sys.stdin.readline():
                raise Done
        self._num_updates += 1
        self._began = time.monotonic()

    def note_loss(self, loss: float, num_updates: int = 1) -> None:
        """Do nothing: BLEU is what counts."""


def translate_valid(
    job: Job, decode: Callable[[list[list[int]]], list[list[int]]]
) -> list[list[int]]:
    """Return the output of each validation source, without eos and what follows it.

    Args:
        job: of the training.
        decode: returns the outputs of a batch of sources, which end in eos.
    """
    sources = [[*ids, EOS] for ids in job.read_ids("val.en")]

    def decode_rows(rows: list[int]) -> list[list[int]]:
        return [until_eos(ids) for ids in decode([sources[row] for row in rows])]

    return decode_batches(sort_batches(sources, _VALID_SENTENCES), decode_rows)


def serve(train: Callable[[Job, Meter], dict[str, str]], count: Callable[[Job], Epoch]) -> None:
    """Do the job that the command line names and print one JSON line.

    Args:
        train: trains until the meter raises `Done`; returns the versions of what it ran.
        count: reads one epoch without training on it.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--curve", action="store_true")
    options = parser.parse_args()
    tree = json.loads(options.job.read_text("utf-8"))
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()
    }
    job = Job(**fields)
    print_answer = keep_stdout()
    answer: dict[str, object]
    if options.count:
        answer = asdict(count(job))
    elif options.curve:
        answer = {"versions": train(job, CurveMeter(job, print_answer))}
    else:
        meter = Meter(job)
        answer = meter.result(train(job, meter))
    print_answer(json.dumps(answer))
