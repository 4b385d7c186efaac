"""Measure exports: seconds to write, size, and sentences a second beside mtrain.

    python benchmarks/exports.py RUN [--to ctranslate2,marian] [--lines 500] [--rounds 3]

Each system is a process that stays loaded, on one core with one thread. It translates the first
lines of the run's first test set from text to text, by greedy search and with the beam of the run:
by log-probability alone, and mtrain by its length penalty. A library that starts a program for each
call, as those for Marian and Argos Translate do, pays no start: the seconds of one line are
subtracted from those of all. Argos Translate has one search only, in the column of the beam. The
systems take turns, and what counts is the median of the ratios of a round. Libraries that are not
installed are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from machine import commit, describe_machine
from worker import Worker

if TYPE_CHECKING:
    from mtrain.exporters.registry import Library

Translate = Callable[[Sequence[str]], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", help="the libraries, comma-separated; all by default")
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.worker:
        serve(options)
        return
    from mtrain.exporters.registry import exporters

    wanted = options.to.split(",") if options.to else list(exporters())
    libraries: list[Library] = [name for name in exporters() if name in wanted]
    print(f"{describe_machine()}, core {options.core}, commit {commit()}, {options.lines} lines")
    with TemporaryDirectory() as directory:
        workers = {"mtrain": started(options, "mtrain", options.run)}
        written = {"mtrain": ["", f"{size_mb(options.run / 'model.safetensors'):,.1f}"]}
        for library in libraries:
            package = exporters()[library].PACKAGE
            if find_spec(package) is None:
                print(f"{library}: {package} is not installed")
                continue
            path, seconds = write(options.run, library, Path(directory))
            written[library] = [f"{seconds:,.1f}", f"{size_mb(path):,.1f}"]
            workers[library] = started(options, library, path)
        rates = compare(workers, options.rounds)
        for worker in workers.values():
            worker.close()
    print("| system | export, s | MB | greedy, sentences/s | beside | beam, sentences/s | beside |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name, cells in written.items():
        row = [name, *cells]
        for search in ("greedy", "beam"):
            row += cells_of(rates[search][name], rates[search]["mtrain"])
        print(f"| {' | '.join(row)} |")


def write(run: Path, library: Library, directory: Path) -> tuple[Path, float]:
    """Export a run; return where, and the seconds of writing and verifying."""
    import mtrain
    from mtrain.exporters.registry import exporters

    archive = exporters()[library].ARCHIVE
    path = directory / (library if archive is None else f"{library}{archive.suffix}")
    began = time.perf_counter()
    mtrain.export(run, path, library)
    return path, time.perf_counter() - began


def size_mb(path: Path) -> float:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def compare(workers: dict[str, Worker], rounds: int) -> dict[str, dict[str, list[float | None]]]:
    """Return the sentences a second of each search, system and round."""
    rates: dict[str, dict[str, list[float | None]]] = {
        search: {name: [] for name in workers} for search in ("greedy", "beam")
    }
    for _ in range(rounds):
        for search, of_search in rates.items():
            for name, worker in workers.items():
                of_search[name].append(worker.ask(search))
    return rates


def cells_of(rates: list[float | None], beside: list[float | None]) -> list[str]:
    """Return the median of a system, and that of its ratios to mtrain."""
    pairs = [(a, b) for a, b in zip(rates, beside, strict=True) if a is not None and b is not None]
    if not pairs:
        return ["", ""]
    ratios = [a / b for a, b in pairs]
    low, high = min(ratios), max(ratios)
    middle = statistics.median(ratios)
    return [
        f"{statistics.median(a for a, _ in pairs):,.0f}",
        f"{middle:.2f} ({low:.2f}-{high:.2f})",
    ]


def started(options: argparse.Namespace, name: str, path: Path) -> Worker:
    """Start a system in a process of its own."""
    arguments = [options.run, "--lines", options.lines, "--core", options.core]
    return Worker(__file__, [*arguments, "--worker", name, path])


def serve(options: argparse.Namespace) -> None:
    """Load a system, and translate for each line at stdin."""
    import torch

    from mtrain.data import prepare
    from mtrain.run.run_dir import RunDir

    torch.set_num_threads(1)
    run = RunDir(options.run)
    lines = prepare.read_test(run, next(iter(run.config.data.tests))).src[: options.lines]
    name, path = options.worker
    searches = of_mtrain(run) if name == "mtrain" else of_export(run, name, Path(path))
    for translate in searches.values():
        translate(lines[:20])
    print(json.dumps("loaded"), flush=True)
    for request in sys.stdin:
        translate = searches.get(json.loads(request))
        rate = None
        if translate is not None:
            rate = (len(lines) - 1) / (seconds(translate, lines) - seconds(translate, lines[:1]))
        print(json.dumps(rate), flush=True)


def seconds(translate: Translate, lines: Sequence[str]) -> float:
    began = time.perf_counter()
    translate(lines)
    return time.perf_counter() - began


def of_mtrain(run: Any) -> dict[str, Translate]:
    import mtrain

    beam = run.config.decoding.beam
    greedy, searching = (mtrain.load(run.path, beam=width, device="cpu") for width in (1, beam))
    return {
        "greedy": lambda lines: greedy.translate(lines, on_warning=str),
        "beam": lambda lines: searching.translate(lines, on_warning=str),
    }


def of_export(run: Any, library: Library, path: Path) -> dict[str, Translate]:
    from mtrain.exporters.argos import ArgosModel
    from mtrain.exporters.registry import exporters

    exporter = exporters()[library]
    if exporter.ARCHIVE is not None:
        import zipfile

        with zipfile.ZipFile(path) as archive:
            archive.extractall(path.with_suffix(""))
        (path,) = path.with_suffix("").iterdir()
    exported = exporter.load(path)
    extra = run.config.decoding.max_extra_tokens

    def search(lines: Sequence[str], beam: int) -> list[str]:
        sources = exported.encode(lines)
        found = exported.search(sources, beam, [len(ids) + extra for ids in sources])
        return exported.decode([hypothesis.ids for hypothesis in found])

    searches: dict[str, Translate] = {
        "greedy": lambda lines: search(lines, 1),
        "beam": lambda lines: search(lines, run.config.decoding.beam),
    }
    if isinstance(exported, ArgosModel):
        searches = {}
        if find_spec("argostranslate") is not None:
            searches["beam"] = exported.translate
    return searches


if __name__ == "__main__":
    main()
