"""Compare compiled stacks with their own layers, one operation after the other, bit for bit."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from builders import left_keep, model_config, transformer
from torch import Tensor, nn

from mtrain.model import transformer as transformer_module
from mtrain.model.kv_cache import KVCache
from mtrain.model.transformer import Transformer
from mtrain.ops import native
from mtrain.ops.packed_weights import Precision
from mtrain.ops.stacks import CompiledDecoder, CompiledSources

CONFIGS = {
    "post": model_config(),
    "wide": model_config(d_model=64, num_heads=2, d_ff=300, num_decoder_layers=3),
    "four_heads": model_config(d_model=128, num_heads=4),
    "one_layer": model_config(num_decoder_layers=1),
    "window": model_config(attention_window=1),
    "learned": model_config(positions="learned", max_positions=3),
}
SRC_LENGTHS = [5, 2, 7]
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.compiled() is None, reason="the operations are not compiled"),
]


PRECISIONS = pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])


def packed(config: object = CONFIGS["post"], precision: Precision = "float32") -> Transformer:
    model = transformer(config).float()
    model.pack_weights(precision)
    return model


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(20, (count,), generator=torch.Generator().manual_seed(seed))


def start(model: Transformer, seed: int = 0) -> KVCache:
    keep_BS = left_keep(SRC_LENGTHS)
    return model.start(ids(keep_BS.numel(), seed).view_as(keep_BS), keep_BS)


def decoded(model: Transformer) -> list[Tensor]:
    """Return the logits of each step, while hypotheses are copied, dropped and admitted."""
    cache, logits = start(model), []
    for number, rows in enumerate([[0, 1, 2], [2, 0, 0, 1, 1, 1, 2], [6, 1, 3], [], [0, 1, 2]]):
        if not rows:
            cache.admit(start(model, seed=1))
        else:
            cache.reorder(np.array(rows))
        logits.append(model.decode_step(ids(len(cache.length_N), number), cache)[:])
    return logits


def one_by_one(model: Transformer, precision: Precision = "float32") -> list[Tensor]:
    """Return the same, computed layer by layer."""
    apart = copy.deepcopy(model)
    apart.pack_weights(precision)
    apart._compile_decoder = lambda: None  # type: ignore[method-assign]
    apart._current_sources = lambda: None  # type: ignore[method-assign]
    return decoded(apart)


@PRECISIONS
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@torch.no_grad()
def test_the_compiled_decoder_equals_its_layers_bit_for_bit(config, precision, calls):
    model = packed(config, precision)
    found = decoded(model)
    assert calls.count("decoder_step") == len(found)
    assert "paged_attention" not in calls
    calls.clear()
    expected = one_by_one(model, precision)
    assert "decoder_step" not in calls
    assert "paged_attention" in calls
    assert all(map(torch.equal, found, expected))


@torch.no_grad()
def test_the_compiled_decoder_takes_linear_layers_without_a_bias():
    model = packed()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bias = None
    assert all(map(torch.equal, decoded(model), one_by_one(model)))


@pytest.mark.parametrize(
    "config",
    [
        model_config(norm="pre"),
        model_config(activation="gelu"),
        model_config(activation_dropout=0.1),
        model_config(norm="pre", activation="gelu"),
    ],
)
@torch.no_grad()
def test_layers_with_unsupported_options_do_not_use_the_compiled_decoder(config, calls):
    decoded(packed(config))
    assert "decoder_step" not in calls


@torch.no_grad()
def test_layers_whose_weights_were_shortened_do_not_use_the_compiled_decoder(calls):
    """Attributes such as `out_features` are not updated."""
    model = packed()
    for layer in (*model.encoder, *model.decoder):
        inner, outer = layer.feed_forward.inner, layer.feed_forward.outer
        inner.weight, inner.bias = nn.Parameter(inner.weight[:8].clone()), None
        outer.weight = nn.Parameter(outer.weight[:, :8].clone())
    model.pack_weights()
    assert all(map(torch.equal, decoded(model), one_by_one(model)))
    assert not {"encode_sources", "decoder_step"} & {*calls}


@torch.no_grad()
def test_unpacked_or_float64_weights_do_not_use_the_compiled_decoder(calls):
    decoded(transformer(CONFIGS["post"]).float())
    decoded(packed().double())
    assert "decoder_step" not in calls


def replace_norm(model: Transformer) -> None:
    norm = copy.deepcopy(model.decoder[1].residual_3.norm)
    norm.bias.data += 1
    model.decoder[1].residual_3.norm = norm


def hook(model: Transformer) -> None:
    inner = model.decoder[0].feed_forward.inner
    inner.register_forward_hook(lambda module, inputs, output: output + 1)


def encoder_bias(model: Transformer) -> None:
    model.encoder[1].feed_forward.outer.bias.add_(1)


def source_map(model: Transformer) -> nn.Linear:
    return model.decoder[1].cross_attention.source_keys_values


CHANGES: dict[str, Callable[[Transformer], object]] = {
    "in_place": lambda model: model.decoder[0].self_attention.output.weight.mul_(2),
    "bias": lambda model: model.decoder[1].cross_attention.queries.bias.add_(1),
    "gain": lambda model: model.decoder[0].residual_2.norm.weight.add_(1),
    "data": lambda model: model.decoder[0].feed_forward.outer.weight.data.mul_(2),
    "eps": lambda model: setattr(model.decoder[0].residual_1.norm, "eps", 1.0),
    "module": replace_norm,
    "hook": hook,
    "encoder": encoder_bias,
    "source_map": lambda model: source_map(model).weight.mul_(2),
    "source_map_data": lambda model: source_map(model).weight.data.mul_(2),
    "source_map_bias": lambda model: source_map(model).bias.add_(1),
    "source_map_hook": lambda model: source_map(model).register_forward_hook(
        lambda module, inputs, output: output + 1
    ),
    "source_positions": lambda model: model.src_positions.register_forward_hook(
        lambda module, inputs, output: output.flip(0)
    ),
    "embedding": lambda model: model.tgt_embedding.weight.mul_(2),
    "positions": lambda model: model.tgt_positions.register_forward_hook(
        lambda module, inputs, output: output + 1
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@torch.no_grad()
def test_the_compiled_decoder_uses_changes_of_the_model_between_searches(change):
    model = packed()
    before = decoded(model)
    change(model)
    after = decoded(model)
    fresh = copy.deepcopy(model)
    assert not torch.equal(after[-1], before[-1])
    for found, expected in zip(after, decoded(fresh), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_compiled_decoder_is_not_used_after_its_weights_change_in_place(calls):
    model = packed()
    cache = start(model)
    model.decode_step(ids(3, 0), cache)
    model.decoder[0].residual_2.norm.weight.add_(1)
    calls.clear()
    model.decode_step(ids(3, 0), cache)
    assert "decoder_step" not in calls


def test_compiled_stacks_are_not_used_in_training_mode(calls):
    model = packed(model_config(dropout=0.1)).train()
    cache = start(model)
    logits = model.decode_step(ids(3, 0), cache)[:]
    logits.sum().backward()
    assert "decoder_step" not in calls
    with torch.no_grad():
        decoded(model)
    assert not {"encode_sources", "decoder_step"} & {*calls}


def test_compiled_stacks_are_not_used_where_gradients_are_needed(calls):
    model = packed()
    with torch.no_grad():
        start(model)
    calls.clear()
    logits = model.decode_step(ids(3, 0), start(model))[:]
    grads = torch.autograd.grad(logits.sum(), list(model.decoder[0].parameters()))
    assert all(grad.any() for grad in grads)
    assert not {"encode_sources", "decoder_step"} & {*calls}


@PRECISIONS
@pytest.mark.parametrize("min_positions", [1, 512], ids=["each length apart", "all together"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_compiled_sources_equal_those_of_their_modules_bit_for_bit(
    name, min_positions, precision, calls, monkeypatch
):
    monkeypatch.setattr(transformer_module, "_MIN_GROUP_POSITIONS", min_positions)
    model = packed(CONFIGS[name], precision)
    found = start(model)
    num_calls = 0 if name == "window" else 1 if min_positions > 21 else 3
    assert calls.count("encode_sources") == num_calls
    assert name == "window" or "packed_linear" not in calls
    model._current_sources = lambda: None  # type: ignore[method-assign]
    expected = start(model)
    assert calls.count("encode_sources") == num_calls
    assert all(map(torch.equal, found.sources.layers, expected.sources.layers))
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    assert {pool_RX.dtype for pool_RX in (*found.sources.layers, *found.pasts.layers)} == {dtype}
    assert np.array_equal(found.src_slots_NS, expected.src_slots_NS)


@torch.no_grad()
def test_sources_above_512_positions_are_encoded_layer_by_layer(calls):
    """Whose scores one call would hold all at once."""
    model = packed()
    for length, num_calls in ((512, 1), (513, 0)):
        src_BS, keep_BS = ids(length, 3)[None], left_keep([length])
        calls.clear()
        memory_BSD = model.encode(src_BS, keep_BS)
        cache = model.start(src_BS, keep_BS)
        assert calls.count("encode_sources") == num_calls
        (source_RX, *_), layer = cache.sources.layers, model.decoder[0]
        torch.testing.assert_close(source_RX, layer.project_source(memory_BSD[0]))


@pytest.mark.parametrize("config", [model_config(norm="pre"), model_config(activation="gelu")])
@torch.no_grad()
def test_unsupported_or_unpacked_models_do_not_use_compiled_sources(config, calls):
    start(packed(config))
    start(transformer(CONFIGS["post"]).float())
    assert "encode_sources" not in calls


def compiled_sources() -> CompiledSources:
    model = packed()
    start(model)
    assert model._compiled_sources is not None
    return model._compiled_sources


def some_sources() -> list[object]:
    """Return the arguments of `CompiledSources.write`: two sources of 3 and 2 tokens."""
    slots = np.array([[0, 1, 2], [4, 5, -1]])
    return [np.arange(6).reshape(2, 3), slots, torch.randn(4, 12), [*torch.zeros(2, 8, 24)]]


@torch.no_grad()
def test_compiled_sources_are_written_only_to_their_slots():
    arguments = some_sources()
    assert compiled_sources().write(*arguments)
    for pool_RX in arguments[3]:
        is_written_R = pool_RX.any(1).tolist()
        assert is_written_R == [True, True, True, False, True, True, False, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {0: np.array([[0, 1, 20], [0, 1, 2]])},
        {0: np.array([[0, 1, -1], [0, 1, 2]])},
        {1: np.array([[0, 1, 2], [3, 8, -1]])},
        {1: np.array([[0, 1, 2], [3, 2**40, -1]])},
    ],
)
@torch.no_grad()
def test_compiled_sources_refuse_a_token_or_a_slot_out_of_range(wrong):
    arguments = some_sources()
    arguments[next(iter(wrong))] = next(iter(wrong.values()))
    with pytest.raises(IndexError):
        compiled_sources().write(*arguments)
    assert not any(pool_RX.any() for pool_RX in arguments[3])


@torch.no_grad()
def test_compiled_sources_return_false_for_unsupported_arguments():
    ids_BS, slots_BS, encodings_TD, pools = some_sources()
    sources = compiled_sources()
    for wrong in (
        [ids_BS[:1], slots_BS, encodings_TD, pools],
        [ids_BS[0], slots_BS[0], encodings_TD, pools],
        [ids_BS[:0], slots_BS[:0], encodings_TD, pools],
        [ids_BS.astype(np.int32), slots_BS, encodings_TD, pools],
        [ids_BS, slots_BS.astype(np.int32), encodings_TD, pools],
        [ids_BS, slots_BS, encodings_TD.double(), pools],
        [ids_BS, slots_BS, encodings_TD[:, :6], pools],
        [ids_BS, slots_BS, encodings_TD, pools[:1]],
        [ids_BS, slots_BS, encodings_TD, [pool_RX[:, :12] for pool_RX in pools]],
        [ids_BS, slots_BS, encodings_TD, [pool_RX.double() for pool_RX in pools]],
    ):
        assert sources.write(*wrong) is False
    with torch.enable_grad():
        assert sources.write(ids_BS, slots_BS, encodings_TD, pools) is False
    assert not any(pool_RX.any() for pool_RX in pools)


class Step(NamedTuple):
    """The arguments of `CompiledDecoder.step`, for three hypotheses."""

    ids_N: Tensor
    position_N: Tensor
    encodings_TD: Tensor
    pasts: list[Tensor]
    sources: list[Tensor]
    past_slots_NT: Tensor
    source_slots_NS: Tensor


def a_step() -> Step:
    pools = [[*torch.randn(2, 8, 24)] for _ in range(2)]
    slots = torch.arange(3)[:, None]
    return Step(torch.arange(3), torch.zeros(3).long(), torch.randn(4, 12), *pools, slots, slots)


def compiled() -> CompiledDecoder:
    model = packed()
    start(model)
    assert model._compiled_decoder is not None
    return model._compiled_decoder


@torch.no_grad()
def test_a_compiled_decoder_writes_nothing_outside_its_cache():
    whole = torch.zeros(2, 8, 24)
    step = a_step()._replace(pasts=[*whole[:, :4]], past_slots_NT=torch.tensor([[0], [1], [5]]))
    with pytest.raises(IndexError):
        compiled().step(*step)
    assert not whole[:, 4:].any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"past_slots_NT": torch.tensor([[0], [-1], [1]])},  # a new position needs a slot
        {"past_slots_NT": torch.tensor([[0], [2**40], [1]])},
        {"past_slots_NT": torch.tensor([[2**40, 0], [0, 1], [0, 2]])},
        {"source_slots_NS": torch.tensor([[0], [1], [8]])},
        {"ids_N": torch.tensor([0, 20, 1])},
        {"ids_N": torch.tensor([0, -1, 1])},
        {"position_N": torch.tensor([0, 0, -1])},
    ],
)
@torch.no_grad()
def test_ids_slots_and_positions_out_of_range_are_refused_by_a_compiled_decoder(wrong):
    with pytest.raises(IndexError):
        compiled().step(*a_step()._replace(**wrong))


@torch.no_grad()
def test_the_compiled_decoder_returns_none_for_unsupported_arguments():
    decoder, step = compiled(), a_step()
    assert decoder.step(*step) is not None
    wrong: dict[str, list[object]] = {
        "ids_N": [step.ids_N.int(), step.ids_N[:, None], step.ids_N.to("meta")],
        "position_N": [step.position_N[:2], torch.zeros(6).long()[::2]],
        "encodings_TD": [torch.randn(4, 11), torch.randn(4, 12).double(), torch.randn(12)],
        "pasts": [
            step.pasts[:1],
            [x.double() for x in step.pasts],
            [x.bfloat16() for x in step.pasts],
            [step.pasts[0], step.pasts[1][:4]],
            [torch.randn(8, 48)[:, ::2] for _ in range(2)],
        ],
        "sources": [[x[:, :20] for x in step.sources], step.sources * 2],
        "past_slots_NT": [step.past_slots_NT[:2], step.past_slots_NT[:, 0]],
        "source_slots_NS": [step.source_slots_NS[:, :0], step.source_slots_NS.int()],
    }
    for name, values in wrong.items():
        for value in values:
            assert decoder.step(*step._replace(**{name: value})) is None
