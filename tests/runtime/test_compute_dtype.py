"""The type of states and products."""

from types import SimpleNamespace

import pytest
import torch

from mtrain.runtime.device import compute_dtype


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_named_precision_decides_the_type_of_states_and_products(kind):
    device = torch.device(kind)
    assert compute_dtype("bfloat16", device) is torch.bfloat16
    assert compute_dtype("float32", device) is torch.float32


@pytest.mark.parametrize(("major", "expected"), [(7, torch.float32), (9, torch.bfloat16)])
def test_automatic_precision_is_bfloat16_where_the_gpu_has_it(major, expected, monkeypatch):
    """PyTorch lets an older GPU emulate it, which is slow."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    assert compute_dtype("auto", torch.device("cuda")) is expected


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ({}, torch.float32),  # a PyTorch that knows nothing of the processor
        ({"_is_avx512_bf16_supported": False}, torch.float32),
        ({"_is_avx512_bf16_supported": False, "_is_amx_tile_supported": True}, torch.bfloat16),
        ({"_is_avx512_bf16_supported": True}, torch.bfloat16),
    ],
)
def test_automatic_precision_is_bfloat16_where_the_processor_has_it(checks, expected, monkeypatch):
    known = SimpleNamespace(**{name: lambda fast=fast: fast for name, fast in checks.items()})
    monkeypatch.setattr(torch, "cpu", known)
    assert compute_dtype("auto", torch.device("cpu")) is expected
