"""Hold each fast operation to the plain formula that it stands for."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain import kernels
from mtrain.kernels import Dropout, Linear, ProjectedCrossEntropy, attention

WIDTH = 6  # of a query; the root of 4 would also be its half
FEW, MANY = 7, kernels._SHORT + 3  # keys on either side of where attention changes its path
SAME = {"rtol": 1e-10, "atol": 1e-12}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=dtype)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


# Linear


def linear(dtype: torch.dtype | None, bias: bool = True, weights: torch.dtype = torch.float64):
    torch.manual_seed(3)
    layer = Linear(6, 5, bias=bias).to(weights)
    layer.matmul_dtype = dtype
    return layer


@pytest.mark.parametrize("matmul_dtype", [None, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (2, 1, 3, 6)])
def test_linear_is_the_plain_formula_forward_and_backward(matmul_dtype, bias, shape):
    layer, x = linear(matmul_dtype, bias), leaf(*shape)
    out, upstream = layer(x), normal(*shape[:-1], 5, seed=1)
    inputs = list(layer.parameters())
    grads = torch.autograd.grad((out * upstream).sum(), [x, *inputs])

    rows, up = x.detach().reshape(-1, 6), upstream.reshape(-1, 5)
    expected = rows @ layer.weight.detach().T
    if bias:
        expected = expected + layer.bias.detach()
    torch.testing.assert_close(out, expected.view(*shape[:-1], 5), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(grads[0], (up @ layer.weight).view(shape), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(grads[1], up.T @ rows, rtol=1e-14, atol=1e-14)
    if bias:
        torch.testing.assert_close(grads[2], up.sum(0), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("num_rows", [1, 127, 128, 129, 300])
def test_filling_up_the_rows_of_a_product_changes_nothing(num_rows):
    layer, x = linear(torch.float64, weights=torch.float32), leaf(num_rows, 6, dtype=torch.float32)
    out, upstream = layer(x), normal(num_rows, 5, seed=1, dtype=torch.float32)
    grads = torch.autograd.grad((out * upstream).sum(), [x, layer.weight, layer.bias])

    plain = F.linear(x, layer.weight, layer.bias)
    expected = torch.autograd.grad((plain * upstream).sum(), [x, layer.weight, layer.bias])
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-4)


def test_batches_of_many_sizes_ask_for_products_of_few_sizes(monkeypatch):
    sizes, multiply = set(), torch.mm

    def note(left: Tensor, right: Tensor) -> Tensor:
        sizes.add((tuple(left.shape), tuple(right.shape)))
        return multiply(left, right)

    monkeypatch.setattr(torch, "mm", note)
    layer, weight = linear(torch.float64, weights=torch.float32), leaf(9, 5, dtype=torch.float32)
    for num_rows in range(1, 129, 7):
        states, targets = (
            layer(normal(num_rows, 6, dtype=torch.float32)),
            torch.arange(num_rows) % 9,
        )
        ProjectedCrossEntropy.apply(states, weight, targets, 0.1, torch.float64)[0].backward()
    assert len(sizes) == 6  # forward, and each operand's gradient, of two projections


def test_linear_with_short_products_passes_gradcheck():
    layer = linear(torch.float64)

    def apply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    inputs = (leaf(2, 3, 6), leaf(5, 6, seed=1), leaf(5, seed=2))
    assert torch.autograd.gradcheck(apply, inputs)


def test_linear_in_bfloat16_rounds_its_operands_and_nothing_else_of_note():
    layer = linear(torch.bfloat16, weights=torch.float32)
    x = leaf(40, 6, dtype=torch.float32)
    out = layer(x)
    upstream = normal(40, 5, seed=1, dtype=torch.float32)
    out.backward(upstream)
    assert out.dtype == x.grad.dtype == layer.weight.grad.dtype == torch.float32

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.detach().bfloat16().double()

    one_rounding = {"rtol": 2**-8, "atol": 1e-5, "check_dtype": False}
    products = rounded(x) @ rounded(layer.weight).T
    torch.testing.assert_close(out - layer.bias, products, **one_rounding)
    grad_x = rounded(upstream) @ rounded(layer.weight)
    torch.testing.assert_close(x.grad, grad_x, **one_rounding)
    grad_weight = rounded(upstream).T @ rounded(x)
    torch.testing.assert_close(layer.weight.grad, grad_weight, **one_rounding)
    torch.testing.assert_close(layer.bias.grad, upstream.sum(0))  # never rounded


def test_linear_in_bfloat16_is_near_the_plain_formula():
    layer, x = linear(torch.bfloat16, weights=torch.float32), normal(9, 6, dtype=torch.float32)
    plain = F.linear(x, layer.weight, layer.bias)
    assert not torch.equal(layer(x), plain), "the products must really run in bfloat16"
    torch.testing.assert_close(layer(x), plain, rtol=0, atol=0.03)


def test_linear_takes_an_input_and_a_gradient_that_are_not_contiguous():
    layer, x = linear(torch.float64), leaf(6, 3, 2)
    layer(x.transpose(0, 2)).sum().backward()  # the gradient of a sum is an expanded scalar
    expected = layer.weight.detach().sum(0)[:, None, None].expand(6, 3, 2)
    torch.testing.assert_close(x.grad, expected, **SAME)


def test_linear_has_the_weights_of_torch_linear():
    assert {name: p.shape for name, p in Linear(6, 5).named_parameters()} == {
        name: p.shape for name, p in nn.Linear(6, 5).named_parameters()
    }


# attention


def keeps(num_queries: int, num_keys: int) -> dict[str, Tensor | None]:
    rng = torch.Generator().manual_seed(5)
    scattered = torch.rand(2, 1, num_queries, num_keys, generator=rng) < 0.5
    scattered[..., 0] |= ~scattered.any(-1)
    padding = torch.arange(num_keys) < torch.tensor([num_keys, 2])[:, None]
    return {
        "everything": None,
        "causal": torch.ones(num_queries, num_keys, dtype=torch.bool).tril(),
        "padding": padding[:, None, None, :],
        "scattered": scattered,
    }


def written_out(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d_k)) v, with minus infinity for what is left out."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if keep is not None:
        scores = torch.where(keep, scores, -torch.inf)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return weights @ v


@pytest.mark.parametrize("num_keys", [1, FEW, kernels._SHORT, MANY])
@pytest.mark.parametrize("kind", ["everything", "causal", "padding", "scattered"])
def test_attention_is_the_formula_written_out_and_torchs_own(num_keys, kind):
    num_queries = 5
    keep = keeps(num_queries, num_keys)[kind]
    shapes = [(2, 3, length, WIDTH) for length in (num_queries, num_keys, num_keys)]
    q, k, v = (leaf(*shape, seed=seed) for seed, shape in enumerate(shapes))
    upstream = normal(2, 3, num_queries, WIDTH, seed=9)

    def result(function) -> list[Tensor]:
        out = function()
        return [out, *torch.autograd.grad((out * upstream).sum(), [q, k, v])]

    ours = result(lambda: attention(q, k, v, keep))
    plain = result(lambda: written_out(q, k, v, keep))
    torchs = result(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep))
    for mine, formula, reference in zip(ours, plain, torchs, strict=True):
        torch.testing.assert_close(mine, formula, **SAME)
        torch.testing.assert_close(mine, reference, **SAME)


@pytest.mark.parametrize("kind", ["everything", "causal", "padding", "scattered"])
def test_both_paths_of_attention_agree(kind, monkeypatch):
    keep = keeps(FEW, FEW)[kind]
    q, k, v = (normal(2, 3, FEW, WIDTH, seed=seed) for seed in range(3))
    batched = attention(q, k, v, keep)
    monkeypatch.setattr(kernels, "_SHORT", 0)
    torch.testing.assert_close(attention(q, k, v, keep), batched, **SAME)


@pytest.mark.parametrize("num_keys", [FEW, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_query_that_keeps_no_key_gets_the_mean_of_all_values(num_keys, dtype):
    keep = torch.ones(2, 1, 3, num_keys, dtype=torch.bool)
    keep[0, :, 1] = False
    q, k, v = (
        leaf(2, 2, length, WIDTH, seed=seed, dtype=dtype)
        for seed, length in enumerate([3, num_keys, num_keys])
    )
    out = attention(q, k, v, keep)
    torch.testing.assert_close(out[0, :, 1], v[0].mean(1))
    torch.testing.assert_close(out[1], written_out(q, k, v, None)[1])
    out.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v))


@pytest.mark.parametrize("num_keys", [FEW, MANY])
def test_a_key_that_is_not_kept_has_exactly_no_influence(num_keys):
    keep = torch.arange(num_keys) < num_keys - 2
    lengths = (3, num_keys, num_keys)
    q, k, v = (leaf(1, 1, n, WIDTH, seed=seed) for seed, n in enumerate(lengths))
    attention(q, k, v, keep[None, None, None, :]).square().sum().backward()
    for tensor in (k, v):
        assert (tensor.grad[..., -2:, :] == 0).all()
        assert (tensor.grad[..., :-2, :] != 0).any()


# Dropout

MANY_ELEMENTS = 1 << 18


def dropped(x: Tensor, rate: float, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return Dropout(rate).train()(x)


def five_deviations(rate: float, count: int) -> float:
    return 5 * math.sqrt(rate * (1 - rate) / count)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_dropout_zeroes_its_rate_and_scales_the_rest(rate):
    x = torch.full((MANY_ELEMENTS,), 3.0, dtype=torch.float64)
    out = dropped(x, rate)
    share = float((out == 0).double().mean())
    assert share == pytest.approx(rate, abs=five_deviations(rate, MANY_ELEMENTS))
    rest = out[out != 0]
    torch.testing.assert_close(rest, torch.full_like(rest, 3.0 / (1 - rate)), rtol=1e-3, atol=0)
    assert float(out.mean()) == pytest.approx(3.0, rel=0.05)


def test_dropout_keeps_the_expectation_exactly():
    # 16 bits cannot express every rate: the scale must fit the rate that is really used
    rate = 1 / 3
    scale = float(dropped(torch.ones(100, dtype=torch.float64), rate).max())
    kept_levels = 2**16 / scale
    assert kept_levels == pytest.approx(round(kept_levels), abs=1e-6)
    assert 1 - kept_levels / 2**16 == pytest.approx(rate, abs=2**-16)


def test_dropout_draws_every_element_on_its_own():
    rate = 0.3
    zeros = (dropped(torch.ones(MANY_ELEMENTS), rate) == 0).view(-1, 4).double()
    # four elements share one random word: each must have its rate, and each pair its product
    shares = zeros.mean(0)
    bound = five_deviations(rate, len(zeros))
    torch.testing.assert_close(shares, torch.full_like(shares, rate), rtol=0, atol=bound)
    both = zeros.T @ zeros / len(zeros)
    independent = torch.full((4, 4), rate**2, dtype=torch.float64).fill_diagonal_(rate)
    torch.testing.assert_close(both, independent, rtol=0, atol=bound)


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 7), (2, 3, 5)])
def test_dropout_drops_the_same_elements_backward_as_forward(shape):
    x, upstream = normal(*shape).abs().add(1).requires_grad_(), normal(*shape, seed=1)
    out = dropped(x, 0.4)
    out.backward(upstream)
    torch.testing.assert_close(x.grad, upstream * (out / x).detach(), **SAME)


def test_dropout_takes_an_input_that_is_not_contiguous():
    x = torch.arange(1.0, 13.0).view(3, 4)
    out = dropped(x.T, 0.5)
    kept = out != 0
    assert kept.any()
    assert not kept.all()
    torch.testing.assert_close(out[kept], 2 * x.T[kept])


@pytest.mark.parametrize("module", [Dropout(0.5).eval(), Dropout(0.0).train()])
def test_dropout_is_the_identity_in_eval_mode_and_at_rate_zero(module):
    x = normal(3, 4)
    assert module(x) is x


def test_dropout_follows_from_the_seed():
    x = torch.ones(64)
    assert torch.equal(dropped(x, 0.5, seed=7), dropped(x, 0.5, seed=7))
    assert not torch.equal(dropped(x, 0.5, seed=7), dropped(x, 0.5, seed=8))


def test_dropout_draws_anew_at_every_call():
    torch.manual_seed(0)
    module = Dropout(0.5).train()
    x = torch.ones(64)
    assert not torch.equal(module(x), module(x))


# ProjectedCrossEntropy


def plain_loss(
    states: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    logits = states @ weight.T
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")
    return loss, F.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 3, 11, 512])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_projected_cross_entropy_is_torchs_on_plain_logits(chunk_tokens, smoothing, monkeypatch):
    monkeypatch.setattr(kernels, "_CHUNK_TOKENS", chunk_tokens)
    states, weight, targets = leaf(11, 4), leaf(6, 4, seed=1), torch.arange(11) % 6
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, smoothing, None)
    grads = torch.autograd.grad(-2.5 * loss, [states, weight])

    expected, expected_nll = plain_loss(states, weight, targets, smoothing)
    expected_grads = torch.autograd.grad(-2.5 * expected, [states, weight])
    torch.testing.assert_close(loss, expected, **SAME)
    torch.testing.assert_close(nll, expected_nll, **SAME)
    torch.testing.assert_close(grads, expected_grads, **SAME)


@pytest.mark.parametrize("num_tokens", [5, 128, 700])
@pytest.mark.parametrize("chunk_tokens", [3, 128, 512])
def test_projected_cross_entropy_of_filled_rows_is_the_plain_one(
    num_tokens, chunk_tokens, monkeypatch
):
    monkeypatch.setattr(kernels, "_CHUNK_TOKENS", chunk_tokens)
    states, weight = leaf(num_tokens, 4, dtype=torch.float32), leaf(6, 4, dtype=torch.float32)
    targets = torch.arange(num_tokens) % 6
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, 0.1, torch.float64)
    expected, expected_nll = plain_loss(states, weight, targets, 0.1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll, expected_nll)
    grads = torch.autograd.grad(loss, [states, weight])
    expected_grads = torch.autograd.grad(expected, [states, weight])
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_projected_cross_entropy_passes_gradcheck(smoothing, monkeypatch):
    monkeypatch.setattr(kernels, "_CHUNK_TOKENS", 2)
    targets = torch.tensor([0, 4, 4, 2, 1])

    def loss(states: Tensor, weight: Tensor) -> Tensor:
        return ProjectedCrossEntropy.apply(states, weight, targets, smoothing, None)[0]

    assert torch.autograd.gradcheck(loss, (leaf(5, 3), leaf(6, 3, seed=1)))


@pytest.mark.parametrize("frozen", ["states", "weight"])
def test_projected_cross_entropy_trains_one_input_while_the_other_is_frozen(frozen):
    inputs = {"states": leaf(5, 3), "weight": leaf(6, 3, seed=1)}
    targets = torch.tensor([0, 4, 4, 2, 1])
    inputs[frozen].requires_grad_(False)
    free = next(tensor for name, tensor in inputs.items() if name != frozen)
    loss, _ = ProjectedCrossEntropy.apply(*inputs.values(), targets, 0.1, None)
    expected, _ = plain_loss(*inputs.values(), targets, 0.1)
    torch.testing.assert_close(
        torch.autograd.grad(loss, free), torch.autograd.grad(expected, free), **SAME
    )


def test_projected_cross_entropy_gives_the_same_values_without_gradients():
    states, weight, targets = leaf(5, 3), leaf(6, 3, seed=1), torch.tensor([0, 4, 4, 2, 1])
    with_grad = ProjectedCrossEntropy.apply(states, weight, targets, 0.1, None)
    without = ProjectedCrossEntropy.apply(states.detach(), weight.detach(), targets, 0.1, None)
    assert [value.item() for value in with_grad] == [value.item() for value in without]
    assert not without[0].requires_grad


def test_the_nll_carries_no_gradient():
    loss, nll = ProjectedCrossEntropy.apply(
        leaf(5, 3), leaf(6, 3), torch.zeros(5, dtype=torch.long), 0.1, None
    )
    assert loss.requires_grad
    assert not nll.requires_grad


def test_the_loss_of_no_token_is_zero():
    states, weight = leaf(0, 3), leaf(6, 3)
    targets = torch.zeros(0, dtype=torch.long)
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, 0.1, None)
    loss.backward()
    assert loss.item() == nll.item() == 0
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_extreme_logits_stay_finite_and_right(size, dtype):
    states = (size * normal(9, 4)).to(dtype).requires_grad_()
    weight, targets = leaf(6, 4, seed=1, dtype=dtype), torch.arange(9) % 6
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, 0.1, None)
    grads = torch.autograd.grad(loss, [states, weight])

    exact = [states.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected, expected_nll = plain_loss(*exact, targets, 0.1)
    expected_grads = torch.autograd.grad(expected, exact)
    near = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(loss, expected, **near)
    torch.testing.assert_close(nll, expected_nll, **near)
    torch.testing.assert_close(grads[0], expected_grads[0], **near)
    torch.testing.assert_close(grads[1] / size, expected_grads[1] / size, **near)


def test_projected_cross_entropy_in_bfloat16_is_near_the_plain_formula():
    states, weight = leaf(30, 16, dtype=torch.float32), leaf(12, 16, seed=1, dtype=torch.float32)
    targets = torch.arange(30) % 12
    loss, nll = ProjectedCrossEntropy.apply(states, weight, targets, 0.1, torch.bfloat16)
    grads = torch.autograd.grad(loss, [states, weight])
    assert {loss.dtype, nll.dtype, grads[0].dtype, grads[1].dtype} == {torch.float32}

    expected, expected_nll = plain_loss(states, weight, targets, 0.1)
    expected_grads = torch.autograd.grad(expected, [states, weight])
    assert not torch.equal(loss, expected), "the products must really run in bfloat16"
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0)
    torch.testing.assert_close(nll, expected_nll, rtol=0.01, atol=0)
    for grad, plain in zip(grads, expected_grads, strict=True):
        assert float((grad - plain).norm() / plain.norm()) < 0.02


# the type of matrix products


def test_a_named_precision_decides_the_type_of_matrix_products():
    cpu = torch.device("cpu")
    assert kernels.matmul_dtype("bfloat16", cpu) is torch.bfloat16
    assert kernels.matmul_dtype("float32", cpu) is None


@pytest.mark.parametrize("fast", [True, False])
def test_automatic_precision_is_bfloat16_where_the_processor_has_it(fast, monkeypatch):
    monkeypatch.setattr(kernels, "_cpu_multiplies_bfloat16", lambda: fast)
    found = kernels.matmul_dtype("auto", torch.device("cpu"))
    assert found is (torch.bfloat16 if fast else None)
