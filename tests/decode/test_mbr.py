"""Minimum Bayes risk: sacreBLEU's chrF and BLEU, and the order that they give to candidates."""

import itertools
import math
import random
import threading
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
import torch
from builders import SRC_LINES, model_config, randomise, vocabularies
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from mtrain.decode import pipeline
from mtrain.decode.formats import TranslatedLine, Translation
from mtrain.decode.mbr import Measure, bleu, by_agreement, chrf, ngrams_of
from mtrain.decode.options import DecodingOptions, Sampling
from mtrain.decode.pipeline import LineTranslator
from mtrain.decode.shared_search import SearchLimits
from mtrain.decode.translator import Translator
from mtrain.errors import ConfigError
from mtrain.run.load_model import build_model

CHRF_OF_SACREBLEU = CHRF()
BLEU_OF_SACREBLEU = BLEU(tokenize="none", smooth_method="add-k", smooth_value=1)


@given(st.text("ab c\u00e4\u2003", max_size=12), st.text("ab c\u00e4\u2003", max_size=12))
def test_chrf_equals_that_of_sacrebleu(hypothesis: str, reference: str) -> None:
    expected = CHRF_OF_SACREBLEU.sentence_score(hypothesis, [reference]).score
    sides = (ngrams_of(Translation(text), "chrf") for text in (hypothesis, reference))
    assert chrf(*sides) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.sampled_from("abc"), max_size=9), st.lists(st.sampled_from("abc"), max_size=9))
def test_bleu_equals_that_of_sacrebleu(hypothesis: list[str], reference: list[str]) -> None:
    expected = BLEU_OF_SACREBLEU.sentence_score(" ".join(hypothesis), [" ".join(reference)]).score
    both = (Translation("", (*tokens, "</s>")) for tokens in (hypothesis, reference))
    assert bleu(*(ngrams_of(side, "bleu") for side in both)) == pytest.approx(expected, abs=1e-9)


def translations(texts: list[str], scores: list[float]) -> list[Translation]:
    """Candidates with a token for each word."""
    return [
        Translation(text, (*text.split(), "</s>"), score=score)
        for text, score in zip(texts, scores, strict=True)
    ]


@pytest.mark.parametrize("are_samples", [False, True], ids=["searched", "sampled"])
@pytest.mark.parametrize(
    ("measure", "temperature", "score"),
    [("chrf", 0.1, CHRF_OF_SACREBLEU), ("bleu", 0.2, BLEU_OF_SACREBLEU)],
)
def test_candidates_are_ordered_by_their_expected_chrf_or_bleu_against_all_candidates(
    measure: Measure, temperature: float, score: CHRF | BLEU, are_samples: bool
) -> None:
    rng = random.Random(1)
    words = ["der", "die", "ein", "Hund", "Katze", "rennt", "schläft", "im", "auf", "Park", "Sofa"]
    for _ in range(20):
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(7)]
        candidates = translations(texts + texts[:2], [rng.uniform(-0.5, -0.2) for _ in range(9)])
        weights = [
            1.0 if are_samples else math.exp(each.score / temperature) for each in candidates
        ]
        expected = {
            each.text: sum(
                weight
                * (
                    score.sentence_score(each.text, [other.text]).score
                    if each.text != other.text
                    else 100
                )
                for weight, other in zip(weights, candidates, strict=True)
            )
            / sum(weights)
            for each in candidates
        }
        ordered = by_agreement(candidates, measure, are_samples)
        assert sorted(ordered, key=id) == sorted(candidates, key=id)
        for better, worse in itertools.pairwise(ordered):
            assert expected[better.text] >= expected[worse.text] - 1e-9


def test_candidates_with_equal_expected_chrf_keep_their_order() -> None:
    for texts, expected in (
        (["a", "a", "a"], [0, 1, 2]),
        (["ab", "cd", "ef"], [0, 1, 2]),
        (["x", "ab", "ab"], [1, 2, 0]),
        (["", "ab"], [0, 1]),
        ([], []),
    ):
        candidates = translations(texts, [-1.0] * len(texts))
        for are_samples in (False, True):
            ordered = by_agreement(candidates, "chrf", are_samples)
            assert [id(each) for each in ordered] == [id(candidates[at]) for at in expected]


@pytest.fixture(scope="module")
def translator() -> Translator:
    tokenizer = vocabularies()
    torch.manual_seed(3)
    model = build_model(model_config(), tokenizer)
    randomise(model, 3)
    options = DecodingOptions(beam=4, max_extra_tokens=4)
    return Translator([model.eval()], tokenizer, options, torch.device("cpu"))


def lines_of(translator: Translator, **changes: object) -> list[TranslatedLine]:
    changed = translator.with_options(replace(translator.options, **changes))  # type: ignore[arg-type]
    return list(LineTranslator(changed).translate([SRC_LINES[:40]]))


@pytest.mark.parametrize("measure", ["chrf", "bleu"])
@pytest.mark.parametrize("sampling", [None, Sampling()], ids=["searched", "sampled"])
def test_the_best_mbr_candidate_comes_first_and_does_not_depend_on_the_other_lines(
    translator: Translator, sampling: Sampling | None, measure: Measure
) -> None:
    settings = {"sampling": sampling, "retry_flagged": False}
    all_of = lines_of(translator, num_best=4, **settings)
    first = lines_of(translator, mbr=measure, **settings)
    best_two = lines_of(translator, mbr=measure, num_best=2, **settings)
    is_other = 0
    for candidates, one, two in zip(all_of, first, best_two, strict=True):
        expected = by_agreement(candidates.best, measure, sampling is not None)
        assert [each.text for each in one.best] == [expected[0].text]
        assert [each.text for each in two.best] == [each.text for each in expected[:2]]
        is_other += expected[0].text != candidates.best[0].text
    assert is_other
    options = replace(translator.options, mbr=measure, retry_flagged=False)
    alone = next(LineTranslator(translator.with_options(options)).translate([[SRC_LINES[0]]]))
    assert sampling is not None or alone.best[0].text == first[0].best[0].text


def test_mbr_ends_with_the_limits_of_the_call_after_the_source_that_it_ranks(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, num_ranked = threading.Event(), 0

    def rank(candidates: list[Translation], *_: object) -> list[Translation]:
        nonlocal num_ranked
        num_ranked += 1
        cancelled.set()
        return candidates

    monkeypatch.setattr(pipeline, "by_agreement", rank)
    limits = SearchLimits(cancel=cancelled)
    limited = translator.with_options(replace(translator.options, mbr="bleu"), limits)
    with pytest.raises(CancelledError):
        next(LineTranslator(limited).translate([SRC_LINES[:3]]))
    assert num_ranked == 1


def test_mbr_refuses_a_beam_of_one_and_an_unknown_measure() -> None:
    with pytest.raises(ConfigError) as error:
        DecodingOptions(beam=1, mbr="chrf")
    assert str(error.value) == (
        "`beam` must be at least 2 for `mbr`, but is 1 instead; `--mbr none` turns it off."
    )
    with pytest.raises(ConfigError) as error:
        DecodingOptions(mbr="ter")  # type: ignore[arg-type]
    assert str(error.value) == "`mbr` must be chrf, bleu or None, but is 'ter' instead."
