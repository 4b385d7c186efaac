"""Muon on stacked matrices matches PyTorch's Muon, which updates one matrix at a time."""

import numpy as np
import pytest
import torch
from builders import model_config, transformer
from torch import Tensor, nn

from mtrain.training import optimizer
from mtrain.training.optimizer import BatchedMuon, linear_weights, orthogonalised

SHAPES = [(4, 4), (4, 12), (12, 4), (8, 4), (4, 4), (4, 8), (12, 4)]
LR = 0.1


def matrices(seed: int = 0) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=rng)) for shape in SHAPES]


def set_grads(parameters: list[nn.Parameter], step: int) -> None:
    for number, parameter in enumerate(parameters):
        rng = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=rng)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float32, 0.015)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_batched_muon_with_torch_polynomials_matches_torch_muon(
    weight_decay: float, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch iterates in bfloat16, mtrain in the dtype that is faster on the device."""
    monkeypatch.setattr(optimizer, "compute_dtype", lambda *_: dtype)
    monkeypatch.setattr(optimizer, "_POLYNOMIALS", ((3.4445, -4.7750, 2.0315),) * 5)
    monkeypatch.setattr(optimizer, "_MARGIN", 1.0)
    ours, theirs = matrices(), matrices()
    muon = BatchedMuon(ours, weight_decay)
    muon.param_groups[0]["lr"] = LR
    expected = torch.optim.Muon(
        theirs, lr=LR, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        set_grads(ours, step)
        set_grads(theirs, step)
        muon.step()
        expected.step()
    for mine, other, start in zip(ours, theirs, matrices(), strict=True):
        buffers = (muon.state[mine], expected.state[other])
        assert torch.equal(*(state["momentum_buffer"] for state in buffers))
        # bfloat16 rounds each product of the iterations
        distance, change = (mine - other).norm().item(), (other - start).norm().item()
        assert distance < tolerance * change
        assert mine.is_contiguous() and mine.shape == other.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_iterations_are_in_the_dtype_that_is_faster_on_the_device(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a processor has no products in bfloat16, PyTorch's are slower than all gradients."""
    dtypes = []

    def orthogonalised_noting_dtype(stack: Tensor) -> Tensor:
        dtypes.append(stack.dtype)
        return orthogonalised(stack)

    monkeypatch.setattr(optimizer, "compute_dtype", lambda *_: dtype)
    monkeypatch.setattr(optimizer, "orthogonalised", orthogonalised_noting_dtype)
    parameters = matrices()
    set_grads(parameters, 0)
    BatchedMuon(parameters, weight_decay=0.0).step()
    assert set(dtypes) == {dtype}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_update_changes_neither_weights_nor_momentum(bad: float) -> None:
    parameters = matrices()
    muon = BatchedMuon(parameters, weight_decay=0.1)
    muon.param_groups[0]["lr"] = LR
    set_grads(parameters, 0)
    muon.found_inf = torch.zeros(())
    muon.step()
    buffers = [muon.state[parameter]["momentum_buffer"] for parameter in parameters]
    before = [tensor.detach().clone() for tensor in [*parameters, *buffers]]
    set_grads(parameters, 1)
    parameters[1].grad[0, 0] = bad  # type: ignore[index]
    muon.found_inf = torch.ones(())
    muon.step()
    assert all(map(torch.equal, before, [*parameters, *buffers]))
    muon.found_inf = torch.zeros(())
    set_grads(parameters, 2)
    muon.step()
    assert not any(map(torch.equal, before, [*parameters, *buffers]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_that_does_not_read_found_inf_equals_one_that_does(
    weight_decay: float,
) -> None:
    """On a GPU, `found_inf` is not read; tensor operations with it skip the update."""
    read, unread = matrices(), matrices()
    muons = [BatchedMuon(parameters, weight_decay) for parameters in (read, unread)]
    for step, is_bad in enumerate([False, True, False]):
        for muon, parameters in zip(muons, (read, unread), strict=True):
            muon.param_groups[0]["lr"], muon.found_inf = LR, torch.tensor(float(is_bad))
            set_grads(parameters, step)
            if is_bad:
                parameters[1].grad[0, 0] = float("nan")  # type: ignore[index]
        muons[0].step()
        for shape in set(SHAPES):
            alike: list[Tensor] = [parameter for parameter in unread if parameter.shape == shape]
            muons[1].step_together(alike, muons[1].param_groups[0], muons[1].found_inf)
        for mine, other in zip(read, unread, strict=True):
            assert torch.equal(mine, other)
            states = (muons[0].state[mine], muons[1].state[other])
            assert torch.equal(*(state["momentum_buffer"] for state in states))


def test_a_step_with_found_inf_none_equals_one_with_found_inf_zero() -> None:
    ours, others = matrices(), matrices()
    for parameters, found_inf in ((ours, None), (others, torch.zeros(()))):
        muon = BatchedMuon(parameters, weight_decay=0.1)
        muon.param_groups[0]["lr"], muon.found_inf = LR, found_inf
        set_grads(parameters, 0)
        muon.step()
    assert all(map(torch.equal, ours, others))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("shape", "least"), [((16, 48), 0.01), ((48, 16), 0.01), ((16, 16), 0.01), ((130, 140), 0.003)]
)
def test_singular_values_above_a_share_of_the_norm_become_about_one(
    shape: tuple[int, int], least: float, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(0)
    stack: Tensor = torch.randn(3, *shape, generator=rng)
    left, before, right = torch.linalg.svd(stack, full_matrices=False)
    after = (left.mT @ orthogonalised(stack.to(dtype)).float() @ right.mT).diagonal(dim1=1, dim2=2)
    is_large = before >= 1.05 * least * stack.norm(dim=(1, 2))[:, None]
    assert is_large.float().mean() > 0.9
    assert float(after[is_large].min()) > 0.65
    assert float(after.max()) < 1.3


@pytest.mark.parametrize(
    ("polynomials", "least", "last_error"),
    [(optimizer._POLYNOMIALS, 0.01, 0.27), (optimizer._POLYNOMIALS_OF_LARGER, 0.003, 0.2)],
    ids=["smaller", "larger"],
)
def test_each_polynomial_is_the_nearest_to_one_on_the_interval_that_the_one_before_maps_to(
    polynomials: tuple[tuple[float, float, float], ...], least: float, last_error: float
) -> None:
    """The error of the nearest one is largest at four points, with alternating signs."""
    most = 1.0
    for a, b, c in polynomials:
        x = np.linspace(least, most, 100_001)
        error = a * x + b * x**3 + c * x**5 - 1
        is_turn = np.diff(np.sign(np.diff(error)), prepend=0, append=0) != 0
        is_turn[[0, -1]] = True
        extremes = error[is_turn]
        assert len(extremes) == 4
        assert (np.diff(np.sign(extremes)) != 0).all()
        largest = float(np.abs(extremes).max())
        assert np.abs(extremes) == pytest.approx([largest] * 4, abs=0.006)
        least, most = 1 - largest, 1 + largest
    assert largest == pytest.approx(last_error, abs=0.005)


@pytest.mark.parametrize("size", [16, 130])
def test_a_singular_value_that_is_the_whole_norm_becomes_about_one(size: int) -> None:
    rng = torch.Generator().manual_seed(0)
    left, right = (torch.randn(200, size, 1, generator=rng) for _ in range(2))
    products = (left @ right.mT).bfloat16()  # rounding leads above the norm
    values = torch.linalg.svdvals(orthogonalised(products).float())[:, 0]
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.4


@pytest.mark.parametrize("tie", ["all", "decoder", "none"])
def test_muon_gets_the_weights_of_linear_layers_and_no_embedding(tie: str) -> None:
    model = transformer(model_config(tie_embeddings=tie, positions="learned", max_positions=9))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = [names[id(weight)] for weight in linear_weights(model)]
    assert len(set(chosen)) == len(chosen) == 2 * 4 + 2 * 7
    assert all(name.startswith(("encoder.", "decoder.")) for name in chosen)
    assert all(name.endswith(".weight") and "norm" not in name for name in chosen)
