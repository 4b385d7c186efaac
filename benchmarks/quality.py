"""Run a training whose quality we state, and print a line for the table in RESULTS.md."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import commit, describe_machine
from report import print_table

MTRAIN = [sys.executable, "-m", "mtrain"]
CONFIGS = {"tiny": "configs/multi30k_tiny.yaml", "tok": "configs/multi30k_tiny_tok.yaml"}
SCORING = {"tiny": [], "tok": ["--tokenize", "none"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["demo", *CONFIGS, "repeat", "precision"])
    name = parser.parse_args().name
    print(f"{datetime.date.today()}  {describe_machine()}  commit {commit()}")
    if name == "repeat":
        repeat()
    elif name == "precision":
        compare_precisions()
    elif name == "demo":
        run = fresh("runs/benchmark_demo")
        timed([*MTRAIN, "demo", str(run)])
        show_scores(run, [])
    else:
        run = fresh(f"runs/benchmark_{name}")
        timed([*MTRAIN, "train", CONFIGS[name], "--run", str(run)])
        show_scores(run, SCORING[name])


def fresh(path: str) -> Path:
    """Return the path of a run folder that does not exist."""
    shutil.rmtree(path, ignore_errors=True)
    return Path(path)


def timed(command: list[str]) -> None:
    """Run a command; print its wall time and the peak memory of its largest process."""
    started = time.monotonic()
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)
    seconds = time.monotonic() - started
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{' '.join(command[2:])}: {seconds:.0f} s, {peak_mib:.0f} MiB", flush=True)


def evaluate(run: Path, options: list[str]) -> dict[str, Any]:
    """Translate and score the run's test sets in a process of their own; return its answer."""
    command = [*MTRAIN, "eval", str(run), "--json", *options]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    reports: dict[str, Any] = json.loads(answer)
    return reports


def show_scores(run: Path, options: list[str]) -> None:
    """Print the scores of the run's test sets."""
    for test, report in evaluate(run, options).items():
        for score in report["scores"]:
            print(f"{test}  {score['metric']} {score['value']:.2f}  {score['signature']}")


def repeat() -> None:
    """Train the demo's config for 300 steps twice; compare the files of the weights."""
    digests = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            run = Path(folder) / name
            steps = ["--set", "training.max_steps=300", "--set", "training.validate_every=100"]
            timed([*MTRAIN, "train", "configs/demo.yaml", "--run", str(run), *steps])
            weights = (run / "model.safetensors").read_bytes()
            digests.append(hashlib.sha256(weights).hexdigest())
    print(*digests, "the same" if digests[0] == digests[1] else "DIFFERENT", sep="\n")


def compare_precisions() -> None:
    """Train the tiny config for 2,000 updates on three seeds, in bfloat16 and in float32."""
    rows = [["seed", "precision", "validation loss", "validation BLEU, greedy", "test BLEU"]]
    for seed in (1, 2, 3):
        for precision in ("bfloat16", "float32"):
            rows.append([str(seed), precision, *train_in(precision, seed)])
    print_table(rows, is_markdown=True)


def train_in(precision: str, seed: int) -> list[str]:
    """Return the scores of the last weights, those of step 2,000."""
    run = fresh(f"runs/benchmark_{precision}_{seed}")
    settings = {
        "seed": seed,
        "training.precision": precision,
        "training.max_minutes": "null",
        "training.max_steps": 2000,
        "training.validate_every": 2000,
        "training.save_every": "null",
        "training.average": 1,
    }
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    timed([*MTRAIN, "train", CONFIGS["tiny"], "--run", str(run), *changes])
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    valid = json.loads(lines[-1])
    (test,) = evaluate(run, []).values()
    bleu = next(score["value"] for score in test["scores"] if score["metric"] == "BLEU")
    return [f"{valid['valid_loss']:.4f}", f"{valid['valid_bleu']:.2f}", f"{bleu:.2f}"]


if __name__ == "__main__":
    main()
