"""Draw the pictures of a run, as PNG and SVG, from the numbers that `collect` reads.

The colours, cividis and those of Okabe and Ito, differ in grey and to colour-blind readers.
pyplot is not used, because it keeps every figure in memory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from time import sleep
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mtrain.data.batch import Lengths
from mtrain.errors import ConfigError, UserError
from mtrain.io.atomic import whole_file
from mtrain.plots.collect import (
    AttentionPicture,
    Batches,
    CheckpointMark,
    Curves,
    Floats,
    Keeps,
    Pictures,
    attention_masks,
    gather,
    padding,
    products_by_distance,
    read_curves,
)
from mtrain.plots.heatmaps import draw_heatmaps, fonts, missing_fonts, readable
from mtrain.run.run_dir import RunDir

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
_KEPT, _MASKED = "#00336f", "#e8d868"  # near the two ends of cividis
_MAX_GRID = 50  # cells of a side between which lines are drawn
_MAX_ROWS = 24  # sentences of a batch whose masks are drawn
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.titley": 1.0,  # or matplotlib measures all labels to find a place
    "figure.dpi": 130,
    "figure.titlesize": 12,
    "font.size": 9,
    "grid.color": "#dddddd",
    "image.cmap": "cividis",
    "image.interpolation": "none",
    "legend.fontsize": 8,
    "svg.hashsalt": "mtrain",
    "text.parse_math": False,  # a dollar sign begins no formula
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


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
    if pictures.attention:
        lacking = missing_fonts(pictures.attention.source + pictures.attention.translation)
        if lacking is not None:
            warn(lacking)
    yield from _write(pictures, run, directory)


def _write(pictures: Pictures, run: RunDir, directory: Path) -> Iterator[Path]:
    for name, draw_figure in _figures(pictures, run.path.resolve().name):
        for suffix, encoded in encode(draw_figure).items():
            path = directory / f"{name}.{suffix}"
            with whole_file(path) as temp_path:
                temp_path.write_bytes(encoded)
            yield path


def encode(draw_figure: Callable[[], Figure]) -> dict[str, bytes]:
    """Return the picture as PNG and as SVG, with the same bytes on each call."""
    with matplotlib.style.context(["default", _STYLE | {"font.family": fonts()}]):
        figure, png, svg = draw_figure(), io.BytesIO(), io.BytesIO()
        FigureCanvasAgg(figure).print_png(png)  # type: ignore[no-untyped-call]
        figure.set_layout_engine("none")  # keep the layout of the PNG
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return {"png": png.getvalue(), "svg": svg.getvalue()}


def _figures(pictures: Pictures, run_name: str) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield the name of each picture, and the function that draws it."""
    config, attention, batches = pictures.config, pictures.attention, pictures.batches
    if pictures.curves:
        training = config.training
        losses = training.label_smoothing, training.consistency is not None
        yield "curves", partial(draw_curves, pictures.curves, run_name, *losses)
    if attention:
        yield "alignment", partial(draw_alignment, attention)
        for kind, layers in attention.maps.items():
            for layer in range(len(layers)):
                name = f"attention_{kind}_{layer + 1}"
                yield name, partial(draw_attention, attention, kind, layer)
    if pictures.positions:
        yield "positions", partial(draw_positions, pictures.positions)
    if batches:
        yield "masks", partial(draw_masks, batches, config.model.attention_window)
    if pictures.lengths:
        yield "lengths", partial(draw_lengths, pictures.lengths)
    if batches:
        yield "batch", partial(draw_batch, batches, config.training.batch_tokens)


def draw_curves(
    curves: Curves, name: str, smoothing: float, has_divergence: bool = False
) -> Figure:
    """Draw losses, BLEU, learning rate and speed by step, and mark the chosen checkpoint.

    With `has_divergence`, the training loss includes the divergence of `training.consistency`,
    which the validation loss does not.
    """
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    figure.suptitle(readable(f"Training of {name}"))
    (loss, bleu), (lr, speed) = figure.subplots(2, 2, sharex=True)
    batches = "training batches" + ", with the consistency loss" * has_divergence
    for axes, key, color, style, label in (
        (loss, "loss", BLUE, "-", batches),
        (loss, "valid_loss", RED, "--", "validation set"),
        (bleu, "valid_bleu", RED, "--", "validation set, greedy search"),
        (lr, "lr", BLACK, "-", None),
        (speed, "tgt_tokens_per_s", GREEN, "-", None),
    ):
        steps, values = curves.by_key[key]
        if len(steps):
            marker = "o" if len(steps) <= 30 else ""  # markers show points that are few
            axes.plot(steps, values, style + marker, color=color, label=label, markersize=4)
        elif axes is not loss:
            text = "no validation yet" if axes is bleu else "no logged step yet"
            axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
    loss.set(title=f"Loss (label smoothing {smoothing:g})", ylabel="loss (nats per target token)")
    bleu.set(title="Quality at each validation", ylabel="BLEU (points of 100)")
    lr.set(title="Learning rate", ylabel="learning rate (no unit)")
    speed.set(title="Speed", ylabel="speed (target tokens per second)")
    for axes in (loss, bleu, lr, speed):
        axes.set_xlabel("step (updates)")
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
    return figure


def _draw_mark(loss: Axes, bleu: Axes, mark: CheckpointMark) -> None:
    for axes, label in ((loss, mark.text), (bleu, None)):
        if mark.first_step == mark.last_step:
            axes.axvline(mark.last_step, color=ORANGE, linestyle=":", label=label, linewidth=2)
        else:
            axes.axvspan(mark.first_step, mark.last_step, color=ORANGE, alpha=0.4, label=label)
    label = f"{mark.text}, BLEU {mark.bleu:.2f}"
    bleu.plot([mark.last_step], [mark.bleu], "*", color=ORANGE, label=label, ms=13, mec=BLACK)


def draw_attention(attention: AttentionPicture, kind: str, layer: int) -> Figure:
    """Draw the attention weights of each head of a layer; `kind` is encoder, decoder or cross."""
    src, tgt_in, tgt_out = attention.src, attention.tgt_in, attention.tgt_out
    title, rows, columns, row_name, column_name = {
        "encoder": ("Encoder self-attention", src, src, "source", "source"),
        "decoder": ("Decoder self-attention", tgt_out, tgt_in, "predicted", "previous"),
        "cross": ("Cross-attention", tgt_out, src, "predicted", "source"),
    }[kind]
    layers, value_name = attention.maps[kind], "attention weight\n(fraction of 1)"
    return draw_heatmaps(
        f"{title}, layer {layer + 1} of {len(layers)}",
        {f"head {head + 1}": weights for head, weights in enumerate(layers[layer])},
        (rows, columns),
        (f"{row_name} token", f"attends to {column_name} token", value_name),
        _notes(attention, "Each row sums to 1; white cells are exactly 0."),
    )


def draw_alignment(attention: AttentionPicture) -> Figure:
    """Draw the mean cross-attention, with a ring around the largest weight of each row."""
    heads = np.concatenate(attention.maps["cross"])
    mean = heads.mean(0)
    figure = draw_heatmaps(
        "Alignment: cross-attention, mean of all heads of all layers",
        {f"mean of {len(heads)} heads": mean},
        (attention.tgt_out, attention.src),
        ("predicted token", "source token", "mean attention weight\n(fraction of 1)"),
        _notes(attention, "Each row sums to 1; a ring marks its largest weight."),
    )
    rings, size = figure.axes[0], min(7.0, 345 / max(mean.shape))  # points: 0.6 of a cell
    for color, width in ((BLACK, 2.5), ("white", 1.2)):  # visible on any background
        rings.plot(mean.argmax(1), range(len(mean)), "o", mfc="none", mec=color, mew=width, ms=size)
    return figure


def _notes(attention: AttentionPicture, remark: str) -> list[str]:
    return [
        f"source ({attention.origin}): {attention.source}",
        f"translation (by this model): {attention.translation}",
        f"{remark} ␣ marks the start of a word.",
    ]


def draw_positions(tables: Mapping[str, Floats]) -> Figure:
    """Draw each table, the dot products of all pairs of its rows, and these by distance."""
    figure = Figure(figsize=(14, 0.6 + 4.2 * len(tables)), layout="constrained")
    figure.suptitle("Positional encoding, as it is added to the embeddings")
    rows = figure.subplots(len(tables), 3, squeeze=False)
    for (name, table), (encoding, pairs, by_distance) in zip(tables.items(), rows, strict=True):
        products = table.astype(np.float64) @ table.T.astype(np.float64)
        for axes, values, aspect, unit in (
            (encoding, table, "auto", "PE(i)"),
            (pairs, products, "equal", "PE(i)·PE(j)"),
        ):
            axes.grid(visible=False)
            image = axes.imshow(values, aspect=aspect)
            figure.colorbar(image, ax=axes, label=f"{unit}, no unit", shrink=0.8).ax.grid(False)
            axes.set_ylabel("position i (tokens)")
        size = f"{table.shape[0]} positions x {table.shape[1]} dimensions"
        encoding.set(title=f"PE ({name}): {size}", xlabel="dimension (index)")
        pairs.set(title="Products PE(i)·PE(j) of all pairs", xlabel="position j (tokens)")
        mean, low, high = products_by_distance(products)
        distances, label = np.arange(len(products)), "the same for every i"
        if not np.allclose(low, high):
            label, spread = "mean over i", "range over i"
            by_distance.fill_between(distances, low, high, color=SKY, alpha=0.5, label=spread)
        by_distance.plot(distances, mean, color=BLUE, label=label)
        by_distance.legend(loc="upper right")
        title, unit = "Products PE(i)·PE(i + k) by distance", "PE(i)·PE(i + k), no unit"
        by_distance.set(title=title, xlabel="distance k (tokens)", ylabel=unit)
    return figure


def draw_masks(batches: Batches, window: int | None) -> Figure:
    """Draw the padding masks of the most padded batch, and the masks of both self-attentions."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    batch, paddings = batches.most_padded, [padding([size]) for size in batches.sizes]
    number, count = 1 + int(np.argmax(paddings)), len(batch.src_BS)
    figure.suptitle(f"Keep-masks of training batch {number}, the most padded of {len(paddings)}")
    row = int((batch.src_keep_BS.sum(1) + batch.tgt_keep_BT.sum(1)).argmin())
    first = max(min(row - _MAX_ROWS // 2, count - _MAX_ROWS), 0)
    padded, attended = figure.subplots(2, 2)
    for axes, keep, side in (
        (padded[0], batch.src_keep_BS, "source"),
        (padded[1], batch.tgt_keep_BT, "target"),
    ):
        _draw_padding(axes, keep[first : first + _MAX_ROWS].numpy(), first, side)
        axes.set_title(f"Padding, {side}: {min(count, _MAX_ROWS)} of {count} sentences")
    near = f", at most {window} away" if window is not None else ""
    attended[0].set_title(f"Encoder self-attention, sentence {row + 1}: no padding{near}")
    attended[1].set_title(f"Decoder self-attention, every sentence: nothing later{near}")
    for axes, mask, side in zip(
        attended, attention_masks(batch, row, window), ("source", "target"), strict=True
    ):
        _draw_keep(axes, mask, 0)
        axes.set_xlabel(f"key position in the {side} (tokens)")
        axes.set_ylabel(f"query position in the {side} (tokens)")
    _add_key(figure, "kept: takes part", "masked")
    return figure


def _draw_padding(axes: Axes, keep: Keeps, first: int, side: str) -> None:
    _draw_keep(axes, keep, first)
    axes.set_xlabel(f"position in the {side} (tokens)")
    axes.set_ylabel("sentence of the batch (number)")


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


def draw_lengths(corpora: Mapping[str, tuple[Lengths, Lengths]]) -> Figure:
    """Draw a histogram of the lengths of each corpus, by side."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle("Lengths of the corpora")
    longest = max(int(lengths.max()) for sides in corpora.values() for lengths in sides)
    bin_width = max(1, longest // 60)
    bins = np.arange(0.5, longest + 0.5 + bin_width, bin_width)
    panels = figure.subplots(1, 2, sharey=True)
    for side, (axes, title) in enumerate(zip(panels, ("Source", "Target"), strict=True)):
        colors = cycle((BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK))
        for (name, sides), color, style in zip(
            corpora.items(), colors, cycle(("-", "--", "-.", ":"))
        ):
            lengths = sides[side]
            percent = 100 * np.histogram(lengths, bins)[0] / len(lengths)
            facts = f"median {np.median(lengths):.0f}, longest {lengths.max()}"
            label = f"{name}: {len(lengths):,} pairs, {facts}"
            axes.stairs(percent, bins, color=color, linestyle=style, label=label, linewidth=1.5)
        axes.legend(loc="upper right")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title=title, ylabel="pairs (%)")
        axes.set_xlabel(f"length (tokens, eos included; bins of {bin_width})")
    panels[0].set_ylim(0, panels[0].get_ylim()[1] * (1 + 0.06 * len(corpora)))  # for the legends
    return figure


def draw_batch(batches: Batches, budget: int) -> Figure:
    """Draw the tokens and padding of one batch cell by cell, and of all batches by size."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    part = "the first epoch" if batches.is_whole_epoch else "the beginning of the first epoch"
    figure.suptitle(
        f"Batches of {part}: {len(batches.sizes):,}, {padding(batches.sizes):.1%} padding; "
        f"budget {budget:,} tokens on the longer side, padding included"
    )
    panels = figure.subplot_mosaic([["source", "target"], ["sizes", "sizes"]])
    first = batches.first
    for side, keep in (("source", first.src_keep_BS), ("target", first.tgt_keep_BT)):
        _draw_padding(panels[side], keep.numpy(), 0, side)
        tokens = f"{keep.sum():,} tokens, {(~keep).sum():,} of padding"
        panels[side].set_title(f"First batch, {side}: {tokens}")
    sizes, axes = sorted(batches.sizes, key=lambda size: size.width), panels["sizes"]
    edges = np.arange(len(sizes) + 1) + 0.5
    num_tokens = np.array([size.num_tokens for size in sizes])
    num_positions = np.array([size.num_positions for size in sizes])
    axes.stairs(num_tokens, edges, fill=True, color=_KEPT)
    axes.stairs(num_positions, edges, baseline=num_tokens, fill=True, color=_MASKED)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    axes.xaxis.set_major_formatter(_THOUSANDS)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(x=0.01)
    axes.set(title="Tokens and padding of each batch", ylabel="tokens of both sides")
    axes.set_xlabel("batch (number, shortest sentences first)")
    _add_key(figure, "token", "padding")
    return figure


def watch(
    run: RunDir,
    sentence: str | None,
    directory: Path,
    warn: Callable[[str], None],
    every_s: float,
) -> Iterator[Path]:
    """Draw all, the curves whenever more was logged, and all again when the training ends.

    Yields each file as `draw` does, and checks the size of the log every `every_s` seconds.

    Raises:
        ConfigError: if the sentence is blank.
        UserError: if all cannot be drawn when no process is training; before, `warn` is called.
    """
    size = _size(run)
    if not run.is_locked():
        run.check_exists()
        warn(f"nobody is training in {run.path}; it is drawn once.")
    else:
        try:
            yield from draw(run, sentence, directory, warn)
        except ConfigError:
            raise
        except UserError as error:
            warn(f"{error} The curves are tried again when more was logged, the rest at the end.")
    while run.is_locked():
        sleep(every_s)
        new_size = _size(run)
        if new_size != size and run.is_locked():
            size = new_size
            try:
                curves = read_curves(run, [])
                yield from _write(Pictures(run.config, curves), run, directory)
            except UserError as error:
                warn(str(error))
    yield from draw(run, sentence, directory, warn)


def _size(run: RunDir) -> int:
    return run.metrics_path.stat().st_size if run.metrics_path.exists() else 0
