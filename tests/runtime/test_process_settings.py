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
