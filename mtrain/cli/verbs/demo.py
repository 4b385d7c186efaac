"""The verb `mtrain demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli import console
from mtrain.cli.ranks import exit_when_stopped


def demo(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run folder.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train and evaluate on mtrain's own corpus, in minutes.

    Example: mtrain demo runs/demo
    """
    from mtrain.demo import demo as demonstrating
    from mtrain.run.logger import Stderr

    with exit_when_stopped(directory):
        demonstrating.demo(directory, Stderr())
    console.put(demonstrating.report(directory, console.warn), None)
