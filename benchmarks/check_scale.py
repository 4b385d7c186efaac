"""Measure how fast `mtrain check` audits corpora of growing size, and how much memory it takes.

    python benchmarks/check_scale.py [--pairs 500000,1000000,5000000]

The pairs are made of two sentences of the demo corpus each and a number, so that almost none is
repeated; every hundredth is, and every thousandth has a blank side. The bytes a pair that are
printed are what memory grew by from one size to the next.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from machine import commit, describe_machine, peak_bytes

DEMO = Path(__file__).parent.parent / "data" / "demo"


class Measured(NamedTuple):
    """Seconds from start to end, the peak of resident memory, and what the lists take on disk."""

    seconds: float
    peak_bytes: int
    list_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", default="500000,1000000,5000000")
    parser.add_argument("--dir", type=Path, default=None, help="for the corpora; deleted after")
    options = parser.parse_args()
    print(f"{describe_machine()}, commit {commit()}")
    print("| pairs | text | seconds | pairs/s | peak memory | growth | lists |")
    print("| --: | --: | --: | --: | --: | --: | --: |")
    before: tuple[int, int] | None = None
    for num_pairs in map(int, options.pairs.split(",")):
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            text_bytes = write(Path(name), num_pairs)
            measured = measure(Path(name))
        growth = "" if before is None else f"{_growth(before, num_pairs, measured):.1f} bytes/pair"
        before = (num_pairs, measured.peak_bytes)
        print(
            f"| {num_pairs:,} | {text_bytes / 1e6:,.0f} MB | {measured.seconds:.1f} "
            f"| {num_pairs / measured.seconds:,.0f} | {measured.peak_bytes / 2**20:,.0f} MiB "
            f"| {growth} | {measured.list_bytes / 1e6:.1f} MB |",
            flush=True,
        )


def _growth(before: tuple[int, int], num_pairs: int, measured: Measured) -> float:
    return (measured.peak_bytes - before[1]) / (num_pairs - before[0])


def write(directory: Path, num_pairs: int) -> int:
    """Write a corpus and its config; return the bytes of the text."""
    rng = random.Random(num_pairs)
    sides = [(DEMO / f"train.{side}").read_text("utf-8").split("\n")[:-1] for side in ("en", "de")]
    paths = [directory / "train.en", directory / "train.de"]
    with paths[0].open("w", encoding="utf-8") as src, paths[1].open("w", encoding="utf-8") as tgt:
        for number, (first, second) in enumerate(choices(rng, len(sides[0]), num_pairs)):
            src.write(f"{sides[0][first]} {number - number % 100 // 99}, {sides[0][second]}\n")
            is_blank = number % 1000 == 500
            text = f"{sides[1][first]} {number - number % 100 // 99}, {sides[1][second]}"
            tgt.write("\n" if is_blank else f"{text}\n")
    tree = {
        "run_dir": str(directory / "run"),
        "data": {
            "src_lang": "en",
            "tgt_lang": "de",
            "train": {"src": [str(paths[0])], "tgt": [str(paths[1])]},
            "valid": {"src": [str(DEMO / "valid.en")], "tgt": [str(DEMO / "valid.de")]},
            "tests": {"demo": {"src": [str(DEMO / "test.en")], "tgt": [str(DEMO / "test.de")]}},
        },
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return sum(path.stat().st_size for path in paths)


def choices(rng: random.Random, num_lines: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield two lines for each pair; the last of each hundred has those of the one before."""
    pair = (0, 0)
    for number in range(count):
        if number % 100 != 99:
            pair = (rng.randrange(num_lines), rng.randrange(num_lines))
        yield pair


def measure(directory: Path) -> Measured:
    command = [sys.executable, "-m", "mtrain", "check", str(directory / "config.yaml")]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peak = peak_bytes(process)
    seconds = time.perf_counter() - began
    lists = sum(path.stat().st_size for path in (directory / "run" / "check").iterdir())
    return Measured(seconds, peak, lists)


if __name__ == "__main__":
    main()
