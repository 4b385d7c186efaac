"""Is a run folder as it should be? Looks at every part of it, and changes none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from mtrain.config.sections import Config
from mtrain.corpus import dropped
from mtrain.corpus.reader import changed_files
from mtrain.data import loader, prepare
from mtrain.decode.beam import Hypothesis
from mtrain.decode.translator import EncodedSource, load
from mtrain.doctor import replay
from mtrain.doctor.replay import Replayed, Span
from mtrain.errors import ConfigError, RunError, UserError, WriteError
from mtrain.model.transformer import num_parameters
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Weights
from mtrain.run.load_model import LoadOptions, build_model, set_weights
from mtrain.run.logger import Console, read_metrics
from mtrain.run.run_dir import RunDir
from mtrain.runtime.device import pick_device
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

Verdict = Literal["ok", "skipped", "changed", "warn", "FAILED"]
_NUM_LINES = 5
_TIE = 1e-3  # by which the log-probabilities of two translations differ that rounding may swap
_ROUNDING = 0.01  # of the way that the weights went


class CheckResult(NamedTuple):
    """A part of a run folder, how it is, and a short fact or what to do."""

    part: str
    verdict: Verdict
    fact: str

    def line(self) -> str:
        """Return it as it is printed."""
        return f"{self.part:<12} {self.verdict:<8} {self.fact}"


def examine(run: RunDir, console: Console, wants_replay: bool = True) -> Iterator[CheckResult]:
    """Yield what was found of each part of a run folder, as it is found.

    Raises:
        RunError: if this is no run folder, or another process is training in it.
    """
    parts = (run.config_path, run.tokenizer_dir, run.model_path)
    if not any(path.exists() for path in parts):
        run.load_config()
    with run.left_alone():
        yield from _Examination(run, console, wants_replay).findings()


class _Skip(Exception):  # noqa: N818 - nothing went wrong
    """A part cannot be looked at; the text says why."""


class _Examination:
    """One look at a run folder; what a check has read, later ones need not read again."""

    def __init__(self, run: RunDir, console: Console, wants_replay: bool) -> None:
        self.run, self.console, self.wants_replay = run, console, wants_replay
        self.config: Config | None = None
        self.vocabulary: Tokenizer | None = None
        self.has_data = self.has_model = False
        self.whole: dict[int, Path] = {}

    def findings(self) -> Iterator[CheckResult]:
        checks: dict[str, Callable[[], Iterator[CheckResult | str]]] = {
            "config": self._check_config,
            "tokenizer": self._check_tokenizer,
            "data": self._check_data,
            "corpora": self._check_corpora,
            "checkpoints": self._check_checkpoints,
            "model": self._check_model,
            "translates": self._check_translations,
            "resume": self._check_resume,
        }
        for part, check in checks.items():
            try:
                for found in check():
                    yield (
                        found if isinstance(found, CheckResult) else CheckResult(part, "ok", found)
                    )
            except _Skip as reason:
                yield CheckResult(part, "skipped", str(reason))
            except UserError as error:
                yield self._failed(part, str(error))

    def _failed(self, part: str, text: str) -> CheckResult:
        return CheckResult(part, "FAILED", text.replace(f"{self.run.path}/", ""))

    def _check_config(self) -> Iterator[CheckResult | str]:
        self.config = self.run.load_config()
        yield "reads back, nothing unknown"

    def _check_tokenizer(self) -> Iterator[CheckResult | str]:
        self.vocabulary = sentencepiece.load(self.run.tokenizer_dir)
        steps = checkpoint.steps(self.run.checkpoints_dir).values()
        paths = [self.run.model_path, *(path / "model.safetensors" for path in steps)]
        named = {checkpoint.load_fingerprint(path) for path in paths} - {None}
        if named and self.vocabulary.fingerprint() not in named:
            raise RunError(
                "is not the one that the weights were trained with; restore the folder "
                f"{self.run.tokenizer_dir} from a copy of the run."
            )
        fits = "fits the weights" if named else "no weights yet"
        yield f"{prepare.format_vocabulary_sizes(self.vocabulary)}; {fits}"

    def _check_data(self) -> Iterator[CheckResult | str]:
        if not self.run.data_dir.exists() and not checkpoint.steps(self.run.checkpoints_dir):
            raise _Skip("not here; translating does not need it")
        problems = [
            f"{path}: is missing or damaged; restore it from a copy of the run."
            for path in prepare.damaged_files(self.run)
        ]
        num_pairs = 0
        if not problems:
            config, vocabulary = self._needs_config(), self._needs_vocabulary()
            num_pairs = loader.check_pairs(self.run.data_dir, vocabulary)
            problems += _problems_of_text(self.run, config)
        yield from (self._failed("data", problem) for problem in problems)
        if not problems:
            self.has_data = True
            yield f"{num_pairs:,} pairs, all ids within the vocabulary"

    def _check_corpora(self) -> Iterator[CheckResult | str]:
        marks = prepare.read_marks(self.run)
        if not marks:
            raise _Skip("the run does not say which files it was made of")
        here = [path for path in marks if Path(path).is_file()]
        if not here:
            raise _Skip("the files are not here")
        changed = changed_files(marks, trust_times=False)
        for path in changed:
            yield CheckResult("corpora", "changed", f"{path}: not the file that was tokenized")
        if not changed:
            gone = len(marks) - len(here)
            rest = f", {gone:,} not here" if gone else ""
            yield f"{len(here):,} files as they were tokenized{rest}"

    def _check_checkpoints(self) -> Iterator[CheckResult | str]:
        found = checkpoint.steps(self.run.checkpoints_dir)
        for path in sorted(self.run.checkpoints_dir.glob("damaged-*")):
            text = f"{path.name}: was left out by a training; look at it or delete it"
            yield CheckResult("checkpoints", "warn", text)
        if not found:
            raise _Skip("none here; translating needs none")
        fingerprint = self._needs_vocabulary().fingerprint()
        for step, path in found.items():
            try:
                _check_checkpoint(path, fingerprint)
                self.whole[step] = path
            except UserError as error:
                advice = f"Restore {path.name} from a copy of the run, or delete it."
                yield self._failed("checkpoints", f"{error} {advice}")
        if len(self.whole) == len(found):
            yield f"{len(found):,} whole, {_say_steps(list(found))}"

    def _check_model(self) -> Iterator[CheckResult | str]:
        path = self.run.model_path
        if not path.exists() and self._is_unfinished():
            raise _Skip("not made yet; `mtrain train CONFIG` makes it")
        config, vocabulary = self._needs_config(), self._needs_vocabulary()
        weights = checkpoint.check_model(path, vocabulary.fingerprint())
        model = build_model(config.model, vocabulary)
        set_weights(model, weights, path)
        _check_finite(path, weights)
        self.has_model = True
        yield f"{num_parameters(model):,} parameters, all finite, format {checkpoint.FORMAT}"

    def _is_unfinished(self) -> bool:
        """Tell whether the training may be on its way, and has made no final weights so far."""
        if not checkpoint.steps(self.run.checkpoints_dir):
            logged = read_metrics(self.run.metrics_path)
            return self.run.data_dir.exists() and all("valid_loss" not in line for line in logged)
        if not self.whole or self.config is None:
            return True
        settings, newest = self.config.training, self.whole[max(self.whole)]
        progress = checkpoint.load_progress(newest)
        has_patience = progress.num_bad_validations < settings.patience
        return has_patience and progress.step < (settings.max_steps or progress.step + 1)

    def _check_translations(self) -> Iterator[CheckResult | str]:
        config, step = self._needs_config(), None
        self._needs_vocabulary()
        if not self.has_model:
            if not self.whole:
                raise _Skip("there is no model that could")
            step = max(self.whole)
        translator = load(self.run, config.decoding, LoadOptions(step=step))
        real = self._validation_lines()
        lines = real or _made_up(translator.tokenizer)
        sources = [EncodedSource(ids) for ids in translator.tokenizer.encode_src(lines)]
        together = [best[0] for best in translator.search(sources)]
        alone = [translator.search([source])[0][0] for source in sources]
        for number, (one, other) in enumerate(zip(together, alone, strict=True), start=1):
            if not _agree(one, other):
                raise RunError(f"line {number} of {len(lines)} differs alone and with the others.")
        name = "validation lines" if real else "made-up lines"
        by = "" if step is None else f" (by the checkpoint of step {step:,})"
        yield f"{len(lines)} {name}, the same alone and together{by}"

    def _validation_lines(self) -> list[str]:
        """Return the first lines that are not blank; none if there is no such text."""
        try:
            lines = prepare.read_valid(self.run).src
        except UserError:
            return []
        return [line for line in lines if line.strip()][:_NUM_LINES]

    def _check_resume(self) -> Iterator[CheckResult | str]:
        if not self.wants_replay:
            raise _Skip("`--no-replay` was asked for")
        config, span = self._needs_config(), self._span()
        self._needs_vocabulary()
        self._check_repeatable(config, span)
        count, first, last = span.last_step - span.first_step, span.first_step + 1, span.last_step
        self.console.say(
            f"resume: {count:,} updates are made again, steps {first:,} to {last:,} "
            "(`--no-replay` leaves them out)"
        )
        try:
            found = replay.replay(config, self.run, span)
        except WriteError:
            raise _Skip(f"the disk of {tempfile.gettempdir()} takes no checkpoint") from None
        yield _judge(found, span)

    def _span(self) -> Span:
        """Return the newest whole checkpoint and the one before it."""
        if not self.has_data:
            raise _Skip("needs whole data")
        if len(self.whole) < 2:
            raise _Skip(f"needs two whole checkpoints, but there are {len(self.whole)}")
        first, last = sorted(self.whole)[-2:]
        return Span(first, last, self.whole[first], self.whole[last])

    def _check_repeatable(self, config: Config, span: Span) -> None:
        """Skip what nobody can make again here."""
        if config.training.max_minutes is not None:
            raise _Skip("follows the clock (`training.max_minutes`): not repeatable")
        for line in read_metrics(self.run.metrics_path):
            if "changed" in line and line["step"] > span.first_step:
                raise _Skip(f"the config changed at step {line['step']:,}")
        made = checkpoint.load_environment(span.newer)
        try:
            device = pick_device(config.training.device, "training.device").type
        except ConfigError as error:
            raise _Skip(str(error)) from None
        if made is not None and made.device != device:
            raise _Skip(f"made on device {made.device}, here is {device}")

    def _needs_config(self) -> Config:
        if self.config is None:
            raise _Skip("needs the config")
        return self.config

    def _needs_vocabulary(self) -> Tokenizer:
        if self.vocabulary is None:
            raise _Skip("needs the tokenizer")
        return self.vocabulary


def _problems_of_text(run: RunDir, config: Config) -> list[str]:
    """Return what is wrong with the ledger of pairs left out, and with validation and test text."""
    problems: list[str] = []
    with _noting(problems):
        dropped.check(run.data_dir)
    with _noting(problems):
        prepare.read_valid(run)
    for name in config.data.tests:
        with _noting(problems):
            prepare.read_test(run, name)
    return problems


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        problems.append(str(error))


def _check_checkpoint(path: Path, fingerprint: str) -> None:
    checkpoint.check(path)
    weights, optimizer, _ = checkpoint.load(path, fingerprint)
    _check_finite(path / "model.safetensors", weights)
    _check_finite(path / "optimizer.safetensors", optimizer)


def _check_finite(path: Path, tensors: Weights) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise RunError(f"{path}: `{name}` must be finite numbers, but is not.")


def _say_steps(steps: list[int]) -> str:
    first, last = f"{steps[0]:,}", f"{steps[-1]:,}"
    return f"step {last}" if len(steps) == 1 else f"steps {first} to {last}"


def _made_up(vocabulary: Tokenizer) -> list[str]:
    """Return lines of the vocabulary's own pieces, for want of real ones."""
    size = len(vocabulary.src)
    ids = [range(size - 1 - line, size // 2, -_NUM_LINES) for line in range(_NUM_LINES)]
    return vocabulary.src.decode([list(own)[: 4 + line] for line, own in enumerate(ids)])


def _agree(one: Hypothesis, other: Hypothesis) -> bool:
    """Tell whether two translations of a line are one, or so close that rounding swaps them."""
    return one.ids == other.ids or abs(one.log_prob - other.log_prob) < _TIE


def _judge(found: Replayed, span: Span) -> CheckResult | str:
    again = f"steps {span.first_step + 1:,} to {span.last_step:,} made again"
    if not found.differing:
        return f"{again}: the same bytes"
    if not found.elsewhere:
        text = f"{again} differ in {', '.join(found.differing)}; restore {span.older.name} and "
        return CheckResult("resume", "FAILED", f"{text}{span.newer.name} from a copy of the run.")
    if found.distance <= _ROUNDING:
        return f"{again}: the same to rounding ({found.elsewhere})"
    return CheckResult("resume", "skipped", found.elsewhere)
