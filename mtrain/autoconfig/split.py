"""Read a new corpus, and draw held-out pairs from it. Independent of models and token ids.

Sentences are the same if they differ in case, punctuation or spacing alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.audit import duplicates
from mtrain.audit.duplicates import Leaks, PairHashes
from mtrain.audit.features import (
    Feature,
    Flags,
    Hashes,
    Ints,
    LineFlag,
    Records,
    differs_from_previous,
    measure,
)
from mtrain.audit.unicode_classes import kind_of
from mtrain.config.corpora import (
    Corpus,
    SyntheticCorpus,
    TrainText,
    bidirectional_corpora,
    corpora_of,
)
from mtrain.corpus.reader import FilePair, Pair, Reader, read_pairs
from mtrain.errors import DataError
from mtrain.io.lines import Advance

_SAMPLE_PAIRS = 50_000
_MIN_CHARS, _MAX_CHARS = 6, 500  # of a held-out line
_MIN_SYLLABIC_CHARS = 3  # where a character is a syllable or a word
_SYLLABIC = [kind_of(script) for script in ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")]
_MAX_RATIO = 3.0  # of the characters of the two sides, relative to the median ratio of the corpus
MIN_HELD_OUT = 10  # pairs of a set
_HELD_OUT_FRACTION = 0.05  # of the distinct pairs
_MAX_EXCLUDED = 0.25  # limit of the share of pairs that training loses to held-out sets
_MAX_EXCLUDED_BY_SMALLEST = 0.5  # the same, for sets of MIN_HELD_OUT pairs

Floats = npt.NDArray[np.float32]


class CorpusOverview(NamedTuple):
    """The size of a corpus, a sample of it, and which pairs can be held out."""

    parts: list[FilePair]  # the files of the corpus, with the rows of each
    src_words: int  # of all pairs; letters, in scripts without spaces
    tgt_words: int
    sample: dict[int, tuple[str, str]]  # source and target of pairs drawn uniformly, by row
    src_ids: Ints  # of each pair; equal for the same source
    tgt_ids: Ints
    is_real: Flags  # whether a pair is of no synthetic corpus
    is_fit: Flags  # whether a pair can be held out
    is_blank: Flags  # whether a side is
    is_given: Flags  # whether a given validation or test set has the exact pair
    shares_given: Flags  # whether a given set has a sentence of the pair

    @property
    def num_pairs(self) -> int:
        """The number of all pairs, blank ones too."""
        return len(self.is_fit)

    def num_by_corpus(self, is_kept: Flags) -> Counter[str | None]:
        """Return the number of kept pairs of each corpus; None names one that is no mixture."""
        numbers = Counter[str | None]()
        for part in self.parts:
            numbers[part.corpus] += int(is_kept[part.first : part.first + part.num_pairs].sum())
        return numbers

    def num_distinct(self, is_kept: Flags) -> int:
        """Return the number of different pairs among those that are kept."""
        return len(np.unique(_codes(self.src_ids[is_kept], self.tgt_ids[is_kept])))


class HeldOut(NamedTuple):
    """The rows of held-out sets, each ascending, and the pairs that share a sentence with them."""

    sets: list[Ints]
    is_excluded: Flags


def read_set(corpus: Corpus, name: str) -> tuple[Leaks, int]:
    """Read a validation or test set; return its hashes, to look up pairs, and its size.

    Raises:
        DataError: as a strict `Reader`, and if there is no pair.
    """
    reader = Reader(corpus, is_strict=True)
    features = Feature.HASH | Feature.KEY
    hashes = [
        duplicates.hashes_of(measure(block.src, features), measure(block.tgt, features))
        for block in reader.blocks()
    ]
    reader.check_not_empty(name)
    exact, keys = (PairHashes.joined(blocks) for blocks in zip(*hashes, strict=True))
    return Leaks(exact, keys), reader.num_pairs


def read_overview(
    corpus: TrainText, given: Sequence[Leaks], seed: int, advance: Advance
) -> CorpusOverview:
    """Read a corpus once, and return its sizes, a sample and which pairs can be held out.

    Raises:
        DataError: as a strict `Reader`, and if there is no pair.
    """
    rng, reader = random.Random(seed), Reader(corpus, is_strict=True)
    rows: list[int] = []  # of the sample
    sample: list[tuple[str, str]] = []
    blocks: list[tuple[Hashes, Hashes, Floats, Flags, Flags, Flags, Flags, Flags]] = []
    both_directions = bool(bidirectional_corpora(corpus))
    synthetic = {name for name, part in corpora_of(corpus) if isinstance(part, SyntheticCorpus)}
    words = np.zeros(2, np.int64)
    for block in reader.blocks(advance):
        src, tgt = measure(block.src), measure(block.tgt)
        exact, keys = duplicates.hashes_of(src, tgt)
        is_given = shares_given = np.zeros(len(block.src), bool)
        for leaks in given:
            shares, is_pair = leaks.look_up(exact, keys, block.first, both_directions)
            is_given, shares_given = is_given | is_pair, shares_given | shares
        is_real = np.full(len(block.src), reader.parts[-1].corpus not in synthetic)
        is_fit = is_real & _is_fit(src.lines, tgt.lines) & (keys.pair != 0) & ~shares_given
        is_blank = (src.lines["solid"] == 0) | (tgt.lines["solid"] == 0)
        flags = is_real, is_fit, is_blank, is_given, shares_given
        blocks.append((src.keys, tgt.keys, _log_ratios(src.lines, tgt.lines), *flags))
        words += (len(src.words), len(tgt.words))
        for row, pair in enumerate(zip(block.src, block.tgt, strict=True), block.first):
            if len(sample) < _SAMPLE_PAIRS:
                rows.append(row)
                sample.append(pair)
            elif (slot := rng.randrange(row + 1)) < _SAMPLE_PAIRS:
                rows[slot], sample[slot] = row, pair
    reader.check_not_empty("data.train")
    columns = map(np.concatenate, zip(*blocks, strict=True))
    src_keys, tgt_keys, ratios, is_real, is_fit, *others = columns
    is_fit = is_fit & _is_usual(ratios, is_fit, both_directions)
    pairs = dict(zip(rows, sample, strict=True))
    src_ids, tgt_ids = (np.unique(keys, return_inverse=True)[1] for keys in (src_keys, tgt_keys))
    ids = src_ids, tgt_ids
    return CorpusOverview(
        reader.parts, int(words[0]), int(words[1]), pairs, *ids, is_real, is_fit, *others
    )


def _codes(first: Ints, second: Ints) -> Ints:
    """Return one number for each pair of numbers, different for different pairs."""
    codes: Ints = first * (int(second.max(initial=0)) + 1) + second
    return codes


def _is_fit(src: Records, tgt: Records) -> Flags:
    """Return which pairs look like text of usual length."""
    fit = np.ones(len(src), bool)
    for side in (src, tgt):
        is_syllabic = np.isin(side["script"], _SYLLABIC)
        fit &= side["chars"] >= np.where(is_syllabic, _MIN_SYLLABIC_CHARS, _MIN_CHARS)
        fit &= side["chars"] <= _MAX_CHARS
        fit &= side["flags"] & np.uint16(LineFlag.MOJIBAKE | LineFlag.CONTROL) == 0
        fit &= 2 * side["odd"] < side["solid"]
    differ: Flags = src["hash"] != tgt["hash"]
    return fit & differ


def _log_ratios(src: Records, tgt: Records) -> Floats:
    """Return the logarithm of the ratio of characters, target to source, of each pair."""
    ratios: Floats = np.log((tgt["chars"] + 1) / (src["chars"] + 1)).astype(np.float32)
    return ratios


def _is_usual(log_ratios: Floats, is_fit: Flags, both_directions: bool) -> Flags:
    """Return which ratios are within a factor of _MAX_RATIO of the median of the fit pairs."""
    if both_directions:  # a pair that is read the other way has the reciprocal
        log_ratios = np.abs(log_ratios)
    median = np.median(log_ratios[is_fit]) if is_fit.any() else 0.0
    usual: Flags = np.abs(log_ratios - median) <= np.log(_MAX_RATIO)
    return usual


def draw(overview: CorpusOverview, num_sets: int, max_pairs: int, seed: int) -> HeldOut:
    """Draw sets of at most `max_pairs` distinct pairs that share no sentence with each other.

    All pairs with one sentence, on the side that repeats more, are a group and are drawn together;
    their translations may occur in other groups, which training then loses too. The groups that
    cost training the fewest pairs come first, those of equal cost at random. In a corpus where no
    sentence occurs twice, every pair is a group.

    Raises:
        DataError: if the sets would have fewer than MIN_HELD_OUT pairs.
    """
    if num_sets == 0:
        return HeldOut([], np.zeros(overview.num_pairs, bool))
    by_src = len(np.unique(overview.src_ids)) < len(np.unique(overview.tgt_ids))
    sides = (overview.src_ids, overview.tgt_ids)
    groups, others = sides if by_src else sides[::-1]
    fit_rows = np.flatnonzero(overview.is_fit)
    _, distinct = np.unique(_codes(groups[fit_rows], others[fit_rows]), return_index=True)
    rows = fit_rows[distinct]  # one of each different pair, by groups
    first = np.flatnonzero(differs_from_previous(groups[rows]))  # of each group
    end = np.append(first[1:], len(rows))
    costs = np.add.reduceat(np.bincount(others)[others[rows]], first)
    num_unfit = np.bincount(groups[~overview.is_fit], minlength=int(groups.max()) + 1)
    costs += num_unfit[groups[rows[first]]]
    shuffled = np.random.default_rng(seed).permutation(len(first))
    size = max(MIN_HELD_OUT, min(max_pairs, int(_HELD_OUT_FRACTION * len(rows))))
    sets: list[list[int]] = [[] for _ in range(num_sets)]
    used, num_excluded = set[int](), 0
    for group in shuffled[np.argsort(costs[shuffled], kind="stable")].tolist():
        smallest = min(sets, key=len)
        is_enough = len(smallest) >= MIN_HELD_OUT
        limit = overview.num_pairs * (_MAX_EXCLUDED if is_enough else _MAX_EXCLUDED_BY_SMALLEST)
        if len(smallest) == size or num_excluded + costs[group] > limit:
            break
        members = rows[first[group] : end[group]]
        translations = others[members].tolist()
        if used.isdisjoint(translations):
            used.update(translations)
            num_excluded += int(costs[group])
            smallest += members[: size - len(smallest)].tolist()
    if min(map(len, sets)) < MIN_HELD_OUT:
        raise DataError(
            f"the corpus must have {num_sets * MIN_HELD_OUT} pairs that can be held out, but has "
            f"{sum(map(len, sets))} instead; those cannot that are very short or very long, have "
            "equal sides, or share a sentence with many others. Give --valid and --test."
        )
    drawn = np.concatenate(sets)
    is_excluded = np.isin(groups, groups[drawn]) | np.isin(others, others[drawn])
    return HeldOut([np.sort(rows) for rows in sets], is_excluded)


def collect(corpus: TrainText, rows: Ints) -> Iterator[Pair]:
    """Yield the pairs with the numbers `rows`, which ascend and are not empty."""
    is_collected = np.zeros(int(rows[-1]) + 1, bool)
    is_collected[rows] = True
    return compress(read_pairs(corpus), is_collected)
