"""The training loop: from a prepared run folder to the final weights."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtrain import __version__
from mtrain.config import config_file
from mtrain.config.sections import Config
from mtrain.data import prepare
from mtrain.data.batch import MicroBatchSplit, Position, UpdateBatches
from mtrain.data.loader import TrainingData
from mtrain.decode.options import DecodingOptions
from mtrain.decode.translator import Translator
from mtrain.errors import RunError, WriteError
from mtrain.evaluation.metrics import bleu, noise_bleu, tokenizer_note
from mtrain.io.atomic import sweep, temporary_path
from mtrain.io.text_width import count
from mtrain.model.transformer import num_parameters
from mtrain.ops import native
from mtrain.run import checkpoint, finetune
from mtrain.run.checkpoint import Environment, FinalWeightsInfo
from mtrain.run.load_model import build_model, set_weights
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime import device
from mtrain.runtime.prefetch import read_ahead
from mtrain.runtime.process_group import SINGLE, ProcessGroup
from mtrain.runtime.signals import STOPPING, Signals, Stopped
from mtrain.tokenizer import sentencepiece
from mtrain.training.checkpoint_manager import CheckpointManager, check_unfinished
from mtrain.training.compilation import compile_layers, device_of, uncompiled
from mtrain.training.gradients import Gradients
from mtrain.training.loss import LossSum
from mtrain.training.meters import AsyncScalars, RunningMeter
from mtrain.training.reporting import TrainingLogger, Validation
from mtrain.training.schedule import (
    budget_spent,
    follows_clock,
    format_stopping_rule,
    learning_rate,
    reached_limits,
)
from mtrain.training.training_state import TrainingState, random_state, set_random_state
from mtrain.training.validation import ValidationSet

if TYPE_CHECKING:
    from mtrain.training.sharded_model import ShardedModel

_MAX_SKIPPED = 10  # updates in a row with a non-finite loss or gradient
_MAX_PENDING = 8  # updates whose results have not been read from a GPU
_NUM_PREFETCHED = 4  # updates copied to pinned memory ahead of use
_BAR_INTERVAL_S = 0.5
_MIN_STEPS, _MIN_WARMUPS = 1000, 3  # updates before an ignored source is reported


@torch.inference_mode(False)  # in case the caller enabled it
def train(
    config: Config,
    run: RunDir,
    process_group: ProcessGroup = SINGLE,
    log: RunLog | None = None,
    stop: threading.Event | None = None,
) -> bool:
    """Train in `run`, from its newest checkpoint if there is one, and write the final weights.

    Returns False if the training had already ended, with final weights.

    Args:
        config: of the training, the same on every rank.
        run: its prepared folder; only rank 0 writes there.
        process_group: the ranks.
        log: of rank 0; by default lines go to stderr.
        stop: set by another thread, it stops the training as SIGTERM does.

    Raises:
        RunError: if the training in the run folder cannot go on, or if the ranks see different
            folders.
        Stopped: on SIGINT, SIGTERM or SIGHUP, after saving.
    """
    device.keep_freed_memory()
    if process_group.is_first:
        check_unfinished(run)
        lock, log = run.locked(), log or RunLog(run.metrics_path)
    else:
        lock, log = nullcontext(), RunLog(None, console=None, has_bar=False)
    with lock, log:
        _check_shared(run, process_group)
        trainer = Trainer(config, run, log, process_group)
        if not trainer.resume():
            return False
        if process_group.is_first:
            trainer.log_header()
        with (
            Signals(process_group.size > 1, stop) as signals,
            closing(trainer.gradients.workers),
        ):
            trainer.probe_memory()
            trainer.run(signals)
        trainer.finish()
    return True


class Trainer:
    """The loop over updates, with validation, checkpoints and logging between them.

    Attributes:
        state: the state that updates change and checkpoints save.
        pending: updates whose results have not been read; `max_pending` of them on a GPU.
    """

    def __init__(
        self, config: Config, run: RunDir, log: RunLog, process_group: ProcessGroup = SINGLE
    ) -> None:
        self.config, self.settings, self.run_dir, self.log = config, config.training, run, log
        self.process_group = process_group
        self.split = MicroBatchSplit(
            self.settings.accumulate, process_group.rank, process_group.size
        )
        self.device = device_of(config, process_group)
        device.avoid_cudnn_attention()
        torch.manual_seed(config.seed)
        self.tokenizer = sentencepiece.load(run.tokenizer_dir)
        self.fingerprint = self.tokenizer.fingerprint()
        self.data = TrainingData(
            run.data_dir, self.tokenizer, config.seed, config.tokenizer.sampling_alpha
        )
        self.valid = ValidationSet(
            prepare.read_valid(run),
            self.tokenizer,
            self.settings.batch_tokens,
            config.data.max_tokens,
        )
        self.model = build_model(config.model, self.tokenizer).to(self.device)
        self.compute_dtype = device.compute_dtype(self.settings.precision, self.device)
        self.model.compute_dtype = self.compute_dtype
        self.is_compiled = compile_layers(
            self.model, self.device, self.settings, process_group, log.say
        )
        self.gradients = Gradients(self.model, self.settings, self.device, self.log.say)
        self.sharded: ShardedModel | None = None
        if process_group.size > 1:
            from mtrain.training.data_parallel import DDPGradients, FSDPGradients

            kind = DDPGradients if self.settings.parallel == "ddp" else FSDPGradients
            self.gradients = kind(self.gradients, process_group)
            if isinstance(self.gradients, FSDPGradients):
                self.sharded = self.gradients.sharded
        self.state = TrainingState(self.model, self.settings, process_group)
        # of rank 0: another machine may lack the tokenizer of a language
        min_bleu = process_group.broadcast_float(noise_bleu(config.data.tgt_lang))
        self.state.progress.min_bleu = min_bleu
        greedy = replace(DecodingOptions.from_config(config), beam=1, mbr=None, with_scores=False)
        model = self.sharded.model if self.sharded else self.model
        self.translator = Translator(
            [model],
            self.tokenizer,
            greedy,
            self.device,
            process_group=self.sharded.process_group if self.sharded else process_group,
        )
        self.signals, self.clock = Signals(), time.monotonic()
        self.agreed_signal = 0  # the signal number that any rank has received, or 0
        self.pending = AsyncScalars()
        is_gpu = self.device.type == "cuda"
        self.num_prefetched = _NUM_PREFETCHED if is_gpu else 0
        # the loss scale depends on the result of the previous update
        self.max_pending = _MAX_PENDING if is_gpu and not self.state.grad_scaler.is_enabled else 0
        self.logger = TrainingLogger(log, self.device)
        self.checkpoints = CheckpointManager(run, self.settings, log, process_group)

    def run(self, signals: Signals, last_step: int | None = None) -> None:
        """Train until the budget or the patience is used up, or a signal is received.

        `last_step` limits a replay; it has a final validation only if the training is finished.
        """
        progress = self.state.progress
        self.state.meter.started = time.monotonic()  # without the memory probe, which compiles
        self.signals, self.clock = signals, self.state.meter.started - progress.elapsed_s
        self.log.open_bar(self._budget_spent())
        while not self._is_finished() and progress.step != last_step:
            self._enter_phase()
            with closing(self._updates()) as updates:
                self._run_phase(updates, last_step)
        if self._is_finished() and str(progress.step) not in progress.bleu_of_step:
            self._validate()
        self._save(is_leaving=True)
        self.log.close_bar()

    def _run_phase(self, updates: Iterator[UpdateBatches], last_step: int | None) -> None:
        """Make updates until the phase or the training ends."""
        progress = self.state.progress
        while not self._is_finished() and progress.step != last_step and not self._is_phase_over():
            update = next(updates)
            self._update(update)
            self.checkpoints.is_current = False
            progress.step += 1
            progress.epoch, progress.batch = update.after
            if self.process_group.size == 1:  # several ranks use the time of rank 0
                progress.elapsed_s = self.elapsed_s()
            self._report()
            if self._is_due(self.settings.validate_every):
                self._validate()
            if self.process_group.size == 1:
                self.agreed_signal = self.signals.received
            if self.agreed_signal:
                self._save(is_leaving=True)
                raise Stopped(self.agreed_signal)
            if self.checkpoints.is_due(progress.step, progress):
                self._save()

    def _is_phase_over(self) -> bool:
        """Return whether the spent budget has reached the end (`until`) of the current phase."""
        ends, phase = self.data.ends, self.state.progress.phase
        return phase < len(ends) and self._budget_spent() >= ends[phase]

    def _enter_phase(self) -> None:
        """Select the corpora of the current phase; a new phase begins a new epoch.

        Depends only on state that checkpoints save, so that a resumed training does the same.
        """
        progress, is_new = self.state.progress, False
        while self._is_phase_over():
            progress.phase, is_new = progress.phase + 1, True
            progress.epoch, progress.batch = progress.epoch + 1, 0
        self.data.enter(progress.phase)
        if is_new:
            names = " and ".join(share.name for share in self.data.shares)
            self.log.say(f"step {progress.step:,}: the training goes on with {names} alone")

    def elapsed_s(self) -> float:
        """Return the seconds spent on training and validation; a replay overrides it."""
        return time.monotonic() - self.clock

    def _updates(self) -> Generator[UpdateBatches]:
        """Yield the updates from the current position on; for a GPU, prefetched and pinned."""
        progress = self.state.progress
        start = Position(progress.epoch, progress.batch)
        updates = self.data.updates(self.settings.batch_tokens, start, self.split)
        if not self.num_prefetched:
            return updates
        return read_ahead(map(self.gradients.pin, updates), self.num_prefetched)

    def _update(self, update: UpdateBatches) -> None:
        """Make one update; divide the loss by the target tokens of all its micro-batches.

        If loss or gradient is not finite, `found_inf` makes the optimizers skip the update. A
        GPU's result is read later, so that it is not synchronised at each update.
        """
        sums = self.gradients.backward_update(update, self.state.grad_scaler.scale)
        totals = self._add_over_ranks(sums)
        self.state.grad_scaler.unscale(self.state.parameters)
        grad_norm = self._clip().double()
        is_finite = (totals[0] + grad_norm).isfinite()
        step = self.state.progress.step + 1
        if follows_clock(self.config):
            self.state.progress.unlogged_began_s.append(self.state.progress.elapsed_s)
        lr = learning_rate(self.settings, self.config.model.d_model, step, self._budget_spent())
        for optimizer in self.state.optimizers:
            optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        values = torch.cat([torch.stack([is_finite.double(), grad_norm]), totals])
        self.pending.add(step, update.num_tokens, lr, values)
        self._read_results(self.max_pending)

    def _add_over_ranks(self, sums: list[LossSum]) -> Tensor:
        """Return loss and nll over all ranks; several ranks append elapsed_s and signal counts."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for part in sums:
            totals += torch.stack([part.loss.detach(), part.nll])
        if self.process_group.size == 1:
            return totals
        elapsed_s = self.elapsed_s() if self.process_group.is_first else 0.0
        status = [elapsed_s, *(self.signals.received == number for number in STOPPING)]
        appended = torch.tensor(status, dtype=totals.dtype).to(self.device, non_blocking=True)
        return self.process_group.all_reduce_sum(torch.cat([totals, appended]))

    def _clip(self) -> Tensor:
        """Clip the gradient to `max_grad_norm`; return its norm before clipping."""
        parameters, limit = self.state.parameters, self.settings.max_grad_norm
        norm = torch.nn.utils.get_total_norm(
            [weight.grad for weight in parameters if weight.grad is not None]
        )
        if limit:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return self.process_group.full_tensor(norm)

    def _read_results(self, max_pending: int = 0) -> None:
        """Read the results of all updates but the last `max_pending` into state and meter."""
        progress = self.state.progress
        for update in self.pending.read(max_pending):
            is_finite, grad_norm, loss, nll, *status = update.values
            if status:
                progress.elapsed_s, *num_signalled = status
                received = [
                    number for number, ranks in zip(STOPPING, num_signalled, strict=True) if ranks
                ]
                self.agreed_signal = max(received, default=0)
            scaler = self.state.grad_scaler
            scaler.update(bool(is_finite))
            if is_finite:
                progress.num_skipped_in_a_row = 0
                self.state.meter.add(loss, nll, update.num_tokens)
                self.state.meter.lr, self.state.meter.grad_norm = update.lr, grad_norm
                continue
            progress.num_skipped += 1
            progress.num_skipped_in_a_row += 1
            new_scale = scaler.scale if scaler.is_enabled else None
            self.logger.log_skipped(update.step, progress.num_skipped, new_scale)
            if progress.num_skipped_in_a_row >= _MAX_SKIPPED:
                raise RunError(f"{_MAX_SKIPPED} updates in a row were skipped; {self._advice()}")

    def _report(self) -> None:
        """Move the progress bar, and log if a line is due."""
        is_due = self._is_due(self.settings.log_every)
        if is_due:
            self._read_results()
        elif not self.log.wants_note(_BAR_INTERVAL_S):
            return
        if not self.state.meter.num_tokens:  # every update was skipped, or is pending
            return
        self.logger.log_step(self.state.progress, self.state.meter, self._budget_spent(), is_due)
        if is_due:
            self.state.meter = RunningMeter()
            self.state.progress.unlogged_began_s = []

    def _validate(self) -> None:
        """Score the model on the validation set, show example translations, and log the scores."""
        self._read_results()
        self._check_weights()
        started = time.monotonic()
        scores = self._score()
        self.state.meter.pause(time.monotonic() - started)
        progress = self.state.progress
        progress.elapsed_s = self.process_group.broadcast_float(self.elapsed_s())
        turn = len(progress.bleu_of_step)
        for line in self.valid.examples(scores.hypotheses, self.settings.num_examples, turn):
            self.log.say(line)
        if self._is_past_start() and (warning := self.valid.ignored_source(scores.hypotheses)):
            self.log.say(f"step {progress.step:,}: {warning}")
        progress.note_validation(scores.loss, scores.bleu)
        self.checkpoints.is_current = False
        self.logger.log_validation(progress, scores)

    @torch.no_grad()
    def _score(self) -> Validation:
        """Return the validation scores of the current weights; all ranks must call it together."""
        translator = self.translator
        gathered = self.sharded.gathered() if self.sharded else nullcontext()
        with uncompiled(self.is_compiled), gathered:
            loss, nll = self.valid.loss(translator.model, self.settings, translator.process_group)
            if not math.isfinite(loss):
                raise RunError(f"the loss on the validation set is not finite; {self._advice()}")
            is_packed = self.device.type == "cpu" and self.sharded is None
            with self.model.packed() if is_packed else nullcontext():  # as `mtrain eval` does
                hypotheses = self.valid.translations(translator)
        score = 0.0
        if self.process_group.is_first:
            score = bleu(hypotheses, self.valid.lines.tgt, self.config.data.tgt_lang)
        return Validation(loss, nll, self.process_group.broadcast_float(score), hypotheses)

    def _save(self, is_leaving: bool = False) -> None:
        """Write a checkpoint, unless the newest one holds the current state.

        If the write fails, the older checkpoints are unchanged; training goes on, but if
        `is_leaving`, the error is raised with how to go on.
        """
        self._read_results()
        self._check_weights()
        if self.checkpoints.is_current:
            return
        try:
            self.checkpoints.save(
                self.state.to_checkpoint(), self.fingerprint, self.current_environment()
            )
        except WriteError as error:
            if is_leaving:
                start = self.checkpoints.next_start() or "the beginning"
                raise WriteError(
                    f"{error} Once there is room, the same command goes on from {start}."
                ) from None
            self.log.say(
                f"step {self.state.progress.step:,}: nothing is saved: {error} "
                "Training goes on; the next save tries again"
            )

    def finish(self) -> None:
        """Write the final weights: the average or the best checkpoint, as validation decides."""
        progress = self.state.progress
        best, averaged = self.checkpoints.final_candidates(progress)
        name, bleu = "the best checkpoint", progress.bleu_of_step[str(best)]
        loss = progress.loss_of_step.get(str(best), math.nan)
        self.log.say(f"{name} (step {best:,}): validation loss {loss:.4f}, BLEU {bleu:.2f}")
        if averaged != [best]:
            mean = f"the average of {count(len(averaged), 'checkpoint')}"
            directory = self.run_dir.checkpoints_dir
            set_weights(self.model, self._mean_of(averaged), directory, self.process_group)
            scores = self._score()
            self.log.say(f"{mean}: validation loss {scores.loss:.4f}, BLEU {scores.bleu:.2f}")
            if warning := self.valid.ignored_source(scores.hypotheses):
                self.log.say(f"{mean}: {warning}")
            if progress.quality(best) <= progress.quality_of(scores.loss, scores.bleu):
                name, bleu = mean, scores.bleu
            else:
                averaged = [best]
        if self.process_group.is_first:
            info = FinalWeightsInfo(sorted(averaged), bleu, progress.step)
            weights = dict(self._mean_of(averaged))
            checkpoint.save_model(self.run_dir.model_path, weights, self.fingerprint, info)
            self.log.say(f"{self.run_dir.model_path}: {name}")
            self.logger.log_size(self.run_dir)

    def _mean_of(self, steps: list[int]) -> checkpoint.AveragedWeights:
        """Return the mean weights of the checkpoints of some steps, not yet read."""
        directory = self.run_dir.checkpoints_dir
        paths = [checkpoint.path_of(directory, step) for step in steps]
        return checkpoint.AveragedWeights(paths, self.fingerprint)

    def resume(self) -> bool:
        """Continue from the newest checkpoint, or from the initial weights if there is none.

        Returns:
            False if the training has ended and has final weights.
        """
        path = self.checkpoints.newest()
        if path is None:
            self.log.drop_after(0)
            finetune.load_initial_weights(
                self.model, self.config, self.fingerprint, self.log, self.process_group
            )
            return True
        self.restore(path)
        progress, step = self.state.progress, self.state.progress.step
        has_ended = self._is_finished() and self.checkpoints.has_final_weights(step)
        if self.process_group.is_first and not has_ended:
            self.checkpoints.prune(progress)  # before anything is written: the disk may be full
        self.log.drop_after(step, with_validation=str(step) in progress.bleu_of_step)
        if has_ended:
            self.log.say(
                f"{self.run_dir.path}: finished at step {step:,} "
                f"(training ends {format_stopping_rule(self.settings)}); to go on, raise "
                + " and ".join(
                    f"`training.{key}`" for key in reached_limits(self.settings, progress)
                )
            )
            if self.process_group.is_first:
                self._change_finished_run()
            return False
        self.log.say(f"resuming from {path}")
        return True

    def _change_finished_run(self) -> None:
        """Save a changed `decoding`; name the other changed keys, which have no effect any more."""
        old = self.run_dir.config
        new = old.model_copy(update={"decoding": self.config.decoding})
        self.logger.say_changes(config_file.changes(old, new))
        if new != old:
            self.run_dir.save_config(new)
        ignored = config_file.changes(new, self.config).keys() - {"run_dir"}
        if ignored:
            keys = ", ".join(f"`{key}`" for key in sorted(ignored))
            self.log.say(f"{self.run_dir.path}: has finished; the changes of {keys} have no effect")

    def restore(self, path: Path) -> None:
        """Restore the state that a checkpoint folder holds."""
        self.state.from_checkpoint(path, self.fingerprint)
        self.data.enter(self.state.progress.phase)
        self.checkpoints.is_current = True

    def current_environment(self) -> Environment:
        """Return all that bit-identical training depends on besides config and data."""
        cpu = f"{device.processor()}, {torch.backends.cpu.get_cpu_capability()}"
        size = self.gradients.oom_size
        return Environment(
            __version__,
            torch.__version__,
            self.device.type,
            torch.cuda.get_device_name() if self.device.type == "cuda" else cpu,
            str(self.compute_dtype).removeprefix("torch."),
            self.gradients.workers.count,
            native.name(),
            "whole" if size == math.inf else f"halved from {size:,.0f} tokens",
            self.process_group.size,
        )

    def log_header(self) -> None:
        """Log model, data, device and duration, and write the config into the run folder."""
        logger, step = self.logger, self.state.progress.step
        logger.log_changes(self.run_dir, self.config, step)
        if self.run_dir.config != self.config:
            self.run_dir.save_config(self.config)
        self.log.say(f"model    {num_parameters(self.model):,} parameters")
        valid = f"{len(self.valid.lines.src):,} for validation"
        if self.valid.num_too_long:
            valid += f", {self.valid.num_too_long:,} of them too long to be in its loss"
        logger.log_data(self.run_dir, self.settings, self.data, self.tokenizer, valid, step)
        ended = self.data.ends[: self.state.progress.phase]
        if ended and self._budget_spent() < ended[-1]:
            self.log.say(
                f"until    corpora that ended at {ended[-1]:g} of the budget or before stay out, "
                f"although {self._budget_spent():.2g} of it is spent now"
            )
        logger.log_device(self.compute_dtype, self.gradients.workers.count)
        logger.log_ranks(self.settings, self.split)
        if note := tokenizer_note(self.config.data.tgt_lang):
            self.log.say(f"scores   {note}")
        if self.is_compiled:
            self.log.say(
                "compile  the layers, for a minute or so; `training.compile: false` spares it"
            )
        self.log.say(f"stops    {format_stopping_rule(self.settings)}")

    def probe_memory(self) -> None:
        """Run the largest batches, which sets `oom_size`; restore all other state."""
        state = random_state()
        for phase in range(len(self.data.ends) + 1):
            self.data.enter(phase)
            for batch in self.data.largest(self.settings.batch_tokens):
                part = batch.split(self.split.num_parts)[0]
                self.gradients.probe_memory(part)
        self.data.enter(self.state.progress.phase)
        self.model.zero_grad(set_to_none=True)
        self.gradients.warm_up(part)
        self.model.zero_grad(set_to_none=True)
        set_random_state(state)

    def _check_weights(self) -> None:
        """Raise RunError if a weight is not finite."""
        if not self.state.is_finite():
            raise RunError(f"the weights are no longer finite numbers; {self._advice()}")

    def _advice(self) -> str:
        advice = "take a lower `training.lr` or more `training.warmup_steps`"
        start = self.checkpoints.next_start()
        return f"{advice}, and the same command goes on from {start}." if start else f"{advice}."

    def _budget_spent(self) -> float:
        return budget_spent(self.settings, self.state.progress)

    def _is_finished(self) -> bool:
        return bool(reached_limits(self.settings, self.state.progress))

    def _is_past_start(self) -> bool:
        """Return whether outputs should depend on the source; early in training they do not."""
        num_steps = max(_MIN_STEPS, _MIN_WARMUPS * self.settings.warmup_steps)
        return self.state.progress.step >= num_steps or self._budget_spent() >= 0.5

    def _is_due(self, every: int) -> bool:
        return self.state.progress.step % every == 0


def _check_shared(run: RunDir, process_group: ProcessGroup) -> None:
    """Check that a new file in rank 0's run folder is seen by all ranks: none has a copy of it."""
    if process_group.size == 1:
        return
    path = run.path / "seen"
    if process_group.is_first:
        sweep(path)
    with temporary_path(path) if process_group.is_first else nullcontext(path) as beside:
        if process_group.is_first:
            beside.touch()
        name = process_group.broadcast_bytes(beside.name.encode()).decode()
        is_seen = process_group.all_gather_bytes(b"yes" * (run.path / name).exists())
    if not all(is_seen):
        raise RunError(
            f"{run.path}: must be on a disk that all ranks see, but is another folder to rank "
            f"{is_seen.index(b'')}, or none."
        )
