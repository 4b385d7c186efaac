"""Lengths and length ratios that are usual in a training corpus."""

from __future__ import annotations

from typing import NamedTuple

_SLACK_TOKENS = 5  # by which a target may leave the range of length ratios


class CorpusStats(NamedTuple):
    """What is usual in a training corpus; lengths are tokens with eos.

    Attributes:
        longest_src: the longest source.
        least_ratio, most_ratio: of target to source lengths, of almost all pairs.
        share_copied: of the pairs, how many have a target that is the source.
    """

    longest_src: int
    least_ratio: float
    most_ratio: float
    share_copied: float

    def holds(self, num_src: int, num_tgt: int) -> bool:
        """Tell whether a target's length is like those of the corpus."""
        least, most = self.least_ratio * num_src, self.most_ratio * num_src
        return least - _SLACK_TOKENS <= num_tgt <= most + _SLACK_TOKENS
