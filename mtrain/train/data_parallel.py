"""The gradient of an update that several ranks make together, each from its shares.

PyTorch's own DistributedDataParallel keeps the model whole on every rank, its fully_shard keeps a
part of it there. Either exchanges gradients in pieces while the backward pass goes on, and only in
the last of a rank's shares. What is dealt to whom is decided in `data`.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mtrain.data.batch import Batch
from mtrain.data.sampler import UpdateBatches
from mtrain.errors import ConfigError, RunError
from mtrain.model.transformer import Transformer
from mtrain.ops import dropout
from mtrain.runtime.process_group import ProcessGroup
from mtrain.train.gradients import GradientPart, Gradients, GradientTask, is_out_of_memory, loss_of
from mtrain.train.loss import LossSum

Exchange = Literal["float32", "bfloat16"]
Result = TypeVar("Result")


class LossModel(nn.Module):
    """A model that answers with its loss, so that all its weights are used within one call."""

    def __init__(self, model: Transformer, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch) -> LossSum:
        """Return the sums of a batch's loss; no views, which fully_shard warns of."""
        sums = loss_of(self.model, batch, self.smoothing)
        return LossSum(sums.loss.clone(), sums.nll.clone(), sums.num_tokens)


class SharedGradients(Gradients, ABC):
    """Adds up the gradients of an update over all ranks.

    Each rank works in its own thread alone, and drops what the seed of each share says, wherever
    that share is worked on.
    """

    def __init__(self, alone: Gradients, process_group: ProcessGroup) -> None:
        super().__init__(alone.model, alone.smoothing, alone.device, alone.say)
        self.process_group = process_group
        self._seeds: Iterator[int] = _seeds_from(0)

    def backward_update(self, dealt: UpdateBatches, factor: float = 1.0) -> list[LossSum]:
        """Add the gradients of an update, `factor` times as large; return this rank's sums.

        Raises:
            RunError: if the memory does not hold a single pair, or runs out amid an exchange.
        """
        self.model.train()
        seeds = torch.randint(2**62, (dealt.deal.num_shares,)).tolist()
        own = zip(
            dealt.shares, seeds[self.process_group.rank :: self.process_group.size], strict=True
        )
        each = dealt.num_tokens / (
            factor * self.process_group.size
        )  # the exchange is a mean over the ranks
        sums = []
        for number, (share, seed) in enumerate(own, start=1):
            self._seeds = _seeds_from(seed)
            divisor = each if share.counts else math.inf
            found = self._make(share.batch, divisor, is_last=number == len(dealt.shares))
            sums += found if share.counts else []
        return sums

    @abstractmethod
    def _make(self, batch: Batch, divisor: float, is_last: bool) -> list[LossSum]:
        """Add a share's gradients; exchange all that were added if it is the last."""

    def split_over_threads(self, batch: Batch, num_tokens: float) -> list[GradientTask]:
        """Return a batch as the one task of this rank."""
        return [GradientTask(batch.to(self.device), num_tokens, next(self._seeds))]

    def backward(self, task: GradientTask) -> GradientPart:
        """Return a batch's loss and its gradients, as a share of the update's tokens."""
        self._seed_device(task)
        return super().backward(task)

    def _seed_device(self, task: GradientTask) -> None:
        if self.device.type == "cuda" and task.seed is not None:
            torch.cuda.manual_seed(task.seed)


class DDPGradients(SharedGradients):
    """Every rank has the whole model, and all make the same update of it.

    Raises:
        ConfigError: if gradients are to travel in a type that PyTorch's hook does not take here.
    """

    def __init__(self, alone: Gradients, process_group: ProcessGroup, exchange: Exchange) -> None:
        super().__init__(alone, process_group)
        if exchange == "bfloat16" and self.device.type != "cuda":
            raise ConfigError(
                "`training.exchange` must be float32 for `training.parallel: ddp` on a CPU, where "
                "PyTorch has no hook for it, but is 'bfloat16' instead."
            )
        self._replica = DistributedDataParallel(
            LossModel(self.model, self.smoothing), gradient_as_bucket_view=True
        )
        if exchange == "bfloat16":
            self._replica.register_comm_hook(None, bf16_compress_hook)

    def probe_memory(self, batch: Batch) -> None:
        """Find out whether any rank's memory is too small for a batch."""
        self._seeds = _seeds_from(0)
        self.accumulate(batch, batch.num_tgt_tokens)
        least = self.process_group.all_reduce_min(self.room)
        if least < self.room:
            self.say(
                f"memory   of another rank does not hold a share of {least:,.0f} places; such "
                "shares are made in halves, and the updates stay the same"
            )
        self.room = least

    def settle(self, batch: Batch) -> None:
        """Exchange gradients once, of a single pair.

        PyTorch orders the pieces by which gradients were ready first, from the second exchange on;
        so a training that goes on adds in the same order as one that did not stop.
        """
        self._seeds = _seeds_from(0)
        self._exchange(batch.split(len(batch.src_BS))[0], math.inf)

    def _make(self, batch: Batch, divisor: float, is_last: bool) -> list[LossSum]:
        """Add a share's gradients, on the bare model, which exchanges nothing, or its replica."""
        return self._exchange(batch, divisor) if is_last else self.accumulate(batch, divisor)

    def _exchange(self, batch: Batch, divisor: float) -> list[LossSum]:
        """Add a batch's gradients and exchange all; in halves, the last of which exchanges."""
        if batch.num_places < self.room or len(batch.src_BS) == 1:
            (task,) = self.split_over_threads(batch, divisor)
            sums = self._try_exchange(task)
            if sums is not None:
                return [sums]
            self.note_oom(batch)
        first, last = batch.split(2)
        return self.accumulate(first, divisor) + self._exchange(last, divisor)

    def _try_exchange(self, task: GradientTask) -> LossSum | None:
        """Add a task's gradients and exchange all; None if the memory does not hold its states.

        Raises:
            RunError: if the memory runs out later, when other ranks count on this one.
        """
        self._seed_device(task)
        with dropout.dropout_seeds(task.seed):
            try:
                sums: LossSum | None = self._replica(task.batch)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                sums = None
            if sums is None:
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                return None
            return _with_memory(lambda: _backward(sums, task))


class FSDPGradients(SharedGradients):
    """Every rank has a part of each weight and of what the optimizer remembers of it.

    A layer's weights are whole while it computes. All ranks make all calls together, so that none
    can halve a batch alone.
    """

    def __init__(self, alone: Gradients, process_group: ProcessGroup, exchange: Exchange) -> None:
        mesh = init_device_mesh(alone.device.type, (process_group.size,))
        policy = MixedPrecisionPolicy(
            reduce_dtype=torch.bfloat16 if exchange == "bfloat16" else None
        )
        for layer in (*alone.model.encoder, *alone.model.decoder):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        whole = LossModel(alone.model, alone.smoothing)
        self._sharded = fully_shard(whole, mesh=mesh, mp_policy=policy)
        self._call = whole
        super().__init__(alone, process_group)

    def probe_memory(self, batch: Batch) -> None:
        """Find out whether all ranks' memory holds a batch.

        Raises:
            RunError: if one's does not.
        """
        self._seeds = _seeds_from(0)
        self._make(batch, batch.num_tgt_tokens, is_last=True)

    def _make(self, batch: Batch, divisor: float, is_last: bool) -> list[LossSum]:
        self._sharded.set_requires_gradient_sync(is_last)
        (task,) = self.split_over_threads(batch, divisor)
        self._seed_device(task)
        with dropout.dropout_seeds(task.seed):
            return [_with_memory(lambda: _backward(self._call(task.batch), task))]


def _with_memory(work: Callable[[], Result]) -> Result:
    """Do what cannot be tried again, because other ranks count on it.

    Raises:
        RunError: if the memory does not hold it.
    """
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    raise RunError(
        "the memory must hold a rank's share of a batch, but does not; take a lower "
        "`training.batch_tokens` and a higher `training.accumulate`, or more ranks."
    )


def _backward(sums: LossSum, task: GradientTask) -> LossSum:
    """Add a task's gradients to those of the parameters."""
    (sums.loss / task.num_tokens).backward()  # type: ignore[no-untyped-call]
    return sums._replace(loss=sums.loss.detach())


def _seeds_from(seed: int) -> Iterator[int]:
    """Yield the seed of a share, then those of its halves, if it comes to that."""
    yield seed
    rng = random.Random(seed)
    while True:
        yield rng.getrandbits(62)
