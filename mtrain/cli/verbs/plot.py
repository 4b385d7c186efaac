"""The verb `mtrain plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtrain import api
from mtrain.cli import console, options
from mtrain.errors import require_package


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
        typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="With --watch: 10 if absent."),
    ] = None,
) -> None:
    """Draw the training and the model, as PNG and SVG.

    Example: mtrain plot runs/demo --sentence "The old farmer is tired."
    """
    options.require("--watch", {} if watch else {"every": every})
    if not watch:
        console.put(map(str, api.plot(run, sentence=sentence, directory=out)), None)
        return
    require_package("matplotlib", "mtrain plot", "'mtrain[plot]'")
    from mtrain.plots import draw
    from mtrain.run.run_dir import RunDir

    drawn = draw.watch(RunDir(run), sentence, out or run / "plots", console.warn, every or 10.0)
    console.put(map(str, drawn), None)
