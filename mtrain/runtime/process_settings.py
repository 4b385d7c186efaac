"""Settings of the whole process: garbage collection, and whether mtrain may change the others.

The command line changes them. A program that imports mtrain keeps its own.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading

_OWNED = threading.Event()
_FIRST_COLLECTED_AT = 500_000  # new objects: importing PyTorch makes 250,000, and 170,000 stay
_SPINS = "1000"  # of GNU's OpenMP, whose default is 300,000
_COLLECTED_AT = 20_000  # from then on; Python's own is 700


def own_process() -> None:
    """Let `device.keep_freed_memory` and `device.avoid_cudnn_attention` take effect from now on.

    Garbage is collected less often, too: not while PyTorch is imported, and not at the end. OpenMP
    reads its settings when PyTorch is imported: threads that wait spin for microseconds only and
    leave the core to other programs, beside which an update would take half as long again.
    """
    if _OWNED.is_set():
        return
    _OWNED.set()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    atexit.register(gc.freeze)  # else the collection at exit traverses all objects of PyTorch
    gc.set_threshold(_FIRST_COLLECTED_AT)
    gc.callbacks.append(_collect_more_often)


def _collect_more_often(phase: str, info: dict[str, int]) -> None:
    """Lower the threshold at the first collection."""
    gc.set_threshold(_COLLECTED_AT)
    gc.callbacks.remove(_collect_more_often)


def is_own_process() -> bool:
    """Return whether `own_process` has been called."""
    return _OWNED.is_set()


def keep_loaded_objects() -> None:
    """Exclude all present objects from garbage collection, if the process is mtrain's own.

    For a process that loads models once and then runs for long.
    """
    if is_own_process():
        gc.collect()
        gc.freeze()
