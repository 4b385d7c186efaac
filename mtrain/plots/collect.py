"""Read the data that the pictures of a run show; independent of matplotlib.

B batch, S source length, T target length, D model width, H heads, P positions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mtrain.config.sections import Config
from mtrain.data import prepare
from mtrain.data.batch import Batch, Lengths, Position, collate
from mtrain.data.loader import TrainingData
from mtrain.decode.pipeline import LineTranslator
from mtrain.decode.translator import Translator, load
from mtrain.errors import ConfigError, RunError, UserError
from mtrain.evaluation.metrics import noise_bleu
from mtrain.io.lines import read_lines
from mtrain.model.transformer import near_keep, sinusoids
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Progress
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

Floats = npt.NDArray[np.floating[Any]]
Keeps = npt.NDArray[np.bool_]
T = TypeVar("T")

_MAX_BATCHES = 1000  # of the first epoch, whose batches come in random order
_SINUSOIDAL_POSITIONS = 100
_STEP_KEYS = ("loss", "lr", "tgt_tokens_per_s")  # drawn from a logged step
_VALIDATION_KEYS = ("valid_loss", "valid_bleu")
_IDEAL_LENGTH = 12  # tokens of the validation sentence whose attention is drawn


class CheckpointMark(NamedTuple):
    """A checkpoint, or an average of those from `first_step` to `last_step`, and its label."""

    first_step: int
    last_step: int
    bleu: float
    text: str


class Curve(NamedTuple):
    """A value by step; a value that was not finite is NaN."""

    steps: Floats
    values: Floats


class Curves(NamedTuple):
    """The logged values by their key in `metrics.jsonl`, and the checkpoint to mark."""

    by_key: dict[str, Curve]
    mark: CheckpointMark | None


class AttentionPicture(NamedTuple):
    """The attention weights of all heads and layers for one sentence, with its tokens."""

    origin: str  # where the sentence comes from
    source: str
    translation: str
    src: list[str]
    tgt_in: list[str]
    tgt_out: list[str]
    maps: dict[str, list[Floats]]  # of each layer: encoder [H, S, S], decoder [H, T, T], cross


class BatchSize(NamedTuple):
    """The number of tokens of a batch, and the size of its padded tensors."""

    num_tokens: int  # of both sides
    num_positions: int  # of both sides, padding included
    width: int  # of the longer side


@dataclass(frozen=True)
class Batches:
    """Batches of the first epoch in the order of training."""

    first: Batch
    most_padded: Batch
    sizes: list[BatchSize]
    is_whole_epoch: bool


@dataclass
class Pictures:
    """Everything that can be drawn of a run, and a line for each thing that cannot."""

    config: Config
    curves: Curves | None = None
    attention: AttentionPicture | None = None
    positions: dict[str, Floats] = field(default_factory=dict)  # a table [P, D] by its name
    lengths: dict[str, tuple[Lengths, Lengths]] = field(default_factory=dict)  # by corpus
    batches: Batches | None = None
    skipped: list[str] = field(default_factory=list)

    def try_reading(self, name: str, read: Callable[[], T]) -> T | None:
        """Return what `read` returns; on a user's error, note that `name` is skipped."""
        try:
            return read()
        except UserError as error:
            self.skipped.append(f"{name}: skipped: {error}")
            return None


def gather(run: RunDir, sentence: str | None) -> Pictures:
    """Read everything that can be drawn of a run.

    Raises:
        ConfigError: if `sentence` is blank or not UTF-8.
        RunError: if this is no run folder, or nothing of it can be drawn.
    """
    if sentence is not None:
        if not sentence.strip():
            raise ConfigError("--sentence must have text, but is blank.")
        try:
            sentence.encode()
        except UnicodeEncodeError:
            raise ConfigError("--sentence must be UTF-8 text, but is not.") from None
    config = run.config
    pictures = Pictures(config)
    tokenizer = pictures.try_reading(
        "lengths, batch, masks", lambda: sentencepiece.load(run.tokenizer_dir)
    )
    pictures.curves = pictures.try_reading("curves", lambda: read_curves(run, pictures.skipped))
    if tokenizer is not None:
        _gather_data(pictures, run, tokenizer)
    is_learned = config.model.positions == "learned"
    names = "attention, alignment, positions" if is_learned else "attention, alignment"
    translator = pictures.try_reading(names, lambda: load(run, loading=LoadOptions(device="cpu")))
    if translator is not None:
        pictures.attention = pictures.try_reading(
            "attention, alignment", lambda: attention(translator, run, sentence)
        )
    if translator is not None or not is_learned:
        pictures.positions = position_tables(config, translator)
    if not (pictures.curves or pictures.positions or pictures.lengths):
        raise RunError(f"{run.path}: holds nothing to draw yet; `mtrain train CONFIG` fills it.")
    return pictures


def _gather_data(pictures: Pictures, run: RunDir, tokenizer: Tokenizer) -> None:
    config = pictures.config

    def read_training() -> None:
        alpha = config.tokenizer.sampling_alpha
        training = TrainingData(run.data_dir, tokenizer, config.seed, alpha)
        batches = read_batches(training, config.training.batch_tokens)
        pictures.lengths[training_name(training)] = training.lengths()
        pictures.batches = batches

    pictures.try_reading("batch, masks", read_training)
    sets = {"validation": partial(prepare.read_valid, run)}
    sets |= {f"test {name}": partial(prepare.read_test, run, name) for name in config.data.tests}
    for name, read in sets.items():
        lines = pictures.try_reading(f"lengths of {name}", read)
        if lines is not None and lines.src:
            src = [len(ids) for ids in tokenizer.encode_src(lines.src)]
            tgt = [len(ids) + 1 for ids in tokenizer.tgt.encode(lines.tgt)]
            pictures.lengths[name] = np.array(src, dtype=np.int32), np.array(tgt, dtype=np.int32)


def read_curves(run: RunDir, skipped: list[str]) -> Curves:
    """Read the curves of `metrics.jsonl`; note in `skipped` what is missing or damaged.

    Raises:
        RunError: if nothing was logged yet.
    """
    path = run.metrics_path
    if not path.is_file():
        raise RunError(f"{path}: is missing; `mtrain train CONFIG` writes it.")
    lines = []
    for number, text in enumerate(read_lines(path), start=1):
        try:
            lines.append(_parse_metrics(text))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            skipped.append(f"curves: a line skipped: {path}:{number}: is cut off.")
    steps = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "valid_loss" in line]
    if not steps and not validations:
        raise RunError(f"{path}: holds no logged step and no validation yet.")
    for name, rows in (("training loss", steps), ("validation loss and BLEU", validations)):
        if not rows:
            skipped.append(f"curves: {name} skipped: {path}: holds none yet.")
    rows_of = dict.fromkeys(_STEP_KEYS, steps) | dict.fromkeys(_VALIDATION_KEYS, validations)
    curves = {
        key: Curve(
            np.array([line["step"] for line in rows]),
            np.array([line[key] if math.isfinite(line[key]) else math.nan for line in rows]),
        )
        for key, rows in rows_of.items()
    }
    return Curves(curves, _mark(run, validations))


def _parse_metrics(text: str) -> dict[str, float]:
    line = json.loads(text)
    keys = _STEP_KEYS if "loss" in line else _VALIDATION_KEYS if "valid_loss" in line else ()
    step, values = int(line["step"]), {key: float(line[key]) for key in keys}
    if not 0 <= step < 2**53:
        raise ValueError
    return values | {"step": step}


def _mark(run: RunDir, validations: list[dict[str, float]]) -> CheckpointMark | None:
    """Return the checkpoints that made `model.safetensors`; if unknown, the best validation."""
    if origin := checkpoint.load_final_weights_info(run.model_path):
        first, last, count = origin.steps[0], origin.steps[-1], len(origin.steps)
        average = f"mean of {count} checkpoints, steps {first:,} to {last:,}"
        made_of = f"step {last:,}" if count == 1 else average
        return CheckpointMark(first, last, origin.bleu, f"model.safetensors: {made_of}")
    if not validations:
        return None
    quality_of = Progress(min_bleu=noise_bleu(run.config.data.tgt_lang)).quality_of
    best = max(
        validations,
        key=lambda line: (quality_of(line["valid_loss"], line["valid_bleu"]), -line["step"]),
    )
    step = int(best["step"])
    note = " (the run does not say what was chosen)" if run.model_path.is_file() else ""
    return CheckpointMark(step, step, best["valid_bleu"], f"best validation, step {step:,}{note}")


def choose_sentence(lines: Sequence[str], tokenizer: Tokenizer) -> int | None:
    """Return the row whose token count is nearest to _IDEAL_LENGTH; None if all are blank."""
    lengths = {
        row: len(ids) for row, ids in enumerate(tokenizer.encode_src(lines)) if lines[row].strip()
    }
    return min(lengths, key=lambda row: abs(lengths[row] - _IDEAL_LENGTH), default=None)


def attention(translator: Translator, run: RunDir, sentence: str | None) -> AttentionPicture:
    """Translate a sentence as the run does, and return the attention weights of its translation.

    Without a sentence, one of the validation set is taken.
    """
    tokenizer, origin = translator.tokenizer, "the given sentence"
    if sentence is None:
        lines = prepare.read_valid(run).src
        row = choose_sentence(lines, tokenizer)
        if row is None:
            raise RunError(f"{run.data_dir}: its validation set holds no sentence.")
        sentence, origin = lines[row], f"line {row + 1:,} of the validation set"
    src, tgt = tokenizer.encode_src([sentence]), tokenizer.tgt
    whole = translator.with_options(replace(translator.options, max_input_tokens=None))
    (line,) = LineTranslator(whole).translate([[sentence]])
    ids = [tgt.ids_of(line.best[0].tokens[:-1])]
    batch = collate(src, ids, tgt.pad, tgt.bos, tgt.eos).to(translator.device)
    maps = translator.model.attention_maps(batch.src_BS, batch.src_keep_BS, batch.tgt_in_BT)
    return AttentionPicture(
        origin,
        sentence,
        tgt.decode(ids)[0],
        tokenizer.src.pieces_of(batch.src_BS[0].tolist()),
        tgt.pieces_of(batch.tgt_in_BT[0].tolist()),
        tgt.pieces_of(batch.tgt_out_BT[0].tolist()),
        {
            kind: [layer_BHTS[0].numpy(force=True) for layer_BHTS in layers]
            for kind, layers in maps._asdict().items()
        },
    )


def position_tables(config: Config, translator: Translator | None) -> dict[str, Floats]:
    """Return the positional encodings [P, D] that are added to the embeddings, by their name.

    Learned encodings are those of the translator's model.
    """
    if config.model.positions == "sinusoidal":
        return {"sinusoidal": sinusoids(_SINUSOIDAL_POSITIONS, config.model.d_model).numpy()}
    assert translator is not None, "learned positions are weights of the model"
    model, count = translator.model, config.model.max_positions or 0
    indices = torch.arange(count, device=translator.device)
    return {
        "learned, source": model.src_positions(indices, count, torch.float32).numpy(force=True),
        "learned, target": model.tgt_positions(indices, count, torch.float32).numpy(force=True),
    }


def products_by_distance(products: Floats) -> list[Floats]:
    """Return mean, minimum and maximum of the products [P, P] at each distance |i - j|."""
    diagonals = [np.diagonal(products, distance) for distance in range(len(products))]
    return [
        np.array([reduce(diagonal) for diagonal in diagonals])
        for reduce in (np.mean, np.min, np.max)
    ]


def attention_masks(batch: Batch, row: int, window: int | None) -> tuple[Keeps, Keeps]:
    """Return the keep-masks of a source's self-attention [S, S], and of every target's [T, T]."""
    src_keep_S, cpu = batch.src_keep_BS[row], torch.device("cpu")
    encoder_SS = src_keep_S & near_keep(len(src_keep_S), window, cpu)
    decoder_TT = near_keep(batch.tgt_keep_BT.shape[1], window, cpu).tril()
    return encoder_SS.numpy(), decoder_TT.numpy()


def read_batches(training: TrainingData, budget: int) -> Batches:
    """Read the batches of the first epoch as training does, at most _MAX_BATCHES."""
    sizes: list[BatchSize] = []
    is_whole_epoch, most_padding = False, -1.0
    for batch, after in islice(training.batches(budget, Position()), _MAX_BATCHES):
        size = batch_size(batch)
        if not sizes:
            first = batch
        if padding([size]) > most_padding:
            most_padded, most_padding = batch, padding([size])
        sizes.append(size)
        is_whole_epoch = after.epoch > 0
        if is_whole_epoch:
            break
    return Batches(first, most_padded, sizes, is_whole_epoch)


def training_name(training: TrainingData) -> str:
    """Return a label for the pairs whose lengths `training` holds in memory."""
    if len(training.lengths()[0]) < len(training):
        return "training (beginning)"
    is_mixture = len(training.shares) > 1  # an epoch may repeat or omit pairs
    return "training (an epoch)" if is_mixture else "training"


def batch_size(batch: Batch) -> BatchSize:
    """Return the size of a batch."""
    width = max(batch.src_BS.shape[1], batch.tgt_in_BT.shape[1])
    num_tokens = int(batch.src_keep_BS.sum()) + batch.num_tgt_tokens
    return BatchSize(num_tokens, batch.num_positions, width)


def padding(sizes: Sequence[BatchSize]) -> float:
    """Return the fraction of the positions of batches that is padding."""
    num_positions = sum(size.num_positions for size in sizes)
    return 1 - sum(size.num_tokens for size in sizes) / num_positions
