"""Text fitted to the columns of a terminal, by the width of its characters."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import TextIO


def visible(text: str) -> str:
    """Replace unprintable characters by escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def num_columns(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    return sum(map(_width, text))


def shortened(text: str, width: int) -> str:
    """Cut text to `width` columns; a cut text ends in "..."."""
    if _num_fitting(text, width) == len(text):
        return text
    return text[: _num_fitting(text, width - 3)] + "..."


def wrapped(text: str, width: int, max_rows: int) -> list[str]:
    """Break text between words, or within a word that is too long; cut it after `max_rows`."""
    rows: list[str] = []
    while text and len(rows) < max_rows - 1:
        end = _num_fitting(text, width)
        if end < len(text):
            end = text.rfind(" ", 1, end + 1) if " " in text[1 : end + 1] else max(end, 1)
        rows.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*rows, shortened(text, width)] if text else rows


def fitted(text: str, stream: TextIO) -> str:
    """Wrap text to the width of the terminal `stream`; return it unchanged elsewhere.

    Text in backquotes and file names are not broken, so that they can be copied; any other word
    that is too long, such as a line of Chinese, is broken where the row ends. If the text begins
    with a label and two spaces, further rows are indented by their width.
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        columns = 0
    if columns == 0:  # no terminal, or one of unknown width
        return text
    protected = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", "\0"), text.rstrip())
    label = re.match(r" *\w+  +", protected)
    indent = " " * (label.end() if label and label.end() < columns // 2 else 0)
    return "\n".join(_rows(protected, columns, indent)).replace("\0", " ")


def _rows(text: str, columns: int, indent: str) -> list[str]:
    """Return text in rows of `columns`, all but the first after `indent`."""

    def is_too_long(row: str) -> bool:
        return _num_fitting(row, columns) < len(row)

    rows, row = [], ""
    for gap, word in re.findall(r"( *)([^ ]+)", text):
        is_whole = "\0" in word or "/" in word
        longer = row + gap + word
        if is_too_long(longer) and row and (is_whole or not is_too_long(indent + word)):
            rows.append(row)
            longer = indent + word
        while is_too_long(longer) and not is_whole:
            end = max(_num_fitting(longer, columns), len(indent) + 1)
            rows.append(longer[:end])
            longer = indent + longer[end:]
        row = longer
    return [*rows, row]


def _num_fitting(text: str, width: int) -> int:
    """Return how many characters of text fit into `width` columns."""
    for position, character in enumerate(text):
        width -= _width(character)
        if width < 0:
            return position
    return len(text)


def _width(character: str) -> int:
    """Return the columns of a character: 2 if East Asian wide, 0 if combining, else 1."""
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def count(number: int, noun: str) -> str:
    """Format a number and its noun, in the plural unless it is 1."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"
