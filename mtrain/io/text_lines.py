"""Split a text into lines to translate, and join their translations."""

from __future__ import annotations

import re
from collections.abc import Sequence

LINE_BREAK = re.compile(r"\r?\n")


class TextLines:
    """The lines of a text."""

    def __init__(self, text: str) -> None:
        self.lines = LINE_BREAK.split(text)  # without their line breaks, indents included
        self._breaks = [*LINE_BREAK.findall(text), ""]

    def join(self, translations: Sequence[object]) -> str:
        """Join the `str` of each line's translation; keep line breaks, and spaces around lines."""
        written = []
        for line, translation, line_break in zip(
            self.lines, translations, self._breaks, strict=True
        ):
            indent = line[: len(line) - len(line.lstrip())]
            trailing = line[len(line.rstrip()) :] if line.strip() else ""
            written.append(f"{indent}{translation}{trailing}{line_break}")
        return "".join(written)
