"""Why a synthetic pair is dropped: its flags, the rules of the audit, and held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.audit import duplicates, rules
from mtrain.audit.duplicates import Leaks
from mtrain.audit.features import Feature, measure
from mtrain.audit.rules import PairBlock, Reasons
from mtrain.audit.scan import scan_corpora
from mtrain.config.corpora import TrainText, bidirectional_corpora
from mtrain.config.sections import DataConfig

# Flags of translations, and rules of the audit, that drop a pair.
FLAGS = ("copy", "empty", "length", "limit", "loop", "truncated", "unknown")
RULES = ("blank-side", "held-out", "copied", "length-ratio", "strange-script", "swapped")


class Candidate(NamedTuple):
    """A synthetic pair that may be dropped."""

    src: str
    tgt: str
    row: int  # its index in the part of the text
    flags: tuple[str, ...] = ()  # of the translation
    log_prob: float = 0.0
    score: float = 0.0
    agreement: float | None = None  # the judge's mean log-probability per token


class PairRules:
    """Judges synthetic pairs by statistics of the real ones, and by the held-out corpora of `data`.

    Temporary files are written to `directory`.

    Raises:
        DataError: if a corpus cannot be read.
    """

    def __init__(self, data: DataConfig, real: TrainText, directory: Path) -> None:
        judged = data.model_copy(update={"train": real, "clean": list(RULES)})
        *held_out, train = scan_corpora(judged, directory)
        self._rules = rules.dropping_rules(RULES)
        self._held_out = [Leaks(scan.exact, scan.keys) for scan in held_out]
        self._is_bidirectional = bool(bidirectional_corpora(real))
        self._profile = rules.learn(
            train.records.windows(), data.max_tokens, self._is_bidirectional
        )
        for scan in (*held_out, train):
            scan.records.path.unlink()
        features = reduce(or_, (rule.features for rule in self._rules), Feature.NONE)
        self._features = features & ~Feature.WORDS  # only a `SideClassifier` uses them

    def reasons(self, candidates: Sequence[Candidate], known: Sequence[tuple[str, str]]) -> Reasons:
        """Return why each candidate is dropped; None for those that are kept.

        Args:
            candidates: in the order of their rows.
            known: the real pair of each row; one side is empty if there is none.
        """
        if not candidates:
            return []
        src = measure([candidate.src for candidate in candidates], self._features)
        tgt = measure([candidate.tgt for candidate in candidates], self._features)
        exact, keys = duplicates.hashes_of(src, tgt)
        is_held = np.zeros(len(candidates), bool)
        for leaks in self._held_out:
            is_held |= leaks.look_up(exact, keys, 0, self._is_bidirectional)[0]
        no_repeats = np.zeros(len(candidates), np.uint32)
        block = PairBlock(src.lines, tgt.lines, no_repeats, no_repeats, is_held, is_held & False)
        reasons = rules.drop_reasons(self._rules, block, self._profile)
        src_keys, tgt_keys = src.keys.tolist(), tgt.keys.tolist()
        seen = _known_keys(known)
        for index, candidate in enumerate(candidates):
            flag = next((flag for flag in FLAGS if flag in candidate.flags), None)
            key = candidate.row, src_keys[index], tgt_keys[index]
            if reasons[index] != "held-out":
                reasons[index] = flag or reasons[index] or ("repeated" if key in seen else None)
            if reasons[index] is None:
                seen.add(key)
        return reasons


def _known_keys(known: Sequence[tuple[str, str]]) -> set[tuple[int, int, int]]:
    """Return the row and the keys of both sides of each real pair, also with either key as 0.

    0 is the key of a side without letters or digits, such as a synthetic one.
    """
    keys = [measure([pair[side] for pair in known], Feature.KEY).keys.tolist() for side in (0, 1)]
    rows = enumerate(zip(*keys, strict=True))
    return {
        entry
        for row, (src, tgt) in rows
        for entry in ((row, src, tgt), (row, src, 0), (row, 0, tgt))
    }
