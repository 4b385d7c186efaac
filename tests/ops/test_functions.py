"""What all compiled functions share: the tensors they take, and how NaN and inf propagate."""

import math

import pytest
import torch
from ways import EACH_WAY, LONG, SHORT, fixed, norm_of, normal, queries_keys_values

from mtrain.ops.attention import attention, paged_attention
from mtrain.ops.dropout import Dropout, DropoutMask
from mtrain.ops.layer_norm import add_norm
from mtrain.ops.topk import top_tokens


@pytest.mark.parametrize("num_threads", [1, 2])
def test_without_gradients_compiled_functions_are_used_only_on_one_thread(
    calls, num_threads, monkeypatch
):
    """With several, PyTorch splits its work over them, and a compiled function does not."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    inputs = queries_keys_values(5, 7, 6, torch.float32)
    cache_RX, slots_NT = normal(9, 12, dtype=torch.float32), torch.tensor([[0, 8], [2, -1]])
    with torch.inference_mode():
        attention(*inputs, None)
        add_norm(inputs[0], inputs[0], Dropout(0.0), norm_of(6))
        paged_attention(cache_RX[:2, :6], cache_RX, slots_NT, 2)
        top_tokens(cache_RX, [0], 3)
    compiled = ["attention", "add_norm", "paged_attention", "topk"]
    assert calls == (compiled if num_threads == 1 else [])


def test_dropout_masks_are_the_same_with_and_without_gradients(calls, monkeypatch):
    """On several threads, too: the first pass of a reentrant checkpoint has no gradients."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, dropout, norm = normal(2, 3, 5, 6, dtype=torch.float32), fixed(Dropout(0.5)), norm_of(6)
    for function in (
        lambda: dropout(x),
        lambda: add_norm(x, x, dropout, norm),
        lambda: attention(x, x, x, None, dropout),
    ):
        with torch.no_grad():
            found = function()
        assert torch.equal(found, function())
    assert calls == [name for name in ("dropout", "add_norm", "attention") for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_dtypes_without_compiled_functions_use_pytorch(calls, dtype):
    x = normal(2, 3, 5, 6, dtype=dtype)
    assert attention(x, x, x, None).dtype == dtype
    assert Dropout(0.5).train()(x).dtype == dtype
    assert add_norm(x, x, Dropout(0.5).train(), norm_of(6)).dtype == dtype
    assert (
        paged_attention(x[0, 0, :, :3], x[0, 0], torch.zeros(5, 1, dtype=torch.long), 1).dtype
        == dtype
    )
    assert top_tokens(x[0, 0], [], 2).log_prob_NC.dtype == dtype
    assert calls == []


def test_mixed_dtypes_use_pytorch(calls):
    x, branch, norm = normal(5, 6, dtype=torch.float32), normal(5, 6, dtype=SHORT), norm_of(6)
    mixed_types = add_norm(x, branch, Dropout(0.0), norm)
    torch.testing.assert_close(mixed_types, norm(x + branch))
    assert calls == []


@EACH_WAY
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_propagate_backward_through_attention_add_norm_and_dropout(way, calls, value):
    inputs = queries_keys_values(5, 20, 6, way.dtype)
    norm = norm_of(6, LONG[way.dtype])
    upstream = normal(2, 3, 5, 6, dtype=way.dtype)
    upstream[1, 2, 4, 5] = value
    for out in (
        attention(*inputs, None),
        add_norm(inputs[0], inputs[0], Dropout(0.0), norm),
        fixed(Dropout(0.3), DropoutMask(1, 1.0, 1))(inputs[0]),
    ):
        (grad,) = torch.autograd.grad(out, inputs[:1], upstream)
        assert not grad.isfinite().all()
