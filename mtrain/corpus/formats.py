"""Readers of table formats, one pair per row: tab-separated text, JSON lines, Parquet, the hub.

A row is a pair or a fault; the caller decides whether a fault is an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from mtrain.config.corpora import (
    Corpus,
    HubCorpus,
    JsonlCorpus,
    ParquetCorpus,
    SyntheticCorpus,
    TableCorpus,
    TsvCorpus,
)
from mtrain.config.language_names import name_of
from mtrain.corpus import synthetic
from mtrain.errors import DataError
from mtrain.io.lines import Advance, Digest, format_undecodable, open_lines, raw_lines
from mtrain.io.text_lines import LINE_BREAK
from mtrain.io.text_width import shortened, visible

# Words that name a column of parallel text.
_COLUMN_WORD = re.compile(
    "source|src|target|tgt|trg|reference|ref|translation|translated|original|input|output|"
    "text|sentence|segment|line|lang|language|arabic|bengali|bulgarian|catalan|chinese|"
    "croatian|czech|danish|dutch|english|estonian|finnish|french|german|greek|hebrew|hindi|"
    "hungarian|icelandic|indonesian|italian|japanese|korean|latvian|lithuanian|norwegian|"
    "persian|polish|portuguese|romanian|russian|serbian|slovak|slovenian|spanish|swahili|"
    "swedish|thai|turkish|ukrainian|urdu|vietnamese"
)
_BATCH_ROWS = 1024
_TIMEOUT_S = 10.0  # timeout of the hub's first response
OFFLINE = "unknown: read offline"  # instead of a commit


class Row(NamedTuple):
    """A pair; `num_breaks` counts the line breaks that were replaced by spaces."""

    src: str
    tgt: str
    num_breaks: int = 0


class Fault(NamedTuple):
    """The reason why a row is not a pair: "must be ..., but is ..."."""

    what: str


class TableReader(NamedTuple):
    """A reader of one file, or of one split of a data set."""

    name: str  # the file, or the data set with its split
    has_lines: bool  # whether the rows are lines of text
    # Yields the rows without the header; reports the bytes read, and updates the checksum of a file
    # of lines; raises DataError if the file or data set cannot be read.
    read: Callable[[Advance, Digest | None], Iterator[Row | Fault]]
    header: bool | None = False  # whether the first line is a header; None if it is not known

    def place(self, row: int) -> str:
        """Format the location of a row, counted from 1, for error messages."""
        return f"{self.name}:{row}" if self.has_lines else f"{self.name}: row {row}"


def table_readers(corpus: TableCorpus) -> list[TableReader]:
    """Return a reader for each file of a corpus, or for its data set."""
    if isinstance(corpus, HubCorpus):
        return [TableReader(_name_of(corpus), False, partial(_read_hub, corpus))]
    if isinstance(corpus, TsvCorpus):
        return [
            TableReader(path, True, partial(_read_tsv, corpus, path), corpus.header)
            for path in corpus.tsv
        ]
    if isinstance(corpus, SyntheticCorpus):
        if not paths_of(corpus):
            return [TableReader(corpus.synthetic, False, partial(_read_no_shards, corpus))]
        fields = _Fields("src", "tgt")
    else:
        fields = _Fields(corpus.src, corpus.tgt)
    is_jsonl = not isinstance(corpus, ParquetCorpus)
    read = partial(_read_jsonl if is_jsonl else _read_parquet, fields)
    return [TableReader(path, is_jsonl, partial(read, path)) for path in paths_of(corpus)]


def is_header(cells: Sequence[str], languages: Iterable[str]) -> bool:
    """Return whether cells have only words of column names, codes and names of the languages."""
    known = {word for code in languages for word in _words(f"{code} {name_of(code)}")}
    words_of_cells = [_words(cell) for cell in cells]
    return all(words_of_cells) and all(
        word in known or _COLUMN_WORD.fullmatch(word) for words in words_of_cells for word in words
    )


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.casefold())


def paths_of(corpus: Corpus) -> list[str]:
    """Return the local files of a corpus."""
    if isinstance(corpus, TsvCorpus):
        return corpus.tsv
    if isinstance(corpus, JsonlCorpus):
        return corpus.jsonl
    if isinstance(corpus, ParquetCorpus):
        return corpus.parquet
    if isinstance(corpus, SyntheticCorpus):
        return synthetic.paths(Path(corpus.synthetic))
    if isinstance(corpus, HubCorpus):
        folder = Path(corpus.hub)
        return sorted(
            str(path)
            for path in filter(os.path.isfile, () if is_of_the_hub(corpus) else folder.rglob("*"))
            if not any(name.startswith(".") for name in path.relative_to(folder).parts)
        )
    return [*corpus.src, *corpus.tgt]


def check_regular(paths: Iterable[str | Path]) -> None:
    """Raise DataError if one of the files can be read only once."""
    for path in map(Path, paths):
        with suppress(OSError):  # of a path that cannot be looked up; opening the file reports it
            if path.is_fifo() or path.is_char_device():
                raise DataError(
                    f"{path}: must be a regular file, for it is read several times, but is a pipe "
                    "or a device instead; write its text into a file."
                )


def revision_of(corpus: Corpus) -> dict[str, str]:
    """Return {name: commit, or OFFLINE} of a corpus on the hub; empty for a local corpus."""
    if not is_of_the_hub(corpus):
        return {}
    commit, revision = _resolve(corpus.hub, corpus.revision), corpus.revision or ""
    if commit is None:  # a branch or a tag may have moved since it was read into the cache
        commit = revision if re.fullmatch("[0-9a-f]{40}", revision) else OFFLINE
    return {_name_of(corpus): commit}


def is_of_the_hub(corpus: Corpus) -> TypeGuard[HubCorpus]:
    """Tell whether a corpus is a data set of the hub, not a local folder in its form."""
    # `is_dir` may raise PermissionError
    return isinstance(corpus, HubCorpus) and not os.path.isdir(corpus.hub)  # noqa: PTH112


def _name_of(corpus: HubCorpus) -> str:
    return "/".join(part for part in (corpus.hub.rstrip("/"), corpus.config, corpus.split) if part)


def _read_tsv(
    corpus: TsvCorpus, path: str, advance: Advance, digest: Digest | None
) -> Iterator[Row | Fault]:
    src, tgt = corpus.sides
    with open_lines(Path(path), advance, digest) as stream:
        for raw in islice(raw_lines(stream), int(corpus.header is True), None):
            try:
                cells = raw.decode("utf-8").split("\t")
            except UnicodeDecodeError as error:
                yield Fault(format_undecodable(error))
                continue
            if corpus.columns is None and len(cells) != 2:
                yield Fault(
                    "must have 2 columns, source TAB target (or `columns` must name two), but has "
                    f"{len(cells)} instead"
                )
            elif len(cells) < max(src, tgt):
                yield Fault(
                    f"must have at least {max(src, tgt)} columns, but has {len(cells)} instead"
                )
            else:
                yield Row(cells[src - 1], cells[tgt - 1])


class _Fields(NamedTuple):
    """The fields of source and target in a row; dots access nested objects.

    A field whose whole name has dots comes first.
    """

    src: str
    tgt: str

    def columns_in(self, name: str, columns: Sequence[str]) -> list[str]:
        """Return the columns of both fields in a table, which must have each of them once."""
        needed = [path if path in columns else path.split(".")[0] for path in self]
        for column in needed:
            if columns.count(column) > 1:
                raise DataError(f"{name}: must have one column `{column}`, but has several.")
            if column not in columns:
                raise DataError(
                    f"{name}: must have a column `{column}`, but has {', '.join(columns)} instead."
                )
        return list(dict.fromkeys(needed))

    def of(self, row: Mapping[str, object]) -> Row | Fault:
        """Return source and target of a row."""
        texts, num_breaks = [], 0
        for path in self:
            value: object = row
            for key in [path] if path in row else path.split("."):
                if not isinstance(value, Mapping) or key not in value:
                    return Fault(f"must have `{path}`, but has {_field_names(row)} instead")
                value = value[key]
            if not isinstance(value, str):
                shown = shortened("null" if value is None else repr(value), 60)
                return Fault(f"`{path}` must be text, but is {shown} instead")
            if re.search("[\ud800-\udfff]", value):
                return Fault(f"`{path}` must be text, but has half of a surrogate pair")
            text, num_replaced = LINE_BREAK.subn(" ", value.rstrip("\r\n"))
            texts.append(text)
            num_breaks += num_replaced
        return Row(texts[0], texts[1], num_breaks)


def _field_names(row: Mapping[str, object]) -> str:
    """Format the names of a row's fields, those of objects with dots."""
    names = []
    for name, value in row.items():
        names += [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
    return shortened(visible(", ".join(names)), 60) or "no fields"


def _read_jsonl(
    fields: _Fields, path: str, advance: Advance, digest: Digest | None
) -> Iterator[Row | Fault]:
    with open_lines(Path(path), advance, digest) as stream:
        for raw in raw_lines(stream):
            try:
                row = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield Fault(format_undecodable(error))
            except json.JSONDecodeError as error:
                yield Fault(f"must be JSON, but is not: {error.msg}, at character {error.pos + 1}")
            except (ValueError, RecursionError) as error:
                yield Fault(f"must be JSON, but is not: {error}")
            else:
                is_object = isinstance(row, dict)
                yield fields.of(row) if is_object else Fault("must be a JSON object, but is not")


def _read_no_shards(
    corpus: SyntheticCorpus, advance: Advance, digest: Digest | None
) -> Iterator[Row | Fault]:
    synthetic.read_record(Path(corpus.synthetic))  # raises if it is incomplete
    yield from ()


def _read_parquet(
    fields: _Fields, path: str, advance: Advance, digest: Digest | None
) -> Iterator[Row | Fault]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with Path(path).open("rb") as raw, ParquetFile(raw) as file:
            columns = fields.columns_in(path, file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                yield from _rows_of(batch, fields)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or _line(error)}.") from None
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{path}: must be a whole Parquet file, but: {_line(error)}.") from None
    advance(Path(path).stat().st_size)


def _rows_of(batch: Any, fields: _Fields) -> Iterator[Row | Fault]:
    """Yield the rows of a batch; if it is not valid UTF-8, convert row by row to isolate faults."""
    try:
        yield from map(fields.of, batch.to_pylist())
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            yield Fault(f"must be UTF-8, but has byte 0x{error.object[error.start]:02x}")
        else:
            for row in range(len(batch)):
                yield from _rows_of(batch.slice(row, 1), fields)


def _read_hub(corpus: HubCorpus, advance: Advance, digest: Digest | None) -> Iterator[Row | Fault]:
    fields, name = _Fields(corpus.src, corpus.tgt), _name_of(corpus)
    is_local = not is_of_the_hub(corpus)
    if is_local and corpus.revision is not None:
        raise DataError(
            f"{name}: must have no `revision`, for it is a local folder, but has "
            f"{corpus.revision!r}; leave it out."
        )
    is_streaming = corpus.streaming or is_local  # ignores a stale cache
    # of a stream, `datasets` takes no slices
    rows = re.fullmatch(r"(.+)\[(\d*):(\d*)\]", corpus.split) if is_streaming else None
    split, start, stop = rows.groups() if rows else (corpus.split, "", "")
    try:
        import datasets  # the required version never runs a data set's code

        path = str(Path(corpus.hub).absolute()) if is_local else corpus.hub
        csv_options = _csv_options(path, corpus) if is_local else {}
        table = datasets.load_dataset(
            path,
            corpus.config,
            split=split,
            revision=None if is_local else _resolve(corpus.hub, corpus.revision) or corpus.revision,
            streaming=is_streaming,
            **csv_options,
        )
        if table.column_names is not None:
            table = table.select_columns(fields.columns_in(name, table.column_names))
        for row in islice(table, int(start or 0), int(stop) if stop else None):
            if csv_options:  # pandas 3.1 reads an empty cell as null, earlier versions as text
                row = {key: "" if cell is None else cell for key, cell in row.items()}
            yield fields.of(row)
    except DataError:
        raise
    except ConnectionError as error:
        raise _unreachable(corpus.hub, error) from None
    except Exception as error:  # `datasets` and its readers raise many types
        raise DataError(f"{name}: cannot be loaded as a data set: {_reason(error)}.") from None
    advance(sum(Path(path).stat().st_size for path in paths_of(corpus)))


def _reason(error: BaseException) -> str:
    """Return in one line why `datasets` cannot load a data set."""
    from datasets.exceptions import DatasetGenerationError
    from datasets.table import CastError

    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__  # names the problem
    if isinstance(error, CastError):
        columns = {*error.table_column_names} ^ {*error.requested_column_names}
        shown = visible(", ".join(sorted(columns)))
        return f"its files must have the same columns, but only some have {shortened(shown, 60)}"
    if isinstance(error, StopIteration):
        return "its first file is empty"
    text = " ".join(str(error).split())
    return shortened(text.rstrip("."), 300) or type(error).__name__


def _csv_options(path: str, corpus: HubCorpus) -> dict[str, Any]:
    """Return options that keep numbers and words such as NA as text; none unless it is CSV."""
    import datasets

    if datasets.load_dataset_builder(path, corpus.config).name != "csv":
        return {}
    converters = dict.fromkeys((corpus.src, corpus.tgt), str)  # a cell has no fields
    return {"converters": converters, "keep_default_na": False, "na_values": [""]}


@cache
def _resolve(hub: str, revision: str | None) -> str | None:
    """Return the commit on the hub, so that all passes read the same; None if it is offline."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return HfApi().dataset_info(hub, revision=revision, timeout=_TIMEOUT_S).sha
    except OfflineModeIsEnabled:
        return None  # the text is read from the cache, if it is there
    except (HFValidationError, RepositoryNotFoundError):
        raise DataError(
            f"{hub}: must be a folder, or a data set of the Hugging Face hub that you may read, "
            "but is neither."
        ) from None
    except RevisionNotFoundError:
        raise DataError(
            f"{hub}: `revision` must be a branch, a tag or a commit of this data set, but is "
            f"{revision!r} instead."
        ) from None
    except Exception as error:  # the type depends on the HTTP library
        raise _unreachable(hub, error) from None


def _unreachable(hub: str, error: Exception) -> DataError:
    return DataError(
        f"{hub}: is no folder, and the Hugging Face hub cannot be reached ({_line(error)}); name a "
        "folder with a copy of the data set, or its files with `parquet:` or `jsonl:`."
    )


def _line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
