"""The operations under autograd: second derivatives, recomputation, hooks, copies."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from ways import EACH_PRODUCT, SHORT, Way, leaf, norm_of, normal, queries_keys_values

from mtrain.config.sections import ModelConfig
from mtrain.model.transformer import EncoderLayer, FeedForward
from mtrain.ops.attention import attention, chunk_last
from mtrain.ops.cross_entropy import ProjectedCrossEntropy
from mtrain.ops.dropout import Dropout, dropout_seeds
from mtrain.ops.layer_norm import LayerNorm, add_norm
from mtrain.ops.linear import Linear, relu_ffn
from mtrain.ops.topk import Projection

Operation = Callable[[Tensor], Tensor]


def operations(dtype: torch.dtype) -> dict[str, Operation]:
    """Return each operation as a function of [2, 3, 4, 6]."""
    linear, inner, outer = Linear(6, 4), Linear(6, 8), Linear(8, 6)
    norm, dropout = norm_of(6), Dropout(0.5).train()
    weight = leaf(5, 6, dtype=torch.float32)
    targets = torch.arange(24) % 5
    return {
        "linear": linear,
        "relu_ffn": lambda x: relu_ffn(x, inner, outer),
        "dropout": dropout,
        "add_norm": lambda x: add_norm(x, x, dropout, norm),
        "attention": lambda x: attention(x, x, x, None, dropout),
        "chunks": lambda x: sum(chunk_last(x, 3)),
        "loss": lambda x: ProjectedCrossEntropy.apply(x.flatten(0, 2), weight, targets, 0.1)[0],
    }


def refuses(way: Way, name: str) -> bool:
    """Return whether an operation has no second derivative with this dtype and implementation."""
    if name in ("dropout", "loss"):
        return True
    if name == "chunks":
        return way.is_compiled
    if name in ("linear", "relu_ffn"):
        return way.multiplies or way.dtype is not torch.float32
    return True


@EACH_PRODUCT
@pytest.mark.parametrize("name", operations(torch.float32))
def test_a_second_derivative_is_correct_or_raises_an_error(
    way: Way, calls: list[str], name: str
) -> None:
    """The function is a gradient penalty: the sum of squares of the gradient."""
    torch.manual_seed(0)  # the seed of the weights
    x, function = leaf(2, 3, 4, 6, dtype=way.dtype), operations(way.dtype)[name]

    def penalty(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        out = function(x).double()
        (grad,) = torch.autograd.grad((out * out).sum(), [x], create_graph=True)
        return (grad.double() ** 2).sum()

    if refuses(way, name):
        with pytest.raises(RuntimeError, match="twice"):
            penalty(x)
        return
    if way.dtype is SHORT:
        pytest.skip("bfloat16 is too coarse for finite differences")
    (found,) = torch.autograd.grad(penalty(x), [x])
    direction = normal(2, 3, 4, 6, seed=5)
    direction /= direction.norm()
    step = 1e-4 if way.dtype is torch.float64 else 0.1
    ends = [(x.detach().double() + sign * step * direction).to(way.dtype) for sign in (1, -1)]
    ahead, behind = (penalty(end.requires_grad_()).detach() for end in ends)
    slope = float((ahead - behind) / (2 * step))
    assert float((found.double() * direction).sum()) == pytest.approx(slope, rel=0.05)


def test_two_backward_passes_through_a_retained_graph_give_the_same_gradients(
    calls: list[str],
) -> None:
    """The shapes that the forward pass saves for the backward pass do not change."""
    inputs = queries_keys_values(5, 7, 6, torch.float32)
    out = attention(*inputs, None)
    before = bytes(out.grad_fn.shape)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert bytes(out.grad_fn.shape) == before
    upstream = torch.ones(2, 5, 3, 6).transpose(1, 2)
    again = torch.autograd.grad(out, inputs, upstream)
    assert all(map(torch.equal, first, again))
    assert calls == ["attention", "attention_grad", "attention_grad"]


def encoder_layer() -> EncoderLayer:
    torch.manual_seed(3)
    settings = {"d_model": 8, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 1}
    rates = {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3}
    return EncoderLayer(ModelConfig(**settings, num_decoder_layers=1, **rates)).train()


@EACH_PRODUCT
@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("seed", [7, None])
def test_a_checkpointed_layer_uses_the_same_dropout_masks_when_recomputed(
    way: Way,
    calls: list[str],
    is_reentrant: bool,
    num_threads: int,
    seed: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    layers = [encoder_layer().to(way.dtype if way.dtype is torch.float64 else torch.float32)]
    layers.append(copy.deepcopy(layers[0]))
    x, keep = leaf(2, 4, 8, dtype=way.dtype), torch.ones(4, 4, dtype=torch.bool)

    upstream = normal(2, 4, 8, seed=4)

    def grads(is_recomputed: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        with dropout_seeds(seed):
            out = x
            for layer in layers:
                out = (
                    checkpoint(layer, out, keep, use_reentrant=is_reentrant)
                    if is_recomputed
                    else layer(out, keep)
                )
            weights = [weight for layer in layers for weight in layer.parameters()]
            for weight in (x, *weights):
                weight.grad = None
            (out.double() * upstream).sum().backward()
            return tuple(weight.grad for weight in (x, *weights))

    for found, expected in zip(grads(True), grads(False), strict=True):
        # the first pass of a reentrant checkpoint runs without gradients, by PyTorch's products
        assert (found - expected).norm() <= 0.1 * expected.norm()


def test_a_dropout_module_that_is_called_twice_cannot_be_recomputed() -> None:
    """It cannot know which of its calls is recomputed."""
    dropout, x = Dropout(0.5).train(), leaf(4, 8)
    with dropout_seeds(7):
        out = checkpoint(dropout, x, use_reentrant=False) + dropout(x)
        with pytest.raises(RuntimeError, match="several times"):
            out.sum().backward()


def hooked(module: nn.Module) -> list[str]:
    names: list[str] = []
    module.register_forward_pre_hook(lambda *_: names.append("before"))
    module.register_forward_hook(lambda *_: names.append("after"))
    module.register_full_backward_hook(lambda *_: names.append("backward"))
    return names


@EACH_PRODUCT
@pytest.mark.parametrize("which", ["inner", "outer"])
def test_hooks_of_a_feed_forward_network_run(way: Way, calls: list[str], which: str) -> None:
    settings = {"d_model": 8, "d_ff": 16, "num_heads": 2}
    network, x = (
        FeedForward(ModelConfig(**settings, activation_dropout=0)),
        leaf(3, 8, dtype=way.dtype),
    )
    network.to(torch.float64 if way.dtype is torch.float64 else torch.float32)
    expected = network(x)
    names = hooked(getattr(network, which))
    out = network(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert names == ["before", "after", "backward"]


def test_hooks_and_replaced_forward_methods_take_effect_on_packed_linear_layers(
    calls: list[str], one_thread: None
) -> None:
    inner, outer, x = Linear(6, 8), Linear(8, 6), normal(3, 6, dtype=torch.float32)
    inner.pack_weights()
    outer.pack_weights()
    with torch.no_grad():
        before = relu_ffn(x, inner, outer)
        hook = inner.register_forward_hook(lambda module, inputs, out: 2 * out)
        torch.testing.assert_close(
            relu_ffn(x, inner, outer) - outer.bias, 2 * (before - outer.bias)
        )
        hook.remove()
        outer.forward = lambda hidden: hidden.sum(-1)  # type: ignore[method-assign]
        assert torch.equal(relu_ffn(x, inner, outer), F.relu(inner(x)).sum(-1))


def test_hooks_of_layer_norm_dropout_and_the_output_projection_run(
    calls: list[str], one_thread: None
) -> None:
    x, norm, dropout, output = (
        leaf(3, 6, dtype=torch.float32),
        norm_of(6),
        Dropout(0.0),
        Projection(6, 5),
    )
    output.pack_weights()
    names = [hooked(module) for module in (norm, dropout, output)]
    add_norm(x, x, dropout, norm).sum().backward()
    q = leaf(1, 2, 3, 4, dtype=torch.float32)
    attention(q, q, q, None, dropout).sum().backward()
    with torch.no_grad():
        output.logits(x)
    once = ["before", "after", "backward"]
    assert names == [once, 2 * once, once[:2]]


class RMSNorm(LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, input.shape[-1:], self.weight)


class HalvingDropout(Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_the_forward_of_a_subclass_of_layer_norm_or_dropout_is_called() -> None:
    x, norm, dropout = normal(3, 6, dtype=torch.float32) + 1, RMSNorm(6), Dropout(0.0)
    assert torch.equal(add_norm(x, x, dropout, norm), norm(x + x))
    norm, dropout = norm_of(6), HalvingDropout(0.0)
    assert torch.equal(add_norm(x, x, dropout, norm), norm(x + x / 2))
    q = normal(1, 2, 3, 4, dtype=torch.float32)
    torch.testing.assert_close(attention(q, q, q, None, dropout), attention(q, q, q, None) / 2)


def packed(seed: int = 1) -> Linear:
    torch.manual_seed(seed)
    layer = Linear(6, 6)
    layer.pack_weights()
    return layer


CHANGES: dict[str, Callable[[Linear], object]] = {
    "an operation in place": lambda layer: layer.weight.mul_(2),
    "one through .data": lambda layer: layer.weight.data.mul_(2),
    "an assignment through .data": lambda layer: layer.weight.data.copy_(packed(5).weight),
    "other data": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    "the same data, turned": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "a NumPy view": lambda layer: layer.weight.detach().numpy().__imul__(2),
    "a swap of weights": lambda layer: torch.utils.swap_tensors(layer.weight, packed(5).weight),
    "another parameter": lambda layer: setattr(layer, "weight", packed(5).weight),
    "other state": lambda layer: layer.load_state_dict(packed(5).state_dict()),
    "state that is assigned": lambda layer: layer.load_state_dict(
        packed(5).state_dict(), assign=True
    ),
    "shared memory": lambda layer: (layer.share_memory(), layer.weight.data.mul_(2)),
    "an inner method": lambda layer: layer._apply(lambda x: x * 2),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_packed_weights_are_discarded_after_the_weights_change(
    calls: list[str], one_thread: None, change: str
) -> None:
    layer, x = packed(), normal(4, 6, dtype=torch.float32)
    layer(x)
    assert calls == ["packed_linear"]
    CHANGES[change](layer)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert calls == ["packed_linear"]
    assert layer._packed is None


@torch.no_grad()
def test_a_new_parameter_is_used_even_at_the_address_of_the_freed_one(
    calls: list[str], one_thread: None
) -> None:
    """Freed memory is often allocated again at once, at the same address."""
    x = normal(4, 6, dtype=torch.float32)
    for number in range(200):
        layer = packed()
        layer.weight = None  # type: ignore[assignment]
        layer.weight = nn.Parameter(torch.full((6, 6), float(number)))
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_packed_weights_are_not_used_after_the_data_is_replaced_twice(
    calls: list[str], one_thread: None
) -> None:
    layer, x = packed(), normal(4, 6, dtype=torch.float32)
    layer.weight.data = layer.weight.data * 2
    layer.weight.data = layer.weight.data * 2
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@torch.no_grad()
def test_a_copy_has_no_packed_weights(calls: list[str], one_thread: None, copied) -> None:
    for layer in (packed(), Projection(6, 5)):
        layer.pack_weights()
        other, x = copied(layer), normal(4, 6, dtype=torch.float32)
        assert "_packed" not in other.__dict__
        assert torch.equal(other(x), F.linear(x, layer.weight, layer.bias))
        other.pack_weights()
        torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # of PyTorch, which has deprecated it
@torch.no_grad()
def test_a_traced_packed_linear_layer_equals_torchs_linear(
    calls: list[str], one_thread: None
) -> None:
    """Tracing records PyTorch's operations, and no calls of C."""
    layer, x = packed(), normal(4, 6, dtype=torch.float32)
    traced = torch.jit.trace(layer, x)
    other = normal(4, 6, seed=9, dtype=torch.float32)
    assert torch.equal(traced(other), F.linear(other, layer.weight, layer.bias))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@torch.no_grad()
def test_packed_linear_layers_propagate_forward_mode_tangents(
    calls: list[str], one_thread: None
) -> None:
    layer, x = packed(), normal(4, 6, dtype=torch.float32)
    tangent = normal(4, 6, seed=9, dtype=torch.float32)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    torch.testing.assert_close(found, tangent @ layer.weight.T)
