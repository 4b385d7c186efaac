"""Several ranks make the same updates, checkpoints and translations as one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import Ranks, needs_fork_server, ranks
from safetensors.torch import load_file, save_file
from tasks import prepared, reverse_task, write_task

from mtrain import config as configs
from mtrain import distributed
from mtrain import train as training
from mtrain.launch import launched
from mtrain.rundir import RunDir
from mtrain.runlog import RunLog
from mtrain.team import ALONE, Team
from mtrain.train import Trainer

__all__ = ["ranks"]

pytestmark = needs_fork_server
PLAIN = ["model.dropout=0.0", "training.accumulate=4", "training.log_every=1"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("ranks"), reverse_task)


def options(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


# gradients


CASES = [  # the type of numbers, how many batches an update has, and of how many tokens each
    (dtype, accumulate, batch_tokens)
    for dtype in ("float64", "float32")
    for accumulate, batch_tokens in ((4, 192), (1, 192), (3, 96), (1, 32))
]


def gradients(source: Path, run: str, team: Team, settings: list[str]) -> dict[str, torch.Tensor]:
    """Return what all ranks together find to be the gradient of an update, in every case."""
    found = {}
    build = training.build_model
    for dtype, accumulate, batch_tokens in CASES:
        own = [*settings, f"training.accumulate={accumulate}", "model.dropout=0.0"]
        own += [f"training.batch_tokens={batch_tokens}"]
        config = configs.load(source, own, run)
        training.build_model = lambda *made: build(*made).to(getattr(torch, dtype))  # noqa: B023
        with RunLog(Path(f"{run}-{team.rank}.jsonl")) as log:
            trainer = Trainer(config, RunDir(Path(run)), log, team)
        trainer.model.compute_in(getattr(torch, dtype))
        updates = trainer.data.updates(batch_tokens, training.Position(0, 2), trainer.deal)
        trainer.gradients.add_up(next(updates))
        for name, weight in trainer.model.named_parameters():
            assert weight.grad is not None
            found[f"{dtype} {accumulate} {batch_tokens} {name}"] = team.whole(weight.grad).clone()
    training.build_model = build
    return found


def save_gradients(source: Path, run: str, settings: list[str], path: Path) -> None:
    place = launched()
    assert place is not None
    team = distributed.join(place)
    found = gradients(source, run, team, settings)
    if team.is_first:
        save_file(found, path)
    team.leave()


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, torch.Tensor]:
    run = prepared(configs.load(source, ["training.batch_tokens=32"], str(source.parent / "grad")))
    return gradients(source, str(run.path), ALONE, [])


BOUNDS = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_of_an_update_is_that_of_one_process(
    source: Path,
    tmp_path: Path,
    ranks: Ranks,
    expected: dict[str, torch.Tensor],
    size: int,
    parallel: str,
) -> None:
    run, path = str(source.parent / "grad"), tmp_path / "gradients"
    settings = [f"training.parallel={parallel}"]
    ended = ranks(size, save_gradients, source, run, settings, path)
    assert ended.codes == [0] * size, ended.err
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        bound = BOUNDS[name.split()[0]]
        assert float((found[name] - grad).norm()) <= bound * float(grad.norm()) + bound / 1e3, name
