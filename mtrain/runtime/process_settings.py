"""Whether mtrain may change settings of the whole process: its allocator and PyTorch's backends.

The command line may, whose process it is. A program that imports mtrain keeps its own settings.
"""

from __future__ import annotations

import threading

_OWNED = threading.Event()


def own_process() -> None:
    """Let `device.keep_freed_memory` and `device.avoid_cudnn_attention` take effect from now on."""
    _OWNED.set()


def is_own_process() -> bool:
    """Return whether `own_process` has been called."""
    return _OWNED.is_set()
