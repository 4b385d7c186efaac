"""Compare an ensemble with the mean of its models' probabilities, written out."""

import numpy as np
import pytest
import torch
from builders import Prefixes, beam, left_keep, model_config, transformer
from torch import Tensor

from mtrain.decode.beam import Constraints, Hypothesis, RequestGroup
from mtrain.decode.options import DecodingOptions
from mtrain.decode.translator import Ensemble, EnsembleState, Padded
from mtrain.model.transformer import SelfAttention, Transformer

SAME = {"rtol": 1e-9, "atol": 1e-11}
LENGTHS = [5, 2, 4]
FIRST = transformer(model_config(), 12, 12, seed=1)
SECOND = transformer(  # of another architecture; only the target vocabulary is the same
    model_config(d_model=18, num_heads=3, num_decoder_layers=1, norm="pre"), 12, 12, seed=2
)
SRC_KEEP_BS = left_keep(LENGTHS)


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 12, shape, generator=torch.Generator().manual_seed(seed))


SRC_BS = ids(3, 5).masked_fill(~SRC_KEEP_BS, 0)
SOURCES = Padded(SRC_BS, SRC_KEEP_BS)


@torch.no_grad()
def log_probs_of(model: Transformer, rows_N: Tensor, tgt_in_NT: Tensor) -> Tensor:
    """The log-probabilities [N, T, V] of one model, for targets decoded in one forward pass."""
    states_NTD = model(SRC_BS[rows_N], SRC_KEEP_BS[rows_N], tgt_in_NT)
    return model.output(states_NTD).log_softmax(-1)


def mean_of(models: list[Transformer], rows_N: Tensor, tgt_in_NT: Tensor) -> Tensor:
    """The logarithm of the mean of the probabilities."""
    probs = [log_probs_of(model, rows_N, tgt_in_NT).exp() for model in models]
    return (sum(probs) / len(models)).log()


@torch.no_grad()
def decode(models: list[Transformer], width: int = 3) -> list[list[Hypothesis]]:
    """Search in two groups; the second is admitted to the running batch."""
    together = Ensemble(models)
    groups = (
        RequestGroup(
            together.start([Padded(SRC_BS[rows], SRC_KEEP_BS[rows])] * len(models)),
            Constraints(2, 3, [0, 2], np.array(LENGTHS[rows])),
        )
        for rows in (slice(0, 1), slice(1, 3))
    )
    return beam(
        together.step, groups, DecodingOptions(beam=width, length_alpha=0.6, num_best=width)
    )


def assert_alike(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for own, others in zip(found, expected, strict=True):
        assert [one.ids for one in own] == [one.ids for one in others]
        for one, other in zip(own, others, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-9)


@torch.no_grad()
def test_an_ensemble_of_one_model_equals_the_model():
    together, ids_N = Ensemble([FIRST]), ids(3, seed=4)
    state = FIRST.start(SRC_BS, SRC_KEEP_BS)
    logits_NV = together.step(ids_N, together.start([SOURCES] * len(together.models)))
    assert torch.equal(logits_NV, FIRST.decode_step(ids_N, state))
    tgt_in_BT, everyone = ids(3, 6, seed=5), torch.arange(3)
    torch.testing.assert_close(
        together.all_log_probs([SOURCES], tgt_in_BT),
        log_probs_of(FIRST, everyone, tgt_in_BT),
        **SAME,
    )


@pytest.mark.parametrize("count", [2, 3])
def test_an_ensemble_of_copies_of_a_model_decodes_like_the_model(count):
    assert_alike(decode([FIRST] * count), decode([FIRST]))


@pytest.mark.parametrize("models", [[FIRST, SECOND], [SECOND, FIRST, FIRST]])
@torch.no_grad()
def test_an_ensemble_of_different_models_gives_the_mean_of_their_probabilities(models):
    tgt_in_BT, everyone = ids(3, 6, seed=5), torch.arange(3)
    expected = mean_of(models, everyone, tgt_in_BT)
    found = Ensemble(models).all_log_probs([SOURCES] * len(models), tgt_in_BT)
    torch.testing.assert_close(found, expected, **SAME)
    tgt_out_BT = ids(3, 6, seed=6)
    torch.testing.assert_close(
        Ensemble(models).log_probs([SOURCES] * len(models), tgt_in_BT, tgt_out_BT),
        expected.gather(2, tgt_out_BT[:, :, None])[:, :, 0],
        **SAME,
    )
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(3, 6, dtype=torch.float64), **SAME)
    for model in models:
        assert not torch.allclose(found, log_probs_of(model, everyone, tgt_in_BT), atol=0.01)


@torch.no_grad()
def test_steps_after_reorder_and_admit_equal_the_mean_of_full_forward_passes():
    models = [FIRST, SECOND]
    together = Ensemble(models)
    state = together.start([SOURCES] * len(together.models))
    sentence_N, tgt_NT = torch.arange(3), torch.empty(3, 0, dtype=torch.long)
    for place, rows in enumerate([[2, 0, 1, 1], [3, 3, 0, 1, 2], [4, 0, 2], [1], [0, 0]]):
        state.reorder(torch.tensor(rows))
        new_N1 = ids(len(rows), 1, seed=10 + place)
        sentence_N, tgt_NT = sentence_N[rows], torch.cat([tgt_NT[rows], new_N1], 1)
        expected = mean_of(models, sentence_N, tgt_NT)[:, -1]
        torch.testing.assert_close(together.step(new_N1[:, 0], state), expected, **SAME)
    state.admit(together.start([SOURCES] * len(together.models)))
    new_N = ids(5, seed=20)
    own = mean_of(models, sentence_N, torch.cat([tgt_NT, new_N[:2, None]], 1))[:, -1]
    joined = mean_of(models, torch.arange(3), new_N[2:, None])[:, -1]
    torch.testing.assert_close(together.step(new_N, state), torch.cat([own, joined]), **SAME)


def test_reorder_is_applied_to_the_state_of_every_model():
    states = [Prefixes([7, 8, 9]), Prefixes([1, 2, 3])]
    EnsembleState(states).reorder(torch.tensor([2, 0, 0]))  # type: ignore[arg-type]
    assert [state.sentences for state in states] == [[9, 7, 7], [3, 1, 1]]


def test_log_probs_of_a_searched_target_equal_those_of_the_mean_probabilities():
    """Compare with the same target decoded in one forward pass."""
    models, num_different = [FIRST, SECOND], 0
    alone = decode([FIRST])
    for row, (found, by_one) in enumerate(zip(decode(models), alone, strict=True)):
        num_different += [one.ids for one in found] != [one.ids for one in by_one]
        for hypothesis in found:
            tgt_in_1T = torch.tensor([[2, *hypothesis.ids]])
            log_probs_TV = mean_of(models, torch.tensor([row]), tgt_in_1T)[0]
            tgt_out_T1 = torch.tensor([*hypothesis.ids, 3])[:, None]
            expected = log_probs_TV.gather(1, tgt_out_T1)[:, 0].tolist()
            assert hypothesis.log_probs == pytest.approx(expected, abs=1e-9)
    assert num_different > 0


def test_the_weights_of_self_attention_are_not_computed_for_the_cross_attention(monkeypatch):
    monkeypatch.delattr(SelfAttention, "weights")
    found = Ensemble([FIRST]).cross_attention([SOURCES], ids(3, 6))
    assert found.shape == (3, 6, 5)


@torch.no_grad()
def test_the_cross_attention_of_an_ensemble_is_the_mean_over_heads_layers_and_models():
    tgt_in_BT = ids(3, 6, seed=5)
    maps = [
        weights_BTS
        for model in (FIRST, SECOND)
        for weights_BHTS in model.attention_maps(SRC_BS, SRC_KEEP_BS, tgt_in_BT).cross
        for weights_BTS in [weights_BHTS.sum(1) / weights_BHTS.shape[1]]
    ]
    assert len(maps) == 2 + 1
    found = Ensemble([FIRST, SECOND]).cross_attention([SOURCES] * 2, tgt_in_BT)
    torch.testing.assert_close(found, sum(maps) / 3, **SAME)
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 6, dtype=torch.float64), **SAME)
    assert (found.masked_select(~SRC_KEEP_BS[:, None]) < 1e-12).all()
