"""The `Exporter` protocol, and what several exporters share.

An exporter is a module that states what its library supports, writes a model in the library's
format, and runs it with the library. This module imports no such library.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from mtrain.config.sections import Config
from mtrain.data.batch import Batch, collate
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.sentencepiece import Tokenizer, Vocabulary

Ids = list[list[int]]
T = TypeVar("T")
BATCH_SIZE = 32  # lines that a library translates in one batch
MASKED_BIAS = -1e4  # of a token that must not be generated: below any logit, within float16
LAYER_WEIGHT = re.compile(r"(encoder|decoder)\.(\d+)\.(.+)\.(weight|bias)")
SOURCE_FILE, TARGET_FILE = "source.spm", "target.spm"


class ExportedHypothesis(NamedTuple):
    """A target that an exported model has found for a source."""

    ids: list[int]  # tokens without eos
    log_prob: float  # the sum over the tokens, and eos if it has ended
    has_ended: bool  # whether eos was chosen; otherwise the length limit was reached


class Agreement(NamedTuple):
    """The number of lines on which two programs agree."""

    num_same: int
    num_lines: int

    def __str__(self) -> str:
        return f"{self.num_same:,} of {self.num_lines:,}"


def agreement(same: Iterable[bool]) -> Agreement:
    """Count the lines on which two programs agree; `same` has one flag for each line."""
    flags = list(same)
    return Agreement(sum(flags), len(flags))


@dataclass(frozen=True)
class OwnCall:
    """The library's own text-to-text call, compared with its search over tokens.

    Both search with the settings of that call.
    """

    program: str  # its name and version
    same: Agreement | None  # of the texts; None if they were not compared
    notes: tuple[str, ...] = ()  # why they were not compared, or how the program changes text


def version_of(package: str) -> str:
    """Return the version of the wheel that has a package, which may have another name."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # search the file lists of all wheels
        wheel, *_ = importlib.metadata.packages_distributions().get(package, [package])
        return importlib.metadata.version(wheel)


class ExportedModel(Protocol):
    """A model and its tokenizer as another library runs them."""

    masks_special: bool  # whether <pad>, <s> and tags have zero probability, in scores too
    quantised: ExportedModel | None = None  # the variant of fewer bits, if the export has one too

    def encode(self, lines: Sequence[str]) -> Ids:
        """Return tokens + eos for each line."""

    def decode(self, ids: Ids) -> list[str]:
        """Return the text of each list of tokens."""

    def search(self, sources: Ids, beam: int, max_lengths: list[int]) -> list[ExportedHypothesis]:
        """Return the target of the highest log-probability of each source.

        `max_lengths` are tokens without eos, one limit for each source. A target may be longer
        than its limit, but is not cut off below it.
        """

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each token of a given target, and of its eos."""

    def own_call(self, lines: Sequence[str]) -> OwnCall | None:
        """Compare the library's text-to-text call with `search`; None if it has none."""
        return None


def in_batches(lengths: list[int], compute: Callable[[list[int]], list[T]]) -> list[T]:
    """Return a result for each row; `compute` is called with batches of rows of similar length."""
    rows = sorted(range(len(lengths)), key=lambda row: lengths[row])
    results: dict[int, T] = {}
    for first in range(0, len(rows), BATCH_SIZE):
        batch = rows[first : first + BATCH_SIZE]
        results.update(zip(batch, compute(batch), strict=True))
    return [results[row] for row in range(len(rows))]


def score_by_logits(
    sources: Ids,
    targets: Ids,
    special: SpecialIds,
    logits_of: Callable[[Batch], Tensor],
) -> list[list[float]]:
    """Return the log-probability of each token of a given target, and of its eos.

    Args:
        sources: tokens + eos of each line.
        targets: tokens without eos.
        special: special token ids of the target vocabulary.
        logits_of: returns the logits [B, T, V] of a batch.
    """

    def score_rows(rows: list[int]) -> list[list[float]]:
        tgt = [targets[row] for row in rows]
        batch = collate([sources[row] for row in rows], tgt, *special)
        log_probs_BTV = logits_of(batch).double().log_softmax(-1)
        log_probs_BT = log_probs_BTV.gather(2, batch.tgt_out_BT[:, :, None])[:, :, 0]
        rows_T = zip(log_probs_BT.tolist(), tgt, strict=True)
        return [log_probs_T[: len(ids) + 1] for log_probs_T, ids in rows_T]

    lengths = [max(len(src), len(tgt)) for src, tgt in zip(sources, targets, strict=True)]
    return in_batches(lengths, score_rows)


class SpecialIds(NamedTuple):
    """Special token ids of a target vocabulary."""

    pad: int
    bos: int
    eos: int


class SentencePieceSides(ExportedModel):
    """The SentencePiece models of an exported folder, for a library that takes pieces."""

    def __init__(self, src_path: Path, tgt_path: Path) -> None:
        self.src, self.tgt = Vocabulary(src_path.read_bytes()), Vocabulary(tgt_path.read_bytes())
        self.id_of = ids_of_pieces(self.tgt)

    def encode(self, lines: Sequence[str]) -> Ids:
        """Return tokens + eos for each line."""
        return [[*ids, self.src.eos] for ids in self.src.encode(lines)]

    def decode(self, ids: Ids) -> list[str]:
        """Return the text of each list of tokens."""
        return self.tgt.decode(ids)


def ids_of_pieces(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the id of each piece of a SentencePiece model."""
    pieces = vocabulary.pieces_of(range(len(vocabulary)))
    return {piece: number for number, piece in enumerate(pieces)}


def write_sentencepiece(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the SentencePiece models of both sides into `directory`."""
    (directory / SOURCE_FILE).write_bytes(tokenizer.src.model)
    (directory / TARGET_FILE).write_bytes(tokenizer.tgt.model)


def longest(config: Config, least: int) -> int:
    """Return the most tokens of a source or target that a config allows, but at least `least`."""
    return max(least, config.data.max_tokens + config.decoding.max_extra_tokens + 1)


def sines_first(model: Transformer) -> dict[str, Tensor]:
    """Return a model's weights for sinusoids that have all sines before all cosines, as in Marian.

    In mtrain they alternate. The permutation of the model dimension changes no output.
    """
    d_model = model.config.d_model
    order = [*range(0, d_model, 2), *range(1, d_model, 2)]
    weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if name.rpartition(".")[0].endswith((".norm", ".output", ".outer")):
            weights[name] = weight[order]
        elif weight.dim() == 2:
            weights[name] = weight[:, order]
    return weights


class Requirement(NamedTuple):
    """A key of the config, and its only value that a library supports."""

    key: str  # such as model.norm
    value: str | bool | None
    why: str  # the library, and what it does: "CTranslate2, whose encoder ..."

    def value_in(self, config: Config) -> object:
        """Return the value of the key in `config`."""
        return attrgetter(self.key)(config)


class Archive(NamedTuple):
    """The file format that an exported folder is packed into, if the library reads one file."""

    suffix: str  # of the file name
    pack: Callable[[Path, Path], None]  # takes the folder and the path of the file


class Exporter(Protocol):
    """A module that writes models for a library, and loads what it has written.

    `write` is called only with configs that meet REQUIREMENTS; its `quantization` is None (float32)
    or one of QUANTIZATIONS.
    """

    PACKAGE: str  # the library as pip names it
    OTHER_PACKAGES: tuple[str, ...]  # others that must be installed
    REQUIREMENTS: tuple[Requirement, ...]  # what a config must have
    QUANTIZATIONS: tuple[str, ...]  # types of the stored weights besides float32
    ARCHIVE: Archive | None  # if the library reads one file, not a folder
    TITLE: str  # in the model card: the library
    TAG: str  # in the model card: a tag of the Hugging Face Hub
    USE: str  # in the model card: how to translate, with `{line}` and other fields of it
    NOTES: str  # in the model card: a list of limits and differences
    MIN_POSITIONS: int  # tokens of a source that it takes at least, and of a target

    def write(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: Config,
        directory: Path,
        quantization: str | None,
    ) -> Transformer | None:
        """Write a model and its tokenizer into `directory`.

        Returns:
            the model that the library computes, if it can only approximate `model`; else None.
        """

    def load(self, directory: Path) -> ExportedModel:
        """Load an exported folder with the library, on the CPU."""
