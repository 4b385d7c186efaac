"""Synthetic tasks that a tiny model learns in seconds, and the ways in which tests run them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from mtrain.config import config_file
from mtrain.config.sections import Config
from mtrain.data.prepare import prepare
from mtrain.run.run_dir import RunDir
from mtrain.training import trainer as trainer_module

REPOSITORY = Path(__file__).parent.parent
WORDS = ["ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu"]
Tree = dict[str, Any]

# Tests kill processes, and no machine: what a process wrote is there without waiting for the disk,
# which is a quarter of a small training. Calls are counted as before (`kill_at_call`), and one on
# what is no open file is an error as before.
os.fsync = os.fstat


class Pair(NamedTuple):
    src: str
    tgt: str


Task = Callable[[int, int], list[Pair]]


def kill_at_call(names: Sequence[str], kill_at: int) -> Callable[[], int]:
    """End this process without a word at the call number `kill_at` of functions of `os`.

    Returns what tells how many calls there were.
    """
    number = 0

    def counting(call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **others: object) -> object:
            nonlocal number
            number += 1
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **others)

        return counted

    for name in names:
        setattr(os, name, counting(getattr(os, name)))
    return lambda: number


class Said:
    """A console that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str = "") -> None:
        self.lines.append(text)


def copy_task(count: int, seed: int) -> list[Pair]:
    """The target is the source."""
    return [Pair(line, line) for line in _sentences(count, seed)]


def reverse_task(count: int, seed: int) -> list[Pair]:
    """The target has the words of the source from last to first."""
    lines = _sentences(count, seed)
    return [Pair(line, " ".join(reversed(line.split()))) for line in lines]


def _sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.sample(WORDS, rng.randint(2, 6))) for _ in range(count)]


def write(path: Path, lines: list[str]) -> str:
    """Write lines without the package's help; return the path as a config names it."""
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return str(path)


def write_corpus(directory: Path, name: str, pairs: list[Pair]) -> dict[str, list[str]]:
    src = write(directory / f"{name}.src", [pair.src for pair in pairs])
    tgt = write(directory / f"{name}.tgt", [pair.tgt for pair in pairs])
    return {"src": [src], "tgt": [tgt]}


def tiny_tree(directory: Path, task: Task = copy_task, num_train: int = 200) -> Tree:
    """Write a task's corpora; return a config of a model that trains at once."""
    directory.mkdir(parents=True, exist_ok=True)
    return {
        "run_dir": str(directory / "run"),
        "data": {
            "src_lang": "aa",
            "tgt_lang": "bb",
            "train": write_corpus(directory, "train", task(num_train, 1)),
            "valid": write_corpus(directory, "valid", task(12, 2)),
            "tests": {"held_out": write_corpus(directory, "test", task(40, 3))},
            "max_tokens": 32,
            "clean": ["blank-side"],  # the sentences are few: some stand in two corpora
        },
        "tokenizer": {"vocab_size": 285},
        "model": {
            "d_model": 16,
            "num_heads": 2,
            "d_ff": 32,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "dropout": 0.1,
        },
        "training": {
            "max_steps": 12,
            "batch_tokens": 192,
            "lr": 0.01,
            "warmup_steps": 4,
            "device": "cpu",
            "precision": "float32",
            "log_every": 2,
            "validate_every": 4,
            "keep_last": 3,
            "average": 1,
        },
        "decoding": {"beam": 2, "max_extra_tokens": 5},
    }


def write_config(path: Path, tree: Tree) -> Path:
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return path


def write_task(directory: Path, task: Task = copy_task, num_train: int = 200) -> Path:
    """Write a task and its config; return the path of the config."""
    return write_config(directory / "config.yaml", tiny_tree(directory, task, num_train))


def train(config_path: Path, *overrides: str, run: str | None = None) -> RunDir:
    """Do what `mtrain train` does, in this process."""
    config = config_file.load(config_path, overrides, run)
    run_dir = prepared(config)
    trainer_module.train(config, run_dir)
    return run_dir


def prepared(config: Config) -> RunDir:
    run_dir = RunDir(Path(config.run_dir))
    prepare(config, run_dir, Said())
    return run_dir


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Let a signal arrive while update `step` is being made, once."""
    update = trainer_module.Trainer._update

    def interrupted(trainer: trainer_module.Trainer, batches: Any) -> None:
        update(trainer, batches)
        if trainer.state.progress.step + 1 == step:
            monkeypatch.setattr(trainer_module.Trainer, "_update", update)
            signal.raise_signal(number)

    monkeypatch.setattr(trainer_module.Trainer, "_update", interrupted)
