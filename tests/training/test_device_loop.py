"""The asynchronous training loop, run on a CPU: no device synchronization, the same results.

Tensors on PyTorch's meta device have shapes but no values, so an update that reads a value from
the device fails there.
"""

import importlib.machinery
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tasks import Said, prepared, reverse_task, write_task
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from mtrain.config import config_file
from mtrain.config.sections import ModelConfig
from mtrain.data.batch import Position, UpdateBatches
from mtrain.model.transformer import Transformer
from mtrain.ops import cross_entropy
from mtrain.run import checkpoint
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime import device
from mtrain.runtime.prefetch import read_ahead
from mtrain.runtime.process_group import SINGLE, ProcessGroup
from mtrain.training import compilation, training_state
from mtrain.training import trainer as trainer_module
from mtrain.training.gradients import Gradients
from mtrain.training.loss import LossSum
from mtrain.training.meters import AsyncScalars
from mtrain.training.trainer import Trainer

META = torch.device("meta")
TIMES = {"tgt_tokens_per_s", "elapsed_s", "memory_mib"}


def test_prefetched_items_keep_their_values_and_order() -> None:
    assert list(read_ahead(iter(range(20)), 3)) == list(range(20))
    assert list(read_ahead(iter([]), 3)) == []


def test_prefetching_is_bounded_and_runs_in_one_other_thread_that_ends() -> None:
    made: list[int] = []
    threads = set()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            threads.add(threading.get_ident())
            yield number

    ahead = read_ahead(items(), 3)
    for taken in range(5):
        assert next(ahead) == taken
        assert len(made) <= taken + 1 + 3
    ahead.close()
    assert len(made) < 10 and len(threads) == 1 and threading.get_ident() not in threads
    assert not [own for own in threading.enumerate() if own.name.startswith("read-ahead")]


def test_an_error_in_the_prefetch_thread_is_raised_after_the_earlier_items() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("gone")

    ahead = read_ahead(items(), 3)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        next(ahead)


def test_pending_scalars_are_read_once_and_in_order() -> None:
    outcomes = AsyncScalars()
    for step in range(5):
        outcomes.add(step, 10 * step, 0.5, torch.tensor([1.0, step]))
    assert [own.step for own in outcomes.read(3)] == [0, 1]
    assert [own.values for own in outcomes.read(0)] == [[1.0, 2], [1.0, 3], [1.0, 4]]
    assert list(outcomes.read(0)) == []


def trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, behind: int, ahead: int
) -> RunDir:
    """Train for 12 updates, of which the third has a NaN loss."""
    create, backward_update, read = (
        Trainer.__init__,
        Gradients.backward_update,
        Trainer._read_results,
    )
    waiting = []

    def prepared_loop(trainer: Trainer, *arguments: Any) -> None:
        create(trainer, *arguments)
        trainer.max_pending, trainer.num_prefetched = behind, ahead

    def broken(gradients: Gradients, batches: UpdateBatches, factor: float = 1.0) -> list[LossSum]:
        sums = backward_update(gradients, batches, factor)
        numbers.append(len(numbers))
        is_third = numbers[2:] == [2]
        return [own._replace(loss=own.loss * torch.nan) for own in sums] if is_third else sums

    def counted(trainer: Trainer, max_pending: int = 0) -> None:
        waiting.append(len(trainer.pending.queue))
        read(trainer, max_pending)

    numbers: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", prepared_loop)
        patch.setattr(Gradients, "backward_update", broken)
        patch.setattr(Trainer, "_read_results", counted)
        settings = ["training.max_steps=12", "training.log_every=5", "training.validate_every=6"]
        config = config_file.load(tmp_path / "config.yaml", settings, str(tmp_path / name))
        run = prepared(config)
        trainer_module.train(config, run)
    assert max(waiting) == (5 if behind else 1)  # logging and saving read all pending results
    return run


def test_asynchronous_training_has_the_same_weights_logs_and_skipped_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path, reverse_task)
    runs, said = [], []
    for name, behind, ahead in (("at-once", 0, 0), ("later", 8, 4)):
        runs.append(trained(tmp_path, monkeypatch, name, behind, ahead))
        text = capsys.readouterr().err
        said.append([line for line in text.splitlines() if "is skipped (" in line])
    message = "step 3: the loss or its gradient is not finite; the update is skipped (1 so far)"
    assert said == [[message], [message]]
    logs, states = [], []
    for run in runs:
        lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
        logs.append([{k: v for k, v in line.items() if k not in TIMES} for line in lines])
        path = checkpoint.steps(run.checkpoints_dir)[12]
        states.append(
            load_file(path / "model.safetensors") | load_file(path / "optimizer.safetensors")
        )
    assert logs[0] == logs[1] and len(logs[0]) > 4
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    made = [float(own) for name, own in states[0].items() if name.startswith("step.")]
    assert set(made) == {11.0}


class NoOptimizer(torch.optim.Optimizer):
    """A stand-in: PyTorch's fused optimizer refuses tensors without values."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_an_update_never_synchronizes_with_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_task(tmp_path, reverse_task)
    settings = ["training.precision=bfloat16", "model.dropout=0.1", "training.log_every=50"]
    config = config_file.load(source, settings, str(tmp_path / "run"))
    run = prepared(config)
    monkeypatch.setattr(trainer_module, "device_of", lambda config, process_group: META)
    monkeypatch.setattr(training_state, "Adam", NoOptimizer)
    with RunLog(tmp_path / "metrics.jsonl") as log:
        trainer = Trainer(config, run, log)
        trainer.max_pending = 8
        updates = trainer.data.updates(192, Position(), trainer.split)
        for _ in range(3):
            trainer._update(next(updates))
            trainer.state.progress.step += 1
            trainer._report()
    assert len(trainer.pending.queue) == 3
    with pytest.raises((RuntimeError, NotImplementedError)):  # reading synchronizes
        trainer._read_results()


def test_training_disables_cudnn_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_own_process", lambda: True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    config = config_file.load(write_task(tmp_path, reverse_task), [], str(tmp_path / "run"))
    run = prepared(config)
    with RunLog(tmp_path / "metrics.jsonl") as log:
        Trainer(config, run, log)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def small_model() -> Transformer:
    config = ModelConfig(
        d_model=16, d_ff=32, num_heads=2, num_encoder_layers=2, num_decoder_layers=2, dropout=0.1
    )
    return Transformer(config, 50, 50)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's compiler reads .grad itself
def test_layers_compile_without_graph_breaks_and_rarely_recompile_for_new_shapes() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    model = small_model().to(META).train()
    model.compute_dtype = torch.bfloat16
    model.compile_layers(backend=counter, fullgraph=True)
    counts = []
    shapes = [(5, 7, 9), (3, 16, 8), (9, 12, 13), (4, 7, 7), (7, 23, 31), (8, 32, 24), (2, 5, 3)]
    for rows, src_width, tgt_width in shapes:
        src = torch.zeros(rows, src_width, dtype=torch.long, device=META)
        tgt = torch.zeros(rows, tgt_width, dtype=torch.long, device=META)
        states = model(src, torch.ones_like(src, dtype=torch.bool), tgt)
        logits = states.detach().flatten(0, 1) @ model.output.weight.detach().to(states.dtype).T
        model.output.cross_entropy(logits, tgt.flatten(), 0.1, True)
        model.output.consistency(logits, logits, tgt.flatten(), 0.1, 3.0)
        grads = torch.autograd.grad(states.sum(), list(model.encoder.parameters()))  # type: ignore
        assert all(own.dtype == torch.float32 for own in grads)
        counts.append(counter.frame_count)
    assert counts[0] == 4, "an encoder layer, a decoder layer and both losses"
    assert counts[-1] <= 8
    torch.compiler.reset()


def test_a_compiled_model_has_the_same_state_dict_keys_and_decodes_uncompiled() -> None:
    plain, compiled = small_model().eval(), small_model().eval()
    compiled.load_state_dict(plain.state_dict())
    counter = CompileCounterWithBackend("eager")
    compiled.compile_layers(backend=counter)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    src, keep = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad(), compilation.uncompiled(True):
        found = [
            model.decode_step(torch.tensor([2]), model.start(src, keep))
            for model in (plain, compiled)
        ]
    assert torch.equal(*found) and counter.frame_count == 0


def test_a_custom_cross_entropy_function_is_called_when_given() -> None:
    asked = []

    def formula(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        asked.append(arguments[0].shape)
        return cross_entropy.plain_cross_entropy(*arguments)

    states = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(7, 4, dtype=torch.float64))
    inputs = (states, weight, torch.arange(5), 0.1)
    own, _ = cross_entropy.ProjectedCrossEntropy.apply(*inputs)
    other, _ = cross_entropy.ProjectedCrossEntropy.apply(*inputs, formula)
    assert torch.equal(own, other) and asked == [(5, 7)]
    assert torch.equal(*(torch.autograd.grad(loss, weight)[0] for loss in (own, other)))


@pytest.mark.parametrize(
    ("settings", "device", "has_triton", "missing"),
    [
        ([], "cuda", True, None),
        (["compile=true"], "cuda", True, None),
        (["compile=false"], "cuda", True, ""),
        (["compile=false"], "cpu", False, ""),
        ([], "cuda", False, "triton, which is not installed"),
        (["parallel=fsdp"], "cuda", True, "`training.parallel: ddp`"),
        (["compile=true"], "cpu", True, ""),
        ([], "cpu", True, ""),
    ],
)
def test_layers_are_compiled_on_a_supported_gpu_or_the_missing_requirement_is_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    device: str,
    has_triton: bool,
    missing: str | None,
) -> None:
    class Two(ProcessGroup):
        size = 2

    asked, said = [], Said()
    monkeypatch.setattr(Transformer, "compile_layers", lambda model: asked.append(model))
    found = importlib.machinery.ModuleSpec("triton", None) if has_triton else None
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: found)
    overrides = [f"training.{setting}" for setting in settings]
    config = config_file.load(write_task(tmp_path, reverse_task), overrides).training
    model = small_model()
    as_it_comes = torch._dynamo.config.patch(suppress_errors=False, recompile_limit=8)
    lazily = torch._functorch.config.patch(force_non_lazy_backward_lowering=False)
    with as_it_comes, lazily:
        is_compiled = compilation.compile_layers(
            model, torch.device(device), config, Two(), said.say
        )
        assert is_compiled == (missing is None) == (asked == [model])
        assert said.lines == ([f"compile  nothing, because it needs {missing}"] if missing else [])
        if is_compiled:
            assert torch._dynamo.config.suppress_errors
            assert torch._functorch.config.force_non_lazy_backward_lowering, "errors come in time"
            assert torch._dynamo.config.recompile_limit >= 32
    with compilation.uncompiled(is_compiled):
        pass


def test_a_compilation_failure_is_printed_once_per_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no assembler here\nand more")

    torch.compiler.reset()
    monkeypatch.setattr(Transformer, "compile_layers", lambda model: None)
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: True)
    config = config_file.load(write_task(tmp_path, reverse_task)).training
    arguments = (small_model(), torch.device("cuda"), config, SINGLE)
    with torch._dynamo.config.patch(suppress_errors=False):
        for _ in range(2):  # each of two trainings in a process prints it
            said = Said()
            compilation.compile_layers(*arguments, said.say)
            for layer in (torch.sin, torch.cos):
                compiled = torch.compile(lambda x, layer=layer: layer(x) + 1, backend=fail)
                assert compiled(torch.zeros(2)).tolist() == (layer(torch.zeros(2)) + 1).tolist()
            (line,) = said.lines
            assert line.startswith("compile  a part of a layer runs uncompiled, and slower: ")
            assert "no assembler here and more" in line
            torch.compiler.reset()
    assert "no assembler" not in capsys.readouterr().err


def test_warnings_of_the_inductor_compiler_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transformer, "compile_layers", lambda model: None)
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: True)
    config = config_file.load(write_task(tmp_path, reverse_task)).training
    with (
        warnings.catch_warnings(record=True) as caught,
        torch._dynamo.config.patch(suppress_errors=False),
    ):
        warnings.simplefilter("always")
        compilation.compile_layers(small_model(), torch.device("cuda"), config, SINGLE, Said().say)
        for module in ("torch._inductor.lowering", "torch.nn.functional"):
            warnings.warn_explicit(f"of {module}", UserWarning, "file.py", 1, module)
    assert [str(each.message) for each in caught] == ["of torch.nn.functional"]


def test_a_gpu_named_by_index_becomes_the_current_cuda_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(compilation, "pick_device", lambda name, key: torch.device(name))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    source = write_task(tmp_path, reverse_task)
    for name in ("cpu", "cuda", "cuda:1"):
        config = config_file.load(source, [f"training.device={name}"], str(tmp_path / "run"))
        assert compilation.device_of(config, SINGLE) == torch.device(name)
    assert chosen == [torch.device("cuda:1")]
