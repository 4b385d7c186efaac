"""Measure exports: seconds to write, sizes, and sentences a second compared with mtrain.

    python benchmarks/exports.py RUN [--to ctranslate2,marian] [--lines 500] [--rounds 3]

Each system is a process that stays loaded, on one core with one thread. It translates the first
lines of the run's first test set from text to text, by greedy search and with the beam of the run:
the libraries rank hypotheses by log-probability alone, mtrain with its length penalty. The start is
not counted for libraries that start a program for each call (Marian, Argos Translate, node): the
seconds of one line are subtracted from those of all. Argos Translate has no greedy search.

The graphs of an ONNX export are run by ONNX Runtime with mtrain's search, in float32 and in 8 bits;
by transformers.js under node, if NODE_PATH names its folder, one line at a time; and by the page in
Chromium, if that is installed, timed from the input of the text to the last line.

The systems take turns, and what counts is the median of the ratios of a round. The megabytes are
those of the files that a system loads. Libraries that are not installed, or do not support the
model, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from machine import commit, describe_machine
from worker import Worker

if TYPE_CHECKING:
    from mtrain.exporters.exporter import ExportedModel
    from mtrain.exporters.registry import Library

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # for the browser
Search = Callable[[Sequence[str]], float]  # translates lines; returns the seconds
ONNX_SYSTEMS = [  # that run an ONNX export
    "onnx",
    "onnx, 8 bits",
    "transformers.js",
    "transformers.js, 8 bits",
    "page, 8 bits",
]
# Put a text into the page; return the seconds until all its lines are translated.
TRANSLATE = """\
async (text) => {
  const [source, output] = ["source", "output"].map((id) => document.getElementById(id));
  const count = text.split("\\n").length;
  const began = performance.now();
  source.value = text;
  source.dispatchEvent(new Event("input"));
  const isDone = () =>
    output.textContent && !message.textContent && output.textContent.split("\\n").length === count;
  while (!isDone()) await new Promise((resume) => setTimeout(resume, 20));
  return (performance.now() - began) / 1000;
}"""


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
    from mtrain.errors import ConfigError
    from mtrain.exporters.registry import exporters

    wanted = options.to.split(",") if options.to else list(exporters())
    libraries: list[Library] = [name for name in exporters() if name in wanted]
    print(f"{describe_machine()}, core {options.core}, commit {commit()}, {options.lines} lines")
    with TemporaryDirectory() as directory:
        workers = {"mtrain": started(options, "mtrain", options.run)}
        written = {"mtrain": ["", f"{size_mb([options.run / 'model.safetensors']):,.1f}"]}
        files = list[tuple[str, float]]()
        for library in libraries:
            package = exporters()[library].PACKAGE
            if find_spec(package) is None:
                print(f"{library}: {package} is not installed")
                continue
            try:
                path, seconds = write(options.run, library, Path(directory))
            except ConfigError as error:  # such as a variant of the model that it does not have
                print(f"{library}: {error}")
                continue
            for system, loaded in systems(library, path).items():
                export_s = f"{seconds:,.1f}" if system == library else ""
                written[system] = [export_s, f"{size_mb(loaded):,.1f}"]
                workers[system] = started(options, system, path)
            files += [(f"{library}: {file.name}", size_mb([file])) for file in files_of(path)]
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
    print("\n| file | MB |\n| --- | --: |")
    for file, mb in files:
        if mb >= 0.05:
            print(f"| {file} | {mb:,.1f} |")


def write(run: Path, library: Library, directory: Path) -> tuple[Path, float]:
    """Export a run; return where, and the seconds of writing and verifying."""
    import mtrain
    from mtrain.exporters.registry import exporters

    archive = exporters()[library].ARCHIVE
    path = directory / (library if archive is None else f"{library}{archive.suffix}")
    began = time.perf_counter()
    mtrain.export(run, path, library, page=library == "onnx")
    return path, time.perf_counter() - began


def systems(library: Library, path: Path) -> dict[str, list[Path]]:
    """Return what can run an export, and the files of it."""
    if library != "onnx":
        return {library: files_of(path)}
    from mtrain.exporters.onnx import OnnxModel

    num_systems = 2
    try:
        OnnxModel(path).translate(["a"], "fp32")
    except LookupError as error:
        print(f"transformers.js: {error}")
    else:
        num_systems += 2
        if find_spec("playwright") is None or shutil.which("chromium") is None:
            print("page: chromium or playwright is not installed")
        else:
            from browsing import copy_library

            copy_library(path)
            num_systems += 1
    return {name: onnx_files(path, name) for name in ONNX_SYSTEMS[:num_systems]}


def onnx_files(path: Path, system: str) -> list[Path]:
    """Return what a system loads: graphs of its precision and settings, and a page itself."""
    has_8_bits, is_page = system.endswith("8 bits"), system.startswith("page")
    return [
        file
        for file in files_of(path)
        if (
            file.stem.endswith("_quantized") == has_8_bits
            if file.suffix == ".onnx"
            else file.suffix == ".json" or is_page
        )
    ]


def files_of(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]


def size_mb(files: Sequence[Path]) -> float:
    return sum(file.stat().st_size for file in files) / 1e6


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
    with ExitStack() as stack:
        if name == "mtrain":
            searches = of_mtrain(run)
        elif name.startswith("page"):
            searches = of_page(Path(path), stack)
        elif name in ONNX_SYSTEMS:
            searches = of_onnx(run, name, Path(path))
        else:
            searches = of_export(run, name, Path(path))
        for search in searches.values():
            search(lines[:20])
        print(json.dumps("loaded"), flush=True)
        for request in sys.stdin:
            rate = None
            if wanted := searches.get(json.loads(request)):
                rate = (len(lines) - 1) / (wanted(lines) - wanted(lines[:1]))
            print(json.dumps(rate), flush=True)


def timed(translate: Callable[[Sequence[str]], object]) -> Search:
    def search(lines: Sequence[str]) -> float:
        began = time.perf_counter()
        translate(lines)
        return time.perf_counter() - began

    return search


def of_mtrain(run: Any) -> dict[str, Search]:
    import mtrain
    from mtrain.io.lines import ignore

    beam = run.config.decoding.beam
    greedy, searching = (mtrain.load(run.path, beam=width, device="cpu") for width in (1, beam))
    return {
        "greedy": timed(lambda lines: greedy.translate(lines, on_warning=ignore)),
        "beam": timed(lambda lines: searching.translate(lines, on_warning=ignore)),
    }


def of_export(run: Any, library: Library, path: Path) -> dict[str, Search]:
    from mtrain.exporters.argos import ArgosModel
    from mtrain.exporters.registry import exporters

    exporter = exporters()[library]
    if exporter.ARCHIVE is not None:
        import zipfile

        with zipfile.ZipFile(path) as archive:
            archive.extractall(path.with_suffix(""))
        (path,) = path.with_suffix("").iterdir()
    exported = exporter.load(path)
    if isinstance(exported, ArgosModel):
        is_installed = find_spec("argostranslate") is not None
        return {"beam": timed(exported.translate)} if is_installed else {}
    return of_search(run, exported)


def of_search(run: Any, exported: ExportedModel) -> dict[str, Search]:
    extra = run.config.decoding.max_extra_tokens

    def search(lines: Sequence[str], beam: int) -> list[str]:
        sources = exported.encode(lines)
        found = exported.search(sources, beam, [len(ids) + extra for ids in sources])
        return exported.decode([hypothesis.ids for hypothesis in found])

    return {
        "greedy": timed(lambda lines: search(lines, 1)),
        "beam": timed(lambda lines: search(lines, run.config.decoding.beam)),
    }


def of_onnx(run: Any, name: str, path: Path) -> dict[str, Search]:
    from mtrain.exporters.onnx import OnnxModel

    model, has_8_bits = OnnxModel(path), name.endswith("8 bits")
    if name.startswith("transformers.js"):
        dtype: Literal["fp32", "q8"] = "q8" if has_8_bits else "fp32"
        return {"greedy": timed(lambda lines: model.translate(lines, dtype))}
    exported = model.quantised if has_8_bits else model
    assert exported is not None
    return of_search(run, exported)


def of_page(path: Path, stack: ExitStack) -> dict[str, Search]:
    """Open the page; it is loaded anew for each text, because it keeps translated lines."""
    from browsing import launched, served, watched_page

    url = stack.enter_context(served(path))
    page = watched_page(stack.enter_context(contextmanager(launched)()), 1280, "light").page

    def search(lines: Sequence[str]) -> float:
        page.goto(url)
        page.wait_for_function("() => document.getElementById('message').textContent === ''")
        return float(page.evaluate(TRANSLATE, "\n".join(lines)))

    return {"greedy": search}


if __name__ == "__main__":
    main()
