"""Small configs, models and vocabularies that several test files share."""

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mtrain.config.sections import ModelConfig, TokenizerConfig
from mtrain.data.batch import Batch, MicroBatch, MicroBatchSplit, Position, UpdateBatches
from mtrain.decode.beam import BeamSearch, Hypothesis, RequestGroup, S, Step
from mtrain.decode.options import DecodingOptions
from mtrain.model.transformer import Transformer
from mtrain.run.load_model import build_model
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

DEMO_DIR = Path(__file__).parent.parent / "data" / "demo"
SRC_LINES, TGT_LINES = (
    (DEMO_DIR / name).read_text(encoding="utf-8").splitlines()[:150]
    for name in ("train.en", "train.de")
)


def model_config(**sizes: object) -> ModelConfig:
    """A Transformer that computes in no time; two layers, so that stacking shows.

    Heads are 6 wide, not 4: the root of 4 is also its half.
    """
    tiny = {"d_model": 12, "num_heads": 2, "d_ff": 16, "dropout": 0.0}
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2, "tie_embeddings": "none"}
    return ModelConfig.model_validate(tiny | layers | sizes)


def transformer(
    config: ModelConfig, num_src_pieces: int = 20, num_tgt_pieces: int = 20, seed: int = 1
) -> Transformer:
    """A float64 model in eval mode whose weights are all random, norms and biases too."""
    torch.manual_seed(seed)
    model = Transformer(config, num_src_pieces, num_tgt_pieces).double().eval()
    randomise(model, seed)
    return model


def randomise(module: nn.Module, seed: int) -> None:
    """Fill biases and norms with noise, so that none is a zero or a one that hides a mistake."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype)
                parameter += 0.3 * noise


def endless_model(config: ModelConfig, tokenizer: Tokenizer) -> Transformer:
    """A model of constant logits, that of eos the lowest: every target ends at its limit."""
    model = build_model(config, tokenizer)
    last_norm = model.decoder[-1].residual_3.norm
    with torch.no_grad():
        last_norm.weight.zero_()
        last_norm.bias.fill_(1.0)
        model.output.weight[tokenizer.tgt.eos] = -1.0
    return model


def single_rank_update(batches: Sequence[Batch]) -> UpdateBatches:
    """Return an update of a single rank, with one micro-batch per batch."""
    num_tokens = sum(batch.num_tgt_tokens for batch in batches)
    micro_batches, split = [MicroBatch(batch) for batch in batches], MicroBatchSplit(len(batches))
    return UpdateBatches(micro_batches, num_tokens, Position(), split)


def left_keep(lengths: Sequence[int]) -> Tensor:
    """A keep-mask written out place by place."""
    width = max(lengths)
    return torch.tensor([[place < length for place in range(width)] for length in lengths])


@functools.cache
def vocabularies(kind: str = "unigram", shared: bool = True, vocab_size: int = 420) -> Tokenizer:
    """A tokenizer of the lines above; trained once for each setting."""
    config = TokenizerConfig.model_validate(
        {"kind": kind, "shared": shared, "vocab_size": vocab_size}
    )
    pairs = zip(SRC_LINES, TGT_LINES, strict=True)
    return sentencepiece.train(config, pairs, len(SRC_LINES), seed=1)


@torch.inference_mode()
def beam(
    step: Step[S], groups: Iterator[RequestGroup[S]], options: DecodingOptions
) -> list[list[Hypothesis]]:
    """The best hypotheses of each sentence; groups are admitted as rows become free."""
    search = BeamSearch(step, options)
    waiting = next(groups, None)
    while True:
        while waiting is not None and search.can_admit(len(waiting.constraints.max_lengths_B)):
            search.admit(waiting)
            waiting = next(groups, None)
        if not search.num_open:
            return [search.take_best(number) for number in range(search.num_sentences)]
        search.advance()


class Prefixes:
    """A decoder state that remembers what every row has read."""

    def __init__(self, sentences: Sequence[int]) -> None:
        self.sentences = list(sentences)  # of each row: at first one for each sentence
        self.rows: list[tuple[int, ...]] = [()] * len(self.sentences)

    def reorder(self, rows_N: Tensor) -> None:
        rows = rows_N.tolist()
        self.sentences = [self.sentences[row] for row in rows]
        self.rows = [self.rows[row] for row in rows]

    def admit(self, other: "Prefixes") -> None:
        assert not any(other.rows), "they have read something"
        self.sentences += other.sentences
        self.rows += other.rows


class TableModel:
    """A model without a network: random logits for each sentence and each prefix."""

    def __init__(
        self,
        num_pieces: int,
        seed: int = 0,
        spread: float = 2.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_pieces, self.seed, self.spread, self.dtype = num_pieces, seed, spread, dtype
        self.offsets = torch.zeros(num_pieces, dtype=dtype)
        self.rows_read: list[int] = []  # of each step
        self._noise: dict[tuple[int, ...], Tensor] = {}

    @property
    def num_rows_read(self) -> int:
        return sum(self.rows_read)

    def logits(self, sentence: int, prefix: Iterable[int]) -> Tensor:
        read = (sentence, *prefix)
        if read not in self._noise:
            key = hashlib.sha256(repr((self.seed, sentence, read[1:])).encode()).digest()
            rng = torch.Generator().manual_seed(int.from_bytes(key[:4], "big"))
            self._noise[read] = torch.randn(self.num_pieces, generator=rng).to(self.dtype)
        return self.spread * self._noise[read] + self.offsets

    def log_probs(self, sentence: int, prefix: Iterable[int]) -> list[float]:
        """The same, normalised over all pieces by plain arithmetic."""
        logits = self.logits(sentence, prefix).tolist()
        total = math.log(sum(math.exp(logit) for logit in logits))
        return [logit - total for logit in logits]

    def step(self, ids_N: Tensor, state: Prefixes) -> Tensor:
        read = zip(state.rows, ids_N.tolist(), strict=True)
        state.rows = [(*row, piece) for row, piece in read]
        self.rows_read.append(len(state.rows))
        read_by_row = zip(state.sentences, state.rows, strict=True)
        return torch.stack([self.logits(sentence, row) for sentence, row in read_by_row])
