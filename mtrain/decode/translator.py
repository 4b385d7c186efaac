"""From text to targets and back: encode, search in batches, decode. Knows one line, not streams."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.config.sections import DecodingConfig
from mtrain.data.batch import keep_first, pad_right
from mtrain.decode.beam import (
    NUM_GROUPS,
    BeamSettings,
    Constraints,
    Hypothesis,
    NotFiniteError,
    RequestGroup,
    Step,
    beam,
)
from mtrain.decode.ensemble import Ensemble, EnsembleState, Padded
from mtrain.decode.gather import exchange, exchange_numbers, exchange_tensors
from mtrain.decode.sampling import Sampling, sample
from mtrain.errors import RunError
from mtrain.model.transformer import Transformer
from mtrain.ops.topk import Logits
from mtrain.run.load_model import LoadOptions, load_model
from mtrain.run.run_dir import RunDir
from mtrain.runtime.device import avoid_cudnn_attention, keep_freed_memory, pick_device
from mtrain.runtime.process_group import SINGLE, ProcessGroup
from mtrain.runtime.thread_pool import ThreadPool
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer, Vocabulary


@dataclass(frozen=True)
class EncodedSource:
    """A line as the search reads it.

    Attributes:
        ids: pieces + eos.
        prefix: the pieces that the target must begin with.
        seed: decides what is sampled, whatever stands beside it in a batch.
        text: what the pieces are of; needed where another model reads other pieces.
    """

    ids: list[int]
    prefix: tuple[int, ...] = ()
    seed: int = 0
    text: str | None = None


@dataclass(frozen=True)
class DecodeRequest:
    """What a search gives for each source.

    Attributes:
        num_best: hypotheses, best first; of a beam at most its width.
        sampling: draw instead of searching.
    """

    num_best: int = 1
    sampling: Sampling | None = None


class Translator:
    """A model or several, their tokenizer, and how to search.

    Args:
        models: of the same target vocabulary.
        tokenizer: sources come as its pieces.
        decoding: how to search.
        device: where the models are.
        wanted: what a search gives.
        readers: the source vocabulary of each model, where they are not all the tokenizer's.
        process_group: ranks that call the same methods with the same arguments, and share the work.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        tokenizer: Tokenizer,
        decoding: DecodingConfig,
        device: torch.device,
        wanted: DecodeRequest = DecodeRequest(),
        readers: Sequence[Vocabulary] = (),
        process_group: ProcessGroup = SINGLE,
    ) -> None:
        self.ensemble, self.tokenizer = Ensemble(models), tokenizer
        self.readers = readers or [tokenizer.src] * len(models)
        self.decoding, self.device, self.wanted, self.process_group = (
            decoding,
            device,
            wanted,
            process_group,
        )

    @property
    def model(self) -> Transformer:
        """The first model."""
        return self.ensemble.models[0]

    def with_models(self, models: Sequence[Transformer]) -> Translator:
        """Return a translator that differs in its models alone."""
        own = (
            self.tokenizer,
            self.decoding,
            self.device,
            self.wanted,
            self.readers,
            self.process_group,
        )
        return Translator(models, *own)

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Return one line for each line; a blank line gives an empty one."""
        rows = [row for row, line in enumerate(lines) if line.strip()]
        given = [lines[row] for row in rows]
        encoded = zip(self.tokenizer.encode_src(given), given, strict=True)
        found = self.search(
            [EncodedSource(ids, text=text) for ids, text in encoded], with_scores=False
        )
        texts = self.tokenizer.tgt.decode([best[0].ids for best in found])
        translated = dict(zip(rows, texts, strict=True))
        return [translated.get(row, "") for row in range(len(lines))]

    @torch.inference_mode()
    def search(
        self, sources: Sequence[EncodedSource], with_scores: bool = True
    ) -> list[list[Hypothesis]]:
        """Return the best targets of each source, in the order of the sources.

        Args:
            sources: what is translated.
            with_scores: say how likely they are; a greedy search is faster without.

        Raises:
            RunError: if the model gives no numbers.
        """
        for model in self.ensemble.models:
            model.eval()
        workers = ThreadPool(None if self.device.type == "cpu" else 1)  # a GPU wants larger batches
        try:
            rows = sorted(range(len(sources)), key=lambda row: -len(sources[row].ids))
            each = int(self.process_group.broadcast_float(workers.count))
            count = each * self.process_group.size
            shares = [rows[first::count] for first in range(count)]
            own = shares[each * self.process_group.rank : each * (self.process_group.rank + 1)]
            found = workers.map(
                lambda share: self._search([sources[row] for row in share], workers, with_scores),
                own,
            )
        except NotFiniteError:
            raise RunError(
                "the model must give numbers, but gives none that is finite; its training went "
                "astray, or its weights are damaged."
            ) from None
        finally:
            workers.close()
        best: list[list[Hypothesis]] = [[] for _ in sources]
        for share, of_share in zip(shares, exchange(self.process_group, found), strict=True):
            for row, hypotheses in zip(share, of_share, strict=True):
                best[row] = hypotheses
        return best

    @torch.inference_mode()
    def _search(
        self, sources: list[EncodedSource], workers: ThreadPool, with_scores: bool
    ) -> list[list[Hypothesis]]:
        """Return the best targets of sources that come the longest first."""

        def step(ids_N: Tensor, state: EnsembleState) -> Logits:
            workers.stay()
            return self.ensemble.step(ids_N, state)

        places = self.wanted.num_best if self.wanted.sampling else self.decoding.beam
        max_cells = self.decoding.batch_tokens / (NUM_GROUPS * places)
        cuts = _cut([len(source.ids) for source in sources], max_cells)
        groups = (sources[cut] for cut in cuts)
        if self.wanted.sampling is not None:
            return [best for group in groups for best in self._sample(step, group)]
        settings = BeamSettings(
            self.decoding.beam,
            self.decoding.length_alpha,
            self.wanted.num_best,
            self.decoding.early_stop,
            with_scores,
        )
        return beam(step, (self._start(group) for group in groups), settings)

    def _start(self, sources: list[EncodedSource]) -> RequestGroup[EnsembleState]:
        return RequestGroup(self.ensemble.start(self._read(sources)), self._limits(sources))

    def _sample(
        self, step: Step[EnsembleState], sources: list[EncodedSource]
    ) -> list[list[Hypothesis]]:
        assert self.wanted.sampling is not None
        group = self._start(sources)
        length = int(group.limits.max_lengths_B.max()) + 1
        uniform_NT = self._draw_uniform(sources, length)
        return sample(step, group, self.wanted.sampling, uniform_NT)

    def _read(self, sources: Sequence[EncodedSource]) -> list[Padded]:
        """Return the sources as each model reads them."""
        first = self.tokenizer.src
        read = {first: self._pad(first, [source.ids for source in sources])}
        texts = [source.text for source in sources if source.text is not None]
        for reader in self.readers:
            if reader not in read:
                assert len(texts) == len(sources), "ids do not hold what their vocabulary lacks"
                read[reader] = self._pad(
                    reader, [[*ids, reader.eos] for ids in reader.encode(texts)]
                )
        return [read[reader] for reader in self.readers]

    def _pad(self, vocabulary: Vocabulary, src: list[list[int]]) -> Padded:
        src_BS = pad_right(src, vocabulary.pad).to(self.device)
        return Padded(src_BS, keep_first([len(ids) for ids in src]).to(self.device))

    def max_length(self, source: EncodedSource) -> int:
        """Return how many pieces the target of a source may have, eos apart."""
        return max(len(source.ids) - 1 + self.decoding.max_extra_tokens, len(source.prefix))

    def _limits(self, sources: list[EncodedSource]) -> Constraints:
        tgt = self.tokenizer.tgt
        lengths = [self.max_length(source) for source in sources]
        prefix_BP = None
        if any(source.prefix for source in sources):
            prefix_BP = pad_right([list(source.prefix) for source in sources], -1).to(self.device)
        return Constraints(
            tgt.bos,
            tgt.eos,
            [tgt.pad, tgt.bos],
            torch.tensor(lengths, device=self.device),
            prefix_BP,
            self.decoding.no_repeat_ngram,
        )

    def _draw_uniform(self, sources: list[EncodedSource], length: int) -> Tensor:
        """Draw numbers for each wanted sample of each source, from its own seed."""
        rows = []
        for source in sources:
            rng = random.Random(source.seed)
            for _ in range(self.wanted.num_best):
                own = random.Random(rng.getrandbits(64))
                rows.append([own.random() for _ in range(length)])
        return torch.tensor(rows, dtype=torch.float64)

    @torch.inference_mode()
    def score(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[list[float]]:
        """Return the log-probability of each piece of a given target, and of its eos.

        Args:
            sources: what is translated.
            targets: pieces without bos and eos.
        """
        found: dict[int, list[float]] = {}
        for pairs in self._batches_of_pairs(sources, targets):
            log_probs_BTV = self.ensemble.log_probs(pairs.read, pairs.tgt_in_BT)
            for row, own_TV in zip(pairs.rows, log_probs_BTV, strict=True):
                tgt_out = [*targets[row], self.tokenizer.tgt.eos]
                wanted_T1 = torch.tensor(tgt_out, device=self.device)[:, None]
                found[row] = own_TV[: len(tgt_out)].gather(1, wanted_T1)[:, 0].tolist()
        of_all = exchange_numbers(self.process_group, found)
        return [of_all[row] for row in range(len(sources))]

    @torch.inference_mode()
    def attend(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[Tensor]:
        """Return what each piece of a given target, and its eos, gives to each source piece.

        Each is [T, S], the mean of all heads and layers; the pieces are those read so far, so
        that row t is the attention with which piece t was written.
        """
        found: dict[int, Tensor] = {}
        for pairs in self._batches_of_pairs(sources, targets):
            weights_BTS = self.ensemble.cross_attention(pairs.read, pairs.tgt_in_BT).cpu()
            for row, own_TS in zip(pairs.rows, weights_BTS, strict=True):
                found[row] = own_TS[: len(targets[row]) + 1, : len(sources[row].ids)]
        of_all = exchange_tensors(self.process_group, found)
        return [of_all[row] for row in range(len(sources))]

    def _batches_of_pairs(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> Iterator[_ScoringBatch]:
        """Yield this rank's batches of pairs of like length, under the budget of tokens."""
        lengths = [
            max(len(source.ids), len(target) + 1)
            for source, target in zip(sources, targets, strict=True)
        ]
        rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        cuts = _cut([lengths[row] for row in rows], self.decoding.batch_tokens // 4)
        for cut in islice(cuts, self.process_group.rank, None, self.process_group.size):
            own = rows[cut]
            tgt_in = [[self.tokenizer.tgt.bos, *targets[row]] for row in own]
            tgt_in_BT = pad_right(tgt_in, self.tokenizer.tgt.pad).to(self.device)
            yield _ScoringBatch(own, self._read([sources[row] for row in own]), tgt_in_BT)


class _ScoringBatch(NamedTuple):
    """Sources with given targets, and the rows at which they stood."""

    rows: list[int]
    read: list[Padded]
    tgt_in_BT: Tensor


def _cut(lengths: Sequence[int], max_cells: float) -> Iterator[slice]:
    """Cut rows that come the longest first, so that each cut has few cells, or a single row."""
    first = 0
    for row in range(1, len(lengths)):
        if (row - first + 1) * lengths[first] > max_cells:
            yield slice(first, row)
            first = row
    if lengths:
        yield slice(first, len(lengths))


def load(
    runs: RunDir | Sequence[RunDir],
    decoding: DecodingConfig | None = None,
    loading: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    wanted: DecodeRequest = DecodeRequest(),
) -> Translator:
    """Load the model of a run folder, or of several as an ensemble, ready to translate.

    From then on the process keeps the memory that it frees, and attends without cuDNN.

    Raises:
        RunError: if a folder is not a run, has no trained model, or its parts do not fit, or if
            several have different target vocabularies.
        ConfigError: if the settings cannot be used here.
    """
    keep_freed_memory()
    avoid_cudnn_attention()
    folders = [runs] if isinstance(runs, RunDir) else list(runs)
    config_of = [run.load_config() for run in folders]
    device = pick_device(loading.process_group.device_name(loading.device))
    tokenizers = [sentencepiece.load(run.tokenizer_dir) for run in folders]
    readers = _readers(folders, tokenizers)
    models = [
        load_model(run, config.model, own, loading, device)
        for run, config, own in zip(folders, config_of, tokenizers, strict=True)
    ]
    settings = decoding or config_of[0].decoding
    return Translator(
        models, tokenizers[0], settings, device, wanted, readers, loading.process_group
    )


def _readers(folders: list[RunDir], tokenizers: list[Tokenizer]) -> list[Vocabulary]:
    """Return the source vocabulary of each run, the same one for those that have the same.

    Raises:
        RunError: if they do not write the same pieces.
    """
    readers: list[Vocabulary] = []
    for run, own in zip(folders, tokenizers, strict=True):
        if own.tgt.model != tokenizers[0].tgt.model:
            raise RunError(
                f"{run.path}: must have the target vocabulary of the other runs to decode with "
                "them, but has its own; train it with a copy of their tokenizer folder."
            )
        readers.append(next((one for one in readers if one.model == own.src.model), own.src))
    return readers
