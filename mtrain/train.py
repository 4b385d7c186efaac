"""The training loop: from a prepared run folder to the weights that translate."""

from __future__ import annotations

import math
import resource
import signal
import sys
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtrain import __version__, checkpoint, kernels, ledger, native, prepare, tokenizer
from mtrain import config as configs
from mtrain.batch import Batch, collate
from mtrain.checkpoint import Progress, Weights
from mtrain.config import Config
from mtrain.corpus import changed_files
from mtrain.data import Position, TrainingData, plan_batches
from mtrain.errors import RunError, WriteError
from mtrain.loss import LossSum, label_smoothed
from mtrain.metrics import bleu
from mtrain.model import num_parameters
from mtrain.parallel import Workers
from mtrain.prepare import Lines
from mtrain.rundir import RunDir
from mtrain.runlog import RunLog
from mtrain.schedule import learning_rate
from mtrain.tokenizer import Tokenizer
from mtrain.translate import Translator, build_model, pick_device, set_weights

_NUM_EXAMPLES = 3
_MAX_EXAMPLE = 145  # characters of an example: two lines of a terminal
_MAX_LEFT_OUT = 10  # updates in a row that are not finite
_BAR_INTERVAL_S = 0.5
_OUT_OF_MEMORY = ("can't allocate memory", "could not create a primitive")  # PyTorch, oneDNN
_ADAM = ("step", "exp_avg", "exp_avg_sq")  # what it keeps of each parameter
_LEAST_TOKENS = 512  # target tokens that are worth a thread of their own


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """Training was stopped by a signal, after saving."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number


class _Task(NamedTuple):
    """A part of an update: its pairs, the target tokens of the whole update, and what to drop."""

    batch: Batch
    num_tokens: int
    seed: int | None


class _Part(NamedTuple):
    """What came out of it; a gradient for each of the model's parameters."""

    sums: LossSum
    grads: tuple[Tensor, ...]


class Validation(NamedTuple):
    """How a model does on the validation set: per target token, and in BLEU by greedy search."""

    loss: float
    nll: float
    bleu: float


def train(config: Config, run: RunDir) -> None:
    """Train in `run`, from its newest checkpoint if it has one, and write its final weights.

    Raises:
        RunError: if the run folder cannot be trained in, or has reached its target already.
        Stopped: on SIGINT or SIGTERM, after saving.
    """
    kernels.keep_freed_memory()
    _check_model(config, run)
    with run.locked(), RunLog(run.metrics_path) as log:
        trainer = Trainer(config, run, log)
        trainer.resume()
        trainer.say_changes(run.load_config())
        trainer.note_changed_corpora()
        trainer.note_left_out()
        configs.save(config, run.config_path)
        trainer.say_header()
        with Signals() as signals, closing(trainer.workers):
            trainer.try_largest()
            trainer.run(signals)
        trainer.finish()


class Trainer:
    """A model in training: one update after the other, with what happens between them."""

    def __init__(self, config: Config, run: RunDir, log: RunLog) -> None:
        self.config, self.settings, self.run_dir, self.log = config, config.training, run, log
        self.device = pick_device(self.settings.device)
        torch.manual_seed(config.seed)
        self.tokenizer = tokenizer.load(run.tokenizer_dir)
        self.fingerprint = self.tokenizer.fingerprint()
        self.data = TrainingData(
            run.data_dir, self.tokenizer, config.seed, config.tokenizer.sampling_alpha
        )
        self.valid = prepare.read_valid(run)
        self.valid_batches = _valid_batches(self.valid, self.tokenizer, self.settings.batch_tokens)
        self.model = build_model(config.model, self.tokenizer).to(self.device)
        self.parameters = list(self.model.parameters())
        self.compute_dtype = kernels.compute_dtype(self.settings.precision, self.device)
        self.model.compute_in(self.compute_dtype)
        self.workers = Workers()
        self.optimizer = torch.optim.AdamW(  # with no weight decay, this is Adam
            self.parameters,
            betas=(self.settings.betas[0], self.settings.betas[1]),
            eps=self.settings.eps,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        greedy = config.decoding.model_copy(update={"beam": 1})
        self.translator = Translator([self.model], self.tokenizer, greedy, self.device)
        self.progress = Progress()
        self.window = _Window()
        self.room = math.inf  # places of a batch that the memory did not hold
        self.is_saved = False  # as it stands

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        checkpoint.sweep(self.run_dir.checkpoints_dir)
        path = checkpoint.newest_whole(self.run_dir.checkpoints_dir, self.log.say)
        if path is None:
            self.log.drop_after(0)
            return
        self.restore(path)
        self.log.drop_after(self.progress.step)
        if self._is_done() and self.run_dir.model_path.exists():
            raise RunError(
                f"{self.run_dir.path}: has reached its target ({self._target()}) at step "
                f"{self.progress.step:,}; to go on, raise `training.max_steps`, "
                "`training.max_minutes` or `training.patience`."
            )
        self.log.say(f"resuming from {path}")

    def restore(self, path: Path) -> None:
        """Become what the training was when it saved a checkpoint."""
        weights, optimizer, self.progress = checkpoint.load(path, self.fingerprint)
        set_weights(self.model, weights, path / "model.safetensors")
        _check_optimizer(self.model, optimizer, path)
        _set_optimizer(self.optimizer, self.model, optimizer)
        _restore_random_state(optimizer, path)
        self.window.restore(self.progress)
        self.is_saved = True

    def snapshot(self) -> checkpoint.Checkpoint:
        """Return all that resuming needs, as it is now."""
        self.window.note(self.progress)
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
        state = _optimizer_tensors(self.optimizer, self.model) | _random_state()
        return checkpoint.Checkpoint(weights, state, self.progress)

    def made_with(self) -> checkpoint.MadeWith:
        """Return what decides the last bits of this training."""
        processor = f"{native.processor()}, {torch.backends.cpu.get_cpu_capability()}"
        return checkpoint.MadeWith(
            __version__,
            torch.__version__,
            self.device.type,
            torch.cuda.get_device_name() if self.device.type == "cuda" else processor,
            str(self.compute_dtype).removeprefix("torch."),
            self.workers.count,
            native.name(),
            "whole" if self.room == math.inf else f"halved from {self.room:,.0f} places",
        )

    def say_changes(self, old: Config) -> None:
        """Say what the config of a training that goes on was before, and keep it on record."""
        if not self.progress.step:
            return
        changed = [own for own in configs.changes(old, self.config) if own.key != "run_dir"]
        for change in changed:
            self.log.say(f"changed  {change.key}: {change.old!r} before, {change.new!r} now")
        if changed:
            before = {change.key: [change.old, change.new] for change in changed}
            self.log.metrics({"step": self.progress.step, "changed": before})

    def note_changed_corpora(self) -> None:
        """Keep on record, once, that corpora are no longer those that were tokenized."""
        marks = prepare.read_marks(self.run_dir)
        changed = {path: [marks[path].sha256, now] for path, now in changed_files(marks).items()}
        if self.progress.step and changed and not self.log.holds("changed_corpora", changed):
            self.log.metrics({"step": self.progress.step, "changed_corpora": changed})

    def note_left_out(self) -> None:
        """Keep on record, at the start, how many pairs there are and were left out."""
        counts = prepare.read_counts(self.run_dir)
        if not self.progress.step and not self.log.holds("pairs_left_out", counts):
            self.log.metrics({"step": 0, "num_pairs": len(self.data), "pairs_left_out": counts})

    def say_header(self) -> None:
        """Say what is about to be trained, on what, and where."""
        plan = self.data.plan(self.settings.batch_tokens)
        device = f"{self.device}, {str(self.compute_dtype).removeprefix('torch.')}"
        if self.device.type == "cpu":
            device += f", {_count(self.workers.count, 'thread')}, kernels {_say_kernels()}"
        left_out = ledger.say_counts(prepare.read_counts(self.run_dir))
        tokens = f"{self.data.num_src_tokens:,} source and {self.data.num_tgt_tokens:,} target"
        updates = math.ceil(plan.num_batches / self.settings.accumulate)
        self.log.say(f"model    {num_parameters(self.model):,} parameters")
        self.log.say(f"pieces   {prepare.say_sizes(self.tokenizer)}")
        self.log.say(f"pairs    {len(self.data):,} for training, left out {left_out},")
        self.log.say(f"         {len(self.valid.src):,} for validation")
        for share in self.data.say_shares():
            self.log.say(f"mixed    {share}")
        self.log.say(f"tokens   {tokens} an epoch")
        self.log.say(f"batches  {plan.num_batches:,} an epoch, {plan.padding:.1%} padding")
        self.log.say(
            f"updates  {updates:,} an epoch, of {_count(self.settings.accumulate, 'batch')}"
        )
        self.log.say(f"device   {device}")
        self.log.say(f"target   {self._target()}")

    def try_largest(self) -> None:
        """Find out at once whether the memory holds the largest batches; leave no trace."""
        state = _random_state()
        for batch in self.data.largest(self.settings.batch_tokens):
            self._accumulate(batch, batch.num_tgt_tokens)
        self.optimizer.zero_grad(set_to_none=True)
        _set_random_state(state)

    def run(self, signals: Signals, last_step: int | None = None) -> None:
        """Train until the target is reached, patience is lost, or a signal comes.

        Args:
            signals: what was received.
            last_step: where to end before that, without a validation that was not due.
        """
        start = Position(self.progress.epoch, self.progress.batch)
        batches = self.data.batches(self.settings.batch_tokens, start)
        clock = time.monotonic() - self.progress.elapsed_s
        self.log.open_bar(self._spent())
        while not self._is_done() and self.progress.step != last_step:
            micro_batches, positions = zip(*islice(batches, self.settings.accumulate), strict=True)
            self._update(list(micro_batches))
            self.is_saved = False
            self.progress.step += 1
            self.progress.epoch, self.progress.batch = positions[-1].epoch, positions[-1].batch
            self.progress.elapsed_s = time.monotonic() - clock
            self._report()
            if self._is_due(self.settings.validate_every):
                self._validate()
                self.progress.elapsed_s = time.monotonic() - clock
            if signals.received:
                self._save_before_leaving()
                raise Stopped(signals.received)
            if self._is_regular(self.progress.step):
                self._try_to_save()
        if self._is_done() and str(self.progress.step) not in self.progress.bleu_of_step:
            self._validate()
        self._save_before_leaving()
        self.log.close_bar()

    def finish(self) -> None:
        """Write the better of the averaged and the best checkpoint as the final weights."""
        self._prune()  # whoever was killed while saving had no time to
        found = self._whole_checkpoints()
        best_step = next(step for step in self.progress.best_steps() if step in found)
        last_steps = [step for step in reversed(found) if self._is_regular(step)]
        best_steps = [step for step in self.progress.best_steps() if step in found]
        averaged = last_steps if self.settings.average_of == "last" else best_steps
        averaged = averaged[: self.settings.average]
        weights = checkpoint.average([found[step] for step in averaged], self.fingerprint)
        set_weights(self.model, weights, self.run_dir.checkpoints_dir)
        validation = self._score()
        best_bleu = self.progress.bleu_of_step[str(best_step)]
        name = f"the average of {_count(len(averaged), 'checkpoint')}"
        self.log.say(f"{name}: validation BLEU {validation.bleu:.2f}")
        self.log.say(f"the best checkpoint (step {best_step:,}): validation BLEU {best_bleu:.2f}")
        if best_bleu > validation.bleu:
            name, best = "the best checkpoint", found[best_step] / "model.safetensors"
            weights, averaged = checkpoint.load_model(best, self.fingerprint), [best_step]
        origin = checkpoint.Origin(sorted(averaged), max(best_bleu, validation.bleu))
        checkpoint.save_model(self.run_dir.model_path, weights, self.fingerprint, origin)
        self.log.say(f"{self.run_dir.model_path}: {name}")

    def _whole_checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints that are as they were saved, by step, and warn of the others."""
        whole = {}
        for step, path in checkpoint.steps(self.run_dir.checkpoints_dir).items():
            try:
                checkpoint.check(path)
                whole[step] = path
            except RunError as error:
                self.log.say(f"{error} It is left out.")
        return whole

    def _update(self, micro_batches: list[Batch]) -> None:
        """Make one update; its loss is divided by the target tokens of all micro-batches."""
        num_tokens = sum(batch.num_tgt_tokens for batch in micro_batches)
        sums = [own for batch in micro_batches for own in self._accumulate(batch, num_tokens)]
        limit = self.settings.max_grad_norm or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        step = self.progress.step + 1
        numbers = [grad_norm.double(), *(own.loss.double() for own in sums)]
        if not torch.stack(numbers).isfinite().all():
            self._leave_out(step)
            return
        self.progress.num_left_out_in_a_row = 0
        for own in sums:
            self.window.add(own)
        lr = learning_rate(self.settings, self.config.model.d_model, step, self._spent())
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.window.lr, self.window.grad_norm = lr, grad_norm

    def _accumulate(self, batch: Batch, num_tokens: int) -> list[LossSum]:
        """Add a batch's gradients to those of the update, in halves if the memory needs it.

        Raises:
            RunError: if the memory does not hold a single pair.
        """
        self.model.train()
        if batch.num_places < self.room or len(batch.src_BS) == 1:
            parts = self._try(self._share_out(batch, num_tokens))
            if parts is not None:
                for part in parts:
                    _add_grads(self.parameters, part.grads)
                return [part.sums for part in parts]
            self._note_room(batch)
        return [own for half in batch.split(2) for own in self._accumulate(half, num_tokens)]

    def _try(self, tasks: list[_Task]) -> list[_Part] | None:
        """Return what comes out of the tasks; None if the memory does not hold them."""
        try:
            return self.workers.map(self._differentiate, tasks)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _note_room(self, batch: Batch) -> None:
        """Remember the size of a batch that the memory does not hold, and say it.

        Raises:
            RunError: if it is a single pair.
        """
        if len(batch.src_BS) == 1:
            raise RunError(
                "the memory must hold a single training pair, but does not; take a smaller model "
                "or a lower `data.max_tokens`."
            )
        self.room = batch.num_places
        self.log.say(
            f"memory   does not hold a batch of {len(batch.src_BS):,} pairs; such batches are made "
            "in halves, and the updates stay the same"
        )

    def _leave_out(self, step: int) -> None:
        """Count an update whose loss or gradient is not finite, and change nothing else.

        Raises:
            RunError: if it is one of many in a row.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.num_left_out += 1
        self.progress.num_left_out_in_a_row += 1
        self.log.say(
            f"step {step:,}: the loss or its gradient is not finite; the update is left out "
            f"({self.progress.num_left_out:,} so far)"
        )
        if self.progress.num_left_out_in_a_row >= _MAX_LEFT_OUT:
            raise RunError(f"{_MAX_LEFT_OUT} updates in a row were left out; {self._remedy()}")

    def _check_weights(self) -> None:
        """Keep weights that are no numbers from being scored and saved.

        Raises:
            RunError: if there are some.
        """
        if not all(parameter.isfinite().all() for parameter in self.parameters):
            raise RunError(f"the weights are no longer finite numbers; {self._remedy()}")

    def _remedy(self) -> str:
        advice = "take a lower `training.lr` or more `training.warmup_steps`"
        saved = checkpoint.steps(self.run_dir.checkpoints_dir)
        if not saved:
            return f"{advice}."
        return f"{advice}, and the same command goes on from the checkpoint of step {max(saved):,}."

    def _share_out(self, batch: Batch, num_tokens: int) -> list[_Task]:
        """Split a batch over the threads of a CPU; a GPU takes it whole."""
        if self.device.type != "cpu":
            return [_Task(batch.to(self.device), num_tokens, None)]
        parts = min(self.workers.count, max(1, batch.num_tgt_tokens // _LEAST_TOKENS))
        seeds = torch.randint(2**62, (parts,)).tolist()
        batches = batch.split(parts) if parts > 1 else [batch]
        return [_Task(part, num_tokens, seed) for part, seed in zip(batches, seeds, strict=False)]

    def _differentiate(self, task: _Task) -> _Part:
        """Return a batch's loss and its gradients, as a share of the update's tokens."""
        with kernels.dropout_seeds(task.seed):
            sums = self._loss(task.batch)
            grads = torch.autograd.grad(sums.loss / task.num_tokens, self.parameters)
        return _Part(sums, grads)

    def _loss(self, batch: Batch) -> LossSum:
        states_BTD = self.model(batch.src_BS, batch.src_keep_BS, batch.tgt_in_BT)
        return label_smoothed(
            states_BTD,
            self.model.output.weight,
            batch.tgt_out_BT,
            batch.tgt_keep_BT,
            self.settings.label_smoothing,
        )

    def _report(self) -> None:
        """Move the progress bar, and log if a line is due."""
        is_due = self._is_due(self.settings.log_every)
        if not is_due and not self.log.wants_note(_BAR_INTERVAL_S):
            return
        if not self.window.num_tokens:  # every update was left out
            return
        rates = self.window.rates()
        note = (
            f"step {self.progress.step:,}, loss {rates.loss:.3f}, "
            f"{rates.tokens_per_s:,.0f} tokens/s, lr {self.window.lr:.2e}"
        )
        self.log.advance(self._spent(), note, is_due)
        if is_due:
            self.log.metrics(
                {
                    "step": self.progress.step,
                    "epoch": self.progress.epoch,
                    "loss": rates.loss,
                    "nll": rates.nll,
                    "perplexity": _perplexity(rates.nll),
                    "lr": self.window.lr,
                    "tgt_tokens_per_s": rates.tokens_per_s,
                    "grad_norm": float(self.window.grad_norm),
                    "left_out": self.progress.num_left_out,
                    "elapsed_s": self.progress.elapsed_s,
                    "memory_mib": _memory_mib(self.device),
                }
            )
            self.window = _Window()

    def _validate(self) -> None:
        """Score the model, remember how good it was, and show a few translations."""
        self._check_weights()
        step, started = self.progress.step, time.monotonic()
        validation = self._score(show_examples=True)
        self.window.pause(time.monotonic() - started)
        self.progress.note_bleu(validation.bleu)
        self.is_saved = False
        best_step = self.progress.best_steps()[0]
        self.log.say(
            f"step {step:,}: validation loss {validation.loss:.4f}, "
            f"perplexity {_perplexity(validation.nll):.2f}, BLEU {validation.bleu:.2f} "
            f"(best at step {best_step:,})"
        )
        self.log.metrics(
            {
                "step": step,
                "epoch": self.progress.epoch,
                "valid_loss": validation.loss,
                "valid_nll": validation.nll,
                "valid_perplexity": _perplexity(validation.nll),
                "valid_bleu": validation.bleu,
                "elapsed_s": self.progress.elapsed_s,
            }
        )

    @torch.no_grad()
    def _score(self, show_examples: bool = False) -> Validation:
        self.model.eval()
        sums = [self._loss(batch.to(self.device)) for batch in self.valid_batches]
        num_tokens = sum(part.num_tokens for part in sums)
        if not math.isfinite(sum(float(part.loss) for part in sums)):
            raise RunError(f"the loss on the validation set is not finite; {self._remedy()}")
        hypotheses = self.translator.translate(self.valid.src)
        if show_examples:
            self._show(hypotheses)
        return Validation(
            sum(float(part.loss) for part in sums) / num_tokens,
            sum(float(part.nll) for part in sums) / num_tokens,
            bleu(hypotheses, self.valid.tgt),
        )

    def _show(self, hypotheses: list[str]) -> None:
        """Show translations of sentences from all over the validation set."""
        count = min(_NUM_EXAMPLES, len(hypotheses))
        for index in range(count):
            row = (2 * index + 1) * len(hypotheses) // (2 * count)
            self.log.say(f"  source       {_clip(self.valid.src[row])}")
            self.log.say(f"  reference    {_clip(self.valid.tgt[row])}")
            self.log.say(f"  translation  {_clip(hypotheses[row])}")

    def _try_to_save(self) -> None:
        """Save; if the disk does not take it, say so and train on."""
        try:
            self._save()
        except WriteError as error:
            self.log.say(
                f"step {self.progress.step:,}: nothing is saved: {error} "
                "Training goes on; the next save tries again"
            )

    def _save_before_leaving(self) -> None:
        """Save.

        Raises:
            WriteError: if the disk does not take it, with how to go on.
        """
        try:
            self._save()
        except WriteError as error:
            saved = checkpoint.steps(self.run_dir.checkpoints_dir)
            where = f"the checkpoint of step {max(saved):,}" if saved else "the beginning"
            raise WriteError(
                f"{error} Once there is room, the same command goes on from {where}."
            ) from None

    def _save(self) -> None:
        """Write a checkpoint, unless this very state is saved.

        Raises:
            WriteError: if the disk does not take it; the checkpoints before it are as they were.
        """
        self._check_weights()
        if self.is_saved:
            return
        directory = self.run_dir.checkpoints_dir
        checkpoint.save(directory, *self.snapshot(), self.fingerprint, self.made_with())
        self.is_saved = True
        self._prune()

    def _prune(self) -> None:
        """Delete the checkpoints that are neither of the last nor of the best."""
        directory = self.run_dir.checkpoints_dir
        last = [step for step in checkpoint.steps(directory) if self._is_regular(step)]
        best = self.progress.best_steps()[: self.settings.keep_best]
        kept = [*last[-self.settings.keep_last :], *best, self.progress.step]
        checkpoint.prune(directory, kept)

    def _is_regular(self, step: int) -> bool:
        """Tell whether a checkpoint was due at `step`, and not only saved by a signal."""
        every = self.settings.save_every
        is_due = every is not None and step % every == 0
        return is_due or str(step) in self.progress.bleu_of_step

    def _spent(self) -> float:
        """Return the share of the budget, steps or minutes, that is used up."""
        steps, minutes = self.settings.max_steps, self.settings.max_minutes
        by_steps = self.progress.step / steps if steps else 0.0
        by_time = self.progress.elapsed_s / (60 * minutes) if minutes else 0.0
        return max(by_steps, by_time)

    def _is_done(self) -> bool:
        is_patient = self.progress.num_bad_validations < self.settings.patience
        return self._spent() >= 1 or not is_patient

    def _is_due(self, every: int) -> bool:
        return self.progress.step % every == 0

    def _target(self) -> str:
        steps, minutes = self.settings.max_steps, self.settings.max_minutes
        named = [f"{steps:,} steps"] if steps else []
        named += [f"{minutes:g} minutes"] if minutes else []
        return f"{' or '.join(named)}, or {self.settings.patience} validations without a better one"


class _Rates(NamedTuple):
    loss: float
    nll: float
    tokens_per_s: float


class _Window:
    """What happened since the last logged step; reading it waits for the device."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.num_tokens = 0
        self.num_restored_tokens = 0  # they cost no time of this process
        self.loss: Tensor | float = 0.0
        self.nll: Tensor | float = 0.0
        self.lr = 0.0
        self.grad_norm: Tensor | float = 0.0

    def add(self, sums: LossSum) -> None:
        """Count one micro-batch."""
        self.loss = self.loss + sums.loss.detach()
        self.nll = self.nll + sums.nll
        self.num_tokens += sums.num_tokens

    def note(self, progress: Progress) -> None:
        """Write the sums into what a checkpoint remembers."""
        progress.unlogged_loss, progress.unlogged_nll = float(self.loss), float(self.nll)
        progress.unlogged_tokens = self.num_tokens

    def restore(self, progress: Progress) -> None:
        """Go on from the sums that a checkpoint remembers."""
        self.loss, self.nll = progress.unlogged_loss, progress.unlogged_nll
        self.num_tokens = self.num_restored_tokens = progress.unlogged_tokens

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on training."""
        self.started += seconds

    def rates(self) -> _Rates:
        """Return loss and nll per token, and target tokens per second."""
        elapsed_s = max(time.monotonic() - self.started, 1e-9)
        count, new = self.num_tokens, self.num_tokens - self.num_restored_tokens
        return _Rates(float(self.loss) / count, float(self.nll) / count, new / elapsed_s)


class Signals:
    """Remembers the first SIGINT or SIGTERM; the second one stops at once."""

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> Signals:
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for later, handler in self._before.items():
            signal.signal(later, handler)


def _check_model(config: Config, run: RunDir) -> None:
    """Refuse to go on from the checkpoints of another model."""
    old = run.load_config()
    if checkpoint.steps(run.checkpoints_dir) and config.model != old.model:
        changed = [key for key, value in config.model if value != getattr(old.model, key)]
        raise RunError(
            f"{run.path}: its checkpoints have another `model.{changed[0]}` "
            f"({getattr(old.model, changed[0])!r}); take another --run, or delete this run folder."
        )


def _valid_batches(lines: Lines, vocabulary: Tokenizer, batch_tokens: int) -> list[Batch]:
    """Encode the validation set once, in batches of like length."""
    src, tgt = vocabulary.encode_src(lines.src), vocabulary.tgt.encode(lines.tgt)
    src_lengths = np.array([len(ids) for ids in src], dtype=np.int32)
    tgt_lengths = np.array([len(ids) + 1 for ids in tgt], dtype=np.int32)
    plan = plan_batches(src_lengths, tgt_lengths, batch_tokens, np.random.default_rng(0))
    special = vocabulary.tgt
    return [
        collate(
            [src[row] for row in rows],
            [tgt[row] for row in rows],
            special.pad,
            special.bos,
            special.eos,
        )
        for rows in plan
    ]


def _add_grads(parameters: list[torch.nn.Parameter], grads: tuple[Tensor, ...]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad += grad


def _optimizer_tensors(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Weights:
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _check_optimizer(model: torch.nn.Module, tensors: Weights, path: Path) -> None:
    """Refuse the state of another optimizer, or of another model's."""
    for name, parameter in model.named_parameters():
        for key in _ADAM:
            found = tensors.get(f"{key}.{name}")
            wanted = torch.Size() if key == "step" else parameter.shape
            if found is None or found.shape != wanted or found.dtype != parameter.dtype:
                raise RunError(
                    f"{path / 'optimizer.safetensors'}: `{key}.{name}` must be "
                    f"{parameter.dtype} in the shape {tuple(wanted)}, but is not."
                )


def _set_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, tensors: Weights
) -> None:
    for name, parameter in model.named_parameters():
        for key in _ADAM:
            optimizer.state[parameter][key] = tensors[f"{key}.{name}"].to(parameter.device)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def _random_state() -> Weights:
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(tensors: Weights) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])


def _restore_random_state(tensors: Weights, path: Path) -> None:
    try:
        _set_random_state(tensors)
    except (KeyError, RuntimeError, TypeError):
        raise RunError(
            f"{path / 'optimizer.safetensors'}: must hold a state of PyTorch's random numbers, "
            "but holds none that this version can take."
        ) from None


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700.0))


def _say_kernels() -> str:
    if native.compiled() is not None:
        return "compiled"
    return f"plain ({'no C compiler was found' if native.is_wanted() else 'MTRAIN_NATIVE=0'})"


def _memory_mib(device: torch.device) -> float:
    """Return the most memory that was in use: the device's, or the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _clip(text: str) -> str:
    """Cut a line for the screen: an early model repeats itself without end."""
    return text if len(text) <= _MAX_EXAMPLE else text[: _MAX_EXAMPLE - 3] + "..."


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"
