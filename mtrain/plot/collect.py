"""What the pictures of a run show, as numbers and words. Knows nothing of how they are drawn.

Shapes: B batch, S source length, T target length, D model width, H heads, P positions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrain.config.sections import Config
from mtrain.data import prepare
from mtrain.data.arrow_shards import Lengths
from mtrain.data.batch import Batch, collate
from mtrain.data.loader import TrainingData
from mtrain.data.sampler import Position
from mtrain.decode.translator import EncodedSource, Translator, load
from mtrain.errors import ConfigError, RunError, UserError
from mtrain.io.lines import read_lines
from mtrain.model.transformer import near_keep, sinusoids
from mtrain.run import checkpoint
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

Floats = npt.NDArray[np.floating[Any]]
Keeps = npt.NDArray[np.bool_]
T = TypeVar("T")

_MAX_BATCHES = 1000  # of the first epoch; they come in random order, so that these are a sample
_SINUSOIDAL_POSITIONS = 100
_OF_STEP = ("loss", "lr", "tgt_tokens_per_s")  # of a logged step, what is drawn
_OF_VALIDATION = ("valid_loss", "valid_bleu")
_IDEAL_LENGTH = 12  # tokens of the validation sentence whose attention is drawn


class Curve(NamedTuple):
    """A value by step; a value that was not finite is NaN."""

    steps: Floats
    values: Floats


class CheckpointMark(NamedTuple):
    """A checkpoint, or an average of those from `first_step` to `last_step`, and what it is."""

    first_step: int
    last_step: int
    bleu: float
    text: str


class Curves(NamedTuple):
    """How a training went: losses in nats per target token, BLEU, learning rate, speed."""

    loss: Curve
    valid_loss: Curve
    valid_bleu: Curve
    lr: Curve
    tgt_tokens_per_s: Curve
    mark: CheckpointMark | None


class AttentionPicture(NamedTuple):
    """What each head of each layer attends to in one sentence, and the pieces it consists of.

    Attributes:
        origin: where the sentence comes from.
        tgt_in, tgt_out: the pieces that the decoder reads, and those that it then writes.
        encoder, decoder, cross: one array for each layer, [H, S, S], [H, T, T] and [H, T, S].
    """

    origin: str
    source: str
    translation: str
    src: list[str]
    tgt_in: list[str]
    tgt_out: list[str]
    encoder: list[Floats]
    decoder: list[Floats]
    cross: list[Floats]

    @property
    def num_cross_heads(self) -> int:
        """The heads of all decoder layers."""
        return sum(len(layer) for layer in self.cross)

    def alignment(self) -> Floats:
        """Return the mean cross-attention [T, S] of all heads of all layers."""
        mean: Floats = np.mean([layer.mean(0) for layer in self.cross], 0)
        return mean


class Spread(NamedTuple):
    """The mean, the least and the largest of several values, by distance."""

    mean: Floats
    low: Floats
    high: Floats


class PositionTable(NamedTuple):
    """What the model adds to the embeddings of one side, [P, D]."""

    name: str
    table: Floats

    def products(self) -> Floats:
        """Return the dot products [P, P] of all pairs of positions."""
        table = self.table.astype(np.float64)
        products: Floats = table @ table.T
        return products

    def products_by_distance(self) -> Spread:
        """Return the products of the positions that are 0, 1, ... P - 1 apart."""
        products = self.products()
        diagonals = [np.diagonal(products, distance) for distance in range(len(products))]
        return Spread(
            np.array([diagonal.mean() for diagonal in diagonals]),
            np.array([diagonal.min() for diagonal in diagonals]),
            np.array([diagonal.max() for diagonal in diagonals]),
        )


class Masks(NamedTuple):
    """The keep-masks of a batch: True takes part.

    Attributes:
        number: the place of the batch in its epoch, from 1.
        num_batches: those among which it has the most padding.
        row: the sentence with the most padding, counted from 0.
        encoder_SS: what each source position of that sentence may see.
        decoder_TT: what each target position of any sentence may see.
    """

    number: int
    num_batches: int
    src_keep_BS: Keeps
    tgt_keep_BT: Keeps
    row: int
    encoder_SS: Keeps
    decoder_TT: Keeps


class SetLengths(NamedTuple):
    """The tokens of each pair of a corpus, eos included."""

    name: str
    src: Lengths
    tgt: Lengths


class BatchSize(NamedTuple):
    """What one batch holds."""

    rows: int
    src_width: int
    tgt_width: int
    num_src_tokens: int
    num_tgt_tokens: int

    @property
    def num_tokens(self) -> int:
        """The cells of both sides that hold a token."""
        return self.num_src_tokens + self.num_tgt_tokens

    @property
    def num_cells(self) -> int:
        """The cells of both sides."""
        return self.rows * (self.src_width + self.tgt_width)

    @property
    def padding(self) -> float:
        """The share of the cells that is padding."""
        return 1 - self.num_tokens / self.num_cells


@dataclass(frozen=True)
class Batches:
    """Batches of the first epoch in the order of training, and the lengths of its pairs."""

    first: Batch
    most_padded: Batch
    sizes: list[BatchSize]
    lengths: SetLengths
    is_whole_epoch: bool

    @property
    def padding(self) -> float:
        """The share of all cells that is padding."""
        tokens = sum(size.num_tokens for size in self.sizes)
        return 1 - tokens / sum(size.num_cells for size in self.sizes)


@dataclass
class Pictures:
    """Everything that can be drawn of a run, and a line for each thing that cannot."""

    config: Config
    curves: Curves | None = None
    attention: AttentionPicture | None = None
    positions: list[PositionTable] = field(default_factory=list)
    masks: Masks | None = None
    lengths: list[SetLengths] = field(default_factory=list)
    batches: Batches | None = None
    left_out: list[str] = field(default_factory=list)


def gather(run: RunDir, sentence: str | None) -> Pictures:
    """Collect what the pictures of a run show.

    Raises:
        ConfigError: if `sentence` is no text.
        RunError: if this is no run folder, or nothing of it can be drawn.
    """
    _check_sentence(sentence)
    config = run.load_config()
    pictures = Pictures(config)
    left_out = pictures.left_out
    vocabulary = _unless(
        "lengths, batch, masks", left_out, lambda: sentencepiece.load(run.tokenizer_dir)
    )
    pictures.curves = _unless("curves", left_out, lambda: read_curves(run, left_out))
    if vocabulary is not None:
        _gather_data(pictures, run, vocabulary)
    is_learned = config.model.positions == "learned"
    what = "attention, alignment, positions" if is_learned else "attention, alignment"
    translator = _unless(what, left_out, lambda: load(run, loading=LoadOptions(device="cpu")))
    if translator is not None:
        pictures.attention = _unless(
            "attention, alignment", left_out, lambda: _attention_of_run(translator, run, sentence)
        )
    if translator is not None or not is_learned:
        pictures.positions = position_tables(config, translator)
    if not (pictures.curves or pictures.positions or pictures.lengths):
        raise RunError(f"{run.path}: holds nothing to draw yet; `mtrain train CONFIG` fills it.")
    return pictures


def _check_sentence(sentence: str | None) -> None:
    if sentence is None:
        return
    if not sentence.strip():
        raise ConfigError("--sentence must have text, but is blank.")
    try:
        sentence.encode()
    except UnicodeEncodeError:
        raise ConfigError("--sentence must be UTF-8 text, but is not.") from None


def _gather_data(pictures: Pictures, run: RunDir, vocabulary: Tokenizer) -> None:
    config, left_out = pictures.config, pictures.left_out
    batches = _unless("batch, masks", left_out, lambda: read_batches(run, config, vocabulary))
    if batches is not None:
        pictures.batches = batches
        pictures.masks = masks(batches, config.model.attention_window)
        pictures.lengths.append(batches.lengths)
    sets = {"validation": partial(prepare.read_valid, run)}
    sets |= {f"test {name}": partial(prepare.read_test, run, name) for name in config.data.tests}
    for name, read in sets.items():
        lines = _unless(f"lengths of {name}", left_out, read)
        if lines is not None and lines.src:
            pictures.lengths.append(_set_lengths(name, lines, vocabulary))


def _unless(name: str, left_out: list[str], read: Callable[[], T]) -> T | None:
    """Return what `read` returns; if a user's error stops it, say that `name` is left out."""
    try:
        return read()
    except UserError as error:
        left_out.append(f"{name}: left out: {error}")
        return None


def read_curves(run: RunDir, left_out: list[str]) -> Curves:
    """Read how a training went from `metrics.jsonl`.

    Raises:
        RunError: if nothing was logged yet.
    """
    path = run.metrics_path
    if not path.is_file():
        raise RunError(f"{path}: is missing; `mtrain train CONFIG` writes it.")
    lines = []
    for number, text in enumerate(read_lines(path), start=1):
        try:
            lines.append(_read_metrics(text))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            left_out.append(f"curves: a line left out: {path}:{number}: is cut off.")
    steps = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "valid_loss" in line]
    if not steps and not validations:
        raise RunError(f"{path}: holds no logged step and no validation yet.")
    for name, found in (("training loss", steps), ("validation loss and BLEU", validations)):
        if not found:
            left_out.append(f"curves: {name} left out: {path}: holds none yet.")
    return Curves(
        _curve(steps, "loss"),
        _curve(validations, "valid_loss"),
        _curve(validations, "valid_bleu"),
        _curve(steps, "lr"),
        _curve(steps, "tgt_tokens_per_s"),
        _mark(run, validations),
    )


def _read_metrics(text: str) -> dict[str, float]:
    """Return what is drawn of a line of metrics."""
    line = json.loads(text)
    keys = _OF_STEP if "loss" in line else _OF_VALIDATION if "valid_loss" in line else ()
    step, numbers = int(line["step"]), {key: float(line[key]) for key in keys}
    if not 0 <= step < 2**53:
        raise ValueError
    return numbers | {"step": step}


def _curve(lines: list[dict[str, float]], key: str) -> Curve:
    values = [line[key] if math.isfinite(line[key]) else math.nan for line in lines]
    return Curve(np.array([line["step"] for line in lines]), np.array(values))


def _mark(run: RunDir, validations: list[dict[str, float]]) -> CheckpointMark | None:
    """Return what `model.safetensors` was made of, or the best validation if nothing says that."""
    if origin := checkpoint.load_final_weights_info(run.model_path):
        first, last, count = origin.steps[0], origin.steps[-1], len(origin.steps)
        of_many = f"mean of {count} checkpoints, steps {first:,} to {last:,}"
        made_of = f"step {last:,}" if count == 1 else of_many
        return CheckpointMark(first, last, origin.bleu, f"model.safetensors: {made_of}")
    if not validations:
        return None
    best = max(validations, key=lambda line: (line["valid_bleu"], -line["step"]))
    step = int(best["step"])
    unsaid = " (the run does not say what was chosen)" if run.model_path.is_file() else ""
    return CheckpointMark(step, step, best["valid_bleu"], f"best validation, step {step:,}{unsaid}")


def _attention_of_run(
    translator: Translator, run: RunDir, sentence: str | None
) -> AttentionPicture:
    if sentence is not None:
        return attention(translator, sentence, "the given sentence")
    lines = prepare.read_valid(run).src
    row = choose_sentence(lines, translator.tokenizer)
    if row is None:
        raise RunError(f"{run.data_dir}: its validation set holds no sentence.")
    return attention(translator, lines[row], f"line {row + 1:,} of the validation set")


def choose_sentence(lines: Sequence[str], vocabulary: Tokenizer) -> int | None:
    """Return the row of the first sentence of a good length for a picture, if there is any."""
    lengths = {
        row: len(ids) for row, ids in enumerate(vocabulary.encode_src(lines)) if lines[row].strip()
    }
    return min(lengths, key=lambda row: abs(lengths[row] - _IDEAL_LENGTH), default=None)


def attention(translator: Translator, sentence: str, origin: str) -> AttentionPicture:
    """Translate a sentence as the run does, and return what the model attends to meanwhile."""
    vocabulary = translator.tokenizer
    src, tgt = vocabulary.encode_src([sentence]), vocabulary.tgt
    ids = [best[0].ids for best in translator.search([EncodedSource(own) for own in src])]
    batch = collate(src, ids, tgt.pad, tgt.bos, tgt.eos).to(translator.device)
    maps = translator.model.attention_maps(batch.src_BS, batch.src_keep_BS, batch.tgt_in_BT)
    return AttentionPicture(
        origin,
        sentence,
        tgt.decode(ids)[0],
        vocabulary.src.pieces_of(batch.src_BS[0].tolist()),
        tgt.pieces_of(batch.tgt_in_BT[0].tolist()),
        tgt.pieces_of(batch.tgt_out_BT[0].tolist()),
        *([_numbers(layer_BHTS[0]) for layer_BHTS in layers] for layers in maps),
    )


def position_tables(config: Config, translator: Translator | None) -> list[PositionTable]:
    """Return what is added to the embeddings; learned positions are those of the model."""
    if config.model.positions == "sinusoidal":
        table = sinusoids(_SINUSOIDAL_POSITIONS, config.model.d_model)
        return [PositionTable("sinusoidal", _numbers(table))]
    assert translator is not None, "learned positions lie in the model"
    model, count = translator.model, config.model.max_positions or 0
    return [
        PositionTable(
            name, _numbers(positions(torch.arange(count, device=translator.device), count))
        )
        for name, positions in (
            ("learned, source", model.src_positions),
            ("learned, target", model.tgt_positions),
        )
    ]


def masks(batches: Batches, window: int | None) -> Masks:
    """Return the keep-masks that a model makes of the batch with the most padding."""
    batch, cpu = batches.most_padded, torch.device("cpu")
    row = int((batch.src_keep_BS.sum(1) + batch.tgt_keep_BT.sum(1)).argmin())
    src_keep_S = batch.src_keep_BS[row]
    encoder_SS = src_keep_S & near_keep(len(src_keep_S), window, cpu)
    decoder_TT = near_keep(batch.tgt_keep_BT.shape[1], window, cpu).tril()
    return Masks(
        1 + int(np.argmax([size.padding for size in batches.sizes])),
        len(batches.sizes),
        batch.src_keep_BS.numpy(),
        batch.tgt_keep_BT.numpy(),
        row,
        encoder_SS.numpy(),
        decoder_TT.numpy(),
    )


def read_batches(run: RunDir, config: Config, vocabulary: Tokenizer) -> Batches:
    """Read the first epoch as training does, or the beginning of a long one."""
    alpha, budget = config.tokenizer.sampling_alpha, config.training.batch_tokens
    training = TrainingData(run.data_dir, vocabulary, config.seed, alpha)
    sizes: list[BatchSize] = []
    is_whole_epoch, most_padding = False, -1.0
    for batch, after in islice(training.batches(budget, Position()), _MAX_BATCHES):
        size = batch_size(batch)
        if not sizes:
            first = batch
        if size.padding > most_padding:
            most_padded, most_padding = batch, size.padding
        sizes.append(size)
        is_whole_epoch = after.epoch > 0
        if is_whole_epoch:
            break
    return Batches(first, most_padded, sizes, training_lengths(training), is_whole_epoch)


def training_lengths(training: TrainingData) -> SetLengths:
    """Return the lengths of the training pairs, or of the beginning of many, and say which."""
    src, tgt = training.lengths()
    if len(src) < len(training):
        return SetLengths("training (beginning)", src, tgt)
    is_mixture = len(training.shares) > 1  # of which an epoch has some pairs often, others never
    return SetLengths("training (an epoch)" if is_mixture else "training", src, tgt)


def batch_size(batch: Batch) -> BatchSize:
    """Return what `batch` holds."""
    rows, src_width = batch.src_BS.shape
    tgt_width = batch.tgt_in_BT.shape[1]
    return BatchSize(rows, src_width, tgt_width, batch.num_src_tokens, batch.num_tgt_tokens)


def _set_lengths(name: str, lines: prepare.ParallelLines, vocabulary: Tokenizer) -> SetLengths:
    src = [len(ids) for ids in vocabulary.encode_src(lines.src)]
    tgt = [len(ids) + 1 for ids in vocabulary.tgt.encode(lines.tgt)]
    return SetLengths(name, np.array(src, dtype=np.int32), np.array(tgt, dtype=np.int32))


def _numbers(tensor: Tensor) -> Floats:
    numbers: Floats = tensor.detach().cpu().numpy()
    return numbers
