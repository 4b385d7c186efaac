"""Noisy-channel reranking: the order of translations by models of both directions.

After Yee et al. 2019 (arXiv 1908.05731), without a language model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mtrain.decode.beam import length_penalty
from mtrain.decode.formats import Translation
from mtrain.decode.translator import Translator
from mtrain.errors import RunError


def rerank(
    reverse: Translator,
    sources: Sequence[str],
    candidates_of: Sequence[Sequence[Translation]],
    weight: float,
    length_alpha: float,
) -> list[list[Translation]]:
    """Return the candidates of each source, the best first.

    The score of a candidate y of a source x becomes log p(y|x) / penalty(y) + weight * log p(x|y) /
    penalty(x). Candidates of equal scores keep their order.

    Args:
        reverse: translates from the language of the candidates into that of the sources.
        sources: their text.
        candidates_of: each source's, with the score log p(y|x) / penalty(y).
        weight: of the reverse model.
        length_alpha: exponent of the length penalty.

    Raises:
        RunError: if the log-probabilities of the reverse model are not finite.
    """
    pairs = [
        (candidate.text, source)
        for source, candidates in zip(sources, candidates_of, strict=True)
        for candidate in candidates
    ]
    reverse_scores = [
        sum(log_probs) / length_penalty(len(log_probs), length_alpha)
        for log_probs in reverse.score_texts(pairs)
    ]
    if not all(map(math.isfinite, reverse_scores)):
        raise RunError(
            "the model of the other direction must give finite numbers, but does not: its training "
            "diverged, or its weights are damaged."
        )
    added = iter(reverse_scores)
    return [
        sorted(
            (
                replace(candidate, score=candidate.score + weight * reverse_score)
                for candidate, reverse_score in zip(candidates, added, strict=False)
            ),
            key=lambda candidate: -candidate.score,
        )
        for candidates in candidates_of
    ]
