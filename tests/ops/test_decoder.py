"""Hold the compiled decoder to its own layers, one operation after the other, bit for bit."""

import copy
from collections.abc import Callable

import pytest
import torch
from builders import left_keep, model_config, transformer
from torch import Tensor, nn

from mtrain.model.kv_cache import KVCache
from mtrain.model.transformer import Transformer
from mtrain.ops import native
from mtrain.ops.linear import pack_weights

CONFIGS = {
    "post": model_config(),
    "wide": model_config(d_model=64, num_heads=2, d_ff=300, num_decoder_layers=3),
    "one_layer": model_config(num_decoder_layers=1),
    "window": model_config(attention_window=1),
    "learned": model_config(positions="learned", max_positions=3),
}
SRC_LENGTHS = [5, 2, 7]
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.compiled() is None, reason="the operations are not compiled"),
]


def packed(config: object = CONFIGS["post"]) -> Transformer:
    model = transformer(config).float()
    pack_weights(model)
    return model


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(20, (count,), generator=torch.Generator().manual_seed(seed))


def start(model: Transformer, seed: int = 0) -> KVCache:
    keep_BS = left_keep(SRC_LENGTHS)
    return model.start(ids(keep_BS.numel(), seed).view_as(keep_BS), keep_BS)


def decoded(model: Transformer) -> list[Tensor]:
    """Return the logits of each step, while hypotheses multiply, end and are joined by others."""
    cache, logits = start(model), []
    for number, rows in enumerate([[0, 1, 2], [2, 0, 0, 1, 1, 1, 2], [6, 1, 3], [], [0, 1, 2]]):
        if not rows:
            cache.admit(start(model, seed=1))
        else:
            cache.reorder(torch.tensor(rows))
        logits.append(model.decode_step(ids(len(cache.length_N), number), cache)[:])
    return logits


def one_by_one(model: Transformer) -> list[Tensor]:
    """Return the same, of layers that are called."""
    apart = copy.deepcopy(model)
    pack_weights(apart)
    apart._compile_decoder = lambda: None  # type: ignore[method-assign]
    return decoded(apart)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@torch.no_grad()
def test_the_compiled_decoder_is_its_layers_bit_for_bit(config, calls):
    model = packed(config)
    found = decoded(model)
    assert calls.count("decoder_step") == len(found)
    assert "paged_attention" not in calls
    calls.clear()
    expected = one_by_one(model)
    assert "decoder_step" not in calls
    assert "paged_attention" in calls
    assert all(map(torch.equal, found, expected))


@torch.no_grad()
def test_the_compiled_decoder_takes_maps_without_a_bias():
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
def test_layers_of_another_kind_are_never_the_compiled_decoder(config, calls):
    decoded(packed(config))
    assert "decoder_step" not in calls


@torch.no_grad()
def test_nothing_but_packed_weights_is_the_compiled_decoder(calls):
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


CHANGES: dict[str, Callable[[Transformer], object]] = {
    "in_place": lambda model: model.decoder[0].self_attention.output.weight.mul_(2),
    "bias": lambda model: model.decoder[1].cross_attention.queries.bias.add_(1),
    "gain": lambda model: model.decoder[0].residual_2.norm.weight.add_(1),
    "data": lambda model: model.decoder[0].feed_forward.outer.weight.data.mul_(2),
    "eps": lambda model: setattr(model.decoder[0].residual_1.norm, "eps", 1.0),
    "module": replace_norm,
    "hook": hook,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@torch.no_grad()
def test_the_compiled_decoder_notices_what_changes_between_searches(change):
    model = packed()
    before = decoded(model)
    change(model)
    after = decoded(model)
    fresh = copy.deepcopy(model)
    assert not torch.equal(after[-1], before[-1])
    for found, expected in zip(after, decoded(fresh), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_compiled_decoder_whose_weights_change_in_place_is_left_at_once(calls):
    model = packed()
    cache = start(model)
    model.decode_step(ids(3, 0), cache)
    model.decoder[0].residual_2.norm.weight.add_(1)
    calls.clear()
    model.decode_step(ids(3, 0), cache)
    assert "decoder_step" not in calls


def test_a_compiled_decoder_is_never_trained(calls):
    model = packed(model_config(dropout=0.1)).train()
    cache = start(model)
    logits = model.decode_step(ids(3, 0), cache)[:]
    logits.sum().backward()
    assert "decoder_step" not in calls
    with torch.no_grad():
        decoded(model)
    assert "decoder_step" not in calls


@torch.no_grad()
def test_a_compiled_decoder_writes_nothing_beyond_its_cache():
    model = packed()
    start(model)
    compiled, whole, x_ND = model._compiled_decoder, torch.zeros(2, 8, 24), torch.randn(3, 12)
    assert compiled is not None
    slots_NT = torch.tensor([[0], [1], [5]])
    with pytest.raises(IndexError):
        compiled.step(x_ND, [*whole[:, :4]], [*torch.randn(2, 8, 24)], slots_NT, slots_NT)
    assert not whole[:, 4:].any()


@pytest.mark.parametrize("name", ["slots_NT", "src_slots_NS"])
@pytest.mark.parametrize("slot", [10**6, 2**40])
@torch.no_grad()
def test_slots_beyond_a_compiled_decoders_cache_are_refused(name, slot):
    model = packed()
    cache = start(model)
    cache.advance = lambda: None  # type: ignore[method-assign]
    cache.slots_NT = torch.zeros(3, 1, dtype=torch.long)
    getattr(cache, name)[1, 0] = slot
    with pytest.raises(IndexError):
        model.decode_step(ids(3, 0), cache)


@torch.no_grad()
def test_a_compiled_decoder_needs_a_slot_to_write_to():
    model = packed()
    cache = start(model)
    cache.advance = lambda: None  # type: ignore[method-assign]
    cache.slots_NT = torch.tensor([[0], [-1], [1]])
    with pytest.raises(IndexError):
        model.decode_step(ids(3, 0), cache)


@torch.no_grad()
def test_what_a_compiled_decoder_cannot_take_runs_layer_by_layer():
    model = packed()
    start(model)
    compiled = model._compiled_decoder
    assert compiled is not None
    x_ND, slots_NT = torch.randn(3, 12), torch.tensor([[0], [1], [2]])
    pool = [torch.randn(8, 24) for _ in range(2)]
    assert compiled.step(x_ND, pool, pool, slots_NT, slots_NT) is not None
    for wrong in (
        (x_ND[0], pool, pool, slots_NT, slots_NT),
        (x_ND.double(), pool, pool, slots_NT, slots_NT),
        (x_ND[:, :6], pool, pool, slots_NT, slots_NT),
        (x_ND, pool[:1], pool, slots_NT, slots_NT),
        (x_ND, [x.double() for x in pool], pool, slots_NT, slots_NT),
        (x_ND, [pool[0], pool[1][:4]], pool, slots_NT, slots_NT),
        (x_ND, pool, [x[:, :20] for x in pool], slots_NT, slots_NT),
        (x_ND, pool, [torch.randn(8, 48)[:, ::2] for _ in pool], slots_NT, slots_NT),
        (x_ND, pool, pool, slots_NT[:2], slots_NT),
        (x_ND, pool, pool, slots_NT.int(), slots_NT),
        (x_ND, pool, pool, slots_NT, slots_NT[:, :0]),
        (x_ND, pool, pool, slots_NT, slots_NT.to("meta")),
    ):
        assert compiled.step(*wrong) is None
