"""Compare the speed of two checkouts of mtrain: this one, and another that is named.

    python benchmarks/against.py CHECKOUT [--runs RUN OTHER_RUN]

Trains the same model on Multi30k in each, by turns, as train_speed.py does; with two run folders of
equal weights, one written by each checkout, also translates their first test set, greedily and with
a beam of 5. Each measurement is a fresh process that imports the package and the worker of its own
checkout. Prints the ratio of each pair, and their median.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
from pathlib import Path
from statistics import median
from typing import Any

import decode_speed
import environments
import train_speed
from machine import commit, describe_machine


def main() -> None:
    """Print the speed of this checkout over that of the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--runs", type=Path, nargs=2, help="of this checkout and of the other")
    parser.add_argument("--models", nargs="*", default=["tiny", "small"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20, help="what is timed")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    checkouts = [environments.REPOSITORY, options.checkout.resolve()]
    print(f"{datetime.date.today()}, {describe_machine()}, commit {commit()}")
    print(f"{options.pairs} pairs, {options.seconds:g} s each, {options.threads} thread(s)")
    if options.models:
        train_speed.encode()
    for model in options.models:
        settings = argparse.Namespace(
            model=model, threads=options.threads, seconds=options.seconds, warm_up=8, set=[]
        )
        job = dataclasses.asdict(train_speed.make_job(settings, "mtrain"))
        pairs = [
            [run(checkout, "with_mtrain", job, options.threads) for checkout in checkouts]
            for _ in range(options.pairs)
        ]
        speeds = [[pair["tgt_tokens"] / pair["seconds"] for pair in both] for both in pairs]
        report(f"training, {model}, target tokens/s", speeds)
    for beam in (1, 5) if options.runs else ():
        settings = argparse.Namespace(
            run=options.runs[0],
            lines=None,
            beam=beam,
            precision="float32",
            alpha=0.6,
            batch=64,
            max_tokens=100,
            threads=options.threads,
            seconds=options.seconds / 2,
        )
        job = dataclasses.asdict(decode_speed.read_task(settings).job)
        pairs = [
            [
                run(checkout, "decode_mtrain", job | {"run": str(folder.resolve())}, 1)
                for checkout, folder in zip(checkouts, options.runs, strict=True)
            ]
            for _ in range(options.pairs)
        ]
        if any(ours["outputs"] != theirs["outputs"] for ours, theirs in pairs):
            print(f"beam {beam}: NOT THE SAME TRANSLATIONS")
        speeds = [[len(pair["outputs"]) / pair["seconds"] for pair in both] for both in pairs]
        report(f"translating, beam {beam}, sentences/s", speeds)


def run(checkout: Path, worker: str, job: dict[str, object], threads: int) -> dict[str, Any]:
    """Run a checkout's worker on a job; return what its one line of JSON holds."""
    env = environments.variables(None, threads)
    env["PYTHONPATH"] = os.pathsep.join([str(checkout / "benchmarks"), str(checkout)])
    return environments.run_worker(None, worker, job, env, patience_s=900)


def report(name: str, speeds: list[list[float]]) -> None:
    """Print both speeds, and the ratio of each pair."""
    ratios = sorted(ours / theirs for ours, theirs in speeds)
    ours, theirs = (median(column) for column in zip(*speeds, strict=True))
    print(
        f"{name}: {ours:,.0f} here, {theirs:,.0f} there; ratio {median(ratios):.3f} "
        f"({', '.join(f'{ratio:.3f}' for ratio in ratios)})",
        flush=True,
    )


if __name__ == "__main__":
    main()
