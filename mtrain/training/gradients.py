"""Gradients of an update: forward and backward in threads, out-of-memory halving, loss scaling.

Independent of optimizers, checkpoints and process groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mtrain.config.sections import TrainingConfig
from mtrain.data.batch import Batch, UpdateBatches
from mtrain.errors import RunError
from mtrain.model.transformer import Transformer
from mtrain.ops.dropout import dropout_seeds
from mtrain.runtime.threads import ThreadPool
from mtrain.training.loss import LossSum, loss_of

LEAST_TOKENS = 256  # target tokens per thread; with fewer, another thread saves no time
# Loss scaling for float16; the interval is in updates.
INITIAL_SCALE, MAX_SCALE, GROWTH_INTERVAL = 2.0**16, 2.0**24, 2000
_OUT_OF_MEMORY = ("can't allocate memory", "could not create a primitive")  # PyTorch, oneDNN
Result = TypeVar("Result")


class GradientTask(NamedTuple):
    """One forward and backward pass."""

    batch: Batch  # on the device of the model
    num_tokens: float  # divisor of the summed loss, usually the target tokens of the whole update
    seed: int | None  # of dropout; None uses PyTorch's default generator


class GradientPart(NamedTuple):
    """The result of a task: its loss sums, and one gradient per parameter."""

    sums: LossSum
    grads: tuple[Tensor, ...]


class Gradients:
    """Accumulates the gradients of an update in `parameter.grad`, on one rank.

    `backward_update` calls `backward_batch` for each micro-batch, which runs `backward` on the
    tasks of `split_over_threads`, one per thread, and sums their gradients. A batch that does not
    fit into memory is halved, and so is every later batch of at least its size; the divisor is
    the token count of the whole update, so the gradient does not change.

    Args:
        model: in training.
        config: of the training; only the settings of the loss are used.
        device: of the model.
        say: called with a message when a batch does not fit into memory.
    """

    def __init__(
        self,
        model: Transformer,
        config: TrainingConfig,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.config, self.device, self.say = model, config, device, say
        self.parameters = list(model.parameters())
        self.workers = ThreadPool()
        self.oom_size = math.inf  # `num_positions` of the smallest batch that did not fit

    def backward_update(self, update: UpdateBatches, scale: float = 1.0) -> list[LossSum]:
        """Add the gradients of an update, times `scale`; return the loss sums of its parts.

        Raises:
            RunError: if a single pair does not fit into memory.
        """
        divisor = update.num_tokens / scale
        return [
            part
            for micro_batch in update.micro_batches
            for part in self.backward_batch(micro_batch.batch, divisor)
        ]

    def pin(self, update: UpdateBatches) -> UpdateBatches:
        """Return an update in pinned memory if the device is a GPU; thread-safe."""
        if self.device.type != "cuda":
            return update
        with torch.cuda.device(self.device):  # a new thread starts on cuda:0
            micro_batches = [
                micro_batch._replace(batch=micro_batch.batch.pinned())
                for micro_batch in update.micro_batches
            ]
        return update._replace(micro_batches=micro_batches)

    def probe_memory(self, batch: Batch) -> None:
        """Run a batch to set `oom_size` if it does not fit; the caller discards the gradients."""
        self.backward_batch(batch, batch.num_tgt_tokens)

    def warm_up(self, batch: Batch) -> None:
        """Do nothing; DDP overrides it. `batch` has passed `probe_memory`."""

    def backward_batch(
        self, batch: Batch, num_tokens: float, seeds: Iterator[int] | None = None
    ) -> list[LossSum]:
        """Add a batch's gradients; return the loss sums of the parts into which it was split.

        The arguments are those of `split_over_threads`.

        Raises:
            RunError: if a single pair does not fit into memory.
        """
        self.model.train()
        if self.may_fit(batch):
            tasks = self.split_over_threads(batch, num_tokens, seeds)
            parts = self.try_to(lambda: self.workers.map(self.backward, tasks))
            if parts is not None:
                for part in parts:
                    self._accumulate(part.grads)
                return [part.sums for part in parts]
            self.note_oom(batch)
        halves = batch.split(2)
        return [part for half in halves for part in self.backward_batch(half, num_tokens, seeds)]

    def may_fit(self, batch: Batch) -> bool:
        """Return whether to try a batch: it is smaller than `oom_size`, or cannot be split."""
        return batch.num_positions < self.oom_size or len(batch.src_BS) == 1

    def try_to(self, work: Callable[[], Result]) -> Result | None:
        """Return the result of `work`; None if memory runs out."""
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def note_oom(self, batch: Batch) -> None:
        """Set `oom_size` to the size of a batch that does not fit into memory, and report it.

        Raises:
            RunError: if it is a single pair.
        """
        if len(batch.src_BS) == 1:
            raise RunError(
                "the memory must hold a single training pair, but does not; take a smaller model "
                "or a lower `data.max_tokens`."
            )
        self.oom_size = batch.num_positions
        self.say(
            f"memory   does not hold a batch of {len(batch.src_BS):,} pairs; such batches are made "
            "in halves, and the updates stay the same"
        )

    def split_over_threads(
        self, batch: Batch, num_tokens: float, seeds: Iterator[int] | None = None
    ) -> list[GradientTask]:
        """Split a batch into tasks: one per thread on a CPU, a single one on a GPU.

        Args:
            batch: to split by rows; on the CPU, or pinned.
            num_tokens: divisor of the loss.
            seeds: of dropout, for data-parallel training: each rank computes in one thread, so that
                the batch stays a single task, which takes the next seed. If None, a CPU draws a
                seed per task from PyTorch's generator, and a GPU uses its generator directly.
        """
        if seeds is not None:
            return [GradientTask(batch.to(self.device), num_tokens, next(seeds))]
        if self.device.type != "cpu":
            return [GradientTask(batch.to(self.device), num_tokens, None)]
        num_parts = min(self.workers.count, max(1, batch.num_tgt_tokens // LEAST_TOKENS))
        drawn = torch.randint(2**62, (num_parts,)).tolist()
        batches = batch.split(num_parts) if num_parts > 1 else [batch]
        return [
            GradientTask(part, num_tokens, seed) for part, seed in zip(batches, drawn, strict=False)
        ]

    def backward(self, task: GradientTask) -> GradientPart:
        """Compute the loss sums and gradients of a task; leave `parameter.grad` unchanged."""
        with self.seeded(task):
            sums = loss_of(self.model, task.batch, self.config)
            grads = torch.autograd.grad(sums.loss / task.num_tokens, self.parameters)
        return GradientPart(sums, grads)

    @contextmanager
    def seeded(self, task: GradientTask) -> Iterator[None]:
        """Draw dropout masks from the task's seed; on a GPU, PyTorch's generator draws them."""
        if self.device.type == "cuda" and task.seed is not None:
            torch.cuda.manual_seed(task.seed)
        with dropout_seeds(task.seed):
            yield

    def _accumulate(self, grads: tuple[Tensor, ...]) -> None:
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad


class GradScaler:
    """Dynamic loss scaling for float16, "Mixed Precision Training" (arXiv 1710.03740), section 3.2.

    The scale is halved after a non-finite gradient, and doubled after `GROWTH_INTERVAL` finite
    gradients in a row. It is a power of two, so scaling is exact. It stays 1 unless the `dtype` of
    the matrix products is float16.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.is_enabled = dtype is torch.float16
        self.scale = INITIAL_SCALE if self.is_enabled else 1.0
        self.growth_tracker = 0  # finite gradients in a row at this scale

    def restore(self, scale: float, growth_tracker: int) -> None:
        """Restore the scale of a checkpoint; 0 means that it was saved without loss scaling."""
        if self.is_enabled and scale:
            self.scale, self.growth_tracker = scale, growth_tracker

    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.is_enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.scale

    def update(self, is_finite: bool) -> None:
        """Update the scale after a gradient that was or was not finite."""
        if not self.is_enabled:
            return
        self.growth_tracker = self.growth_tracker + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.growth_tracker == GROWTH_INTERVAL:
            self.scale, self.growth_tracker = min(MAX_SCALE, 2 * self.scale), 0


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of PyTorch or Python means that memory ran out."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)
