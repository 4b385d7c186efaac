"""The workers of the benchmarks that run mtrain, and the counts that the benchmarks report."""

import ast
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import REPOSITORY, prepared, write_task
from torch.utils.flop_counter import FlopCounterMode

import mtrain
from mtrain.config import config_file
from mtrain.decode.translator import EncodedSource
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.training.trainer import Trainer

JOB = {
    "num_layers": 1,
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "vocab_size": 285,
    "dropout": 0.1,
    "label_smoothing": 0.1,
    "batch_tokens": 192,
    "lr": 0.01,
    "warmup_steps": 4,
    "adam_betas": [0.9, 0.98],
    "max_grad_norm": 1.0,
    "precision": "float32",
    "threads": 1,
    "seconds": 0.5,
    "warm_up_s": 0.1,
    "overrides": ["data.clean=[]"],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus in the layout of the benchmarks."""
    directory = tmp_path_factory.mktemp("corpus")
    config = config_file.load(write_task(directory), JOB["overrides"], str(directory / "run"))
    prepared(config)
    return directory


def answers(corpus: Path, *options: str, stdin: str = "", **changes: Any) -> list[dict[str, Any]]:
    """Return the lines that the worker prints for a job on the corpus."""
    path = corpus / "job.json"
    path.write_text(json.dumps({"corpus": str(corpus), **JOB, **changes}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "peers.with_mtrain", path, *options],
        input=stdin,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "benchmarks")},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def answer(corpus: Path, *options: str) -> dict[str, Any]:
    """Return the one line that the worker prints for a job on the corpus."""
    (line,) = answers(corpus, *options)
    return line


@pytest.fixture(scope="module")
def epoch(corpus: Path) -> dict[str, Any]:
    """What the worker counts in an epoch."""
    return answer(corpus, "--count")


def test_the_worker_trains_for_the_given_seconds_after_a_warm_up_and_counts_target_tokens(
    corpus: Path, epoch: dict[str, Any]
) -> None:
    timed = answer(corpus)
    assert timed["seconds"] >= 0.5
    assert timed["all_updates"] - timed["updates"] >= 20  # the warm-up
    assert timed["updates"] > 0
    assert timed["loss"] < timed["first_loss"]
    mean = epoch["tgt_tokens"] / epoch["batches"]
    assert timed["tgt_tokens"] / timed["updates"] == pytest.approx(mean, rel=0.5)


def test_a_curve_has_one_point_per_line_on_stdin(corpus: Path) -> None:
    *points, last = answers(corpus, "--curve", stdin="\n\n\n", validate_every=2)
    assert [point["updates"] for point in points] == [2, 4, 6]
    assert 0 < points[0]["seconds"] <= points[1]["seconds"] <= points[2]["seconds"]
    num_lines = len((corpus / "valid.src").read_text("utf-8").splitlines())
    assert [len(point["outputs"]) for point in points] == [num_lines] * 3
    assert points[0]["outputs"] != points[2]["outputs"]
    assert last["versions"]["mtrain"]


def test_a_counted_epoch_has_as_many_pairs_as_the_corpus(
    corpus: Path, epoch: dict[str, Any]
) -> None:
    lines = (corpus / "train.tgt").read_text("utf-8").splitlines()
    assert epoch["pairs"] == len(lines)
    assert epoch["batches"] > 1
    assert epoch["cells"] >= epoch["src_tokens"] + epoch["tgt_tokens"]
    assert epoch["tgt_tokens"] >= len(lines) + sum(len(line.split()) for line in lines)


def test_the_flops_of_an_update_equal_the_count_of_torch_flop_counter_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    operations = importlib.import_module("operations")
    num_pairs, src, tgt, width, num_pieces = 3, 5, 7, 16, 40
    counts = (num_pairs * count for count in (src, tgt, src**2, tgt**2, src * tgt))
    sizes = operations.Sizes(2, 3, width, 32, num_pieces)
    model = torch.nn.Transformer(width, 4, 2, 3, 32, batch_first=True)
    output = torch.nn.Linear(width, num_pieces)
    states = [torch.randn(num_pairs, count, width, requires_grad=True) for count in (src, tgt)]
    causal = model.generate_square_subsequent_mask(tgt)
    with FlopCounterMode(display=False) as counter:
        output(model(*states, tgt_mask=causal)).sum().backward()
    assert operations.flop(operations.Tokens(*counts), sizes) == counter.get_total_flops()


def test_benchmarks_use_only_attributes_that_the_trainer_has(corpus: Path) -> None:
    config = config_file.load(corpus / "config.yaml", JOB["overrides"], str(corpus / "run"))
    trainer = Trainer(config, RunDir(corpus / "run"), RunLog(corpus / "metrics.jsonl"))
    asked = set()
    for script in (REPOSITORY / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "trainer":
                asked.add(node.attr)
    assert "_save" in asked
    assert {name for name in asked if not hasattr(trainer, name)} == set()


def test_the_decoding_benchmark_translates_like_the_python_api_and_stops_at_max_tokens(
    trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    monkeypatch.setattr(EncodedSource, "max_length", EncodedSource.max_length)  # to restore it
    decoding = importlib.import_module("peers.decoding")
    decode_mtrain = importlib.import_module("peers.decode_mtrain")
    unused = ("num_encoder_layers", "num_decoder_layers", "d_model", "d_ff", "num_heads")
    lines = ["7 1 2 8", "0 3 3"]
    job = decoding.Job(
        **dict.fromkeys((*unused, "vocab_size"), 0),
        run=str(trained.path),
        lines=lines,
        sources=[],
        beam=2,
        alpha=1.0,
        batch_size=2,
        max_tokens=100,
        lengths=[],
        precision="float32",
        threads=1,
        seconds=0.0,
    )
    outputs = decode_mtrain.load(job).translate()
    model = mtrain.load(trained.path, beam=2, length_alpha=1.0, precision="float32", device="cpu")
    assert outputs == list(model.translate(lines))
    starts = decode_mtrain.load(replace(job, max_tokens=3)).translate()
    for output, start in zip(outputs, starts, strict=True):
        assert output.startswith(start)
        assert output != start
