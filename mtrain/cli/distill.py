"""The verb `mtrain distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mtrain import api
from mtrain.cli import console, options
from mtrain.cli.ranks import exit_when_stopped
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import SINGLE


def distill(
    config: options.ConfigArgument,
    teacher: Annotated[
        list[Path],
        typer.Option(
            metavar="RUN", help="A trained run; several are an ensemble.", show_default=False
        ),
    ],
    student: Annotated[
        Literal["deep-shallow", "6-1", "12-1", "6-2", "tiny"],
        typer.Option(
            help="Encoder and decoder layers, as wide as the teacher; deep-shallow is 6-1."
        ),
    ] = "deep-shallow",
    mono: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="More text in the source language; repeatable."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Of the student; run_dir with its name if absent."),
    ] = None,
    beam: options.BeamOption = None,
    device: options.DeviceOption = "auto",
    set_: options.SetOption = None,
) -> None:
    """Train a smaller model on what larger ones translate.

    The teacher translates the sources of the training text, the student learns from these pairs and
    from the real ones, and a table compares the two. Goes on if it was stopped.

    Example: mtrain distill en-de.yaml --teacher runs/en-de --student 6-1
    """
    settings, teachers = api.load_config(config, set_ or []), [RunDir(path) for path in teacher]
    run_dir = run or f"{settings.run_dir}-{student}"
    corpus = Path(f"{run_dir}-pairs")
    from mtrain.augmentation import augment as augmenting
    from mtrain.augmentation import distill as distilling
    from mtrain.run.load_model import LoadOptions
    from mtrain.run.logger import PythonLog

    request = augmenting.AugmentRequest(
        "forward",
        mono or [],
        True,
        teachers,
        corpus,
        options.given({"beam": beam}),
        loading=LoadOptions(device),
    )
    student_config = distilling.student_config(settings, teachers[0], student, corpus, run_dir)
    with exit_when_stopped(run_dir):
        augmenting.augment(request, settings, PythonLog(), console.warn)
        api.train_together(student_config, SINGLE, has_bar=True)
    console.put(distilling.compare(teachers, RunDir(Path(run_dir)), device), None)
