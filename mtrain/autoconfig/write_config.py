"""Write a config that fits a corpus, a machine and a budget of time. Trains nothing for good.

What it measures and chooses, it says; what it writes is a config like any other, with comments.
"""

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
from mtrain.autoconfig.presets import Recipe, Tried
from mtrain.autoconfig.split import Look
from mtrain.config import config_file, json_schema
from mtrain.config.corpora import CorpusConfig
from mtrain.config.sections import TokenizerConfig
from mtrain.corpus.formats import Advance
from mtrain.corpus.reader import Pair, count_pairs
from mtrain.errors import ConfigError, DataError
from mtrain.io import text_width
from mtrain.io.atomic import check_writable, write_lines
from mtrain.run.logger import Console
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer, VocabularySizeError

_MOST_HELD_OUT = 1000  # pairs of a set
_SHARE_HELD_OUT = 0.05
_LEAST_HELD_OUT = 10
_SMALLEST_VOCABULARY = 300  # the 256 bytes, and some letters
_SEED = 1
_LEAST_EPOCHS = 3  # below which a translator has seen too little
_LANGUAGE = re.compile(r"\w[\w-]*")  # file names are made of it
_HALF = re.compile("[\ud800-\udfff]")  # how Python reads a byte of a name that is not UTF-8
_BUDGET = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?$")


class Files(NamedTuple):
    """A source file and its translation."""

    src: Path
    tgt: Path

    def corpus(self) -> CorpusConfig:
        """Return them as a config names them."""
        return CorpusConfig(src=[str(self.src)], tgt=[str(self.tgt)])


@dataclass(frozen=True)
class InitRequest:
    """What a user has.

    Attributes:
        train: the corpus.
        src_lang, tgt_lang: its languages.
        budget_s: seconds of training.
        device: auto, cpu, cuda, ...
        config_path: to write.
        run_dir: of the training to come.
        valid, test: None if pairs of the corpus are to be held out.
    """

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
        ConfigError: if it is none of these, or no time at all.
    """
    match = _BUDGET.match(text)
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not 0 < total < 10**9:
        raise ConfigError(
            f"`--budget` must be a time such as 30m or 1h30m, but is {text!r} instead."
        )
    return float(total)


class _ChosenPlan(NamedTuple):
    """All that was found out and chosen."""

    num_train: int
    num_tokens: int
    vocabulary: Tokenizer
    tried: Tried
    recipe: Recipe


def init(
    wanted: InitRequest,
    console: Console,
    advance: Advance,
    turn_to: Callable[[str], object] = lambda what: None,
) -> list[str]:
    """Measure, choose, and write the config and the files that are held out.

    Args:
        wanted: what the user has.
        console: is told what is found and chosen.
        advance: is told the bytes that were read.
        turn_to: is told what is done once all is read.

    Returns:
        What is written, and how to go on, line by line.

    Raises:
        ConfigError: if a language has no code, a path cannot be named in a config, a file to be
            written or a run in its folder is there already, or the device is not.
        DataError: if the corpus cannot be read, or has too few pairs.
        WriteError: if the files cannot be written.
    """
    sets = _sets(wanted)
    new = [files for name, files in sets.items() if getattr(wanted, name) is None]
    _check(wanted, sets, new)
    seen = split.look(wanted.train.corpus(), _SEED, advance)
    num_held_out = _num_held_out(seen, wanted.train, len(new))
    drawn = split.draw(seen.alone, [num_held_out] * len(new), _SEED) if new else []
    plan = _plan(wanted, seen, drawn, console, turn_to)
    turn_to("writing")
    _split_off(wanted, new, drawn)
    schema_line = json_schema.put_beside(wanted.config_path).rstrip("\n")
    write_lines(wanted.config_path, [schema_line, *_compose(wanted, sets, plan)])
    config_file.load(wanted.config_path)
    held_out = [
        f"wrote     {files.src} and {files.tgt.name}: {num_held_out:,} pairs, held out"
        for files in new
    ]
    return [*held_out, *_farewell(wanted, plan)]


def _sets(wanted: InitRequest) -> dict[str, Files]:
    """Return the validation and the test set, given or to be held out."""
    return {
        "valid": wanted.valid or _beside(wanted, "valid"),
        "test": wanted.test or _beside(wanted, "test"),
    }


def _check(wanted: InitRequest, sets: dict[str, Files], new: list[Files]) -> None:
    """Refuse what can be refused before anything is read at length."""
    for side, code in (("src", wanted.src_lang), ("tgt", wanted.tgt_lang)):
        if not _LANGUAGE.fullmatch(code):
            raise ConfigError(
                f"`--{side}-lang` must be a code such as en or pt-BR, but is {code!r} instead."
            )
    given = [own for own in (wanted.train, wanted.valid, wanted.test) if own is not None]
    for path in (wanted.run_dir, wanted.config_path, *chain.from_iterable(given)):
        if _HALF.search(str(path)):
            raise ConfigError(f"{str(path)!r}: must be UTF-8, as a config is, but is not.")
    for path in [wanted.config_path, *(path for files in new for path in files)]:
        if path.exists():
            raise ConfigError(f"{path}: is there already; take another --output, or delete it.")
    if RunDir(Path(wanted.run_dir)).config_path.exists():
        raise ConfigError(f"{wanted.run_dir}: holds a run already; take another --run.")
    check_writable(wanted.config_path)
    for name, files in sets.items():
        if files not in new:
            count_pairs(files.corpus(), f"--{name}")


def _beside(wanted: InitRequest, name: str) -> Files:
    stem, src, tgt = wanted.config_path.with_suffix(""), wanted.src_lang, wanted.tgt_lang
    if src.lower() == tgt.lower():  # which is one name where case does not count
        src, tgt = f"src.{src}", f"tgt.{tgt}"
    return Files(Path(f"{stem}.{name}.{src}"), Path(f"{stem}.{name}.{tgt}"))


def _num_held_out(seen: Look, files: Files, num_sets: int) -> int:
    """Return how many pairs each new set has."""
    if not num_sets:
        return 0
    count = min(_MOST_HELD_OUT, int(_SHARE_HELD_OUT * len(seen.alone)))
    if count < _LEAST_HELD_OUT:
        least = int(_LEAST_HELD_OUT / _SHARE_HELD_OUT)
        raise DataError(
            f"{files.src} must have at least {least:,} pairs that stand in it once, of which some "
            f"can be held out, but has {len(seen.alone):,} instead; give --valid and --test."
        )
    return count


def _split_off(wanted: InitRequest, new: list[Files], drawn: list[Ints]) -> None:
    """Write pairs of the corpus to new files; training leaves them out by itself."""
    if not new:
        return
    rows = np.sort(np.concatenate(drawn))
    pair_of = dict(zip(rows.tolist(), split.collect(wanted.train.corpus(), rows), strict=True))
    for files, own in zip(new, drawn, strict=True):
        pairs = [pair_of[row] for row in own.tolist()]
        write_lines(files.src, (pair.src for pair in pairs))
        write_lines(files.tgt, (pair.tgt for pair in pairs))


def _plan(
    wanted: InitRequest,
    seen: Look,
    drawn: list[Ints],
    console: Console,
    turn_to: Callable[[str], object],
) -> _ChosenPlan:
    """Find out and choose; the vocabulary is one that the corpus fills without what is drawn."""
    held_out = {row for own in drawn for row in own.tolist()}
    num_train = seen.num_pairs - len(held_out)
    kept = [pair for pair in seen.sample if pair.line - 1 not in held_out]
    each = (seen.src_words / seen.num_pairs, seen.tgt_words / seen.num_pairs)
    console.say(
        f"corpus    {text_width.count(seen.num_pairs, 'pair')}, of {each[0]:.1f} source and "
        f"{each[1]:.1f} target words"
    )
    turn_to("learning pieces")
    vocabulary = _train_tokenizer(kept, num_train)
    sample = benchmark.encode(kept, vocabulary)
    num_tokens = round(sample.tgt_tokens_a_pair * num_train)
    console.say(
        f"pieces    {len(vocabulary.tgt):,} shared; {sample.tgt_tokens_a_pair:.1f} target tokens a "
        "pair"
    )
    tried = []
    for own in _try_sizes(wanted, num_train, sample, vocabulary, turn_to):
        epochs = own.tokens_per_s * wanted.budget_s / num_tokens
        console.say(
            f"tried     {own.size.name:<6}  {own.num_weights:>11,} weights  "
            f"{own.tokens_per_s:>7,.0f} tokens/s  {epochs:>6,.1f} epochs"
        )
        tried.append(own)
    chosen = presets.choose(tried, wanted.budget_s)
    recipe = presets.recipe(chosen, wanted.budget_s, num_tokens)
    return _ChosenPlan(num_train, num_tokens, vocabulary, chosen, recipe)


def _train_tokenizer(pairs: list[Pair], num_train: int) -> Tokenizer:
    """Train the vocabulary that a corpus can fill, on pairs of it."""
    size = presets.vocabulary_size(num_train)
    src, tgt = [pair.src for pair in pairs], [pair.tgt for pair in pairs]
    while True:
        try:
            return sentencepiece.train(
                TokenizerConfig(kind="bpe", vocab_size=size), src, tgt, _SEED
            )
        except VocabularySizeError as error:
            if size <= _SMALLEST_VOCABULARY or error.fitting > size:
                size = error.fitting
            else:
                size = max(_SMALLEST_VOCABULARY, size // 2)


def _try_sizes(
    wanted: InitRequest,
    num_train: int,
    sample: Sample,
    vocabulary: Tokenizer,
    turn_to: Callable[[str], object],
) -> Iterator[Tried]:
    """Try sizes, the smallest first, until one is too large for corpus or budget."""
    for size in presets.SIZES:
        if num_train < size.least_pairs:
            return
        turn_to(f"trying {size.name}")
        tried = benchmark.measure(size, sample, vocabulary, wanted.device)
        yield tried
        if not presets.fits(tried, wanted.budget_s):
            return


def _compose(wanted: InitRequest, sets: dict[str, Files], plan: _ChosenPlan) -> list[str]:
    """Return the lines of the config."""
    alone = [name for name in sets if getattr(wanted, name) is None]
    held = "  # Held out of the training files; `data.clean` keeps these pairs out of the training."
    pairs = text_width.count(plan.num_train, "pair")
    return [
        f"# {wanted.src_lang}-{wanted.tgt_lang}, {pairs}, by `mtrain init`.",
        "# Every key that is not here has a default; `mtrain train` writes them all to the run",
        "# folder's config.yaml. All of it can be changed.",
        f"run_dir: {_text(wanted.run_dir)}",
        "data:",
        f"  src_lang: {_text(wanted.src_lang)}",
        f"  tgt_lang: {_text(wanted.tgt_lang)}",
        f"  train: {_corpus(wanted.train)}",
        *([held] if alone else []),
        f"  valid: {_corpus(sets['valid'])}",
        f"  tests: {{test: {_corpus(sets['test'])}}}",
        *_model_lines(wanted, plan),
        *_training_lines(wanted, plan),
        "decoding: {beam: 5, length_alpha: 1.0}",
    ]


def _model_lines(wanted: InitRequest, plan: _ChosenPlan) -> list[str]:
    size, recipe, model = plan.tried.size, plan.recipe, plan.tried.size.model
    pairs = text_width.count(plan.num_train, "pair")
    seen = f"{presets.TOKENS_A_WEIGHT:g} tokens a weight in the time that there is"
    why = ["The smallest, though it does not see", f"# {seen}."]
    if presets.fits(plan.tried, wanted.budget_s):
        why = ["The largest that sees", f"# {seen}, and that such a corpus can teach."]
    return [
        f"# As many pieces as {pairs} can teach; both languages share them.",
        f"tokenizer: {{kind: bpe, vocab_size: {len(plan.vocabulary.tgt)}}}",
        f"# The size `{size.name}`: {plan.tried.num_weights:,} weights. {why[0]}",
        why[1],
        f"# Dropout is higher, the more often the corpus is seen: about {recipe.num_epochs:,.0f} "
        "times here.",
        "model:",
        f"  d_model: {model.d_model}",
        f"  num_heads: {model.num_heads}",
        f"  d_ff: {model.d_ff}",
        f"  num_encoder_layers: {model.num_encoder_layers}",
        f"  num_decoder_layers: {model.num_decoder_layers}",
        f"  dropout: {recipe.dropout}",
    ]


def _training_lines(wanted: InitRequest, plan: _ChosenPlan) -> list[str]:
    size, recipe, minutes = plan.tried.size, plan.recipe, wanted.budget_s / 60
    return [
        "training:",
        f"  max_minutes: {minutes:g}  # about {recipe.num_updates:,} updates on this machine",
        "  max_steps: null",
        f"  batch_tokens: {presets.BATCH_TOKENS}  # of a batch, padding included; affects memory",
        f"  accumulate: {size.accumulate}  # batches of an update",
        "  schedule: inverse_sqrt  # the rate stays high; averaging checkpoints does the rest",
        f"  lr: {size.lr}  # lower it if the loss jumps",
        f"  warmup_steps: {recipe.warmup_steps}",
        f"  log_every: {recipe.log_every}",
        f"  validate_every: {recipe.validate_every}",
        f"  save_every: {recipe.save_every}",
        f"  keep_last: {presets.AVERAGED}",
        f"  average: {presets.AVERAGED}  # the checkpoints of the last third of the training",
        "  patience: 100  # validations; with a budget of time, train to its end",
        f"  device: {_text(wanted.device)}",
    ]


def _text(value: str) -> str:
    """Return text as YAML reads it back."""
    return json.dumps(value, ensure_ascii=False)


def _corpus(files: Files) -> str:
    return f"{{src: [{_text(str(files.src))}], tgt: [{_text(str(files.tgt))}]}}"


def _farewell(wanted: InitRequest, plan: _ChosenPlan) -> list[str]:
    recipe, size = plan.recipe, plan.tried.size
    megabytes, path = 4 * plan.tried.num_weights / 1e6, shlex.quote(str(wanted.config_path))
    updates = text_width.count(recipe.num_updates, "update")
    lines = [
        f"wrote     {wanted.config_path}: the size `{size.name}`, a model of {megabytes:,.0f} MB",
        f"expect    about {updates} in {_say_time(wanted.budget_s)}, "
        f"{recipe.num_epochs:,.1f} epochs,",
        "          less what validations take; tokenizing comes on top",
        f"next      mtrain check {path}",
        f"          mtrain train {path}",
    ]
    if recipe.num_epochs < _LEAST_EPOCHS:
        lines.insert(
            3,
            "warning   that is little time for this corpus: take a longer --budget",
        )
    return lines


def _say_time(seconds: float) -> str:
    if seconds < 60:
        number, unit = f"{seconds:g}", "second"
    elif seconds < 2 * 3600:
        number, unit = f"{seconds / 60:.3g}", "minute"
    else:
        number, unit = f"{round(seconds / 3600, 1):,g}", "hour"
    return f"{number} {unit}{'s' * (number != '1')}"
