"""Draws the pictures of a run, as PNG and SVG. What they show comes from `pictures`.

Colours are cividis and those of Okabe and Ito, which differ in brightness too; lines also differ
in style. Nothing here touches pyplot, which remembers figures.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mtrain.io.atomic import whole_file
from mtrain.plot import heatmaps
from mtrain.plot.collect import (
    AttentionPicture,
    Batches,
    CheckpointMark,
    Curve,
    Curves,
    Keeps,
    Masks,
    Pictures,
    PositionTable,
    SetLengths,
    gather,
    read_curves,
)
from mtrain.plot.heatmaps import Panels, draw_panels, readable
from mtrain.run.run_dir import RunDir

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
_KEPT, _LEFT_OUT = "#00336f", "#e8d868"  # near the two ends of cividis
_MAX_GRID = 50  # cells of a side between which lines are drawn
_MAX_ROWS = 24  # sentences of a batch whose masks are drawn
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
_STEP = "step (updates)"
_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.titlesize": 12,
    "font.size": 9,
    "grid.color": "#dddddd",
    "image.cmap": "cividis",
    "image.interpolation": "none",
    "legend.fontsize": 8,
    "savefig.dpi": 130,
    "svg.hashsalt": "mtrain",
    "text.parse_math": False,  # a dollar is a dollar
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


class Page(NamedTuple):
    """A picture's name, and what draws it."""

    name: str
    draw: Callable[[], Figure]


def draw(
    run: RunDir, sentence: str | None, directory: Path, warn: Callable[[str], None]
) -> Iterator[Path]:
    """Draw what can be drawn of a run into `directory`; yield each file once it is written.

    Raises:
        UserError: if nothing can be drawn, or the files cannot be written.
    """
    pictures = gather(run, sentence)
    for line in pictures.left_out:
        warn(line)
    for page in _pages(pictures, run.path.resolve().name):
        yield from _write(page, directory)


def draw_progress(run: RunDir, directory: Path) -> Iterator[Path]:
    """Draw only how the training goes, from what is logged so far.

    Raises:
        UserError: if nothing was logged yet, or the files cannot be written.
    """
    curves, smoothing = read_curves(run, []), run.load_config().training.label_smoothing
    name = run.path.resolve().name
    yield from _write(Page("curves", partial(draw_curves, curves, name, smoothing)), directory)


def _write(page: Page, directory: Path) -> Iterator[Path]:
    for suffix, drawn in _encode(page).items():
        path = directory / f"{page.name}.{suffix}"
        with whole_file(path) as beside:
            beside.write_bytes(drawn)
        yield path


def _encode(page: Page) -> dict[str, bytes]:
    """Return the picture as PNG and as SVG: the same bytes whenever it is drawn."""
    with matplotlib.style.context(["default", _STYLE | {"font.family": heatmaps.fonts()}]):
        figure, png, svg = page.draw(), io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", pil_kwargs={"optimize": True})
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return {"png": png.getvalue(), "svg": svg.getvalue()}


def _pages(pictures: Pictures, run_name: str) -> Iterator[Page]:
    config, found = pictures.config, pictures.attention
    if pictures.curves:
        smoothing = config.training.label_smoothing
        yield Page("curves", partial(draw_curves, pictures.curves, run_name, smoothing))
    if found:
        yield Page("alignment", partial(draw_alignment, found))
        for layer in range(len(found.encoder)):
            yield Page(f"attention_encoder_{layer + 1}", partial(draw_encoder, found, layer))
        for layer in range(len(found.decoder)):
            yield Page(f"attention_decoder_{layer + 1}", partial(draw_decoder, found, layer))
            yield Page(f"attention_cross_{layer + 1}", partial(draw_cross, found, layer))
    if pictures.positions:
        yield Page("positions", partial(draw_positions, pictures.positions))
    if pictures.masks:
        yield Page("masks", partial(draw_masks, pictures.masks, config.model.attention_window))
    if pictures.lengths:
        yield Page("lengths", partial(draw_lengths, pictures.lengths))
    if pictures.batches:
        yield Page("batch", partial(draw_batch, pictures.batches, config.training.batch_tokens))


def draw_curves(curves: Curves, name: str, smoothing: float) -> Figure:
    """Draw losses, BLEU, learning rate and speed by step, and mark the chosen checkpoint."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    figure.suptitle(readable(f"Training of {name}"))
    (loss, bleu), (lr, speed) = figure.subplots(2, 2, sharex=True)
    _line(loss, curves.loss, BLUE, "-", "training batches")
    _line(loss, curves.valid_loss, RED, "--", "validation set")
    _line(bleu, curves.valid_bleu, RED, "--", "validation set, greedy search")
    _line(lr, curves.lr, BLACK, "-", None)
    _line(speed, curves.tgt_tokens_per_s, GREEN, "-", None)
    _name(loss, f"Loss (label smoothing {smoothing:g})", _STEP, "loss (nats per target token)")
    _name(bleu, "Quality at each validation", _STEP, "BLEU (points of 100)")
    _name(lr, "Learning rate", _STEP, "learning rate (no unit)")
    _name(speed, "Speed", _STEP, "speed (target tokens per second)")
    for axes in (loss, bleu, lr, speed):
        axes.xaxis.set_major_formatter(_THOUSANDS)
        axes.tick_params(labelbottom=True)
    speed.yaxis.set_major_formatter(_THOUSANDS)
    if curves.mark:
        _draw_mark(loss, bleu, curves.mark)
    for axes in (bleu, lr, speed):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    loss.set_xlim(left=0)
    for axes, where in ((loss, "upper right"), (bleu, "lower right")):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc=where)
    for axes, curve, what in (
        (bleu, curves.valid_bleu, "no validation yet"),
        (lr, curves.lr, "no logged step yet"),
        (speed, curves.tgt_tokens_per_s, "no logged step yet"),
    ):
        if not len(curve.steps):
            axes.text(0.5, 0.5, what, ha="center", transform=axes.transAxes)
    return figure


def _line(axes: Axes, curve: Curve, color: str, style: str, label: str | None) -> None:
    """Draw a curve; one of few points shows each of them."""
    marker = "o" if len(curve.steps) <= 30 else ""
    if len(curve.steps):
        axes.plot(*curve, style + marker, color=color, label=label, markersize=4)


def _draw_mark(loss: Axes, bleu: Axes, mark: CheckpointMark) -> None:
    for axes in (loss, bleu):
        label = mark.text if axes is loss else None
        if mark.first_step == mark.last_step:
            axes.axvline(mark.last_step, color=ORANGE, linestyle=":", label=label, linewidth=2)
        else:
            axes.axvspan(mark.first_step, mark.last_step, color=ORANGE, alpha=0.4, label=label)
    bleu.plot(
        [mark.last_step],
        [mark.bleu],
        "*",
        color=ORANGE,
        label=f"{mark.text}, BLEU {mark.bleu:.2f}",
        markersize=13,
        markeredgecolor=BLACK,
    )


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _notes(attention: AttentionPicture, remark: str) -> list[str]:
    return [
        f"source ({attention.origin}): {attention.source}",
        f"translation (the model's own): {attention.translation}",
        remark + " ␣ marks the start of a word.",
    ]


_ROWS_SUM = "Each row sums to 1; white cells are exactly 0."


def draw_encoder(attention: AttentionPicture, layer: int) -> Figure:
    """Draw what each head of an encoder layer attends to."""
    maps, src = attention.encoder, attention.src
    title = f"Encoder self-attention, layer {layer + 1} of {len(maps)}"
    panels = _heads(maps[layer], src, src, "source piece", "attends to source piece")
    return draw_panels(title, _notes(attention, _ROWS_SUM), panels, heatmaps.MANY)


def draw_decoder(attention: AttentionPicture, layer: int) -> Figure:
    """Draw what each head of a decoder layer attends to in the target so far."""
    maps, rows, columns = attention.decoder, attention.tgt_out, attention.tgt_in
    title = f"Decoder self-attention, layer {layer + 1} of {len(maps)}"
    panels = _heads(
        maps[layer], rows, columns, "piece being written", "attends to piece written so far"
    )
    return draw_panels(title, _notes(attention, _ROWS_SUM), panels, heatmaps.MANY)


def draw_cross(attention: AttentionPicture, layer: int) -> Figure:
    """Draw what each head of a decoder layer attends to in the source."""
    maps, rows, columns = attention.cross, attention.tgt_out, attention.src
    title = f"Cross-attention, layer {layer + 1} of {len(maps)}"
    panels = _heads(maps[layer], rows, columns, "piece being written", "attends to source piece")
    return draw_panels(title, _notes(attention, _ROWS_SUM), panels, heatmaps.MANY)


def _heads(
    maps: heatmaps.Floats, rows: list[str], columns: list[str], row_name: str, column_name: str
) -> Panels:
    titles = [f"head {head + 1}" for head in range(len(maps))]
    value_name = "attention weight\n(share of 1)"
    return Panels(titles, list(maps), rows, columns, row_name, column_name, value_name)


def draw_alignment(attention: AttentionPicture) -> Figure:
    """Draw the mean cross-attention, with a ring around the largest weight of each row."""
    mean = attention.alignment()
    remark = "Each row sums to 1; a ring marks its largest weight."
    panels = Panels(
        [f"mean of {attention.num_cross_heads} heads"],
        [mean],
        attention.tgt_out,
        attention.src,
        "piece being written",
        "source piece",
        "mean attention weight\n(share of 1)",
    )
    title = "Alignment: cross-attention, mean of all heads of all layers"
    figure = draw_panels(title, _notes(attention, remark), panels, heatmaps.ALONE)
    axes, largest, rows = figure.axes[0], mean.argmax(1), np.arange(len(mean))
    extent = axes.get_window_extent()
    cell_px = min(extent.height / mean.shape[0], extent.width / mean.shape[1])
    size_pt = min(7.0, 0.6 * cell_px * 72 / figure.dpi)
    for color, width in ((BLACK, 2.5), ("white", 1.2)):  # seen on any ground
        axes.plot(largest, rows, "o", mfc="none", mec=color, mew=width, ms=size_pt)
    return figure


def draw_positions(tables: Sequence[PositionTable]) -> Figure:
    """Draw each table, the products of all pairs of its rows, and these by distance."""
    figure = Figure(figsize=(14, 0.6 + 4.2 * len(tables)), layout="constrained")
    figure.suptitle("Positional encoding, as it is added to the embeddings")
    for row, (name, values, products, by_distance) in enumerate(
        (table.name, table.table, table.products(), table.products_by_distance())
        for table in tables
    ):
        places = [figure.add_subplot(len(tables), 3, 3 * row + column) for column in (1, 2, 3)]
        _draw_matrix(figure, places[0], values, "auto", "PE(i), no unit")
        title = f"PE ({name}): {values.shape[0]} positions x {values.shape[1]} dimensions"
        _name(places[0], title, "dimension (index)", "position i (tokens)")
        _draw_matrix(figure, places[1], products, "equal", "PE(i)·PE(j), no unit")
        title = "Products PE(i)·PE(j) of all pairs"
        _name(places[1], title, "position j (tokens)", "position i (tokens)")
        distances = np.arange(len(products))
        mean, low, high = by_distance
        if np.allclose(low, high):
            places[2].plot(distances, mean, color=BLUE, label="the same for every i")
        else:
            places[2].fill_between(distances, low, high, color=SKY, alpha=0.5, label="range over i")
            places[2].plot(distances, mean, color=BLUE, label="mean over i")
        places[2].legend(loc="upper right")
        title = "Products PE(i)·PE(i + k) by distance"
        _name(places[2], title, "distance k (tokens)", "PE(i)·PE(i + k), no unit")
    return figure


def _draw_matrix(
    figure: Figure,
    axes: Axes,
    values: heatmaps.Floats,
    aspect: Literal["auto", "equal"],
    name: str,
) -> None:
    image = axes.imshow(values, aspect=aspect)
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label=name, shrink=0.8).ax.grid(visible=False)


def draw_masks(masks: Masks, window: int | None) -> Figure:
    """Draw the padding masks of a batch, and what the two self-attentions of it may see."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    figure.suptitle(
        f"Keep-masks of training batch {masks.number}, the most padded of {masks.num_batches}"
    )
    (source, target), (encoder, decoder) = figure.subplots(2, 2)
    count = len(masks.src_keep_BS)
    shown = f"{min(count, _MAX_ROWS)} of {count} sentences"
    first = max(min(masks.row - _MAX_ROWS // 2, count - _MAX_ROWS), 0)
    for axes, keep, side in (
        (source, masks.src_keep_BS, "source"),
        (target, masks.tgt_keep_BT, "target"),
    ):
        _draw_keep(axes, keep[first : first + _MAX_ROWS], first)
        name = f"position in the {side} (tokens)"
        _name(axes, f"Padding, {side}: {shown}", name, "sentence of the batch (number)")
    near = f", at most {window} away" if window is not None else ""
    _draw_keep(encoder, masks.encoder_SS, 0)
    title = f"Encoder self-attention, sentence {masks.row + 1}: no padding{near}"
    _name(encoder, title, "source position that is seen (token)", "source position (token)")
    _draw_keep(decoder, masks.decoder_TT, 0)
    title = f"Decoder self-attention, every sentence: nothing later{near}"
    _name(decoder, title, "target position that is seen (token)", "target position (token)")
    _add_key(figure, "kept: takes part", "left out")
    return figure


def _draw_keep(axes: Axes, keep: Keeps, first: int) -> None:
    """Draw a mask [R, C] whose row 0 is number `first` + 1; columns count from 1."""
    rows, columns = keep.shape
    extent = (0.5, columns + 0.5, first + rows + 0.5, first + 0.5)
    colours = ListedColormap([_LEFT_OUT, _KEPT])
    axes.imshow(keep, aspect="auto", cmap=colours, vmin=0, vmax=1, extent=extent)
    axes.grid(visible=False)
    axes.tick_params(which="minor", length=0)
    for axis, start, count in ((axes.xaxis, 0, columns), (axes.yaxis, first, rows)):
        if max(rows, columns) <= _MAX_GRID:  # lines between the cells
            axis.set_ticks(np.arange(start + 1.5, start + count).tolist(), minor=True)
            axis.grid(which="minor", color="white", linewidth=0.4)
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))


def _add_key(figure: Figure, kept: str, left_out: str) -> None:
    patches = [
        Patch(facecolor=colour, label=label, edgecolor=BLACK, linewidth=0.5)
        for colour, label in ((_KEPT, kept), (_LEFT_OUT, left_out))
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=2)


def draw_lengths(sets: Sequence[SetLengths]) -> Figure:
    """Draw how long the sentences of each corpus are."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle("Lengths of the corpora")
    longest = max(int(max(one.src.max(), one.tgt.max())) for one in sets)
    bins = np.arange(0.5, longest + 1.5, max(1, longest // 60))
    bins = np.append(bins, bins[-1] + max(1, longest // 60))
    both = figure.subplots(1, 2, sharey=True)
    for axes, side in zip(both, ("source", "target"), strict=True):
        colours = cycle((BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK))
        for one, colour, style in zip(sets, colours, cycle(("-", "--", "-.", ":"))):
            lengths = one.src if side == "source" else one.tgt
            counts, _ = np.histogram(lengths, bins)
            label = (
                f"{one.name}: {len(lengths):,} pairs, median {np.median(lengths):.0f}, "
                f"longest {lengths.max()}"
            )
            share = 100 * counts / len(lengths)
            axes.stairs(share, bins, color=colour, linestyle=style, label=label, linewidth=1.5)
        axes.legend(loc="upper right")
        name = f"length (tokens, eos included; bars of {bins[1] - bins[0]:.0f})"
        _name(axes, side.capitalize(), name, "share of the pairs (%)")
    both[0].set_ylim(0, both[0].get_ylim()[1] * (1 + 0.06 * len(sets)))  # for the legends
    return figure


def draw_batch(batches: Batches, budget: int) -> Figure:
    """Draw one batch cell by cell, and tokens against padding of all batches."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    whole = "the first epoch" if batches.is_whole_epoch else "the beginning of the first epoch"
    figure.suptitle(
        f"Batches of {whole}: {len(batches.sizes):,}, {batches.padding:.1%} padding; "
        f"budget {budget:,} tokens on the longer side, padding included"
    )
    grid = figure.add_gridspec(2, 2)
    first, keeps = batches.first, ("src_keep_BS", "tgt_keep_BT")
    for column, (side, name) in enumerate(zip(("source", "target"), keeps, strict=True)):
        axes, keep = figure.add_subplot(grid[0, column]), getattr(first, name).numpy()
        _draw_keep(axes, keep, 0)
        title = f"First batch, {side}: {keep.sum():,} tokens, {(~keep).sum():,} of padding"
        _name(axes, title, f"position in the {side} (tokens)", "sentence of the batch (number)")
    _draw_sizes(figure.add_subplot(grid[1, :]), batches)
    _add_key(figure, "token", "padding")
    return figure


def _draw_sizes(axes: Axes, batches: Batches) -> None:
    """Draw the cells of each batch, those of the shortest sentences first."""
    sizes = sorted(batches.sizes, key=lambda size: max(size.src_width, size.tgt_width))
    edges = np.arange(len(sizes) + 1) + 0.5
    tokens = np.array([size.num_tokens for size in sizes])
    cells = np.array([size.num_cells for size in sizes])
    axes.stairs(tokens, edges, fill=True, color=_KEPT)
    axes.stairs(cells, edges, baseline=tokens, fill=True, color=_LEFT_OUT)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    axes.xaxis.set_major_formatter(_THOUSANDS)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(x=0.01)
    name = "batch (number, shortest sentences first)"
    _name(axes, "Tokens and padding of each batch", name, "cells of both sides (tokens)")
