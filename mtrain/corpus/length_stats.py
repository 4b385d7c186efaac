"""The usual range of lengths and length ratios of a training corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

STATS_FILE = "profile.json"
_SLACK_TOKENS = 5  # tolerance around the range of length ratios


class CorpusStats(NamedTuple):
    """Statistics of a training corpus; lengths are in tokens, eos included."""

    longest_src: int  # length of the longest source
    least_ratio: float  # range of target to source lengths, without rare outliers
    most_ratio: float
    share_copied: float  # fraction of pairs whose target equals the source

    def save(self, directory: Path) -> None:
        """Write the statistics into a folder of encoded pairs."""
        (directory / STATS_FILE).write_text(json.dumps(self._asdict()), encoding="utf-8")

    def holds(self, num_src: int, num_tgt: int) -> bool:
        """Return whether a target's length is in the usual range for its source."""
        least, most = self.least_ratio * num_src, self.most_ratio * num_src
        return least - _SLACK_TOKENS <= num_tgt <= most + _SLACK_TOKENS


def load(directory: Path) -> CorpusStats | None:
    """Return the statistics in a folder of encoded pairs; None if they are missing or damaged."""
    try:
        raw = (directory / STATS_FILE).read_bytes()
        return TypeAdapter(CorpusStats).validate_json(raw, strict=True)
    except (OSError, ValidationError):
        return None
