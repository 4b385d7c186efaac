"""Garbage collection changes in a process of mtrain's own, and in no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc
from mtrain.runtime import process_settings
before = gc.get_threshold()
if {is_own}:
    process_settings.own_process()
process_settings.keep_loaded_objects()
print(gc.get_threshold() != before, gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize("is_own", [True, False])
def test_garbage_collection_changes_only_in_an_own_process(is_own: bool) -> None:
    program = [sys.executable, "-c", PROGRAM.format(is_own=is_own)]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert output.split() == [str(is_own), str(is_own)]


STARTING = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 100_000))
from mtrain.runtime import process_settings
gc.collect()
process_settings.own_process()
for count in (450_000, 100_000):
    kept = [[] for _ in range(count)]
    print(gc.get_threshold()[0], gc.get_count()[0] > 450_000)
"""


def test_garbage_is_not_collected_while_pytorch_is_imported_nor_at_the_end() -> None:
    program = [sys.executable, "-c", STARTING]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["500000", "True", "20000", "False", "True"]
