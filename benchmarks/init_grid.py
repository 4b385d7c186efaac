"""Measure the configs of `mtrain init`: is the budget kept, and is the source used?"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

from machine import commit, describe_machine
from report import print_table, say

HEADS = ["pairs", "budget", "took", "updates", "validation loss", "test BLEU", "ignores its source"]


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    data = Path(os.environ.get("MTRAIN_MULTI30K") or "data/multi30k")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--src", type=Path, default=data / "train.en")
    parser.add_argument("--tgt", type=Path, default=data / "train.de")
    parser.add_argument("--pairs", type=numbers, default=[1000, 3000, 8000, 29_000])
    parser.add_argument("--minutes", type=numbers, default=[2, 5, 10, 20])
    parser.add_argument("--folder", type=Path, default=Path("runs/init_grid"))
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    print(f"{datetime.date.today()}  {describe_machine()}  commit {commit()}", flush=True)
    rows = []
    for num_pairs in map(int, options.pairs):
        for minutes in options.minutes:
            folder = options.folder / f"{num_pairs}-{minutes:g}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for side, path in (("src", options.src), ("tgt", options.tgt)):
                with path.open(encoding="utf-8") as lines:
                    text = "".join(islice(lines, num_pairs))
                (folder / f"train.{side}").write_text(text, encoding="utf-8")
            rows.append([f"{num_pairs:,}", f"{minutes:g} min", *trained(folder, minutes)])
            say("  ".join(rows[-1]))
    print_table([HEADS, *rows], options.markdown)


def trained(folder: Path, minutes: float) -> list[str]:
    """Plan, train and evaluate a corpus; return the cells of its row but the first two."""
    config, run = folder / "config.yaml", folder / "run"
    command = ["init", "--src", folder / "train.src", "--tgt", folder / "train.tgt"]
    command += ["--src-lang", "en", "--tgt-lang", "de", "--budget", f"{round(60 * minutes)}s"]
    mtrain(*command, "-o", config, "--run", run)
    started = time.monotonic()
    mtrain("train", config)
    scored = mtrain("eval", run, "--json", "--resamples", "0")
    took = time.monotonic() - started
    (test,) = json.loads(scored.stdout).values()
    bleu = next(score["value"] for score in test["scores"] if score["metric"] == "BLEU")
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [line["valid_loss"] for line in log if "valid_loss" in line]
    is_deaf = "ignores its source" in scored.stderr
    updates = max(line["step"] for line in log)
    return [
        *(f"{took:.0f} s", f"{updates:,}", f"{min(losses):.3f}", f"{bleu:.2f}"),
        "yes" if is_deaf else "no",
    ]


def mtrain(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of mtrain; exit with its message if it fails."""
    command = [sys.executable, "-m", "mtrain", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stderr}")
    return done


if __name__ == "__main__":
    main()
