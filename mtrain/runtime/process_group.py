"""Processes that work together, each with a rank; here the one that works alone.

Rooms that may work together ask a process_group; only `distributed` knows how the answers travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ProcessGroup:
    """Processes that work together; this one works alone, and all questions are answered here."""

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Tell whether this rank writes and speaks for all."""
        return self.rank == 0

    def device_name(self, name: str, key: str = "device") -> str:
        """Return the name of this rank's device, where all are asked for `name` by `key`."""
        return name

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Return the sums of all ranks' numbers."""
        return numbers

    def all_reduce_min(self, number: float) -> float:
        """Return the least of all ranks' numbers, however long that takes."""
        return number

    def broadcast_float(self, number: float) -> float:
        """Return the first rank's number."""
        return number

    def broadcast_bytes(self, message: bytes) -> bytes:
        """Return the first rank's message, however long that takes."""
        return message

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in their order."""
        return [message]

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor that may lie in shards as a whole one; all ranks must ask together."""
        return tensor

    def to_local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor that may lie in shards."""
        return tensor

    def distribute_like(self, tensor: Tensor, pattern: Tensor) -> Tensor:
        """Return a whole tensor where the pattern is, in shards if that is."""
        return tensor.to(pattern.device)

    def barrier(self) -> None:
        """Wait until all ranks are here, however long that takes."""

    def claim_error_report(self) -> bool:
        """Tell whether no rank has said why it ends; from now on, one has."""
        return True

    def close(self) -> None:
        """Wait for all, and let go of them."""


SINGLE = ProcessGroup()
