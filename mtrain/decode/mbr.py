"""Minimum Bayes risk decoding: the order of candidates by how much they agree with the others.

The agreement is chrF, that of sacreBLEU: character n-grams up to order 6 without spaces, beta 2; or
BLEU of subwords up to order 4, with 1 added to the counts above order 1 (sacreBLEU's `add-k`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import permutations
from typing import Literal

from mtrain.decode.formats import Translation

Measure = Literal["chrf", "bleu"]
_Ngrams = list[Counter[Hashable]]  # of each order, from 1 on

_CHRF_ORDER, _BLEU_ORDER = 6, 4
_BETA_SQUARED = 4
# of the softmax over scores; chosen by the BLEU of four models on the validation set of Multi30k
_TEMPERATURES: dict[Measure, float] = {"chrf": 0.1, "bleu": 0.2}


def by_agreement(
    candidates: Sequence[Translation], measure: Measure, are_samples: bool = False
) -> list[Translation]:
    """Return candidates by their mean agreement with all of them, the best first.

    Hypotheses of a search are weighted by softmax(score / temperature) (Kumar and Byrne 2004);
    samples count alike. Candidates that agree equally keep their order.
    """
    if not candidates:
        return []
    best = max(candidate.score for candidate in candidates)
    temperature = math.inf if are_samples else _TEMPERATURES[measure]
    weights: dict[str, float] = {}  # of each text, summed over its copies
    ngrams: dict[str, _Ngrams] = {}
    for candidate in candidates:
        weight = math.exp((candidate.score - best) / temperature)
        weights[candidate.text] = weights.get(candidate.text, 0.0) + weight
        ngrams[candidate.text] = ngrams_of(candidate, measure)
    agree = _MEASURES[measure]
    utility = {text: 100.0 * weight for text, weight in weights.items()}
    for text, other in permutations(ngrams, 2):
        utility[text] += weights[other] * agree(ngrams[text], ngrams[other])
    return sorted(candidates, key=lambda candidate: -utility[candidate.text])


def ngrams_of(candidate: Translation, measure: Measure) -> _Ngrams:
    """Return the n-grams of characters without spaces, or of the tokens without eos."""
    units, max_order = (
        ("".join(candidate.text.split()), _CHRF_ORDER)
        if measure == "chrf"
        else (candidate.tokens[:-1], _BLEU_ORDER)
    )
    return [
        Counter(units[start : start + order] for start in range(len(units) - order + 1))
        for order in range(1, max_order + 1)
    ]


def chrf(hypothesis: _Ngrams, reference: _Ngrams) -> float:
    """Return the F-score of precision and recall, means over the orders that both sides have.

    It is from 0 to 100, as that of `bleu`.
    """
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


def bleu(hypothesis: _Ngrams, reference: _Ngrams) -> float:
    """Return the geometric mean of the precisions times the brevity penalty."""
    matches = [(ours & theirs).total() for ours, theirs in zip(hypothesis, reference, strict=True)]
    totals = [of_order.total() for of_order in hypothesis]
    if not matches[0]:
        return 0.0
    log_precision = math.log(matches[0] / totals[0])
    for count, total in zip(matches[1:], totals[1:], strict=True):
        log_precision += math.log((count + 1) / (total + 1))
    brevity = min(0.0, 1 - reference[0].total() / totals[0])
    return 100 * math.exp(log_precision / _BLEU_ORDER + brevity)


_MEASURES: dict[Measure, Callable[[_Ngrams, _Ngrams], float]] = {"chrf": chrf, "bleu": bleu}
