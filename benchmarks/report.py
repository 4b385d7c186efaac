"""What the scripts that compare systems print: progress on stderr, and a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(values: Sequence[float], pattern: str) -> str:
    """Return the median of some values, and in brackets the smallest and the largest."""
    low, middle, high = (format(x, pattern) for x in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"


def print_table(rows: list[list[str]], is_markdown: bool) -> None:
    """Print rows of cells, headings first; a row with no more than two cells spans the others."""
    if is_markdown:
        rows = [rows[0], ["---", *["--:"] * (len(rows[0]) - 1)], *rows[1:]]
        for cells in rows:
            print(f"| {' | '.join(cells)} |")
        return
    whole = [cells for cells in rows if any(cells[2:])]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    for cells in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        print("  ".join(padded).rstrip())
