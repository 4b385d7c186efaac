"""Heat maps whose rows and columns are pieces, each label in its place whatever its script.

Knows matplotlib, and nothing of models or run folders. Lengths are inches unless they say
otherwise.
"""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.textpath import text_to_path

Floats = npt.NDArray[np.floating[Any]]

_NOTE_PT, _TITLE_PT = 9.0, 12.0
_FONT = "DejaVu Sans"  # comes with matplotlib
_OTHER_FONTS = (  # for the scripts that it lacks, where they are installed
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK TC"),
    *("PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic", "WenQuanYi Zen Hei"),
    *("Noto Sans Devanagari", "Noto Sans Bengali", "Noto Sans Thai", "Arial Unicode MS"),
)
_WORD_MARK, _SPACE_SIGN = "\u2581", "\u2423"
_MAX_LABEL = 20  # characters
_MAX_WIDTH, _MAX_PANEL, _MAX_CELL = 13.6, 8.0, 0.4
_MIN_WIDTH, _MIN_HEIGHT = 2.1, 1.5  # room for the names of the axes
_GAP, _PANEL_TITLE, _AXIS_NAME, _COLOUR_BAR, _LINE = 0.25, 0.3, 0.3, 1.1, 0.19
_CROWDED = "Where pieces are too many for their names, only every second, third, ... is named."


def fonts() -> list[str]:
    """Return the fonts to draw with: the first that has a character draws it."""
    installed = set(fontManager.get_font_names())
    return [_FONT, *(name for name in _OTHER_FONTS if name in installed)]


@cache
def _characters(font: str) -> frozenset[int]:
    return frozenset(get_font(findfont(font)).get_charmap())


def readable(text: str) -> str:
    """Return text that can be drawn: what no font has, or nobody can see, is escaped."""
    known = frozenset[int]().union(*(_characters(font) for font in fonts()))
    return "".join(
        char if ord(char) in known and _is_visible(char) else _escape(char) for char in text
    )


def _is_visible(char: str) -> bool:
    return char == " " or unicodedata.category(char)[0] not in "CZ"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def label(piece: str) -> str:
    """Return a short name for a piece; the mark of a word's start becomes an open box."""
    text = readable(piece.replace(_WORD_MARK, _SPACE_SIGN))
    return text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 1] + "…"


@dataclass(frozen=True)
class Panels:
    """Maps of equal shape [rows, columns], whose rows and columns are pieces."""

    titles: Sequence[str]
    maps: Sequence[Floats]
    rows: Sequence[str]
    columns: Sequence[str]
    row_name: str
    column_name: str
    value_name: str


class Scale(NamedTuple):
    """The size of the labels, how far they are apart, and how small a panel may become."""

    label_pt: float
    pitch: float
    least_panel: float


MANY, ALONE = Scale(7.5, 0.128, 2.4), Scale(9.0, 0.16, 4.0)


def draw_panels(title: str, notes: Sequence[str], panels: Panels, scale: Scale) -> Figure:
    """Draw the maps in a grid, under a title and notes.

    Cells that are exactly zero stay white. The colours of all maps mean the same.
    """
    layout = _Layout(panels, scale, [wrapped for note in notes for wrapped in _wrap(note)])
    figure = Figure(figsize=(layout.full_width, layout.full_height))
    _write_header(figure, title, layout)
    most = max(float(one.max()) for one in panels.maps)
    for index, one in enumerate(panels.maps):
        row, column = divmod(index, layout.across)
        axes = _add_axes(figure, layout, layout.panel(row, column))
        image = axes.imshow(
            np.ma.masked_equal(one, 0.0), aspect="auto", vmin=0.0, vmax=most, cmap="cividis"
        )
        axes.set_title(panels.titles[index], size=_NOTE_PT)
        axes.grid(visible=False)
        axes.set_xlabel(panels.column_name)
        _label_ticks(axes.xaxis, layout.columns, layout.column.stride, 90)
        if column == 0:
            axes.set_ylabel(panels.row_name)
        _label_ticks(axes.yaxis, layout.rows if column == 0 else [], layout.row.stride, 0)
        axes.tick_params(length=0, labelsize=scale.label_pt)
    bar = _add_axes(figure, layout, layout.bar())
    figure.colorbar(image, cax=bar, label=panels.value_name)
    return figure


class _AxisLabels(NamedTuple):
    """One side of a panel: its length, and which labels have room: every `stride`-th."""

    length: float
    stride: int

    @staticmethod
    def fit(count: int, longest: int, scale: Scale, least: float) -> _AxisLabels:
        """Give cells the room of a label, more to few of them, less to very many."""
        cell = max(min(scale.pitch, _MAX_PANEL / count), scale.least_panel / longest)
        length = max(count * min(cell, _MAX_CELL), least)
        return _AxisLabels(length, math.ceil(round(scale.pitch * count / length, 6)))


@dataclass(frozen=True)
class _Box:
    """A place on the page, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float


class _Layout:
    """Where everything stands on a page of panels."""

    def __init__(self, panels: Panels, scale: Scale, notes: list[str]) -> None:
        self.scale = scale
        self.rows = [label(piece) for piece in panels.rows]
        self.columns = [label(piece) for piece in panels.columns]
        longest = max(len(self.rows), len(self.columns))
        self.row = _AxisLabels.fit(len(self.rows), longest, scale, _MIN_HEIGHT)
        self.column = _AxisLabels.fit(len(self.columns), longest, scale, _MIN_WIDTH)
        self.width, self.height = self.column.length, self.row.length
        self.notes = notes if self.row.stride == self.column.stride == 1 else [*notes, _CROWDED]
        self.left = 0.15 + _AXIS_NAME + _widest(self.rows, scale.label_pt)
        self.under = 0.1 + _AXIS_NAME + _widest(self.columns, scale.label_pt)
        room = _MAX_WIDTH - self.left - _COLOUR_BAR
        fitting = min(max(int(room // (self.width + _GAP)), 1), 4)
        self.down = math.ceil(len(panels.maps) / fitting)
        self.across = math.ceil(len(panels.maps) / self.down)
        self.top = 0.45 + _LINE * len(self.notes)

    @cached_property
    def full_width(self) -> float:
        panels = self.left + self.across * (self.width + _GAP) + _COLOUR_BAR
        notes = 0.3 + _widest(self.notes, _NOTE_PT)
        return max(panels, notes, 7.0)

    @property
    def full_height(self) -> float:
        return self.top + self.down * (_PANEL_TITLE + self.height + self.under)

    def panel(self, row: int, column: int) -> _Box:
        x = self.left + column * (self.width + _GAP)
        y = self.top + _PANEL_TITLE + row * (_PANEL_TITLE + self.height + self.under)
        return _Box(x, y, self.width, self.height)

    def bar(self) -> _Box:
        x = self.left + self.across * (self.width + _GAP)
        return _Box(x, self.top + _PANEL_TITLE, 0.15, min(self.height, 2.5))


def _add_axes(figure: Figure, layout: _Layout, box: _Box) -> Axes:
    width, height = layout.full_width, layout.full_height
    bottom = 1 - (box.y + box.height) / height
    return figure.add_axes((box.x / width, bottom, box.width / width, box.height / height))


def _write_header(figure: Figure, title: str, layout: _Layout) -> None:
    x, unit = 0.15 / layout.full_width, 1 / layout.full_height
    figure.text(x, 1 - 0.12 * unit, title, size=_TITLE_PT, va="top")
    for number, line in enumerate(layout.notes):
        figure.text(x, 1 - (0.42 + _LINE * number) * unit, line, size=_NOTE_PT, va="top")


def _label_ticks(axis: Axis, labels: Sequence[str], stride: int, rotation: int) -> None:
    axis.set_ticks(range(0, len(labels), stride), labels[::stride], rotation=rotation)


def _wrap(note: str) -> list[str]:
    """Break a line of notes where it would make a page wide."""
    return textwrap.wrap(readable(note), 110, max_lines=3, placeholder=" …")


def _widest(lines: Sequence[str], size_pt: float) -> float:
    """Return the width of the longest line, and the little that rounding to pixels may add."""
    font = FontProperties(family=fonts(), size=size_pt)
    widths = (
        text_to_path.get_text_width_height_descent(line, font, False)[0] / 72 for line in lines
    )
    return 1.03 * max(widths, default=0.0)
