"""SentencePiece: train, load, encode, decode. The only module that defines the special ids."""

from __future__ import annotations

import hashlib
import io
import math
import os
import random
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import sentencepiece

from mtrain.config.sections import DEFAULT_VOCAB_SIZE, TokenizerConfig
from mtrain.errors import ConfigError, DataError, RunError, UserError, damaged
from mtrain.tokenizer.bpe_dropout import Merges

_TOO_LARGE = re.compile(r"Vocabulary size too high.*?<= (\d+)")
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
_TAG = re.compile("<tag:(.+)>")  # a control piece, which encoding text never yields
DECODED_UNKNOWN = " \u2047 "  # as SentencePiece decodes the unknown piece
_NUM_BATCHED = 16  # lines; with fewer, starting threads costs more than a call per line
_NUM_BEST = 64  # segmentations to sample from; sampling from the full lattice breaks training


class VocabularySizeError(ConfigError):
    """A vocabulary size too large for the corpus, or too small for its characters."""

    def __init__(self, message: str, fitting: int) -> None:
        super().__init__(message)
        self.fitting = fitting  # the nearest valid size


class Vocabulary:
    """The SentencePiece model of one side: text to token ids and back."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.load_from_serialized_proto(model)
        self.pad: int = self._processor.pad_id()
        self.unk: int = self._processor.unk_id()
        self.bos: int = self._processor.bos_id()
        self.eos: int = self._processor.eos_id()

    @cached_property
    def tags(self) -> dict[str, int]:
        """The ids of the reserved tokens that tell corpora apart, by name."""
        control = [piece for piece in range(len(self)) if self._processor.is_control(piece)]
        matches = zip(control, map(_TAG.fullmatch, self.pieces_of(control)), strict=True)
        return {match[1]: piece for piece, match in matches if match}

    @property
    def never_generated(self) -> list[int]:
        """The ids that no translation contains: pad, bos and the tags."""
        return [self.pad, self.bos, *self.tags.values()]

    @property
    def byte_pieces(self) -> list[int]:
        """The ids of the byte-fallback pieces."""
        return [piece for piece in range(len(self)) if self._processor.is_byte(piece)]

    def __len__(self) -> int:
        return int(self._processor.get_piece_size())

    def unknown(self, line: str) -> list[str]:
        """Return the distinct characters of the normalised line that no piece contains."""
        return sorted(set(self._processor.normalize(line)) - self._characters)

    @cached_property
    def _characters(self) -> frozenset[str]:
        """The characters of all pieces, and those that represent a space."""
        processor = self._processor
        special = (processor.is_byte, processor.is_control, processor.is_unknown)
        ids = [piece for piece in range(len(self)) if not any(test(piece) for test in special)]
        return frozenset("".join(self.pieces_of(ids))) | {" ", "\u2581"}

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line, without bos and eos."""
        if len(lines) < _NUM_BATCHED:
            return [self._processor.encode(line) for line in lines]
        ids: list[list[int]] = self._processor.encode(list(lines), num_threads=_num_threads(lines))
        return ids

    def sample(self, lines: Sequence[str], alpha: float, seed: int) -> list[list[int]]:
        """Return the ids of one sampled segmentation of each line, without bos and eos.

        Unigram samples among the n best segmentations with probabilities to the power of alpha
        (Kudo 2018, arXiv 1804.10959); BPE drops merges with probability alpha (1910.13267).
        """
        rng = random.Random(seed)  # SentencePiece's own generator differs in each process
        sample = self._sample_best if self.is_unigram else self._sample_merges
        try:
            return sample(lines, alpha, rng)
        except (RuntimeError, ValueError) as error:
            raise RunError(f"the tokenizer cannot sample segmentations: {error}.") from None

    @property
    def is_unigram(self) -> bool:
        """Whether the model is unigram: only unigram supports n-best segmentation."""
        try:
            return bool(self._processor.nbest_encode_as_ids("a", nbest_size=1))
        except RuntimeError:
            return False

    def _sample_best(
        self, lines: Sequence[str], alpha: float, rng: random.Random
    ) -> list[list[int]]:
        log_probs = self.scores_of(range(len(self)))
        sampled: list[list[int]] = []
        for line in lines:
            best = self._processor.nbest_encode_as_ids(line, nbest_size=_NUM_BEST)
            scores = [sum(map(log_probs.__getitem__, ids)) for ids in best]
            highest = max(scores)
            weights = [math.exp(alpha * (score - highest)) for score in scores]
            sampled += rng.choices(best, weights)
        return sampled

    def _sample_merges(
        self, lines: Sequence[str], alpha: float, rng: random.Random
    ) -> list[list[int]]:
        merges, known, byte_of = self._merges

        def ids_of(pieces: list[str]) -> list[int]:
            try:
                return [known[piece] for piece in pieces]
            except KeyError:
                return self._as_one(chain.from_iterable(map(known_or_bytes, pieces)))

        def known_or_bytes(piece: str) -> list[int]:
            if piece in known:
                return [known[piece]]
            return [byte_of.get(f"<0x{byte:02X}>", self.unk) for byte in piece.encode()]

        normalised = map(self._processor.normalize, lines)
        return [ids_of(merges.sample(text, alpha, rng)) for text in normalised]

    @cached_property
    def _merges(self) -> tuple[Merges, dict[str, int], dict[str, int]]:
        """The merges of a BPE model, the ids of its pieces, and those of its bytes."""
        processor, known, byte_of = self._processor, dict[str, int](), dict[str, int]()
        for number, piece in enumerate(self.pieces_of(range(len(self)))):
            if processor.is_byte(number):
                byte_of[piece] = number
            elif not processor.is_control(number) and not processor.is_unknown(number):
                known[piece] = number
        scores = {piece: processor.get_score(number) for piece, number in known.items()}
        return Merges(scores, self._symbols(known)), known, byte_of

    def _symbols(self, pieces: Collection[str]) -> list[str]:
        """Return the user-defined pieces: they stay whole even when all merges are dropped."""
        long = [piece for piece in pieces if len(piece) > 1]
        apart = self._processor.encode(long, out_type=str, enable_sampling=True, alpha=1.0)
        return [piece for piece, parts in zip(long, apart, strict=True) if piece in parts]

    def _as_one(self, ids: Iterable[int]) -> list[int]:
        """Collapse consecutive unk ids into one, as SentencePiece does."""
        collapsed: list[int] = []
        for piece in ids:
            if piece != self.unk or collapsed[-1:] != [self.unk]:
                collapsed.append(piece)
        return collapsed

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return one line of text for each list of ids; line breaks become spaces."""
        if len(ids) < _NUM_BATCHED:
            lines = [self._processor.decode(list(row)) if row else "" for row in ids]
        else:
            lines = self._processor.decode([list(row) for row in ids])
        return [re.sub(r"[\r\n]+", " ", line) for line in lines]

    def pieces(self, line: str) -> list[str]:
        """Return the pieces of a line as text; unknown characters unchanged."""
        pieces: list[str] = self._processor.encode(line, out_type=str)
        return pieces

    def text_of(self, pieces: Sequence[str]) -> str:
        """Return the text of pieces as returned by `pieces`, unknown characters included."""
        text: str = self._processor.decode(list(pieces))
        return text

    def pieces_of(self, ids: Sequence[int]) -> list[str]:
        """Return the SentencePiece pieces of ids, special ids included."""
        pieces: list[str] = self._processor.id_to_piece(list(ids))
        return pieces

    def ids_of(self, pieces: Sequence[str]) -> list[int]:
        """Return the ids of pieces as returned by `pieces_of`."""
        ids: list[int] = self._processor.piece_to_id(list(pieces))
        return ids

    def decoded_pieces_of(self, ids: Sequence[int]) -> list[str]:
        """Return the pieces of ids, the unknown one as the text that `decode` writes for it."""
        pieces = zip(ids, self.pieces_of(ids), strict=True)
        return [DECODED_UNKNOWN if index == self.unk else piece for index, piece in pieces]

    def scores_of(self, ids: Sequence[int]) -> list[float]:
        """Return the scores of pieces: log-probabilities of unigram, the order of merges of BPE."""
        return [float(self._processor.get_score(piece)) for piece in ids]


def _num_threads(lines: Sequence[str]) -> int:
    """Return one thread per 1000 lines: starting more costs more than they save."""
    return min(os.cpu_count() or 1, 1 + len(lines) // 1000)


@dataclass(frozen=True)
class Tokenizer:
    """The vocabularies of both sides; the same object if shared."""

    src: Vocabulary
    tgt: Vocabulary

    def encode_src(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line with eos, as input of the encoder."""
        return [[*ids, self.src.eos] for ids in self.src.encode(lines)]

    def fingerprint(self) -> str:
        """Return a hash of both models, which is saved with weights to identify their tokenizer."""
        return hashlib.sha256(self.src.model + b"\0" + self.tgt.model).hexdigest()

    def save(self, directory: Path) -> None:
        """Write `shared.model`, or `src.model` and `tgt.model`, into an existing folder."""
        shared, apart = {"shared": self.src}, {"src": self.src, "tgt": self.tgt}
        for name, vocabulary in (shared if self.src is self.tgt else apart).items():
            (directory / f"{name}.model").write_bytes(vocabulary.model)


def load(directory: Path) -> Tokenizer:
    """Read a tokenizer written by `Tokenizer.save`.

    Raises:
        RunError: if a file is missing or is not a SentencePiece model.
    """
    src, tgt = directory / "src.model", directory / "tgt.model"
    if src.exists() or tgt.exists():
        return Tokenizer(_load_vocabulary(src), _load_vocabulary(tgt))
    shared = _load_vocabulary(directory / "shared.model")
    return Tokenizer(shared, shared)


def _load_vocabulary(path: Path) -> Vocabulary:
    try:
        vocabulary = Vocabulary(path.read_bytes())
        vocabulary.pieces_of(range(len(vocabulary)))  # each must be UTF-8
    except OSError:
        raise damaged(path, "is missing") from None
    except (RuntimeError, UnicodeDecodeError):
        raise damaged(path, "must be a SentencePiece model, but is not") from None
    special = [vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos]
    if special != list(range(len(special))):
        reason = "must have the special pieces of mtrain, but has another model's"
        raise damaged(path, reason)
    return vocabulary


def train(
    config: TokenizerConfig,
    pairs: Iterable[tuple[str, str]],
    num_pairs: int,
    seed: int,
    tags: Sequence[str] = (),
) -> Tokenizer:
    """Train one shared or two vocabularies on at most `max_training_lines` of the lines.

    Only the sample is kept in memory. `tags` name reserved tokens of the source vocabulary.

    Raises:
        VocabularySizeError: if `vocab_size` is set, and too large or too small for the text.
        DataError: if there is no text, or none that SentencePiece can train on.
    """
    num_lines, first_tgt = (2 * num_pairs, num_pairs) if config.shared else (num_pairs, 0)
    chosen = _sample(num_lines, config.max_training_lines, seed)
    slots = {number: slot for slot, number in enumerate(chosen)}
    src_lines = [""] * len(chosen)
    tgt_lines = src_lines if config.shared else src_lines.copy()
    for number, (src, tgt) in enumerate(pairs):
        if (slot := slots.get(number)) is not None:
            src_lines[slot] = src
        if (slot := slots.get(first_tgt + number)) is not None:
            tgt_lines[slot] = tgt
    vocabulary = _train_vocabulary(config, src_lines, tags)
    if config.shared:
        return Tokenizer(vocabulary, vocabulary)
    return Tokenizer(vocabulary, _train_vocabulary(config, tgt_lines))


def _sample(num_lines: int, max_lines: int, seed: int) -> list[int]:
    """Return the numbers of at most `max_lines` uniformly sampled lines (reservoir sampling)."""
    rng = random.Random(seed)
    chosen = list(range(min(num_lines, max_lines)))
    for number in range(max_lines, num_lines):
        if (slot := rng.randrange(number + 1)) < max_lines:
            chosen[slot] = number
    return chosen


def _train_vocabulary(
    config: TokenizerConfig, lines: list[str], tags: Sequence[str] = ()
) -> Vocabulary:
    if not any(line.strip() for line in lines):
        raise DataError("`data.train` must have lines with text, but all that are kept are blank.")
    size = config.vocab_size or DEFAULT_VOCAB_SIZE
    while True:
        try:
            return _train_with_size(size, config, lines, tags)
        except VocabularySizeError as error:
            if config.vocab_size is not None:
                raise
            # the least size that fits has a piece for each character, and no longer ones
            size = error.fitting if error.fitting < size else error.fitting + size


def _train_with_size(
    size: int, config: TokenizerConfig, lines: list[str], tags: Sequence[str]
) -> Vocabulary:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=config.kind,
            vocab_size=size,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name="identity",  # keep every character of the text
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            control_symbols=[f"<tag:{tag}>" for tag in tags],
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(size, str(error)) from None
    return Vocabulary(model.getvalue())


def _explain(size: int, message: str) -> UserError:
    if bounds := _TOO_LARGE.search(message):
        bound = f"at most {bounds[1]} for this corpus"
    elif bounds := _TOO_SMALL.search(message):
        bound = f"at least {bounds[1]} for this corpus (every character and byte has a piece)"
    else:
        return DataError(
            "`data.train` must have lines that SentencePiece can learn from (of at most 4,192 "
            f"bytes, and not of U+2581 alone), but has none for these settings: {message}."
        )
    return VocabularySizeError(
        f"`tokenizer.vocab_size` must be {bound}, but is {size} instead.",
        int(bounds[1]),
    )
