"""Measure single lines from many threads: speed, memory, and the seconds to the first line.

    python benchmarks/concurrency.py RUN [--threads 1,2,8,32] [--memory 1000,100000]

Each system is a process that stays loaded on the same cores, mtrain with as many threads of PyTorch
as there are cores, CTranslate2 in float32 with a translator of one thread for each core. Client
threads take lines of the run's first test set in turn, each one line at a time, text to text. The
systems are measured in turn, and what counts is the median of the ratios of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from machine import commit, describe_machine, resident_mib
from worker import Worker

_REPEATS = 11
_IMPORT = "import time; t = time.perf_counter(); import mtrain; print(time.perf_counter() - t)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--threads", default="1,2,8,32", help="numbers of client threads")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--systems", default="mtrain,ctranslate2")
    parser.add_argument("--memory", default="", help="numbers of lines after which to look at it")
    parser.add_argument("--export", type=Path, help="of RUN for CTranslate2; made if absent")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    if options.worker:
        serve(options)
        return
    print(f"{describe_machine()}, cores {options.cores}, commit {commit()}, beam {options.beam}")
    command = [sys.executable, "-c", _IMPORT]
    imports = [float(subprocess.check_output(command)) for _ in range(_REPEATS)]
    print(f"import mtrain: {1000 * statistics.median(imports):.1f} ms, {spread(imports, 1000)}")
    with TemporaryDirectory() as directory:
        if options.export is None and "ctranslate2" in options.systems:
            import mtrain

            options.export = Path(directory) / "export"
            mtrain.export(options.run, options.export, "ctranslate2")
        systems = {name: started(options, name) for name in options.systems.split(",")}
        for name, worker in systems.items():
            load_s, first_s = worker.loaded
            print(f"{name}: loaded in {load_s:.2f} s, first line {first_s:.3f} s")
        for num_threads in map(int, options.threads.split(",")):
            compare(systems, num_threads, options)
        before = 0
        for num_lines in [int(number) for number in options.memory.split(",") if number]:
            systems["mtrain"].ask([8, num_lines - before, None])
            rss_mib = resident_mib(systems["mtrain"].process.pid)
            before = num_lines
            print(f"memory after {num_lines:,} lines of 8 threads: {rss_mib:,.0f} MiB", flush=True)
        for worker in systems.values():
            worker.close()


def spread(values: list[float], factor: float) -> str:
    return f"{factor * min(values):.1f} to {factor * max(values):.1f}"


def compare(systems: dict[str, Worker], num_threads: int, options: argparse.Namespace) -> None:
    """Print the lines a second of each system, and the ratio of the first to the second."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(options.rounds):
        for name, worker in systems.items():
            (rate,) = worker.ask([num_threads, None, options.seconds])
            rates[name].append(rate)
    text = f"{num_threads} threads:"
    for name, values in rates.items():
        text += f"  {name} {statistics.median(values):,.0f} lines/s ({spread(values, 1)})"
    if len(rates) == 2:
        ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
        text += f"  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(text, flush=True)


def started(options: argparse.Namespace, name: str) -> Worker:
    """Start a system in a process of its own.

    `loaded` holds the seconds until it was loaded, imports included, and those of the first line
    after that. A request names a number of threads, and of lines or seconds; the answer is the
    lines a second.
    """
    arguments = [options.run, "--beam", options.beam, "--cores", options.cores]
    return Worker(__file__, [*arguments, "--export", options.export or "", "--worker", name])


def serve(options: argparse.Namespace) -> None:
    """Load a system, and translate for each line at stdin."""
    began = time.perf_counter()
    translate = load_mtrain(options) if options.worker == "mtrain" else load_ctranslate2(options)
    loaded = time.perf_counter()
    lines = test_lines(options.run)
    before = time.perf_counter()
    translate(lines[0])
    print(json.dumps([loaded - began, time.perf_counter() - before]), flush=True)
    numbers = count()
    for request in sys.stdin:
        print(json.dumps([measure(translate, lines, numbers, *json.loads(request))]), flush=True)


def test_lines(path: Path) -> list[str]:
    from mtrain.data import prepare
    from mtrain.run.run_dir import RunDir

    run = RunDir(path)
    return prepare.read_test(run, next(iter(run.config.data.tests))).src


def measure(
    translate: Callable[[str], object],
    lines: list[str],
    numbers: count[int],
    num_threads: int,
    num_lines: int | None,
    seconds: float | None,
) -> float:
    """Return the lines a second of threads that translate a line after another."""
    began, first = time.perf_counter(), next(numbers)
    end = began + (seconds or 1e9)

    def client(_: int) -> int:
        num_done = 0
        while time.perf_counter() < end:
            number = next(numbers)  # one call, which no other thread can interrupt
            if num_lines is not None and number - first > num_lines:
                break
            translate(lines[number % len(lines)])
            num_done += 1
        return num_done

    with ThreadPoolExecutor(num_threads) as pool:
        total = sum(pool.map(client, range(num_threads)))
    return total / (time.perf_counter() - began)


def load_mtrain(options: argparse.Namespace) -> Callable[[str], object]:
    import mtrain
    from mtrain.io.lines import ignore

    model = mtrain.load(options.run, beam=options.beam, device="cpu")
    return lambda line: model.translate([line], on_warning=ignore)


def load_ctranslate2(options: argparse.Namespace) -> Callable[[str], object]:
    import ctranslate2
    from sentencepiece import SentencePieceProcessor

    num_cores = len(options.cores.split(","))
    translator = ctranslate2.Translator(
        str(options.export),
        device="cpu",
        compute_type="float32",
        inter_threads=num_cores,
        intra_threads=1,
    )
    source, target = (
        SentencePieceProcessor(model_file=str(options.export / name))
        for name in ("source.spm", "target.spm")
    )

    def translate(line: str) -> object:
        (result,) = translator.translate_batch(
            [source.encode(line, out_type=str)],
            max_batch_size=32,
            beam_size=options.beam,
            length_penalty=0.6,
            max_input_length=0,
        )
        return target.decode(result.hypotheses[0])

    return translate


if __name__ == "__main__":
    main()
