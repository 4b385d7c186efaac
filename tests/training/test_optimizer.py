"""Adam equals PyTorch's AdamW bit for bit, and training imports no slow modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tasks import write_task
from torch import nn

from mtrain.training.optimizer import Adam


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_equals_torch_adamw_bit_for_bit(weight_decay: float) -> None:
    def trained(kind: type[torch.optim.AdamW]) -> nn.Linear:
        torch.manual_seed(1)
        layer = nn.Linear(5, 3)
        optimizer = kind(
            layer.parameters(), betas=(0.9, 0.98), eps=1e-9, weight_decay=weight_decay, fused=True
        )
        optimizer.param_groups[0]["lr"] = 0.1
        for _ in range(4):
            layer(torch.randn(7, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        return layer

    ours, theirs = trained(Adam), trained(torch.optim.AdamW)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)


TRAIN_TWICE = """
import sys
import mtrain
import mtrain.runtime.torch_process_group
for name, alpha in (("adam", 0.0), ("muon", 0.1)):
    settings = ["training.max_steps=2", f"training.optimizer={name}"]
    settings += [f"tokenizer.sampling_alpha={alpha}"]
    mtrain.train(mtrain.load_config(sys.argv[1], settings, f"{sys.argv[1]}.{name}"))
print([name for name in sys.argv[2:] if name in sys.modules])
"""


def test_training_and_process_groups_do_not_import_slow_modules(tmp_path: Path) -> None:
    """PyTorch's compiler, the class of sharded tensors and pandas take 0.3 to 1.3 s each."""
    slow = ["torch._dynamo", "torch.distributed.tensor", "pandas"]
    command = [sys.executable, "-c", TRAIN_TWICE, str(write_task(tmp_path)), *slow]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
