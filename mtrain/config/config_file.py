"""Read, validate, override, compare and write configs; format validation errors."""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mtrain import __version__
from mtrain.config.corpora import FORMS, KEYS_OF_A_MIXTURE, MIXTURE, Section
from mtrain.config.sections import Config, Tree, format_value
from mtrain.errors import ConfigError
from mtrain.io.atomic import whole_file


class NewerVersionError(ConfigError):
    """A config that a newer MINOR version of mtrain has written."""


def load(path: Path, overrides: Iterable[str] = (), run_dir: str | None = None) -> Config:
    """Read `path`, apply `key.key=value` overrides, and validate.

    Raises:
        ConfigError: one line with the file and the key.
    """
    return from_tree(read_yaml(path), str(path), overrides, run_dir)


def from_tree(
    tree: Mapping[str, Any], name: str, overrides: Iterable[str] = (), run_dir: str | None = None
) -> Config:
    """Apply overrides to a tree of keys, and validate it; errors begin with `name`.

    Raises:
        ConfigError: one line with the name and the key.
    """
    changed = copy.deepcopy(dict(tree))
    for override in overrides:
        _apply_override(changed, override)
    if run_dir is not None:
        changed["run_dir"] = run_dir
    try:
        return Config.model_validate(changed)
    except ValidationError as error:
        findings = sorted(error.errors(), key=lambda finding: finding["type"] != "extra_forbidden")
        raise ConfigError(f"{name}: {_sentence(findings[0])}") from None


def check_utf8(paths: Iterable[str | Path]) -> None:
    """Check that a config can name paths.

    Raises:
        ConfigError: if one is not UTF-8.
    """
    for path in map(str, paths):
        if re.search("[\ud800-\udfff]", path):  # each stands for a byte that is not UTF-8
            raise ConfigError(f"{path!r}: must be UTF-8, as a config is, but is not.")


def save(config: Config, path: Path, with_defaults: bool = True) -> None:
    """Write `config` as YAML, and its JSON schema into the same folder.

    The YAML is parsed and compared with `config` before it is written. Its head names this version
    of mtrain. Without defaults, only the keys that were set are written.

    Raises:
        WriteError: if the config cannot be written.
    """
    text, name = dump_tree(config.model_dump(exclude_unset=not with_defaults)), str(path)
    assert from_tree(_parse(text, name), name) == config, f"{path}: must read back"
    head = f"{write_schema_beside(path)}{_WRITTEN_BY}{__version__}\n"
    with whole_file(path) as beside:
        beside.write_text(head + text, encoding="utf-8")


def dump_tree(tree: Tree) -> str:
    """Return a tree of keys as YAML that reads back the same."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=100)


def dump_inline(value: object) -> str:
    """Return a value as YAML in one line: JSON that escapes what YAML refuses, such as DEL."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


def changes(old: Config, new: Config) -> dict[str, list[Any]]:
    """Return the keys whose values differ, with both values; that of a missing key is None."""
    before, after = (dict(_flatten(config.model_dump())) for config in (old, new))
    return {
        key: [before.get(key), after.get(key)]
        for key in before | after
        if before.get(key) != after.get(key)
    }


def _flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys with their values; those of a corpus stay together."""
    for key, value in tree.items():
        if isinstance(value, dict) and prefix != "data.":
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


_MAX_DIGITS = 80  # characters: enough for 64 bits, with sign and underscores


class _Loader(yaml.SafeLoader):
    """Safe YAML 1.1 in which 1e-3 is a number, 010 is 10, and `no`, dates, 1:30, `<<` are text.

    Repeated keys, tags and numbers of more than 64 bits are errors.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - an attribute of PyYAML's class
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if not tag.endswith((":bool", ":int", ":float", ":timestamp", ":merge", ":value"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if tag is not None:
            line = event.start_mark.line + 1
            raise ConfigError(f"line {line}: must have no YAML tag, but has {format_value(tag)}.")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # PyYAML raises the error
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: `{key}` must stand once, but is repeated.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        value = int(text) if len(text) <= _MAX_DIGITS else None
        if value is None or abs(value) >= 2**64:
            line, shown = node.start_mark.line + 1, format_value(text)
            raise ConfigError(f"line {line}: must be a number of 64 bits, but is {shown} instead.")
        return value


_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+|[0-9]*\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+\.)$"
)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `_Loader` would not read as text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _parse(text: str, name: str) -> Any:
    """Parse YAML; errors begin with `name`."""
    where = ""
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except RecursionError:
        problem = "it is nested too deeply"
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        where = f"line {mark.line + 1}: " if mark else ""
    raise ConfigError(f"{name}: {where}must be valid YAML, but is not: {problem}.")


def read_yaml(path: Path) -> Tree:
    """Return the tree of a YAML file, not validated.

    Raises:
        ConfigError: if it cannot be read, or is no mapping.
        NewerVersionError: if a newer MINOR version of mtrain has written it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: must be UTF-8 text, but is not.") from None
    except ValueError as error:  # a path with a character that no path can have
        raise ConfigError(f"{path}: must be valid YAML, but is not: {error}.") from None
    _check_version(path, text)
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a YAML mapping of keys to values, but is not.")
    return tree


def _check_version(path: Path, text: str) -> None:
    """Raise NewerVersionError if the head of a config names a newer MINOR version of mtrain."""
    head = HEAD * text.startswith(HEAD) + _WRITTEN_BY
    start = len(head) if text.startswith(head) else len(text)
    written, ours = _VERSION.match(text, start), _VERSION.match(__version__)
    if ours and written and (int(written[1]), int(written[2])) > (int(ours[1]), int(ours[2])):
        raise NewerVersionError(
            f"{path}: must be of mtrain {__version__} or older, but was written by mtrain "
            f"{written[0]}; install that version."
        )


def _apply_override(tree: Tree, override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not all(dotted.split(".")):
        raise ConfigError(f"--set must be KEY=VALUE, but is {override!r} instead.")
    value = _parse(text, f"--set {dotted}")
    *sections, key = dotted.split(".")
    for section in sections:
        if tree.get(section) is None:  # as in `consistency: null`
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {dotted}: `{section}` is not a section of the config.")
    tree[key] = value


def _place(location: tuple[int | str, ...]) -> tuple[list[str], str]:
    """Return the valid keys at the location of a pydantic error, and its key as users write it."""
    is_mixed = location[:3] == ("data", "train", MIXTURE)
    if is_mixed:
        location = location[:2] + location[3:]
    # where pydantic inserts the form of the corpus
    form_at = 3 if is_mixed or location[:2] == ("data", "tests") else 2
    if location[:1] == ("data",) and location[form_at : form_at + 1]:
        form = FORMS.get(str(location[form_at]))
        if form is not None and location[1] in ("train", "valid", "tests"):
            is_key_of_form = len(location) == form_at + 2
            fields = form.model_fields
            known = [name for name in fields if is_mixed or name not in KEYS_OF_A_MIXTURE]
            key = _dotted(location[:form_at] + location[form_at + 1 :])
            return known if is_key_of_form else [], key
    section: type[Section] | None = Config
    for part in location[:-1]:
        field = section.model_fields.get(str(part)) if section else None
        section = _section_of(field.annotation) if field else None
    return list(section.model_fields) if section else [], _dotted(location)


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, or may hold instead of null."""
    for kind in get_args(annotation) or (annotation,):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _sentence(error: ErrorDetails) -> str:
    """Format a pydantic error as a sentence that names the key."""
    location, kind, value = error["loc"], error["type"], format_value(error["input"])
    if kind == "invalid_key":  # a key that is a number, true or null
        location, kind = (*location[:-1], value), "extra_forbidden"
    known, key = _place(location)
    if location[-1:] == ("[key]",):
        return (
            f"`{_dotted(location[:-2])}` must name its test sets by text, but has {value} "
            "instead; write it in quotes."
        )
    if kind == "extra_forbidden":
        if key in _all_keys(Config, ""):
            section, _, name = key.rpartition(".")
            return (
                f"`{key}` must be `{name}` in the section `{section}`, but is one key with a dot "
                "instead."
            )
        return f"`{key}` is not a key of the config{_suggestion(key, known)}"
    if kind == "missing":
        return f"`{key}` must be given, but is missing."
    if kind == "value_error":
        return f"`{key}` {error['ctx']['error']}." if key else f"{error['ctx']['error']}."
    return f"`{key}` must be {requirement(error)}, but is {value} instead."


def requirement(error: ErrorDetails) -> str:
    """Return what a value must be, from a pydantic error."""
    template = _EXPECTED.get(error["type"])
    if template is None:
        return error["msg"].removeprefix("Input should be ")
    return template.format(**error.get("ctx", {}))


_EXPECTED: Mapping[str, str] = {
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_unicode": "UTF-8 text",
    "string_pattern_mismatch": "a letter, then at most 31 letters, digits, '_' and '-'",
    "string_too_short": "at least {min_length} character long",
    "bool_type": "true or false",
    "list_type": "a list",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "dict_type": "a mapping of names to values",
    "model_type": "a section of keys",
    "union_tag_invalid": "one corpus, and no list of them",
    "literal_error": "{expected}",
}


# For each key, its names in other toolkits, in lower case without "-" and "_".
_ALIASES = {
    "training.patience": "earlystopping earlystoppingpatience",
    "training.max_steps": "updates maxupdate maxupdates numupdates trainsteps epochs maxepoch "
    "maxepochs numepochs numtrainepochs",
    "training.lr": "learningrate",
    "training.batch_tokens": "batchsize minibatch maxtokensbatch tokensperbatch",
    "training.accumulate": "accumcount gradaccum gradientaccumulation gradientaccumulationsteps "
    "updatefreq batchmultiplier optimizerdelay",
    "training.warmup_steps": "warmup warmupupdates lrwarmup learningratewarmup",
    "training.max_grad_norm": "clipnorm gradclip gradientclipping clipgradnorm",
    "training.precision": "fp16 bf16 amp mixedprecision dtype",
    "training.device": "gpu gpus usecuda usegpu devices",
    "training.log_every": "loggingfreq loggingsteps logfreq dispfreq reportevery loginterval",
    "training.validate_every": "validfreq validationfreq validsteps evalevery evalsteps "
    "validateinterval",
    "training.save_every": "savefreq savesteps saveinterval savecheckpointsteps",
    "training.keep_last": "keepcheckpoint keepckpts savetotallimit keeplastepochs",
    "training.init_from": "loadmodel restorefile pretrained pretrainedmodel finetunefrommodel",
    "model.d_model": "hiddensize embdim embsize dimemb embeddingdim wordvecsize rnnsize dmodels",
    "model.d_ff": "ffsize ffndim dimffn transformerff feedforwarddim dff",
    "model.num_heads": "heads attentionheads encoderattentionheads transformerheads nhead",
    "model.num_encoder_layers": "enclayers encoderlayers layers numlayers encdepth",
    "model.num_decoder_layers": "declayers decoderlayers decdepth",
    "tokenizer.vocab_size": "vocabsize vocabularysize vocabulary dimvocabs srcvocabsize "
    "tgtvocabsize bpeoperations",
    "tokenizer.kind": "modeltype tokenizertype subword",
    "decoding.beam": "beamsize numbeams",
    "decoding.length_alpha": "lengthpenalty lenpen normalize beamalpha",
    "data.src_lang": "sourcelang srclanguage sourcelanguage",
    "data.tgt_lang": "trglang targetlang tgtlanguage targetlanguage",
    "data.valid": "dev validation validdata validset",
    "data.tests": "test testset testsets testdata",
    "data.max_tokens": "maxlength maxlen maxsentlength maxsequencelength",
    "run_dir": "modeldir savemodel savedir outputdir checkpointdir",
    "seed": "randomseed",
}


def _suggestion(key: str, here: list[str]) -> str:
    """Suggest keys for an unknown one; `here` are the valid keys of its section.

    These are the first key of that name in another section, the key for another toolkit's name, the
    nearest key, all keys of a small section, or the nearest three.
    """
    *parents, wrong = key.split(".")
    everywhere = {path.rsplit(".", 1)[-1]: path for path in reversed(_all_keys(Config, ""))}
    plain = wrong.lower().replace("_", "").replace("-", "")
    by_alias = [key for key, names in _ALIASES.items() if plain in names.split()]
    if wrong in everywhere or (by_alias and len(parents) < 2):  # keys of a corpus are deeper
        return f"; did you mean `{everywhere.get(wrong) or by_alias[0]}`?"
    if near := difflib.get_close_matches(wrong, here, n=1):
        return f"; did you mean `{'.'.join([*parents, near[0]])}`?"
    if far := difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.75):
        return f"; did you mean `{everywhere[far[0]]}`?"
    if len(here) <= _MAX_SHOWN_KEYS:
        return f"; known here: {', '.join(here)}." if here else "."
    near = difflib.get_close_matches(wrong, here, n=3, cutoff=0.0)
    shown = ", ".join(f"`{name}`" for name in near)
    return f"; the nearest are {shown}, and the config.yaml of every run has them all."


def _all_keys(section: type[Section], prefix: str) -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys


_MAX_SHOWN_KEYS = 7

_WRITTEN_BY = "# written by mtrain "
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.[0-9a-z.+]{1,40}")
SCHEMA_FILE = "config.schema.json"
HEAD = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"  # the first line of a config
_TITLE = "A config of mtrain"  # of the schema


@functools.cache
def schema() -> str:
    """Return the JSON schema of `Config` without pydantic's titles, which repeat the keys."""
    tree = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": _TITLE,
        **_untitled(Config.model_json_schema()),
    }
    return json.dumps(tree, indent=1) + "\n"


def _untitled(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: _untitled(value)
            for key, value in node.items()
            if key != "title" or not isinstance(value, str)  # a config key `title` is a mapping
        }
    return [_untitled(item) for item in node] if isinstance(node, list) else node


def write_schema_beside(config_path: Path) -> str:
    """Write the schema into a config's folder, and return the config's first line.

    A file of that name that is no schema of mtrain is kept, and the line is "".

    Raises:
        WriteError: if the schema cannot be written.
    """
    path, text = config_path.with_name(SCHEMA_FILE), schema().encode()
    if path.is_file():
        try:
            title = json.loads(path.read_bytes())["title"]
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            title = None
        if title != _TITLE:
            return ""
    if not path.is_file() or path.read_bytes() != text:
        with whole_file(path) as beside:
            beside.write_bytes(text)
    return HEAD
