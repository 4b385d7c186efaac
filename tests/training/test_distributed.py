"""Several ranks make the same updates, checkpoints and translations as one process."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Cli
from fork_server import needs_fork_server
from ranks import (
    Ranks,
    apart,
    command_line,
    differing,
    failing,
    gradients,
    measured,
    ranks,
    save_gradients,
    short_of_memory,
    stopped,
    with_closed_stdout,
)
from run_folders import step_lines, timeless, weights
from safetensors.torch import load_file
from tasks import prepared, reverse_task, train, write_task

from mtrain import __version__
from mtrain.config import config_file
from mtrain.data.batch import MicroBatchSplit, Position, UpdateBatches
from mtrain.data.loader import TrainingData
from mtrain.errors import RunError
from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE
from mtrain.tokenizer import sentencepiece

__all__ = ["ranks"]

pytestmark = needs_fork_server
PLAIN = ["model.dropout=0.0", "training.accumulate=4", "training.log_every=1"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("ranks"), reverse_task)


def options(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


# gradients


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, torch.Tensor]:
    run = prepared(
        config_file.load(source, ["training.batch_tokens=32"], str(source.parent / "grad"))
    )
    return gradients(source, str(run.path), SINGLE, [])


BOUNDS = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_of_an_update_equals_that_of_one_process(
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


def test_gradients_exchanged_in_bfloat16_are_close_to_those_of_one_process(
    source: Path,
    tmp_path: Path,
    ranks: Ranks,
    expected: dict[str, torch.Tensor],
) -> None:
    run, path = str(source.parent / "grad"), tmp_path / "gradients"
    settings = ["training.parallel=fsdp", "training.exchange=bfloat16"]
    ended = ranks(2, save_gradients, source, run, settings, path)
    assert ended.codes == [0, 0], ended.err
    found = load_file(path)
    size = {name: float(grad.norm()) for name, grad in expected.items()}
    away = {name: float((found[name] - grad).norm()) for name, grad in expected.items()}
    assert sum(away.values()) < 0.01 * sum(size.values())
    assert sum(away.values()) > 1e-4 * sum(size.values())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("num_batches", [1, 2, 3, 4, 6])
def test_ranks_get_equally_many_micro_batches_and_each_row_once(
    source: Path, num_batches: int, num_ranks: int
) -> None:
    run = prepared(
        config_file.load(source, ["training.batch_tokens=32"], str(source.parent / "grad"))
    )
    data = TrainingData(run.data_dir, sentencepiece.load(run.tokenizer_dir), 1)
    splits = [MicroBatchSplit(num_batches, rank, num_ranks) for rank in range(num_ranks)]
    updates = [data.updates(48, Position(0, 3), split) for split in splits]
    whole = data.updates(48, Position(0, 3), MicroBatchSplit(num_batches))
    for _ in range(3):
        parts, one = [next(own) for own in updates], next(whole)
        assert {len(own.micro_batches) for own in parts} == {len(splits[0].of_rank())}
        assert {(own.num_tokens, own.after) for own in parts} == {(one.num_tokens, one.after)}
        assert rows_of(parts) == rows_of([one])
        assert sum(len(rows_of([own])) for own in parts) == len(rows_of([one]))
    is_whole = num_batches % num_ranks == 0
    assert (splits[0].num_parts == 1) == is_whole


def rows_of(parts: list[UpdateBatches]) -> list[list[int]]:
    """Return the sorted targets of all micro-batches that are not dummies."""
    return sorted(
        row[keep].tolist()
        for own in parts
        for share in own.micro_batches
        if not share.is_dummy
        for row, keep in zip(share.batch.tgt_out_BT, share.batch.tgt_keep_BT, strict=True)
    )


# complete trainings


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in step_lines(run)]


def positions(run: RunDir) -> list[tuple[int, int]]:
    found = [
        checkpoint.load_progress(path) for path in checkpoint.steps(run.checkpoints_dir).values()
    ]
    return [(progress.epoch, progress.batch) for progress in found]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, ["training.accumulate=4"]),  # with dropout: a batch has the same masks on any rank
        (4, [*PLAIN, "training.parallel=fsdp"]),
        (2, ["model.dropout=0.0", "training.accumulate=3"]),
        (2, ["training.accumulate=4", "training.consistency={}"]),
        (4, ["training.accumulate=4", "training.consistency={}"]),
        (2, [*PLAIN, "training.parallel=fsdp", "training.consistency={}"]),
        (2, ["training.accumulate=4", "training.optimizer=muon"]),
    ],
    ids=[
        "whole-batches",
        "sharded",
        "batches-cut",
        "simcut-2",
        "simcut-4",
        "simcut-sharded",
        "muon",
    ],
)
def test_training_on_several_ranks_equals_one_process_up_to_rounding(
    source: Path, tmp_path: Path, ranks: Ranks, size: int, settings: list[str]
) -> None:
    logged = [*settings, "training.log_every=1", "training.validate_every=6"]
    alone = train(source, *logged, run=str(tmp_path / "alone"))
    run = RunDir(tmp_path / "run")
    ended = ranks.mtrain(size, "train", source, "--run", run.path, *options(*logged))
    assert ended.codes == [0] * size, ended.err
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    for mine, other in zip(timeless(run), timeless(alone), strict=True):
        assert mine.keys() == other.keys()
        assert mine.get("valid_bleu", 0.0) == pytest.approx(other.get("valid_bleu", 0.0), abs=1e-6)
    assert positions(run) == positions(alone)
    ours, theirs = (
        torch.cat([weight.flatten() for _, weight in sorted(load_file(own.model_path).items())])
        for own in (run, alone)
    )
    assert float((ours - theirs).norm()) < 0.005 * float(
        theirs.norm()
    )  # Adam amplifies rounding errors
    assert "".join(ended.out) == "".join(ended.err[1:]) == ""
    (line,) = [line for line in ended.err[0].splitlines() if line.startswith("ranks ")]
    assert line.startswith(f"ranks    {size}, each with ")
    made = checkpoint.load_environment(next(iter(checkpoint.steps(run.checkpoints_dir).values())))
    assert made is not None
    assert made.num_ranks == size


@pytest.mark.parametrize(("size", "parallel"), [(4, "ddp"), (2, "fsdp")])
def test_a_signal_to_one_rank_saves_and_any_number_of_ranks_can_resume(
    source: Path, tmp_path: Path, ranks: Ranks, size: int, parallel: str
) -> None:
    settings = ["training.log_every=1", f"training.parallel={parallel}", "model.dropout=0.0"]
    settings += ["training.validate_every=6"]
    straight, run = RunDir(tmp_path / "straight"), RunDir(tmp_path / "run")
    command = ["train", str(source), *options(*settings), "--run"]
    assert ranks.mtrain(size, *command, straight.path).codes == [0] * size
    ended = ranks(size, stopped, [*command, str(run.path)], 5, signal.SIGTERM, size == 2)
    assert ended.codes == [143] * size, ended.err
    assert ended.said == [
        f"mtrain: stopped; all is saved in {run.path}, and the same command goes on from there."
    ]
    assert max(checkpoint.steps(run.checkpoints_dir)) == 5
    others = {number: RunDir(tmp_path / f"on-{number}") for number in (1, 6 - size)}
    for other in others.values():
        shutil.copytree(run.path, other.path)
    assert ranks.mtrain(size, *command, run.path).codes == [0] * size
    assert weights(run) == weights(straight)
    assert timeless(run) == timeless(straight)
    train(source, *settings, run=str(others[1].path))
    ended = ranks.mtrain(6 - size, *command, others[6 - size].path)
    assert ended.codes == [0] * (6 - size)
    for other in others.values():
        assert losses(other) == pytest.approx(losses(straight), rel=1e-4)
        assert positions(other) == positions(straight)


@pytest.mark.parametrize("first", [0, 2])
def test_one_rank_out_of_memory_halves_its_micro_batches_and_losses_stay_the_same(
    source: Path, tmp_path: Path, ranks: Ranks, first: int
) -> None:
    alone = train(source, *PLAIN, run=str(tmp_path / "alone"))
    command = ["train", str(source), *options(*PLAIN), "--run", str(tmp_path / "run")]
    ended = ranks(2, short_of_memory, command, 1, 100, first)
    assert ended.codes == [0, 0], ended.err
    said = "memory   of another rank does not hold a micro-batch of "
    assert (said in ended.err[0]) == (first == 0)
    assert losses(RunDir(tmp_path / "run")) == pytest.approx(losses(alone), rel=1e-4)


def test_max_minutes_ends_the_training_of_all_ranks(
    source: Path, tmp_path: Path, ranks: Ranks
) -> None:
    run = RunDir(tmp_path / "run")
    settings = ["training.max_steps=null", "training.max_minutes=0.02", "training.schedule=linear"]
    settings += ["training.validate_every=100000", "training.warmup_steps=0"]
    ended = ranks.mtrain(2, "train", source, "--run", run.path, *options(*settings))
    assert ended.codes == [0, 0], ended.err
    (step,) = checkpoint.steps(run.checkpoints_dir)
    progress = checkpoint.load_progress(run.checkpoints_dir / f"step-{step:08d}")
    assert progress.elapsed_s >= 1.2


def test_out_of_memory_with_fsdp_is_an_error_that_names_the_rank(
    source: Path, tmp_path: Path, ranks: Ranks
) -> None:
    command = ["train", str(source), *options(*PLAIN, "training.parallel=fsdp")]
    ended = ranks(2, short_of_memory, [*command, "--run", str(tmp_path / "run")], 1, 100, 2)
    assert ended.codes == [2, 2]
    assert ended.said == [
        "mtrain: rank 1: the memory must hold a rank's micro-batch, but does not; take a "
        "lower `training.batch_tokens` and a higher `training.accumulate`, or more ranks."
    ]


def test_one_process_reports_settings_that_have_no_effect(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    settings = ["training.parallel=fsdp", "training.exchange=bfloat16", "training.max_steps=1"]
    outcome = cli("train", source, "--run", tmp_path / "run", *options(*settings))
    assert outcome.code == 0
    assert [line for line in outcome.err.splitlines() if line.startswith("ranks ")] == [
        "ranks    1, to which `training.parallel: fsdp` makes no difference",
        "ranks    1, to which `training.exchange: bfloat16` makes no difference",
    ]


def test_no_fsdp_rank_holds_all_weights_at_once_except_to_write_checkpoints(
    source: Path, tmp_path: Path, ranks: Ranks
) -> None:
    settings = ["model.d_model=64", "model.d_ff=256", "model.num_encoder_layers=3"]
    settings += ["model.num_decoder_layers=3", "training.max_steps=2", "training.validate_every=2"]
    settings += ["training.save_every=1", "training.average=2", "training.parallel=fsdp"]
    command = ["train", str(source), *options(*settings), "--run", str(tmp_path / "run")]
    ended = ranks(2, measured, command, tmp_path)
    assert ended.codes == [0, 0], ended.err
    first, other = (json.loads((tmp_path / rank).read_text()) for rank in ("0", "1"))
    assert first.pop("to_checkpoint") > 0.9  # the first rank writes it
    for peaks in (first, other):
        assert peaks.keys() - {"to_checkpoint"} == {"_score", "finish"}
        # 0.42 or 0.60, depending on whether the gathers of two layers overlap; all weights: 1.4
        assert all(0.01 < peak < 0.8 for peak in peaks.values()), (first, other)


# errors


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all_ranks_with_one_message_that_names_it(
    source: Path, tmp_path: Path, ranks: Ranks, rank: int
) -> None:
    command = ["train", str(source), "--run", str(tmp_path / "run")]
    ended = ranks(2, failing, command, rank, RunError("the moon must be full, but is not."))
    assert ended.codes == [2, 2]
    assert ended.said == [f"mtrain: rank {rank}: the moon must be full, but is not."]


@pytest.mark.parametrize("kind", ["none", "old", "copy"])
def test_a_run_folder_that_not_all_ranks_see_is_reported_once(
    source: Path, tmp_path: Path, ranks: Ranks, kind: str
) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    if kind != "none":  # the second rank sees a run folder that the first does not see
        train(source, "training.max_steps=2", run=str(tmp_path / "1" / "run"))
        (tmp_path / "1" / "run" / "model.safetensors").unlink()
    if kind == "copy":
        shutil.copytree(tmp_path / "1" / "run", tmp_path / "0" / "run")
    own = ["train", str(source), "--run", "run"]
    ended = ranks.ended(ranks.start(2, apart, own, tmp_path), patience_s=40)
    assert ended.codes == [2, 2], ended.err
    assert ended.said == [
        "mtrain: rank 0: run: must be on a disk that all ranks see, but is another folder to rank "
        "1, or none."
    ]
    assert not list(tmp_path.glob("*/run/.*.tmp"))


@pytest.mark.parametrize(
    ("settings", "version", "message"),
    [
        (
            ["training.lr=0.5"],
            None,
            "`training.lr` must be the same on all ranks, but is 0.01 on rank 0 and 0.5 on rank 2",
        ),
        (
            [],
            "9.0",
            f"`mtrain` must be the same on all ranks, but is {__version__!r} on rank 0 and '9.0' "
            "on rank 2",
        ),
    ],
    ids=["config", "version"],
)
def test_ranks_with_another_config_or_mtrain_are_refused_before_anything_is_written(
    source: Path,
    tmp_path: Path,
    ranks: Ranks,
    settings: list[str],
    version: str | None,
    message: str,
) -> None:
    command = ["train", str(source), "--run", str(tmp_path / "run")]
    ended = ranks(3, differing, command, options(*settings), version)
    assert ended.codes == [2, 2, 2], ended.err
    assert ended.said == [f"mtrain: rank 0: {message}."]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [RuntimeError("expected scalar type Float"), KeyError("moon")])
def test_an_unexpected_exception_keeps_its_traceback_and_names_the_rank(
    source: Path, tmp_path: Path, ranks: Ranks, error: Exception
) -> None:
    command = ["train", str(source), "--run", str(tmp_path / "run")]
    ended = ranks(2, failing, command, 1, error)
    assert ended.codes == [2, 1]
    assert ended.said == ["mtrain: rank 1: has failed, and all ranks end; where it failed:"]
    assert ended.err[1].splitlines()[-1] == f"{type(error).__name__}: {error}"
    assert "Traceback" not in ended.err[0]


def test_the_other_ranks_end_with_one_message_when_a_rank_is_killed(
    source: Path, tmp_path: Path, ranks: Ranks
) -> None:
    command = ["train", str(source), "--run", str(tmp_path / "run")]
    ended = ranks.ended(ranks.start(4, failing, command, 2, None), patience_s=30)
    assert ended.codes == [2, 2, -signal.SIGKILL, 2]
    (said,) = ended.said
    assert said.partition(": another")[2] == (
        " rank ended without an error message: it was killed, or its machine is gone; the same "
        "command goes on from the last checkpoint."
    )
    assert not any("Traceback" in text for text in ended.err)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.d_modl=8", "`model.d_modl` is not a key of the config"),
        (
            "training.device=cuda:1",
            "`training.device` must be auto, cpu or cuda for the 2 processes",
        ),
        ("training.exchange=bfloat16", "`training.exchange` must be float32 for `training.para"),
        ("training.lr=1e30", "take a lower `training.lr` or more `training.warmup_steps`"),
        ("data.max_tokens=2", "must have a pair that can be used, but all are dropped"),
    ],
)
def test_an_error_on_all_ranks_is_reported_once_by_the_first_rank(
    source: Path, tmp_path: Path, ranks: Ranks, setting: str, message: str
) -> None:
    ended = ranks.mtrain(2, "train", source, "--run", tmp_path / "run", *options(setting))
    assert ended.codes == [2, 2]
    (said,) = ended.said
    assert said.startswith("mtrain: rank 0: ")
    assert message in said


def test_an_unknown_option_is_reported_once(source: Path, ranks: Ranks) -> None:
    ended = ranks.mtrain(2, "train", source, "--no-such-option")
    assert ended.codes == [2, 2]
    assert ended.said == [
        "mtrain: rank 0: no such option: --no-such-option; see `mtrain train --help`."
    ]
    assert ended.err[1] == "".join(ended.out) == ""


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_version_and_help_are_printed_by_the_first_rank_only(ranks: Ranks, option: str) -> None:
    ended = ranks.mtrain(2, option)
    assert ended.codes == [0, 0]
    assert "mtrain" in ended.out[0]
    assert ended.out[1] == "".join(ended.err) == ""


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["plot", "run"], "mtrain plot"),
        (["tokenize", "config.yaml"], "mtrain tokenize"),
        (["translate", "RUN", "--engine", "ctranslate2"], "mtrain translate --engine ctranslate2"),
    ],
)
def test_single_process_commands_are_refused_under_torchrun(
    noisy: RunDir, ranks: Ranks, arguments: list[str], what: str
) -> None:
    own = [str(noisy.path) if part == "RUN" else part for part in arguments]
    ended = ranks.mtrain(2, *own)
    assert ended.codes == [2, 2]
    assert ended.said == [
        f"mtrain: rank 0: `{what}` must run in one process, but torchrun started 2; leave torchrun "
        "out."
    ]


def test_a_failed_rendezvous_of_ranks_is_one_error_message(
    monkeypatch: pytest.MonkeyPatch, cli: Cli, source: Path
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        outcome = cli("train", source)
        assert outcome.code == 2
        assert outcome.err.startswith(
            f"mtrain: rank {rank}: all 2 ranks must meet at 127.0.0.1:x, but do not: "
        )
    monkeypatch.setenv("RANK", "first")
    assert cli("train", source).err == (
        "mtrain: the environment's RANK must be a number, but is 'first' instead.\n"
    )


# translation


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [pair.src for pair in reverse_task(60, 7)]
    lines[5:5] = ["", "  ", "ba " * 60, "mu"]
    path = tmp_path_factory.mktemp("text") / "lines"
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "settings",
    [
        ["--rerank-with", "{back}"],
        ["--format", "jsonl", "--n-best", "2"],
        ["--format", "tsv", "--sample", "--n-best", "3", "--seed", "4"],
    ],
)
def test_translations_are_byte_identical_to_one_process_with_as_many_threads(
    cli: Cli,
    reverser: RunDir,
    back_run: Path,
    text: Path,
    ranks: Ranks,
    settings: list[str],
) -> None:
    settings = [setting.format(back=back_run) for setting in settings]
    with torch_threads(2):
        alone = cli("translate", reverser.path, text, *settings)
    ended = ranks.mtrain(2, "translate", reverser.path, text, *settings)
    assert ended.codes == [0, 0], ended.err
    assert ended.out[0].encode() == alone.out
    assert (ended.err[0], ended.err[1], ended.out[1]) == (alone.err, "", "")


@pytest.mark.parametrize("options", [[], ["--prefix", "{text}"]], ids=str)
def test_all_ranks_of_a_translation_end_where_stdout_is_closed(
    trained: RunDir, text: Path, ranks: Ranks, options: list[str]
) -> None:
    options = [option.format(text=text) for option in options]
    arguments = ["translate", str(trained.path), str(text), *options]
    ended = ranks.ended(ranks.start(2, with_closed_stdout, arguments), patience_s=30)
    assert ended.codes == [0, 0], ended.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_translation_that_a_signal_stops_leaves_no_temporary_file(
    trained: RunDir, tmp_path: Path, ranks: Ranks, number: int
) -> None:
    slow, out = tmp_path / "slow", tmp_path / "out"
    out.mkdir()
    os.mkfifo(slow)
    arguments = ["translate", str(trained.path), str(slow), "-o", str(out / "lines")]
    processes = ranks.start(2, command_line, arguments)
    with slow.open("wb"):  # once it is read
        while not list(out.iterdir()):
            time.sleep(0.01)
        for _ in range(2):  # torchrun forwards the Ctrl-C that the terminal sends to all ranks
            for process in processes:
                assert process.pid is not None
                os.kill(process.pid, number)
        ended = ranks.ended(processes, patience_s=30)
    assert ended.codes[0] == 128 + number, ended.err
    assert not list(out.iterdir())
    assert "Traceback" not in "".join(ended.err)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def test_evaluation_output_equals_that_of_one_process(
    cli: Cli, trained: RunDir, tmp_path: Path, ranks: Ranks, text: Path
) -> None:
    run = RunDir(shutil.copytree(trained.path, tmp_path / "short"))
    config = run.config_path.read_text("utf-8")
    run.config_path.write_text(config.replace("max_tokens: 32", "max_tokens: 5"), encoding="utf-8")
    given = ["--src", text, "--ref", text, "--json"]
    for settings in (["--json", "--details"], ["--score"], given):
        alone = cli("eval", run.path, *settings)
        assert ("in 2 parts" in alone.err) == ("--json" in settings)
        ended = ranks.mtrain(3, "eval", run.path, *settings)
        assert ended.codes == [0, 0, 0], ended.err
        assert ended.out == [alone.out.decode(), "", ""]
        assert ended.err == [alone.err, "", ""]


def test_ranks_that_translate_with_other_options_or_another_model_are_refused(
    trained: RunDir, noisy: RunDir, text: Path, tmp_path: Path, ranks: Ranks
) -> None:
    ended = ranks(2, differing, ["translate", str(trained.path), str(text)], ["--beam", "1"])
    assert ended.codes == [2, 2], ended.err
    assert ended.said == [
        "mtrain: rank 0: the decoding options must be the same on all ranks, but rank 1 has others."
    ]
    for rank, run in enumerate((trained, noisy)):
        shutil.copytree(run.path, tmp_path / str(rank) / "run")
    ended = ranks(2, apart, ["eval", "run"], tmp_path)
    assert ended.codes == [2, 2], ended.err
    assert ended.said == [
        "mtrain: rank 0: the models must be the same on all ranks, but rank 1 has others."
    ]


def test_a_too_long_line_with_on_long_error_ends_all_ranks_with_one_message(
    trained: RunDir, text: Path, ranks: Ranks
) -> None:
    ended = ranks.mtrain(2, "translate", trained.path, text, "--on-long", "error")
    assert ended.codes == [2, 2]
    (said,) = ended.said
    assert said.startswith("mtrain: rank 0: line 8: must have at most 32 tokens, but has ")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("gone", "mtrain: rank 0: {text}: cannot be read: "),
        ("short", "mtrain: rank 0: `--prefix` must have a line for each line of the input, "),
        ("cut.gz", "mtrain: rank 0: {text}: must be whole, but its gzip data is cut off or "),
    ],
)
def test_input_that_the_first_rank_cannot_read_ends_all_ranks_with_one_message(
    trained: RunDir, text: Path, tmp_path: Path, ranks: Ranks, written: str, message: str
) -> None:
    lines, path, more = text.read_bytes(), tmp_path / written, list[str | Path]()
    if written == "short":
        path.write_text("tu\n")
        more, path = ["--prefix", path], text
    elif written == "cut.gz":
        path.write_bytes(gzip.compress(lines * 99)[:-20])
    arguments = ["translate", str(trained.path), str(path), *map(str, more)]
    ended = ranks.ended(ranks.start(2, command_line, arguments), patience_s=30)
    assert ended.codes == [2, 2]
    (said,) = [line for line in ended.said if "rank" in line]
    assert said.startswith(message.format(text=path))
    assert ended.out[1] == ""
    assert bool(ended.out[0]) == (written == "cut.gz")
