"""Garbage collection and OpenMP settings change only in a process of mtrain's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import gc
from mtrain.runtime import process_settings
before, num_frozen = gc.get_threshold(), gc.get_freeze_count()  # Python 3.12 freezes some itself
if {is_own}:
    process_settings.own_process()
process_settings.keep_loaded_objects()
print(gc.get_threshold() != before, gc.get_freeze_count() > num_frozen)
"""


@pytest.mark.parametrize("is_own", [True, False])
def test_garbage_collection_settings_change_only_in_a_process_of_mtrains_own(is_own: bool) -> None:
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


def test_garbage_collection_starts_after_500000_objects_and_objects_are_frozen_at_exit() -> None:
    program = [sys.executable, "-c", STARTING]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["500000", "True", "20000", "False", "True"]


OWNED = """
import os
from mtrain.runtime import process_settings
if {is_own}:
    process_settings.own_process()
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("is_own", "given", "expected"),
    [
        (True, {}, "1000"),
        (True, {"GOMP_SPINCOUNT": "5"}, "5"),
        (True, {"OMP_WAIT_POLICY": "active"}, "None"),
        (False, {}, "None"),
    ],
)
def test_threads_of_openmp_hardly_spin_unless_the_user_says_otherwise(
    is_own: bool, given: dict[str, str], expected: str
) -> None:
    own = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {key: text for key, text in os.environ.items() if key not in own} | given
    program = [sys.executable, "-c", OWNED.format(is_own=is_own)]
    ended = subprocess.run(program, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.strip() == expected
