"""The verb `mtrain doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from mtrain.cli import console, options


def doctor(
    run: options.RunArgument,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay/--no-replay", help="Make the last updates again, and compare the bytes."
        ),
    ] = True,
) -> None:
    """Check that a run folder is whole, and change nothing in it.

    A line for each part; the exit code is 2 if one is damaged.

    Example: mtrain doctor runs/demo --no-replay
    """
    from mtrain.doctor.doctor import examine
    from mtrain.run.logger import Stderr
    from mtrain.run.run_dir import RunDir

    verdicts = []

    def lines() -> Iterator[str]:
        for finding in examine(RunDir(run), Stderr(), replay):
            verdicts.append(finding.verdict)
            yield finding.line()

    console.put(lines(), None)
    if "FAILED" in verdicts:
        raise typer.Exit(2)
