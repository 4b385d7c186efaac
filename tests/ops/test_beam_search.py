"""Compare a beam search of many positions in a compiled call with one position at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import left_keep, model_config, transformer
from hypothesis import given
from hypothesis import strategies as st

from mtrain.decode.beam import BeamSearch, Constraints, Hypothesis, NotFiniteError, RequestGroup
from mtrain.decode.options import DecodingOptions
from mtrain.model.kv_cache import KVCache
from mtrain.model.transformer import Transformer
from mtrain.ops import beam_search, native
from mtrain.ops.packed_weights import PackedRows, Precision

BOS, EOS, NUM_TOKENS = 1, 2, 20
CONFIGS = {
    "post": model_config(),
    "wide": model_config(d_model=64, num_heads=2, d_ff=300, num_decoder_layers=3),
    "window": model_config(attention_window=1),
    "learned": model_config(positions="learned", max_positions=3),
}
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.compiled() is None, reason="the operations are not compiled"),
]


@torch.no_grad()
def packed(
    config: object = CONFIGS["post"], eos: float = 1.5, precision: Precision = "float32"
) -> Transformer:
    """Return a model whose tokens depend on the sentence; four tokens have equal weights.

    The larger `eos` is, the earlier targets end.
    """
    model, generator = transformer(config).float(), torch.Generator().manual_seed(3)
    ids_BT = torch.randint(NUM_TOKENS, (50, 10), generator=generator)
    states_RD = model(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), ids_BT).flatten(0, 1)
    weight_VD = torch.randn(model.output.weight.shape, generator=generator)
    mean_D = torch.nn.functional.normalize(states_RD.mean(0), dim=0)
    weight_VD -= (weight_VD @ mean_D)[:, None] * mean_D  # remove what all states have in common
    weight_VD *= 5 / (states_RD @ weight_VD.T).std()
    weight_VD[EOS] *= eos
    for alike_VD in (weight_VD, model.tgt_embedding.weight):
        alike_VD[5:8] = alike_VD[4]
    model.output.weight = torch.nn.Parameter(weight_VD)
    model.pack_weights(precision)
    return model


MODELS = {name: packed(config) for name, config in CONFIGS.items()}
MODELS |= {precision: packed(precision=precision) for precision in ("bfloat16", "int8")}
MODELS["long"], MODELS["endless"] = packed(eos=0.7), packed(eos=0.0)


def shortlists(model: Transformer, num_sentences: int, seed: int) -> list[PackedRows]:
    """Return half of the tokens for each sentence, eos among them."""
    rng = np.random.default_rng(seed)
    others = range(3, NUM_TOKENS)
    chosen = [rng.choice(others, 8, replace=False) for _ in range(num_sentences)]
    return model.output.rows([np.sort([EOS, *tokens]) for tokens in chosen])


def group(
    model: Transformer, lengths: list[int], extra: int, seed: int, is_short: bool = False
) -> RequestGroup[KVCache]:
    """Return sentences whose targets may have `extra` tokens more than their sources.

    With `is_short`, each has a shortlist of half of the tokens.
    """
    keep_BS = left_keep(lengths)
    ids = torch.randint(NUM_TOKENS, keep_BS.shape, generator=torch.Generator().manual_seed(seed))
    constraints = Constraints(BOS, EOS, [0, BOS], np.array(lengths) + extra)
    if is_short:
        ranked = shortlists(model, len(lengths), seed)
        constraints = replace(constraints, shortlists=ranked)
    return RequestGroup(model.start(ids, keep_BS), constraints)


def found(
    model: Transformer,
    options: DecodingOptions,
    groups: list[list[int]],
    extra: int = 4,
    one_by_one: bool = False,
    drop: int | None = None,
    is_short: bool = False,
) -> tuple[list[list[Hypothesis]], int]:
    """Return the hypotheses of each sentence, and the calls of `advance`.

    A group is admitted before each third call; sentence `drop` is dropped after the second.
    """
    steps = None if one_by_one else lambda cache, *rest: model.search_steps(cache, *rest)
    search = BeamSearch(model.decode_step, options, steps)
    waiting = [group(model, lengths, extra, seed, is_short) for seed, lengths in enumerate(groups)]
    num_calls = 0
    search.admit(waiting.pop(0))
    while search.num_open or waiting:
        if waiting and num_calls % 3 == 2:
            search.admit(waiting.pop(0))
        if search.num_open:
            search.advance()
        num_calls += 1
        if num_calls == 2 and drop is not None:
            search.drop([drop])
    numbers = [number for number in range(search.num_sentences) if number != drop]
    return [search.take_best(number) for number in numbers], num_calls


SEARCHES = {
    "greedy": DecodingOptions(beam=1, with_scores=False),
    "greedy with scores": DecodingOptions(beam=1, with_scores=True),
    "beam": DecodingOptions(beam=4),
    "all": DecodingOptions(beam=3, num_best=3, length_alpha=0.0),
    "early": DecodingOptions(beam=3, num_best=2, length_alpha=1.7, early_stop=True),
}


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES.keys())
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_search_equals_one_position_at_a_time_bit_for_bit(name, options, calls):
    model, groups = MODELS[name], [[5, 2, 7], [3], [9, 1, 1, 4]]
    together, num_calls = found(model, options, groups)
    assert calls.count("search_steps") > 0.5 * num_calls
    calls.clear()
    apart, num_positions = found(model, options, groups, one_by_one=True)
    assert "search_steps" not in calls
    assert repr(together) == repr(apart)  # nan is not equal to nan
    assert num_calls < num_positions


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES.keys())
@pytest.mark.parametrize("name", ["post", "long", "bfloat16", "int8"])
def test_a_compiled_search_of_shortlists_equals_one_position_at_a_time_bit_for_bit(
    name, options, calls
):
    model, groups = MODELS[name], [[5, 2, 7], [3], [9, 1, 1, 4]]
    together, num_calls = found(model, options, groups, is_short=True)
    assert calls.count("search_steps") > 0.5 * num_calls
    calls.clear()
    apart, _ = found(model, options, groups, one_by_one=True, is_short=True)
    assert "search_steps" not in calls
    assert repr(together) == repr(apart)  # nan is not equal to nan
    assert repr(together) != repr(found(model, options, groups)[0])
    ranked = [
        set(each.ids_C.tolist())
        for seed, lengths in enumerate(groups)
        for each in shortlists(model, len(lengths), seed)
    ]
    for tokens, hypotheses in zip(ranked, together, strict=True):
        assert all(tokens >= set(hypothesis.ids) for hypothesis in hypotheses)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("name", ["post", "bfloat16", "int8"])
def test_a_compiled_search_of_shortlists_gives_the_hypotheses_of_the_search_in_pytorch(
    name, beam, monkeypatch
):
    options, groups = DecodingOptions(beam=beam), [[5, 2, 7], [3], [9, 1, 1, 4]]
    monkeypatch.setattr(
        MODELS[name], "cache_dtype", None
    )  # so that no cache entry is rounded differently
    compiled, _ = found(MODELS[name], options, groups, is_short=True)
    monkeypatch.setattr(native, "compiled", lambda: None)
    plain, _ = found(MODELS[name], options, groups, is_short=True)
    for one, other in zip(compiled, plain, strict=True):
        assert [each.ids for each in one] == [each.ids for each in other]
        for a, b in zip(one, other, strict=True):
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)


def test_shortlists_smaller_than_the_beam_are_searched_without_the_compiled_call(calls):
    model, options = MODELS["post"], DecodingOptions(beam=6)
    constraints = replace(
        group(model, [4, 5], 3, 0).constraints,
        shortlists=model.output.rows([np.array([EOS, 9]), np.array([EOS, 5, 6])]),
    )
    search = BeamSearch(model.decode_step, options, model.search_steps)
    search.admit(replace(group(model, [4, 5], 3, 0), constraints=constraints))
    while search.num_open:
        search.advance()
    assert "search_steps" not in calls
    assert set(search.take_best(0)[0].ids) <= {9}
    assert set(search.take_best(1)[0].ids) <= {5, 6}


Trace = dict[int, tuple[list[int], list[int], list[int], list[float]]]


def traced(model: Transformer, options: DecodingOptions, one_by_one: bool) -> Trace:
    """Return by position which sentences end there, and the open cells, tokens and scores."""
    search = BeamSearch(model.decode_step, options, None if one_by_one else model.search_steps)
    search.admit(group(model, [5, 2, 7, 3], 6, 0))
    trace: Trace = {}
    while search.num_open:
        ended, rows = search.advance(), search.rows
        parts = (search.cell_N.tolist(), rows.ids_N.tolist(), rows.log_prob_N.tolist())
        trace[rows.written_NT.shape[1]] = (ended, *parts)
    return trace


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES.keys())
@pytest.mark.parametrize("name", ["post", "long"])
def test_a_compiled_call_stops_where_a_sentence_ends_with_the_rows_of_one_position_at_a_time(
    name, options
):
    apart = traced(MODELS[name], options, one_by_one=True)
    together = traced(MODELS[name], options, one_by_one=False)
    assert together == {position: apart[position] for position in together}
    assert {position for position in apart if apart[position][0]} <= together.keys()
    assert len(together) < len(apart)


def test_the_test_models_end_some_but_not_all_targets_before_the_length_limit():
    greedy, _ = found(MODELS["post"], SEARCHES["greedy"], [[5, 2, 7, 3]], extra=4)
    assert {len(best[0].ids) < 4 for best in greedy} == {True, False}
    best_of, _ = found(MODELS["long"], SEARCHES["beam"], [[5, 2, 7, 3]], extra=4)
    assert all(len(best[0].ids) > 1 for best in best_of)


@given(
    beam=st.integers(1, 5),
    num_best=st.integers(1, 5),
    alpha=st.sampled_from([0.0, 0.6, 1.4]),
    early_stop=st.booleans(),
    extra=st.integers(0, 12),
    groups=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_a_compiled_search_with_any_options_equals_one_position_at_a_time(
    beam, num_best, alpha, early_stop, extra, groups
):
    options = DecodingOptions(
        beam=beam,
        num_best=min(beam, num_best),
        length_alpha=alpha,
        early_stop=early_stop,
        with_scores=True,
    )
    for model in (MODELS["post"], MODELS["long"]):
        together, _ = found(model, options, groups, extra)
        assert together == found(model, options, groups, extra, one_by_one=True)[0]


@pytest.mark.parametrize("drop", [0, 2])
def test_a_compiled_search_does_not_depend_on_a_dropped_sentence(drop):
    arguments = (MODELS["post"], DecodingOptions(beam=3), [[5, 2, 7], [3]])
    kept, _ = found(*arguments, one_by_one=True)
    del kept[drop]
    assert found(*arguments, drop=drop)[0] == kept


def test_a_compiled_beam_wider_than_the_vocabulary_equals_one_position_at_a_time():
    options = DecodingOptions(beam=NUM_TOKENS + 3, num_best=5)
    together, _ = found(MODELS["post"], options, [[3, 2]])
    assert together == found(MODELS["post"], options, [[3, 2]], one_by_one=True)[0]


def test_searches_with_a_prefix_or_no_repeat_ngram_do_not_call_search_steps(calls):
    model = MODELS["post"]
    with_prefix = group(model, [3], 4, 0)
    constraints = replace(with_prefix.constraints, prefix_BP=np.array([[5, 6]]))
    for one in (constraints, replace(with_prefix.constraints, no_repeat_ngram=2)):
        search = BeamSearch(model.decode_step, DecodingOptions(beam=2), model.search_steps)
        search.admit(RequestGroup(group(model, [3], 4, 0).state, one))
        while search.num_open:
            search.advance()
    assert "search_steps" not in calls


def test_a_search_after_the_weights_change_does_not_call_search_steps(calls):
    model = packed()
    before, _ = found(model, DecodingOptions(beam=3), [[5, 2]])
    calls.clear()
    search = BeamSearch(model.decode_step, DecodingOptions(beam=3), model.search_steps)
    search.admit(group(model, [5, 2], 4, 0))
    with torch.no_grad():
        model.output.weight.mul_(-1)
    while search.num_open:
        search.advance()
    assert "search_steps" not in calls
    assert [search.take_best(number) for number in range(2)] != before


def test_a_hook_of_the_output_layer_is_called():
    model, seen = packed(), []
    model.output.register_forward_hook(lambda *arguments: seen.append(1))
    found(model, DecodingOptions(beam=2), [[3]])
    assert seen


@pytest.mark.parametrize("beam", [1, 3])
def test_nan_logits_in_a_compiled_search_raise_not_finite_error(beam):
    model = packed()
    with torch.no_grad():
        model.output.weight.fill_(torch.nan)
    model.pack_weights()
    with pytest.raises(NotFiniteError):
        found(model, DecodingOptions(beam=beam), [[3]])


def rules_and_rows(model: Transformer) -> tuple[BeamSearch[KVCache], beam_search.SearchRules]:
    search = BeamSearch(model.decode_step, DecodingOptions(beam=2))
    search.admit(group(model, [3, 2], 4, 0))
    search.advance()
    limits = search.sentences.max_lengths_B
    rules = beam_search.SearchRules(2, EOS, [0, BOS], limits, search.penalty_T, False, False)
    return search, rules


@pytest.mark.parametrize(
    "change",
    [
        {"ids_N": np.array([5, NUM_TOKENS, 5, 5])},
        {"ids_N": np.array([5, -1, 5, 5])},
        {"sentence_N": np.array([0, 0, 1, 2])},
        {"sentence_N": np.array([0, 1, 0, 1])},
        {"sentence_N": np.array([0, 0, 0, 1])},
        {"length_N": np.array([1, 1, -1, 1])},
    ],
)
@torch.inference_mode()
def test_a_compiled_search_refuses_invalid_rows(change):
    search, rules = rules_and_rows(MODELS["endless"])
    assert len(search.rows.ids_N) == 4
    arguments = (search.sentences.num_places_B, search.sentences.best_BM)
    rows = search.rows._replace(**change)
    with pytest.raises(IndexError):
        MODELS["endless"].search_steps(search.state, rows, *arguments, rules)
    assert MODELS["endless"].search_steps(search.state, search.rows, *arguments, rules) is not None


@torch.inference_mode()
def test_a_compiled_search_refuses_too_few_length_penalties_and_more_places_than_the_beam():
    search, rules = rules_and_rows(MODELS["endless"])
    arguments = (search.rows, search.sentences.num_places_B, search.sentences.best_BM)
    short = rules._replace(penalty_T=rules.penalty_T[:5])
    with pytest.raises(IndexError):
        MODELS["endless"].search_steps(search.state, *arguments, short)
    places = np.array([3, 2])
    with pytest.raises(IndexError):
        MODELS["endless"].search_steps(search.state, search.rows, places, arguments[2], rules)


@torch.inference_mode()
def test_a_compiled_search_does_not_modify_its_arguments():
    search, rules = rules_and_rows(MODELS["endless"])
    kept = [np.copy(each) for each in (*search.rows, *search.sentences)]
    arguments = (search.rows, search.sentences.num_places_B, search.sentences.best_BM)
    assert MODELS["endless"].search_steps(search.state, *arguments, rules) is not None
    for before, after in zip(kept, (*search.rows, *search.sentences), strict=True):
        np.testing.assert_array_equal(before, after)


@torch.inference_mode()
def test_a_compiled_search_refuses_negative_places_and_no_best_hypotheses():
    search, rules = rules_and_rows(MODELS["endless"])
    best_BM, arguments = search.sentences.best_BM, (search.state, search.rows)
    for places, best in ((np.array([-1, 2]), best_BM), (np.array([2, 2]), best_BM[:, :0])):
        with pytest.raises(IndexError):
            MODELS["endless"].search_steps(*arguments, places, best, rules)


@torch.inference_mode()
def test_a_compiled_search_returns_none_for_arrays_of_other_lengths():
    model = MODELS["endless"]
    search, rules = rules_and_rows(model)
    places, best_BM = search.sentences.num_places_B, search.sentences.best_BM
    short = rules._replace(shortlists=model.output.rows([np.arange(9)]))
    limits = rules._replace(max_lengths_B=rules.max_lengths_B[:1])
    for changed, best in ((short, best_BM), (limits, best_BM), (rules, best_BM[:1])):
        assert model.search_steps(search.state, search.rows, places, best, changed) is None


@torch.no_grad()
def test_a_compiled_search_returns_none_for_an_output_layer_of_another_vocabulary():
    model = packed(eos=0.0)
    search, rules = rules_and_rows(model)
    model.output.weight = torch.nn.Parameter(model.output.weight[:15].clone())
    model.output.pack_weights()
    assert model._compiled_decoder is not None
    assert model.search_steps(search.state, search.rows, *search.sentences[1:3], rules) is None


@torch.inference_mode()
def test_a_compiled_search_takes_arrays_of_other_types_and_layouts():
    model = MODELS["endless"]
    search, rules = rules_and_rows(model)
    places, best_BM = search.sentences.num_places_B, search.sentences.best_BM
    expected = model.search_steps(search.state, search.rows, places, best_BM, rules)
    search, rules = rules_and_rows(model)
    rules = rules._replace(
        max_lengths_B=rules.max_lengths_B.astype(np.int32),
        penalty_T=rules.penalty_T.astype(np.float32),
    )
    places, best_BM = places.astype(np.int32), np.asfortranarray(best_BM, np.float32)
    found = model.search_steps(search.state, search.rows, places, best_BM, rules)
    assert found is not None and expected is not None
    assert found.rows.written_NT.tolist() == expected.rows.written_NT.tolist()
    assert found.num_places_B.dtype == np.int64
