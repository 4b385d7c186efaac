"""Flags of translations that look wrong."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.corpus.length_stats import CorpusStats

_MAX_REPEATS = 3  # of a phrase in a row, before it is a loop
_MAX_PHRASE = 8  # pieces
_USUAL_SHARE = 0.05  # of the training pairs that are copies, from which on a copy is not flagged


def find_flags(
    src: str,
    tgt: str,
    src_ids: Sequence[int],
    tgt_pieces: Sequence[str],
    profile: CorpusStats | None,
) -> list[str]:
    """Name what looks wrong about a translation.

    Args:
        src, tgt: the text of both sides.
        src_ids, tgt_pieces: the pieces of both sides, without bos and eos.
        profile: of the training corpus, if it is known.
    """
    flags = []
    # a loop repeats a token _MAX_REPEATS times or more; most translations end here
    if len(tgt_pieces) - len(set(tgt_pieces)) >= _MAX_REPEATS:
        repeats = _count_repeats(tgt_pieces)
        if repeats > _MAX_REPEATS and repeats > _count_repeats(src_ids):
            flags.append("loop")
    if not tgt.strip():
        flags.append("empty")
    elif tgt.strip() == src.strip():
        if profile is None or profile.share_copied < _USUAL_SHARE:
            flags.append("copy")
    elif profile is not None and not profile.holds(len(src_ids) + 1, len(tgt_pieces) + 1):
        flags.append("length")
    return flags


def _count_repeats(ids: Sequence[object]) -> int:
    """Count how often a phrase stands in a row, at most."""
    most = 1 if ids else 0
    for size in range(1, min(_MAX_PHRASE, len(ids) // 2) + 1):
        same = 0
        for place in range(size, len(ids)):
            same = same + 1 if ids[place] == ids[place - size] else 0
            most = max(most, 1 + same // size)
    return most
