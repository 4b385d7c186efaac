"""One validated tree of settings, read from one YAML file.

Defaults stand here and nowhere else. Imports no torch, so that an error answers at once.
"""

from __future__ import annotations

import copy
import difflib
import re
import reprlib
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, ValidationError, WithJsonSchema, field_validator, model_validator
from pydantic_core import ErrorDetails

from mtrain.config import json_schema
from mtrain.config.corpora import (
    FORMS,
    MIXED_FORMS,
    MIXTURE,
    Corpus,
    FilePath,
    Section,
    TrainText,
    Whole,
    corpora_of,
)
from mtrain.errors import ConfigError, WriteError

Tree = dict[str, Any]
MAX_BEAM = 1000


# What `data.clean` may name: rules of the audit, in whose own order they are asked.
CLEAN = (
    "blank-side",
    "held-out-pair",
    "held-out",
    "copied",
    "repeated-pair",
    "repeated-source",
    "length-ratio",
    "strange-script",
    "swapped",
    "no-words",
    "mojibake",
)


class DataConfig(Section):
    """The corpora and their languages; `clean` names what is left out of the training."""

    src_lang: str = Field(min_length=1)
    tgt_lang: str = Field(min_length=1)
    train: TrainText
    temperature: float | None = Field(default=None, ge=1)
    valid: Corpus
    tests: dict[str, Corpus] = Field(default={})
    max_tokens: Whole = Field(default=256, ge=2)
    clean: list[Annotated[str, WithJsonSchema({"enum": list(CLEAN)})]] = Field(
        default=["blank-side", "held-out-pair"]
    )

    @field_validator("clean")
    @classmethod
    def _know_what_to_clean(cls, names: list[str]) -> list[str]:
        for name in names:
            if name == "max-tokens":
                raise ValueError(
                    "need not name 'max-tokens': pairs over `data.max_tokens` are always left out"
                )
            if name not in CLEAN:
                near = difflib.get_close_matches(name, CLEAN, n=1)
                rest = f"the nearest is {near[0]!r}" if near else f"known are {', '.join(CLEAN)}"
                raise ValueError(
                    f"must name kinds of pairs, but has {_shown(name)} instead; {rest}"
                )
        return names

    @model_validator(mode="after")
    def _mix_by_one_rule(self) -> DataConfig:
        corpora = corpora_of(self.train, "train")
        num_weighted = sum(own.weight is not None for own in corpora)
        if 0 < num_weighted < len(corpora):
            raise ValueError(
                "must give each corpus of `train` a `weight`, or none of them, but gives "
                f"{num_weighted} of {len(corpora)} one instead"
            )
        if self.temperature is not None and (num_weighted or not isinstance(self.train, list)):
            why = "its corpora have weights" if num_weighted else "`train` is one corpus"
            raise ValueError(
                f"must leave `temperature` out where {why}, but it is {self.temperature} instead"
            )
        return self

    @model_validator(mode="after")
    def _name_the_tests(self) -> DataConfig:
        for name in self.tests:
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
                raise ValueError(
                    "must name its test sets with letters, digits, '_', '-' and '.', "
                    f"but has {name!r} instead"
                )
        return self


class TokenizerConfig(Section):
    """SentencePiece settings; `sampling_alpha` above 0 samples segmentations while training."""

    kind: Literal["unigram", "bpe"] = "unigram"
    vocab_size: Whole = Field(default=8000, ge=8)
    shared: bool = True
    character_coverage: float = Field(default=1.0, gt=0, le=1)
    byte_fallback: bool = True
    sampling_alpha: float = Field(default=0.0, ge=0, le=1)
    max_training_lines: Whole = Field(default=500_000, ge=1)


class ModelConfig(Section):
    """Sizes and variants of the Transformer."""

    d_model: int = Field(default=128, ge=2, le=2**16)
    num_heads: Whole = Field(default=4, ge=1)
    d_ff: Whole = Field(default=256, ge=1)
    num_encoder_layers: int = Field(default=4, ge=1, le=1000)
    num_decoder_layers: int = Field(default=4, ge=1, le=1000)
    dropout: float = Field(default=0.3, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    activation_dropout: float = Field(default=0.0, ge=0, lt=1)
    norm: Literal["post", "pre"] = "post"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_positions: Whole | None = Field(default=None, ge=2)
    attention_window: Whole | None = Field(default=None, ge=1)
    activation: Literal["relu", "gelu"] = "relu"
    tie_embeddings: Literal["all", "decoder", "none"] = "all"
    branch_gain: float = Field(default=0.05, gt=0, le=100)

    @model_validator(mode="after")
    def _fit_the_sizes(self) -> ModelConfig:
        if self.d_model % self.num_heads:
            raise ValueError(
                f"must have a `d_model` that is divisible by `num_heads`, but {self.d_model} is "
                f"not divisible by {self.num_heads}"
            )
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError(
                "must say with `max_positions` how many positions are learned, but it is null "
                "instead"
            )
        if self.positions == "sinusoidal" and self.max_positions is not None:
            raise ValueError(
                "must leave `max_positions` null unless `positions` is 'learned', but it is "
                f"{self.max_positions} instead"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"must have an even `d_model` for sinusoidal positions, but has {self.d_model} "
                "instead"
            )
        return self


class TrainingConfig(Section):
    """The optimizer, its budget, and what is kept on the way."""

    max_steps: Whole | None = Field(default=8000, ge=1)
    max_minutes: float | None = Field(default=None, gt=0)
    batch_tokens: Whole = Field(default=4096, ge=1)
    accumulate: Whole = Field(default=1, ge=1)
    parallel: Literal["ddp", "fsdp"] = "ddp"
    exchange: Literal["float32", "bfloat16"] = "float32"
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    schedule: Literal["inverse_sqrt", "noam", "linear", "cosine"] = "inverse_sqrt"
    lr: float = Field(default=0.005, gt=0)
    warmup_steps: Whole = Field(default=2000, ge=0)
    betas: list[float] = Field(default=[0.9, 0.98], min_length=2, max_length=2)
    eps: float = Field(default=1e-9, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, ge=0)
    init_from: FilePath | None = Field(default=None, min_length=1)
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: bool = True
    log_every: Whole = Field(default=50, ge=1)
    validate_every: Whole = Field(default=500, ge=1)
    save_every: Whole | None = Field(default=None, ge=1)
    patience: Whole = Field(default=10, ge=1)
    keep_last: Whole = Field(default=5, ge=1)
    keep_best: Whole = Field(default=1, ge=1)
    average: Whole = Field(default=5, ge=1)
    average_of: Literal["last", "best"] = "last"

    @model_validator(mode="after")
    def _bound_the_training(self) -> TrainingConfig:
        if self.max_steps is None and self.max_minutes is None:
            raise ValueError("must have max_steps or max_minutes, but both are null instead")
        kept = self.keep_last if self.average_of == "last" else self.keep_best
        if self.average > kept:
            raise ValueError(
                f"must keep the {self.average} checkpoints that it averages, but "
                f"keep_{self.average_of} is {kept} instead"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"must have betas in [0, 1), but has {self.betas} instead")
        return self


class DecodingConfig(Section):
    """How translations are searched for."""

    beam: int = Field(default=5, ge=1, le=MAX_BEAM)
    length_alpha: float = Field(default=0.6, ge=0, le=10)
    max_extra_tokens: Whole = Field(default=50, ge=0)
    batch_tokens: Whole = Field(default=8192, ge=1)
    no_repeat_ngram: Whole = Field(default=0, ge=0)
    early_stop: bool = False


class Config(Section):
    """Everything that decides what a run is."""

    run_dir: FilePath = Field(min_length=1)
    seed: int = Field(default=1, ge=0, lt=2**63)
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: DecodingConfig = DecodingConfig()

    @model_validator(mode="after")
    def _fit_the_sections(self) -> Config:
        if self.model.tie_embeddings == "all" and not self.tokenizer.shared:
            raise ValueError(
                "`model.tie_embeddings` must be 'decoder' or 'none' when `tokenizer.shared` is "
                "false, but is 'all' instead"
            )
        if self.model.max_positions is not None and self.model.max_positions < self.data.max_tokens:
            raise ValueError(
                f"`model.max_positions` must be >= `data.max_tokens` ({self.data.max_tokens}), "
                f"but is {self.model.max_positions} instead"
            )
        if self.training.batch_tokens < self.data.max_tokens:
            raise ValueError(
                f"`training.batch_tokens` must be >= `data.max_tokens` ({self.data.max_tokens}), "
                f"but is {self.training.batch_tokens} instead"
            )
        return self


def load(path: Path, overrides: Iterable[str] = (), run_dir: str | None = None) -> Config:
    """Read `path`, apply `key.key=value` overrides, and validate.

    Raises:
        ConfigError: with the file and the key, in one line.
    """
    return from_tree(_read_yaml(path), str(path), overrides, run_dir)


def from_tree(
    tree: Mapping[str, Any], name: str, overrides: Iterable[str] = (), run_dir: str | None = None
) -> Config:
    """Validate a tree of keys, which its errors call `name`, after the same changes.

    Raises:
        ConfigError: with the name and the key, in one line.
    """
    changed = copy.deepcopy(dict(tree))
    for override in overrides:
        _apply_override(changed, override)
    if run_dir is not None:
        changed["run_dir"] = run_dir
    try:
        return Config.model_validate(changed)
    except ValidationError as error:
        findings = sorted(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        raise ConfigError(f"{name}: {_sentence(findings[0])}") from None


def save(config: Config, path: Path) -> None:
    """Write `config` as YAML, its schema beside it, and check that it reads back the same.

    Raises:
        WriteError: if the disk does not take it.
    """
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(json_schema.put_beside(path) + dump(config), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise WriteError(f"{path}: cannot be written: {error.strerror}.") from None
    assert load(path) == config, f"{path} does not read back as the config that was written"


def dump(config: Config) -> str:
    """Return `config` as YAML, every key spelled out."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, width=100)


class Change(NamedTuple):
    """A key of the config whose value is another one now."""

    key: str
    old: Any
    new: Any


def changes(old: Section, new: Section, prefix: str = "") -> list[Change]:
    """Return the keys on which two configs differ, in the order of the config."""
    found = []
    for name, before in old:
        after = getattr(new, name)
        if isinstance(before, Section) and type(before) is type(after):
            found += changes(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(Change(prefix + name, before, after))
    return found


_MAX_DIGITS = 80  # of 64 bits, in any base, with signs and underscores


class _Loader(yaml.SafeLoader):
    """Safe YAML without its traps: 1e-3 is a number, no is a word.

    A repeated key, a tag and a number of more than 64 bits are errors.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - the library's own attribute
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if not tag.endswith((":bool", ":float", ":timestamp"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if tag is not None:
            line = event.start_mark.line + 1
            raise ConfigError(f"line {line}: must have no YAML tag, but has {_shown(tag)}.")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # the library says it
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: `{key}` must stand once, but is repeated.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        value = super().construct_yaml_int(node) if len(text) <= _MAX_DIGITS else None
        if value is None or abs(value) >= 2**64:
            line, shown = node.start_mark.line + 1, _shown(text)
            raise ConfigError(f"line {line}: must be a number of 64 bits, but is {shown} instead.")
        return int(value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+|[0-9]*\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+\.)$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for something other than text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _parse(text: str) -> Any:
    """Read YAML; what is nested too deeply for the parser is not valid either."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def _read_yaml(path: Path) -> Tree:
    try:
        tree = _parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: must be UTF-8 text, but is not.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: {_yaml_problem(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a YAML mapping of keys to values, but is not.")
    return tree


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = f"line {mark.line + 1}: " if mark else ""
    return f"{where}must be valid YAML, but is not: {problem}."


def _apply_override(tree: Tree, override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not all(dotted.split(".")):
        raise ConfigError(f"--set must be KEY=VALUE, but is {override!r} instead.")
    try:
        value = _parse(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--set {dotted}: {_yaml_problem(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"--set {dotted}: {error}") from None
    *sections, key = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {dotted}: `{section}` is not a section of the config.")
    tree[key] = value


class _Place(NamedTuple):
    """Where the validator stood: the section that it read, and the key as users write it."""

    section: type[Section] | None
    key: str


def _place(location: tuple[int | str, ...]) -> _Place:
    forms = FORMS
    if location[:3] == ("data", "train", MIXTURE):
        location, forms = location[:2] + location[3:], MIXED_FORMS
    is_one_of_some = location[:2] == ("data", "tests") or forms is MIXED_FORMS
    form_at = 3 if is_one_of_some else 2  # the form of a corpus is no key
    if location[:1] == ("data",) and location[form_at : form_at + 1]:
        form = forms.get(str(location[form_at]))
        if form is not None and location[1] in ("train", "valid", "tests"):
            is_key_of_it = len(location) == form_at + 2
            key = _dotted(location[:form_at] + location[form_at + 1 :])
            return _Place(form if is_key_of_it else None, key)
    section: type[Section] | None = Config
    for part in location[:-1]:
        field = section.model_fields.get(str(part)) if section else None
        annotation: Any = field.annotation if field else None
        is_section = isinstance(annotation, type) and issubclass(annotation, Section)
        section = annotation if is_section else None
    return _Place(section, _dotted(location))


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _sentence(error: ErrorDetails) -> str:
    """Turn one finding of the validator into the house's error grammar."""
    place = _place(error["loc"])
    if error["loc"][-1:] == ("[key]",):
        return (
            f"`{_dotted(error['loc'][:-2])}` must name its test sets by text, but has "
            f"{_shown(error['input'])} instead; write it in quotes."
        )
    if error["type"] == "extra_forbidden":
        return f"`{place.key}` is not a key of the config{_suggestion(place)}"
    if error["type"] == "missing":
        return f"`{place.key}` must be given, but is missing."
    if error["type"] == "value_error":
        return (
            f"`{place.key}` {error['ctx']['error']}." if place.key else f"{error['ctx']['error']}."
        )
    return f"`{place.key}` must be {_wanted(error)}, but is {_shown(error['input'])} instead."


_WANTED: Mapping[str, str] = {
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "at least {min_length} character long",
    "bool_type": "true or false",
    "list_type": "a list",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "dict_type": "a mapping of names to values",
    "model_type": "a section of keys",
    "union_tag_invalid": "one corpus, and no list of them",
    "model_attributes_type": "a section of keys",
    "literal_error": "{expected}",
}


def _wanted(error: ErrorDetails) -> str:
    template = _WANTED.get(error["type"])
    return template.format(**error.get("ctx", {})) if template else error["msg"]


_SHORT = reprlib.Repr()  # of lists that hold themselves, or the same lists over and over
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 3, 10, 10
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100


def _shown(value: object) -> str:
    words: Mapping[object, str] = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    text = words[value] if is_word else _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _suggestion(place: _Place) -> str:
    """Name the nearest known key: the same word elsewhere, a like word here, or elsewhere."""
    *parents, wrong = place.key.split(".")
    here = list(place.section.model_fields) if place.section else []
    everywhere = {path.rsplit(".", 1)[-1]: path for path in _all_keys(Config, "")}
    if wrong in everywhere:
        return f"; did you mean `{everywhere[wrong]}`?"
    if near := difflib.get_close_matches(wrong, here, n=1):
        return f"; did you mean `{'.'.join([*parents, near[0]])}`?"
    if far := difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.75):
        return f"; did you mean `{everywhere[far[0]]}`?"
    return f"; known here: {', '.join(here)}." if here else "."


def _all_keys(section: type[Section], prefix: str) -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys
