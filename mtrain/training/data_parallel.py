"""Gradients of an update over several ranks: PyTorch's DistributedDataParallel and fully_shard.

Each rank computes its own micro-batches, as `data.batch.MicroBatchSplit` assigns them. Gradients
are exchanged once per update, bucket by bucket, during the backward pass of a rank's last
micro-batch.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mtrain.config.sections import TrainingConfig
from mtrain.data.batch import Batch, UpdateBatches
from mtrain.errors import ConfigError, RunError
from mtrain.model.transformer import Transformer
from mtrain.runtime.process_group import ProcessGroup
from mtrain.training.gradients import Gradients, GradientTask
from mtrain.training.loss import LossSum, loss_of
from mtrain.training.sharded_model import ShardedModel


class LossModel(nn.Module):
    """The model and its loss in one `forward`; DDP and FSDP only hook `forward`."""

    def __init__(self, model: Transformer, config: TrainingConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(self, batch: Batch) -> LossSum:
        """Return the loss sums of a batch, cloned because fully_shard warns about views."""
        sums = loss_of(self.model, batch, self.config)
        return LossSum(sums.loss.clone(), sums.nll.clone(), sums.num_tokens)


class DataParallelGradients(Gradients, ABC):
    """Accumulates the gradients of an update and averages them over all ranks.

    A rank computes each micro-batch as one task in one thread. All ranks draw the same dropout
    seed for a micro-batch, so its dropout does not depend on the rank that computes it. Model,
    config, device and `say` are those of `alone`, the gradients of a single rank.
    """

    def __init__(self, alone: Gradients, process_group: ProcessGroup) -> None:
        super().__init__(alone.model, alone.config, alone.device, alone.say)
        self.process_group = process_group

    def backward_update(self, update: UpdateBatches, scale: float = 1.0) -> list[LossSum]:
        """Add the gradients of an update, times `scale`; return this rank's loss sums.

        The loss of a dummy micro-batch is divided by inf: it only takes part in the collectives.

        Raises:
            RunError: if memory runs out and the batch cannot be halved.
        """
        self.model.train()
        rank, size = self.process_group.rank, self.process_group.size
        seeds = torch.randint(2**62, (update.split.num_micro_batches,)).tolist()[rank::size]
        num_tokens = update.num_tokens / (scale * size)  # the all-reduce averages over the ranks
        sums = []
        for micro_batch, seed in zip(update.micro_batches, seeds, strict=True):
            divisor = math.inf if micro_batch.is_dummy else num_tokens
            is_last = micro_batch is update.micro_batches[-1]
            parts = self.backward_micro_batch(
                micro_batch.batch, divisor, _seeds_from(seed), is_last
            )
            sums += [] if micro_batch.is_dummy else parts
        return sums

    @abstractmethod
    def backward_micro_batch(
        self, batch: Batch, num_tokens: float, seeds: Iterator[int], is_last: bool
    ) -> list[LossSum]:
        """Add a micro-batch's gradients; after the last one, reduce the sum over the ranks."""

    def _must_fit(self, work: Callable[[], LossSum]) -> LossSum:
        """Run `work`, which contains collectives and therefore cannot be retried in halves."""
        sums = self.try_to(work)
        if sums is None:
            raise RunError(
                "the memory must hold a rank's micro-batch, but does not; take a lower "
                "`training.batch_tokens` and a higher `training.accumulate`, or more ranks."
            )
        return sums


class DDPGradients(DataParallelGradients):
    """DistributedDataParallel: every rank holds the full model and optimizer state.

    Raises:
        ConfigError: if DDP does not support the dtype `training.exchange` on this device.
    """

    def __init__(self, alone: Gradients, process_group: ProcessGroup) -> None:
        super().__init__(alone, process_group)
        if self.config.exchange == "bfloat16" and self.device.type != "cuda":
            raise ConfigError(
                "`training.exchange` must be float32 for `training.parallel: ddp` on a CPU, where "
                "PyTorch has no hook for it, but is 'bfloat16' instead."
            )
        self._ddp = DistributedDataParallel(
            LossModel(self.model, self.config), gradient_as_bucket_view=True
        )
        if self.config.exchange == "bfloat16":
            self._ddp.register_comm_hook(None, bf16_compress_hook)

    def probe_memory(self, batch: Batch) -> None:
        """Run a batch, halved if necessary; set `oom_size` to the minimum over all ranks."""
        self.backward_batch(batch, batch.num_tgt_tokens, _seeds_from(0))
        least = self.process_group.all_reduce_min(self.oom_size)
        if least < self.oom_size:
            self.say(
                f"memory   of another rank does not hold a micro-batch of {least:,.0f} tokens; "
                "such micro-batches are made in halves, and the updates stay the same"
            )
        self.oom_size = least

    def warm_up(self, batch: Batch) -> None:
        """All-reduce the gradients of a single pair.

        DDP rebuilds its buckets after the first all-reduce, in the order in which gradients became
        ready; after a warm-up, resumed and uninterrupted training sum in the same order.
        """
        self._exchange(batch.split(len(batch.src_BS))[0], math.inf, _seeds_from(0))

    def backward_micro_batch(
        self, batch: Batch, num_tokens: float, seeds: Iterator[int], is_last: bool
    ) -> list[LossSum]:
        """Add a micro-batch's gradients; only the last one runs through DDP, which all-reduces."""
        backward = self._exchange if is_last else self.backward_batch
        return backward(batch, num_tokens, seeds)

    def _exchange(self, batch: Batch, num_tokens: float, seeds: Iterator[int]) -> list[LossSum]:
        """Add a batch's gradients and all-reduce; if it is halved, the last half all-reduces."""
        if self.may_fit(batch):
            (task,) = self.split_over_threads(batch, num_tokens, seeds)
            with self.seeded(task):
                sums: LossSum | None = self.try_to(lambda: self._ddp(task.batch))
                if sums is not None:
                    return [self._must_fit(lambda: _backward(sums, task))]
            self.note_oom(batch)
        first, last = batch.split(2)
        return self.backward_batch(first, num_tokens, seeds) + self._exchange(
            last, num_tokens, seeds
        )


class FSDPGradients(DataParallelGradients):
    """fully_shard: every rank holds a shard of each parameter and of its optimizer state.

    A layer's weights are all-gathered while it computes. All ranks must issue the same collectives
    in the same order, so a single rank cannot halve a batch.
    """

    def __init__(self, alone: Gradients, process_group: ProcessGroup) -> None:
        mesh = init_device_mesh(alone.device.type, (process_group.size,))
        exchange = alone.config.exchange
        policy = MixedPrecisionPolicy(
            reduce_dtype=torch.bfloat16 if exchange == "bfloat16" else None
        )
        for layer in (*alone.model.encoder, *alone.model.decoder):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self._loss_model = LossModel(alone.model, alone.config)
        self._fsdp = fully_shard(self._loss_model, mesh=mesh, mp_policy=policy)  # modified in place
        super().__init__(alone, process_group)
        self.sharded = ShardedModel(self.model, self._fsdp, process_group)

    def probe_memory(self, batch: Batch) -> None:
        """Run a forward and backward pass of a batch.

        Raises:
            RunError: if it does not fit into the memory of a rank.
        """
        self.backward_micro_batch(batch, batch.num_tgt_tokens, _seeds_from(0), is_last=True)

    def backward_micro_batch(
        self, batch: Batch, num_tokens: float, seeds: Iterator[int], is_last: bool
    ) -> list[LossSum]:
        """Add a micro-batch's gradients; reduce-scatter them if it is the last."""
        self._fsdp.set_requires_gradient_sync(is_last)
        (task,) = self.split_over_threads(batch, num_tokens, seeds)
        with self.seeded(task):
            return [self._must_fit(lambda: _backward(self._loss_model(task.batch), task))]


def _backward(sums: LossSum, task: GradientTask) -> LossSum:
    """Add a task's gradients to `parameter.grad`; return its loss sums."""
    (sums.loss / task.num_tokens).backward()  # type: ignore[no-untyped-call]
    return sums._replace(loss=sums.loss.detach())


def _seeds_from(seed: int) -> Iterator[int]:
    """Yield the dropout seed of a micro-batch, then the seeds of its halves."""
    yield seed
    rng = random.Random(seed)
    while True:
        yield rng.getrandbits(62)
