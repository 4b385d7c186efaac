"""A corpus folder of `mtrain augment`: JSON-lines shards, and a record of settings and counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtrain.errors import DataError

RECORD_FILE = "record.json"
_TYPES = {"settings": dict, "shards": dict, "num_pairs": int}


def read_record(directory: Path) -> dict[str, Any]:
    """Return the record of a corpus folder.

    Raises:
        DataError: if it is missing or damaged.
    """
    path = directory / RECORD_FILE
    try:
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if all(isinstance(record.get(key), kind) for key, kind in _TYPES.items()):
            return record
        problem = "has another one"
    except OSError:
        problem = f"has no {RECORD_FILE}"
    except (ValueError, AttributeError, RecursionError):
        problem = f"its {RECORD_FILE} is damaged"
    raise DataError(
        f"{directory}: must be a corpus folder that `mtrain augment` has finished, but {problem}."
    )


def paths(directory: Path) -> list[str]:
    """Return the shards of a corpus folder, in order; an empty list if it has no valid record."""
    try:
        return [str(directory / name) for name in sorted(read_record(directory)["shards"])]
    except DataError:
        return []
