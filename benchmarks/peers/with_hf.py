"""Train Hugging Face's MarianMTModel in a plain loop, on batches of like length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
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
from peers.worker import BOS, EOS, PAD
from torch import Tensor

_IGNORED = -100  # the label of padding


class Batch(NamedTuple):
    """Padded ids of some pairs."""

    src: Tensor
    src_keep: Tensor
    tgt_in: Tensor
    labels: Tensor
    num_tgt_tokens: int


def main() -> None:
    serve(train, count)


def train(job: Job, meter: Meter) -> dict[str, str]:
    torch.set_num_threads(job.threads)
    torch.manual_seed(1)
    model = transformers.MarianMTModel(model_config(job))
    model.train()
    optimizer = torch.optim.Adam(  # fused, as in transformers.Trainer
        model.parameters(), lr=job.lr, betas=job.adam_betas, eps=1e-9, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(job, step + 1))
    if isinstance(meter, CurveMeter):
        meter.translate = lambda: translate(job, model)
    is_short = job.precision == "bfloat16"
    products = torch.autocast("cpu", torch.bfloat16) if is_short else nullcontext()
    try:
        for batch in epochs(job):
            meter.begin(batch.num_tgt_tokens)
            with products:
                logits = model(
                    input_ids=batch.src,
                    attention_mask=batch.src_keep,
                    decoder_input_ids=batch.tgt_in,
                    use_cache=False,
                ).logits
                loss = F.cross_entropy(
                    logits.flatten(0, 1),
                    batch.labels.flatten(),
                    ignore_index=_IGNORED,
                    label_smoothing=job.label_smoothing,
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            meter.note_loss(loss.item())
    except Done:
        pass
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def rate(job: Job, step: int) -> float:
    """Return the share of the peak rate at an update, counted from 1."""
    if job.decay_steps and step > job.warmup_steps:
        return max(0.0, 1 - (step - job.warmup_steps) / (job.decay_steps - job.warmup_steps))
    return min(step / job.warmup_steps, (job.warmup_steps / step) ** 0.5)


@torch.no_grad()
def translate(job: Job, model: transformers.MarianMTModel) -> list[list[int]]:
    """Return the greedy translation of each validation source."""
    settings = transformers.GenerationConfig(
        num_beams=1,
        max_new_tokens=VALID_MAX_TOKENS,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
    )

    def decode(sources: list[list[int]]) -> list[list[int]]:
        src = pad(sources, PAD)
        keep = (src != PAD).long()
        outputs = model.generate(src, attention_mask=keep, generation_config=settings)
        return outputs[:, 1:].tolist()

    model.eval()
    outputs = translate_valid(job, decode)
    model.train()
    return outputs


def model_config(job: Job) -> transformers.MarianConfig:
    return transformers.MarianConfig(
        vocab_size=job.vocab_size,
        d_model=job.d_model,
        encoder_layers=job.num_layers,
        decoder_layers=job.num_layers,
        encoder_attention_heads=job.num_heads,
        decoder_attention_heads=job.num_heads,
        encoder_ffn_dim=job.d_ff,
        decoder_ffn_dim=job.d_ff,
        activation_function="relu",
        dropout=job.dropout,
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        init_std=job.d_model**-0.5,
        pad_token_id=PAD,
        eos_token_id=EOS,
        forced_eos_token_id=EOS,
        decoder_start_token_id=BOS,
    )


def epochs(job: Job) -> Iterator[Batch]:
    """Yield batches for ever."""
    src_ids = [[*ids, EOS] for ids in job.read_ids("train.en")]
    tgt_ids = [[*ids, EOS] for ids in job.read_ids("train.de")]
    rng = random.Random(1)
    while True:
        for rows in plan(src_ids, tgt_ids, job.batch_tokens, rng):
            yield collate([src_ids[row] for row in rows], [tgt_ids[row] for row in rows])


def plan(
    src_ids: list[list[int]], tgt_ids: list[list[int]], batch_tokens: int, rng: random.Random
) -> list[list[int]]:
    """Cut all pairs into batches of like length, in random order, under a budget with padding."""
    longer = [max(len(src), len(tgt)) for src, tgt in zip(src_ids, tgt_ids, strict=True)]
    rows = list(range(len(longer)))
    rng.shuffle(rows)
    rows.sort(key=lambda row: (longer[row], len(src_ids[row])))
    batches: list[list[int]] = [[]]
    for row in rows:
        if batches[-1] and (len(batches[-1]) + 1) * longer[row] > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    rng.shuffle(batches)
    return batches


def collate(src: list[list[int]], tgt: list[list[int]]) -> Batch:
    src_tensor = pad(src, PAD)
    return Batch(
        src_tensor,
        (src_tensor != PAD).long(),
        pad([[BOS, *ids[:-1]] for ids in tgt], PAD),
        pad(tgt, _IGNORED),
        sum(map(len, tgt)),
    )


def pad(rows: list[list[int]], filler: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def count(job: Job) -> Epoch:
    epoch = Epoch()
    for batch in epochs(job):
        src_ids = batch.src[batch.src_keep.bool()].tolist()
        tgt_ids = batch.labels[batch.labels != _IGNORED].tolist()
        epoch.add(len(batch.src), src_ids, tgt_ids, batch.src.shape[1] + batch.labels.shape[1])
        if epoch.pairs == job.num_pairs:
            return epoch
    raise AssertionError("batches go on for ever")


if __name__ == "__main__":
    main()
