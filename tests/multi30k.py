"""Where Multi30k is at hand: real text for the tests that want some."""

import os
from pathlib import Path

import pytest
from tasks import REPOSITORY

FOLDER = Path(os.environ.get("MTRAIN_MULTI30K") or REPOSITORY / "data" / "multi30k")
needs_multi30k = pytest.mark.skipif(
    not (FOLDER / "train.en").is_file(),
    reason="Multi30k is neither in MTRAIN_MULTI30K nor in data/multi30k",
)
