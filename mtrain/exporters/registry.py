"""The libraries that a model can be exported to; `--to` offers them.

Imports no library and no PyTorch until `exporters` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mtrain.exporters.exporter import Exporter

Library = Literal["ctranslate2", "huggingface", "argos", "marian", "onnx"]
Quantization = Literal["int8", "float16", "bfloat16"]


def exporters() -> dict[Library, Exporter]:
    """Return the exporter of each library."""
    from mtrain.exporters import argos, ctranslate2, huggingface, marian, onnx

    return {
        "ctranslate2": ctranslate2,
        "huggingface": huggingface,
        "argos": argos,
        "marian": marian,
        "onnx": onnx,
    }
