"""Validation with a sharded model: its layers are all-gathered one at a time.

An all-gather needs all ranks, but each rank decodes its own sources, with its own number of passes
through the encoder and the decoder. Before each pass, the ranks agree on the stack to run next. A
rank that needs no pass through that stack still takes part in the all-gathers of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mtrain.model.kv_cache import KVCache, Slots
from mtrain.model.transformer import Transformer
from mtrain.runtime.process_group import ProcessGroup

Stack = Sequence[FSDPModule]
_STACKS = ("encoder", "decoder")  # attributes of the model, in the order of gathering


class LockstepGroup(ProcessGroup):
    """A process group whose ranks run the layers of a sharded model in lockstep.

    If ranks wait for different stacks, the one that is first in `stacks` runs first. Every other
    collective waits until no rank has a pass left to make.
    """

    def __init__(self, process_group: ProcessGroup, stacks: Sequence[Stack]) -> None:
        self._process_group, self._stacks = process_group, stacks
        self.rank, self.size = process_group.rank, process_group.size

    def start_pass(self, number: int) -> None:
        """Wait until no rank needs a stack before `number`; take part in gathering those."""
        while (first := int(self._process_group.all_reduce_min(number))) != number:
            for layer in self._stacks[first]:
                layer.unshard()
                layer.reshard()

    def finish_passes(self) -> None:
        """Take part in the passes of other ranks until no rank has a pass left to make."""
        self.start_pass(len(self._stacks))

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Return the elementwise sum over all ranks."""
        self.finish_passes()
        return self._process_group.all_reduce_sum(numbers)

    def all_reduce_min(self, number: float) -> float:
        """Return the minimum over all ranks."""
        self.finish_passes()
        return self._process_group.all_reduce_min(number)

    def broadcast_float(self, number: float) -> float:
        """Return the number of rank 0."""
        self.finish_passes()
        return self._process_group.broadcast_float(number)

    def broadcast_bytes(self, message: bytes) -> bytes:
        """Return the message of rank 0."""
        self.finish_passes()
        return self._process_group.broadcast_bytes(message)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in the order of ranks."""
        self.finish_passes()
        return self._process_group.all_gather_bytes(message)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.finish_passes()
        self._process_group.barrier()


class _GatheredLayer:
    """A sharded layer, gathered while one of its methods runs.

    Bypasses the hooks of fully_shard on `forward`: they record the order of layers for the next
    backward pass, and here that order differs between the ranks. `start_pass` is called before the
    layer runs; only the first layer of a stack has it.
    """

    def __init__(self, layer: nn.Module, start_pass: Callable[[], None] | None = None) -> None:
        self._layer, self._start_pass = cast(Any, layer), start_pass

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self._gathered(self._layer.forward, *inputs)

    def project_source(self, memory_RD: Tensor) -> Tensor:
        """Call `DecoderLayer.project_source`."""
        return self._gathered(self._layer.project_source, memory_RD)

    def decode_step(self, x_ND: Tensor, cache: KVCache, index: int, slots: Slots) -> Tensor:
        """Call `DecoderLayer.decode_step`."""
        return self._gathered(self._layer.decode_step, x_ND, cache, index, slots)

    def _gathered(self, method: Callable[..., Tensor], *inputs: object) -> Tensor:
        if self._start_pass is not None:
            self._start_pass()
        self._layer.unshard()
        try:
            return method(*inputs)
        finally:
            self._layer.reshard()


class _GatheringTransformer(Transformer):
    """A Transformer that shares a sharded model's modules and gathers each layer while it runs."""

    def __init__(self, model: Transformer, process_group: LockstepGroup) -> None:
        nn.Module.__init__(self)
        self.config = model.config
        self.compute_dtype, self.cache_dtype = model.compute_dtype, model.cache_dtype
        for name, module in model.named_children():
            if name in _STACKS:
                start_pass = partial(process_group.start_pass, _STACKS.index(name))
                first, *following = module.children()
                layers = [_GatheredLayer(first, start_pass), *map(_GatheredLayer, following)]
            setattr(self, name, layers if name in _STACKS else module)


class ShardedModel:
    """A sharded model for validation, and the process group to validate with.

    Args:
        model: the model; each layer is sharded on its own.
        root: the sharded module that holds all other weights.
        process_group: the ranks.

    Attributes:
        model: for validation; shares the weights of the argument `model`.
        process_group: for validation; keeps the ranks in lockstep.
    """

    def __init__(self, model: Transformer, root: FSDPModule, process_group: ProcessGroup) -> None:
        self._sharded, self._root = model, root
        stacks = [cast(Stack, getattr(model, name)) for name in _STACKS]
        self.process_group = LockstepGroup(process_group, stacks)
        self.model: Transformer = _GatheringTransformer(model, self.process_group)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights outside of the layers, and compute in one thread.

        Several threads would issue the collectives of a rank in any order.
        """
        num_threads = torch.get_num_threads()
        self._sharded.eval()
        torch.set_num_threads(1)
        self._root.unshard()
        try:
            yield
            self.process_group.finish_passes()
        finally:
            self._root.reshard()
            torch.set_num_threads(num_threads)
