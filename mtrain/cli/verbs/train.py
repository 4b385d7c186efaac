"""The verb `mtrain train`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mtrain import api
from mtrain.cli import options
from mtrain.cli.ranks import exit_when_stopped, joined_process_group


def train(
    config: options.ConfigArgument,
    set_: options.SetOption = None,
    run: options.RunOption = None,
    log: Annotated[
        Literal["tensorboard"] | None,
        typer.Option(help="Write the numbers for it too, into RUN/tensorboard."),
    ] = None,
) -> None:
    """Train a translator; go on if it was stopped.

    Tokenizes first if that is not done, and resumes from the newest checkpoint.

    Example: mtrain train configs/demo.yaml --run runs/short --set training.max_steps=500
    """
    with joined_process_group(
        "the same command goes on from the last checkpoint."
    ) as process_group:
        settings = api.load_config(config, set_ or [], run)
        with exit_when_stopped(settings.run_dir, process_group):
            api.train_together(settings, process_group, log == "tensorboard", has_bar=True)
