"""Rank and world size of this process, from the environment that torchrun sets."""

from __future__ import annotations

import os
from typing import NamedTuple

from mtrain.errors import ConfigError


class TorchrunEnv(NamedTuple):
    """The rank of this process.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
        local_rank: its number on this machine, from 0.
    """

    rank: int
    size: int
    local_rank: int


def read_torchrun_env() -> TorchrunEnv | None:
    """Return the rank of this process; None without torchrun, or in a world of one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    launch = TorchrunEnv(_number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK"))
    return launch if launch.size > 1 else None


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        raise ConfigError(f"the environment's {name} must be a number, but is {text!r} instead.")
    return int(text)
