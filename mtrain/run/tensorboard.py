"""TensorBoard: the numbers of `metrics.jsonl` as scalars.

Imports tensorboard at the first number.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

_VALIDATION = "valid_"  # prefix of the metrics of a validation


def check_installed() -> None:
    """Check that tensorboard is installed.

    Raises:
        ConfigError: with how to install it.
    """
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "`--log tensorboard` must have tensorboard: pip install 'mtrain[tensorboard]' adds it."
        )


class Board:
    """Writes event files into a folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._last_step = 0

    def drop_after(self, step: int) -> None:
        """Purge later steps, which are about to be repeated."""
        self._last_step = step

    def add(self, values: Mapping[str, object]) -> None:
        """Write the numbers of one logged step or validation, at once.

        Raises:
            OSError: if the disk does not take them.
        """
        step = values["step"]
        assert isinstance(step, int)
        group = "valid" if any(key.startswith(_VALIDATION) for key in values) else "train"
        for key, value in values.items():
            if key != "step" and isinstance(value, int | float):
                tag = f"{group}/{key.removeprefix(_VALIDATION)}"
                self._open().add_scalar(tag, value, step)
        self._open().flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=self._last_step + 1)
        return self._writer
