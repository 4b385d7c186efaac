"""Write the schema of the config into the package: `python tests/make_schema.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mtrain
from mtrain.config.json_schema import SCHEMA_FILE
from mtrain.config.sections import Config

PATH = Path(mtrain.__file__).with_name(SCHEMA_FILE)


def schema() -> str:
    """Return the schema as it should be: pydantic's, without a title for every key."""
    tree = untitled(Config.model_json_schema())
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of mtrain",
    }
    return json.dumps(head | tree, indent=1) + "\n"


def untitled(node: Any) -> Any:
    """Drop the titles, which only repeat the keys; a key of this name would be a mapping."""
    if isinstance(node, dict):
        return {
            key: untitled(value)
            for key, value in node.items()
            if key != "title" or not isinstance(value, str)
        }
    return [untitled(item) for item in node] if isinstance(node, list) else node


if __name__ == "__main__":
    PATH.write_text(schema(), encoding="utf-8")
