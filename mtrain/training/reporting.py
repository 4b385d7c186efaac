"""Log lines of a training, on stderr and in `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mtrain.config import config_file
from mtrain.config.sections import Config, TrainingConfig
from mtrain.corpus import dropped
from mtrain.data import prepare
from mtrain.data.batch import MicroBatchSplit
from mtrain.data.loader import TrainingData
from mtrain.io.text_width import count
from mtrain.ops import native
from mtrain.run.checkpoint import Progress
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime.device import compute_dtype
from mtrain.tokenizer.sentencepiece import Tokenizer
from mtrain.training.meters import RunningMeter


class Validation(NamedTuple):
    """Scores on the validation set: means per target token, and BLEU by greedy search."""

    loss: float
    nll: float
    bleu: float
    hypotheses: Sequence[str] = ()


class TrainingLogger:
    """Logs one training."""

    def __init__(self, log: RunLog, device: torch.device) -> None:
        self.log, self.device = log, device

    def say_changes(self, changes: Mapping[str, Sequence[object]]) -> None:
        """Say each changed key with both values, from `config_file.changes`."""
        for key, values in changes.items():
            before, now = (json.dumps(value, ensure_ascii=False) for value in values)  # as in YAML
            self.log.say(f"changed  {key}: {before} before, {now} now")

    def log_changes(self, run: RunDir, config: Config, step: int) -> None:
        """Log how config and corpora differ from before, if it resumes at `step` > 0."""
        if not step:
            return
        changes = config_file.changes(run.config, config)
        changes.pop("run_dir", None)
        self.say_changes(changes)
        if changes:
            self.log.metrics({"step": step, "changed_config": changes})
        changed = prepare.changed_corpora(run)
        if changed and not self.log.holds("changed_corpora", changed):
            self.log.metrics({"step": step, "changed_corpora": changed})

    def log_data(
        self,
        run: RunDir,
        config: TrainingConfig,
        data: TrainingData,
        tokenizer: Tokenizer,
        valid: str,
        step: int,
    ) -> None:
        """Log the sizes of the corpora, of an update and of an epoch."""
        counts = dropped.read_counts(run.data_dir)
        if not step and not self.log.holds("pairs_dropped", counts):
            self.log.metrics({"step": 0, "num_pairs": len(data), "pairs_dropped": counts})
        plan = data.plan(config.batch_tokens)
        tokens = f"{data.num_src_tokens:,} source and {data.num_tgt_tokens:,} target"
        num_updates = plan.num_batches / config.accumulate  # an update may span epochs
        for line in (
            f"vocab    {prepare.format_vocabulary_sizes(tokenizer)}",
            f"pairs    {len(data):,} for training, dropped {dropped.format_counts(counts)},",
            f"         {valid}",
            *(f"mixed    {share}" for share in data.format_shares()),
            f"tokens   {tokens} an epoch",
            f"batches  {plan.num_batches:,} an epoch, {plan.padding:.1%} padding",
            f"updates  {num_updates:{',.0f' if num_updates >= 10 else '.2g'}} an epoch, "
            f"accumulation {config.accumulate}",
        ):
            self.log.say(line)

    def log_device(self, dtype: torch.dtype, num_threads: int) -> None:
        """Log the device, its threads and the dtype."""
        text = f"{self.device}, {str(dtype).removeprefix('torch.')}"
        if self.device.type == "cpu":
            text += f", {count(num_threads, 'thread')}, kernels {native.describe()}"
        self.log.say(f"device   {text}")
        fastest = compute_dtype("auto", self.device)
        is_half = dtype == torch.bfloat16 or (dtype == torch.float16 and self.device.type == "cpu")
        if is_half and dtype != fastest:
            name = str(fastest).removeprefix("torch.")
            self.log.say(f"         {name} is faster here: `training.precision: auto` takes it")

    def log_ranks(self, config: TrainingConfig, split: MicroBatchSplit) -> None:
        """Log how ranks split an update; for a single rank, which settings have no effect."""
        if split.num_ranks == 1:
            for key, default in (("parallel", "ddp"), ("exchange", "float32")):
                if (value := getattr(config, key)) != default:
                    self.log.say(
                        f"ranks    1, to which `training.{key}: {value}` makes no difference"
                    )
            return
        parts = "whole batches"
        if split.num_parts > 1:
            parts = f"every batch is cut in {split.num_parts}"
        share = f"{len(split.of_rank()):,} of the {split.num_micro_batches:,}"
        work = f"each with {share} micro-batches of an update"
        self.log.say(f"ranks    {split.num_ranks:,}, {work}: {parts};")
        kept = "the whole model" if config.parallel == "ddp" else "a part of the model"
        self.log.say(f"         each keeps {kept}; gradients are exchanged in {config.exchange}")

    def log_step(self, progress: Progress, meter: RunningMeter, spent: float, is_due: bool) -> None:
        """Move the progress bar to the fraction `spent` of the budget; log a line if it is due."""
        loss, nll, tokens_per_s = meter.rates()
        note = (
            f"step {progress.step:,}, loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s, "
            f"lr {meter.lr:.2e}"
        )
        self.log.advance(spent, note, is_due)
        if is_due:
            began_s = progress.unlogged_began_s
            self.log.metrics(
                {
                    "step": progress.step,
                    "epoch": progress.epoch,
                    "loss": loss,
                    "nll": nll,
                    "perplexity": _perplexity(nll),
                    "lr": meter.lr,
                    "tgt_tokens_per_s": tokens_per_s,
                    "grad_norm": meter.grad_norm,
                    "updates_skipped": progress.num_skipped,
                    "elapsed_s": progress.elapsed_s,
                    "memory_mib": _peak_memory_mib(self.device),
                    **({"updates_began_s": began_s} if began_s else {}),
                }
            )

    def log_validation(self, progress: Progress, scores: Validation) -> None:
        """Log the validation scores of a step, and the best step so far."""
        self.log.say(
            f"step {progress.step:,}: validation loss {scores.loss:.4f}, "
            f"perplexity {_perplexity(scores.nll):.2f}, BLEU {scores.bleu:.2f} "
            f"(best at step {progress.best_steps()[0]:,})"
        )
        self.log.metrics(
            {
                "step": progress.step,
                "epoch": progress.epoch,
                "valid_loss": scores.loss,
                "valid_nll": scores.nll,
                "valid_perplexity": _perplexity(scores.nll),
                "valid_bleu": scores.bleu,
                "elapsed_s": progress.elapsed_s,
            }
        )

    def log_size(self, run: RunDir) -> None:
        """Log the size of the run folder, and of its checkpoints."""
        total, checkpoints = map(_num_megabytes, (run.path, run.checkpoints_dir))
        self.log.say(
            f"size     {run.path} takes {total:,.1f} MB; its checkpoints are {checkpoints:,.1f} MB "
            "of that, needed only to continue the training"
        )

    def log_skipped(self, step: int, num_skipped: int, new_scale: float | None) -> None:
        """Log that the update of a step was skipped, and the new loss scale, if any."""
        self.log.say(
            f"step {step:,}: the loss or its gradient is not finite; the update is skipped "
            f"({num_skipped:,} so far)"
        )
        if new_scale is not None:
            self.log.say(f"  the loss is multiplied by {new_scale:,.0f} from now on")


def _num_megabytes(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700.0))


def _peak_memory_mib(device: torch.device) -> float:
    """Return the peak memory of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
