"""The dtype of hidden states and matrix products."""

from types import SimpleNamespace

import pytest
import torch

from mtrain.runtime import device
from mtrain.runtime.device import compute_dtype


@pytest.fixture(autouse=True)
def not_cached(monkeypatch):
    monkeypatch.setattr(device, "processor_features", device.processor_features.__wrapped__)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_explicit_precision_determines_the_compute_dtype(kind):
    assert compute_dtype("bfloat16", torch.device(kind)) is torch.bfloat16
    assert compute_dtype("float32", torch.device(kind)) is torch.float32


@pytest.mark.parametrize(("major", "expected"), [(7, torch.float32), (9, torch.bfloat16)])
def test_auto_precision_is_bfloat16_only_on_gpus_with_native_support(major, expected, monkeypatch):
    """PyTorch lets an older GPU emulate it, which is slow."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    assert compute_dtype("auto", torch.device("cuda")) is expected


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("", torch.float32),  # a processor with unknown features
        ("fpu avx2 avx512f", torch.float32),
        ("fpu avx2 avx512f avx512_bf16", torch.bfloat16),
        ("fpu amx_tile", torch.bfloat16),
    ],
)
def test_auto_precision_is_bfloat16_only_on_cpus_with_native_support(
    features, expected, monkeypatch
):
    text = f"processor\t: 0\nmodel name\t: A\nflags\t\t: {features}\nbugs\t\t: avx512_bf16\n"
    monkeypatch.setattr(device.Path, "read_text", lambda *_, **__: text)
    assert compute_dtype("auto", torch.device("cpu")) is expected
    assert device.processor() == "A"


@pytest.mark.parametrize("key", ["flags\t\t", "Features\t"])
def test_processor_features_are_those_of_the_first_processor_in_cpuinfo(key, monkeypatch):
    text = f"{key}: fp bf16\n\n{key}: fp\n"
    monkeypatch.setattr(device.Path, "read_text", lambda *_, **__: text)
    assert device.processor_features() == {"fp", "bf16"}


def test_a_system_without_cpuinfo_has_no_processor_features(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(device.Path, "read_text", missing)
    assert device.processor_features() == set()
    assert not device.processor_has("avx2", "amx_tile")
