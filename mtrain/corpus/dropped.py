"""The list of pairs that were dropped from training, each with its file, line and reason."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from pydantic import TypeAdapter, ValidationError

from mtrain.errors import DataError, RunError, damaged
from mtrain.io.lines import open_gzip_writer, read_lines

DROPPED_FILE = "dropped.jsonl.gz"
_COUNTS_FILE = "dropped.json"


class DroppedPair(NamedTuple):
    """A pair that is dropped from training, and the reason."""

    file: str  # the source file
    line: int  # the line number, from 1
    reason: str  # the name of a rule of the audit
    corpus: str | None = None  # the key of the corpus in the config; None without a mixture


_COUNTS, _PAIR = TypeAdapter(dict[str, int]), TypeAdapter(DroppedPair)


class DroppedWriter:
    """Writes a list of dropped pairs, and counts them by reason."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.counts: Counter[str] = Counter()

    def add(self, pair: DroppedPair) -> None:
        """Write a pair."""
        self.counts[pair.reason] += 1
        entry = {key: value for key, value in pair._asdict().items() if value is not None}
        self._stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


@contextmanager
def open_writer(path: Path) -> Iterator[DroppedWriter]:
    """Open a list, or a part of it, for writing; the same pairs result in the same bytes."""
    with open_gzip_writer(path) as stream:
        yield DroppedWriter(stream)


def join(parts: Iterable[Path], counts: Mapping[str, int], directory: Path) -> None:
    """Concatenate the parts of a list into a folder, and write the counts."""
    with (directory / DROPPED_FILE).open("wb") as output:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, output)
    (directory / _COUNTS_FILE).write_text(json.dumps(counts), encoding="utf-8")


def read_counts(directory: Path) -> dict[str, int]:
    """Return the number of dropped pairs by reason.

    Raises:
        RunError: if the file is missing or damaged.
    """
    path = directory / _COUNTS_FILE
    try:
        return _COUNTS.validate_json(path.read_bytes(), strict=True)
    except OSError:
        raise damaged(path, "is missing") from None
    except ValidationError:
        raise damaged(path, "is damaged") from None


def check(directory: Path) -> None:
    """Check that the list has as many pairs of each reason as the counts.

    Raises:
        RunError, DataError: if they differ, or a file cannot be read.
    """
    path, counts = directory / DROPPED_FILE, Counter[str]()
    for line in read_lines(path):
        try:
            counts[_PAIR.validate_json(line, strict=True).reason] += 1
        except ValidationError:
            raise damaged(path, "is damaged") from None
    if counts != read_counts(directory):
        raise RunError(f"{path}: must list what {_COUNTS_FILE} counts, but does not.")


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts of dropped pairs by reason: "3 (blank-side 2, max-tokens 1)"."""
    why = ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items()))
    return f"{sum(counts.values()):,}" + (f" ({why})" if why else "")


def format_remedy(reasons: Iterable[str]) -> str:
    """Format what to change to keep the pairs that were dropped for these reasons."""
    keys = {"`data.max_tokens`" if reason == "max-tokens" else "`data.clean`" for reason in reasons}
    return " or ".join(["the text", *sorted(keys)])


def none_left(key: str, counts: Mapping[str, int], remedy: str = "") -> DataError:
    """Return the error for the corpus `key` whose pairs are all dropped.

    `remedy` is what to change, if not the text and the keys of the config.
    """
    return DataError(
        f"`{key}` must have a pair that can be used, but all are dropped: "
        f"{format_counts(counts)}; change {remedy or format_remedy(counts)}."
    )
