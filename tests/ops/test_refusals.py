"""Inputs that the compiled functions do not support raise PyTorch's error, or PyTorch computes.

Each case below runs in a forked process of its own: a crash fails only its own case.
"""

import json
import os
import tempfile
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fork_server import printed_by
from torch import Tensor, nn

from mtrain.ops import native
from mtrain.ops.attention import attention, paged_attention
from mtrain.ops.cross_entropy import ProjectedCrossEntropy
from mtrain.ops.dropout import Dropout
from mtrain.ops.layer_norm import LayerNorm, add_norm
from mtrain.ops.linear import Linear, relu_ffn
from mtrain.ops.topk import Projection, argmax_tokens, top_tokens

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, check_dtype=False)


def packed(in_features: int, out_features: int) -> Projection:
    layer = Projection(in_features, out_features)
    layer.pack_weights()
    assert layer._packed is not None
    return layer


def no_data(function: Callable[..., Tensor], *arguments: object) -> None:
    """Expect an error of PyTorch, or a result that has no data either."""
    try:
        found = function(*arguments)
    except (RuntimeError, NotImplementedError):
        return
    assert (found[0] if isinstance(found, tuple) else found).is_meta


class Subclass(Tensor):
    """A tensor whose values are not at its data pointer."""


def subclass(x: Tensor) -> Tensor:
    return x.as_subclass(Subclass)


# Linear layers


@case
def a_linear_map_refuses_an_input_of_another_width() -> None:
    for layer in (Linear(6, 4), packed(6, 4)):
        for is_training in (True, False):
            for shape in ((3, 8), (3, 4), (12,), (2, 3, 12), ()):
                with torch.set_grad_enabled(is_training), pytest.raises(RuntimeError):
                    layer(torch.ones(shape))


@case
def a_feed_forward_network_refuses_an_input_of_another_width() -> None:
    inner, outer = Linear(6, 10), Linear(10, 6)
    with pytest.raises(RuntimeError):
        relu_ffn(torch.ones(3, 8), inner, outer)
    with pytest.raises(RuntimeError):
        relu_ffn(torch.ones(3, 6), inner, Linear(12, 6))
    inner.pack_weights()
    outer.pack_weights()
    for maps in ((inner, outer), (inner, packed(12, 6))):
        with torch.no_grad(), pytest.raises(RuntimeError):
            relu_ffn(torch.ones(3, 6 if maps[1].in_features == 12 else 8), *maps)


@case
def a_linear_map_refuses_weights_on_another_device() -> None:
    for is_training in (True, False):
        layer = packed(6, 4)
        layer.weight = nn.Parameter(torch.ones(4, 6, device="meta"))
        with torch.set_grad_enabled(is_training):
            no_data(layer, torch.ones(3, 6))
            no_data(packed(6, 4).to("meta"), torch.ones(3, 6))
            no_data(relu_ffn, torch.ones(3, 6), packed(6, 4).to("meta"), packed(4, 6))
            no_data(relu_ffn, torch.ones(3, 6), packed(6, 4), packed(4, 6).to("meta"))


@case
def a_linear_map_refuses_a_bias_of_another_length_or_device() -> None:
    for bias in (torch.ones(3), torch.ones(4, 1), torch.ones(4, device="meta")):
        for is_training in (True, False):
            layer = Linear(6, 4)
            layer.pack_weights()
            layer.bias = nn.Parameter(bias)
            with torch.set_grad_enabled(is_training), pytest.raises(RuntimeError):
                layer(torch.ones(2, 6))


@case
def a_linear_map_takes_a_bias_of_any_layout_and_type() -> None:
    for is_training in (True, False):
        layer = Linear(6, 4)
        layer.pack_weights()
        layer.bias = nn.Parameter(torch.arange(8.0)[::2])
        x = torch.ones(2, 6)
        with torch.set_grad_enabled(is_training):
            same(layer(x), F.linear(x, layer.weight, layer.bias))
            layer.bias = nn.Parameter(torch.arange(4.0).double())
            with pytest.raises(RuntimeError, match="dtype"):
                layer(x)


@case
def a_linear_map_without_inputs_or_outputs_is_pytorchs() -> None:
    for is_training in (True, False):
        for sizes in ((6, 0), (0, 4)):
            layer, x = Linear(*sizes), torch.ones(2, sizes[0])
            layer.pack_weights()
            with torch.set_grad_enabled(is_training):
                same(layer(x), F.linear(x, layer.weight, layer.bias))


# Other kinds of tensors


@case
def tensors_of_a_subclass_take_the_plain_formula() -> None:
    """A quantised weight reports float32 and has no data at its pointer."""
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            x, q = torch.ones(3, 6), torch.ones(1, 2, 3, 4)
            layer, norm = packed(6, 4), LayerNorm(6)
            layer.weight = nn.Parameter(subclass(layer.weight.detach()))
            assert native.functions_for(subclass(x)) is None
            assert type(layer(x)) is Subclass
            assert type(packed(6, 4)(subclass(x))) is Subclass
            assert type(Dropout(0.5).train()(subclass(x))) is Subclass
            assert type(add_norm(x, subclass(x), Dropout(0.0), norm)) is Subclass
            assert type(attention(q, subclass(q), q, None)) is Subclass
            keep = torch.ones(3, 3, dtype=torch.bool)
            same(attention(q, q, q, subclass(keep)), attention(q, q, q, keep))
            norm.weight = nn.Parameter(subclass(norm.weight.detach()))
            assert type(add_norm(x, x, Dropout(0.0), norm)) is Subclass


@case
def fake_tensors_take_the_plain_formula() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for is_training in (True, False):
        with torch.set_grad_enabled(is_training), FakeTensorMode():
            x, q, norm = torch.ones(3, 6), torch.ones(1, 2, 3, 4), LayerNorm(6)
            assert Linear(6, 4)(x).shape == (3, 4)
            assert relu_ffn(x, Linear(6, 10), Linear(10, 6)).shape == (3, 6)
            assert add_norm(x, x, Dropout(0.0), norm).shape == (3, 6)
            assert attention(q, q, q, None).shape == (1, 2, 3, 4)
            assert Dropout(0.0).train()(x).shape == (3, 6)
            loss, _ = ProjectedCrossEntropy.apply(x, torch.ones(5, 6), torch.arange(3), 0.1)
            assert loss.shape == ()


@case
def fake_weights_are_not_read() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for is_training in (True, False):
        with FakeTensorMode():
            layer, norm = Linear(6, 4), LayerNorm(6)
        x = torch.ones(3, 6)
        with torch.set_grad_enabled(is_training):
            for function, *arguments in ((layer, x), (add_norm, x, x, Dropout(0.0), norm)):
                with pytest.raises(Exception, match="FakeTensor"):  # PyTorch's AssertionError
                    function(*arguments)


@case
def tensors_without_storage_take_the_plain_formula() -> None:
    x, q = torch.ones(3, 6, device="meta"), torch.ones(1, 2, 3, 4, device="meta")
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            assert Linear(6, 4).to("meta")(x).is_meta
            assert add_norm(x, x, Dropout(0.5).train(), LayerNorm(6).to("meta")).is_meta
            assert attention(q, q, q, None).is_meta
            assert Dropout(0.5).train()(x).is_meta


@case
def tensors_on_two_devices_are_refused() -> None:
    x, q, weight, targets = torch.ones(3, 6), torch.ones(1, 2, 3, 4), torch.ones(5, 6), [0, 4, 1]
    keep, slots = torch.ones(3, 3, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.long)
    loss, ids = ProjectedCrossEntropy.apply, torch.tensor(targets)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            no_data(add_norm, x, x, Dropout(0.0), LayerNorm(6).to("meta"))
            no_data(add_norm, x, x.to("meta"), Dropout(0.0), LayerNorm(6))
            no_data(attention, q, q.to("meta"), q, None)
            no_data(attention, q, q, q, keep.to("meta"))
            no_data(loss, x, weight.to("meta"), ids, 0.1)
            no_data(loss, x, weight, ids.to("meta"), 0.1)
            no_data(loss, x.to("meta"), weight, ids, 0.1)
            no_data(paged_attention, x, torch.ones(4, 12), slots.to("meta"), 2)
            no_data(paged_attention, x, torch.ones(4, 12).to("meta"), slots, 2)


@case
def tensors_of_a_transform_are_refused_or_right() -> None:
    layer, x = packed(6, 4), torch.randn(5, 3, 6)
    with torch.no_grad():
        try:
            found = torch.vmap(layer)(x)
        except RuntimeError:
            return
    same(found, F.linear(x, layer.weight))


# Norms


@case
def a_sum_of_two_shapes_broadcasts_as_pytorchs() -> None:
    norm, dropout = LayerNorm(6), Dropout(0.0)
    x = torch.randn(4, 6)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            for branch in (torch.randn(1, 6), torch.randn(6), torch.randn(2, 4, 6)):
                same(add_norm(x, branch, dropout, norm), norm(x + branch))
                same(add_norm(branch, x, dropout, norm), norm(x + branch))
            with pytest.raises(RuntimeError):
                add_norm(x, torch.randn(3, 6), dropout, norm)


@case
def a_norm_of_another_width_is_refused() -> None:
    x = torch.randn(4, 6)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            for width in (3, 12):
                with pytest.raises(RuntimeError):
                    add_norm(x, x, Dropout(0.0), LayerNorm(width))


@case
def a_norm_over_several_dimensions_is_pytorchs() -> None:
    x, norm = torch.randn(5, 2, 6), LayerNorm((2, 6))
    same(add_norm(x, x, Dropout(0.0), norm), F.layer_norm(2 * x, (2, 6)))


@case
def a_norm_without_a_bias_or_without_weights_is_pytorchs() -> None:
    x = torch.randn(4, 6)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            same(add_norm(x, x, Dropout(0.0), LayerNorm(6, bias=False)), F.layer_norm(2 * x, (6,)))
            bare = LayerNorm(6, elementwise_affine=False)
            same(add_norm(x, x, Dropout(0.0), bare), F.layer_norm(2 * x, (6,)))


@case
def a_norm_whose_weights_have_gaps_is_pytorchs() -> None:
    x, norm = torch.randn(4, 6), LayerNorm(6)
    norm.weight, norm.bias = (nn.Parameter(torch.randn(12)[::2]) for _ in range(2))
    expected = F.layer_norm(2 * x, (6,), norm.weight, norm.bias)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            same(add_norm(x, x, Dropout(0.0), norm), expected)


@case
def a_rate_that_is_no_probability_is_refused() -> None:
    for rate in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="rate"):
            Dropout(rate)


# Attention


def heads(batch: int, num_heads: int, length: int, width: int) -> Tensor:
    return torch.randn(batch, num_heads, length, width)


@case
def attention_to_one_sentence_of_keys_broadcasts() -> None:
    q, k, v = heads(2, 3, 5, 4), heads(1, 3, 6, 4), heads(1, 3, 6, 4)
    expected = F.scaled_dot_product_attention(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            same(attention(q, k, v, None), expected)


@case
def attention_refuses_keys_and_values_that_do_not_fit() -> None:
    q = heads(2, 3, 5, 4)
    wrong = [
        (heads(2, 3, 6, 4), heads(2, 3, 5, 4)),  # fewer values than keys
        (heads(2, 3, 6, 8), heads(2, 3, 6, 8)),  # keys of another width
        (heads(3, 3, 6, 4), heads(3, 3, 6, 4)),  # keys of another batch
        (heads(2, 2, 6, 4), heads(2, 2, 6, 4)),  # other heads
    ]
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            for k, v in wrong:
                with pytest.raises(RuntimeError):
                    attention(q, k, v, None)


@case
def attention_takes_values_of_another_width_and_no_keys() -> None:
    q, k, v = heads(2, 3, 5, 4), heads(2, 3, 6, 4), heads(2, 3, 6, 7)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            same(attention(q, k, v, None), F.scaled_dot_product_attention(q, k, v))
            assert not attention(q, k[:, :, :0], v[:, :, :0, :4], None).any()


@case
def attention_refuses_a_mask_that_is_not_bool() -> None:
    q = heads(2, 3, 5, 4)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
                with pytest.raises((RuntimeError, TypeError)):
                    attention(q, q, q, torch.ones(5, 5, dtype=dtype))


@case
def attention_refuses_a_mask_of_another_shape() -> None:
    q = heads(2, 3, 5, 4)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            for shape in ((5, 4), (3, 1, 5, 5), (4,), (1, 2, 3, 5, 5)):
                with pytest.raises(RuntimeError):
                    attention(q, q, q, torch.ones(shape, dtype=torch.bool))


@case
def paged_attention_refuses_what_does_not_fit() -> None:
    q, cache, slots = torch.randn(3, 8), torch.randn(6, 16), torch.zeros(3, 2, dtype=torch.long)
    with torch.no_grad():
        paged_attention(q, cache, slots, 2)
        for wrong in (
            (q, torch.randn(6, 14), slots, 2),  # a cache of another width
            (q, torch.randn(6, 18), slots, 2),
            (q, cache, torch.zeros(4, 2, dtype=torch.long), 2),  # slots of other queries
            (q, cache, slots, 3),  # heads that do not divide the width
            (q, cache, slots, 0),
            (q, cache, slots.float(), 2),
            (q, cache, slots[:, :0], 2),  # nothing to attend to
            (q, cache, slots + 6, 2),  # slots beyond the cache
            (q, cache, torch.full((3, 2), 2**60), 2),
        ):
            with pytest.raises((RuntimeError, IndexError, ZeroDivisionError)):
                paged_attention(*wrong)


@case
def paged_attention_takes_slots_of_any_integer_and_a_cache_with_gaps() -> None:
    q, wide = torch.randn(3, 8), torch.randn(6, 32)
    slots = torch.tensor([[0, 5], [3, -1], [2, 4]])
    with torch.no_grad():
        expected = paged_attention(q.double(), wide[:, ::2].double(), slots, 2)
        same(paged_attention(q, wide[:, ::2], slots, 2), expected)
        same(paged_attention(q, wide[:, ::2].contiguous(), slots.int(), 2), expected)


# The loss


@case
def the_loss_refuses_targets_that_are_no_tokens() -> None:
    """-100 is PyTorch's `ignore_index`."""
    for is_training in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            for wrong in (-100, -1, 5, 2**40):
                states = torch.randn(3, 6).to(dtype).requires_grad_(is_training)
                weight, targets = torch.randn(5, 6), torch.tensor([0, wrong, 4])
                with pytest.raises((RuntimeError, IndexError)):
                    ProjectedCrossEntropy.apply(states, weight, targets, 0.1)


@case
def the_loss_refuses_targets_of_another_type() -> None:
    states, weight = torch.randn(3, 6), torch.randn(5, 6)
    for dtype in (torch.int32, torch.float32, torch.bool):
        with pytest.raises((RuntimeError, IndexError)):
            ProjectedCrossEntropy.apply(states, weight, torch.ones(3, dtype=dtype), 0.1)


@case
def the_loss_refuses_shapes_that_do_not_fit() -> None:
    states, weight, targets = torch.randn(3, 6), torch.randn(5, 6), torch.arange(3)
    for wrong in (
        (states, weight, torch.arange(2)),
        (states, weight, torch.arange(4)),
        (states, weight, targets[:, None]),
        (states, torch.randn(5, 8), targets),
        (states, torch.randn(5, 4), targets),
        (states[None], weight, targets[None]),
        (states, torch.randn(6), targets),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            ProjectedCrossEntropy.apply(*wrong, 0.1)


@case
def the_loss_refuses_a_smoothing_that_is_no_probability() -> None:
    for smoothing in (-0.1, 1.1):
        with pytest.raises(ValueError, match="smoothing"):
            ProjectedCrossEntropy.apply(
                torch.randn(3, 6), torch.randn(5, 6), torch.arange(3), smoothing
            )


# The most probable tokens


@case
def top_tokens_refuse_ids_that_are_no_tokens() -> None:
    logits, layer = torch.randn(3, 7), packed(6, 7)
    with torch.no_grad():
        for given in (logits, layer.logits(torch.randn(3, 6))):
            for never in ([7], [2**40], [0, -8]):
                with pytest.raises(IndexError):
                    top_tokens(given, never, 2)  # in PyTorch, as with its indexing
                with pytest.raises(IndexError):
                    argmax_tokens(given, never)


@case
def top_tokens_count_ids_from_the_end_as_pytorch_does() -> None:
    logits = torch.arange(7.0)[None]
    with torch.no_grad():
        assert top_tokens(logits, [-1], 2).ids_NC.tolist() == [[5, 4]]
        layer = packed(1, 7)
        layer.weight.copy_(torch.arange(7.0)[:, None])
        layer.pack_weights()
        assert argmax_tokens(layer.logits(torch.ones(1, 1)), [-1]).tolist() == [[5]]


@case
def top_tokens_refuse_a_negative_count() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError):
        top_tokens(torch.randn(3, 7), [], -1)


@case
def logits_of_states_of_another_width_are_refused() -> None:
    layer = packed(6, 7)
    with torch.no_grad():
        for width in (4, 8):
            with pytest.raises(RuntimeError):
                top_tokens(layer.logits(torch.randn(3, width)), [], 2)
            with pytest.raises(RuntimeError):
                argmax_tokens(layer.logits(torch.randn(3, width)), [])


def _outcome(function: Callable[[], None]) -> str:
    """Run a case in a forked process; return "", or what went wrong."""
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            try:
                function()
            except BaseException:  # every exception is reported
                told.write(traceback.format_exc())
                told.flush()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told.seek(0)
        return "" if code == 0 else told.read() or f"died of signal {-code}"


def run_cases() -> None:
    """Print the outcome of each case as JSON."""
    torch.set_num_threads(1)
    native.Functions.has_fast_matmul = lambda functions: True  # as on a processor that has it
    assert native.compiled() is not None
    print(json.dumps({name: _outcome(function) for name, function in CASES.items()}))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    if native.compiled() is None:
        pytest.skip("nothing on this machine compiles C, or MTRAIN_NATIVE=0")
    found: dict[str, str] = json.loads(printed_by(run_cases))
    return found


@pytest.mark.parametrize("name", CASES)
def test_unsupported_inputs_raise_an_error_or_fall_back_to_pytorch(outcomes, name):
    assert outcomes[name] == ""
