"""Plant defects at known lines of clean text, and count what `mtrain check` finds of them.

    python benchmarks/check_quality.py [--seeds 10] [--corpus demo|multi30k] [--pairs 20000]

A table with a row for each list: how many lines were planted, how many are right of those that
were found (precision), and how many were found of those that were planted (recall).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from machine import commit, describe_machine

from mtrain.audit import misalignment
from mtrain.audit.audit import audit
from mtrain.audit.features import PairWindow, Records, measure
from mtrain.config import config_file

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from defects import (  # noqa: E402
    Planted,
    Tally,
    found_lines,
    plant,
    tally,
    without_found,
    write_planted,
)
from tasks import Pair  # noqa: E402

SHIFT_LENGTHS = (20, 40, 60, 100, 300, 1000)
NUM_SHIFTS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", choices=["demo", "multi30k"], default="demo")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=20_000)
    options = parser.parse_args()
    folder = REPOSITORY / "data" / options.corpus
    valid, test = ("valid", "test") if options.corpus == "demo" else ("val", "test_2016_flickr")
    pairs = read(folder / "train")[: options.pairs]
    held_out = read(folder / valid)[:250] + read(folder / test)[:250]
    print(f"{describe_machine()}, commit {commit()}, {options.corpus}, {len(pairs):,} pairs")
    clean = audited(Planted(pairs, held_out[:250], held_out[250:]))
    before = {name: len(lines) for name, lines in clean.items()}
    print(f"found before anything is planted, and left out: {before}")
    pairs = without_found(pairs, clean, "train")
    held_out = without_found(held_out[:250], clean, "valid") + without_found(
        held_out[250:], clean, "tests"
    )
    tallies: dict[str, Tally] = {}
    for seed in range(options.seeds):
        planted = plant(pairs, held_out, seed)
        tally(planted, audited(planted), tallies)
    print_table(tallies)
    print_shifts(pairs)


def audited(planted: Planted) -> dict[str, list[int]]:
    """Audit a corpus; return the lines of each list."""
    with tempfile.TemporaryDirectory() as name:
        config = config_file.load(write_planted(Path(name), planted))
        lists = Path(name) / "lists"
        lists.mkdir()
        audit(config, None, lists, lambda num_bytes: None)
        lines: dict[str, list[int]] = found_lines(lists)
        return lines


def read(stem: Path) -> list[Pair]:
    sides = (Path(f"{stem}.{side}").read_text("utf-8").split("\n")[:-1] for side in ("en", "de"))
    return [Pair(*lines) for lines in zip(*sides, strict=True)]


def print_table(tallies: dict[str, Tally]) -> None:
    print("| list | planted | found | precision | recall |")
    print("| --- | --: | --: | --: | --: |")
    for name, own in sorted(tallies.items()):
        row = f"| {name} | {own.planted} | {own.found} | {own.precision:.3f} | {own.recall:.3f} |"
        print(row)
    off = sorted(abs(lines) for lines in tallies["train.shift"].lines_off)
    if off:
        print(
            f"first line of a shift: median {statistics.median(off)} lines off, at most {off[-1]}"
        )


def print_shifts(pairs: list[Pair]) -> None:
    """Count how many shifts of each length are found, and how exactly."""
    src, tgt = (records([pair[side] for pair in pairs]) for side in (0, 1))
    print("| pairs in a shift | planted | found | elsewhere | lines off: median, most |")
    print("| --: | --: | --: | --: | --: |")
    for length in SHIFT_LENGTHS:
        rng, found, elsewhere, off = random.Random(length), 0, 0, []
        for _ in range(NUM_SHIFTS):
            begin, offset = (
                rng.randrange(100, len(pairs) - length - 100),
                rng.choice([-2, -1, 1, 2]),
            )
            moved = np.roll(tgt[begin : begin + length], offset)
            window = PairWindow(src, np.concatenate([tgt[:begin], moved, tgt[begin + length :]]), 0)
            seen = misalignment.find(partial(iter, [window]))
            right = [s for s in seen if s.offset == offset and abs(s.first - begin) < length]
            found, elsewhere = found + bool(right), elsewhere + len(seen) - len(right)
            off += [abs(shift.first - begin) for shift in right]
        middle = f"{statistics.median(off):g}, {max(off)}" if off else ""
        print(f"| {length} | {NUM_SHIFTS} | {found} | {elsewhere} | {middle} |")


def records(lines: list[str]) -> Records:
    blocks = range(0, len(lines), 4096)
    return np.concatenate([measure(lines[first : first + 4096]).lines for first in blocks])


if __name__ == "__main__":
    main()
