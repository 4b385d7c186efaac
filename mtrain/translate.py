"""Lines to lines: one line out for every line in, in order, whatever the line holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from mtrain import checkpoint, search, tokenizer
from mtrain.batch import keep_first, pad_right
from mtrain.config import DecodingConfig, ModelConfig
from mtrain.errors import ConfigError, RunError
from mtrain.model import Transformer
from mtrain.rundir import RunDir
from mtrain.tokenizer import Tokenizer

_BLOCK_LINES = 2048  # lines that are sorted by length and translated together


class Translator:
    """A model, its tokenizer, and how to search."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        decoding: DecodingConfig,
        device: torch.device,
    ) -> None:
        self.model, self.tokenizer, self.decoding, self.device = model, tokenizer, decoding, device

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Return one line for each line; a blank line gives an empty one."""
        return self._translate(lines, self.tokenizer.encode_src(lines))

    def _translate(self, lines: Sequence[str], encoded: list[list[int]]) -> list[str]:
        rows = [row for row, line in enumerate(lines) if line.strip()]
        rows.sort(key=lambda row: len(encoded[row]))
        found: dict[int, list[int]] = {}
        for batch in self._batches(rows, encoded):
            hypotheses = self.search([encoded[row] for row in batch])
            found.update((row, h.ids) for row, h in zip(batch, hypotheses, strict=True))
        translated = dict(zip(found, self.tokenizer.tgt.decode(list(found.values())), strict=True))
        return [translated.get(row, "") for row in range(len(lines))]

    def stream(self, lines: Iterable[str], warn: Callable[[str], None]) -> Iterator[str]:
        """Translate endless lines, a block at a time, and warn of those that are too long."""
        source, first = iter(lines), 1
        while block := list(islice(source, _BLOCK_LINES)):
            encoded = self.tokenizer.encode_src(block)
            for number, ids in enumerate(encoded, first):
                self._check_length(number, len(ids), warn)
            yield from self._translate(block, encoded)
            first += len(block)

    def _check_length(self, number: int, length: int, warn: Callable[[str], None]) -> None:
        limit = self.model.config.max_positions
        if limit is not None and length > limit:
            warn(
                f"line {number}: has {length:,} tokens, but the model learned {limit:,} positions; "
                "the tokens after them share the last one."
            )

    def _batches(self, rows: list[int], encoded: list[list[int]]) -> Iterator[list[int]]:
        """Cut rows, shortest first, into batches under the budget of source tokens and places."""
        batch: list[int] = []
        for row in rows:
            cells = (len(batch) + 1) * len(encoded[row]) * self.decoding.beam
            if batch and cells > self.decoding.batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    @torch.inference_mode()
    def search(self, src: list[list[int]]) -> list[search.Hypothesis]:
        """Return the best target of each encoded source, as one batch."""
        self.model.eval()
        lengths = [len(ids) for ids in src]
        src_BS = pad_right(src, self.tokenizer.src.pad).to(self.device)
        src_keep_BS = keep_first(lengths).to(self.device)
        state = self.model.start(self.model.encode(src_BS, src_keep_BS), src_keep_BS)
        tgt, extra = self.tokenizer.tgt, self.decoding.max_extra_tokens
        max_lengths_B = torch.tensor(lengths, device=self.device) - 1 + extra
        limits = search.Limits(tgt.bos, tgt.eos, [tgt.pad, tgt.bos], max_lengths_B)
        if self.decoding.beam == 1:
            return search.greedy(self.model.step, state, limits, self.decoding.length_alpha)
        width, alpha = self.decoding.beam, self.decoding.length_alpha
        return search.beam(self.model.step, state, limits, width, alpha)


def load(run: RunDir, decoding: DecodingConfig | None = None, device: str = "auto") -> Translator:
    """Load the model of a run folder, ready to translate.

    Raises:
        RunError: if the folder is not a run, has no trained model, or its parts do not fit.
    """
    config = run.load_config()
    vocabulary = tokenizer.load(run.tokenizer_dir)
    weights = checkpoint.load_model(run.model_path, vocabulary.fingerprint())
    model = build_model(config.model, vocabulary)
    set_weights(model, weights, run.model_path)
    where = pick_device(device)
    return Translator(model.to(where).eval(), vocabulary, decoding or config.decoding, where)


def build_model(config: ModelConfig, vocabulary: Tokenizer) -> Transformer:
    """Return an untrained model for these vocabularies."""
    return Transformer(config, len(vocabulary.src), len(vocabulary.tgt))


def set_weights(model: Transformer, weights: checkpoint.Weights, path: Path) -> None:
    """Fill `model` with weights that were read from `path`; tied weights were stored once.

    Raises:
        RunError: if the weights are those of another model.
    """
    own = dict(model.named_parameters())
    for name, parameter in own.items():
        if name not in weights or weights[name].shape != parameter.shape:
            found = tuple(weights[name].shape) if name in weights else "missing"
            raise RunError(
                f"{path}: `{name}` must have the shape {tuple(parameter.shape)} that config.yaml "
                f"asks for, but is {found} instead; restore the run's own config.yaml."
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def pick_device(name: str) -> torch.device:
    """Return the device that `name` asks for; `auto` takes a GPU if there is one.

    Raises:
        ConfigError: if there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # a device that only pretends fails here
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"`device` must be one of this machine, such as cpu or cuda, but is {name!r} instead."
        ) from None
    return device
