"""The JSON schema with which editors complete and check a config.

It is written into the folder of every config that mtrain writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtrain.config.sections import Config

SCHEMA_FILE = "config.schema.json"
HEAD = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"  # the first line of a config


def schema() -> str:
    """Return the JSON schema of `Config` without pydantic's titles, which repeat the keys."""
    tree = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of mtrain",
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


def put_beside(config_path: Path) -> str:
    """Write the schema into a config's folder, and return the config's first line.

    Raises:
        OSError: if the schema cannot be written.
    """
    path, text = config_path.with_name(SCHEMA_FILE), schema().encode()
    if not path.is_file() or path.read_bytes() != text:
        beside = path.with_name(f".{path.name}.tmp")
        try:
            beside.write_bytes(text)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    return HEAD
