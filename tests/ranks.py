"""Several processes as torchrun would start them, but forked by one that has loaded torch."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fork_server import fork_server
from safetensors.torch import save_file

from mtrain import api
from mtrain.cli import ranks as cli_ranks
from mtrain.cli.main import main
from mtrain.config import config_file
from mtrain.config.sections import TrainingConfig
from mtrain.data.batch import Batch, UpdateBatches
from mtrain.decode import pipeline
from mtrain.evaluation import significance
from mtrain.model.transformer import DecoderLayer, EncoderLayer, Transformer
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime import torch_process_group
from mtrain.runtime.process_group import ProcessGroup, read_torchrun_env
from mtrain.training import data_parallel
from mtrain.training import gradients as gradients_module
from mtrain.training import trainer as trainer_module
from mtrain.training.loss import LossSum, loss_of
from mtrain.training.trainer import Trainer
from mtrain.training.training_state import TrainingState

PATIENCE_S = 120
NUM_TRIALS = 200  # of approximate randomisation, where only equal p-values are compared


class Ended(NamedTuple):
    """How ranks ended: their exit codes, and what each wrote."""

    codes: list[int | None]
    out: list[str]
    err: list[str]

    @property
    def said(self) -> list[str]:
        """What all ranks said in mtrain's name."""
        lines = [line for text in self.err for line in text.splitlines()]
        return [line for line in lines if line.startswith("mtrain: ")]


class Ranks:
    """Runs a function on every rank, and looks at how they end."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.count = directory, 0

    def start(
        self, size: int, function: Callable[..., object], *arguments: Any
    ) -> list[ForkServerProcess]:
        """Start `function(*arguments)` on each of some ranks."""
        context = fork_server()
        self.store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        port = self.store.port
        self.count += 1
        processes = [
            context.Process(
                target=_rank, args=(self._stem(rank), rank, size, port, function, arguments)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        return processes

    def ended(self, processes: list[ForkServerProcess], patience_s: float = PATIENCE_S) -> Ended:
        """Wait for all ranks; one that hangs is an error."""
        for process in processes:
            process.join(patience_s)
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        stems = [self._stem(rank) for rank in range(len(processes))]
        out, err = ([Path(f"{stem}.{end}").read_text() for stem in stems] for end in ("out", "err"))
        assert not hanging, f"ranks {hanging} hang: {err}"
        return Ended([process.exitcode for process in processes], out, err)

    def __call__(self, size: int, function: Callable[..., object], *arguments: Any) -> Ended:
        """Run a function on all ranks, to the end."""
        return self.ended(self.start(size, function, *arguments))

    def mtrain(self, size: int, *arguments: str | Path) -> Ended:
        """Run the command line on all ranks."""
        return self(size, command_line, [str(argument) for argument in arguments])

    def _stem(self, rank: int) -> str:
        return str(self.directory / f"{self.count}-{rank}")


def _rank(
    stem: str,
    rank: int,
    size: int,
    port: int,
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{stem}.{end}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdin = sys.__stdin__ = open(os.devnull)  # noqa: SIM115, PTH123
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    cli_ranks._HEAD_START_S = 0.0  # no torchrun ends rank 0 here before it has reported
    torch_process_group._HEAD_START_S = 0.1
    function(*arguments)


def command_line(arguments: list[str]) -> None:
    """Do what `mtrain ARGUMENTS` does."""
    sys.argv = ["mtrain", *arguments]
    main()


def differing(arguments: list[str], of_last_rank: list[str], version: str | None = None) -> None:
    """Do what the command line does; the last rank has more arguments, or another mtrain."""
    place = read_torchrun_env()
    is_last = place is not None and place.rank == place.size - 1
    if is_last and version is not None:
        api.__version__ = version
    command_line(arguments + of_last_rank * is_last)


def with_few_trials(arguments: list[str]) -> None:
    """Do what the command line does, with few trials for p-values."""
    significance.NUM_TRIALS = NUM_TRIALS
    command_line(arguments)


def with_closed_stdout(arguments: list[str]) -> None:
    """Do what the command line does, in blocks of a line, to a pipe that nobody reads."""
    pipeline.BLOCK_LINES = 1
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    with_few_trials(arguments)


def apart(arguments: list[str], directory: Path) -> None:
    """Do what the command line does, each rank with a disk of its own under `directory`."""
    os.chdir(directory / os.environ["RANK"])
    command_line(arguments)


CASES = [  # the type of numbers, how many batches an update has, and of how many tokens each
    (dtype, accumulate, batch_tokens)
    for dtype in ("float64", "float32")
    for accumulate, batch_tokens in ((4, 192), (1, 192), (3, 96), (1, 32))
]


def gradients(
    source: Path, run: str, process_group: ProcessGroup, settings: list[str]
) -> dict[str, torch.Tensor]:
    """Return what all ranks together find to be the gradient of an update, in every case."""
    found = {}
    build = trainer_module.build_model
    for dtype, accumulate, batch_tokens in CASES:
        own = [*settings, f"training.accumulate={accumulate}", "model.dropout=0.0"]
        own += [f"training.batch_tokens={batch_tokens}"]
        config = config_file.load(source, own, run)
        trainer_module.build_model = lambda *made: build(*made).to(getattr(torch, dtype))  # noqa: B023
        with RunLog(Path(f"{run}-{process_group.rank}.jsonl")) as log:
            trainer = Trainer(config, RunDir(Path(run)), log, process_group)
        trainer.model.compute_dtype = getattr(torch, dtype)
        updates = trainer.data.updates(batch_tokens, trainer_module.Position(0, 2), trainer.split)
        trainer.gradients.backward_update(next(updates))
        for name, weight in trainer.model.named_parameters():
            assert weight.grad is not None
            found[f"{dtype} {accumulate} {batch_tokens} {name}"] = process_group.full_tensor(
                weight.grad
            ).clone()
    trainer_module.build_model = build
    return found


def save_gradients(source: Path, run: str, settings: list[str], path: Path) -> None:
    place = read_torchrun_env()
    assert place is not None
    process_group = torch_process_group.join(place)
    found = gradients(source, run, process_group, settings)
    if process_group.is_first:
        save_file(found, path)
    process_group.close()


def stopped(arguments: list[str], step: int, number: int, is_late: bool) -> None:
    """Do what the command line does; a signal comes to the last rank alone, at an update.

    It comes before the update, or after the one before it, when the ranks have told each other.
    """
    place, make = read_torchrun_env(), Trainer._update
    is_last = place is not None and place.rank == place.size - 1

    def interrupted(trainer: Trainer, batches: UpdateBatches) -> None:
        if is_last and not is_late and trainer.state.progress.step + 1 == step:
            os.kill(os.getpid(), number)
        make(trainer, batches)
        if is_last and is_late and trainer.state.progress.step + 2 == step:
            os.kill(os.getpid(), number)

    Trainer._update = interrupted  # type: ignore[method-assign]
    command_line(arguments)


def failing(arguments: list[str], rank: int, error: BaseException | None) -> None:
    """Do what the command line does; before its third update a rank fails, or is killed."""
    place, make = read_torchrun_env(), Trainer._update

    def broken(trainer: Trainer, batches: Any) -> None:
        if trainer.state.progress.step == 2 and place is not None and place.rank == rank:
            if error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise error
        make(trainer, batches)

    Trainer._update = broken  # type: ignore[method-assign]
    command_line(arguments)


def short_of_memory(arguments: list[str], rank: int, num_positions: int, first: int) -> None:
    """Do what the command line does; from an update on, or from the start, a rank lacks memory."""
    place, make = read_torchrun_env(), Trainer._update

    def limited(model: Transformer, batch: Batch, config: TrainingConfig) -> LossSum:
        if batch.num_positions > num_positions:
            raise MemoryError
        return loss_of(model, batch, config)

    def updated(trainer: Trainer, batches: UpdateBatches) -> None:
        if trainer.state.progress.step + 1 == first and is_short:
            gradients_module.loss_of = data_parallel.loss_of = limited
        make(trainer, batches)

    is_short = place is not None and place.rank == rank
    if first == 0 and is_short:
        gradients_module.loss_of = data_parallel.loss_of = limited
    Trainer._update = updated  # type: ignore[method-assign]
    command_line(arguments)


def live_bytes() -> int:
    """Return the bytes of all tensors that the collector knows, each storage once."""
    plain = (torch.Tensor, torch.nn.Parameter)  # a DTensor holds one of these
    tensors = [each for each in gc.get_objects() if type(each) in plain]
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(sizes.values())


def measured(arguments: list[str], directory: Path) -> None:
    """Do what the command line does; write down how much each rank holds while it validates.

    For each method that works with a whole model, `directory/RANK` has the most bytes of tensors
    beyond those at its start, in units of the bytes of all parameters.
    """
    gc.freeze()  # what is there already is left out of gc.get_objects()
    peaks: dict[str, float] = {}
    running: list[tuple[str, int, int]] = []  # methods, with the bytes at their start and of all

    def phase(owner: type[Trainer | TrainingState], name: str) -> None:
        method = getattr(owner, name)

        def run(self: Any) -> Any:
            whole = sum(4 * weight.numel() for weight in self.model.parameters())
            running.append((name, live_bytes(), whole))
            try:
                return method(self)
            finally:
                running.pop()

        setattr(owner, name, run)

    def sampled(owner: type, name: str, every: int = 1) -> None:
        method, count = getattr(owner, name), itertools.count()

        def run(*inputs: Any) -> Any:
            result = method(*inputs)
            if running and next(count) % every == 0:
                during, start, whole = running[-1]
                peaks[during] = max(peaks.get(during, 0.0), (live_bytes() - start) / whole)
            return result

        setattr(owner, name, run)

    for owner, name in ((Trainer, "_score"), (Trainer, "finish"), (TrainingState, "to_checkpoint")):
        phase(owner, name)
    for owner in (EncoderLayer, DecoderLayer):
        sampled(owner, "forward")
    for name in ("project_source", "decode_step"):
        sampled(DecoderLayer, name)
    for name in ("full_tensor", "distribute_like"):  # of single weights, hundreds of times
        sampled(torch_process_group.TorchProcessGroup, name, every=8)
    try:
        command_line(arguments)
    finally:
        (directory / os.environ["RANK"]).write_text(json.dumps(peaks))


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    directory = tmp_path / "ranks"
    directory.mkdir()
    return Ranks(directory)
