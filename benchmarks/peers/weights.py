"""mtrain's weights under the names of another toolkit."""

from __future__ import annotations

import re

from torch import Tensor

Weights = dict[str, Tensor]
Names = dict[str, list[str]]  # of a layer's modules; a matrix is cut by rows into as many as named

_LAYER = re.compile(r"(encoder|decoder)\.(\d+)\.(.+)\.(weight|bias)")


def rename_layers(own: Weights, encoder: Names, decoder: Names, prefix: str = "") -> Weights:
    """Return the weights of all layers as those of PREFIX{encoder,decoder}.layers.N."""
    found: Weights = {}
    for name, weight in own.items():
        if match := _LAYER.fullmatch(name):
            stack, index, module, kind = match.groups()
            targets = (encoder if stack == "encoder" else decoder)[module]
            for target, part in zip(targets, weight.chunk(len(targets)), strict=True):
                found[f"{prefix}{stack}.layers.{index}.{target}.{kind}"] = part
    return found
