"""Encoded pairs on disk: Arrow tables, and for several of them a page that says what they hold.

Knows neither text files nor batches. A table is checked when it is opened, so that one that lies is
an error and never a crash; the page is believed only as far as the tables say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from mtrain.errors import RunError

TRAIN_FILE = "train.arrow"  # of a corpus that fits in one table
SHARDS_FILE = "shards.json"
SHARD_PAIRS = 1 << 17  # of text, that go into one table
Indices = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]


class EncodedPair(NamedTuple):
    """Source ids with eos, target ids without, and the text if training samples from it."""

    src: list[int]
    tgt: list[int]
    src_text: str | None
    tgt_text: str | None


class EncodedBlock(NamedTuple):
    """Encoded pairs, many at a time.

    Attributes:
        src_ids, tgt_ids: of all pairs, one after the other; sources with eos, targets without.
        src_lengths, tgt_lengths: with eos, of each pair.
        src_text, tgt_text: of each pair, if training samples from it.
    """

    src_ids: Lengths
    tgt_ids: Lengths
    src_lengths: Lengths
    tgt_lengths: Lengths
    src_text: list[str] | None = None
    tgt_text: list[str] | None = None

    @classmethod
    def of(cls, pairs: Iterable[EncodedPair], with_text: bool) -> EncodedBlock:
        """Put pairs together."""
        rows = list(pairs)
        return cls(
            np.array([piece for row in rows for piece in row.src], np.int32),
            np.array([piece for row in rows for piece in row.tgt], np.int32),
            np.array([len(row.src) for row in rows], np.int32),
            np.array([len(row.tgt) + 1 for row in rows], np.int32),
            [row.src_text or "" for row in rows] if with_text else None,
            [row.tgt_text or "" for row in rows] if with_text else None,
        )


def write_blocks(path: Path, blocks: Iterable[EncodedBlock], with_text: bool) -> int:
    """Write an Arrow table of encoded pairs, in a stream; return their number."""
    import pyarrow as pa

    num_pairs = 0
    with path.open("wb") as file, pa.ipc.new_stream(file, _schema(with_text)) as writer:
        for block in blocks:
            writer.write_batch(_as_batch(block, with_text))
            num_pairs += len(block.src_lengths)
    return num_pairs


def write_pairs(path: Path, pairs: Iterable[EncodedPair], with_text: bool) -> int:
    """Write a few encoded pairs as an Arrow table; return their number."""
    return write_blocks(path, [EncodedBlock.of(pairs, with_text)], with_text)


def _schema(with_text: bool) -> Any:
    import pyarrow as pa

    ids, length = pa.list_(pa.int32()), pa.int32()
    columns = {"src": ids, "tgt": ids, "src_length": length, "tgt_length": length}
    if with_text:
        columns |= {"src_text": pa.string(), "tgt_text": pa.string()}
    return pa.schema(columns)


def _as_batch(block: EncodedBlock, with_text: bool) -> Any:
    import pyarrow as pa

    columns = [
        _lists(block.src_ids, block.src_lengths),
        _lists(block.tgt_ids, block.tgt_lengths - 1),
        _plain(block.src_lengths),
        _plain(block.tgt_lengths),
    ]
    if with_text:
        columns += [pa.array(text, pa.string()) for text in (block.src_text, block.tgt_text)]
    return pa.RecordBatch.from_arrays(columns, schema=_schema(with_text))


def _lists(ids: Lengths, lengths: Lengths) -> Any:
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(_plain(offsets), _plain(ids))


def _plain(numbers: Lengths) -> Any:
    """Give numbers to Arrow as they lie in memory; `pyarrow.array` would import pandas first."""
    import pyarrow as pa

    own = np.ascontiguousarray(numbers, np.int32)
    return pa.Array.from_buffers(pa.int32(), len(own), [None, pa.py_buffer(own)])


class _IdStretch(NamedTuple):
    """The ids of one side in one stretch of a table, where they lie on disk."""

    ids: Lengths
    offsets: Lengths


class ShardTable:
    """An Arrow table of pairs, mapped into memory and checked.

    Attributes:
        src_lengths, tgt_lengths: with eos, of each pair.
    """

    def __init__(self, path: Path, num_pieces: tuple[int, int], with_text: bool) -> None:
        self._table = _read(path, num_pieces, with_text)
        self.src_lengths: Lengths = _numbers(self._table, "src_length")
        self.tgt_lengths: Lengths = _numbers(self._table, "tgt_length")
        self._src, self._tgt = _parts(self._table, "src"), _parts(self._table, "tgt")
        chunks = self._table.column("src").chunks
        self._firsts = np.cumsum([0, *(len(chunk) for chunk in chunks)])

    def __len__(self) -> int:
        return len(self.src_lengths)

    def take(self, rows: Indices) -> tuple[list[Lengths], list[Lengths]]:
        """Return the ids of some pairs: sources with eos, targets without."""
        numbers = np.searchsorted(self._firsts, rows, side="right") - 1
        places = list(zip(numbers.tolist(), (rows - self._firsts[numbers]).tolist(), strict=True))
        return [_cut(self._src, *own) for own in places], [_cut(self._tgt, *own) for own in places]

    def texts(self, rows: Indices) -> tuple[list[str], list[str]]:
        """Return the text of some pairs."""
        src, tgt = (self._table.column(name).take(rows) for name in ("src_text", "tgt_text"))
        return src.to_pylist(), tgt.to_pylist()


def _cut(parts: list[_IdStretch], number: int, row: int) -> Lengths:
    part = parts[number]
    return part.ids[part.offsets[row] : part.offsets[row + 1]]


def _parts(table: Any, side: str) -> list[_IdStretch]:
    chunks = table.column(side).chunks
    return [_IdStretch(chunk.values.to_numpy(), chunk.offsets.to_numpy()) for chunk in chunks]


def _numbers(table: Any, name: str) -> Lengths:
    return np.asarray(table.column(name), dtype=np.int32)


def _read(path: Path, num_pieces: tuple[int, int], with_text: bool) -> Any:
    """Map a table of pairs into memory, and check that it is whole and fits the tokenizer.

    Raises:
        RunError: if it does not.
    """
    import pyarrow as pa

    if not path.is_file():
        raise RunError(f"{path}: is missing; restore it from a copy of the run.")
    wanted = _schema(with_text)
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all().replace_schema_metadata()
        table = table.select(wanted.names)
        if table.schema.types != wanted.types:
            raise ValueError
        table.validate(full=True)  # its offsets too, so that nothing is read beyond its end
        fits = len(table) > 0 and not any(column.null_count for column in table.columns)
        fits = fits and _fits(table, "src", num_pieces[0], 0)
        fits = fits and _fits(table, "tgt", num_pieces[1], 1)
    except (pa.ArrowException, OSError, ValueError, LookupError):
        fits = False
    if not fits:
        raise RunError(
            f"{path}: must be a whole table of pairs of this run's tokenizer, but is not; restore "
            "it from a copy of the run."
        )
    return table


def _fits(table: Any, side: str, num_pieces: int, num_added: int) -> bool:
    """Tell whether all ids are pieces, and the lengths those of the ids and of what is added."""
    import pyarrow.compute as pc

    lists, lengths = table.column(side), table.column(f"{side}_length")
    ids, counts = pc.list_flatten(lists), pc.list_value_length(lists)
    if ids.null_count or not pc.all(pc.equal(pc.add(counts, num_added), lengths)).as_py():
        return False
    ends = pc.min_max(ids).as_py()
    return (ends["min"] or 0) >= 0 and (ends["max"] or 0) < num_pieces


class Shard(NamedTuple):
    """What one of several tables holds: pairs of a corpus, by its number; tokens with eos."""

    corpus: int
    num_pairs: int
    num_src_tokens: int
    num_tgt_tokens: int

    @classmethod
    def of(cls, corpus: int, table: ShardTable) -> Shard:
        """Count what a table holds."""
        sums = (int(own.sum(dtype=np.int64)) for own in (table.src_lengths, table.tgt_lengths))
        return cls(corpus, len(table), *sums)


@dataclass(frozen=True)
class CorpusEntry:
    """A corpus of a mixture.

    Attributes:
        name: what the config calls it.
        weight: its part of the mixture, as large as those of the others make it.
        lengths: for each length from 0 on, how many pairs have it as that of their longer side.
    """

    name: str
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    lengths: list[int]


@dataclass(frozen=True)
class Manifest:
    """What all tables of a training corpus hold, in their order."""

    corpora: list[CorpusEntry]
    shards: list[Shard]

    def of_corpus(self, corpus: int) -> list[int]:
        """Return the numbers of the tables of a corpus."""
        return [number for number, own in enumerate(self.shards) if own.corpus == corpus]

    def num_pairs(self, corpus: int) -> int:
        """Return how many pairs a corpus has."""
        return sum(own.num_pairs for own in self.shards if own.corpus == corpus)


_CONTENTS = TypeAdapter(Manifest)


def shard_path(directory: Path, number: int) -> Path:
    """Return where a table is, of several."""
    return directory / f"train-{number:05d}.arrow"


def are_in(directory: Path) -> bool:
    """Tell whether a folder holds encoded pairs, whole or not."""
    return any((directory / name).is_file() for name in (TRAIN_FILE, SHARDS_FILE))


def write_contents(directory: Path, contents: Manifest) -> None:
    """Write the page of several tables."""
    (directory / SHARDS_FILE).write_bytes(_CONTENTS.dump_json(contents))


class ShardSet:
    """The tables of a training corpus, opened when they are asked for."""

    def __init__(
        self, directory: Path, num_src_pieces: int, num_tgt_pieces: int, with_text: bool
    ) -> None:
        self._directory, self._num_pieces = directory, (num_src_pieces, num_tgt_pieces)
        self._with_text = with_text
        self.is_one = not (directory / SHARDS_FILE).exists()
        if self.is_one:
            self._only = self._open(directory / TRAIN_FILE)
        for number in range(len(self.contents.shards)) if not self.is_one else ():
            if not (path := shard_path(directory, number)).is_file():
                raise RunError(f"{path}: is missing; restore it from a copy of the run.")

    @cached_property
    def contents(self) -> Manifest:
        """What the tables hold.

        Raises:
            RunError: if the page does not say so.
        """
        if self.is_one:
            longer = np.maximum(self._only.src_lengths, self._only.tgt_lengths)
            corpus = CorpusEntry("data.train", 1.0, np.bincount(longer).tolist())
            return Manifest([corpus], [Shard.of(0, self._only)])
        path = self._directory / SHARDS_FILE
        try:
            contents = _CONTENTS.validate_json(path.read_bytes(), strict=True)
        except (OSError, ValidationError):
            raise _lying(path) from None
        if not _agrees(contents):
            raise _lying(path)
        return contents

    def open(self, number: int) -> ShardTable:
        """Open a table.

        Raises:
            RunError: if it is damaged, does not fit, or holds something else than is said of it.
        """
        if self.is_one:
            return self._only
        path, said = shard_path(self._directory, number), self.contents.shards[number]
        table = self._open(path)
        if Shard.of(said.corpus, table) != said:
            raise RunError(
                f"{path}: must hold what {SHARDS_FILE} says, but does not; restore both from a "
                "copy of the run."
            )
        return table

    def all(self) -> Iterator[ShardTable]:
        """Open one table after the other."""
        for number in range(len(self.contents.shards)):
            yield self.open(number)

    def _open(self, path: Path) -> ShardTable:
        return ShardTable(path, self._num_pieces, self._with_text)


def _agrees(contents: Manifest) -> bool:
    """Tell whether a page says one thing: every corpus has pairs, and lengths for all of them."""
    if not contents.corpora or any(own.num_pairs < 1 for own in contents.shards):
        return False
    if not all(0 <= own.corpus < len(contents.corpora) for own in contents.shards):
        return False
    return all(
        min(own.lengths, default=-1) >= 0 and sum(own.lengths) == contents.num_pairs(number) > 0
        for number, own in enumerate(contents.corpora)
    )


def _lying(path: Path) -> RunError:
    return RunError(
        f"{path}: must say what each table of pairs holds, but does not; restore it from a copy "
        "of the run."
    )
