"""The process group that torchrun starts, by `torch.distributed`.

Independent of the computations of the ranks.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mtrain.errors import ConfigError, LostError
from mtrain.runtime.process_group import ProcessGroup, TorchrunEnv

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# A rank that dies is noticed at once, when its connections close; this is for a machine that
# vanishes without closing any.
_TIMEOUT = timedelta(minutes=10)
_NO_TIMEOUT = timedelta(days=30)  # for waits while one rank works; keepalive finds a lost machine
_KEEPALIVE_PROBES = 9  # that may be lost, of 10 in `_TIMEOUT`
_STORE_TIMEOUT_S = 10.0  # the machine of the store may be the lost one
_HEAD_START_S = 0.5  # of rank 0, which reports an error that all ranks have
_LOST = ("gloo", "connection closed by peer", "connection reset by peer", "broken pipe", "nccl")


class TorchProcessGroup(ProcessGroup):
    """The ranks that torchrun started."""

    def __init__(self, launch: TorchrunEnv, store: Store) -> None:
        self.rank, self.size, self._local_rank = launch.rank, launch.size, launch.local_rank
        self._store = store
        self._untimed_group = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        _keep_alive()

    def device_name(self, name: str, key: str = "device") -> str:
        """Return the name of this rank's device; for `auto` and `cuda`, a GPU of its own.

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
        """Return the elementwise sum over all ranks, the same bits on each."""
        total = numbers.clone()
        dist.all_reduce(total)
        return total

    def all_reduce_min(self, number: float) -> float:
        """Return the minimum over all ranks; wait for them without a timeout."""
        least = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._untimed_group)
        return float(least)

    def broadcast_float(self, number: float) -> float:
        """Return the number of rank 0."""
        tensor = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(tensor, 0, group=self._untimed_group)
        return float(tensor)

    def broadcast_bytes(self, message: bytes) -> bytes:
        """Return the message of rank 0; wait for it without a timeout."""
        length = int(self.broadcast_float(len(message)))
        sent = _as_tensor(message, length)  # overwritten on all ranks but 0
        dist.broadcast(sent, 0, group=self._untimed_group)
        return sent.numpy().tobytes()

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in the order of ranks; wait without a timeout."""
        length = torch.tensor([len(message)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._untimed_group)
        longest = max(int(length) for length in lengths)
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(padded, _as_tensor(message, longest), group=self._untimed_group)
        pairs = zip(padded, lengths, strict=True)
        return [part[: int(length)].numpy().tobytes() for part, length in pairs]

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return an fsdp tensor gathered whole; every rank must call this."""
        sharded = _as_sharded(tensor)
        return tensor if sharded is None else sharded.full_tensor()

    def to_local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of an fsdp tensor."""
        sharded = _as_sharded(tensor)
        return tensor if sharded is None else sharded.to_local()

    def distribute_like(self, tensor: Tensor, pattern: Tensor) -> Tensor:
        """Return a whole tensor on the device of `pattern`, sharded as `pattern` is."""
        sharded = _as_sharded(pattern)
        if sharded is None:
            return tensor.to(pattern.device)
        from torch.distributed.tensor import distribute_tensor

        mesh = sharded.device_mesh
        return distribute_tensor(tensor.to(mesh.device_type), mesh, sharded.placements)

    def barrier(self) -> None:
        """Wait for all ranks, without a timeout."""
        dist.barrier(group=self._untimed_group)

    def claim_error_report(self) -> bool:
        """Return True for the first rank that reports an error, False for every later one.

        True also if the store does not answer: `add` has no timeout of its own.
        """
        is_later = threading.Event()

        def ask() -> None:
            with suppress(RuntimeError):  # the process that hosted the store is gone
                if self._store.add("said", 0):  # first, because the store's host may exit
                    is_later.set()
                    return
                if not self.is_first:
                    time.sleep(_HEAD_START_S)
                if int(self._store.add("said", 1)) > 1:
                    is_later.set()

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_STORE_TIMEOUT_S)
        return not is_later.is_set()

    def close(self) -> None:
        """Wait for all ranks, leave the group, and end its threads.

        A thread of a group that still runs when Python ends may abort the process.
        """
        self.barrier()
        dist.destroy_process_group()
        del self._untimed_group
        gc.collect()  # DDP models that hold a group


def _as_sharded(tensor: Tensor) -> DTensor | None:
    """Return an fsdp tensor, or None for any other; never import their class, which takes 1.3 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def _as_tensor(message: bytes, length: int) -> Tensor:
    """Return bytes as a uint8 tensor, zero-padded or cut to `length`."""
    padded = bytearray(message.ljust(max(length, 1), b"\0"))  # `frombuffer` takes no empty buffer
    return torch.frombuffer(padded, dtype=torch.uint8)[:length]


def _keep_alive() -> None:
    """Turn on TCP keepalive for all connections, which gloo leaves off; on Linux only."""
    seconds = int(_TIMEOUT.total_seconds()) // (_KEEPALIVE_PROBES + 1)
    for path in Path("/proc/self/fd").glob("*") if sys.platform == "linux" else ():
        with suppress(OSError):  # it is no connection
            connection = socket.socket(fileno=int(path.name))
            try:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                    connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
            finally:
                connection.detach()


def join(launch: TorchrunEnv) -> TorchProcessGroup:
    """Join the process group of torchrun.

    Raises:
        LostError: if the other ranks do not join in time.
    """
    gc.freeze()  # `close` collects; it need not traverse what was imported until now
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
    """Tell whether an error means that another rank is gone."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(words in text for words in _LOST)
