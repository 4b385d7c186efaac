"""The JSON schema for editors matches the config classes, and every config names its path."""

import json
import re
from pathlib import Path

import pytest
from tasks import REPOSITORY, Tree, tiny_tree, write_task

from mtrain import __version__
from mtrain.config import config_file
from mtrain.config.config_file import load, save
from mtrain.config.sections import CLEAN, Config
from mtrain.errors import ConfigError, WriteError

HEAD = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")
SCHEMA = REPOSITORY / "configs" / config_file.SCHEMA_FILE
SHIPPED = sorted((REPOSITORY / "configs").rglob("*.yaml"))


def named_by(path: Path) -> Path:
    """Return the path of the schema that the first line of a config names for editors."""
    match = HEAD.match(path.read_text(encoding="utf-8"))
    assert match, path
    return path.parent / match[1]


def test_the_shipped_schema_equals_the_generated_schema() -> None:
    command = "from mtrain.config.config_file import schema; print(schema(), end='')"
    is_same = SCHEMA.read_text(encoding="utf-8") == config_file.schema()
    assert is_same, f'python -c "{command}" > configs/{SCHEMA.name}'


def test_the_schema_lists_the_top_level_keys_and_allows_no_unknown_key() -> None:
    tree = json.loads(SCHEMA.read_bytes())
    assert list(tree["properties"]) == list(Config.model_fields)
    for section in [tree, *tree["$defs"].values()]:
        assert section["additionalProperties"] is False
    clean = tree["$defs"]["DataConfig"]["properties"]["clean"]
    assert clean["items"]["enum"] == list(CLEAN)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_names_the_shipped_schema(path: Path) -> None:
    assert named_by(path).resolve() == SCHEMA.resolve()


def test_saving_a_config_writes_the_schema_beside_it_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    saved = tmp_path / "elsewhere" / "saved.yaml"
    config = load(write_task(tmp_path))
    save(config, saved)
    copy = named_by(saved)
    assert copy == saved.with_name(config_file.SCHEMA_FILE)
    assert copy.read_bytes() == SCHEMA.read_bytes()
    copy.write_text('{"title": "A config of mtrain", "properties": {}}')  # of an older version
    save(config, saved)
    assert copy.read_bytes() == SCHEMA.read_bytes()
    assert sorted(path.name for path in saved.parent.iterdir()) == [copy.name, saved.name]


@pytest.mark.parametrize("own", ['{"title": "Mine"}', "[1]", "mine"])
def test_a_file_with_the_name_of_the_schema_that_is_no_schema_of_mtrain_is_kept(
    tmp_path: Path, own: str
) -> None:
    other, saved = tmp_path / "config.schema.json", tmp_path / "saved.yaml"
    other.write_text(own)
    config = load(write_task(tmp_path))
    save(config, saved)
    assert other.read_text() == own
    assert "$schema" not in saved.read_text("utf-8")
    assert load(saved) == config
    saved.write_text(saved.read_text("utf-8").replace(f"mtrain {__version__}", "mtrain 99.0.0"))
    with pytest.raises(ConfigError, match=r"was written by mtrain 99\.0\.0"):
        load(saved)


def test_a_schema_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(WriteError, match=r"file/config.schema.json: cannot be written: "):
        save(load(write_task(tmp_path)), tmp_path / "file" / "saved.yaml")


def wrong(directory: Path, key: str, value: object) -> Tree:
    tree = tiny_tree(directory)
    *sections, last = key.split(".")
    place = tree
    for section in sections:
        place = place[section]
    place[last] = value
    return tree


def test_the_schema_accepts_shipped_configs_and_rejects_invalid_ones(
    tmp_path: Path,
) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    tree = json.loads(SCHEMA.read_bytes())
    check = jsonschema.validators.validator_for(tree)(tree)
    for path in SHIPPED:
        check.validate(load(path).model_dump(exclude_unset=True))  # without the defaults
    check.validate(load(write_task(tmp_path)).model_dump())
    for key, value in (
        ("sed", 1),
        ("model.norm", "both"),
        ("training.lr", 0),
        ("data.clean", ["blank"]),
        ("data.train", {"src": ["a"]}),
        ("decoding.beam", "5"),
    ):
        with pytest.raises(jsonschema.ValidationError):
            check.validate(wrong(tmp_path, key, value))
