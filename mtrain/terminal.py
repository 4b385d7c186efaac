"""Text for a terminal of so many columns, whatever it holds. Knows no other room."""

from __future__ import annotations

import os
import re
import textwrap
import unicodedata
from typing import TextIO


def visible(text: str) -> str:
    """Write what cannot be seen as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def shortened(text: str, width: int) -> str:
    """Cut text to as many columns."""
    if _num_fitting(text, width) == len(text):
        return text
    return text[: _num_fitting(text, width - 3)] + "..."


def wrapped(text: str, width: int, max_rows: int) -> list[str]:
    """Break text between words, or within one that is too long; cut what is over `max_rows`."""
    rows: list[str] = []
    while text and len(rows) < max_rows - 1:
        end = _num_fitting(text, width)
        if end < len(text):
            end = text.rfind(" ", 1, end + 1) if " " in text[1 : end + 1] else max(end, 1)
        rows.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*rows, shortened(text, width)] if text else rows


def fitted(text: str, stream: TextIO) -> str:
    """Break text between words where a line would be too long for the terminal, if it is one.

    What stands in backquotes stays whole, so that a command can be copied.
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        columns = 0
    if columns == 0:  # no terminal, or one that does not say
        return text
    kept = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
    rows = textwrap.wrap(kept, columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(rows).replace("\0", " ")


def _num_fitting(text: str, width: int) -> int:
    """Return how many characters of text fit into as many columns."""
    for place, character in enumerate(text):
        width -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if width < 0:
            return place
    return len(text)
