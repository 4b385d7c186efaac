"""Does a copy of a model, in the hands of another library, do what the model does?

Knows no library: a copy is anything that can encode, search and score.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from mtrain.config.sections import DecodingConfig
from mtrain.data.prepare import ParallelLines
from mtrain.decode.ensemble import Ensemble, EnsembleState, Padded
from mtrain.decode.translator import EncodedSource, Translator

Ids = list[list[int]]

TOLERANCE = 3e-4  # of a piece's log-probability; rounding moves that of a base model by 2e-5
_SUM_TOLERANCE = 10 * TOLERANCE
_SHOWN = 40  # characters of a line
_NEVER = -1e9  # a logit that no other is below


class CopyOutput(NamedTuple):
    """What a copy has found for a source.

    Attributes:
        ids: pieces without eos.
        log_prob: that the copy gives to them, and to eos if they end.
        has_ended: whether the copy chose to end there; otherwise the limit cut them off.
    """

    ids: list[int]
    log_prob: float
    has_ended: bool


class Copy(Protocol):
    """A model and its tokenizer as another library has them."""

    @property
    def is_closed(self) -> bool:
        """Whether pieces that are never written have no probability at all."""

    def encode(self, lines: Sequence[str]) -> Ids:
        """Return pieces + eos for each line."""

    def decode(self, ids: Ids) -> list[str]:
        """Return the text of each list of pieces."""

    def search(self, sources: Ids, beam: int, max_lengths: list[int]) -> list[CopyOutput]:
        """Return the likeliest target of each source, its score not divided by its length.

        None ends before its own limit, eos apart, unless it is likelier to.
        """

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each piece of a given target, and of its eos."""


class Same(NamedTuple):
    """On how many of the lines both did the same."""

    num_same: int
    num_lines: int

    def __str__(self) -> str:
        return f"{self.num_same:,} of {self.num_lines:,}"


@dataclass(frozen=True)
class ParityReport:
    """How a model and its copy compare.

    Attributes:
        encoded, greedy, beam, decoded: the lines with the same source pieces, the same outputs,
            and the same text for the same pieces. Of greedy outputs, those whose first different
            pieces are as likely as each other, but for rounding, count as the same.
        reference: the largest difference of a log-probability of a piece of the references.
        found: the same of the sum for what the copy's beam search has found.
        beam_width: of both beam searches; both score by log-probability alone.
        worst_source: the line where `reference` was found.
    """

    encoded: Same
    greedy: Same
    beam: Same
    decoded: Same
    reference: float
    found: float
    beam_width: int
    worst_source: str

    def problems(self) -> list[str]:
        """Say what keeps the copy from being exact; beams may differ, what they score may not."""
        found = [
            f"{name} must be the same on all lines, but is on {same}"
            for name, same in (
                ("the source pieces", self.encoded),
                ("greedy output", self.greedy),
                ("the text of an output", self.decoded),
            )
            if same.num_same < same.num_lines
        ]
        if not self.reference <= TOLERANCE:
            found.append(
                f"differences of log-probability must be at most {TOLERANCE:g}, but are "
                f"{self.reference:.2g} for {_shortened(self.worst_source)!r}"
            )
        if not self.found <= _SUM_TOLERANCE:
            found.append(
                f"those of beam output must be at most {_SUM_TOLERANCE:g}, but are {self.found:.2g}"
            )
        return found


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def compare(translator: Translator, copy: Copy, lines: ParallelLines) -> ParityReport:
    """Let both translate the sources and score the references.

    Args:
        translator: the model that was copied.
        copy: what was made of it.
        lines: text that the model was not trained on; no source is blank.
    """
    own = _Own(translator, copy.is_closed)
    encoded = translator.tokenizer.encode_src(lines.src)
    sources = copy.encode(lines.src)
    same_encoded = _count(a == b for a, b in zip(encoded, sources, strict=True))
    limits = [own.translator.max_length(EncodedSource(ids)) for ids in encoded]
    greedy = own.search(encoded, beam=1)
    found = [
        found.ids[:limit]
        for found, limit in zip(copy.search(encoded, 1, limits), limits, strict=True)
    ]
    width = translator.decoding.beam
    beams = own.search(encoded, width)
    copied = copy.search(encoded, width, limits)
    references = translator.tokenizer.tgt.encode(lines.tgt)
    apart = _apart(own.score(encoded, references), copy.score(encoded, references))
    worst = max(range(len(apart)), key=lambda row: apart[row])
    return ParityReport(
        same_encoded,
        _count(own.are_as_likely(encoded, greedy, found)),
        _count(ids == other.ids for ids, other in zip(beams, copied, strict=True)),
        _count(_same_text(translator, copy, greedy)),
        apart[worst],
        _apart_in_sum(own.score(encoded, [other.ids for other in copied]), copied),
        width,
        lines.src[worst],
    )


def translate(translator: Translator, sources: Ids) -> list[str]:
    """Return the model's own translations as a copy searches them: by log-probability alone."""
    own = _Own(translator, is_closed=False)
    return translator.tokenizer.tgt.decode(own.search(sources, translator.decoding.beam))


def _count(same: Iterable[bool]) -> Same:
    marks = list(same)
    return Same(sum(marks), len(marks))


def _apart(own: list[list[float]], other: list[list[float]]) -> list[float]:
    """Return the largest difference of each line; what is no number is infinitely far."""
    return [
        max(_difference(a, b) for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in zip(own, other, strict=True)
    ]


def _apart_in_sum(own: list[list[float]], copied: list[CopyOutput]) -> float:
    return max(
        _difference(sum(log_probs if found.has_ended else log_probs[:-1]), found.log_prob)
        for log_probs, found in zip(own, copied, strict=True)
    )


def _difference(a: float, b: float) -> float:
    return abs(a - b) if abs(a - b) < float("inf") else float("inf")


def _same_text(translator: Translator, copy: Copy, ids: Ids) -> list[bool]:
    """Tell for each output whether both write it as the same text.

    Spaces at its ends and kinds of space do not count, nor outputs with an unknown piece, for
    which every library has another sign.
    """
    unk = translator.tokenizer.tgt.unk
    texts = zip(ids, translator.tokenizer.tgt.decode(ids), copy.decode(ids), strict=True)
    return [unk in row or _plain(ours) == _plain(theirs) for row, ours, theirs in texts]


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


class _Own:
    """The model that was copied, made to search as its copy does."""

    def __init__(self, translator: Translator, is_closed: bool) -> None:
        by_log_prob = translator.decoding.model_copy(
            update={"length_alpha": 0.0, "no_repeat_ngram": 0, "early_stop": False}
        )
        self.translator = _with(translator, by_log_prob)
        if is_closed:
            tgt = translator.tokenizer.tgt
            self.translator.ensemble = _Closed(translator.ensemble, [tgt.pad, tgt.bos])

    def search(self, sources: Ids, beam: int) -> Ids:
        """Return the best target of each source."""
        decoding = self.translator.decoding.model_copy(update={"beam": beam})
        searching = _with(self.translator, decoding)
        searching.ensemble = self.translator.ensemble
        return [best[0].ids for best in searching.search([EncodedSource(ids) for ids in sources])]

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each piece of a given target, and of its eos."""
        return self.translator.score([EncodedSource(ids) for ids in sources], targets)

    def are_as_likely(self, sources: Ids, greedy: Ids, others: Ids) -> list[bool]:
        """Tell for each greedy output whether another is the same, or was as likely a choice."""
        eos = self.translator.tokenizer.tgt.eos
        same = [a == b for a, b in zip(greedy, others, strict=True)]
        rows = [row for row, is_same in enumerate(same) if not is_same]
        scored = [
            self.score([sources[row] for row in rows], [outputs[row] for row in rows])
            for outputs in (greedy, others)
        ]
        for row, ours, theirs in zip(rows, *scored, strict=True):
            pairs = zip([*greedy[row], eos], [*others[row], eos], strict=False)
            place = next(place for place, (a, b) in enumerate(pairs) if a != b)
            same[row] = _difference(ours[place], theirs[place]) <= TOLERANCE
        return same


def _with(translator: Translator, decoding: DecodingConfig) -> Translator:
    return Translator(translator.ensemble.models, translator.tokenizer, decoding, translator.device)


class _Closed(Ensemble):
    """Models that give no probability to some pieces, and theirs to the others."""

    def __init__(self, ensemble: Ensemble, never: list[int]) -> None:
        super().__init__(ensemble.models)
        self._never = never

    def step(self, ids_N: Tensor, state: EnsembleState) -> Tensor:
        """Return the logits [N, V] of the piece that follows `ids_N`, and advance `state`."""
        return self._close(super().step(ids_N, state)[:])

    def log_probs(self, sources: Sequence[Padded], tgt_in_BT: Tensor) -> Tensor:
        """Return the log-probabilities [B, T, V] of every piece at every place, in float64."""
        return self._close(super().log_probs(sources, tgt_in_BT)).log_softmax(-1)

    def _close(self, logits: Tensor) -> Tensor:
        closed = logits.clone()
        closed[..., self._never] = _NEVER
        return closed
