"""Tables of text with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.io.text_width import num_columns


def format_table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return one line for each row; columns are as wide as their widest cell, two spaces apart.

    Args:
        rows: the cells, as many in each row as `align` has characters.
        align: for each column, "<" for text and ">" for numbers.
    """
    widths = [max(map(num_columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for cell, width, side in zip(row, widths, align, strict=True):
            padding = " " * (width - num_columns(cell))
            cells.append(padding + cell if side == ">" else cell + padding)
        lines.append("  ".join(cells).rstrip())
    return lines
