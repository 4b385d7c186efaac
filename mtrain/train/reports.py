"""What a training says while it runs, and what it writes into `metrics.jsonl`.

What it says before its first update is in `opening`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mtrain.run.checkpoint import Progress
from mtrain.run.logger import RunLog
from mtrain.train import environment
from mtrain.train.meters import Window


class Validation(NamedTuple):
    """How a model does on the validation set: per target token, and in BLEU by greedy search."""

    loss: float
    nll: float
    bleu: float


class Reports:
    """Says how one training goes, and keeps it on record.

    Args:
        log: where.
        device: whose memory is looked at.
    """

    def __init__(self, log: RunLog, device: torch.device) -> None:
        self.log, self.device = log, device

    def updates(self, progress: Progress, window: Window, spent: float, is_due: bool) -> None:
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
