"""Minimum Bayes risk decoding: the order of candidates by how much they agree with the others.

chrF is that of sacreBLEU: character n-grams up to order 6 without spaces, beta 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

_ORDER = 6
_BETA_SQUARED = 4


def by_agreement(texts: Sequence[str]) -> list[int]:
    """Return the indices of candidates by their mean chrF against the others, the best first.

    Candidates that agree equally keep their order.
    """
    counts = Counter(texts)
    ngrams = {text: _char_ngrams(text) for text in counts}
    # a candidate agrees wholly with its copies
    utility = {text: 100.0 * (times - 1) for text, times in counts.items()}
    for text, other in permutations(counts, 2):
        utility[text] += counts[other] * _chrf(ngrams[text], ngrams[other])
    return sorted(range(len(texts)), key=lambda index: -utility[texts[index]])


def chrf(hypothesis: str, reference: str) -> float:
    """Return the chrF of a hypothesis, from 0 to 100."""
    return _chrf(_char_ngrams(hypothesis), _char_ngrams(reference))


def _char_ngrams(text: str) -> list[Counter[str]]:
    line = "".join(text.split())
    return [
        Counter(line[start : start + order] for start in range(len(line) - order + 1))
        for order in range(1, _ORDER + 1)
    ]


def _chrf(hypothesis: list[Counter[str]], reference: list[Counter[str]]) -> float:
    """Return the F-score of precision and recall, means over the orders that both sides have."""
    precisions, recalls = [], []
    for of_hypothesis, of_reference in zip(hypothesis, reference, strict=True):
        if of_hypothesis and of_reference:
            matches = (of_hypothesis & of_reference).total()
            precisions.append(matches / of_hypothesis.total())
            recalls.append(matches / of_reference.total())
    if not any(precisions):
        return 0.0
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    return 100 * (1 + _BETA_SQUARED) * precision * recall / (_BETA_SQUARED * precision + recall)
