"""Noisy-channel reranking: scores of both directions, and the order of candidates by them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from builders import SRC_LINES, model_config, randomise, vocabularies
from tasks import reverse_task

import mtrain
from mtrain.decode.beam import Hypothesis, length_penalty
from mtrain.decode.formats import TranslatedLine
from mtrain.decode.mbr import by_agreement
from mtrain.decode.options import DecodingOptions, Sampling
from mtrain.decode.pipeline import LineTranslator
from mtrain.decode.rerank import rerank
from mtrain.decode.shared_search import PendingSearch
from mtrain.decode.translator import EncodedSource, Translator, load
from mtrain.errors import ConfigError, RunError
from mtrain.run.load_model import LoadOptions, build_model
from mtrain.run.run_dir import RunDir

LINES = SRC_LINES[:30]


def random_translator(seed: int, **options: object) -> Translator:
    tokenizer = vocabularies()
    torch.manual_seed(seed)
    model = build_model(model_config(), tokenizer)
    randomise(model, seed)
    search = DecodingOptions(beam=4, max_extra_tokens=4, **options)  # type: ignore[arg-type]
    return Translator([model.eval()], tokenizer, search, torch.device("cpu"))


@pytest.fixture(scope="module")
def translator() -> Translator:
    both = random_translator(3, length_alpha=0.8)
    both.reverse = random_translator(4)
    return both


def lines_of(
    translator: Translator, lines: list[str] = LINES, **changes: object
) -> list[TranslatedLine]:
    changed = translator.with_options(replace(translator.options, **changes))  # type: ignore[arg-type]
    return list(LineTranslator(changed).translate([lines]))


def expected_score(translator: Translator, line: str, text: str, score: float) -> float:
    """The score of a candidate, written out for one pair alone."""
    reverse = translator.reverse
    assert reverse is not None
    (src,) = reverse.tokenizer.encode_src([text])
    (tgt,) = reverse.tokenizer.tgt.encode([line])
    (log_probs,) = reverse.score([EncodedSource(src)], [tgt])
    return score + 20.0 * sum(log_probs) / length_penalty(len(tgt) + 1, 0.8)


@pytest.mark.parametrize("sampling", [None, Sampling()], ids=["searched", "sampled"])
def test_candidates_are_ordered_by_the_scores_of_both_directions(
    translator: Translator, sampling: Sampling | None
) -> None:
    settings = {"sampling": sampling, "retry_flagged": False}
    all_of = lines_of(translator, num_best=4, **settings)
    ordered = lines_of(translator, num_best=4, rerank_weight=20.0, **settings)
    best_two = lines_of(translator, num_best=2, rerank_weight=20.0, **settings)
    is_other = 0
    for line, candidates, found, two in zip(LINES, all_of, ordered, best_two, strict=True):
        scores = [
            expected_score(translator, line, each.text, each.score) for each in candidates.best
        ]
        assert [each.score for each in found.best] == pytest.approx(
            sorted(scores, reverse=True), abs=1e-3
        )
        by_text = dict(zip([each.text for each in candidates.best], scores, strict=True))
        for each in found.best:
            assert by_text[each.text] == pytest.approx(each.score, abs=1e-3)
        assert [each.text for each in two.best] == [each.text for each in found.best[:2]]
        is_other += found.best[0].text != candidates.best[0].text
    assert is_other


def test_mbr_after_reranking_uses_the_reranked_scores_as_weights(
    translator: Translator,
) -> None:
    ordered = lines_of(translator, num_best=4, rerank_weight=20.0, retry_flagged=False)
    found = lines_of(translator, num_best=4, rerank_weight=20.0, retry_flagged=False, mbr="bleu")
    is_other = 0
    for candidates, each in zip(ordered, found, strict=True):
        expected = by_agreement(candidates.best, "bleu")
        assert [one.text for one in each.best] == [one.text for one in expected]
        is_other += each.best != candidates.best
    assert is_other


def test_the_reranking_of_a_line_does_not_depend_on_the_other_lines(translator: Translator) -> None:
    together = lines_of(translator, rerank_weight=0.5)
    for line, found in zip(LINES[:5], together, strict=False):
        (alone,) = lines_of(translator, [line], rerank_weight=0.5)
        assert alone.best[0].text == found.best[0].text
        assert alone.best[0].score == pytest.approx(found.best[0].score, abs=1e-4)


def test_the_model_of_the_other_direction_scores_batches_of_batch_tokens(
    translator: Translator, reverser: RunDir, back_run: Path
) -> None:
    smaller = translator.with_options(replace(translator.options, batch_tokens=99))
    loading = LoadOptions("cpu", reverse=RunDir(back_run))
    loaded = load(reverser, DecodingOptions(batch_tokens=99), loading)
    for each in (smaller, loaded):
        assert each.reverse is not None
        assert each.reverse.options.batch_tokens == 99


def test_a_rerank_weight_of_zero_keeps_the_order(translator: Translator) -> None:
    for found, expected in zip(
        lines_of(translator, rerank_weight=0.0, num_best=4),
        lines_of(translator, num_best=4),
        strict=True,
    ):
        assert [each.text for each in found.best] == [each.text for each in expected.best]


@pytest.mark.parametrize("how", [{"rerank_weight": 0.0}, {"mbr": "chrf"}], ids=["rerank", "mbr"])
def test_with_retry_flagged_looping_candidates_are_ranked_after_others_and_empty_ones_last(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, how: dict[str, object]
) -> None:
    texts = ["", "Hund " * 9, "Hund " * 8, "Ein Hund schläft."]
    ids_of = translator.tokenizer.tgt.encode(texts)
    found = [Hypothesis(ids, [], -1.0, -1.0) for ids in ids_of]
    search = PendingSearch(lambda: [found], lambda: None)
    monkeypatch.setattr(Translator, "start_search", lambda *_: search)
    monkeypatch.setattr(Translator, "search", lambda *_: [found])  # the second search
    flaws_of = {}
    for is_on in (False, True):
        (line,) = lines_of(translator, LINES[:1], num_best=4, retry_flagged=is_on, **how)
        flaws_of[is_on] = [{"loop", "empty"}.intersection(each.flags) for each in line.best]
    assert flaws_of[True] == [set(), {"loop"}, {"loop"}, {"empty"}]
    assert flaws_of[False][0]


def test_a_line_whose_best_candidate_except_empty_ones_loops_is_searched_again(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_search(engine: Translator, _: object) -> PendingSearch:
        texts = ["", "Ein Hund schläft." if engine.options.no_repeat_ngram else "Hund " * 9]
        ids_of = engine.tokenizer.tgt.encode(texts)
        found = [Hypothesis(ids, [], -1.0, -1.0) for ids in ids_of]
        return PendingSearch(lambda: [found], lambda: None)

    monkeypatch.setattr(Translator, "start_search", start_search)
    best_of = {}
    for is_on in (False, True):
        changes = {"rerank_weight": 0.0, "num_best": 2, "retry_flagged": is_on}
        (line,) = lines_of(translator, LINES[:1], **changes)
        best_of[is_on] = [(each.text, "retried" in each.flags) for each in line.best]
    assert best_of[False] == [("", False), ("Hund " * 8 + "Hund", False)]
    assert best_of[True] == [("Ein Hund schläft.", True), ("", True)]


def test_invalid_rerank_weights_and_conflicting_options_are_refused(translator: Translator) -> None:
    for options, message in (
        ({"beam": 1}, "`beam` must be at least 2 for `rerank_weight`, but is 1 instead."),
        (
            {"mbr": "chrf", "sampling": Sampling()},
            "`mbr` must be None with `rerank_weight` for samples, but is chrf instead; `--mbr "
            "none` turns it off.",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            DecodingOptions(rerank_weight=0.3, **options)  # type: ignore[arg-type]
        assert str(error.value) == message
    with pytest.raises(ConfigError) as error:
        DecodingOptions(rerank_weight=-1.0)
    assert str(error.value) == "`rerank_weight` must be between 0 and 100, but is -1.0 instead."
    with pytest.raises(ConfigError) as error:
        lines_of(random_translator(3), rerank_weight=0.3)
    assert str(error.value) == (
        "`rerank_weight` must be None without a run of the other direction, but is 0.3 instead."
    )


def test_a_reverse_model_with_nan_weights_is_an_error(translator: Translator) -> None:
    broken = random_translator(4)
    with torch.no_grad():
        broken.model.output.weight.fill_(torch.nan)
    (line,) = lines_of(translator, LINES[:1], num_best=2)
    with pytest.raises(RunError) as error:
        rerank(broken, LINES[:1], [line.best], 0.3, 1.0)
    assert str(error.value) == (
        "the model of the other direction must give finite numbers, but does not: its training "
        "diverged, or its weights are damaged."
    )


def test_a_loaded_run_reranks_with_a_run_of_the_other_direction(
    reverser: RunDir, back_run: Path
) -> None:
    pairs = reverse_task(150, seed=9)
    lines = [pair.src for pair in pairs]
    plain = mtrain.load(reverser.path, beam=3)
    model = mtrain.load(reverser.path, beam=3, rerank_with=back_run, rerank_weight=2.0)
    assert model.options.rerank_weight == 2.0
    assert mtrain.load(reverser.path, rerank_with=back_run).options.rerank_weight == 0.3
    own = plain.translate(lines, details=True)
    found = model.translate(lines, details=True)
    assert all(each.score < other.score for each, other in zip(found, own, strict=True))
    search = replace(plain.options, num_best=3, retry_flagged=False)
    candidates = plain.translate(lines, search, details=True)
    ranked = rerank(
        load(RunDir(back_run)),
        lines,
        [[best, *best.alternatives] for best in candidates],
        2.0,
        search.length_alpha,
    )
    unflagged = model.translate(lines, replace(model.options, retry_flagged=False), details=True)
    assert [each.text for each in unflagged] == [best.text for best, *_ in ranked]
    num_right, num_right_alone = (
        sum(each.text == pair.tgt for each, pair in zip(translated, pairs, strict=True))
        for translated in (found, own)
    )
    assert num_right > num_right_alone  # which ones differs by processor
    off = replace(model.options, rerank_weight=None)
    assert model.translate(lines, off, details=True) == own
    for arguments, message in (
        ({"rerank_weight": 0.3}, "`rerank_weight` needs `rerank_with`."),
        (
            {"rerank_with": back_run, "engine": "ctranslate2"},
            "`rerank_with` has no effect with `engine='ctranslate2'`; leave it out.",
        ),
        (
            {"rerank_with": reverser.path},
            f"{reverser.path}: must translate bb to aa for `--rerank-with`, but translates aa to "
            "bb instead.",
        ),
    ):
        with pytest.raises(mtrain.UserError) as error:
            mtrain.load(reverser.path, **arguments)  # type: ignore[arg-type]
        assert str(error.value) == message


def test_a_run_of_both_directions_can_rerank_its_own_translations(
    reverser: RunDir, tmp_path: Path
) -> None:
    both = RunDir(shutil.copytree(reverser.path, tmp_path / "both"))
    tree = yaml.safe_load(both.config_path.read_text("utf-8"))
    files = tree["data"]["train"]
    tree["data"]["train"] = [files, {"src": files["tgt"], "tgt": files["src"]}]
    both.config_path.write_text(yaml.safe_dump(tree), "utf-8")
    assert both.check_direction([("bb", "aa")], "for `--back`") == ("bb", "aa")
    assert both.check_direction([("bb", "aa"), ("aa", "bb")], "for `--again`") == ("aa", "bb")
    lines = ["ba ce di", "fo gu", "tu so ri ba"]
    plain = mtrain.load(both.path, beam=3).translate(lines, details=True)
    ranked = mtrain.load(both.path, beam=3, rerank_with=both.path).translate(lines, details=True)
    assert all(each.score < other.score for each, other in zip(ranked, plain, strict=True))
    with pytest.raises(RunError, match="must translate de to en for `--back`, but translates aa"):
        both.check_direction([("de", "en")], "for `--back`")
