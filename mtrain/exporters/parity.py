"""Compare an exported model, as another library runs it, with the model of the run.

Imports none of the libraries: they are called through `ExportedModel`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mtrain.data.prepare import ParallelLines
from mtrain.decode.options import DecodingOptions
from mtrain.decode.translator import EncodedSource, Ensemble, EnsembleState, Padded, Translator
from mtrain.exporters.exporter import (
    Agreement,
    ExportedHypothesis,
    ExportedModel,
    Ids,
    OwnCall,
    agreement,
)

TOLERANCE = 3e-4  # of a token's log-probability; rounding changes that of a base model by 2e-5
_SUM_TOLERANCE = 10 * TOLERANCE  # of an output's log-probability; more of one of over 10 tokens
_MAX_QUOTED = 40  # characters of a line
_MASKED_LOGIT = -1e9
REPLACEMENT = "\ufffd"  # the character that stands for bytes that are no UTF-8


@dataclass(frozen=True)
class ParityReport:
    """How an exported model compares with the model of the run."""

    same_source: Agreement  # of source tokens
    same_greedy: Agreement  # of greedy outputs, or a tie of their first different tokens
    same_beam: Agreement  # of the outputs of beam search by log-probability
    other_beams: dict[str, int]  # the lines whose outputs differ, by the kind of difference
    same_text: Agreement  # of the texts that output tokens are decoded to
    reference_diff: float  # the largest difference of the log-probability of a reference token
    beam_diff: float  # the largest difference of the log-probability of a beam search output
    beam_tolerance: float  # the limit of `beam_diff`, which grows with the length of the output
    beam: int  # the width of the beam search
    worst_source: str  # the line where `reference_diff` was found
    own_call: OwnCall | None  # the library's own text-to-text call

    def problems(self) -> list[str]:
        """Return why the export is not exact; beam outputs may differ, their scores may not."""
        compared = [
            ("the source tokens", self.same_source),
            ("greedy output", self.same_greedy),
            ("the text of an output", self.same_text),
        ]
        if self.own_call is not None and self.own_call.same is not None:
            compared.append((f"the text of {self.own_call.program}", self.own_call.same))
        problems = [
            f"{name} must be the same on all lines, but only {same} lines agree"
            for name, same in compared
            if same.num_same < same.num_lines
        ]
        if not self.reference_diff <= TOLERANCE:
            source = self.worst_source
            if len(source) > _MAX_QUOTED:
                source = source[:_MAX_QUOTED] + "..."
            problems.append(
                f"differences of log-probability must be at most {TOLERANCE:g}, but are "
                f"{self.reference_diff:.2g} for {source!r}"
            )
        if not self.beam_diff <= self.beam_tolerance:
            problems.append(
                "differences of log-probability of beam output must be at most "
                f"{self.beam_tolerance:.2g}, but are {self.beam_diff:.2g}"
            )
        return problems


def compare(translator: Translator, exported: ExportedModel, lines: ParallelLines) -> ParityReport:
    """Translate the sources and score the references with the run and with its export.

    `lines` are text that the model was not trained on; no source is blank.
    """
    searcher = LogProbSearcher(translator, exported.masks_special)
    tokenizer, beam = translator.tokenizer, translator.options.beam
    encoded = tokenizer.encode_src(lines.src)
    same_source = agreement(
        a == b for a, b in zip(encoded, exported.encode(lines.src), strict=True)
    )
    max_extra_tokens = translator.options.max_extra_tokens
    limits = [EncodedSource(ids).max_length(max_extra_tokens) for ids in encoded]
    greedy = searcher.search(encoded, beam=1)
    their_greedy = [
        hypothesis.ids[:limit]
        for hypothesis, limit in zip(exported.search(encoded, 1, limits), limits, strict=True)
    ]
    beams, their_beams = searcher.search(encoded, beam), exported.search(encoded, beam, limits)
    their_scores = searcher.score(encoded, [hypothesis.ids for hypothesis in their_beams])
    references = tokenizer.tgt.encode(lines.tgt)
    scores = zip(
        searcher.score(encoded, references), exported.score(encoded, references), strict=True
    )
    diffs = [
        max(_difference(a, b) for a, b in zip(ours, theirs, strict=True)) for ours, theirs in scores
    ]
    worst = max(range(len(diffs)), key=lambda row: diffs[row])
    beam_diffs = [
        (
            _difference(sum(scores if other.has_ended else scores[:-1]), other.log_prob),
            max(_SUM_TOLERANCE, TOLERANCE * len(scores)),
        )
        for scores, other in zip(their_scores, their_beams, strict=True)
    ]
    return ParityReport(
        same_source,
        agreement(searcher.are_as_likely(encoded, greedy, their_greedy)),
        agreement(ids == other.ids for ids, other in zip(beams, their_beams, strict=True)),
        _other_beams(searcher, encoded, beams, their_beams, limits),
        agreement(_same_text(translator, exported, greedy)),
        diffs[worst],
        *max(beam_diffs, key=lambda pair: (pair[0] > pair[1], pair[0])),
        beam,
        lines.src[worst],
        exported.own_call(lines.src),
    )


def _difference(a: float, b: float) -> float:
    """Return |a - b|; infinity if a or b is not finite."""
    return abs(a - b) if abs(a - b) < float("inf") else float("inf")


def _other_beams(
    searcher: LogProbSearcher,
    sources: Ids,
    ours: Ids,
    theirs: Sequence[ExportedHypothesis],
    limits: Sequence[int],
) -> dict[str, int]:
    """Count the lines whose outputs differ, by the kind of difference; omit kinds without lines.

    The program that ends its search later finds the likelier output more often. Outputs that end
    at a length limit cannot be compared, because each program has a limit of its own.
    """
    rows = [row for row, ids in enumerate(ours) if ids != theirs[row].ids]
    are_cut = [
        not theirs[row].has_ended or max(len(ours[row]), len(theirs[row].ids)) >= limits[row]
        for row in rows
    ]
    encoded = [sources[row] for row in rows]
    our_scores = searcher.score(encoded, [ours[row] for row in rows])
    their_scores = searcher.score(encoded, [theirs[row].ids for row in rows])
    kinds = Counter(
        "end at a limit of length"
        if is_cut
        else "as likely"
        if _difference(sum(our), sum(their)) <= _SUM_TOLERANCE
        else "likelier in mtrain"
        if sum(our) > sum(their)
        else "likelier in the export"
        for is_cut, our, their in zip(are_cut, our_scores, their_scores, strict=True)
    )
    return dict(kinds.most_common())


def _same_text(translator: Translator, exported: ExportedModel, ids: Ids) -> list[bool]:
    """Return for each output whether both decode it to the same text.

    Spaces at the ends and kinds of space are ignored. Outputs with an unknown token or with invalid
    UTF-8, which each library writes differently, count as the same.
    """
    unk = translator.tokenizer.tgt.unk
    texts = zip(ids, translator.tokenizer.tgt.decode(ids), exported.decode(ids), strict=True)
    return [
        unk in row or REPLACEMENT in ours or ours.split() == theirs.split()
        for row, ours, theirs in texts
    ]


class LogProbSearcher:
    """The run's model searched as other libraries do: by log-probability, without other options."""

    def __init__(self, translator: Translator, masks_special: bool) -> None:
        extra, batch_tokens = translator.options.max_extra_tokens, translator.options.batch_tokens
        options = DecodingOptions(
            length_alpha=0.0, max_extra_tokens=extra, batch_tokens=batch_tokens
        )
        models, tokenizer = translator.ensemble.models, translator.tokenizer
        self.translator = Translator(models, tokenizer, options, translator.device)
        if masks_special:
            masked_ids = tokenizer.tgt.never_generated
            self.translator.ensemble = MaskedEnsemble(translator.ensemble, masked_ids)

    def search(self, sources: Ids, beam: int) -> Ids:
        """Return the best target of each source."""
        self.translator.options = replace(self.translator.options, beam=beam)
        hypotheses = self.translator.search([EncodedSource(ids) for ids in sources])
        return [best[0].ids for best in hypotheses]

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each token of a given target, and of its eos."""
        return self.translator.score([EncodedSource(ids) for ids in sources], targets)

    def are_as_likely(self, sources: Ids, greedy: Ids, others: Ids) -> list[bool]:
        """Return for each source whether `others` is the greedy output, or ties with it."""
        eos = self.translator.tokenizer.tgt.eos
        same = [a == b for a, b in zip(greedy, others, strict=True)]
        rows = [row for row, is_same in enumerate(same) if not is_same]
        scored = [
            self.score([sources[row] for row in rows], [outputs[row] for row in rows])
            for outputs in (greedy, others)
        ]
        for row, ours, theirs in zip(rows, *scored, strict=True):
            pairs = zip([*greedy[row], eos], [*others[row], eos], strict=False)
            position = next(position for position, (a, b) in enumerate(pairs) if a != b)
            same[row] = _difference(ours[position], theirs[position]) <= TOLERANCE
        return same


class MaskedEnsemble(Ensemble):
    """An ensemble in which some tokens have zero probability."""

    def __init__(self, ensemble: Ensemble, masked_ids: list[int]) -> None:
        super().__init__(ensemble.models)
        self._masked_ids = masked_ids

    def step(self, ids_N: Tensor, state: EnsembleState) -> Tensor:
        """Return the logits [N, V] of the token that follows `ids_N`, and advance `state`."""
        return self._mask(super().step(ids_N, state)[:])

    def search_steps(self, *_: object) -> None:
        """Return None: the compiled search ranks the logits without the mask."""

    def log_probs(self, sources: Sequence[Padded], tgt_in_BT: Tensor, tgt_out_BT: Tensor) -> Tensor:
        """Return the log-probability [B, T] of each token of given targets, in float64."""
        log_probs_BTV = self._mask(self.all_log_probs(sources, tgt_in_BT)).log_softmax(-1)
        return log_probs_BTV.gather(2, tgt_out_BT[:, :, None])[:, :, 0]

    def _mask(self, logits: Tensor) -> Tensor:
        masked = logits.clone()
        masked[..., self._masked_ids] = _MASKED_LOGIT
        return masked
