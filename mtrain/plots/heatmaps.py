"""Heat maps whose rows and columns are tokens, laid out by matplotlib's constrained layout.

Independent of models and run folders.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine

from mtrain.io import text_width

Floats = npt.NDArray[np.floating[Any]]

_NOTE_PT = 9.0
_FONT = "DejaVu Sans"  # comes with matplotlib
_OTHER_FONTS = (  # for the scripts that _FONT lacks, if they are installed
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK TC"),
    *("PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic", "WenQuanYi Zen Hei"),
    *("Noto Sans Devanagari", "Noto Sans Bengali", "Noto Sans Tamil", "Noto Sans Telugu"),
    *("Noto Sans Thai", "Loma", "Noto Sans Lao", "Noto Sans Khmer", "Noto Sans Myanmar"),
    *("Noto Serif Tibetan", "Noto Sans Ethiopic", "Arial Unicode MS"),
)
_WORD_MARK, _SPACE_SIGN = "\u2581", "\u2423"
_MAX_LABEL = 20  # characters
_MAX_PANELS_WIDTH, _MAX_PANEL, _MAX_CELL = 11.0, 8.0, 0.4  # inches
_MIN_PANEL_WIDTH, _MIN_PANEL_HEIGHT = 2.1, 1.5  # inches: the axes' names must fit
_MIN_WIDTH = 7.0  # inches, of a figure
_CROWDED = "Where tokens are too many to label each, only every second, third, ... is labelled."


def fonts() -> list[str]:
    """Return the fonts to draw with; a character is drawn in the first font that has it."""
    installed = set(fontManager.get_font_names())
    return [_FONT, *(name for name in _OTHER_FONTS if name in installed)]


@cache
def _code_points(font: str) -> frozenset[int]:
    return frozenset(get_font(findfont(font)).get_charmap())


def readable(text: str) -> str:
    """Return `text` with invisible characters, and those that no font has, as escapes."""
    lacking = without_font(text)
    return "".join(
        char if char.isprintable() and char not in lacking else _escaped(char) for char in text
    )


def without_font(text: str) -> list[str]:
    """Return the different visible characters of `text` that no font has."""
    known = frozenset[int]().union(*(_code_points(font) for font in fonts()))
    return [char for char in dict.fromkeys(text) if char.isprintable() and ord(char) not in known]


def missing_fonts(text: str) -> str | None:
    """Return a message about the characters of `text` that no font has; None if there are none."""
    lacking = without_font(text)
    if not lacking:
        return None
    return (
        f"no font here has {text_width.count(len(lacking), 'character')} of the sentence, such as "
        f"{lacking[0]!r}, which is drawn as {_escaped(lacking[0])}; install "
        "one, such as a Noto Sans"
    )


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def label(token: str) -> str:
    """Return a short label for a token; SentencePiece's word mark becomes an open box."""
    text = readable(token.replace(_WORD_MARK, _SPACE_SIGN))
    return text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 1] + "…"


def draw_heatmaps(
    title: str,
    maps: Mapping[str, Floats],
    tokens: tuple[Sequence[str], Sequence[str]],
    names: tuple[str, str, str],
    notes: Sequence[str],
) -> Figure:
    """Draw maps of equal shape in a grid with one colour scale, under a title and above notes.

    Cells that are exactly zero stay white. Constrained layout fits the axes into a figure, but
    the labels need cells of a given size: the figure is laid out once to measure what surrounds
    the axes, and then resized so that the axes get their size.

    Args:
        title: of the figure.
        maps: each with its title; [rows, columns].
        tokens: of the rows, and of the columns.
        names: of the rows, of the columns, and of the values.
        notes: lines of text.
    """
    num_rows, num_columns = len(tokens[0]), len(tokens[1])
    font_size, pitch, min_panel = (9.0, 0.16, 4.0) if len(maps) == 1 else (7.5, 0.128, 2.4)
    cell = max(min_panel / max(num_rows, num_columns), pitch)
    width, height = (
        min(max(count * min(cell, _MAX_CELL), least), _MAX_PANEL)
        for count, least in ((num_columns, _MIN_PANEL_WIDTH), (num_rows, _MIN_PANEL_HEIGHT))
    )
    x_stride = math.ceil(round(pitch * num_columns / width, 6))
    y_stride = math.ceil(round(pitch * num_rows / height, 6))
    x_ticks, y_ticks = range(0, num_columns, x_stride), range(0, num_rows, y_stride)
    x_labels = [label(tokens[1][index]) for index in x_ticks]
    y_labels = [label(tokens[0][index]) for index in y_ticks]
    down = math.ceil(len(maps) / min(max(int(_MAX_PANELS_WIDTH // width), 1), 4))
    across = math.ceil(len(maps) / down)
    full_width, full_height = max(width * across + 3, _MIN_WIDTH), height * down + 3
    engine = ConstrainedLayoutEngine(w_pad=0.08)
    figure = Figure(figsize=(full_width, full_height), layout=engine)
    figure.suptitle(title, x=0.01, ha="left")
    vmax = max(float(values.max()) for values in maps.values())
    for index, (name, values) in enumerate(maps.items()):
        axes = figure.add_subplot(down, across, index + 1)
        shown = np.ma.masked_equal(values, 0.0)
        image = axes.imshow(shown, aspect="auto", vmin=0.0, vmax=vmax, cmap="cividis")
        axes.set_title(name, size=_NOTE_PT)
        axes.grid(visible=False)
        axes.set_xlabel(names[1])
        axes.set_xticks(x_ticks, x_labels, rotation=90)
        axes.set_yticks([])
        if index % across == 0:
            axes.set_ylabel(names[0])
            axes.set_yticks(y_ticks, y_labels)
        axes.tick_params(length=0, labelsize=font_size)
    bar = figure.colorbar(image, ax=figure.axes, label=names[2], aspect=25 * down, shrink=0.9)
    bar.ax.grid(visible=False)
    lines = [*notes, _CROWDED] if max(x_stride, y_stride) > 1 else notes
    max_chars = int(12 * max(full_width - 1, _MIN_WIDTH))
    wrapped = [
        wrapped_line
        for note in map(readable, lines)
        for wrapped_line in textwrap.wrap(note, max_chars, max_lines=3, placeholder=" …")
    ]
    figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", size=_NOTE_PT, wrap=True)
    engine.execute(figure)
    box = figure.axes[0].get_window_extent()
    figure.set_size_inches(
        max(full_width + across * (width - box.width / figure.dpi), _MIN_WIDTH),
        full_height + down * (height - box.height / figure.dpi),
    )
    return figure
