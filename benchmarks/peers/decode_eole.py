"""Decode with eole's own search, by a model of the same sizes with random weights.

eole has no post-norm decoder, which could carry the weights of the trained model. So every output
ends where mtrain's does, whatever the model predicts.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from eole.bin.run.train import train as eole_train
from eole.config.run import PredictConfig, TrainConfig
from eole.predict import build_predictor
from eole.predict.decode_strategy import DecodeStrategy
from eole.predict.greedy_search import GreedySearch
from peers.decoding import Ids, Job, Loaded, in_batches, run_apart, serve
from peers.with_eole import make_batch, model_settings
from peers.worker import NUM_SPECIAL

_NUM_PAIRS = 8  # to train a step on


def main() -> None:
    serve(load)


def load(job: Job) -> Loaded:
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as folder:
        run_apart(make_model, job, folder)
        config = PredictConfig(
            model_path=[str(Path(folder) / "model" / "step_1")],
            src="",
            world_size=1,
            gpu_ranks=[],
            beam_size=job.beam,
            top_k=1 if job.beam == 1 else 0,  # its greedy search
            length_penalty="wu",
            alpha=job.alpha,
            min_length=max(job.lengths),  # no eos: `end_after` decides
            max_length=max(job.lengths),
            max_length_ratio=0,
            fuse_kvq=True,
        )
        predictor = build_predictor(config, device_id=-1)
    draw_weights(predictor.model)

    def decode(rows: list[int]) -> Ids:
        sources, lengths = [job.sources[row] for row in rows], [job.lengths[row] for row in rows]
        end_after(lengths)
        found = predictor.predict_batch(make_batch(sources), attn_debug=False)
        outputs = [hypotheses[0].tolist() for hypotheses in found["predictions"]]
        assert [len(ids) for ids in outputs] == lengths
        return outputs

    return Loaded(in_batches(job, decode), {"eole": version("eole"), "torch": torch.__version__})


def end_after(lengths: list[int]) -> None:
    """Let the outputs of eole's next batch have these lengths, eos included, in every place."""

    def ensure_max_length(self: DecodeStrategy) -> None:
        is_greedy = isinstance(self, GreedySearch)
        rows = self.original_batch_idx if is_greedy else self._batch_offset
        ends = [len(self) - 1 == lengths[row] for row in rows.tolist()]
        self.is_finished_list = [[is_end] * self.parallel_paths for is_end in ends]

    DecodeStrategy.ensure_max_length = ensure_max_length


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Draw all weights anew: eole leaves biases as the memory was, which may hold NaN."""
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.xavier_uniform_(weight)
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)


def make_model(job: Job, folder: str) -> None:
    """Train a step, which writes a model."""
    assert job.num_encoder_layers == job.num_decoder_layers, "eole's stacks are alike"
    sources = Path(folder) / "sources"
    lines = [" ".join(map(str, ids[:-1])) for ids in job.sources[:_NUM_PAIRS]]
    sources.write_text("\n".join(lines) + "\n", encoding="utf-8")
    vocabulary = Path(folder) / "vocabulary"
    words = ["<blank>", "<unk>", "<s>", "</s>", *map(str, range(NUM_SPECIAL, job.vocab_size))]
    vocabulary.write_text("\n".join(words) + "\n", encoding="utf-8")
    eole_train(
        TrainConfig(
            seed=1,
            src_vocab=str(vocabulary),
            share_vocab=True,
            data={"train": {"path_src": str(sources), "path_tgt": str(sources)}},
            model=model_settings(job.num_decoder_layers, job.d_model, job.d_ff, job.num_heads),
            training={
                "model_path": str(Path(folder) / "model"),
                "world_size": 1,
                "gpu_ranks": [],
                "num_workers": 0,
                "bucket_size": _NUM_PAIRS,
                "batch_type": "sents",
                "batch_size": _NUM_PAIRS,
                "train_steps": 1,
                "valid_steps": 1,
                "save_checkpoint_steps": 1,
                "dropout": [0.0],
            },
        )
    )


if __name__ == "__main__":
    main()
