"""What ranks that translate together tell each other, as JSON and safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple

from safetensors.torch import load, save
from torch import Tensor

from mtrain.decode.beam import Hypothesis
from mtrain.runtime.process_group import ProcessGroup

Found = list[list[list[Hypothesis]]]


def exchange(process_group: ProcessGroup, found: Found) -> Found:
    """Return what all ranks have found, in the order of the ranks: shares of sources of targets."""
    if process_group.size == 1:
        return found
    own = [[[astuple(one) for one in best] for best in share] for share in found]
    return [
        [[Hypothesis(*one) for one in best] for best in share]
        for message in process_group.all_gather_bytes(json.dumps(own).encode())
        for share in json.loads(message)
    ]


def exchange_numbers(
    process_group: ProcessGroup, found: Mapping[int, list[float]]
) -> dict[int, list[float]]:
    """Return the numbers that all ranks have found for rows, each for its own."""
    if process_group.size == 1:
        return dict(found)
    messages = process_group.all_gather_bytes(json.dumps(list(found.items())).encode())
    return {row: numbers for message in messages for row, numbers in json.loads(message)}


def exchange_tensors(process_group: ProcessGroup, found: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the tensors that all ranks have found for rows, each for its own."""
    if process_group.size == 1:
        return dict(found)
    own = {str(row): tensor.contiguous() for row, tensor in found.items()}
    messages = process_group.all_gather_bytes(save(own))
    return {int(row): tensor for message in messages for row, tensor in load(message).items()}
