"""What was left out of the training: every pair with its place and the reason, and their counts.

Older runs have `dropped.tsv` and `dropped.json` instead, which are read too.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from pydantic import TypeAdapter, ValidationError

from mtrain.errors import DataError, RunError
from mtrain.io.lines import read_lines

LEDGER_FILE = "ledger.jsonl.gz"
_COUNTS_FILE = "ledger.json"
_OLD_LEDGER_FILE, _OLD_COUNTS_FILE = "dropped.tsv", "dropped.json"


class DroppedPair(NamedTuple):
    """A pair that is left out of the training, and why: the name of a rule of the audit.

    Of a mixture, `corpus` is what the config calls the corpus.
    """

    file: str
    line: int
    reason: str
    corpus: str | None = None


class DroppedWriter:
    """A ledger that is being written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.counts: Counter[str] = Counter()

    def add(self, drop: DroppedPair) -> None:
        """Enter a pair."""
        self.counts[drop.reason] += 1
        entry = {key: value for key, value in drop._asdict().items() if value is not None}
        self._stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


_COUNTS, _DROP = TypeAdapter(dict[str, int]), TypeAdapter(DroppedPair)


@contextmanager
def writing(path: Path) -> Iterator[DroppedWriter]:
    """Give a ledger to write, or a part of one; the same entries give the same bytes."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as zipped,
        io.TextIOWrapper(zipped, "utf-8", newline="\n") as stream,
    ):
        yield DroppedWriter(stream)


def join(parts: Iterable[Path], counts: Mapping[str, int], directory: Path) -> None:
    """Make one ledger of its parts, with their counts."""
    with (directory / LEDGER_FILE).open("wb") as whole:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, whole)
    (directory / _COUNTS_FILE).write_text(json.dumps(counts), encoding="utf-8")


def read_counts(directory: Path) -> dict[str, int]:
    """Return how many pairs were left out, by reason.

    Raises:
        RunError: if the file is missing or damaged.
    """
    path = _counts_path(directory)
    try:
        return _COUNTS.validate_json(path.read_bytes(), strict=True)
    except OSError:
        raise RunError(f"{path}: is missing; restore it from a copy of the run.") from None
    except ValidationError:
        raise RunError(
            f"{path}: must be counts by their reasons, but is not; restore it from a copy of the "
            "run."
        ) from None


def check(directory: Path) -> None:
    """Hold the ledger to list what was counted.

    Raises:
        RunError, DataError: if it does not, or cannot be read.
    """
    counts_path = _counts_path(directory)
    path = directory / (_OLD_LEDGER_FILE if _is_old(directory) else LEDGER_FILE)
    if Counter(_reasons(path)) != read_counts(directory):
        raise RunError(f"{path}: must list what {counts_path.name} counts, but does not.")


def format_counts(counts: Mapping[str, int]) -> str:
    """Say how many pairs are left out, and why."""
    why = ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items()))
    return f"{sum(counts.values()):,}" + (f" ({why})" if why else "")


def format_precedence(reasons: Iterable[str]) -> str:
    """Say what to change so that pairs are not left out for these reasons."""
    keys = {"`data.max_tokens`" if reason == "max-tokens" else "`data.clean`" for reason in reasons}
    return " or ".join(["the text", *sorted(keys)])


def none_left(key: str, counts: Mapping[str, int]) -> DataError:
    """Return what is wrong with a corpus of which all pairs are left out."""
    return DataError(
        f"`{key}` must have a pair that can be used, but all are left out: "
        f"{format_counts(counts)}; "
        f"change {format_precedence(counts)}."
    )


def _is_old(directory: Path) -> bool:
    return (directory / _OLD_COUNTS_FILE).exists() or (directory / _OLD_LEDGER_FILE).exists()


def _counts_path(directory: Path) -> Path:
    return directory / (_OLD_COUNTS_FILE if _is_old(directory) else _COUNTS_FILE)


def _reasons(path: Path) -> Iterator[str]:
    for line in read_lines(path):
        if path.name == _OLD_LEDGER_FILE:
            yield line.rpartition("\t")[2]
            continue
        try:
            yield _DROP.validate_json(line, strict=True).reason
        except ValidationError:
            raise RunError(f"{path}: is damaged; restore it from a copy of the run.") from None
