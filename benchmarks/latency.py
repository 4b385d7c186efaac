"""Measure the start of mtrain, the seconds of one sentence, and the memory of a long input.

    python benchmarks/latency.py RUN [--lines 1000000]

The input of `--lines` lines repeats the run's first test set; mtrain reads it from a pipe.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from machine import commit, describe_machine, peak_bytes

from mtrain.data import prepare
from mtrain.decode.options import DecodingOptions
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.translator import load
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_settings import own_process

_REPEATS = 11
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--lines", type=int, default=0, help="of a long input; 0 leaves it out")
    parser.add_argument("--beam", type=int, default=5)
    options = parser.parse_args()
    run = RunDir(options.run)
    name = next(iter(run.config.data.tests))
    lines = prepare.read_test(run, name).src
    print(f"{describe_machine()}, commit {commit()}, beam {options.beam}, test set {name}")
    starts = [measure_start(options, lines[0]) for _ in range(_REPEATS)]
    for index, what in enumerate(("from start to the first line", "from start to the end")):
        say(what, [seconds[index] for seconds in starts], "s", 1)
    short = min(lines, key=lambda line: abs(len(line.split()) - 8))
    say("one sentence of eight words", measure_sentence(run, options.beam, short), "ms", 1000)
    if options.lines:
        seconds, mib = measure_long(options, lines)
        rate = options.lines / seconds
        print(f"{options.lines:,} lines: {rate:,.0f} lines/s, peak memory {mib:,.0f} MiB")


def say(what: str, seconds: list[float], unit: str, factor: float) -> None:
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    print(f"{what}: {middle * factor:.2f} {unit} ({low * factor:.2f} to {high * factor:.2f})")


def command(options: argparse.Namespace) -> list[str]:
    arguments = [str(options.run), "--beam", str(options.beam)]
    return [sys.executable, "-m", "mtrain", "translate", *arguments]


def measure_start(options: argparse.Namespace, line: str) -> tuple[float, float]:
    """Return the seconds from starting the command to its answer to one line, and to its end.

    Bytecode is kept, as after an installation, whatever the environment says.
    """
    environment = {name: value for name, value in os.environ.items() if name != _NO_BYTECODE}
    began = time.perf_counter()
    with subprocess.Popen(
        command(options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        seconds = time.perf_counter() - began
        process.stdin.close()
        process.wait()
    return seconds, time.perf_counter() - began


def measure_sentence(run: RunDir, beam: int, line: str) -> list[float]:
    """Return the seconds of each translation of a sentence by a model that is loaded."""
    options = replace(DecodingOptions.from_config(run.config), beam=beam, with_scores=False)
    own_process()
    translator = load(run, options)
    translate_lines(translator, [line])
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        translate_lines(translator, [line])
        seconds.append(time.perf_counter() - began)
    return seconds


def measure_long(options: argparse.Namespace, lines: list[str]) -> tuple[float, float]:
    """Return the seconds and the peak memory in MiB of translating a long input from a pipe."""
    began = time.perf_counter()
    with subprocess.Popen(
        command(options), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        writer = threading.Thread(target=feed, args=(process, lines, options.lines))
        writer.start()
        assert process.stdout is not None
        count = sum(1 for _ in process.stdout)
        writer.join()
        peak = peak_bytes(process)
    assert count == options.lines, f"{count:,} lines came out"
    return time.perf_counter() - began, peak / 2**20


def feed(process: subprocess.Popen[bytes], lines: list[str], count: int) -> None:
    """Write `count` lines to a process, and close its input."""
    assert process.stdin is not None
    with process.stdin as stream:
        for number in range(count):
            stream.write(lines[number % len(lines)].encode() + b"\n")


if __name__ == "__main__":
    main()
