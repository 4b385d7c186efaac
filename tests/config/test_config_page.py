"""docs/config.md lists all keys of the config, in their order, with their defaults."""

import re
from collections.abc import Iterator

import yaml
from tasks import REPOSITORY

from mtrain.config.corpora import Section
from mtrain.config.sections import Config

PAGE = REPOSITORY / "docs" / "config.md"


def keys_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each key and its default; `...` where there is none."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ... if field.is_required() else field.default


def test_the_page_of_the_config_has_all_keys_in_their_order_with_their_defaults() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (?:`(.*?)`)? *\|", PAGE.read_text("utf-8"), re.MULTILINE)
    found = [(key, yaml.safe_load(default) if default else ...) for key, default in rows]
    wanted = [*keys_of(Config)]
    assert [key for key, _ in found] == [key for key, _ in wanted]
    for (key, default), (_, expected) in zip(found, wanted, strict=True):
        assert (float(default) if isinstance(expected, float) else default) == expected, key
