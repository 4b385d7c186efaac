"""Encoded pairs on disk: shards, which are Arrow tables, and a manifest of their contents.

Independent of text files and batches. A table is validated and compared with the manifest when it
is opened, so that a damaged file raises an error instead of crashing.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from mtrain.data.batch import Indices, TokenIds
from mtrain.errors import RunError, damaged
from mtrain.tokenizer.sentencepiece import Tokenizer

MANIFEST_FILE = "shards.json"
SHARD_PAIRS = 1 << 17  # pairs of the text, kept or dropped, per table


class EncodedBlock(NamedTuple):
    """A block of encoded pairs."""

    src_ids: TokenIds  # of all pairs, concatenated; sources with eos, targets without
    tgt_ids: TokenIds
    src_lengths: npt.NDArray[np.integer]  # of each pair's side, eos included
    tgt_lengths: npt.NDArray[np.integer]
    src_text: list[str] | None = None  # of each pair, if training samples segmentations
    tgt_text: list[str] | None = None


def write_blocks(path: Path, blocks: Iterable[EncodedBlock], with_text: bool) -> None:
    """Write encoded pairs as an Arrow stream."""
    schema = _schema(with_text)
    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for block in blocks:
            columns = [
                _lists(block.src_ids, block.src_lengths),
                _lists(block.tgt_ids, block.tgt_lengths - 1),
                _numbers(block.src_lengths),
                _numbers(block.tgt_lengths),
            ]
            if with_text:
                columns += [_strings(text or []) for text in (block.src_text, block.tgt_text)]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _schema(with_text: bool) -> Any:
    ids, length = pa.list_(pa.int32()), pa.int32()
    columns = {"src": ids, "tgt": ids, "src_length": length, "tgt_length": length}
    if with_text:
        columns |= {"src_text": pa.string(), "tgt_text": pa.string()}
    return pa.schema(columns)


def _lists(ids: TokenIds, lengths: npt.NDArray[np.integer]) -> Any:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.ListArray.from_arrays(_numbers(offsets), _numbers(ids))


def _numbers(numbers: npt.NDArray[np.integer]) -> Any:
    """Wrap numbers in an Arrow array without a copy.

    `pyarrow.array`, and `to_numpy` on the way back, would import pandas, which takes 0.3 s.
    """
    array = np.ascontiguousarray(numbers, np.int32)
    return pa.Array.from_buffers(pa.int32(), len(array), [None, pa.py_buffer(array)])


def _strings(texts: list[str]) -> Any:
    encoded = [text.encode() for text in texts]
    offsets = _numbers(np.cumsum([0, *map(len, encoded)])).buffers()[1]
    return pa.StringArray.from_buffers(len(encoded), offsets, pa.py_buffer(b"".join(encoded)))


_Chunk = tuple[TokenIds, npt.NDArray[np.int32]]  # ids and offsets of a side in a chunk of a table


class ShardTable:
    """A memory-mapped, validated Arrow table of pairs; the lengths include eos."""

    def __init__(self, path: Path, num_tokens: tuple[int, int], with_text: bool) -> None:
        self._table = _read(path, num_tokens, with_text)
        lengths = (self._table.column(f"{side}_length").chunks for side in ("src", "tgt"))
        self.src_lengths, self.tgt_lengths = (
            np.concatenate(list(map(np.from_dlpack, chunks))) for chunks in lengths
        )
        chunks = [self._table.column(side).chunks for side in ("src", "tgt")]
        self._firsts = np.cumsum([0, *map(len, chunks[0])])
        self._src, self._tgt = (
            [(np.from_dlpack(chunk.values), np.from_dlpack(chunk.offsets)) for chunk in side]
            for side in chunks
        )

    def __len__(self) -> int:
        return len(self.src_lengths)

    def take(self, rows: Indices) -> tuple[list[TokenIds], list[TokenIds]]:
        """Return the ids of the given rows: sources with eos, targets without."""
        chunks = np.searchsorted(self._firsts, rows, side="right") - 1
        slots = list(zip(chunks.tolist(), (rows - self._firsts[chunks]).tolist(), strict=True))
        return [_ids(self._src[number], row) for number, row in slots], [
            _ids(self._tgt[number], row) for number, row in slots
        ]

    def texts(self, rows: Indices) -> tuple[list[str], list[str]]:
        """Return the text of the given rows."""
        numbers = _numbers(rows)
        src, tgt = (self._table.column(name).take(numbers) for name in ("src_text", "tgt_text"))
        return src.to_pylist(), tgt.to_pylist()


def _ids(chunk: _Chunk, row: int) -> TokenIds:
    ids, offsets = chunk
    return ids[offsets[row] : offsets[row + 1]]


def _read(path: Path, num_tokens: tuple[int, int], with_text: bool) -> Any:
    """Memory-map a table of pairs, and check that it is whole and its ids are in the vocabulary."""
    if not path.is_file():
        raise damaged(path, "is missing")
    schema = _schema(with_text)
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all().replace_schema_metadata()
        table = table.select(schema.names)
        if table.schema.types != schema.types:
            raise ValueError
        table.validate(full=True)  # offsets too: no read past the end
        fits = len(table) > 0 and not any(column.null_count for column in table.columns)
        fits = fits and _fits(table, "src", num_tokens[0], 0)
        fits = fits and _fits(table, "tgt", num_tokens[1], 1)
    except (pa.ArrowException, OSError, ValueError, LookupError):
        fits = False
    if not fits:
        raise damaged(path, "must be a whole table of pairs of this run's tokenizer, but is not")
    return table


def _fits(table: Any, side: str, num_tokens: int, num_added: int) -> bool:
    """Return whether ids are in the vocabulary, and lengths are their counts + `num_added`."""
    lists, lengths = table.column(side), table.column(f"{side}_length")
    differences = pc.min_max(pc.subtract(lengths, pc.list_value_length(lists))).as_py()
    has_nulls = any(chunk.values.null_count for chunk in lists.chunks)  # those of no row, too
    if has_nulls or set(differences.values()) != {num_added}:
        return False
    bounds = pc.min_max(pc.list_flatten(lists)).as_py()
    return (bounds["min"] or 0) >= 0 and (bounds["max"] or 0) < num_tokens


class Shard(NamedTuple):
    """The corpus number and the counts of a table; tokens include eos."""

    corpus: NonNegativeInt
    num_pairs: PositiveInt
    num_src_tokens: int
    num_tgt_tokens: int


@dataclass(frozen=True)
class CorpusEntry:
    """A corpus of the training text; `weight`, `tag` and `until` are as in its section."""

    name: str  # its key in the config
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    lengths: list[NonNegativeInt]  # histogram over pairs of the longer side's length, from 0
    tag: str | None = None
    until: Annotated[float, Field(gt=0, lt=1)] | None = None


@dataclass(frozen=True)
class Manifest:
    """The corpora of the training text, and the contents of its shards in order."""

    corpora: list[CorpusEntry]
    shards: list[Shard]

    def of_corpus(self, corpus: int) -> list[int]:
        """Return the numbers of the shards of a corpus."""
        return [number for number, shard in enumerate(self.shards) if shard.corpus == corpus]


_MANIFEST = TypeAdapter(Manifest)


def shard_path(directory: Path, number: int) -> Path:
    """Return the path of a shard."""
    return directory / f"train-{number:05d}.arrow"


def link(table: Path, directory: Path, number: int) -> None:
    """Make a table the shard `number` of a folder, without a copy if the file systems allow it."""
    path = shard_path(directory, number)
    try:
        os.link(table, path)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(table, path)


def are_in(directory: Path) -> bool:
    """Return whether a folder has a manifest; its shards are not checked."""
    return (directory / MANIFEST_FILE).is_file()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of the shards in a folder."""
    (directory / MANIFEST_FILE).write_bytes(_MANIFEST.dump_json(manifest, exclude_none=True))


class ShardSet:
    """The shards of the training text, opened on demand.

    Raises:
        RunError: if the manifest or a shard is missing, or the manifest is damaged.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, with_text: bool = False) -> None:
        self._directory, self._with_text = directory, with_text
        self._num_tokens = len(tokenizer.src), len(tokenizer.tgt)
        path = directory / MANIFEST_FILE
        if not path.is_file():
            raise damaged(path, "is missing")
        try:
            self.manifest = _MANIFEST.validate_json(path.read_bytes(), strict=True)
            num_pairs = Counter[int]()
            for shard in self.manifest.shards:
                num_pairs[shard.corpus] += shard.num_pairs
            totals = {
                number: sum(entry.lengths) for number, entry in enumerate(self.manifest.corpora)
            }
            is_consistent = totals == dict(num_pairs) != {}
        except (OSError, ValidationError):
            is_consistent = False
        if not is_consistent:
            raise damaged(path, "must say what each table of pairs holds, but does not")
        for number in range(len(self.manifest.shards)):
            if not (path := shard_path(directory, number)).is_file():
                raise damaged(path, "is missing")

    def open(self, number: int) -> ShardTable:
        """Open a shard.

        Raises:
            RunError: if it is damaged, from another tokenizer, or differs from the manifest.
        """
        path, shard = shard_path(self._directory, number), self.manifest.shards[number]
        table = ShardTable(path, self._num_tokens, self._with_text)
        num_src, num_tgt = (
            int(lengths.sum(dtype=np.int64)) for lengths in (table.src_lengths, table.tgt_lengths)
        )
        if shard[1:] != (len(table), num_src, num_tgt):
            raise RunError(
                f"{path}: must hold what {MANIFEST_FILE} says, but does not; restore both from a "
                "copy of the run."
            )
        return table

    def all(self) -> Iterator[ShardTable]:
        """Open the shards one after the other."""
        for number in range(len(self.manifest.shards)):
            yield self.open(number)
