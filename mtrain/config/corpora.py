"""In which forms a config names text: one corpus, or several that are mixed. Reads none of it."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)


class Section(BaseModel):
    """A frozen group of keys: unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _check_path(path: str) -> str:
    if re.search("[\0\ud800-\udfff]", path):
        raise ValueError("must be a path, but has a character that no path can have")
    return path


def _differ(name: str, others: ValidationInfo) -> str:
    if name == others.data.get("src"):
        raise ValueError(f"must be another field than `src`, but is {name!r} too")
    return name


Whole = Annotated[int, Field(le=2**31 - 1)]
FilePath = Annotated[str, AfterValidator(_check_path)]
Name = Annotated[str, Field(min_length=1)]
OtherName = Annotated[Name, AfterValidator(_differ)]


class CorpusConfig(Section):
    """Parallel text: line n of the source files is translated by line n of the target files."""

    src: list[FilePath] = Field(min_length=1)
    tgt: list[FilePath] = Field(min_length=1)

    @model_validator(mode="after")
    def _pair_the_files(self) -> CorpusConfig:
        if len(self.src) != len(self.tgt):
            raise ValueError(
                f"must name as many source as target files, but names {len(self.src)} "
                f"and {len(self.tgt)} instead"
            )
        return self


class TsvConfig(Section):
    """Parallel text in columns that tabs part: source and target, or those that `columns` names."""

    tsv: list[FilePath] = Field(min_length=1)
    columns: list[Whole] | None = None

    @field_validator("columns")
    @classmethod
    def _name_two(cls, columns: list[int] | None) -> list[int] | None:
        if columns is not None and not (len(columns) == len(set(columns)) == 2 <= 1 + min(columns)):
            raise ValueError(f"must be two columns, counted from 1, but is {columns} instead")
        return columns


class JsonlConfig(Section):
    """Parallel text in lines of JSON; `src` and `tgt` name fields, with dots into objects."""

    jsonl: list[FilePath] = Field(min_length=1)
    src: Name
    tgt: OtherName


class ParquetConfig(Section):
    """Parallel text in Parquet files; `src` and `tgt` name columns, with dots into structs."""

    parquet: list[FilePath] = Field(min_length=1)
    src: Name
    tgt: OtherName


class HubConfig(Section):
    """A data set of the Hugging Face hub, or a folder in its form; code in it is never run."""

    hub: FilePath = Field(min_length=1)
    config: str | None = Field(default=None, min_length=1)
    split: str = Field(min_length=1)
    src: Name
    tgt: OtherName
    revision: str | None = Field(default=None, min_length=1)
    streaming: bool = False


TableConfig = TsvConfig | JsonlConfig | ParquetConfig | HubConfig


class _Weighted(Section):
    """A corpus of a mixture: its part of an epoch is its weight, beside those of the others."""

    weight: float | None = Field(default=None, gt=0)


class _MixedFiles(CorpusConfig, _Weighted):
    pass


class _MixedTsv(TsvConfig, _Weighted):
    pass


class _MixedJsonl(JsonlConfig, _Weighted):
    pass


class _MixedParquet(ParquetConfig, _Weighted):
    pass


class _MixedHub(HubConfig, _Weighted):
    pass


FORMS: dict[str, type[Section]] = {
    "files": CorpusConfig,
    "tsv": TsvConfig,
    "jsonl": JsonlConfig,
    "parquet": ParquetConfig,
    "hub": HubConfig,
}
MIXED_FORMS: dict[str, type[Section]] = {
    "files": _MixedFiles,
    "tsv": _MixedTsv,
    "jsonl": _MixedJsonl,
    "parquet": _MixedParquet,
    "hub": _MixedHub,
}
MIXTURE = "mixture"


def _form(corpus: object) -> str:
    """Tell by its keys, or by its class, in which form a corpus is given."""
    if isinstance(corpus, list):
        return MIXTURE
    names = corpus if isinstance(corpus, dict) else getattr(type(corpus), "model_fields", ())
    return next((form for form in FORMS if form in names), "files")


_Plain = (
    Annotated[CorpusConfig, Tag("files")]
    | Annotated[TsvConfig, Tag("tsv")]
    | Annotated[JsonlConfig, Tag("jsonl")]
    | Annotated[ParquetConfig, Tag("parquet")]
    | Annotated[HubConfig, Tag("hub")]
)
Corpus = Annotated[_Plain, Discriminator(_form)]

MixedCorpus = Annotated[
    Annotated[_MixedFiles, Tag("files")]
    | Annotated[_MixedTsv, Tag("tsv")]
    | Annotated[_MixedJsonl, Tag("jsonl")]
    | Annotated[_MixedParquet, Tag("parquet")]
    | Annotated[_MixedHub, Tag("hub")],
    Discriminator(_form),
]
TrainText = Annotated[
    _Plain | Annotated[list[MixedCorpus], Field(min_length=1), Tag(MIXTURE)],
    Discriminator(_form),
]


class NamedCorpus(NamedTuple):
    """A corpus, and what the config calls it: `data.train`, or `data.train[0]` of a mixture."""

    name: str
    corpus: Corpus
    weight: float | None = None


def corpora_of(text: TrainText, name: str) -> list[NamedCorpus]:
    """Return the corpora of a mixture, or the one."""
    if not isinstance(text, list):
        return [NamedCorpus(name, text)]
    return [NamedCorpus(f"{name}[{number}]", own, own.weight) for number, own in enumerate(text)]


def weight_of(num_pairs: int, weight: float | None, temperature: float | None) -> float:
    """Return what a corpus weighs: what the config says, or what follows from its size.

    Without weights, a corpus of n pairs weighs n ** (1 / temperature), and n without either.
    """
    return float(num_pairs ** (1 / (temperature or 1.0)) if weight is None else weight)
