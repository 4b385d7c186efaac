"""A translated line, what looks wrong about it, and how it is written. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtrain.decode.alignment import Link

Format = Literal["text", "tsv", "jsonl"]


@dataclass(frozen=True)
class Translation:
    """One translation of a line.

    Attributes:
        text: the translation.
        pieces: its pieces as text, eos last.
        log_probs: of each piece.
        log_prob: their sum.
        score: what it was ranked by.
        alignment: words that belong together; None if nobody asked.
        flags: what looks wrong about it.
    """

    text: str
    pieces: list[str]
    log_probs: list[float]
    log_prob: float
    score: float
    alignment: list[Link] | None = None
    flags: list[str] = field(default_factory=list)


NOTHING = Translation("", [], [], 0.0, 0.0, [])


@dataclass(frozen=True)
class TranslatedLine:
    """A line of the input, numbered from 1, and its translations, best first."""

    number: int
    src: str
    best: list[Translation]


def join(parts: Sequence[Translation]) -> Translation:
    """Join the translations of the parts of a line; their scores are averaged by length.

    Source words are numbered in the line already, target words in each part.
    """
    if len(parts) == 1:
        return parts[0]
    pieces = [piece for part in parts for piece in part.pieces]
    weights = [max(len(part.pieces), 1) for part in parts]
    score = sum(w * part.score for w, part in zip(weights, parts, strict=True)) / sum(weights)
    links: list[Link] | None = []
    first_tgt = 0
    for part in parts:
        if part.alignment is None or links is None:
            links = None
            break
        links += [Link(link.src, first_tgt + link.tgt) for link in part.alignment]
        first_tgt += sum(word != "" for word in part.text.split(" "))
    return Translation(
        " ".join(part.text for part in parts if part.text),
        pieces,
        [log_prob for part in parts for log_prob in part.log_probs],
        sum(part.log_prob for part in parts),
        score,
        links,
        sorted({flag for part in parts for flag in part.flags}),
    )


def write(line: TranslatedLine, format: Format, num_best: int) -> Iterator[str]:
    """Write a line as `format` says.

    text: `num_best` lines, each a translation. tsv: as many, each the line's number, rank, score,
    log-probability, flags and translation. jsonl: one object.
    """
    if format == "jsonl":
        yield json.dumps(_as_tree(line, num_best), ensure_ascii=False)
        return
    for rank in range(num_best):
        found = line.best[rank] if rank < len(line.best) else NOTHING
        if format == "text":
            yield found.text
        else:
            numbers = f"{line.number}\t{rank + 1}\t{found.score:.6f}\t{found.log_prob:.6f}"
            yield f"{numbers}\t{','.join(found.flags)}\t{found.text.replace(chr(9), ' ')}"


def _as_tree(line: TranslatedLine, num_best: int) -> dict[str, Any]:
    trees = [
        {
            "translation": found.text,
            "score": found.score,
            "log_prob": found.log_prob,
            "pieces": found.pieces,
            "piece_log_probs": found.log_probs,
            "alignment": found.alignment,
            "flags": found.flags,
        }
        for found in line.best
    ]
    tree: dict[str, Any] = {"line": line.number, "source": line.src, **trees[0]}
    return tree if num_best == 1 else tree | {"n_best": trees}


def as_pharaoh(links: Sequence[Link] | None) -> str:
    """Write an alignment as `source-target` pairs of words, counted from 0."""
    return " ".join(f"{link.src}-{link.tgt}" for link in links or [])
