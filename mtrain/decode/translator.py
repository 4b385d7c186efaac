"""Search, sampling and scoring of targets for encoded sources, with one model or several."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from mtrain.data.batch import keep_first, pad_right
from mtrain.decode import shortlist
from mtrain.decode.beam import NUM_GROUPS, Constraints, Hypothesis, NotFiniteError, RequestGroup
from mtrain.decode.options import DecodingOptions
from mtrain.decode.sampling import sample_steps
from mtrain.decode.shared_search import (
    NO_LIMITS,
    PendingSearch,
    SearchCall,
    SearchLimits,
    SharedSearch,
)
from mtrain.errors import ConfigError, RunError
from mtrain.io.atomic import sha256
from mtrain.model.kv_cache import KVCache
from mtrain.model.transformer import Transformer
from mtrain.ops.beam_search import SearchSteps
from mtrain.ops.packed_weights import Ints, PackedRows
from mtrain.ops.topk import Logits
from mtrain.run.load_model import LoadOptions, load_model, weights_path
from mtrain.run.run_dir import RunDir
from mtrain.runtime.device import avoid_cudnn_attention, keep_freed_memory, pick_device
from mtrain.runtime.process_group import SINGLE, ProcessGroup
from mtrain.runtime.threads import map_on_cores, num_threads
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer, Vocabulary


class Padded(NamedTuple):
    """The sources of a batch as padded ids of one source vocabulary."""

    src_BS: Tensor
    src_keep_BS: Tensor


class Ensemble:
    """Models of the same target vocabulary, whose probabilities are averaged.

    `sources` has an entry for each model, in the source vocabulary of that model.
    """

    def __init__(self, models: Sequence[Transformer]) -> None:
        self.models = list(models)

    def start(self, sources: Sequence[Padded]) -> EnsembleState:
        """Encode the sources, and return the state from which `step` decodes."""
        return EnsembleState(
            [model.start(*source) for model, source in zip(self.models, sources, strict=True)]
        )

    def step(self, ids_N: Tensor, state: EnsembleState) -> Logits:
        """Return the logits [N, V] of the token after `ids_N`, and advance `state`."""
        logits = [
            model.decode_step(ids_N, cache)
            for model, cache in zip(self.models, state.states, strict=True)
        ]
        if len(logits) == 1:
            return logits[0]
        return _log_mean([model_logits[:] for model_logits in logits])

    def search_steps(self, state: EnsembleState, *arguments: Any) -> SearchSteps | None:
        """Call `Transformer.search_steps`; None for several models, which decode step by step."""
        is_one = len(state.states) == 1
        return self.models[0].search_steps(state.states[0], *arguments) if is_one else None

    def log_probs(self, sources: Sequence[Padded], tgt_in_BT: Tensor, tgt_out_BT: Tensor) -> Tensor:
        """Return the log-probability [B, T] of each token of given targets, in float64."""
        log_probs = [
            model.output.log_probs(
                model(*source, tgt_in_BT).flatten(0, 1), tgt_out_BT.flatten()
            ).double()
            for model, source in zip(self.models, sources, strict=True)
        ]
        mean = torch.stack(log_probs).logsumexp(0) - math.log(len(log_probs))
        return mean.view_as(tgt_out_BT)

    def all_log_probs(self, sources: Sequence[Padded], tgt_in_BT: Tensor) -> Tensor:
        """Return the log-probabilities [B, T, V] of every token at every position, in float64."""
        logits = [
            model.output(model(*source, tgt_in_BT)).double()
            for model, source in zip(self.models, sources, strict=True)
        ]
        return _log_mean(logits)

    def cross_attention(self, sources: Sequence[Padded], tgt_in_BT: Tensor) -> Tensor:
        """Return the cross-attention weights [B, T, S], averaged over heads, layers and models.

        Models with another source vocabulary than the first are left out: S differs.
        """
        maps = [
            weights_BHTS.double().mean(1)
            for model, source in zip(self.models, sources, strict=True)
            if source is sources[0]
            for weights_BHTS in model.attention_maps(*source, tgt_in_BT, cross_only=True).cross
        ]
        return torch.stack(maps).mean(0)


class EnsembleState:
    """The key-value caches of all models."""

    def __init__(self, states: list[KVCache]) -> None:
        self.states = states

    def reorder(self, rows_N: Ints) -> None:
        """Keep these rows, in this order; a row may be repeated or dropped."""
        for state in self.states:
            state.reorder(rows_N)

    def admit(self, other: EnsembleState) -> None:
        """Append the cache rows of newly admitted sentences."""
        for state, new in zip(self.states, other.states, strict=True):
            state.admit(new)


def _log_mean(logits: list[Tensor]) -> Tensor:
    """Return the logarithm of the mean of the probabilities."""
    log_probs = torch.stack([model_logits.log_softmax(-1) for model_logits in logits])
    return log_probs.logsumexp(0) - math.log(len(logits))


@dataclass(frozen=True)
class EncodedSource:
    """A source to decode.

    Attributes:
        ids: token ids with eos.
        prefix: the tokens that the target must begin with.
        seed: of sampling; with one for each source, samples do not depend on the batch.
        text: the text of the tokens; models with another source vocabulary encode it themselves.
    """

    ids: list[int]
    prefix: tuple[int, ...] = ()
    seed: int = 0
    text: str | None = None

    def max_length(self, max_extra_tokens: int) -> int:
        """Return the most tokens that its target may have, without eos."""
        return max(len(self.ids) - 1 + max_extra_tokens, len(self.prefix))


class Translator:
    """A model or an ensemble, its tokenizer, and the options of its searches.

    Args:
        models: of the same target vocabulary.
        tokenizer: encodes the sources, and decodes the targets.
        options: of the search.
        device: where the models are.
        src_vocabularies: one for each model; by default the tokenizer's.
        process_group: ranks that call the same methods with the same arguments. Each searches for
            a part of the sources, and all return all results.

    Attributes:
        reverse: a model of the other direction, for reranking; None if there is none.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        tokenizer: Tokenizer,
        options: DecodingOptions,
        device: torch.device,
        src_vocabularies: Sequence[Vocabulary] = (),
        process_group: ProcessGroup = SINGLE,
    ) -> None:
        self.ensemble, self.tokenizer, self.options = Ensemble(models), tokenizer, options
        self.device, self.process_group, self.limits = device, process_group, NO_LIMITS
        self.src_vocabularies = src_vocabularies or [tokenizer.src] * len(models)
        self.shortlist: shortlist.Shortlist | None = None
        self.reverse: Translator | None = None
        self.shared_search: SharedSearch[EnsembleState] = SharedSearch(
            lambda ids_N, state: self.ensemble.step(ids_N, state),
            lambda state, *arguments: self.ensemble.search_steps(state, *arguments),
        )

    @property
    def model(self) -> Transformer:
        """The first model."""
        return self.ensemble.models[0]

    @property
    def max_positions(self) -> int | None:
        """The number of learned positions; None if positions are sinusoids."""
        return self.model.config.max_positions

    def with_options(
        self, options: DecodingOptions, limits: SearchLimits = NO_LIMITS
    ) -> Translator:
        """Return a translator with other options, which shares the running search with this one.

        Raises:
            ConfigError: for a `shortlist` if the model was loaded without one.
        """
        if options.shortlist is not None and self.shortlist is None:
            raise ConfigError(
                "`shortlist` must be None for a model that was loaded without one, but is "
                f"{options.shortlist} instead."
            )
        other = copy.copy(self)
        other.options, other.limits = options, limits
        if other.reverse is not None:
            of_reverse = replace(other.reverse.options, batch_tokens=options.batch_tokens)
            other.reverse = other.reverse.with_options(of_reverse, limits)
        return other

    def search(self, sources: Sequence[EncodedSource]) -> list[list[Hypothesis]]:
        """Return the best targets of each source, in the order of the sources.

        Raises:
            RunError: if the logits are not finite.
            TimeoutError, CancelledError: as `limits` say.
        """
        return self.start_search(sources).result()

    def start_search(self, sources: Sequence[EncodedSource]) -> PendingSearch:
        """Begin a search, whose result raises what `search` does.

        The sources are sorted by length and distributed over the threads of all ranks. Any number
        of threads may call it; their sources are decoded together. All ranks must call `result` of
        their searches in the same order.
        """
        for model in self.ensemble.models:
            if model.training:  # `eval` visits every module
                model.eval()
        lengths = [len(source.ids) for source in sources]
        rows = sorted(range(len(sources)), key=lambda row: -lengths[row])
        max_cells = self.options.batch_tokens / (NUM_GROUPS * self.options.num_targets)
        # a GPU needs large batches, and not several threads
        num_workers = num_threads() if self.device.type == "cpu" else 1
        per_rank = int(self.process_group.broadcast_float(num_workers))
        count = per_rank * self.process_group.size
        first = per_rank * self.process_group.rank
        groups_of = [
            list(_cut(rows[start::count], lengths, max_cells))
            for start in range(first, first + per_rank)
        ]
        call = SearchCall(
            {row: sources[row] for groups in groups_of for rows in groups for row in rows},
            self.options,
            self._start,
            self._sample if self.options.sampling else None,
            self.limits,
        )
        wait = self.shared_search.submit(call, groups_of)
        return PendingSearch(lambda: self._gather(wait, len(sources)), call.cancel)

    def _gather(
        self, wait: Callable[[], dict[int, list[Hypothesis]]], num_sources: int
    ) -> list[list[Hypothesis]]:
        """Wait for a search; return the hypotheses of each source, gathered from all ranks."""
        try:
            best = wait()
        except NotFiniteError:
            raise RunError(
                "the model must give finite numbers, but does not: its training diverged, or its "
                "weights are damaged."
            ) from None
        if self.process_group.size > 1:
            message = [(row, [astuple(hypothesis) for hypothesis in best[row]]) for row in best]
            best = {
                row: [Hypothesis(*fields) for fields in hypotheses]
                for part in self.process_group.all_gather_bytes(json.dumps(message).encode())
                for row, hypotheses in json.loads(part)
            }
        return [best[row] for row in range(num_sources)]

    @torch.inference_mode()
    def _sample(
        self, sources: list[EncodedSource]
    ) -> Generator[None, None, list[list[Hypothesis]]]:
        sampling, length_alpha = self.options.sampling, self.options.length_alpha
        assert sampling is not None
        group = self._start(sources)
        length = int(group.constraints.max_lengths_B.max()) + 1
        uniform_NT = _draw_uniform(sources, self.options.num_best, length)
        draws = sample_steps(self.ensemble.step, group, sampling, uniform_NT, length_alpha)
        return (yield from draws)

    @torch.inference_mode()
    def _start(self, sources: list[EncodedSource]) -> RequestGroup[EnsembleState]:
        tgt = self.tokenizer.tgt
        lengths = [source.max_length(self.options.max_extra_tokens) for source in sources]
        prefix_BP = None
        if any(source.prefix for source in sources):
            prefix_BP = pad_right([list(source.prefix) for source in sources], -1).numpy()
        never = tgt.never_generated
        shortlists: list[PackedRows] = []
        if self.options.shortlist is not None and self.options.beam > 1 and self.shortlist:
            tokens = [self.shortlist.tokens(source.ids, never) for source in sources]
            shortlists = self.model.output.rows(tokens)
        constraints = Constraints(
            tgt.bos,
            tgt.eos,
            never,
            np.array(lengths, np.int64),
            prefix_BP,
            self.options.no_repeat_ngram,
            shortlists,
        )
        return RequestGroup(self.ensemble.start(self._pad_for_models(sources)), constraints)

    def _pad_for_models(self, sources: Sequence[EncodedSource]) -> list[Padded]:
        """Return the sources in the source vocabulary of each model."""
        first = self.tokenizer.src
        padded = {first: self._pad(first, [source.ids for source in sources])}
        texts = [source.text for source in sources if source.text is not None]
        for vocabulary in self.src_vocabularies:
            if vocabulary not in padded:
                assert len(texts) == len(sources), "ids do not hold what their vocabulary lacks"
                ids = [[*ids, vocabulary.eos] for ids in vocabulary.encode(texts)]
                padded[vocabulary] = self._pad(vocabulary, ids)
        return [padded[vocabulary] for vocabulary in self.src_vocabularies]

    def _pad(self, vocabulary: Vocabulary, src: list[list[int]]) -> Padded:
        src_BS = pad_right(src, vocabulary.pad).to(self.device)
        return Padded(src_BS, keep_first([len(ids) for ids in src]).to(self.device))

    def score(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[list[float]]:
        """Return the log-probability of each token of a given target, and of its eos.

        Args:
            sources: the source of each target.
            targets: tokens without bos and eos.
        """

        @torch.inference_mode()
        def log_probs_of(rows: list[int]) -> list[list[float]]:
            padded, tgt_in_BT = self._pad_pairs(sources, targets, rows)
            tgt_out = [[*targets[row], self.tokenizer.tgt.eos] for row in rows]
            tgt_out_BT = pad_right(tgt_out, self.tokenizer.tgt.pad).to(self.device)
            log_probs_BT = self.ensemble.log_probs(padded, tgt_in_BT, tgt_out_BT).tolist()
            return [log_probs_BT[i][: len(ids)] for i, ids in enumerate(tgt_out)]

        batches = self._batches_of_pairs(sources, targets)
        each = map_on_cores if self.device.type == "cpu" else map
        log_probs = {
            row: log_probs_T
            for rows, found in zip(batches, each(log_probs_of, batches), strict=True)
            for row, log_probs_T in zip(rows, found, strict=True)
        }
        if self.process_group.size > 1:
            message = json.dumps(list(log_probs.items())).encode()
            for part in self.process_group.all_gather_bytes(message):
                log_probs |= dict(json.loads(part))
        return [log_probs[row] for row in range(len(sources))]

    def score_texts(self, pairs: Sequence[tuple[str, str]]) -> list[list[float]]:
        """Return `score` of pairs of a source text and a target text."""
        texts, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        ids_of = self.tokenizer.encode_src(texts)
        sources = [EncodedSource(ids, text=text) for ids, text in zip(ids_of, texts, strict=True)]
        return self.score(sources, self.tokenizer.tgt.encode(targets))

    @torch.inference_mode()
    def attend(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[Tensor]:
        """Return the cross-attention weights of given targets, each [T, S] with eos on both sides.

        They are the means of all heads and layers. Row t is the attention with which token t is
        predicted.
        """
        weights: dict[int, Tensor] = {}
        for rows in self._batches_of_pairs(sources, targets):  # hooks of a model allow one thread
            padded, tgt_in_BT = self._pad_pairs(sources, targets, rows)
            weights_BTS = self.ensemble.cross_attention(padded, tgt_in_BT).cpu()
            for row, weights_TS in zip(rows, weights_BTS, strict=True):
                weights[row] = weights_TS[: len(targets[row]) + 1, : len(sources[row].ids)]
        if self.process_group.size > 1:
            tensors = {str(row): weights_TS.contiguous() for row, weights_TS in weights.items()}
            for part in self.process_group.all_gather_bytes(save_tensors(tensors)):
                weights |= {int(row): weights_TS for row, weights_TS in load_tensors(part).items()}
        return [weights[row] for row in range(len(sources))]

    def _batches_of_pairs(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[list[int]]:
        """Return the rows of each of this rank's batches."""
        lengths = [
            max(len(source.ids), len(target) + 1)
            for source, target in zip(sources, targets, strict=True)
        ]
        rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        batches = _cut(rows, lengths, self.options.batch_tokens // 4)
        return list(islice(batches, self.process_group.rank, None, self.process_group.size))

    def _pad_pairs(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]], rows: list[int]
    ) -> tuple[list[Padded], Tensor]:
        """Return the sources of a batch for each model, and its tgt_in [B, T].

        Raises:
            TimeoutError, CancelledError: as `limits` say.
        """
        self.limits.seconds_left()
        tgt_in = [[self.tokenizer.tgt.bos, *targets[row]] for row in rows]
        tgt_in_BT = pad_right(tgt_in, self.tokenizer.tgt.pad).to(self.device)
        return self._pad_for_models([sources[row] for row in rows]), tgt_in_BT


def _draw_uniform(sources: list[EncodedSource], num_samples: int, length: int) -> Tensor:
    """Return uniform numbers [B * num_samples, length], drawn from the seed of each source."""
    rows = []
    for source in sources:
        seeds = random.Random(source.seed)
        for _ in range(num_samples):
            rng = random.Random(seeds.getrandbits(64))
            rows.append([rng.random() for _ in range(length)])
    return torch.tensor(rows, dtype=torch.float64)


def _cut(rows: list[int], lengths: list[int], max_cells: float) -> Iterator[list[int]]:
    """Cut rows, the longest first, into parts of at most `max_cells` padded cells, or one row."""
    first = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end - first + 1) * lengths[rows[first]] > max_cells:
            yield rows[first:end]
            first = end


def load(
    runs: RunDir | Sequence[RunDir],
    options: DecodingOptions | None = None,
    loading: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
) -> Translator:
    """Load the model of a run folder, or of several as an ensemble, ready to translate.

    Args:
        runs: a run folder, or several.
        options: of the search; those of the first run's config if absent.
        loading: how the models are loaded.

    Raises:
        RunError: if a folder is not a run, has no trained model, or its files do not fit, if
            several have different directions or target vocabularies, or if the `reverse` of
            `loading` does not translate in the other direction.
        ConfigError: if the device, the precision or a shortlist cannot be used.
    """
    keep_freed_memory()
    avoid_cudnn_attention()
    folders = [runs] if isinstance(runs, RunDir) else list(runs)
    configs = [run.config for run in folders]
    if loading.reverse is not None:
        data = configs[0].data
        loading.reverse.check_direction([(data.tgt_lang, data.src_lang)], "for `--rerank-with`")
        loading.reverse.check_trained()
    for run in folders[1:]:
        run.check_direction(folders[0].directions, f"as {folders[0].path} does")
    device = pick_device(loading.process_group.device_name(loading.device))
    tokenizers = [sentencepiece.load(run.tokenizer_dir) for run in folders]
    src_vocabularies: list[Vocabulary] = []  # equal ones are one object
    for run, tokenizer in zip(folders, tokenizers, strict=True):
        if tokenizer.tgt.model != tokenizers[0].tgt.model:
            raise RunError(
                f"{run.path}: must have the target vocabulary of the other runs to decode with "
                "them, but has its own; train it with a copy of their tokenizer folder."
            )
        same = (other for other in src_vocabularies if other.model == tokenizer.src.model)
        src_vocabularies.append(next(same, tokenizer.src))
    models = [
        load_model(run, tokenizer, loading, device)
        for run, tokenizer in zip(folders, tokenizers, strict=True)
    ]
    options = options or DecodingOptions.from_config(configs[0])
    _check_same_on_ranks(folders, options, loading)
    translator = Translator(
        models, tokenizers[0], options, device, src_vocabularies, loading.process_group
    )
    if options.shortlist is not None:
        if len(folders) > 1 or device.type != "cpu":
            reason = f"the device is {device}" if len(folders) == 1 else f"{len(folders)} are named"
            raise ConfigError(f"`shortlist` must have one run on a CPU, but {reason}.")
        if not loading.process_group.is_first:  # which learns and writes it
            loading.process_group.barrier()
        translator.shortlist = shortlist.load(folders[0], tokenizers[0])
        if loading.process_group.is_first:
            loading.process_group.barrier()
    if loading.reverse is not None:
        translator.reverse = load(loading.reverse, None, replace(loading, step=None, reverse=None))
        translator = translator.with_options(options)  # of the reverse model, too
    return translator


def _check_same_on_ranks(
    folders: Sequence[RunDir], options: DecodingOptions, loading: LoadOptions
) -> None:
    """Raise RunError unless all ranks translate alike: a rank may have copies of the folders."""
    if loading.process_group.size == 1:
        return
    own = {
        "decoding options": f"{options} {loading.products}",
        "models": [
            [str(run.config.model), sha256(weights_path(run, loading.step))] for run in folders
        ],
    }
    messages = loading.process_group.all_gather_bytes(json.dumps(own).encode())
    first, *others = map(json.loads, messages)
    for rank, other in enumerate(others, 1):
        for what, value in first.items():
            if other[what] != value:
                raise RunError(
                    f"the {what} must be the same on all ranks, but rank {rank} has others."
                )
