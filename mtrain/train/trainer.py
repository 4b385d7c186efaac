"""The training loop: from a prepared run folder to the weights that translate."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator
from contextlib import closing, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from mtrain.config import config_file
from mtrain.config.sections import Config
from mtrain.data import prepare
from mtrain.data.loader import TrainingData
from mtrain.data.sampler import MicroBatchSplit, Position, UpdateBatches
from mtrain.decode.translator import Translator
from mtrain.errors import RunError, WriteError
from mtrain.evaluate.metrics import bleu
from mtrain.io.atomic import sha256_if_readable
from mtrain.io.text_width import count
from mtrain.model.transformer import num_parameters
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Progress, Weights
from mtrain.run.load_model import build_model, set_weights
from mtrain.run.logger import NullLogger, RunLog
from mtrain.run.run_dir import RunDir
from mtrain.run.tensorboard import Board
from mtrain.runtime import device
from mtrain.runtime.prefetch import read_ahead
from mtrain.runtime.process_group import SINGLE, ProcessGroup
from mtrain.runtime.signals import STOPPING, Signals, Stopped
from mtrain.tokenizer import sentencepiece
from mtrain.train import environment, finetune, grad_scaler, optimizer_state, stopping
from mtrain.train.checkpoint_manager import CheckpointManager, check_model, check_unfinished
from mtrain.train.compilation import compile_layers, device_of, uncompiled
from mtrain.train.gradients import Gradients
from mtrain.train.loss import LossSum
from mtrain.train.meters import AsyncScalars, RunningMeter
from mtrain.train.reporting import HeaderLogger, TrainingLogger, Validation
from mtrain.train.schedule import learning_rate
from mtrain.train.validation import ValidationSet

_MAX_LEFT_OUT = 10  # updates in a row that are not finite
_BEHIND = 8  # updates that a GPU may be behind
_AHEAD = 4  # updates that are laid out for a GPU before it comes to them
_BAR_INTERVAL_S = 0.5


@torch.inference_mode(False)  # whatever its caller's mode is
def train(
    config: Config, run: RunDir, process_group: ProcessGroup = SINGLE, board: Board | None = None
) -> None:
    """Train in `run`, from its newest checkpoint if it has one, and write its final weights.

    Of several ranks, each with the same config, the first writes and speaks.

    Args:
        config: of the training.
        run: its folder, prepared.
        process_group: the ranks.
        board: of the first rank, gets the numbers that are logged.

    Raises:
        RunError: if the run folder cannot be trained in, is finished already, or is not the same
            to all ranks.
        Stopped: on SIGINT or SIGTERM, after saving.
    """
    device.keep_freed_memory()
    _check_shared(run, process_group)
    check_unfinished(run)
    check_model(config, run)
    lock = run.locked() if process_group.is_first else nullcontext()
    log = (
        RunLog(run.metrics_path, board) if process_group.is_first else NullLogger(run.metrics_path)
    )
    with lock, log:
        trainer = Trainer(config, run, log, process_group)
        trainer.resume()
        if process_group.is_first:
            trainer.open(run.load_config())
        with (
            Signals(may_repeat=process_group.size > 1) as signals,
            closing(trainer.gradients.workers),
        ):
            trainer.try_largest()
            trainer.run(signals)
        trainer.finish()


class Trainer:
    """A model in training: one update after the other, with what happens between them."""

    def __init__(
        self, config: Config, run: RunDir, log: RunLog, process_group: ProcessGroup = SINGLE
    ) -> None:
        self.config, self.settings, self.run_dir, self.log = config, config.training, run, log
        self.process_group, self.deal = (
            process_group,
            MicroBatchSplit(self.settings.accumulate, process_group.rank, process_group.size),
        )
        self.device = device_of(config, process_group)
        device.avoid_cudnn_attention()
        torch.manual_seed(config.seed)
        self.tokenizer = sentencepiece.load(run.tokenizer_dir)
        self.fingerprint = self.tokenizer.fingerprint()
        self.data = TrainingData(
            run.data_dir, self.tokenizer, config.seed, config.tokenizer.sampling_alpha
        )
        valid, batch_tokens = prepare.read_valid(run), self.settings.batch_tokens
        self.valid = ValidationSet(valid, self.tokenizer, batch_tokens)
        self.model = build_model(config.model, self.tokenizer).to(self.device)
        self.compute_dtype = device.compute_dtype(self.settings.precision, self.device)
        self.model.compute_in(self.compute_dtype)
        self.is_compiled = compile_layers(self.model, self.device, config, process_group)
        self.gradients = self._gradients()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(  # with no weight decay, this is Adam
            self.parameters,
            betas=(self.settings.betas[0], self.settings.betas[1]),
            eps=self.settings.eps,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        greedy = config.decoding.model_copy(update={"beam": 1})
        self.translator = Translator(
            [self.model], self.tokenizer, greedy, self.device, process_group=process_group
        )
        self.progress, self.signals, self.clock = Progress(), Signals(), time.monotonic()
        self.agreed_signal = 0
        self.window, self.outcomes = RunningMeter(), AsyncScalars()
        is_gpu = self.device.type == "cuda"
        self.ahead = _AHEAD if is_gpu else 0
        needs_each = self.compute_dtype is torch.float16  # to choose the factor of the next loss
        self.behind = _BEHIND if is_gpu and not needs_each else 0
        self.reports = TrainingLogger(log, self.device)
        self.saves = CheckpointManager(run, self.settings, log, process_group)

    def _gradients(self) -> Gradients:
        alone = Gradients(self.model, self.settings.label_smoothing, self.device, self.log.say)
        if self.process_group.size == 1:
            return alone
        from mtrain.train.data_parallel import DDPGradients, FSDPGradients

        kind = DDPGradients if self.settings.parallel == "ddp" else FSDPGradients
        return kind(alone, self.process_group, self.settings.exchange)

    def run(self, signals: Signals, last_step: int | None = None) -> None:
        """Train until the target is reached, patience is lost, or a signal comes.

        Args:
            signals: what was received.
            last_step: where to end before that, without a validation that was not due.
        """
        self.signals, self.clock = signals, time.monotonic() - self.progress.elapsed_s
        grad_scaler.begin(self.progress, self.compute_dtype)
        self.log.open_bar(self._spent())
        with closing(self._updates()) as updates:
            while not self._is_done() and self.progress.step != last_step:
                dealt = next(updates)
                self._update(dealt)
                self.saves.is_current = False
                self.progress.step += 1
                self.progress.epoch, self.progress.batch = dealt.after.epoch, dealt.after.batch
                if (
                    self.process_group.size == 1
                ):  # several ranks tell each other the time, and signals
                    self.progress.elapsed_s = time.monotonic() - self.clock
                self._report()
                if self._is_due(self.settings.validate_every):
                    self._validate()
                    self.progress.elapsed_s = self.process_group.broadcast_float(
                        time.monotonic() - self.clock
                    )
                if self.process_group.size == 1:
                    self.agreed_signal = self.signals.received
                if self.agreed_signal:
                    self._save(is_leaving=True)
                    raise Stopped(self.agreed_signal)
                if self.saves.is_due(self.progress.step, self.progress):
                    self._save()
        if self._is_done() and str(self.progress.step) not in self.progress.bleu_of_step:
            self._validate()
        self._save(is_leaving=True)
        self.log.close_bar()

    def _updates(self) -> Generator[UpdateBatches]:
        """Yield updates from where the training stands; for a GPU, laid out ahead of time."""
        start = Position(self.progress.epoch, self.progress.batch)
        updates = self.data.updates(self.settings.batch_tokens, start, self.deal)
        if not self.ahead:
            return updates
        return read_ahead(map(self.gradients.lay_out, updates), self.ahead)

    def _update(self, dealt: UpdateBatches) -> None:
        """Make one update; its loss is divided by the target tokens of all shares of all ranks.

        Where its loss or gradient is not finite, the fused optimizer changes nothing. Whether that
        is so is read when later updates are under way, if the device is a GPU.
        """
        sums = self.gradients.backward_update(dealt, grad_scaler.factor(self.progress))
        totals = self._add_over_ranks(sums)
        grad_scaler.undo(self.progress, self.parameters)
        grad_norm = self._clip().double()
        is_finite = (totals[0] + grad_norm).isfinite()
        self.optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
        step = self.progress.step + 1
        lr = learning_rate(self.settings, self.config.model.d_model, step, self._spent())
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        numbers = torch.cat([torch.stack([is_finite.double(), grad_norm]), totals])
        self.outcomes.add(step, dealt.num_tokens, lr, numbers)
        self._read_outcomes(self.behind)

    def _add_over_ranks(self, sums: list[LossSum]) -> Tensor:
        """Return loss and nll of all ranks, who tell each other signals and the time besides."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for own in sums:
            totals += torch.stack([own.loss.detach(), own.nll])
        if self.process_group.size == 1:
            return totals
        elapsed_s = time.monotonic() - self.clock if self.process_group.is_first else 0.0
        besides = [elapsed_s, *(self.signals.received == one for one in STOPPING)]
        sent = torch.tensor(besides, dtype=totals.dtype).to(self.device, non_blocking=True)
        return self.process_group.all_reduce_sum(torch.cat([totals, sent]))

    def _clip(self) -> Tensor:
        """Scale the gradient down to the length that is allowed, and return how long it was."""
        grads = [weight.grad for weight in self.parameters if weight.grad is not None]
        length = torch.nn.utils.get_total_norm(grads)
        if self.settings.max_grad_norm:
            limit = self.settings.max_grad_norm
            torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, length)
        return self.process_group.full_tensor(length)

    def _read_outcomes(self, behind: int = 0) -> None:
        """Take in what came out of the updates so far, all but the last `behind`.

        Raises:
            RunError: if many in a row were left out.
        """
        for outcome in self.outcomes.read(behind):
            is_finite, grad_norm, loss, nll, *besides = outcome.numbers
            if besides:
                self.progress.elapsed_s, *signalled = besides
                received = [one for one, count in zip(STOPPING, signalled, strict=True) if count]
                self.agreed_signal = max(received, default=0)
            grad_scaler.adapt(self.progress, bool(is_finite))
            if not is_finite:
                self._leave_out(outcome.step)
                continue
            self.progress.num_left_out_in_a_row = 0
            self.window.add(loss, nll, outcome.num_tokens)
            self.window.lr, self.window.grad_norm = outcome.lr, grad_norm

    def _leave_out(self, step: int) -> None:
        """Count an update whose loss or gradient was not finite.

        Raises:
            RunError: if it is one of many in a row.
        """
        self.progress.num_left_out += 1
        self.progress.num_left_out_in_a_row += 1
        self.reports.left_out(self.progress, step)
        if self.progress.num_left_out_in_a_row >= _MAX_LEFT_OUT:
            raise RunError(f"{_MAX_LEFT_OUT} updates in a row were left out; {self._advice()}")

    def _report(self) -> None:
        """Move the progress bar, and log if a line is due."""
        is_due = self._is_due(self.settings.log_every)
        if is_due:
            self._read_outcomes()
        elif not self.log.wants_note(_BAR_INTERVAL_S):
            return
        if not self.window.num_tokens:  # every update was left out, or is under way
            return
        self.reports.updates(self.progress, self.window, self._spent(), is_due)
        if is_due:
            self.window = RunningMeter()

    def _validate(self) -> None:
        """Score the model, remember how good it was, and show a few translations."""
        self._read_outcomes()
        self._check_weights()
        started = time.monotonic()
        validation = self._score(show_examples=True)
        self.window.pause(time.monotonic() - started)
        self.progress.note_bleu(validation.bleu)
        self.saves.is_current = False
        self.reports.validation(self.progress, validation)

    @torch.no_grad()
    def _score(self, show_examples: bool = False) -> Validation:
        translator = self._translator()
        with uncompiled(self.is_compiled):
            loss = self.valid.loss(
                translator.model, self.settings.label_smoothing, self.process_group
            )
            if not math.isfinite(loss.loss):
                raise RunError(f"the loss on the validation set is not finite; {self._advice()}")
            hypotheses = translator.translate(self.valid.lines.src)
        for line in self.valid.examples(hypotheses) if show_examples else []:
            self.log.say(line)
        found = bleu(hypotheses, self.valid.lines.tgt) if self.process_group.is_first else 0.0
        return Validation(loss.loss, loss.nll, self.process_group.broadcast_float(found))

    def _translator(self) -> Translator:
        """Return what translates with the weights as they are; all ranks must ask together."""
        if self.process_group.size == 1 or self.settings.parallel == "ddp":
            return self.translator
        with torch.random.fork_rng(devices=[]):  # its first weights are drawn in vain
            model = build_model(self.config.model, self.tokenizer).to(self.device)
        model.compute_in(self.compute_dtype)
        set_weights(model, self._weights(), self.run_dir.checkpoints_dir)
        return self.translator.with_models([model])

    def _save(self, is_leaving: bool = False) -> None:
        """Write a checkpoint, unless this very state is saved.

        If the disk does not take it, the checkpoints before it are as they were, and training goes
        on, unless it `is_leaving`.

        Raises:
            WriteError: in that case, with how to go on.
        """
        self._read_outcomes()
        self._check_weights()
        if self.saves.is_current:
            return
        try:
            self.saves.add(self.snapshot(), self.fingerprint, self.made_with())
        except WriteError as error:
            if is_leaving:
                start = self.saves.next_start() or "the beginning"
                raise WriteError(
                    f"{error} Once there is room, the same command goes on from {start}."
                ) from None
            self.log.say(
                f"step {self.progress.step:,}: nothing is saved: {error} "
                "Training goes on; the next save tries again"
            )

    def finish(self) -> None:
        """Write the better of the averaged and the best checkpoint as the final weights."""
        best, averaged, found = self.saves.candidates(self.progress)
        weights = checkpoint.average([found[step] for step in averaged], self.fingerprint)
        set_weights(self.model, weights, self.run_dir.checkpoints_dir, self.process_group)
        validation = self._score()
        best_bleu = self.progress.bleu_of_step[str(best)]
        name = f"the average of {count(len(averaged), 'checkpoint')}"
        self.log.say(f"{name}: validation BLEU {validation.bleu:.2f}")
        self.log.say(f"the best checkpoint (step {best:,}): validation BLEU {best_bleu:.2f}")
        if best_bleu > validation.bleu:
            name, averaged = "the best checkpoint", [best]
            path = found[best] / "model.safetensors"
            weights = checkpoint.load_model(path, self.fingerprint)
        best_bleu = max(best_bleu, validation.bleu)
        origin = checkpoint.FinalWeightsInfo(sorted(averaged), best_bleu, self.progress.step)
        if self.process_group.is_first:
            checkpoint.save_model(self.run_dir.model_path, weights, self.fingerprint, origin)
        self.log.say(f"{self.run_dir.model_path}: {name}")

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        path = self.saves.newest()
        if path is None:
            self.log.drop_after(0)
            finetune.start(self.model, self.config, self.fingerprint, self.log, self.process_group)
            return
        self.restore(path)
        self.log.drop_after(self.progress.step)
        if self._is_done() and self.saves.has_final_weights(self.progress.step):
            raise RunError(
                f"{self.run_dir.path}: has reached its target "
                f"({stopping.format_rule(self.settings)}) at "
                f"step {self.progress.step:,}; to go on, raise `training.max_steps`, "
                "`training.max_minutes` or `training.patience`."
            )
        self.log.say(f"resuming from {path}")

    def restore(self, path: Path) -> None:
        """Become what the training was when it saved a checkpoint."""
        weights, optimizer, self.progress = checkpoint.load(path, self.fingerprint)
        set_weights(self.model, weights, path / "model.safetensors", self.process_group)
        optimizer_state.check_optimizer(self.model, optimizer, path)
        optimizer_state.set_optimizer(self.optimizer, self.model, optimizer, self.process_group)
        optimizer_state.restore_random_state(optimizer, path)
        self.window.restore(self.progress)
        self.saves.is_current = True

    def snapshot(self) -> checkpoint.Checkpoint:
        """Return all that resuming needs, as it is now; all ranks must ask together."""
        self.window.note(self.progress)
        state = optimizer_state.optimizer_tensors(self.optimizer, self.model, self.process_group)
        return checkpoint.Checkpoint(
            self._weights(), state | optimizer_state.random_state(), self.progress
        )

    def _weights(self) -> Weights:
        named = self.model.named_parameters()
        return {name: self.process_group.full_tensor(weight.detach()) for name, weight in named}

    def made_with(self) -> checkpoint.Environment:
        """Return what decides the last bits of this training."""
        own = self.gradients
        return environment.current_environment(
            self.device, self.compute_dtype, own.workers.count, own.room, self.process_group.size
        )

    def open(self, old: Config) -> None:
        """Say what is about to be trained, and keep its config, which was `old` before."""
        opening = HeaderLogger(self.config, self.run_dir, self.log, self.progress.step)
        opening.say_changes(old)
        opening.note_changed_corpora()
        opening.note_left_out(len(self.data))
        config_file.save(self.config, self.run_dir.config_path)
        num_weights = num_parameters(self.model)
        opening.say_header(self.data, self.tokenizer, len(self.valid.lines.src), num_weights)
        opening.say_device(self.device, self.compute_dtype, self.gradients.workers.count)
        opening.say_ranks(self.deal)
        opening.say_target(self.is_compiled)

    def try_largest(self) -> None:
        """Find out at once whether the memory holds the largest batches; leave no trace."""
        state = optimizer_state.random_state()
        for batch in self.data.largest(self.settings.batch_tokens):
            share = batch.split(self.deal.num_parts)[0]
            self.gradients.probe_memory(share)
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients.settle(share)
        self.optimizer.zero_grad(set_to_none=True)
        optimizer_state.set_random_state(state)

    def _check_weights(self) -> None:
        """Keep weights that are no numbers from being scored and saved.

        Raises:
            RunError: if there are some.
        """
        if not all(
            self.process_group.to_local(weight).isfinite().all() for weight in self.parameters
        ):
            raise RunError(f"the weights are no longer finite numbers; {self._advice()}")

    def _advice(self) -> str:
        advice = "take a lower `training.lr` or more `training.warmup_steps`"
        start = self.saves.next_start()
        return f"{advice}, and the same command goes on from {start}." if start else f"{advice}."

    def _spent(self) -> float:
        return stopping.budget_spent(self.settings, self.progress)

    def _is_done(self) -> bool:
        return stopping.is_reached(self.settings, self.progress)

    def _is_due(self, every: int) -> bool:
        return self.progress.step % every == 0


def _check_shared(run: RunDir, process_group: ProcessGroup) -> None:
    """Refuse a run folder that is not the first one's on every rank, before any waits for any."""
    own = [sha256_if_readable(run.config_path), prepare.read_marks(run)]
    seen = process_group.all_gather_bytes(json.dumps(own).encode())
    for rank, message in enumerate(seen):
        if message != seen[0]:
            raise RunError(
                f"{run.path}: must be on a disk that all ranks see, but is another folder to rank "
                f"{rank}, or none."
            )
