"""What several test files read from a run folder, and how they damage a file of it."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from mtrain.run.run_dir import RunDir

TIMES = {"tgt_tokens_per_s", "elapsed_s", "updates_began_s", "memory_mib"}


def metrics(run: RunDir) -> list[dict[str, Any]]:
    lines = run.metrics_path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def timeless(run: RunDir) -> list[dict[str, Any]]:
    """Return the metrics without what a clock or the machine decides, or the user changed."""
    return [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in metrics(run)
        if "changed_config" not in line
    ]


def weights(run: RunDir) -> dict[str, bytes]:
    """Return the final weights bit for bit."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(run.model_path).items()}


def step_lines(run: RunDir) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "loss" in line]


def harm(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
