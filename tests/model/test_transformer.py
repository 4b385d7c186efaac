"""Compare the Transformer with torch's own layers, with the paper's figures, and with itself."""

import math
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from builders import left_keep, model_config, randomise, transformer, vocabularies
from torch import Tensor, nn

from mtrain.config.sections import ModelConfig
from mtrain.model.kv_cache import KVCache
from mtrain.model.transformer import (
    CrossAttention,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    Positions,
    SelfAttention,
    Transformer,
    count_weights,
    merge_heads,
    num_parameters,
    sinusoids,
    split_heads,
)
from mtrain.ops import native
from mtrain.ops.dropout import Dropout
from mtrain.ops.linear import Linear
from mtrain.run import checkpoint
from mtrain.run.load_model import build_model, set_weights

NORMS = ["post", "pre"]
LAYERS = [("post", "relu"), ("pre", "relu"), ("post", "gelu")]
D_MODEL = model_config().d_model
SRC_LENGTHS, TGT_LENGTHS = [5, 2, 4], [4, 6, 1]
SAME = {"rtol": 1e-9, "atol": 1e-11}
VARIANTS = {
    "post": model_config(),
    "pre": model_config(norm="pre"),
    "gelu": model_config(activation="gelu"),
    "learned": model_config(positions="learned", max_positions=8),
    "clamped": model_config(positions="learned", max_positions=3),
    "window": model_config(attention_window=1),
    "all": model_config(
        norm="pre", activation="gelu", positions="learned", max_positions=4, attention_window=2
    ),
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def normal(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def ids(batch: int, length: int, seed: int = 0, num_pieces: int = 20) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(num_pieces, (batch, length), generator=rng)


class Inputs(NamedTuple):
    src_BS: Tensor
    src_keep_BS: Tensor
    tgt_in_BT: Tensor


def inputs(tgt_length: int = max(TGT_LENGTHS)) -> Inputs:
    """Three sentences of different lengths; the padding positions hold random ids."""
    src_BS = ids(3, max(SRC_LENGTHS), seed=1)
    return Inputs(src_BS, left_keep(SRC_LENGTHS), ids(3, tgt_length, seed=2))


def all_kept(ids_BT: Tensor) -> Tensor:
    return torch.ones_like(ids_BT, dtype=torch.bool)


# Against torch.nn


class Twin(NamedTuple):
    """A weight of torch's layer, and the weights of ours whose concatenation it is."""

    theirs: Tensor
    ours: list[Tensor]


def twins(ours: EncoderLayer | DecoderLayer, theirs: nn.Module) -> list[Twin]:
    """Pair every weight of two layers."""
    own = ours.self_attention
    attentions = [(theirs.self_attn, [own.queries_keys_values], own.output)]
    modules = [
        (theirs.linear1, ours.feed_forward.inner),
        (theirs.linear2, ours.feed_forward.outer),
        (theirs.norm1, ours.residual_1.norm),
        (theirs.norm2, ours.residual_2.norm),
    ]
    if isinstance(ours, DecoderLayer):
        cross = ours.cross_attention
        projections = [cross.queries, cross.source_keys_values]
        attentions.append((theirs.multihead_attn, projections, cross.output))
        modules.append((theirs.norm3, ours.residual_3.norm))
    found = []
    for attention, projections, output in attentions:
        found.append(Twin(attention.in_proj_weight, [layer.weight for layer in projections]))
        found.append(Twin(attention.in_proj_bias, [layer.bias for layer in projections]))
        modules.append((attention.out_proj, output))
    for reference, mine in modules:
        found += [Twin(reference.weight, [mine.weight]), Twin(reference.bias, [mine.bias])]
    assert len(found) == len(list(theirs.parameters()))
    assert sum(len(twin.ours) for twin in found) == len(list(ours.parameters()))
    return found


@torch.no_grad()
def copy_layer(ours: EncoderLayer | DecoderLayer, theirs: nn.Module) -> None:
    """Copy the weights of our layer to torch's layer."""
    for twin in twins(ours, theirs):
        twin.theirs.copy_(torch.cat(twin.ours))


def assert_same_gradients(ours: EncoderLayer | DecoderLayer, theirs: nn.Module) -> None:
    """Compare the gradient of every weight after a backward pass through each layer."""
    for twin in twins(ours, theirs):
        mine = torch.cat([weight.grad for weight in twin.ours])
        torch.testing.assert_close(mine, twin.theirs.grad, **SAME)


def torch_layer(ours: EncoderLayer | DecoderLayer, norm: str, activation: str) -> nn.Module:
    config = model_config()
    kind = (
        nn.TransformerEncoderLayer if isinstance(ours, EncoderLayer) else nn.TransformerDecoderLayer
    )
    theirs = kind(
        config.d_model,
        config.num_heads,
        config.d_ff,
        dropout=0.0,
        activation=activation,
        layer_norm_eps=1e-5,
        batch_first=True,
        norm_first=norm == "pre",
        dtype=torch.float64,
    )
    copy_layer(ours, theirs)
    return theirs


def our_layer(kind: type, norm: str, activation: str) -> EncoderLayer | DecoderLayer:
    torch.manual_seed(4)
    layer = kind(model_config(norm=norm, activation=activation)).double()
    randomise(layer, seed=4)
    return layer


def causal_leave_out(length: int) -> Tensor:
    """Torch's causal mask: True means masked."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(("norm", "activation"), LAYERS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_an_encoder_layer_and_its_gradients_equal_torchs(norm, activation, is_causal):
    ours = our_layer(EncoderLayer, norm, activation)
    theirs = torch_layer(ours, norm, activation)
    keep_BS = left_keep(SRC_LENGTHS)
    x_BSD, upstream = normal(*keep_BS.shape, D_MODEL).requires_grad_(), normal(3, 5, D_MODEL)
    left_out = causal_leave_out(5) if is_causal else torch.zeros(5, 5, dtype=torch.bool)

    mine = ours(x_BSD, keep_BS[:, None, None, :] & ~left_out)
    reference = theirs(x_BSD, src_mask=left_out, src_key_padding_mask=~keep_BS)
    torch.testing.assert_close(mine, reference, **SAME)
    grads = []
    for out in (mine, reference):
        (out * upstream).sum().backward()
        grads.append(x_BSD.grad)
        x_BSD.grad = None
    torch.testing.assert_close(*grads, **SAME)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize(("norm", "activation"), LAYERS)
@pytest.mark.parametrize("length", [6, 5])
def test_a_decoder_layer_and_its_gradients_equal_torchs(norm, activation, length):
    """At length 5 source and target are equally long: a mask of the wrong side would fit."""
    ours = our_layer(DecoderLayer, norm, activation)
    theirs = torch_layer(ours, norm, activation)
    keep_BS = left_keep(SRC_LENGTHS)
    x_BTD = normal(3, length, D_MODEL).requires_grad_()
    memory_BSD = normal(*keep_BS.shape, D_MODEL, seed=1).requires_grad_()
    upstream = normal(3, length, D_MODEL, seed=2)

    causal_keep_TT = ~causal_leave_out(length)
    mine = ours(x_BTD, causal_keep_TT, memory_BSD, keep_BS[:, None, None, :])
    reference = theirs(
        x_BTD,
        memory_BSD,
        tgt_mask=causal_leave_out(length),
        memory_key_padding_mask=~keep_BS,
    )
    torch.testing.assert_close(mine, reference, **SAME)
    grads = []
    for out in (mine, reference):
        (out * upstream).sum().backward()
        grads.append([x_BTD.grad, memory_BSD.grad])
        x_BTD.grad = memory_BSD.grad = None
    torch.testing.assert_close(*grads, **SAME)
    assert_same_gradients(ours, theirs)


def torch_stacks(model: Transformer, norm: str) -> tuple[nn.Module, nn.Module]:
    """Torch's encoder and decoder, with final norms where pre-norm has them."""
    stacks = []
    for name, kind in (("encoder", nn.TransformerEncoder), ("decoder", nn.TransformerDecoder)):
        ours = getattr(model, name)
        final = getattr(model, f"{name}_norm")
        settings = {"enable_nested_tensor": False} if name == "encoder" else {}
        stack = kind(torch_layer(ours[0], norm, "relu"), len(ours), **settings)
        for layer, theirs in zip(ours, stack.layers, strict=True):
            copy_layer(layer, theirs)
        if norm == "pre":
            stack.norm = nn.LayerNorm(D_MODEL, eps=1e-5, dtype=torch.float64)
            stack.norm.load_state_dict(final.state_dict())
        stacks.append(stack)
    return stacks[0], stacks[1]


def embedded(table: nn.Embedding, ids_BT: Tensor) -> Tensor:
    positions = sinusoids(ids_BT.shape[1], D_MODEL)
    return table.weight[ids_BT] * math.sqrt(D_MODEL) + positions


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tgt_lengths", [[5, 3, 2], TGT_LENGTHS])
def test_states_and_embedding_gradients_of_the_whole_model_equal_those_of_torchs_stacks(
    norm, tgt_lengths
):
    """At length 5 source and target are equally long: a mask of the wrong side would fit."""
    model = transformer(model_config(norm=norm))
    encoder, decoder = torch_stacks(model, norm)
    real = left_keep(tgt_lengths)
    src_BS, src_keep_BS, tgt_in_BT = inputs(max(tgt_lengths))
    upstream = normal(3, max(tgt_lengths), 20)
    upstream[~real] = 0.0

    memory = encoder(embedded(model.src_embedding, src_BS), src_key_padding_mask=~src_keep_BS)
    states = decoder(
        embedded(model.tgt_embedding, tgt_in_BT),
        memory,
        tgt_mask=causal_leave_out(max(tgt_lengths)),
        tgt_key_padding_mask=~real,
        memory_key_padding_mask=~src_keep_BS,
    )
    ours = model(src_BS, src_keep_BS, tgt_in_BT)
    torch.testing.assert_close(model.encode(src_BS, src_keep_BS), memory, **SAME)
    torch.testing.assert_close(ours[real], states[real], **SAME)

    tables = [model.src_embedding.weight, model.tgt_embedding.weight, model.output.weight]
    torchs_logits = states @ model.output.weight.T
    grads, expected = (
        torch.autograd.grad((logits * upstream).sum(), tables)
        for logits in (model.output(ours), torchs_logits)
    )
    torch.testing.assert_close(grads, expected, **SAME)


@pytest.mark.parametrize("norm", NORMS)
def test_the_gradients_of_all_layer_weights_equal_torchs(norm):
    model = transformer(model_config(norm=norm))
    encoder, decoder = torch_stacks(model, norm)
    src_BS, src_keep_BS, tgt_in_BT = inputs()
    memory = encoder(embedded(model.src_embedding, src_BS), src_key_padding_mask=~src_keep_BS)
    states = decoder(
        embedded(model.tgt_embedding, tgt_in_BT),
        memory,
        tgt_mask=causal_leave_out(tgt_in_BT.shape[1]),
        memory_key_padding_mask=~src_keep_BS,
    )
    states.pow(3).sum().backward()
    model.zero_grad()
    model(src_BS, src_keep_BS, tgt_in_BT).pow(3).sum().backward()
    for ours, theirs in ((model.encoder, encoder), (model.decoder, decoder)):
        for layer, reference in zip(ours, theirs.layers, strict=True):
            assert_same_gradients(layer, reference)
    if norm == "pre":
        for final, reference in (
            (model.encoder_norm, encoder.norm),
            (model.decoder_norm, decoder.norm),
        ):
            torch.testing.assert_close(final.weight.grad, reference.weight.grad, **SAME)
            torch.testing.assert_close(final.bias.grad, reference.bias.grad, **SAME)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("norm", NORMS)
def test_an_attention_window_equals_torchs_stacks_with_a_band_mask(norm, window):
    model = transformer(model_config(norm=norm, attention_window=window))
    encoder, decoder = torch_stacks(model, norm)
    src_BS, tgt_in_BT = ids(2, 5, seed=1), ids(2, 6, seed=2)

    def far(length: int) -> Tensor:
        return torch.tensor([[abs(i - j) > window for j in range(length)] for i in range(length)])

    memory = encoder(embedded(model.src_embedding, src_BS), mask=far(5))
    states = decoder(
        embedded(model.tgt_embedding, tgt_in_BT), memory, tgt_mask=far(6) | causal_leave_out(6)
    )
    torch.testing.assert_close(model(src_BS, all_kept(src_BS), tgt_in_BT), states, **SAME)


def test_post_norm_has_no_final_norms_and_pre_norm_has_them():
    post, pre = (transformer(model_config(norm=norm)) for norm in NORMS)
    extra = {name for name, _ in pre.named_parameters()}
    extra -= {name for name, _ in post.named_parameters()}
    assert extra == {
        "encoder_norm.weight",
        "encoder_norm.bias",
        "decoder_norm.weight",
        "decoder_norm.bias",
    }


# Attention


def our_attention(kind: type, **settings: object) -> SelfAttention | CrossAttention:
    torch.manual_seed(5)
    attention = kind(model_config(**settings)).double()
    randomise(attention, seed=5)
    return attention


class Projection(NamedTuple):
    weight: Tensor
    bias: Tensor


def head_by_head(
    x_TD: Tensor, source_SD: Tensor, projections: list[Projection], output: Linear, keep_TS: Tensor
) -> Tensor:
    """Concat(head_1, ..., head_h) W_O for one sentence (section 3.2.2), one head at a time."""
    num_heads = model_config().num_heads
    width = D_MODEL // num_heads
    heads = []
    for head in range(num_heads):
        rows = slice(head * width, (head + 1) * width)
        q_TK, k_SK, v_SK = (
            x @ weight[rows].T + bias[rows]
            for x, (weight, bias) in zip((x_TD, source_SD, source_SD), projections, strict=True)
        )
        exp_TS = torch.exp(q_TK @ k_SK.T / math.sqrt(width)) * keep_TS
        heads.append(exp_TS / exp_TS.sum(1, keepdim=True) @ v_SK)
    return torch.cat(heads, 1) @ output.weight.T + output.bias


@torch.no_grad()
def test_self_attention_equals_the_formula_written_out_head_by_head():
    attention, x_BTD = our_attention(SelfAttention), normal(2, 5, D_MODEL)
    keep_TT = ~causal_leave_out(5)
    layer = attention.queries_keys_values
    projections = list(map(Projection, layer.weight.chunk(3), layer.bias.chunk(3)))
    found = attention(x_BTD, keep_TT)
    for x_TD, found_TD in zip(x_BTD, found, strict=True):
        expected = head_by_head(x_TD, x_TD, projections, attention.output, keep_TT)
        torch.testing.assert_close(found_TD, expected, **SAME)


@torch.no_grad()
def test_cross_attention_equals_the_formula_written_out_head_by_head():
    attention, x_BTD = our_attention(CrossAttention), normal(3, 4, D_MODEL)
    keep_BS, memory_BSD = left_keep(SRC_LENGTHS), normal(3, 5, D_MODEL, seed=1)
    both = attention.source_keys_values
    projections = [Projection(attention.queries.weight, attention.queries.bias)]
    projections += map(Projection, both.weight.chunk(2), both.bias.chunk(2))
    found = attention(x_BTD, attention.keys_values(memory_BSD), keep_BS[:, None, None, :])
    for x_TD, memory_SD, keep_S, found_TD in zip(x_BTD, memory_BSD, keep_BS, found, strict=True):
        keep_TS = keep_S.expand(4, 5)
        expected = head_by_head(x_TD, memory_SD, projections, attention.output, keep_TS)
        torch.testing.assert_close(found_TD, expected, **SAME)


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_self_attention_without_masked_positions_is_permutation_equivariant(seed):
    x_BTD, order = normal(2, 6, D_MODEL), torch.randperm(6, generator=torch.manual_seed(seed))
    keep = torch.ones(6, 6, dtype=torch.bool)
    for module in (our_attention(SelfAttention), our_layer(EncoderLayer, "post", "relu")):
        found = module(x_BTD[:, order], keep)
        torch.testing.assert_close(found, module(x_BTD, keep)[:, order], **SAME)


@torch.no_grad()
def test_cross_attention_does_not_depend_on_the_order_of_the_source_positions():
    attention, x_BTD, memory_BSD = (
        our_attention(CrossAttention),
        normal(2, 4, D_MODEL),
        normal(2, 5, D_MODEL, seed=1),
    )
    keep_BS, order = left_keep([5, 3]), torch.tensor([4, 2, 0, 1, 3])
    expected = attention(x_BTD, attention.keys_values(memory_BSD), keep_BS[:, None, None, :])
    source = attention.keys_values(memory_BSD[:, order])
    found = attention(x_BTD, source, keep_BS[:, order][:, None, None, :])
    torch.testing.assert_close(found, expected, **SAME)


@torch.no_grad()
def test_an_encoder_with_identical_position_embeddings_is_permutation_equivariant():
    model = transformer(model_config(positions="learned", max_positions=6))
    model.src_positions.table.weight.fill_(0.5)
    src_BS, order = ids(2, 6), torch.tensor([5, 0, 3, 1, 4, 2])
    keep_BS = left_keep([6, 4])
    found = model.encode(src_BS[:, order], keep_BS[:, order])
    torch.testing.assert_close(found, model.encode(src_BS, keep_BS)[:, order], **SAME)


@torch.no_grad()
def test_positions_and_a_causal_mask_each_break_permutation_equivariance():
    model = transformer(model_config())
    src_BS, order = ids(1, 6), torch.tensor([5, 0, 3, 1, 4, 2])
    memory = model.encode(src_BS, all_kept(src_BS))
    other = model.encode(src_BS[:, order], all_kept(src_BS))
    assert not torch.allclose(other, memory[:, order], atol=1e-3)
    keep = ~causal_leave_out(6)
    attention, x_BTD = our_attention(SelfAttention), normal(1, 6, D_MODEL)
    assert not torch.allclose(
        attention(x_BTD[:, order], keep), attention(x_BTD, keep)[:, order], atol=1e-3
    )


@every_variant
@torch.no_grad()
def test_attention_maps_sum_to_one_and_are_zero_at_masked_positions(config):
    model, data = transformer(config), inputs()
    maps = model.attention_maps(*data)
    length, reach = data.tgt_in_BT.shape[1], config.attention_window or 99
    src_keep_B11S = data.src_keep_BS[:, None, None, :]

    def near(count: int) -> Tensor:
        places = torch.arange(count)
        return (places[:, None] - places).abs() <= reach

    keeps = {
        "encoder": src_keep_B11S & near(5),
        "decoder": near(length) & ~causal_leave_out(length),
        "cross": src_keep_B11S.expand(-1, -1, length, -1),
    }
    for name, keep in keeps.items():
        layers = getattr(maps, name)
        assert len(layers) == 2
        for weights in layers:
            whole = keep.expand_as(weights)
            can_see = whole.any(-1)  # a padded position may have only padding in its window
            assert weights.isfinite().all()
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]).double())
            assert (weights[~whole & can_see[..., None]] == 0).all()
            assert (weights[whole] > 0).all()


@every_variant
@torch.no_grad()
def test_attention_maps_times_values_give_the_attention_outputs_of_the_model(config):
    """The map times the values, merged and projected, equals the attention's own output."""
    model, data = transformer(config), inputs()
    outputs: dict[nn.Module, list[Tensor]] = {}
    values: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple, out: Tensor) -> None:
        outputs.setdefault(module, []).append(out)
        if isinstance(module, SelfAttention):
            merged = module.queries_keys_values(args[0]).chunk(3, -1)[2]
            values[module] = split_heads(merged, config.num_heads)
        else:
            values[module] = args[1].values

    kinds = {
        "encoder": [layer.self_attention for layer in model.encoder],
        "decoder": [layer.self_attention for layer in model.decoder],
        "cross": [layer.cross_attention for layer in model.decoder],
    }
    for module in [module for modules in kinds.values() for module in modules]:
        module.register_forward_hook(note)
    maps = model.attention_maps(*data)
    for kind, modules in kinds.items():
        for module, weights in zip(modules, getattr(maps, kind), strict=True):
            expected = module.output(merge_heads(weights @ values[module]))
            assert len(outputs[module]) == 1
            torch.testing.assert_close(outputs[module][0], expected, **SAME)


@torch.no_grad()
def test_attention_maps_do_not_include_forward_passes_of_other_threads():
    """Another thread runs the model on other data at the same time."""
    model, data = transformer(model_config()), inputs()
    alone = model.attention_maps(*data)
    other = [tensor[:1] for tensor in data]

    def interrupt(module: nn.Module, args: tuple) -> None:
        handle.remove()
        thread = threading.Thread(target=model, args=other)
        thread.start()
        thread.join()

    handle = model.decoder[0].register_forward_pre_hook(interrupt)
    beside = model.attention_maps(*data)
    for maps, expected in zip(beside, alone, strict=True):
        assert len(maps) == len(expected)
        assert all(map(torch.equal, maps, expected))


def test_attention_maps_leave_no_hooks_and_do_not_change_the_output():
    model, data = transformer(model_config()), inputs()
    before = model(*data)
    first, again = model.attention_maps(*data), model.attention_maps(*data)
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(first.cross, again.cross, strict=True))
    assert torch.equal(model(*data), before)


# Positions and embeddings


@pytest.mark.parametrize("d_model", [2, 6, 512])
def test_sinusoids_equal_the_papers_formula(d_model):
    table = sinusoids(40, d_model)
    assert table.shape == (40, d_model)
    for position in (0, 1, 17, 39):
        for i in range(0, d_model // 2, max(1, d_model // 8)):
            angle = position / 10_000 ** (2 * i / d_model)
            assert float(table[position, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-12)
            assert float(table[position, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-12)


@pytest.mark.parametrize("d_model", [6, 128, 512])
def test_sinusoids_are_at_most_one_and_each_sine_cosine_pair_has_norm_one(d_model):
    table = sinusoids(5000, d_model)
    assert float(table.abs().max()) <= 1
    pairs = table.view(5000, -1, 2)  # a sine and its cosine
    torch.testing.assert_close(pairs.square().sum(-1), torch.ones(5000, d_model // 2).double())


@pytest.mark.parametrize("d_model", [16, 128])
def test_sinusoids_of_different_positions_are_more_than_one_apart(d_model):
    table = sinusoids(1000, d_model)
    distances = torch.cdist(table, table).fill_diagonal_(torch.inf)
    assert float(distances.min()) > 1


def test_sinusoids_do_not_depend_on_the_length():
    assert torch.equal(sinusoids(50, 8)[:10], sinusoids(10, 8))


@pytest.mark.parametrize("offset", [1, 3, 50])
def test_a_position_offset_is_the_same_rotation_of_sinusoids_at_every_position(offset):
    """PE(i + k) = T_k PE(i), where T_k depends on k alone."""
    d_model = 8
    rotation_DD = torch.zeros(d_model, d_model, dtype=torch.float64)
    for i in range(0, d_model, 2):
        angle = offset / 10_000 ** (i / d_model)
        rotation_DD[i, i] = rotation_DD[i + 1, i + 1] = math.cos(angle)
        rotation_DD[i, i + 1] = math.sin(angle)
        rotation_DD[i + 1, i] = -math.sin(angle)
    table = sinusoids(200 + offset, d_model)
    torch.testing.assert_close(table[offset:], table[:-offset] @ rotation_DD.T, **SAME)


def test_dot_products_of_sinusoids_are_symmetric_and_fall_with_the_distance():
    table = sinusoids(900, 512)
    products = table @ table.T
    middle = 450
    before, after = products[middle, : middle + 1].flip(0), products[middle, middle:]
    torch.testing.assert_close(before[:450], after, rtol=1e-12, atol=1e-9)
    for start in (0, 100):  # only the distance matters, not the position
        torch.testing.assert_close(
            products[start, start : start + 450], after, rtol=1e-12, atol=1e-9
        )
    near = after[:40].tolist()
    assert near == sorted(near, reverse=True)
    means = after[:400].view(-1, 20).mean(1).tolist()
    assert means == sorted(means, reverse=True)


def test_source_embeddings_are_scaled_by_the_square_root_of_d_model():
    model = transformer(model_config())
    src_BS = ids(2, 3)
    # without layers, `encode` returns the embeddings
    model.encoder = nn.ModuleList()
    without_layers = model.encode(src_BS, all_kept(src_BS))
    for sentence in range(2):
        for place in range(3):
            piece = int(src_BS[sentence, place])
            expected = (
                model.src_embedding.weight[piece] * D_MODEL**0.5
                + sinusoids(place + 1, D_MODEL)[place]
            )
            torch.testing.assert_close(without_layers[sentence, place], expected, **SAME)


def test_embeddings_are_initialised_with_standard_deviation_one_over_root_d_model():
    torch.manual_seed(0)
    model = Transformer(model_config(d_model=64), 2000, 2000)
    for table in (model.src_embedding, model.tgt_embedding, model.output):
        assert table.weight.std().item() == pytest.approx(64**-0.5, rel=0.02)
        assert table.weight.mean().item() == pytest.approx(0, abs=0.002)


def test_only_the_last_projection_of_every_residual_branch_is_initialised_small():
    torch.manual_seed(0)
    model = Transformer(model_config(d_model=64, d_ff=64), 50, 50)
    xavier = (6 / 128) ** 0.5  # of a square matrix of this size
    last = []
    for layer in [*model.encoder, *model.decoder]:
        last += [layer.self_attention.output, layer.feed_forward.outer]
        if isinstance(layer, DecoderLayer):
            last.append(layer.cross_attention.output)
            assert layer.cross_attention.queries.weight.abs().max() > 0.9 * xavier
        assert layer.feed_forward.inner.weight.abs().max() > 0.9 * xavier
    assert len(last) == 2 * 2 + 2 * 3
    for projection in last:
        assert 0 < projection.weight.abs().max() <= 0.05 * xavier
        assert (projection.bias == 0).all()


LEARNED = model_config(positions="learned", max_positions=6)


@pytest.mark.parametrize(("length", "first"), [(6, 0), (1, 0), (3, 2), (1, 5)])
def test_learned_positions_are_rows_of_a_table(length, first):
    torch.manual_seed(2)
    positions = Positions(LEARNED)
    assert positions.table.weight.shape == (6, D_MODEL)
    found = positions(torch.arange(first, first + length), first + length, torch.float32)
    assert torch.equal(found, positions.table.weight[first : first + length])


@pytest.mark.parametrize(("length", "first"), [(9, 0), (3, 4), (1, 6), (2, 1000)])
def test_positions_after_the_last_learned_one_share_its_embedding(length, first):
    torch.manual_seed(2)
    positions = Positions(LEARNED)
    rows = [min(place, 5) for place in range(first, first + length)]
    found = positions(torch.arange(first, first + length), first + length, torch.float32)
    assert torch.equal(found, positions.table.weight[rows])


@pytest.mark.parametrize("config", [model_config(), LEARNED], ids=["sinusoidal", "learned"])
def test_position_encodings_can_be_looked_up_in_any_order_and_shape(config):
    """Few and many: sinusoids are cached, and more are computed when they are needed."""
    torch.manual_seed(2)
    positions = Positions(config)
    if positions.table is None:
        expected = sinusoids(500, D_MODEL).float()
    else:
        expected = positions.table.weight[torch.arange(500).clamp(max=5)]
    for stop in (3, 1, 40, 5, 500):
        for shape in ((4,), (2, 3)):
            rng = torch.Generator().manual_seed(stop)
            places = torch.randint(stop, shape, generator=rng)
            assert torch.equal(positions(places, stop, torch.float32), expected[places])


@torch.no_grad()
def test_sinusoids_cached_in_inference_mode_can_be_used_in_training():
    model, data = transformer(model_config()), inputs()
    with torch.inference_mode():
        model(*data)
    with torch.enable_grad():
        model(*data).sum().backward()
    assert model.tgt_embedding.weight.grad is not None


def test_source_and_target_add_separate_learned_positions_to_scaled_embeddings():
    model, data = transformer(LEARNED), inputs()
    model.encoder, model.decoder = nn.ModuleList(), nn.ModuleList()
    for found, ids_BT, table, positions in (
        (
            model.encode(data.src_BS, data.src_keep_BS),
            data.src_BS,
            model.src_embedding.weight,
            model.src_positions.table.weight,
        ),
        (
            model(*data),
            data.tgt_in_BT,
            model.tgt_embedding.weight,
            model.tgt_positions.table.weight,
        ),
    ):
        expected = D_MODEL**0.5 * table[ids_BT] + positions[: ids_BT.shape[1]]
        torch.testing.assert_close(found, expected, **SAME)
    assert not torch.equal(model.src_positions.table.weight, model.tgt_positions.table.weight)


def test_learned_positions_are_weights_and_sinusoids_are_not():
    extra = set(transformer(LEARNED).state_dict()) - set(transformer(model_config()).state_dict())
    assert extra == {"src_positions.table.weight", "tgt_positions.table.weight"}
    model = transformer(LEARNED)
    model(*inputs()).pow(3).sum().backward()
    for positions, length in ((model.src_positions, 5), (model.tgt_positions, 6)):
        reached = (positions.table.weight.grad != 0).any(-1)
        assert reached.tolist() == [place < length for place in range(6)]


def test_learned_positions_allow_an_odd_d_model():
    config = model_config(d_model=9, num_heads=3, positions="learned", max_positions=6)
    assert transformer(config)(*inputs()).shape == (3, 6, 9)


def test_a_model_with_sinusoids_encodes_600_tokens():
    model = transformer(model_config(num_encoder_layers=1, num_decoder_layers=1))
    src_BS = ids(1, 600)
    memory = model.encode(src_BS, all_kept(src_BS))
    assert memory.shape == (1, 600, D_MODEL)
    assert memory.isfinite().all()


# Cached decoding


def full_logits(model: Transformer, data: Inputs) -> Tensor:
    return model.output(model(*data))


@every_variant
@torch.no_grad()
def test_cached_decoding_equals_full_decoding(config):
    model, data = transformer(config), inputs()
    expected = full_logits(model, data)
    state = model.start(data.src_BS, data.src_keep_BS)
    for place in range(data.tgt_in_BT.shape[1]):
        logits = model.decode_step(data.tgt_in_BT[:, place], state)
        torch.testing.assert_close(logits, expected[:, place], **SAME)


@every_variant
@torch.no_grad()
def test_cached_decoding_of_three_hypotheses_equals_full_decoding_of_each(config):
    model, width = transformer(config), 3
    src_BS, src_keep_BS, _ = inputs()
    tgt_NT = ids(3 * width, 5, seed=8)
    repeated = Inputs(*(x.repeat_interleave(width, 0) for x in (src_BS, src_keep_BS)), tgt_NT)
    expected = full_logits(model, repeated)
    state = model.start(src_BS, src_keep_BS)
    state.reorder(torch.arange(3).repeat_interleave(width))
    for place in range(5):
        logits = model.decode_step(tgt_NT[:, place], state)
        torch.testing.assert_close(logits, expected[:, place], **SAME)


JOIN = "two more sentences join"
REORDERS: list[
    list[int] | str
] = [  # one before each step: rows of the previous step, which are three at first
    [0, 1, 2, 1, 1, 2, 0],  # sentences get different numbers of hypotheses
    [1, 1, 0, 5, 3, 3, 6, 2, 4],  # hypotheses are copied, dropped and moved
    [0, 2, 1, 8, 6, 6],  # fewer, with the sentences in another order
    JOIN,  # with sources that are longer
    [0, 6, 5, 2, 7, 7, 6],
    [5, 2, 4],  # most of the old and of the new are dropped
    JOIN,
    [3, 0, 4],  # none of the first sentences is left, so that rows are shorter
    JOIN,
    [4],
]


class Grown(NamedTuple):
    """A source and a target, and the logits of the next token."""

    src: list[int]
    tgt: list[int]
    logits_V: Tensor


def begin(model: Transformer, data: Inputs) -> KVCache:
    return model.start(data.src_BS, data.src_keep_BS)


def grown_by_steps(model: Transformer) -> list[Grown]:
    """Decode step by step, and apply one entry of `REORDERS` before every step."""
    data = inputs()
    state, grown = begin(model, data), []
    src = [own[:length] for own, length in zip(data.src_BS.tolist(), SRC_LENGTHS, strict=True)]
    tgt: list[list[int]] = [[], [], []]
    for place, rows in enumerate(REORDERS):
        if isinstance(rows, str):
            keep_BS = left_keep([7, 3])
            joining_BS = ids(2, 7, seed=80 + place)
            state.admit(begin(model, Inputs(joining_BS, keep_BS, joining_BS)))
            src += [joining_BS[0].tolist(), joining_BS[1, :3].tolist()]
            tgt += [[], []]
        else:
            state.reorder(torch.tensor(rows))
            src, tgt = [src[row] for row in rows], [tgt[row] for row in rows]
        assert state.length_N.tolist() == [len(own) for own in tgt]
        new_N = ids(len(tgt), 1, seed=50 + place)[:, 0]
        tgt = [[*own, new] for own, new in zip(tgt, new_N.tolist(), strict=True)]
        logits_NV = model.decode_step(new_N, state)
        grown += [Grown(*one) for one in zip(src, tgt, logits_NV, strict=True)]
    return grown


def grown_at_once(model: Transformer, one: Grown) -> Tensor:
    """The same logits, from full decoding of the target in a batch of its own."""
    src_1S, tgt_1T = torch.tensor([one.src]), torch.tensor([one.tgt])
    return full_logits(model, Inputs(src_1S, all_kept(src_1S), tgt_1T))[0, -1]


@every_variant
@torch.no_grad()
def test_cached_decoding_equals_full_decoding_after_reorders_and_admissions(config):
    model = transformer(config)
    grown = grown_by_steps(model)
    assert {len(one.tgt) for one in grown} == {*range(1, 8)}
    for one in grown:
        torch.testing.assert_close(one.logits_V, grown_at_once(model, one), **SAME)


@every_variant
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
@torch.no_grad()
def test_cached_decoding_in_float32_is_close_to_full_decoding_in_float64(
    config, is_compiled, monkeypatch
):
    if is_compiled and native.compiled() is None:
        pytest.skip("nothing on this machine compiles C, or MTRAIN_NATIVE=0")
    exact, names = transformer(config), []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if is_compiled else 2)
    call = native.Functions.call
    monkeypatch.setattr(
        native.Functions, "call", lambda own, *a, **b: [names.append(a[0]), call(own, *a, **b)]
    )
    grown = grown_by_steps(transformer(config).float())
    assert names.count("paged_attention") == (2 * 2 * len(REORDERS) if is_compiled else 0)
    for one in grown:
        expected = grown_at_once(exact, one)
        size = float(expected.abs().max())
        torch.testing.assert_close(one.logits_V.double(), expected, rtol=0, atol=1e-5 * size)


@torch.no_grad()
def test_a_cache_admits_sentences_at_the_start_and_after_all_others_have_ended():
    """Two are admitted before the first step, and two more after the first three have ended."""
    model = transformer(model_config(attention_window=2))
    src_BS, tgt_in_BT = ids(5, 4, seed=3), ids(5, 6, seed=4)
    expected = full_logits(model, Inputs(src_BS, all_kept(src_BS), tgt_in_BT))
    starts = [begin(model, Inputs(own, all_kept(own), own)) for own in src_BS.split(1)]
    state = starts[0]
    for joining in starts[1:3]:
        state.admit(joining)
    for place in range(4):
        logits = model.decode_step(tgt_in_BT[:3, place], state)
        torch.testing.assert_close(logits, expected[:3, place], **SAME)
    state.reorder(torch.tensor([], dtype=torch.long))
    state.admit(starts[3])
    state.admit(starts[4])
    for place in range(6):
        logits = model.decode_step(tgt_in_BT[3:, place], state)
        torch.testing.assert_close(logits, expected[3:, place], **SAME)


@torch.no_grad()
def test_cache_storage_is_at_most_twice_the_most_positions_in_use_at_once():
    """The bound does not depend on the number of sentences that were decoded before."""
    model, data = transformer(model_config(attention_window=2)), inputs()
    state, most, most_read = begin(model, data), 0, [0, 0]
    for turn in range(20):
        for place in range(6):
            model.decode_step(ids(len(state.length_N), 1, seed=place)[:, 0], state)
            read = [
                len({*places[places >= 0].tolist()})
                for places in (state.src_slots_NS, state.slots_NT)
            ]
            most_read = list(map(max, most_read, read))
        state.reorder(torch.arange(len(state.length_N))[-3 + turn % 2 :])
        state.admit(begin(model, data))
        most = max(most, *state.slots_NT.shape)
    assert most <= 20
    for stores, num_read in zip((state.sources, state.pasts), most_read, strict=True):
        (size,) = {len(layer_RX) for layer_RX in stores.layers}
        assert num_read <= size <= 2 * num_read


@torch.no_grad()
def test_admitting_a_cache_into_another_does_not_change_the_admitted_cache():
    model, data = transformer(model_config()), inputs()
    joining, apart = begin(model, data), begin(model, data)
    state = begin(model, data)
    for _ in range(3):
        state.admit(joining)
        model.decode_step(torch.zeros(len(state.length_N), dtype=torch.long), state)
    new_N = torch.arange(3)
    torch.testing.assert_close(
        model.decode_step(new_N, joining), model.decode_step(new_N, apart), **SAME
    )


@torch.no_grad()
def test_no_hypothesis_writes_to_a_cache_slot_that_another_one_reads():
    model = transformer(model_config())
    state, num_written = begin(model, inputs()), 0
    seen: set[int] = set()
    for turn in range(40):
        rows = REORDERS[turn % 3]
        assert isinstance(rows, list)
        state.reorder(torch.tensor(rows))
        model.decode_step(torch.zeros(len(rows), dtype=torch.long), state)
        newest = state.slots_NT[:, -1].tolist()
        assert len({*newest}) == len(rows)
        assert not {*newest} & {*state.slots_NT[:, :-1].flatten().tolist()}
        seen, num_written = seen | {*newest}, num_written + len(newest)
    assert len(seen) < num_written // 2  # some slots were reused


@every_variant
@torch.no_grad()
def test_sources_of_equal_length_are_encoded_as_one_batch_where_they_are_many(config, monkeypatch):
    model, shapes, encode = transformer(config), [], Transformer.encode
    lengths = [5, 5, 5, 3, 3, 2, 4, 1, 6, 6, 2, 1]
    src_BS, keep_BS = ids(len(lengths), 6, seed=3), left_keep(lengths)
    memory_RD = model.encode(src_BS, keep_BS)[keep_BS]

    def encode_and_note(own: Transformer, src: Tensor, keep: Tensor) -> Tensor:
        shapes.append(tuple(src.shape))
        return encode(own, src, keep)

    monkeypatch.setattr(Transformer, "encode", encode_and_note)
    monkeypatch.setattr("mtrain.model.transformer._MIN_GROUP_POSITIONS", 6)
    state = model.start(src_BS, keep_BS)
    assert shapes == [(3, 5), (2, 3), (3, 4), (2, 6), (2, 2)]
    for index, layer in enumerate(model.decoder):
        expected_RX = layer.cross_attention.source_keys_values(memory_RD)
        torch.testing.assert_close(state.sources.layers[index], expected_RX, **SAME)
    place_RX = keep_BS.nonzero()
    assert state.src_slots_NS[place_RX[:, 0], place_RX[:, 1]].tolist() == [*range(sum(lengths))]
    assert (state.src_slots_NS[~keep_BS] == -1).all()


@torch.no_grad()
def test_hypotheses_share_one_copy_of_their_source():
    model, data = transformer(model_config()), inputs()
    state = begin(model, data)
    before = list(state.sources.layers)
    state.reorder(torch.arange(3).repeat_interleave(50))
    assert all(now is one for now, one in zip(state.sources.layers, before, strict=True))
    assert {len(source_RX) for source_RX in before} == {int(data.src_keep_BS.sum())}


# Padding, batching and masks


@every_variant
@torch.no_grad()
def test_additional_padding_columns_do_not_change_the_output(config):
    model, data = transformer(config), inputs()
    more_src = torch.cat([data.src_BS, ids(3, 4, seed=9)], 1)
    more_keep = torch.cat([data.src_keep_BS, torch.zeros(3, 4, dtype=torch.bool)], 1)
    more_tgt = torch.cat([data.tgt_in_BT, ids(3, 2, seed=10)], 1)
    memory = model.encode(data.src_BS, data.src_keep_BS)
    wider = model.encode(more_src, more_keep)
    torch.testing.assert_close(wider[:, :5][data.src_keep_BS], memory[data.src_keep_BS], **SAME)
    more = model(more_src, more_keep, more_tgt)[:, :6]
    torch.testing.assert_close(model.output(more), full_logits(model, data), **SAME)


@every_variant
def test_a_sentence_of_only_padding_gives_finite_values_and_does_not_change_other_rows(config):
    model, data = transformer(config), inputs()
    keep_BS = data.src_keep_BS.clone()
    keep_BS[1] = False
    states = model(data.src_BS, keep_BS, data.tgt_in_BT)
    assert states.isfinite().all()
    others = [0, 2]
    torch.testing.assert_close(states[others], model(*data)[others], **SAME)
    states.pow(3).sum().backward()
    assert all(
        weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None
    )
    state = model.start(data.src_BS, keep_BS)
    assert model.decode_step(data.tgt_in_BT[:, 0], state).isfinite().all()


@every_variant
@torch.no_grad()
def test_a_batch_equals_its_sentences_one_by_one(config):
    model, data = transformer(config), inputs()
    together = model(*data)
    for row, (src_length, tgt_length) in enumerate(zip(SRC_LENGTHS, TGT_LENGTHS, strict=True)):
        src_1S = data.src_BS[row : row + 1, :src_length]
        alone = model(
            src_1S,
            all_kept(src_1S),
            data.tgt_in_BT[row : row + 1, :tgt_length],
        )
        torch.testing.assert_close(together[row, :tgt_length], alone[0], **SAME)


def reach(model: Transformer, table: nn.Embedding, length: int, is_encoder: bool) -> Tensor:
    """Tell for [to, from] whether an output depends on an input, by the Jacobian of a stack.

    The offset that is differentiated by is added to the embeddings, below the whole stack.
    """
    src_BS, tgt_in_BT = ids(1, length, seed=1), ids(1, length, seed=2)
    memory = model.encode(src_BS, all_kept(src_BS)).detach()

    def states(offset_TD: Tensor) -> Tensor:
        handle = table.register_forward_hook(lambda module, args, out: out + offset_TD)
        try:
            if is_encoder:
                return model.encode(src_BS, all_kept(src_BS))[0]
            return model.decode(tgt_in_BT, memory, all_kept(src_BS))[0]
        finally:
            handle.remove()

    nothing_TD = torch.zeros(length, D_MODEL, dtype=torch.float64)
    jacobian_TDTD = torch.autograd.functional.jacobian(states, nothing_TD)
    return (jacobian_TDTD != 0).any(3).any(1)


@every_variant
def test_the_jacobian_of_a_decoder_state_by_later_target_tokens_is_exactly_zero(config):
    model = transformer(config)
    reached_TT = reach(model, model.tgt_embedding, 7, is_encoder=False)
    assert not reached_TT.triu(1).any()
    assert reached_TT.diagonal().all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("window", [None, 1, 2])
def test_the_receptive_field_of_a_stack_is_exactly_its_window_times_its_layers(norm, window):
    config = model_config(norm=norm, attention_window=window)
    model, length = transformer(config), 8
    bound = length if window is None else window * config.num_encoder_layers
    for name, is_encoder in (("src_embedding", True), ("tgt_embedding", False)):
        reached = reach(model, getattr(model, name), length, is_encoder)
        for place in range(length):
            for other in range(length):
                is_near = abs(place - other) <= bound and (is_encoder or other <= place)
                assert bool(reached[place, other]) == is_near, (name, place, other)


def test_every_target_position_depends_on_every_source_token_and_on_no_padding():
    model = transformer(model_config())
    src_BS = torch.tensor([[3, 9, 5, 11, 7]])
    src_keep_BS = torch.tensor([[True, True, True, False, False]])
    states = model(src_BS, src_keep_BS, torch.tensor([[4, 6]]))
    for place in range(2):
        (grad,) = torch.autograd.grad(
            states[0, place].pow(3).sum(), model.src_embedding.weight, retain_graph=True
        )
        assert (grad[src_BS[0]] != 0).any(-1).tolist() == src_keep_BS[0].tolist()


# Weights


def test_tie_embeddings_shares_exactly_the_tables_that_the_option_names():
    everything, decoder, none = (
        transformer(model_config(tie_embeddings=tie)) for tie in ("all", "decoder", "none")
    )
    for model, src_is_tied, output_is_tied in (
        (everything, True, True),
        (decoder, False, True),
        (none, False, False),
    ):
        tgt = model.tgt_embedding.weight
        assert (model.src_embedding.weight is tgt) == src_is_tied
        assert (model.output.weight is tgt) == output_is_tied
    table = 20 * D_MODEL
    assert num_parameters(none) - num_parameters(decoder) == table
    assert num_parameters(decoder) - num_parameters(everything) == table


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("tie", ["all", "decoder", "none"])
@pytest.mark.parametrize("positions", [{}, {"positions": "learned", "max_positions": 33}])
def test_count_weights_equals_the_number_of_parameters_of_the_built_model(norm, tie, positions):
    layers = {"num_encoder_layers": 3, "num_decoder_layers": 2}
    config = model_config(norm=norm, tie_embeddings=tie, **layers, **positions)
    num_src = 20 if tie == "all" else 31
    assert count_weights(config, num_src, 20) == num_parameters(Transformer(config, num_src, 20))


def test_the_gradient_of_tied_embeddings_is_the_sum_of_the_untied_gradients():
    model, data = transformer(model_config(tie_embeddings="all")), inputs()
    full_logits(model, data)[..., 0].sum().backward()
    untied = transformer(model_config(tie_embeddings="none"))
    with torch.no_grad():
        for name, parameter in untied.named_parameters():
            parameter.copy_(model.state_dict()[name])
    full_logits(untied, data)[..., 0].sum().backward()
    parts = [untied.src_embedding.weight, untied.tgt_embedding.weight, untied.output.weight]
    total = sum(part.grad for part in parts)
    torch.testing.assert_close(model.tgt_embedding.weight.grad, total, **SAME)


@pytest.mark.parametrize(("tie", "num_tables"), [("all", 1), ("decoder", 2), ("none", 3)])
def test_tied_embeddings_are_stored_once_and_stay_tied_through_saving_loading_and_an_update(
    tie, num_tables, tmp_path
):
    def storages(model: Transformer) -> set[int]:
        tables = (model.src_embedding, model.tgt_embedding, model.output)
        return {table.weight.untyped_storage().data_ptr() for table in tables}

    vocabulary = vocabularies()
    config = model_config(tie_embeddings=tie)
    torch.manual_seed(1)
    model = build_model(config, vocabulary)
    path, fingerprint = tmp_path / "model.safetensors", vocabulary.fingerprint()
    checkpoint.save_model(path, dict(model.named_parameters()), fingerprint)
    weights = checkpoint.load_model(path, fingerprint)
    named = [name for name in weights if "embedding" in name or name == "output.weight"]
    assert len(named) == num_tables
    assert path.stat().st_size == pytest.approx(4 * num_parameters(model), rel=0.2)

    torch.manual_seed(2)
    loaded = build_model(config, vocabulary)
    set_weights(loaded, weights, Path("model"))
    assert len(storages(model)) == len(storages(loaded)) == num_tables
    for ours, theirs in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    loaded(*inputs()).pow(3).sum().backward()
    torch.optim.Adam(loaded.parameters(), lr=0.1).step()
    assert len(storages(loaded)) == num_tables
    assert not torch.equal(loaded.tgt_embedding.weight, model.tgt_embedding.weight)


def test_source_and_target_vocabularies_may_differ_in_size():
    model = transformer(model_config(tie_embeddings="decoder"), 11, 17)
    src_BS = ids(2, 3, num_pieces=11)
    states = model(src_BS, all_kept(src_BS), ids(2, 4, num_pieces=17))
    assert model.output(states).shape == (2, 4, 17)


@pytest.mark.parametrize(
    ("d", "ff", "heads", "millions"), [(512, 2048, 8, 63.1), (1024, 4096, 16, 214.2)]
)
def test_the_papers_base_and_big_sizes_have_the_expected_number_of_parameters(
    d, ff, heads, millions
):
    config = model_config(
        d_model=d,
        d_ff=ff,
        num_heads=heads,
        num_encoder_layers=6,
        num_decoder_layers=6,
        tie_embeddings="all",
    )
    with torch.device("meta"):
        found = num_parameters(Transformer(config, 37_000, 37_000))
    attention = 4 * (d * d + d)  # queries, keys, values and output
    feed_forward = 2 * d * ff + ff + d
    norm = 2 * d
    encoder = 6 * (attention + feed_forward + 2 * norm)
    decoder = 6 * (2 * attention + feed_forward + 3 * norm)
    assert found == 37_000 * d + encoder + decoder
    assert found / 1e6 == pytest.approx(millions, abs=0.05)  # the paper's table says 65 and 213


def test_num_parameters_equals_the_size_of_the_state_dict_when_nothing_is_tied():
    model = transformer(model_config())
    assert num_parameters(model) == sum(weight.numel() for weight in model.state_dict().values())


def test_the_seed_determines_the_initial_weights():
    first, again, other = (
        transformer(model_config(), seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])


# Dropout and the dtype of matrix products


DROPOUTS = {"dropout": 0.5, "attention_dropout": 0.25, "activation_dropout": 0.125}


def test_each_dropout_rate_of_the_config_is_set_on_its_modules_and_no_others():
    model = transformer(model_config(**DROPOUTS))
    rates = {name: part.rate for name, part in model.named_modules() if isinstance(part, Dropout)}
    expected = {"dropout": 0.5}
    for stack, residuals, attentions in (
        ("encoder", 2, ["self_attention"]),
        ("decoder", 3, ["self_attention", "cross_attention"]),
    ):
        for layer in ("0", "1"):
            prefix = f"{stack}.{layer}"
            expected |= {f"{prefix}.residual_{n + 1}.dropout": 0.5 for n in range(residuals)}
            expected |= {f"{prefix}.{name}.dropout": 0.25 for name in attentions}
            expected[f"{prefix}.feed_forward.dropout"] = 0.125
    assert rates == expected


@pytest.mark.parametrize("norm", NORMS)
def test_dropout_acts_on_both_embeddings_and_on_every_sublayer(norm):
    model, data = transformer(model_config(norm=norm, dropout=0.5)).train(), inputs()
    shapes: list[torch.Size] = []
    for module in model.modules():
        if isinstance(module, Dropout) and module.rate:
            assert module.rate == 0.5
            module.register_forward_hook(lambda _, args, out: shapes.append(out.shape))
    model(*data)
    assert shapes.count(torch.Size((*data.src_BS.shape, D_MODEL))) == 1 + 2 * 2
    assert shapes.count(torch.Size((*data.tgt_in_BT.shape, D_MODEL))) == 1 + 3 * 2


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_random_in_training_mode_and_off_in_eval_mode(name):
    data = inputs()
    without = transformer(model_config())
    model = transformer(model_config(**{name: 0.5}))
    assert torch.equal(model(*data), without(*data))
    model.train()
    assert not torch.equal(model(*data), model(*data))


def test_token_keep_masks_set_embeddings_of_both_sides_to_zero_and_keep_the_rest():
    model = transformer(model_config())
    src_BS, tgt_BT = ids(80, 25, seed=1), ids(80, 30, seed=2)
    keeps = [torch.arange(ids_BT.shape[1]).expand_as(ids_BT) % 5 > 0 for ids_BT in (src_BS, tgt_BT)]
    sums: list[Tensor] = []
    model.dropout.register_forward_pre_hook(lambda _, args: sums.append(args[0]))
    model(src_BS, all_kept(src_BS), tgt_BT, *keeps)
    for x_BTD, ids_BT, table, positions, keep_BT in zip(
        sums,
        (src_BS, tgt_BT),
        (model.src_embedding, model.tgt_embedding),
        (model.src_positions, model.tgt_positions),
        keeps,
        strict=True,
    ):
        length = ids_BT.shape[1]
        encoding_TD = positions(torch.arange(length), length, x_BTD.dtype)
        whole_BTD = table(ids_BT) * D_MODEL**0.5 + encoding_TD
        torch.testing.assert_close(x_BTD[keep_BT], whole_BTD[keep_BT])
        assert torch.equal((x_BTD == encoding_TD).all(-1), ~keep_BT)


def test_dropout_of_attention_and_activations_is_off_by_default():
    config = ModelConfig()
    assert config.attention_dropout == config.activation_dropout == 0
    model, data = transformer(model_config()), inputs()
    expected = model(*data)
    assert torch.equal(model.train()(*data), expected)


@torch.no_grad()
def transparent(layer: Linear) -> None:
    """Make a linear layer the identity."""
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)


def assert_dropped(found: Tensor, whole: Tensor, rate: float) -> None:
    """Every element is zero or scaled up by 1 / (1 - rate), and the rate is about right."""
    is_zero = found == 0
    torch.testing.assert_close(found[~is_zero], whole[~is_zero] / (1 - rate), rtol=1e-3, atol=0)
    deviation = math.sqrt(rate * (1 - rate) / whole.numel())
    assert float(is_zero.double().mean()) == pytest.approx(rate, abs=5 * deviation)


def whole_and_dropped(module: nn.Module, arguments: tuple) -> tuple[Tensor, Tensor]:
    """The output of a module in eval mode, and in training mode."""
    with torch.enable_grad():
        return module.eval()(*arguments)[0].detach(), module.train()(*arguments)[0].detach()


every_way = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


@pytest.mark.parametrize("rate", [0.3, 0.9])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("size", [40, 200])
@every_way
@torch.no_grad()
def test_attention_dropout_zeroes_weights_after_the_softmax_and_scales_the_kept_ones(
    rate, kind, size, dtype
):
    """With one head, and values that are unit vectors, the output equals the attention weights."""
    config = model_config(d_model=size, num_heads=1, attention_dropout=rate)
    eye_TD = torch.eye(size, dtype=dtype)
    torch.manual_seed(6)
    if kind == "self":
        attention = SelfAttention(config).to(dtype)
        attention.queries_keys_values.weight[2 * size :] = eye_TD
        attention.queries_keys_values.bias[2 * size :] = 0
        arguments = (eye_TD[None], torch.ones(size, size, dtype=torch.bool))
    else:
        attention = CrossAttention(config).to(dtype)
        attention.source_keys_values.weight[size:] = eye_TD
        attention.source_keys_values.bias[size:] = 0
        source = attention.keys_values(eye_TD[None])
        x_BTD = normal(1, size, size).to(dtype)
        arguments = (x_BTD, source, torch.ones(1, 1, 1, size, dtype=torch.bool))
    transparent(attention.output)
    weights_TS = attention.weights(*arguments)[0, 0]
    whole, dropped = whole_and_dropped(attention, arguments)
    torch.testing.assert_close(whole, weights_TS)
    assert_dropped(dropped, weights_TS, rate)


@pytest.mark.parametrize("rate", [0.3, 0.9])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@every_way
@torch.no_grad()
def test_activation_dropout_is_applied_between_the_activation_and_the_second_linear_layer(
    rate, activation, dtype
):
    size = 40
    config = model_config(
        d_model=size, num_heads=1, d_ff=size, activation=activation, activation_dropout=rate
    )
    torch.manual_seed(6)
    layer = FeedForward(config).to(dtype)
    transparent(layer.inner)
    transparent(layer.outer)
    x_BTD = normal(1, size, size).to(dtype).abs()
    expected = x_BTD if activation == "relu" else x_BTD * (1 + torch.erf(x_BTD / 2**0.5)) / 2
    whole, dropped = whole_and_dropped(layer, (x_BTD,))
    torch.testing.assert_close(whole, expected[0])
    assert_dropped(dropped, expected[0], rate)


@every_variant
def test_float32_states_and_gradients_are_close_to_float64(config):
    """Covers both masks, a sentence of only padding, and every gradient."""
    data = inputs()
    data.src_keep_BS[1] = False
    found = []
    for dtype in (torch.float32, torch.float64):
        model = transformer(config).to(dtype)
        states = model(*data)
        states.pow(3).sum().backward()
        grads = [weight.grad.double() for weight in model.parameters() if weight.grad is not None]
        found.append([states.detach().double(), *grads])
    for fast, exact in zip(*found, strict=True):
        assert float((fast - exact).norm()) < 1e-4 * float(exact.norm())


@torch.no_grad()
def test_compute_dtype_sets_the_dtype_of_states_and_linear_layers():
    model, data = transformer(model_config()).float(), inputs()
    plain = model(*data)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(linears) == 1 + 2 * 4 + 2 * 7  # output, encoder layers, decoder layers
    dtypes = []
    for module in linears:
        module.register_forward_hook(lambda _, args, out: dtypes.extend([args[0].dtype, out.dtype]))
    model.compute_dtype = torch.bfloat16
    short = model(*data)
    model.output(short)
    assert len(dtypes) == 2 * len(linears)
    assert set(dtypes) == {short.dtype} == {torch.bfloat16}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not torch.equal(short.float(), plain)
    assert float((short.float() - plain).norm() / plain.norm()) < 0.03
    state = model.start(data.src_BS, data.src_keep_BS)
    assert model.decode_step(data.tgt_in_BT[:, 0], state).dtype == torch.float32  # for the search
    model.compute_dtype = None
    assert torch.equal(model(*data), plain)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_pack_weights_packs_all_linear_layers_in_the_given_precision(precision):
    model = transformer(model_config()).float()
    model.pack_weights(precision)
    packed = [module._packed for module in model.modules() if isinstance(module, Linear)]
    assert len(packed) == 1 + 2 * 4 + 2 * 7
    assert {weights.precision for weights in packed} == {precision}
    assert model.cache_dtype is (None if precision == "float32" else torch.bfloat16)


def test_the_model_learns_to_copy():
    torch.manual_seed(0)
    config = model_config(d_model=16, d_ff=32, num_encoder_layers=1, num_decoder_layers=1)
    model, bos = Transformer(config, 8, 8), 2
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(120):
        src_BS = ids(16, 4, seed=step, num_pieces=5) + 3
        tgt_in_BT = torch.cat([torch.full((16, 1), bos), src_BS[:, :-1]], 1)
        logits_BTV = model.output(model(src_BS, src_BS > 0, tgt_in_BT))
        loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), src_BS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3  # guessing costs log 5, which is 1.6
