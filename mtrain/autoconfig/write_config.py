"""Write a commented config for a corpus, a machine and a time budget."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.audit.features import Ints
from mtrain.autoconfig import benchmark, presets, split
from mtrain.autoconfig.benchmark import Sample
from mtrain.autoconfig.presets import MeasuredPreset, TrainingPlan
from mtrain.autoconfig.split import CorpusOverview
from mtrain.config import config_file
from mtrain.config.config_file import put_beside
from mtrain.config.corpora import FilesCorpus
from mtrain.config.sections import TokenizerConfig
from mtrain.corpus.reader import Pair, count_pairs
from mtrain.errors import ConfigError, DataError
from mtrain.io import text_width
from mtrain.io.atomic import check_writable, write_lines
from mtrain.io.lines import Advance
from mtrain.run.logger import Console
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer, VocabularySizeError

_MAX_HELD_OUT, _MIN_HELD_OUT = 1000, 10  # pairs of a set
_HELD_OUT_FRACTION = 0.05
_MIN_VOCABULARY = 300  # the 256 bytes, and some letters
_SEED = 1
_MIN_EPOCHS = 3  # below, a warning
_LANGUAGE = re.compile(r"\w[\w-]*")  # part of file names
_SURROGATE = re.compile("[\ud800-\udfff]")  # stands for a byte of a path that is not UTF-8
_BUDGET = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?$")


class Files(NamedTuple):
    """A source file and its translation."""

    src: Path
    tgt: Path

    def corpus(self) -> FilesCorpus:
        """Return the corpus as in a config."""
        return FilesCorpus(src=[str(self.src)], tgt=[str(self.tgt)])


@dataclass(frozen=True)
class InitRequest:
    """The options of `mtrain init`; without `valid` or `test`, pairs of `train` are held out."""

    train: Files
    src_lang: str
    tgt_lang: str
    budget_s: float
    device: str
    config_path: Path
    run_dir: str
    valid: Files | None
    test: Files | None


def parse_budget(text: str) -> float:
    """Return the seconds of `90s`, `30m`, `2h` or `1h30m`.

    Raises:
        ConfigError: if it is none of these, or zero.
    """
    match = _BUDGET.match(text)
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not 0 < total < 10**9:
        raise ConfigError(
            f"`--budget` must be a time such as 30m or 1h30m, but is {text!r} instead."
        )
    return float(total)


class _Choice(NamedTuple):
    """The chosen tokenizer, preset and schedule, and the number of training pairs."""

    num_train: int
    tokenizer: Tokenizer
    measured: MeasuredPreset
    training: TrainingPlan


def init(
    request: InitRequest,
    console: Console,
    advance: Advance,
    set_status: Callable[[str], object] = lambda what: None,
) -> list[str]:
    """Measure, choose, and write the config and the held-out files; return the lines of a report.

    Args:
        request: the options.
        console: prints measurements and choices.
        advance: called with numbers of bytes read from the corpus.
        set_status: called with the name of each later stage.

    Raises:
        ConfigError: if a language code, a path or the device is invalid, or a file to be written
            or the run exists.
        DataError: if the corpus cannot be read, or has too few pairs.
        WriteError: if the files cannot be written.
    """
    sets = {
        "valid": request.valid or _held_out_files(request, "valid"),
        "test": request.test or _held_out_files(request, "test"),
    }
    new = [files for name, files in sets.items() if getattr(request, name) is None]
    _check(request, sets, new)
    overview = split.read_overview(request.train.corpus(), _SEED, advance)
    held_out = _draw_held_out(overview, request.train, len(new))
    choice = _choose(request, overview, held_out, console, set_status)
    set_status("writing")
    report = []
    if new:
        rows = np.sort(np.concatenate(held_out))
        pairs = split.collect(request.train.corpus(), rows)
        pair_of = dict(zip(rows.tolist(), pairs, strict=True))
        for files, set_rows in zip(new, held_out, strict=True):
            write_lines(files.src, (pair_of[row].src for row in set_rows.tolist()))
            write_lines(files.tgt, (pair_of[row].tgt for row in set_rows.tolist()))
            num_pairs = f"{len(set_rows):,} pairs"
            report.append(f"wrote     {files.src} and {files.tgt.name}: {num_pairs}, held out")
    schema_line = put_beside(request.config_path).rstrip("\n")
    write_lines(request.config_path, [schema_line, *_config_lines(request, sets, choice)])
    config_file.load(request.config_path)
    return [*report, *_summary(request, choice)]


def _check(request: InitRequest, sets: dict[str, Files], new: list[Files]) -> None:
    """Raise errors that need no reading of the corpus."""
    for side, code in (("src", request.src_lang), ("tgt", request.tgt_lang)):
        if not _LANGUAGE.fullmatch(code):
            raise ConfigError(
                f"`--{side}-lang` must be a code such as en or pt-BR, but is {code!r} instead."
            )
    given = [files for files in (request.train, request.valid, request.test) if files is not None]
    for path in (request.run_dir, request.config_path, *chain.from_iterable(given)):
        if _SURROGATE.search(str(path)):
            raise ConfigError(f"{str(path)!r}: must be UTF-8, as a config is, but is not.")
    for path in [request.config_path, *(path for files in new for path in files)]:
        if path.exists():
            raise ConfigError(f"{path}: is there already; take another --output, or delete it.")
    if RunDir(Path(request.run_dir)).config_path.exists():
        raise ConfigError(f"{request.run_dir}: holds a run already; take another --run.")
    check_writable(request.config_path)
    for name, files in sets.items():
        if files not in new:
            count_pairs(files.corpus(), f"--{name}")


def _held_out_files(request: InitRequest, name: str) -> Files:
    stem, src, tgt = request.config_path.with_suffix(""), request.src_lang, request.tgt_lang
    if src.lower() == tgt.lower():  # one name on a file system without case
        src, tgt = f"src.{src}", f"tgt.{tgt}"
    return Files(Path(f"{stem}.{name}.{src}"), Path(f"{stem}.{name}.{tgt}"))


def _draw_held_out(overview: CorpusOverview, files: Files, num_sets: int) -> list[Ints]:
    """Draw the rows of each new set."""
    if not num_sets:
        return []
    count = min(_MAX_HELD_OUT, int(_HELD_OUT_FRACTION * len(overview.unique_rows)))
    if count < _MIN_HELD_OUT:
        min_pairs = int(_MIN_HELD_OUT / _HELD_OUT_FRACTION)
        raise DataError(
            f"{files.src} must have at least {min_pairs:,} pairs that stand in it once, of "
            f"which some can be held out, but has {len(overview.unique_rows):,} instead; give "
            "--valid and --test."
        )
    return split.draw(overview.unique_rows, [count] * num_sets, _SEED)


def _choose(
    request: InitRequest,
    overview: CorpusOverview,
    held_out: list[Ints],
    console: Console,
    set_status: Callable[[str], object],
) -> _Choice:
    """Train a tokenizer on the pairs not held out, measure presets, and choose one."""
    held_out_rows = {row for rows in held_out for row in rows.tolist()}
    num_train = overview.num_pairs - len(held_out_rows)
    kept = [pair for pair in overview.sample if pair.line - 1 not in held_out_rows]
    console.say(
        f"corpus    {text_width.count(overview.num_pairs, 'pair')}, of "
        f"{overview.src_words / overview.num_pairs:.1f} source and "
        f"{overview.tgt_words / overview.num_pairs:.1f} target words"
    )
    set_status("learning pieces")
    tokenizer = _train_tokenizer(kept, num_train)
    sample = benchmark.encode(kept, tokenizer)
    num_tokens = round(sample.tgt_tokens_per_pair * num_train)
    console.say(
        f"pieces    {len(tokenizer.tgt):,} shared; {sample.tgt_tokens_per_pair:.1f} target "
        "tokens a pair"
    )
    candidates = []
    for measured in _measure_presets(request, num_train, sample, tokenizer, set_status):
        epochs = measured.tokens_per_s * request.budget_s / num_tokens
        console.say(
            f"tried     {measured.preset.name:<6}  {measured.num_parameters:>11,} weights  "
            f"{measured.tokens_per_s:>7,.0f} tokens/s  {epochs:>6,.1f} epochs"
        )
        candidates.append(measured)
    chosen = presets.choose(candidates, request.budget_s)
    training = presets.plan_training(chosen, request.budget_s, num_tokens)
    return _Choice(num_train, tokenizer, chosen, training)


def _train_tokenizer(pairs: list[Pair], num_train: int) -> Tokenizer:
    """Train a tokenizer, with a smaller vocabulary if the pairs do not fill the preset one."""
    size = presets.vocabulary_size(num_train)
    src, tgt = [pair.src for pair in pairs], [pair.tgt for pair in pairs]
    while True:
        try:
            config = TokenizerConfig(kind="bpe", vocab_size=size)
            return sentencepiece.train(config, src, tgt, _SEED)
        except VocabularySizeError as error:
            is_last = size <= _MIN_VOCABULARY or error.fitting > size
            size = error.fitting if is_last else max(_MIN_VOCABULARY, size // 2)


def _measure_presets(
    request: InitRequest,
    num_train: int,
    sample: Sample,
    tokenizer: Tokenizer,
    set_status: Callable[[str], object],
) -> Iterator[MeasuredPreset]:
    """Yield measured presets, the smallest first, until one is too large for corpus or budget."""
    for preset in presets.PRESETS:
        if num_train < preset.min_pairs:
            return
        set_status(f"trying {preset.name}")
        measured = benchmark.measure(preset, sample, tokenizer, request.device)
        yield measured
        if not presets.fits(measured, request.budget_s):
            return


def _config_lines(request: InitRequest, sets: dict[str, Files], choice: _Choice) -> list[str]:
    """Return the lines of the config."""
    preset, training, model = choice.measured.preset, choice.training, choice.measured.preset.model
    pairs, minutes = text_width.count(choice.num_train, "pair"), request.budget_s / 60
    held = "  # Held out of the training files; `data.clean` keeps these pairs out of the training."
    seen = f"{presets.MIN_TOKENS_PER_PARAMETER:g} tokens a weight in the time that there is"
    why = ["The smallest, though it does not see", f"# {seen}."]
    if presets.fits(choice.measured, request.budget_s):
        why = ["The largest that sees", f"# {seen}, and that such a corpus can teach."]
    return [
        f"# {request.src_lang}-{request.tgt_lang}, {pairs}, by `mtrain init`.",
        "# Every key that is not here has a default; `mtrain train` writes them all to the run",
        "# folder's config.yaml. All of it can be changed.",
        f"run_dir: {_text(request.run_dir)}",
        "data:",
        f"  src_lang: {_text(request.src_lang)}",
        f"  tgt_lang: {_text(request.tgt_lang)}",
        f"  train: {_corpus(request.train)}",
        *([held] if request.valid is None or request.test is None else []),
        f"  valid: {_corpus(sets['valid'])}",
        f"  tests: {{test: {_corpus(sets['test'])}}}",
        f"# As many pieces as {pairs} can teach; both languages share them.",
        f"tokenizer: {{kind: bpe, vocab_size: {len(choice.tokenizer.tgt)}}}",
        f"# The size `{preset.name}`: {choice.measured.num_parameters:,} weights. {why[0]}",
        why[1],
        f"# Dropout is higher, the more often the corpus is seen: about "
        f"{training.num_epochs:,.0f} times here.",
        "model:",
        f"  d_model: {model.d_model}",
        f"  num_heads: {model.num_heads}",
        f"  d_ff: {model.d_ff}",
        f"  num_encoder_layers: {model.num_encoder_layers}",
        f"  num_decoder_layers: {model.num_decoder_layers}",
        f"  dropout: {training.dropout}",
        "training:",
        f"  max_minutes: {minutes:g}  # about {training.num_updates:,} updates on this machine",
        "  max_steps: null",
        f"  batch_tokens: {presets.BATCH_TOKENS}  # of a batch, padding included; affects memory",
        f"  accumulate: {preset.accumulate}  # batches of an update",
        "  schedule: inverse_sqrt  # the rate stays high; averaging checkpoints does the rest",
        f"  lr: {preset.lr}  # lower it if the loss jumps",
        f"  warmup_steps: {training.warmup_steps}",
        f"  log_every: {training.log_every}",
        f"  validate_every: {training.validate_every}",
        f"  save_every: {training.save_every}",
        f"  keep_last: {presets.NUM_AVERAGED}",
        f"  average: {presets.NUM_AVERAGED}  # the checkpoints of the last third of the training",
        "  patience: 100  # validations; with a budget of time, train to its end",
        f"  device: {_text(request.device)}",
        "decoding: {beam: 5, length_alpha: 1.0}",
    ]


def _text(value: str) -> str:
    """Return text as YAML reads it back."""
    return json.dumps(value, ensure_ascii=False)


def _corpus(files: Files) -> str:
    return f"{{src: [{_text(str(files.src))}], tgt: [{_text(str(files.tgt))}]}}"


def _summary(request: InitRequest, choice: _Choice) -> list[str]:
    training, preset = choice.training, choice.measured.preset
    megabytes = 4 * choice.measured.num_parameters / 1e6
    path = shlex.quote(str(request.config_path))
    updates = text_width.count(training.num_updates, "update")
    warning = "warning   that is little time for this corpus: take a longer --budget"
    return [
        f"wrote     {request.config_path}: the size `{preset.name}`, a model of "
        f"{megabytes:,.0f} MB",
        f"expect    about {updates} in {_format_time(request.budget_s)}, "
        f"{training.num_epochs:,.1f} epochs,",
        "          less what validations take; tokenizing comes on top",
        *([warning] if training.num_epochs < _MIN_EPOCHS else []),
        f"next      mtrain check {path}",
        f"          mtrain train {path}",
    ]


def _format_time(seconds: float) -> str:
    if seconds < 60:
        number, unit = f"{seconds:g}", "second"
    elif seconds < 2 * 3600:
        number, unit = f"{seconds / 60:.3g}", "minute"
    else:
        number, unit = f"{round(seconds / 3600, 1):,g}", "hour"
    return f"{number} {unit}{'s' * (number != '1')}"
