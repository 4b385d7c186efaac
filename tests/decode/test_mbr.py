"""Minimum Bayes risk: sacreBLEU's chrF, and the order that it gives to candidates."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from builders import SRC_LINES, model_config, randomise, vocabularies
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.chrf import CHRF

from mtrain.decode.formats import TranslatedLine
from mtrain.decode.mbr import by_agreement, chrf
from mtrain.decode.options import DecodingOptions, Sampling
from mtrain.decode.pipeline import LineTranslator
from mtrain.decode.translator import Translator
from mtrain.errors import ConfigError
from mtrain.run.load_model import build_model

CHRF_OF_SACREBLEU = CHRF()


@given(st.text("ab c\u00e4\u2003", max_size=12), st.text("ab c\u00e4\u2003", max_size=12))
def test_chrf_is_that_of_sacrebleu(hypothesis: str, reference: str) -> None:
    expected = CHRF_OF_SACREBLEU.sentence_score(hypothesis, [reference]).score
    assert chrf(hypothesis, reference) == pytest.approx(expected, abs=1e-9)


def test_candidates_are_ordered_by_their_mean_chrf_against_the_others() -> None:
    rng = random.Random(1)
    words = ["der", "die", "ein", "Hund", "Katze", "rennt", "schläft", "im", "auf", "Park", "Sofa"]
    for _ in range(20):
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(7)]
        texts += texts[:2]
        means = [
            sum(
                CHRF_OF_SACREBLEU.sentence_score(text, [other]).score
                for index, other in enumerate(texts)
                if index != place
            )
            for place, text in enumerate(texts)
        ]
        order = by_agreement(texts)
        assert sorted(order) == list(range(len(texts)))
        for better, worse in itertools.pairwise(order):
            assert means[better] >= means[worse] - 1e-9


def test_candidates_that_agree_equally_keep_their_order() -> None:
    assert by_agreement(["a", "a", "a"]) == [0, 1, 2]
    assert by_agreement(["ab", "cd", "ef"]) == [0, 1, 2]
    assert by_agreement(["x", "ab", "ab"]) == [1, 2, 0]
    assert by_agreement(["", "ab"]) == [0, 1]
    assert by_agreement([]) == []


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
    return list(LineTranslator(changed).translate([SRC_LINES]))


@pytest.mark.parametrize("sampling", [None, Sampling()], ids=["searched", "sampled"])
def test_the_candidate_that_agrees_most_comes_first_whatever_lines_stand_beside(
    translator: Translator, sampling: Sampling | None
) -> None:
    all_of = lines_of(translator, num_best=4, sampling=sampling)
    first = lines_of(translator, mbr="chrf", sampling=sampling)
    best_two = lines_of(translator, mbr="chrf", num_best=2, sampling=sampling)
    is_other = 0
    for candidates, one, two in zip(all_of, first, best_two, strict=True):
        texts = [each.text for each in candidates.best]
        expected = [texts[index] for index in by_agreement(texts)]
        assert [each.text for each in one.best] == expected[:1]
        assert [each.text for each in two.best] == expected[:2]
        is_other += expected[0] != texts[0]
    assert is_other
    options = replace(translator.options, mbr="chrf")
    alone = next(LineTranslator(translator.with_options(options)).translate([[SRC_LINES[0]]]))
    assert sampling is not None or alone.best[0].text == first[0].best[0].text


def test_a_single_candidate_and_another_measure_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        DecodingOptions(beam=1, mbr="chrf")
    assert str(error.value) == "`beam` must be at least 2 for `mbr`, but is 1 instead."
    with pytest.raises(ConfigError) as error:
        DecodingOptions(mbr="bleu")  # type: ignore[arg-type]
    assert str(error.value) == "`mbr` must be chrf or None, but is 'bleu' instead."
