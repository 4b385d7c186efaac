"""The validation set: its loss under a model, and examples of its translations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from mtrain.config.sections import TrainingConfig
from mtrain.data.batch import Batch
from mtrain.data.loader import in_batches
from mtrain.data.prepare import ParallelLines
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.translator import Translator
from mtrain.errors import DataError
from mtrain.evaluation.metrics import ignored_source
from mtrain.io.text_width import shortened, visible
from mtrain.model.transformer import Transformer
from mtrain.runtime.process_group import ProcessGroup
from mtrain.runtime.threads import map_on_cores
from mtrain.tokenizer.sentencepiece import Tokenizer
from mtrain.training.loss import LossSum, loss_of

_MAX_EXAMPLE = 145  # terminal columns of an example


class ValidationSet:
    """The validation text; the loss is that of its pairs within `max_tokens`, as in training.

    Attributes:
        num_too_long: pairs with a side of more tokens, eos included; they are translated, too.

    Raises:
        DataError: if all pairs are too long.
    """

    def __init__(
        self, lines: ParallelLines, tokenizer: Tokenizer, batch_tokens: int, max_tokens: int
    ) -> None:
        self.lines = lines
        pairs = zip(tokenizer.encode_src(lines.src), tokenizer.tgt.encode(lines.tgt), strict=True)
        kept = [(src, tgt) for src, tgt in pairs if max(len(src), len(tgt) + 1) <= max_tokens]
        self.num_too_long = len(lines.src) - len(kept)
        if not kept:
            raise DataError(
                "`data.valid` must have a pair within `data.max_tokens`, which is "
                f"{max_tokens}, but all of its {len(lines.src):,} are longer."
            )
        src, tgt = zip(*kept, strict=True)
        self._batches = in_batches(src, tgt, tokenizer, batch_tokens)

    def loss(
        self, model: Transformer, config: TrainingConfig, process_group: ProcessGroup
    ) -> tuple[float, float]:
        """Return loss and nll per target token; all ranks must call it, each computes a part."""
        model.eval()
        device = model.output.weight.device

        @torch.no_grad()
        def sums_of(batch: Batch) -> LossSum:
            return loss_of(model, batch.to(device), config)

        batches = self._batches[process_group.rank :: process_group.size]
        sums = map_on_cores(sums_of, batches) if device.type == "cpu" else map(sums_of, batches)
        totals = [sum(float(value) for value in values) for values in zip(*sums, strict=True)]
        local = torch.tensor(totals or [0.0, 0.0, 0.0], dtype=torch.float64, device=device)
        loss, nll, num_tokens = process_group.all_reduce_sum(local).tolist()
        return loss / num_tokens, nll / num_tokens

    def translations(self, translator: Translator) -> list[str]:
        """Return the translation of each source; all ranks must call it, each computes a part."""
        return translate_lines(translator, self.lines.src, block_lines=len(self.lines.src))

    def ignored_source(self, hypotheses: Sequence[str]) -> str | None:
        """Return `metrics.ignored_source` of the validation set."""
        return ignored_source(self.lines.src, self.lines.tgt, hypotheses) if hypotheses else None

    def examples(self, hypotheses: Sequence[str], count: int, turn: int) -> Iterator[str]:
        """Yield lines with source, reference and translation of `count` sentences.

        Each `turn` shows other sentences, until all have been shown.
        """
        rows = random.Random(0).sample(range(len(hypotheses)), len(hypotheses))
        for number in range(turn * count, turn * count + min(count, len(rows))):
            row = rows[number % len(rows)]
            for name, line in (
                ("source", self.lines.src[row]),
                ("reference", self.lines.tgt[row]),
                ("translation", hypotheses[row]),
            ):  # an early model repeats itself; a corpus may hold control characters
                yield f"  {name:<11}  {shortened(visible(line), _MAX_EXAMPLE)}"
