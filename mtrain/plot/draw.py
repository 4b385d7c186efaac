"""Draw the pictures of a run, as PNG and SVG, from the numbers that `collect` reads.

The colours, cividis and those of Okabe and Ito, are told apart in grey and by the colour-blind.
pyplot, which keeps every figure alive, is not used.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mtrain.errors import UserError
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
_KEPT, _MASKED = "#00336f", "#e8d868"  # near the two ends of cividis
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
    """A picture's file name without suffix, and the function that draws it."""

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
    for line in pictures.skipped:
        warn(line)
    for page in _pages(pictures, run.path.resolve().name):
        yield from _write(page, directory)


def draw_progress(run: RunDir, directory: Path) -> Iterator[Path]:
    """Draw only the curves, from what is logged so far.

    Raises:
        UserError: if nothing was logged yet, or the files cannot be written.
    """
    curves, smoothing = read_curves(run, []), run.config.training.label_smoothing
    name = run.path.resolve().name
    yield from _write(Page("curves", partial(draw_curves, curves, name, smoothing)), directory)


def _write(page: Page, directory: Path) -> Iterator[Path]:
    for suffix, drawn in _encode(page).items():
        path = directory / f"{page.name}.{suffix}"
        with whole_file(path) as beside:
            beside.write_bytes(drawn)
        yield path


def _encode(page: Page) -> dict[str, bytes]:
    """Return the picture as PNG and as SVG, with the same bytes on each call."""
    with matplotlib.style.context(["default", _STYLE | {"font.family": heatmaps.fonts()}]):
        figure, png, svg = page.draw(), io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", pil_kwargs={"optimize": True})
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return {"png": png.getvalue(), "svg": svg.getvalue()}


def _pages(pictures: Pictures, run_name: str) -> Iterator[Page]:
    config, attention = pictures.config, pictures.attention
    if pictures.curves:
        smoothing = config.training.label_smoothing
        yield Page("curves", partial(draw_curves, pictures.curves, run_name, smoothing))
    if attention:
        yield Page("alignment", partial(draw_alignment, attention))
        for layer in range(len(attention.encoder)):
            name = f"attention_encoder_{layer + 1}"
            yield Page(name, partial(draw_attention, attention, "encoder", layer))
        for layer in range(len(attention.decoder)):
            for kind in ("decoder", "cross"):
                name = f"attention_{kind}_{layer + 1}"
                yield Page(name, partial(draw_attention, attention, kind, layer))
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


def draw_attention(attention: AttentionPicture, kind: str, layer: int) -> Figure:
    """Draw the attention weights of each head of a layer; `kind` is encoder, decoder or cross."""
    src, tgt_in, tgt_out = attention.src, attention.tgt_in, attention.tgt_out
    if kind == "encoder":
        title, maps, rows, columns = "Encoder self-attention", attention.encoder, src, src
        names = ["source token", "attends to source token"]
    elif kind == "decoder":
        title, maps, rows, columns = "Decoder self-attention", attention.decoder, tgt_out, tgt_in
        names = ["predicted token", "attends to previous token"]
    else:
        title, maps, rows, columns = "Cross-attention", attention.cross, tgt_out, src
        names = ["predicted token", "attends to source token"]
    titles = [f"head {head + 1}" for head in range(len(maps[layer]))]
    value_name = "attention weight\n(fraction of 1)"
    panels = Panels(titles, list(maps[layer]), rows, columns, names[0], names[1], value_name)
    notes = _notes(attention, "Each row sums to 1; white cells are exactly 0.")
    title = f"{title}, layer {layer + 1} of {len(maps)}"
    return draw_panels(title, notes, panels, heatmaps.MANY)


def draw_alignment(attention: AttentionPicture) -> Figure:
    """Draw the mean cross-attention, with a ring around the largest weight of each row."""
    mean = attention.alignment()
    names = ("predicted token", "source token", "mean attention weight\n(fraction of 1)")
    titles = [f"mean of {attention.num_cross_heads} heads"]
    panels = Panels(titles, [mean], attention.tgt_out, attention.src, *names)
    notes = _notes(attention, "Each row sums to 1; a ring marks its largest weight.")
    title = "Alignment: cross-attention, mean of all heads of all layers"
    figure = draw_panels(title, notes, panels, heatmaps.ALONE)
    axes, largest, rows = figure.axes[0], mean.argmax(1), np.arange(len(mean))
    extent = axes.get_window_extent()
    cell_px = min(extent.height / mean.shape[0], extent.width / mean.shape[1])
    size_pt = min(7.0, 0.6 * cell_px * 72 / figure.dpi)
    for color, width in ((BLACK, 2.5), ("white", 1.2)):  # visible on any background
        axes.plot(largest, rows, "o", mfc="none", mec=color, mew=width, ms=size_pt)
    return figure


def _notes(attention: AttentionPicture, remark: str) -> list[str]:
    return [
        f"source ({attention.origin}): {attention.source}",
        f"translation (by this model): {attention.translation}",
        f"{remark} ␣ marks the start of a word.",
    ]


def draw_positions(tables: Sequence[PositionTable]) -> Figure:
    """Draw each table, the dot products of all pairs of its rows, and these by distance."""
    figure = Figure(figsize=(14, 0.6 + 4.2 * len(tables)), layout="constrained")
    figure.suptitle("Positional encoding, as it is added to the embeddings")
    for row, table in enumerate(tables):
        values, products = table.table, table.products()
        encoding, pairs, by_distance = (
            figure.add_subplot(len(tables), 3, 3 * row + column) for column in (1, 2, 3)
        )
        image = encoding.imshow(values, aspect="auto")
        figure.colorbar(image, ax=encoding, label="PE(i), no unit", shrink=0.8).ax.grid(False)
        title = f"PE ({table.name}): {values.shape[0]} positions x {values.shape[1]} dimensions"
        _name(encoding, title, "dimension (index)", "position i (tokens)")
        image = pairs.imshow(products, aspect="equal")
        figure.colorbar(image, ax=pairs, label="PE(i)·PE(j), no unit", shrink=0.8).ax.grid(False)
        title = "Products PE(i)·PE(j) of all pairs"
        _name(pairs, title, "position j (tokens)", "position i (tokens)")
        for axes in (encoding, pairs):
            axes.grid(visible=False)
        mean, low, high = table.products_by_distance()
        distances, label = np.arange(len(products)), "the same for every i"
        if not np.allclose(low, high):
            by_distance.fill_between(
                distances, low, high, color=SKY, alpha=0.5, label="range over i"
            )
            label = "mean over i"
        by_distance.plot(distances, mean, color=BLUE, label=label)
        by_distance.legend(loc="upper right")
        title = "Products PE(i)·PE(i + k) by distance"
        _name(by_distance, title, "distance k (tokens)", "PE(i)·PE(i + k), no unit")
    return figure


def draw_masks(masks: Masks, window: int | None) -> Figure:
    """Draw the padding masks of a batch, and the masks of both self-attentions."""
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
    _name(
        encoder,
        title,
        "key position in the source (tokens)",
        "query position in the source (tokens)",
    )
    _draw_keep(decoder, masks.decoder_TT, 0)
    title = f"Decoder self-attention, every sentence: nothing later{near}"
    _name(
        decoder,
        title,
        "key position in the target (tokens)",
        "query position in the target (tokens)",
    )
    _add_key(figure, "kept: takes part", "masked")
    return figure


def _draw_keep(axes: Axes, keep: Keeps, first: int) -> None:
    """Draw a mask [R, C]; its first row has number `first` + 1, its first column number 1."""
    rows, columns = keep.shape
    extent = (0.5, columns + 0.5, first + rows + 0.5, first + 0.5)
    colours = ListedColormap([_MASKED, _KEPT])
    axes.imshow(keep, aspect="auto", cmap=colours, vmin=0, vmax=1, extent=extent)
    axes.grid(visible=False)
    axes.tick_params(which="minor", length=0)
    for axis, start, count in ((axes.xaxis, 0, columns), (axes.yaxis, first, rows)):
        if max(rows, columns) <= _MAX_GRID:  # lines between the cells
            axis.set_ticks(np.arange(start + 1.5, start + count).tolist(), minor=True)
            axis.grid(which="minor", color="white", linewidth=0.4)
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))


def _add_key(figure: Figure, kept: str, masked: str) -> None:
    patches = [
        Patch(facecolor=colour, label=label, edgecolor=BLACK, linewidth=0.5)
        for colour, label in ((_KEPT, kept), (_MASKED, masked))
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=2)


def draw_lengths(sets: Sequence[SetLengths]) -> Figure:
    """Draw a histogram of the lengths of each corpus, by side."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle("Lengths of the corpora")
    longest = max(int(max(corpus.src.max(), corpus.tgt.max())) for corpus in sets)
    bin_width = max(1, longest // 60)
    bins = np.arange(0.5, longest + 0.5 + bin_width, bin_width)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, side in ((left, "source"), (right, "target")):
        colors = cycle((BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK))
        for corpus, color, style in zip(sets, colors, cycle(("-", "--", "-.", ":"))):
            lengths = corpus.src if side == "source" else corpus.tgt
            counts, _ = np.histogram(lengths, bins)
            label = (
                f"{corpus.name}: {len(lengths):,} pairs, median {np.median(lengths):.0f}, "
                f"longest {lengths.max()}"
            )
            percent = 100 * counts / len(lengths)
            axes.stairs(percent, bins, color=color, linestyle=style, label=label, linewidth=1.5)
        axes.legend(loc="upper right")
        name = f"length (tokens, eos included; bins of {bin_width})"
        _name(axes, side.capitalize(), name, "pairs (%)")
    left.set_ylim(0, left.get_ylim()[1] * (1 + 0.06 * len(sets)))  # for the legends
    return figure


def draw_batch(batches: Batches, budget: int) -> Figure:
    """Draw the tokens and padding of one batch cell by cell, and of all batches by size."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    part = "the first epoch" if batches.is_whole_epoch else "the beginning of the first epoch"
    figure.suptitle(
        f"Batches of {part}: {len(batches.sizes):,}, {batches.padding:.1%} padding; "
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
    """Draw the tokens and the padding of each batch, by length of its sentences."""
    sizes = sorted(batches.sizes, key=lambda size: max(size.src_width, size.tgt_width))
    edges = np.arange(len(sizes) + 1) + 0.5
    tokens = np.array([size.num_tokens for size in sizes])
    cells = np.array([size.num_cells for size in sizes])
    axes.stairs(tokens, edges, fill=True, color=_KEPT)
    axes.stairs(cells, edges, baseline=tokens, fill=True, color=_MASKED)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    axes.xaxis.set_major_formatter(_THOUSANDS)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(x=0.01)
    name = "batch (number, shortest sentences first)"
    _name(axes, "Tokens and padding of each batch", name, "tokens of both sides")


def watch(
    run: RunDir,
    sentence: str | None,
    directory: Path,
    warn: Callable[[str], None],
    every_s: float,
) -> Iterator[Path]:
    """Draw all, the curves whenever more was logged, and all again when the training ends.

    Args:
        run: the run folder.
        sentence: the one whose attention is drawn; None takes a validation sentence.
        directory: of the pictures.
        warn: called with each warning.
        every_s: seconds between two looks at the log.

    Yields:
        The path of each file once it is written.

    Raises:
        UserError: if no process is training and nothing can be drawn, or on a failed write.
    """
    if not run.is_locked():
        warn(f"nobody is training in {run.path}; it is drawn once.")
        yield from draw(run, sentence, directory, warn)
        return
    size = _size(run)
    try:
        yield from draw(run, sentence, directory, warn)
    except UserError as error:
        warn(f"{error} It is tried again when more was logged.")
    while run.is_locked():
        sleep(every_s)
        new_size = _size(run)
        if new_size != size and run.is_locked():
            size = new_size
            try:
                yield from draw_progress(run, directory)
            except UserError as error:
                warn(str(error))
    yield from draw(run, sentence, directory, warn)


def _size(run: RunDir) -> int:
    return run.metrics_path.stat().st_size if run.metrics_path.exists() else 0
