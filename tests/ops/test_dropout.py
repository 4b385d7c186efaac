"""Dropout: its rate, its scale, its seeds, and the same mask backward as forward."""

import math
import threading

import pytest
import torch
from torch import Tensor
from ways import (
    BOTH_PATHS,
    DROPS,
    EACH_WAY,
    SHORT,
    five_deviations,
    fixed,
    grads_of,
    leaf,
    normal,
    share_of,
)

from mtrain.ops.dropout import Dropout, DropoutMask, dropout_seeds

MANY_ELEMENTS = 1 << 18


def dropped(x: Tensor, rate: float, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return Dropout(rate).train()(x)


@EACH_WAY
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_dropout_zeroes_the_given_share_and_scales_the_other_elements(way, calls, rate):
    x = torch.full((MANY_ELEMENTS,), 3.0, dtype=way.dtype)
    out = dropped(x, rate)
    assert out.dtype == way.dtype
    assert calls == (["dropout"] if way.is_compiled else [])
    share = float((out == 0).double().mean())
    assert share == pytest.approx(rate, abs=five_deviations(rate, MANY_ELEMENTS))
    rest = out[out != 0].double()
    torch.testing.assert_close(rest, torch.full_like(rest, 3.0 / (1 - rate)), rtol=0.004, atol=0)
    assert float(out.double().mean()) == pytest.approx(3.0, rel=0.05)


@BOTH_PATHS
def test_the_scale_of_dropout_matches_the_rate_rounded_to_16_bits(way, calls):
    # 16 bits cannot express every rate: the scale must fit the rate that is really used
    rate = 1 / 3
    scale = float(dropped(torch.ones(100), rate).max())
    kept_levels = 2**16 / scale
    assert kept_levels == pytest.approx(round(kept_levels), abs=0.01)
    assert 1 - kept_levels / 2**16 == pytest.approx(rate, abs=2**-16)


@BOTH_PATHS
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 16, 128, 512, 32768])
def test_dropout_draws_elements_independently(way, calls, distance):
    """Two elements at any distance are both dropped as often as independent draws would be."""
    rate = 0.3
    is_zero = (dropped(torch.ones(MANY_ELEMENTS), rate) == 0).double()
    both = float((is_zero[distance:] * is_zero[:-distance]).mean())
    bound = five_deviations(rate**2, MANY_ELEMENTS - distance)
    assert both == pytest.approx(rate**2, abs=1.5 * bound)


@BOTH_PATHS
def test_dropout_has_the_same_rate_in_every_column(way, calls):
    rate = 0.3
    is_zero = (dropped(torch.ones(MANY_ELEMENTS), rate) == 0).double()
    for width in (4, 16, 128):
        shares = is_zero.view(-1, width).mean(0)
        bound = five_deviations(rate, MANY_ELEMENTS // width)
        torch.testing.assert_close(shares, torch.full_like(shares, rate), rtol=0, atol=bound)


@BOTH_PATHS
@pytest.mark.parametrize("change", [1, 2, 0x80, 0x10000, 0x80000000])
def test_dropout_masks_of_two_seeds_are_independent(way, calls, change):
    first, second = (
        share_of((MANY_ELEMENTS,), DROPS._replace(seed=seed)) == 0
        for seed in (DROPS.seed, DROPS.seed ^ change)
    )
    both = float((first & second).double().mean())
    rate = DROPS.cut / 2**16
    assert both == pytest.approx(rate**2, abs=five_deviations(rate**2, MANY_ELEMENTS))


@EACH_WAY
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 7), (2, 3, 5), (1000,)])
def test_dropout_drops_the_same_elements_backward_as_forward(way, calls, shape):
    x = leaf(*shape, dtype=way.dtype)
    upstream = normal(*shape, seed=1, dtype=way.dtype)
    out, grad = grads_of(fixed(Dropout(0.3))(x), upstream, [x])
    assert calls == (["dropout"] * 2 if way.is_compiled else [])
    share = share_of(shape)
    way.assert_near(out, share * x.detach().double())
    way.assert_near(grad, share * upstream.double())


@EACH_WAY
def test_dropout_takes_an_input_and_a_gradient_that_are_not_contiguous(way, calls):
    x = torch.arange(1.0, 13.0, dtype=way.dtype).view(3, 4).requires_grad_()
    out = fixed(Dropout(0.3))(x.T)
    way.assert_near(out, share_of((4, 3)) * x.detach().T.double())
    out.sum().backward()  # an expanded scalar
    way.assert_near(x.grad, share_of((4, 3)).T)


@pytest.mark.parametrize("module", [Dropout(0.5).eval(), Dropout(0.0).train()])
def test_dropout_is_the_identity_in_eval_mode_and_at_rate_zero(module):
    x = normal(3, 4)
    assert module(x) is x
    assert module.draw() == DropoutMask(0, 1.0, 0)


@BOTH_PATHS
def test_the_torch_seed_determines_the_dropout_mask(way, calls):
    x = torch.ones(64)
    assert torch.equal(dropped(x, 0.5, seed=7), dropped(x, 0.5, seed=7))
    assert not torch.equal(dropped(x, 0.5, seed=7), dropped(x, 0.5, seed=8))


@BOTH_PATHS
def test_dropout_draws_a_new_mask_at_every_call(way, calls):
    torch.manual_seed(0)
    module = Dropout(0.5).train()
    x = torch.ones(64)
    assert not torch.equal(module(x), module(x))


@BOTH_PATHS
@pytest.mark.parametrize("cut", [1, 2**16 - 1])
def test_the_smallest_and_largest_cut_drop_and_keep_about_one_in_65536_elements(way, calls, cut):
    num_kept = int((share_of((MANY_ELEMENTS,), DropoutMask(cut, 1.0, 3)) != 0).sum())
    exceptions = num_kept if cut > 1 else MANY_ELEMENTS - num_kept
    assert 0 < exceptions < 12  # four are expected


@pytest.mark.parametrize("rate", [1e-9, 0.999999])
def test_rates_near_zero_and_one_neither_keep_nor_drop_all_elements(rate):
    drops = Dropout(rate).train().draw()
    assert 0 < drops.cut < 2**16
    assert drops.scale == 2**16 / (2**16 - drops.cut)


def draws(count: int = 3) -> list[int]:
    return [Dropout(0.5).train().draw().seed for _ in range(count)]


def test_dropout_seeds_makes_masks_independent_of_the_torch_generator():
    torch.manual_seed(1)
    with dropout_seeds(7):
        first = draws()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    with dropout_seeds(7):
        assert draws() == first
    with dropout_seeds(8):
        assert draws() != first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "nothing was drawn from PyTorch"
    assert len(set(first)) == 3
    assert all(0 <= seed < 2**32 for seed in first)


def test_without_dropout_seeds_the_torch_generator_determines_the_masks():
    torch.manual_seed(1)
    expected = draws()
    torch.manual_seed(1)
    with dropout_seeds(None):
        assert draws() == expected
    torch.manual_seed(1)
    with dropout_seeds(7):
        draws()
    assert draws() == expected


def test_nested_dropout_seeds_do_not_change_the_outer_sequence():
    with dropout_seeds(7):
        expected = draws(4)
    with dropout_seeds(7):
        found = draws(2)
        for inner in (8, None):
            with dropout_seeds(inner):
                draws()
        assert found + draws(2) == expected


def test_dropout_seeds_has_no_effect_after_an_error():
    torch.manual_seed(1)
    expected = draws()
    torch.manual_seed(1)
    with pytest.raises(MemoryError), dropout_seeds(7):
        raise MemoryError
    assert draws() == expected


def test_each_thread_has_its_own_dropout_seed():
    barrier, found = threading.Barrier(2), {}

    def draw(seed: int) -> None:
        with dropout_seeds(seed):
            barrier.wait(timeout=60)
            found[seed] = draws()
            barrier.wait(timeout=60)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in (7, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (7, 8):
        with dropout_seeds(seed):
            assert found[seed] == draws()


def test_compiled_dropout_rounds_to_bfloat16_like_pytorch(calls):
    """To the nearest, ties to even: half of these products are halfway between two."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(SHORT)
    found = fixed(Dropout(0.3), DropoutMask(0, 1.5, 1))(x)
    assert calls == ["dropout"]
    assert torch.equal(found.isnan(), x.isnan())
    expected = (x.float() * 1.5).to(SHORT)
    is_number = ~x.isnan()
    assert torch.equal(found[is_number].view(torch.int16), expected[is_number].view(torch.int16))


@EACH_WAY
def test_dropout_propagates_nan_and_inf(way, calls):
    x = leaf(3, 4, dtype=way.dtype)
    with torch.no_grad():
        x[1] = math.nan
        x[2] = math.inf
    out = fixed(Dropout(0.3), DropoutMask(1, 1.0, 1))(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()
