"""Train with JoeyNMT: its own `train` on a config of its own, with its own token batches."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import joeynmt.training
import torch
from joeynmt import __version__ as joeynmt_version
from joeynmt.batch import Batch
from joeynmt.config import parse_global_args
from joeynmt.model import Model
from joeynmt.prediction import prepare
from joeynmt.search import search
from peers.decode_joeynmt import make_batch, swap
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

_NEVER = 1_000_000_000


def main() -> None:
    serve(train, count)


def train(job: Job, meter: Meter) -> dict[str, str]:
    torch.set_num_threads(job.threads)

    class Watched(joeynmt.training.TrainManager):
        """The trainer; the meter sees each batch, which JoeyNMT counts as we do."""

        def _train_step(self, batch: Batch) -> tuple[float, int]:
            if isinstance(meter, CurveMeter):
                meter.translate = lambda: translate(job, self.model)
            meter.begin(batch.ntokens)
            loss, num_correct = super()._train_step(batch)
            meter.note_loss(loss)
            return loss, num_correct

    joeynmt.training.TrainManager = Watched
    with tempfile.TemporaryDirectory() as folder, suppress(Done):
        joeynmt.training.train(rank=0, world_size=None, cfg=config(job, folder))
    return {"joeynmt": str(joeynmt_version), "torch": torch.__version__}


@torch.no_grad()
def translate(job: Job, model: Model) -> list[list[int]]:
    """Return the greedy translation of each validation source."""

    def decode(sources: list[list[int]]) -> list[list[int]]:
        outputs, _, _ = search(
            model=model,
            batch=make_batch(model, sources),
            max_output_length=VALID_MAX_TOKENS,
            beam_size=1,
            beam_alpha=0.0,
        )
        return [swap(ids) for ids in outputs.tolist()]

    model.eval()
    outputs = translate_valid(job, decode)
    model.train()
    return outputs


def config(job: Job, model_dir: str) -> dict[str, Any]:
    """Return what JoeyNMT reads from its YAML file."""
    corpus = Path(job.corpus)
    side = {"level": "word", "voc_file": str(corpus / "plain.vocab")}
    stack = {
        "type": "transformer",
        "num_layers": job.num_layers,
        "num_heads": job.num_heads,
        "embeddings": {"embedding_dim": job.d_model, "scale": True, "dropout": job.dropout},
        "hidden_size": job.d_model,
        "ff_size": job.d_ff,
        "dropout": job.dropout,
        "layer_norm": "post",
    }
    return {
        "name": "train_speed",
        "model_dir": model_dir,
        "use_cuda": False,
        "fp16": False,
        "random_seed": 1,
        "data": {
            "train": str(corpus / "train"),
            "dev": str(corpus / "valid"),
            "dataset_type": "plain",
            "src": {"lang": "en", **side},
            "trg": {"lang": "de", **side},
        },
        "testing": {},
        "training": {
            "normalization": "tokens",
            "label_smoothing": job.label_smoothing,
            "optimizer": "adam",
            "adam_betas": list(job.adam_betas),
            "scheduling": "warmupinversesquareroot",
            "learning_rate": job.lr,
            "learning_rate_min": 0.0,
            "learning_rate_warmup": job.warmup_steps,
            "clip_grad_norm": job.max_grad_norm,
            "batch_size": job.batch_tokens,
            "batch_type": "token",
            "epochs": _NEVER,
            "logging_freq": 100,
            "validation_freq": _NEVER,
            "shuffle": True,
        },
        "model": {
            "tied_embeddings": True,
            "tied_softmax": True,
            "initializer": "xavier_uniform",
            "embed_initializer": "normal",
            "embed_init_weight": job.d_model**-0.5,
            "encoder": stack,
            "decoder": stack,
        },
    }


def count(job: Job) -> Epoch:
    with tempfile.TemporaryDirectory() as folder:
        args = parse_global_args(config(job, folder), rank=0, mode="train")
        model, data, _, _ = prepare(args, rank=0, mode="train")
    batches = data.make_iter(
        batch_size=args.train.batch_size,
        batch_type=args.train.batch_type,
        seed=args.seed,
        shuffle=args.train.shuffle,
        eos_index=model.eos_index,
        pad_index=model.pad_index,
    )
    epoch = Epoch()
    for batch in batches:
        src_ids = batch.src[batch.src != model.pad_index].tolist()
        tgt_ids = batch.trg[batch.trg != model.pad_index].tolist()
        assert len(tgt_ids) == batch.ntokens, (len(tgt_ids), batch.ntokens)
        epoch.add(batch.nseqs, src_ids, tgt_ids, batch.src.shape[1] + batch.trg.shape[1])
    return epoch


if __name__ == "__main__":
    main()
