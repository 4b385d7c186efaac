"""The verb `mtrain plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli import console, options
from mtrain.errors import ConfigError


def plot(
    run: options.RunArgument,
    sentence: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Whose attention to draw.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder; RUN/plots if absent.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Draw again and again, until the training ends.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Of --watch; 10 if absent."),
    ] = None,
) -> None:
    """Draw the training and the model, as PNG and SVG.

    Example: mtrain plot runs/demo --sentence "The old farmer is tired."
    """
    options.require("--watch", {} if watch else {"every": every})
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("`mtrain plot` must have matplotlib: pip install 'mtrain[plot]' adds it.")
    from mtrain.plot import draw
    from mtrain.run.run_dir import RunDir

    run_dir, directory = RunDir(run), out or run / "plots"
    if watch:
        drawn = draw.watch(run_dir, sentence, directory, console.warn, every or 10.0)
    else:
        drawn = draw.draw(run_dir, sentence, directory, console.warn)
    console.put(map(str, drawn), None)
