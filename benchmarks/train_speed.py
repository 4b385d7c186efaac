"""Compare how fast mtrain, JoeyNMT, Hugging Face and eole train on the same sentences.

Every system trains a model of the same sizes on Multi30k (en-de, raw), encoded once by mtrain's
tokenizer, in batches of the same budget, on the same number of threads. Each measurement is a
fresh process. They come in pairs, first mtrain, then the other, so that a machine that slows down
slows both; what counts is the ratio of each pair. benchmarks/README.md says what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import environments
from environments import REPOSITORY, NotMeasured
from machine import commit, describe_machine
from operations import Sizes, Tokens, flop
from peers.job import Epoch, Job
from report import print_table, say, spread

CORPUS = REPOSITORY / "build" / "train_speed" / "corpus"

SIZES = {
    "tiny": {"num_layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 4},
    "small": {"num_layers": 3, "d_model": 256, "d_ff": 1024, "num_heads": 4},
}
VOCAB_SIZE = 8000
TUNED = {  # keep freed memory, as mtrain does
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


_MAX_MISSING = 0.001  # eole trains on no source twice in a batch, and leaves two pairs out


@dataclass(frozen=True)
class System:
    """A toolkit in one setting; `peer` is None for mtrain, which runs in this environment."""

    peer: str | None
    precision: str
    is_tuned: bool
    summary: str


SYSTEMS = {
    "mtrain": System(None, "auto", False, "as it comes"),
    "mtrain-float32": System(None, "float32", False, "`training.precision: float32`"),
    "joeynmt": System("joeynmt", "float32", False, "as it comes"),
    "joeynmt-tuned": System("joeynmt", "float32", True, "with memory settings for glibc"),
    "hf": System("hf", "float32", False, "MarianMTModel in a plain loop"),
    "hf-tuned": System("hf", "float32", True, "the same with memory settings for glibc"),
    "hf-bf16-tuned": System("hf", "bfloat16", True, "and with torch.autocast in bfloat16"),
    "eole": System("eole", "float32", False, "as it comes"),
    "eole-tuned": System("eole", "float32", True, "with memory settings for glibc"),
}


@dataclass(frozen=True)
class Measurement:
    """What a worker printed."""

    tokens_per_s: float
    max_rss_mib: int
    first_loss: float
    loss: float
    all_updates: int
    cores: float
    versions: str


@dataclass(frozen=True)
class Pair:
    """Two measurements, one right after the other."""

    base: Measurement
    other: Measurement

    @property
    def ratio(self) -> float:
        """The speed of the base over that of the other system."""
        return self.base.tokens_per_s / self.other.tokens_per_s


@dataclass(frozen=True)
class Ceiling:
    """What the machine multiplies at best, and what training one target token takes."""

    gflops: dict[str, float]
    gflop_per_token: float


def main() -> None:
    options = parse()
    if options.list:
        list_systems()
        return
    names = [options.base, *(name for name in options.peers if name != options.base)]
    reasons = {
        name: reason for name in names if (reason := environments.install(SYSTEMS[name].peer))
    }
    encode()
    if options.check:
        sys.exit(check(options, names, reasons))
    ceilings = [measure_ceiling(options)]
    pairs = {}
    for name in options.peers:
        try:
            if reason := reasons.get(options.base) or reasons.get(name):
                raise NotMeasured(reason)
            pairs[name] = [measure_pair(options, name, n + 1) for n in range(options.pairs)]
        except NotMeasured as error:
            reasons[name] = str(error)
            say(f"{name}: not measured: {error}")
    ceilings.append(measure_ceiling(options))
    report(options, pairs, reasons, best(ceilings))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = [name for name, system in SYSTEMS.items() if system.peer]
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=default)
    parser.add_argument("--base", choices=SYSTEMS, default="mtrain", help="what they run beside")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="what is timed")
    parser.add_argument("--warm-up", type=float, default=15, help="seconds before, at least")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, for mtrain alone")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--list", action="store_true", help="list the systems and stop")
    parser.add_argument(
        "--check", action="store_true", help="compare what each system reads in an epoch and stop"
    )
    options = parser.parse_args()
    for name in options.peers:
        if name not in SYSTEMS:
            parser.error(f"--peers must be of {', '.join(SYSTEMS)}, but has {name!r} instead")
    return options


def list_systems() -> None:
    for name, system in SYSTEMS.items():
        print(f"{name:<16} {system.summary:<48} {environments.state(system.peer)}")


def find_multi30k() -> Path:
    """Return the folder of the corpus: that of MTRAIN_MULTI30K, or `data/multi30k`."""
    folder = Path(os.environ.get("MTRAIN_MULTI30K") or REPOSITORY / "data" / "multi30k")
    if (folder / "train.en").is_file():
        return folder
    sys.exit("Multi30k is neither in MTRAIN_MULTI30K nor in data/multi30k; see data/README.md.")


def encode() -> None:
    """Write the corpus anew, as every system reads it."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    CORPUS.mkdir(parents=True)
    arguments = [str(find_multi30k()), str(CORPUS), str(VOCAB_SIZE)]
    command = [sys.executable, "-m", "peers.encode", *arguments]
    subprocess.run(command, check=True, env=environment("mtrain", os.cpu_count() or 1))


def environment(name: str, threads: int) -> dict[str, str]:
    """Return the environment variables that a system runs with."""
    system = SYSTEMS[name]
    return environments.variables(system.peer, threads) | (TUNED if system.is_tuned else {})


def measure_ceiling(options: argparse.Namespace) -> Ceiling:
    command = [sys.executable, "-m", "peers.ceiling", str(options.threads)]
    variables = environment("mtrain", options.threads)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return Ceiling(json.loads(done.stdout), gflop_per_tgt_token(**SIZES[options.model]))


def best(ceilings: list[Ceiling]) -> Ceiling:
    """Return the higher of what was measured before and after the trainings."""
    gflops = {name: max(each.gflops[name] for each in ceilings) for name in ceilings[0].gflops}
    return Ceiling(gflops, ceilings[0].gflop_per_token)


def gflop_per_tgt_token(num_layers: int, d_model: int, d_ff: int, num_heads: int) -> float:
    """Return what training on one target token takes, and on the sources that go with it."""
    counts = json.loads((CORPUS / "counts.json").read_text("utf-8"))
    names = ("src_tokens", "tgt_tokens", "src_squares", "tgt_squares", "products")
    epoch = Tokens(*(counts[name] for name in names))
    sizes = Sizes(num_layers, num_layers, d_model, d_ff, VOCAB_SIZE)
    return flop(epoch, sizes) / epoch.tgt / 1e9


def measure_pair(options: argparse.Namespace, name: str, number: int) -> Pair:
    pair = Pair(measure(options, options.base), measure(options, name))
    say(
        f"{name}, pair {number} of {options.pairs}: {options.base} "
        f"{pair.base.tokens_per_s:,.0f}, {name} {pair.other.tokens_per_s:,.0f} target tokens/s, "
        f"ratio {pair.ratio:.2f}"
    )
    return pair


def measure(options: argparse.Namespace, name: str) -> Measurement:
    """Train a system in a process of its own, and wait."""
    answer = run_worker(options, name, [])
    return Measurement(
        answer["tgt_tokens"] / answer["seconds"],
        answer["max_rss_mib"],
        answer["first_loss"],
        answer["loss"],
        answer["all_updates"],
        answer["cores"],
        " ".join(f"{package} {version}" for package, version in answer["versions"].items()),
    )


def run_worker(options: argparse.Namespace, name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a system's worker; return what its one line of JSON holds.

    Raises:
        NotMeasured: if it fails or does not end.
    """
    peer = SYSTEMS[name].peer
    return environments.run_worker(
        peer,
        f"with_{peer or 'mtrain'}",
        asdict(make_job(options, name)),
        environment(name, options.threads),
        600 + 5 * (options.warm_up + options.seconds),
        arguments,
    )


def make_job(options: argparse.Namespace, name: str) -> Job:
    return Job(
        corpus=str(CORPUS),
        **SIZES[options.model],
        vocab_size=VOCAB_SIZE,
        dropout=0.3,
        label_smoothing=0.1,
        batch_tokens=4096,
        lr=0.002,
        warmup_steps=400,
        adam_betas=(0.9, 0.98),
        max_grad_norm=1.0,
        precision=SYSTEMS[name].precision,
        threads=options.threads,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
        overrides=tuple(options.set),
    )


def check(options: argparse.Namespace, names: list[str], reasons: dict[str, str]) -> int:
    """Print what each toolkit reads in an epoch; return 1 if one does not read the corpus."""
    counts = json.loads((CORPUS / "counts.json").read_text("utf-8"))
    print(f"{'corpus':<10} {say_epoch(counts)}")
    exit_code = 0
    for name in one_of_each(names):
        try:
            if name in reasons:
                raise NotMeasured(reasons[name])
            epoch = Epoch(**run_worker(options, name, ["--count"]))
        except NotMeasured as error:
            print(f"{name:<10} not counted: {error}")
            exit_code = 1
            continue
        padding = 1 - (epoch.src_tokens + epoch.tgt_tokens) / epoch.cells
        missing = 1 - epoch.tgt_tokens / counts["tgt_tokens"]
        is_same = all(counts[key] == value for key, value in asdict(epoch).items() if key in counts)
        exit_code |= abs(missing) > _MAX_MISSING or (missing == 0 and not is_same)
        verdict = "the same" if is_same else f"NOT THE SAME, lacks {missing:.3%} of the targets"
        print(
            f"{name:<10} {say_epoch(asdict(epoch))}, {epoch.batches} batches, "
            f"{padding:.1%} padding: {verdict}"
        )
    return exit_code


def one_of_each(names: list[str]) -> list[str]:
    """Return the first name of each toolkit: its settings do not change what it reads."""
    first = {SYSTEMS[name].peer: name for name in reversed(names)}
    return [name for name in names if name in first.values()]


def say_epoch(counts: dict[str, int]) -> str:
    return (
        f"{counts['pairs']:,} pairs, {counts['src_tokens']:,} source and "
        f"{counts['tgt_tokens']:,} target tokens, sum of ids {counts['id_sum']:,}"
    )


HEADINGS = (
    "system",
    "target tokens/s",
    "{base} / system",
    "peak memory",
    "GFLOP/s",
    "of float32",
    "of bfloat16",
    "cores",
    "loss, first to last",
    "versions",
)


def report(
    options: argparse.Namespace,
    pairs: dict[str, list[Pair]],
    reasons: dict[str, str],
    ceiling: Ceiling,
) -> None:
    """Print what was measured where, and a row for each system."""
    sizes = ", ".join(f"{key} {value}" for key, value in SIZES[options.model].items())
    print(f"{datetime.date.today()}, {describe_machine()}, commit {commit()}")
    print(f"{options.model}: {sizes}; {VOCAB_SIZE:,} pieces; {options.threads} thread(s)")
    print(f"{options.pairs} pair(s) a system, {options.seconds:g} s each after the warm-up")
    if options.set:
        print(f"mtrain with {' '.join(options.set)}")
    peaks = ", ".join(f"{name} {gflops:,.0f}" for name, gflops in ceiling.gflops.items())
    print(f"matrix products at best: {peaks} GFLOP/s")
    print(f"model: {1000 * ceiling.gflop_per_token:.1f} MFLOP for each target token\n")
    rows = [[heading.format(base=options.base) for heading in HEADINGS]]
    own = [pair.base for name in pairs for pair in pairs[name]]
    if own:
        rows.append(row(options.base, own, "1", ceiling))
    for name in options.peers:
        if name in pairs:
            ratios = [pair.ratio for pair in pairs[name]]
            measured = [pair.other for pair in pairs[name]]
            rows.append(row(name, measured, spread(ratios, ".2f"), ceiling))
        else:
            rows.append([name, f"not measured: {reasons[name]}", *[""] * (len(HEADINGS) - 2)])
    print_table(rows, options.markdown)


def row(name: str, measured: list[Measurement], ratio: str, ceiling: Ceiling) -> list[str]:
    speeds = [measurement.tokens_per_s for measurement in measured]
    speed = median(speeds)
    gflops = speed * ceiling.gflop_per_token
    has_bfloat16 = ceiling.gflops["bfloat16"] > ceiling.gflops["float32"]
    shares = [
        f"{gflops / ceiling.gflops['float32']:.0%}",
        f"{gflops / ceiling.gflops['bfloat16']:.0%}" if has_bfloat16 else "-",
    ]
    last = measured[-1]
    return [
        name,
        spread(speeds, ",.0f"),
        ratio,
        f"{max(measurement.max_rss_mib for measurement in measured):,} MiB",
        f"{gflops:.1f}",
        *shares,
        f"{median(measurement.cores for measurement in measured):.2f}",
        f"{last.first_loss:.2f} to {last.loss:.2f} in {last.all_updates} updates",
        last.versions,
    ]


if __name__ == "__main__":
    main()
