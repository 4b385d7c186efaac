"""Muon on stacked matrices matches PyTorch's Muon, which updates one matrix at a time."""

import pytest
import torch
from builders import model_config, transformer
from torch import Tensor, nn

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


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_batched_muon_updates_match_torch_muon(weight_decay: float) -> None:
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
        assert distance < 0.01 * change
        assert mine.is_contiguous() and mine.shape == other.shape


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


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (16, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    stack: Tensor = torch.randn(3, *shape, generator=rng)
    values = torch.linalg.svdvals(orthogonalised(stack).float())
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


@pytest.mark.parametrize("tie", ["all", "decoder", "none"])
def test_muon_gets_the_weights_of_linear_layers_and_no_embedding(tie: str) -> None:
    model = transformer(model_config(tie_embeddings=tie, positions="learned", max_positions=9))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = [names[id(weight)] for weight in linear_weights(model)]
    assert len(set(chosen)) == len(chosen) == 2 * 4 + 2 * 7
    assert all(name.startswith(("encoder.", "decoder.")) for name in chosen)
    assert all(name.endswith(".weight") and "norm" not in name for name in chosen)
