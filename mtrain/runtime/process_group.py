"""The interface of a process group, the group of size 1, and the environment of torchrun.

Callers take a `ProcessGroup`; only `torch_process_group` calls `torch.distributed`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from mtrain.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class ProcessGroup:
    """A process group of size 1; the base class of `TorchProcessGroup`."""

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Tell whether this is rank 0, which writes files and messages."""
        return self.rank == 0

    def device_name(self, name: str, key: str = "device") -> str:
        """Return the device of this rank for the setting `key`, whose value is `name`."""
        return name

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Return the elementwise sum over all ranks."""
        return numbers

    def all_reduce_min(self, number: float) -> float:
        """Return the minimum over all ranks; wait for them without a timeout."""
        return number

    def broadcast_float(self, number: float) -> float:
        """Return the number of rank 0."""
        return number

    def broadcast_bytes(self, message: bytes) -> bytes:
        """Return the message of rank 0; wait for it without a timeout."""
        return message

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in the order of ranks."""
        return [message]

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return an fsdp tensor gathered whole; every rank must call this."""
        return tensor

    def to_local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of an fsdp tensor."""
        return tensor

    def distribute_like(self, tensor: Tensor, pattern: Tensor) -> Tensor:
        """Return a whole tensor on the device of `pattern`, sharded as `pattern` is."""
        return tensor.to(pattern.device)

    def barrier(self) -> None:
        """Wait for all ranks, without a timeout."""

    def claim_error_report(self) -> bool:
        """Return True for the first rank that reports an error, False for every later one."""
        return True

    def close(self) -> None:
        """Wait for all ranks, and leave the group."""


SINGLE = ProcessGroup()


class TorchrunEnv(NamedTuple):
    """The rank of this process, as torchrun sets it."""

    rank: int  # from 0
    size: int  # number of ranks
    local_rank: int  # among the processes of this machine, from 0


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
