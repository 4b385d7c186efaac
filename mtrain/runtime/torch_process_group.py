"""The few calls to `torch.distributed`: processes that work together, each with a rank.

`torchrun` starts them and PyTorch connects them. What they compute is known elsewhere.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from mtrain.errors import ConfigError, LostError
from mtrain.runtime.process_group import ProcessGroup
from mtrain.runtime.torchrun_env import TorchrunEnv

# A rank that dies is noticed at once, when its connections close; this is for a machine that
# vanishes without closing any.
_TIMEOUT = timedelta(minutes=10)
_PATIENCE = timedelta(days=30)  # while one rank does what the others wait for
_HEAD_START_S = 0.5  # what is wrong on all ranks alike, the first is to say
_LOST = ("gloo", "connection closed by peer", "connection reset by peer", "broken pipe", "nccl")


class TorchProcessGroup(ProcessGroup):
    """Processes that torchrun started, this one among them."""

    def __init__(self, launch: TorchrunEnv, store: Store) -> None:
        self.rank, self.size, self._local_rank = launch.rank, launch.size, launch.local_rank
        self._store = store
        self._patient = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def device_name(self, name: str, key: str = "device") -> str:
        """Return the name of this rank's device: `auto` and `cuda` are a GPU of its own.

        Raises:
            ConfigError: if all ranks were to share a GPU.
        """
        if name == "auto" and not torch.cuda.is_available():
            return "cpu"
        if name in ("auto", "cuda"):
            return f"cuda:{self._local_rank}"
        if name.startswith("cuda"):
            raise ConfigError(
                f"`{key}` must be auto, cpu or cuda for the {self.size} processes that torchrun "
                f"started, but is {name!r} instead."
            )
        return name

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Return the sums of all ranks' numbers, the same bits everywhere."""
        total = numbers.clone()
        dist.all_reduce(total)
        return total

    def all_reduce_min(self, number: float) -> float:
        """Return the least of all ranks' numbers, however long that takes."""
        least = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._patient)
        return float(least)

    def broadcast_float(self, number: float) -> float:
        """Return the first rank's number."""
        told = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(told, 0, group=self._patient)
        return float(told)

    def broadcast_bytes(self, message: bytes) -> bytes:
        """Return the first rank's message, however long that takes."""
        length = int(self.broadcast_float(len(message)))
        sent = _as_tensor(message, length) if self.is_first else _empty(length)
        dist.broadcast(sent, 0, group=self._patient)
        return sent.numpy().tobytes()

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in their order, however long that takes."""
        own = torch.tensor([len(message)])
        lengths = [torch.zeros_like(own) for _ in range(self.size)]
        dist.all_gather(lengths, own, group=self._patient)
        longest = max(int(length) for length in lengths)
        padded = [_empty(longest) for _ in range(self.size)]
        dist.all_gather(padded, _as_tensor(message, longest), group=self._patient)
        pairs = zip(padded, lengths, strict=True)
        return [part[: int(length)].numpy().tobytes() for part, length in pairs]

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor that may lie in shards as a whole one; all ranks must ask together."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def to_local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor that may lie in shards."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def distribute_like(self, tensor: Tensor, pattern: Tensor) -> Tensor:
        """Return a whole tensor where the pattern is, in shards if that is."""
        if not isinstance(pattern, DTensor):
            return tensor.to(pattern.device)
        mesh = pattern.device_mesh
        return distribute_tensor(tensor.to(mesh.device_type), mesh, pattern.placements)

    def barrier(self) -> None:
        """Wait until all ranks are here, however long that takes."""
        dist.barrier(group=self._patient)

    def claim_error_report(self) -> bool:
        """Tell whether no rank has said why it ends; from now on, one has."""
        try:
            if self._store.add("said", 0):  # at once: its keeper may end soon
                return False
            if not self.is_first:
                time.sleep(_HEAD_START_S)
            return int(self._store.add("said", 1)) == 1
        except RuntimeError:  # the machine that kept the store is gone
            return True

    def close(self) -> None:
        """Wait for all, and let go of them."""
        self.barrier()
        dist.destroy_process_group()


def _empty(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.uint8)


def _as_tensor(message: bytes, length: int) -> Tensor:
    """Return bytes as a tensor, filled up to `length`."""
    padded = _empty(length)
    padded[: len(message)] = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[
        : len(message)
    ]
    return padded


def join(launch: TorchrunEnv) -> TorchProcessGroup:
    """Meet the other ranks.

    Raises:
        LostError: if they do not come.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu and launch.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(launch.local_rank)
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            store=PrefixStore(f"mtrain/{attempt}", store),
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
        )
        return TorchProcessGroup(launch, PrefixStore(f"mtrain/{attempt}/words", store))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LostError(
            f"all {launch.size} ranks must meet at {where}, but do not: {reason}"
        ) from (None)


def is_lost(error: BaseException) -> bool:
    """Tell whether an error says that another rank is gone."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(words in text for words in _LOST)
