"""The JSON schema by which editors complete and check a config. Knows no config itself.

The schema is a file of the package, made from `config` by tests/make_schema.py. It is copied beside
every config that mtrain writes, so that the two stay together wherever they go.
"""

from __future__ import annotations

from pathlib import Path

SCHEMA_FILE = "config.schema.json"


def head(schema: str = SCHEMA_FILE) -> str:
    """Return a config's first line, which says where its schema lies, seen from the config."""
    return f"# yaml-language-server: $schema={schema}\n"


def put_beside(config_path: Path) -> str:
    """Copy the schema into a config's folder, and return the config's first line.

    Raises:
        OSError: if it cannot be written.
    """
    text = Path(__file__).with_name(SCHEMA_FILE).read_bytes()
    copy = config_path.with_name(SCHEMA_FILE)
    if not copy.is_file() or copy.read_bytes() != text:
        beside = copy.with_name(f".{copy.name}.tmp")
        try:
            beside.write_bytes(text)
            beside.replace(copy)
        finally:
            beside.unlink(missing_ok=True)
    return head()
