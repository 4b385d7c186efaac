"""Encoded pairs on disk, and the batches that training reads from them.

The pairs are one Arrow table, memory-mapped by `datasets`. Batches hold pairs of like length
under a budget that counts padding; their order follows from (seed, epoch) alone, so that a
position is two numbers and seeking to it reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.batch import Batch, collate
from mtrain.errors import RunError
from mtrain.tokenizer import Tokenizer

TRAIN_FILE = "train.arrow"
Indices = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]


class EncodedPair(NamedTuple):
    """Source ids with eos, target ids without, and the text if training samples from it."""

    src: list[int]
    tgt: list[int]
    src_text: str | None
    tgt_text: str | None


def write_pairs(path: Path, pairs: Iterable[EncodedPair], with_text: bool) -> int:
    """Write an Arrow table of encoded pairs, in a stream; return their number."""
    from datasets import Features, Value
    from datasets import Sequence as ListOf
    from datasets.arrow_writer import ArrowWriter

    columns: dict[str, Any] = {"src": ListOf(Value("int32")), "tgt": ListOf(Value("int32"))}
    columns |= {"src_length": Value("int32"), "tgt_length": Value("int32")}
    if with_text:
        columns |= {"src_text": Value("string"), "tgt_text": Value("string")}
    with ArrowWriter(features=Features(columns), path=str(path)) as writer:
        for pair in pairs:
            row: dict[str, Any] = {"src": pair.src, "tgt": pair.tgt}
            row |= {"src_length": len(pair.src), "tgt_length": len(pair.tgt) + 1}
            if with_text:
                row |= {"src_text": pair.src_text, "tgt_text": pair.tgt_text}
            writer.write(row)
        num_pairs, _ = writer.finalize()
    return int(num_pairs)


def check_pairs(directory: Path, tokenizer: Tokenizer) -> int:
    """Check that every encoded pair fits the vocabularies; return their number.

    Raises:
        RunError: if the file is missing or damaged, or a pair does not fit.
    """
    return len(_read_table(directory / TRAIN_FILE, tokenizer, with_text=False))


@dataclass(frozen=True)
class Position:
    """The next micro-batch to read: batch `batch` of epoch `epoch`, both from 0."""

    epoch: int = 0
    batch: int = 0


class Share(NamedTuple):
    """Pairs that one rank works on at a time; those that do not count are there for company."""

    batch: Batch
    counts: bool = True


class Deal(NamedTuple):
    """How the batches of an update are dealt out.

    Every batch is cut into as few parts as give all ranks equally many, and the parts are dealt in
    turn: whole batches if the ranks divide their number, rows of each if not. What an update is
    made of does not depend on how many ranks there are.
    """

    num_batches: int
    rank: int = 0
    num_ranks: int = 1

    @property
    def num_parts(self) -> int:
        """Into how many parts a batch is cut."""
        return self.num_ranks // math.gcd(self.num_batches, self.num_ranks)

    @property
    def num_shares(self) -> int:
        """How many shares an update has, of all ranks."""
        return self.num_batches * self.num_parts

    def of_rank(self) -> list[_Cut]:
        """Return this rank's shares."""
        return [
            _Cut(*divmod(number, self.num_parts))
            for number in range(self.rank, self.num_shares, self.num_ranks)
        ]


class _Cut(NamedTuple):
    """A part of a batch of an update."""

    batch: int
    part: int


class Dealt(NamedTuple):
    """What one rank does of an update.

    Attributes:
        shares: its own.
        num_tokens: target tokens of the whole update, of all ranks.
        after: the position that follows the update.
        deal: how the update was dealt out.
    """

    shares: list[Share]
    num_tokens: int
    after: Position
    deal: Deal


def dealt_whole(batches: Sequence[Batch], after: Position = Position()) -> Dealt:
    """Return an update that a single rank makes."""
    num_tokens = sum(batch.num_tgt_tokens for batch in batches)
    return Dealt([Share(batch) for batch in batches], num_tokens, after, Deal(len(batches)))


class Plan(NamedTuple):
    """What an epoch looks like: its batches, and the share of their cells that is padding."""

    num_batches: int
    padding: float


class _Shape(NamedTuple):
    """How many rows a batch has, and places on either side, padding included."""

    num_rows: int
    num_src: int
    num_tgt: int

    @property
    def num_places(self) -> int:
        return self.num_rows * (self.num_src + self.num_tgt)

    @property
    def num_pairs_of_places(self) -> int:
        return self.num_rows * (self.num_src**2 + self.num_tgt**2 + self.num_src * self.num_tgt)


class TrainingData:
    """The encoded training pairs, dealt out in batches."""

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, seed: int, sampling_alpha: float = 0.0
    ) -> None:
        from datasets import Dataset
        from datasets.table import MemoryMappedTable

        path = directory / TRAIN_FILE
        table = MemoryMappedTable(_read_table(path, tokenizer, sampling_alpha > 0), str(path))
        self._table = Dataset(table).with_format("arrow")
        self._tokenizer, self._seed, self._alpha = tokenizer, seed, sampling_alpha
        self._stored = _Stored(self._table)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def num_src_tokens(self) -> int:
        """Source tokens of an epoch, eos included."""
        return int(self._stored.src_lengths.sum(dtype=np.int64))

    @property
    def num_tgt_tokens(self) -> int:
        """Target tokens of an epoch, eos included."""
        return int(self._stored.tgt_lengths.sum(dtype=np.int64))

    def batches(self, batch_tokens: int, start: Position) -> Iterator[tuple[Batch, Position]]:
        """Yield batches for ever from `start` on, each with the position that follows it."""
        for planned in self._planned(batch_tokens, start):
            yield self._collate(planned.pairs, planned.rows), planned.after

    def updates(self, batch_tokens: int, start: Position, deal: Deal) -> Iterator[Dealt]:
        """Yield one rank's shares of updates for ever from `start` on; it reads no others."""
        planned = self._planned(batch_tokens, start)
        while True:
            batches = list(islice(planned, deal.num_batches))
            num_tokens = sum(int(own.pairs.tgt_lengths[own.rows].sum()) for own in batches)
            shares = [self._share(batches[cut.batch], cut, deal) for cut in deal.of_rank()]
            yield Dealt(shares, num_tokens, batches[-1].after, deal)

    def _share(self, planned: _Planned, cut: _Cut, deal: Deal) -> Share:
        """Read a part of a batch; of a batch with too few rows, one that does not count."""
        rows = np.array_split(planned.rows, deal.num_parts)[cut.part]
        own = rows if len(rows) else planned.rows[:1]
        return Share(self._collate(planned.pairs, own), bool(len(rows)))

    def _planned(self, batch_tokens: int, start: Position) -> Iterator[_Planned]:
        """Yield what is in each batch, unread."""
        epoch, first = start.epoch, start.batch
        while True:
            pairs = self._pairs(epoch)
            plan = self._plan(pairs, batch_tokens, epoch)
            for index in range(first, len(plan)):
                is_last = index + 1 == len(plan)
                after = Position(epoch + 1, 0) if is_last else Position(epoch, index + 1)
                yield _Planned(pairs, plan[index], after)
            epoch, first = epoch + 1, 0

    def plan(self, batch_tokens: int) -> Plan:
        """Say what an epoch looks like, before any is read; sampled ones differ a little."""
        batches = self._plan(self._stored, batch_tokens, 0)
        src, tgt = self._stored.src_lengths, self._stored.tgt_lengths
        cells = sum(len(rows) * (int(src[rows].max()) + int(tgt[rows].max())) for rows in batches)
        return Plan(len(batches), 1 - (self.num_src_tokens + self.num_tgt_tokens) / cells)

    def largest(self, batch_tokens: int) -> list[Batch]:
        """Return the batches of an epoch that take the most memory.

        One has the most places, the other the most pairs of places, which attention looks at.
        """
        src, tgt = self._stored.src_lengths, self._stored.tgt_lengths
        plan = self._plan(self._stored, batch_tokens, 0)
        shapes = [_Shape(len(rows), int(src[rows].max()), int(tgt[rows].max())) for rows in plan]
        most = [max(range(len(plan)), key=lambda index: shapes[index].num_places)]
        most += [max(range(len(plan)), key=lambda index: shapes[index].num_pairs_of_places)]
        return [self._collate(self._stored, plan[index]) for index in most]

    def _collate(self, pairs: _Stored | _Sampled, rows: Indices) -> Batch:
        tgt = self._tokenizer.tgt
        src_ids, tgt_ids = pairs.take(rows)
        return collate(src_ids, tgt_ids, tgt.pad, tgt.bos, tgt.eos)

    def _pairs(self, epoch: int) -> _Stored | _Sampled:
        if not self._alpha:
            return self._stored
        return _Sampled(self._table, self._tokenizer, self._alpha, (self._seed, epoch))

    def _plan(self, pairs: _Stored | _Sampled, batch_tokens: int, epoch: int) -> list[Indices]:
        rng = np.random.default_rng([self._seed, epoch])
        return plan_batches(pairs.src_lengths, pairs.tgt_lengths, batch_tokens, rng)


def _read_table(path: Path, tokenizer: Tokenizer, with_text: bool) -> Any:
    """Map a table of pairs into memory, and check that it is whole and fits the tokenizer.

    Raises:
        RunError: if it does not.
    """
    import pyarrow as pa

    if not path.is_file():
        raise RunError(f"{path}: is missing; restore it from a copy of the run.")
    ids = pa.list_(pa.int32())
    wanted = {"src": ids, "tgt": ids, "src_length": pa.int32(), "tgt_length": pa.int32()}
    if with_text:
        wanted |= {"src_text": pa.string(), "tgt_text": pa.string()}
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all().replace_schema_metadata()
        for name, type_ in wanted.items():
            if table.schema.field(name).type != type_:
                raise KeyError(name)
        table = table.select(list(wanted))
        table.validate(full=True)  # its offsets too, so that nothing is read beyond its end
        fits = len(table) > 0 and not any(column.null_count for column in table.columns)
        fits = fits and _fits(table, "src", len(tokenizer.src), 0)
        fits = fits and _fits(table, "tgt", len(tokenizer.tgt), 1)
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


class _Stored:
    """The pairs as they lie in the table."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.src_lengths: Lengths = _lengths(table, "src_length")
        self.tgt_lengths: Lengths = _lengths(table, "tgt_length")

    def take(self, rows: Indices) -> tuple[list[Lengths], list[Lengths]]:
        part = self._table[rows.tolist()]
        return _split(part.column("src")), _split(part.column("tgt"))


class _Planned(NamedTuple):
    """A batch that is not read yet, and the position that follows it."""

    pairs: _Stored | _Sampled
    rows: Indices
    after: Position


class _Sampled:
    """The pairs of one epoch, segmented anew from their text."""

    def __init__(
        self, table: Any, tokenizer: Tokenizer, alpha: float, seed: tuple[int, int]
    ) -> None:
        eos = tokenizer.src.eos
        src_seed, tgt_seed = (int(x) for x in np.random.SeedSequence(seed).generate_state(2))
        src_text, tgt_text = (
            table.data.column(name).to_pylist() for name in ("src_text", "tgt_text")
        )
        src_ids = tokenizer.src.sample(src_text, alpha, src_seed)
        tgt_ids = tokenizer.tgt.sample(tgt_text, alpha, tgt_seed)
        self._src = [np.array([*ids, eos], dtype=np.int32) for ids in src_ids]
        self._tgt = [np.array(ids, dtype=np.int32) for ids in tgt_ids]
        self.src_lengths: Lengths = np.array([len(ids) for ids in self._src], dtype=np.int32)
        self.tgt_lengths: Lengths = np.array([len(ids) + 1 for ids in self._tgt], dtype=np.int32)

    def take(self, rows: Indices) -> tuple[list[Lengths], list[Lengths]]:
        return [self._src[row] for row in rows], [self._tgt[row] for row in rows]


def plan_batches(
    src_lengths: Lengths, tgt_lengths: Lengths, batch_tokens: int, rng: np.random.Generator
) -> list[Indices]:
    """Cut all pairs into batches of like length, in random order.

    A batch's rows times its longest side, source or target, padding included, is at most
    `batch_tokens`; a single pair that is longer makes a batch of its own.
    """
    longer = np.maximum(src_lengths, tgt_lengths)
    shuffled = rng.permutation(len(longer))
    by_length = shuffled[np.lexsort((src_lengths[shuffled], longer[shuffled]))]
    batches, first = [], 0
    for index, length in enumerate(longer[by_length].tolist()):
        if index > first and (index - first + 1) * length > batch_tokens:
            batches.append(by_length[first:index])
            first = index
    batches.append(by_length[first:])
    return [batches[index] for index in rng.permutation(len(batches))]


def _lengths(table: Any, name: str) -> Lengths:
    return np.asarray(table.data.column(name), dtype=np.int32)


def _split(column: Any) -> list[Lengths]:
    """Cut an Arrow column of lists into arrays."""
    lists = column.combine_chunks()
    values = np.asarray(lists.flatten())
    return np.split(values, np.cumsum(np.asarray(lists.value_lengths()))[:-1])
