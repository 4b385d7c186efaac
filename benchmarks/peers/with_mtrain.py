"""Train with mtrain: its own `train`, from a prepared run folder, until the time is over."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peers.job import CurveMeter, Done, Epoch, Job, Meter, serve

from mtrain import __version__
from mtrain.config import config_file
from mtrain.config.sections import Config
from mtrain.data import prepare
from mtrain.data.batch import MicroBatchSplit, Position, UpdateBatches
from mtrain.data.loader import TrainingData
from mtrain.run.logger import Stderr
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_settings import own_process
from mtrain.tokenizer import sentencepiece
from mtrain.training import trainer

_LOG_EVERY = 10
_NEVER = 1_000_000_000


def main() -> None:
    own_process()  # as the command line does
    serve(train, count)


def train(job: Job, meter: Meter) -> dict[str, str]:
    torch.set_num_threads(job.threads)

    class Watched(TrainingData):
        """The data of the run; the meter sees each update on its way to the trainer."""

        def updates(
            self, batch_tokens: int, start: Position, split: MicroBatchSplit
        ) -> Generator[UpdateBatches]:
            for batches in super().updates(batch_tokens, start, split):
                meter.begin(batches.num_tokens)
                yield batches

    class Translating(trainer.Trainer):
        """The trainer; the meter may ask for translations of the validation text."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if isinstance(meter, CurveMeter):
                meter.translate = lambda: self.valid.translations(self.translator)

    trainer.TrainingData = Watched  # type: ignore[attr-defined]
    trainer.Trainer = Translating  # type: ignore[misc, assignment]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(job, folder)
        run = RunDir(Path(folder))
        shutil.copytree(Path(job.corpus) / "run", folder, dirs_exist_ok=True)
        prepare.prepare(config, run, Stderr())  # raises if the data is of another config
        with suppress(Done):
            trainer.train(config, run)
        for line in run.metrics_path.read_text("utf-8").splitlines():
            numbers = json.loads(line)
            if "loss" in numbers:
                meter.note_loss(numbers["loss"], _LOG_EVERY)
    return {"mtrain": __version__, "torch": torch.__version__}


def load_config(job: Job, run_dir: str) -> Config:
    """Return the config of the job; the user's overrides come last."""
    values = {
        "model.num_encoder_layers": job.num_layers,
        "model.num_decoder_layers": job.num_layers,
        "model.d_model": job.d_model,
        "model.d_ff": job.d_ff,
        "model.num_heads": job.num_heads,
        "model.dropout": job.dropout,
        "training.label_smoothing": job.label_smoothing,
        "training.batch_tokens": job.batch_tokens,
        "training.lr": job.lr,
        "training.warmup_steps": job.warmup_steps,
        "training.betas": list(job.adam_betas),
        "training.max_grad_norm": job.max_grad_norm,
        "training.precision": job.precision,
        "training.device": "cpu",
        "training.max_steps": _NEVER,
        "training.validate_every": _NEVER,
        "training.log_every": _LOG_EVERY,
    }
    overrides = [*(f"{key}={value}" for key, value in values.items()), *job.overrides]
    return config_file.load(Path(job.corpus) / "config.yaml", overrides, run_dir)


def count(job: Job) -> Epoch:
    run = RunDir(Path(job.corpus) / "run")
    config = load_config(job, str(run.path))
    vocabulary = sentencepiece.load(run.tokenizer_dir)
    data = TrainingData(run.data_dir, vocabulary, config.seed)
    epoch = Epoch()
    for batch, after in data.batches(config.training.batch_tokens, Position()):
        src, tgt = batch.src_BS, batch.tgt_out_BT
        src_ids = src[batch.src_keep_BS].tolist()
        tgt_ids = tgt[batch.tgt_keep_BT].tolist()
        epoch.add(len(src), src_ids, tgt_ids, src.shape[1] + tgt.shape[1])
        if after.epoch > 0:
            return epoch
    raise AssertionError("batches go on for ever")


if __name__ == "__main__":
    main()
