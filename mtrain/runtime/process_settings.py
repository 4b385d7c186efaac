"""Settings of the whole process: garbage collection, and whether others may be changed.

The command line changes them. A program that imports mtrain keeps its own.
"""

from __future__ import annotations

import gc
import threading

_OWNED = threading.Event()
_COLLECTED_AT = 20_000  # new objects; at Python's 700, collections are a tenth of a start


def own_process() -> None:
    """Let `device.keep_freed_memory` and `device.avoid_cudnn_attention` take effect from now on.

    Garbage is collected less often, too: importing PyTorch makes 170,000 objects that stay.
    """
    _OWNED.set()
    gc.set_threshold(_COLLECTED_AT)


def is_own_process() -> bool:
    """Return whether `own_process` has been called."""
    return _OWNED.is_set()


def keep_loaded_objects() -> None:
    """Keep garbage collections from looking at what is loaded, if the process is mtrain's own.

    For a process that loads models once and then runs for long.
    """
    if is_own_process():
        gc.collect()
        gc.freeze()
