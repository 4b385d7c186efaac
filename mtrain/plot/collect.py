"""Read the numbers that the pictures of a run show. Knows nothing of how they are drawn.

B batch, S source length, T target length, D model width, H heads, P positions.
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
from mtrain.data.batch import Batch, Position, collate
from mtrain.data.loader import TrainingData
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

_MAX_BATCHES = 1000  # of the first epoch, whose batches come in random order
_SINUSOIDAL_POSITIONS = 100
_STEP_KEYS = ("loss", "lr", "tgt_tokens_per_s")  # drawn from a logged step
_VALIDATION_KEYS = ("valid_loss", "valid_bleu")
_IDEAL_LENGTH = 12  # tokens of the validation sentence whose attention is drawn


class Curve(NamedTuple):
    """A value by step; a value that was not finite is NaN."""

    steps: Floats
    values: Floats


class CheckpointMark(NamedTuple):
    """A checkpoint, or an average of those from `first_step` to `last_step`, and its label."""

    first_step: int
    last_step: int
    bleu: float
    text: str


class Curves(NamedTuple):
    """Losses in nats per target token, BLEU, learning rate and speed of a training."""

    loss: Curve
    valid_loss: Curve
    valid_bleu: Curve
    lr: Curve
    tgt_tokens_per_s: Curve
    mark: CheckpointMark | None


class AttentionPicture(NamedTuple):
    """The attention weights of all heads and layers for one sentence, with its tokens.

    Attributes:
        origin: where the sentence comes from.
        tgt_in, tgt_out: the decoder's input and output tokens.
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


class PositionTable(NamedTuple):
    """The positional encodings [P, D] that are added to the embeddings of one side."""

    name: str
    table: Floats

    def products(self) -> Floats:
        """Return the dot products [P, P] of all pairs of positions."""
        table = self.table.astype(np.float64)
        products: Floats = table @ table.T
        return products

    def products_by_distance(self) -> tuple[Floats, Floats, Floats]:
        """Return mean, minimum and maximum [P] of the products at distances 0, 1, ... P - 1."""
        products = self.products()
        diagonals = [np.diagonal(products, distance) for distance in range(len(products))]
        mean, low, high = zip(*((d.mean(), d.min(), d.max()) for d in diagonals), strict=True)
        return np.array(mean), np.array(low), np.array(high)


class Masks(NamedTuple):
    """The keep-masks of the batch with the most padding; True takes part.

    Attributes:
        number: the batch's number in its epoch, from 1.
        num_batches: the batches that were compared.
        row: the sentence with the most padding, from 0.
        encoder_SS: the self-attention mask of that sentence.
        decoder_TT: the self-attention mask of every target.
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
    """The shape of a batch, and how many tokens are no padding."""

    rows: int
    src_width: int
    tgt_width: int
    num_src_tokens: int
    num_tgt_tokens: int

    @property
    def num_tokens(self) -> int:
        """The tokens of both sides, without padding."""
        return self.num_src_tokens + self.num_tgt_tokens

    @property
    def num_cells(self) -> int:
        """The tokens of both sides, with padding."""
        return self.rows * (self.src_width + self.tgt_width)

    @property
    def padding(self) -> float:
        """The fraction of the cells that is padding."""
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
        """The fraction of all cells that is padding."""
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
    skipped: list[str] = field(default_factory=list)


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
    skipped = pictures.skipped
    tokenizer = _read_or_skip(
        "lengths, batch, masks", skipped, lambda: sentencepiece.load(run.tokenizer_dir)
    )
    pictures.curves = _read_or_skip("curves", skipped, lambda: read_curves(run, skipped))
    if tokenizer is not None:
        _gather_data(pictures, run, tokenizer)
    is_learned = config.model.positions == "learned"
    names = "attention, alignment, positions" if is_learned else "attention, alignment"
    translator = _read_or_skip(names, skipped, lambda: load(run, loading=LoadOptions(device="cpu")))
    if translator is not None:
        pictures.attention = _read_or_skip(
            "attention, alignment", skipped, lambda: _attention_of_run(translator, run, sentence)
        )
    if translator is not None or not is_learned:
        pictures.positions = position_tables(config, translator)
    if not (pictures.curves or pictures.positions or pictures.lengths):
        raise RunError(f"{run.path}: holds nothing to draw yet; `mtrain train CONFIG` fills it.")
    return pictures


def _gather_data(pictures: Pictures, run: RunDir, tokenizer: Tokenizer) -> None:
    config, skipped = pictures.config, pictures.skipped
    batches = _read_or_skip("batch, masks", skipped, lambda: read_batches(run, config, tokenizer))
    if batches is not None:
        pictures.batches = batches
        pictures.masks = masks(batches, config.model.attention_window)
        pictures.lengths.append(batches.lengths)
    sets = {"validation": partial(prepare.read_valid, run)}
    sets |= {f"test {name}": partial(prepare.read_test, run, name) for name in config.data.tests}
    for name, read in sets.items():
        lines = _read_or_skip(f"lengths of {name}", skipped, read)
        if lines is not None and lines.src:
            src = [len(ids) for ids in tokenizer.encode_src(lines.src)]
            tgt = [len(ids) + 1 for ids in tokenizer.tgt.encode(lines.tgt)]
            pictures.lengths.append(
                SetLengths(name, np.array(src, dtype=np.int32), np.array(tgt, dtype=np.int32))
            )


def _read_or_skip(name: str, skipped: list[str], read: Callable[[], T]) -> T | None:
    """Return what `read` returns; on a user's error, note that `name` is skipped."""
    try:
        return read()
    except UserError as error:
        skipped.append(f"{name}: skipped: {error}")
        return None


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
    return Curves(
        _curve(steps, "loss"),
        _curve(validations, "valid_loss"),
        _curve(validations, "valid_bleu"),
        _curve(steps, "lr"),
        _curve(steps, "tgt_tokens_per_s"),
        _mark(run, validations),
    )


def _parse_metrics(text: str) -> dict[str, float]:
    line = json.loads(text)
    keys = _STEP_KEYS if "loss" in line else _VALIDATION_KEYS if "valid_loss" in line else ()
    step, values = int(line["step"]), {key: float(line[key]) for key in keys}
    if not 0 <= step < 2**53:
        raise ValueError
    return values | {"step": step}


def _curve(lines: list[dict[str, float]], key: str) -> Curve:
    values = [line[key] if math.isfinite(line[key]) else math.nan for line in lines]
    return Curve(np.array([line["step"] for line in lines]), np.array(values))


def _mark(run: RunDir, validations: list[dict[str, float]]) -> CheckpointMark | None:
    """Return what `model.safetensors` was made of, or else the best validation."""
    if origin := checkpoint.load_final_weights_info(run.model_path):
        first, last, count = origin.steps[0], origin.steps[-1], len(origin.steps)
        of_many = f"mean of {count} checkpoints, steps {first:,} to {last:,}"
        made_of = f"step {last:,}" if count == 1 else of_many
        return CheckpointMark(first, last, origin.bleu, f"model.safetensors: {made_of}")
    if not validations:
        return None
    best = max(validations, key=lambda line: (line["valid_bleu"], -line["step"]))
    step = int(best["step"])
    note = " (the run does not say what was chosen)" if run.model_path.is_file() else ""
    return CheckpointMark(step, step, best["valid_bleu"], f"best validation, step {step:,}{note}")


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


def choose_sentence(lines: Sequence[str], tokenizer: Tokenizer) -> int | None:
    """Return the row whose token count is nearest to _IDEAL_LENGTH; None if all are blank."""
    lengths = {
        row: len(ids) for row, ids in enumerate(tokenizer.encode_src(lines)) if lines[row].strip()
    }
    return min(lengths, key=lambda row: abs(lengths[row] - _IDEAL_LENGTH), default=None)


def attention(translator: Translator, sentence: str, origin: str) -> AttentionPicture:
    """Translate a sentence as the run does, and return the attention weights of that."""
    tokenizer = translator.tokenizer
    src, tgt = tokenizer.encode_src([sentence]), tokenizer.tgt
    ids = [best[0].ids for best in translator.search([EncodedSource(src_ids) for src_ids in src])]
    batch = collate(src, ids, tgt.pad, tgt.bos, tgt.eos).to(translator.device)
    maps = translator.model.attention_maps(batch.src_BS, batch.src_keep_BS, batch.tgt_in_BT)
    return AttentionPicture(
        origin,
        sentence,
        tgt.decode(ids)[0],
        tokenizer.src.pieces_of(batch.src_BS[0].tolist()),
        tgt.pieces_of(batch.tgt_in_BT[0].tolist()),
        tgt.pieces_of(batch.tgt_out_BT[0].tolist()),
        *([_as_array(layer_BHTS[0]) for layer_BHTS in layers] for layers in maps),
    )


def position_tables(config: Config, translator: Translator | None) -> list[PositionTable]:
    """Return the positional encodings; learned ones are those of the translator's model."""
    if config.model.positions == "sinusoidal":
        table = sinusoids(_SINUSOIDAL_POSITIONS, config.model.d_model)
        return [PositionTable("sinusoidal", _as_array(table))]
    assert translator is not None, "learned positions are weights of the model"
    model, count = translator.model, config.model.max_positions or 0
    indices = torch.arange(count, device=translator.device)
    return [
        PositionTable("learned, source", _as_array(model.src_positions(indices, count))),
        PositionTable("learned, target", _as_array(model.tgt_positions(indices, count))),
    ]


def masks(batches: Batches, window: int | None) -> Masks:
    """Return the keep-masks of the batch with the most padding."""
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


def read_batches(run: RunDir, config: Config, tokenizer: Tokenizer) -> Batches:
    """Read the batches of the first epoch as training does, at most _MAX_BATCHES."""
    alpha, budget = config.tokenizer.sampling_alpha, config.training.batch_tokens
    training = TrainingData(run.data_dir, tokenizer, config.seed, alpha)
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
    """Return the lengths of the training pairs, or of the first of very many, named so."""
    src, tgt = training.lengths()
    if len(src) < len(training):
        return SetLengths("training (beginning)", src, tgt)
    is_mixture = len(training.shares) > 1  # an epoch may repeat or omit pairs
    return SetLengths("training (an epoch)" if is_mixture else "training", src, tgt)


def batch_size(batch: Batch) -> BatchSize:
    """Return the size of a batch."""
    rows, src_width = batch.src_BS.shape
    tgt_width = batch.tgt_in_BT.shape[1]
    return BatchSize(rows, src_width, tgt_width, batch.num_src_tokens, batch.num_tgt_tokens)


def _as_array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().cpu().numpy()
    return array
