"""The gradient of an update: a batch's shares on the threads, in halves if the memory needs it.

It knows the model and its loss; nothing of optimizers, checkpoints or when an update is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.data.batch import Batch
from mtrain.data.sampler import UpdateBatches
from mtrain.errors import RunError
from mtrain.model.transformer import Transformer
from mtrain.ops import dropout
from mtrain.runtime.thread_pool import ThreadPool
from mtrain.train.loss import LossSum, label_smoothed

LEAST_TOKENS = 256  # target tokens that are worth a thread of their own
_OUT_OF_MEMORY = ("can't allocate memory", "could not create a primitive")  # PyTorch, oneDNN


class GradientTask(NamedTuple):
    """A part of an update: its pairs, what its loss is divided by, and what to drop.

    A single rank divides by the target tokens of the whole update.
    """

    batch: Batch
    num_tokens: float
    seed: int | None


class GradientPart(NamedTuple):
    """What came out of it; a gradient for each of the model's parameters."""

    sums: LossSum
    grads: tuple[Tensor, ...]


class Gradients:
    """Adds up the gradients of an update in the parameters of a model.

    Args:
        model: in training.
        smoothing: of the loss.
        device: where the model is.
        say: is told once how large a batch the memory does not hold.
    """

    def __init__(
        self,
        model: Transformer,
        smoothing: float,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.smoothing, self.device, self.say = model, smoothing, device, say
        self.parameters = list(model.parameters())
        self.workers = ThreadPool()
        self.room = math.inf  # places of a batch that the memory did not hold

    def backward_update(self, dealt: UpdateBatches, factor: float = 1.0) -> list[LossSum]:
        """Add the gradients of an update, `factor` times as large; return the sums of its parts.

        Raises:
            RunError: if the memory does not hold a single pair.
        """
        found = [self.accumulate(share.batch, dealt.num_tokens / factor) for share in dealt.shares]
        return [own for parts in found for own in parts]

    def lay_out(self, dealt: UpdateBatches) -> UpdateBatches:
        """Return an update as it is copied fastest; any thread may ask, ahead of time."""
        if self.device.type != "cuda":
            return dealt
        with torch.cuda.device(self.device):  # a thread of its own begins with the first GPU
            shares = [share._replace(batch=share.batch.pinned()) for share in dealt.shares]
        return dealt._replace(shares=shares)

    def probe_memory(self, batch: Batch) -> None:
        """Find out whether the memory holds a batch; leave no trace but what is known of it."""
        self.accumulate(batch, batch.num_tgt_tokens)

    def settle(self, batch: Batch) -> None:
        """Be ready for the first update, after what was tried out, `batch` among it."""

    def accumulate(self, batch: Batch, num_tokens: float) -> list[LossSum]:
        """Add a batch's gradients to those of the update, in halves if the memory needs it.

        Raises:
            RunError: if the memory does not hold a single pair.
        """
        self.model.train()
        if batch.num_places < self.room or len(batch.src_BS) == 1:
            parts = self._try(self.split_over_threads(batch, num_tokens))
            if parts is not None:
                for part in parts:
                    _add_grads(self.parameters, part.grads)
                return [part.sums for part in parts]
            self.note_oom(batch)
        return [own for half in batch.split(2) for own in self.accumulate(half, num_tokens)]

    def _try(self, tasks: list[GradientTask]) -> list[GradientPart] | None:
        """Return what comes out of the tasks; None if the memory does not hold them."""
        try:
            return self.workers.map(self.backward, tasks)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def note_oom(self, batch: Batch) -> None:
        """Remember the size of a batch that the memory does not hold, and say it.

        Raises:
            RunError: if it is a single pair.
        """
        if len(batch.src_BS) == 1:
            raise RunError(
                "the memory must hold a single training pair, but does not; take a smaller model "
                "or a lower `data.max_tokens`."
            )
        self.room = batch.num_places
        self.say(
            f"memory   does not hold a batch of {len(batch.src_BS):,} pairs; such batches are made "
            "in halves, and the updates stay the same"
        )

    def split_over_threads(self, batch: Batch, num_tokens: float) -> list[GradientTask]:
        """Split a batch over the threads of a CPU; a GPU takes it whole."""
        if self.device.type != "cpu":
            return [GradientTask(batch.to(self.device), num_tokens, None)]
        parts = min(self.workers.count, max(1, batch.num_tgt_tokens // LEAST_TOKENS))
        seeds = torch.randint(2**62, (parts,)).tolist()
        batches = batch.split(parts) if parts > 1 else [batch]
        return [
            GradientTask(part, num_tokens, seed) for part, seed in zip(batches, seeds, strict=False)
        ]

    def backward(self, task: GradientTask) -> GradientPart:
        """Return a batch's loss and its gradients, as a share of the update's tokens."""
        with dropout.dropout_seeds(task.seed):
            sums = self.loss(task.batch)
            grads = torch.autograd.grad(sums.loss / task.num_tokens, self.parameters)
        return GradientPart(sums, grads)

    def loss(self, batch: Batch) -> LossSum:
        """Return the sums of a batch's loss, with a gradient where one is wanted."""
        return loss_of(self.model, batch, self.smoothing)


def loss_of(model: Transformer, batch: Batch, smoothing: float) -> LossSum:
    """Return the sums of a batch's loss under a model."""
    states_BTD = model(batch.src_BS, batch.src_keep_BS, batch.tgt_in_BT)
    return label_smoothed(
        states_BTD,
        model.output.weight,
        batch.tgt_out_BT,
        batch.tgt_keep_BT,
        smoothing,
        batch.num_tgt_tokens,
        model.output.cross_entropy,
    )


def _add_grads(parameters: list[torch.nn.Parameter], grads: tuple[Tensor, ...]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad += grad


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that the memory does not hold something."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)
