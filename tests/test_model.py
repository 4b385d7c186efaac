"""Hold the Transformer to torch's own layers, to the paper's figures, and to itself."""

import math
from typing import NamedTuple

import pytest
import torch
from builders import left_keep, model_config, randomise, transformer
from torch import Tensor, nn

from mtrain.kernels import Dropout, Linear
from mtrain.model import (
    CrossAttention,
    DecoderLayer,
    EncoderLayer,
    SelfAttention,
    Transformer,
    num_parameters,
    sinusoids,
)

NORMS = ["post", "pre"]
VARIANTS = [("post", "relu"), ("pre", "relu"), ("post", "gelu")]
D_MODEL = model_config().d_model
SRC_LENGTHS, TGT_LENGTHS = [5, 2, 4], [4, 6, 1]
SAME = {"rtol": 1e-9, "atol": 1e-11}


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


def inputs() -> Inputs:
    """Three sentences of different lengths; the padding holds ids like any other."""
    src_BS = ids(3, max(SRC_LENGTHS), seed=1)
    return Inputs(src_BS, left_keep(SRC_LENGTHS), ids(3, max(TGT_LENGTHS), seed=2))


# Against torch.nn


def copy_self(ours: SelfAttention, theirs: nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.copy_(ours.queries_keys_values.weight)
    theirs.in_proj_bias.copy_(ours.queries_keys_values.bias)
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def copy_cross(ours: CrossAttention, theirs: nn.MultiheadAttention) -> None:
    projections = [ours.queries, ours.source_keys_values]
    theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
    theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


@torch.no_grad()
def copy_layer(ours: EncoderLayer | DecoderLayer, theirs: nn.Module) -> None:
    """Give a layer of torch the weights of ours."""
    copy_self(ours.self_attention, theirs.self_attn)
    if isinstance(ours, DecoderLayer):
        copy_cross(ours.cross_attention, theirs.multihead_attn)
        theirs.norm3.load_state_dict(ours.residual_3.norm.state_dict())
    theirs.linear1.load_state_dict(ours.feed_forward.inner.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.outer.state_dict())
    theirs.norm1.load_state_dict(ours.residual_1.norm.state_dict())
    theirs.norm2.load_state_dict(ours.residual_2.norm.state_dict())


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
    """Torch's mask: True is left out."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(("norm", "activation"), VARIANTS)
def test_an_encoder_layer_is_torchs_encoder_layer(norm, activation):
    ours = our_layer(EncoderLayer, norm, activation)
    theirs = torch_layer(ours, norm, activation)
    keep_BS = left_keep(SRC_LENGTHS)
    x_BSD, upstream = normal(*keep_BS.shape, D_MODEL).requires_grad_(), normal(3, 5, D_MODEL)

    mine = ours(x_BSD, keep_BS[:, None, None, :])
    reference = theirs(x_BSD, src_key_padding_mask=~keep_BS)
    torch.testing.assert_close(mine, reference, **SAME)
    grad, expected = (
        torch.autograd.grad((out * upstream).sum(), x_BSD) for out in (mine, reference)
    )
    torch.testing.assert_close(grad, expected, **SAME)


@pytest.mark.parametrize(("norm", "activation"), VARIANTS)
def test_a_decoder_layer_is_torchs_decoder_layer(norm, activation):
    ours = our_layer(DecoderLayer, norm, activation)
    theirs = torch_layer(ours, norm, activation)
    keep_BS, length = left_keep(SRC_LENGTHS), 6
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
    grads, expected = (
        torch.autograd.grad((out * upstream).sum(), [x_BTD, memory_BSD])
        for out in (mine, reference)
    )
    torch.testing.assert_close(grads, expected, **SAME)


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
def test_the_whole_model_is_torchs_stacks_between_embeddings_and_output(norm):
    model = transformer(model_config(norm=norm))
    encoder, decoder = torch_stacks(model, norm)
    src_BS, src_keep_BS, tgt_in_BT = inputs()
    upstream = normal(3, tgt_in_BT.shape[1], 20)
    upstream[~left_keep(TGT_LENGTHS)] = 0.0

    memory = encoder(embedded(model.src_embedding, src_BS), src_key_padding_mask=~src_keep_BS)
    states = decoder(
        embedded(model.tgt_embedding, tgt_in_BT),
        memory,
        tgt_mask=causal_leave_out(tgt_in_BT.shape[1]),
        tgt_key_padding_mask=~left_keep(TGT_LENGTHS),
        memory_key_padding_mask=~src_keep_BS,
    )
    real = left_keep(TGT_LENGTHS)
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
def test_every_weight_gets_torchs_gradient(norm):
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
            attention, expected = layer.self_attention, reference.self_attn
            pairs = [
                (attention.queries_keys_values.weight, expected.in_proj_weight),
                (attention.queries_keys_values.bias, expected.in_proj_bias),
                (attention.output.weight, expected.out_proj.weight),
                (layer.feed_forward.inner.weight, reference.linear1.weight),
                (layer.feed_forward.outer.bias, reference.linear2.bias),
                (layer.residual_1.norm.weight, reference.norm1.weight),
                (layer.residual_2.norm.bias, reference.norm2.bias),
            ]
            for mine, other in pairs:
                torch.testing.assert_close(mine.grad, other.grad, **SAME)
            if isinstance(layer, DecoderLayer):
                cross, expected = layer.cross_attention, reference.multihead_attn
                parts = [cross.queries.weight.grad, cross.source_keys_values.weight.grad]
                torch.testing.assert_close(torch.cat(parts), expected.in_proj_weight.grad, **SAME)


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


# Positions and embeddings


@pytest.mark.parametrize("d_model", [2, 6, 512])
def test_sinusoids_are_the_papers_formula(d_model):
    table = sinusoids(40, d_model)
    assert table.shape == (40, d_model)
    for position in (0, 1, 17, 39):
        for i in range(0, d_model // 2, max(1, d_model // 8)):
            angle = position / 10_000 ** (2 * i / d_model)
            assert float(table[position, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-12)
            assert float(table[position, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-12)


@pytest.mark.parametrize("first", [0, 1, 7, 5000])
def test_sinusoids_begin_where_they_are_told(first):
    whole = sinusoids(first + 4, 8)
    torch.testing.assert_close(sinusoids(4, 8, first), whole[first:], rtol=0, atol=0)


def test_embeddings_are_scaled_by_the_root_of_the_width():
    model = transformer(model_config())
    src_BS = ids(2, 3)
    # take the layers away: what is left is what they would read
    model.encoder = nn.ModuleList()
    without_layers = model.encode(src_BS, torch.ones_like(src_BS, dtype=torch.bool))
    for sentence in range(2):
        for place in range(3):
            piece = int(src_BS[sentence, place])
            expected = (
                model.src_embedding.weight[piece] * D_MODEL**0.5
                + sinusoids(place + 1, D_MODEL)[place]
            )
            torch.testing.assert_close(without_layers[sentence, place], expected, **SAME)


def test_embeddings_start_with_the_size_that_the_scaling_undoes():
    torch.manual_seed(0)
    model = Transformer(model_config(d_model=64), 2000, 2000)
    for table in (model.src_embedding, model.tgt_embedding, model.output):
        assert table.weight.std().item() == pytest.approx(64**-0.5, rel=0.02)
        assert table.weight.mean().item() == pytest.approx(0, abs=0.002)


def test_positions_have_no_longest_length():
    model = transformer(model_config(num_encoder_layers=1, num_decoder_layers=1))
    src_BS = ids(1, 600)
    memory = model.encode(src_BS, torch.ones_like(src_BS, dtype=torch.bool))
    assert memory.shape == (1, 600, D_MODEL)
    assert memory.isfinite().all()


# Step by step


def full_logits(model: Transformer, data: Inputs) -> Tensor:
    return model.output(model(*data))


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_cached_decoding_equals_full_decoding(norm):
    model, data = transformer(model_config(norm=norm)), inputs()
    expected = full_logits(model, data)
    state = model.start(model.encode(data.src_BS, data.src_keep_BS), data.src_keep_BS)
    for place in range(data.tgt_in_BT.shape[1]):
        logits = model.step(data.tgt_in_BT[:, place], state)
        torch.testing.assert_close(logits, expected[:, place], **SAME)


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_cached_decoding_of_three_hypotheses_equals_full_decoding_of_each(norm):
    model, width = transformer(model_config(norm=norm)), 3
    src_BS, src_keep_BS, _ = inputs()
    tgt_NT = ids(3 * width, 5, seed=8)
    repeated = Inputs(*(x.repeat_interleave(width, 0) for x in (src_BS, src_keep_BS)), tgt_NT)
    expected = full_logits(model, repeated)
    state = model.start(model.encode(src_BS, src_keep_BS), src_keep_BS)
    for place in range(5):
        logits = model.step(tgt_NT[:, place], state)
        torch.testing.assert_close(logits, expected[:, place], **SAME)


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_cached_decoding_goes_on_rightly_after_reorders_that_drop_sentences(norm):
    model, width = transformer(model_config(norm=norm)), 3
    src_BS, src_keep_BS, _ = inputs()
    state = model.start(model.encode(src_BS, src_keep_BS), src_keep_BS)
    sentences = torch.arange(3)
    tgt_NT = torch.empty(3 * width, 0, dtype=torch.long)
    plan: list[tuple[list[int], list[int] | None]] = [
        ([1, 1, 0, 5, 3, 3, 6, 7, 8], None),  # hypotheses multiply, die and change places
        ([0, 2, 1, 8, 6, 6], [0, 2]),  # the sentence in the middle leaves
        ([0, 1, 2, 3, 4, 5], None),
        ([5, 5, 4], [1]),  # the first leaves
        ([2, 0, 0], None),
    ]
    for place, (rows, kept) in enumerate(plan):
        new_N = ids(len(tgt_NT), 1, seed=50 + place)
        tgt_NT = torch.cat([tgt_NT, new_N], 1)
        logits = model.step(new_N[:, 0], state)
        repeated = sentences.repeat_interleave(width)
        expected = full_logits(model, Inputs(src_BS[repeated], src_keep_BS[repeated], tgt_NT))
        torch.testing.assert_close(logits, expected[:, -1], **SAME)

        state.reorder(torch.tensor(rows), torch.tensor(kept) if kept else None)
        tgt_NT = tgt_NT[rows]
        sentences = sentences[kept] if kept else sentences


# What must not matter


@torch.no_grad()
def test_padding_columns_change_nothing():
    model, data = transformer(model_config()), inputs()
    more_src = torch.cat([data.src_BS, ids(3, 4, seed=9)], 1)
    more_keep = torch.cat([data.src_keep_BS, torch.zeros(3, 4, dtype=torch.bool)], 1)
    more_tgt = torch.cat([data.tgt_in_BT, ids(3, 2, seed=10)], 1)
    memory = model.encode(data.src_BS, data.src_keep_BS)
    wider = model.encode(more_src, more_keep)
    torch.testing.assert_close(wider[:, :5][data.src_keep_BS], memory[data.src_keep_BS], **SAME)
    states = model(*data)
    torch.testing.assert_close(model(more_src, more_keep, more_tgt)[:, :6], states, **SAME)


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_a_batch_equals_its_sentences_one_by_one(norm):
    model, data = transformer(model_config(norm=norm)), inputs()
    together = model(*data)
    for row, (src_length, tgt_length) in enumerate(zip(SRC_LENGTHS, TGT_LENGTHS, strict=True)):
        src_1S = data.src_BS[row : row + 1, :src_length]
        alone = model(
            src_1S,
            torch.ones_like(src_1S, dtype=torch.bool),
            data.tgt_in_BT[row : row + 1, :tgt_length],
        )
        torch.testing.assert_close(together[row, :tgt_length], alone[0], **SAME)


@pytest.mark.parametrize("norm", NORMS)
def test_a_state_knows_nothing_of_the_target_after_it(norm):
    model = transformer(model_config(norm=norm))
    src_BS = ids(1, 4)
    tgt_in_1T = torch.tensor([[3, 9, 5, 11, 7]])  # all different: each has its own row of weights
    states = model(src_BS, torch.ones_like(src_BS, dtype=torch.bool), tgt_in_1T)
    for place in range(5):
        (grad,) = torch.autograd.grad(
            states[0, place].pow(3).sum(), model.tgt_embedding.weight, retain_graph=True
        )
        reached = (grad[tgt_in_1T[0]] != 0).any(-1)
        assert reached.tolist() == [other <= place for other in range(5)]


def test_every_target_place_sees_all_of_the_source_and_none_of_its_padding():
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


def test_tied_embeddings_share_their_storage_as_named():
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


def test_tied_embeddings_are_each_others_gradient():
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


def test_sides_may_have_vocabularies_of_different_sizes():
    model = transformer(model_config(tie_embeddings="decoder"), 11, 17)
    src_BS = ids(2, 3, num_pieces=11)
    states = model(src_BS, torch.ones_like(src_BS, dtype=torch.bool), ids(2, 4, num_pieces=17))
    assert model.output(states).shape == (2, 4, 17)


@pytest.mark.parametrize(
    ("d", "ff", "heads", "millions"), [(512, 2048, 8, 63.1), (1024, 4096, 16, 214.2)]
)
def test_base_and_big_have_the_parameters_of_the_papers_sizes(d, ff, heads, millions):
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


def test_weights_are_as_many_as_their_names_when_nothing_is_tied():
    model = transformer(model_config())
    assert num_parameters(model) == sum(weight.numel() for weight in model.state_dict().values())


def test_a_model_follows_from_the_seed():
    first, again, other = (
        transformer(model_config(), seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])


# Dropout and the type of matrix products


@pytest.mark.parametrize("norm", NORMS)
def test_dropout_acts_on_both_embeddings_and_on_every_sublayer(norm):
    config = model_config(norm=norm, dropout=0.5)
    model, data = transformer(config).train(), inputs()
    shapes: list[torch.Size] = []
    for module in model.modules():
        if isinstance(module, Dropout):
            assert module.rate == 0.5
            module.register_forward_hook(lambda _, args, out: shapes.append(out.shape))
    model(*data)
    assert shapes.count(torch.Size((*data.src_BS.shape, D_MODEL))) == 1 + 2 * 2
    assert shapes.count(torch.Size((*data.tgt_in_BT.shape, D_MODEL))) == 1 + 3 * 2


def test_dropout_changes_training_and_leaves_eval_alone():
    data = inputs()
    without = transformer(model_config())
    model = transformer(model_config(dropout=0.5))
    assert torch.equal(model(*data), without(*data))
    model.train()
    assert not torch.equal(model(*data), model(*data))


@torch.no_grad()
def test_matrix_products_run_in_the_type_that_is_asked_for():
    model, data = transformer(model_config()).float(), inputs()
    plain = model(*data)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(linears) == 1 + 2 * 4 + 2 * 7  # output, encoder layers, decoder layers
    model.multiply_in(torch.bfloat16)
    assert all(module.matmul_dtype is torch.bfloat16 for module in linears)
    short = model(*data)
    assert short.dtype == torch.float32
    assert not torch.equal(short, plain)
    assert float((short - plain).norm() / plain.norm()) < 0.03
    model.multiply_in(None)
    assert torch.equal(model(*data), plain)


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
