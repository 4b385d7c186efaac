"""Options that say how runs are loaded, turned into settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtrain.cli import options

if TYPE_CHECKING:
    from mtrain.run.load_model import LoadOptions


def load_options(device: str, precision: options.Precision, step: int | None = None) -> LoadOptions:
    """Return how the command line wants runs to be loaded."""
    from mtrain.run.load_model import LoadOptions

    return LoadOptions(device, precision.value, step)
