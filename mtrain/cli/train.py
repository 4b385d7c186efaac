"""The verb `mtrain train`."""

from __future__ import annotations

from typing import Annotated

import typer

from mtrain import api
from mtrain.cli import options
from mtrain.cli.ranks import exit_when_stopped, together


def train(
    config: options.ConfigArgument,
    set_: options.SetOption = None,
    run: options.RunOption = None,
    log: Annotated[
        options.Log | None, typer.Option(help="Write the numbers for it too, into RUN/tensorboard.")
    ] = None,
) -> None:
    """Train a translator; go on if it was stopped.

    Tokenizes first if that is not done, and resumes from the newest checkpoint.

    Example: mtrain train configs/demo.yaml --run runs/short --set training.max_steps=500
    """
    with together("the same command goes on from the last checkpoint.") as team:
        settings = api.load_config(config, set_ or [], run)
        with exit_when_stopped(settings.run_dir, team):
            api.train_together(settings, team, tensorboard=log is options.Log.TENSORBOARD)
