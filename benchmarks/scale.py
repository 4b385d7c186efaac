"""Measure tokenizing and the first updates on corpora of growing size: speed, memory, waiting.

    python benchmarks/scale.py [--pairs 500000,1000000,5000000] [--threads 1] [--lines 200000]
    python benchmarks/scale.py --encoded     # the first updates alone, on pairs of random ids

The pairs are those of `check_scale.py`. The tokenizer is trained on a sample of `--lines` lines,
which is the same work at every size; its time is listed apart. SentencePiece's own speed is that of
its encoding of lists of 10,000 lines, both sides, on as many threads, without reading or writing.
The bytes a pair are what memory grew by from one size to the next.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from check_scale import write
from machine import commit, describe_machine, peak_bytes

from mtrain.data import arrow_shards
from mtrain.data.arrow_shards import SHARD_PAIRS, CorpusEntry, EncodedBlock, Manifest, Shard
from mtrain.data.batch import Position
from mtrain.data.loader import TrainingData
from mtrain.io.lines import read_lines
from mtrain.tokenizer import sentencepiece

BLOCK_LINES = 10_000
BATCH_TOKENS = 4096
TRAINING = {  # a small model: what is measured is how the data comes
    "max_steps": 100,
    "batch_tokens": BATCH_TOKENS,
    "device": "cpu",
    "log_every": 1,
    "validate_every": 1000,
    "warmup_steps": 100,
}
MODEL = {"d_model": 64, "d_ff": 128, "num_encoder_layers": 1, "num_decoder_layers": 1}


class Measured(NamedTuple):
    """Seconds from start to end, peak resident memory, and each printed line with its time."""

    seconds: float
    peak_bytes: int
    said: list[tuple[float, str]]

    def at(self, pattern: str) -> float:
        """Return the time of the first printed line that matches."""
        return next(when for when, line in self.said if re.search(pattern, line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", default="500000,1000000,5000000")
    parser.add_argument("--threads", type=int, default=1, help="cores that may be used")
    parser.add_argument("--lines", type=int, default=200_000, help="that the tokenizer learns from")
    parser.add_argument("--encoded", action="store_true", help="train on random pairs, no more")
    parser.add_argument("--dir", type=Path, default=None, help="for the corpora; deleted after")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    print(f"{describe_machine()}, {options.threads} in use, commit {commit()}")
    if options.encoded:
        train_on_random_pairs([*map(int, options.pairs.split(","))], options.dir)
        return
    print(
        "| pairs | tokenizer trained | pairs/s encoded | share of SentencePiece's "
        "| pairs/s, all of it | memory | disk | first update after | 100 updates, memory |"
    )
    print("| --: | --: | --: | --: | --: | --: | --: | --: | --: |")
    before: tuple[int, int, int] | None = None
    for num_pairs in map(int, options.pairs.split(",")):
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            write(Path(name), num_pairs)
            now = measure(Path(name), num_pairs, options)
        if before is not None:
            growth = [(a - b) / (now[0] - before[0]) for a, b in zip(now, before, strict=True)]
            print(f"growth: {growth[1]:.1f} and {growth[2]:.1f} bytes a pair", flush=True)
        before = now


def measure(directory: Path, num_pairs: int, options: argparse.Namespace) -> tuple[int, int, int]:
    """Tokenize and train; print a row, return the pairs and both peaks."""
    settings = [f"tokenizer.max_training_lines={options.lines}", "tokenizer.vocab_size=4000"]
    tokenizing = run("tokenize", directory, settings)
    settings += [f"training.{key}={value}" for key, value in TRAINING.items()]
    settings += [f"model.{key}={value}" for key, value in MODEL.items()]
    training = run("train", directory, settings)
    data = directory / "run" / "data"
    encode_s = tokenizing.seconds - tokenizing.at("^tokenizer: unigram")
    encoded, plain = num_pairs / encode_s, sentencepiece_speed(directory, options.threads)
    print(
        f"| {num_pairs:,} | {tokenizing.at('^tokenizer: unigram'):,.0f} s | {encoded:,.0f} "
        f"| {encoded / plain:.0%} of {plain:,.0f} | {num_pairs / tokenizing.seconds:,.0f} "
        f"| {tokenizing.peak_bytes / 2**20:,.0f} MiB "
        f"| {sum(own.stat().st_size for own in data.glob('*')) / 1e6:,.0f} MB "
        f"| {training.at('^step 1,'):.1f} s | {training.peak_bytes / 2**20:,.0f} MiB |",
        flush=True,
    )
    return num_pairs, tokenizing.peak_bytes, training.peak_bytes


def train_on_random_pairs(sizes: list[int], parent: Path | None) -> None:
    """Train on tables of random ids, of 15 to 44 tokens a side; print a row for each size."""
    print("| pairs | tables | opening to the first batch | first update after | memory |")
    print("| --: | --: | --: | --: | --: |")
    settings = [f"training.{key}={value}" for key, value in TRAINING.items()]
    settings += [f"model.{key}={value}" for key, value in MODEL.items()]
    settings += ["tokenizer.vocab_size=1000"]
    for num_pairs in sizes:
        with tempfile.TemporaryDirectory(dir=parent) as name:
            write(Path(name), 5000)
            run("tokenize", Path(name), settings)
            tables = write_random_pairs(Path(name) / "run" / "data", num_pairs)
            opening_s = first_batch(Path(name) / "run")
            training = run("train", Path(name), settings)
        print(
            f"| {num_pairs:,} | {tables / 1e6:,.0f} MB | {opening_s:.2f} s "
            f"| {training.at('^step 1,'):.1f} s | {training.peak_bytes / 2**20:,.0f} MiB |",
            flush=True,
        )


def write_random_pairs(directory: Path, num_pairs: int) -> int:
    """Put tables of random ids in the place of those of a run; return their bytes."""
    rng, entries, longer = np.random.default_rng(1), [], np.zeros(64, np.int64)
    for path in [*directory.glob("*.arrow"), directory / "checksums.json"]:
        path.unlink()
    for number, first in enumerate(range(0, num_pairs, SHARD_PAIRS)):
        count = min(SHARD_PAIRS, num_pairs - first)
        src, tgt = (rng.integers(15, 45, count, dtype=np.int32) for _ in range(2))
        src_ids = rng.integers(4, 900, int(src.sum()), dtype=np.int32)
        tgt_ids = rng.integers(4, 900, int(tgt.sum()) - count, dtype=np.int32)
        path = arrow_shards.shard_path(directory, number)
        arrow_shards.write_blocks(path, [EncodedBlock(src_ids, tgt_ids, src, tgt)], with_text=False)
        entries.append(Shard(0, count, int(src.sum()), int(tgt.sum())))
        longer += np.bincount(np.maximum(src, tgt), minlength=64)
    mixed = CorpusEntry("data.train", 1.0, longer.tolist())
    arrow_shards.write_manifest(directory, Manifest([mixed], entries))
    return sum(path.stat().st_size for path in directory.glob("*.arrow"))


def first_batch(directory: Path) -> float:
    """Return the seconds from opening encoded pairs to the first batch, with what comes between."""
    vocabulary = sentencepiece.load(directory / "tokenizer")
    began = time.perf_counter()
    data = TrainingData(directory / "data", vocabulary, 1)
    data.plan(BATCH_TOKENS)
    data.largest(BATCH_TOKENS)
    next(data.batches(BATCH_TOKENS, Position()))
    return time.perf_counter() - began


def run(verb: str, directory: Path, settings: list[str]) -> Measured:
    """Run the command line in a process of its own, and note the time of each line it prints."""
    command = [sys.executable, "-m", "mtrain", verb, str(directory / "config.yaml")]
    command += [word for setting in settings for word in ("--set", setting)]
    began, said = time.perf_counter(), []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append((time.perf_counter() - began, line.rstrip("\n")))
        peak = peak_bytes(process)
    return Measured(time.perf_counter() - began, peak, said)


def sentencepiece_speed(directory: Path, num_threads: int, num_lines: int = 100_000) -> float:
    """Return how many pairs a second SentencePiece encodes of lists: the median of three passes."""
    sides = [list(islice(read_lines(directory / f"train.{s}"), num_lines)) for s in ("en", "de")]
    vocabulary = sentencepiece.load(directory / "run" / "tokenizer")
    speeds = []
    for _ in range(3):
        began = time.perf_counter()
        for first in range(0, len(sides[0]), BLOCK_LINES):
            for lines, side in zip(sides, (vocabulary.src, vocabulary.tgt), strict=True):
                part = lines[first : first + BLOCK_LINES]
                side._processor.encode(part, num_threads=num_threads)
        speeds.append(len(sides[0]) / (time.perf_counter() - began))
    return statistics.median(speeds)


if __name__ == "__main__":
    main()
