"""The forms of a corpus, or a mixture of corpora, in a config."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails


class Section(BaseModel):
    """A frozen group of keys: unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _check_path(path: str) -> str:
    if re.search("[\0\ud800-\udfff]", path):
        raise ValueError("must be a path, but has a character that no path can have")
    return expand_home(path)


def expand_home(path: str | os.PathLike[str]) -> str:
    """Return a path with its first `~/`, if it begins so, replaced by the home folder."""
    text = os.fspath(path)
    return str(Path(text).expanduser()) if text.startswith("~/") else text


def _check_other_field(name: str, info: ValidationInfo) -> str:
    if name == info.data.get("src"):
        raise ValueError(f"must be another field than `src`, but is {name!r} too")
    return name


Int32 = Annotated[int, Field(le=2**31 - 1)]
FilePath = Annotated[str, AfterValidator(_check_path)]
Name = Annotated[str, Field(min_length=1)]
OtherName = Annotated[Name, AfterValidator(_check_other_field)]


KEYS_OF_A_MIXTURE = ("weight", "tag", "until")  # keys of a corpus that are valid only in a mixture


class _CorpusSection(Section):
    """Parallel text, and its use in a mixture.

    Its share of an epoch is its `weight` over the sum of weights. Its sources begin with the
    reserved token of `tag`. It is used until the share `until` of the budget is spent.
    """

    weight: float | None = Field(default=None, gt=0)
    tag: str | None = Field(default=None, pattern="^[A-Za-z][A-Za-z0-9_-]{0,31}$")
    until: float | None = Field(default=None, gt=0, lt=1)

    @model_serializer(mode="wrap")
    def _without_absent_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = handler(self)
        return {
            key: value
            for key, value in tree.items()
            if key not in KEYS_OF_A_MIXTURE or value is not None
        }


class FilesCorpus(_CorpusSection):
    """Parallel text: line n of the source files is translated by line n of the target files."""

    src: list[FilePath] = Field(min_length=1)
    tgt: list[FilePath] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_num_files(self) -> FilesCorpus:
        if len(self.src) != len(self.tgt):
            raise ValueError(
                f"must name as many source as target files, but names {len(self.src)} "
                f"and {len(self.tgt)} instead"
            )
        return self


class TsvCorpus(_CorpusSection):
    """Parallel text in columns separated by tabs: source and target, or those `columns` names.

    `header` says whether the first line of each file is a header, which is left out; if it is None,
    the first line is a pair, and one that looks like a header is reported.
    """

    tsv: list[FilePath] = Field(min_length=1)
    columns: list[Int32] | None = None
    header: bool | None = None

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: list[int] | None) -> list[int] | None:
        if columns is not None and not (len(columns) == len(set(columns)) == 2 <= 1 + min(columns)):
            raise ValueError(f"must be two columns, counted from 1, but is {columns} instead")
        return columns

    @property
    def sides(self) -> list[int]:
        """The columns of source and target, counted from 1."""
        return self.columns or [1, 2]


class JsonlCorpus(_CorpusSection):
    """Parallel text in lines of JSON; `src` and `tgt` name fields, with dots into objects."""

    jsonl: list[FilePath] = Field(min_length=1)
    src: Name
    tgt: OtherName


class ParquetCorpus(_CorpusSection):
    """Parallel text in Parquet files; `src` and `tgt` name columns, with dots into structs."""

    parquet: list[FilePath] = Field(min_length=1)
    src: Name
    tgt: OtherName


class HubCorpus(_CorpusSection):
    """A data set of the Hugging Face hub, or a folder in its form; code in it is never run."""

    hub: FilePath = Field(min_length=1)
    config: str | None = Field(default=None, min_length=1)
    split: str = Field(min_length=1)
    src: Name
    tgt: OtherName
    revision: str | None = Field(default=None, min_length=1)
    streaming: bool = False


class SyntheticCorpus(_CorpusSection):
    """A corpus folder of `mtrain augment`; the tokenizer does not learn from it."""

    synthetic: FilePath = Field(min_length=1)


TableCorpus = TsvCorpus | JsonlCorpus | ParquetCorpus | HubCorpus | SyntheticCorpus


_AnyForm = (
    Annotated[FilesCorpus, Tag("files")]
    | Annotated[TsvCorpus, Tag("tsv")]
    | Annotated[JsonlCorpus, Tag("jsonl")]
    | Annotated[ParquetCorpus, Tag("parquet")]
    | Annotated[HubCorpus, Tag("hub")]
    | Annotated[SyntheticCorpus, Tag("synthetic")]
)
FORMS: dict[str, type[FilesCorpus | TableCorpus]] = {
    tag.tag: form for form, tag in map(get_args, get_args(_AnyForm))
}
MIXTURE = "mixture"


def _form(corpus: object) -> str:
    """Return the form of a corpus, by its keys or its class."""
    if isinstance(corpus, list):
        return MIXTURE
    names = corpus if isinstance(corpus, dict) else getattr(type(corpus), "model_fields", ())
    return next((form for form in FORMS if form in names), "files")


def _check_form(corpus: object) -> object:
    """Reject a corpus with keys of which none names its form."""
    if isinstance(corpus, dict) and corpus and not corpus.keys() & {"src", "tgt", *FORMS}:
        form_keys = ", ".join(f"`{form}`" for form in FORMS if form != "files")
        names = ", ".join(str(name) for name in corpus)
        raise ValueError(
            f"must have `src` and `tgt`, or one of {form_keys}, but has {names} instead"
        )
    return corpus


def _refuse_keys_of_a_mixture(corpus: object) -> object:
    """Reject `weight`, `tag` and `until` as unknown keys of a corpus outside a mixture."""
    keys = corpus if isinstance(corpus, dict) else getattr(corpus, "model_fields_set", ())
    for key in KEYS_OF_A_MIXTURE:
        if key in keys:
            unknown = InitErrorDetails(
                type="extra_forbidden", loc=(_form(corpus), key), input=corpus
            )
            raise ValidationError.from_exception_data("corpus", [unknown])
    return corpus


_Mixture = Annotated[
    list[Annotated[_AnyForm, Discriminator(_form), BeforeValidator(_check_form)]],
    Field(min_length=1),
]
Corpus = Annotated[
    _AnyForm,
    Discriminator(_form),
    BeforeValidator(_refuse_keys_of_a_mixture),
    BeforeValidator(_check_form),
]
TrainText = Annotated[
    _AnyForm | Annotated[_Mixture, Tag(MIXTURE)],
    Discriminator(_form),
    BeforeValidator(_refuse_keys_of_a_mixture),
    BeforeValidator(_check_form),
]


class NamedCorpus(NamedTuple):
    """A corpus, and its key in the config: `data.train`, or `data.train[0]` of a mixture."""

    name: str
    corpus: Corpus


def corpora_of(text: TrainText) -> list[NamedCorpus]:
    """Return the corpora of a mixture, or the single corpus."""
    if not isinstance(text, list):
        return [NamedCorpus("data.train", text)]
    return [NamedCorpus(f"data.train[{number}]", corpus) for number, corpus in enumerate(text)]


def has_both_directions(text: TrainText) -> bool:
    """Return whether a mixture has a corpus in both directions, neither of them with `until`.

    Corpora with a tag do not count: their sources begin with a token that a translation lacks.
    """
    used = [corpus for _, corpus in corpora_of(text) if corpus.until is None and corpus.tag is None]
    return bool(bidirectional_corpora(used))


def bidirectional_corpora(text: TrainText) -> set[str]:
    """Return the names of the corpora that a mixture lists in both directions."""
    reverse = {name: other for name, corpus in corpora_of(text) if (other := _exchanged(corpus))}
    plain = {name: _exchanged(other) for name, other in reverse.items()}
    return {
        name for name, other in reverse.items() if other in plain.values() and other != plain[name]
    }


def _exchanged(corpus: Corpus) -> Corpus | None:
    """Return the corpus with its sides exchanged, without its use in a mixture.

    None if it is synthetic: its fields are fixed.
    """
    if isinstance(corpus, SyntheticCorpus):
        return None
    corpus = corpus.model_copy(update=dict.fromkeys(KEYS_OF_A_MIXTURE))
    if isinstance(corpus, TsvCorpus):
        return corpus.model_copy(update={"columns": corpus.sides[::-1]})
    return corpus.model_copy(update={"src": corpus.tgt, "tgt": corpus.src})


def weight_of(num_pairs: int, weight: float | None, temperature: float | None) -> float:
    """Return the weight of a corpus: `weight` if set, else num_pairs ** (1 / temperature).

    The default temperature is 1: sampling in proportion to size.
    """
    return float(num_pairs ** (1 / (temperature or 1.0)) if weight is None else weight)
