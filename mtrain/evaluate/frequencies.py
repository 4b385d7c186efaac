"""Words, and how often each stands in the training text of a run.

The text itself need not be there: the encoded pairs are, and decode to it.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from statistics import median

from mtrain.data import arrow_shards, loader
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer.sentencepiece import Tokenizer


class Unit(str, Enum):
    """What lines are made of."""

    WORDS = "words"
    CHARACTERS = "characters"


def unit_of(lines: Sequence[str]) -> Unit:
    """Return words, or characters where most lines have no space within."""
    return Unit.WORDS if median(len(line.split()) for line in lines) > 1 else Unit.CHARACTERS


def split(line: str, unit: Unit) -> list[str]:
    """Return a line's words in lower case, without the punctuation around them.

    Characters are letters, digits and marks.
    """
    if unit is Unit.CHARACTERS:
        return [character for character in line.lower() if _is_of_words(character)]
    return [bare for word in line.split() if (bare := _bare(word))]


def _is_of_words(character: str) -> bool:
    return unicodedata.category(character)[0] in "LNM"


@lru_cache(maxsize=1 << 16)
def _bare(word: str) -> str:
    places = [place for place, character in enumerate(word) if _is_of_words(character)]
    return word[places[0] : places[-1] + 1].lower() if places else ""


def in_training(
    run: RunDir, tokenizer: Tokenizer, wanted: Iterable[str], unit: Unit
) -> Counter[str] | None:
    """Return how often each wanted word stands in the source side of the training pairs.

    None if the run folder holds no encoded pairs.

    Raises:
        RunError: if they are damaged.
    """
    if not arrow_shards.are_in(run.data_dir):
        return None
    counts = Counter(dict.fromkeys(wanted, 0))
    for ids in loader.read_src(run.data_dir, tokenizer):
        for line in tokenizer.src.decode(ids):
            counts.update(word for word in split(line, unit) if word in counts)
    return counts
