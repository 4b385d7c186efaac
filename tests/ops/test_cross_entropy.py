"""Compare the cross entropy, in PyTorch and in C, with PyTorch's in float64."""

import math
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from ways import (
    BOTH_PATHS,
    EACH_PRODUCT,
    EACH_WAY,
    LONG,
    MULTIPLYING,
    MULTIPLYING_PAIRS,
    NANS,
    SAME,
    SHORT,
    Way,
    exactly,
    growth,
    leaf,
    nan_of,
    normal,
    peak,
)

from mtrain.ops import cross_entropy, native
from mtrain.ops.cross_entropy import ProjectedCrossEntropy


def plain_loss(
    states: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    logits = states @ weight.T
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")
    return loss, F.cross_entropy(logits, targets, reduction="sum")


@EACH_WAY
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("rows", "width"), [(5, 1), (5, 2), (1, 6), (5, 17), (129, 128), (7, 130), (3, 3001)]
)
def test_the_cross_entropy_of_logits_and_its_gradient_equal_torchs(
    way, calls, rows, width, smoothing
):
    logits, targets = normal(rows, width, dtype=way.dtype) * 3, torch.arange(rows) % width
    (exact,) = exactly([logits.clone()])
    sums = torch.full((2,), 0.5, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, targets, smoothing, True, sums)
    assert calls == (["cross_entropy"] if way.is_compiled else [])
    settings = {"reduction": "sum"}
    loss = F.cross_entropy(exact, targets, label_smoothing=smoothing, **settings)
    nll = F.cross_entropy(exact, targets, **settings)
    torch.testing.assert_close(sums - 0.5, torch.stack([loss, nll]).detach(), rtol=2e-6, atol=1e-5)
    way.assert_near(logits, torch.autograd.grad(loss, exact)[0])


@EACH_WAY
def test_without_a_gradient_the_logits_are_not_modified(way, calls):
    logits, targets = normal(5, 7, dtype=way.dtype), torch.arange(5)
    before, sums = logits.clone(), torch.zeros(2, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, targets, 0.1, False, sums)
    assert torch.equal(logits, before)
    with_grad = torch.zeros(2, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, targets, 0.1, True, with_grad)
    assert torch.equal(sums, with_grad)


@EACH_PRODUCT
@pytest.mark.parametrize(
    ("num_tokens", "chunk_tokens"),
    [(1, 512), (11, 1), (11, 3), (128, 128), (130, 3), (700, 128), (700, 512)],
)
def test_projected_cross_entropy_equals_torchs_cross_entropy_of_the_logits(
    way, calls, num_tokens, chunk_tokens, monkeypatch
):
    monkeypatch.setattr(cross_entropy, "_CHUNK_TOKENS", chunk_tokens)
    weights = LONG[way.dtype]
    states, weight = leaf(num_tokens, 4, dtype=way.dtype), leaf(6, 4, seed=1, dtype=weights)
    targets = torch.arange(num_tokens) % 6
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, 0.1)
    name = "projected_cross_entropy" if way.multiplies else "cross_entropy"
    assert set(calls) == ({name} if way.is_compiled else set())
    assert loss.dtype == nll.dtype == torch.float64
    grads = torch.autograd.grad(-2.5 * loss, [states, weight])
    assert [grad.dtype for grad in grads] == [way.dtype, weights]

    exact = exactly([states, weight.to(way.dtype)])
    expected, expected_nll = plain_loss(*exact, targets, 0.1)
    expected_grads = torch.autograd.grad(-2.5 * expected, exact)
    rounding = 0.004 if way.dtype is SHORT and not way.multiplies else 2e-6
    torch.testing.assert_close(loss, expected, rtol=rounding, atol=0)
    torch.testing.assert_close(nll, expected_nll, rtol=rounding, atol=0)
    for grad, plain in zip(grads, expected_grads, strict=True):
        way.assert_near(grad, plain, roundings=4)


@MULTIPLYING
@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("rows", "width", "pieces"),
    [(1, 2, 3), (5, 3, 7), (513, 5, 1025), (528, 4, 1024), (1100, 129, 2051)],
)
def test_the_compiled_loss_equals_torchs_for_odd_and_large_sizes(
    way, calls, rows, width, pieces, smoothing, size
):
    """Odd sizes, and sizes larger than one computed block."""
    width += width % 2 if way.dtype is SHORT else 0
    states, targets = leaf(rows, width, dtype=way.dtype), torch.arange(rows) * 7 % pieces
    weight = normal(pieces, width, seed=1, dtype=torch.float32) * size / width**0.5
    assert_loss_is_torchs(way, states, weight.requires_grad_(), targets, smoothing)
    assert calls == ["projected_cross_entropy"]


def assert_loss_is_torchs(
    way: Way, states: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> None:
    """Compare the compiled loss with torch's; its logits are not rounded."""
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, smoothing)
    grads = torch.autograd.grad(loss, [states, weight])
    exact = exactly([states, weight.to(way.dtype)])
    expected, expected_nll = plain_loss(*exact, targets, smoothing)
    near = {"rtol": 2e-6, "atol": 1e-6 * len(targets)}
    torch.testing.assert_close(loss.detach(), expected.detach(), **near)
    torch.testing.assert_close(nll, expected_nll.detach(), **near)
    # where one token has nearly all probability, the gradient is a difference of close numbers
    floor = 1e-7 * float(weight.detach().abs().max()) if way.dtype is torch.float32 else 0.0
    for grad, plain in zip(grads, torch.autograd.grad(expected, exact), strict=True):
        way.assert_near(grad, plain, roundings=2, floor=floor)


@MULTIPLYING
@pytest.mark.parametrize("place", [0, 63, 64, 599])
@pytest.mark.parametrize("size", [50.0, 1e3, 1e6])
def test_the_compiled_loss_equals_torchs_where_a_logit_is_far_above_the_targets(
    way, calls, place, size
):
    """The exponential of their difference overflows float32."""
    states, targets = normal(600, 4, dtype=way.dtype), torch.arange(600) % 9
    weight = leaf(9, 4, seed=1, dtype=torch.float32)
    logits = (states @ weight.to(way.dtype).T).detach().float()
    targets[place] = logits[place].argmin()
    states[place] *= size
    assert_loss_is_torchs(way, states.requires_grad_(), weight, targets, 0.1)


@MULTIPLYING
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_nan_logit_of_a_token_that_is_no_target_makes_loss_and_nll_nan(way, calls, smoothing):
    """Token 7 has the NaN logit; the targets are tokens 0 to 4."""
    weight = leaf(9, 4, seed=1, dtype=torch.float32)
    with torch.no_grad():
        weight[7, 2] = math.nan
    states, targets = leaf(5, 4, dtype=way.dtype), torch.arange(5)
    sums = ProjectedCrossEntropy.apply(states, weight, targets, smoothing)
    assert all(bool(own.isnan()) for own in sums)
    assert calls == ["projected_cross_entropy"]


@MULTIPLYING
def test_the_gradient_of_a_confident_correct_prediction_is_not_rounded_to_zero(way, calls):
    """The gradient of the target's logit is p - 1, which is close to zero."""
    states = torch.full((3, 2), 4.0, dtype=way.dtype, requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]], requires_grad=True)
    loss, _ = ProjectedCrossEntropy.apply(states, weight, torch.zeros(3, dtype=torch.long), 0.0)
    (grad,) = torch.autograd.grad(loss, weight)
    missing = torch.full((2,), -3 * 4 / (1 + math.exp(8)), dtype=torch.float64)
    torch.testing.assert_close(grad.double(), torch.stack([missing, -missing]), rtol=0.005, atol=0)


@MULTIPLYING_PAIRS
def test_the_mean_over_tokens_scales_the_gradients_of_states_with_one_rounding(way, calls):
    """One over the number of tokens is not rounded to bfloat16, which would scale all gradients."""
    states, weight = leaf(700, 4, dtype=SHORT), leaf(6, 4, seed=1, dtype=torch.float32)
    targets = torch.arange(700) % 6
    loss, _ = ProjectedCrossEntropy.apply(states, weight, targets, 0.1)
    (whole,) = torch.autograd.grad(loss, states, retain_graph=True)
    (mean,) = torch.autograd.grad(loss / 3001, states)
    one_rounding = {"rtol": 2.0**-8, "atol": 0}
    torch.testing.assert_close(mean.double(), whole.double() / 3001, **one_rounding)


@BOTH_PATHS
def test_targets_may_be_a_view_that_is_not_contiguous(way, calls):
    states, weight = leaf(5, 4, dtype=torch.float32), leaf(6, 4, seed=1, dtype=torch.float32)
    targets = (torch.arange(20) % 6).view(5, 4)[:, 1]
    assert not targets.is_contiguous()
    found = ProjectedCrossEntropy.apply(states, weight, targets, 0.1)
    torch.testing.assert_close(found, plain_loss(states, weight, targets, 0.1), check_dtype=False)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_projected_cross_entropy_passes_gradcheck(smoothing, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_TOKENS", 2)
    targets = torch.tensor([0, 4, 4, 2, 1])

    def loss(states: Tensor, weight: Tensor) -> Tensor:
        return ProjectedCrossEntropy.apply(states, weight, targets, smoothing)[0]

    assert torch.autograd.gradcheck(loss, (leaf(5, 3), leaf(6, 3, seed=1)))


@pytest.mark.parametrize("frozen", ["states", "weight"])
def test_projected_cross_entropy_trains_one_input_while_the_other_is_frozen(frozen):
    inputs = {"states": leaf(5, 3), "weight": leaf(6, 3, seed=1)}
    targets = torch.tensor([0, 4, 4, 2, 1])
    inputs[frozen].requires_grad_(False)
    free = next(tensor for name, tensor in inputs.items() if name != frozen)
    loss, _ = ProjectedCrossEntropy.apply(*inputs.values(), targets, 0.1)
    expected, _ = plain_loss(*inputs.values(), targets, 0.1)
    torch.testing.assert_close(
        torch.autograd.grad(loss, free), torch.autograd.grad(expected, free), **SAME
    )


@EACH_PRODUCT
def test_projected_cross_entropy_gives_the_same_values_without_gradients(way, calls):
    states, weight = leaf(5, 3, dtype=way.dtype), leaf(6, 3, seed=1, dtype=way.dtype)
    targets = torch.tensor([0, 4, 4, 2, 1])
    with_grad = ProjectedCrossEntropy.apply(states, weight, targets, 0.1)
    without = ProjectedCrossEntropy.apply(states.detach(), weight.detach(), targets, 0.1)
    assert [value.item() for value in with_grad] == [value.item() for value in without]
    assert not without[0].requires_grad


def test_the_nll_does_not_require_a_gradient():
    loss, nll = ProjectedCrossEntropy.apply(
        leaf(5, 3), leaf(6, 3), torch.zeros(5, dtype=torch.long), 0.1
    )
    assert loss.requires_grad
    assert not nll.requires_grad


@EACH_PRODUCT
def test_the_loss_of_an_empty_batch_is_zero(way, calls):
    states, weight = leaf(0, 3, dtype=way.dtype), leaf(6, 3, dtype=way.dtype)
    loss, nll = ProjectedCrossEntropy.apply(states, weight, torch.zeros(0, dtype=torch.long), 0.1)
    loss.backward()
    assert loss.item() == nll.item() == 0
    assert (weight.grad == 0).all()


@EACH_WAY
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_the_cross_entropy_of_extreme_logits_equals_torchs(way, calls, size):
    logits, targets = normal(9, 6, dtype=way.dtype) * size, torch.arange(9) % 6
    (exact,) = exactly([logits.clone()])
    sums = torch.zeros(2, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, targets, 0.1, True, sums)
    loss = F.cross_entropy(exact, targets, label_smoothing=0.1, reduction="sum")
    nll = F.cross_entropy(exact, targets, reduction="sum")
    torch.testing.assert_close(sums, torch.stack([loss, nll]).detach(), rtol=1e-5, atol=1e-4)
    way.assert_near(logits, torch.autograd.grad(loss, exact)[0])


def test_the_loss_of_70000_tokens_is_not_rounded_like_a_float32_sum():
    """In float32, the loss of a token would be rounded when it is added to a large sum."""
    states, weight = torch.zeros(70_000, 1), torch.zeros(5, 1)
    loss, nll = ProjectedCrossEntropy.apply(states, weight, torch.arange(70_000) % 5, 0.1)
    assert loss.item() == pytest.approx(70_000 * math.log(5), rel=2e-7)
    assert nll.item() == pytest.approx(70_000 * math.log(5), rel=2e-7)


class LiveMemory(TorchDispatchMode):
    """Records the most bytes that tensors made by operations held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self._live[id(tensor)] = weakref.ref(tensor)
        live = [tensor for tensor in (ref() for ref in self._live.values()) if tensor is not None]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in live}
        self.most = max(self.most, sum(storage.nbytes() for storage in storages.values()))
        return out


@EACH_WAY
def test_the_loss_never_holds_the_logits_of_a_whole_batch(way, calls):
    num_tokens, num_pieces = 16 * cross_entropy._CHUNK_TOKENS, 1000
    weights = LONG[way.dtype]
    states, weight = leaf(num_tokens, 2, dtype=way.dtype), leaf(num_pieces, 2, dtype=weights)
    targets = torch.arange(num_tokens) % num_pieces
    with LiveMemory() as memory:
        ProjectedCrossEntropy.apply(states, weight, targets, 0.1)[0].backward()
    chunk_bytes = cross_entropy._CHUNK_TOKENS * num_pieces * way.dtype.itemsize
    num_chunks = 2.5 if way.is_compiled else 8  # a tensor is freed after the next is made
    assert chunk_bytes < memory.most < num_chunks * chunk_bytes


def print_growth() -> None:
    native.Functions.has_fast_matmul = lambda functions: True
    states = torch.ones(20_000, 2, dtype=getattr(torch, sys.argv[1]), requires_grad=True)
    weight, targets = torch.ones(4_000, 2, requires_grad=True), torch.arange(20_000) % 4_000
    for count in (1, 20_000):
        before = peak()
        given = (states[:count], weight, targets[:count])
        ProjectedCrossEntropy.apply(*given, 0.1)[0].backward()
    print(peak() - before)


@MULTIPLYING
def test_the_compiled_loss_never_holds_the_logits_of_a_whole_batch(way, calls):
    """They would be 160 MB or more."""
    assert growth(print_growth, str(way.dtype).removeprefix("torch.")) < 40_000


def test_compiled_exponentials_have_a_relative_error_below_3e_7(calls):
    """The gradient of the token that is not the target is its probability."""
    x = torch.linspace(-86, 0, 4001)
    logits = torch.stack([torch.zeros_like(x), x], 1)
    sums = torch.zeros(2, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, torch.zeros(len(x), dtype=torch.long), 0.0, True, sums)
    assert calls == ["cross_entropy"]
    torch.testing.assert_close(logits[:, 1].double(), x.double().sigmoid(), rtol=3e-7, atol=0)


@EACH_PRODUCT
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("place", [0, 4, 5, 19])
def test_a_nan_or_inf_state_makes_the_loss_and_the_gradient_not_finite(
    way, calls, value, smoothing, place
):
    states, weight = leaf(5, 4, dtype=way.dtype), leaf(40, 4, seed=1, dtype=way.dtype)
    with torch.no_grad():
        states.view(-1)[place] = value
    loss, nll = ProjectedCrossEntropy.apply(states, weight, torch.arange(5), smoothing)
    grads = torch.autograd.grad(loss, [states, weight])
    assert not loss.isfinite()
    assert not nll.isfinite()
    assert not all(grad.isfinite().all() for grad in grads)


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 2, 16, 39])
def test_a_nan_or_inf_logit_makes_the_loss_not_finite_and_the_gradient_of_its_row_nan(
    way, calls, value, place
):
    logits, sums = normal(3, 40, dtype=way.dtype), torch.zeros(2, dtype=torch.float64)
    logits[1, place] = value
    cross_entropy._cross_entropy(logits, torch.tensor([0, 2, 39]), 0.1, True, sums)
    assert not sums.isfinite().any()
    assert logits[[0, 2]].isfinite().all()
    assert logits[1].isnan().all()


@NANS
@EACH_PRODUCT
def test_a_nan_weight_makes_loss_and_nll_nan(way, calls, bits):
    states, weight = leaf(3, 6, dtype=way.dtype), normal(40, 6, dtype=torch.float32)
    weight.view(torch.int32)[5, 2] = nan_of(bits).view(torch.int32)
    loss, nll = ProjectedCrossEntropy.apply(states, weight.requires_grad_(), torch.arange(3), 0.1)
    assert loss.isnan() and nll.isnan()


@pytest.mark.parametrize("wrong", [-100, -1, 7, 2**62, -(2**63)])
@EACH_PRODUCT
def test_a_target_out_of_range_is_an_error(way, calls, wrong):
    """As with `gather`."""
    states, weight = leaf(3, 6, dtype=way.dtype), leaf(7, 6, dtype=torch.float32)
    targets = torch.tensor([0, 6, wrong])
    with pytest.raises((IndexError, RuntimeError), match="index"):
        ProjectedCrossEntropy.apply(states, weight, targets, 0.1)


@MULTIPLYING
@pytest.mark.parametrize("size", [50.0, 500.0, 1e3, 1e6])
def test_the_compiled_loss_of_a_probable_target_is_near_zero_for_large_logits(way, calls, size):
    """The target's logit is that of the sum of exponentials, whatever the order of its sum."""
    states, weight = normal(64, 512, dtype=way.dtype), normal(300, 512, seed=1).float()
    exact_NV = states.double() @ weight.to(way.dtype).double().T
    margins = exact_NV.topk(2).values.diff()[:, 0].neg() * size
    states, targets = (states * size)[margins > 40], exact_NV.argmax(1)[margins > 40]
    assert len(states) > 30
    exact = exactly([states, weight.to(way.dtype)])
    expected = plain_loss(*exact, targets, 0.1)
    states.requires_grad_(), weight.requires_grad_()
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, 0.1)
    assert calls == ["projected_cross_entropy"]
    assert abs(nll.item()) < 1e-5
    torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=1e-4)
    grads = torch.autograd.grad(loss, [states, weight])
    for grad, plain in zip(grads, torch.autograd.grad(expected[0], exact), strict=True):
        way.assert_near(grad, plain, roundings=2, floor=1e-6 * float(weight.detach().abs().max()))


@EACH_WAY
def test_the_nll_of_large_logits_is_not_rounded_at_their_size(way, calls):
    logits, targets = (1e4 + 3 * normal(9, 40)).to(way.dtype), torch.arange(9)
    expected = F.cross_entropy(logits.double(), targets, reduction="sum")
    sums = torch.zeros(2, dtype=torch.float64)
    cross_entropy._cross_entropy(logits, targets, 0.0, True, sums)
    torch.testing.assert_close(sums, expected.expand(2), rtol=1e-6, atol=0)
