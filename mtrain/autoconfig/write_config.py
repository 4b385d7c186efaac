"""Write a commented config for a corpus, a machine and a time budget."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.audit.features import Flags
from mtrain.audit.unicode_classes import is_unspaced
from mtrain.autoconfig import benchmark, presets, split
from mtrain.autoconfig.benchmark import Sample
from mtrain.autoconfig.presets import MeasuredPreset, Overhead, Preset, TrainingPlan
from mtrain.autoconfig.split import CorpusOverview, HeldOut
from mtrain.config import config_file
from mtrain.config.config_file import dump_inline
from mtrain.config.corpora import Corpus, FilesCorpus, TsvCorpus, bidirectional_corpora
from mtrain.config.sections import (
    ConsistencyConfig,
    DataConfig,
    DecodingConfig,
    TokenizerConfig,
)
from mtrain.corpus.reader import Reader, possible_header
from mtrain.errors import ConfigError, DataError
from mtrain.io.atomic import check_writable, whole_file, write_lines
from mtrain.io.lines import Advance
from mtrain.io.text_width import count
from mtrain.run.logger import Console
from mtrain.run.run_dir import RunDir
from mtrain.runtime.device import pick_device
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer, VocabularySizeError

_MAX_HELD_OUT = 1000  # pairs of a set
_HELD_OUT_PER_S = 2  # of the budget
_MIN_VOCABULARY = 300  # the 256 bytes, and some letters
_SEED = 1
_MIN_READS = 3  # of a pair; below, a warning
_FEW_PAIRS = 10_000  # up to which back-translation raised BLEU (docs/low-resource.md)
_UNIT_LINES = 1000  # of the sample, by whose script words or letters are counted
_USUAL_LOAD = 0.5  # of a processor; beyond, a warning
_CLEAN = ["blank-side", "held-out-pair", "held-out"]  # where pairs are held out
_DECODING = DecodingConfig(beam=5, length_alpha=1.0)
_LANGUAGE = re.compile(r"\w[\w-]*")  # part of file names
_BUDGET = re.compile(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?$")
_OPTIONS = {"train": "--src", "valid": "--valid", "test": "--test"}  # that name files
_KEYS = {"train": "data.train", "valid": "data.valid", "test": "data.tests.test"}


@dataclass(frozen=True)
class InitRequest:
    """The validated options of `mtrain init`."""

    data: DataConfig  # held-out sets are named, and do not exist yet
    held_out: dict[str, FilesCorpus]  # the sets among them that are to be drawn, by key
    budget_s: float
    device: str
    config_path: Path
    run_dir: str


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


def parse_request(
    languages: tuple[str, str],
    files: Mapping[str, tuple[Path, Path]],
    overrides: Sequence[str],
    budget: str,
    device: str,
    config_path: Path | None,
    run_dir: str | None,
) -> InitRequest:
    """Check the options of `mtrain init`, without reading a corpus.

    Args:
        languages: the codes of source and target.
        files: the source and target file of `train`, `valid` and `test`, as far as given.
        overrides: `data.train=...`, `data.valid=...` and `data.tests=...`, as after `--set`.
        budget: as `parse_budget` reads it.
        device: of the measurements and of the training.
        config_path: to write; SRC-TGT.yaml if None, with the language codes.
        run_dir: of the config; runs/SRC-TGT if None.

    Raises:
        ConfigError, RunError: if one is invalid, or a file to be written or the run exists.
    """
    for side, code in zip(("src", "tgt"), languages, strict=True):
        if not _LANGUAGE.fullmatch(code):
            raise ConfigError(
                f"`--{side}-lang` must be a code such as en or pt-BR, but is {code!r} instead."
            )
    set_keys: dict[str, str] = {}  # by the name of the corpus that they change
    for override in overrides:
        key = override.partition("=")[0]
        if ".".join(key.split(".")[:2]) not in ("data.train", "data.valid", "data.tests"):
            raise ConfigError(
                f"`--set` must name data.train, data.valid or data.tests, but is {override!r} "
                "instead; other keys can be changed in the config that is written."
            )
        for name, corpus_key in _KEYS.items():
            if f"{key}.".startswith(f"{corpus_key}.") or corpus_key.startswith(f"{key}."):
                set_keys[name] = key
    for name in files:
        if name in set_keys:
            raise ConfigError(
                f"`{_OPTIONS[name]}` has no effect with `--set {set_keys[name]}=...`; leave it out."
            )
    name = "-".join(languages)
    config_path, run_dir = config_path or Path(f"{name}.yaml"), run_dir or f"runs/{name}"
    if config_path.is_dir():
        raise ConfigError(f"`--output` must be a file, but is the folder {config_path} instead.")
    config_file.check_utf8([run_dir, config_path, *chain.from_iterable(files.values())])
    given = files.keys() | set_keys.keys()
    if "train" not in given:
        raise ConfigError(
            "`--src` and `--tgt` must name the corpus, or `--set data.train=...`, but neither does."
        )
    held_out = {
        name: _held_out_files(config_path, name, languages)
        for name in ("valid", "test")
        if name not in given
    }
    corpora = {name: corpus.model_dump() for name, corpus in held_out.items()}
    corpora |= {key: {"src": [str(src)], "tgt": [str(tgt)]} for key, (src, tgt) in files.items()}
    if "test" in corpora:
        corpora["tests"] = {"test": corpora.pop("test")}
    tree = {"src_lang": languages[0], "tgt_lang": languages[1], **corpora}
    data = config_file.from_tree({"run_dir": run_dir, "data": tree}, "--set", overrides).data
    if held_out and bidirectional_corpora(data.train):
        raise ConfigError(
            "`data.train` must have each corpus in one direction to hold out pairs, but has one in "
            "both; give --valid and --test, or add the other direction to the config that is "
            "written."
        )
    new_paths = chain.from_iterable(corpus.src + corpus.tgt for corpus in held_out.values())
    for path in [str(config_path), *new_paths]:
        if Path(path).exists():
            raise ConfigError(f"{path}: already exists; choose another with -o, or delete it.")
    RunDir(Path(run_dir)).check_files()
    if RunDir(Path(run_dir)).config_path.exists():
        raise ConfigError(f"{run_dir}: already holds a run; choose another with --run.")
    check_writable(config_path)
    return InitRequest(data, held_out, parse_budget(budget), device, config_path, run_dir)


def _held_out_files(config_path: Path, name: str, languages: tuple[str, str]) -> FilesCorpus:
    stem, (src, tgt) = config_path.with_suffix(""), languages
    if src.lower() == tgt.lower():  # the same name on a case-insensitive file system
        src, tgt = f"src.{src}", f"tgt.{tgt}"
    return FilesCorpus(src=[f"{stem}.{name}.{src}"], tgt=[f"{stem}.{name}.{tgt}"])


class _Choice(NamedTuple):
    """The chosen tokenizer, preset and schedule."""

    num_train: int  # pairs
    tokenizer: Tokenizer
    measured: MeasuredPreset
    training: TrainingPlan


class InitReport(NamedTuple):
    """The config that was written, and the lines that say what was chosen."""

    config_path: Path
    lines: list[str]


def init(
    request: InitRequest,
    console: Console,
    advance: Advance,
    set_status: Callable[[str], object] = lambda what: None,
) -> InitReport:
    """Measure, choose, and write the config and the held-out files.

    Args:
        request: the options.
        console: prints measurements and choices.
        advance: called with the number of bytes read since the last call.
        set_status: called with the name of each later stage.

    Raises:
        ConfigError: if the device is invalid.
        DataError: if a corpus cannot be read, or has too few pairs.
        WriteError: if the files cannot be written.
    """
    pick_device(request.device)  # raises before a corpus is read
    data = _with_headers(request.data, console)
    request, load, started = replace(request, data=data), benchmark.load_average(), time.monotonic()
    tests = {f"data.tests.{name}": corpus for name, corpus in data.tests.items()}
    sets: dict[str, Corpus] = {"data.valid": data.valid, **tests}
    given = {
        name: split.read_set(corpus, name)
        for name, corpus in sets.items()
        if corpus not in request.held_out.values()
    }
    overview = split.read_overview(
        data.train, [leaks for leaks, _ in given.values()], _SEED, advance
    )
    max_pairs = min(_MAX_HELD_OUT, math.ceil(_HELD_OUT_PER_S * request.budget_s))
    held_out = split.draw(overview, len(request.held_out), max_pairs, _SEED)
    is_kept = _kept(overview, held_out, console)
    num_distinct = overview.num_distinct(is_kept)
    pairs = [pair for row, pair in overview.sample.items() if is_kept[row]]
    is_learned = is_kept & overview.is_real  # the tokenizer learns from real pairs alone
    real_pairs = [pair for row, pair in overview.sample.items() if is_learned[row]]
    set_status("learning subwords")
    tokenizer = _train_tokenizer(real_pairs, overview.num_distinct(is_learned))
    sample = benchmark.encode(pairs, tokenizer)
    num_train = round(int(is_kept.sum()) * sample.share)
    num_tokens = round(num_train * sample.tgt_tokens_per_pair)
    tokens = f"{sample.tgt_tokens_per_pair:.1f} target tokens a pair"
    console.say(f"subwords  {len(tokenizer.tgt):,} shared; {tokens}")
    tokenizing_s = time.monotonic() - started  # `mtrain train` will need about as long to tokenize
    measured = _measure(request, num_distinct, sample, console, set_status)
    _warn_of_other_programs(load, measured.spread, console)
    set_status("translating")
    lines = [src for src, _ in pairs]
    greedy_s, beam_s = (
        benchmark.seconds_per_sentence(measured.preset, sample, lines, decoding, request.device)
        for decoding in (_DECODING.model_copy(update={"beam": 1}), _DECODING)
    )
    num_drawn = len(held_out.sets[0]) if held_out.sets else 0
    num_valid, *num_tests = (given[name][1] if name in given else num_drawn for name in sets)
    overhead = Overhead(
        benchmark.startup_s(),
        tokenizing_s,
        num_valid * greedy_s,
        num_valid * greedy_s * (1 + _DECODING.max_extra_tokens / sample.src_tokens_per_pair),
        sum(num_tests) * beam_s,
    )
    scale = request.budget_s, num_tokens, overhead, is_kept.sum() / num_distinct
    training = presets.plan_training(measured, *scale)
    if presets.gains_by_consistency(training, measured.batch_tokens):
        set_status("trying a consistency loss")
        chosen = measured.preset, measured.batch_tokens
        measured = _tried(request, *chosen, sample, console, presets.CONSISTENCY)
        training = presets.plan_training(measured, *scale)
    set_status("writing")
    schema_line = config_file.write_schema_beside(request.config_path).splitlines()
    choice = _Choice(num_train, tokenizer, measured, training)
    with whole_file(request.config_path) as beside:
        write_lines(beside, [*schema_line, *_config_lines(request, choice)])
        report = _write_held_out(request, held_out)
    config_file.load(request.config_path)
    return InitReport(request.config_path, [*report, *_summary(request, choice, overhead)])


def _warn_of_other_programs(load: float, spread: float, console: Console) -> None:
    if load > _USUAL_LOAD or spread > benchmark.USUAL_SPREAD:
        console.say(
            f"warning   speeds varied {spread:.1f}-fold, load {load:.1f} a processor: "
            "other programs run here,"
        )
        console.say("          and the plan is for a machine that stays as busy")


def _with_headers(data: DataConfig, console: Console) -> DataConfig:
    """Set `header: true` for TSV corpora whose files all begin with a likely header; say so."""

    def header_of(corpus: TsvCorpus, path: str) -> tuple[str, str] | None:
        reader = Reader(corpus.model_copy(update={"tsv": [path]}))
        next(reader.blocks(), None)
        return possible_header(reader.parts[0].src, data)

    def with_header(corpus: Corpus) -> Corpus:
        if not isinstance(corpus, TsvCorpus) or corpus.header is not None:
            return corpus
        headers = {path: header_of(corpus, path) for path in corpus.tsv}
        has_header = all(headers.values())
        for path, cells in headers.items():
            if cells:
                note = "left out by `header: true`"
                if not has_header:
                    note = "a pair, as other files of the corpus have no header"
                console.say(f"header    {path}: {' TAB '.join(cells)}: {note}")
        return corpus.model_copy(update={"header": True}) if has_header else corpus

    train = data.train
    return data.model_copy(
        update={
            "train": [*map(with_header, train)] if isinstance(train, list) else with_header(train),
            "valid": with_header(data.valid),
            "tests": {name: with_header(corpus) for name, corpus in data.tests.items()},
        }
    )


def _kept(overview: CorpusOverview, held_out: HeldOut, console: Console) -> Flags:
    """Return which pairs training keeps before `data.max_tokens` applies; print how many.

    Raises:
        DataError: if a corpus of a mixture has none.
    """
    reasons = {
        "blank": overview.is_blank,
        "in the given sets": overview.shares_given if held_out.sets else overview.is_given,
        "held out": held_out.is_excluded,
    }
    is_kept = np.ones(overview.num_pairs, bool)
    dropped = []
    for reason, has_reason in reasons.items():
        if num_dropped := int((is_kept & has_reason).sum()):
            dropped.append(f"{num_dropped:,} {reason}")
        is_kept &= ~has_reason
    src_unit, tgt_unit = map(_unit, zip(*overview.sample.values(), strict=True))
    console.say(
        f"corpus    {count(overview.num_pairs, 'pair')}, of "
        f"{overview.src_words / overview.num_pairs:.1f} source"
        f"{f' {src_unit}' * (src_unit != tgt_unit)} and "
        f"{overview.tgt_words / overview.num_pairs:.1f} target {tgt_unit}"
    )
    console.say(
        f"training  {count(int(is_kept.sum()), 'pair')}, "
        f"{overview.num_distinct(is_kept):,} of them different"
    )
    if dropped:
        console.say(f"dropped   {', '.join(dropped)}")
    for name, num_kept in overview.num_by_corpus(is_kept).items():
        if name is not None and not num_kept:
            raise DataError(
                f"`{name}` must have pairs to train on, but all are blank, in the given sets or "
                "held out; leave it out."
            )
    return is_kept


def _unit(lines: Sequence[str]) -> str:
    """Return the unit that an overview counts as words: letters in scripts without spaces."""
    return "letters" if is_unspaced("".join(lines[:_UNIT_LINES])) else "words"


def _train_tokenizer(pairs: Sequence[tuple[str, str]], num_pairs: int) -> Tokenizer:
    """Train a tokenizer, with a smaller vocabulary if the pairs do not fill the preset one.

    If a text has many characters, as Chinese has, the preset size is that of all other pieces.

    Raises:
        DataError: if there is no pair.
    """
    if not pairs:
        raise DataError(
            "the corpus must have pairs to train on, but all are blank or in the given sets."
        )
    num_characters = len(set(chain.from_iterable(chain.from_iterable(pairs))))
    added = num_characters if num_characters > _MIN_VOCABULARY else 0
    size = presets.vocabulary_size(num_pairs)
    while True:
        try:
            config = TokenizerConfig(kind="bpe", vocab_size=size + added)
            return sentencepiece.train(config, pairs, len(pairs), _SEED)
        except VocabularySizeError as error:
            is_last = size <= _MIN_VOCABULARY or error.fitting > size + added
            size = error.fitting - added if is_last else max(_MIN_VOCABULARY, size // 2)


def _measure(
    request: InitRequest,
    num_pairs: int,
    sample: Sample,
    console: Console,
    set_status: Callable[[str], object],
) -> MeasuredPreset:
    """Measure presets, the smallest first, until one is too large for corpus or budget; choose one.

    If the budget is short, measure it again with smaller batches.
    """

    def measure(preset: Preset, batch_tokens: int) -> MeasuredPreset:
        set_status(f"trying {preset.name}")
        return _tried(request, preset, batch_tokens, sample, console)

    candidates: list[MeasuredPreset] = []
    for preset in presets.PRESETS:
        if num_pairs >= preset.min_pairs:
            candidates.append(measure(preset, presets.BATCH_TOKENS))
            if not presets.fits(candidates[-1], request.budget_s):
                break
    chosen = presets.choose(candidates, request.budget_s)
    batch_tokens = presets.batch_tokens(chosen, request.budget_s)
    return chosen if batch_tokens == chosen.batch_tokens else measure(chosen.preset, batch_tokens)


def _tried(
    request: InitRequest,
    preset: Preset,
    batch_tokens: int,
    sample: Sample,
    console: Console,
    consistency: ConsistencyConfig | None = None,
) -> MeasuredPreset:
    """Measure a preset and print its speed."""
    measured = benchmark.measure(preset, batch_tokens, sample, request.device, consistency)
    what = f"{measured.num_parameters:,} weights" if consistency is None else "consistency loss"
    console.say(
        f"tried     {preset.name:<6}  {what:>19}  batches of {batch_tokens:<5,}  "
        f"{measured.tokens_per_s:>7,.0f} tokens/s"
    )
    return measured


def _write_held_out(request: InitRequest, held_out: HeldOut) -> list[str]:
    """Write all held-out files or none; return a line of the report for each set."""
    if not held_out.sets:
        return []
    rows = np.sort(np.concatenate(held_out.sets))
    pairs = split.collect(request.data.train, rows)
    pair_of = dict(zip(rows.tolist(), pairs, strict=True))
    report = []
    with ExitStack() as stack:
        for corpus, set_rows in zip(request.held_out.values(), held_out.sets, strict=True):
            src, tgt = Path(corpus.src[0]), Path(corpus.tgt[0])
            besides = [stack.enter_context(whole_file(path)) for path in (src, tgt)]
            write_lines(besides[0], (pair_of[row].src for row in set_rows.tolist()))
            write_lines(besides[1], (pair_of[row].tgt for row in set_rows.tolist()))
            report.append(f"wrote     {src} and {tgt}: {len(set_rows):,} pairs, held out")
    return report


def _config_lines(request: InitRequest, choice: _Choice) -> list[str]:
    """Return the lines of the config."""
    data, training, preset = request.data, choice.training, choice.measured.preset
    pairs, minutes = count(choice.num_train, "pair"), round(training.training_s / 60, 2) or 0.01
    seen = f"{presets.MIN_TOKENS_PER_PARAMETER:g} tokens a weight in the time that there is"
    why = ["The smallest, though it does not see", f"# {seen}."]
    if presets.fits(choice.measured, request.budget_s):
        why = ["The largest that sees", f"# {seen}, and that such a corpus can teach."]
    if isinstance(data.train, list):
        corpora = ["  train:", *(f"    - {_corpus(corpus)}" for corpus in data.train)]
    else:
        corpora = [f"  train: {_corpus(data.train)}"]
    tests = [f"    {dump_inline(name)}: {_corpus(test)}" for name, test in data.tests.items()]
    clean = [
        "  # Sets were held out: they are copies of training pairs. The training drops those, and",
        "  # all pairs that share a sentence with a set.",
        f"  clean: [{', '.join(_CLEAN)}]",
    ]
    return [
        f"# {data.src_lang}-{data.tgt_lang}, {pairs}, by `mtrain init`.",
        "# Every key that is not here has a default; `mtrain train` writes them all to the run",
        "# folder's config.yaml. All of it can be changed.",
        f"run_dir: {dump_inline(request.run_dir)}",
        "data:",
        f"  src_lang: {dump_inline(data.src_lang)}",
        f"  tgt_lang: {dump_inline(data.tgt_lang)}",
        *corpora,
        f"  valid: {_corpus(data.valid)}",
        *(["  tests:", *tests] if tests else []),
        *(clean if request.held_out else []),
        f"# As many subwords as {pairs} can teach; both languages share them.",
        f"tokenizer: {{kind: bpe, vocab_size: {len(choice.tokenizer.tgt)}}}",
        f"# The size `{preset.name}`: {choice.measured.num_parameters:,} weights. {why[0]}",
        why[1],
        f"# Dropout is higher, the more often a pair is seen: about "
        f"{training.num_reads:,.0f} times here.",
        "model:",
        f"  d_model: {preset.model.d_model}",
        f"  num_heads: {preset.model.num_heads}",
        f"  d_ff: {preset.model.d_ff}",
        f"  num_encoder_layers: {preset.model.num_encoder_layers}",
        f"  num_decoder_layers: {preset.model.num_decoder_layers}",
        f"  dropout: {training.dropout}",
        "training:",
        f"  # Of {_format_time(request.budget_s)}; tokenizing, the last validations and the test",
        "  # sets take the rest.",
        f"  max_minutes: {minutes:g}  # about {training.num_updates:,} updates on this machine",
        "  max_steps: null",
        f"  batch_tokens: {choice.measured.batch_tokens}  # padding included; affects memory",
        f"  accumulate: {preset.accumulate}  # batches of an update",
        *_consistency_lines(choice.measured.consistency),
        f"  optimizer: {preset.optimizer}",
        "  schedule: linear  # the rate falls to 0 at the end of the time",
        f"  lr: {training.lr:.2g}  # lower it if the loss jumps",
        f"  warmup_steps: {training.warmup_steps}",
        f"  log_every: {training.log_every}",
        f"  validate_every: {training.validate_every}",
        f"  save_every: {training.save_every}",
        f"  keep_last: {presets.NUM_AVERAGED}",
        f"  average: {presets.NUM_AVERAGED}  # the checkpoints of the last tenth of the training",
        "  patience: 100  # validations; with a budget of time, train to its end",
        f"  device: {dump_inline(request.device)}",
        f"decoding: {{beam: {_DECODING.beam}, length_alpha: {_DECODING.length_alpha}}}",
    ]


def _consistency_lines(consistency: ConsistencyConfig | None) -> list[str]:
    if consistency is None:
        return []
    return [
        "  # Pairs are read so often that a second pass of each, with other dropout, must agree",
        "  # with the first (SimCut). An update takes about twice the time.",
        f"  consistency: {{weight: {consistency.weight}, cutoff: {consistency.cutoff}}}",
    ]


def _corpus(corpus: Corpus) -> str:
    keys = corpus.model_dump(exclude_unset=True).items()
    return f"{{{', '.join(f'{key}: {dump_inline(value)}' for key, value in keys)}}}"


def _summary(request: InitRequest, choice: _Choice, overhead: Overhead) -> list[str]:
    training, preset = choice.training, choice.measured.preset
    megabytes = 4 * choice.measured.num_parameters / 1e6
    path = shlex.quote(str(request.config_path))
    num_s = math.ceil(overhead.fixed_s)
    remarks = []
    if training.num_reads < _MIN_READS:
        remarks.append("warning   that is little time for this corpus: take a longer --budget")
    if training.training_s + overhead.fixed_s > request.budget_s:
        problem = "warning   training and the rest take longer than the budget"
        is_given = len(request.held_out) < 2  # with --valid or --test
        remarks.append(f"{problem}: take smaller sets" if is_given else problem)
    if choice.num_train <= _FEW_PAIRS:
        help_of = "mtrain augment --help"
        remarks.append(f"hint      with few pairs, text in one language helps: {help_of}")
    return [
        f"wrote     {request.config_path}: the size `{preset.name}`, a model of "
        f"{megabytes:,.0f} MB",
        f"expect    about {count(training.num_updates, 'update')}, {training.num_epochs:,.1f} "
        f"epochs, in {_format_time(training.training_s)};",
        f"          tokenizing, the last validations and the test sets: {_format_time(num_s)}",
        *remarks,
        f"next      mtrain check {path}",
        f"          mtrain train {path}",
    ]


def _format_time(seconds: float) -> str:
    if seconds < 60:
        number, unit = f"{seconds:.3g}", "second"
    elif seconds < 2 * 3600:
        number, unit = f"{seconds / 60:.3g}", "minute"
    else:
        number, unit = f"{round(seconds / 3600, 1):,g}", "hour"
    return f"{number} {unit}{'s' * (number != '1')}"
