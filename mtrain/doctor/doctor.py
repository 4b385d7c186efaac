"""Check every part of a run folder; change nothing in it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from mtrain.config.sections import Config
from mtrain.corpus import dropped
from mtrain.corpus.reader import changed_files
from mtrain.data import prepare
from mtrain.data.arrow_shards import ShardSet
from mtrain.decode import shortlist
from mtrain.decode.translator import EncodedSource, load
from mtrain.doctor import replay
from mtrain.doctor.replay import Span
from mtrain.errors import ConfigError, RunError, UserError, WriteError, damaged
from mtrain.exporters.export import check_exports
from mtrain.io import text_width
from mtrain.io.lines import read_lines
from mtrain.model.transformer import num_parameters
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Weights
from mtrain.run.load_model import LoadOptions, model_with_weights
from mtrain.run.logger import Console, read_metrics
from mtrain.run.run_dir import RunDir
from mtrain.runtime.device import pick_device
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer
from mtrain.training.schedule import follows_clock, reached_limits

T = TypeVar("T")
Verdict = Literal["ok", "skipped", "changed", "warn", "FAILED"]
_NUM_LINES = 5
_TIE = 1e-3  # difference of log-probability below which rounding may choose either translation
_ROUNDING = 0.01  # distance of replayed weights, relative to the change between the checkpoints


class CheckResult(NamedTuple):
    """The verdict on a part of a run folder, with a short fact or what to do."""

    part: str
    verdict: Verdict
    fact: str

    def line(self) -> str:
        """Return the printed line: part, verdict and fact in columns."""
        return f"{self.part:<12} {self.verdict:<8} {self.fact}"


def examine(run: RunDir, console: Console, wants_replay: bool = True) -> Iterator[CheckResult]:
    """Check each part of a run folder; yield each result once it is known.

    Raises:
        RunError: if this is no run folder, or another process is training in it.
    """
    parts = (run.config_path, run.tokenizer_dir, run.model_path)
    if not any(path.exists() for path in parts):
        run.check_exists()
    run.check_files()
    with run.locked_if_possible():
        yield from _RunChecker(run, console, wants_replay).results()


class _Skip(Exception):  # noqa: N818 - nothing went wrong
    """A part cannot be checked; the text is the reason."""


class _RunChecker:
    """The checks of a run folder, in order; a check stores what later checks read."""

    def __init__(self, run: RunDir, console: Console, wants_replay: bool) -> None:
        self.run, self.console, self.wants_replay = run, console, wants_replay
        self.config: Config | None = None
        self.tokenizer: Tokenizer | None = None
        self.has_data = self.has_model = False
        self.whole: dict[int, Path] = {}  # the undamaged checkpoints, by step

    def results(self) -> Iterator[CheckResult]:
        checks: dict[str, Callable[[], Iterator[CheckResult | str]]] = {
            "config": self._check_config,
            "tokenizer": self._check_tokenizer,
            "data": self._check_data,
            "corpora": self._check_corpora,
            "checkpoints": self._check_checkpoints,
            "model": self._check_model,
            "translates": self._check_translations,
            "shortlist": self._check_shortlist,
            "metrics": self._check_metrics,
            "exports": lambda: check_exports(self.run),
            "resume": self._check_resume,
        }
        for part, check in checks.items():
            try:
                for result in check():
                    if isinstance(result, str):
                        result = CheckResult(part, "ok", result)
                    yield result
            except _Skip as reason:
                yield CheckResult(part, "skipped", str(reason))
            except UserError as error:
                yield self._failed(part, str(error))
            except OSError as error:  # such as a folder that may not be read
                yield self._failed(part, f"{error.filename}: cannot be read: {error.strerror}.")

    def _failed(self, part: str, text: str) -> CheckResult:
        run = re.compile(rf"(?<!\S){re.escape(str(self.run.path))}/")
        return CheckResult(part, "FAILED", run.sub("", text))

    def _check_config(self) -> Iterator[CheckResult | str]:
        self.config = self.run.config
        yield "reads back, nothing unknown"

    def _check_tokenizer(self) -> Iterator[CheckResult | str]:
        self.tokenizer = sentencepiece.load(self.run.tokenizer_dir)
        steps = checkpoint.steps(self.run.checkpoints_dir).values()
        paths = [self.run.model_path, *(path / "model.safetensors" for path in steps)]
        fingerprints = {checkpoint.load_fingerprint(path) for path in paths} - {None}
        if fingerprints and self.tokenizer.fingerprint() not in fingerprints:
            raise RunError(
                "is not the one that the weights were trained with; restore the folder "
                f"{self.run.tokenizer_dir} from a copy of the run."
            )
        fits = "fits the weights" if fingerprints else "no weights yet"
        yield f"{prepare.format_vocabulary_sizes(self.tokenizer)}; {fits}"

    def _check_data(self) -> Iterator[CheckResult | str]:
        if not self.run.data_dir.exists() and not checkpoint.steps(self.run.checkpoints_dir):
            raise _Skip("not here; translating does not need it")
        problems = [
            str(damaged(path, "is missing or damaged")) for path in prepare.damaged_files(self.run)
        ]
        num_pairs = 0
        if not problems:
            config, tokenizer = _needed(self.config, "config"), _needed(self.tokenizer, "tokenizer")
            num_pairs = sum(map(len, ShardSet(self.run.data_dir, tokenizer).all()))
            new = [name for name in config.data.tests if prepare.is_not_copied(self.run, name)]
            for name in new:
                text = f"test set {name}: not copied yet; `mtrain eval` copies it"
                yield CheckResult("data", "warn", text)
            checks: list[Callable[[], object]] = [
                partial(dropped.check, self.run.data_dir),
                partial(prepare.read_valid, self.run),
                *(
                    partial(prepare.read_test, self.run, name)
                    for name in config.data.tests
                    if name not in new
                ),
            ]
            for check in checks:
                try:
                    check()
                except UserError as error:
                    problems.append(str(error))
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
            num_missing = len(marks) - len(here)
            missing = f", {num_missing:,} not here" if num_missing else ""
            files = text_width.count(len(here), "file")
            yield f"{files} as they were tokenized{missing}"

    def _check_checkpoints(self) -> Iterator[CheckResult | str]:
        paths = checkpoint.steps(self.run.checkpoints_dir)
        for path in sorted(self.run.checkpoints_dir.glob("damaged-*")):
            text = f"{path.name}: was skipped by a training; look at it or delete it"
            yield CheckResult("checkpoints", "warn", text)
        if not paths:
            raise _Skip("none here; translating needs none")
        fingerprint = _needed(self.tokenizer, "tokenizer").fingerprint()
        for step, path in paths.items():
            try:
                checkpoint.check(path)
                checkpoint.load_progress(path)
                parts = ["model.safetensors"]
                if checkpoint.is_resumable(path):
                    parts.append("optimizer.safetensors")
                for part in parts:
                    _check_finite(path / part, checkpoint.load_model(path / part, fingerprint))
                self.whole[step] = path
            except UserError as error:
                advice = f"Restore {path.name} from a copy of the run, or delete it."
                yield self._failed("checkpoints", f"{error} {advice}")
        if len(self.whole) == len(paths):
            first, last = min(paths), max(paths)
            steps = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
            yield f"{len(paths):,} whole, {steps}"

    def _check_model(self) -> Iterator[CheckResult | str]:
        path = self.run.model_path
        if not path.exists() and self._is_unfinished():
            raise _Skip("not made yet; `mtrain train CONFIG` makes it")
        config, tokenizer = _needed(self.config, "config"), _needed(self.tokenizer, "tokenizer")
        weights = checkpoint.load_model(path, tokenizer.fingerprint(), verify=True)
        model = model_with_weights(config.model, tokenizer, weights, path)
        _check_finite(path, weights)
        self.has_model = True
        yield f"{num_parameters(model):,} parameters, all finite, format {checkpoint.FORMAT}"

    def _is_unfinished(self) -> bool:
        """Return whether the run may lack final weights because its training has not ended."""
        if not checkpoint.steps(self.run.checkpoints_dir):
            logged = read_metrics(self.run.metrics_path)
            return self.run.data_dir.exists() and all("valid_loss" not in line for line in logged)
        if not self.whole or self.config is None:
            return True
        progress = checkpoint.load_progress(self.whole[max(self.whole)])
        return not reached_limits(self.config.training, progress)

    def _check_translations(self) -> Iterator[CheckResult | str]:
        step = None
        _needed(self.config, "config")
        _needed(self.tokenizer, "tokenizer")
        if not self.has_model:
            if not self.whole:
                raise _Skip("there is no model that could")
            step = max(self.whole)
        translator = load(self.run, loading=LoadOptions(step=step))
        try:
            texts = [line for line in prepare.read_valid(self.run).src if line.strip()]
        except UserError:
            texts = []
        tokenizer = translator.tokenizer
        encoded = (ids for text in texts for ids in tokenizer.encode_src([text]))
        limit = self.run.config.data.max_tokens  # longer lines are translated in parts
        valid = list(islice((ids for ids in encoded if len(ids) <= limit), _NUM_LINES))
        found = valid or tokenizer.encode_src(_synthetic_lines(tokenizer))
        sources = [EncodedSource(ids) for ids in found]
        batched = [best[0] for best in translator.search(sources)]
        single = [translator.search([source])[0][0] for source in sources]
        for number, (first, second) in enumerate(zip(batched, single, strict=True), start=1):
            if first.ids != second.ids and not abs(first.log_prob - second.log_prob) < _TIE:
                of = len(sources)
                raise RunError(f"line {number} of {of} differs alone and with the others.")
        name = "validation line" if valid else "made-up line"
        by = "" if step is None else f" (by the checkpoint of step {step:,})"
        yield f"{text_width.count(len(sources), name)}, the same alone and together{by}"

    def _check_shortlist(self) -> Iterator[CheckResult | str]:
        if self.tokenizer is not None and self.run.shortlist_path.is_file():
            is_of_run = shortlist.read(self.run, self.tokenizer) is not None
            yield "fits the tokenizer" if is_of_run else "of another tokenizer; is made again"

    def _check_metrics(self) -> Iterator[CheckResult | str]:
        path = self.run.metrics_path
        num_lines = sum(1 for _ in read_lines(path)) if path.is_file() else 0
        if num_damaged := num_lines - sum(1 for _ in read_metrics(path)):
            lines = text_width.count(num_damaged, "damaged line")
            yield CheckResult("metrics", "warn", f"{path.name}: {lines}; plots leave them out")

    def _check_resume(self) -> Iterator[CheckResult | str]:
        if not self.wants_replay:
            raise _Skip("`--no-replay` was asked for")
        config, span = _needed(self.config, "config"), self._span()
        _needed(self.tokenizer, "tokenizer")
        self._check_repeatable(config, span)
        count, first, last = span.last_step - span.first_step, span.first_step + 1, span.last_step
        self.console.say(
            f"resume: makes {text_width.count(count, 'update')} again, steps {first:,} to {last:,} "
            "(`--no-replay` skips this)"
        )
        try:
            differing, distance, change = replay.replay(config, self.run, span)
        except WriteError:
            raise _Skip(f"the disk of {tempfile.gettempdir()} takes no checkpoint") from None
        again = f"steps {first:,} to {last:,} made again"
        if not differing:
            yield f"{again}: the same bytes"
        elif not change:
            parts, wrong = ", ".join(differing), span.newer.name
            if differing == [replay.METRICS]:  # then the newer checkpoint is right
                wrong = replay.METRICS
            advice = f"restore {span.older.name} and {wrong} from a copy of the run."
            yield CheckResult("resume", "FAILED", f"{again} differ in {parts}; {advice}")
        elif distance <= _ROUNDING:
            yield f"{again}: the same to rounding ({change})"
        else:
            raise _Skip(change)

    def _span(self) -> Span:
        """Return the span between the two newest whole checkpoints with an optimizer state."""
        if not self.has_data:
            raise _Skip("needs whole data")
        steps = [step for step, path in self.whole.items() if checkpoint.is_resumable(path)]
        if len(steps) < 2:
            raise _Skip(f"needs two checkpoints with optimizer state, but has {len(steps)}")
        first, last = steps[-2:]
        return Span(first, last, self.whole[first], self.whole[last])

    def _check_repeatable(self, config: Config, span: Span) -> None:
        """Skip the replay of updates that are not repeatable on this machine."""
        elapsed = replay.elapsed_after_steps(self.run, span)
        if follows_clock(config) and len(elapsed) < len(span.steps):
            raise _Skip("the log does not have the time of each update")
        for line in read_metrics(self.run.metrics_path):
            if "changed_config" in line and line["step"] > span.first_step:
                raise _Skip(f"the config changed at step {line['step']:,}")
        saved_in = checkpoint.load_environment(span.newer)
        try:
            device = pick_device(config.training.device, "training.device").type
        except ConfigError as error:
            raise _Skip(str(error)) from None
        if saved_in is not None and saved_in.device != device:
            raise _Skip(f"made on device {saved_in.device}, here is {device}")


def _needed(value: T | None, name: str) -> T:
    """Return `value`; raise _Skip if it is None, because the check of `name` did not load it."""
    if value is None:
        raise _Skip(f"needs the {name}")
    return value


def _check_finite(path: Path, tensors: Weights) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise RunError(f"{path}: `{name}` must be finite numbers, but is not.")


def _synthetic_lines(tokenizer: Tokenizer) -> list[str]:
    """Return lines made of the tokenizer's rarer pieces."""
    size = len(tokenizer.src)
    ids = [range(size - 1 - line, size // 2, -_NUM_LINES) for line in range(_NUM_LINES)]
    return tokenizer.src.decode([list(row)[: 4 + line] for line, row in enumerate(ids)])
