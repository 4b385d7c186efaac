"""The Python interface: what `import mtrain` exports. The command line calls the same functions.

Errors are raised as `UserError` and its subclasses; nothing here exits the process or prints
results. Heavy packages, such as torch, are imported when something is trained or loaded.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from mtrain import __version__
from mtrain.augmentation.options import AugmentOptions, Student, mode_of
from mtrain.config import config_file
from mtrain.config.corpora import expand_home
from mtrain.config.sections import Config, format_value
from mtrain.errors import ConfigError, DataError, require_package
from mtrain.exporters.registry import Library, Quantization
from mtrain.io.lines import Advance, ignore
from mtrain.io.text_lines import LINE_BREAK, TextLines
from mtrain.io.text_width import count
from mtrain.run import finetune
from mtrain.run.logger import PythonLog, RunLog, TensorBoardLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE, ProcessGroup

if TYPE_CHECKING:
    from mtrain.audit.report import AuditReport
    from mtrain.augmentation.distill import DistillReport
    from mtrain.augmentation.new_config import AugmentReport
    from mtrain.autoconfig.write_config import InitReport
    from mtrain.corpus.length_stats import CorpusStats
    from mtrain.decode.formats import Translation
    from mtrain.decode.options import DecodingOptions
    from mtrain.decode.pipeline import SearchEngine, Warn
    from mtrain.decode.translator import Translator
    from mtrain.evaluation.evaluation import TestResult
    from mtrain.evaluation.metrics import ScoringOptions
    from mtrain.exporters.export import ExportReport
    from mtrain.run.load_model import LoadOptions

logger = logging.getLogger("mtrain")
AnyPath = str | os.PathLike[str]
AnyPaths = AnyPath | Sequence[AnyPath]
AnyConfig = Config | Mapping[str, Any] | AnyPath
Precision = Literal["auto", "float32", "bfloat16", "int8"]
Shortlist = Literal["fast"]
Engine = Literal["mtrain", "ctranslate2"]
_SURROGATE = re.compile("[\ud800-\udfff]")  # cannot be encoded as UTF-8


class Model:
    """A trained run, or several as an ensemble, ready to translate.

    Thread-safe: lines of concurrent calls are decoded in shared batches, and each line has the
    same translation as alone.

    Attributes:
        run: the run folder; the first one of an ensemble.
        runs: all run folders of the ensemble.
        config: the config of `run`.
        translator: the search engine, with its tokenizer and default options.
        profile: length statistics of the training pairs; None if the run folder has none.
    """

    def __init__(
        self,
        runs: Sequence[RunDir],
        config: Config,
        translator: SearchEngine,
        profile: CorpusStats | None,
    ) -> None:
        self.run, self.runs = runs[0], runs
        self.config, self.translator, self.profile = config, translator, profile

    def __repr__(self) -> str:
        return f"<mtrain.Model of {self.run.path}>"

    @property
    def options(self) -> DecodingOptions:
        """The default decoding options of `translate` and `translate_text`."""
        return self.translator.options

    @overload
    def translate(
        self,
        lines: Iterable[str],
        options: DecodingOptions | None = None,
        *,
        details: Literal[False] = False,
        prefixes: Iterable[str] | None = None,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
        max_chars: int | None = None,
        on_warning: Warn | None = None,
    ) -> list[str]: ...

    @overload
    def translate(
        self,
        lines: Iterable[str],
        options: DecodingOptions | None = None,
        *,
        details: Literal[True],
        prefixes: Iterable[str] | None = None,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
        max_chars: int | None = None,
        on_warning: Warn | None = None,
    ) -> list[Translation]: ...

    def translate(
        self,
        lines: Iterable[str],
        options: DecodingOptions | None = None,
        *,
        details: bool = False,
        prefixes: Iterable[str] | None = None,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
        max_chars: int | None = None,
        on_warning: Warn | None = None,
    ) -> list[str] | list[Translation]:
        """Return one translation for each line, in order, as `mtrain translate` writes them.

        A blank line has an empty translation. The newline that ends a line is ignored, so `lines`
        can be an open file; a line break within a line is read as a space. Lines longer than
        `options.max_input_tokens` are handled as `options.on_long` says.

        Args:
            lines: the source lines.
            options: decoding options, such as `dataclasses.replace(model.options, beam=1)`; None
                is `model.options`.
            details: return `Translation` objects, with scores, flags and, if the options ask for
                them, alternatives and alignments.
            prefixes: for each line, the text that its translation must begin with.
            timeout_s: seconds after which the call raises `TimeoutError`.
            cancel: when another thread sets this event, the call raises
                `concurrent.futures.CancelledError`.
            max_chars: the limit on the characters of all lines together.
            on_warning: called with each warning, such as "line 3: the translation repeats
                itself."; by default warnings are logged under the name `mtrain`.

        Raises:
            DataError: if `lines` is a single string, has an item that is not a string, exceeds
                `max_chars` or, with `on_long="error"`, has a line that is too long; or if there are
                more or fewer prefixes than lines.
            ConfigError: if an option is invalid, or not supported by the engine.
            RunError: if the logits of the model are not finite.

        Example:
            model = mtrain.load("runs/en-de")
            print(model.translate(["A man sleeps."]))
            options = dataclasses.replace(model.options, num_best=2)
            (best,) = model.translate(["A man sleeps."], options, details=True)
            print(best.text, best.score, best.flags, best.alternatives)
        """
        from mtrain.decode.options import DecodingOptions
        from mtrain.decode.pipeline import BLOCK_LINES, LineTranslator
        from mtrain.decode.shared_search import SearchLimits

        if not isinstance(options, DecodingOptions | None):
            raise ConfigError(
                f"`options` must be a DecodingOptions or None, but is {options!r:.60} instead."
            )
        if not isinstance(timeout_s, float | int | None) or timeout_s != timeout_s:  # nan
            raise ConfigError(
                f"`timeout_s` must be a number of seconds, but is {timeout_s!r:.60} instead."
            )
        clean = list(_clean(lines, max_chars))
        options = replace(options or self.options, with_scores=details)
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        translator = self.translator.with_options(options, SearchLimits(deadline_s, cancel))
        line_translator = LineTranslator(translator, self.profile, on_warning or _log_warning)
        blocks = (clean[at : at + BLOCK_LINES] for at in range(0, len(clean), BLOCK_LINES))
        prefix_lines = None if prefixes is None else _clean(prefixes, None, "prefixes")
        try:
            translated = list(line_translator.translate(blocks, prefix_lines))
        except TimeoutError:
            took = f"{count(len(clean), 'line')} took more than {timeout_s} seconds"
            raise TimeoutError(took) from None
        if details:
            return [replace(line.best[0], alternatives=tuple(line.best[1:])) for line in translated]
        return [line.best[0].text for line in translated]

    def translate_text(
        self,
        text: str,
        options: DecodingOptions | None = None,
        *,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
        max_chars: int | None = None,
        on_warning: Warn | None = None,
    ) -> str:
        """Translate a text line by line; line breaks, blank lines and indents stay as they are.

        Arguments and errors are those of `translate`.

        Example:
            print(model.translate_text("A man sleeps.\\n\\nA dog runs."))
        """
        if not isinstance(text, str):
            raise DataError(f"`text` must be text, but is {text!r:.60} instead.")
        text_lines = TextLines(text)
        translations = self.translate(
            text_lines.lines,
            options,
            timeout_s=timeout_s,
            cancel=cancel,
            max_chars=max_chars,
            on_warning=on_warning,
        )
        return text_lines.join(translations)


def load_config(
    config: AnyConfig, overrides: Iterable[str] = (), run_dir: AnyPath | None = None
) -> Config:
    """Load and validate a config, with all defaults filled in.

    With `training.init_from`, the sections `tokenizer` and `model` are taken from that run.

    Args:
        config: a YAML file, a mapping with the same keys, or a `Config`.
        overrides: values to change, as `key.key=value`, the form of `--set`.
        run_dir: replaces the config's `run_dir`.

    Raises:
        ConfigError: one line that names the key.

    Example:
        config = mtrain.load_config("en-de.yaml", ["training.max_steps=20"], "runs/short")
    """
    _check_overrides(overrides)
    new_dir = None if run_dir is None else os.fspath(run_dir)
    if isinstance(config, str | os.PathLike):
        path, changes = _path(config), list(overrides)
        name, loaded = str(path), config_file.load(path, changes, new_dir)
        if new_dir is None and not any(change.startswith("run_dir=") for change in changes):
            _check_run_dir(loaded, path)
    else:
        tree = config.model_dump(exclude_unset=True) if isinstance(config, Config) else config
        if not isinstance(tree, Mapping):
            raise ConfigError(
                f"`config` must be a file, a mapping or a Config, but is {config!r:.60} instead."
            )
        name, loaded = "config", config_file.from_tree(tree, "config", overrides, new_dir)
    return finetune.complete_config(loaded, name)


def _check_run_dir(config: Config, path: Path) -> None:
    """Refuse the config of a run folder that names another one, such as a copied folder's."""
    run, named = RunDir(path.parent), os.path.realpath(config.run_dir)
    is_of_run = run.config_path == path and run.tokenizer_dir.is_dir()
    if is_of_run and named != os.path.realpath(run.path):
        raise ConfigError(
            f"{path}: `run_dir` must be {run.path}, the run folder that it is in, but is "
            f"{config.run_dir} instead; correct it, or choose a folder with --run."
        )


def train(
    config: AnyConfig,
    *,
    tensorboard: bool = False,
    on_metrics: Callable[[Mapping[str, object]], object] | None = None,
    stop: threading.Event | None = None,
) -> Path:
    """Train a model, or resume a training that was stopped; return its run folder.

    Tokenizes the corpora first if that is not done; resumes from the newest checkpoint. Progress
    is logged under the name `mtrain`, at level INFO.

    Args:
        config: a YAML file, a mapping with the same keys, or a `Config`.
        tensorboard: also write the metrics for TensorBoard, into the run folder.
        on_metrics: called with each record of `metrics.jsonl`: a mapping with the keys `step`,
            `loss`, ..., or `step`, `valid_loss`, ... after a validation.
        stop: when another thread sets this event, training stops as on SIGTERM.

    Raises:
        UserError: if the config, the corpora or the run folder cannot be used.
        Stopped: on SIGINT (a notebook's stop button), SIGTERM, SIGHUP or `stop`, after saving.

    Example:
        run = mtrain.train("en-de.yaml", on_metrics=print)
    """
    return train_together(load_config(config), SINGLE, tensorboard, on_metrics, stop)


def train_together(
    config: Config,
    process_group: ProcessGroup,
    tensorboard: bool = False,
    on_metrics: Callable[[Mapping[str, object]], object] | None = None,
    stop: threading.Event | None = None,
    has_bar: bool = False,
) -> Path:
    """Train as one rank of a process group; every rank calls this with the same config."""
    from mtrain.data.prepare import prepare
    from mtrain.training import checkpoint_manager, trainer
    from mtrain.training.compilation import device_of

    _check_same_config(config, process_group)
    run_dir, log = RunDir(Path(config.run_dir)), None
    device_of(config, process_group)  # reports an unusable device before tokenizing
    if tensorboard:
        require_package("tensorboard", "--log tensorboard", "'mtrain[tensorboard]'")
    if process_group.is_first:
        checkpoint_manager.check_unfinished(run_dir)  # before tokenizing writes anything
        finetune.check_weights(config)
        prepare(config, run_dir, PythonLog())
        board = TensorBoardLog(run_dir.board_dir) if tensorboard else None
        log = RunLog(
            run_dir.metrics_path, board, PythonLog(), has_bar=has_bar, on_metrics=on_metrics
        )
    process_group.barrier()
    has_trained = trainer.train(config, run_dir, process_group, log, stop)
    if has_trained and process_group.is_first and config.training.init_from is not None:
        for line in _before_and_after(run_dir, config.training.device):
            PythonLog().say(line)
    return run_dir.path


def _check_same_config(config: Config, process_group: ProcessGroup) -> None:
    """Raise ConfigError unless all ranks have the same mtrain and config, except `run_dir`."""
    tree = config.model_copy(update={"run_dir": "-"}).model_dump_json()
    messages = process_group.all_gather_bytes(json.dumps([__version__, tree]).encode())
    (version, first), *others = map(json.loads, messages)
    for rank, (other_version, other) in enumerate(others, 1):
        differing = {"mtrain": [version, other_version]}
        if version == other_version:
            differing = config_file.changes(*map(Config.model_validate_json, (first, other)))
        for key, (here, there) in differing.items():
            raise ConfigError(
                f"`{key}` must be the same on all ranks, but is {format_value(here)} on rank 0 "
                f"and {format_value(there)} on rank {rank}."
            )


def _before_and_after(run: RunDir, device: str) -> Iterator[str]:
    """Yield a table of the test scores of a fine-tuned run and of its `training.init_from`."""
    from mtrain.decode import translator as translating
    from mtrain.decode.options import DecodingOptions
    from mtrain.evaluation import evaluation
    from mtrain.evaluation.metrics import ScoringOptions
    from mtrain.evaluation.report import before_and_after_table
    from mtrain.run.load_model import LoadOptions

    def load_runs(runs: Sequence[RunDir]) -> Translator:
        options = replace(DecodingOptions.from_config(runs[0].config), with_scores=False)
        return translating.load(runs, options, LoadOptions(device))

    reports = evaluation.before_and_after(run, load_runs, _log_warning, ScoringOptions())
    yield from before_and_after_table(reports)


def init(
    src_lang: str,
    tgt_lang: str,
    *,
    src: AnyPath | None = None,
    tgt: AnyPath | None = None,
    overrides: Sequence[str] = (),
    budget: str = "30m",
    valid: tuple[AnyPath, AnyPath] | None = None,
    test: tuple[AnyPath, AnyPath] | None = None,
    device: str = "auto",
    output: AnyPath | None = None,
    run_dir: AnyPath | None = None,
    advance: Advance | None = None,
    set_status: Callable[[str], object] | None = None,
) -> InitReport:
    """Write a config that fits a corpus, this machine and a time budget.

    Args:
        src_lang, tgt_lang: language codes, such as en or pt-BR.
        src, tgt: the source and the target file of the corpus; None if `overrides` names it.
        overrides: `data.train=...`, `data.valid=...` or `data.tests=...`, with any form of a
            corpus that a config can have.
        budget: the time for everything: starting, tokenizing, training and `mtrain eval`, such as
            90s, 30m or 1h30m.
        valid, test: the source and the target file of each set; by default, pairs of the corpus
            are held out.
        device: auto, cpu, cuda, ...
        output: the path of the config; SRC-TGT.yaml by default, with the language codes.
        run_dir: the config's `run_dir`; runs/SRC-TGT by default.
        advance: called with the number of bytes read since the last call.
        set_status: called with a text that names the current step.

    Raises:
        UserError: if the corpus is too small or cannot be read, or a setting cannot be used.

    Example:
        report = mtrain.init(
            "en", "de", src="train.en", tgt="train.de", output="new.yaml", run_dir="runs/other"
        )
        print(report.config_path, report.lines)
    """
    from mtrain.autoconfig import write_config

    _check_overrides(overrides)
    if (src is None) != (tgt is None):
        raise ConfigError("`--src` must stand beside `--tgt`, but one of them stands alone.")
    files = {"valid": valid, "test": test, "train": (src, tgt) if src and tgt else None}
    for key, pair in files.items():
        if pair is not None and not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise ConfigError(f"`{key}` must be two files, but is {pair!r:.60} instead.")
    request = write_config.parse_request(
        (src_lang, tgt_lang),
        {key: (_path(pair[0]), _path(pair[1])) for key, pair in files.items() if pair},
        overrides,
        budget,
        device,
        None if output is None else _path(output),
        None if run_dir is None else expand_home(run_dir),
    )
    return write_config.init(request, PythonLog(), advance or ignore, set_status or ignore)


def check(config: AnyConfig, *, advance: Advance | None = None) -> AuditReport:
    """Audit the corpora of a config, and list every finding in the `check` folder of its run.

    Args:
        config: a YAML file, a mapping with the same keys, or a `Config`.
        advance: called with the number of bytes read since the last call.

    Raises:
        UserError: if the config is invalid, or a corpus cannot be read.

    Example:
        report = mtrain.check("en-de.yaml")
        print(len(report.findings))
    """
    from mtrain.audit.audit import REPORT_FILE, audit
    from mtrain.audit.report import as_json
    from mtrain.io.atomic import whole_dir, write_lines
    from mtrain.tokenizer import sentencepiece

    checked = load_config(config)
    run = RunDir(Path(checked.run_dir))
    tokenizer = sentencepiece.load(run.tokenizer_dir) if run.tokenizer_dir.is_dir() else None
    with whole_dir(run.check_dir, REPORT_FILE) as directory:
        report = audit(checked, tokenizer, directory, advance or ignore)
        write_lines(directory / REPORT_FILE, as_json(report))
    return report


def tokenize(config: AnyConfig) -> Path:
    """Train the tokenizer and encode the corpora, unless that is done; return the run folder.

    Raises:
        UserError: if the config, the corpora or the run folder cannot be used.

    Example:
        run = mtrain.tokenize("en-de.yaml")
    """
    from mtrain.data.prepare import prepare

    checked = load_config(config)
    run_dir = RunDir(Path(checked.run_dir))
    prepare(checked, run_dir, PythonLog())
    return run_dir.path


def augment(
    config: AnyConfig,
    using: AnyPaths,
    output: AnyPath,
    options: AugmentOptions | None = None,
    *,
    back: AnyPaths = (),
    forward: AnyPaths = (),
    again: bool = False,
    write_config: AnyPath | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    on_warning: Warn | None = None,
    process_group: ProcessGroup | None = None,
) -> AugmentReport:
    """Write synthetic training pairs, translated by trained models; resume if it was stopped.

    Exactly one of `back`, `forward` and `again` must be given. Progress is logged under the name
    `mtrain`, at level INFO.

    Args:
        config: the config of the training that the pairs are for: a YAML file, a mapping with the
            same keys, or a `Config`.
        using: a trained run, or several, which are an ensemble; with `again`, each translates by
            itself.
        output: the corpus folder to write.
        options: how pairs are translated, filtered, and used in training.
        back: files in the target language, which are translated into synthetic sources.
        forward: files in the source language, which are translated into synthetic targets.
        again: translate the training text, with each run in its own direction.
        write_config: a path for a config that includes the new corpus.
        device: auto, cpu, cuda, cuda:1, ...
        precision: the type of matrix products; `auto` is float32, and int8 needs a CPU. With
            bfloat16 and int8 the key-value cache is in bfloat16.
        on_warning: called with each warning about the text; by default warnings are logged.
        process_group: the ranks that share the work; each makes this call. None is one process.

    Raises:
        UserError: if the config, a text or an option cannot be used, a run translates in another
            direction, or `output` was written with other settings.

    Example:
        options = mtrain.AugmentOptions(beam=1, tag="fw")
        report = mtrain.augment("en-de.yaml", "runs/en-de", "fw", options, forward="train.en")
        print(report.num_pairs, report.dropped, report.config.data.train)
    """
    settings, runs = load_config(config), _run_dirs("using", using)
    _check_choice("precision", precision, get_args(Precision))
    options = AugmentOptions() if options is None else options
    back_paths, forward_paths = _paths("back", back, "a file"), _paths("forward", forward, "a file")
    mode = mode_of(bool(back_paths), bool(forward_paths), again)
    searching = runs if again else runs[:1]  # an ensemble searches as its first run does
    options.check(mode, [run.config.decoding.beam for run in searching])
    from mtrain.augmentation import augment as augmenting
    from mtrain.augmentation import new_config
    from mtrain.run.load_model import LoadOptions

    loading = LoadOptions(device, precision, None, process_group or SINGLE)
    texts = [*back_paths, *forward_paths]
    request = augmenting.AugmentRequest(mode, texts, again, runs, _path(output), options, loading)
    new_path = None if write_config is None else _path(write_config)
    new = new_config.with_corpus(settings, request.output, request.options)
    if new_path is not None:
        new_config.check_free(new, new_path)
    log = PythonLog()
    record = augmenting.augment(request, settings, log, on_warning or _log_warning)
    if new_path is not None and loading.process_group.is_first:
        new_config.check_free(new, new_path)
        config_file.save(new, new_path, with_defaults=False)
        log.say(f"{new_path}: trains in {new.run_dir}")
    return new_config.AugmentReport(
        request.output, record["num_lines"], record["num_pairs"], record["dropped"], new
    )


def distill(
    config: AnyConfig,
    teacher: AnyPaths,
    *,
    student: Student = "deep-shallow",
    mono: AnyPaths = (),
    run_dir: AnyPath | None = None,
    beam: int | None = None,
    device: str = "auto",
    on_metrics: Callable[[Mapping[str, object]], object] | None = None,
    on_warning: Warn | None = None,
    stop: threading.Event | None = None,
    has_bar: bool = False,
) -> DistillReport:
    """Train a smaller student on a teacher's translations; compare both on the test sets.

    The teacher translates the source side of the training text; the student is trained on these
    pairs and on the real ones. Resumes if it was stopped.

    Args:
        config: the config of the teacher's training: a YAML file, a mapping with the same keys, or
            a `Config`.
        teacher: a trained run; several are an ensemble.
        student: the numbers of encoder and decoder layers, at the teacher's width; deep-shallow is
            6-1, and tiny is narrower, too.
        mono: files of additional text in the source language, which the teacher translates.
        run_dir: the run folder of the student; by default RUN_DIR-STUDENT, such as runs/en-de-tiny.
        beam: the beam width of the teacher; None takes it from the run's config.
        device: the device of the translations: auto, cpu, cuda, cuda:1, ...
        on_metrics: called with each record of `metrics.jsonl`, as in `train`.
        on_warning: called with each warning about the text; by default warnings are logged.
        stop: when another thread sets this event, training stops as on SIGTERM.
        has_bar: show the progress of the training on stderr.

    Raises:
        UserError: if the config, a text or a run cannot be used.
        Stopped: on SIGINT, SIGTERM, SIGHUP or `stop` during the training, after saving.

    Example:
        report = mtrain.distill("en-de.yaml", "runs/en-de", student="tiny")
        for system in report.systems:
            print(system.name, system.search, system.lines_per_s)
    """
    settings, teachers = load_config(config), _run_dirs("teacher", teacher)
    _check_choice("student", student, get_args(Student))
    from mtrain.augmentation import augment as augmenting
    from mtrain.augmentation import distill as distilling
    from mtrain.data import prepare
    from mtrain.run.load_model import LoadOptions
    from mtrain.training.compilation import device_of

    for run in teachers:
        run.check_direction([(settings.data.src_lang, settings.data.tgt_lang)], "for `--teacher`")
    new_dir = student_dir(settings, student) if run_dir is None else str(_path(run_dir))
    request = augmenting.AugmentRequest(
        "forward",
        _paths("mono", mono, "a file"),
        True,
        teachers,
        Path(f"{new_dir}-pairs"),
        AugmentOptions(beam=beam),
        LoadOptions(device),
    )
    new = distilling.student_config(settings, teachers[0], student, request.output, new_dir)
    prepare.check_same_data(new, RunDir(Path(new_dir)))
    device_of(new, SINGLE)  # reports an unusable device before translating
    augmenting.augment(request, settings, PythonLog(), on_warning or _log_warning)
    train_together(new, SINGLE, False, on_metrics, stop, has_bar)
    return distilling.compare(teachers, RunDir(Path(new_dir)), request.output, device)


def student_dir(config: Config, student: Student) -> str:
    """Return the default run folder of a student."""
    return f"{Path(config.run_dir)}-{student}"


def load(
    runs: AnyPath | Sequence[AnyPath],
    *,
    beam: int | None = None,
    length_alpha: float | None = None,
    checkpoint: int | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    shortlist: Shortlist | None = None,
    rerank_with: AnyPath | None = None,
    rerank_weight: float | None = None,
    engine: Engine = "mtrain",
) -> Model:
    """Load a trained run, or several as an ensemble, ready to translate.

    Args:
        runs: a run folder, or several.
        beam: the beam width; 1 is greedy search, without the `mbr` of the run's config; None takes
            it from there.
        length_alpha: exponent of the length penalty; 0 is no penalty, None takes it from the run's
            config.
        checkpoint: the step of the checkpoint to load; None loads the run's final model.
        device: auto, cpu, cuda, cuda:1, ...
        precision: the type of matrix products; `auto` is float32, and int8 needs a CPU. With
            bfloat16 and int8 the key-value cache is in bfloat16.
        shortlist: `fast` ranks only frequent target tokens and those that co-occur with tokens of
            the source in the training text; for beam search on a CPU. On first use, the table of
            co-occurrences is learned and written into the run folder.
        rerank_with: a run of the other direction, or of both; hypotheses are ranked by its
            log-probability of the source, too (noisy-channel reranking).
        rerank_weight: the weight of that log-probability; None is 0.3.
        engine: `ctranslate2` translates with CTranslate2, from an export of the run that is written
            into the run folder on first use. It supports a single run on the CPU, without
            `checkpoint`, `precision`, `shortlist` and `rerank_with`, and no sampling,
            alternatives, prefixes, alignments, `mbr` and `early_stop`; log-probabilities are those
            of whole translations only.

    Raises:
        RunError: if a folder is not a run, has no trained model, or its files do not fit together.
        ConfigError: if a setting cannot be used.

    Example:
        model = mtrain.load("runs/en-de", beam=1)
    """
    from mtrain.corpus import length_stats
    from mtrain.decode.options import RERANK_WEIGHT, DecodingOptions
    from mtrain.run.load_model import LoadOptions

    _check_choice("precision", precision, get_args(Precision))
    _check_choice("engine", engine, get_args(Engine))
    if not isinstance(checkpoint, int | None):
        raise ConfigError(f"`checkpoint` must be a step, but is {checkpoint!r:.60} instead.")
    folders = _run_dirs("runs", runs)
    config = folders[0].config
    if rerank_with is None and rerank_weight is not None:
        raise ConfigError("`rerank_weight` needs `rerank_with`.")
    reverse = None if rerank_with is None else _run_dir(rerank_with)
    weight = RERANK_WEIGHT if rerank_weight is None else rerank_weight
    options = DecodingOptions.from_config(config)
    options = replace(
        options,
        beam=options.beam if beam is None else beam,
        length_alpha=options.length_alpha if length_alpha is None else length_alpha,
        mbr=None if beam == 1 else options.mbr,
        rerank_weight=None if reverse is None else weight,
        shortlist=shortlist,
        with_scores=False,
    )
    if shortlist is not None and options.beam == 1:
        raise ConfigError("`shortlist` has no effect with a beam of 1; leave it out.")
    loading = LoadOptions(device, precision, checkpoint, reverse=reverse)
    translator: SearchEngine
    if engine == "ctranslate2":
        translator = _load_ctranslate2(folders, options, loading)
    else:
        from mtrain.decode import translator as translating

        translator = translating.load(folders, options, loading)
    return Model(folders, config, translator, length_stats.load(folders[0].data_dir))


def _load_ctranslate2(
    folders: list[RunDir], options: DecodingOptions, loading: LoadOptions
) -> SearchEngine:
    from mtrain.exporters import export as exporting

    if len(folders) > 1:
        raise ConfigError(
            f"`engine='ctranslate2'` must have one run, but has {len(folders)} instead."
        )
    for key, is_given in (
        ("checkpoint", loading.step is not None),
        ("device", loading.device not in ("auto", "cpu")),
        ("precision", loading.precision != "auto"),
        ("shortlist", options.shortlist is not None),
        ("rerank_with", loading.reverse is not None),
    ):
        if is_given:
            raise ConfigError(f"`{key}` has no effect with `engine='ctranslate2'`; leave it out.")
    return exporting.load_ctranslate2(folders[0], options, _log_warning)


def evaluate(run: Model | AnyPath, options: ScoringOptions | None = None) -> list[TestResult]:
    """Translate the test sets of a run and score them by sacreBLEU, as `mtrain eval` does.

    Test sets that were changed in the run's config are read again, and stored in the run folder.
    Warnings about translations are logged with the test set and the line number.

    Raises:
        UserError: if the run cannot be loaded, has no test sets, or their text is missing.

    Example:
        options = mtrain.ScoringOptions(metrics=["bleu", "ter"], lowercase=True)
        for result in mtrain.evaluate("runs/en-de", options):
            print(result.name, result.scores[0].value)
    """
    from mtrain.data.prepare import update_tests
    from mtrain.evaluation import evaluation
    from mtrain.evaluation.metrics import ScoringOptions

    if not isinstance(options, ScoringOptions | None):
        raise ConfigError(
            f"`options` must be mtrain.ScoringOptions, but is {options!r:.60} instead."
        )
    model = run if isinstance(run, Model) else load(run)
    first = RunDir(model.run.path)  # its config may have changed since the model was loaded
    update_tests(first.config, first, PythonLog())
    runs = [first, *model.runs[1:]]
    return evaluation.evaluate(runs, model.translator, _log_warning, options)


def export(
    run: AnyPath,
    directory: AnyPath,
    to: Library,
    *,
    quantize: Quantization | None = None,
    check_lines: int = 100,
    license: str | None = None,
    page: bool = False,
    shortlist: bool = False,
) -> ExportReport:
    """Write the model of a run for another library, and compare the copy with the run.

    Progress is logged under the name `mtrain`, at level INFO.

    Args:
        run: the run folder.
        directory: the folder to write, or the file with `to="argos"`; it must not exist.
        to: the library, one of those that `mtrain export --help` names.
        quantize: the type of the weights; None is float32. Not every library has every type.
        check_lines: the number of lines of the validation text on which both are compared.
        license: the license in the model card, as the Hugging Face Hub writes it, such as
            cc-by-4.0.
        page: also write a web page that translates in the browser; for onnx only.
        shortlist: also write the likely target tokens of each source token as `vmap.txt`, learned
            from the training text, and score the export with it; for ctranslate2 only.

    Raises:
        UserError: if the run cannot be loaded, the library does not support its model, a copy that
            is not quantised translates differently from the run, or there is no training text to
            learn a shortlist from; nothing is written then.

    Example:
        report = mtrain.export("runs/en-de", "en-de-ct2", "ctranslate2")
    """
    from mtrain.exporters.export import ExportRequest, export

    _check_choice("to", to, get_args(Library))
    if check_lines < 1:
        raise ConfigError(f"`check_lines` must be >= 1, but is {check_lines} instead.")
    request = ExportRequest(
        to, quantize, check_lines, license, has_page=page, has_shortlist=shortlist
    )
    return export(_run_dir(run), _path(directory), request, _log_warning)


def plot(
    run: AnyPath, *, sentence: str | None = None, directory: AnyPath | None = None
) -> list[Path]:
    """Draw the training and the model of a run; return the files, PNG and SVG.

    Args:
        run: the run folder.
        sentence: the sentence whose attention is drawn; by default one of the validation text.
        directory: the folder to write to; by default `plots` in the run folder.

    Raises:
        ConfigError: if matplotlib is not installed.
        UserError: if the run cannot be read.

    Example:
        pictures = mtrain.plot("runs/en-de")
    """
    require_package("matplotlib", "mtrain plot", "'mtrain[plot]'")
    from mtrain.plots import draw

    run_dir = _run_dir(run)
    target_dir = run_dir.path / "plots" if directory is None else _path(directory)
    return list(draw.draw(run_dir, sentence, target_dir, _log_warning))


def _path(path: AnyPath) -> Path:
    return Path(expand_home(path))


def _run_dir(run: AnyPath) -> RunDir:
    if not isinstance(run, str | os.PathLike):
        raise DataError(f"`run` must be a run folder, but is {run!r:.60} instead.")
    return RunDir(_path(run))


def _run_dirs(key: str, runs: AnyPaths) -> list[RunDir]:
    paths = _paths(key, runs, "a run folder")
    if not paths:
        raise DataError(f"`{key}` must have a run folder, but is empty.")
    return [RunDir(path) for path in paths]


def _paths(key: str, value: AnyPaths, expected: str) -> list[Path]:
    paths = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(paths, Sequence) or not all(
        isinstance(path, str | os.PathLike) for path in paths
    ):
        raise DataError(f"`{key}` must be {expected} or several, but is {value!r:.60} instead.")
    return [_path(path) for path in paths]


def _check_choice(key: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"`{key}` must be one of {', '.join(choices)}, but is {value!r:.60} instead."
        )


def _check_overrides(overrides: Iterable[str]) -> None:
    if isinstance(overrides, str):
        raise ConfigError(
            "`overrides` must be a list of settings, but is one text; put it in a list."
        )


def _log_warning(text: str) -> None:
    logger.warning("%s", text)  # the text may contain percent signs


def _clean(lines: Iterable[str], max_chars: int | None, name: str = "lines") -> Iterator[str]:
    """Yield each line without its newline, with inner line breaks and lone surrogates replaced.

    Raises:
        DataError: as `Model.translate` does.
    """
    if isinstance(lines, str | bytes):
        raise DataError(f"`{name}` must be a list of lines, but is one text; put it in a list.")
    if not isinstance(lines, Iterable):
        raise DataError(f"`{name}` must be a list of lines, but is {lines!r:.60} instead.")
    num_chars = 0
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise DataError(f"`{name}`: line {number} must be text, but is {line!r:.60} instead.")
        num_chars += len(line)
        if max_chars is not None and num_chars > max_chars:
            raise DataError(f"`{name}` must have at most {max_chars:,} characters, but have more.")
        encodable = _SURROGATE.sub("\ufffd", line.removesuffix("\n").removesuffix("\r"))
        yield LINE_BREAK.sub(" ", encodable)
