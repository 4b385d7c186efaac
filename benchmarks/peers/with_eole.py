"""Train with eole: its own `train` on a config of its own, with its own token batches."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import eole.trainer
import torch
from eole.bin.run.train import train as eole_train
from eole.config.run import PredictConfig, TrainConfig
from eole.constants import CorpusTask
from eole.inputters.dynamic_iterator import build_dynamic_dataset_iter
from eole.predict import build_predictor
from eole.train_single import TrainingInitializer
from eole.utils import Statistics
from peers.job import (
    VALID_MAX_TOKENS,
    CurveMeter,
    Done,
    Epoch,
    Job,
    Meter,
    serve,
    translate_valid,
)
from peers.worker import PAD
from torch import Tensor

_NEVER = 1_000_000_000


def main() -> None:
    serve(train, count)


def train(job: Job, meter: Meter) -> dict[str, str]:
    torch.set_num_threads(job.threads)

    class Watched(eole.trainer.Trainer):
        """The trainer; the meter sees each batch, and counts its target tokens itself."""

        def _train_step(
            self,
            batches: list[dict[str, Any]],
            normalization: int,
            total_stats: Statistics,
            report_stats: Statistics,
            step: int = 0,
        ) -> None:
            if isinstance(meter, CurveMeter):
                meter.translate = lambda: translate(job, self, step)
            pad = self.train_loss.padding_idx
            meter.begin(sum(int(tgt_out(batch).ne(pad).sum()) for batch in batches))
            loss, num_tokens = total_stats.loss, total_stats.n_tokens
            super()._train_step(batches, normalization, total_stats, report_stats, step)
            meter.note_loss((total_stats.loss - loss) / (total_stats.n_tokens - num_tokens))

    eole.trainer.Trainer = Watched
    with tempfile.TemporaryDirectory() as folder, suppress(Done):
        eole_train(config(job, folder))
    return {"eole": version("eole"), "torch": torch.__version__}


def translate(job: Job, trainer: eole.trainer.Trainer, step: int) -> list[list[int]]:
    """Return the greedy translation of each validation source, by a model that is saved for it."""
    trainer.model_saver.save(step)
    settings = PredictConfig(
        model_path=[str(Path(trainer.model_saver.model_path) / f"step_{step}")],
        src="",
        world_size=1,
        gpu_ranks=[],
        beam_size=1,
        top_k=1,  # its greedy search
        max_length=VALID_MAX_TOKENS,
        max_length_ratio=0,
    )
    predictor = build_predictor(settings, device_id=-1)
    trained = {name for name, _ in trainer.model.named_parameters()}
    with torch.no_grad():
        for name, weight in predictor.model.named_parameters():
            if name not in trained:  # eole adds biases to its encoder, and leaves them unset
                weight.zero_()

    def decode(sources: list[list[int]]) -> list[list[int]]:
        found = predictor.predict_batch(make_batch(sources), attn_debug=False)
        return [hypotheses[0].tolist() for hypotheses in found["predictions"]]

    return translate_valid(job, decode)


def make_batch(sources: list[list[int]]) -> dict[str, Any]:
    """Return sources as eole's search reads them."""
    width = max(map(len, sources))
    return {
        "src": torch.tensor([ids + [PAD] * (width - len(ids)) for ids in sources]),
        "srclen": torch.tensor([len(ids) for ids in sources]),
        "ind_in_bucket": list(range(len(sources))),
    }


def tgt_out(batch: dict[str, Any]) -> Tensor:
    """Return what a batch trains to predict: all but the first of each target."""
    ids: Tensor = batch["tgt"][:, 1:]
    return ids


def config(job: Job, model_dir: str) -> TrainConfig:
    """Return what eole reads from its YAML file.

    A bucket is an epoch. Batches are made in the training process, so that no other core helps.
    """
    corpus = Path(job.corpus)
    return TrainConfig(
        seed=1,
        src_vocab=str(corpus / "whole.vocab"),
        share_vocab=True,
        data={
            "train": {
                "path_src": str(corpus / "train.eos.en"),
                "path_tgt": str(corpus / "train.de"),
            }
        },
        model=model_settings(job.num_layers, job.d_model, job.d_ff, job.num_heads),
        training={
            "model_path": model_dir,
            "world_size": 1,
            "gpu_ranks": [],
            "num_workers": 0,
            "bucket_size": job.num_pairs,
            "batch_type": "tokens",
            "batch_size": job.batch_tokens,
            "normalization": "tokens",
            "train_steps": _NEVER,
            "valid_steps": _NEVER,
            "save_checkpoint_steps": _NEVER,
            "dropout": [job.dropout],
            "attention_dropout": [0.0],
            "label_smoothing": job.label_smoothing,
            "param_init_method": "xavier_uniform",
            "optim": "adam",
            "adam_beta1": job.adam_betas[0],
            "adam_beta2": job.adam_betas[1],
            "max_grad_norm": job.max_grad_norm,
            "decay_method": "noam",
            "warmup_steps": job.warmup_steps,
            "learning_rate": job.lr * (job.warmup_steps * job.d_model) ** 0.5,
        },
    )


def model_settings(num_layers: int, d_model: int, d_ff: int, num_heads: int) -> dict[str, Any]:
    """Return the section `model` of eole's config.

    Layers have the biases of the paper, but are pre-norm: eole has no other decoder layers.
    """
    return {
        "architecture": "transformer",
        "layers": num_layers,
        "hidden_size": d_model,
        "heads": num_heads,
        "transformer_ff": d_ff,
        "add_qkvbias": True,
        "add_ffnbias": True,
        "share_embeddings": True,
        "share_decoder_embeddings": True,
        "embeddings": {
            "word_vec_size": d_model,
            "position_encoding_type": "SinusoidalInterleaved",
        },
    }


def count(job: Job) -> Epoch:
    with tempfile.TemporaryDirectory() as folder:
        context = TrainingInitializer(config(job, folder)).initialize()
    batches = build_dynamic_dataset_iter(
        context.config, context.transforms, context.vocabs, task=CorpusTask.TRAIN
    )
    pad = context.vocabs["tgt"][context.config.pad_token]
    epoch = Epoch()
    for batch, bucket in batches:
        if bucket > 0:
            return epoch
        src, tgt = batch["src"], tgt_out(batch)
        src_ids, tgt_ids = src[src != pad].tolist(), tgt[tgt != pad].tolist()
        epoch.add(len(src), src_ids, tgt_ids, src.shape[1] + tgt.shape[1])
    raise AssertionError("batches go on for ever")


if __name__ == "__main__":
    main()
