"""What a training says and keeps on record before its first update: what, on what, and where."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mtrain.config import config_file
from mtrain.config.sections import Config
from mtrain.corpus import dropped
from mtrain.corpus.reader import changed_files
from mtrain.data import prepare
from mtrain.data.loader import TrainingData
from mtrain.data.sampler import MicroBatchSplit
from mtrain.io.text_width import count
from mtrain.ops import native
from mtrain.run.checkpoint import Progress
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer.sentencepiece import Tokenizer
from mtrain.train import environment, stopping
from mtrain.train.meters import RunningMeter


class HeaderLogger:
    """The first words of a training that is about to make the update after `step`."""

    def __init__(self, config: Config, run: RunDir, log: RunLog, step: int) -> None:
        self.config, self.run, self.log, self.step = config, run, log, step

    def say_changes(self, old: Config) -> None:
        """Say what the config of a training that goes on was before, and keep it on record."""
        if not self.step:
            return
        changed = [own for own in config_file.changes(old, self.config) if own.key != "run_dir"]
        for change in changed:
            self.log.say(f"changed  {change.key}: {change.old!r} before, {change.new!r} now")
        if changed:
            before = {change.key: [change.old, change.new] for change in changed}
            self.log.metrics({"step": self.step, "changed": before})

    def note_changed_corpora(self) -> None:
        """Keep on record, once, that corpora are no longer those that were tokenized."""
        marks = prepare.read_marks(self.run)
        changed = {path: [marks[path].sha256, now] for path, now in changed_files(marks).items()}
        if self.step and changed and not self.log.holds("changed_corpora", changed):
            self.log.metrics({"step": self.step, "changed_corpora": changed})

    def note_left_out(self, num_pairs: int) -> None:
        """Keep on record, at the start, how many pairs there are and were left out."""
        counts = prepare.read_counts(self.run)
        if not self.step and not self.log.holds("pairs_left_out", counts):
            self.log.metrics({"step": 0, "num_pairs": num_pairs, "pairs_left_out": counts})

    def say_header(
        self, data: TrainingData, tokenizer: Tokenizer, num_valid: int, num_parameters: int
    ) -> None:
        """Say how large the model and the corpora are, and what an update is."""
        settings = self.config.training
        plan = data.plan(settings.batch_tokens)
        left_out = dropped.format_counts(prepare.read_counts(self.run))
        tokens = f"{data.num_src_tokens:,} source and {data.num_tgt_tokens:,} target"
        updates = math.ceil(plan.num_batches / settings.accumulate)
        for line in (
            f"model    {num_parameters:,} parameters",
            f"pieces   {prepare.format_vocabulary_sizes(tokenizer)}",
            f"pairs    {len(data):,} for training, left out {left_out},",
            f"         {num_valid:,} for validation",
            *(f"mixed    {share}" for share in data.say_shares()),
            f"tokens   {tokens} an epoch",
            f"batches  {plan.num_batches:,} an epoch, {plan.padding:.1%} padding",
            f"updates  {updates:,} an epoch, of {count(settings.accumulate, 'batch')}",
        ):
            self.log.say(line)

    def say_device(self, device: torch.device, dtype: torch.dtype, num_threads: int) -> None:
        """Say on what it is computed, and in which type."""
        said = f"{device}, {str(dtype).removeprefix('torch.')}"
        if device.type == "cpu":
            said += f", {count(num_threads, 'thread')}, kernels {native.describe()}"
        self.log.say(f"device   {said}")

    def say_ranks(self, deal: MicroBatchSplit) -> None:
        """Say who makes what of an update, if several do, and what one process does not heed."""
        settings = self.config.training
        if deal.num_ranks == 1:
            for key, default in (("parallel", "ddp"), ("exchange", "float32")):
                if (value := getattr(settings, key)) != default:
                    self.log.say(
                        f"ranks    1, to which `training.{key}: {value}` makes no difference"
                    )
            return
        parts = f"every batch is cut in {deal.num_parts}" if deal.num_parts > 1 else "whole batches"
        own = f"{len(deal.of_rank()):,} of the {deal.num_shares:,} shares of an update"
        self.log.say(f"ranks    {deal.num_ranks:,}, each with {own}: {parts};")
        kept = "the whole model" if settings.parallel == "ddp" else "a part of the model"
        self.log.say(f"         each keeps {kept}; gradients travel in {settings.exchange}")

    def say_target(self, is_compiled: bool) -> None:
        """Say how long it takes: to compile, if that is done, and then to train."""
        if is_compiled:
            self.log.say(
                "compile  the layers, for a minute or so; `training.compile: false` spares it"
            )
        self.log.say(f"target   {stopping.format_rule(self.config.training)}")


class Validation(NamedTuple):
    """How a model does on the validation set: per target token, and in BLEU by greedy search."""

    loss: float
    nll: float
    bleu: float


class TrainingLogger:
    """Says how one training goes, and keeps it on record.

    Args:
        log: where.
        device: whose memory is looked at.
    """

    def __init__(self, log: RunLog, device: torch.device) -> None:
        self.log, self.device = log, device

    def updates(self, progress: Progress, window: RunningMeter, spent: float, is_due: bool) -> None:
        """Move the progress bar to the share `spent` of the budget; if a line is due, log one."""
        rates = window.rates()
        note = (
            f"step {progress.step:,}, loss {rates.loss:.3f}, "
            f"{rates.tokens_per_s:,.0f} tokens/s, lr {window.lr:.2e}"
        )
        self.log.advance(spent, note, is_due)
        if not is_due:
            return
        self.log.metrics(
            {
                "step": progress.step,
                "epoch": progress.epoch,
                "loss": rates.loss,
                "nll": rates.nll,
                "perplexity": _perplexity(rates.nll),
                "lr": window.lr,
                "tgt_tokens_per_s": rates.tokens_per_s,
                "grad_norm": window.grad_norm,
                "left_out": progress.num_left_out,
                "elapsed_s": progress.elapsed_s,
                "memory_mib": environment.memory_mib(self.device),
            }
        )

    def validation(self, progress: Progress, found: Validation) -> None:
        """Say how good the model is, and at which step it was best."""
        self.log.say(
            f"step {progress.step:,}: validation loss {found.loss:.4f}, "
            f"perplexity {_perplexity(found.nll):.2f}, BLEU {found.bleu:.2f} "
            f"(best at step {progress.best_steps()[0]:,})"
        )
        self.log.metrics(
            {
                "step": progress.step,
                "epoch": progress.epoch,
                "valid_loss": found.loss,
                "valid_nll": found.nll,
                "valid_perplexity": _perplexity(found.nll),
                "valid_bleu": found.bleu,
                "elapsed_s": progress.elapsed_s,
            }
        )

    def left_out(self, progress: Progress, step: int) -> None:
        """Say that the update of a step was not finite."""
        self.log.say(
            f"step {step:,}: the loss or its gradient is not finite; the update is left out "
            f"({progress.num_left_out:,} so far)"
        )
        if progress.loss_scale:
            self.log.say(f"  the loss is multiplied by {progress.loss_scale:,.0f} from now on")


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700.0))
