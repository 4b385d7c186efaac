"""Compare the chunked consistency loss of two passes with the formula written out in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from ways import exactly, growth, leaf, peak

from mtrain.ops import cross_entropy
from mtrain.ops.consistency import ProjectedConsistency


def written_out(
    states: Tensor, other: Tensor, weight: Tensor, targets: Tensor, smoothing: float, factor: float
) -> tuple[Tensor, Tensor]:
    p, q = (states @ weight.T).softmax(-1), (other @ weight.T).softmax(-1)
    divergence = sum((row_p * (row_p / row_q).log()).sum() for row_p, row_q in zip(p, q))  # noqa: B905
    settings = {"reduction": "sum"}
    loss = F.cross_entropy(states @ weight.T, targets, label_smoothing=smoothing, **settings)
    nll = F.cross_entropy(states @ weight.T, targets, **settings)
    return loss + factor * divergence, nll


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("smoothing", "factor"), [(0.1, 3.0), (0.0, 0.25)])
@pytest.mark.parametrize(("num_tokens", "chunk"), [(1, 512), (11, 3), (12, 3), (600, 512)])
def test_the_consistency_loss_and_its_gradients_equal_the_written_out_formulas(
    monkeypatch, num_tokens, chunk, smoothing, factor, dtype
):
    monkeypatch.setattr(cross_entropy, "_CHUNK_TOKENS", chunk)
    states, other = (leaf(num_tokens, 4, seed=seed, dtype=dtype) for seed in (0, 2))
    weight = leaf(6, 4, seed=1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    targets = torch.arange(num_tokens) % 6
    loss, nll = ProjectedConsistency.apply(states, other, weight, targets, smoothing, factor)
    assert (loss.dtype, nll.dtype, nll.requires_grad) == (torch.float64, torch.float64, False)
    grads = torch.autograd.grad(-2.5 * loss, [states, other, weight])
    assert [grad.dtype for grad in grads] == [dtype, dtype, weight.dtype]

    exact = exactly([states, other, weight.to(dtype)])
    expected, expected_nll = written_out(*exact, targets, smoothing, factor)
    expected_grads = torch.autograd.grad(-2.5 * expected, exact)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(loss, expected.detach(), rtol=bound, atol=0)
    torch.testing.assert_close(nll, expected_nll.detach(), rtol=bound, atol=0)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert float((grad - wanted).norm()) <= bound * float(wanted.norm())


def test_with_equal_passes_the_consistency_loss_and_gradients_equal_those_of_cross_entropy():
    states, weight, targets = leaf(5, 4), leaf(6, 4, seed=1), torch.arange(5)
    other = states.detach().clone().requires_grad_()
    loss, _ = ProjectedConsistency.apply(states, other, weight, targets, 0.1, 3.0)
    expected = F.cross_entropy(states @ weight.T, targets, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, [states, other, weight])
    expected_grads = torch.autograd.grad(expected, [states, weight])
    torch.testing.assert_close((grads[0], grads[2]), expected_grads)
    torch.testing.assert_close(grads[1], torch.zeros_like(other))


def print_growth() -> None:
    states, other = (torch.ones(20_000, 2, requires_grad=True) for _ in range(2))
    weight, targets = torch.ones(4_000, 2, requires_grad=True), torch.arange(20_000) % 4_000
    for count in (512, 20_000):
        before = peak()
        given = (states[:count], other[:count], weight, targets[:count])
        ProjectedConsistency.apply(*given, 0.1, 3.0)[0].backward()
    print(peak() - before)


def test_the_consistency_loss_never_holds_the_logits_of_a_whole_batch():
    """Those of 20,000 tokens over a vocabulary of 4,000 take 312,500 KiB for each pass."""
    assert growth(print_growth) < 150_000
